"""Attach memory to a frozen Hugging Face causal model, and take it off again.

One child module per attention layer (`memory`) and hooks on the projections: no backbone parameter is renamed, no
projection is computed twice, and the backbone's own output projection serves both paths. Everything a forward pass
needs travels with its keyword arguments, so the model is re-entrant and gradient checkpointing recomputes
exactly what it computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fednl.errors import BackboneError, SettingsError
from fednl.memory.address import Addresses
from fednl.memory.families import attentions, device_of, family_of, heads_of, own_window, rotary_kinds
from fednl.memory.layer import MemoryLayer
from fednl.memory.layer_hooks import IMPLEMENTATION, Site
from fednl.memory.model_pass import begin_call, begin_pass, end_call, end_pass
from fednl.memory.settings import MemoryConfig
from fednl.memory.sites import (
    ATTRIBUTE,
    Attachment,
    attachment,
    find_decoder,
    freeze,
    is_attached,
    thaw,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROPE_THAT_CHANGES = ("dynamic", "longrope")


def attach_memory(model: PreTrainedModel, config: MemoryConfig | None = None, seed: int = 0) -> PreTrainedModel:
    """Gives a causal model a memory and freezes everything else in it, but for what PEFT has made trainable.

    The model keeps its class, its parameters' names and its `generate()`. Fresh rules read at a gate of about
    0.1 and write at strength `config.write_start`. They stay float32 where the model is cast to a narrower type.

    Padding on either side of a row changes nothing for its real tokens. Padding inside a row, or between the pieces of
    a conversation, does neither under a window; with `window_tokens = 0` it counts in rotary distances, as in the bare
    model, unless `position_ids` count real tokens only (`(attention_mask.cumsum(1) - 1).clamp(min=0)` of all so far).

    Args:
        model: a causal language model of a supported family; changed in place, or not at all if refused.
        config: the memory settings; defaults to `MemoryConfig()`.
        seed: draws the low-rank projections.

    Returns:
        The same model.

    Raises:
        BackboneError: memory is attached already, or the family or its layout is not supported.
        SettingsError: `config.layers` names layers that the model does not have, or `config.write_rank` is more than
            its key/value heads.

    Source: FedNL (arXiv 2605.16350) section 2.2 for the parts; placement and defaults ours.
    """
    config = config or MemoryConfig()
    if is_attached(model):
        raise BackboneError("Memory is attached to this model already; call fednl.detach_memory(model) first.")
    decoder = find_decoder(model)
    backbone: Any = decoder
    _check_window(decoder, config)
    memories, addresses = _memories(decoder, config, seed)
    source = config.address_number(len(attentions(decoder)))
    owner = Attachment(decoder, config, memories, backbone.config._attn_implementation, addresses, source)
    if config.window_tokens:
        model.set_attn_implementation(IMPLEMENTATION)
    freeze(model)
    for index, attention in enumerate(attentions(decoder)):
        if index in owner.layers:
            attention.memory = owner.layers[index]
        if addresses is not None and index == owner.address_layer:
            attention.addresses = addresses
        if index in owner.layers or index == owner.address_layer or config.window_tokens:
            owner.handles.append(Site(attention, index, owner))
    names = tuple(inspect.signature(decoder.forward).parameters)
    owner.handles.append(decoder.register_forward_pre_hook(partial(begin_pass, owner, names), with_kwargs=True))
    owner.handles.append(decoder.register_forward_hook(partial(end_pass, owner), with_kwargs=True, always_call=True))
    # What holds the decoder, for a wrapper's `generate` (PEFT's, say) passes the wrapper by.
    head = next((module for module in model.modules() if any(child is decoder for child in module.children())), None)
    if head is not None:
        owner.handles.append(head.register_forward_pre_hook(begin_call, with_kwargs=True))
        owner.handles.append(head.register_forward_hook(end_call, with_kwargs=True, always_call=True))
    decoder.__dict__[ATTRIBUTE] = owner
    return model


def detach_memory(model: PreTrainedModel) -> PreTrainedModel:
    """Gives the bare backbone back: same logits, same trainable parameters as before `attach_memory`.

    With a LoRA still on the model the backbone stays frozen until that is taken off too.

    Raises:
        BackboneError: no memory is attached.
    """
    owner = attachment(model)
    for handle in owner.handles:
        handle.remove()
    if owner.config.window_tokens:
        model.set_attn_implementation(owner.implementation)
    del owner.decoder.__dict__[ATTRIBUTE]
    thaw(model)
    return model


@contextmanager
def closed(model: PreTrainedModel) -> Iterator[None]:
    """Multiplies every gate by 0 inside the `with` block: what remains is the backbone (under its window).

    It holds for every pass that starts inside the block, whatever the thread, and for that pass's backward pass. The
    memory still writes where a cache is in use, so a conversation may go on after the block.
    """
    owner = attachment(model)
    before, owner.gate_scale = owner.gate_scale, 0.0
    try:
        yield
    finally:
        owner.gate_scale = before


def rules(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Returns the live trainable rules of the memory by canonical name, `layers.{i}.memory.{group}.{tensor}`."""
    owner = attachment(model)
    found = {
        f"layers.{index}.memory.{name}": parameter
        for index, memory in sorted(owner.layers.items())
        for name, parameter in memory.named_parameters()
    }
    if owner.addresses is not None:
        prefix = f"layers.{owner.address_layer}.memory.address"
        found |= {f"{prefix}.{name}": parameter for name, parameter in owner.addresses.named_parameters()}
    return found


