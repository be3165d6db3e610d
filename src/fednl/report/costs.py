"""What it cost to train each arm until it was about as good as it got: CPU-seconds, steps, examples, bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fednl.report.words import escape, markdown_table, megabytes, number

WITHIN = 0.01
"""How close to its own best validation accuracy an arm must come."""


def cost_lines(arms: Mapping[str, Sequence[Mapping[str, Any]]], batch: int) -> list[str]:
    """Gives the costs of each arm up to the first round within one point of its own best validation accuracy.

    Client CPU-seconds are the clients' own, over all clients and all rounds so far, a round without steps included;
    validation is not in them.

    Args:
        arms: an arm's words -> its rounds, as `rounds.jsonl` has them.
        batch: `[training] batch`.

    Returns:
        A heading, a table and what stands behind it; nothing where no arm has validation accuracies.
    """
    body = [_line(arm, rounds, batch) for arm, rounds in arms.items() if _accuracies(rounds)]
    if not body:
        return []
    head = ["trained", "best validation accuracy", "first within 1 pp", "CPU-s until then", "steps until then"]
    head += ["examples seen until then", "CPU-s per step", "up in all until then", "CPU-s of all rounds"]
    return [
        "### Cost until within 1 pp of the own best validation accuracy",
        markdown_table(head, body),
        "CPU-s: processor seconds of all clients together, as each measured its own part of a round; validation and "
        "loading are not in them. Examples seen: a step's batch, and each example that a round without steps read.",
    ]


def _accuracies(rounds: Sequence[Mapping[str, Any]]) -> list[float]:
    found = [row.get("metrics", {}).get("validation_accuracy") for row in rounds]
    return [value for value in found if value is not None]


def _line(arm: str, rounds: Sequence[Mapping[str, Any]], batch: int) -> list[str]:
    best = max(_accuracies(rounds))
    last = next(i for i, r in enumerate(rounds) if r["metrics"].get("validation_accuracy", -1.0) >= best - WITHIN)
    until = [client for row in rounds[: last + 1] for client in row.get("clients", [])]
    every = [client for row in rounds for client in row.get("clients", [])]
    steps = sum(client.get("steps", 0) for client in until)
    stepping = [client for client in every if client.get("steps")]
    per_step = sum(c.get("cpu_s", 0.0) for c in stepping) / max(1, sum(c["steps"] for c in stepping))
    return [
        escape(arm),
        f"{100 * best:.1f}%",
        f"round {rounds[last].get('round', last + 1)} of {len(rounds)}",
        _seconds(until),
        number(steps),
        number(sum(_examples(client, batch) for client in until)),
        f"{per_step:.2f}",
        megabytes([sum(client.get("up_bytes", 0) for client in until)]),
        _seconds(every),
    ]


def _examples(client: Mapping[str, Any], batch: int) -> int:
    """Examples that a client went through in a round."""
    held = int(client.get("num_examples", 0))
    return int(client.get("steps", 0)) * min(batch, held) or held


def _seconds(clients: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(client.get('cpu_s', 0.0) for client in clients):,.1f}"
