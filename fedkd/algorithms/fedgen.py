"""FedGen: FedAvg whose clients also learn from features that a generator, trained at the server, makes for a label.

Zhu et al., ICML 2021, Algorithm 1.

    paper        here              meaning
    θ, θ_k       server.theta      the shared model, and client k's during the round
    w, G_w       server.w          the generator: noise ε and a label y to features z
    θ_k^p, h, g  net.head          the predictor, from features to logits
    c_k          counts            client k's label counts
    p̂(y)         counts, summed    the label distribution of the cohort
    ŷ, ẑ         y_hat, made       labels drawn by the client, and features generated for them
    T, B         local.steps, .batch_size

Departures
    D1  Eq. 5 weighs its two terms alike. The released code weighs the second by α, adds a pull (β) of the prediction
        of x towards that of features generated for its label, and lets both decay; FedHKD's table has this with
        α=β=10 and a decay of 0.98. All are parameters, whose defaults are Eq. 5.
    D2  Eq. 4 averages the logits of the heads evenly. As in the released code, a head counts for label y as much as its
        client's share of the samples of y: who has never seen y cannot tell it.
    D3  p̂(y) is not sent, D = P + G: clients draw ŷ uniformly, which is the paper's first p̂(y) and the released code's.
    D4  c_k counts a client's samples, not those of its mini-batches; θ is averaged by them, so that α=β=0 is FedAvg.
    D5  clients learn from the generator from round 2 on, as in the released code: untrained, it has nothing to say.
    D6  a generated sample goes with each real one: client k draws POOL pairs (ŷ, ε) a round, and a sample takes the
        pair of its number. The released code's ratio of the two batch sizes (0.5 in FedHKD's table) belongs into α.
    D7  diversity, which the text asks for without an equation, is the released code's:
        exp(−mean of ‖ε_i − ε_j‖²‖z_i − z_j‖₁ over pairs), each by its dimension.
    D8  the generator's Adam starts afresh in every round.
"""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedkd.algorithms.base import Algorithm, Nets, Setting, View, only, register
from fedkd.algorithms.steps import class_sums, supervised
from fedkd.core.fit import descend
from fedkd.core.losses import Batch, correct, cross_entropy, looked_up, per_sample_cross_entropy, soft_cross_entropy
from fedkd.core.optim import Adam, Weights
from fedkd.core.seeds import derive, numpy_rng
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Architecture, Net, Shape

POOL = 1024  # generated samples of a client and round


class Server(NamedTuple):
    theta: Params
    w: Params


class Draw(NamedTuple):
    """What goes into the generator."""

    y: Tensor
    epsilon: Tensor


@dataclass(frozen=True)
class Generator(Architecture):
    """From (ε, one-hot y), as an image of one row, to features; before the normalisation a bias would be void."""

    name = "generator"
    hidden: int = 256

    def module(self, shape: Shape, classes: int) -> nn.Module:
        first = nn.Linear(math.prod(shape), self.hidden, bias=False), nn.BatchNorm1d(self.hidden), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *first, nn.Linear(self.hidden, classes))


