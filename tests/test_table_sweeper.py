"""`fedkd -m +table=...`: what is run, what is kept, what is told."""

import json
import signal
import sys
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from runs import command, finished, metrics, record, summary, table

from fedkd import cli
from fedkd.core.signals import Interrupted
from fedkd.engine import Engine
from fedkd.run import write_setting

PRESET = """
# @package _global_
defaults:
  - override /hydra/sweeper: fedkd_table
  - override /model: mlr
  - override /logger: none

clients: 4
rounds: 2
local: {steps: 2}
checkpoint: {every: 1}
table:
  name: tiny/one
  reference: "Nobody, 2026"
  column:
    iid: {title: IID, overrides: [partition=iid]}
    cost: {title: Cost, overrides: [partition=iid], metric: comm/broadcast/params, unit: thousand}
  row:
    local: {title: Local, overrides: [algorithm=local]}
    fedprox_gm: {title: FedProx (GM), overrides: [algorithm=fedprox], metric: acc/shared/mean}
    fedprox_pm: {title: FedProx (PM), overrides: [algorithm=fedprox]}
  paper:
    local: {iid: 50.0}
    fedprox_gm: {cost: 3.25}
  scales:
    smoke: [rounds=1]
"""
RUNS = ["local/iid/seed=0", "fedprox_gm/iid/seed=0"]  # which the cost column and the other row share
FOLDER = Path("outputs/tables/tiny/one/paper")


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    """A table's preset in a folder of its own, and fedkd started beside it."""
    file = tmp_path / "conf" / "table" / "tiny" / "one.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(PRESET)
    return file


@pytest.fixture
def fedkd(preset, monkeypatch, tmp_path):
    """The command in this process; returns its exit status."""

    def call(*arguments, sweep=True):
        quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none")  # pytest has its own
        where = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
        typed = [*(["-m"] if sweep else []), "+table=tiny/one", *arguments]
        monkeypatch.setattr(sys, "argv", ["fedkd", *typed, where, *quiet])
        try:
            cli.main()
        except SystemExit as stop:
            return stop.code
        finally:
            GlobalHydra.instance().clear()
        return 0

    monkeypatch.chdir(tmp_path)
    with patch.multiple("fedkd.run", draw_curves=Mock(), draw_partition=Mock()):
        yield call


@pytest.fixture
def started(monkeypatch):
    """Runs that train nothing: the directories started, with their config and W&B group; those in `failing` fail."""

    class Started(list):
        failing = ()

        def run(self, config, directory, overrides, group):
            name = "/".join(directory.parts[-3:])
            self.append((name, config, group))
            write_setting(directory, config, overrides)
            if name in self.failing:
                raise ValueError(f"{name} cannot be")
            (directory / "summary.json").write_text(json.dumps({"last/acc/personal/mean": 0.5}))

        @property
        def names(self):
            return [name for name, *_ in self]

    runs = Started()
    monkeypatch.setattr("fedkd.run.run", runs.run)
    return runs


# What is run


def test_a_table_is_run_and_stands_beside_the_paper(fedkd, tmp_path, capsys):
    assert fedkd() == 0
    told = capsys.readouterr().out
    assert "tiny/one: 6 cells, in outputs/tables/tiny/one/paper\n2 runs\n" in told
    assert sorted(str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("summary.json")) == sorted(RUNS)
    cells = {(row["row"], row["column"]): row for row in table(FOLDER / "table.csv")}
    gm, pm, local = (summary(FOLDER / f"{row}/iid/seed=0") for row in ("fedprox_gm", "fedprox_gm", "local"))
    assert float(cells["fedprox_gm", "iid"]["mean"]) == pytest.approx(100 * gm["last/acc/shared/mean"])
    assert float(cells["fedprox_pm", "iid"]["mean"]) == pytest.approx(100 * pm["last/acc/personal/mean"])
    assert float(cells["local", "iid"]["difference"]) == pytest.approx(100 * local["last/acc/personal/mean"] - 50)
    # 8·8 pixels and 10 classes: 650 numbers, of 4 clients and once from the server, in 2 rounds
    assert float(cells["fedprox_gm", "cost"]["mean"]) == 2 * 5 * 650 / 1000
    assert "FedProx (GM)" in told
    assert (FOLDER / "report.html").exists()
    config = yaml.safe_load((FOLDER / RUNS[0] / "config.yaml").read_text())
    assert config["table"] is None  # of which table it is a part moves no result


