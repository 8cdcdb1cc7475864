"""baselines/fedloke.py: blending, distillation both ways, personal models that stay."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from scripts import checkpoint, equal
from scripts import method as find_method
from worlds import call, parameters, sgd, tiny_nets, update, world

import common
from baselines import fedavg, fedloke

NAME = "baselines/fedloke.py"


# ---- blending, warm-up, distillation ------------------------------------------------------------------------------

def test_blend():
    gen = torch.Generator().manual_seed(0)
    phi, theta = ({"w": torch.randn(4, 3, generator=gen), "running_var": torch.rand(5, generator=gen),
                   "n": torch.tensor(n)} for n in (7, 3))
    blended = fedloke.blend(phi, theta, 0.9)
    for name in ("w", "running_var"):
        assert torch.allclose(blended[name], 0.9 * phi[name] + 0.1 * theta[name])
    assert blended["n"] == 7 and blended["n"].dtype == torch.int64
    assert equal(fedloke.blend(phi, theta, 0.0), theta | {"n": phi["n"]})
    assert equal(fedloke.blend(phi, theta, 1.0), phi)


def test_warm_up_counts_from_0():
    assert [fedloke.warm_up(rnd, 4) for rnd in (1, 2, 3, 5, 6, 100)] == [0, 0.25, 0.5, 1, 1, 1]
    assert fedloke.warm_up(1, 0) == 1


def slow_distillation(teacher, student, threshold):
    total, used = 0.0, []
    for p_logits, q_logits in zip(teacher.tolist(), student.tolist()):
        p, q = ([math.exp(z) / sum(map(math.exp, logits)) for z in logits] for logits in (p_logits, q_logits))
        used.append(-sum(x * math.log(x) for x in p) < threshold)
        if used[-1]:
            total += sum(x * math.log(x / y) for x, y in zip(p, q))
    return total / len(used), used


@pytest.mark.parametrize("threshold, share", [(0.0, 0), (0.5, None), (math.log(6) + 1e-9, 1)])
def test_distillation_against_a_slow_loop(threshold, share):
    gen, scale = torch.Generator().manual_seed(1), torch.tensor([0.1, 1, 2, 5, 9] * 4, dtype=torch.float64)[:, None]
    teacher, student = (scale * torch.randn(20, 6, generator=gen, dtype=torch.float64) for _ in range(2))
    loss, used = fedloke.distillation(teacher.log_softmax(1), student.requires_grad_(), threshold)
    expected, mask = slow_distillation(teacher, student, threshold)
    assert loss.item() == pytest.approx(expected, abs=1e-12) and used.tolist() == mask
    assert used.float().mean() == share if share is not None else 0 < sum(mask) < 20
    loss.backward()
    wanted = (student.softmax(1) - teacher.softmax(1)).detach() * used[:, None] / 20       # of a KL to its logits
    assert torch.allclose(student.grad, wanted, atol=1e-12)


def test_equal_models_have_no_divergence_and_extreme_logits_no_nan():
    logits = torch.tensor([[200.0, -200, 0], [1, 2, 3]], requires_grad=True)
    loss, used = fedloke.distillation(logits.detach().log_softmax(1), logits, 10.0)
    assert loss == 0 and used.all()
    loss, _ = fedloke.distillation((-logits.detach()).log_softmax(1), logits, 10.0)
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all()


# ---- the local step -----------------------------------------------------------------------------------------------

def first_batch(w):
    return next(fedloke.local_batches(w.args, w.data, 0, common.stream(1, "client", 1, 0)))[1]


def local_loss(w, ramp, batch=None):
    batch = batch or first_batch(w)
    return call(fedloke.local_loss, w, views=batch.views, label=batch.label, ramp=ramp)


def test_views_stand_where_the_batch_says(monkeypatch):
    w = world(NAME, mu=2)
    monkeypatch.setattr(common, "weak_view", lambda images, draws, flip: images)
    monkeypatch.setattr(common, "strong_view", lambda images, draws, flip: 255 - images)
    number = torch.arange(25, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8).contiguous()
    w.data = w.data._replace(images=number, labels=torch.arange(25), stats=((0.0,) * 3, (1 / 255,) * 3))
    batch = first_batch(w)
    assert batch.views.shape == (48, 3, 8, 8) and set(batch.label.tolist()) <= set(w.data.labelled[0])
    lab_strong, lab_weak, weak, strong = batch.views[:, 0, 0, 0].round().long().split([8, 8, 16, 16])
    assert torch.equal(lab_weak, batch.label) and torch.equal(lab_strong, 255 - batch.label)
    assert torch.equal(weak, torch.from_numpy(w.data.pool(0))[batch.place]) and torch.equal(strong, 255 - weak)
    assert torch.equal(batch.hidden, torch.isin(weak, torch.from_numpy(w.data.unlabelled[0])))


def test_gradients_reach_the_student_alone():
    w = world(NAME, entropy_threshold=10)
    total, values = local_loss(w, 0.5)
    shared, personal = list(w.net.parameters()), list(w.personal_net.parameters())

    def reached(loss, wanted):
        found = torch.autograd.grad(values[loss], wanted, retain_graph=True, allow_unused=True)
        return {part is not None for part in found}

    assert values["loss_unsup"] > 0 and values["used"].all()
    for loss, own, other in (("loss_sup", shared, personal), ("loss_unsup", shared, personal),
                             ("loss_personal", personal, shared)):
        assert reached(loss, own) == {True} and reached(loss, other) == {False}
    assert torch.allclose(total, values["loss_sup"] + 0.5 * values["loss_unsup"] + values["loss_personal"])


def test_losses_are_those_of_the_views():
    """Against the equations, one forward after the other; pl_* are about the personal model's labels."""
    w, twin = world(NAME, entropy_threshold=0.6), world(NAME, entropy_threshold=0.6)
    for net in (w.net, w.personal_net, twin.net, twin.personal_net):       # some answers sure, some not
        net.classifier.weight.data *= 8
    batch = first_batch(w)
    total, values = local_loss(w, 0.25, batch)
    lab_strong, lab_weak, weak, strong = batch.views.split([8, 8, 16, 16])
    answers = {(model, kind): net(views)[1]
               for model, net, labelled in (("theta", twin.net, lab_strong), ("phi", twin.personal_net, lab_weak))
               for kind, views in (("labelled", labelled), ("weak", weak), ("strong", strong))}
    expected = 0
    for model, teacher in (("theta", "phi"), ("phi", "theta")):
        unsup, used = slow_distillation(answers[teacher, "weak"], answers[model, "strong"], 0.6)
        sup = F.cross_entropy(answers[model, "labelled"], batch.label).item()
        expected += sup + 0.25 * unsup
        if model == "theta":
            assert values["loss_sup"].item() == pytest.approx(sup, rel=1e-5)
            assert values["loss_unsup"].item() == pytest.approx(unsup, rel=1e-4)
            assert values["used"].tolist() == used and 0 < sum(used) < 16
            assert torch.equal(values["pseudo_label"], answers["phi", "weak"].argmax(1))
    assert total.item() == pytest.approx(expected, rel=1e-4)
    for net, other in ((w.net, twin.net), (w.personal_net, twin.personal_net)):    # training mode, this very order
        assert equal(net.state_dict(), other.state_dict()) and net.bn1.num_batches_tracked == 3


