"""A paper's table beside ours: every number of ours comes from a run's directory."""

import csv
import io
import json
import math
import random
import re
from pathlib import Path

import pytest
from paper_runs import COMMIT, write_run, write_table
from scipy.stats import kendalltau

from fedkd.report.cli import main
from fedkd.report.measured import Outcome
from fedkd.report.paper import compare, decimals, kendall
from fedkd.report.table import Stat
from fedkd.table import Cell


def printed(folder: Path, form: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(folder), "--format", form]) == 0
    return capsys.readouterr().out


# The numbers


def test_a_cell_is_the_mean_and_deviation_over_the_seeds_in_the_paper_s_unit(tmp_path: Path) -> None:
    write_table(tmp_path)
    results = compare(tmp_path).results
    local = results[Cell("local", "iid")]
    assert local.stat is not None
    assert local.stat.mean == pytest.approx(71.0)  # (70 + 72) / 2
    assert local.stat.std == pytest.approx(math.sqrt(2))  # √((1² + 1²) / 1)
    assert local.difference == pytest.approx(1.0)
    assert len(local.runs) == 2
    assert local.commits == [COMMIT]
    assert results[Cell("ditto_gm", "ds1")].stat == Stat(pytest.approx(60.0), None)
    assert results[Cell("ditto_gm", "cost")].stat == Stat(pytest.approx(1.0), None)  # 2 rounds of 500, in thousands


def test_rows_that_share_a_run_read_their_own_metric_off_it(tmp_path: Path) -> None:
    write_table(tmp_path)
    shown = compare(tmp_path)
    means = {cell: result.stat.mean for cell, result in shown.results.items() if result.stat}
    assert means[Cell("ditto_gm", "iid")] == pytest.approx(80)
    assert means[Cell("ditto_pm", "iid")] == pytest.approx(85)
    assert {r.cell for r in shown.runs[Cell("ditto_gm", "iid")]} == {
        *(Cell(row, column) for row in ("ditto_gm", "ditto_pm") for column in ("iid", "cost")),
    }


def test_what_was_not_run_is_not_shown_but_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_table(tmp_path)
    table.row["apfl"] = table.row["local"].__class__("APFL", ["algorithm=apfl"])
    table.column["ds2"] = table.row["local"].__class__("DS-2", ["partition=ds2"])
    table.save(tmp_path)
    text = printed(tmp_path, "text", capsys)
    assert "APFL" not in text
    assert "Not run: rows apfl." in text
    assert "Not run: columns ds2." in text


def test_unfinished_runs_and_those_set_aside_count_for_nothing(tmp_path: Path) -> None:
    write_table(tmp_path)
    write_run(tmp_path / "local/iid/seed=2", 0.1)
    (tmp_path / "local/iid/seed=2/summary.json").unlink()
    write_run(tmp_path / "local/iid/seed=0~1", 0.1)
    assert len(compare(tmp_path).results[Cell("local", "iid")].runs) == 2


def test_a_table_without_any_run_shows_the_paper_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path / "whole").save(tmp_path / "empty")
    text = printed(tmp_path / "empty", "text", capsys)
    assert "90.25 ± 0.50" in text
    assert "Kendall" not in text


@pytest.mark.parametrize(
    ("a", "b", "tau"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 4 / 6),  # 5 pairs agree, 1 does not: (5 − 1) / 6
        ([1, 1, 2], [1, 2, 3], 2 / math.sqrt(2 * 3)),  # one pair is tied in a: (2 − 0) / √(2 · 3)
        ([1, 1], [1, 2], None),
    ],
)
def test_kendall_s_tau_of_few_numbers(a: list[float], b: list[float], tau: float | None) -> None:
    assert kendall(a, b) == (None if tau is None else pytest.approx(tau))


def test_kendall_s_tau_is_scipy_s() -> None:
    rng = random.Random(0)
    for _ in range(50):
        a, b = ([rng.randint(0, 5) for _ in range(9)] for _ in range(2))
        assert kendall(a, b) == pytest.approx(kendalltau(a, b).statistic)


