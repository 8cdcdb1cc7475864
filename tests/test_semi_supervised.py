"""Every semi-supervised script: label secrecy, odd clients, isolation of clients, and what a run leaves of a model."""

from collections import Counter

import numpy as np
import pytest
import torch
from scripts import SEMI_SUPERVISED, checkpoint, equal, rows
from scripts import method as find_method
from worlds import cut

import common

KEEPS_ALL = {"baselines/feddb.py": ["--tau", 0]}  # else a client without labels may find nothing to train on
NEEDS_LABELS = {"baselines/fedavg.py"}  # clients without labelled images do not train there
SIZES = [(0, 0), (0, 1), (1, 0), (0, 2), (2, 1), (0, 7), (7, 0), (8, 0), (9, 0), (0, 8), (0, 9), (3, 17)]


@pytest.fixture(params=SEMI_SUPERVISED)
def method(request):
    return find_method(request.param)


def variants(method):
    return [variant.split() for variant in method.table.variants]


@pytest.fixture(params=["first", pytest.param("others", marks=pytest.mark.slow)])
def some_variants(method, request):
    """The settings of variants(method), numbered: the first, and in the slow suite the others."""
    return [pair for pair in enumerate(variants(method)) if (pair[0] == 0) == (request.param == "first")]


def change_data(monkeypatch, method, change):
    """Let the script see change(data) instead of its data."""
    honest = method.module.prepare_data

    def changed(args, device):
        data, *rest = honest(args, device)
        return change(data), *rest

    monkeypatch.setattr(method.module, "prepare_data", changed)


def spy(monkeypatch, method, on_call):
    """Call on_call(local training, its arguments) for each local training; it returns the Upload."""
    for name in ("client_update", "two_phase_update"):
        if hasattr(method.module, name):
            honest = getattr(method.module, name)
            monkeypatch.setattr(method.module, name, lambda *args, honest=honest: on_call(honest, args))


def weights(value, name=""):
    """The trainable tensors of a nested structure, by name; no batch-norm statistics, no state of clients."""
    if isinstance(value, dict):
        return {key: leaf for part in value for key, leaf in weights(value[part], f"{name}/{part}").items()}
    return {name: value} if name.endswith((".weight", ".bias")) else {}


def whole_state(folder):
    """What a checkpoint holds of the method."""
    return {name: value for name, value in checkpoint(folder).items() if name not in ("settings", "optimizer")}


def leaves(value):
    if isinstance(value, (dict, list, tuple)):
        return [leaf for part in (value.values() if isinstance(value, dict) else value) for leaf in leaves(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def is_finite(value):
    return all(bool(leaf.isfinite().all()) for leaf in leaves(value))


def check_rows(folder):
    for row in rows(folder):
        assert None not in row.values() and not {"nan", "inf", "None"} & set(row.values())


def test_labels_of_unlabelled_images_change_no_weight(method, tmp_path, monkeypatch):
    def scramble(data):
        hidden = np.concatenate(data.unlabelled)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(hidden)))
        data.labels[hidden] = data.labels[hidden][order]
        return data

    settings = [variant for variant in variants(method) if "--labels" not in variant]
    for number, variant in enumerate(settings):
        plain = method.train(tmp_path, *variant, name=f"plain{number}")
        with monkeypatch.context() as patch:
            change_data(patch, method, scramble)
            other = method.train(tmp_path, *variant, name=f"scrambled{number}")
        a, b = whole_state(plain), whole_state(other)
        assert weights(a) and equal(a, b)
        quality = [[row.get("pl_acc_pct") for row in rows(folder)] for folder in (plain, other)]
        assert quality[0] != quality[1] or quality[0][0] is None  # the scramble was real
        # pseudo-labels did reach the losses
        assert quality[0][0] is None or any(float(row["pl_used_pct"]) > 0 for row in rows(plain))


