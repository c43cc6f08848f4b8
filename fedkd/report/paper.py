"""A paper's table beside what its runs have measured."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

from fedkd.report.measured import Outcome
from fedkd.report.table import Stat, smaller_is_better, statistic
from fedkd.table import FILE, Cell, Gauge, PaperTable, Printed


@dataclass(frozen=True)
class Result:
    """One cell: what is printed, what was measured, and by which runs."""

    cell: Cell
    gauge: Gauge
    printed: Printed | None
    stat: Stat | None  # over seeds, in the paper's unit
    runs: tuple[Outcome, ...]  # that have the number

    @property
    def difference(self) -> float | None:
        return None if self.stat is None or self.printed is None else self.stat.mean - self.printed.value

    @property
    def commits(self) -> list[str]:
        return sorted({run.commit for run in self.runs if run.commit})


@dataclass(frozen=True)
class Comparison:
    """A table beside its runs, which lie in one folder."""

    table: PaperTable
    folder: Path
    results: dict[Cell, Result]

    @cached_property
    def rows(self) -> list[str]:
        """Those with a number of ours; all, if there is none yet."""
        return [row for row in self.table.row if self._measured(row=row)] or list(self.table.row)

    @cached_property
    def columns(self) -> list[str]:
        return [column for column in self.table.column if self._measured(column=column)] or list(self.table.column)

    def _measured(self, row: str | None = None, column: str | None = None) -> bool:
        return any(r.stat for c, r in self.results.items() if row in (None, c.row) and column in (None, c.column))

    def column(self, name: str) -> list[Result]:
        """The shown results of a column, from the top."""
        return [self.results[Cell(row, name)] for row in self.rows]

    def digits(self, column: str) -> int:
        """Decimals, as many as the paper prints in this column, and two where it prints nothing."""
        return max((decimals(r.printed.value) for r in self.column(column) if r.printed), default=2)

    def tau(self, column: str) -> float | None:
        """How far our order of the rows is the paper's."""
        pairs = [(r.printed.value, r.stat.mean) for r in self.column(column) if r.printed and r.stat]
        return kendall(*zip(*pairs, strict=True)) if len(pairs) > 1 else None

    def best(self, column: str) -> set[str]:
        """The rows with the best number of ours; none where it is alone, or a cost."""
        scores = {
            r.cell.row: -r.stat.mean if smaller_is_better(r.gauge.metric) else r.stat.mean
            for r in self.column(column)
            if r.stat and not is_cost(r.gauge.metric)
        }
        return {row for row, score in scores.items() if score == max(scores.values())} if len(scores) > 1 else set()

    @cached_property
    def runs(self) -> dict[Cell, list[Result]]:
        """The results by the runs behind them: home -> the cells it serves."""
        found: dict[Cell, list[Result]] = {}
        for cell, result in self.results.items():
            if result.runs:
                found.setdefault(self.table.homes[cell], []).append(result)
        return found


def is_table(folder: Path) -> bool:
    return (folder / FILE).exists()


def compare(folder: Path) -> Comparison:
    """Read a table and its runs; every number of ours comes from a run's directory."""
    table = PaperTable.load(folder)
    outcomes = {home: outcomes_in(folder / home.row / home.column) for home in set(table.homes.values())}
    return Comparison(table, folder, {cell: result(table, cell, outcomes[table.homes[cell]]) for cell in table.cells})


def outcomes_in(folder: Path) -> list[Outcome]:
    """The runs and plans of one cell, by seed."""
    seeds = {int(path.name[5:]): path for path in folder.glob("seed=*") if re.fullmatch(r"seed=\d+", path.name)}
    outcomes = [Outcome(seeds[seed]) for seed in sorted(seeds)]
    return [outcome for outcome in outcomes if outcome.finished or outcome.planned]


def result(table: PaperTable, cell: Cell, outcomes: Sequence[Outcome]) -> Result:
    """A cell's number over seeds, in the paper's unit."""
    gauge = table.gauge(cell)
    found = [(run, value) for run in outcomes if (value := run.number(gauge.metric, gauge.pick)) is not None]
    values = [value / gauge.scale for _, value in found]
    stat = statistic(values) if values else None
    if stat and is_cost(gauge.metric):
        stat = stat._replace(std=None)  # next to nothing
    return Result(cell, gauge, table.printed(cell), stat, tuple(run for run, _ in found))


def is_cost(metric: str) -> bool:
    """Whether it is a price to pay, not a merit."""
    return metric.startswith(("comm/", "params/", "time/"))


def decimals(number: float) -> int:
    """Of 93.96 two, of 92.0 none."""
    return len(repr(float(number)).partition(".")[2].removesuffix("0"))


def kendall(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's τ-b, which takes ties into account; None where one side is all ties."""
    pairs = combinations(zip(a, b, strict=True), 2)
    signs = [(math.copysign(x != y, x - y), math.copysign(v != w, v - w)) for (x, v), (y, w) in pairs]
    untied = [sum(map(abs, side)) for side in zip(*signs, strict=True)]
    return sum(s * t for s, t in signs) / math.sqrt(untied[0] * untied[1]) if all(untied) else None
