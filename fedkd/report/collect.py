"""Find the run directories below some folders and read them."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import OmegaConf

from fedkd.core.errors import DataError

METRICS, SUMMARY, CONFIG, VERSIONS = "metrics.jsonl", "summary.json", "config.yaml", "versions.json"

Value: TypeAlias = str | int | float | bool | None
Metrics: TypeAlias = Mapping[str, float]

# Where a run keeps things, how it is watched, whether it was interrupted: nothing of this can move a result.
UNTOLD = (
    *("hydra", "logger", "plugins", "checkpoint", "resume", "store", "objective", "table"),
    *("paths", "output_dir", "dataset.root", "public.root"),
)


@dataclass(frozen=True)
class Run:
    """What one run directory holds."""

    path: Path
    config: Mapping[str, Value]  # flat: "algorithm.mu"; only what can move a result
    metrics: Sequence[Metrics]  # one per evaluated round; a number that was not finite is missing
    summary: Mapping[str, Any] | None  # None while unfinished
    commit: str | None  # of the project's checkout, when known
    written: float  # when its results were last written

    @property
    def seed(self) -> Value:
        return self.config.get("seed")

    @property
    def finished(self) -> bool:
        return self.summary is not None


@dataclass
class Collection:
    """The runs found, each in one place."""

    finished: list[Run] = field(default_factory=list)
    unfinished: list[Run] = field(default_factory=list)
    unreadable: dict[Path, str] = field(default_factory=dict)  # directory -> what is wrong with it


def collect(folders: Iterable[Path]) -> Collection:
    """Read every run at or below `folders`; one that cannot be read does not stop the others."""
    found = Collection()
    for path in find_runs(folders):
        try:
            run = read_run(path)
        except DataError as error:
            found.unreadable[path] = str(error)
        else:
            (found.finished if run.finished else found.unfinished).append(run)
    return found


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The run directories at or below `folders`, each once."""
    folders = list(folders)
    found = {folder: list(_runs_below(folder)) for folder in folders}
    problems = [
        f"{folder} holds no run: there is no {METRICS} in it or below it." if folder.is_dir() else _no_folder(folder)
        for folder in folders
        if not found[folder]
    ]
    if problems:
        raise DataError("\n".join([*problems, "Give the directory of a run or of a sweep, e.g. fedkd-report outputs."]))
    once = {path.resolve(): path for paths in found.values() for path in paths}
    return list(once.values())


def _no_folder(path: Path) -> str:
    return f"{path} is a file, not a directory." if path.exists() else f"{path} does not exist."


def _runs_below(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders.sort()
        if METRICS in files:
            folders.clear()  # a run holds no other run, but may hold thousands of files
            yield Path(here)


def read_run(path: Path) -> Run:
    """Read one run directory; a summary is what makes it finished."""
    summary = read_json(path / SUMMARY) if (path / SUMMARY).exists() else None
    config = read_config(path / CONFIG)
    versions = read_json(path / VERSIONS) if (path / VERSIONS).exists() else {}
    return Run(
        path=path,
        config={key: value for key, value in config.items() if not _untold(key, config)},
        metrics=read_metrics(path / METRICS, finished=summary is not None),
        summary=summary,
        commit=versions.get("commit"),
        written=(path / (METRICS if summary is None else SUMMARY)).stat().st_mtime,
    )


def _untold(key: str, config: Mapping[str, Value]) -> bool:
    if key.endswith(".seed"):
        return config[key] == config.get("seed")  # a part that was handed the run's own seed
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in UNTOLD)


def read_config(path: Path) -> dict[str, Value]:
    """A YAML file as flat keys: {"algorithm": {"mu": 1}} is {"algorithm.mu": 1}."""
    try:
        return dict(_flat(OmegaConf.to_container(OmegaConf.load(path))))
    except FileNotFoundError:
        raise DataError(f"{path.name} is missing") from None
    except Exception as error:  # YAML's errors and OmegaConf's share no base
        raise DataError(f"{path.name} is not a config: {str(error).partition(chr(10))[0]}") from None


def _flat(node: Any, key: str = "") -> Iterator[tuple[str, Value]]:
    if isinstance(node, dict):
        for name, child in node.items():
            yield from _flat(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, f"[{', '.join(map(str, node))}]" if isinstance(node, list) else node


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path.name} is not a JSON object")
    return content


def read_metrics(path: Path, *, finished: bool) -> list[Metrics]:
    """The lines of a metrics.jsonl; the last one may be in the making while the run is not finished."""
    lines = path.read_bytes().splitlines()
    metrics: list[Metrics] = []
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
        except ValueError as error:
            if number == len(lines) and not finished:
                break  # the run was killed, or is still going, in the middle of this line
            raise DataError(f"line {number} of {path.name} is not JSON: {error}") from None
        metrics.append({name: value for name, value in found.items() if value is not None})  # null: not finite
    if finished and not metrics:
        raise DataError(f"{path.name} is empty, though {SUMMARY} says that the run finished")
    return metrics


def drop_reruns(runs: Iterable[Run]) -> tuple[list[Run], list[Run]]:
    """Of runs with one config and one seed keep the newest (finished before unfinished): (kept, dropped)."""
    kept: dict[frozenset[tuple[str, Value]], Run] = {}
    dropped = []
    for run in sorted(runs, key=lambda run: (run.finished, run.written, run.path)):
        identity = frozenset(run.config.items())
        if identity in kept:
            dropped.append(kept.pop(identity))
        kept[identity] = run
    return sorted(kept.values(), key=lambda run: run.path), dropped
