"""The terminal: a live bar, or plain lines where nobody watches; a summary at the end."""

import os
import shlex
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing import parent_process
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console as Screen
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from fedkd.logger.base import INTERRUPTED, Run

# Rows of the summary's first table: the mean over clients, and how they spread around it.
ACCURACIES = {
    "personal": ("acc/personal/mean", "acc/personal/std", "acc/personal/worst"),
    "shared": ("acc/shared/mean", "acc/shared/std", "acc/shared/worst"),
    "shared, global": ("acc/shared/global", "", ""),
}
TOTALS = {"in all": "last/comm/total", "in all, each broadcast once": "last/comm/broadcast"}


class Console:
    """Shows a run to whoever started it.

    In a terminal one bar is redrawn in place. Elsewhere (a pipe, CI, SLURM, one of several worker processes) every
    evaluated round is a plain line.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self.screen = Screen(file=file, highlight=False, markup=False, emoji=False)
        self.live = self.screen.file.isatty() and not self.screen.is_dumb_terminal and parent_process() is None

    def start(self, run: Run) -> None:
        self.run, self.began = run, time.monotonic()
        self.latest: dict[str, float] = {"round": run.start}
        self.bar = Progress(
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            console=self.screen,
            refresh_per_second=4,  # enough for the eye, and nothing that training would notice
            expand=True,
            disable=not self.live,
        )
        self.task = self.bar.add_task("", total=run.rounds, completed=run.start)
        if not self.live:
            self._say(f"{run.name}: {run.rounds} rounds, files in {shown(run.directory)}")
        self.bar.start()

    def advance(self, round: int, ledger: Mapping[str, float]) -> None:
        self.latest |= {**ledger, "round": round}
        self._redraw()

    def log(self, metrics: Mapping[str, float]) -> None:
        self.latest |= metrics
        self._redraw()
        if not self.live:
            whose = f"{self.run.name}: " if self.run.group else ""  # the jobs of a sweep may share one log
            rounds = str(self.run.rounds)
            self._say(f"{whose}round {metrics['round']:{len(rounds)}.0f}/{rounds}  {self._status()}")

    def show(self, round: int, views: Mapping[str, Any]) -> None:
        """Pictures are drawn at the end."""

    def state(self) -> dict[str, Any]:
        return {}

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.bar.stop()
        since = f" ({self.run.rounds - self.run.start} since the resume)" if self.run.start else ""
        self._say(f"\n{self.run.name}: {self.run.rounds} rounds{since} in {clock(self._elapsed())}")
        self.screen.print(accuracy(summary))
        self.screen.print(communication(summary) if summary["communication"] else "  communication: none\n")
        directory = shown(self.run.directory)
        self._say(
            f"  files  {directory}\n"
            f"  next   fedkd-report {shlex.quote(directory)}\n"
            "         fedkd -m algorithm=fedavg,fedmd seed=0,1,2"
        )

    def stop(self, why: str) -> None:
        self.bar.stop()
        directory, done = shown(self.run.directory), f"{self.latest['round']:.0f} of {self.run.rounds}"
        how = INTERRUPTED if why == INTERRUPTED else "stopped"  # an error tells its own story
        self._say(f"\n{self.run.name}: {how} after round {done}, {clock(self._elapsed())}\n  files  {directory}")
        if why == INTERRUPTED:
            self._say(f"  next   fedkd resume={shlex.quote(directory)}")

    def _redraw(self) -> None:
        if self.live:
            self.bar.update(self.task, completed=int(self.latest["round"]), description=self._status())

    def _say(self, text: str) -> None:
        self.screen.print(text, soft_wrap=True)  # a path must not be broken, so that it can be copied

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def _status(self) -> str:
        """`personal 91.2%  shared 87.4%  12.3 M sent  0:01:23 left`, as far as it is known."""
        now, parts = self.latest, []
        for model in ("personal", "shared"):
            if (value := now.get(f"acc/{model}/mean")) is not None:
                parts.append(f"{model} {value:.1%}")
        parts.append(f"{human(now.get('comm/total/params', 0))} sent")
        done, ahead = now["round"] - self.run.start, self.run.rounds - now["round"]
        if done and ahead:
            parts.append(f"{clock(self._elapsed() / done * ahead)} left")
        return "  ".join(parts)


def accuracy(summary: Mapping[str, Any]) -> Table:
    """What the models reach in the last round, how that spreads over the clients, and the best so far."""
    table = _table("accuracy", f"round {summary['last/round']}", "std", "worst client", "best", "in round")
    for label, (mean, std, worst) in ACCURACIES.items():
        names = (f"last/{mean}", f"last/{std}", f"last/{worst}", f"best/{mean}")
        if names[0] in summary:
            when = str(summary.get("best/round", "")) if label == "personal" else ""  # best/round is about these
            table.add_row(label, *(percent(summary.get(name)) for name in names), when)
    return table


def communication(summary: Mapping[str, Any]) -> Table:
    """What crossed the network, by kind and in all."""
    table = _table("communication", "params", "bytes")
    for kind in summary["communication"]:
        table.add_row(f"{kind['way']:4} {kind['what']}", human(kind["params"]), human(kind["bytes"], "B"))
    table.add_section()
    for label, name in TOTALS.items():
        table.add_row(label, human(summary[f"{name}/params"]), human(summary[f"{name}/bytes"], "B"))
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column(first)
    for head in numbers:
        table.add_column(head, justify="right")
    return table


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def human(number: float, unit: str = "") -> str:
    """12345678 is `12.3 M`: three digits are what one reads."""
    prefixes, prefix = iter("kMGTPE"), ""
    while number >= 999.5:
        number, prefix = number / 1000, next(prefixes)
    return f"{number:.3g} {prefix}{unit}".rstrip()


def clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def shown(path: Path) -> str:
    """A path as seen from here, where that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)
