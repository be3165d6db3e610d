"""What an update rule is given: checked, and in the dtype it computes in. Knows torch and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DELTA_MOST = 2.0
"""The write strength up to which no unit key lets the delta rule's state grow, whatever the decay."""
SEPARATE_MOST = 1.0
"""The same where the residual is of the state before its decay, with or without momentum, under keys that repeat."""
ROUNDING = 1e-3
"""How far beyond its bound a strength may lie where keys of length 1 are so up to rounding."""
FORGET = -1.0e4  # a log decay whose exp() is exactly 0, in float64 too, and whose sums stay finite


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    doc_ids: Tensor | None,
    *,
    delta: bool = False,
) -> None:
    """Raises ValueError naming the argument that does not fit k and v, or is out of its range.

    With `delta`, also where a write of the delta rule makes the state grow without bound.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [batch, tokens, heads, dim], not {tuple(tensor.shape)}")
    (batch, tokens, heads, key_dim), value_dim = k.shape, v.shape[3]
    if heads == 0 or q.shape[2] % heads:
        raise ValueError(f"the {heads} heads of k {tuple(k.shape)} do not divide those of q {tuple(q.shape)}")
    expected: tuple[tuple[str, Tensor | None, tuple[int, ...]], ...] = (
        ("q", q, (batch, tokens, q.shape[2], key_dim)),
        ("k", k, (batch, tokens, heads, key_dim)),
        ("v", v, (batch, tokens, heads, value_dim)),
        ("beta", beta, (batch, tokens, heads)),
        ("log_decay", log_decay, (batch, tokens, heads)),
        ("state", state, (batch, heads, key_dim, value_dim)),
    )
    for name, given, shape in expected:
        check_argument(name, given, shape, k, v)
    check_argument("doc_ids", doc_ids, (batch, tokens), k, v, "int64")
    if delta:
        _check_delta(k, beta, log_decay)
    else:
        check_ranges(beta, log_decay)


def check_ranges(beta: Tensor, log: Tensor | None, name: str = "log_decay") -> None:
    """Raises ValueError where a strength is negative, or a factor's logarithm, which `name` is, above 0.

    NaN is neither: it comes out as NaN.
    """
    if bool((beta < 0).any()):
        raise ValueError(f"beta must be at least 0, but its least is {float(beta.detach().min()):.3g}")
    _check_log(log, name)


def _check_log(log: Tensor | None, name: str = "log_decay") -> None:
    if log is not None and bool((log > 0).any()):
        raise ValueError(f"{name} must be at most 0, but its largest is {float(log.detach().max()):.3g}")


def _check_delta(k: Tensor, beta: Tensor, log_decay: Tensor | None) -> None:
    """`check_ranges`, and that no write of the delta rule makes the state grow without bound."""
    given = beta.detach()
    if torch.equal(given, given.clamp(0, DELTA_MOST)):  # one look, and one wait for an accelerator
        _check_log(log_decay)
        return
    check_ranges(beta, log_decay)
    check_strengths(k, beta, DELTA_MOST, lambda: delta_bound(log_decay))


def delta_bound(log_decay: Tensor | None) -> Tensor:
    """The largest beta * |k|^2 of the delta rule, where a write multiplies what its key recalls by -1: 1 + 1 / a."""
    return torch.tensor(2.0) if log_decay is None else 1 + (-log_decay.detach().double()).exp()


def separate_bound(log_decay: Tensor, log_momentum: Tensor | None) -> Tensor:
    """The same of a rule whose residual is of the state before its decay: (1 + a) (1 + eta).

    There -1 is an eigenvalue of [[a - beta |k|^2, eta], [-beta |k|^2, eta]], which moves state and momentum under one
    key; without momentum eta is 0.
    """
    bound = 1 + log_decay.detach().double().exp()
    return bound if log_momentum is None else bound * (1 + log_momentum.detach().double().exp())


def check_strengths(k: Tensor, beta: Tensor, most: float, bound: Callable[[], Tensor]) -> None:
    """Raises ValueError where writing under one key again and again would make the state grow without bound.

    Args:
        k: `[..., key_dim]`.
        beta: `[...]`. Up to `most` it is not looked at any closer: how long keys may be is the caller's to see to.
        most: what every unit key allows, whatever the rule's factors.
        bound: gives what the rule's factors allow of beta * |k|^2, `[...]` or one for all; asked only beyond `most`.

    NaN is not refused: it comes out as NaN.
    """
    given = beta.detach()
    if torch.equal(given, given.clamp(max=most)):
        return
    length = k.detach().double().square().sum(-1)
    share = given.double() * length / bound().to(k.device)
    share = torch.where(given > most, share, 0).nan_to_num(0, posinf=torch.inf)
    worst = int(share.argmax())
    if share.flatten()[worst] > 1 + ROUNDING:
        value, size = float(given.flatten()[worst]), float(length.flatten()[worst]) ** 0.5
        allowed = value / float(share.flatten()[worst]) if value < torch.inf else most
        raise ValueError(
            f"beta must be at most {allowed:.3g} for a key of length {size:.3g}, but is {value:.3g}: such writes would "
            "make the state grow without bound"
        )


def check_argument(
    name: str, given: Tensor | None, shape: tuple[int, ...], k: Tensor, v: Tensor, kind: str = "floating-point"
) -> None:
    """Raises ValueError naming the argument unless it is absent or has the shape and kind that k and v call for.

    Args:
        name: for the message.
        given: the argument.
        shape: what it has to have.
        k, v: for the message, and the device.
        kind: `"floating-point"`, `"int64"` or `"bool"`.
    """
    if given is None:
        return
    if given.shape != shape:
        fits = f"k {tuple(k.shape)} and v {tuple(v.shape)} call for {shape}"
        raise ValueError(f"{name} has shape {tuple(given.shape)}, but {fits}")
    if given.device != k.device:
        raise ValueError(f"{name} is on device {given.device}, but k is on {k.device}")
    is_kind = {"floating-point": given.is_floating_point(), "bool": given.dtype == torch.bool}
    if not is_kind.get(kind, not given.is_floating_point()):
        raise ValueError(f"{name} must be {kind}, not {given.dtype}")


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Float64 if any of the tensors is, else float32."""
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Keeps autocast out of a block, where it is on for the device."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def start_state(k: Tensor, v: Tensor, state: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The state to start from in the dtype computed in: the given one, or zeros."""
    if state is not None:
        return state.to(dtype)
    return torch.zeros(k.shape[0], *k.shape[2:], v.shape[3], dtype=dtype, device=k.device)


def unflatten(x: Tensor, dim: int, outer: int) -> Tensor:
    """Splits dimension `dim` into `outer` times the rest."""
    return torch.unflatten(x, dim, (outer, x.shape[dim] // outer))
