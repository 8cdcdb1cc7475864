"""Splits of train and test images over FedCoPL's clients: against the official program, and what always holds."""

import math
import time
from unittest.mock import patch

import numpy as np
import pytest
from conftest import GOLDEN

import common

OFFICIAL = np.load(GOLDEN / "fedcopl_partition.npz")
MODES = {  # the official program's mode: kind and beta here
    "iid": ("iid", math.inf),
    "noniid_b0.1": ("dirichlet", 0.1),
    "noniid_b0.5": ("dirichlet", 0.5),
    "labeldir": ("quantity", math.inf),
}
KINDS = ("dirichlet", "quantity", "iid")


def keys(failed):
    """(set, mode, seed) of the golden cases that the official program finishes, or stops at."""
    return [
        (case, mode, int(seed))
        for case in OFFICIAL["set_names"]
        for mode in OFFICIAL["mode_names"]
        for seed in OFFICIAL["seeds"]
        if (f"{case}__{mode}__s{seed}__official_error" in OFFICIAL.files) == failed
    ]


class Begun(np.random.RandomState):
    """A generator behind the permutation that the official program draws while it reads the class names."""

    def choice(self, *_, **__):
        pass


def split(case, mode, seed):
    """This project's split of a golden case: the labels, the two lists, and the generator afterwards."""
    labels, state = [OFFICIAL[f"{case}__{part}_labels"] for part in ("train", "test")], Begun(seed)
    kind, beta = MODES[mode]
    with patch.object(np.random, "RandomState", lambda seed: state):
        return labels, common.clip_partition(*labels, int(OFFICIAL[f"{case}__n_clients"]), beta, kind), state


