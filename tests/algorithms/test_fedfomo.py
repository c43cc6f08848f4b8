"""FedFomo: oracle, ledger, whom the clients choose, cohorts, validation splits."""

import math

import numpy as np
import pytest
import torch
from mixtures import after, seen, trained
from oracle import CLIENTS, HELD, client, federation, flat, scores, softmax, validated
from tiny import Normed, assert_equal, engine, everyone, leaves, world

from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedfomo import FedFomo
from fedkd.core.optim import Local
from fedkd.engine import Settings
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger

SAMPLES = [(x / 255, y) for samples in CLIENTS for x, y in samples]


def loss(w, samples):
    return sum(-math.log(softmax(scores(w, x))[y]) for x, y in samples) / len(samples)


def mixed(base, candidates, samples):
    """The weights and the mixture of one client."""
    gain = [(loss(base, samples) - loss(theta, samples)) / math.dist(theta, base) for theta in candidates]
    total = sum(max(g, 0) for g in gain)
    w = [max(g, 0) / total if total else 0.0 for g in gain]
    return w, [b + sum(w_n * (t[i] - b) for w_n, t in zip(w, candidates, strict=True)) for i, b in enumerate(base)]


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
@pytest.mark.parametrize("M", [1, 7, 0])
@pytest.mark.parametrize("held", [HELD, [[1, 2], [3]]], ids=["others' samples", "own samples"])
def test_three_rounds_mix_what_lowers_the_validation_loss(held, M, executor, tmp_path):
    """One other client: M = 7 is M = 1, and nothing is left to choose. Sums of weights over three rounds are P."""
    run = validated(federation(FedFomo(M=M), tmp_path, executor=executor), held)
    state = run.start()
    w = [flat(client(state, i).w) for i in range(2)]
    assert w[0] == w[1] == flat(state.server.w)
    affinity = np.zeros((2, 2))
    for _ in range(3):
        run.advance(state)
        theta = [trained(w_i, i) for i, w_i in enumerate(w)]
        for i in range(2):
            whose = [i, 1 - i][: M + 1]
            weights, w[i] = mixed(w[i], [theta[n] for n in whose], [SAMPLES[k] for k in held[i]])
            affinity[i, whose] += weights
    assert state.server.P.numpy() == pytest.approx(affinity, abs=1e-5)
    for i in range(2):
        assert flat(client(state, i).w) == pytest.approx(w[i], abs=5e-6)
    if M:
        assert affinity[0, 1] > 0  # the other is of use
    assert affinity.sum() <= 6 + 1e-9


def test_a_model_that_nothing_betters_stays(tmp_path):
    """Client 1, which begins with too little of class 1, learns more of it and validates on (0.2, class 0)."""
    run = validated(federation(FedFomo(M=0), tmp_path), [[1], [0]])
    state = run.start()
    start = flat(state.server.w)
    run.advance(state)
    assert loss(trained(start, 1), [(0.2, 0)]) > loss(start, [(0.2, 0)])
    assert flat(client(state, 1).w) == start
    assert state.server.P.tolist() == [[1, 0], [0, 0]]


def test_a_client_without_validation_samples_keeps_its_own_model(tmp_path):
    run = validated(federation(FedFomo(), tmp_path), [[], [0, 4]])
    state = run.start()
    start = flat(client(state, 0).w)
    run.advance(state)
    assert flat(client(state, 0).w) == pytest.approx(trained(start, 0), abs=2e-6)
    assert state.server.P[0].tolist() == [1, 0]


def test_a_model_goes_up_and_m_others_come_down(tmp_path):
    """P = 103. Of 4 clients each has 3 others: M = 3 sends all models, M = 2 no more than these, M = 9 is M = 3."""
    for given, count in ((2, 2), (3, 3), (9, 3)):
        up, down, weights = after(1, FedFomo(M=given), tmp_path).ledger.rows
        assert (up.way, up.what, up.params, up.broadcast_params) == ("up", "model", 4 * 103, 4 * 103)
        assert (down.way, down.what, down.params) == ("down", "peers' models", 4 * count * 103)
        assert down.broadcast_params == 4 * 103 if count == 3 else down.broadcast_params <= 4 * 103
        assert (weights.way, weights.params, weights.bytes) == ("up", 0, 4 * 4 * (count + 1))


