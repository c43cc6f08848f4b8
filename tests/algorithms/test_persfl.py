"""PersFL: oracle, ledger, reductions, newcomers, what is shown."""

import math

import numpy as np
import pytest
import torch
from oracle import CLIENTS, HELD, average, client, data, federation, flat, gradient, scores, sgd, softmax, validated
from runs import composed, metrics, ran
from tiny import CLASSES, Hidden, Normed, assert_close, assert_equal, engine, everyone, leaves, without_backward, world
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkd import build, checkpoint
from fedkd.algorithms.base import Setting
from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.persfl import PersFL, Verdict
from fedkd.algorithms.steps import supervised
from fedkd.core import tree
from fedkd.core.errors import ConfigError
from fedkd.core.optim import Local
from fedkd.core.tree import Params
from fedkd.engine import Settings
from fedkd.evaluate import evaluate
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger

EXECUTORS = ("serial", "vmapped")
ROUNDS = 3  # of the oracle's world


def fed_of(run, clients, round=None):
    return Federation(run.world, run.world.rounds if round is None else round, np.array(clients), Ledger())


def personal(run, state, clients, round=None):
    """The clients' personal models, opened."""
    fed = fed_of(run, clients, round)
    models = run.algorithm.personal(state.server, state.store.gather(fed.cohort), fed)
    return fed.up(models, "model")


def through(run):
    """A run's state after its last round."""
    state = run.start()
    for _ in range(run.world.rounds):
        run.advance(state)
    return state


# the oracle: Algorithm 1 in plain floats


def cross_entropy(w, samples):
    return sum(-math.log(softmax(scores(w, x))[y]) for x, y in samples) / len(samples)


def accuracy(w, samples):
    return sum(scores(w, x)[y] > scores(w, x)[1 - y] for x, y in samples) / len(samples)


def soft_error(o, a, t, objective, reduction):
    """T² times the soft loss's gradient by the student's logits a, the teacher's being o."""
    s, q = softmax([v / t for v in o]), softmax([v / t for v in a])
    if objective == "reverse_kl":  # d/da_k Σ_j q_j log(q_j/s_j) = q_k (log(q_k/s_k) − KL(q‖s))/T
        kl = sum(u * math.log(u / v) for u, v in zip(q, s, strict=True))
        error = [t**2 * u * (math.log(u / v) - kl) / t for u, v in zip(q, s, strict=True)]
    else:  # both KL(s‖q) and the cross-entropy to s: (q_k − s_k)/T
        error = [t**2 * (u - v) / t for u, v in zip(q, s, strict=True)]
    return [e / 2 for e in error] if reduction == "mean" and objective != "ce" else error  # two classes


def distilled(teacher, samples, lam, t, objective, reduction, epochs):
    a = list(teacher)
    for _ in range(epochs):
        g = [(1 - lam) * v for v in gradient(a, samples)]
        for x, _ in samples:
            for k, e in enumerate(soft_error(scores(teacher, x), scores(a, x), t, objective, reduction)):
                g[k] += lam * e * x / len(samples)
                g[2 + k] += lam * e / len(samples)
        a = sgd(a, g)
    return a


VARIANTS = [
    {},
    {"teacher": "last"},
    {"objective": "ce"},
    {"objective": "reverse_kl"},
    {"reduction": "mean"},
    {"objective": "reverse_kl", "reduction": "mean"},
    {"objective": "ce", "reduction": "mean"},
    {"select": "accuracy"},
    {"imitation": (0.25, 0.75, 1.0), "temperature": (5.0, 2.0), "distil_epochs": 7},
]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("given", VARIANTS, ids=str)
def test_three_rounds_and_the_distillation_are_those_of_algorithm_1(given, executor, tmp_path):
    method = PersFL(**{"distil_epochs": 3, "temperature": (1.0, 5.0), **given})
    run = validated(federation(method, tmp_path, executor=executor))
    state = run.start()
    samples = [sample for k in range(2) for sample in data(k)]
    held = [[samples[i] for i in of_client] for of_client in HELD]
    models = [flat(state.server.w)]  # G_0
    for _ in range(ROUNDS):
        run.advance(state)
        trained = []
        for k in range(2):
            w = models[-1]
            for _ in range(2):
                w = sgd(w, gradient(w, data(k)))
            trained.append(w)
        models.append(average(trained, [len(c) for c in CLIENTS]))
    assert flat(state.server.w) == pytest.approx(models[-1], abs=1e-6)
    found, chosen = personal(run, state, [0, 1]), []
    for k in range(2):
        losses = [cross_entropy(w, held[k]) for w in models]  # l. 5
        received = losses[:-1] if method.teacher == "optimal" else losses[-2:-1]
        own = client(state, k)
        assert float(own.loss) == pytest.approx(min(received), abs=1e-6)
        assert models[int(own.round)] == pytest.approx(flat(own.teacher), abs=1e-6)
        e = losses.index(min(losses)) if method.teacher == "optimal" else ROUNDS
        chosen.append(e)
        how = (method.objective, method.reduction, method.distil_epochs)
        grid = [(lam, t) for lam in method.imitation for t in method.temperature]
        students = [distilled(models[e], data(k), lam, t, *how) for lam, t in grid]
        if method.select == "loss":
            best = min(students, key=lambda a: cross_entropy(a, held[k]))
        else:
            best = max(students, key=lambda a: accuracy(a, held[k]))
        assert flat(found[k]) == pytest.approx(best, abs=2e-6)
    if method.teacher == "optimal":
        assert chosen == [1, 2]  # neither the first nor the last model: the oracle can tell a teacher from either