def check_cover(parts, labels, clients):
    """Every image has exactly one owner; the lists hold whole numbers, empty ones too."""
    assert len(parts) == clients
    assert all(np.asarray(part).dtype.kind in "iu" for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


@pytest.mark.parametrize("case, mode, seed", keys(failed=False))
def test_official_split_index_by_index(case, mode, seed):
    _, parts, state = split(case, mode, seed)
    for name, clients in zip(("train", "test"), parts):
        flat, bounds = (OFFICIAL[f"{case}__{mode}__s{seed}__{name}_{end}"] for end in ("idx", "off"))
        assert len(clients) == len(bounds) - 1
        for client, own in enumerate(clients):
            assert np.array_equal(own, flat[bounds[client] : bounds[client + 1]]), (name, client)
    if mode != "labeldir":  # as many numbers were drawn
        assert state.random_sample() == OFFICIAL[f"{case}__{mode}__s{seed}__next_random"]


@pytest.mark.parametrize("case, mode, seed", keys(failed=True))
def test_where_the_official_program_stops_the_split_is_valid(case, mode, seed):
    labels, parts, _ = split(case, mode, seed)
    for own, part in zip(labels, parts):
        check_cover(part, own, int(OFFICIAL[f"{case}__n_clients"]))


DTD, CIFAR10, CIFAR100 = (47, 80, 40), (10, 5000, 1000), (100, 500, 100)  # classes, train and test images of each


@pytest.mark.parametrize("sizes, kind, train, test, classes", [
    (DTD, "dirichlet", "380 379 387 389 419 283 381 367 417 358", "186 189 191 193 209 141 190 185 205 191",
     "17 16 16 18 19 15 9 19 12 46"),
    (CIFAR10, "dirichlet", "4385 9050 7622 50 6205 1672 305 9306 3371 8034",
     "874 1810 1525 8 1241 335 61 1860 674 1612", "7 7 2 6 2 6 2 5 7 8"),
    (CIFAR100, "dirichlet", "5343 3238 5134 5420 5043 5130 5001 5029 5246 5416",
     "1060 738 938 1079 1008 1022 1006 1091 1043 1015", "45 45 48 53 52 34 43 49 36 95"),
    (DTD, "quantity", "216 584 241 559 206 594 258 542 147 413", "118 282 111 289 112 288 114 286 60 220",
     "10 10 10 10 10 10 10 10 7 7"),
    (CIFAR10, "quantity", "2095 7905 1261 8739 2787 7213 2191 7809 4443 5557",
     "331 1669 345 1655 925 1075 499 1501 430 1570", "2 2 2 2 2 2 2 2 2 2"),
    (DTD, "iid", "376 376 376 376 376 376 376 329 423 376", "188 188 188 188 188 188 188 141 235 188",
     "47 47 47 47 47 47 47 47 47 47"),
])
def test_official_sizes_of_the_real_data_sets(sizes, kind, train, test, classes):
    count, per_train, per_test = sizes
    labels = np.repeat(np.arange(count), per_train), np.repeat(np.arange(count), per_test)
    parts = common.clip_partition(*labels, 10, 0.1, kind)
    assert [len(part) for part in parts[0]] == list(map(int, train.split()))
    assert [len(part) for part in parts[1]] == list(map(int, test.split()))
    assert [len(set(labels[0][part])) for part in parts[0]] == list(map(int, classes.split()))


def uneven(seed, classes=7, train=900, test=300):
    """Two label vectors of uneven classes, each class present in both."""
    rng = np.random.RandomState(seed)
    share = rng.dirichlet(np.full(classes, 2.0))
    return [np.append(np.arange(classes), rng.choice(classes, size - classes, p=share)) for size in (train, test)]


@pytest.mark.parametrize("clients", [1, 2, 3, 5, 9, 20])
@pytest.mark.parametrize("kind, beta", [("iid", 1), ("quantity", 1), *(("dirichlet", b) for b in (0.3, 1, 1e6))])
def test_every_image_has_one_owner(kind, beta, clients):
    labels = uneven(clients)
    parts = common.clip_partition(*labels, clients, beta, kind, 4)
    for own, part in zip(labels, parts):
        check_cover(part, own, clients)
    if kind == "dirichlet":
        assert min(len(part) for part in parts[0]) >= 10
    if clients == 1:
        assert [len(part[0]) for part in parts] == [900, 300]


@pytest.mark.parametrize("classes, expected", [(200, [40] * 5), (101, [21, 21, 21, 21, 17])])
def test_quantity_over_five_clients_shares_no_class(classes, expected):
    labels = np.repeat(np.arange(classes), 6), np.repeat(np.arange(classes), 3)
    owned = [
        [set(own[part]) for part in parts]
        for own, parts in zip(labels, common.clip_partition(*labels, 5, 1, "quantity", 0))
    ]
    assert [len(one) for one in owned[0]] == expected == [len(one) for one in owned[1]]
    assert set().union(*owned[0]) == set(range(classes)) and owned[0] == owned[1]


def test_quantity_takes_consecutive_images_and_the_second_of_a_pair_gets_more_than_half():
    rng = np.random.RandomState(2)
    labels = [rng.permutation(np.repeat(np.arange(20), n)) for n in (100, 40)]
    parts = common.clip_partition(*labels, 10, 1, "quantity", 3)
    for own, part in zip(labels, parts):
        for label in range(20):
            pair = 2 * (label // 4), 2 * (label // 4) + 1  # a fifth of 20 classes: 4 for each pair
            held = [[int(i) for i in one if own[i] == label] for one in part]
            assert held[pair[0]] + held[pair[1]] == np.flatnonzero(own == label).tolist()  # in order, not shuffled
            assert 0 < len(held[pair[0]]) < len(held[pair[1]])


def test_quantity_bounds_of_the_first_of_a_pair():
    """[max(share / K, 10 / C), share): 40 images for two receivers give a share of 20, and 10 / C is 5."""
    labels, numbers = (np.repeat(np.arange(2), 40), np.repeat(np.arange(2), 400)), [[], []]
    for seed in range(300):
        for part, found in zip(common.clip_partition(*labels, 10, 1, "quantity", seed), numbers):
            found += [len(part[0]), len(part[2])]
    assert set(numbers[0]) == set(range(5, 20))
    assert 20 <= min(numbers[1]) < 25 and 190 < max(numbers[1]) < 200  # share 200: its tenth is the bound


@pytest.mark.parametrize("test_per_class", [1, 3, 16])
def test_quantity_with_few_test_images(test_per_class):
    """The official program ends in a TypeError here: an empty share turns its indices into floats."""
    for seed in range(5):
        labels = np.repeat(np.arange(47), 80), np.repeat(np.arange(47), test_per_class)
        parts = common.clip_partition(*labels, 10, 1, "quantity", seed)
        for own, part in zip(labels, parts):
            check_cover(part, own, 10)


def test_without_concentration_dirichlet_is_iid():
    labels = uneven(0)
    flat, infinite = (common.clip_partition(*labels, 6, math.inf, kind, 1) for kind in ("iid", "dirichlet"))
    for one, other in zip(flat, infinite):
        assert all(np.array_equal(a, b) for a, b in zip(one, other))


def test_first_class_has_the_same_shares_in_train_and_test():
    """One Dirichlet draw serves both; no client is full before the first class is dealt."""
    labels = np.repeat(np.arange(4), 4000), np.repeat(np.arange(4), 1000)
    for seed in range(5):
        train, test = common.clip_partition(*labels, 3, 0.5, "dirichlet", seed)
        for mine, mine_in_test in zip(train, test):
            shares = (labels[0][mine] == 0).sum() / 4000, (labels[1][mine_in_test] == 0).sum() / 1000
            assert shares[0] == pytest.approx(shares[1], abs=1 / 4000 + 1 / 1000)


def skew(parts, labels, classes):
    """Mean total variation between the clients' class mixes and the pooled one."""
    mixes = np.stack([np.bincount(labels[part], minlength=classes) / len(part) for part in parts if len(part)])
    return np.abs(mixes - np.bincount(labels) / len(labels)).sum(1).mean() / 2


def test_small_beta_is_skewed_and_large_beta_is_not():
    labels = np.repeat(np.arange(10), 500), np.repeat(np.arange(10), 100)
    train = [common.clip_partition(*labels, 10, beta, "dirichlet", 0)[0] for beta in (0.1, 1, 1e6)]
    strong, mild, none = (skew(part, labels[0], 10) for part in train)
    assert strong > mild > none and strong > 0.5 and none < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_the_split_seed_alone_decides(kind):
    labels, results = uneven(1), []
    for global_seed in (0, 99):
        np.random.seed(global_seed)
        before = np.random.get_state()[1].copy()
        results.append(common.clip_partition(*labels, 10, 0.3, kind, 8))
        assert np.array_equal(before, np.random.get_state()[1])
    for one, other in zip(*results):
        assert all(np.array_equal(a, b) for a, b in zip(one, other))
    other = common.clip_partition(*labels, 10, 0.3, kind, 9)
    assert not all(np.array_equal(a, b) for a, b in zip(results[0][0], other[0]))


@pytest.mark.parametrize(
    "per_class, test_per_class, clients, beta",
    [(40, 2, 40, 0.01), (100, 1, 100, 0.1), (5000, 1000, 100, 0.001), (10, 1, 10, 0.001), (2, 1, 30, 0.1)])
@pytest.mark.parametrize("kind", KINDS)
def test_harsh_requests_end_in_seconds(kind, per_class, test_per_class, clients, beta):
    """Ten training images for everybody may be out of reach: a split or a message, never an endless draw."""
    labels, start = (np.repeat(np.arange(10), per_class), np.repeat(np.arange(10), test_per_class)), time.perf_counter()
    try:
        parts = common.clip_partition(*labels, clients, beta, kind, 0)
    except common.UserError as error:
        assert str(clients) in str(error)
    else:
        for own, part in zip(labels, parts):
            check_cover(part, own, clients)
    assert time.perf_counter() - start < 20
