"""FedMD: clients of any architecture agree on their scores for public samples.

Li and Wang, NeurIPS workshop 2019 (arXiv:1910.03581), Algorithm 1.

    paper      here         meaning
    f_k(x)     scores       client k's class scores (logits) on the public samples
    f~(x)      consensus    their mean over the clients
    D_0, d_j   fed.public   public data, and the part of it used in a round

Departures
    D1  the public data has no labels, so the transfer-learning stage on it is left out; a client's first `revisit` is
        its training on private data.
    D2  the distance of `digest` is not given in the text; `l1` is our choice, `l2` the option.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedkd.algorithms.base import OwnModel, OwnModels, Setting, register
from fedkd.algorithms.steps import supervised
from fedkd.core.fit import of_passes
from fedkd.core.losses import Batch, looked_up, mean_absolute_error, mean_squared_error
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net

DISTANCES = {"l1": mean_absolute_error, "l2": mean_squared_error}


@register("fedmd")
@dataclass(frozen=True)
class FedMD(OwnModels):
    """Distillation to the mean scores.

    Parameters
    ----------
    digest_epochs : passes over the round's public samples towards the consensus; 0 is local training.
    digest_batch_size : public samples a step of `digest`.
    distance : `l1` or `l2`, between a client's scores and the consensus.
    """

    public_data: ClassVar[bool] = True

    digest_epochs: int = 1
    digest_batch_size: int = 64
    distance: str = "l1"

    def problems(self, setting: Setting) -> list[str]:
        if self.distance in DISTANCES:
            return []
        return [f"algorithm.distance={self.distance} does not exist; there are {', '.join(DISTANCES)}."]

    def round(self, server: Any, own: Placed[OwnModel], fed: Federation) -> tuple[Any, Placed[OwnModel]]:
        (w,) = own
        scores = fed.up(fed.predict_public(w), "scores")  # communicate
        consensus = fed.down(scores.mean(), "consensus")  # aggregate, distribute
        if self.digest_epochs:
            pace = {"epochs": self.digest_epochs, "batch_size": self.digest_batch_size}
            w = fed.fit(self.digest, w, consensus, over="public", **pace)
        return server, Placed.pack(OwnModel, fed.fit(supervised, w))  # revisit

    @of_passes
    def digest(self, net: Net, w: Params, public: Batch, consensus: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The distance of f_k to the consensus f~ on public samples."""
        out = net.forward(w, public.x)
        return DISTANCES[self.distance](out.logits, looked_up(consensus, public.row), public), out.stats
