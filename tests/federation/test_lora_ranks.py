"""Clients of unlike LoRA ranks: who gets what, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fednl.errors import SettingsError
from fednl.federation.algorithms import ALGORITHMS
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.algorithms.ffa_lora import FfaLora
from fednl.federation.algorithms.flexlora import FlexLora
from fednl.federation.algorithms.flora import Flora, FloraSettings
from fednl.federation.algorithms.local_only import LocalOnly
from fednl.federation.exchange import PLAIN, CombineSettings, Exchange, PrivacySettings, check_exchange
from fednl.federation.lora_ranks import Ranks, check_ranks, cut, offered, padded
from fednl.federation.params import Params, equal
from fednl.federation.settings import FederationSettings

A, B, GATE = "layers.0.q_proj.lora_A", "layers.0.q_proj.lora_B", "layers.0.memory.gate.bias"


def full(rank: int = 4, seed: int = 0) -> Params:
    rng = torch.Generator().manual_seed(seed)
    shapes = {A: (rank, 3), B: (5, rank), GATE: (2,)}
    return {name: torch.randn(shape, generator=rng, dtype=torch.float64) for name, shape in shapes.items()}


def test_the_first_pattern_that_fits_says_the_rank() -> None:
    ranks = Ranks(["passkey=2", "*-code=3"])
    assert [ranks.of(client) for client in ("passkey", "uuid-code", "name-date")] == [2, 3, None]
    assert Ranks().of("passkey") is None


def test_a_client_gets_the_leading_components_and_other_rules_whole() -> None:
    params = full()
    got = cut(params, 2)
    assert torch.equal(got[A], params[A][:2]) and torch.equal(got[B], params[B][:, :2])
    assert got[GATE] is params[GATE]
    assert equal(cut(params, None), params)
    assert equal(cut(params, 99), params)


def test_zero_components_neither_change_the_product_nor_learn() -> None:
    params = full()
    wide = padded(cut(params, 2), params)
    assert {name: t.shape for name, t in wide.items()} == {name: t.shape for name, t in params.items()}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in wide.items()}
    (leaves[B] @ leaves[A]).sin().sum().backward()  # type: ignore[no-untyped-call]
    assert leaves[A].grad is not None and leaves[B].grad is not None
    assert leaves[A].grad[:2].any() and not leaves[A].grad[2:].any()
    assert leaves[B].grad[:, :2].any() and not leaves[B].grad[:, 2:].any()
    assert padded(params, params)[A] is params[A]


@pytest.mark.parametrize(
    ("algorithm", "shared", "entries", "words"),
    [
        (FedAvg(shared="all"), [A, B, GATE], ["pasky=2"], 'lora-ranks names "pasky=2"'),
        (FedAvg(shared="memory"), [GATE], ["passkey=2"], 'add "lora"'),
        (FlexLora(shared="memory"), [GATE], [], "no pair of LoRA factors"),
        (FlexLora(shared=("gate", B)), [B, GATE], [], "no pair of LoRA factors"),
        (FfaLora(shared="memory"), [GATE], [], 'shared = "memory" lets no LoRA factor out, of which FfaLora'),
    ],
)
def test_what_makes_no_sense_is_refused(algorithm: FedAvg, shared: list[str], entries: list[str], words: str) -> None:
    params = full()
    with pytest.raises(SettingsError, match=words):
        check_ranks(algorithm, {name: params[name] for name in shared}, params, entries, ["name-date", "passkey"])


@pytest.mark.parametrize("combine", [CombineSettings(rule="median"), CombineSettings(norm_cap=0.1)])
@pytest.mark.parametrize(
    ("algorithm", "federation"),
    [(FlexLora(shared="lora"), FederationSettings()), (FedAvg(shared="all"), FederationSettings(lora_ranks=("a=1",)))],
)
def test_what_bounds_rules_one_by_one_does_not_fit_products_or_unlike_ranks(
    algorithm: FedAvg, federation: FederationSettings, combine: CombineSettings
) -> None:
    with pytest.raises(SettingsError, match="which \\[combine\\] cannot bound"):
        check_exchange(Exchange(combine=combine), federation, algorithm.traits)


@pytest.mark.parametrize("privacy", [{"mode": "central"}, {"mode": "local"}, {"secure": True}])
def test_what_hides_single_updates_does_not_fit_unlike_ranks(privacy: dict[str, Any]) -> None:
    exchange = Exchange(combine=CombineSettings(weights="uniform"), privacy=PrivacySettings(**privacy))
    with pytest.raises(SettingsError, match="lora-ranks needs more of single clients than"):
        check_exchange(exchange, FederationSettings(lora_ranks=("a=1",)), FedAvg.traits)


@pytest.mark.parametrize("kind", ["fedweit", "scaffold"])
def test_what_is_sent_beside_the_rules_has_one_size(kind: str) -> None:
    federation = FederationSettings(algorithm=kind, lora_ranks=("a=1",))
    with pytest.raises(SettingsError, match=f'algorithm = "{kind}" sends tensors of one size beside the rules'):
        check_exchange(PLAIN, federation, ALGORITHMS[kind].traits)


def test_an_algorithm_that_shares_nothing_takes_ranks_and_a_client_begins_with_its_own() -> None:
    params = full()
    check_ranks(LocalOnly(), {}, params, ["passkey=2"], ["name-date", "passkey"])
    flora, entries = Flora(FloraSettings(merged_rank=1), "all"), ["passkey=2"]
    assert equal(offered(flora, params, "passkey", entries), cut(params, 3))
    for own in (FfaLora(shared="all"), LocalOnly()):
        assert equal(offered(own, params, "passkey", entries), cut(params, 2))
        assert equal(offered(own, params, "name-date", entries), params)