# ---- a client -----------------------------------------------------------------------------------------------------

def test_without_distillation_both_models_follow_fedavg(monkeypatch):
    """theta on strong, phi on weak labelled views; only batch-norm statistics see the unlabelled images."""
    w = world(NAME, entropy_threshold=0, clip=0, loke_mu=1, local_epochs=2)
    upload = update(w)
    for model, first, got in ((0, w.received.state, upload.state), (8, w.personal, upload.personal)):
        monkeypatch.setattr(fedavg, "local_batches", lambda *given: (
            (batch.views[model:model + 8], batch.label) for _, batch in fedloke.local_batches(*given)))
        net, = tiny_nets(fedloke, w.args, 1)
        args = SimpleNamespace(**vars(w.args), prox_mu=0)
        expected = fedavg.client_update(args, 2, 0, w.data, fedavg.Broadcast(first), net, sgd(w.args, net)).state
        assert equal(parameters(got), parameters(expected)) and not equal(parameters(got), parameters(first))
        assert not torch.equal(got["bn1.running_mean"], expected["bn1.running_mean"])


def test_gradient_entries_are_clipped():
    def moved(clip):
        w = world(NAME, clip=clip, lr=1, momentum=0, weight_decay=0, batch_size=25, loke_mu=1)         # a single step
        upload = update(w)
        pairs = (upload.state, w.received.state), (upload.personal, w.personal)
        return [(sent[name] - came[name]).abs().max().item() for sent, came in pairs for name in parameters(sent)]

    assert max(moved(0)) > 0.05 and max(moved(0.01)) == pytest.approx(0.01, rel=1e-3)
    assert [round(step, 6) for step in moved(0.01)].count(0.01) > 4        # both models, entry by entry


def test_lr_0_leaves_the_blend():
    w = world(NAME, lr=0)
    assert equal(parameters(update(w).personal), parameters(fedloke.blend(w.personal, w.received.state, 0.9)))


# ---- runs ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("first_visit", ["initial", "download"])
def test_personal_models_stay_with_their_clients(tmp_path, monkeypatch, first_visit):
    """Also over a resume; the test set meets the average of the shared models."""
    calls, left, tested, honest, evaluate = [], {}, [], fedloke.client_update, fedloke.evaluate

    def spy(args, rnd, client, data, received, personal, *networks):
        upload = honest(args, rnd, client, data, received, personal, *networks)
        calls.append((rnd, client, received.state, {name: part.clone() for name, part in personal.items()}, upload))
        return upload

    monkeypatch.setattr(fedloke, "client_update", spy)
    monkeypatch.setattr(fedloke, "evaluate", lambda *given: tested.append(given[1]) or evaluate(*given))
    flags = ["--first-visit", first_visit, "--clients-per-round", 2, "--train-subset", 80, "--mu", 1]
    find_method(NAME).train(tmp_path, *flags, "--rounds", 2)
    folder = find_method(NAME).train(tmp_path, *flags, "--rounds", 5, "--resume")
    initial, late, known = calls[0][2], 0, 0
    for rnd, client, broadcast, personal, upload in calls:
        late += client not in left and rnd > 1
        known += client in left
        assert equal(personal, left.get(client, initial if first_visit == "initial" else broadcast))
        left[client] = upload.personal
    assert late and known and len(calls) == 10
    assert equal(checkpoint(folder)["personal"], {str(client): personal for client, personal in left.items()})
    shared, weight = ([getattr(call[-1], field) for call in calls[-2:]] for field in ("state", "weight"))
    assert len(tested) == 5 and equal(tested[-1], fedloke.average(shared, torch.stack(weight)))
