"""Memory on a model: nothing lost when closed, the same in one pass, in pieces and token by token."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, OPTConfig, OPTForCausalLM

from fednl.errors import BackboneError
from fednl.memory import MemoryCache, MemoryConfig, attach_memory, closed, detach_memory, rules
from memory.models import CROSSED, tiny, tokens, with_memory

pytestmark = pytest.mark.usefixtures("both_keys")

families = pytest.mark.parametrize("family", CROSSED)
windows = pytest.mark.parametrize("window", [0, 8])


@families
@pytest.mark.parametrize("mixing", ["additive", "convex"])
def test_closed_gate_with_full_window_is_the_backbone_bit_for_bit(family: str, mixing: str) -> None:
    ids = tokens(2, 21)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    bare = tiny(family)
    expected = bare(ids).logits, bare(ids, attention_mask=mask).logits
    model = with_memory(family, window_tokens=0, mixing=mixing)
    assert not torch.equal(model(ids).logits, expected[0])
    with closed(model):
        assert torch.equal(model(ids).logits, expected[0])
        assert torch.equal(model(ids, attention_mask=mask).logits, expected[1])
    detach_memory(model)
    assert torch.equal(model(ids).logits, expected[0])


@families
@windows
def test_detached_is_the_backbone_and_its_names(family: str, window: int) -> None:
    bare = tiny(family)
    names, ids = list(bare.state_dict()), tokens(1, 30)
    expected = bare(ids).logits
    model = with_memory(family, window_tokens=window)
    assert [n for n in model.state_dict() if not {"memory", "addresses"} & set(n.split("."))] == names
    detach_memory(model)
    assert list(model.state_dict()) == names
    assert torch.equal(model(ids).logits, expected)
    assert all(p.requires_grad for p in model.parameters())


@families
@windows
@pytest.mark.parametrize("start", [0, 100_000])
def test_d02_one_pass_equals_pieces_equals_token_by_token(family: str, window: int, start: int) -> None:
    model, ids = with_memory(family, window_tokens=window).double(), tokens(2, 41)
    positions = torch.arange(start, start + 41).expand(2, -1)
    whole = model(ids, position_ids=positions, use_cache=False).logits
    for sizes in ([41], [7, 1, 20, 13], [1] * 41, [30, 11]):
        cache, parts, at = MemoryCache(model), [], 0
        for size in sizes:
            part = model(ids[:, at : at + size], position_ids=positions[:, at : at + size], cache=cache)
            parts.append(part.logits)
            at += size
        assert cache.get_seq_length() == 41
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


def dense_reference(model: torch.nn.Module, layer: int, hidden: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
    """Attention under window and re-based sinks, one query and one key at a time."""
    attention = model.model.layers[layer].self_attn
    head_dim, rotary = attention.head_dim, model.model.rotary_emb
    q, k, v = (getattr(attention, f"{n}_proj")(hidden).view(-1, h, head_dim) for n, h in (("q", 4), ("k", 2), ("v", 2)))

    def turn(x: torch.Tensor, position: int) -> torch.Tensor:
        cos, sin = (t[0, 0] for t in rotary(x, torch.tensor([[position]])))
        return x * cos + torch.cat([-x[head_dim // 2 :], x[: head_dim // 2]]) * sin

    rows = []
    for t in range(hidden.shape[0]):
        visible = [(j, min(t, sinks + window - 1) - j) for j in range(sinks) if j <= t - window]
        visible += [(j, t - j) for j in range(max(0, t - window + 1), t + 1)]
        heads = []
        for h in range(4):
            scores = torch.stack([turn(q[t, h], d) @ turn(k[j, h // 2], 0) for j, d in visible]) * head_dim**-0.5
            heads.append(scores.softmax(0) @ torch.stack([v[j, h // 2] for j, _ in visible]))
        rows.append(torch.cat(heads))
    return attention.o_proj(torch.stack(rows))


@families
def test_d18_window_with_rebased_sinks_equals_the_plain_loop(family: str) -> None:
    model, ids = with_memory(family, layers="none", window_tokens=5, sink_tokens=3), tokens(1, 20)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    handle = model.model.layers[0].self_attn.register_forward_hook(
        lambda m, a, kw, out: seen.append((kw["hidden_states"], out[0])), with_kwargs=True
    )
    with torch.no_grad():
        model(ids, use_cache=False)
        handle.remove()
        torch.testing.assert_close(seen[0][1][0], dense_reference(model, 0, seen[0][0][0], 5, 3), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("left", [0, 3])
def test_long_pass_in_blocks_equals_the_dense_mask(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = with_memory(window_tokens=9), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :left] = 0
    dense = model(ids, attention_mask=mask, use_cache=False).logits
    monkeypatch.setattr("fednl.memory.window.BLOCK_TOKENS", 7)
    blocks = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(blocks[mask.bool()], dense[mask.bool()], atol=2e-5, rtol=1e-4)


@families
@windows
def test_left_padded_batch_equals_singles(family: str, window: int) -> None:
    model, ids = with_memory(family, window_tokens=window), tokens(3, 33)
    lengths = [33, 20, 5]
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, 33 - length :] = 1
    padded = ids.masked_fill(mask == 0, 0)
    cache = MemoryCache(model)
    whole = model(padded, attention_mask=mask, use_cache=False).logits
    first = model(padded[:, :25], attention_mask=mask[:, :25], cache=cache).logits
    second = model(padded[:, 25:], attention_mask=mask, cache=cache).logits
    for row, length in enumerate(lengths):
        single = model(ids[row : row + 1, 33 - length :], use_cache=False).logits[0]
        torch.testing.assert_close(whole[row, 33 - length :], single, atol=2e-5, rtol=1e-4)
        pieces = torch.cat([first[row], second[row]])[33 - length :]
        torch.testing.assert_close(pieces, single, atol=2e-5, rtol=1e-4)


def test_padding_between_pieces_is_invisible() -> None:
    """A row whose earlier pieces ended in padding goes on as if they had not."""
    model, ids = with_memory(window_tokens=6), tokens(1, 30)
    expected = model(ids, use_cache=False).logits
    cache, parts = MemoryCache(model), []
    for start, stop, pads in ((0, 5, 2), (5, 18, 3), (18, 19, 1), (19, 30, 0)):
        piece = torch.cat([ids[:, start:stop], torch.zeros(1, pads, dtype=torch.int64)], 1)
        mask = torch.tensor([[1] * (stop - start) + [0] * pads])
        parts.append(model(piece, attention_mask=mask, cache=cache).logits[:, : stop - start])
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=2e-5, rtol=1e-4)


@families
@windows
@pytest.mark.parametrize("beams", [1, 3])
def test_d08_plain_generate_equals_recompute(family: str, window: int, beams: int) -> None:
    model, ids = with_memory(family, window_tokens=window), tokens(2, 13)
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cached = model.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(cached, model.generate(ids, attention_mask=mask, use_cache=False, **settings))
    if beams == 1:
        row = ids[0:1, 5:]
        for _ in range(12):
            row = torch.cat([row, model(row, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(cached[0, 5:], row[0])


def test_d19_cache_size_is_constant_under_a_window_and_grows_without() -> None:
    for window, constant in ((8, True), (0, False)):
        model = with_memory(window_tokens=window)
        cache, sizes = MemoryCache(model), []
        with torch.no_grad():
            for piece in tokens(1, 200).split(20, 1):
                model(piece, cache=cache)
                sizes.append(cache.size_bytes())
        assert (len(set(sizes)) == 1) is constant
        assert cache.state_bytes() == 3 * 2 * 8 * 8 * 4
        storage = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
        kept = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
        assert storage == kept, "a view must not keep what the window has lost alive"


def test_memory_reaches_beyond_the_window_and_the_window_alone_does_not() -> None:
    """One layer, so nothing travels from window to window: only memory can tell the first token."""
    model = with_memory(layers="last:1", window_tokens=4, sink_tokens=0)
    model.model.layers = model.model.layers[2:]
    site_owner = model.model.__dict__["_fednl_attachment"]
    ids, other = tokens(1, 20), tokens(1, 20)
    other[0, 0] = (ids[0, 0] - 3 + 1) % 61 + 3
    assert list(site_owner.layers) == [2]
    assert not torch.equal(model(ids, use_cache=False).logits[0, -1], model(other, use_cache=False).logits[0, -1])
    with closed(model):
        assert torch.equal(model(ids, use_cache=False).logits[0, -1], model(other, use_cache=False).logits[0, -1])


def test_gradients_reach_every_rule_and_nothing_else() -> None:
    model = with_memory()
    ids = tokens(2, 24)
    model(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in rules(model).items():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    live = set(map(id, rules(model).values()))
    assert all(p.grad is None for p in model.parameters() if id(p) not in live)


def test_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        model, ids = with_memory(), tokens(2, 24)
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable()
        loss = model(ids, labels=ids, use_cache=False).loss
        model(tokens(1, 9, seed=5), use_cache=False)
        loss.backward()
        gradients.append({n: p.grad for n, p in rules(model).items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_a_failed_pass_leaves_the_conversation_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = with_memory(), tokens(1, 20)
    cache = MemoryCache(model)
    model(ids[:, :10], cache=cache)
    before = cache.clone()

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", broken)
        with pytest.raises(RuntimeError, match="boom"):
            model(ids[:, 10:], cache=cache)
    expected = model(ids[:, 10:], cache=before).logits
    assert torch.equal(model(ids[:, 10:], cache=cache).logits, expected)


def test_two_conversations_never_meet() -> None:
    model, a, b = with_memory(), tokens(1, 16, seed=1), tokens(1, 16, seed=2)
    alone = MemoryCache(model)
    expected = torch.cat([model(a[:, :8], cache=alone).logits, model(a[:, 8:], cache=alone).logits], 1)
    one, two = MemoryCache(model), MemoryCache(model)
    first = model(a[:, :8], cache=one).logits
    model(b[:, :8], cache=two)
    second = model(a[:, 8:], cache=one).logits
    assert torch.equal(torch.cat([first, second], 1), expected)
    one.reset()
    assert torch.equal(model(a[:, :8], cache=one).logits, first)


def test_cache_rows_can_be_repeated_selected_cloned_and_their_state_forgotten() -> None:
    model, ids = with_memory(), tokens(2, 12)
    cache = MemoryCache(model)
    model(ids, cache=cache)
    more = tokens(2, 3, seed=9)
    expected = model(more, cache=cache.clone()).logits
    forgetful = cache.clone()
    forgetful.reset_state()
    assert not torch.allclose(model(more, cache=forgetful).logits, expected, atol=1e-3)
    cache.batch_repeat_interleave(2)
    assert torch.allclose(model(more.repeat_interleave(2, 0), cache=cache.clone()).logits[::2], expected, atol=1e-5)
    cache.batch_select_indices(torch.tensor([2]))
    assert torch.allclose(model(more[1:], cache=cache).logits, expected[1:], atol=1e-5)


def test_refusals_name_the_cause() -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 8, "ffn_dim": 8, "num_attention_heads": 2, "vocab_size": 16}
    with pytest.raises(BackboneError, match=r"'opt' is not supported .*llama, qwen2, qwen3, mistral.*gpt2\."):
        attach_memory(OPTForCausalLM(OPTConfig(word_embed_proj_dim=8, **small)), MemoryConfig())
    model = with_memory()
    with pytest.raises(BackboneError, match="attached to this model already"):
        attach_memory(model)
    with pytest.raises(BackboneError, match="no memory attached"):
        rules(tiny())
    with pytest.raises(BackboneError, match="another model"):
        model(tokens(1, 4), cache=MemoryCache(with_memory()))
    with pytest.raises(BackboneError, match=r"attention_mask has shape \[1, 3\]"):
        model(tokens(1, 4), attention_mask=torch.ones(1, 3))
    full = DynamicCache()
    full.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    with pytest.raises(BackboneError, match="DynamicCache that already holds tokens"):
        model(tokens(1, 4), cache=full)
    with pytest.raises(BackboneError, match="cannot take 2 tokens back"):
        MemoryCache(model).crop(-2)
    odd = tiny()
    del odd.model.layers[1].self_attn.k_proj
    with pytest.raises(BackboneError, match=r"Attention layer 1 .* has no k_proj"):
        attach_memory(odd, MemoryConfig())


def test_a_replaced_projection_is_hooked_again() -> None:
    """What PEFT does after attaching: the projection becomes a wrapper, and memory must see the wrapper's output."""
    model, ids = with_memory(), tokens(1, 20)
    attention = model.model.layers[1].self_attn

    class Scaled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.5 * self.inner(x)

    inner = attention.k_proj
    attention.k_proj = Scaled(inner)
    wrapped = model(ids, use_cache=False).logits
    attention.k_proj = inner
    with torch.no_grad():
        inner.weight.mul_(1.5)
        if inner.bias is not None:
            inner.bias.mul_(1.5)
    torch.testing.assert_close(wrapped, model(ids, use_cache=False).logits)


