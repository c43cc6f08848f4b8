"""Sim-pFL and TopK-pFL: clients distil from the soft predictions that resemble their own.

Zhang et al., NeurIPS 2021 (KT-pFL), Section 5.1: its two baselines without learnt coefficients.

    paper       here         meaning
    c           c            coefficients of the round; row n: the weights of what client n receives
    s(w^n, ·)   s            client n's probabilities at temperature T on the round's public samples
    w^n         own.w        client n's model, of any architecture
    K           K            how many clients TopK-pFL hears

Departures
    D1  the paper says no more than "cosine similarity between two local soft predictions": it is taken of all public
        samples' probabilities at once, at the temperature at which they are sent, and rows are divided by their sums.
    D2  the coefficients of Sim-pFL include c_nn, so that client n itself is the first of TopK-pFL's K; the K weigh the
        same.
    D3  with a partial cohort the clients are the cohort's; the server keeps every client's last row, to be looked at.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkd.algorithms.base import OwnModel, Setting, register
from fedkd.algorithms.mixtures import Coefficients, SoftMixtures
from fedkd.core import coefficients
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed


@dataclass(frozen=True)
class Similar(SoftMixtures):
    """What Sim-pFL and TopK-pFL share: all but the coefficients made of similarities."""

    @abstractmethod
    def coefficients(self, similarity: Tensor) -> Tensor:
        """c, whose rows are distributions, of the cohort's similarities, [m, m]."""

    def round(
        self, server: Coefficients, own: Placed[OwnModel], fed: Federation
    ) -> tuple[Coefficients, Placed[OwnModel]]:
        w, s = self.exchange(own, fed)
        c = self.coefficients(cosines(s))
        seen = server.c if len(server.c) else server.c.new_zeros(fed.population, fed.population)
        at = torch.from_numpy(fed.cohort).to(c.device)
        rows = c.new_zeros(len(c), len(seen)).index_copy(1, at, c)
        return Coefficients(seen.index_copy(0, at, rows)), self.learn(w, coefficients.mix(c, s), fed)


@register("sim_pfl")
@dataclass(frozen=True)
class SimPFL(Similar):
    """Everyone in proportion to the similarity; where all predict the same it is the uniform teacher."""

    def coefficients(self, similarity: Tensor) -> Tensor:
        return similarity / similarity.sum(1, keepdim=True)


@register("topk_pfl")
@dataclass(frozen=True)
class TopKPFL(Similar):
    """The most similar alone.

    Parameters
    ----------
    K : how many, the client itself being one; the paper's 5. From the cohort's size on it is the uniform teacher.
    """

    K: int = 5

    def problems(self, setting: Setting) -> list[str]:
        found = super().problems(setting)
        if self.K < 1:
            found.append(f"algorithm.K={self.K} must be at least 1, which is the client itself.")
        return found

    def coefficients(self, similarity: Tensor) -> Tensor:
        count = min(self.K, len(similarity))
        itself = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
        nearest = (
            similarity.masked_fill(itself, torch.inf).topk(count).indices
        )  # rounding must not put a twin before it
        return torch.zeros_like(similarity).scatter(1, nearest, 1 / count)


def cosines(s: Tensor) -> Tensor:
    """cos(s_n, s_m) of the flattened predictions, [m, m]."""
    flat = torch.nn.functional.normalize(s.flatten(1))
    return flat @ flat.T
