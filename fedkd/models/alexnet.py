"""AlexNet sized for 28x28 and 32x32, with the layers of KT-pFL's code.

Departures
    D1  no dropout before the hidden layers: executors could not agree on it.
"""

from dataclasses import dataclass

from torch import nn

from fedkd.models.mlp import hidden_layers
from fedkd.models.net import Architecture, Shape, needs, not_positive, register
from fedkd.models.split import Split


@register("alexnet")
@dataclass(frozen=True)
class AlexNet(Architecture):
    """Five 3x3 convolutions, the first of stride 2, and three pools.

    Parameters
    ----------
    hidden : widths of the fully connected layers before the head.
    """

    hidden: tuple[int, ...] = (4096, 4096)

    def module(self, shape: Shape, classes: int) -> Split:
        needs(shape, 15)
        convolutions = nn.Sequential(
            *_convolution(shape[0], 64, stride=2),
            nn.MaxPool2d(2),
            *_convolution(64, 192),
            nn.MaxPool2d(2),
            *_convolution(192, 384),
            *_convolution(384, 256),
            *_convolution(256, 256),
            nn.MaxPool2d(2),
        )
        height, width = ((side + 1) // 16 for side in shape[1:])
        widths = (256 * height * width, *self.hidden)
        features = nn.Sequential(convolutions, nn.Flatten(), *hidden_layers(widths))
        return Split(features, nn.Linear(widths[-1], classes))

    def problems(self) -> list[str]:
        return super().problems() + not_positive(self, "hidden")


def _convolution(a: int, b: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(a, b, 3, stride, padding=1), nn.ReLU()]
