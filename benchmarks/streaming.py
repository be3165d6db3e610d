"""A conversation as it grows: decoding speed and memory, with a window and memory against full attention.

    python benchmarks/streaming.py [--context 16384] [--stream 131072] [--tokens 20]

SmolLM2-135M in float32, one thread. Decoding: median processor time of one token after 1,024 tokens of context and
after `--context`, with memory in the upper half and a window of 64, against the bare backbone and its own KV cache.
Streaming: peak memory of a process that reads `--stream` tokens in pieces against one that reads 1,024, and the cache's
bytes. Contexts are read, not made up. Prints Markdown. All of it takes about half an hour of one processor core.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from measure import cpu_ms, in_own_process, peak_mib, print_table
from torch import Tensor

from fednl.memory import MemoryCache, MemoryConfig, attach_memory
from fednl.models import load_backbone
from fednl.models.settings import BackboneSettings

PIECE, SHORT = 256, 1024


def backbone(memory: bool) -> Any:
    """SmolLM2, with fresh rules or bare."""
    model = load_backbone(BackboneSettings(dtype="float32")).model
    return attach_memory(model, MemoryConfig(layers="last:15"), seed=0) if memory else model


def read(model: Any, cache: Any, tokens: int) -> Any:
    """Reads that many tokens of nothing in particular, in pieces."""
    ids = torch.randint(100, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))
    for piece in ids.split(PIECE, 1):
        model(piece, cache=cache, logits_to_keep=1)
    return cache


def decode_ms(model: Any, cache: Any, tokens: int) -> float:
    """Median milliseconds of one token."""
    token: Tensor = torch.tensor([[500]])
    return cpu_ms(lambda: model(token, cache=cache), tokens)


def decoding(context: int, tokens: int) -> None:
    """One token after a short and after a long context."""
    from transformers import DynamicCache

    rows, found = [], {}
    for name in ("memory", "full attention"):
        model = backbone(name == "memory")
        cache = MemoryCache(model) if name == "memory" else DynamicCache(config=model.config)
        short = decode_ms(model, read(model, cache, SHORT), tokens)
        long = decode_ms(model, read(model, cache, context - SHORT), tokens)
        found[name] = long
        rows.append([name, f"{short:.1f} ms", f"{long:.1f} ms", f"{long / short:.2f} times"])
    print_table(["one token", f"after {SHORT}", f"after {context}", "growth"], rows)
    print(f"After {context} tokens memory is {found['full attention'] / found['memory']:.2f} times faster.\n")


def streaming(stream: int) -> None:
    """Peak memory and cache bytes against length, each in a process of its own."""
    rows, peaks = [], []
    for tokens in (SHORT, stream):
        peak, size = json.loads(in_own_process(__file__, "--peak", str(tokens)))
        peaks.append(peak)
        rows.append([str(tokens), f"{peak:.0f} MiB", f"{size} bytes"])
    print_table(["tokens read", "peak of the process", "cache"], rows)
    print(f"The longer stream takes {100 * (peaks[1] / peaks[0] - 1):+.2f}% at its peak.\n")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--stream", type=int, default=131_072)
    parser.add_argument("--tokens", type=int, default=20, help="how many tokens a median is over")
    parser.add_argument("--peak", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        if options.peak:
            model = backbone(memory=True)
            cache = read(model, MemoryCache(model), options.peak)
            print(json.dumps([peak_mib(), cache.size_bytes()]))
            return
        decoding(options.context, options.tokens)
        streaming(options.stream)


if __name__ == "__main__":
    main()
