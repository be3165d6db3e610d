"""The text task: who holds what, what is scored, and that nothing is in two places."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fednl.data import collate, fillers
from fednl.data.client_names import RESERVED
from fednl.data.documents import documents, shares
from fednl.data.examples import Splits
from fednl.data.fillers import load_filler, split_regions, tokenize
from fednl.data.labelled_texts import LabelledText
from fednl.data.settings import DataSettings
from fednl.data.text import TextExample, TextSettings, build, client_sources
from fednl.errors import DataError, SettingsError

TOKENS = 90


def made(tokenizer: Any, sources: list[str], seed: int = 5, **data: Any) -> dict[str, Splits[TextExample]]:
    sizes = {"tokens": TOKENS, "clients": len(sources), "train": 7, "validation": 2, "test": 3}
    own = TextSettings(sources=tuple(sources))
    return build(DataSettings(**{**sizes, **data}), tokenizer, 16, "candidates", seed, own)


def ids_of(one: TextExample) -> tuple[int, ...]:
    return one.prompt_ids + one.candidate_ids[0]


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    for name, word in (("law", "court"), ("med", "ward")):
        lines = [f"The {word} sat on day {day} and heard case {day * 7 % 1009} of that year." for day in range(400)]
        (tmp_path / f"{name}.txt").write_text(" ".join(lines), encoding="utf-8")
    return [str(tmp_path / "law.txt"), str(tmp_path / "med.txt")]


def test_a_client_holds_a_source_and_every_token_but_the_first_is_scored(tokenizer: Any, two: list[str]) -> None:
    clients = made(tokenizer, two)
    assert list(clients) == ["law", "med"]
    for name, word in (("law", "court"), ("med", "ward")):
        splits = clients[name]
        assert [len(splits.train), len(splits.validation), len(splits.test)] == [7, 2, 3]
        for one in (*splits.train, *splits.validation, *splits.test):
            assert len(ids_of(one)) == TOKENS and word in tokenizer.decode(ids_of(one))
    batch = collate(clients["law"].train[:4], 0)
    assert batch["input_ids"].shape == (4, TOKENS) and bool((batch["labels"][:, 0] == -100).all())
    assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_client_is_not_called_by_a_word_of_the_tables(tokenizer: Any, two: list[str], name: str) -> None:
    """A client called "pooled" would train on everybody's texts, and one called "macro" vanish from the tables."""
    taken = Path(two[0]).rename(Path(two[0]).with_name(f"{name}.txt"))
    with pytest.raises(SettingsError, match=f'a client would be called "{name}"'):
        made(tokenizer, [str(taken), two[1]])


def test_splits_and_clients_of_one_source_share_no_sentence(tokenizer: Any, two: list[str]) -> None:
    clients = made(tokenizer, two, clients=5)
    assert list(clients) == ["law-1", "med-1", "law-2", "med-2", "law-3"]
    days: dict[tuple[str, str], set[str]] = {}
    for name, splits in clients.items():
        for split, some in vars(splits).items():
            texts = [tokenizer.decode(ids_of(one)) for one in some]
            # The first and the last sentence may be cut; whole ones say their day.
            days[name, split] = {part for text in texts for part in text.split(".") if "year" in part and "day" in part}
    held = [(where, day) for where, found in days.items() for day in found]
    assert len({day for _, day in held}) == len(held) > 20


def test_the_same_seed_gives_the_same_and_a_further_client_changes_nothing(tokenizer: Any, two: list[str]) -> None:
    assert made(tokenizer, two) == made(tokenizer, two)
    assert made(tokenizer, two)["law"].train != made(tokenizer, two, seed=6)["law"].train
    assert made(tokenizer, two)["law"].test == made(tokenizer, two, seed=6)["law"].test
    assert made(tokenizer, two, clients=1)["law"] == made(tokenizer, two)["law"]


