"""baselines/fedloke.py: blending, distillation both ways, personal models that stay, bytes, odd clients."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from scripts import checkpoint, equal, n_bytes, rows, state
from scripts import method as find_method
from worlds import metrics, parameters, sgd, tiny_args, tiny_data, tiny_nets, tiny_state

import common
from baselines import fedavg, fedloke

METHOD = find_method("baselines/fedloke.py")


def train(out_dir, *flags, **kwargs):
    """A run of few steps."""
    return METHOD.train(out_dir, "--train-subset", 80, "--mu", 1, *flags, **kwargs)


def world(n_labelled=5, n_unlabelled=20, **settings):
    """One client's arguments of client_update: all by name, so that a test can change some."""
    args = tiny_args(METHOD, **settings)
    net, personal_net = tiny_nets(fedloke, args, 2)
    return SimpleNamespace(
        args=args,
        data=tiny_data(fedloke, (n_labelled, n_unlabelled)),
        received=fedloke.Broadcast(tiny_state(net)),
        personal=tiny_state(personal_net),
        net=net,
        personal_net=personal_net,
        optimizer=sgd(args, net, personal_net),
    )


def update(w, rnd=2):
    return fedloke.client_update(w.args, rnd, 0, w.data, w.received, w.personal, w.net, w.personal_net, w.optimizer)


# ---- blending, warm-up, distillation ------------------------------------------------------------------------------


def test_blend():
    gen = torch.Generator().manual_seed(0)
    phi = {"w": torch.randn(4, 3, generator=gen), "running_var": torch.rand(5, generator=gen), "n": torch.tensor(7)}
    theta = {"w": torch.randn(4, 3, generator=gen), "running_var": torch.rand(5, generator=gen), "n": torch.tensor(3)}
    blended = fedloke.blend(phi, theta, 0.9)
    for name in ("w", "running_var"):
        assert torch.allclose(blended[name], 0.9 * phi[name] + 0.1 * theta[name])
    assert blended["n"] == 7 and blended["n"].dtype == torch.int64
    assert equal(fedloke.blend(phi, theta, 0.0), theta | {"n": phi["n"]})
    assert equal(fedloke.blend(phi, theta, 1.0), phi)


