"""Every semi-supervised script: label secrecy, odd clients, isolation, limits that are other methods, flags, bytes."""

import contextlib
from collections import Counter

import numpy as np
import pytest
import torch
from scripts import HEADLINES, PLUG_IN, SEMI_SUPERVISED, checkpoint, equal, load_images, n_bytes, rows, state
from scripts import method as find_method
from worlds import cut, step_of, update, world

import common

SIZES = [(0, 0), (0, 1), (1, 0), (0, 2), (2, 1), (0, 7), (7, 0), (8, 0), (9, 0), (0, 8), (0, 9), (3, 17)]


@pytest.fixture(params=SEMI_SUPERVISED)
def method(request):
    return find_method(request.param)


VARIANTS = [(name, variant) for name in SEMI_SUPERVISED for variant in find_method(name).table.variants]


def variants(keep=lambda name, variant: True, slow=True):
    """Parametrise over the settings that the scripts are resumed with; slow: all but the first in the slow suite."""
    marks = [[], [pytest.mark.slow]]
    return pytest.mark.parametrize("name, variant", [
        pytest.param(*pair, marks=marks[slow and pair[1] not in ("", "--variant official")])
        for pair in VARIANTS if keep(*pair)])


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

@variants(lambda name, variant: "--labels" not in variant, slow=False)
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
        pool, n_lab, epochs = sum(SIZES[client]), SIZES[client][0], 2 if "--two-phase" in variant else 1
        steps, n_lab = max(1, pool // batch_size), pool if "--labels all" in variant else n_lab
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
    assert "clients own no labelled image" in said and f"clients_empty {row['clients_empty']}" in said
    assert int(row["clients_empty"]) > 0 and int(row["clients_trained"]) + int(row["clients_empty"]) == 20
    assert int(row["bytes_up"]) % int(row["clients_trained"]) == 0
    for kept in ("personal", "copies"):                                    # of the clients that trained
        assert len(checkpoint(folder).get(kept, {})) in (0, int(row["clients_trained"]))
    check(folder)


@variants()
def test_every_client_of_the_round_empty_keeps_everything(name, variant, tmp_path, monkeypatch):
    nothing = [np.zeros(0, np.int64)] * 4
    change_data(monkeypatch, lambda data: data._replace(labelled=nothing, unlabelled=nothing))
    once, twice = (find_method(name).train(tmp_path, *variant.split(), "--rounds", n, name=f"{n}") for n in (1, 2))
    assert weights(checkpoint(once)) and equal(checkpoint(once), checkpoint(twice))
    for row in rows(twice):
        assert row["clients_trained"] == row["bytes_up"] == "0" and row["loss_sup"] == ""
    check(twice)


@variants(lambda name, variant: name != "baselines/fedavg.py" and (name, variant) != ("baselines/feddure.py", ""))
@pytest.mark.parametrize("used", [0, 100])
def test_no_image_or_every_image_above_the_threshold(name, variant, used, tmp_path):
    """FlexMatch remembers nothing above 1, so all of its class thresholds stay 0."""
    flag, none, every = {"baselines/fedloke.py": ("--entropy-threshold", 0, 9)}.get(name, ("--conf-threshold", 1.5, 0))
    folder = find_method(name).train(tmp_path, *variant.split(), flag, every if used else none)
    for row in rows(folder):
        if name == "baselines/flexmatch.py" or used:
            assert row["pl_used_pct"] == "100" and row["pl_used_acc_pct"] == row["pl_acc_pct"] != ""
            assert float(row["loss_unsup"]) > 0 and row.get("low_pct", "0") == "0" and not row.get("set_recall_pct")
        else:
            assert row["pl_used_pct"] == row["loss_unsup"] == "0" and row["pl_used_acc_pct"] == ""
            assert row["pl_acc_pct"] != "" and row.get("low_pct", "100") == "100"
    check(folder)


@variants(lambda name, variant: "--shared-momentum" not in variant)
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

    plain = find_method(name).train(tmp_path, *variant.split(), "--rounds", 1, name="plain")
    spy(monkeypatch, find_method(name).module, twice)
    spied = find_method(name).train(tmp_path, *variant.split(), "--rounds", 1, name="spied")
    assert len(kept) == 3 and equal(checkpoint(spied), checkpoint(plain))
    first, other = (weights(upload) for upload in kept[:2])
    assert any(not torch.equal(first[key], other[key]) for key in first)   # clients differ


@variants(slow=False)
def test_without_a_step_size_only_batch_norm_statistics_move(name, variant):
    w = world(name, (5, 20), flags=[*variant.split(), "--lr", 0])
    sent, came = weights(update(w)), weights(w.received)
    for key, value in came.items():
        torch.testing.assert_close(sent[key], value, rtol=1e-6, atol=1e-7)


# ---- one local step -----------------------------------------------------------------------------------------------

def has_local_loss(name, variant):
    return name not in ("baselines/fedavg.py", "baselines/fedmatch.py") and "--two-phase" not in variant


@variants(lambda name, variant: has_local_loss(name, variant) and name != "baselines/fedloke.py", slow=False)
def test_labelled_and_used_strong_views_alone_are_learnt_from(name, variant):
    """In evaluation mode rows do not mix: a view's gradient tells whether its loss counts. ICPL: test_proxyfl_maths."""
    flags = [flag for flag in variant.split() if flag not in ("--icpl", "--gpt")]
    w = world(name, flags=flags + ["--no-icpl"] * (name == "proxyfl.py"))
    w.net.eval(), w.teacher.eval()
    w.args.conf_threshold = 0.7
    (loss, *_, values), views, label = step_of(w)
    views.grad = None                                                      # FedDure's regulators took their own steps
    marks = [None if value.grad is None else value.grad.clone() for value in w.teacher.parameters()]
    loss.backward()
    used = [True] * 12                                                     # FedDB: of used ones; FedDure: own, or gain
    if name not in ("baselines/feddb.py", "baselines/feddure.py"):
        used = values["confident" if name == "proxyfl.py" else "used"].tolist()
        assert 0 < sum(used) < 12
    assert (views.grad.flatten(1).abs().sum(1) > 0).tolist() == [True] * 6 + [False] * 12 + used
    assert all(value.grad is mark is None or torch.equal(value.grad, mark)
               for value, mark in zip(w.teacher.parameters(), marks))


@variants(has_local_loss, slow=False)
def test_a_local_step_reads_nothing_back_to_the_host(name, variant, monkeypatch):
    """On the meta device there are no values: a step that asks for one, or whose shapes depend on one, fails."""
    w = world(name, flags=variant.split())
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())    # it knows no meta device
    w.net, w.teacher = w.net.to("meta"), w.teacher.to("meta")
    with torch.device("meta"):
        (loss, *_, values), *_ = step_of(w)
        loss.backward()
        if isinstance(values, dict):
            place, hidden = torch.empty(12).long(), torch.empty(12).bool()
            batch = w.module.Batch(None, torch.empty(6), place, place, hidden) if hasattr(w.module, "Batch") else None
            given = (place, hidden, True) if name == "proxyfl.py" else (batch,)
            assert w.module.step_metrics(values, *given).shape == (len(w.module.METRICS),)
            if name == "baselines/flexmatch.py":
                w.module.update_memory(place, place, values["local_prob"], 0.95)
                w.module.class_thresholds(w.module.learning_status(place, torch.empty(4), True), 0.95)