@register("fedgen")
@dataclass(frozen=True)
class FedGen(Algorithm):
    """Data-free distillation by a generator of features.

    Parameters
    ----------
    alpha : α ≥ 0, the weight of the loss on generated features; large ones want small local steps (the paper: 20 of
        0.01), in which the features do not run away from the generator's.
    beta : β ≥ 0, the weight of the pull towards the prediction of generated features; `alpha=0 beta=0` is FedAvg.
    decay : of α and β, by which they are multiplied after every round, in (0, 1].
    noise, hidden : sizes of ε and of the generator's hidden layer.
    eta : η ≥ 0, the weight of the diversity of what the generator makes.
    server_steps, server_batch_size : of the generator in a round.
    server_lr, server_weight_decay : of its Adam.
    """

    alpha: float = 1.0
    beta: float = 0.0
    decay: float = 1.0
    noise: int = 32
    hidden: int = 256
    eta: float = 1.0
    server_steps: int = 50
    server_batch_size: int = 128
    server_lr: float = 3e-4
    server_weight_decay: float = 0.01

    def problems(self, setting: Setting) -> list[str]:
        least = dict.fromkeys(("alpha", "beta", "eta", "server_weight_decay", "server_steps"), 0)
        least |= {"noise": 1, "hidden": 1, "server_batch_size": 2}
        found = [f"algorithm.{k}={getattr(self, k):g} must be at least {v}." for k, v in least.items()
                 if not getattr(self, k) >= v]  # fmt: skip
        if not 0 < self.decay <= 1:
            found.append(f"algorithm.decay={self.decay:g} must be above 0 and at most 1; 1 is no decay.")
        if not 0 < self.server_lr < math.inf:
            found.append(f"algorithm.server_lr={self.server_lr:g} must be positive and finite, e.g. 0.0003.")
        return found

    def generator(self, net: Net) -> Net:
        return generator(self.noise + net.classes, self.hidden, net.feature_size)

    def held(self, net: Net) -> int:
        return super().held(net) + self.generator(net).params

    def init_server(self, nets: Nets, seed: int) -> Server:
        net = only(nets)
        return Server(net.init(seed), self.generator(net).init(derive(seed, "generator")))

    def round(self, server: Server, own: Placed[Any], fed: Federation) -> tuple[Server, Placed[Any]]:
        net, fade = only(fed.nets), self.decay ** (fed.round - 1) if fed.round > 1 else 0.0
        theta, w = fed.down(server.theta, "model"), fed.down(server.w, "generator")
        objective = Taught(self.alpha * fade, self.beta * fade)
        if objective.terms:
            pool = fed.noise("generated", POOL, self.noise + net.classes)
            y_hat = fed.each(lambda net, pool: pool[:, self.noise :].argmax(-1), pool)  # of independent equals: uniform
            made = fed.table(partial(self.make, objective), objective.terms * net.feature_size, w, pool, y_hat)
            theta = fed.fit(objective, theta, made, y_hat)
        else:
            theta = fed.fit(supervised, theta)
        counts = fed.up(fed.sum(count), "label counts").stack()
        received = fed.up(theta, "model")
        heads = {name: leaf for name, leaf in received.stack().weights.items() if name.startswith("head.")}
        w_next, _ = descend(
            self.objective, self.generator(net), server.w, net, heads, counts,
            batch=lambda t: self.draw(counts, fed.seed("generator"), t),
            steps=self.server_steps,
            optimizer=lambda t: Adam(self.server_lr, self.server_weight_decay),
        )  # fmt: skip
        return Server(received.mean(fed.sizes), w_next), own

    def make(self, objective: "Taught", net: Net, batch: Batch, w: Params, pool: Tensor, y_hat: Tensor) -> Tensor:
        """By sample, the features that `objective` looks at, side by side: ẑ, and z_y for the sample's own label."""
        maker, pair = self.generator(net), batch.row % POOL
        epsilon, labels = pool[pair][:, : self.noise], {"alpha": y_hat[pair], "beta": batch.y}
        wanted = [y for name, y in labels.items() if getattr(objective, name)]
        return torch.cat([maker.predict(w, code(Draw(y, epsilon), net)) for y in wanted], -1)

    def draw(self, counts: Tensor, seed: int, t: int) -> Draw:
        """ŷ ~ p̂(y) and ε ~ N(0, I); drawn on the host, so that every device sees the same."""
        rng, size = numpy_rng(seed, t), self.server_batch_size
        u = torch.from_numpy(rng.random(size, "f4")).to(counts.device)
        epsilon = torch.from_numpy(rng.standard_normal((size, self.noise), "f4")).to(counts.device)
        ladder = counts.sum(0).cumsum(0)
        return Draw(torch.searchsorted(ladder, u * ladder[-1], right=True).clamp(max=len(ladder) - 1), epsilon)

    def objective(
        self, maker: Net, w: Params, drawn: Draw, net: Net, heads: Weights, counts: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """J(w) = E ℓ(σ(Σ_k c_k^y/c^y g(z; θ_k^p)), y), y ~ p̂, z ~ G_w(·|y) (Eq. 4), and the price of sameness."""
        out = maker.forward(w, code(drawn, net))
        z, share = out.logits, (counts / counts.sum(0).clamp(min=1))[:, drawn.y]
        votes = torch.vmap(lambda head: net.head(Params(head, {}), z))(heads)
        ensemble = (share.unsqueeze(-1) * votes).sum(0)
        value = per_sample_cross_entropy(ensemble, drawn.y).mean()
        return value + self.eta * sameness(drawn.epsilon, z), out.stats

    def personal(self, server: Server, own: Placed[Any], fed: Federation) -> Placed[Params]:
        return fed.down(server.theta, "model")

    def shared(self, server: Server) -> Params:
        return server.theta

    def observe(self, server: Server, own: Placed[Any], fed: Federation) -> dict[str, float | View]:
        """How much of what the generator makes for every label the shared model takes for that label."""
        net = only(fed.nets)
        every = torch.ones(1, net.classes, device=server.w.weights["features.1.weight"].device)
        drawn = self.draw(every, fed.seed("generator"), 0)
        z = self.generator(net).predict(server.w, code(drawn, net))
        return {"generator/accuracy": float(correct(net.head(server.theta, z), drawn.y).mean())}


@dataclass(frozen=True)
class Taught:
    """J(θ_k) = L(θ_k) + α ℓ(h(ẑ; θ_k^p), ŷ) (Eq. 5) + β KL(σ(h(z_y; θ_k^p)) ‖ σ(f(x; θ_k))).

    ẑ and z_y do not change while a client trains, so that they are made once a round.
    """

    of_passes: ClassVar[bool] = True  # see core/fit.py

    alpha: float
    beta: float

    @property
    def terms(self) -> int:
        """How many kinds of generated features it looks at."""
        return (self.alpha > 0) + (self.beta > 0)

    def __call__(
        self, net: Net, theta: Params, batch: Batch, made: Tensor, y_hat: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        out = net.forward(theta, batch.x)
        value, z = cross_entropy(out.logits, batch), iter(looked_up(made, batch.row).chunk(self.terms, -1))
        if self.alpha:
            of_pair = batch._replace(y=y_hat.gather(-1, batch.row % POOL))
            value = value + self.alpha * cross_entropy(net.head(theta, next(z)), of_pair)
        if self.beta:
            target = torch.softmax(net.head(theta, next(z)), -1).detach()
            value = value + self.beta * soft_cross_entropy(out.logits, target, batch)
        return value, out.stats


@cache
def generator(inputs: int, hidden: int, features: int) -> Net:
    return Net(Generator(hidden=hidden), (1, 1, inputs), features)


def count(net: Net, batch: Batch) -> Tensor:
    """c_k."""
    return class_sums(batch.weight.unsqueeze(-1), batch, net.classes)[1]


def code(drawn: Draw, net: Net) -> Tensor:
    """(ε, one-hot y) as the generator takes it."""
    one_hot = drawn.y.unsqueeze(-1) == torch.arange(net.classes, device=drawn.y.device)
    return torch.cat([drawn.epsilon, one_hot.to(drawn.epsilon.dtype)], -1)[:, None, None]


def sameness(epsilon: Tensor, z: Tensor) -> Tensor:
    """exp(−mean_ij ‖ε_i − ε_j‖²/dim ε · ‖z_i − z_j‖₁/dim z): 1 where noise makes no difference."""
    noise, apart = torch.pdist(epsilon).square() / epsilon.shape[1], torch.pdist(z, p=1.0) / z.shape[1]  # i < j
    return torch.exp(-2 * (noise * apart).sum() / len(z) ** 2)
