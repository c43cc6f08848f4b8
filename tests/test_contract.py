"""What every algorithm promises, under every executor."""

import copy

import numpy as np
import pytest
import torch
from tiny import (
    Deep,
    Hidden,
    Linear,
    Normed,
    assert_close,
    assert_equal,
    engine,
    everyone,
    leaves,
    without_backward,
    world,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkd import checkpoint
from fedkd.algorithms.base import ALGORITHMS
from fedkd.core import tree
from fedkd.core.optim import Local
from fedkd.engine import Settings
from fedkd.evaluate import evaluate

NAMES = list(ALGORITHMS)
EXECUTORS = ("serial", "vmapped")


def architectures(name):
    """One for methods that average parameters, two for the rest (of one feature size if they share features)."""
    method = ALGORITHMS[name]
    return (Hidden(),) if method.one_architecture else (Hidden(), Deep() if method.one_feature_size else Linear())


def ran(name, directory, rounds=2, settings=None, **how):
    how.setdefault("architectures", architectures(name))
    run = engine(name, directory, settings=settings, rounds=rounds, **how)
    state = run.start()
    for _ in range(rounds):
        run.advance(state)
    return run, state


def test_the_contract_is_held_to_every_algorithm():
    assert len(NAMES) >= 6


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", NAMES)
def test_two_rounds_are_finite_and_change_something(name, executor, tmp_path):
    run, state = ran(name, tmp_path, executor=executor)
    start = run.start()
    values = leaves((state.server, everyone(state)))
    assert all(bool(leaf.isfinite().all()) for leaf in values)
    before = leaves((start.server, everyone(start)))
    assert any(not torch.equal(a, b) for a, b in zip(values, before, strict=True))
    verdict = evaluate(run.algorithm, state.server, state.store, run.world, 2, np.arange(4))
    assert 0 <= verdict.metrics["acc/personal/mean"] <= 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("net", ["plain", "normed"])
def test_serial_and_vmapped_agree(name, net, tmp_path):
    how = {"architectures": (Normed(),)} if net == "normed" else {}
    (one, a), (two, b) = (ran(name, tmp_path / e, executor=e, **how) for e in EXECUTORS)
    assert_close((a.server, everyone(a)), (b.server, everyone(b)))
    judged = [evaluate(r.algorithm, s.server, s.store, r.world, 2, np.arange(4)) for r, s in ((one, a), (two, b))]
    assert judged[0].metrics == pytest.approx(judged[1].metrics, abs=1e-5)
    assert a.ledger.rows == b.ledger.rows


@pytest.mark.parametrize("optimizer", [{"optimizer": "adam", "lr": 0.01}, {"momentum": 0.9, "weight_decay": 0.01}])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "scaffold"])
def test_serial_and_vmapped_agree_with_any_optimiser_and_steps(name, optimizer, tmp_path):
    local = Local(steps=3, batch_size=4, **optimizer)
    a, b = (ran(name, tmp_path / e, executor=e, local=local, rounds=1)[1] for e in EXECUTORS)
    assert_close((a.server, everyone(a)), (b.server, everyone(b)))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(name, executor, tmp_path):
    _, through = ran(name, tmp_path, executor=executor, rounds=2)
    run = engine(name, tmp_path, rounds=2, executor=executor, architectures=architectures(name))
    state = run.start()
    run.advance(state)
    run.save(state)
    state = run.resume(checkpoint.load(tmp_path, run.algorithm))
    run.advance(state)
    assert_equal((state.server, everyone(state)), (through.server, everyone(through)))
    assert type(state.server) is type(through.server)
    assert state.ledger.rows == through.ledger.rows


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", NAMES)
def test_a_round_and_an_evaluation_leave_their_inputs_unchanged(name, executor, tmp_path):
    run, state = ran(name, tmp_path, executor=executor, rounds=1, architectures=(Normed(),))
    server, clients = copy.deepcopy(state.server), copy.deepcopy(everyone(state))
    kept = state.server
    run.advance(state)
    assert_equal(kept, server)
    state = ran(name, tmp_path, executor=executor, rounds=1, architectures=(Normed(),))[1]
    evaluate(run.algorithm, state.server, state.store, run.world, 1, np.arange(4))
    assert_equal((state.server, everyone(state)), (server, clients))


@pytest.mark.parametrize("name", [n for n in NAMES if not ALGORITHMS[n].everyone])
def test_absent_clients_are_untouched(name, tmp_path):
    run = engine(name, tmp_path, settings=Settings(participation=0.5), architectures=(Hidden(),))
    state = run.start()
    before = everyone(state)["hidden"]
    run.advance(state)
    after = everyone(state)["hidden"]
    cohort = {row.clients for row in state.ledger.rows}
    assert cohort == ({2} if name != "l2sgd" else set())  # whose coin says tails in round 1
    pairs = list(zip(leaves(before), leaves(after), strict=True))
    moved = [any(not torch.equal(a[i], b[i]) for a, b in pairs) for i in range(4)]
    assert sum(moved) <= 2


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(name, tmp_path):
    a, b, c = (ran(name, tmp_path / str(i), executor="serial", seed=s)[1] for i, s in enumerate((0, 0, 1)))
    assert_equal((a.server, everyone(a)), (b.server, everyone(b)))
    pairs = zip(leaves((a.server, everyone(a))), leaves((c.server, everyone(c))), strict=True)
    assert any(not torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_states_on_disk_give_the_same_run_as_in_memory(name, tmp_path):
    settings = [Settings(participation=0.5, store=store) for store in ("memory", "disk")]
    memory, disk = (ran(name, tmp_path / s.store, settings=s)[1] for s in settings)
    assert_equal((memory.server, everyone(memory)), (disk.server, everyone(disk)))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", NAMES)
def test_a_round_and_an_evaluation_stay_on_the_gpu(name, executor, tmp_path, monkeypatch):
    """Under fake tensors a CUDA device can be had anywhere, and mixing devices raises.

    Autograd's own backward pass needs a real device, so the gradient is taken as zero after a real forward pass.
    """
    without_backward(monkeypatch)
    with FakeTensorMode():
        run = engine(name, tmp_path, world=world(executor, architectures(name), device="cuda"), executor=None)
        state = run.start()
        run.advance(state)
        values = leaves((state.server, everyone(state)))
        models = run.algorithm.personal(state.server, state.store.gather(np.arange(4)), _federation(run))
    assert all(leaf.device.type == "cuda" for leaf in [*values, *leaves(models._stacks)])


def _federation(run):
    from fedkd.federation.fed import Federation
    from fedkd.federation.ledger import Ledger

    return Federation(run.world, 1, np.arange(4), Ledger())


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", NAMES)
def test_bf16_trains_to_nearly_the_same_model(name, executor, tmp_path):
    full, half = (ran(name, tmp_path / p, executor=executor, precision=p, rounds=1)[1] for p in ("fp32", "bf16"))
    assert_close((full.server, everyone(full)), (half.server, everyone(half)), tolerance=0.05)
    assert all(leaf.dtype != torch.bfloat16 for leaf in leaves((half.server, everyone(half))))


def test_running_statistics_are_kept_apart_from_weights(tmp_path):
    _, state = ran("fedavg", tmp_path, architectures=(Normed(),), rounds=1)
    assert set(state.server.w.stats) == {"features.1.running_mean", "features.1.running_var"}
    assert not torch.equal(state.server.w.stats["features.1.running_mean"], torch.zeros(3))
    assert list(tree.leaves(state.server.w.weights))
