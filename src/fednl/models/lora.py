"""LoRA on the frozen backbone: the one door to peft.

The model keeps its class and its `generate()`; peft's layers are put into it and taken out again. Names that
leave this file are canonical, `layers.{i}.{module}.lora_A`, whatever wraps the model.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fednl.errors import BackboneError, SettingsError
from fednl.memory.attach import rules
from fednl.memory.rules_file import assign
from fednl.memory.sites import freeze, is_attached, thaw
from fednl.models.settings import LoraSettings
from fednl.seeding import torch_rng

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj"),  # Phi-3
    *("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),  # GPT-NeoX
    *("c_attn", "c_proj", "c_fc"),  # GPT-2
)
LEFT_ALONE = ("lm_head", "embed_tokens", "embed_out", "wte")
_ATTRIBUTE = "_fednl_lora"
_PEFT_NAME = "default"


@dataclass(eq=False)
class _Lora:
    """One model's LoRA: its settings and where it sits."""

    settings: LoraSettings
    sites: dict[str, tuple[nn.Module, str]]

    def layer(self, name: str) -> Any:
        """The peft layer at a site."""
        parent, attribute = self.sites[name]
        return getattr(parent, attribute)


def attach_lora(model: PreTrainedModel, settings: LoraSettings, seed: int) -> PreTrainedModel:
    """Puts trainable low-rank updates beside a model's projections and freezes the rest of the backbone.

    B starts at zero, so the logits do not change. Updates are float32 (float64 in a float64 model) whatever
    the backbone's precision. Rules of an attached memory stay as trainable as they were. No global random
    generator is read or moved.

    Args:
        model: a causal language model; changed in place.
        settings: the `[lora]` section, `rank` at least 1.
        seed: draws A, one stream per tensor, uniform in `[-1/sqrt(inputs), 1/sqrt(inputs))` as peft does.

    Returns:
        The same model.

    Raises:
        SettingsError: the rank is 0, or a target does not exist or is the head or the embeddings.
        BackboneError: LoRA is attached already, or the model's layout is not recognised.

    Source: Hu et al. 2021, "LoRA", section 4.1.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if settings.rank < 1:
        raise SettingsError("lora.rank = 0 means no LoRA; set it to 1 or more to train LoRA.")
    if _ATTRIBUTE in model.__dict__ or hasattr(model, "peft_config"):
        raise BackboneError("a LoRA is attached to this model already; detach it first.")
    sites, full_names = _find_sites(model, settings.targets)
    rules_to_train = [p for p in rules(model).values() if p.requires_grad] if is_attached(model) else []
    freeze(model, keep=rules_to_train)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.scale_alpha,
        target_modules="|".join(re.escape(name) for name in full_names),
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=any(_is_conv1d(getattr(*site)) for site in sites.values()),
    )
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, model, _PEFT_NAME)
    # peft freezes every parameter that is not its own.
    for rule in rules_to_train:
        rule.requires_grad_(True)
    lora = model.__dict__[_ATTRIBUTE] = _Lora(settings, sites)
    for name in sites:
        _initialise(lora.layer(name), name, seed)
    return model


def lora_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Gives the live LoRA parameters by canonical name, `layers.{i}.{module}.lora_A` and `.lora_B`.

    A is `[rank, inputs]`, B is `[outputs, rank]`.

    Raises:
        BackboneError: no LoRA is attached.
    """
    lora = _attached(model)
    return {
        f"{name}.{factor}": getattr(lora.layer(name), factor)[_PEFT_NAME].weight
        for name in lora.sites
        for factor in ("lora_A", "lora_B")
    }


