"""Progress over runs, read off their directories."""

import json

from fedkd.watch import Watch, Watched, rounds_in


def directory(path, rounds=0, *files):
    path.mkdir()
    lines = [json.dumps({"round": number, "acc": 0.5}) for number in range(1, rounds + 1)]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for file in files:
        (path / file).touch()
    return path


def watch(tmp_path):
    runs = {
        "done": Watched(directory(tmp_path / "done", 10, "summary.json"), 10, "summary.json"),
        "planned": Watched(directory(tmp_path / "planned", 0, "plan.json"), 1, "plan.json"),
        "failed": Watched(directory(tmp_path / "failed", 3, "error.txt"), 10, "summary.json"),
        "running": Watched(directory(tmp_path / "running", 4), 10, "summary.json"),
        "waiting": Watched(tmp_path / "nowhere", 10, "summary.json"),
    }
    return Watch(runs, "error.txt")


def test_a_look_tells_what_has_become_of_each_run(tmp_path):
    seen = watch(tmp_path).look()
    assert seen.done == ["done", "planned"]
    assert seen.failed == ["failed"]
    assert seen.running == ["running"]
    assert seen.over == 3
    assert seen.rounds == 10 + 1 + 10 + 4  # a failed run is over, however far it came


def test_the_time_left_goes_by_the_rounds_since_the_start(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("fedkd.watch.time.monotonic", lambda: clock[0])
    seeing = watch(tmp_path)
    assert seeing.left(seeing.look()) == ""  # nothing has happened yet
    directory(tmp_path / "nowhere", 4)
    clock[0] += 60
    assert seeing.left(seeing.look()) == "0:03:00 left"  # 4 rounds in 60 s; 6 + 6 to go
    for name in ("running", "nowhere"):
        (tmp_path / name / "summary.json").touch()
    assert seeing.left(seeing.look()) == ""


def test_where_nobody_watches_every_run_that_is_over_is_a_line(tmp_path, capsys):
    with watch(tmp_path).shown(live=True):
        directory(tmp_path / "nowhere", 10, "summary.json")
    told = capsys.readouterr().out
    for number, line in enumerate(("done: done", "planned: done", "waiting: done", "failed: failed"), start=1):
        assert f"[{number}/5] {line}" in told
    assert "running" not in told


def test_a_line_in_the_making_is_not_a_round(tmp_path):
    path = directory(tmp_path / "run", 3) / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"round": 4, "ac')
    assert rounds_in(path) == 3
    path.write_text('{"round": 1')
    assert rounds_in(path) == rounds_in(tmp_path / "missing") == 0
