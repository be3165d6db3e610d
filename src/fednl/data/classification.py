"""The classification task: labelled texts dealt out unevenly over clients, each asked for its class by a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fednl.data.classification_settings import ClassificationSettings, label_word
from fednl.data.client_checks import check_clients
from fednl.data.client_names import numbered_clients
from fednl.data.examples import Splits, Tokenizer
from fednl.data.labelled_texts import LabelledText, read_labelled
from fednl.data.long_tail import scaled_long_tail
from fednl.data.partition import dirichlet
from fednl.data.prompt_template import LabelledExample, Template
from fednl.data.settings import DataSettings
from fednl.data.well_known_texts import WELL_KNOWN, well_known_words
from fednl.errors import DataError, SettingsError
from fednl.seeding import python_rng

SPLITS = ("test", "validation", "train")  # the order in which examples are taken


def build(
    settings: DataSettings,
    tokenizer: Tokenizer,
    window_tokens: int,
    answer: str,
    seed: int,
    own: ClassificationSettings,
) -> dict[str, Splits[LabelledExample]]:
    """Makes every client's training, validation and test examples; no text is in two of them.

    Test, then validation, then training examples are drawn. Test and validation have all classes equally often, as
    far as the source allows, and are dealt evenly; training examples keep the source's shares of the classes
    (or have a long tail over them, `data.imbalance`) and are dealt by `dirichlet`.

    Args:
        settings: the `[data]` section.
        tokenizer: the backbone's; nothing is added to it.
        window_tokens: not read: a prompt may be longer than a window or not.
        answer: `"candidates"`, the only format.
        seed: the run's seed.
        own: the `[classification]` section.

    Raises:
        SettingsError: the answer format, the clients, the labels or the token budget cannot be as set.
        DataError: the source cannot be read, has too few examples, or a text is too long.

    Source: IFed-ICL's set-up (Dirichlet over labels); the shares of the splits ours.
    """
    if answer != "candidates":
        raise SettingsError(f'evaluation.answer is "{answer}"; the classification task knows "candidates".')
    names = client_names(settings)
    rows = read_labelled(own.source, own.text, own.label, own.split)
    words = _words(own, rows)
    template = Template(own, tokenizer, list(words.values()), settings.tokens)
    taken = _draw(settings, rows, words, seed, own)
    labels = list(words)
    trained = [name for name in names if name not in settings.hold_out_clients]
    shares = dirichlet([row.label for row in taken["train"]], trained, own.alpha, seed, least=own.least)
    dealt = {name: {"train": [taken["train"][i] for i in shares.get(name, ())]} for name in names}
    for split, those in (("validation", trained), ("test", names)):
        for turn, name in enumerate(those):
            dealt[name][split] = taken[split][turn :: len(those)]
    clients = {}
    for name in names:
        made = {
            split: template.examples(dealt[name].get(split, []), labels, name, split)
            for split in ("train", "validation", "test")
        }
        rng = python_rng(seed, "classification/demonstrations", name)
        made["test"] = template.with_shots(made["test"], made["train"], own.demonstrations, rng)
        clients[name] = Splits(**made)
    return clients


def client_names(settings: DataSettings) -> list[str]:
    """The names of the clients that take part: `client-01` and so on.

    Raises:
        SettingsError: a held-out client does not take part, or no client is left to train.
    """
    names = numbered_clients(settings.clients)
    check_clients(settings, names)
    return names


def _words(own: ClassificationSettings, rows: Sequence[LabelledText]) -> dict[str, str]:
    """The classes and the words that stand for them, in the order in which they are offered."""
    counts = Counter(row.label for row in rows)
    if own.labels and own.labels[0] in WELL_KNOWN:
        words = well_known_words(own.labels[0], counts)
    else:
        words = dict(map(label_word, own.labels or sorted(counts)))
    for label in words:
        if counts[label] < len(SPLITS):
            raise DataError(
                f"{own.source} has {counts[label]} texts of {own.called(label, list(words))}, and it takes "
                f"{len(SPLITS)} to train, validate and test it; add some, or leave it out in classification.labels."
            )
    if missing := sorted(counts.keys() - words.keys()):
        raise DataError(
            f"classification.labels leaves out {len(missing)} of the {len(counts)} classes that {own.source} has, with "
            f"{sum(counts[label] for label in missing)} rows; name them, or remove those rows."
        )
    if len(words) < 2:
        raise DataError(f"{own.source} has one class only, so there is nothing to tell apart.")
    return words


def _draw(
    settings: DataSettings,
    rows: Sequence[LabelledText],
    words: dict[str, str],
    seed: int,
    own: ClassificationSettings,
) -> dict[str, list[LabelledText]]:
    """Takes the three splits out of the rows, each row once."""
    rng = python_rng(seed, "classification/draw")
    left = {label: [row for row in rows if row.label == label] for label in words}
    for some in left.values():
        rng.shuffle(some)
    trained = settings.clients - len(set(settings.hold_out_clients))
    wanted = {
        "test": settings.test * settings.clients,
        "validation": settings.validation * trained,
        "train": settings.train * trained,
    }
    if sum(wanted.values()) > len(rows):
        raise DataError(
            f"the source has {len(rows)} different texts, and {sum(wanted.values())} are asked for "
            f"({', '.join(f'{n} {split}' for split, n in wanted.items())}); lower data.train, data.validation or "
            "data.test, or data.clients."
        )
    # One of each class is put aside for training, so that a rare class is not used up by the tests.
    kept = [some.pop() for some in left.values()]
    taken = {split: _balanced(left, wanted[split]) for split in ("test", "validation")}
    for split, rows_of in taken.items():  # they come class by class in turn, which dealing in turn would keep apart
        python_rng(seed, f"classification/deal/{split}").shuffle(rows_of)
    rest = [row for some in left.values() for row in some]
    rng.shuffle(rest)
    taken["train"] = _long_tailed([*kept, *rest], words, wanted["train"], settings.imbalance, seed, own)
    if settings.train and (absent := [label for label in words if label not in {r.label for r in taken["train"]}]):
        raise DataError(
            f"no client gets a training text of {own.called(absent[0], list(words))} when there are {wanted['train']} "
            "training texts; raise data.train."
        )
    return taken


def _long_tailed(
    rows: Sequence[LabelledText],
    words: Mapping[str, str],
    number: int,
    imbalance: float,
    seed: int,
    own: ClassificationSettings,
) -> list[LabelledText]:
    """The first rows, with the source's shares of the classes, or with a long tail over them."""
    if imbalance == 1:
        return list(rows[:number])
    wanted = scaled_long_tail(list(words), number, imbalance, seed)
    counts = {label: max(min(1, number), wanted[label]) for label in words}
    taken = {label: [row for row in rows if row.label == label][: counts[label]] for label in words}
    for label, found in taken.items():
        if len(found) < counts[label]:
            raise DataError(
                f"a long tail with data.imbalance = {imbalance:g} takes {counts[label]} training texts of "
                f"{own.called(label, list(words))}, and {len(found)} are left; lower data.train or data.imbalance."
            )
    return [row for found in taken.values() for row in found]


def _balanced(left: dict[str, list[LabelledText]], number: int) -> list[LabelledText]:
    """Takes rows from the classes in turn, skipping those that are used up."""
    taken: list[LabelledText] = []
    while len(taken) < number and any(left.values()):
        taken += [some.pop() for some in left.values() if some][: number - len(taken)]
    return taken
