"""Context vectors on the real SmolLM2: exact where nothing is injected, the published sizes, gradients throughout."""

from __future__ import annotations

import pytest
import torch

from fednl.models import BackboneSettings, load_backbone
from fednl.models.context_injection import COEFFICIENTS, VECTORS
from fednl.models.context_vectors import (
    attach_context,
    context_of,
    context_params,
    detach_context,
    keep_prompts,
    mean_outputs,
)
from fednl.models.lora import attach_lora, lora_params
from fednl.models.settings import ContextVectorSettings, LoraSettings
from fednl.problem import IGNORED, answer_nats

pytestmark = pytest.mark.real


def test_on_the_real_model() -> None:
    backbone = load_backbone(BackboneSettings(id="smollm2-135m"))
    model, tokenizer = backbone.model, backbone.tokenizer
    texts = ["Text: Shares rose after the bank's results.\nCategory:", "Text: The striker scored twice.\nCategory:"]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        attach_context(model, ContextVectorSettings(start_lambda=0.0))
        where = {"separator": mask.sum(1) - 1}
        vectors = mean_outputs(
            model, [{"input_ids": ids, "attention_mask": mask, **where}], ContextVectorSettings(), torch.Generator()
        )
        context_of(model).vectors.copy_(vectors)
        assert torch.equal(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, plain)
    params = context_params(model)
    assert params[COEFFICIENTS].numel() * 4 == 480
    assert params[VECTORS].numel() == 34_560
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[0, -1:], torch.tensor([tokenizer.encode(" business")[0]])).backward()
    gradient = params[COEFFICIENTS].grad
    assert gradient is not None and bool((gradient.abs() > 0).all())
    assert all(parameter.grad is None for parameter in model.parameters())
    detach_context(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, plain)
    attach_lora(model, LoraSettings(rank=8, targets="q_proj,v_proj"), 0)
    assert sum(parameter.numel() for parameter in lora_params(model).values()) == 460_800


def test_on_the_real_model_the_answers_alone_give_the_loss_and_gradient_of_whole_texts() -> None:
    backbone = load_backbone(BackboneSettings(id="smollm2-135m"))
    model, tokenizer = backbone.model, backbone.tokenizer
    texts = ["Text: Shares rose after the bank's results.\nCategory: business", "Text: He scored.\nCategory: sport"]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    rows, ends = torch.arange(2), batch["attention_mask"].sum(1) - 1
    labels = torch.full_like(batch["input_ids"], IGNORED)
    labels[rows, ends] = batch["input_ids"][rows, ends]
    settings = ContextVectorSettings(inject="answer")
    attach_context(model, settings)
    torch.nn.init.normal_(context_of(model).vectors, std=0.1, generator=torch.Generator().manual_seed(0))
    found = []
    for keeps in (False, True, True):
        if keeps and context_of(model).prompts is None:
            keep_prompts(model, settings)
        loss = answer_nats(model, {**batch, "labels": labels})
        found.append((loss.detach(), *torch.autograd.grad(loss, [context_of(model).coefficients])))
    prompts = context_of(model).prompts
    assert prompts is not None and prompts.computed == 2
    for loss, gradient in found[1:]:
        assert torch.allclose(loss, found[0][0], atol=1e-4)
        assert torch.allclose(gradient, found[0][1], rtol=1e-2, atol=1e-4)
