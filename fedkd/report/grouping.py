"""Group runs that differ only in the seed, and name each group by what tells it from the others.

A config has a hundred keys; a table has room for two or three. Of all the keys that differ between runs only those are
told that the told ones before them do not already settle. So `algorithm.mu`, which exists for fedprox alone, takes no
column, and a sweep over it reads `fedprox (mu=0.1)`, `fedprox (mu=1)`, `fedavg`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedkd.core.errors import ConfigError, unknown
from fedkd.report.collect import Run, Value

ABSENT = ""

ALGORITHM, DATASET = "algorithm.name", "dataset.name"
FIRST = (ALGORITHM, DATASET, "partition.name", "model.name")
HEADLINES = (*FIRST, "clients", "rounds")

# Runs that differ here were judged on different test samples: their accuracies are not to be ranked together.
TASK = ("dataset", "partition", "clients")


class Column(NamedTuple):
    """A column of labels: a part's name with its settings beside it, or any one key."""

    title: str
    keys: list[str]

    @property
    def of_names(self) -> bool:
        return self.keys[0].endswith(".name")


@dataclass(frozen=True)
class Group:
    """Runs that are one experiment under several seeds."""

    runs: tuple[Run, ...]
    settings: Mapping[str, Value]  # the telling keys and their values
    task: tuple[str, ...]  # labels that say what was learnt
    method: tuple[str, ...]  # labels that say how


@dataclass(frozen=True)
class Grouping:
    """All groups, task by task, and what the reader must know about their names."""

    groups: list[Group]
    keys: list[str]  # that tell the groups apart
    task: list[Column]
    method: list[Column]
    together: list[str]  # keys that differ, but only as the telling ones do
    pooled: list[str]  # keys that differ within a group
    common: dict[str, Value]  # the headline keys that all runs share


def group_runs(runs: Sequence[Run], by: Sequence[str] | None = None) -> Grouping:
    """Group by the keys that differ, the seed aside, or by exactly the keys `by`."""
    differing = differing_keys(runs)
    keys = [full_key(key, runs) for key in by] if by else telling_keys(runs, differing) or [ALGORITHM]
    columns = columns_of(keys)
    task = [column for column in columns if _part(column.keys[0]) in TASK]
    method = [column for column in columns if _part(column.keys[0]) not in TASK]
    hidden = [key for key in differing if key not in keys]
    together = [key for key in hidden if settled(key, keys, runs)]

    def labels(side: Sequence[Column], run: Run) -> tuple[str, ...]:
        return tuple(label(column, run, runs) for column in side)

    def place(group: Group) -> list[tuple[bool, Any]]:
        return [_order(group.settings[key]) for column in task for key in column.keys]

    alike: dict[tuple[Value, ...], list[Run]] = {}
    for run in runs:
        alike.setdefault(_values(run, keys), []).append(run)
    groups = [
        Group(
            tuple(members), dict(zip(keys, values, strict=True)), labels(task, members[0]), labels(method, members[0])
        )
        for values, members in alike.items()
    ]
    return Grouping(
        groups=sorted(groups, key=place),
        keys=keys,
        task=task,
        method=method,
        together=[key for key in together if f"{_part(key)}.name" not in keys],  # goes without saying
        pooled=[key for key in hidden if key not in together],
        common={
            key: runs[0].config[key] for key in HEADLINES if key in runs[0].config and key not in (*differing, *keys)
        },
    )


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Keys other than the seed with more than one value, absence being one; the names of parts first."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "seed")
    found = [key for key in keys if len({_value(run, key) for run in runs}) > 1]
    return sorted(found, key=_rank)


def telling_keys(runs: Sequence[Run], differing: Sequence[str]) -> list[str]:
    """The keys needed to tell runs apart, each one because those before it leave it open."""
    told: list[str] = []
    for key in differing:
        # A reader looks for these two even where the other one settles them.
        if key in (ALGORITHM, DATASET) or not settled(key, told, runs):
            told.append(key)
    return told


def settled(key: str, by: Sequence[str], runs: Iterable[Run]) -> bool:
    """Whether runs that agree in the keys `by` agree in `key`."""
    pairs = {(_values(run, by), _value(run, key)) for run in runs}
    return len(pairs) == len({values for values, _ in pairs})


def full_key(key: str, runs: Sequence[Run]) -> str:
    """A key as a user types it: `dataset` is `dataset.name`, as on the command line of fedkd."""
    known = {known for run in runs for known in run.config}
    for candidate in (key, f"{key}.name"):
        if candidate in known:
            return candidate
    worth_naming = dict.fromkeys([*differing_keys(runs), *(known & set(HEADLINES))])
    raise ConfigError(unknown("--by", key, list(worth_naming)))


def columns_of(keys: Sequence[str]) -> list[Column]:
    """Keys by column: a part's settings join its name, where that is told; any other key stands alone."""
    by_first: dict[str, list[str]] = {}
    for key in sorted(keys, key=lambda key: not key.endswith(".name")):
        name = f"{_part(key)}.name"
        by_first.setdefault(name if name in by_first else key, []).append(key)
    shortened = [_short(first) for first in by_first]
    titles = [short if shortened.count(short) == 1 else first for short, first in zip(shortened, by_first, strict=True)]
    return [Column(title, members) for title, members in zip(titles, by_first.values(), strict=True)]


def label(column: Column, run: Run, runs: Sequence[Run]) -> str:
    """`fedprox (mu=0.1)`: the first key's value, and the others where they differ among runs that share it."""
    first, *others = column.keys
    namesakes = [other for other in runs if _value(other, first) == _value(run, first)]
    undecided = [key for key in others if key in run.config and len({_value(other, key) for other in namesakes}) > 1]
    settings = ", ".join(f"{_short(key)}={value_text(run.config[key])}" for key in undecided)
    return value_text(_value(run, first)) + (f" ({settings})" if settings else "")


def _rank(key: str) -> tuple[int, int]:
    return (FIRST.index(key) if key in FIRST else len(FIRST), not key.endswith(".name"))


def _value(run: Run, key: str) -> Value:
    return run.config.get(key, ABSENT)


def _values(run: Run, keys: Iterable[str]) -> tuple[Value, ...]:
    return tuple(_value(run, key) for key in keys)


def _part(key: str) -> str:
    return key.partition(".")[0]


def _short(key: str) -> str:
    return key.removesuffix(".name").rpartition(".")[2]


def value_text(value: Value) -> str:
    """A value as one would type it to fedkd."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _order(value: Value) -> tuple[bool, Any]:
    """Numbers by size, before words."""
    return (False, value) if isinstance(value, int | float) else (True, str(value))