# the ledger


def test_a_model_crosses_each_way_in_stage_1_and_nothing_in_stage_2(tmp_path):
    """P = 16·5 + 5 + 5·3 + 3 = 103."""
    run = engine("persfl", tmp_path, rounds=2)
    state = through(run)
    evaluate(run.algorithm, state.server, state.store, run.world, 2, np.arange(4))
    assert [(r.round, r.way, r.what, r.params, r.broadcast_params) for r in state.ledger.rows] == [
        (t, way, "model", 4 * 103, once) for t in (1, 2) for way, once in (("down", 103), ("up", 4 * 103))
    ]


# reductions


def test_stage_1_is_fedavg(tmp_path):
    settings = Settings(participation=0.5)
    ours, theirs = (through(engine(a, tmp_path, settings=settings, rounds=3)) for a in (PersFL(), FedAvg()))
    assert_equal(ours.server.w, theirs.server.w)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("net", "optimizer"),
    [(Hidden(), {"optimizer": "adam", "lr": 0.01}), (Hidden(), {}), (Normed(), {"momentum": 0.9, "weight_decay": 0.1})],
)
def test_without_imitation_it_is_fine_tuning_the_optimal_teacher(net, optimizer, executor, tmp_path):
    how = {"architectures": (net,), "executor": executor, "local": Local(**{"epochs": 2, "batch_size": 4, **optimizer})}
    run = engine(PersFL(imitation=(0.0,)), tmp_path, **how)
    state = through(run)
    fed = fed_of(run, range(4))
    teacher, *_ = run.algorithm.judge(state.store.gather(fed.cohort), fed.down(state.server.w, "model"), 2, fed)
    tuned = fed.fit(supervised, teacher)
    assert_close(personal(run, state, range(4)).stack(), tuned._stacks[net.name], tolerance=1e-6)


def test_one_student_of_the_grid_does_not_depend_on_the_others(tmp_path):
    """The best of a grid is what its own point alone would have given."""
    whole = engine(PersFL(), tmp_path)
    state = through(whole)
    fed = fed_of(whole, range(4))
    own = state.store.gather(fed.cohort)
    best = fed.up(whole.algorithm.personal(state.server, own, fed), "model")
    points = fed.up(fed.notes["point"], "point")
    for k in range(4):
        lam, t = whole.algorithm.points[int(points[k])]
        alone = engine(PersFL(imitation=(lam,), temperature=(t,)), tmp_path)
        assert_close(personal(alone, state, [k])[0], best[k], tolerance=1e-6)


def test_with_nothing_but_imitation_the_student_stays_its_teacher(tmp_path):
    """The student starts where KL(teacher ‖ student) is 0, its least value."""
    run = engine(PersFL(imitation=(1.0,), distil_epochs=3), tmp_path)
    state = through(run)
    teachers = personal(run, state, range(4), round=1)  # before the last round clients are judged by their teachers
    assert_close(personal(run, state, range(4)).stack(), teachers.stack(), tolerance=1e-6)


def test_kl_by_samples_has_the_gradient_of_persfl_gd_and_the_other_readings_have_not(tmp_path):
    state = through(engine(PersFL(), tmp_path))

    def student(**how):
        method = PersFL(imitation=(0.5,), temperature=(5.0,), distil_epochs=10, **how)
        return leaves(personal(engine(method, tmp_path), state, range(4)).stack())

    gd = student(objective="ce")
    assert_close(student(objective="kl"), gd, tolerance=1e-6)
    for other in ({"objective": "reverse_kl"}, {"reduction": "mean"}):
        assert max(float((a - b).abs().max()) for a, b in zip(student(**other), gd, strict=True)) > 1e-4


# who judges what


