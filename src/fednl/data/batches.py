"""From examples to tensors: right-padded batches with the loss on the right answer only."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fednl.data.examples import NeedleExample

IGNORED = -100


def collate(examples: Sequence[NeedleExample], pad_id: int, training: bool = True) -> dict[str, Tensor]:
    """Joins examples into one right-padded batch.

    What is padding is known by position, never by token id: an answer that holds the pad token still counts.

    Args:
        examples: at least one.
        pad_id: the token to fill up with; any existing one.
        training: with the right answer after each prompt; otherwise prompts only, and no labels.

    Returns:
        `input_ids`, `attention_mask` and `labels`, int64 `[batch, tokens]`. Labels are -100 except at the
        right answer's tokens, where they equal `input_ids` (Hugging Face's models shift them by one).
    """
    if not examples:
        raise ValueError("a batch needs at least one example")
    answers = [one.candidate_ids[one.gold] if training else () for one in examples]
    longest = max(len(one.prompt_ids) + len(answer) for one, answer in zip(examples, answers, strict=True))
    input_ids = torch.full((len(examples), longest), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED)
    for row, (one, answer) in enumerate(zip(examples, answers, strict=True)):
        prompt, end = len(one.prompt_ids), len(one.prompt_ids) + len(answer)
        input_ids[row, :end] = torch.tensor([*one.prompt_ids, *answer], dtype=torch.int64)
        attention_mask[row, :end] = 1
        labels[row, prompt:end] = input_ids[row, prompt:end]
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def iterate_batches(
    examples: Sequence[NeedleExample], batch: int, steps: int, rng: random.Random
) -> Iterator[list[NeedleExample]]:
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
