"""One run from a composed config to its directory of results."""

import csv
import importlib
import importlib.metadata
import json
import math
import os
import pkgutil
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import fedkd.examples
from fedkd import __version__, build, checkpoint
from fedkd import plan as planning
from fedkd.core.errors import CheckpointError, ConfigError, unknown
from fedkd.core.signals import Interrupted
from fedkd.data.partition import Assignment
from fedkd.engine import Engine, State
from fedkd.evaluate import Evaluation
from fedkd.federation.ledger import Row
from fedkd.federation.population import Population
from fedkd.logger import make
from fedkd.logger.base import INTERRUPTED, Run
from fedkd.logger.jsonl import read
from fedkd.report.plots import draw_curves, draw_partition
from fedkd.report.views import draw_views

FREE = ("resume", "device", "executor", "logger", "checkpoint", "dry_run")  # what a resumed run may change


def run(
    config: dict[str, Any], directory: Path, overrides: Sequence[str] = (), group: str | None = None
) -> float | None:
    """Train, evaluate, write everything; returns the metric named by `objective` (None for a dry run)."""
    config, directory, resuming = resumed(config, directory, overrides)
    if config["example"] is not None:
        return example(config, directory, overrides)
    parts = build.parts(config)
    data = build.data(config, parts.dataset, parts.partition, parts.public)
    if config["dry_run"]:
        plan = planning.plan(parts, config, data)
        write_json(directory / "plan.json", {**plan, "config": config, "versions": versions()})
        if parts.logger.console:
            planning.show(plan, directory)
        return None
    engine = Engine(
        parts.algorithm,
        build.world(parts, config, data),
        parts.settings,
        directory,
        make(parts.logger),
        config,
    )
    saved = None
    if resuming and checkpoint.path_in(directory).exists():  # else it was killed before its first one, and starts anew
        saved = checkpoint.load(directory, parts.algorithm)
        hold_to(saved["config"], config, {*config}, directory)
    if not resuming:
        write_setting(directory, config, overrides)
        data.assignment.save(directory / "partition.npz")
    state = engine.start() if saved is None else engine.resume(saved)
    engine.loggers.start(
        Run(
            directory=directory,
            config=config,
            rounds=config["rounds"],
            start=state.round,
            resumed={} if saved is None else saved["loggers"],
            group=group,
            name=f"{parts.algorithm.name}-{parts.dataset.name}-{config['seed']}",
            job_type=parts.algorithm.name,
            tags=[parts.dataset.name, parts.partition.name, config["model"]["name"]],
        )
    )
    try:
        summary = simulate(engine, state, data.assignment)
    except BaseException as error:
        engine.loggers.stop(INTERRUPTED if isinstance(error, Interrupted) else repr(error))
        raise
    return headline(summary, config["objective"])


def example(config: dict[str, Any], directory: Path, overrides: Sequence[str]) -> float:
    """A paper's own small example: its numbers and its picture; returns the last number."""
    names = [module.name for module in pkgutil.iter_modules(fedkd.examples.__path__)]
    if config["example"] not in names:
        raise ConfigError(unknown("example", config["example"], names))
    write_setting(directory, config, overrides)
    numbers = importlib.import_module(f"fedkd.examples.{config['example']}").run(config, directory)
    write_json(directory / "summary.json", {"example": config["example"], "seed": config["seed"], **numbers})
    if config["logger"]["console"]:
        print(*(f"{name:<30}{value:.4g}" for name, value in numbers.items()), f"files in {directory}", sep="\n")
    return float(list(numbers.values())[-1])


def simulate(engine: Engine, state: State, assignment: Assignment) -> dict[str, Any]:
    """Run the rounds that are left and write the results; returns the summary."""
    began, config, directory = time.perf_counter(), engine.config, engine.directory
    verdict = engine.run(state)
    history = read(directory / "metrics.jsonl")
    summary = summarise(history, state, config)
    summary["time/total"] = time.perf_counter() - began
    summary |= planning.models(engine.algorithm, engine.world.population)
    write_results(directory, engine.world.population, verdict, state.ledger.rows, assignment)
    title = f"{config['algorithm']['name']} on {config['dataset']['name']}, {config['partition']['name']} split"
    draw_curves(directory / "curves.png", history, f"{title}, seed {config['seed']}")
    if (directory / "views.jsonl").exists():
        draw_views(directory, read(directory / "views.jsonl"))
    write_json(directory / "summary.json", summary)
    engine.loggers.finish(summary)
    return summary


def resumed(config: dict[str, Any], directory: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Path, bool]:
    """The config and directory a run goes by, and whether it was begun before."""
    asked = config["resume"]
    if asked is None:
        return config, directory, False
    if asked == "auto":
        if not checkpoint.path_in(directory).exists():
            return config, directory, False
        named = list(config)
    else:
        directory = Path(asked)
        if not (directory / "config.yaml").exists():
            raise CheckpointError(
                f"resume={asked}: there is no run in that directory (config.yaml is missing).\n"
                "Name the directory of a run, one that holds its config.yaml and metrics.jsonl."
            )
        named = [re.split(r"[=@]", override.lstrip("+~"))[0].replace("/", ".") for override in overrides]
    own = yaml.safe_load((directory / "config.yaml").read_text())
    hold_to(own, config, {key.partition(".")[0] for key in named}, directory)
    for key in named:
        if key.partition(".")[0] in FREE:
            adopt(own, config, key)
    return {**own, "resume": None}, directory, True


