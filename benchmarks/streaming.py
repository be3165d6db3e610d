"""A conversation as it grows: decoding speed and memory, with a window and memory against full attention.

    python benchmarks/streaming.py [--context 16384] [--stream 131072] [--tokens 20]

SmolLM2-135M in float32, one thread, memory in the upper half and a window of 64, against the bare backbone and its own
KV cache. Decoding: median processor time of one token after 1,024 tokens of context and after `--context`, a token of
each conversation in turn, so that whatever else the machine does hits all alike. Memory has read its context; KV caches
are filled with random numbers, which take as long as read ones, because reading that far takes full attention minutes.
Streaming: what the process holds at most while it reads `--stream` tokens in pieces, without what loading the model
took, and the cache's bytes. glibc keeps freed memory for itself, now more and now less: with
MALLOC_MMAP_THRESHOLD_=131072 in the environment it gives larger blocks back, and what is left is what the program
holds. Prints Markdown. All of it takes about ten minutes of one processor core.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from measure import cpu_ms_in_turn, peak_mib, print_row, print_table, reset_peak
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


def full_attention(model: Any, tokens: int) -> Any:
    """A KV cache that holds that many tokens' worth of random numbers."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    sizes = model.config.num_key_value_heads, tokens, model.config.hidden_size // model.config.num_attention_heads
    for layer in range(model.config.num_hidden_layers):
        cache.update(torch.randn(1, *sizes), torch.randn(1, *sizes), layer)
    return cache


def decoding(context: int, tokens: int) -> None:
    """One token after a short and after a long context."""
    memory, bare = backbone(memory=True), backbone(memory=False)
    token: Tensor = torch.tensor([[500]])
    calls = []
    for length in (SHORT, context):
        calls.append(partial(memory, token, cache=read(memory, MemoryCache(memory), length)))
        calls.append(partial(bare, token, cache=full_attention(bare, length)))
    short, bare_short, long, bare_long = cpu_ms_in_turn(calls, tokens)
    rows = [
        ["memory", f"{short:.1f} ms", f"{long:.1f} ms", f"{long / short:.2f} times"],
        ["full attention", f"{bare_short:.1f} ms", f"{bare_long:.1f} ms", f"{bare_long / bare_short:.2f} times"],
    ]
    print_table(["one token", f"after {SHORT}", f"after {context}", "growth"], rows)
    print(f"After {context} tokens memory is {bare_long / long:.2f} times faster.\n")


def streaming(stream: int) -> None:
    """Peak memory and cache bytes as a stream goes on: a row whenever its length has doubled, at once."""
    model = backbone(memory=True)
    cache = MemoryCache(model)
    ids = torch.randint(100, 40_000, (1, stream), generator=torch.Generator().manual_seed(0))
    before, peaks, read_tokens = reset_peak(), [], 0
    print_row("tokens read", "peak so far", "above 1,024 tokens", "cache")
    print_row(*["---"] * 4)
    for piece in ids.split(PIECE, 1):
        model(piece, cache=cache, logits_to_keep=1)
        read_tokens += piece.shape[1]
        if read_tokens == stream or (read_tokens >= SHORT and read_tokens & (read_tokens - 1) == 0):
            peaks.append(peak_mib())
            more = f"{100 * (peaks[-1] / peaks[0] - 1):+.2f}%"
            print_row(str(read_tokens), f"{peaks[-1]:.1f} MiB", more, f"{cache.size_bytes()} bytes")
    print(f"\nThe process with its model loaded held {before:.0f} MiB before.\n")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=16_384, help="0 leaves decoding out")
    parser.add_argument("--stream", type=int, default=131_072, help="0 leaves streaming out")
    parser.add_argument("--tokens", type=int, default=20, help="how many tokens a median is over")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        if options.context:
            decoding(options.context, options.tokens)
        if options.stream:
            streaming(options.stream)


if __name__ == "__main__":
    main()
