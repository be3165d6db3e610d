"""Measures what was trained: every client's test questions, arm by arm, into `results/` of the run."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from fednl.answers import OUTCOMES, check_questions, earlier, keep
from fednl.arms import TRAINED, VIEWS, inside, make_algorithm, ranks_of
from fednl.config import Config
from fednl.data.long_tail import thirds
from fednl.data.tasks import not_read
from fednl.errors import CheckpointError, SettingsError
from fednl.evaluation.measures import MEASURES
from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.rows import result_rows
from fednl.evaluation.settings import ARMS
from fednl.federation.checkpoint import load_round, read_tensors
from fednl.federation.groups import shared_groups
from fednl.federation.inline import Pool
from fednl.federation.jobs import answer_of, do
from fednl.federation.lora_ranks import offered, rules_by_client
from fednl.federation.params import Params
from fednl.federation.pool import Job
from fednl.federation.wire import pack, unpack
from fednl.origin import FILE
from fednl.runs import Run

OnEvent = Callable[[Mapping[str, Any]], None]
_LONGEST = 40
# They change what is trained or how fast it is measured, not what a test question is.
_SAME_QUESTIONS = {f"data.{key}" for key in ("task", "train", "shortest", "validation", "questions")}
_SAME_QUESTIONS |= {"evaluation.arms", "evaluation.batch"}


def changed_settings(own: Config, config: Config) -> dict[str, Any]:
    """Gives the settings under which a run's rules meet other questions than the run's own, by `section.key`."""
    task = config.data.task
    then, now = own.to_dict(), config.to_dict()
    if task != own.data.task and config.task_settings is not None:  # of another task, its defaults are the usual ones
        then[task] = type(config.task_settings)().model_dump(mode="json", by_alias=True, exclude_none=True)
    same = _SAME_QUESTIONS | {f"data.{key}" for key in not_read(task)}
    if config.data.dirichlet_alpha and "data.dirichlet-alpha" not in same:
        # The kinds that a client is asked are in the shares of those that it trains on.
        same -= {"data.train"}
    return {
        f"{section}.{key}": value
        for section in ("data", "memory", "evaluation", task)
        for key, value in now.get(section, {}).items()
        if value != then[section].get(key) and f"{section}.{key}" not in same
    }


def results_name(task: str, changed: Mapping[str, Any]) -> str:
    """Names a results file so that other settings never overwrite the run's own: `needles-640-events-6`.

    What would not be told apart by its words (folders, which are left out, and long or strange text) ends in a digest.
    """
    parts = [task]
    for name, value in changed.items():
        key = name.partition(".")[2]
        whole = "-".join(map(str, value)) if isinstance(value, list) else str(value)
        text = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(whole).name)[:_LONGEST]
        if text != whole and name != "evaluation.clients":
            text += f"-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
        parts.append(text if key == "tokens" else f"{key}-{text or 'none'}")
    return "-".join(parts)


def measure(
    run: Run,
    config: Config,
    pool: Pool,
    facts: Mapping[str, Any],
    on_event: OnEvent,
    *,
    changed: Mapping[str, Any] | None = None,
    afresh: Collection[str] = (),
) -> None:
    """Answers the test questions in every arm not measured yet, and writes outcomes and rows.

    Each arm is on disk when it is done; arms measured before stay in the rows beside those asked for now.

    Args:
        run: the run, with the rules of its arms trained.
        config: what is measured, and in which arms.
        pool: who does the work.
        facts: what a client said of its data.
        on_event: is told what happens.
        changed: the settings that are not the run's own.
        afresh: arms that are measured again.

    Raises:
        CheckpointError: arms that are not measured again were asked other questions.
        FednlError: something went wrong in a job, or a file is damaged or cannot be written.
    """
    measured_of = MEASURES[config.data.task]
    name = results_name(config.data.task, changed or {})
    path = run.folder("results") / f"{name}{OUTCOMES}"
    asked = {arm: _asked(run, facts, arm, config.evaluation.clients) for arm in VIEWS}
    prompts = {row["client"]: row["sha256"] for row in facts["partition"] if row["split"] == "test" and row["n"]}
    answered = earlier(path, on_event)
    stay = {arm: outcomes for arm, outcomes in answered.items() if arm not in afresh}
    check_questions(path, stay, facts["questions"], _prompts_before(run, f"results/{name}.json"), prompts)
    found = {
        arm: outcomes
        for arm, outcomes in answered.items()
        if Counter(one.client for one in outcomes) == Counter(asked.get(arm, {}))
    }
    for arm in config.evaluation.arms:
        if arm in found and arm not in afresh:
            continue
        rules = _rules_of(run, config, pool, VIEWS[arm].rules, list(asked[arm]))
        found[arm] = score_arm(pool, arm, rules, asked[arm], on_event)
        keep(path, found)
    measured = {arm: found[arm] for arm in ARMS if found.get(arm)}
    groups = {arm: _shared(run, config, VIEWS[arm].rules) for arm in measured if VIEWS[arm].rules in TRAINED}
    rows = result_rows(
        measured,
        seed=config.run.seed,
        tokens=config.data.tokens,
        shared={arm: shared for arm, shared in groups.items() if shared},
        metrics=measured_of.metrics_of(config.evaluation.answer),
        pairs=measured_of.pairs,
        chance=1 / facts["candidates"],
        groups=_groups(config, facts),
    )
    other = {"changed": dict(changed)} if changed else {}
    run.write_json(f"results/{name}.json", {"rows": rows, "questions": prompts, **other})


def _prompts_before(run: Run, name: str) -> dict[str, str]:
    """What a results file says was asked: client -> SHA-256; nothing where it is missing, damaged or says nothing."""
    try:
        return dict(run.read_json(name).get("questions", {}))
    except CheckpointError:
        return {}


def _groups(config: Config, facts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Head, middle and tail by training examples, of kinds of data where clients hold several, else of clients."""
    if config.data.imbalance > 1 and facts.get("kinds"):
        return thirds(facts["kinds"])
    rows = facts["partition"]
    return thirds({row["client"]: row["n"] for row in rows if row["split"] == "train" and row["n"]})


