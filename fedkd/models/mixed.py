"""Several architectures in one federation, and the way from a config's `model` node to nets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkd.core.errors import ConfigError, unknown
from fedkd.models.net import MODELS, Architecture, Model, Net, Shape, register

ASSIGNMENTS = ("in_turn", "by_size")


@register("mixed")
@dataclass(frozen=True)
class Mixed(Model):
    """Clients of several architectures; `assign` shares them out.

    Parameters
    ----------
    members : the architectures: names, or mappings {name: ..., field: ...} where fields differ from their defaults.
    assign : `in_turn` or `by_size`.
    """

    members: tuple[Any, ...] = ()
    assign: str = "in_turn"

    def nets(self, shape: Shape, classes: int) -> dict[str, Net]:
        nets: dict[str, Net] = {}
        problems = []
        if not self.members:
            problems.append("model=mixed has no members; name some, e.g. model.members=[mlr,dnn,small_cnn].")
        if self.assign not in ASSIGNMENTS:
            problems.append(unknown("model.assign", self.assign, ASSIGNMENTS))
        for member in self.members:
            try:
                net = self._net(member, shape, classes, [net.architecture for net in nets.values()])
                nets[net.name] = net
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        return nets

    def _net(self, member: Any, shape: Shape, classes: int, others: Sequence[Architecture]) -> Net:
        architecture = model_of(member)
        if not isinstance(architecture, Architecture):
            raise ConfigError("model=mixed cannot be a member of itself; name architectures.")
        if architecture in others:
            raise ConfigError(f"model=mixed has the member {architecture.name} twice with the same fields.")
        same = sum(other.name == architecture.name for other in others)
        return Net(architecture, shape, classes, f"{architecture.name}-{same + 1}" if same else architecture.name)


def assign(nets: Sequence[Net], sizes: NDArray[np.int64], how: str) -> NDArray[np.int64]:
    """The number of the net each client gets, from the clients' training-set sizes.

    `in_turn`: client i gets net i mod k (KT-pFL: five clients each of four). `by_size`: clients, sorted by size, fall
    into k groups as equal as can be, and a group of larger clients gets a net of more parameters. (PerFed-CKT draws
    the net, a larger one with a probability that grows with the client's data; this is that rule without its chance.)
    """
    clients = len(sizes)
    if how == "in_turn":
        return np.arange(clients) % len(nets)
    by_params = np.argsort([net.params for net in nets], kind="stable")
    rank = np.argsort(np.argsort(sizes, kind="stable"))  # of each client among all, by size
    return by_params[rank * len(nets) // clients]


def nets_of(config: Mapping[str, Any], shape: Shape, classes: int) -> dict[str, Net]:
    """The nets a `model` node asks for: one, or several for `mixed` (`dnn` and `dnn-2` where only fields differ).

    Raises ConfigError with everything that is wrong with them.
    """
    return model_of(config).nets(shape, classes)


def model_of(config: str | Mapping[str, Any]) -> Model:
    """The zoo's entry for a name, or for a mapping of its name and fields."""
    config = {"name": config} if isinstance(config, str) else config
    if not isinstance(config, Mapping) or "name" not in config:
        raise ConfigError(f"model.members has {config}, which is neither a name nor a mapping with one.")
    entry = MODELS[config["name"]]
    known = [field.name for field in fields(entry)]
    given = {key: _frozen(value) for key, value in config.items() if key != "name"}
    if problems := [unknown(f"model={entry.name}: field", key, known) for key in given if key not in known]:
        raise ConfigError(problems)
    return entry(**given)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
