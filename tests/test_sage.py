"""baselines/sage.py: the official program's figures, slow loops, limits that are FixMatch, bytes, odd clients."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN
from scripts import equal, n_bytes, rows, state
from scripts import method as find_method
from worlds import tiny_args

from baselines import fixmatch, sage

METHOD = find_method("baselines/sage.py")
FIXMATCH = find_method("baselines/fixmatch.py")
KAPPA = math.log(2) / 0.05
FIGURES = np.load(GOLDEN / "sage_targets.npz")
PLUG_IN = "--gpt --icpl --gpt-epochs 2".split()


def probabilities(rows, classes, scale=3.0, seed=0):
    """Two teachers' probabilities, related to each other, float64."""
    generator = torch.Generator().manual_seed(seed)
    shared, *own = (torch.randn(rows, classes, generator=generator, dtype=torch.float64) for _ in range(3))
    return [(scale * (shared + 0.5 * noise)).softmax(1) for noise in own]


# ---- the official program's figures -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FIGURES["case_names"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_official_targets_loss_and_gradient(case, dtype):
    """The official program adds 1e-10 to targets and probabilities before logarithms; its kappa is a float32."""
    figures = {key.split("__")[1]: FIGURES[key] for key in FIGURES.files if key.startswith(f"{case}__")}
    local_logits, global_logits, strong = (
        torch.from_numpy(figures[name]).to(dtype)
        for name in ("local_weak_logits", "global_weak_logits", "strong_logits")
    )
    strong.requires_grad_()
    threshold, temperature = float(figures["threshold"]), float(figures["temperature"])
    local_prob, global_prob = ((logits / temperature).softmax(1) for logits in (local_logits, global_logits))
    close = dict(rtol=0, atol=5e-6 if dtype == torch.float32 else 1e-12)

    weight = sage.local_weight(local_prob, global_prob, KAPPA)
    torch.testing.assert_close(weight.float(), torch.from_numpy(figures["weight_on_local"]), rtol=1e-5, atol=2e-6)
    target, mask = sage.sage_targets(local_prob, global_prob, threshold, float(np.float32(KAPPA)))
    assert mask.tolist() == figures["mask"].tolist()
    assert figures["mask"].tolist() == (figures["mask_local"] | figures["mask_global"]).tolist()
    official = torch.from_numpy(figures["soft_targets_f64"])
    torch.testing.assert_close(target.double() + 1e-10, official, **close)

    loss = sage.unlabelled_loss(strong, target, mask)
    figure = figures["Lu_f64"].item()
    assert loss.item() == pytest.approx(figure, abs=5e-6)
    smooth, prob = target + 1e-10, strong.detach().softmax(1) + 1e-10  # with the addend: to the last digits
    smoothed = ((smooth * (smooth / prob).log()).sum(1) * mask).sum() / len(mask)
    assert smoothed.item() == pytest.approx(figure, abs=5e-6 if dtype == torch.float32 else 1e-12)
    loss.backward()
    gradient = torch.from_numpy(figures["grad_strong_logits"])
    torch.testing.assert_close(strong.grad.float(), gradient, rtol=1e-5, atol=1e-7)
    assert not strong.grad[~mask].any()


def test_the_figures_hold_every_kind_of_image():
    """Images that the local model alone, the global model alone, both or neither are sure of; different classes."""
    kinds, different = set(), False
    for case in FIGURES["case_names"]:
        local, mixed = FIGURES[f"{case}__mask_local"], FIGURES[f"{case}__soft_targets_f64"].max(1) < 0.99
        kinds |= set(zip(local.tolist(), FIGURES[f"{case}__mask_global"].tolist()))
        different |= bool((local & mixed).any())
    assert len(kinds) == 4 and different


# ---- weight, targets, loss ----------------------------------------------------------------------------------------


def teachers(local_conf, global_conf, local_label=0, global_label=1, classes=4):
    """One image's probabilities with the given maxima."""
    pair = []
    for confidence, label in ((local_conf, local_label), (global_conf, global_label)):
        prob = torch.full((1, classes), (1 - confidence) / (classes - 1), dtype=torch.float64)
        prob[0, label] = confidence
        pair.append(prob)
    return pair


