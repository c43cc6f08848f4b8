"""Clients' states: lazily made, kept, safe from a kill between checkpoints."""

import numpy as np
import pytest
import torch
from tiny import Hidden, Linear, world

from fedkd.federation.placed import Placed
from fedkd.federation.store import Disk, Memory


@pytest.fixture(params=["memory", "disk"])
def make(request, tmp_path):
    population = world(architectures=(Hidden(), Linear())).population
    made = []

    def first(client):
        made.append(client)
        return (torch.full((2,), float(client)), {"half": torch.full((3,), client, dtype=torch.bfloat16)})

    def build():
        return Memory(population, first) if request.param == "memory" else Disk(population, first, tmp_path / "clients")

    build.made, build.disk = made, request.param == "disk"
    return build


def opened(store, *clients):
    who = np.array(clients)
    states = {}
    for arch, places in store.population.by_architecture(who).items():
        for row, place in enumerate(places):
            states[int(who[place])] = store.gather(who)._stacks[arch][0][row].tolist()
    return states


def grown(store, clients, by):
    who = np.array(clients)
    placed = store.gather(who)
    store.scatter(who, Placed({a: (s[0] + by, s[1]) for a, s in placed._stacks.items()}))


def test_a_first_state_is_made_when_first_asked_for(make):
    store = make()
    assert opened(store, 2) == {2: [2.0, 2.0]}
    assert 3 not in make.made


def test_what_was_scattered_comes_back_and_others_stay(make):
    store = make()
    grown(store, [0, 3], 10)
    assert opened(store, 0, 1, 3) == {0: [10.0, 10.0], 1: [1.0, 1.0], 3: [13.0, 13.0]}
    _, rest = store.gather(np.array([0]))._stacks["hidden"]
    assert rest["half"].dtype == torch.bfloat16


def test_states_that_are_to_be_scattered_are_not_kept_before(make):
    store = make()
    grown(store, [1], 10)
    states = store.gather(np.array([0, 1, 2, 3]), keep=False)._stacks
    assert {arch: stack[0][:, 0].tolist() for arch, stack in states.items()} == {"hidden": [0, 2], "linear": [11, 3]}
    assert store.present.tolist() == [False, True, False, False]


def test_a_snapshot_restores_in_a_new_store(make):
    store = make()
    grown(store, [0, 1], 5)
    saved = store.snapshot()
    store.saved()
    grown(store, [0], 100)  # after the checkpoint: lost with the process
    again = make()
    again.restore(saved)
    assert opened(again, 0, 1, 2) == {0: [5.0, 5.0], 1: [6.0, 6.0], 2: [2.0, 2.0]}


def test_writes_after_a_checkpoint_never_touch_what_it_refers_to(make):
    store = make()
    for round_ in range(1, 6):
        grown(store, [0], 1)
        saved = store.snapshot()
        store.saved()
        for _ in range(3):  # several rounds without a checkpoint
            grown(store, [0], 50)
        again = make()
        again.restore(saved)
        assert opened(again, 0) == {0: [float(round_), float(round_)]}
        store = again


def test_a_gathered_state_is_a_copy(make):
    store = make()
    before = store.gather(np.array([1]))._stacks["linear"][0]
    grown(store, [1], 7)
    assert before.tolist() == [[1.0, 1.0]]
