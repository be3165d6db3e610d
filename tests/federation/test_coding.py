from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import SIZES, Bench, start_params

from fednl.errors import MessageError, SettingsError
from fednl.federation.coding import CODINGS, SCALES, decode, encode, wire_layout
from fednl.federation.exchange import Exchange, TrafficSettings, check_exchange
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, equal
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.traits import Traits
from fednl.federation.validate import Wanted

# The largest error of one number, as a part of the largest number of its tensor.
ERROR = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 1.01 / 254}


def rules(scale: float = 1.0) -> Params:
    rng = torch.Generator().manual_seed(5)
    drawn = {
        name: torch.randn(shape, generator=rng) * scale for name, shape in {"b": (3, 4), "a": (7,), "c": ()}.items()
    }
    return {**drawn, "d": torch.zeros(2), "e": torch.zeros(0)}


def sent(params: Params, **fields: Any) -> Message:
    return Message(params, num_examples=4, round=1, client="ada", run="r", **fields)


def over_the_wire(message: Message, start: Params) -> Message:
    payload = message.to_bytes()
    return Wanted(start, {}, 1, "r", message.coding).read(payload, "ada")


@pytest.mark.parametrize("coding", CODINGS)
def test_what_comes_out_differs_by_the_rounding_of_the_form_alone(coding: str) -> None:
    start = rules()
    change = rules(1e-3)
    trained = {name: start[name] + change[name].flip(0) if start[name].dim() else start[name] for name in start}
    written, _ = encode(sent(trained), coding, start, {}, False)
    read = over_the_wire(written, start)
    assert read.coding == "float32"
    assert read.extra == {}
    form, _, is_delta = coding.partition("-")
    for name, value in trained.items():
        size = float((value - start[name] if is_delta else value).abs().max()) if value.numel() else 0.0
        rounding = 2.0**-22 * float(value.abs().max()) if value.numel() else 0.0
        assert read.params[name].dtype == torch.float32
        torch.testing.assert_close(read.params[name], value, rtol=0, atol=ERROR[form] * size + rounding)


def test_float32_is_as_trained_to_the_bit() -> None:
    for dtype in (torch.float32, torch.float64):
        params = {name: value.to(dtype) / 3 for name, value in rules().items()}
        written, state = encode(sent(params), "float32", {}, {"private/x": torch.ones(1)})
        assert equal(written.params, params)
        assert equal(decode(written).params, params)
        assert equal(state, {"private/x": torch.ones(1)})


@pytest.mark.parametrize("coding", CODINGS)
def test_the_layout_is_that_of_the_message(coding: str) -> None:
    start = rules()
    written, _ = encode(sent(start), coding, start, {})
    layout, extra = wire_layout(start, coding)
    for part, expected in ((written.params, layout), (written.extra, extra)):
        assert {name: (t.dtype, t.shape) for name, t in part.items()} == {
            name: (t.dtype, t.shape) for name, t in expected.items()
        }


def test_c03_bfloat16_needs_no_carrier_that_knows_it() -> None:
    params = {"a": torch.tensor([1.0, -2.5, 3e-20, 65536.0])}
    written, _ = encode(sent(params), "bfloat16", {}, {})
    assert written.params["a"].dtype == torch.int16
    assert Message.from_bytes(written.to_bytes()).coding == "bfloat16"
    carried = {name: torch.from_numpy(tensor.numpy().copy()) for name, tensor in written.params.items()}
    assert equal(decode(replace(written, params=carried)).params, {"a": params["a"].bfloat16().float()})


def run_of_deltas(feedback: bool) -> tuple[torch.Tensor, ClientState]:
    """A hundred rounds in which the second number's change is too small for one step of int8."""
    change, start, state = torch.tensor([1.0, 0.003]), {"w": torch.zeros(2)}, {}
    total = torch.zeros(2)
    for _ in range(100):
        written, state = encode(sent({"w": change}), "int8-deltas", start, state, feedback)
        total = total + decode(written, start).params["w"]
    return total, state


def test_error_feedback_loses_nothing_for_good() -> None:
    total, state = run_of_deltas(True)
    torch.testing.assert_close(total, torch.tensor([100.0, 0.3]), rtol=0, atol=1.1 / 127)
    torch.testing.assert_close(total + state["residual/w"], torch.tensor([100.0, 0.3]), rtol=0, atol=1e-4)
    plain, state = run_of_deltas(False)
    assert plain[1] == 0.0
    assert state == {}


