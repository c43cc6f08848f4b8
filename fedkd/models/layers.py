"""Layers that compute what torch's do, faster: `Net` puts them in their places."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack

from fedkd.core import onednn
from fedkd.core.draws import mask


class Linear(nn.Linear):
    """For one client on a CPU, large products go to oneDNN.

    For stacked clients it is written so that the gradients of their weights lie in memory as the weights do. Those of
    nn.Linear lie transposed, and an update across the two layouts takes longer than the matrix products.
    """

    def forward(self, x: Tensor) -> Tensor:
        if peek_interpreter_stack() is not None:  # under vmap
            y = self.weight @ x.mT
            return (y if self.bias is None else y + self.bias.unsqueeze(-1)).mT
        if not onednn.gains(x, self.weight):
            return super().forward(x)
        product: Tensor = Product.apply(x, self.weight)
        return product if self.bias is None else product + self.bias


class Product(torch.autograd.Function):
    """a bᵀ by oneDNN; differentiable as often as one likes."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return onednn.product(a, b)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (a, b), (for_a, for_b) = ctx.saved_tensors, ctx.needs_input_grad
        product: Any = Product.apply
        return product(slope, b.t()) if for_a else None, product(slope.t(), a.t()) if for_b else None


class Flatten(nn.Flatten):
    """Sends gradients back channels last, if its input lies so.

    From a gradient in torch's default layout a max-pool takes seven times as long.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and peek_interpreter_stack() is None and _lies_channels_last(x):
            x.register_hook(_channels_last)  # type: ignore[no-untyped-call]
        return super().forward(x)


class Dropout(nn.Dropout):
    """Masks by `drawing`'s seed; clients that are stacked cannot have masks of their own."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or peek_interpreter_stack() is not None:  # where torch says so
            return super().forward(x)
        return x * mask(x, self.p)


def _channels_last(slope: Tensor) -> Tensor:
    return slope.contiguous(memory_format=torch.channels_last)


def _lies_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


FASTER: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Linear, nn.Flatten: Flatten, nn.Dropout: Dropout}
