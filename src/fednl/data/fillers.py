"""Filler text: what surrounds the needles. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from fednl.data import grammar, standard_library
from fednl.data.examples import Tokenizer, encode_texts
from fednl.data.haystack import Region
from fednl.data.labelled_texts import read_labelled
from fednl.data.packaged_texts import PACKAGED_TEXTS
from fednl.errors import DataError, SettingsError
from fednl.seeding import python_rng

STANDARD_LIBRARY, GENERATED = "standard-library", "generated"
SPLITS = ("train", "validation", "test")
# Shares of the filler's tokens, in the order of the text.
SHARES = (0.6, 0.2, 0.2)
_GENERATED_SENTENCES = 12_000
_LONGEST_SENTENCE = 2_000


@dataclass(frozen=True)
class FillerText:
    """A filler and what a run records of it.

    Attributes:
        name: what the settings said.
        text: paragraphs, separated by blank lines.
        sha256: of the text in UTF-8, hexadecimal.
        size_bytes: its length in UTF-8.
    """

    name: str
    text: str
    sha256: str
    size_bytes: int


def load_filler(name: str, seed: int = 0, key: str = "data.filler") -> FillerText:
    """Reads or makes the filler that `data.filler` names.

    Args:
        name: `"standard-library"`, `"generated"`, a packaged set of texts (`"bbc-news"`) or one class of it
            (`"bbc-news/tech"`), or the path of a UTF-8 text file (a byte-order mark is ignored).
        seed: of the generated sentences; the other fillers have no randomness.
        key: the setting that names it, for messages.

    Raises:
        SettingsError: the file does not exist or is no file, or the set has no such class.
        DataError: the file is not UTF-8 or holds no text, this Python has no sources to read, or a packaged set cannot
            be fetched.
    """
    if name.partition("/")[0] in PACKAGED_TEXTS:
        text = _packaged(name, key)
    elif name == STANDARD_LIBRARY:
        text = standard_library.prose()
    elif name == GENERATED:
        text = generated_text(python_rng(seed, "filler"))
    else:
        text = _read(name, key)
    raw = text.encode("utf-8")
    return FillerText(name, text, hashlib.sha256(raw).hexdigest(), len(raw))


def _packaged(name: str, key: str) -> str:
    """A packaged set's texts, one after the other in an order that mixes their classes; equal texts once."""
    whole, _, label = name.partition("/")
    rows = read_labelled(whole)
    if label and label not in (known := sorted({row.label for row in rows})):
        raise SettingsError(f'{key} names "{name}"; the classes of {whole} are: {", ".join(known)}.')
    texts = [row.text for row in rows if row.label == (label or row.label)]
    return "\n\n".join(sorted(texts, key=lambda text: hashlib.sha256(text.encode("utf-8")).digest()))


def _read(name: str, key: str) -> str:
    path = Path(name).expanduser()
    if not path.is_file():
        raise SettingsError(
            f'{key} is "{name}", which is not a file; give the path of a UTF-8 text file,'
            f' "{STANDARD_LIBRARY}" or "{GENERATED}".'
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"the filler file {name} is not UTF-8 (byte {error.start}); save it as UTF-8.") from None
    except OSError as error:
        raise DataError(f"the filler file {name} cannot be read ({error.strerror}).") from None
    if not text.strip():
        raise DataError(
            f"the filler file {name} holds no text ({path.stat().st_size} bytes); name one of some ten"
            f' thousand words or more, or "{STANDARD_LIBRARY}".'
        )
    return text


def sentences(text: str) -> Iterator[str]:
    """Cuts a text into its sentences, in order; a paragraph's first one begins with a line break.

    Marks other than `.`, `!` and `?` are not known; a stretch without marks is cut at white space.
    """
    for block in re.split(r"\n\s*\n", text):
        prefix = "\n"
        for sentence in re.split(r"(?<=[.!?])\s+(?=[\"'(]?[A-Z])", " ".join(block.split())):
            for piece in _pieces(sentence):
                yield prefix + piece
                prefix = " "


def _pieces(sentence: str) -> Iterator[str]:
    while len(sentence) > _LONGEST_SENTENCE:
        at = sentence.rfind(" ", 1, _LONGEST_SENTENCE)
        at = at if at > 0 else _LONGEST_SENTENCE
        yield sentence[:at]
        sentence = sentence[at:].lstrip()
    if sentence:
        yield sentence


def tokenize(filler: FillerText, tokenizer: Tokenizer) -> Region:
    """Encodes a filler sentence by sentence.

    A sentence that occurs again is dropped, so that two stretches of the region share none; so is one in
    which the tokenizer sees a special token.
    """
    kept = list({piece.strip(): piece for piece in reversed(list(sentences(filler.text)))}.values())[::-1]
    special = set(tokenizer.all_special_ids)
    pairs = [
        (text, ids)
        for text, ids in zip(kept, encode_texts(tokenizer, kept), strict=True)
        if ids and special.isdisjoint(ids)
    ]
    return _region(pairs)


def _region(pairs: list[tuple[str, list[int]]]) -> Region:
    starts = tuple(accumulate((len(ids) for _, ids in pairs), initial=0))[:-1]
    ids = tuple(token for _, piece in pairs for token in piece)
    return Region(ids, starts, tuple(text.strip() for text, _ in pairs))


def split_regions(filler: FillerText, tokenizer: Tokenizer, tokens: int) -> dict[str, Region]:
    """Cuts a filler into three contiguous stretches without a common sentence: train, validation, test.

    Args:
        filler: the text.
        tokenizer: the backbone's.
        tokens: the longest prompt; each stretch must be at least that long.

    Raises:
        DataError: the text is too small, naming it, its size and what is needed.
    """
    whole = tokenize(filler, tokenizer)
    regions = {}
    first = 0
    total = len(whole.ids)
    for split, share in zip(SPLITS, accumulate(SHARES), strict=True):
        last = sum(start < share * total - 0.5 for start in whole.starts)
        regions[split] = whole.part(first, last)
        first = last
    shortest = min(len(region.ids) for region in regions.values())
    if shortest < tokens:
        needed = math.ceil(filler.size_bytes * tokens / max(shortest, 1))
        raise DataError(
            f"the filler {filler.name} is too small: its {filler.size_bytes} bytes ({total} tokens without"
            f" repeated sentences) give one of training, validation and test {shortest} tokens and each needs"
            f" {tokens}; name a text of at least {needed} bytes in data.filler, or lower data.tokens."
        )
    return regions


def generated_text(rng: random.Random, count: int = _GENERATED_SENTENCES) -> str:
    """Makes plain sentences from a small grammar of ours, all different, in paragraphs of three to six.

    Args:
        rng: draws the sentences.
        count: how many.
    """
    seen: dict[str, None] = {}
    while len(seen) < count:
        seen[grammar.sentence(rng)] = None
    waiting = list(seen)
    paragraphs = []
    while waiting:
        size = rng.randint(3, 6)
        paragraphs.append(" ".join(waiting[:size]))
        waiting = waiting[size:]
    return "\n\n".join(paragraphs)
