"""The public practice task's sentences and questions: many relations, none of them a client's. All ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from fednl.data.words import (
    ANIMALS,
    COLOURS,
    FIRST_NAMES,
    MONTHS,
    PLAIN_WORDS,
    THING_ADJECTIVES,
    THINGS,
    TOWNS,
    VESSELS,
)

Draw = Callable[[random.Random], str]


@dataclass(frozen=True)
class Relation:
    """Sentences that tie a value to a key, and the questions that ask for it.

    Attributes:
        key: name of the kind of key, in `KEYS`.
        values: names of the kinds of value, in `VALUES`.
        attributes: what `{attr}` may stand for; one per example.
        events: sentences with `{key}`, `{value}` and perhaps `{attr}`.
        questions: questions with `{key}` and perhaps `{attr}`.
    """

    key: str
    values: tuple[str, ...]
    attributes: tuple[str, ...]
    events: tuple[str, ...]
    questions: tuple[str, ...]


def _digits(places: int) -> Draw:
    return lambda rng: str(rng.randint(10 ** (places - 1), 10**places - 1))


def _one_of(words: tuple[str, ...]) -> Draw:
    return lambda rng: rng.choice(words)


def _letters(count: int, alphabet: str = "ABCDEFGHJKLMNPRSTUVWXYZ") -> Draw:
    return lambda rng: "".join(rng.choice(alphabet) for _ in range(count))


def _dash_code(rng: random.Random) -> str:
    return f"{_letters(2)(rng)}-{rng.randint(100, 999)}"


def _nth(rng: random.Random) -> str:
    day = rng.randint(1, 28)
    suffix = "th" if 10 <= day <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"the {day}{suffix} of {rng.choice(MONTHS)}"


# The clients' own forms are left out: seven and four digits, three-part codes, hyphenated phrases, their
# lists of words, and dates written month first.
VALUES: dict[str, Draw] = {
    "digits-3": _digits(3),
    "digits-5": _digits(5),
    "digits-6": _digits(6),
    "digits-8": _digits(8),
    "word": _one_of(PLAIN_WORDS),
    "animal": lambda rng: f"{rng.choice(COLOURS)} {rng.choice(ANIMALS)}",
    "letters": _letters(4),
    "dash-code": _dash_code,
    "hex": lambda rng: f"0x{rng.randrange(16**4):04x}",
    "nth": _nth,
    "time": lambda rng: f"{rng.randint(10, 23)}:{rng.randint(10, 59)}",
    "decimal": lambda rng: f"{rng.randint(10, 99)}.{rng.randint(10, 99)}",
    "town": _one_of(TOWNS),
    "first-name": _one_of(FIRST_NAMES),
}

KEYS: dict[str, Draw] = {
    "person": _one_of(FIRST_NAMES),
    "town": _one_of(TOWNS),
    "vessel": lambda rng: f"the {rng.choice(VESSELS)}",
    "thing": lambda rng: f"the {rng.choice(THING_ADJECTIVES)} {rng.choice(THINGS)}",
    "room": lambda rng: f"room {rng.randint(11, 99)}",
    "ticket": lambda rng: f"ticket {_letters(2)(rng)}",
    "symbol": _letters(3),
    "entry": lambda rng: f"entry {rng.randint(1, 40)}",
}

_NUMBERS = ("digits-3", "digits-5", "digits-6", "digits-8")
_CODES = ("letters", "dash-code", "hex")

RELATIONS = (
    Relation(
        "person",
        (*_NUMBERS, "dash-code", "hex"),
        (
            "locker number",
            "badge number",
            "account number",
            "library card",
            "parking permit",
            "customer number",
        ),
        (
            "{key}'s {attr} is {value}.",
            "The {attr} of {key} is {value}.",
            "{key} was given the {attr} {value}.",
            "{value} is the {attr} that belongs to {key}.",
            "For {key} the {attr} was set to {value}.",
        ),
        (
            "What is {key}'s {attr}?",
            "Which {attr} does {key} have?",
            "State the {attr} of {key}.",
            "{key}'s {attr}?",
        ),
    ),
    Relation(
        "person",
        ("word", "animal"),
        ("nickname", "favourite word", "emblem", "lucky charm", "drawing"),
        (
            "{key}'s {attr} is the {value}.",
            "The {attr} of {key} is the {value}.",
            "As {attr}, {key} chose the {value}.",
            "{key} has the {value} as {attr}.",
        ),
        (
            "What is {key}'s {attr}?",
            "Name the {attr} of {key}.",
            "Which {attr} did {key} choose?",
        ),
    ),
    Relation(
        "person",
        ("word", "animal"),
        ("sent", "sold", "promised", "lent"),
        (
            "The {value} was {attr} to {key}.",
            "To {key} was {attr} the {value}.",
            "It was {key} to whom the {value} was {attr}.",
        ),
        ("What was {attr} to {key}?", "Tell what was {attr} to {key}."),
    ),
    Relation(
        "person",
        ("nth",),
        ("wedding", "birthday", "departure", "examination", "concert"),
        (
            "{key}'s {attr} falls on {value}.",
            "On {value} comes the {attr} of {key}.",
            "{key} expects the {attr} for {value}.",
        ),
        ("On which day is {key}'s {attr}?", "{key}'s {attr} is on what day?"),
    ),
    Relation(
        "person",
        ("town",),
        ("was born in", "moved to", "teaches in", "owns a house in"),
        ("{key} {attr} {value}.", "It is known that {key} {attr} {value}."),
        ("Complete: {key} {attr} which town?", "{key} {attr} where?"),
    ),
    Relation(
        "town",
        (*_NUMBERS, "decimal"),
        ("population", "postal number", "height", "dialling number", "rainfall"),
        (
            "The {attr} of {key} stands at {value}.",
            "{key} reports {value} as its {attr}.",
            "In {key} the {attr} was {value}.",
        ),
        ("What is the {attr} of {key}?", "Which {attr} was reported by {key}?", "{key}, {attr}?"),
    ),
    Relation(
        "town",
        ("time",),
        ("train", "coach", "ferry", "night bus"),
        (
            "The {attr} to {key} leaves at {value}.",
            "At {value} the {attr} for {key} departs.",
            "Travellers to {key} take the {attr} of {value}.",
        ),
        ("When does the {attr} to {key} leave?", "At what time goes the {attr} for {key}?"),
    ),
    Relation(
        "town",
        ("first-name",),
        ("mayor", "doctor", "baker", "gatekeeper"),
        (
            "The {attr} of {key} is called {value}.",
            "{value} works as {attr} in {key}.",
            "People in {key} call their {attr} {value}.",
        ),
        ("Who is the {attr} of {key}?", "What is the {attr} in {key} called?"),
    ),
    Relation(
        "vessel",
        (*_CODES, "digits-5", "digits-6"),
        ("call sign", "registration", "licence", "sail number"),
        (
            "{Key} sails under the {attr} {value}.",
            "The {attr} painted on {key} reads {value}.",
            "{value} is the {attr} of {key}.",
        ),
        ("Under which {attr} does {key} sail?", "What is the {attr} of {key}?"),
    ),
    Relation(
        "thing",
        ("word", "town", "first-name"),
        ("label", "mark", "inscription"),
        (
            "The {attr} on {key} says {value}.",
            "{Key} bears the {attr} {value}.",
            "Somebody wrote {value} as the {attr} on {key}.",
        ),
        ("What does the {attr} on {key} say?", "Which {attr} does {key} bear?"),
    ),
    Relation(
        "thing",
        ("decimal", "digits-3", "digits-5"),
        ("price", "weight", "length", "depth"),
        (
            "{Key} has a {attr} of {value}.",
            "For {key} they noted {value} as {attr}.",
            "{value} is the {attr} of {key}.",
        ),
        ("What {attr} does {key} have?", "Which {attr} was noted for {key}?"),
    ),
    Relation(
        "room",
        ("word", "letters", "digits-5", "digits-6"),
        ("door code", "password", "key number", "network name"),
        (
            "Whoever enters {key} needs the {attr} {value}.",
            "{value} serves as the {attr} in {key}.",
            "The {attr} for {key} has been changed to {value}.",
        ),
        ("Which {attr} is needed for {key}?", "What is the {attr} in {key}?"),
    ),
    Relation(
        "ticket",
        ("animal", "word"),
        ("won", "was exchanged for", "is good for"),
        ("{Key} {attr} a {value}.", "As it turned out, {key} {attr} a {value}."),
        ("Complete: {key} {attr} what?", "{Key} {attr} what?"),
    ),
    Relation(
        "symbol",
        ("word", "digits-3", "digits-6", "hex"),
        ("stands for", "means", "is replaced by", "maps to"),
        ("In this table {key} {attr} {value}.", "{key} {attr} {value}.", "Here {key} always {attr} {value}."),
        ("What does the table say: {key} {attr}?", "{key} {attr} what?"),
    ),
    Relation(
        "symbol",
        (*_NUMBERS, *_CODES, "decimal", "word"),
        ("=", "->", ":", "equals"),
        ("{key} {attr} {value}", "Set {key} {attr} {value};"),
        ("{key} {attr} what?", "Value of {key}?", "What is {key}?"),
    ),
    Relation(
        "entry",
        ("word", "first-name", "town", "dash-code", "digits-8"),
        ("list", "register", "logbook", "menu"),
        (
            "In the {attr}, {key} reads {value}.",
            "{Key} of the {attr} is {value}.",
            "Under {key} the {attr} has {value}.",
        ),
        ("What does {key} of the {attr} read?", "In the {attr}, what is {key}?"),
    ),
)

PREFIXES = ("\nQuestion: ", "\nQ: ", "\n\n", "\nPlease answer. ", "\nNow recall. ", " Quiz: ")
