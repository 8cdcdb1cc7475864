"""FixMatch in FedAvg: pseudo-labels and masks, gradients, limits, and ProxyFL's modules as plug-ins."""

import contextlib
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scripts import checkpoint, equal, n_bytes, rows, state
from scripts import method as find_method
from worlds import numbered_data

import common
import proxyfl
from baselines import fedlabel, fixmatch, sage

METHOD, PROXYFL = find_method("baselines/fixmatch.py"), find_method("proxyfl.py")
FEW = "--train-subset 60 --batch-size 4 --clients-per-round 2".split()  # three steps a client


# ---- pseudo-labels ------------------------------------------------------------------------------------------------

LOCAL = torch.tensor([[0.96, 0.04, 0.0], [0.5, 0.3, 0.2], [0.02, 0.03, 0.95], [0.1, 0.8, 0.1]])
GLOBAL = torch.tensor([[0.1, 0.2, 0.7], [0.0, 0.97, 0.03], [0.0, 0.05, 0.95], [0.4, 0.35, 0.25]])


@pytest.mark.parametrize(
    "teacher, threshold, union, labels, used",
    [
        ("local", 0.95, False, [0, 0, 2, 1], [1, 0, 1, 0]),  # at the threshold: used
        ("global", 0.95, False, [2, 1, 2, 0], [0, 1, 1, 0]),
        ("global", 0.95, True, [2, 1, 2, 0], [1, 1, 1, 0]),
        ("local", 0, False, [0, 0, 2, 1], [1, 1, 1, 1]),
        ("global", 0, False, [2, 1, 2, 0], [1, 1, 1, 1]),
        ("global", 1.5, True, [2, 1, 2, 0], [0, 0, 0, 0]),
    ],
)
def test_labels_and_masks(teacher, threshold, union, labels, used):
    label, mask = fixmatch.pseudo_labels(LOCAL, GLOBAL, teacher, threshold, union)
    assert label.tolist() == labels and mask.tolist() == [bool(value) for value in used]


def test_kept_sets_shrink_as_the_threshold_rises():
    prob = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)).mul(3).softmax(1)
    before = torch.ones(200, dtype=torch.bool)
    for threshold in (0, 0.5, 0.7, 0.95, 1):
        mask = fixmatch.pseudo_labels(prob, prob, "local", threshold)[1]
        assert not (mask & ~before).any()
        before = mask
    assert 0 < fixmatch.pseudo_labels(prob, prob, "local", 0.7)[1].sum() < 200


def test_unlabelled_loss_against_a_slow_loop():
    logits = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    label, mask = torch.arange(9) % 4, torch.arange(9) % 3 == 0
    loss = fixmatch.unlabelled_loss(logits, label, mask)
    prob = logits.detach().softmax(1)
    slow = -sum(math.log(prob[i, label[i]]) for i in range(9) if mask[i]) / 9  # of all nine images
    assert loss.item() == pytest.approx(slow, rel=1e-12)
    smoothed = sum(  # the official form: KL to a one-hot target, 1e-10 added to both
        ((F.one_hot(label[i], 4) + 1e-10) * ((F.one_hot(label[i], 4) + 1e-10) / (prob[i] + 1e-10)).log()).sum()
        for i in range(9)
        if mask[i]
    )
    assert loss.item() == pytest.approx(smoothed.item() / 9, abs=1e-3)
    loss.backward()
    assert (logits.grad[~mask] == 0).all() and (logits.grad[mask] != 0).any(1).all()
    nothing = fixmatch.unlabelled_loss(logits, label, torch.zeros(9, dtype=torch.bool))
    assert nothing == 0 and (torch.autograd.grad(nothing, logits)[0] == 0).all()


