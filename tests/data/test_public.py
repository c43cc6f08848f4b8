from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedkd.core.errors import ConfigError, DataError
from fedkd.data.datasets import Dataset, Images, cache_file
from fedkd.data.public import NAMES, Public, adapt

CONF = Path(__file__).parents[2] / "conf" / "public"


def images(n=50, shape=(1, 6, 5)):
    channels, height, width = shape
    pixels = torch.randint(0, 256, (n, height, width, channels), dtype=torch.uint8)
    return Images(pixels, torch.zeros(n, dtype=torch.int64), n, 1, torch.zeros(channels), torch.ones(channels))


def own_file(tmp_path, **arrays):
    np.savez(tmp_path / "public.npz", **arrays)
    return str(tmp_path / "public.npz")


@given(st.integers(1, 49), st.integers(0, 1000))
def test_holding_out_parts_the_pool_in_two(size, seed):
    pool = np.arange(100, 200, 2)
    public, left = Public("holdout", size=size).hold_out(pool, seed)
    assert len(public) == size
    assert np.array_equal(np.union1d(public, left), pool)
    assert len(public) + len(left) == len(pool)


def test_the_held_out_samples_are_random_and_a_function_of_the_seed():
    public = Public("holdout", size=20)
    first, again, other = (public.hold_out(np.arange(1000), seed)[0] for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_only_holdout_takes_samples_from_the_clients():
    for name in set(NAMES) - {"holdout"}:
        public, left = Public(name, size=5).hold_out(np.arange(10), 0)
        assert (public.size, left.tolist()) == (0, list(range(10)))
        assert public.dtype == np.int64


def test_holding_out_everything_is_a_config_error():
    with pytest.raises(ConfigError, match=r"public.size=50 leaves nothing for the clients: there are 50 samples"):
        Public("holdout", size=50).hold_out(np.arange(50), 0)


def test_the_pixels_of_a_holdout_are_those_of_its_samples():
    world = images()
    assert torch.equal(Public("holdout", size=2).pixels(world, np.array([3, 7]), 0), world.pixels[[3, 7]])


def test_without_public_data_there_are_no_pixels():
    assert Public().pixels(images(), np.empty(0, np.int64), 0) is None


def test_a_users_own_images_are_drawn_without_repetition_by_the_seed(tmp_path):
    path = own_file(tmp_path, images=np.arange(30, dtype=np.uint8).repeat(30).reshape(30, 6, 5))
    whole = Public("npz", path=path).pixels(images(), np.empty(0, np.int64), 0)
    assert whole[:, 0, 0, 0].tolist() == list(range(30))
    some, again, other = (Public("npz", size=10, path=path).pixels(images(), np.empty(0), seed) for seed in (0, 0, 1))
    assert some.shape == (10, 6, 5, 1)
    assert len(some.unique()) == 10
    assert torch.equal(some, again)
    assert not torch.equal(some, other)


def test_the_training_images_of_a_dataset_file_will_do(tmp_path):
    path = own_file(tmp_path, train_images=np.full((3, 6, 5), 9, np.uint8))
    assert Public("npz", path=path).pixels(images(), np.empty(0), 0).shape == (3, 6, 5, 1)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"labels": np.zeros(3)}, "has no array `images`"),
        ({"images": np.zeros((3, 6, 5))}, "`images` is float64 of shape"),
        ({"images": np.zeros((3, 1, 6, 5), np.uint8)}, r"shape \(3, 1, 6, 5\); needed is uint8"),
        ({"images": np.zeros((0, 6, 5), np.uint8)}, r"shape \(0, 6, 5\)"),
    ],
)
def test_a_wrong_file_is_a_data_error_that_names_it(tmp_path, arrays, said):
    path = own_file(tmp_path, **arrays)
    with pytest.raises(DataError, match=said) as caught:
        Public("npz", path=path).pixels(images(), np.empty(0), 0)
    assert path in str(caught.value)


def test_more_images_than_there_are_is_a_config_error(tmp_path):
    path = own_file(tmp_path, images=np.zeros((3, 6, 5), np.uint8))
    with pytest.raises(ConfigError, match=r"public.size=4, but public=npz has 3 images"):
        Public("npz", size=4, path=path).pixels(images(), np.empty(0), 0)


def test_another_dataset_is_taken_from_the_cache_and_brought_to_the_clients_shape(tmp_path):
    rng = np.random.default_rng(0)
    colour = {f"{part}_images": rng.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "cifar100.npz", **colour, train_labels=np.arange(20), test_labels=np.arange(20))
    pixels = Public("cifar100", root=str(tmp_path)).pixels(images(shape=(1, 28, 28)), np.empty(0), 0)
    assert (pixels.shape, pixels.dtype) == ((20, 28, 28, 1), torch.uint8)


