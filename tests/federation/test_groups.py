"""Which rules travel: groups, presets and patterns of names."""

from __future__ import annotations

import pytest

from fednl.errors import SettingsError
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.algorithms.ffa_lora import FfaLora
from fednl.federation.algorithms.local_only import LocalOnly
from fednl.federation.groups import check_shared, group_of, may_let_out, select, shared_groups

NAMES = [
    "layers.3.memory.write.weight",
    "layers.3.memory.gate.bias",
    "layers.12.memory.projection.q_down",
    "layers.3.q_proj.lora_A",
    "layers.3.q_proj.lora_B",
    "head",
]


def test_group_of() -> None:
    assert [group_of(name) for name in NAMES] == ["write", "gate", "projection", "lora", "lora", ""]
    assert group_of("layers.3.memory.projection.q.lora_A") == "projection"
    assert group_of("memory.weight") == ""


@pytest.mark.parametrize(
    ("shared", "numbers"),
    [
        ("memory", [0, 1]),
        ("theta", [0, 1, 2]),
        ("lora", [3, 4]),
        ("all", [0, 1, 2, 3, 4, 5]),
        (["write", "*.lora_B"], [0, 4]),
        (["memory", "lora"], [0, 1, 3, 4]),
        ("layers.12.*", [2]),
        ("head", [5]),
        ([], []),
        ("nothing", []),
    ],
)
def test_select(shared: str | list[str], numbers: list[int]) -> None:
    assert select(NAMES, shared) == sorted(NAMES[number] for number in numbers)
    assert select(reversed(NAMES), shared) == select(NAMES, shared)


def test_a_part_of_shared_that_matches_nothing_is_refused_by_name() -> None:
    check_shared(FedAvg(shared="theta"), NAMES)
    check_shared(FedAvg(shared=["write", "lora"]), NAMES)
    with pytest.raises(SettingsError, match=r'shared = "gates" matches none .*gate, lora, projection, write'):
        check_shared(FedAvg(shared=["write", "gates"]), NAMES)
    with pytest.raises(SettingsError, match="lora"):
        check_shared(FedAvg(shared="lora"), NAMES[:2])


def test_what_travels_is_given_back_and_an_algorithm_that_keeps_all_of_it_is_refused() -> None:
    assert check_shared(FfaLora(shared=["write", "lora"]), NAMES) == (NAMES[0], NAMES[4])
    assert check_shared(LocalOnly(shared="nothing"), NAMES) == ()
    with pytest.raises(SettingsError, match=r'shared = \["\*.lora_A"\] lets nothing out, as FfaLora keeps'):
        check_shared(FfaLora(shared=["*.lora_A"]), NAMES)


def test_a_pattern_may_let_a_group_out_and_another_group_may_not() -> None:
    for shared in ("lora", "all", ["theta", "*.lora_B"], "layers.3.*"):
        assert may_let_out(shared, "lora")
    for shared in ("theta", ["write", "gate"], "context"):
        assert not may_let_out(shared, "lora")
    for shared in ("lora", "*", "*.lora_[AB]", "layers.3.*", "*.lora_?", "*_B", "*q_proj.lora_B"):
        assert may_let_out(shared, "lora", ".lora_B")
    for shared in ("theta", ["write", "*.lora_A"], "layers.?.q_proj.lora_A", "*A", "*.bias"):
        assert not may_let_out(shared, "lora", ".lora_B")


RULES = [f"layers.{i}.memory.{tensor}" for i in (0, 1) for tensor in ("gate.bias", "projection.k_up", "write.bias")]


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        ("theta", ["write", "gate", "projection"]),
        ("memory", ["write", "gate"]),
        ("all", ["write", "gate", "projection"]),
        ("gate", ["gate"]),
        (("gate", "layers.1.*"), ["gate", "layers.1.*"]),
        (("layers.0.*", "layers.1.*"), ["write", "gate", "projection"]),
        (("*.projection.*",), ["projection"]),
        ("lora", []),
    ],
)
def test_what_is_shared_in_few_words(shared: str | tuple[str, ...], words: list[str]) -> None:
    assert shared_groups(FedAvg(shared=shared), RULES) == words


def test_what_an_algorithm_keeps_to_clients_is_not_said_to_be_shared() -> None:
    assert shared_groups(FfaLora(shared="lora"), NAMES) == ["lora"]  # of which B
    assert shared_groups(FfaLora(shared=["gate", "*.lora_A", "*.lora_B"]), NAMES) == ["gate", "*.lora_B"]
