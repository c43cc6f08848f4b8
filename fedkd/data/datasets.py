"""Datasets in memory as uint8, read from one npz file each; missing files are made once through torchvision."""

import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from fedkd.core.errors import ConfigError, DataError, unknown
from fedkd.core.seeds import numpy_rng
from fedkd.core.unlocked import unlocked

POOLS = ("train", "all")
UPRIGHT, CHANNELS_LAST = (0, 2, 1), (0, 2, 3, 1)


class Source(NamedTuple):
    """Where torchvision has a dataset, and how its images become [n, H, W] or [n, H, W, C]."""

    cls: str
    train: dict[str, Any]
    test: dict[str, Any]
    axes: tuple[int, ...] | None = None


def _flagged(cls: str, axes: tuple[int, ...] | None = None, **options: Any) -> Source:
    return Source(cls, {"train": True, **options}, {"train": False, **options}, axes)


SOURCES = {
    "mnist": _flagged("MNIST"),
    "fashion_mnist": _flagged("FashionMNIST"),
    "emnist_digits": _flagged(
        "EMNIST", UPRIGHT, split="digits"
    ),  # torchvision leaves EMNIST as it is stored: transposed
    "emnist_balanced": _flagged("EMNIST", UPRIGHT, split="balanced"),
    "cifar10": _flagged("CIFAR10"),
    "cifar100": _flagged("CIFAR100"),
    "svhn": Source("SVHN", {"split": "train"}, {"split": "test"}, CHANNELS_LAST),
}
NAMES = ("digits", *SOURCES, "svhn_fifth", "npz")


class Arrays(NamedTuple):
    """What a dataset's npz file holds, under these names."""

    train_images: np.ndarray  # uint8 [n, H, W] or [n, H, W, C]
    train_labels: np.ndarray  # integers [n]
    test_images: np.ndarray
    test_labels: np.ndarray


@dataclass(frozen=True)
class Dataset:
    """Which images the clients learn from: the config node `dataset`.

    Parameters
    ----------
    name : one of `NAMES`; `digits` comes with scikit-learn, `npz` is the user's own file, the others are cached.
    mean, std : of each channel, for pixels in [0, 1]; a single number serves all channels.
    path : of the user's own file (`npz` only).
    root : the cache folder; None is $FEDKD_DATA, or else ~/.cache/fedkd.
    pool : what the clients share out: the `train` images, or `all`, test images too.
    """

    name: str
    mean: list[float]
    std: list[float]
    path: str | None = None
    root: str | None = None
    pool: str = "train"

    def problems(self) -> list[str]:
        """What is wrong with these settings, if anything; no file is opened."""
        found = []
        if self.name not in NAMES:
            found.append(unknown("dataset", self.name, NAMES))
        if self.pool not in POOLS:
            found.append(unknown("dataset.pool", self.pool, POOLS))
        if self.name == "npz" and not self.path:
            found.append("dataset=npz needs the file: dataset.path=my.npz.")
        if not self.mean or not self.std:
            found.append("dataset.mean and dataset.std need a number for each channel, or one for all: [0.5].")
        if any(not value > 0 for value in self.std):
            found.append(f"dataset.std={list(self.std)} must be positive.")
        return found

    def load(self) -> "Images":
        """The dataset in memory; made once and cached if it can be downloaded."""
        arrays = read(self.name, self.path, self.root)
        pixels = torch.from_numpy(np.concatenate([arrays.train_images, arrays.test_images]))
        pixels = pixels.unsqueeze(-1) if pixels.ndim == 3 else pixels
        labels = np.concatenate([arrays.train_labels, arrays.test_labels]).astype(np.int64)
        return Images(
            pixels,
            torch.from_numpy(labels),
            train=len(arrays.train_labels),
            classes=int(labels.max()) + 1,
            mean=_per_channel("mean", self.mean, pixels.shape[-1]),
            std=_per_channel("std", self.std, pixels.shape[-1]),
        )


