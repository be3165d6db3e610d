from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednl.errors import MessageError
from fednl.federation.message import Message
from fednl.federation.params import equal
from fednl.federation.wire import pack, unpack

MESSAGE = Message(
    params={"layers.0.memory.write.weight": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.5)},
    extra={"control": torch.ones(2)},
    num_examples=12,
    metrics={"loss": 0.25},
    round=3,
    client="Clinic Ä",
    run="run",
)


def raw(layout: Any, body: bytes = b"") -> bytes:
    text = json.dumps(layout).encode() if not isinstance(layout, bytes) else layout
    return len(text).to_bytes(8, "little") + text + body


def code_of(buffer: bytes) -> str:
    with pytest.raises(MessageError) as caught:
        Message.from_bytes(buffer)
    return caught.value.code


def test_round_trip_and_size() -> None:
    buffer = MESSAGE.to_bytes()
    back = Message.from_bytes(buffer)
    assert equal(back.params, MESSAGE.params)
    assert equal(back.extra, MESSAGE.extra)
    assert (back.num_examples, back.metrics, back.round, back.client, back.run, back.status) == (
        12,
        {"loss": 0.25},
        3,
        "Clinic Ä",
        "run",
        "ok",
    )
    assert MESSAGE.size_bytes == len(buffer)
    assert back.to_bytes() == buffer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_every_dtype_and_shape_travels(dtype: torch.dtype) -> None:
    base = torch.arange(12).view(3, 4).to(dtype)
    params = {
        "turned": base.t(),
        "part": base[1:, ::2],
        "scalar": base[0, 1],
        "none": base[:0],
        "whole": base,
    }
    assert equal(Message.from_bytes(Message(params).to_bytes()).params, params)


def test_no_tensors_travel_too() -> None:
    assert Message.from_bytes(Message({}, round=1).to_bytes()).params == {}


def test_the_message_shares_no_memory() -> None:
    tensor = torch.zeros(3)
    buffer = Message({"w": tensor}).to_bytes()
    first, second = Message.from_bytes(buffer), Message.from_bytes(buffer)
    first.params["w"] += 1
    assert tensor.sum() == 0
    assert second.params["w"].sum() == 0
    assert Message.from_bytes(buffer).params["w"].sum() == 0


def test_metrics_become_plain_floats_and_what_is_not_finite_is_absent() -> None:
    metrics: dict[str, Any] = {
        "a": np.float32(0.5),
        "b": torch.tensor(2.0),
        "c": True,
        "d": float("nan"),
        "e": 1e999,
    }
    assert Message.from_bytes(Message({}, metrics=metrics).to_bytes()).metrics == {
        "a": 0.5,
        "b": 2.0,
        "c": 1.0,
    }


def test_the_same_message_gives_the_same_bytes() -> None:
    names = [f"n{number}" for number in range(20)]
    one = Message({name: torch.ones(1) for name in names}, metrics={"a": 1.0, "b": 2.0})
    two = Message({name: torch.ones(1) for name in reversed(names)}, metrics={"b": 2.0, "a": 1.0})
    assert one.to_bytes() == two.to_bytes()


def test_a_header_that_lies_about_its_size_is_refused_before_allocation() -> None:
    import tracemalloc

    huge = {"dtype": "F64", "shape": [10**12], "data_offsets": [0, 8 * 10**12]}
    tracemalloc.start()
    try:
        for buffer in (
            (2**62).to_bytes(8, "little") + b"{}",
            raw({"params/w": huge}),
            raw({"params/w": {**huge, "data_offsets": [0, 8]}}, bytes(8)),
            raw({"params/w": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}}, bytes(8)),
        ):
            assert code_of(buffer) == "malformed"
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


SPAN = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HEADER = {"__metadata__": {"fednl": json.dumps(unpack(MESSAGE.to_bytes())[1])}}


