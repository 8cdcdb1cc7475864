"""baselines/fedlabel.py: expertise and losses by slow loops, identities with FixMatch and FedAvg, phases, bytes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from scripts import equal, n_bytes, rows, state
from scripts import method as find_method
from worlds import metrics, sgd, tiny_args, tiny_data, tiny_nets, tiny_state

import common
from baselines import fedavg, fedlabel, fixmatch

METHOD = find_method("baselines/fedlabel.py")
FIXMATCH = find_method("baselines/fixmatch.py")
PLUG_IN = "--gpt --icpl --gpt-epochs 2".split()
KINDS = ["variance", "logit-variance", "maximum"]


def logits(rows, classes, scale=2.0, seed=0):
    """Logits of two models that are related to each other, float64."""
    generator = torch.Generator().manual_seed(seed)
    shared, *own = (torch.randn(rows, classes, generator=generator, dtype=torch.float64) for _ in range(3))
    return [scale * (shared + 0.7 * noise) for noise in own]


# ---- expertise ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_variance_of_uniform_and_one_hot_predictions(classes):
    certain = torch.full((1, classes), -1e4, dtype=torch.float64)
    certain[0, 1] = 1e4
    assert fedlabel.expertise(certain, "variance").item() == pytest.approx(1 / classes, rel=1e-12)
    assert fedlabel.expertise(torch.zeros(1, classes, dtype=torch.float64), "variance").item() < 1e-30


@pytest.mark.parametrize("kind", KINDS)
def test_expertise_against_a_slow_loop(kind):
    values = logits(20, 5)[0]
    for row, h in zip(values.tolist(), fedlabel.expertise(values, kind).tolist()):
        prob = [math.exp(v) / sum(map(math.exp, row)) for v in row]
        of = row if kind == "logit-variance" else prob
        variance = sum((v - sum(of) / 5) ** 2 for v in of) / 4
        assert h == pytest.approx(max(prob) if kind == "maximum" else variance, rel=1e-10)


def test_variance_and_maximum_nearly_always_name_one_expert_on_trained_predictions():
    local, other = logits(2000, 10, scale=5)
    takes = [fedlabel.expertise(other, kind) > fedlabel.expertise(local, kind) for kind in ("variance", "maximum")]
    assert (takes[0] == takes[1]).double().mean() > 0.97 and 0.3 < takes[0].double().mean() < 0.7
    larger = fedlabel.expertise(3 * local, "logit-variance") > fedlabel.expertise(local, "logit-variance")
    assert larger.all()  # the trap: scale decides


# ---- choice and losses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("over_kept", [False, True])
def test_choice_and_losses_against_a_slow_loop(kind, over_kept):
    local, other = logits(60, 4)
    strong = torch.randn(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5), requires_grad=True)
    choice = fedlabel.choose_expert(local, other, 0.7, kind)
    h_local, h_global = fedlabel.expertise(local, kind).tolist(), fedlabel.expertise(other, kind).tolist()
    q_local, q_global, p = local.softmax(1).tolist(), other.softmax(1).tolist(), strong.detach().softmax(1).tolist()
    entropy, pull, kept, agreed, experts, gradient = 0.0, 0.0, 0, 0, set(), []
    for i in range(60):
        takes_global = h_global[i] > h_local[i]
        q_s, q_d = (q_global[i], q_local[i]) if takes_global else (q_local[i], q_global[i])
        ratio = min(h_local[i], h_global[i]) / max(h_local[i], h_global[i])
        label, keep = q_s.index(max(q_s)), max(q_s) >= 0.7
        agree = keep and q_d.index(max(q_d)) == label
        entropy += -math.log(p[i][label]) * keep
        pull += ratio * sum(q * math.log(q / r) for q, r in zip(q_d, p[i])) * agree
        kept, agreed = kept + keep, agreed + agree
        experts.add((takes_global, keep, agree))
        assert (choice.label[i], choice.used[i], choice.agree[i]) == (label, keep, agree)
        assert choice.ratio[i].item() == pytest.approx(ratio, rel=1e-12) and 0 <= ratio <= 1
        assert choice.other[i].tolist() == pytest.approx(q_d, rel=1e-12)
        gradient.append([keep * (r - (c == label)) for c, r in enumerate(p[i])])
    assert len(experts) == 6 and agreed < kept < 60
    loss_unsup, loss_agree = fedlabel.fedlabel_losses(strong, choice, over_kept)
    divisors = (kept, agreed) if over_kept else (60, 60)
    assert loss_unsup.item() == pytest.approx(entropy / divisors[0], rel=1e-10)
    assert loss_agree.item() == pytest.approx(pull / divisors[1], rel=1e-10)
    loss_unsup.backward()
    torch.testing.assert_close(strong.grad, torch.tensor(gradient, dtype=torch.float64) / divisors[0])
    strong.grad = None
    loss_agree.backward()
    wanted = (choice.agree * choice.ratio)[:, None] * (strong.detach().softmax(1) - choice.other) / divisors[1]
    torch.testing.assert_close(strong.grad, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_models_agree_on_every_kept_image_with_weight_1(kind):
    local = logits(50, 4)[0]
    choice = fedlabel.choose_expert(local, local.clone(), 0.6, kind)
    assert torch.equal(choice.agree, choice.used) and choice.used.any() and (choice.ratio == 1).all()
    torch.testing.assert_close(choice.other, local.softmax(1))


def test_a_tie_goes_to_the_local_model():
    local = logits(50, 4)[0]
    other = local.roll(1, 1)  # the same probabilities for other classes
    for kind in ("maximum", "variance", "logit-variance"):
        h = fedlabel.expertise(local, kind), fedlabel.expertise(other, kind)
        tie = h[0] == h[1]
        choice = fedlabel.choose_expert(local, other, 0, kind)
        assert tie.any() and torch.equal(choice.label[tie], local.argmax(1)[tie])
        assert not choice.agree[tie].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", [1, 4])
def test_models_without_any_opinion_give_no_nan(kind, classes, recwarn):
    flat = torch.zeros(6, classes)
    choice = fedlabel.choose_expert(flat, flat, 0.0, kind)
    strong = torch.randn(6, classes, requires_grad=True)
    losses = fedlabel.fedlabel_losses(strong, choice)
    sum(losses).backward()
    assert (choice.ratio == 1).all() and all(loss.isfinite() for loss in losses) and strong.grad.isfinite().all()
    assert not recwarn.list


@pytest.mark.parametrize("over_kept", [False, True])
def test_nothing_kept_gives_exactly_0(over_kept):
    local, other = logits(30, 4)
    strong = torch.randn(30, 4, dtype=torch.float64, requires_grad=True)
    losses = fedlabel.fedlabel_losses(strong, fedlabel.choose_expert(local, other, 1.5, "variance"), over_kept)
    sum(losses).backward()
    assert [loss.item() for loss in losses] == [0, 0] and not strong.grad.any()


# ---- joint steps --------------------------------------------------------------------------------------------------


def test_without_the_pull_and_with_local_experts_alone_it_is_lpl_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(fedlabel, "expertise", lambda logits, kind: torch.zeros(len(logits)))
    flags = ["--tau", 0.3, "--rounds", 1, "--batch-size", 8]
    mine = METHOD.train(tmp_path, "--lambda-agree", 0, *flags, name="mine")
    other = FIXMATCH.train(tmp_path, "--teacher", "local", *flags, name="other")
    assert equal(state(mine), state(other))
    for a, b in zip(rows(mine), rows(other)):
        assert all(a[key] == b[key] for key in a if key in b) and float(a["pl_used_pct"]) > 5


def test_gradient_goes_through_labelled_and_strong_rows_alone(monkeypatch):
    args = tiny_args(METHOD, tau=0.5)
    student = 3 * torch.randn(26, 4, generator=torch.Generator().manual_seed(0))
    teacher = 3 * torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    student.requires_grad_()
    calls, recorded = iter([student, teacher]), []

    def forward(*_):
        recorded.append(torch.is_grad_enabled())
        return None, next(calls)

    monkeypatch.setattr(fedlabel, "forward", forward)
    views, prior = torch.zeros(26, 3, 8, 8), torch.full((4,), 0.25)
    loss, _, values = fedlabel.local_loss(args, None, None, views, torch.arange(6) % 4, prior)
    loss.backward()
    got = student.grad
    assert got[:6].any() and not got[6:16].any() and torch.equal(got[16:].any(1), values["used"])
    assert recorded == [True, False] and values["loss_agree"] > 0
    choice = fedlabel.choose_expert(student[6:16].detach(), teacher, 0.5, "variance")
    unsup, agree = fedlabel.fedlabel_losses(student[16:], choice)
    assert loss.item() == pytest.approx((F.cross_entropy(student[:6], torch.arange(6) % 4) + unsup + agree).item())


# ---- two phases ---------------------------------------------------------------------------------------------------


def world(n_labelled, n_unlabelled, *flags):
    """Arguments of an update of client 0, who has so many images: (args, rnd, client, data, received), networks."""
    args = tiny_args(METHOD, *flags)
    nets = tiny_nets(fedlabel, args, 3)
    received = fedlabel.Broadcast(tiny_state(nets[0]), torch.full((4,), 0.25, dtype=torch.float64))
    return (args, 1, 0, tiny_data(fedlabel, (n_labelled, n_unlabelled)), received), nets, sgd(args, nets[0])


def two_phase(n_labelled, n_unlabelled, *flags):
    given, nets, optimizer = world(n_labelled, n_unlabelled, "--two-phase", *flags)
    before = copy.deepcopy(given[4].state)
    upload = fedlabel.two_phase_update(*given, *nets, optimizer)
    assert equal(given[4].state, before)  # the broadcast stays as it is
    return given, upload, nets


def test_without_phase_2_the_update_is_fedavgs_bit_by_bit():
    given, upload, _ = two_phase(9, 20, "--unlabelled-epochs", 0, "--local-epochs", 2)
    args, nets, optimizer = given[0], *world(9, 20)[1:]
    args.prox_mu = 0
    data = fedavg.FederatedData(*given[3])
    want = fedavg.client_update(args, 1, 0, data, fedavg.Broadcast(given[4].state), nets[0], optimizer)
    assert equal(upload.state, want.state) and upload.weight == 9
    assert not equal(upload.state["conv1.weight"], given[4].state["conv1.weight"])


def test_both_changes_add_up_and_the_statistics_are_their_mean():
    """Phase 2 alone, from the same labelled phase, by hand."""
    flags = ("--tau", 0.3, "--local-epochs", 2, "--unlabelled-epochs", 1)
    given, upload, nets = two_phase(9, 40, *flags)
    first, second = nets[2].state_dict(), nets[0].state_dict()  # w_L in its teacher; where phase 2 ended
    start = given[4].state
    assert equal(nets[1].state_dict(), start)
    assert not any(model.training for model in nets[1:])
    for name, value in upload.state.items():
        change_l, change_u = first[name].double() - start[name], second[name].double() - start[name]
        if "running_" in name:
            wanted = (2 * first[name].double() + second[name]) / 3  # 2 epochs of one, 1 of the other
            assert value.min() >= 0 or "mean" in name
        else:
            wanted = start[name] + change_l + change_u
        torch.testing.assert_close(value.double(), wanted.double(), rtol=1e-5, atol=1e-6)
        assert value.dtype == start[name].dtype
        if not name.endswith(("bias", "tracked")):
            assert change_l.any() and change_u.any(), name
    steps = metrics(fedlabel, upload)
    assert steps["sup_steps"] == 2 * 6 and steps["steps"] == 6  # 49 images, batches of 8
    assert upload.state["bn1.num_batches_tracked"] == 18 and steps["loss_sup"] > 0 and steps["loss_unsup"] > 0


def test_added_variance_changes_would_be_negative_where_the_mean_is_not():
    start, first, second = ({"bn.running_var": torch.tensor([v])} for v in (1.0, 0.2, 1e-9))
    assert start["bn.running_var"] + sum(s["bn.running_var"] - start["bn.running_var"] for s in (first, second)) < 0
    for share in (0, 0.3, 0.5, 0.9, 1):
        value = fedlabel.add_changes(start, first, second, share)["bn.running_var"]
        assert value > 0 and value.item() == pytest.approx(0.2 + share * (1e-9 - 0.2), abs=1e-7)


def test_phase_2_starts_from_the_broadcast_model_with_frozen_teachers_in_eval_mode(monkeypatch):
    seen, honest = [], fedlabel.forward

    def spy(model, views, amp):
        seen.append((model, model.training, len(views), torch.is_grad_enabled(), model.conv1.weight.detach().clone()))
        return honest(model, views, amp)

    monkeypatch.setattr(fedlabel, "forward", spy)
    given, upload, (net, teacher, local_teacher) = two_phase(9, 40, "--tau", 0.3)
    labelled, unlabelled = seen[:6], seen[6:]
    assert [call[:4] for call in labelled] == [(net, True, 8, True)] * 6
    want = [(local_teacher, False, 16, False), (teacher, False, 16, False), (net, True, 16, True)]
    assert [call[:4] for call in unlabelled] == want * 6  # three passes a step and no more
    start = given[4].state["conv1.weight"]
    assert torch.equal(unlabelled[2][4], start) and torch.equal(unlabelled[-2][4], start)
    assert torch.equal(unlabelled[0][4], unlabelled[-3][4]) and not torch.equal(unlabelled[0][4], start)


def test_phase_2_replayed_by_hand():
    """Fresh momentum; means over the kept and over the agreeing images, not over all."""
    (args, _, _, data, received), _, (net, teacher, local_teacher) = two_phase(9, 40, "--tau", 0.3)
    rng = common.stream(args.seed, "client", 1, 0)
    list(fedlabel.labelled_batches(args, data, 0, rng))  # phase 1 drew from the same stream
    student, partial = fedlabel.ResNet8(4, 8), 0
    student.load_state_dict(received.state)
    optimizer = sgd(args, student)
    for _, batch in fedlabel.unlabelled_batches(args, data, 0, rng):
        weak, strong = batch.views[:16], batch.views[16:]
        with torch.no_grad():
            choice = fedlabel.choose_expert(local_teacher(weak)[1], teacher(weak)[1], 0.3, "variance")
        answer, used, agree = student(strong)[1], choice.used, choice.agree
        loss = F.cross_entropy(answer[used], choice.label[used]) if used.any() else answer.sum() * 0
        if agree.any():
            pull = (choice.other * (choice.other.log() - answer.log_softmax(1))).sum(1)
            loss = loss + (choice.ratio * pull)[agree].mean()
        partial += int(used.sum() < 16) + int(agree.sum() < 16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert partial > 0
    for (name, value), want in zip(net.state_dict().items(), student.state_dict().values()):
        torch.testing.assert_close(value, want, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_r_counts_labelled_images_and_those_kept_when_last_seen():
    for threshold, kept in ((0, 49), (1.5, 0)):
        _, upload, _ = two_phase(9, 40, "--tau", threshold, "--unlabelled-epochs", 4)
        assert upload.weight == 9 + kept
    given, upload, nets = two_phase(0, 49, "--tau", 0.3, "--local-epochs", 4)
    assert (
        0 < upload.weight < 49 and metrics(fedlabel, upload)["used"] > upload.weight
    )  # of each image the last look alone


def test_images_whose_label_the_client_owns_count_in_no_pseudo_label_figure():
    _, upload, _ = two_phase(9, 7, "--tau", 0)
    found = metrics(fedlabel, upload)
    assert found["images"] == found["used"] == 2 * 7  # two steps of all 16 images


def test_without_labels_both_teachers_are_the_broadcast_model_and_agree(monkeypatch):
    choices, honest = [], fedlabel.choose_expert
    monkeypatch.setattr(fedlabel, "choose_expert", lambda *given: choices.append(honest(*given)) or choices[-1])
    given, upload, nets = two_phase(0, 40, "--tau", 0.3)
    assert choices and all(torch.equal(choice.used, choice.agree) and (choice.ratio == 1).all() for choice in choices)
    assert any(choice.used.any() for choice in choices)
    second = nets[0].state_dict()
    assert all(torch.equal(value, second[name]) for name, value in upload.state.items() if "running_" in name)


def test_the_server_adds_changes_weighted_by_r():
    (args, _, _, _, received), nets, _ = world(1, 1, "--two-phase")
    uploads, want = [], {name: value.double() for name, value in received.state.items()}
    for r, net in zip((3.0, 0.0, 9.0), nets):
        for value in net.parameters():
            value.data += torch.randn_like(value)
        change = {name: value.double() - received.state[name] for name, value in net.state_dict().items()}
        want = {name: value + r / 12 * change[name] for name, value in want.items()}
        r = torch.tensor(r, dtype=torch.float64)
        uploads.append(fedlabel.Upload(tiny_state(net), torch.zeros(4), r, torch.zeros(10)))
    got = fedlabel.server_update(args, 1, received, uploads).state
    for name, value in got.items():
        torch.testing.assert_close(value.double(), want[name], rtol=1e-5, atol=1e-6)
    nothing = [upload._replace(weight=torch.zeros((), dtype=torch.float64)) for upload in uploads]
    assert equal(fedlabel.server_update(args, 1, received, nothing), received)


# ---- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, up, down", [([], 0, 0), (PLUG_IN, 40, 40), (["--two-phase"], 4, 0)])
def test_bytes_and_empty_cells(tmp_path, flags, up, down):
    folder = METHOD.train(tmp_path, "--tau", 1.5, "--rounds", 1, *flags)
    size = n_bytes(state(folder))
    (row,) = rows(folder)
    assert row["clients_trained"] == "3" and row["bytes_up"] == str(3 * (size + up))
    assert row["bytes_down"] == str(3 * (size + down))
    assert row["loss_unsup"] == row["loss_agree"] == row["pl_used_pct"] == "0" and row["pl_used_acc_pct"] == ""
    assert (row["loss_icpl"] == "") == (flags != PLUG_IN) and float(row["loss_sup"]) > 0


def test_clients_of_r_0_still_exchange_models(tmp_path):
    """Of 60 clients many own no label or no image; nothing is kept."""
    flags = ["--partition", "dirichlet", "--alpha", 0.001, "--clients", 60, "--clients-per-round", 20, "--two-phase"]
    folder = METHOD.train(tmp_path, *flags, "--tau", 1.5, "--rounds", 1)
    size = n_bytes(state(folder))
    (row,) = rows(folder)
    trained, empty = int(row["clients_trained"]), int(row["clients_empty"])
    assert trained + empty == 20 and empty > 0
    assert row["bytes_up"] == str(trained * (size + 4)) and row["bytes_down"] == str(trained * size)


def test_phase_2_without_steps_leaves_empty_cells(tmp_path):
    folder = METHOD.train(tmp_path, "--two-phase", "--unlabelled-epochs", 0, "--rounds", 1)
    (row,) = rows(folder)
    assert row["loss_unsup"] == row["loss_agree"] == row["pl_used_pct"] == "" and float(row["loss_sup"]) > 0


def test_presets_are_those_of_fixmatch_and_phase_2_is_as_long_as_phase_1():
    assert fedlabel.PRESETS == fixmatch.PRESETS
    assert fedlabel.parse_args([]).unlabelled_epochs is None
    assert fedlabel.parse_args(["--two-phase"]).unlabelled_epochs == fedlabel.PRESETS["digits"]["local_epochs"] == 5
