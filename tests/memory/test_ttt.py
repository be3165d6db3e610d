"""TTT-Linear against torch's own gradients of its loss, and its fast form against the token-by-token one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from fednl.memory.ttt import NORM_EPSILON, ttt_linear_reference, ttt_linear_rule
from memory.work import Work

HEADS, GROUP, DIM = 2, 2, 5
CARRIED = ("state", "gathered", "taken")
LEARNED = ("start", "scale", "shift")
BOTH = pytest.mark.parametrize("rule", [ttt_linear_rule, ttt_linear_reference])


def make(tokens: int, *, batch: int = 3, seed: int = 0, warm: bool = True, pads: bool = False) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    inner = (HEADS, DIM + 1, DIM)
    out: dict[str, Any] = {
        "q": draw(batch, tokens, HEADS * GROUP, DIM),
        "k": draw(batch, tokens, HEADS, DIM),
        "v": draw(batch, tokens, HEADS, DIM),
        "beta": 0.2 * torch.sigmoid(draw(batch, tokens, HEADS)),
        "start": 0.5 * draw(*inner),
        "scale": 1 + 0.3 * draw(HEADS, DIM),
        "shift": 0.3 * draw(HEADS, DIM),
    }
    if warm:
        out["taken"] = torch.tensor([3, 0, 2])[:batch]
        out["state"] = 0.2 * draw(batch, *inner)
        out["gathered"] = 0.2 * draw(batch, *inner) * (out["taken"] > 0)[:, None, None, None]
    if pads:
        out["keep"] = torch.rand(batch, tokens, generator=rng) > 0.3
    return out


def run(rule: Any, inputs: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """Answers, what is carried on, and every gradient of a random functional of all."""
    leaves = {n: x.detach().clone().requires_grad_() if x.is_floating_point() else x for n, x in inputs.items()}
    results = rule(**leaves, **options)
    rng = torch.Generator().manual_seed(1)
    total = sum((y * torch.randn(y.shape, generator=rng, dtype=torch.float64)).sum() for y in results[:3])
    names = [n for n in leaves if leaves[n].requires_grad]
    grads = torch.autograd.grad(total, [leaves[n] for n in names], materialize_grads=True)
    after = dict(zip(CARRIED, results[1:], strict=True))
    return {"out": results[0].detach(), **after, **dict(zip(names, grads, strict=True))}


def agree(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-9, msg=f"{name} differs")


def cut(inputs: dict[str, Any], span: slice) -> dict[str, Any]:
    return {n: x if n in (*CARRIED, *LEARNED) else x[:, span] for n, x in inputs.items()}


@BOTH
@pytest.mark.parametrize("size", [1, 4, 16])
def test_it_is_gradient_descent_by_mini_batches_on_the_papers_loss(rule: Any, size: int) -> None:
    """Torch takes the gradients; size 1 is online gradient descent on in-context regression from k to v - k."""
    x = make(23, batch=1, warm=False)
    out = rule(**x, batch_tokens=size)[0].unflatten(2, (HEADS, GROUP))
    for h in range(HEADS):
        start, scale, shift = x["start"][h].clone(), x["scale"][h], x["shift"][h]

        def norm(z: Tensor, scale: Tensor = scale, shift: Tensor = shift) -> Tensor:
            return layer_norm(z, (DIM,), scale, shift, NORM_EPSILON)

        weight = start
        for t in range(23):
            if t % size == 0:
                base, total = weight, torch.zeros_like(weight)
            leaf = base.clone().requires_grad_()
            key, value = x["k"][0, t, h], x["v"][0, t, h]
            loss = (norm(key @ leaf[:-1] + leaf[-1]) - (value - key)).square().sum() / 2
            total = total + x["beta"][0, t, h] * torch.autograd.grad(loss, leaf)[0]
            weight = base - total / (t % size + 1)
            for g in range(GROUP):
                query = x["q"][0, t, h * GROUP + g]
                answer = query + norm(query @ weight[:-1] + weight[-1])
                torch.testing.assert_close(out[0, t, h, g], answer, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tokens", [1, 17, 40])
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("pads", [False, True])
def test_oracle_1_fast_equals_reference_in_values_and_gradients(tokens: int, size: int, pads: bool) -> None:
    inputs = make(tokens, pads=pads)
    inputs["taken"] = inputs["taken"].clamp(max=size - 1)
    agree(run(ttt_linear_rule, inputs, batch_tokens=size), run(ttt_linear_reference, inputs, batch_tokens=size))


@pytest.mark.parametrize("sizes", [(1,) * 30, (7, 1, 16, 6)])
def test_oracle_2_and_3_pieces_and_single_tokens_equal_one_pass(sizes: tuple[int, ...]) -> None:
    inputs, at, outs = make(30, pads=True), 0, []
    whole = ttt_linear_rule(**inputs, batch_tokens=8)
    carried = {n: inputs[n] for n in CARRIED}
    for size in sizes:
        out, *after = ttt_linear_rule(**{**cut(inputs, slice(at, at + size)), **carried}, batch_tokens=8)
        carried, at = dict(zip(CARRIED, after, strict=True)), at + size
        outs.append(out)
    torch.testing.assert_close((torch.cat(outs, 1), *after), whole, rtol=1e-9, atol=1e-9)


@BOTH
def test_oracle_4_no_step_leaves_the_state_bit_equal(rule: Any) -> None:
    inputs = make(20, warm=False)
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    _, state, gathered, taken = rule(**inputs)
    assert not state.any() and not gathered.any() and taken.tolist() == [4, 4, 4]


def test_oracle_10_gradcheck() -> None:
    inputs = make(7, batch=1, pads=True)
    names = [n for n, x in inputs.items() if x.is_floating_point()]
    rest = {n: x for n, x in inputs.items() if n not in names}

    def function(*values: Tensor) -> Any:
        return ttt_linear_rule(**dict(zip(names, values, strict=True)), **rest, batch_tokens=3)[:3]

    assert torch.autograd.gradcheck(function, [inputs[n].requires_grad_() for n in names])


@BOTH
def test_oracle_11_what_comes_later_changes_nothing_before_it(rule: Any) -> None:
    inputs = make(30)
    before = rule(**inputs)[0]
    for name in ("q", "k", "v", "beta"):
        inputs[name] = inputs[name].clone()
        inputs[name][:, 18:] += 0.5
    after = rule(**inputs)[0]
    assert torch.equal(after[:, :18], before[:, :18]) and not torch.equal(after[:, 18:], before[:, 18:])


@BOTH
def test_oracle_12_pads_are_as_if_they_were_not_there(rule: Any) -> None:
    inputs = make(30, pads=True)
    padded = rule(**inputs, batch_tokens=4)
    for row in range(3):
        real = inputs["keep"][row]
        own = {n: x[row : row + 1] for n, x in inputs.items() if n not in LEARNED}
        own = {n: x if n in CARRIED else x[:, real] for n, x in own.items() if n != "keep"}
        out, *after = rule(**own, **{n: inputs[n] for n in LEARNED}, batch_tokens=4)
        torch.testing.assert_close(padded[0][row, real], out[0], rtol=1e-9, atol=1e-9)
        for mine, theirs in zip(after, padded[1:], strict=True):
            torch.testing.assert_close(theirs[row : row + 1], mine, rtol=1e-9, atol=1e-9)


def test_oracle_17_grouped_heads_equal_repeated_keys_and_values() -> None:
    inputs = make(30)
    repeated = {
        n: x.repeat_interleave(GROUP, {"q": 9, "taken": 9, "start": 0, "scale": 0, "shift": 0, "state": 1}.get(n, 2))
        if n not in ("q", "taken", "gathered")
        else x
        for n, x in inputs.items()
    }
    repeated["gathered"] = inputs["gathered"].repeat_interleave(GROUP, 1)
    torch.testing.assert_close(ttt_linear_rule(**repeated)[0], ttt_linear_rule(**inputs)[0], rtol=1e-9, atol=1e-9)


def test_work_grows_linearly_in_both_passes() -> None:
    counts = []
    for tokens in (128, 256):
        inputs = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in make(tokens).items()}
        with Work() as work:
            ttt_linear_rule(**inputs)[0].sum().backward()
        counts.append((work.operations, work.numbers))
    assert counts[1][0] < 2.2 * counts[0][0] and counts[1][1] < 2.2 * counts[0][1]


@BOTH
def test_no_tokens_give_no_answers_and_the_same_state(rule: Any) -> None:
    inputs = make(0)
    out, *after = rule(**inputs)
    assert out.shape == (3, 0, HEADS * GROUP, DIM)
    assert all(torch.equal(new, inputs[n]) and new is not inputs[n] for n, new in zip(CARRIED, after, strict=True))


@BOTH
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("start", torch.zeros(HEADS, DIM, DIM, dtype=torch.float64), r"start has shape \(2, 5, 5\)"),
        ("taken", torch.zeros(3), "taken must be int64"),
        ("keep", torch.ones(3, 30), "keep must be bool"),
        ("v", torch.zeros(3, 30, HEADS, DIM + 1, dtype=torch.float64), "v has dimension 6"),
        ("beta", torch.full((3, 30, HEADS), -1.0), "beta must be at least 0"),
        ("batch_tokens", 0, "batch_tokens must be at least 1"),
    ],
)
def test_what_does_not_fit_is_named(rule: Any, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(**{**make(30), name: value})
