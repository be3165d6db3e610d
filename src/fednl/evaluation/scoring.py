"""Scores questions by likelihood: the prompt is read once, every candidate continues from its cache."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fednl.data.examples import Example
from fednl.errors import NonFiniteError, SettingsError
from fednl.evaluation.outcomes import Outcome
from fednl.memory.sites import cache_argument
from fednl.models.context_vectors import answering

TIE_NATS = 1e-6
"""Scores closer than this are a tie: float32 does not tell them apart across batch sizes."""


def score_candidates(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    arm: str,
    make_cache: Callable[[nn.Module], Any],
    ids: str = "prompt_ids",
    zero_state_at_question: bool = False,
    batch: int = 8,
    piece_tokens: int = 2048,
    on_scored: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Answers each question by the likeliest candidate, and says whether free generation would have found it.

    A candidate's score is the mean log probability of its tokens after the prompt (length-normalised); the
    highest is chosen. Scores within `TIE_NATS` of the highest are tied, and a permutation of the positions
    that depends on client and index alone picks among them: a model that knows nothing is at chance. A candidate of
    the right one's very tokens is as right, and counts as the right one's position: some of MMLU's questions offer
    the right text twice.

    `recall` is read off the same pass: every token of the right candidate is the likeliest one after the
    prompt and the candidate's tokens before it. This equals greedy generation that reproduces the right
    candidate. If all tokens are likeliest, greedy emits the first, hence sees the same prefix and emits the
    second, and so on. If one is not, take the first such: greedy has emitted the tokens before it, and now
    emits another.

    The model is set to evaluation mode and put back afterwards; no gradient is recorded. Log probabilities
    are taken in float32 and averaged in float64; of the prompt only the last token's logits are computed.

    Args:
        model: a causal language model that follows Hugging Face's call, attached to a memory or not.
        examples: the questions; not modified.
        arm: the arm's name, for error messages.
        make_cache: makes an empty cache for the model, for example `fednl.MemoryCache`. It must know
            `batch_repeat_interleave(n)`, and `reset_state()` where `zero_state_at_question` is set; one with a true
            `one_at_a_time` is given tokens one by one after its first piece.
        ids: which tokens of an example are the prompt: `prompt_ids`, `removed_ids` (every event replaced by filler), or
            another attribute that the examples have.
        zero_state_at_question: forget the memory state (not the window) just before the question.
        batch: questions per forward pass, at least 1; results do not depend on it beyond rounding.
        piece_tokens: the prompt is read in pieces of at most this many tokens, to bound the attention mask.
        on_scored: called with the number of questions scored so far.

    Returns:
        One outcome per example, in the same order.

    Raises:
        NonFiniteError: a logit, or something on the way to it, is not a finite number; the sentence names the arm.
        SettingsError: `zero_state_at_question` is asked of a cache without a memory state.

    Source: four-choice needles, arXiv 2605.16350 appendix C.3; scoring by normalised likelihood as in the
        LM Evaluation Harness (`acc_norm`, here per token); ties and recall ours.
    """
    if batch < 1 or piece_tokens < 1:
        raise ValueError("batch and piece_tokens must be at least 1")
    found: dict[int, Outcome] = {}
    with evaluating(model):
        for rows, cuts in _groups(examples, ids, zero_state_at_question, batch):
            group = [examples[row] for row in rows]
            prompts = torch.tensor([getattr(example, ids) for example in group], device=_device(model))
            cache = make_cache(model)
            try:
                with answering(model, prompts.shape[1] - 1):
                    last = _read_prompts(model, prompts, cache, cuts, piece_tokens, arm)
                    outcomes = _score_group(model, group, last, cache, prompts.shape[1])
            except NonFiniteError as error:
                raise NonFiniteError(f'arm "{arm}" was not scored: {error}') from None
            found.update(zip(rows, outcomes, strict=True))
            if on_scored is not None:
                on_scored(len(found))
    return [found[row] for row in range(len(examples))]


def tie_order(client: str, index: int, candidates: int) -> list[int]:
    """Gives the order in which tied positions are preferred for one question; the same for every arm and run.

    Args:
        client: the question's client.
        index: the question's number.
        candidates: how many positions there are.

    Source: ours (positions sorted by the SHA-256 of client, index and position).
    """

    def key(position: int) -> bytes:
        return hashlib.sha256(f"tie\n{client}\n{index}\n{position}".encode()).digest()

    return sorted(range(candidates), key=key)


