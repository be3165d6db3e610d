"""A client that keeps its own rounds on its own disk: asked twice for one round it trains once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from fednl.errors import CheckpointError, FednlError
from fednl.federation.attempts import taken_back
from fednl.federation.checkpoint import read_tensors
from fednl.federation.message import LEAST_KEPT, Message
from fednl.federation.params import ClientState, Params, copy
from fednl.federation.secure import STAGES
from fednl.federation.sharing import SECRET
from fednl.federation.transport import Endpoint
from fednl.federation.wire import pack
from fednl.files import write_atomic

_REPLY, _STATE = "reply", "state/"
_FILE = re.compile(r"round-([0-9]+)\.safetensors")


class OwnStore:
    """Wraps a client's side of the rounds so that it needs nothing from the server but messages.

    An answer is on disk, with the state after it, before it is sent. The same question again (a reply was lost, the
    server was restarted) gets the same bytes without training. An earlier round again, or the same round with another
    question (the server went back to a checkpoint), is trained from the state before that round, and what came after it
    is dropped, as is what the server took back while this client was not asked; a later exchange of a masked sum goes
    on in the round. Under local noise another question in a round that was answered is refused, unless it is of a later
    attempt: the server counts a round that it does again once more. Runs do not know each other's state.

    Args:
        endpoint: what the client does with a message and its state.
        folder: the client's own; made if missing, readable by its owner only.
        start: the client's state before its first round: `private/NAME` for every rule that does not travel, a LoRA's
            factors cut to the client's rank as `fednl.federation.lora_ranks.offered` gives them.
        keep: how many of the newest rounds of a run are kept; never fewer than `LEAST_KEPT`. The server's
            `keep-checkpoints` or more, as it may go back that far. Where more rounds have failed, a message tells how
            far else it may go back (`Message.unsettled`), and as much is kept.
    """

    def __init__(self, endpoint: Endpoint, folder: Path, start: ClientState, keep: int = LEAST_KEPT) -> None:
        self._endpoint, self._folder, self._start = endpoint, folder, start
        self._keep = max(keep, LEAST_KEPT)

    def __call__(
        self, client: str, message: Message, state: ClientState, on_progress: Callable[[dict[str, Any]], None]
    ) -> tuple[Message, ClientState]:
        """Answers as the endpoint does, from this store's state; `state` is not read.

        Args:
            client: its stable name.
            message: the server's question.
            state: what the transport holds for the client; nothing, where clients hold their own.
            on_progress: is told what happens, if there is something to do.

        Raises:
            CheckpointError: the state before the round is no longer kept, a file of the store is damaged, or a second
                answer to the round would spend privacy that nobody counts.
            FednlError: the disk refused.
        """
        folder = self._folder_of(client, message.run)
        question = hashlib.sha256(message.to_bytes()).hexdigest()
        path = folder / f"round-{message.round}.safetensors"
        tensors, header = read_tensors(path) if path.exists() else ({}, {})
        if header.get("question") == question:
            return _reply(tensors), _state(tensors)
        _check_counted(folder, message)
        gone = _gone(folder, message)
        before, number = self._before(folder, message.round, gone)
        if message.coding in STAGES and header.get("attempt", 0) == message.attempt and tensors:
            before = _state(tensors)  # a later exchange of the same round, not the round anew
        reply, after = self._endpoint(client, message, before, on_progress)
        sent = torch.frombuffer(bytearray(reply.to_bytes()), dtype=torch.uint8)
        stored = {_REPLY: sent, **{f"{_STATE}{name}": tensor for name, tensor in after.items()}}
        told = {"question": question, "earlier": number, "attempt": message.attempt}
        self._write(folder, message, pack(stored, told), gone)
        return reply, after

    def _before(self, folder: Path, round: int, gone: Collection[int]) -> tuple[ClientState, int]:
        """The state before a round, and after how many rounds it is."""
        kept = _rounds(folder)
        earlier = [number for number in kept if number < round and number not in gone]
        if earlier:
            tensors, header = read_tensors(folder / f"round-{earlier[-1]}.safetensors")
            return _state(tensors), int(header["earlier"]) + 1
        if kept and read_tensors(folder / f"round-{kept[0]}.safetensors")[1]["earlier"]:
            raise CheckpointError(
                f"Round {round} was asked again, but this client keeps no state from before round {kept[0]}: let the "
                "server resume from a newer checkpoint, or start a new run."
            )
        return copy(self._start), 0

    def _write(self, folder: Path, message: Message, content: bytes, gone: Collection[int]) -> None:
        round, settled = message.round, message.round - 1 - message.unsettled
        path = folder / f"round-{round}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for number in _rounds(folder):
                if number > round or number in gone:
                    (folder / f"round-{number}.safetensors").unlink()
            write_atomic(path, content, mode=0o600)
            kept = _rounds(folder)
            needed = max((number for number in kept if number <= settled), default=0)
            for old in (number for number in kept[: -self._keep] if number < needed):
                (folder / f"round-{old}.safetensors").unlink()
        except OSError as error:
            raise FednlError(f"cannot write {path}: {error.strerror or error}; free some space.") from None

    def _folder_of(self, client: str, run: str) -> Path:
        """A run's folder; names may hold anything, so it is called by their hash."""
        return self._folder / hashlib.sha256(f"{client}\n{run}".encode()).hexdigest()[:24]


def _gone(folder: Path, message: Message) -> set[int]:
    """The earlier rounds that the server has taken back since, in attempts in which this client was not asked."""
    earlier = [number for number in _rounds(folder) if number < message.round] if message.begun else []
    attempts = {number: read_tensors(folder / f"round-{number}.safetensors")[1].get("attempt", 0) for number in earlier}
    return {number for number, attempt in attempts.items() if taken_back(number, attempt, message.begun)}


def _check_counted(folder: Path, message: Message) -> None:
    """Refuses, under local noise, a question that the server's count of rounds and attempts would not show."""
    kept = _rounds(folder)
    if not kept:
        return
    tensors, header = read_tensors(folder / f"round-{kept[-1]}.safetensors")
    first = header.get("attempt", 0) + (kept[-1] >= message.round)
    if SECRET in _state(tensors) and message.attempt < first:
        raise CheckpointError(
            f"Round {message.round} was asked again with other rules. Under local noise every answer spends privacy, "
            "and one more than the rounds would not be counted: start a new run."
        )


def _rounds(folder: Path) -> list[int]:
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for name in names if (match := _FILE.fullmatch(name)))


def _reply(tensors: Params) -> Message:
    return Message.from_bytes(tensors[_REPLY].numpy().tobytes())


def _state(tensors: Params) -> ClientState:
    return {name.removeprefix(_STATE): tensor for name, tensor in tensors.items() if name.startswith(_STATE)}
