"""What a run says of how its updates travelled, how they became one, and what was spent on hiding them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fednl.federation.algorithms import ALGORITHMS
from fednl.report.recorded import section
from fednl.report.words import escape, number


def exchange_lines(config: Mapping[str, Any]) -> list[str]:
    """Says what the traffic, the rule of combining, the algorithm and privacy add to plain averages of float32 numbers.

    Args:
        config: the run's `config.json`.
    """
    traffic, combine, privacy = (section(config, name) for name in ("traffic", "combine", "privacy"))
    lines = []
    forms = (traffic.get("up", "float32"), traffic.get("content", "values"), traffic.get("down", "float32"))
    if forms != ("float32", "values", "float32"):
        lines.append(f"Traffic: {escape(forms[0])} {escape(forms[1])} up, {escape(forms[2])} down")
    words = [f"weights {escape(combine['weights'])}"] if combine.get("weights", "examples") != "examples" else []
    words += [f"{key} {combine[key]:g}" for key in ("norm-cap", "max-examples") if combine.get(key)]
    if combine.get("rule", "mean") != "mean":
        words = [f"{escape(combine['rule'])} against {combine.get('attackers', '?')} attackers", *words]
    if words:
        lines.append(f"Combined by: {', '.join(words)}")
    name = section(config, "federation").get("algorithm")
    if name in ALGORITHMS and ALGORITHMS[name].traits.passes_on:
        lines.append(f"Passed on: {escape(name)} hands what a client learned of a task to every other client, as it is")
    hidden = _hidden(privacy)
    return lines + ([f"Privacy: {', '.join(hidden)}"] if hidden else [])


def exchange_notes(arm: str, rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says what an arm's rounds tell of container bytes, of clients shortened to the cap, and of epsilon.

    Args:
        arm: the arm's words for a reader, escaped.
        rounds: rows of `rounds.jsonl`.
    """
    clients = [client for row in rounds for client in row.get("clients", [])]
    parts = []
    for way in ("up", "down"):
        pairs = [(c[f"{way}_container_bytes"], c[f"{way}_bytes"]) for c in clients if f"{way}_container_bytes" in c]
        if total := sum(size for _, size in pairs):
            parts.append(f"{100 * sum(container for container, _ in pairs) / total:.1f}% of the bytes {way}")
    notes = [f"Names, shapes and headers, {arm}: {' and '.join(parts)}."] if parts else []
    capped = [row["metrics"]["capped_clients"] for row in rounds if "capped_clients" in row.get("metrics", {})]
    if capped:
        notes.append(f"Changes shortened to the norm cap, {arm}: {number(int(sum(capped)))} in {len(capped)} rounds.")
    spent = [row["metrics"]["epsilon"] for row in rounds if "epsilon" in row.get("metrics", {})]
    if spent:
        notes.append(f"Epsilon, {arm}: {spent[0]:.3g} after the first of these rounds, {spent[-1]:.3g} after the last.")
    return notes


def _hidden(privacy: Mapping[str, Any]) -> list[str]:
    words = []
    if privacy.get("mode", "none") != "none":
        kind = "adaptive clip from" if privacy.get("adaptive-clip") else "clip"
        words.append(f"{escape(privacy['mode'])} noise of {privacy.get('noise-multiplier', '?')} clips")
        words.append(f"{kind} {privacy.get('clip', '?')}, delta {privacy.get('delta', '?')}, unit one client")
        words.append("each trained arm spends epsilon of its own")
        words.append("what was measured on validation data is not covered")
        if "noise-seed" in privacy:
            words.append("simulation: the noise can be computed from the settings")
    if privacy.get("secure"):
        words.append(f"masked sums within {privacy.get('secure-range', '?')}")
    if privacy.get("min-examples", 1) > 1:
        words.append(f"clients with fewer than {privacy['min-examples']} examples share nothing")
    return words
