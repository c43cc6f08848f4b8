"""The public set: unlabelled images that the server and every client can see."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedkd.core.errors import ConfigError, DataError, unknown
from fedkd.core.seeds import numpy_rng
from fedkd.data.datasets import Images, read, read_npz

DATASETS = ("cifar100", "mnist", "emnist_digits", "svhn_fifth")
NAMES = ("none", "holdout", *DATASETS, "npz")
LUMA = (0.299, 0.587, 0.114)  # the weights of red, green and blue in a grey image (ITU-R BT.601)
CHUNK = 4096  # images resized at once, so that memory does not grow with the data


@dataclass(frozen=True)
class Public:
    """Which images are public: the config node `public`.

    Parameters
    ----------
    name : `none`, `holdout` (samples of the dataset itself that no client holds), the training images of another
        dataset, or `npz`: the array `images` (or else `train_images`) of the user's own file.
    size : how many images are drawn from it for the whole run; None: all of them (not for `holdout`).
    per_round : how many of these each round uses; None: all of them.
    path : of the user's own file (`npz` only).
    root : the cache folder of the datasets; None is $FEDKD_DATA, or else ~/.cache/fedkd.
    """

    name: str = "none"
    size: int | None = None
    per_round: int | None = None
    path: str | None = None
    root: str | None = None

    def problems(self) -> list[str]:
        """What is wrong with these settings, if anything."""
        found = []
        if self.name not in NAMES:
            found.append(unknown("public", self.name, NAMES))
        if self.name == "npz" and not self.path:
            found.append("public=npz needs the file: public.path=my.npz.")
        if self.name == "holdout" and self.size is None:
            found.append("public=holdout needs the number of samples to hold out: public.size=200.")
        for name, value in (("size", self.size), ("per_round", self.per_round)):
            if value is not None and value < 1:
                found.append(f"public.{name}={value} must be at least 1.")
        if self.size is not None and self.per_round is not None and self.per_round > self.size:
            found.append(f"public.per_round={self.per_round} is more than there are: public.size={self.size}.")
        return found

    def hold_out(self, pool: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The sample numbers that become public, and those left for the clients."""
        if self.name != "holdout":
            return np.empty(0, np.int64), pool
        size = self.size or 0
        if size >= len(pool):
            raise ConfigError(
                f"public.size={size} leaves nothing for the clients: there are {len(pool)} samples in all. "
                f"Choose a smaller one (public.size={len(pool) // 5}), dataset.pool=all, or a larger dataset."
            )
        public = np.zeros(len(pool), bool)
        public[_some(len(pool), size, numpy_rng(seed, "public"))] = True
        return pool[public], pool[~public]

    def pixels(self, images: Images, held_out: np.ndarray, seed: int) -> Tensor | None:
        """The public images, uint8 [Q, H, W, C] in the shape and on the device of the clients' own; None without any.

        `held_out` are sample numbers of the dataset itself, chosen by `hold_out` or by the file of a split.
        """
        device = images.pixels.device
        if self.name == "none":
            return None
        if self.name == "holdout":
            return images.pixels[torch.from_numpy(held_out).to(device)]
        stored = self._stored()
        if self.size is not None and self.size > len(stored):
            raise ConfigError(
                f"public.size={self.size}, but public={self.name} has {len(stored)} images. "
                f"Choose public.size={len(stored)} or fewer."
            )
        chosen = _some(len(stored), self.size or len(stored), numpy_rng(seed, "public"))
        return adapt(torch.from_numpy(stored[chosen]), images.shape).to(device)

    def rows(self, available: int, seed: int, round: int) -> np.ndarray | None:
        """Which of the available public images this round uses; None: all of them."""
        if self.per_round is None or self.per_round >= available:
            return None
        return _some(available, self.per_round, numpy_rng(seed, "public", round))

    def _stored(self) -> np.ndarray:
        """uint8 [n, H, W] or [n, H, W, C]."""
        if self.name in DATASETS:
            return read(self.name, root=self.root).train_images
        file = Path(self.path or "").expanduser()
        arrays = read_npz(file, ("images", "train_images"))
        if not arrays:
            raise DataError(f"{file} has no array `images` (nor `train_images`); public=npz needs one.")
        name, found = next(iter(arrays.items()))
        colour = found.ndim == 4 and found.shape[-1] in (1, 3)
        if found.dtype != np.uint8 or not (found.ndim == 3 or colour) or 0 in found.shape:
            raise DataError(
                f"{file} cannot be used as a public set: `{name}` is {found.dtype} of shape {found.shape}; "
                "needed is uint8 (0 to 255) of shape (n, height, width) or (n, height, width, 3)."
            )
        return found


def adapt(pixels: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Grey or coloured uint8 images of any size as uint8 [n, H, W, C] of `shape` (C, H, W)."""
    channels, height, width = shape
    pixels = pixels.unsqueeze(-1) if pixels.ndim == 3 else pixels
    if pixels.shape[1:3] != (height, width):
        pixels = torch.cat([_resized(part, height, width) for part in torch.split(pixels, CHUNK)])
    if pixels.shape[-1] == channels:
        return pixels
    if channels == 1:
        return _rounded(pixels.float() @ torch.tensor(LUMA)).unsqueeze(-1)
    return pixels.expand(*pixels.shape[:-1], channels).contiguous()


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    planes = F.interpolate(pixels.movedim(-1, 1).float(), (height, width), mode="bilinear", antialias=True)
    return _rounded(planes.movedim(1, -1))


def _rounded(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


def _some(available: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """`size` different numbers below `available`, in order."""
    return np.sort(rng.choice(available, size, replace=False))
