"""The memory operator against its rivals: speed, correctness, share of the processor's peak, memory against length.

    python benchmarks/memory_operator.py [--repeats 5] [--tokens 2048,16384] [--only rivals,groups,share,rules,memory]

One process, one thread, medians of processor time taken in turn, float32, batch 1, heads of 64. Prints Markdown. Rivals
that are not installed are left out and named: transformers' chunked gated delta rule (with its decay off),
titans-pytorch, TPTT, and causal softmax attention. The error is the relative Frobenius error of the answers against the
token-by-token recurrence in float64; a rival that computes another rule has none.

The file is not called operator.py: Python's own `operator` would then be hidden from every script beside it.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from measure import cpu_ms, cpu_ms_in_turn, in_own_process, peak_mib, print_table, reset_peak
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fednl.memory.operator import delta_rule, delta_rule_reference
from fednl.memory.update_rules import RULES, function

HEADS, KV_HEADS, DIM, CHUNK = 9, 3, 64, 32
CHECKED_TOKENS, HARD_STRENGTH = 512, 1.9
Operator = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def inputs(tokens: int, kv_heads: int = HEADS) -> list[Tensor]:
    """Unit queries and keys that are alike in part, plain values, write strengths in (0, 1)."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        return torch.randn(1, tokens, heads, DIM, generator=generator)

    common = torch.randn(DIM, generator=generator)
    q, k, v = draw(HEADS), draw(kv_heads) + common, draw(kv_heads)
    beta = torch.rand(1, tokens, kv_heads, generator=generator)
    return [x.requires_grad_() for x in (normalize(q, dim=-1), normalize(k, dim=-1), v, beta)]


def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This library's operator."""
    return delta_rule(q, k, v, beta, chunk_tokens=CHUNK)[0]