# ---- what is the same training ------------------------------------------------------------------------------------

FEW = "--train-subset 60 --batch-size 4 --clients-per-round 2 --rounds 1 --gpt-epochs 2 "   # three steps a client
ICPL = "--train-subset 200 --batch-size 8 --clients-per-round 3 --rounds 2"                 # fewer find no negatives
SAME = [  # settings of two scripts that end in the same weights, bit by bit
    ("fedavg --prox-mu 1e-42", "fedavg"),                                  # its gradient rounds to nothing
    ("fedavg --label-ratio 1 --labels all", "fedavg --label-ratio 1"),
    ("fixmatch --teacher local --tau 0.3 --prox-mu 1e-42", "fixmatch --teacher local --tau 0.3"),
    ("fixmatch --lambda-u 0", "fixmatch --tau 1.5"),                       # batch norm still sees unlabelled images
    ("fixmatch --lambda-u 0 --teacher local", "fixmatch --tau 1.5"),
    ("flexmatch --lambda-u 0", "fixmatch --tau 1.5"), ("sage --lambda-u 0", "fixmatch --tau 1.5"),
    ("sage --tau 1.5", "fixmatch --tau 1.5"), ("fedlabel --lambda-u 0", "fixmatch --tau 1.5"),
    ("fedproto --lambda-u 0 --lambda-proto 0", "fixmatch --tau 1.5"), ("feddure --lambda-u 0", "fixmatch --tau 1.5"),
    ("proxyfl --lambda-icpl 0", "proxyfl --no-icpl"),
    (f"sage --lambda-u 0 --tau 0.6 --gpt --icpl {ICPL}", f"fixmatch --lambda-u 0 --tau 0.6 --gpt --icpl {ICPL}"),
    (f"fedlabel --lambda-u 0 --tau 0.6 --gpt --icpl {ICPL}", f"fixmatch --lambda-u 0 --tau 0.6 --gpt --icpl {ICPL}"),
    ("feddb --tau 2 --clients-per-round 1", "fedavg --clients-per-round 1"),
    ("fedlabel --two-phase --unlabelled-epochs 0 --clients-per-round 1", "fedavg --clients-per-round 1"),
]
SAME_LOG = [  # also in the same pseudo-labels and losses
    (f"fixmatch --union-mask --gpt --icpl --tau 0.9 {ICPL}", f"proxyfl --conf-threshold 0.9 {ICPL}"),
    (f"fixmatch --union-mask --icpl --lambda-icpl 0.5 --tau 0.9 {ICPL}",
     f"proxyfl --no-gpt --lambda-icpl 0.5 --conf-threshold 0.9 {ICPL}"),
    ("fixmatch --union-mask --gpt --tau 0.15", "proxyfl --no-icpl --conf-threshold 0.15"),
    ("fixmatch --tau 0.15", "proxyfl --no-icpl --no-gpt --confident global --conf-threshold 0.15"),
    ("flexmatch --tau 0", "fixmatch --teacher local --tau 0"),
    ("flexmatch --tau 1.5", "fixmatch --teacher local --tau 0"),           # nothing is remembered: thresholds of 0
    ("fedproto --lambda-proto 0 --tau 0.15 --rounds 2", "fixmatch --tau 0.15 --rounds 2"),
    ("fedproto --tau 0.15", "fixmatch --tau 0.15"),                        # no pull in round 1
    ("fedproto --tau 0 --prototypes all --rounds 2", "fedproto --tau 0 --rounds 2"),
    ("fedproto --tau 1.5 --prototypes labelled --rounds 2", "fedproto --tau 1.5 --rounds 2"),
]
OTHER = [("fedavg --prox-mu 1", "fedavg"), ("fedavg --labels all", "fedavg"), ("fixmatch", "fixmatch --tau 1.5"),
         ("fixmatch --teacher local", "fixmatch"), ("fixmatch --prox-mu 1", "fixmatch"),
         ("fixmatch --gpt", "fixmatch"), ("fixmatch", "fixmatch --tau 0"), ("flexmatch", "fixmatch --teacher local"),
         ("sage", "fixmatch"), ("fedlabel", "fixmatch"),
         (f"fixmatch --tau 0.9 --icpl {ICPL}", f"fixmatch --tau 0.9 {ICPL}"),
         ("fedproto --tau 0 --prototypes labelled --rounds 2", "fedproto --tau 0 --rounds 2")]