def test_rank_agreement_is_told_for_each_column(tmp_path: Path) -> None:
    write_table(tmp_path)
    shown = compare(tmp_path)
    assert shown.tau("iid") == 1.0  # 70 < 80.5 < 82 and 71 < 80 < 85
    assert shown.tau("ds1") == pytest.approx(1.0)  # 60.5 < 90.25 < 95.5 and 60 < 90 < 96
    assert shown.tau("cost") is None  # all alike


def test_the_best_of_ours_stands_out_where_more_is_better(tmp_path: Path) -> None:
    write_table(tmp_path)
    shown = compare(tmp_path)
    assert shown.best("iid") == shown.best("ds1") == {"ditto_pm"}
    assert shown.best("cost") == set()


def test_a_column_has_as_many_decimals_as_the_paper_prints() -> None:
    assert [decimals(number) for number in (93.96, 92.0, 92, 0.6766, 2150, 4.4)] == [2, 0, 0, 4, 0, 1]


# What can be measured


def test_a_run_s_numbers_go_by_name(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 0.8, 0.6, **{"best/acc/personal/mean": 0.9, "best/round": 7})
    run = Outcome(tmp_path / "run")
    assert run.number("acc/personal/mean") == 0.8
    assert run.number("acc/personal/mean", "best") == 0.9
    assert run.number("acc/shared/mean", "best") == 0.6  # no best one is told: the last
    assert run.number("best/round") == 7
    assert run.number("time/total") == 60
    assert run.number("comm/broadcast/params") == 1000
    assert run.number("params/model") == 650
    assert run.number("params/held") == 1300
    assert run.number("clients/acc_personal/2") == pytest.approx(0.82)
    assert run.number("clients/acc_shared/mean") == pytest.approx(0.6)
    assert run.number("clients/acc_personal/std") == pytest.approx(0.02)  # √((0.02² + 0 + 0.02²) / 2)
    assert run.number("clients/acc_personal/worst") == pytest.approx(0.78)
    for nothing in ("acc/shared/global", "clients/acc_personal/3", "clients/acc/mean", "view/grid/0", "loss"):
        assert run.number(nothing) is None


def test_a_view_s_numbers_are_those_of_its_last_line(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 0.8)
    lines = [
        {"round": 1, "grid": {"values": [[0, 0]]}},
        {"round": 2, "grid": {"values": [[1, 2]]}, "a/b": {"values": [5]}},
    ]
    (tmp_path / "run" / "views.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Outcome(tmp_path / "run")
    assert run.number("view/grid/0/1") == 2
    assert run.number("view/a/b/0") == 5
    assert run.number("view/grid/0/2") is None
    assert run.number("view/grid") is None


def test_a_plan_alone_gives_what_is_sent_and_how_large_the_models_are(tmp_path: Path) -> None:
    totals = {"unicast": {"params": 20, "bytes": 80}, "broadcast": {"params": 11, "bytes": 44}}
    models = {"small": {"params": 3, "held": 9, "clients": 1}, "large": {"params": 5, "held": 15, "clients": 1}}
    plan = {"comm": {"total": totals}, "models": models, "versions": {"commit": COMMIT}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run = Outcome(tmp_path)
    numbers = [
        run.number(name) for name in ("comm/total/params", "comm/broadcast/bytes", "params/model", "params/held")
    ]
    assert numbers == [20, 44, 5, 15]
    assert run.number("acc/personal/mean") is None
    assert run.commit == COMMIT


def test_a_run_s_own_ledger_overrules_its_plan(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 0.8)
    plan = {"comm": {"total": {"unicast": {"params": 7}}}, "models": {"x": {"params": 1, "held": 1}}}
    (tmp_path / "run" / "plan.json").write_text(json.dumps(plan))
    assert Outcome(tmp_path / "run").number("comm/total/params") == 2000


# The formats


def test_the_text_has_paper_ours_and_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path)
    text = printed(tmp_path, "text", capsys)
    (line,) = (line for line in text.splitlines() if line.startswith("Local"))
    expected = ["70.0", "71.0 ± 1.4", "+1.0", "90.25 ± 0.50", "90.00 ± 0.00", "−0.25", "–", "0", "–"]
    assert re.split(r" {2,}", line)[1:] == expected
    assert "* 85.0 ± 0.0" in text
    assert "Author et al., 2026, Table 1." in text
    assert "over 1 to 2 seeds" in text
    assert "Departure: The batch size is not told." in text


def test_every_format_is_written_beside_the_runs_or_where_asked(tmp_path: Path) -> None:
    write_table(tmp_path / "table")
    files = {"table.txt", "table.md", "table.csv", "table.tex", "report.html"}
    assert main([str(tmp_path / "table")]) == 0
    assert files <= {path.name for path in (tmp_path / "table").iterdir()}
    assert main([str(tmp_path / "table"), "--out", str(tmp_path / "out")]) == 0
    assert files == {path.name for path in (tmp_path / "out").iterdir()}
    for name in files:
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "table" / name).read_text()