class Given(torch.nn.Module):
    """A network that answers with given logits, one row an image; its features are their first columns."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, views):
        return self.logits[: len(views), :3], self.logits[: len(views)]


def given_loss(flags, n_lab=4, n_unl=6):
    args = fixmatch.parse_args(flags.split())
    args.amp = False
    rng = torch.Generator().manual_seed(0)
    net = Given(3 * torch.randn(n_lab + 2 * n_unl, 5, generator=rng))
    teacher = Given(3 * torch.randn(n_unl, 5, generator=rng))
    label = torch.arange(n_lab) % 5
    loss, _, values = fixmatch.local_loss(args, net, teacher, torch.zeros(n_lab + 2 * n_unl, 1), label, torch.zeros(5))
    loss.backward()
    return net, teacher, label, loss, values


@pytest.mark.parametrize("teacher", ["local", "global"])
def test_gradients_reach_labelled_and_used_strong_views_alone(teacher):
    net, other, label, loss, values = given_loss(f"--teacher {teacher} --tau 0.8")
    lab, weak, strong = net.logits.grad.split([4, 6, 6])
    torch.testing.assert_close(lab, (net.logits[:4].softmax(1) - F.one_hot(label, 5)) / 4)
    assert (weak == 0).all() and other.logits.grad is None  # no gradient through a teacher
    used = values["used"]
    assert 0 < used.sum() < 6 and (strong[~used] == 0).all() and (strong[used] != 0).any(1).all()
    taught = (net.logits[4:10] if teacher == "local" else other.logits).softmax(1)
    assert torch.equal(values["pseudo_label"], taught.argmax(1)) and torch.equal(used, taught.amax(1) >= 0.8)
    assert loss.item() == pytest.approx((values["loss_sup"] + values["loss_unsup"]).item())


def test_without_labelled_images_the_supervised_loss_is_0():
    net, _, _, loss, values = given_loss("--tau 0", n_lab=0)
    assert values["loss_sup"] == 0 and loss == values["loss_unsup"] > 0 and net.logits.grad.isfinite().all()


def test_without_its_weight_no_method_of_the_family_differs(tmp_path):
    """Nothing but the labelled images is left, though batch norm still sees the others."""
    settings = {
        "fixmatch": [],
        "flexmatch": [],
        "sage": [],
        "fedlabel": [],
        "fedproto": ["--lambda-proto", 0],
        "feddure": ["--variant", "paper"],
    }
    few = [*FEW, "--rounds", 1, "--lambda-u", 0]
    states = {
        name: state(find_method(f"baselines/{name}.py").train(tmp_path, *few, *flags, name=name))
        for name, flags in settings.items()
    }
    assert all(equal(states["fixmatch"], other) for other in states.values())


# ---- limits -------------------------------------------------------------------------------------------------------


def test_without_its_weight_the_teacher_does_not_matter(tmp_path):
    few = [*FEW, "--rounds", 1]
    local, wide = (METHOD.train(tmp_path, *few, "--lambda-u", 0, "--teacher", t, name=t) for t in ("local", "global"))
    none = METHOD.train(tmp_path, *few, "--tau", 1.5, name="none")
    assert equal(state(local), state(wide)) and equal(state(local), state(none))
    assert rows(none)[0]["loss_unsup"] == "0" and rows(none)[0]["pl_used_pct"] == "0"
    everything = METHOD.train(tmp_path, *few, "--tau", 0, "--teacher", "local", name="all")
    assert rows(everything)[0]["pl_used_pct"] == "100" and not equal(state(everything), state(local))


def test_fedprox_without_weight_is_lpl(tmp_path):
    local = [*FEW, "--rounds", 1, "--teacher", "local", "--tau", 0.3]
    plain = METHOD.train(tmp_path, *local, name="plain")
    tiny = METHOD.train(tmp_path, *local, "--prox-mu", 1e-42, name="tiny")
    pulled = METHOD.train(tmp_path, *local, "--prox-mu", 1, name="pulled")
    assert all(float(row["pl_used_pct"]) > 0 for row in rows(plain))
    assert equal(state(plain), state(tiny)) and not equal(state(plain), state(pulled))
    assert rows(plain)[0]["loss_prox"] == "" and float(rows(pulled)[0]["loss_prox"]) > 0


def test_teachers_agree_where_the_models_do():
    """At the first step of a round the weights are equal; what differs is batch norm, by the batch or running."""
    args = fixmatch.parse_args(["--tau", "0"])
    args.amp = False
    torch.manual_seed(0)
    net, teacher = fixmatch.ResNet8(10, 8), fixmatch.ResNet8(10, 8).eval()
    teacher.load_state_dict(net.state_dict())
    views, label = torch.randn(20, 3, 8, 8), torch.arange(4)
    labels = {}
    for mode in (True, False):
        net.train(mode)
        for who in ("local", "global"):
            args.teacher = who
            labels[mode, who] = fixmatch.local_loss(args, net, teacher, views, label, torch.zeros(10))[2][
                "pseudo_label"
            ]
    assert torch.equal(labels[False, "local"], labels[False, "global"])
    assert not torch.equal(labels[True, "local"], labels[True, "global"])


# ---- ProxyFL's modules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, same_in_proxyfl",
    [
        ("--union-mask --gpt --icpl", ""),
        ("--union-mask --icpl --lambda-icpl 0.5", "--no-gpt --lambda-icpl 0.5"),
        ("--union-mask --gpt", "--no-icpl"),
        ("--union-mask", "--no-icpl --no-gpt"),
        ("--conf-threshold 0.15", "--no-icpl --no-gpt --confident global --conf-threshold 0.15"),
    ],
)
def test_with_its_modules_this_is_proxyfl_bit_for_bit(tmp_path, flags, same_in_proxyfl):
    shared = [*FEW, "--rounds", 2, "--gpt-epochs", 2, "--conf-threshold", 0.6]
    here = METHOD.train(tmp_path, *shared, *flags.split(), name="here")
    there = PROXYFL.train(tmp_path, *shared, *same_in_proxyfl.split(), name="there")
    assert equal(state(here), state(there))
    if "--icpl" in flags:
        assert torch.equal(checkpoint(here)["class_prior"], checkpoint(there)["class_prior"])
    for mine, its in zip(rows(here), rows(there)):
        for column in ("test_acc_pct", "loss_sup", "loss_unsup", "loss_icpl", "pl_used_pct", "pl_acc_pct", "bytes_up"):
            assert mine[column] == its[column], column


@pytest.mark.parametrize("seed", range(4))
def test_icpl_of_one_function_is_that_of_proxyfl_in_double(seed):
    torch.manual_seed(seed)
    net = fixmatch.ResNet8(6, 8, heads=True).double()
    n_lab, n_unl, tau = (0, 3, 8, 5)[seed], 12, 0.6
    features = torch.randn(n_lab + 2 * n_unl, 32, dtype=torch.float64)
    global_prob = torch.randn(n_lab + n_unl, 6, dtype=torch.float64).mul(2).softmax(1)
    local_prob = torch.randn(n_unl, 6, dtype=torch.float64).mul(2).softmax(1)
    prior = torch.rand(6, dtype=torch.float64).mul(3).softmax(0)
    global_prob[-1] = prior  # exceeds the prior nowhere
    loss, confident = fixmatch.icpl_loss(net, features, global_prob, local_prob, prior, tau)
    wanted = proxyfl.confident_mask(global_prob[n_lab:], local_prob, tau, "union")
    rule = prior, "prior", "top1"
    sets = torch.cat(
        [
            proxyfl.class_sets(global_prob[:n_lab], global_prob[:n_lab].amax(1) >= tau, *rule),
            proxyfl.class_sets(global_prob[n_lab:], wanted, *rule),
        ]
    )
    proxy = F.normalize(net.proxy_proj(net.classifier.weight))
    positive = proxyfl.positive_proxy(global_prob[n_lab:], wanted, sets[n_lab:], proxy)
    slow = proxyfl.icpl_loss(
        F.normalize(net.feat_proj(features)),
        torch.cat([sets, sets[n_lab:]]),
        positive.repeat(2, 1),
        wanted.repeat(2),
        1e-6,
        "joint",
    )
    assert torch.equal(confident, wanted) and loss.item() == pytest.approx(slow.item(), rel=1e-12)
    assert 0 < confident.sum() < n_unl and loss > 0


def test_prior_and_proxies_of_the_server_are_those_of_proxyfl():
    torch.manual_seed(0)
    prior, counts = torch.full((4,), 0.25, dtype=torch.float64), torch.randint(0, 9, (3, 4)).float()
    assert torch.equal(fixmatch.update_prior(prior, counts), proxyfl.update_prior(prior, counts, "pooled", 0.99))
    assert torch.equal(fixmatch.update_prior(prior, 0 * counts), prior)
    mean, proxy = torch.randn(4, 6), torch.randn(3, 4, 6)
    tuned = fixmatch.tune_global_proxy(mean, proxy, 5, 0.05, np.random.default_rng(0))
    other = proxyfl.tune_global_proxy(mean, proxy, 5, 0.05, 4, 100.0, "globals", np.random.default_rng(0))[0]
    assert torch.equal(tuned, other) and not torch.equal(tuned, mean)
    assert torch.equal(fixmatch.tune_global_proxy(mean, proxy, 0, 0.05, np.random.default_rng(0)), mean)
    one_class = fixmatch.tune_global_proxy(mean[:1], proxy[:, :1], 2, 0.05, np.random.default_rng(0))
    assert one_class.isfinite().all()


def test_tuning_leaves_the_bias_and_bytes_count_the_extras(tmp_path):
    few = [*FEW, "--rounds", 1]
    plain = METHOD.train(tmp_path, *few, name="plain")
    tuned = METHOD.train(tmp_path, *few, "--gpt", "--gpt-epochs", 2, name="tuned")
    a, b = state(plain), state(tuned)
    assert {name for name in a if not torch.equal(a[name], b[name])} == {"classifier.weight"}
    size = {heads: n_bytes(fixmatch.ResNet8(10, 8, heads).state_dict()) for heads in (False, True)}
    assert rows(plain)[0]["bytes_up"] == rows(tuned)[0]["bytes_down"] == str(2 * size[False])
    with_icpl = METHOD.train(tmp_path, *few, "--icpl", name="icpl")
    assert rows(with_icpl)[0]["bytes_up"] == rows(with_icpl)[0]["bytes_down"] == str(2 * (size[True] + 4 * 10))


@pytest.mark.parametrize("name", ["fedlabel", "sage"])
def test_other_methods_have_the_same_modules(tmp_path, name):
    flags = [*FEW] + "--lambda-u 0 --tau 0.3 --rounds 1 --gpt --icpl --gpt-epochs 2".split()
    mine = find_method(f"baselines/{name}.py").train(tmp_path, *flags, name="mine")
    a, b = checkpoint(mine), checkpoint(METHOD.train(tmp_path, *flags, name="other"))
    assert equal(a["state"], b["state"]) and equal(a["class_prior"], b["class_prior"])


# ---- batches ------------------------------------------------------------------------------------------------------


def test_batches_show_the_images_they_name():
    args = fixmatch.parse_args(["--batch-size", "4", "--local-epochs", "2"])
    data = numbered_data(fixmatch, (5, 9), (3, 12))
    pool, passes = data.pool(1), []
    for _, batch in fixmatch.local_batches(args, data, 1, np.random.default_rng(0)):
        weak = (batch.views[4:12, 0, 4, 4] * 255).round().long()
        assert torch.equal(batch.truth, torch.from_numpy(pool)[batch.place]) and torch.equal(weak, batch.truth)
        assert torch.equal((batch.views[:4, 0, 4, 4] * 255).round().long(), batch.label)
        assert set(batch.label.tolist()) <= set(data.labelled[1])
        assert torch.equal(batch.hidden, torch.isin(batch.truth, torch.from_numpy(data.unlabelled[1])))
        assert len(set(batch.place.tolist())) == 8
        passes.append(batch.hidden.sum())
    assert len(passes) == 2 * 3


@pytest.mark.parametrize("size, batch, steps", [(10, 3, 7), (4, 4, 3), (256, 128, 5), (9, 1, 4)])
def test_passes_shuffle_without_repeats(size, batch, steps):
    places = fixmatch.passes(size, batch, steps, np.random.default_rng(0))
    assert places.shape == (steps, batch)
    per_pass = size // batch
    for first in range(0, steps, per_pass):
        part = places[first : first + per_pass].ravel()
        assert len(set(part)) == len(part) and 0 <= part.min() and part.max() < size


@pytest.mark.parametrize(
    "module, flags",
    [
        (fixmatch, "--teacher local"),
        (fixmatch, "--teacher global --union-mask"),
        (fixmatch, "--icpl"),
        (fixmatch, "--prox-mu 0.1"),
        (sage, ""),
        (sage, "--icpl"),
        (fedlabel, ""),
        (fedlabel, "--icpl"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_local_step_reads_nothing_back_to_the_host(module, flags, monkeypatch):
    """On the meta device there are no values: a step that asks for one, or whose shapes depend on one, fails."""
    args = module.parse_args(flags.split())
    args.amp = False
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # it knows no meta device
    with torch.device("meta"):
        net, teacher = (module.ResNet8(10, 8, args.icpl) for _ in range(2))
        images = torch.empty(22, 3, 32, 32, dtype=torch.uint8)
        weak = common.weak_view(images[:14], torch.empty(14, common.WEAK_DRAWS))
        strong = common.strong_view(images[14:], torch.empty(8, common.STRONG_DRAWS))
        views = common.normalise(torch.cat([weak, strong]), (0.5,) * 3, (0.2,) * 3)
        label, truth, hidden = torch.empty(6).long(), torch.empty(8).long(), torch.empty(8).bool()
        batch = module.Batch(views, label, truth, truth, hidden)
        loss, counts, values = module.local_loss(args, net, teacher, views, label, torch.empty(10))
    loss.backward()
    assert counts.shape == (10,) and module.step_metrics(values, batch).shape == (len(module.METRICS),)