@pytest.mark.parametrize("batch_size", [1, 8])
def test_clients_of_any_size(method, tmp_path, monkeypatch, batch_size):
    """One run in which all of SIZES take part, then one whose only client is empty."""

    def resize(data):
        labelled, unlabelled = cut(np.random.default_rng(0).permutation(200), SIZES)
        return data._replace(labelled=labelled, unlabelled=unlabelled)

    seen = []

    def remember(client_update, args):
        upload = client_update(*args)
        assert is_finite(upload)
        seen.append((upload.weight.item(), upload.metrics[method.module.METRICS.index("steps")].item()))
        return upload

    for number, variant in enumerate(variants(method) if batch_size > 1 else [[]]):
        seen.clear()
        with monkeypatch.context() as patch:
            change_data(patch, method, resize)
            spy(patch, method, remember)
            flags = ["--clients", len(SIZES), "--clients-per-round", len(SIZES), "--batch-size", batch_size]
            flags += KEEPS_ALL.get(method.name, [])
            folder = method.train(tmp_path, *flags, *variant, "--rounds", 1, name=f"run{number}")
        assert len(seen) == len(SIZES) and all((weight > 0) <= (steps > 0) for weight, steps in seen)
        able = sum(n > 0 if method.name in NEEDS_LABELS else n + u > 0 for n, u in SIZES)
        if method.name in NEEDS_LABELS and "all" in variant:
            able = len(SIZES) - 1
        assert sum(steps > 0 for _, steps in seen) == able, seen
        row = rows(folder)[0]
        assert int(row["clients_trained"]) + int(row["clients_empty"]) == len(SIZES)
        assert is_finite(whole_state(folder))
        check_rows(folder)


def test_clients_without_images_get_weight_0_and_a_logged_reason(method, tmp_path, capsys):
    flags = ["--partition", "dirichlet", "--alpha", 0.001, "--clients", 60, "--clients-per-round", 20, "--rounds", 1]
    folder = method.train(tmp_path, *flags)
    said = capsys.readouterr().out
    assert "clients own no labelled image" in said and "skipped" in said
    (row,) = rows(folder)
    assert int(row["clients_empty"]) > 0 and int(row["clients_trained"]) + int(row["clients_empty"]) == 20
    assert int(row["bytes_up"]) % int(row["clients_trained"]) == 0
    check_rows(folder)


def test_every_client_of_the_round_empty_keeps_the_model(method, some_variants, tmp_path, monkeypatch):
    nothing = np.zeros(0, np.int64)
    change_data(monkeypatch, method, lambda data: data._replace(labelled=[nothing] * 4, unlabelled=[nothing] * 4))
    for number, variant in some_variants:
        once = method.train(tmp_path, *variant, "--rounds", 1, name=f"once{number}")
        folder = method.train(tmp_path, *variant, "--rounds", 2, name=f"run{number}")
        before, after = weights(checkpoint(once)), weights(checkpoint(folder))
        assert before and equal(before, after)
        for row in rows(folder):
            assert row["clients_trained"] == row["bytes_up"] == "0" and row["loss_sup"] == ""
        check_rows(folder)


@pytest.mark.parametrize("threshold", [1.5, 0])
def test_no_image_or_every_image_above_the_threshold(method, tmp_path, threshold):
    flags = ["--variant", "official"] if method.name == "baselines/feddure.py" else []
    if not hasattr(method.module.parse_args(method.short), "conf_threshold"):
        pytest.skip("has no --conf-threshold")
    folder = method.train(tmp_path, "--conf-threshold", threshold, *flags)
    check_rows(folder)
    for row in rows(folder):
        if threshold and method.name != "baselines/flexmatch.py":
            assert row["pl_used_pct"] == "0" and row["pl_used_acc_pct"] == "" and float(row["loss_unsup"]) == 0
        else:  # FlexMatch remembers nothing above 1, so its class thresholds stay 0
            assert row["pl_used_pct"] == "100" and row["pl_used_acc_pct"] == row["pl_acc_pct"]


def test_a_local_training_leaves_no_trace(method, some_variants, tmp_path, monkeypatch):
    """Clients start from the broadcast, leave it alone, and give the same whatever was trained before them."""
    pointers = set()

    def twice(client_update, args):
        given = [arg for arg in args if isinstance(arg, (tuple, dict)) and type(arg).__name__ != "FederatedData"]
        before = [[leaf.clone() for leaf in leaves(part)] for part in given]
        first, second = client_update(*args), client_update(*args)
        assert given and equal(before, [leaves(part) for part in given])
        assert equal(first, second)
        for leaf in leaves(first):
            assert leaf.numel() == 0 or leaf.data_ptr() not in pointers
            pointers.add(leaf.data_ptr())
        kept.append(first)  # so that no address is used again
        return first

    for number, variant in some_variants:
        if "--shared-momentum" in variant:
            continue
        kept = []
        pointers.clear()
        with monkeypatch.context() as patch:
            spy(patch, method, twice)
            spied = method.train(tmp_path, *variant, "--rounds", 1, name=f"spied{number}")
        plain = method.train(tmp_path, *variant, "--rounds", 1, name=f"plain{number}")
        assert len(kept) == 3 and equal(whole_state(spied), whole_state(plain))
        first, other = (weights(upload._asdict()) for upload in kept[:2])
        assert any(not torch.equal(first[name], other[name]) for name in first)  # clients differ


