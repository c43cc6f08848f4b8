"""The presets of the papers' tables: what is printed is in them, once and right, and every cell is a run."""

import math
from dataclasses import replace
from functools import cache
from itertools import islice, zip_longest
from statistics import fmean, pstdev, stdev
from unittest.mock import patch

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from fedkd import build, schema
from fedkd.cli import CONF
from fedkd.report.measured import Outcome
from fedkd.run import run
from fedkd.table import Cell, PaperTable

# the numbers printed, counted by hand: rows x columns; PersFL has a row for each of ten users, their mean and deviation
PRINTED = {
    "perfed_ckt/table1": 18 * 4 - 2,  # local training communicates nothing: "-"
    "perfed_ckt/table2": 6 * 4 - 2,
    "ktpfl/table1": 6 * 6,
    "ktpfl/table2": 8 * 6,
    "ktpfl/table3": 3 * 8,
    "ktpfl/table4": 3 * 4,
    "ktpfl/table5": 3,
    "ktpfl/table6": 3 * 6,
    "cgpfl/table1": 9 * 5,
    "cgpfl/table2": 4 * (4 * 9),  # four blocks of four methods and nine values of lambda
    "fedhkd/table1": 27 * 8,  # without Pub Data, which is yes or no
    "fedhkd/table2": 9 * 8,
    "persfl/table2": 12 * 15,
    "persfl/table3": 12 * 15,
    "persfl/table4": 2 * 12 * 6,
    "persfl/table5": 10 * 12,
    "persfl/table6": 12 * 12,
    "persfl/table7": 5 * 6,
}
FIGURES = ("perfed_ckt/figure2", "ktpfl/figure5", "cgpfl/figure3")  # which print no numbers
SPREADS = {"perfed_ckt/table1": 18 * 2, "perfed_ckt/table2": 6 * 2, "ktpfl/table5": 3}
NAMES = sorted((*PRINTED, *FIGURES))
PERSFL = [f"persfl/table{number}" for number in (2, 3, 4, 6)]
METHODS = ("fedavg", "persfl", "fedper", "pfedme", "perfedavg")


@cache
def preset(name):
    return yaml.safe_load((CONF / "table" / f"{name}.yaml").read_text(encoding="utf-8"))["table"]


def printed(name):
    """Row -> column -> the value, without its spread."""
    return {
        row: {column: value[0] if isinstance(value, list) else value for column, value in line.items()}
        for row, line in preset(name)["paper"].items()
    }


