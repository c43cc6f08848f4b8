"""What a run tells its loggers, and how it tells several at once."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

log = logging.getLogger("fedkd")
T = TypeVar("T")

MODES = ("auto", "online", "offline", "disabled")
INTERRUPTED = "interrupted"  # the `why` of a run that was saved and can be resumed
RECORD = "jsonl"  # the one logger a run cannot do without


@dataclass
class WandbConfig:
    """Weights & Biases: the config node `logger.wandb`.

    Parameters
    ----------
    mode : `auto` and `online` are online where a login exists and offline elsewhere; `offline` and `disabled` hold
        whether they are said here or by WANDB_MODE.
    project, entity : where runs go; entity None is the login's own.
    tags : beside those the run has by itself.
    """

    mode: str = "auto"
    project: str = "fedkd"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class LoggerConfig:
    """Who hears of a run beside `metrics.jsonl`: the config node `logger`."""

    name: str = "wandb"
    console: bool = True
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def problems(self) -> list[str]:
        """What is wrong with these settings, if anything."""
        if self.wandb.mode in MODES:
            return []
        return [f"logger.wandb.mode={self.wandb.mode} does not exist; there are {', '.join(MODES)}."]


class Run(NamedTuple):
    """What a logger needs to know of a run."""

    directory: Path
    config: dict[str, Any]  # resolved, in plain containers
    rounds: int  # in all
    start: int  # rounds already done: 0, or where a resumed run goes on
    resumed: Mapping[str, Any]  # what the logger's `state` was at the checkpoint; empty for a fresh run
    group: str | None  # the sweep's name
    name: str
    job_type: str  # the algorithm's name
    tags: list[str]


class Logger(Protocol):
    """Hears of a run: `start`, then rounds, then either `finish` or `stop`, whatever happens."""

    def start(self, run: Run) -> None: ...

    def advance(self, round: int, ledger: Mapping[str, float]) -> None:
        """After every round: comm/* so far. Must cost next to nothing."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """After an evaluated round, which is metrics["round"]."""

    def show(self, round: int, views: Mapping[str, Any]) -> None:
        """After an evaluated round of a method that has more to show: name -> View."""

    def state(self) -> dict[str, Any]:
        """What a resumed run hands back as `Run.resumed`, as JSON."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run is done and its files are written."""

    def stop(self, why: str) -> None:
        """The run ended early: INTERRUPTED, or what went wrong."""


class Loggers:
    """Several loggers as one, opened in order and closed in reverse; their states are keyed by name.

    A logger that fails is dropped with a warning, and the run goes on without it. Only the record may stop a run: with
    a full disk there is nothing left to run for.
    """

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self.loggers = dict(loggers)

    def start(self, run: Run) -> None:
        self._each(lambda name, logger: logger.start(run._replace(resumed=run.resumed.get(name, {}))))

    def advance(self, round: int, ledger: Mapping[str, float]) -> None:
        self._each(lambda _, logger: logger.advance(round, ledger))

    def log(self, metrics: Mapping[str, float]) -> None:
        self._each(lambda _, logger: logger.log(metrics))

    def show(self, round: int, views: Mapping[str, Any]) -> None:
        self._each(lambda _, logger: logger.show(round, views))

    def state(self) -> dict[str, Any]:
        return self._each(lambda _, logger: logger.state())

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._each(lambda _, logger: logger.finish(summary), backwards=True)

    def stop(self, why: str) -> None:
        self._each(lambda _, logger: logger.stop(why), backwards=True)

    def _each(self, call: Callable[[str, Logger], T], backwards: bool = False) -> dict[str, T]:
        answers, items = {}, list(self.loggers.items())
        for name, logger in reversed(items) if backwards else items:
            try:
                answers[name] = call(name, logger)
            except Exception as error:
                if name == RECORD:
                    raise
                del self.loggers[name]
                log.warning("the run goes on without its %s logger: %r", name, error)
        return answers
