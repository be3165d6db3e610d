"""How few bytes the clients can share: sets of rules, what a message of each weighs, and what each is worth.

    python benchmarks/compact.py --out runs/compact
    python benchmarks/compact.py --bytes-only
    python benchmarks/compact.py --out runs/compact-private --only "LoRA r16;theta;low-rank" --ways "others private" \
        --set privacy.mode=central --set combine.weights=uniform --set privacy.clip=0.03 \
        --set privacy.noise-multiplier=1.05 --set 'evaluation.arms=["federated"]'

Trains each set on the needle federation of configs/compact.toml (an ordinary run in its own folder: whatever stopped
the command, the same command goes on), once with every client training the rules that it does not share for itself, and
once with these left as they began. Weighs a message of each set at Llama-3.2-1B's shapes: random numbers in the very
tensors that `attach_memory` and PEFT make of such a model, serialised with their header. A ratio to LoRA stands only
beside the accuracy of the same set. Under noise all sets, and LoRA, spend the same epsilon. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from algorithms import answers, macro, table, told
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fednl
from fednl.config import Config, load_config
from fednl.federation.coding import encode
from fednl.federation.groups import select
from fednl.federation.message import Message
from fednl.models.adapters import LoraAdapter
from fednl.models.settings import LoraSettings
from fednl.reproduce.keeping import run_at

BIASES = ["layers.*.memory.write.bias", "layers.*.memory.gate.bias"]
CODINGS = ("float32", "float16", "bfloat16", "int8-deltas")
LAYERS = "8-12"
"""The same depth, and a third of the layers, as layers 14 to 23 of SmolLM2's 30."""


@dataclass(frozen=True)
class Rules:
    """A set of rules.

    Attributes:
        small: what is shared of SmolLM2's, as `[federation] shared`.
        large: the same of Llama-3.2-1B's; LoRA's names stand in another model.
        write_rank: the rank of Llama's write strengths: of its 8 key/value heads at least the share that the run's rank
            is of SmolLM2's 3.
        gate: what the gates read, in both models.
        settings: what else its run is made with.
        arms: by the name of a row, the arm that gives its accuracy.
        all: whether nothing of the adapter stays with a client.
    """

    small: list[str]
    large: list[str]
    write_rank: int = 0
    gate: Literal["input", "head"] = "input"
    settings: tuple[str, ...] = ()
    arms: dict[str, str] = field(default_factory=dict)
    all: bool = False


UNTRAINED = "others untrained"
WAYS = {"others private": "fedavg", UNTRAINED: "shared-only"}
"""What becomes of the rules that are not shared: each client trains its own, or they stay as they began."""
LORA = "LoRA r16"
PICKS = [f"layers.*.memory.address.{part}" for part in ("pick", "pick_bias", "decay", "scale", "centre")]
"""Which words an address is made of, without the matrix that it is made with."""
LOW = ["write", "layers.*.memory.gate.bias"]
ON_LORA = ("memory.layers=none", "memory.start=fresh", "lora.rank=16", "lora.targets=all-linear")
SETS = {
    LORA: Rules(["lora"], ["lora"], settings=ON_LORA, all=True),
    "theta": Rules(
        ["theta"],
        ["theta"],
        arms={
            "theta": "federated",
            "nothing, each client alone": "local-only",
            "nothing, public rules untrained": "public-rules",
        },
        all=True,
    ),
    "theta, gate per head": Rules(["theta"], ["theta"], gate="head", all=True),
    "memory": Rules(["memory"], ["memory"]),
    "write": Rules(["write"], ["write"]),
    "two layers": Rules(
        [*BIASES, "layers.1[68].memory.write.weight"],
        [*BIASES, "layers.9.memory.write.weight", "layers.10.memory.write.weight"],
    ),
    "low-rank": Rules([*LOW], [*LOW], 3, settings=("memory.write-rank=1",)),
    "picks": Rules([*BIASES, *PICKS], [*BIASES, *PICKS]),
    "picks, gate per head": Rules([*BIASES, *PICKS], [*BIASES, *PICKS], gate="head"),
    "biases": Rules(BIASES, BIASES),
}


def shapes(adapter: str, write_rank: int = 0, gate: Literal["input", "head"] = "input") -> dict[str, Tensor]:
    """The trainable tensors of Llama-3.2-1B by canonical name, without memory behind them."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_235_814_400
    if adapter == "memory":
        fednl.attach_memory(model, fednl.MemoryConfig(layers=LAYERS, write_rank=write_rank, gate=gate))
        return dict(fednl.rules(model))
    lora = LoraAdapter()
    lora.attach(model, LoraSettings(rank=16), 0)
    return dict(lora.parameters())


def payload(tensors: Mapping[str, Tensor], names: Iterable[str], coding: str) -> Message:
    """A client's message with random numbers, as it is on the wire."""
    rng = torch.Generator().manual_seed(0)
    rules = {name: 1e-2 * torch.randn(tensors[name].shape, generator=rng) for name in names}
    metrics = dict.fromkeys(("loss", "loss_first", "loss_last", "steps", "seconds_s"), 0.123456789012345)
    message = Message(rules, num_examples=750, metrics=metrics, round=8, client="name-date", run="compact")
    start = {name: torch.zeros_like(value) for name, value in rules.items()}
    return encode(message, coding, start, {})[0]


