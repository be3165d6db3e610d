"""Clients whose replies are refused again and again are left alone for a while, and what is known of them lasts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import GATE, PROJECTION, WRITE, Bench, forge

from fednl.errors import FednlError
from fednl.federation.params import equal
from fednl.federation.quarantine import Conduct
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.transport import Reply

SETTINGS = FederationSettings(quarantine_after=2, quarantine_rounds=3)
NAN = {WRITE: torch.full((3,), torch.nan), GATE: torch.tensor(0.0), PROJECTION: torch.zeros(3)}


def rows(**statuses: str) -> list[dict[str, Any]]:
    return [{"name": name, "status": status} for name, status in statuses.items()]


def test_refusals_in_a_row_count_and_a_valid_reply_clears_them() -> None:
    conduct = Conduct()
    for round, status in enumerate(["refused", "late", "failed", "ok", "refused", "refused"], 1):
        assert conduct.out(round) == {}
        conduct = conduct.after(rows(ada="ok", bob=status), round, SETTINGS)
    assert conduct.out(7) == {"bob": 9}
    assert conduct.free(["ada", "bob"], 9) == ["ada"]
    assert conduct.free(["ada", "bob"], 10) == ["ada", "bob"]


def test_after_its_time_one_refusal_puts_a_client_out_again_and_one_valid_reply_does_not() -> None:
    out = Conduct({"bob": 2}, {"bob": 5})
    assert out.after(rows(bob="refused"), 6, SETTINGS).out(7) == {"bob": 9}
    assert out.after(rows(bob="ok"), 6, SETTINGS) == Conduct()
    never = SETTINGS.model_copy(update={"quarantine_after": 0})
    assert Conduct({"bob": 9}).after(rows(bob="refused"), 6, never).out(7) == {}


def poisoned(replies: list[Reply]) -> list[Reply]:
    return [forge(reply, params=NAN) if reply.client == "dan" else reply for reply in replies]


def test_a_run_leaves_the_client_out_says_so_and_resumes_with_what_it_knows(tmp_path: Path) -> None:
    training = TrainingSettings(rounds=7, local_steps=1)
    whole = Bench(tmp_path / "whole", settings=SETTINGS, training=training)
    params = whole.run(whole.transport(poisoned))
    asked = [len(row["clients"]) for row in whole.rows()]
    assert asked == [4, 4, 3, 3, 3, 4, 3]
    assert [row.get("quarantined") for row in whole.rows()] == [None, None, ["dan"], ["dan"], ["dan"], None, ["dan"]]
    halves = Bench(tmp_path / "halves", settings=SETTINGS, training=training)
    halves.run(halves.transport(poisoned), stop_after=3)
    assert equal(halves.run(halves.transport(poisoned)), params)
    assert [len(row["clients"]) for row in halves.rows()] == asked


def test_with_everyone_in_quarantine_the_run_stops_and_says_so(tmp_path: Path) -> None:
    settings = FederationSettings(quarantine_after=1, max_failed_rounds=2)
    toy = Bench(tmp_path / "run", sizes={"dan": 4}, settings=settings)
    with pytest.raises(FednlError, match=r"2 rounds in a row failed, the last as 0 valid .* in quarantine"):
        toy.run(toy.transport(poisoned))
