"""The chunked delta rule against the recurrence, and the recurrence against what the equations promise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from fednl.memory.operator import delta_rule, delta_rule_reference
from memory.work import Work

Inputs = dict[str, Any]
Rule = Callable[..., tuple[Tensor, Tensor]]
DIFFERENTIABLE = ("q", "k", "v", "beta", "log_decay", "state")
BOTH = pytest.mark.parametrize("rule", [delta_rule, delta_rule_reference])


def make(
    tokens: int,
    *,
    batch: int = 2,
    heads: int = 2,
    group: int = 2,
    key_dim: int = 6,
    value_dim: int = 5,
    decay: float = 0.0,
    docs: bool = False,
    warm: bool = True,
    keys: str = "random",
    seed: int = 0,
) -> Inputs:
    """Inputs in float64 with unit keys; `decay` scales the log decay, 0 leaves it out."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    base, noise = draw(batch, 1, heads, key_dim), draw(batch, tokens, heads, key_dim)
    share = {"random": 0.0, "correlated": 3.0, "repeated": 1.0e9}[keys]  # pairwise cosine 0, 0.9, 1
    out: Inputs = {
        "q": normalize(draw(batch, tokens, heads * group, key_dim), dim=-1),
        "k": normalize(share * normalize(base, dim=-1) + normalize(noise, dim=-1), dim=-1),
        "v": draw(batch, tokens, heads, value_dim),
        "beta": torch.sigmoid(draw(batch, tokens, heads)),
    }
    if decay:
        out["log_decay"] = -decay * torch.nn.functional.softplus(draw(batch, tokens, heads))
    if warm:
        out["state"] = draw(batch, heads, key_dim, value_dim)
    if docs:
        # Ids go up, down and come back: a document is a run of equal ids.
        changes = torch.rand(batch, tokens, generator=rng) < 0.1
        out["doc_ids"] = changes.long().cumsum(1) % 3
    return out


def run(rule: Rule, inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """Outputs, state and every gradient of a random functional of both."""
    leaves = {n: x.detach().clone().requires_grad_() if n in DIFFERENTIABLE else x for n, x in inputs.items()}
    out, state = rule(**leaves, **options)
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=rng, dtype=torch.float64) for x in (out, state)]
    names = [n for n in leaves if n in DIFFERENTIABLE]
    total = (out.double() * weights[0]).sum() + (state.double() * weights[1]).sum()
    grads = torch.autograd.grad(total, [leaves[n] for n in names], materialize_grads=True)
    return {"out": out.detach(), "new state": state.detach(), **dict(zip(names, grads, strict=True))}


def cut(inputs: Inputs, span: slice) -> Inputs:
    return {n: x if n == "state" else x[:, span] for n, x in inputs.items()}


def agree(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=f"{name} differs")


# The recurrence against the equations.


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_reference_is_the_published_recurrence(decay: float) -> None:
    """In the papers' own layout, S [value_dim, key_dim], head by head: S = g S (I - b k k^T) + b v k^T."""
    x = make(9, decay=decay)
    out, state = delta_rule_reference(**x)
    for b, h in itertools.product(range(2), range(2)):
        memory = x["state"][b, h].T
        for t in range(9):
            key, value, beta = x["k"][b, t, h], x["v"][b, t, h], x["beta"][b, t, h]
            factor = x["log_decay"][b, t, h].exp() if decay else 1.0
            step = torch.eye(6, dtype=torch.float64) - beta * torch.outer(key, key)
            memory = factor * memory @ step + beta * torch.outer(value, key)
            for query_head in (2 * h, 2 * h + 1):
                torch.testing.assert_close(out[b, t, query_head], memory @ x["q"][b, t, query_head])
        torch.testing.assert_close(state[b, h], memory.T)


@BOTH
def test_residual_uses_the_decayed_state(rule: Rule) -> None:
    """The other gated form, whose residual takes the state before its decay, is another rule."""
    x = make(20, decay=0.5, group=1)
    _, state = rule(**x)
    other = x["state"]
    for t in range(20):
        key, beta = x["k"][:, t, :, None], x["beta"][:, t, :, None, None]
        residual = x["v"][:, t, :, None] - key @ other
        other = other * x["log_decay"][:, t, :, None, None].exp() + key.mT * (beta * residual)
    assert (state - other).norm() > 1e-2 * state.norm()


