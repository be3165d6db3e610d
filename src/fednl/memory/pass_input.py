"""What a pass of a model with memory is given: which tokens are real, which documents they are of, where rows stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fednl.errors import BackboneError
from fednl.memory.families import last_position
from fednl.memory.layer_hooks import CACHE_NAMES
from fednl.memory.packed import Packing, find_packing
from fednl.memory.sites import Attachment

if TYPE_CHECKING:
    from fednl.memory.cache import MemoryCache


def given_tokens(kwargs: dict[str, Any]) -> Tensor | None:
    """The ids or embeddings of a pass, `[batch, tokens, ...]`; `None` where there are none or both.

    Raises:
        BackboneError: there is no row, or no token.
    """
    given = [kwargs[name] for name in ("inputs_embeds", "input_ids") if kwargs.get(name) is not None]
    if len(given) != 1:
        return None
    tokens: Tensor = given[0]
    if 0 in tokens.shape[:2]:
        rows, length = tokens.shape[:2]
        raise BackboneError(f"The input has {rows} rows of {length} tokens; memory needs at least one of each.")
    return tokens


def counted(cache: MemoryCache | None, batch: int, device: torch.device) -> Tensor:
    """How many real tokens each row had before, `[batch]` int64.

    Raises:
        BackboneError: the cache has other rows, or lies elsewhere.
    """
    if cache is None or cache.counts is None:
        return torch.zeros(batch, dtype=torch.int64, device=device)
    counts = cache.counts
    if counts.device != device:
        raise BackboneError(
            f"The cache is on device {counts.device} but the input on {device}; start the conversation anew there."
        )
    if counts.shape[0] != batch:
        raise BackboneError(f"The cache holds {counts.shape[0]} rows but the input has {batch}.")
    return counts


def padding(kwargs: dict[str, Any], batch: int, tokens: int, device: torch.device) -> Tensor | None:
    """Which of the new tokens are real, `[batch, tokens]` bool, or `None` if all are.

    Raises:
        BackboneError: the mask is of another shape, or holds other numbers than 0 and 1.
    """
    mask = kwargs.get("attention_mask")
    if mask is None:
        return None
    cache = _given_cache(kwargs)
    past = cache.get_seq_length() if isinstance(cache, Cache) else 0
    if not isinstance(mask, Tensor):
        raise BackboneError(f"attention_mask is a {type(mask).__name__}; memory needs a tensor [batch, tokens].")
    if list(mask.shape) not in ([batch, tokens], [batch, past + tokens]):
        raise BackboneError(
            f"attention_mask has shape {list(mask.shape)}; memory needs [batch, tokens] = [{batch}, {tokens}], "
            f"or [{batch}, {past + tokens}] with the {past} tokens already given."
        )
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise BackboneError(
            "attention_mask holds numbers other than 0 (padding) and 1 (real); memory needs which tokens are real: say "
            "which document a token is of by doc_ids, and add nothing to scores."
        )
    keep: Tensor = mask[:, -tokens:].to(device).bool()
    return None if bool(keep.all()) else keep


def documents(kwargs: dict[str, Any], real: Tensor) -> Packing | None:
    """Takes `doc_ids` out of the arguments, and finds where the rows' documents are if they have several.

    Args:
        kwargs: the decoder's arguments; changed.
        real: `[batch, tokens]` bool, False for padding.

    Raises:
        BackboneError: they have, and a cache is given or asked for.
    """
    doc_ids, positions = kwargs.pop("doc_ids", None), kwargs.get("position_ids")
    packing = find_packing(doc_ids, positions, real)
    if packing is not None and (_given_cache(kwargs) is not None or kwargs.get("use_cache")):
        raise BackboneError(
            "doc_ids, or position_ids that start again, put several documents into one row, which can be no "
            "conversation; leave the cache out and say use_cache = False, or give one document a row."
        )
    return packing


def _given_cache(kwargs: dict[str, Any]) -> Any:
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def check_positions(owner: Attachment, index: Tensor) -> None:
    """Raises `BackboneError` where a row is longer than the backbone has position embeddings."""
    last = last_position(owner.decoder)
    if last is not None and int(index.max()) >= last:
        raise BackboneError(
            f"A row reaches {int(index.max()) + 1} tokens, but this backbone has position embeddings for {last} only; "
            "use a backbone with rotary embeddings for longer conversations."
        )