def test_before_the_last_round_clients_are_judged_by_their_teachers(tmp_path):
    run = engine(PersFL(), tmp_path, rounds=5)
    state = run.start()
    for _ in range(2):
        run.advance(state)
    models = personal(run, state, range(4), round=2)
    own = everyone(state)["hidden"]
    fed = fed_of(run, range(4), round=2)
    judged = run.algorithm.judge(state.store.gather(fed.cohort), fed.down(state.server.w, "model"), 2, fed)
    newest = fed.up(judged, "own").stack().round == 2
    for k in range(4):
        assert_equal(models[k], state.server.w if newest[k] else tree.take(own.teacher, k))


def test_a_client_judges_only_the_models_it_receives(tmp_path):
    """Half of the clients take part in a round; client 0 is not in the first cohorts."""
    run = engine(PersFL(), tmp_path, settings=Settings(participation=0.5), rounds=4)
    state = run.start()
    seen = {k: [] for k in range(4)}
    for t in range(1, 5):
        before = everyone(state)["hidden"]
        run.advance(state)
        after = everyone(state)["hidden"]
        for k in range(4):
            if not torch.equal(before.loss[k], after.loss[k]):
                seen[k].append(t - 1)
                assert int(after.round[k]) == t - 1
                assert after.loss[k] < before.loss[k]
    assert all(rounds == sorted(rounds) for rounds in seen.values())
    assert any(rounds and rounds[0] > 0 for rounds in seen.values())


def test_a_client_that_never_took_part_distils_from_the_last_model(tmp_path):
    run, last = engine(PersFL(), tmp_path), engine(PersFL(teacher="last"), tmp_path)
    state = run.start()
    state.dropped = frozenset({2, 3})
    for _ in range(2):
        run.advance(state)
    assert everyone(state)["hidden"].loss.isinf().tolist() == [False, False, True, True]
    assert_equal(personal(run, state, [2, 3]).stack(), personal(last, state, [2, 3]).stack())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_client_without_validation_samples_takes_the_newest_model_and_the_first_point(executor, tmp_path):
    run = validated(federation(PersFL(temperature=(5.0, 1.0)), tmp_path, executor=executor), [[], [0, 1]])
    state = through(run)
    assert int(client(state, 0).round) == ROUNDS - 1  # received in the last round
    w = flat(state.server.w)
    for _ in range(2):  # λ = 0: fine-tuning
        w = sgd(w, gradient(w, data(0)))
    assert flat(personal(run, state, [0, 1])[0]) == pytest.approx(w, abs=1e-6)


# newcomers (Section 6)


def test_a_newcomer_chooses_among_the_kept_models_without_a_new_round(tmp_path):
    run = engine(PersFL(keep_models=True), tmp_path, rounds=3)
    state = run.start()
    state.dropped = frozenset({2, 3})  # they join later
    for _ in range(3):
        run.advance(state)
    before = list(state.ledger.rows)
    models = (*state.server.kept, state.server.w)
    assert len(models) == 4  # G_0 to G_3
    fed = fed_of(run, [2, 3])
    found = fed.up(run.algorithm.newcomers(state.server, fed), "model")
    assert [(r.way, r.params) for r in fed.crossed[:-1]] == [("down", 2 * 103)] * 4  # all they receive
    assert state.ledger.rows == before
    net, population = run.world.population.nets["hidden"], run.world.population
    for place, k in enumerate((2, 3)):
        rows = torch.from_numpy(population.validation[k])
        x, y = population.images.batch(rows), population.images.labels[rows]
        losses = [torch.nn.functional.cross_entropy(net.predict(w, x), y) for w in models]
        teacher = models[int(torch.stack(losses).argmin())]
        alone = fed_of(run, [k])
        best, _ = run.algorithm.distil(alone.down(teacher, "model"), alone)
        assert_close(found[place], alone.up(best, "model")[0], tolerance=1e-6)


def test_a_newcomer_gets_what_a_client_gets_that_was_there_all_along(tmp_path):
    run = engine(PersFL(keep_models=True), tmp_path, rounds=3)
    state = through(run)
    fed = fed_of(run, range(4))
    found = fed.up(run.algorithm.newcomers(state.server, fed), "model")
    assert_equal(found.stack(), personal(run, state, range(4)).stack())


def test_where_no_models_are_kept_the_last_one_is_a_newcomers_teacher(tmp_path):
    run, last = engine(PersFL(), tmp_path), engine(PersFL(teacher="last"), tmp_path)
    state = through(run)
    assert state.server.kept == ()
    fed = fed_of(run, range(4))
    found = fed.up(run.algorithm.newcomers(state.server, fed), "model")
    assert_equal(found.stack(), personal(last, state, range(4)).stack())


def test_kept_models_survive_a_resume_to_the_bit(tmp_path):
    run = engine(PersFL(keep_models=True), tmp_path, rounds=3)
    whole = through(run)
    state = run.start()
    run.advance(state)
    run.save(state)
    state = run.resume(checkpoint.load(tmp_path, run.algorithm))
    for _ in range(2):
        run.advance(state)
    assert len(state.server.kept) == 3
    assert_equal((state.server, everyone(state)), (whole.server, everyone(whole)))


