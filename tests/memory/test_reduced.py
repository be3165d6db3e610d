"""Write strengths from a product of two factors: equal to the full matrix they multiply to, and started from one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fednl.errors import CheckpointError, SettingsError
from fednl.federation.groups import select
from fednl.memory import MemoryConfig, attach_memory, load_rules, rules, save_rules
from fednl.memory.reduced import WHOLE, factored
from memory.models import tiny, tokens, with_memory

RULES = pytest.mark.parametrize("rule", ["delta", "gated-delta-product", "titans"])


def multiplied(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same rules with every pair of factors as the one matrix that it stands for."""
    pairs = {name.removesuffix("down") for name in params if ".write." in name and name.endswith(".down")}
    factors = {f"{pair}{end}" for pair in pairs for end in ("up", "down")}
    kept = {name: tensor for name, tensor in params.items() if name not in factors}
    return kept | {f"{pair}weight": params[f"{pair}up"] @ params[f"{pair}down"] for pair in pairs}


def gradients(model: Any, ids: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    names = list(names)
    loss = model(ids, use_cache=False).logits.square().mean()
    return dict(zip(names, torch.autograd.grad(loss, [rules(model)[name] for name in names]), strict=True))


@RULES
@pytest.mark.parametrize("rank", [1, 2])
def test_values_and_gradients_are_those_of_the_full_matrix_built_from_the_product(rule: str, rank: int) -> None:
    low = with_memory(rule=rule, write_rank=rank).double()
    full, ids = with_memory(rule=rule).double(), tokens(2, 30)
    made = multiplied({name: rule.detach() for name, rule in rules(low).items()})
    assert made.keys() == rules(full).keys()
    with torch.no_grad():
        for name, parameter in rules(full).items():
            parameter.copy_(made[name])
    torch.testing.assert_close(low(ids).logits, full(ids).logits, atol=1e-11, rtol=1e-9)
    mine, theirs = gradients(low, ids, rules(low)), gradients(full, ids, rules(full))
    for name, gradient in mine.items():
        prefix, _, last = name.rpartition(".")
        if ".write" in prefix and last in ("up", "down"):
            whole, other = theirs[f"{prefix}.weight"], rules(low)[f"{prefix}.{'down' if last == 'up' else 'up'}"]
            wanted = whole @ other.T if last == "up" else other.T @ whole
        else:
            wanted = theirs[name]
        torch.testing.assert_close(gradient, wanted, atol=1e-11, rtol=1e-9)


def test_rank_0_is_what_there_was_to_the_last_bit_and_name() -> None:
    drawn = {
        name: rule.detach()
        for name, rule in rules(attach_memory(tiny(), MemoryConfig(write_rank=0, layers="all"))).items()
    }
    before = rules(attach_memory(tiny(), MemoryConfig(layers="all")))
    assert drawn.keys() == before.keys() and all(torch.equal(drawn[name], rule) for name, rule in before.items())
    assert not any(name.endswith((".write.up", ".write.down")) for name in drawn)


@RULES
def test_fresh_factors_write_at_the_start_strength_and_can_learn(rule: str) -> None:
    ids, settings = tokens(2, 40), {"layers": "all", "window_tokens": 8, "keys": "token", "rank": 0, "rule": rule}
    settings |= {"writes_per_token": 1}
    full = attach_memory(tiny(), MemoryConfig(**settings))  # type: ignore[arg-type]
    low = attach_memory(tiny(), MemoryConfig(**settings, write_rank=1))  # type: ignore[arg-type]
    assert torch.equal(low(ids).logits, full(ids).logits)
    ups = [name for name in rules(low) if name.endswith(".up")]
    assert ups and all(bool(gradient.any()) for gradient in gradients(low, ids, ups).values())


def test_both_factors_and_their_biases_are_in_the_group_write() -> None:
    names = list(rules(attach_memory(tiny(), MemoryConfig(layers="0", rule="gated-delta", write_rank=1))))
    assert [name.removeprefix("layers.0.memory.") for name in select(names, "write")] == [
        f"write.{part}" for part in ("bias", "decay.bias", "decay.down", "decay.up", "down", "up")
    ]


def test_a_rank_beyond_the_heads_is_refused_before_anything_is_attached() -> None:
    model = tiny()
    with pytest.raises(SettingsError, match=r"write-rank = 3: the backbone has 2 key/value heads.* at most 2, or 0"):
        attach_memory(model, MemoryConfig(layers="all", write_rank=3))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_factors_of_a_matrix_are_the_nearest_of_their_rank(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    name = "layers.4.memory.write.weight"
    kept = {"layers.4.memory.write.bias": torch.ones(3), "layers.4.memory.gate.weight": torch.ones(2, 7)}
    matrix = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    made = factored({name: matrix, **kept}, rank)
    up, down = made.pop("layers.4.memory.write.up"), made.pop("layers.4.memory.write.down")
    assert made == kept and (up.shape, down.shape) == ((3, rank), (rank, 7))
    missed = (matrix - up @ down).norm()
    torch.testing.assert_close(missed, torch.linalg.svdvals(matrix)[rank:].norm(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(up.norm(), down.norm())
    # The same factors however the decomposition chose its signs.
    turned = factored({name: -matrix}, rank)
    torch.testing.assert_close(turned["layers.4.memory.write.up"], up)
    torch.testing.assert_close(turned["layers.4.memory.write.down"], -down)


def test_a_matrix_of_zeros_becomes_factors_of_zeros() -> None:
    made = factored({f"a{end}": torch.zeros(2, 5) for end in WHOLE}, 1)
    assert all(not bool(tensor.any()) for tensor in made.values()) and len(made) == 4


def test_saved_factors_reload_bit_for_bit_and_full_rules_do_not_pass_for_them(tmp_path: Path) -> None:
    low, ids = with_memory(write_rank=1), tokens(2, 30)
    save_rules(low, tmp_path / "low")
    assert torch.equal(load_rules(tiny(), tmp_path / "low")(ids).logits, low(ids).logits)
    save_rules(with_memory(), tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"memory\.write-rank = 0, and it is 1 here"):
        load_rules(with_memory(write_rank=1), tmp_path / "full")
