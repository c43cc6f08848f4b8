"""Executors lift a function written for one client to all clients of one architecture."""

import torch

from fedkd.core.errors import ConfigError
from fedkd.federation.executors.base import Executor
from fedkd.federation.executors.serial import Serial
from fedkd.federation.executors.vmapped import Vmapped
from fedkd.models.net import Net

EXECUTORS = ("auto", "serial", "vmapped")


def choose(name: str, net: Net, device: torch.device, chunk: int | None, precision: str) -> Executor:
    """The executor of one architecture; `auto`: vmapped, except for convolutions on a CPU, which lose by it.

    Dropout needs `serial`: masks of stacked clients cannot be each one's own.
    """
    if name == "auto":
        name = "serial" if net.draws or (net.has_convolution and device.type == "cpu") else "vmapped"
    if name == "vmapped" and net.draws:
        raise ConfigError(
            f"model={net.name} has dropout, whose masks are each client's own, but executor=vmapped steps all clients "
            "at once. Choose executor=serial, or auto, which does."
        )
    dtype = torch.bfloat16 if precision == "bf16" else None
    return Serial(dtype) if name == "serial" else Vmapped(dtype, chunk)


__all__ = ["EXECUTORS", "Executor", "Serial", "Vmapped", "choose"]
