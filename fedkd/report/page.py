"""One page that needs nothing but a browser: the table, curves to hover, the spread over clients, the split.

`page.css` and `page.js` are put into it, and so are the numbers; nothing is fetched.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from fedkd.report.collect import read_json
from fedkd.report.curves import Series, curves_of, series_by_task
from fedkd.report.formats import grid_of
from fedkd.report.grid import Best, Grid, Line
from fedkd.report.measured import Outcome
from fedkd.report.paper import Comparison, Result
from fedkd.report.paper_formats import PARTS, cost_grid, main_grid, notes
from fedkd.report.plots import Curve
from fedkd.report.table import Table, duration

HERE = Path(__file__).parent
PERSONAL = "acc/personal/mean"
MOST_CLIENTS = 400  # in a picture of the split or of the spread; beyond that, one in so many


class Panel(NamedTuple):
    """What is drawn of one task."""

    title: str
    metric: str
    series: Sequence[Series]


def page_of_paper(shown: Comparison) -> str:
    """A paper's table beside ours."""
    table = shown.table
    times = [time for served in shown.runs.values() for run in served[0].runs if (time := run.number("time/total"))]
    commits = sorted({commit for result in shown.results.values() for commit in result.commits})
    facts = {
        "paper": table.reference,
        "scale": table.scale,
        "command": _command(shown.folder),
        "runs": f"{len(times)}, {duration(sum(times))} in all" if times else "",
        "commit": ", ".join(commits),
    }
    tables = [html_table(main_grid(shown)), *([_folded("Costs and origins", cost_grid(shown))] if shown.runs else [])]
    remarks = {"Notes": notes(shown), "Departures from the paper": table.departures}
    return _page(table.name, table.caption or table.name, facts, tables, _panels_of_paper(shown), remarks)


def page_of_runs(table: Table) -> str:
    """An ordinary table over runs."""
    grid = grid_of(table)
    facts = {"setting": grid.caption, "commit": ", ".join(table.commits)}
    panels = [Panel(title, table.metric, series) for title, series in series_by_task(table).items()]
    return _page("fedkd", "Runs compared", facts, [html_table(grid)], panels, {"Notes": grid.notes})


def html_table(grid: Grid) -> str:
    """A grid; what is best is bold, differences carry a class of their own."""
    first = [sum(width for _, width in grid.groups[:place]) for place in range(len(grid.groups))]  # of each group

    def kind(place: int) -> str:
        names = ["label" if place < grid.labels else "number"]
        names += ["first"] if place in first[1:] else []
        names += ["delta"] if grid.header[place] == PARTS[-1] else []
        return " ".join(names)

    def row(line: Line, tag: str = "td") -> str:
        cells = [f'<{tag} class="{kind(place)}">{_html(cell)}</{tag}>' for place, cell in enumerate(line)]
        return f"<tr>{''.join(cells)}</tr>"

    spans = "".join(
        f'<th class="group{" first" if title else ""}" colspan="{width}"><span>{escape(title)}</span></th>'
        for title, width in grid.groups
    )
    head = (f"<tr>{spans}</tr>" if spans else "") + row(grid.header, "th")
    bodies = "".join(f"<tbody>{''.join(map(row, section))}</tbody>" for section in grid.sections)
    return f'<div class="scroll"><table><thead>{head}</thead>{bodies}</table></div>'


def _html(cell: str) -> str:
    number, sign, spread = escape(cell).partition(" ± ")
    strong = f"<b>{number}</b>" if isinstance(cell, Best) else number
    return strong + (f"<small>{sign}{spread}</small>" if sign else "")


def _folded(title: str, grid: Grid) -> str:
    notes = "".join(f"<p>{escape(note)}</p>" for note in grid.notes)
    return f"<details><summary>{escape(title)}</summary>{html_table(grid)}{notes}</details>"


