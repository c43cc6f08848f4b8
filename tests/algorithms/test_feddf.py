"""FedDF and pFedDF: oracles for one architecture and two, ledger, early stopping, reductions."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from oracle import LR, PUBLIC, Adam, average, data, federation, flat, gradient, scores, sgd, softmax
from tiny import Hidden, Linear, Normed, assert_close, assert_equal, engine, leaves, world
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.feddf import FedDF, PFedDF
from fedkd.algorithms.steps import supervised
from fedkd.core.errors import FedkdError
from fedkd.core.optim import Local
from fedkd.core.seeds import derive, numpy_rng
from fedkd.engine import Settings
from fedkd.evaluate import evaluate
from fedkd.federation import cohort
from fedkd.federation.executors import choose
from fedkd.federation.executors.outline import Outline
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger
from fedkd.models.net import Architecture, Net
from fedkd.models.split import Split

EXECUTORS = ("serial", "vmapped")
SHORT = {"steps": 12, "patience": 8, "check_every": 4}  # for worlds of a few samples
SEEN = [x / 255 for x in PUBLIC]


def distil_slope(x, samples, ensemble):
    """Of the mean over samples of KL(σ(ensemble) ‖ σ(f(x, d))): (σ(f) − σ(ensemble)) d, for biases without d."""
    g = [0.0] * 4
    for d in samples:
        p, q = softmax(ensemble(d)), softmax(scores(x, d))
        for k in range(2):
            g[k] += (q[k] - p[k]) * d / len(samples)
            g[2 + k] += (q[k] - p[k]) / len(samples)
    return g


def divergence(x, samples, ensemble):
    pairs = [(softmax(ensemble(d)), softmax(scores(x, d))) for d in samples]
    return sum(a * math.log(a / b) for p, q in pairs for a, b in zip(p, q, strict=True)) / len(samples)


def distilled(x, ensemble, hp, train, held_out=(), free=(0, 1, 2, 3)):
    """The student after at most N steps on all of `train` at once, and its number of steps; `free` parameters move."""
    adam, best, least = Adam(4), (x, 0), divergence(x, held_out, ensemble) if held_out else 0.0
    for j in range(hp.steps):
        g = [d * (i in free) for i, d in enumerate(distil_slope(x, train, ensemble))]
        x = adam.step(x, g, hp.server_lr * (1 + math.cos(math.pi * j / hp.steps)) / 2)
        if held_out and ((j + 1) % hp.check_every == 0 or j + 1 == hp.steps):
            if (now := divergence(x, held_out, ensemble)) < least - 1e-4:
                best, least = (x, j + 1), now
            elif j + 1 - best[1] >= hp.patience:
                break
    return best if held_out else (x, hp.steps)


def ensemble_of(models):
    """Mean logits, every model counting the same."""
    return lambda d: average([scores(x, d) for x in models], [1] * len(models))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_three_rounds_without_validation_are_those_of_algorithm_1(executor, tmp_path):
    hp = FedDF(steps=7, batch_size=3, server_lr=0.05, validation=0)
    run = federation(hp, tmp_path, executor=executor)
    state = run.start()
    x = flat(state.server.models["one_input"])
    for _ in range(3):
        run.advance(state)
        models = [sgd(y := sgd(x, gradient(x, data(k))), gradient(y, data(k))) for k in range(2)]  # two epochs
        x, _ = distilled(average(models, [3, 2]), ensemble_of(models), hp, SEEN)  # n_k = 3, 2; the ensemble is even
        assert flat(state.server.models["one_input"]) == pytest.approx(x, abs=5e-6)
        assert int(state.server.steps["one_input"]) == 7


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("patience", "lr", "kept"), [(6, 0.02, [0, 6, 6]), (9, 0.02, [9, 6, 6]), (9, 0.6, [0, 0, 0])])
def test_the_student_nearest_to_the_ensemble_on_the_held_out_sample_is_kept(patience, lr, kept, executor, tmp_path):
    """A third of the 3 public samples, 1, is held out: the first in the order of (seed, "validation", round).

    `kept`, the kept students' steps, is what the oracle finds: more patience sees a dip through, and steps that are too
    long leave the average as it is.
    """
    hp = FedDF(steps=40, batch_size=2, server_lr=lr, validation=1 / 3, patience=patience, check_every=3)
    run = federation(hp, tmp_path, executor=executor)
    state = run.start()
    x = flat(state.server.models["one_input"])
    for number in (1, 2, 3):
        run.advance(state)
        models = [sgd(y := sgd(x, gradient(x, data(k))), gradient(y, data(k))) for k in range(2)]
        first, *rest = numpy_rng(derive(0, "validation", number)).permutation(3).tolist()
        train, held_out = [SEEN[i] for i in rest], [SEEN[first]]
        x, steps = distilled(average(models, [3, 2]), ensemble_of(models), hp, train, held_out)
        assert flat(state.server.models["one_input"]) == pytest.approx(x, abs=5e-6)
        assert int(state.server.steps["one_input"]) == steps == kept[number - 1]


@dataclass(frozen=True)
class NoBias(Architecture):
    """Logits w_k x: the oracle's model with b = 0."""

    name = "no_bias"

    def module(self, shape, classes):
        return Split(nn.Flatten(), nn.Linear(1, 2, bias=False))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_each_architecture_is_averaged_alone_and_distilled_from_all(executor, tmp_path):
    """Client 0 has biases, client 1 has none; an ensemble of the own architecture alone would move nothing."""
    hp = FedDF(steps=5, batch_size=3, server_lr=0.05, validation=0)
    run = federation(hp, tmp_path, executor=executor)
    other = Net(NoBias(), (1, 1, 1), 2)
    population = run.world.population
    population = replace(population, nets={**population.nets, "no_bias": other}, member=np.array([0, 1]))
    executors = {**run.world.executors, "no_bias": choose(executor, other, torch.device("cpu"), None, "fp32")}
    run.world = replace(run.world, population=population, executors=executors)
    state = run.start()

    def opened():
        second = state.server.models["no_bias"].weights["head.weight"].flatten().tolist()
        return [flat(state.server.models["one_input"]), [*second, 0.0, 0.0]]

    x, free = opened(), [(0, 1, 2, 3), (0, 1)]
    for _ in range(2):
        run.advance(state)
        for k in range(2):
            for _ in range(2):
                x[k] = sgd(x[k], [d * (i in free[k]) for i, d in enumerate(gradient(x[k], data(k)))], LR)
        ensemble = ensemble_of([list(x[0]), list(x[1])])
        x = [distilled(x[k], ensemble, hp, SEEN, free=free[k])[0] for k in range(2)]
        for found, expected in zip(opened(), x, strict=True):
            assert found == pytest.approx(expected, abs=5e-6)


