"""Who holds what: one row per client and split, without any private text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fednl.data.examples import NeedleExample, Splits


@dataclass(frozen=True)
class PartitionRow:
    """A client's share of one split.

    Attributes:
        client: the client's name.
        split: `"train"`, `"validation"` or `"test"`.
        n: examples.
        tokens: prompt tokens of all of them together.
        sha256: of all token ids and the right answers, hexadecimal; equal shares have equal hashes.
    """

    client: str
    split: str
    n: int
    tokens: int
    sha256: str


def partition_rows(clients: Mapping[str, Splits]) -> list[PartitionRow]:
    """Lists every client's splits, empty ones included.

    Args:
        clients: what a task's `build` returned.
    """
    return [
        _row(name, split, examples)
        for name, splits in clients.items()
        for split, examples in (
            ("train", splits.train),
            ("validation", splits.validation),
            ("test", splits.test),
        )
    ]


def _row(client: str, split: str, examples: Sequence[NeedleExample]) -> PartitionRow:
    digest = hashlib.sha256()
    for one in examples:
        parts = [one.prompt_ids, one.candidate_ids, one.gold, one.removed_ids, *one.further]
        digest.update(json.dumps(parts).encode())
    tokens = sum(len(one.prompt_ids) for one in examples)
    return PartitionRow(client, split, len(examples), tokens, digest.hexdigest())
