"""From a run's folder, or a folder of rules, to a model that remembers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fednl.errors import CheckpointError, SettingsError
from fednl.memory.rules_file import DESCRIPTION, TENSORS, assign, check_backbone, memory_settings, read_rules
from fednl.models.adapters import Adapter, LoraAdapter, MemoryAdapter
from fednl.models.backbone import load_backbone
from fednl.models.settings import BackboneSettings, LoraSettings
from fednl.runs import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(
    path: str | Path, *, backbone: BackboneSettings | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the backbone and puts trained rules onto it, ready for `model.generate()`.

    Args:
        path: a run's folder (its `final/` rules are taken), or a folder of rules such as a run's `best/` or
            what `fednl.save_rules` wrote.
        backbone: which backbone, where and in which precision; None is the run's own, or the one that the
            rules name.

    Returns:
        The model, in evaluation mode with its memory attached, and the tokenizer.

    Raises:
        SettingsError: the folder is neither a run nor rules, the run has no rules yet, or the backbone is not there.
        BackboneError: the rules belong to another backbone.
        CheckpointError: the rules are damaged or do not fit.

    Example:
        `model, tokenizer = fednl.load("runs/demo")`
    """
    path = Path(path)
    if not path.is_dir():
        raise SettingsError(f"there is no folder {path}: name a run's folder, or a folder of saved rules.")
    settings: dict[str, Any] = {}
    folder = path
    if (path / "config.json").exists() and not (path / DESCRIPTION).exists():
        settings, folder = _backbone_of(Run.open(path)), path / "final"
        if not (folder / TENSORS).exists():
            raise SettingsError(f"{path} has no finished rules: run `fednl train --resume {path}` first.")
    elif path.name in ("final", "best") and (path.parent / "partition.json").exists():
        settings = _backbone_of(Run.open(path.parent))
    tensors, description = read_rules(folder)
    named = description.get("backbone")
    name = named.get("name", "") if isinstance(named, dict) else ""
    chosen = backbone or _settings_of({"id": name, **settings}, path)
    loaded = load_backbone(chosen)
    check_backbone(loaded.model, description, folder)
    adapters: list[Adapter] = []
    memory = memory_settings(description, folder)
    if not memory.is_absent:
        adapters.append(MemoryAdapter())
        adapters[-1].attach(loaded.model, memory, 0)
    if "lora" in description:
        adapters.append(LoraAdapter())
        adapters[-1].attach(loaded.model, _lora_settings(description, folder), 0)
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


def _lora_settings(description: dict[str, Any], folder: Path) -> LoraSettings:
    try:
        return LoraSettings.model_validate(description["lora"])
    except ValidationError as error:
        raise CheckpointError(f"The LoRA settings in {folder}/{DESCRIPTION} are not readable.") from error
