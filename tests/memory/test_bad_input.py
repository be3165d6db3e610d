"""What the memory is not made for: an error that names the layer and the cause, and never a number out of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fednl
from fednl.errors import BackboneError, NonFiniteError
from fednl.memory import MemoryCache, closed, rules
from fednl.memory.update_rules import RULES, function
from memory.models import tokens, with_memory

BAD = [float("nan"), float("inf"), -float("inf")]
BOTH = [(name, place) for name, rule in RULES.items() for place in (rule.fast, rule.reference)]
LEARNED = {"start", "scale", "shift"}
"""What an inner model has for all rows alike."""
UNBOUNDED = ("implicit-delta", "hebbian", "ttt-linear")
"""The rules that take any write strength of at least 0."""
TOKENS, AT = 20, 5


def given(name: str, tokens: int = TOKENS) -> dict[str, Tensor]:
    """A rule's arguments for two rows, in float64."""
    generator, rule = torch.Generator().manual_seed(0), RULES[name]

    def draw(*shape: int) -> Tensor:
        return torch.rand(2, *shape, generator=generator, dtype=torch.float64)

    writes = (3,) if rule.several else ()
    x = {"q": draw(tokens, 4, 4) - 0.5, "k": nn.functional.normalize(draw(tokens, *writes, 2, 4) - 0.5, dim=-1)}
    x |= {"v": draw(tokens, *writes, 2, 4), "beta": draw(tokens, *writes, 2), "state": draw(2, 4, 4)}
    if rule.decays:
        x["log_decay"] = -draw(tokens, 2)
    if rule.momentum:
        x |= {"log_momentum": -1 - draw(tokens, 2), "momentum": draw(2, 4, 4)}
    if rule.inner:
        x |= {"state": draw(2, 5, 4), "start": draw(5, 4), "scale": draw(4), "shift": draw(4)}
    return x


@pytest.mark.parametrize(("name", "place"), BOTH)
def test_no_rule_makes_a_number_out_of_nan(name: str, place: str) -> None:
    """Where one token of one row is no number, neither is what that row recalls from there on; other rows are whole."""
    for argument in given(name).keys() - LEARNED:
        wrong = given(name)[argument].clone()
        start = 0 if argument in ("state", "momentum") else AT
        wrong[0, start] = float("nan")
        out, *carried = function(place)(**{**given(name), argument: wrong})
        assert not out[0, AT, :2].isfinite().any(), argument
        if argument != "q":
            assert not out[0, -1, :2].isfinite().any(), argument
            assert not carried[0][0, 0].isfinite().any(), argument
        assert out[1].isfinite().all() and all(t[1].isfinite().all() for t in carried), argument


@pytest.mark.parametrize("bad", BAD[1:])
@pytest.mark.parametrize(("name", "place"), BOTH)
def test_no_rule_hides_infinity(name: str, place: str, bad: float) -> None:
    for argument in ("k", "v", "beta"):
        wrong = given(name)
        wrong[argument][0, AT] = bad
        if argument == "beta" and (bad < 0 or name not in UNBOUNDED):
            match = (
                "beta must be at least 0, but its least is -inf" if bad < 0 else "beta must be at most .* but is inf"
            )
            with pytest.raises(ValueError, match=match):
                function(place)(**wrong)
        else:
            out = function(place)(**wrong)[0]
            assert not out[0, -1].isfinite().any() and out[1].isfinite().all(), argument


@pytest.mark.parametrize(("name", "place"), [pair for pair in BOTH if not RULES[pair[0]].inner])
def test_zero_keys_write_nothing(name: str, place: str) -> None:
    x = given(name)
    x["k"] = torch.zeros_like(x["k"])
    x |= {n: torch.zeros_like(x[n]) for n in ("log_decay", "momentum") if n in x}
    x["k"].requires_grad_()
    out, state, *momentum = function(place)(**x)
    torch.testing.assert_close(state, x["state"], atol=1e-14, rtol=1e-14)
    assert not any(t.any() for t in momentum)
    torch.testing.assert_close(out[:, 0, :2], (x["q"][:, 0, :2].unsqueeze(-2) @ x["state"][:, :1])[..., 0, :])
    (gradient,) = torch.autograd.grad(out.sum(), [x["k"]])
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("name", "place"), BOTH)
@pytest.mark.parametrize("tokens", [TOKENS, 3])
def test_strengths_and_factors_out_of_range_are_named(name: str, place: str, tokens: int) -> None:
    x = given(name, tokens)
    for argument in ("beta", "log_decay", "log_momentum"):
        if argument in x:
            wrong = x[argument].clone()
            wrong[0, 1] = -0.5 if argument == "beta" else 0.5
            # warnings are errors here: a message must also come out where a gradient is asked for
            with pytest.raises(ValueError, match=f"{argument} must be at (least|most) 0, but its (least|largest) is"):
                function(place)(**{**x, argument: wrong.requires_grad_()})


