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
from fednl.memory.sites import Attachment, GivenPrefix
from fednl.memory.window import contiguous

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


def last_slots(keep: Tensor | None, before: Tensor, last_only: bool) -> Tensor | None:
    """Where the token stands that is to answer for each row, `[batch]` int64, if padding follows it in any.

    Args:
        keep: `[batch, tokens]` bool, False for padding; `None` if there is none.
        before: `[batch]`, real tokens of each row before this pass.
        last_only: whether the call asks for the last position alone.

    Raises:
        BackboneError: a row had its last real token in an earlier pass, whose output is gone.
    """
    if keep is None or not last_only or bool(keep[:, -1].all()):
        return None
    over = ~keep.any(1) & (before > 0)
    if bool(over.any()):
        raise BackboneError(
            f"Row {int(over.int().argmax())} has only padding in this pass and had its last token in an earlier one, "
            "so there are no logits to go on from; pad on the left, or ask for every position (logits_to_keep = 0)."
        )
    slot = torch.arange(keep.shape[1], device=keep.device)
    # A row that has not begun yet has nothing to answer with, and keeps its last slot.
    return torch.where(keep.any(1), torch.where(keep, slot, -1).amax(1), slot[-1])


def recount(kwargs: dict[str, Any], keep: Tensor | None, real: Tensor) -> Tensor | None:
    """Lets positions go on from a row's last real token where the caller's go on from the padding after it.

    `generate` gives every pad position 0 and counts on from a row's last slot, so that after a row padded on the right
    its positions would begin again. Positions that count padding are the caller's own and stay.

    Args:
        kwargs: the decoder's arguments; `position_ids` is replaced where it does not go on.
        keep, real: `[batch, tokens]` bool, False for padding; `keep` is `None` if there is none.

    Returns:
        What `MemoryCache.ends` is after the pass.
    """
    given, before = kwargs.get("position_ids"), getattr(_given_cache(kwargs), "ends", None)
    if given is None or kwargs.get("doc_ids") is not None or (before is None and keep is None):
        return None
    device, rows = real.device, len(real)
    if before is None or len(before) != rows:  # another number of rows is refused further on
        before = torch.full((rows, 2), -1)
    given, before = given.to(device).expand(real.shape), before.to(device)
    # What came before stands as a pad after a real token.
    stands = torch.cat([torch.tensor([[True, False]], device=device).expand(rows, -1), real], 1)
    told = torch.cat([before.flip(1), given], 1)
    slot = torch.where(stands, torch.arange(told.shape[1], device=device), 0).cummax(1).values
    pad, token = told[:, :-1], told.gather(1, slot)[:, :-1]
    anew = stands[:, 1:] & ~stands[:, :-1] & (told[:, 1:] == pad + 1) & (pad >= 0) & (pad < token)
    if bool(anew.any()):
        shift = torch.where(anew, token - pad, 0).cumsum(1)[:, 1:]
        kwargs["position_ids"] = given + shift
        told = torch.cat([told[:, :2], given + shift], 1)
    ends = torch.stack([given[:, -1], told.gather(1, slot[:, -1:])[:, 0]], 1)
    return None if bool((ends[:, 0] == ends[:, 1]).all()) else ends


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


def check_given(owner: Attachment, given: GivenPrefix, kwargs: dict[str, Any], index: Tensor) -> None:
    """Raises `BackboneError` unless a pass that begins above the frozen layers is over what these were given.

    Args:
        owner: the model's memory.
        given: what they were.
        kwargs: the decoder's arguments.
        index: `[batch, tokens]` int64, each token's index among its row's real tokens; -1 for padding.
    """
    ids, positions, real = kwargs.get("input_ids"), kwargs.get("position_ids"), index >= 0
    told = owner.config.window_tokens or last_position(owner.decoder) is not None or contiguous(index)
    if positions is not None:
        told = bool((positions.to(index.device) == index)[real].all())
    same = ids is not None and ids.shape == given.ids.shape and torch.equal(real, given.real.to(real.device))
    if ids is None or not told or not same or not torch.equal(ids[real], given.ids.to(ids.device)[real]):
        raise BackboneError(
            "The pass is over other tokens, padding or positions than its frozen layers were computed for; give it the "
            "batch that PrefixCache.over was given, count positions by real tokens, and pad at the ends of rows."
        )


def check_positions(owner: Attachment, index: Tensor) -> None:
    """Raises `BackboneError` where a row is longer than the backbone has position embeddings."""
    last = last_position(owner.decoder)
    if last is not None and int(index.max()) >= last:
        raise BackboneError(
            f"A row reaches {int(index.max()) + 1} tokens, but this backbone has position embeddings for {last} only; "
            "use a backbone with rotary embeddings for longer conversations."
        )
