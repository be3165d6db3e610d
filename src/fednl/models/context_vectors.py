"""Context vectors: what labelled examples leave in a frozen model's layers, added back by a few coefficients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fednl.errors import BackboneError, NonFiniteError
from fednl.memory.attach import rules
from fednl.memory.sites import KEEPS_FROZEN, freeze, is_attached, is_recurrent, thaw
from fednl.models.context_injection import COEFFICIENTS, VECTORS, ContextInjection, trunk_of
from fednl.models.kept_prompts import Answers, KeptPrompts
from fednl.models.settings import ContextVectorSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTRIBUTE = "_fednl_context"


def attach_context(model: PreTrainedModel, settings: ContextVectorSettings) -> PreTrainedModel:
    """Puts hooks for context vectors onto a causal model, and freezes it.

    The vectors begin at zero and the coefficients where the settings say, so that with beta 1 the logits are the
    plain model's, bit for bit. Rules of an attached memory and LoRA factors stay as trainable as they were.

    Args:
        model: changed in place, or not at all if refused.
        settings: the `[context-vectors]` section.

    Returns:
        The same model.

    Raises:
        BackboneError: context vectors are attached already, or the layout is not recognised.

    Source: I2CL (arXiv 2405.14660), linear injection at all tokens.
    """
    if _ATTRIBUTE in model.__dict__:
        raise BackboneError("context vectors are attached to this model already; detach them first.")
    injection = ContextInjection(model, settings)
    others = [p for p in rules(model).values() if p.requires_grad] if is_attached(model) else []
    freeze(model, keep=others)
    model.__dict__[_ATTRIBUTE] = injection
    model.__dict__[KEEPS_FROZEN] = True
    return model


def detach_context(model: PreTrainedModel) -> PreTrainedModel:
    """Gives the model back as it was: no hook is left, and it trains what it trained before.

    Raises:
        BackboneError: no context vectors are attached.
    """
    context_of(model).remove()
    del model.__dict__[_ATTRIBUTE], model.__dict__[KEEPS_FROZEN]
    thaw(model)
    return model


def context_of(model: nn.Module) -> ContextInjection:
    """Returns the hooks of a model with context vectors.

    Raises:
        BackboneError: none are attached.
    """
    found = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(found, ContextInjection):
        raise BackboneError("no context vectors are attached to this model; call attach_context first.")
    return found


def keep_prompts(model: nn.Module, settings: ContextVectorSettings) -> None:
    """Lets steps begin at the answers, where nothing is injected before them and the settings leave room.

    Args:
        model: with context vectors attached, and nothing else; recurrent ones keep no keys and are left as they are.
        settings: the `[context-vectors]` section.
    """
    injection = context_of(model)
    if injection.only_answers and settings.keep_mb and not is_recurrent(model):
        injection.prompts = KeptPrompts(model, injection, settings.keep_mb * 10**6)


def answers_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Answers | None:
    """Gives the part of a training batch that still has to run, where its prompts are kept; else None."""
    found = model.__dict__.get(_ATTRIBUTE)
    return None if found is None or found.prompts is None else found.prompts.answers(batch)


@contextmanager
def answering(model: nn.Module, first: Tensor | int) -> Iterator[None]:
    """Says where answers are predicted in the passes inside the block; nothing changes where nothing reads it.

    Args:
        model: with or without context vectors.
        first: as `ContextInjection.answers_from`.
    """
    found = model.__dict__.get(_ATTRIBUTE)
    if found is None or not found.only_answers:
        yield
        return
    with found.answers_from(first):
        yield


def context_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Gives the live coefficients and vectors by canonical name.

    Raises:
        BackboneError: none are attached.
    """
    injection = context_of(model)
    return {COEFFICIENTS: injection.coefficients, VECTORS: injection.vectors}


def read_outputs(model: nn.Module, batch: Mapping[str, Tensor], clip_norm: float = 0.0) -> Tensor:
    """Runs examples through the plain model and gives what attention and MLP put out at one token of each.

    Each row stands for itself: its outputs are those of the row alone, beyond rounding.

    Args:
        model: with context vectors attached; nothing is injected and nothing changed.
        batch: `input_ids` and `attention_mask` `[batch, tokens]`, right-padded, and `positions` `[batch]`; with `last`
            `[batch]`, at most `positions`, keys and values before it are kept for later steps where prompts are kept.
        clip_norm: the longest a row's outputs may be, as one L2 norm over all of them; 0 for no limit.

    Returns:
        `[batch, layers, 2, hidden]`: after the attention's output projection, before the residual sum.

    Raises:
        NonFiniteError: an activation is NaN or infinite; the sentence names the layer.

    Source: I2CL (arXiv 2405.14660), one demonstration at a time; clipping ours.
    """
    prompts, positions = context_of(model).prompts, batch["positions"]
    inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"use_cache": False}
    if prompts is not None and "last" in batch and int(batch["last"].min()) > 0:  # the steps need the same prompts
        inputs = prompts.rest(batch["input_ids"], batch["last"], batch["attention_mask"].sum(1)).inputs
        positions = positions - batch["last"]
    with torch.no_grad(), context_of(model).reading(positions) as outputs:
        trunk_of(model)(**inputs)
        found = outputs()
    if not bool(found.isfinite().all()):
        layer = int((~found.isfinite()).any(dim=(0, 3)).any(dim=1).nonzero()[0])
        raise NonFiniteError(
            f"layer {layer} of the backbone gives NaN or infinity on this client's examples, so no context vector was "
            'made of them; use backbone.dtype = "float32".'
        )
    if clip_norm:
        found = found * (clip_norm / found.flatten(1).norm(dim=1).clamp(min=clip_norm))[:, None, None, None]
    return found


def mean_outputs(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], settings: ContextVectorSettings, noise: torch.Generator
) -> Tensor:
    """Gives a client's context vectors, `[layers, 2, hidden]`: the mean of `read_outputs` over all its examples.

    Args:
        model: with context vectors attached; nothing of it is changed.
        batches: as `read_outputs` takes them, with the positions under `last`, `label` and `separator`; at least one.
        settings: position, clipping and noise.
        noise: draws the noise; a CPU generator.

    Raises:
        NonFiniteError: as `read_outputs`.

    Source: I2CL (arXiv 2405.14660), mean over demonstrations; IFed-ICL, equation 2. Summed in float64, on
        the CPU, as not every accelerator has it.
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        outputs = read_outputs(model, {**batch, "positions": batch[settings.position]}, settings.clip_norm)
        total, count = total + outputs.cpu().double().sum(0), count + len(outputs)
    mean = total / count
    if settings.noise_std:
        mean = mean + settings.noise_std * torch.randn(mean.shape, generator=noise, dtype=mean.dtype)
    vectors = context_of(model).vectors
    return mean.to(vectors.device, vectors.dtype)
