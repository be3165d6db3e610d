from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from fednl.evaluation.costs import begin_peak, cache_bytes, cost_rows, end_peak, measure_cost
from fednl.memory import MemoryCache, MemoryConfig
from fednl.memory.attach import attach_memory
from small_run import tiny_backbone

LAYERS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 2, 4, 258


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("costs"))


def test_full_attention_costs_what_its_keys_and_values_are(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    for tokens in (20, 40):
        cost = measure_cost(
            model, list(range(2, 2 + tokens)), make_cache=lambda m: DynamicCache(config=m.config), decode_tokens=3
        )
        assert cost.state_bytes == 0
        assert cost.kv_bytes == 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * (tokens + 3)
        assert cost.logits_bytes == VOCABULARY * 4  # of one token, not of the context
        assert cost.weights_bytes == 4 * sum(p.numel() for p in model.parameters())
        assert cost.trained_bytes == cost.weights_bytes
        assert (cost.context_tokens, cost.decoded_tokens) == (tokens, 2)
        assert cost.prefill_tokens_per_s > 0 and cost.decode_s > 0


def test_a_memory_costs_the_same_however_long_the_context(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    bare = sum(p.numel() for p in model.parameters())
    attach_memory(model, MemoryConfig(layers="last:1", rank=2, window_tokens=16, sink_tokens=2))
    costs = [measure_cost(model, [5, 9] * n, make_cache=MemoryCache, decode_tokens=2) for n in (20, 60)]
    assert costs[0].state_bytes == costs[1].state_bytes == KV_HEADS * HEAD_DIM * HEAD_DIM * 4
    assert costs[0].kv_bytes == costs[1].kv_bytes > 0
    assert costs[0].trained_bytes == costs[0].weights_bytes - 4 * bare > 0


def test_weights_that_are_shared_count_once(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    own = sum(p.nbytes for p in model.parameters())
    model.lm_head.weight = model.model.embed_tokens.weight
    cost = measure_cost(model, [2, 3], make_cache=lambda m: DynamicCache(config=m.config), decode_tokens=1)
    assert cost.weights_bytes == own - model.lm_head.weight.nbytes


def test_the_peak_sees_what_was_held_in_between() -> None:
    device = torch.device("cpu")
    if not begin_peak(device):
        pytest.skip("this system does not tell a process's largest memory")
    before = end_peak(device)
    assert before is not None
    held = torch.ones(16 * 2**20)  # 64 MiB
    del held
    after = end_peak(device)
    assert after is not None and after - before > 48 * 2**20


def test_a_peak_that_cannot_begin_anew_is_not_that_of_the_whole_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fednl.evaluation.costs._CLEAR", tmp_path)  # a folder cannot be written to
    model = AutoModelForCausalLM.from_pretrained(folder)
    cost = measure_cost(model, [2, 3], make_cache=lambda m: DynamicCache(config=m.config), decode_tokens=1)
    assert cost.peak_bytes is None


def test_rows_hold_what_was_measured(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    cost = measure_cost(model, [2, 3, 4], make_cache=lambda m: DynamicCache(config=m.config), decode_tokens=1)
    rows = cost_rows({"full-attention": [cost]})
    found = {row["metric"]: row["value"] for row in rows}
    assert found["kv_bytes"] == cost.kv_bytes and "context_tokens" not in found
    assert all(row["tokens"] == 3 and row["value"] is not None for row in rows)
    assert cache_bytes(DynamicCache(config=model.config)) == (0, 0)
