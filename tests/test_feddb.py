"""FedDB's formulas against slow loops and its limits; clients of every size; what its run folder holds."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scripts import equal, n_bytes, rows, state
from scripts import method as find_method
from worlds import metrics, same_parameters, sgd, tiny_args, tiny_data, tiny_nets, tiny_state

import common
from baselines import fedavg, feddb, fixmatch

METHOD = find_method("baselines/feddb.py")
F64 = torch.float64
SMALL = ["--train-subset", 60, "--clients", 3, "--rounds", 1]


def dirichlet(rows_, classes, seed=0, concentration=0.5):
    draws = np.random.default_rng(seed).dirichlet(np.full(classes, concentration), rows_)
    return torch.from_numpy(draws)


def one_against_seven(classes):
    """Seven clients that predict class 0 and one that predicts all others evenly."""
    priors = torch.zeros(8, classes, dtype=F64)
    priors[:7, 0], priors[7, 1:] = 1, 1 / (classes - 1)
    return priors


# ---- debiased labels ----------------------------------------------------------------------------------------------


def test_debias_against_a_slow_loop():
    prob, prior = dirichlet(6, 5), dirichlet(1, 5, seed=1)[0]
    got = feddb.debias(prob, prior)
    for j in range(6):
        ratio = [prob[j, c].item() / prior[c].item() for c in range(5)]
        assert got[j].tolist() == pytest.approx([r / sum(ratio) for r in ratio], rel=1e-12)


def test_a_uniform_prior_keeps_what_fixmatch_keeps():
    prob, uniform = dirichlet(500, 10, concentration=0.05), torch.full((10,), 0.1, dtype=F64)
    debiased = feddb.debias(prob, uniform)
    torch.testing.assert_close(debiased, prob, rtol=1e-12, atol=1e-15)
    label, kept = fixmatch.pseudo_labels(prob, prob, "global", 0.95)
    confidence, ours = debiased.max(1)
    assert torch.equal(ours, label) and torch.equal(confidence >= 0.95, kept) and 50 < kept.sum() < 450


def test_a_prediction_that_equals_the_prior_is_not_kept():
    prior = torch.tensor([0.97, 0.01, 0.01, 0.01], dtype=F64)
    torch.testing.assert_close(feddb.debias(prior[None], prior), torch.full((1, 4), 0.25, dtype=F64))


def test_prior_floor():
    prob, prior = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([1.0, 0.0, 0.0])
    assert feddb.debias(prob, prior, 1e-6).isfinite().all()
    expected = torch.tensor([[0.5, 5.0, 0.0]]) / 5.5
    torch.testing.assert_close(feddb.debias(prob, prior, 0.1), expected)
    torch.testing.assert_close(feddb.debias(prob, prior, 1.0), prob)  # everything at the floor: nothing divided out


@pytest.mark.parametrize("momentum", [0, 0.3, 0.5, 1])
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
    expected, = torch.autograd.grad(imbalance(weights, priors), weights)  # fmt: skip
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


def test_first_step_of_the_contraction():
    priors, even = dirichlet(8, 10), torch.full((8,), 1 / 8, dtype=F64)
    expected = (-0.71 / 8 - 1.9 * feddb.imbalance_gradient(even, priors)).softmax(0)
    torch.testing.assert_close(feddb.contracted_weights(priors, 1), expected)


@pytest.mark.parametrize("classes, code, optimum", [(10, (0.120, 0.160), (1 / 70, 0.9)), (100, (0.1245, 0.1284), None)])
def test_one_client_against_seven(classes, code, optimum):
    priors = one_against_seven(classes)
    assert feddb.contracted_weights(priors)[[0, 7]].tolist() == pytest.approx(code, abs=1e-3 if classes == 10 else 5e-5)
    if optimum:
        assert feddb.simplex_weights(priors)[[0, 7]].tolist() == pytest.approx(optimum, abs=1e-8)


@pytest.mark.parametrize("solve", [feddb.contracted_weights, feddb.simplex_weights])
def test_equal_priors_give_equal_weights(solve):
    for row in (dirichlet(1, 10)[0], torch.full((10,), 0.1, dtype=F64)):
        torch.testing.assert_close(solve(row.repeat(7, 1)), torch.full((7,), 1 / 7, dtype=F64), rtol=0, atol=1e-15)
    assert solve(dirichlet(7, 10)).sum().item() == pytest.approx(1, abs=1e-12)


def test_simplex_weights_are_optimal():
    priors = dirichlet(8, 10)
    weights = feddb.simplex_weights(priors)
    slope = feddb.imbalance_gradient(weights, priors)
    used = weights > 0
    assert (weights >= 0).all() and 0 < used.sum() < 8  # some clients at 0: the bound matters here
    least = slope[used].mean()
    assert (slope[used] - least).abs().max() < 1e-7 and (
        slope[~used] > least + 1e-5
    ).all()  # no feasible direction descends
    assert imbalance(weights, priors) < 0.9 * imbalance(feddb.contracted_weights(priors), priors)


def test_projection_to_the_simplex():
    for seed in range(20):
        point = torch.from_numpy(np.random.default_rng(seed).normal(size=6))
        low, high = point.min() - 1, point.max()
        for _ in range(100):  # bisection for the amount that all are lowered by
            middle = (low + high) / 2
            low, high = (middle, high) if (point - middle).clamp(min=0).sum() > 1 else (low, middle)
        torch.testing.assert_close(feddb.project_to_simplex(point), (point - low).clamp(min=0))


# ---- a client -----------------------------------------------------------------------------------------------------


def world(n_labelled, n_unlabelled, **settings):
    """Two clients: one of the given size, one of 40 images. Returns client_update's arguments but the client."""
    args = tiny_args(METHOD, **settings)
    (net,) = tiny_nets(feddb, args, 1)
    data = tiny_data(feddb, (n_labelled, n_unlabelled), (10, 30))
    return args, data, feddb.Broadcast(tiny_state(net)), net, sgd(args, net)