def set_lora(model: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Copies values into the live LoRA parameters; every name and shape must fit, or nothing is changed.

    Raises:
        BackboneError: no LoRA is attached.
        CheckpointError: a name is missing or unknown, or a shape differs.
    """
    assign(lora_params(model), params, "the LoRA")


def detach_lora(model: PreTrainedModel) -> PreTrainedModel:
    """Gives the bare model back: its own modules, bit-equal logits, trainable what was trainable before.

    With memory still on the model the backbone stays frozen until that is taken off too.

    Raises:
        BackboneError: no LoRA is attached.
    """
    lora = _attached(model)
    for name, (parent, attribute) in lora.sites.items():
        setattr(parent, attribute, lora.layer(name).base_layer)
    del model.__dict__[_ATTRIBUTE], model.peft_config
    thaw(model)
    return model


def has_lora(model: nn.Module) -> bool:
    """True if `attach_lora` was called on the model and not undone."""
    return _ATTRIBUTE in model.__dict__


def _attached(model: nn.Module) -> _Lora:
    lora = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(lora, _Lora):
        raise BackboneError("no LoRA is attached to this model; call attach_lora first.")
    return lora


def _initialise(layer: Any, name: str, seed: int) -> None:
    for factor in ("lora_A", "lora_B"):
        linear = getattr(layer, factor)[_PEFT_NAME]
        linear.to(torch.promote_types(layer.base_layer.weight.dtype, torch.float32))
        start = torch.zeros(linear.weight.shape)
        if factor == "lora_A":
            bound = 1 / math.sqrt(linear.in_features)
            start.uniform_(-bound, bound, generator=torch_rng(seed, f"lora {name}"))
        with torch.no_grad():
            linear.weight.copy_(start)


def _find_sites(model: nn.Module, targets: str) -> tuple[dict[str, tuple[nn.Module, str]], list[str]]:
    """Finds the targeted projections: canonical name -> (parent, attribute), and their names in the model."""
    wanted = ALL_LINEAR if targets == "all-linear" else tuple(targets.split(","))
    if alone := [name for name in wanted if name in LEFT_ALONE]:
        raise SettingsError(
            f"lora.targets names {alone[0]!r}, but head and embeddings are left alone (they are often tied); "
            f"choose among {', '.join(ALL_LINEAR)}."
        )
    sites: dict[str, tuple[nn.Module, str]] = {}
    found = list(_projections(model))
    full_names, available = [], {path[-1] for _, _, _, path in found}
    times = Counter((index, path[-1]) for index, _, _, path in found)
    for index, full_name, parent, path in found:
        attribute = path[-1]
        if attribute not in wanted:
            continue
        # GPT-2 has a c_proj in its attention and one in its MLP; such names need the path to them.
        sites[f"layers.{index}.{attribute if times[index, attribute] == 1 else '.'.join(path)}"] = (parent, attribute)
        full_names.append(full_name)
    unknown = [name for name in wanted if name not in available]
    if not sites or (unknown and targets != "all-linear"):
        raise SettingsError(
            f"lora.targets = {targets!r}: this model's layers have no {', '.join(unknown)}; choose among "
            f"{', '.join(sorted(available)) or 'nothing, its layers are not recognised'}."
        )
    return sites, full_names


def _projections(model: nn.Module) -> Iterator[tuple[int, str, nn.Module, list[str]]]:
    """Yields (layer, full name, parent, path in the block) of every linear map in the blocks but the memory's."""
    for prefix, module in model.named_modules():
        for list_name in ("layers", "h"):
            blocks = getattr(module, list_name, None)
            if not isinstance(blocks, nn.ModuleList):
                continue
            for index, block in enumerate(blocks):
                for name, inner in block.named_modules():
                    path = name.split(".")
                    if (isinstance(inner, nn.Linear) or _is_conv1d(inner)) and "memory" not in path:
                        full = ".".join(filter(None, (prefix, list_name, str(index), name)))
                        yield index, full, block.get_submodule(".".join(path[:-1])), path
            return


def _is_conv1d(module: nn.Module) -> bool:
    """True for GPT-2's linear maps, whose weights stand the other way round."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)