def test_there_is_a_preset_for_each_of_the_18_tables_and_for_the_figures_with_data():
    found = {path.relative_to(CONF / "table").with_suffix("").as_posix() for path in CONF.glob("table/*/*.yaml")}
    assert len(PRINTED) == 18
    assert found == {*PRINTED, *FIGURES}
    assert (CONF / "experiment/perfed_ckt/figure1.yaml").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_begins_with_the_command_that_runs_it_and_bears_its_own_name(name):
    package, command, about, *_ = (CONF / "table" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert package == "# @package _global_"
    assert command == f"# fedkd -m +table={name}"
    number = name.rpartition("/")[2].replace("table", "Table ").replace("figure", "Figure ")
    assert f"{number}:" in about
    assert preset(name)["name"] == name
    assert preset(name)["reference"].endswith(number)


@pytest.mark.parametrize("name", PRINTED)
def test_a_table_holds_as_many_numbers_as_the_paper_prints(name):
    cells = [value for line in printed(name).values() for value in line.values()]
    users = [user for line in preset(name).get("users", {}).values() for column in line.values() for user in column]
    counted = [] if name == "persfl/table5" else cells  # it prints users alone; the cells are their means
    assert len([value for value in (*counted, *users) if value is not None]) == PRINTED[name]
    spreads = [value for line in preset(name)["paper"].values() for value in line.values() if isinstance(value, list)]
    assert len(spreads) == SPREADS.get(name, 0)
    assert all(len(pair) == 2 for pair in spreads)


@pytest.mark.parametrize("name", PRINTED)
def test_every_row_has_a_value_or_an_explicit_null_for_every_column(name):
    table = preset(name)
    assert list(table["paper"]) == list(table["row"])
    assert all(list(line) == list(table["column"]) for line in table["paper"].values())


@pytest.mark.parametrize("name", PRINTED)
def test_nulls_stand_where_local_training_has_no_cost(name):
    nulls = {(row, column) for row, line in printed(name).items() for column, value in line.items() if value is None}
    costs = {("local", "cost_10"), ("local", "cost_15")}
    assert nulls == (costs if name.startswith("perfed_ckt") else set())


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_prints_nothing(name):
    assert preset(name)["paper"] == {}


@pytest.mark.parametrize("name", PERSFL)
def test_the_average_and_deviation_rows_of_persfl_follow_from_its_users(name):
    table, cells = preset(name), printed(name)
    sums = [(cells[row][column], cells[row][f"{column}_std"], users)
            for row, line in table["users"].items() for column, users in line.items()]  # fmt: skip
    assert len(sums) == {"persfl/table2": 15, "persfl/table3": 15}.get(name, 12)
    for average, deviation, users in sums:
        assert len(users) == 10
        assert fmean(users) == pytest.approx(average, abs=0.1)  # of users that are rounded themselves
        assert stdev(users) == pytest.approx(deviation, abs=0.1)


def test_the_deviations_of_persfl_are_sample_deviations():
    """Over all 54 columns those come nearer to what is printed than the population's do."""
    pairs = [
        (preset(name)["users"][row][column], deviation)
        for name in PERSFL
        for row, line in printed(name).items()
        for column, deviation in ((c.removesuffix("_std"), v) for c, v in line.items() if c.endswith("_std"))
    ]
    assert len(pairs) == 15 + 15 + 12 + 12
    sample, population = (sum(abs(of(users) - d) for users, d in pairs) for of in (stdev, pstdev))
    assert sample < population / 2


def test_the_cells_of_persfl_table_5_are_the_means_of_its_users():
    ((row, line),) = printed("persfl/table5").items()
    assert len(line) == 12
    for column, value in line.items():
        assert fmean(preset("persfl/table5")["users"][row][column]) == pytest.approx(value, abs=1e-9)


def test_every_user_of_persfl_table_5_is_a_mean_of_five_points_of_the_grid():
    """λ from five of {0, .25, .5, .75, 1}: multiples of .05. T from five of {1, 5, 25}: a + 5b + 25c, a + b + c = 5."""
    of_t = {round((a + 5 * b + 25 * (5 - a - b)) / 5, 1) for a in range(6) for b in range(6 - a)}
    for column, users in preset("persfl/table5")["users"]["persfl"].items():
        allowed = of_t if column.endswith("_t") else {round(0.05 * k, 2) for k in range(21)}
        assert set(users) <= allowed


def test_what_persfl_prints_in_several_tables_is_the_same_in_all():
    for dataset, name in (("cifar10", "persfl/table2"), ("mnist", "persfl/table3")):
        for split in ("ds1", "ds2", "ds3"):
            here = preset(name)["users"]["persfl"][split]
            assert here == preset("persfl/table4")["users"]["optimal"][f"{dataset}_{split}"]
            assert here == preset("persfl/table6")["users"]["persfl"][f"{dataset}_{split}"]


def test_fedpers_ds_2_column_equals_fedavgs_in_persfl_table_3_and_nowhere_else():
    users = {name: preset(name)["users"] for name in ("persfl/table2", "persfl/table3")}
    same = [(name, split) for name, rows in users.items() for split in ("ds1", "ds2", "ds3")
            if rows["fedper"][split] == rows["fedavg"][split]]  # fmt: skip
    assert same == [("persfl/table3", "ds2")]
    assert printed("persfl/table3")["fedper"]["ds2"] == printed("persfl/table3")["fedavg"]["ds2"]


def test_cgpfls_tables_differ_in_two_of_the_twelve_cells_they_share():
    first, second = printed("cgpfl/table1"), printed("cgpfl/table2")
    rows = {"pfedme": "pfedme", "cgpfl": "cgpfl_4", "cgpfl_heur": "cgpfl_heur"}
    columns = ("mnist_mlr", "mnist_dnn", "fmnist_mlr", "fmnist_dnn")
    shared = {(a, c): (first[a][c], second[b][f"{c}_12"]) for a, b in rows.items() for c in columns}
    assert len(shared) == 12
    assert {cell: values for cell, values in shared.items() if len({*values}) > 1} == {
        ("pfedme", "mnist_dnn"): (92.20, 92.21),
        ("cgpfl_heur", "fmnist_mlr"): (95.18, 95.36),
    }


def test_ktpfl_prints_two_numbers_for_the_one_setting_of_20_epochs_and_1_step():
    table = preset("ktpfl/table3")
    assert "overrides" not in {**table["column"]["e20"], **table["column"]["r1"]}
    assert [line["e20"] == line["r1"] for line in printed("ktpfl/table3").values()] == [False, False, True]


def test_fedhkd_prints_two_models_for_fedprox_and_three_for_moon():
    cells = printed("fedhkd/table1")
    for dataset in ("svhn", "cifar10", "cifar100"):
        one, two, three = (cells[row][f"{dataset}_params"] for row in ("fedavg", "fedprox", "moon"))
        assert (two, three) == pytest.approx((2 * one, 3 * one))


# every cell is a config that can be run


@cache
def table_of(name):
    made = OmegaConf.to_object(_composed(name).table)
    assert isinstance(made, PaperTable)
    return made


def config_of(name, cell, scale, *more):
    """The config of a cell's run. Hydra composes what is chosen from groups; single values are merged in: faster."""
    overrides = [*replace(table_of(name), scale=scale).overrides(cell), *more]
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    chosen = dict(override.split("=", 1) for override in overrides if override.partition("=")[0] in groups)
    values = [override for override in overrides if override.partition("=")[0] not in groups]
    whole = _composed(name, *sorted(f"{group}={option}" for group, option in chosen.items()))
    config = OmegaConf.merge(whole, OmegaConf.from_dotlist(values))
    assert schema.strangers(config) == []
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


@cache
def _composed(name, *chosen) -> DictConfig:
    _register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [f"+table={name}", *chosen])


