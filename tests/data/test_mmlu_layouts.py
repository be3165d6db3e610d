"""Copies of MMLU as the hub and its authors lay it out, and that each named split is there."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fednl.data.mmlu import read_groups
from fednl.data.questions import Question, read_questions
from fednl.errors import DataError, SettingsError

SPLITS = {"test": 4, "validation": 2, "dev": 1}
ROW = {"question": "What is it?", "choices": list("abcd"), "answer": 0, "subject": "anatomy"}
UNREADABLE = [
    '{"question": "half a pair: \\ud83d?"}',
    "[" * 100_000,
    '{"answer": ' + "1" * 6000 + "}",
    '{"a": ',
    "null",
]
SUBJECTS = ("abstract_algebra", "anatomy")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import datasets
    except ImportError:  # whoever needs it is skipped
        return
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def parquet(file: Path, split: str, subjects: tuple[str, ...]) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = {"question": datasets.Value("string"), "subject": datasets.Value("string")}
    kinds |= {"choices": datasets.Sequence(datasets.Value("string")), "answer": datasets.ClassLabel(names=list("ABCD"))}
    numbered = [(subject, number) for subject in subjects for number in range(SPLITS[split])]
    columns = {
        "question": [f"{split} question {number} of {subject}" for subject, number in numbered],
        "subject": [subject for subject, _ in numbered],
        "choices": [list("abcd")] * len(numbered),
        "answer": [number % 4 for _, number in numbered],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).to_parquet(file)


def copy(folder: Path, *, card: bool = True, whole: bool = True) -> Path:
    """A repository with a card, a folder for each subject, and one for all of them."""
    held = {subject: (subject,) for subject in SUBJECTS} | ({"all": SUBJECTS} if whole else {})
    lines = ["---", "configs:"]
    for name, subjects in held.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split in SPLITS:
            parquet(folder / name / f"{split}-00000-of-00001.parquet", split, subjects)
            lines += [f"  - split: {split}", f"    path: {name}/{split}-*"]
    if card:
        (folder / "README.md").write_text("\n".join([*lines, "---", "# MMLU", ""]), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("card", "whole"), [(True, True), (False, True), (False, False)])
def test_a_copy_of_the_hubs_files_is_read_by_split(tmp_path: Path, card: bool, whole: bool) -> None:
    source = str(copy(tmp_path / "copy", card=card, whole=whole))
    for splits in (["test"], ["dev"], ["validation"], ["test", "validation", "dev"]):
        found = read_questions(source, splits)
        assert len(found) == 2 * sum(SPLITS[split] for split in splits)
        assert {(one.split, one.question.split()[0]) for one in found} == {(split, split) for split in splits}
        assert {one.subject for one in found} == set(SUBJECTS)


def test_one_folder_of_a_copy_is_a_source_too(tmp_path: Path) -> None:
    source = copy(tmp_path / "copy") / "anatomy"
    found = read_questions(str(source), ["test", "dev"])
    assert len(found) == 5 and {one.subject for one in found} == {"anatomy"}
    assert found[0].where == "anatomy/test-00000-of-00001.parquet, row 1" and [one.gold for one in found[:3]] == [
        0,
        1,
        2,
    ]


def test_csv_files_in_mmlus_layout(tmp_path: Path) -> None:
    for split, numbers in (("test", range(3)), ("dev", range(3, 5))):
        (tmp_path / split).mkdir()
        with (tmp_path / split / f"anatomy_{split}.csv").open("w", newline="", encoding="utf-8") as file:
            for n in numbers:
                csv.writer(file).writerow([f'What is {n}, with "quotes"?', *"wxyz", "ABCD"[n % 4]])
    found = read_questions(str(tmp_path), ["test"])
    assert [one.gold for one in found] == [0, 1, 2]
    text, choices = 'What is 0, with "quotes"?', tuple("wxyz")
    assert found[0] == Question("anatomy", text, choices, 0, "test", "anatomy_test.csv, row 1")
    assert len(read_questions(str(tmp_path), ["test", "dev"])) == 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"caf\xe9,a,b,c,d,A\n", "not UTF-8"),
        (b"a\nb,c\n", "has 1 fields"),
        # A quotation mark that nothing closes: two rows would be read as one question, with the second one's answer.
        (b'Q zero,i,j,k,l,C\n"Q one,a,b,c,d,A\n"Q two,e,f,g,h,B\n', r"row 2 \(up to line 3\), is not readable"),
        (b'Q zero,i,j,k,l,C\n"Q one,a,b,c,d,A\n', "row 2 .* is not readable"),
    ],
)
def test_a_csv_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "anatomy_test.csv").write_bytes(content)
    with pytest.raises(DataError, match=rf"^anatomy_test\.csv.*{words}"):
        read_questions(str(tmp_path), ["test"])


def original(folder: Path) -> Path:
    """Its authors' files, whose validation questions are in `val`."""
    for split in ("test", "val", "dev"):
        (folder / split).mkdir(parents=True)
        (folder / split / f"anatomy_{split}.csv").write_text(f"What is {split}?,a,b,c,d,A\n", encoding="utf-8")
    return folder


def test_the_original_val_is_validation(tmp_path: Path) -> None:
    source = str(original(tmp_path / "data"))
    for name in ("val", "validation"):
        assert [(one.question, one.subject) for one in read_questions(source, [name])] == [("What is val?", "anatomy")]
    assert len(read_questions(source, ["test", "validation"])) == 2


def test_blank_lines_are_no_questions(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "anatomy_test.csv").write_bytes(b"one?,a,b,c,d,A\r\n\r\ntwo?,a,b,c,d,B\r\n\r\n")
    found = read_questions(str(tmp_path), ["test"])
    assert [(one.question, one.where[-5:]) for one in found] == [("one?", "row 1"), ("two?", "row 3")]


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("splits", [["trian"], ["test", "trian"]])
def test_a_split_that_the_source_lacks_is_told(tmp_path: Path, kind: str, splits: list[str]) -> None:
    if kind == "csv":
        source = original(tmp_path / "data")
    elif kind == "parquet":
        source = copy(tmp_path / "data")
    else:
        source = tmp_path / "data.jsonl"
        rows = [ROW | {"question": f"What is {name}?", "split": name} for name in ("dev", "test", "a private note")]
        source.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    with pytest.raises(SettingsError, match=r'mmlu\.splits names "trian", and .* choose from: dev, test') as error:
        read_questions(str(source), splits)
    assert "private" not in str(error.value)


@pytest.mark.parametrize("line", UNREADABLE)
def test_json_that_cannot_be_read_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"q\.jsonl, line 2, .*mend it"):
        read_questions(str(file), ["test"])
    file.write_text(f'{{"clients": {line}}}', encoding="utf-8")
    with pytest.raises(SettingsError, match=r"mmlu\.groups = .* is not a JSON file"):
        read_groups(str(file))


def test_a_split_of_nothing_is_none(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps(ROW | {"split": None}), encoding="utf-8")
    assert [one.split for one in read_questions(str(file), ["test"])] == [""]
