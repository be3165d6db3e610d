"""Which test questions a run met in training, for every task that draws both from one source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fednl.config import Config
from fednl.data.tasks import DRAWN, TASKS
from fednl.errors import SettingsError
from fednl.holdings import held, met_before
from fednl.overlap import check_unmet
from fednl.runs import Run
from small_run import byte_tokenizer

FEW = {"clients": 2, "tokens": 500, "train": 100, "validation": 3, "test": 4}


def config(folder: Path, task: str, answer: str = "candidates", **data: Any) -> Config:
    """Settings over a source of this task, which is written into the folder."""
    subjects = ["jurisprudence", "astronomy"]
    questions = [
        {
            "question": f"Case {n}? {'x' * (7 * n % 90)}",
            "choices": [*"pqrs"],
            "answer": n % 4,
            "subject": subjects[n % 2],
        }
        for n in range(120)
    ]
    texts = [{"text": f"Text number {n} of {n * n}.", "label": ("calm", "loud")[n % 2]} for n in range(160)]
    sentences = " ".join(f"The court sat on day {n} and heard case {n * 7 % 1009} of that year." for n in range(500))
    for name, rows in (("questions", questions), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "law.txt").write_text(sentences, encoding="utf-8")
    groups = {"clients": {"law": ["jurisprudence"], "stem": ["astronomy"]}}
    (folder / "groups.json").write_text(json.dumps(groups), encoding="utf-8")
    own: dict[str, dict[str, Any]] = {
        "mmlu": {"source": str(folder / "questions.jsonl"), "groups": str(folder / "groups.json")},
        "classification": {"source": str(folder / "texts.jsonl"), "demonstrations": 1},
        "text": {"sources": [str(folder / "law.txt")]},
    }
    own["mmlu"]["long-questions"] = "leave-out"
    table = {
        "data": FEW | {"task": task, **data},
        "evaluation": {"answer": answer, "arms": ["federated"]},
        task: own[task],
    }
    return Config.from_dict(table)


def counted(folder: Path, task: str, own: dict[str, Any], now: dict[str, Any]) -> tuple[int, int, int]:
    """How many of the test questions are met, by `origin`, how many by their tokens, and how many there are."""
    then, after = (held(config(folder, task, **some), byte_tokenizer()) for some in (own, now))
    trained = {one.prompt_ids for splits in then.values() for one in (*splits.train, *splits.validation)}
    asked = [one for splits in after.values() for one in splits.test]
    return sum(met_before(then, after).values()), sum(one.prompt_ids in trained for one in asked), len(asked)


def test_every_task_is_drawn_or_made() -> None:
    assert set(TASKS) - set(DRAWN) == {"needles", "public"}  # made: no split has what another has


@pytest.mark.parametrize(
    ("task", "own", "now"),
    [
        ("mmlu", {"tokens": 60, "test": 100}, {"tokens": 500, "test": 100}),
        ("classification", {"train": 60}, {"train": 20, "test": 30}),
        ("classification", {"train": 60}, {"clients": 9, "train": 1}),
    ],
)
def test_questions_that_were_trained_on_are_counted(
    tmp_path: Path, task: str, own: dict[str, Any], now: dict[str, Any]
) -> None:
    met, alike, asked = counted(tmp_path, task, own, now)
    assert met == alike > 0 and met < asked
    assert counted(tmp_path, task, own, own)[0] == 0


def test_an_item_is_known_again_by_its_source_and_not_by_what_is_shown_of_it(tmp_path: Path) -> None:
    met, alike, _ = counted(tmp_path, "mmlu", {"tokens": 60, "test": 100}, {"answer": "letters", "test": 100})
    assert met > 0 == alike


@pytest.mark.parametrize("now", [{"tokens": 90}, {"test": 9}, {"clients": 3}, {"validation": 0, "train": 1}])
def test_a_texts_part_for_testing_is_never_trained_on(tmp_path: Path, now: dict[str, Any]) -> None:
    then, after = (held(config(tmp_path, "text", **{"tokens": 120, **some}), byte_tokenizer()) for some in ({}, now))

    def days(splits: list[Any]) -> set[str]:
        read = [str(byte_tokenizer().decode(one.prompt_ids + one.candidate_ids[0])) for one in splits]
        return {part for text in read for part in text.split(".") if "day" in part and "year" in part}

    trained = {day for splits in then.values() for day in days(splits.train + splits.validation)}
    asked = {day for splits in after.values() for day in days(splits.test)}
    assert asked and trained and not asked & trained


@pytest.mark.parametrize(
    ("own", "now", "refused"),
    [
        (("text", ["bbc-news/tech", "bbc-news/sports"]), ("classification", "bbc-news"), True),
        (("text", ["bbc-news/tech", "generated"], ("tech",)), ("classification", "bbc-news"), False),
        (("text", ["a.txt"]), ("classification", "bbc-news"), False),
        (("classification", "bbc-news"), ("text", ["generated", "bbc-news/tech"]), True),
        (("classification", "x/a.jsonl"), ("mmlu", "x/a.jsonl"), True),
        (("classification", "x/a.jsonl"), ("mmlu", "x/b.jsonl"), False),
        (("classification", "x/a.jsonl"), ("mmlu", "./x/../x/a.jsonl"), True),
        (("text", ["generated", "bbc-news/sports", "bbc-news/tech"]), ("classification", "bbc-news/tech"), False),
        (("classification", "bbc-news/tech"), ("text", ["generated", "bbc-news/sports", "bbc-news/tech"]), False),
    ],
)
def test_another_task_over_the_same_source_is_refused(tmp_path: Path, own: Any, now: Any, refused: bool) -> None:
    def over(task: str, source: Any, hold_out: tuple[str, ...] = ()) -> Config:
        key = "sources" if task == "text" else "source"
        data = {"task": task, "clients": 2, "hold-out-clients": list(hold_out)}
        return Config.from_dict({"data": data, "evaluation": {"arms": ["federated"]}, task: {key: source}})

    def check(arm: str) -> None:
        asked = over(*now).with_overrides([f"evaluation.arms=['{arm}']"])
        check_unmet(Run(tmp_path), over(*own), asked, {}, None, {})  # type: ignore[arg-type]

    if refused:
        with pytest.raises(SettingsError, match=f"--task {now[0]}: its source .* trained on, as the task {own[0]}"):
            check("federated")
    else:
        check("federated")
    check("full-attention" if now[0] == "mmlu" else "zero-shot" if now[0] == "classification" else "window-only")
