"""One independent random stream per use: nothing in this library draws from a global generator.

A stream is named by (seed, purpose, client, round). Streams with different names are unrelated, so adding a
client or a new use of randomness never changes what another one draws, and a resumed run draws what the
uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_of(seed: int, purpose: str, client: str = "", round: int = 0) -> int:
    """Names a random stream by a 63-bit number.

    Args:
        seed: the run's seed; any integer.
        purpose: what the stream is for, for example `"batches"` or `"sampling"`.
        client: the client's stable name; empty for what belongs to no client.
        round: the round, counted from 0.

    Returns:
        An integer in [0, 2^63), the same on every machine and every Python.

    Source: ours (the first eight bytes of the SHA-256 of the four fields as a JSON list, top bit dropped).
    """
    # A JSON list keeps the fields apart: joining with a separator would let ("a", "b|c") equal ("a|b", "c").
    name = json.dumps([int(seed), purpose, client, int(round)], ensure_ascii=True).encode("ascii")
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1


def anew(purpose: str, attempt: int) -> str:
    """Names what a stream is for when a round is done again: the purpose itself in the first attempt, 0.

    Args:
        purpose: what the stream is for.
        attempt: how often the run went back before.
    """
    return f"{purpose}, attempt {attempt}" if attempt else purpose


def torch_rng(seed: int, purpose: str, client: str = "", round: int = 0) -> torch.Generator:
    """Gives a CPU `torch.Generator` for the named stream.

    Args:
        seed: the run's seed; any integer.
        purpose: what the stream is for.
        client: the client's stable name; empty for what belongs to no client.
        round: the round, counted from 0.
    """
    import torch

    return torch.Generator().manual_seed(seed_of(seed, purpose, client, round))


def python_rng(seed: int, purpose: str, client: str = "", round: int = 0) -> random.Random:
    """Gives a `random.Random` for the named stream.

    Args:
        seed: the run's seed; any integer.
        purpose: what the stream is for.
        client: the client's stable name; empty for what belongs to no client.
        round: the round, counted from 0.
    """
    return random.Random(seed_of(seed, purpose, client, round))
