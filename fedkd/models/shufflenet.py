"""ShuffleNetV2 x1.0: torchvision's, its last layer a feature layer of d numbers, and a linear head (FedHKD)."""

from dataclasses import dataclass

from torch import Tensor, nn

from fedkd.models.net import Architecture, Shape, not_positive, register
from fedkd.models.resnet import split
from fedkd.models.split import Split


@register("shufflenet")
@dataclass(frozen=True)
class ShuffleNet(Architecture):
    """ShuffleNetV2 (Ma et al., ECCV 2018) of width 1; fits every image size.

    Parameters
    ----------
    feature_size : d. FedHKD has 32 on SVHN; no non-linearity follows the feature layer, as in its code.
    small_stem : the first convolution without stride and pool, as in KT-pFL's code: 16 times the work.
    """

    feature_size: int = 32
    small_stem: bool = False

    def module(self, shape: Shape, classes: int) -> Split:
        from torchvision.models import shufflenet_v2_x1_0  # its import takes seconds: only for those who ask

        backbone = shufflenet_v2_x1_0(num_classes=self.feature_size)
        stride = 1 if self.small_stem else 2
        backbone.conv1[0] = nn.Conv2d(shape[0], 24, 3, stride, padding=1, bias=False)
        if self.small_stem:
            backbone.maxpool = nn.Identity()
        inner = [f"stage4.{unit}.branch2.5" for unit in range(len(backbone.stage4))]  # each unit's last 1x1 convolution
        return split(backbone, SpatialMean(), nn.Linear(self.feature_size, classes), "stage4", inner)

    def problems(self) -> list[str]:
        return super().problems() + not_positive(self, "feature_size")


class SpatialMean(nn.Module):
    """The mean over height and width."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean([2, 3])