def test_one_bad_round_does_not_spoil_those_to_come() -> None:
    start = {"w": torch.zeros(2)}
    _, state = encode(sent({"w": torch.tensor([1.0, 0.003])}), "int8-deltas", start, {})
    written, after = encode(sent({"w": torch.tensor([1.0, float("nan")])}), "int8-deltas", start, state)
    assert equal(after, state)
    with pytest.raises(MessageError) as caught:
        over_the_wire(written, start)
    assert caught.value.code == "non-finite"


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_scales_that_are_no_sizes_are_refused(scale: float) -> None:
    start = {"w": torch.zeros(2)}
    written, _ = encode(sent({"w": torch.ones(2)}), "int8-deltas", start, {})
    with pytest.raises(MessageError) as caught:
        over_the_wire(replace(written, extra={SCALES: torch.tensor([scale])}), start)
    assert caught.value.code == "non-finite"


def test_a_scale_that_makes_the_rules_infinite_is_refused() -> None:
    start = {"w": torch.ones(2)}
    written, _ = encode(sent({"w": torch.ones(2) * 2}), "int8-deltas", start, {})
    with pytest.raises(MessageError, match="NaN or infinity"):
        over_the_wire(replace(written, extra={SCALES: torch.tensor([3e38])}), start)


def test_what_float16_cannot_hold_is_refused_and_not_clamped() -> None:
    start = {"w": torch.zeros(2)}
    written, _ = encode(sent({"w": torch.tensor([1.0, 1e5])}), "float16", start, {})
    with pytest.raises(MessageError) as caught:
        over_the_wire(written, start)
    assert caught.value.code == "non-finite"


def test_another_coding_than_was_agreed_is_refused() -> None:
    start = rules()
    written, _ = encode(sent(start), "float16", start, {})
    for coding in CODINGS:
        if coding != "float16":
            with pytest.raises(MessageError) as caught:
                Wanted(start, {}, 1, "r", coding).read(written.to_bytes(), "ada")
            assert caught.value.code == "dtype"


TRAFFIC = [
    TrafficSettings(up=up, down=down, content=content)
    for up, content in [("float16", "values"), ("bfloat16", "deltas"), ("int8", "deltas"), ("float32", "deltas")]
    for down in ("float32", "bfloat16")
]


@pytest.mark.parametrize("traffic", TRAFFIC, ids=lambda traffic: f"{traffic.up_coding}-{traffic.down}")
def test_a_run_counts_the_bytes_of_its_forms_and_ends_near_the_plain_one(
    tmp_path: Path, traffic: TrafficSettings
) -> None:
    training = TrainingSettings(rounds=3, local_steps=2, batch=4, local_lr=1e-2)
    plain = Bench(tmp_path / "plain", training=training).run()
    toy = Bench(tmp_path / "run", training=training, exchange=Exchange(traffic))
    found = toy.run()
    numbers, size = 7, {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
    for row in toy.rows():
        assert row["refused"] == {}
        for client in row["clients"]:
            up = client["up_bytes"] - client["up_container_bytes"]
            assert up == numbers * size[traffic.up] + (3 * 4 if traffic.up == "int8" else 0)
            assert client["down_bytes"] - client["down_container_bytes"] == numbers * size[traffic.down]
            assert min(client["up_container_bytes"], client["down_container_bytes"]) > 8
    rounding = 3 * 2.0**-8 if "bfloat16" in (traffic.up, traffic.down) else 3 * 2.0**-10
    torch.testing.assert_close(found, plain, rtol=rounding, atol=2 * rounding)


def test_the_server_keeps_full_precision_where_changes_come_up(tmp_path: Path) -> None:
    traffic = TrafficSettings(up="float32", down="bfloat16", content="deltas")
    training = TrainingSettings(rounds=1, local_steps=1, local_lr=1e-6)
    found = Bench(tmp_path / "run", training=training, exchange=Exchange(traffic)).run()
    torch.testing.assert_close(found, start_params(), rtol=0, atol=3e-6)
    coarse = Exchange(TrafficSettings(up="float32", down="bfloat16"))
    values = Bench(tmp_path / "values", training=training, exchange=coarse).run()
    assert any(float((values[name] - start).abs().max()) > 1e-4 for name, start in start_params().items())


def test_int8_of_values_is_refused() -> None:
    with pytest.raises(SettingsError, match='content = "deltas"'):
        check_exchange(Exchange(TrafficSettings(up="int8")), FederationSettings(), Traits(), len(SIZES))


def test_a_run_with_feedback_resumes_to_the_bit(tmp_path: Path) -> None:
    exchange = Exchange(TrafficSettings(up="int8", content="deltas"))
    whole = Bench(tmp_path / "whole", exchange=exchange).run()
    halves = Bench(tmp_path / "halves", exchange=exchange)
    halves.run(stop_after=1)
    assert equal(halves.run(), whole)
    other = Bench(tmp_path / "halves", training=TrainingSettings(rounds=4, local_steps=3, batch=4))
    with pytest.raises(Exception, match="exchange"):
        other.run()
