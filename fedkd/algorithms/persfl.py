"""PersFL: distil into each client the round's global model that suits it best.

Divi et al., arXiv:2105.15191, Algorithm 1. "l. n" below is its line n.

    paper          here                     meaning
    G_e            server.w                 the global model after round e; G_0 is the initial one
    O_k, l_k'      own.teacher, own.loss    client k's teacher, and its mean loss on k's validation split
    A_k            students                 client k's personal models, one for each point of the grid
    |λ|_C, |T|_C   imitation, temperature   the values of λ and of T among which each client chooses
    E              distil_epochs            epochs of stage 2

Departures
    D1  stage 2 is `personal` after the last round; before it, clients are judged by their teachers.
    D2  a client judges every model it receives, G_{e-1} in round e, and the last G_e when its personal model is made.
    D3  Eq. 3 would choose λ and T by the training objective, which λ=1 wins at once: they are chosen on the validation
        split. A client without validation samples takes the newest model and the first point of the grid.
    D4  the grid is not printed: every average of Table 5 fits the default one.
    D5  Eq. 3 has KL(student, teacher), l. 20 KL(teacher, student): `kl` is the latter. It then has the gradient of
        Eq. 7 (`ce`, PersFL-GD), from which Table 6 tells it apart: `reduction=mean` (PyTorch's default) does so too.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkd.algorithms.base import Algorithm, Nets, Setting, View, only, register
from fedkd.algorithms.steps import supervised
from fedkd.core import fit, tree
from fedkd.core.errors import unknown
from fedkd.core.factors import Factors
from fedkd.core.losses import Batch, correct, per_sample_cross_entropy
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net

ROUNDING = 1e-6  # of a loss
CHOICES = {
    "teacher": ("optimal", "last"),
    "objective": ("kl", "reverse_kl", "ce"),
    "reduction": ("batchmean", "mean"),
    "select": ("loss", "accuracy"),
}


class Server(NamedTuple):
    w: Params
    kept: tuple[Params, ...]  # G_0, G_1, ... of the rounds before, with `keep_models`


class Client(NamedTuple):
    teacher: Params
    loss: Tensor
    round: Tensor  # the e of the teacher G_e


class Verdict(NamedTuple):
    """Sums over a client's validation samples."""

    loss: Tensor
    hits: Tensor
    samples: Tensor