def _page(
    title: str,
    caption: str,
    facts: Mapping[str, str],
    tables: Iterable[str],
    panels: Iterable[Panel],
    remarks: Mapping[str, Sequence[str]],
) -> str:
    drawn = [found for panel in panels if (found := _drawing(panel))["curves"]]
    told = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in facts.items() if text)
    data = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": escape(title),
        "caption": escape(caption),
        "facts": f"<dl>{told}</dl>",
        "tables": "".join(tables),
        "remarks": "".join(_remarks(head, sentences) for head, sentences in remarks.items() if sentences),
        "data": data,
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "script": (HERE / "page.js").read_text(encoding="utf-8"),
    }
    page = (HERE / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():  # one after another: no text is searched for another's mark
        before, _, after = page.partition(f"<!-- {name} -->")
        page = before + text + after
    return page


def _remarks(head: str, sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<section><h2>{escape(head)}</h2><ul>{items}</ul></section>"


def _drawing(panel: Panel) -> dict[str, Any]:
    """A panel's numbers, as page.js takes them."""
    factor = 100.0 if panel.metric.startswith("acc/") else 1.0
    first = [(series, Outcome(series.directories[0])) for series in panel.series if series.directories]
    classes = next((outcome.classes for _, outcome in first if outcome.classes), [])
    step = -(-len(classes) // MOST_CLIENTS) or 1
    return {
        "title": panel.title,
        "unit": "accuracy, %" if factor == 100.0 else panel.metric,
        "curves": [_curve(curve, factor) for curve in curves_of(panel.series)],
        "spreads": [spread for series, outcome in first if (spread := _spread(series, outcome))["values"]],
        "split": {"step": step, "clients": len(classes), "counts": classes[::step]},
    }


def _curve(curve: Curve, factor: float) -> dict[str, Any]:
    std = None if curve.std is None else [_short(factor * value) for value in curve.std]
    mean = [_short(factor * value) for value in curve.mean]
    rounds, sent = ([_short(value) for value in values] for values in (curve.round, curve.sent))
    return {"label": curve.label, "round": rounds, "sent": sent, "mean": mean, "std": std}


def _spread(series: Series, outcome: Outcome) -> dict[str, Any]:
    """Every client's accuracy at the end of the first seed's run: [client, %, training samples]."""
    whose = "acc_shared" if series.metric.startswith("acc/shared/") else "acc_personal"
    sizes = outcome.per_client("train")
    judged = [(i, value) for i, value in enumerate(outcome.per_client(whose)) if value is not None]
    step = -(-len(judged) // MOST_CLIENTS) or 1
    return {"label": series.label, "values": [[i, _short(100 * v), sizes[i]] for i, v in judged[::step]]}


def _short(number: float) -> float:
    """Five digits are more than a picture shows."""
    return float(f"{number:.5g}")


def _panels_of_paper(shown: Comparison) -> list[Panel]:
    """A panel a column, of the rows that have runs of their own in it.

    Where every column has but one run, its rows being the clients of it, say, the columns share a panel.
    """
    panels: list[Panel] = []
    drawn: set[tuple[Any, str]] = set()
    for column in shown.columns:
        series = []
        for result in shown.column(column):
            known = (shown.table.homes[result.cell], _drawable(result))
            if known not in drawn and any(run.metrics for run in result.runs):
                drawn.add(known)
                series.append(_series(shown.table.row[result.cell.row].title, result))
        if series:
            panels.append(Panel(shown.table.column[column].title, series[0].metric, series))
    if len(panels) > 1 and all(len(panel.series) == 1 for panel in panels):
        return [Panel("", panels[0].metric, [panel.series[0]._replace(label=panel.title) for panel in panels])]
    return panels


def _series(label: str, result: Result) -> Series:
    runs = [run for run in result.runs if run.metrics]
    return Series(label, _drawable(result), [run.directory for run in runs], [run.metrics for run in runs])


def _drawable(result: Result) -> str:
    """The accuracy behind a cell's number."""
    return result.gauge.metric if result.gauge.metric.startswith("acc/") else PERSONAL


def _command(folder: Path) -> str:
    path = folder / "command.json"
    return shlex.join(["fedkd", "-m", *read_json(path)["overrides"]]) if path.exists() else ""
