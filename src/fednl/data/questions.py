"""Four-choice questions from wherever the user has them: MMLU by hub id, its CSV files, JSONL, or the packaged ones."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednl.data.examples import LETTERS
from fednl.data.packaged_questions import PACKAGED, fetch_questions
from fednl.data.text_files import read_json, read_utf8
from fednl.errors import DataError, SettingsError


@dataclass(frozen=True)
class Question:
    """A question with four answers, one of them right.

    Attributes:
        subject: MMLU's name of the subject, or the set's.
        question: the text.
        choices: the four answers.
        gold: index of the right one.
        split: the split of the source it comes from; empty where that has none.
        where: its place, for messages that must not show the text.
    """

    subject: str
    question: str
    choices: tuple[str, ...]
    gold: int
    split: str
    where: str

    @property
    def texts(self) -> tuple[str, ...]:
        """What makes it this question: the words of the text, and those of the answers in any order."""
        question, *choices = (" ".join(text.split()) for text in (self.question, *self.choices))
        return (question, *sorted(choices))

    @property
    def right(self) -> str:
        """The words of the right answer."""
        return " ".join(self.choices[self.gold].split())


def read_questions(
    source: str, splits: Sequence[str], note: Callable[[str], None] = lambda text: None
) -> list[Question]:
    """Reads questions; of equal ones only the first stays, so that none can be in two splits or with two clients.

    Equal are those of the same words, whatever the spaces, the order of the choices and the subject. Where equal ones
    have unlike right answers none stays, as nobody knows which is right, and how many are left out is noted.

    Args:
        source: `"packaged"`; a `.jsonl` file of objects with `question`, `choices` (four), `answer` (an index or a
            letter) and `subject` (or `topic`), perhaps `split`; a folder in MMLU's original layout
            (`SPLIT/SUBJECT_SPLIT.csv`) or in the hub's (`all/SPLIT-*.parquet`, or without `all`); else a folder or id
            for the package `datasets`, such as `cais/mmlu`.
        splits: which splits of the source are read, each of which must hold a question; `"validation"` is also the
            original layout's `val`. A source without splits is read whole.
        note: is told in one line what is left out.

    Raises:
        SettingsError: there is no such file, folder, data set or split, or `datasets` is missing.
        DataError: it cannot be read, a row is no such question, or there is none.
    """
    path = fetch_questions() if source == PACKAGED else Path(source).expanduser()
    found: dict[tuple[str, ...], Question] = {}
    held: set[str] = set()
    disputed: list[Question] = []
    for one in _read(path, source, splits):
        held.add(one.split)
        if not one.split or one.split in splits:
            first = found.setdefault(one.texts, one)
            if first.right != one.right:
                disputed.append(one)
    if held and "" not in held:
        _refuse_missing(splits, held, source)
    if disputed:
        first = found[disputed[0].texts]
        left_out = {one.texts for one in disputed}
        found = {texts: one for texts, one in found.items() if texts not in left_out}
        note(
            f"{source}: {len(left_out)} question{'s' * (len(left_out) > 1)} left out, as the same one with the same "
            f"choices stands there again with another answer ({first.where}, and {disputed[0].where})"
        )
    if not found:
        raise DataError(f"{source} holds no question; name another source in mmlu.source.")
    return list(found.values())


def _refuse_missing(splits: Sequence[str], held: Collection[str], source: str) -> None:
    for split in splits:
        if split not in held:
            words = sorted(name for name in held if name.isidentifier())  # a row may hold anything else
            raise SettingsError(
                f'mmlu.splits names "{split}", and {source} holds no question of it; choose from: {", ".join(words)}.'
            )


def _read(path: Path, source: str, splits: Sequence[str]) -> Iterator[Question]:
    if path.suffix.lower() == ".jsonl":
        return (_checked(row, where, str(row.get("split") or "")) for row, where in _json_rows(path, source))
    if files := _files(path):
        if "val" in files:
            files.setdefault("validation", files["val"])
        _refuse_missing(splits, files, source)
        return (one for split in splits for file in files[split] for one in _table(file, split, source))
    return (
        _checked(row, f"{source} {split}, row {number}", split)
        for split in splits
        for number, row in enumerate(_hub_rows(source, path, split), 1)
    )


def _files(folder: Path) -> dict[str, list[Path]]:
    """The files of each split by the names that MMLU gives them: its own CSV, or the hub's parquet.

    The package `datasets` would take `dev` and `validation` for one split.
    """
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*/*.csv")):
        if file.stem.endswith(f"_{file.parent.name}"):
            found.setdefault(file.parent.name, []).append(file)
    for pattern in ("all/*.parquet", "*.parquet", "*/*.parquet"):  # `all` holds what the folders of subjects hold
        if not found:
            for file in sorted(folder.glob(pattern)):
                found.setdefault(file.stem.partition("-")[0], []).append(file)
    return found


def _json_rows(path: Path, source: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    if not path.is_file():
        raise SettingsError(f'mmlu.source is "{source}", which is not a file; check the name.')
    for number, line in enumerate(read_utf8(path, source).split("\n"), 1):
        where = f"{source}, line {number}"
        if not line.strip():
            continue
        row = read_json(line, f"{where},")
        if isinstance(row, dict):
            yield row, where
        else:
            raise DataError(f"{where}, holds something else than an object; mend it.")


def _table(path: Path, split: str, source: str) -> Iterator[Question]:
    """One file of a split; MMLU's own have no header: question, four choices, letter."""
    if path.suffix == ".parquet":
        for number, row in enumerate(_hub_rows(source, path, split), 1):
            yield _checked(row, f"{path.parent.name}/{path.name}, row {number}", split)
        return
    subject = path.stem.removesuffix(f"_{path.parent.name}")
    # Strict: a quotation mark that nothing closes would join two rows into one without a word.
    reader = csv.reader(io.StringIO(read_utf8(path, path.name), newline=""), strict=True)
    number = 0
    try:
        for number, fields in enumerate(reader, 1):
            if not fields:  # a blank line
                continue
            if len(fields) != 6:
                raise DataError(f"{path.name}, row {number}, has {len(fields)} fields where MMLU has 6; mend it.")
            row = {"question": fields[0], "choices": fields[1:5], "answer": fields[5], "subject": subject}
            yield _checked(row, f"{path.name}, row {number}", split)
    except csv.Error as error:
        raise DataError(
            f"{path.name}, row {number + 1} (up to line {reader.line_num}), is not readable ({error}); mend it."
        ) from None


