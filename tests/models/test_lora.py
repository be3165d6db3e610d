from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from fednl.errors import BackboneError, CheckpointError, SettingsError
from fednl.memory import MemoryConfig, attach_memory, detach_memory, rules
from fednl.models.lora import attach_lora, detach_lora, has_lora, lora_params, set_lora
from fednl.models.settings import LoraSettings

R4 = LoraSettings(rank=4)
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _randomise(model: Any, seed: int = 5) -> None:
    """Gives A and B values that matter."""
    random = torch.Generator().manual_seed(seed)
    set_lora(
        model,
        {name: torch.randn(p.shape, generator=random) * 0.1 for name, p in lora_params(model).items()},
    )


def _merged(model: Any, params: dict[str, torch.Tensor], scale: float) -> Any:
    """The bare model with `W + scale B A` written into it, by plain arithmetic."""
    merged = copy.deepcopy(model)
    for index, block in enumerate(merged.model.layers):
        for module in MODULES:
            parent = block.mlp if hasattr(block.mlp, module) else block.self_attn
            a, b = (params.get(f"layers.{index}.{module}.lora_{factor}") for factor in "AB")
            if a is not None and b is not None:
                weight = getattr(parent, module).weight
                weight.add_((scale * b.double() @ a.double()).to(weight.dtype))
    return merged


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_model_object_stays_and_b_at_zero_changes_no_bit(tiny: Any, ids: Any, family: str) -> None:
    model = tiny(family)
    before = model(ids).logits
    generated = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert attach_lora(model, R4, seed=0) is model
    assert type(model) is type(tiny(family))
    assert torch.equal(model(ids).logits, before)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), generated)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_detaching_gives_the_bare_model_bit_for_bit(tiny: Any, ids: Any, family: str) -> None:
    model = tiny(family)
    names = [name for name, _ in model.named_parameters()]
    modules = {name: type(module) for name, module in model.named_modules()}
    before = model(ids).logits
    attach_lora(model, R4, seed=0)
    _randomise(model)
    assert not torch.equal(model(ids).logits, before)
    assert detach_lora(model) is model
    assert torch.equal(model(ids).logits, before)
    assert [name for name, _ in model.named_parameters()] == names
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not has_lora(model)
    assert not hasattr(model, "peft_config")
    attach_lora(model, R4, seed=0)


def test_names_are_canonical_and_shapes_are_those_of_the_projections(tiny: Any) -> None:
    model = tiny("qwen2")
    attach_lora(model, R4, seed=0)
    params = lora_params(model)
    expected = [f"layers.{i}.{m}.lora_{f}" for i in range(2) for m in MODULES for f in "AB"]
    assert list(params) == expected
    assert params["layers.1.k_proj.lora_A"].shape == (4, 32)
    assert params["layers.1.k_proj.lora_B"].shape == (16, 4)
    assert params["layers.0.down_proj.lora_A"].shape == (4, 48)
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in params.values()}


@pytest.mark.parametrize("targets", ["q_proj,v_proj", "all-linear"])
@pytest.mark.parametrize("alpha", [None, 3.0])
def test_unmerged_equals_merged(tiny: Any, ids: Any, targets: str, alpha: float | None) -> None:
    model = tiny("qwen2", dtype=torch.float64)
    bare = copy.deepcopy(model)
    attach_lora(model, LoraSettings(rank=4, alpha=alpha, targets=targets), seed=0)
    _randomise(model)
    scale = (8.0 if alpha is None else alpha) / 4
    merged = _merged(bare, {name: p.detach() for name, p in lora_params(model).items()}, scale)
    shift = (merged(ids).logits - bare(ids).logits).abs().max()
    assert shift > 1e-2
    torch.testing.assert_close(model(ids).logits, merged(ids).logits, rtol=1e-10, atol=1e-10)


def test_the_start_depends_on_the_seed_alone(tiny: Any) -> None:
    def start(seed: int, noise: int) -> dict[str, torch.Tensor]:
        model = tiny("llama")
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        attach_lora(model, R4, seed)
        assert torch.equal(torch.get_rng_state(), before)
        return lora_params(model)  # type: ignore[return-value]

    first, second, other = start(0, 1), start(0, 2), start(1, 1)
    for name, value in first.items():
        assert torch.equal(value, second[name])
        if name.endswith("B"):
            assert not value.any()
        else:
            assert not torch.equal(value, other[name])
            assert value.abs().max() <= 1 / math.sqrt(value.shape[1])
            assert value.std() > 0.4 / math.sqrt(value.shape[1])
    assert not torch.equal(first["layers.0.q_proj.lora_A"], first["layers.1.q_proj.lora_A"])


def test_one_tensor_starts_the_same_whatever_else_is_targeted(tiny: Any) -> None:
    few, all_of_them = tiny("llama"), tiny("llama")
    attach_lora(few, LoraSettings(rank=4, targets="v_proj"), seed=7)
    attach_lora(all_of_them, R4, seed=7)
    name = "layers.1.v_proj.lora_A"
    assert torch.equal(lora_params(few)[name], lora_params(all_of_them)[name])