def _asked(run: Run, facts: Mapping[str, Any], arm: str, clients: Collection[str]) -> dict[str, int]:
    """Which clients answer in an arm, and how many questions; one that did not train has no rules of its own."""
    tests = {row["client"]: row["n"] for row in facts["partition"] if row["split"] == "test" and row["n"]}
    if unknown := [client for client in clients if client not in tests]:
        raise SettingsError(
            f'[evaluation] clients names "{unknown[0]}", who has no test questions; choose from {", ".join(tests)}.'
        )
    tests = {client: n for client, n in tests.items() if not clients or client in clients}
    if VIEWS[arm].rules != "local-only":
        return tests
    rows = run.read_json(FILE)["rows"]
    trained = {row["client"] for row in rows if row["split"] == "train" and row["n"]}
    return {client: n for client, n in tests.items() if client in trained}


def score_arm(
    pool: Pool,
    arm: str,
    rules: Mapping[str, Params],
    asked: Mapping[str, int],
    on_event: OnEvent,
    tasks: Mapping[str, Sequence[str]] | None = None,
    when: str = "",
) -> list[Outcome]:
    """Has every client answer its questions in one arm.

    Args:
        pool: who does the work.
        arm: a name in `VIEWS`.
        rules: the rules that each client answers with.
        asked: client -> how many questions it will answer.
        on_event: is told what happens.
        tasks: in a stream, client -> the tasks that are asked; None asks all.
        when: what a display says of the rules, such as `", after task 1"`.

    Returns:
        The outcomes, client after client.

    Raises:
        FednlError: something went wrong in a job.
    """
    clients = list(asked)
    facts: dict[str, dict[str, Any]] = {client: {"arm": arm, "client": client} for client in clients}
    if tasks is not None:
        facts = {client: {**own, "tasks": list(tasks[client])} for client, own in facts.items()}
    jobs = [Job("score", facts[client], (pack(rules[client]),)) for client in clients]
    done, total = dict.fromkeys(clients, 0), sum(asked.values())
    on_event({"event": "phase", "name": f"measuring: {arm}{when}", "arm": arm, "total": total})

    def tell(job: Job, facts: dict[str, Any]) -> None:
        done[job.header["client"]] = facts["done"]
        on_event(
            {"event": "step", "arm": arm, "client": job.header["client"], "done": sum(done.values()), "total": total}
        )

    answers = {result.job.header["client"]: answer_of(result) for result in pool.map(jobs, tell)}
    return [Outcome(**outcome) for client in clients for outcome in answers[client]["outcomes"]]


def _rules_of(run: Run, config: Config, pool: Pool, rules: str, clients: Sequence[str]) -> dict[str, Params]:
    """The rules each client answers with: the shared ones, of its rank, and its own where some are private."""
    if not rules:
        return {client: {} for client in clients}
    if rules == "start":
        start, own = unpack(do(pool, Job("start", {"setup": "own"})).blobs[0])[0], make_algorithm(config, "federated")
        return {client: offered(own, start, client, config.federation.lora_ranks) for client in clients}
    path = run.path / inside(rules, "final/params.safetensors")
    params, header = read_tensors(path)
    algorithm, ranks = make_algorithm(config, rules), ranks_of(config, rules)
    travels = len(algorithm.shared(params)) + len(algorithm.given(params))
    if travels == len(params) and not algorithm.traits.keeps_own:
        return {client: offered(algorithm, params, client, ranks) for client in clients}
    folder = run.path / inside(rules, "checkpoints")
    try:
        states = load_round(folder, int(header.get("round", 0))).client_states
    except CheckpointError:
        raise CheckpointError(
            f"{folder} lacks round {header.get('round')}, where each client's own rules are: restore it, or delete "
            f"{run.path / inside(rules, 'finished.json')} and resume, which trains what is missing."
        ) from None
    return rules_by_client(algorithm, params, states, clients, ranks)


def _shared(run: Run, config: Config, rules: str) -> list[str]:
    """The groups of rules that crossed the network while these rules were trained."""
    algorithm = make_algorithm(config, rules)
    if TRAINED[rules].pooled or not algorithm.traits.shares:
        return []
    params, _ = read_tensors(run.path / inside(rules, "final/params.safetensors"))
    return shared_groups(algorithm, params)
