"""From a run's folder, or a folder of rules, to a model that remembers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from fednl.errors import CheckpointError, SettingsError
from fednl.memory.rules_file import DESCRIPTION, TENSORS, assign, check_backbone, memory_settings, read_rules
from fednl.models.adapters import ADAPTERS, Adapter
from fednl.models.backbone import load_backbone
from fednl.models.settings import BackboneSettings, ContextVectorSettings, LoraSettings
from fednl.runs import Run

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_SECTIONS: dict[str, tuple[str, type[BaseModel]]] = {
    "lora": ("LoRA", LoraSettings),
    "context-vectors": ("context vectors'", ContextVectorSettings),
}
"""The adapters beside memory, with their words in a message and their settings."""


def place_of(path: str | Path) -> tuple[Run | None, Path]:
    """Gives the run that a folder is or belongs to, None where it belongs to none, and the folder of its rules.

    Args:
        path: a run's folder, or a folder of rules.

    Raises:
        SettingsError: there is no such folder, or the run has no rules yet.
    """
    path = Path(path)
    if not path.is_dir():
        raise SettingsError(f"there is no folder {path}: name a run's folder, or a folder of saved rules.")
    if (path / "config.json").exists() and not (path / DESCRIPTION).exists():
        run, folder = Run.open(path), path / "final"
        if not (folder / TENSORS).exists():
            raise SettingsError(f"{path} has no finished rules: run `fednl train --resume {path}` first.")
        return run, folder
    if path.name in ("final", "best") and (path.parent / "partition.json").exists():
        return Run.open(path.parent), path
    return None, path


def load(
    path: str | Path, *, backbone: BackboneSettings | None = None, instead: Mapping[str, Tensor] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the backbone and puts rules onto it as they stand in a folder; `fednl.load` knows what clients keep.

    Args:
        path: a run's folder (its `final/` rules are taken), or a folder of rules such as a run's `best/` or
            what `fednl.save_rules` wrote.
        backbone: which backbone, where and in which precision; None is the run's own, or the one that the
            rules name.
        instead: rules by name, of the shapes there, that take the place of those in the folder.

    Returns:
        The model, in evaluation mode with its adapters attached, and the tokenizer.

    Raises:
        SettingsError: the folder is neither a run nor rules, the run has no rules yet, or the backbone is not there.
        BackboneError: the rules belong to another backbone.
        CheckpointError: the rules are damaged or do not fit.
    """
    run, folder = place_of(path)
    settings = {} if run is None else _backbone_of(run)
    tensors, description = read_rules(folder)
    tensors |= instead or {}
    named = description.get("backbone")
    name = named.get("name", "") if isinstance(named, dict) else ""
    chosen = backbone or _settings_of({"id": name, **settings}, Path(path))
    loaded = load_backbone(chosen)
    check_backbone(loaded.model, description, folder)
    adapters: list[Adapter] = []
    for kind in ("memory", *_SECTIONS):
        # Rules that name no adapter are a damaged description of a memory's.
        if kind not in description and (kind != "memory" or _SECTIONS.keys() & description.keys()):
            continue
        own = _settings_for(kind, description, folder)
        if kind != "memory" or not own.is_absent:
            adapters.append(ADAPTERS[kind]())
            adapters[-1].attach(loaded.model, own, 0)
    assign({n: p for adapter in adapters for n, p in adapter.parameters().items()}, tensors, str(folder))
    return loaded.model.eval(), loaded.tokenizer


def _backbone_of(run: Run) -> dict[str, Any]:
    settings = run.read_json("config.json").get("backbone")
    return settings if isinstance(settings, dict) else {}


def _settings_of(table: dict[str, Any], path: Path) -> BackboneSettings:
    try:
        return BackboneSettings.model_validate(table)
    except ValidationError as error:
        key = error.errors()[0]["loc"][0]
        raise SettingsError(f"{path}: [backbone] {key} = {table.get(str(key))!r} is not readable; mend it.") from None


def _settings_for(kind: str, description: dict[str, Any], folder: Path) -> Any:
    if kind == "memory":
        return memory_settings(description, folder)
    what, section = _SECTIONS[kind]
    try:
        # Strict settings take lists for tuples from JSON only.
        return section.model_validate_json(json.dumps(description[kind]))
    except ValidationError as error:
        raise CheckpointError(f"The {what} settings in {folder}/{DESCRIPTION} are not readable.") from error
