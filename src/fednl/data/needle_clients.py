"""The seven needle clients: what each of them remembers and asks.

Source: FedNL, appendix C.3, for the clients and the events' wording; names, codes, phrases and the questions'
wording are ours, as the paper does not state them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate

from fednl.data.examples import Needle
from fednl.data.words import (
    CODEWORDS,
    MISSIONS,
    MONTHS,
    PHRASE_FIRST,
    PHRASE_SECOND,
    SECRET_KEYS,
    SURNAMES,
)

Client = Callable[[random.Random, int], Needle]
STATES = 8
CANDIDATES = 4
_CONSONANTS = "BCDFGHJKLMNPQRSTVWXZ"


def _passkey(rng: random.Random, events: int) -> Needle:
    return _about_keys(
        rng,
        rng.sample(SURNAMES, events),
        _distinct(rng, _seven_digits, max(events, CANDIDATES)),
        "Officer {key}'s security passkey is {value}.",
        "\nQuestion: What is Officer {key}'s security passkey?",
    )


def _uuid_code(rng: random.Random, events: int) -> Needle:
    return _about_keys(
        rng,
        _distinct(rng, _device, events),
        _distinct(rng, _three_parts, max(events, CANDIDATES)),
        "Operational access code for device {key} is {value}.",
        "\nQuestion: What is the access code for device {key}?",
    )


def _name_date(rng: random.Random, events: int) -> Needle:
    return _about_keys(
        rng,
        rng.sample(SURNAMES, events),
        _distinct(rng, _date, max(events, CANDIDATES)),
        "Officer {key} filed the registration report on {value}.",
        "\nQuestion: When did Officer {key} file the registration report?",
    )


def _phrase_code(rng: random.Random, events: int) -> Needle:
    return _about_keys(
        rng,
        rng.sample(MISSIONS, events),
        _distinct(rng, _phrase, max(events, CANDIDATES)),
        "Mission {key}'s activation codeword is {value}.",
        "\nQuestion: What is Mission {key}'s activation codeword?",
    )


def _multi_key(rng: random.Random, events: int) -> Needle:
    return _about_keys(
        rng,
        rng.sample(SECRET_KEYS, events),
        _distinct(rng, _four_digits, max(events, CANDIDATES)),
        "The {key} secret is {value}.",
        "\nQuestion: What is the {key} secret?",
    )


def _multi_value(rng: random.Random, events: int) -> Needle:
    return _about_keys(
        rng,
        [str(rank + 1) for rank in range(events)],
        rng.sample(CODEWORDS, max(events, CANDIDATES)),
        "Codeword {key}: {value}.",
        "\nQuestion: What is codeword {key}?",
    )


def _counter_state(rng: random.Random, events: int) -> Needle:
    base = rng.randrange(STATES)
    steps = [rng.choice((1, -1)) for _ in range(events - 1)]
    final = list(accumulate(steps, initial=base))[-1] % STATES
    # Any three other states, not those passed through: the set of candidates must not give the answer away.
    others = rng.sample([state for state in range(STATES) if state != final], CANDIDATES - 1)
    candidates, gold = shuffled(rng, str(final), [str(state) for state in others])
    words = {1: "State increment.", -1: "State decrement."}
    return Needle(
        events=(f"State base {base}.", *(words[step] for step in steps)),
        queried=events - 1,
        question=f"\nQuestion: What is the final state modulo {STATES}?",
        candidates=candidates,
        gold=gold,
        unique=(),
    )


def _about_keys(rng: random.Random, keys: Sequence[str], values: Sequence[str], event: str, question: str) -> Needle:
    """One event per key; other events' values are the wrong answers, topped up where they are too few."""
    queried = rng.randrange(len(keys))
    observed = [value for i, value in enumerate(values[: len(keys)]) if i != queried]
    spare = list(values[len(keys) :])
    wrong = rng.sample(observed, min(len(observed), CANDIDATES - 1))
    wrong += spare[: CANDIDATES - 1 - len(wrong)]
    candidates, gold = shuffled(rng, values[queried], wrong)
    others = [i for i in range(len(keys)) if i != queried]
    rng.shuffle(others)
    return Needle(
        events=tuple(event.format(key=key, value=value) for key, value in zip(keys, values, strict=False)),
        queried=queried,
        question=question.format(key=keys[queried]),
        candidates=candidates,
        gold=gold,
        unique=tuple(values),
        further=tuple((question.format(key=keys[i]), values[i]) for i in others),
    )


def shuffled(rng: random.Random, gold: str, wrong: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Puts the answers in a random order and says where the right one is."""
    order = [gold, *wrong]
    rng.shuffle(order)
    return tuple(order), order.index(gold)


def _distinct(rng: random.Random, draw: Callable[[random.Random], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)


def _seven_digits(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def _four_digits(rng: random.Random) -> str:
    return str(rng.randint(1_000, 9_999))


def _device(rng: random.Random) -> str:
    return f"{rng.randint(10, 99)}{rng.choice(_CONSONANTS)}"


def _three_parts(rng: random.Random) -> str:
    return "-".join(f"{rng.choice(_CONSONANTS)}{rng.randint(10, 99)}" for _ in range(3))


def _date(rng: random.Random) -> str:
    return f"{rng.choice(MONTHS)} {rng.randint(1, 28)}, {rng.randint(1990, 2029)}"


def _phrase(rng: random.Random) -> str:
    return f"{rng.choice(PHRASE_FIRST)}-{rng.choice(PHRASE_SECOND)}"


# In the paper's order: `data.clients` takes the first n.
CLIENTS: dict[str, Client] = {
    "passkey": _passkey,
    "uuid-code": _uuid_code,
    "name-date": _name_date,
    "phrase-code": _phrase_code,
    "counter-state": _counter_state,
    "multi-key": _multi_key,
    "multi-value": _multi_value,
}

# The events' wording, for whoever must not use it (the public practice task).
EVENT_WORDINGS = (
    "security passkey is",
    "Operational access code for device",
    "filed the registration report on",
    "activation codeword is",
    "State base",
    "State increment",
    "State decrement",
    " secret is ",
    "Codeword ",
)
