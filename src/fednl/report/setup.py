"""What a run was and how its training went, read from the run folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fednl.errors import CheckpointError
from fednl.evaluation.settings import ARMS
from fednl.report.costs import cost_lines
from fednl.report.exchange import exchange_lines, exchange_notes
from fednl.report.stream import one_task_line
from fednl.report.words import escape, markdown_table, megabytes, number, where
from fednl.runs import Run


def setup_lines(run: Run, facts: Mapping[str, Any]) -> list[str]:
    """Says what the run was: backbone, memory, data, training, software; one Markdown list item each.

    Args:
        run: the run.
        facts: what `run_facts` gave.
    """
    config, problems = _read(run, "config.json")
    environment, missing = _read(run, "environment.json")
    lines = [
        f"Backbone: {_backbone(config, facts)}",
        *_adapters(config),
        f"Data: {_data(config, facts)}",
        f"Training: {_training(config)}",
        *exchange_lines(config),
        *one_task_line(config),
        f"Made with: {_software(environment)}",
    ]
    return [f"- {line}" for line in [*lines, *problems, *missing]]


def run_facts(run: Run, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Gathers what a run says of itself beside its settings: `backbone` (a dict), `dtype`, `filler_sha256`.

    Args:
        run: the run; its `environment.json` and `partition.json` are read.
        results: its results files, whose facts win.
    """
    facts, _ = _read(run, "environment.json")
    for told in [_read(run, "partition.json")[0], *results]:
        facts |= {key: told[key] for key in ("backbone", "dtype", "filler_sha256") if key in told}
    return facts


def shared_parameters(run: Run, arm: str, groups: Sequence[str]) -> int | None:
    """Counts the numbers in the shared groups of an arm's final rules; None where the run has none (yet).

    Args:
        run: the run.
        arm: the arm; one that was not trained by itself uses the run's own rules.
        groups: names of groups, or patterns of names.
    """
    folder = run.path / "arms" / arm
    path = (folder if folder.is_dir() else run.path) / "final" / "params.safetensors"
    if not path.is_file():
        return None
    count = 0
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no dict
                if any(_group(name) == group or fnmatchcase(name, group) for group in groups):
                    count += math.prod(file.get_slice(name).get_shape())
    except (OSError, SafetensorError):
        return None
    return count


def _group(name: str) -> str:
    """`layers.3.memory.write.weight` is in the group `write`, a LoRA tensor in `lora`."""
    if name.startswith("context."):
        return name.removeprefix("context.")
    before, _, after = name.partition(".memory.")
    return after.split(".")[0] if after else "lora" if before.rpartition(".")[2].startswith("lora_") else ""


def training_lines(run: Run) -> list[str]:
    """Says how the training of each arm went: rounds, loss, seconds, bytes per direction, clients left out.

    Args:
        run: the run; an arm trained beside the federated rules has its own `rounds.jsonl` in a sub-folder.
    """
    config, _ = _read(run, "config.json")
    planned = _section(config, "training").get("rounds")
    body, notes, arms = [], [], {}
    for path in [run.path / "rounds.jsonl", *sorted(run.path.glob("*/**/rounds.jsonl"))]:
        folder = path.relative_to(run.path).parent.as_posix()
        name = "federated" if folder == "." else folder.removeprefix("arms/")
        arm = ARMS.get(name, name)
        try:
            rounds = run.read_jsonl(path.relative_to(run.path).as_posix())
        except CheckpointError as error:
            notes.append(escape(str(error)))
            continue
        last = rounds[-1].get("round", len(rounds)) if rounds else 0
        arms[arm] = rounds
        if rounds:
            body.append(_arm_line(escape(arm), rounds, planned))
            notes += _left_out(escape(arm), rounds) + _lora_error(escape(arm), rounds)
            notes += exchange_notes(escape(arm), rounds)
        if rounds and isinstance(last, int) and len(rounds) < last:
            notes.append(f"{last - len(rounds)} of {last} rounds of {escape(arm)} are missing in rounds.jsonl.")
        if isinstance(planned, int) and isinstance(last, int) and last < planned:
            done = f"{escape(arm)}: {last} of {planned} rounds are done"
            notes.append(f"Unfinished: {done}; continue with `fednl train --resume {run.path}`.")
    head = ["trained", "rounds", "training loss, first to last", "validation loss", "seconds"]
    head += ["up, per client and round", "down, per client and round", "up in all", "down in all"]
    costs = cost_lines(arms, int(_section(config, "training").get("batch", 1)))
    return ([markdown_table(head, body)] if body else []) + notes + costs


