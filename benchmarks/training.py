"""A training step with the frozen prefix kept, against a whole step and against what it could save at most.

    python benchmarks/training.py [--layers last:15] [--tokens 320] [--batch 4] [--repeats 5]

SmolLM2-135M in float32, one thread, medians of processor time, the kinds of step in turn. The bound is
step / (step - prefix), where the prefix is a forward pass of the layers below the first memory without gradients.
Prints Markdown, and how far the loss of the last step is from that of the same steps without.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from measure import cpu_ms_in_turn, print_table
from torch import Tensor

from fednl.memory import MemoryConfig, attach_memory, rules
from fednl.memory.prefix import PrefixCache
from fednl.memory.settings import PrefixSettings
from fednl.models import load_backbone
from fednl.models.settings import BackboneSettings


class Stop(Exception):
    """Ends a pass where the first memory would begin."""


def stop(*_: Any) -> None:
    """A hook that ends the pass."""
    raise Stop


class Trainer:
    """Takes training steps on batches that come again and again."""

    def __init__(self, model: Any, batches: list[dict[str, Tensor]], prefix: PrefixCache | None) -> None:
        self.model, self.batches, self.prefix, self.steps = model, batches, prefix, 0
        self.optimiser = torch.optim.AdamW(rules(model).values(), lr=3e-3, weight_decay=0.0)
        self.loss = 0.0

    def step(self) -> None:
        """One step."""
        batch = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        with nullcontext() if self.prefix is None else self.prefix.over(batch):
            loss = self.model(**batch, labels=batch["input_ids"], use_cache=False).loss
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.loss = float(loss.detach())


def prefix_forward(model: Any, batch: dict[str, Tensor], layer: int) -> None:
    """What the frozen layers cost."""
    handle = model.model.layers[layer].register_forward_pre_hook(stop)
    try:
        with torch.no_grad():
            model(**batch, use_cache=False)
    except Stop:
        pass
    finally:
        handle.remove()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="last:15")
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shape = (2, options.batch, options.tokens)
    ids = torch.randint(100, 40_000, shape, generator=generator)
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids]

    models = [load_backbone(BackboneSettings(dtype="float32")).model for _ in ("whole", "kept")]
    for model in models:
        attach_memory(model, MemoryConfig(layers=options.layers), seed=0)
    kept = PrefixCache(models[1], PrefixSettings(cache="memory"))
    found = {"whole": Trainer(models[0], batches, None), "kept": Trainer(models[1], batches, kept)}
    _, filling = cpu_ms_in_turn([found["whole"].step, found["kept"].step], 1)  # two batches, both new
    calls = [found["whole"].step, found["kept"].step, partial(prefix_forward, models[0], batches[0], kept.layer)]
    times = dict(zip(("whole", "kept", "prefix"), cpu_ms_in_turn(calls, options.repeats), strict=True))

    bound = times["whole"] / (times["whole"] - times["prefix"])
    gain = times["whole"] / times["kept"]
    print(f"Memory in {options.layers}, {options.batch} x {options.tokens} tokens; begins at layer {kept.layer}.\n")
    rows = [
        ["a whole step", f"{times['whole']:.0f} ms"],
        ["of it the frozen prefix, forward", f"{times['prefix']:.0f} ms"],
        ["a step of the filling pass", f"{filling:.0f} ms, {filling / times['whole']:.2f} whole steps"],
        ["a step with the prefix kept", f"{times['kept']:.0f} ms, {gain:.2f} times faster"],
        ["the bound, and the share of it", f"{bound:.2f} times, {100 * gain / bound:.0f}%"],
        ["kept an example", f"{kept.kept.held_bytes / len(kept.kept) / 1e6:.2f} MB"],
        ["last losses", f"{found['whole'].loss:.6f} whole, {found['kept'].loss:.6f} kept"],
    ]
    print_table(["", ""], rows)


if __name__ == "__main__":
    main()
