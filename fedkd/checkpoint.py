"""Checkpoints: a run's values in one file, replaced atomically; no pickled code in it."""

import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedkd import __version__
from fedkd.core.errors import CheckpointError
from fedkd.core.tree import Params, Tree

FORMAT = 1
FOLDER, FILE = "checkpoint", "state.pt"


def path_in(directory: Path) -> Path:
    return directory / FOLDER / FILE


def save(directory: Path, content: dict[str, Any]) -> None:
    """Write the content of a run; a run killed meanwhile finds the old checkpoint or the new one, never a half."""
    path = path_in(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    with open(fresh, "wb") as file:
        torch.save({"fedkd": FORMAT, "version": __version__, "content": _encode(content)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def load(directory: Path, algorithm: Any) -> dict[str, Any]:
    """Read a checkpoint of `algorithm`; anything that is not one is an error that says so."""
    path = path_in(directory)
    if not path.exists():
        raise CheckpointError(f"{directory} holds no checkpoint ({path.relative_to(directory)} is missing).")
    try:
        with zipfile.ZipFile(path) as file:  # torch.save writes checksums, but torch.load does not look at them
            if damaged := file.testzip():
                raise zipfile.BadZipFile(damaged)
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint ({type(error).__name__}). Start the run anew in another directory."
        ) from error
    if not isinstance(saved, dict) or "fedkd" not in saved:
        raise CheckpointError(f"{path} was not written by fedkd.")
    if saved["fedkd"] != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {saved['fedkd']}, written by fedkd {saved.get('version')}; "
            f"this is fedkd {__version__}, which reads format {FORMAT}."
        )
    content: dict[str, Any] = _decode(saved["content"], _named_tuples(algorithm))
    return content


def _encode(value: Tree) -> Any:
    """Plain containers and tensors only: a NamedTuple becomes its name and its fields."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _encode(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_encode(part) for part in value]
    if isinstance(value, tuple):
        return (type(value).__name__, *(_encode(part) for part in value))
    return value


def _decode(value: Any, types: dict[str, Any]) -> Tree:
    if isinstance(value, dict):
        return {key: _decode(part, types) for key, part in value.items()}
    if isinstance(value, list):
        return [_decode(part, types) for part in value]
    if isinstance(value, tuple):
        name, *parts = value
        if name != "tuple" and name not in types:
            raise CheckpointError(f"the checkpoint holds a {name}, which this algorithm does not know.")
        found = [_decode(part, types) for part in parts]
        return tuple(found) if name == "tuple" else types[name](*found)
    return value


def _named_tuples(algorithm: Any) -> dict[str, Any]:
    """The NamedTuples that the algorithm's modules name: its states are made of these."""
    modules = [sys.modules[cls.__module__] for cls in reversed(type(algorithm).__mro__)]
    found = {name: value for module in modules for name, value in vars(module).items() if hasattr(value, "_fields")}
    return {"Params": Params, **found}
