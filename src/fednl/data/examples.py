"""What a needle example is, and how its texts become tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

LETTERS = ("A", "B", "C", "D")


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encodes a list of texts."""

    @property
    def all_special_ids(self) -> list[int]:
        """Tokens that are not text."""


@dataclass(frozen=True)
class Needle:
    """What one example is about, before it has a place: sentences, a question and four answers.

    Attributes:
        events: the sentences, in the order in which they appear.
        queried: index of the event that the question is about.
        question: the question without its `Answer:`, from the line break on.
        candidates: four distinct answers, in the order in which they are offered.
        gold: index of the right one.
        unique: texts that the filler around the events must not hold, so that a value occurs once.
        further: questions about the other events, each with its answer, in a random order.
    """

    events: tuple[str, ...]
    queried: int
    question: str
    candidates: tuple[str, ...]
    gold: int
    unique: tuple[str, ...]
    further: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Event:
    """A needle in its haystack.

    Attributes:
        text: the sentence.
        start: its first token in the prompt (the sentence is encoded with a leading space).
        end: one past its last token.
        depth: start as a fraction of the tokens before the question.
    """

    text: str
    start: int
    end: int
    depth: float


@dataclass(frozen=True)
class NeedleExample:
    """One question about one haystack.

    Attributes:
        client: whose example it is.
        split: `"train"`, `"validation"` or `"test"` (`"public"` for the practice task).
        index: its number within client and split.
        prompt_ids: haystack and question, exactly `data.tokens` long, ending with `Answer:`.
        question_start: first token of the question.
        candidates: four distinct answers.
        candidate_ids: their tokens as they continue the prompt (each encoded with the question and a space).
        gold: index of the right candidate.
        events: the needles in the order of their positions.
        queried: index of the event asked for; where the answer needs all of them, the last.
        removed_ids: the same prompt with every event's tokens replaced by further filler, equally long.
        further: (question, answer) tokens of more questions about the same haystack, which training may ask
            after the first answer.
        task: where a client holds several kinds of data, or a stream of them, which of these; else empty.
    """

    client: str
    split: str
    index: int
    prompt_ids: tuple[int, ...]
    question_start: int
    candidates: tuple[str, ...]
    candidate_ids: tuple[tuple[int, ...], ...]
    gold: int
    events: tuple[Event, ...]
    queried: int
    removed_ids: tuple[int, ...]
    further: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    task: str = ""


class Example(Protocol):
    """What training, scoring and the list of who holds what read of an example of any task."""

    @property
    def client(self) -> str:
        """Whose example it is."""

    @property
    def index(self) -> int:
        """Its number within client and split."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's tokens, answer excluded."""

    @property
    def removed_ids(self) -> tuple[int, ...]:
        """The prompt without what the answer stands in; empty where a task has no such thing."""

    @property
    def question_start(self) -> int:
        """Position of the question's first token in the prompt."""

    @property
    def candidate_ids(self) -> tuple[tuple[int, ...], ...]:
        """Each candidate's tokens as they continue the prompt."""

    @property
    def gold(self) -> int:
        """Position of the right candidate."""

    @property
    def further(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """(question, answer) tokens that training may ask after the first answer."""

    @property
    def task(self) -> str:
        """The task that it belongs to in a stream of tasks; empty where there is none."""


class Demonstrated(Example, Protocol):
    """An example that can be shown with its answer."""

    @property
    def separator_ids(self) -> tuple[int, ...]:
        """The line break that ends a demonstration."""


AnyExample = TypeVar("AnyExample", bound=Example)


@dataclass(frozen=True)
class Splits(Generic[AnyExample]):
    """A client's examples; no text is in two of the three lists."""

    train: list[AnyExample]
    validation: list[AnyExample]
    test: list[AnyExample]


@dataclass(frozen=True)
class Encoded:
    """A needle's tokens, not yet placed."""

    needle: Needle
    events: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    candidates: tuple[str, ...]
    candidate_ids: tuple[tuple[int, ...], ...]
    further: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def window_needed(self) -> int:
        """Tokens of the question and the longest answer: what a window must show at once."""
        return len(self.question) + max(len(ids) for ids in self.candidate_ids)

    @property
    def event_tokens(self) -> int:
        """Tokens of all events together."""
        return sum(len(ids) for ids in self.events)


def origin_of(*texts: str) -> str:
    """Names the item of a source that an example is made of: 32 hexadecimal digits, the same however it is asked.

    Args:
        texts: what makes it this item, whatever is cut off or put around it.
    """
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:32]


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encodes many texts at once, without special tokens and without truncation."""
    if not texts:
        return []
    out = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids: list[list[int]] = out["input_ids"]
    return ids


def shared_tokens(rows: Sequence[Sequence[int]]) -> int:
    """How many first tokens all rows have in common."""
    shortest = min(map(len, rows))
    return next((i for i in range(shortest) if len({row[i] for row in rows}) > 1), shortest)


def encode_needles(needles: Sequence[Needle], tokenizer: Tokenizer, answer: str, further: int = 0) -> list[Encoded]:
    """Encodes events, questions and answers in the wanted answer format.

    An answer is encoded together with its question, so that it gets no token that it would not have in the text.

    Args:
        needles: what the examples are about.
        tokenizer: the backbone's.
        answer: `"letters"` lists the four options after the question and answers with a letter (the paper's
            format); otherwise the answers are the candidates' own texts.
        further: how many of the further questions are kept at most; none where answers are letters.
    """
    if answer == "letters":
        further = 0
    texts: list[str] = []
    answers = [LETTERS if answer == "letters" else needle.candidates for needle in needles]
    for needle, options in zip(needles, answers, strict=True):
        texts += [f" {event}" for event in needle.events]
        texts += _answered(_question(needle, answer), options)
        for asked, text in needle.further[:further]:
            texts += _answered(f"{asked} Answer:", [text])
    ids = iter(encode_texts(tokenizer, texts))
    encoded = []
    for needle, options in zip(needles, answers, strict=True):
        events = tuple(tuple(next(ids)) for _ in needle.events)
        question, candidate_ids = _parted([next(ids) for _ in range(1 + len(options))])
        pairs = [_parted([next(ids), next(ids)]) for _ in needle.further[:further]]
        more = tuple((asked, answered) for asked, (answered,) in pairs)
        encoded.append(Encoded(needle, events, question, tuple(options), candidate_ids, more))
    return encoded


def _answered(question: str, answers: Sequence[str]) -> list[str]:
    return [question, *(f"{question} {answer}" for answer in answers)]


def _parted(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """A question's tokens as far as its answers leave them, and each answer's."""
    shared = shared_tokens(rows)
    return tuple(rows[0][:shared]), tuple(tuple(row[shared:]) for row in rows[1:])


def _question(needle: Needle, answer: str) -> str:
    if answer != "letters":
        return f"{needle.question} Answer:"
    options = " ".join(f"{letter}) {text}" for letter, text in zip(LETTERS, needle.candidates, strict=True))
    return f"{needle.question} {options} Answer:"
