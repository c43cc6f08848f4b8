"""CGPFL: oracle, ledger, reduction to pFedMe, clusters that keep their numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from groups import grouped, ran
from oracle import LR, client, data, federation, flat, gradient, sgd
from tiny import assert_equal, engine, everyone, world
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkd.algorithms.base import Setting
from fedkd.algorithms.cgpfl import CGPFL, Server
from fedkd.algorithms.pfedme import PFedMe
from fedkd.core.optim import Local
from fedkd.engine import Settings
from fedkd.federation import cohort
from fedkd.federation.executors.outline import Outline
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger

EXECUTORS = ("serial", "vmapped")
SMALL = {"lambda_": 0.8, "R": 3, "S": 2}


def models(server: Server) -> list[list[float]]:
    """The generalised models, opened."""
    return [flat({name: w[k] for name, w in server.omega.items()}) for k in range(server.clusters)]


def local_rounds(theta, omega, samples, beta, lambda_=0.8, R=3, S=2):
    """Lines 6-11 for one client whose batch is all of its samples."""
    for _ in range(R):
        for _ in range(S):
            pull = [lambda_ * (a - b) for a, b in zip(theta, omega, strict=True)]
            theta = sgd(theta, [g + p for g, p in zip(gradient(theta, samples), pull, strict=True)])  # l. 8
        omega = [b - beta * (b - a) for a, b in zip(theta, omega, strict=True)]  # l. 10
    return theta, omega


def mix(alpha, old, new):
    return [(1 - alpha) * a + alpha * b for a, b in zip(old, new, strict=True)]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, None), (0.7, 0.3)])
def test_three_rounds_with_a_cluster_for_each_client_are_those_of_algorithm_1(executor, alpha, beta, tmp_path):
    """Two clients, K = 2: k-means can only part them, so client i's cluster is i, and its mean is ω_i."""
    run = federation(CGPFL(K=2, alpha=alpha, beta=beta, **SMALL), tmp_path, executor=executor)
    state = run.start()
    (start,) = models(state.server)
    theta, omegas = [start, start], [start, start]  # all models begin at the same point
    for _ in range(3):
        run.advance(state)
        for i in range(2):
            theta[i], sent = local_rounds(theta[i], omegas[i], data(i), LR * 0.8 if beta is None else beta)
            omegas[i] = mix(alpha, omegas[i], sent)  # l. 14
    assert state.server.cluster.tolist() == [0, 1]
    for i in range(2):
        assert models(state.server)[i] == pytest.approx(omegas[i], abs=2e-6)
        assert flat(client(state, i).theta) == pytest.approx(theta[i], abs=2e-6)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("alpha", [1.0, 0.7])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_one_cluster_is_pfedme(executor, alpha, participation, tmp_path):
    """To the bit. CGPFL's α is pFedMe's β, its β is pFedMe's ηλ, its S is pFedMe's K."""
    states = []
    for method in (CGPFL(K=1, alpha=alpha, **SMALL), PFedMe(beta=alpha, eta=None, lambda_=0.8, R=3, K=2)):
        run = engine(method, tmp_path, settings=Settings(participation=participation), executor=executor)
        states.append(run.start())
        for _ in range(3):
            run.advance(states[-1])
    one, two = states
    assert_equal({name: w[0] for name, w in one.server.omega.items()}, two.server.w.weights)
    assert_equal(everyone(one), everyone(two))
    assert one.ledger.rows == two.ledger.rows


def test_the_personal_model_is_theta_and_the_server_shares_none(tmp_path):
    run = federation(CGPFL(K=2, **SMALL), tmp_path)
    state = run.start()
    run.advance(state)
    own = state.store.gather(np.arange(2))
    judged = run.algorithm.personal(state.server, own, Federation(run.world, 1, np.arange(2), Ledger()))
    assert judged._stacks["one_input"] is own._stacks["one_input"].theta
    assert run.algorithm.shared(state.server) is None


def rows(state, number):
    return [(r.way, r.what, r.params, r.broadcast_params) for r in state.ledger.rows if r.round == number]


def test_a_model_goes_each_way_and_k_different_ones_go_down(tmp_path):
    """P = 103: all four clients receive the same first model, then each one of K = 2."""
    run = engine(CGPFL(K=2), tmp_path)
    state = run.start()
    run.advance(state)
    run.advance(state)
    up = ("up", "model", 4 * 103, 4 * 103)
    assert rows(state, 1) == [("down", "model", 4 * 103, 103), up]
    assert rows(state, 2) == [("down", "model", 4 * 103, 2 * 103), up]


def test_running_statistics_never_leave_the_client(tmp_path):
    from tiny import Normed

    run = engine(CGPFL(K=2), tmp_path, architectures=(Normed(),))
    state = run.start()
    run.advance(state)
    assert {row.what for row in state.ledger.rows} == {"model"}
    theta = everyone(state)["normed"].theta
    assert bool((theta.stats["features.1.running_mean"] != 0).any())


def test_a_dry_run_counts_k_models_after_the_first_round(tmp_path):
    with FakeTensorMode():
        tiny = world()
        run = engine(CGPFL(K=2), tmp_path, world=replace(tiny, executors={"hidden": Outline()}), executor=None)
        state = run.start()
        run.advance(state)
        run.advance(state)
    assert rows(state, 1)[0] == ("down", "model", 4 * 103, 103)
    assert rows(state, 2)[0] == ("down", "model", 4 * 103, 2 * 103)


