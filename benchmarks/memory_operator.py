"""How the memory operator's cost grows with length, and how it compares; one process, one thread, medians.

python benchmarks/memory_operator.py

Prints Markdown: CPU milliseconds forward and forward + backward at each length, and ratios. Batch 1, 9 query and 9 KV
heads of 64, float32, as transformers' own chunked gated delta rule takes no grouped heads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fednl.memory.operator import delta_rule

HEADS, DIM = 9, 64


def inputs(tokens: int) -> list[Tensor]:
    """Unit queries and keys, plain values, write strengths in (0, 1)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, HEADS, DIM, generator=generator) for _ in range(3))
    beta = torch.rand(1, tokens, HEADS, generator=generator)
    unit = torch.nn.functional.normalize
    return [x.requires_grad_() for x in (unit(q, dim=-1), unit(k, dim=-1), v, beta)]


def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This library's operator."""
    return delta_rule(q, k, v, beta)[0]


def transformers_chunk(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The rival: transformers' chunked gated delta rule, its decay switched off."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    out: Tensor = torch_chunk_gated_delta_rule(q, k, v, g=torch.zeros_like(beta), beta=beta)[0]
    return out


def measure(operator: Callable[..., Tensor], tokens: int, repeats: int) -> tuple[float, float]:
    """Median CPU milliseconds of a forward pass without gradients, and of forward + backward."""
    tensors = inputs(tokens)
    forward, both = [], []
    for _ in range(repeats + 1):
        with torch.no_grad():
            start = time.process_time()
            operator(*tensors)
            forward.append(1e3 * (time.process_time() - start))
        start = time.process_time()
        operator(*tensors).sum().backward()
        both.append(1e3 * (time.process_time() - start))
    return statistics.median(forward[1:]), statistics.median(both[1:])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("| tokens | ours: forward | forward + backward | transformers: forward | forward + backward |")
    print("|---|---|---|---|---|")
    found = {}
    for tokens in (2048, 8192):
        found[tokens] = measure(ours, tokens, repeats), measure(transformers_chunk, tokens, max(1, repeats // 2))
        (a, b), (c, d) = found[tokens]
        rival = f"{c:.1f} ms, {c / a:.1f} times ours | {d:.1f} ms, {d / b:.1f} times ours"
        print(f"| {tokens} | {a:.1f} ms | {b:.1f} ms | {rival} |")
    growth = found[8192][0][1] / found[2048][0][1]
    print(f"\nForward + backward at 8,192 tokens costs {growth:.2f} times that at 2,048 (linear would be 4).")


if __name__ == "__main__":
    main()
