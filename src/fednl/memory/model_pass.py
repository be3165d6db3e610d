"""One forward pass of a model with memory: its cache, its positions, and what is kept of it at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fednl.errors import BackboneError, NonFiniteError
from fednl.memory.compiled import uncompiled
from fednl.memory.families import family_of, last_position, rotaries
from fednl.memory.finite import check
from fednl.memory.layer_hooks import CACHE_NAMES, CONTEXT
from fednl.memory.pass_context import Call, PassContext
from fednl.memory.pass_input import (
    check_given,
    check_positions,
    counted,
    documents,
    given_tokens,
    last_slots,
    padding,
    recount,
)
from fednl.memory.sites import Attachment, check_trains
from fednl.memory.window import window_context

if TYPE_CHECKING:
    from fednl.memory.cache import MemoryCache

CALL = "fednl_call"


@uncompiled
def begin_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The causal model's pre-hook: its decoder leaves the commit to `end_call`, for the head may still fail."""
    wanted = kwargs.get("logits_to_keep")
    return args, {**kwargs, CALL: Call(last_only=isinstance(wanted, int) and wanted == 1)}


@uncompiled
def end_call(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """The causal model's last hook: commits the cache, or drops what a failed call left."""
    call: Call = kwargs.get(CALL, Call())
    while call.passes:  # a context knows the call it is in: left there, it would live until Python looks for such rings
        context = call.passes.pop(0)
        if output is None:
            assert context.cache is not None
            context.cache.drop_pending()
        else:
            _commit(context)


@uncompiled
def begin_pass(
    owner: Attachment, names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The decoder's pre-hook: settles the cache and the positions of the pass.

    Args:
        owner: the model's memory.
        names: the decoder's arguments in order.
        module, args, kwargs: as torch calls a pre-hook.
    """
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    call: Call | None = kwargs.pop(CALL, None)
    given = given_tokens(kwargs)
    if given is None:
        return None  # the decoder says so itself
    check_trains(owner)
    (batch, tokens), device = given.shape[:2], given.device
    keep = padding(kwargs, batch, tokens, device)
    real = torch.ones(batch, tokens, dtype=torch.bool, device=device) if keep is None else keep
    ends = recount(kwargs, keep, real)
    packing = documents(kwargs, real)
    if packing is not None:
        kwargs, real = packing.unpack(kwargs), packing.source >= 0
        keep = None if bool(real.all()) else real
    cache = _own_cache(owner, kwargs, names)
    before = counted(cache, real.shape[0], device)
    index = torch.where(real, before.unsqueeze(1) + real.cumsum(1) - 1, -1)
    check_positions(owner, index)
    context = PassContext(index, keep, cache, before + real.sum(1), owner.gate_scale, call, packing)
    asked = packing is None and call is not None and call.last_only
    context.last, context.ends = last_slots(keep, before, asked), ends
    _prepare(owner, context, kwargs, real)
    if cache is not None:
        cache.in_pass = True
    kwargs[CONTEXT] = context
    return (), kwargs


@uncompiled
def end_pass(owner: Attachment, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """The decoder's last hook: commits the cache, or drops what a failed pass left; packs documents again.

    Returns:
        The output in the caller's rows, or `None` where it is that already.

    Raises:
        NonFiniteError: a memory, or the decoder after it, was given or gave NaN or infinity.
    """
    context: PassContext | None = kwargs.get(CONTEXT)
    if context is None:
        return None
    cache = context.cache
    if cache is not None:
        cache.in_pass = False
    try:
        if output is not None:
            check(owner, context, output[0])
    except NonFiniteError:
        if cache is not None:
            cache.drop_pending()
        raise
    if context.packing is not None and output is not None:
        return context.packing.pack(output)
    if cache is not None:
        if output is None:
            cache.drop_pending()
        elif context.call is None:
            _commit(context)
        else:
            context.call.passes.append(context)
    return None if output is None or context.last is None else _ending_real(output, context.last)


def _ending_real(output: Any, last: Tensor) -> Any:
    """A decoder's output whose last position of each row holds what `last`, `[batch]`, says of which slot."""
    hidden: Tensor = output[0]
    answer = hidden[torch.arange(len(last), device=hidden.device), last.to(hidden.device)]
    hidden = torch.cat([hidden[:, :-1], answer.unsqueeze(1)], 1)
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    output.last_hidden_state = hidden
    return output


def _commit(context: PassContext) -> None:
    cache = context.cache
    assert cache is not None
    if context.window is not None:
        positions = context.window.retained_positions()
    else:
        old = cache.positions
        positions = context.index if old is None else torch.cat([old, context.index], dim=1)
    padded = (context.keep is not None or cache.has_padding) and bool((positions < 0).any())
    cache.commit(context.counts, positions, padded, context.index.shape[1], context.ends)


def _prepare(owner: Attachment, context: PassContext, kwargs: dict[str, Any], real: Tensor) -> None:
    """Puts what attention needs into the context and the decoder's arguments."""
    cache = context.cache
    if owner.given is not None:
        if cache is not None or context.packing is not None:
            raise BackboneError(
                "A pass that begins above the frozen layers can go on with no conversation and unpack no documents; "
                "say use_cache = False, or leave the prefix cache out."
            )
        check_given(owner, owner.given, kwargs, context.index)
        context.source = owner.given.source
    if owner.config.window_tokens:
        _put_window(owner, context, kwargs)
    elif cache is not None:
        _whole_mask(kwargs, cache, real)
    if owner.config.window_tokens or last_position(owner.decoder) is not None:
        _count_positions(kwargs, context.index)


def _put_window(owner: Attachment, context: PassContext, kwargs: dict[str, Any]) -> None:
    """Prepares the window."""
    decoder: Any = owner.decoder
    wanted = kwargs.get("output_attentions")
    if decoder.config.output_attentions if wanted is None else wanted:
        raise BackboneError("output_attentions = True: attention under a window gives no weights; leave it out.")
    embeds = kwargs.get("inputs_embeds")
    context.window = window_context(
        context,
        owner.config.window_tokens,
        owner.config.sink_tokens,
        rotaries(decoder),
        decoder.get_input_embeddings().weight if embeds is None else embeds,
    )


def _count_positions(kwargs: dict[str, Any], index: Tensor) -> None:
    """Counts positions by a row's real tokens, unless the caller has counted."""
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = index.clamp(min=0)


def _whole_mask(kwargs: dict[str, Any], cache: MemoryCache, real: Tensor) -> None:
    """Says which cached tokens are padding where the caller's mask does not: the stock mask would not know."""
    if cache.positions is None:
        return
    mask = kwargs.get("attention_mask")
    slots = cache.positions.shape[1] + real.shape[1]
    if cache.has_padding if mask is None else mask.shape[1] != slots:
        kwargs["attention_mask"] = torch.cat([cache.positions >= 0, real], dim=1)


def _own_cache(owner: Attachment, kwargs: dict[str, Any], names: tuple[str, ...]) -> MemoryCache | None:
    """Puts a `MemoryCache` where a cache is wanted and none, or an empty stock one, was given."""
    from fednl.memory.cache import MemoryCache

    given = next((kwargs.pop(name) for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    for name in CACHE_NAMES:
        kwargs.pop(name, None)
    config: Any = owner.decoder.config
    use_cache = config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]
    if given is None and not use_cache:
        return None
    if given is not None and not isinstance(given, MemoryCache):
        if not (isinstance(given, Cache) and given.get_seq_length() == 0):
            raise BackboneError(
                f"A {type(given).__name__} that already holds tokens cannot serve a model with memory; "
                "start the conversation with fednl.MemoryCache(model)."
            )
        given = None
    if _runs_again(owner):
        if given is not None:
            raise BackboneError(
                "Under gradient checkpointing a layer runs twice and transformers withholds the cache from it; "
                "leave the MemoryCache out, or turn checkpointing off."
            )
        kwargs["use_cache"] = False
        return None
    cache = MemoryCache(owner.decoder) if given is None else given
    cache.check_owner(owner)
    kwargs[CACHE_NAMES[0] if CACHE_NAMES[0] in names else CACHE_NAMES[1]] = cache
    return cache


def _runs_again(owner: Attachment) -> bool:
    """True if gradient checkpointing will run this pass's layers a second time."""
    blocks = getattr(owner.decoder, family_of(owner.decoder).blocks)
    return torch.is_grad_enabled() and any(
        block.training and getattr(block, "gradient_checkpointing", False) for block in blocks
    )
