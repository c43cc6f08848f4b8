"""Large matrix products on AMD's processors by oneDNN: torch's own library, MKL, leaves half of such a core unused.

On Intel's processors MKL is the faster of the two.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from fedkd.core.unlocked import plain

LARGE: Final = 2**21  # multiply-adds from which on it gains more than the call costs
DEEP: Final = 16  # terms of each sum from which on it gains more than adding the product into a matrix at once would


@cache
def faster() -> bool:
    """Whether it is, on this machine."""
    about = Path("/proc/cpuinfo")
    processor = about.read_text() if about.exists() else platform.processor()
    return "AuthenticAMD" in processor and torch._C._has_mkldnn


def usable(tensor: Tensor) -> bool:
    """Whether oneDNN multiplies such tensors, and faster."""
    return plain(tensor) and tensor.dtype is torch.float32 and faster()


def gains(a: Tensor, b: Tensor) -> bool:
    """Whether `product` is the faster way to a b or a bᵀ."""
    return a.dim() == b.dim() == 2 and large(a, b) and a.dtype is b.dtype and usable(a)


def large(a: Tensor, b: Tensor, least: int = LARGE) -> bool:
    """Whether these matrices' product gains by it."""
    return a.size(0) * b.numel() >= least


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a bᵀ, with `bias` added to its rows."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")  # type: ignore[no-any-return]
