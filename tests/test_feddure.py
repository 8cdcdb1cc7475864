"""FedDure's formulas against finite differences and slow steps, its limits, what its clients do in which order."""

import copy

import pytest
import torch
import torch.nn.functional as F
from scripts import equal
from worlds import call, metrics, sgd, update, world

from baselines import feddure, fixmatch

NAME, F64 = "baselines/feddure.py", torch.float64
both_variants = pytest.mark.parametrize("variant", ["paper", "official"])


# ---- formulas -----------------------------------------------------------------------------------------------------

def toy():
    """A linear model of 3 parameters, 6 unlabelled and 4 labelled points, and a fine regulator, in float64."""
    torch.manual_seed(0)
    unl, target, lab, answer = (torch.randn(*shape, dtype=F64) for shape in ((6, 3), (6,), (4, 3), (4,)))
    model, fine = {"a": torch.randn(3, dtype=F64, requires_grad=True)}, feddure.FineRegulator(5, 7).double()
    prob = torch.randn(6, 5, dtype=F64).softmax(1)

    def labelled_loss(rate):
        losses = (unl @ model["a"] - target).square()
        moved = feddure.virtual_step(model, losses, fine(prob), rate)
        return (lab @ moved["a"] - answer).square().mean()

    return labelled_loss, fine, model, (unl, target, prob)


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
    assert not any(gradient.any() for gradient in torch.autograd.grad(labelled_loss(0.0), list(fine.parameters())))


def test_virtual_step_against_a_slow_loop():
    _, fine, model, (unl, target, prob) = toy()
    weight, error = fine(prob), (unl @ model["a"] - target)
    moved = feddure.virtual_step(model, error.square(), weight, 0.1)["a"]
    slow = model["a"] - 0.1 * sum(weight[i] * 2 * error[i] * unl[i] for i in range(6)) / 6
    torch.testing.assert_close(moved, slow)


def test_fine_regulator_gives_a_weight_in_0_1_for_each_image():
    weight = feddure.FineRegulator(10)(torch.randn(50, 10).softmax(1))
    assert weight.shape == (50,) and (weight > 0).all() and (weight < 1).all() and weight.std() > 0
    assert [tuple(p.shape) for p in feddure.FineRegulator(10).parameters()] == [(128, 10), (128,), (1, 128), (1,)]


@pytest.mark.parametrize("direction, bound, gain", [("old-new", 1.0, 0.4), ("new-old", 1.0, -0.4),
                                                    ("old-new", 0.25, 0.25), ("new-old", 0.25, -0.25)])
def test_learning_gain(direction, bound, gain):
    found = feddure.learning_gain(torch.tensor(1.5), torch.tensor(1.1), direction, bound)
    assert found.item() == pytest.approx(gain)


def test_soft_loss():
    torch.manual_seed(0)
    logits, prob = torch.randn(5, 4, dtype=F64), torch.randn(5, 4, dtype=F64).softmax(1)
    mask, log_prob = torch.tensor([True, False, True, True, False]), logits.log_softmax(1)
    slow = -sum(mask[i] * prob[i, c] * log_prob[i, c] for i in range(5) for c in range(4)) / 5
    torch.testing.assert_close(feddure.soft_loss(logits, prob, mask), slow)
    hard = feddure.soft_loss(logits, F.one_hot(prob.argmax(1), 4).to(F64), mask)
    torch.testing.assert_close(hard, fixmatch.unlabelled_loss(logits, prob.argmax(1), mask))
    assert feddure.soft_loss(logits, prob, mask & False).item() == 0


# ---- one step -----------------------------------------------------------------------------------------------------

def step_world(**settings):
    """A world with what local_loss, regulate and follow are called with: 6 labelled, 10 unlabelled images."""
    w = world(NAME, (3, 20), **settings)
    w.net.train(), w.coarse.train()
    torch.manual_seed(1)
    w.fine, w.label, w.pseudo_label = feddure.FineRegulator(4), torch.randint(4, (6,)), torch.randint(4, (10,))
    w.fine_optimizer = torch.optim.Adam(w.fine.parameters(), 1e-3)
    w.lab_views, w.weak_views, w.strong_views = (torch.randn(n, 3, 8, 8) for n in (6, 10, 10))
    w.views, w.ramp = torch.cat([w.lab_views, w.weak_views, w.strong_views]), 1.0
    w.student, w.student_optimizer = w.coarse, w.coarse_optimizer
    return w


def by_batch(net, views):
    return net.train()(views)[1]