# what is shown, and what is refused


def test_teachers_rounds_and_the_chosen_points_are_shown(tmp_path):
    run = engine(PersFL(), tmp_path, rounds=2)
    state = through(run)
    fed = fed_of(run, range(4))
    own = state.store.gather(fed.cohort)
    assert "grid" not in run.algorithm.observe(state.server, own, fed)  # stage 2 has not been
    verdict = evaluate(run.algorithm, state.server, state.store, run.world, 2, np.arange(4))
    teacher, grid = verdict.views["teacher_round"], verdict.views["grid"]
    assert (teacher.kind, grid.kind) == ("clusters", "matrix")
    assert teacher.values.shape == (4,)
    assert verdict.metrics["teacher_round/mean"] == teacher.values.mean()
    assert grid.values.shape == (5, 3)
    assert grid.values.sum() == 4  # every client has one point
    assert grid.values[0, 1:].sum() == 0  # λ = 0 is one student, noted under the first T
    run.algorithm.personal(state.server, own, fed)
    chosen = np.array(run.algorithm.points)[fed.up(fed.notes["point"], "point").stack().numpy()]
    assert verdict.metrics["imitation/mean"] == pytest.approx(chosen[:, 0].mean())
    assert verdict.metrics["temperature/mean"] == pytest.approx(chosen[:, 1].mean())
    early = evaluate(run.algorithm, state.server, state.store, run.world, 1, np.arange(4))
    assert set(early.views) == {"teacher_round"}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_distillation_stays_on_the_gpu(executor, tmp_path, monkeypatch):
    """As in the contract, whose evaluation is not of the last round."""
    without_backward(monkeypatch)
    with FakeTensorMode():
        run = engine(PersFL(), tmp_path, world=world(executor, device="cuda", rounds=1), executor=None)
        state = through(run)
        models = run.algorithm.personal(state.server, state.store.gather(np.arange(4)), fed_of(run, range(4)))
    found = leaves(models._stacks)
    assert found[0].shape == (4, 5, 16)
    assert found[-1].shape == (4, CLASSES)
    assert all(leaf.device.type == "cuda" for leaf in found)


def test_the_default_grid_is_the_one_of_table_5():
    """Its averages over five runs are multiples of 0.05 = 0.25/5 in λ and of 0.8 = 4/5 above 1 in T: 1.8, 2.6, 25."""
    method = PersFL()
    assert len(method.points) == 5 * 3 - 2  # λ = 0 once
    assert {lam for lam, _ in method.points} == {0, 0.25, 0.5, 0.75, 1}
    assert {t for _, t in method.points} == {1, 5, 25}


def test_what_cannot_work_is_refused():
    setting = Setting(4, 4, 1, Local())
    assert PersFL().problems(setting) == []
    (told,) = PersFL(objective="lk").problems(setting)
    assert told.startswith("algorithm.objective=lk does not exist.")
    wrong = PersFL(imitation=(0.5, 1.5), temperature=(), distil_epochs=0, teacher="first", reduction="sum", select="f1")
    assert len(wrong.problems(setting._replace(validation=False))) == 7


def test_a_split_without_validation_is_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"partition\.train=0\.6 partition\.validation=0\.2 partition\.test=0\.2"):
        build.parts(composed("algorithm=persfl"))
    build.parts(composed("algorithm=persfl", "partition=ds1"))


def test_the_config_gives_the_defaults_of_the_code():
    made = build.parts(composed("algorithm=persfl", "partition=ds1")).algorithm
    assert PersFL(**{**vars(made), "imitation": tuple(made.imitation), "temperature": tuple(made.temperature)}) == (
        PersFL()
    )


def test_a_whole_run_ends_with_the_distilled_models(tmp_path, capsys):
    """A client's own model beats the shared one where its classes are few."""
    ran(tmp_path, "algorithm=persfl", "partition=ds1", "clients=4", "rounds=2", "local.steps=20", "model=mlr")
    last = metrics(tmp_path)[-1]
    assert last["acc/personal/mean"] > last["acc/shared/mean"]
    assert 0 <= last["teacher_round/mean"] <= 2
    assert (tmp_path / "view_grid.png").exists()


def test_of_students_that_differ_by_rounding_alone_the_first_is_taken():
    students = Params({"w": torch.arange(4.0)}, {})
    for better, expected in ((3e-7, 1), (1e-4, 2)):
        losses = torch.tensor([0.7, 0.5 * (1 + better), 0.5, 0.6])
        best, point = PersFL().best(None, students, Verdict(losses, torch.zeros(4), torch.ones(4)))
        assert (int(point), float(best.weights["w"])) == (expected, expected)
