"""L2SGD: every client has a model; a coin decides whether all of them train or all step towards their mean.

Hanzely and Richtárik, "Federated Learning of a Mixture of Global and Local Models", arXiv:2002.05516, Algorithm 1
(L2GD), with stochastic gradients. It descends F(x) = 1/n Σ f_i(x_i) + λ/(2n) Σ ‖x_i − x̄‖².

    paper   here             meaning
    x_i     own.w            client i's model
    x̄       mean             the mean of all models
    ξ       fed.coin(p)      1: a step on the second term of F, 0: one on the first
    α       fed.lr           the step size; a client's own learning rate is α/(n(1 − p))
    n       fed.population   number of clients

Departures
    D1  a round is one toss. Heads is one step towards the mean, and only then is anything sent; tails is `local`'s
        epochs or steps in place of one step: `local.steps=1` is the paper's iteration.
    D2  the mean does not move in a step towards it, so that heads twice running needs one exchange; both are counted.
    D3  with a partial cohort its members alone train, or step towards the mean of their own; n is that of all clients.
    D4  running statistics have no gradient: they go the same part of the way to their mean.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedkd.algorithms.base import CommonStart, OwnModel, Setting, SharedModel, register
from fedkd.algorithms.steps import supervised
from fedkd.core.tree import lerp
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed


@register("l2sgd")
@dataclass(frozen=True)
class L2SGD(CommonStart):
    """A coin between local training and the mean. `local.lr` is α: twice as many clients need twice as much of it.

    Parameters
    ----------
    p : in (0, 1), the probability that a round communicates. For L-smooth losses λ/(λ + L) is best.
    lambda_ : λ ≥ 0, the pull towards the mean. `lambda_=0` is local training from a common start, but for the
        rounds of heads, in which nothing moves then.
    """

    sent_by_round: ClassVar[bool] = True  # nothing at tails

    p: float = 0.1
    lambda_: float = 0.1

    def problems(self, setting: Setting) -> list[str]:
        found = []
        if not 0 < self.p < 1:
            found.append(f"algorithm.p={self.p:g} must lie between 0 and 1, both excluded: type algorithm.p=0.1.")
        if not self.lambda_ >= 0:
            found.append(f"algorithm.lambda_={self.lambda_:g} must not be negative: type algorithm.lambda_=0.1.")
        if not found and (way := self.way(setting.local.lr, setting.clients)) > 1:
            found.append(
                f"algorithm=l2sgd would step past the mean: local.lr·lambda_/(clients·p) is {way:g}, above 1.\n"
                f"Type algorithm.lambda_={self.lambda_ / way:g} or less, or a smaller local.lr."
            )
        return found

    def way(self, lr: float, n: int) -> float:
        """αλ/(np), how much of the way to the mean a step goes."""
        return lr * self.lambda_ / (n * self.p)

    def round(
        self, server: SharedModel, own: Placed[OwnModel], fed: Federation
    ) -> tuple[SharedModel, Placed[OwnModel]]:
        (x,), n = own, fed.population
        if fed.coin(self.p):  # ξ = 1
            mean = fed.down(fed.up(x, "model").mean(), "mean model")
            way = self.way(fed.lr, n)
            x = fed.each(lambda net, x_i, mean: lerp(x_i, mean, way), x, mean)
        else:  # x_i − α/(n(1 − p)) ∇f_i(x_i)
            x = fed.fit(supervised, x, lr=fed.local.lr / (n * (1 - self.p)))
        return server, Placed.pack(OwnModel, x)
