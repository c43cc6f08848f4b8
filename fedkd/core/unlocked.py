"""Functions of tensors that do not hold Python's lock.

Workers are threads (`federation/workers.py`). In Python each of them asks for the lock after every operation of torch,
and two that step small networks wait for it longer than they compute.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

F = TypeVar("F", bound=Callable[..., Any])
_lock = threading.RLock()


@contextmanager
def compiling() -> Iterator[None]:
    """One thread at a time, as filters of warnings are common to all; none of TorchScript's being deprecated."""
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def unlocked(fn: F) -> F:
    """`fn`, whose first argument is a list of tensors, run by TorchScript's interpreter, which needs no lock.

    It does the same operations in the same order. Torch calls TorchScript deprecated, so nothing but speed depends on
    it: where it is gone, on other devices, in a lower precision and for tensors without values Python runs `fn`.
    """

    @functools.cache
    def compiled() -> Callable[..., Any]:
        with compiling():
            try:
                return torch.jit.script(fn)  # type: ignore[no-any-return]
            except (AttributeError, OSError, RuntimeError):  # no TorchScript, no source to read, not in its language
                return fn

    @functools.wraps(fn)
    def run(tensors: list[Tensor], *rest: Any) -> Any:
        return (compiled() if plain(tensors[0]) else fn)(tensors, *rest)

    run.compiled = compiled  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor on a CPU, and nothing is done to what it is computed with."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and peek_interpreter_stack() is None
        and not torch.is_autocast_enabled("cpu")
    )
