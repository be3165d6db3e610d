"""What RULER's tasks have in common: a draft of a prompt, and the words that keys are made of."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from fednl.data import words

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
"""RULER's filler sentences, in their order. Source: arXiv 2404.06654, table 2."""


@dataclass(frozen=True)
class Draft:
    """A prompt before it is known whether it fits.

    Attributes:
        prompt: the text, answer prefix included.
        answers: what a right answer contains.
        depths: where the evidence stands, as fractions of the haystack.
        once: texts that must occur in the prompt exactly once.
        distinct: whether what the answer turns on (counts, names) leaves one right answer.
    """

    prompt: str
    answers: tuple[str, ...]
    depths: tuple[float, ...] = ()
    once: tuple[str, ...] = ()
    distinct: bool = True

    @property
    def is_clear(self) -> bool:
        """Whether the question has one right answer."""
        return self.distinct and all(self.prompt.count(text) == 1 for text in self.once)


def noise(units: int) -> list[str]:
    """Gives so many of RULER's filler sentences, over and over, five a line; the last line may be shorter (ours)."""
    size = len(NOISE)
    return [" ".join(NOISE[: min(size, units - first)]) for first in range(0, units, size)]


def word_pairs(rng: random.Random, count: int) -> list[str]:
    """Draws distinct hyphenated words, as RULER's adjective-noun keys; none is part of another.

    With more than there are pairs, the others have a word of a third list in between.
    """
    first, second = words.PHRASE_FIRST, words.PHRASE_SECOND
    pairs = ["-".join(pair) for pair in product(first, second)]
    if count <= len(pairs):
        return rng.sample(pairs, count)
    threes = rng.sample(list(product(first, words.PLAIN_WORDS, second)), count - len(pairs))
    found = pairs + ["-".join(parts) for parts in threes]
    rng.shuffle(found)
    return found
