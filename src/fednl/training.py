"""The main job: settings, data, backbone and the round loop become a run; the only place where all parts meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fednl.answers import forget
from fednl.arms import (
    POOLED,
    TRAINED,
    adapters_hash,
    adapters_of,
    exchange_of,
    federation_of,
    inside,
    make_algorithm,
    trained_arms,
    training_of,
)
from fednl.config import Config
from fednl.data.tasks import not_read
from fednl.environment import environment
from fednl.errors import FednlError, Interrupted, SettingsError
from fednl.federation.accounting import check_accounting
from fednl.federation.inline import InlinePool, Pool
from fednl.federation.jobs import answer_of, do
from fednl.federation.loop import run_rounds
from fednl.federation.lora_ranks import rules_by_client
from fednl.federation.params import Params
from fednl.federation.pool import Job
from fednl.federation.record import Validation
from fednl.federation.wire import pack, unpack
from fednl.federation.workers import ProcessTransport
from fednl.measuring import changed_settings, measure
from fednl.measuring_stream import measure_stream
from fednl.origin import FILE, check_backbone, check_data, check_settings, origin
from fednl.overlap import check_unmet
from fednl.pools import described, working
from fednl.runs import Run
from fednl.stored_tasks import ask_for_like, keep, known

OnEvent = Callable[[Mapping[str, Any]], None]
_LOADING = {"event": "phase", "name": "loading the backbone and making the data"}
_UNENDED = (
    "one process trains all clients, which leaves a late one out but waits until it ends: set "
    "federation.parallel-clients = 2 or more to end one that hangs at its deadline"
)


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
            If no round was done yet, the folder is gone again.
        Interrupted: Ctrl-C; what was done is saved, `resume` goes on.
    """
    run = Run.create(Path(config.run.out), "run") if path is None else Run.at(Path(path))
    with run.locked():
        run.write_json("config.json", config.to_dict())
        run.write_json("environment.json", environment())
        try:
            return _execute(run, config, on_event)
        except Interrupted:
            raise
        except FednlError:
            if not (run.path / "rounds.jsonl").exists():
                run.discard()
            raise


def resume(path: Path | str, on_event: OnEvent = lambda event: None) -> Run:
    """Goes on with a run where it stopped: rounds from the newest checkpoint, then the arms not yet measured.

    Args:
        path: the run's folder.
        on_event: is told what happens.

    Returns:
        The run, with the same bits as if it had never stopped.

    Raises:
        SettingsError: the folder is no run, or its settings were changed.
        CheckpointError: its backbone, its data or its checkpoints are not what they were.
        FednlError: as `train`; or another process is at work on the run.
    """
    run = Run.open(Path(path))
    with run.locked():
        return _execute(run, config_of(run), on_event)


def evaluate(
    path: Path | str,
    task: str | None = None,
    on_event: OnEvent = lambda event: None,
    overrides: Sequence[str] = (),
    *,
    anew: bool = True,
) -> Run:
    """Measures a trained run's rules again, under its own settings or others (longer prompts, say).

    Args:
        path: the run's folder.
        task: what to measure; None is the run's own task.
        on_event: is told what happens.
        overrides: `"section.key=value"` each; only `[data]`, `[evaluation]`, the section of another task and
            `memory.window-tokens` may change.
        anew: whether arms that were measured under these settings are measured again.

    Returns:
        The run; the rows are in `results/TASK.json`, or `results/TASK-TOKENS.json` for another length.

    Raises:
        SettingsError: the folder is no run, an override touches what was trained, or questions that were trained on
            would be asked as a test.
        CheckpointError: the backbone is not what it was, nor the source that questions are drawn from, or arms that
            are not measured again were asked other questions.
    """
    run = Run.open(Path(path))
    own = config_of(run)
    check_settings(run, own)
    other = (
        [] if task is None else [f"data.task={task}", *(f"data.{key}={even}" for key, even in not_read(task).items())]
    )
    config = own.with_overrides([*other, *overrides])
    # A section that is new is fixed unless it is named here; an algorithm's and a task's are compared as they are read.
    free = {"data", "evaluation", "prefix", "algorithm", "task"}
    pairs = {name: (getattr(own, name), getattr(config, name)) for name in Config.model_fields if name not in free}
    pairs[config.federation.algorithm] = (own.method_settings, config.method_settings)
    if config.data.task == own.data.task:
        pairs[own.data.task] = (own.task_settings, config.task_settings)
    for section, (mine, theirs) in pairs.items():
        if section == "memory":
            theirs = theirs.model_copy(update={"window_tokens": mine.window_tokens})
        if mine != theirs:
            raise SettingsError(
                f"[{section.replace('_', '-')}] was fixed when {path} was trained; change only [data], [evaluation] or "
                "memory.window-tokens."
            )
    missing = [name for name in trained_arms(config) if not _finished(run, config, name)]
    if missing:
        raise SettingsError(
            f"{path} has no finished rules for {', '.join(missing)}: run `fednl train --resume {path}` first, or "
            "leave out the arms that need them."
        )
    on_event(_LOADING)
    try:
        with run.locked(), working(run, config) as pool:
            facts = described(pool, on_event)
            check_backbone(run, facts)
            changed = changed_settings(own, config)
            check_unmet(run, own, config, changed, pool, facts)
            measure(run, config, pool, facts, on_event, changed=changed, afresh=config.evaluation.arms if anew else ())
    except KeyboardInterrupt:
        raise Interrupted("Stopped while measuring; what was done is saved: run `fednl eval` again.") from None
    return run