@pytest.mark.parametrize("gap, weight", [(0, 0.99999), (0.05, 0.5), (0.1, 0.25), (0.3, 0.015625)])
@pytest.mark.parametrize("sign", [1, -1])
def test_weight_of_the_local_class_by_the_gap(gap, weight, sign):
    local, other = teachers(0.65 + sign * gap / 2, 0.65 - sign * gap / 2)
    assert sage.local_weight(local, other, KAPPA).item() == pytest.approx(weight, rel=2e-5)


def test_weight_stays_within_its_bounds():
    local, other = teachers(1.0, 0.25)
    assert sage.local_weight(local, other, 1e308).item() == sage.local_weight(local, other, KAPPA * 9).item() == 1e-6
    assert sage.local_weight(local.float(), other.float(), 1e308).item() == pytest.approx(1e-6)
    assert sage.local_weight(local, other, 0).item() == 1
    assert METHOD.module.parse_args(METHOD.short).kappa == pytest.approx(13.863, abs=1e-3)


def test_targets_against_a_slow_loop():
    local_prob, global_prob = probabilities(200, 5)
    target, mask = sage.sage_targets(local_prob, global_prob, 0.9, KAPPA)
    kinds = set()
    for i, (q_l, q_g) in enumerate(zip(local_prob.tolist(), global_prob.tolist())):
        a_l, a_g = max(q_l), max(q_g)
        lam = min(1, max(1e-6, math.exp(-KAPPA * min(1, max(1e-6, abs(a_l - a_g) + 1e-6)))))
        want = [0.0] * 5
        if a_l >= 0.9:
            want[q_l.index(a_l)] += lam
            want[q_g.index(a_g)] += 1 - lam
        else:
            want[q_g.index(a_g)] = 1.0
        assert mask[i] == (a_l >= 0.9 or a_g >= 0.9)
        assert target[i].tolist() == pytest.approx(want, abs=1e-12)
        kinds.add((a_l >= 0.9, a_g >= 0.9, q_l.index(a_l) == q_g.index(a_g)))
    assert len(kinds) >= 7
    torch.testing.assert_close(target.sum(1), torch.ones(200, dtype=torch.float64))


def test_an_image_of_which_the_local_model_alone_is_sure_gets_the_unsure_global_class():
    target, mask = sage.sage_targets(*teachers(0.96, 0.31), 0.95, KAPPA)
    assert mask.item() and target[0, 0].item() == pytest.approx(1.2e-4, rel=0.03) and target[0, 1] > 0.9998
    target, mask = sage.sage_targets(*teachers(0.31, 0.96), 0.95, KAPPA)
    assert mask.item() and target[0].tolist() == [0, 1, 0, 0]
    assert not sage.sage_targets(*teachers(0.31, 0.31), 0.95, KAPPA)[1].item()


@pytest.mark.parametrize("kappa", [0, 0.7, KAPPA, 1e9])
def test_one_class_named_by_both_is_exactly_one_hot(kappa):
    local_prob, global_prob = (prob.float() for prob in probabilities(300, 4, scale=2))
    target, _ = sage.sage_targets(local_prob, global_prob, 0.5, kappa)
    same = local_prob.argmax(1) == global_prob.argmax(1)
    assert 10 < same.sum() < 290
    assert torch.equal(target[same], F.one_hot(global_prob.argmax(1), 4).float()[same])


def test_loss_against_a_slow_loop_and_its_gradient():
    local_prob, global_prob = probabilities(40, 5)
    target, mask = sage.sage_targets(local_prob, global_prob, 0.8, 2.0)
    strong = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    prob, want = strong.detach().softmax(1), 0.0
    for i in range(40):
        if mask[i]:
            want += sum(t * math.log(t / p) for t, p in zip(target[i].tolist(), prob[i].tolist()) if t > 0)
    loss = sage.unlabelled_loss(strong, target, mask)
    assert loss.item() == pytest.approx(want / 40, rel=1e-12) and 0 < mask.sum() < 40 and (target.amax(1) < 0.99).any()
    loss.backward()  # that of the cross-entropy: the entropy of the target is a constant
    torch.testing.assert_close(strong.grad, (prob - target) * mask[:, None] / 40)
    strong.grad = None
    nothing = sage.unlabelled_loss(strong, target, torch.zeros(40, dtype=torch.bool))
    nothing.backward()
    assert nothing.item() == 0 and not strong.grad.any()


