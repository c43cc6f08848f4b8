"""SIGTERM and Ctrl-C as an exception, held back while something must not be torn."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(BaseException):
    """The run was asked to stop."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class _Watch:
    shielded = False
    pending: int | None = None


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it, SIGTERM and SIGINT raise `Interrupted`; a second one meanwhile is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        if _Watch.shielded:
            _Watch.pending = number
        else:
            _Watch.shielded = True  # saving comes next; a second signal waits for it
            raise Interrupted(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    _Watch.shielded, _Watch.pending = False, None
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def shielded() -> Iterator[None]:
    """Within it, a signal waits until the end."""
    _Watch.shielded = True
    try:
        yield
    finally:
        _Watch.shielded = False
    if _Watch.pending is not None:
        number, _Watch.pending = _Watch.pending, None
        raise Interrupted(number)
