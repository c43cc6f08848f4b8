"""Fully connected networks: multinomial logistic regression and DNNs; they fit every image size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from fedkd.models.net import Architecture, Shape, not_positive, register
from fedkd.models.split import Split


@register("mlr")
@dataclass(frozen=True)
class MLR(Architecture):
    """Multinomial logistic regression, the convex model of CGPFL and pFedMe; its features are the pixels."""

    def module(self, shape: Shape, classes: int) -> Split:
        return Split(nn.Flatten(), nn.Linear(math.prod(shape), classes))


@register("dnn")
@dataclass(frozen=True)
class DNN(Architecture):
    """Hidden layers with ReLU. CGPFL's DNN has one of 128, PersFL's one of 100.

    Parameters
    ----------
    hidden : widths of the hidden layers, first to last.
    """

    hidden: tuple[int, ...] = (128,)

    def module(self, shape: Shape, classes: int) -> Split:
        widths = (math.prod(shape), *self.hidden)
        return Split(nn.Sequential(nn.Flatten(), *hidden_layers(widths)), nn.Linear(widths[-1], classes))

    def problems(self) -> list[str]:
        return super().problems() + not_positive(self, "hidden")


def hidden_layers(widths: Sequence[int]) -> list[nn.Module]:
    """Linear layers from each width to the next, with ReLU after each."""
    return [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