def train_rules(model: nn.Module, train: bool = True) -> None:
    """Says whether the rules are to train; needed after PEFT's `get_peft_model`, which freezes what it does not know.

    PEFT does not save the rules either: `save_rules` does. Copies that its `modules_to_save` would make are not used.

    Args:
        model: a model with memory attached, or PEFT's wrapper around it.
        train: False leaves the rules as they are, frozen, beside another adapter that trains.

    Raises:
        BackboneError: no memory is attached.
    """
    owner = attachment(model)
    owner.left_frozen = not train
    for rule in owner.parameters():
        rule.requires_grad_(train)


def _memories(decoder: nn.Module, config: MemoryConfig, seed: int) -> tuple[dict[int, MemoryLayer], Addresses | None]:
    """Fresh rules for every layer that gets a memory, and its addresses, on that layer's device."""
    backbone: Any = decoder
    sizes, layers = heads_of(backbone.config), attentions(decoder)
    if config.write_rank > sizes.kv_heads:
        raise SettingsError(
            f"[memory] write-rank = {config.write_rank}: the backbone has {sizes.kv_heads} key/value heads, and a "
            f"matrix with as many rows has no higher rank; use at most {sizes.kv_heads}, or 0 for a full matrix."
        )
    generator = torch.Generator().manual_seed(seed)
    numbers = config.layer_numbers(len(layers))
    devices = [device_of(attention, family_of(decoder)) for attention in layers]
    memories = {index: MemoryLayer(*sizes, config, generator).to(devices[index]) for index in numbers}
    source = config.address_number(len(layers))
    if source is None:
        return memories, None
    addresses = Addresses(sizes.hidden, sizes.kv_heads, sizes.dim, config.address_rank, generator)
    return memories, addresses.to(devices[source])


def _check_window(decoder: nn.Module, config: MemoryConfig) -> None:
    """Raises `BackboneError` where the backbone's own attention does not go with a window."""
    if not config.window_tokens:
        return
    backbone: Any = decoder
    for rope in rotary_kinds(backbone).values():
        if rope in ROPE_THAT_CHANGES:
            raise BackboneError(
                f"The backbone's rotary embedding ({rope!r}) changes with the length of the text, so that cached keys "
                "would not fit later queries; use memory.window-tokens = 0."
            )
    own = [own_window(decoder, attention) for attention in attentions(decoder)]
    narrowest = min((tokens for tokens in own if tokens), default=config.window_tokens)
    if config.window_tokens > narrowest:
        raise BackboneError(
            f"memory.window-tokens = {config.window_tokens}, but some of the backbone's layers see {narrowest} tokens "
            f"only; use at most {narrowest}."
        )
