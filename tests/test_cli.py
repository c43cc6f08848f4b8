"""The command `fedkd`: what can be typed, what a typo gets, what a run leaves behind."""

import json
import math
import re
import sys
from itertools import zip_longest
from unittest.mock import MagicMock, Mock, patch

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from runs import TINY, choices, command, composed, finished, metrics, npz, ran, record, summary, table

from fedkd import cli, schema
from fedkd.cli import CONF, misspelt
from fedkd.core.errors import ConfigError
from fedkd.report.cli import main as report
from fedkd.run import headline

FILES = sorted(CONF.rglob("*.yaml"))
GROUPS: dict[str, list[str]] = {}
for file in FILES:
    group, _, option = file.relative_to(CONF).with_suffix("").as_posix().partition("/")
    if option:
        GROUPS.setdefault(group, []).append(option)
APPENDED = {"experiment", "table", "debug"}  # not among the defaults


def choose(group, option):
    return f"{'+' if group in APPENDED else ''}{group}={option}"


# composition


def test_every_option_of_every_group_composes():
    """One of each group at a time."""
    assert set(GROUPS) >= {
        *("dataset", "partition", "public", "model", "algorithm", "executor", "logger", "experiment", "debug"),
    }
    turns = [dict(zip(GROUPS, options, strict=True)) for options in zip_longest(*GROUPS.values())]
    seen = 0
    for turn in turns:
        # experiments and debug settings choose from other groups themselves
        chosen = {group: option for group, option in turn.items() if option and group not in APPENDED}
        config = composed(*(choose(*choice) for choice in chosen.items()))
        for group, option in chosen.items():
            assert config[group]["name"] == ("mixed" if (group, option) == ("model", "auto") else option)
            seen += 1
        for group in APPENDED:
            if turn[group]:
                assert choices(choose(group, turn[group]))  # alone: a preset may set keys of what it chooses
                seen += 1
    assert seen == len(FILES) - 1 >= 50  # all but config.yaml


def test_every_file_of_conf_begins_with_the_command_that_runs_it():
    assert len(FILES) >= 50
    for file in FILES:
        first, second, *_ = file.read_text().splitlines()
        line = second if first == "# @package _global_" else first
        group, _, option = file.relative_to(CONF).with_suffix("").as_posix().partition("/")
        expected = rf"# fedkd (.* )?\+?{group}={option}( .*)?" if option else "# fedkd"
        assert re.fullmatch(expected, line), f"{file.relative_to(CONF)}: {line}"


# typos

ROOT = {
    "roudns": "rounds",
    "cliens": "clients",
    "participaton": "participation",
    "sed": "seed",
    "devise": "device",
    "dryrun": "dry_run",
    "locl": "local",
    "resme": "resume",
    "algoritm": "algorithm",
}
NESTED = {
    "local.lrr": "lr",
    "local.batchsize": "batch_size",
    "eval.evry": "every",
    "checkpoint.evry": "every",
    "dataset.pth": "path",
    "partition.alpa": "alpha",
    "public.sizes": "size",
    "model.asign": "assign",
    "algorithm.distnce": "distance",
    "executor.chunks": "chunk",
    "logger.wandb.projet": "project",
}


def test_a_typo_in_an_option_is_refused_with_the_near_ones():
    assert len(GROUPS) >= 9
    typos = {group: f"{options[-1]}x" for group, options in GROUPS.items()}
    for choice in typos.items():
        with pytest.raises(HydraException):
            composed(choose(*choice))
    hints = misspelt([choose(*choice) for choice in typos.items()])
    for hint, (group, typo) in zip(hints, typos.items(), strict=True):
        assert hint.startswith(f"{group}={typo} does not exist. Did you mean {typo[:-1]}")


@pytest.mark.parametrize("typos", [ROOT, NESTED])
def test_a_typo_in_a_key_is_refused_with_the_near_ones(typos):
    for key in typos:
        with pytest.raises(OmegaConfBaseException):
            composed(f"{key}=1")
    hints = misspelt([*TINY, *(f"{key}=1" for key in typos)])
    for hint, (key, meant) in zip(hints, typos.items(), strict=True):
        assert hint.startswith(f"key {key} does not exist. Did you mean {meant}")
        assert re.search(rf"There are: (.*, )?{meant}(,|\.)", hint)


