"""Sim-pFL and TopK-pFL: oracle, ledger, reductions, cohorts."""

import math

import pytest
import torch
from mixtures import after, distilled, mixture, seen, soft, trained
from oracle import client, federation, flat
from tiny import Hidden, Linear, assert_close, assert_equal, engine, everyone

from fedkd.algorithms.base import Setting
from fedkd.algorithms.ktpfl import KTpFL
from fedkd.algorithms.local import Local
from fedkd.algorithms.sim_pfl import SimPFL, TopKPFL, cosines
from fedkd.core import optim
from fedkd.engine import Settings

MIXED = (Hidden(), Linear())
HALF = Settings(participation=0.5, checkpoint_every=None)
T = 0.3  # sharpens the predictions, so that they differ


def cosine(a, b):
    a, b = (([v for row in s for v in row]) for s in (a, b))
    return sum(u * v for u, v in zip(a, b, strict=True)) / math.sqrt(sum(u * u for u in a) * sum(v * v for v in b))


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
@pytest.mark.parametrize("method", [SimPFL, lambda *how: TopKPFL(*how, K=1), lambda *how: TopKPFL(*how, K=2)])
def test_three_rounds_train_mix_and_distil(method, executor, tmp_path):
    """Of two clients, the K = 1 most similar is the client itself, the K = 2 are both."""
    run = federation(method(T, 2, 3, 0.8), tmp_path, executor=executor)
    state = run.start()
    w = [flat(client(state, n).w) for n in range(2)]
    for _ in range(3):
        run.advance(state)
        w = [trained(w_n, n) for n, w_n in enumerate(w)]
        s = [soft(w_n, T) for w_n in w]
        apart = cosine(*s)
        assert apart < 0.99
        of_own = {"sim_pfl": 1 / (1 + apart), "topk_pfl": 1 / getattr(run.algorithm, "K", 1)}[run.algorithm.name]
        c = [[of_own, 1 - of_own], [1 - of_own, of_own]]
        w = [distilled(w_n, mixture(c[n], s), T, 2, 0.8) for n, w_n in enumerate(w)]
    assert state.server.c.flatten().tolist() == pytest.approx([*c[0], *c[1]], abs=1e-6)
    for n in range(2):
        assert flat(client(state, n).w) == pytest.approx(w[n], abs=5e-6)


@pytest.mark.parametrize("name", ["sim_pfl", "topk_pfl"])
def test_what_is_sent_is_what_kt_pfl_sends(name, tmp_path):
    """Q = 6 public samples a round, L = 3 classes: U = D = 18, and each of the 4 mixtures is another message."""
    rows = after(1, name, tmp_path, architectures=MIXED).ledger.rows
    assert [(r.way, r.params, r.broadcast_params) for r in rows] == [("up", 4 * 18, 4 * 18), ("down", 4 * 18, 4 * 18)]


@pytest.mark.parametrize("settings", [None, HALF], ids=["all", "half"])
def test_topk_with_everyone_is_the_uniform_teacher(settings, tmp_path):
    """K = 5 of 4 clients are all of them, as with KT-pFL when ρ is infinite."""
    how = {"settings": settings, "architectures": MIXED}
    all_of_them = after(3, TopKPFL(eta_2=20.0), tmp_path, **how)
    assert_close(everyone(all_of_them), everyone(after(3, KTpFL(eta_2=20.0, rho=math.inf), tmp_path, **how)))
    with pytest.raises(AssertionError):
        assert_close(everyone(all_of_them), everyone(after(3, TopKPFL(eta_2=20.0, K=1), tmp_path, **how)), 1e-3)


@pytest.mark.parametrize("method", [SimPFL(distillation_steps=0), TopKPFL(distillation_steps=0)], ids=lambda m: m.name)
def test_without_distillation_it_is_local_training(method, tmp_path):
    alone, silent = (after(2, a, tmp_path, architectures=MIXED) for a in (Local(), method))
    assert_equal(everyone(silent), everyone(alone))


def test_weights_are_shares_of_similarity_or_even_among_the_nearest():
    """Three predictions of one sample, (1, 0), (0.6, 0.8) of length 1 and (0, 2), whose length does not matter."""
    similarity = cosines(torch.tensor([[[1.0, 0.0]], [[0.6, 0.8]], [[0.0, 2.0]]]))
    torch.testing.assert_close(similarity, torch.tensor([[1.0, 0.6, 0.0], [0.6, 1.0, 0.8], [0.0, 0.8, 1.0]]))
    shares = torch.tensor([[1 / 1.6, 0.6 / 1.6, 0.0], [0.6 / 2.4, 1 / 2.4, 0.8 / 2.4], [0.0, 0.8 / 1.8, 1 / 1.8]])
    torch.testing.assert_close(SimPFL().coefficients(similarity), shares)
    nearest = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]])
    torch.testing.assert_close(TopKPFL(K=2).coefficients(similarity), nearest)


def test_a_client_is_among_its_own_nearest_even_beside_twins():
    assert torch.equal(TopKPFL(K=1).coefficients(torch.ones(5, 5)), torch.eye(5))


def test_users_see_everyone_s_last_row(tmp_path):
    c = seen("coefficients", TopKPFL(K=2), tmp_path, architectures=MIXED)
    assert c.sum(1) == pytest.approx([1] * 4)
    assert c.diagonal() == pytest.approx([0.5] * 4)
    run = engine(SimPFL(), tmp_path, architectures=MIXED, settings=HALF)
    state = run.start()
    before = torch.zeros(4, 4)
    for _ in range(4):
        run.advance(state)
        c = state.server.c
        assert int((c != before).any(1).sum()) <= 2  # the cohort's rows
        assert {round(float(total), 5) for total in c.sum(1)} <= {0.0, 1.0}
        before = c


def test_what_cannot_work_is_said():
    setting = Setting(4, 4, 2, optim.Local())
    assert SimPFL().problems(setting) == TopKPFL().problems(setting) == []
    temperature, k = TopKPFL(temperature=0, K=0).problems(setting)
    assert "temperature" in temperature
    assert "at least 1" in k
