"""The contract of an algorithm: state is values, a round is a function of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkd.algorithms.steps import supervised
from fedkd.core.losses import Batch, soft_cross_entropy
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
    models_held: ClassVar[int] = 1  # in a client's memory while it trains: FedHKD's column "Params (M)"
    sent_by_data: ClassVar[bool] = False  # how much is sent depends on the data: a dry run estimates it
    everyone: ClassVar[bool] = False  # every client takes part in every round, whatever `participation` says

    def problems(self, setting: Setting) -> list[str]:
        """What of this setting the method cannot work with, as sentences."""
        return []

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


class Coefficients(NamedTuple):
    """The state of a server that keeps who learns how much from whom."""

    c: Tensor  # [N, N], row n: the weights of what client n receives; [0, 0] as long as N is not known


@dataclass(frozen=True)
class SoftMixtures(OwnModels):
    """A method whose clients train, send soft predictions of public samples, and distil each from a mixture of its own.

    Parameters
    ----------
    temperature : T > 0, of the soft predictions and of the distillation.
    distillation_steps : R ≥ 0, passes over the round's public samples; `distillation_steps=0` is local training.
    public_batch_size : public samples a step of the distillation.
    eta_2 : η_2, the learning rate of the distillation; None is η_1, as in KT-pFL. T² η_1 would undo what T takes.
    """

    public_data: ClassVar[bool] = True

    temperature: float = 10.0
    distillation_steps: int = 1
    public_batch_size: int = 256
    eta_2: float | None = None

    def problems(self, setting: Setting) -> list[str]:
        if self.temperature > 0:
            return []
        return [f"algorithm.temperature={self.temperature:g} must be positive."]

    def init_server(self, nets: Nets, seed: int) -> Coefficients:
        return Coefficients(torch.zeros(0, 0))

    def exchange(self, own: Placed[OwnModel], fed: Federation) -> tuple[Placed[Params], Tensor]:
        """The clients' models after local training, and what they sent, [m, Q, L]."""
        (w,) = own
        w = fed.fit(supervised, w)
        return w, fed.up(fed.each(self.soften, fed.predict_public(w)), "soft predictions").stack()

    def soften(self, net: Net, logits: Tensor) -> Tensor:
        """Probabilities at temperature T."""
        return torch.softmax(logits.float() / self.temperature, -1)

    def learn(self, w: Placed[Params], mixtures: Tensor, fed: Federation) -> Placed[OwnModel]:
        """Client n of the cohort distils from mixtures[n]."""
        teacher = fed.down_each(list(mixtures), "personalised soft predictions")
        if self.distillation_steps:
            pace = {"epochs": self.distillation_steps, "batch_size": self.public_batch_size}
            w = fed.fit(self.distil, w, teacher, over="public", lr=self.eta_2, **pace)
        return Placed.pack(OwnModel, w)

    def distil(self, net: Net, w: Params, public: Batch, teacher: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """KL(teacher ‖ own soft predictions), up to the teacher's entropy, which has no gradient."""
        out = net.forward(w, public.x)
        return soft_cross_entropy(out.logits / self.temperature, teacher[public.row], public), out.stats

    def observe(self, server: Coefficients, own: Placed[OwnModel], fed: Federation) -> dict[str, float | View]:
        return who_from_whom("coefficients", server.c)


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
