"""FedDF: one model an architecture, averaged, then distilled at the server from the ensemble of all received models.

Lin et al., NeurIPS 2020, Algorithms 1 (one architecture) and 3 (several). "l. n" is Algorithm 1's line n. pFedDF (Zhang
et al., NeurIPS 2021, footnote 3) lets every client fine-tune the fused model of its architecture.

    paper     here             meaning
    x_t^p     server.models    the fused model of prototype p, an architecture
    x̂_t^k     received         client k's model after its local training
    x_{t,j}   x                the server's student after j steps
    N         steps            at most so many steps of the student
    d         public           a mini-batch of unlabelled samples, without those held out for validation

Departures
    D1  the paper stops early by accuracy on a labelled tenth of the training data. Here the public samples have no
        labels: a tenth of a round's is held out, and the student judged by its divergence from the ensemble there. The
        divergence must fall by more than 1e-4 to count as better; the best student is kept, at worst the average.
    D2  an architecture without a client in the cohort keeps its model.
    D3  received models with worse than random accuracy are not dropped: this, too, would take labels.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkd.algorithms.base import Algorithm, Nets, Setting, View, register
from fedkd.algorithms.steps import supervised
from fedkd.core.fit import Descended, Patience, descend, of_passes
from fedkd.core.losses import Batch, looked_up, soft_cross_entropy
from fedkd.core.optim import Adam
from fedkd.core.seeds import numpy_rng
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net


class Server(NamedTuple):
    models: dict[str, Params]  # by architecture
    steps: dict[str, Tensor]  # of the student that was kept in the last round


@register("feddf")
@dataclass(frozen=True)
class FedDF(Algorithm):
    """Ensemble distillation for model fusion.

    Parameters
    ----------
    steps : N ≥ 0, the most steps of a student in a round; `steps=0` is FedAvg within each architecture.
    batch_size : public samples a step.
    server_lr : η > 0, the student's first learning rate (Adam); it falls to 0 in N steps along a cosine.
    validation : the part of the round's public samples held out, in [0, 1); `validation=0`: all N steps are taken.
    patience : steps without a better student that end the distillation.
    check_every : steps from one look at the held-out samples to the next.
    """

    one_architecture: ClassVar[bool] = False
    public_data: ClassVar[bool] = True

    steps: int = 10_000
    batch_size: int = 128
    server_lr: float = 1e-3
    validation: float = 0.1
    patience: int = 1000
    check_every: int = 100

    def problems(self, setting: Setting) -> list[str]:
        least = {"steps": 0, "batch_size": 1, "patience": 1, "check_every": 1}
        found = [f"algorithm.{k}={getattr(self, k)} must be at least {v}." for k, v in least.items()
                 if getattr(self, k) < v]  # fmt: skip
        if not 0 < self.server_lr < math.inf:
            found.append(f"algorithm.server_lr={self.server_lr:g} must be positive and finite; the paper has 0.001.")
        if not 0 <= self.validation < 1:
            found.append(f"algorithm.validation={self.validation:g} must be at least 0 and below 1, e.g. 0.1.")
        return found

    def init_server(self, nets: Nets, seed: int) -> Server:
        return Server({arch: net.init(seed) for arch, net in nets.items()}, {arch: torch.tensor(0) for arch in nets})

    def round(self, server: Server, own: Placed[Any], fed: Federation) -> tuple[Server, Placed[Any]]:
        x = fed.fit(supervised, fed.down_by_architecture(server.models, "model"))  # l. 4-5
        received = fed.up(x, "model")
        votes = [fed.nets[arch].predict(x_k, fed.public) for arch, x_k in zip(fed.archs, received, strict=True)]
        ensemble = torch.stack(votes).mean(0)  # 1/|S_t| Σ_k f(x̂_t^k, ·): of all architectures
        models, steps = dict(server.models), dict(server.steps)
        for arch in dict.fromkeys(fed.archs):
            places = np.flatnonzero(np.array(fed.archs) == arch)
            x_0 = received.among(places).mean(fed.sizes[places])  # l. 6
            models[arch], count = self.fuse(fed.nets[arch], x_0, ensemble, fed)
            steps[arch] = torch.full_like(steps[arch], count)
        return Server(models, steps), own  # l. 10

    def fuse(self, net: Net, x_0: Params, ensemble: Tensor, fed: Federation) -> Descended:
        """l. 7-9: the student x_0 follows the ensemble on the round's public samples."""
        if not self.steps:
            return Descended(x_0, 0)
        order = numpy_rng(fed.seed("validation")).permutation(len(ensemble))
        held_out, rest = np.split(order, [round(self.validation * len(order))])
        at = torch.from_numpy(held_out).to(ensemble.device)
        unseen, teacher = fed.public[at], torch.log_softmax(ensemble[at], -1)

        def divergence(x: Params) -> Tensor:
            student = torch.log_softmax(net.predict(x, unseen), -1)
            return (teacher.exp() * (teacher - student)).sum(-1).mean()

        return descend(
            self.loss, net, x_0, torch.softmax(ensemble, -1),
            batch=fed.public_batches(rest, self.steps, self.batch_size),  # l. 8
            steps=self.steps,
            optimizer=lambda j: Adam(self.server_lr * (1 + math.cos(math.pi * j / self.steps)) / 2),
            patience=Patience(divergence, self.patience, self.check_every) if len(held_out) else None,
        )  # fmt: skip

    @of_passes
    def loss(self, net: Net, x: Params, public: Batch, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """KL(σ(mean logits of the ensemble) ‖ σ(f(x, d))) but for a constant (AVGLOGITS, l. 9)."""
        out = net.forward(x, public.x)
        return soft_cross_entropy(out.logits, looked_up(target, public.row), public), out.stats

    def personal(self, server: Server, own: Placed[Any], fed: Federation) -> Placed[Params]:
        return fed.down_by_architecture(server.models, "model")

    def shared(self, server: Server) -> Params | None:
        return next(iter(server.models.values())) if len(server.models) == 1 else None

    def observe(self, server: Server, own: Placed[Any], fed: Federation) -> dict[str, float | View]:
        return {f"distillation/steps/{arch}": float(count) for arch, count in server.steps.items()}


@register("pfeddf")
@dataclass(frozen=True)
class PFedDF(FedDF):
    """FedDF whose clients fine-tune the fused model when they are judged.

    Parameters
    ----------
    finetune_epochs : passes of each client over its training data, the paper's "several"; None: as `local` trains in a
        round. `finetune_epochs=0` is FedDF.
    """

    finetune_epochs: int | None = None

    def problems(self, setting: Setting) -> list[str]:
        found, epochs = super().problems(setting), self.finetune_epochs
        wrong = f"algorithm.finetune_epochs={epochs} must be null (as local trains), 0 (feddf's model) or more."
        return [*found, wrong] if epochs is not None and epochs < 0 else found

    def personal(self, server: Server, own: Placed[Any], fed: Federation) -> Placed[Params]:
        fused = super().personal(server, own, fed)
        return fused if self.finetune_epochs == 0 else fed.fit(supervised, fused, epochs=self.finetune_epochs)
