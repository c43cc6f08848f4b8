"""pFedHN: a hypernetwork at the server generates every client's weights from an embedding of the client.

Shamsian et al., ICML 2021 (arXiv:2103.04628), Algorithm 1.

    paper     here          meaning
    φ         server.phi    the hypernetwork: an MLP, then a linear map to each tensor of the clients' model
    v_i       server.v[i]   client i's embedding
    θ_i       theta         h(v_i; φ), the weights that client i receives and is judged by
    θ~_i      trained       after its local training
    α         alpha         learning rate of φ and v_i

Departures
    D1  the algorithm takes one client a round. Here each client of a cohort has its own v_i and its share in φ's step,
        which is the sum of what they would have stepped by; v_i moves in its client's rounds alone.
    D2  Δθ_i is before − after, as in the released code: with after − before, φ ← φ − α ∇_φ θ_i^T Δθ_i would climb.
        The momentum, the decay and the bound on the gradient are the released code's, too.
    D3  running statistics have no gradient and are not generated: one set, the mean of what the cohort sends, goes with
        all generated weights.
    D4  the hypernetwork is made in the first round, when N is known, of the seed alone. It has about hidden_size
        numbers for each of the model's P, three times with gradient and momentum: 12 GB for a VGG11.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedkd.algorithms.base import Algorithm, Nets, Setting, View, only, register
from fedkd.algorithms.steps import supervised
from fedkd.core import fit, tree
from fedkd.core.optim import SGD, State, Weights
from fedkd.core.seeds import torch_rng
from fedkd.core.tree import Params, dot, scale, sub
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net


class Server(NamedTuple):
    v: Tensor  # [N, d]; empty before the first round, as is all the rest but the statistics
    phi: Weights
    momentum: tuple[State, State]  # of φ, of v
    stats: dict[str, Tensor]


@register("pfedhn")
@dataclass(frozen=True)
class PFedHN(Algorithm):
    """Generated weights.

    Parameters
    ----------
    embedding_size : d ≥ 1, of v_i; None is the paper's 1 + N/4, rounded down.
    hidden_size, hidden_layers : of the MLP, whose first layer takes v_i; the paper's 100 and 3.
    alpha : α > 0, the learning rate of φ.
    alpha_v : that of v_i; None is α.
    momentum, weight_decay : of the steps of φ and v_i.
    max_norm : the bound on the norm of their gradient; inf is none.
    """

    embedding_size: int | None = None
    hidden_size: int = 100
    hidden_layers: int = 3
    alpha: float = 0.01
    alpha_v: float | None = None
    momentum: float = 0.9
    weight_decay: float = 1e-3
    max_norm: float = 50.0

    def problems(self, setting: Setting) -> list[str]:
        least = {"embedding_size": 1, "hidden_size": 1, "hidden_layers": 0}
        given = {name: getattr(self, name) for name in least}
        found = [f"algorithm.{k}={v} must be at least {least[k]}." for k, v in given.items()
                 if v is not None and v < least[k]]  # fmt: skip
        if not (self.alpha > 0 and (self.alpha_v is None or self.alpha_v > 0)):
            found.append(f"algorithm.alpha={self.alpha:g} and algorithm.alpha_v={self.alpha_v} must be positive.")
        return found

    def init_server(self, nets: Nets, seed: int) -> Server:
        return Server(torch.zeros(0, 0), {}, ((), ()), only(nets).init(seed).stats)

    def begun(self, server: Server, fed: Federation) -> Server:
        """The server, which before the first round has yet to make its hypernetwork."""
        if len(server.v):
            return server
        net, rng, h = only(fed.nets), torch_rng(fed.seed("hypernetwork")), self.hidden_size
        d = 1 + fed.population // 4 if self.embedding_size is None else self.embedding_size
        sizes = {"mlp.0": (d, h)} | {f"mlp.{i}": (h, h) for i in range(1, self.hidden_layers + 1)}
        sizes |= {name: (h, shape.numel()) for name, shape in net.weights.items()}
        v = torch.empty(fed.population, d).normal_(generator=rng)
        phi = {}
        for name, (inputs, outputs) in sizes.items():
            for part, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
                phi[f"{name}/{part}"] = torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=rng)
        v, phi = tree.to((v, phi), server.v.device)
        of_phi, of_v = self.optimizers
        return Server(v, phi, (of_phi.init(phi), of_v.init({"v": v})), server.stats)

    @property
    def optimizers(self) -> tuple[SGD, SGD]:
        """Of φ and of v."""
        rates = (self.alpha, self.alpha if self.alpha_v is None else self.alpha_v)
        of_phi, of_v = (SGD(rate, self.momentum, self.weight_decay) for rate in rates)
        return of_phi, of_v

    def round(self, server: Server, own: Placed[Any], fed: Federation) -> tuple[Server, Placed[Any]]:
        server = self.begun(server, fed)
        theta = self.personal(server, own, fed)  # θ_i = h(v_i; φ)
        trained = fed.fit(supervised, theta)
        update, stats = fed.each(difference, theta, trained)
        delta = fed.up(update, "update").stack()  # Δθ_i
        return self.step(server, delta, fed)._replace(stats=fed.up(stats, "update").mean(fed.sizes).stats), own

    def step(self, server: Server, delta: Weights, fed: Federation) -> Server:
        """φ ← φ − α ∇_φ θ^T Δθ, v_i ← v_i − α ∇_{v_i} θ_i^T Δθ_i: vector-Jacobian products of h."""
        at = torch.from_numpy(fed.cohort).to(server.v.device)
        here = {"v": server.v[at]}

        def pairing(point: Weights) -> tuple[Tensor, tuple[()]]:
            return dot(self.generate(only(fed.nets), point, point["v"]), delta), ()

        slope, _ = fit.gradient(pairing, {**server.phi, **here})
        slope = scale((self.max_norm / dot(slope, slope).sqrt().clamp(min=1e-6)).clamp(max=1), slope)
        (of_phi, of_v), g = self.optimizers, {"v": slope.pop("v")}
        phi, state = tree.map(torch.clone, (server.phi, server.momentum[0]))  # an update writes where they are
        phi, state = of_phi.update(phi, slope, state)
        rows, v_state = of_v.update(here, g, tree.take(server.momentum[1], at))
        put = tree.map(lambda table, new: table.index_copy(0, at, new), server.momentum[1], v_state)
        return Server(server.v.index_copy(0, at, rows["v"]), phi, (state, put), server.stats)

    def generate(self, net: Net, phi: Weights, v: Tensor) -> Weights:
        """h(v; φ) for several embeddings at once."""

        def layer(name: str, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, phi[f"{name}/weight"], phi[f"{name}/bias"])

        x = layer("mlp.0", v)
        for i in range(1, self.hidden_layers + 1):
            x = layer(f"mlp.{i}", x.relu())
        return {name: layer(name, x).view(-1, *shape) for name, shape in net.weights.items()}

    def personal(self, server: Server, own: Placed[Any], fed: Federation) -> Placed[Params]:
        server = self.begun(server, fed)
        v = server.v[torch.from_numpy(fed.cohort).to(server.v.device)]
        weights = self.generate(only(fed.nets), server.phi, v)
        return fed.down_each([Params(tree.take(weights, i), server.stats) for i in range(len(v))], "model")

    def observe(self, server: Server, own: Placed[Any], fed: Federation) -> dict[str, float | View]:
        """How alike the embeddings are."""
        v = torch.nn.functional.normalize(server.v)
        return {"embeddings": View("matrix", (v @ v.T).cpu().numpy())}


def difference(net: Net, theta: Params, trained: Params) -> tuple[Weights, Params]:
    """Δθ_i, and the running statistics."""
    return sub(theta.weights, trained.weights), Params({}, trained.stats)
