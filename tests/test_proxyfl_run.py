"""proxyfl.py as a program: its table of differences, settings of the official code, what travels."""

import json

import pytest
import torch
from scripts import equal, n_bytes, rows, state
from scripts import method as find_method
from worlds import update, world

import common
import proxyfl

METHOD, CPU = find_method("proxyfl.py"), torch.device("cpu")


def test_a_variant_fills_the_flags_that_are_not_given():
    paper, official = (proxyfl.parse_args(["--variant", variant]) for variant in ("paper", "official"))
    for name, (values, of_paper, of_code, ours, _) in proxyfl.DIFFS.items():
        if values:
            wanted = (of_paper, of_code) if ours is None else (ours, ours)
            assert (getattr(paper, name), getattr(official, name)) == wanted
            if isinstance(values, tuple):
                assert {of_paper, of_code, ours} - {None, "silent"} <= set(values)
    assert proxyfl.parse_args([]).variant == "official"
    assert proxyfl.parse_args(["--variant", "paper", "--lu-mean", "batch"]).lu_mean == "batch"


def test_class_counts_come_from_the_last_epoch():
    once, twice = (update(world("proxyfl.py", (6, 30), local_epochs=epochs, conf_threshold=1.5, lr=0))
                   for epochs in (1, 2))
    assert once.class_count.sum() == twice.class_count.sum() == 4 * 8      # 36 // 8 steps of 8 labelled images


@pytest.mark.parametrize("shared, same", [(False, True), (True, False)])
def test_shared_momentum_is_carried_and_fresh_momentum_is_not(shared, same):
    w = world("proxyfl.py", (5, 30), flags=["--shared-momentum"] * shared)
    assert equal(update(w).state, update(w).state) == same


def test_weight_of_a_client_in_the_official_code():
    assert update(world("proxyfl.py", (5, 30))).weight.item() == 35
    assert update(world("proxyfl.py", (5, 30), client_weight="official")).weight.item() == 2000 * 5 + 35


@pytest.mark.parametrize("dataset", ["digits", "cifar10"])
def test_official_statistics_are_cifar10s_for_training_images(dataset, tmp_path, monkeypatch):
    """And for test images on CIFAR-10, where their deviations are others; elsewhere those are the data set's own."""
    data, seen = common.semi_supervised_data(proxyfl.parse_args(METHOD.short), CPU), []
    train = proxyfl.client_update
    monkeypatch.setattr(common, "semi_supervised_data", lambda *_: data)
    monkeypatch.setattr(proxyfl, "client_update", lambda args, rnd, client, data, *rest: (
        seen.append(data.stats) or train(args, rnd, client, data, *rest)))
    monkeypatch.setattr(proxyfl, "evaluate", lambda net, state, images, labels, stats, amp: seen.append(stats) or 50.0)
    METHOD.train(tmp_path, "--dataset", dataset, "--stats", "official", "--rounds", 1)
    of_test = (proxyfl.CIFAR10_MEAN, proxyfl.CIFAR10_TEST_STD) if dataset == "cifar10" else data.stats
    assert seen == [(proxyfl.CIFAR10_MEAN, proxyfl.CIFAR10_STD)] * 3 + [of_test]


def test_projection_heads_travel_with_icpl_alone(run_once):
    for flags, heads in (("", True), ("--no-icpl", False), ("--similarity cosine", False)):
        folder = run_once("proxyfl.py", flags)
        assert n_bytes(state(folder)) == n_bytes(proxyfl.ResNet8(10, 8, heads).state_dict())
        assert all(float(row["set_size"] or 1) >= 1 for row in rows(folder))
    settings = json.loads((folder / "config.json").read_text(), parse_constant=pytest.fail)["settings"]
    assert settings["alpha"] == 0.1 and settings["similarity"] == "cosine"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_default_run_reaches_90_percent(tmp_path, script, seed):
    script("proxyfl.py", "--seed", seed, "--out-dir", tmp_path, "--run-name", "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 90 <= summary["final_acc_pct"] <= 99.5                          # too good would be a bug as well
