"""The frozen prefix: passes that begin above it give what whole passes give, in losses and gradients."""

from __future__ import annotations

import stat
from typing import Any

import pytest
import torch
from torch import Tensor

from fednl.errors import BackboneError, SettingsError
from fednl.memory import MemoryCache, rules, train_rules
from fednl.memory.families import FAMILIES
from fednl.memory.prefix import PROBE_TOKENS, PrefixCache
from fednl.memory.settings import PrefixSettings
from memory.models import remember, tiny, tokens, with_memory
from memory.work import Work

MEMORY = PrefixSettings(cache="memory")


def batch(rows: tuple[int, ...], length: int = 20) -> dict[str, Tensor]:
    """Rows of a small set of examples of unlike lengths, padded on the right to the longest."""
    ids, lengths = tokens(6, length)[list(rows)], [length - 3 * row for row in rows]
    mask = torch.stack([(torch.arange(length) < n).long() for n in lengths])
    longest = max(lengths)
    ids = ids.masked_fill(mask == 0, 0)
    return {"input_ids": ids[:, :longest], "attention_mask": mask[:, :longest]}


def loss_and_gradients(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    loss = model(**given, labels=labels, use_cache=False).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(rules(model).values()))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keys", ["token", "context"])
def test_losses_and_gradients_are_those_of_whole_passes(family: str, keys: str) -> None:
    model = with_memory(family, layers="2", keys=keys, address_layer=1)
    cache, seen = PrefixCache(model, MEMORY), []
    for rows in ((0, 1), (2, 3), (3, 0), (1,)):
        expected = loss_and_gradients(model, batch(rows))
        with cache.over(batch(rows)):
            found = loss_and_gradients(model, batch(rows))
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        seen.append((cache.computed, cache.taken))
    assert cache.layer == 2 and seen == [(2, 0), (4, 0), (4, 2), (4, 3)]
    assert torch.equal(loss_and_gradients(model, batch((1,)))[0], expected[0])


def test_the_same_batch_again_is_bit_equal() -> None:
    model = with_memory(layers="1,2", keys="context")
    cache, found = PrefixCache(model, MEMORY), []
    for _ in range(2):
        with cache.over(batch((0, 1, 2))):
            found.append(loss_and_gradients(model, batch((0, 1, 2))))
    assert cache.taken == 3 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_layers_below_are_not_run() -> None:
    model = with_memory("llama", layers="2")
    cache, ran = PrefixCache(model, MEMORY), []
    for index, block in enumerate(model.model.layers):
        block.mlp.register_forward_hook(lambda m, a, out, index=index: ran.append((index, out.shape[1])))
    operations = []
    for _ in range(2):
        with Work() as work, cache.over(batch((0,))), torch.no_grad():
            model(**batch((0,)), use_cache=False)
        operations.append(work.operations)
    probe = [(0, PROBE_TOKENS), (1, PROBE_TOKENS)]
    assert ran == [*probe, (0, 20), (1, 20), (2, 20), *probe, (2, 20)] and operations[1] < operations[0]


def test_on_disk_it_is_private_and_goes_with_the_run() -> None:
    model = with_memory(layers="2", keys="context")
    disk, ram = PrefixCache(model, PrefixSettings(cache="disk")), PrefixCache(model, MEMORY)
    results = []
    for cache in (ram, disk):
        for _ in range(2):
            with cache.over(batch((0, 1))):
                found = loss_and_gradients(model, batch((0, 1)))
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert disk.kept.folder is not None
    folder = disk.kept.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and len(list(folder.iterdir())) == 2
    del cache, disk
    assert not folder.exists()


