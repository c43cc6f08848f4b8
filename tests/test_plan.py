"""A dry run tells what the run will do, and does nothing of it."""

import json
from itertools import pairwise

import numpy as np
import pytest
from runs import composed, metrics, most_memory, ran, summary

from fedkd import build, plan
from fedkd.algorithms.base import ALGORITHMS

WAYS = {"unicast": "comm/total", "broadcast": "comm/broadcast"}


def planned(directory, *overrides):
    assert ran(directory, *overrides, "dry_run=true") is None
    return json.loads((directory / "plan.json").read_text())


def test_the_plans_of_every_algorithm_are_held_to_a_run():
    assert len(ALGORITHMS) >= 6


def planned_and_sent(directory, name):
    """The same federation, planned and run: 0.8·5 = 4 clients in each of three rounds."""
    overrides = (f"algorithm={name}", "clients=5", "participation=0.8", "rounds=3", "local.steps=1")
    split = ("partition.train=0.6", "partition.validation=0.2", "partition.test=0.2")
    comm = planned(directory / "plan", *overrides, *split)["comm"]
    ran(directory / "run", *overrides, *split)
    last = metrics(directory / "run")[-1]
    return comm, {way: {unit: last[f"{metric}/{unit}"] for unit in ("params", "bytes")} for way, metric in WAYS.items()}


@pytest.mark.parametrize("name", [name for name, kind in ALGORITHMS.items() if not kind.sent_by_data])
def test_the_plan_counts_what_a_run_sends(name, tmp_path, capsys):
    comm, sent = planned_and_sent(tmp_path, name)
    assert comm["exact"]
    assert comm["total"] == sent
    assert comm["per_round"] == {way: {unit: round(sums[unit] / 3) for unit in sums} for way, sums in sent.items()}
    kinds = summary(tmp_path / "run")["communication"]
    assert comm["by_kind"] == [{**k, "params": round(k["params"] / 3), "bytes": round(k["bytes"] / 3)} for k in kinds]
    assert name in ("local", "l2sgd") or sent["unicast"]["params"] > 0  # l2sgd's coin says tails three times


@pytest.mark.parametrize("name", [name for name, kind in ALGORITHMS.items() if kind.sent_by_data])
def test_the_plan_says_that_it_estimates_where_the_data_decide_what_is_sent(name, tmp_path, capsys):
    comm, sent = planned_and_sent(tmp_path, name)
    assert not comm["exact"]
    assert comm["estimate"]
    for way, sums in sent.items():
        assert comm["total"][way] == pytest.approx(sums, rel=1)  # of FedProto's classes a client has about half


def test_the_plan_of_rounds_that_a_coin_decides_counts_what_a_run_sends(tmp_path, capsys):
    overrides = ("algorithm=l2sgd", "algorithm.p=0.5", "clients=5", "participation=0.8", "rounds=8", "local.steps=1")
    comm = planned(tmp_path / "plan", *overrides)["comm"]
    ran(tmp_path / "run", *overrides)
    lines = metrics(tmp_path / "run")
    assert 2 < len({line["comm/total/params"] for line in lines}) < 8  # heads and tails
    assert comm["exact"]
    assert comm["total"]["unicast"]["params"] == lines[-1]["comm/total/params"]


def test_the_plan_of_rounds_with_cohorts_of_many_kinds_counts_what_a_run_sends(tmp_path, capsys):
    """Of 7 clients with 3 architectures in turn, 3 a round: some rounds are alike, others are not."""
    overrides = ("algorithm=fedmd", "clients=7", "participation=0.4", "rounds=8", "local.steps=1")
    comm = planned(tmp_path / "plan", *overrides)["comm"]
    ran(tmp_path / "run", *overrides)
    assert comm["exact"]
    assert comm["total"]["unicast"]["params"] == metrics(tmp_path / "run")[-1]["comm/total/params"]


def test_a_plan_trains_and_writes_nothing_else(tmp_path, capsys):
    planned(tmp_path, "logger=none")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    shown = capsys.readouterr().out
    assert "nothing is trained" in shown
    assert "plan.json" in shown