@register("persfl")
@dataclass(frozen=True)
class PersFL(Algorithm):
    """FedAvg, then distillation at home; needs a validation split.

    Parameters
    ----------
    imitation : the values of λ, in [0, 1], the weight of the soft loss. `imitation=[0]` is fine-tuning the teacher.
    temperature : the values of T > 0.
    distil_epochs : E ≥ 1, epochs of stage 2; null: as many as `local` has in a round.
    teacher : `optimal`, or `last`, the last global model (Table 4's column FedAvg).
    objective : the soft loss. `kl`, KL(teacher ‖ student); `reverse_kl`; `ce`, the cross-entropy of PersFL-GD (Eq. 7).
    reduction : of either KL. `batchmean`, the mean over samples; `mean` divides by the classes, too.
    select : λ and T by the least `loss` (as the teacher, Eq. 2) or the best `accuracy` on the validation split.
    keep_models : the server keeps the global models of all rounds, for `newcomers` to choose from.
    """

    imitation: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    temperature: tuple[float, ...] = (1.0, 5.0, 25.0)
    distil_epochs: int | None = None
    teacher: str = "optimal"
    objective: str = "kl"
    reduction: str = "batchmean"
    select: str = "loss"
    keep_models: bool = False

    def problems(self, setting: Setting) -> list[str]:
        chosen = {field: getattr(self, field) for field in CHOICES}
        found = [unknown(f"algorithm.{field}", value, CHOICES[field]) for field, value in chosen.items()
                 if value not in CHOICES[field]]  # fmt: skip
        if not self.imitation or not all(0 <= value <= 1 for value in self.imitation):
            found.append(f"algorithm.imitation={list(self.imitation)} must be one or more numbers from 0 to 1.")
        if not self.temperature or not all(0 < value < math.inf for value in self.temperature):
            found.append(f"algorithm.temperature={list(self.temperature)} must be one or more positive numbers.")
        if self.distil_epochs is not None and self.distil_epochs < 1:
            found.append(f"algorithm.distil_epochs={self.distil_epochs} must be at least 1.")
        if not setting.validation:
            found.append(
                "algorithm=persfl chooses each client's teacher, λ and T on a validation split, but "
                "partition.validation=0.\n"
                "Type partition.train=0.6 partition.validation=0.2 partition.test=0.2 (the paper's split)."
            )
        return found

    def init_server(self, nets: Nets, seed: int) -> Server:
        return Server(only(nets).init(seed), ())

    def init_client(self, net: Net, server: Server, seed: int) -> Client:
        return unjudged(server.w)

    def round(self, server: Server, own: Placed[Client], fed: Federation) -> tuple[Server, Placed[Client]]:
        g_e = fed.down(server.w, "model")
        own = self.judge(own, g_e, fed.round - 1, fed)  # l. 3-11
        w = fed.fit(supervised, g_e)
        kept = (*server.kept, server.w) if self.keep_models else ()
        return Server(fed.up(w, "model").mean(fed.sizes), kept), own

    def judge(self, own: Placed[Client], g_e: Placed[Params], e: int, fed: Federation) -> Placed[Client]:
        """Every client keeps the better of its teacher and G_e."""
        verdict = fed.sum(validate, g_e, over="validation")  # l. 5
        return fed.each(lambda net, *parts: self.better(e, *parts), own, g_e, verdict)

    def better(self, e: int, own: Client, g_e: Params, verdict: Verdict) -> Client:
        loss = verdict.loss / verdict.samples.clamp(min=1)
        take = (loss < own.loss) | (verdict.samples == 0) | (self.teacher == "last")  # l. 6
        judged = Client(g_e, loss, torch.full_like(own.round, e))
        return tree.map(lambda new, old: torch.where(take, new, old), judged, own)  # l. 7, 8

    @property
    def points(self) -> list[tuple[float, float]]:
        """The grid; without imitation T has no say, so that λ=0 is there once."""
        points = itertools.product(self.imitation, self.temperature)
        return [(lam, t) for lam, t in points if lam > 0 or t == self.temperature[0]]

    def distil(self, teacher: Placed[Params], fed: Federation) -> tuple[Placed[Params], Placed[Tensor]]:
        """Stage 2: all students of all clients at once; the best of each client, and its point of the grid."""
        students = fed.each(lambda net, o_k: tree.expand(o_k, len(self.points)), teacher)  # A_k <- O_k
        students = fed.fit(Students(self.loss), students, teacher, epochs=self.distil_epochs)  # l. 14-25
        verdicts = fed.sum(validate_all, students, over="validation")
        best, point = fed.each(self.best, students, verdicts)
        return best, point

    def loss(self, a: Tensor, o: Tensor, batch: Batch) -> Tensor:
        """Σ over the grid and the batch of l. 18, from the logits of the students, [points, b, L], and of o."""
        lam, t = torch.tensor(self.points, dtype=o.dtype, device=o.device).T.unsqueeze(-1)
        hard = per_sample_cross_entropy(a, batch.y.unsqueeze(-2).expand(a.shape[:-1]))  # l. 19
        soft = self.soft(o.unsqueeze(-3) / t.unsqueeze(-1), a / t.unsqueeze(-1))  # l. 20, 21
        each: Tensor = (1 - lam) * hard + lam * t**2 * soft  # l. 18 (Eq. 3, Eq. 7)
        return (batch.weight.unsqueeze(-2) * each).sum()

    def soft(self, o: Tensor, a: Tensor) -> Tensor:
        """The soft loss of each sample, from the teacher's and the student's softened logits; taken class by class."""
        s, q = torch.log_softmax(o.mT, -2), torch.log_softmax(a.mT, -2)
        if self.objective == "ce":
            return -(s.exp() * q).sum(-2)
        divergence = s.exp() * (s - q) if self.objective == "kl" else q.exp() * (q - s)
        return divergence.mean(-2) if self.reduction == "mean" else divergence.sum(-2)

    def best(self, net: Net, students: Params, verdicts: Verdict) -> tuple[Params, Tensor]:
        """The first best student; one that is better in the last digits only, in which executors differ, is not."""
        least = verdicts.loss.min() * (1 + ROUNDING)
        best = verdicts.loss <= least if self.select == "loss" else verdicts.hits
        point = best.float().argmax()
        return tree.pick(students, point), point

    def personal(self, server: Server, own: Placed[Client], fed: Federation) -> Placed[Params]:
        teacher, *_ = self.judge(own, fed.down(server.w, "model"), fed.round, fed)
        if fed.round < fed.rounds:
            return teacher
        best, fed.notes["point"] = self.distil(teacher, fed)
        return best

    def shared(self, server: Server) -> Params:
        return server.w

    def newcomers(self, server: Server, fed: Federation) -> Placed[Params]:
        """Personal models of clients that join after the training (Section 6), without a new round.

        They choose among the models that the server has kept, or make do with the last one, and distil. `fed` is a
        federation of theirs, ``Federation(world, world.rounds, clients, ledger)``; its ledger has what they receive.
        """
        received = [fed.down(w, "model") for w in (*server.kept, server.w)]
        own = fed.each(lambda net, w: unjudged(w), received[0])
        for e, g_e in enumerate(received):
            own = self.judge(own, g_e, e, fed)
        teacher, *_ = own
        best, _ = self.distil(teacher, fed)
        return best

    def observe(self, server: Server, own: Placed[Client], fed: Federation) -> dict[str, float | View]:
        """The round each teacher came from and, after stage 2, how many clients chose each point of the grid."""
        *_, e = self.judge(own, fed.down(server.w, "model"), fed.round, fed)
        rounds = fed.up(e, "round").stack().cpu().numpy()
        found: dict[str, float | View] = {
            "teacher_round/mean": float(rounds.mean()),
            "teacher_round": View("clusters", rounds),
        }
        if "point" in fed.notes:
            chosen = np.array(self.points)[fed.up(fed.notes["point"], "point").stack().cpu().numpy()]
            counts = np.zeros((len(self.imitation), len(self.temperature)))
            for lam, t in chosen:
                counts[self.imitation.index(lam), self.temperature.index(t)] += 1
            rows, columns = (", ".join(f"{value:g}" for value in grid) for grid in (self.imitation, self.temperature))
            found |= {"imitation/mean": float(chosen[:, 0].mean()), "temperature/mean": float(chosen[:, 1].mean())}
            found["grid"] = View("matrix", counts, rows=f"λ: {rows}", columns=f"T: {columns}")
        return found


