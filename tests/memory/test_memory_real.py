"""Memory on the real SmolLM2-135M: the same answer however the text arrives, near and far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fednl.data.fillers import load_filler
from fednl.memory import MemoryCache, MemoryConfig, attach_memory, closed, detach_memory, rules
from fednl.memory.prefix import PrefixCache
from fednl.memory.settings import PrefixSettings
from fednl.models.backbone import load_backbone
from fednl.models.settings import BackboneSettings

pytestmark = pytest.mark.real
FAR = 100_000


@pytest.fixture(scope="module")
def backbone() -> Any:
    return load_backbone(BackboneSettings())


@pytest.fixture(scope="module")
def ids(backbone: Any) -> torch.Tensor:
    text = load_filler("standard-library").text[20_000:24_000]
    return backbone.tokenizer(text, return_tensors="pt").input_ids[:, :400]


@pytest.fixture
def model(backbone: Any) -> Iterator[Any]:
    attach_memory(backbone.model, MemoryConfig(layers="8,9,14-23"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, rule in rules(backbone.model).items():
            if name.endswith(("q_up", "k_up", "v_up")):
                rule.add_(0.05 * torch.randn(rule.shape, generator=generator))
        yield backbone.model
    detach_memory(backbone.model)


def nats(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Mean cross-entropy of the next token."""
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))


def test_the_backbone_comes_back_bit_for_bit(backbone: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        expected = backbone.model(ids[:, :96]).logits
        attach_memory(backbone.model, MemoryConfig(layers="last:15", window_tokens=0))
        with closed(backbone.model):
            assert torch.equal(backbone.model(ids[:, :96]).logits, expected)
        detach_memory(backbone.model)
        assert torch.equal(backbone.model(ids[:, :96]).logits, expected)


@pytest.mark.parametrize("start", [0, FAR])
def test_one_pass_equals_pieces_equals_token_by_token(model: Any, ids: torch.Tensor, start: int) -> None:
    part = ids[:, :150]
    positions = torch.arange(start, start + 150)[None]
    whole = model(part, position_ids=positions, use_cache=False).logits.log_softmax(-1)
    for sizes in ([64, 1, 85], [100, *[1] * 50]):
        cache, pieces, at = MemoryCache(model), [], 0
        for size in sizes:
            span = slice(at, at + size)
            pieces.append(model(part[:, span], position_ids=positions[:, span], cache=cache).logits.log_softmax(-1))
            at += size
        torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-4, rtol=1e-4)


def test_d18_far_positions_cost_nothing(model: Any, ids: torch.Tensor) -> None:
    """What absolute sinks break: with them the cross-entropy here goes from about 2.4 to above 6."""
    near = nats(model(ids, use_cache=False).logits, ids)
    far = nats(model(ids, position_ids=torch.arange(FAR, FAR + ids.shape[1])[None], use_cache=False).logits, ids)
    assert abs(far - near) < 0.02
    with closed(model):
        window_only = nats(model(ids, use_cache=False).logits, ids)
    assert window_only < 4.0, "sinks and window alone must keep the model a language model"


def test_plain_generate_equals_greedy_recompute(model: Any, backbone: Any, ids: torch.Tensor) -> None:
    prompt = ids[:, :120]
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": backbone.tokenizer.pad_token_id}
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    row = prompt
    for _ in range(made.shape[1] - 120):
        row = torch.cat([row, model(row, use_cache=False, logits_to_keep=1).logits.argmax(-1)], 1)
    assert torch.equal(made, row)


def test_a_left_padded_batch_equals_singles(model: Any, backbone: Any, ids: torch.Tensor) -> None:
    rows = [ids[0, :130], ids[0, 200:290]]
    batch = torch.full((2, 130), backbone.tokenizer.pad_token_id)
    mask = torch.zeros_like(batch)
    for row, tokens in enumerate(rows):
        batch[row, -len(tokens) :] = tokens
        mask[row, -len(tokens) :] = 1
    together = model(batch, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
    for row, tokens in enumerate(rows):
        alone = model(tokens[None], use_cache=False).logits.log_softmax(-1)
        torch.testing.assert_close(together[row, -len(tokens) :], alone[0], atol=1e-4, rtol=1e-4)


def test_the_cache_stays_the_same_size(model: Any, ids: torch.Tensor) -> None:
    cache = MemoryCache(model)
    sizes = []
    for piece in ids.split(100, 1):
        model(piece, cache=cache)
        sizes.append(cache.size_bytes())
    assert len(set(sizes)) == 1
    assert cache.state_bytes() == 12 * 3 * 64 * 64 * 4


def test_a_kept_prefix_gives_the_losses_and_gradients_of_whole_passes(model: Any, ids: torch.Tensor) -> None:
    cache = PrefixCache(model, PrefixSettings(cache="memory"))
    batches = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids[:, :240].split(120, 1)]
    found = []
    for batch in (*batches, *batches):
        with torch.enable_grad(), cache.over(batch):
            loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
        found.append([loss.detach(), *torch.autograd.grad(loss, list(rules(model).values()))])
    assert (cache.layer, cache.computed, cache.taken) == (8, 2, 2)
    torch.testing.assert_close(found[2:], found[:2], atol=0, rtol=0)


def test_ttt_linear_and_convolutions_are_the_same_in_pieces(backbone: Any, ids: torch.Tensor) -> None:
    settings: dict[str, Any] = {"rule": "ttt-linear", "conv_tokens": 4, "gate": "head", "read_norm": True}
    model = attach_memory(backbone.model, MemoryConfig(layers="last:5", **settings))
    with torch.no_grad():
        whole, cache = model(ids[:, :100], use_cache=False).logits, MemoryCache(model)
        parts = [model(piece, cache=cache).logits for piece in ids[:, :100].split([37, 1, 1, 61], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=5e-3, rtol=1e-3)
    detach_memory(model)