def test_running_statistics_are_mixed_and_counted_in_bytes(tmp_path):
    state = after(1, FedFomo(M=3), tmp_path, architectures=(Normed(),))
    assert [r.params for r in state.ledger.rows if r.what.endswith("statistics")] == [0, 0, 0]
    variances = everyone(state)["normed"].w.stats["features.1.running_var"]
    assert bool((variances > 0).all())


def choices(method, affinity, round=1, cohort=range(4)):
    fed = Federation(world(), round, np.array(cohort), Ledger())
    return method.choose(torch.tensor(affinity), fed)


AFFINITY = [[9.0, 0.1, 0.3, 0.2], [0.5, 9.0, 0.1, 0.6], [0.2, 0.1, 9.0, 0.3], [0.3, 0.2, 0.1, 9.0]]


def test_without_exploration_it_takes_the_others_with_most_affinity():
    assert choices(FedFomo(M=2, epsilon=0), AFFINITY).tolist() == [[2, 3], [3, 0], [3, 0], [0, 1]]
    # places within the cohort: of clients 0, 2 and 3
    assert choices(FedFomo(M=1, epsilon=0), AFFINITY, cohort=[0, 2, 3]).tolist() == [[1], [2], [0]]


def test_epsilon_falls_to_nothing():
    """ε = 1 − 0.5 (t − 1): any others in round 1, the best from round 3 on."""
    greedy = [[2, 3], [3, 0], [3, 0], [0, 1]]
    method = FedFomo(M=2, epsilon=1, epsilon_decay=0.5)
    assert choices(method, AFFINITY, round=3).tolist() == choices(method, AFFINITY, round=9).tolist() == greedy
    assert choices(method, AFFINITY, round=1).tolist() != greedy


def test_those_never_met_come_in_any_order_but_never_the_client_itself():
    zeros = np.zeros((4, 4), np.float32)
    drawn = [choices(FedFomo(M=2, epsilon=0), zeros, round=t) for t in range(1, 30)]
    for i in range(4):
        assert {int(n) for rows in drawn for n in rows[i]} == {0, 1, 2, 3} - {i}
    assert all(len({*row}) == 2 for rows in drawn for row in rows.tolist())


def test_a_cohort_of_one_has_nobody_to_hear(tmp_path):
    state = after(3, FedFomo(), tmp_path, settings=Settings(participation=0.25, checkpoint_every=None))
    assert {r.what for r in state.ledger.rows} == {"model", "weights statistics"}
    assert float((state.server.P - torch.diag(state.server.P.diagonal())).abs().sum()) == 0


def test_absent_clients_keep_model_and_affinities(tmp_path):
    run = engine(FedFomo(M=1), tmp_path, settings=Settings(participation=0.5, checkpoint_every=None))
    state = run.start()
    run.advance(state)
    models, affinity = everyone(state)["hidden"], state.server.P
    run.advance(state)
    moved = {i for i in range(4) if not torch.equal(affinity[i], state.server.P[i])}
    assert len(moved) <= 2
    for a, b in zip(leaves(models), leaves(everyone(state)["hidden"]), strict=True):
        assert sum(not torch.equal(a[i], b[i]) for i in range(4)) <= 2
    assert_equal(state.server.w, run.start().server.w)


def test_its_users_see_the_shares_of_the_weights(tmp_path):
    shares = seen("weights", FedFomo(M=3), tmp_path)
    assert all(total == pytest.approx(1) or total == 0 for total in shares.sum(1))


def test_what_cannot_work_is_said():
    setting = Setting(4, 4, 1, Local())
    assert FedFomo().problems(setting) == FedFomo(M=100).problems(setting) == []
    (split,) = FedFomo().problems(setting._replace(validation=False))
    assert "Type partition.train" in split
    assert len(FedFomo(M=-1, epsilon=2, epsilon_decay=-1).problems(setting)) == 3
