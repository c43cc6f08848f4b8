"""The numbers of one run's directory, by name."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedkd.logger.jsonl import METRICS, VIEWS, read
from fedkd.report.collect import SUMMARY, VERSIONS, Metrics, read_json, read_metrics

PLAN, CLIENTS, CLASSES = "plan.json", "clients.csv", "classes.csv"
OVER_CLIENTS: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "std": stdev, "worst": min}


@dataclass(frozen=True)
class Outcome:
    """What a run, or its plan, has left; everything is read when it is first asked for."""

    directory: Path

    @property
    def finished(self) -> bool:
        return (self.directory / SUMMARY).exists()

    @property
    def planned(self) -> bool:
        return (self.directory / PLAN).exists()

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        return self._json(SUMMARY)

    @cached_property
    def _plan(self) -> Mapping[str, Any]:
        return self._json(PLAN)

    @cached_property
    def commit(self) -> str | None:
        return (self._json(VERSIONS) or self._plan.get("versions", {})).get("commit")

    @cached_property
    def metrics(self) -> Sequence[Metrics]:
        path = self.directory / METRICS
        return read_metrics(path, finished=self.finished) if path.exists() else []

    @cached_property
    def clients(self) -> list[dict[str, str]]:
        path = self.directory / CLIENTS
        return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []

    @cached_property
    def classes(self) -> list[list[int]]:
        """Samples of each class, client by client."""
        path = self.directory / CLASSES
        _, *rows = csv.reader(path.read_text().splitlines()) if path.exists() else [[]]
        return [[int(count) for count in row] for row in rows]

    @cached_property
    def costs(self) -> dict[str, float]:
        """What is known of a run without training: what it sends, how large its models are."""
        found = {
            f"comm/{name}/{unit}": number
            for name, way in (("total", "unicast"), ("broadcast", "broadcast"))
            for unit, number in self._plan.get("comm", {}).get("total", {}).get(way, {}).items()
        }
        found |= {name: value for name, value in _last(self.summary).items() if name.startswith("comm/")}
        about = self.summary if "models" in self.summary else self._plan
        for name, key in (("params/model", "params"), ("params/held", "held")):
            if sizes := [model[key] for model in about.get("models", {}).values() if key in model]:
                found[name] = max(sizes)
        return found

    def number(self, metric: str, pick: str = "last") -> float | None:
        """A metric of the last or best round, a number of the summary, of one client, or of a view; None: not there."""
        kind, _, rest = metric.partition("/")
        if metric in self.costs:
            return self.costs[metric]
        if kind == "clients":
            return self._of_clients(*rest.rsplit("/", 1))
        if kind == "view":
            return self._of_view(rest)
        names = (f"{pick}/{metric}", f"last/{metric}", metric)
        return next((float(self.summary[name]) for name in names if self.summary.get(name) is not None), None)

    def per_client(self, column: str) -> list[float | None]:
        """A column of clients.csv; None where a client was not judged."""
        return [float(row[column]) if row.get(column) else None for row in self.clients]

    def _of_clients(self, column: str, which: str) -> float | None:
        values = self.per_client(column)
        if which in OVER_CLIENTS:
            judged = [value for value in values if value is not None]
            return OVER_CLIENTS[which](judged) if len(judged) > (which == "std") else None
        return values[int(which)] if which.isdecimal() and int(which) < len(values) else None

    def _of_view(self, path: str) -> float | None:
        """A number of the last line that shows the view: `grid/0/2`."""
        found = re.fullmatch(r"(.+?)((?:/\d+)+)", path)
        lines = read(self.directory / VIEWS) if (self.directory / VIEWS).exists() else []
        seen = [line[found[1]]["values"] for line in lines if found and found[1] in line]
        if not seen or not found:
            return None
        value: Any = seen[-1]
        for place in map(int, found[2].split("/")[1:]):
            if not isinstance(value, list) or place >= len(value):
                return None
            value = value[place]
        return float(value)

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(self.directory / name) if (self.directory / name).exists() else {}


def _last(summary: Mapping[str, Any]) -> dict[str, float]:
    return {name.removeprefix("last/"): value for name, value in summary.items() if name.startswith("last/")}
