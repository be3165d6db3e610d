"""What a layer makes of q, k, v and of its read: short convolutions, the forms of the gate, the norm of the read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import conv1d

from fednl.errors import CheckpointError
from fednl.memory import MemoryCache, MemoryConfig, attach_memory, load_rules, rules, save_rules
from fednl.memory.projection import Convolution
from memory.models import tiny, tokens, with_memory

EVERYTHING: dict[str, Any] = {"conv_tokens": 4, "gate": "head", "read_norm": True}


def test_the_convolution_is_torchs_over_the_real_tokens() -> None:
    layer = Convolution({"q": 3, "v": 2}, 4).double()
    x, keep = torch.randn(2, 20, 5, dtype=torch.float64), torch.rand(2, 20) > 0.3
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_()
        parts, last = layer({"q": x[..., :3], "v": x[..., 3:], "k": x}, keep, None)
        weight = torch.cat([layer.q, layer.v]).unsqueeze(1)
        for row in range(2):
            real = x[row, keep[row]]
            wanted = conv1d(torch.nn.functional.pad(real.mT, (3, 0)), weight, groups=5).mT
            found = torch.cat([parts["q"], parts["v"]], -1)[row, keep[row]]
            torch.testing.assert_close(found, wanted)
            assert torch.equal(last[row], real[-3:])
    assert torch.equal(parts["k"], x)


@pytest.mark.parametrize("feature", ["linear", "silu"])
@pytest.mark.parametrize("keys", ["token", "context"])
def test_pieces_padding_and_tokens_change_nothing_with_gradients(keys: str, feature: str) -> None:
    model = with_memory(keys=keys, feature=feature, write="leaving", **EVERYTHING).double()
    ids, results = tokens(2, 26), []
    for sizes in ([26], [7, 1, 2, 16], [1] * 26):
        cache = MemoryCache(model)
        logits = torch.cat([model(piece, cache=cache).logits for piece in ids.split(sizes, 1)], 1)
        results.append([logits, *torch.autograd.grad(logits.square().mean(), list(rules(model).values()))])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-9, rtol=1e-7)
    zeros = ids.new_zeros(2, 3)
    row, mask = torch.cat([zeros, ids, zeros], 1), torch.cat([zeros, torch.ones_like(ids), zeros], 1)
    mask[:, 12], expected = 0, model(torch.cat([row[:, 3:12], row[:, 13:29]], 1)).logits
    cache = MemoryCache(model)
    pieces = zip(row.split([2, 9, 1, 20], 1), mask.split([2, 9, 1, 20], 1), strict=True)
    padded = torch.cat([model(piece, attention_mask=real, cache=cache).logits for piece, real in pieces], 1)
    torch.testing.assert_close(padded[mask.bool()].view_as(expected), expected, atol=1e-9, rtol=1e-7)


def test_generate_beams_and_checkpointing_with_everything_on() -> None:
    model, ids = with_memory(rule="ttt-linear", mini_batch_tokens=4, **EVERYTHING), tokens(2, 12)
    for beams in (1, 3):
        settings: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "do_sample": False, "num_beams": beams}
        assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: rule.grad for name, rule in rules(model).items()})
    assert all(gradient is not None and gradient.any() for gradient in gradients[0].values())
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_fresh_convolution_changes_nothing() -> None:
    ids, logits = tokens(2, 30), []
    for conv in (0, 4):
        config = MemoryConfig(layers="all", window_tokens=8, keys="token", conv_tokens=conv)
        logits.append(attach_memory(tiny(), config)(ids, use_cache=False).logits)
    assert torch.equal(logits[1], logits[0])


@pytest.mark.parametrize(("gate", "numbers"), [("input", 4 * 32 + 4), ("head", 4), ("layer", 1)])
@pytest.mark.parametrize("mixing", ["additive", "convex"])
def test_d16_the_gate_has_the_shape_its_setting_says(gate: Any, mixing: Any, numbers: int) -> None:
    settings = {"layers": "1", "gate": gate, "mixing": mixing, "window_tokens": 8}
    fresh = attach_memory(tiny(), MemoryConfig(**settings))
    own = {name: rule for name, rule in rules(fresh).items() if ".gate." in name}
    assert sum(rule.numel() for rule in own.values()) == numbers
    memory, hidden = fresh.model.layers[1].self_attn.memory, torch.randn(2, 5, 32)
    with torch.no_grad():
        own["layers.1.memory.gate.bias"].copy_(torch.linspace(-1, 1, own["layers.1.memory.gate.bias"].numel()))
        attended, read = torch.randn(2, 5, 32), torch.randn(2, 5, 4, 8)
        mixed = memory.gate.mix(attended, hidden, read, 1.0).view(2, 5, 4, 8)
        bias = own["layers.1.memory.gate.bias"].expand(4)
        for head in range(4):
            g = bias[head].tanh() if mixing == "additive" else bias[head].sigmoid()
            static = attended.view(2, 5, 4, 8)[:, :, head] * (1 if mixing == "additive" else 1 - g)
            torch.testing.assert_close(mixed[:, :, head], static + g * read[:, :, head])


def test_the_norm_of_the_read_takes_its_length_away_and_nothing_from_an_empty_memory() -> None:
    memory = attach_memory(tiny(), MemoryConfig(layers="1", read_norm=True)).model.layers[1].self_attn.memory
    attended, hidden, read = torch.zeros(2, 5, 32), torch.randn(2, 5, 32), torch.randn(2, 5, 4, 8)
    with torch.no_grad():
        quiet, loud = (memory.gate.mix(attended, hidden, size * read, 1.0) for size in (1.0, 50.0))
        torch.testing.assert_close(quiet, loud, atol=1e-5, rtol=1e-5)
        lengths = quiet.view(2, 5, 4, 8).square().mean(-1).sqrt()
        torch.testing.assert_close(lengths, torch.full_like(lengths, 0.1).tanh(), atol=1e-5, rtol=1e-4)
        assert not memory.gate.mix(attended, hidden, torch.zeros_like(read), 1.0).any()


@pytest.mark.parametrize(("layers", "numbers"), [("all", range(6)), ("last:2", (4, 5)), ("every:2", (1, 3, 5))])
def test_layers_are_chosen_by_rule(layers: str, numbers: Any) -> None:
    model = attach_memory(tiny(num_hidden_layers=6), MemoryConfig(layers=layers, window_tokens=0, keys="token"))
    assert sorted({int(name.split(".")[1]) for name in rules(model)}) == list(numbers)


def test_rules_belong_to_the_settings_they_were_made_with(tmp_path: Path) -> None:
    model, ids = with_memory(**EVERYTHING), tokens(2, 20)
    save_rules(model, tmp_path)
    assert torch.equal(load_rules(tiny(), tmp_path)(ids).logits, model(ids).logits)
    with pytest.raises(CheckpointError, match=r"memory\.conv-tokens = 4, and it is 3 here"):
        load_rules(with_memory(**{**EVERYTHING, "conv_tokens": 3}), tmp_path)


def test_a_convolution_needs_no_rank_and_one_token_is_none() -> None:
    model = with_memory(rank=0, conv_tokens=2)
    assert {name.split(".")[3] for name in rules(model)} == {"write", "gate", "projection"}
    with pytest.raises(ValidationError, match="conv-tokens = 1 would only scale"):
        MemoryConfig(conv_tokens=1)