def test_without_a_step_size_only_batch_norm_statistics_move(method, some_variants, tmp_path):
    for number, variant in some_variants:
        if "--gpt" in variant or method.name == "proxyfl.py" and "--no-gpt" not in variant:
            continue  # the server tunes proxies
        once, twice = (method.train(tmp_path, *variant, "--lr", 0, "--rounds", n, name=f"{n}_{number}") for n in (1, 2))
        before, after = weights(checkpoint(once)), weights(checkpoint(twice))
        assert before.keys() == after.keys()
        for name in before:
            torch.testing.assert_close(before[name], after[name], rtol=1e-6, atol=1e-7)


def test_accuracy_after_loading_equals_the_one_logged(method, tmp_path):
    folder = method.train(tmp_path)
    saved = checkpoint(folder)
    state = saved["state"]
    if "psi" in saved:  # FedMatch's model is a sum
        state = method.module.joint(state, method.module.without_small(saved["psi"], 5e-6))
    data = common.load_dataset("digits", "data", 8, 200)
    heads = {"heads": True} if "feat_proj.weight" in state else {}
    net = method.module.ResNet8(10, 8, **heads).to(memory_format=torch.channels_last)
    stats = common.channel_stats(data.train_images)
    accuracy = method.module.evaluate(net, state, data.test_images, data.test_labels, stats)
    assert rows(folder)[-1]["test_acc_pct"] == f"{accuracy:.6g}"


