"""A run that was stopped, however, goes on as if nothing had been."""

import itertools
import os
import pkgutil
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from runs import command, finished, metrics, npz, ran, record, resumed

from fedkd import checkpoint
from fedkd.core.errors import CheckpointError
from fedkd.core.signals import Interrupted, interruptible, shielded
from fedkd.run import adopt

ROUNDS = 40
SETTING = (  # a method with states at the server and at the clients, some of whom sit out
    *("algorithm=scaffold", "model=mlr", "clients=6", "participation=0.5", f"rounds={ROUNDS}", "local.steps=1"),
    *("checkpoint.every=7", "eval.every=2", "public=none", "logger=none", "dataset=npz"),
)
FILES = ("clients.csv", "ledger.csv", "partition.npz", "config.yaml", "command.json")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return (*SETTING, f"dataset.path={npz(tmp_path_factory.mktemp('data') / 'images.npz')}")


@pytest.fixture(scope="module")
def single_thread():
    """As the processes these runs are held against: threads share out sums differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(setting, single_thread, tmp_path_factory):
    """The uninterrupted run."""
    directory = tmp_path_factory.mktemp("whole")
    ran(directory, *setting)
    return directory


def started(directory, *overrides, lines):
    """A run as a process of its own, with so many lines in its record."""
    process = command(directory.parent, *overrides)
    path, deadline = directory / "metrics.jsonl", time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.001)
    return process


class Stop(BaseException):
    """The end of a run, where a test wants it."""


def once(patch, name, call, act):
    """Let something happen before the n-th call of the function with this name."""
    calls, original = itertools.count(1), pkgutil.resolve_name(name)

    def wrapped(*args, **how):
        if next(calls) == call:
            act()
        return original(*args, **how)

    patch.setattr(name, wrapped)


def stopping(patch, name, call):
    """Stop the run there; it can save."""

    def stop():
        raise Stop

    once(patch, name, call, stop)


def dying(patch, name, call):
    """Kill the run there: nothing more is saved."""

    def die():
        patch.setattr("fedkd.engine.Engine.save", lambda *_: None)
        raise Stop

    once(patch, name, call, die)


def assert_same(directory, whole):
    assert record(directory) == record(whole)
    for name in ("clients.csv", "ledger.csv"):
        assert (directory / name).read_text() == (whole / name).read_text()


# killed and terminated


def test_a_run_that_is_killed_and_then_terminated_ends_with_the_same_numbers(setting, single_thread, tmp_path):
    directory, setting = tmp_path / "run", (*setting, "rounds=300")
    process = started(directory, *setting, "hydra.run.dir=run", lines=10)
    process.kill()
    finished(process)
    assert process.returncode == -signal.SIGKILL
    killed = len(metrics(directory))
    assert 10 <= killed < 150  # every second round is judged

    process = started(directory, f"resume={directory}", "checkpoint.every=null", lines=killed + 5)
    process.terminate()
    code, out, err = finished(process)
    assert code == 128 + signal.SIGTERM, err
    assert "interrupted after round" in out
    assert "fedkd resume=run" in out
    assert killed < len(metrics(directory)) < 150
    assert not (directory / "summary.json").exists()

    resumed(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # all of it happened in place
    ran(tmp_path / "whole", *setting)
    assert_same(directory, tmp_path / "whole")


MOMENTS = {  # before which call of what the run dies
    "before an evaluation": ("fedkd.engine.evaluate", 12),
    "before a line": ("fedkd.logger.jsonl.JsonLines.log", 9),
    "before a checkpoint": ("fedkd.checkpoint.save", 3),
    "amid a checkpoint": ("fedkd.checkpoint.torch.save", 3),
    "before the states of a cohort": ("fedkd.federation.store.Store.scatter", 20),
    "amid the states of a cohort": ("fedkd.federation.store.os.pwrite", 70),  # of a store on disk
}


@pytest.mark.parametrize(
    ("moment", "store"), [*((m, "disk") for m in MOMENTS), *((m, "memory") for m in [*MOMENTS][:-1])]
)
def test_a_run_killed_at_any_moment_resumes_to_the_same_numbers(moment, store, whole, setting, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        dying(patch, *MOMENTS[moment])
        with pytest.raises(Stop):
            ran(tmp_path, *setting, f"store={store}")
    assert 0 < saved(tmp_path)["round"] < ROUNDS
    resumed(tmp_path)
    assert_same(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("delay", [0.0, 0.013, 0.029, 0.05, 0.11])
def test_a_run_killed_again_and_again_resumes_to_the_same_numbers(store, delay, setting, single_thread, tmp_path):
    directory, setting = tmp_path / "run", (*setting, "rounds=300", "checkpoint.every=1", f"store={store}")
    process = started(directory, *setting, "hydra.run.dir=run", lines=10)
    for _ in range(3):
        time.sleep(delay)
        process.kill()
        finished(process)
        process = started(directory, f"resume={directory}", lines=len(metrics(directory)) + 1)
    assert finished(process)[0] == 0
    ran(tmp_path / "whole", *setting)
    assert_same(directory, tmp_path / "whole")


def test_a_run_killed_before_its_first_checkpoint_starts_anew_in_place(whole, setting, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        dying(patch, "fedkd.engine.evaluate", 2)
        with pytest.raises(Stop):
            ran(tmp_path, *setting)
    assert not (tmp_path / "checkpoint" / "state.pt").exists()
    kept = (tmp_path / "command.json").read_text()
    resumed(tmp_path)
    assert_same(tmp_path, whole)
    assert (tmp_path / "command.json").read_text() == kept


# asked to stop


def test_a_signal_waits_where_nothing_may_be_torn():
    steps = []

    def work():
        with interruptible():
            with shielded():
                os.kill(os.getpid(), signal.SIGTERM)
                steps.append("whole")
            steps.append("not reached")

    with pytest.raises(Interrupted, match="SIGTERM"):
        work()
    assert steps == ["whole"]


def test_a_second_signal_does_not_tear_the_saving(setting, tmp_path, monkeypatch):
    """The first comes in round 5, the second while its checkpoint is being written."""
    once(monkeypatch, "fedkd.engine.Federation", 5, lambda: os.kill(os.getpid(), signal.SIGINT))
    once(monkeypatch, "fedkd.checkpoint.torch.save", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="SIGINT"):
        ran(tmp_path, *setting)
    assert saved(tmp_path)["round"] == 4


def test_signals_are_as_before_after_a_run(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    ran(tmp_path, "rounds=1", "algorithm=fedavg", "model=mlr")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_an_interruption_between_a_round_and_its_evaluation_does_not_lose_the_line(
    whole, setting, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        stopping(patch, "fedkd.engine.evaluate", 5)  # every second round is judged: after round 10
        with pytest.raises(Stop):
            ran(tmp_path, *setting)
    assert [line["round"] for line in metrics(tmp_path)] == [2, 4, 6, 8]
    assert saved(tmp_path)["round"] == 10
    resumed(tmp_path)
    assert_same(tmp_path, whole)


def test_what_clients_sent_survives_such_an_interruption(tmp_path, monkeypatch):
    one = "rounds=2", "algorithm=fedavg", "model=mlr", "eval.sent=true"
    ran(tmp_path / "whole", *one)
    with monkeypatch.context() as patch:
        stopping(patch, "fedkd.engine.evaluate", 2)
        with pytest.raises(Stop):
            ran(tmp_path / "cut", *one)
    resumed(tmp_path / "cut")
    assert_same(tmp_path / "cut", tmp_path / "whole")
    assert all("acc/sent/mean" in line for line in metrics(tmp_path / "cut"))


# resume=auto


def test_auto_starts_and_then_continues(whole, setting, tmp_path, monkeypatch):
    overrides = (*setting, "resume=auto")
    with monkeypatch.context() as patch:
        stopping(patch, "fedkd.engine.Federation", 23)  # in round 23
        with pytest.raises(Stop):
            ran(tmp_path, *overrides)
    assert saved(tmp_path)["round"] == 22
    stopping(
        monkeypatch, "fedkd.engine.Federation", ROUNDS - 22 + 1
    )  # were it to do more than the rounds that are left
    ran(tmp_path, *overrides)
    assert_same(tmp_path, whole)


def test_auto_refuses_a_checkpoint_of_another_config(setting, tmp_path):
    ran(tmp_path, *setting, "rounds=2")
    with pytest.raises(CheckpointError, match="these differ: local, rounds"):
        ran(tmp_path, *setting, "rounds=3", "local.lr=0.5", "resume=auto")


# what may be resumed


def test_resuming_a_finished_run_changes_nothing(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    resumed(tmp_path / "run")
    assert_same(tmp_path / "run", whole)
    for name in FILES:
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()


def test_a_run_keeps_its_config_when_resumed(whole):
    with pytest.raises(CheckpointError) as caught:
        resumed(whole, "rounds=100", "local.lr=0.5", "executor=serial")
    assert f"{whole} was run with another config; these differ: local, rounds." in str(caught.value)
    assert f"fedkd resume={whole} (only device, executor, logger, checkpoint may change)" in str(caught.value)
    with pytest.raises(CheckpointError, match="these differ: experiment"):
        resumed(whole, "+experiment=quick_compare")


def test_what_cannot_move_a_result_may_change_on_the_way(whole, setting, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stopping(patch, "fedkd.engine.Federation", 5)
        with pytest.raises(Stop):
            ran(tmp_path, *setting)
    resumed(tmp_path, "logger=quiet", "checkpoint.every=1")
    assert_same(tmp_path, whole)


def test_changing_one_value_of_a_part_keeps_the_parts_others():
    own = {"logger": {"name": "none", "console": True, "wandb": {"mode": "online"}}, "rounds": 3}
    adopt(own, {"logger": {"name": "wandb", "console": False, "wandb": {"mode": "offline"}}}, "logger.console")
    assert own == {"logger": {"name": "none", "console": False, "wandb": {"mode": "online"}}, "rounds": 3}
    adopt(own, {"logger": {"name": "quiet"}}, "logger")
    assert own == {"logger": {"name": "quiet"}, "rounds": 3}


def test_a_config_edited_by_hand_is_held_against_the_checkpoint(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(CheckpointError, match="these differ: seed"):
        resumed(tmp_path / "run")


def test_a_new_run_in_an_old_directory_leaves_nothing_of_the_old_one(setting, tmp_path, monkeypatch):
    ran(tmp_path, *setting, "rounds=4")
    stopping(monkeypatch, "fedkd.engine.evaluate", 1)
    with pytest.raises(Stop):
        ran(tmp_path, *setting, "rounds=6", "seed=1")
    assert not (tmp_path / "summary.json").exists()
    assert metrics(tmp_path) == []
    assert saved(tmp_path)["config"]["seed"] == 1
    assert "seed: 1" in (tmp_path / "config.yaml").read_text()


def test_a_record_cut_short_since_the_checkpoint_is_told(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    os.truncate(tmp_path / "run" / "metrics.jsonl", 10)
    with pytest.raises(CheckpointError, match="has 10 bytes, but had"):
        resumed(tmp_path / "run")


# what is no checkpoint


def saved(directory):
    return torch.load(directory / "checkpoint" / "state.pt", weights_only=True)["content"]


def test_a_checkpoint_holds_no_code(whole):
    content = saved(whole)
    assert content["round"] == content["logged"] == ROUNDS
    assert content["config"]["algorithm"]["name"] == "scaffold"


def damaged(path: Path):
    raw = bytearray(path.read_bytes())
    at = raw.index(torch.load(path, weights_only=True)["content"]["server"][1][1]["head.weight"].numpy().tobytes())
    raw[at] ^= 1  # one bit of a weight
    path.write_bytes(raw)


class Code:
    """What a checkpoint must not bring along."""


FOREIGN = {
    "one flipped bit": (damaged, "is damaged or not a checkpoint"),
    "half a file": (lambda path: os.truncate(path, path.stat().st_size // 2), "is damaged or not a checkpoint"),
    "an empty file": (lambda path: path.write_bytes(b""), "is damaged or not a checkpoint"),
    "no torch file": (lambda path: path.write_text("round: 3"), "is damaged or not a checkpoint"),
    "pickled code": (lambda path: torch.save({"fedkd": 1, "content": Code()}, path), "is damaged or not a checkpoint"),
    "another tool's file": (lambda path: torch.save({"state_dict": {}}, path), "was not written by fedkd"),
    "a lone tensor": (lambda path: torch.save(torch.zeros(3), path), "was not written by fedkd"),
    "another format": (
        lambda path: torch.save({"fedkd": 99, "version": "9.9", "content": {}}, path),
        r"has checkpoint format 99, written by fedkd 9.9; this is fedkd .*, which reads format 1",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_checkpoint_is_told_and_left_alone(kind, whole, tmp_path):
    spoil, sentence = FOREIGN[kind]
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    spoil(directory / "checkpoint" / "state.pt")
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=sentence):
        resumed(directory)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_a_directory_without_a_run_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="there is no run in that directory"):
        resumed(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(CheckpointError, match=r"holds no checkpoint \(checkpoint/state.pt is missing\)"):
        checkpoint.load(tmp_path, None)


def test_a_dry_run_of_a_run_s_own_config_leaves_it_alone(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    assert resumed(tmp_path / "run", "dry_run=true") is None
    assert_same(tmp_path / "run", whole)
