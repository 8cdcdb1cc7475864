"""FedDB's formulas against slow loops and its limits, the labelling of a pool, the weights of the average."""

import csv
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scripts import n_bytes, rows, state
from worlds import metrics, step_of, update, world

import common
from baselines import feddb

NAME, F64 = "baselines/feddb.py", torch.float64


def dirichlet(rows_, classes, seed=0, concentration=0.5):
    return torch.from_numpy(np.random.default_rng(seed).dirichlet(np.full(classes, concentration), rows_))


def one_against_seven(classes):
    """Seven clients that predict class 0 and one that predicts all others evenly."""
    priors = torch.zeros(8, classes, dtype=F64)
    priors[:7, 0], priors[7, 1:] = 1, 1 / (classes - 1)
    return priors


# ---- debiased labels ----------------------------------------------------------------------------------------------

def test_debias_against_a_slow_loop():
    prob, prior = dirichlet(6, 5), dirichlet(1, 5, seed=1)[0]
    for row, got in zip(prob.tolist(), feddb.debias(prob, prior)):
        ratio = [p / q for p, q in zip(row, prior.tolist())]
        assert got.tolist() == pytest.approx([r / sum(ratio) for r in ratio], rel=1e-12)


def test_limits_of_debiasing():
    prob, uniform = dirichlet(500, 10, concentration=0.05), torch.full((10,), 0.1, dtype=F64)
    torch.testing.assert_close(feddb.debias(prob, uniform), prob, rtol=1e-12, atol=1e-15)
    prior = torch.tensor([0.97, 0.01, 0.01, 0.01], dtype=F64)              # a prediction that equals the prior
    torch.testing.assert_close(feddb.debias(prior[None], prior), torch.full((1, 4), 0.25, dtype=F64))


def test_prior_floor():
    prob, prior = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([1.0, 0.0, 0.0])
    assert feddb.debias(prob, prior, 1e-6).isfinite().all()
    torch.testing.assert_close(feddb.debias(prob, prior, 0.1), torch.tensor([[0.5, 5.0, 0.0]]) / 5.5)
    torch.testing.assert_close(feddb.debias(prob, prior, 1.0), prob)       # all at the floor: nothing divided out


@pytest.mark.parametrize("momentum", [0, 0.3, 1])
def test_prior_follows_and_sums_to_1(momentum):
    prior, prob = dirichlet(1, 5)[0], dirichlet(7, 5, seed=1)
    got = feddb.follow_prior(prior, prob, momentum)
    slow = [momentum * prior[c] + (1 - momentum) * sum(prob[j, c] for j in range(7)) / 7 for c in range(5)]
    assert got.tolist() == pytest.approx([value.item() for value in slow]) and got.sum().item() == pytest.approx(1)


# ---- aggregation weights ------------------------------------------------------------------------------------------

def imbalance(weights, priors):
    clients, classes = priors.shape
    mixed = [sum(weights[m] * priors[m, c] for m in range(clients)) for c in range(classes)]
    return sum((value - 1 / classes) ** 2 for value in mixed) / classes


def test_imbalance_gradient_against_autograd():
    priors, weights = dirichlet(4, 5), dirichlet(1, 4, seed=2)[0].requires_grad_()
    expected = torch.autograd.grad(imbalance(weights, priors), weights)[0]
    torch.testing.assert_close(feddb.imbalance_gradient(weights.detach(), priors), expected)


def test_contraction_is_the_official_loop():
    """SGD with rate 1, Nesterov .9 and weight decay .9, made anew in each iteration, then a softmax."""
    priors = dirichlet(5, 10)
    weights = torch.full((5,), 1 / 5, dtype=F64)
    for iteration in range(100):
        leaf = weights.clone().requires_grad_()
        optimizer = torch.optim.SGD([leaf], lr=1, momentum=0.9, weight_decay=0.9, nesterov=True)
        (leaf @ priors - 1 / 10).square().mean().backward()
        optimizer.step()
        weights = leaf.detach().softmax(0)
        if iteration == 0:
            torch.testing.assert_close(feddb.contracted_weights(priors, 1), weights)
    torch.testing.assert_close(feddb.contracted_weights(priors), weights)


@pytest.mark.parametrize("classes, code, optimum", [(10, (0.120, 0.160), (1 / 70, 0.9)), (100, (0.1245, 0.1284), None)])
def test_one_client_against_seven(classes, code, optimum):
    priors = one_against_seven(classes)
    assert feddb.contracted_weights(priors)[[0, 7]].tolist() == pytest.approx(code, abs=1e-3 if classes == 10 else 5e-5)
    assert not optimum or feddb.simplex_weights(priors)[[0, 7]].tolist() == pytest.approx(optimum, abs=1e-8)


@pytest.mark.parametrize("solve", [feddb.contracted_weights, feddb.simplex_weights])
def test_equal_priors_give_equal_weights(solve):
    for row in (dirichlet(1, 10)[0], torch.full((10,), 0.1, dtype=F64)):
        torch.testing.assert_close(solve(row.repeat(7, 1)), torch.full((7,), 1 / 7, dtype=F64), rtol=0, atol=1e-15)
    assert solve(dirichlet(7, 10)).sum().item() == pytest.approx(1, abs=1e-12)