def _arm_line(arm: str, rounds: Sequence[Mapping[str, Any]], planned: object) -> list[str]:
    clients = [client for row in rounds for client in row.get("clients", [])]
    up, down = ([client[key] for client in clients if key in client] for key in ("up_bytes", "down_bytes"))
    return [
        arm,
        number(len(rounds)) + (f" of {planned}" if isinstance(planned, int) else ""),
        _first_to_last(rounds, "train_loss"),
        _first_to_last(rounds, "validation_loss"),
        f"{sum(row.get('seconds_s', 0.0) for row in rounds):,.1f}",
        megabytes(up),
        megabytes(down),
        megabytes([sum(up)]),
        megabytes([sum(down)]),
    ]


def _first_to_last(rounds: Sequence[Mapping[str, Any]], name: str) -> str:
    found = [row["metrics"][name] for row in rounds if name in row.get("metrics", {})]
    return f"{found[0]:.3f} to {found[-1]:.3f}" if found else "-"


def _lora_error(arm: str, rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the server's factors missed of the mean of the clients' LoRA updates, where both factors travelled."""
    metrics = [row.get("metrics", {}) for row in rounds]
    found = [[row[name] for row in metrics if name in row] for name in ("lora_error", "lora_error_of_update")]
    shown = [f"{least:.2%} to {most:.2%}" for least, most in ((min(part), max(part)) for part in found if part)]
    if not shown:
        return []
    of_update = f", {shown[1]} of what a round changed" if found[1] else ""
    return [f"Missed of the exact mean of LoRA updates, {arm}: {shown[0]} of it{of_update} ({len(found[0])} rounds)."]


def _left_out(arm: str, rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which clients did not count and why, which messages were refused, which rounds changed nothing."""
    clients: dict[str, list[object]] = {}
    refused: Counter[str] = Counter()
    idle: dict[str, list[object]] = {}
    out: dict[str, list[object]] = {}
    for row in rounds:
        refused.update(row.get("refused", {}))
        if not row.get("updated", True):
            idle.setdefault(str(row.get("reason", "no reason recorded")), []).append(row.get("round", "?"))
        for client in row.get("quarantined", []):
            out.setdefault(str(client), []).append(row.get("round", "?"))
        for client in row.get("clients", []):
            if client.get("status", "ok") != "ok":
                status, reason = client["status"], client.get("reason")
                words = f"{client.get('name', '?')} {status}"
                words += f": {reason}" if reason and reason != status else ""
                clients.setdefault(words, []).append(row.get("round", "?"))
    kinds: tuple[tuple[str, Mapping[str, Sequence[object]]], ...] = (
        ("Not counted", clients),
        ("Refused messages", {f"{code} {count}": [] for code, count in sorted(refused.items())}),
        ("Not asked after repeated refusals", out),
        ("Rounds that left the model as it was", idle),
    )
    return [f"{title}, {arm}: {_with_rounds(found)}." for title, found in kinds if found]


def _with_rounds(found: Mapping[str, Sequence[object]]) -> str:
    return "; ".join(escape(words) + (f" ({where(rounds)})" if rounds else "") for words, rounds in found.items())


def _backbone(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    identity = facts.get("backbone")
    settings = _section(config, "backbone")
    dtype = f", {settings['dtype']}" if "dtype" in settings else ""
    if "dtype" in facts:  # what "auto" came to
        dtype = f", {escape(facts['dtype'])}"
    if not isinstance(identity, Mapping):
        # A local folder's path is nobody else's business: its name is enough.
        return f"{escape(Path(str(settings.get('id', 'not recorded'))).name)}{dtype}; identity not recorded"
    shape = [f"{identity[key]} {words}".strip() for key, words in _SHAPE.items() if key in identity]
    marks = [f"{key} {escape(identity[key])}" for key in ("sha256", "revision") if identity.get(key)]
    name = Path(str(identity.get("name", "unnamed"))).name
    return f"{escape(name)} ({', '.join([*shape, *marks])}){dtype}"


_SHAPE = {
    "architecture": "",
    "layers": "layers",
    "hidden": "hidden",
    "heads": "query heads",
    "kv_heads": "KV heads",
    "vocab": "tokens in the vocabulary",
}

_MEMORY = ("layers", "rule", "rank", "keys", "address-layer", "address-rank", "write", "write-rank", "mixing", "start")


def _memory(memory: Mapping[str, Any]) -> str:
    if not memory:
        return "not recorded"
    window = memory.get("window-tokens")
    seen = (
        f"window of {window} tokens and {memory.get('sink-tokens', '?')} sinks"
        if window
        else "full attention, whose cache grows with context"
    )
    read = [key for key in _MEMORY if memory.get("keys") == "context" or not key.startswith("address-")]
    full = {"write-rank"} if not memory.get("write-rank") else set()
    parts = [f"{key} {escape(memory[key])}" for key in read if key in memory and key not in full]
    return ", ".join([*parts, seen])


def _adapters(config: Mapping[str, Any]) -> list[str]:
    adapters = _section(config, "federation").get("adapters", ["memory"])
    lines = [f"Memory: {_memory(_section(config, 'memory'))}"] if "memory" in adapters else []
    if "context-vectors" in adapters:
        keys = [f"{key} {escape(value)}" for key, value in _section(config, "context-vectors").items()]
        lines.append(f"Context vectors: {', '.join(keys)}")
    return lines


def _data(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    data = _section(config, "data")
    if not data:
        return "not recorded"
    parts = [f"{escape(data.get('task', '?'))}, {data.get('tokens', '?')} tokens"]
    parts.append(f"{data.get('clients', '?')} clients")
    if data.get("hold-out-clients"):
        parts.append(f"held out: {escape(', '.join(data['hold-out-clients']))}")
    if data.get("dirichlet-alpha"):
        parts.append(f"kinds dealt by Dirichlet {data['dirichlet-alpha']:g}")
    if data.get("imbalance", 1) > 1:
        parts.append(f"long tail, largest {data['imbalance']:g} times the smallest")
    counts = [f"{data[key]} {key}" for key in ("train", "validation", "test") if key in data]
    whose = "client and task" if _section(config, "tasks").get("order") else "client"
    parts.append(f"examples per {whose}: {', '.join(counts)}" if counts else "")
    own = _section(config, str(data.get("task", "")))
    if own:
        words = (f"{key} {_without_folders(key, value)}" for key, value in own.items())
        return "; ".join([*parts, ", ".join(words)])
    filler = f"filler {escape(Path(str(data.get('filler', '?'))).name)}"
    digest = facts.get("filler_sha256")
    parts.append(f"{filler} (sha256 {escape(digest)})" if digest else filler)
    return "; ".join(part for part in parts if part)


def _without_folders(key: str, value: Any) -> str:
    """A task's own setting; of the places where its texts come from the last part, as folders are private."""
    if key == "sources" and isinstance(value, list):
        return ", ".join(escape(Path(str(source)).name) for source in value)
    return escape(Path(value).name if key == "source" else value)


def _training(config: Mapping[str, Any]) -> str:
    training, federation = _section(config, "training"), _section(config, "federation")
    shared = federation.get("shared", "?")
    names = shared if isinstance(shared, str) else ", ".join(shared)
    parts = [f"{escape(federation.get('algorithm', '?'))}, shared {escape(names)}"]
    parts += [f"{key} {training[key]}" for key in ("rounds", "local-steps", "batch", "local-lr") if key in training]
    seed = _section(config, "run").get("seed")
    return ", ".join(parts) + (f", seed {seed}" if seed is not None else "")


def _software(environment: Mapping[str, Any]) -> str:
    packages = environment.get("packages")
    names = ("fednl", "torch", "transformers")
    parts = [f"{name} {packages[name]}" for name in names if isinstance(packages, Mapping) and name in packages]
    if "python" in environment:
        parts.append(f"Python {environment['python']}")
    if "machine" in environment:
        parts.append(f"{environment.get('system', '')} {environment['machine']}".strip())
    if "cpu_count" in environment:
        parts.append(f"{environment['cpu_count']} processors")
    if "commit" in environment:
        changed = environment.get("changed_files")
        parts.append(f"commit {environment['commit']}" + (f" with {changed} changed files" if changed else ""))
    return escape(", ".join(parts)) or "not recorded"


def _read(run: Run, name: str) -> tuple[dict[str, Any], list[str]]:
    """A JSON file of the run, or what is wrong with it."""
    if not (run.path / name).exists():
        return {}, [f"{name} is missing"]
    try:
        return run.read_json(name), []
    except CheckpointError as error:
        return {}, [escape(str(error))]


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}
