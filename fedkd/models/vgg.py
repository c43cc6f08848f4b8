"""VGG for 32x32: torchvision's features and a classifier of 512-512-512-classes.

Written out, not taken from torchvision: that would first make, and then throw away, its 124 million parameters for
ImageNet's classifier. A test holds the features against torchvision's.

Departures
    D1  no dropout in the classifier: executors could not agree on it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedkd.models.mlp import hidden_layers
from fedkd.models.net import Architecture, Shape, needs, not_positive, register
from fedkd.models.split import Split

CHANNELS = (64, 128, 256, 512, 512)  # of the five stages, each of which ends in a 2x2 pool


@register("vgg11")
@dataclass(frozen=True)
class VGG11(Architecture):
    """Eight 3x3 convolutions in five stages (Simonyan and Zisserman, ICLR 2015, A).

    Parameters
    ----------
    batch_norm : after each convolution, as in PerFed-CKT.
    hidden : widths of the fully connected layers before the head.
    """

    depths: ClassVar[tuple[int, ...]] = (1, 1, 2, 2, 2)  # convolutions of each stage

    batch_norm: bool = True
    hidden: tuple[int, ...] = (512, 512)

    def module(self, shape: Shape, classes: int) -> Split:
        needs(shape, 2 ** len(CHANNELS))
        widths = (CHANNELS[-1], *self.hidden)
        pool = nn.AdaptiveAvgPool2d(1)  # nothing to do for 32x32; larger images come out as many
        features = nn.Sequential(self._convolutions(shape[0]), pool, nn.Flatten(), *hidden_layers(widths))
        return Split(features, nn.Linear(widths[-1], classes))

    def _convolutions(self, channels: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for wide, depth in zip(CHANNELS, self.depths, strict=True):
            for _ in range(depth):
                convolution = nn.Conv2d(channels, wide, 3, padding=1)
                # torchvision's start; PyTorch's own lets the signal of a VGG without batch norm die out
                nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
                layers += [convolution, *([nn.BatchNorm2d(wide)] if self.batch_norm else []), nn.ReLU()]
                channels = wide
            layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers)

    def problems(self) -> list[str]:
        return super().problems() + not_positive(self, "hidden")


@register("vgg13")
@dataclass(frozen=True)
class VGG13(VGG11):
    """Ten convolutions (B)."""

    depths: ClassVar[tuple[int, ...]] = (2, 2, 2, 2, 2)
