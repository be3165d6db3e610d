from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fednl.errors import CheckpointError, FednlError
from fednl.federation import checkpoint as module
from fednl.federation.checkpoint import load_newest, read_tensors, save_round, write_tensors
from fednl.federation.params import equal

CLIENTS = ["ada", "Ada", "../up", "Klinik Ä/1", "a" * 300, "dot.", "state"]


class Crash(BaseException):
    """The power goes out."""


def save(folder: Path, n: int, keep: int = 2) -> Path:
    return save_round(
        folder,
        n,
        {"w": torch.full((3,), float(n))},
        {"momentum/w": torch.full((3,), -float(n), dtype=torch.float64)},
        {client: {"private/p": torch.tensor(float(number + n))} for number, client in enumerate(CLIENTS)},
        {"best": {"round": 1}},
        keep,
    )


def test_round_trip_with_any_client_name(tmp_path: Path) -> None:
    place = save(tmp_path / "checkpoints", 1)
    found = load_newest(tmp_path / "checkpoints")
    assert found is not None
    assert (found.round, found.state, found.skipped) == (1, {"best": {"round": 1}}, ())
    assert equal(found.params, {"w": torch.ones(3)})
    assert equal(found.server_state, {"momentum/w": -torch.ones(3, dtype=torch.float64)})
    assert set(found.client_states) == set(CLIENTS)
    for number, client in enumerate(CLIENTS):
        assert found.client_states[client]["private/p"].item() == number + 1
    names = [path.name for path in place.iterdir()]
    assert len({name.lower() for name in names}) == len(CLIENTS) + 3
    assert "client-ada.safetensors" in names
    assert json.loads((place / "state.json").read_text())["format"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_the_newest_are_kept_and_numbers_are_numbers(tmp_path: Path) -> None:
    for n in (8, 9, 10):
        save(tmp_path, n, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-10", "round-9"]
    found = load_newest(tmp_path)
    assert found is not None
    assert found.round == 10


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "missing") is None
    (tmp_path / "round-x").mkdir()
    assert load_newest(tmp_path) is None


def damage_flip(place: Path) -> None:
    path = place / "params.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_cut(place: Path) -> None:
    path = place / "client-ada.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def damage_lose(place: Path) -> None:
    (place / "server.safetensors").unlink()


def damage_state(place: Path) -> None:
    (place / "state.json").write_text('{"format": 1, "round": 2')


def damage_format(place: Path) -> None:
    facts = json.loads((place / "state.json").read_text())
    (place / "state.json").write_text(json.dumps({**facts, "format": 99}))


DAMAGES = [damage_flip, damage_cut, damage_lose, damage_state, damage_format]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: Any) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    found = load_newest(tmp_path)
    assert found is not None
    assert (found.round, found.skipped) == (1, ("round-2",))
    save(tmp_path, 2)
    again = load_newest(tmp_path)
    assert again is not None
    assert (again.round, again.skipped) == (2, ())


def test_only_damaged_checkpoints_are_an_error_and_no_silent_start(tmp_path: Path) -> None:
    damage_cut(save(tmp_path, 1))
    with pytest.raises(CheckpointError, match="round-1"):
        load_newest(tmp_path)


@pytest.mark.parametrize("at", [1, 2, 5, 10, 11, 12])
def test_a_crash_at_any_write_leaves_the_round_before(tmp_path: Path, monkeypatch: Any, at: int) -> None:
    save(tmp_path, 1, keep=1)
    real, calls = os.fsync, 0

    def crash(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise Crash
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", crash)
        with pytest.raises(Crash):
            save(tmp_path, 2, keep=1)
    # One flush a file, one for the folder; the last comes after the folder has its name.
    survived = 2 if at == len(CLIENTS) + 5 else 1
    found = load_newest(tmp_path)
    assert found is not None
    assert (found.round, found.skipped) == (survived, ())
    save(tmp_path, 2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["round-2"]


def test_a_torn_file_in_a_crash_is_not_in_the_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    save(tmp_path, 1)

    def torn(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        raise Crash

    monkeypatch.setattr(module, "_write_through", torn)
    with pytest.raises(Crash):
        save(tmp_path, 2)
    found = load_newest(tmp_path)
    assert found is not None
    assert (found.round, found.skipped) == (1, ())


def test_a_crash_while_old_ones_are_deleted_leaves_the_new_one(tmp_path: Path, monkeypatch: Any) -> None:
    save(tmp_path, 1, keep=1)

    def crash(path: Path) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", crash)
        with pytest.raises(Crash):
            save(tmp_path, 2, keep=1)
    found = load_newest(tmp_path)
    assert found is not None
    assert found.round == 2


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "_write_through", full)
    monkeypatch.setattr(module, "write_atomic", full)
    with pytest.raises(FednlError, match="No space left"):
        save(tmp_path, 1)
    with pytest.raises(FednlError, match="No space left"):
        write_tensors(tmp_path / "x.safetensors", {}, {})


def test_single_files(tmp_path: Path) -> None:
    path = tmp_path / "params.safetensors"
    write_tensors(path, {"w": torch.ones(2)}, {"round": 3})
    params, header = read_tensors(path)
    assert equal(params, {"w": torch.ones(2)})
    assert header == {"round": 3}
    path.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="damaged"):
        read_tensors(path)
    with pytest.raises(CheckpointError, match="No such file"):
        read_tensors(tmp_path / "none.safetensors")
