"""Hooks on a model's attention and MLP outputs: where context vectors are read, and where they are injected.

The model's own modules stay what they are: hooks on every layer's attention and MLP read their outputs, or replace
`out` with `beta * out + lambda * vector`. Vectors and coefficients are no parameters of the model, so that neither its
`state_dict` nor another adapter sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fednl.errors import BackboneError
from fednl.memory.sites import BESIDE, Beside
from fednl.models.settings import ContextVectorSettings

if TYPE_CHECKING:
    from fednl.models.kept_prompts import KeptPrompts

COEFFICIENTS, VECTORS = "context.coefficients", "context.vectors"
MODULES = ("attention", "mlp")
"""What is hooked in a layer, in the order of the second axis of both tensors."""

_BLOCKS = ("layers", "h")
_NAMES = {"attention": ("self_attn", "attn", "attention"), "mlp": ("mlp",)}


class ContextInjection:
    """The hooks of one model, with the vectors and coefficients they inject.

    Attributes:
        coefficients: `[layers, 2, 2]`, trained: per layer and module (`MODULES`) lambda, then beta.
        vectors: `[layers, 2, hidden]`, never trained here.
        only_answers: nothing is injected before the token at which the answer is predicted.
        prompts: where keys and values of prompts are kept; None where they are not, or cannot be.
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
        self.only_answers = settings.inject == "answer"
        self.prompts: KeptPrompts | None = None
        self._fired = [0] * (len(sites) * len(MODULES))
        self._read: _Reading | None = None
        self._first: Tensor | int | None = None
        self._where: Tensor | None = None
        self._handles: list[Any] = []
        for layer, modules in enumerate(sites):
            for module, part in enumerate(modules):
                self._handles.append(part.register_forward_hook(self._hook(layer, module)))
        trunk = trunk_of(model)
        self._handles.append(trunk.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._handles.append(trunk.register_forward_hook(self._end))
        self._trunk = trunk
        tensors = {COEFFICIENTS: self.coefficients, VECTORS: self.vectors}
        trunk.__dict__[BESIDE] = Beside(settings.inject, tensors)

    def remove(self) -> None:
        """Takes every hook off."""
        for handle in self._handles:
            handle.remove()
        del self._trunk.__dict__[BESIDE]

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

    @contextmanager
    def answers_from(self, first: Tensor | int) -> Iterator[None]:
        """Says where the answer is predicted in the passes inside the block; only `only_answers` reads it.

        Outside such a block that is the last real token of each row of a pass without a past, as in `generate`, and
        every token of a pass with one.

        Args:
            first: `[batch]`, or one for all rows: the token from which on vectors are injected, counted from 0 over
                what the cache holds and the pass's own tokens, padding included.
        """
        self._first = first
        try:
            yield
        finally:
            self._first = None

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
            if self._where is not None:
                new = torch.where(self._where.to(out.device), new, out)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        return hook

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._fired = [0] * len(self._fired)
        self._where = self._answers(args, kwargs) if self.only_answers and self._read is None else None

    def _answers(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Where a pass injects, `[batch or 1, tokens, 1]`; None for everywhere."""
        tokens: Tensor = next(t for t in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if t is not None)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        past = 0 if cache is None else int(cache.get_seq_length())
        first = self._first
        if first is None:
            if past:
                return None
            first, mask = tokens.shape[1] - 1, kwargs.get("attention_mask")
            if isinstance(mask, Tensor) and mask.dim() == 2:
                first = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        numbers = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        return (numbers >= torch.as_tensor(first, device=tokens.device).reshape(-1, 1))[..., None]

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
