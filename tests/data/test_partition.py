import re
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedkd.core.errors import ConfigError, DataError
from fedkd.data.datasets import cache_file, read
from fedkd.data.partition import (
    DS1,
    DS3,
    IID,
    PARTITIONS,
    TEST,
    TRAIN,
    VALIDATION,
    Assignment,
    Dirichlet,
    DirichletEqual,
    File,
    Grouped,
    Partition,
    Pathological,
    SizedClasses,
    deal,
    draw,
    evenly,
    filled_up,
    hold_classes,
    scaled_down,
)

CONF = Path(__file__).parents[2] / "conf" / "partition"
ENTRIES = [name for name in PARTITIONS if name != "file"]

seeds = st.integers(0, 10**6)


@st.composite
def worlds(draw, most_clients=60, most_samples=400):
    """Labels of a few classes, some perhaps rare, and no more clients than samples."""
    classes = draw(st.integers(1, 12))
    samples = draw(st.integers(classes, most_samples))
    skew = draw(st.sampled_from([1, 3]))
    rng = np.random.default_rng(draw(seeds))
    labels = (classes * rng.random(samples) ** skew).astype(np.int64)
    return labels, draw(st.integers(1, min(most_clients, samples)))


def some_entry(draw, classes):
    """Any entry with any sensible settings."""
    few = st.integers(1, classes)
    return draw(
        st.one_of(
            st.just(IID()),
            st.builds(Dirichlet, alpha=st.sampled_from([1e-3, 0.1, 1.0, 1e3]), min_samples=st.integers(1, 20)),
            st.builds(DirichletEqual, beta=st.sampled_from([1e-3, 0.5, 1e3])),
            st.builds(Pathological, classes_per_client=few, samples_per_class=st.none() | st.integers(1, 50)),
            st.builds(Grouped, counts=st.lists(st.integers(1, 500), min_size=1, max_size=4)),
            st.builds(SizedClasses, classes_per_client=few, smallest=st.just(3), largest=st.integers(3, 100)),
            st.builds(DS1, classes_per_client=few),
            st.builds(DS3, classes_per_client=few, sigma=st.sampled_from([0.0, 2.0, 500.0])),
        )
    )


@given(st.data(), worlds(), seeds)
@settings(max_examples=300, deadline=None)
def test_any_split_gives_everyone_samples_and_no_sample_to_two(data, world, seed):
    labels, clients = world
    partition = some_entry(data.draw, len(np.unique(labels)))
    pool = np.flatnonzero(np.arange(2 * len(labels)) % 2)  # the odd numbers of a dataset twice as large
    split = partition.assign(np.repeat(labels, 2), pool, clients, seed)
    assert set(split.index) <= set(pool)
    assert len(set(split.index)) == len(split.index) == len(split.client) == len(split.role)
    assert set(split.client[split.role == TRAIN]) == set(range(clients))
    assert [array.dtype for array in split] == [np.int64, np.int32, np.uint8, np.int64]
    assert partition.problems() == []


