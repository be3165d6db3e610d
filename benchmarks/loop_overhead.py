"""What a federated run costs beyond the local steps themselves, on the real model in one process.

    python benchmarks/loop_overhead.py --rounds 8

One federated run (messages as bytes, checks, averaging, a checkpoint a round) and the same steps of the same clients
on the same batches in a bare loop: torch's AdamW on the live parameters. They take turns client by client, as a busy
machine's clock drifts. Prints Markdown: processor seconds of both, their ratio as a whole and per round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fednl.client import Bench
from fednl.config import Config, load_config
from fednl.federation.algorithms import FedAvg
from fednl.federation.loop import run_rounds
from fednl.federation.transport import InProcessTransport
from fednl.problem import ClientProblem, answer_nats
from fednl.runs import Run


def bare_steps(bench: Bench, client: str, number: int) -> float:
    """Processor seconds of a client's steps of a round on the same batches, with nothing around them."""
    training = bench.config.training
    live = bench.put(bench.start("own"))
    began_s = time.process_time()
    optimizer = torch.optim.AdamW(live.values(), training.local_lr, weight_decay=0.0)
    for batch in ClientProblem(bench, client, number).batches("train", training.local_steps):
        optimizer.zero_grad()
        answer_nats(bench.model, batch).backward()
        torch.nn.utils.clip_grad_norm_(live.values(), training.clip)
        optimizer.step()
    return time.process_time() - began_s


class Turns:
    """Listens to a run; after each client's part of a round the same steps run bare, off the run's clock."""

    def __init__(self, bench: Bench) -> None:
        self.rounds: list[list[float]] = []
        """Processor seconds of each round, federated and bare."""
        self._bench, self._federated_s, self._bare_s = bench, 0.0, 0.0
        self._since_s = time.process_time()

    def hear(self, event: dict[str, Any]) -> None:
        """Takes an event of `run_rounds`."""
        if event["event"] not in ("client-done", "round-end"):
            return
        self._federated_s += time.process_time() - self._since_s
        if event["event"] == "client-done":
            self._bare_s += bare_steps(self._bench, event["client"], event["round"])
        else:
            self.rounds.append([self._federated_s, self._bare_s])
            self._federated_s = self._bare_s = 0.0
        self._since_s = time.process_time()

    def ended(self) -> None:
        """Counts what the run did after its last round to that round."""
        self.rounds[-1][0] += time.process_time() - self._since_s


def measured(bench: Bench, folder: Path) -> list[list[float]]:
    """Processor seconds of every round of a run of FedAvg over all clients, and of its steps alone."""
    config, start = bench.config, bench.start("own")
    for client in sorted(bench.data):
        bare_steps(bench, client, 1)  # the first passes of a process cost more
    turns = Turns(bench)
    run_rounds(
        FedAvg(None, config.federation.shared),
        InProcessTransport(bench.endpoint("federated"), {c: len(s.train) for c, s in bench.data.items()}),
        start,
        config.federation,
        config.training,
        Run(folder),
        seed=config.run.seed,
        on_event=turns.hear,
    )
    turns.ended()
    return turns.rounds


def settings(rounds: int, given: list[str]) -> Config:
    """Those of the algorithms' benchmark, with as many rounds as are measured."""
    return load_config("configs/algorithms.toml", [f"training.rounds={rounds}", "data.validation=0", *given])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    args = parser.parse_args()
    bench = Bench(settings(args.rounds, args.set))
    bench.mount("own")
    with tempfile.TemporaryDirectory() as folder:
        rounds = measured(bench, Path(folder))
    ratios = [federated / bare for federated, bare in rounds]
    steps = len(bench.data) * bench.config.training.local_steps
    federated, bare = (sum(column) for column in zip(*rounds, strict=True))
    print("| rounds | steps a round | federated, CPU s | bare loop, CPU s | ratio | of a round, median | range |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {args.rounds} | {steps} | {federated:.1f} | {bare:.1f} | {federated / bare:.3f} "
        f"| {statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} |"
    )


if __name__ == "__main__":
    main()