def test_each_client_receives_and_sends_a_model_of_its_architecture(tmp_path):
    """P = 103 and 51, two clients each; two distinct messages go down."""
    run = engine("feddf", tmp_path, architectures=(Hidden(), Linear()))
    state = run.start()
    run.advance(state)
    assert [(r.way, r.what, r.clients, r.params, r.broadcast_params) for r in state.ledger.rows] == [
        ("down", "model", 4, 2 * 103 + 2 * 51, 103 + 51),
        ("up", "model", 4, 2 * 103 + 2 * 51, 2 * 103 + 2 * 51),
    ]


@pytest.mark.parametrize("name", ["feddf", "pfeddf"])
def test_with_one_architecture_the_same_crosses_as_in_fedavg(name, tmp_path):
    states = []
    for method in (name, "fedavg"):
        run = engine(method, tmp_path, architectures=(Normed(),))
        states.append(run.start())
        run.advance(states[-1])
    assert states[0].ledger.rows == states[1].ledger.rows


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_steps_it_is_fedavg(executor, participation, tmp_path):
    settings = Settings(participation=participation)
    runs = [engine(a, tmp_path, settings=settings, executor=executor) for a in (FedDF(steps=0), FedAvg())]
    states = [run.start() for run in runs]
    for _ in range(2):
        for run, state in zip(runs, states, strict=True):
            run.advance(state)
        assert_equal(states[0].server.models["hidden"], states[1].server.w)


