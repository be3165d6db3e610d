"""What scoring one question gives, and its file format: numbers and positions, no text. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fednl.errors import DataError
from fednl.files import write_atomic


@dataclass(frozen=True)
class Outcome:
    """How one arm answered one question.

    Args:
        client: the client the question belongs to.
        index: the question's number within the client's split; pairs the arms.
        chosen: position of the candidate with the highest score.
        gold: position of the right candidate.
        correct: whether the chosen candidate is the right one.
        recall: whether greedy generation reproduces the right candidate's tokens.
        nats_per_token: cross-entropy of the right candidate, averaged over its tokens.
        token_accuracy: share of the right candidate's tokens that are the likeliest given those before.
        gold_tokens: tokens of the right candidate.
        task: where a client holds several kinds of data, or a stream of them, which of these asks; else empty.
        question: names what was asked (`fednl.data.partition.question_digest`), so that answers to another question
            are not taken for answers to this one; empty in files from before there was a name.
    """

    client: str
    index: int
    chosen: int
    gold: int
    correct: bool
    recall: bool
    nats_per_token: float
    token_accuracy: float
    gold_tokens: int
    task: str = ""
    question: str = ""

    @property
    def logprob_gold(self) -> float:
        """Log probability of the right candidate per token, in nats."""
        return -self.nats_per_token


def save_outcomes(path: Path, arms: Mapping[str, Sequence[Outcome]]) -> None:
    """Writes the outcomes of every arm as JSON lines, one question a line; the whole file or nothing.

    Args:
        path: the file; its folder must exist. An older one is replaced.
        arms: arm -> outcomes; not modified.

    Raises:
        OSError: the file cannot be written.
    """
    lines = [json.dumps({"arm": arm, **asdict(outcome)}) for arm, found in arms.items() for outcome in found]
    write_atomic(path, "".join(line + "\n" for line in lines).encode("utf-8"))


def load_outcomes(path: Path) -> dict[str, list[Outcome]]:
    """Reads what `save_outcomes` wrote.

    Args:
        path: the file.

    Returns:
        Arm -> outcomes, in the file's order. An arm without outcomes is not in the file.

    Raises:
        DataError: a line is not an outcome.
    """
    names = [field.name for field in fields(Outcome) if field.default is MISSING]
    arms: dict[str, list[Outcome]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record: dict[str, Any] = json.loads(line)
            outcome = Outcome(**{name: record[name] for name in names})
            later = {name: record.get(name, "") for name in ("task", "question")}
            outcome = replace(outcome, **later)
            arms.setdefault(record["arm"], []).append(outcome)
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path} line {number} is not an outcome: measure the run again.") from None
    return arms


def unlike_questions(some: Sequence[Outcome], others: Sequence[Outcome]) -> int:
    """Counts the questions that have one client and number in two arms, and are not the same.

    Args:
        some: outcomes of one arm, in any order.
        others: outcomes of another, or of another run. A question that one of the two does not name counts as the same.
    """
    named = {(one.client, one.index): one.question for one in some if one.question}
    pairs = [(named.get((one.client, one.index), one.question), one.question) for one in others if one.question]
    return sum(first != second for first, second in pairs)


def other_questions(some: Sequence[Outcome], others: Sequence[Outcome]) -> bool:
    """Says whether two lines answered other questions, so that no answer of one is paired with one of the other.

    Args:
        some: outcomes of one line, in any order.
        others: outcomes of another. Clients that only one of the two has do not count.
    """
    if unlike_questions(some, others):
        return True
    first, second = ({(one.client, one.index): one.gold for one in arm} for arm in (some, others))
    both = {client for client, _ in first} & {client for client, _ in second}
    return any(first.get(place) != second.get(place) for place in first.keys() | second.keys() if place[0] in both)


def values_by_client(outcomes: Sequence[Outcome], field: str) -> dict[str, list[float]]:
    """Gives one number of every outcome, by client and in the order of the questions, which pairs it with others'.

    Args:
        outcomes: of one arm, in any order.
        field: the name of a numeric field of `Outcome`, or of a property.
    """
    clients: dict[str, list[float]] = {}
    for one in sorted(outcomes, key=lambda one: (one.client, one.index)):
        clients.setdefault(one.client, []).append(float(getattr(one, field)))
    return clients
