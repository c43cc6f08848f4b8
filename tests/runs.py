"""Whole runs, small enough to test with: composed and run in this process, or started as the command `fedkd`."""

import csv
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from fedkd import schema
from fedkd.cli import CONF
from fedkd.run import run

TINY = (  # whatever the defaults are
    *("dataset=digits", "partition=dirichlet", "public=holdout", "model=auto", "algorithm=fedmd", "logger=quiet"),
    *("rounds=2", "clients=4", "local.steps=2"),
)


def composed(*overrides: str) -> dict[str, Any]:
    """The config of a tiny run, as `fedkd` would hand it over.

    Hydra composes what is chosen from groups, once for all tests; single values are merged in, which is much faster.
    """
    given = dict(override.split("=", 1) for override in (*TINY, *overrides))
    groups = {path.name for path in CONF.iterdir()}
    chosen = tuple(f"{key}={value}" for key, value in given.items() if key.lstrip("+") in groups)
    values = [f"{key}={value}" for key, value in given.items() if key.lstrip("+") not in groups]
    config = OmegaConf.merge(choices(*chosen), OmegaConf.from_dotlist(values))
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


@cache
def choices(*overrides: str) -> DictConfig:
    """What Hydra composes of them alone."""
    _register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))


@cache
def _register() -> None:
    schema.register(CONF)


def npz(file: Path, shape: tuple[int, ...] = (4, 4), samples: int = 240, **arrays: Any) -> Path:
    """A dataset of three classes that can be learnt, for `dataset=npz`: 240 training and 60 test images."""
    rng = np.random.default_rng(0)
    content = {}
    for part, count in (("train", samples), ("test", samples // 4)):
        labels = np.arange(count) % 3
        bright = 40 * labels.reshape(-1, *(1 for _ in shape))
        content[f"{part}_images"] = (rng.integers(0, 128, (count, *shape)) + bright).astype(np.uint8)
        content[f"{part}_labels"] = labels
    np.savez(file, **{**content, **arrays})
    return file


def ran(directory: Path, *overrides: str) -> float | None:
    """A run in this process, without its pictures, which take longer than all the rest."""
    with patch.multiple("fedkd.run", draw_curves=Mock(), draw_partition=Mock()):
        return run(composed(*overrides), directory, overrides)


def resumed(directory: Path, *overrides: str) -> float | None:
    return ran(directory, f"resume={directory}", *overrides)


def command(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    """`fedkd` with a tiny config, started in `directory`."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedkd", *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def summary(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


def table(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def most_memory(*, afresh: bool = False) -> int:
    """The most bytes this process has held, or holds now if the count is to begin `afresh`."""
    here = Path("/proc/self")
    if not here.exists():
        pytest.skip("memory is read from /proc")
    if afresh:
        (here / "clear_refs").write_text("5")
    (line,) = (line for line in (here / "status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def record(directory: Path) -> Any:
    """What two equal runs have in common, to the last digit: all of metrics.jsonl and summary.json but the times."""
    return [untimed(line) for line in (*metrics(directory), summary(directory))]


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if "time/" not in name}
