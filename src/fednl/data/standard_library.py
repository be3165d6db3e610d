"""Prose that is on every machine: the documentation inside Python's own standard library (PSF-2.0)."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from fednl.errors import DataError

_ENOUGH_CHARACTERS = 1_500_000
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELP_TOPICS = "pydoc_data/topics.py"


@lru_cache(maxsize=1)
def prose() -> str:
    """Collects prose from the running Python's help topics and docstrings, in a fixed order of files.

    Takes a few seconds the first time. The text differs between versions of Python: record its hash.

    Raises:
        DataError: this Python comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paragraphs: dict[str, None] = {}
    size = 0
    for path in _sources(root):
        for paragraph in _paragraphs(path):
            if paragraph not in paragraphs:
                paragraphs[paragraph] = None
                size += len(paragraph) + 2
        if size >= _ENOUGH_CHARACTERS:
            break
    if not paragraphs:
        raise DataError(
            f'data.filler is "standard-library", but this Python ({sys.version.split()[0]}) has no source'
            ' files to read; name a text file, or "generated".'
        )
    return "\n\n".join(paragraphs)


def _sources(root: Path) -> Iterator[Path]:
    yield root / _HELP_TOPICS
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _paragraphs(path: Path) -> Iterator[str]:
    """The paragraphs of a module's docstrings (of its texts, for the help topics) that read as prose."""
    try:
        with warnings.catch_warnings():
            # Invalid escapes in other people's sources are not our user's concern.
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError, ValueError):
        return
    for text in _topics(tree) if path.name == Path(_HELP_TOPICS).name else _docstrings(tree):
        for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
            paragraph = " ".join(block.split())
            if _reads_as_prose(textwrap.dedent(block), paragraph):
                yield paragraph


def _topics(tree: ast.Module) -> Iterator[str]:
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return (value for value in constants if isinstance(value, str))


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    docstring = ast.get_docstring(node, clean=False)
    if docstring:
        yield docstring
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child)


def _reads_as_prose(block: str, paragraph: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    return (
        len(paragraph.split()) >= 8
        and paragraph[0].isupper()
        and paragraph[-1] in ".!?"
        and paragraph.isascii()
        and letters >= 0.9 * len(paragraph)
        and not re.search(r">>>|::|\\|[={}<>|@#$]|--|\n\s", block)
    )