def pair_of_runs(run_once, *settings):
    for each in settings:
        name, _, flags = each.partition(" ")
        few = FEW if name in ("proxyfl", "fixmatch", "sage", "fedlabel") else FEW.partition("--gpt")[0]
        yield run_once("proxyfl.py" if name == "proxyfl" else f"baselines/{name}.py", few + flags)


@pytest.mark.parametrize("one, other", SAME + SAME_LOG, ids=lambda text: text.replace(ICPL, "..."))
def test_settings_that_are_another_method_train_bit_by_bit_as_it_does(one, other, run_once):
    first, second = pair_of_runs(run_once, one, other)
    shared = state(first).keys() & state(second).keys()
    assert len(shared) > 40 and all(torch.equal(state(first)[key], state(second)[key]) for key in shared)
    if (one, other) in SAME_LOG:
        columns = (rows(first)[0].keys() & rows(second)[0].keys()) - {"loss_prox", "bytes_up", "bytes_down"}
        columns |= {"bytes_up", "bytes_down"} if "proxyfl" in other else set()
        assert "loss_unsup" in columns
        for mine, its in zip(rows(first), rows(second)):
            assert {key: mine[key] for key in columns} == {key: its[key] for key in columns}
    if "--icpl" in one:
        assert float(rows(first)[1]["loss_icpl"]) > 0
        assert torch.equal(*(checkpoint(folder)["class_prior"] for folder in (first, second)))


