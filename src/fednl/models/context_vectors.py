"""Context vectors: what labelled examples leave in a frozen model's layers, added back by a few coefficients.

The model's own modules stay what they are: hooks on every layer's attention and MLP read their outputs, or replace
`out` with `beta * out + lambda * vector`. Vectors and coefficients are no parameters of the model, so that neither its
`state_dict` nor another adapter sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fednl.errors import BackboneError, NonFiniteError
from fednl.memory.attach import rules
from fednl.memory.sites import KEEPS_FROZEN, freeze, is_attached, thaw
from fednl.models.settings import ContextVectorSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COEFFICIENTS, VECTORS = "context.coefficients", "context.vectors"
MODULES = ("attention", "mlp")
"""What is hooked in a layer, in the order of the second axis of both tensors."""

_BLOCKS = ("layers", "h")
_NAMES = {"attention": ("self_attn", "attn", "attention"), "mlp": ("mlp",)}
_ATTRIBUTE = "_fednl_context"


class ContextInjection:
    """The hooks of one model, with the vectors and coefficients they inject.

    Attributes:
        coefficients: `[layers, 2, 2]`, trained: per layer and module (`MODULES`) lambda, then beta.
        vectors: `[layers, 2, hidden]`, never trained here.
    """

    def __init__(self, model: nn.Module, settings: ContextVectorSettings) -> None:
        sites = find_modules(model)
        like = next(model.parameters())
        hidden = int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]
        dtype = torch.promote_types(like.dtype, torch.float32)
        start = torch.tensor([settings.start_lambda, settings.start_beta], dtype=dtype, device=like.device)
        self.coefficients = nn.Parameter(start.repeat(len(sites), len(MODULES), 1))
        shape = (len(sites), len(MODULES), hidden)
        self.vectors = nn.Parameter(torch.zeros(shape, dtype=dtype, device=like.device), requires_grad=False)
        self._fired = [0] * (len(sites) * len(MODULES))
        self._read: _Reading | None = None
        self._handles: list[Any] = []
        for layer, modules in enumerate(sites):
            for module, part in enumerate(modules):
                self._handles.append(part.register_forward_hook(self._hook(layer, module)))
        trunk = trunk_of(model)
        self._handles.append(trunk.register_forward_pre_hook(self._begin))
        self._handles.append(trunk.register_forward_hook(self._end))

    def remove(self) -> None:
        """Takes every hook off."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def reading(self, positions: Tensor) -> Iterator[Callable[[], Tensor]]:
        """Reads instead of injecting: inside the block the model is the plain model.

        Args:
            positions: `[batch]`, which token of each row of the next forward pass is read.

        Yields:
            A function that gives what the last pass left, `[batch, layers, 2, hidden]`, in float32 or wider.
        """
        self._read = _Reading(positions, {})
        try:
            yield self._read.stacked
        finally:
            self._read = None

    def _hook(self, layer: int, module: int) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            self._fired[layer * len(MODULES) + module] += 1
            # Attention layers give tuples and MLPs tensors, and which does what has changed between releases.
            out = output[0] if isinstance(output, tuple) else output
            if self._read is not None:
                self._read.take((layer, module), out)
                return None
            scale, keep = self.coefficients[layer, module].to(out.device)
            vector = self.vectors[layer, module].to(out.device)
            new = (keep * out.to(vector.dtype) + scale * vector).to(out.dtype)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        return hook

    def _begin(self, _: nn.Module, __: Any) -> None:
        self._fired = [0] * len(self._fired)

    def _end(self, _: nn.Module, __: Any, ___: Any) -> None:
        """Refuses a backbone in which a module is passed over, or runs twice: then nothing would be what it says."""
        wrong = [index for index, fired in enumerate(self._fired) if fired != 1]
        if wrong:
            layer, module = divmod(wrong[0], len(MODULES))
            raise BackboneError(
                f"the {MODULES[module]} of layer {layer} ran {self._fired[wrong[0]]} times in one pass, not once, so "
                "context vectors cannot be injected there; use an unmodified model."
            )


class _Reading:
    """The outputs of one pass at one position a row."""

    def __init__(self, positions: Tensor, found: dict[tuple[int, int], Tensor]) -> None:
        self._positions, self._found = positions, found

    def take(self, site: tuple[int, int], out: Tensor) -> None:
        rows = torch.arange(out.shape[0], device=out.device)
        self._found[site] = out[rows, self._positions.to(out.device)].detach()

    def stacked(self) -> Tensor:
        layers = 1 + max(layer for layer, _ in self._found)
        device = self._positions.device
        flat = [self._found[layer, module].to(device) for layer in range(layers) for module in range(len(MODULES))]
        stacked = torch.stack(flat, dim=1)
        wide = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        return wide.reshape(len(wide), layers, len(MODULES), -1)


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
        batch: `input_ids` and `attention_mask` `[batch, tokens]`, right-padded, and `positions` `[batch]`.
        clip_norm: the longest a row's outputs may be, as one L2 norm over all of them; 0 for no limit.

    Returns:
        `[batch, layers, 2, hidden]`: after the attention's output projection, before the residual sum.

    Raises:
        NonFiniteError: an activation is NaN or infinite; the sentence names the layer.

    Source: I2CL (arXiv 2405.14660), one demonstration at a time; clipping ours.
    """
    with torch.no_grad(), context_of(model).reading(batch["positions"]) as outputs:
        trunk_of(model)(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
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

    Source: I2CL (arXiv 2405.14660), mean over demonstrations; IFed-ICL, equation 2. Summed in float64.
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        outputs = read_outputs(model, {**batch, "positions": batch[settings.position]}, settings.clip_norm)
        total, count = total + outputs.double().sum(0).cpu(), count + len(outputs)
    mean = total / count
    if settings.noise_std:
        mean = mean + settings.noise_std * torch.randn(mean.shape, generator=noise, dtype=mean.dtype)
    vectors = context_of(model).vectors
    return mean.to(vectors.device, vectors.dtype)


def trunk_of(model: nn.Module) -> nn.Module:
    """The model without its head, which alone takes longer than the layers for a few tokens in bfloat16."""
    trunk: nn.Module = model.base_model  # type: ignore[assignment]
    return trunk


def find_modules(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Finds every layer's attention and MLP, in the order of the layers.

    Raises:
        BackboneError: the layout is not that of Llama, Qwen, Gemma, GPT-2 or their like.
    """
    for module in model.modules():
        blocks = next((b for name in _BLOCKS if isinstance(b := getattr(module, name, None), nn.ModuleList)), None)
        if blocks is None or not len(blocks):
            continue
        found = [tuple(_part(block, names) for names in _NAMES.values()) for block in blocks]
        if all(part is not None for pair in found for part in pair):
            return found  # type: ignore[return-value]
    raise BackboneError(
        f"the layers of {type(model).__name__} have no attention and MLP that context vectors know; use a model of the "
        "Llama, Qwen, Gemma, Mistral or GPT-2 families."
    )


def _part(block: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    found = next((getattr(block, name) for name in names if hasattr(block, name)), None)
    return found if isinstance(found, nn.Module) else None
