"""Stretches of running text: long ones to read from end to end, and how a text is shared out."""

from __future__ import annotations

from collections.abc import Sequence

from fednl.data.examples import Tokenizer
from fednl.data.fillers import load_filler, split_regions, tokenize
from fednl.data.haystack import Region
from fednl.errors import DataError


def documents(
    filler: str, tokenizer: Tokenizer, count: int, tokens: int, *, held_out: bool = False, seed: int = 0
) -> list[tuple[int, ...]]:
    """Cuts documents out of text that no task trains on.

    They stand evenly spread over it, each begins with a sentence, and no token is in two of them.

    Args:
        filler: as `data.filler`; `"generated"` has no long-range sense, the others have.
        tokenizer: the backbone's.
        count: how many.
        tokens: tokens a document.
        held_out: the whole text is nobody's, as that of a held-out client; else the documents are of the part that
            every task keeps for testing.
        seed: of the text task whose text it is, which matters for `"generated"` alone: another seed is another text.

    Raises:
        DataError: the text is too short; the sentence says how many documents it holds.
    """
    text = load_filler(filler, seed)
    region = tokenize(text, tokenizer) if held_out else split_regions(text, tokenizer, tokens)["test"]
    return spread(region, count, tokens, filler)


def spread(region: Region, count: int, tokens: int, source: str) -> list[tuple[int, ...]]:
    """Cuts stretches out of a text, evenly spread, each beginning with a sentence, no token in two of them.

    Args:
        region: the text.
        count: how many.
        tokens: tokens a stretch.
        source: what the error calls the text.

    Raises:
        DataError: there is no room for so many.
    """
    room, free = len(region.ids) // max(1, count), 0
    found: list[tuple[int, ...]] = []
    for number in range(count):
        start = next((start for start in region.starts if start >= max(free, number * room)), len(region.ids))
        if start + tokens > len(region.ids):
            raise DataError(
                f"{source} holds {len(found)} stretches of {tokens} tokens in a part of {len(region.ids)} tokens, and "
                f"{count} are asked for; name a longer text, or ask for fewer or shorter."
            )
        found.append(region.ids[start : start + tokens])
        free = start + tokens
    return found


def shares(region: Region, number: int) -> Sequence[Region]:
    """Cuts a text into contiguous parts of about equal length, between sentences.

    Args:
        region: the text.
        number: how many parts, at least 1.
    """
    ends = [sum(start < place * len(region.ids) / number for start in region.starts) for place in range(1, number + 1)]
    return [region.part(first, last) for first, last in zip([0, *ends], ends, strict=False)]
