"""A labelled text as a prompt that its label continues, with or without demonstrations before it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fednl.data.classification_settings import LABEL, TEXT, ClassificationSettings
from fednl.data.examples import Tokenizer, encode_texts, origin_of
from fednl.data.labelled_texts import LabelledText
from fednl.errors import DataError, SettingsError

SEPARATOR = "\n"


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
        origin: names the text, however much of it is shown (`fednl.data.examples.origin_of`).
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
    origin: str = ""


class Template:
    """Turns texts into prompts under the token budget.

    Args:
        own: the template and what happens to long texts.
        tokenizer: the backbone's.
        words: what stands for each class.
        tokens: the budget of a prompt without its label.

    Raises:
        SettingsError: budget, template or words do not fit the tokenizer.
    """

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
                    f"{own.called(words[self._labels.index(ids)], words)} and {own.called(words[i], words)} have the "
                    "same tokens; choose other words in classification.labels."
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
        """Turns texts into examples.

        Args:
            rows: texts with their classes.
            labels: the classes in the order of the words.
            client: whose they are.
            split: which of its splits they are.

        Raises:
            DataError: a text is longer than the budget and not to be cut.
        """
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
                    origin=origin_of(row.words),
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
