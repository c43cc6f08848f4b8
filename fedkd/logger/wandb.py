"""Weights & Biases: online where a login exists, offline elsewhere; never a prompt, never a hang."""

import csv
import os
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fedkd.logger.base import INTERRUPTED, Run, WandbConfig
from fedkd.logger.console import shown

INIT_TIMEOUT, FINISH_TIMEOUT = 20, 30  # seconds to wait for the server, and for the upload of what is left


class Wandb:
    """One W&B run, kept in the run's directory. W&B is imported when it starts, not before: that takes seconds."""

    def __init__(self, config: WandbConfig, say: bool = True) -> None:
        self.config, self.say = config, say

    def start(self, run: Run) -> None:
        # W&B's reports about itself hold up the end of the process where the server does not answer.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.directory = run.directory
        self.settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_TIMEOUT,
            finish_timeout=FINISH_TIMEOUT,
            finish_timeout_raises=True,
        )
        self.mode, self.why = self._choose_mode()
        try:
            self.run = self._open(run)
        except wandb.Error as error:  # e.g. no right to write to this project
            wandb.teardown()  # else the run's id counts as in use
            self.mode, self.why = "offline", str(error).strip()
            self.run = self._open(run)
        if self.mode == "online":
            self._tell(f"W&B: {self.run.url}")
        self.run.define_metric("round", hidden=True)
        for metrics in ("acc/*", "loss/*", "comm/*", "time/*"):
            self.run.define_metric(metrics, step_metric="round")
        self.run.define_metric("acc_by_comm/*", step_metric="comm/total/params")

    def advance(self, round: int, ledger: Mapping[str, float]) -> None:
        """Evaluated rounds carry comm/* along; the others are not worth a row."""

    def log(self, metrics: Mapping[str, float]) -> None:
        names = {f"acc_by_comm/{model}": f"acc/{model}/mean" for model in ("personal", "shared")}
        by_comm = {name: metrics[same] for name, same in names.items() if same in metrics}
        # W&B ignores a step it has already, so a round that a resumed run does again is not there twice.
        self.run.log({**metrics, **by_comm}, step=int(metrics["round"]), commit=True)

    def show(self, round: int, views: Mapping[str, Any]) -> None:
        """Pictures are uploaded at the end."""

    def state(self) -> dict[str, Any]:
        return {"id": self.run.id}

    def finish(self, summary: Mapping[str, Any]) -> None:
        import wandb

        media: dict[str, Any] = {path.stem: wandb.Image(str(path)) for path in sorted(self.directory.glob("*.png"))}
        if (clients := self.directory / "clients.csv").exists():
            columns, *rows = ([_value(cell) for cell in row] for row in csv.reader(clients.read_text().splitlines()))
            media["clients"] = wandb.Table(columns, rows, allow_mixed_types=True)
        scalars = dict(summary)
        if kinds := scalars.pop("communication"):
            media["communication"] = wandb.Table(list(kinds[0]), [list(kind.values()) for kind in kinds])
        self.run.summary.update(scalars)
        try:
            self.run.log(media)  # tables ask the server, which may be gone by now
        finally:
            self._close(exit_code=0)

    def stop(self, why: str) -> None:
        if why == INTERRUPTED:
            self.run.mark_preempting()
        self.run.summary.update({"stopped": why})
        self._close(exit_code=1)

    def _choose_mode(self) -> tuple[Any, str]:
        """The mode, and why it is not online if that was to be."""
        import wandb

        wishes = (self.config.mode, wandb.setup(self.settings).settings.mode)  # the latter: WANDB_MODE, or its default
        for mode in ("disabled", "offline"):
            if mode in wishes:
                return mode, ""
        return ("offline", why) if (why := _refusal()) else ("online", "")

    def _open(self, run: Run) -> Any:
        import wandb

        known = run.resumed.get("id")
        return wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            dir=run.directory,
            id=known,
            resume="allow" if known and self.mode == "online" else None,
            name=run.name,
            group=run.group,
            job_type=run.job_type,
            tags=sorted({*run.tags, *self.config.tags}),
            config=run.config,
            mode=self.mode,
            settings=self.settings,
        )

    def _close(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)
        if self.mode == "online":
            self._tell(f"  W&B    {self.run.url}")
        elif self.mode == "offline":
            folder = shown(Path(self.run.dir).parent)
            self._tell(f"  W&B    wandb sync {shlex.quote(folder)}" + (f"  # {self.why}" if self.why else ""))

    def _tell(self, text: str) -> None:
        if self.say:
            print(text, flush=True)


@cache  # the jobs of a sweep must not each wait for a server that does not answer
def _refusal() -> str:
    """Why W&B cannot be online; empty if it can."""
    import wandb

    try:
        return "" if wandb.login(prompt=False, verify=True) else "no login found"
    except wandb.errors.AuthenticationError as error:
        return str(error)


def _value(cell: str) -> Any:
    """A number where the cell is one; None where it is empty."""
    try:
        return float(cell)
    except ValueError:
        return cell or None
