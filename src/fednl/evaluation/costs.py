"""What reading a context costs: memory state, keys and values, logits and weights apart; peak, speed, latency.

"Constant memory" is a claim about the cache. Peak memory holds the logits and the activations of a piece too, and a
figure that mixes them says nothing about either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fednl.evaluation.rows import Row
from fednl.evaluation.scoring import evaluating, forward

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True)
class Cost:
    """What one context cost.

    Attributes:
        context_tokens: how many tokens were read.
        state_bytes: the memory state.
        kv_bytes: keys and values, with what the cache keeps beside them.
        logits_bytes: the largest logits that existed at once.
        weights_bytes: the backbone's parameters, each counted once, with what is attached.
        trained_bytes: of these, the attached rules.
        prefill_tokens_per_s: reading the context.
        decode_s: median seconds of one more token.
        decoded_tokens: over how many.
        peak_bytes: the largest memory in use meanwhile: the device's allocator on CUDA, the process's resident memory
            on Linux; None where neither is known.
    """

    context_tokens: int
    state_bytes: int
    kv_bytes: int
    logits_bytes: int
    weights_bytes: int
    trained_bytes: int
    prefill_tokens_per_s: float
    decode_s: float
    decoded_tokens: int
    peak_bytes: int | None


def cache_bytes(cache: Any) -> tuple[int, int]:
    """Gives the bytes of a cache's memory state, and of all else in it: keys, values, positions.

    Args:
        cache: a `MemoryCache`, a recurrent model's, or one of transformers' own.
    """
    if hasattr(cache, "state_bytes"):
        state, whole = _read(cache.state_bytes), _read(cache.size_bytes)
        return state, whole - state
    tensors = {id(one): one for layer in cache.layers for one in vars(layer).values() if isinstance(one, Tensor)}
    return 0, sum(one.nbytes for one in tensors.values())


def measure_cost(
    model: nn.Module,
    ids: Sequence[int],
    *,
    make_cache: Callable[[nn.Module], Any],
    piece_tokens: int = 256,
    decode_tokens: int = 16,
) -> Cost:
    """Reads a context in pieces, goes on token by token, and says what it took.

    Only the last token's logits are computed. Times are of this machine as busy as it is.

    Args:
        model: a causal language model, attached to a memory or not.
        ids: the context, at least one token.
        make_cache: makes an empty cache for the model.
        piece_tokens: tokens a pass, at least 1.
        decode_tokens: how many further tokens, greedily, at least 1; the first is not timed where there are more.
    """
    device = next(model.parameters()).device
    text = torch.tensor([list(ids)], device=device)
    cache, largest = make_cache(model), 0
    peak_is_known = begin_peak(device)
    with evaluating(model):
        started_s = time.perf_counter()
        for first in range(0, len(ids), piece_tokens):
            piece = text[:, first : first + piece_tokens]
            logits = forward(model, piece, torch.ones_like(piece), cache, first, keep=1)
            largest = max(largest, logits.nbytes)
        _wait(device)
        prefill_s = time.perf_counter() - started_s
        steps, past = [], len(ids)
        for _ in range(decode_tokens):
            token = logits[:, -1:].argmax(dim=-1)
            started_s = time.perf_counter()
            logits = forward(model, token, torch.ones_like(token), cache, past, keep=1)
            _wait(device)
            steps.append(time.perf_counter() - started_s)
            past += 1
    peak = end_peak(device) if peak_is_known else None
    state, kv = cache_bytes(cache)
    parameters = {id(one): one for one in model.parameters()}.values()
    return Cost(
        context_tokens=len(ids),
        state_bytes=state,
        kv_bytes=kv,
        logits_bytes=largest,
        weights_bytes=sum(one.nbytes for one in parameters),
        trained_bytes=sum(one.nbytes for one in parameters if one.requires_grad),
        prefill_tokens_per_s=len(ids) / prefill_s,
        decode_s=median(steps[1:] or steps),
        decoded_tokens=len(steps[1:] or steps),
        peak_bytes=peak,
    )


def cost_rows(arms: dict[str, Sequence[Cost]]) -> list[Row]:
    """Makes rows `{method, metric, tokens, value}`, one a number; what was not measured has no row.

    Args:
        arms: arm -> its costs, a context each.
    """
    return [
        {"method": arm, "metric": metric, "tokens": cost.context_tokens, "value": value}
        for arm, costs in arms.items()
        for cost in costs
        for metric, value in vars(cost).items()
        if metric != "context_tokens" and value is not None
    ]


def begin_peak(device: torch.device) -> bool:
    """Sets the peak back to what is in use now, and says whether it could: else the peak is not known."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR.write_text("5")  # Linux: the high-water mark of resident memory starts anew
    except OSError:
        return False
    return True


def end_peak(device: torch.device) -> int | None:
    """Gives the largest memory in use since `begin_peak`, in bytes; None where it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read(size: Any) -> int:
    return int(size() if callable(size) else size)