@given(st.data(), worlds(), seeds)
@settings(max_examples=60, deadline=None)
def test_the_same_seed_gives_the_same_split_and_another_seed_another(data, world, seed):
    labels, clients = world
    partition = some_entry(data.draw, len(np.unique(labels)))
    first, again, other = (partition.assign(labels, np.arange(len(labels)), clients, s) for s in (seed, seed, seed + 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assume(len(first.index) >= 20)  # few samples may be split alike by chance
    assert not np.array_equal(first.index, other.index)


@given(worlds(), st.sampled_from([1e-3, 0.1, 10.0]), seeds)
@settings(deadline=None)
def test_iid_and_dirichlet_use_every_sample_exactly_once(world, alpha, seed):
    labels, clients = world
    for partition in (IID(), Dirichlet(alpha=alpha)):
        shares = partition.shares(labels, clients, np.random.default_rng(seed))
        assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(len(labels)))


@given(worlds(), seeds)
@settings(deadline=None)
def test_iid_sizes_differ_by_at_most_one(world, seed):
    labels, clients = world
    sizes = [len(share) for share in IID().shares(labels, clients, np.random.default_rng(seed))]
    assert max(sizes) - min(sizes) <= 1


def ten_classes(each=600):
    return np.repeat(np.arange(10), each)


def counts_of(shares, labels):
    """Samples [client, class]."""
    return np.stack([np.bincount(labels[share], minlength=labels.max() + 1) for share in shares])


def shares_of(partition, labels, clients, seed=0):
    return counts_of(partition.shares(labels, clients, np.random.default_rng(seed)), labels)


def test_dirichlet_with_a_tiny_alpha_and_1000_clients_is_quick_and_leaves_nobody_empty():
    started = time.perf_counter()
    counts = shares_of(Dirichlet(alpha=0.001), ten_classes(6000), 1000)
    assert time.perf_counter() - started < 60  # 0.03 s on a free machine; a rejection loop would never end
    # 10 is below half an equal share, 60,000 / 1,000 / 2 = 30
    assert counts.sum(1).min() == 10
    assert counts.sum() == 60_000


def test_a_small_alpha_gives_a_client_few_classes_and_a_large_one_all_in_equal_parts():
    skewed, even = (shares_of(Dirichlet(alpha=alpha), ten_classes(), 20) for alpha in (0.01, 1e4))
    assert (skewed > 0).sum(1).mean() < 3
    # 600 samples of a class draw one of 20 clients each: 30 on average, standard deviation sqrt(600/20*19/20) = 5.3
    assert np.abs(even - 30).max() < 5 * 5.3


def test_dirichlet_clients_that_are_filled_up_get_the_classes_of_few_others():
    counts = shares_of(Dirichlet(alpha=0.001), ten_classes(6000), 100)
    filled = counts[counts.sum(1) == 10]
    assert len(filled) > 50
    # the givers have about one class each; a filled client takes from at most a few of them
    assert (filled > 0).sum(1).max() <= 4


@given(worlds(), st.sampled_from([1e-3, 0.5, 5.0]), st.integers(1, 100), seeds)
@settings(deadline=None)
def test_dirichlet_equal_gives_all_clients_the_same_size(world, beta, percent, seed):
    labels, clients = world
    size = percent * len(labels) // 100 // clients
    assume(size >= 1)
    counts = shares_of(DirichletEqual(beta=beta, fraction=percent / 100), labels, clients, seed)
    assert set(counts.sum(1)) == {size}


def test_dirichlet_equal_as_in_fedhkd_gives_10_clients_500_samples_of_a_tenth_of_cifar10():
    labels = ten_classes(5000)
    skewed, mild = (shares_of(DirichletEqual(beta=beta, fraction=0.1), labels, 10) for beta in (0.2, 5.0))
    assert set(skewed.sum(1)) == set(mild.sum(1)) == {500}  # 0.1 * 50,000 / 10
    assert skewed.max(1).mean() > 2 * mild.max(1).mean()


def test_a_fraction_too_small_for_the_clients_says_which_would_do():
    with pytest.raises(ConfigError, match=r"Choose partition.fraction=0.5 or more"):
        shares_of(DirichletEqual(fraction=0.1), ten_classes(10), 50)  # 50 clients of 100 samples need a half
    shares_of(DirichletEqual(fraction=0.5), ten_classes(10), 50)


@given(worlds(), st.data(), seeds)
@settings(deadline=None)
def test_class_limited_splits_keep_their_limit(world, data, seed):
    labels, clients = world
    few = data.draw(st.integers(1, len(np.unique(labels))))
    entries = (
        Pathological(classes_per_client=few),
        Pathological(classes_per_client=few, samples_per_class=5),
        SizedClasses(classes_per_client=few),
        DS1(classes_per_client=few),
        DS3(classes_per_client=few),
    )
    for partition in entries:
        assert (shares_of(partition, labels, clients, seed) > 0).sum(1).max() <= few


@given(st.integers(1, 100), st.integers(1, 12), st.data(), seeds)
def test_classes_are_held_equally_often_and_each_client_holds_as_many_as_it_should(clients, classes, data, seed):
    each = data.draw(st.integers(1, classes))
    held = hold_classes(clients, each, classes, np.random.default_rng(seed))
    assert (held.sum(1) == each).all()
    assert np.ptp(held.sum(0)) <= 1


def test_pairs_of_classes_are_of_all_kinds():
    held = hold_classes(1000, 2, 10, np.random.default_rng(0))
    assert len({tuple(np.flatnonzero(row)) for row in held}) == 45  # all 10 * 9 / 2 of them


def test_kt_pfls_case_2_gives_20_clients_2_classes_with_300_samples_of_each():
    counts = shares_of(Pathological(samples_per_class=300), ten_classes(6000), 20)
    assert (np.sort(counts, 1)[:, -2:] == 300).all()
    assert (counts.sum(1) == 600).all()


def test_pathological_clients_that_ask_too_much_share_a_class_evenly():
    counts = shares_of(Pathological(samples_per_class=300), ten_classes(600), 100)
    # 100 clients with 2 of 10 classes: 20 hold each, and 600 / 20 = 30
    assert set(counts[counts > 0]) == {30}


def test_pathological_without_a_number_uses_every_sample_evenly():
    counts = shares_of(Pathological(), ten_classes(600), 100)
    assert counts.sum() == 6000
    assert set(counts.sum(1)) == {60}


def test_grouped_as_in_kt_pfl_gives_two_mirrored_halves_exactly():
    counts = shares_of(Grouped(), ten_classes(6000), 20)
    assert (counts[:10] == [450] * 5 + [150] * 5).all()
    assert (counts[10:] == [150] * 5 + [450] * 5).all()


def test_grouped_numbers_beyond_the_data_are_scaled_down_alike():
    counts = shares_of(Grouped(), ten_classes(5000), 20)
    # a class is asked for 10 * 450 + 10 * 150 = 6,000 of its 5,000: 450 * 5/6 = 375 and 150 * 5/6 = 125
    assert (counts[:10] == [375] * 5 + [125] * 5).all()
    assert (counts[10:] == [125] * 5 + [375] * 5).all()


def test_grouped_with_three_numbers_turns_them_from_group_to_group():
    counts = shares_of(Grouped(counts=[30, 20, 10]), np.repeat(np.arange(3), 600), 3)
    assert counts.tolist() == [[30, 20, 10], [10, 30, 20], [20, 10, 30]]


def test_sized_classes_draws_sizes_of_the_whole_range_where_the_data_suffice():
    counts = shares_of(SizedClasses(smallest=10, largest=50), ten_classes(6000), 400)
    sizes = counts.sum(1)
    assert (sizes.min(), sizes.max()) == (10, 50)
    # uniform from 10 to 50, rounded down to even numbers: mean 29.5, standard deviation 11.8 / sqrt(400) = 0.6
    assert abs(sizes.mean() - 29.5) < 4 * 0.6
    assert (np.sort(counts, 1)[:, -1] == np.sort(counts, 1)[:, -2]).all()


def test_cgpfls_40_clients_are_scaled_down_until_one_class_is_used_up():
    counts = shares_of(SizedClasses(), ten_classes(6000), 40)
    # 8 clients hold each class; each of them may lose half a sample to rounding down
    assert 6000 - 8 <= counts.sum(0).max() <= 6000
    # ratios stay those of 400..5000: 40 draws come near both ends
    assert 4 < counts.sum(1).max() / counts.sum(1).min() < 12.5 * 1.05


def test_ds1_gives_equal_sizes_of_4_classes_in_different_numbers_and_wastes_little():
    for clients in (10, 100):
        counts = shares_of(DS1(), ten_classes(6000), clients)
        sizes = counts.sum(1)
        assert sizes.min() == sizes.max() > 0.95 * 60_000 / clients
        # four exponential parts are far from equal: the largest is on average (1 + 1/2 + 1/3 + 1/4) / 4 = 52 %
        assert 0.42 < (counts.max(1) / sizes).mean() < 0.62


def test_ds3_sizes_are_log_normal_and_as_large_as_the_data_allow():
    counts = shares_of(DS3(min_samples=0), ten_classes(20_000), 400)
    # 400 * 2 / 10 = 80 clients hold a class; one class is used up, but for what they lose to rounding down
    assert 20_000 - 80 <= counts.sum(0).max() <= 20_000
    # the quartiles of a normal distribution lie 2 * 0.6745 sigma apart; of 400 draws, +-0.12 sigma (one deviation)
    low, high = np.percentile(np.log(counts.sum(1)), (25, 75))
    assert abs(high - low - 2 * 0.6745 * 2) < 2 * 0.12 * 2


def test_ds3_gives_everyone_its_minimum_of_two_classes_in_equal_numbers():
    counts = shares_of(DS3(), ten_classes(6000), 10)
    assert counts.sum(1).min() >= 10
    assert ((counts > 0).sum(1) == 2).all()
    assert (np.sort(counts, 1)[:, -1] == np.sort(counts, 1)[:, -2]).all()


def test_more_classes_a_client_than_there_are_is_a_config_error():
    for partition in (
        Pathological(classes_per_client=3),
        SizedClasses(classes_per_client=3),
        DS1(),
        DS3(classes_per_client=3),
    ):
        with pytest.raises(
            ConfigError, match=r"the data have 2 classes. Choose partition.classes_per_client=2 or fewer"
        ):
            shares_of(partition, np.repeat([0, 7], 50), 5)  # two classes, whatever their numbers


@pytest.mark.parametrize("name", ENTRIES)
def test_more_clients_than_samples_is_a_config_error(name):
    with pytest.raises(
        ConfigError, match=r"clients=101, but there are only 100 samples .* Choose clients=100 or fewer"
    ):
        PARTITIONS[name]().assign(ten_classes(10), np.arange(100), 101, 0)


@pytest.mark.parametrize("name", ENTRIES)
def test_as_many_clients_as_samples_have_one_each(name):
    split = PARTITIONS[name]().assign(ten_classes(10), np.arange(100), 100, 0)
    assert np.array_equal(np.sort(split.client), np.arange(100))
    assert set(split.role) == {TRAIN}


@pytest.mark.parametrize("name", ENTRIES)
def test_ten_thousand_clients_take_seconds(name):
    started = time.perf_counter()
    split = PARTITIONS[name]().assign(ten_classes(6000), np.arange(60_000), 10_000, 0)
    assert time.perf_counter() - started < 60  # 0.03 s on a free machine; a rejection loop would never end
    assert len(np.unique(split.client)) == 10_000


@given(worlds(), st.sampled_from([(0.75, 0.0, 0.25), (0.6, 0.2, 0.2), (1.0, 0.0, 0.0), (0.05, 0.05, 0.05)]), seeds)
@settings(deadline=None)
def test_every_client_trains_then_tests_then_validates_as_far_as_its_samples_go(world, ratios, seed):
    labels, clients = world
    train, validation, test = ratios
    split = IID(train=train, validation=validation, test=test).assign(labels, np.arange(len(labels)), clients, seed)
    held = np.bincount(np.arange(len(labels)) % clients)  # iid sizes, largest first
    by_role = [np.bincount(split.client[split.role == role], minlength=clients) for role in (TRAIN, VALIDATION, TEST)]
    assert (by_role[TRAIN] >= 1).all()
    assert ((by_role[TEST] >= 1) == ((held >= 2) & (test > 0))).all()
    assert ((by_role[VALIDATION] >= 1) == ((held >= 3) & (validation > 0))).all()
    if train + validation + test == 1:
        assert (sum(by_role) == held).all()


def test_the_fractions_are_those_of_the_config_and_the_rest_is_unused():
    split = IID(train=0.3, validation=0.1, test=0.5).assign(ten_classes(100), np.arange(1000), 10, 0)
    for client in range(10):
        # 100 samples each: 30, 10, 50, and 10 of no use
        assert np.bincount(split.role[split.client == client]).tolist() == [30, 10, 50]


def test_a_list_of_training_fractions_is_drawn_from_by_every_client():
    partition = IID(train=[0.1, 0.3, 0.4], validation=0.1, test=0.5)
    assert partition.problems() == []
    split = partition.assign(ten_classes(1000), np.arange(10_000), 100, 0)
    sizes = np.bincount(split.client[split.role == TRAIN])
    assert set(sizes) == {10, 30, 40}
    assert (np.bincount(split.client[split.role == TEST]) == 50).all()


def test_roles_are_drawn_without_regard_to_class_or_order():
    split = IID().assign(ten_classes(600), np.arange(6000), 1, 0)
    tests = split.index[split.role == TEST]
    # 1,500 of 6,000 in ten classes: 150 of each on average, standard deviation below sqrt(150) = 12.2
    assert np.abs(np.bincount(tests // 600, minlength=10) - 150).max() < 5 * 12.2


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        (IID(train=0.0), "partition.train=0.0 must be a fraction"),
        (IID(train="most"), "partition.train=most must be a fraction"),
        (IID(train=[]), r"partition.train=\[\] must be a fraction"),
        (IID(train=[0.5, 1.5]), "must be a fraction"),
        (IID(train=float("nan")), "must be a fraction"),
        (IID(train=0.9), "add up to over 1"),
        (IID(train=[0.1, 0.8]), "add up to over 1"),
        (IID(validation=-0.1), r"partition.validation=-0.1 must lie in \[0, 1\)"),
        (Dirichlet(alpha=0), "partition.alpha=0 must be a positive number"),
        (Dirichlet(alpha=float("inf")), "partition.alpha=inf must be a positive number"),
        (Dirichlet(min_samples=0), "partition.min_samples=0 must be at least 1"),
        (DirichletEqual(beta=-1), "partition.beta=-1 must be a positive number"),
        (DirichletEqual(fraction=1.5), "partition.fraction=1.5 must be above 0 and at most 1"),
        (Pathological(classes_per_client=0), "partition.classes_per_client=0 must be at least 1"),
        (Pathological(samples_per_class=0), "partition.samples_per_class=0 must be at least 1"),
        (Grouped(counts=[]), r"partition.counts=\[\] must be numbers"),
        (Grouped(counts=[0, 0]), "must be numbers of samples"),
        (SizedClasses(smallest=9, largest=8), "partition.largest=8 is below partition.smallest=9"),
        (DS1(classes_per_client=0), "must be at least 1"),
        (DS3(sigma=-1), "partition.sigma=-1 must be at least 0"),
        (File(), "partition=file needs the file: partition.path="),
    ],
)
def test_impossible_settings_are_problems(partition, said):
    assert re.search(said, "\n".join(partition.problems()))


def test_all_problems_of_a_partition_come_together():
    assert len(Dirichlet(test=2.0, alpha=0, min_samples=0).problems()) == 4  # test, the sum, alpha, min_samples


def test_a_split_saved_and_loaded_is_the_same(tmp_path):
    split = Dirichlet().assign(ten_classes(), np.arange(5000), 20, 3)._replace(public=np.arange(5000, 5100))
    split.save(tmp_path / "partition.npz")
    again = Assignment.load(tmp_path / "partition.npz", 20, 6000)
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(split, again, strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["partition.npz"]


def saved(tmp_path, **changes):
    content = {"index": np.arange(6), "client": np.arange(6) % 2, "role": np.array([0, 0, 1, 1, 2, 2])} | changes
    np.savez(tmp_path / "partition.npz", **{name: array for name, array in content.items() if array is not None})
    return str(tmp_path / "partition.npz")


def test_partition_file_runs_any_such_split_with_or_without_public_samples(tmp_path):
    labels = np.arange(10) % 3
    split = File(path=saved(tmp_path)).assign(labels, np.arange(10), 2, 0)
    assert (split.index.tolist(), split.client.tolist()) == ([0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 0, 1])
    assert split.public.size == 0
    shares = File(path=saved(tmp_path)).shares(labels, 2, np.random.default_rng(0))
    assert [share.tolist() for share in shares] == [[0, 2, 4], [1, 3, 5]]
    split = File(path=saved(tmp_path, public=np.array([9]))).assign(labels, np.arange(10), 2, 0)
    assert split.public.tolist() == [9]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"role": None}, "it has no role; needed are the arrays index, client and role"),
        ({"client": np.zeros(5, int)}, "differ in length: index 6, client 5, role 6"),
        ({"index": np.arange(6.0)}, "index is float64 .* must be integers in one dimension"),
        ({"client": np.zeros((6, 1), int)}, r"client is int64 of shape \(6, 1\)"),
        ({"index": np.arange(6) + 5}, "1 of its sample numbers are not in this dataset, which has 0 to 9"),
        ({"index": np.arange(6) - 1}, "1 of its sample numbers"),
        ({"index": np.array([0, 1, 2, 3, 4, 4])}, "names 1 samples more than once"),
        ({"public": np.array([5, 6])}, "names 1 samples more than once"),
        ({"public": np.array([77])}, "1 of its sample numbers"),
        ({"role": np.array([0, 0, 1, 1, 2, 3])}, "role 3 is unknown"),
        ({"client": np.arange(6) % 3}, "client numbers run from 0 to 2; clients=2 needs 0 to 1"),
        ({"client": np.arange(6) % 2 - 1}, "client numbers run from -1 to 0"),
        ({"client": np.array([0, 0, 1, 1, 1, 1])}, r"client 1 has no training sample \(1 of clients=2 have none\)"),
    ],
)
def test_a_wrong_split_file_is_named_with_what_is_wrong(tmp_path, changes, said):
    path = saved(tmp_path, **changes)
    with pytest.raises(DataError, match=said) as caught:
        Assignment.load(path, 2, 10)
    assert path in str(caught.value)


