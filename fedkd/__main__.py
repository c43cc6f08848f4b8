"""The process of the command `fedkd`; `python -m fedkd` is the same."""

import atexit
import gc
import os
import sys


def command() -> None:
    """`fedkd.cli.main`, begun and left sooner: a dry run would else take a third more time."""
    gc.set_threshold(50_000)  # starting makes a million objects and hardly any garbage to look for
    done: list[bool] = []
    atexit.register(_leave, done)  # before all others, so that it is the last to run
    from fedkd.cli import main

    main()
    done.append(True)


def _leave(done: list[bool]) -> None:
    """End the process, if all went well, without taking apart object by object what it holds."""
    if done:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    command()
