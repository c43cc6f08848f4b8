"""Progress over many runs, read off their directories: wherever a launcher runs them, there they leave their files."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from rich.console import Console as Screen
from rich.progress import BarColumn, Progress, TextColumn

from fedkd.logger.console import clock

PERIOD = 1.0  # seconds between two looks
TAIL = 1 << 14  # bytes; more than a line of metrics.jsonl has


class Watched(NamedTuple):
    """A run to wait for."""

    directory: Path
    rounds: int
    result: str  # the file that says that it is done


class Sight(NamedTuple):
    """What has become of the runs so far."""

    done: list[str]
    failed: list[str]
    running: list[str]
    rounds: int  # of all runs together

    @property
    def over(self) -> int:
        return len(self.done) + len(self.failed)


class Watch:
    """Looks at runs until they are over.

    Parameters
    ----------
    runs : name -> where it is and how long it takes.
    error : the file that says that a run has failed.
    """

    def __init__(self, runs: Mapping[str, Watched], error: str) -> None:
        self.runs, self.error = runs, error
        self.total = sum(run.rounds for run in runs.values())
        self.first, self.began = self.look().rounds, time.monotonic()

    def look(self) -> Sight:
        found = Sight([], [], [], 0)
        for name, (directory, rounds, result) in self.runs.items():
            at = rounds
            if (directory / result).exists():
                found.done.append(name)
            elif (directory / self.error).exists():
                found.failed.append(name)
            elif at := rounds_in(directory / "metrics.jsonl"):
                found.running.append(name)
            found = found._replace(rounds=found.rounds + at)
        return found

    def left(self, seen: Sight) -> str:
        """The time left at the pace so far: `0:12:30 left`, or nothing while there is none."""
        done, ahead = seen.rounds - self.first, self.total - seen.rounds
        return f"{clock((time.monotonic() - self.began) / done * ahead)} left" if done > 0 < ahead else ""

    @contextmanager
    def shown(self, *, live: bool) -> Iterator[None]:
        """Meanwhile show a bar, or a line for every run that is over where nobody watches or others write too."""
        screen = Screen(highlight=False, markup=False, emoji=False)
        live = live and sys.stdout.isatty() and not screen.is_dumb_terminal
        columns = (TextColumn("{task.fields[over]}"), BarColumn(bar_width=None), TextColumn("{task.description}"))
        bar = Progress(*columns, console=screen, expand=True, refresh_per_second=4, disable=not live)
        task = bar.add_task("", total=self.total, over=f"0/{len(self.runs)}")
        told: set[str] = set()

        def show() -> None:
            seen = self.look()
            doing = ", ".join([*seen.running[:2], *(["..."] if seen.running[2:] else [])])
            failed = f"{len(seen.failed)} failed" if seen.failed else ""
            status = "  ".join(filter(None, (doing, failed, self.left(seen))))
            bar.update(task, completed=seen.rounds, description=status, over=f"{seen.over}/{len(self.runs)}")
            for names, what in ((seen.done, "done"), (seen.failed, "failed")):
                for name in (name for name in names if name not in told and not live):
                    told.add(name)
                    screen.print(f"[{len(told)}/{len(self.runs)}] {name}: {what}  {self.left(seen)}", soft_wrap=True)

        over = Event()

        def keep_showing() -> None:
            while not over.wait(PERIOD):
                show()

        thread = Thread(target=keep_showing, daemon=True)
        with bar:
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
                show()


def rounds_in(metrics: Path) -> int:
    """The last round of a metrics.jsonl that may be in the making."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            lines = [b"", *file.read().split(b"\n")]
        return int(json.loads(lines[-2])["round"])  # the last one is empty, or half written
    except (OSError, ValueError):
        return 0
