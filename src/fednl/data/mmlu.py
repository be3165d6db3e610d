"""The MMLU task: four-choice questions, dealt to clients by subject as FedNL does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from fednl.data.client_checks import check_clients
from fednl.data.examples import LETTERS, Splits, Tokenizer, encode_texts, origin_of, shared_tokens
from fednl.data.packaged_questions import PACKAGED
from fednl.data.questions import Question, read_questions
from fednl.data.settings import DataSettings
from fednl.data.text_files import read_json, read_utf8
from fednl.errors import DataError, SettingsError
from fednl.section import Section
from fednl.seeding import python_rng

PAPER = "paper"
GROUPS = Path(__file__).with_name("mmlu_groups.json")
TEST_SHARE = 6
"""One question in so many is a test question. Source: FedNL's own counts, 915 and 183 of 1,098."""


class MmluSettings(Section):
    """The `[mmlu]` section; `data.train`, `data.validation` and `data.test` bound what a client has of each.

    Of a client's questions one in six is for testing; validation questions are taken out of the others.
    `evaluation.answer = "letters"` offers the choices and scores the letters, `"candidates"` leaves them out and scores
    their texts. Where two choices are the right text, either text is right, and of the letters the source's own alone.

    Args:
        source: `"packaged"`, a `.jsonl` file, a folder of MMLU's CSV or parquet files, or what `datasets` loads: a
            folder or an id such as `cais/mmlu`.
        splits: which splits of the source are pooled, each of which must hold a question; the paper's clients were made
            of the test split alone.
        groups: who holds which subjects: `"paper"` (its five clients), or a JSON file of
            `{"clients": {NAME: [SUBJECT, ...]}}`. Subjects that nobody holds are left out.
        shots: questions with their answers before every question, the same for all of a client's; they are put aside
            first, so that none is trained on or asked.
        template: `"paper"` is one line, `"harness"` has line breaks, as lm-evaluation-harness.
        long_questions: a prompt longer than `data.tokens` is refused (`"refuse"`), or left out (`"leave-out"`).

    Source: arXiv 2605.16350, appendix C.2; its line breaks are not stated.
    """

    source: str = Field(default=PACKAGED, min_length=1)
    # Not strict: TOML and JSON know lists, and a frozen section holds a tuple.
    splits: tuple[str, ...] = Field(default=("test",), min_length=1, strict=False)
    groups: str = Field(default=PAPER, min_length=1)
    shots: int = Field(default=0, ge=0)
    template: Literal["paper", "harness"] = "paper"
    long_questions: Literal["refuse", "leave-out"] = "refuse"


@dataclass(frozen=True)
class ChoiceExample:
    """One question with four answers.

    Attributes:
        client: whose example it is.
        split: `"train"`, `"validation"` or `"test"`.
        index: its number within client and split.
        subject: MMLU's name of the subject.
        prompt_ids: shots and question, up to what all four continuations share.
        candidates: four letters, or four texts.
        candidate_ids: their tokens as they continue the prompt.
        gold: index of the right one.
        origin: names the question, however it is asked (`fednl.data.examples.origin_of`).
    """

    client: str
    split: str
    index: int
    subject: str
    prompt_ids: tuple[int, ...]
    candidates: tuple[str, ...]
    candidate_ids: tuple[tuple[int, ...], ...]
    gold: int
    further: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    removed_ids: tuple[int, ...] = ()
    question_start: int = 0
    task: str = ""
    origin: str = ""


def build(
    settings: DataSettings,
    tokenizer: Tokenizer,
    window_tokens: int,
    answer: str,
    seed: int,
    own: MmluSettings,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Splits[ChoiceExample]]:
    """Makes every client's training, validation and test questions; none is in two of them.

    A client's draw does not depend on the others.

    Args:
        settings: the `[data]` section.
        tokenizer: the backbone's; nothing is added to it.
        window_tokens: not read: a prompt may be longer than a window or not.
        answer: `"letters"` or `"candidates"`.
        seed: the run's seed.
        own: the `[mmlu]` section.
        note: is told in one line which questions are left out because the source contradicts itself.

    Raises:
        SettingsError: the answer format, the groups, the clients or the token budget cannot be as set.
        DataError: the source cannot be read, or a client has no question or too few.
    """
    if answer not in ("letters", "candidates"):
        raise SettingsError(f'evaluation.answer is "{answer}"; the mmlu task knows "letters" and "candidates".')
    groups = read_groups(own.groups)
    names = client_names(settings, list(groups))
    questions = read_questions(own.source, own.splits, note)
    prompts = _Prompts(own, tokenizer, answer, settings.tokens)
    clients = {}
    for name in names:
        held = [one for one in questions if one.subject in set(groups[name])]
        python_rng(seed, "mmlu/draw", name).shuffle(held)
        shots, asked = held[: own.shots], held[own.shots :]
        made = prompts.examples(name, shots, asked)
        if not made:
            raise DataError(
                f'client "{name}" has no question: {own.source} holds {len(held)} of its subjects; name other splits '
                "in mmlu.splits, other groups in mmlu.groups, or raise data.tokens."
            )
        clients[name] = _dealt(made, settings, name)
    return clients