@BOTH
def test_full_write_is_recalled_and_repeating_it_changes_nothing(rule: Rule) -> None:
    x = make(3, group=1)
    x["q"] = x["k"] = x["k"][:, :1].repeat(1, 20, 1, 1)
    x["v"], x["beta"] = x["v"][:, :1].repeat(1, 20, 1, 1), torch.ones(2, 20, 2, dtype=torch.float64)
    out, state = rule(**x)
    _, once = rule(**cut(x, slice(0, 1)))
    torch.testing.assert_close(out, x["v"])
    torch.testing.assert_close(state, once)


@BOTH
def test_orthonormal_keys_are_all_recalled_in_any_order(rule: Rule) -> None:
    basis = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(0)).double())[0]
    values = torch.randn(12, 7, generator=torch.Generator().manual_seed(1)).double()
    for order in (torch.arange(12), torch.randperm(12, generator=torch.Generator().manual_seed(2))):
        keys = basis[order][None, :, None]
        _, state = rule(keys, keys, values[order][None, :, None], torch.ones(1, 12, 1).double())
        torch.testing.assert_close(basis @ state[0, 0], values)


@BOTH
@pytest.mark.parametrize("rate", [0.3, 1.0, 2.0])
def test_state_norm_never_grows_without_values(rule: Rule, rate: float) -> None:
    x = make(16)
    x["v"], x["beta"] = torch.zeros_like(x["v"]), torch.full_like(x["beta"], rate)
    norms = [x["state"].norm()]
    for t in range(16):
        norms.append(rule(**cut(x, slice(0, t + 1)))[1].norm())
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(norms))


@BOTH
def test_implicit_rate_minimises_the_proximal_objective(rule: Rule) -> None:
    """beta / (1 + beta |k|^2) zeroes the gradient of |S^T k - v|^2 / 2 + |S - S0|^2 / (2 beta)."""
    x = make(1, group=1)
    key, value, beta = 1.7 * x["k"], x["v"], x["beta"]
    _, state = rule(x["q"], key, value, beta / (1 + beta * key.square().sum(-1)), state=x["state"])
    residual = key[:, 0, :, None] @ state - value[:, 0, :, None]
    gradient = key[:, 0, :, None].mT * residual + (state - x["state"]) / beta[:, 0, :, None, None]
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


@BOTH
def test_state_perturbation_is_carried_by_the_householder_steps(rule: Rule) -> None:
    x = make(12)
    shift = torch.randn(x["state"].shape, generator=torch.Generator().manual_seed(3)).double()
    difference = rule(**{**x, "state": x["state"] + shift})[1] - rule(**x)[1]
    for t in range(12):
        key = x["k"][:, t, :, None]
        shift = shift - x["beta"][:, t, :, None, None] * key.mT @ (key @ shift)
    torch.testing.assert_close(difference, shift)


# The chunked form against the recurrence.


@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("tokens", [1, 5, 31, 32, 33, 63, 64, 65, 130])
def test_chunked_equals_recurrence(tokens: int, decay: float, docs: bool) -> None:
    x = make(tokens, decay=decay, docs=docs)
    agree(run(delta_rule, x), run(delta_rule_reference, x))


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 75, 200])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_chunk_size_changes_nothing(chunk: int, decay: float) -> None:
    x = make(75, decay=decay, docs=bool(decay))
    agree(run(delta_rule, x, chunk_tokens=chunk), run(delta_rule_reference, x))


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_several_segments_equal_recurrence(decay: float) -> None:
    x = make(600, decay=decay, docs=bool(decay), batch=1, heads=1, key_dim=4, value_dim=3)
    agree(run(delta_rule, x), run(delta_rule_reference, x))