@pytest.mark.parametrize(
    "flags",
    [
        "--clients 1 --clients-per-round 1 --label-ratio 1 --alpha inf",
        pytest.param(
            "--clients-per-round 4 --partition dirichlet --flip --width 9 --amp --local-epochs 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_settings_of_the_protocol_run_and_stay_finite(method, tmp_path, flags):
    folder = method.train(tmp_path, "--rounds", 1, *flags.split())
    assert is_finite(whole_state(folder))
    check_rows(folder)


@pytest.mark.slow
def test_compiled_networks_train_as_they_are(method, tmp_path, monkeypatch):
    """Captured by torch.compile, then run by the same kernels: whatever the capture may do is seen bit by bit."""
    plain, honest, frames = method.train(tmp_path, "--rounds", 1, name="plain"), torch.nn.Module.compile, Counter()

    def eager(graph, _):
        frames["captured"] += 1
        return graph

    monkeypatch.setattr(torch.nn.Module, "compile", lambda net: honest(net, backend=eager))
    torch.compiler.reset()
    compiled = method.train(tmp_path, "--rounds", 1, "--compile", name="compiled")
    torch.compiler.reset()
    assert frames["captured"] > 0 and rows(compiled) == rows(plain)
    assert equal(whole_state(compiled), whole_state(plain))


def test_presets_follow_the_flags_that_are_given(method):
    parse = method.module.parse_args
    assert parse(["--clients", "4"]).clients_per_round == 4
    assert parse(["--dataset", "CIFAR-100", "--rounds", "7"]).rounds == 7
    for name, rounds in (("cifar10", 300), ("cifar100", 500), ("svhn", 150), ("cinic10", 400)):
        paper = parse(["--dataset", name])
        assert (paper.clients, paper.clients_per_round, paper.rounds, paper.local_epochs) == (20, 8, rounds, 5)
        assert (paper.batch_size, paper.width, paper.image_size, paper.flip) == (128, 64, 32, name != "svhn")
        assert paper.momentum == 0.9 and paper.weight_decay == 1e-4 and getattr(paper, "mu", 2) == 2


def test_labelled_share_of_svhn(method, monkeypatch):
    """As published: a tenth of 4,600 images of each class; elsewhere of the class itself."""
    sizes = [4659, 5000, 6000]
    labels = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    images = torch.zeros(len(labels), 3, 8, 8, dtype=torch.uint8)
    svhn = common.Dataset(images, labels, images[:3], labels[:3], list("012"), "made up")
    monkeypatch.setattr(common, "load_dataset", lambda *_: svhn)
    for flags, each in (
        (["--dataset", "svhn"], [460] * 3),
        (["--dataset", "svhn", "--label-ratio", "0.2"], [920] * 3),
        (["--dataset", "cifar10"], [466, 500, 600]),
    ):
        data = method.module.prepare_data(method.module.parse_args(flags), torch.device("cpu"))[0]
        assert np.bincount(data.labels[np.concatenate(data.labelled)]).tolist() == each


# Two settings of a flag, or one against the default, that must give different runs: the flag is read.
FLAGS = {
    "baselines/fedavg.py": ["--prox-mu 1", "--labels all"],
    "baselines/fixmatch.py": [
        "--teacher local",
        "--mu 1",
        "--tau 0.9",
        "--lambda-u 0.5",
        "--prox-mu 1",
        "--tau 0.3 | --tau 0.3 --union-mask",
        "--icpl --lambda-icpl 0.5 | --icpl",
        "--gpt --gpt-epochs 1 | --gpt --gpt-epochs 2",
        "--gpt --gpt-epochs 1 | --gpt --gpt-epochs 1 --gpt-lr 0.1",
    ],
    "baselines/flexmatch.py": ["--no-warm-up", "--mu 1", "--tau 0.2", "--lambda-u 0.5"],
    "baselines/fedmatch.py": [
        "--mu 1",
        "--tau 0.9",
        "--lambda-s 2",
        "--lambda-i 1",
        "--lambda-a 1",
        "--lambda-1 0.1",
        "--lambda-2 1",
        "--psi-factor 0.5",
        "--helpers 1",
        "--helper-interval 3",
        "--zero-threshold 1",
        "--send-threshold 0.1",
    ],
    "baselines/fedlabel.py": [
        "--mu 1",
        "--tau 0.9",
        "--lambda-u 0.5",
        "--lambda-agree 0",
        "--expertise logit-variance",
        "--two-phase",
        "--two-phase | --two-phase --unlabelled-epochs 2",
        "--icpl --lambda-icpl 0.5 | --icpl",
        "--gpt --gpt-epochs 1 | --gpt --gpt-epochs 2",
    ],
    "baselines/fedloke.py": [
        "--mu 1",
        "--loke-mu 0.1",
        "--entropy-threshold 1",
        "--warm-up-rounds 9",
        "--clip 0",
        "--rounds 4 | --rounds 4 --first-visit download",
        "--momentum 0",
    ],
    "baselines/feddure.py": [
        "--mu 1",
        "--variant official",
        "--lambda-u 0.5",
        "--warm-up 1",
        "--coarse-lr 0.01",
        "--gain new-old",
        "--gain-bound 0.001",
        "--virtual-lr 1",
        "--fine-lr 0.1",
        "--fine-hidden 64",
        "--variant official --tau 0.1 | --variant official",
        "--variant official --fine-tune-epochs 0 | --variant official",
    ],
    "baselines/feddb.py": [
        "--mu 1",
        "--tau 0.3",
        "--lambda-u 0.5",
        "--prior-momentum 0.9",
        "--prior-floor 0.3",
        "--exact-simplex",
    ],
    "baselines/sage.py": [
        "--mu 1",
        "--tau 0.9",
        "--lambda-u 0.5",
        "--kappa 0",
        "--temperature 3",
        "--icpl --lambda-icpl 0.5 | --icpl",
        "--gpt --gpt-epochs 1 | --gpt --gpt-epochs 2",
    ],
    "baselines/fedproto.py": [
        "--mu 1",
        "--tau 0.9",
        "--lambda-u 0.5",
        "--lambda-proto 5",
        "--prototypes all --tau 0.3 | --tau 0.3",
        "--prototypes labelled",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_of_a_method_is_read(name, tmp_path):
    method, done = find_method(name), {}

    def run(flags):
        if flags not in done:
            folder = method.train(tmp_path, *flags.split(), name=f"run{len(done)}")
            done[flags] = rows(folder), whole_state(folder)
        return done[flags]

    same = []
    for flags in FLAGS[name]:
        one, _, other = flags.partition("|")
        if equal(run(one.strip()), run(other.strip())):
            same.append(flags)
    assert same == []
    known = {action.dest for action in parser_actions(method)} - SHARED
    tried = {word[2:].replace("-", "_") for flags in FLAGS[name] for word in flags.split() if word.startswith("--")}
    assert known - {"tau", "conf_threshold", "icpl", "gpt"} <= {word.removeprefix("no_") for word in tried} | {
        "gpt_lr",
        "teacher",
    }


def parser_actions(method):
    """The flags that a script declares."""
    made = []
    honest = common.Parser.parse_args

    def look(parser, *args, **kwargs):
        made.append(parser)
        return honest(parser, *args, **kwargs)

    common.Parser.parse_args = look
    try:
        method.module.parse_args(method.short)
    finally:
        common.Parser.parse_args = honest
    return made[0]._actions


SHARED = {action.dest for action in parser_actions(find_method("baselines/fedavg.py"))} - {"prox_mu", "labels"}
