"""What went wrong in others' memories, by number, where no other test here has that number in its name."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from transformers.cache_utils import Cache, CacheLayerMixin

from fednl.memory import MemoryCache, MemoryConfig, attach_memory, closed, delta_rule, delta_rule_reference, rules
from fednl.memory.cache import MemoryCacheLayer
from fednl.memory.update_rules import RULES
from memory.models import tiny, tokens, with_memory
from memory.work import Work


@pytest.mark.parametrize(("rule", "write_range"), [("delta", 2), ("gated-delta", 2), ("titans", 1), ("ttt-linear", 1)])
def test_d03_rules_of_any_size_and_long_texts_leave_the_state_bounded(rule: str, write_range: int) -> None:
    """Keys of length 1 and bounded strengths, whatever was learned: 4,096 tokens under rules ten times too large."""
    model = with_memory(layers="last:1", rule=rule, write_range=write_range, keys="token", window_tokens=64)
    with torch.no_grad():
        for parameter in rules(model).values():
            parameter.mul_(10)
        cache, norms = MemoryCache(model), []
        for piece in tokens(1, 4096).split(1024, 1):
            assert model(piece, cache=cache, logits_to_keep=1).logits.isfinite().all()
            norms.append(float(cache.layers[2].tensors.state.norm()))
    assert cache.layers[2].tensors.state.dtype == torch.float32
    # Values are written over and over; what counts is that nothing grows from thousand to thousand tokens.
    assert max(norms[1:]) < 3 * norms[0]


def test_d07_one_long_pass_needs_memory_in_proportion_to_its_length() -> None:
    """No tensor is tokens times tokens, and none that a cache of pieces would avoid grows faster than the text."""
    model, largest = with_memory(layers="last:1", window_tokens=32), []
    for length in (1024, 2048):
        with torch.no_grad(), Work() as work:
            model(tokens(1, length), use_cache=False, logits_to_keep=1)
        largest.append(work.largest)
    assert largest[1] <= 2 * largest[0] < 2 * 1024 * 1024


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_d07_the_window_holds_whatever_the_backbones_attention(implementation: str) -> None:
    model = tiny()
    model.set_attn_implementation(implementation)
    attach_memory(model, MemoryConfig(layers="none", window_tokens=8, sink_tokens=0, keys="token"))
    ids, other = tokens(1, 40), tokens(1, 40)
    other[0, 0] = (ids[0, 0] - 2) % 60 + 3
    with torch.no_grad():  # three layers of windows of 8 reach 21 tokens back
        assert torch.equal(model(ids).logits[0, 25:], model(other).logits[0, 25:])
        assert not torch.equal(model(ids).logits[0, :8], model(other).logits[0, :8])


def test_d09_the_cache_is_whole_by_transformers_public_interface_in_the_range_we_name() -> None:
    assert issubclass(MemoryCache, Cache) and issubclass(MemoryCacheLayer, CacheLayerMixin)
    assert not inspect.isabstract(MemoryCacheLayer)
    cache = MemoryCache(with_memory())
    assert (cache.get_seq_length(), cache.is_initialized, len(cache), cache.is_croppable) == (0, False, 3, False)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = [one for one in map(Requirement, project["dependencies"]) if one.name == "transformers"]
    assert wanted.specifier.contains(transformers.__version__) and not wanted.specifier.contains("6.0")


def test_d12_neither_triton_nor_its_kernels_are_needed_and_broken_ones_do_no_harm() -> None:
    script = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "fla"):
            raise ImportError(name + " needs a driver")
sys.meta_path.insert(0, Broken())
import torch, fednl
q = torch.nn.functional.normalize(torch.ones(1, 40, 2, 4), dim=-1)
out, state = fednl.delta_rule(q, q, q, torch.ones(1, 40, 2) / 2)
print(bool(out.isfinite().all()), tuple(state.shape))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "True (1, 2, 4, 4)"


def test_d23_training_runs_in_chunks_not_token_by_token() -> None:
    work: dict[str, Any] = {}
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.nn.functional.normalize(torch.randn(1, 1024, 1, 8, generator=rng), dim=-1) for _ in range(3))
    for rule in (delta_rule, delta_rule_reference):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, torch.full((1, 1024, 1), 0.5))]
        with Work() as count:
            rule(*leaves)[0].sum().backward()
        work[rule.__name__] = count.operations
    assert 10 * work["delta_rule"] < work["delta_rule_reference"]
    assert all("reference" not in rule.fast for rule in RULES.values())
    model, ids = with_memory(layers="last:1", window_tokens=64), tokens(1, 512)
    with Work() as count:
        model(ids, labels=ids, use_cache=False).loss.backward()
    assert count.operations < 10 * 512


def test_d21_a_prompt_longer_than_the_window_is_read_whole() -> None:
    """The window bounds what attention sees; the memory still holds what came before it."""
    model, ids, other = with_memory(layers="last:1", window_tokens=4, sink_tokens=0), tokens(1, 40), tokens(1, 40)
    other[0, 0] = (ids[0, 0] - 2) % 60 + 3
    with torch.no_grad():
        assert model(ids).logits.shape[1] == 40
        assert not torch.equal(model(ids).logits[0, -1], model(other).logits[0, -1])
        with closed(model):
            assert torch.equal(model(ids).logits[0, -1], model(other).logits[0, -1])