@pytest.mark.parametrize("one, other", OTHER, ids=lambda text: text.replace(ICPL, "..."))
def test_settings_that_are_no_other_method_train_differently(one, other, run_once):
    first, second = map(state, pair_of_runs(run_once, one, other))
    assert not all(torch.equal(second[key], value) for key, value in first.items() if key in second)


# ---- what a run says ----------------------------------------------------------------------------------------------

FEDPROTO = 4 * 10 * 32 + 10                                                # prototypes, and which classes have one
COSTS = [  # settings; bytes up and down of a client beside its model; columns without any value
    ("proxyfl.py", "", 40, 40, ""), ("proxyfl.py", "--candidate-set top1", 0, 0, ""),
    ("proxyfl.py", "--no-icpl --no-gpt", 0, 0, "loss_icpl set_recall_pct set_size loss_gpt_start loss_gpt_end"),
    ("baselines/fedavg.py", "", 0, 0, "loss_prox"), ("baselines/fedavg.py", "--prox-mu 0.1", 0, 0, ""),
    ("baselines/fixmatch.py", "", 0, 0, "loss_prox loss_icpl"), ("baselines/fixmatch.py", PLUG_IN, 40, 40, "loss_prox"),
    ("baselines/fixmatch.py", "--gpt --gpt-epochs 1 --prox-mu 1", 0, 0, "loss_icpl"),
    ("baselines/flexmatch.py", "", 0, 0, ""),
    ("baselines/fedlabel.py", "", 0, 0, "loss_icpl"), ("baselines/fedlabel.py", PLUG_IN, 40, 40, ""),
    ("baselines/fedlabel.py", "--two-phase --unlabelled-epochs 2", 4, 0, "loss_icpl"),
    ("baselines/fedlabel.py", "--two-phase --unlabelled-epochs 0", 4, 0,
     "loss_icpl loss_unsup loss_agree pl_used_pct pl_acc_pct pl_used_acc_pct"),
    ("baselines/fedloke.py", "", 0, 0, ""),
    ("baselines/feddure.py", "", 0, 0, ""),
    ("baselines/feddure.py", "--variant official", 0, 0, "loss_fine fine_weight"),
    ("baselines/feddb.py", "", 40, 0, ""),
    ("baselines/sage.py", "", 0, 0, "loss_icpl"), ("baselines/sage.py", PLUG_IN, 40, 40, ""),
    ("baselines/fedproto.py", "", FEDPROTO, FEDPROTO, ""),
    ("baselines/fedproto.py", "--lambda-proto 0", FEDPROTO, FEDPROTO, "loss_proto"),
]


@pytest.mark.parametrize("name, flags, up, down, empty", COSTS)
def test_bytes_and_empty_columns(name, flags, up, down, empty, run_once):
    """FedMatch's bytes: see its own tests."""
    folder = run_once(name, flags)
    size, table = n_bytes(state(folder)), rows(folder)
    for row in table:
        trained = int(row["clients_trained"])
        assert trained == 3 and row["bytes_up"] == str(3 * (size + up)) and row["bytes_down"] == str(3 * (size + down))
        assert all(0 <= float(row[key]) <= 100 for key in row if key.endswith("_pct") and row[key])
    without = {key for key in table[0] if all(row[key] == "" for row in table)}
    assert without - {"pl_used_acc_pct"} == set(empty.split()) - {"pl_used_acc_pct"}


