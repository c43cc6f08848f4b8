"""Errors a user can act on: what was asked, what is true, what to type next."""

from collections.abc import Sequence
from difflib import get_close_matches


class FedkdError(Exception):
    """A problem the user can mend; shown without a traceback."""


class ConfigError(FedkdError):
    """Everything that is wrong with one config, reported together."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(FedkdError):
    """A dataset, a split or a file that cannot be used as asked."""


class CheckpointError(FedkdError):
    """A checkpoint that is damaged, foreign, or belongs to another config."""


class Diverged(FedkdError):
    """Local training of some clients gave NaN or infinity."""

    def __init__(self, clients: Sequence[int], round: int, lr: float) -> None:
        self.clients = list(clients)
        names = ", ".join(map(str, self.clients[:10])) + (", ..." if len(self.clients) > 10 else "")
        super().__init__(
            f"training diverged (NaN or infinity) in round {round} at client {names}.\n"
            f"The likely cause is the learning rate: local.lr={lr:g}. Try a smaller one (local.lr={lr / 10:g}), "
            "or on_nan=skip to go on without such clients. What was logged so far is kept."
        )


class Incomplete(SystemExit):
    """The command did what was asked, but a part of it failed; its output says which."""

    def __init__(self) -> None:
        super().__init__(1)


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """One sentence for a name that does not exist, with the near ones first."""
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"{kind}={name} does not exist. {hint}There are: {', '.join(sorted(known))}."
