from __future__ import annotations

import pytest
import torch

from fednl.federation import params as p


def test_arithmetic_gives_new_tensors() -> None:
    left = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[-12.0]])}
    right = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([[2.0]])}
    assert p.equal(p.subtract(left, right), {"a": torch.tensor([2.0, 3.0]), "b": torch.tensor([[-14.0]])})
    assert p.equal(p.add_scaled(left, right, -1.0), p.subtract(left, right))
    assert p.norm(left) == 13.0
    assert p.norm({}) == 0.0
    assert p.max_abs(left) == 12.0
    assert p.max_abs({"none": torch.empty(0)}) == 0.0
    assert p.count(left) == 3
    assert p.equal(p.zeros_like(left), p.subtract(left, left))
    copied = p.copy(left)
    copied["a"][0] = 99.0
    assert left["a"][0] == 3.0
    with pytest.raises(ValueError, match="different names"):
        p.subtract(left, {"a": left["a"]})


def test_equal_looks_at_names_dtypes_shapes_and_values() -> None:
    one = {"a": torch.ones(2)}
    assert p.equal(one, {"a": torch.ones(2)})
    for other in (
        {"b": torch.ones(2)},
        {"a": torch.ones(2).double()},
        {"a": torch.ones(1, 2)},
        {"a": torch.zeros(2)},
    ):
        assert not p.equal(one, other)
    assert not p.equal({"a": torch.tensor(float("nan"))}, {"a": torch.tensor(float("nan"))})


def test_finite() -> None:
    assert p.finite({"a": torch.ones(2), "step": torch.tensor(3)})
    assert not p.finite({"a": torch.tensor([1.0, float("inf")])})


def test_weighted_mean_by_hand() -> None:
    mean = p.weighted_mean([({"a": torch.tensor([1.0])}, 1), ({"a": torch.tensor([5.0])}, 3)])
    assert mean["a"].tolist() == [4.0]
    assert mean["a"].dtype == torch.float32


def test_value_and_gradient_modify_nothing_and_know_what_is_not_used() -> None:
    params = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([3.0]), "c": torch.tensor([5.0])}
    value, grads = p.value_and_gradient(lambda q: (q["a"].square() * q["c"]).sum(), params, ["a", "b"])
    assert (float(value), value.requires_grad) == (25.0, False)
    assert p.equal(grads, {"a": torch.tensor([10.0, -20.0]), "b": torch.tensor([0.0])})
    assert not any(tensor.requires_grad for tensor in params.values())


def test_personal_puts_private_rules_in() -> None:
    state = {"private/b": torch.tensor(2.0), "optimizer/step": torch.tensor(9.0)}
    own = p.personal({"a": torch.tensor(0.0), "b": torch.tensor(1.0)}, state)
    assert p.equal(own, {"a": torch.tensor(0.0), "b": torch.tensor(2.0)})
