"""Weights & Biases, offline and against a small stand-in for its server; no test leaves this machine."""

import json
import os
import pty
import struct
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import fedkd
from fedkd.logger import Run, WandbConfig
from fedkd.logger.wandb import Wandb

KEY = "0123456789" * 4

# One run of three rounds; its arguments: directory, the first round, the resumed state, how it ends.
RUN = """
import json, sys
from pathlib import Path
from fedkd.logger import LoggerConfig, Run, WandbConfig, make
from fedkd.logger import wandb
directory, first, resumed, end = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
wandb.FINISH_TIMEOUT = 2
loggers = make(LoggerConfig())
loggers.start(Run(directory, {"seed": 0}, 3, first - 1, resumed, None, "name", "fedavg", []))
for number in range(first, 4):
    loggers.log({"round": number, "acc/personal/mean": number / 10, "comm/total/params": 100 * number})
(directory / "state.json").write_text(json.dumps(loggers.state()))
if end == "stop":
    loggers.stop("interrupted")
else:
    loggers.finish({"last/round": 3, "last/acc/personal/mean": 0.3, "communication": []})
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No login, and no folder of the user's own."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("PYTHONPATH", str(Path(fedkd.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def server(environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator["Server"]:
    """A login at a server that knows just enough of W&B's protocol, and keeps what it was told."""
    with Server(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield server
        server.shutdown()


class Server(ThreadingHTTPServer):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.queries, self.stream, self.refuses = list[dict[str, Any]](), list[dict[str, Any]](), False

    def history(self) -> list[dict[str, Any]]:
        files = [part.get("files", {}).get("wandb-history.jsonl", {}) for part in self.stream]
        return [json.loads(line) for file in files for line in file.get("content", [])]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path.endswith("file_stream"):
            self.server.stream.append(json.loads(body))
        self.reply(self.graphql(json.loads(body)) if self.path == "/graphql" else {})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.reply({})

    def graphql(self, query: dict[str, Any]) -> dict[str, Any]:
        self.server.queries.append(query)
        name, variables = query.get("operationName") or "", query.get("variables") or {}
        project = {"id": "1", "name": "fedkd", "entity": {"id": "1", "name": "me"}}
        if name == "Viewer":
            who = {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
            return {"data": {"viewer": who}}
        if name == "UpsertBucket" and self.server.refuses:
            return {"errors": [{"message": "permission denied"}], "data": None}
        if name == "UpsertBucket":
            bucket = {"id": "1", "name": variables["name"], "displayName": "name", "config": None, "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if name == "CreateRunFiles":
            place = f"http://127.0.0.1:{self.server.server_port}/"
            files = [{"name": name, "uploadUrl": place + name} for name in variables["files"]]
            return {"data": {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}}
        if name == "RunResumeStatus":
            history = self.server.history()
            counts = {"historyLineCount": len(history), "eventsLineCount": 0, "logLineCount": 0}
            tails = {"historyTail": json.dumps([json.dumps(history[-1])]), "eventsTail": "[]"}
            known = {"summaryMetrics": "{}", "config": "{}", "wandbConfig": '{"t": 1}'}
            return {"data": {"model": {**project, "bucket": {"id": "1", **counts, **tails, **known}}}}
        return {"data": {}}

    def reply(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def play(
    directory: Path,
    first: int = 1,
    resumed: Any = None,
    end: str = "finish",
    stdin: int = subprocess.DEVNULL,
) -> str:
    """Run RUN in a process of its own, and return what it printed."""
    directory.mkdir(exist_ok=True)
    arguments = [str(directory), str(first), json.dumps(resumed or {}), end]
    process = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return process.stdout


def records(directory: Path) -> list[Any]:
    """The protobuf records of the one offline run: chunks of a LevelDB log in blocks of 32 KiB, after a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    data, at, part, found = path.read_bytes(), 7, b"", []
    while at < len(data):
        if (room := -at % 2**15) and room < 7:
            at += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            found.append(Record.FromString(part))
            part = b""
    return found


def test_an_offline_run_holds_config_metrics_tables_pictures_and_summary(
    environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib.image
    import numpy as np
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("partition", "curves"):
        matplotlib.image.imsave(tmp_path / f"{name}.png", np.zeros((4, 4, 3)))
    (tmp_path / "clients.csv").write_text("client,architecture,acc_personal,acc_shared\n0,cnn,0.5,\n1,dnn,0.25,\n")
    kinds = [{"way": "up", "what": "logits", "params": 200, "bytes": 800}]
    logger = Wandb(WandbConfig(tags=["mine"]), say=False)
    try:
        logger.start(Run(tmp_path, {"local": {"lr": 0.1}}, 2, 0, {"id": "same"}, "sweep", "name", "fedmd", ["digits"]))
        for number in (1, 2):
            logger.log({"round": number, "acc/personal/mean": number / 3, "comm/total/params": 100 * number})
        assert logger.state() == {"id": "same"}
        logger.finish({"best/acc/personal/mean": 2 / 3, "communication": kinds})
    finally:
        wandb.teardown()

    found = records(tmp_path)
    (run,) = (record.run for record in found if record.HasField("run"))
    assert (run.run_id, run.project, run.display_name, run.run_group) == ("same", "fedkd", "name", "sweep")
    assert (run.job_type, sorted(run.tags)) == ("fedmd", ["digits", "mine"])
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["local"] == {"lr": 0.1}

    axes = {record.metric.glob_name: record.metric.step_metric for record in found if record.HasField("metric")}
    assert axes["acc/*"] == axes["loss/*"] == axes["comm/*"] == axes["time/*"] == "round"
    assert axes["acc_by_comm/*"] == "comm/total/params"

    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    assert [row.get("round") for row in rows] == [1, 2, None]
    assert [row["_step"] for row in rows[:2]] == [1, 2]
    assert rows[1]["acc/personal/mean"] == rows[1]["acc_by_comm/personal"] == 2 / 3
    assert rows[1]["comm/total/params"] == 200
    assert "acc_by_comm/shared" not in rows[1]
    assert {"partition", "curves", "clients", "communication"} <= {name.partition("/")[0] for name in rows[2]}

    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/clients*.json")
    assert json.loads(table.read_text())["data"] == [[0, "cnn", 0.5, None], [1, "dnn", 0.25, None]]
    kept = {item.key: item.value_json for record in found for item in record.summary.update}
    assert json.loads(kept["best/acc/personal/mean"]) == 2 / 3
    assert [record.exit.exit_code for record in found if record.HasField("exit")] == [0]


def test_without_a_login_the_run_is_offline_and_nobody_is_asked(environment: None, tmp_path: Path) -> None:
    told = play(tmp_path / "run")
    assert "wandb sync run/wandb/offline-run-" in told
    assert "no login found" in told


@pytest.mark.slow
def test_nobody_is_asked_in_a_terminal_either(environment: None, tmp_path: Path) -> None:
    master, terminal = pty.openpty()  # nobody will ever type here: a prompt would last until the timeout
    try:
        play(tmp_path / "run", stdin=terminal)
    finally:
        os.close(master)
        os.close(terminal)


def test_a_server_that_cannot_be_reached_makes_the_run_offline(
    environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_HTTP_TIMEOUT", "1")
    assert "127.0.0.1:9" in play(tmp_path / "run")
    assert [record.run.display_name for record in records(tmp_path / "run") if record.HasField("run")] == ["name"]


@pytest.mark.slow
def test_with_a_login_the_run_is_online_and_a_resumed_one_goes_on_in_it(server: Server, tmp_path: Path) -> None:
    assert server.server_address[0] in play(tmp_path / "run", end="stop")
    assert [row["round"] for row in server.history()] == [1, 2, 3]
    assert server.stream[-1]["exitcode"] == 1
    state = json.loads((tmp_path / "run" / "state.json").read_text())

    play(tmp_path / "run", first=2, resumed=state)  # killed after the checkpoint of round 1: does two rounds again
    (resume,) = (query for query in server.queries if query.get("operationName") == "RunResumeStatus")
    assert resume["variables"]["name"] == state["wandb"]["id"]
    assert {q["variables"]["name"] for q in server.queries if q.get("operationName") == "UpsertBucket"} == {
        state["wandb"]["id"]
    }
    assert [row["round"] for row in server.history() if "round" in row] == [1, 2, 3]
    assert server.stream[-1]["exitcode"] == 0


@pytest.mark.slow
def test_a_server_that_refuses_the_project_makes_the_run_offline_under_its_id(server: Server, tmp_path: Path) -> None:
    play(tmp_path / "run")
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    server.refuses = True
    assert "permission denied" in play(tmp_path / "run", resumed=state)
    (run,) = (record.run for record in records(tmp_path / "run") if record.HasField("run"))
    assert run.run_id == state["wandb"]["id"]
