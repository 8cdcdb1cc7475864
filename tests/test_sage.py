"""baselines/sage.py: the official program's figures, slow loops, limits that are FixMatch."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN
from worlds import step_of, world

from baselines import fixmatch, sage

KAPPA = math.log(2) / 0.05
FIGURES = np.load(GOLDEN / "sage_targets.npz")


def probabilities(rows, classes, scale=3.0):
    """Two teachers' probabilities, related to each other, float64."""
    generator = torch.Generator().manual_seed(0)
    shared, *own = (torch.randn(rows, classes, generator=generator, dtype=torch.float64) for _ in range(3))
    return [(scale * (shared + 0.5 * noise)).softmax(1) for noise in own]


# ---- the official program's figures -------------------------------------------------------------------------------

@pytest.mark.parametrize("case", FIGURES["case_names"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_official_targets_loss_and_gradient(case, dtype):
    """The official program adds 1e-10 to targets and probabilities before logarithms; its kappa is a float32."""
    figures = {key.split("__")[1]: FIGURES[key] for key in FIGURES.files if key.startswith(f"{case}__")}
    local_logits, global_logits, strong = (torch.from_numpy(figures[name]).to(dtype) for name in (
        "local_weak_logits", "global_weak_logits", "strong_logits"))
    strong.requires_grad_()
    threshold, temperature = float(figures["threshold"]), float(figures["temperature"])
    local_prob, global_prob = ((logits / temperature).softmax(1) for logits in (local_logits, global_logits))
    close = 5e-6 if dtype == torch.float32 else 1e-12

    weight = sage.local_weight(local_prob, global_prob, KAPPA)
    torch.testing.assert_close(weight.float(), torch.from_numpy(figures["weight_on_local"]), rtol=1e-5, atol=2e-6)
    target, mask = sage.sage_targets(local_prob, global_prob, threshold, float(np.float32(KAPPA)))
    assert mask.tolist() == figures["mask"].tolist()
    official = torch.from_numpy(figures["soft_targets_f64"])
    torch.testing.assert_close(target.double() + 1e-10, official, rtol=0, atol=close)

    loss, figure = sage.unlabelled_loss(strong, target, mask), figures["Lu_f64"].item()
    assert loss.item() == pytest.approx(figure, abs=5e-6)
    smooth, prob = target + 1e-10, strong.detach().softmax(1) + 1e-10      # with the addend: to the last digits
    smoothed = ((smooth * (smooth / prob).log()).sum(1) * mask).sum() / len(mask)
    assert smoothed.item() == pytest.approx(figure, abs=close)
    loss.backward()
    gradient = torch.from_numpy(figures["grad_strong_logits"])
    torch.testing.assert_close(strong.grad.float(), gradient, rtol=1e-5, atol=1e-7)
    assert not strong.grad[~mask].any()


# ---- weight, targets, loss ----------------------------------------------------------------------------------------

def teachers(local_conf, global_conf, classes=4):
    """One image's probabilities with the given maxima, of class 0 and of class 1."""
    pair = [torch.full((1, classes), (1 - confidence) / (classes - 1), dtype=torch.float64)
            for confidence in (local_conf, global_conf)]
    pair[0][0, 0], pair[1][0, 1] = local_conf, global_conf
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
    assert sage.local_weight(local, other, 0).item() == 1 and sage.parse_args([]).kappa == KAPPA


@pytest.mark.parametrize("kappa", [0, KAPPA, 1e9])
def test_targets_against_a_slow_loop(kappa):
    local_prob, global_prob = probabilities(200, 5)
    target, mask = sage.sage_targets(local_prob, global_prob, 0.9, kappa)
    kinds = set()
    for i, (q_l, q_g) in enumerate(zip(local_prob.tolist(), global_prob.tolist())):
        a_l, a_g, want = max(q_l), max(q_g), [0.0] * 5
        lam = min(1, max(1e-6, math.exp(-kappa * min(1, max(1e-6, abs(a_l - a_g) + 1e-6)))))
        if a_l >= 0.9:
            want[q_l.index(a_l)] += lam
            want[q_g.index(a_g)] += 1 - lam
        else:
            want[q_g.index(a_g)] = 1.0
        assert mask[i] == (a_l >= 0.9 or a_g >= 0.9)
        assert target[i].tolist() == pytest.approx(want, abs=1e-12)
        kinds.add((a_l >= 0.9, a_g >= 0.9, q_l.index(a_l) == q_g.index(a_g)))
    assert len(kinds) >= 7


@pytest.mark.parametrize("kappa", [0, 0.7, KAPPA, 1e9])
def test_one_class_named_by_both_is_exactly_one_hot(kappa):
    local_prob, global_prob = (prob.float() for prob in probabilities(300, 4, scale=2))
    target, _ = sage.sage_targets(local_prob, global_prob, 0.5, kappa)
    same = local_prob.argmax(1) == global_prob.argmax(1)
    assert 10 < same.sum() < 290
    assert torch.equal(target[same], F.one_hot(global_prob.argmax(1), 4).float()[same])


def test_loss_against_a_slow_loop_and_its_gradient():
    target, mask = sage.sage_targets(*probabilities(40, 5), 0.8, 2.0)
    strong = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    prob = strong.detach().softmax(1)
    want = sum(t * math.log(t / p) for i in range(40) if mask[i]
               for t, p in zip(target[i].tolist(), prob[i].tolist()) if t)
    loss = sage.unlabelled_loss(strong, target, mask)
    assert loss.item() == pytest.approx(want / 40, rel=1e-12) and 0 < mask.sum() < 40 and (target.amax(1) < 0.99).any()
    loss.backward()                                        # the cross-entropy's: the target's entropy is a constant
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
    strong = torch.randn(300, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = fixmatch.unlabelled_loss(strong, label, union)
    torch.testing.assert_close(sage.unlabelled_loss(strong, target, mask), want, rtol=0, atol=2e-5)
    plain = fixmatch.pseudo_labels(local_prob, global_prob, "global", 0.9)[1]
    assert not torch.equal(mask, plain)    # exact GPL only without an image that the local model alone is sure of


# ---- one step -----------------------------------------------------------------------------------------------------

def step(name, *flags):
    """A script's local step from one and the same networks and views: its total, values and networks."""
    w = world(f"baselines/{name}.py", flags=flags)
    w.net.eval(), w.teacher.eval()
    (loss, counts, values), *_ = step_of(w, 6, 40)
    return loss, counts, values, w


@pytest.mark.parametrize("flags", [[], ["--icpl"]])
def test_large_kappa_makes_a_step_of_gpl_with_the_union_mask(flags):
    loss, counts, values, w = step("sage", "--tau", 0.9, "--kappa", 1e9, *flags)
    want, want_counts, other, same = step("fixmatch", "--tau", 0.9, "--union-mask", *flags)
    loss.backward(), want.backward()
    assert torch.equal(values["used"], other["used"]) and 0 < values["used"].sum() < 40
    assert loss.item() == pytest.approx(want.item(), abs=1e-4) and torch.equal(counts, want_counts)
    for mine, theirs in zip(w.net.parameters(), same.net.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_large_kappa_differs_from_plain_gpl_only_where_the_local_model_alone_is_sure():
    values = step("sage", "--tau", 0.8, "--kappa", 1e9)[2]
    lpl, gpl = (step("fixmatch", "--tau", 0.8, "--teacher", who)[2] for who in ("local", "global"))
    local_alone = lpl["used"] & ~gpl["used"]
    assert torch.equal(values["used"][~local_alone], gpl["used"][~local_alone]) and gpl["used"].any()
    assert local_alone.any() and values["used"][local_alone].all()
    assert torch.equal(values["pseudo_label"], gpl["pseudo_label"])
    assert (lpl["pseudo_label"] != gpl["pseudo_label"])[lpl["used"]].any()


def test_temperature_divides_the_weak_logits_of_both_models():
    """T = 100 makes every teacher unsure; the strong logits keep their scale."""
    plain, soft = (step("sage", "--tau", 0.3, "--temperature", t)[2] for t in (1, 100))
    assert plain["used"].any() and not soft["used"].any() and soft["loss_unsup"] == 0
    every, warm = (step("sage", "--tau", 0, "--kappa", 0, "--temperature", t)[2] for t in (1, 3))
    assert every["loss_unsup"] == warm["loss_unsup"] > 0                   # classes do not change
