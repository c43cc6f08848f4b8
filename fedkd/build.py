"""A config to the objects of a run; every incompatibility is found before training, and all are reported together."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedkd.algorithms.base import ALGORITHMS, Algorithm, Setting
from fedkd.core.errors import ConfigError, FedkdError, unknown
from fedkd.core.optim import Local
from fedkd.core.seeds import derive
from fedkd.data.datasets import Dataset, Images, cache_file
from fedkd.data.partition import IID, PARTITIONS, Assignment, Partition
from fedkd.data.public import Public
from fedkd.engine import Settings
from fedkd.evaluate import Scores
from fedkd.federation.cohort import SAMPLINGS, cohort_size
from fedkd.federation.executors import EXECUTORS, Executor, choose
from fedkd.federation.fed import World
from fedkd.federation.ledger import Ledger
from fedkd.federation.population import Population
from fedkd.federation.store import STORES
from fedkd.federation.workers import Workers
from fedkd.logger.base import LoggerConfig, WandbConfig
from fedkd.models.mixed import assign, model_of, nets_of
from fedkd.models.net import Net

Config = Mapping[str, Any]  # resolved, plain containers
T = TypeVar("T")

JUDGED = Scores(np.ones(1), np.ones(1), np.ones(1))
METRICS = (
    *(name for whose in ("personal", "shared", "validation", "sent") for name in JUDGED.metrics(whose)),
    *("acc/shared/global", "loss/shared/global", *Ledger().totals, "time/round", "time/train", "time/eval"),
)


@dataclass(frozen=True)
class Parts:
    """The objects a config names, before any data is loaded."""

    algorithm: Algorithm
    dataset: Dataset
    partition: Partition
    public: Public
    local: Local
    logger: LoggerConfig
    settings: Settings
    device: torch.device


class Data(NamedTuple):
    """What a config makes of its dataset."""

    images: Images
    nets: dict[str, Net]
    assignment: Assignment
    public: Tensor | None  # pixels


def parts(config: Config) -> Parts:
    """What the config names; raises one ConfigError with everything that is wrong."""
    problems: list[str] = []
    for plugin in config["plugins"]:
        with collecting(problems):
            load(plugin)
    made: dict[str, Any] = {}
    sound: dict[str, Any] = {}
    makers: dict[str, Callable[[Config], Any]] = {
        "algorithm": lambda node: make(ALGORITHMS[node["name"]], node),
        "dataset": lambda node: make(Dataset, node),
        "partition": lambda node: make(PARTITIONS[node["name"]], node),
        "public": lambda node: make(Public, node),
        "model": lambda node: [model_of(entry) for entry in (node, *node.get("members", ()))],
        "local": lambda node: make(Local, node),
        "logger": lambda node: LoggerConfig(**{**node, "wandb": make(WandbConfig, node["wandb"])}),
    }
    for key, maker in makers.items():
        with collecting(problems):
            made[key] = maker(config[key])
            if found := [] if key in ("algorithm", "model") else made[key].problems():
                raise ConfigError(found)
            sound[key] = made[key]
    with collecting(problems):
        made["device"] = device_of(config["device"])
    problems += _root_problems(config)
    if {"algorithm", "local", "model"} <= set(made):
        problems += _compatibility(config, made["algorithm"], made["local"])
    if problems:
        raise ConfigError(list(dict.fromkeys([*problems, *_data_problems(config, sound)])))
    settings = Settings(
        participation=config["participation"],
        sampling=config["sampling"],
        eval_every=config["eval"]["every"],
        eval_clients=config["eval"]["clients"],
        eval_sent=config["eval"]["sent"],
        checkpoint_every=config["checkpoint"]["every"],
        on_nan=config["on_nan"],
        store=config["store"],
    )
    del made["model"]
    return Parts(settings=settings, **made)


def data(config: Config, dataset: Dataset, partition: Partition, public: Public) -> Data:
    """Load the dataset and share it out; raises one ConfigError with everything that does not fit it."""
    images = dataset.load()
    problems: list[str] = []
    made: dict[str, Any] = {}
    with collecting(problems):
        made["nets"] = nets_of(config["model"], images.shape, images.classes)
    with collecting(problems):
        made["assignment"] = split(config, images.pool(dataset.pool), images.labels.numpy(), partition, public)
        made["public"] = public.pixels(images, made["assignment"].public, derive(config["seed"], "public"))
    if problems:
        raise ConfigError(problems)
    return Data(images, **made)


def split(config: Config, pool: np.ndarray, labels: np.ndarray, partition: Partition, public: Public) -> Assignment:
    """Who holds which samples, and which are held out as public."""
    seed = config["seed"]
    held_out, rest = public.hold_out(pool, derive(seed, "public"))
    found = partition.assign(labels, rest, config["clients"], derive(seed, "partition"))
    if len(found.public):
        return found
    if len(both := np.intersect1d(found.index, held_out)):
        raise ConfigError(
            f"partition={partition.name} gives the clients {len(both)} of the {len(held_out)} samples that "
            f"public={public.name} holds out, and names no public samples itself.\n"
            "Add their numbers to the file as the array `public`, or type public=none or public=npz."
        )
    return found._replace(public=held_out)


def world(parts: Parts, config: Config, data: Data) -> World:
    """The population on its device, and how it computes."""
    images, nets, assignment, pixels = data
    if problem := _sizes_differ(parts.algorithm, nets):
        raise ConfigError(problem)
    member = members(nets, config, assignment)
    unlabelled = None if pixels is None else _unlabelled(images, pixels)
    device = parts.device
    population = Population.of(images.to(device), unlabelled and unlabelled.to(device), nets, member, assignment)
    executors = {arch: executor(config, net, device) for arch, net in nets.items()}
    workers = Workers(config["executor"]["workers"] if device.type == "cpu" else 1)
    return World(population, executors, parts.local, config["rounds"], config["seed"], parts.public, workers)


def executor(config: Config, net: Net, device: torch.device) -> Executor:
    how = config["executor"]
    return choose(how["name"], net, device, how["chunk"], config["precision"])


def members(nets: Mapping[str, Net], config: Config, assignment: Assignment) -> np.ndarray:
    """The number of each client's architecture."""
    sizes = np.bincount(assignment.client[assignment.role == 0], minlength=config["clients"])
    return assign(list(nets.values()), sizes, config["model"].get("assign", "in_turn"))


