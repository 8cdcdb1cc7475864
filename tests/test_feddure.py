"""FedDure's formulas against finite differences and slow steps, its limits, clients of every size, its run folder."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scripts import equal, n_bytes, rows, state
from scripts import method as find_method
from worlds import metrics, same_parameters, sgd, tiny_args, tiny_data, tiny_nets, tiny_state

from baselines import feddure, fixmatch

METHOD = find_method("baselines/feddure.py")
F64 = torch.float64
VARIANTS = ["paper", "official"]
SMALL = ["--train-subset", 60, "--clients", 3, "--rounds", 1]


# ---- formulas -----------------------------------------------------------------------------------------------------


def toy():
    """A linear model of 3 parameters, 6 unlabelled and 4 labelled points, and a fine regulator, in float64."""
    torch.manual_seed(0)
    unl, target, lab, answer = torch.randn(6, 3), torch.randn(6), torch.randn(4, 3), torch.randn(4)
    unl, target, lab, answer = (part.to(F64) for part in (unl, target, lab, answer))
    model, fine = {"a": torch.randn(3, dtype=F64, requires_grad=True)}, feddure.FineRegulator(5, 7).double()
    prob = torch.randn(6, 5, dtype=F64).softmax(1)

    def labelled_loss(rate):
        losses = (unl @ model["a"] - target).square()
        moved = feddure.virtual_step(model, losses, fine(prob), rate)
        return (lab @ moved["a"] - answer).square().mean()

    return labelled_loss, fine, model, (unl, target, lab, answer, prob)


def test_meta_gradient_against_finite_differences():
    labelled_loss, fine, *_ = toy()
    gradients = torch.autograd.grad(labelled_loss(0.1), list(fine.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(fine.parameters(), gradients):
            for i in range(parameter.numel()):
                flat, values = parameter.view(-1), []
                for shift in (1e-5, -2e-5):
                    flat[i] += shift
                    with torch.enable_grad():
                        values.append(labelled_loss(0.1).item())
                flat[i] += 1e-5
                slope = (values[0] - values[1]) / 2e-5
                assert gradient.view(-1)[i].item() == pytest.approx(slope, rel=1e-5, abs=1e-9)
    assert max(gradient.abs().max().item() for gradient in gradients) > 1e-3


def test_virtual_step_against_a_slow_loop_and_at_rate_0():
    labelled_loss, fine, model, (unl, target, _, _, prob) = toy()
    losses, weight = (unl @ model["a"] - target).square(), fine(prob)
    moved = feddure.virtual_step(model, losses, weight, 0.1)["a"]
    error = (unl @ model["a"] - target).detach()
    slow = model["a"].detach() - 0.1 * sum(weight[i].detach() * 2 * error[i] * unl[i] for i in range(6)) / 6
    torch.testing.assert_close(moved.detach(), slow)
    gradients = torch.autograd.grad(labelled_loss(0.0), list(fine.parameters()))
    assert all(not gradient.any() for gradient in gradients)


def test_fine_regulator_gives_a_weight_in_0_1_for_each_image():
    weight = feddure.FineRegulator(10)(torch.randn(50, 10).softmax(1))
    assert weight.shape == (50,) and (weight > 0).all() and (weight < 1).all() and weight.std() > 0
    assert [tuple(p.shape) for p in feddure.FineRegulator(10).parameters()] == [(128, 10), (128,), (1, 128), (1,)]


def test_learning_gain():
    before, after = torch.tensor(1.5), torch.tensor(1.1)
    assert feddure.learning_gain(before, after).item() == pytest.approx(0.4)
    assert feddure.learning_gain(before, after, "new-old").item() == pytest.approx(-0.4)
    assert feddure.learning_gain(before, after, "old-new", 0.25).item() == 0.25
    assert feddure.learning_gain(before, after, "new-old", 0.25).item() == -0.25


def test_soft_loss():
    torch.manual_seed(0)
    logits, prob = torch.randn(5, 4, dtype=F64), torch.randn(5, 4, dtype=F64).softmax(1)
    mask = torch.tensor([True, False, True, True, False])
    log_prob = logits.log_softmax(1)
    slow = -sum(mask[i] * prob[i, c] * log_prob[i, c] for i in range(5) for c in range(4)) / 5
    torch.testing.assert_close(feddure.soft_loss(logits, prob, mask), slow)
    label = prob.argmax(1)
    hard = feddure.soft_loss(logits, F.one_hot(label, 4).to(F64), mask)
    torch.testing.assert_close(hard, fixmatch.unlabelled_loss(logits, label, mask))
    assert feddure.soft_loss(logits, prob, mask & False).item() == 0


# ---- one step -----------------------------------------------------------------------------------------------------


def world(n_labelled, n_unlabelled, **settings):
    """Two clients: one of the given size, one of 40 images. Returns client_update's arguments but the client."""
    args = tiny_args(METHOD, **settings)
    nets = tiny_nets(feddure, args, 2)
    optimizers = [sgd(args, net, lr=lr) for net, lr in zip(nets, (args.lr, args.coarse_lr))]
    received = feddure.Broadcast(tiny_state(nets[0]))
    return args, tiny_data(feddure, (n_labelled, n_unlabelled), (10, 30)), received, *nets, *optimizers


