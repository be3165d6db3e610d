"""A small run folder as a finished run leaves it, with invented numbers."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fednl.runs import Run

CONFIG: dict[str, Any] = {
    "backbone": {"id": "smollm2-135m", "device": "auto", "dtype": "float32"},
    "data": {
        "task": "needles",
        "tokens": 320,
        "clients": 3,
        "hold-out-clients": ["uuid"],
        "train": 40,
        "validation": 6,
        "test": 10,
        "filler": "/home/someone/private/essays.txt",
    },
    "memory": {
        "layers": "last:15",
        "rule": "delta",
        "rank": 8,
        "keys": "context",
        "address-layer": 2,
        "address-rank": 0,
        "mixing": "additive",
        "start": "/home/someone/private/rules",
        "window-tokens": 64,
        "sink-tokens": 4,
    },
    "training": {"rounds": 2, "local-steps": 8, "batch": 4, "local-lr": 0.003},
    "federation": {"algorithm": "fedavg", "shared": "theta"},
    "evaluation": {"answer": "candidates"},
    "run": {"seed": 0},
}
ENVIRONMENT: dict[str, Any] = {
    "python": "3.11.2",
    "system": "Linux",
    "machine": "x86_64",
    "cpu_count": 2,
    "packages": {"fednl": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
    "commit": "0123abcd",
    "changed_files": 1,
}
PARTITION: dict[str, Any] = {
    "rows": [],
    "backbone": {
        "name": "smollm2-135m",
        "sha256": "f00d",
        "architecture": "LlamaForCausalLM",
        "hidden": 576,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "vocab": 49152,
    },
    "filler_sha256": "beef",
}
# 60 + 8 + 12 numbers are shared; the LoRA tensor stays private.
RULES = {
    "layers.0.memory.write.weight": np.zeros((6, 10), np.float32),
    "layers.0.memory.gate.bias": np.zeros(8, np.float32),
    "layers.1.memory.projection.q": np.zeros((3, 4), np.float32),
    "layers.1.q_proj.lora_A": np.zeros((5, 5), np.float32),
}
# Right answers of ten per arm and client.
RIGHT: dict[str, dict[str, int]] = {
    "full-attention": {"passkey": 10, "uuid": 9, "date|name": 10},
    "window-only": {"passkey": 2, "uuid": 3, "date|name": 3},
    "federated": {"passkey": 8, "uuid": 6, "date|name": 7},
    "events-removed": {"passkey": 2, "uuid": 3, "date|name": 2},
    "local-only": {"passkey": 9, "date|name": 7},
    "an arm of tomorrow": {"passkey": 5, "uuid": 5, "date|name": 5},
}


def arm_rows(arm: str, right: dict[str, int], tokens: int) -> list[dict[str, Any]]:
    """Rows with invented intervals: a golden file must not depend on a random stream."""
    rows = []
    for client, hits in [*right.items(), ("macro", sum(right.values()) / len(right))]:
        n = 10 * len(right) if client == "macro" else 10
        row = {"method": arm, "client": client, "n": n, "seed": 0, "tokens": tokens}
        if arm in ("federated", "events-removed"):
            row["shared"] = ["write", "gate", "projection"]
        share = hits / 10
        ends = {"low": max(0.0, share - 0.15), "high": min(1.0, share + 0.15)}
        rows.append(row | {"metric": "candidates", "value": share, "chance": 0.25} | ends)
        rows.append(row | {"metric": "recall", "value": share / 2, "low": share / 4, "high": share})
        rows.append(row | {"metric": "nats_per_token", "value": 3 - 2 * share})
        if client != "uuid":  # a single loss has no interval
            rows[-1] |= {"low": 2.9 - 2 * share, "high": 3.2 - 2 * share}
    return rows


def pair_rows(tokens: int) -> list[dict[str, Any]]:
    common = {"method": "federated", "client": "macro", "metric": "difference", "seed": 0, "tokens": tokens}
    window = common | {"baseline": "window-only", "n": 30, "clients": 3}
    drop = {"method": "federated", "baseline": "local-only", "metric": "aggregation_drop_pp"}
    drop |= {"seed": 0, "tokens": tokens}
    return [
        window | {"of": "nats_per_token", "value": -0.87, "low": -1.2, "high": -0.5, "verdict": "better"},
        window | {"of": "candidates", "value": 0.41, "low": 0.27, "high": 0.6, "p": 1e-5, "verdict": "better"},
        common
        | {"baseline": "local-only", "n": 20, "clients": 2, "of": "candidates", "value": -0.05}
        | {"low": -0.15, "high": 0.0, "p": 0.5, "verdict": "no clear difference"},
        drop | {"client": "passkey", "value": 10.0, "n": 10, "low": 0.0, "high": 30.0},
        drop | {"client": "date|name", "value": 0.0, "n": 10, "low": -30.8, "high": 30.8},
        drop | {"client": "macro", "value": 5.0, "n": 20, "low": 0.0, "high": 15.0},
    ]


def rows_at(tokens: int) -> list[dict[str, Any]]:
    rows = [row for arm, right in RIGHT.items() for row in arm_rows(arm, right, tokens)]
    return rows + pair_rows(tokens)


def round_row(number: int, **changed: dict[str, Any]) -> dict[str, Any]:
    """A row of `rounds.jsonl`; `changed` holds, by client, what differs from a client that counted."""
    clients = []
    for place, name in enumerate(["date|name", "passkey", "uuid"]):
        client = {
            "name": name,
            "down_bytes": 1_706_800,
            "status": "ok",
            "loss": 4.0 - number - place / 10,
            "seconds_s": 10.5,
            "num_examples": 40,
            "steps": 8,
            "up_bytes": 1_706_912,
        }
        clients.append(client | changed.get(name.replace("|", "_"), {}))
    metrics = {"train_loss": 4.0 - number, "validation_loss": 4.5 - number}
    facts = {"round": number, "metrics": metrics, "updated": True, "refused": {}, "seconds_s": 21.25}
    return {**facts, "clients": clients}


def make_run(folder: Path) -> Run:
    run = Run.at(folder)
    run.write_json("config.json", CONFIG)
    run.write_json("environment.json", ENVIRONMENT)
    run.write_json("partition.json", PARTITION)
    run.append_jsonl("rounds.jsonl", round_row(1, uuid={"status": "empty", "num_examples": 0}))
    lost = {"status": "lost", "reason": "lost"}
    refused = {"status": "refused", "reason": "non-finite", "up_bytes": 1_706_912}
    second = round_row(2, uuid=lost, date_name=refused) | {"refused": {"non-finite": 1}}
    run.append_jsonl("rounds.jsonl", second)
    run.append_jsonl("arms/local-only/rounds.jsonl", round_row(1))
    run.append_jsonl("arms/local-only/rounds.jsonl", round_row(2))
    save_file(RULES, run.folder("final") / "params.safetensors")
    run.write_json("results/needles.json", {"rows": rows_at(320)})
    return run
