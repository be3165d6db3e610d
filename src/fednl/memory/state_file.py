"""Save and load one conversation's memory, when its owner asks for it and never otherwise.

What a `MemoryCache` holds is private text in another form. It has a folder of its own, readable by its owner only; it
is never in a file of rules, in a run folder, or in a message.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fednl.errors import CheckpointError, SettingsError
from fednl.files import write_atomic
from fednl.memory.cache import LayerTensors, MemoryCache
from fednl.memory.families import attentions, device_of, family_of, heads_of
from fednl.memory.rules_file import backbone_identity, check_backbone, check_settings, memory_settings
from fednl.memory.rules_hash import rules_hash
from fednl.memory.sites import Attachment, attachment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = 1
STATE_DESCRIPTION = "state.json"
MAY_DIFFER = {"chunk_tokens", "write_start", "start"}
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
KEPT_APART = (("rules.json",), ("params.safetensors",), ("config.json", "environment.json"))
"""Files that mark a folder of rules or of a run."""


def save_state(cache: MemoryCache, folder: str | Path) -> Path:
    """Writes everything a conversation's cache holds into a folder, to go on with it later.

    Memory states, momentum, running averages, what waits to be written, window, sinks, positions: all in the dtype they
    have, so that going on after `load_state` is bit-equal to going on now. The cache is not modified.

    The files are private text in another form: they say what the conversation was about to anyone who has the backbone.
    They are readable by their owner only (mode 0600; a folder made for them 0700). Delete them like the text itself.

    Args:
        cache: the conversation (or batch of them), between two passes; its model still has its memory attached.
        folder: made if missing; an earlier state in it is replaced whole or not at all. It must be none of rules and
            not lie in a run folder: a state is never shared.

    Returns:
        The folder.

    Raises:
        SettingsError: the folder holds rules, or belongs to a run.
        BackboneError: the cache's model has had its memory taken off.
        OSError: the disk refused; an earlier state in the folder is still whole.
    """
    folder = Path(folder)
    owner = cache.attachment
    cache.check_owner(attachment(owner.decoder))
    _check_apart(folder)
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in _tensors(cache).items()}
    content = save(tensors)
    digest = hashlib.sha256(content).hexdigest()
    description = {
        "format": FORMAT,
        "backbone": backbone_identity(owner.decoder),
        "dtype": _dtype(owner),
        "memory": owner.config.model_dump(by_alias=True, exclude={"start"}),
        "rules": rules_hash(owner),
        "seen_tokens": cache.seen_tokens,
        "has_padding": cache.has_padding,
        "tensors": digest,
    }
    folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    # The description names its tensors by their hash, so that at every moment one whole state is there.
    file = _tensors_file(folder, digest)
    write_atomic(file, content, mode=PRIVATE_FILE)
    write_atomic(folder / STATE_DESCRIPTION, (json.dumps(description, indent=2) + "\n").encode(), mode=PRIVATE_FILE)
    for old in folder.glob("state-*.safetensors"):
        if old != file:
            old.unlink()
    return folder


def load_state(model: PreTrainedModel, folder: str | Path) -> MemoryCache:
    """Reads a saved conversation, to go on with it exactly where it was.

    Only the same goes on the same: backbone and its dtype, memory settings (but for speed and where rules begin) and
    every number of the rules, of a LoRA with its scale and of context vectors must be those the state was written with.
    Neither model nor files are modified.

    Args:
        model: a model with memory attached and its rules loaded.
        folder: what `save_state` wrote.

    Returns:
        A new cache of this model, its tensors on the devices of the model's layers.

    Raises:
        SettingsError: the folder holds no saved state.
        BackboneError: no memory is attached, or the state belongs to another backbone.
        CheckpointError: settings, rules or dtype differ, a tensor is missing, unknown or of another shape, a file is
            damaged, or the format is not known to this version.
    """
    folder, owner = Path(folder), attachment(model)
    description = _read_description(folder)
    _check_written_by(description, owner, model, folder)
    tensors = _read_tensors(folder, description)
    seen, padded = description.get("seen_tokens"), description.get("has_padding")
    if type(seen) is not int or type(padded) is not bool or seen < 0:
        raise _damaged(folder, "seen_tokens or has_padding")
    expected = _expected(owner, tensors, seen, folder)
    _check_tensors(tensors, expected, folder)
    cache = MemoryCache(model)
    family = family_of(owner.decoder)
    for index, (layer, attention) in enumerate(zip(cache.layers, attentions(owner.decoder), strict=True)):
        device, start = device_of(attention, family), f"layers.{index}."
        mine = {name: t.to(device) for name, t in tensors.items() if name.startswith(start)}
        if mine:
            layer.set(LayerTensors(**{name.removeprefix(start): t for name, t in mine.items()}))
    if seen:
        decoder: Any = owner.decoder
        device = decoder.get_input_embeddings().weight.device
        cache.counts, cache.positions = tensors["counts"].to(device), tensors["positions"].to(device)
        cache.ends = tensors["ends"].to(device) if "ends" in tensors else None
    cache.seen_tokens, cache.has_padding = seen, padded
    return cache


def _tensors(cache: MemoryCache) -> dict[str, Tensor]:
    """Every tensor a cache holds, by name."""
    held = {f"layers.{i}.{name}": t for i, layer in enumerate(cache.layers) for name, t in vars(layer.tensors).items()}
    held |= {"counts": cache.counts, "positions": cache.positions, "ends": cache.ends}
    return {name: t for name, t in held.items() if t is not None}


def _dtype(owner: Attachment) -> str:
    decoder: Any = owner.decoder
    return _name(decoder.get_input_embeddings().weight.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors_file(folder: Path, digest: str) -> Path:
    return folder / f"state-{digest[:16]}.safetensors"


def _check_apart(folder: Path) -> None:
    """Raises `SettingsError` for a folder of rules, and for one in a run."""
    here = folder.resolve()
    for place in (here, *here.parents):
        for marks in KEPT_APART:
            if all((place / mark).is_file() for mark in marks) and (place == here or len(marks) > 1):
                raise SettingsError(
                    f"{folder} belongs to rules or to a run (there is a {marks[0]} in {place}), which may be shared; a "
                    "memory state is private: name a folder of its own."
                )


def _damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"The memory state in {folder} is damaged ({what}); start the conversation anew.")


def _read_description(folder: Path) -> dict[str, Any]:
    """The description, of a format this version knows."""
    if not (folder / STATE_DESCRIPTION).is_file():
        raise SettingsError(f"No memory state in {folder}: it needs {STATE_DESCRIPTION}, as save_state writes.")
    try:
        description = json.loads((folder / STATE_DESCRIPTION).read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(folder, STATE_DESCRIPTION) from error
    if not isinstance(description, dict):
        raise _damaged(folder, STATE_DESCRIPTION)
    if description.get("format") != FORMAT:
        raise CheckpointError(
            f"The memory state in {folder} has format {description.get('format')}; this version reads format {FORMAT}."
        )
    return description


def _check_written_by(description: dict[str, Any], owner: Attachment, model: PreTrainedModel, folder: Path) -> None:
    """Raises unless this model, with these settings and rules, is what wrote the state."""
    check_backbone(model, description, folder, "memory state in {} was written on", STATE_DESCRIPTION)
    if description.get("dtype") != _dtype(owner):
        raise CheckpointError(
            f"The memory state in {folder} was written in dtype {description.get('dtype')}, and the backbone is "
            f"{_dtype(owner)} here; load the backbone in the same."
        )
    saved = memory_settings(description, folder, STATE_DESCRIPTION)
    check_settings(owner.config, saved, folder, owner.num_layers, "memory state", MAY_DIFFER)
    if description.get("rules") != rules_hash(owner):
        raise CheckpointError(
            f"The memory state in {folder} was written with other rules than this model has (a LoRA's scale and "
            "context vectors count too); load those it was written with."
        )


def _read_tensors(folder: Path, description: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors, whole."""
    digest = description.get("tensors")
    if not isinstance(digest, str) or not digest.isalnum():
        raise _damaged(folder, "tensors")
    file = _tensors_file(folder, digest)
    if not file.is_file():
        raise _damaged(folder, f"{file.name} is missing")
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise _damaged(folder, f"{file.name} is not what was written")
    try:
        return load(content)
    except (ValueError, SafetensorError) as error:
        raise _damaged(folder, f"{file.name}, {type(error).__name__}") from error