def _groups(
    examples: Sequence[Example], ids: str, zero_state: bool, batch: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Batches of equally long prompts, so that none is padded, and where to zero the state."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, example in enumerate(examples):
        alike[(len(getattr(example, ids)), example.question_start if zero_state else 0)].append(row)
    for (_, cut), rows in alike.items():
        for start in range(0, len(rows), batch):
            yield rows[start : start + batch], [cut] if zero_state else []


def _read_prompts(
    model: nn.Module, prompts: Tensor, cache: Any, cuts: list[int], piece_tokens: int, arm: str
) -> Tensor:
    """Runs the prompts into the cache and returns the last token's logits `[batch, vocabulary]`."""
    if cuts and not hasattr(cache, "reset_state"):
        raise SettingsError(f'arm "{arm}" zeroes a memory state, but the model has no memory: attach one.')
    length = prompts.shape[1]
    logits = None
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        if start in cuts:
            cache.reset_state()
        for first in range(start, end, piece_tokens):
            piece = prompts[:, first : min(first + piece_tokens, end)]
            logits = forward(model, piece, torch.ones_like(piece), cache, first, keep=1)
    if logits is None:
        raise ValueError("a prompt has no tokens")
    return logits[:, -1]


def forward(model: nn.Module, tokens: Tensor, mask: Tensor, cache: Any, past: int, keep: int) -> Tensor:
    """One call of the model on new tokens; `mask` is theirs, the `past` tokens before them are all real."""
    arguments = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": keep}
    if getattr(cache, "one_at_a_time", False):
        # No mask: a recurrent model has its past in its state, and padding comes only after what is scored.
        pieces = tokens.split(1, dim=1) if past else (tokens,)
        found = [model(input_ids=piece, **arguments).logits for piece in pieces]
        return torch.cat(found[-1:] if keep else found, dim=1)
    seen = torch.ones(tokens.shape[0], past, dtype=torch.long, device=tokens.device)
    logits: Tensor = model(input_ids=tokens, attention_mask=torch.cat([seen, mask], dim=1), **arguments).logits
    return logits


def _score_group(model: nn.Module, group: Sequence[Example], last: Tensor, cache: Any, past: int) -> list[Outcome]:
    """Continues every prompt with each of its candidates and turns the log probabilities into outcomes."""
    count = len(group[0].candidate_ids)
    flat = [candidate for example in group for candidate in example.candidate_ids]
    if any(len(example.candidate_ids) != count for example in group) or not all(flat):
        raise ValueError("every question needs the same number of candidates, each of at least one token")
    width = max(map(len, flat))
    # Right padding with the candidate's first token: any valid id does, causal attention never looks at it.
    tokens = torch.tensor([[*ids, *[ids[0]] * (width - len(ids))] for ids in flat], device=last.device)
    real = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in flat], device=last.device)
    logits = last.repeat_interleave(count, dim=0)[:, None]
    if width > 1:
        cache.batch_repeat_interleave(count)
        # The last token's own logits predict nothing that is scored, so the last token is not fed.
        logits = torch.cat([logits, forward(model, tokens[:, :-1], real[:, :-1], cache, past, keep=0)], dim=1)
    logits = logits.float()
    logprobs = logits.gather(2, tokens[..., None]).squeeze(2) - logits.logsumexp(dim=2)
    likeliest = logits.argmax(dim=2) == tokens
    if not bool(logprobs.isfinite()[real.bool()].all()):
        raise NonFiniteError(
            'the logits are not finite numbers: train with a smaller local-lr, or use dtype = "float32".'
        )
    scored = zip(logprobs.cpu().double().tolist(), likeliest.tolist(), flat, strict=True)
    rows = [(row[: len(ids)], hits[: len(ids)]) for row, hits, ids in scored]
    return [_outcome(example, rows[i * count : (i + 1) * count]) for i, example in enumerate(group)]


def _outcome(example: Example, rows: Sequence[tuple[list[float], list[bool]]]) -> Outcome:
    scores = [sum(logprobs) / len(logprobs) for logprobs, _ in rows]
    best = max(scores)
    order = tie_order(example.client, example.index, len(rows))
    chosen = next(position for position in order if scores[position] >= best - TIE_NATS)
    if example.candidate_ids[chosen] == example.candidate_ids[example.gold]:
        chosen = example.gold  # the same answer offered twice: whichever is named is right
    hits = rows[example.gold][1]
    return Outcome(
        client=example.client,
        index=example.index,
        chosen=chosen,
        gold=example.gold,
        correct=chosen == example.gold,
        recall=all(hits),
        nats_per_token=-scores[example.gold],
        token_accuracy=sum(hits) / len(hits),
        gold_tokens=len(hits),
    )


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module gets its own mode back, for a frozen part may differ."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
