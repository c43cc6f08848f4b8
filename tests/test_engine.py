"""The round loop: who takes part, what happens when training diverges, when models are judged, where states lie."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from runs import composed, metrics, most_memory, ran, summary, table, untimed
from tiny import assert_close, assert_equal, assert_reduced, engine, leaves, world

from fedkd import build
from fedkd.algorithms import fedavg
from fedkd.algorithms.steps import supervised
from fedkd.core.errors import Diverged, FedkdError
from fedkd.core.optim import Local
from fedkd.data.partition import Assignment
from fedkd.engine import Settings
from fedkd.federation.cohort import draw
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger
from fedkd.federation.placed import Placed
from fedkd.federation.population import Population
from fedkd.federation.store import Disk, Memory
from fedkd.run import run

# who takes part


def test_a_cohort_is_a_function_of_seed_and_round():
    sizes = np.full(50, 7)
    cohorts = [draw(sizes, 0.2, "uniform", seed, t).tolist() for seed in (0, 0, 1) for t in (1, 2)]
    assert cohorts[:2] == cohorts[2:4]
    assert len(set(map(tuple, cohorts))) == 4
    for cohort in cohorts:
        assert len(set(cohort)) == 10  # 0.2·50, none twice
        assert cohort == sorted(cohort)


def test_a_uniform_cohort_draws_every_client_equally_often():
    sizes = np.arange(1, 11)
    drawn = np.concatenate([draw(sizes, 0.3, "uniform", 0, t) for t in range(4000)])
    # 3 of 10 clients a round: 1200 times each, with a standard deviation of sqrt(4000·0.3·0.7) = 29
    assert np.abs(np.bincount(drawn) - 1200).max() < 5 * 29


def test_a_cohort_by_size_draws_clients_in_proportion_to_their_data():
    sizes = np.array([1, 2, 3, 4])
    drawn = np.concatenate([draw(sizes, 0.25, "by_size", 0, t) for t in range(4000)])
    # one client a round, with p_k = n_k/n; the largest standard deviation is sqrt(4000·0.4·0.6) = 31
    assert np.abs(np.bincount(drawn) - 400 * sizes).max() < 5 * 31


@pytest.mark.parametrize("sampling", ["uniform", "by_size"])
def test_a_cohort_does_without_dropped_clients(sampling):
    sizes, dropped = np.arange(1, 7), frozenset({1, 4, 5})
    for t in range(50):
        assert not dropped & set(draw(sizes, 0.5, sampling, 0, t, dropped).tolist())
    assert draw(sizes, 1.0, sampling, 0, 1, dropped).tolist() == [0, 2, 3]


def test_those_drawn_instead_of_dropped_clients_are_the_next_in_line():
    """Else one client's divergence would move everybody's draw."""
    sizes = np.ones(20)
    before = set(draw(sizes, 0.5, "uniform", 0, 1).tolist())
    gone = min(before)
    after = set(draw(sizes, 0.5, "uniform", 0, 1, frozenset({gone})).tolist())
    assert before - after == {gone}
    assert len(after - before) == 1


# when training diverges


@pytest.fixture
def poison(monkeypatch):
    """Training on one sample gives NaN."""

    def spread(sample: int) -> None:
        def loss(net, w, batch):
            value, stats = supervised(net, w, batch)
            return value * torch.where((batch.row == sample).any(), torch.nan, 1.0), stats

        monkeypatch.setattr(fedavg, "supervised", loss)

    return spread


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
def test_a_diverging_client_stops_the_run_by_name_and_leaves_its_state(executor, poison, tmp_path):
    run = engine("fedavg", tmp_path, executor=executor)
    state = run.start()
    run.advance(state)
    before = state.server
    poison(int(run.world.population.train[2][0]))
    with pytest.raises(Diverged, match=r"round 2 at client 2\.\nThe likely cause is the learning rate: local.lr=0.1"):
        run.advance(state)
    assert state.round == 1
    assert_equal(state.server, before)


def test_what_was_logged_before_a_divergence_is_kept(poison, tmp_path):
    overrides = ("algorithm=fedavg", "model=mlr", "participation=0.5", "rounds=5", "local.batch_size=null")
    config = composed(*overrides)
    parts = build.parts(config)
    split = build.data(config, parts.dataset, parts.partition, parts.public).assignment
    sizes = np.bincount(split.client[split.role == 0])
    first, second = (set(draw(sizes, 0.5, "uniform", 0, t).tolist()) for t in (1, 2))
    victim = min(second - first)
    poison(int(split.index[(split.client == victim) & (split.role == 0)][0]))
    with pytest.raises(Diverged, match=f"round 2 at client {victim}"):
        run(config, tmp_path / "poisoned", overrides)
    ran(tmp_path / "first", *overrides, "rounds=1")
    (kept,), (line,) = metrics(tmp_path / "poisoned"), metrics(tmp_path / "first")
    assert untimed(kept) == untimed(line)


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
def test_skipping_drops_just_the_client_that_diverged(executor, poison, tmp_path):
    run = engine("fedavg", tmp_path, settings=Settings(on_nan="skip"), executor=executor)
    without = run.start()
    without.dropped = frozenset({1})
    run.advance(without)
    poison(int(run.world.population.train[1][0]))
    state = run.start()
    run.advance(state)
    assert state.dropped == {1}
    assert {row.clients for row in state.ledger.rows} == {3}  # what the failed attempt sent is not counted
    assert_reduced(state.server, without.server, executor)
    run.advance(state)
    assert state.round == 2


def test_a_run_in_which_everyone_diverges_ends(poison, tmp_path):
    run = engine("fedavg", tmp_path, settings=Settings(on_nan="skip"), local=Local(lr=1e38))
    with pytest.raises(FedkdError, match="diverged at every client by round"):
        run.run(run.start())


def test_a_skipping_run_tells_whom_it_dropped(poison, tmp_path, caplog):
    overrides = ("algorithm=fedavg", "model=mlr", "on_nan=skip", "local.batch_size=null", "local.steps=1")
    ran(tmp_path / "whole", *overrides)
    split = np.load(tmp_path / "whole" / "partition.npz")
    poison(int(split["index"][(split["client"] == 3) & (split["role"] == 0)][0]))
    ran(tmp_path / "skipping", *overrides)
    assert [line["comm/up/params"] for line in metrics(tmp_path / "skipping")] == [3 * 650, 6 * 650]
    assert summary(tmp_path / "skipping")["dropped_clients"] == [3]
    assert "round 1: client [3] dropped" in caplog.text


# the learning rate

RATES = {  # of rounds 1 to 4, for lr = 1
    "constant": (1, 1, 1, 1),
    "cosine": (1, (1 + math.sqrt(0.5)) / 2, 1 / 2, (1 - math.sqrt(0.5)) / 2),  # (1 + cos(π·t/4))/2, t = 0, 1, 2, 3
    "step": (1, 1, 0.1, 0.1),  # times 0.1 every 2 rounds
    "exponential": (1, 0.1, 0.01, 0.001),
}


@pytest.mark.parametrize("schedule", RATES)
def test_the_learning_rate_follows_its_schedule(schedule):
    local = Local(lr=1.0, schedule=schedule, decay=0.1, decay_every=2)
    assert [local.lr_at(t, 4) for t in (1, 2, 3, 4)] == pytest.approx(RATES[schedule])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_clients_train_with_the_round_s_learning_rate(optimizer, tmp_path):
    """A decay of 0 leaves the first round as it is and lets nothing move afterwards."""
    local = Local(lr=0.1, optimizer=optimizer, schedule="exponential", decay=0.0)
    run = engine("fedavg", tmp_path, local=local)
    state = run.start()
    start = state.server
    run.advance(state)
    first = state.server
    run.advance(state)
    assert not any(torch.equal(a, b) for a, b in zip(leaves(first), leaves(start), strict=True))
    assert_close(state.server, first, tolerance=1e-6)


# when models are judged


def test_models_are_judged_every_so_many_rounds_and_at_the_end(tmp_path):
    ran(tmp_path, "rounds=5", "eval.every=2", "algorithm=fedavg", "model=mlr")
    lines = metrics(tmp_path)
    assert [line["round"] for line in lines] == [2, 4, 5]
    # communication counts all rounds, judged or not: 4 clients, 650 numbers down and up
    assert [line["comm/total/params"] for line in lines] == [2 * 4 * 650 * t for t in (2, 4, 5)]


def test_only_so_many_clients_are_judged_and_always_the_same(tmp_path):
    for rounds in (1, 3):
        ran(tmp_path / str(rounds), f"rounds={rounds}", "clients=6", "eval.clients=2", "algorithm=fedavg", "model=mlr")
    tables = [table(tmp_path / str(rounds) / "clients.csv") for rounds in (1, 3)]
    judged = [[row["client"] for row in table if row["acc_personal"]] for table in tables]
    assert len(judged[0]) == 2
    assert judged[0] == judged[1]
    rows = [row for row in tables[1] if row["acc_personal"]]
    mean = np.mean([float(row["acc_personal"]) for row in rows])
    assert metrics(tmp_path / "3")[-1]["acc/personal/mean"] == pytest.approx(mean)


def test_judging_leaves_no_trace_in_training(tmp_path):
    for every in (1, 3):
        ran(tmp_path / str(every), "rounds=3", f"eval.every={every}")
    often, once = (metrics(tmp_path / str(every))[-1] for every in (1, 3))
    assert untimed(often) == untimed(once)


def test_fedhkds_personal_models_are_those_that_its_clients_sent(tmp_path):
    ran(tmp_path, "rounds=2", "algorithm=fedhkd", "model=mlr", "eval.sent=true")
    for line in metrics(tmp_path):
        assert line["acc/sent/mean"] == pytest.approx(line["acc/personal/mean"])
        assert line["loss/sent/mean"] == pytest.approx(line["loss/personal/mean"], rel=1e-5)


def test_what_clients_sent_is_judged_before_it_is_averaged(tmp_path):
    """FedAvg's models after local training from the shared one are what fine-tuning it would have given."""
    of = world(rounds=1)
    run = engine("fedavg", tmp_path, Settings(eval_sent=True, checkpoint_every=None), world=of, executor=None)
    state = run.start()
    run.advance(state)
    fed = Federation(of, 1, np.arange(4), Ledger())
    trained = fed.fit(supervised, fed.down(run.start().server.w, "model"))
    assert_close(state.sent.models, trained._stacks, tolerance=0)
    assert "acc/sent/mean" in run.evaluate(state).metrics


