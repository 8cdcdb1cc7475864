"""FlexMatch: its thresholds against the published figures and slow loops, its limits, and what clients keep."""

import numpy as np
import pytest
import torch
from scripts import checkpoint, equal, rows
from worlds import step_of, update, world

import common
from baselines import fixmatch, flexmatch

NAME = "baselines/flexmatch.py"


# ---- thresholds ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("counts, unused, warm_up, expected", [
    ((0, 0, 0), 100, True, (0, 0, 0)), ((0, 0, 0), 100, False, (0, 0, 0)),
    ((10, 5, 0), 85, True, (0.0594, 0.0288, 0)), ((10, 5, 0), 85, False, (0.95, 0.3167, 0)),
    ((50, 25, 10), 15, True, (0.95, 0.3167, 0.1056)), ((50, 25, 10), 15, False, (0.95, 0.3167, 0.1056)),
    ((40, 40, 20), 0, True, (0.95, 0.95, 0.3167)), ((40, 40, 20), 0, False, (0.95, 0.95, 0.3167))])
def test_published_thresholds(counts, unused, warm_up, expected):
    memory = torch.repeat_interleave(torch.tensor([0, 1, 2, -1]), torch.tensor([*counts, unused]))
    status = flexmatch.learning_status(memory, torch.zeros(3), warm_up)
    assert flexmatch.class_thresholds(status, 0.95).tolist() == pytest.approx(expected, abs=5e-5)


def status_by_hand(memory, old, warm_up):
    values = memory.tolist()
    if len(set(values)) == 1:
        return old.tolist()
    counts = {value: values.count(value) for value in set(values) if warm_up or value >= 0}
    return [values.count(c) / max(counts.values()) for c in range(len(old))]


@pytest.mark.parametrize("warm_up", [True, False])
def test_learning_status_by_hand(warm_up):
    rng = np.random.default_rng(1)
    for size in (1, 2, 3, 17, 200):
        for _ in range(20):
            memory, old = torch.from_numpy(rng.integers(-1, rng.integers(1, 6), size)), torch.from_numpy(rng.random(6))
            status = flexmatch.learning_status(memory, old, warm_up)
            assert status.tolist() == pytest.approx(status_by_hand(memory, old, warm_up), rel=1e-6)
            by_hand = [0.9 * s / (2 - s) for s in status.tolist()]
            assert flexmatch.class_thresholds(status, 0.9).tolist() == pytest.approx(by_hand, rel=1e-6)
    old = torch.tensor([0.1, 0.7, 0.3, 0.0])
    for value in (-1, 2):                                                  # a memory of one value
        assert torch.equal(flexmatch.learning_status(torch.full((9,), value), old, warm_up), old)


def test_an_image_is_kept_by_the_threshold_of_its_class():
    torch.manual_seed(0)
    prob, threshold = (2 * torch.randn(300, 5)).softmax(1).double(), torch.tensor([0.0, 0.4, 0.6, 0.8, 0.95]).double()
    prob[0] = torch.tensor([0.2, 0.2, 0.6, 0, 0])                          # at the threshold
    label, used = flexmatch.pseudo_labels(prob, threshold)
    for i in range(300):
        best = max(range(5), key=lambda c: prob[i, c].item())
        assert label[i] == best and used[i] == (prob[i, best].item() >= threshold[best].item())
    assert used[0] and 0 < used[label == 4].sum() < (label == 4).sum() and used[label == 0].all()


def test_memory_takes_confident_predictions_and_never_goes_back():
    rng, memory, by_hand = np.random.default_rng(2), torch.full((30,), -1), [-1] * 30
    for _ in range(40):
        place, prob = torch.from_numpy(rng.permutation(30)[:8]), torch.from_numpy(rng.dirichlet([0.3] * 4, 8))
        flexmatch.update_memory(memory, place, prob, 0.8)
        for i, where in enumerate(place.tolist()):
            if prob[i].max() >= 0.8:                                       # the fixed threshold, whatever the class
                by_hand[where] = prob[i].argmax().item()
        assert memory.tolist() == by_hand
    assert (memory >= 0).sum() > 20
    flexmatch.update_memory(memory, torch.tensor([3]), torch.tensor([[0.75, 0.25]]), 0.75)
    assert memory[3] == 0                                                  # at the threshold


