"""Folders of published tables made again: what several of them, which differ in their seed, say together."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fednl.errors import SettingsError
from fednl.evaluation.seeds import LEAST_SEEDS, over_seeds, same_but_seed
from fednl.report.seeds import HOW_TO_READ, seed_table
from fednl.report.words import escape
from fednl.runs import Run


def is_table(folder: Run) -> bool:
    """Says whether a folder was made by `fednl reproduce`: it holds measured rows and is no run itself."""
    return not (folder.path / "config.json").exists() and any(True for _ in _measured(folder))


def table_report(folders: Sequence[Run]) -> str:
    """Gives what tables say of their methods over training seeds, as Markdown; of a single one its own reports.

    Args:
        folders: made by `fednl reproduce`, each of one seed (`--set run.seed=N`).

    Raises:
        SettingsError: a folder is no table's, they are of unlike tables or settings or were asked unlike numbers of
            questions, or two have the same seed.
    """
    for folder in folders:
        if not is_table(folder):
            raise SettingsError(
                f"{folder.path} is no table's folder as others are: name folders made by `fednl reproduce`, or runs."
            )
    if len(folders) == 1:
        return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folders[0].path.glob("report*.md")))
    _check_alike(folders)
    files = [dict(_measured(folder)) for folder in folders]
    _check_asked(folders, files)
    name = next(iter(files[0].values()))
    parts = [f"# {escape(name['table'])} at scale {escape(name['scale'])}, {len(folders)} seeds"]
    for part in dict.fromkeys(part for found in files for part in found):
        found = over_seeds([rows[part]["rows"] for rows in files if part in rows])
        parts += [f"## {escape(part)}", seed_table(found)] if found else []
    if len(parts) == 1:
        parts.append("Nothing in these tables compares two methods.")
    return "\n\n".join([*parts, HOW_TO_READ]) + "\n"


def _measured(folder: Run) -> list[tuple[str, Mapping[str, Any]]]:
    found: list[tuple[str, Mapping[str, Any]]] = []
    for path in sorted((folder.path / "results").glob("*.json")):
        result = folder.read_json(f"results/{path.name}")
        if isinstance(result, dict) and "table" in result:
            found.append((path.stem, result))
    return found


def _check_alike(folders: Sequence[Run]) -> None:
    settings: dict[str, Run] = {}
    seeds: dict[int, Run] = {}
    for folder in folders:
        read = _configs(folder)
        for name, config in read.items():
            key = json.dumps([name, _of_any_folder(same_but_seed(config), folder.path)], sort_keys=True)
            settings.setdefault(key, folder)
        seed = next((int(config["run"]["seed"]) for config in read.values()), 0)
        if (other := seeds.setdefault(seed, folder)) is not folder:
            raise SettingsError(
                f"{other.path} and {folder.path} have the same seed, {seed}: make one of them with --set run.seed=N; a "
                f"claim takes {LEAST_SEEDS} seeds."
            )
    names = {json.loads(key)[0] for key in settings}
    if len(settings) > len(names):
        unlike = sorted({str(folder.path) for folder in settings.values()})
        raise SettingsError(
            f"{', '.join(unlike)} differ in more than their seed, so they say nothing together: make each with the "
            "same fednl and --set, and another run.seed."
        )


def _check_asked(folders: Sequence[Run], files: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Refuses numbers of questions that differ where others were asked for: at `--lengths` no run's settings say it."""
    first: dict[tuple[str, ...], tuple[Run, str, int]] = {}
    for folder, parts in zip(folders, files, strict=True):
        for part, result in parts.items():
            given = _questions_given(result)
            for row in (row for row in result.get("rows", ()) if "n" in row):
                named = (str(row.get(key, "")) for key in ("method", "baseline", "metric", "of", "client", "bin"))
                other, theirs, n = first.setdefault((part, *named), (folder, given, row["n"]))
                # With the same settings a seed may deal a client more or less.
                if n != row["n"] and given != theirs:
                    raise SettingsError(
                        f"{part}: {other.path} holds answers to {n} questions ({theirs}), and {folder.path} to "
                        f"{row['n']} ({given}), so they say nothing together: ask each with the same --set."
                    )


def _questions_given(result: Mapping[str, Any]) -> str:
    """How many test questions the command of some results asked for."""
    words = shlex.split(str(result.get("command", "")))
    sets = [value.partition("=") for word, value in pairwise(words) if word == "--set"]
    given = [value.strip() for key, _, value in sets if key.strip() == "data.test"]
    return f"data.test = {given[-1]}" if given else "data.test is the table's"


def _configs(folder: Run) -> dict[str, dict[str, Any]]:
    """The settings of a table's runs, by name."""
    found = [path for path in sorted(folder.path.glob("*/config.json")) if _is_of_a_run(path)]
    return {path.parent.name: Run(path.parent).read_json("config.json") for path in found}


def _is_of_a_run(path: Path) -> bool:
    """A backbone that lies beside the runs, as at the scale tiny, has a `config.json` too."""
    try:
        return "format" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return True  # whoever reads it says what is wrong with it


def _of_any_folder(value: Any, folder: Path) -> Any:
    """Settings in which a path to something inside a table's folder is the same for every such folder."""
    if isinstance(value, dict):
        return {key: _of_any_folder(one, folder) for key, one in value.items()}
    if isinstance(value, list):
        return [_of_any_folder(one, folder) for one in value]
    parts = Path(value).parts if isinstance(value, str) and "/" in value else ()
    inside = [Path(*parts[first:]) for first in range(1, len(parts))]
    return next((f"{{folder}}/{tail}" for tail in inside if os.path.exists(folder / tail)), value)
