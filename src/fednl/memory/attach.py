"""Attach memory to a frozen Hugging Face causal model, and take it off again.

One child module per layer (`self_attn.memory`) and hooks on the projections: no backbone parameter is renamed,
no projection is computed twice, and the backbone's own `o_proj` serves both paths. Everything a forward pass
needs travels with its keyword arguments, so the model is re-entrant and gradient checkpointing recomputes
exactly what it computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from fednl.errors import BackboneError
from fednl.memory.layer import MemoryLayer
from fednl.memory.settings import MemoryConfig
from fednl.memory.sites import ATTRIBUTE, PROJECTIONS, Attachment, attachment, find_decoder, is_attached
from fednl.memory.window import PassContext, window_attention, window_context

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fednl.memory.cache import MemoryCache

IMPLEMENTATION = "fednl_window"
CONTEXT = "fednl_context"
CACHE_NAMES = ("cache", "past_key_values")


@dataclass
class Frame:
    """What one attention layer captures during one pass."""

    context: PassContext
    hidden: Tensor
    cache: MemoryCache | None
    raw: dict[str, Tensor]


class Site:
    """The hooks of one attention layer. Its frames form a stack, so a layer may run inside another pass."""

    def __init__(self, attention: nn.Module, index: int, owner: Attachment) -> None:
        self.attention, self.index, self.owner = attention, index, owner
        self.frames: list[Frame] = []
        self.bound: dict[str, nn.Module] = {}
        self.handles: dict[str, Any] = {}
        self.outer = [
            attention.register_forward_pre_hook(self._enter, with_kwargs=True),
            attention.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Takes every hook off."""
        for handle in [*self.outer, *self.handles.values()]:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context = kwargs.get(CONTEXT)
        if context is None:
            raise BackboneError(
                f"Attention layer {self.index} was called outside its model's forward, where memory is not defined; "
                "call the model."
            )
        cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        hidden = args[0] if args else kwargs["hidden_states"]
        self._bind()
        self.frames.append(Frame(context, hidden, cache, {}))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.frames:
            self.frames.pop()

    def _bind(self) -> None:
        """Hooks the projections again where another library (PEFT, say) has replaced one."""
        for name in PROJECTIONS:
            projection = getattr(self.attention, name)
            if self.bound.get(name) is projection:
                continue
            if name in self.handles:
                self.handles[name].remove()
            self.bound[name] = projection
            if name == "o_proj":
                self.handles[name] = projection.register_forward_pre_hook(self._mix)
            else:
                self.handles[name] = projection.register_forward_hook(self._capture(name[0]))

    def _capture(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if self.frames:
                self.frames[-1].raw[name] = output

        return hook

    def _mix(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        memory = self.owner.layers.get(self.index)
        if memory is None or not self.frames:
            return None
        frame = self.frames[-1]
        if self.owner.gate_scale == 0 and frame.cache is None:
            return None
        layer = None if frame.cache is None else frame.cache.layers[self.index]
        mixed, written = memory(
            args[0],
            frame.hidden,
            frame.raw["q"],
            frame.raw["k"],
            frame.raw["v"],
            frame.context.keep,
            None if layer is None else layer.tensors.written,
            frame.context.window,
            self.owner.gate_scale,
        )
        if layer is not None and layer.pending is not None:
            layer.pending = replace(
                layer.pending, state=written.state, context=written.context, waiting=written.waiting
            )
        return (mixed, *args[1:])


def attach_memory(model: PreTrainedModel, config: MemoryConfig | None = None, seed: int = 0) -> PreTrainedModel:
    """Gives a causal model a memory and freezes everything else in it.

    The model keeps its class, its parameters' names and its `generate()`. Fresh rules read at a gate of about
    0.1 and write at strength 0.05.

    Args:
        model: a causal language model of a supported family; changed in place.
        config: the memory settings; defaults to `MemoryConfig()`.
        seed: draws the low-rank projections.

    Returns:
        The same model.

    Raises:
        BackboneError: memory is attached already, or the family or its layout is not supported.

    Source: FedNL (arXiv 2605.16350) section 2.2 for the parts; placement and defaults ours.
    """
    config = config or MemoryConfig()
    if is_attached(model):
        raise BackboneError("Memory is attached to this model already; call fednl.detach_memory(model) first.")
    decoder = find_decoder(model)
    blocks: Any = decoder.layers
    settings: Any = decoder.config
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    generator = torch.Generator().manual_seed(seed)
    owner = Attachment(
        decoder=decoder,
        config=config,
        layers={},
        implementation=settings._attn_implementation,
        trainable=[p for p in model.parameters() if p.requires_grad],
    )
    model.requires_grad_(False)
    with_memory = set(config.layer_numbers(len(blocks)))
    for index, block in enumerate(blocks):
        attention = block.self_attn
        if index in with_memory:
            memory = MemoryLayer(
                settings.hidden_size,
                settings.num_attention_heads,
                settings.num_key_value_heads,
                head_dim,
                config,
                generator,
            ).to(attention.q_proj.weight.device)
            owner.layers[index] = attention.memory = memory
        owner.handles.append(Site(attention, index, owner))  # type: ignore[arg-type]
    owner.handles.append(decoder.register_forward_pre_hook(_before(owner), with_kwargs=True))
    owner.handles.append(decoder.register_forward_hook(_after, with_kwargs=True, always_call=True))
    decoder.__dict__[ATTRIBUTE] = owner
    if config.window_tokens:
        model.set_attn_implementation(IMPLEMENTATION)
    return model


def detach_memory(model: PreTrainedModel) -> PreTrainedModel:
    """Gives the bare backbone back: same logits, same trainable parameters as before `attach_memory`.

    Raises:
        BackboneError: no memory is attached.
    """
    owner = attachment(model)
    for handle in owner.handles:
        handle.remove()
    blocks: Any = owner.decoder.layers
    for index in owner.layers:
        del blocks[index].self_attn.memory
    for parameter in owner.trainable:
        parameter.requires_grad_(True)
    if owner.config.window_tokens:
        model.set_attn_implementation(owner.implementation)
    del owner.decoder.__dict__[ATTRIBUTE]
    return model


@contextmanager
def closed(model: PreTrainedModel) -> Iterator[None]:
    """Multiplies every gate by 0 inside the `with` block: what remains is the backbone (under its window).

    The memory still writes where a cache is in use, so a conversation may go on after the block.
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
    return {
        f"layers.{index}.memory.{name}": parameter
        for index, memory in sorted(owner.layers.items())
        for name, parameter in memory.named_parameters()
    }


def _before(owner: Attachment) -> Any:
    """The decoder's pre-hook: settles the cache and the positions of the pass."""
    names = list(inspect.signature(owner.decoder.forward).parameters)

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        like = kwargs["inputs_embeds"] if kwargs.get("inputs_embeds") is not None else kwargs["input_ids"]
        batch, tokens = like.shape[:2]
        cache = _own_cache(owner, kwargs, names)
        keep = _padding(kwargs.get("attention_mask"), batch, tokens, 0 if cache is None else cache.seen_tokens)
        real = torch.ones(batch, tokens, dtype=torch.bool, device=like.device) if keep is None else keep
        before = torch.zeros(batch, dtype=torch.int64, device=like.device)
        if cache is not None and cache.counts is not None:
            before = cache.counts
            if before.shape[0] != batch:
                raise BackboneError(f"The cache holds {before.shape[0]} rows but the input has {batch}.")
        index = torch.where(real, before.unsqueeze(1) + real.cumsum(1) - 1, -1)
        context = PassContext(index=index, keep=keep, cache=cache, counts=before + real.sum(1))
        if owner.config.window_tokens:
            decoder: Any = owner.decoder
            context.window = window_context(
                context,
                owner.config.window_tokens,
                owner.config.sink_tokens,
                decoder.rotary_emb,
                decoder.embed_tokens.weight,
            )
            if kwargs.get("position_ids") is None:
                kwargs["position_ids"] = index.clamp(min=0)
        kwargs[CONTEXT] = context
        return (), kwargs

    return hook


def _after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """The decoder's last hook: commits the cache, or drops what a failed pass left."""
    context: PassContext | None = kwargs.get(CONTEXT)
    if context is None or context.cache is None:
        return
    if output is None:
        context.cache.drop_pending()
        return
    tokens = context.index.shape[1]
    if context.window is not None:
        positions = context.window.retained_positions()
    else:
        old = context.cache.positions
        positions = context.index if old is None else torch.cat([old, context.index], dim=1)
    padded = (context.keep is not None or context.cache.has_padding) and bool((positions < 0).any())
    context.cache.commit(context.counts, positions, padded, tokens)


def _own_cache(owner: Attachment, kwargs: dict[str, Any], names: list[str]) -> MemoryCache | None:
    """Puts a `MemoryCache` where a cache is wanted and none, or an empty stock one, was given."""
    from fednl.memory.cache import MemoryCache

    given = next((kwargs.pop(name) for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    for name in CACHE_NAMES:
        kwargs.pop(name, None)
    use_cache = kwargs.get("use_cache")
    config: Any = owner.decoder.config
    wanted = given is not None or (config.use_cache if use_cache is None else use_cache)
    if wanted and not isinstance(given, MemoryCache):
        if given is not None and not (isinstance(given, Cache) and given.get_seq_length() == 0):
            raise BackboneError(
                f"A {type(given).__name__} that already holds tokens cannot serve a model with memory; "
                "start the conversation with fednl.MemoryCache(model)."
            )
        given = MemoryCache(owner.decoder)
    if isinstance(given, MemoryCache):
        given.check_owner(owner)
        kwargs[CACHE_NAMES[0] if CACHE_NAMES[0] in names else CACHE_NAMES[1]] = given
        return given
    return None


def _padding(mask: Tensor | None, batch: int, tokens: int, past: int) -> Tensor | None:
    """Which of the new tokens are real, `[batch, tokens]` bool, or `None` if all are."""
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] not in (tokens, past + tokens):
        raise BackboneError(
            f"attention_mask has shape {list(mask.shape)}; memory needs [batch, tokens] = [{batch}, {tokens}], "
            f"or [{batch}, {past + tokens}] with the {past} tokens already given."
        )
    keep = mask[:, -tokens:].bool()
    return None if bool(keep.all()) else keep


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls under a window."""
    if attention_mask is not None:
        raise BackboneError(
            f"attention_mask has shape {list(attention_mask.shape)}; under a window it must be [batch, tokens]."
        )
    site = next(_sites(module))
    frame = site.frames[-1]
    window = frame.context.window
    assert window is not None
    head_dim = query.shape[-1]

    def heads(raw: Tensor) -> Tensor:
        return raw.view(*raw.shape[:2], -1, head_dim).transpose(1, 2)

    layer = None if frame.cache is None else frame.cache.layers[site.index]
    old = None if layer is None else layer.tensors
    sink_key = window.sinks(heads(frame.raw["k"]), None if old is None else old.sink_keys)
    sink_value = window.sinks(heads(frame.raw["v"]), None if old is None else old.sink_values)
    out = window_attention(
        query,
        key,
        value,
        heads(frame.raw["q"]),
        sink_key,
        sink_value,
        window,
        head_dim**-0.5 if scaling is None else scaling,
    )
    if layer is not None and layer.pending is not None:
        layer.pending = replace(
            layer.pending,
            keys=window.retain(key),
            values=window.retain(value),
            sink_keys=sink_key,
            sink_values=sink_value,
        )
    return out, None


def _sites(module: nn.Module) -> Iterator[Site]:
    """The site whose hooks sit on this attention module."""
    for hook in module._forward_pre_hooks.values():
        site = getattr(hook, "__self__", None)
        if isinstance(site, Site):
            yield site


AttentionInterface.register(IMPLEMENTATION, _attend)
