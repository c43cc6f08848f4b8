"""metrics.jsonl and views.jsonl: one JSON object per evaluated round, to the last digit."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkd.core.errors import CheckpointError
from fedkd.logger.base import Run

METRICS, VIEWS = "metrics.jsonl", "views.jsonl"


class JsonLines:
    """The record of a run. Each line is on the disk before the run goes on."""

    def start(self, run: Run) -> None:
        self._paths = {name: run.directory / name for name in (METRICS, VIEWS)}
        self._offsets = {name: run.resumed.get(name, 0) for name in self._paths}
        for name, path in self._paths.items():
            if path.exists() or name == METRICS:
                self._cut(path, self._offsets[name])

    def _cut(self, path: Path, offset: int) -> None:
        """What a killed run wrote after its checkpoint is computed again."""
        with path.open("ab") as file:
            if (size := file.tell()) < offset:
                raise CheckpointError(
                    f"{path} has {size} bytes, but had {offset} when the checkpoint was written.\n"
                    "Put the file back, or start the run anew without resume."
                )
            file.truncate(offset)

    def advance(self, round: int, ledger: Mapping[str, float]) -> None:
        """Only evaluated rounds are recorded."""

    def log(self, metrics: Mapping[str, float]) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._append(METRICS, row)

    def show(self, round: int, views: Mapping[str, Any]) -> None:
        shown = {name: {**view._asdict(), "values": view.values.tolist()} for name, view in views.items()}
        self._append(VIEWS, {"round": round, **shown})

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with self._paths[name].open("ab") as file:
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            self._offsets[name] = file.tell()

    def state(self) -> dict[str, Any]:
        return dict(self._offsets)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing is left to write."""

    def stop(self, why: str) -> None:
        """Nothing is left to write."""


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of such a file; a line that a killed run left half written is not one."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
