"""The record, the console, and several loggers as one."""

import json
import math
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from fedkd.core.errors import CheckpointError
from fedkd.logger import LoggerConfig, Loggers, Run, WandbConfig, make
from fedkd.logger.base import INTERRUPTED
from fedkd.logger.console import Console, human, shown
from fedkd.logger.jsonl import JsonLines, read


def a_run(directory: Path, **changes: Any) -> Run:
    return Run(directory, {"seed": 0}, 4, 0, {}, None, "fedmd-digits-0", "fedmd", ["digits"])._replace(**changes)


def metrics(number: int, shared: bool = True, sent: int = 1_000_000) -> dict[str, float]:
    """A row as the engine logs it: accuracies grow with the rounds, `sent` numbers cross in each way and round."""
    models = ("personal", "shared") if shared else ("personal",)
    row: dict[str, float] = {"round": number}
    for model in models:
        row |= {f"acc/{model}/{kind}": number / 10 for kind in ("mean", "weighted")}
        row |= {f"acc/{model}/std": 0.0412, f"acc/{model}/worst": 0.25, f"loss/{model}/mean": 1 / number}
    if shared:
        row["acc/shared/global"] = 0.3
    for way, copies in {"up": 1, "down": 1, "total": 2, "broadcast": 1}.items():
        row |= {f"comm/{way}/params": copies * number * sent, f"comm/{way}/bytes": 4 * copies * number * sent}
    return row | {"time/round": 0.3, "time/train": 0.2, "time/eval": 0.1}


def summary(last: dict[str, float], best: dict[str, float]) -> dict[str, Any]:
    kinds = [
        {"way": way, "what": "logits", "params": last[f"comm/{way}/params"], "bytes": last[f"comm/{way}/bytes"]}
        for way in ("up", "down")
        if last[f"comm/{way}/params"]
    ]
    values = {f"last/{name}": value for name, value in last.items()}
    return values | {f"best/{name}": value for name, value in best.items()} | {"communication": kinds}


def play(logger: Any, run: Run, rounds: range, **changes: Any) -> None:
    logger.start(run)
    for number in rounds:
        row = metrics(number, **changes)
        logger.advance(number, {name: value for name, value in row.items() if name.startswith("comm/")})
        logger.log(row)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def shown_by(directory: Path, **changes: Any) -> str:
    """All that a whole run of four rounds puts on a console that is not a terminal."""
    file = StringIO()
    console = Console(file)
    play(console, a_run(directory), range(1, 5), **changes)
    console.finish(summary(metrics(4, **changes), metrics(3, **changes)))
    return file.getvalue()


# metrics.jsonl


