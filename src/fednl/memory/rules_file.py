"""Save and load the trained rules: safetensors for the numbers, JSON for what they belong to.

The memory state is never saved here; rules are what was learned, the state is what was just read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fednl.errors import BackboneError, CheckpointError, SettingsError
from fednl.files import write_atomic
from fednl.memory.attach import attach_memory, detach_memory, rules
from fednl.memory.families import heads_of
from fednl.memory.settings import MemoryConfig
from fednl.memory.sites import attachment, find_decoder, is_attached, is_recurrent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = 1
TENSORS, DESCRIPTION = "params.safetensors", "rules.json"
FINGERPRINT_ROWS = 64
MAY_DIFFER = {"window_tokens", "sink_tokens", "chunk_tokens", "write_start", "start"}
SAME = ("family", "hidden", "layers", "heads", "kv_heads", "vocabulary", "fingerprint")


def backbone_identity(model: nn.Module) -> dict[str, Any]:
    """Says which backbone this is: its name, its shape, and a fingerprint of its weights.

    The fingerprint is a SHA-256 over the first 64 embedding rows rounded to bfloat16, so that a float32 and a
    bfloat16 copy of one model are the same backbone.
    """
    plain: Any = model
    decoder: Any = plain.base_model if is_recurrent(model) else find_decoder(model)
    config = decoder.config
    embeddings = decoder.get_input_embeddings().weight
    rows = embeddings[:FINGERPRINT_ROWS].detach().to("cpu", torch.bfloat16).contiguous()
    name = getattr(model, "fednl_name", None) or Path(str(config._name_or_path or type(model).__name__)).name
    return {
        "name": name,
        "family": config.model_type,
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        **({} if is_recurrent(model) else {"heads": heads_of(config).heads, "kv_heads": heads_of(config).kv_heads}),
        "vocabulary": config.vocab_size,
        "fingerprint": hashlib.sha256(rows.view(torch.int16).numpy().tobytes()).hexdigest()[:16],
    }


def save_rules(model: PreTrainedModel, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Writes all rules of a model with memory into a folder.

    Args:
        model: a model with memory attached.
        folder: made if missing; earlier rules in it are replaced.
        dtype: how the numbers are stored; float32 reloads bit for bit.

    Returns:
        The folder.

    Raises:
        BackboneError: no memory is attached.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in rules(model).items()}
    write_atomic(folder / TENSORS, save(tensors))
    description = {
        "format": FORMAT,
        "backbone": backbone_identity(model),
        "memory": attachment(model).config.model_dump(by_alias=True, exclude={"start"}),
    }
    write_atomic(folder / DESCRIPTION, (json.dumps(description, indent=2) + "\n").encode())
    return folder


def read_rules(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads a folder of rules: the tensors in float32 by canonical name, and their description.

    Raises:
        SettingsError: the folder holds no rules.
        CheckpointError: it is damaged or of a format this version does not know.
    """
    folder = Path(folder)
    if not (folder / TENSORS).is_file() or not (folder / DESCRIPTION).is_file():
        raise SettingsError(f"No rules in {folder}: it needs {TENSORS} and {DESCRIPTION}, as fednl.save_rules writes.")
    try:
        description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        tensors = {name: t.float() for name, t in load_file(folder / TENSORS).items()}
    except (ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"The rules in {folder} are damaged ({type(error).__name__}); save them again."
        ) from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        found = description.get("format") if isinstance(description, dict) else None
        raise CheckpointError(f"The rules in {folder} have format {found}; this version reads format {FORMAT}.")
    return tensors, description


