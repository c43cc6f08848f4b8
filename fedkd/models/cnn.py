"""Small convolutional networks: convolutions with ReLU and a 2x2 max-pool after each, then hidden layers.

One shape of network; each paper's is its numbers. The pool stands before the ReLU: max and ReLU commute, gradients and
all, and so the ReLU has a quarter of the work.
"""

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from fedkd.models.mlp import hidden_layers
from fedkd.models.net import Architecture, Shape, needs, not_positive, register
from fedkd.models.split import Split


@register("cnn")
@dataclass(frozen=True)
class CNN(Architecture):
    """McMahan et al.'s CNN (AISTATS 2017), also that of KT-pFL's Table 2.

    Parameters
    ----------
    channels : of the convolutions, first to last.
    kernel : side of their kernels.
    padding : around their inputs. 2 keeps a 5x5 convolution's size, as McMahan's count of 1,663,370 parameters
        needs; many later implementations have 0 (582,026 on 28x28, and too large a step for 8x8).
    hidden : widths of the fully connected layers before the head.
    """

    channels: tuple[int, ...] = (32, 64)
    kernel: int = 5
    padding: int = 2
    hidden: tuple[int, ...] = (512,)

    def module(self, shape: Shape, classes: int) -> Split:
        channels, height, width = (shape[0], *self.channels), shape[1], shape[2]
        lost = self.kernel - 1 - 2 * self.padding  # pixels of a side that one convolution takes away
        smallest = 1
        for _ in self.channels:
            height, width, smallest = (height - lost) // 2, (width - lost) // 2, 2 * smallest + lost
        needs(shape, smallest)
        convolutions = [
            layer
            for a, b in pairwise(channels)
            for layer in (nn.Conv2d(a, b, self.kernel, padding=self.padding), nn.MaxPool2d(2), nn.ReLU())
        ]
        widths = (channels[-1] * height * width, *self.hidden)
        features = nn.Sequential(*convolutions, nn.Flatten(), *hidden_layers(widths))
        return Split(features, nn.Linear(widths[-1], classes))

    def problems(self) -> list[str]:
        return super().problems() + not_positive(self, "channels", "kernel", "hidden")


@register("small_cnn")
@dataclass(frozen=True)
class SmallCNN(CNN):
    """A tiny one for digits' 8x8, of our own; its 128 features there are as many as DNN-128's."""

    channels: tuple[int, ...] = (16, 32)
    kernel: int = 3
    padding: int = 1
    hidden: tuple[int, ...] = ()


@register("lenet")
@dataclass(frozen=True)
class LeNet(CNN):
    """LeNet-5 as KT-pFL has it: ReLU and max-pools instead of sigmoids and mean-pools."""

    channels: tuple[int, ...] = (6, 16)
    padding: int = 0
    hidden: tuple[int, ...] = (120, 84)


@register("persfl_cnn")
@dataclass(frozen=True)
class PersFLCNN(LeNet):
    """PersFL's CNN for CIFAR-10, which comes out as LeNet.

    Its "fully connected layers have 400, 120, and 84 hidden neurons": 400 = 16·5·5 is what the second pool leaves of
    32x32, the first layer's input, as in pFedMe's code, which it follows.
    """


@register("perfed_ckt_cnn")
@dataclass(frozen=True)
class PerFedCKTCNN(LeNet):
    """PerFed-CKT's CNN, the small member of its mixture. The paper does not print the channels; LeNet's are used."""

    hidden: tuple[int, ...] = (120, 100, 84, 50)
