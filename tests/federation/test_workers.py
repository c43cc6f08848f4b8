"""Clients side by side: the same numbers, the same errors."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import Deep, Hidden, Normed, assert_close, engine, everyone, world

from fedkd.federation.executors import Vmapped, vmapped
from fedkd.federation.workers import Workers, deal


@pytest.fixture
def three_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("executor", ["serial", "vmapped"])
@pytest.mark.parametrize("architectures", [(Hidden(),), (Normed(),), (Hidden(), Deep())])
def test_the_split_of_work_does_not_change_the_numbers(executor, architectures, tmp_path, monkeypatch, three_cores):
    monkeypatch.setattr(vmapped, "ALONE", 1)  # so small a network is worth a worker of its own, too
    method = "fedproto" if len(architectures) > 1 else "ditto"
    states = []
    for count in (1, 2, 3):
        of = replace(world(executor, architectures), workers=Workers(count))
        run = engine(method, tmp_path, world=of, executor=None)
        states.append(run.start())
        run.advance(states[-1])
        run.advance(states[-1])
    one, two, three = ((state.server, everyone(state)) for state in states)
    assert_close(two, three, tolerance=0 if executor == "serial" else 1e-6)
    assert_close(one, two, tolerance=1e-6)  # one worker has three cores for each client


def test_jobs_run_side_by_side_with_one_core_each(three_cores):
    both = threading.Barrier(2, timeout=20)  # broken if one waits for the other to end

    def job():
        both.wait()
        return torch.get_num_threads()

    assert Workers(2).run([job, job]) == [1, 1]
    assert torch.get_num_threads() == 3


def test_the_calling_thread_is_one_of_the_workers(three_cores):
    both = threading.Barrier(2, timeout=20)

    def job():
        both.wait()
        return threading.get_ident()

    first, second = Workers(2).run([job, job])
    assert first != second
    assert threading.get_ident() in (first, second)


def test_what_is_not_begun_when_a_job_fails_is_left_undone(three_cores):
    """The other thread fails, while the calling one is at its first job."""
    both, here, ran = threading.Barrier(2, timeout=20), threading.get_ident(), []

    def fail_elsewhere():
        both.wait()
        if threading.get_ident() != here:
            raise ValueError("client 1")
        time.sleep(0.2)

    def count():
        time.sleep(0.01)
        ran.append(1)

    with pytest.raises(ValueError, match="client 1"):
        Workers(2).run([fail_elsewhere, fail_elsewhere, *[count] * 20])
    assert len(ran) < 20


def test_a_single_worker_has_all_cores_and_a_single_job_one(three_cores):
    assert Workers(1).run([torch.get_num_threads] * 2) == [3, 3]
    assert Workers(2).run([torch.get_num_threads]) == [1]


def test_there_are_as_many_workers_as_torch_has_cores_up_to_a_bound(three_cores):
    assert Workers().count == 3
    torch.set_num_threads(64)
    assert Workers().count == 8


def test_results_come_in_order_and_the_first_error_is_raised(three_cores):
    assert Workers(2).run([lambda i=i: i for i in range(20)]) == list(range(20))

    def fail():
        raise ValueError("client 3")

    with pytest.raises(ValueError, match="client 3"):
        Workers(2).run([int, fail, int])
    assert torch.get_num_threads() == 3


def test_ragged_clients_are_dealt_largest_first_and_equal_ones_in_blocks():
    assert [share.tolist() for share in deal(np.array([5, 40, 7, 13]), 2)] == [[1], [3, 2, 0]]
    assert [share.tolist() for share in deal(np.array([6, 6, 6, 6, 6]), 2)] == [[0, 1, 2], [3, 4]]


def test_stacked_clients_are_dealt_so_that_their_models_stay_in_the_cache():
    cpu, mega = torch.device("cpu"), 2**20
    executor = Vmapped()
    assert executor.shares(10, mega // 32, cpu, workers=2) == 1  # too little for two
    assert executor.shares(10, mega // 2, cpu, workers=2) == 2  # 5 MB
    assert executor.shares(40, mega, cpu, workers=2) == 6  # 40 MB: three times two shares of at most 8 MB
    assert executor.shares(10, 8 * mega, cpu, workers=2) == 2  # of five at the most, however large
    assert executor.shares(40, mega, torch.device("cuda"), workers=1) == 1
    assert Vmapped(chunk=16).shares(40, mega, cpu, workers=2) == 3
