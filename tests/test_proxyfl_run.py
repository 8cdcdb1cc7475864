"""proxyfl.py as a program: label secrecy, odd clients, ablations, what its run folder holds beyond the contract."""

import csv
import json

import numpy as np
import pytest
import torch
from scripts import equal, n_bytes, rows, state
from scripts import method as find_method
from worlds import metrics, same_parameters, sgd, tiny_args, tiny_data, tiny_nets, tiny_state

import common
import proxyfl

METHOD = find_method("proxyfl.py")
SHORT, train = METHOD.short, METHOD.train


# ---- clients of every size ----------------------------------------------------------------------------------------


def world(n_labelled, n_unlabelled, **settings):
    """Two clients: one of the given size, one of 40 images. Returns client_update's arguments but the client."""
    args = tiny_args(METHOD, **settings)
    net, teacher = tiny_nets(proxyfl, args, 2, heads=args.similarity == "projected")
    data = tiny_data(proxyfl, (n_labelled, n_unlabelled), (10, 30), test_stats=None)
    received = proxyfl.Broadcast(tiny_state(net), torch.full((4,), 0.25, dtype=torch.float64))
    return args, data, received, net, teacher, sgd(args, net)


def update(client, args, data, received, net, teacher, optimizer):
    return proxyfl.client_update(args, 1, client, data, received, net, teacher, optimizer)


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize(
    "n_labelled, n_unlabelled",
    [(0, 0), (0, 1), (1, 0), (0, 2), (2, 1), (0, 7), (7, 0), (8, 0), (9, 0), (0, 8), (0, 9), (3, 17)],
)
def test_client_of_any_size(n_labelled, n_unlabelled, batch_size, variant):
    setting = world(n_labelled, n_unlabelled, batch_size=batch_size, variant=variant)
    upload = update(0, *setting)
    pool = n_labelled + n_unlabelled
    found = metrics(proxyfl, upload)
    assert upload.weight.item() == pool and found["steps"] == (max(1, pool // batch_size) if pool else 0)
    assert found["sup_steps"] == (found["steps"] if n_labelled else 0)
    assert same_parameters(upload, setting[2]) == (pool == 0)
    assert all(value.isfinite().all() for value in upload.state.values()) and upload.class_count.isfinite().all()
    if not n_labelled:
        assert found["loss_sup"] == 0


@pytest.mark.parametrize("threshold, used", [(1.5, "0"), (0, "100")])
@pytest.mark.parametrize("variant", ["paper", "official"])
def test_no_image_or_every_image_above_the_threshold(tmp_path, variant, threshold, used):
    folder = train(tmp_path, "--conf-threshold", threshold, "--variant", variant)
    for row in rows(folder):
        assert row["pl_used_pct"] == used
        if used == "0":
            assert row["loss_unsup"] == "0" and row["pl_used_acc_pct"] == "" and row["set_size"] != ""
        else:
            assert row["low_pct"] == "0" and row["set_recall_pct"] == "" and row["pl_used_acc_pct"] == row["pl_acc_pct"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--mu", 5],
        ["--candidate-set", "top1"],
        ["--candidate-set", "top5"],
        ["--no-icpl"],
        ["--no-gpt"],
        ["--no-icpl", "--no-gpt", "--lambda-u", 0],
        ["--similarity", "dot"],
        ["--stats", "official", "--client-weight", "official", "--shared-momentum", "--empty-set", "none"],
        ["--gpt-epochs", 0],
    ],
)
def test_every_ablation_runs_and_stays_finite(tmp_path, flags):
    folder = train(tmp_path, "--rounds", 1, *flags)
    assert all(value.isfinite().all() for value in state(folder).values())
    row = rows(folder)[0]
    assert "nan" not in row.values() and "inf" not in row.values()
    if "--no-icpl" in flags:
        assert row["loss_icpl"] == row["set_size"] == "" and "feat_proj.weight" not in state(folder)
    if "--no-gpt" in flags:
        assert row["loss_gpt_start"] == ""
    json.loads((folder / "config.json").read_text(), parse_constant=pytest.fail)  # strict JSON: no Infinity, no NaN


def test_icpl_with_weight_0_is_no_icpl_bit_for_bit(tmp_path):
    with_heads = state(train(tmp_path, "--lambda-icpl", 0, name="zero"))
    without = state(train(tmp_path, "--no-icpl", name="off"))
    assert set(with_heads) - set(without) == {"feat_proj.weight", "feat_proj.bias", "proxy_proj.weight"}
    assert all(torch.equal(value, with_heads[name]) for name, value in without.items())


# ---- no client sees another's work --------------------------------------------------------------------------------


def test_without_a_step_size_only_batch_norm_statistics_move():
    setting = world(5, 30, lr=0)
    upload = update(0, *setting)
    for name, value in upload.state.items():
        assert torch.equal(value, setting[2].state[name]) == ("running" not in name and "tracked" not in name), name


def test_class_counts_come_from_the_last_epoch():
    once, twice = (update(0, *world(6, 30, local_epochs=epochs, conf_threshold=1.5, lr=0)) for epochs in (1, 2))
    assert (
        once.class_count.sum() == twice.class_count.sum() == 4 * 8
    )  # 36 // 8 steps of 8 labelled images, nothing else passes


def test_shared_momentum_is_carried_and_fresh_momentum_is_not():
    for shared, same in ((False, True), (True, False)):
        setting = world(5, 30)
        setting[0].shared_momentum = shared
        first = update(0, *setting)
        second = update(0, *setting)
        assert equal(first.state, second.state) == same


def test_official_client_weight_statistics_and_labelled_share_of_svhn(monkeypatch):
    assert update(0, *world(5, 30, client_weight="official")).weight.item() == 2000 * 5 + 35
    args = proxyfl.parse_args([*SHORT, "--stats", "official"])
    data = proxyfl.prepare_data(args, torch.device("cpu"))[0]
    assert data.stats == (proxyfl.CIFAR10_MEAN, proxyfl.CIFAR10_STD) and data.test_stats != data.stats
    sizes = [4659, 5000, 6000]
    labels = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    images = torch.zeros(len(labels), 3, 8, 8, dtype=torch.uint8)
    svhn = common.Dataset(images, labels, images[:3], labels[:3], list("012"), "made up")
    monkeypatch.setattr(common, "load_dataset", lambda *_: svhn)
    for ratio, each in ((0.1, [460] * 3), (0.2, [920] * 3)):
        data = proxyfl.prepare_data(
            proxyfl.parse_args(["--dataset", "svhn", "--label-ratio", str(ratio)]), torch.device("cpu")
        )[0]
        assert np.bincount(data.labels[np.concatenate(data.labelled)]).tolist() == each
    data = proxyfl.prepare_data(proxyfl.parse_args(["--dataset", "cifar10"]), torch.device("cpu"))[0]
    assert np.bincount(data.labels[np.concatenate(data.labelled)]).tolist() == [466, 500, 600]


def test_presets_follow_the_flags_that_are_given():
    assert proxyfl.parse_args(["--clients", "4"]).clients_per_round == 4
    assert proxyfl.parse_args(["--dataset", "CIFAR-100", "--rounds", "7"]).rounds == 7
    paper = proxyfl.parse_args(["--dataset", "cifar100"])
    assert (paper.clients, paper.clients_per_round, paper.rounds, paper.gpt_epochs, paper.width) == (20, 8, 500, 10, 64)
    assert proxyfl.parse_args(["--variant", "paper", "--lu-mean", "batch"]).lu_mean == "batch"


# ---- files --------------------------------------------------------------------------------------------------------


def test_run_folder_beyond_the_contract(tmp_path, capsys):
    folder = train(tmp_path)
    settings = json.loads((folder / "config.json").read_text())["settings"]
    assert settings["alpha"] == 0.1 and settings["similarity"] == "projected"
    with open(folder / "clients.csv", newline="") as file:
        clients = [{key: int(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert sum(row["labelled"] for row in clients) == 20 and sum(row["unlabelled"] for row in clients) == 180
    table = rows(folder)
    net = proxyfl.ResNet8(10, 8, heads=True)
    message = n_bytes(net.state_dict()) + 4 * 10
    assert [row["bytes_up"] for row in table] == [row["bytes_down"] for row in table] == [str(3 * message)] * 2
    assert json.loads((folder / "summary.json").read_text())["bytes_up"] == 2 * 3 * message
    assert "similarity=projected" in capsys.readouterr().out
    assert float(table[0]["set_recall_pct"]) <= 100 and float(table[0]["set_size"]) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_default_run_reaches_90_percent(tmp_path, script, seed):
    script("proxyfl.py", "--seed", seed, "--out-dir", tmp_path, "--run-name", "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 90 <= summary["final_acc_pct"] <= 99.5  # too good would be a bug as well