def test_an_ensemble_of_one_teaches_nothing(tmp_path):
    """One client a round is student and teacher: the gradient is rounding alone, which Adam would follow far."""
    settings = Settings(participation=0.25)
    runs = [engine(a, tmp_path, settings=settings, rounds=3) for a in (FedDF(**SHORT), FedAvg())]
    states = [run.start() for run in runs]
    for _ in range(3):
        for run, state in zip(runs, states, strict=True):
            run.advance(state)
        assert_equal(states[0].server.models["hidden"], states[1].server.w)
        assert int(states[0].server.steps["hidden"]) == 0


@pytest.mark.parametrize("architecture", [Hidden(), Normed()])
def test_distillation_brings_the_shared_model_nearer_to_the_ensemble(architecture, tmp_path):
    """Divergence on all public samples after one round, with and without the server's steps."""
    local = Local(epochs=10, batch_size=4, lr=0.3)  # so that the clients part

    def apart(steps):
        method = FedDF(steps=steps, server_lr=0.01, validation=0)
        run = engine(method, tmp_path, architectures=(architecture,), local=local)
        state, net = run.start(), run.world.population.nets[architecture.name]
        fed = Federation(run.world, 1, np.arange(4), Ledger())
        trained = fed.fit(supervised, fed.down_by_architecture(state.server.models, "model"))
        run.advance(state)
        target = torch.stack([net.predict(x, fed.public) for x in fed.up(trained, "model")]).mean(0).log_softmax(-1)
        student = net.predict(state.server.models[architecture.name], fed.public).log_softmax(-1)
        return float((target.exp() * (target - student)).sum(-1).mean())

    assert apart(60) < 0.7 * apart(0)


@pytest.mark.parametrize("architectures", [(Hidden(), Linear()), (Normed(),)])
def test_a_long_distillation_ends_at_the_same_step_under_both_executors(architectures, tmp_path):
    """Also where a bias stands before batch normalisation: its gradient is rounding, along which Adam would step."""
    found = []
    for executor in EXECUTORS:
        method = FedDF(steps=200, check_every=5, patience=50)
        run = engine(method, tmp_path, executor=executor, architectures=architectures, local=Local(epochs=6, lr=0.3))
        state = run.start()
        run.advance(state)
        run.advance(state)
        found.append(state.server)
    assert 0 < min(map(int, found[0].steps.values())) < 200
    assert_close(found[0], found[1])


def test_an_architecture_that_nobody_trains_keeps_its_model(tmp_path):
    """Clients 0 and 2 are `hidden`, 1 and 3 `linear`."""
    run = engine(FedDF(**SHORT), tmp_path, settings=Settings(participation=0.25), architectures=(Hidden(), Linear()))
    state, before = run.start(), run.start().server
    (who,) = cohort.draw(run.world.population.train.sizes, 0.25, "uniform", 0, 1)
    run.advance(state)
    kept, trained = ("linear", "hidden") if who % 2 == 0 else ("hidden", "linear")
    assert_equal(state.server.models[kept], before.models[kept])
    assert not torch.equal(leaves(state.server.models[trained])[0], leaves(before.models[trained])[0])


def judged(run, state, who=range(4)):
    fed = Federation(run.world, state.round, np.array(who), Ledger())
    return run.algorithm.personal(state.server, state.store.gather(fed.cohort), fed)._stacks


