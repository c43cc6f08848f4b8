"""What a table's definition makes of its rows and columns."""

from dataclasses import replace

import pytest

from fedkd.core.errors import DataError
from fedkd.table import Cell, Gauge, Line, PaperTable, Printed


def table(**values) -> PaperTable:
    """Two methods, one of them judged in two ways; a split in two columns and what it costs."""
    row = {
        "fedavg": Line("FedAvg", ["algorithm=fedavg"]),
        "ditto_gm": Line("Ditto (GM)", ["algorithm=ditto"], metric="acc/shared/mean"),
        "ditto_pm": Line("Ditto (PM)", ["algorithm=ditto"]),
    }
    column = {
        "iid": Line("IID", ["partition=iid"], pick="best"),
        "cost": Line("Cost", ["partition=iid"], metric="comm/broadcast/params", unit="1e7"),
        "ds1": Line("DS-1", ["partition=ds1", "local.lr=0.1"]),
    }
    return PaperTable("paper/table1", row=row, column=column, **values)


def folders(table: PaperTable) -> list[str]:
    return [job.folder for job in table.jobs()]


def test_rows_times_columns_times_seeds_are_jobs_and_equal_overrides_are_one():
    assert folders(table(seeds=[0, 7])) == [
        f"{row}/{column}/seed={seed}" for seed in (0, 7) for row in ("fedavg", "ditto_gm") for column in ("iid", "ds1")
    ]


def test_the_overrides_of_a_cell_are_those_of_its_column_its_row_itself_and_the_scale():
    whole = table(cell={"fedavg": {"ds1": ["rounds=7"]}}, scales={"smoke": ["rounds=2"]}, scale="smoke")
    jobs = {job.folder: job.overrides for job in whole.jobs()}
    assert jobs["fedavg/ds1/seed=0"] == ("partition=ds1", "local.lr=0.1", "algorithm=fedavg", "rounds=7", "rounds=2")
    assert jobs["fedavg/iid/seed=0"] == ("partition=iid", "algorithm=fedavg", "rounds=2")


def test_a_scale_can_shrink_a_row_further_which_then_has_a_run_of_its_own():
    whole = table(scales={"smoke": ["rounds=2"]})
    whole.row["ditto_pm"].scales["smoke"] = ["rounds=1"]
    assert "ditto_pm/iid/seed=0" not in folders(whole)
    whole = replace(whole, scale="smoke")
    jobs = {job.folder: job.overrides for job in whole.jobs()}
    assert jobs["ditto_gm/iid/seed=0"] == ("partition=iid", "algorithm=ditto", "rounds=2")
    assert jobs["ditto_pm/iid/seed=0"] == ("partition=iid", "algorithm=ditto", "rounds=2", "rounds=1")


def test_a_cell_of_its_own_overrides_has_a_run_of_its_own():
    assert "ditto_pm/ds1/seed=0" in folders(table(cell={"ditto_pm": {"ds1": ["rounds=7"]}}))


@pytest.mark.parametrize(("rows", "columns"), [(["ditto_pm"], ["cost"]), (["ditto_gm", "ditto_pm"], ["iid", "cost"])])
def test_a_run_s_place_does_not_depend_on_what_is_asked_for(rows, columns):
    assert folders(table(rows=rows, columns=columns)) == ["ditto_gm/iid/seed=0"]


def test_what_is_chosen_comes_in_the_table_s_order():
    chosen = table(rows=["ditto_pm", "fedavg"], columns=["ds1"]).chosen
    assert chosen == [Cell("fedavg", "ds1"), Cell("ditto_pm", "ds1")]


def test_a_cell_is_measured_as_its_column_says_else_its_row_else_the_table():
    whole = table()
    assert whole.gauge(Cell("fedavg", "iid")) == Gauge("acc/personal/mean", "best", "percent")
    assert whole.gauge(Cell("ditto_gm", "ds1")) == Gauge("acc/shared/mean", "last", "percent")
    assert whole.gauge(Cell("ditto_gm", "cost")) == Gauge("comm/broadcast/params", "last", "1e7")


@pytest.mark.parametrize(
    ("unit", "one"), [("percent", 0.01), ("fraction", 1), ("million", 1e6), ("MB", 1e6), ("1e7", 1e7), ("2.5", 2.5)]
)
def test_a_unit_is_a_name_or_a_number(unit, one):
    assert Gauge("", "last", unit).scale == one
    assert table(unit=unit).problems() == []


def test_what_is_printed_is_a_number_a_number_with_its_spread_or_nothing():
    whole = table(paper={"fedavg": {"iid": 90.5, "ds1": [80.0, 0.5], "cost": None}})
    assert whole.printed(Cell("fedavg", "iid")) == Printed(90.5, None)
    assert whole.printed(Cell("fedavg", "ds1")) == Printed(80.0, 0.5)
    assert whole.printed(Cell("fedavg", "cost")) is None
    assert whole.printed(Cell("ditto_gm", "iid")) is None


def test_names_that_do_not_exist_are_told_together_with_the_near_ones():
    wrong = table(
        rows=["fedavgg"],
        columns=["iidd"],
        scale="smok",
        scales={"smoke": []},
        pick="lats",
        unit="percnt",
        seeds=[],
        paper={"dito_pm": {}, "fedavg": {"ds2": 1.0}},
        cell={"fedavg": {"iit": []}},
    )
    wrong.row["fedavg"].scales["smkoe"] = []
    told = "\n".join(wrong.problems())
    for typo, meant in {"fedavgg": "fedavg", "iidd": "iid", "smok": "smoke", "lats": "last", "percnt": "percent",
                        "dito_pm": "ditto_pm", "ds2": "ds1", "iit": "iid", "smkoe": "smoke"}.items():  # fmt: skip
        assert f"={typo} does not exist. Did you mean {meant}" in told
    assert "table.seeds=[] leaves nothing to run" in told
    assert len(wrong.problems()) == 10
    assert table(rows=["fedavg"], columns=["ds1"], scale="paper").problems() == []


def test_a_saved_table_is_the_whole_of_it_again(tmp_path):
    whole = table(seeds=[0, 1], paper={"fedavg": {"iid": [90.5, 0.1]}}, departures=["α is not told."])
    part = table(seeds=[0, 1], paper=whole.paper, departures=whole.departures, rows=["fedavg"], part="a/b/seed=0")
    part.save(tmp_path)
    assert PaperTable.load(tmp_path) == whole


@pytest.mark.parametrize("text", ["row: [", "row: {a: {titel: A}}\ncolumn: {}", "[]", "name: x"])
def test_a_file_that_is_no_table_is_named(tmp_path, text):
    (tmp_path / "table.yaml").write_text(text)
    with pytest.raises(DataError, match=r"table\.yaml does not define a table"):
        PaperTable.load(tmp_path)
