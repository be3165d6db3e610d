"""What a run ran on: Python, system, versions, processors, commit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_PACKAGES = ("fednl", "torch", "transformers", "peft", "safetensors", "tokenizers", "numpy")


def environment() -> dict[str, Any]:
    """Says what a run ran on: Python, system, package versions, processors, commit. No host or user names."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count() or 1,
        "byte_order": sys.byteorder,
        "packages": {},
    }
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts["packages"][package] = importlib.metadata.version(package)
    return facts | _commit()


def _commit() -> dict[str, Any]:
    """The commit of the checkout this package runs from; nothing for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return {}
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "changed_files": len(_git(root, "status", "--porcelain").splitlines())}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
