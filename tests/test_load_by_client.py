"""A run's rules as a model: the shared ones, or one client's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fednl
from fednl.errors import CheckpointError, FednlError, SettingsError
from fednl.federation.checkpoint import load_newest, read_tensors
from fednl.federation.groups import group_of
from fednl.federation.params import kept
from fednl.runs import Run
from fednl.training import train
from small_run import settings, tiny_backbone


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


def trained(backbone: Path, folder: Path, **federation: Any) -> Run:
    small = {"clients": 2, "train": 2, "validation": 1, "test": 1}
    arms = {"arms": ["federated"]}
    config = settings(backbone, data=small, training={"rounds": 2}, federation=federation, evaluation=arms)
    return train(config, folder)


@pytest.fixture(scope="module")
def partly(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(backbone, tmp_path_factory.mktemp("partly") / "run", shared="memory")


def loaded(run: Run, client: str = "", name: str = "") -> dict[str, torch.Tensor]:
    model, _ = fednl.load(run.path / name, client=client)
    return {name: rule.detach() for name, rule in fednl.rules(model).items()}


@pytest.mark.parametrize("name", ["", "final"])
def test_what_did_not_travel_is_named_and_a_client_has_its_own(partly: Run, name: str) -> None:
    with pytest.warns(
        UserWarning, match=r"8 of 12 tensors \(in address, projection\) did not travel in .*run, and are loaded"
    ):
        shared = loaded(partly, name=name)
    own = loaded(partly, "passkey", name)
    newest = load_newest(partly.path / "checkpoints")
    assert newest is not None
    private = kept(newest.client_states["passkey"], "private")
    assert private and {group_of(rule) for rule in private} == {"address", "projection"}
    assert all(torch.equal(own[rule], private[rule]) and rule in shared for rule in private)
    assert any(not torch.equal(shared[rule], own[rule]) for rule in private)
    assert all(torch.equal(own[rule], shared[rule]) for rule in shared.keys() - private.keys())


def test_a_run_that_shared_nothing_is_loaded_by_client_only(backbone: Path, tmp_path: Path) -> None:
    run = trained(backbone, tmp_path / "run", algorithm="local-only")
    with pytest.raises(SettingsError, match=r"run shared nothing, so that final/ holds .* client="):
        fednl.load(run.path)
    start, _ = read_tensors(run.path / "final/params.safetensors")
    assert any(not torch.equal(rule, start[name]) for name, rule in loaded(run, "passkey").items())


@pytest.mark.parametrize("name", ["", "final", "best"])
def test_rules_that_no_round_has_changed_are_refused(backbone: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(FednlError, match="rounds in a row failed"):
        trained(backbone, tmp_path / "run", **{"deadline-s": 1e-9, "max-failed-rounds": 1})
    for client in ("", "passkey"):
        with pytest.raises(
            SettingsError, match=r"no round has changed the rules of .*run, so that (final|best)/ holds"
        ):
            fednl.load(tmp_path / "run" / name, client=client)


def test_where_everything_is_shared_every_client_has_the_same(backbone: Path, tmp_path: Path) -> None:
    run = trained(backbone, tmp_path / "run")
    shared, own = loaded(run), loaded(run, "uuid-code")
    assert all(torch.equal(rule, own[name]) for name, rule in shared.items())


def test_what_cannot_be_loaded_by_client_is_refused(partly: Run, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r'client = "passky" did not train in .*; choose from passkey, uuid-code'):
        fednl.load(partly.path, client="passky")
    model, _ = fednl.load(partly.path, client="passkey")
    fednl.save_rules(model, tmp_path / "rules")
    with pytest.raises(SettingsError, match=r'client = "passkey", but .*rules is no run'):
        fednl.load(tmp_path / "rules", client="passkey")
    gone = partly.path / "checkpoints"
    gone.rename(partly.path / "elsewhere")
    with pytest.raises(CheckpointError, match="lacks a whole round-2"):
        fednl.load(partly.path, client="passkey")
    (partly.path / "elsewhere").rename(gone)