def test_simplex_weights_are_optimal():
    priors = dirichlet(8, 10)
    weights = feddb.simplex_weights(priors)
    slope, used = feddb.imbalance_gradient(weights, priors), weights > 0
    assert (weights >= 0).all() and 0 < used.sum() < 8                     # some clients at 0: the bound matters here
    least = slope[used].mean()                                             # no feasible direction descends
    assert (slope[used] - least).abs().max() < 1e-7 and (slope[~used] > least + 1e-5).all()
    assert imbalance(weights, priors) < 0.9 * imbalance(feddb.contracted_weights(priors), priors)


def test_projection_to_the_simplex():
    for seed in range(20):
        point = torch.from_numpy(np.random.default_rng(seed).normal(size=6))
        low, high = point.min() - 1, point.max()
        for _ in range(100):                               # bisection for the amount that all are lowered by
            middle = (low + high) / 2
            low, high = (middle, high) if (point - middle).clamp(min=0).sum() > 1 else (low, middle)
        torch.testing.assert_close(feddb.project_to_simplex(point), (point - low).clamp(min=0))


@pytest.mark.parametrize("exact", [False, True])
def test_server_averages_by_the_priors_and_not_by_size(exact):
    args, priors = world(NAME, flags=["--exact-simplex"] * exact).args, one_against_seven(10).float()

    def upload(m, prior, weight):
        state = {"running_mean": torch.tensor([float(m)]), "tracked": torch.tensor(3 + m)}
        return feddb.Upload(state, prior, torch.tensor(weight, dtype=F64), torch.zeros(8))

    idle = upload(50, torch.full((10,), math.nan), 0.0)
    received, weights = feddb.server_update(args, None, [idle, *(upload(m, priors[m], 100.0 + m) for m in range(8))])
    assert weights[7].item() == pytest.approx(0.9 if exact else 0.1596, abs=1e-3)
    expected = sum(m * weights[m].item() for m in range(8))
    assert received.state["running_mean"].item() == pytest.approx(expected) and received.state["tracked"].item() == 3
    old = feddb.Broadcast({"w": torch.ones(2)})
    assert feddb.server_update(args, old, [idle]) == (old, None)


