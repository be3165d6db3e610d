"""RULER's variable tracking, common words and frequent words."""

from __future__ import annotations

import random
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise, permutations, product

from fednl.data import words
from fednl.data.ruler_text import NOISE, Draft, noise

HOPS = 4
COMMON = 10
ALPHA = 2.0
LONG = 4096
"""From this budget on, RULER's counts for long lists hold."""

_VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {value} in the text above."
)
# "assgined" stands so in RULER's code, and so in every published score.
_VT_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined the "
    "value {value}, they are: "
)
_CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
_CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
_FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
_FWE_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
_WORKED_LINES = 15
_WORKED_SHARE = 8
_INNER = 8


def variable_tracking(rng: random.Random, units: int, tokens: int, prose: Sequence[str]) -> Draft:
    """Hides one chain of five assignments in filler sentences, after a worked example; asks for all five names.

    Args:
        rng: draws names, value and places.
        units: filler sentences.
        tokens: the budget; the worked example's filler is 15 lines (RULER has 10 or 15, by tokenizer), or as many as
            fill an eighth of the budget.
        prose: not used.

    Source: arXiv 2404.06654, tables 2, 5 and 8, and its public code, down to the space that ends a line of two names
        and the two before the worked answer. Ours: the shorter worked example for short budgets, and that links may
        stand together or last.
    """
    sentence_tokens = 6
    worked = len(NOISE) * min(_WORKED_LINES, tokens // (_WORKED_SHARE * sentence_tokens * len(NOISE)))
    text, names, _, _ = _chain(rng, worked, letters=3)
    example = f"{text} {' '.join(names)}\n\n"
    text, names, value, depths = _chain(rng, units, letters=5)
    return Draft(example + text, tuple(names), depths, (f"= {value}",))


def _chain(rng: random.Random, units: int, letters: int) -> tuple[str, list[str], str, tuple[float, ...]]:
    """Question and prefix, the names, the value, and the assignments' depths."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [] if name in names else [name]
    value = str(rng.randrange(10_000, 100_000))
    links = [f"VAR {names[0]} = {value}"] + [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
    lines = noise(units)
    places = sorted(rng.sample(range(len(lines) + len(links)), len(links)))
    for place, assignment in zip(places, links, strict=True):
        lines.insert(place, assignment)
    depths = tuple(place / max(1, len(lines) - 1) for place in places)  # in lines, which are of one length
    facts = {"context": "\n".join(lines), "value": value, "count": len(names)}
    return _VT.format(**facts) + _VT_PREFIX.format(**facts), names, value, depths


def common_words(rng: random.Random, units: int, tokens: int, prose: Sequence[str]) -> Draft:
    """Numbers a shuffled list in which ten words come often and the others seldom, after a worked example.

    Args:
        rng: draws words and order.
        units: how many different words there are, more than ten.
        tokens: the budget; below 4,096 RULER's smaller counts hold.
        prose: not used.

    Source: arXiv 2404.06654, tables 2 and 5; the counts for short budgets from its public code.
    """
    often, seldom = (30, 3) if tokens >= LONG else (6, 1)
    shot = (40, 10, 3) if tokens >= LONG else (20, 3, 1)
    drawn = _vocabulary(rng, shot[0] + units)
    context, common = _numbered(rng, drawn[: shot[0]], shot[1], shot[2])
    listed = " ".join(f"{number}. {word}" for number, word in enumerate(common, 1))
    example = f"{_CWE.format(context=context)}{_CWE_PREFIX} {listed}\n"
    context, common = _numbered(rng, drawn[shot[0] :], often, seldom)
    return Draft(f"{example}{_CWE.format(context=context)}{_CWE_PREFIX}", tuple(common))


def _numbered(rng: random.Random, vocabulary: Sequence[str], often: int, seldom: int) -> tuple[str, list[str]]:
    common = list(vocabulary[:COMMON])
    listed = common * often + list(vocabulary[COMMON:]) * seldom
    rng.shuffle(listed)
    return " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1)), common


def _vocabulary(rng: random.Random, count: int) -> list[str]:
    """So many different words, plain ones and, where they are too few, joined ones; none is part of another."""
    return rng.sample(_words()[: max(count, len(_plain_words()))], count)


@cache
def _words() -> list[str]:
    """Plain words, then joined ones, the shorter first.

    Only inner parts stand between outer ones, so that no shorter word is part of a longer one.
    """
    plain = _plain_words()
    parts = [part for part in words.PHRASE_FIRST if not any(word in part for word in plain)]
    outer, inner = parts[_INNER:], parts[:_INNER]
    longer = chain(product(outer, inner, outer), product(outer, inner, inner, outer))
    return plain + ["-".join(some) for some in chain(permutations(outer, 2), longer)]


@cache
def _plain_words() -> list[str]:
    found = dict.fromkeys([*words.PLAIN_WORDS, *words.ANIMALS, *words.COLOURS, *words.PHRASE_SECOND])
    return [word for word in found if not any(word != other and word in other for other in found)]


def frequent_words(rng: random.Random, units: int, tokens: int, prose: Sequence[str]) -> Draft:
    """Shuffles invented words whose counts fall with the square of their rank; the commonest is an ellipsis.

    Args:
        rng: draws words and order.
        units: how many words the counts are shares of; rounding leaves somewhat fewer.
        tokens: the budget; RULER's vocabulary is a fiftieth of it.
        prose: not used.

    Source: arXiv 2404.06654, section 3 and table 5 (alpha 2.0); form and vocabulary from its public code.
    """
    size = max(5, tokens // 50)
    vocabulary = ["..."]
    while len(vocabulary) < size:
        word = "".join(rng.choices(string.ascii_lowercase, k=6))
        vocabulary += [] if word in vocabulary else [word]
    whole = sum(rank**-ALPHA for rank in range(1, 10_000)) + 1 / 10_000  # zeta(2), its tail by an integral
    counts = [int(units * rank**-ALPHA / whole) for rank in range(1, size + 1)]
    text = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    rng.shuffle(text)
    ranked = [count for word, count in Counter(text).most_common() if word != "..."]
    distinct = len(ranked) > 3 and ranked[2] > ranked[3] and min(counts[1:4]) > 0
    prompt = _FWE.format(context=" ".join(text)) + _FWE_PREFIX
    return Draft(prompt, tuple(vocabulary[1:4]), distinct=distinct)
