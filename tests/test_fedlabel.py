"""baselines/fedlabel.py: expertise and losses by slow loops, the identity with FixMatch, the two phases."""

import math

import pytest
import torch
import torch.nn.functional as F
from scripts import equal, n_bytes, rows, state
from worlds import metrics, sgd, step_of, update, world

import common
from baselines import fedlabel

NAME, KINDS = "baselines/fedlabel.py", ["variance", "logit-variance", "maximum"]
all_kinds = pytest.mark.parametrize("kind", KINDS)


def logits(rows, classes, scale=2.0):
    """Logits of two models that are related to each other, float64."""
    generator = torch.Generator().manual_seed(0)
    shared, *own = (torch.randn(rows, classes, generator=generator, dtype=torch.float64) for _ in range(3))
    return [scale * (shared + 0.7 * noise) for noise in own]


# ---- expertise ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_variance_of_uniform_and_one_hot_predictions(classes):
    certain = torch.full((1, classes), -1e4, dtype=torch.float64)
    certain[0, 1] = 1e4
    assert fedlabel.expertise(certain, "variance").item() == pytest.approx(1 / classes, rel=1e-12)
    assert fedlabel.expertise(0 * certain, "variance").item() < 1e-30


@all_kinds
def test_expertise_against_a_slow_loop(kind):
    values = logits(20, 5)[0]
    for row, h in zip(values.tolist(), fedlabel.expertise(values, kind).tolist()):
        prob = [math.exp(v) / sum(map(math.exp, row)) for v in row]
        of = row if kind == "logit-variance" else prob
        variance = sum((v - sum(of) / 5) ** 2 for v in of) / 4
        assert h == pytest.approx(max(prob) if kind == "maximum" else variance, rel=1e-10)


# ---- choice and losses --------------------------------------------------------------------------------------------

@all_kinds
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
    for loss, wanted, divisor in ((loss_unsup, torch.tensor(gradient, dtype=torch.float64), kept), (loss_agree, (
            choice.agree * choice.ratio)[:, None] * (strong.detach().softmax(1) - choice.other), agreed)):
        found, = torch.autograd.grad(loss, strong)
        torch.testing.assert_close(found, wanted / (divisor if over_kept else 60))


@all_kinds
def test_a_tie_goes_to_the_local_model(kind):
    local = logits(50, 4)[0]
    other = local.roll(1, 1)                                               # the same probabilities for other classes
    tie = fedlabel.expertise(local, kind) == fedlabel.expertise(other, kind)
    choice = fedlabel.choose_expert(local, other, 0, kind)
    assert tie.any() and torch.equal(choice.label[tie], local.argmax(1)[tie]) and not choice.agree[tie].any()


@all_kinds
@pytest.mark.parametrize("classes", [1, 4])
def test_models_without_any_opinion_give_no_nan(kind, classes, recwarn):
    flat, strong = torch.zeros(6, classes), torch.randn(6, classes, requires_grad=True)
    choice = fedlabel.choose_expert(flat, flat, 0.0, kind)
    losses = fedlabel.fedlabel_losses(strong, choice)
    sum(losses).backward()
    assert (choice.ratio == 1).all() and all(loss.isfinite() for loss in losses) and strong.grad.isfinite().all()
    assert not recwarn.list


@pytest.mark.parametrize("over_kept", [False, True])
def test_nothing_kept_gives_exactly_0(over_kept):
    strong = torch.randn(30, 4, dtype=torch.float64, requires_grad=True)
    losses = fedlabel.fedlabel_losses(strong, fedlabel.choose_expert(*logits(30, 4), 1.5, "variance"), over_kept)
    sum(losses).backward()
    assert [loss.item() for loss in losses] == [0, 0] and not strong.grad.any()


# ---- joint steps --------------------------------------------------------------------------------------------------

def test_without_the_pull_and_with_local_experts_alone_it_is_lpl_bit_by_bit(monkeypatch):
    monkeypatch.setattr(fedlabel, "expertise", lambda logits, kind: torch.zeros(len(logits)))
    ours, theirs = world(NAME, (6, 34), lambda_agree=0, tau=0.5), world("baselines/fixmatch.py", (6, 34), tau=0.5)
    theirs.args.teacher = "local"
    upload, parent = update(ours), update(theirs)
    mine, its = metrics(ours, upload), metrics(theirs, parent)
    assert equal(upload.state, parent.state) and 0 < mine["used"] < mine["images"]
    assert all(mine[name] == its[name] for name in mine if name in its)


def test_a_joint_step_by_hand():
    """Which views are learnt from, test_semi_supervised has for all scripts."""
    w = world(NAME, tau=0.7, lambda_u=0.5, lambda_agree=0.7)
    w.net.eval(), w.teacher.eval()
    (loss, _, values), views, label = step_of(w)
    choice = fedlabel.choose_expert(w.net(views[6:18])[1].detach(), w.teacher(views[6:18])[1], 0.7, "variance")
    unsup, agree = fedlabel.fedlabel_losses(w.net(views[18:])[1], choice)
    torch.testing.assert_close(loss, F.cross_entropy(w.net(views[:6])[1], label) + 0.5 * (unsup + 0.7 * agree))
    assert torch.equal(values["used"], choice.used) and 0 < choice.used.sum() < 12 and agree > 0


# ---- two phases ---------------------------------------------------------------------------------------------------

def two_phase(n_labelled, n_unlabelled, **settings):
    """A world and its Upload after both phases; without them it is FedAvg: test_semi_supervised."""
    w = world(NAME, (n_labelled, n_unlabelled), flags=["--two-phase"], **settings)
    return w, update(w)


