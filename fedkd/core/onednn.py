"""Large matrix products on a CPU by oneDNN: torch's own library leaves half of an AMD core unused."""

from typing import Final

import torch
from torch import Tensor

from fedkd.core.unlocked import plain

LARGE: Final = 2**21  # multiply-adds from which on it gains more than the call costs
DEEP: Final = 16  # terms of each sum from which on it gains more than adding the product into a matrix at once would


def usable(tensor: Tensor) -> bool:
    """Whether oneDNN can multiply such tensors."""
    return plain(tensor) and tensor.dtype is torch.float32 and torch._C._has_mkldnn


def gains(a: Tensor, b: Tensor) -> bool:
    """Whether `product` is the faster way to a b or a bᵀ."""
    return a.dim() == b.dim() == 2 and large(a, b) and a.dtype is b.dtype and usable(a)


def large(a: Tensor, b: Tensor, least: int = LARGE) -> bool:
    """Whether these matrices' product gains by it."""
    return a.size(0) * b.numel() >= least


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a bᵀ, with `bias` added to its rows."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")  # type: ignore[no-any-return]
