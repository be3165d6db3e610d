"""RULER's eight needle tasks: special magic numbers, words or uuids in noise, prose, or among other needles."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fednl.data.ruler_text import Draft, noise, word_pairs

_SENTENCE = "One of the special magic {kind} for {key} is: {value}."
_HEAD = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} afterwards.\n"
)
_QUESTION = "\nWhat {are_all} special magic {kind} for {query} mentioned in the provided text?"
_PREFIX = " The special magic {kind} for {query} mentioned in the provided text {are}"
_DEPTHS = 40


@dataclass(frozen=True)
class Kind:
    """What is hidden where.

    Attributes:
        haystack: RULER's filler sentences, prose, or needles with other keys.
        key: what a key is.
        value: what a value is.
        keys: how many keys are hidden at least.
        values: values a key.
        queries: how many keys are asked for.
    """

    haystack: Literal["noise", "essay", "needle"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NEEDLE_TASKS = {
    "niah_single_1": Kind("noise"),
    "niah_single_2": Kind("essay"),
    "niah_single_3": Kind("essay", value="uuids"),
    "niah_multikey_1": Kind("essay", keys=4),
    "niah_multikey_2": Kind("needle"),
    "niah_multikey_3": Kind("needle", key="uuids", value="uuids"),
    "niah_multivalue": Kind("essay", values=4),
    "niah_multiquery": Kind("essay", queries=4),
}
"""The eight, by RULER's names. Source: arXiv 2404.06654, table 5."""


def needles(kind: Kind, rng: random.Random, units: int, tokens: int, prose: Sequence[str]) -> Draft:
    """Makes one question.

    Args:
        kind: a value of `NEEDLE_TASKS`.
        rng: draws keys, values and places.
        units: haystack: filler sentences, words of prose, or other needles.
        tokens: not used.
        prose: the filler's sentences.

    Source: arXiv 2404.06654, tables 2, 7 and 8; places as its code draws them: in prose at the ends of sentences, at
        depths of 40 even steps, elsewhere between any two lines. Keys and values are all different, which its code does
        not see to.
    """
    count = max(kind.keys, kind.queries)
    others = units if kind.haystack == "needle" else 0
    named = _draw(rng, kind.key, count + others)
    value_of = _draw(rng, kind.value, count * kind.values + others)
    hidden = [
        (key, value_of[place * kind.values : (place + 1) * kind.values]) for place, key in enumerate(named[:count])
    ]
    lines = [_line(kind, key, value) for key, found in hidden for value in found]
    rng.shuffle(lines)
    apart = [_line(kind, *pair) for pair in zip(named[count:], value_of[count * kind.values :], strict=True)]
    context, depths = _hide(kind, rng, lines, apart or noise(units), prose, units)
    asked = rng.sample(hidden, kind.queries)
    answers = tuple(value for _, found in asked for value in found)
    facts = _words_for(kind, [key for key, _ in asked])
    prompt = f"{_HEAD.format(**facts)}{context}{_QUESTION.format(**facts)}{_PREFIX.format(**facts)}"
    own = {line for line in lines if any(value in line for value in answers)}
    where = tuple(depth for line, depth in zip(lines, depths, strict=True) if line in own)
    return Draft(prompt, answers, where, answers)


def _words_for(kind: Kind, asked: Sequence[str]) -> dict[str, str]:
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    if kind.queries * kind.values == 1:
        one = kind.value.removesuffix("s")
        return {"some": "A", "are": "is", "are_all": "is the", "kind": one, "query": query}
    return {"some": "Some", "are": "are", "are_all": "are all the", "kind": kind.value, "query": query}


def _line(kind: Kind, key: str, value: str) -> str:
    return _SENTENCE.format(kind=kind.value, key=key, value=value)


def _draw(rng: random.Random, what: str, count: int) -> list[str]:
    """So many different keys or values."""
    if what == "words":
        return word_pairs(rng, count)
    if what == "numbers":
        return [str(number) for number in rng.sample(range(10**6, 10**7), count)]
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


def _hide(
    kind: Kind, rng: random.Random, lines: list[str], stack: list[str], prose: Sequence[str], units: int
) -> tuple[str, list[float]]:
    """Puts the lines into the haystack in their order; gives the text and each line's depth."""
    joint = "\n"
    if kind.haystack == "essay":
        stack, joint = _cut(prose, rng, units), " "
        steps = sorted(rng.sample(range(_DEPTHS), len(lines)))
        ends = [0]
        for sentence in stack:
            ends.append(ends[-1] + len(sentence) + 1)
        places = [_nearest(ends, ends[-1] * step / (_DEPTHS - 1)) for step in steps]
    else:
        places = sorted(rng.sample(range(len(stack) + len(lines)), len(lines)))
        places = [place - number for number, place in enumerate(places)]
    text = list(stack)
    for line, place in zip(reversed(lines), reversed(places), strict=True):
        text.insert(place, line)
    context = joint.join(text)
    return context, [context.index(line) / max(1, len(context) - len(line)) for line in lines]


def _cut(prose: Sequence[str], rng: random.Random, count: int) -> list[str]:
    """So many words of prose from a random sentence on, sentence by sentence, from the start again after the end."""
    found: list[str] = []
    place = rng.randrange(len(prose))
    while count > 0:
        parts = prose[place % len(prose)].split()[:count]
        found.append(" ".join(parts))
        count, place = count - len(parts), place + 1
    return found


def _nearest(ends: Sequence[int], target: float) -> int:
    return min(range(len(ends)), key=lambda place: abs(ends[place] - target))
