"""KT-pFL: every client distils from its own mixture of all clients' soft predictions, by coefficients that are learnt.

Zhang et al., NeurIPS 2021, Algorithm 1. "l. n" below is its line n.

    paper        here                meaning
    c            server.c            knowledge coefficients; row n: the weights of what client n receives
    w^n          own.w               client n's model, of any architecture
    s(w^n, ·)    s                   its probabilities at temperature T on the round's public samples D_r
    η_1, E       local.lr, .epochs   local training
    D_n          fed.sizes           samples of client n
    λ, ρ         lambda_, rho        weights of the transfer and of the pull of c towards 1/N

Departures
    D1  l. 14-16 are indented into the loop over epochs; as in the text they follow it, with one exchange a round.
        The server mixes the soft predictions, so c never travels (l. 3, 8).
    D2  Eq. 7 wants the predictions after distillation, which are never sent: it takes those sent before.
    D3  the text gives c no domain; a mixture must stay a distribution, so rows are projected on the simplex.
    D4  the pull of ρ is an implicit step: to first order and in its fixed points it is Eq. 7's explicit one, which
        swings when 2 η_3 ρ > 1 and diverges beyond 2.
    D5  L_KL is a mean over public samples, where Eq. 2 writes a sum, and without a factor T².
    D6  with a partial cohort Eq. 7 sees the cohort's rows and columns alone, renormalised (N = m, D of the cohort);
        their part of each row's sum stays what it was.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedkd.algorithms.base import Nets, OwnModel, OwnModels, Setting, View, register
from fedkd.algorithms.steps import supervised
from fedkd.core import coefficients
from fedkd.core.losses import Batch, soft_cross_entropy
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net

SLOPES = {"kl": coefficients.kl_slope, "mse": coefficients.mse_slope}


class Server(NamedTuple):
    c: Tensor  # [N, N]; [0, 0] before the first round, when N is not known


@register("ktpfl")
@dataclass(frozen=True)
class KTpFL(OwnModels):
    """Personalised group knowledge transfer.

    Parameters
    ----------
    temperature : T > 0, of the soft predictions and of the distillation.
    distillation_steps : R ≥ 0, passes over the round's public samples; `distillation_steps=0` is local training.
    public_batch_size : public samples a step of the distillation.
    eta_2 : η_2, the learning rate of the distillation; None is η_1, as in the paper. T² η_1 would undo what T takes.
    eta_3 : η_3 > 0, the learning rate of c; the paper's 0.01 (EMNIST, Fashion-MNIST) or 0.02 (CIFAR-10).
    lambda_ : λ ≥ 0, the weight of L_KL in Eq. 7; at Q public samples, λ = Q makes the mean Eq. 2's sum.
    rho : ρ ≥ 0, the pull towards 1/N; the paper's 0.6 or 0.7 (CIFAR-10). `rho=inf` is the uniform teacher.
    domain : of c's rows: `simplex`, `softmax` (of 5 c, stored back, as the released code has it), or `none`.
    objective : Eq. 7's loss: `kl`, or `mse` between probabilities (the released code's).
    """

    public_data: ClassVar[bool] = True

    temperature: float = 10.0
    distillation_steps: int = 1
    public_batch_size: int = 256
    eta_2: float | None = None
    eta_3: float = 0.01
    lambda_: float = 1.0
    rho: float = 0.6
    domain: str = "simplex"
    objective: str = "kl"

    def problems(self, setting: Setting) -> list[str]:
        found = coefficients.problems(self.eta_3, self.rho, self.domain)
        if self.temperature <= 0:
            found.append(f"algorithm.temperature={self.temperature:g} must be positive.")
        if self.objective not in SLOPES:
            found.append(f"algorithm.objective={self.objective} does not exist; there are {', '.join(SLOPES)}.")
        return found

    def init_server(self, nets: Nets, seed: int) -> Server:
        return Server(torch.zeros(0, 0))

    def round(self, server: Server, own: Placed[OwnModel], fed: Federation) -> tuple[Server, Placed[OwnModel]]:
        c = server.c if len(server.c) else coefficients.uniform(fed.population, server.c)  # l. 1
        (w,) = own
        w = fed.fit(supervised, w)  # l. 11-13 (Eq. 5)
        s = fed.up(fed.each(self.soften, fed.predict_public(w)), "soft predictions").stack()
        block = coefficients.block(c, fed.cohort, self.domain)
        teacher = fed.down_each(list(coefficients.mix(block.weights, s)), "personalised soft predictions")
        if self.distillation_steps:
            pace = {"epochs": self.distillation_steps, "batch_size": self.public_batch_size}
            w = fed.fit(self.distil, w, teacher, over="public", lr=self.eta_2, **pace)  # l. 14-16 (Eq. 6)
        slope = self.lambda_ * coefficients.shares(fed.sizes, c) * SLOPES[self.objective](block.weights, s)
        weights = coefficients.descend(block.weights, slope, self.eta_3, self.rho, self.domain)  # l. 7 (Eq. 7)
        return Server(coefficients.put_back(c, block, weights)), Placed.pack(OwnModel, w)

    def soften(self, net: Net, logits: Tensor) -> Tensor:
        """s(w^n, x) of Definition 3.1."""
        return torch.softmax(logits.float() / self.temperature, -1)

    def distil(self, net: Net, w: Params, public: Batch, teacher: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """L_KL(Σ_m c_nm s_m, s_n), up to the teacher's entropy, which has no gradient."""
        out = net.forward(w, public.x)
        return soft_cross_entropy(out.logits / self.temperature, teacher[public.row], public), out.stats

    def observe(self, server: Server, own: Placed[OwnModel], fed: Federation) -> dict[str, float | View]:
        matrix = View("matrix", server.c.cpu().numpy(), rows="client, receiving", columns="client, giving")
        return {"coefficients": matrix, "coefficients/self": float(server.c.diagonal().mean())}