def step(name: str, strength: float, decay: float, eta: float) -> Tensor:
    """What a write of this strength makes of what its key recalls, and of the momentum."""
    if name == "titans":
        return torch.tensor([[decay - strength, eta], [-strength, eta]])
    return torch.tensor([[decay - strength if name == "decay-separate" else decay * (1 - strength)]])


@pytest.mark.parametrize(("name", "place"), BOTH)
@pytest.mark.parametrize("tokens", [TOKENS, 3])
def test_strengths_that_let_the_state_grow_for_ever_are_refused(name: str, place: str, tokens: int) -> None:
    """A unit key written again and again multiplies what it recalls; beyond the bound by more than 1."""
    x, rule = given(name, tokens), RULES[name]
    decay = float(x["log_decay"][0, 1, 1].exp()) if rule.decays else 1.0
    eta = float(x["log_momentum"][0, 1, 1].exp()) if rule.momentum else 0.0
    bound = {"decay-separate": 1 + decay, "titans": (1 + decay) * (1 + eta)}.get(name, 1 + 1 / decay)
    token = (0, 1, 0, 1) if rule.several else (0, 1, 1)

    def written(strength: float, length: float = 1.0) -> dict[str, Tensor]:
        beta, k = x["beta"].clone(), x["k"].clone()
        beta[token], k[token] = strength / length**2, length * k[token]
        return {**x, "beta": beta, "k": k}

    if name in UNBOUNDED:
        assert function(place)(**written(1e3))[0].isfinite().all()
        return
    for strength, grows in ((0.99 * bound, False), (1.01 * bound, True)):
        assert bool((torch.linalg.eigvals(step(name, strength, decay, eta)).abs() > 1).any()) is grows
    assert function(place)(**written(0.99 * bound))[0].isfinite().all()
    assert function(place)(**written(0.99 * bound, length=0.5))[0].isfinite().all()
    message = f"beta must be at most {bound:.3g} for a key of length 1, but is {1.01 * bound:.3g}: such writes"
    wrong = written(1.01 * bound)
    wrong["beta"].requires_grad_()
    with pytest.raises(ValueError, match=message):
        function(place)(**wrong)
    if rule.several:  # the decay comes before the first write alone
        late = x["beta"].clone()
        late[0, 1, 1, 1] = 2.01
        with pytest.raises(ValueError, match=r"beta must be at most 2 for a key of length 1, but is 2\.01"):
            function(place)(**{**x, "beta": late})