@dataclass(frozen=True)
class Students:
    """The students of a client do not meet: the gradient of the sum of their losses is each one's own."""

    loss: Callable[[Tensor, Tensor, Batch], Tensor]  # from the students' logits and the teacher's

    def __call__(self, net: Net, students: Params, batch: Batch, teacher: Params) -> tuple[Tensor, dict[str, Tensor]]:
        passed = torch.vmap(lambda student: net.forward(student, batch.x))(students)
        return self.loss(passed.logits, net.predict(teacher, batch.x), batch), passed.stats

    def hand(self, net: Net, students: Params, batch: Batch, teacher: Params) -> Factors | None:
        """The gradient by the logits is autograd's, the rest is written out; clients stacked."""
        if net.dense is None or batch.y.dim() == 1:
            return None
        o = net.predict(teacher, batch.x)
        reads, a = net.dense.trace(students.weights, batch.x)
        by_client = a.view(len(o), -1, *a.shape[1:])
        slope, _ = fit.gradient(lambda z: (self.loss(z["a"].mT, o, batch), {}), {"a": by_client})
        found = Factors()
        net.dense.retrace(students.weights, reads, slope["a"].reshape(a.shape), found)
        return found


def unjudged(w: Params) -> Client:
    """A client that has not judged a model yet: any will be better than w."""
    zero = next(iter(w.weights.values())).new_zeros(())
    return Client(w, zero + math.inf, zero.long())


@fit.of_passes
def validate(net: Net, batch: Batch, w: Params) -> Verdict:
    logits = net.predict(w, batch.x).float()
    losses, hits = per_sample_cross_entropy(logits, batch.y), correct(logits, batch.y)
    return Verdict((batch.weight * losses).sum(-1), (batch.weight * hits).sum(-1), batch.weight.sum(-1))


def validate_all(net: Net, batch: Batch, students: Params) -> Verdict:
    return torch.vmap(lambda student: validate(net, batch, student))(students)
