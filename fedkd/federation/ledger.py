"""The ledger: every number that crosses the network, by round, way and kind."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fedkd.core import tree
from fedkd.core.tree import Index, Params, Rows, Tree


class Row(NamedTuple):
    """One kind of message of one round."""

    round: int
    way: str  # up | down
    what: str
    clients: int  # senders or recipients
    params: int  # numbers in every recipient's copy; 0 for running statistics and `Index`, which no paper counts
    bytes: int
    broadcast_params: int  # each distinct message once: the convention of PerFed-CKT's tables
    broadcast_bytes: int


class Ledger:
    """Rows, and two sums of them: `unicast` counts every copy, `broadcast` each distinct server message once."""

    def __init__(self, rows: Iterable[Sequence[Any]] = ()) -> None:
        self.rows: list[Row] = []
        ways = [f"comm/{way}/{unit}" for way in ("up", "down", "total", "broadcast") for unit in ("params", "bytes")]
        self.totals = dict.fromkeys(ways, 0)  # of all rows so far, under the metrics' names
        self.extend(Row(*row) for row in rows)

    def extend(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            for way in (row.way, "total"):
                self.totals[f"comm/{way}/params"] += row.params
                self.totals[f"comm/{way}/bytes"] += row.bytes
            self.totals["comm/broadcast/params"] += row.broadcast_params
            self.totals["comm/broadcast/bytes"] += row.broadcast_bytes

    def up(self, round: int, what: str, clients: int, stacks: Sequence[Tree]) -> None:
        """Clients to server: every copy is distinct."""
        for label, leaves, counts in _kinds(what, stacks):
            params, size = _size(leaves, counts)
            self.extend([Row(round, "up", label, clients, params, size, params, size)])

    def down(self, round: int, what: str, clients: int, value: Tree) -> None:
        """One value to every client."""
        for label, leaves, counts in _kinds(what, [value]):
            params, size = _size(leaves, counts)
            self.extend([Row(round, "down", label, clients, params * clients, size * clients, params, size)])

    def down_each(self, round: int, what: str, values: Sequence[Tree]) -> None:
        """To each client its own value; a tensor that goes to several clients is broadcast once."""
        for label, leaves, counts in _kinds(what, values):
            params, size = _size(leaves, counts)
            once = _size({_place(leaf): leaf for leaf in leaves}.values(), counts)
            self.extend([Row(round, "down", label, len(values), params, size, *once)])

    def by_kind(self) -> list[dict[str, Any]]:
        """Unicast sums for each (way, what), for the summary."""
        kinds: dict[tuple[str, str], list[int]] = {}
        for row in self.rows:
            sums = kinds.setdefault((row.way, row.what), [0, 0])
            sums[0] += row.params
            sums[1] += row.bytes
        return [{"way": way, "what": what, "params": p, "bytes": b} for (way, what), (p, b) in kinds.items()]


def _kinds(what: str, values: Sequence[Tree]) -> Iterable[tuple[str, list[Tensor], bool]]:
    """The values' counted leaves; as kinds of their own, their running statistics and the numbers of known things."""
    counted: list[Tensor] = []
    statistics: list[Tensor] = []
    numbers: list[Tensor] = []
    for value in values:
        _sort(value, counted, statistics, numbers)
    if counted:
        yield what, counted, True
    if statistics:
        yield f"{what} statistics", statistics, False
    if numbers:
        yield f"{what} number", numbers, False


def _sort(value: Tree, counted: list[Tensor], statistics: list[Tensor], numbers: list[Tensor]) -> None:
    if isinstance(value, Params):
        counted.extend(value.weights.values())
        statistics.extend(value.stats.values())
    elif isinstance(value, Index):
        numbers.append(value.number)
    elif isinstance(value, Rows):
        counted.append(value.values if tree.is_fake(value.values) else value.values[value.present.bool()])
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            _sort(part, counted, statistics, numbers)
    else:
        counted.extend(tree.leaves(value))


def _size(leaves: Iterable[Tensor], counts: bool) -> tuple[int, int]:
    leaves = list(leaves)
    numbers = sum(leaf.numel() for leaf in leaves)
    return numbers if counts else 0, sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def _place(leaf: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Two views of the same memory are the same message."""
    return leaf.untyped_storage()._cdata, int(leaf.storage_offset()), tuple(leaf.shape)
