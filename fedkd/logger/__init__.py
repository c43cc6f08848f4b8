"""Who hears of a run: metrics.jsonl always, the console and Weights & Biases by choice."""

import os

from fedkd.logger.base import RECORD, Logger, LoggerConfig, Loggers, Run, WandbConfig
from fedkd.logger.jsonl import JsonLines

__all__ = ["Logger", "LoggerConfig", "Loggers", "Run", "WandbConfig", "make"]


def make(config: LoggerConfig) -> Loggers:
    """The loggers a config asks for; WANDB_MODE=disabled has the last word on W&B."""
    from fedkd.logger.console import Console  # these two import rich, which the settings' schema need not wait for
    from fedkd.logger.wandb import Wandb

    loggers: dict[str, Logger] = {RECORD: JsonLines()}
    if "disabled" not in (config.wandb.mode, os.environ.get("WANDB_MODE")):
        loggers["wandb"] = Wandb(config.wandb, say=config.console)
    if config.console:
        loggers["console"] = Console()  # last: its clock starts with the first round, its summary comes before uploads
    return Loggers(loggers)
