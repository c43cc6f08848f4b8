"""ResNet-18: torchvision's, its last layer a feature layer of d numbers, and a linear head (FedHKD)."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fedkd.models.net import Architecture, Shape, not_positive, register
from fedkd.models.split import Split


@register("resnet18")
@dataclass(frozen=True)
class ResNet18(Architecture):
    """ResNet-18 (He et al., CVPR 2016); fits every image size.

    Parameters
    ----------
    feature_size : d. FedHKD has 64 on CIFAR; no non-linearity follows the feature layer, as in its code.
    small_stem : a 3x3 convolution without pool in front, as KT-pFL's code has it, instead of torchvision's 7x7 of
        stride 2 and pool, which FedHKD's parameter counts show: 16 times the work, as the image is not shrunk.
    """

    feature_size: int = 64
    small_stem: bool = False

    def module(self, shape: Shape, classes: int) -> Split:
        from torchvision.models import resnet18  # its import takes seconds: only for those who ask

        backbone = resnet18(num_classes=self.feature_size)
        kernel, stride = (3, 1) if self.small_stem else (7, 2)
        backbone.conv1 = nn.Conv2d(shape[0], 64, kernel, stride, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's own
        if self.small_stem:
            backbone.maxpool = nn.Identity()
        inner = ("layer4.0.conv2", "layer4.1.conv2")
        return split(backbone, nn.Flatten(), nn.Linear(self.feature_size, classes), "layer4", inner)

    def problems(self) -> list[str]:
        return super().problems() + not_positive(self, "feature_size")


def split(backbone: nn.Module, flatten: nn.Module, head: nn.Module, stage: str, inner: Sequence[str]) -> Split:
    """A network of torchvision, cut at its children; `flatten` is what its code does before its last layer."""
    *body, last = backbone.named_children()
    at = [name for name, _ in body].index(stage)
    return Split(nn.Sequential(OrderedDict([*body, ("flatten", flatten), last])), head, slice(at, at + 1), inner)
