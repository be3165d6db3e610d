"""The `[memory]` and `[prefix]` sections: what is attached, and what is kept of the backbone. Imports no torch."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticKnownError

from fednl.errors import SettingsError
from fednl.memory.update_rules import RULES, UpdateRule
from fednl.section import Section

_LAYERS = re.compile(r"all|none|(last|every):[1-9][0-9]*|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")

DECAYING_CHUNK_TOKENS = 128


class PrefixSettings(Section):
    """Whether what the frozen layers below the first memory make of an example is kept over steps and rounds.

    Args:
        cache: `"off"`, `"memory"` or `"disk"` (a temporary folder, readable by its owner only, that goes with the run).
            It changes speed, and losses by rounding only: the same products come in batches of other sizes. With
            dropout in the layers below, while they train, it is refused.
        limit_mb: how much a process keeps at most, in MB of 10^6 bytes; examples beyond that are computed every time.
        dtype: `"float32"` keeps activations as they were computed, `"bfloat16"` in half of that, rounded.

    Source: ours (decision 0012).
    """

    cache: Literal["off", "memory", "disk"] = "off"
    limit_mb: int = Field(default=2000, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"


class MemoryConfig(Section):
    """Says which layers get a memory, how it is written and read, and how far attention still reaches.

    Args:
        layers: `"all"`, `"none"`, `"last:n"` (the n layers nearest the output) `"every:n"` (each n-th), or numbers
            and ranges counted from 0, as in `"8,9,14-23"`.
        rule: how the state is written, a name in `fednl.memory.update_rules.RULES`; `"delta"` is
            S += beta (v - S k) k^T.
        writes_per_token: how many writes a token makes, 1 to 8. Only the rules that make several read it.
        mini_batch_tokens: tokens whose gradients are taken at one state, by `"ttt-linear"` alone; changes its results.
        rank: rank of the memory's own low-rank change of q, k and v; 0 for none.
        keys: what a value is stored under: `"context"` is a weighted running average of the tokens before it, asked for
            by the average up to the asking token; `"token"` is the token's own k, asked for by q, as in the paper.
        address_layer: whose inputs the averages are of, counted from 0, or the first memory layer's if that comes
            earlier. Only `keys = "context"` reads it.
        address_rank: rank of the projection from that layer's inputs to the averages; 0 for a full matrix.
        write: when a token is written: `"now"`, or when it is `"leaving"` the attention window, so that the memory
            holds exactly what attention no longer sees; with full attention it is always now.
        conv_tokens: q, k and v are mixed with those of their last real tokens, this many with their own, 2 to 16; 0 for
            not at all. Addresses are not mixed any further.
        feature: what q and k go through before they are scaled to length 1: `"silu"` or `"linear"` (nothing).
        write_start: the write strength that fresh rules begin with, above 0 and below 1 (with momentum 0.81 of it; by
            `"ttt-linear"` it is divided by the width of a head, as published).
        write_rank: rank of the matrix that makes write strengths of a layer's input, and of the one that makes its
            decay, each a product of two factors; 0 for full matrices. At most the key/value heads.
        write_range: write strengths lie between 0 and this, 1 or 2. Above 1 a write takes away more than was there, so
            that a state can change its sign; a rule that this would make unstable takes 1 only.
        mixing: `"additive"` is attention + gate * read; `"convex"` is (1 - gate) * attention + gate * read.
        gate: what the gate depends on; `"input"` is tanh(0.1 + W x), one value per query head and token, `"head"` one
            learned number per query head, `"layer"` one per layer.
        read_norm: whether each head's read is scaled to a root mean square of 1, times one learned number per channel.
        window_tokens: how many of the last tokens attention sees; 0 is full attention, whose cache grows. With 0 and no
            `position_ids`, padding inside a row or between pieces of it counts in rotary distances, as in the bare
            model; with a window it never does.
        sink_tokens: how many of each row's first real tokens attention always sees.
        chunk_tokens: tokens per chunk of the chunked form, with a rule that decays at most 128; changes speed, not
            results.
        start: where the rules begin; `"fresh"`, `"public"` (shipped with the package) or a folder of rules.

    Source: design of this library; the paper states neither window, nor gate, nor rank.
    """

    layers: str = "last:15"
    rule: str = "delta"
    writes_per_token: int = Field(default=2, ge=1, le=8)
    mini_batch_tokens: int = Field(default=16, ge=1, le=1024)
    rank: int = Field(default=8, ge=0)
    keys: Literal["token", "context"] = "context"
    address_layer: int = Field(default=2, ge=0)
    address_rank: int = Field(default=0, ge=0)
    write: Literal["now", "leaving"] = "now"
    conv_tokens: int = Field(default=0, ge=0, le=16)
    feature: Literal["silu", "linear"] = "linear"
    write_start: float = Field(default=0.05, gt=0, lt=1)
    write_rank: int = Field(default=0, ge=0)
    write_range: Literal[1, 2] = 1
    mixing: Literal["additive", "convex"] = "additive"
    gate: Literal["input", "head", "layer"] = "input"
    read_norm: bool = False
    window_tokens: int = Field(default=64, ge=0)
    sink_tokens: int = Field(default=4, ge=0)
    chunk_tokens: int = Field(default=32, ge=1, le=1024)
    start: str = Field(default="fresh", min_length=1)

    @field_validator("layers")
    @classmethod
    def _known_layers(cls, value: str) -> str:
        if not _LAYERS.fullmatch(value):
            raise ValueError('write "all", "none", "last:n", "every:n", or layers from 0 such as "8,9,14-23"')
        if value[0].isdigit() and any(first > last for first, last in _spans(value)):
            raise ValueError(f'"{value}" has a range that runs backwards; write the lower layer first')
        return value

    @field_validator("rule")
    @classmethod
    def _known_rule(cls, value: str) -> str:
        if value not in RULES:
            *others, last = (repr(name) for name in RULES)
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})
        return value

    @field_validator("conv_tokens")
    @classmethod
    def _reaches_a_token(cls, value: int) -> int:
        if value == 1:
            raise ValueError("conv-tokens = 1 would only scale each channel; use 0 for no convolution, or at least 2")
        return value

    @model_validator(mode="after")
    def _fits_the_rule(self) -> Self:
        if self.write_range > self.update_rule.widest:
            raise ValueError(
                f"write-range = {self.write_range}: writes of rule {self.rule!r} are stable up to "
                f"{self.update_rule.widest}; use write-range = {self.update_rule.widest}"
            )
        if self.writes > 1 and not self.rank:
            raise ValueError(
                f"rank = 0: without a projection all writes of a token by rule {self.rule!r} would be the same; "
                "use rank >= 1, or writes-per-token = 1"
            )
        if self.update_rule.decays and self.chunk_tokens > DECAYING_CHUNK_TOKENS:
            raise ValueError(
                f"chunk-tokens = {self.chunk_tokens}: rule {self.rule!r} decays and needs the cube of a chunk's tokens "
                f"in numbers; use at most {DECAYING_CHUNK_TOKENS}"
            )
        return self

    @property
    def update_rule(self) -> UpdateRule:
        """What `rule` names."""
        return RULES[self.rule]

    @property
    def writes(self) -> int:
        """How many writes a token makes."""
        return self.writes_per_token if self.update_rule.several else 1

    def layer_numbers(self, total: int) -> list[int]:
        """Lists the layers that get a memory, counted from 0, in order.

        Args:
            total: how many layers the backbone has.

        Raises:
            SettingsError: `layers` asks for more layers than there are.
        """
        if self.layers == "all":
            return list(range(total))
        if self.layers == "none":
            return []
        if self.layers[0].isdigit():
            return self._listed(total)
        kind, _, text = self.layers.partition(":")
        number = int(text)
        if number > total:
            raise SettingsError(
                f'[memory] layers = "{self.layers}": the backbone has {total} layers; use n <= {total}.'
            )
        if kind == "last":
            return list(range(total - number, total))
        return list(range(number - 1, total, number))

    @property
    def is_absent(self) -> bool:
        """Whether these settings leave a backbone as it is: no layer with memory, and no window."""
        return self.layers == "none" and self.window_tokens == 0

    def address_number(self, total: int) -> int | None:
        """Gives the layer whose inputs the addresses are made of; `None` where there are no addresses."""
        numbers = self.layer_numbers(total)
        return min(self.address_layer, numbers[0]) if self.keys == "context" and numbers else None

    def _listed(self, total: int) -> list[int]:
        """The layers named one by one, in order and once each."""
        spans = _spans(self.layers)
        if max(last for _, last in spans) >= total:
            raise SettingsError(f'[memory] layers = "{self.layers}": the backbone has layers 0 to {total - 1}.')
        return sorted({number for first, last in spans for number in range(first, last + 1)})


def _spans(layers: str) -> list[tuple[int, int]]:
    """First and last layer of each part of a list such as `"8,9,14-23"`."""
    parts = (part.partition("-") for part in layers.split(","))
    return [(int(first), int(last or first)) for first, _, last in parts]


def check_prefix(prefix: PrefixSettings, memory: MemoryConfig, lora_rank: int) -> None:
    """Refuses to keep a frozen prefix where settings alone tell that there is none.

    Raises:
        SettingsError: memory is in no layer, in all layers or in layer 0, or a LoRA trains beside it.
    """
    if prefix.cache == "off":
        return
    if memory.layers == "none":
        raise SettingsError(
            f'[prefix] cache = "{prefix.cache}": with [memory] layers = "none" no layer trains, and nothing can be '
            'kept; put memory into upper layers, or set cache = "off".'
        )
    first = min(_spans(memory.layers))[0] if memory.layers[0].isdigit() else None
    if memory.layers in ("all", "every:1") or first == 0:
        raise SettingsError(
            f'[prefix] cache = "{prefix.cache}": with [memory] layers = "{memory.layers}" layer 0 trains, and below it '
            'there is nothing to keep; put memory into upper layers only, or set cache = "off".'
        )
    if lora_rank:
        raise SettingsError(
            f'[prefix] cache = "{prefix.cache}": [lora] rank = {lora_rank} trains in all layers, so that none stays as '
            'it is; set rank = 0, or cache = "off".'
        )
