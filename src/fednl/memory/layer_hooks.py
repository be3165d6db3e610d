"""The hooks of one attention layer: what they catch during a pass, and where the memory's read goes in.

A catch (`Frame`) travels with the attention's keyword arguments and lives exactly as long as the call, whatever
ends it. The projections' hooks see no keyword arguments; they find it as the innermost call of their thread.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from fednl.errors import BackboneError
from fednl.memory.compiled import uncompiled
from fednl.memory.families import family_of, heads_of, rotary_kind
from fednl.memory.finite import note
from fednl.memory.pass_context import PassContext
from fednl.memory.sites import Attachment
from fednl.memory.window import window_attention

if TYPE_CHECKING:
    from fednl.memory.cache import MemoryCache

IMPLEMENTATION = "fednl_window"
CONTEXT, FRAME = "fednl_context", "fednl_frame"
CACHE_NAMES = ("cache", "past_key_values")
"""What transformers calls a model's cache argument, the present name first."""
OLD_CACHE_NAME = "layer_past"
"""What attention layers of GPT-NeoX call theirs."""


@dataclass(eq=False)
class Frame:
    """What one attention layer captures during one call."""

    site: Site
    context: PassContext
    hidden: Tensor
    cache: MemoryCache | None
    raw: dict[str, Tensor] = field(default_factory=dict)


class _Calls(threading.local):
    """The attention calls now running in this thread, outermost first; a dead one ended without its hook."""

    def __init__(self) -> None:
        self.frames: list[weakref.ref[Frame]] = []


_CALLS = _Calls()
_BINDING = threading.Lock()