@pytest.mark.parametrize("torn", [b"", b'{"round": 3}\n', b'{"round": 3}\n{"round": 4, "acc/pers'])
def test_a_killed_and_resumed_run_leaves_the_same_bytes_as_an_uninterrupted_one(tmp_path: Path, torn: bytes) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for directory in (whole, killed):
        directory.mkdir()
    play(JsonLines(), a_run(whole), range(1, 5))

    first = JsonLines()
    play(first, a_run(killed), range(1, 3))
    state = json.loads(json.dumps(first.state()))  # as through a checkpoint
    with (killed / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    play(JsonLines(), a_run(killed, start=2, resumed=state), range(3, 5))

    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_fresh_run_begins_with_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n')
    JsonLines().start(a_run(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_record_shorter_than_its_checkpoint_says_is_an_error_and_not_filled_with_zeros(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has 0 bytes, but had 10"):
        JsonLines().start(a_run(tmp_path, resumed={"metrics.jsonl": 10}))


def test_floats_come_back_to_the_last_digit_and_what_is_not_finite_as_null(tmp_path: Path) -> None:
    floats = {"third": 1 / 3, "tiny": 5e-324, "next": math.nextafter(0.1, 1), "large": 2**53 + 1, "nan": math.nan}
    logger = JsonLines()
    logger.start(a_run(tmp_path))
    logger.log({"round": 1, **floats, "infinite": -math.inf})
    assert read(tmp_path / "metrics.jsonl") == [{"round": 1, **floats, "nan": None, "infinite": None}]


def test_reading_leaves_out_a_half_written_last_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2')
    assert read(tmp_path / "metrics.jsonl") == [{"round": 1}]


# The console


def test_where_nobody_watches_every_evaluated_round_is_one_plain_line(tmp_path: Path) -> None:
    text = shown_by(tmp_path)
    assert "\x1b" not in text
    assert "\r" not in text
    lines = [line for line in text.splitlines() if line.startswith("round")]
    assert len(lines) == 4
    assert re.fullmatch(r"round 3/4  personal 30\.0%  shared 30\.0%  6 M sent  0:00:00 left", lines[2])
    assert lines[3] == "round 4/4  personal 40.0%  shared 40.0%  8 M sent"


def test_a_terminal_gets_a_bar_and_its_cursor_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    file = Terminal()
    console = Console(file)
    play(console, a_run(tmp_path), range(1, 5))
    console.finish(summary(metrics(4), metrics(3)))
    text = file.getvalue()
    last_bar = re.findall(r"round 4/4 .*", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))[-1].rstrip()
    assert re.fullmatch("round 4/4 ━+ personal 40.0%  shared 40.0%  8 M sent", last_bar)
    assert len(last_bar) <= 80
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_forced_colours_do_not_make_a_pipe_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[?25l" not in shown_by(tmp_path)  # no hidden cursor, hence no bar


def test_jobs_of_a_sweep_say_whose_line_it_is(tmp_path: Path) -> None:
    file = StringIO()
    play(Console(file), a_run(tmp_path, group="sweep"), range(1, 2))
    assert "\nfedmd-digits-0: round 1/4  " in file.getvalue()


def test_the_summary_has_all_parts_and_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    lines = [line.rstrip() for line in shown_by(tmp_path / "runs" / "a run").splitlines()]
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for part in (
        r"fedmd-digits-0: 4 rounds in 0:00:00",
        r"accuracy +round 4 +std +worst client +best +in round",
        r"personal +40\.00 % +4\.12 % +25\.00 % +30\.00 % +3",
        r"shared +40\.00 % +4\.12 % +25\.00 % +30\.00 %",
        r"shared, global +30\.00 % +30\.00 %",
        r"up +logits +4 M +16 MB",
        r"down +logits +4 M +16 MB",
        r"in all +8 M +32 MB",
        r"in all, each broadcast once +4 M +16 MB",
        r"files +runs/a run\n",
        r"next +fedkd-report 'runs/a run'\n +fedkd -m algorithm=fedavg,fedmd seed=0,1,2",
    ):
        assert re.search(part, text), part


def test_a_resumed_run_says_how_many_rounds_its_time_is_for(tmp_path: Path) -> None:
    file = StringIO()
    console = Console(file)
    play(console, a_run(tmp_path, start=3), range(4, 5))
    console.finish(summary(metrics(4), metrics(3)))
    assert "fedmd-digits-0: 4 rounds (1 since the resume) in 0:00:00" in file.getvalue()


def test_a_method_without_a_shared_model_shows_none(tmp_path: Path) -> None:
    text = shown_by(tmp_path, shared=False)
    assert "personal" in text
    assert "shared " not in text


def test_where_nothing_is_sent_the_summary_says_so(tmp_path: Path) -> None:
    text = shown_by(tmp_path, shared=False, sent=0)
    assert "communication: none" in text
    assert "broadcast" not in text


def test_an_interrupted_run_says_how_to_go_on_and_a_failed_one_does_not(tmp_path: Path) -> None:
    for why, hint in ((INTERRUPTED, True), ("training diverged", False)):
        file = StringIO()
        console = Console(file)
        play(console, a_run(tmp_path), range(1, 3))
        console.stop(why)
        text = file.getvalue()
        assert "after round 2 of 4" in text
        assert ("fedkd resume=" in text) == hint


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (999.6, "1 k"), (12_345_678, "12.3 M"), (999_999, "1 M"), (2.5e13, "25 T")],
)
def test_numbers_are_shown_with_three_digits(number: float, text: str) -> None:
    assert human(number) == text


def test_bytes_have_a_unit() -> None:
    assert human(49_382_400, "B") == "49.4 MB"
    assert human(12, "B") == "12 B"


def test_paths_are_shown_from_here_where_that_is_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "outputs") == "outputs"
    assert shown(Path("/x")) == "/x"


# Several as one


class Scripted:
    """Notes what it hears, and fails when told to."""

    def __init__(self, fails_on: str = "") -> None:
        self.fails_on, self.heard = fails_on, list[str]()

    def hear(self, what: str) -> None:
        self.heard.append(what)
        if what == self.fails_on:
            raise OSError("gone")

    def start(self, run: Run) -> None:
        self.run = run
        self.hear("start")

    def advance(self, number: int, ledger: Any) -> None:
        self.hear("advance")

    def log(self, metrics: Any) -> None:
        self.hear("log")

    def state(self) -> dict[str, Any]:
        self.hear("state")
        return {"heard": len(self.heard)}

    def finish(self, summary: Any) -> None:
        self.hear("finish")

    def stop(self, why: str) -> None:
        self.hear("stop")


@pytest.mark.parametrize("method", ["start", "advance", "log", "state", "finish"])
def test_a_logger_that_fails_is_dropped_with_one_warning(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Scripted(fails_on=method), Scripted()
    loggers = Loggers({"bad": bad, "good": good})
    play(loggers, a_run(tmp_path), range(1, 3))
    loggers.state()
    loggers.finish({})
    assert good.heard == ["start", "advance", "log", "advance", "log", "state", "finish"]
    assert bad.heard == good.heard[: good.heard.index(method) + 1]
    assert [record.getMessage() for record in caplog.records] == [
        "the run goes on without its bad logger: OSError('gone')"
    ]


def test_the_record_is_not_dropped_but_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        play(Loggers({"jsonl": Scripted(fails_on="log")}), a_run(tmp_path), range(1, 3))


def test_every_logger_gets_its_own_state_back(tmp_path: Path) -> None:
    loggers = {"one": Scripted(), "two": Scripted()}
    Loggers(loggers).start(a_run(tmp_path, resumed={"one": {"heard": 7}}))
    assert loggers["one"].run.resumed == {"heard": 7}
    assert loggers["two"].run.resumed == {}


# From the config


def test_the_config_chooses_the_loggers_and_the_record_is_always_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    off = WandbConfig(mode="disabled")
    assert list(make(LoggerConfig()).loggers) == ["jsonl", "wandb", "console"]
    assert list(make(LoggerConfig(wandb=off)).loggers) == ["jsonl", "console"]
    assert list(make(LoggerConfig(console=False, wandb=off)).loggers) == ["jsonl"]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert list(make(LoggerConfig(wandb=WandbConfig(mode="online"))).loggers) == ["jsonl", "console"]


def test_an_unknown_mode_is_a_problem_that_names_the_known_ones() -> None:
    assert LoggerConfig().problems() == []
    (problem,) = LoggerConfig(wandb=WandbConfig(mode="on")).problems()
    assert problem == "logger.wandb.mode=on does not exist; there are auto, online, offline, disabled."
