from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from fednl.evaluation.membership import auc, loss_drops, traces

scores = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=12)


@given(scores, scores)
def test_auc_is_the_mann_whitney_statistic_over_the_number_of_pairs(members: list[float], others: list[float]) -> None:
    expected = mannwhitneyu(members, others).statistic / (len(members) * len(others))
    found = auc(members, others)
    assert found.value == pytest.approx(expected)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.low < found.high
    assert auc(others, members).value == pytest.approx(1 - expected)


def test_perfect_and_useless_attacks() -> None:
    assert auc([2.0, 3.0], [0.0, 1.0]).value == 1.0
    assert auc([1.0] * 5, [1.0] * 9).value == 0.5
    assert auc([2.0] * 20, [0.0] * 20).low > 0.9
    assert auc([2.0, 3.0], [0.0, 1.0]).low < 0.9


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Two normal laws a standard deviation apart: the true area is Phi(1 / sqrt 2) = 0.7602."""
    rng, covered = random.Random(3), 0
    for _ in range(300):
        found = auc([rng.gauss(1, 1) for _ in range(40)], [rng.gauss(0, 1) for _ in range(40)])
        covered += found.low <= 0.7602 <= found.high
    assert 0.90 <= covered / 300 <= 0.99


@pytest.mark.parametrize(("members", "others"), [([], [1.0]), ([1.0], []), ([float("nan")], [1.0])])
def test_what_cannot_be_scored_is_refused(members: list[float], others: list[float]) -> None:
    with pytest.raises(ValueError, match="finite scores"):
        auc(members, others)


def test_g09_a_mean_of_few_gives_its_members_away_and_noise_hides_them() -> None:
    draw = torch.Generator().manual_seed(0)
    # A large part that all texts share, as activations have, and numbers of unlike sizes.
    sizes, common = torch.rand(2000, generator=draw) + 0.1, 50 * torch.randn(2000, generator=draw)
    members, fresh, known = (common + sizes * torch.randn(n, 2000, generator=draw) for n in (8, 8, 40))
    clean = members.mean(0)
    found = auc(traces(members, clean, known), traces(fresh, clean, known))
    assert found.value == 1.0
    noisy = clean + 100 * sizes * torch.randn(2000, generator=draw)
    hidden = auc(traces(members, noisy, known), traces(fresh, noisy, known))
    assert hidden.low < 0.5 < hidden.high
    assert traces(known[:1], known[0], known) == pytest.approx([1.0])


def test_loss_drops() -> None:
    assert loss_drops([2.0, 1.0], [0.5, 1.5]) == [1.5, -0.5]
