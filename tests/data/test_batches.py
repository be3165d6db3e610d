"""Batches: padding, labels and order."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednl.data.batches import collate, iterate_batches
from fednl.data.examples import NeedleExample, Splits

PAD = 0


def _example(prompt: list[int], gold: list[int], index: int = 0) -> NeedleExample:
    return NeedleExample(
        client="c",
        split="train",
        index=index,
        prompt_ids=tuple(prompt),
        question_start=0,
        candidates=("a", "b", "c", "d"),
        candidate_ids=((7,), tuple(gold), (8,), (9,)),
        gold=1,
        events=(),
        queried=0,
        removed_ids=tuple(prompt),
    )


ids = st.lists(st.integers(0, 5), min_size=1, max_size=9)


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=5))
def test_only_the_right_answer_is_trained_and_pads_are_known_by_place(
    rows: list[tuple[list[int], list[int]]],
) -> None:
    batch = collate([_example(prompt, gold) for prompt, gold in rows], PAD)
    longest = max(len(prompt) + len(gold) for prompt, gold in rows)
    for i, (prompt, gold) in enumerate(rows):
        rest = longest - len(prompt) - len(gold)
        assert batch["input_ids"][i].tolist() == prompt + gold + [PAD] * rest
        assert batch["labels"][i].tolist() == [-100] * len(prompt) + gold + [-100] * rest
        assert batch["attention_mask"][i].tolist() == [1] * (len(prompt) + len(gold)) + [0] * rest
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_without_training_there_are_prompts_only() -> None:
    batch = collate([_example([1, 2, 3], [4]), _example([5], [6, 7])], PAD, training=False)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert bool((batch["labels"] == -100).all())


def test_a_real_batch(clients: dict[str, Splits], tokenizer: Any) -> None:
    examples = [splits.train[0] for splits in clients.values()]
    batch = collate(examples, tokenizer.pad_token_id)
    for row, one in enumerate(examples):
        kept = batch["labels"][row][batch["labels"][row] != -100]
        assert tokenizer.decode(kept.tolist()) == f" {one.candidates[one.gold]}"
        assert batch["attention_mask"][row].sum() == len(one.prompt_ids) + len(kept)


def test_an_empty_batch_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        collate([], PAD)


@given(st.integers(0, 23), st.integers(1, 7), st.integers(0, 40), st.integers(0, 99))
def test_batches_cover_a_pass_before_they_repeat(n: int, batch: int, steps: int, seed: int) -> None:
    examples = [_example([1], [2], index) for index in range(n)]
    batches = list(iterate_batches(examples, batch, steps, random.Random(seed)))
    assert len(batches) == (steps if n else 0)
    assert all(1 <= len(one) <= min(batch, n) for one in batches)
    per_pass = -(-n // batch)
    for first in range(0, len(batches), max(per_pass, 1)):
        seen = Counter(one.index for some in batches[first : first + per_pass] for one in some)
        assert max(seen.values()) == 1
        if first + per_pass <= len(batches):
            assert len(seen) == n
    assert batches == list(iterate_batches(examples, batch, steps, random.Random(seed)))


def test_passes_and_seeds_differ_in_order() -> None:
    examples = [_example([1], [2], index) for index in range(12)]

    def order(seed: int) -> list[int]:
        return [one.index for some in iterate_batches(examples, 4, 6, random.Random(seed)) for one in some]

    assert order(0)[:12] != order(0)[12:]
    assert order(0) != order(1)
    assert [one.index for one in examples] == list(range(12))
    with pytest.raises(ValueError, match="at least one"):
        list(iterate_batches(examples, 0, 1, random.Random(0)))


def test_further_questions_follow_the_first_answer_in_training_only() -> None:
    one = dataclasses.replace(_example([1, 2], [3]), further=(((4, 5), (6,)), ((7,), (8, 9))))
    batch = collate([one, _example([1], [2])], PAD)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["labels"][0].tolist() == [-100, -100, 3, -100, -100, 6, -100, 8, 9]
    assert batch["attention_mask"].sum(1).tolist() == [9, 2]
    assert collate([one], PAD, training=False)["input_ids"].tolist() == [[1, 2]]