@cache
def _register():
    schema.register(CONF)


def across(table):
    """Every row and every column at least once, in as few cells as can be."""
    pairs = zip_longest(table.row, table.column)
    rows, columns = list(table.row), list(table.column)
    return [
        Cell(row or rows[i % len(rows)], column or columns[i % len(columns)]) for i, (row, column) in enumerate(pairs)
    ]


def assert_runs(name, cells, scales):
    cells = list(cells)
    for scale in scales:
        for cell in cells:
            build.parts(config_of(name, cell, scale))  # raises with everything that is wrong


@pytest.mark.parametrize("name", NAMES)
def test_every_row_and_every_column_makes_a_config_that_can_be_run(name):
    table = table_of(name)
    assert table.problems() == []
    assert "smoke" in table.scales
    assert_runs(name, across(table), ("smoke",))
    assert_runs(name, islice(across(table), 4), ("paper",))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rows_and_columns_make_configs_that_can_be_run_at_every_scale(name):
    table = table_of(name)
    assert_runs(name, islice(across(table), 8), ("paper", *table.scales))


@pytest.mark.parametrize("name", ["persfl/table2", "persfl/table3", "persfl/table7"])
def test_persfls_methods_run_as_many_rounds_as_its_table_7_prints(name):
    datasets = {"persfl/table2": ("cifar10",), "persfl/table3": ("mnist",)}.get(name, ("cifar10", "mnist"))
    for cell, rounds in [
        (Cell(row, column), printed("persfl/table7")[row][f"{dataset}_{split}"])
        for row in METHODS
        for dataset in datasets
        for split in ("ds1", "ds2", "ds3")
        for column in ((f"{dataset}_{split}",) if name == "persfl/table7" else (split, f"{split}_std"))
    ]:
        (*_, last) = (o for o in table_of(name).overrides(cell) if o.startswith("rounds="))
        assert last == f"rounds={rounds}"


# columns that a dry run gives

# torch has no batching rule for one step of a pool on tensors without memory; the shape, all a plan needs, is right
SHAPES_ONLY = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """2,600 images of CIFAR's and SVHN's shape, by the number of classes: a plan looks at nothing but shapes."""
    files = {}
    for classes in (10, 100):
        pixels, labels = np.zeros((2600, 32, 32, 3), np.uint8), np.arange(2600) % classes
        files[classes] = tmp_path_factory.mktemp("images") / f"{classes}.npz"
        np.savez(
            files[classes], train_images=pixels, train_labels=labels, test_images=pixels[:100], test_labels=labels[:100]
        )
    return files


