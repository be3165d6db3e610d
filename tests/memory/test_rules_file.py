"""Rules saved and loaded: bit-equal outputs, and no silent mismatch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fednl.errors import BackboneError, CheckpointError, SettingsError
from fednl.memory import MemoryCache, MemoryConfig, attach_memory, load_rules, rules, save_rules
from memory.models import tiny, tokens, with_memory


def test_round_trip_gives_bit_equal_outputs(tmp_path: Path) -> None:
    model, ids = with_memory(), tokens(2, 30)
    expected = model(ids, use_cache=False).logits
    save_rules(model, tmp_path / "rules")
    assert torch.equal(load_rules(tiny(), tmp_path / "rules")(ids, use_cache=False).logits, expected)


def test_saved_rules_hold_no_state(tmp_path: Path) -> None:
    model = with_memory()
    model(tokens(1, 20), cache=MemoryCache(model))
    save_rules(model, tmp_path)
    assert set(load_file(tmp_path / "params.safetensors")) == set(rules(model))


def test_another_backbone_is_refused_by_name(tmp_path: Path) -> None:
    save_rules(with_memory("qwen2"), tmp_path)
    with pytest.raises(BackboneError, match=r"trained on backbone 'Qwen2ForCausalLM'.*LlamaForCausalLM.*family"):
        load_rules(tiny("llama"), tmp_path)
    with pytest.raises(BackboneError, match="fingerprint"):
        load_rules(tiny("qwen2", seed=3), tmp_path)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_d21_a_set_that_does_not_fit_changes_nothing(tmp_path: Path, change: str) -> None:
    save_rules(with_memory(), tmp_path)
    tensors = load_file(tmp_path / "params.safetensors")
    name = "layers.1.memory.gate.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unknown":
        tensors["layers.9.memory.gate.weight"] = tensors[name].clone()
    else:
        tensors[name] = tensors[name][:1].clone()
    save_file(tensors, tmp_path / "params.safetensors")
    bare = tiny()
    with pytest.raises(CheckpointError, match=r"layers\.(1|9)\.memory\.gate\.weight"):
        load_rules(bare, tmp_path)
    assert list(bare.state_dict()) == list(tiny().state_dict()) and all(p.requires_grad for p in bare.parameters())
    model = attach_memory(tiny(), MemoryConfig(layers="all", keys="token", window_tokens=8, sink_tokens=2))
    before = {n: p.detach().clone() for n, p in rules(model).items()}
    with pytest.raises(CheckpointError, match=r"layers\.(1|9)\.memory\.gate\.weight"):
        load_rules(model, tmp_path)
    assert all(torch.equal(before[n], p) for n, p in rules(model).items())


def test_other_settings_formats_and_folders_are_refused(tmp_path: Path) -> None:
    save_rules(with_memory(), tmp_path)
    with pytest.raises(CheckpointError, match=r"memory\.rank = 8, and it is 4"):
        load_rules(attach_memory(tiny(), MemoryConfig(layers="all", keys="token", rank=4)), tmp_path)
    with pytest.raises(CheckpointError, match=r"memory\.write = 'now', and it is 'leaving'"):
        load_rules(with_memory(write="leaving"), tmp_path)
    with pytest.raises(SettingsError, match="No rules in"):
        load_rules(tiny(), tmp_path / "elsewhere")
    description = json.loads((tmp_path / "rules.json").read_text())
    for damaged in ({"backbone": None}, {"memory": [1]}, {"memory": {"layers": 3}}):
        (tmp_path / "rules.json").write_text(json.dumps(description | damaged))
        with pytest.raises(CheckpointError, match=r"rules\.json.* save again"):
            load_rules(tiny(), tmp_path)
    (tmp_path / "rules.json").write_text(json.dumps(description | {"format": 2}))
    with pytest.raises(CheckpointError, match="format 2"):
        load_rules(tiny(), tmp_path)
    (tmp_path / "rules.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        load_rules(tiny(), tmp_path)


def test_layers_are_compared_by_number_and_a_window_may_differ(tmp_path: Path) -> None:
    model = with_memory(layers="0-2")
    save_rules(model, tmp_path)
    other = attach_memory(tiny(), MemoryConfig(layers="last:3", keys="token", window_tokens=16, sink_tokens=0))
    load_rules(other, tmp_path)
    assert all(torch.equal(rule, rules(model)[name]) for name, rule in rules(other).items())


def test_address_layers_are_compared_by_the_layer_they_come_to(tmp_path: Path) -> None:
    """The addresses are of no later layer than the first with memory, so that 1, 2 and 5 may be the same."""
    model, ids = with_memory(keys="context", layers="1,2", address_layer=2), tokens(1, 20)
    save_rules(model, tmp_path)
    other = load_rules(with_memory(keys="context", layers="1,2", address_layer=5, seed=0), tmp_path)
    assert torch.equal(other(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    with pytest.raises(CheckpointError, match=r"memory\.address-layer = 2, and it is 0"):
        load_rules(with_memory(keys="context", layers="1,2", address_layer=0), tmp_path)
    with pytest.raises(CheckpointError, match=r"memory\.address-rank = 0, and it is 3"):
        load_rules(with_memory(keys="context", layers="1,2", address_rank=3), tmp_path)


def test_other_keys_are_named_before_the_settings_that_go_with_them(tmp_path: Path) -> None:
    save_rules(with_memory(keys="token"), tmp_path / "token")
    save_rules(with_memory(keys="context"), tmp_path / "context")
    with pytest.raises(CheckpointError, match=r"memory\.keys = 'token', and it is 'context'"):
        load_rules(with_memory(keys="context", address_layer=0, address_rank=3), tmp_path / "token")
    with pytest.raises(CheckpointError, match=r"memory\.keys = 'context', and it is 'token'"):
        load_rules(with_memory(keys="token", feature="silu"), tmp_path / "context")
