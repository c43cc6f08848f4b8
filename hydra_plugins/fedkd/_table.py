"""What of a table is to be run, running it, and what came of it."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, read_write

from fedkd.cli import ERROR, plain
from fedkd.core.errors import ConfigError
from fedkd.logger.console import shown
from fedkd.report.cli import report_table
from fedkd.run import FREE, finished, write_json
from fedkd.table import Cell, Job, PaperTable
from fedkd.watch import Watch, Watched

ROOT = Path("outputs/tables")
UNTOLD = (*FREE, "table", "plugins", "objective", "store")  # these move no number, so they name no folder
INSTEAD = {
    "seed": "the seeds of a table are table.seeds=[0,1,2]",
    "resume": "type the same command again: finished runs are kept, interrupted ones go on",
}


class Run(NamedTuple):
    """A job in its place."""

    job: Job
    directory: Path
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.job.folder

    @property
    def dry(self) -> bool:
        return bool(self.config["dry_run"])

    @property
    def result(self) -> str:
        return "plan.json" if self.dry else "summary.json"

    @property
    def occupied(self) -> bool:
        """Whether a run lies in its place already; a plan stands in nobody's way."""
        return not self.dry and (self.directory / "config.yaml").exists()


class Typed(NamedTuple):
    """An override of the command line."""

    line: str
    part: str  # of the config: `local` of local.lr=0.1
    sweep: bool


class TableSweep:
    """One `fedkd -m +table=...`."""

    def __init__(
        self, config: DictConfig, context: HydraContext, task_function: TaskFunction, arguments: Sequence[str]
    ) -> None:
        self.config, self.context, self.task_function = config, context, task_function
        if config.get("table") is None:
            raise ConfigError("hydra/sweeper=fedkd_table runs tables: name one, as in fedkd -m +table=cgpfl/table1.")
        table: Any = OmegaConf.to_object(config.table)
        self.table: PaperTable = table
        parsed = OverridesParser.create(config_loader=context.config_loader).parse_overrides(list(arguments))
        self.typed = [Typed(line, _part(o), o.is_sweep_override()) for line, o in zip(arguments, parsed, strict=True)]
        if problems := [*self.table.problems(), *_problems(self.typed)]:
            raise ConfigError(problems)
        self.folder = self._folder()

    def run(self) -> bool:
        """Run what is missing, write the report; whether everything asked for is there."""
        cells = len(self.table.chosen)
        print(f"{self.table.name}: {cells} cells, in {shown(self.folder)}", flush=True)  # composing them takes a while
        runs = self._runs()
        done = {run.name: finished(run.directory, run.config) for run in runs}
        missing = [run for run in runs if not done[run.name]]
        aside = [_set_aside(run.directory) for run in missing if done[run.name] is None and run.occupied]
        self._announce(runs, missing, aside)
        self.table.save(self.folder)
        write_json(self.folder / "command.json", {"overrides": [typed.line for typed in self.typed]})
        failed = self._run(missing) if missing else {}
        report_table(self.folder)
        if failed:
            reasons = [f"{shown(self.folder / name)}: {reason}" for name, reason in failed.items()]
            print(f"\n{len(failed)} of {len(missing)} runs failed (more in their {ERROR}):")
            print(indent("\n".join(reasons), "  "), "The same command tries them again.", sep="\n")
        return not failed

    def _folder(self) -> Path:
        """A folder for each scale and for what is typed beside it, so that none overwrites another's runs."""
        if any(override.startswith("hydra.sweep.dir=") for override in self.config.hydra.overrides.hydra):
            return Path(self.config.hydra.sweep.dir)
        lines = [typed.line.lstrip("+") for typed in self.typed if typed.part not in UNTOLD]
        told = [line for line in lines if line != f"experiment={self.table.name}"]  # where the table stands in one
        return ROOT / self.table.name / re.sub(r"[^\w.,=~-]", "_", ",".join([self.table.scale, *told]))

    def _runs(self) -> list[Run]:
        """Every job with its config; one cell's differ by the seed, so each cell is composed once."""
        composed: dict[Cell, DictConfig] = {}
        runs = []
        for job in self.table.jobs():
            if job.cell not in composed:
                whole = self.context.config_loader.load_sweep_config(self.config, self._overrides(job))
                composed[job.cell] = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
            runs.append(Run(job, self.folder / job.folder, plain(composed[job.cell], seed=job.seed)))
        return [run for run in runs if not run.dry or run.job.seed == self.table.seeds[0]]  # plans know no chance

    def _overrides(self, job: Job) -> list[str]:
        """What is typed has the last word, but for a job's seed and place."""
        typed = [typed.line for typed in self.typed if not typed.line.startswith("table.")]
        place = [f"hydra.sweep.dir='{self.folder}'", f"hydra.sweep.subdir='{job.folder}'", f"table.part='{job.folder}'"]
        return ["logger.console=false", *job.overrides, *typed, f"seed={job.seed}", "resume=auto", *place]

    def _announce(self, runs: Sequence[Run], missing: Sequence[Run], aside: Sequence[Path]) -> None:
        kept = f", {len(runs) - len(missing)} kept" if len(missing) < len(runs) else ""
        print(f"{len(runs)} runs{kept}")
        if aside:
            print("set aside, as they were run with another config:", *map(shown, aside), sep="\n  ")

    def _run(self, missing: Sequence[Run]) -> dict[str, str]:
        """Hand the jobs to the launcher; name -> reason of those that left no result."""
        for run in missing:
            for stale in (run.result, ERROR):
                (run.directory / stale).unlink(missing_ok=True)
        with read_write(self.config):
            self.config.hydra.sweep.dir = str(self.folder)
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=self.context, task_function=self.task_function, config=self.config
        )
        watched = {r.name: Watched(r.directory, 1 if r.dry else r.config["rounds"], r.result) for r in missing}
        silent = not any(run.config["logger"]["console"] for run in missing)
        try:
            with _quiet_hydra(), Watch(watched, ERROR).shown(live=silent):
                returned = launcher.launch([self._overrides(run.job) for run in missing], initial_job_idx=0)
            reasons = {run.name: _reason(job) for run, job in zip(missing, returned, strict=True)}
        except Exception as error:  # of the launcher itself: a worker was killed, say
            reasons = dict.fromkeys(watched, repr(error))
        return {run.name: reasons[run.name] for run in missing if not (run.directory / run.result).exists()}


def _problems(typed: Sequence[Typed]) -> list[str]:
    """What can be typed for a run, but not for a table."""
    found = [f"{line}: a table is a sweep already; run it once for every value." for line, _, sweep in typed if sweep]
    return found + [f"{line}: {INSTEAD[part]}." for line, part, _ in typed if part in INSTEAD]


def _part(override: Override) -> str:
    return re.split(r"[.@/]", str(override.key_or_group))[0]


def _set_aside(directory: Path) -> Path:
    """Hours of work are not overwritten because a preset has changed."""
    number = next(n for n in range(1, 10**6) if not directory.with_name(f"{directory.name}~{n}").exists())
    return directory.rename(directory.with_name(f"{directory.name}~{number}"))


def _reason(job: JobReturn) -> str:
    error = job._return_value
    return f"{type(error).__name__}: {error}" if job.status == JobStatus.FAILED else "it left no result"


@contextmanager
def _quiet_hydra() -> Iterator[None]:
    """Without the launchers' lines on every job: there is a bar."""
    loggers = [logging.getLogger(name) for name in ("hydra", "hydra_plugins")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