def test_recomputed_segments_equal_kept_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make(600, decay=0.01, docs=True)
    kept = run(delta_rule, x)
    monkeypatch.setattr("fednl.memory.delta_chunks._RECOMPUTE_TOKENS", 0)
    again = run(delta_rule, x)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 80),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    key_dim=st.integers(1, 6),
    value_dim=st.integers(1, 6),
    chunk=st.integers(1, 40),
    decay=st.sampled_from([0.0, 0.01, 1.0, 50.0]),
    docs=st.booleans(),
    warm=st.booleans(),
    keys=st.sampled_from(["random", "correlated", "repeated"]),
    seed=st.integers(0, 1000),
)
def test_any_shape_equals_recurrence(tokens: int, chunk: int, **shape: Any) -> None:
    x = make(tokens, **shape)
    agree(run(delta_rule, x, chunk_tokens=chunk), run(delta_rule_reference, x))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_gradcheck(decay: float) -> None:
    x = make(11, batch=1, key_dim=3, value_dim=2, decay=decay, docs=bool(decay))
    x["beta"][:, 3] = 2e-6  # a token that writes nothing still has a gradient for its strength; differences need room
    names = [n for n in x if n in DIFFERENTIABLE]
    leaves = tuple(x[n].requires_grad_() for n in names)

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return delta_rule(**{**x, **dict(zip(names, tensors, strict=True))}, chunk_tokens=4)

    assert torch.autograd.gradcheck(function, leaves)
    x = {**{n: t.detach() for n, t in x.items()}, "beta": x["beta"].detach().clone()}
    x["beta"][:, 3] = 0.0
    agree(run(delta_rule, x, chunk_tokens=4), run(delta_rule_reference, x))


def test_backward_twice_gives_the_same_gradients() -> None:
    x = make(40, decay=0.1)
    leaves = [x[n].requires_grad_() for n in DIFFERENTIABLE]
    loss = delta_rule(**x)[0].square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_reach_only_what_asks_for_them() -> None:
    x = make(40, decay=0.1)
    everything = run(delta_rule, x)
    x["v"].requires_grad_()
    out, state = delta_rule(**x)
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=rng, dtype=torch.float64) for y in (out, state)]
    ((out * weights[0]).sum() + (state * weights[1]).sum()).backward()
    torch.testing.assert_close(x["v"].grad, everything["v"])
    assert x["k"].grad is None


# Float32.


@pytest.mark.parametrize("strength", [None, 1.0, 1.9, "to 1.9"])
@pytest.mark.parametrize("decay", [0.0, 0.01, 2.0])
@pytest.mark.parametrize("keys", ["random", "correlated", "repeated"])
@pytest.mark.parametrize("chunk", [32, 128])
def test_float32_is_close_to_the_float64_recurrence(
    chunk: int, keys: str, decay: float, strength: float | str | None
) -> None:
    x = make(
        300 if strength == 1.9 else 130, batch=1, key_dim=64, value_dim=64, decay=decay, docs=decay == 0.01, keys=keys
    )
    if strength == "to 1.9":
        x["beta"] = 1.9 * x["beta"] / x["beta"].max()
    elif isinstance(strength, float):
        x["beta"] = torch.full_like(x["beta"], strength)
    single = {n: y.float() if y.is_floating_point() else y for n, y in x.items()}
    # The oracle starts from the rounded numbers: what is measured is the computation.
    double = {n: y.double() if y.is_floating_point() else y for n, y in single.items()}
    oracle, got = run(delta_rule_reference, double), run(partial(delta_rule, chunk_tokens=chunk), single)
    for name, exact in oracle.items():
        error = (got[name].double() - exact).norm() / exact.norm()
        assert error <= (2e-6 if name in ("out", "new state") else 5e-6), f"{name}: {error:.1e}"


def test_a_strong_decay_does_not_blur_the_weak_ones_after_it() -> None:
    x = make(64, batch=1, decay=0.01)
    x["log_decay"][:, 3] = -300.0
    single = {n: y.float() for n, y in x.items()}
    oracle = delta_rule_reference(**{n: y.double() for n, y in single.items()})
    for got, exact in zip(delta_rule(**single), oracle, strict=True):
        assert (got - exact).norm() / exact.norm() <= 1e-6