def test_both_changes_add_up_and_the_statistics_are_their_mean():
    w, upload = two_phase(9, 40, tau=0.3, local_epochs=2, unlabelled_epochs=1)
    start, first, second = w.received.state, w.local_teacher.state_dict(), w.net.state_dict()
    assert equal(w.teacher.state_dict(), start) and not w.teacher.training and not w.local_teacher.training
    for name, value in upload.state.items():
        change_l, change_u = first[name].double() - start[name], second[name].double() - start[name]
        wanted = start[name] + change_l + change_u
        if "running_" in name:
            wanted = (2 * first[name].double() + second[name]) / 3         # 2 epochs of one, 1 of the other
            assert value.min() >= 0 or "mean" in name
        torch.testing.assert_close(value.double(), wanted.double(), rtol=1e-5, atol=1e-6)
        assert value.dtype == start[name].dtype
        assert name.endswith(("bias", "tracked")) or change_l.any() and change_u.any(), name
    steps = metrics(w, upload)
    assert steps["sup_steps"] == 2 * 6 and steps["steps"] == 6             # 49 images, batches of 8
    assert upload.state["bn1.num_batches_tracked"] == 18 and steps["loss_sup"] > 0 and steps["loss_unsup"] > 0


def test_phase_2_starts_from_the_broadcast_model_with_frozen_teachers_in_eval_mode(monkeypatch):
    seen, honest = [], fedlabel.forward

    def spy(model, views, amp):
        seen.append((model, model.training, len(views), torch.is_grad_enabled(), model.conv1.weight.detach().clone()))
        return honest(model, views, amp)

    monkeypatch.setattr(fedlabel, "forward", spy)
    w, _ = two_phase(9, 40, tau=0.3)
    labelled, unlabelled, start = seen[:6], seen[6:], w.received.state["conv1.weight"]
    assert [call[:4] for call in labelled] == [(w.net, True, 8, True)] * 6
    want = [(w.local_teacher, False, 16, False), (w.teacher, False, 16, False), (w.net, True, 16, True)]
    assert [call[:4] for call in unlabelled] == want * 6                   # three passes a step and no more
    assert torch.equal(unlabelled[2][4], start) and torch.equal(unlabelled[-2][4], start)
    assert torch.equal(unlabelled[0][4], unlabelled[-3][4]) and not torch.equal(unlabelled[0][4], start)


def test_phase_2_replayed_by_hand():
    """Fresh momentum; means over the kept and over the agreeing images, not over all."""
    w, _ = two_phase(9, 40, tau=0.3)
    rng = common.stream(w.args.seed, "client", w.rnd, 0)
    list(fedlabel.labelled_batches(w.args, w.data, 0, rng))                # phase 1 drew from the same stream
    student, partial = fedlabel.ResNet8(4, 8), 0
    student.load_state_dict(w.received.state)
    optimizer = sgd(w.args, student)
    for _, batch in fedlabel.unlabelled_batches(w.args, w.data, 0, rng):
        weak, strong = batch.views[:16], batch.views[16:]
        with torch.no_grad():
            choice = fedlabel.choose_expert(w.local_teacher(weak)[1], w.teacher(weak)[1], 0.3, "variance")
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
    for value, want in zip(w.net.state_dict().values(), student.state_dict().values()):
        torch.testing.assert_close(value, want, rtol=1e-4, atol=1e-4)


def test_r_counts_labelled_images_and_those_kept_when_last_seen():
    for threshold, kept in ((0, 49), (1.5, 0)):
        assert two_phase(9, 40, tau=threshold, unlabelled_epochs=4)[1].weight == 9 + kept
    w, upload = two_phase(0, 49, tau=0.3, local_epochs=4)
    assert 0 < upload.weight < 49 and metrics(w, upload)["used"] > upload.weight           # of each the last look alone


def test_images_whose_label_the_client_owns_count_in_no_pseudo_label_figure():
    found = metrics(*two_phase(9, 7, tau=0))
    assert found["images"] == found["used"] == 2 * 7                       # two steps of all 16 images


def test_without_labels_both_teachers_are_the_broadcast_model_and_agree(monkeypatch):
    choices, honest = [], fedlabel.choose_expert
    monkeypatch.setattr(fedlabel, "choose_expert", lambda *given: choices.append(honest(*given)) or choices[-1])
    w, upload = two_phase(0, 40, tau=0.3)
    assert choices and all(torch.equal(choice.used, choice.agree) and (choice.ratio == 1).all() for choice in choices)
    assert any(choice.used.any() for choice in choices)
    second = w.net.state_dict()
    assert all(torch.equal(value, second[name]) for name, value in upload.state.items() if "running_" in name)


# ---- runs, flags --------------------------------------------------------------------------------------------------

def test_clients_of_r_0_still_exchange_models(run_once):
    """Of 60 clients many own no label or no image; nothing is kept."""
    flags = "--partition dirichlet --alpha 0.001 --clients 60 --clients-per-round 20 --two-phase --tau 1.5 --rounds 1"
    folder = run_once(NAME, flags)
    (row,), size = rows(folder), n_bytes(state(folder))
    trained, empty = int(row["clients_trained"]), int(row["clients_empty"])
    assert trained + empty == 20 and empty > 0
    assert row["bytes_up"] == str(trained * (size + 4)) and row["bytes_down"] == str(trained * size)


def test_phase_2_is_as_long_as_phase_1():
    assert fedlabel.parse_args([]).unlabelled_epochs is None
    assert fedlabel.parse_args(["--two-phase"]).unlabelled_epochs == fedlabel.PRESETS["digits"]["local_epochs"] == 5
