"""Whole runs, small enough to test with: composed and run in this process, or started as the command `fedkd`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fedkd import schema
from fedkd.cli import CONF
from fedkd.run import run

TINY = ("dataset=digits", "rounds=2", "clients=4", "local.steps=2", "logger=quiet")


def composed(*overrides: str) -> dict[str, Any]:
    """The config of a tiny run, as `fedkd` would hand it over."""
    schema.register(CONF)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [*TINY, *overrides])
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def ran(directory: Path, *overrides: str) -> float | None:
    return run(composed(*overrides), directory, overrides)


def resumed(directory: Path, *overrides: str) -> float | None:
    return run(composed(f"resume={directory}", *overrides), directory, (f"resume={directory}", *overrides))


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


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def record(directory: Path) -> Any:
    """What two equal runs have in common, to the last digit: all of metrics.jsonl and summary.json but the times."""
    lines = [*metrics(directory), json.loads((directory / "summary.json").read_text())]
    return [{name: value for name, value in line.items() if "time/" not in name} for line in lines]
