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
    mean_outputs,
)
from fednl.models.lora import attach_lora, lora_params
from fednl.models.settings import ContextVectorSettings, LoraSettings

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
