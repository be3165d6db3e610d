"""What the rounds cost beyond the local steps themselves, on the real model in one process.

    python benchmarks/loop_overhead.py --rounds 6

Turn by turn, one federated round (messages as bytes, checks, averaging, a checkpoint written and read back) and the
same clients' steps on the same batches in a bare loop: torch's AdamW on the live parameters. Prints Markdown:
processor seconds of both, and their ratio's median and range over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from fednl.client import Bench
from fednl.config import Config, load_config
from fednl.federation.algorithms import FedAvg
from fednl.federation.loop import run_rounds
from fednl.federation.transport import InProcessTransport
from fednl.problem import ClientProblem, answer_nats
from fednl.runs import Run


def federated_round(bench: Bench, run: Run, number: int) -> float:
    """Processor seconds of one round of FedAvg over all clients."""
    config, start = bench.config, bench.start("own")
    transport = InProcessTransport(bench.endpoint("federated"), {c: len(s.train) for c, s in bench.data.items()})
    algorithm = FedAvg(None, config.federation.shared)
    began_s = time.process_time()
    run_rounds(
        algorithm, transport, start, config.federation, config.training, run, seed=config.run.seed, stop_after=number
    )
    return time.process_time() - began_s


def bare_round(bench: Bench, number: int) -> float:
    """Processor seconds of the same steps on the same batches, with nothing around them."""
    training = bench.config.training
    live = bench.put(bench.start("own"))
    began_s = time.process_time()
    for client in sorted(bench.data):
        optimizer = torch.optim.AdamW(live.values(), training.local_lr, weight_decay=0.0)
        for batch in ClientProblem(bench, client, number).batches("train", training.local_steps):
            optimizer.zero_grad()
            answer_nats(bench.model, batch).backward()
            torch.nn.utils.clip_grad_norm_(live.values(), training.clip)
            optimizer.step()
    return time.process_time() - began_s


def settings(rounds: int, given: list[str]) -> Config:
    """Those of the algorithms' benchmark, with as many rounds as are measured."""
    return load_config("configs/algorithms.toml", [f"training.rounds={rounds}", "data.validation=0", *given])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    args = parser.parse_args()
    bench = Bench(settings(args.rounds, args.set))
    bench.mount("own")
    bare_round(bench, 1)  # the first pass of a process costs more
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, args.rounds + 1):
            # Whoever goes first in odd rounds goes second in even ones, as a busy machine's clock drifts.
            if number % 2:
                pairs.append((federated_round(bench, Run(Path(folder)), number), bare_round(bench, number)))
            else:
                bare_s = bare_round(bench, number)
                pairs.append((federated_round(bench, Run(Path(folder)), number), bare_s))
    ratios = [federated / bare for federated, bare in pairs]
    steps = len(bench.data) * bench.config.training.local_steps
    print("| rounds | steps a round | federated, CPU s | bare loop, CPU s | ratio, median | ratio, range |")
    print("|---|---|---|---|---|---|")
    total = [sum(pair[side] for pair in pairs) for side in (0, 1)]
    print(
        f"| {args.rounds} | {steps} | {total[0]:.1f} | {total[1]:.1f} | {statistics.median(ratios):.3f} "
        f"| {min(ratios):.3f} to {max(ratios):.3f} |"
    )


if __name__ == "__main__":
    main()
