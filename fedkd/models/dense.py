"""The gradient of cross-entropy in fully connected networks, written out for many clients at once.

Autograd would come to the same, in twice the time where the networks are small: most of it is not arithmetic.
"""

import torch
from torch import Tensor, nn

from fedkd.core.losses import Batch


def linear_layers(features: nn.Module, head: nn.Module) -> list[str] | None:
    """The names of the linear layers, first to last, of a network that is these with ReLU between; None: it is not."""
    found: list[str] = []
    inner = list(features.named_children()) or [("", features)]
    for i, (name, layer) in enumerate(inner):
        expected = nn.Flatten if i == 0 else nn.Linear if i % 2 else nn.ReLU
        if not isinstance(layer, expected) or getattr(layer, "bias", True) is None:
            return None
        found += [f"features.{name}"] if expected is nn.Linear else []
    whole = len(inner) % 2 == 1 and isinstance(head, nn.Linear) and head.bias is not None
    return [*found, "head"] if whole else None


def cross_entropy_slopes(layers: list[str], weights: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """∇ of each client's cross-entropy on its batch; everything has a first axis over clients.

    Activations lie [clients, units, batch], so that gradients come out in the weights' own layout.
    """
    reads = [batch.x.flatten(-3).mT]  # what each layer reads
    for layer in layers:
        z = torch.baddbmm(weights[f"{layer}.bias"].unsqueeze(-1), weights[f"{layer}.weight"], reads[-1])
        reads.append(z.relu_() if layer is not layers[-1] else z)
    delta = torch.softmax(reads.pop(), -2)
    delta.scatter_add_(-2, batch.y.unsqueeze(-2), delta.new_tensor(-1).expand_as(batch.y).unsqueeze(-2))
    delta *= batch.weight.unsqueeze(-2)
    found = {}
    for layer in reversed(layers):
        h = reads.pop()
        found[f"{layer}.bias"] = delta.sum(-1)
        found[f"{layer}.weight"] = torch.bmm(delta, h.mT)
        if reads:
            delta = torch.bmm(weights[f"{layer}.weight"].mT, delta) * (h > 0)
    return {name: found[name].to(w.dtype) for name, w in weights.items()}
