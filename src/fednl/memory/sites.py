"""Where memory goes in a Hugging Face model: the decoder, its attention layers, their projections.

What differs between families of models stands here (docs/decisions/0020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from fednl.errors import BackboneError
from fednl.memory.settings import MemoryConfig

if TYPE_CHECKING:
    from fednl.memory.address import Addresses
    from fednl.memory.layer import MemoryLayer


@dataclass(frozen=True)
class Family:
    """How the attention of one family of models differs from Llama's, where the hooks have to know.

    Attributes:
        norms: queries and keys go through `q_norm` and `k_norm` before rotary embedding; what comes out of these is
            what the memory and the sinks see.
        heads_first: the norms are given `[batch, heads, tokens, head_dim]`, not tokens first.
        one_sliding_window: every layer sees `config.sliding_window` tokens; layers do not say so themselves.
    """

    norms: bool = False
    heads_first: bool = False
    one_sliding_window: bool = False


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(norms=True),
    "mistral": Family(one_sliding_window=True),
    "gemma": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(norms=True, heads_first=True),
    "smollm3": Family(),
    "olmo2": Family(norms=True),
    "granite": Family(),
}
"""The families that memory attaches to, by `config.model_type`."""
RECURRENT = ("mamba",)
"""The families without attention that a LoRA can be trained on."""
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


def is_recurrent(model: nn.Module) -> bool:
    """Tells whether a model has no attention, so that a LoRA can sit on it but neither memory nor window."""
    return getattr(getattr(model, "config", None), "model_type", "") in RECURRENT


def find_decoder(model: nn.Module) -> nn.Module:
    """Finds the module that runs the transformer blocks, through any wrapper.

    Raises:
        BackboneError: the family is not supported, or its attention layers are not recognised, or see later tokens.
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
                wanted = {*PROJECTIONS, *sources(family).values()}
                missing = sorted(name for name in wanted if not hasattr(attention, name))
                if missing:
                    raise BackboneError(
                        f"Attention layer {index} of backbone family {family!r} has no {', '.join(missing)}: "
                        "its layout is not recognised; use an unmodified model of this family."
                    )
                if not getattr(attention, "is_causal", True):
                    raise BackboneError(
                        f"Attention layer {index} of backbone family {family!r} sees later tokens too; memory needs "
                        "a causal model, with use_bidirectional_attention = False."
                    )
            return module
    raise BackboneError(f"No transformer blocks found in {type(model).__name__}; pass a causal language model.")


def sources(family: str) -> dict[str, str]:
    """The attention's submodule that gives q, k or v as they are before rotary embedding."""
    norms = FAMILIES[family].norms
    return {"q": "q_norm" if norms else "q_proj", "k": "k_norm" if norms else "k_proj", "v": "v_proj"}


def by_token(output: Tensor, family: str) -> Tensor:
    """What a source gives, as `[batch, tokens, heads * head_dim]`."""
    if output.ndim == 3:
        return output
    return (output.transpose(1, 2) if FAMILIES[family].heads_first else output).flatten(2)


def head_width(config: Any) -> int:
    """Width of a head, from a backbone's own config."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotary_kinds(decoder: Any) -> dict[str, str]:
    """The backbone's rotary embeddings: kind of layer -> type of embedding; "" is the one that all layers share."""
    types = getattr(decoder.rotary_emb, "rope_type", "default")
    return dict(types) if isinstance(types, dict) else {"": types}


def rotaries(decoder: Any) -> dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """The rotary embeddings by kind of layer, each `(like, positions) -> (cos, sin)`."""
    embedding = decoder.rotary_emb
    return {k: partial(embedding, layer_type=k) if k else embedding for k in rotary_kinds(decoder)}


def rotary_kind(decoder: Any, attention: Any) -> str | None:
    """Which of `rotaries` an attention layer uses; `None` if it uses no rotary embedding."""
    if not getattr(attention, "use_rope", True):
        return None
    kinds = rotary_kinds(decoder)
    return "" if "" in kinds else str(attention.layer_type)


def own_window(decoder: Any, attention: Any) -> int | None:
    """How many tokens the layer itself sees; `None` if all."""
    every = FAMILIES[decoder.config.model_type].one_sliding_window
    tokens: int | None = getattr(decoder.config if every else attention, "sliding_window", None)
    return tokens or None


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