@unlocked
def _fetched(parts: list[Tensor], index: Tensor) -> tuple[Tensor, Tensor]:
    pixels, labels, scale, shift = parts
    rows = index.reshape(-1)
    chosen = pixels.index_select(0, rows)  # seven times as fast as pixels[index]
    return chosen.float().mul_(scale).sub_(shift), labels.index_select(0, rows).view(index.shape)


@dataclass(frozen=True)
class Images:
    """A dataset in memory: its training images, then its test images."""

    pixels: Tensor  # uint8 [n, H, W, C]
    labels: Tensor  # int64 [n]
    train: int  # how many of them are training images
    classes: int
    mean: Tensor  # float [C], for pixels in [0, 1]
    std: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, height, width, channels = self.pixels.shape
        return channels, height, width

    def to(self, device: torch.device | str) -> "Images":
        moved = {name: getattr(self, name).to(device) for name in ("pixels", "labels", "mean", "std")}
        return replace(self, **moved)

    def batch(self, index: Tensor) -> Tensor:
        """The normalised images of sample numbers [...] as [..., C, H, W]."""
        return self.labelled(index)[0]

    def labelled(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised images of sample numbers [...], and their labels."""
        flat, labels = _fetched(self._parts, index)
        return flat.view(*index.shape, *self.pixels.shape[1:]).movedim(-1, -3), labels

    @cached_property
    def _parts(self) -> list[Tensor]:
        """Pixels and labels, and by what to scale and shift the pixels.

        A channel's values stand there for each of its pixels: along the channels alone it takes ten times as long.
        """
        channels, height, width = self.shape
        scale, shift = (v if channels == 1 else v.repeat(height * width)
                        for v in (1 / (255 * self.std), self.mean / self.std))  # fmt: skip
        return [self.pixels.flatten(1), self.labels, scale, shift]

    def pool(self, kind: str) -> np.ndarray:
        """The sample numbers clients share out: those of the `train` images, or `all`."""
        return np.arange(self.train if kind == "train" else len(self.labels))


def read(name: str, path: str | None = None, root: str | None = None) -> Arrays:
    """The arrays of one dataset, from its file; what has no file yet is made first."""
    if name == "digits":
        return _digits()
    if name == "npz":
        file = Path(path or "").expanduser()
    else:
        file = cache_file(name, root)
        if not file.exists():
            _make(name, file)
    arrays = read_npz(file, Arrays._fields)
    if faults := _faults(arrays):
        raise DataError("\n".join([f"{file} cannot be used as a dataset:", *faults, _needed()]))
    return Arrays(**arrays)


def cache_file(name: str, root: str | None = None) -> Path:
    """Where a dataset is cached, whether it is there or not."""
    folder = root or os.environ.get("FEDKD_DATA") or "~/.cache/fedkd"
    return Path(folder).expanduser() / f"{name}.npz"


def read_npz(file: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Those arrays of an npz file that are in it; nothing in it is ever unpickled."""
    try:
        with open(file, "rb") as raw, np.load(raw, allow_pickle=False) as stored:
            return {name: stored[name] for name in names if name in stored}
    except FileNotFoundError:
        raise DataError(f"{file.absolute()} does not exist. Give the path of an npz file.") from None
    # a foreign file fails in many ways: no zip at all, a lone npy array (no `with`), a damaged member, pickled objects
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file} cannot be read as an npz file of plain arrays: {error}") from error


