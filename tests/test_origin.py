"""What a resumed run must find as it was, and what it may find changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fednl.config import Config
from fednl.errors import CheckpointError, FednlError, SettingsError
from fednl.origin import FILE, check_backbone, check_data, check_settings, origin
from fednl.runs import Run

FACTS: dict[str, Any] = {
    "identity": {"name": "bb", "sha256": "aa", "layers": 2},
    "dtype": "float32",
    "filler_sha256": "ff",
    "partition": [
        {"client": "law", "split": split, "n": 2, "tokens": 9, "sha256": split}
        for split in ("train", "validation", "test")
    ],
}
TABLE: dict[str, dict[str, Any]] = {"memory": {"rank": 2}, "training": {"rounds": 3}, "run": {"seed": 0}}


def begun(path: Path) -> Run:
    run = Run.at(path / "run")
    run.write_json(FILE, origin(Config.from_dict(TABLE), FACTS))
    return run


def config(**changed: dict[str, Any]) -> Config:
    return Config.from_dict(TABLE | {name: TABLE.get(name, {}) | keys for name, keys in changed.items()})


def row(split: str, **changed: Any) -> list[dict[str, Any]]:
    return [one | changed if one["split"] == split else one for one in FACTS["partition"]]


def test_the_same_run_goes_on(tmp_path: Path) -> None:
    run = begun(tmp_path)
    check_settings(run, config())
    check_backbone(run, FACTS)
    check_data(run, FACTS)
    assert run.read_json(FILE)["filler_sha256"] == "ff" and run.read_json(FILE)["dtype"] == "float32"


@pytest.mark.parametrize(
    "changed",
    [
        {"federation": {"parallel-clients": 2, "keep-checkpoints": 5}},
        {"training": {"rounds": 5}},
        {"run": {"out": "elsewhere"}},
        {"backbone": {"id": "the/same/model/elsewhere"}},
        {"evaluation": {"batch": 3, "arms": ["federated"]}},
        {"data": {"filler": "the same text, moved"}},
    ],
    ids=str,
)
def test_what_changes_no_result_may_change(tmp_path: Path, changed: dict[str, Any]) -> None:
    check_settings(begun(tmp_path), config(**changed))


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("memory", "rank", 3, "rank = 3, but the run began with 2:"),
        ("training", "local-lr", 0.5, "local-lr = 0.5, but the run began with 0.003:"),
        ("federation", "shared", "memory", 'shared = "memory", but the run began with "theta":'),
        ("lora", "alpha", 2.0, "alpha = 2.0, but the run began with nothing:"),
        ("run", "seed", 1, "seed = 1, but the run began with 0:"),
    ],
)
def test_an_edited_setting_is_refused_by_name(
    tmp_path: Path, section: str, key: str, value: object, words: str
) -> None:
    run = begun(tmp_path)
    with pytest.raises(SettingsError, match=rf"config\.json has \[{section}\] {re.escape(words)}"):
        check_settings(run, config(**{section: {key: value}}))


def test_another_algorithm_is_refused_with_its_section(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"algorithm|momentum"):
        check_settings(begun(tmp_path), config(federation={"algorithm": "fedavgm"}, fedavgm={"momentum": 0.5}))


def test_a_key_that_is_younger_than_the_run_is_no_change(tmp_path: Path) -> None:
    run = begun(tmp_path)
    facts = run.read_json(FILE)
    del facts["settings"]["memory"]["chunk-tokens"]
    run.write_json(FILE, facts)
    check_settings(run, config())
    with pytest.raises(SettingsError, match="chunk-tokens = 8"):
        check_settings(run, config(memory={"chunk-tokens": 8}))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"identity": {"name": "bb", "sha256": "bb", "layers": 2}}, r"another backbone \(sha256 aa, not bb\)"),
        ({"dtype": "bfloat16"}, r'in float32, and here it is bfloat16: set backbone\.dtype = "float32"'),
    ],
)
def test_another_backbone_is_refused(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_backbone(begun(tmp_path), FACTS | facts)


def test_a_backbone_may_move(tmp_path: Path) -> None:
    check_backbone(begun(tmp_path), FACTS | {"identity": {"name": "elsewhere", "sha256": "aa", "layers": 2}})


@pytest.mark.parametrize("split", ["train", "test"])
def test_other_data_are_refused(tmp_path: Path, split: str) -> None:
    for partition in (row(split, sha256="other"), [one for one in FACTS["partition"] if one["split"] != split]):
        with pytest.raises(CheckpointError, match=f'the {split} data of client "law" are not .* versions of fednl'):
            check_data(begun(tmp_path / f"{len(partition)}"), FACTS | {"partition": partition})


def test_a_run_that_never_began_or_is_of_old_has_nothing_to_check(tmp_path: Path) -> None:
    run = Run.at(tmp_path / "run")
    for _ in range(2):
        check_settings(run, config(memory={"rank": 9}))
        check_backbone(run, FACTS | {"dtype": "bfloat16"})
        check_data(run, FACTS | {"partition": row("test", sha256="other")})
        run.write_json(FILE, {"rows": FACTS["partition"], "backbone": {"name": "bb"}})


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    run = begun(tmp_path)
    good = run.read_json(FILE)
    for damage in ({"rows": 3}, {"rows": [{}]}, {"settings": 3}, {"backbone": None}):
        run.write_json(FILE, good | damage)
        with pytest.raises(CheckpointError, match=f"{FILE} is damaged: restore it"):
            check_data(run, FACTS)
    (run.path / FILE).write_text("{")
    with pytest.raises(FednlError, match=FILE):
        check_settings(run, config())
