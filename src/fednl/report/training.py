"""How the training of each arm of a run went, read from its `rounds.jsonl`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fednl.errors import CheckpointError
from fednl.evaluation.settings import ARMS
from fednl.report.costs import cost_lines
from fednl.report.exchange import exchange_notes
from fednl.report.recorded import recorded, section
from fednl.report.words import escape, markdown_table, megabytes, number, where
from fednl.runs import Run


def training_lines(run: Run) -> list[str]:
    """Says how the training of each arm went: rounds, loss, seconds, bytes per direction, clients left out.

    Args:
        run: the run; an arm trained beside the federated rules has its own `rounds.jsonl` in a sub-folder.
    """
    config, _ = recorded(run, "config.json")
    planned = section(config, "training").get("rounds")
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
            notes += exchange_notes(escape(arm), rounds) + _worst(escape(arm), rounds[-1])
        if rounds and isinstance(last, int) and len(rounds) < last:
            notes.append(f"{last - len(rounds)} of {last} rounds of {escape(arm)} are missing in rounds.jsonl.")
        if isinstance(planned, int) and isinstance(last, int) and last < planned:
            done = f"{escape(arm)}: {last} of {planned} rounds are done"
            notes.append(f"Unfinished: {done}; continue with `fednl train --resume {run.path}`.")
    head = ["trained", "rounds", "training loss, first to last", "validation loss", "seconds"]
    head += ["up, per client and round", "down, per client and round", "up in all", "down in all"]
    costs = cost_lines(arms, int(section(config, "training").get("batch", 1)))
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


def _worst(arm: str, row: Mapping[str, Any]) -> list[str]:
    """Whose validation loss is the highest after the last round; nothing where it was not measured."""
    name, loss = row.get("validation_worst"), row.get("metrics", {}).get("validation_loss_worst")
    if not name:
        return []
    return [
        f"Highest validation loss of a client, {arm}: {escape(str(name))}, {'none' if loss is None else f'{loss:.3f}'}."
    ]


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
