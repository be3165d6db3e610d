"""Answers that stay in a run's folder: read, written, removed, and held to the questions that are asked now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fednl.arms import VIEWS
from fednl.errors import CheckpointError, DataError, FednlError
from fednl.evaluation.outcomes import Outcome, load_outcomes, save_outcomes
from fednl.runs import Run

OnEvent = Callable[[Mapping[str, Any]], None]
OUTCOMES = ".outcomes.jsonl"
AFTER = "@"
"""Parts an arm's name from the number of tasks after which it answered, in the outcomes of a stream."""
STREAMS = "streams-"
"""Begins the name of a file of long texts that a run has read (`fednl.reproduce.streaming`), a line an arm and text."""


def check_questions(
    path: Path,
    found: Mapping[str, Sequence[Outcome]],
    questions: Mapping[str, Sequence[str]],
    then: Mapping[str, str],
    now: Mapping[str, str],
) -> None:
    """Refuses answers to other questions than are asked now, as they would be paired with answers to these.

    Args:
        path: the file of the answers.
        found: the answers by arm, those that are to stay.
        questions: client -> what its questions are called now, in their order (`question_digest`).
        then: client -> SHA-256 of its questions, as the results of before say; for answers that name no question.
        now: the same as they are now.

    Raises:
        CheckpointError: names the arms and how to go on.
    """

    def is_other(one: Outcome) -> bool:
        if not one.question:
            return now.get(one.client) != then.get(one.client, now.get(one.client))
        return one.question not in questions.get(one.client, ())[one.index : one.index + 1]

    others = [arm for arm, outcomes in found.items() if any(map(is_other, outcomes))]
    if others:
        raise CheckpointError(
            f"{path} holds answers of {', '.join(others)} to other questions than are asked now, and they cannot be "
            "compared: put back the texts they are made of, or remove that file and have all arms measured again."
        )


def forget(run: Run, trained: Collection[str]) -> None:
    """Removes the results of arms whose rules are about to be trained further: they are no longer of those rules.

    Args:
        run: the run.
        trained: names in `TRAINED`.
    """
    for path in (run.path / "results").glob(f"*{OUTCOMES}"):
        arms = {name.partition(AFTER)[0] for name in earlier(path)}
        if any(arm not in VIEWS or VIEWS[arm].rules in trained for arm in arms):
            path.unlink()
            path.with_name(path.name.removesuffix(OUTCOMES) + ".json").unlink(missing_ok=True)
    for path in (run.path / "results").glob(f"{STREAMS}*.jsonl"):
        arms = {str(line.get("arm")) for line in Run(path.parent).read_jsonl(path.name)}
        if any(arm not in VIEWS or VIEWS[arm].rules in trained for arm in arms):
            path.unlink()


def earlier(path: Path, on_event: OnEvent = lambda event: None) -> dict[str, list[Outcome]]:
    """Gives the outcomes of earlier sittings by arm; damaged ones are told and measured again."""
    try:
        return load_outcomes(path) if path.exists() else {}
    except DataError:
        on_event({"event": "note", "text": f"{path} is damaged, so everything in it is measured again"})
        return {}


def keep(path: Path, found: Mapping[str, Sequence[Outcome]]) -> None:
    """Writes outcomes by arm, whole or not at all.

    Raises:
        FednlError: the file cannot be written.
    """
    try:
        save_outcomes(path, found)
    except OSError as error:
        raise FednlError(f"cannot write {path}: {error.strerror or error}; free some space and resume.") from None
