from __future__ import annotations

from typing import Any

import pytest
import torch

import fednl.models
from fednl.errors import BackboneError, CheckpointError
from fednl.memory import MemoryConfig
from fednl.models.adapters import ADAPTERS
from fednl.models.context_vectors import VECTORS
from fednl.models.settings import ContextVectorSettings, LoraSettings

SETTINGS: dict[str, Any] = {
    "memory": MemoryConfig(layers="all", window_tokens=8, sink_tokens=2, rank=2),
    "lora": LoraSettings(rank=2),
    "context-vectors": ContextVectorSettings(),
}
KINDS = pytest.mark.parametrize("kind", sorted(ADAPTERS))


def _noise(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return {name: torch.randn(p.shape, generator=random) * 0.3 for name, p in params.items()}


def test_every_adapter_is_registered_and_has_settings_here() -> None:
    assert fednl.models.ADAPTERS is ADAPTERS
    assert sorted(ADAPTERS) == sorted(SETTINGS)
    assert all(ADAPTERS[kind].kind == kind for kind in ADAPTERS)


@KINDS
def test_what_is_set_is_what_is_got_and_what_the_model_computes_with(tiny: Any, ids: Any, kind: str) -> None:
    first, second = ADAPTERS[kind](), ADAPTERS[kind]()
    model, other = tiny(), tiny()
    assert first.attach(model, SETTINGS[kind], 0) is model
    second.attach(other, SETTINGS[kind], 1)
    values = _noise(first.get())
    plain = model(ids).logits
    first.set(values)
    second.set(first.get())
    assert list(second.get()) == first.names()
    assert all(torch.equal(value, values[name]) for name, value in second.get().items())
    assert torch.equal(model(ids).logits, other(ids).logits)
    assert not torch.equal(model(ids).logits, plain)


@KINDS
def test_attaching_is_seeded(tiny: Any, kind: str) -> None:
    def start(seed: int) -> dict[str, torch.Tensor]:
        adapter = ADAPTERS[kind]()
        adapter.attach(tiny(), SETTINGS[kind], seed)
        return adapter.get()

    first, again, other = start(0), start(0), start(1)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    drawn = any(not torch.equal(value, other[name]) for name, value in first.items())
    assert drawn or kind == "context-vectors"  # these begin at stated values


@KINDS
def test_values_got_are_copies_and_parameters_are_live(tiny: Any, kind: str) -> None:
    adapter = ADAPTERS[kind]()
    adapter.attach(tiny(), SETTINGS[kind], 0)
    before = adapter.get()
    for value in adapter.get().values():
        value.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in adapter.get().items())
    with torch.no_grad():
        for parameter in adapter.parameters().values():
            parameter.add_(1)
    assert all(torch.equal(value, before[name] + 1) for name, value in adapter.get().items())
    assert all(p.is_leaf and p.requires_grad == (name != VECTORS) for name, p in adapter.parameters().items())


@KINDS
def test_values_that_do_not_fit_change_nothing(tiny: Any, kind: str) -> None:
    adapter = ADAPTERS[kind]()
    adapter.attach(tiny(), SETTINGS[kind], 0)
    before, values = adapter.get(), _noise(adapter.get())
    name = adapter.names()[-1]
    missing = {key: value for key, value in values.items() if key != name}
    for wrong in (missing, {**values, "x." + name: values[name]}, {**values, name: torch.zeros(3, 3, 3)}):
        with pytest.raises(CheckpointError):
            adapter.set(wrong)
    assert all(torch.equal(value, before[key]) for key, value in adapter.get().items())


@KINDS
def test_values_in_another_precision_leave_the_parameters_float32(tiny: Any, kind: str) -> None:
    adapter = ADAPTERS[kind]()
    adapter.attach(tiny(dtype=torch.bfloat16), SETTINGS[kind], 0)
    values = {name: value.bfloat16() for name, value in _noise(adapter.get()).items()}
    adapter.set(values)
    for name, parameter in adapter.parameters().items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, values[name].float())


@KINDS
def test_detaching_gives_the_model_back_bit_for_bit(tiny: Any, ids: Any, kind: str) -> None:
    model, adapter = tiny(), ADAPTERS[kind]()
    before = model(ids).logits
    adapter.attach(model, SETTINGS[kind], 0)
    adapter.set(_noise(adapter.get()))
    assert adapter.detach() is model
    assert torch.equal(model(ids).logits, before)
    with pytest.raises(BackboneError, match=f"{kind} adapter is not attached"):
        adapter.get()
    adapter.attach(model, SETTINGS[kind], 0)


@pytest.mark.parametrize("order", [("memory", "lora"), ("lora", "memory")])
@pytest.mark.parametrize("leaving", ["memory", "lora"])
def test_two_kinds_on_one_model_train_together_and_leave_in_any_order(
    tiny: Any, ids: Any, order: tuple[str, str], leaving: str
) -> None:
    model = tiny()
    before = model(ids).logits
    adapters = {kind: ADAPTERS[kind]() for kind in order}
    for kind in order:
        adapters[kind].attach(model, SETTINGS[kind], 0)
    names = [name for adapter in adapters.values() for name in adapter.names()]
    assert len(set(names)) == len(names)
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert trainable == {id(p) for adapter in adapters.values() for p in adapter.parameters().values()}
    for adapter in adapters.values():
        adapter.set(_noise(adapter.get()))
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for adapter in adapters.values() for p in adapter.parameters().values())

    staying = next(kind for kind in order if kind != leaving)
    values = adapters[staying].get()
    alone = ADAPTERS[staying]()
    reference = alone.attach(tiny(), SETTINGS[staying], 0)
    alone.set(values)
    adapters[leaving].detach()
    assert torch.equal(model(ids).logits, reference(ids).logits)
    assert all(p.requires_grad for p in adapters[staying].parameters().values())
    adapters[staying].detach()
    assert torch.equal(model(ids).logits, before)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("order", [("memory", "lora"), ("lora", "memory")])
@pytest.mark.parametrize("leaving", ["memory", "lora"])
def test_the_backbone_trains_again_when_the_last_kind_has_left(tiny: Any, order: tuple[str, str], leaving: str) -> None:
    model = tiny().requires_grad_(True)
    adapters = {kind: ADAPTERS[kind]() for kind in order}
    for kind in order:
        adapters[kind].attach(model, SETTINGS[kind], 0)
    adapters.pop(leaving).detach()
    (staying,) = adapters.values()
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in staying.parameters().values()}
    staying.detach()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_both_orders_compute_the_same(tiny: Any, ids: Any) -> None:
    logits = []
    for order in (("memory", "lora"), ("lora", "memory")):
        model = tiny()
        for kind in order:
            adapter = ADAPTERS[kind]()
            adapter.attach(model, SETTINGS[kind], 0)
            adapter.set(_noise(adapter.get()))
        logits.append(model(ids).logits)
    assert torch.equal(*logits)
