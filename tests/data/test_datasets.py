import inspect
import os
import pickle
import sys
import threading
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedkd.core.errors import ConfigError, DataError
from fedkd.data import datasets
from fedkd.data.datasets import NAMES, SOURCES, Arrays, Dataset, Images, cache_file, read, read_npz, write_npz

CONF = Path(__file__).parents[2] / "conf" / "dataset"


def arrays(train=12, test=6, shape=(4, 4), classes=3):
    rng = np.random.default_rng(0)

    def part(n):
        return rng.integers(0, 256, (n, *shape), dtype=np.uint8), np.arange(n) % classes

    return Arrays(*part(train), *part(test))._asdict()


def own_file(tmp_path, **changes):
    """A user's own npz file, with some arrays replaced, or left out if None."""
    content = {name: array for name, array in (arrays() | changes).items() if array is not None}
    np.savez(tmp_path / "own.npz", **content)
    return Dataset("npz", [0.5], [0.5], path=str(tmp_path / "own.npz"))


def test_digits_come_without_a_file_as_1437_training_and_360_test_images():
    images = Dataset("digits", [0.3053], [0.3759]).load()
    # every fifth of 1,797 is ceil(1797 / 5) = 360
    assert (images.train, len(images.labels), images.classes, images.shape) == (1437, 1797, 10, (1, 8, 8))
    assert (images.pixels.dtype, images.pixels.min(), images.pixels.max()) == (torch.uint8, 0, 255)


def test_the_digits_are_scikit_learn_s():
    from sklearn.datasets import load_digits

    ours, theirs = read("digits"), load_digits()
    images = np.concatenate([ours.train_images, ours.test_images])
    labels = np.concatenate([ours.train_labels, ours.test_labels])
    # 0 to 16 becomes 0 to 255, rounded: n·255/16 is within half of it
    mine = sorted(
        (int(y), *np.rint(x / (255 / 16)).astype(int).ravel().tolist()) for x, y in zip(images, labels, strict=True)
    )
    assert mine == sorted((int(y), *x.astype(int).tolist()) for x, y in zip(theirs.data, theirs.target, strict=True))


def test_the_digits_test_images_are_a_fifth_of_every_class():
    found = read("digits")
    share = np.bincount(found.test_labels) / np.bincount(np.concatenate([found.train_labels, found.test_labels]))
    # classes have 174 to 183 images, and the fifth is off by at most one: |share - 1/5| <= 1/174
    assert np.abs(share - 0.2).max() <= 1 / 174


def test_the_digits_split_is_the_same_every_time():
    assert all(np.array_equal(a, b) for a, b in zip(read("digits"), read("digits"), strict=True))


def test_a_users_own_file_is_loaded_training_images_first(tmp_path):
    content = arrays()
    images = own_file(tmp_path).load()
    assert (images.train, images.classes, images.shape) == (12, 3, (1, 4, 4))
    assert np.array_equal(images.pixels[:12, ..., 0], content["train_images"])
    assert np.array_equal(images.pixels[12:, ..., 0], content["test_images"])
    assert np.array_equal(images.labels, np.concatenate([content["train_labels"], content["test_labels"]]))
    assert images.labels.dtype == torch.int64


def test_coloured_images_have_three_channels_and_a_single_mean_serves_them_all(tmp_path):
    images = own_file(tmp_path, **arrays(shape=(4, 5, 3))).load()
    assert images.shape == (3, 4, 5)
    assert images.mean.tolist() == [0.5, 0.5, 0.5]


def test_the_clients_share_out_the_training_images_or_all():
    images = Images(torch.zeros(5, 2, 2, 1), torch.zeros(5), 3, 1, torch.zeros(1), torch.ones(1))
    assert images.pool("train").tolist() == [0, 1, 2]
    assert images.pool("all").tolist() == [0, 1, 2, 3, 4]


@given(st.lists(st.integers(1, 4), max_size=3))
def test_a_batch_has_the_shape_of_its_index_then_channels_height_width(leading):
    pixels = torch.arange(2 * 3 * 4 * 3, dtype=torch.uint8).reshape(2, 3, 4, 3)
    images = Images(pixels, torch.tensor([0, 1]), 1, 2, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 4.0]))
    batch = images.batch(torch.ones(leading, dtype=torch.int64))
    assert batch.shape == (*leading, 3, 3, 4)
    # sample 1, row 2, column 3, channel 2 is number 1*36 + 2*12 + 3*3 + 2 = 71
    assert torch.allclose(batch[..., 2, 2, 3], torch.tensor((71 / 255 - 0.3) / 4))


