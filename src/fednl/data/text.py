"""The text task: clients hold ordinary text, and every token of a stretch is to be foreseen."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from pydantic import Field, field_validator

from fednl.data.client_checks import check_clients
from fednl.data.documents import shares, spread
from fednl.data.examples import Splits, Tokenizer
from fednl.data.fillers import SPLITS, STANDARD_LIBRARY, load_filler, split_regions
from fednl.data.haystack import Region
from fednl.data.settings import DataSettings
from fednl.errors import SettingsError
from fednl.section import Section
from fednl.seeding import python_rng


class TextSettings(Section):
    """The `[text]` section: whose text is what.

    Args:
        sources: the texts, each as `data.filler` names one; the first client holds the first, and so on, and clients
            beyond the last source share the sources in turn, in stretches that follow one another.

    Source: ours; a client a domain, as the paper's clients are unlike in what they hold.
    """

    # Not strict: TOML and JSON know lists, and a frozen section holds a tuple.
    sources: tuple[str, ...] = Field(default=(STANDARD_LIBRARY,), min_length=1, strict=False)

    @field_validator("sources")
    @classmethod
    def _told_apart(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len({_stem(source) for source in value}) != len(value):
            raise ValueError("name each text once, and no two whose last part is the same")
        return value


@dataclass(frozen=True)
class TextExample:
    """A stretch of text. The first token is given, all others are scored, each from those before it.

    It has the shape of a question with one answer, so that training and scoring need nothing of their own.

    Attributes:
        client: whose text it is.
        split: `"train"`, `"validation"` or `"test"`.
        index: its number within client and split.
        prompt_ids: the first token.
        candidate_ids: one answer: the other tokens.
    """

    client: str
    split: str
    index: int
    prompt_ids: tuple[int, ...]
    candidate_ids: tuple[tuple[int, ...], ...]
    gold: int = 0
    further: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    removed_ids: tuple[int, ...] = ()
    question_start: int = 0
    task: str = ""


def build(
    settings: DataSettings, tokenizer: Tokenizer, window_tokens: int, answer: str, seed: int, own: TextSettings
) -> dict[str, Splits[TextExample]]:
    """Makes every client's training, validation and test stretches of `data.tokens` tokens.

    A text is cut into a part for each split, and each part among the clients who hold it, so that no sentence is in
    two splits or with two clients. Training stretches begin at a random sentence and may overlap; the others do not.

    Args:
        settings: the `[data]` section.
        tokenizer: the backbone's; nothing is added to it.
        window_tokens: not read: a stretch may be longer than a window or not.
        answer: `"candidates"`, the only format.
        seed: the run's seed.
        own: the `[text]` section.

    Raises:
        SettingsError: the answer format, a source or a held-out client cannot be as set.
        DataError: a text cannot be read, or is too short.
    """
    if answer != "candidates":
        raise SettingsError(f'evaluation.answer is "{answer}"; the text task knows "candidates".')
    if settings.tokens < 2:
        raise SettingsError(f"data.tokens is {settings.tokens}: the first is given, so take at least 2.")
    holders = client_sources(settings, own)
    check_clients(settings, list(holders))
    counts = Counter(holders.values())
    parts = {source: _parts(source, tokenizer, settings.tokens, number, seed) for source, number in counts.items()}
    clients = {}
    for client, source in holders.items():
        mine = {split: next(parts[source][split]) for split in SPLITS}
        trains = client not in settings.hold_out_clients
        rng = python_rng(seed, "text/train", client)
        train = _drawn(mine["train"], settings.train * trains, settings.tokens, source, rng)
        rest = {"validation": settings.validation * trains, "test": settings.test}
        found = {split: spread(mine[split], n, settings.tokens, source) for split, n in rest.items()}
        made = {
            split: [_example(client, split, index, ids) for index, ids in enumerate(some)]
            for split, some in ({"train": train} | found).items()
        }
        clients[client] = Splits(**made)
    return clients


def client_sources(settings: DataSettings, own: TextSettings) -> dict[str, str]:
    """Gives each client's source; a client is named after it, with a number where several hold it."""
    dealt = [own.sources[place % len(own.sources)] for place in range(settings.clients)]
    counts, seen = Counter(dealt), Counter[str]()
    found = {}
    for source in dealt:
        seen[source] += 1
        found[_stem(source) + (f"-{seen[source]}" if counts[source] > 1 else "")] = source
    return found


def unseen_sources(settings: DataSettings, own: TextSettings) -> list[str]:
    """The sources of which no client that trains holds a part; those of held-out clients."""
    holders = client_sources(settings, own)
    trained = {source for client, source in holders.items() if client not in settings.hold_out_clients}
    return [source for source in dict.fromkeys(holders.values()) if source not in trained]


def _stem(source: str) -> str:
    return PurePath(source).stem


def _parts(source: str, tokenizer: Tokenizer, tokens: int, holders: int, seed: int) -> dict[str, Iterator[Region]]:
    """Each split's part of a text, cut among those who hold it."""
    regions = split_regions(load_filler(source, seed, "text.sources"), tokenizer, tokens)
    return {split: iter(shares(region, holders)) for split, region in regions.items()}


def _drawn(region: Region, count: int, tokens: int, source: str, rng: random.Random) -> list[tuple[int, ...]]:
    """Stretches that begin at random sentences."""
    usable = sum(start + tokens <= len(region.ids) for start in region.starts)
    if count and not usable:
        spread(region, 1, tokens, source)  # says that there is no room
    starts = [region.starts[rng.randrange(usable)] for _ in range(count)]
    return [region.ids[start : start + tokens] for start in starts]


def _example(client: str, split: str, index: int, ids: tuple[int, ...]) -> TextExample:
    return TextExample(client, split, index, ids[:1], (ids[1:],))