def test_images_of_the_right_shape_stay_as_they_are():
    pixels = images(shape=(3, 4, 4)).pixels
    assert torch.equal(adapt(pixels, (3, 4, 4)), pixels)


def test_grey_becomes_colour_by_repeating_and_colour_grey_by_luma():
    grey = images(shape=(1, 4, 4)).pixels
    assert torch.equal(adapt(grey[..., 0], (3, 4, 4)), grey.repeat(1, 1, 1, 3))
    assert torch.equal(adapt(adapt(grey, (3, 4, 4)), (1, 4, 4)), grey)  # the weights add up to 1
    colour = torch.tensor([[[[100, 200, 50]]]], dtype=torch.uint8)
    # 0.299 * 100 + 0.587 * 200 + 0.114 * 50 = 29.9 + 117.4 + 5.7 = 153.0
    assert adapt(colour, (1, 1, 1)).item() == 153


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 255), st.sampled_from([1, 3]))
def test_a_plain_image_stays_plain_at_any_size(height, width, value, channels):
    plain = torch.full((2, 6, 5, 1), value, dtype=torch.uint8)
    found = adapt(plain, (channels, height, width))
    assert found.shape == (2, height, width, channels)
    assert (found == value).all()


def test_halving_an_image_averages_its_pixels():
    # antialiased bilinear halving is a triangle of weights 1, 3, 3, 1; along equal columns a plain mean remains
    rows = torch.tensor([0, 0, 0, 0, 200, 200, 200, 200], dtype=torch.uint8)
    small = adapt(rows[None, :, None].expand(1, 8, 8), (1, 4, 4))[0, :, 0, 0]
    # row 1 covers rows 1..4 with weights 1, 3, 3, 1: (0 + 0 + 0 + 200) / 8 = 25
    assert small.tolist() == [0, 25, 175, 200]


@given(st.integers(1, 30), st.integers(2, 40), st.integers(0, 100), st.integers(1, 50))
def test_the_rows_of_a_round_are_different_ones_of_those_available(per_round, available, seed, number):
    rows = Public("mnist", per_round=per_round).rows(available, seed, number)
    if per_round >= available:
        assert rows is None
    else:
        assert len(set(rows)) == per_round
        assert 0 <= rows.min() <= rows.max() < available


def test_each_round_draws_anew_and_the_same_round_the_same():
    public = Public("mnist", per_round=10)
    first, again, second = (public.rows(1000, 0, number) for number in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)


def test_all_rows_are_used_unless_told_otherwise():
    assert Public("mnist").rows(100, 0, 1) is None


@pytest.mark.parametrize(
    ("public", "said"),
    [
        (Public("minst"), "Did you mean mnist"),
        (Public("npz"), "public.path="),
        (Public("holdout"), "public.size="),
        (Public("mnist", size=0), "public.size=0 must be at least 1"),
        (Public("mnist", per_round=0), "public.per_round=0 must be at least 1"),
        (Public("mnist", size=10, per_round=20), "public.per_round=20 is more than there are: public.size=10"),
    ],
)
def test_impossible_settings_are_problems(public, said):
    assert said in "\n".join(public.problems())


def test_every_kind_of_public_data_has_a_preset_that_starts_with_its_command():
    files = sorted(CONF.glob("*.yaml"))
    assert [file.stem for file in files] == sorted(NAMES)
    assert len(files) == 7
    for file in files:
        preset = yaml.safe_load(file.read_text())
        command = file.read_text().splitlines()[0]
        assert command.startswith("# fedkd ")
        assert f"public={file.stem}" in command.split()
        assert preset.pop("defaults") == [{"/schema/public@_here_": "public"}, "_self_"]
        assert preset["name"] == file.stem
        assert bool(Public(**preset).problems()) == (file.stem == "npz")


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("private", "public"), [("fashion_mnist", "mnist"), ("cifar10", "svhn_fifth"), ("mnist", "svhn_fifth")]
)
def test_real_public_images_look_like_the_clients_own(private, public):
    for name in (private, public):
        if not cache_file(name).exists():
            pytest.skip(f"{cache_file(name)} is not there; fill the cache first")
    own = Dataset(private, [0.5], [0.5]).load()
    pixels = Public(public, size=2000).pixels(own, np.empty(0, np.int64), 0)
    assert pixels.shape == (2000, *own.pixels.shape[1:])
    assert 10 < pixels.float().mean() < 200
