from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from fednl.federation.combine import InOrder, WeightedMean
from fednl.federation.message import Message
from fednl.federation.params import Params, equal, weighted_mean

floats = st.floats(-1e6, 1e6, width=32)
updates = st.lists(st.tuples(st.lists(floats, min_size=3, max_size=3), st.integers(1, 10**6)), min_size=1, max_size=6)


def streamed(items: list[tuple[Params, float]]) -> WeightedMean:
    mean = WeightedMean()
    for params, weight in items:
        mean.add(params, weight)
    return mean


@given(updates)
def test_equals_the_closed_form(items: list[tuple[list[float], int]]) -> None:
    pairs: list[tuple[Params, float]] = [
        ({"w": torch.tensor(values, dtype=torch.float64)}, weight) for values, weight in items
    ]
    mean = streamed(pairs)
    assert mean.weight == sum(weight for _, weight in items)
    scale = max(1.0, max(abs(value) for values, _ in items for value in values))
    torch.testing.assert_close(mean.result(), weighted_mean(pairs), rtol=0, atol=1e-13 * scale)


@given(st.lists(floats, min_size=3, max_size=3), st.lists(st.integers(1, 10**9), min_size=1, max_size=6))
def test_identical_clients_come_back_to_the_bit(values: list[float], weights: list[int]) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        params = {"w": torch.tensor(values, dtype=torch.float64).mul(1 / 3).to(dtype)}
        assert equal(streamed([(params, weight) for weight in weights]).result(), params)


def test_weights_zero_change_nothing_and_nothing_gives_nothing() -> None:
    params = {"w": torch.tensor([2.0])}
    mean = streamed([({"w": torch.tensor([9.0])}, 0), (params, 4), ({"w": torch.tensor([-9.0])}, 0)])
    assert equal(mean.result(), params)
    assert mean.weight == 4
    assert WeightedMean().result() == {}


def test_equal_weights_are_the_plain_mean_and_inputs_are_left_alone() -> None:
    first, second = {"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}
    mean = streamed([(first, 7), (second, 7)])
    result = mean.result()
    assert result["w"].item() == 2.5
    result["w"][0] = 0.0
    assert mean.result()["w"].item() == 2.5
    assert (first["w"].item(), second["w"].item()) == (1.0, 4.0)


def test_accumulates_in_float64() -> None:
    # In float32, 1e8 + 1 is 1e8.
    mean = streamed(
        [({"w": torch.tensor([1e8])}, 1), ({"w": torch.tensor([1.0])}, 1), ({"w": torch.tensor([-1e8])}, 1)]
    )
    assert abs(mean.result()["w"].item() - 1 / 3) < 1e-6


def note(client: str) -> Message:
    return Message({}, client=client)


def test_every_arrival_order_is_released_in_the_order_of_names() -> None:
    names = ["a", "b", "c", "d"]
    for order in itertools.permutations(names):
        queue = InOrder(reversed(names))
        released = [message.client for name in order for message in queue.put(name, note(name))]
        assert released == names
        assert list(queue.rest()) == []


def test_a_client_without_a_reply_holds_nobody_back() -> None:
    queue = InOrder(["a", "b", "c", "d"])
    assert list(queue.put("c", note("c"))) == []
    assert list(queue.put("a", None)) == []
    assert [message.client for message in queue.put("b", note("b"))] == ["b", "c"]
    assert list(queue.rest()) == []
    waiting = InOrder(["a", "b", "c"])
    assert list(waiting.put("c", note("c"))) == []
    assert list(waiting.put("b", note("b"))) == []
    assert [message.client for message in waiting.rest()] == ["b", "c"]