def weigh() -> tuple[dict[str, dict[str, tuple[int, int]]], dict[str, int]]:
    """By set and coding the bytes of a message and of its container; by set how many numbers."""
    sizes: dict[str, dict[str, tuple[int, int]]] = {}
    numbers: dict[str, int] = {}
    for name, rules in SETS.items():
        tensors = shapes("lora" if name == LORA else "memory", rules.write_rank, rules.gate)
        names = select(tensors, rules.large)
        made = {coding: payload(tensors, names, coding) for coding in CODINGS}
        sizes[name] = {coding: (one.size_bytes, one.size_bytes - one.tensor_bytes) for coding, one in made.items()}
        numbers[name] = sum(tensors[one].numel() for one in names)
    return sizes, numbers


def config_of(name: str, way: str, given: list[str]) -> Config:
    """The settings of one set's run, in one of the two ways."""
    rules = SETS[name]
    arms = ["federated"] if way == UNTRAINED else list(rules.arms.values()) or ["federated"]
    sets = [f"federation.shared={json.dumps(rules.small)}", f"evaluation.arms={json.dumps(arms)}"]
    sets += [f"memory.gate={rules.gate}", *rules.settings, f"federation.algorithm={WAYS[way]}", *given]
    return load_config("configs/compact.toml", sets)


def measured(args: argparse.Namespace) -> dict[str, list[str]]:
    """By row the cells of accuracy in both ways, how many questions, and epsilon; trains what is missing, if asked."""
    found: dict[str, list[str]] = {}
    for name in args.only.split(";"):
        rules = SETS[name]
        arms = rules.arms or {name: "federated"}
        cells: dict[str, dict[str, list[str]]] = {row: {} for row in arms}
        number, epsilon = "-", "-"
        for way in [way for way in WAYS if way in args.ways.split(",") and not (rules.all and way == UNTRAINED)]:
            config = config_of(name, way, args.set)
            folder = args.out / way.replace(" ", "-") / name.replace(",", "").replace(" ", "-")
            if args.as_is and not (folder / "results" / "needles.json").exists():
                continue
            run = run_at(folder, config, told(folder))
            for row, arm in arms.items():
                if arm in config.evaluation.arms:
                    cells[row][way] = answers(run, arm)
                    number = str(macro(run, arm, "candidates")["n"])
            spent = run.read_jsonl("rounds.jsonl")[-1]["metrics"].get("epsilon")
            epsilon = epsilon if spent is None else f"{spent:.1f}"
        found |= {
            row: [
                *(cell for way in WAYS for cell in by_way.get(way, ["-", "-"])),
                number,
                epsilon if arms[row] == "federated" else "-",
            ]
            for row, by_way in cells.items()
            if by_way
        }
    return found


def main() -> None:
    """Trains what is missing, then prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/compact"), help="where the runs are kept")
    parser.add_argument("--bytes-only", action="store_true", help="weigh the messages, train nothing, give no ratio")
    parser.add_argument("--as-is", action="store_true", help="train nothing; the table of what is measured so far")
    parser.add_argument("--only", default=";".join(SETS), help="sets to train, ;-separated")
    parser.add_argument("--ways", default=",".join(WAYS), help="what becomes of the rules that are not shared")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    args = parser.parse_args()
    torch.set_num_threads(1)
    accuracy = {} if args.bytes_only else measured(args)
    sizes, numbers = weigh()
    body = []
    for name, by_coding in sizes.items():
        cells = [f"{total:,} ({container:,})" for total, container in by_coding.values()]
        ratio = sizes[LORA]["bfloat16"][0] / by_coding["bfloat16"][0]
        body.append([name, f"{numbers[name]:,}", *cells, *accuracy.get(name, ["-"] * 6)])
        body[-1].append(f"{ratio:.0f}" if name in accuracy else "-")
    body += [[row, "0", *["-"] * len(CODINGS), *cells, "-"] for row, cells in accuracy.items() if row not in sizes]
    heads = ["shared", "numbers", *(f"bytes as {coding} (container)" for coding in CODINGS)]
    heads += [f"{what}, {way}" for way in WAYS for what in ("right of four, %", "nats/token")]
    print(table([*heads, "n", "epsilon", "LoRA's bytes over its own, bfloat16"], body))
    print(
        "\nOne client's message up, at Llama-3.2-1B's shapes; accuracy on SmolLM2-135M, macro over clients, chance 25%."
    )


if __name__ == "__main__":
    main()
