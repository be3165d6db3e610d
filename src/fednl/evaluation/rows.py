"""Turns the outcomes of a comparison into the rows of `results/TASK.json`. Imports no torch.

A row is `{method, client, metric, value, n, correct, low, high, chance, shared, seed, tokens}`; `method` is
the arm, and the client `macro` is the average over `clients` clients. What does not apply, or was not
measured, has no key. Rows on how unequally clients fare are those of `fednl.evaluation.cohort`.
`metric = "difference"` and `metric = "aggregation_drop_pp"` compare two arms on the same questions and have
`baseline`; a difference also has `of` (which metric), `verdict`, and `p`, of the exact test of a difference of
shares, or of macro-F1's by random swaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fednl.errors import DataError
from fednl.evaluation.cohort import cohort_rows
from fednl.evaluation.comparing import compared, compared_f1
from fednl.evaluation.f1 import f1_interval
from fednl.evaluation.measures import METRICS, NEEDLES
from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.shares import wilson
from fednl.evaluation.statistics import (
    LEVEL,
    Interval,
    bootstrap_mean,
    macro_difference,
    macro_mean,
    paired_bootstrap,
    told_ends,
)

Row = dict[str, Any]
Clients = Mapping[str, Sequence[Outcome]]

MACRO = "macro"
CHANCE = 0.25
"""Of guessing one of four candidates."""


def result_rows(
    arms: Mapping[str, Sequence[Outcome]],
    *,
    seed: int,
    tokens: int | None = None,
    shared: Mapping[str, Sequence[str]] | None = None,
    metrics: Sequence[str] = NEEDLES.metrics,
    pairs: Sequence[tuple[str, str]] = NEEDLES.pairs,
    chance: float = CHANCE,
    groups: Mapping[str, Sequence[str]] | None = None,
    resamples: int = 10_000,
) -> list[Row]:
    """Makes every row of a comparison: each arm per client and macro, paired differences, aggregation drop.

    Right or wrong comes with score intervals (Wilson's of a client, Newcombe's of paired arms, put together over
    clients), cross-entropies with a stratified bootstrap over the questions. All intervals are at 95%. `nats_per_token`
    averages each question's mean over its right candidate's tokens. When a difference is "better" or "worse" is said
    in `fednl.evaluation.comparing`; where losses are too few, or do not vary, there is neither interval nor verdict.

    Args:
        arms: arm -> its outcomes on all clients' questions; not modified. An arm without outcomes has no row.
        seed: the run's seed; also names the bootstrap's random stream.
        tokens: prompt length; None where prompts have no common one: rows then have no such key.
        shared: arm -> the groups of rules that crossed the network; leave an arm out where nothing did.
        metrics: names in `METRICS`, the right-or-wrong one first; leave `"recall"` out where an answer is a letter.
        pairs: which arms to compare, first minus second, over the clients that both were measured on; a pair
            without such a client is left out.
        chance: how often guessing is right.
        groups: `head`, `middle` and `tail` -> clients, or the kinds of data that outcomes name as their task, where
            training examples make a long tail.
        resamples: bootstrap resamples per interval.

    Raises:
        DataError: two arms were measured on different questions of a client, or a question is there twice.

    Source: metrics of arXiv 2605.16350, appendix C; intervals and pairing ours.
    """
    by_client = {arm: _by_client(arm, found) for arm, found in arms.items() if found}
    common: Row = {"seed": seed} | ({} if tokens is None else {"tokens": tokens})
    rows = []
    for arm, clients in by_client.items():
        facts: Row = dict(common)
        if shared and arm in shared:
            facts["shared"] = list(shared[arm])
        for metric in metrics:
            found = _arm_rows(arm, clients, metric, seed, resamples, groups or {})
            guessed: Row = {"chance": chance} if METRICS[metric].has_chance else {}
            rows += [row | (guessed if "low" in row else {}) | facts for row in found]
    for first, second in pairs:
        a, b = _paired(first, second, by_client)
        if a:
            named = {"method": first, "baseline": second, "client": MACRO, "metric": "difference"}
            rows += [named | _difference(a, b, metric, seed, resamples) | common for metric in metrics]
    local, federated = _paired("local-only", "federated", by_client)
    if local and METRICS[metrics[0]].has_chance:
        rows += [row | common for row in _aggregation_drop(local, federated, metrics[0], seed, resamples)]
    return rows


def leaks(rows: Sequence[Row]) -> bool:
    """Says whether questions are answered above chance without the events: then the prompts give them away.

    Args:
        rows: what `result_rows` made; without the arm `events-removed` the answer is False.
    """
    return any(
        row["method"] == "events-removed"
        and row["metric"] == "candidates"
        and row["client"] == MACRO
        and row["low"] > row["chance"]
        for row in rows
    )


def _by_client(arm: str, outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Client -> its outcomes in the order of the questions, which pairs them with another arm's."""
    clients: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        clients.setdefault(outcome.client, []).append(outcome)
    for client, found in clients.items():
        found.sort(key=lambda outcome: outcome.index)
        if len({outcome.index for outcome in found}) != len(found):
            raise DataError(f'arm "{arm}" has a question of client "{client}" twice: measure the run again.')
    return clients