def test_a_part_can_be_chosen(fedkd, started):
    assert fedkd("table.rows=[fedprox_pm]", "table.columns=[iid,cost]", "table.seeds=[3,5]", "table.scale=smoke") == 0
    assert started.names == ["fedprox_gm/iid/seed=3", "fedprox_gm/iid/seed=5"]
    assert [config["seed"] for _, config, _ in started] == [3, 5]
    assert {config["rounds"] for _, config, _ in started} == {1}
    assert (FOLDER.with_name("smoke") / "fedprox_gm/iid/seed=5/summary.json").exists()


def test_what_is_typed_goes_for_every_cell_and_names_the_folder(fedkd, started):
    assert fedkd("local.lr=0.5", "rounds=3", "device=cpu", "logger=quiet", "table.scale=smoke") == 0
    assert all((config["local"]["lr"], config["rounds"]) == (0.5, 3) for _, config, _ in started)
    assert (FOLDER.with_name("smoke,local.lr=0.5,rounds=3") / "table.csv").exists()


def test_a_folder_can_be_named(fedkd, started, tmp_path):
    assert fedkd("hydra.sweep.dir=mine") == 0
    assert {path.parent.relative_to("mine").as_posix() for path in Path("mine").rglob("summary.json")} == {*RUNS}


def test_the_runs_of_a_table_share_a_group_and_keep_quiet(fedkd, started):
    assert fedkd() == 0
    assert {group for *_, group in started} == {"tiny/one/paper"}
    assert not any(config["logger"]["console"] for _, config, _ in started)


def test_a_dry_run_gives_the_columns_that_need_no_training(fedkd, capsys):
    assert fedkd("dry_run=true", "table.seeds=[0,1]") == 0
    assert "2 runs" in capsys.readouterr().out  # one seed: a plan knows no chance
    cells = {(row["row"], row["column"]): row["mean"] for row in table(FOLDER / "table.csv")}
    assert float(cells["fedprox_gm", "cost"]) == 2 * 5 * 650 / 1000
    assert cells["fedprox_gm", "iid"] == ""
    assert not list(FOLDER.rglob("metrics.jsonl"))
    assert fedkd("dry_run=true") == 0
    assert "2 kept" in capsys.readouterr().out


# What is kept


def test_finished_runs_are_kept(fedkd, started, capsys):
    assert fedkd("table.rows=[local]") == 0
    assert fedkd() == 0
    assert "2 runs, 1 kept" in capsys.readouterr().out
    assert started.names == RUNS
    assert fedkd("device=cpu", "logger=quiet") == 0  # these move no number
    assert len(started) == len(RUNS)


def test_runs_of_another_config_are_set_aside_not_overwritten(fedkd, started, preset, capsys):
    assert fedkd() == 0
    preset.write_text(PRESET.replace("[algorithm=local]", "[algorithm=local, local.lr=0.7]"))
    assert fedkd() == 0
    told = capsys.readouterr().out
    assert f"set aside, as they were run with another config:\n  {FOLDER}/local/iid/seed=0~1\n" in told
    assert started.names == [*RUNS, "local/iid/seed=0"]
    assert (FOLDER / "local/iid/seed=0~1/summary.json").exists()
    assert yaml.safe_load((FOLDER / "local/iid/seed=0/config.yaml").read_text())["local"]["lr"] == 0.7


def test_an_interrupted_run_goes_on_where_it_was(fedkd, capsys):
    chosen = ("table.rows=[fedprox_gm]", "table.columns=[iid]")
    run, advance, rounds = FOLDER / "fedprox_gm/iid/seed=0", Engine.advance, []

    def interrupted(engine, state):
        rounds.append(state.round + 1)
        if rounds == [1, 2]:
            raise Interrupted(signal.SIGINT)
        advance(engine, state)

    with patch.object(Engine, "advance", interrupted):
        assert fedkd(*chosen) == 128 + signal.SIGINT
        assert "the same command goes on from here" in capsys.readouterr().out
        assert len(metrics(run)) == 1
        assert fedkd(*chosen) == 0
    assert rounds == [1, 2, 2]
    assert fedkd(*chosen, "hydra.sweep.dir=whole") == 0
    assert record(run) == record(Path("whole/fedprox_gm/iid/seed=0"))