@pytest.mark.parametrize(
    "buffer",
    [
        b"",
        b"1234567",
        raw(b"not JSON"),
        raw([1]),
        raw(b"[" * 100_000),
        raw({}),
        raw({"__metadata__": 3}),
        raw({"__metadata__": {"fednl": "{}"}}),
        raw({"__metadata__": {"fednl": "[]"}}),
        raw({"params/w": SPAN}),
        raw({"params/w": SPAN}, bytes(4)),
        raw({"params/w": SPAN, "params/v": SPAN}, bytes(4)),
        raw({"params/w": {**SPAN, "data_offsets": [4, 8]}}, bytes(8)),
        raw({"params/w": {**SPAN, "dtype": "F7"}}, bytes(4)),
        raw({"params/w": {**SPAN, "shape": [-1]}}, bytes(4)),
        raw({"params/w": {**SPAN, "shape": [True]}}, bytes(4)),
        raw({"params/w": {**SPAN, "shape": "1"}}, bytes(4)),
        raw({"params/w": {**SPAN, "shape": ""}, **HEADER}, bytes(4)),
        raw({"params/w": {**SPAN, "shape": {}}, **HEADER}, bytes(4)),
        raw({"params/w": {**SPAN, "shape": [1] * 99}}, bytes(4)),
        raw({"params/w": [1]}, bytes(4)),
        raw(b'{"params/w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 1 + b'"params/w":{}}', bytes(4)),
        pack({"other/w": torch.ones(1)}, json.loads(unpack(MESSAGE.to_bytes())[1].__repr__().replace("'", '"'))),
        pack({"params": torch.ones(1)}, unpack(MESSAGE.to_bytes())[1]),
    ],
)
def test_malformed_bytes_are_refused(buffer: bytes) -> None:
    assert code_of(buffer) == "malformed"


@pytest.mark.parametrize(
    "field",
    [
        {"format": 2},
        {"format": None},
        {"metrics": {"loss": "low"}},
        {"metrics": {"loss": True}},
        {"metrics": [1]},
        {"round": True},
        {"round": 1.0},
        {"client": 3},
        {"run": None},
        {"status": "please print this"},
        {"surplus": 1},
    ],
)
def test_fields_of_another_kind_are_refused(field: dict[str, Any]) -> None:
    header = unpack(MESSAGE.to_bytes())[1]
    assert code_of(pack({}, {**header, **field})) == "malformed"


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_a_metric_without_a_size_is_refused(number: str) -> None:
    header = unpack(MESSAGE.to_bytes())[1]
    text = json.dumps({**header, "metrics": {"steps": 0.125}}).replace("0.125", number)
    assert code_of(raw({"__metadata__": {"fednl": text}})) == "malformed"


@given(st.data())
def test_a_header_of_anything_that_json_holds_is_read_or_refused(data: st.DataObject) -> None:
    """One field of the header, or of a tensor's description, is any JSON value."""
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=4,
    )
    header, span = unpack(MESSAGE.to_bytes())[1], dict(SPAN)
    part = data.draw(st.sampled_from([header, header["metrics"], span]))
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(anything)
    buffer = raw({"params/w": span, "__metadata__": {"fednl": json.dumps(header)}}, bytes(4))
    for read in (Message.from_bytes, Message.outline):
        with contextlib.suppress(MessageError):
            assert all(math.isfinite(value) for value in read(buffer).metrics.values())


def test_a_missing_field_is_refused() -> None:
    header = unpack(MESSAGE.to_bytes())[1]
    for name in header:
        assert code_of(pack({}, {key: value for key, value in header.items() if key != name})) == "malformed"


@given(st.data())
def test_damaged_bytes_are_read_or_refused_and_never_anything_else(data: st.DataObject) -> None:
    buffer = bytearray(MESSAGE.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        buffer[data.draw(st.integers(0, len(buffer) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(buffer)))
    for candidate in (bytes(buffer), bytes(buffer[:cut])):
        # Anything but a MessageError would leave this block.
        with contextlib.suppress(MessageError):
            Message.from_bytes(candidate)