def softmax(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Causal softmax attention: not a memory, what a memory is instead of."""
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)


def rivals() -> tuple[dict[str, Operator], list[str]]:
    """The installed rivals by name, and the names of those that are not."""
    found: dict[str, Operator] = {}
    missing = []
    for name, make in (("transformers", _transformers), ("TPTT", _tptt), ("titans-pytorch", _titans)):
        try:
            found[name] = make()
        except ImportError as error:
            missing.append(f"{name} ({error})")
    return {**found, "softmax attention": softmax}, missing


def _transformers() -> Operator:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        # It scales queries by 1 / sqrt(dim) itself.
        out: Tensor = torch_chunk_gated_delta_rule(q * DIM**0.5, k, v, g=torch.zeros_like(beta), beta=beta)[0]
        return out

    return run


def _tptt() -> Operator:
    from tptt.modeling_tptt import LinearAttentionOp

    operator = LinearAttentionOp(max_chunk_size=CHUNK)

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        # [batch, heads, tokens, writes, dim]; strengths are one a channel there, and need not differ.
        q, k, v = (x.transpose(1, 2).unsqueeze(3) for x in (q, k, v))
        rate = beta.transpose(1, 2)[..., None, None].expand_as(k)
        out: Tensor = operator(q, k, v, torch.ones_like(rate), rate, linear_activation=False)[0]
        return out.transpose(1, 2).reshape(v.shape[0], -1, HEADS, DIM)

    return run


def _titans() -> Operator:
    from titans_pytorch import NeuralMemory
    from titans_pytorch.memory_models import MemoryMLP

    model = MemoryMLP(DIM, depth=1)
    memory = NeuralMemory(HEADS * DIM, dim_head=DIM, heads=HEADS, chunk_size=CHUNK, model=model, momentum=False)

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        # A module with its own projections and one gradient point a chunk: its speed, not its numbers, compares.
        out: Tensor = memory(v.flatten(2))[0]
        return out.unflatten(2, (HEADS, DIM))

    return run


def repeated(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This library's operator as one that knows no groups would be used: everything once per query head."""
    group = q.shape[2] // k.shape[2]
    return ours(q, *(x.repeat_interleave(group, 2) for x in (k, v, beta)))


def measure(
    operators: Sequence[Operator], tokens: int, repeats: int, kv_heads: int = HEADS
) -> list[tuple[float, float]]:
    """Milliseconds of a forward pass without gradients, and of forward + backward, the operators in turn."""
    tensors = inputs(tokens, kv_heads)

    def forward(operator: Operator) -> None:
        with torch.no_grad():
            operator(*tensors)

    def both(operator: Operator) -> None:
        operator(*tensors).sum().backward()

    first, second = (cpu_ms_in_turn([partial(do, o) for o in operators], repeats) for do in (forward, both))
    return list(zip(first, second, strict=True))


def errors(operator: Operator) -> str:
    """Relative Frobenius error of the answers against the float64 recurrence; then of one key written at 1.9."""
    q, k, v, beta = (x.detach() for x in inputs(CHECKED_TOKENS))
    hard = [q, k[:, :1].expand_as(k), v, torch.full_like(beta, HARD_STRENGTH)]
    return f"{_error(operator, [q, k, v, beta]):.1e}, {_error(operator, hard):.1e}"


def _error(operator: Operator, tensors: list[Tensor]) -> float:
    wanted = delta_rule_reference(*(x.double() for x in tensors))[0]
    with torch.no_grad():
        return float((operator(*tensors).double() - wanted).norm() / wanted.norm())


def compare(lengths: list[int], repeats: int) -> None:
    """Ours against every rival at every length."""
    others, missing = rivals()
    rows = []
    for tokens in lengths:
        mine, *theirs = measure([ours, *others.values()], tokens, repeats)
        rows.append([str(tokens), "ours", f"{mine[0]:.1f} ms", f"{mine[1]:.1f} ms", errors(ours)])
        for (name, operator), (f, b) in zip(others.items(), theirs, strict=True):
            own = "another rule" if name in ("softmax attention", "titans-pytorch") else errors(operator)
            ratios = (f"{f:.1f} ms, {f / mine[0]:.2f} times ours", f"{b:.1f} ms, {b / mine[1]:.2f} times ours")
            rows.append([str(tokens), name, *ratios, own])
    print_table(["tokens", "operator", "forward", "forward + backward", "error, on one key"], rows)
    if missing:
        print(f"Left out, not installed: {'; '.join(missing)}.\n")


def grouped(lengths: list[int], repeats: int) -> None:
    """One state per KV head against the same operator on repeated heads."""
    rows = []
    for tokens in lengths:
        one, many = measure([ours, repeated], tokens, repeats, KV_HEADS)
        pairs = [f"{a:.1f} ms against {b:.1f} ms, {b / a:.2f} times" for a, b in zip(one, many, strict=True)]
        rows.append([str(tokens), *pairs])
    print(f"{HEADS} query and {KV_HEADS} KV heads, against keys, values and strengths repeated for every query head:\n")
    print_table(["tokens", "forward", "forward + backward"], rows)


def peak_share(lengths: list[int], repeats: int) -> None:
    """How much of the measured matrix product peak a forward pass reaches, and where its time goes."""
    square = torch.randn(1024, 1024)
    gflops = 2 * 1024**3 / cpu_ms(lambda: square @ square, repeats) / 1e6
    rows = []
    for tokens in lengths:
        milliseconds = measure([ours], tokens, repeats)[0][0]
        done = tokens * HEADS * (8 * CHUNK * DIM + 6 * DIM**2) / milliseconds / 1e6
        share = f"{done:.1f} GFLOP/s, {100 * done / gflops:.0f}%"
        for kv_heads, first in ((HEADS, share), (KV_HEADS, "")):
            parts = [f"{100 * part:.0f}%" for part in where(tokens, repeats, kv_heads)]
            rows.append([str(tokens), f"{HEADS} and {kv_heads}", first, *parts])
    print(f"Products of 1,024 x 1,024 reach {gflops:.0f} GFLOP/s; the operator needs 8 C d + 6 d^2 a token and head.")
    print(
        "Where the time of a forward pass goes (the rest is Python, views, fresh memory, and the measuring itself):\n"
    )
    print_table(["tokens", "query and KV heads", "forward, share of the peak", *KINDS, "the rest"], rows)


KINDS = {
    "products": ("bmm", "baddbmm"),
    "inverse": ("linalg_solve_triangular",),
    "copies": ("__setitem__", "copy_", "reshape", "clone"),
    "masks, factors": ("tril_", "mul"),
}


class Timed(TorchFunctionMode):
    """Adds up the processor seconds of every torch function by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.process_time()
        result = function(*args, **(kwargs or {}))
        self.taken[getattr(function, "__name__", "")] += time.process_time() - start  # type: ignore[assignment]
        return result


def where(tokens: int, repeats: int, kv_heads: int) -> list[float]:
    """The shares of a forward pass's time that its kinds of work take, and the rest."""
    tensors = inputs(tokens, kv_heads)
    with torch.no_grad():
        ours(*tensors)
        start = time.process_time()
        with Timed() as timed:
            for _ in range(repeats):
                ours(*tensors)
    whole = time.process_time() - start
    found = [sum(timed.taken[name] for name in names) / whole for names in KINDS.values()]
    return [*found, 1 - sum(found)]


def every_rule(lengths: list[int], repeats: int) -> None:
    """The other update rules beside the delta rule, at the first length."""
    tokens = lengths[0]
    operators: dict[str, Operator] = {}
    for name, rule in RULES.items():
        extra: dict[str, Tensor] = {}
        if rule.decays:
            extra["log_decay"] = torch.full((1, tokens, KV_HEADS), -1e-3)
        if rule.momentum:
            extra["log_momentum"] = torch.full((1, tokens, KV_HEADS), -2.0)
        if rule.inner:
            extra["start"] = 0.02 * torch.randn(KV_HEADS, DIM + 1, DIM)
            extra |= {"scale": torch.ones(KV_HEADS, DIM), "shift": torch.zeros(KV_HEADS, DIM)}

        def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, rule=rule, extra=extra) -> Tensor:  # type: ignore[no-untyped-def]
            written = [torch.stack([x, x], 2) if rule.several else x for x in (k, v, beta)]
            out: Tensor = function(rule.fast)(q, *written, **extra)[0]
            return out

        operators[name] = run
    found = dict(zip(operators, measure(list(operators.values()), tokens, repeats, KV_HEADS), strict=True))
    base, rows = found["delta"], []
    for name, (f, b) in found.items():
        rows.append([name, f"{f:.1f} ms, {f / base[0]:.1f} times delta", f"{b:.1f} ms, {b / base[1]:.1f} times delta"])
    print(f"Every update rule, {tokens} tokens, {HEADS} query and {KV_HEADS} KV heads, two writes where several:\n")
    print_table(["rule", "forward", "forward + backward"], rows)


def peaks(lengths: list[int], repeats: int) -> None:
    """Peak memory of forward + backward, each length in a process of its own."""
    rows = []
    for tokens in lengths:
        more = float(in_own_process(__file__, "--peak", str(tokens)))
        rows.append([str(tokens), f"{more:.0f} MiB", f"{1024 * more / tokens:.0f} KiB"])
    print("Peak memory of forward + backward, above what the process held before:\n")
    print_table(["tokens", "more", "a token"], rows)


SECTIONS = {"rivals": compare, "groups": grouped, "share": peak_share, "rules": every_rule, "memory": peaks}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", default="2048,16384", help="lengths, with commas between")
    parser.add_argument("--only", default=",".join(SECTIONS), help="tables to print, with commas between")
    parser.add_argument("--peak", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        ours(*inputs(64)).sum().backward()
        tensors, before = inputs(options.peak), reset_peak()
        ours(*tensors).sum().backward()
        print(peak_mib() - before)
        return
    lengths = [int(part) for part in options.tokens.split(",")]
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread, C = {CHUNK}.\n")
    for name in options.only.split(","):
        SECTIONS[name](lengths, options.repeats)


if __name__ == "__main__":
    main()
