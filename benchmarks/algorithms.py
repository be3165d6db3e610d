"""Every algorithm on one non-IID needle federation, and those for streams on three tasks in a row; one command.

    python benchmarks/algorithms.py --out runs/algorithms
    python benchmarks/algorithms.py --out runs/quick --only "fedavg;fedavgm" --streams none --grid 1e-2 \\
        --set training.rounds=2

Trains each method at every local learning rate of one grid, picks the rate by the validation loss of the last round,
and only then reads the test questions, with the picked rules. Each (method, rate) is an ordinary run in its own folder:
whatever stopped the command, the same command goes on. The pooled learner, a yardstick and no method, answers at every
rate, and its rate is picked by validation all the same. Prints Markdown: accuracy and nats with 95% intervals, the lag
behind as many steps of the same adapters on pooled data (a LoRA has none here), the share of FedAvg's that is closed,
seconds and bytes; then forgetting and backward transfer on the stream.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednl.arms import adapters_hash
from fednl.config import Config, load_config
from fednl.evaluation.closing import share_closed
from fednl.evaluation.outcomes import load_outcomes, values_by_client
from fednl.evaluation.statistics import told_ends
from fednl.reproduce.keeping import run_at
from fednl.runs import Run

GRID = (3e-3, 1e-2, 3e-2)
LORA = ("memory.layers=none", "lora.rank=8", 'lora.targets="q_proj,v_proj"', "federation.shared=lora")
STREAM = (
    'tasks.order=["passkey","name-date","multi-key"]',
    "tasks.rotate=true",
    "data.clients=4",
    "federation.quorum=3",
)

METHODS: dict[str, tuple[str, ...]] = {
    "fedavg": (),
    "fedavgm": ("fedavgm.momentum=0.9",),
    "fedavgm, server-lr 2": ("fedavgm.momentum=0.0", "fedavgm.server-lr=2.0"),
    "fedavg, four times the rounds": (),
    "fedavgm, server-lr 2, twice the rounds": ("fedavgm.momentum=0.0", "fedavgm.server-lr=2.0"),
    "fedavgm, server-lr 2, four times the rounds": ("fedavgm.momentum=0.0", "fedavgm.server-lr=2.0"),
    "fedadam": ("fedadam.server-lr=1e-2",),
    "fedyogi": ("fedyogi.server-lr=1e-2",),
    "m3": ("m3.server-lr=1e-2",),
    "fedprox": (),
    "scaffold": (),
    "fedala": ("fedala.steps=2", "fedala.most-passes=3"),  # else its mixing weights take many times the others' steps
    "fedweit": (),
    "reptile": (),
    "per-fedavg": (),
    "local-only": (),
    "fedavg, LoRA": LORA,
    "ffa-lora": LORA,
    "flexlora": (*LORA, "training.optimizer-state=reset"),  # its factors are others every round
}
"""What is compared, by name: the algorithm is what stands before the comma; with the settings that differ."""
OFTEN = {"twice the rounds": 2, "four times the rounds": 4}
"""Last words of a name: as many steps in all, averaged so much more often."""

STREAM_METHODS: dict[str, tuple[str, ...]] = {
    "fedavg": (),
    "ewc": ("ewc.strength=1e3",),
    "ewc, strength 1e5": ("ewc.strength=1e5",),
    "fedssi": ("fedssi.strength=10.0",),
    "fedssi, strength 1e3": ("fedssi.strength=1e3",),
    "fedweit": (),
    "fedweit, drift 1": ("fedweit.drift=1.0",),
    "local-only": (),
}
"""The same for the stream of three tasks."""


@dataclass(frozen=True)
class Bench:
    """What all methods of one table share.

    Attributes:
        out: the folder of their runs.
        grid: local learning rates.
        given: settings from the command line; they win over all others.
        own: settings of this table.
        methods: settings by method.
    """

    out: Path
    grid: Sequence[float]
    given: Sequence[str]
    own: Sequence[str]
    methods: Mapping[str, Sequence[str]]

    def config(self, name: str, rate: float, arms: Sequence[str]) -> Config:
        """The settings of one method at one learning rate, measured in some arms."""
        algorithm = f"federation.algorithm={name.partition(',')[0]}"
        sets = [algorithm, *self.methods[name], *self.own, f"training.local-lr={rate}", *self.given]
        config = load_config("configs/algorithms.toml", [*sets, f"evaluation.arms={json.dumps(list(arms))}"])
        often = OFTEN.get(name.rpartition(", ")[2], 1)
        rounds, steps = config.training.rounds, config.training.local_steps
        if steps % often:
            raise SystemExit(f"training.local-steps={steps} cannot be shared out for {name!r}: a multiple of {often}")
        return config.with_overrides([f"training.rounds={rounds * often}", f"training.local-steps={steps // often}"])

    def run(self, name: str, rate: float, arms: Sequence[str]) -> Run:
        """The run of one method at one learning rate: made, gone on with, or as it is."""
        config = self.config(name, rate, arms)
        folder = self.out / name.replace(", ", "-").replace(" ", "-") / f"lr-{rate:g}"
        return run_at(folder, config, told(folder))

    def best_rate(self, name: str, arms: Sequence[str] = (), folder: str = "") -> float:
        """Trains a method at every rate, and picks the one with the lowest validation loss at the end."""
        losses = {rate: last_validation(self.run(name, rate, arms), folder) for rate in self.grid}
        return min(losses, key=losses.__getitem__)


def told(folder: Path) -> Any:
    """Says on standard error how far a run is."""

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] in ("phase", "round-end"):
            what = event.get("name") or f"round {event['round']} of {event['rounds']}"
            print(f"{folder.parent.name} {folder.name}: {what}", file=sys.stderr, flush=True)

    return on_event


def last_validation(run: Run, folder: str = "") -> float:
    """The validation loss after the last round, in nats per token; infinite where it was not finite."""
    row = run.read_jsonl(f"{folder}rounds.jsonl")[-1]
    return float(row["metrics"].get("validation_loss", math.inf))


def macro(run: Run, arm: str, metric: str) -> dict[str, Any]:
    """The macro row of an arm."""
    rows = run.read_json("results/needles.json")["rows"]
    row: dict[str, Any] = next(
        row for row in rows if (row["method"], row["client"], row["metric"]) == (arm, "macro", metric)
    )
    return row


def cell(row: Mapping[str, Any], scale: float, form: str) -> str:
    """A value with its 95% interval, where it has one."""
    value, *ends = (format(scale * row[key], form) for key in ("value", "low", "high") if key in row)
    return f"{value} [{', '.join(ends)}]" if ends else value


def answers(run: Run, arm: str) -> list[str]:
    """The cells of right answers and of cross-entropy."""
    return [cell(macro(run, arm, "candidates"), 100, ".1f"), cell(macro(run, arm, "nats_per_token"), 1, ".2f")]


def nats(run: Run, arm: str) -> dict[str, list[float]]:
    """An arm's cross-entropies by client, paired with other runs' of the same questions."""
    return values_by_client(load_outcomes(run.path / "results/needles.outcomes.jsonl")[arm], "nats_per_token")


def closed(run: Run, ends: Sequence[dict[str, list[float]]]) -> str:
    """The cell of how much of the way from FedAvg to the pooled learner a run goes, %, where both are there."""
    share = share_closed(nats(run, "federated"), *ends, seed=0, shares=False) if ends else None
    return cell({"value": share.value, **told_ends(share)}, 100, ".1f") if share else "-"


def costs(run: Run, folder: str) -> list[str]:
    """The cells of seconds in all rounds, and of mean bytes of a client in a round, up and down."""
    rounds = run.read_jsonl(f"{folder}rounds.jsonl")
    clients = [client for row in rounds for client in row["clients"]]
    sizes = [sum(client.get(key, 0) for client in clients) / len(clients) for key in ("up_bytes", "down_bytes")]
    return [f"{number:,.0f}" for number in (sum(row["seconds_s"] for row in rounds), *sizes)]


def table(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *body])


def same_adapters(bench: Bench, name: str) -> bool:
    """Whether a method trains the adapters of the pooled learner, who is an arm of FedAvg's run.

    How far a LoRA is behind rules in a memory is the distance of two adapters, and no lag of averaging.
    """
    own, fedavg = (bench.config(one, bench.grid[0], []) for one in (name, "fedavg"))
    return adapters_hash(own, "own") == adapters_hash(fedavg, "own")


def compare(bench: Bench, names: Sequence[str]) -> str:
    """The first table; with FedAvg among the methods also the pooled learner and what there is without training."""
    pooled, body = math.nan, []
    ends: list[dict[str, list[float]]] = []
    for name in names:
        trained = ["pooled"] if name == "fedavg" else []  # an arm is trained where it is measured
        rate = bench.best_rate(name, trained)
        run = bench.run(name, rate, ["federated", *(["window-only"] if trained else []), *trained])
        if trained:
            best = bench.best_rate(name, trained, "arms/pooled/")
            other = bench.run(name, best, trained) if best != rate else run
            ends = [nats(run, "federated"), nats(other, "pooled")]
            pooled = macro(other, "pooled", "nats_per_token")["value"]
            own = [f"{best:g}", f"{last_validation(other, 'arms/pooled/'):.3f}"]
            body.append(["window only, untrained", "-", "-", *answers(run, "window-only"), *["-"] * 5])
            body.append(["pooled data", *own, *answers(other, "pooled"), "-", "-", *costs(other, "arms/pooled/")])
        alike = same_adapters(bench, name)
        lag = macro(run, "federated", "nats_per_token")["value"] - pooled if alike else math.nan
        own = [f"{rate:g}", f"{last_validation(run):.3f}", *answers(run, "federated")]
        way = closed(run, ends) if alike and name != "fedavg" else "-"
        behind = [f"{lag:+.2f}" if math.isfinite(lag) else "-", way]
        body.append([name, *own, *behind, *costs(run, "")])
    n = macro(run, "federated", "candidates")["n"]
    columns = ["method", "local lr", "validation, nats", "right of four, %", "nats/token", "lag behind pooled, nats"]
    columns += ["of FedAvg's lag closed, %"]
    after = f"n = {n} questions, macro over clients, chance 25%; bytes are of a client in a round."
    return f"{table([*columns, 'seconds', 'bytes up', 'bytes down'], body)}\n\n{after}"


def streams(bench: Bench, names: Sequence[str]) -> str:
    """The second table."""
    body = []
    for name in names:
        rate = bench.best_rate(name)
        run = bench.run(name, rate, ["federated"])
        rows = {(row["metric"], row["of"]): row for row in run.read_json("results/stream.json")["rows"] if "of" in row}
        cells = [cell(rows[what, "candidates"], 100, "+.1f") for what in ("forgetting", "backward_transfer")]
        cells += [cell(rows[what, "nats_per_token"], 1, "+.2f") for what in ("forgetting", "backward_transfer")]
        body.append([name, f"{rate:g}", f"{last_validation(run):.3f}", *answers(run, "federated"), *cells])
    columns = ["method", "local lr", "validation, nats", "all tasks at the end, %", "nats/token", "forgetting, pp"]
    columns += ["backward transfer, pp", "forgetting, nats", "backward transfer, nats"]
    n = rows["forgetting", "candidates"]["n"], macro(run, "federated", "candidates")["n"]
    return f"{table(columns, body)}\n\nn = {n[1]} questions at the end, {n[0]} pairs of the first two tasks."


def listed(words: str, known: Mapping[str, object]) -> list[str]:
    """The methods that an option names, separated by semicolons; FedAvg first, as its runs hold the pooled learner."""
    names = [word.strip() for word in words.split(";") if word.strip() and word.strip() != "none"]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no method {unknown[0]!r}; choose among {'; '.join(known)}")
    return sorted(names, key=lambda name: name != "fedavg")


def main() -> None:
    """Trains what is missing, then prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the runs are kept; the same folder goes on")
    parser.add_argument(
        "--only",
        default=";".join(METHODS),
        help="methods of the first table, ;-separated; or none",
    )
    parser.add_argument("--streams", default=";".join(STREAM_METHODS), help="the same of the second")
    parser.add_argument("--grid", default=",".join(f"{rate:g}" for rate in GRID), help="local rates of the first table")
    parser.add_argument("--stream-grid", default="1e-2", help="of the second; FedAvg's best of the first, as it is")
    parser.add_argument("--rounds-per-task", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    args = parser.parse_args()
    grid, stream_grid = ([float(rate) for rate in rates.split(",")] for rates in (args.grid, args.stream_grid))
    single, stream = listed(args.only, METHODS), listed(args.streams, STREAM_METHODS)
    if single:
        print(compare(Bench(args.out / "single", grid, args.set, (), METHODS), single), flush=True)
    if stream:
        rounds = args.rounds_per_task
        own = (*STREAM, f"tasks.rounds-per-task={rounds}", f"training.rounds={3 * rounds}")
        given = [one for one in args.set if not one.startswith(("training.rounds=", "data.clients="))]
        print("\n" + streams(Bench(args.out / "stream", stream_grid, given, own, STREAM_METHODS), stream))


if __name__ == "__main__":
    main()