def test_ctrl_c_while_the_cells_are_composed_ends_in_one_line_after_the_first(fedkd, capsys):
    with patch("hydra_plugins.fedkd._table.plain", side_effect=KeyboardInterrupt):
        assert fedkd() == 128 + signal.SIGINT
    told, errors = capsys.readouterr()
    where = "tiny/one: 6 cells, in outputs/tables/tiny/one/paper"
    assert told.splitlines() == [where, "interrupted; the same command goes on from here"]
    assert errors == ""


# What goes wrong


def test_a_run_that_fails_is_told_at_the_end_and_stops_no_other(fedkd, started, capsys):
    started.failing = {"local/iid/seed=0"}
    assert fedkd() == 1
    assert started.names == RUNS
    out, err = capsys.readouterr()
    assert "1 of 2 runs failed" in out
    assert "outputs/tables/tiny/one/paper/local/iid/seed=0: ValueError: local/iid/seed=0 cannot be" in out
    assert "does not exist" not in err  # no talk of typos
    assert "Traceback" in (FOLDER / "local/iid/seed=0/error.txt").read_text()
    assert "FedProx (PM)" in (FOLDER / "table.txt").read_text()
    started.failing = ()
    assert fedkd() == 0  # tries that one again
    assert started.names == [*RUNS, "local/iid/seed=0"]
    assert not (FOLDER / "local/iid/seed=0/error.txt").exists()


def test_a_launcher_that_breaks_down_is_told_too(fedkd, capsys, monkeypatch):
    broken = Mock(launch=Mock(side_effect=RuntimeError("a worker was killed")))
    monkeypatch.setattr(Plugins, "instantiate_launcher", Mock(return_value=broken))
    assert fedkd("table.rows=[local]", "table.columns=[iid]") == 1
    assert "local/iid/seed=0: RuntimeError('a worker was killed')" in capsys.readouterr().out


def test_typos_are_told_together_before_anything_runs(fedkd, started, capsys):
    typos = ("table.rows=[locl,fedprox]", "table.columns=[idd]", "table.scale=smok", "rounds=2,3", "seed=1", "resume=x")
    assert fedkd(*typos) == 2
    told = capsys.readouterr().err
    for sentence in (
        "table.rows=locl does not exist. Did you mean local?",
        "table.rows=fedprox does not exist. Did you mean fedprox_pm or fedprox_gm?",
        "table.columns=idd does not exist. Did you mean iid?",
        "table.scale=smok does not exist. Did you mean smoke?",
        "rounds=2,3: a table is a sweep already",
        "seed=1: the seeds of a table are table.seeds=[0,1,2]",
        "resume=x: type the same command again",
    ):
        assert sentence in told
    assert not started
    assert not FOLDER.exists()


def test_a_typo_in_a_preset_is_refused(fedkd, started, preset, capsys):
    preset.write_text(PRESET.replace("title: IID", "titel: IID"))
    assert fedkd() == 1
    assert "Key 'titel' not in 'Line'" in capsys.readouterr().err
    assert not started


def test_without_m_a_table_says_how_to_run_it(fedkd, started, capsys):
    assert fedkd(sweep=False) == 2
    assert "tiny/one is a table, which is a sweep: add -m" in capsys.readouterr().err
    assert not started


def test_the_sweeper_without_a_table_says_what_it_is_for(fedkd, started, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fedkd", "-m", "hydra/sweeper=fedkd_table"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    GlobalHydra.instance().clear()
    assert stop.value.code == 2
    assert "name one, as in fedkd -m +table=" in capsys.readouterr().err


# Elsewhere


@pytest.mark.slow
def test_joblib_runs_a_table_in_other_processes(preset, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    where = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    wrong = PRESET.replace("[algorithm=local]", "[algorithm=local, participation=7]")
    preset.write_text(wrong)
    code, out, err = finished(command(tmp_path, "-m", "+table=tiny/one", where, *launcher), timeout=600)
    assert code == 1, err
    assert "1 of 2 runs failed" in out
    assert "participation=7.0 must lie in (0, 1]" in out
    assert "[2/2]" in out
    preset.write_text(PRESET)
    code, out, err = finished(command(tmp_path, "-m", "+table=tiny/one", where, *launcher), timeout=600)
    assert code == 0, err
    assert "2 runs, 1 kept" in out
    assert len(list((tmp_path / FOLDER).rglob("summary.json"))) == 2
