"""Every update rule against its reference, and every reference against what its equations promise.

The oracles are numbered: chunks (1), hand-off (2), decoding (3), no strength (4), full writes (5), orthonormal
keys (6), norms (7), the proximal objective (8), perturbations (9), gradcheck (10), causality (11), pads (12),
rows (13), identities between rules (14, 15), sizes (16), grouped heads (17).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from fednl.memory.operator import delta_rule, delta_rule_reference
from fednl.memory.rules_chunked import (
    decay_separate_rule,
    delta_product_rule,
    hebbian_rule,
    implicit_delta_rule,
    titans_rule,
)
from fednl.memory.rules_reference import (
    decay_separate_reference,
    delta_product_reference,
    hebbian_reference,
    implicit_delta_reference,
    titans_reference,
)
from fednl.memory.update_rules import RULES, function
from memory.work import Work

Inputs = dict[str, Any]
Results = dict[str, Tensor]
CARRIED = ("state", "momentum")
HEADS, GROUP, KEY_DIM, VALUE_DIM, WRITES = 2, 2, 6, 5, 3
# Rules with an inner model have arguments of their own: test_ttt.py.
NAMES = sorted(name for name, rule in RULES.items() if not rule.inner)
EVERY = pytest.mark.parametrize("name", NAMES)
DECAYING = [name for name, rule in sorted(RULES.items()) if rule.decays]


def make(name: str, tokens: int, *, batch: int = 2, seed: int = 0, decay: float = 0.1, keep: bool = False) -> Inputs:
    """What a rule takes, in float64, with unit keys, strengths in (0, 1) and a warm start."""
    rng, rule = torch.Generator().manual_seed(seed), RULES[name]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    writes = (batch, tokens, WRITES, HEADS) if rule.several else (batch, tokens, HEADS)
    out: Inputs = {
        "q": normalize(draw(batch, tokens, HEADS * GROUP, KEY_DIM), dim=-1),
        "k": normalize(draw(*writes, KEY_DIM), dim=-1),
        "v": draw(*writes, VALUE_DIM),
        "beta": torch.sigmoid(draw(*writes)),
        "state": draw(batch, HEADS, KEY_DIM, VALUE_DIM),
    }
    if rule.decays:
        out["log_decay"] = -decay * softplus(draw(batch, tokens, HEADS))
    if rule.momentum:
        out["log_momentum"] = -softplus(draw(batch, tokens, HEADS))
        out["momentum"] = draw(batch, HEADS, KEY_DIM, VALUE_DIM)
        if keep:
            out["keep"] = torch.rand(batch, tokens, generator=rng) > 0.3
    return out


def fast(name: str) -> Callable[..., Any]:
    return function(RULES[name].fast)


def reference(name: str) -> Callable[..., Any]:
    return function(RULES[name].reference)


def run(rule: Callable[..., Any], inputs: Inputs, **options: Any) -> Results:
    """Answers, what is carried on, and every gradient of a random functional of all."""
    leaves = {n: x.detach().clone().requires_grad_() if x.is_floating_point() else x for n, x in inputs.items()}
    results = rule(**leaves, **options)
    rng = torch.Generator().manual_seed(1)
    total = sum((y * torch.randn(y.shape, generator=rng, dtype=torch.float64)).sum() for y in results)
    names = [n for n in leaves if leaves[n].requires_grad]
    grads = torch.autograd.grad(total, [leaves[n] for n in names], materialize_grads=True)
    out = {"out": results[0].detach(), **{f"new {n}": y.detach() for n, y in zip(CARRIED, results[1:], strict=False)}}
    return {**out, **dict(zip(names, grads, strict=True))}


def cut(inputs: Inputs, span: slice) -> Inputs:
    return {n: x if n in CARRIED else x[:, span] for n, x in inputs.items()}


def agree(a: Results, b: Results, tolerance: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=f"{name} differs")


def at(x: Tensor, b: int, t: int, h: int) -> Tensor:
    return x[b, t, ..., h, :] if x.ndim > 3 else x[b, t, ..., h]


# The references against the equations, in the papers' own layout, S [value_dim, key_dim], head by head.


@EVERY
def test_reference_is_the_published_recurrence(name: str) -> None:
    x, eye = make(name, 9), torch.eye(KEY_DIM, dtype=torch.float64)
    out, state, *rest = reference(name)(**x)
    for b, h in itertools.product(range(2), range(HEADS)):
        memory = x["state"][b, h].T
        push = x["momentum"][b, h].T if "momentum" in x else None
        for t in range(9):
            key, value, beta = (at(x[n], b, t, h) for n in ("k", "v", "beta"))
            if name not in ("delta-product", "gated-delta-product"):
                beta = x["beta"][b, t, h]
                square, outer = torch.outer(key, key), torch.outer(value, key)
            factor = x["log_decay"][b, t, h].exp() if "log_decay" in x else 1.0
            if name == "hebbian":
                memory = memory + beta * outer
            elif name == "implicit-delta":  # S (I / beta + k k^T) = S_old / beta + v k^T zeroes the gradient
                memory = (memory / beta + outer) @ torch.linalg.inv(eye / beta + square)
            elif name in ("delta", "gated-delta"):
                memory = factor * memory @ (eye - beta * square) + beta * outer
            elif name == "decay-separate":
                memory = memory @ (factor * eye - beta * square) + beta * outer
            elif name == "titans":
                assert push is not None
                theta, gradient = beta / 2, 2 * (memory @ square - outer)
                push = x["log_momentum"][b, t, h].exp() * push - theta * gradient
                memory = factor * memory + push
            else:
                memory = factor * memory
                for j in range(WRITES):
                    k, v, strength = x["k"][b, t, j, h], x["v"][b, t, j, h], x["beta"][b, t, j, h]
                    memory = memory @ (eye - strength * torch.outer(k, k)) + strength * torch.outer(v, k)
            for query_head in (2 * h, 2 * h + 1):
                torch.testing.assert_close(out[b, t, query_head], memory @ x["q"][b, t, query_head])
        torch.testing.assert_close(state[b, h], memory.T)
        if push is not None:
            torch.testing.assert_close(rest[0][b, h], push.T)


# 1, 10: the fast forms against the references.


@EVERY
@pytest.mark.parametrize("tokens", [1, 8, 9, 31, 33, 64, 75])
def test_oracle_1_fast_equals_reference_in_values_and_gradients(name: str, tokens: int) -> None:
    x = make(name, tokens, keep=True)
    agree(run(fast(name), x), run(reference(name), x))


@EVERY
@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 75, 200])
def test_oracle_1_chunk_size_changes_nothing(name: str, chunk: int) -> None:
    x = make(name, 75, keep=True)
    agree(run(fast(name), x, chunk_tokens=chunk), run(reference(name), x))


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize("decay", [1e-3, 3.0, 60.0])
def test_oracle_1_weak_and_strong_decays(name: str, decay: float) -> None:
    x = make(name, 75, decay=decay)
    agree(run(fast(name), x), run(reference(name), x))


@EVERY
def test_oracle_10_gradcheck(name: str) -> None:
    x = make(name, 11, batch=1, keep=True)
    names = [n for n in x if x[n].is_floating_point()]

    def rule(*tensors: Tensor) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = fast(name)(**{**x, **dict(zip(names, tensors, strict=True))}, chunk_tokens=4)
        return result

    assert torch.autograd.gradcheck(rule, tuple(x[n].requires_grad_() for n in names))


@EVERY
@pytest.mark.parametrize("hard", [False, True])
def test_float32_is_close_to_the_float64_reference(name: str, hard: bool) -> None:
    made = make(name, 130, keep=True)
    if hard:  # one key again and again, written as strongly as the rule's layer may
        made["k"] = made["k"][:, :1].expand_as(made["k"]).clone()
        made["beta"] = torch.full_like(made["beta"], 1.9 if RULES[name].widest == 2 else 1.0)
    x = {n: y.float() if y.is_floating_point() else y for n, y in made.items()}
    exact = run(reference(name), {n: y.double() if y.is_floating_point() else y for n, y in x.items()})
    for part, got in run(fast(name), x).items():
        error = (got.double() - exact[part]).norm() / exact[part].norm()
        assert error <= (2e-6 if part == "out" or part.startswith("new ") else 5e-6), f"{part}: {error:.1e}"


# 2, 3, 11, 13: pieces, causality, rows.


@EVERY
@pytest.mark.parametrize("pieces", [(1,) * 40, (1, 7, 20, 12)])
def test_oracle_2_and_3_pieces_and_single_tokens_equal_one_pass_with_gradients(name: str, pieces: tuple[int]) -> None:
    def stream(**inputs: Tensor) -> tuple[Tensor, ...]:
        carried = {n: inputs.pop(n) for n in CARRIED if n in inputs}
        outs, start = [], 0
        for size in pieces:
            out, *after = fast(name)(**cut(inputs, slice(start, start + size)), **carried)
            carried = dict(zip(CARRIED, after, strict=False))
            outs.append(out)
            start += size
        return (torch.cat(outs, 1), *carried.values())

    x = make(name, 40, keep=True)
    agree(run(stream, x), run(fast(name), x))


@EVERY
@pytest.mark.parametrize("changed", [0, 20, 33])
def test_oracle_11_what_comes_later_changes_nothing_before_it(name: str, changed: int) -> None:
    x = {n: y.float() for n, y in make(name, 40).items()}
    before = fast(name)(**x)[0]
    for part in x.keys() - set(CARRIED):
        y = {n: z.clone() for n, z in x.items()}
        y[part][:, changed] *= 0.5
        after = fast(name)(**y)[0]
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.equal(before[:, changed:], after[:, changed:])


@EVERY
def test_oracle_13_rows_do_not_see_each_other(name: str) -> None:
    x = make(name, 40, batch=3)
    together = fast(name)(**x)
    for row in range(3):
        alone = fast(name)(**{n: y[row : row + 1] for n, y in x.items()})
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a[0], b[row], rtol=1e-10, atol=1e-10)


# 4, 12, 16, 17: pads, sizes, heads.


@EVERY
@pytest.mark.parametrize("tokens", [6, 40])
def test_oracle_4_no_strength_and_no_decay_leave_the_state_bit_equal(name: str, tokens: int) -> None:
    x = make(name, tokens)
    for part in ("beta", "log_decay", "log_momentum", "momentum"):
        if part in x:
            x[part] = torch.zeros_like(x[part])
    for rule in (fast(name), reference(name)):
        assert torch.equal(rule(**x)[1], x["state"])


@EVERY
@pytest.mark.parametrize("where", ["left", "right", "interior"])
def test_oracle_12_pads_leave_everything_as_if_they_were_not_there(name: str, where: str) -> None:
    x, keep = make(name, 60), torch.ones(60, dtype=torch.bool)
    keep[{"left": slice(0, 11), "right": slice(49, 60), "interior": slice(20, 43)}[where]] = False
    padded = {n: y.clone() for n, y in x.items()}
    if RULES[name].momentum:
        padded["keep"] = keep.expand(2, -1)
    else:
        padded["beta"][:, ~keep] = 0.0
        if "log_decay" in x:
            padded["log_decay"][:, ~keep] = 0.0
    short = {n: y if n in CARRIED else y[:, keep] for n, y in x.items()}
    out, *after = fast(name)(**padded)
    expected_out, *expected = fast(name)(**short)
    torch.testing.assert_close((out[:, keep], *after), (expected_out, *expected), rtol=1e-10, atol=1e-10)


@EVERY
def test_oracle_16_what_is_carried_does_not_grow(name: str) -> None:
    for tokens in (1, 40, 300):
        for carried in fast(name)(**make(name, tokens))[1:]:
            assert carried.untyped_storage().nbytes() == 2 * HEADS * KEY_DIM * VALUE_DIM * 8


@EVERY
def test_oracle_17_grouped_heads_equal_repeated_keys_and_values(name: str) -> None:
    x = make(name, 40)
    head = {"k": -2, "v": -2, "beta": -1, "log_decay": -1, "log_momentum": -1, "state": 1, "momentum": 1}
    repeated = {n: y if n == "q" else y.repeat_interleave(GROUP, dim=head[n]) for n, y in x.items()}
    out, *after = fast(name)(**x)
    expected_out, *expected = fast(name)(**repeated)
    torch.testing.assert_close(out, expected_out, rtol=1e-10, atol=1e-10)
    for a, b in zip(after, expected, strict=True):
        torch.testing.assert_close(a, b[:, ::GROUP], rtol=1e-10, atol=1e-10)


@EVERY
def test_work_grows_linearly_in_both_passes(name: str) -> None:
    work = []
    for tokens in (768, 1536):  # both recompute with three writes a token, and neither with one
        x = {n: y.requires_grad_() for n, y in make(name, tokens, batch=1).items()}
        with Work() as count:
            torch.autograd.grad(sum(y.sum() for y in fast(name)(**x)), list(x.values()), materialize_grads=True)
        work.append((count.operations, count.numbers))
    assert work[1][0] <= 2.1 * work[0][0] and work[1][1] <= 2.1 * work[0][1]


# 5 to 9: what a write does.


@pytest.mark.parametrize("name", ["delta", "gated-delta", "decay-separate", "titans"])
def test_oracle_5_a_full_write_is_recalled_and_repeating_it_changes_nothing(name: str) -> None:
    x = make(name, 20)
    x["k"], x["v"] = (x[n][:, :1].repeat(1, 20, 1, 1) for n in ("k", "v"))
    x["q"], x["beta"] = x["k"], torch.ones_like(x["beta"])
    if "log_decay" in x:
        x["log_decay"] = torch.zeros_like(x["log_decay"])
    if "momentum" in x:
        x["momentum"], x["log_momentum"] = torch.zeros_like(x["momentum"]), torch.full_like(x["beta"], -torch.inf)
    out, *after = fast(name)(**x)
    torch.testing.assert_close(out, x["v"])
    torch.testing.assert_close(after[0], fast(name)(**cut(x, slice(0, 1)))[1])


def test_oracle_5_the_hebbian_rule_doubles_what_is_written_twice() -> None:
    x = make("hebbian", 2)
    x["k"], x["v"], x["beta"] = (x[n][:, :1].repeat_interleave(2, 1) for n in ("k", "v", "beta"))
    x["state"] = torch.zeros_like(x["state"])
    _, twice = hebbian_rule(**x)
    torch.testing.assert_close(twice, 2 * hebbian_rule(**cut(x, slice(0, 1)))[1])


@pytest.mark.parametrize("rule", [delta_rule, hebbian_rule])
def test_oracle_6_orthonormal_keys_are_recalled_in_any_order(rule: Callable[..., tuple[Tensor, Tensor]]) -> None:
    basis = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(0)).double())[0]
    values = torch.randn(12, 7, generator=torch.Generator().manual_seed(1)).double()
    for order in (torch.arange(12), torch.randperm(12, generator=torch.Generator().manual_seed(2))):
        keys = basis[order][None, :, None]
        _, state = rule(keys, keys, values[order][None, :, None], torch.ones(1, 12, 1).double())
        torch.testing.assert_close(basis @ state[0, 0], values)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("hebbian", "titans")])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_oracle_7_the_norm_never_grows_without_values_within_the_widest_range(name: str, share: float) -> None:
    x = make(name, 16, decay=2.0)
    x["v"], x["beta"] = torch.zeros_like(x["v"]), torch.full_like(x["beta"], share * RULES[name].widest)
    norms = [x["state"].norm()]
    for t in range(16):
        norms.append(fast(name)(**cut(x, slice(0, t + 1)))[1].norm())
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(norms))


def test_oracle_7_beyond_its_range_decay_separate_would_amplify_and_is_refused() -> None:
    """Why its `widest` is 1: along its key a write multiplies the state by a - beta, here by -1.4."""
    x = make("decay-separate", 20)
    x["beta"], x["log_decay"] = torch.full_like(x["beta"], 1.9), torch.full_like(x["log_decay"], -0.7)
    with pytest.raises(ValueError, match=r"beta must be at most 1\.5 for a key of length 1, but is 1\.9"):
        decay_separate_rule(**x)


def swing(eta: float, share: float, kind: str, decay: float = 0.0) -> tuple[float, float]:
    """Titans without values on unit keys, beta = share * (1 - eta)^2: growth of the state's norm, largest and last."""
    rng, tokens = torch.Generator().manual_seed(0), 1500
    keys = normalize(torch.randn(1, tokens, 1, 4, generator=rng, dtype=torch.float64), dim=-1)
    if kind == "two in turn":
        keys = keys[:, torch.arange(tokens) // 4 % 2]
    numbers = torch.full((1, tokens, 1), share * (1 - eta) ** 2, dtype=torch.float64)
    start = torch.eye(4, dtype=torch.float64)[None, None]
    noise = torch.rand(numbers.shape, generator=rng, dtype=torch.float64)
    logs = {"log_decay": -decay * noise, "log_momentum": torch.full_like(numbers, eta).log()}
    norms = [start.norm()]
    state, momentum = start, None
    for piece in range(0, tokens, 50):
        span = slice(piece, piece + 50)
        inputs = {"q": keys, "k": keys, "v": torch.zeros_like(keys), "beta": numbers, **logs}
        _, state, momentum = titans_rule(**cut(inputs, span), state=state, momentum=momentum)
        norms.append(state.norm())
    return float(max(norms) / norms[0]), float(norms[-1] / norms[0])


@pytest.mark.parametrize("kind", ["random", "two in turn"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("eta", [0.1, 0.5, 0.9, 0.99])
def test_oracle_7_titans_never_swings_up_at_the_strengths_a_layer_gives(eta: float, decay: float, kind: str) -> None:
    most, last = swing(eta, 1.0, kind, decay)
    assert most <= 1.0 and last < 1.0


def test_oracle_7_titans_swings_up_at_full_strength() -> None:
    """Why a layer scales its strengths: the published rule, momentum 0.7, strength 1, unit keys."""
    assert swing(0.7, 1 / 0.3**2, "random")[1] > 1e6


@pytest.mark.parametrize("eta", [0.05, 0.3, 0.9])
def test_oracle_7_the_bound_of_titans_holds_for_every_key(eta: float) -> None:
    """In the documented norm no step of any strength up to the bound grows, along its key or across it."""
    c = eta / (1 - eta)
    form = torch.tensor([[1.0, c], [c, c * c + c / (1 - eta)]], dtype=torch.float64)
    for beta in torch.linspace(0, 2 * (1 - eta) ** 2 / (1 + eta), 21, dtype=torch.float64):
        step = torch.tensor([[1 - beta, eta], [-beta, eta]], dtype=torch.float64)
        assert torch.linalg.eigvalsh(step.T @ form @ step - form).max() <= 1e-12


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_oracle_8_the_implicit_write_zeroes_the_gradient_of_the_proximal_objective(scale: float) -> None:
    x = make("implicit-delta", 1)
    x["k"], x["beta"] = scale * x["k"], 5 * x["beta"]
    _, state = implicit_delta_rule(**x)
    state = state.detach().requires_grad_()
    recalled = x["k"][:, 0].unsqueeze(-2) @ state
    near = (state - x["state"]).square().sum((-2, -1)) / (2 * x["beta"][:, 0])
    objective = (recalled.squeeze(-2) - x["v"][:, 0]).square().sum() / 2 + near.sum()
    (gradient,) = torch.autograd.grad(objective, state)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-11, rtol=0)


@EVERY
def test_oracle_9_a_perturbation_of_the_state_is_carried_by_the_transitions(name: str) -> None:
    x = make(name, 12)
    shift = torch.randn(x["state"].shape, generator=torch.Generator().manual_seed(3)).double()
    difference = fast(name)(**{**x, "state": x["state"] + shift})[1] - fast(name)(**x)[1]
    push = torch.zeros_like(shift)
    for t in range(12):
        keys = x["k"][:, t, ..., :, None, :].unbind(1) if RULES[name].several else [x["k"][:, t, :, None]]
        betas = x["beta"][:, t, ..., None, None].unbind(1) if RULES[name].several else [x["beta"][:, t, :, None, None]]
        factor = x["log_decay"][:, t, :, None, None].exp() if "log_decay" in x else 1.0
        if name in ("decay-separate", "titans"):
            eta = x["log_momentum"][:, t, :, None, None].exp() if name == "titans" else 0.0
            push = eta * push - betas[0] * keys[0].mT @ (keys[0] @ shift)
            shift = factor * shift + push
            continue
        shift = factor * shift
        for key, beta in zip(keys, betas, strict=True):
            rate = {"hebbian": 0 * beta, "implicit-delta": beta / (1 + beta)}.get(name, beta)
            shift = shift - rate * key.mT @ (key @ shift)
    torch.testing.assert_close(difference, shift)


# 14, 15: rules that are other rules.


def plain(x: Inputs) -> Inputs:
    """What the delta rule takes of it."""
    return {n: y for n, y in x.items() if n in ("q", "k", "v", "beta", "state")}


@pytest.mark.parametrize("name", ["gated-delta", "decay-separate"])
def test_oracle_14_without_decay_a_gated_rule_is_the_delta_rule(name: str) -> None:
    x = make(name, 70)
    x["log_decay"] = torch.zeros_like(x["log_decay"])
    torch.testing.assert_close(fast(name)(**x), delta_rule(**plain(x)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decay", [False, True])
def test_oracle_14_one_write_a_token_is_the_delta_rule(decay: bool) -> None:
    x = make("gated-delta", 70)
    if not decay:
        del x["log_decay"]
    one = {n: y.unsqueeze(2) if n in ("k", "v", "beta") else y for n, y in x.items()}
    for rule in (delta_product_rule, delta_product_reference):
        torch.testing.assert_close(rule(**one), delta_rule(**x), rtol=1e-10, atol=1e-10)


def test_oracle_14_titans_without_momentum_and_decay_is_the_delta_rule() -> None:
    x = make("titans", 70)
    x["log_decay"], x["log_momentum"] = torch.zeros_like(x["beta"]), torch.full_like(x["beta"], -torch.inf)
    torch.testing.assert_close(titans_rule(**x)[:2], delta_rule(**plain(x)), rtol=1e-10, atol=1e-10)


def test_titans_without_momentum_is_decay_separate() -> None:
    x = make("titans", 70)
    x["log_momentum"] = torch.full_like(x["beta"], -torch.inf)
    expected = decay_separate_rule(**plain(x), log_decay=x["log_decay"])
    torch.testing.assert_close(titans_rule(**x)[:2], expected, rtol=1e-10, atol=1e-10)


def test_the_two_gated_rules_differ() -> None:
    """By 4% of the state's norm or more where the factor is e^-0.15 on average, as measured elsewhere."""
    x = make("gated-delta", 64)
    x["log_decay"] = -0.3 * torch.rand(x["beta"].shape, generator=torch.Generator().manual_seed(5)).double()
    one, other = delta_rule(**x)[1], decay_separate_rule(**x)[1]
    assert (one - other).norm() > 0.02 * one.norm()


def test_decay_separate_is_gated_delta_on_other_numbers() -> None:
    """a S (I - b k k^T) + b v k^T with b / a and a v in place of b and v: their transitions are the same family."""
    x = make("decay-separate", 70)
    factor = x["log_decay"].exp()
    moved = {**x, "beta": x["beta"] / factor, "v": x["v"] * factor.unsqueeze(-1)}
    torch.testing.assert_close(decay_separate_rule(**x), delta_rule(**moved), rtol=1e-9, atol=1e-9)


def test_oracle_15_two_writes_under_one_key_are_one_of_their_joint_strength() -> None:
    x = make("delta", 40)
    rng = torch.Generator().manual_seed(4)
    betas = torch.rand(2, 40, 2, HEADS, generator=rng, dtype=torch.float64)
    twice = {n: x[n].unsqueeze(2).expand(-1, -1, 2, -1, -1) for n in ("k", "v")}
    joint = 1 - (1 - betas).prod(2)
    expected = delta_rule(**{**x, "beta": joint})
    torch.testing.assert_close(delta_product_rule(**{**x, **twice, "beta": betas}), expected, rtol=1e-10, atol=1e-10)


def test_the_implicit_rule_is_the_delta_rule_at_another_strength() -> None:
    x = make("implicit-delta", 40)
    expected = delta_rule(**{**x, "beta": x["beta"] / (1 + x["beta"])})
    torch.testing.assert_close(implicit_delta_rule(**x), expected, rtol=1e-10, atol=1e-10)


# Memory as an optimiser: in-context linear regression.


def regression(tokens: int = 50, rate: float = 0.3) -> tuple[Tensor, Tensor, Inputs]:
    """Points of a linear map, and the same as a sequence: x is the key, y the value, asked for at the next x."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, KEY_DIM, generator=rng, dtype=torch.float64) / KEY_DIM**0.5
    y = x @ torch.randn(KEY_DIM, VALUE_DIM, generator=rng, dtype=torch.float64)
    sequence = {
        "q": x.roll(-1, 0)[None, :, None],
        "k": x[None, :, None],
        "v": y[None, :, None],
        "beta": torch.full((1, tokens, 1), rate, dtype=torch.float64),
    }
    return x, y, sequence


def descend(x: Tensor, y: Tensor, shrink: float = 1.0, **options: float) -> tuple[Tensor, Tensor]:
    """Online gradient descent by torch on |x W - y|^2 / 2: each next point's prediction, and W at the end."""
    weight = torch.zeros(KEY_DIM, VALUE_DIM, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([weight], **options)
    predictions = []
    for t in range(len(x)):
        optimiser.zero_grad()
        ((x[t] @ weight - y[t]).square().sum() / 2).backward()
        with torch.no_grad():
            weight.mul_(shrink)  # the gradient is of the weight before it shrinks
        optimiser.step()
        predictions.append((x[(t + 1) % len(x)] @ weight).detach())
    return torch.stack(predictions), weight.detach()


@pytest.mark.parametrize("rule", [delta_rule, delta_rule_reference])
def test_delta_is_online_gradient_descent_on_in_context_linear_regression(rule: Callable[..., Any]) -> None:
    x, y, sequence = regression()
    predictions, weight = descend(x, y, lr=0.3)
    out, state = rule(**sequence)
    torch.testing.assert_close((out[0, :, 0], state[0, 0]), (predictions, weight), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", [decay_separate_rule, decay_separate_reference])
def test_decay_separate_is_online_gradient_descent_with_decoupled_weight_decay(rule: Callable[..., Any]) -> None:
    x, y, sequence = regression()
    predictions, weight = descend(x, y, lr=0.3, shrink=0.95)
    out, state = rule(**sequence, log_decay=torch.full_like(sequence["beta"], 0.95).log())
    torch.testing.assert_close((out[0, :, 0], state[0, 0]), (predictions, weight), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", [titans_rule, titans_reference])
def test_titans_is_online_gradient_descent_with_momentum_and_weight_decay(rule: Callable[..., Any]) -> None:
    x, y, sequence = regression()
    predictions, weight = descend(x, y, lr=0.3, momentum=0.8, shrink=0.95)
    factors = {n: torch.full_like(sequence["beta"], f).log() for n, f in (("log_decay", 0.95), ("log_momentum", 0.8))}
    out, state, _ = rule(**sequence, **factors)
    torch.testing.assert_close((out[0, :, 0], state[0, 0]), (predictions, weight), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", [hebbian_rule, hebbian_reference])
def test_hebbian_is_one_step_of_gradient_descent_on_all_points_at_once(rule: Callable[..., Any]) -> None:
    x, y, sequence = regression()
    weight = torch.zeros(KEY_DIM, VALUE_DIM, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((x @ weight - y).square().sum() / 2, weight)
    torch.testing.assert_close(rule(**sequence)[1][0, 0], -0.3 * gradient)


@pytest.mark.parametrize("rule", [implicit_delta_rule, implicit_delta_reference])
def test_an_endless_implicit_strength_fits_every_point_exactly(rule: Callable[..., Any]) -> None:
    """The Kaczmarz method: with d points of a linear map written again and again, the map itself is found."""
    x, y, sequence = regression(tokens=KEY_DIM, rate=1e9)
    _, state = rule(**{n: t.repeat(1, 400, *[1] * (t.ndim - 2)) for n, t in sequence.items()})
    torch.testing.assert_close(x @ state[0, 0], y, atol=1e-4, rtol=1e-4)


# What the arguments may be.


@EVERY
@pytest.mark.parametrize("tokens", [0, 4, 40])
def test_arguments_are_not_modified_and_no_tokens_do_nothing(name: str, tokens: int) -> None:
    x = make(name, tokens, keep=True)
    copies = {n: y.clone() for n, y in x.items()}
    run(fast(name), x)
    with torch.no_grad():
        out, *carried = fast(name)(**x)
    if tokens == 0:
        assert out.shape == (2, 0, 4, VALUE_DIM)
        assert all(torch.equal(after, x[n]) for n, after in zip(CARRIED, carried, strict=False))
    for after in carried:
        after.fill_(0.0)
    assert all(torch.equal(x[n], copies[n]) for n in x)


@EVERY
@pytest.mark.parametrize("tokens", [4, 40])
def test_dtypes_and_autocast(name: str, tokens: int) -> None:
    x = {n: y.to(torch.bfloat16) for n, y in make(name, tokens).items()}
    exact = fast(name)(**{n: y.float() for n, y in x.items()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, *carried = fast(name)(**x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact[0].to(torch.bfloat16))
    for got, wanted in zip(carried, exact[1:], strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


OURS = pytest.mark.parametrize("name", [name for name in NAMES if "operator" not in RULES[name].fast])


@OURS
@pytest.mark.parametrize("tokens", [4, 40])
def test_numbers_outside_their_range_are_named(name: str, tokens: int) -> None:
    x = make(name, tokens)
    for rule in (fast(name), reference(name)):
        with pytest.raises(ValueError, match=r"beta must be at least 0, but its least is -0\.5"):
            rule(**{**x, "beta": torch.full_like(x["beta"], -0.5)})
        for part in ("log_decay", "log_momentum"):
            if part in x:
                with pytest.raises(ValueError, match=rf"{part} must be at most 0, but its largest is 0\.1"):
                    rule(**{**x, part: torch.full_like(x[part], 0.1)})


@OURS
@pytest.mark.parametrize("tokens", [4, 40])
def test_wrong_shapes_and_kinds_are_named(name: str, tokens: int) -> None:
    x = make(name, tokens, keep=True)
    for rule in (fast(name), reference(name)):
        for part in x.keys() - {"q", "k"}:
            with pytest.raises(ValueError, match=rf"^{part} (has shape|is|must be)"):
                rule(**{**x, part: x[part][:1]})
        with pytest.raises(ValueError, match=r"^k must be"):
            rule(**{**x, "k": x["k"][:, 0]})
        if "keep" in x:
            with pytest.raises(ValueError, match=r"keep must be bool, not torch\.int64"):
                rule(**{**x, "keep": x["keep"].long()})
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, not 0"):
        fast(name)(**x, chunk_tokens=0)
