"""The needle task: every client hides its own kind of facts in filler and asks for one of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fednl.data.client_checks import check_clients
from fednl.data.client_names import numbered_clients
from fednl.data.examples import Encoded, Event, NeedleExample, Splits, Tokenizer, encode_needles
from fednl.data.fillers import SPLITS, load_filler, split_regions
from fednl.data.haystack import check_budget, place
from fednl.data.long_tail import long_tail
from fednl.data.mixtures import apportion, mixtures
from fednl.data.needle_clients import CLIENTS
from fednl.data.settings import DataSettings
from fednl.data.stream import Stream, TasksSettings
from fednl.errors import SettingsError
from fednl.seeding import python_rng

__all__ = [
    "ANSWERS",
    "CLIENTS",
    "Event",
    "NeedleExample",
    "Splits",
    "build",
    "build_stream",
    "client_names",
]

ANSWERS = ("candidates", "recall", "letters")


def client_names(settings: DataSettings) -> list[str]:
    """The names of the clients that take part, in the paper's order.

    Raises:
        SettingsError: more clients than there are, or a held-out client that does not take part.
    """
    names = list(CLIENTS)
    if settings.clients > len(names):
        raise SettingsError(
            f"data.clients is {settings.clients}, but the needle task has {len(names)} clients;"
            f" set it to at most {len(names)}."
        )
    names = names[: settings.clients]
    check_clients(settings, names)
    return names


def build(
    settings: DataSettings, tokenizer: Tokenizer, window_tokens: int, answer: str, seed: int
) -> dict[str, Splits[NeedleExample]]:
    """Makes every client's training, validation and test examples.

    A client is a kind of needle, or with `data.dirichlet-alpha` holds several kinds in shares of its own. An example
    depends on the seed, its client, its split and its index, and not on how many others there are.
    Every event ends at least `window_tokens` before the first answer token.

    Args:
        settings: the `[data]` section.
        tokenizer: the backbone's; nothing is added to it.
        window_tokens: the attention window (`memory.window-tokens`), 0 for full attention.
        answer: `"candidates"` or `"recall"` (the same examples), or `"letters"`, which lists the options.
        seed: the run's seed.

    Returns:
        The splits by client name; a client without examples has empty lists.

    Raises:
        SettingsError: an unknown answer format or client, or a budget or window too small for the events, or
            `data.shortest` above `data.tokens`.
        DataError: the filler is too small or cannot be read.

    Source: FedNL, appendix C.3.
    """
    if settings.dirichlet_alpha:
        plan = _mixed(settings, seed)
    else:
        plan = _plan(settings, {name: (name,) for name in client_names(settings)}, seed)
    return _build(settings, tokenizer, window_tokens, answer, seed, plan)


def build_stream(
    settings: DataSettings, tokenizer: Tokenizer, window_tokens: int, answer: str, seed: int, tasks: TasksSettings
) -> dict[str, Splits[NeedleExample]]:
    """Makes the examples of clients who all meet the same kinds of needles, one kind after the other.

    Every example says which kind it is (`task`), and each client's are its own. Otherwise as `build`.

    Args:
        settings: the `[data]` section; `train`, `validation` and `test` count per client and task.
        tokenizer: the backbone's; nothing is added to it.
        window_tokens: the attention window (`memory.window-tokens`), 0 for full attention.
        answer: as for `build`.
        seed: the run's seed.
        tasks: the `[tasks]` section, with an order that `fednl.data.tasks.check_stream` has passed.

    Raises:
        SettingsError: as `build`.
        DataError: as `build`.
    """
    stream = Stream(tasks, tuple(_numbered(settings)))
    plan = _plan(settings, {name: stream.tasks_of(name) for name in stream.clients}, seed)
    return _build(settings, tokenizer, window_tokens, answer, seed, plan)


_Plan = dict[str, dict[str, dict[str, int]]]
"""client -> kind, in its order -> split -> number of examples."""


def _plan(settings: DataSettings, holds: Mapping[str, Sequence[str]], seed: int) -> _Plan:
    """Every client has as many examples of each of its kinds; only training has a long tail."""
    kinds = sorted({kind for some in holds.values() for kind in some})
    train = long_tail(kinds, settings.train, settings.imbalance, seed)
    rest = {"validation": settings.validation, "test": settings.test}
    plan = {client: {kind: {"train": train[kind], **rest} for kind in some} for client, some in holds.items()}
    return _without_training(settings, plan)


def _mixed(settings: DataSettings, seed: int) -> _Plan:
    """Kinds in unlike shares, by which a client is also validated and tested; a held-out one is asked of all kinds."""
    names, kinds = _numbered(settings), list(CLIENTS)
    trained = [name for name in names if name not in settings.hold_out_clients]
    shares = mixtures(kinds, trained, settings.train, settings.dirichlet_alpha, settings.imbalance, seed)
    plan: _Plan = {}
    for name in names:
        own = shares.get(name) or dict.fromkeys(kinds, 1)
        validation, test = apportion(own, settings.validation), apportion(own, settings.test)
        plan[name] = {
            kind: {"train": n * bool(settings.train), "validation": validation[kind], "test": test[kind]}
            for kind, n in own.items()
        }
    return _without_training(settings, plan)


def _without_training(settings: DataSettings, plan: _Plan) -> _Plan:
    """The plan with nothing but tests for held-out clients."""
    none = {"train": 0, "validation": 0}
    return {
        client: {kind: n | none if client in settings.hold_out_clients else n for kind, n in kinds.items()}
        for client, kinds in plan.items()
    }


def _numbered(settings: DataSettings) -> Sequence[str]:
    names = numbered_clients(settings.clients)
    check_clients(settings, names)
    return names


def _build(
    settings: DataSettings,
    tokenizer: Tokenizer,
    window_tokens: int,
    answer: str,
    seed: int,
    plan: _Plan,
) -> dict[str, Splits[NeedleExample]]:
    """Makes the examples of clients, each of whom holds some kinds in an order."""
    if answer not in ANSWERS:
        raise SettingsError(f'evaluation.answer is "{answer}"; it must be one of: {", ".join(ANSWERS)}.')
    encoded = {
        (client, kind, split): _needles(settings, tokenizer, answer, seed, client, kind, split, kinds[kind][split])
        for client, kinds in plan.items()
        for kind in kinds
        for split in SPLITS
    }
    everything = [one for some in encoded.values() for one in some]
    check_budget(everything, settings.tokens, window_tokens, answer)
    if settings.shortest:
        trained = [one for (_, _, split), some in encoded.items() for one in some if split == "train"]
        check_budget(trained, settings.shortest, window_tokens, answer, "data.shortest")
    if not everything:
        return {client: Splits([], [], []) for client in plan}
    regions = split_regions(load_filler(settings.filler), tokenizer, settings.tokens)

    def placed(client: str, split: str) -> list[NeedleExample]:
        found: list[NeedleExample] = []
        for kind in plan[client]:
            rng = python_rng(seed, f"needles/filler/{split}", _holder(client, kind))
            lengths = python_rng(seed, "needles/lengths", _holder(client, kind))
            for one in encoded[client, kind, split]:
                example = place(
                    one,
                    regions[split],
                    _drawn_tokens(settings, lengths) if split == "train" else settings.tokens,
                    window_tokens,
                    rng,
                    client=client,
                    split=split,
                    index=len(found),
                )
                found.append(example if client == kind else replace(example, task=kind))
        return found

    return {client: Splits(*(placed(client, split) for split in SPLITS)) for client in plan}


def _drawn_tokens(settings: DataSettings, rng: random.Random) -> int:
    """The length of a training prompt: `tokens`, or drawn from `shortest` on with a uniform logarithm."""
    if not settings.shortest:
        return settings.tokens
    length: float = settings.shortest * (settings.tokens / settings.shortest) ** rng.random()
    return round(length)


def _holder(client: str, kind: str) -> str:
    """Names a random stream: a client's kind, or the client itself where it is its kind."""
    return client if client == kind else f"{client}/{kind}"


def _needles(
    settings: DataSettings,
    tokenizer: Tokenizer,
    answer: str,
    seed: int,
    client: str,
    kind: str,
    split: str,
    number: int,
) -> list[Encoded]:
    rng = python_rng(seed, f"needles/content/{split}", _holder(client, kind))
    needles = [CLIENTS[kind](rng, settings.events) for _ in range(number)]
    return encode_needles(needles, tokenizer, answer, settings.questions - 1 if split == "train" else 0)
