"""A table as text, Markdown, CSV or LaTeX."""

import csv
import io
import re
from collections.abc import Callable, Sequence

from fedkd.report.grouping import value_text
from fedkd.report.table import Measure, Row, Stat, Table

MISSING = "–"

Line = list[str]


def to_text(table: Table) -> str:
    """Aligned columns, for a terminal or a pipe; a star marks the best."""
    header, sections = _grid(table, emphasise="* {}".format)
    numbers = _numeric_from(table)
    widths = [max(map(len, column)) for column in zip(header, *_joined(sections), strict=True)]
    rule = ["-" * width for width in widths]

    def aligned(cells: Line) -> str:
        padded = [
            cell.rjust(width) if place >= numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    body = _with_rules([[aligned(line) for line in section] for section in sections], aligned(rule))
    return _lines([_caption(table), "", aligned(header), aligned(rule), *body, "", *_footnotes(table, star=True)])


def to_markdown(table: Table) -> str:
    """A pipe table; the best is bold."""
    header, sections = _grid(table, emphasise="**{}**".format, escape=lambda text: text.replace("|", r"\|"))
    numbers = _numeric_from(table)
    alignment = ["--:" if place >= numbers else ":--" for place in range(len(header))]
    rows = [f"| {' | '.join(line)} |" for line in (header, alignment, *_joined(sections))]
    return _lines([_caption(table), "", *rows, "", " ".join(_footnotes(table))])


def to_latex(table: Table) -> str:
    """A booktabs tabular; the best is bold."""
    header, sections = _grid(table, emphasise=r"\textbf{{{}}}".format, escape=escape_latex)
    numbers = _numeric_from(table)
    body = [[f"{' & '.join(line)} \\\\" for line in section] for section in sections]
    return _lines(
        [
            f"% {_caption(table)}",
            *(f"% {note}" for note in _footnotes(table)),
            r"% \usepackage{booktabs}",
            rf"\begin{{tabular}}{{{'l' * numbers}{'r' * (len(header) - numbers)}}}",
            r"\toprule",
            rf"{' & '.join(header)} \\",
            r"\midrule",
            *_with_rules(body, r"\midrule"),
            r"\bottomrule",
            r"\end{tabular}",
        ]
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
    "text": (to_text, "table.txt"),
    "markdown": (to_markdown, "table.md"),
    "csv": (to_csv, "table.csv"),
    "latex": (to_latex, "table.tex"),
}

LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # a bare one after the end of a row would be taken for its option
    "]": "{]}",
    "±": r"$\pm$",
    "–": "--",
}


def escape_latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


def show(measure: Measure, stat: Stat | None) -> str:
    """`81.00 ± 0.50`, without ± for a single run."""
    if stat is None:
        return MISSING
    mean = measure.show(stat.mean)
    return mean if stat.std is None or not measure.with_std else f"{mean} ± {measure.show(stat.std)}"


def _grid(
    table: Table, emphasise: Callable[[str], str], escape: Callable[[str], str] = str
) -> tuple[Line, list[list[Line]]]:
    """The header, and the cells section by section."""

    def cells(row: Row) -> Line:
        labels = [*row.group.task, *row.group.method, str(len(row.group.runs))]
        shown = [(measure.metric, escape(show(measure, row.stats.get(measure.metric)))) for measure in table.measures]
        best = table.metric if row.best else None
        return [*map(escape, labels), *(emphasise(text) if metric == best else text for metric, text in shown)]

    titles = [column.title for column in (*table.grouping.task, *table.grouping.method)]
    header = [*titles, _runs_title(table), *(measure.title for measure in table.measures)]
    return [*map(escape, header)], [[cells(row) for row in section] for section in table.sections]


def _numeric_from(table: Table) -> int:
    """The first column of numbers; those before it are labels."""
    return len(table.grouping.task) + len(table.grouping.method)


def _runs_title(table: Table) -> str:
    """Seeds, unless a row pools runs that differ in more."""
    return "runs" if table.grouping.pooled else "seeds"


def _joined(sections: Sequence[list[Line]]) -> list[Line]:
    return [line for section in sections for line in section]


def _with_rules(sections: Sequence[list[str]], rule: str) -> list[str]:
    """Sections one after another, a rule between them where they rank anything."""
    apart = any(len(section) > 1 for section in sections)
    first, *others = sections
    return [*first, *(line for section in others for line in ([rule] if apart else []) + section)]


def _caption(table: Table) -> str:
    """What all runs share: `algorithm=fedprox dataset=digits rounds=20`."""
    common = table.grouping.common.items()
    return " ".join(f"{key.removesuffix('.name')}={value_text(value)}" for key, value in common)


def _footnotes(table: Table, *, star: bool = False) -> list[str]:
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
    if star and any(row.best for row in table.rows):
        notes.append(f"*: the best by {table.metric}.")
    if table.grouping.together:
        notes.append(f"Also different, together with the labels: {_listed(table.grouping.together)}.")
    if table.grouping.pooled:
        notes.append(f"A row pools runs that differ in: {_listed(table.grouping.pooled)}.")
    if len(table.commits) > 1:
        notes.append(f"The runs come from {len(table.commits)} commits: {_listed([c[:10] for c in table.commits])}.")
    return notes


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _lines(lines: Sequence[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"
