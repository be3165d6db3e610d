"""The run folder: everything a run leaves behind, as JSON, JSON lines and safetensors.

`config.json` (the resolved settings), `environment.json`, `partition.json`, `rounds.jsonl`, `attempts.json`,
`checkpoints/`, `final/`, `best/`, `results/` and `report.md`. A file is either whole or absent: it is written beside
its place and renamed into it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednl.errors import CheckpointError, FednlError, SettingsError
from fednl.files import write_atomic, writing

FORMAT = 1


@dataclass(frozen=True)
class Run:
    """A run's folder on disk, with whole-file writes.

    Args:
        path: the folder; `Run.create`, `Run.at` and `Run.open` make or check it.
    """

    path: Path

    @classmethod
    def create(cls, root: Path, name: str | None = None) -> Run:
        """Makes a new run folder `root/DATE-TIME-NAME`, never one that exists.

        Args:
            root: the folder of runs; made if it is missing.
            name: usually the settings file's name without its ending; None stands for `run`.

        Raises:
            FednlError: the folder cannot be made.
        """
        while True:
            path = fresh_path(root, name)
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    path.mkdir()
                except FileExistsError:  # another process took the name between the look and the making
                    continue
            return cls(path)

    @classmethod
    def at(cls, path: Path) -> Run:
        """Makes a new run at exactly this folder, which must be absent or empty.

        Args:
            path: the folder; parents are made.

        Raises:
            SettingsError: the folder already holds something.
            FednlError: the folder cannot be made.
        """
        path = Path(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise SettingsError(f"--out {path} already exists: name a new folder, or continue with --resume {path}.")
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> Run:
        """Opens the folder of an earlier run.

        Args:
            path: the folder.

        Raises:
            SettingsError: there is no such folder, or it holds no `config.json`.
        """
        path = Path(path)
        if not path.is_dir():
            raise SettingsError(f"there is no run folder {path}: name a folder made by `fednl train`.")
        if not (path / "config.json").is_file():
            raise SettingsError(f"{path} is not a run (it has no config.json): name a folder made by `fednl train`.")
        return cls(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the run to this process until the block ends; a killed process leaves no lock behind.

        Raises:
            FednlError: another process is at work on it, or the folder cannot be written.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.path / ".lock")
        with writing(self.path), contextlib.suppress(NotImplementedError):  # a file system without locks
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise FednlError(f"another process is at work on {self.path}: wait for it, or stop it.") from None
        try:
            yield
        finally:
            lock.release()

    def discard(self) -> None:
        """Removes the folder of a run that never came to anything."""
        shutil.rmtree(self.path, ignore_errors=True)

    def folder(self, name: str) -> Path:
        """Gives the sub-folder `name`, made if it is missing."""
        path = self._inside(name)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def write_json(self, name: str, obj: Mapping[str, Any]) -> Path:
        """Writes a JSON object whole or not at all, with `"format": 1` in it.

        A value that is not a finite number is left out (its key is absent): a reader never meets NaN.

        Args:
            name: the file inside the run, for example `"results/needles.json"`.
            obj: what to write; not modified.

        Raises:
            FednlError: the file cannot be written.
        """
        text = json.dumps({"format": FORMAT, **_finite(dict(obj))}, indent=1, ensure_ascii=False, allow_nan=False)
        return self.write_text(name, text + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Writes a text file whole or not at all.

        Raises:
            FednlError: the file cannot be written.
        """
        path = self._inside(name)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode("utf-8"))
        return path

    def read_json(self, name: str) -> dict[str, Any]:
        """Reads what `write_json` wrote, without its `"format"` key.

        Raises:
            CheckpointError: the file is missing, not a JSON object, or of a format this version cannot read.
        """
        path = self._inside(name)
        try:
            obj = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from None
        except ValueError:
            raise CheckpointError(f"{path} is not valid JSON: restore it from a copy.") from None
        if not isinstance(obj, dict) or "format" not in obj:
            raise CheckpointError(f'{path} has no "format", so fednl did not write it: name a folder that it made.')
        if obj["format"] != FORMAT:
            raise CheckpointError(f"{path} has no format = {FORMAT}: it was written by another version of fednl.")
        del obj["format"]
        return obj

    def append_jsonl(self, name: str, obj: Mapping[str, Any]) -> None:
        """Adds one row to a file of JSON lines, on disk when this returns; a torn last row is cut off first.

        Args:
            name: the file inside the run, for example `"rounds.jsonl"`.
            obj: the row; values that are not finite numbers are left out.

        Raises:
            FednlError: the file cannot be written.
        """
        path = self._inside(name)
        line = json.dumps(_finite(dict(obj)), ensure_ascii=False, allow_nan=False) + "\n"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a+b") as file:
                _cut_torn_line(file)
                file.write(line.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())

    def read_jsonl(self, name: str) -> list[dict[str, Any]]:
        """Reads the rows of a file of JSON lines; a missing file has none, and a torn last row is not one.

        Raises:
            CheckpointError: a row before the last is damaged.
        """
        path = self._inside(name)
        if not path.exists():
            return []
        whole = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is a torn row, or nothing
        rows = []
        for number, line in enumerate(whole, 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise CheckpointError(f"{path} line {number} is damaged: restore the file from a copy.")
            rows.append(row)
        return rows

    def truncate_jsonl(self, name: str, keep: int) -> int:
        """Keeps the first `keep` rows of a file of JSON lines, as a resumed run needs; whole or not at all.

        Args:
            name: the file inside the run; a missing file stays missing.
            keep: how many rows stay; at least 0.

        Returns:
            How many rows there are now.

        Raises:
            FednlError: the file cannot be written.
        """
        path = self._inside(name)
        if not path.exists():
            return 0
        kept = path.read_bytes().split(b"\n")[:-1][: max(0, keep)]
        with writing(path):
            write_atomic(path, b"".join(line + b"\n" for line in kept))
        return len(kept)

    def _inside(self, name: str) -> Path:
        relative = Path(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"{name!r} would leave the run folder")
        return self.path / relative


def fresh_path(root: Path, name: str | None = None) -> Path:
    """Names a folder `root/DATE-TIME-NAME` that does not exist yet, without making it.

    Args:
        root: the folder of runs.
        name: letters, digits, `.`, `-` and `_` are kept, the rest becomes a dash; None stands for `run`.
    """
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", name or "run").strip("-.") or "run"
    first = Path(root) / f"{time.strftime('%Y%m%d-%H%M%S')}-{clean}"
    path, number = first, 2
    while path.exists():
        path, number = first.with_name(f"{first.name}-{number}"), number + 1
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items() if not _is_not_finite(item)}
    if isinstance(value, list | tuple):
        return [None if _is_not_finite(item) else _finite(item) for item in value]
    return value


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _cut_torn_line(file: Any) -> None:
    """Drops what a killed process left after the last newline, so that the next row starts a line."""
    content = b""
    file.seek(0, os.SEEK_END)
    if file.tell() == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)
