"""Names for the classes a config can choose: algorithms, partitions, models."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from fedkd.core.errors import ConfigError, unknown

T = TypeVar("T")
C = TypeVar("C")


class Registry(Mapping[str, type[T]]):
    """Name -> class; every entry is a dataclass whose fields are its config.

    Entries sign themselves up with ``@register("name")`` when their module is imported. The modules of `package`
    are imported by walking it at the first look, so a new file is all a new entry needs.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind, self.package = kind, package
        self._entries: dict[str, type[T]] = {}
        self._walked = False

    def __call__(self, name: str) -> Callable[[type[C]], type[C]]:
        def register(entry: type[C]) -> type[C]:
            if name in self._entries and self._entries[name].__qualname__ != entry.__qualname__:
                raise ConfigError(f"{self.kind}={name} is registered twice: {self._entries[name]} and {entry}.")
            self._entries[name] = entry  # type: ignore[assignment]
            entry.name = name  # type: ignore[attr-defined]
            return entry

        return register

    def _all(self) -> dict[str, type[T]]:
        if not self._walked:
            self._walked = True
            for module in pkgutil.iter_modules(importlib.import_module(self.package).__path__):
                importlib.import_module(f"{self.package}.{module.name}")
        return self._entries

    def __getitem__(self, name: str) -> type[T]:
        try:
            return self._all()[name]
        except KeyError:
            raise ConfigError(unknown(self.kind, name, list(self._entries))) from None

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._all()))

    def __len__(self) -> int:
        return len(self._all())
