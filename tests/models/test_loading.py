"""From a folder on disk to a model that remembers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import fednl
from fednl.errors import CheckpointError, SettingsError
from fednl.models.settings import BackboneSettings
from fednl.runs import Run
from small_run import tiny_backbone


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture
def run(backbone: Path, tmp_path: Path) -> Run:
    """A run folder as training leaves it, its rules made by hand."""
    model = fednl.attach_memory(_plain(backbone), fednl.MemoryConfig(layers="last:1", rank=2, window_tokens=0))
    with torch.no_grad():
        for rule in fednl.rules(model).values():
            rule.add_(0.5)
    run = Run.at(tmp_path / "run")
    run.write_json("config.json", {"backbone": {"id": str(backbone), "device": "cpu", "dtype": "float32"}})
    run.write_json("partition.json", {})
    for name in ("final", "best"):
        fednl.save_rules(model, run.path / name)
    return run


def _plain(backbone: Path) -> torch.nn.Module:
    from fednl.models import load_backbone

    return load_backbone(BackboneSettings(id=str(backbone), device="cpu")).model


@pytest.mark.parametrize("name", ["", "final", "best"])
def test_a_run_and_its_folders_load_with_the_runs_backbone(run: Run, name: str) -> None:
    model, tokenizer = fednl.load(run.path / name)
    assert all(float(rule.detach().abs().max()) > 0 for rule in fednl.rules(model).values())
    assert tokenizer.pad_token_id is not None and not model.training


def test_rules_beside_another_programs_config_load(run: Run, backbone: Path) -> None:
    """Rules kept inside a Hugging Face folder: its config.json is not a run's."""
    home = shutil.copytree(backbone, run.path.parent / "model")
    folder = shutil.copytree(run.path / "final", home / "final")
    model, _ = fednl.load(folder, backbone=BackboneSettings(id=str(backbone), device="cpu"))
    assert fednl.rules(model)


def test_what_is_no_run_and_no_rules_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no folder"):
        fednl.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match="No rules in"):
        fednl.load(tmp_path / "empty")
    (run.path / "final" / "params.safetensors").unlink()
    with pytest.raises(SettingsError, match=r"no finished rules: run `fednl train --resume .*run` first"):
        fednl.load(run.path)


@pytest.mark.parametrize(
    ("backbone_section", "words"),
    [
        ({"id": 3}, r"\[backbone\] id = 3 is not readable"),
        ({"id": "x", "dtype": "float64"}, r"\[backbone\] dtype = 'float64'"),
    ],
)
def test_an_edited_config_is_one_sentence(run: Run, backbone_section: dict[str, object], words: str) -> None:
    run.write_json("config.json", {"backbone": backbone_section})
    with pytest.raises(SettingsError, match=words):
        fednl.load(run.path)


def test_a_description_without_a_backbone_is_one_sentence(run: Run) -> None:
    alone = shutil.copytree(run.path / "final", run.path.parent / "alone")
    for text, kind in (('{"format": 1}', SettingsError), ("{", CheckpointError), (json.dumps([1]), CheckpointError)):
        (alone / "rules.json").write_text(text)
        with pytest.raises(kind):
            fednl.load(alone)