def test_a_strength_of_three_is_an_error_and_no_infinite_state() -> None:
    k = nn.functional.normalize(torch.randn(1, 300, 1, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    with pytest.raises(ValueError, match="beta must be at most 2 for a key of length 1, but is 3"):
        fednl.delta_rule(k, k, k, torch.full((1, 300, 1), 3.0))
    two = torch.full((1, 300, 1), 2.0)
    assert fednl.delta_rule(k, k, k, two)[1].norm() < 1e3


@pytest.mark.parametrize("place", [RULES["titans"].fast, RULES["titans"].reference])
def test_what_stands_under_padding_is_not_looked_at(place: str) -> None:
    x = given("titans")
    x["beta"][:, 7] = 9.0
    keep = torch.ones(2, TOKENS, dtype=torch.bool)
    keep[:, 7] = False
    assert function(place)(**x, keep=keep)[0].isfinite().all()


@pytest.mark.parametrize(("name", "place"), BOTH)
def test_a_rules_arguments_on_two_devices_are_named(name: str, place: str) -> None:
    for argument in given(name).keys() - {"k"}:
        x = given(name)
        x[argument] = x[argument].to("meta")
        with pytest.raises(ValueError, match=rf"^{argument} is on device meta, but k is on cpu$"):
            function(place)(**x)


def embeddings(model: Any, length: int = 30) -> Tensor:
    return model.get_input_embeddings()(tokens(2, length)).detach().clone()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("keys", ["token", "context"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_d21_what_is_no_number_is_refused_at_the_first_layer_to_hear_it(keys: str, use_cache: bool, bad: float) -> None:
    for layers, first in (("all", 0), ("last:2", 1)):
        model = with_memory(keys=keys, layers=layers)
        embeds = embeddings(model)
        embeds[0, 5, 3] = bad
        with pytest.raises(NonFiniteError, match=rf"^Memory layer {first}: the hidden states it is given hold NaN"):
            model(inputs_embeds=embeds, use_cache=use_cache)
        with closed(model):  # the backbone alone says what it always says
            assert not model(inputs_embeds=embeds, use_cache=False).logits[0, 5:].isfinite().any()


@pytest.mark.parametrize("write", ["now", "leaving"])
@pytest.mark.parametrize("window", [8, 0])
def test_a_refused_pass_leaves_the_conversation_as_it_was(write: str, window: int) -> None:
    model = with_memory(write=write, window_tokens=window)
    embeds, cache = embeddings(model), MemoryCache(model)
    with torch.no_grad():
        model(inputs_embeds=embeds[:, :12], cache=cache)
        other = cache.clone()
        expected = model(inputs_embeds=embeds[:, 12:], cache=other).logits
        wrong = embeds[:, 12:].clone()
        wrong[1, -1] = float("nan")
        for run in (model, model.model):
            with pytest.raises(NonFiniteError, match=r"^Memory layer 0"):
                run(inputs_embeds=wrong, cache=cache)
            assert cache.seen_tokens == 12 and not cache.in_pass
            assert not any(layer.pending for layer in cache.layers)
        assert torch.equal(model(inputs_embeds=embeds[:, 12:], cache=cache).logits, expected)


def refused(model: Any, cache: MemoryCache | None, words: str, **given: Tensor) -> None:
    """One pass that fails, with its words; the conversation stays as it was."""
    before = 0 if cache is None else cache.seen_tokens
    with pytest.raises(NonFiniteError, match=words):
        model(**given, **({"use_cache": False} if cache is None else {"cache": cache}))
    if cache is not None:
        assert cache.seen_tokens == before and not cache.in_pass and not any(one.pending for one in cache.layers)


@pytest.mark.parametrize("window", [8, 0])
def test_a_closed_gate_keeps_no_state_that_is_none(window: int) -> None:
    """The memory writes although it is not heard, so that the conversation can go on after the block."""
    model = with_memory(window_tokens=window)
    embeds, cache = embeddings(model), MemoryCache(model)
    with torch.no_grad(), closed(model):
        model(inputs_embeds=embeds[:, :9], cache=cache)
        wrong = embeds[:, 9:].clone()
        wrong[0, 3, 2] = float("nan")
        refused(model, cache, r"^Memory layer 0: the hidden states it is given hold NaN", inputs_embeds=wrong)
        model(inputs_embeds=embeds[:, 9:], cache=cache)
    assert all(layer.tensors.state.isfinite().all() for layer in cache.layers)


@pytest.mark.parametrize(("layers", "window"), [("0", 8), ("0", 0), ("none", 8)])
def test_what_goes_wrong_above_the_memory_is_named_and_nothing_kept(layers: str, window: int) -> None:
    for broken in (1, 2):
        model, ids = with_memory("llama", layers=layers, window_tokens=window), tokens(2, 12)
        cache = MemoryCache(model)
        with torch.no_grad():
            model(ids, cache=cache)
            weight = model.model.layers[broken].mlp.down_proj.weight
            kept = weight.clone()
            weight[0, 0] = float("inf")
            after = "After layer 0, the last layer with memory" if layers == "0" else "In a layer of this backbone"
            after = f"^{after}: the hidden states come to NaN or infinity, so nothing was kept"
            met = r"^Layer 2: the hidden states it is given hold NaN or infinity, so nothing was written"
            refused(model, cache, met if broken == 1 else after, input_ids=ids)
            refused(model, None, after, input_ids=ids)
            refused(model.model, cache, met if broken == 1 else after, input_ids=ids)
            with closed(model):
                assert not model(ids, use_cache=False).logits.isfinite().all()
                refused(model, cache, met if broken == 1 else after, input_ids=ids)
            weight.copy_(kept)
            again = MemoryCache(model)
            model(ids, cache=again)
            assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=again).logits)


def test_a_conversation_that_is_none_is_named_without_a_memory() -> None:
    model, ids = with_memory("llama", layers="none"), tokens(2, 12)
    cache = MemoryCache(model)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.layers[1].tensors.values[0, 0, -1, 0] = float("nan")
        refused(model, cache, r"^Layer 1: what its cache holds is NaN or infinite", input_ids=ids)


def test_rules_and_caches_that_are_no_numbers_are_named_apart() -> None:
    ids = tokens(2, 12)
    model = with_memory()
    for layer, name in ((2, "write.bias"), (1, "gate.weight"), (0, "projection.v_up")):
        with torch.no_grad():
            rules(model)[f"layers.{layer}.memory.{name}"].view(-1)[0] = float("nan")
        with pytest.raises(NonFiniteError, match=f"^Memory layer {layer}: its rules hold NaN or infinity"):
            model(ids)
    model = with_memory(keys="context", layers="last:2")
    with torch.no_grad():
        rules(model)["layers.1.memory.address.scale"].fill_(float("inf"))
    with pytest.raises(NonFiniteError, match=r"^Memory layer 1: its rules hold"):
        model(ids)
    model = with_memory()
    cache = MemoryCache(model)
    with torch.no_grad():
        model(ids, cache=cache)
    cache.layers[1].tensors.state[0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"^Memory layer 1: what its cache holds is NaN or infinite"):
        model(ids, cache=cache)


def test_numbers_too_large_for_the_dtype_are_named() -> None:
    model = with_memory()
    with torch.no_grad():
        rules(model)["layers.1.memory.projection.v_up"].fill_(1e38)
    with pytest.raises(NonFiniteError, match=r"^Memory layer 1: attention and memory come to NaN or infinity although"):
        model(tokens(1, 12))


def test_under_checkpointing_it_is_an_error_too() -> None:
    model = with_memory().train()
    model.activation_checkpointing_enable()
    embeds = embeddings(model)
    embeds[0, 5] = float("nan")
    with pytest.raises(NonFiniteError, match=r"^Memory layer 0"):
        model(inputs_embeds=embeds.requires_grad_(), use_cache=False)


def test_a_model_whose_keys_are_all_zero_writes_nothing() -> None:
    """Inputs of zero have keys of zero in a family without biases."""
    model = with_memory("llama", feature="linear")
    with torch.no_grad():
        for name, rule in rules(model).items():
            if name.endswith("k_shift"):
                rule.zero_()
    cache, embeds = MemoryCache(model), torch.zeros(2, 20, 32, requires_grad=True)
    logits = model(inputs_embeds=embeds, cache=cache).logits
    assert logits.isfinite().all() and not any(layer.tensors.state.any() for layer in cache.layers)
    gradients = torch.autograd.grad(logits.square().sum() + logits.sum(), [embeds, *rules(model).values()])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_d21_masks_that_say_something_else_are_refused() -> None:
    model, ids = with_memory(), tokens(2, 12)
    for shape in ([2, 5], [2, 1, 12, 12], [3, 12], [12]):
        with pytest.raises(
            BackboneError, match=r"attention_mask has shape .*memory needs \[batch, tokens\] = \[2, 12\]"
        ):
            model(ids, attention_mask=torch.ones(shape))
    added = torch.zeros(2, 12)
    added[:, :3] = -float("inf")
    for mask in (torch.full((2, 12), float("nan")), added, torch.full((2, 12), 0.5)):
        with pytest.raises(BackboneError, match="attention_mask holds numbers other than 0"):
            model(ids, attention_mask=mask)
    documents = torch.tensor([[1] * 6 + [2] * 6] * 2)  # as some packers number them; each is to see itself only
    for dtype in (torch.int64, torch.uint8):
        with pytest.raises(BackboneError, match=r"numbers other than 0 .*which document a token is of by doc_ids"):
            model(ids, attention_mask=documents.to(dtype), use_cache=False)
    keep = torch.ones(2, 12, dtype=torch.long)
    keep[0, :3] = 0
    expected = model(ids, attention_mask=keep, use_cache=False).logits
    assert torch.equal(model(ids, attention_mask=keep.bool(), use_cache=False).logits, expected)
    assert torch.equal(model(ids, attention_mask=keep.float(), use_cache=False).logits, expected)


def test_a_cache_of_another_model_or_window_is_refused() -> None:
    model, ids = with_memory(), tokens(2, 12)
    for other in (with_memory(), with_memory(window_tokens=9), with_memory("llama")):
        with pytest.raises(BackboneError, match="made for another model or another attachment"):
            model(ids, cache=MemoryCache(other))


def test_what_lies_on_another_device_is_named() -> None:
    model, ids = with_memory(), tokens(2, 12)
    for field, words in (("keys", "cached keys are"), ("state", "memory state is")):
        cache = MemoryCache(model)
        model(ids, cache=cache)
        held = vars(cache.layers[1].tensors)
        cache.layers[1].set(type(cache.layers[1].tensors)(**{**held, field: held[field].to("meta")}))
        with pytest.raises(BackboneError, match=rf"^Layer 1: its {words} on device meta but its input on cpu"):
            model(ids, cache=cache)
    cache = MemoryCache(model)
    model(ids, cache=cache)
    cache.counts = cache.counts.to("meta")
    with pytest.raises(BackboneError, match="The cache is on device meta but the input on cpu"):
        model(ids, cache=cache)
    model.model.layers[1].self_attn.memory.to("meta")
    with pytest.raises(BackboneError, match=r"^Layer 1: its rules are on device meta but its input on cpu"):
        model(ids)
