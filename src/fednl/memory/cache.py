"""The private, transient memory of one conversation: sinks, window and memory state, constant in size.

A forward pass never changes the cache while it runs. Each layer leaves its new tensors with the cache as
*pending*; the model's forward commits them together at its end. A pass that fails half way leaves the
conversation as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from fednl.errors import BackboneError
from fednl.memory.layer import Written
from fednl.memory.sites import attachment

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LayerTensors:
    """What one layer remembers.

    Attributes:
        keys: `[batch, kv_heads, slots, head_dim]`, rotated, the window (or everything with `window_tokens = 0`).
        values: same shape.
        sink_keys: `[batch, kv_heads, sinks, head_dim]`, not rotated; `None` before the first token.
        sink_values: same shape.
        state: the memory state, `[batch, kv_heads, head_dim, head_dim]` float32; `None` is the zero state.
        context: the running average of keys, `[batch, kv_heads, head_dim]`, with `memory.keys = "context"`.
        waiting: what is written once it leaves the window, with `memory.write = "leaving"`.
        momentum: the state's momentum, as `state`, with a rule that has one.
        recent: the last tokens' q, k and v, with `memory.conv_tokens`.
        gathered, taken: the mini-batch so far, with a rule that has an inner model.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    sink_keys: Tensor | None = None
    sink_values: Tensor | None = None
    state: Tensor | None = None
    context: Tensor | None = None
    waiting: Tensor | None = None
    momentum: Tensor | None = None
    recent: Tensor | None = None
    gathered: Tensor | None = None
    taken: Tensor | None = None

    @property
    def written(self) -> Written | None:
        """What the memory holds, or `None` if it is empty."""
        return None if self.state is None else Written(*(getattr(self, name) for name in Written._fields))

    def map(self, function: Any) -> LayerTensors:
        """Applies `function` to every tensor that is there."""
        return LayerTensors(**{k: v if v is None else function(v) for k, v in vars(self).items()})


class MemoryCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `MemoryCache`, in the shape transformers expects of a cache layer."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: MemoryCache) -> None:
        super().__init__()
        self._cache = cache
        self.tensors = LayerTensors()
        self.pending: LayerTensors | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first committed pass fills the layer."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns the cached keys and values followed by the new ones; stores nothing until the pass ends.

        Raises:
            BackboneError: the model that asks has no memory attached, so that nothing would end the pass.
        """
        if not self._cache.in_pass:
            raise BackboneError(
                "A MemoryCache serves the model with memory that it was made for; this model has none attached."
            )
        old = self.tensors
        if old.keys is not None and old.values is not None:
            key_states = torch.cat([old.keys, key_states], dim=-2)
            value_states = torch.cat([old.values, value_states], dim=-2)
        self.pending = replace(old, keys=key_states, values=value_states)
        return key_states, value_states

    def commit(self) -> None:
        """Makes what the pass left pending the layer's content."""
        if self.pending is not None:
            self.tensors, self.pending = self.pending, None
            self.keys, self.values = self.tensors.keys, self.tensors.values
            self.is_initialized = True

    def set(self, tensors: LayerTensors) -> None:
        """Replaces the layer's content."""
        self.pending = tensors
        self.commit()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a pass over `query_length` new tokens will see."""
        slots = 0 if self.tensors.keys is None else self.tensors.keys.shape[-2]
        return slots + query_length, 0

    def get_seq_length(self) -> int:
        """Number of tokens given so far, padding included: what transformers counts from."""
        return self._cache.seen_tokens

    def get_max_length(self) -> int:
        """-1: a conversation may go on for ever."""
        return -1

    def reset(self) -> None:
        """Forgets everything this layer holds."""
        self.tensors, self.pending, self.keys, self.values = LayerTensors(), None, None, None
        self.is_initialized = False


class MemoryCache(Cache):  # type: ignore[misc]
    """Holds one conversation (or one batch of them): sinks, window and memory state of every layer.

    With `window_tokens > 0` its size does not depend on how many tokens went by. It belongs to the model it
    was made for, and to nothing else: no state lives in the model. Two conversations never see each other.
    Pieces may be padded; with `window_tokens = 0` say then by `position_ids` where each token stands (`attach_memory`).

    Args:
        model: a model with memory attached (`fednl.attach_memory`).

    Raises:
        BackboneError: the model has no memory attached.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.attachment = attachment(model)
        super().__init__(layers=[MemoryCacheLayer(self) for _ in range(self.attachment.num_layers)])
        self.seen_tokens = 0
        self.counts: Tensor | None = None
        """`[batch]` int64: real tokens so far."""
        self.positions: Tensor | None = None
        """`[batch, slots]` int64: the index of each cached token in its row, -1 for padding."""
        self.has_padding = False
        self.ends: Tensor | None = None
        """`[batch, 2]` int64: the position that the caller gave a row's last slot, and that of its last real token, -1
        where there is none; `None` where they are the same or the caller gave none."""
        self.in_pass = False
        """Whether a pass of the model with memory is using the cache now."""

    def check_owner(self, owner: object) -> None:
        """Raises `BackboneError` unless this cache was made for the model that `owner` attaches to."""
        if owner is not self.attachment:
            raise BackboneError(
                "This MemoryCache was made for another model or another attachment; make a new one with "
                "fednl.MemoryCache(model)."
            )

    def size_bytes(self) -> int:
        """Bytes of every tensor held: sinks, window, memory states and positions."""
        tensors = [t for layer in self.layers for t in vars(layer.tensors).values() if t is not None]
        tensors += [t for t in (self.counts, self.positions, self.ends) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def state_bytes(self) -> int:
        """Bytes of the memory states alone, with what their rule carries beside them."""
        names = ("state", "momentum", "gathered", "taken")
        held = [t for layer in self.layers for n in names if (t := getattr(layer.tensors, n)) is not None]
        return sum(t.numel() * t.element_size() for t in held)

    def commit(
        self, counts: Tensor, positions: Tensor, has_padding: bool, new_tokens: int, ends: Tensor | None = None
    ) -> None:
        """Ends a pass: takes over what the layers left pending and moves the positions on."""
        for layer in self.layers:
            layer.commit()
        self.counts, self.positions, self.has_padding, self.ends = counts, positions, has_padding, ends
        self.seen_tokens += new_tokens

    def drop_pending(self) -> None:
        """Ends a pass that failed: the conversation stays as it was before it."""
        for layer in self.layers:
            layer.pending = None

    def reset(self) -> None:
        """Forgets the whole conversation."""
        super().reset()
        self.seen_tokens, self.counts, self.positions, self.has_padding, self.ends = 0, None, None, False, None

    def reset_state(self) -> None:
        """Forgets what the memory holds, also what waits to be written; sinks and window stay."""
        for layer in self.layers:
            held = {name: getattr(layer.tensors, name) for name in Written._fields}
            layer.set(replace(layer.tensors, **{k: torch.zeros_like(v) for k, v in held.items() if v is not None}))

    def clone(self) -> MemoryCache:
        """An independent copy: going on with one leaves the other as it is. `copy.deepcopy` does the same."""
        return self._mapped(lambda t: t.clone())

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryCache:
        """Copies the conversation, not the model it belongs to."""
        return self.clone()

    def detach(self) -> MemoryCache:
        """The same content without its history of gradients."""
        return self._mapped(lambda t: t.detach())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times: `[a, b]` becomes `[a, a, b, b]` for 2."""
        self._map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows named by `indices`, in that order."""
        self._map(lambda t: t.index_select(0, indices.to(t.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Lets every beam go on from its parent, memory state included."""
        self.batch_select_indices(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a memory state cannot forget its last tokens.

        Raises:
            BackboneError: always, except for 0.
        """
        if tokens_to_remove != 0:
            raise BackboneError(
                f"A MemoryCache cannot take {abs(tokens_to_remove)} tokens back (assisted decoding asks for this); "
                "clone() the cache before the tokens instead."
            )

    def _map(self, function: Any) -> None:
        for layer in self.layers:
            layer.set(layer.tensors.map(function))
        self.counts = None if self.counts is None else function(self.counts)
        self.positions = None if self.positions is None else function(self.positions)
        self.ends = None if self.ends is None else function(self.ends)

    def _mapped(self, function: Any) -> MemoryCache:
        other = MemoryCache.__new__(MemoryCache)
        Cache.__init__(other, layers=[])
        other.attachment, other.seen_tokens, other.has_padding = self.attachment, self.seen_tokens, self.has_padding
        other.in_pass = False
        other.layers = [MemoryCacheLayer(other) for _ in self.layers]
        other.counts = None if self.counts is None else function(self.counts)
        other.positions = None if self.positions is None else function(self.positions)
        other.ends = None if self.ends is None else function(self.ends)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            theirs.set(mine.tensors.map(function))
        return other
