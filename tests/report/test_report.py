"""Many runs in one table: what is found, how it is grouped, which numbers stand there, and in four formats."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fedkd.core.errors import DataError
from fedkd.report.cli import main
from fedkd.report.collect import Run, collect, drop_reruns, find_runs
from fedkd.report.grid import escape_latex
from fedkd.report.grouping import group_runs
from fedkd.report.table import Stat, amount, build_table, duration, statistic


def config(algorithm: str = "fedavg", dataset: str = "digits", seed: int = 0, **overrides: Any) -> dict[str, Any]:
    """A config as a run resolves it; overrides are `algorithm__mu=0.1`."""
    made: dict[str, Any] = {
        "seed": seed,
        "rounds": 2,
        "algorithm": {"name": algorithm},
        "dataset": {"name": dataset, "classes": {"digits": 10, "cifar100": 100}[dataset]},
        "partition": {"name": "dirichlet", "alpha": 0.1, "seed": seed},
        "local": {"lr": 0.05},
        "logger": {"name": "wandb", "id": f"{algorithm}-{dataset}-{seed}"},
        "hydra": {"dir": f"outputs/{algorithm}/{seed}"},
    }
    for key, value in overrides.items():
        part, _, name = key.partition("__")
        if name:
            made.setdefault(part, {})[name] = value
        else:
            made[part] = value
    return made


def line(number: int, accuracy: float, **metrics: float) -> dict[str, float]:
    sent = {"comm/total/params": 1000 * number, "comm/broadcast/params": 600 * number}
    return {"round": number, "acc/personal/mean": accuracy, "acc/personal/std": 0.1, **sent, **metrics}


def write_run(
    path: Path, config: Mapping[str, Any], *accuracies: float, finished: bool = True, **metrics: float
) -> Path:
    """A run directory whose evaluated rounds 1, 2, ... reached `accuracies`."""
    path.mkdir(parents=True)
    lines = [line(number, accuracy, **metrics) for number, accuracy in enumerate(accuracies or (0.5,), start=1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    OmegaConf.save(OmegaConf.create(dict(config)), path / "config.yaml")
    if finished:
        (path / "summary.json").write_text(json.dumps({"time/total": 75.0, "rounds": len(lines)}))
    return path


def runs_in(*folders: Path) -> list[Run]:
    found = collect(folders)
    assert not found.unreadable
    return sorted(found.finished, key=lambda run: run.path)


def in_memory(**config: Any) -> Run:
    return Run(Path("run"), config, [line(1, 0.5)], {"rounds": 1}, commit=None, written=0.0)


def csv_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


# Finding and reading


def test_runs_are_found_at_any_depth_and_each_once(tmp_path: Path) -> None:
    shallow = write_run(tmp_path / "a", config())
    deep = write_run(tmp_path / "sweep" / "day" / "b", config())
    assert find_runs([tmp_path, tmp_path / "sweep", shallow]) == [shallow, deep]


def test_what_lies_inside_a_run_is_not_another_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", config())
    write_run(run / "checkpoint", config())
    assert find_runs([tmp_path]) == [run]


def test_missing_and_empty_folders_are_named_in_one_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(DataError) as error:
        find_runs([tmp_path / "nowhere", tmp_path / "empty", tmp_path / "file"])
    assert re.search(r"nowhere does not exist", str(error.value))
    assert re.search(r"empty holds no run", str(error.value))
    assert re.search(r"file is a file, not a directory", str(error.value))


def test_an_unfinished_run_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "done", config(seed=0), 0.8)
    write_run(tmp_path / "going", config(seed=1), 0.9, finished=False)
    assert main([str(tmp_path), "--format", "csv"]) == 0
    out, err = capsys.readouterr()
    assert csv_rows(out)[0]["seeds"] == "1"
    assert "unfinished" in err
    assert "going" in err


def test_unfinished_runs_can_be_taken_as_far_as_they_got(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = write_run(tmp_path / "killed", config(), 0.3, 0.4, finished=False)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "acc/pers')  # killed while writing
    write_run(tmp_path / "started", config(seed=1), finished=False)
    (tmp_path / "started" / "metrics.jsonl").write_text("")
    assert main([str(tmp_path), "--format", "csv", "--unfinished"]) == 0
    out, err = capsys.readouterr()
    (row,) = csv_rows(out)
    assert float(row["acc/personal/mean"]) == 0.4
    assert re.search(r"no round evaluated yet:\n.*started", err)


def test_a_sweep_with_nothing_finished_says_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "going", config(), finished=False)
    assert main([str(tmp_path)]) == 1
    assert "Try --unfinished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", "algorithm: [fedavg"),
        ("summary.json", "{"),
        ("summary.json", "[]"),
        ("metrics.jsonl", "{\n{}\n"),
        ("metrics.jsonl", ""),
    ],
)
def test_a_run_that_cannot_be_read_does_not_stop_the_others(tmp_path: Path, file: str, content: str) -> None:
    good = write_run(tmp_path / "good", config())
    bad = write_run(tmp_path / "bad", config())
    (bad / file).write_text(content)
    found = collect([tmp_path])
    assert [run.path for run in found.finished] == [good]
    assert file in found.unreadable[bad]


def test_of_a_run_and_its_rerun_the_newest_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, accuracy, hour in (("a_newer", 0.9, 2), ("b_older", 0.1, 1)):
        summary = write_run(tmp_path / name, config(), accuracy) / "summary.json"
        os.utime(summary, (3600 * hour, 3600 * hour))
    assert main([str(tmp_path), "--format", "csv"]) == 0
    out, err = capsys.readouterr()
    (row,) = csv_rows(out)
    assert (row["seeds"], float(row["acc/personal/mean"])) == ("1", 0.9)
    assert re.search(r"run again since.*:\n.*b_older\n", err)


def test_a_finished_run_counts_before_a_newer_unfinished_one(tmp_path: Path) -> None:
    done = write_run(tmp_path / "a_done", config())
    os.utime(done / "summary.json", (0, 0))
    write_run(tmp_path / "b_again", config(), finished=False)
    found = collect([tmp_path])
    kept, dropped = drop_reruns([*found.finished, *found.unfinished])
    assert [run.path.name for run in kept] == ["a_done"]
    assert [run.path.name for run in dropped] == ["b_again"]


# Grouping


def labels(runs: Sequence[Run], by: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    return sorted(group.task + group.method for group in group_runs(runs, by).groups)


def test_seeds_output_folders_and_logger_ids_do_not_split_a_group(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / str(seed), config(seed=seed, output_dir=f"outputs/{seed}", plugins=[f"p{seed}"]))
    (group,) = group_runs(runs_in(tmp_path)).groups
    assert len(group.runs) == 3
    assert group.method == ("fedavg",)


def test_a_seed_that_is_not_the_runs_own_splits_groups(tmp_path: Path) -> None:
    for split in range(2):
        write_run(tmp_path / str(split), config(seed=7, partition__seed=split))
    grouping = group_runs(runs_in(tmp_path))
    assert [column.title for column in grouping.task] == ["seed"]
    assert len(grouping.groups) == 2


def test_methods_are_told_by_name_though_their_settings_differ_too(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / f"avg{seed}", config("fedavg", seed=seed))
        write_run(tmp_path / f"prox{seed}", config("fedprox", seed=seed, algorithm__mu=0.1, local__lr=0.01))
    grouping = group_runs(runs_in(tmp_path))
    assert [group.method for group in grouping.groups] == [("fedavg",), ("fedprox",)]
    assert [column.title for column in (*grouping.task, *grouping.method)] == ["algorithm"]
    assert grouping.together == ["local.lr"]  # mu goes without saying, the learning rate does not


def test_one_method_over_a_hyperparameter_has_a_column_for_it(tmp_path: Path) -> None:
    for mu in (0.1, 1.0):
        write_run(tmp_path / str(mu), config("fedprox", algorithm__mu=mu))
    grouping = group_runs(runs_in(tmp_path))
    assert [column.title for column in grouping.method] == ["mu"]
    assert labels(runs_in(tmp_path)) == [("0.1",), ("1.0",)]
    assert grouping.common == {
        "algorithm.name": "fedprox",
        "dataset.name": "digits",
        "partition.name": "dirichlet",
        "rounds": 2,
    }


def test_a_setting_stands_beside_the_name_only_where_it_is_needed(tmp_path: Path) -> None:
    write_run(tmp_path / "avg", config("fedavg"))
    write_run(tmp_path / "scaffold", config("scaffold", algorithm__server_lr=1.0))
    for mu in (0.1, 1.0):
        write_run(tmp_path / str(mu), config("fedprox", algorithm__mu=mu))
    assert labels(runs_in(tmp_path)) == [("fedavg",), ("fedprox (mu=0.1)",), ("fedprox (mu=1.0)",), ("scaffold",)]


def test_columns_of_one_short_name_carry_the_full_key(tmp_path: Path) -> None:
    for i, (local, server) in enumerate([(0.1, 1), (0.1, 2), (0.2, 1)]):
        write_run(tmp_path / str(i), config(local__lr=local, server__lr=server))
    assert [column.title for column in group_runs(runs_in(tmp_path)).method] == ["local.lr", "server.lr"]


def test_null_and_booleans_read_as_one_types_them(tmp_path: Path) -> None:
    for i, value in enumerate((None, True, 4)):
        write_run(tmp_path / str(i), config(local__steps=value))
    assert labels(runs_in(tmp_path)) == [("4",), ("null",), ("true",)]


def test_by_pools_everything_else_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for alpha, accuracy in ((0.1, 0.6), (1.0, 0.8)):
        write_run(tmp_path / str(alpha), config(partition__alpha=alpha), accuracy)
    assert main([str(tmp_path), "--by", "algorithm"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"fedavg +2 +70.00 ± 14.14", out)  # mean of 60 and 80; √(10² + 10²) = 14.14
    assert re.search(r"algorithm +runs", out)
    assert "A row pools runs that differ in: partition.alpha." in out


def test_by_a_key_that_does_not_exist_names_the_near_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", config())
    assert main([str(tmp_path), "--by", "algorithn"]) == 1
    assert "Did you mean algorithm.name" in capsys.readouterr().err


setting = st.fixed_dictionaries(
    {"algorithm.name": st.sampled_from("ab"), "dataset.name": st.sampled_from("xy"), "lr": st.sampled_from([0.1, 1])},
    optional={
        "algorithm.mu": st.sampled_from([None, 1, 2]),
        "model.name": st.sampled_from("mn"),
        "model.width": st.sampled_from([8, 16]),
        "partition.alpha": st.sampled_from([0.1, 10]),
        "seed": st.integers(0, 2),
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(setting, min_size=1, max_size=12))
def test_labels_tell_all_groups_apart_and_only_the_seed_differs_within_one(configs: list[dict[str, Any]]) -> None:
    grouping = group_runs([in_memory(**one) for one in configs])
    named = [(group.task, group.method) for group in grouping.groups]
    assert len(set(named)) == len(named)
    assert sum(len(group.runs) for group in grouping.groups) == len(configs)
    for group in grouping.groups:
        assert len({frozenset({**run.config, "seed": 0}.items()) for run in group.runs}) == 1
    assert grouping.pooled == []


# Numbers


def test_the_deviation_over_seeds_is_the_sample_deviation() -> None:
    # mean 0.85, deviations ±0.05: √(2 · 0.05² / (2 − 1)) = 0.0707; of a population it would be 0.05
    assert statistic([0.8, 0.9]) == pytest.approx(Stat(0.85, 0.070710678), rel=1e-6)
    assert statistic([0.8]) == Stat(0.8, None)


def test_a_row_shows_mean_and_deviation_in_percent_and_a_single_seed_no_deviation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", config("fedavg", seed=0), 0.8)
    write_run(tmp_path / "b", config("fedavg", seed=1), 0.9)
    write_run(tmp_path / "c", config("fedper", seed=0), 0.7)
    main([str(tmp_path)])
    out = capsys.readouterr().out
    assert re.search(r"^fedavg +2 +\* 85.00 ± 7.07 ", out, re.M)
    assert re.search(r"^fedper +1 +70.00 +10.00 +1.00 k +600 +1 min 15 s$", out, re.M)


def test_a_run_is_judged_by_its_last_round_or_its_best_and_costs_all_its_rounds(tmp_path: Path) -> None:
    write_run(tmp_path / "a", config(), 0.5, 0.9, 0.7)
    last = build_table(runs_in(tmp_path), "acc/personal/mean").rows[0].stats
    best = build_table(runs_in(tmp_path), "acc/personal/mean", best_round=True).rows[0].stats
    assert (last["acc/personal/mean"].mean, best["acc/personal/mean"].mean) == (0.7, 0.9)
    assert last["comm/total/params"].mean == best["comm/total/params"].mean == 3000  # 1000 a round


def test_the_best_round_of_a_loss_is_its_lowest_and_nan_is_never_best(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", config(), 0.1)
    losses = [float("nan"), 0.2, 0.9, 0.4]
    lines = [json.dumps(line(i, 0.1 * i, **{"loss/personal/mean": loss})) for i, loss in enumerate(losses)]
    (path / "metrics.jsonl").write_text("\n".join(lines))
    row = build_table(runs_in(tmp_path), "loss/personal/mean", best_round=True).rows[0]
    assert row.stats["loss/personal/mean"].mean == 0.2
    assert row.stats["acc/personal/mean"].mean == 0.1  # of that same round


def test_a_number_that_was_not_finite_in_one_seed_is_missing_from_the_row(tmp_path: Path) -> None:
    write_run(tmp_path / "a", config(seed=0), 0.5, **{"acc/shared/mean": 0.4})
    broken = write_run(tmp_path / "b", config(seed=1), 0.7)
    (broken / "metrics.jsonl").write_text(json.dumps({**line(1, 0.7), "acc/shared/mean": None}))
    row = build_table(runs_in(tmp_path), "acc/personal/mean").rows[0]
    assert row.stats["acc/personal/mean"].mean == pytest.approx(0.6)  # (0.5 + 0.7) / 2
    assert "acc/shared/mean" not in row.stats  # rather than the mean of the seeds that went well


def test_rows_are_sorted_by_the_metric_and_what_lacks_it_comes_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "local", config("local"), 0.9)
    write_run(tmp_path / "a", config("fedavg"), 0.5, **{"acc/shared/mean": 0.3})
    write_run(tmp_path / "b", config("fedprox"), 0.4, **{"acc/shared/mean": 0.6})
    main([str(tmp_path), "--metric", "acc/shared/mean", "--format", "markdown"])
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines() if row.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["| fedprox", "| fedavg", "| local"]
    assert [row[4] for row in rows] == ["**60.00**", "30.00", "–"]


def test_each_dataset_has_its_own_section_and_its_own_best(tmp_path: Path) -> None:
    for dataset, gain in (("digits", 0.3), ("cifar100", 0.0)):
        write_run(tmp_path / dataset / "a", config("fedavg", dataset), 0.5 + gain)
        write_run(tmp_path / dataset / "b", config("fedprox", dataset), 0.6 + gain)
    table = build_table(runs_in(tmp_path), "acc/personal/mean")
    shown = [[(*row.group.task, *row.group.method, row.best) for row in section] for section in table.sections]
    assert shown == [
        [("cifar100", "fedprox", True), ("cifar100", "fedavg", False)],
        [("digits", "fedprox", True), ("digits", "fedavg", False)],
    ]


def test_one_method_over_splits_is_in_the_order_of_the_splits_and_marks_none(tmp_path: Path) -> None:
    for alpha, accuracy in ((10, 0.7), (0.5, 0.9), (2.5, 0.8)):
        write_run(tmp_path / str(alpha), config(partition__alpha=alpha), accuracy)
    table = build_table(runs_in(tmp_path), "acc/personal/mean")
    assert [row.group.task for row in table.rows] == [("0.5",), ("2.5",), ("10",)]
    assert not any(row.best for row in table.rows)


def test_a_metric_that_does_not_exist_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", config())
    assert main([str(tmp_path), "--metric", "acc/personal/meen"]) == 1
    assert "Did you mean acc/personal/mean" in capsys.readouterr().err


def test_runs_of_several_commits_are_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, commit in enumerate(("a" * 40, "b" * 40)):
        path = write_run(tmp_path / str(seed), config(seed=seed))
        (path / "versions.json").write_text(json.dumps({"torch": "2.5", "commit": commit}))
    main([str(tmp_path)])
    assert "The runs come from 2 commits: aaaaaaaaaa, bbbbbbbbbb." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 k"),
        (12_345, "12.3 k"),
        (999_999, "1.00 M"),
        (123e6, "123 M"),
        (5e15, "5.00 P"),
    ],
)
def test_amounts_have_three_digits_and_a_unit(number: float, shown: str) -> None:
    assert amount(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (3599.6, "1 h 00 min"), (7805, "2 h 10 min")],
)
def test_durations_have_two_units_at_most(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


# Formats


def test_csv_keeps_full_precision_and_is_alone_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", config("fedprox", algorithm__mu=0.1), 1 / 3)
    write_run(tmp_path / "b", config("fedavg"), 2 / 3)
    write_run(tmp_path / "going", config("local"), finished=False)
    main([str(tmp_path), "--format", "csv"])
    rows = csv_rows(capsys.readouterr().out)
    assert [(row["algorithm.name"], float(row["acc/personal/mean"])) for row in rows] == [
        ("fedavg", 2 / 3),
        ("fedprox", 1 / 3),
    ]
    assert [row["std(acc/personal/mean)"] for row in rows] == ["", ""]


def test_markdown_has_one_cell_per_column_and_the_best_is_bold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", config("fed|avg"), 0.5)
    write_run(tmp_path / "b", config("fedper"), 0.6)
    main([str(tmp_path), "--format", "markdown"])
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert len(rows) == 4
    assert "| fedper | 1 | **60.00** |" in rows[2]
    assert r"| fed\|avg | 1 | 50.00 |" in rows[3]


def test_latex_is_a_booktabs_tabular_with_escaped_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, accuracy in enumerate((0.6, 0.8)):
        write_run(tmp_path / f"a{seed}", config("fed_avg & 50%", seed=seed), accuracy)
    write_run(tmp_path / "b", config("fedper"), 0.5)
    main([str(tmp_path), "--format", "latex"])
    source = [row for row in capsys.readouterr().out.splitlines() if not row.startswith("%")]
    spec = re.fullmatch(r"\\begin{tabular}{(l+r+)}", source[0])
    assert spec
    assert [source[1], source[3], source[-2], source[-1]] == [
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert r"fed\_avg \& 50\% & 2 & \textbf{70.00 $\pm$ 14.14} &" in source[4]
    cells = [row for row in source if row.endswith(r"\\")]
    assert {len(re.split(r"(?<!\\)&", row)) for row in cells} == {len(spec[1])}


def test_every_special_character_of_latex_is_escaped() -> None:
    assert escape_latex("a_b{c}$#&%") == r"a\_b\{c\}\$\#\&\%"
    assert escape_latex("\\~^") == r"\textbackslash{}\textasciitilde{}\textasciicircum{}"
    assert escape_latex("1 ± –") == r"1 $\pm$ --"
    assert escape_latex("[dnn]") == "{[}dnn{]}"  # at the start of a row the `\\` before it takes it for its option


def test_text_is_aligned_for_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", config("fedavg"), 0.5)
    write_run(tmp_path / "b", config("a_method_with_a_long_name"), 1.0)
    main([str(tmp_path)])
    caption, _, header, rule, *rows = capsys.readouterr().out.splitlines()[:6]
    assert caption == "dataset=digits partition=dirichlet rounds=2"
    assert len({len(row) for row in (header, rule, *rows)}) == 1  # the last column is flush right
    assert {row.index("0.00") for row in rows} == {rows[0].index("0.00")}  # 100.00 above 50.00, digit under digit


def test_out_writes_every_format_and_the_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a", config("fedavg"), 0.5, 0.6)
    write_run(tmp_path / "runs" / "b", config("local"), 0.5, 0.7)
    out = tmp_path / "new" / "folder"
    assert main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert {file.name for file in out.iterdir()} == {"table.txt", "table.md", "table.csv", "table.tex", "curves.png"}
    assert (out / "table.txt").read_text(encoding="utf-8") == capsys.readouterr().out
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_an_out_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", config())
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "a"), "--out", str(tmp_path / "file")]) == 1
    assert re.search(r"fedkd-report: .*file", capsys.readouterr().err)


def test_the_command_starts_without_torch_and_without_matplotlib() -> None:
    heavy = "import sys, fedkd.report.cli; sys.exit(' '.join({'torch', 'matplotlib'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", heavy], check=True)
