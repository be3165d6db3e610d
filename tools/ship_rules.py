"""Puts a run's final rules into the package as the public rules of its backbone, in float16, with their settings.

python tools/ship_rules.py runs/public-rules
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from fednl.memory.rules_file import DESCRIPTION, TENSORS, read_rules
from fednl.runs import Run
from fednl.start_rules import PUBLIC
from fednl.training import config_of

MOST_BYTES = 1_000_000


def main(path: str) -> None:
    """Writes params, description, settings and versions into `src/fednl/public/BACKBONE/`."""
    run = Run.open(Path(path))
    tensors, description = read_rules(run.path / "final")
    folder = PUBLIC / description["backbone"]["name"]
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(torch.float16) for name, tensor in tensors.items()}, folder / TENSORS)
    size = (folder / TENSORS).stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"{folder / TENSORS} has {size} bytes; public rules must stay under {MOST_BYTES}.")
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    (folder / "config.toml").write_text(config_of(run).to_toml(), encoding="utf-8")
    environment = run.read_json("environment.json")
    done, asked = len(run.read_jsonl("rounds.jsonl")), config_of(run).training.rounds
    environment["rounds"] = f"{done} of {asked}"
    (folder / "environment.json").write_text(json.dumps(environment, indent=1) + "\n", encoding="utf-8")
    print(f"{folder}: {len(tensors)} tensors, {size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
