"""A table over runs as text, Markdown, CSV or LaTeX."""

import csv
import io
from collections.abc import Callable, Iterable

from fedkd.report import grid
from fedkd.report.grid import MISSING, Best, Grid, Line
from fedkd.report.grouping import value_text
from fedkd.report.table import Measure, Row, Stat, Table


def grid_of(table: Table) -> Grid:
    """The table as it is shown; the best of each section stands out."""

    def cells(row: Row) -> Line:
        labels = [*row.group.task, *row.group.method, str(len(row.group.runs))]
        shown = [(measure.metric, show(measure, row.stats.get(measure.metric))) for measure in table.measures]
        best = table.metric if row.best else None
        return [*labels, *(Best(text) if metric == best else text for metric, text in shown)]

    titles = [column.title for column in (*table.grouping.task, *table.grouping.method)]
    return Grid(
        caption=_caption(table),
        header=[*titles, _runs_title(table), *(measure.title for measure in table.measures)],
        sections=[[cells(row) for row in section] for section in table.sections],
        labels=len(titles),
        notes=_footnotes(table),
        star=f"*: the best by {table.metric}.",
    )


def to_csv(table: Table) -> str:
    """Full keys, fractions and full precision, for another program to read."""
    names = [measure.metric for measure in table.measures]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*table.grouping.keys, _runs_title(table), *(n for name in names for n in (name, f"std({name})"))])
    for row in table.rows:
        labels = map(value_text, row.group.settings.values())
        numbers = (number for name in names for number in row.stats.get(name, (None, None)))
        writer.writerow([*labels, len(row.group.runs), *numbers])
    return out.getvalue()


FORMATS: dict[str, tuple[Callable[[Table], str], str]] = {  # name -> (renderer, file)
    "text": (lambda table: grid.to_text(grid_of(table)), "table.txt"),
    "markdown": (lambda table: grid.to_markdown(grid_of(table)), "table.md"),
    "csv": (to_csv, "table.csv"),
    "latex": (lambda table: grid.to_latex(grid_of(table)), "table.tex"),
}


def show(measure: Measure, stat: Stat | None) -> str:
    """`81.00 ± 0.50`, without ± for a single run."""
    if stat is None:
        return MISSING
    mean = measure.show(stat.mean)
    return mean if stat.std is None or not measure.with_std else f"{mean} ± {measure.show(stat.std)}"


def _runs_title(table: Table) -> str:
    """Seeds, unless a row pools runs that differ in more."""
    return "runs" if table.grouping.pooled else "seeds"


def _caption(table: Table) -> str:
    """What all runs share: `algorithm=fedprox dataset=digits rounds=20`."""
    common = table.grouping.common.items()
    return " ".join(f"{key.removesuffix('.name')}={value_text(value)}" for key, value in common)


def _footnotes(table: Table) -> list[str]:
    """What a reader must know to read the numbers right."""
    shown = {measure.metric for measure in table.measures}
    when = f"the round with the best {table.metric}" if table.best_round else "the last evaluated round"
    sample = any(len(row.group.runs) > 1 for row in table.rows)
    over = f", mean ± sample standard deviation over {_runs_title(table)}" if sample else ""
    notes = [
        f"Accuracies of {when}{over}.",
        "personal: each client's own model on its own test samples, with the spread over clients and the worst client.",
    ]
    if shown & {"acc/shared/mean", "acc/shared/global"}:
        notes.append("shared: the server's model on each client's test samples; global: on the dataset's test set.")
    if "comm/total/params" in shown:
        notes.append("sent: parameters communicated in all; broadcast: a message to many counted once.")
    if table.grouping.together:
        notes.append(f"Also different, together with the labels: {listed(table.grouping.together)}.")
    if table.grouping.pooled:
        notes.append(f"A row pools runs that differ in: {listed(table.grouping.pooled)}.")
    if len(table.commits) > 1:
        notes.append(f"The runs come from {len(table.commits)} commits: {listed([c[:10] for c in table.commits])}.")
    return notes


def listed(names: Iterable[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