# ---- limits -------------------------------------------------------------------------------------------------------


def test_large_kappa_is_gpl_with_the_union_mask():
    local_prob, global_prob = probabilities(300, 5)
    target, mask = sage.sage_targets(local_prob, global_prob, 0.9, 1e9)
    label, union = fixmatch.pseudo_labels(local_prob, global_prob, "global", 0.9, union_mask=True)
    assert torch.equal(mask, union) and (target - F.one_hot(label, 5)).abs().max() <= 1.001e-6
    both = (local_prob.amax(1) < 0.9) | (local_prob.argmax(1) == label)  # elsewhere 1e-6 of the local class is left
    assert torch.equal(target[both], F.one_hot(label, 5).double()[both]) and not both.all()
    strong = torch.randn(300, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = fixmatch.unlabelled_loss(strong, label, union)
    torch.testing.assert_close(sage.unlabelled_loss(strong, target, mask), want, rtol=0, atol=2e-5)
    plain = fixmatch.pseudo_labels(local_prob, global_prob, "global", 0.9)[1]
    assert not torch.equal(mask, plain)  # exact GPL only without an image that the local model alone is sure of


def test_kappa_0_takes_the_local_class_where_it_is_confident():
    local_prob, global_prob = probabilities(300, 5)
    sure = local_prob.amax(1) >= 0.9
    label = torch.where(sure, local_prob.argmax(1), global_prob.argmax(1))
    target, _ = sage.sage_targets(local_prob, global_prob, 0.9, 0)
    assert torch.equal(target, F.one_hot(label, 5).double())
    assert (local_prob.argmax(1) != global_prob.argmax(1))[sure].any()


def test_equal_teachers_make_sage_lpl_and_gpl():
    prob = probabilities(200, 5)[0]
    target, mask = sage.sage_targets(prob, prob, 0.9, KAPPA)
    for teacher in ("local", "global"):
        label, confident = fixmatch.pseudo_labels(prob, prob, teacher, 0.9)
        assert torch.equal(mask, confident) and torch.equal(target, F.one_hot(label, 5).double())
    strong = torch.randn(200, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        sage.unlabelled_loss(strong, target, mask), fixmatch.unlabelled_loss(strong, label, confident)
    )


# ---- one step -----------------------------------------------------------------------------------------------------


def step(module, *flags, n_lab=6, classes=4, n_unl=10, frozen=False):
    """local_loss of a script for one random batch: args, net, teacher, its result. frozen: net is the teacher."""
    args = tiny_args(find_method(f"{module.__name__.replace('.', '/')}.py"), *flags)
    torch.manual_seed(0)
    net, teacher = (module.ResNet8(classes, 8, heads=args.icpl).double() for _ in range(2))
    net.train(), teacher.eval()
    for model in (net, teacher):
        model.classifier.weight.data *= 8  # confidences on both sides of the threshold
    views = torch.randn(n_lab + 2 * n_unl, 3, 8, 8, dtype=torch.float64)
    if frozen:
        for _ in range(20):
            net(views)  # statistics of these images, else all get one class
        teacher.load_state_dict(net.eval().state_dict())
    label, prior = torch.arange(n_lab) % classes, torch.full((classes,), 1 / classes, dtype=torch.float64)
    # float64: forward's .float() would round
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "forward", lambda model, views, amp: model(views))
        return args, net, teacher, module.local_loss(args, net, teacher, views, label, prior)