def test_regulate_against_a_slow_step():
    """The meta gradient by its definition: -rate / U * (gradient of image i's loss) . (labelled gradient then)."""
    w = step_world(gain_bound=9)
    slow, slow_fine, lab, label = copy.deepcopy(w.coarse), copy.deepcopy(w.fine), w.lab_views, w.label
    gain, loss_fine = call(feddure.regulate, w)

    parameters, logits = list(slow.parameters()), by_batch(slow, w.strong_views)
    losses = [F.cross_entropy(logits[[i]], w.pseudo_label[[i]]) for i in range(10)]
    gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    prob, moved = logits.softmax(1).detach(), copy.deepcopy(slow)
    weight = slow_fine(prob)
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
    for ours, theirs in zip(w.fine.parameters(), slow_fine.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-7)
        theirs.grad = ours.grad                            # Adam's first step is the sign: equal gradients, equal step
    optimizer.step()
    weight, before = slow_fine(prob).detach(), F.cross_entropy(by_batch(slow, lab), label)
    optimizer = sgd(w.args, slow)
    (sum(each * loss for each, loss in zip(weight, losses)) / 10).backward()
    optimizer.step()
    for ours, theirs in zip(w.coarse.parameters(), parameters):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    expected = (before - F.cross_entropy(by_batch(slow, lab), label)).detach()
    torch.testing.assert_close(gain, expected, rtol=1e-3, atol=1e-5)
    assert not gain.requires_grad and abs(gain.item()) > 1e-3