def partition_rows(config: Config, on_event: OnEvent = lambda event: None) -> list[dict[str, Any]]:
    """Lists who holds what under these settings: a row per client and split, with counts and hashes, no text."""
    from fednl.worker import handlers

    on_event(_LOADING)
    rows: list[dict[str, Any]] = described(InlinePool(handlers(config)), on_event)["partition"]
    return rows


def config_of(run: Run) -> Config:
    """The settings a run was made with."""
    return Config.from_dict(run.read_json("config.json"), str(run.path / "config.json"))


def _execute(run: Run, config: Config, on_event: OnEvent) -> Run:
    try:
        config.check_training()
        check_settings(run, config)
        check_accounting(config.privacy)
        on_event(_LOADING)
        with working(run, config) as pool:
            facts = described(pool, on_event)
            check_backbone(run, facts)
            check_data(run, facts)
            run.write_json(FILE, origin(config, facts))
            to_train = [name for name in trained_arms(config) if not _finished(run, config, name)]
            if to_train and config.federation.parallel_clients == 1 and config.federation.seconds_to_wait(first=False):
                on_event({"event": "note", "text": _UNENDED})
            for name in to_train:
                _train_arm(run, config, pool, facts, name, on_event)
            measure(run, config, pool, facts, on_event)
            measure_stream(run, config, pool, facts, on_event)
    except KeyboardInterrupt:
        raise Interrupted(f"Stopped; what was done is saved: go on with `fednl train --resume {run.path}`.") from None
    return run


def _train_arm(run: Run, config: Config, pool: Pool, facts: Mapping[str, Any], name: str, on_event: OnEvent) -> None:
    """Runs the rounds of one arm, or what is left of them."""
    kind = TRAINED[name]
    examples = {
        row["client"]: row["n"]
        for row in facts["partition"]
        if row["split"] == "train" and row["client"] not in config.data.hold_out_clients
    }
    training = training_of(config, name, sum(map(bool, examples.values())))
    clients = {POOLED: sum(examples.values())} if kind.pooled else examples
    settings = federation_of(config, name)
    by_task = {task: {client: found[client] for client in examples} for task, found in facts.get("tasks", {}).items()}
    outdated = [name]

    def tell(event: Mapping[str, Any]) -> None:
        # Not before: whatever refuses to go on has done so by now, and its results stand.
        if event["event"] == "round-start" and outdated:
            forget(run, [outdated.pop()])
        on_event({"arm": name, **event})

    on_event({"event": "phase", "name": f"training: {name}", "arm": name})
    transport = ProcessTransport(pool, clients, {"arm": name})

    algorithm = make_algorithm(config, name)

    def validate(round: int, params: Params) -> Validation:
        states = transport.states()
        own = rules_by_client(algorithm, params, states, sorted(examples), settings.lora_ranks)
        jobs = [Job("validate", {"arm": name, "client": c}, (pack(rules),)) for c, rules in own.items()]
        # In the order of names, whoever answers first.
        told = {r.job.header["client"]: answer_of(r) for r in pool.map(jobs)}
        return Validation.of_clients(
            {client: told[client]["loss"] for client in own},
            {client: told[client]["correct"] for client in own if "correct" in told[client]},
        )

    start = unpack(do(pool, Job("start", {"setup": kind.setup})).blobs[0])[0]
    if not kind.folder:
        _write_descriptions(run, config, facts)
        start |= known(facts, start, on_event)
        if config.context_vectors.store == "near":
            ask_for_like(algorithm, facts, on_event)
    trained = run_rounds(
        algorithm,
        transport,
        start,
        settings,
        training,
        run,
        folder=kind.folder,
        seed=config.run.seed,
        on_event=tell,
        validate_round=validate if config.data.validation else None,
        milestones=config.tasks.last_rounds,
        exchange=exchange_of(config, name),
        adapters=adapters_hash(config, kind.setup),
        by_task={} if kind.pooled else by_task,
    )
    if not kind.folder:
        keep(facts, trained)
    run.write_json(inside(name, "finished.json"), {"rounds": training.rounds})


def _write_descriptions(run: Run, config: Config, facts: Mapping[str, Any]) -> None:
    """Says beside the trained params what they belong to, so that `fednl.load` can use them."""
    description: dict[str, Any] = {"backbone": facts["backbone"]}
    if "memory" in config.federation.adapters:
        description["memory"] = config.memory.model_dump(by_alias=True, exclude={"start"})
    for kind, settings in adapters_of(config, "own"):
        description[kind] = settings.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"start"})
    for name in ("final", "best"):
        run.write_json(f"{name}/rules.json", description)


def _finished(run: Run, config: Config, name: str) -> bool:
    """Whether an arm has all the rounds that the settings ask for, and its rules are there."""
    told = inside(name, "finished.json")
    if not (run.path / told).exists() or not (run.path / inside(name, "final/params.safetensors")).exists():
        return False
    return run.read_json(told).get("rounds") == config.training.rounds
