"""A paper's table: rows and columns of runs, and what the paper prints in each cell."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fedkd.core.errors import DataError, unknown

FILE = "table.yaml"  # the definition, in the folder of a table's runs
PAPER = "paper"  # the scale that changes nothing
PICKS = ("last", "best")
UNITS = {
    **{"percent": 0.01, "fraction": 1.0, "number": 1.0, "seconds": 1.0},
    **{"thousand": 1e3, "million": 1e6, "billion": 1e9, "kB": 1e3, "MB": 1e6, "GB": 1e9},
}


@dataclass
class Line:
    """A row or a column: its title, what it sets, and how its numbers are measured where that is its own affair.

    `scales`, of a row: a scale's name -> what shrinks this row further.
    """

    title: str = "???"
    overrides: list[str] = field(default_factory=list)
    metric: str | None = None
    pick: str | None = None
    unit: str | None = None
    scales: dict[str, list[str]] = field(default_factory=dict)


class Cell(NamedTuple):
    """The short names of a row and a column."""

    row: str
    column: str


class Gauge(NamedTuple):
    """How a cell's number is read off a run."""

    metric: str
    pick: str  # last | best: of which round
    unit: str

    @property
    def scale(self) -> float:
        """What one of the paper's units is in ours."""
        return UNITS[self.unit] if self.unit in UNITS else float(self.unit)


class Printed(NamedTuple):
    """What the paper prints."""

    value: float
    spread: float | None = None


class Job(NamedTuple):
    """One run: the cells it serves are those with its overrides."""

    cell: Cell  # the first of them, which names its directory
    seed: int
    overrides: tuple[str, ...]

    @property
    def folder(self) -> str:
        return f"{self.cell.row}/{self.cell.column}/seed={self.seed}"


@dataclass
class PaperTable:
    """The config node `table`; `conf/table` holds the presets.

    Parameters
    ----------
    name, caption, reference : what it is called here, what it shows, where it is printed.
    metric, pick, unit : how a number is measured and shown, where neither its column nor its row says otherwise.
    departures : sentences on what differs from the paper, and why.
    row, column : short name -> title and overrides, in the paper's order.
    cell : row -> column -> further overrides of that cell alone.
    paper : row -> column -> as printed: a number, [mean, spread], or null.
    users : row -> column -> what is printed for each client; none is one of ours, so nothing is measured beside.
    scales : name -> overrides that shrink every cell; `paper` changes nothing.
    rows, columns, seeds, scale : what of it to run; null is all.
    part : the job at hand; the sweeper sets it.
    """

    name: str = "???"
    caption: str = ""
    reference: str = ""
    metric: str = "acc/personal/mean"
    pick: str = PICKS[0]
    unit: str = "percent"
    seeds: list[int] = field(default_factory=lambda: [0])
    departures: list[str] = field(default_factory=list)
    row: dict[str, Line] = field(default_factory=dict)
    column: dict[str, Line] = field(default_factory=dict)
    cell: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    paper: dict[str, dict[str, Any]] = field(default_factory=dict)
    users: dict[str, dict[str, Any]] = field(default_factory=dict)
    scales: dict[str, list[str]] = field(default_factory=dict)
    rows: list[str] | None = None
    columns: list[str] | None = None
    scale: str = PAPER
    part: str | None = None

    def problems(self) -> list[str]:
        """Names that do not exist, wherever they are used; all of them."""
        wanted = {
            "table.rows": (self.rows or (), self.row),
            "table.columns": (self.columns or (), self.column),
            "table.scale": ((self.scale,), (PAPER, *self.scales)),
            **{f"table.row.{name}.scales": (row.scales, self.scales) for name, row in self.row.items()},
            **{f"table.{key}": (part, self.row) for key, part in self._by_row.items()},
            **{f"table.{key}.{row}": (line, self.column)
               for key, part in self._by_row.items() for row, line in part.items()},
        }  # fmt: skip
        found = [unknown(key, name, list(known)) for key, (names, known) in wanted.items()
                 for name in names if name not in known]  # fmt: skip
        gauges = {self.gauge(cell) for cell in self.cells}
        found += [unknown("pick", pick, PICKS) for pick in sorted({g.pick for g in gauges} - {*PICKS})]
        found += [unknown("unit", unit, list(UNITS)) for unit in sorted({g.unit for g in gauges}) if not _is_unit(unit)]
        return found + ([] if self.seeds else ["table.seeds=[] leaves nothing to run: name at least one seed."])

    @property
    def _by_row(self) -> dict[str, Mapping[str, Mapping[str, Any]]]:
        return {"cell": self.cell, "paper": self.paper, "users": self.users}

    @cached_property
    def cells(self) -> list[Cell]:
        """All of them, row by row."""
        return [Cell(row, column) for row in self.row for column in self.column]

    @property
    def chosen(self) -> list[Cell]:
        """Those of the rows and columns asked for."""
        rows, columns = ({*(asked or every)} for asked, every in ((self.rows, self.row), (self.columns, self.column)))
        return [cell for cell in self.cells if cell.row in rows and cell.column in columns]

    def overrides(self, cell: Cell) -> tuple[str, ...]:
        """What makes a cell's run: its column, its row, itself, then the scale, for all and for the row."""
        column, row = self.column[cell.column], self.row[cell.row]
        own = self.cell.get(cell.row, {}).get(cell.column, [])
        shrunk = (line for scales in (self.scales, row.scales) for line in scales.get(self.scale, []))
        return (*column.overrides, *row.overrides, *own, *shrunk)

    @cached_property
    def homes(self) -> dict[Cell, Cell]:
        """Cell -> the first of the whole table with the same overrides: its run serves both.

        Of the whole table, so that a run's place does not depend on what is asked for beside it.
        """
        first: dict[tuple[str, ...], Cell] = {}
        return {cell: first.setdefault(self.overrides(cell), cell) for cell in self.cells}

    def job(self, cell: Cell, seed: int) -> Job:
        """The run behind a cell."""
        home = self.homes[cell]
        return Job(home, seed, self.overrides(home))

    def jobs(self) -> list[Job]:
        """The runs behind the chosen cells, each once; seed by seed, so that a whole table is there early."""
        return list(dict.fromkeys(self.job(cell, seed) for seed in self.seeds for cell in self.chosen))

    def gauge(self, cell: Cell) -> Gauge:
        """How the cell is measured: as its column says, else its row, else the table."""
        lines = (self.column[cell.column], self.row[cell.row], self)
        return Gauge(*(next(filter(None, (getattr(line, key) for line in lines))) for key in Gauge._fields))

    def printed(self, cell: Cell) -> Printed | None:
        value = self.paper.get(cell.row, {}).get(cell.column)
        return None if value is None else Printed(*value) if isinstance(value, Sequence) else Printed(value)

    def save(self, folder: Path) -> None:
        """The definition without the choice: a table is run in parts."""
        folder.mkdir(parents=True, exist_ok=True)
        whole = {key: value for key, value in asdict(self).items() if key not in ("rows", "columns", "part")}
        (folder / FILE).write_text(yaml.safe_dump(whole, sort_keys=False, allow_unicode=True), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "PaperTable":
        """The definition beside a table's runs."""
        try:
            node = yaml.safe_load((folder / FILE).read_text(encoding="utf-8"))
            lines = {key: {name: Line(**line) for name, line in node[key].items()} for key in ("row", "column")}
            return cls(**{**node, **lines})
        except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{folder / FILE} does not define a table: {error}") from None


def _is_unit(unit: str) -> bool:
    try:
        return unit in UNITS or float(unit) > 0
    except ValueError:
        return False
