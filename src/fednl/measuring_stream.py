"""Measures a stream of tasks: the questions of every finished task, with the rules as they were after each task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fednl.answers import AFTER, OUTCOMES, earlier, keep
from fednl.arms import TRAINED, VIEWS, inside, make_algorithm, ranks_of
from fednl.config import Config
from fednl.data.stream import Stream
from fednl.evaluation.outcomes import Outcome, unlike_questions
from fednl.evaluation.stream import stream_rows
from fednl.federation.checkpoint import load_round
from fednl.federation.inline import Pool
from fednl.federation.lora_ranks import rules_by_client
from fednl.federation.params import Params
from fednl.measuring import OnEvent, score_arm
from fednl.runs import Run

NAME = "stream"


def measure_stream(run: Run, config: Config, pool: Pool, facts: Mapping[str, Any], on_event: OnEvent) -> None:
    """Answers, after each task, the questions of the tasks so far; writes `results/stream.json`.

    Nothing is done without a stream. What is measured of each arm is on disk when it is done; the answers after the
    last task are those of the run's own results.

    Args:
        run: the run, trained and measured.
        config: its settings.
        pool: who does the work.
        facts: what a client said of its data.
        on_event: is told what happens.

    Raises:
        FednlError: something went wrong in a job, or a checkpoint of a task's end is not there.
    """
    if not config.tasks.order:
        return
    folder = run.folder("results")
    final = earlier(folder / f"{config.data.task}{OUTCOMES}")
    clients = tuple(dict.fromkeys(row["client"] for row in facts["partition"]))
    stream = Stream(config.tasks, clients)
    path = folder / f"{NAME}{OUTCOMES}"
    found = earlier(path, on_event)
    arms: dict[str, list[list[Outcome]]] = {}
    for arm in [arm for arm in config.evaluation.arms if _shows_the_rules(arm) and arm in final]:
        answering = dict.fromkeys(outcome.client for outcome in final[arm])
        for place, round in enumerate(config.tasks.last_rounds[:-1], 1):
            tasks = {client: stream.tasks_of(client)[:place] for client in answering}
            due = [outcome for outcome in final[arm] if outcome.task in tasks[outcome.client]]
            asked = {client: sum(outcome.client == client for outcome in due) for client in answering}
            key = f"{arm}{AFTER}{place}"
            if len(found.get(key, [])) != len(due) or unlike_questions(due, found[key]):
                rules = _rules_after(run, config, VIEWS[arm].rules, round, list(asked))
                found[key] = score_arm(pool, arm, rules, asked, on_event, tasks, f", after task {place}")
                keep(path, found)
            arms.setdefault(arm, []).append(found[key])
        arms.setdefault(arm, []).append(final[arm])
    orders = {client: stream.tasks_of(client) for client in clients}
    rows = stream_rows(arms, orders, seed=config.run.seed, tokens=config.data.tokens)
    run.write_json(f"results/{NAME}.json", {"rows": rows, "orders": orders})


def _shows_the_rules(arm: str) -> bool:
    """Whether an arm answers with rules that were trained here, and with nothing taken away from them."""
    view = VIEWS[arm]
    return view.rules in TRAINED and view.prompt == "prompt_ids" and not view.zeroed


def _rules_after(run: Run, config: Config, rules: str, round: int, clients: list[str]) -> dict[str, Params]:
    """Each client's rules as they were after a round: the shared ones, of its rank, and its own where it has some."""
    checkpoint, algorithm = load_round(run.path / inside(rules, "checkpoints"), round), make_algorithm(config, rules)
    ranks = ranks_of(config, rules)
    return rules_by_client(algorithm, checkpoint.params, checkpoint.client_states, clients, ranks)