@pytest.mark.parametrize("flags", [["--tau", 0.9], ["--tau", 0.9, "--icpl"]])
def test_large_kappa_makes_a_step_of_gpl_with_the_union_mask(flags):
    _, net, _, (loss, counts, values) = step(sage, *flags, "--kappa", 1e9)
    _, same, _, (want, want_counts, other) = step(fixmatch, *flags, "--union-mask")
    loss.backward(), want.backward()
    assert torch.equal(values["used"], other["used"]) and 0 < values["used"].sum() < 10
    assert loss.item() == pytest.approx(want.item(), abs=1e-4) and torch.equal(counts, want_counts)
    for mine, theirs in zip(net.parameters(), same.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_frozen_model_that_is_the_teacher_makes_steps_of_lpl_and_gpl():
    _, _, _, (loss, _, values) = step(sage, "--tau", 0.8, n_unl=40, frozen=True)
    assert 0 < values["used"].sum() < 40 and values["pseudo_label"].unique().numel() > 1
    for who in ("local", "global"):
        _, _, _, (want, _, other) = step(fixmatch, "--tau", 0.8, "--teacher", who, n_unl=40, frozen=True)
        assert equal(*([found[name] for name in ("pseudo_label", "used")] for found in (values, other)))
        torch.testing.assert_close(loss, want, rtol=1e-10, atol=0)


def test_large_kappa_differs_from_plain_gpl_only_where_the_local_model_alone_is_sure():
    _, _, _, (_, _, values) = step(sage, "--tau", 0.7, "--kappa", 1e9, n_unl=40)
    lpl, gpl = (step(fixmatch, "--tau", 0.7, "--teacher", who, n_unl=40)[3][2] for who in ("local", "global"))
    local_alone = lpl["used"] & ~gpl["used"]
    assert torch.equal(values["used"][~local_alone], gpl["used"][~local_alone]) and gpl["used"].any()
    assert local_alone.any() and values["used"][local_alone].all()
    assert torch.equal(values["pseudo_label"], gpl["pseudo_label"])
    assert (lpl["pseudo_label"] != gpl["pseudo_label"])[lpl["used"]].any()


def test_gradient_reaches_no_teacher_and_not_through_weak_views():
    args, net, teacher, (_, _, values) = step(sage, "--tau", 0.3)
    values["loss_unsup"].backward()
    assert all(parameter.grad is None for parameter in teacher.parameters()) and net.classifier.weight.grad.any()
    logits = torch.randn(26, 4, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        answers = iter([(None, logits), (None, torch.randn(10, 4, dtype=torch.float64))])
        patch.setattr(sage, "forward", lambda *_: next(answers))
        views, prior = torch.zeros(26, 3, 8, 8), torch.full((4,), 0.25)
        loss, _, values = sage.local_loss(args, net, teacher, views, torch.arange(6) % 4, prior)
    loss.backward()
    assert (
        logits.grad[:6].any() and not logits.grad[6:16].any() and torch.equal(logits.grad[16:].any(1), values["used"])
    )


def test_temperature_divides_the_weak_logits_of_both_models():
    """T = 100 makes every teacher unsure; the strong logits keep their scale."""
    _, _, _, (_, _, plain) = step(sage, "--tau", 0.3)
    _, _, _, (_, _, soft) = step(sage, "--tau", 0.3, "--temperature", 100)
    assert plain["used"].any() and not soft["used"].any() and soft["loss_unsup"] == 0
    _, _, _, (_, _, every) = step(sage, "--tau", 0, "--kappa", 0)
    _, _, _, (_, _, warm) = step(sage, "--tau", 0, "--kappa", 0, "--temperature", 3)  # classes do not change
    assert every["loss_unsup"] == warm["loss_unsup"] > 0


# ---- runs ---------------------------------------------------------------------------------------------------------


def test_nothing_used_is_fixmatch_bit_by_bit(tmp_path):
    other = FIXMATCH.train(tmp_path, "--tau", 1.5, "--rounds", 1, name="fixmatch")
    mine = METHOD.train(tmp_path, "--tau", 1.5, "--rounds", 1, name="none")
    assert equal(state(mine), state(other))
    for row in rows(mine):
        assert row["loss_unsup"] == "0" and row["pl_used_acc_pct"] == "" and row["pl_used_pct"] == "0"


def test_bytes_are_those_of_fedavg_and_of_the_prior(tmp_path):
    plain = METHOD.train(tmp_path, "--rounds", 1, name="plain")
    plugged = METHOD.train(tmp_path, "--rounds", 1, *PLUG_IN, name="plugged")
    for folder, more in ((plain, 0), (plugged, 4 * 10)):
        size = n_bytes(state(folder)) + more
        for row in rows(folder):
            assert row["clients_trained"] == "3" and row["bytes_up"] == row["bytes_down"] == str(3 * size)
            assert (row["loss_icpl"] == "") == (more == 0) and "loss_prox" not in row


def test_presets_are_those_of_fixmatch():
    assert sage.PRESETS == fixmatch.PRESETS and set(sage.PRESETS["digits"]) <= set(vars(METHOD.module.parse_args([])))