def test_the_limit_holds_and_what_does_not_fit_is_computed() -> None:
    model = with_memory("llama", layers="2")
    cache = PrefixCache(model, MEMORY)
    cache.kept.limit_bytes = 20 * 32 * 4
    for rows in ((0, 1), (0,), (1,), (0, 1)):
        with cache.over(batch(rows)), torch.no_grad():
            model(**batch(rows), use_cache=False)
    assert (len(cache.kept), cache.kept.held_bytes) == (1, 20 * 32 * 4)
    assert (cache.computed, cache.taken) == (4, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keys", ["token", "context"])
def test_nothing_depends_on_what_was_kept_before(keys: str, dtype: Any) -> None:
    """A run that was taken up again, or a worker that has not met an example, computes the same bits."""
    model, found = with_memory(layers="2", keys=keys, address_layer=1), []
    for before in ([], [(0,), (1, 3)], [(1, 0), (2, 3)]):
        for room in (0, 10**6):
            cache = PrefixCache(model, PrefixSettings(cache="memory", dtype=dtype))
            cache.kept.limit_bytes = room
            for rows in (*before, (0, 1)):
                with cache.over(batch(rows)):
                    last = loss_and_gradients(model, batch(rows))
            found.append(last)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_full_disk_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    resource: Any = pytest.importorskip("resource")  # not on Windows
    model = with_memory(layers="2", keys="context")
    cache, ram = PrefixCache(model, PrefixSettings(cache="disk")), PrefixCache(model, MEMORY)
    assert cache.kept.folder is not None
    with ram.over(batch((0, 1))):
        expected = loss_and_gradients(model, batch((0, 1)))
    with cache.over(batch((0,))):
        loss_and_gradients(model, batch((0,)))
    (first,) = cache.kept.folder.iterdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # what is longer cannot be written
    try:
        with cache.over(batch((0, 1))):
            found = loss_and_gradients(model, batch((0, 1)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert list(cache.kept.folder.iterdir()) == [first] and len(cache.kept) == 1
    first.write_bytes(first.read_bytes()[:-1])  # and a file that something else has damaged is no error either
    with cache.over(batch((0, 1))):
        found = loss_and_gradients(model, batch((0, 1)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and cache.computed == 4
    monkeypatch.setattr("tempfile.mkdtemp", lambda **named: (_ for _ in ()).throw(OSError(28, "No space left")))
    nowhere = PrefixCache(model, PrefixSettings(cache="disk"))
    with nowhere.over(batch((0, 1))):
        found = loss_and_gradients(model, batch((0, 1)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and len(nowhere.kept) == 0


def test_bfloat16_takes_half_the_room_and_is_near() -> None:
    model, found = with_memory(layers="2"), []
    for dtype in ("float32", "bfloat16"):
        cache = PrefixCache(model, PrefixSettings(cache="memory", dtype=dtype))  # type: ignore[arg-type]
        for _ in range(2):
            with cache.over(batch((0, 1))):
                loss = loss_and_gradients(model, batch((0, 1)))[0]
        found.append((cache.kept.held_bytes, loss))
    assert found[0][0] == 2 * found[1][0]
    assert 0 < abs(float(found[0][1] - found[1][1])) < 0.05


def test_a_failed_pass_leaves_the_model_whole_and_one_below_keeps_nothing() -> None:
    model = with_memory("llama", layers="2")
    cache = PrefixCache(model, MEMORY)
    handle = model.model.layers[1].register_forward_pre_hook(lambda module, args: len(args) // 0)
    with pytest.raises(ZeroDivisionError), cache.over(batch((0,))):
        pass
    handle.remove()
    assert len(cache.kept) == 0
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), cache.over(batch((0,))):
            len(model.model.layers) // 0
        with cache.over(batch((0,))):
            expected = loss_and_gradients(model, batch((0,)))
    torch.testing.assert_close(loss_and_gradients(model, batch((0,))), expected, atol=2e-5, rtol=1e-4)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match=r'memory\.layers = "all": where layer 0 trains there is nothing to cache'):
        PrefixCache(with_memory(), MEMORY)
    model = with_memory(layers="2")
    cache = PrefixCache(model, MEMORY)
    with cache.over(batch((0,))):
        model(**batch((0,)), use_cache=False)
    with pytest.raises(BackboneError, match="no conversation"), cache.over(batch((0,))):
        model(**batch((0,)), cache=MemoryCache(model))


def agrees(cache: PrefixCache, model: Any) -> bool:
    """Whether a pass that begins above the frozen layers gives what a whole one gives now."""
    expected = loss_and_gradients(model, batch((0, 1)))
    with cache.over(batch((0, 1))):
        found = loss_and_gradients(model, batch((0, 1)))
    return all(torch.allclose(a, b, atol=2e-5, rtol=1e-4) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("change", ["in place", "data", "another tensor", "hook"])
def test_what_changed_below_is_computed_anew(change: str, where: Any) -> None:
    model = with_memory("llama", layers="2", keys="context", address_layer=1)
    cache = PrefixCache(model, PrefixSettings(cache=where))
    assert agrees(cache, model) and agrees(cache, model) and (cache.computed, cache.taken) == (2, 2)
    before = loss_and_gradients(model, batch((0, 1)))[0]
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        if change == "in place":
            attention.q_proj.weight.add_(1)
        elif change == "data":  # as PEFT merges a LoRA: the parameter's version stays
            attention.q_proj.weight.data += 1
        elif change == "another tensor":
            attention.q_proj.weight = torch.nn.Parameter(attention.q_proj.weight + 1, requires_grad=False)
        else:
            model.model.layers[0].register_forward_hook(lambda module, args, out: 2 * out)
    assert agrees(cache, model) and (cache.computed, cache.taken) == (4, 2)
    assert abs(float(loss_and_gradients(model, batch((0, 1)))[0] - before)) > 1e-3
    assert agrees(cache, model) and len(cache.kept) == 2
    if cache.kept.folder is not None:
        assert len(list(cache.kept.folder.iterdir())) == 2


@pytest.mark.filterwarnings("ignore")
def test_a_merged_lora_below_is_noticed() -> None:
    from peft import LoraConfig, get_peft_model

    wanted = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0], init_lora_weights=False)
    model = remember(get_peft_model(tiny("llama"), wanted), layers="2")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(False)
    cache = PrefixCache(model, MEMORY)
    assert agrees(cache, model)
    model.base_model.disable_adapter_layers()
    assert agrees(cache, model)
    model.base_model.enable_adapter_layers()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(False)
    assert agrees(cache, model)
    model.base_model.merge_adapter()
    assert agrees(cache, model) and cache.computed == 8


def test_kept_activations_belong_to_what_made_them() -> None:
    first, second = with_memory("llama", layers="2"), with_memory("llama", seed=1, layers="2")
    one = PrefixCache(first, MEMORY)
    assert agrees(one, first)
    for model in (second, first):
        assert agrees(PrefixCache(model, MEMORY, one.kept), model)
    lower = with_memory("llama", layers="1")
    assert agrees(PrefixCache(lower, MEMORY, one.kept), lower)
    again = PrefixCache(lower, MEMORY, one.kept)
    assert agrees(again, lower) and (again.computed, again.taken) == (0, 2)


@pytest.mark.parametrize("where", ["embd_pdrop", "resid_pdrop", "attn_pdrop"])
def test_dropout_below_is_refused_in_training_mode_only(where: str) -> None:
    """What is kept would repeat one draw for ever."""
    model = remember(tiny("gpt2", **{where: 0.3}), layers="2", window_tokens=0 if where == "attn_pdrop" else 8)
    cache = PrefixCache(model, MEMORY)
    assert agrees(cache, model)
    model.train()
    with pytest.raises(BackboneError, match=r"random numbers below layer 2 \(dropout in training mode\)"):
        agrees(cache, model)
    model.eval()
    assert agrees(cache, model)
    calm = with_memory("gpt2", layers="2").train()
    assert agrees(PrefixCache(calm, MEMORY), calm)


def test_what_trains_below_by_now_is_refused() -> None:
    model = with_memory("llama", layers="2")
    cache = PrefixCache(model, MEMORY)
    for parameter in (model.model.layers[0].mlp.up_proj.weight, model.model.embed_tokens.weight):
        parameter.requires_grad_(True)
        with pytest.raises(BackboneError, match="Something below layer 2 trains by now"):
            agrees(cache, model)
        if parameter is model.model.embed_tokens.weight:
            with pytest.raises(SettingsError, match="where the embedding trains there is nothing to cache"):
                PrefixCache(model, MEMORY)
        parameter.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)  # above the memory anything may train
    train_rules(model)
    assert agrees(cache, model)


def test_a_pass_over_something_else_is_refused() -> None:
    model, given = with_memory("llama", layers="2"), batch((0, 1))
    cache = PrefixCache(model, MEMORY)
    ids, mask = given["input_ids"], given["attention_mask"]
    other = {"input_ids": tokens(2, 20, seed=5), "attention_mask": mask}
    embeds = model.get_input_embeddings()(ids)
    with cache.over(given):
        for wrong in (
            other,
            {"input_ids": ids},
            {"input_ids": ids.flip(0), "attention_mask": mask.flip(0)},
            {"input_ids": ids[:1], "attention_mask": mask[:1]},
            {"inputs_embeds": embeds, "attention_mask": mask},
            {**given, "position_ids": torch.arange(20).expand(2, -1) + 1},
        ):
            with pytest.raises(
                BackboneError, match=r"over other tokens, padding or positions than .* PrefixCache\.over"
            ):
                model(**wrong, use_cache=False)
        expected = model(**given, use_cache=False).logits
        filler = ids.masked_fill(mask == 0, 7)  # what stands under padding is nobody's business
        assert torch.equal(model(input_ids=filler, attention_mask=mask, use_cache=False).logits[0], expected[0])
        counted = (mask.cumsum(1) - 1).clamp(min=0)
        assert torch.equal(model(**given, position_ids=counted, use_cache=False).logits, expected)
    model(**other, use_cache=False)


def test_padding_inside_a_row_needs_a_window_or_positions() -> None:
    """Full attention without positions counts it, as the bare model does; what was kept of a row does not."""
    ids, mask = tokens(1, 12), torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
    for window, told in ((8, {}), (0, {"position_ids": (mask.cumsum(1) - 1)})):
        model = with_memory("llama", layers="2", window_tokens=window)
        expected = model(ids, attention_mask=mask, use_cache=False, **told).logits
        with PrefixCache(model, MEMORY).over({"input_ids": ids, "attention_mask": mask}):
            found = model(ids, attention_mask=mask, use_cache=False, **told).logits
            real = mask.bool()
            torch.testing.assert_close(found[real], expected[real], atol=2e-5, rtol=1e-4)
            if not window:
                with pytest.raises(BackboneError, match="pad at the ends of rows"):
                    model(ids, attention_mask=mask, use_cache=False)
