"""Arithmetic on `Params`. Nothing here modifies what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

Params: TypeAlias = dict[str, torch.Tensor]
"""What is trained, by canonical name: the unit every algorithm works on."""

ClientState: TypeAlias = dict[str, torch.Tensor]
"""What a client keeps between rounds and never sends: `private/NAME`, `optimizer/exp_avg/NAME`, ..."""


def weighted_mean(items: Iterable[tuple[Params, float]]) -> Params:
    """Averages params with weights by the closed form, sum of w_k p_k over sum of w_k, in float64.

    This is the specification that the streaming mean of `fednl.federation.combine` is compared with.

    Args:
        items: (params, weight) pairs with the same names and shapes; weights at least 0, not all 0.

    Returns:
        New tensors in the dtype of the first item.

    Source: methods of FedAvg (arXiv 1602.05629), Algorithm 1, server line.
    """
    pairs = list(items)
    total = float(sum(weight for _, weight in pairs))
    first = pairs[0][0]
    sums = {name: sum(params[name].double() * weight for params, weight in pairs) for name in first}
    return {name: torch.as_tensor(value / total).to(first[name].dtype) for name, value in sums.items()}


def copy(params: Mapping[str, torch.Tensor]) -> Params:
    """Gives detached copies that share no memory with the originals."""
    return {name: tensor.detach().clone() for name, tensor in params.items()}


def zeros_like(params: Mapping[str, torch.Tensor]) -> Params:
    """Gives zeros of the same names, shapes, dtypes and devices."""
    return {name: torch.zeros_like(tensor) for name, tensor in params.items()}


def subtract(left: Params, right: Params) -> Params:
    """Gives left - right, name by name, in left's dtype."""
    return {name: left[name] - right[name] for name in _same_names(left, right)}


def add_scaled(left: Params, right: Params, scale: float) -> Params:
    """Gives left + scale * right, name by name, in left's dtype."""
    return {name: left[name] + scale * right[name] for name in _same_names(left, right)}


def value_and_gradient(
    function: Callable[[Params], torch.Tensor], params: Params, moved: Sequence[str]
) -> tuple[torch.Tensor, Params]:
    """Gives a scalar function's value, detached, and its gradient with respect to the tensors named in `moved`.

    Args:
        function: from params to a scalar.
        params: where; not modified.
        moved: names for which a gradient is wanted; one that the function does not use has gradient zero, so
            that AdamW's moments treat all rules alike.
    """
    leaves = {name: tensor.detach() for name, tensor in params.items()}
    for name in moved:
        leaves[name].requires_grad_()
    value = function(leaves)
    grads = torch.autograd.grad(value, [leaves[name] for name in moved], materialize_grads=True)
    return value.detach(), dict(zip(moved, grads, strict=True))


def norm(params: Mapping[str, torch.Tensor]) -> float:
    """Gives the L2 norm over all tensors together, accumulated in float64; 0 for no tensors."""
    return float(sum(float(tensor.detach().double().square().sum()) for tensor in params.values()) ** 0.5)


def shortened(params: Params, cap: float) -> Params:
    """Gives params scaled to an L2 norm of at most `cap` over all tensors together; shorter ones come back as they are.

    Args:
        params: finite numbers.
        cap: above 0.
    """
    length = norm(params)
    if length <= cap:
        return params
    return {name: (tensor.double() * (cap / length)).to(tensor.dtype) for name, tensor in params.items()}


def max_abs(params: Mapping[str, torch.Tensor]) -> float:
    """Gives the largest magnitude of any element; 0 for no elements."""
    return max((float(t.detach().abs().max()) for t in params.values() if t.numel()), default=0.0)


def count(params: Mapping[str, torch.Tensor]) -> int:
    """Gives how many numbers there are in all tensors together."""
    return sum(tensor.numel() for tensor in params.values())


def finite(params: Mapping[str, torch.Tensor]) -> bool:
    """Tells whether no element is NaN or infinite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in params.values())


def equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Tells whether both have the same names, dtypes, shapes and values; NaN equals nothing."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def personal(params: Params, state: ClientState) -> Params:
    """Gives a client's own model: the shared rules, with what is private to this client put in.

    Args:
        params: all rules, as `run_rounds` returns them.
        state: the client's state, as `Transport.states` gives it.
    """
    return copy({**params, **kept(state, "private")})


def kept(state: ClientState, prefix: str) -> Params:
    """Gives what a client's state holds under `PREFIX/NAME`, by NAME.

    Args:
        state: the client's state; the tensors are not copied.
        prefix: `"private"` or `"given"`.
    """
    return {name.removeprefix(f"{prefix}/"): t for name, t in state.items() if name.startswith(f"{prefix}/")}


def _same_names(left: Params, right: Params) -> Iterable[str]:
    if left.keys() != right.keys():
        raise ValueError(f"params with different names: {sorted(left.keys() ^ right.keys())}")
    return left
