"""Which images are labelled and who owns them: against the official program, and properties that always hold."""

import math
import time

import numpy as np
import pytest
from conftest import GOLDEN

import common

OFFICIAL = np.load(GOLDEN / "proxyfl_partition.npz")
UNEVEN = np.random.RandomState(3).permutation(np.repeat([0, 1, 2, 3], [1000, 1200, 17, 1]))
CIFAR_SIZED = np.random.RandomState(0).permutation(np.repeat(np.arange(10), 5000))


@pytest.mark.parametrize("alpha", OFFICIAL["alphas"])
@pytest.mark.parametrize("case", OFFICIAL["case_names"])
def test_official_partition_index_by_index(case, alpha):
    parts = common.partition(
        OFFICIAL[f"{case}__labels"],
        int(OFFICIAL["n_clients"]),
        alpha or math.inf,
        int(OFFICIAL[f"{case}__per_class_labelled"]),
    )
    for name, clients in zip(("labelled", "unlabelled"), parts):
        flat, bounds = (OFFICIAL[f"{case}__a{alpha:g}__{name}_{end}"] for end in ("idx", "off"))
        assert len(clients) == len(bounds) - 1
        for client, own in enumerate(clients):
            assert np.array_equal(own, flat[bounds[client] : bounds[client + 1]]), (name, client)


@pytest.mark.parametrize("kind", ["official", "dirichlet"])
@pytest.mark.parametrize("alpha", [0.001, 0.1, 0.5, 1, 100, 1e6, math.inf])
@pytest.mark.parametrize("clients", [1, 7, 20])
def test_every_image_has_one_owner(kind, alpha, clients):
    per_class = [100, 120, 2, 1]
    labelled, unlabelled = common.partition(UNEVEN, clients, alpha, per_class, kind)
    owned = np.concatenate(labelled + unlabelled)
    assert np.array_equal(np.sort(owned), np.arange(len(UNEVEN)))
    assert np.bincount(UNEVEN[np.concatenate(labelled)], minlength=4).tolist() == per_class
    assert len(labelled) == len(unlabelled) == clients
    if kind == "official" and alpha != math.inf:
        assert np.ptp([len(part) for part in unlabelled]) <= 1


@pytest.mark.parametrize("kind", ["official", "dirichlet"])
@pytest.mark.parametrize(
    "labels, clients, alpha",
    [
        (CIFAR_SIZED, 1000, 0.1),
        (CIFAR_SIZED, 10_000, 0.1),
        (CIFAR_SIZED, 100, 0.001),
        (np.repeat(np.arange(100), 500), 500, 0.1),
        (np.repeat(np.arange(10), 40), 100, 0.01),
        (np.arange(10), 10, 0.001),
    ],
)
def test_harsh_requests_end_in_seconds(kind, labels, clients, alpha):
    start = time.perf_counter()
    labelled, unlabelled = common.partition(labels, clients, alpha, 1 if len(labels) < 100 else 4, kind)
    assert time.perf_counter() - start < 20
    assert np.array_equal(np.sort(np.concatenate(labelled + unlabelled)), np.arange(len(labels)))


def test_more_clients_than_images_is_refused_with_all_figures():
    with pytest.raises(common.UserError, match=r"--clients 11.*10.*--alpha 0.1"):
        common.partition(np.arange(10), 11, 0.1, 1)


@pytest.mark.parametrize("kind", ["official", "dirichlet"])
def test_seeds(kind):
    first, again, other = (common.partition(UNEVEN, 5, 0.3, [9, 9, 9, 1], kind, seed) for seed in (4, 4, 5))
    assert all(np.array_equal(a, b) for a, b in zip(first[0] + first[1], again[0] + again[1]))
    assert not all(np.array_equal(a, b) for a, b in zip(first[0] + first[1], other[0] + other[1]))


def class_mixes(parts, labels):
    return np.stack([np.bincount(labels[part], minlength=10) / max(1, len(part)) for part in parts])


def test_small_alpha_is_skewed_and_large_alpha_is_not():
    total = {}
    for kind in ("official", "dirichlet"):
        for alpha in (0.1, 1, 1e6):
            unlabelled = common.partition(CIFAR_SIZED, 20, alpha, 500, kind)[1]
            total[kind, alpha] = np.abs(class_mixes(unlabelled, CIFAR_SIZED) - 0.1).sum(1).mean() / 2  # total variation
        assert total[kind, 0.1] > total[kind, 1] > total[kind, 1e6] and total[kind, 1e6] < 0.05
    assert total["dirichlet", 0.1] > total["official", 0.1]  # the textbook draw is the harsher one


def test_textbook_draw_has_dirichlet_moments():
    """Shares of a class over K clients: mean 1/K, variance (1/K)(1 - 1/K) / (K alpha + 1)."""
    members = [np.arange(100_000)] * 300
    for alpha in (0.1, 2.0):
        shares = []
        for seed in range(2):
            owner_sizes = [common.dirichlet_shares([part], 4, alpha, 1000 * seed + i) for i, part in enumerate(members)]
            shares.append([[len(part) / 100_000 for part in sizes] for sizes in owner_sizes])
        shares = np.array(shares)
        assert shares.mean() == pytest.approx(1 / 4)
        assert shares.var() == pytest.approx(1 / 4 * 3 / 4 / (4 * alpha + 1), rel=0.1)


def test_published_sizes_of_cifar10():
    """250 labelled and 2,250 unlabelled images a client, two labelled classes absent on average."""
    labelled, unlabelled = common.partition(CIFAR_SIZED, 20, 0.1, 500)
    assert {len(part) for part in labelled} == {250} and {len(part) for part in unlabelled} == {2250}
    absent = (class_mixes(labelled, CIFAR_SIZED) == 0).sum(1)
    assert 1 <= absent.mean() <= 3
    pairs = [
        np.concatenate(unlabelled[k : k + 2]) for k in range(0, 20, 2)
    ]  # clients 2i, 2i+1 together are nearly i.i.d.
    assert np.abs(class_mixes(pairs, CIFAR_SIZED) - 0.1).sum(1).mean() / 2 < 0.03


def test_streams_are_named_and_independent_of_use():
    first = common.stream(1, "client", 3, 7).random(4)
    common.stream(1, "client", 3, 6).random(100)
    assert np.array_equal(first, common.stream(1, "client", 3, 7).random(4))
    others = [
        common.stream(*key).random(4)
        for key in (
            (2, "client", 3, 7),
            (1, "client", 7, 3),
            (1, "client", 37),
            (1, "sampling", 3, 7),
            (1, "client", 3, 77),
        )
    ]
    assert not any(np.array_equal(first, other) for other in others)


def test_class_mixes_of_labelled_and_unlabelled_images():
    """The published protocol has them differ inside a client, the textbook draw does not."""
    distance = {}
    for kind in ("official", "dirichlet"):
        labelled, unlabelled = (
            class_mixes(part, CIFAR_SIZED) for part in common.partition(CIFAR_SIZED, 20, 0.1, 500, kind)
        )
        distance[kind] = np.abs(labelled - unlabelled).sum(1).mean() / 2
    assert distance["official"] == pytest.approx(0.47, abs=0.05) and distance["dirichlet"] < 0.05
