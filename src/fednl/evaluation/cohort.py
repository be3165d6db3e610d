"""How unequally clients fare: the worst of them, the spread, and head, middle and tail of a long tail.

A row is as in `fednl.evaluation.rows`; its `client` is one of `COHORT`, and `of` names the clients, or kinds of
data, behind it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fednl.evaluation.statistics import LEVEL, macro_mean, told_ends

WORST, SPREAD = "worst", "spread"
COHORT = (WORST, SPREAD, "head", "middle", "tail")


def cohort_rows(
    clients: Mapping[str, Sequence[float]],
    groups: Mapping[str, Sequence[str]],
    *,
    shares: bool,
    seed: int,
    resamples: int = 10_000,
    kinds: Mapping[str, Sequence[float]] | None = None,
) -> list[dict[str, Any]]:
    """Makes the rows of one arm and metric; none for a single client.

    The worst client is picked by the very outcomes that give its value, so its value leans to the bad side, more so
    the fewer questions a client has; its interval and the spread's lack, for that reason, are no test.

    Args:
        clients: client -> its outcomes, at least one each.
        groups: `head`, `middle` and `tail` -> clients or kinds of data; those without outcomes are left out.
        shares: whether outcomes are shares, where more is better; else they are losses.
        seed: names the bootstrap's random stream.
        resamples: bootstrap resamples per interval.
        kinds: kind of data -> its outcomes, where the groups are of these.

    Source: ours; the worst client as in agnostic federated learning (arXiv 1902.00146), as a measure only.
    """
    if len(clients) < 2:
        return []
    means = {client: sum(outcomes) / len(outcomes) for client, outcomes in clients.items()}
    ranked = sorted(means, key=lambda client: (means[client] if shares else -means[client], client))
    total = sum(map(len, clients.values()))
    rows: list[dict[str, Any]] = [_over(WORST, ranked[:1], clients, shares, seed, resamples)]
    rows.append({"client": SPREAD, "of": [ranked[0], ranked[-1]], "n": total})
    rows[-1]["value"] = abs(means[ranked[-1]] - means[ranked[0]])
    outcomes = clients if kinds is None else kinds
    for group, names in groups.items():
        found = [name for name in names if name in outcomes]
        if found:
            rows.append(_over(group, found, outcomes, shares, seed, resamples))
    return rows


def _over(
    name: str,
    members: Sequence[str],
    clients: Mapping[str, Sequence[float]],
    shares: bool,
    seed: int,
    resamples: int,
) -> dict[str, Any]:
    own = {member: clients[member] for member in members}
    interval = macro_mean(own, seed, LEVEL, resamples, shares)
    row: dict[str, Any] = {"client": name, "of": list(members), "value": interval.value, "n": interval.n}
    return row | told_ends(interval, None if shares else own)
