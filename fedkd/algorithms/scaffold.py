"""SCAFFOLD: local SGD corrected for client drift by control variates.

Karimireddy et al., ICML 2020, Algorithm 1, option II. "l. n" below is its line n.

    paper   here             meaning
    x       server.x         server model
    y_i     y                client i's model during the round
    c, c_i  server.c, own.c  the server's and client i's control variate, zero at first
    K       fed.local_steps  local steps of client i
    η_l     fed.lr           local learning rate
    η_g     server_lr        server learning rate

Departures
    D1  K differs between clients: epochs are fixed, shards are not.
    D2  running statistics of normalisation layers have no gradient: they are averaged, not corrected.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedkd.algorithms.base import Algorithm, Nets, Setting, only, plain_sgd, register
from fedkd.algorithms.steps import supervised
from fedkd.core.factors import Beside
from fedkd.core.losses import Batch
from fedkd.core.optim import Weights
from fedkd.core.tree import Params, add, dot, scale, sub, zeros_like
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net


class Server(NamedTuple):
    x: Params
    c: Weights


class Client(NamedTuple):
    c: Weights  # survives the rounds client i sits out


class Delta(NamedTuple):
    model: Params
    control: Weights


class Corrected:
    """f_i(y) + ⟨c − c_i, y⟩, whose gradient is g_i(y) − c_i + c: so y_i ← y_i − η_l (g_i(y_i) − c_i + c), l. 10."""

    bare = staticmethod(supervised)

    def __call__(self, net: Net, y: Params, batch: Batch, c: Weights) -> tuple[Tensor, dict[str, Tensor]]:
        f, stats = supervised(net, y, batch)
        return f + dot(c, y.weights), stats

    def beside(self, c: Weights) -> Beside:
        return Beside(shift=c)


@register("scaffold")
@dataclass(frozen=True)
class Scaffold(Algorithm):
    """Control variates double what is sent.

    Parameters
    ----------
    server_lr : η_g > 0, the step along the mean update; the paper uses 1.
    """

    server_lr: float = 1.0

    def problems(self, setting: Setting) -> list[str]:
        return plain_sgd(self.name, setting.local)  # the control variates are read off such steps

    def init_server(self, nets: Nets, seed: int) -> Server:
        x = only(nets).init(seed)
        return Server(x, zeros_like(x.weights))

    def init_client(self, net: Net, server: Server, seed: int) -> Client:
        return Client(zeros_like(server.c))

    def round(self, server: Server, own: Placed[Client], fed: Federation) -> tuple[Server, Placed[Client]]:
        x, c = fed.down(server.x, "model"), fed.down(server.c, "control")  # l. 5
        (c_i,) = own
        shift = fed.each(lambda net, c, c_i: sub(c, c_i), c, c_i)
        y = fed.fit(Corrected(), x, shift)  # l. 7-11
        own, delta = fed.each(lambda net, *parts: self.finish(fed.lr, *parts), x, y, c_i, shift, fed.local_steps)
        mean: Delta = fed.up(delta, "model and control").mean()  # l. 13, 16
        share = len(fed.cohort) / fed.population
        x_next = add(server.x, scale(self.server_lr, mean.model))  # l. 17
        return Server(x_next, add(server.c, scale(share, mean.control))), own

    def finish(
        self, lr: float, x: Params, y: Params, c_i: Weights, shift: Weights, steps: Tensor
    ) -> tuple[Client, Delta]:
        moved = sub(y, x)
        c_plus = sub(scale(-1 / (steps * lr), moved.weights), shift)  # l. 12 (ii): c_i − c + (x − y_i)/(K η_l)
        return Client(c_plus), Delta(moved, sub(c_plus, c_i))  # l. 13, 14

    def personal(self, server: Server, own: Placed[Client], fed: Federation) -> Placed[Params]:
        return fed.down(server.x, "model")

    def shared(self, server: Server) -> Params:
        return server.x
