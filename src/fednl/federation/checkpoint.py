"""A checkpoint each round: whole or absent, with the hash of every file, so that a run can go on to the bit.

`round-N/{params,server,client-NAME}.safetensors` and `round-N/state.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fednl.errors import CheckpointError, FednlError, MessageError
from fednl.federation.attempts import taken_back
from fednl.federation.params import ClientState, Params
from fednl.federation.wire import pack, unpack
from fednl.files import sync_folder, write_atomic

FORMAT = 1
_FOLDER = re.compile(r"round-([0-9]+)")
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on after a round.

    Args:
        round: the last finished round, counted from 1.
        params: all rules, shared and private start values.
        server_state: the server's own tensors.
        client_states: each client's private state.
        state: what else the loop remembers, as JSON.
        skipped: names of newer checkpoints that were damaged.
    """

    round: int
    params: Params
    server_state: ClientState
    client_states: dict[str, ClientState]
    state: dict[str, Any]
    skipped: tuple[str, ...] = field(default=())


def save_round(
    folder: Path,
    n: int,
    params: Params,
    server_state: ClientState,
    client_states: Mapping[str, ClientState],
    state: Mapping[str, Any],
    keep: int,
    spare: Collection[int] = (),
) -> Path:
    """Writes the checkpoint of round `n` so that a crash at any moment leaves the one before it intact.

    Checkpoints of this and later rounds, which the run went back behind, go before it is in place: none of them is ever
    the newest beside it.

    Args:
        folder: the `checkpoints` folder; made if missing.
        n: the round, counted from 1.
        params: all rules.
        server_state: the server's own tensors.
        client_states: each client's private state; an empty one is not written, and read as absent.
        state: what else to remember, as JSON.
        keep: how many of the newest checkpoints stay; at least 1.
        spare: rounds whose checkpoints stay besides, however old.

    Returns:
        The checkpoint's folder.

    Raises:
        FednlError: the disk refused.
    """
    place = folder / f"round-{n}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".round-*.tmp"):  # what a crash in the middle of writing left behind
            shutil.rmtree(left)
        temporary = folder / f".round-{n}.tmp"
        temporary.mkdir()
        _fill(temporary, n, params, server_state, client_states, state)
        drop_after(folder, n - 1)
        os.replace(temporary, place)
        sync_folder(folder)
        prune(folder, keep, spare)
    except OSError as error:
        raise FednlError(
            f"cannot write the checkpoint {place}: {error.strerror or error}; free some space and resume."
        ) from None
    return place


def prune(folder: Path, keep: int, spare: Collection[int] = ()) -> None:
    """Removes all checkpoints but the newest.

    Args:
        folder: the `checkpoints` folder.
        keep: how many of the newest stay; at least 1.
        spare: rounds whose checkpoints stay besides.

    Raises:
        OSError: the disk refused.
    """
    for old in set(_numbered(folder)[keep:]) - set(spare):
        shutil.rmtree(folder / f"round-{old}")


def drop_after(folder: Path, n: int, but: Collection[str] = ()) -> None:
    """Removes the checkpoints of the rounds after one.

    Args:
        folder: the `checkpoints` folder.
        n: the last round whose checkpoint stays; 0 for none.
        but: names of checkpoints that stay besides.

    Raises:
        OSError: the disk refused.
    """
    for later in (number for number in _numbered(folder) if number > n and f"round-{number}" not in but):
        shutil.rmtree(folder / f"round-{later}")


def load_newest(folder: Path, begun: Sequence[int] = ()) -> Checkpoint | None:
    """Reads the newest checkpoint whose files all have the hashes written down; None if there is none at all.

    Args:
        folder: the `checkpoints` folder; may be missing.
        begun: the first round of each attempt after attempt 0; what was taken back is passed over.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged.
    """
    skipped: list[str] = []
    passed = lacks = False
    for number in _numbered(folder):
        try:
            found = _read(folder / f"round-{number}", number, tuple(skipped))
        except (OSError, ValueError, KeyError, TypeError, MessageError):
            skipped.append(f"round-{number}")
            lacks = lacks or not taken_back(number, 0, begun)  # of whatever attempt, it was not taken back
            continue
        if not taken_back(number, int(found.state.get("attempt", 0)), begun):
            return found
        passed = True
    if lacks or (skipped and not passed):
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged ({', '.join(skipped)}): restore one, or start anew."
        )
    return None


