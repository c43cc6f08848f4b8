"""Steps that several papers share, each a pure function of one client."""

import torch
from torch import Tensor

from fedkd.core.losses import Batch, cross_entropy
from fedkd.core.tree import Params
from fedkd.models.net import Net


def supervised(net: Net, w: Params, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy on the client's labels: F_k(w)."""
    out = net.forward(w, batch.x)
    return cross_entropy(out.logits, batch), out.stats


def class_sums(values: Tensor, batch: Batch, classes: int) -> tuple[Tensor, Tensor]:
    """By class, the sum of the batch's values, [classes, ...], and its samples, [classes]; for `fed.sum`."""
    of_class = batch.weight.unsqueeze(-1) * (batch.y.unsqueeze(-1) == torch.arange(classes, device=batch.y.device))
    total = (of_class.T @ values.flatten(1)).float()  # bf16 where autocast says so
    return total.view(classes, *values.shape[1:]), of_class.sum(0)