def test_every_client_is_judged_by_the_model_of_its_architecture(tmp_path):
    run = engine("feddf", tmp_path, architectures=(Hidden(), Linear()))
    state = run.start()
    run.advance(state)
    models = judged(run, state)
    for arch in ("hidden", "linear"):
        for rows, one in zip(leaves(models[arch]), leaves(state.server.models[arch]), strict=True):
            assert len(rows) == 2
            assert all(torch.equal(row, one) for row in rows)
    assert run.algorithm.shared(state.server) is None
    verdict = evaluate(run.algorithm, state.server, state.store, run.world, 1, np.arange(4))
    assert verdict.shared is None
    assert verdict.metrics["distillation/steps/linear"] == int(state.server.steps["linear"])


def test_one_architecture_has_a_shared_model_that_everyone_is_judged_by(tmp_path):
    run = engine("feddf", tmp_path)
    state = run.start()
    run.advance(state)
    assert run.algorithm.shared(state.server) is state.server.models["hidden"]
    metrics = evaluate(run.algorithm, state.server, state.store, run.world, 1, np.arange(4)).metrics
    assert metrics["acc/personal/mean"] == metrics["acc/shared/mean"]
    assert "acc/shared/global" in metrics


@pytest.mark.parametrize("executor", EXECUTORS)
def test_pfeddf_fine_tunes_the_fused_model_on_each_clients_training_data(executor, tmp_path):
    """Two whole-shard steps from the fused model, after a run that is FedDF's to the bit."""
    hp = {"steps": 7, "batch_size": 3, "server_lr": 0.05}
    run, plain = (federation(a, tmp_path, executor=executor) for a in (PFedDF(finetune_epochs=2, **hp), FedDF(**hp)))
    state, other = run.start(), plain.start()
    for _ in range(2):
        run.advance(state)
        judged(run, state, range(2))
        plain.advance(other)
    assert_equal(state.server, other.server)
    models, fused = judged(run, state, range(2))["one_input"], flat(state.server.models["one_input"])
    for k in range(2):
        own = sgd(y := sgd(fused, gradient(fused, data(k))), gradient(y, data(k)))
        assert flat({name: w[k] for name, w in models.weights.items()}) == pytest.approx(own, abs=2e-6)
    assert flat(run.algorithm.shared(state.server)) == fused


def test_pfeddf_without_fine_tuning_is_feddf(tmp_path):
    run = engine(PFedDF(finetune_epochs=0, **SHORT), tmp_path, architectures=(Hidden(), Linear()))
    state = run.start()
    run.advance(state)
    plain = FedDF(**SHORT).personal(state.server, (), Federation(run.world, 1, np.arange(4), Ledger()))
    assert_equal(judged(run, state), plain._stacks)


def test_a_dry_run_counts_what_crosses_and_trains_nothing(tmp_path):
    with FakeTensorMode():
        tiny = replace(world(architectures=(Hidden(), Linear())), executors={"hidden": Outline(), "linear": Outline()})
        run = engine(FedDF(), tmp_path, world=tiny, executor=None)
        state = run.start()
        run.advance(state)
        run.advance(state)
    assert [(r.params, r.broadcast_params) for r in state.ledger.rows] == [(308, 154), (308, 308)] * 2


def test_a_server_that_diverges_says_so(tmp_path):
    run = engine(FedDF(server_lr=1e38, **SHORT), tmp_path)
    state = run.start()
    with pytest.raises(FedkdError, match=r"at the server diverged[^$]*algorithm\.server_lr"):
        run.advance(state)


def test_what_cannot_work_is_refused():
    setting = Setting(4, 4, 2, Local())
    assert FedDF().problems(setting) == PFedDF().problems(setting) == PFedDF(finetune_epochs=0).problems(setting) == []
    wrong = {"steps": -1, "batch_size": 0, "patience": 0, "check_every": 0, "server_lr": 0.0, "validation": 1.0}
    assert len(FedDF(**wrong).problems(setting)) == 6
    assert len(PFedDF(finetune_epochs=-1, **wrong).problems(setting)) == 7
