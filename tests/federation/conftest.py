from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# The toys are also the worker processes' modules, so they are found by name and not through this package.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here loses power: waiting for the disk would be most of the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
