"""Which code runs the delta rule: plain torch, or on a GPU the Triton kernel of flash-linear-attention (extra `gpu`).

Not run on a GPU. The kernel's own code, run by Triton's interpreter on a processor, agrees with the recurrence in
values and gradients (docs/decisions/0032). Without the package plain torch runs everywhere.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from fednl.memory import operator
from fednl.memory.arguments import FORGET, autocast_off, check_arguments, compute_dtype, start_state
from fednl.memory.operator import RECURRENCE_TOKENS

_DEVICE = "cuda"
_KERNEL_DIM = 256
"""The widest key that the kernel takes."""
_PRECISION = "TRITON_F32_DEFAULT"
"""Triton's own variable: how it multiplies float32 numbers where a kernel does not say."""

Kernel = Callable[..., tuple[Tensor, Tensor]]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    chunk_tokens: int = 32,
) -> tuple[Tensor, Tensor]:
    """`fednl.memory.operator.delta_rule`, by a kernel where there is one that computes the same.

    That is on a CUDA device, in float32, for more than eight tokens and keys of at most 256 numbers. The kernel knows
    no groups of query heads: it is given keys, values and strengths once per query head and computes as many states, of
    which one a group is kept. It subtracts sums of log decays, so that strong decays cost digits there.

    Args:
        q, k, v, beta, log_decay, state, chunk_tokens: as there; a kernel has chunks of its own.

    Returns:
        As there.

    Raises:
        ValueError: as there.
    """
    kernel = _kernel() if k.ndim == 4 and _suits(q, k, v, beta, log_decay, state) else None
    if kernel is None:
        return operator.delta_rule(q, k, v, beta, log_decay=log_decay, state=state, chunk_tokens=chunk_tokens)
    check_arguments(q, k, v, beta, log_decay, state, None, delta=True)
    with autocast_off(q.device):
        return _by_kernel(kernel, q, k, v, beta, log_decay, state)


def _suits(q: Tensor, k: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernel computes what is asked for."""
    narrow = compute_dtype(q, k, *others) == torch.float32
    return q.device.type == _DEVICE and narrow and k.shape[1] > RECURRENCE_TOKENS and k.shape[3] <= _KERNEL_DIM


def _by_kernel(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Calls a kernel that takes and gives `[batch, tokens, query_heads, ...]` and a state for each query head."""
    group, dtype = q.shape[2] // k.shape[2], torch.float32
    log = torch.zeros_like(beta) if log_decay is None else log_decay.clamp(min=FORGET)
    keys, values, strengths, logs = (x.to(dtype).repeat_interleave(group, 2) for x in (k, v, beta, log))
    start = start_state(k, v, state, dtype).repeat_interleave(group, 1)
    out, after = kernel(
        q.to(dtype), keys, values, logs, strengths, scale=1.0, initial_state=start, output_final_state=True
    )
    return out.to(q.dtype), after[:, ::group].contiguous()


@functools.cache
def _kernel() -> Kernel | None:
    """Loads the kernel, and says once a process on stderr which code runs.

    The one without decay, `chunk_delta_rule`, takes no float32; the one with decay does, and a log decay of 0 is none.
    Triton would round float32 numbers to TF32 before it multiplies them; PyTorch's own switch for that decides.
    """
    if torch.get_float32_matmul_precision() == "highest":
        os.environ.setdefault(_PRECISION, "ieee")
    try:
        kernel: Kernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except (ImportError, AttributeError, RuntimeError) as error:
        _say(f"in plain torch, because flash-linear-attention cannot be loaded ({error}); it comes with fednl[gpu].")
        return None
    _say("in flash-linear-attention's kernel.")
    return kernel


def _say(how: str) -> None:
    sys.stderr.write(f"fednl: on the GPU the delta rule runs {how}\n")
