"""FedPer: average the body, keep the last layers at home.

Arivazhagan et al., arXiv:1912.00818, Algorithms 1 and 2.

    paper   here              meaning
    W_B     server.body       base layers, shared
    W_P_j   own.head          client j's personalisation layers
    K_P     personal_layers   how many of them, counted from the output

Departures
    D1  the base is averaged over the cohort of the round; the paper lets every client take part.
"""

from dataclasses import dataclass
from typing import NamedTuple

from fedkd.algorithms.base import Algorithm, Nets, only, register
from fedkd.algorithms.steps import supervised
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net


class Server(NamedTuple):
    body: Params


class Client(NamedTuple):
    head: Params


@register("fedper")
@dataclass(frozen=True)
class FedPer(Algorithm):
    """Personal last layers on a shared body.

    Parameters
    ----------
    personal_layers : K_P ≥ 0, layers (with parameters) that never leave the client. `personal_layers=0` is FedAvg.
    """

    personal_layers: int = 1

    def init_server(self, nets: Nets, seed: int) -> Server:
        net = only(nets)
        body, _ = net.split(net.init(seed), self.personal_layers)
        return Server(body)

    def init_client(self, net: Net, server: Server, seed: int) -> Client:
        _, head = net.split(net.init(seed), self.personal_layers)
        return Client(head)

    def round(self, server: Server, own: Placed[Client], fed: Federation) -> tuple[Server, Placed[Client]]:
        w = fed.fit(supervised, self.personal(server, own, fed))  # Alg. 1: SGD on (W_B, W_P_j)
        body, head = fed.each(lambda net, w: net.split(w, self.personal_layers), w)
        return Server(fed.up(body, "body").mean(fed.sizes)), Placed.pack(Client, head)  # Alg. 2: W_B <- Σ γ_j W_B,j

    def personal(self, server: Server, own: Placed[Client], fed: Federation) -> Placed[Params]:
        body, (head,) = fed.down(server.body, "body"), own
        return fed.each(lambda net, body, head: net.join(body, head), body, head)
