"""KT-pFL for one architecture: every client is drawn towards its own mixture of all clients' parameters.

Zhang et al., NeurIPS 2021, Algorithm 2 (Appendix C). "l. n" below is its line n.

    paper    here                meaning
    c        server.c            knowledge coefficients; row n: the weights of what client n receives
    w_0      server.w_0          everyone's first model
    w^n      own.w               client n's model
    η_1, E   local.lr, .epochs   local training
    D_n      fed.sizes           samples of client n
    λ, ρ     lambda_, rho        weights of the transfer and of the pull of c towards 1/N

Departures
    D1  l. 14-15 are indented into the loop over epochs; as in the text they follow it, with one exchange a round.
        The server mixes the parameters, so c never travels (l. 3, 8).
    D2  Eq. 11 wants the parameters after the transfer, which are never sent: it takes those sent before.
    D3  the text gives c no domain; rows are projected on the simplex, so that mixtures are averages.
    D4  the pull of ρ is an implicit step: to first order and in its fixed points it is Eq. 11's explicit one, which
        swings when 2 η_3 ρ > 1 and diverges beyond 2.
    D5  L_dis is "e.g. MSELoss". A mean over P parameters makes a step of Eq. 10 go 2 η_2/P of the way to the mixture,
        which is nothing: the default is the squared distance, whose step goes 2 η_2 of the way.
    D6  running statistics have no gradient: they go the same part of the way, and c does not look at them.
    D7  with a partial cohort Eq. 11 sees the cohort's rows and columns alone, renormalised (N = m, D of the cohort);
        their part of each row's sum stays what it was.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedkd.algorithms.base import Nets, OwnModel, OwnModels, Setting, View, only, register, who_from_whom
from fedkd.algorithms.steps import supervised
from fedkd.core import coefficients, tree
from fedkd.core.tree import Params, lerp
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net

DISTANCES = ("squared", "mse")


class Server(NamedTuple):
    c: Tensor  # [N, N]; [0, 0] before the first round, when N is not known
    w_0: Params


@register("ktpfl_homo")
@dataclass(frozen=True)
class KTpFLHomo(OwnModels):
    """Personalised mixtures of parameters.

    Parameters
    ----------
    distillation_steps : R ≥ 0, steps towards the mixture; `distillation_steps=0` is local training from a common start.
    eta_2 : η_2 in [0, 1/2], the size of such a step; R = 1 and η_2 = 1/2 put the mixture in the model's place.
    eta_3 : η_3 > 0, the learning rate of c; the paper's 0.005 (EMNIST, Fashion-MNIST) or 0.01 (CIFAR-10).
    lambda_ : λ ≥ 0, the weight of L_dis in Eq. 11.
    rho : ρ ≥ 0, the pull towards 1/N (not given here; 0.6 as with soft predictions). `rho=inf` is the uniform mixture.
    domain : of c's rows: `simplex`, `softmax` (of 5 c, stored back), or `none`.
    distance : L_dis: `squared`, or `mse`, which divides it by the number of parameters P.
    """

    one_architecture: ClassVar[bool] = True

    distillation_steps: int = 1
    eta_2: float = 0.01
    eta_3: float = 0.005
    lambda_: float = 1.0
    rho: float = 0.6
    domain: str = "simplex"
    distance: str = "squared"

    def problems(self, setting: Setting) -> list[str]:
        found = coefficients.problems(self.eta_3, self.rho, self.domain)
        if self.distance not in DISTANCES:
            found.append(f"algorithm.distance={self.distance} does not exist; there are {', '.join(DISTANCES)}.")
        if self.distance == "squared" and not 0 <= self.eta_2 <= 0.5:
            found.append(f"algorithm.eta_2={self.eta_2:g} would step past the mixture: choose one from 0 to 0.5.")
        return found

    def init_server(self, nets: Nets, seed: int) -> Server:
        return Server(torch.zeros(0, 0), only(nets).init(seed))

    def init_client(self, net: Net, server: Server, seed: int) -> OwnModel:
        return OwnModel(server.w_0)  # l. 3

    def round(self, server: Server, own: Placed[OwnModel], fed: Federation) -> tuple[Server, Placed[OwnModel]]:
        c = server.c if len(server.c) else coefficients.uniform(fed.population, server.c)  # l. 1
        (w,) = own
        w = fed.fit(supervised, w)  # l. 11-13 (Eq. 9)
        models: Params = fed.up(w, "model").stack()
        block = coefficients.block(c, fed.cohort, self.domain)
        mixtures = coefficients.mix(block.weights, models)
        mixture = fed.down_each([tree.take(mixtures, n) for n in range(len(fed.cohort))], "personalised model")
        unit = 1.0 if self.distance == "squared" else 1 / only(fed.nets).params
        for _ in range(self.distillation_steps):  # l. 14-15
            w = fed.each(lambda net, w, mixture: self.transfer(unit, w, mixture), w, mixture)
        error = unit * coefficients.squared_slope(mixtures.weights, models.weights)
        slope = self.lambda_ * coefficients.shares(fed.sizes, c) * error
        weights = coefficients.descend(block.weights, slope, self.eta_3, self.rho, self.domain)  # l. 7 (Eq. 11)
        return server._replace(c=coefficients.put_back(c, block, weights)), Placed.pack(OwnModel, w)

    def transfer(self, unit: float, w: Params, mixture: Params) -> Params:
        """w^n ← w^n − η_2 ∇L_dis(Σ_m c_nm w^m, w^n) (Eq. 10)."""
        return lerp(w, mixture, 2 * self.eta_2 * unit)

    def observe(self, server: Server, own: Placed[OwnModel], fed: Federation) -> dict[str, float | View]:
        return who_from_whom("coefficients", server.c)
