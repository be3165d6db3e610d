"""The needle task: every client hides its own kind of facts in filler and asks for one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fednl.data.examples import Encoded, Event, NeedleExample, Splits, Tokenizer, encode_needles
from fednl.data.fillers import SPLITS, load_filler, split_regions
from fednl.data.haystack import check_budget, place
from fednl.data.long_tail import long_tail
from fednl.data.needle_clients import CLIENTS
from fednl.data.settings import DataSettings
from fednl.data.stream import Stream, TasksSettings, numbered_clients
from fednl.errors import SettingsError
from fednl.seeding import python_rng

__all__ = [
    "ANSWERS",
    "CLIENTS",
    "Build",
    "Event",
    "NeedleExample",
    "Splits",
    "build",
    "build_stream",
    "client_names",
]

ANSWERS = ("candidates", "recall", "letters")
Build = Callable[[DataSettings, Tokenizer, int, str, int], dict[str, Splits]]


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
    _check_held_out(settings, names)
    return names


def build(
    settings: DataSettings, tokenizer: Tokenizer, window_tokens: int, answer: str, seed: int
) -> dict[str, Splits]:
    """Makes every client's training, validation and test examples.

    An example depends on the seed, its client, its split and its index, and not on how many others there are.
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
        SettingsError: an unknown answer format or client, or a budget or window too small for the events.
        DataError: the filler is too small or cannot be read.

    Source: FedNL, appendix C.3.
    """
    holds = {name: (name,) for name in client_names(settings)}
    return _build(settings, tokenizer, window_tokens, answer, seed, holds)


def build_stream(
    settings: DataSettings, tokenizer: Tokenizer, window_tokens: int, answer: str, seed: int, tasks: TasksSettings
) -> dict[str, Splits]:
    """Makes the examples of clients who all meet the same kinds of needles, one kind after the other.

    Every example says which kind it is (`task`), and each client's are its own. Otherwise as `build`.

    Args:
        settings: the `[data]` section; `train`, `validation` and `test` count per client and task.
        tokenizer: the backbone's; nothing is added to it.
        window_tokens: the attention window (`memory.window-tokens`), 0 for full attention.
        answer: as for `build`.
        seed: the run's seed.
        tasks: the `[tasks]` section, with an order.

    Raises:
        SettingsError: as `build`, or the order names what is no kind of needle.
        DataError: as `build`.
    """
    for kind in tasks.order:
        if kind not in CLIENTS:
            raise SettingsError(f'tasks.order names "{kind}", which is no kind of needle: choose from {_KINDS}.')
    names = numbered_clients(settings.clients)
    _check_held_out(settings, names)
    stream = Stream(tasks, tuple(names))
    holds = {name: stream.tasks_of(name) for name in names}
    return _build(settings, tokenizer, window_tokens, answer, seed, holds)


_KINDS = ", ".join(CLIENTS)


def _build(
    settings: DataSettings,
    tokenizer: Tokenizer,
    window_tokens: int,
    answer: str,
    seed: int,
    holds: Mapping[str, Sequence[str]],
) -> dict[str, Splits]:
    """Makes the examples of clients, each of whom holds some kinds in an order."""
    if answer not in ANSWERS:
        raise SettingsError(f'evaluation.answer is "{answer}"; it must be one of: {", ".join(ANSWERS)}.')
    train = long_tail(
        sorted({kind for kinds in holds.values() for kind in kinds}), settings.train, settings.imbalance, seed
    )
    pieces = [(client, kind, split) for client, kinds in holds.items() for kind in kinds for split in SPLITS]
    encoded = {piece: _needles(settings, tokenizer, answer, seed, *piece, train[piece[1]]) for piece in pieces}
    everything = [one for some in encoded.values() for one in some]
    check_budget(everything, settings.tokens, window_tokens, answer)
    if not everything:
        return {client: Splits([], [], []) for client in holds}
    regions = split_regions(load_filler(settings.filler), tokenizer, settings.tokens)

    def placed(client: str, split: str) -> list[NeedleExample]:
        found: list[NeedleExample] = []
        for kind in holds[client]:
            rng = python_rng(seed, f"needles/filler/{split}", _holder(client, kind))
            for one in encoded[client, kind, split]:
                example = place(
                    one,
                    regions[split],
                    settings.tokens,
                    window_tokens,
                    rng,
                    client=client,
                    split=split,
                    index=len(found),
                )
                found.append(example if client == kind else replace(example, task=kind))
        return found

    return {client: Splits(*(placed(client, split) for split in SPLITS)) for client in holds}


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
    train: int,
) -> list[Encoded]:
    counts = {"train": train, "validation": settings.validation, "test": settings.test}
    if client in settings.hold_out_clients and split != "test":
        return []
    rng = python_rng(seed, f"needles/content/{split}", _holder(client, kind))
    needles = [CLIENTS[kind](rng, settings.events) for _ in range(counts[split])]
    return encode_needles(needles, tokenizer, answer, settings.questions - 1 if split == "train" else 0)


def _check_held_out(settings: DataSettings, names: Sequence[str]) -> None:
    for name in settings.hold_out_clients:
        if name not in names:
            raise SettingsError(
                f'data.hold-out-clients names "{name}", which does not take part; choose from {", ".join(names)}.'
            )
