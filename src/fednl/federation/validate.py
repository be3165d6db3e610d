"""What a client's reply must be before it may touch the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fednl.errors import MessageError
from fednl.federation.coding import decode, wire_layout
from fednl.federation.message import Message
from fednl.federation.params import Params

MOST_EXAMPLES = 10**9
"""More training examples than this are not believed, as the number is the client's weight in the mean."""

_HEADER_BYTES = 2**14
_ENTRY_BYTES = 2**9

CODES = (
    "malformed",
    "unknown-client",
    "duplicate",
    "stale-round",
    "too-large",
    "num-examples",
    "unknown-name",
    "missing-name",
    "shape",
    "dtype",
    "non-finite",
)
"""Every reason for which a reply is refused; refusals are counted by these."""


@dataclass(frozen=True)
class Wanted:
    """What a reply of this round must be.

    Args:
        rules: the shared rules as the server has them: names, shapes, and what deltas are added to.
        extra: names, shapes and dtypes of what an algorithm sends besides.
        round: counted from 1.
        run: the run's name.
        coding: how the numbers must be written, one of `fednl.federation.coding.CODINGS`.
        apart: those of `extra` that a reply carries all or none of.
        attempt: how often the run went back before this round was asked.
    """

    rules: Params
    extra: Params
    round: int
    run: str
    coding: str = "float32"
    apart: frozenset[str] = frozenset()
    attempt: int = 0

    def read(self, payload: bytes, client: str) -> Message:
        """Reads a reply: its size, then what it says it holds, and only then its numbers.

        Args:
            payload: bytes from anyone.
            client: who the transport says has sent it.

        Returns:
            The message, its rules as values in the dtypes of `rules`.

        Raises:
            MessageError: its `code` is one of `CODES`.
        """
        layout, scales = wire_layout(self.rules, self.coding)
        extra = {**self.extra, **scales}
        if len(payload) > _most_bytes([layout, extra], len(client) + len(self.run)):
            raise MessageError(
                "too-large", f'Client "{client}" sent {len(payload)} bytes, more than its rules can need.'
            )
        outline = Message.outline(payload)
        # What weighs nothing need not carry what a mean is made of, and what goes to others comes when it is there.
        comes = outline.num_examples != 0, bool(self.apart & outline.extra.keys())
        owed = {n: t for n, t in self.extra.items() if comes[n in self.apart] or n in outline.extra}
        named: dict[str, Any] = {"run": self.run, "attempt": self.attempt}
        coded: dict[str, Any] = {"expected_extra": {**owed, **scales}, "coding": self.coding}
        check_update(outline, layout, self.round, client, **named, **coded)
        message = decode(Message.from_bytes(payload), self.rules)
        check_update(message, self.rules, self.round, client, **named, expected_extra=owed)
        return message


def check_update(
    message: Message,
    expected: Params,
    round: int,
    client: str,
    *,
    run: str = "",
    expected_extra: Mapping[str, torch.Tensor] | None = None,
    coding: str = "float32",
    attempt: int = 0,
) -> None:
    """Refuses a reply that is not exactly what was asked for; a refusal never repeats what the client wrote.

    Args:
        message: the reply; an outline's numbers are not looked at, as it has none.
        expected: the allow-list: the names that travel, each with a tensor of the right shape and dtype.
        round: the round now; a reply must echo it.
        client: who the transport says has sent it.
        run: the run now; a reply must echo it.
        expected_extra: the same for `message.extra`; None lets none through.
        coding: how the numbers must be written; `expected` has the shapes and dtypes of that.
        attempt: how often the run went back before this round was asked; a reply must echo it.

    Raises:
        MessageError: its `code` is one of `CODES`; of several faults, the first that is looked for.
    """
    if message.client != client:
        raise MessageError("unknown-client", f'A reply from client "{client}" carries another name.')
    if (message.round, message.run, message.attempt) != (round, run, attempt):
        raise MessageError("stale-round", f'The reply of client "{client}" is not for round {round} of this run.')
    # bool is an int in Python, and a weight of True would pass for one example.
    if type(message.num_examples) is not int or not 0 <= message.num_examples <= MOST_EXAMPLES:
        raise MessageError("num-examples", f'Client "{client}" must have from 0 to {MOST_EXAMPLES} examples.')
    if message.coding != coding:
        raise MessageError("dtype", f'Client "{client}" must write its numbers as [traffic] says, {coding}.')
    _check_tensors(message.params, expected, client)
    _check_tensors(message.extra, expected_extra or {}, client)


def _most_bytes(parts: list[Params], letters: int) -> int:
    """The size that no honest reply comes to: its tensors, with room for names, shapes, offsets and metrics."""
    tensors = [(name, tensor) for part in parts for name, tensor in part.items()]
    container = _HEADER_BYTES + 6 * letters + sum(6 * len(name) + _ENTRY_BYTES for name, _ in tensors)
    return container + sum(tensor.nbytes for _, tensor in tensors)


def _check_tensors(sent: Params, expected: Mapping[str, torch.Tensor], client: str) -> None:
    unknown = len(sent.keys() - expected.keys())
    if unknown:
        raise MessageError(
            "unknown-name",
            f'Client "{client}" sent {unknown} tensors that [federation] shared does not let out.',
        )
    for name in sorted(expected):
        if name not in sent:
            raise MessageError("missing-name", f'Client "{client}" did not send "{name}".')
        tensor, model = sent[name], expected[name]
        if tensor.shape != model.shape:
            raise MessageError(
                "shape", f'Client "{client}" sent "{name}" as {list(tensor.shape)}, not {list(model.shape)}.'
            )
        if tensor.dtype != model.dtype:
            raise MessageError("dtype", f'Client "{client}" sent "{name}" as {tensor.dtype}, not {model.dtype}.')
        if not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
            raise MessageError("non-finite", f'Client "{client}" sent "{name}" with NaN or infinity in it.')