def test_near_keys_are_those_of_the_entry_that_was_chosen():
    (hint,) = misspelt(["algorithm.mv=1", "algorithm=fedprox"])
    assert hint == "key algorithm.mv does not exist. Did you mean mu? There are: mu, name."


def test_what_is_spelt_right_gets_no_hint():
    right = [
        "-m",
        "algorithm=fedavg,fedmd",
        "+debug=default",
        "local.lr=0.1",
        "hydra.run.dir=x",
        "model=glob(*)",
        "seed=1",
    ]
    assert misspelt(right) == []


def test_keys_let_in_with_a_plus_are_refused_too(monkeypatch, capsys):
    schema.register(CONF)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config, right = (compose("config", added) for added in (["+roudns=3", "+local.lrr=1", "+eval.evry=2"], []))
    assert schema.strangers(right) == []
    monkeypatch.setattr(cli, "HydraConfig", MagicMock())
    with pytest.raises(SystemExit):
        cli.job(config)
    told = capsys.readouterr().err
    assert "key eval.evry does not exist. Did you mean every?" in told
    assert "key local.lrr does not exist. Did you mean lr?" in told
    assert "key roudns does not exist. Did you mean rounds?" in told


# runs


@pytest.fixture
def fedkd(monkeypatch, tmp_path):
    """The command in this process, with a tiny config."""

    def call(*arguments):
        quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none")  # pytest has its own
        monkeypatch.setattr(sys, "argv", ["fedkd", *arguments, *quiet])
        try:
            return cli.main()
        finally:
            GlobalHydra.instance().clear()

    monkeypatch.chdir(tmp_path)
    return call


