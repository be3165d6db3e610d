"""What may be done to a model with memory: refused, copied, cast, wrapped, taken apart."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from fednl.errors import BackboneError, SettingsError
from fednl.memory import MemoryCache, MemoryConfig, attach_memory, closed, detach_memory, rules
from memory.models import SHAPE, tiny, tokens, with_memory

pytestmark = pytest.mark.usefixtures("both_keys")

ALL = MemoryConfig(layers="all", window_tokens=8, sink_tokens=2)


def scaled(kind: str, **shape: Any) -> LlamaForCausalLM:
    """A Llama trained to 16 tokens, whose rotary embedding is stretched to 64."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind in ("llama3", "yarn"):
        rope |= {"original_max_position_embeddings": 16}
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**{**SHAPE, "max_position_embeddings": 64, **shape}, rope_parameters=rope)
    ).eval()


@pytest.mark.parametrize("config", [MemoryConfig(layers="last:15"), ALL], ids=["layers", "window"])
def test_a_refused_model_is_as_it_was(config: MemoryConfig) -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1))
    implementation = model.config._attn_implementation
    with pytest.raises((SettingsError, BackboneError), match=r"has 3 layers|see 6 tokens only; use at most 6"):
        attach_memory(model, config)
    assert all(p.requires_grad for p in model.parameters())
    assert not any("memory" in name for name in model.state_dict())
    assert model.config._attn_implementation == implementation
    attach_memory(model, MemoryConfig(layers="all", window_tokens=6))


def test_a_rotary_embedding_that_changes_with_the_length_needs_full_attention() -> None:
    with pytest.raises(BackboneError, match=r"\('dynamic'\) .*use memory\.window-tokens = 0"):
        attach_memory(scaled("dynamic"), ALL)
    attach_memory(scaled("dynamic"), MemoryConfig(layers="all", window_tokens=0))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize(
    "shape", [{"num_key_value_heads": 1, "head_dim": 16}, {"num_key_value_heads": 4, "head_dim": 6}]
)
def test_scaled_rotary_embeddings_and_odd_shapes(kind: str, shape: dict[str, int]) -> None:
    """A window as long as the text is full attention, and pieces are one pass."""
    model, ids = scaled(kind, **shape).double(), tokens(2, 30)
    expected = model(ids).logits
    attach_memory(model, MemoryConfig(layers="all", window_tokens=40)).double()
    with closed(model):
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-9, rtol=1e-9)
    detach_memory(model)
    attach_memory(model, ALL).double()
    cache = MemoryCache(model)
    pieces = torch.cat([model(piece, cache=cache).logits for piece in ids.split(7, 1)], 1)
    torch.testing.assert_close(pieces, model(ids, use_cache=False).logits, atol=1e-9, rtol=1e-9)


def test_a_deep_copy_has_a_memory_of_its_own() -> None:
    model, ids = with_memory(), tokens(1, 20)
    expected = model(ids, use_cache=False).logits
    other = copy.deepcopy(model)
    assert torch.equal(other(ids, cache=MemoryCache(other)).logits, expected)
    with closed(other):
        assert not torch.equal(other(ids, use_cache=False).logits, expected)
        assert torch.equal(model(ids, use_cache=False).logits, expected)
    detach_memory(other)
    assert torch.equal(model(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_d13_casting_a_model_spares_its_rules(dtype: torch.dtype) -> None:
    model, ids = with_memory(), tokens(1, 20)
    before = {name: rule.detach().clone() for name, rule in rules(model).items()}
    model.to(dtype)
    assert all(rule.dtype == torch.float32 and torch.equal(rule, before[name]) for name, rule in rules(model).items())
    cache = MemoryCache(model)
    output = model(ids, labels=ids, cache=cache)
    assert output.logits.dtype == dtype and cache.layers[0].tensors.state.dtype == torch.float32
    output.loss.backward()
    assert all(rule.grad.isfinite().all() for rule in rules(model).values())
    assert {rule.dtype for rule in rules(model.double()).values()} == {torch.float64}


def test_d13_the_memory_is_float32_under_autocast(both_keys: str) -> None:
    """Only q, k and v come in bfloat16; what the rules make of them is exact to float32."""
    model = with_memory()
    attention, hidden = model.model.layers[0].self_attn, torch.randn(1, 20, 32)
    q, k = torch.randn(1, 20, 32), torch.randn(1, 20, 16)
    addresses = partial(attention.addresses, hidden) if both_keys == "context" else None
    expected = attention.memory(hidden, hidden, q, k, k, None, None, None, 1.0, addresses)
    with torch.autocast("cpu", torch.bfloat16):
        under = attention.memory(hidden, hidden, q, k, k, None, None, None, 1.0, addresses)
    assert torch.equal(under[0], expected[0]) and torch.equal(under[1].state, expected[1].state)


def test_a_config_that_two_models_share_is_named() -> None:
    config = Qwen2Config(**SHAPE)
    with_it, without = Qwen2ForCausalLM(config), Qwen2ForCausalLM(config)
    attach_memory(with_it, ALL)
    with pytest.raises(BackboneError, match="give each model its own config"):
        without(tokens(1, 10))


def test_the_backbones_own_dropout_stays() -> None:
    model, ids = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_dropout=0.5)), tokens(1, 20)
    attach_memory(model, ALL).train()
    assert not torch.equal(model(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    model.eval()
    assert torch.equal(model(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_a_replaced_block_is_detached_too() -> None:
    model, ids = with_memory(), tokens(1, 10)
    expected = tiny()(ids).logits
    model.model.layers = model.model.layers[:3]
    detach_memory(model)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_peft_made_trainable_stays_so() -> None:
    from peft import LoraConfig, get_peft_model

    model, ids = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj", "v_proj"])), tokens(1, 20)
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    attach_memory(model, ALL)
    everything = trainable | {id(p) for p in rules(model).values()}
    assert {id(p) for p in model.parameters() if p.requires_grad} == everything
    model(input_ids=ids, labels=ids).loss.backward()
    detach_memory(model)
    assert {id(p) for p in model.parameters() if p.requires_grad} == trainable
