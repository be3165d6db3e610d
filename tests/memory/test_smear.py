"""The running average, against the loop that defines it."""

from __future__ import annotations

import pytest
import torch

from fednl.memory.smear import before, smear


def loop(x: torch.Tensor, decay: torch.Tensor, keep: torch.Tensor | None, carry: torch.Tensor | None) -> torch.Tensor:
    """c_t = decay c_(t-1) + x_t, one token at a time."""
    c = torch.zeros_like(x[:, 0]) if carry is None else carry
    out = []
    for t in range(x.shape[1]):
        new = decay[None, :, None] * c + x[:, t]
        c = new if keep is None else torch.where(keep[:, t, None, None], new, c)
        out.append(c)
    return torch.stack(out, 1)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 7, 40])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_equals_the_loop_in_values_and_gradients(
    length: int, padded: bool, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fednl.memory.smear.BLOCK_TOKENS", 6)
    keep = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) > 0.4 if padded else None
    leaves = [draw(2, length, 3, 4), torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)]
    if warm:
        leaves.append(draw(2, 3, 4, seed=2))
    results = []
    for function in (lambda x, decay, *a: smear(x, decay.log(), *a)[0], loop):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        out = function(own[0], own[1], keep, own[2] if warm else None)
        (out * draw(*out.shape, seed=3)).sum().backward()
        results.append([out, *(leaf.grad for leaf in own)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-12, rtol=1e-12)


def test_pieces_equal_one_pass_and_the_shift_takes_the_carry() -> None:
    x, log_decay = draw(1, 23, 2, 4), torch.tensor([0.8, 0.3], dtype=torch.float64).log()
    whole, last = smear(x, log_decay, None, None)
    first, carry = smear(x[:, :9], log_decay, None, None)
    second, end = smear(x[:, 9:], log_decay, None, carry)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(end, last)
    shifted = torch.cat([before(first, None), before(second, carry)], 1)
    torch.testing.assert_close(shifted, torch.cat([torch.zeros_like(x[:, :1]), whole[:, :-1]], 1))
