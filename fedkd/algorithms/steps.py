"""Steps that several papers share, each a pure function of one client."""

from torch import Tensor

from fedkd.core.losses import Batch, cross_entropy
from fedkd.core.tree import Params
from fedkd.models.net import Net


def supervised(net: Net, w: Params, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy on the client's labels: F_k(w)."""
    out = net.forward(w, batch.x)
    return cross_entropy(out.logits, batch), out.stats