def test_methods_that_send_no_models_have_none_to_judge_and_say_so(tmp_path, caplog):
    ran(tmp_path, "rounds=1", "algorithm=fedmd", "eval.sent=true")
    assert "algorithm=fedmd sent no model" in caplog.text
    assert not [name for name in metrics(tmp_path)[-1] if "/sent/" in name]


# where states lie


def filled(number: int, clients: int) -> Placed:
    return Placed({"hidden": {"w": torch.full((clients, 2, 3), float(number)), "t": torch.full((clients,), number)}})


def first(client: int):
    return {"w": torch.full((2, 3), -1.0), "t": torch.tensor(-1)}


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    """A function that opens the store of the tiny world's four clients."""
    population = world().population
    return lambda: Memory(population, first) if request.param == "memory" else Disk(population, first, tmp_path)


def test_a_store_keeps_what_is_put_there_and_makes_what_is_not(store):
    states = store()
    states.scatter(np.array([1, 3]), filled(5, 2))
    read = states.gather(np.array([0, 1, 2, 3]))._stacks["hidden"]
    assert read["t"].tolist() == [-1, 5, -1, 5]
    assert read["t"].dtype == torch.int64
    assert read["w"][:, 0, 0].tolist() == [-1, 5, -1, 5]


def test_a_snapshot_survives_what_is_written_after_it(store):
    """As after a kill: a new store finds the states of the checkpoint, not those of the rounds since."""
    states = store()
    states.scatter(np.array([0, 1]), filled(1, 2))
    snapshot = states.snapshot()
    states.saved()
    states.scatter(np.array([1, 2]), filled(2, 2))
    states.scatter(np.array([1, 2]), filled(3, 2))
    assert states.gather(np.arange(4))._stacks["hidden"]["t"].tolist() == [1, 3, 3, -1]
    again = store()
    again.restore(snapshot)
    assert again.gather(np.arange(4))._stacks["hidden"]["t"].tolist() == [1, 1, -1, -1]


