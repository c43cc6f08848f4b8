"""pFedMe: personal models by Moreau envelopes: each is trained at a distance from a shared one that follows them.

T Dinh et al., NeurIPS 2020, Algorithm 1.

    paper     here        meaning
    w^t       server.w    the shared model
    w_{i,r}   omega       client i's copy of it after r local rounds
    θ̃_i       own.theta   client i's personal model, near the argmin of f̃_i(θ) + λ/2 ‖θ − w_{i,r}‖²
    ν         K           the accuracy of that argmin; in the experiments K gradient steps on one batch
    η         eta         learning rate of w_{i,r}; that of θ̃_i, which Algorithm 1 leaves open, is `local.lr`
    S^t       fed.cohort  clients of round t

Departures
    D1  only the cohort computes in a round; in the paper everyone does, and the cohort is asked for its result.
    D2  where the K steps start is left open: θ̃_i is kept between rounds and goes on from where it was, as CGPFL's.
    D3  K steps are stable for `local.lr` < 2/(λ + L), where ∇f̃_i is L-Lipschitz: the released code's 0.1 is not on
        normalised images with a hidden layer, where 0.01 is.
    D4  running statistics belong to θ̃_i, since w is never run; w is judged with the mean of the cohort's.
"""

from dataclasses import dataclass
from typing import NamedTuple

from fedkd.algorithms.base import OneModel, Setting, SharedModel, plain_sgd, register
from fedkd.algorithms.steps import Envelope, Pair
from fedkd.core.tree import Params, lerp
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net


class Client(NamedTuple):
    theta: Params


@register("pfedme")
@dataclass(frozen=True)
class PFedMe(OneModel):
    """Two models a client, of which one crosses. It is CGPFL with one cluster.

    Parameters
    ----------
    lambda_ : λ ≥ 0, the pull of θ̃_i towards w_i. `lambda_=0` is local training: w stays what it is.
    eta : η > 0; w_i goes ηλ of the way to θ̃_i in a local round. None is `local.lr`.
    beta : β > 0, the server's step to the mean of what it receives; above 1 it goes beyond.
    R, K : local rounds, one batch each, and steps of θ̃_i in each.
    """

    lambda_: float = 15.0
    eta: float | None = 0.005
    beta: float = 1.0
    R: int = 20
    K: int = 5

    def problems(self, setting: Setting) -> list[str]:
        found = [f"algorithm.{k}={getattr(self, k)} must be at least 1." for k in "RK" if getattr(self, k) < 1]
        positive = {"beta": self.beta} | ({} if self.eta is None else {"eta": self.eta})
        found += [f"algorithm.{k}={v:g} must be positive." for k, v in positive.items() if not v > 0]
        if not self.lambda_ >= 0:
            found.append(f"algorithm.lambda_={self.lambda_:g} must be at least 0.")
        if setting.local.lr * self.lambda_ >= 2:
            found.append(
                f"algorithm.lambda_={self.lambda_:g} times local.lr={setting.local.lr:g} must be below 2, or the pull "
                f"throws the personal model ever farther past the shared one. Try local.lr={0.2 / self.lambda_:.1g}."
            )
        return found + plain_sgd(self.name, setting.local)

    def init_client(self, net: Net, server: SharedModel, seed: int) -> Client:
        return Client(server.w)

    def round(self, server: SharedModel, own: Placed[Client], fed: Federation) -> tuple[SharedModel, Placed[Client]]:
        omega, (theta,) = fed.down(server.w.weights, "model"), own  # w_{i,0} = w^t
        pull = (fed.lr if self.eta is None else self.eta) * self.lambda_
        local = Envelope(fed.lr, self.lambda_, self.K, pull)
        theta, omega = fed.train(local, Placed.pack(Pair, theta, omega), steps=self.R)
        _, stats = theta
        weights, stats = fed.up(Placed.pack(Params, omega, stats), "model").mean()
        w_next = Params(lerp(server.w.weights, weights, self.beta), stats)  # (1 − β) w^t + β Σ_i w_{i,R} / S
        return SharedModel(w_next), Placed.pack(Client, theta)

    def personal(self, server: SharedModel, own: Placed[Client], fed: Federation) -> Placed[Params]:
        (theta,) = own  # not w_{i,R}, which the round leaves behind
        return theta
