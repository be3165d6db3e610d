"""Tensors to bytes and back: one safetensors buffer with a JSON header of ours; nothing is ever unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch

from fednl.errors import MessageError

_HEADER_KEY = "fednl"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MOST_DIMENSIONS = 16


def pack(tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any] | None = None) -> bytes:
    """Serialises tensors with a small header; the same input gives the same bytes.

    Args:
        tensors: any names, shapes and devices; bfloat16 travels as it is. Not modified.
        header: what JSON can hold; floats must be finite.
    """
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    # One metadata key: safetensors keeps its metadata in a hash map, whose order would differ between runs.
    text = json.dumps(dict(header or {}), sort_keys=True, ensure_ascii=True, allow_nan=False)
    return safetensors.torch.save(plain, metadata={_HEADER_KEY: text})


def unpack(buffer: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Reads what `pack` wrote; sizes are checked against the buffer before anything is allocated for them.

    Args:
        buffer: bytes from anywhere.

    Returns:
        New tensors on the CPU, and the header.

    Raises:
        MessageError: code `malformed`; the bytes are not such a buffer, or lie about a size.
    """
    header = outline(buffer)[1]
    try:
        return safetensors.torch.load(buffer), header
    except Exception:  # whatever the library makes of hostile bytes, the answer is the same
        raise malformed("it holds no readable tensors") from None


def outline(buffer: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Reads what tensors a buffer holds, without allocating or reading any of them.

    Args:
        buffer: bytes from anywhere.

    Returns:
        Tensors of the right shapes and dtypes on the device "meta", and the header.

    Raises:
        MessageError: code `malformed`, as `unpack`.
    """
    layout = _checked_layout(buffer)
    header = _json(layout.pop("__metadata__", {}).get(_HEADER_KEY))
    if not isinstance(header, dict):
        raise malformed("its header is not an object")
    try:
        tensors = {
            name: torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]], device="meta")
            for name, entry in layout.items()
        }
    except (RuntimeError, OverflowError):  # an empty tensor may still claim sides whose product has no number
        raise malformed("a tensor's shape is not possible") from None
    return tensors, header


def container_bytes(buffer: bytes) -> int:
    """Gives how many bytes of a buffer that `pack` wrote are not tensors but names, shapes and header."""
    return 8 + int.from_bytes(buffer[:8], "little")


def malformed(why: str) -> MessageError:
    """Gives the refusal of bytes or fields that are not what they must be."""
    return MessageError("malformed", f"The message is refused, as {why}; the sender must run the same version.")


def _checked_layout(buffer: bytes) -> dict[str, Any]:
    """Parses the safetensors header and checks that its tensors fill the buffer exactly."""
    if len(buffer) < 8:
        raise malformed("it is shorter than 8 bytes")
    header_bytes = int.from_bytes(buffer[:8], "little")
    if header_bytes > len(buffer) - 8:
        raise malformed("its header claims more bytes than came")
    layout = _json(buffer[8 : 8 + header_bytes])
    if not isinstance(layout, dict) or not isinstance(layout.get("__metadata__", {}), dict):
        raise malformed("its header is not an object")
    spans = sorted(_span(entry) for name, entry in layout.items() if name != "__metadata__")
    end = 0
    for start, stop in spans:
        if start != end:
            raise malformed("its tensors overlap or leave gaps")
        end = stop
    if end != len(buffer) - 8 - header_bytes:
        raise malformed("its tensors claim another size than came")
    return layout


def _span(entry: Any) -> tuple[int, int]:
    """The bytes of one tensor, after checking that dtype and shape need exactly as many."""
    try:
        item_bytes, shape = _DTYPES[entry["dtype"]].itemsize, entry["shape"]
        start, stop = entry["data_offsets"]
        numbers = [*shape, start, stop]
    except (TypeError, KeyError, ValueError):
        raise malformed("a tensor's description is incomplete or of an unknown dtype") from None
    # A word or an object of no entries would pass for the shape of a single number.
    if (
        not isinstance(shape, list)
        or len(shape) > _MOST_DIMENSIONS
        or not all(type(n) is int and 0 <= n < 2**63 for n in numbers)
    ):
        raise malformed("a tensor's shape is not possible")
    if stop - start != math.prod(shape) * item_bytes:
        raise malformed("a tensor's shape and size disagree")
    return start, stop


def _json(text: bytes | str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_no_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError, TypeError):
        raise malformed("its header is not JSON") from None


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a name comes twice")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(name)