def planned(name, cell, file, directory):
    """What the table would show in this cell after a dry run of three rounds, extended to all."""
    config = config_of(name, cell, "paper", "dataset=npz", f"dataset.path={file}")
    assert config["dry_run"]
    with patch("fedkd.plan.PATIENCE", 0.0):
        run(config, directory)
    gauge = table_of(name).gauge(cell)
    return Outcome(directory).number(gauge.metric, gauge.pick) / gauge.scale


def digits(value, printed):
    """The value with as many significant digits as are printed: 2146.4 as 2150 (three), 4.42 as 4.4 (two)."""
    significant = len(f"{printed:g}".replace(".", "").rstrip("0")) if printed < 10 else 3
    return float(f"{value:.{significant}g}")


def sampled(rows, columns, *quick):
    """A plan of a large network takes many seconds: some rows of the first column always, with -m slow the others of
    that column and those rows of the other columns.
    """
    slow = [(row, columns[0]) for row in rows if row not in quick] + [(r, c) for r in quick for c in columns[1:]]
    return [*((row, columns[0]) for row in quick), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in slow)]


@SHAPES_ONLY
@pytest.mark.parametrize(
    ("row", "column"),
    sampled(
        [row for row in preset("perfed_ckt/table1")["row"] if row != "local"],
        ("cost_10", "cost_15"),
        *("fedavg", "scaffold", "perfed_ckt_1"),
    ),
)
def test_perfed_ckts_communication_cost_comes_out_of_a_dry_run_to_the_printed_digits(
    row, column, images, tmp_path, capsys
):
    paper = printed("perfed_ckt/table1")[row][column]
    measured = planned("perfed_ckt/table1", Cell(row, column), images[10], tmp_path)
    if row == "scaffold":  # sends a model and a control variate; the paper prints FedAvg's figure
        assert digits(measured, paper) == {"cost_10": 4290, "cost_15": 6240}[column]
    else:
        assert digits(measured, paper) == paper


@SHAPES_ONLY
@pytest.mark.slow
@pytest.mark.parametrize(("row", "column"), [("perfed_ckt_1", "cost_10"), ("perfed_ckt_4", "cost_15")])
def test_perfed_ckts_cost_does_not_depend_on_the_architectures(row, column, images, tmp_path, capsys):
    measured = planned("perfed_ckt/table2", Cell(row, column), images[10], tmp_path)
    assert digits(measured, paper := printed("perfed_ckt/table2")[row][column]) == paper


@SHAPES_ONLY
@pytest.mark.parametrize(
    ("row", "dataset"),
    sampled(
        [row for row in preset("fedhkd/table1")["row"] if row != "fedgen"],
        ("cifar10", "svhn", "cifar100"),
        *("fedavg", "fedprox"),
    ),
)
def test_fedhkds_parameters_come_out_of_a_dry_run_to_the_printed_digits(row, dataset, images, tmp_path, capsys):
    """The paper cuts one model's millions after three digits, and multiplies by the models a client holds."""
    file = images[100 if dataset == "cifar100" else 10]
    measured = planned("fedhkd/table1", Cell(row, f"{dataset}_params"), file, tmp_path)
    one = Outcome(tmp_path).number("params/model") / 1e6
    held = round(measured / one)
    assert math.floor(1000 * one) * held == round(1000 * printed("fedhkd/table1")[row][f"{dataset}_params"])


@SHAPES_ONLY
@pytest.mark.parametrize("dataset", ["cifar10", pytest.param("cifar100", marks=pytest.mark.slow)])
def test_fedgens_parameters_on_cifar_are_a_model_and_the_generator(dataset, images, tmp_path, capsys):
    file = images[100 if dataset == "cifar100" else 10]
    measured = planned("fedhkd/table1", Cell("fedgen", f"{dataset}_params"), file, tmp_path)
    assert math.floor(1000 * measured) == round(1000 * printed("fedhkd/table1")["fedgen"][f"{dataset}_params"])
