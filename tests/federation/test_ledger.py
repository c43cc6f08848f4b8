"""The ledger counts what crosses, and only `up` opens what lies at the clients."""

import numpy as np
import pytest
import torch
from tiny import Hidden, Linear, world

from fedkd.core.tree import Params, Rows
from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger, Row
from fedkd.federation.placed import Placed


def federation(**how):
    ledger = Ledger()
    return Federation(world(**how), 1, np.arange(4), ledger), ledger


def test_a_broadcast_counts_once_a_unicast_for_every_client():
    fed, ledger = federation()
    fed.down({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, "things")
    assert ledger.rows == [Row(1, "down", "things", 4, 40, 160, 10, 40)]


def test_a_tensor_sent_to_several_clients_is_one_distinct_message():
    fed, ledger = federation()
    a, b = torch.zeros(5), torch.zeros(5)
    fed.down_each([a, b, a, a], "targets")
    assert (ledger.rows[0].params, ledger.rows[0].broadcast_params) == (20, 10)
    stacked = torch.zeros(4, 3)
    fed.down_each([stacked[0], stacked[1], stacked[0], stacked[2]], "rows")  # views of three places
    assert ledger.rows[1].broadcast_params == 9


def test_down_each_gives_every_client_its_own_also_across_architectures():
    fed, _ = federation(architectures=(Hidden(), Linear()))
    placed = fed.down_each([torch.tensor([float(i)]) for i in range(4)], "number")
    assert [v.item() for v in fed.up(placed, "number")] == [0, 1, 2, 3]


def test_received_values_keep_the_cohorts_order_across_architectures():
    fed, _ = federation(architectures=(Hidden(), Linear()))
    received = fed.up(fed.down_each([torch.tensor([float(i), 1.0]) for i in range(4)], "number"), "number")
    assert received.stack()[:, 0].tolist() == [0, 1, 2, 3]
    # weights 1, 2, 3, 4 over 10: 0·.1 + 1·.2 + 2·.3 + 3·.4 = 2
    assert received.mean([1, 2, 3, 4]).tolist() == pytest.approx([2.0, 1.0])
    assert len(received) == 4


def test_the_server_cannot_look_into_placed_values():
    fed, _ = federation()
    placed = fed.down(torch.zeros(2), "secret")
    with pytest.raises(TypeError, match=r"Federation\.up"):
        list(placed)
    for operation in (float, len, lambda p: p[0], lambda p: p + 1):
        with pytest.raises(TypeError):
            operation(placed)


def test_a_placed_tuple_comes_apart_and_together_without_a_message():
    fed, ledger = federation()
    one, two = fed.down((torch.zeros(2), torch.ones(3)), "pair")
    rows = len(ledger.rows)
    packed = Placed.pack(lambda a, b: {"a": a, "b": b}, one, two)
    assert len(ledger.rows) == rows
    assert fed.up(packed, "both")[0]["b"].tolist() == [1, 1, 1]


def test_statistics_have_a_row_of_their_own_that_counts_no_params():
    fed, ledger = federation()
    fed.down(Params({"w": torch.zeros(7)}, {"m": torch.zeros(3)}), "model")
    assert [(r.what, r.params, r.bytes, r.broadcast_bytes) for r in ledger.rows] == [
        ("model", 28, 112, 28),
        ("model statistics", 0, 48, 12),
    ]


def test_lower_precision_halves_the_bytes():
    fed, ledger = federation()
    fed.down(torch.zeros(10, dtype=torch.bfloat16), "half")
    assert (ledger.rows[0].params, ledger.rows[0].bytes) == (40, 80)


def test_totals_are_the_sums_of_the_rows_and_survive_a_round_trip():
    fed, ledger = federation()
    fed.up(fed.down(torch.zeros(10), "a"), "b")
    assert ledger.totals == {
        "comm/up/params": 40, "comm/up/bytes": 160, "comm/down/params": 40, "comm/down/bytes": 160,
        "comm/total/params": 80, "comm/total/bytes": 320, "comm/broadcast/params": 50, "comm/broadcast/bytes": 200,
    }  # fmt: skip
    assert Ledger([list(row) for row in ledger.rows]).totals == ledger.totals


def test_the_public_batch_of_a_round_is_a_function_of_seed_and_round():
    made = world()
    one, same = (Federation(made, 1, np.arange(4), Ledger()).public for _ in range(2))
    other = Federation(made, 2, np.arange(4), Ledger()).public
    assert len(one) == 6
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_sums_run_over_the_clients_own_samples():
    fed, _ = federation(executor="vmapped")
    counted = fed.sum(lambda net, batch: batch.weight.sum())
    assert [v.item() for v in fed.up(counted, "count")] == [5, 11, 7, 13]
    held = fed.sum(lambda net, batch: batch.weight.sum(), over="validation")
    assert [v.item() for v in fed.up(held, "count")] == [1, 1, 1, 1]
    with pytest.raises(KeyError):  # an algorithm cannot reach test data
        fed.sum(lambda net, batch: batch.weight.sum(), over="test")


def test_public_samples_are_drawn_beside_private_batches():
    seen = {"serial": [], "vmapped": []}

    def step(net, carry, batch, public):
        return carry + public.weight.sum() + 10 * batch.weight.sum()

    for executor in seen:
        fed, _ = federation(executor=executor)
        start = fed.down(torch.zeros(()), "zero")
        seen[executor] = [v.item() for v in fed.up(fed.train(step, start, beside=4, steps=3), "sum")]
    assert seen["serial"] == pytest.approx([33.0] * 4)
    assert seen["vmapped"] == pytest.approx([33.0] * 4)


def test_the_shared_coin_is_a_function_of_the_round():
    made = world()
    tosses = [Federation(made, t, np.arange(4), Ledger()).coin(0.5) for t in range(1, 200)]
    assert tosses == [Federation(made, t, np.arange(4), Ledger()).coin(0.5) for t in range(1, 200)]
    assert 70 < sum(tosses) < 130  # 199 fair tosses: mean 99.5, standard deviation 7


def test_of_a_table_only_the_present_rows_are_counted():
    fed, ledger = federation()
    present = torch.tensor([True, False, True])
    placed = fed.each(lambda net, w: Rows(w, present), fed.down(torch.zeros(3, 5), "table"))
    fed.up(placed, "rows")
    assert (ledger.rows[1].params, ledger.rows[1].bytes) == (4 * 2 * 5, 4 * 2 * 5 * 4)
