"""A whole run in seconds: a random byte-level backbone in a folder, and settings that use it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fednl.config import Config


def tiny_backbone(folder: Path, seed: int = 0) -> Path:
    """A random two-layer Llama over bytes, with its tokenizer, as `save_pretrained` writes them."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = [
        "the",
        "a",
        "river",
        "stone",
        "cloud",
        "walks",
        "sings",
        "old",
        "green",
        "near",
        "over",
        "under",
        "bird",
        "house",
        "sleeps",
    ]
    draw = random.Random(seed)
    text = " ".join(" ".join(draw.choices(words, k=8)).capitalize() + "." for _ in range(600))
    (folder / "filler.txt").write_text(text, encoding="utf-8")
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: needs no file and no training, and is as fast as any."""
    symbols = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>")


def settings(backbone: Path, **sections: dict[str, Any]) -> Config:
    """Settings of a run that takes seconds; `sections` replaces keys, by section and kebab-case key."""
    table: dict[str, dict[str, Any]] = {
        "backbone": {"id": str(backbone)},
        "data": {"tokens": 560, "clients": 3, "train": 6, "validation": 2, "test": 4},
        "memory": {"layers": "last:1", "rank": 2, "window-tokens": 130, "sink-tokens": 2},
        "training": {"rounds": 3, "local-steps": 2, "batch": 2, "local-lr": 1e-2},
        "evaluation": {"arms": ["window-only", "federated"], "batch": 4},
    }
    table["data"]["filler"] = str(backbone / "filler.txt")
    for name, keys in sections.items():
        table.setdefault(name, {}).update(keys)
    return Config.from_dict(table)
