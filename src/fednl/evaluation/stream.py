"""What a stream of tasks leaves behind: every task after every task, forgetting, backward transfer. Imports no torch.

A row of `results/stream.json` is as in `fednl.evaluation.rows`, with `task` (the place in each client's own order,
from 1) and `after` (how many tasks were done when it was asked). The rows `forgetting` and `backward_transfer` have
`of`, the metric they are about, in whose unit they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fednl.errors import DataError
from fednl.evaluation.measures import METRICS
from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.rows import CHANCE, MACRO, Row
from fednl.evaluation.statistics import LEVEL, Difference, macro_difference, macro_mean, told_ends

FORGETTING, BACKWARD_TRANSFER = "forgetting", "backward_transfer"
SUMMARIES = (FORGETTING, BACKWARD_TRANSFER)
STREAM_METRICS = ("candidates", "nats_per_token")

Table = Mapping[int, Mapping[int, Mapping[str, Sequence[float]]]]
"""after -> task -> client -> outcomes in the order of the questions."""


def stream_rows(
    arms: Mapping[str, Sequence[Sequence[Outcome]]],
    orders: Mapping[str, Sequence[str]],
    *,
    seed: int,
    tokens: int,
    resamples: int = 10_000,
) -> list[Row]:
    """Makes the rows of a stream: how well each task is answered after each, and what came of it.

    With a(t, j) the mean outcome of the j-th task's questions after t of T tasks, over clients that each count once:
    average forgetting is the mean over j < T of the best a(t, j) with j <= t < T, minus a(T, j); backward transfer is
    the mean over j < T of a(T, j) - a(j, j). For a loss the best is the lowest, and forgetting is what it rose by. A
    positive forgetting is a loss either way; a positive backward transfer is a gain in accuracy, and a loss in nats.
    Differences pair the same questions; their intervals take the best t as it is.

    Args:
        arms: arm -> for each t = 1 to T the outcomes after t tasks, of all clients on their first t tasks at least.
        orders: client -> its tasks in its order, T of them, at least two.
        seed: the run's seed; also names the bootstrap's random stream.
        tokens: prompt length.
        resamples: bootstrap resamples per interval.

    Raises:
        DataError: a task was asked with other questions after one task than after another.

    Source: forgetting: Chaudhry et al. 2018 (arXiv 1801.10112), section 4; backward transfer: Lopez-Paz and Ranzato
    2017 (arXiv 1706.08840), section 2; intervals ours.
    """
    rows: list[Row] = []
    for arm, afters in arms.items():
        for metric in STREAM_METRICS:
            table = _table(arm, afters, orders, metric)
            # A held-out client has no local-only rules, so an arm may be answered by fewer clients than there are.
            answering = len(table[1][1])
            common = {"method": arm, "client": MACRO, "seed": seed, "tokens": tokens, "clients": answering}
            rows += [common | row for row in _cells(table, metric, seed, resamples)]
            if len(afters) > 1:
                rows += [common | row for row in _summaries(table, metric, seed, resamples)]
    return rows


def _table(
    arm: str, afters: Sequence[Sequence[Outcome]], orders: Mapping[str, Sequence[str]], metric: str
) -> dict[int, dict[int, dict[str, list[float]]]]:
    table: dict[int, dict[int, dict[str, list[float]]]] = {}
    asked: dict[tuple[str, int], list[int]] = {}
    for after, outcomes in enumerate(afters, 1):
        for outcome in sorted(outcomes, key=lambda one: (one.client, one.index)):
            task = list(orders[outcome.client]).index(outcome.task) + 1
            if task <= after:
                clients = table.setdefault(after, {}).setdefault(task, {})
                clients.setdefault(outcome.client, []).append(float(getattr(outcome, METRICS[metric].field)))
        for task, clients in table[after].items():
            for client in clients:
                found = sorted(
                    one.index for one in outcomes if (one.client, one.task) == (client, orders[client][task - 1])
                )
                if asked.setdefault((client, task), found) != found:
                    raise DataError(
                        f'arm "{arm}" was asked other questions of client "{client}" after {after} tasks than before: '
                        "measure the run again."
                    )
    return table


def _cells(table: Table, metric: str, seed: int, resamples: int) -> list[Row]:
    counted = METRICS[metric].kind == "share"
    rows = []
    for after, tasks in table.items():
        for task, clients in sorted(tasks.items()):
            interval = macro_mean(clients, seed, LEVEL, resamples, counted)
            row: Row = {"value": interval.value, "n": interval.n, **told_ends(interval, None if counted else clients)}
            rows.append({"metric": metric, "after": after, "task": task} | row)
            if counted:
                rows[-1] |= {"correct": int(sum(map(sum, clients.values()))), "chance": CHANCE}
    return rows


def _summaries(table: Table, metric: str, seed: int, resamples: int) -> list[Row]:
    last = max(table)
    sign = 1.0 if METRICS[metric].higher_is_better else -1.0
    final: dict[str, list[float]] = {}
    best: dict[str, list[float]] = {}
    just_after: dict[str, list[float]] = {}
    for task in range(1, last):
        top = max(range(task, last), key=lambda after: (sign * _macro(table[after][task]), -after))
        for client, outcomes in table[last][task].items():
            final.setdefault(client, []).extend(outcomes)
            best.setdefault(client, []).extend(table[top][task][client])
            just_after.setdefault(client, []).extend(table[task][task][client])
    shares = METRICS[metric].kind == "share"
    forgetting = macro_difference(*((best, final) if sign > 0 else (final, best)), seed, LEVEL, resamples, shares)
    transfer = macro_difference(final, just_after, seed, LEVEL, resamples, shares)
    losses = None if shares else final
    return [_summary(FORGETTING, metric, forgetting, losses), _summary(BACKWARD_TRANSFER, metric, transfer, losses)]


def _summary(name: str, metric: str, gap: Difference, losses: Mapping[str, Sequence[float]] | None) -> Row:
    return {"metric": name, "of": metric, "value": gap.mean, "n": gap.n, **told_ends(gap, losses)}


def _macro(clients: Mapping[str, Sequence[float]]) -> float:
    return sum(sum(outcomes) / len(outcomes) for outcomes in clients.values()) / len(clients)