def load_round(folder: Path, n: int) -> Checkpoint:
    """Reads the checkpoint of round `n`, such as the end of a task or the best round.

    Args:
        folder: the `checkpoints` folder.
        n: the round, counted from 1.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return _read(folder / f"round-{n}", n, ())
    except (OSError, ValueError, KeyError, TypeError, MessageError):
        raise CheckpointError(f"{folder} lacks a whole round-{n}: restore it from a copy, or train anew.") from None


def write_tensors(path: Path, params: Params, header: Mapping[str, Any]) -> None:
    """Writes params to one safetensors file, whole or not at all.

    Args:
        path: the file; its folder must exist.
        params: what to write.
        header: what JSON can hold, kept in the file's metadata.

    Raises:
        FednlError: the disk refused.
    """
    try:
        write_atomic(path, pack(params, header))
    except OSError as error:
        raise FednlError(f"cannot write {path}: {error.strerror or error}; free some space.") from None


def read_tensors(path: Path) -> tuple[Params, dict[str, Any]]:
    """Reads what `write_tensors` wrote.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        return unpack(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; restore it from a copy.") from None
    except MessageError:
        raise CheckpointError(f"{path} is damaged: restore it from a copy.") from None


def round_of(path: Path) -> int:
    """Gives the round that rules on disk say they are of; 0 where there are none.

    Args:
        path: what `write_tensors` wrote, if anything.
    """
    try:
        return int(read_tensors(path)[1].get("round", 0)) if path.exists() else 0
    except CheckpointError:
        return 0


def _fill(
    folder: Path,
    n: int,
    params: Params,
    server_state: ClientState,
    client_states: Mapping[str, ClientState],
    state: Mapping[str, Any],
) -> None:
    """Writes every file, and the one with their hashes last."""
    files = {"params": params, "server": server_state}
    # One that keeps nothing has no file: among ten thousand such clients these files would be most of a round's time.
    clients = {client: _file_name(client) for client, kept in sorted(client_states.items()) if kept}
    files |= {clients[client]: client_states[client] for client in clients}
    hashes = {}
    for name, tensors in files.items():
        content = pack(tensors)
        hashes[f"{name}.safetensors"] = hashlib.sha256(content).hexdigest()
        _write_through(folder / f"{name}.safetensors", content)
    facts = {"format": FORMAT, "round": n, "files": hashes, "clients": clients, "state": dict(state)}
    _write_through(folder / "state.json", json.dumps(facts, indent=1, allow_nan=False).encode("utf-8"))
    sync_folder(folder)


def _write_through(path: Path, content: bytes) -> None:
    """Writes a file down to the disk; the folder it is in becomes visible as a whole, later."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read(folder: Path, number: int, skipped: tuple[str, ...]) -> Checkpoint:
    facts = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if facts["format"] != FORMAT or facts["round"] != number:
        raise ValueError("another format or round")
    tensors: dict[str, Params] = {}
    for name, expected in facts["files"].items():
        content = (folder / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != expected:
            raise ValueError("a file is not what was written")
        tensors[name.removesuffix(".safetensors")] = unpack(content)[0]
    states = {client: tensors[name] for client, name in facts["clients"].items()}
    return Checkpoint(number, tensors["params"], tensors["server"], states, facts["state"], skipped)


def _file_name(client: str) -> str:
    """A client's name as part of a file name on every system, never two clients' the same."""
    name = quote(client, safe="")
    plain = re.fullmatch(r"[a-z0-9_-]+", name) and len(name) <= _LONGEST_NAME
    # Some systems take "A" and "a" for one file, or allow neither dots at the end nor long names.
    mark = "" if plain else "-" + hashlib.sha256(client.encode("utf-8")).hexdigest()[:12]
    return f"client-{name[:_LONGEST_NAME]}{mark}"


def _numbered(folder: Path) -> list[int]:
    """The rounds that have a checkpoint, newest first."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(match[1]) for name in names if (match := _FOLDER.fullmatch(name))), reverse=True)
