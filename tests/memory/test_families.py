"""The other families of backbones: what memory promises, once each; `test_attach.py` runs two with all settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

from fednl.errors import BackboneError
from fednl.memory import MemoryCache, MemoryConfig, attach_memory, closed, detach_memory, load_rules, rules, save_rules
from fednl.memory.centre import centre
from fednl.memory.families import FAMILIES as SUPPORTED
from fednl.memory.families import attentions
from fednl.memory.sites import find_decoder
from fednl.models.lora import attach_lora, detach_lora, lora_params
from fednl.models.settings import LoraSettings
from memory.models import CROSSED, FAMILIES, remember, tiny, tokens, with_memory

families = pytest.mark.parametrize("family", [family for family in FAMILIES if family not in CROSSED])
SLIDING = [family for family, (_, own) in FAMILIES.items() if "sliding_window" in own]
NARROW = 6
"""Tokens that the layers of `narrow` models see by themselves, where the family has such layers."""


def narrow(family: str) -> PreTrainedModel:
    """A tiny model whose own sliding window is shorter than the texts here."""
    return tiny(family, **({"sliding_window": NARROW} if family in SLIDING else {}))


def turn(x: torch.Tensor, embedding: Any, position: int) -> torch.Tensor:
    """One head's vector, rotated to a position."""
    cos, sin = (t[0, 0] for t in embedding(x, torch.tensor([[position]])))
    half, (x, rest) = len(cos) // 2, x.split([len(cos), len(x) - len(cos)])
    return torch.cat([x * cos + torch.cat([-x[half:], x[:half]]) * sin, rest])


