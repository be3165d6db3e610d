"""Context vectors: exact where nothing is injected, the right numbers where something is, gone when detached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from context_models import PLAIN, build, by_hand, filled, logits
from torch import Tensor

from fednl.errors import BackboneError, NonFiniteError
from fednl.memory import MemoryConfig, attach_memory, detach_memory, rules
from fednl.models.adapters import ContextVectorsAdapter
from fednl.models.context_injection import COEFFICIENTS, MODULES, VECTORS, find_modules
from fednl.models.context_vectors import (
    attach_context,
    context_of,
    context_params,
    detach_context,
    mean_outputs,
    read_outputs,
)
from fednl.models.lora import attach_lora, detach_lora
from fednl.models.settings import ContextVectorSettings, LoraSettings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lambda_0_and_beta_1_is_the_plain_model_bit_for_bit(layout: str, dtype: torch.dtype, tokens: Tensor) -> None:
    model = build(layout, dtype)
    plain = logits(model, tokens)
    attach_context(model, PLAIN)
    context_of(model).vectors.data.normal_()
    assert torch.equal(logits(model, tokens), plain)


def test_zero_vectors_inject_nothing_whatever_lambda(layout: str, tokens: Tensor) -> None:
    model = build(layout, torch.float32)
    plain = logits(model, tokens)
    attach_context(model, ContextVectorSettings())
    assert torch.equal(logits(model, tokens), plain)


def test_detached_the_model_is_as_it_was(layout: str, tokens: Tensor) -> None:
    model = build(layout, torch.float32)
    plain, names = logits(model, tokens), set(model.state_dict())
    before = {id(p) for p in model.parameters() if p.requires_grad}
    filled(model)
    assert not torch.equal(logits(model, tokens), plain)
    assert set(model.state_dict()) == names
    assert not any(parameter.requires_grad for parameter in model.parameters())
    detach_context(model)
    assert torch.equal(logits(model, tokens), plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert {id(p) for p in model.parameters() if p.requires_grad} == before
    with pytest.raises(BackboneError, match="no context vectors are attached"):
        context_of(model)


def test_e01_tuple_or_tensor_injection_is_beta_times_output_plus_lambda_times_vector(
    layout: str, tokens: Tensor
) -> None:
    """The specification: each module's forward wrapped by hand, one after the other."""
    model = filled(build(layout))
    expected = logits(model, tokens)
    coefficients, vectors = (t.detach().clone() for t in context_params(model).values())
    detach_context(model)
    with by_hand(model, coefficients, vectors):
        assert torch.equal(logits(model, tokens), expected)


