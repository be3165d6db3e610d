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


def test_what_was_found_for_another_text_of_the_same_number_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """Two arms were paired by number, though the text had been edited between one and the other."""
    path, asked = tmp_path / "found.jsonl", [(arm, item) for item in range(2) for arm in "ab"]

    def found(work: float, texts: dict[int, str] | None, some: int = 4) -> list[float]:
        made = keeping.kept(path, asked[:some], lambda arm, item: {"value": work}, named=texts)
        return [one["value"] for one in made.values()]

    then, now = {0: "x", 1: "y"}, {0: "x", 1: "z"}
    assert not keeping.is_kept(path, asked)
    assert found(1.0, then, 3) == [1.0] * 3 and not keeping.is_kept(path, asked)
    assert found(2.0, now) == [1.0, 1.0, 2.0, 2.0] and keeping.is_kept(path, asked)
    assert found(3.0, None) == [1.0, 1.0, 2.0, 2.0]  # nothing is missing, so that nothing has to be loaded
    assert found(3.0, then) == [1.0, 1.0, 1.0, 3.0]  # the first text is back, and with it what was found for it
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    path.write_text(path.read_text().replace(', "of": "x"', ""))  # of before there were names
    assert found(4.0, {0: "w", 1: "z"}) == [1.0, 1.0, 2.0, 2.0]
    # The newest of two arms are of two texts: one was stopped in between.
    keeping.kept(path, [("a", 0)], lambda arm, item: {"value": 5.0}, named={0: "v"})
    path.write_text(path.read_text() + '{"arm": "a", "item": 1, "of": "u", "found": {"value": 6.0}}\n')
    assert not keeping.is_kept(path, asked)
