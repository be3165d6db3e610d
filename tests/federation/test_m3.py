"""M3 on the server: its buffers by hand, its orthogonalisation against the singular value decomposition."""

from __future__ import annotations

import math

import pytest
import torch
from federation_toys import Bowl, rounds_of_descent
from pydantic import ValidationError

from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.algorithms.m3 import M3, M3Settings, levelled
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params
from fednl.seeding import torch_rng


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch_rng(seed, "draw"), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9), (1, 5), (5, 1)])
def test_levelled_is_the_polar_factor_with_the_norm_it_had(shape: tuple[int, int]) -> None:
    matrix = draw(*shape) * 37
    level = levelled(matrix, 40)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    expected = u @ v * s.norm() / math.sqrt(len(s))
    torch.testing.assert_close(level, expected, rtol=0, atol=1e-8)
    assert float(level.norm()) == pytest.approx(float(matrix.norm()), rel=1e-14)


def test_one_step_follows_the_cubic_and_keeps_singular_vectors() -> None:
    matrix = draw(5, 3)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    part = s / s.norm()
    cubic = part * (3 - part**2) / 2
    torch.testing.assert_close(levelled(matrix, 1), (u * (cubic / cubic.norm() * s.norm())) @ v, rtol=0, atol=1e-12)


def test_levelled_leaves_zeros_and_what_is_level_already() -> None:
    assert torch.equal(levelled(torch.zeros(3, 2), 5), torch.zeros(3, 2))
    level = 0.3 * torch.linalg.qr(draw(6, 3))[0]
    torch.testing.assert_close(levelled(level, 5), level, rtol=0, atol=1e-14)


def test_m3_by_hand() -> None:
    settings = M3Settings(server_lr=0.1, momentum=0.8, slow_rounds=2, slow_weight=0.5, tau=0.01)
    algorithm = M3(settings, "all")
    params: Params = {"w": torch.tensor([1.0], dtype=torch.float64)}
    fast, slow, chunk, squares, expected = 0.0, 0.0, 0.0, 0.0, 1.0
    state: ClientState = {}
    for number, change in enumerate((0.2, -0.05, 0.1, -0.3, 0.07), 1):  # clients pull up, down, up, ...
        params, state = algorithm.server_step(params, Message({"w": params["w"] + change}, num_examples=1), state)
        fast, squares, chunk = 0.8 * fast - change, squares + change**2, chunk - change
        expected -= 0.1 * (fast + 0.5 * slow) / (math.sqrt(squares) + 0.01)
        if number % 2 == 0:
            slow, chunk = slow + chunk, 0.0
        assert params["w"].item() == pytest.approx(expected, abs=1e-14)
        assert state["slow/w"].item() == pytest.approx(slow, abs=1e-15)
        assert state["chunk/w"].item() == pytest.approx(chunk, abs=1e-15)
    assert int(state["rounds"]) == 5


@pytest.mark.parametrize("change", [0.5, -0.5])
def test_with_a_large_tau_m3_is_a_damped_fedavg(change: float) -> None:
    algorithm = M3(M3Settings(server_lr=1e6, tau=1e6, momentum=0.0, slow_weight=0.0, newton_schulz_steps=0), "all")
    mean = Message({"w": torch.full((2, 3), 1 + change)}, num_examples=1)
    new, _ = algorithm.server_step({"w": torch.ones(2, 3)}, mean, {})
    torch.testing.assert_close(new["w"], mean.params["w"], rtol=0, atol=1e-6)


def test_m3_nears_fedavgs_fixed_point_and_without_decay_swings_about_it() -> None:
    bowls = {name: Bowl(0.3 * draw(6, 4, seed=n), 0.5 + n) for n, name in enumerate("abcd")}
    start = {"w": torch.zeros(6, 4, dtype=torch.float64)}

    def after(algorithm: FedAvg, rounds: int) -> torch.Tensor:
        return rounds_of_descent(algorithm, bowls, start, rounds, 0.02, 8)[0]["w"]

    goal = after(FedAvg(shared="all"), 400)
    assert float((after(M3(shared="all"), 200) - goal).norm()) < 0.1 * float(goal.norm())
    published = M3(M3Settings(momentum=1.0), "all")
    assert float((after(published, 200) - goal).norm()) > 0.3 * float(goal.norm())


@pytest.mark.parametrize("fields", [{"tau": 0.0}, {"momentum": 1.1}, {"slow-rounds": 0}, {"server-lr": 0.0}])
def test_m3_refuses(fields: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        M3Settings.model_validate(fields)
