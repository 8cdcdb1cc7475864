"""FixMatch in FedAvg: pseudo-labels and masks, the loss, batches, and ProxyFL's modules as plug-ins."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scripts import state
from worlds import numbered_data, step_of, world

import proxyfl
from baselines import fixmatch

LOCAL = torch.tensor([[0.96, 0.04, 0.0], [0.5, 0.3, 0.2], [0.02, 0.03, 0.95], [0.1, 0.8, 0.1]])
GLOBAL = torch.tensor([[0.1, 0.2, 0.7], [0.0, 0.97, 0.03], [0.0, 0.05, 0.95], [0.4, 0.35, 0.25]])


# ---- pseudo-labels ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("teacher, threshold, union, labels, used", [
    ("local", 0.95, False, [0, 0, 2, 1], [1, 0, 1, 0]),                    # at the threshold: used
    ("global", 0.95, False, [2, 1, 2, 0], [0, 1, 1, 0]), ("global", 0.95, True, [2, 1, 2, 0], [1, 1, 1, 0]),
    ("local", 0, False, [0, 0, 2, 1], [1] * 4), ("global", 0, False, [2, 1, 2, 0], [1] * 4),
    ("global", 1.5, True, [2, 1, 2, 0], [0] * 4)])
def test_labels_and_masks(teacher, threshold, union, labels, used):
    label, mask = fixmatch.pseudo_labels(LOCAL, GLOBAL, teacher, threshold, union)
    assert label.tolist() == labels and mask.tolist() == [bool(value) for value in used]


def test_unlabelled_loss_against_a_slow_loop():
    logits = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    label, mask = torch.arange(9) % 4, torch.arange(9) % 3 == 0
    loss, prob = fixmatch.unlabelled_loss(logits, label, mask), logits.detach().softmax(1)
    slow = -sum(math.log(prob[i, label[i]]) for i in range(9) if mask[i]) / 9              # of all nine images
    assert loss.item() == pytest.approx(slow, rel=1e-12)
    one_hot = F.one_hot(label, 4) + 1e-10                  # the official form: KL to it, 1e-10 added to both
    smoothed = (one_hot * (one_hot / (prob + 1e-10)).log()).sum(1)[mask].sum() / 9
    assert loss.item() == pytest.approx(smoothed.item(), abs=1e-3)
    loss.backward()
    torch.testing.assert_close(logits.grad, (prob - F.one_hot(label, 4)) * mask[:, None] / 9)
    nothing = fixmatch.unlabelled_loss(logits, label, torch.zeros(9, dtype=torch.bool))
    assert nothing == 0 and (torch.autograd.grad(nothing, logits)[0] == 0).all()


@pytest.mark.parametrize("teacher", ["local", "global"])
def test_a_step_is_taught_by_its_teacher(teacher):
    """Whose weak view counts; that gradients stop there, test_semi_supervised has for all scripts."""
    w = world("baselines/fixmatch.py", teacher=teacher, tau=0.7, lambda_u=0.5)
    w.net.eval(), w.teacher.eval()
    (loss, counts, values), views, label = step_of(w)
    prob = (w.net if teacher == "local" else w.teacher)(views[6:18])[1].softmax(1)
    other = (w.teacher if teacher == "local" else w.net)(views[6:18])[1]
    label_u, used = fixmatch.pseudo_labels(prob, prob, "local", 0.7)
    assert torch.equal(values["pseudo_label"], label_u) and torch.equal(values["used"], used) and 0 < used.sum() < 12
    assert not torch.equal(other.argmax(1), label_u)
    unsup = fixmatch.unlabelled_loss(w.net(views[18:])[1], label_u, used)
    torch.testing.assert_close(loss, F.cross_entropy(w.net(views[:6])[1], label) + 0.5 * unsup)
    assert torch.equal(counts, torch.bincount(label, minlength=4))


# ---- ProxyFL's modules --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(4))
def test_icpl_of_one_function_is_that_of_proxyfl_in_double(seed):
    torch.manual_seed(seed)
    net = fixmatch.ResNet8(6, 8, heads=True).double()
    n_lab, n_unl, tau = (0, 3, 8, 5)[seed], 12, 0.6
    features = torch.randn(n_lab + 2 * n_unl, 32, dtype=torch.float64)
    global_prob, local_prob = ((2 * torch.randn(n, 6, dtype=torch.float64)).softmax(1) for n in (n_lab + n_unl, n_unl))
    global_prob[-1] = prior = torch.rand(6, dtype=torch.float64).mul(3).softmax(0)         # exceeds the prior nowhere
    loss, confident = fixmatch.icpl_loss(net, features, global_prob, local_prob, prior, tau)
    wanted = proxyfl.confident_mask(global_prob[n_lab:], local_prob, tau, "union")
    sure = torch.cat([global_prob[:n_lab].amax(1) >= tau, wanted])
    sets = proxyfl.class_sets(global_prob, sure, prior, "prior", "top1")
    features, proxy = F.normalize(net.feat_proj(features)), F.normalize(net.proxy_proj(net.classifier.weight))
    positive = proxyfl.positive_proxy(global_prob[n_lab:], wanted, sets[n_lab:], proxy).repeat(2, 1)
    slow = proxyfl.icpl_loss(features, torch.cat([sets, sets[n_lab:]]), positive, wanted.repeat(2), 1e-6, "joint")
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
    assert fixmatch.tune_global_proxy(mean[:1], proxy[:, :1], 2, 0.05, np.random.default_rng(0)).isfinite().all()


def test_tuning_changes_the_classifier_weight_alone(run_once):
    flags = "--rounds 1 --gpt-epochs 2"
    a, b = (state(run_once("baselines/fixmatch.py", flags + flag)) for flag in ("", " --gpt"))
    assert {name for name in a if not torch.equal(a[name], b[name])} == {"classifier.weight"}


# ---- batches ------------------------------------------------------------------------------------------------------

def test_batches_show_the_images_they_name():
    args, data = fixmatch.parse_args(["--batch-size", "4", "--local-epochs", "2"]), numbered_data((5, 9), (3, 12))
    batches = list(fixmatch.local_batches(args, data, 1, np.random.default_rng(0)))
    pool = torch.from_numpy(data.pool(1))
    for _, batch in batches:
        shown = batch.views[:, 0, 4, 4].round().long()
        assert torch.equal(shown[:4], batch.label) and set(batch.label.tolist()) <= set(data.labelled[1])
        assert torch.equal(shown[4:12], batch.truth) and torch.equal(batch.truth, pool[batch.place])
        assert torch.equal(batch.hidden, torch.isin(batch.truth, torch.from_numpy(data.unlabelled[1])))
        assert len(set(batch.place.tolist())) == 8
    assert len(batches) == 2 * 3


@pytest.mark.parametrize("size, batch, steps", [(10, 3, 7), (4, 4, 3), (256, 128, 5), (9, 1, 4), (2500, 256, 19)])
def test_passes_shuffle_without_repeats(size, batch, steps):
    places, per_pass = fixmatch.passes(size, batch, steps, np.random.default_rng(0)), size // batch
    assert places.shape == (steps, batch) and not np.array_equal(places[0], np.sort(places[0])) or batch == 1
    for first in range(0, steps, per_pass):
        part = places[first:first + per_pass].ravel()
        assert len(set(part)) == len(part) and 0 <= part.min() and part.max() < size


def test_step_metrics_count_images_whose_label_the_client_does_not_own():
    one, mask = torch.tensor(1.0), torch.tensor([True, True, False, True])
    values = dict(loss_sup=one, loss_unsup=2 * one, loss_prox=3 * one, loss_icpl=4 * one, used=mask,
                  pseudo_label=torch.tensor([0, 1, 2, 3]))
    hidden = torch.tensor([True, True, True, False])
    batch = fixmatch.Batch(None, torch.zeros(0), None, torch.tensor([0, 0, 2, 3]), hidden)
    found = dict(zip(fixmatch.METRICS, fixmatch.step_metrics(values, batch).tolist()))
    assert found == dict(steps=1, sup_steps=0, loss_sup=1, loss_unsup=2, loss_prox=3, loss_icpl=4, images=3, used=2,
                         correct=2, used_correct=1)