def test_clients_of_one_kind_find_each_other(tmp_path):
    """12 clients in turn of three kinds, which name the classes differently."""
    _, state = ran(CGPFL(K=3, R=5), tmp_path, grouped(3))
    assert state.server.cluster.tolist() == [0, 1, 2] * 4


def test_clusters_keep_their_numbers_from_round_to_round(tmp_path):
    run, state = ran(CGPFL(K=3, R=5), tmp_path, grouped(3))
    for _ in range(3):
        run.advance(state)
        assert state.server.cluster.tolist() == [0, 1, 2] * 4


def aggregated(cluster, omega, uploaded, cohort, **how):
    """The server's step on models of one number."""
    fed = Federation(grouped(2), 2, np.array(cohort), Ledger())
    server = Server({"w": torch.tensor(omega)[:, None]}, torch.tensor(cluster))
    after = CGPFL(**{"K": len(omega), **how}).aggregate(server, {"w": torch.tensor(uploaded)[:, None]}, fed)
    return after.omega["w"].flatten().tolist(), after.cluster.tolist()


def test_a_new_cluster_goes_on_the_model_it_lies_nearest_to():
    """Means 10 = (9 + 11)/2 and 1 = (0 + 2)/2, found in this order; models 0 and 8: 10 goes on 8, 1 on 0.

    With α = 0.5: (0 + 1)/2 and (8 + 10)/2.
    """
    omega, cluster = aggregated([0, 0, 1, 1] + [-1] * 8, [0.0, 8.0], [9.0, 11.0, 0.0, 2.0], [0, 1, 2, 3], alpha=0.5)
    assert omega == [0.5, 9.0]
    assert cluster[:4] == [1, 1, 0, 0]


def test_absent_clients_keep_their_clusters():
    omega, cluster = aggregated([0, 1, 0, 1] + [-1] * 8, [0.0, 8.0], [1.0, 9.0, 3.0], [0, 1, 4])
    assert omega == [2.0, 9.0]
    assert cluster[:6] == [0, 1, 0, 1, 0, -1]


def test_a_model_that_nobody_is_next_to_stays():
    """Two clients are left for three models: 1 goes on 0, 9 on 8; the model 50 stays."""
    omega, cluster = aggregated([0, 1, 2] + [-1] * 9, [0.0, 50.0, 8.0], [1.0, 9.0], [0, 1])
    assert omega == [1.0, 50.0, 9.0]
    assert cluster[:3] == [0, 2, 2]


def test_who_has_not_been_clustered_receives_the_mean_of_the_models():
    fed = Federation(grouped(2), 2, np.array([0, 1, 2]), Ledger())
    server = Server({"w": torch.tensor([[0.0], [8.0]])}, torch.tensor([1, -1, 0] + [-1] * 9))
    assert [m["w"].item() for m in CGPFL(K=2).models(server, fed)] == [8.0, 4.0, 0.0]


def test_with_partial_cohorts_each_cluster_is_one_message_and_all_newcomers_are_another(tmp_path):
    run = engine(CGPFL(K=2), tmp_path, settings=Settings(participation=0.75))
    state, counts = run.start(), []
    before = [-1] * 4
    for number in range(1, 6):
        who = cohort.draw(run.world.population.train.sizes, 0.75, "uniform", 0, number)
        run.advance(state)
        counts.append(len({before[i] for i in who}))
        assert rows(state, number)[0] == ("down", "model", 3 * 103, counts[-1] * 103)
        after = state.server.cluster.tolist()
        assert [after[i] for i in range(4) if i not in who] == [before[i] for i in range(4) if i not in who]
        before = after
    assert -1 not in before
    assert max(counts) >= 2


def test_the_clusters_and_their_number_can_be_watched(tmp_path):
    run, state = ran(CGPFL(K=3, R=5), tmp_path, grouped(3))
    fed = Federation(run.world, 1, np.array([0, 4, 5]), Ledger())
    seen = run.algorithm.observe(state.server, state.store.gather(fed.cohort), fed)
    assert seen["clusters/K"] == 3
    assert seen["clusters"].kind == "clusters"
    assert seen["clusters"].values.tolist() == [0, 1, 2]
    start = run.start()
    assert (
        run.algorithm.observe(start.server, start.store.gather(fed.cohort), fed)["clusters"].values.tolist() == [-1] * 3
    )


def test_what_cannot_work_is_refused():
    whole = Setting(4, 4, 1, Local())
    assert CGPFL().problems(whole) == []
    (problem,) = CGPFL(K=5).problems(whole)
    assert "between 1 and the cohort's size, which is 4" in problem
    assert len(CGPFL(K=0, R=0, S=0).problems(whole)) == 3
    for local in (Local(optimizer="adam"), Local(momentum=0.9), Local(weight_decay=0.1)):
        (problem,) = CGPFL().problems(Setting(4, 4, 1, local))
        assert "local.momentum=0" in problem


def test_the_local_settings_that_do_not_count_change_nothing(tmp_path):
    states = []
    for local in (Local(epochs=2, batch_size=4), Local(epochs=None, steps=7, batch_size=4)):
        run = engine(CGPFL(K=2, R=2), tmp_path, local=local)
        states.append(run.start())
        run.advance(states[-1])
    assert_equal(everyone(states[0]), everyone(states[1]))
