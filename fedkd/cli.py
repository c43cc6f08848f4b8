"""The command `fedkd`: Hydra composes the config, `fedkd.run` does the work."""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fedkd import schema
from fedkd.core.errors import FedkdError, unknown
from fedkd.core.signals import Interrupted

HERE = Path(__file__).resolve().parent
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
    except SystemExit as stop:
        if stop.code == 1 and (hints := misspelt(sys.argv[1:])):
            print(*hints, sep="\n", file=sys.stderr)
        raise


def job(cfg: DictConfig) -> float | None:
    """One run; returns its headline metric, so that a sweeper can optimise it."""
    from fedkd.run import run

    hydra_config = HydraConfig.get()
    sweep = hydra_config.mode == RunMode.MULTIRUN
    directory = Path(hydra_config.runtime.output_dir)
    config: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    overrides = list(hydra_config.overrides.task)
    try:
        return run(config, directory, overrides, group=Path(hydra_config.sweep.dir).name if sweep else None)
    except FedkdError as error:
        if sweep:  # Hydra reports it with the others
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as stop:
        sys.exit(128 + stop.number)


def plugins_in(arguments: list[str]) -> list[str]:
    """The modules of plugins=[...]: they must be imported before Hydra looks for their entries."""
    found: list[str] = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.lstrip("+") == "plugins":
            found += [name.strip() for name in value.strip("[]").split(",") if name.strip()]
    return found


def misspelt(arguments: list[str]) -> list[str]:
    """Near names for what Hydra could not find."""
    groups = {path.name: sorted(f.stem for f in path.rglob("*.yaml")) for path in CONF.iterdir() if path.is_dir()}
    for group, registry in schema.REGISTRIES.items():
        groups[group] = sorted({*groups[group], *registry})
    keys = [*groups, *schema.Root.__dataclass_fields__]
    hints = []
    for argument in arguments:
        key, equals, value = argument.lstrip("+~").partition("=")
        root = key.partition(".")[0]
        if not equals or root == "hydra" or root.startswith(("hydra/", "-")):
            continue
        if root not in keys:
            hints.append(unknown("the key", root, keys))
        elif key in groups:
            hints += [unknown(key, v, groups[key]) for v in value.split(",") if Path(v).stem not in groups[key]]
    return hints
