"""The frozen prefix: passes that begin above it give what whole passes give, in losses and gradients."""

from __future__ import annotations

import stat
from typing import Any

import pytest
import torch
from torch import Tensor

from fednl.errors import BackboneError, SettingsError
from fednl.memory import MemoryCache, rules
from fednl.memory.families import FAMILIES
from fednl.memory.prefix import PrefixCache
from fednl.memory.settings import PrefixSettings
from memory.models import tokens, with_memory
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
        block.mlp.register_forward_hook(lambda m, a, out, index=index: ran.append(index))
    operations = []
    for _ in range(2):
        with Work() as work, cache.over(batch((0,))), torch.no_grad():
            model(**batch((0,)), use_cache=False)
        operations.append(work.operations)
    assert ran == [0, 1, 2, 2] and operations[1] < operations[0]


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
