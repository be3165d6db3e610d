"""The classification task: labelled texts dealt out unevenly over clients, each asked for its class by a prompt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fednl.data.examples import Splits, Tokenizer, encode_texts
from fednl.data.labelled_texts import LabelledText, read_labelled
from fednl.data.long_tail import scaled_long_tail
from fednl.data.partition import dirichlet
from fednl.data.settings import DataSettings
from fednl.errors import DataError, SettingsError
from fednl.seeding import python_rng

TEXT, LABEL = "{text}", "{label}"
SEPARATOR = "\n"
SPLITS = ("test", "validation", "train")  # the order in which examples are taken


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class ClassificationSettings(BaseModel):
    """The `[classification]` section; clients and counts stand in `[data]`.

    `data.train` is the mean over clients, as the deal is uneven; validation and test questions are dealt evenly.

    Args:
        source: a packaged name (`bbc-news`); a `.csv`, `.tsv`, `.jsonl` or `.json` file; a folder that `datasets`
            saved; or a Hugging Face id such as `fancyzhx/ag_news`, `SetFit/subj` or `dair-ai/emotion`.
        split: which split of a Hugging Face data set is read; our own three splits are made of it.
        text: the column of texts.
        label: the column of classes.
        labels: the classes, and the words that stand for them where those are others: `"sports=sport"`; left out,
            all that are found, sorted.
        template: how a text becomes a prompt; `{text}`, then `{label}` at its end.
        long_texts: what happens to a text whose prompt is longer than `data.tokens`: `"refuse"`, or `"cut"`, which
            keeps its beginning.
        alpha: of the Dirichlet distribution by which training examples are dealt; small gives a client few classes.
        least: training examples that every client is to have at least.
        demonstrations: examples of its own that a client shows before each question for local in-context learning;
            as many of them as fit the model's context.

    Source: IFed-ICL for the Dirichlet deal and its alpha of 0.5; I2CL (arXiv 2405.14660) for balanced test questions.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", alias_generator=_kebab, validate_by_name=True, validate_by_alias=True
    )

    source: str = Field(default="bbc-news", min_length=1)
    split: str = Field(default="train", min_length=1)
    text: str = Field(default="text", min_length=1)
    label: str = Field(default="label", min_length=1)
    # Not strict: TOML and JSON know lists, and a frozen section holds a tuple.
    labels: tuple[str, ...] = Field(default=(), strict=False)
    template: str = "Text: {text}\nCategory: {label}"
    long_texts: Literal["refuse", "cut"] = "refuse"
    alpha: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    least: int = Field(default=0, ge=0)
    demonstrations: int = Field(default=4, ge=1)

    @field_validator("template")
    @classmethod
    def _placeholders(cls, value: str) -> str:
        if value.count(TEXT) != 1 or value.count(LABEL) != 1 or not value.endswith(LABEL):
            raise ValueError(f"write {TEXT} once and {LABEL} once, at the end: Text: {TEXT}\\nCategory: {LABEL}")
        return value

    @field_validator("labels")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        words = [label_word(entry)[1] for entry in value]
        if len(value) == 1 or len(set(words)) != len(words) or not all(words):
            raise ValueError("name at least two classes, each with a word of its own")
        return value


@dataclass(frozen=True)
class LabelledExample:
    """One text whose class is asked for.

    Attributes:
        client: whose example it is.
        split: `"train"`, `"validation"` or `"test"`.
        index: its number within client and split.
        prompt_ids: the template up to the label.
        candidates: the words of all classes.
        candidate_ids: their tokens as they continue the prompt.
        gold: index of the right class.
        shots_ids: the prompt with the client's demonstrations before it; of test examples only.
        separator_ids: the line break that ends a demonstration.
        task: the class, so that head and tail of a long tail can be told apart.
    """

    client: str
    split: str
    index: int
    prompt_ids: tuple[int, ...]
    candidates: tuple[str, ...]
    candidate_ids: tuple[tuple[int, ...], ...]
    gold: int
    shots_ids: tuple[int, ...]
    separator_ids: tuple[int, ...]
    further: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    removed_ids: tuple[int, ...] = ()
    question_start: int = 0
    task: str = ""


def label_word(entry: str) -> tuple[str, str]:
    """Splits an entry of `labels` into the class in the source and the word that stands for it."""
    label, equals, word = entry.partition("=")
    return label.strip(), (word if equals else label).strip()


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
    template = _Template(own, tokenizer, list(words.values()), settings.tokens)
    taken = _draw(settings, rows, words, seed)
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
    width = max(2, len(str(settings.clients)))
    names = [f"client-{number:0{width}}" for number in range(1, settings.clients + 1)]
    for name in settings.hold_out_clients:
        if name not in names:
            raise SettingsError(
                f'data.hold-out-clients names "{name}", which does not take part; choose from '
                f"{names[0]} to {names[-1]}."
            )
    if len(set(settings.hold_out_clients)) == len(names):
        raise SettingsError("data.hold-out-clients names every client, so that none trains; leave one out.")
    return names


def _words(own: ClassificationSettings, rows: Sequence[LabelledText]) -> dict[str, str]:
    """The classes and the words that stand for them, in the order in which they are offered."""
    counts = Counter(row.label for row in rows)
    words = dict(map(label_word, own.labels or sorted(counts)))
    for label in words:
        if counts[label] < len(SPLITS):
            raise DataError(
                f'{own.source} has {counts[label]} texts of the class "{label}", and it takes {len(SPLITS)} to train, '
                "validate and test it; add some, or leave the class out in classification.labels."
            )
    if missing := sorted(counts.keys() - words.keys()):
        raise DataError(
            f'classification.labels leaves out "{missing[0]}", which {own.source} has {counts[missing[0]]} times; name '
            "it, or remove those rows."
        )
    if len(words) < 2:
        raise DataError(f"{own.source} has one class only, so there is nothing to tell apart.")
    return words