def test_the_csv_has_a_line_for_every_cell_with_seeds_commits_and_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(tmp_path)
    rows = list(csv.DictReader(io.StringIO(printed(tmp_path, "csv", capsys))))
    assert len(rows) == 9
    (cell,) = (row for row in rows if (row["row"], row["column"]) == ("ditto_pm", "ds1"))
    assert (cell["metric"], cell["pick"], cell["unit"]) == ("acc/personal/mean", "last", "percent")
    assert (float(cell["paper"]), float(cell["mean"]), cell["std"]) == (95.5, 96.0, "")
    assert float(cell["difference"]) == pytest.approx(0.5)
    assert (cell["seeds"], cell["commits"]) == ("1", COMMIT)
    assert (float(cell["params/model"]), float(cell["comm/total/params"])) == (650, 2000)


def test_the_costs_tell_seeds_and_commits(tmp_path: Path) -> None:
    write_table(tmp_path)
    assert main([str(tmp_path)]) == 0
    costs = (tmp_path / "table.txt").read_text().partition("Costs and origins")[2]
    assert "Ditto (GM) / Ditto (PM)" in costs
    (line,) = (line for line in costs.splitlines() if "DS-1" in line and "Ditto" in line)
    assert re.split(r" {2,}", line)[1:] == ["DS-1", "650", "2.00 k", "1.00 k", "1 min 00 s", "0", COMMIT[:10]]


def test_markdown_and_latex_group_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path)
    markdown = printed(tmp_path, "markdown", capsys)
    assert "|  | IID<br>paper | ours | Δ | DS-1<br>paper | ours | Δ | Cost<br>paper | ours | Δ |" in markdown
    assert "**85.0 ± 0.0**" in markdown
    latex = printed(tmp_path, "latex", capsys)
    assert r"\multicolumn{3}{c}{IID} & \multicolumn{3}{c}{DS-1} & \multicolumn{3}{c}{Cost} \\" in latex
    assert r"\textbf{85.0 $\pm$ 0.0}" in latex
    assert r"$\Delta$" in latex


def test_a_reduced_scale_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_table(tmp_path)
    table.scale, table.scales = "smoke", {"smoke": ["rounds=2", "clients=8"]}
    table.row["local"].scales["smoke"] = ["rounds=1"]
    table.save(tmp_path)
    assert "Reduced scale, smoke: rounds=2 clients=8; Local: rounds=1." in printed(tmp_path, "text", capsys)


def test_a_table_without_a_paper_shows_ours_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_table(tmp_path)
    table.paper = {}
    table.save(tmp_path)
    text = printed(tmp_path, "text", capsys)
    header, _, local, *_ = text.split("\n")[2:]
    assert re.split(r"\s{2,}", header.strip()) == ["IID", "DS-1", "Cost"]
    assert "71.0" in local
    assert "Δ" not in text