def test_follow_against_a_slow_step():
    w = step_world(variant="official", gain_bound=9)
    slow = copy.deepcopy(w.student)
    gain, before = call(feddure.follow, w), F.cross_entropy(by_batch(slow, w.lab_views), w.label)
    loss = F.cross_entropy(by_batch(slow, w.weak_views), w.pseudo_label)
    gradients = torch.autograd.grad(loss, list(slow.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(slow.parameters(), gradients):
            parameter -= w.args.lr * (gradient + w.args.weight_decay * parameter)          # momentum starts at 0
    expected = (F.cross_entropy(by_batch(slow, w.lab_views), w.label) - before).detach()
    torch.testing.assert_close(gain, expected, rtol=1e-3, atol=1e-5)
    assert abs(gain.item()) > 1e-3


@both_variants
@pytest.mark.parametrize("ramp", [0.25, 1])
def test_losses_of_the_model(variant, ramp, monkeypatch):
    w = step_world(variant=variant, **({"lambda_u": 0.5} if variant == "paper" else {"tau": 0.28}))
    w.net.classifier.weight.data *= 5
    monkeypatch.setattr(feddure, "regulate", lambda *_: (torch.tensor(-0.3), torch.tensor(7.0)))
    monkeypatch.setattr(feddure, "follow", lambda *_: torch.tensor(-0.3))
    lab, weak, strong = by_batch(copy.deepcopy(w.net), w.views).split([6, 10, 10])
    loss, values = call(feddure.local_loss, w, ramp=ramp)
    prob, log_prob, sup = weak.softmax(1).detach(), strong.log_softmax(1), F.cross_entropy(lab, w.label)
    used, label = prob.amax(1) >= (0.28 if variant == "official" else 0), prob.argmax(1)
    if variant == "paper":
        weight = w.fine(strong.softmax(1))
        unsup = -sum(weight[i] * log_prob[i, label[i]] for i in range(10)) / 10
        by_gain = -0.3 * -sum(log_prob[i, label[i]] for i in range(10)) / 10
        expected = sup + 0.5 * ramp * (unsup + by_gain)
        torch.testing.assert_close(values["fine_weight"], weight.mean())
    else:
        unsup = -sum((prob[i] * log_prob[i]).sum() for i in range(10) if used[i]) / 10
        by_gain = -0.3 * -sum(log_prob[i].max() for i in range(10)) / 10
        expected = sup + 8 * ramp * unsup + by_gain
    torch.testing.assert_close(loss, expected)
    for name, value in (("loss_sup", sup), ("loss_unsup", unsup), ("loss_gain", by_gain)):
        torch.testing.assert_close(values[name], value)
    assert torch.equal(values["used"], used) and torch.equal(values["pseudo_label"], label)
    assert values["loss_fine"] == (7 if variant == "paper" else 0)
    w.fine.zero_grad()
    loss.backward()
    assert not any(p.grad is not None and p.grad.any() for p in w.fine.parameters())       # constants for the model


@both_variants
def test_no_step_of_the_regulator_no_gain(variant):
    w = step_world(variant=variant, coarse_lr=0)
    loss, values = call(feddure.local_loss, w)
    assert values["gain"] == 0 and values["loss_gain"] == 0
    assert loss == values["loss_sup"] + w.args.lambda_u * values["loss_unsup"]


@pytest.mark.parametrize("variant, passes", [("paper", [26, 10, 6, 6, 6]), ("official", [26, 6, 10, 6])])
def test_passes_of_a_step(monkeypatch, variant, passes):
    seen, honest = [], feddure.forward
    monkeypatch.setattr(feddure, "forward", lambda net, views, amp: seen.append(len(views)) or honest(net, views, amp))
    call(feddure.local_loss, step_world(variant=variant))
    assert seen == passes


@both_variants
def test_running_statistics_of_the_coarse_regulator_are_never_read(variant):
    results = []
    for spoil in (False, True):
        w = step_world(variant=variant)
        for name, value in w.coarse.named_buffers():
            value.fill_(3 if name.endswith("tracked") else 77) if spoil else None
        loss, values = call(feddure.local_loss, w)
        results.append((loss.item(), values["gain"].item(), values["loss_fine"].item()))
    assert results[0] == results[1]


# ---- a client -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n_lab", [0, 6])
def test_without_labels_the_regulators_rest(n_lab):
    w = world(NAME, (n_lab, 20))
    found = metrics(w, update(w))
    assert found["steps"] > 0 and (found["gain"] != 0) == (found["loss_fine"] > 0) == (n_lab > 0)
    assert n_lab or found["gain"] == found["loss_fine"] == found["loss_gain"] == 0


def test_weight_1_gain_0_ramp_1_is_lpl_all_bit_by_bit(monkeypatch):
    class Certain(feddure.FineRegulator):                  # weight 1 whatever it sees, so without a gradient of its own
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.layers[2].bias.data.fill_(100)

    ours, parent = (world(name, (6, 18), **settings) for name, settings in (
        (NAME, {"coarse_lr": 0, "warm_up": 0}), ("baselines/fixmatch.py", {"teacher": "local", "tau": 0})))
    expected, other = update(parent).state, update(ours).state
    monkeypatch.setattr(feddure, "FineRegulator", Certain)
    assert equal(update(ours).state, expected) and not equal(other, expected)


@both_variants
@pytest.mark.parametrize("warm_up, expected", [(0, [1] * 4), (3, [1 / 3, 2 / 3, 1, 1])])
def test_warm_up(monkeypatch, variant, warm_up, expected):
    seen, honest = [], feddure.local_loss
    monkeypatch.setattr(feddure, "local_loss", lambda *values: seen.append(values[-1]) or honest(*values))
    update(world(NAME, (6, 12), variant=variant, warm_up=warm_up, local_epochs=2))
    assert seen == pytest.approx(expected)


@pytest.mark.parametrize("n_lab, steps", [(6, 2 * 4), (0, 0)])
def test_fine_tuning_comes_first_and_on_labels_alone(monkeypatch, n_lab, steps):
    seen, honest = [], feddure.forward
    monkeypatch.setattr(feddure, "forward", lambda net, views, amp: (
        seen.append((net, len(views))) or honest(net, views, amp)))
    w = world(NAME, (n_lab, 36 - n_lab), variant="official", fine_tune_epochs=2)
    update(w)
    assert [item == (w.net, 8) for item in seen] == [True] * steps + [False] * (len(seen) - steps)
    assert seen[steps] == (w.net, (8 if n_lab else 0) + 2 * 16)


def test_regulators_start_anew_for_each_client_and_round(monkeypatch):
    """Whoever was trained before, and wherever torch's own generator stands."""
    first, honest = [], feddure.FineRegulator

    def recorded(*sizes):
        fine = honest(*sizes)
        first.append(fine.layers[0].weight.detach().clone())
        return fine

    monkeypatch.setattr(feddure, "FineRegulator", recorded)
    w = world(NAME, (3, 6), (10, 30))
    a, _ = update(w), update(w, client=1)
    torch.manual_seed(99)
    assert equal(a.state, update(w).state) and update(w, rnd=3)
    assert [torch.equal(first[0], each) for each in first] == [True, False, True, False]


# ---- runs, flags --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("variant, expected", [
    ("paper", dict(gain="old-new", lambda_u=1, conf_threshold=None, fine_tune_epochs=None, virtual_lr=0.1, fine_lr=1e-3,
                   fine_hidden=128, coarse_lr=0.1)),
    ("official", dict(gain="new-old", lambda_u=8, conf_threshold=0.6, fine_tune_epochs=1, virtual_lr=None,
                      fine_lr=None, fine_hidden=None, coarse_lr=0.1))])
def test_variants_fill_their_own_flags(variant, expected):
    args = vars(feddure.parse_args(["--variant", variant]))
    assert {name: args[name] for name in expected} == expected
    given = feddure.parse_args(["--variant", variant, "--lr", "0.3", "--gain", "new-old"])
    assert given.coarse_lr == 0.3 and given.gain == "new-old"
    assert feddure.parse_args(["--coarse-lr", "0"]).coarse_lr == 0