def test_accuracy_after_loading_equals_the_one_logged(method, run_once):
    folder = run_once(method.name)
    saved, model = checkpoint(folder), state(folder)
    if "psi" in saved:                                                     # FedMatch's model is a sum
        model = method.module.joint(model, method.module.without_small(saved["psi"], 5e-6))
    data = load_images("digits", "data", 8, 200)
    heads = {"heads": True} if "feat_proj.weight" in model else {}
    net = method.module.ResNet8(10, 8, **heads).to(memory_format=torch.channels_last)
    stats = common.channel_stats(data.train_images)
    accuracy = method.module.evaluate(net, model, data.test_images, data.test_labels, stats)
    assert rows(folder)[-1]["test_acc_pct"] == f"{accuracy:.6g}"


@pytest.mark.parametrize("flags", [
    "--clients 1 --clients-per-round 1 --label-ratio 1 --alpha inf", pytest.param(
        "--clients-per-round 4 --partition dirichlet --flip --width 9 --amp --local-epochs 2", marks=pytest.mark.slow)])
def test_settings_of_the_protocol_run_and_stay_finite(method, tmp_path, flags):
    check(method.train(tmp_path, "--rounds", 1, *flags.split()))


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
    assert equal(checkpoint(compiled), checkpoint(plain))


# ---- presets and flags --------------------------------------------------------------------------------------------