def write_npz(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write all or nothing: a reader, or another writer of the same file, never meets a half-written one."""
    part = file.with_name(f".{file.name}.{uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "xb") as out:
            np.savez(out, **arrays)  # type: ignore[arg-type]  # the stubs think of the flag allow_pickle
        os.replace(part, file)
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror}. Choose another folder or make room.") from error
    finally:
        part.unlink(missing_ok=True)


def _make(name: str, file: Path) -> None:
    """Fill the cache; each process downloads into a folder of its own, so that none sees another's half-done files."""
    if name not in SOURCES:
        raise DataError(f"{name} cannot be downloaded and is not in the cache.\n{_put_there(file)}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            arrays = _download(SOURCES[name], folder)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"{name} is not in the cache and the download failed: {error}\n{_put_there(file)}"
            ) from error
    write_npz(file, arrays._asdict())


def _download(source: Source, folder: str) -> Arrays:
    from torchvision import datasets

    def part(options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        stored = getattr(datasets, source.cls)(folder, download=True, **options)
        images = np.asarray(stored.data)
        labels = stored.labels if hasattr(stored, "labels") else stored.targets  # SVHN has its own word
        return images if source.axes is None else images.transpose(source.axes), np.asarray(labels, np.int64)

    return Arrays(*part(source.train), *part(source.test))


def _digits() -> Arrays:
    """scikit-learn's 1,797 digits, 8x8; every fifth of each class is a test image, chosen once for all.

    Its file is read here, since importing scikit-learn takes longer than all else a dry run does.
    """
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError("dataset=digits comes with scikit-learn, which is not installed: pip install scikit-learn.")
    rows = np.loadtxt(Path(found.origin).with_name("datasets") / "data" / "digits.csv.gz", delimiter=",")
    pixels, labels = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8)
    shuffled = numpy_rng(0, "digits").permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    test = np.zeros(len(labels), bool)
    test[by_class[::5]] = True
    return Arrays(images[~test], labels[~test], images[test], labels[test])


def _faults(arrays: dict[str, np.ndarray]) -> list[str]:
    """What keeps these arrays from being a dataset."""
    if missing := [name for name in Arrays._fields if name not in arrays]:
        return [f"it has no {', '.join(missing)}."]
    data = Arrays(**arrays)
    found = _part_faults("train", data.train_images, data.train_labels)
    found += _part_faults("test", data.test_images, data.test_labels)
    if found:
        return found
    if data.train_images.shape[1:] != data.test_images.shape[1:]:
        return [f"train images are {data.train_images.shape[1:]}, test images {data.test_images.shape[1:]}."]
    present = np.union1d(data.train_labels, data.test_labels)
    if present[0] < 0 or present[-1] != len(present) - 1:
        return [f"labels must be 0, 1, ..., classes - 1; these {len(present)} run from {present[0]} to {present[-1]}."]
    return []


def _part_faults(part: str, images: np.ndarray, labels: np.ndarray) -> list[str]:
    found = []
    if images.dtype.kind == "f":
        nan = ", some of them NaN" if np.isnan(images).any() else ""
        found.append(
            f"{part}_images are {images.dtype} numbers{nan}; convert them to uint8 from 0 to 255, "
            "e.g. (images * 255).round().astype('uint8') if they lie in [0, 1]."
        )
    elif images.dtype != np.uint8:
        found.append(f"{part}_images are {images.dtype}, not uint8.")
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[-1] not in (1, 3)) or 0 in images.shape:
        found.append(f"{part}_images have the shape {images.shape}, not (n, height, width) or (n, height, width, 3).")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        found.append(f"{part}_labels are {labels.dtype} of shape {labels.shape}, not integers of shape (n,).")
    if images.ndim and labels.ndim and len(images) != len(labels):
        found.append(f"{part}_images are {len(images)}, but {part}_labels {len(labels)}.")
    return found


def _needed() -> str:
    return (
        f"Needed are the arrays {', '.join(Arrays._fields)}: images uint8, (n, height, width) or "
        "(n, height, width, 3); labels integers from 0 to classes - 1, (n,)."
    )


def _put_there(file: Path) -> str:
    return (
        f"Put the file {file} there yourself, or {file.name} in another folder named by $FEDKD_DATA or dataset.root.\n"
        f"{_needed()}"
    )


def _per_channel(what: str, values: list[float], channels: int) -> Tensor:
    if len(values) not in (1, channels):
        raise ConfigError(
            f"dataset.{what}={list(values)} has {len(values)} numbers, but the images have {channels} "
            f"channel{'s' if channels > 1 else ''}. Give one number for each, or a single one for all."
        )
    return torch.tensor(values, dtype=torch.float32).expand(channels).clone()