class Site:
    """The hooks of one attention layer; a layer may run in several threads, and inside another pass."""

    def __init__(self, attention: nn.Module, index: int, owner: Attachment) -> None:
        self.attention, self.index, self.owner = attention, index, owner
        self.address_layer = owner.address_layer
        decoder: Any = owner.decoder
        self.family, self.heads = family_of(decoder), heads_of(decoder.config)
        self.rotary = rotary_kind(decoder, attention)
        self.names = (*self.family.sources, self.family.output)
        self.bound: dict[str, nn.Module] = {}
        self.handles: dict[str, list[Any]] = {}
        self.outer = [
            attention.register_forward_pre_hook(self._enter, with_kwargs=True),
            attention.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]
        self._bind()

    def remove(self) -> None:
        """Takes every hook off, and the layer's memory."""
        for handle in itertools.chain(self.outer, *self.handles.values()):
            handle.remove()
        if self.index in self.owner.layers:
            del self.attention.memory
        if self.index == self.address_layer:
            del self.attention.addresses

    @uncompiled
    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        context = kwargs.get(CONTEXT)
        if context is None:
            raise BackboneError(
                f"Attention layer {self.index} was called outside its model's forward, where memory is not defined; "
                "call the model."
            )
        self._bind()
        cache = next((kwargs[name] for name in (*CACHE_NAMES, OLD_CACHE_NAME) if kwargs.get(name) is not None), None)
        hidden = args[0] if args else kwargs["hidden_states"]
        self._check_devices(hidden, cache)
        if self.index == self.address_layer:
            context.source = hidden.detach()
        frame = Frame(self, context, hidden, cache)
        _CALLS.frames.append(weakref.ref(frame))
        return args, {**kwargs, FRAME: frame}

    def _check_devices(self, hidden: Tensor, cache: MemoryCache | None) -> None:
        """Raises `BackboneError` unless the layer's memory and its part of the cache are where its input is."""
        memory, held = self.owner.layers.get(self.index), None if cache is None else cache.layers[self.index].tensors
        for what, tensor in (
            ("rules are", None if memory is None else memory.gate.bias),
            ("cached keys are", None if held is None else held.keys),
            ("memory state is", None if held is None else held.state),
        ):
            if tensor is not None and tensor.device != hidden.device:
                raise BackboneError(
                    f"Layer {self.index}: its {what} on device {tensor.device} but its input on {hidden.device}; move "
                    "model and conversation to one device."
                )

    @uncompiled
    def _leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        frame = kwargs.get(FRAME)
        _CALLS.frames[:] = [other for other in _CALLS.frames if other() not in (None, frame)]

    def _frame(self) -> Frame | None:
        """This layer's catch, if its attention is the innermost one running in this thread."""
        frame = _CALLS.frames[-1]() if _CALLS.frames else None
        return frame if frame is not None and frame.site is self else None

    def _bind(self) -> None:
        """Hooks the projections, and norms after them, again where another library (PEFT, say) has replaced one."""
        for name in self.names:
            projection = getattr(self.attention, name)
            if self.bound.get(name) is not projection:
                with _BINDING:
                    self._bind_one(name, projection)

    def _bind_one(self, name: str, projection: nn.Module) -> None:
        if self.bound.get(name) is projection:  # another thread was faster
            return
        for handle in self.handles.get(name, ()):
            handle.remove()
        if name == self.family.output:
            let_through = projection.register_forward_hook(self._check_gradient)
            self.handles[name] = [projection.register_forward_pre_hook(self._mix), let_through]
        else:
            self.handles[name] = [projection.register_forward_hook(partial(self._capture, name))]
        self.bound[name] = projection

    @uncompiled
    def _capture(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        frame = self._frame()
        if frame is not None:
            frame.raw |= self.family.parts(name, output, self.heads)

    def _check_gradient(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Raises `BackboneError` where the output projection lets no gradient through to what the memory gave it."""
        if not torch.is_grad_enabled() or not args[0].requires_grad:
            return
        # bitsandbytes packs 4-bit weights for inference at the first pass without gradients, and they stay so.
        packed = getattr(getattr(getattr(module, "weight", None), "quant_state", None), "packing_format_for_cpu", False)
        if packed or not output.requires_grad:
            raise BackboneError(
                f"Layer {self.index}: its output projection ({type(module).__name__}) lets no gradient through, so the "
                "rules would not learn; 4-bit weights on a CPU are so after a pass without gradients: load the model "
                "anew and call model.train() before any pass."
            )

    @uncompiled
    def _mix(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        memory, frame = self.owner.layers.get(self.index), self._frame()
        if memory is None or frame is None:
            return None
        gate_scale = frame.context.gate_scale
        if gate_scale == 0 and frame.cache is None:
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
            gate_scale,
            None if self.owner.addresses is None else partial(self._addresses, frame),
        )
        note(frame.context, self.index, frame.hidden, mixed)
        if layer is not None and layer.pending is not None:
            layer.pending = replace(layer.pending, **written._asdict())
        return (mixed, *args[1:])

    def _addresses(self, frame: Frame, keep: Tensor | None, carry: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The pass's queries, keys and last average.

        With gradients every memory layer computes them itself, so that gradients reach the rules however a layer is
        recomputed; without, the first layer does for all that go on from the same average.
        """
        addresses, context = self.owner.addresses, frame.context
        source, shared = context.source, None if torch.is_grad_enabled() else context.addressed
        if addresses is None or source is None:
            raise BackboneError(
                f"This pass left out layer {self.address_layer}, whose inputs the memory's addresses are made of; "
                "run every layer up to the last one with memory."
            )
        if shared is None or not _same(shared[0], carry):
            # A backbone spread over devices keeps the addresses on their own layer's.
            given = (None if t is None else t.to(source.device) for t in (keep, carry))
            shared = carry, addresses(source, *given)
            if not torch.is_grad_enabled():
                context.addressed = shared
        queries, keys, after = (part.to(frame.hidden.device) for part in shared[1])
        return queries, keys, after


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two layers go on from the same average, which is one tensor until a cache is copied or reordered."""
    if one is other or one is None or other is None:
        return one is other
    return one.device == other.device and torch.equal(one, other)


@uncompiled
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls under a window."""
    frame: Frame | None = kwargs.get(FRAME)
    if frame is None:
        raise BackboneError(
            "This model has no memory attached but shares its config with a model that has, whose window it cannot "
            "use; give each model its own config."
        )
    if attention_mask is not None:
        raise BackboneError(
            f"attention_mask has shape {list(attention_mask.shape)}; under a window it must be [batch, tokens]."
        )
    window = frame.context.window
    assert window is not None
    head_dim = query.shape[-1]

    def heads(raw: Tensor) -> Tensor:
        return raw.view(*raw.shape[:2], -1, head_dim).transpose(1, 2)

    layer = None if frame.cache is None else frame.cache.layers[frame.site.index]
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
        None if frame.site.rotary is None else window.rotations[frame.site.rotary],
        head_dim**-0.5 if scaling is None else scaling,
        dropout,
        softcap,
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


AttentionInterface.register(IMPLEMENTATION, attend)
