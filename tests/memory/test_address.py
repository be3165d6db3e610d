"""Addresses, against the loop that defines them; and what they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fednl.errors import BackboneError
from fednl.memory import MemoryCache, MemoryConfig, attach_memory, detach_memory, rules
from fednl.memory.address import Addresses
from fednl.memory.centre import centre
from fednl.memory.operator import delta_rule
from fednl.memory.sites import attachment
from memory.models import tiny, tokens, with_memory


def addresses(hidden: int = 16, heads: int = 2, dim: int = 8, rank: int = 5, seed: int = 0) -> Addresses:
    """Addresses whose every rule matters."""
    generator = torch.Generator().manual_seed(seed)
    made = Addresses(hidden, heads, dim, rank, generator)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made.double()


def loop(
    rule: Addresses, source: torch.Tensor, keep: torch.Tensor | None, carry: torch.Tensor | None
) -> list[torch.Tensor]:
    """The docstring's formula, one token and one head at a time."""
    batch, count, _ = source.shape
    dim = 8
    c = torch.zeros(batch, rule.kv_heads, dim, dtype=source.dtype) if carry is None else carry
    queries, keys = [], []
    for t in range(count):
        x = (source[:, t] - rule.centre) * rule.scale
        projection = rule.weight if hasattr(rule, "weight") else rule.up @ rule.down
        new = []
        for h in range(rule.kv_heads):
            weight = torch.sigmoid(x @ rule.pick[h] + rule.pick_bias[h])
            word = x @ projection[h * dim : (h + 1) * dim].T
            new.append(torch.sigmoid(rule.decay[h]) * c[:, h] + weight[:, None] * word)
        keys.append(c / (c.square().sum(-1, keepdim=True) + 0.01).sqrt())
        after = torch.stack(new, 1)
        c = after if keep is None else torch.where(keep[:, t, None, None], after, c)
        queries.append(c / (c.square().sum(-1, keepdim=True) + 0.01).sqrt())
    return [torch.stack(queries, 1), torch.stack(keys, 1), c]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("rank", [0, 5])
def test_equal_the_loop_in_values_and_gradients(padded: bool, warm: bool, rank: int) -> None:
    rule = addresses(rank=rank)
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(2, 9, 16, generator=generator, dtype=torch.float64)
    keep = torch.rand(2, 9, generator=generator) > 0.3 if padded else None
    carry = torch.randn(2, 2, 8, generator=generator, dtype=torch.float64) if warm else None
    results = []
    for function in (rule, lambda *a: loop(rule, *a)):
        rule.zero_grad()
        out = function(source, keep, carry)
        sum((part * torch.arange(part.numel()).view(part.shape).cos()).sum() for part in out).backward()
        results.append([*out, *(p.grad.clone() for p in rule.parameters())])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("far", [-1e30, -200.0, -105.0, 200.0, 1e30])
@pytest.mark.parametrize("padded", [False, True])
def test_a_decay_that_rounds_to_nothing_or_to_one_stays_a_number(far: float, padded: bool) -> None:
    """In float32 sigmoid(-105) is 0, whose logarithm times no step at all is no number."""
    rule = addresses().float()
    source, carry = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1)), torch.ones(1, 2, 8)
    keep = torch.tensor([[True, False, True, True, False]]) if padded else None
    with torch.no_grad():
        rule.decay.fill_(far)
    found, expected = rule(source, keep, carry), loop(rule, source, keep, carry)
    for fast, slow in zip(found, expected, strict=True):
        torch.testing.assert_close(fast, slow)
    sum(part.sum() for part in found).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in rule.parameters())


@pytest.mark.parametrize("asked", range(4))
def test_the_value_after_the_asked_name_is_read(asked: int) -> None:
    """What addresses are for: four facts in one wording, told apart by their names as soon as names weigh more."""
    rule = Addresses(64, 1, 64, 0, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    words, values = torch.randn(200, 64, generator=generator), torch.randn(200, 64, generator=generator)
    names, wording, answers = [190, 191, 192, 193], [7, 8, 9], [194, 195, 196, 197]
    words[names, 0] = 4
    ids: list[int] = []
    for name, answer, filler in zip(names, answers, range(20, 100, 20), strict=True):
        ids += [*range(filler, filler + 12), wording[0], name, *wording[1:], answer]
    ids += [10, 11, names[asked], *wording[1:]]
    beta = torch.tensor([0.3 if token in answers else 0.01 for token in ids])[None, :, None]

    def chosen(weigh_names: bool) -> list[float]:
        with torch.no_grad():
            rule.pick.zero_()
            rule.pick[0, 0] = 2.0 if weigh_names else 0.0
            rule.pick_bias.fill_(-5.0 if weigh_names else 0.0)
            queries, keys, _ = rule(words[ids][None], None, None)
            read, _ = delta_rule(queries, keys, values[ids][None, :, None], beta)
        return torch.cosine_similarity(read[0, -1], values[answers], dim=-1).tolist()

    weighed, plain = chosen(True), chosen(False)
    assert max(range(4), key=weighed.__getitem__) == asked
    others = [i for i in range(4) if i != asked]
    assert weighed[asked] - max(weighed[i] for i in others) > plain[asked] - max(plain[i] for i in others)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_layer_teaches_the_addresses_as_a_plain_one_does(reentrant: bool) -> None:
    ids = tokens(2, 30)
    gradients = []
    for checkpointing in (False, True):
        model = with_memory(keys="context", layers="1,2", address_layer=1)
        if checkpointing:
            model.train()
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in rules(model).items()})
    assert any(".address." in name for name in gradients[0])
    for name, plain in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], plain, msg=name)