def test_only_the_coefficients_get_gradients_and_they_are_finite_differences(layout: str, tokens: Tensor) -> None:
    model = filled(build(layout))

    def loss() -> Tensor:
        out = model(input_ids=tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(out[:, -1], tokens[:, 0])

    coefficients = context_of(model).coefficients
    loss().backward()
    assert coefficients.numel() == 4 * 2
    assert all(parameter.grad is None for parameter in model.parameters())
    assert context_of(model).vectors.grad is None
    numbers = torch.zeros_like(coefficients)
    step = 1e-3  # norms compute in float32, whatever the model's precision
    with torch.no_grad():
        for index in range(coefficients.numel()):
            flat = coefficients.view(-1)
            flat[index] += step
            up = loss()
            flat[index] -= 2 * step
            numbers.view(-1)[index] = (up - loss()) / (2 * step)
            flat[index] += step
    assert torch.allclose(coefficients.grad, numbers, rtol=1e-3, atol=3e-4)


def test_neither_batch_nor_padding_side_changes_an_answer(layout: str, tokens: Tensor) -> None:
    model = filled(
        build(layout, torch.float32)
    )  # in float64 transformers' eager attention gives NaN under left padding
    short = tokens[:1, :5]
    alone = logits(model, short)[0, -1]
    right = torch.cat([short, torch.zeros(1, 4, dtype=torch.int64)], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 4, [1] * 9])
    batched = logits(model, torch.cat([right, tokens[1:2]]), mask)
    assert torch.allclose(batched[0, 4], alone, atol=1e-5)
    left = torch.cat([torch.zeros(1, 4, dtype=torch.int64), short], dim=1)
    positions = torch.tensor([[0, 0, 0, 0, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        padded = model(input_ids=left, attention_mask=mask[:1].flip(1), position_ids=positions, use_cache=False).logits
    assert torch.allclose(padded[0, -1], alone, atol=1e-5)


def test_e05_every_hook_fires_exactly_once_a_forward_and_otherwise_is_told(layout: str, tokens: Tensor) -> None:
    """E05: a module that is passed over, or runs twice, is an error and not a weaker method."""
    model = filled(build(layout))
    for _ in range(2):
        logits(model, tokens)
        assert context_of(model)._fired == [1] * (2 * len(MODULES))
    mlp = find_modules(model)[1][1]
    plain = mlp.forward
    mlp.forward = lambda *args: mlp(*args) if once.append(1) or len(once) == 1 else plain(*args)  # type: ignore[func-returns-value]
    once: list[int] = []
    with pytest.raises(BackboneError, match="the mlp of layer 1 ran 2 times in one pass"):
        logits(model, tokens)


def test_what_is_read_is_the_modules_own_output_at_the_position_of_each_row(layout: str, tokens: Tensor) -> None:
    model = build(layout)
    seen: list[Tensor] = []
    handles = [
        part.register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
        for parts in find_modules(model)
        for part in parts
    ]
    logits(model, tokens)
    for handle in handles:
        handle.remove()
    filled(model)  # what is injected elsewhere plays no part in reading
    positions = torch.tensor([8, 3, 5])
    found = read_outputs(model, batch_of(tokens, positions))
    assert found.shape == (3, 2, 2, 32)
    expected = torch.stack([out[torch.arange(3), positions] for out in seen], dim=1).unflatten(1, (2, 2))
    assert torch.allclose(found, expected, atol=1e-12)


def batch_of(tokens: Tensor, positions: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    mask = torch.ones_like(tokens) if mask is None else mask
    return {"input_ids": tokens, "attention_mask": mask, "positions": positions}


def test_an_example_reads_the_same_alone_and_in_a_padded_batch(layout: str, tokens: Tensor) -> None:
    model = build(layout)
    attach_context(model, PLAIN)
    alone = read_outputs(model, batch_of(tokens[:1, :6], torch.tensor([5])))
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    together = read_outputs(
        model, batch_of(tokens.where(mask > 0, torch.zeros_like(tokens)), torch.tensor([5, 8, 8]), mask)
    )
    assert torch.allclose(together[0], alone[0], atol=1e-12)


def test_the_mean_over_batches_is_the_mean_over_examples_and_clipping_bounds_each(
    tiny: Callable[..., Any], tokens: Tensor
) -> None:
    model = attach_context(tiny("llama", dtype=torch.float64), PLAIN)
    where = {"last": torch.tensor([4, 5, 6]), "label": torch.tensor([7, 7, 7]), "separator": torch.tensor([8, 8, 8])}
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **where}
    pieces = [{name: t[:1] for name, t in batch.items()}, {name: t[1:] for name, t in batch.items()}]
    noise = torch.Generator().manual_seed(0)
    for position in ("last", "label", "separator"):
        settings = ContextVectorSettings(position=position)
        each = read_outputs(model, {**batch, "positions": where[position]})
        assert torch.allclose(mean_outputs(model, pieces, settings, noise), each.mean(0), atol=1e-12)
    lengths = each.flatten(1).norm(dim=1)
    limit = float(lengths.sort().values[1])
    clipped = read_outputs(model, {**batch, "positions": where["separator"]}, limit)
    assert torch.allclose(clipped.flatten(1).norm(dim=1), lengths.clamp(max=limit))
    noisy = ContextVectorSettings(noise_std=0.5)
    first, again = (mean_outputs(model, pieces, noisy, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, again)
    assert float((first - each.mean(0)).std()) == pytest.approx(0.5, rel=0.25)


def test_activations_that_are_not_finite_are_told_by_layer(tiny: Callable[..., Any], tokens: Tensor) -> None:
    model = tiny("llama")
    attach_context(model, PLAIN)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="layer 1 of the backbone gives NaN or infinity"):
        read_outputs(model, batch_of(tokens, torch.tensor([8, 8, 8])))


def test_an_unknown_layout_is_refused_and_left_alone() -> None:
    with pytest.raises(BackboneError, match="the layers of Linear have no attention and MLP"):
        find_modules(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("order", [("context", "memory", "lora"), ("lora", "memory", "context")])
def test_it_goes_beside_memory_and_lora_in_any_order(
    order: tuple[str, ...], tiny: Callable[..., Any], tokens: Tensor
) -> None:
    """Each stays trainable beside the others, and comes off in any order without a trace."""
    model = tiny("llama").requires_grad_(True)
    plain = logits(model, tokens)
    attach = {
        "context": lambda: attach_context(model, ContextVectorSettings()),
        "memory": lambda: attach_memory(model, MemoryConfig(layers="all", window_tokens=0)),
        "lora": lambda: attach_lora(model, LoraSettings(rank=2, targets="q_proj"), 0),
    }
    detach = {
        "context": lambda: detach_context(model),
        "memory": lambda: detach_memory(model),
        "lora": lambda: detach_lora(model),
    }
    for name in order:
        attach[name]()
    assert all(rule.requires_grad for rule in rules(model).values())
    assert context_of(model).coefficients.requires_grad
    own = {id(p) for p in rules(model).values()}
    backbone = [p for n, p in model.named_parameters() if "lora" not in n and id(p) not in own]
    assert not any(parameter.requires_grad for parameter in backbone)
    for name in order:
        detach[name]()
    assert torch.equal(logits(model, tokens), plain)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_adapter_has_stable_names_and_sizes(tiny: Callable[..., Any]) -> None:
    adapter = ContextVectorsAdapter()
    adapter.attach(tiny("llama"), ContextVectorSettings(), 0)
    assert {name: tuple(t.shape) for name, t in adapter.get().items()} == {COEFFICIENTS: (2, 2, 2), VECTORS: (2, 2, 32)}
    start = adapter.get()[COEFFICIENTS]
    assert torch.equal(start[..., 0], torch.full((2, 2), 0.1)) and torch.equal(start[..., 1], torch.ones(2, 2))
    adapter.detach()
    with pytest.raises(BackboneError, match="context-vectors adapter is not attached"):
        adapter.names()
