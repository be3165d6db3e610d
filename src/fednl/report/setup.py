"""What a run was and how its training went, read from the run folder."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fednl.report.exchange import exchange_lines
from fednl.report.recorded import recorded, section
from fednl.report.stream import one_task_line
from fednl.report.words import escape, name_only
from fednl.runs import Run


def setup_lines(run: Run, facts: Mapping[str, Any]) -> list[str]:
    """Says what the run was: backbone, memory, data, training, software; one Markdown list item each.

    Args:
        run: the run.
        facts: what `run_facts` gave.
    """
    config, problems = recorded(run, "config.json")
    environment, missing = recorded(run, "environment.json")
    lines = [
        f"Backbone: {_backbone(config, facts)}",
        *_adapters(config),
        f"Data: {_data(config, facts)}",
        f"Prompts: {_prompts(facts)}",
        f"Training: {_training(config)}",
        *exchange_lines(config),
        *one_task_line(config),
        f"Made with: {_software(environment)}",
    ]
    return [f"- {line}" for line in [*lines, *problems, *missing]]


def run_facts(run: Run, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Gathers what a run says of itself beside its settings.

    Args:
        run: the run; its `environment.json` and `partition.json` are read.
        results: its results files, whose facts win.

    Returns:
        `backbone` (a dict), `dtype`, `filler_sha256`, and `asked_sha256` (of all clients' own test prompts and answers,
        in tokens), each where it is known.
    """
    facts, _ = recorded(run, "environment.json")
    partition, _ = recorded(run, "partition.json")
    for told in [partition, *results]:
        facts |= {key: told[key] for key in ("backbone", "dtype", "filler_sha256") if key in told}
    asked = sorted([row["client"], row["sha256"]] for row in partition.get("rows") or [] if row["split"] == "test")
    return facts | ({"asked_sha256": hashlib.sha256(json.dumps(asked).encode()).hexdigest()} if asked else {})


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


def _backbone(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    identity = facts.get("backbone")
    settings = section(config, "backbone")
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
    parts = [f"{key} {_told(key, memory[key])}" for key in read if key in memory and key not in full]
    return ", ".join([*parts, seen])


def _adapters(config: Mapping[str, Any]) -> list[str]:
    adapters = section(config, "federation").get("adapters", ["memory"])
    lines = [f"Memory: {_memory(section(config, 'memory'))}"] if "memory" in adapters else []
    if "context-vectors" in adapters:
        keys = [f"{key} {_told(key, value)}" for key, value in section(config, "context-vectors").items()]
        lines.append(f"Context vectors: {', '.join(keys)}")
    return lines


def _data(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    data = section(config, "data")
    if not data:
        return "not recorded"
    parts = [f"{escape(data.get('task', '?'))}, {data.get('tokens', '?')} tokens"]
    if data.get("shortest"):
        parts.append(f"training prompts from {data['shortest']} tokens on")
    parts.append(f"{data.get('clients', '?')} clients")
    if data.get("hold-out-clients"):
        parts.append(f"held out: {escape(', '.join(data['hold-out-clients']))}")
    if data.get("dirichlet-alpha"):
        parts.append(f"kinds dealt by Dirichlet {data['dirichlet-alpha']:g}")
    if data.get("imbalance", 1) > 1:
        parts.append(f"long tail, largest {data['imbalance']:g} times the smallest")
    counts = [f"{data[key]} {key}" for key in ("train", "validation", "test") if key in data]
    whose = "client and task" if section(config, "tasks").get("order") else "client"
    parts.append(f"examples per {whose}: {', '.join(counts)}" if counts else "")
    own = section(config, str(data.get("task", "")))
    if own:
        words = (f"{key} {_told(key, value)}" for key, value in own.items())
        return "; ".join([*parts, ", ".join(words)])
    filler = f"filler {escape(Path(str(data.get('filler', '?'))).name)}"
    digest = facts.get("filler_sha256")
    parts.append(f"{filler} (sha256 {escape(digest)})" if digest else filler)
    return "; ".join(part for part in parts if part)


def _prompts(facts: Mapping[str, Any]) -> str:
    digest = facts.get("asked_sha256")
    asked = f"; all clients' test prompts and answers, in tokens, have sha256 {escape(digest)}" if digest else ""
    return f"tokens of the text alone, no BOS or other special token added{asked}"


_PLACES = ("start", "source", "sources", "groups", "store")
"""Settings that may be paths: folders are private, so that of these the last part is told."""


def _told(key: str, value: Any) -> str:
    """A setting's value as a report writes it."""
    parts = value if isinstance(value, list) else [value]
    return escape(", ".join(str(name_only(part) if key in _PLACES else part) for part in parts))


def _training(config: Mapping[str, Any]) -> str:
    training, federation = section(config, "training"), section(config, "federation")
    shared = federation.get("shared", "?")
    names = shared if isinstance(shared, str) else ", ".join(shared)
    parts = [f"{escape(federation.get('algorithm', '?'))}, shared {escape(names)}"]
    parts += [f"{key} {training[key]}" for key in ("rounds", "local-steps", "batch", "local-lr") if key in training]
    seed = section(config, "run").get("seed")
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