def _paired(first: str, second: str, arms: Mapping[str, Clients]) -> tuple[Clients, Clients]:
    """The clients that both arms were measured on (a held-out client has no local-only rules), checked."""
    a, b = arms.get(first, {}), arms.get(second, {})
    both = [client for client in a if client in b]
    for client in both:
        asked, also = ([(outcome.index, outcome.gold) for outcome in arm[client]] for arm in (a, b))
        if asked != also:
            raise DataError(
                f'arms "{first}" and "{second}" were measured on different questions of client "{client}", '
                "so they cannot be compared: measure both again."
            )
    return {client: a[client] for client in both}, {client: b[client] for client in both}


def _values(clients: Clients, metric: str) -> dict[str, list[float]]:
    return {
        client: [float(getattr(outcome, METRICS[metric].field)) for outcome in found]
        for client, found in clients.items()
    }


def _answers(clients: Clients) -> dict[str, list[tuple[int, int]]]:
    return {client: [(outcome.gold, outcome.chosen) for outcome in found] for client, found in clients.items()}


def _arm_rows(
    arm: str, clients: Clients, metric: str, seed: int, resamples: int, groups: Mapping[str, Sequence[str]]
) -> list[Row]:
    if METRICS[metric].kind == "f1":
        whole = f1_interval(_answers(clients), seed, resamples=resamples)
        return [_row(arm, MACRO, metric, whole, {}) | {"clients": len(clients)}]
    values = _values(clients, metric)
    counted = METRICS[metric].kind == "share"
    rows = []
    for client, found in values.items():
        if counted:
            correct = int(sum(found))
            interval = Interval(correct / len(found), *wilson(correct, len(found)), len(found))
        else:
            interval = bootstrap_mean(found, seed, resamples=resamples)
        rows.append(_row(arm, client, metric, interval, {client: found}))
    macro = macro_mean(values, seed, resamples=resamples, shares=counted)
    rows.append(_row(arm, MACRO, metric, macro, values) | {"clients": len(values)})
    kinds = _values(_by_kind(clients), metric)
    own = kinds if any(name in kinds for names in groups.values() for name in names) else None
    cohort = cohort_rows(values, groups, shares=counted, seed=seed, resamples=resamples, kinds=own)
    return rows + [{"method": arm, "metric": metric} | row for row in cohort]


def _by_kind(clients: Clients) -> dict[str, list[Outcome]]:
    kinds: dict[str, list[Outcome]] = {}
    for outcome in (one for found in clients.values() for one in found if one.task):
        kinds.setdefault(outcome.task, []).append(outcome)
    return kinds


def _row(arm: str, client: str, metric: str, interval: Interval, outcomes: Mapping[str, Sequence[float]]) -> Row:
    row: Row = {"method": arm, "client": client, "metric": metric, "value": interval.value, "n": interval.n}
    if METRICS[metric].kind == "share":
        row["correct"] = int(sum(map(sum, outcomes.values())))
    return row | told_ends(interval, outcomes if METRICS[metric].kind == "loss" else None)


def _difference(a: Clients, b: Clients, metric: str, seed: int, resamples: int) -> Row:
    kind = METRICS[metric].kind
    if kind == "f1":
        found = compared_f1(_answers(a), _answers(b), seed, resamples=resamples)
    else:
        x, y = _values(a, metric), _values(b, metric)
        found = compared(x, y, seed, shares=kind == "share", resamples=resamples)
    row: Row = {"of": metric, "value": found.gap.mean, "n": found.gap.n, "clients": len(a), **found.ends}
    told = {"verdict": found.verdict, "p": found.p}
    return row | {key: value for key, value in told.items() if value is not None}


def _aggregation_drop(local: Clients, federated: Clients, metric: str, seed: int, resamples: int) -> list[Row]:
    """What sharing costs a client: accuracy of its own rules minus that of the federated ones, in points."""
    x, y = _values(local, metric), _values(federated, metric)
    gaps = {client: paired_bootstrap(x[client], y[client], seed, LEVEL, resamples, True) for client in x}
    gaps[MACRO] = macro_difference(x, y, seed, LEVEL, resamples, True)
    named = {"method": "federated", "baseline": "local-only", "metric": "aggregation_drop_pp"}
    return [
        named
        | {
            "client": client,
            "value": 100 * gap.mean,
            "n": gap.n,
            "low": 100 * gap.low,
            "high": 100 * gap.high,
        }
        for client, gap in gaps.items()
    ]
