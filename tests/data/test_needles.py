"""The seven clients, placed in filler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare

from fednl.data.examples import NeedleExample, Splits
from fednl.data.fillers import SPLITS, load_filler, split_regions
from fednl.data.haystack import fractions
from fednl.data.needle_clients import CLIENTS, EVENT_WORDINGS
from fednl.data.needles import build
from fednl.data.partition import partition_rows
from fednl.data.settings import DataSettings
from fednl.errors import SettingsError

TOKENS, WINDOW_TOKENS = 700, 120

Make = Callable[..., DataSettings]


def _all(clients: dict[str, Splits]) -> Iterator[NeedleExample]:
    for splits in clients.values():
        yield from (*splits.train, *splits.validation, *splits.test)


def test_counts_names_and_indices(clients: dict[str, Splits]) -> None:
    assert list(clients) == list(CLIENTS)
    for name, splits in clients.items():
        for split, n in (("train", 40), ("validation", 4), ("test", 4)):
            examples = getattr(splits, split)
            labels = [(one.client, one.split, one.index) for one in examples]
            assert labels == [(name, split, i) for i in range(n)]


def test_the_budget_is_exact_and_the_question_comes_last(clients: dict[str, Splits], tokenizer: Any) -> None:
    for one in _all(clients):
        assert len(one.prompt_ids) == len(one.removed_ids) == TOKENS
        question = tokenizer.decode(one.prompt_ids[one.question_start :])
        assert question.startswith("\nQuestion: ")
        assert question.endswith(" Answer:")


def test_every_event_stands_where_its_span_says(clients: dict[str, Splits], tokenizer: Any) -> None:
    for one in _all(clients):
        for event in one.events:
            assert tokenizer.decode(one.prompt_ids[event.start : event.end]) == f" {event.text}"
            assert event.depth == event.start / one.question_start
        starts = [event.start for event in one.events]
        assert starts == sorted(starts)


def test_events_end_before_the_window_that_answers(clients: dict[str, Splits]) -> None:
    assert all(event.end <= TOKENS - WINDOW_TOKENS for one in _all(clients) for event in one.events)


def test_depths_are_the_papers_within_a_sentence(clients: dict[str, Splits]) -> None:
    for one in _all(clients):
        filler = one.question_start - sum(event.end - event.start for event in one.events)
        before = 0
        for event, fraction in zip(one.events, fractions(4), strict=True):
            assert event.start - before == pytest.approx(fraction * filler, abs=0.05 * filler + 1)
            before += event.end - event.start


def test_events_stand_between_sentences_where_one_is_near(clients: dict[str, Splits], tokenizer: Any) -> None:
    after: Counter[bool] = Counter()
    for one in _all(clients):
        for event in one.events:
            before = tokenizer.decode(one.prompt_ids[: event.start])
            after[before.rstrip()[-1] in ".!?"] += 1
    assert after[True] > 0.3 * after.total()


def test_the_answer_occurs_once_and_its_rivals_too(clients: dict[str, Splits], tokenizer: Any) -> None:
    for one in _all(clients):
        if one.client == "counter-state":
            continue
        haystack = tokenizer.decode(one.prompt_ids[: one.question_start])
        assert [haystack.count(candidate) for candidate in one.candidates] == [1, 1, 1, 1]
        assert one.candidates[one.gold] in one.events[one.queried].text


def test_without_events_only_the_events_are_gone(clients: dict[str, Splits], tokenizer: Any) -> None:
    for one in _all(clients):
        inside = {i for event in one.events for i in range(event.start, event.end)}
        changed = {i for i in range(TOKENS) if one.prompt_ids[i] != one.removed_ids[i]}
        assert changed <= inside
        text = tokenizer.decode(one.removed_ids[: one.question_start])
        assert not any(event.text in text for event in one.events)
        assert not any(wording in text for wording in EVENT_WORDINGS)
        if one.client != "counter-state":
            assert not any(candidate in text for candidate in one.candidates)


def test_candidates_are_encoded_as_they_continue_the_prompt(clients: dict[str, Splits], tokenizer: Any) -> None:
    for one in _all(clients):
        assert [tokenizer.decode(ids) for ids in one.candidate_ids] == [f" {text}" for text in one.candidates]
        assert len(set(one.candidates)) == 4


def test_no_filler_is_shared_between_the_splits(
    clients: dict[str, Splits], settings: Make, tokenizer: Any, filler_file: str
) -> None:
    regions = split_regions(load_filler(filler_file), tokenizer, TOKENS)
    texts = {split: tokenizer.decode(regions[split].ids) for split in SPLITS}
    for one in _all(clients):
        bounds = [0, *(edge for event in one.events for edge in (event.start, event.end)), one.question_start]
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            piece = tokenizer.decode(one.prompt_ids[start:end])
            assert piece in texts[one.split]
        for event in one.events:
            assert tokenizer.decode(one.removed_ids[event.start : event.end]) in texts[one.split]


def test_gold_and_queried_event_are_uniform_over_the_clients(settings: Make, tokenizer: Any) -> None:
    built = build(settings(train=150, validation=0, test=0), tokenizer, WINDOW_TOKENS, "candidates", 1)
    gold = Counter(one.gold for one in _all(built))
    queried = Counter(one.queried for one in _all(built) if one.client != "counter-state")
    assert chisquare([gold[i] for i in range(4)]).pvalue > 1e-4
    assert chisquare([queried[i] for i in range(4)]).pvalue > 1e-4


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(settings: Make, tokenizer: Any) -> None:
    first, again, other = (
        partition_rows(build(settings(), tokenizer, WINDOW_TOKENS, "candidates", seed)) for seed in (3, 3, 4)
    )
    assert first == again
    assert all(one.sha256 != two.sha256 for one, two in zip(first, other, strict=True))
    assert len({row.sha256 for row in first}) == len(first)


def test_an_example_does_not_depend_on_how_many_others_there_are(
    clients: dict[str, Splits], settings: Make, tokenizer: Any
) -> None:
    fewer = build(settings(clients=2, train=5), tokenizer, WINDOW_TOKENS, "candidates", 3)
    assert list(fewer) == ["passkey", "uuid-code"]
    for name, splits in fewer.items():
        assert splits.train == clients[name].train[:5]
        assert splits.test == clients[name].test


def test_held_out_clients_are_listed_with_test_examples_only(
    clients: dict[str, Splits], settings: Make, tokenizer: Any
) -> None:
    held = build(settings(hold_out_clients=("multi-key",)), tokenizer, WINDOW_TOKENS, "candidates", 3)
    assert list(held) == list(CLIENTS)
    assert held["multi-key"] == Splits([], [], clients["multi-key"].test)
    assert len(held["passkey"].train) == 6


def test_no_training_examples_is_no_error(settings: Make, tokenizer: Any) -> None:
    built = build(settings(train=0), tokenizer, WINDOW_TOKENS, "candidates", 3)
    assert all(splits.train == [] and len(splits.test) == 4 for splits in built.values())
    nothing = build(settings(train=0, validation=0, test=0), tokenizer, WINDOW_TOKENS, "candidates", 3)
    assert all(splits == Splits([], [], []) for splits in nothing.values())


def test_recall_has_the_examples_of_candidates(clients: dict[str, Splits], settings: Make, tokenizer: Any) -> None:
    assert build(settings(train=40), tokenizer, WINDOW_TOKENS, "recall", 3) == clients


def test_letters_list_the_options_and_answer_with_one(
    clients: dict[str, Splits], settings: Make, tokenizer: Any
) -> None:
    built = build(settings(train=40, tokens=900), tokenizer, 0, "letters", 3)
    for one, plain in zip(_all(built), _all(clients), strict=True):
        question = tokenizer.decode(one.prompt_ids[one.question_start :])
        listed = " ".join(f"{letter}) {text}" for letter, text in zip("ABCD", plain.candidates, strict=True))
        assert question.endswith(f"? {listed} Answer:")
        assert one.candidates == ("A", "B", "C", "D")
        assert [tokenizer.decode(ids) for ids in one.candidate_ids] == [" A", " B", " C", " D"]
        assert one.gold == plain.gold
        assert len(one.prompt_ids) == 900


def _number_after(text: str, mark: str) -> int:
    return int("".join(c for c in text.split(mark, 1)[1].split()[0] if c.isdigit()))


def test_a_window_too_small_is_refused_with_a_value_that_works(settings: Make, tokenizer: Any) -> None:
    with pytest.raises(SettingsError, match=r"memory\.window-tokens is 60 and cannot hold the question") as error:
        build(settings(), tokenizer, 60, "candidates", 3)
    workable = _number_after(str(error.value), "at least ")
    build(settings(), tokenizer, workable, "candidates", 3)
    with pytest.raises(SettingsError, match=rf"memory\.window-tokens is {workable - 1} "):
        build(settings(), tokenizer, workable - 1, "candidates", 3)


def test_letters_need_a_window_that_holds_the_options(settings: Make, tokenizer: Any) -> None:
    with pytest.raises(SettingsError, match=r"memory\.window-tokens is 120 .* options.*evaluation\.answer"):
        build(settings(), tokenizer, WINDOW_TOKENS, "letters", 3)


@pytest.mark.parametrize("window_tokens", [0, WINDOW_TOKENS, 200])
def test_a_budget_too_small_is_refused_with_the_smallest_that_works(
    settings: Make, tokenizer: Any, window_tokens: int
) -> None:
    with pytest.raises(SettingsError, match=r"data\.tokens is 300 and cannot hold 4 events") as error:
        build(settings(tokens=300), tokenizer, window_tokens, "candidates", 3)
    workable = _number_after(str(error.value), "at least ")
    built = build(settings(tokens=workable), tokenizer, window_tokens, "candidates", 3)
    for one in _all(built):
        assert len(one.prompt_ids) == len(one.removed_ids) == workable
        assert all(event.end <= workable - window_tokens for event in one.events)
    assert min(_slack(one, window_tokens) for one in _all(built)) == 0
    with pytest.raises(SettingsError, match=rf"data\.tokens is {workable - 1} "):
        build(settings(tokens=workable - 1), tokenizer, window_tokens, "candidates", 3)


def _slack(one: NeedleExample, window_tokens: int) -> int:
    """Tokens an example could do without: 8 before the first event, 4 between two, and the window are needed."""
    question = len(one.prompt_ids) - one.question_start
    events = sum(event.end - event.start for event in one.events)
    return len(one.prompt_ids) - events - max(question, window_tokens) - 8 - 4 * (len(one.events) - 1)


def test_where_the_window_reaches_far_back_the_events_move_up_alike(settings: Make, tokenizer: Any) -> None:
    built = build(settings(tokens=640, train=30), tokenizer, 220, "candidates", 3)
    gaps = [0, 0, 0]
    for one in _all(built):
        for i, (event, following) in enumerate(zip(one.events, one.events[1:], strict=False)):
            gaps[i] += following.start - event.end
    assert max(gaps) < 1.3 * min(gaps)


def test_no_fact_is_shared_between_the_splits(clients: dict[str, Splits]) -> None:
    for name, splits in clients.items():
        if name in ("counter-state", "multi-value"):  # a few numbers or words: single facts do recur
            continue
        sets = [{event.text for one in some for event in one.events} for some in vars(splits).values()]
        assert len(set.union(*sets)) == sum(map(len, sets))


@pytest.mark.parametrize(
    ("changes", "answer", "said"),
    [
        ({"clients": 8}, "candidates", r"data\.clients is 8.*at most 7"),
        (
            {"hold_out_clients": ("passkeys",)},
            "candidates",
            r'data\.hold-out-clients names "passkeys".*passkey',
        ),
        ({"clients": 2, "hold_out_clients": ("multi-key",)}, "candidates", r"does not take part"),
        ({}, "essay", r'evaluation\.answer is "essay".*candidates, recall, letters'),
        ({"filler": "no/such/file.txt"}, "candidates", r'data\.filler is "no/such/file\.txt"'),
    ],
)
def test_wrong_settings_are_named(
    settings: Make, tokenizer: Any, changes: dict[str, Any], answer: str, said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        build(settings(**changes), tokenizer, WINDOW_TOKENS, answer, 3)


@hypothesis_settings(max_examples=25)
@given(
    tokens=st.integers(560, 2500),
    window=st.integers(0, 300),
    events=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_budget_that_is_accepted_is_kept(
    settings: Make, tokenizer: Any, tokens: int, window: int, events: int, seed: int
) -> None:
    section = settings(tokens=tokens, events=events, train=1, validation=1, test=1)
    try:
        built = build(section, tokenizer, window, "candidates", seed)
    except SettingsError:
        return
    for one in _all(built):
        assert len(one.prompt_ids) == len(one.removed_ids) == tokens
        assert len(one.events) == events
        edges = [edge for event in one.events for edge in (event.start, event.end)]
        assert edges == sorted(edges)
        assert edges[0] >= 8
        assert edges[-1] <= min(one.question_start, tokens - window)


def test_training_prompts_of_mixed_lengths_are_whole_and_every_doubling_is_as_frequent(
    settings: Make, tokenizer: Any
) -> None:
    shortest = 420
    plain = build(settings(train=2), tokenizer, WINDOW_TOKENS, "candidates", 0)
    made = build(settings(shortest=shortest, train=60), tokenizer, WINDOW_TOKENS, "candidates", 0)
    lengths = []
    for name, splits in made.items():
        assert [*splits.validation, *splits.test] == [*plain[name].validation, *plain[name].test]
        for one in splits.train:
            lengths.append(len(one.prompt_ids))
            for event in one.events:
                assert tokenizer.decode(one.prompt_ids[event.start : event.end]) == f" {event.text}"
                assert event.end <= lengths[-1] - WINDOW_TOKENS
    assert min(lengths) >= shortest and max(lengths) <= TOKENS and len(lengths) == 60 * len(made)
    middle = (shortest * TOKENS) ** 0.5
    assert binomtest(sum(length < middle for length in lengths), len(lengths)).pvalue > 0.01
    again = build(settings(shortest=shortest, train=30), tokenizer, WINDOW_TOKENS, "candidates", 0)
    assert all(again[name].train == splits.train[:30] for name, splits in made.items())
    with pytest.raises(SettingsError, match=r"data\.shortest is 60 and cannot hold .* set it to at least"):
        build(settings(shortest=60), tokenizer, WINDOW_TOKENS, "candidates", 0)


def test_training_may_ask_for_more_of_a_haystack_and_testing_never_does(settings: Make, tokenizer: Any) -> None:
    one = build(settings(train=6, test=2), tokenizer, WINDOW_TOKENS, "candidates", 0)
    many = build(settings(train=6, test=2, questions=3), tokenizer, WINDOW_TOKENS, "candidates", 0)
    for client, splits in many.items():
        assert splits.test == one[client].test
        for example, plain in zip(splits.train, one[client].train, strict=True):
            assert plain.further == () and example.prompt_ids == plain.prompt_ids
            assert len(example.further) == (0 if client == "counter-state" else 2)
            texts = [event.text for event in example.events]
            asked = [texts[example.queried]]
            for question, answer in example.further:
                assert tokenizer.decode(question).startswith("\nQuestion: ")
                assert tokenizer.decode(question).endswith(" Answer:")
                asked += [text for text in texts if tokenizer.decode(answer).strip() in text]
            assert len(set(asked)) == len(asked) == (1 if client == "counter-state" else 3)
