"""A grid of texts as aligned text, Markdown or LaTeX."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MISSING = "–"

Line = list[str]


class Best(str):
    """A cell to stand out."""

    __slots__ = ()


@dataclass(frozen=True)
class Grid:
    """Texts in rows and columns, as every format shows them.

    Parameters
    ----------
    labels : so many columns hold words; those after them hold numbers.
    groups : (title, columns) over the header, from the left, the labels included; empty: none.
    notes : what a reader must know; `star` explains the mark of the best where it is one.
    """

    caption: str
    header: Line
    sections: list[list[Line]]
    labels: int
    notes: list[str] = field(default_factory=list)
    star: str = ""
    groups: list[tuple[str, int]] = field(default_factory=list)

    @property
    def lines(self) -> list[Line]:
        return [line for section in self.sections for line in section]


def to_text(grid: Grid) -> str:
    """Aligned columns, for a terminal or a pipe; a star marks the best."""
    sections = _shown(grid.sections, str, "* {}".format)
    widths = [max(map(len, column)) for column in zip(grid.header, *_joined(sections), strict=True)]
    above = _widen(widths, grid.groups)
    rule = "  ".join("-" * width for width in widths)

    def aligned(cells: Line) -> str:
        padded = [
            cell.rjust(width) if place >= grid.labels else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    body = _with_rules([[aligned(line) for line in section] for section in sections], rule)
    star = [grid.star] if grid.star and any(isinstance(cell, Best) for line in grid.lines for cell in line) else []
    return _lines([grid.caption, "", *above, aligned(grid.header), rule, *body, "", *grid.notes, *star])


def to_markdown(grid: Grid) -> str:
    """A pipe table; the best is bold."""

    def escape(text: str) -> str:
        return text.replace("|", r"\|")

    header = [escape(title) for title in grid.header]
    for title, place in _starts(grid.groups):  # a pipe table has no spanning cells
        header[place] = f"{escape(title)}<br>{header[place]}" if title else header[place]
    alignment = ["--:" if place >= grid.labels else ":--" for place in range(len(header))]
    body = _joined(_shown(grid.sections, escape, "**{}**".format))
    rows = [f"| {' | '.join(line)} |" for line in (header, alignment, *body)]
    return _lines([grid.caption, "", *rows, "", *(f"- {note}" for note in grid.notes)])


def to_latex(grid: Grid) -> str:
    """A booktabs tabular; the best is bold."""
    sections = _shown(grid.sections, escape_latex, r"\textbf{{{}}}".format)
    body = [[f"{' & '.join(line)} \\\\" for line in section] for section in sections]
    spans = [rf"\multicolumn{{{width}}}{{c}}{{{escape_latex(title)}}}" for title, width in grid.groups]
    return _lines(
        [
            *(f"% {line}" for line in (grid.caption, *grid.notes)),
            r"% \usepackage{booktabs}",
            rf"\begin{{tabular}}{{{'l' * grid.labels}{'r' * (len(grid.header) - grid.labels)}}}",
            r"\toprule",
            *([f"{' & '.join(spans)} \\\\"] if spans else []),
            rf"{' & '.join(map(escape_latex, grid.header))} \\",
            r"\midrule",
            *_with_rules(body, r"\midrule"),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


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
    "−": "$-$",
    "Δ": r"$\Delta$",
    "τ": r"$\tau$",
    "λ": r"$\lambda$",
}


def escape_latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


def _shown(
    sections: Sequence[list[Line]], escape: Callable[[str], str], emphasise: Callable[[str], str]
) -> list[list[Line]]:
    def show(cell: str) -> str:
        return emphasise(escape(cell)) if isinstance(cell, Best) else escape(cell)

    return [[[show(cell) for cell in line] for line in section] for section in sections]


def _starts(groups: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Each group's title and first column."""
    return [(title, sum(width for _, width in groups[:place])) for place, (title, _) in enumerate(groups)]


def _widen(widths: list[int], groups: Sequence[tuple[str, int]]) -> list[str]:
    """The line of the groups' titles, for which `widths` makes room."""
    parts = []
    for (title, start), (_, count) in zip(_starts(groups), groups, strict=True):
        own = range(start, start + count)
        lacking = len(title) - sum(widths[place] for place in own) - 2 * (count - 1)
        widths[own[-1]] += max(0, lacking)
        parts.append(title.center(sum(widths[place] for place in own) + 2 * (count - 1)))
    return ["  ".join(parts).rstrip()] if groups else []


def _joined(sections: Sequence[list[Line]]) -> list[Line]:
    return [line for section in sections for line in section]


def _with_rules(sections: Sequence[list[str]], rule: str) -> list[str]:
    """Sections one after another, a rule between them where they rank anything."""
    apart = any(len(section) > 1 for section in sections)
    first, *others = sections
    return [*first, *(line for section in others for line in ([rule] if apart else []) + section)]


def _lines(lines: Sequence[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"
