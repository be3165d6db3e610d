"""Packed documents: several in one row, each of which is to see itself only.

A pass unpacks them, one document a row, and packs what comes out again. Window, sinks, memory, addresses and
convolutions then need not know of it, and every document is exactly as if it had come alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fednl.errors import BackboneError

BY_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
"""A decoder's arguments that hold something for every token."""


@dataclass(frozen=True)
class Packing:
    """Where the documents of a pass are.

    Attributes:
        shape: (batch, tokens) as the caller gave them.
        source: `[documents, longest]` int64: which of the caller's tokens, row after row, stands here; -1 for none.
    """

    shape: tuple[int, int]
    source: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """`[batch, tokens, ...]` -> `[documents, longest, ...]`; what stands where no token is, is not defined."""
        whole = x.expand(*self.shape, *x.shape[2:]).flatten(0, 1)
        return whole[self.source.clamp(min=0)]

    def back(self, x: Tensor) -> Tensor:
        """`[documents, longest, ...]` -> `[batch, tokens, ...]`, zeros where the caller had padding."""
        there = self.source >= 0
        whole: Tensor = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return torch.unflatten(whole.index_copy(0, self.source[there], x[there]), 0, self.shape)

    def unpack(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A decoder's arguments with one document a row."""
        given = {name: self.rows(kwargs[name]) for name in BY_TOKEN if kwargs.get(name) is not None}
        return {**kwargs, **given, "attention_mask": (self.source >= 0).long(), "use_cache": False}

    def weights_back(self, x: Tensor) -> Tensor:
        """`[documents, heads, longest, longest]` -> `[batch, heads, tokens, tokens]`: 0 from document to document."""
        batch, tokens = self.shape
        there = (self.source >= 0).unsqueeze(2) & (self.source >= 0).unsqueeze(1)
        asking, asked = self.source.unsqueeze(2).expand_as(there)[there], self.source.unsqueeze(1).expand_as(there)
        whole = x.new_zeros(batch * tokens * tokens, x.shape[1])
        whole = whole.index_copy(0, asking * tokens + asked[there] % tokens, x.permute(0, 2, 3, 1)[there])
        return whole.view(batch, tokens, tokens, -1).permute(0, 3, 1, 2)

    def _each_back(self, several: Any) -> Any:
        """Hidden states or attention weights of every layer, in the caller's rows."""
        if not isinstance(several, tuple):
            return several
        return tuple(x if x is None else self.weights_back(x) if x.ndim == 4 else self.back(x) for x in several)

    def pack(self, output: Any) -> Any:
        """A decoder's output, a tuple or transformers' own kind, in the caller's rows."""
        if isinstance(output, tuple):
            return (self.back(output[0]), *map(self._each_back, output[1:]))
        output.last_hidden_state = self.back(output.last_hidden_state)
        for name in ("hidden_states", "attentions"):
            if output.get(name) is not None:
                setattr(output, name, self._each_back(output[name]))
        return output


def find_packing(doc_ids: Any, positions: Any, real: Tensor) -> Packing | None:
    """Finds the documents of a pass, or `None` if there is one a row.

    Args:
        doc_ids: `[batch, tokens]` integers: a document begins where a row's number is another than at the real token
            before. `None` if the caller named none.
        positions: `[batch or 1, tokens]` or `None`; without `doc_ids`, a document begins where they do not rise.
        real: `[batch, tokens]` bool, False for padding.

    Raises:
        BackboneError: `doc_ids` is not of the input's shape, or no integers.
    """
    if doc_ids is None and (positions is None or real.shape[1] == 1):
        return None
    if doc_ids is not None and (
        not isinstance(doc_ids, Tensor) or doc_ids.shape != real.shape or doc_ids.is_floating_point()
    ):
        found = list(doc_ids.shape) if isinstance(doc_ids, Tensor) else type(doc_ids).__name__
        raise BackboneError(f"doc_ids must be integers of shape {list(real.shape)} as the input, not {found}.")
    marks = (positions if doc_ids is None else doc_ids).to(real.device).expand(real.shape)
    slot = torch.arange(real.shape[1], device=real.device)
    before = torch.where(real, slot, -1).cummax(1).values.roll(1, 1)
    before[:, 0] = -1
    earlier = marks.gather(1, before.clamp(min=0))
    starts = real & ((before < 0) | ((marks <= earlier) if doc_ids is None else (marks != earlier)))
    if int(starts.sum(1).max()) <= 1:
        return None
    flat = real.flatten().nonzero().squeeze(1)
    document = starts.flatten()[flat].cumsum(0) - 1
    rank = torch.arange(len(flat), device=real.device)
    place = rank - rank[starts.flatten()[flat]][document]
    source = torch.full((int(document[-1]) + 1, int(place.max()) + 1), -1, device=real.device)
    source[document, place] = flat
    return Packing((real.shape[0], real.shape[1]), source)
