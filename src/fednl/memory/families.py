"""The families of models that memory attaches to: where their attention is, and what it computes before it rotates.

Decision 0020 says what the memory sees in each; a new family is a line here if it differs in these ways only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Heads(NamedTuple):
    """The sizes of a backbone's attention: width of the residual stream, heads, key/value heads, width of a head."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int


def _in_turn(x: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    """Splits a fused projection that gives all of q, then all of k, then all of v."""
    sizes = [heads.heads * heads.dim, heads.kv_heads * heads.dim, heads.kv_heads * heads.dim]
    return torch.split(x, sizes, -1)


def _by_head(x: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    """Splits a fused projection that gives q, k and v of the first head, then of the second, and so on."""
    return tuple(part.flatten(2) for part in x.unflatten(-1, (heads.heads, 3, heads.dim)).unbind(-2))


@dataclass(frozen=True)
class Family:
    """How one family of models differs from Llama, where the hooks have to know.

    Attributes:
        norms: queries and keys go through `q_norm` and `k_norm` before rotary embedding; what comes out of these is
            what the memory and the sinks see.
        heads_first: the norms are given `[batch, heads, tokens, head_dim]`, not tokens first.
        one_sliding_window: every layer sees `config.sliding_window` tokens; layers do not say so themselves.
        blocks: the decoder's list of transformer blocks.
        attention: a block's attention.
        fused: the attention's one projection of q, k and v, or "" where there are three.
        split: takes what `fused` gives, `[batch, tokens, ...]`, apart into q, k and v.
        output: the attention's output projection.
        learned_positions: tokens are told apart by learned position embeddings, so that there is a last position.
    """

    norms: bool = False
    heads_first: bool = False
    one_sliding_window: bool = False
    blocks: str = "layers"
    attention: str = "self_attn"
    fused: str = ""
    split: Callable[[Tensor, Heads], tuple[Tensor, ...]] = _in_turn
    output: str = "o_proj"
    learned_positions: bool = False

    @property
    def sources(self) -> Mapping[str, str]:
        """The attention's modules that give q, k and v before rotary embedding: name -> which of them."""
        if self.fused:
            return {self.fused: "qkv"}
        return {"q_norm" if self.norms else "q_proj": "q", "k_norm" if self.norms else "k_proj": "k", "v_proj": "v"}

    @property
    def entrance(self) -> str:
        """A projection that is given the attention's input as it is."""
        return self.fused or "k_proj"

    @property
    def modules(self) -> set[str]:
        """What an attention of this family must have."""
        return {*self.sources, self.entrance, *([] if self.fused else ["q_proj"]), self.output}

    def parts(self, name: str, output: Tensor, heads: Heads) -> dict[str, Tensor]:
        """What a source gave, as `[batch, tokens, heads * head_dim]` by q, k, v."""
        letters = self.sources[name]
        if self.fused:
            return dict(zip(letters, self.split(output, heads), strict=True))
        if output.ndim == 3:
            return {letters: output}
        return {letters: (output.transpose(1, 2) if self.heads_first else output).flatten(2)}


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
    "phi3": Family(one_sliding_window=True, fused="qkv_proj"),
    "gpt_neox": Family(attention="attention", fused="query_key_value", split=_by_head, output="dense"),
    "gpt2": Family(blocks="h", attention="attn", fused="c_attn", output="c_proj", learned_positions=True),
}
"""The families that memory attaches to, by `config.model_type`."""


def family_of(decoder: Any) -> Family:
    """The family of a decoder that `find_decoder` found."""
    return FAMILIES[decoder.config.model_type]


def attentions(decoder: Any) -> list[nn.Module]:
    """A decoder's attention layers, in order."""
    family = family_of(decoder)
    return [getattr(block, family.attention) for block in getattr(decoder, family.blocks)]


def heads_of(config: Any) -> Heads:
    """The sizes of a backbone's attention, from its own config."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Heads(
        config.hidden_size, heads, kv_heads, int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    )


def device_of(attention: Any, family: Family) -> Any:
    """The device that an attention layer computes on."""
    return getattr(attention, family.entrance).weight.device


def rotary_kinds(decoder: Any) -> dict[str, str]:
    """The backbone's rotary embeddings: kind of layer -> type of embedding; "" is the one that all layers share."""
    if not hasattr(decoder, "rotary_emb"):
        return {}
    types = getattr(decoder.rotary_emb, "rope_type", "default")
    return dict(types) if isinstance(types, dict) else {"": types}


def rotaries(decoder: Any) -> dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """The rotary embeddings by kind of layer, each `(like, positions) -> (cos, sin)`."""
    return {k: partial(decoder.rotary_emb, layer_type=k) if k else decoder.rotary_emb for k in rotary_kinds(decoder)}


def rotary_kind(decoder: Any, attention: Any) -> str | None:
    """Which of `rotaries` an attention layer uses; `None` if it uses no rotary embedding."""
    kinds = rotary_kinds(decoder)
    if not kinds or not getattr(attention, "use_rope", True):
        return None
    return "" if "" in kinds else str(attention.layer_type)


def own_window(decoder: Any, attention: Any) -> int | None:
    """How many tokens the layer itself sees; `None` if all."""
    every = family_of(decoder).one_sliding_window
    tokens: int | None = getattr(decoder.config if every else attention, "sliding_window", None)
    return tokens or None


def last_position(decoder: Any) -> int | None:
    """How many tokens a row may have where positions are learned; `None` where they are not."""
    return int(decoder.config.max_position_embeddings) if family_of(decoder).learned_positions else None
