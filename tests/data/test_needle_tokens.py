"""Answers have the tokens that they would have after their question, whatever a tokenizer adds to a text of its own."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from fednl.data.examples import Needle, encode_needles

WORDS = [
    *("\u2581", "\u2581Which", "\u2581Who", "\u2581Answer", "\u2581A", "\u2581B", "\u2581C", "\u2581D"),
    *("\u2581one", "\u2581two", "\u2581three", "\u2581four", "\n", "?", ":", ")", ".", "Which", "Who", "x"),
]
NEEDLE = Needle(("x.", "x."), 0, "\nWhich?", ("one", "two", "three", "four"), 1, (), (("\nWho?", "three"),))


class Prepending:
    """As Llama 2's and Mistral's: a mark for a space comes before every text, also where it begins with a space."""

    all_special_ids: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="x"))
        self.inner.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        self.inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex("\u2581"), "merged_with_next"),
                pre_tokenizers.Split(Regex(r"[:?.)\n]"), "isolated"),
            ]
        )

    def __call__(self, texts: list[str], **named: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [one.ids for one in self.inner.encode_batch(texts, add_special_tokens=False)]}


class Joining:
    """Makes one token of a colon and the space after it."""

    all_special_ids: list[int] = []  # noqa: RUF012

    def __call__(self, texts: list[str], **named: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(sign) for sign in text.replace(": ", "\0")] for text in texts]}


@pytest.mark.parametrize("tokenizer", [Prepending(), Joining()])
@pytest.mark.parametrize("answer", ["candidates", "letters"])
def test_f01_an_answer_is_encoded_with_its_question(tokenizer: Any, answer: str) -> None:
    one = encode_needles([NEEDLE], tokenizer, answer, further=1)[0]
    options = " A) one B) two C) three D) four" if answer == "letters" else ""
    asked = [f"\nWhich?{options} Answer: {text}" for text in one.candidates]
    assert [[*one.question, *ids] for ids in one.candidate_ids] == tokenizer(asked)["input_ids"]
    assert all(one.candidate_ids) and len(set(one.candidate_ids)) == 4
    for question, text in one.further:
        assert [*question, *text] == tokenizer(["\nWho? Answer: three"])["input_ids"][0]
    assert len(one.further) == (answer != "letters")


def test_f01_no_lone_mark_of_a_space_comes_before_an_answer() -> None:
    for answer, first in (("candidates", "\u2581two"), ("letters", "\u2581B")):
        one = encode_needles([NEEDLE], Prepending(), answer)[0]
        assert [WORDS[i] for i in one.candidate_ids[1]] == [first]