def plain_attention(model: Any, layer: int, hidden: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
    """What an attention layer gives under window and re-based sinks, one query and one key at a time."""
    decoder: Any = find_decoder(model)
    attention: Any = attentions(decoder)[layer]
    config, tokens_given = model.config, hidden.shape[0]
    family, heads = config.model_type, config.num_attention_heads
    size = getattr(attention, "head_dim", config.hidden_size // heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    parts: dict[str, torch.Tensor] = {}
    if family in ("phi3", "gpt2"):
        fused = getattr(attention, {"phi3": "qkv_proj", "gpt2": "c_attn"}[family])(hidden).split(size, -1)
        cuts = {"q": (0, heads), "k": (heads, heads + kv_heads), "v": (heads + kv_heads, heads + 2 * kv_heads)}
        parts = {name: torch.stack(fused[a:b], 1) for name, (a, b) in cuts.items()}
    if family == "gpt_neox":
        fused = attention.query_key_value(hidden).split(size, -1)
        parts = {name: torch.stack(fused[first::3], 1) for first, name in enumerate("qkv")}
    for name in "qkv" if not parts else "":
        x = getattr(attention, f"{name}_proj")(hidden)
        if name != "v" and family == "olmo2":  # over all heads at once
            x = getattr(attention, f"{name}_norm")(x)
        x = x.view(tokens_given, -1, size)
        if name != "v" and family in ("qwen3", "gemma3_text"):  # over each head
            x = getattr(attention, f"{name}_norm")(x)
        parts[name] = x
    embedding: Any = getattr(decoder, "rotary_emb", None)
    if family == "gpt2":
        embedding = lambda x, position: (torch.ones(1, 1, size), torch.zeros(1, 1, size))  # noqa: E731
    if family == "gemma3_text":
        kind = config.layer_types[layer]
        embedding = lambda x, position: decoder.rotary_emb(x, position, layer_type=kind)  # noqa: E731
    if family == "smollm3" and not config.no_rope_layers[layer]:
        embedding = lambda x, position: (torch.ones(1, 1, size), torch.zeros(1, 1, size))  # noqa: E731
    scaling = {"granite": 0.2, "gemma2": 5**-0.5, "gemma3_text": 5**-0.5}.get(family, size**-0.5)
    group = heads // kv_heads
    rows = []
    for t in range(tokens_given):
        visible = [(j, min(t, sinks + window - 1) - j) for j in range(sinks) if j <= t - window]
        visible += [(j, t - j) for j in range(max(0, t - window + 1), t + 1)]
        for h in range(heads):
            query, keys = parts["q"][t, h], parts["k"][:, h // group]
            scores = torch.stack([turn(query, embedding, d) @ turn(keys[j], embedding, 0) for j, d in visible])
            scores = scores * scaling
            if family == "gemma2":
                scores = 2 * torch.tanh(scores / 2)
            values = torch.stack([parts["v"][j, h // group] for j, _ in visible])
            rows.append(scores.softmax(0) @ values)
    return getattr(attention, SUPPORTED[family].output)(torch.stack(rows).view(tokens_given, -1))


def test_the_families_tested_are_those_supported() -> None:
    assert list(FAMILIES) == list(SUPPORTED)
    for family in FAMILIES:
        assert tiny(family).config.model_type == family


@families
def test_closed_or_detached_memory_is_the_backbone_bit_for_bit(family: str) -> None:
    ids = tokens(2, 21)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    model = narrow(family)
    # Bare GPT-2 counts positions from the first slot unless told otherwise, padding or not.
    told = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if family == "gpt2" else {}
    names, expected = list(model.state_dict()), (model(ids).logits, model(ids, attention_mask=mask, **told).logits)
    remember(model, window_tokens=0)
    assert not torch.equal(model(ids).logits, expected[0])
    with closed(model):
        assert torch.equal(model(ids).logits, expected[0])
        assert torch.equal(model(ids, attention_mask=mask).logits, expected[1])
    detach_memory(model)
    remember(model, window_tokens=NARROW)
    assert not torch.equal(model(ids).logits, expected[0])
    detach_memory(model)
    assert torch.equal(model(ids).logits, expected[0])
    assert list(model.state_dict()) == names and all(p.requires_grad for p in model.parameters())


@families
def test_a_window_over_the_whole_text_is_the_familys_own_attention(family: str) -> None:
    model, ids = tiny(family).double(), tokens(2, 30)
    expected = model(ids).logits
    remember(model, window_tokens=40, sink_tokens=2).double()
    with closed(model):
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
        cache = MemoryCache(model)
        parts = [model(piece, cache=cache).logits for piece in ids.split(11, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-5)


@families
def test_window_and_sinks_equal_the_plain_loop_in_every_layer(family: str) -> None:
    model, ids = with_memory(family, layers="none", window_tokens=5, sink_tokens=3), tokens(1, 12)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for attention in attentions(find_decoder(model)):
        attention.register_forward_hook(
            lambda m, a, kw, out: seen.append(((a or (kw["hidden_states"],))[0][0], out[0][0])), with_kwargs=True
        )
    with torch.no_grad():
        model(ids, use_cache=False)
        for layer, (given, out) in enumerate(list(seen)):
            torch.testing.assert_close(out, plain_attention(model, layer, given, 5, 3), atol=1e-5, rtol=1e-5)
    assert layer == 2


@families
@pytest.mark.parametrize("window", [0, NARROW])
def test_pieces_tokens_and_padding_change_nothing(family: str, window: int) -> None:
    model, ids = remember(narrow(family), window_tokens=window).double(), tokens(2, 23)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for sizes in ([7, 1, 15], [1] * 23):
            cache = MemoryCache(model)
            parts = [model(piece, cache=cache).logits for piece in ids.split(sizes, 1)]
            torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
        model.float()  # padded rows of bare eager attention, whose softmax is float32, are not numbers in float64
        single = model(ids[:1, 9:], use_cache=False).logits[0]
        padded = model(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(padded[0, 9:], single, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(padded[1], whole[1].float(), atol=1e-4, rtol=1e-4)


@families
@pytest.mark.parametrize("window", [0, NARROW])
def test_generate_equals_recompute_with_one_beam_and_with_three(family: str, window: int) -> None:
    model, ids = remember(narrow(family), window_tokens=window), tokens(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    made = model.generate(ids, attention_mask=mask, **settings)
    row = ids[:1, 4:]
    for _ in range(5):
        row = torch.cat([row, model(row, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made[0, 4:], row[0])
    beams = model.generate(ids, attention_mask=mask, num_beams=3, **settings)
    assert torch.equal(beams, model.generate(ids, attention_mask=mask, num_beams=3, use_cache=False, **settings))


@families
def test_rules_saved_and_loaded_are_bit_equal(family: str, tmp_path: Path) -> None:
    model, ids = with_memory(family, keys="context"), tokens(1, 20)
    save_rules(model, tmp_path)
    other = load_rules(tiny(family), tmp_path)
    assert all(torch.equal(rules(other)[name], rule) for name, rule in rules(model).items())
    assert torch.equal(other(ids).logits, model(ids).logits)


@families
def test_lora_goes_beside_memory_and_gradients_reach_both(family: str) -> None:
    model, ids = with_memory(family), tokens(2, 16)
    expected = model(ids, use_cache=False).logits
    attach_lora(model, LoraSettings(rank=2), seed=0)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    model(ids, labels=ids, use_cache=False).loss.backward()
    trained = {**rules(model), **{n: p for n, p in lora_params(model).items() if n.endswith("lora_B")}}
    assert len(trained) > 3 * 5
    for name, parameter in trained.items():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    with torch.no_grad():
        for parameter in lora_params(model).values():
            parameter.normal_(0, 0.2)
    whole, cache = model(ids, use_cache=False).logits, MemoryCache(model)
    parts = torch.cat([model(piece, cache=cache).logits for piece in ids.split(7, 1)], 1)
    torch.testing.assert_close(parts, whole, atol=2e-5, rtol=1e-4)
    detach_lora(model)
    assert torch.equal(model(ids, use_cache=False).logits, expected)


@families
def test_checkpointing_recomputes_what_was_computed(family: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model, ids = with_memory(family), tokens(2, 16)
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: rule.grad for name, rule in rules(model).items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@families
def test_centring_takes_the_mean_out_of_what_the_memory_sees(family: str) -> None:
    model, ids = attach_memory(tiny(family), MemoryConfig(layers="1", keys="token", feature="linear")), tokens(2, 16)
    centre(model, ids)
    memory, seen = attentions(find_decoder(model))[1].memory, []
    memory.register_forward_pre_hook(lambda m, args: seen.append(args[2:4]))
    with torch.no_grad(), closed(model):
        model(ids, use_cache=True)
        for name, part in zip("qk", seen[0], strict=True):
            shifted = part + getattr(memory.projection, f"{name}_shift")
            torch.testing.assert_close(shifted.mean((0, 1)), torch.zeros(part.shape[-1]), atol=1e-5, rtol=0)


def test_a_text_longer_than_the_learned_positions_is_refused() -> None:
    model = remember(tiny("gpt2", max_position_embeddings=24), window_tokens=8)
    cache = MemoryCache(model)
    model(tokens(1, 20), cache=cache)
    with pytest.raises(BackboneError, match="reaches 25 tokens, but this backbone has position embeddings for 24"):
        model(tokens(1, 5), cache=cache)
    assert cache.get_seq_length() == 20 and model(tokens(1, 4), cache=cache).logits.isfinite().all()


@pytest.mark.parametrize("family", SLIDING)
def test_a_window_wider_than_the_familys_own_is_refused(family: str) -> None:
    with pytest.raises(BackboneError, match=rf"see {NARROW} tokens only; use at most {NARROW}"):
        attach_memory(narrow(family), MemoryConfig(layers="all", window_tokens=NARROW + 1))


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_a_backbone_that_looks_ahead_is_refused(family: str) -> None:
    with pytest.raises(BackboneError, match="sees later tokens too"):
        attach_memory(tiny(family, use_bidirectional_attention=True), MemoryConfig(layers="all"))


def test_a_rotary_embedding_of_one_kind_of_layer_that_changes_is_refused() -> None:
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
    ropes["full_attention"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    with pytest.raises(BackboneError, match=r"\('dynamic'\) .*use memory\.window-tokens = 0"):
        attach_memory(tiny("gemma3_text", rope_parameters=ropes), MemoryConfig(layers="all", window_tokens=8))


def test_a_model_of_text_and_images_is_refused_by_name() -> None:
    small = tiny("gemma3_text").config
    vision = {"image_size": 28, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=small.to_dict(), vision_config=vision))
    with pytest.raises(BackboneError, match=r"'gemma3' is not supported.*gemma3_text"):
        attach_memory(model, MemoryConfig())