def _hub_rows(source: str, path: Path, split: str) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise SettingsError(
            f'mmlu.source = "{source}" needs the package datasets: run `pip install datasets`, or give a .jsonl file, '
            f'a folder of MMLU\'s CSV files, or "{PACKAGED}".'
        ) from None
    try:
        if path.suffix == ".parquet":
            rows = datasets.Dataset.from_parquet(str(path))
        elif path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
            found = datasets.load_from_disk(str(path))
            rows = found[split] if isinstance(found, dict) else found
        else:
            folder = str(path) if path.is_dir() else source
            rows = datasets.load_dataset(folder, *(() if path.is_dir() else ("all",)), split=split)
    except Exception as error:  # of many kinds, from "not found" to the network's
        raise SettingsError(
            f'mmlu.source = "{source}" could not be loaded, split "{split}" ({type(error).__name__}); check its name '
            f'and mmlu.splits, download it and give the folder, or set it to "{PACKAGED}".'
        ) from None
    return rows  # type: ignore[no-any-return]


def _checked(row: Mapping[str, Any], where: str, split: str) -> Question:
    subject, question = row.get("subject", row.get("topic")), row.get("question")
    choices, answer = row.get("choices"), row.get("answer")
    if not all(isinstance(text, str) and text.strip() for text in (question, subject)):
        raise DataError(f'{where}: a question needs "question" and "subject" as text; mend or remove the row.')
    if not isinstance(choices, list | tuple) or len(choices) != len(LETTERS):
        raise DataError(f'{where}: "choices" must be four texts; mend or remove the row.')
    if not all(isinstance(text, str) and text.strip() for text in choices):
        raise DataError(
            f'{where}: "choices" must be four texts, none empty, numbers in quotes; mend or remove the row.'
        )
    choices = tuple(text.strip() for text in choices)
    if len(set(choices)) == 1:  # MMLU itself has questions with two or three equal choices
        raise DataError(f'{where}: "choices" are all the same; mend or remove the row.')
    gold = LETTERS.index(answer) if answer in LETTERS else answer
    if type(gold) is not int or not 0 <= gold < len(LETTERS):
        raise DataError(f'{where}: "answer" must be an index from 0 to 3 or a letter from A to D; mend the row.')
    return Question(str(subject).strip().replace(" ", "_"), str(question).strip(), choices, gold, split, where)
