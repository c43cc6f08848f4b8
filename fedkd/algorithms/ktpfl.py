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

from fedkd.algorithms.base import OwnModel, Setting, register
from fedkd.algorithms.mixtures import Coefficients, SoftMixtures
from fedkd.core import coefficients
from fedkd.core.errors import unknown
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed

SLOPES = {"kl": coefficients.kl_slope, "mse": coefficients.mse_slope}


@register("ktpfl")
@dataclass(frozen=True)
class KTpFL(SoftMixtures):
    """Personalised group knowledge transfer.

    Parameters
    ----------
    eta_3 : η_3 > 0, the learning rate of c; the paper's 0.01 (EMNIST, Fashion-MNIST) or 0.02 (CIFAR-10).
    lambda_ : λ ≥ 0, the weight of L_KL in Eq. 7; at Q public samples, λ = Q makes the mean Eq. 2's sum.
    rho : ρ ≥ 0, the pull towards 1/N; the paper's 0.6 or 0.7 (CIFAR-10). `rho=inf` is the uniform teacher.
    domain : of c's rows: `simplex`, `softmax` (of 5 c, stored back, as the released code has it), or `none`.
    objective : Eq. 7's loss: `kl`, or `mse` between probabilities (the released code's).
    """

    eta_3: float = 0.01
    lambda_: float = 1.0
    rho: float = 0.6
    domain: str = "simplex"
    objective: str = "kl"

    def problems(self, setting: Setting) -> list[str]:
        wrong = [] if self.objective in SLOPES else [unknown("algorithm.objective", self.objective, list(SLOPES))]
        return super().problems(setting) + coefficients.problems(self.eta_3, self.rho, self.domain) + wrong

    def round(
        self, server: Coefficients, own: Placed[OwnModel], fed: Federation
    ) -> tuple[Coefficients, Placed[OwnModel]]:
        c = server.c if len(server.c) else coefficients.uniform(fed.population, server.c)  # l. 1
        w, s = self.exchange(own, fed)  # l. 11-13 (Eq. 5); s(w^n, x) of Definition 3.1
        block = coefficients.block(c, fed.cohort, self.domain)
        own = self.learn(w, coefficients.mix(block.weights, s), fed)  # l. 14-16 (Eq. 6): L_KL(Σ_m c_nm s_m, s_n)
        slope = self.lambda_ * coefficients.shares(fed.sizes, c) * SLOPES[self.objective](block.weights, s)
        weights = coefficients.descend(block.weights, slope, self.eta_3, self.rho, self.domain)  # l. 7 (Eq. 7)
        return Coefficients(coefficients.put_back(c, block, weights)), own
