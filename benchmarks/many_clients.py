"""Ten thousand tiny clients in one process: does the server's memory stay flat, and what does a client cost?

python benchmarks/many_clients.py [--clients 10000] [--per-round 100] [--rounds 20]

Each client trains the memory rules of one small random Llama on three sequences of its own that ask for a symbol seen
before, through the library's own round loop, validation and checkpoints. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import LlamaConfig, LlamaForCausalLM

import fednl
from fednl.federation.algorithms import FedAvg
from fednl.federation.exchange import PLAIN
from fednl.federation.local import LocalPlan
from fednl.federation.loop import run_rounds
from fednl.federation.message import Message
from fednl.federation.params import Params, count
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.sharing import take_part
from fednl.federation.transport import InProcessTransport
from fednl.runs import Run
from fednl.seeding import torch_rng

WORDS, TOKENS, EXAMPLES = 24, 16, 3


class Recall:
    """A client: pairs of symbols, then the first of one pair; the second is asked for."""

    num_examples = EXAMPLES

    def __init__(self, model: torch.nn.Module, names: Mapping[str, str], client: str, round: int) -> None:
        self._model, self._names, self._client, self._round = model, names, client, round

    def batches(self, purpose: str, steps: int, size: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch_rng(0, "data", self._client)
        rows = torch.stack([torch.randperm(WORDS, generator=draw)[:TOKENS] for _ in range(EXAMPLES)])
        asked = torch.randint(0, TOKENS // 2, (EXAMPLES,), generator=draw)
        line = torch.arange(EXAMPLES)
        ids = torch.cat([rows, rows[line, 2 * asked, None]], dim=1)
        for _ in range(steps):
            yield ids, rows[line, 2 * asked + 1]

    def loss(self, params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, right = batch
        live = {self._names[name]: value for name, value in params.items()}
        logits = functional_call(self._model, live, (ids,), {"use_cache": False}).logits[:, -1]
        return torch.nn.functional.cross_entropy(logits, right)


def backbone() -> tuple[LlamaForCausalLM, dict[str, str]]:
    """A random two-layer Llama with memory in its last layer, and the module's name of each rule."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    memory = fednl.MemoryConfig(layers="last:1", rank=2, keys="token", window_tokens=4, sink_tokens=1)
    fednl.attach_memory(model, memory)
    raw = {id(parameter): name for name, parameter in model.named_parameters()}
    return model, {name: raw[id(parameter)] for name, parameter in fednl.rules(model).items()}


def resident_mb() -> float:
    """The memory that this process holds now, in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--per-round", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, names = backbone()
    start = {name: parameter.detach().clone() for name, parameter in fednl.rules(model).items()}
    algorithm = FedAvg(shared="all")
    training = TrainingSettings(rounds=args.rounds, local_steps=2, local_lr=1e-2, optimizer_state="reset")
    spent_s: list[float] = []

    def endpoint(client: str, message: Message, state: Params, tell: Any) -> tuple[Message, Params]:
        began_s = time.process_time()
        problem = Recall(model, names, client, message.round)
        made = take_part(algorithm, problem, message, state, LocalPlan.of(training, message.round), PLAIN, tell)
        spent_s.append(time.process_time() - began_s)
        return made

    rows: list[dict[str, float]] = []
    clock = [time.process_time()]

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "round-end":
            gc.collect()
            tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
            took = {"seconds": time.process_time() - clock[-1], "training": sum(spent_s[-args.per_round :])}
            clock.append(time.process_time())
            rows.append({"loss": event["loss"], "resident": resident_mb(), "tensors": tensors, **took})

    clients = {f"client-{number:05d}": EXAMPLES for number in range(args.clients)}
    settings = FederationSettings(shared="all", clients_per_round=args.per_round, quorum=args.per_round)
    with tempfile.TemporaryDirectory() as folder:
        run_rounds(
            algorithm,
            InProcessTransport(endpoint, clients),
            start,
            settings,
            training,
            Run(Path(folder)),
            seed=0,
            on_event=on_event,
        )
    print(
        f"{args.clients:,} clients, {args.per_round} a round, {args.rounds} rounds; {count(start):,} numbers shared.\n"
    )
    print("| round | loss, nats | resident memory, MB | live tensors | round, CPU s | of it training, s |")
    print("|---|---|---|---|---|---|")
    for number, row in enumerate(rows, 1):
        if number in (1, 2, 3, 5, 10, 15, args.rounds):
            cells = [f"{row['loss']:.3f}", f"{row['resident']:.1f}", f"{row['tensors']:.0f}"]
            print(f"| {number} | {' | '.join(cells)} | {row['seconds']:.2f} | {row['training']:.2f} |")
    grown_mb = rows[-1]["resident"] - rows[min(1, len(rows) - 1)]["resident"]
    per_update = [1e3 * row["seconds"] / args.per_round for row in rows]
    print(
        f"\nA client's update costs {statistics.median(per_update):.1f} ms of CPU, checkpoint included (median over "
        f"rounds), {1e3 * statistics.median(spent_s):.1f} ms of it its own training. From round 2 to round "
        f"{args.rounds} resident memory grew by {grown_mb:.1f} MB."
    )


if __name__ == "__main__":
    main()
