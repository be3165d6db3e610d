"""A run kept in its folder: gone on with, left as it is, or refused; never taken for one of other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fednl.errors import SettingsError
from fednl.reproduce import keeping
from fednl.runs import Run
from small_run import settings


def test_a_folder_from_before_a_key_is_gone_on_with_and_other_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = settings(tmp_path, evaluation={"arms": ["federated"]})
    written = own.to_dict()
    del written["memory"]["write-rank"], written["privacy"]
    run = Run.create(tmp_path / "run")
    run.write_json("config.json", written)
    resumed: list[Path] = []
    monkeypatch.setattr(keeping, "resume", lambda folder, told: resumed.append(folder))
    monkeypatch.setattr(keeping, "train", None)
    keeping.run_at(run.path, own)
    more: dict[str, Any] = {"evaluation": {"arms": ["federated", "window-only"], "batch": 1}}
    keeping.run_at(run.path, settings(tmp_path, federation={"parallel-clients": 2}, **more))
    assert resumed == [run.path, run.path]
    with pytest.raises(SettingsError, match=r"\[memory\] write-rank = 0, and now it is 2: put that back"):
        keeping.run_at(run.path, settings(tmp_path, memory={"write-rank": 2}))
    other = settings(tmp_path, federation={"algorithm": "fedprox"}, run={"out": "elsewhere"})
    with pytest.raises(SettingsError, match=r'\[federation\] algorithm = "fedavg", and now it is "fedprox"'):
        keeping.run_at(run.path, other)
    assert resumed == [run.path, run.path]


def test_what_is_on_a_line_is_not_done_again(tmp_path: Path) -> None:
    path, did = tmp_path / "found.jsonl", list[tuple[str, int]]()

    def work(arm: str, item: int) -> dict[str, float]:
        did.append((arm, item))
        if (arm, item) == ("b", 1):
            raise RuntimeError("the power fails")
        return {"value": item + len(did) / 10}

    asked = [(arm, item) for item in range(2) for arm in "ab"]
    with pytest.raises(RuntimeError):
        keeping.kept(path, asked, work)
    first = keeping.kept(path, asked[:3], work)
    assert did == asked and list(first) == asked[:3]
    path.write_text(path.read_text() + '{"arm": "b", "ite')  # a line torn by a crash is none
    counts: list[int] = []
    whole = keeping.kept(path, asked, lambda arm, item: {"value": -1.0}, counts.append)
    assert whole == {**first, ("b", 1): {"value": -1.0}} and counts == [1, 2, 3, 4]
