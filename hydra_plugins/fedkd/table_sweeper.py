"""`hydra/sweeper: fedkd_table`: runs a paper's table, `fedkd -m +table=cgpfl/table1`.

Hydra imports this file whenever any application of it starts, so it imports next to nothing.
"""

import sys
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class TableSweeperConf:
    """The config node `hydra.sweeper`."""

    _target_: str = "hydra_plugins.fedkd.table_sweeper.TableSweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="fedkd_table", node=TableSweeperConf, provider="fedkd")


class TableSweeper(Sweeper):
    """Expands a table into jobs and hands them to whatever launcher is chosen."""

    def __init__(self) -> None:
        self.hydra_context: HydraContext | None = None
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> None:
        """Run what is missing and report; the command ends with 1 if a run failed, with 2 if what is asked is wrong."""
        import signal

        from fedkd.core.errors import FedkdError, Incomplete
        from hydra_plugins.fedkd._table import TableSweep

        assert self.config is not None
        assert self.hydra_context is not None
        try:
            whole = TableSweep(self.config, self.hydra_context, self.task_function, arguments).run()
        except FedkdError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            sys.exit(2)
        except (KeyboardInterrupt, SystemExit) as stop:  # between runs, or in one, which has saved itself
            print("interrupted; the same command goes on from here")
            sys.exit(stop.code if isinstance(stop, SystemExit) else 128 + signal.SIGINT)
        if not whole:
            raise Incomplete
