"""Dropout's masks: by seed, unbiased, each thread's own."""

import threading
from dataclasses import replace

import pytest
import torch
from tiny import SHAPE, assert_equal, engine, everyone, world
from torch import nn

from fedkd import checkpoint
from fedkd.core.draws import drawing, mask
from fedkd.core.errors import ConfigError
from fedkd.core.optim import Local
from fedkd.federation.executors import choose
from fedkd.federation.workers import Workers
from fedkd.models.net import Architecture
from fedkd.models.split import Split


class Dropped(Architecture):
    name = "dropped"

    def module(self, shape, classes):
        body = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Dropout(0.25), nn.Flatten(), nn.Linear(12, 8), nn.Dropout(0.5)
        return Split(nn.Sequential(*body), nn.Linear(8, classes))


def drawn(seed, like, p=0.25):
    with drawing(seed):
        return mask(like, p)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5])
def test_a_mask_is_zero_as_often_as_asked_and_one_on_average(p):
    x = torch.empty(400, 250)
    found = drawn(1, x, p)
    zeros = float((found == 0).float().mean())
    assert zeros == pytest.approx(p, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)  # five standard errors
    (value,) = found[found != 0].unique().tolist()
    assert value == pytest.approx(1 / (1 - p), abs=1e-4)


def test_nothing_and_everything_can_be_dropped():
    assert torch.equal(drawn(1, torch.empty(7), 0.0), torch.ones(7))
    assert torch.equal(drawn(1, torch.empty(7), 1.0), torch.zeros(7))


def test_the_seed_decides_whatever_the_thread_and_others_draw():
    x, found = torch.empty(33, 5), []
    thread = threading.Thread(target=lambda: found.append(drawn(3, x)))
    with drawing(9):
        mask(x, 0.5)
        thread.start()
        thread.join()
    assert torch.equal(found[0], drawn(3, x))
    assert not torch.equal(drawn(3, x), drawn(4, x))


def test_a_mask_lies_as_what_it_is_for():
    for x in (torch.empty(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), torch.empty(6, 4).t()):
        assert drawn(1, x).shape == x.shape
    assert drawn(1, torch.empty(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)).stride() == (48, 1, 12, 3)


def run(directory, workers=1, resumed=False):
    tiny = world("auto", (Dropped(),), Local(epochs=2, batch_size=4, lr=0.1))
    one = engine("fedavg", directory, world=replace(tiny, workers=Workers(workers)), executor=None)
    state = one.start()
    one.advance(state)
    if resumed:
        one.save(state)
        state = one.resume(checkpoint.load(directory, one.algorithm))
    one.advance(state)
    return state.server, everyone(state)


def test_runs_with_dropout_repeat_with_any_number_of_workers_and_after_a_resume(tmp_path):
    first = run(tmp_path / "a")
    assert_equal(first, run(tmp_path / "b", workers=3))
    assert_equal(first, run(tmp_path / "c", resumed=True))


def test_stacked_clients_cannot_have_dropout():
    net = Dropped().net(SHAPE, 3)
    with pytest.raises(ConfigError, match=r"model=dropped has dropout.*executor=serial"):
        choose("vmapped", net, torch.device("cpu"), None, "fp32")
    assert type(choose("auto", net, torch.device("cuda"), None, "fp32")).__name__ == "Serial"