def test_a_plan_tells_clients_data_models_and_memory(tmp_path, capsys):
    told = planned(tmp_path, "clients=7", "participation=0.5", "partition=iid", "public.size=37")
    # 1,437 training images without 37 are 1,400: 200 a client, of which 3/4 train and 1/4 test
    assert told["clients"]["count"] == 7
    assert told["clients"]["per_round"] == 4  # 0.5·7 = 3.5, rounded to even
    assert told["clients"]["train"] == {"total": 1050, "min": 150, "median": 150, "max": 150}
    assert told["clients"]["test"] == {"total": 350, "min": 50, "median": 50, "max": 50}
    assert told["public"] == 37
    # 8·8 pixels, 10 classes. mlr 64·10+10; dnn 64·128+128 + 128·10+10; small_cnn 9·16+16 + 9·16·32+32 + 128·10+10
    assert told["models"] == {
        "mlr": {"params": 650, "held": 650, "clients": 3},
        "dnn": {"params": 9610, "held": 9610, "clients": 2},
        "small_cnn": {"params": 6090, "held": 6090, "clients": 2},
    }
    assert all(size > 0 for size in told["memory"].values())


def test_a_plan_that_takes_long_extends_the_rounds_it_has_seen(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plan, "PATIENCE", 0)
    comm = planned(tmp_path, "algorithm=fedavg", "model=mlr", "rounds=1000")["comm"]
    assert not comm["exact"]
    assert comm["per_round"]["unicast"]["params"] == 2 * 4 * 650  # down to 4 clients and up again
    assert comm["total"]["unicast"]["params"] == 1000 * 2 * 4 * 650


@pytest.fixture
def colour(tmp_path):
    """300 images of CIFAR-10's shape and classes."""
    images, labels = np.zeros((300, 32, 32, 3), np.uint8), np.arange(300) % 10
    file = tmp_path / "colour.npz"
    np.savez(file, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    return file


def test_fedavg_with_100_clients_of_vgg11_is_planned_without_making_the_models(colour, tmp_path, capsys):
    planned(tmp_path / "first", "algorithm=fedavg")  # the libraries' own memory
    overrides = ("algorithm=fedavg", "model=vgg11", "dataset=npz", f"dataset.path={colour}", "public=none")
    before = most_memory(afresh=True)
    told = planned(tmp_path / "plan", *overrides, "clients=100", "participation=0.1", "rounds=4", "partition=iid")
    assert most_memory() - before < 300e6  # the cohort's 10 models alone have 390 MB

    widths = (3, 64, 128, 256, 256, 512, 512, 512, 512)
    convolutions = sum(9 * a * b + b for a, b in pairwise(widths))
    normalisation = 2 * sum(widths[1:])  # scale and shift
    classifier = 2 * (512 * 512 + 512) + 512 * 10 + 10
    params = convolutions + normalisation + classifier
    assert params == 9_756_426
    size = 4 * (params + 2 * sum(widths[1:]))  # bytes; with running mean and variance, which no paper counts as params

    comm = told["comm"]
    assert told["models"]["vgg11"]["params"] == params
    # 10 clients a round: a copy down to each and one up from each; as a broadcast, one goes down
    assert comm["per_round"]["unicast"] == {"params": 2 * 10 * params, "bytes": 2 * 10 * size}
    assert comm["per_round"]["broadcast"] == {"params": 11 * params, "bytes": 11 * size}
    assert comm["total"]["unicast"] == {"params": 4 * 2 * 10 * params, "bytes": 4 * 2 * 10 * size}
    assert comm["total"]["broadcast"] == {"params": 4 * 11 * params, "bytes": 4 * 11 * size}


def test_a_plan_leaves_the_data_as_they_are():
    config = composed("algorithm=fedavg")
    parts = build.parts(config)
    data = build.data(config, parts.dataset, parts.partition, parts.public)
    pixels = data.images.pixels.clone()
    plan.plan(parts, config, data)
    assert data.images.pixels.equal(pixels)
