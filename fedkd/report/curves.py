"""The course of runs: the mean over seeds, round by round."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedkd.report.collect import Metrics
from fedkd.report.grouping import Column
from fedkd.report.plots import SENT, Curve
from fedkd.report.table import Row, Table


class Series(NamedTuple):
    """Runs that are one line of a picture."""

    label: str
    metric: str
    directories: Sequence[Path]
    histories: Sequence[Sequence[Metrics]]  # of each, its lines of metrics.jsonl


def curves_by_task(table: Table) -> dict[str, list[Curve]]:
    """Title of a task -> its curves."""
    return {title: curves_of(series) for title, series in series_by_task(table).items()}


def series_by_task(table: Table) -> dict[str, list[Series]]:
    """Title of a task -> its rows; where no task has two rows to compare, one picture holds them all."""
    task, method = table.grouping.task, table.grouping.method
    if all(len(section) == 1 for section in table.sections):
        labels = [_name([*task, *method], [*row.group.task, *row.group.method]) for row in table.rows]
        return {"": _series(table.rows, labels, table.metric)}
    return {
        _name(task, section[0].group.task): _series(
            section, [_name(method, row.group.method) for row in section], table.metric
        )
        for section in table.sections
    }


def _series(rows: Sequence[Row], labels: Sequence[str], metric: str) -> list[Series]:
    return [
        Series(label, metric, [run.path for run in row.group.runs], [run.metrics for run in row.group.runs])
        for row, label in zip(rows, labels, strict=True)
    ]


def _name(columns: Sequence[Column], labels: Sequence[str]) -> str:
    """Labels that no header explains: `fedprox (mu=1), lr=0.1`."""
    named = zip(columns, labels, strict=True)
    return ", ".join(label if column.of_names else f"{column.title}={label}" for column, label in named)


def curves_of(series: Sequence[Series]) -> list[Curve]:
    """Those that there is something to draw of; fedper has no shared model, say."""
    return [curve for curve in map(mean_curve, series) if len(curve.round)]


def mean_curve(series: Series) -> Curve:
    """Over the rounds that all runs evaluated; the band is the sample standard deviation over the runs."""
    metric = series.metric
    by_round = [{line["round"]: line for line in lines if metric in line} for lines in series.histories]
    rounds = sorted(set.intersection(*map(set, by_round)))
    values = np.array([[lines[r][metric] for r in rounds] for lines in by_round])
    sent = np.array([[lines[r].get(SENT, 0.0) for r in rounds] for lines in by_round])
    std = values.std(0, ddof=1) if len(by_round) > 1 else None
    return Curve(series.label, np.array(rounds), sent.mean(0), values.mean(0), std)
