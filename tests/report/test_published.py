"""Published tables of several seeds, put together: the claims that one table cannot make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fednl.errors import SettingsError
from fednl.evaluation.rows import Row
from fednl.report import report


def table(folder: Path, seed: int, gap: float, **settings: Any) -> Path:
    """What `fednl reproduce` leaves behind, as far as it is read here."""
    row: Row = {"method": "FedNL", "baseline": "FedAvg-LoRA", "client": "macro", "metric": "difference"}
    row |= {"of": "candidates", "value": gap, "n": 105, "low": gap - 0.1, "high": gap + 0.1, "seed": seed}
    place = {"method": "federated", "baseline": "window-only", "metric": "difference", "of": "nats_per_token", "bin": 0}
    facts = {"format": 1, "table": "needles", "scale": "small", "where": "measured here", "command": "fednl reproduce"}
    (folder / "results").mkdir(parents=True)
    (folder / "results/needles-1024.json").write_text(json.dumps({**facts, "rows": [row, place]}))
    for method in ("fednl", "fedavg-lora-window"):
        (folder / method).mkdir()
        config = {"format": 1, "run": {"seed": seed, "out": str(folder)}, "training": settings}
        (folder / method / "config.json").write_text(json.dumps(config))
    (folder / "report.md").write_text(f"# Table of seed {seed}\n")
    return folder


def test_three_seeds_of_a_table_claim_what_two_do_not(tmp_path: Path) -> None:
    folders = [table(tmp_path / f"seed-{seed}", seed, gap) for seed, gap in enumerate([0.30, 0.34, 0.32])]
    text = report(folders)
    assert "# needles at scale small, 3 seeds" in text and "## needles-1024" in text
    line = next(line for line in text.splitlines() if line.startswith("| FedNL minus FedAvg-LoRA"))
    assert "+30.0 (0), +34.0 (1), +32.0 (2)" in line and "+32.0" in line and line.endswith(" better |")
    assert "no claim: fewer than 3 seeds" in report(folders[:2])
    assert report(folders[:1]) == "# Table of seed 0\n"


def test_tables_that_say_nothing_together_are_refused(tmp_path: Path) -> None:
    first = table(tmp_path / "a", 0, 0.3)
    with pytest.raises(SettingsError, match="the same seed, 0"):
        report([first, table(tmp_path / "b", 0, 0.3)])
    with pytest.raises(SettingsError, match="differ in more than their seed"):
        report([first, table(tmp_path / "c", 1, 0.3, rounds=9)])
    with pytest.raises(SettingsError, match="no table's folder"):
        report([first, first / "fednl"])
    with pytest.raises(SettingsError, match="no run folder"):
        report([tmp_path / "nowhere"])
