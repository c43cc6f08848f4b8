"""The command `fedkd`: Hydra composes the config, `fedkd.run` does the work."""

import importlib
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fedkd import schema
from fedkd.core.errors import ConfigError, FedkdError, Incomplete, unknown
from fedkd.core.signals import Interrupted

HERE = Path(__file__).resolve().parent
ERROR = "error.txt"  # why a job of a sweep failed
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"  # inside an installed wheel, or beside it


def main() -> None:
    """Run one experiment, or a sweep with -m."""
    sys.path.insert(0, os.getcwd())  # a user's plugin lies where they work
    try:
        schema.register(CONF, plugins_in(sys.argv[1:]))
    except (FedkdError, ModuleNotFoundError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except Incomplete:
        raise
    except SystemExit as stop:
        if stop.code == 1 and (hints := misspelt(sys.argv[1:])):
            print(*hints, sep="\n", file=sys.stderr)
        raise


def job(cfg: DictConfig) -> float | None:
    """One run; returns its headline metric, so that a sweeper can optimise it."""
    from fedkd.run import run

    hydra_config = HydraConfig.get()
    for plugin in cfg.plugins:  # in a launcher's process nobody has imported them yet
        importlib.import_module(plugin)
    sweep = hydra_config.mode == RunMode.MULTIRUN
    directory = Path(hydra_config.runtime.output_dir)
    group = Path(hydra_config.sweep.dir).name if sweep else None
    overrides = list(hydra_config.overrides.task)
    table = cfg.get("table")
    try:
        if strangers := schema.strangers(cfg):
            raise ConfigError(strangers)
        if table is not None and table.part is None:
            raise ConfigError(f"{table.name} is a table, which is a sweep: add -m (fedkd -m +table=cgpfl/table1).")
        return run(plain(cfg), directory, overrides, group if table is None else f"{table.name}/{group}")
    except Exception as error:
        if sweep:  # Hydra reports it with the others; in another process its traceback would be lost
            (directory / ERROR).write_text(traceback.format_exc())
        if sweep or not isinstance(error, FedkdError):
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as stop:
        sys.exit(128 + stop.number)


def plain(cfg: DictConfig, **values: Any) -> dict[str, Any]:
    """What a run goes by, in plain containers; of which table it is a part cannot move its results."""
    known: dict[str, Any] = {"table": None, **values}
    config: Any = OmegaConf.to_container(OmegaConf.merge(cfg, known), resolve=True, throw_on_missing=True)
    return dict(config)


def plugins_in(arguments: list[str]) -> list[str]:
    """The modules of plugins=[...]: they must be imported before Hydra looks for their entries."""
    found: list[str] = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.lstrip("+") == "plugins":
            found += re.findall(r"[\w.]+", value)
    return found


def misspelt(arguments: list[str]) -> list[str]:
    """Near names for what Hydra could not find."""
    groups = schema.options(CONF)
    hints, chosen, keys = [], [], []
    for argument in arguments:
        key, equals, value = argument.lstrip("+~").partition("=")
        if key not in groups:
            keys += [key] if equals and not key.startswith(("hydra", "-")) else []
        elif re.fullmatch(r"[\w,/-]+", value):  # names, not glob(*) or choice(a, b)
            wrong = [name for name in value.split(",") if name not in groups[key]]
            hints += [unknown(key, name, groups[key]) for name in wrong]
            chosen += [] if wrong else [argument.partition(",")[0]]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", chosen)
    except HydraException:  # a choice that is refused for another reason, which Hydra has told
        return hints
    return hints + [hint for key in keys for hint in schema.no_such_key(config, key, list(groups))]
