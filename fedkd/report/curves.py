"""The course of each row of a table: the mean over its runs, round by round."""

from collections.abc import Sequence

import numpy as np

from fedkd.report.collect import Run
from fedkd.report.grouping import Column
from fedkd.report.plots import SENT, Curve
from fedkd.report.table import Row, Table


def curves_by_task(table: Table) -> dict[str, list[Curve]]:
    """Title of a task -> its curves; where no task has two rows to compare, one picture holds them all."""
    task, method = table.grouping.task, table.grouping.method
    if all(len(section) == 1 for section in table.sections):
        labels = [_name([*task, *method], [*row.group.task, *row.group.method]) for row in table.rows]
        return {"": _curves(table.rows, labels, table.metric)}
    return {
        _name(task, section[0].group.task): _curves(
            section, [_name(method, row.group.method) for row in section], table.metric
        )
        for section in table.sections
    }


def _curves(rows: Sequence[Row], labels: Sequence[str], metric: str) -> list[Curve]:
    curves = [mean_curve(row.group.runs, metric, label) for row, label in zip(rows, labels, strict=True)]
    return [curve for curve in curves if len(curve.round)]  # fedper has no shared model to draw, say


def _name(columns: Sequence[Column], labels: Sequence[str]) -> str:
    """Labels that no header explains: `fedprox (mu=1), lr=0.1`."""
    named = zip(columns, labels, strict=True)
    return ", ".join(label if column.of_names else f"{column.title}={label}" for column, label in named)


def mean_curve(runs: Sequence[Run], metric: str, label: str) -> Curve:
    """Over the rounds that all runs evaluated; the band is the sample standard deviation over the runs."""
    by_round = [{line["round"]: line for line in run.metrics if metric in line} for run in runs]
    rounds = sorted(set.intersection(*map(set, by_round)))
    values = np.array([[lines[r][metric] for r in rounds] for lines in by_round])
    sent = np.array([[lines[r].get(SENT, 0.0) for r in rounds] for lines in by_round])
    return Curve(
        label, np.array(rounds), sent.mean(0), values.mean(0), values.std(0, ddof=1) if len(runs) > 1 else None
    )
