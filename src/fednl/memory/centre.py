"""Takes away what all keys have in common, so that the memory can tell them apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fednl.errors import BackboneError
from fednl.memory.attach import closed
from fednl.memory.families import family_of, heads_of
from fednl.memory.layer_hooks import Site
from fednl.memory.sites import attachment

LARGEST_SCALE = 1e3


def centre(model: nn.Module, input_ids: Tensor) -> None:
    """Takes what all keys have in common over a text out of them: out of each layer's q and k, or of the addresses.

    A language model's keys share a large common part: before rotary embedding, two keys of SmolLM2-135M have a
    cosine of 0.5 to 0.8 whatever their tokens. Each write then erases much of every other. Without the common
    part the mean cosine is about 0.05, and what was written stays until it is written again.

    Args:
        model: a model with memory attached; only the shifts, or the addresses' centre and scale, are changed.
        input_ids: any text that may be public, `[batch, tokens]` int64; some hundred tokens are enough, and one token
            over and over is not: all that it has is common.

    Raises:
        BackboneError: no memory is attached, it has no projection to hold a shift, or the text is one token.

    Source: ours (docs/log.md has the measurement).
    """
    owner = attachment(model)
    if input_ids.unique().numel() < 2:
        raise BackboneError("The text to centre on is one token, over and over; give some hundred tokens of any text.")
    # By the numbers that the layers had on attaching: some may have been taken out since.
    layers: dict[int, Any] = {site.index: site.attention for site in owner.handles if isinstance(site, Site)}
    family = family_of(owner.decoder)
    addresses = owner.addresses
    if addresses is not None and owner.address_layer is not None:
        # What this projection is given is its layer's input after the norm, which is what addresses are made of.
        entrance = getattr(layers[owner.address_layer], family.entrance)
        x = _seen(model, input_ids, {"x": entrance}, lambda name, given, output: {name: given})["x"]
        with torch.no_grad():
            addresses.centre.copy_(x.mean(0))
            addresses.scale.fill_((x - x.mean(0)).square().mean().rsqrt().clamp(max=LARGEST_SCALE))
        return
    heads = heads_of(cast(Any, owner.decoder).config)
    modules = {f"{i}.{name}": getattr(layers[i], name) for i in owner.layers for name in family.sources}

    def split(name: str, given: Tensor, output: Tensor) -> dict[str, Tensor]:
        index, _, source = name.partition(".")
        return {f"{index}.{letter}": part for letter, part in family.parts(source, output, heads).items()}

    for memory in owner.layers.values():
        if memory.projection is None or not memory.projection.rank:
            raise BackboneError("memory.rank is 0, so there is no projection to centre; set memory.rank to at least 1.")
    seen = _seen(model, input_ids, modules, split)
    with torch.no_grad():
        for index, memory in owner.layers.items():
            for name in memory.projection.shifted if memory.projection is not None else ():
                getattr(memory.projection, f"{name}_shift").copy_(-seen[f"{index}.{name[0]}"].mean(0))


def _seen(
    model: nn.Module,
    input_ids: Tensor,
    modules: dict[str, nn.Module],
    take: Callable[[str, Tensor, Tensor], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """What `take` makes of modules' inputs and outputs, by name, in a pass with closed gates: `[tokens, width]`."""
    found: dict[str, Tensor] = {}

    def remember(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        rows = {key: x.flatten(0, -2) for key, x in take(name, args[0], output).items()}
        found.update({key: x.to(torch.promote_types(x.dtype, torch.float32)) for key, x in rows.items()})

    handles = [module.register_forward_hook(partial(remember, name)) for name, module in modules.items()]
    try:
        with torch.no_grad(), closed(model):
            model(input_ids, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return found
