"""Dataclasses as their source declares them, without importing it: a help text need not wait for torch.

Of each module only the dataclasses are run, and of those only the fields, so a field's default is a literal.
"""

import __future__

import ast
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar  # noqa: F401 - fields are annotated with ClassVar

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


@cache
def dataclasses_in(module: str) -> dict[str, type]:
    """The module's dataclasses by name, with the fields they declare and inherit."""
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    parts = ast.parse(file.read_text(encoding="utf-8")).body
    home = {alias.name: str(part.module) for part in parts if isinstance(part, ast.ImportFrom) for alias in part.names}
    known: dict[str, Any] = {"__name__": __name__, "ABC": ABC, "dataclass": dataclass, "field": field}
    known["register"] = _register
    found = {}
    for part in parts:
        if isinstance(part, ast.ClassDef) and any("dataclass" in ast.unparse(mark) for mark in part.decorator_list):
            for base in map(ast.unparse, part.bases):
                if base not in known:
                    known[base] = dataclasses_in(home[base])[base]
            part.body = [line for line in part.body if isinstance(line, ast.AnnAssign)] or [ast.Pass()]
            fields = ast.fix_missing_locations(ast.Module([part], []))
            # annotations stay words, as with `from __future__ import annotations`: some name types of torch
            exec(compile(fields, file, "exec", __future__.annotations.compiler_flag), known)
            found[part.name] = known[part.name]
    return found


def registered_in(package: str) -> dict[str, type]:
    """Name -> dataclass of all that the package's modules register."""
    modules = sorted(file.stem for file in ROOT.joinpath(*package.split(".")).glob("*.py"))
    classes = [cls for module in modules for cls in dataclasses_in(f"{package}.{module}").values()]
    return {vars(cls)["registered"]: cls for cls in classes if "registered" in vars(cls)}


def _register(name: str) -> Callable[[type[T]], type[T]]:
    def note(cls: type[T]) -> type[T]:
        cls.registered = name  # type: ignore[attr-defined]
        return cls

    return note