def test_warm_up_counts_from_0():
    assert [fedloke.warm_up(rnd, 4) for rnd in (1, 2, 3, 5, 6, 100)] == [0, 0.25, 0.5, 1, 1, 1]
    assert fedloke.warm_up(1, 0) == 1
    for name, preset in fedloke.PRESETS.items():
        assert preset["warm_up_rounds"] == min(200, preset["rounds"] // 2), name


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
    gen = torch.Generator().manual_seed(1)
    scale = torch.tensor([0.1, 1, 2, 5, 9] * 4, dtype=torch.float64)[:, None]
    teacher, student = (scale * torch.randn(20, 6, generator=gen, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    loss, used = fedloke.distillation(teacher.log_softmax(1), student, threshold)
    expected, mask = slow_distillation(teacher, student, threshold)
    assert loss.item() == pytest.approx(expected, abs=1e-12) and used.tolist() == mask
    assert used.float().mean() == share if share is not None else 0 < sum(mask) < 20
    loss.backward()
    wanted = (student.softmax(1) - teacher.softmax(1)).detach() * used[:, None] / 20  # gradient of a KL to its logits
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


def test_views_stand_where_the_batch_says(monkeypatch):
    w = world(mu=2)
    monkeypatch.setattr(common, "weak_view", lambda images, draws, flip: images)
    monkeypatch.setattr(common, "strong_view", lambda images, draws, flip: 255 - images)
    batch = first_batch(w)
    n_lab, n_unl = len(batch.label), len(batch.place)
    assert (n_lab, n_unl, len(batch.views)) == (8, 16, 48)
    lab_strong, lab_weak, weak, strong = batch.views.split([n_lab, n_lab, n_unl, n_unl])
    unl = common.normalise(w.data.images[torch.from_numpy(w.data.pool(0))[batch.place]], *w.data.stats)
    lab_of = {image.flatten().numpy().tobytes(): label for image, label in zip(w.data.images, w.data.labels)}
    raw = ((lab_weak * 0.3 + 0.5) * 255).round().to(torch.uint8)
    assert [lab_of[image.contiguous().flatten().numpy().tobytes()] for image in raw] == batch.label.tolist()
    assert torch.equal(weak, unl)
    for strong_part, weak_part in ((lab_strong, lab_weak), (strong, weak)):
        assert torch.allclose(strong_part * 0.3 + 0.5, 1 - (weak_part * 0.3 + 0.5), atol=1e-6)


def test_gradients_reach_the_student_alone():
    w = world(entropy_threshold=10)
    batch = first_batch(w)
    total, values = fedloke.local_loss(w.args, w.net, w.personal_net, batch.views, batch.label, 0.5)
    shared, personal = list(w.net.parameters()), list(w.personal_net.parameters())

    def reached(loss, wanted):
        found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        return [part is not None for part in found]

    assert values["loss_unsup"] > 0 and values["used"].all()
    for loss in ("loss_sup", "loss_unsup"):
        assert all(reached(values[loss], shared)) and not any(reached(values[loss], personal))
    assert all(reached(values["loss_personal"], personal)) and not any(reached(values["loss_personal"], shared))
    expected = values["loss_sup"] + 0.5 * values["loss_unsup"] + values["loss_personal"]
    assert torch.allclose(total, expected)


def test_losses_are_those_of_the_views():
    """Against the equations, one forward after the other; pl_* are about the personal model's labels."""
    w, twin = world(entropy_threshold=0.6), world(entropy_threshold=0.6)
    for each in (w, twin):  # some answers sure, some not
        each.personal_net.classifier.weight.data *= 8
        each.net.classifier.weight.data *= 8
    batch = first_batch(w)
    total, values = fedloke.local_loss(w.args, w.net, w.personal_net, batch.views, batch.label, 0.25)
    lab_strong, lab_weak, weak, strong = batch.views.split([8, 8, 16, 16])
    answers = {
        (model, kind): net(views)[1]
        for model, net, labelled in (("theta", twin.net, lab_strong), ("phi", twin.personal_net, lab_weak))
        for kind, views in (("labelled", labelled), ("weak", weak), ("strong", strong))
    }
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
    for net, other in ((w.net, twin.net), (w.personal_net, twin.personal_net)):  # training mode, this very order
        assert equal(net.state_dict(), other.state_dict()) and net.bn1.num_batches_tracked == 3


def test_no_threshold_passed_or_first_round_leaves_the_labelled_losses():
    w = world(entropy_threshold=0)
    batch = first_batch(w)
    total, values = fedloke.local_loss(w.args, w.net, w.personal_net, batch.views, batch.label, 1.0)
    assert values["loss_unsup"] == 0 and not values["used"].any()
    assert total == values["loss_sup"] + values["loss_personal"]
    w = world(entropy_threshold=10)
    total, values = fedloke.local_loss(w.args, w.net, w.personal_net, batch.views, batch.label, fedloke.warm_up(1, 9))
    personal_sup = F.cross_entropy(world().personal_net(batch.views[8:16])[1], batch.label)
    assert values["loss_unsup"] > 0 and torch.allclose(total, values["loss_sup"] + personal_sup)


# ---- a client -----------------------------------------------------------------------------------------------------


def test_without_distillation_both_models_follow_fedavg(monkeypatch):
    """theta on strong, phi on weak labelled views; only batch-norm statistics see the unlabelled images."""
    w = world(entropy_threshold=0, clip=0, loke_mu=1, local_epochs=2)
    upload = update(w)
    for model, first, got in ((0, w.received.state, upload.state), (8, w.personal, upload.personal)):

        def batches(args, data, client, rng):
            for _, batch in fedloke.local_batches(args, data, client, rng):
                yield batch.views[model : model + 8], batch.label

        monkeypatch.setattr(fedavg, "local_batches", batches)
        (net,) = tiny_nets(fedloke, w.args, 1)
        args = SimpleNamespace(**vars(w.args), prox_mu=0)
        expected = fedavg.client_update(args, 2, 0, w.data, fedloke.Broadcast(first), net, sgd(w.args, net)).state
        assert equal(parameters(got), parameters(expected)) and not equal(parameters(got), parameters(first))
        assert not torch.equal(got["bn1.running_mean"], expected["bn1.running_mean"])


def test_gradient_entries_are_clipped():
    def largest(clip):
        w = world(clip=clip, lr=1, momentum=0, weight_decay=0, batch_size=25, loke_mu=1)  # a single step
        upload = update(w)
        moved = [(upload.state[name] - w.received.state[name]).abs().max() for name in parameters(upload.state)]
        moved += [(upload.personal[name] - w.personal[name]).abs().max() for name in parameters(w.personal)]
        return max(moved).item(), [round(step.item(), 6) for step in moved]

    assert largest(0)[0] > 0.05
    most, moved = largest(0.01)
    assert most == pytest.approx(0.01, rel=1e-3) and moved.count(0.01) > 4  # both models, entry by entry


def test_without_labels_the_models_teach_each_other_alone():
    upload = update(world(n_labelled=0, entropy_threshold=9))
    found = metrics(fedloke, upload)
    assert found["loss_sup"] == found["sup_steps"] == 0 and found["loss_unsup"] > 0 and found["loss_personal"] > 0


def test_lr_0_returns_the_download_and_the_blend():
    w = world(lr=0)
    upload = update(w)
    assert equal(parameters(upload.state), parameters(w.received.state))
    assert equal(parameters(upload.personal), parameters(fedloke.blend(w.personal, w.received.state, 0.9)))


def test_a_client_leaves_the_broadcast_and_its_old_model_alone():
    w, before = world(), world()
    first = update(w)
    assert equal(w.received.state, before.received.state) and equal(w.personal, before.personal)
    again = update(w)  # no momentum is left of the first visit
    assert equal(first.state, again.state) and equal(first.personal, again.personal)
    shared = {value.data_ptr() for value in [*w.net.state_dict().values(), *w.personal_net.state_dict().values()]}
    assert not shared & {value.data_ptr() for value in [*first.state.values(), *first.personal.values()]}


# ---- runs ---------------------------------------------------------------------------------------------------------


def recorded(monkeypatch):
    """Every call of client_update as (rnd, client, broadcast state, phi it got, Upload)."""
    calls, original = [], fedloke.client_update

    def spy(args, rnd, client, data, received, personal, *networks):
        upload = original(args, rnd, client, data, received, personal, *networks)
        calls.append((rnd, client, received.state, {name: part.clone() for name, part in personal.items()}, upload))
        return upload

    monkeypatch.setattr(fedloke, "client_update", spy)
    return calls


@pytest.mark.parametrize("first_visit", ["initial", "download"])
def test_personal_models_stay_with_their_clients(tmp_path, monkeypatch, first_visit):
    calls, left = recorded(monkeypatch), {}
    flags = ["--first-visit", first_visit, "--clients-per-round", 2]
    train(tmp_path, *flags, "--rounds", 2)
    folder = train(tmp_path, *flags, "--rounds", 5, "--resume")
    initial, late, known = calls[0][2], 0, 0
    for rnd, client, broadcast, personal, upload in calls:
        late += client not in left and rnd > 1
        known += client in left
        assert equal(personal, left.get(client, initial if first_visit == "initial" else broadcast))
        left[client] = upload.personal
    assert late and known and len(calls) == 10
    saved = checkpoint(folder)["personal"]
    assert saved.keys() == {str(client) for client in left}
    assert all(equal(saved[str(client)], personal) for client, personal in left.items())


def test_bytes_are_those_of_one_model_each_way(tmp_path):
    folder = train(tmp_path)
    size = n_bytes(state(folder))
    assert [(row["bytes_up"], row["bytes_down"]) for row in rows(folder)] == [(str(3 * size), str(3 * size))] * 2
    assert n_bytes(fedloke.ResNet8(10).state_dict()) == 4_921_200


def test_the_test_set_meets_the_average_of_the_shared_models(tmp_path, monkeypatch):
    calls, tested, original = recorded(monkeypatch), [], fedloke.evaluate
    monkeypatch.setattr(
        fedloke, "evaluate", lambda net, state, *rest: tested.append(state) or original(net, state, *rest)
    )
    train(tmp_path, "--rounds", 1)
    uploads = [call[-1] for call in calls]
    expected = fedloke.average([each.state for each in uploads], torch.stack([each.weight for each in uploads]))
    assert equal(tested[0], expected) and not equal(expected, uploads[0].personal)


def test_clients_without_images_and_thresholds_at_their_ends(tmp_path):
    flags = ["--partition", "dirichlet", "--alpha", 0.001, "--clients", 60, "--clients-per-round", 12]
    folder = train(tmp_path, *flags, "--rounds", 1)
    for row in rows(folder):
        assert int(row["clients_empty"]) > 0 and int(row["clients_trained"]) + int(row["clients_empty"]) == 12
    assert len(checkpoint(folder)["personal"]) <= sum(int(row["clients_trained"]) for row in rows(folder))
    for threshold, used in ((0, "0"), (9, "100")):
        for row in rows(train(tmp_path, "--entropy-threshold", threshold, name=f"at{threshold}")):
            assert row["pl_used_pct"] == used and (row["loss_unsup"] == "0") == (row["pl_used_acc_pct"] == "") == (
                not threshold
            )