def update(client, args, data, received, *rest):
    return feddure.client_update(args, 1, client, data, received, *rest)


def step_setting(**settings):
    """args, net, coarse, fine, their optimisers, and the images of a step: labelled, label, weak, strong."""
    args, _, _, net, coarse, _, coarse_optimizer = world(3, 20, **settings)
    torch.manual_seed(1)
    fine = feddure.FineRegulator(4)
    views = [torch.randn(n, 3, 8, 8) for n in (6, 10, 10)]
    label = torch.randint(4, (6,))
    return (
        args,
        net.train(),
        coarse.train(),
        fine,
        coarse_optimizer,
        torch.optim.Adam(fine.parameters(), 1e-3),
        views,
        label,
    )


def by_batch(net, views):
    return net.train()(views)[1]


def test_regulate_against_a_slow_step():
    """The meta gradient by its definition: -rate / U * (gradient of image i's loss) . (labelled gradient then)."""
    args, _, coarse, fine, coarse_optimizer, fine_optimizer, (lab, _, strong), label = step_setting(gain_bound=9)
    pseudo_label = torch.randint(4, (10,))
    slow, slow_fine = copy.deepcopy(coarse), copy.deepcopy(fine)
    gain, loss_fine = feddure.regulate(
        args, coarse, fine, coarse_optimizer, fine_optimizer, lab, label, strong, pseudo_label
    )

    parameters = list(slow.parameters())
    logits = by_batch(slow, strong)
    losses = [F.cross_entropy(logits[[i]], pseudo_label[[i]]) for i in range(10)]
    gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    prob = logits.softmax(1).detach()
    weight = slow_fine(prob)
    moved = copy.deepcopy(slow)
    with torch.no_grad():
        for p, new in enumerate(moved.parameters()):
            new -= 0.1 * sum(weight[i] * gradients[i][p] for i in range(10)) / 10
    expected = F.cross_entropy(by_batch(moved, lab), label)
    torch.testing.assert_close(loss_fine, expected)
    after = torch.autograd.grad(expected, list(moved.parameters()))
    slopes = torch.tensor([-0.1 / 10 * sum((g * a).sum() for g, a in zip(gradients[i], after)) for i in range(10)])
    assert slopes.abs().max() > 1e-4
    optimizer = torch.optim.Adam(slow_fine.parameters(), 1e-3)
    weight.backward(slopes)
    for ours, theirs in zip(fine.parameters(), slow_fine.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-7)
        theirs.grad = ours.grad  # Adam's first step is the sign: equal gradients for an equal step
    optimizer.step()
    weight = slow_fine(prob).detach()
    before = F.cross_entropy(by_batch(slow, lab), label)
    optimizer = sgd(args, slow)
    optimizer.zero_grad()
    (sum(w * F.cross_entropy(logits[[i]], pseudo_label[[i]]) for i, w in enumerate(weight)) / 10).backward()
    optimizer.step()
    for ours, theirs in zip(coarse.parameters(), parameters):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        gain, (before - F.cross_entropy(by_batch(slow, lab), label)).detach(), rtol=1e-3, atol=1e-5
    )
    assert not gain.requires_grad and abs(gain.item()) > 1e-3


