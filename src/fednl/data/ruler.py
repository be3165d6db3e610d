"""RULER's retrieval, tracing and aggregation tasks, made here at any length: its templates, our filler and words.

Eight needle tasks (`niah_*`), variable tracking (`vt`), common words (`cwe`) and frequent words (`fwe`). Nothing is
downloaded: where RULER takes essays, the haystack is a filler of ours or the user's own text, and words are from
`fednl.data.words`. A prompt is as long as its budget allows, to within one unit of its haystack: a word, a sentence of
filler, or in `niah_multikey_2` and `niah_multikey_3` a needle, of some 25 and 75 tokens. So it fills 95% of a budget of
twenty units or more (in those two 500 and 1,500 tokens), and of a smaller one all but one unit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from fednl.data.examples import Tokenizer, encode_texts
from fednl.data.fillers import load_filler, sentences
from fednl.data.ruler_lists import common_words, frequent_words, variable_tracking
from fednl.data.ruler_needles import NEEDLE_TASKS, needles
from fednl.data.ruler_text import Draft
from fednl.errors import DataError, SettingsError
from fednl.seeding import python_rng

Compose = Callable[[random.Random, int, int, Sequence[str]], Draft]
"""Makes a draft of (random stream, units of haystack, token budget, the filler's sentences)."""

_TRIES = 20


@dataclass(frozen=True)
class RulerTask:
    """One of RULER's tasks.

    Attributes:
        compose: makes a prompt with so many units of haystack.
        reserve_tokens: tokens kept free for the answer, as RULER does.
        least_units: the smallest haystack with which the task has one right answer.
    """

    compose: Compose
    reserve_tokens: int
    least_units: int = 0


RULER_TASKS: Mapping[str, RulerTask] = {
    **{name: RulerTask(partial(needles, kind), 128) for name, kind in NEEDLE_TASKS.items()},
    "vt": RulerTask(variable_tracking, 30),
    "cwe": RulerTask(common_words, 120, 11),
    "fwe": RulerTask(frequent_words, 50, 60),
}
"""RULER's tasks by its own names, without its two question answering ones, whose documents are downloads.

Source: Hsieh et al. 2024 (arXiv 2404.06654), table 5; answer budgets from its public code.
"""


@dataclass(frozen=True)
class RulerExample:
    """One RULER question.

    Attributes:
        task: a name in `RULER_TASKS`.
        index: its number within the task.
        prompt_ids: the prompt, which ends with RULER's answer prefix.
        prompt: the same as text.
        answers: every text that a right answer contains.
        depths: where the evidence stands, as fractions of the haystack's characters; empty where it is everywhere.
        reserve_tokens: how many tokens an answer may take.
    """

    task: str
    index: int
    prompt_ids: tuple[int, ...]
    prompt: str
    answers: tuple[str, ...]
    depths: tuple[float, ...]
    reserve_tokens: int


def build_ruler(
    name: str, count: int, tokens: int, tokenizer: Tokenizer, seed: int, filler: str = "generated"
) -> list[RulerExample]:
    """Makes a task's examples, each as long as the budget allows.

    Prompt and answer budget together never exceed `tokens`, and fall short of it by less than one more unit of
    haystack. An example depends on seed, task, budget, index and filler, and not on how many others there are.

    Args:
        name: a name in `RULER_TASKS`.
        count: how many.
        tokens: the length, answer budget included, as RULER counts it.
        tokenizer: the backbone's.
        seed: the run's seed.
        filler: what stands for RULER's essays, as `data.filler`.

    Raises:
        SettingsError: there is no such task, or the budget cannot hold template and needles; the smallest that does
            is named.
        DataError: the filler holds the answers almost everywhere.
    """
    if name not in RULER_TASKS:
        raise SettingsError(f'there is no RULER task "{name}"; choose from {", ".join(RULER_TASKS)}.')
    task = RULER_TASKS[name]
    prose = _prose(filler)
    made = [_Example(task, name, index, tokens, tokenizer, seed, prose) for index in range(count)]
    smallest = max((one.smallest for one in made), default=0)
    if smallest > tokens:
        raise SettingsError(
            f"data.tokens is {tokens} and cannot hold template, needles and {task.reserve_tokens} answer tokens of "
            f"RULER's {name}; set it to at least {smallest}."
        )
    return [one.fitted() for one in made]


@lru_cache(maxsize=2)  # made once for the many lengths and tasks of a benchmark
def _prose(filler: str) -> tuple[str, ...]:
    return tuple(piece.strip() for piece in sentences(load_filler(filler).text))


class _Example:
    """One example while its haystack's size is searched: every size is drawn from the same stream anew."""

    def __init__(
        self, task: RulerTask, name: str, index: int, tokens: int, tokenizer: Tokenizer, seed: int, prose: Sequence[str]
    ) -> None:
        self._task, self._name, self._index, self._tokens = task, name, index, tokens
        self._tokenizer, self._seed, self._prose = tokenizer, seed, prose
        self._made: dict[int, tuple[Draft, tuple[int, ...]]] = {}
        self._least = task.least_units

    @property
    def smallest(self) -> int:
        """The smallest budget that holds it; a budget's own templates may grow with it."""
        tokens, length = self._tokens, self._length(self._least)
        if length <= tokens:
            return length
        while length > tokens:
            tokens = length
            length = len(self._encoded(self._draft(self._least, tokens))) + self._task.reserve_tokens
        return tokens

    def fitted(self) -> RulerExample:
        """The example with the largest haystack that fits: the size is doubled, then halved in."""
        low = self._least
        high = max(8, 2 * low)
        while self._length(high) <= self._tokens:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._length(middle) <= self._tokens else (low, middle)
        draft, ids = self._made[low]
        self._made.clear()
        return RulerExample(
            self._name, self._index, ids, draft.prompt, draft.answers, draft.depths, self._task.reserve_tokens
        )

    def _length(self, units: int) -> int:
        if units not in self._made:
            draft = self._draft(units, self._tokens)
            self._made[units] = draft, self._encoded(draft)
        return len(self._made[units][1]) + self._task.reserve_tokens

    def _encoded(self, draft: Draft) -> tuple[int, ...]:
        return tuple(encode_texts(self._tokenizer, [draft.prompt])[0])

    def _draft(self, units: int, tokens: int) -> Draft:
        for attempt in range(_TRIES):
            rng = python_rng(self._seed, f"ruler/{self._name}/{attempt}", "", self._index)
            draft = self._task.compose(rng, units, tokens, self._prose)
            if draft.is_clear:
                return draft
        raise DataError(
            f"the filler holds what RULER's {self._name} asks for ({_TRIES} tries); name another text in data.filler."
        )