def test_all_memory_layers_use_the_same_addresses() -> None:
    """The rules name them once, with the layer they listen to; no layer has queries and keys of its own."""
    names = set(rules(with_memory(keys="context", layers="1,2")))
    own = {name for name in names if ".address." in name}
    assert {name.rpartition(".")[0] for name in own} == {"layers.1.memory.address"}
    assert not any(name.endswith(("q_down", "k_down")) for name in names)


def test_addresses_are_made_once_a_pass_without_gradients_and_by_every_layer_with_them() -> None:
    model, ids = with_memory(keys="context"), tokens(2, 12)
    made: list[None] = []
    addresses = attachment(model).addresses
    assert addresses is not None
    addresses.register_forward_hook(lambda *_: made.append(None))

    def calls(piece: torch.Tensor, cache: MemoryCache | None) -> int:
        made.clear()
        model(piece, cache=cache, use_cache=cache is not None)
        return len(made)

    whole = model(ids, use_cache=False).logits
    assert calls(ids, None) == 3
    with torch.no_grad():
        cache = MemoryCache(model)
        assert calls(ids[:, :5], cache) == calls(ids[:, 5:6], cache) == 1
        cache.reorder_cache(torch.tensor([1, 1]))  # equal averages, no longer one tensor
        assert calls(ids[:, 6:7], cache) == 1
        cache.layers[1].set(replace(cache.layers[1].tensors, context=torch.zeros_like(cache.layers[1].tensors.context)))
        assert calls(ids[:, 7:8], cache) == 3, "a layer with another average has other addresses"
        assert torch.equal(model(ids, use_cache=False).logits, whole)


def test_centring_takes_the_mean_out_of_the_inputs() -> None:
    model, ids = with_memory(keys="context", address_layer=1, layers="1,2"), tokens(2, 40)
    seen: list[torch.Tensor] = []
    hook = model.model.layers[1].self_attn.k_proj.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    before = {name: p.detach().clone() for name, p in rules(model).items()}
    centre(model, ids)
    hook.remove()
    after = rules(model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"layers.1.memory.address.centre", "layers.1.memory.address.scale"}
    x = (seen[0] - after["layers.1.memory.address.centre"]) * after["layers.1.memory.address.scale"]
    torch.testing.assert_close(x.mean((0, 1)), torch.zeros(32), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.square().mean(), torch.tensor(1.0))


def test_addresses_are_of_no_later_layer_than_the_first_memory_layer() -> None:
    assert MemoryConfig(layers="4,5").address_number(8) == 2
    assert MemoryConfig(layers="1,2").address_number(8) == 1
    assert MemoryConfig(layers="none").address_number(8) is None
    assert MemoryConfig(layers="all", keys="token").address_number(8) is None


def test_detaching_takes_the_addresses_off() -> None:
    model = tiny()
    before = [name for name, _ in model.named_parameters()]
    attach_memory(model, MemoryConfig(layers="1,2", address_layer=0))
    assert any("addresses" in name for name, _ in model.named_parameters())
    detach_memory(model)
    assert [name for name, _ in model.named_parameters()] == before


def test_layers_taken_out_afterwards_do_not_rename_the_rules() -> None:
    """A layer keeps the number that it had on attaching, and so do the addresses made of its inputs."""
    model = with_memory(keys="context", layers="last:1")
    names = set(rules(model))
    model.model.layers = model.model.layers[1:]
    assert set(rules(model)) == names
    detach_memory(model)
    assert not any("address" in name for name in model.state_dict())


def test_a_pass_without_the_address_layer_is_refused_by_name() -> None:
    model = with_memory(keys="context", layers="last:1", address_layer=1)
    model.model.layers = model.model.layers[2:]
    with pytest.raises(BackboneError, match="left out layer 1, whose inputs"):
        model(tokens(1, 9), use_cache=False)
