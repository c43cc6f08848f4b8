"""Large matrix products on a CPU by oneDNN: torch's own library leaves half of an AMD core unused."""

import torch
from torch import Tensor

LARGE = 2**21  # multiply-adds from which on it gains more than the call costs


def gains(a: Tensor, b: Tensor, least: int = LARGE) -> bool:
    """Whether `product` is the faster way to a bᵀ, being one of at `least` so many multiply-adds."""
    return (
        a.dim() == b.dim() == 2
        and len(a) * b.numel() >= least
        and type(a) is Tensor  # not one that has a shape only
        and a.device.type == "cpu"
        and a.dtype is b.dtype is torch.float32
        and not torch.is_autocast_enabled("cpu")
        and torch._C._has_mkldnn
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ."""
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")  # type: ignore[no-any-return]
