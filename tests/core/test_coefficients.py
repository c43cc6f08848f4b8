"""Knowledge coefficients: mixtures, gradients, projections, cohorts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkd.core import coefficients
from fedkd.core.coefficients import block, descend, kl_slope, mix, nearest_distributions, put_back, squared_slope


def logistic(z):
    return 1 / (1 + math.exp(-z))


def ensemble(weights, h, x_0, x_1):
    """The probabilities of the right classes: 0 for x_0 and 1 for x_1; and those of each hypothesis."""
    right = torch.tensor([[1 - logistic(h_m(*x_0)), logistic(h_m(*x_1))] for h_m in h], dtype=torch.float64)
    (mixed,) = mix(torch.tensor([weights], dtype=torch.float64), right)
    return mixed.tolist(), right.tolist()


def test_the_ensemble_of_theorem_a_1_is_right_where_client_0_is_wrong():
    """Appendix A: h_0 = σ(x_1 + x_2 + 1), h_1 = σ(x_1 + x_2/2 − 1).

    P_0(0|x_0) = 1 − σ(−2.4) = 0.917, P_1(0|x_0) = 1 − σ(0.4) = 0.401, half their sum 0.659: the paper's 0.66.
    P_0(1|x_1) = σ(−1.2) = 0.231, P_1(1|x_1) = σ(2.2) = 0.900, half their sum 0.566: from 0.23 and 0.90, 0.565.
    """
    h = (lambda a, b: a + b + 1, lambda a, b: a + b / 2 - 1)
    mixed, (alone, _) = ensemble([1 / 2, 1 / 2], h, (6.2, -9.6), (8.6, -10.8))
    assert alone == pytest.approx([0.92, 0.23], abs=0.005)
    assert alone[1] < 0.5 < min(mixed)
    assert mixed == pytest.approx([0.66, 0.565], abs=0.001)


def test_the_personal_ensemble_of_remark_a_1_is_right_where_the_average_is_wrong():
    """Appendix A: h_0 = σ(x_1 + 2 x_2 − 2), h_1 = σ(x_1 − x_2 + 1).

    P_0(0|x_0) = 1 − σ(−0.31) = 0.577 (the paper goes on with 0.57), P_1(0|x_0) = 1 − σ(0.41) = 0.399;
    P_0(1|x_1) = σ(−0.41) = 0.399, P_1(1|x_1) = σ(2.2) = 0.900.
    Thirds of the paper's rounded figures: 2/3·0.57 + 1/3·0.40 = 0.513 and 2/3·0.40 + 1/3·0.90 = 0.567.
    """
    h = (lambda a, b: a + 2 * b - 2, lambda a, b: a - b + 1)
    points = (0.17, 0.76), (1.33, 0.13)
    average, _ = ensemble([1 / 2, 1 / 2], h, *points)
    assert average == pytest.approx([0.485, 0.65], abs=0.004)
    assert average[0] < 0.5
    mixed, _ = ensemble([2 / 3, 1 / 3], h, *points)
    assert mixed == pytest.approx([0.513, 0.567], abs=0.005)
    assert min(mixed) > 0.5
    printed = torch.tensor([[0.57, 0.40], [0.40, 0.90]], dtype=torch.float64)
    (exact,) = mix(torch.tensor([[2 / 3, 1 / 3]], dtype=torch.float64), printed)
    assert exact.tolist() == pytest.approx([0.513, 0.567], abs=0.0005)


def predictions(m=4, samples=5, classes=3, seed=0):
    return torch.randn(m, samples, classes, generator=torch.Generator().manual_seed(seed)).double().softmax(-1)


def distributions(m=4, seed=1):
    return torch.rand(m, m, generator=torch.Generator().manual_seed(seed)).double().softmax(-1)


def test_the_slopes_are_the_gradients_that_autograd_finds():
    s, c = predictions(), distributions().requires_grad_()
    mixture = (c[:, :, None, None] * s).sum(1)
    (kl,) = torch.autograd.grad((mixture * (mixture.log() - s.log())).sum(-1).mean(1).sum(), c)
    torch.testing.assert_close(kl_slope(c.detach(), s), kl)
    squared = ((c[:, :, None, None] * s).sum(1) - s).square().sum()
    (expected,) = torch.autograd.grad(squared, c)
    tree = {"a": s[:, :2], "b": s[:, 2:], "none": s[:, :0]}
    torch.testing.assert_close(squared_slope(mix(c.detach(), tree), tree), expected)


@settings(deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=7))
def test_the_projection_is_the_nearest_distribution(row):
    """p is nearest to v exactly if p is a distribution and v − p is some θ where p > 0 and at most θ elsewhere."""
    v = torch.tensor([row], dtype=torch.float64)
    p = nearest_distributions(v)
    assert (p >= 0).all()
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)
    gap = (v - p)[p > 0]
    assert float(gap.max() - gap.min()) < 1e-9
    assert float((v - p).max()) <= float(gap.max()) + 1e-9


def test_the_pull_has_the_fixed_points_of_eq_7_and_agrees_with_it_to_first_order():
    """Eq. 7 stays where slope = −2ρ (c − 1/m); elsewhere the two steps differ by the square of 2 η ρ."""
    c, slope, rho = distributions(), predictions(4, 1, 4)[:, 0], 0.7
    fixed = 1 / 4 - slope / (2 * rho)
    for lr in (0.01, 1.0, 100.0):
        torch.testing.assert_close(descend(fixed, slope, lr, rho, "none"), fixed)
    lr = 1e-3
    explicit = c - lr * slope - 2 * lr * rho * (c - 1 / 4)
    assert float((descend(c, slope, lr, rho, "none") - explicit).abs().max()) < (2 * lr * rho) ** 2


@pytest.mark.parametrize("domain", coefficients.DOMAINS)
def test_an_infinite_pull_ends_at_one_m_th(domain):
    c = descend(distributions(), 100 * predictions(4, 1, 4)[:, 0], 0.1, math.inf, domain)
    torch.testing.assert_close(c, torch.full_like(c, 1 / 4))


@pytest.mark.parametrize("domain", ["simplex", "softmax"])
def test_any_step_leaves_distributions(domain):
    c = descend(distributions(), 30 * predictions(4, 1, 4)[:, 0], 0.5, 0.1, domain)
    assert (c >= 0).all()
    torch.testing.assert_close(c.sum(1), torch.ones(4).double())
    assert not torch.allclose(c, distributions(), atol=0.01)


def test_clients_of_one_kind_come_to_learn_from_each_other():
    """Clients 0, 1 and 2, 3 predict alike: c_01 ends equal to c_00 and above c_02, which the pull keeps above 0."""
    s = predictions(2)[[0, 0, 1, 1]]
    c = torch.full((4, 4), 0.25).double()
    for _ in range(200):
        c = descend(c, kl_slope(c, s), 0.1, 0.2, "simplex")
    torch.testing.assert_close(c[:, 0], c[:, 1])
    torch.testing.assert_close(c[:, 2], c[:, 3])
    assert 0 < float(c[0, 2]) < 0.2
    assert float(c[0, 1]) > 0.3


def test_a_cohort_uses_its_own_rows_and_columns_renormalised():
    """Rows 2 and 0, columns 2 and 0: [0.5, 0] of sum 0.5; [0.1, 0.3] of sum 0.4."""
    c = torch.tensor([[0.3, 0.6, 0.1], [0.2, 0.2, 0.6], [0.0, 0.5, 0.5]])
    part = block(c, np.array([2, 0]), "simplex")
    torch.testing.assert_close(part.weights, torch.tensor([[1.0, 0.0], [0.25, 0.75]]))
    after = put_back(c, part, torch.tensor([[0.4, 0.6], [0.5, 0.5]]))
    expected = torch.tensor([[0.2, 0.6, 0.2], [0.2, 0.2, 0.6], [0.3, 0.5, 0.2]])
    torch.testing.assert_close(after, expected)


def test_a_client_that_holds_nothing_for_the_cohort_listens_to_itself():
    c = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.2, 0.6], [0.5, 0.0, 0.5]])
    part = block(c, np.array([0, 2]), "simplex")
    torch.testing.assert_close(part.weights, torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    torch.testing.assert_close(put_back(c, part, torch.full((2, 2), 0.5)), c)


def test_outside_a_domain_a_full_cohort_uses_the_matrix_as_it_is():
    c = torch.tensor([[2.0, -1.5], [0.0, 0.0]])
    torch.testing.assert_close(block(c, np.array([0, 1]), "none").weights, c)
    torch.testing.assert_close(block(c, np.array([0]), "none").weights, 2 * c[:1, :1])


def test_what_cannot_work_is_said():
    assert coefficients.problems(0.1, math.inf, "simplex") == []
    eta, rho, domain = coefficients.problems(0, -1, "cube")
    assert "eta_3" in eta
    assert "rho" in rho
    assert "simplex, softmax, none" in domain
