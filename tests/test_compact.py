"""The compact set at Llama-3.2-1B's shapes, weighed as `benchmarks/compact.py` weighs it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from fednl.config import load_config
from fednl.federation.params import select

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bench() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("compact")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_a_compact_message_is_a_300th_of_loras_in_the_same_form_headers_in(bench: Any) -> None:
    memory, lora = bench.shapes("memory"), bench.shapes("lora")
    assert sum(tensor.numel() for tensor in lora.values()) == 11_272_192
    names = select(memory, bench.SETS["compact"].large)
    small = {
        coding: bench.payload(memory, names, coding).size_bytes for coding in ("float32", "bfloat16", "int8-deltas")
    }
    assert 300 * small["bfloat16"] <= bench.payload(lora, sorted(lora), "bfloat16").size_bytes
    # The other forms of LoRA's by their numbers alone, which leaves its header out.
    assert 300 * small["float32"] <= 4 * 11_272_192
    assert 300 * small["int8-deltas"] <= 11_272_192


def test_the_settings_file_shares_that_very_set(bench: Any) -> None:
    config = load_config(ROOT / "configs/compact.toml")
    assert list(config.federation.shared) == bench.SETS["compact"].small
