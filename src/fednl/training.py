"""The main job: settings, data, backbone and the round loop become a run; the only place where all parts meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fednl import errors
from fednl.arms import POOLED, TRAINED, VIEWS, trained_arms, training_of
from fednl.config import Config
from fednl.errors import CheckpointError, FednlError, Interrupted, SettingsError
from fednl.evaluation.needles import METRICS, result_rows
from fednl.evaluation.outcomes import Outcome, load_outcomes, save_outcomes
from fednl.federation.checkpoint import load_newest, read_tensors
from fednl.federation.inline import InlinePool, Pool
from fednl.federation.loop import run_rounds
from fednl.federation.params import Params, personal, select
from fednl.federation.pool import Job, Result, WorkerPool
from fednl.federation.wire import pack, unpack
from fednl.federation.workers import ProcessTransport
from fednl.runs import Run, environment

OnEvent = Callable[[Mapping[str, Any]], None]


def train(config: Config, path: Path | None = None, on_event: OnEvent = lambda event: None) -> Run:
    """Trains rules federally, measures every arm that the settings ask for, and leaves it all in a folder.

    Args:
        config: the settings.
        path: the run's folder, absent or empty; None makes a new one in `run.out`.
        on_event: is told what happens, for a display (`fednl.progress`).

    Returns:
        The run; `fednl.load(run.path)` gives the trained model.

    Raises:
        FednlError: something in the settings, the data or the backbone; the sentence says what and how to mend it.
        Interrupted: Ctrl-C; what was done is saved, `resume` goes on.
    """
    run = Run.create(Path(config.run.out), "run") if path is None else Run.at(Path(path))
    run.write_json("config.json", config.to_dict())
    run.write_json("environment.json", environment())
    return _execute(run, config, on_event)


def resume(path: Path | str, on_event: OnEvent = lambda event: None) -> Run:
    """Goes on with a run where it stopped: rounds from the newest checkpoint, then the arms not yet measured.

    Args:
        path: the run's folder.
        on_event: is told what happens.

    Returns:
        The run, with the same bits as if it had never stopped.

    Raises:
        SettingsError: the folder is no run.
        FednlError: as `train`.
    """
    run = Run.open(Path(path))
    return _execute(run, config_of(run), on_event)


def evaluate(
    path: Path | str,
    task: str | None = None,
    on_event: OnEvent = lambda event: None,
    overrides: Sequence[str] = (),
) -> Run:
    """Measures a trained run's rules again, under its own settings or others (longer prompts, say).

    Args:
        path: the run's folder.
        task: what to measure; None is the run's own task.
        on_event: is told what happens.
        overrides: `"section.key=value"` each; only `[data]`, `[evaluation]` and `memory.window-tokens` may change.

    Returns:
        The run; the rows are in `results/TASK.json`, or `results/TASK-TOKENS.json` for another length.

    Raises:
        SettingsError: the folder is no run, or an override touches what was trained.
    """
    run = Run.open(Path(path))
    own = config_of(run)
    config = own.with_overrides(overrides)
    if task is not None:
        config = config.with_overrides([f"data.task={task}"])
    for section in ("backbone", "lora", "training", "federation", "run", "memory"):
        mine, theirs = getattr(own, section), getattr(config, section)
        if section == "memory":
            theirs = theirs.model_copy(update={"window_tokens": mine.window_tokens})
        if mine != theirs:
            raise SettingsError(f"[{section}] was fixed when {path} was trained; change [data] or [evaluation] only.")
    missing = [name for name in trained_arms(config) if not _finished(run, name)]
    if missing:
        raise SettingsError(
            f"{path} has no finished rules for {', '.join(missing)}: run `fednl train --resume {path}` first, or "
            "leave out the arms that need them."
        )
    name = config.data.task if config.data.tokens == own.data.tokens else f"{config.data.task}-{config.data.tokens}"
    with _pool(run, config) as pool:
        _measure(run, config, pool, _describe(pool), name, on_event, afresh=True)
    return run


def partition_rows(config: Config) -> list[dict[str, Any]]:
    """Lists who holds what under these settings: a row per client and split, with counts and hashes, no text."""
    from fednl.client import handlers

    pool = InlinePool(handlers(config))
    rows: list[dict[str, Any]] = _describe(pool)["partition"]
    return rows


def config_of(run: Run) -> Config:
    """The settings a run was made with."""
    return Config.from_dict(run.read_json("config.json"), str(run.path / "config.json"))


def _execute(run: Run, config: Config, on_event: OnEvent) -> Run:
    on_event({"event": "phase", "name": "loading the backbone and making the data"})
    with _pool(run, config) as pool:
        facts = _describe(pool)
        run.write_json("partition.json", {"rows": facts["partition"], "backbone": facts["identity"]})
        for name in trained_arms(config):
            _train_arm(run, config, pool, facts, name, on_event)
        _measure(run, config, pool, facts, config.data.task, on_event)
    return run


@contextmanager
def _pool(run: Run, config: Config) -> Iterator[Pool]:
    """Whoever does the work: this process, or `parallel-clients` worker processes."""
    workers = config.federation.parallel_clients
    if workers == 1:
        from fednl.client import handlers

        yield InlinePool(handlers(config))
        return
    run.write_json("workers.json", config.to_dict())
    pool = WorkerPool("fednl.client", [str(run.path / "workers.json")], workers)
    try:
        yield pool
    finally:
        pool.close()
        (run.path / "workers.json").unlink(missing_ok=True)


def _train_arm(run: Run, config: Config, pool: Pool, facts: Mapping[str, Any], name: str, on_event: OnEvent) -> None:
    """Runs the rounds of one arm, or what is left of them."""
    from fednl.client import make_algorithm

    kind = TRAINED[name]
    if _finished(run, name):
        return
    training = training_of(config, name)
    examples = {
        row["client"]: row["n"]
        for row in facts["partition"]
        if row["split"] == "train" and row["client"] not in config.data.hold_out_clients
    }
    clients = {POOLED: sum(examples.values())} if kind.pooled else examples
    settings = config.federation
    if kind.pooled:
        settings = settings.model_copy(update={"clients_per_round": 0, "quorum": 1})

    def tell(event: Mapping[str, Any]) -> None:
        on_event({"arm": name, **event})

    def validate(round: int, params: Params) -> dict[str, float]:
        jobs = [Job("validate", {"arm": name, "client": c}, (pack(params),)) for c in sorted(examples)]
        answers = [_answer(result) for result in pool.map(jobs)]
        return {"loss": sum(a["loss"] for a in answers) / len(answers)}

    on_event({"event": "phase", "name": f"training: {name}", "arm": name})
    transport = ProcessTransport(pool, clients, {"arm": name})
    start = unpack(_do(pool, Job("start", {"setup": kind.setup})).blobs[0])[0]
    _write_descriptions(run, config, facts, kind.folder)
    run_rounds(
        make_algorithm(config, name),
        transport,
        start,
        settings,
        training,
        run,
        folder=kind.folder,
        seed=config.run.seed,
        on_event=tell,
        validate_round=validate if config.data.validation and name != "local-only" else None,
    )
    run.write_json(_inside(kind.folder, "finished.json"), {"rounds": training.rounds})


def _measure(
    run: Run, config: Config, pool: Pool, facts: Mapping[str, Any], name: str, on_event: OnEvent, afresh: bool = False
) -> None:
    """Answers every client's test questions in every arm, arm by arm, and writes outcomes and rows."""
    path = run.folder("results") / f"{name}.outcomes.jsonl"
    found: dict[str, list[Outcome]] = load_outcomes(path) if path.exists() and not afresh else {}
    with_test = [row["client"] for row in facts["partition"] if row["split"] == "test" and row["n"]]
    try:
        for arm in config.evaluation.arms:
            if arm in found:
                continue
            asked = with_test
            if VIEWS[arm].rules == "local-only":
                asked = [client for client in with_test if client not in config.data.hold_out_clients]
            found[arm] = _score_arm(run, config, pool, arm, asked, on_event)
            save_outcomes(path, found)
    except KeyboardInterrupt:
        raise Interrupted(
            f"Stopped while measuring; the rules are trained and saved: go on with `fednl train --resume {run.path}`."
        ) from None
    measured: dict[str, list[Outcome]] = {arm: found[arm] for arm in config.evaluation.arms if found.get(arm)}
    metrics = [m for m in METRICS if config.evaluation.answer != "letters" or m != "recall"]
    shared = {arm: shared_groups(config, VIEWS[arm].rules) for arm in measured if VIEWS[arm].rules in TRAINED}
    rows = result_rows(
        measured,
        seed=config.run.seed,
        tokens=config.data.tokens,
        shared={arm: groups for arm, groups in shared.items() if groups},
        metrics=metrics,
    )
    run.write_json(f"results/{name}.json", {"rows": rows})