# ---- a client -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tau", [0, 2])
@pytest.mark.parametrize("n_lab, n_unl", [(0, 0), (0, 1), (1, 0), (2, 1), (0, 9), (9, 0), (3, 17)])
def test_a_client_trains_where_it_has_labels_or_keeps_images(n_lab, n_unl, tau):
    w = world(NAME, (n_lab, n_unl), tau=tau)
    upload, pool, trains = update(w), n_lab + n_unl, n_lab > 0 or n_unl > 0 and tau == 0
    found = metrics(w, upload)
    assert found["steps"] == (max(1, pool // 8) if trains else 0) and upload.weight.item() == (pool if trains else 0)
    assert found["images"] == n_unl and found["used"] == (n_unl if tau == 0 else 0)
    assert (found["loss_unsup"] > 0) == (pool > 0 and tau == 0)
    assert upload.prior.shape == (4,) and upload.prior.sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("floor, sure", [(1e-6, 0.5), (1, 0.9)])              # 1: FixMatch's global labels
def test_label_pool_against_a_slow_loop(floor, sure):
    w = world(NAME, (3, 20), conf_threshold=sure, prior_floor=floor)
    w.net.load_state_dict(w.received.state)
    w.net.classifier.weight.data *= 15                                     # predictions that differ
    prior, kept, pseudo_label, found = feddb.label_pool(w.args, w.rnd, 0, w.data, w.net, batch_size=7)
    assert torch.equal(w.net.bn1.running_mean, w.received.state["bn1.running_mean"])       # no statistics move
    pool, prob = w.data.pool(0), []
    draws = common.stream(w.args.seed, "pool", w.rnd, 0).random((len(pool), common.WEAK_DRAWS), dtype=np.float32)
    for index, draw in zip(pool, draws):                                   # one image after the other
        view = common.weak_view(w.data.images[[index]], torch.from_numpy(draw[None]), w.args.flip)
        prob.append(w.net.eval()(common.normalise(view, *w.data.stats))[1].softmax(1)[0].detach())
    mean, expected, counts = sum(prob) / 23, [], np.zeros(3, int)
    torch.testing.assert_close(prior, mean, rtol=1e-4, atol=1e-6)
    for place, (index, row) in enumerate(zip(pool, prob)):
        ratio = row / mean if floor < 1 else row
        confidence, label = (ratio / ratio.sum()).max(0)
        expected += [(index, label.item())] * (confidence >= sure)
        right = label.item() == w.data.labels[index].item()
        counts += np.array([confidence >= sure, right, right and confidence >= sure]) * (place < 20)
    assert list(zip(kept.tolist(), pseudo_label.tolist())) == expected and 0 < len(expected) < 23
    assert found.tolist() == [20, *counts]


def test_batches_hold_kept_images_with_their_labels():
    w = world(NAME, (3, 30), mu=2, local_epochs=3)
    kept, pseudo_label = torch.from_numpy(w.data.pool(0)[[4, 9, 31]]), torch.tensor([2, 0, 3])
    number = torch.arange(33).reshape(-1, 1, 1, 1).expand(-1, 3, 8, 8).to(torch.uint8)     # each image shows its index
    data = w.data._replace(images=number.contiguous(), stats=((0.0,) * 3, (1 / 255,) * 3))
    rng = np.random.default_rng(0)
    seen, batches = set(), list(feddb.local_batches(w.args, data, 0, kept, pseudo_label, rng))
    for views, label, pseudo in batches:
        assert views.shape == (8 + 2 * 16, 3, 8, 8) and label.shape == (8,) and pseudo.shape == (16,)
        index = views[:24, 0, 0, 0].round().long()
        assert set(index[:8].tolist()) <= set(data.labelled[0]) and torch.equal(label, data.labels[index[:8]])
        seen |= set(zip(index[8:].tolist(), pseudo.tolist()))
    assert len(batches) == 3 * (33 // 8) and seen == set(zip(kept.tolist(), pseudo_label.tolist()))
    again = feddb.local_batches(w.args, data, 0, kept[:0], pseudo_label[:0], rng)
    assert all(views.shape == (8, 3, 8, 8) and not len(pseudo) for views, _, pseudo in again)


def test_losses_by_hand():
    """Which views are learnt from, test_semi_supervised has for all scripts."""
    w = world(NAME, lambda_u=0.5)
    w.net.eval()
    (loss, (loss_sup, loss_unsup), weak_prob), views, label = step_of(w, 4, 5)
    log_prob = w.net(views)[1].log_softmax(1)
    sup = -sum(log_prob[i, label[i]] for i in range(4)) / 4
    unsup = -sum(log_prob[9 + i, i % 4] for i in range(5)) / 5
    for got, expected in ((loss_sup, sup), (loss_unsup, unsup), (loss, sup + 0.5 * unsup)):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(weak_prob, log_prob[4:9].exp().detach())
    assert not weak_prob.requires_grad


def test_uploaded_prior_follows_the_weak_views_or_is_the_mean_prediction():
    w = world(NAME, (4, 30), tau=0, lr=0, prior_momentum=0.7)
    upload = update(w)
    w.net.load_state_dict(w.received.state)
    prior, kept, pseudo_label, _ = feddb.label_pool(w.args, w.rnd, 0, w.data, w.net)
    mean, rng = prior.clone(), common.stream(w.args.seed, "client", w.rnd, 0)
    w.net.train()
    for views, label, pseudo in feddb.local_batches(w.args, w.data, 0, kept, pseudo_label, rng):
        prob = F.softmax(w.net(views)[1][len(label):len(label) + len(pseudo)], 1).detach()
        prior = 0.7 * prior + 0.3 * prob.sum(0) / len(pseudo)
    torch.testing.assert_close(upload.prior, prior)
    assert not torch.allclose(prior, mean, atol=1e-3)
    w.args.prior_momentum = 1.0
    torch.testing.assert_close(update(w).prior, mean)


# ---- runs ---------------------------------------------------------------------------------------------------------

def test_exact_simplex_spreads_the_weights_that_are_logged(run_once):
    spread = []
    for flags in ("--tau 0", "--tau 0 --exact-simplex"):
        row = rows(run_once(NAME, f"--rounds 1 {flags}"))[0]
        assert float(row["weight_min"]) <= 1 / 3 <= float(row["weight_max"])
        spread.append(float(row["weight_max"]) - float(row["weight_min"]))
    assert 0 < 2 * spread[0] < spread[1]


def test_clients_that_cannot_train_got_the_model_all_the_same(run_once):
    """With the model, a client without labels finds out that it keeps no image."""
    scarce = "--partition dirichlet --alpha 0.001 --tau 2"
    idle = [row for row in rows(run_once(NAME, f"{scarce} --clients 200 --clients-per-round 2 --rounds 4"))
            if row["clients_trained"] == "0"]
    assert idle and all(row["bytes_up"] == "0" and row["weight_max"] == row["loss_sup"] == "" for row in idle)
    folder = run_once(NAME, f"{scarce} --clients 60 --clients-per-round 60 --rounds 1")
    with open(folder / "clients.csv", newline="") as file:
        clients = [(int(row["labelled"]), int(row["unlabelled"])) for row in csv.DictReader(file)]
    (row,), size = rows(folder), n_bytes(state(folder))
    assert int(row["bytes_up"]) == (size + 40) * sum(n > 0 for n, _ in clients)
    assert int(row["bytes_down"]) == size * sum(n + u > 0 for n, u in clients) > size * int(row["clients_trained"])