def test_b01_keys_are_compared_exactly(tiny: Any) -> None:
    model = tiny("llama")
    attach_lora(model, R4, seed=0)
    values = {name: torch.ones_like(p) for name, p in lora_params(model).items()}
    first = "layers.0.q_proj.lora_A"
    before = lora_params(model)[first].detach().clone()
    wrapped = {f"base_model.model.{name}": value for name, value in values.items()}
    missing = {name: value for name, value in values.items() if name != first}
    unexpected = {**values, "layers.2.q_proj.lora_A": torch.ones(4, 32)}
    shape = {**values, first: torch.ones(8, 32)}
    for wrong in (wrapped, missing, unexpected, shape, {}):
        with pytest.raises(CheckpointError, match="layers"):
            set_lora(model, wrong)
    assert torch.equal(lora_params(model)[first], before)
    set_lora(model, values)
    assert bool((lora_params(model)[first] == 1).all())


def test_b02_rules_that_are_there_keep_training(tiny: Any, ids: Any) -> None:
    model = tiny("qwen2")
    attach_memory(model, MemoryConfig(layers="all", window_tokens=8, sink_tokens=2))
    attach_lora(model, R4, seed=0)
    everything = {**rules(model), **lora_params(model)}
    assert all(p.requires_grad for p in everything.values())
    assert sum(p.requires_grad for p in model.parameters()) == len(everything)
    _randomise(model)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in everything.values())
    assert rules(model)["layers.0.memory.gate.weight"].grad.any()  # type: ignore[union-attr]


def test_b02_memory_sees_the_lora_that_came_after_it(tiny: Any, ids: Any) -> None:
    memory = MemoryConfig(layers="all", window_tokens=8, sink_tokens=2)
    model = tiny("qwen2", dtype=torch.float64)
    bare = copy.deepcopy(model)
    attach_memory(model, memory)
    model(ids)
    attach_lora(model, R4, seed=0)
    _randomise(model)
    merged = _merged(bare, {name: p.detach() for name, p in lora_params(model).items()}, 2.0)
    attach_memory(merged, memory)
    torch.testing.assert_close(model(ids).logits, merged(ids).logits, rtol=1e-8, atol=1e-8)
    detach_lora(model)
    attach_memory(bare, memory)
    assert torch.equal(model(ids).logits, bare(ids).logits)
    detach_memory(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_b08_updates_are_float32_on_a_bfloat16_backbone(tiny: Any, ids: Any) -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    before = model(ids).logits
    attach_lora(model, R4, seed=0)
    params = lora_params(model)
    assert {p.dtype for p in params.values()} == {torch.float32}
    assert torch.equal(model(ids).logits, before)
    set_lora(model, {name: p.detach().bfloat16() for name, p in params.items()})
    assert {p.dtype for p in lora_params(model).values()} == {torch.float32}
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in params.values())
    assert any(bool(p.grad.any()) for p in params.values())
    assert {p.dtype for name, p in model.named_parameters() if "lora" not in name} == {torch.bfloat16}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_b09_tied_head_and_embeddings_are_refused(tiny: Any, target: str) -> None:
    model = tiny("qwen2")
    with pytest.raises(SettingsError, match=f"lora.targets names '{target}'"):
        attach_lora(model, LoraSettings(rank=4, targets=f"q_proj,{target}"), seed=0)
    assert not has_lora(model)


def test_b09_head_and_embeddings_stay_tied_and_untouched(tiny: Any, ids: Any) -> None:
    model = tiny("qwen2")
    embeddings = model.get_input_embeddings().weight
    before = embeddings.clone()
    attach_lora(model, R4, seed=0)
    optimiser = torch.optim.AdamW(lora_params(model).values(), lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimiser.step()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight is embeddings
    assert torch.equal(embeddings, before)


def test_b12_gradient_checkpointing_gives_every_factor_its_gradient(tiny: Any, ids: Any) -> None:
    model = tiny("qwen2")
    attach_lora(model, R4, seed=0)
    _randomise(model)
    params = lora_params(model)
    plain = torch.autograd.grad(model(ids, labels=ids).loss, list(params.values()))
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.train()
    runs: list[str] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append("mlp"))
    again = torch.autograd.grad(model(ids, labels=ids, use_cache=False).loss, list(params.values()))
    assert len(runs) == 2
    for expected, found in zip(plain, again, strict=True):
        assert expected.any()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("piece", [1, 7])
def test_b19_a_layers_update_is_computed_once_a_forward_also_under_the_memory(tiny: Any, ids: Any, piece: int) -> None:
    model = tiny("llama")
    attach_memory(model, MemoryConfig(layers="last:1", rank=2, window_tokens=4, chunk_tokens=piece))
    attach_lora(model, R4, seed=0)
    calls: list[str] = []
    for name, module in model.named_modules():
        if "lora_" in name and isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    model(ids, use_cache=False)
    assert sorted(calls) == sorted(set(calls)) and len(calls) == len(lora_params(model))


def test_a_target_that_is_not_there_is_an_argument_error_that_names_what_is(tiny: Any) -> None:
    with pytest.raises(SettingsError, match=r"have no c_attn; choose among down_proj, .*v_proj"):
        attach_lora(tiny("llama"), LoraSettings(rank=4, targets="q_proj,c_attn"), seed=0)


def test_rank_zero_and_a_second_lora_are_refused(tiny: Any) -> None:
    model = tiny("llama")
    with pytest.raises(SettingsError, match=r"lora\.rank = 0"):
        attach_lora(model, LoraSettings(), seed=0)
    attach_lora(model, R4, seed=0)
    with pytest.raises(BackboneError, match="already"):
        attach_lora(model, R4, seed=0)


@pytest.mark.parametrize("call", [lora_params, detach_lora])
def test_a_model_without_lora_is_told_so(tiny: Any, call: Any) -> None:
    with pytest.raises(BackboneError, match="attach_lora"):
        call(tiny("llama"))