def test_presets_follow_the_flags_that_are_given(method):
    parse = method.module.parse_args
    assert parse(["--clients", "4"]).clients_per_round == 4
    assert parse(["--dataset", "CIFAR-100", "--rounds", "7"]).rounds == 7
    for name, rounds in (("cifar10", 300), ("cifar100", 500), ("svhn", 150), ("cinic10", 400)):
        paper = parse(["--dataset", name])
        assert (paper.clients, paper.clients_per_round, paper.rounds, paper.local_epochs) == (20, 8, rounds, 5)
        assert (paper.batch_size, paper.width, paper.image_size, paper.flip) == (128, 64, 32, name != "svhn")
        assert paper.momentum == 0.9 and paper.weight_decay == 1e-4 and getattr(paper, "mu", 2) == 2
        assert paper.lr == (0.01 if method.name == "baselines/fedmatch.py" else 0.1)
        assert getattr(paper, "gpt_epochs", None) in (None, 10 if name == "cifar100" else 100)
        assert getattr(paper, "warm_up_rounds", None) in (None, min(200, rounds // 2))


@pytest.mark.parametrize("flags, each", [("--dataset svhn", [460] * 3), ("--dataset svhn --label-ratio 0.2", [920] * 3),
                                         ("--dataset cifar10", [466, 500, 600])])
def test_labelled_share_of_svhn(flags, each, monkeypatch):
    """As published: a tenth of 4,600 images of each class; elsewhere of the class itself."""
    labels = torch.arange(3).repeat_interleave(torch.tensor([4659, 5000, 6000]))
    images = torch.zeros(len(labels), 3, 8, 8, dtype=torch.uint8)
    svhn = common.Dataset(images, labels, images[:3], labels[:3], list("012"), "made up")
    monkeypatch.setattr(common, "load_dataset", lambda *_: svhn)
    args = find_method("baselines/fedavg.py").module.parse_args(flags.split())
    data = common.semi_supervised_data(args, torch.device("cpu"))
    assert np.bincount(data.labels[np.concatenate(data.labelled)]).tolist() == each


PLUG_INS = ["--icpl --lambda-icpl 0.5 | --icpl", "--gpt --gpt-epochs 1 | --gpt --gpt-epochs 2",
            "--gpt --gpt-epochs 1 | --gpt --gpt-epochs 1 --gpt-lr 0.1"]
FLAGS = {  # two settings of a flag, or one against the default, that must give different runs: the flag is read
    "proxyfl.py": [
        "--variant paper", "--mu 1", "--conf-threshold 0.3", "--lambda-u 0.5 --conf-threshold 0 | --conf-threshold 0",
        "--no-gpt", "--gpt-epochs 1", "--gpt-lr 0.1", "--no-icpl", "--lambda-icpl 0.5", "--candidate-set top1",
        "--candidate-set top5", "--gpt-contrast locals", "--gpt-margin 0", "--gpt-batch-size 0",
        "--confident global --conf-threshold 0.3 | --conf-threshold 0.3", "--labelled-set truth",
        "--similarity dot", "--similarity cosine", "--negative-floor 0.9", "--prior-counts clients",
        "--prior-momentum 0.5", "--shared-momentum", "--stats official",
        "--lu-mean confident --conf-threshold 0.3 | --conf-threshold 0.3",
        "--labelled-set truth --positive-weights local | --labelled-set truth",
        "--similarity cosine --conf-threshold 0.6 --icpl-mean separate | --similarity cosine --conf-threshold 0.6",
        "--partition dirichlet --client-weight official | --partition dirichlet"],
    "baselines/fedavg.py": ["--prox-mu 1", "--labels all"],
    "baselines/fixmatch.py": [
        "--teacher local", "--mu 1", "--tau 0.9", "--lambda-u 0.5", "--prox-mu 1",
        "--tau 0.3 | --tau 0.3 --union-mask", *PLUG_INS],
    "baselines/flexmatch.py": ["--no-warm-up", "--mu 1", "--tau 0.2", "--lambda-u 0.5"],
    "baselines/fedmatch.py": [
        "--mu 1", "--tau 0.9", "--lambda-s 2", "--lambda-i 1", "--lambda-a 1", "--lambda-1 0.1", "--lambda-2 1",
        "--psi-factor 0.5", "--helpers 1", "--helper-interval 3", "--zero-threshold 1", "--send-threshold 0.1"],
    "baselines/fedlabel.py": [
        "--mu 1", "--tau 0.9", "--lambda-u 0.5", "--lambda-agree 0", "--expertise logit-variance", "--two-phase",
        "--two-phase | --two-phase --unlabelled-epochs 2", *PLUG_INS],
    "baselines/fedloke.py": [
        "--mu 1", "--loke-mu 0.1", "--entropy-threshold 1", "--warm-up-rounds 9", "--clip 0",
        "--rounds 4 | --rounds 4 --first-visit download"],
    "baselines/feddure.py": [
        "--mu 1", "--variant official", "--lambda-u 0.5", "--warm-up 1", "--coarse-lr 0.01", "--gain new-old",
        "--gain-bound 0.001", "--virtual-lr 1", "--fine-lr 0.1", "--fine-hidden 64",
        "--variant official --tau 0.1 | --variant official",
        "--variant official --fine-tune-epochs 0 | --variant official"],
    "baselines/feddb.py": [
        "--mu 1", "--tau 0.3", "--lambda-u 0.5", "--prior-momentum 0.9", "--prior-floor 0.3", "--exact-simplex"],
    "baselines/sage.py": ["--mu 1", "--tau 0.9", "--lambda-u 0.5", "--kappa 0", "--temperature 3", *PLUG_INS],
    "baselines/fedproto.py": [
        "--mu 1", "--tau 0.9", "--lambda-u 0.5", "--lambda-proto 5", "--prototypes all --tau 0.3 | --tau 0.3",
        "--prototypes labelled"],
}
SHARED = set(vars(find_method("baselines/fedavg.py").module.parse_args([]))) - {"prox_mu", "labels"}
UNTRIED = {"empty_set"}                    # a run in which a prediction equals the prior does not happen


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in HEADLINES else pytest.mark.slow)
                                  for name in FLAGS])
def test_every_flag_of_a_method_is_read_and_keeps_the_run_finite(name, run_once):
    def run(flags):
        check(folder := run_once(name, flags.strip()))
        return rows(folder), checkpoint(folder)

    same = [flags for flags in FLAGS[name] if equal(*map(run, ([*flags.split("|"), ""])[:2]))]
    words = " ".join(FLAGS[name]).replace("--tau", "--conf-threshold").replace("--no-", "--").split()
    tried = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    assert same == [] and set(vars(find_method(name).module.parse_args([]))) - SHARED - UNTRIED <= tried
