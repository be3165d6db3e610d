"""Tiny models of every layout that context vectors know, and the injection written out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor

from fednl.models.context_injection import find_modules
from fednl.models.context_vectors import attach_context, context_params
from fednl.models.settings import ContextVectorSettings

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "Llama": {"intermediate_size": 48, "num_key_value_heads": 2},
    "Qwen2": {"intermediate_size": 48, "num_key_value_heads": 2},
    "Gemma": {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 8},
    "Gemma2": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 64},
    "GPT2": {"n_positions": 128, "bos_token_id": 1, "eos_token_id": 2},
    "GPTNeoX": {"intermediate_size": 48, "max_position_embeddings": 128},
}
PLAIN = ContextVectorSettings(start_lambda=0.0)


def build(layout: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{layout}Config")(**SHAPE, **LAYOUTS[layout])
    head = getattr(transformers, "GPT2LMHeadModel" if layout == "GPT2" else f"{layout}ForCausalLM")
    model = head(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "ln_" not in name:
                parameter.normal_(0, 0.2)
    return model.to(dtype).eval()


def filled(model: Any, settings: ContextVectorSettings = PLAIN) -> Any:
    """Attached, with random vectors and coefficients, so that every one of them matters."""
    attach_context(model, settings)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in context_params(model).values():
            tensor.add_(0.5 * torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype))
    return model


def logits(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits


@contextmanager
def by_hand(model: Any, coefficients: Tensor, vectors: Tensor, where: Tensor | bool = True) -> Iterator[None]:
    """The specification: each module's forward wrapped by hand; `where` is `[batch, tokens, 1]`."""
    kept: list[tuple[Any, Any]] = []
    for layer, modules in enumerate(find_modules(model)):
        for index, module in enumerate(modules):
            (scale, keep), vector, plain = coefficients[layer, index], vectors[layer, index], module.forward

            def changed(
                *args: Any, plain: Any = plain, scale: Any = scale, keep: Any = keep, vector: Any = vector, **named: Any
            ) -> Any:
                out = plain(*args, **named)
                only = torch.as_tensor(where)
                if isinstance(out, tuple):
                    return (torch.where(only, keep * out[0] + scale * vector, out[0]), *out[1:])
                return torch.where(only, keep * out + scale * vector, out)

            kept.append((module, plain))
            module.forward = changed
    try:
        yield
    finally:
        for module, _ in kept:
            del module.forward
