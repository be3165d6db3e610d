"""A byte-level tokenizer that needs no files, a small filler file, and the seven clients built on them."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from fednl.data.examples import Splits
from fednl.data.fillers import generated_text
from fednl.data.needles import build
from fednl.data.settings import DataSettings

# Bytes, so larger than the budgets of a word-piece tokenizer.
TOKENS, WINDOW_TOKENS = 700, 120


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return ByT5Tokenizer()


@pytest.fixture(scope="session")
def filler_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("filler") / "filler.txt"
    path.write_text(generated_text(random.Random(7), 1500), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def settings(filler_file: str) -> Callable[..., DataSettings]:
    def make(**changes: Any) -> DataSettings:
        values = {"tokens": TOKENS, "train": 6, "validation": 4, "test": 4, "filler": filler_file}
        return DataSettings(**{**values, **changes})

    return make


@pytest.fixture(scope="session")
def clients(settings: Callable[..., DataSettings], tokenizer: Any) -> dict[str, Splits]:
    return build(settings(train=40), tokenizer, WINDOW_TOKENS, "candidates", 3)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task needs a network; whoever wants one is told."""

    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("examples are made without a network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