def _score_arm(
    run: Run, config: Config, pool: Pool, arm: str, clients: Sequence[str], on_event: OnEvent
) -> list[Outcome]:
    rules = _rules_of(run, pool, VIEWS[arm].rules, clients)
    jobs = [Job("score", {"arm": arm, "client": client}, (pack(rules[client]),)) for client in clients]
    done, total = dict.fromkeys(clients, 0), len(clients) * config.data.test
    on_event({"event": "phase", "name": f"measuring: {arm}", "arm": arm, "total": total})

    def tell(job: Job, facts: dict[str, Any]) -> None:
        done[job.header["client"]] = facts["done"]
        on_event(
            {"event": "step", "arm": arm, "client": job.header["client"], "done": sum(done.values()), "total": total}
        )

    answers = {result.job.header["client"]: _answer(result) for result in pool.map(jobs, tell)}
    return [Outcome(**outcome) for client in clients for outcome in answers[client]["outcomes"]]


def _rules_of(run: Run, pool: Pool, rules: str, clients: Sequence[str]) -> dict[str, Params]:
    """The rules each client answers with: the shared ones, and its own where some are private."""
    if not rules:
        return {client: {} for client in clients}
    if rules == "start":
        start = unpack(_do(pool, Job("start", {"setup": "memory"})).blobs[0])[0]
        return dict.fromkeys(clients, start)
    folder = TRAINED[rules].folder
    params, _ = read_tensors(run.path / _inside(folder, "final") / "params.safetensors")
    checkpoint = load_newest(run.path / _inside(folder, "checkpoints"))
    states = {} if checkpoint is None else checkpoint.client_states
    return {client: personal(params, states.get(client, {})) for client in clients}


