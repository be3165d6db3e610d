"""Where memory goes in a Hugging Face model: the decoder, its attention layers, their projections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from fednl.errors import BackboneError
from fednl.memory.settings import MemoryConfig

if TYPE_CHECKING:
    from fednl.memory.address import Addresses
    from fednl.memory.layer import MemoryLayer

FAMILIES = ("llama", "qwen2")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
ATTRIBUTE, FROZEN = "_fednl_attachment", "_fednl_frozen"


class Removable(Protocol):
    """What detaching takes off."""

    def remove(self) -> None:
        """Takes it off."""


@dataclass(eq=False)
class Attachment:
    """One model's memory: its settings, the hooks that carry it, and how loud it is.

    Attributes:
        decoder: the module whose `layers` are the transformer blocks.
        config: the memory settings.
        layers: layer index -> its memory; layers without memory are absent.
        addresses: what all memory layers write and ask under with `keys = "context"`, else `None`.
        address_layer: the layer whose inputs the addresses are made of, as numbered on attaching, or `None`.
        gate_scale: multiplies every gate; 0 inside `closed(model)`.
        implementation: the backbone's own attention implementation, put back by `detach_memory`.
        handles: what to remove on detaching.
    """

    decoder: nn.Module
    config: MemoryConfig
    layers: dict[int, MemoryLayer]
    implementation: str
    addresses: Addresses | None = None
    address_layer: int | None = None
    gate_scale: float = 1.0
    handles: list[Removable] = field(default_factory=list)

    @property
    def num_layers(self) -> int:
        """Number of transformer blocks."""
        blocks: Any = self.decoder.layers
        return len(blocks)


def find_decoder(model: nn.Module) -> nn.Module:
    """Finds the module that runs the transformer blocks, through any wrapper.

    Raises:
        BackboneError: the family is not supported, or its attention layers are not recognised.
    """
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if family not in FAMILIES:
        raise BackboneError(
            f"Backbone family {family!r} is not supported by the memory adapter; use one of: {', '.join(FAMILIES)}."
        )
    for module in model.modules():
        blocks = getattr(module, "layers", None)
        if isinstance(blocks, nn.ModuleList) and len(blocks):
            for index, block in enumerate(blocks):
                attention = getattr(block, "self_attn", None)
                missing = [name for name in PROJECTIONS if not hasattr(attention, name)]
                if missing:
                    raise BackboneError(
                        f"Attention layer {index} of backbone family {family!r} has no {', '.join(missing)}: "
                        "its layout is not recognised; use an unmodified model of this family."
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
    """Lets the backbone train as it did before `freeze`, once neither memory nor PEFT is on the model."""
    if is_attached(model) or hasattr(model, "peft_config"):
        return
    for module in model.modules():
        for parameter in module.__dict__.pop(FROZEN, ()):
            parameter.requires_grad_(True)
