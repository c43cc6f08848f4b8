"""A paper's table beside ours as text, Markdown, CSV or LaTeX."""

import csv
import io
from collections.abc import Callable, Sequence
from statistics import fmean

from fedkd.report import grid
from fedkd.report.formats import listed
from fedkd.report.grid import MISSING, Best, Grid, Line
from fedkd.report.measured import Outcome
from fedkd.report.paper import Comparison, Result
from fedkd.report.table import Stat, amount, duration
from fedkd.table import PAPER, Cell, Printed

PARTS = ("paper", "ours", "Δ")
COSTS = (  # title, number of a run, how it is shown
    ("parameters", "params/model", amount),
    ("sent", "comm/total/params", amount),
    ("broadcast", "comm/broadcast/params", amount),
    ("time", "time/total", duration),
)


def main_grid(shown: Comparison) -> Grid:
    """Each column in three: paper, ours, difference; where nothing is printed, ours alone. The best stands out."""
    best = {column: shown.best(column) for column in shown.columns}
    titles = {column: shown.table.column[column].title for column in shown.columns}
    parts = {column: PARTS if printed(shown, column) else PARTS[1:2] for column in shown.columns}
    alone = {*parts.values()} == {PARTS[1:2]}

    def cells(row: str) -> Line:
        line = [shown.table.row[row].title]
        for column in shown.columns:
            paper, ours, difference = texts(shown.results[Cell(row, column)], shown.digits(column))
            of_part = {"paper": paper, "ours": Best(ours) if row in best[column] else ours, "Δ": difference}
            line += [of_part[part] for part in parts[column]]
        return line

    def tau(column: str, part: str) -> str:
        return signed(shown.tau(column), 2) if part == "ours" else ""

    taus = [tau(column, part) for column in shown.columns for part in parts[column]]
    sections = [[cells(row) for row in shown.rows]]
    origin = [f"{shown.table.reference}."] if shown.table.reference else []
    return Grid(
        caption=f"{shown.table.name}: {shown.table.caption}",
        header=["", *(titles.values() if alone else (part for column in shown.columns for part in parts[column]))],
        sections=[*sections, [["Kendall's τ", *taus]]] if {*taus} - {"", MISSING} else sections,
        labels=1,
        notes=[*origin, *notes(shown), *(f"Departure: {sentence}" for sentence in shown.table.departures)],
        star="*: the best of ours.",
        groups=[] if alone else [("", 1), *((titles[column], len(parts[column])) for column in shown.columns)],
    )


def printed(shown: Comparison, column: str) -> bool:
    """Whether the paper has a number in this column."""
    return any(shown.results[Cell(row, column)].printed for row in shown.rows)


def cost_grid(shown: Comparison) -> Grid:
    """What each run cost, from how many seeds and from which commit its numbers come."""
    lines = []
    for served in shown.runs.values():
        rows = dict.fromkeys(shown.table.row[result.cell.row].title for result in served)
        columns = dict.fromkeys(shown.table.column[result.cell.column].title for result in served)
        runs = max((result.runs for result in served), key=len)
        shown_costs = zip(costs(runs), COSTS, strict=True)
        texts = [MISSING if cost is None else show(cost) for cost, (*_, show) in shown_costs]
        seeds = ", ".join(run.directory.name.removeprefix("seed=") for run in runs)
        commits = listed(dict.fromkeys(commit_text(run.commit) for run in runs))
        lines.append([" / ".join(rows), " / ".join(columns), *texts, seeds, commits])
    titles = ["", "column", *(title for title, *_ in COSTS), "seeds", "commit"]
    note = "Of a run, on average over its seeds; sent: every copy counted; broadcast: a message to many counted once."
    return Grid("Costs and origins", titles, [lines], labels=2, notes=[note])


def to_csv(shown: Comparison) -> str:
    """One line a cell, in the paper's unit and full precision, for another program to read."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    about = ("row", "column", "metric", "pick", "unit")
    numbers = ("paper", "paper_spread", "mean", "std", "difference")
    writer.writerow([*about, *numbers, "seeds", "commits", *(metric for _, metric, _ in COSTS)])
    for result in shown.results.values():
        values = (*(result.printed or (None, None)), *(result.stat or (None, None)), result.difference)
        writer.writerow(
            [*result.cell, *result.gauge, *values, len(result.runs), " ".join(result.commits), *costs(result.runs)]
        )
    return out.getvalue()


def _both(render: Callable[[Grid], str]) -> Callable[[Comparison], str]:
    def render_both(shown: Comparison) -> str:
        grids = [main_grid(shown), cost_grid(shown)] if shown.runs else [main_grid(shown)]
        return "\n".join(render(grid) for grid in grids)

    return render_both


FORMATS: dict[str, tuple[Callable[[Comparison], str], str]] = {  # name -> (renderer, file)
    "text": (_both(grid.to_text), "table.txt"),
    "markdown": (_both(grid.to_markdown), "table.md"),
    "csv": (to_csv, "table.csv"),
    "latex": (_both(grid.to_latex), "table.tex"),
}


def texts(result: Result, digits: int) -> tuple[str, str, str]:
    """The paper's number, ours and the difference."""
    return (
        spread_text(result.printed, digits),
        spread_text(result.stat, digits),
        signed(result.difference, digits),
    )


def spread_text(number: Stat | Printed | None, digits: int) -> str:
    """`93.96 ± 0.02`."""
    if number is None:
        return MISSING
    mean, spread = number
    return f"{mean:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def signed(number: float | None, digits: int) -> str:
    return MISSING if number is None else f"{number:+.{digits}f}".replace("-", "−")


def costs(runs: Sequence[Outcome]) -> list[float | None]:
    """What a run costs on average, as far as it is known."""
    found = [[run.number(metric) for run in runs] for _, metric, _ in COSTS]
    known = [[value for value in values if value is not None] for values in found]
    return [fmean(values) if values else None for values in known]


def commit_text(commit: str | None) -> str:
    """`71c9944a0b`, with a star if the checkout was not clean."""
    return MISSING if commit is None else commit[:10] + ("*" if commit.endswith("-dirty") else "")


def notes(shown: Comparison) -> list[str]:
    """What a reader must know to read the numbers right."""
    table, counts = shown.table, {len(result.runs) for result in shown.results.values() if result.stat}
    found = []
    if counts:
        low, high = min(counts), max(counts)
        seeds = "one seed" if high == 1 else f"{high} seeds" if low == high else f"{low} to {high} seeds"
        deviation = " ± sample standard deviation" if high > 1 else ""
        difference = "; Δ: ours − paper" if any(printed(shown, column) for column in shown.columns) else ""
        found.append(f"ours: mean{deviation} over {seeds}{difference}.")
    if any(shown.tau(column) is not None for column in shown.columns):
        found.append("Kendall's τ: 1 where our order of the rows is the paper's, −1 where it is the opposite.")
    if table.scale != PAPER:
        shrunk = {"": table.scales, **{f"{line.title}: ": line.scales for line in table.row.values()}}
        told = [who + " ".join(scales[table.scale]) for who, scales in shrunk.items() if table.scale in scales]
        found.append(f"Reduced scale, {table.scale}: {'; '.join(told)}.")
    found += [
        f"Not run: {what} {listed(names)}."
        for what, names in (
            ("rows", [row for row in table.row if row not in shown.rows]),
            ("columns", [column for column in table.column if column not in shown.columns]),
        )
        if names
    ]
    return found
