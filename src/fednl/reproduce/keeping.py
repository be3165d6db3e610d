"""Runs that are kept in their folders: made, gone on with, measured further, or left as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fednl.answers import OUTCOMES, earlier
from fednl.arms import make_algorithm
from fednl.config import Config
from fednl.errors import SettingsError
from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.seeds import FREE
from fednl.federation.checkpoint import read_tensors
from fednl.measuring import changed_settings, results_name
from fednl.runs import Run
from fednl.training import config_of, evaluate, resume, train

OnEvent = Callable[[Mapping[str, Any]], None]


def run_at(folder: Path, config: Config, on_event: OnEvent = lambda event: None) -> Run:
    """The run in a folder: made, gone on with, or as it is.

    Only what changes neither its rules nor its questions may be other than it began with (`FREE`): arms, batch of the
    evaluation, worker processes, device. A setting that is younger than the run has its default.

    Raises:
        SettingsError: the folder holds a run of other settings, whose numbers would pass for those of these.
    """
    if not (folder / "config.json").exists():
        return train(config, folder, on_event)
    run = Run.open(folder)
    # As settings, not as they were written: a key that is younger than the folder had its default.
    then, now = config_of(run).to_dict(), config.to_dict()
    for section in dict.fromkeys([*then, *now]):
        before, after = then.get(section, {}), now.get(section, {})
        for key in dict.fromkeys([*before, *after]):
            if before.get(key) != after.get(key) and (section, key) not in FREE:
                raise SettingsError(
                    f"{folder} holds a run with [{section}] {key} = {json.dumps(before.get(key))}, and now it is "
                    f"{json.dumps(after.get(key))}: put that back, or name another --out."
                )
    if then != now:
        run.write_json("config.json", now)
    return run if is_done(run, config) else resume(folder, on_event)


def is_done(run: Run, config: Config) -> bool:
    """Whether a run has its rounds, and its arms are measured."""
    needed = [f"results/{config.data.task}.json", *(["results/stream.json"] if config.tasks.order else [])]
    if not all((run.path / name).exists() for name in ["finished.json", *needed]):
        return False
    measured = [{row["method"] for row in run.read_json(name)["rows"]} for name in needed]
    return all(set(config.evaluation.arms) <= found for found in measured)


def answers(
    run: Run, arms: Sequence[str], changed: Sequence[str], on_event: OnEvent = lambda event: None
) -> dict[str, list[Outcome]]:
    """How a finished run answers in some arms, under its own settings or others; what is missing is measured.

    Args:
        run: the run.
        arms: names in `fednl.arms.VIEWS`.
        changed: settings under which it answers, as for `fednl eval --set`.
        on_event: is told what happens.
    """
    path = run.path / "results" / f"{_results_name(run, changed)}{OUTCOMES}"
    if not set(arms) <= earlier(path).keys():
        evaluate(run.path, None, on_event, [*changed, f"evaluation.arms={json.dumps(list(arms))}"], anew=False)
    found = earlier(path)
    return {arm: found[arm] for arm in arms}


def questions(run: Run, changed: Sequence[str]) -> dict[str, str]:
    """What a run was asked: client -> SHA-256 of its questions; empty where nothing was, or an older commit asked.

    Args:
        run: the run.
        changed: settings under which it answered, as for `answers`.
    """
    if not (run.path / "config.json").exists():
        return {}
    name = f"results/{_results_name(run, changed)}.json"
    found = run.read_json(name).get("questions", {}) if (run.path / name).exists() else {}
    return dict(found)


def _results_name(run: Run, changed: Sequence[str]) -> str:
    own = config_of(run)
    config = own.with_overrides(changed)
    return results_name(config.data.task, changed_settings(own, config))


def numbers_shared(run: Run) -> int | None:
    """Counts the numbers of a run's rules that a client shares in a round, once the run has rules; else None."""
    path = run.path / "final/params.safetensors"
    if not path.exists():
        return None
    params, _ = read_tensors(path)
    algorithm = make_algorithm(config_of(run), "federated")
    shared = algorithm.shared(list(params)) if algorithm.traits.shares else []
    return sum(params[name].numel() for name in shared)


def kept(
    path: Path,
    asked: Sequence[tuple[str, int]],
    work: Callable[[str, int], Mapping[str, Any]],
    on_done: Callable[[int], None] = lambda done: None,
    named: Mapping[int, str] | None = None,
) -> dict[tuple[str, int], dict[str, Any]]:
    """What was found for every arm and item, doing only what is not on a line of a file yet.

    Args:
        path: a file of JSON lines; each line is on disk when its item is done.
        asked: pairs of arm and item, in the order in which they are done.
        work: does one.
        on_done: called with how many of those asked are there, after each.
        named: what each item is called now, such as a hash of its text: what was found for another of its number is
            left aside, and done again for this one. None takes what is there. A line without a name counts for any.
    """
    file, known = Run(path.parent), named or {}
    done = {
        (line["arm"], line["item"]): line["found"]
        for line in file.read_jsonl(path.name)
        if line.get("of", known.get(line["item"])) == known.get(line["item"]) or not known
    }
    for place, (arm, item) in enumerate(asked, 1):
        if (arm, item) not in done:
            done[arm, item] = dict(work(arm, item))
            of = {"of": known[item]} if item in known else {}
            file.append_jsonl(path.name, {"arm": arm, "item": item, **of, "found": done[arm, item]})
        on_done(place)
    return {one: done[one] for one in asked}


def is_kept(path: Path, asked: Sequence[tuple[str, int]]) -> bool:
    """Whether all that `kept` would do is done, and the newest lines of an item are of one text in all arms.

    Args:
        path: as in `kept`.
        asked: as in `kept`.
    """
    newest = {(line["arm"], line["item"]): line.get("of") for line in Run(path.parent).read_jsonl(path.name)}
    names: dict[int, set[str | None]] = {}
    for arm, item in asked:
        names.setdefault(item, set()).add(newest.get((arm, item)))
    return set(asked) <= newest.keys() and all(len(found - {None}) <= 1 for found in names.values())
