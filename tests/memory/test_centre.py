"""Centred keys: the common part is gone, and only the shifts have moved."""

from __future__ import annotations

import pytest
import torch

from fednl.errors import BackboneError
from fednl.memory import rules
from fednl.memory.centre import centre
from memory.models import tokens, with_memory


def test_shifts_become_minus_the_mean_and_nothing_else_moves() -> None:
    model, ids = with_memory(feature="linear"), tokens(2, 40)
    seen: list[torch.Tensor] = []
    handle = model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda m, a, out: seen.append(out.detach()))
    before = {name: p.detach().clone() for name, p in rules(model).items()}
    centre(model, ids)
    handle.remove()
    after = rules(model)
    changed = {name for name, p in after.items() if not torch.equal(p, before[name])}
    assert changed == {name for name in after if name.endswith("_shift")}
    torch.testing.assert_close(after["layers.1.memory.projection.k_shift"].detach(), -seen[0].mean((0, 1)))
    assert len(model.model.layers[1].self_attn.k_proj._forward_hooks) == 1, "no hook may stay behind"


def test_keys_with_a_common_part_are_told_apart_after_centring() -> None:
    """Recall of an early token's value through many later ones, with and without the common part."""
    from fednl.memory.layer import unit
    from fednl.memory.operator import delta_rule

    generator = torch.Generator().manual_seed(0)
    common = 3 * torch.randn(16, generator=generator)
    own = torch.randn(1, 60, 1, 16, generator=generator)
    v = torch.randn(1, 60, 1, 16, generator=generator)
    beta = torch.full((1, 60, 1), 0.3)

    def recall(keys: torch.Tensor) -> float:
        keys = unit(keys)
        _, state = delta_rule(keys, keys, v, beta)
        read = keys[0, 20, 0] @ state[0, 0]
        return float(torch.cosine_similarity(read, v[0, 20, 0], dim=0))

    plain = recall(own + common)
    centred = recall(own + common - (own + common).mean(1, keepdim=True))
    assert centred > plain + 0.1


def test_rank_zero_cannot_be_centred() -> None:
    with pytest.raises(BackboneError, match=r"memory\.rank is 0"):
        centre(with_memory(rank=0), tokens(1, 9))


@pytest.mark.parametrize("keys", ["token", "context"])
def test_one_token_over_and_over_is_no_text_to_centre_on(keys: str) -> None:
    """Less what it has in common nothing is left of it, and the addresses' scale would become a thousand."""
    model = with_memory(keys=keys)
    before = {name: rule.detach().clone() for name, rule in rules(model).items()}
    for ids in (tokens(1, 1), tokens(1, 1).expand(2, 30)):
        with pytest.raises(BackboneError, match="is one token, over and over"):
            centre(model, ids)
    assert all(torch.equal(rule, before[name]) for name, rule in rules(model).items())


@pytest.mark.parametrize("keys", ["token", "context"])
def test_a_layer_is_centred_by_its_number_on_attaching(keys: str) -> None:
    """Layers that were taken out afterwards do not make another layer's keys count for its own."""
    whole, cut = (with_memory(keys=keys, layers="1,2", address_layer=1) for _ in range(2))
    whole.model.layers[0].forward = lambda hidden_states, **kwargs: hidden_states
    cut.model.layers = cut.model.layers[1:]
    for model in (whole, cut):
        centre(model, tokens(2, 30))
    for name, rule in rules(whole).items():
        torch.testing.assert_close(rules(cut)[name], rule, msg=name)