@families
@windows
@pytest.mark.parametrize("write", ["now", "leaving"])
def test_either_keys_and_late_writes_are_the_same_in_one_pass_in_pieces_and_padded(
    family: str, window: int, write: str
) -> None:
    model, ids = with_memory(family, window_tokens=window, write=write).double(), tokens(2, 41)
    whole = model(ids, use_cache=False).logits
    for sizes in ([7, 1, 20, 13], [1] * 41, [3, 38]):
        cache, parts, at = MemoryCache(model), [], 0
        for size in sizes:
            parts.append(model(ids[:, at : at + size], cache=cache).logits)
            at += size
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-9, rtol=1e-9)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    padded = model(ids, attention_mask=mask, use_cache=False).logits[0, 9:]
    torch.testing.assert_close(padded, model(ids[:1, 9:], use_cache=False).logits[0], atol=2e-5, rtol=1e-3)
    cache, parts = MemoryCache(model), []
    for start, stop, pads in ((0, 5, 2), (5, 22, 3), (22, 23, 1), (23, 41, 0)):
        piece = torch.cat([ids[:, start:stop], torch.zeros(2, pads, dtype=torch.int64)], 1)
        mask = torch.tensor([[1] * (stop - start) + [0] * pads] * 2)
        seen = torch.cat([torch.ones(2, cache.get_seq_length(), dtype=torch.int64), mask], 1)
        parts.append(model(piece, attention_mask=seen, cache=cache).logits[:, : stop - start])
    if window:
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-3)


def test_late_writes_keep_the_window_out_of_the_memory() -> None:
    """Until a token has left the window the state is zero; then it holds that token alone."""
    model, ids = with_memory(layers="0", window_tokens=8, write="leaving", keys="token"), tokens(1, 12)
    cache = MemoryCache(model)
    model(ids[:, :8], cache=cache)
    assert not cache.layers[0].tensors.state.any()
    model(ids[:, 8:9], cache=cache)
    assert torch.linalg.matrix_rank(cache.layers[0].tensors.state[0, 0]) == 1