def load(plugin: str) -> None:
    """Import a user's module, whose entries sign themselves up."""
    try:
        importlib.import_module(plugin)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"plugins=[{plugin}]: {error}. Start fedkd in the folder that holds {plugin.partition('.')[0]}."
        ) from error


def make(cls: type[T], node: Config) -> T:
    """A dataclass from its config node; `name` chooses the class and is not always a field of it."""
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if extra := set(node) - known - {"name"}:
        raise ConfigError(
            [unknown(f"a field of {node.get('name', cls.__name__)}", key, sorted(known)) for key in extra]
        )
    return cls(**{key: value for key, value in node.items() if key in known})


def device_of(name: str) -> torch.device:
    """The device `auto`, `cpu`, `cuda`, `cuda:1` or `mps` stands for."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name} does not exist. There are: auto, cpu, cuda, cuda:1, mps.") from None
    available = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }.get(device.type, 0)
    if (device.index or 0) >= available:
        raise ConfigError(f"device={name} is not on this machine, which has {available} of that kind. Try device=auto.")
    return device


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Note an error instead of raising it, so that all can be told at once."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems
    except FedkdError as error:
        problems.append(str(error))


def _root_problems(config: Config) -> list[str]:
    found = []
    if not 0 < config["participation"] <= 1:
        found.append(f"participation={config['participation']} must lie in (0, 1]: the share of clients in a round.")
    at_least_one = {"rounds": config["rounds"], "clients": config["clients"], "eval.every": config["eval"]["every"],
                    "eval.clients": config["eval"]["clients"], "checkpoint.every": config["checkpoint"]["every"],
                    **{f"executor.{key}": config["executor"][key] for key in ("chunk", "workers")}}  # fmt: skip
    found += [
        f"{key}={value} must be at least 1." for key, value in at_least_one.items() if value is not None and value < 1
    ]
    choices = {"sampling": SAMPLINGS, "store": STORES, "on_nan": ("stop", "skip"), "precision": ("fp32", "bf16")}
    found += [unknown(key, config[key], known) for key, known in choices.items() if config[key] not in known]
    if (name := config["executor"]["name"]) not in EXECUTORS:
        found.append(unknown("executor", name, EXECUTORS))
    return found


def _data_problems(config: Config, sound: Mapping[str, Any]) -> list[str]:
    """What the data add to a config's other problems, where they are at hand: a wrong config downloads nothing.

    For a part that is itself in question a harmless one stands in.
    """
    found: list[str] = []
    here = {key: part for key, part in sound.items() if key not in ("dataset", "public") or _at_hand(part)}
    if "dataset" in here and config["clients"] >= 1:
        with collecting(found):
            data(config, here["dataset"], here.get("partition", IID()), here.get("public", Public()))
    return found


def _at_hand(source: Dataset | Public) -> bool:
    own = ("digits", "npz", "none", "holdout")
    return source.name in own or cache_file(source.name, source.root).exists()


def _compatibility(config: Config, algorithm: Algorithm, local: Local) -> list[str]:
    found = []
    names = [member if isinstance(member, str) else member["name"] for member in config["model"].get("members", [])]
    clients, participation = config["clients"], config["participation"]
    cohort = cohort_size(participation if 0 < participation <= 1 else 1.0, clients)
    validation = bool(config["partition"]["validation"]) or config["partition"]["name"] == "file"
    setting = Setting(clients, cohort, len(names) or 1, local, validation, config["public"]["per_round"])
    if algorithm.one_architecture and len(names) > 1:
        others = ", ".join(name for name, other in ALGORITHMS.items() if not other.one_architecture and name != "local")
        found.append(
            f"algorithm={algorithm.name} averages parameters, but model={config['model']['name']} gives the clients "
            f"{len(names)} architectures: {', '.join(names)}.\n"
            f"Choose one architecture (model={names[0]}) or an algorithm that exchanges logits: {others}."
        )
    if algorithm.public_data and config["public"]["name"] == "none":
        found.append(
            f"algorithm={algorithm.name} exchanges predictions on public data, but public=none.\n"
            "Type public=holdout public.size=1000, or name a dataset: public=mnist."
        )
    objective = config["objective"]
    if objective not in METRICS and type(algorithm).observe is Algorithm.observe:  # else it may be one of its own
        found.append(unknown("objective", objective, METRICS))
    if "/sent/" in objective and not config["eval"]["sent"]:
        found.append(f"objective={objective} judges what clients send up, which is not done: type eval.sent=true.")
    if "/shared/" in objective and type(algorithm).shared is Algorithm.shared:
        found.append(f"objective={objective} judges a server's model, but algorithm={algorithm.name} has none.")
    if "/validation/" in objective and not validation:
        found.append(f"objective={objective} needs a validation split, e.g. partition.validation=0.1.")
    return found + algorithm.problems(setting)


def _sizes_differ(algorithm: Algorithm, nets: Mapping[str, Net]) -> str | None:
    sizes = {name: net.feature_size for name, net in nets.items()}
    if not algorithm.one_feature_size or len(set(sizes.values())) == 1:
        return None
    return (
        f"algorithm={algorithm.name} shares representations, but those of the clients' models differ in size: "
        f"{', '.join(f'{name} {size}' for name, size in sizes.items())}.\n"
        "Give the members of model=mixed one size, e.g. model.members=[{name: dnn, projection: 64}, "
        "{name: cnn, projection: 64}], or choose one architecture (model=dnn)."
    )


def _unlabelled(images: Images, pixels: torch.Tensor) -> Images:
    """Public samples, normalised as the clients' are; a label of −1 cannot be learnt from by mistake."""
    labels = torch.full((len(pixels),), -1, dtype=torch.int64)
    return Images(pixels, labels, len(pixels), images.classes, images.mean, images.std)
