"""The needle task: every client hides its own kind of facts in filler and asks for one of them."""

from __future__ import annotations

from fednl.data.examples import Encoded, Event, NeedleExample, Splits, Tokenizer, encode_needles
from fednl.data.fillers import SPLITS, load_filler, split_regions
from fednl.data.haystack import check_budget, place
from fednl.data.needle_clients import CLIENTS
from fednl.data.settings import DataSettings
from fednl.errors import SettingsError
from fednl.seeding import python_rng

__all__ = ["ANSWERS", "CLIENTS", "Event", "NeedleExample", "Splits", "build", "client_names"]

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
    for name in settings.hold_out_clients:
        if name not in names:
            raise SettingsError(
                f'data.hold-out-clients names "{name}", which does not take part; choose from {", ".join(names)}.'
            )
    return names


def build(
    settings: DataSettings, tokenizer: Tokenizer, window_tokens: int, answer: str, seed: int
) -> dict[str, Splits[NeedleExample]]:
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
    if answer not in ANSWERS:
        raise SettingsError(f'evaluation.answer is "{answer}"; it must be one of: {", ".join(ANSWERS)}.')
    names = client_names(settings)
    encoded = {
        (client, split): _needles(settings, tokenizer, answer, seed, client, split)
        for client in names
        for split in SPLITS
    }
    everything = [one for some in encoded.values() for one in some]
    check_budget(everything, settings.tokens, window_tokens, answer)
    if not everything:
        return {client: Splits([], [], []) for client in names}
    regions = split_regions(load_filler(settings.filler), tokenizer, settings.tokens)

    def placed(client: str, split: str) -> list[NeedleExample]:
        rng = python_rng(seed, f"needles/filler/{split}", client)
        return [
            place(
                one,
                regions[split],
                settings.tokens,
                window_tokens,
                rng,
                client=client,
                split=split,
                index=index,
            )
            for index, one in enumerate(encoded[client, split])
        ]

    return {client: Splits(*(placed(client, split) for split in SPLITS)) for client in names}


def _needles(
    settings: DataSettings, tokenizer: Tokenizer, answer: str, seed: int, client: str, split: str
) -> list[Encoded]:
    counts = {"train": settings.train, "validation": settings.validation, "test": settings.test}
    if client in settings.hold_out_clients and split != "test":
        return []
    rng = python_rng(seed, f"needles/content/{split}", client)
    needles = [CLIENTS[client](rng, settings.events) for _ in range(counts[split])]
    return encode_needles(needles, tokenizer, answer, settings.questions - 1 if split == "train" else 0)
