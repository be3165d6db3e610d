"""The compact set at Llama-3.2-1B's shapes, weighed as `benchmarks/compact.py` weighs it, and that command's table."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from fednl.config import Config, load_config
from fednl.federation.groups import select

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
    names = select(memory, bench.SETS["picks"].large)
    small = {
        coding: bench.payload(memory, names, coding).size_bytes for coding in ("float32", "bfloat16", "int8-deltas")
    }
    assert 300 * small["bfloat16"] <= bench.payload(lora, sorted(lora), "bfloat16").size_bytes
    # The other forms of LoRA's by their numbers alone, which leaves its header out.
    assert 300 * small["float32"] <= 4 * 11_272_192
    assert 300 * small["int8-deltas"] <= 11_272_192


def test_the_settings_file_shares_that_very_set(bench: Any) -> None:
    config = load_config(ROOT / "configs/compact.toml")
    assert list(config.federation.shared) == bench.SETS["picks"].small


class Made:
    """A run as far as the table reads it."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def read_jsonl(self, name: str) -> list[dict[str, Any]]:
        return [{"metrics": {"epsilon": 9.49}}]


def test_each_set_is_a_row_of_one_table_with_its_ratio_beside_its_accuracy_only(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made: list[Config] = []

    def run_at(folder: Path, config: Config, told: Any) -> Made:
        made.append(config)
        return Made(config)

    monkeypatch.setattr(bench, "run_at", run_at)
    monkeypatch.setattr(bench, "answers", lambda run, arm: [f"{arm} {run.config.federation.algorithm}", "nats"])
    monkeypatch.setattr(bench, "macro", lambda run, arm, metric: {"n": 210})
    sizes = {name: dict.fromkeys(bench.CODINGS, (1200 // (place + 1), 10)) for place, name in enumerate(bench.SETS)}
    monkeypatch.setattr(bench, "weigh", lambda: (sizes, dict.fromkeys(sizes, 7)))
    monkeypatch.setattr("sys.argv", ["compact.py", "--out", str(tmp_path), "--only", "theta;low-rank"])
    monkeypatch.chdir(ROOT)
    bench.main()
    rows = {
        cells[0]: cells for cells in (line.strip("| ").split(" | ") for line in capsys.readouterr().out.split("\n"))
    }
    assert rows.keys() >= bench.SETS.keys()
    assert rows["theta"][-7:] == ["federated fedavg", "nats", "-", "-", "210", "9.5", "2"]
    assert rows["low-rank"][-7:-2] == ["federated fedavg", "nats", "federated shared-only", "nats", "210"]
    assert rows["write"][-7:] == ["-"] * 7
    assert rows["nothing, each client alone"][-7:] == ["local-only fedavg", "nats", "-", "-", "210", "-", "-"]
    # What is measured is what is weighed: the same rank of the same share of heads.
    assert [config.memory.write_rank for config in made] == [0, 1, 1]
    assert bench.SETS["low-rank"].write_rank / 8 >= 1 / 3
