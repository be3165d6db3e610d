from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednl.errors import SettingsError
from fednl.federation.combine import Mean, within
from fednl.federation.exchange import CombineSettings, Exchange, check_exchange
from fednl.federation.message import Message
from fednl.federation.params import Params, equal, norm, shortened, subtract
from fednl.federation.robust import RULES, Robust, krum_order, make_combiner, median, multi_krum, trimmed_mean
from fednl.federation.settings import FederationSettings
from fednl.federation.traits import Traits

numbers = st.floats(-1e6, 1e6, width=32)


def scalars(values: list[float]) -> list[Params]:
    return [{"w": torch.tensor([value], dtype=torch.float64)} for value in values]


def plain_trimmed_mean(values: list[float], attackers: int) -> float:
    """The specification: sort, drop, average."""
    kept = sorted(values)[attackers : len(values) - attackers]
    return sum(kept) / len(kept)


def plain_krum_order(points: list[list[float]], attackers: int) -> list[int]:
    """The specification: for each point the squared distances to all others, the nearest n - f - 2 added up."""
    scores = []
    for i, point in enumerate(points):
        others = [other for j, other in enumerate(points) if j != i]
        squared = sorted(sum((a - b) ** 2 for a, b in zip(point, other, strict=True)) for other in others)
        scores.append(sum(squared[: len(points) - attackers - 2]))
    return sorted(range(len(points)), key=lambda i: (scores[i], i))


@given(st.lists(numbers, min_size=5, max_size=9))
def test_trimmed_mean_and_median_equal_their_specification(values: list[float]) -> None:
    assert trimmed_mean(scalars(values), 1)["w"].item() == pytest.approx(
        plain_trimmed_mean(values, 1), rel=1e-12, abs=1e-9
    )
    assert median(scalars(values), 1)["w"].item() == statistics.median(values)


@given(
    st.lists(st.lists(st.integers(-50, 50), min_size=2, max_size=2), min_size=5, max_size=8), st.sampled_from([1, 2])
)
def test_krum_equals_its_specification(points: list[list[int]], attackers: int) -> None:
    updates = [{"a": torch.tensor([float(x)]), "b": torch.tensor(float(y))} for x, y in points]
    order = plain_krum_order([[float(x), float(y)] for x, y in points], attackers)
    assert krum_order(updates, attackers) == order
    chosen = [points[i] for i in order[: len(points) - attackers]]
    combined = multi_krum(updates, attackers)
    assert combined["a"].item() == pytest.approx(sum(x for x, _ in chosen) / len(chosen), abs=1e-5)
    assert combined["b"].item() == pytest.approx(sum(y for _, y in chosen) / len(chosen), abs=1e-5)


@given(
    st.lists(st.floats(0.9, 1.1), min_size=5, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
)
def test_two_of_seven_move_no_number_out_of_the_honest_range(honest: list[float], hostile: list[float]) -> None:
    for order in itertools.islice(itertools.permutations(range(7)), 0, 5040, 1009):
        updates = [scalars([*honest, *hostile])[i] for i in order]
        for rule in (trimmed_mean, median):
            assert min(honest) - 1e-9 <= rule(updates, 2)["w"].item() <= max(honest) + 1e-9


@pytest.mark.parametrize("hostile", [3e38, -3e38, 1e6, 1.2])
def test_multi_krum_leaves_far_updates_out(hostile: float) -> None:
    updates = [{"w": torch.tensor([value])} for value in (1.0, hostile, 1.01, 0.99, 1.0)]
    assert multi_krum(updates, 1)["w"].item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_identical_updates_come_back_to_the_bit_in_every_dtype(rule: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        params = {"w": (torch.arange(6.0).reshape(2, 3) / 7).to(dtype), "b": torch.tensor(1 / 3, dtype=dtype)}
        assert equal(RULES[rule]([params] * 5, 1), params)


def combined(
    settings: CombineSettings, values: list[float], examples: list[int], asked: int
) -> tuple[str, Message | None]:
    combiner = make_combiner(settings, {"w": torch.zeros(1)}, asked)
    for value, count in zip(values, examples, strict=True):
        combiner.add(Message({"w": torch.tensor([value])}, num_examples=count))
    fault = combiner.fault()
    return fault, None if fault else combiner.result()


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_client_counts_once_under_a_robust_rule(rule: str) -> None:
    _, message = combined(CombineSettings(rule=rule), [1.0, 2.0, 3.0, 4.0, 5.0], [10**9, 1, 1, 1, 1], 5)
    assert message is not None
    assert message.num_examples == 5
    assert message.params["w"].item() == pytest.approx(2.5 if rule == "multi-krum" else 3.0)


def test_missing_clients_are_faulty_ones_and_more_of_them_make_no_update() -> None:
    settings = CombineSettings(rule="median", attackers=2)
    assert combined(settings, [1.0] * 5, [1] * 5, 7)[0] == ""
    assert "4 updates of 7 clients are too few for median against 2" in combined(settings, [1.0] * 4, [1] * 4, 7)[0]
    assert combined(settings, [1.0] * 7, [1] * 7, 20)[0] == ""
    assert "no client" in combined(settings, [1.0] * 4, [0] * 4, 7)[0]
    assert isinstance(make_combiner(settings, {}, 7), Robust)
    assert isinstance(make_combiner(CombineSettings(), {}, 7), Mean)


def test_weights_are_bounded() -> None:
    message = Message({}, num_examples=10**9)
    assert CombineSettings().counted(message.num_examples) == 10**9
    assert CombineSettings(max_examples=50).counted(message.num_examples) == 50
    assert CombineSettings(weights="uniform").counted(message.num_examples) == 1
    assert CombineSettings(weights="uniform").counted(0) == 0
    _, mean = combined(CombineSettings(max_examples=2), [1.0, 4.0], [10**9, 1], 2)
    assert mean is not None
    assert mean.params["w"].item() == 2.0
    assert mean.num_examples == 3


def test_a_long_change_is_shortened_and_a_short_one_left_to_the_bit() -> None:
    start = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor(2.0)}
    far = Message({"a": torch.tensor([4.0, 1.0]), "b": torch.tensor(6.0)})
    near = within(far, start, 1.0)
    change = subtract(near.params, start)
    assert norm(change) == pytest.approx(1.0, rel=1e-6)
    torch.testing.assert_close(change, {"a": torch.tensor([0.6, 0.0]), "b": torch.tensor(0.8)})
    assert within(far, start, 5.0) is far
    assert within(far, start, 0.0) is far


def test_g01_nothing_to_shorten_divides_by_nothing() -> None:
    nothing = {"a": torch.zeros(3), "b": torch.zeros(0)}
    assert equal(shortened(nothing, 1e-30), nothing)
    assert shortened({}, 1.0) == {}
    unchanged = Message({"a": torch.ones(3)})
    assert within(unchanged, unchanged.params, 1e-30) is unchanged


@pytest.mark.parametrize(
    ("combine", "sends_extra", "asked", "words"),
    [
        (CombineSettings(rule="median"), True, 9, "sends more than rules"),
        (CombineSettings(norm_cap=1.0), True, 9, "sends more than rules"),
        (CombineSettings(rule="multi-krum", attackers=2), False, 6, "among 7 or more clients, but 6 are asked"),
    ],
)
def test_settings_that_cannot_hold_are_refused(
    combine: CombineSettings, sends_extra: bool, asked: int, words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        check_exchange(Exchange(combine=combine), FederationSettings(), Traits(sends_extra=sends_extra), asked)
