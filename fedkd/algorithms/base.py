"""The contract of an algorithm: state is values, a round is a function of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from fedkd.core.optim import Local
from fedkd.core.registry import Registry
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net

Nets = Mapping[str, Net]


class Setting(NamedTuple):
    """What is known of a run before its data is loaded."""

    clients: int
    cohort: int
    architectures: int
    local: Local
    validation: bool = True  # whether clients have a validation split
    public_per_round: int | None = None  # samples of the public set that a round uses; None: all


class View(NamedTuple):
    """Something to look at: `clusters`, a number for each client (drawn clients × rounds), or `matrix`, a heat map."""

    kind: str
    values: np.ndarray
    rows: str = "client"
    columns: str = "client"


@dataclass(frozen=True)
class Algorithm(ABC):
    """A method: a frozen dataclass whose fields are its hyperparameters and which keeps nothing else.

    `Server` and `Client` states are trees of tensors, NamedTuples by custom. `init_client` sees the server's first
    state, so that a client's first state is a function of the seed whenever it is made.
    """

    name: ClassVar[str]
    one_architecture: ClassVar[bool] = True  # averaging whole parameters needs one
    one_feature_size: ClassVar[bool] = False  # representations are shared; as many numbers in every architecture
    public_data: ClassVar[bool] = False
    models_held: ClassVar[int] = 1  # of its size, in a client's memory while it trains
    sent_by_data: ClassVar[bool] = False  # how much is sent depends on the data: a dry run estimates it
    sent_by_round: ClassVar[bool] = False  # ... on the round, by a coin or its number: a dry run walks through all
    everyone: ClassVar[bool] = False  # every client takes part in every round, whatever `participation` says

    def problems(self, setting: Setting) -> list[str]:
        """What of this setting the method cannot work with, as sentences."""
        return []

    def held(self, net: Net) -> int:
        """Numbers in a client's memory while it trains: FedHKD's column "Params (M)"."""
        return self.models_held * net.params

    @abstractmethod
    def init_server(self, nets: Nets, seed: int) -> Any: ...

    def init_client(self, net: Net, server: Any, seed: int) -> Any:
        return ()

    @abstractmethod
    def round(self, server: Any, own: Placed[Any], fed: Federation) -> tuple[Any, Placed[Any]]: ...

    @abstractmethod
    def personal(self, server: Any, own: Placed[Any], fed: Federation) -> Placed[Params]:
        """The model each client is judged by; may adapt on the client's own training data; leaves no trace."""

    def shared(self, server: Any) -> Params | None:
        """The server's model, where there is one."""
        return None

    def observe(self, server: Any, own: Placed[Any], fed: Federation) -> dict[str, "float | View"]:
        """What the method's users want to see beside accuracy, after an evaluated round; outside the ledger.

        Numbers join the metrics under their names; views are kept by round in views.jsonl and drawn at the end.
        """
        return {}


class SharedModel(NamedTuple):
    """The state of a server that keeps one model."""

    w: Params


@dataclass(frozen=True)
class OneModel(Algorithm):
    """A method whose clients are all judged by the server's one model."""

    def init_server(self, nets: Nets, seed: int) -> SharedModel:
        return SharedModel(only(nets).init(seed))

    def personal(self, server: SharedModel, own: Placed[Any], fed: Federation) -> Placed[Params]:
        return fed.down(server.w, "model")

    def shared(self, server: SharedModel) -> Params:
        return server.w


class OwnModel(NamedTuple):
    """The state of a client that keeps one model between rounds."""

    w: Params


@dataclass(frozen=True)
class OwnModels(Algorithm):
    """A method whose clients keep a model each, of any architecture, and are judged by it; the server keeps nothing."""

    one_architecture: ClassVar[bool] = False

    def init_server(self, nets: Nets, seed: int) -> Any:
        return ()

    def init_client(self, net: Net, server: Any, seed: int) -> OwnModel:
        return OwnModel(net.init(seed))

    def personal(self, server: Any, own: Placed[OwnModel], fed: Federation) -> Placed[Params]:
        (w,) = own
        return w


@dataclass(frozen=True)
class CommonStart(OwnModels):
    """`OwnModels` of one architecture that all begin at the same point; the server keeps that one."""

    one_architecture: ClassVar[bool] = True

    def init_server(self, nets: Nets, seed: int) -> Any:
        return SharedModel(only(nets).init(seed))

    def init_client(self, net: Net, server: Any, seed: int) -> OwnModel:
        return OwnModel(server.w)


register = ALGORITHMS = Registry[Algorithm]("algorithm", "fedkd.algorithms")


def plain_sgd(name: str, local: Local) -> list[str]:
    """A problem unless the local optimiser is plain SGD: for methods whose steps are so by their definition."""
    if local.optimizer == "sgd" and not local.momentum and not local.weight_decay:
        return []
    return [
        f"algorithm={name} takes plain SGD steps, but local has optimizer={local.optimizer} "
        f"momentum={local.momentum:g} weight_decay={local.weight_decay:g}. "
        "Type local.optimizer=sgd local.momentum=0 local.weight_decay=0."
    ]


def only(nets: Nets) -> Net:
    """The one architecture of a method that averages parameters."""
    (net,) = nets.values()
    return net


def who_from_whom(name: str, c: Tensor) -> dict[str, float | View]:
    """A matrix whose row n has the weights of what client n receives, for `observe`."""
    matrix = View("matrix", c.cpu().numpy(), rows="client, receiving", columns="client, giving")
    return {name: matrix, f"{name}/self": float(c.diagonal().mean())}
