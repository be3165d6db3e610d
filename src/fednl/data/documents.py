"""Long texts to read from end to end: stretches of held-out filler, none overlapping another."""

from __future__ import annotations

from fednl.data.examples import Tokenizer
from fednl.data.fillers import load_filler, split_regions
from fednl.errors import DataError


def documents(filler: str, tokenizer: Tokenizer, count: int, tokens: int) -> list[tuple[int, ...]]:
    """Cuts documents out of the part of a filler that no task trains on.

    They stand evenly spread over it, each begins with a sentence, and no token is in two of them.

    Args:
        filler: as `data.filler`; `"generated"` has no long-range sense, the others have.
        tokenizer: the backbone's.
        count: how many.
        tokens: tokens a document.

    Raises:
        DataError: the text is too short; the sentence says how many documents it holds.
    """
    region = split_regions(load_filler(filler), tokenizer, tokens)["test"]
    room, free = len(region.ids) // max(1, count), 0
    found: list[tuple[int, ...]] = []
    for number in range(count):
        start = next((start for start in region.starts if start >= max(free, number * room)), len(region.ids))
        if start + tokens > len(region.ids):
            raise DataError(
                f"the filler {filler} holds {len(found)} documents of {tokens} tokens in its held-out part of "
                f"{len(region.ids)} tokens, and {count} are asked for; name a longer text, or ask for fewer or shorter."
            )
        found.append(region.ids[start : start + tokens])
        free = start + tokens
    return found
