"""Walks: every sample once a pass, longest client first, nothing out of range."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import images

from fedkd.data import batches

SHARDS = st.lists(st.integers(1, 30), min_size=1, max_size=6).map(
    lambda sizes: [np.arange(n) + 100 * i for i, n in enumerate(sizes)]
)


def shuffled(seed=0):
    rng = np.random.default_rng(seed)
    return lambda place, count: rng.permutation(count)


def of_client(walk, client):
    """A client's batches, in the order it walks them."""
    rank = int(np.flatnonzero(walk.order == client)[0])
    found = []
    for t, alive in enumerate(walk.alive):
        if alive > rank:
            at = walk.start[t] + rank
            found.append(walk.rows[at, : walk.sizes[at]].tolist())
    return found


@given(SHARDS, st.integers(1, 3), st.one_of(st.none(), st.integers(1, 12)))
@settings(max_examples=60, deadline=None)
def test_an_epoch_shows_each_client_each_of_its_samples_once(shards, count, size):
    walk = batches.epochs(shards, count, size, shuffled())
    for client, shard in enumerate(shards):
        seen = of_client(walk, client)
        per_epoch = -(-len(shard) // min(size or len(shard), len(shard)))
        assert len(seen) == count * per_epoch
        for e in range(count):
            one = seen[e * per_epoch : (e + 1) * per_epoch]
            assert sorted(chain(*one)) == shard.tolist()


@given(SHARDS, st.integers(1, 9), st.one_of(st.none(), st.integers(1, 12)))
@settings(max_examples=60, deadline=None)
def test_steps_are_as_many_full_batches_as_asked(shards, count, size):
    walk = batches.steps(shards, [count] * len(shards), size, shuffled())
    for client, shard in enumerate(shards):
        seen = of_client(walk, client)
        assert [len(batch) for batch in seen] == [min(size or len(shard), len(shard))] * count
        assert set(chain(*seen)) <= set(shard.tolist())


@given(SHARDS, st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_padding_repeats_a_sample_of_the_same_client(shards, size):
    walk = batches.epochs(shards, 1, size, shuffled())
    rank = {int(c): r for r, c in enumerate(walk.order)}
    for client, shard in enumerate(shards):
        for t, alive in enumerate(walk.alive):
            if alive > rank[client]:
                assert set(walk.rows[walk.start[t] + rank[client]].tolist()) <= set(shard.tolist())


def test_longer_clients_come_first_and_the_stack_shrinks():
    """3, 9 and 5 samples in batches of 2: 2, 5 and 3 steps."""
    shards = [np.arange(3), np.arange(9), np.arange(5)]
    walk = batches.epochs(shards, 1, 2, shuffled())
    assert walk.order.tolist() == [1, 2, 0]
    assert walk.alive.tolist() == [3, 3, 2, 1, 1]


def test_an_empty_shard_weighs_nothing_in_a_sum():
    data = images()
    walk = batches.in_order([np.arange(0), np.arange(3)], 2)
    stream = batches.Stream(data, walk, mean=False)
    totals = {0: 0.0, 1: 0.0}
    for t, alive in enumerate(walk.alive):
        for rank in range(alive):
            totals[int(walk.order[rank])] += float(stream.one(t, rank).weight.sum())
    assert totals == {0: 0.0, 1: 3.0}


def test_mean_weights_sum_to_one_and_padding_has_none():
    data = images()
    stream = batches.Stream(data, batches.epochs([np.arange(5), np.arange(2)], 1, 3, shuffled()), mean=True)
    for t in range(2):
        batch = stream.step(t)
        assert batch.weight.sum(1).tolist() == pytest.approx([1.0] * len(batch.weight))
        torch.testing.assert_close(batch.x, data.batch(batch.row))
        assert batch.x.shape[2:] == (1, 4, 4)
