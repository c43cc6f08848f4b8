"""The seam in every network: features, then head."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from fedkd.core.errors import ConfigError


class Pass(NamedTuple):
    """What a pass through a network gives."""

    logits: Tensor
    features: Tensor  # what enters the head
    stage_in: Tensor  # what enters the last stage
    stage_out: Tensor  # what leaves it


class Split(nn.Module):
    """Features, then head: the one seam every method that shares or looks at a part of the network uses.

    Parameters
    ----------
    stage : which of the features' children are the network's last stage; what precedes it is the trunk, what follows
        it (pooling, a feature layer) only shapes the features. None: the last two convolutions or linear layers.
    inner : the layers of the stage, by their names in `features`, that read its inner channels: those a narrower stage
        has fewer of. None: every convolution or linear layer of the stage but its first.

    A projection, if the architecture asks for one, comes between them, and what leaves it counts as the features.
    """

    projection: nn.Module | None

    def __init__(
        self, features: nn.Module, head: nn.Module, stage: slice | None = None, inner: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.features = features
        self.register_module("projection", None)  # parameters are listed in this order
        self.head = head
        children = dict(features.named_children()) if isinstance(features, nn.Sequential) else {}
        layers = [name for name, child in children.items() if isinstance(child, nn.Linear | nn.modules.conv._ConvNd)]
        if stage is None:
            first = [*children].index(layers[-2:][0]) if layers else 0
            flat = len(children) > 1 and isinstance([*children.values()][-1], nn.Flatten)  # leave maps as they are
            stage = slice(first, len(children) - flat)
        within = [*children][stage]
        self.inner = [name for name in layers if name in within][1:] if inner is None else [*inner]
        # before, in and after the last stage: a tuple, as the layers belong to `features`
        self.parts: tuple[nn.Module, nn.Module, nn.Module] = (nn.Identity(), features, nn.Identity())
        if isinstance(features, nn.Sequential):
            self.parts = features[: stage.start], features[stage], features[stage.stop :]

    def forward(self, x: Tensor) -> Pass:
        trunk, stage, rest = self.parts
        stage_in = trunk(x)
        stage_out = stage(stage_in)
        features = rest(stage_out)
        if self.projection is not None:
            features = self.projection(features)
        return Pass(self.head(features), features, stage_in, stage_out)

    def project(self, size: int) -> None:
        """Put a two-layer projection of `size` outputs before the head (Chen et al., ICML 2020)."""
        if not isinstance(self.head, nn.Linear):
            raise ConfigError("model.projection goes before a linear head, and this model has none; leave it null.")
        wide, classes = self.head.in_features, self.head.out_features
        self.projection = nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, size))
        self.head = nn.Linear(size, classes)
