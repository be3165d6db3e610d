"""NaN and infinity in a pass of a model with memory: an error that names the layer and the cause.

Each layer whose memory runs leaves two sums with the pass, and the decoder's output a last one; a sum of numbers one of
which is NaN or infinite is not finite. They are looked at once, at the pass's end, so that an accelerator is waited for
once a pass.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fednl.errors import NonFiniteError
from fednl.memory.pass_context import PassContext
from fednl.memory.sites import Attachment

BEFORE = (
    "the cause lies before it: the embeddings, an earlier layer, or a dtype too narrow for this backbone (try "
    'backbone.dtype = "float32").'
)
GIVEN = f"the hidden states it is given hold NaN or infinity, so nothing was written; {BEFORE}"
STALE = "what its cache holds is NaN or infinite; start the conversation anew."


def note(context: PassContext, index: int, hidden: Tensor, mixed: Tensor) -> None:
    """Leaves a layer's sums with the pass: of its input after its norm, and of attention and memory mixed."""
    context.sums[index] = _sum(hidden), _sum(mixed)


def check(owner: Attachment, context: PassContext, output: Tensor) -> None:
    """Raises unless every memory of the pass was given, and gave, finite numbers, and the decoder `output` too.

    The backbone alone, with a closed gate and no conversation, says what it always says.

    Raises:
        NonFiniteError: it names the first layer that did not, and why.
    """
    if context.gate_scale == 0 and context.cache is None:
        return
    device = context.index.device
    sums = [mixed.to(device) for _, mixed in context.sums.values()]
    if bool(torch.stack([*sums, _sum(output).to(device)]).isfinite().all()):
        return
    wrong = [number for number, (_, mixed) in context.sums.items() if not bool(mixed.isfinite())]
    if wrong:
        raise NonFiniteError(f"Memory layer {min(wrong)}: {_cause(owner, context, min(wrong))}")
    raise NonFiniteError(_beside_memory(owner, context))


def _beside_memory(owner: Attachment, context: PassContext) -> str:
    """Where numbers that are none arose, if no memory met them: a conversation's keys tell the layer."""
    for index, layer in enumerate([] if context.cache is None else context.cache.layers):
        if _any_bad(vars(layer.tensors).values()):
            return f"Layer {index}: {STALE}"
        if layer.pending is not None and _any_bad([layer.pending.keys, layer.pending.values]):
            return f"Layer {index}: {GIVEN}"
    last = max(owner.layers, default=None)
    where = "In a layer of this backbone" if last is None else f"After layer {last}, the last layer with memory"
    return (
        f"{where}: the hidden states come to NaN or infinity, so nothing was kept; the cause is a weight that is none, "
        'or a dtype too narrow for this backbone (try backbone.dtype = "float32").'
    )


def _cause(owner: Attachment, context: PassContext, index: int) -> str:
    hidden, cache = context.sums[index][0], context.cache
    if not bool(hidden.isfinite()):
        return GIVEN
    addresses = () if owner.addresses is None else owner.addresses.parameters()
    if context.gate_scale != 0 and _any_bad([*owner.layers[index].parameters(), *addresses]):
        return "its rules hold NaN or infinity; load other rules, or train with a smaller local-lr."
    if cache is not None and _any_bad(vars(cache.layers[index].tensors).values()):
        return STALE
    return (
        "attention and memory come to NaN or infinity although input, rules and cache are finite; "
        'use backbone.dtype = "float32", or train with a smaller local-lr.'
    )


def _any_bad(tensors: Iterable[Tensor | None]) -> bool:
    return any(t is not None and not bool(t.isfinite().all()) for t in tensors)


def _sum(x: Tensor) -> Tensor:
    return x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32))
