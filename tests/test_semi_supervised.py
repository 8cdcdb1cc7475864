"""Every semi-supervised script: label secrecy, odd clients, isolation, limits that are other methods, flags, bytes."""

import contextlib
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scripts import HEADLINES, PLUG_IN, SEMI_SUPERVISED, checkpoint, equal, n_bytes, rows, state
from scripts import method as find_method
from worlds import call, cut, update, world

import common

SIZES = [(0, 0), (0, 1), (1, 0), (0, 2), (2, 1), (0, 7), (7, 0), (8, 0), (9, 0), (0, 8), (0, 9), (3, 17)]


@pytest.fixture(params=SEMI_SUPERVISED)
def method(request):
    return find_method(request.param)


VARIANTS = [(name, variant) for name in SEMI_SUPERVISED for variant in find_method(name).table.variants]
every_variant = pytest.mark.parametrize("name, variant", VARIANTS)
first_variants = pytest.mark.parametrize("name, variant", [
    pytest.param(name, variant, marks=[] if variant == "" else pytest.mark.slow) for name, variant in VARIANTS])


def change_data(monkeypatch, change):
    """Let the scripts see change(data) instead of their data."""
    honest = common.semi_supervised_data
    monkeypatch.setattr(common, "semi_supervised_data", lambda *args: change(honest(*args)))


def spy(monkeypatch, module, on_call):
    """Call on_call(local training, its arguments) for each local training; it returns the Upload."""
    for name in ("client_update", "two_phase_update"):
        if hasattr(module, name):
            honest = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *args, honest=honest: on_call(honest, args))


def weights(value, name=""):
    """The trainable tensors of a nested structure, by name; no batch-norm statistics, no state of clients."""
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {key: leaf for part in value for key, leaf in weights(value[part], f"{name}/{part}").items()}
    return {name: value} if name.endswith((".weight", ".bias")) else {}


def leaves(value):
    if isinstance(value, (dict, list, tuple)):
        return [leaf for part in (value.values() if isinstance(value, dict) else value) for leaf in leaves(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def is_finite(value):
    return all(bool(leaf.isfinite().all()) for leaf in leaves(value))


def check(folder):
    """Nothing that a run left is not finite."""
    assert is_finite({name: value for name, value in checkpoint(folder).items() if name != "optimizer"})
    for row in rows(folder):
        assert None not in row.values() and not {"nan", "inf", "None"} & set(row.values())


# ---- label secrecy, odd clients, isolation ------------------------------------------------------------------------

@pytest.mark.parametrize("name, variant", [pair for pair in VARIANTS if "--labels" not in pair[1]])
def test_labels_of_unlabelled_images_change_no_weight(name, variant, tmp_path, monkeypatch, run_once):
    def scramble(data):
        hidden = np.concatenate(data.unlabelled)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(hidden)))
        data.labels[hidden] = data.labels[hidden][order]
        return data

    plain = run_once(name, variant)
    change_data(monkeypatch, scramble)
    other = find_method(name).train(tmp_path, *variant.split())
    assert weights(checkpoint(plain)) and equal(checkpoint(plain), checkpoint(other))
    quality = [[row.get("pl_acc_pct") for row in rows(folder)] for folder in (plain, other)]
    assert quality[0] != quality[1] or quality[0][0] is None               # the scramble was real,
    assert quality[0][0] is None or any(float(row["pl_used_pct"]) > 0 for row in rows(plain))      # and used


@pytest.mark.parametrize("name, variant, batch_size", [(*pair, 8) for pair in VARIANTS]
                         + [(name, "", 1) for name in SEMI_SUPERVISED])
