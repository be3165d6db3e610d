"""NaN and infinity in a pass of a model with memory: an error that names the layer and the cause.

Each layer whose memory is heard leaves two sums with the pass; a sum of numbers one of which is NaN or infinite is not
finite. They are looked at once, at the pass's end, so that an accelerator is waited for once a pass.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fednl.errors import NonFiniteError
from fednl.memory.pass_context import PassContext
from fednl.memory.sites import Attachment


def note(context: PassContext, index: int, hidden: Tensor, mixed: Tensor) -> None:
    """Leaves a layer's sums with the pass: of its input after its norm, and of attention and memory mixed."""
    context.sums[index] = _sum(hidden), _sum(mixed)


def check(owner: Attachment, context: PassContext) -> None:
    """Raises unless every memory that was heard in the pass was given, and gave, finite numbers.

    Raises:
        NonFiniteError: it names the first layer that did not, and why.
    """
    if not context.sums:
        return
    device = context.index.device
    if bool(torch.stack([mixed.to(device) for _, mixed in context.sums.values()]).isfinite().all()):
        return
    index = min(number for number, (_, mixed) in context.sums.items() if not bool(mixed.isfinite()))
    raise NonFiniteError(f"Memory layer {index}: {_cause(owner, context, index)}")


def _cause(owner: Attachment, context: PassContext, index: int) -> str:
    hidden, cache = context.sums[index][0], context.cache
    if not bool(hidden.isfinite()):
        return (
            "the hidden states it is given hold NaN or infinity, so nothing was written; the cause lies before it: the "
            'embeddings, an earlier layer, or a dtype too narrow for this backbone (try backbone.dtype = "float32").'
        )
    addresses = () if owner.addresses is None else owner.addresses.parameters()
    if _any_bad([*owner.layers[index].parameters(), *addresses]):
        return "its rules hold NaN or infinity; load other rules, or train with a smaller local-lr."
    if cache is not None and _any_bad(vars(cache.layers[index].tensors).values()):
        return "what its cache holds is NaN or infinite; start the conversation anew."
    return (
        "attention and memory come to NaN or infinity although input, rules and cache are finite; "
        'use backbone.dtype = "float32", or train with a smaller local-lr.'
    )


def _any_bad(tensors: Iterable[Tensor | None]) -> bool:
    return any(t is not None and not bool(t.isfinite().all()) for t in tensors)


def _sum(x: Tensor) -> Tensor:
    return x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32))