@BOTH
def test_dtypes(rule: Rule) -> None:
    for tokens in (4, 40):
        x = {n: y.to(torch.bfloat16) for n, y in make(tokens, decay=0.1).items()}
        exact = rule(**{n: y.float() for n, y in x.items()})
        got = run(rule, x)
        assert got["out"].dtype == torch.bfloat16
        assert got["new state"].dtype == torch.float32
        assert all(got[n].dtype == torch.bfloat16 for n in DIFFERENTIABLE)
        torch.testing.assert_close(got["new state"], exact[1])
        torch.testing.assert_close(got["out"], exact[0].to(torch.bfloat16))
        out, state = rule(**{**x, "state": x["state"].double()})
        assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float64)


@BOTH
@pytest.mark.parametrize("tokens", [4, 40])
def test_autocast_changes_nothing(rule: Rule, tokens: int) -> None:
    def mixed(*args: Tensor, **named: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return rule(*args, **named)

    x = {n: y.float() for n, y in make(tokens, decay=0.1).items()}
    plain, cast = run(rule, x), run(mixed, x)
    assert all(torch.equal(plain[n], cast[n]) and plain[n].dtype == cast[n].dtype for n in plain)


def test_autocast_around_the_backward_pass_changes_nothing() -> None:
    x = {n: y.float() for n, y in make(40, decay=0.1).items()}
    plain = run(delta_rule, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(delta_rule, x)
    assert all(torch.equal(plain[n], cast[n]) for n in plain)


# Sequences: pieces, pads, documents, batches, heads.


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("pieces", [(1,) * 75, (1, 7, 33, 2, 32), (40, 35)])
def test_streaming_equals_one_pass_with_gradients(pieces: tuple[int, ...], decay: float) -> None:
    """The hand-off of the state is differentiable; pieces of one token are decoding."""

    def stream(state: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        outs, start = [], 0
        for size in pieces:
            out, state = delta_rule(**cut(inputs, slice(start, start + size)), state=state)
            outs.append(out)
            start += size
        return torch.cat(outs, 1), state

    x = make(75, decay=decay)
    agree(run(stream, x), run(delta_rule, x))


@settings(max_examples=25)
@given(cuts=st.sets(st.integers(0, 60), max_size=6), docs=st.booleans(), seed=st.integers(0, 1000))
def test_any_cut_equals_one_pass(cuts: set[int], docs: bool, seed: int) -> None:
    x = make(60, decay=0.1, seed=seed)
    state, outs = x["state"], []
    for start, stop in itertools.pairwise([0, *sorted(cuts), 60]):
        out, state = delta_rule(**{**cut(x, slice(start, stop)), "state": state}, chunk_tokens=16)
        outs.append(out)
    whole = delta_rule(**x, chunk_tokens=16)
    torch.testing.assert_close((torch.cat(outs, 1), state), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("where", ["left", "right", "interior"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_pads_are_no_ops(where: str, decay: float) -> None:
    x = make(60, decay=decay)
    keep = torch.ones(60, dtype=torch.bool)
    keep[{"left": slice(0, 11), "right": slice(49, 60), "interior": slice(20, 43)}[where]] = False
    padded = {n: y.clone() for n, y in x.items()}
    padded["beta"][:, ~keep] = 0.0
    if decay:
        padded["log_decay"][:, ~keep] = 0.0
    short = {n: y if n == "state" else y[:, keep] for n, y in x.items()}
    out, state = delta_rule(**padded)
    expected_out, expected_state = delta_rule(**short)
    torch.testing.assert_close(out[:, keep], expected_out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, expected_state, rtol=1e-10, atol=1e-10)


@BOTH
@pytest.mark.parametrize("tokens", [6, 70])
def test_zero_strength_leaves_the_state_bit_equal(rule: Rule, tokens: int) -> None:
    x = make(tokens)
    x["beta"] = torch.zeros_like(x["beta"])
    assert torch.equal(rule(**x)[1], x["state"])
    assert torch.equal(rule(**x, log_decay=torch.zeros_like(x["beta"]))[1], x["state"])


@BOTH
@pytest.mark.parametrize("tokens", [7, 70])
def test_documents_are_run_apart(rule: Rule, tokens: int) -> None:
    x = make(tokens, batch=1, decay=0.1)
    edges = [0, 2, 5, tokens] if tokens < 10 else [0, 5, 31, 32, tokens]
    ids = torch.cat([torch.full((b - a,), i % 2) for i, (a, b) in enumerate(itertools.pairwise(edges))])
    out, state = rule(**x, doc_ids=ids[None])
    warm = x.pop("state")
    for start, stop in itertools.pairwise(edges):
        part = cut(x, slice(start, stop))
        expected, last = delta_rule_reference(**part, state=warm if start == 0 else None)
        torch.testing.assert_close(out[:, start:stop], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("changed", [0, 20, 33, 64])
def test_causality_is_bit_exact(changed: int, decay: float) -> None:
    x = {n: y.float() for n, y in make(70, decay=decay).items()}
    before = delta_rule(**x)[0]
    for name in ("q", "k", "v", "beta", *(["log_decay"] if decay else [])):
        y = {n: z.clone() for n, z in x.items()}
        y[name][:, changed] *= 0.5
        after = delta_rule(**y)[0]
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.equal(before[:, changed:], after[:, changed:])


def test_batch_rows_do_not_see_each_other() -> None:
    x = make(70, batch=3, decay=0.1)
    together = delta_rule(**x)
    for row in range(3):
        alone = delta_rule(**{n: y[row : row + 1] for n, y in x.items()})
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a[0], b[row], rtol=1e-10, atol=1e-10)


@BOTH
def test_d15_grouped_heads_equal_repeated_keys_and_values(rule: Rule) -> None:
    x = make(40, group=3, decay=0.1)
    repeated = {n: y if n == "q" else y.repeat_interleave(3, dim=1 if n == "state" else 2) for n, y in x.items()}
    out, state = rule(**x)
    expected, expected_state = rule(**repeated)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, expected_state[:, ::3], rtol=1e-10, atol=1e-10)


def test_no_decay_equals_a_log_decay_of_zero() -> None:
    x = make(70)
    zero = torch.zeros_like(x["beta"])
    torch.testing.assert_close(delta_rule(**x, log_decay=zero), delta_rule(**x), rtol=1e-10, atol=1e-10)


@BOTH
@pytest.mark.parametrize("tokens", [7, 40])
def test_minus_infinite_log_decay_forgets_everything(rule: Rule, tokens: int) -> None:
    x = make(tokens, decay=0.1)
    x["log_decay"][:, 5] = -torch.inf
    results = run(rule, x)
    assert all(bool(y.isfinite().all()) for y in results.values())
    _, fresh = rule(**{**cut(x, slice(5, tokens)), "state": None})
    torch.testing.assert_close(results["new state"], fresh, rtol=1e-10, atol=1e-10)


# Edges: nothing modified, nothing kept, no tokens, wrong arguments.


@BOTH
@pytest.mark.parametrize("tokens", [0, 4, 70])
def test_arguments_are_not_modified(rule: Rule, tokens: int) -> None:
    x = make(tokens, decay=0.1, docs=True)
    copies = {n: y.clone() for n, y in x.items()}
    run(rule, x)
    with torch.no_grad():
        _, state = rule(**x)
    state.fill_(0.0)
    assert all(torch.equal(x[n], copies[n]) for n in x)


@BOTH
def test_no_tokens_give_no_answers_and_the_same_state(rule: Rule) -> None:
    x = make(0, decay=0.1, docs=True)
    out, state = rule(**x)
    assert out.shape == (2, 0, 4, 5)
    assert torch.equal(state, x["state"])
    assert torch.equal(rule(**{**x, "state": None})[1], torch.zeros_like(state))


@BOTH
def test_empty_batch(rule: Rule) -> None:
    out, state = rule(**make(40, batch=0, decay=0.1))
    assert (out.shape, state.shape) == ((0, 40, 4, 5), (0, 2, 6, 5))


@pytest.mark.parametrize("tokens", [4, 70])
def test_no_grad_keeps_no_graph(tokens: int) -> None:
    x = make(tokens)
    plain = delta_rule(**x)
    leaves = {n: y.clone().requires_grad_() for n, y in x.items()}
    with torch.no_grad():
        quiet = delta_rule(**leaves)
    assert not any(y.requires_grad for y in quiet)
    assert all(torch.equal(a, b) for a, b in zip(plain, quiet, strict=True))


def test_tensors_may_have_any_strides() -> None:
    x = make(70, decay=0.1)
    swap = {n: (-2, -1) if n == "state" else (1, 2) for n in x}
    views = {n: y.transpose(*swap[n]).contiguous().transpose(*swap[n]) for n, y in x.items()}
    agree(run(delta_rule, views), run(delta_rule, x))
    one_value = {**x, "v": x["v"][:, :1].expand_as(x["v"])}
    agree(run(delta_rule, one_value), run(delta_rule_reference, one_value))


def test_state_size_does_not_depend_on_the_number_of_tokens() -> None:
    sizes = {delta_rule(**make(tokens))[1].untyped_storage().nbytes() for tokens in (1, 40, 700)}
    assert sizes == {2 * 2 * 6 * 5 * 8}


def test_work_and_memory_grow_linearly() -> None:
    """Both passes, on lengths that recompute: doubling the tokens doubles the work; little is kept."""
    work, kept = [], []
    for tokens in (2560, 5120):
        x = make(tokens, batch=1, heads=1, decay=0.1)
        leaves = [y.requires_grad_() for y in x.values()]
        saved: dict[int, int] = {}

        def pack(y: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
            return y

        with Work() as count, torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            out, state = delta_rule(**x)
            torch.autograd.grad(out.sum() + state.sum(), leaves)
        work.append((count.operations, count.numbers))
        kept.append(sum(saved.values()) / sum(y.untyped_storage().nbytes() for y in leaves))
    assert work[1][0] <= 2.1 * work[0][0]
    assert work[1][1] <= 2.1 * work[0][1]
    assert max(kept) <= 1.3


@BOTH
@pytest.mark.parametrize("tokens", [4, 40])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": (2, -1, 3, 6)},
            r"the 2 heads of k \(2, \d+, 2, 6\) do not divide those of q \(2, \d+, 3, 6\)",
        ),
        ({"q": (2, -1, 4, 7)}, r"q has shape \(2, \d+, 4, 7\), but k .* call for \(2, \d+, 4, 6\)"),
        ({"q": (2, -1, 24)}, r"q must be \[batch, tokens, heads, dim\], not \(2, \d+, 24\)"),
        ({"k": (2, -1, 12)}, r"k must be \[batch, tokens, heads, dim\]"),
        ({"v": (2, -1, 1, 5)}, r"v has shape \(2, \d+, 1, 5\), but .* call for \(2, \d+, 2, 5\)"),
        ({"beta": (2, -1, 4)}, r"beta has shape \(2, \d+, 4\)"),
        ({"log_decay": (2, -1, 1)}, r"log_decay has shape \(2, \d+, 1\)"),
        ({"state": (2, 2, 5, 6)}, r"state has shape \(2, 2, 5, 6\), but .* call for \(2, 2, 6, 5\)"),
        ({"doc_ids": (2, 1)}, r"doc_ids has shape \(2, 1\)"),
    ],
)
def test_wrong_shapes_are_named(rule: Rule, tokens: int, changes: dict[str, tuple[int, ...]], message: str) -> None:
    x = make(tokens, decay=0.1, docs=True)
    for name, shape in changes.items():
        x[name] = torch.zeros([tokens if n == -1 else n for n in shape], dtype=x[name].dtype)
    with pytest.raises(ValueError, match=message):
        rule(**x)


@BOTH
def test_wrong_dtypes_devices_and_chunks_are_named(rule: Rule) -> None:
    x = make(40, docs=True)
    with pytest.raises(ValueError, match=r"doc_ids must be int64, not torch\.float64"):
        rule(**{**x, "doc_ids": x["doc_ids"].double()})
    with pytest.raises(ValueError, match=r"v must be floating-point, not torch\.int64"):
        rule(**{**x, "v": x["v"].long()})
    with pytest.raises(ValueError, match="beta is on device meta, but k is on cpu"):
        rule(**{**x, "beta": x["beta"].to("meta")})
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, not 0"):
        delta_rule(**x, chunk_tokens=0)
