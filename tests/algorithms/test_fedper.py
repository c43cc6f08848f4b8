"""FedPer: oracle, ledger; that an empty head is FedAvg stands in test_fedavg."""

import pytest
import torch
from oracle import CLIENTS, LR, client, data, federation, softmax
from tiny import engine, everyone

from fedkd.algorithms.fedper import FedPer
from fedkd.models.net import Architecture, Net
from fedkd.models.split import Split


class TwoScalars(Architecture):
    """One input, a body that scales it, a head of two weights: logits = v_k · (u · x)."""

    name = "one_input"

    def module(self, shape, classes):
        body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 1, bias=False))
        return Split(body, torch.nn.Linear(1, 2, bias=False))


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
def test_two_rounds_average_the_body_and_keep_the_heads(executor, tmp_path):
    run = federation(FedPer(), tmp_path, executor=executor, epochs=1)
    run.world.population.nets["one_input"] = Net(TwoScalars(), (1, 1, 1), 2)
    state = run.start()
    u = state.server.body.weights["features.1.weight"].item()
    v = [client(state, k).head.weights["head.weight"].flatten().tolist() for k in range(2)]
    assert v[0] != v[1]
    for _ in range(2):
        run.advance(state)
        bodies = []
        for k in range(2):
            samples = data(k)
            g_u, g_v = 0.0, [0.0, 0.0]
            for x, y in samples:
                p = softmax([v[k][0] * u * x, v[k][1] * u * x])
                for j in range(2):
                    error = (p[j] - (j == y)) / len(samples)
                    g_u += error * v[k][j] * x
                    g_v[j] += error * u * x
            bodies.append(u - LR * g_u)
            v[k] = [a - LR * b for a, b in zip(v[k], g_v, strict=True)]
        u = sum(len(c) * b for c, b in zip(CLIENTS, bodies, strict=True)) / 5
    assert state.server.body.weights["features.1.weight"].item() == pytest.approx(u, abs=1e-6)
    for k in range(2):
        assert client(state, k).head.weights["head.weight"].flatten().tolist() == pytest.approx(v[k], abs=1e-6)


def test_only_the_body_crosses(tmp_path):
    """hidden's body: 16·5 + 5 = 85 parameters."""
    run = engine("fedper", tmp_path)
    state = run.start()
    run.advance(state)
    assert [(r.way, r.what, r.params, r.broadcast_params) for r in state.ledger.rows] == [
        ("down", "body", 4 * 85, 85),
        ("up", "body", 4 * 85, 4 * 85),
    ]


def test_the_heads_differ_between_clients(tmp_path):
    run = engine("fedper", tmp_path)
    state = run.start()
    run.advance(state)
    heads = everyone(state)["hidden"].head.weights["head.weight"]
    assert not torch.equal(heads[0], heads[1])