def load_rules(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Puts saved rules onto a model, attaching memory with the saved settings if there is none.

    Nothing is changed unless everything fits: backbone, memory settings, every name and every shape.

    Returns:
        The same model.

    Raises:
        SettingsError: the folder holds no rules.
        CheckpointError: names, shapes or memory settings differ.
        BackboneError: the rules belong to another backbone.
    """
    tensors, description = read_rules(folder)
    check_backbone(model, description, folder)
    config = memory_settings(description, folder)
    fresh = not is_attached(model)
    if fresh:
        attach_memory(model, config)
    try:
        check_settings(attachment(model).config, config, folder, attachment(model).num_layers)
        assign(rules(model), tensors, str(folder))
    except CheckpointError:
        if fresh:
            detach_memory(model)
        raise
    return model


def memory_settings(
    description: Mapping[str, Any], source: str | Path, description_file: str = DESCRIPTION
) -> MemoryConfig:
    """The memory settings that a description holds; the file's name is for the message.

    Raises:
        CheckpointError: they are missing or not readable.
    """
    try:
        return MemoryConfig(**{key.replace("-", "_"): value for key, value in description["memory"].items()})
    except (KeyError, AttributeError, ValidationError) as error:
        raise CheckpointError(
            f"The memory settings in {source}/{description_file} are not readable; save again."
        ) from error


def check_settings(
    here: MemoryConfig,
    saved: MemoryConfig,
    source: str | Path,
    layers: int,
    what: str = "rules",
    may_differ: Set[str] = MAY_DIFFER,
) -> None:
    """Raises `CheckpointError` unless what was made with the settings `saved` means the same under `here`.

    Args:
        here, saved: the settings.
        source, what: for the message: the folder, and what is in it.
        layers: how many layers the backbone has.
        may_differ: settings that are free; for rules how far attention reaches, speed, and where rules begin.
    """
    if here.layer_numbers(layers) == saved.layer_numbers(layers):  # "all" and "0-29" may be the same
        saved = saved.model_copy(update={"layers": here.layers})
    if here.address_number(layers) == saved.address_number(layers):  # no later layer than the first with memory
        saved = saved.model_copy(update={"address_layer": here.address_layer})
    kinds = {here.keys, saved.keys}
    unread = ({"address_layer", "address_rank"} if "token" in kinds else set()) | (
        {"feature"} if "context" in kinds else set()
    )
    if not here.update_rule.several:
        unread.add("writes_per_token")
    if not here.update_rule.inner:
        unread.add("mini_batch_tokens")
    for key in sorted(MemoryConfig.model_fields.keys() - may_differ - unread):
        mine, theirs = getattr(here, key), getattr(saved, key)
        if mine != theirs:
            raise CheckpointError(
                f"The {what} in {source} {'need' if what.endswith('s') else 'needs'} memory.{key.replace('_', '-')} = "
                f"{theirs!r}, and it is {mine!r} here; use that."
            )


def assign(live: Mapping[str, Tensor], tensors: Mapping[str, Tensor], source: str) -> None:
    """Copies values into live parameters; every name and shape must fit, and nothing is copied unless all do.

    Raises:
        CheckpointError: a name is missing or unknown, or a shape differs.
    """
    if missing := sorted(live.keys() - tensors.keys()):
        raise CheckpointError(f"{source} lacks {len(missing)} rules of this model, first {missing[0]!r}.")
    if unknown := sorted(tensors.keys() - live.keys()):
        raise CheckpointError(f"{source} holds {len(unknown)} rules this model does not have, first {unknown[0]!r}.")
    for name, tensor in tensors.items():
        if tensor.shape != live[name].shape:
            raise CheckpointError(
                f"{source}: {name!r} has shape {list(tensor.shape)}, the model needs {list(live[name].shape)}."
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            live[name].copy_(tensor)


def check_backbone(
    model: nn.Module,
    description: Mapping[str, Any],
    source: str | Path,
    made: str = "rules in {} were trained on",
    file: str = DESCRIPTION,
) -> None:
    """Raises `BackboneError` unless the description names the backbone that `model` is.

    Args:
        model: with memory or without.
        description: what was saved beside the tensors.
        source: the folder, for the message.
        made: says in the message what is in the folder and how it came about.
        file: the description's file, for the message.

    Raises:
        CheckpointError: it names none.
    """
    there, here = description.get("backbone"), backbone_identity(model)
    if not isinstance(there, dict):
        raise CheckpointError(f"The {made.format(source)} a backbone that {file} does not name; save again.")
    differing = [key for key in SAME if there.get(key) != here.get(key)]
    if differing:
        key = differing[0]
        raise BackboneError(
            f"The {made.format(source)} backbone {there.get('name')!r}, and this is {here['name']!r}: {key} is "
            f"{there.get(key)!r} there and {here.get(key)!r} here; load that backbone."
        )
