"""Who hears of a run: metrics.jsonl always, the console and Weights & Biases by choice."""

import os

from fedkd.logger.base import RECORD, Logger, LoggerConfig, Loggers, Run, WandbConfig
from fedkd.logger.console import Console
from fedkd.logger.jsonl import JsonLines
from fedkd.logger.wandb import Wandb

__all__ = ["Logger", "LoggerConfig", "Loggers", "Run", "WandbConfig", "make"]


def make(config: LoggerConfig) -> Loggers:
    """The loggers a config asks for; WANDB_MODE=disabled has the last word on W&B."""
    loggers: dict[str, Logger] = {RECORD: JsonLines()}
    if "disabled" not in (config.wandb.mode, os.environ.get("WANDB_MODE")):
        loggers["wandb"] = Wandb(config.wandb, say=config.console)
    if config.console:
        loggers["console"] = Console()  # last: its clock starts with the first round, its summary comes before uploads
    return Loggers(loggers)
