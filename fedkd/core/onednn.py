"""Large matrix products on a CPU by oneDNN: torch's own library leaves half of an AMD core unused."""

import torch
from torch import Tensor

LARGE = 2**21  # multiply-adds from which on it gains more than the call costs
LARGE_OF_MANY = 2**24  # ... than taking the products of many clients one by one costs
DEEP = 16  # terms of each sum from which on it gains more than adding the product into a matrix at once would


def gains(a: Tensor, b: Tensor, least: int = LARGE) -> bool:
    """Whether `product` is the faster way to a b or a bᵀ, being one of at `least` so many multiply-adds."""
    return (
        a.dim() == b.dim() == 2
        and a.shape[0] * b.numel() >= least
        and type(a) is Tensor  # not one that has a shape only
        and a.device.type == "cpu"
        and a.dtype is b.dtype is torch.float32
        and not torch.is_autocast_enabled("cpu")
        and torch._C._has_mkldnn
    )


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a bᵀ, with `bias` added to its rows."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")  # type: ignore[no-any-return]
