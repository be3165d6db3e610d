"""Every update rule inside a model: pieces, padding, the cache, what is trained, what the settings allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fednl.errors import CheckpointError
from fednl.memory import MemoryCache, MemoryConfig, attach_memory, load_rules, rules, save_rules
from fednl.memory.centre import centre
from fednl.memory.update_rules import RULES
from fednl.memory.write import Write
from memory.models import tiny, tokens, with_memory

EVERY = pytest.mark.parametrize("rule", sorted(RULES))
HOW = pytest.mark.parametrize(("keys", "write"), [("token", "now"), ("context", "leaving")])


def padded(ids: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    """Padding on both sides, and the mask that says so."""
    zeros = [ids.new_zeros(ids.shape[0], n) for n in (left, right)]
    return torch.cat([zeros[0], ids, zeros[1]], 1), torch.cat([zeros[0], torch.ones_like(ids), zeros[1]], 1)


@EVERY
@HOW
def test_oracle_2_and_3_pieces_equal_one_pass_with_gradients(rule: str, keys: str, write: str) -> None:
    model, ids = with_memory(rule=rule, keys=keys, write=write).double(), tokens(2, 24)
    results = []
    for size in (24, 7, 1):
        cache = MemoryCache(model)
        logits = torch.cat([model(piece, cache=cache).logits for piece in ids.split(size, 1)], 1)
        gradients = torch.autograd.grad(logits.square().mean(), list(rules(model).values()))
        results.append([logits.detach(), *gradients])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-9, rtol=1e-7)


@EVERY
@HOW
def test_d01_oracle_12_padded_rows_write_nothing_and_do_not_decay(rule: str, keys: str, write: str) -> None:
    model, ids = with_memory(rule=rule, keys=keys, write=write).double(), tokens(1, 30)
    alone = MemoryCache(model)
    expected = model(ids, cache=alone).logits
    row, mask = padded(ids, 6, 5)
    for pieces in ([41], [3, 20, 15, 3]):
        cache, logits = MemoryCache(model), []
        for piece, real in zip(row.split(pieces, 1), mask.split(pieces, 1), strict=True):
            logits.append(model(piece, attention_mask=real, cache=cache).logits)
        torch.testing.assert_close(torch.cat(logits, 1)[:, 6:36], expected, atol=1e-9, rtol=1e-7)
        for ours, theirs in zip(cache.layers, alone.layers, strict=True):
            for part in ("state", "momentum", "context", "gathered", "taken"):
                found, wanted = getattr(ours.tensors, part), getattr(theirs.tensors, part)
                torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-7)


@EVERY
def test_every_trainable_number_of_a_rule_is_taught(rule: str) -> None:
    model, ids = with_memory(rule=rule, keys="token"), tokens(2, 40)
    model(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in rules(model).items():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()) and bool(parameter.grad.any()), name


@EVERY
def test_a_recomputed_layer_learns_as_a_plain_one_does(rule: str) -> None:
    ids, gradients = tokens(2, 30), []
    for checkpointing in (False, True):
        model = with_memory(rule=rule, keys="context", write="leaving")
        if checkpointing:
            model.train().activation_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in rules(model).items()})
    torch.testing.assert_close(gradients[1], gradients[0])


@EVERY
def test_generate_equals_greedy_recompute_and_beams_take_their_memory_along(rule: str) -> None:
    model, ids = with_memory(rule=rule, write="leaving"), tokens(2, 20)
    for beams in (1, 3):
        settings: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "do_sample": False, "num_beams": beams}
        cached = model.generate(ids, **settings)
        assert torch.equal(cached, model.generate(ids, use_cache=False, **settings))


@EVERY
def test_a_forgotten_conversation_goes_on_in_any_pieces(rule: str) -> None:
    model, ids = with_memory(rule=rule, keys="context", write="leaving"), tokens(2, 40)
    after = []
    for size in (20, 3):
        cache = MemoryCache(model)
        model(ids[:, :20], cache=cache)
        cache.reset_state()
        for layer in cache.layers:
            assert not layer.tensors.state.any()
            assert layer.tensors.momentum is None or not layer.tensors.momentum.any()
        after.append(torch.cat([model(piece, cache=cache).logits for piece in ids[:, 20:].split(size, 1)], 1))
    torch.testing.assert_close(after[1], after[0], atol=2e-5, rtol=1e-4)


@EVERY
def test_oracle_16_the_cache_holds_state_and_momentum_and_does_not_grow(rule: str) -> None:
    model = with_memory(rule=rule, keys="context", write="leaving")
    cache, sizes = MemoryCache(model), []
    with torch.no_grad():
        for piece in tokens(1, 400).split(100, 1):
            model(piece, cache=cache)
            sizes.append(cache.size_bytes())
    assert len(set(sizes[1:])) == 1
    numbers = 2 * (2 * 9 * 8) if RULES[rule].inner else (2 if RULES[rule].momentum else 1) * 2 * 8 * 8
    taken = 8 if RULES[rule].inner else 0
    assert cache.state_bytes() == 3 * (numbers * 4 + taken)
    for layer in cache.layers:
        for tensor in vars(layer.tensors).values():
            assert tensor is None or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@EVERY
def test_saved_rules_reload_bit_for_bit_and_only_under_their_rule(rule: str, tmp_path: Path) -> None:
    model, ids = with_memory(rule=rule), tokens(2, 30)
    save_rules(model, tmp_path)
    assert torch.equal(load_rules(tiny(), tmp_path)(ids).logits, model(ids).logits)
    other = "delta" if rule != "delta" else "hebbian"
    with pytest.raises(CheckpointError, match=rf"need memory\.rule = '{rule}', and it is '{other}' here"):
        load_rules(with_memory(rule=other), tmp_path)


def test_writes_per_token_matter_only_to_rules_that_make_several(tmp_path: Path) -> None:
    save_rules(with_memory(), tmp_path / "delta")
    load_rules(with_memory(writes_per_token=5), tmp_path / "delta")
    save_rules(with_memory(rule="delta-product"), tmp_path / "product")
    with pytest.raises(CheckpointError, match=r"memory\.writes-per-token = 2, and it is 3 here"):
        load_rules(with_memory(rule="delta-product", writes_per_token=3), tmp_path / "product")


def test_rules_saved_before_there_were_others_still_load(tmp_path: Path) -> None:
    """Their description has no writes-per-token and no write-range."""
    model, ids = with_memory(), tokens(2, 30)
    description = save_rules(model, tmp_path) / "rules.json"
    kept = [line for line in description.read_text().splitlines() if "writes-per" not in line and "-range" not in line]
    description.write_text("\n".join(kept))
    assert torch.equal(load_rules(tiny(), tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("keys", ["token", "context"])
def test_every_rule_is_listed_by_group_and_the_delta_rule_as_before(keys: str) -> None:
    def own(rule: str) -> set[str]:
        config = MemoryConfig(layers="0", rule=rule, keys=keys)  # type: ignore[arg-type]
        return {name.removeprefix("layers.0.memory.") for name in rules(attach_memory(tiny(), config))}

    delta = own("delta")
    decay = {"write.decay.weight", "write.decay.bias"}
    further = {
        "projection.k2_down",
        "projection.k2_up",
        "projection.k2_shift",
        "projection.v2_down",
        "projection.v2_up",
    }
    assert not any("decay" in name and "write" in name for name in delta)
    assert own("implicit-delta") == own("hebbian") == delta
    assert own("gated-delta") == own("decay-separate") == delta | decay
    assert own("delta-product") == delta | further
    assert own("gated-delta-product") == delta | further | decay
    assert own("titans") == delta | decay | {"write.momentum"}
    assert own("ttt-linear") == delta | {f"write.inner.{name}" for name in ("start", "scale", "shift")}


@pytest.mark.parametrize("write_range", [1, 2])
def test_strengths_start_where_the_settings_say_and_stay_in_their_range(write_range: int) -> None:
    config = MemoryConfig(rule="gated-delta-product", writes_per_token=3, write_range=write_range, write_start=0.2)  # type: ignore[arg-type]
    write, x = Write(4, 2, config), torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    fresh = write.strengths(x, None)
    torch.testing.assert_close(fresh.beta, torch.full((2, 5, 6), 0.2))
    assert fresh.log_decay is not None and fresh.log_momentum is None and fresh.real is None
    torch.testing.assert_close(fresh.log_decay.exp(), torch.tensor([0.999] * 2 + [1.0] * 4).expand(2, 5, 6))
    with torch.no_grad():
        write.weight.normal_(0, 1e3)
    wide = write.strengths(x, None).beta.detach()
    assert (float(wide.min()), float(wide.max())) == (0.0, write_range)


def test_a_momentum_starts_at_a_tenth_and_weakens_the_writes() -> None:
    strengths = Write(4, 2, MemoryConfig(rule="titans")).strengths(torch.randn(1, 3, 4), None)
    assert strengths.log_momentum is not None and strengths.real is not None
    torch.testing.assert_close(strengths.log_momentum.exp(), torch.full((1, 3, 2), 0.1))
    torch.testing.assert_close(strengths.beta, torch.full((1, 3, 2), 0.05 * 0.9**2))
    assert bool((strengths.real == 1).all())


def test_fresh_writes_of_one_token_are_one_write_of_their_joint_strength() -> None:
    """Oracle 15: their projections begin at zero, so that two of strength b are one of 1 - (1 - b)^2."""
    ids, logits = tokens(2, 40), []
    for settings in ({"rule": "delta-product", "write_start": 0.3}, {"rule": "delta", "write_start": 0.51}):
        config = MemoryConfig(layers="all", window_tokens=8, keys="token", **settings)  # type: ignore[arg-type]
        logits.append(attach_memory(tiny(), config)(ids, use_cache=False).logits)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)


def test_centring_reaches_the_keys_of_every_write() -> None:
    model, ids = with_memory(rule="delta-product"), tokens(2, 40)
    centre(model, ids)
    for index in range(3):
        shifts = [rules(model)[f"layers.{index}.memory.projection.{name}_shift"] for name in ("k", "k2")]
        assert torch.equal(*shifts)


def test_settings_refuse_what_a_rule_cannot_do() -> None:
    with pytest.raises(ValidationError, match=r"Input should be 'delta', 'implicit-delta', .* or 'ttt-linear'"):
        MemoryConfig(rule="dleta")
    for rule in ("decay-separate", "titans"):
        with pytest.raises(ValidationError, match=rf"write-range = 2: writes of rule '{rule}' are stable up to 1"):
            MemoryConfig(rule=rule, write_range=2)
    with pytest.raises(ValidationError, match=r"rank = 0: .*use rank >= 1, or writes-per-token = 1"):
        MemoryConfig(rule="delta-product", rank=0)
    with pytest.raises(ValidationError, match=r"chunk-tokens = 256: rule 'titans' decays .*; use at most 128"):
        MemoryConfig(rule="titans", chunk_tokens=256)
    assert MemoryConfig(rule="hebbian", chunk_tokens=256, write_range=2).chunk_tokens == 256
    assert MemoryConfig(rule="delta-product", rank=0, writes_per_token=1).writes == 1
    assert MemoryConfig(rule="delta", rank=0, writes_per_token=4).writes == 1
