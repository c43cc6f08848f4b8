"""FedAvg with local fine-tuning: the shared model, trained for a while on a client's own data, is its personal model.

Wang et al., arXiv:1910.10252, on McMahan et al., AISTATS 2017, Algorithm 1.

    paper   here              meaning
    w_t     server.w          the shared model
    e       finetune_epochs   epochs of the fine-tuning

Departures
    D1  clients are fine-tuned whenever they are judged, not once at the end; nothing of it is kept.
    D2  the fine-tuning's learning rate is that of the round; the paper searches one for each client.
"""

from dataclasses import dataclass
from typing import Any

from fedkd.algorithms.base import OneModel, Setting, SharedModel, register
from fedkd.algorithms.steps import supervised
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed


@register("fedavg_ft")
@dataclass(frozen=True)
class FedAvgFT(OneModel):
    """FedAvg's rounds; the client's own data has the last word.

    Parameters
    ----------
    finetune_epochs : e ≥ 0; None: as `local` trains in a round. `finetune_epochs=0` is FedAvg.
    """

    finetune_epochs: int | None = None

    def problems(self, setting: Setting) -> list[str]:
        if self.finetune_epochs is None or self.finetune_epochs >= 0:
            return []
        return [f"algorithm.finetune_epochs={self.finetune_epochs} must be at least 0, or null for local's."]

    def round(self, server: SharedModel, own: Placed[Any], fed: Federation) -> tuple[SharedModel, Placed[Any]]:
        w = fed.fit(supervised, fed.down(server.w, "model"))
        return SharedModel(fed.up(w, "model").mean(fed.sizes)), own

    def personal(self, server: SharedModel, own: Placed[Any], fed: Federation) -> Placed[Params]:
        w = fed.down(server.w, "model")
        return w if self.finetune_epochs == 0 else fed.fit(supervised, w, epochs=self.finetune_epochs)
