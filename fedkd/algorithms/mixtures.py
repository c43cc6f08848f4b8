"""What the methods share whose clients each distil from a mixture of all clients' soft predictions."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedkd.algorithms.base import Nets, OwnModel, OwnModels, Setting, View, who_from_whom
from fedkd.algorithms.steps import supervised
from fedkd.core.fit import of_passes
from fedkd.core.losses import Batch, looked_up, soft_cross_entropy
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net


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

    @of_passes
    def distil(self, net: Net, w: Params, public: Batch, teacher: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """KL(teacher ‖ own soft predictions), up to the teacher's entropy, which has no gradient."""
        out = net.forward(w, public.x)
        return soft_cross_entropy(out.logits / self.temperature, looked_up(teacher, public.row), public), out.stats

    def observe(self, server: Coefficients, own: Placed[OwnModel], fed: Federation) -> dict[str, float | View]:
        return who_from_whom("coefficients", server.c)