def test_a_typo_ends_the_command_with_a_hint(fedkd, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        fedkd("algorithm=fedagv", "local.lr=0.1", "roudns=3")
    assert stop.value.code == 1
    told = capsys.readouterr().err
    assert "Did you mean fedavg" in told
    assert "Did you mean rounds?" in told
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_group_and_option(fedkd, capsys):
    with pytest.raises(SystemExit) as stop:
        fedkd("--help")
    assert not stop.value.code
    shown = capsys.readouterr().out
    for group, options in GROUPS.items():
        assert re.search(rf"^  {group} +{', '.join(options)}$", shown, re.MULTILINE)
    assert "fedkd -m algorithm=fedavg,scaffold seed=0,1,2" in shown


def test_an_error_of_the_run_ends_it_with_code_2_and_its_sentences(fedkd, capsys):
    with pytest.raises(SystemExit) as stop:
        fedkd(*TINY, "participation=2", "clients=9999")
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("ConfigError: participation=2.0 must lie in (0, 1]")
    assert "clients=9999, but there are only" in told


def test_a_run_leaves_behind_all_its_files(fedkd, tmp_path):
    fedkd(*TINY, "algorithm=fedavg", "model=dnn", "hydra.run.dir=run")
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir() if not path.name.startswith(".")} == {
        *("metrics.jsonl", "summary.json", "clients.csv", "ledger.csv", "partition.png", "curves.png"),
        *("partition.npz", "classes.csv", "config.yaml", "command.json", "versions.json", "checkpoint"),
    }
    assert (run / "checkpoint" / "state.pt").exists()
    for picture in ("partition.png", "curves.png"):
        assert (run / picture).read_bytes().startswith(b"\x89PNG")
    assert {"fedkd", "commit", "python", "torch", "numpy", "hydra-core"} <= set(
        json.loads((run / "versions.json").read_text())
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A run with a server's model and a validation split."""
    directory = tmp_path_factory.mktemp("shared")
    value = ran(directory, "algorithm=fedavg", "model=dnn", "partition.train=0.6", "partition.validation=0.15")
    return directory, value


SPREAD = ("mean", "std", "weighted", "worst")
NAMES = {
    "round",
    *(f"acc/{whose}/{how}" for whose in ("personal", "shared", "validation") for how in SPREAD),
    *(f"loss/{whose}/mean" for whose in ("personal", "shared", "validation")),
    *("acc/shared/global", "loss/shared/global"),
    *(f"comm/{way}/{unit}" for way in ("up", "down", "total", "broadcast") for unit in ("params", "bytes")),
    *("time/round", "time/train", "time/eval"),
}


def test_metrics_have_the_names_of_the_design(shared):
    directory, _ = shared
    lines = metrics(directory)
    assert [line["round"] for line in lines] == [1, 2]
    assert all(set(line) == NAMES for line in lines)
    assert set(metrics_without_server(directory)) <= NAMES


def metrics_without_server(directory):
    ran(directory / "own", "algorithm=local", "rounds=1")
    (line,) = metrics(directory / "own")
    assert not [name for name in line if "shared" in name or "validation" in name]
    return line


def test_a_summary_has_the_last_and_the_best_of_every_metric(shared):
    directory, _ = shared
    told, lines = summary(directory), metrics(directory)
    assert {name for name in told if name.startswith("last/")} == {f"last/{name}" for name in NAMES}
    assert all(told[f"last/{name}"] == lines[-1][name] for name in NAMES)
    assert told["best/acc/personal/mean"] == max(line["acc/personal/mean"] for line in lines)
    assert told["best/loss/personal/mean"] == min(line["loss/personal/mean"] for line in lines)
    assert lines[told["best/round"] - 1]["acc/personal/mean"] == told["best/acc/personal/mean"]
    # 8·8 pixels, 128 hidden units, 10 classes: 9,610 numbers, to and from 4 clients in 2 rounds
    assert told["communication"] == [
        {"way": way, "what": "model", "params": 2 * 4 * 9610, "bytes": 4 * 2 * 4 * 9610} for way in ("down", "up")
    ]
    assert told["last/comm/broadcast/params"] == 2 * (1 + 4) * 9610


def test_the_job_returns_its_headline_metric(shared):
    directory, value = shared
    assert value == metrics(directory)[-1]["acc/personal/mean"]
    overrides = ("algorithm=fedavg", "model=dnn", "partition.train=0.6", "partition.validation=0.15")
    again = ran(directory / "again", *overrides, "objective=loss/validation/mean")
    assert again == metrics(directory)[-1]["loss/validation/mean"]


def test_the_headline_metric_is_the_last_value_not_the_best():
    assert headline({"last/acc/personal/mean": 0.5, "best/acc/personal/mean": 0.7}, "acc/personal/mean") == 0.5
    assert math.isnan(headline({"last/loss/shared/mean": None}, "loss/shared/mean"))  # null in the files: not finite
    with pytest.raises(ConfigError, match=r"objective=acc/x is not a metric of this run\. There are: round"):
        headline({"last/round": 3}, "acc/x")


def test_the_table_of_clients_is_whole(shared):
    directory, _ = shared
    rows, split = table(directory / "clients.csv"), np.load(directory / "partition.npz")
    assert list(rows[0]) == [
        *("client", "architecture", "train", "validation", "test", "classes"),
        *("acc_personal", "loss_personal", "acc_shared", "loss_shared"),
    ]
    assert [row["client"] for row in rows] == ["0", "1", "2", "3"]
    assert {row["architecture"] for row in rows} == {"dnn"}
    for role, name in enumerate(("train", "validation", "test")):
        assert [int(row[name]) for row in rows] == np.bincount(split["client"][split["role"] == role]).tolist()
    last = metrics(directory)[-1]
    for whose in ("personal", "shared"):
        accuracies = [float(row[f"acc_{whose}"]) for row in rows]
        losses = [float(row[f"loss_{whose}"]) for row in rows]
        assert np.mean(accuracies) == pytest.approx(last[f"acc/{whose}/mean"], rel=1e-12)
        assert np.std(accuracies) == pytest.approx(last[f"acc/{whose}/std"], rel=1e-12)
        assert min(accuracies) == last[f"acc/{whose}/worst"]
        assert np.mean(losses) == pytest.approx(last[f"loss/{whose}/mean"], rel=1e-12)


def test_the_ledger_s_rows_add_up_to_the_metrics(shared):
    directory, _ = shared
    rows = table(directory / "ledger.csv")
    assert list(rows[0]) == [
        *("round", "way", "what", "clients", "params", "bytes", "broadcast_params", "broadcast_bytes"),
    ]
    for line in metrics(directory):
        until = [row for row in rows if int(row["round"]) <= line["round"]]
        for unit in ("params", "bytes"):
            for way in ("up", "down"):
                assert line[f"comm/{way}/{unit}"] == sum(int(row[unit]) for row in until if row["way"] == way)
            assert line[f"comm/total/{unit}"] == sum(int(row[unit]) for row in until)
            assert line[f"comm/broadcast/{unit}"] == sum(int(row[f"broadcast_{unit}"]) for row in until)


def test_the_split_is_saved_as_other_tools_can_read_it(shared):
    directory, _ = shared
    split = np.load(directory / "partition.npz")
    assert {name: split[name].ndim for name in ("index", "client", "role")} == {"index": 1, "client": 1, "role": 1}
    assert set(split["role"]) == {0, 1, 2}
    held = np.concatenate([split["index"], split["public"]])
    assert len(np.unique(held)) == len(held) == 1437  # the training images; 200 of them are public


@pytest.mark.parametrize("name", ["fedavg", "fedmd"])
def test_a_saved_split_gives_the_same_run_to_the_bit(name, tmp_path):
    ran(tmp_path / "first", f"algorithm={name}")
    split = tmp_path / "first" / "partition.npz"
    ran(tmp_path / "again", f"algorithm={name}", "partition=file", f"partition.path={split}")
    assert record(tmp_path / "again") == record(tmp_path / "first")
    assert split.read_bytes() == (tmp_path / "again" / "partition.npz").read_bytes()


def test_a_sweep_makes_a_run_of_every_job_and_the_report_reads_them(fedkd, tmp_path, capsys):
    with patch.multiple("fedkd.run", draw_curves=Mock(), draw_partition=Mock()):
        fedkd("-m", *TINY, "algorithm=fedavg,local", "seed=0,1", "model=mlr", "hydra.sweep.dir=sweep")
    jobs = sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert jobs == ["0", "1", "2", "3"]
    told = [summary(tmp_path / "sweep" / job) for job in jobs]
    assert [(one["algorithm"], one["seed"]) for one in told] == [
        ("fedavg", 0),
        ("fedavg", 1),
        ("local", 0),
        ("local", 1),
    ]
    capsys.readouterr()
    assert report([str(tmp_path / "sweep"), "--format", "csv"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1 + 2  # the seeds of each algorithm are one row
    assert {"fedavg", "local"} <= set(re.split(r"\W", " ".join(rows[1:])))


PLUGIN = """
from dataclasses import dataclass
from math import prod

from torch import nn

from fedkd.algorithms.base import OneModel, SharedModel, register
from fedkd.algorithms.steps import supervised
from fedkd.models.net import Architecture
from fedkd.models.net import register as register_model


@register("median")
@dataclass(frozen=True)
class Median(OneModel):
    sharpness: float = 1.0

    def round(self, server, own, fed):
        w = fed.fit(supervised, fed.down(server.w, "model"))
        return SharedModel(fed.up(w, "model").mean()), own


@register_model("wide")
@dataclass(frozen=True)
class Wide(Architecture):
    width: int = 7

    def module(self, shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), self.width), nn.Linear(self.width, classes))
"""


def test_a_module_in_the_working_directory_adds_an_algorithm_and_a_model(tmp_path):
    (tmp_path / "my_methods.py").write_text(PLUGIN)
    data = ("dataset=npz", f"dataset.path={npz(tmp_path / 'images.npz')}", "public=none", "logger=none")
    chosen = ("plugins=[my_methods]", "algorithm=median", "algorithm.sharpness=2", "model=wide", "model.width=5")
    code, out, err = finished(command(tmp_path, *TINY, *data, *chosen, "hydra.run.dir=run"))
    assert code == 0, err
    assert "fedkd-report" in out  # what to type next
    told = summary(tmp_path / "run")
    assert told["algorithm"] == "median"
    params = 16 * 5 + 5 + 5 * 3 + 3  # 4·4 pixels, 3 classes
    assert told["last/comm/up/params"] == 2 * 4 * params  # rounds, clients
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "sharpness: 2.0" in config
    assert "width: 5" in config


def test_a_launcher_s_process_imports_the_plugins_itself(monkeypatch, tmp_path):
    """There a composed config arrives, and resolving model=auto asks what the algorithm needs."""
    (tmp_path / "only_here.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("fedkd.run.run", lambda *_, **__: 0.5)
    monkeypatch.setattr(cli, "HydraConfig", MagicMock())
    config = OmegaConf.create({"plugins": ["only_here"]})
    assert cli.job(config) == 0.5
    assert "only_here" in sys.modules


def test_plugins_are_read_off_the_command_line():
    assert cli.plugins_in(["rounds=3", "plugins=[a,b.c]"]) == ["a", "b.c"]
    assert cli.plugins_in(["plugins=['a', 'b']"]) == ["a", "b"]
    assert cli.plugins_in(["rounds=3"]) == []
