"""Structured configs, so that a typo fails when the config is composed; each entry's is made from its dataclass."""

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from fedkd.core.declared import dataclasses_in, registered_in
from fedkd.core.errors import unknown
from fedkd.logger.base import LoggerConfig
from fedkd.table import PaperTable


@dataclass
class Eval:
    every: int = 1
    clients: int | None = None
    sent: bool = False


@dataclass
class Checkpoint:
    every: int | None = 10


@dataclass
class Executor:
    name: str = "auto"
    chunk: int | None = None
    workers: int | None = None


@dataclass
class Root:
    """The root of the config; conf/config.yaml explains the keys."""

    rounds: int = 20
    clients: int = 20
    participation: float = 1.0
    sampling: str = "uniform"
    seed: int = 0
    device: str = "auto"
    precision: str = "fp32"
    store: str = "memory"
    on_nan: str = "stop"
    objective: str = "acc/personal/mean"
    example: str | None = None
    resume: str | None = None
    dry_run: bool = False
    plugins: list[str] = field(default_factory=list)
    table: PaperTable | None = None
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    local: Any = None
    dataset: Any = None
    partition: Any = None
    public: Any = None
    model: Any = None
    algorithm: Any = None
    executor: Any = None
    logger: Any = None


def register(conf: Path, plugins: Sequence[str] = ()) -> None:
    """Sign up every schema with Hydra, and plugins' entries as options of their group."""
    for plugin in plugins:
        importlib.import_module(plugin)
    # Hydra copies its store with every look at a group, 200 times for --help; what it reads it copies once more
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    store = ConfigStore.instance()
    store.store(group="schema", name="root", node=Root)
    store.store(group="schema/executor", name="executor", node=Executor)
    store.store(group="schema/logger", name="logger", node=LoggerConfig)
    store.store(group="schema/local", name="local", node=twin(dataclasses_in("fedkd.core.optim")["Local"]))
    store.store(group="schema/dataset", name="dataset", node=twin(dataclasses_in("fedkd.data.datasets")["Dataset"]))
    store.store(group="schema/public", name="public", node=twin(dataclasses_in("fedkd.data.public")["Public"]))
    for group, entries in (registries() if plugins else declarations()).items():
        for name, entry in entries.items():
            store.store(group=f"schema/{group}", name=name, node=twin(entry, name))
            if not (conf / group / f"{name}.yaml").exists():
                store.store(group=group, name=name, node=twin(entry, name))
    resolvers: dict[str, Callable[..., Any]] = {
        "architectures": _architectures,
        "run_directory": _run_directory,
        "choices": lambda: _choices(conf),
    }
    for resolver, function in resolvers.items():
        OmegaConf.register_new_resolver(resolver, function, replace=True)


def declarations() -> dict[str, Mapping[str, type]]:
    """What a config can choose by name, read off the source: composing a config needs no torch."""
    packages = {"algorithm": "fedkd.algorithms", "partition": "fedkd.data", "model": "fedkd.models"}
    return {group: registered_in(package) for group, package in packages.items()}


def registries() -> dict[str, Mapping[str, type]]:
    """The same with what plugins have signed up, which have imported torch anyway."""
    from fedkd.algorithms.base import ALGORITHMS
    from fedkd.data.partition import PARTITIONS
    from fedkd.models.net import MODELS

    return {"algorithm": ALGORITHMS, "partition": PARTITIONS, "model": MODELS}


def twin(cls: type, name: str | None = None) -> type:
    """A mutable copy of a frozen dataclass (OmegaConf makes a frozen one's node read-only), with the entry's name."""
    hints = get_type_hints(cls)
    copies: list[tuple[str, Any, Any]] = [] if name is None else [("name", str, field(default=name))]
    for item in dataclasses.fields(cls):
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        if isinstance(default, list | tuple):
            kept: Any = field(default_factory=partial(list, default))
        else:
            kept = field(default="???" if default is dataclasses.MISSING else default)
        copies.append((item.name, hints[item.name], kept))
    return dataclasses.make_dataclass(f"{cls.__name__}Config", copies)


def _architectures(algorithm: str, mixed: Sequence[str], single: str) -> list[str]:
    """The members of model=auto: several where the algorithm allows it, one where it averages parameters, features."""
    from fedkd.algorithms.base import ALGORITHMS  # asked when a run begins, which needs torch anyway

    if algorithm not in ALGORITHMS:
        return list(mixed)
    method = ALGORITHMS[algorithm]
    return [single] if method.one_architecture or method.one_feature_size else list(mixed)


def _run_directory(resume: str | None, fresh: str) -> str:
    """A run is resumed in place."""
    return resume if resume and resume != "auto" and Path(resume).is_dir() else fresh


def options(conf: Path) -> dict[str, list[str]]:
    """The groups and their options: the files of conf/, and what plugins have signed up."""
    groups, signed_up = sorted(path for path in conf.iterdir() if path.is_dir()), ConfigStore.instance().repo
    files = {g.name: [f.relative_to(g).as_posix() for f in g.rglob("*.yaml")] for g in groups}
    return {
        group: sorted({name.removesuffix(".yaml") for name in (*names, *signed_up.get(group, ()))})
        for group, names in files.items()
    }


def _choices(conf: Path) -> str:
    """The groups and their options, for --help."""
    return "\n".join(f"  {group:<11}{', '.join(names)}" for group, names in options(conf).items())


def no_such_key(config: DictConfig, key: str, groups: Sequence[str]) -> list[str]:
    """A sentence with the near names, if the config has no such key."""
    node, path = config, ""
    for part in key.split("."):
        if not isinstance(node, DictConfig):
            return []  # below a list or a number: Hydra says it well
        if part not in (known := {*map(str, node), *(() if path else groups)}):
            return [_stranger(path, part, known)]
        node, path = node.get(part), f"{path}{part}."
    return []


def strangers(node: Any, path: str = "") -> list[str]:
    """Keys that no schema knows; Hydra lets them in with a +."""
    found, kind = [], OmegaConf.get_type(node)
    for key, value in node.items_ex(resolve=False):
        if dataclasses.is_dataclass(kind) and key not in (known := kind.__dataclass_fields__):
            found.append(_stranger(path, key, known))
        elif isinstance(value, DictConfig) and len(value):  # of one that is null: 0
            found += strangers(value, f"{path}{key}.")
    return found


def _stranger(path: str, key: str, known: Iterable[str]) -> str:
    return unknown("key", key, sorted(known)).replace("=", f" {path}", 1)
