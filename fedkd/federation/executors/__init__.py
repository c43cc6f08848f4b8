"""Executors lift a function written for one client to all clients of one architecture."""

import torch

from fedkd.federation.executors.base import Executor
from fedkd.federation.executors.serial import Serial
from fedkd.federation.executors.vmapped import Vmapped
from fedkd.models.net import Net

EXECUTORS = ("auto", "serial", "vmapped")


def choose(name: str, net: Net, device: torch.device, chunk: int | None, precision: str) -> Executor:
    """The executor of one architecture; `auto`: vmapped, except for convolutions on a CPU, which lose by it."""
    if name == "auto":
        name = "serial" if net.has_convolution and device.type == "cpu" else "vmapped"
    dtype = torch.bfloat16 if precision == "bf16" else None
    return Serial(dtype) if name == "serial" else Vmapped(dtype, chunk)


__all__ = ["EXECUTORS", "Executor", "Serial", "Vmapped", "choose"]
