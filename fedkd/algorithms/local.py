"""Local training: every client on its own; the baseline without communication.

    paper   here    meaning
    w_k     own.w   client k's model, kept between rounds

Departures
    none
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from fedkd.algorithms.base import OwnModel, OwnModels, register
from fedkd.algorithms.steps import supervised
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed


@register("local")
@dataclass(frozen=True)
class Local(OwnModels):
    """No hyperparameters beyond `local`'s; every client trains every round."""

    everyone: ClassVar[bool] = True

    def round(self, server: Any, own: Placed[OwnModel], fed: Federation) -> tuple[Any, Placed[OwnModel]]:
        (w,) = own
        return server, Placed.pack(OwnModel, fed.fit(supervised, w))
