"""What travels between server and client: named tensors, a weight, and a few numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fednl.federation.params import Params
from fednl.federation.wire import malformed, outline, pack, unpack

FORMAT = 1
STATUSES = ("ok", "empty", "withheld")
_FIELDS = {"num_examples", "metrics", "round", "client", "run", "status", "coding", "adapters"}
_SELDOM = {"attempt", "unsettled", "counted"}
"""Numbers that are written only where they are not 0."""
LEAST_KEPT = 4
"""How many of its newest rounds a client that keeps its own state keeps at least."""
_BEGUN = "begun"
"""A list that is written only where it is not empty."""


@dataclass(frozen=True)
class Message:
    """One message, either way.

    Args:
        params: the shared rules, by canonical name.
        extra: further tensors that an algorithm names; plain averaging sends none.
        num_examples: trainable examples in the client's training split, its weight; 0 from a server.
        metrics: what the client measured, each a float; values that are not finite are not sent.
        round: the round, counted from 1; a reply echoes it.
        client: the client's stable name.
        run: the run's name; a reply echoes it.
        status: `"ok"`, or `"empty"` from a client that has no examples, `"withheld"` from one with too few to share.
        coding: how the numbers in `params` are written, one of `fednl.federation.coding.CODINGS`; `"float32"` is as
            trained.
        adapters: from the server, a hash of all that makes rules comparable but is not in them, such as a LoRA's alpha;
            empty where nobody has said.
        attempt: how often the run went back behind rounds that failed before this one was asked; a reply echoes it.
        unsettled: from the server, how many of the rounds just before this one it may yet go back behind; 0 also where
            a client that keeps its own state has what leads there without being told.
        counted: from the server, the last round whose update holds a reply of this client; 0 for none, or where the
            algorithm hands nothing from client to client.
        begun: from the server, the first round of each attempt after attempt 0.
    """

    params: Params
    extra: Params = field(default_factory=dict)
    num_examples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    round: int = 0
    client: str = ""
    run: str = ""
    status: str = "ok"
    coding: str = "float32"
    adapters: str = ""
    attempt: int = 0
    unsettled: int = 0
    counted: int = 0
    begun: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """Serialises the message: safetensors with a JSON header; the same message gives the same bytes."""
        tensors = {f"params/{name}": tensor for name, tensor in self.params.items()}
        tensors |= {f"extra/{name}": tensor for name, tensor in self.extra.items()}
        # Numbers become plain floats here: a numpy or torch scalar is not JSON, and NaN is no measurement.
        numbers = {name: float(value) for name, value in self.metrics.items()}
        header = {
            "format": FORMAT,
            "num_examples": self.num_examples,
            "metrics": {name: value for name, value in numbers.items() if math.isfinite(value)},
            "round": self.round,
            "client": self.client,
            "run": self.run,
            "status": self.status,
            "coding": self.coding,
            "adapters": self.adapters,
            **{name: number for name in sorted(_SELDOM) if (number := getattr(self, name))},
            **({_BEGUN: list(self.begun)} if self.begun else {}),
        }
        return pack(tensors, header)

    @classmethod
    def from_bytes(cls, buffer: bytes) -> Message:
        """Reads a message from bytes that may come from anyone.

        Whether it fits the round is for `fednl.federation.validate.check_update` to say.

        Args:
            buffer: the bytes; the tensors of the message are copies.

        Raises:
            MessageError: code `malformed`; not such bytes, sizes that lie, or a field of another kind.
        """
        return cls._of(*unpack(buffer))

    @classmethod
    def outline(cls, buffer: bytes) -> Message:
        """Reads a message whose tensors have shapes and dtypes but no numbers: nothing is allocated for them.

        Args:
            buffer: the bytes, from anyone.

        Raises:
            MessageError: code `malformed`, as `from_bytes`.
        """
        return cls._of(*outline(buffer))

    @classmethod
    def _of(cls, tensors: Params, header: dict[str, Any]) -> Message:
        if header.pop("format", None) != FORMAT:
            raise malformed("it is of another format")
        if header.keys() - _SELDOM - {_BEGUN} != _FIELDS:
            raise malformed("a field is missing or unknown")
        _check_fields(header)
        header[_BEGUN] = tuple(header.get(_BEGUN, ()))
        parts: dict[str, Params] = {"params": {}, "extra": {}}
        for name, tensor in tensors.items():
            part, slash, rest = name.partition("/")
            if part not in parts or not slash:
                raise malformed("a tensor is neither a parameter nor an extra")
            parts[part][rest] = tensor
        return cls(parts["params"], parts["extra"], **header)

    @property
    def size_bytes(self) -> int:
        """How many bytes this message is on the wire."""
        return len(self.to_bytes())

    @property
    def tensor_bytes(self) -> int:
        """How many of these bytes are the tensors' own; the rest is the container: names, shapes, header."""
        return sum(tensor.nbytes for part in (self.params, self.extra) for tensor in part.values())


def _check_fields(header: dict[str, Any]) -> None:
    metrics = header["metrics"]
    if not isinstance(metrics, dict) or not all(type(v) is float and math.isfinite(v) for v in metrics.values()):
        raise malformed("a metric is not a finite number")
    if type(header["round"]) is not int or header["status"] not in STATUSES:
        raise malformed("its round or status is of another kind")
    if not all(type(header[name]) is int and header[name] > 0 for name in _SELDOM & header.keys()):
        raise malformed("its attempt, unsettled or counted rounds are no positive number")
    begun = header.get(_BEGUN, [1])
    if not isinstance(begun, list) or not begun or not all(type(first) is int and first > 0 for first in begun):
        raise malformed("its begun attempts are no list of rounds")
    if not all(isinstance(header[name], str) for name in ("client", "run", "coding", "adapters")):
        raise malformed("its client, run, coding or adapters are no word")