def test_a_snapshot_that_was_never_saved_does_not_spoil_the_one_before(store):
    """As after a kill while the checkpoint was being written."""
    states = store()
    states.scatter(np.array([0]), filled(1, 1))
    snapshot = states.snapshot()
    states.saved()
    states.scatter(np.array([0]), filled(2, 1))
    states.snapshot()
    states.scatter(np.array([0]), filled(3, 1))
    again = store()
    again.restore(snapshot)
    assert again.gather(np.array([0]))._stacks["hidden"]["t"].tolist() == [1]


def test_absent_clients_are_not_in_a_snapshot(tmp_path):
    run = engine("fedmd", tmp_path, settings=Settings(participation=0.5))
    state = run.start()
    run.advance(state)
    snapshot = state.store.snapshot()
    assert len(snapshot["clients"]) == 2
    assert all(len(leaf) == 2 for leaf in leaves(snapshot["states"]))


def test_ten_thousand_clients_with_ten_a_round_stay_on_the_disk(tmp_path):
    clients, small = 10_000, world()
    number = np.arange(clients)
    split = Assignment(number % 48, number.astype(np.int32), np.zeros(clients, np.uint8), np.arange(0))
    images, public, nets = small.population.images, small.population.public, small.population.nets
    population = Population.of(images, public, nets, np.zeros(clients, np.int64), split)
    settings = Settings(participation=10 / clients, store="disk", checkpoint_every=1, eval_clients=4)
    run = engine("fedmd", tmp_path, settings, world=replace(small, population=population, rounds=3), executor=None)
    before = most_memory(afresh=True)
    run.run(run.start())
    state = 4 * run.world.population.nets["hidden"].params
    assert most_memory() - before < 20e6
    on_disk = tmp_path / "checkpoint" / "clients" / "hidden.bin"
    assert on_disk.stat().st_size > 1000 * state  # client k's slots lie at 2k and 2k + 1 ...
    assert on_disk.stat().st_blocks * 512 < 100 * 4096  # ... of a sparse file: 30 clients, a page or two each
    assert (tmp_path / "checkpoint" / "state.pt").stat().st_size < 50_000  # a byte a client, and the ledger
