"""RULER's scores: greedy answers, and the share of wanted texts in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fednl.evaluation.rows import MACRO, Row
from fednl.evaluation.statistics import Interval, bootstrap_mean, macro_mean
from fednl.memory.sites import cache_argument


class RulerQuestion(Protocol):
    """What scoring reads of an example; `fednl.data.ruler.RulerExample` is one."""

    @property
    def task(self) -> str:
        """Which task it belongs to."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's tokens, the answer prefix last."""

    @property
    def answers(self) -> tuple[str, ...]:
        """Every text that a right answer contains."""

    @property
    def reserve_tokens(self) -> int:
        """How many tokens an answer may take."""


@dataclass(frozen=True)
class RulerAnswer:
    """One question's answer.

    Attributes:
        task: which task it belongs to.
        share: how much of what was wanted is in the answer, from 0 to 1.
        prompt_tokens: the prompt's length.
    """

    task: str
    share: float
    prompt_tokens: int


def match_all(answer: str, wanted: Sequence[str]) -> float:
    """Gives the share of wanted texts that an answer contains, whatever the case of letters.

    Args:
        answer: what the model wrote; control characters count as line breaks, and those around it as nothing.
        wanted: at least one text.

    Source: `string_match_all` of RULER's public code (arXiv 2404.06654), for one sample and without its factor of 100.
    """
    written = _cleaned(answer)
    return sum(text.lower() in written for text in wanted) / len(wanted)


def answer_ruler(
    model: nn.Module,
    tokenizer: Any,
    examples: Sequence[RulerQuestion],
    *,
    make_cache: Callable[[nn.Module], Any] | None = None,
    on_scored: Callable[[int], None] | None = None,
) -> list[RulerAnswer]:
    """Answers questions by greedy generation, one at a time, and scores each.

    Args:
        model: a causal language model, attached to a memory or not; `generate` is called on it.
        tokenizer: the backbone's.
        examples: the questions.
        make_cache: makes an empty cache; None for the model's own.
        on_scored: called with the number of questions scored so far.
    """
    found = []
    device = next(model.parameters()).device
    for example in examples:
        prompt = torch.tensor([example.prompt_ids], device=device)
        own = {} if make_cache is None else {cache_argument(model): make_cache(model)}
        with torch.no_grad():
            ids = model.generate(  # type: ignore[operator]
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=example.reserve_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                **own,
            )
        text = tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
        found.append(RulerAnswer(example.task, match_all(text, example.answers), prompt.shape[1]))
        if on_scored is not None:
            on_scored(len(found))
    return found


def ruler_rows(arms: dict[str, Sequence[RulerAnswer]], *, seed: int, tokens: int) -> list[Row]:
    """Makes the rows of a comparison: each arm's share of wanted texts, task by task and averaged over tasks.

    Args:
        arms: arm -> its answers.
        seed: the run's seed; also names the bootstrap's random stream.
        tokens: the length, answer budget included.

    Returns:
        Rows `{method, client, metric, value, n, low, high, seed, tokens}`: the client is the task, `macro` their mean;
        the metric is `match_all`, from 0 to 1 where RULER prints hundreds. There is no chance level: nothing is chosen.
    """
    rows = []
    for arm, answers in arms.items():
        tasks: dict[str, list[float]] = {}
        for answer in answers:
            tasks.setdefault(answer.task, []).append(answer.share)
        cells: dict[str, Interval] = {task: bootstrap_mean(parts, seed, shares=True) for task, parts in tasks.items()}
        cells[MACRO] = macro_mean(tasks, seed, shares=True)
        rows += [
            {"method": arm, "client": task, "metric": "match_all", "value": cell.value, "n": cell.n}
            | {"low": cell.low, "high": cell.high, "seed": seed, "tokens": tokens}
            for task, cell in cells.items()
        ]
    return rows


def _cleaned(answer: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", answer).strip().lower()