def shared_groups(config: Config, name: str) -> list[str]:
    """The groups of rules that cross the network in a trained arm, by name."""
    kind = TRAINED[name]
    if kind.pooled or kind.algorithm == "local-only":
        return []
    shared: Any = kind.shared or config.federation.shared
    groups = ["lora"] if kind.setup == "lora" else ["write", "gate", "projection"]
    if kind.setup == "memory" and config.lora.rank:
        groups.append("lora")
    names = {group: f"layers.0.memory.{group}.x" if group != "lora" else "layers.0.q_proj.lora_A" for group in groups}
    return [group for group, name in names.items() if select([name], shared)] or [str(s) for s in [shared]]


def _write_descriptions(run: Run, config: Config, facts: Mapping[str, Any], folder: str) -> None:
    """Says beside the trained params what they belong to, so that `fednl.load` can use them."""
    description: dict[str, Any] = {
        "backbone": facts["backbone"],
        "memory": config.memory.model_dump(by_alias=True, exclude={"start"}),
    }
    if config.lora.rank:
        description["lora"] = config.lora.model_dump(by_alias=True, exclude_none=True)
    if folder == "":
        for name in ("final", "best"):
            run.write_json(f"{name}/rules.json", description)


def _finished(run: Run, name: str) -> bool:
    return (run.path / _inside(TRAINED[name].folder, "finished.json")).exists()


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _describe(pool: Pool) -> dict[str, Any]:
    return _answer(_do(pool, Job("describe")))


def _do(pool: Pool, job: Job) -> Result:
    result = next(iter(pool.map([job])))
    _answer(result)
    return result


def _answer(result: Result) -> dict[str, Any]:
    """What a job gave; what went wrong in it becomes the error it was."""
    answer: dict[str, Any] = result.header["answer"]
    if result.header["status"] == "ok":
        return answer
    if result.header["status"] == "lost":
        raise FednlError(f"A worker process ended while it was at {result.job.op!r}; free memory and resume the run.")
    kind: Any = getattr(errors, answer["type"], None)
    if kind is not None and issubclass(kind, FednlError) and kind is not errors.MessageError:
        raise kind(answer["message"])
    raise CheckpointError(
        f"{answer['type']} at {answer.get('where', 'an unknown place')} while a worker was at {result.job.op!r}; "
        "this is a fault of fednl: please report it."
    )
