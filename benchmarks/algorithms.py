"""Every algorithm on one non-IID needle federation, and those for streams on three tasks in a row; one command.

    python benchmarks/algorithms.py --out runs/algorithms
    python benchmarks/algorithms.py --out runs/quick --only fedavg,fedavgm --grid 1e-2 --set training.rounds=2

Trains each method at every local learning rate of one grid, picks the rate by the validation loss of the last round,
and only then reads the test questions, with the picked rules. Each (method, rate) is an ordinary run in its own folder:
whatever stopped the command, the same command goes on. Prints Markdown: accuracy and nats with 95% intervals, the lag
behind the same number of steps on pooled data, seconds, bytes; then, from `--streams`, forgetting and backward transfer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fednl.config import Config, load_config
from fednl.runs import Run
from fednl.training import resume, train

GRID = (3e-3, 1e-2, 3e-2)
LORA = ("memory.layers=none", "lora.rank=8", 'lora.targets="q_proj,v_proj"', "federation.shared=lora")
STREAM = ('tasks.order=["passkey","name-date","multi-key"]', "tasks.rotate=true", "data.clients=4")

METHODS: dict[str, tuple[str, ...]] = {
    "fedavg": (),
    "fedavgm": ("fedavgm.momentum=0.9",),
    "fedavgm, server-lr 2": ("fedavgm.momentum=0.0", "fedavgm.server-lr=2.0"),
    "fedadam": ("fedadam.server-lr=1e-2",),
    "fedadam, server-lr 3e-2": ("fedadam.server-lr=3e-2",),
    "fedyogi": ("fedyogi.server-lr=1e-2",),
    "m3": ("m3.server-lr=1e-2",),
    "fedprox": (),
    "scaffold": (),
    "fedala": (),
    "reptile": (),
    "per-fedavg": (),
    "local-only": (),
    "fedavg, LoRA": LORA,
    "ffa-lora": LORA,
    "flexlora": LORA,
}
"""What is compared, by name: the algorithm is what stands before the comma; with the settings that differ."""

STREAM_METHODS: dict[str, tuple[str, ...]] = {
    "fedavg": (),
    "fedprox": (),
    "ewc": ("ewc.strength=1e3",),
    "ewc, strength 1e5": ("ewc.strength=1e5",),
    "fedssi": ("fedssi.strength=10.0",),
    "fedssi, strength 1e3": ("fedssi.strength=1e3",),
    "local-only": (),
}
"""The same for the stream of three tasks."""


def settings(name: str, rate: float, given: Sequence[str], own: Sequence[str]) -> Config:
    """The settings of one method at one learning rate; what the command line sets wins."""
    algorithm = name.partition(",")[0]
    return load_config(
        "configs/algorithms.toml",
        [f"federation.algorithm={algorithm}", *own, f"training.local-lr={rate}", *given],
    )


def run_of(folder: Path, config: Config, arms: Sequence[str]) -> Run:
    """The run of one method and rate with these arms measured: made, gone on with, or as it is."""
    wanted = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"arms": tuple(arms)})})
    if not (folder / "config.json").exists():
        return train(wanted, folder, told(folder))
    run = Run.open(folder)
    if run.read_json("config.json") != json.loads(wanted.to_json()):
        run.write_json("config.json", wanted.to_dict())  # arms may change; a run refuses whatever it was trained with
    rows = run.read_json("results/needles.json")["rows"] if (folder / "results/needles.json").exists() else []
    done = (folder / "finished.json").exists() and set(arms) <= {row["method"] for row in rows}
    return run if done else resume(folder, told(folder))


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
    found = (r for r in rows if (r["method"], r["client"], r["metric"]) == (arm, "macro", metric))
    row: dict[str, Any] = next(found)
    return row


def cell(row: Mapping[str, Any], scale: float, form: str) -> str:
    """A value with its 95% interval."""
    value, low, high = (format(scale * row[key], form) for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def traffic(run: Run, folder: str = "") -> tuple[float, float, float]:
    """Seconds of all rounds, and mean bytes of a client in a round, up and down."""
    rounds = run.read_jsonl(f"{folder}rounds.jsonl")
    clients = [client for row in rounds for client in row["clients"]]
    up, down = (sum(client.get(key, 0) for client in clients) / len(clients) for key in ("up_bytes", "down_bytes"))
    return sum(row["seconds_s"] for row in rounds), up, down


def pick(
    out: Path, name: str, grid: Sequence[float], given: Sequence[str], own: Sequence[str], arms: Sequence[str]
) -> dict[float, Run]:
    """Trains a method at every rate; gives the runs by rate."""
    slug = name.replace(", ", "-").replace(" ", "-")
    return {rate: run_of(out / slug / f"lr-{rate:g}", settings(name, rate, given, own), arms) for rate in grid}


def compare(out: Path, names: Sequence[str], grid: Sequence[float], given: Sequence[str]) -> list[str]:
    """The first table."""
    lines = [
        "| method | local lr | validation, nats | right of four, % | nats/token | lag behind pooled, nats | seconds | up, B | down, B |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    pooled_nats, rows = math.nan, []
    for name in names:
        arms = ["pooled"] if name == "fedavg" else []  # an arm is trained where it is measured
        runs = pick(out / "single", name, grid, given, METHODS[name], arms)
        chosen = min(runs, key=lambda rate: last_validation(runs[rate]))
        shown = [("federated", chosen, "")]
        if name == "fedavg":
            best = min(runs, key=lambda rate: last_validation(runs[rate], "arms/pooled/"))
            pooled_nats = macro(runs[best], "pooled", "nats_per_token")["value"]
            shown.append(("pooled", best, "arms/pooled/"))
        for arm, rate, folder in shown:
            config = settings(name, rate, given, METHODS[name])
            run = run_of(runs[rate].path, config, [*arms, "federated", *(["window-only"] if name == "fedavg" else [])])
            rows.append((name if arm == "federated" else arm, rate, run, arm, folder))
    for name, rate, run, arm, folder in rows:
        nats = macro(run, arm, "nats_per_token")
        seconds, up, down = traffic(run, folder)
        lag = f"{nats['value'] - pooled_nats:+.2f}" if arm != "pooled" and math.isfinite(pooled_nats) else "-"
        accuracy = cell(macro(run, arm, "candidates"), 100, ".1f")
        lines.append(
            f"| {name} | {rate:g} | {last_validation(run, folder):.3f} | {accuracy} | {cell(nats, 1, '.2f')} | {lag} "
            f"| {seconds:,.0f} | {up:,.0f} | {down:,.0f} |"
        )
        if name == "fedavg":
            window = (
                cell(macro(run, "window-only", m), s, f)
                for m, s, f in (("candidates", 100, ".1f"), ("nats_per_token", 1, ".2f"))
            )
            lines.append(f"| window only, untrained | - | - | {' | '.join(window)} | - | - | - | - |")
    n = macro(rows[0][2], rows[0][3], "candidates")["n"]
    return [
        *lines,
        "",
        f"n = {n} questions, macro over clients, chance 25%; pooled takes every client's steps of a round.",
    ]


def streams(
    out: Path, names: Sequence[str], grid: Sequence[float], given: Sequence[str], rounds_per_task: int
) -> list[str]:
    """The second table."""
    own = (*STREAM, f"tasks.rounds-per-task={rounds_per_task}", f"training.rounds={3 * rounds_per_task}")
    given = [one for one in given if not one.startswith(("training.rounds=", "data.clients="))]
    lines = [
        "| method | local lr | validation, nats | forgetting, pp | backward transfer, pp | forgetting, nats | backward transfer, nats | last, nats |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    n = 0
    for name in names:
        method = (*STREAM_METHODS[name], *own)
        runs = pick(out / "stream", name, grid, given, method, [])
        rate = min(runs, key=lambda one: last_validation(runs[one]))
        run = run_of(runs[rate].path, settings(name, rate, given, method), ["federated"])
        rows = {(r["metric"], r["of"]): r for r in run.read_json("results/stream.json")["rows"] if "of" in r}
        n = rows["forgetting", "candidates"]["n"]
        cells = [cell(rows[what, "candidates"], 100, "+.1f") for what in ("forgetting", "backward_transfer")]
        cells += [cell(rows[what, "nats_per_token"], 1, "+.2f") for what in ("forgetting", "backward_transfer")]
        cells.append(cell(macro(run, "federated", "nats_per_token"), 1, ".2f"))
        lines.append(f"| {name} | {rate:g} | {last_validation(run):.3f} | {' | '.join(cells)} |")
    return [*lines, "", f"n = {n} paired questions of the first two tasks; last: all three tasks after the third."]


def main() -> None:
    """Trains what is missing, then prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the runs are kept; the same folder goes on")
    parser.add_argument("--only", default="", help="methods of the first table, separated by semicolons")
    parser.add_argument(
        "--streams", default=";".join(STREAM_METHODS), help="the same for the stream; none leaves it out"
    )
    parser.add_argument("--grid", default=",".join(f"{rate:g}" for rate in GRID), help="local learning rates")
    parser.add_argument("--rounds-per-task", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    args = parser.parse_args()
    grid = [float(rate) for rate in args.grid.split(",")]
    names = [name.strip() for name in args.only.split(";") if name.strip()] or list(METHODS)
    ordered = [name for name in names if name in METHODS and name != "none"]
    if "fedavg" in ordered:  # its runs hold the pooled learner, which the others are compared with
        ordered = ["fedavg", *(name for name in ordered if name != "fedavg")]
    print("\n".join(compare(args.out, ordered, grid, args.set)))
    chosen = [name.strip() for name in args.streams.split(";") if name.strip() and name.strip() != "none"]
    if chosen:
        print("\n" + "\n".join(streams(args.out, chosen, grid, args.set, args.rounds_per_task)))


if __name__ == "__main__":
    main()