def test_a_held_out_client_is_only_asked(tokenizer: Any, two: list[str]) -> None:
    held = made(tokenizer, two, hold_out_clients=("med",))
    assert not held["med"].train and not held["med"].validation and len(held["med"].test) == 3
    assert held["law"] == made(tokenizer, two)["law"]


@pytest.mark.parametrize(
    ("data", "answer", "error", "says"),
    [
        ({}, "letters", SettingsError, 'evaluation.answer is "letters"'),
        ({"tokens": 1}, "candidates", SettingsError, "at least 2"),
        ({"hold_out_clients": ("law", "med")}, "candidates", SettingsError, "every client"),
        ({"hold_out_clients": ("code",)}, "candidates", SettingsError, "choose from law, med"),
        ({"test": 500}, "candidates", DataError, r"law.txt holds \d+ stretches of 90 tokens"),
        ({"tokens": 20_000}, "candidates", DataError, "too small"),
        ({"clients": 60, "tokens": 2000}, "candidates", DataError, "holds 0 stretches of 2000 tokens"),
    ],
)
def test_what_cannot_be_is_refused(
    tokenizer: Any, two: list[str], data: dict[str, Any], answer: str, error: type[Exception], says: str
) -> None:
    settings = DataSettings(**{"tokens": TOKENS, "clients": 2, "train": 1, "validation": 0, "test": 1, **data})
    with pytest.raises(error, match=says):
        build(settings, tokenizer, 16, answer, 0, TextSettings(sources=tuple(two)))


def test_sources_are_told_apart_and_a_missing_one_is_named(tokenizer: Any) -> None:
    for sources in (("a.txt", "b/a.txt"), ("generated", "generated"), ()):
        with pytest.raises(ValidationError):
            TextSettings(sources=sources)
    with pytest.raises(SettingsError, match=r'text\.sources is "nowhere\.txt"'):
        made(tokenizer, ["nowhere.txt"])
    named = client_sources(DataSettings(clients=3), TextSettings(sources=("generated", "bbc-news/tech")))
    assert named == {"generated-1": "generated", "tech": "bbc-news/tech", "generated-2": "generated"}


def test_a_text_is_shared_out_whole_and_evenly(tokenizer: Any, two: list[str]) -> None:
    region = tokenize(load_filler(two[0]), tokenizer)
    parts = shares(region, 7)
    assert sum((part.ids for part in parts), ()) == region.ids
    assert sum((part.sentences for part in parts), ()) == region.sentences
    longest = max(map(len, tokenizer(list(region.sentences)).input_ids)) + 2
    assert all(math.isclose(len(part.ids), len(region.ids) / 7, abs_tol=longest) for part in parts)


def test_documents_of_a_held_out_text_are_of_all_of_it(tokenizer: Any, two: list[str]) -> None:
    everything = documents(two[0], tokenizer, 20, 600, held_out=True)
    tested = split_regions(load_filler(two[0]), tokenizer, 600)["test"].ids
    assert len(everything) == 20 and len({ids[:60] for ids in everything}) == 20
    assert everything[0][:60] != tested[:60]
    with pytest.raises(DataError, match="20 are asked for"):
        documents(two[0], tokenizer, 20, 600)


def test_a_packaged_set_is_a_filler_whole_or_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [LabelledText(f"Text {number} of {kind}.", kind, number) for number in range(6) for kind in ("tech", "art")]
    monkeypatch.setattr(fillers, "read_labelled", lambda name: rows)
    whole, tech = load_filler("bbc-news").text, load_filler("bbc-news/tech").text
    assert sorted(whole.split("\n\n")) == sorted(row.text for row in rows)
    kinds = [paragraph.split()[-1] for paragraph in whole.split("\n\n")]
    assert kinds != sorted(kinds) and kinds != sorted(kinds, reverse=True)
    assert tech.split("\n\n") == [text for text in whole.split("\n\n") if "tech" in text]
    with pytest.raises(SettingsError, match=r'data\.filler names "bbc-news/sport"; the classes .* art, tech'):
        load_filler("bbc-news/sport")
