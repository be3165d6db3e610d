"""Tiny random models of the supported families, built in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from fednl.memory import MemoryConfig, attach_memory, rules

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
KEYS = "token"
"""`memory.keys` of the models here, unless a test says otherwise; `both_keys` runs a test with either."""

CROSSED = ("llama", "qwen2")
"""The families that tests run times everything else; `test_families.py` runs the others, once."""
ROPES = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("full", 1e4), ("sliding", 50.0))}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 12, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 64}),
    "gemma": ("Gemma", {"head_dim": 12, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 12, "sliding_window": 64, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0},
    ),
    "gemma3_text": (
        "Gemma3",
        {
            "head_dim": 12,
            "sliding_window": 64,
            "query_pre_attn_scalar": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {f"{kind}_attention": rope for kind, rope in ROPES.items()},
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [0, 1, 0]}),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 2.0, "logits_scaling": 3.0},
    ),
    "phi3": ("Phi3", {"sliding_window": 64, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5, "num_key_value_heads": 4}),
    "gpt2": (
        "GPT2",
        {"num_key_value_heads": 4, "n_inner": 48, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
}
"""Family -> the prefix of its classes, and what its config says beside `SHAPE`."""


def tiny(family: str = "qwen2", seed: int = 0, **changed: Any) -> PreTrainedModel:
    """A random model in evaluation mode; weights wide enough that attention is not uniform.

    `changed` goes into the config.
    """
    torch.manual_seed(seed)
    prefix, own = FAMILIES[family]
    text = "Text" if family.endswith("_text") else ""
    config = getattr(transformers, f"{prefix}{text}Config")(**{**SHAPE, **own, **changed})
    name = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    model: PreTrainedModel = getattr(transformers, f"{prefix}{name}")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.add_(0.5 * torch.randn(parameter.shape))
            elif "norm" not in name:
                parameter.normal_(0, 0.15 if "embed" not in name else 1.0)
    return model.eval()


def with_memory(family: str = "qwen2", seed: int = 0, **settings: object) -> PreTrainedModel:
    """The same with memory whose rules are random, so that every part of them matters."""
    return remember(tiny(family, seed), seed, **settings)


def remember(model: PreTrainedModel, seed: int = 0, **settings: object) -> PreTrainedModel:
    """Puts random rules on a model."""
    config = MemoryConfig(**{"layers": "all", "window_tokens": 8, "sink_tokens": 2, "keys": KEYS, **settings})  # type: ignore[arg-type]
    attach_memory(model, config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in rules(model).values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """`[batch, length]` token ids, none of them a special token."""
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))