def test_a_split_file_that_is_missing_or_no_npz_is_a_data_error(tmp_path):
    (tmp_path / "text.npz").write_text("index,client,role")
    for name in ("text.npz", "missing.npz"):
        with pytest.raises(DataError, match=name):
            Assignment.load(tmp_path / name, 2, 10)


@given(st.integers(1, 30), st.integers(1, 8), seeds)
def test_evenly_shares_out_whole_classes_in_parts_that_differ_by_at_most_one(clients, classes, seed):
    rng = np.random.default_rng(seed)
    supply = rng.integers(1, 100, classes)
    held = rng.random((clients, classes)) < 0.5
    counts = evenly(held, supply)
    for c in range(classes):
        assert not counts[~held[:, c], c].any()
        if held[:, c].any():
            assert counts[:, c].sum() == supply[c]
            assert np.ptp(counts[held[:, c], c]) <= 1


@given(st.integers(1, 30), st.integers(1, 8), seeds)
def test_scaled_down_wishes_fit_the_supply_and_stay_in_proportion(clients, classes, seed):
    rng = np.random.default_rng(seed)
    supply, wish = rng.integers(1, 1000, classes), rng.integers(0, 1000, (clients, classes))
    counts = scaled_down(wish, supply)
    assert (counts.sum(0) <= supply).all()
    factor = min(1, (supply / np.maximum(wish.sum(0), 1)).min())
    assert (np.abs(counts - wish * factor) <= 1).all()
    assert np.array_equal(scaled_down(wish, wish.sum(0)), wish)  # as wished where the supply just suffices


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 20), seeds)
@settings(deadline=None)
def test_draws_never_exceed_the_supply_and_reach_their_size_while_there_is_something_left(clients, classes, size, seed):
    rng = np.random.default_rng(seed)
    supply = rng.integers(1, 100, classes)
    mix = rng.random((clients, classes)) * (rng.random((clients, classes)) < 0.6)
    counts = draw(mix, size, supply, rng)
    left = supply - counts.sum(0)
    assert (left >= 0).all()
    assert not counts[mix == 0].any()
    short = counts.sum(1) < size
    assert not (mix[short] * left).any()  # who has too little wanted only what has run out


