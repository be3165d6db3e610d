"""Tiny random models of the supported families, built in milliseconds."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

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

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def tiny(family: str = "qwen2", seed: int = 0) -> PreTrainedModel:
    """A random model in evaluation mode; weights wide enough that attention is not uniform."""
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    model = model_class(config_class(**SHAPE))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.15 if "embed" not in name else 1.0)
    return model.eval()


def with_memory(family: str = "qwen2", seed: int = 0, **settings: object) -> PreTrainedModel:
    """The same with memory whose rules are random, so that every part of them matters."""
    config = MemoryConfig(**{"layers": "all", "window_tokens": 8, "sink_tokens": 2, "keys": KEYS, **settings})  # type: ignore[arg-type]
    model = attach_memory(tiny(family, seed), config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in rules(model).values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """`[batch, length]` token ids, none of them a special token."""
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))
