"""Where memory goes in a Hugging Face model, and what is known of a model that has one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fednl.errors import BackboneError
from fednl.memory.families import FAMILIES, attentions
from fednl.memory.settings import MemoryConfig

if TYPE_CHECKING:
    from fednl.memory.address import Addresses
    from fednl.memory.layer import MemoryLayer


RECURRENT = ("mamba",)
"""The families without attention that a LoRA can be trained on."""
ATTRIBUTE, FROZEN = "_fednl_attachment", "_fednl_frozen"
KEEPS_FROZEN = "_fednl_keeps_frozen"
"""Set on a model by an adapter that is no part of its tree, while it needs the backbone frozen."""
BESIDE = "_fednl_beside"
"""Set on a decoder by such an adapter, while it changes what the decoder gives: a `Beside`."""


class Removable(Protocol):
    """What detaching takes off."""

    def remove(self) -> None:
        """Takes it off."""


@dataclass(frozen=True)
class Beside:
    """What an adapter that is no part of a decoder's tree does to it.

    Attributes:
        how: its settings, as far as they change what it does.
        tensors: its live numbers, by name.
    """

    how: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class GivenPrefix:
    """What a pass that begins above the frozen layers is given of them.

    Attributes:
        source: what the addresses are made of, `[batch, tokens, hidden]`, or `None` where they are made further up.
        ids, real: the tokens that they were computed for, `[batch, tokens]`, and which of them are no padding.
    """

    source: Tensor | None
    ids: Tensor
    real: Tensor


@dataclass(eq=False)
class Attachment:
    """One model's memory: its settings, the hooks that carry it, and how loud it is.

    Attributes:
        decoder: the module that runs the transformer blocks.
        config: the memory settings.
        layers: layer index -> its memory; layers without memory are absent.
        addresses: what all memory layers write and ask under with `keys = "context"`, else `None`.
        address_layer: the layer whose inputs the addresses are made of, as numbered on attaching, or `None`.
        gate_scale: multiplies every gate; 0 inside `closed(model)`.
        implementation: the backbone's own attention implementation, put back by `detach_memory`.
        handles: what to remove on detaching.
        given: set while passes begin above the frozen layers (`fednl.memory.prefix`).
        left_frozen: whether the rules are not to train although something else in the model does.
    """

    decoder: nn.Module
    config: MemoryConfig
    layers: dict[int, MemoryLayer]
    implementation: str
    addresses: Addresses | None = None
    address_layer: int | None = None
    gate_scale: float = 1.0
    handles: list[Removable] = field(default_factory=list)
    given: GivenPrefix | None = None
    left_frozen: bool = False

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every rule."""
        for module in (*self.layers.values(), self.addresses):
            if module is not None:
                yield from module.parameters()

    @property
    def num_layers(self) -> int:
        """Number of transformer blocks."""
        return len(attentions(self.decoder))


def is_recurrent(model: nn.Module) -> bool:
    """Tells whether a model has no attention, so that a LoRA can sit on it but neither memory nor window."""
    return getattr(getattr(model, "config", None), "model_type", "") in RECURRENT


def find_decoder(model: nn.Module) -> nn.Module:
    """Finds the module that runs the transformer blocks, through any wrapper.

    Raises:
        BackboneError: the family is not supported, or its attention layers are not recognised, or see later tokens.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in FAMILIES:
        raise BackboneError(
            f"Backbone family {kind!r} is not supported by the memory adapter; use one of: {', '.join(FAMILIES)}."
        )
    family = FAMILIES[kind]
    for module in model.modules():
        blocks = getattr(module, family.blocks, None)
        if isinstance(blocks, nn.ModuleList) and len(blocks):
            for index, block in enumerate(blocks):
                attention = getattr(block, family.attention, None)
                missing = sorted(name for name in family.modules if not hasattr(attention, name))
                if missing:
                    raise BackboneError(
                        f"Attention layer {index} of backbone family {kind!r} has no {', '.join(missing)}: "
                        "its layout is not recognised; use an unmodified model of this family."
                    )
                if not getattr(attention, "is_causal", True) or hasattr(block, "crossattention"):
                    raise BackboneError(
                        f"Attention layer {index} of backbone family {kind!r} sees later tokens too, or another text; "
                        "memory needs a causal model, with use_bidirectional_attention or add_cross_attention = False."
                    )
            return module
    raise BackboneError(f"No transformer blocks found in {type(model).__name__}; pass a causal language model.")


def attachment(model: nn.Module) -> Attachment:
    """Returns the attachment of a model with memory.

    Raises:
        BackboneError: no memory is attached.
    """
    for module in model.modules():
        found = module.__dict__.get(ATTRIBUTE)
        if found is not None:
            assert isinstance(found, Attachment)
            return found
    raise BackboneError(f"{type(model).__name__} has no memory attached; call fednl.attach_memory(model) first.")


def is_attached(model: nn.Module) -> bool:
    """True if `attach_memory` was called on the model and not undone."""
    return any(ATTRIBUTE in module.__dict__ for module in model.modules())


def check_trains(owner: Attachment) -> None:
    """Raises `BackboneError` where a pass is to teach another adapter but no rule, and nobody has said so.

    PEFT freezes every parameter that it does not know when it comes after the memory.
    """
    if owner.left_frozen or not torch.is_grad_enabled() or any(rule.requires_grad for rule in owner.parameters()):
        return
    if any(True for _ in owner.parameters()) and any(p.requires_grad for p in owner.decoder.parameters()):
        raise BackboneError(
            "Every rule of the memory is frozen while other parameters train, as PEFT's get_peft_model leaves them; "
            "call fednl.memory.train_rules(model) after it, or train_rules(model, False) if they are to stay so."
        )


def freeze(model: nn.Module, keep: Iterable[nn.Parameter] = ()) -> None:
    """Stops the backbone's training, and remembers what trained in it for `thaw`.

    Args:
        model: with PEFT on it nothing changes: PEFT has frozen the backbone, and what trains is its own.
        keep: another adapter's parameters, which stay as they are.
    """
    if hasattr(model, "peft_config"):
        return
    kept = {id(parameter) for parameter in keep}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in kept]
    for parameter in frozen:
        parameter.requires_grad_(False)
    model.__dict__.setdefault(FROZEN, []).extend(frozen)


def thaw(model: nn.Module) -> None:
    """Lets the backbone train as it did before `freeze`, once no adapter is left on the model."""
    if is_attached(model) or hasattr(model, "peft_config") or KEEPS_FROZEN in model.__dict__:
        return
    for module in model.modules():
        for parameter in module.__dict__.pop(FROZEN, ()):
            parameter.requires_grad_(True)


def cache_argument(model: nn.Module) -> str:
    """The cache's keyword: `cache` in new transformers, `past_key_values` before."""
    forward: Callable[..., Any] = model.forward
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
