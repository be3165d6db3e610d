"""From examples to tensors: right-padded batches with the loss on the right answers only."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fednl.data.examples import AnyExample, Demonstrated, Example

IGNORED = -100


def collate(examples: Sequence[Example], pad_id: int, training: bool = True) -> dict[str, Tensor]:
    """Joins examples into one right-padded batch.

    What is padding is known by position, never by token id: an answer that holds the pad token still counts.

    Args:
        examples: at least one.
        pad_id: the token to fill up with; any existing one.
        training: with the right answer after each prompt, and further questions with theirs where the example
            has some; otherwise prompts only, and no labels.

    Returns:
        `input_ids`, `attention_mask` and `labels`, int64 `[batch, tokens]`. Labels are -100 except at the
        right answers' tokens, where they equal `input_ids` (Hugging Face's models shift them by one).
    """
    if not examples:
        raise ValueError("a batch needs at least one example")
    rows = [_row(one) if training else (list(one.prompt_ids), []) for one in examples]
    input_ids, attention_mask = _padded([ids for ids, _ in rows], pad_id)
    labels = torch.full_like(input_ids, IGNORED)
    for row, (_, answers) in enumerate(rows):
        for start, end in answers:
            labels[row, start:end] = input_ids[row, start:end]
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def _row(example: Example) -> tuple[list[int], list[tuple[int, int]]]:
    """A training row: prompt, right answer, further questions with theirs; and where the answers are."""
    ids = list(example.prompt_ids)
    answers = []
    for question, answer in (((), example.candidate_ids[example.gold]), *example.further):
        ids += question
        answers.append((len(ids), len(ids) + len(answer)))
        ids += answer
    return ids, answers


def demonstrations(examples: Sequence[Demonstrated], pad_id: int) -> dict[str, Tensor]:
    """Joins examples with their answers, and a line break after each, into one right-padded batch.

    Args:
        examples: at least one.
        pad_id: the token to fill up with; any existing one.

    Returns:
        `input_ids` and `attention_mask`, int64 `[batch, tokens]`; `last`, `label` and `separator`, int64 `[batch]`: the
        last token of the prompt, of the answer, and of the line break.

    Source: I2CL (arXiv 2405.14660), demonstrations of one example each.
    """
    rows = [(one.prompt_ids, one.candidate_ids[one.gold], one.separator_ids) for one in examples]
    input_ids, attention_mask = _padded([[*prompt, *answer, *end] for prompt, answer, end in rows], pad_id)
    last = torch.tensor([len(prompt) - 1 for prompt, _, _ in rows])
    label = last + torch.tensor([len(answer) for _, answer, _ in rows])
    separator = label + torch.tensor([len(end) for _, _, end in rows])
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "last": last,
        "label": label,
        "separator": separator,
    }


def _padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Rows of token ids, filled up on the right, and 1 where a token is one of theirs."""
    input_ids = torch.full((len(rows), max(map(len, rows))), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        attention_mask[row, : len(ids)] = 1
    return input_ids, attention_mask


def iterate_batches(
    examples: Sequence[AnyExample], batch: int, steps: int, rng: random.Random
) -> Iterator[list[AnyExample]]:
    """Yields batches, shuffled anew in every pass; within a pass no example comes twice.

    The last batch of a pass may be smaller, and so are all batches of a client with fewer examples than
    `batch`. A client without examples yields nothing.

    Args:
        examples: one client's; not modified.
        batch: examples per batch, at least 1.
        steps: how many batches.
        rng: the order.
    """
    if batch < 1:
        raise ValueError("a batch needs at least one example")
    done = 0
    while examples and done < steps:
        order = list(range(len(examples)))
        rng.shuffle(order)
        for first in range(0, len(order), batch):
            if done == steps:
                return
            yield [examples[i] for i in order[first : first + batch]]
            done += 1
