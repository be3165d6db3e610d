"""Who imports whom, as far as the import linter cannot say it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fednl"
HEAVY = ("torch", "transformers", "peft", "scipy", "numpy", "datasets")


def loaded_after(code: str) -> set[str]:
    """The top-level modules in memory after `code` ran in a fresh interpreter."""
    code += "\nimport sys; print('\\n' + ' '.join({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "module",
    ["fednl", "fednl.config", "fednl.cli", "fednl.progress", "fednl.runs", "fednl.seeding", "fednl.memory"]
    + ["fednl.models", "fednl.data", "fednl.federation", "fednl.evaluation", "fednl.report"],
)
def test_importing_this_loads_nothing_heavy(module: str) -> None:
    assert not loaded_after(f"import {module}") & {"torch", "transformers", "peft", "datasets"}


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["train", "--help"], ["report", "--help"], ["config", "{settings}"]]
    + [["report", "{missing}"], ["train", "--resume", "{missing}"], ["train", "{missing}"]],
    ids=" ".join,
)
def test_these_commands_load_no_torch(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[run]\nseed = 1\n")
    names = {"settings": str(tmp_path / "x.toml"), "missing": str(tmp_path / "missing")}
    words = [word.format(**names) for word in arguments]
    code = f"from fednl.cli import main\ntry:\n    main({words!r})\nexcept SystemExit: pass"
    assert not loaded_after(code) & {"torch", "transformers", "peft", "datasets"}


def test_a_report_loads_no_torch(tmp_path: Path) -> None:
    call = f"fednl.report.tables.report([{str(tmp_path)!r}])"
    code = f"import fednl.report.tables\ntry:\n    {call}\nexcept Exception: pass"
    assert not loaded_after(code) & {"torch", "transformers", "peft"}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def test_the_operator_needs_torch_and_nothing_else() -> None:
    parts = ("operator", "delta_chunks", "arguments")
    own = {f"fednl.memory.{part}" for part in parts}
    for part in parts:
        others = set(imported(SOURCE / "memory" / f"{part}.py")) - own
        assert {name.split(".")[0] for name in others} - set(sys.stdlib_module_names) == {"torch"}


@pytest.mark.parametrize(
    ("library", "door"),
    [
        ("peft", "models/lora.py"),
        ("flwr", "flower/"),
        ("pickle", "nowhere"),
        ("dill", "nowhere"),
        ("joblib", "nowhere"),
    ],
)
def test_one_door_to_a_library(library: str, door: str) -> None:
    users = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if library in {name.split(".")[0] for name in imported(path)}
    ]
    assert [user for user in users if not user.startswith(door)] == []


def test_every_public_name_loads() -> None:
    import fednl
    import fednl.memory

    for package in (fednl, fednl.memory):
        for name in dir(package):
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="no_such_name"):
            package.no_such_name