def test_moving_a_dataset_moves_all_its_tensors():
    images = Dataset("digits", [0.3], [0.4]).load().to("meta")
    assert {getattr(images, f.name).device.type for f in fields(images) if f.name not in ("train", "classes")} == {
        "meta"
    }


def test_an_unknown_name_is_answered_with_near_ones_and_all_problems_come_together():
    found = Dataset("minst", [0.5], [0.0], pool="half").problems()
    assert len(found) == 3
    assert "Did you mean mnist" in found[0]
    assert "all, train" in found[1]
    assert "std" in found[2]


def test_npz_without_a_path_and_missing_moments_are_problems():
    found = Dataset("npz", [], []).problems()
    assert any("dataset.path=" in line for line in found)
    assert any("dataset.mean" in line for line in found)
    assert Dataset("npz", [0.5], [0.5], path="x").problems() == []


def test_a_mean_for_the_wrong_number_of_channels_is_refused(tmp_path):
    own_file(tmp_path, **arrays(shape=(4, 4, 3)))
    with pytest.raises(ConfigError, match=r"dataset.mean=.* has 2 numbers, but the images have 3 channels"):
        Dataset("npz", [0.1, 0.2], [0.5], path=str(tmp_path / "own.npz")).load()


IMAGES, LABELS = arrays()["train_images"], arrays()["train_labels"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"test_labels": None}, "it has no test_labels"),
        ({"train_images": IMAGES / np.float32(255)}, r"float32 numbers; convert them to uint8 .*astype\('uint8'\)"),
        ({"train_images": np.full((12, 4, 4), np.nan)}, "float64 numbers, some of them NaN"),
        ({"train_images": IMAGES.astype(np.int32)}, "train_images are int32, not uint8"),
        ({"train_images": IMAGES[0]}, r"train_images have the shape \(4, 4\)"),
        ({"train_images": IMAGES[:, None]}, r"train_images have the shape \(12, 1, 4, 4\)"),
        ({"train_images": IMAGES[:0], "train_labels": LABELS[:0]}, r"train_images have the shape \(0, 4, 4\)"),
        ({"train_images": IMAGES[:, :3]}, r"train images are \(3, 4\), test images \(4, 4\)"),
        ({"train_images": IMAGES[0, 0, 0]}, r"train_images have the shape \(\)"),
        ({"train_labels": LABELS[:-1]}, "train_images are 12, but train_labels 11"),
        ({"train_labels": LABELS + 0.5}, "train_labels are float64"),
        ({"train_labels": LABELS[:, None]}, r"of shape \(12, 1\)"),
        ({"train_labels": LABELS - 1}, "labels must be 0, 1, .* run from -1 to 2"),
        ({"train_labels": np.where(LABELS == 1, 10**12, LABELS)}, "run from 0 to 1000000000000"),
        ({"train_labels": np.array(["cat"] * 12)}, "train_labels are <U3"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong_and_what_is_needed(tmp_path, changes, said):
    with pytest.raises(DataError, match=said) as caught:
        own_file(tmp_path, **changes).load()
    assert str(tmp_path / "own.npz") in str(caught.value)
    assert "Needed are the arrays train_images, train_labels, test_images, test_labels" in str(caught.value)


def test_labels_with_a_gap_are_refused(tmp_path):
    with pytest.raises(DataError, match="these 2 run from 0 to 2"):
        own_file(tmp_path, train_labels=LABELS // 2 * 2, test_labels=np.zeros(6, int)).load()


def test_all_faults_of_a_file_are_told_together(tmp_path):
    with pytest.raises(DataError) as caught:
        own_file(tmp_path, train_images=IMAGES[0], test_labels=np.zeros(5, int)).load()
    assert "train_images have the shape" in str(caught.value)
    assert "test_images are 6, but test_labels 5" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a zip", pickle.dumps({"train_images": 1}), b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_npz_is_a_data_error(tmp_path, content):
    (tmp_path / "own.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"own.npz cannot be read as an npz file"):
        Dataset("npz", [0.5], [0.5], path=str(tmp_path / "own.npz")).load()


def test_a_lone_array_a_damaged_file_and_a_missing_file_are_data_errors(tmp_path):
    np.save(tmp_path / "lone.npy", np.zeros(3))
    np.savez_compressed(tmp_path / "own.npz", **arrays(train=500))
    whole = bytearray((tmp_path / "own.npz").read_bytes())
    whole[200:400] = bytes(200)
    (tmp_path / "damaged.npz").write_bytes(whole)
    for name in ("lone.npy", "damaged.npz", "missing.npz"):
        with pytest.raises(DataError, match=name):
            read("npz", path=str(tmp_path / name))


def test_pickled_objects_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    np.savez(tmp_path / "own.npz", **arrays() | {"train_images": np.array([Bomb()], object)})
    with pytest.raises(DataError, match="cannot be read"):
        Dataset("npz", [0.5], [0.5], path=str(tmp_path / "own.npz")).load()
    assert not (tmp_path / "exploded").exists()


def test_the_cache_is_the_given_root_or_the_environments_or_the_homes(monkeypatch):
    monkeypatch.setenv("FEDKD_DATA", "data")
    assert cache_file("mnist", "root") == Path("root/mnist.npz")
    assert cache_file("mnist") == Path("data/mnist.npz")
    monkeypatch.delenv("FEDKD_DATA")
    assert cache_file("mnist") == Path.home() / ".cache" / "fedkd" / "mnist.npz"


def torchvision_with(name, cls):
    """A stand-in for the package: importing the real one takes seconds."""
    return SimpleNamespace(datasets=SimpleNamespace(**{name: cls}))


def fake(by_split=False, shape=(28, 28)):
    """A torchvision dataset class whose pixels tell train from test, and rows from columns."""

    class Fake:
        def __init__(self, root, download, train=None, split=None):
            assert download
            assert os.path.isdir(root)
            first = split == "train" if by_split else train
            n = 12 if first else 6
            numbers = np.arange(np.prod(shape), dtype=np.int64) % 251
            self.data = np.tile(numbers.astype(np.uint8).reshape(shape), (n, *[1] * len(shape))) + np.uint8(not first)
            labels = np.arange(n) % 3
            if by_split:
                self.labels = labels
            else:
                self.targets = labels.tolist()
                self.data = torch.from_numpy(self.data)

    return Fake


@pytest.mark.parametrize("name", SOURCES)
def test_a_missing_dataset_is_downloaded_once_and_cached(tmp_path, monkeypatch, name):
    source = SOURCES[name]
    stored = {"SVHN": (3, 32, 32), "CIFAR10": (32, 32, 3), "CIFAR100": (32, 32, 3)}.get(source.cls, (28, 28))
    monkeypatch.setitem(sys.modules, "torchvision", torchvision_with(source.cls, fake(source.cls == "SVHN", stored)))
    images = Dataset(name, [0.5], [0.5], root=str(tmp_path)).load()
    assert (images.train, len(images.labels), images.classes) == (12, 18, 3)
    assert images.shape == ((1, 28, 28) if len(stored) == 2 else (3, 32, 32))
    # the fake's pixel number k is k mod 251; the pixel in row 0, column 1, channel 0 has which number?
    k = {"EMNIST": 28, "SVHN": 1}.get(source.cls, 1 if len(stored) == 2 else 3)  # EMNIST is stored column by column
    assert images.pixels[0, 0, 1, 0] == k
    assert images.pixels[-1, 0, 1, 0] == k + 1

    monkeypatch.setitem(sys.modules, "torchvision", None)  # no second download
    again = Dataset(name, [0.5], [0.5], root=str(tmp_path)).load()
    assert torch.equal(again.pixels, images.pixels)
    assert os.listdir(tmp_path) == [f"{name}.npz"]


@pytest.mark.realdata  # no data, but the real package: importing it takes seconds
def test_the_torchvision_classes_and_their_options_exist():
    from torchvision import datasets as there

    for source in SOURCES.values():
        known = set().union(*(inspect.signature(cls).parameters for cls in getattr(there, source.cls).__mro__[:2]))
        assert {"root", "download", *source.train, *source.test} <= known, source
    assert {"digits", "balanced"} <= set(there.EMNIST.splits)


@pytest.mark.parametrize("failure", [OSError("network is unreachable"), RuntimeError("File not found or corrupted.")])
def test_without_a_network_the_error_says_what_to_put_where(tmp_path, monkeypatch, failure):
    def unreachable(*_, **__):
        raise failure

    monkeypatch.setitem(sys.modules, "torchvision", torchvision_with("MNIST", unreachable))
    with pytest.raises(DataError) as caught:
        Dataset("mnist", [0.5], [0.5], root=str(tmp_path)).load()
    for word in (str(failure), str(tmp_path / "mnist.npz"), "$FEDKD_DATA", "dataset.root", *Arrays._fields):
        assert word in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_downloaded_says_what_to_put_where(tmp_path):
    with pytest.raises(DataError, match=r"svhn_fifth cannot be downloaded") as caught:
        Dataset("svhn_fifth", [0.5], [0.5], root=str(tmp_path)).load()
    assert str(tmp_path / "svhn_fifth.npz") in str(caught.value)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    write_npz(tmp_path / "x.npz", {"a": np.arange(3)})

    def full(file, **_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datasets.np, "savez", full)
    with pytest.raises(DataError, match=r"x.npz cannot be written: No space left"):
        write_npz(tmp_path / "x.npz", {"a": np.arange(5)})
    assert os.listdir(tmp_path) == ["x.npz"]
    assert len(read_npz(tmp_path / "x.npz", ["a"])["a"]) == 3


def test_many_writers_and_readers_of_one_file_never_meet_a_half_written_one(tmp_path):
    file, trouble = tmp_path / "deep" / "x.npz", []
    write_npz(file, {"a": np.zeros(20_000, int)})

    def work(number):
        try:
            for _ in range(15):
                write_npz(file, {"a": np.full(20_000, number)})
                assert len(np.unique(read_npz(file, ["a"])["a"])) == 1
        except Exception as error:
            trouble.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert trouble == []
    assert os.listdir(file.parent) == ["x.npz"]


def test_every_dataset_has_a_preset_that_starts_with_its_command():
    files = sorted(CONF.glob("*.yaml"))
    assert [file.stem for file in files] == sorted(NAMES)  # 10 files
    for file in files:
        preset = yaml.safe_load(file.read_text())
        assert file.read_text().startswith(f"# fedkd dataset={file.stem}")
        assert preset.pop("defaults") == [{"/schema/dataset@_here_": "dataset"}, "_self_"]
        assert preset["name"] == file.stem
        found = Dataset(**preset).problems()
        assert found == ([] if file.stem != "npz" else ["dataset=npz needs the file: dataset.path=my.npz."])


SIZES = {  # training images, all images, classes, shape
    "mnist": (60_000, 70_000, 10, (1, 28, 28)),
    "fashion_mnist": (60_000, 70_000, 10, (1, 28, 28)),
    "cifar10": (50_000, 60_000, 10, (3, 32, 32)),
}


def real(name):
    if not cache_file(name).exists():
        pytest.skip(f"{cache_file(name)} is not there; fill the cache first")
    return Dataset(**{k: v for k, v in yaml.safe_load((CONF / f"{name}.yaml").read_text()).items() if k != "defaults"})


@pytest.mark.realdata
@pytest.mark.parametrize("name", SIZES)
def test_the_real_dataset_has_its_published_size(name):
    images = real(name).load()
    assert (images.train, len(images.labels), images.classes, images.shape) == SIZES[name]


@pytest.mark.realdata
@pytest.mark.parametrize("name", [*SIZES, "emnist_digits", "emnist_balanced", "svhn_fifth"])
def test_the_presets_normalise_the_real_training_images_to_mean_0_and_std_1(name):
    images = real(name).load()
    x = images.batch(torch.arange(0, images.train, 5))
    # means and stds are printed with 4 digits, and every fifth image is looked at
    assert x.mean((0, 2, 3)).abs().max() < 0.02
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.02


def test_the_digits_preset_normalises_to_mean_0_and_std_1():
    preset = yaml.safe_load((CONF / "digits.yaml").read_text())
    x = Dataset("digits", preset["mean"], preset["std"]).load().batch(torch.arange(1797))
    assert abs(x.mean()) < 1e-3
    assert abs(x.std() - 1) < 1e-3


@pytest.mark.realdata
def test_the_real_emnist_stands_upright():
    """A one is taller than wide; transposed, it would be wider than tall."""
    images = real("emnist_digits").load()
    ones = images.pixels[:60_000][images.labels[:60_000] == 1][..., 0].float().mean(0)
    rows, columns = ones.sum(1), ones.sum(0)
    assert (rows > rows.max() / 4).sum() > (columns > columns.max() / 4).sum()
