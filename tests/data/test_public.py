"""The public practice task must be practice, and nobody's data."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fednl.data import words
from fednl.data.needle_clients import CLIENTS, EVENT_WORDINGS
from fednl.data.public import build_public, public_needle
from fednl.data.relations import KEYS, RELATIONS, VALUES
from fednl.errors import SettingsError

TOKENS, WINDOW_TOKENS = 800, 120
# What a client's value looks like.
CLIENT_VALUES = re.compile(r"\d{7}|\d{4}|[A-Z]\d\d-[A-Z]\d\d-[A-Z]\d\d|[A-Z][a-z]+ \d{1,2}, \d{4}|[a-z]+-[a-z]+|[0-7]")
CLIENT_LISTS = (
    words.SURNAMES,
    words.MISSIONS,
    words.PHRASE_FIRST,
    words.PHRASE_SECOND,
    words.SECRET_KEYS,
    words.CODEWORDS,
)


@given(st.integers(0, 2**32), st.integers(2, 6))
def test_one_practice_example(seed: int, most: int) -> None:
    needle = public_needle(random.Random(seed), most)
    assert 2 <= len(needle.events) <= most
    gold = needle.candidates[needle.gold]
    assert len(set(needle.candidates)) == 4
    assert gold in needle.events[needle.queried]
    assert " ".join(needle.events).count(gold) == 1
    assert gold not in needle.question
    held = sum(any(text in event for event in needle.events) for text in needle.candidates)
    assert held == min(4, len(needle.events))
    assert "{" not in needle.question + "".join(needle.events)


@given(st.integers(0, 2**32))
def test_the_question_names_the_queried_key_and_no_other(seed: int) -> None:
    needle = public_needle(random.Random(seed))
    asked = set(re.findall(r"\w+", needle.question.lower()))
    shared = [
        len(asked & (set(re.findall(r"\w+", event.lower())) - _common(needle.events, i)))
        for i, event in enumerate(needle.events)
    ]
    assert shared[needle.queried] >= 1


def _common(events: tuple[str, ...], i: int) -> set[str]:
    """Words of event i that stand in every other event too."""
    others = [set(re.findall(r"\w+", event.lower())) for j, event in enumerate(events) if j != i]
    return set.intersection(*others)


def test_no_client_wording_and_no_client_value_occurs() -> None:
    rng = random.Random(1)
    clients = [CLIENTS[name](rng, 4) for name in CLIENTS for _ in range(200)]
    theirs = {event for needle in clients for event in needle.events}
    their_questions = {re.sub(r"\d\d[A-Z]|[A-Z]\w+'s", "", needle.question) for needle in clients}
    listed = {word for words_ in CLIENT_LISTS for word in words_}
    for _ in range(4000):
        needle = public_needle(rng)
        for event in needle.events:
            assert not any(wording in event for wording in EVENT_WORDINGS)
            assert event not in theirs
        assert needle.question not in their_questions
        for value in needle.candidates:
            assert not CLIENT_VALUES.fullmatch(value)
            assert value not in listed


def test_every_client_wording_is_watched_for() -> None:
    rng = random.Random(1)
    for name in CLIENTS:
        for event in CLIENTS[name](rng, 6).events:
            assert any(wording in event for wording in EVENT_WORDINGS)


def test_the_practice_is_varied() -> None:
    rng = random.Random(2)
    needles = [public_needle(rng) for _ in range(3000)]
    shapes = {re.sub(r"\d", "9", needle.candidates[needle.gold]) for needle in needles}
    assert len(shapes) > 300
    wordings = sum(len(relation.events) * len(relation.attributes) for relation in RELATIONS)
    assert wordings > 150
    assert {kind for relation in RELATIONS for kind in relation.values} == set(VALUES)
    assert {relation.key for relation in RELATIONS} == set(KEYS)
    assert len({event for needle in needles for event in needle.events}) > 8000
    gold = Counter(needle.gold for needle in needles)
    assert chisquare([gold[i] for i in range(4)]).pvalue > 1e-4
    four = Counter(needle.queried for needle in needles if len(needle.events) == 4)
    assert chisquare([four[i] for i in range(4)]).pvalue > 1e-4


def test_built_examples_keep_the_budget_and_the_window(tokenizer: Any) -> None:
    built = build_public(tokenizer, 30, TOKENS, WINDOW_TOKENS, 5)
    assert [one.index for one in built] == list(range(30))
    for one in built:
        assert (one.client, one.split) == ("public", "public")
        assert len(one.prompt_ids) == len(one.removed_ids) == TOKENS
        assert tokenizer.decode(one.prompt_ids[one.question_start :]).endswith(" Answer:")
        haystack = tokenizer.decode(one.prompt_ids[: one.question_start])
        assert haystack.count(one.candidates[one.gold]) == 1
        removed = tokenizer.decode(one.removed_ids[: one.question_start])
        assert not any(event.text in removed for event in one.events)
        for event in one.events:
            assert tokenizer.decode(one.prompt_ids[event.start : event.end]) == f" {event.text}"
            assert event.end <= TOKENS - WINDOW_TOKENS
    assert built[:12] == build_public(tokenizer, 12, TOKENS, WINDOW_TOKENS, 5)
    assert built != build_public(tokenizer, 30, TOKENS, WINDOW_TOKENS, 6)


def test_small_budgets_are_refused(tokenizer: Any) -> None:
    with pytest.raises(SettingsError, match=r"data\.tokens is 150"):
        build_public(tokenizer, 5, 150, 100, 0)
    with pytest.raises(SettingsError, match=r"memory\.window-tokens is 10"):
        build_public(tokenizer, 5, TOKENS, 10, 0)
    assert build_public(tokenizer, 0, TOKENS, WINDOW_TOKENS, 0) == []