def _draw(
    settings: DataSettings, rows: Sequence[LabelledText], words: dict[str, str], seed: int
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
    taken["train"] = _long_tailed([*kept, *rest], list(words), wanted["train"], settings.imbalance, seed)
    if settings.train and (absent := [label for label in words if label not in {r.label for r in taken["train"]}]):
        raise DataError(
            f'no client gets a training text of the class "{absent[0]}" when there are {wanted["train"]} of them; '
            "raise data.train."
        )
    return taken


def _long_tailed(
    rows: Sequence[LabelledText], labels: Sequence[str], number: int, imbalance: float, seed: int
) -> list[LabelledText]:
    """The first rows, with the source's shares of the classes, or with a long tail over them."""
    if imbalance == 1:
        return list(rows[:number])
    wanted = scaled_long_tail(labels, number, imbalance, seed)
    counts = {label: max(min(1, number), wanted[label]) for label in labels}
    taken = {label: [row for row in rows if row.label == label][: counts[label]] for label in labels}
    for label, found in taken.items():
        if len(found) < counts[label]:
            raise DataError(
                f"a long tail with data.imbalance = {imbalance:g} takes {counts[label]} training texts of the class "
                f'"{label}", and {len(found)} are left; lower data.train or data.imbalance.'
            )
    return [row for found in taken.values() for row in found]


def _balanced(left: dict[str, list[LabelledText]], number: int) -> list[LabelledText]:
    """Takes rows from the classes in turn, skipping those that are used up."""
    taken: list[LabelledText] = []
    while len(taken) < number and any(left.values()):
        taken += [some.pop() for some in left.values() if some][: number - len(taken)]
    return taken


class _Template:
    """Turns texts into prompts under the token budget."""

    def __init__(self, own: ClassificationSettings, tokenizer: Tokenizer, words: Sequence[str], tokens: int) -> None:
        self._own, self._tokenizer, self._tokens = own, tokenizer, tokens
        self._words = tuple(words)
        before, after = own.template.removesuffix(LABEL).split(TEXT)
        # The label is encoded with the space before it, as tokenizers do inside a text; the prompt ends before it.
        tail, space = after.rstrip(" "), " " * (len(after) - len(after.rstrip(" ")))
        self._before = before
        self._tail, self._separator = (tuple(ids) for ids in encode_texts(tokenizer, [tail, SEPARATOR]))
        self._labels = tuple(self._continuation(tail, space + word) for word in words)
        self._context = int(getattr(tokenizer, "model_max_length", 1 << 60))
        longest = tokens + max(map(len, self._labels)) + len(self._separator)
        if longest > self._context:
            raise SettingsError(
                f"data.tokens is {tokens}, and with the label that is more than the model's context of {self._context} "
                "tokens; lower it."
            )
        for i, ids in enumerate(self._labels):
            if ids in self._labels[:i]:
                raise SettingsError(
                    f'the labels "{words[self._labels.index(ids)]}" and "{words[i]}" have the same tokens; choose '
                    "other words in classification.labels."
                )

    def _continuation(self, tail: str, label: str) -> tuple[int, ...]:
        """A label's tokens after the prompt's end, as the tokenizer joins the two."""
        alone, joined = encode_texts(self._tokenizer, [tail, tail + label])
        if joined[: len(alone)] != alone or len(joined) == len(alone):
            raise SettingsError(
                "the tokenizer joins the template's end with a label into one token; end classification.template with "
                "a sign and a space before {label}."
            )
        return tuple(joined[len(alone) :])

    def examples(
        self, rows: Sequence[LabelledText], labels: Sequence[str], client: str, split: str
    ) -> list[LabelledExample]:
        made = []
        room = self._tokens - len(self._tail)
        for index, (row, ids) in enumerate(
            zip(rows, encode_texts(self._tokenizer, [self._before + row.text for row in rows]), strict=True)
        ):
            if len(ids) > room and (self._own.long_texts == "refuse" or room < 1):
                raise DataError(
                    f"{self._own.source}, row {row.row}: its prompt has {len(ids) + len(self._tail)} tokens and "
                    f'data.tokens is {self._tokens}; raise it, or set classification.long-texts = "cut".'
                )
            made.append(
                LabelledExample(
                    client=client,
                    split=split,
                    index=index,
                    prompt_ids=(*ids[:room], *self._tail),
                    candidates=self._words,
                    candidate_ids=self._labels,
                    gold=labels.index(row.label),
                    task=row.label,
                    shots_ids=(),
                    separator_ids=self._separator,
                )
            )
        return made

    def with_shots(
        self, asked: Sequence[LabelledExample], own: Sequence[LabelledExample], number: int, rng: random.Random
    ) -> list[LabelledExample]:
        """Puts the same demonstrations before every question, as many as leave room for the longest answer."""
        shown = [
            (*one.prompt_ids, *one.candidate_ids[one.gold], *one.separator_ids)
            for one in rng.sample(list(own), min(number, len(own)))
        ]
        made = []
        for one in asked:
            room = self._context - len(one.prompt_ids) - max(map(len, self._labels))
            fitting: list[int] = []
            for ids in shown:
                fitting += ids if len(fitting) + len(ids) <= room else ()
            made.append(replace(one, shots_ids=(*fitting, *one.prompt_ids)))
        return made