def test_follow_against_a_slow_step():
    args, _, student, _, optimizer, _, (lab, weak, _), label = step_setting(variant="official", gain_bound=9)
    pseudo_label = torch.randint(4, (10,))
    slow = copy.deepcopy(student)
    gain = feddure.follow(args, student, optimizer, lab, label, weak, pseudo_label)
    before = F.cross_entropy(by_batch(slow, lab), label)
    loss = F.cross_entropy(by_batch(slow, weak), pseudo_label)
    gradients = torch.autograd.grad(loss, list(slow.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(slow.parameters(), gradients):
            parameter -= args.lr * (gradient + args.weight_decay * parameter)  # first step: momentum is the gradient
    torch.testing.assert_close(
        gain, (F.cross_entropy(by_batch(slow, lab), label) - before).detach(), rtol=1e-3, atol=1e-5
    )
    assert abs(gain.item()) > 1e-3


def local_loss(setting, ramp=1.0):
    args, net, coarse, fine, coarse_optimizer, fine_optimizer, views, label = setting
    return feddure.local_loss(args, net, coarse, fine, coarse_optimizer, fine_optimizer, torch.cat(views), label, ramp)


@pytest.mark.parametrize("ramp", [0.25, 1])
def test_paper_loss(ramp, monkeypatch):
    setting = step_setting(lambda_u=0.5)
    fine = setting[3]
    monkeypatch.setattr(feddure, "regulate", lambda *_: (torch.tensor(-0.3), torch.tensor(7.0)))
    logits = by_batch(copy.deepcopy(setting[1]), torch.cat(setting[6]))
    loss, values = local_loss(setting, ramp)
    lab, weak, strong = logits.split([6, 10, 10])
    log_prob, pseudo_label = strong.log_softmax(1), weak.argmax(1)
    weight = fine(strong.softmax(1))
    sup = F.cross_entropy(lab, setting[7])
    unsup = -sum(weight[i] * log_prob[i, pseudo_label[i]] for i in range(10)) / 10
    by_gain = 0.3 * sum(log_prob[i, pseudo_label[i]] for i in range(10)) / 10
    torch.testing.assert_close(loss, sup + 0.5 * ramp * (unsup + by_gain))
    for name, expected in (
        ("loss_sup", sup),
        ("loss_unsup", unsup),
        ("loss_gain", by_gain),
        ("fine_weight", weight.mean()),
    ):
        torch.testing.assert_close(values[name], expected)
    assert values["used"].all() and torch.equal(values["pseudo_label"], pseudo_label) and values["loss_fine"] == 7
    fine.zero_grad()
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in fine.parameters())  # weights are constants for the model


@pytest.mark.parametrize("ramp", [0.25, 1])
def test_official_loss(ramp, monkeypatch):
    setting = step_setting(variant="official", tau=0.28)
    setting[1].classifier.weight.data *= 5
    monkeypatch.setattr(feddure, "follow", lambda *_: torch.tensor(-0.3))
    logits = by_batch(copy.deepcopy(setting[1]), torch.cat(setting[6]))
    loss, values = local_loss(setting, ramp)
    lab, weak, strong = logits.split([6, 10, 10])
    prob, log_prob = weak.softmax(1).detach(), strong.log_softmax(1)
    used = prob.amax(1) >= 0.28
    sup = F.cross_entropy(lab, setting[7])
    unsup = -sum((prob[i] * log_prob[i]).sum() for i in range(10) if used[i]) / 10
    own = -0.3 * -sum(log_prob[i].max() for i in range(10)) / 10
    torch.testing.assert_close(loss, sup + 8 * ramp * unsup + own)
    assert torch.equal(values["used"], used) and torch.equal(values["pseudo_label"], prob.argmax(1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_step_of_the_regulator_no_gain(variant):
    setting = step_setting(variant=variant, coarse_lr=0)
    loss, values = local_loss(setting)
    assert values["gain"] == 0 and values["loss_gain"] == 0
    args = setting[0]
    torch.testing.assert_close(loss, values["loss_sup"] + args.lambda_u * values["loss_unsup"], rtol=0, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_stop_at_the_teacher_and_at_the_regulators(variant):
    setting = step_setting(variant=variant, **({"tau": 0} if variant == "official" else {}))
    args, net, coarse, fine, coarse_optimizer, fine_optimizer, views, label = setting
    net.eval()  # rows do not mix
    views = torch.cat(views).requires_grad_()
    regulators = [*coarse.parameters(), *fine.parameters()]
    loss, _ = feddure.local_loss(args, net, coarse, fine, coarse_optimizer, fine_optimizer, views, label, 1)
    views.grad = None  # from the regulators' own steps
    marks = [None if p.grad is None else p.grad.clone() for p in regulators]
    loss.backward()
    assert (views.grad.flatten(1).abs().sum(1) > 0).tolist() == [True] * 6 + [False] * 10 + [True] * 10
    assert all(p.grad is mark is None or torch.equal(p.grad, mark) for p, mark in zip(regulators, marks))


@pytest.mark.parametrize("variant, passes", [("paper", 4), ("official", 3)])
def test_passes_of_a_step(monkeypatch, variant, passes):
    rows_, true = [], feddure.forward
    monkeypatch.setattr(feddure, "forward", lambda net, views, amp: rows_.append(len(views)) or true(net, views, amp))
    local_loss(step_setting(variant=variant))
    assert rows_ == [26, 10, *[6] * 3] if variant == "paper" else rows_ == [26, 6, 10, 6]
    assert len(rows_) == 1 + passes


@pytest.mark.parametrize("variant", VARIANTS)
def test_running_statistics_of_the_coarse_regulator_are_never_read(variant):
    results = []
    for spoil in (False, True):
        setting = step_setting(variant=variant)
        if spoil:
            for name, value in setting[2].named_buffers():
                value.fill_(3 if name.endswith("tracked") else 77)
        loss, values = local_loss(setting)
        results.append((loss.item(), values["gain"].item(), values["loss_fine"].item()))
    assert results[0] == results[1]


# ---- a client -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_rate_0_returns_the_broadcast_parameters(variant):
    setting = world(6, 30, variant=variant, lr=0)
    assert setting[0].coarse_lr == 0
    assert same_parameters(update(0, *setting), setting[2])


def test_without_labels_the_regulators_rest():
    for n_labelled in (0, 6):
        found = metrics(feddure, update(0, *world(n_labelled, 20)))
        assert found["steps"] > 0 and (found["gain"] != 0) == (found["loss_fine"] > 0) == (n_labelled > 0)
        assert n_labelled or found["gain"] == found["loss_fine"] == found["loss_gain"] == 0


def test_weight_1_gain_0_ramp_1_is_lpl_all_bit_by_bit(monkeypatch):
    class Certain(feddure.FineRegulator):  # weight 1 whatever it sees, so without a gradient of its own
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.layers[2].bias.data.fill_(100)

    args, data, received, net, coarse, *optimizers = world(6, 18, coarse_lr=0, warm_up=0)
    monkeypatch.setattr(feddure, "FineRegulator", Certain)
    ours = feddure.client_update(args, 1, 0, data, received, net, coarse, *optimizers)
    theirs = tiny_args(find_method("baselines/fixmatch.py"), teacher="local", tau=0)
    broadcast = fixmatch.Broadcast(received.state, torch.full((4,), 0.25, dtype=F64))
    parent = fixmatch.client_update(theirs, 1, 0, data, broadcast, net, coarse, optimizers[0])
    assert equal(ours.state, parent.state)
    assert not same_parameters(ours, received)
    monkeypatch.undo()
    other = feddure.client_update(args, 1, 0, data, received, net, coarse, *optimizers)
    assert not torch.equal(other.state["conv1.weight"], parent.state["conv1.weight"])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("warm_up, expected", [(0, [1] * 4), (3, [1 / 3, 2 / 3, 1, 1])])
def test_warm_up(monkeypatch, variant, warm_up, expected):
    seen, true = [], feddure.local_loss
    monkeypatch.setattr(feddure, "local_loss", lambda *values: seen.append(values[-1]) or true(*values))
    update(0, *world(6, 12, variant=variant, warm_up=warm_up, local_epochs=2))
    assert seen == pytest.approx(expected)


@pytest.mark.parametrize("n_labelled, steps", [(6, 2 * 4), (0, 0)])
def test_fine_tuning_comes_first_and_on_labels_alone(monkeypatch, n_labelled, steps):
    seen, true = [], feddure.forward
    monkeypatch.setattr(
        feddure, "forward", lambda net, views, amp: seen.append((net, len(views))) or true(net, views, amp)
    )
    setting = world(n_labelled, 36 - n_labelled, variant="official", fine_tune_epochs=2)
    update(0, *setting)
    assert [item == (setting[3], 8) for item in seen] == [True] * steps + [False] * (len(seen) - steps)
    assert seen[steps] == (setting[3], (8 if n_labelled else 0) + 2 * 16)


def test_regulators_start_anew_for_each_client_and_round(monkeypatch):
    first, true = [], feddure.FineRegulator

    def recorded(*sizes):
        fine = true(*sizes)
        first.append(fine.layers[0].weight.detach().clone())
        return fine

    monkeypatch.setattr(feddure, "FineRegulator", recorded)
    setting = world(3, 6)
    a = update(0, *setting)
    update(1, *setting)
    torch.manual_seed(99)
    b = update(0, *setting)  # the same after another client, wherever torch's own generator stands
    feddure.client_update(setting[0], 2, 0, *setting[1:])
    assert equal(a.state, b.state)
    assert (
        torch.equal(first[0], first[2]) and not torch.equal(first[0], first[1]) and not torch.equal(first[0], first[3])
    )


# ---- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_run_columns_bytes_and_secret_labels(tmp_path, monkeypatch, variant):
    plain = METHOD.train(tmp_path, "--variant", variant, *SMALL, name="plain")
    size = n_bytes(state(plain))
    assert len(rows(plain)) == 1
    for row in rows(plain):
        assert int(row["bytes_down"]) == int(row["bytes_up"]) == 3 * size
        assert (row["loss_fine"] == row["fine_weight"] == "") == (variant == "official") and row["gain"] != ""
        if variant == "paper":
            assert row["pl_used_pct"] == "100" and row["pl_used_acc_pct"] == row["pl_acc_pct"]
            assert 0 < float(row["fine_weight"]) < 1
    honest = feddure.prepare_data

    def falsified(args, device):
        data, *rest = honest(args, device)
        hidden = np.concatenate(data.unlabelled)
        data.labels[hidden] = 3
        return data, *rest

    monkeypatch.setattr(feddure, "prepare_data", falsified)
    other = METHOD.train(tmp_path, "--variant", variant, *SMALL, name="other")
    assert equal(state(other), state(plain))
    assert rows(plain)[0]["pl_acc_pct"] != rows(other)[0]["pl_acc_pct"]


def test_nothing_above_the_threshold(tmp_path):
    row, = rows(METHOD.train(tmp_path, "--variant", "official", "--tau", 1.5, *SMALL))  # fmt: skip
    assert row["pl_used_pct"] == row["loss_unsup"] == "0" and row["pl_used_acc_pct"] == ""


def test_variants_fill_their_own_flags():
    paper, official = (feddure.parse_args(["--variant", variant]) for variant in VARIANTS)
    assert (paper.gain, paper.lambda_u, paper.conf_threshold, paper.fine_tune_epochs) == ("old-new", 1, None, None)
    assert (official.gain, official.lambda_u, official.conf_threshold, official.fine_tune_epochs) == (
        "new-old",
        8,
        0.6,
        1,
    )
    assert (paper.virtual_lr, paper.fine_lr, paper.fine_hidden, official.virtual_lr) == (0.1, 1e-3, 128, None)
    assert paper.coarse_lr == paper.lr and feddure.parse_args(["--coarse-lr", "0"]).coarse_lr == 0