def adopt(own: dict[str, Any], config: Mapping[str, Any], key: str) -> None:
    """Take one value over, `logger` or `logger.console`, and nothing beside it."""
    *nodes, last = key.split(".")
    for node in nodes:
        own, config = own[node], config[node]
    own[last] = config[last]


def hold_to(own: Mapping[str, Any], config: Mapping[str, Any], named: Set[str], directory: Path) -> None:
    """Refuse to resume a run with another config than its own, as far as keys are named."""
    if other := differing(own, config, named):
        raise CheckpointError(
            f"{directory} was run with another config; these differ: {', '.join(other)}.\n"
            f"A resumed run keeps its own config: fedkd resume={directory} (only {', '.join(FREE[1:-1])} may change)."
        )


def differing(own: Mapping[str, Any], config: Mapping[str, Any], keys: Set[str]) -> list[str]:
    """Those of `keys` that can move a result and are not as the run `own` has them."""
    return sorted(key for key in keys - {*FREE} if key not in config or config[key] != own.get(key))


def finished(directory: Path, config: Mapping[str, Any]) -> bool | None:
    """Whether a directory's run of that config is done; None: what lies there, if anything, is another run."""
    file, result = ("plan.json", "plan.json") if config["dry_run"] else ("config.yaml", "summary.json")
    if not (directory / file).exists():
        return None
    found = yaml.safe_load((directory / file).read_text())  # JSON is YAML
    own = found["config"] if config["dry_run"] else found
    return None if differing(own, config, {*own, *config}) else (directory / result).exists()


def summarise(history: Sequence[Mapping[str, Any]], state: State, config: Mapping[str, Any]) -> dict[str, Any]:
    """The last value of every metric, the best of every accuracy and loss."""
    summary: dict[str, Any] = {
        "algorithm": config["algorithm"]["name"],
        "dataset": config["dataset"]["name"],
        "seed": config["seed"],
        "rounds": state.round,
    }
    for name in history[-1]:
        values = [line[name] for line in history if line.get(name) is not None]
        if name.startswith(("acc/", "loss/")) and not name.endswith("/std") and values:  # a spread has no best
            summary[f"best/{name}"] = max(values) if name.startswith("acc/") else min(values)
        summary[f"last/{name}"] = history[-1][name]
    judged = [line for line in history if line.get("acc/personal/mean") is not None]
    if judged:
        summary["best/round"] = max(judged, key=lambda line: line["acc/personal/mean"])["round"]
    summary["dropped_clients"] = sorted(state.dropped)
    summary["communication"] = state.ledger.by_kind()
    return summary


def headline(summary: Mapping[str, Any], objective: str) -> float:
    try:
        value = summary[f"last/{objective}"]
        return math.nan if value is None else float(value)  # null in the files: not finite
    except KeyError:
        known = sorted(key.removeprefix("last/") for key in summary if key.startswith("last/"))
        raise ConfigError(
            f"objective={objective} is not a metric of this run. There are: {', '.join(known)}."
        ) from None


def write_setting(directory: Path, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """What is known before the first round; a resumed run finds it there."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in (checkpoint.path_in(directory), directory / "summary.json"):  # of an earlier run in this directory
        stale.unlink(missing_ok=True)
    write_json(directory / "versions.json", versions())
    write_json(directory / "command.json", {"overrides": list(overrides)})
    write_text(directory / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))


def write_results(
    directory: Path, population: Population, verdict: Evaluation, rows: Sequence[Row], assignment: Assignment
) -> None:
    labels = population.images.labels.cpu().numpy()
    classes = np.zeros((len(population), population.images.classes), np.int64)
    np.add.at(classes, (assignment.client, labels[assignment.index]), 1)
    draw_partition(directory / "partition.png", classes)
    write_csv(directory / "classes.csv", range(classes.shape[1]), classes.tolist())
    write_csv(directory / "ledger.csv", Row._fields, rows)
    judged = dict(zip(verdict.clients.tolist(), range(len(verdict.clients)), strict=True))
    names = list(population.nets)
    table = []
    for client in range(len(population)):
        at = judged.get(client)
        scores = [(s.accuracy[at], s.loss[at]) if s is not None and at is not None else ("", "")
                  for s in (verdict.personal, verdict.shared)]  # fmt: skip
        sizes = (population.train.sizes[client], population.validation.sizes[client], population.test.sizes[client])
        held = int((classes[client] > 0).sum())
        table.append((client, names[population.member[client]], *sizes, held, *scores[0], *scores[1]))
    columns = ("client", "architecture", "train", "validation", "test", "classes",
               "acc_personal", "loss_personal", "acc_shared", "loss_shared")  # fmt: skip
    write_csv(directory / "clients.csv", columns, table)


def versions() -> dict[str, str | None]:
    """What the numbers depend on beside the config."""
    packages = ("torch", "torchvision", "numpy", "scikit-learn", "hydra-core", "omegaconf", "wandb")
    found: dict[str, str | None] = {name: importlib.metadata.version(name) for name in packages}
    root = Path(__file__).resolve().parent.parent
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = None
    if (root / ".git").exists():
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    return {
        "fedkd": __version__,
        "commit": commit,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        **found,
    }


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_csv(path: Path, columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> None:
    with open(path.with_suffix(".new"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    os.replace(path.with_suffix(".new"), path)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)
