"""Labelled texts from wherever the user has them: a file, a Hugging Face data set, or a packaged set."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednl.data.packaged_texts import PACKAGED_TEXTS, fetch_texts
from fednl.data.text_files import read_json, read_utf8
from fednl.errors import DataError, SettingsError

_TABLES = {".csv": ",", ".tsv": "\t"}
_FILES = (*_TABLES, ".jsonl", ".ndjson", ".json")
_SAVED = ("state.json", "dataset_dict.json")
"""One of these stands in a folder that `save_to_disk` wrote."""
_LARGEST_FIELD = 1 << 24


@dataclass(frozen=True)
class LabelledText:
    """A text and its class.

    Attributes:
        text: without white space at its ends.
        label: as it stands in the source.
        row: where it stands, counted from 1, for messages that must not show the text.
    """

    text: str
    label: str
    row: int

    @property
    def words(self) -> str:
        """What makes it this text: its words, with one space between."""
        return " ".join(self.text.split())


def read_labelled(source: str, text: str = "text", label: str = "label", split: str = "train") -> list[LabelledText]:
    """Reads labelled texts; of equal texts only the first stays, so that no text can be in two splits.

    Args:
        source: a packaged name; a `.csv`, `.tsv`, `.jsonl` or `.json` file in UTF-8; else, read by the package
            `datasets`, a `.parquet` file, a folder written by `save_to_disk`, a folder of a data set's files as on the
            Hugging Face hub, or an id there.
        text: the column of texts.
        label: the column of classes; numbers with names in the data set become these names.
        split: which split of a Hugging Face data set is read.

    Raises:
        SettingsError: there is no such file, folder or data set, or `datasets` is missing.
        DataError: the file cannot be read, lacks a column, or a row is not a text and a class.
    """
    path = Path(source).expanduser()
    if source in PACKAGED_TEXTS:
        path = fetch_texts(source)
    if path.suffix.lower() in _FILES:
        rows: Iterable[Mapping[str, Any]] = _file_rows(path, source)
    else:
        rows = _hub_rows(source, path, split, label)
    found: dict[str, LabelledText] = {}
    for number, row in enumerate(rows, 1):
        one = _checked(row, text, label, source, number)
        found.setdefault(one.words, one)
    if not found:
        raise DataError(f"{source} holds no row: name a set with at least a few labelled texts.")
    return list(found.values())


def _checked(row: Mapping[str, Any], text: str, label: str, source: str, number: int) -> LabelledText:
    for key, column in (("text", text), ("label", label)):
        if column not in row:
            raise DataError(
                f'{source}, row {number}, has no column "{column}" among its {len(row)} (does the first line name the '
                f"columns?): set classification.{key} to the right name."
            )
    content, kind = row[text], row[label]
    if not isinstance(content, str) or not content.strip():
        raise DataError(f'{source}, row {number}: the column "{text}" holds no text; mend or remove the row.')
    if kind is None or isinstance(kind, bool | float | list | dict) or not str(kind).strip():
        raise DataError(f'{source}, row {number}: the column "{label}" holds no class; mend or remove the row.')
    return LabelledText(content.strip(), str(kind).strip(), number)


def _file_rows(path: Path, source: str) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        raise SettingsError(
            f'classification.source is "{source}", which is not a file; give a file, a Hugging Face id, or a packaged '
            f"set ({', '.join(PACKAGED_TEXTS)})."
        )
    content = read_utf8(path, source)
    if path.suffix.lower() in _TABLES:
        return _table_rows(content, _TABLES[path.suffix.lower()], source)
    return _json_rows(content, path.suffix.lower() == ".json", source)


def _table_rows(content: str, delimiter: str, source: str) -> Iterator[Mapping[str, Any]]:
    csv.field_size_limit(_LARGEST_FIELD)
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    try:
        for fields in reader:
            if not fields:
                continue
            if not header:
                header = [name.strip() for name in fields]
                _refuse_twice(header, source)
            elif len(fields) != len(header):
                raise DataError(
                    f"{source}, line {reader.line_num}, has {len(fields)} fields and the header {len(header)}; mend it."
                )
            else:
                yield dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"{source}, line {reader.line_num}, is not readable ({error}); mend it.") from None


def _json_rows(content: str, whole: bool, source: str) -> Iterator[Mapping[str, Any]]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twice([key for key, _ in pairs], source)
        return dict(pairs)

    lines = [content] if whole else content.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = source if whole else f"{source}, line {number},"
        value = read_json(line, where, once)
        for row in value if whole and isinstance(value, list) else [value]:
            if not isinstance(row, dict):
                raise DataError(f"{where} holds something else than an object with columns; mend it.")
            yield row


def _refuse_twice(names: list[str], source: str) -> None:
    # Counted, not named: without a line of names, the first row's texts stand here.
    twice = [(names.index(name) + 1, number) for number, name in enumerate(names, 1) if name in names[: number - 1]]
    if twice:
        raise DataError(f"{source} calls its columns {twice[0][0]} and {twice[0][1]} the same; rename one of them.")


def _hub_rows(source: str, path: Path, split: str, label: str) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise SettingsError(
            f'classification.source = "{source}" needs the package datasets: run `pip install datasets`, or give a '
            f"file ({', '.join(_FILES)})."
        ) from None
    try:
        found = _loaded(datasets, source, path, split)
    except Exception as error:  # of many kinds, from "not found" to the network's
        raise SettingsError(
            f'classification.source = "{source}" could not be loaded ({type(error).__name__}); check its name and '
            f'classification.split = "{split}", or download it and give the file.'
        ) from None
    names = getattr(found.features.get(label), "names", None)
    for row in found:
        number = row.get(label)
        if names and isinstance(number, int):  # below zero stands for "no class"
            yield {**row, label: names[number] if number >= 0 else None}
        else:
            yield row


def _loaded(datasets: Any, source: str, path: Path, split: str) -> Any:
    """One split of a data set, from this machine where `path` is there."""
    if path.suffix.lower() == ".parquet" and path.is_file():
        return datasets.Dataset.from_parquet(str(path))
    if any((path / name).is_file() for name in _SAVED):
        found = datasets.load_from_disk(str(path))
        return found[split] if isinstance(found, dict) else found
    return datasets.load_dataset(str(path) if path.is_dir() else source, split=split)
