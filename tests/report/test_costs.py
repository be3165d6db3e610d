"""What an arm cost until it was about as good as it got."""

from __future__ import annotations

from typing import Any

from fednl.report.costs import cost_lines


def rounds(accuracies: list[float | None], steps: int, cpu_s: float, up: int) -> list[dict[str, Any]]:
    clients = [
        {"name": name, "num_examples": n, "steps": steps, "cpu_s": cpu_s, "up_bytes": up}
        for name, n in (("a", 3), ("b", 50))
    ]
    rows = [
        {"round": i, "metrics": {} if value is None else {"validation_accuracy": value}, "clients": clients}
        for i, value in enumerate(accuracies, 1)
    ]
    rows[0] = {**rows[0], "clients": [{**c, "steps": 0, "cpu_s": 1.0, "up_bytes": 10 * up} for c in clients]}
    return rows


def test_costs_run_up_to_the_first_round_within_a_point_of_the_best() -> None:
    first = rounds([0.5, 0.79, 0.8, 0.7], steps=5, cpu_s=2.0, up=1000)
    heading, table, note = cost_lines({"one": first, "no validation": rounds([None, None], 5, 2.0, 1)}, batch=4)
    line = [cell.strip() for cell in table.splitlines()[2].split("|")[1:-1]]
    # Round 2: stage 1 of two clients at 1 s and 20 kB, then 10 steps at 2 s a client and 2 kB. A client with 3 examples
    # takes batches of 3; a round without steps reads every example.
    assert line == ["one", "80.0%", "round 2 of 4", "6.0", "10", str(53 + 5 * 3 + 5 * 4), "0.40", "0.022 MB", "14.0"]
    assert len(table.splitlines()) == 3
    assert "within 1 pp" in heading and "validation and loading are not in them" in note


def test_without_accuracies_there_is_nothing_to_say() -> None:
    assert cost_lines({"a": rounds([None], 5, 1.0, 1)}, 4) == []
