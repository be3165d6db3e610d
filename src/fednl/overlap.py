"""Refuses to ask a run's rules, as a test, what they were trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednl.arms import TRAINED, VIEWS
from fednl.config import Config
from fednl.config_text import toml_value
from fednl.data.tasks import DRAWN
from fednl.data.text import TextSettings, client_sources
from fednl.errors import SettingsError
from fednl.federation.inline import Pool
from fednl.federation.jobs import answer_of, do
from fednl.federation.pool import Job
from fednl.origin import check_trained
from fednl.runs import Run


def check_unmet(
    run: Run, own: Config, config: Config, changed: Mapping[str, Any], pool: Pool, facts: Mapping[str, Any]
) -> None:
    """Refuses test questions that a run was trained or validated on, where its task draws both from one source.

    Under other settings another part of a source may be for testing: more test texts take what training had, and where
    long questions are left out another length moves the border. Another such task over the same source cuts it
    otherwise. Rules that were not trained here may be asked anything.

    Args:
        run: the run.
        own: its settings.
        config: those under which it is asked.
        changed: the settings that are not the run's own, by `section.key`.
        pool: who has the texts; numbers and hashes are all that comes from there.
        facts: what a client said of its data under `config`.

    Raises:
        CheckpointError: the source is not what the run was trained on, so that nobody can tell.
        SettingsError: how many of the questions were trained on, and how to go on.
    """
    trained = any(VIEWS[arm].rules in TRAINED for arm in config.evaluation.arms)
    if not trained or not {own.data.task, config.data.task} <= set(DRAWN):
        return
    if own.data.task != config.data.task:
        _check_sources(run, own, config)
        return
    same = own.data == config.data and own.evaluation.answer == config.evaluation.answer
    told = facts if same else answer_of(do(pool, Job("met", {"config": own.to_dict()})))
    check_trained(run, told["partition"])
    wanted = config.evaluation.clients
    met = sum(n for client, n in told.get("met", {}).items() if not wanted or client in wanted)
    if met:
        tests = [row for row in facts["partition"] if row["split"] == "test"]
        total = sum(row["n"] for row in tests if not wanted or row["client"] in wanted)
        keys = [name for name in changed if name.startswith("data.") or name == "evaluation.answer"]
        raise SettingsError(
            f"{met} of these {total} test questions are among those that {run.path} was trained or validated on, as "
            f"{_told(config, keys)} draws others for testing: put back {_told(own, keys)}, or train a new run under "
            "these settings."
        )


def _check_sources(run: Run, own: Config, config: Config) -> None:
    """Refuses another task over a source that the run was trained on, as it would cut it into other parts."""
    known = [_place(source) for source in _sources(own, trained=True)]
    for source in _sources(config):
        place = _place(source)
        if any(place.is_relative_to(one) or one.is_relative_to(place) for one in known):
            raise SettingsError(
                f'--task {config.data.task}: its source "{source}" is what {run.path} was trained on, as the task '
                f"{own.data.task}: name another in [{config.data.task}]."
            )


def _sources(config: Config, trained: bool = False) -> list[str]:
    """What a run's clients read; of the text task those that some client was dealt, with `trained` one that trains."""
    settings, data = config.task_settings, config.data
    if not isinstance(settings, TextSettings):
        return [str(getattr(settings, "source", ""))]
    dealt = client_sources(data, settings)
    left_out = data.hold_out_clients if trained else ()
    return list(dict.fromkeys(source for client, source in dealt.items() if client not in left_out))


def _place(source: str) -> Path:
    """A source as one path however it is written; packaged names are compared as paths too."""
    return Path(os.path.realpath(os.path.expanduser(source)))


def _told(config: Config, names: list[str]) -> str:
    table = config.to_dict()
    keys = [name.partition(".")[::2] for name in names]
    return ", ".join(f"{section}.{key} = {toml_value(table[section][key])}" for section, key in keys)
