"""The settings of the classification task: which texts, which classes, which prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, field_validator

from fednl.data.well_known_texts import WELL_KNOWN
from fednl.section import Section

TEXT, LABEL = "{text}", "{label}"


class ClassificationSettings(Section):
    """The `[classification]` section; clients and counts stand in `[data]`.

    `data.train` is the mean over clients, as the deal is uneven; validation and test questions are dealt evenly.

    Args:
        source: a packaged name (`bbc-news`); a `.csv`, `.tsv`, `.jsonl`, `.json` or `.parquet` file; a folder that
            `datasets` saved, or a copy of a Hugging Face data set's files; or its id, such as `fancyzhx/ag_news`,
            `SetFit/subj` or `dair-ai/emotion`.
        split: which split of a Hugging Face data set is read; our own three splits are made of it.
        text: the column of texts.
        label: the column of classes.
        labels: the classes, and the words that stand for them where those are others: `"sports=sport"`; left out,
            all that are found, sorted. `ag-news`, `subj`, `emotion` or `emo` alone stands for the classes of that set.
        template: how a text becomes a prompt; `{text}`, then `{label}` at its end.
        long_texts: what happens to a text whose prompt is longer than `data.tokens`: `"refuse"`, or `"cut"`, which
            keeps its beginning.
        alpha: of the Dirichlet distribution by which training examples are dealt; small gives a client few classes.
        least: training examples that every client is to have at least.
        demonstrations: examples of its own that a client shows before each question for local in-context learning;
            as many of them as fit the model's context.

    Source: IFed-ICL for the Dirichlet deal and its alpha of 0.5; I2CL (arXiv 2405.14660) for balanced test questions.
    """

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
        if len(value) == 1 and value[0] in WELL_KNOWN:
            return value
        if len(value) == 1 or len(set(words)) != len(words) or not all(words):
            raise ValueError(
                f"name at least two classes, each with a word of its own, or one of: {', '.join(WELL_KNOWN)}"
            )
        return value

    def called(self, name: str, names: Sequence[str]) -> str:
        """What an error calls a class or its word: by its place, unless `labels` names it, as it may be private text.

        Args:
            name: the class, or its word.
            names: all of them, in the order in which they are offered.
        """
        return f'the class "{name}"' if self.labels else f"class {names.index(name) + 1} of {len(names)} (sorted)"


def label_word(entry: str) -> tuple[str, str]:
    """Splits an entry of `labels` into the class in the source and the word that stands for it."""
    label, equals, word = entry.partition("=")
    return label.strip(), (word if equals else label).strip()
