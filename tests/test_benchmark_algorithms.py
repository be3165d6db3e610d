"""The command that compares the algorithms, whole, on a tiny backbone; and that it goes on where it stopped."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fednl.evaluation.outcomes import Outcome, save_outcomes
from fednl.federation.algorithms import ALGORITHMS
from fednl.reproduce import keeping
from fednl.runs import Run
from small_run import tiny_backbone

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "algorithms.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_algorithms", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_tables_come_out_and_a_second_call_trains_nothing(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    backbone = tiny_backbone(tmp_path / "model")
    small = [
        f'backbone.id="{backbone}"',
        f'data.filler="{backbone}/filler.txt"',
        "backbone.dtype=float32",
        "data.tokens=430",
    ]
    small += ["data.clients=2", "data.events=2", "data.questions=1", "data.train=2", "data.validation=1", "data.test=1"]
    small += ["memory.layers=last:1", "memory.rank=2", "memory.window-tokens=130", "training.rounds=1"]
    small += ["training.local-steps=1", "federation.quorum=1"]
    argv = [
        "algorithms.py",
        "--out",
        str(tmp_path / "runs"),
        "--only",
        "fedavg",
        "--streams",
        "ewc",
        "--grid",
        "1e-2,1e-3",
        "--stream-grid",
        "1e-3,1e-2",
    ]
    argv += ["--rounds-per-task", "1", *(word for one in small for word in ("--set", one))]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.chdir(SCRIPT.parents[1])
    benchmark.main()
    first = capsys.readouterr().out
    lines = {line.split(" | ")[0].strip("| "): line for line in first.splitlines() if line.startswith("|")}
    assert {"window only, untrained", "pooled data", "fedavg", "ewc"} <= lines.keys()
    assert "n = 2 questions, macro over clients, chance 25%" in first and "8 pairs of the first two tasks" in first
    monkeypatch.setattr(keeping, "train", None)
    monkeypatch.setattr(keeping, "resume", None)
    benchmark.main()
    assert capsys.readouterr().out == first


def test_it_names_algorithms_that_exist_and_refuses_others(benchmark: ModuleType) -> None:
    for methods in (benchmark.METHODS, benchmark.STREAM_METHODS):
        assert {name.partition(",")[0] for name in methods} <= ALGORITHMS.keys()
    with pytest.raises(SystemExit, match="no method 'fedsomething'"):
        benchmark.listed("fedavg;fedsomething", benchmark.METHODS)


def test_every_run_of_both_tables_can_be_as_it_is_set(benchmark: ModuleType, monkeypatch: Any) -> None:
    """Found only after the first table's hours: a quorum of more clients than a stream has."""
    monkeypatch.chdir(SCRIPT.parents[1])
    for own, methods in (((), benchmark.METHODS), (benchmark.STREAM, benchmark.STREAM_METHODS)):
        rounds = ["tasks.rounds-per-task=4", "training.rounds=12"] if own else []
        bench = benchmark.Bench(Path("runs"), benchmark.GRID, [], (*own, *rounds), methods)
        for name in methods:
            config = bench.config(name, 1e-2, ["federated"])
            assert config.federation.quorum <= config.data.clients


def test_halfway_from_fedavg_to_the_pooled_learner_half_of_the_lag_is_closed(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "results").mkdir()
    nats = {"fedavg": (3.0, 3.2, 3.1, 2.0, 2.4, 2.2), "pooled": (1.0, 1.2, 1.4, 1.0, 1.4, 1.5)}
    nats["federated"] = tuple((first + last) / 2 for first, last in zip(*nats.values(), strict=True))
    arms = {
        arm: [Outcome("ab"[i // 3], i % 3, 0, 0, True, True, value, 1.0, 2) for i, value in enumerate(values)]
        for arm, values in nats.items()
    }
    save_outcomes(tmp_path / "results" / "needles.outcomes.jsonl", arms)
    run = Run(tmp_path)
    ends = [benchmark.nats(run, arm) for arm in ("fedavg", "pooled")]
    assert ends[0] == {"a": [3.0, 3.2, 3.1], "b": [2.0, 2.4, 2.2]}
    assert benchmark.closed(run, ends) == "50.0"  # each answer is half-way, which is no certainty
    assert benchmark.closed(run, []) == "-"


def test_as_many_steps_in_all_however_often_clients_are_averaged(benchmark: ModuleType, monkeypatch: Any) -> None:
    monkeypatch.chdir(SCRIPT.parents[1])
    given = ["training.rounds=4", "training.local-steps=4"]
    bench = benchmark.Bench(Path("runs"), benchmark.GRID, given, (), benchmark.METHODS)
    for name, plan in (
        ("fedavg", (4, 4)),
        ("fedavgm, server-lr 2, twice the rounds", (8, 2)),
        ("fedavg, four times the rounds", (16, 1)),
    ):
        training = bench.config(name, 1e-2, []).training
        assert (training.rounds, training.local_steps) == plan
    odd = benchmark.Bench(Path("runs"), benchmark.GRID, ["training.local-steps=6"], (), benchmark.METHODS)
    with pytest.raises(SystemExit, match="a multiple of 4"):
        odd.config("fedavg, four times the rounds", 1e-2, [])


def test_only_a_method_of_the_pooled_learners_adapters_lags_behind_it(benchmark: ModuleType, monkeypatch: Any) -> None:
    monkeypatch.chdir(SCRIPT.parents[1])
    value = {"federated": 1.5, "pooled": 0.5, "window-only": 4.0}
    monkeypatch.setattr(benchmark.Bench, "best_rate", lambda *rest: 1e-2)
    monkeypatch.setattr(benchmark.Bench, "run", lambda *rest: None)
    monkeypatch.setattr(benchmark, "macro", lambda run, arm, metric: {"value": value[arm], "n": 4})
    monkeypatch.setattr(benchmark, "nats", lambda run, arm: {})
    monkeypatch.setattr(benchmark, "closed", lambda run, ends: "50.0")
    monkeypatch.setattr(benchmark, "last_validation", lambda *rest: 1.0)
    monkeypatch.setattr(benchmark, "costs", lambda *rest: ["1"] * 3)
    bench = benchmark.Bench(Path("runs"), benchmark.GRID, [], (), benchmark.METHODS)
    lines = [line.strip("| ").split(" | ") for line in benchmark.compare(bench, list(benchmark.METHODS)).splitlines()]
    behind = {cells[0]: cells[5:7] for cells in lines if cells[0] in benchmark.METHODS}
    loras = [name for name in behind if "LoRA" in name or name in ("ffa-lora", "flexlora")]
    assert len(loras) == 3 and all(behind.pop(name) == ["-", "-"] for name in loras)
    assert behind.pop("fedavg") == ["+1.00", "-"]
    assert behind and all(cells == ["+1.00", "50.0"] for cells in behind.values())
