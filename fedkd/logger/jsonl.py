"""metrics.jsonl: one JSON object per evaluated round, to the last digit."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkd.core.errors import CheckpointError
from fedkd.logger.base import Run

FILE = "metrics.jsonl"


class JsonLines:
    """The record of a run. Each line is on the disk before the run goes on."""

    def start(self, run: Run) -> None:
        self.path, self.offset = run.directory / FILE, run.resumed.get("offset", 0)
        with self.path.open("ab") as file:
            if (size := file.tell()) < self.offset:
                raise CheckpointError(
                    f"{self.path} has {size} bytes, but had {self.offset} when the checkpoint was written.\n"
                    "Put the file back, or start the run anew without resume."
                )
            file.truncate(self.offset)  # what a killed run wrote after its checkpoint is computed again

    def advance(self, round: int, ledger: Mapping[str, float]) -> None:
        """Only evaluated rounds are recorded."""

    def log(self, metrics: Mapping[str, float]) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with self.path.open("ab") as file:
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            self.offset = file.tell()

    def state(self) -> dict[str, Any]:
        return {"offset": self.offset}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing is left to write."""

    def stop(self, why: str) -> None:
        """Nothing is left to write."""


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a line that a killed run left half written is not one."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