def _expected(
    owner: Attachment, tensors: dict[str, Tensor], seen: int, folder: Path
) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of every tensor that a cache of this model holds; a dtype of "" may be any floating point."""
    if not seen:
        return {}
    rows, places = tensors.get("counts"), tensors.get("positions")
    if rows is None or places is None or rows.ndim != 1 or places.ndim != 2:
        raise CheckpointError(f"The memory state in {folder} lacks counts [batch] or positions [batch, slots].")
    config, decoder = owner.config, owner.decoder
    backbone: Any = decoder
    _, _, heads, size = heads_of(backbone.config)
    batch, window = rows.shape[0], config.window_tokens
    slots = min(window, seen) if window else seen
    rule, found = config.update_rule, {"counts": ([batch], "int64"), "positions": ([batch, slots], "int64")}
    if "ends" in tensors:
        found["ends"] = [batch, 2], "int64"
    for index in range(owner.num_layers):
        mine: dict[str, tuple[list[int], str]] = {
            name: ([batch, heads, slots, size], "") for name in ("keys", "values")
        }
        if window:
            mine |= {name: ([batch, heads, config.sink_tokens, size], "") for name in ("sink_keys", "sink_values")}
        if index in owner.layers:
            wide = _name(torch.promote_types(owner.layers[index].write.bias.dtype, torch.float32))
            mine["state"] = [batch, heads, size + rule.inner, size], wide
            if rule.momentum:
                mine["momentum"] = mine["state"]
            if rule.inner:
                mine |= {"gathered": mine["state"], "taken": ([batch], "int64")}
            if config.conv_tokens:
                channels = sum(weight.shape[0] for weight in owner.layers[index].convolved())
                mine["recent"] = [batch, config.conv_tokens - 1, channels], wide
            if config.keys == "context":
                mine["context"] = [batch, heads, size], wide
            if window and config.write == "leaving":
                columns = 2 * size + 1 + rule.decays + 2 * rule.momentum + rule.inner
                mine["waiting"] = [batch, slots, config.writes * heads, columns], wide
        found |= {f"layers.{index}.{name}": fit for name, fit in mine.items()}
    return found


def _check_tensors(tensors: dict[str, Tensor], expected: dict[str, tuple[list[int], str]], folder: Path) -> None:
    """Raises `CheckpointError` naming the first tensor that is missing, unknown, or of another shape or dtype."""
    if missing := sorted(expected.keys() - tensors.keys()):
        raise CheckpointError(f"The memory state in {folder} lacks {len(missing)} tensors, first {missing[0]!r}.")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(
            f"The memory state in {folder} holds {len(unknown)} tensors that this model has not, first {unknown[0]!r}."
        )
    for name, (shape, dtype) in expected.items():
        tensor = tensors[name]
        if list(tensor.shape) != shape:
            raise CheckpointError(
                f"The memory state in {folder}: {name!r} has shape {list(tensor.shape)}, the model needs {shape}."
            )
        found = _name(tensor.dtype)
        if found != dtype if dtype else not tensor.is_floating_point():
            raise CheckpointError(
                f"The memory state in {folder}: {name!r} is {found}, the model needs {dtype or 'floating point'}."
            )