def update(client, args, data, received, net, optimizer):
    return feddb.client_update(args, 1, client, data, received, net, optimizer)


@pytest.mark.parametrize("tau", [0, 2])
@pytest.mark.parametrize("n_labelled, n_unlabelled", [(0, 0), (0, 1), (1, 0), (2, 1), (0, 9), (9, 0), (3, 17)])
def test_client_of_any_size(n_labelled, n_unlabelled, tau):
    setting = world(n_labelled, n_unlabelled, tau=tau)
    upload = update(0, *setting)
    pool = n_labelled + n_unlabelled
    trains = n_labelled > 0 or pool > 0 and tau == 0
    found = metrics(feddb, upload)
    assert found["steps"] == (max(1, pool // 8) if trains else 0) and upload.weight.item() == (pool if trains else 0)
    assert found["sup_steps"] == (found["steps"] if n_labelled else 0)
    assert found["images"] == n_unlabelled and found["used"] == (n_unlabelled if tau == 0 else 0)
    assert (found["loss_unsup"] > 0) == (pool > 0 and tau == 0) and (found["loss_sup"] > 0) == (n_labelled > 0)
    assert same_parameters(upload, setting[2]) == (not trains)
    assert all(value.isfinite().all() for value in upload.state.values())
    assert upload.prior.shape == (4,) and upload.prior.sum().item() == pytest.approx(1, abs=1e-5)


def test_nothing_kept_is_fedavg_bit_by_bit():
    args, data, received, net, optimizer = world(6, 30, tau=2, local_epochs=2)
    ours = feddb.client_update(args, 1, 0, data, received, net, optimizer)
    args.prox_mu = 0
    theirs = fedavg.client_update(args, 1, 0, data, received, net, optimizer)
    assert equal(ours.state, theirs.state)
    assert not same_parameters(ours, received)


def test_rate_0_returns_the_broadcast_parameters():
    setting = world(6, 30, tau=0, lr=0)
    assert same_parameters(update(0, *setting), setting[2])


def weak_predictions(args, data, net):
    """What the frozen model says of the weak view of each image of client 0's pool, one after the other."""
    pool, prob = data.pool(0), []
    draws = common.stream(args.seed, "pool", 1, 0).random((len(pool), common.WEAK_DRAWS), dtype=np.float32)
    for index, draw in zip(pool, draws):
        view = common.weak_view(data.images[[index]], torch.from_numpy(draw[None]), args.flip)
        prob.append(net.eval()(common.normalise(view, *data.stats))[1].softmax(1)[0].detach())
    return prob


def test_with_an_even_prior_the_pool_is_labelled_as_by_gpl():
    args, data, _, net, _ = world(10, 60, prior_floor=1, tau=0.6)
    net.classifier.weight.data *= 30
    prior, kept, pseudo_label, _ = feddb.label_pool(args, 1, 0, data, net)
    prob = torch.stack(weak_predictions(args, data, net))
    label, used = fixmatch.pseudo_labels(prob, prob, "global", 0.6)
    assert torch.equal(kept, torch.from_numpy(data.pool(0))[used]) and torch.equal(pseudo_label, label[used])
    assert 0 < used.sum() < 70 and prior.max() > 0.3  # debiasing would have done something
    args.prior_floor = 1e-6
    assert not torch.equal(feddb.label_pool(args, 1, 0, data, net)[1], kept)


def test_label_pool_against_a_slow_loop():
    args, data, _, net, _ = world(3, 20, conf_threshold=0.5)
    net.classifier.weight.data *= 30  # predictions that differ
    before = tiny_state(net)
    prior, kept, pseudo_label, found = feddb.label_pool(args, 1, 0, data, net, batch_size=7)
    assert equal(tiny_state(net), before)  # no statistics move
    pool, prob = data.pool(0), weak_predictions(args, data, net)
    mean = sum(prob) / 23
    torch.testing.assert_close(prior, mean, rtol=1e-4, atol=1e-6)
    expected, counts = [], [20, 0, 0, 0]
    for place, (index, row) in enumerate(zip(pool, prob)):
        ratio = row / mean
        confidence, label = (ratio / ratio.sum()).max(0)
        if confidence >= 0.5:
            expected.append((index, label.item()))
        if place < 20:
            right = label.item() == data.labels[index].item()
            counts = [
                counts[0],
                *(n + k for n, k in zip(counts[1:], (confidence >= 0.5, right, right and confidence >= 0.5))),
            ]
    assert list(zip(kept.tolist(), pseudo_label.tolist())) == expected and 0 < len(expected) < 23
    assert found.tolist() == [float(n) for n in counts]


def test_batches_hold_kept_images_with_their_labels():
    args, data, *_ = world(3, 30, mu=2, local_epochs=3)
    kept, pseudo_label = torch.from_numpy(data.pool(0)[[4, 9, 31]]), torch.tensor([2, 0, 3])
    plain = torch.arange(len(data.images)).reshape(-1, 1, 1, 1).expand(-1, 3, 8, 8).to(torch.uint8)
    data = data._replace(images=plain.contiguous(), stats=((0.0,) * 3, (1 / 255,) * 3))  # each image shows its index
    seen, batches = set(), list(feddb.local_batches(args, data, 0, kept, pseudo_label, np.random.default_rng(0)))
    assert len(batches) == 3 * (33 // 8)
    for views, label, pseudo in batches:
        assert views.shape == (8 + 2 * 16, 3, 8, 8) and label.shape == (8,) and pseudo.shape == (16,)
        index = views[:24, 0, 0, 0].round().long()
        assert set(index[:8].tolist()) <= set(data.labelled[0]) and torch.equal(label, data.labels[index[:8]])
        pairs = set(zip(index[8:].tolist(), pseudo.tolist()))
        assert pairs <= set(zip(kept.tolist(), pseudo_label.tolist()))
        seen |= pairs
    assert len(seen) == 3
    again = feddb.local_batches(args, data, 0, kept[:0], pseudo_label[:0], np.random.default_rng(0))
    assert all(views.shape == (8, 3, 8, 8) and not len(pseudo) for views, _, pseudo in again)


def test_losses_and_their_gradients():
    args, _, _, net, _ = world(3, 20, lambda_u=0.5)
    net.eval()  # rows do not mix: a row's gradient tells whether its loss counts
    torch.manual_seed(1)
    views, label, pseudo = torch.randn(4 + 2 * 5, 3, 8, 8, requires_grad=True), torch.tensor([0, 1, 2, 0]), None
    pseudo = torch.tensor([3, 1, 0, 0, 2])
    loss, (loss_sup, loss_unsup), weak_prob = feddb.local_loss(args, net, views, label, pseudo)
    log_prob = net(views)[1].log_softmax(1)
    sup = -sum(log_prob[i, label[i]] for i in range(4)) / 4
    unsup = -sum(log_prob[9 + i, pseudo[i]] for i in range(5)) / 5
    for got, expected in ((loss_sup, sup), (loss_unsup, unsup), (loss, sup + 0.5 * unsup)):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(weak_prob, log_prob[4:9].exp().detach())
    assert not weak_prob.requires_grad
    loss.backward()
    assert (views.grad.flatten(1).abs().sum(1) > 0).tolist() == [True] * 4 + [False] * 5 + [True] * 5
    ones = torch.ones(5, dtype=torch.bool)
    torch.testing.assert_close(loss_unsup, fixmatch.unlabelled_loss(net(views)[1][9:], pseudo, ones))


def test_uploaded_prior_follows_the_weak_views_or_is_the_mean_prediction():
    args, data, received, net, optimizer = world(4, 30, tau=0.3, lr=0, prior_momentum=0.7)
    upload = update(0, args, data, received, net, optimizer)
    net.load_state_dict(received.state)
    prior, kept, pseudo_label, _ = feddb.label_pool(args, 1, 0, data, net)
    mean = prior.clone()
    net.train()
    for views, label, pseudo in feddb.local_batches(
        args, data, 0, kept, pseudo_label, common.stream(args.seed, "client", 1, 0)
    ):
        prob = F.softmax(net(views)[1][len(label) : len(label) + len(pseudo)], 1).detach()
        prior = 0.7 * prior + 0.3 * prob.sum(0) / len(pseudo)
    torch.testing.assert_close(upload.prior, prior)
    assert not torch.allclose(prior, mean, atol=1e-3)
    args.prior_momentum = 1.0
    torch.testing.assert_close(update(0, args, data, received, net, optimizer).prior, mean)


# ---- the server ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
def test_server_averages_by_the_priors_and_not_by_size(exact):
    args = feddb.parse_args([*METHOD.short, *["--exact-simplex"][: int(exact)]])
    priors = one_against_seven(10).float()
    uploads = [
        feddb.Upload(
            {"bn.running_mean": torch.tensor([float(m)]), "bn.num_batches_tracked": torch.tensor(3 + m)},
            priors[m],
            torch.tensor(100.0 + m, dtype=F64),
            torch.zeros(8),
        )
        for m in range(8)
    ]
    idle = feddb.Upload({**uploads[0].state}, torch.full((10,), math.nan), torch.tensor(0.0, dtype=F64), torch.zeros(8))
    received, weights = feddb.server_update(args, None, [idle, *uploads])
    assert weights[7].item() == pytest.approx(0.9 if exact else 0.1596, abs=1e-3)
    assert received.state["bn.running_mean"].item() == pytest.approx(sum(m * weights[m].item() for m in range(8)))
    assert received.state["bn.num_batches_tracked"].item() == 3
    old = feddb.Broadcast({"w": torch.ones(2)})
    assert feddb.server_update(args, old, [idle]) == (old, None)


# ---- runs ---------------------------------------------------------------------------------------------------------


def test_run_columns_bytes_and_thresholds(tmp_path):
    every = METHOD.train(tmp_path, "--tau", 0, *SMALL, name="every")
    size = n_bytes(state(every))
    for row in rows(every):
        assert int(row["bytes_down"]) == 3 * size and int(row["bytes_up"]) == 3 * (size + 4 * 10)
        assert row["pl_used_pct"] == "100" and row["pl_used_acc_pct"] == row["pl_acc_pct"] != ""
        assert float(row["weight_min"]) <= 1 / 3 <= float(row["weight_max"]) and float(row["loss_unsup"]) > 0
    none = METHOD.train(tmp_path, "--tau", 1.5, *SMALL, name="none")
    for row in rows(none):
        assert row["pl_used_pct"] == "0" and row["loss_unsup"] == "0" and row["pl_used_acc_pct"] == ""
        assert row["pl_acc_pct"] != ""


def test_exact_simplex_moves_the_weights(tmp_path):
    code, exact = (
        rows(METHOD.train(tmp_path, "--tau", 0, *SMALL, *flags, name=f"run{len(flags)}"))
        for flags in ([], ["--exact-simplex"])
    )
    spread = [float(row["weight_max"]) - float(row["weight_min"]) for row in (code[0], exact[0])]
    assert 0 < 2 * spread[0] < spread[1]


def test_rounds_in_which_nobody_can_train(tmp_path):
    scarce = ["--partition", "dirichlet", "--alpha", 0.001, "--clients", 200, "--clients-per-round", 2, "--tau", 2]
    table = rows(METHOD.train(tmp_path, *scarce, "--rounds", 4))
    idle = [row for row in table if row["clients_trained"] == "0"]
    assert idle and all(row["bytes_up"] == "0" and row["weight_max"] == row["loss_sup"] == "" for row in idle)
