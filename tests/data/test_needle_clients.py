"""What the clients ask, before anything is placed."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fednl.data import words
from fednl.data.needle_clients import CLIENTS, EVENT_WORDINGS

NAMES = list(CLIENTS)
KEYED = [name for name in NAMES if name != "counter-state"]
SHAPES = {
    "passkey": r"Officer \w+'s security passkey is ([1-9]\d{6})\.",
    "uuid-code": r"Operational access code for device \d\d[A-Z] is ([A-Z]\d\d-[A-Z]\d\d-[A-Z]\d\d)\.",
    "name-date": r"Officer \w+ filed the registration report on ([A-Z][a-z]+ \d{1,2}, \d{4})\.",
    "phrase-code": r"Mission \w+'s activation codeword is ([a-z]+-[a-z]+)\.",
    "counter-state": r"State base ([0-7])\.|State (?:in|de)crement\.",
    "multi-key": r"The \w+ secret is ([1-9]\d{3})\.",
    "multi-value": r"Codeword \d+: (\w+)\.",
}


def test_the_papers_seven_clients_in_its_order() -> None:
    assert list(SHAPES) == NAMES


@given(st.sampled_from(NAMES), st.integers(1, 32), st.integers(0, 2**32))
def test_contents_for_any_number_of_events(name: str, events: int, seed: int) -> None:
    needle = CLIENTS[name](random.Random(seed), events)
    assert len(needle.events) == events
    assert 0 <= needle.queried < events
    assert len(set(needle.candidates)) == len(needle.candidates) == 4
    for event in needle.events:
        assert re.fullmatch(SHAPES[name], event)
        assert any(wording in event for wording in EVENT_WORDINGS)
    assert needle.question.startswith("\nQuestion: ")


@given(st.sampled_from(KEYED), st.integers(1, 12), st.integers(0, 2**32))
def test_the_queried_event_holds_the_gold_answer_and_the_others_hold_the_distractors(
    name: str, events: int, seed: int
) -> None:
    needle = CLIENTS[name](random.Random(seed), events)
    values = [re.fullmatch(SHAPES[name], event)[1] for event in needle.events]  # type: ignore[index]
    assert len(set(values)) == events
    gold = needle.candidates[needle.gold]
    assert values[needle.queried] == gold
    others = set(needle.candidates) - {gold}
    assert len(others & set(values)) == min(events - 1, 3)
    text = " ".join(needle.events)
    assert text.count(gold) == 1
    assert gold not in needle.question


@given(st.integers(1, 12), st.integers(0, 2**32))
def test_the_question_names_the_queried_key_only(events: int, seed: int) -> None:
    needle = CLIENTS["multi-key"](random.Random(seed), events)
    keys = [event.split()[1] for event in needle.events]
    assert len(set(keys)) == events
    assert [key for key in keys if f" {key} " in needle.question] == [keys[needle.queried]]
    ranked = CLIENTS["multi-value"](random.Random(seed), events)
    assert [event.split()[1] for event in ranked.events] == [f"{i + 1}:" for i in range(events)]
    assert ranked.question == f"\nQuestion: What is codeword {ranked.queried + 1}?"


@given(st.integers(1, 20), st.integers(0, 2**32))
def test_the_counter_ends_where_its_steps_lead(events: int, seed: int) -> None:
    needle = CLIENTS["counter-state"](random.Random(seed), events)
    state = int(needle.events[0].removeprefix("State base ").rstrip("."))
    for step in needle.events[1:]:
        state += {"State increment.": 1, "State decrement.": -1}[step]
    assert needle.candidates[needle.gold] == str(state % 8)
    assert set(needle.candidates) <= set("01234567")
    assert needle.queried == events - 1


@pytest.mark.parametrize("name", NAMES)
def test_gold_place_and_queried_event_are_uniform(name: str) -> None:
    rng = random.Random(11)
    needles = [CLIENTS[name](rng, 4) for _ in range(4000)]
    gold = Counter(needle.gold for needle in needles)
    assert chisquare([gold[i] for i in range(4)]).pvalue > 1e-4
    if name in KEYED:
        queried = Counter(needle.queried for needle in needles)
        assert chisquare([queried[i] for i in range(4)]).pvalue > 1e-4
        joint = Counter((needle.gold, needle.queried) for needle in needles)
        assert chisquare([joint[i, j] for i in range(4) for j in range(4)]).pvalue > 1e-4


def test_the_candidates_alone_do_not_give_the_counter_away() -> None:
    rng = random.Random(5)
    ranks: Counter[int] = Counter()
    states: Counter[str] = Counter()
    for _ in range(8000):
        needle = CLIENTS["counter-state"](rng, 4)
        gold = needle.candidates[needle.gold]
        ranks[sorted(needle.candidates).index(gold)] += 1
        states[gold] += 1
    assert chisquare([ranks[i] for i in range(4)]).pvalue > 1e-4
    assert chisquare([states[str(i)] for i in range(8)]).pvalue > 1e-4


@pytest.mark.parametrize(
    "name",
    [
        "SURNAMES",
        "MISSIONS",
        "PHRASE_FIRST",
        "PHRASE_SECOND",
        "SECRET_KEYS",
        "CODEWORDS",
        "MONTHS",
        "FIRST_NAMES",
        "TOWNS",
        "VESSELS",
        "PLAIN_WORDS",
    ],
)
def test_no_word_of_a_list_is_part_of_another(name: str) -> None:
    listed = getattr(words, name)
    assert [(a, b) for a in listed for b in listed if a != b and a.lower() in b.lower()] == []
    assert len(set(listed)) == len(listed)


def test_the_lists_hold_enough_keys_for_the_most_events() -> None:
    for listed in (words.SURNAMES, words.MISSIONS, words.SECRET_KEYS, words.CODEWORDS):
        assert len(listed) >= 32