def read_groups(name: str) -> dict[str, list[str]]:
    """Reads who holds which subjects.

    Args:
        name: `"paper"`, or a JSON file.

    Raises:
        SettingsError: the file is missing, or is not such a list, or a subject is in two groups.
    """
    path = GROUPS if name == PAPER else Path(name).expanduser()
    try:
        clients = read_json(read_utf8(path, name), name)["clients"]
        groups = {str(client): [str(subject) for subject in held] for client, held in clients.items()}
    except (DataError, KeyError, TypeError, AttributeError):
        raise SettingsError(
            f'mmlu.groups = "{name}" is not a JSON file of {{"clients": {{NAME: [SUBJECT, ...]}}}}; mend it, or set it '
            f'to "{PAPER}".'
        ) from None
    everything = [subject for held in groups.values() for subject in held]
    if twice := [subject for subject in everything if everything.count(subject) > 1]:
        raise SettingsError(f'mmlu.groups = "{name}" gives "{twice[0]}" to two clients; one may hold it.')
    return groups


def client_names(settings: DataSettings, known: Sequence[str]) -> list[str]:
    """The names of the clients that take part, in the order of the groups.

    Raises:
        SettingsError: there are fewer groups than clients, or a held-out client does not take part.
    """
    if settings.clients > len(known):
        raise SettingsError(
            f"data.clients is {settings.clients}, but mmlu.groups has {len(known)}: {', '.join(known)}; lower it."
        )
    names = list(known[: settings.clients])
    check_clients(settings, names)
    return names


def _dealt(made: Sequence[ChoiceExample], settings: DataSettings, client: str) -> Splits[ChoiceExample]:
    """One in six to test, then validation, then training, each up to its bound."""
    test = max(1, len(made) // TEST_SHARE)
    held_out = client in settings.hold_out_clients
    validation = 0 if held_out else min(settings.validation, max(0, len(made) - test - 1))
    parts = {
        "test": made[:test][: settings.test],
        "validation": made[test : test + validation],
        "train": [] if held_out else made[test + validation :][: settings.train],
    }
    return Splits(
        **{split: [replace(one, split=split, index=i) for i, one in enumerate(part)] for split, part in parts.items()}
    )


class _Prompts:
    """Turns questions into prompts and what continues them."""

    def __init__(self, own: MmluSettings, tokenizer: Tokenizer, answer: str, tokens: int) -> None:
        self._own, self._tokenizer, self._tokens = own, tokenizer, tokens
        self._letters = answer == "letters"

    def text(self, one: Question) -> str:
        """The question as it is asked, up to `Answer:`."""
        joint = " " if self._own.template == "paper" else "\n"
        head = f"Question: {one.question}" if self._own.template == "paper" else one.question
        options = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, one.choices, strict=True)]
        return joint.join([head, *(options if self._letters else []), "Answer:"])

    def examples(self, client: str, shots: Sequence[Question], asked: Sequence[Question]) -> list[ChoiceExample]:
        """One example a question, in their order; those that are too long are left out or refused."""
        before = "".join(f"{self.text(one)} {self._answers(one)[one.gold]}\n\n" for one in shots)
        texts: list[str] = []
        for one in asked:
            prompt = before + self.text(one)
            texts += [prompt, *(f"{prompt} {answer}" for answer in self._answers(one))]
        encoded = encode_texts(self._tokenizer, texts)
        made = []
        for place, one in enumerate(asked):
            rows = encoded[place * 5 : place * 5 + 5]
            # Letters and texts are tokenised together with the prompt, so that none gets a token it would not have.
            # What all letters begin with (a space, where that is a token of its own) is read with the prompt: one pass.
            shared = shared_tokens(rows[1:] if self._letters else rows)
            if shared <= self._tokens:
                ids = tuple(tuple(row[shared:]) for row in rows[1:])
                made.append(
                    ChoiceExample(
                        client,
                        "",
                        0,
                        one.subject,
                        tuple(rows[1][:shared]),
                        self._answers(one),
                        ids,
                        one.gold,
                        origin=origin_of(*one.texts),
                    )
                )
            elif self._own.long_questions == "refuse":
                raise DataError(
                    f"{one.where}: its prompt has {shared} tokens and data.tokens is {self._tokens}; raise it, lower "
                    'mmlu.shots, or set mmlu.long-questions = "leave-out".'
                )
        return made

    def _answers(self, one: Question) -> tuple[str, ...]:
        return LETTERS if self._letters else one.choices
