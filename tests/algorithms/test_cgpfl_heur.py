"""CGPFL-Heur: e(K), the number of clusters it chooses, and that it is CGPFL from there on."""

import math

import numpy as np
import pytest
import torch
from groups import grouped, ran
from tiny import assert_equal, engine, everyone

from fedkd.algorithms.cgpfl import CGPFL, CGPFLHeur, complexity, cost
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger


@pytest.mark.parametrize(
    ("mu", "groups"), [*((10.0, groups) for groups in (1, 2, 3, 4, 6)), *((None, groups) for groups in (2, 3, 4, 6))]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_finds_the_number_of_groups_that_the_clients_were_drawn_from(mu, groups, seed, tmp_path):
    """K = 1, ..., 10 of 20 clients; by default where there are groups, with a given μ also where there is only one."""
    _, state = ran(CGPFLHeur(mu=mu), tmp_path, grouped(groups, clients=20, seed=seed))
    assert state.server.clusters == groups
    assert state.server.cluster.tolist() == [i % groups for i in range(20)]


def test_the_number_is_chosen_in_the_first_round_only(tmp_path, monkeypatch):
    run, state = ran(CGPFLHeur(), tmp_path, grouped(3))
    monkeypatch.setattr(CGPFLHeur, "number", None)  # to call it would fail
    run.advance(state)
    assert state.server.clusters == 3


def test_from_the_chosen_number_on_it_is_cgpfl(tmp_path):
    (_, heur), (_, given) = (ran(a, tmp_path, grouped(3), rounds=3) for a in (CGPFLHeur(), CGPFL(K=3)))
    assert_equal((heur.server, everyone_of(heur)), (given.server, everyone_of(given)))
    assert heur.ledger.rows == given.ledger.rows


def everyone_of(state):
    return state.store.gather(np.arange(12))._stacks


def test_the_complexity_is_the_first_term_of_equation_12():
    """d = 100, m = 1000, K = 4: √(400/1000 · log(10 e)) = √(0.4 · (1 + log 10)) = √(0.4 · 3.302585) = 1.149363."""
    assert complexity(100, 1000, 4) == pytest.approx(1.149363, abs=1e-6)


def test_a_model_with_more_numbers_than_samples_counts_as_many_as_samples():
    """d = m: √(K · log e) = √K; at d > e·m the printed logarithm would be negative."""
    for d in (1000, 2000, 10_000_000):
        assert complexity(d, 1000, 4) == pytest.approx(2.0)
    assert complexity(999, 1000, 4) == pytest.approx(2.0, abs=1e-5)


def test_the_cost_weighs_clients_by_their_samples():
    """Two clusters, {0, 2} around 1 and {10}: ¼ · 1 + ½ · 1 + ¼ · 0 = 0.75."""
    omega = torch.tensor([[0.0], [2.0], [10.0]])
    assert cost(omega, np.array([0.25, 0.5, 0.25]), 2, 0) == pytest.approx(0.75)


def chosen(mu, positions, sizes=30):
    """The number chosen for clients whose models are these numbers (d = 1)."""
    fed = Federation(grouped(2, clients=len(positions)), 1, np.arange(len(positions)), Ledger())
    return CGPFLHeur(mu=mu).number(torch.tensor(positions)[:, None], fed)


def test_the_chosen_number_minimises_e():
    """d = 1, m = 4 · 30 = 120: the first term is a√K with a = √((1 + log 120)/120) = 0.219611.

    Models 0, 0, 1, 1: the cost is ¼ for K = 1 and 0 for K = 2 = N/2. e(1) = e(2) at μ = 4a (√2 − 1) = 0.363864.
    """
    assert math.sqrt((1 + math.log(120)) / 120) == pytest.approx(0.219611, abs=1e-6)
    assert chosen(0.363, [0.0, 0.0, 1.0, 1.0]) == 1
    assert chosen(0.365, [0.0, 0.0, 1.0, 1.0]) == 2


def test_no_more_than_half_as_many_clusters_as_clients():
    """Six clients far apart, and a weight that would give each its own."""
    assert chosen(1e6, [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]) == 3
    assert chosen(1e6, [0.0]) == 1


def test_equal_models_are_one_cluster():
    assert chosen(None, [1.0] * 6) == 1


def test_the_default_mu_makes_the_two_terms_greatest_values_equal():
    """e(1) = a + μ·cost(1), where a√(N/2) = μ·cost(1): 0, 0, 1, 1 has e = a (1 + √2) and a√2, so K = 2."""
    assert chosen(None, [0.0, 0.0, 1.0, 1.0]) == 2


def test_it_sends_what_cgpfl_sends(tmp_path):
    """P = 103 each way; K = N/2 = 2 or 1 different models after the first round."""
    run = engine("cgpfl_heur", tmp_path)
    state = run.start()
    run.advance(state)
    run.advance(state)
    first, second = ([r for r in state.ledger.rows if r.round == n] for n in (1, 2))
    assert [(r.way, r.params, r.broadcast_params) for r in first] == [("down", 412, 103), ("up", 412, 412)]
    assert [(r.way, r.params) for r in second] == [("down", 412), ("up", 412)]
    assert second[0].broadcast_params == 103 * state.server.clusters
    assert len(everyone(state)["hidden"]) == 1


def test_the_chosen_number_can_be_watched(tmp_path):
    run, state = ran(CGPFLHeur(), tmp_path, grouped(3))
    fed = Federation(run.world, 1, np.arange(12), Ledger())
    assert run.algorithm.observe(state.server, state.store.gather(fed.cohort), fed)["clusters/K"] == 3