def test_dealing_gives_each_client_its_counts_of_random_samples():
    labels = np.random.default_rng(0).permutation(ten_classes(50))
    counts = np.random.default_rng(1).integers(0, 10, (5, 10))
    shares = deal(labels, counts, np.random.default_rng(2))
    assert np.array_equal(counts_of(shares, labels), counts)
    other = deal(labels, counts, np.random.default_rng(3))
    assert not np.array_equal(shares[0], other[0])


@given(st.integers(1, 20), st.integers(0, 5), seeds)
@settings(deadline=None)
def test_dealing_fills_up_who_has_too_little_and_takes_no_more_than_needed(clients, least, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, clients * 8)
    counts = np.zeros((clients, 4), int)
    counts[0] = np.bincount(labels, minlength=4) // 2  # client 0 has half of all, and nobody has the rest
    shares = deal(labels, counts, rng, least)
    assert len(set(np.concatenate(shares))) == sum(map(len, shares))
    assert [len(share) for share in shares[1:]] == [least] * (clients - 1)
    assert len(shares[0]) >= least


def test_givers_give_in_proportion_to_what_they_can_spare():
    owner = np.repeat([0, 1], [100, 50])  # and client 2 has nothing
    found = np.bincount(filled_up(owner, 3, 10, np.random.default_rng(0)))
    # 90 and 40 to spare, 10 wanted: 10 * 90/130 = 6.9, rounded down to 6, and 4 from the other
    assert found.tolist() == [94, 46, 10]


def test_every_partition_has_a_preset_that_starts_with_its_command():
    files = sorted(CONF.glob("*.yaml"))
    assert [file.stem for file in files] == list(PARTITIONS)
    assert len(files) == 9
    for file in files:
        preset = yaml.safe_load(file.read_text())
        assert file.read_text().startswith(f"# fedkd partition={file.stem}")
        assert preset.pop("defaults") == [{"/schema/partition@_here_": file.stem}, "_self_"]
        assert preset.pop("name") == file.stem == PARTITIONS[file.stem].name
        partition = PARTITIONS[file.stem](**preset)
        assert isinstance(partition, Partition)
        assert bool(partition.problems()) == (file.stem == "file")


@pytest.mark.realdata
@pytest.mark.parametrize("name", ENTRIES)
def test_real_mnist_is_split_for_40_clients(name):
    if not cache_file("mnist").exists():
        pytest.skip(f"{cache_file('mnist')} is not there; fill the cache first")
    labels = read("mnist").train_labels
    split = PARTITIONS[name]().assign(labels, np.arange(60_000), 40, 0)
    assert len(np.unique(split.index)) == len(split.index)
    assert set(split.client[split.role == TRAIN]) == set(split.client[split.role == TEST]) == set(range(40))
