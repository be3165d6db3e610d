"""What the tiny scale runs on: a random model, generated filler, questions and texts; its numbers mean nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fednl.data.fillers import generated_text
from fednl.data.mmlu import PAPER, read_groups
from fednl.files import write_atomic
from fednl.seeding import python_rng

_SENTENCES, _QUESTIONS, _TEXTS = 500, 18, 60
_CLASSES = ("calm", "loud")


def tiny_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Makes the model and the texts of the tiny scale once, and gives the settings that name them.

    Beside the filler that the settings name, the folder holds `questions.jsonl`, some for each of the paper's MMLU
    clients, `texts.jsonl`, labelled ones of two classes, and `river.txt` and `market.txt`, two texts.

    Args:
        folder: where; made if it is missing.
    """
    filler = folder / "filler.txt"
    if not filler.exists():  # written last: then all is there
        from fednl.models.tiny import tiny_backbone

        tiny_backbone(folder)
        _write_lines(folder / "questions.jsonl", _questions())
        _write_lines(folder / "texts.jsonl", _texts())
        for name in ("river", "market"):
            text = generated_text(python_rng(0, "tiny/text", name), _SENTENCES)
            write_atomic(folder / f"{name}.txt", text.encode("utf-8"))
        write_atomic(filler, generated_text(python_rng(0, "tiny/filler"), _SENTENCES).encode("utf-8"))
    return {"backbone": {"id": str(folder)}, "data": {"filler": str(filler)}}


def _questions() -> Iterable[Mapping[str, Any]]:
    rng = python_rng(0, "tiny/questions")
    for subjects in read_groups(PAPER).values():
        for number in range(_QUESTIONS):
            a, b = rng.randrange(10, 99), rng.randrange(10, 99)
            choices = [str(a + b + gap) for gap in (0, 1, 2, 3)]
            yield {
                "question": f"{a} + {b}?",
                "choices": choices,
                "answer": 0,
                "subject": subjects[number % len(subjects)],
            }


def _texts() -> Iterable[Mapping[str, str]]:
    rng = python_rng(0, "tiny/texts")
    for number in range(_TEXTS):
        label = _CLASSES[number % len(_CLASSES)]
        yield {"text": f"{label[0] * rng.randrange(2, 9)} {rng.randrange(1000)}", "label": label}


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8"))
