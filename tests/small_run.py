"""A whole run in seconds: a random byte-level backbone in a folder, and settings that use it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fednl.config import Config
from fednl.models import tiny as model
from fednl.models.tiny import byte_tokenizer as byte_tokenizer


def tiny_backbone(folder: Path, seed: int = 0) -> Path:
    """The packaged random backbone, with a text to take filler from beside it."""
    model.tiny_backbone(folder, seed)
    words = [
        "the",
        "a",
        "river",
        "stone",
        "cloud",
        "walks",
        "sings",
        "old",
        "green",
        "near",
        "over",
        "under",
        "bird",
        "house",
        "sleeps",
    ]
    draw = random.Random(seed)
    text = " ".join(" ".join(draw.choices(words, k=8)).capitalize() + "." for _ in range(600))
    (folder / "filler.txt").write_text(text, encoding="utf-8")
    return folder


def settings(backbone: Path, **sections: dict[str, Any]) -> Config:
    """Settings of a run that takes seconds; `sections` replaces keys, by section and kebab-case key."""
    table: dict[str, dict[str, Any]] = {
        "backbone": {"id": str(backbone)},
        "data": {"tokens": 560, "clients": 3, "train": 6, "validation": 2, "test": 4},
        "memory": {"layers": "last:1", "rank": 2, "window-tokens": 130, "sink-tokens": 2},
        "training": {"rounds": 3, "local-steps": 2, "batch": 2, "local-lr": 1e-2},
        "evaluation": {"arms": ["window-only", "federated"], "batch": 4},
    }
    table["data"]["filler"] = str(backbone / "filler.txt")
    for name, keys in sections.items():
        table.setdefault(name, {}).update(keys)
    return Config.from_dict(table)