@pytest.mark.parametrize("n_lab", [0, 6])
def test_step_by_hand(n_lab):
    """Which views are learnt from, test_semi_supervised has for all scripts."""
    w = world(NAME, lambda_u=0.7)
    w.net.eval()
    (loss, values), views, label = step_of(w, n_lab, 40)
    threshold, log_prob = torch.tensor([0, 0.6, 0.9, 0.99]), w.net(views)[1].double().log_softmax(1)
    weak, strong = log_prob[n_lab:n_lab + 40].exp(), log_prob[n_lab + 40:]
    kept = [i for i in range(40) if weak[i].max() >= threshold[weak[i].argmax()]]
    assert 0 < len(kept) < 40 and values["used"].nonzero()[:, 0].tolist() == kept
    unsup = sum(-strong[i, weak[i].argmax()].item() for i in kept) / 40
    sup = sum(-log_prob[i, label[i]].item() for i in range(n_lab)) / max(n_lab, 1)
    assert loss.item() == pytest.approx(sup + 0.7 * unsup, abs=1e-5)
    torch.testing.assert_close(values["local_prob"].double(), weak.detach(), rtol=1e-5, atol=1e-6)


# ---- one client ---------------------------------------------------------------------------------------------------

def test_with_equal_classes_it_is_fixmatch_with_local_labels(monkeypatch):
    """A learning status of 1 is a threshold of tau for every class."""
    ours, theirs = (world(name, (6, 34), tau=0.5, lambda_u=0.7) for name in (NAME, "baselines/fixmatch.py"))
    theirs.args.teacher = "local"
    parent = update(theirs)
    assert not equal(update(ours).state, parent.state)
    monkeypatch.setattr(flexmatch, "learning_status", lambda memory, status, warm_up: torch.ones_like(status))
    upload = update(ours)
    used = dict(zip(fixmatch.METRICS, parent.metrics.tolist()))
    assert equal(upload.state, parent.state) and 0 < used["used"] < 0.9 * used["images"]
    assert upload.metrics.tolist() == [used[name] for name in flexmatch.METRICS]


def test_places_beyond_the_pool_do_not_count():
    """Were they counted as unused images, the warm-up would hold the thresholds down."""
    uploads, w = [], world(NAME, (4, 36), (0, 0), tau=0.4)
    for longest in (40, 4000):
        w.curricula = w.curricula._replace(memory=torch.full((2, longest), -1, dtype=torch.int16))
        uploads.append(update(w))
    assert (uploads[0].memory >= 0).sum() > 10 and uploads[0].status.amax() > 0.2
    assert torch.equal(uploads[0].memory, uploads[1].memory[:40]) and torch.equal(uploads[0].status, uploads[1].status)
    assert equal(uploads[0].state, uploads[1].state)


def test_a_client_goes_on_from_its_own_row_and_leaves_the_others():
    w = world(NAME, (4, 36), (0, 0), tau=0.4)
    before = flexmatch.Curricula(*(value.clone() for value in w.curricula))
    first, empty = update(w), update(w, client=1)
    assert equal(tuple(w.curricula), tuple(before))                        # nothing written in place
    kept = flexmatch.keep_curricula(w.curricula, [1, 0], [empty, first])
    assert torch.equal(kept.memory[0], first.memory) and torch.equal(kept.status[0], first.status)
    assert (kept.memory[1] == -1).all() and (kept.status[1] == 0).all() and equal(tuple(w.curricula), tuple(before))
    again, anew = update(w, curricula=kept, rnd=3), update(w, rnd=3)
    assert ((again.memory >= 0) | (first.memory < 0)).all() and (again.memory >= 0).sum() > (anew.memory >= 0).sum()
    assert not equal(again.state, anew.state)                              # other images passed
    one_value = kept._replace(memory=torch.ones_like(kept.memory), status=torch.tensor([[2.0] * 4] * 2))
    w.args.conf_threshold, w.args.lr = 2.0, 0.0            # nothing is remembered: the status stays
    assert torch.equal(update(w, curricula=one_value).status, one_value.status[0])


# ---- runs ---------------------------------------------------------------------------------------------------------

def test_the_memory_and_the_mean_threshold_that_is_logged(run_once):
    folder = run_once(NAME)
    saved, found = checkpoint(folder), [float(row["threshold_mean"]) for row in rows(folder)]
    assert saved["memory"].shape == (4, 50) and saved["memory"].dtype == torch.int16 and (saved["memory"] >= 0).any()
    assert -1 <= saved["memory"].min() and saved["memory"].max() < 10 and all(0 < value < 0.4 for value in found)
    selected = common.stream(1, "sampling", 2).choice(4, 3, replace=False)
    last = flexmatch.class_thresholds(saved["status"][selected], 0.4).mean().item()
    assert found[1] == pytest.approx(last, rel=1e-4)
    nothing = run_once(NAME, "--tau 1.5")
    assert (checkpoint(nothing)["memory"] == -1).all() and {row["threshold_mean"] for row in rows(nothing)} == {"0"}
