"""What a run began with, and whether that is still there when it is taken up again.

A run promises the same bits after any interruption. Another backbone, other data or other settings under the same
folder would break that without a word, and the tables would describe what was not trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fednl.config import Config
from fednl.errors import CheckpointError, SettingsError
from fednl.runs import Run

FILE = "partition.json"
_ROW = {"client", "split", "sha256"}
_CHECKED_OTHERWISE = ("backbone", "data", "evaluation")  # by what they lead to: identity, hashes, questions
_FREE = {
    "federation": ("parallel-clients", "keep-checkpoints", "max-failed-rounds", "pace", "deadline-s", "warm-up-s"),
    "training": ("rounds",),  # more rounds only go on; fewer are refused where the checkpoint is read
    "run": ("out",),
}


def origin(config: Config, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Gives what `partition.json` holds: who has what, the backbone, and the settings that fix the results.

    Args:
        config: the run's settings.
        facts: what a client said of its backbone and data: `partition`, `identity`, `dtype`, `filler_sha256`,
            `context_tokens`.
    """
    told = {key: facts[key] for key in ("dtype", "filler_sha256", "context_tokens") if key in facts}
    return {"rows": facts["partition"], "backbone": facts["identity"], **told, "settings": _fixed(config)}


def check_settings(run: Run, config: Config) -> None:
    """Refuses to go on with a run whose settings were changed; one that never came to its data may change them.

    Raises:
        SettingsError: names the key, its value now and its value then.
    """
    then = _then(run).get("settings")
    if then is None:
        return
    now, usual = _fixed(config), _fixed(Config())
    for section in then | now:
        # A key that was not there then had its default, or is younger than the run.
        expected = usual.get(section, {}) | then.get(section, {})
        for key, found in (dict.fromkeys(expected) | now.get(section, {})).items():
            if found != expected.get(key):
                raise SettingsError(
                    f"{run.path}/config.json has [{section}] {key} = {_word(found)}, but the run began with "
                    f"{_word(expected.get(key))}: put that back, or start a new run."
                )


def check_backbone(run: Run, facts: Mapping[str, Any]) -> None:
    """Refuses another backbone or another precision than the run began with.

    Raises:
        CheckpointError: says which, and what was expected.
    """
    then = _then(run)
    backbone: dict[str, Any] = then.get("backbone", {})
    for key, value in facts["identity"].items():
        if key != "name" and key in backbone and backbone[key] != value:
            raise CheckpointError(
                f"{run.path} began with another backbone ({key} {backbone[key]}, not {value}): put that one back "
                "at backbone.id."
            )
    if "dtype" in then and then["dtype"] != facts["dtype"]:
        raise CheckpointError(
            f"{run.path} began with a backbone in {then['dtype']}, and here it is {facts['dtype']}: set backbone.dtype "
            f'= "{then["dtype"]}" in its config.json.'
        )


def check_data(run: Run, facts: Mapping[str, Any]) -> None:
    """Refuses other examples than the run began with.

    Raises:
        CheckpointError: names the client and the split.
    """
    _check_rows(run, facts["partition"], ("train", "validation", "test"))


def check_trained(run: Run, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuses where a run's own settings no longer give the examples that it was trained and validated on.

    Args:
        run: the run.
        rows: what its settings give now, as `fednl.data.partition_rows` lists it.

    Raises:
        CheckpointError: names the client and the split.
    """
    _check_rows(run, rows, ("train", "validation"))


def _check_rows(run: Run, rows: Sequence[Mapping[str, Any]], splits: Sequence[str]) -> None:
    then, now = (
        {(row["client"], row["split"]): row["sha256"] for row in some if row["split"] in splits}
        for some in (_then(run).get("rows", rows), rows)
    )
    for client, split in sorted(then.keys() | now.keys()):
        if then.get((client, split)) != now.get((client, split)):
            raise CheckpointError(
                f'the {split} data of client "{client}" are not those that {run.path} began with: put back its [data] '
                "settings and files, or start a new run. (If nothing was changed: the standard library's text differs "
                "between versions of Python, and which questions of a source are taken between versions of fednl, as "
                "CHANGELOG.md says.)"
            )


def _word(value: object) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)


def _then(run: Run) -> dict[str, Any]:
    """What was written down; nothing where the run never came so far, or comes from before there was a check."""
    then = run.read_json(FILE) if (run.path / FILE).exists() else {}
    if "settings" not in then:
        return {}
    rows, sections = then.get("rows"), then["settings"]
    whole = isinstance(rows, list) and all(isinstance(row, dict) and row.keys() >= _ROW for row in rows)
    if not (whole and _is_tables(sections) and isinstance(then.get("backbone"), dict)):
        raise CheckpointError(f"{run.path / FILE} is damaged: restore it from a copy.")
    return then


def _is_tables(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(keys, dict) for keys in value.values())


def _fixed(config: Config) -> dict[str, Any]:
    """The settings that no resumed run may change, by section and key."""
    return {
        section: {key: value for key, value in keys.items() if key not in _FREE.get(section, ())}
        for section, keys in config.to_dict().items()
        if section not in _CHECKED_OTHERWISE
    }
