"""L2SGD: oracle, ledger, the coin, reductions."""

from dataclasses import replace

import numpy as np
import pytest
from groups import ran
from oracle import LR, average, client, data, federation, flat, gradient, sgd
from tiny import Normed, assert_close, assert_equal, everyone, leaves, world
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkd.algorithms.base import OwnModel, Setting
from fedkd.algorithms.l2sgd import L2SGD
from fedkd.algorithms.local import Local
from fedkd.core import optim, tree
from fedkd.engine import Settings
from fedkd.federation import cohort
from fedkd.federation.executors.outline import Outline
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger


@pytest.fixture
def tosses(monkeypatch):
    """Say what the coin shows, round by round."""

    def say(heads):
        monkeypatch.setattr(Federation, "coin", lambda self, p: heads[self.round - 1])

    return say


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
def test_five_rounds_are_those_of_algorithm_1(executor, tosses, tmp_path):
    """n = 2, p = 0.4, λ = 0.3: tails steps by α/(n(1 − p)), heads goes αλ/(np) of the way to the even mean."""
    heads = [False, True, False, True, True]
    tosses(heads)
    run = federation(L2SGD(p=0.4, lambda_=0.3), tmp_path, executor=executor)
    state = run.start()
    x = [flat(client(state, i).w) for i in range(2)]
    assert x[0] == x[1]
    for head in heads:
        run.advance(state)
        if head:
            mean, way = average(x, [1, 1]), LR * 0.3 / (2 * 0.4)
            x = [[(1 - way) * a + way * b for a, b in zip(x_i, mean, strict=True)] for x_i in x]
        else:
            for i in range(2):
                for _ in range(2):  # two epochs of one full batch
                    x[i] = sgd(x[i], gradient(x[i], data(i)), LR / (2 * (1 - 0.4)))
    for i in range(2):
        assert flat(client(state, i).w) == pytest.approx(x[i], abs=1e-6)


def heads_of(p, rounds):
    here = world()
    return [n for n in range(1, rounds + 1) if Federation(here, n, np.arange(4), Ledger()).coin(p)]


def test_only_the_rounds_whose_coin_shows_heads_are_counted(tmp_path):
    """P = 103, and P · P · P in such a round: four models up, their mean down to four clients."""
    _, state = ran(L2SGD(p=0.5), tmp_path, world(), 6)
    heads = heads_of(0.5, 6)
    assert 0 < len(heads) < 6
    assert [(r.round, r.way, r.what, r.params, r.broadcast_params) for r in state.ledger.rows] == [
        row for number in heads for row in ((number, "up", "model", 412, 412), (number, "down", "mean model", 412, 103))
    ]


def test_a_dry_run_tosses_the_same_coin(tmp_path):
    _, state = ran(L2SGD(p=0.5), tmp_path, world(), 6)
    with FakeTensorMode():
        outline = replace(world(), executors={"hidden": Outline()})
        _, planned = ran(L2SGD(p=0.5), tmp_path, outline, 6)
    assert planned.ledger.rows == state.ledger.rows != []


def test_a_seldom_coin_communicates_seldom():
    """Of 400 tosses at p = 0.1, 40 ± 4 · 6 are heads: the deviation is sqrt(400 · 0.1 · 0.9) = 6."""
    assert 16 <= len(heads_of(0.1, 400)) <= 64


def test_the_rounds_of_tails_are_local_training_at_its_own_rate(tosses, monkeypatch, tmp_path):
    """α = 0.1, n = 4, p = 0.5: the clients' rate is 0.1/(4 · 0.5) = 0.05. Round 2 moves nothing, as λ = 0."""
    tosses([False, True])
    monkeypatch.setattr(L2SGD, "init_client", lambda self, net, server, seed: OwnModel(net.init(seed)))
    _, alone = ran(Local(), tmp_path, world(local=optim.Local(epochs=2, batch_size=4, lr=0.05)), 1)
    _, state = ran(L2SGD(p=0.5, lambda_=0.0), tmp_path, world(), 2)
    assert_equal(everyone(state), everyone(alone))


@pytest.mark.parametrize("head", [False, True])
def test_the_learning_rates_schedule_holds_for_both_kinds_of_steps(head, tosses, tmp_path):
    """Halved after round 1: with one full batch, round 2 then moves half as far as it would."""
    tosses([False, head])
    local = optim.Local(epochs=1, batch_size=None, lr=0.2, decay=0.5)
    moves = []
    for schedule in ("constant", "exponential"):
        run, state = ran(L2SGD(p=0.5, lambda_=5.0), tmp_path, world(local=replace(local, schedule=schedule)))
        before = everyone(state)
        run.advance(state)
        moves.append(tree.sub(everyone(state), before))
    assert_close(moves[1], tree.scale(0.5, moves[0]), tolerance=1e-6)
    assert any(leaf.abs().max() > 1e-3 for leaf in leaves(moves[1]))


def mean_of(state, arch):
    return tree.map(lambda leaf: leaf.mean(0), everyone(state)[arch])


def test_a_step_towards_the_mean_leaves_the_mean_where_it_was(tosses, tmp_path):
    """And a whole one, αλ/(np) = 0.1 · 20/(4 · 0.5) = 1, puts every model there, statistics included."""
    tosses([False, True])
    run, state = ran(L2SGD(p=0.5, lambda_=20.0), tmp_path, world(architectures=(Normed(),)))
    before = mean_of(state, "normed")
    run.advance(state)
    assert_close(mean_of(state, "normed"), before, tolerance=1e-6)
    for leaf in leaves(everyone(state)):
        assert_close(leaf, leaf[:1].expand_as(leaf), tolerance=1e-6)


def test_of_a_partial_cohort_only_the_members_meet(tosses, tmp_path):
    """Two of n = 4 clients go 0.1 · 10/(4 · 0.5) = 1/2 of the way to the mean of the two."""
    tosses([False, True])
    run, state = ran(L2SGD(p=0.5, lambda_=10.0), tmp_path, world())
    run.settings = Settings(participation=0.5)
    a, b = cohort.draw(run.world.population.train.sizes, 0.5, "uniform", 0, 2)
    before = leaves(everyone(state))[0].clone()
    run.advance(state)
    after = leaves(everyone(state))[0]
    expected = before.clone()
    expected[a], expected[b] = 0.75 * before[a] + 0.25 * before[b], 0.25 * before[a] + 0.75 * before[b]
    assert_close(after, expected, tolerance=1e-6)


def test_coins_that_never_fall_and_steps_past_the_mean_are_refused():
    setting = Setting(20, 20, 1, optim.Local(lr=2.0))
    assert L2SGD().problems(setting) == []
    for p in (0.0, 1.0, float("nan")):
        (problem,) = L2SGD(p=p).problems(setting)
        assert "must lie between 0 and 1" in problem
    (problem,) = L2SGD(lambda_=-0.1).problems(setting)
    assert "must not be negative" in problem
    (problem,) = L2SGD(lambda_=4.0).problems(setting)  # 2 · 4/(20 · 0.1) = 4
    assert "is 4, above 1" in problem
    assert "Type algorithm.lambda_=1 or less" in problem
