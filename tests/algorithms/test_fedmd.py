"""FedMD: oracle, ledger, reduction."""

import pytest
from oracle import LR, PUBLIC, average, client, data, federation, flat, gradient, scores, sgd
from tiny import Hidden, Linear, assert_equal, engine, everyone

from fedkd.algorithms.fedmd import FedMD
from fedkd.algorithms.local import Local


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
@pytest.mark.parametrize("distance", ["l1", "l2"])
def test_two_rounds_are_communicate_aggregate_digest_revisit(executor, distance, tmp_path):
    run = federation(FedMD(digest_epochs=2, digest_batch_size=3, distance=distance), tmp_path, executor=executor)
    state = run.start()
    w = [flat(client(state, k).w) for k in range(2)]
    public = [x / 255 for x in PUBLIC]
    for _ in range(2):
        run.advance(state)
        consensus = [average([scores(w_k, x) for w_k in w], [1, 1]) for x in public]
        for k in range(2):
            for _ in range(2):  # digest: two passes over the three public samples at once
                g = [0.0] * 4
                for x, target in zip(public, consensus, strict=True):
                    for j, (s, f) in enumerate(zip(scores(w[k], x), target, strict=True)):
                        # mean over samples and classes of |s − f| or (s − f)²
                        slope = ((s > f) - (s < f) if distance == "l1" else 2 * (s - f)) / (2 * len(public))
                        g[j] += slope * x
                        g[2 + j] += slope
                w[k] = [a - LR * b for a, b in zip(w[k], g, strict=True)]
            for _ in range(2):  # revisit
                w[k] = sgd(w[k], gradient(w[k], data(k)))
    for k in range(2):
        assert flat(client(state, k).w) == pytest.approx(w[k], abs=2e-6)


def test_scores_go_up_and_one_consensus_comes_down(tmp_path):
    """Q = 6 public samples a round, L = 3 classes."""
    run = engine("fedmd", tmp_path, architectures=(Hidden(), Linear()))
    state = run.start()
    run.advance(state)
    assert [(r.way, r.what, r.clients, r.params, r.broadcast_params) for r in state.ledger.rows] == [
        ("up", "scores", 4, 4 * 18, 4 * 18),
        ("down", "consensus", 4, 4 * 18, 18),
    ]


def test_without_digest_it_is_local_training(tmp_path):
    runs = [engine(a, tmp_path, architectures=(Hidden(), Linear())) for a in (FedMD(digest_epochs=0), Local())]
    states = [run.start() for run in runs]
    for run, state in zip(runs, states, strict=True):
        run.advance(state)
        run.advance(state)
    assert_equal(everyone(states[0]), everyone(states[1]))


def test_digest_brings_the_clients_scores_together(tmp_path):
    """Distance of the two clients' public scores after a round, with and without digest."""

    def apart(digest_epochs):
        run = federation(FedMD(digest_epochs=digest_epochs, distance="l2"), tmp_path, epochs=1)
        state = run.start()
        run.advance(state)
        a, b = (flat(client(state, k).w) for k in range(2))
        return sum(abs(s - t) for x in (0, 0.5, 1) for s, t in zip(scores(a, x), scores(b, x), strict=True))

    assert apart(20) < apart(0)
