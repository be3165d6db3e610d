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
