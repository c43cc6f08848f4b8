"""One row per group of runs: what the seeds have in common, and how far they lie apart."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

from fedkd.core.errors import ConfigError, unknown
from fedkd.report.collect import Metrics, Run
from fedkd.report.grouping import Group, Grouping, group_runs


class Stat(NamedTuple):
    """One number over the runs of a group."""

    mean: float
    std: float | None  # sample standard deviation; None for a single run


class Measure(NamedTuple):
    """A column of measured numbers."""

    metric: str  # its name in metrics.jsonl
    title: str
    show: Callable[[float], str]
    with_std: bool = True


@dataclass(frozen=True)
class Row:
    """One group's numbers; `best` among the rows of its section."""

    group: Group
    stats: dict[str, Stat]
    best: bool


@dataclass(frozen=True)
class Table:
    """Sections of rows: one section per task, the best row first."""

    grouping: Grouping
    sections: list[list[Row]]
    measures: list[Measure]
    metric: str
    best_round: bool
    commits: list[str]

    @property
    def rows(self) -> list[Row]:
        return [row for section in self.sections for row in section]


UNITS = "kMGTPE"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}"


def amount(number: float) -> str:
    """Three digits and a unit: 1234567 is `1.23 M`."""
    if number < 999.5:
        return f"{number:.0f}"
    # Of the rounded number: 999999 is 1.00 M, not 1000 k.
    thousands = min(int(math.log10(float(f"{number:.3g}")) // 3), len(UNITS))
    return f"{number / 1000**thousands:#.3g}".rstrip(".") + f" {UNITS[thousands - 1]}"


def duration(seconds: float) -> str:
    """Two units at most: `8.3 s`, `4 min 05 s`, `2 h 10 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


# Costs and the spread over clients without their deviation over seeds: it is next to nothing, or means next to nothing.
MEASURES = (
    Measure("acc/personal/mean", "personal %", percent),
    Measure("acc/personal/std", "spread %", percent, with_std=False),
    Measure("acc/personal/worst", "worst %", percent),
    Measure("acc/shared/mean", "shared %", percent),
    Measure("acc/shared/global", "global %", percent),
    Measure("comm/total/params", "sent", amount, with_std=False),
    Measure("comm/broadcast/params", "broadcast", amount, with_std=False),
    Measure("time/total", "time", duration, with_std=False),
)


def build_table(
    runs: Sequence[Run], metric: str, *, best_round: bool = False, by: Sequence[str] | None = None
) -> Table:
    """The table over `runs` (at least one, each with a metric line), sorted by `metric`."""
    known = dict.fromkeys(name for run in runs for line in run.metrics for name in line if name != "round")
    if metric not in known:
        raise ConfigError(unknown("--metric", metric, list(known)))
    grouping = group_runs(runs, by)
    rows = [Row(group, over_seeds(group.runs, metric, best_round), best=False) for group in grouping.groups]
    return Table(
        grouping=grouping,
        sections=[ranked(list(section), metric) for _, section in groupby(rows, key=lambda row: row.group.task)],
        measures=[measure for measure in measures(metric) if any(measure.metric in row.stats for row in rows)],
        metric=metric,
        best_round=best_round,
        commits=sorted({run.commit for run in runs if run.commit}),
    )


def measures(metric: str) -> list[Measure]:
    """The columns; a metric that has none by default comes first."""
    if any(metric == measure.metric for measure in MEASURES):
        return list(MEASURES)
    if metric.startswith("acc/"):
        return [Measure(metric, f"{metric} %", percent), *MEASURES]
    return [Measure(metric, metric, lambda value: f"{value:.4f}"), *MEASURES]


def over_seeds(runs: Sequence[Run], metric: str, best_round: bool) -> dict[str, Stat]:
    """Mean and deviation of what all runs of a group have measured."""
    outcomes = [outcome(run, metric, best_round) for run in runs]
    everywhere = [name for name in outcomes[0] if all(name in other for other in outcomes)]
    return {name: statistic([found[name] for found in outcomes]) for name in everywhere}


def outcome(run: Run, metric: str, best_round: bool) -> Metrics:
    """What a run is judged by: its models after one round, its costs over all rounds."""
    last = run.metrics[-1]
    models = max(run.metrics, key=lambda line: goodness(line, metric)) if best_round else last
    costs = {name: value for name, value in last.items() if name.startswith("comm/")}
    time = {"time/total": run.summary["time/total"]} if run.summary and "time/total" in run.summary else {}
    return {**models, **costs, **time}


def goodness(values: Metrics, metric: str) -> float:
    """Larger is better; a number that is missing or NaN is worst."""
    value = values.get(metric, math.nan)
    if math.isnan(value):
        return -math.inf
    return -value if smaller_is_better(metric) else value


def smaller_is_better(metric: str) -> bool:
    return metric.startswith(("loss/", "comm/", "time/")) or metric.endswith("/std")


def statistic(values: Sequence[float]) -> Stat:
    mean = fmean(values)
    if len(values) == 1:
        return Stat(mean, None)
    return Stat(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)))


def ranked(rows: Sequence[Row], metric: str) -> list[Row]:
    """The rows of one task, best first; the best of one alone is not worth a mark."""

    def score(row: Row) -> float:
        return goodness({name: stat.mean for name, stat in row.stats.items()}, metric)

    ordered = sorted(rows, key=score, reverse=True)
    top = score(ordered[0])
    marked = len(rows) > 1 and top > -math.inf
    return [replace(row, best=marked and score(row) == top) for row in ordered]
