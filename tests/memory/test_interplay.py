"""Memory beside what else people put on a model: PEFT, torch.compile, assisted decoding, quantised weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fednl.errors import BackboneError
from fednl.memory import MemoryCache, closed, detach_memory, rules, train_rules
from memory.models import remember, tiny, tokens, with_memory

OLD_NAME = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


def with_peft(model: PreTrainedModel, targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")) -> Any:
    """PEFT's own wrapper, its LoRA no longer zero."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=list(targets)))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return wrapped


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("first", ["memory", "peft"])
def test_peft_before_or_after_merged_equals_unmerged_and_both_train(first: str) -> None:
    ids = tokens(2, 20)
    if first == "memory":
        model = with_peft(with_memory())
        with pytest.raises(BackboneError, match=r"Every rule of the memory is frozen .*train_rules\(model\) after it"):
            model(input_ids=ids, labels=ids, use_cache=False)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        train_rules(model, False)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert all(rule.grad is None for rule in rules(model).values())
        model.zero_grad()
        train_rules(model)
    else:
        model = with_peft(tiny())
        remember(model)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    taught = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {id(p) for p in taught.values()} >= {id(rule) for rule in rules(model).values()}
    assert sum("lora_" in name for name in taught) == 3 * 4 * 2
    assert all(p.grad is not None and p.grad.any() for p in taught.values())
    pieces, cache = [], MemoryCache(model)
    with torch.no_grad():
        for piece in ids.split([7, 1, 12], 1):
            pieces.append(model(input_ids=piece, cache=cache).logits)
        torch.testing.assert_close(torch.cat(pieces, 1), out.logits, atol=2e-5, rtol=1e-4)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(ids, use_cache=False).logits, out.logits, atol=2e-5, rtol=1e-4)
        with closed(merged):
            assert not torch.allclose(merged(ids, use_cache=False).logits, out.logits, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_d11_a_compiled_model_gives_the_same_numbers_and_gradients() -> None:
    """torch's eager backend traces as every other does, without a compiler."""
    model, ids = with_memory("llama", layers="last:1"), tokens(2, 20)
    compiled = torch.compile(model, backend="eager")
    found = []
    for run in (model, compiled):
        model.zero_grad()
        loss = run(ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *[rule.grad for rule in rules(model).values()]])
    torch._dynamo.reset()
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_d11_a_compiled_model_goes_on_with_a_conversation() -> None:
    model, ids = with_memory("llama", layers="last:1", keys="context", conv_tokens=3), tokens(2, 20)
    compiled = torch.compile(model, backend="eager")
    found = []
    with torch.no_grad():
        for run in (model, compiled):
            cache = MemoryCache(model)
            found.append(torch.cat([run(piece, cache=cache).logits for piece in ids.split([9, 1, 10], 1)], 1))
            assert cache.seen_tokens == 20
    torch._dynamo.reset()
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["assistant_model", "prompt_lookup_num_tokens"])
def test_assisted_decoding_is_refused_with_its_reason(how: str) -> None:
    model, ids = with_memory("llama"), tokens(1, 12).repeat(1, 2)
    helper = tiny("llama", seed=4) if how == "assistant_model" else 3
    # transformers looks whether a cache can be cropped since 5.23; before, it is the cache that refuses.
    with pytest.raises((ValueError, BackboneError), match=r"[Aa]ssisted decoding (requires a cache that can|asks for)"):
        model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0, **{how: helper})


@OLD_NAME
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_both_names_of_the_cache_argument_reach_the_memory(family: str) -> None:
    model, ids = with_memory(family), tokens(1, 14)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for name in ("cache", "past_key_values"):
            cache = MemoryCache(model)
            first = model(ids[:, :9], **{name: cache})
            assert first.cache is cache
            second = model(ids[:, 9:], **{name: cache}).logits
            torch.testing.assert_close(torch.cat([first.logits, second], 1), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_embeddings_stay_as_they_are(tied: bool) -> None:
    model, ids = tiny("llama", tie_word_embeddings=tied), tokens(2, 16)
    head, embeddings = model.lm_head.weight, model.get_input_embeddings().weight
    expected = model(ids).logits
    remember(model)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert model.lm_head.weight is head and model.get_input_embeddings().weight is embeddings
    assert (head is embeddings) is tied and head.grad is None and embeddings.grad is None
    assert torch.equal(detach_memory(model)(ids).logits, expected)


def test_a_projection_that_lets_no_gradient_through_is_named() -> None:
    """What bitsandbytes' 4-bit weights become on a CPU after a pass without gradients; the rules would not learn."""
    model, ids = with_memory("llama"), tokens(2, 12)

    class Deaf(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x.detach())
            return out

    attention = model.model.layers[1].self_attn
    attention.o_proj = Deaf(attention.o_proj)
    with pytest.raises(BackboneError, match=r"Layer 1: its output projection \(Deaf\) lets no gradient through"):
        model(ids, labels=ids, use_cache=False)
    with torch.no_grad():
        model(ids, use_cache=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [8, 4])
def test_rules_train_on_a_quantised_backbone(bits: int, tmp_path: Any) -> None:
    """Needs the extra `quant`; bitsandbytes runs on a CPU too."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny("llama", hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    wanted = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=wanted, device_map={"": "cpu"})
    assert type(model.model.layers[0].self_attn.q_proj).__module__.startswith("bitsandbytes")
    remember(model)
    assert all(rule.dtype == torch.float32 for rule in rules(model).values())
    ids = tokens(2, 20)
    losses = []
    optimiser = torch.optim.AdamW(rules(model).values(), lr=1e-2)
    for _ in range(4):
        loss = model(ids, labels=ids, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        assert all(rule.grad is not None and rule.grad.any() for rule in rules(model).values())
        optimiser.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    with torch.no_grad():
        whole, cache = model(ids, use_cache=False).logits, MemoryCache(model)
        parts = torch.cat([model(piece, cache=cache).logits for piece in ids.split([7, 13], 1)], 1)
    # 8-bit products round their inputs by what else is in the pass.
    assert (parts - whole).norm() < 0.05 * whole.norm()
    if bits == 4 and model.model.layers[0].self_attn.o_proj.support_avx512bf16_for_cpu:
        with pytest.raises(BackboneError, match=r"Linear4bit\) lets no gradient through, .* call model\.train\(\)"):
            model(ids, labels=ids, use_cache=False)