def test_clients_of_any_size(name, variant, batch_size, tmp_path, monkeypatch):
    """One run in which all of SIZES take part; its last client has no image at all."""
    module, seen = find_method(name).module, []
    change_data(monkeypatch, lambda data: data._replace(**dict(zip(
        ("labelled", "unlabelled"), cut(np.random.default_rng(0).permutation(200), SIZES)))))

    def remember(client_update, args):
        upload, rnd, client, received = client_update(*args), args[1], args[2], weights(args[4])
        assert is_finite(upload) and rnd == 1
        sent, found = weights(upload), dict(zip(module.METRICS, upload.metrics.tolist()))
        (n_lab, n_unl), epochs = SIZES[client], 2 if "--two-phase" in variant else 1
        pool, steps, n_lab = n_lab + n_unl, max(1, (n_lab + n_unl) // batch_size), n_lab + n_unl * ("all" in variant)
        trains = n_lab > 0 or pool > 0 and name != "baselines/fedavg.py"
        assert found["steps"] == epochs * steps * trains and (found["loss_sup"] > 0) == (n_lab > 0)
        assert "sup_steps" not in found or found["sup_steps"] == steps * (n_lab > 0)
        assert upload.weight == pool * trains or "--two-phase" in variant and upload.weight <= pool
        assert all(equal(sent[key], part) for key, part in received.items()) == (not trains)
        seen.append(client)
        return upload

    spy(monkeypatch, module, remember)
    flags = ["--clients", len(SIZES), "--clients-per-round", len(SIZES), "--batch-size", batch_size, "--rounds", 1]
    flags += ["--tau", 0] * (name == "baselines/feddb.py")                 # else nothing to train on without labels
    folder = find_method(name).train(tmp_path, *flags, *variant.split())
    row, = rows(folder)
    assert sorted(seen) == list(range(len(SIZES)))
    assert int(row["clients_trained"]) + int(row["clients_empty"]) == len(SIZES)
    check(folder)


def test_clients_without_images_get_weight_0_and_a_logged_reason(method, tmp_path, capsys):
    flags = ["--partition", "dirichlet", "--alpha", 0.001, "--clients", 60, "--clients-per-round", 20, "--rounds", 1]
    folder = method.train(tmp_path, *flags)
    said, (row,) = capsys.readouterr().out, rows(folder)
    assert "clients own no labelled image" in said and "skipped" in said
    assert int(row["clients_empty"]) > 0 and int(row["clients_trained"]) + int(row["clients_empty"]) == 20
    assert int(row["bytes_up"]) % int(row["clients_trained"]) == 0
    for kept in ("personal", "copies"):                                    # of the clients that trained
        assert len(checkpoint(folder).get(kept, {})) in (0, int(row["clients_trained"]))
    check(folder)


@first_variants
def test_every_client_of_the_round_empty_keeps_everything(name, variant, tmp_path, monkeypatch):
    nothing = [np.zeros(0, np.int64)] * 4
    change_data(monkeypatch, lambda data: data._replace(labelled=nothing, unlabelled=nothing))
    once, twice = (find_method(name).train(tmp_path, *variant.split(), "--rounds", n, name=f"{n}") for n in (1, 2))
    assert weights(checkpoint(once)) and equal(checkpoint(once), checkpoint(twice))
    for row in rows(twice):
        assert row["clients_trained"] == row["bytes_up"] == "0" and row["loss_sup"] == ""
    check(twice)


@first_variants
@pytest.mark.parametrize("used", [0, 100])
def test_no_image_or_every_image_above_the_threshold(name, variant, used, tmp_path):
    """FlexMatch remembers nothing above 1, so all of its class thresholds stay 0."""
    flag, none, every = {"baselines/fedloke.py": ("--entropy-threshold", 0, 9)}.get(name, ("--tau", 1.5, 0))
    if name == "baselines/fedavg.py" or name == "baselines/feddure.py" and not variant:
        pytest.skip("has no threshold")
    flag = flag if name != "proxyfl.py" else "--conf-threshold"
    folder = find_method(name).train(tmp_path, *variant.split(), flag, every if used else none)
    for row in rows(folder):
        if name == "baselines/flexmatch.py" or used:
            assert row["pl_used_pct"] == "100" and row["pl_used_acc_pct"] == row["pl_acc_pct"] != ""
            assert float(row["loss_unsup"]) > 0 and row.get("low_pct", "0") == "0" and not row.get("set_recall_pct")
        else:
            assert row["pl_used_pct"] == row["loss_unsup"] == "0" and row["pl_used_acc_pct"] == ""
            assert row["pl_acc_pct"] != "" and row.get("low_pct", "100") == "100"
    check(folder)


@first_variants
def test_a_local_training_leaves_no_trace(name, variant, tmp_path, monkeypatch):
    """Clients start from the broadcast, leave it alone, and give the same whatever was trained before them."""
    pointers, kept = set(), []                                             # kept: so that no address is used again

    def twice(client_update, args):
        given = [arg for arg in args if isinstance(arg, (tuple, dict)) and type(arg).__name__ != "FederatedData"]
        before = [[leaf.clone() for leaf in leaves(part)] for part in given]
        first, second = client_update(*args), client_update(*args)
        assert given and equal(before, [leaves(part) for part in given])
        assert equal(first, second)
        for leaf in leaves(first):
            assert leaf.numel() == 0 or leaf.data_ptr() not in pointers
            pointers.add(leaf.data_ptr())
        kept.append(first)
        return first

    if "--shared-momentum" in variant:
        pytest.skip("carries momentum over")
    plain = find_method(name).train(tmp_path, *variant.split(), "--rounds", 1, name="plain")
    spy(monkeypatch, find_method(name).module, twice)
    spied = find_method(name).train(tmp_path, *variant.split(), "--rounds", 1, name="spied")
    assert len(kept) == 3 and equal(checkpoint(spied), checkpoint(plain))
    first, other = (weights(upload) for upload in kept[:2])
    assert any(not torch.equal(first[key], other[key]) for key in first)   # clients differ


@every_variant
def test_without_a_step_size_only_batch_norm_statistics_move(name, variant):
    w = world(name, (5, 20), flags=[*variant.split(), "--lr", 0])
    sent, came = weights(update(w)), weights(w.received)
    for key, value in came.items():
        torch.testing.assert_close(sent[key], value, rtol=1e-6, atol=1e-7)


# ---- one local step -----------------------------------------------------------------------------------------------

NO_STEP = "baselines/fedavg.py", "baselines/fedmatch.py"                   # whose steps are no local_loss
STEPS = [pair for pair in VARIANTS if pair[0] not in NO_STEP and "--two-phase" not in pair[1]]


def step_of(w, n_lab=6, n_unl=12):
    """local_loss on random views: (total, ..., values), the views and the labels; about half of the images used."""
    torch.manual_seed(1)
    both = 2 if w.module.__name__ == "baselines.fedloke" else 1            # it has two views of labelled images
    views, label = torch.randn(both * n_lab + 2 * n_unl, 3, 8, 8, requires_grad=True), torch.arange(n_lab) % 4
    more = {"fine": None, "fine_optimizer": None, "ramp": 0.5, "threshold": torch.full((4,), 0.5),
            "class_prior": torch.full((4,), 0.25), "prototype": torch.rand(4, 32),
            "known": torch.ones(4, dtype=torch.bool), "pseudo_label": torch.arange(n_unl) % 4}
    if w.module.__name__ == "baselines.feddure" and w.args.variant == "paper":
        more["fine"] = w.module.FineRegulator(4)
        more["fine_optimizer"] = torch.optim.Adam(more["fine"].parameters(), 1e-3)
    return call(w.module.local_loss, w, views=views, label=label, **more), views, label


@pytest.mark.parametrize("name, variant", STEPS)
def test_labelled_and_used_strong_views_alone_are_learnt_from(name, variant):
    """In evaluation mode rows do not mix: a view's gradient tells whether its loss counts."""
    flags = variant.split() + (["--no-icpl"] if name == "proxyfl.py" else [])
    w = world(name, flags=[flag for flag in flags if flag not in ("--icpl", "--gpt")])   # ICPL: see test_proxyfl_maths
    for net in (w.net, w.teacher):
        net.eval()
        net.classifier.weight.data *= 20                                   # some confident, some not
    set_threshold = "entropy_threshold" if name == "baselines/fedloke.py" else "conf_threshold"
    if getattr(w.args, set_threshold, None) is not None:
        setattr(w.args, set_threshold, 0.6)
    (loss, *_, values), views, label = step_of(w)
    views.grad = None                                                      # FedDure's regulators took their own steps
    marks = [None if value.grad is None else value.grad.clone() for value in w.teacher.parameters()]
    loss.backward()
    used = values["used"].tolist() if isinstance(values, dict) else [True] * 12          # FedDB has used images alone
    moved = (views.grad.flatten(1).abs().sum(1) > 0).tolist()
    if name == "baselines/fedloke.py":
        assert moved[:12] == [True] * 12 and moved[12:24] == [False] * 12 and 0 < sum(used) < 12
        return
    assert moved == [True] * 6 + [False] * 12 + used
    assert 0 < sum(used) < 12 or name in ("baselines/feddb.py", "baselines/feddure.py") and sum(used)
    assert all(value.grad is mark is None or torch.equal(value.grad, mark)
               for value, mark in zip(w.teacher.parameters(), marks))
    if isinstance(values, dict):
        torch.testing.assert_close(values["loss_sup"], F.cross_entropy(w.net(views[:6])[1], label))


@pytest.mark.parametrize("name, variant", STEPS + [("proxyfl.py", "--candidate-set top5 --labelled-set truth")])
def test_a_local_step_reads_nothing_back_to_the_host(name, variant, monkeypatch):
    """On the meta device there are no values: a step that asks for one, or whose shapes depend on one, fails."""
    w = world(name, flags=variant.split())
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())    # it knows no meta device
    w.net, w.teacher = w.net.to("meta"), w.teacher.to("meta")
    images = torch.empty(22, 3, 8, 8, dtype=torch.uint8, device="meta")
    with torch.device("meta"):
        weak = common.weak_view(images[:14], torch.empty(14, common.WEAK_DRAWS))
        strong = common.strong_view(images[14:], torch.empty(8, common.STRONG_DRAWS))
        common.normalise(torch.cat([weak, strong]), *w.data.stats)
        (loss, *_, values), *_ = step_of(w)
        loss.backward()
        if isinstance(values, dict):
            place, hidden = torch.empty(12).long(), torch.empty(12).bool()
            batch = w.module.Batch(None, torch.empty(6), place, place, hidden) if hasattr(w.module, "Batch") else None
            given = (place, hidden, True) if name == "proxyfl.py" else (batch,)
            assert w.module.step_metrics(values, *given).shape == (len(w.module.METRICS),)
