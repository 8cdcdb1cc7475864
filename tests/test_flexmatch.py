"""FlexMatch: its thresholds against the published figures and slow loops, its limits, and what clients keep."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scripts import checkpoint, equal, n_bytes, rows, state
from scripts import method as find_method
from worlds import sgd, tiny_args, tiny_data, tiny_nets, tiny_state

import common
from baselines import fixmatch, flexmatch

METHOD, FIXMATCH = find_method("baselines/flexmatch.py"), find_method("baselines/fixmatch.py")
train = METHOD.train
SMALL = ["--train-subset", 100]


def memory_of(counts, unused):
    """A memory with so many entries of each class, shuffled."""
    values = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)] + [torch.full((unused,), -1)])
    return values[torch.from_numpy(np.random.default_rng(0).permutation(len(values)))]


def thresholds(memory, old, warm_up, tau=0.95):
    return flexmatch.class_thresholds(flexmatch.learning_status(memory, old, warm_up), tau)


# ---- thresholds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counts, unused, warm_up, expected",
    [
        ((0, 0, 0), 100, True, (0, 0, 0)),
        ((0, 0, 0), 100, False, (0, 0, 0)),
        ((10, 5, 0), 85, True, (0.0594, 0.0288, 0)),
        ((10, 5, 0), 85, False, (0.95, 0.3167, 0)),
        ((50, 25, 10), 15, True, (0.95, 0.3167, 0.1056)),
        ((50, 25, 10), 15, False, (0.95, 0.3167, 0.1056)),
        ((40, 40, 20), 0, True, (0.95, 0.95, 0.3167)),
        ((40, 40, 20), 0, False, (0.95, 0.95, 0.3167)),
    ],
)
def test_published_thresholds(counts, unused, warm_up, expected):
    found = thresholds(memory_of(counts, unused), torch.zeros(3), warm_up)
    assert found.tolist() == pytest.approx(expected, abs=5e-5)


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
            torch.testing.assert_close(
                status.double(), torch.tensor(status_by_hand(memory, old, warm_up)).double(), rtol=1e-6, atol=0
            )
            found = flexmatch.class_thresholds(status.double(), 0.9)
            assert (found <= 0.9).all() and (found >= 0).all()
            for c in range(6):
                assert found[c].item() == pytest.approx(0.9 * status[c].item() / (2 - status[c].item()), abs=1e-12)


@pytest.mark.parametrize("value", [-1, 2])
@pytest.mark.parametrize("warm_up", [True, False])
def test_a_memory_of_one_value_keeps_the_old_status(value, warm_up):
    old = torch.tensor([0.1, 0.7, 0.3, 0.0])
    assert torch.equal(flexmatch.learning_status(torch.full((9,), value), old, warm_up), old)


def test_an_image_is_kept_by_the_threshold_of_its_class():
    torch.manual_seed(0)
    prob, threshold = (2 * torch.randn(300, 5)).softmax(1).double(), torch.tensor([0.0, 0.4, 0.6, 0.8, 0.95]).double()
    prob[0] = torch.tensor([0.2, 0.2, 0.6, 0, 0])  # at the threshold
    label, used = flexmatch.pseudo_labels(prob, threshold)
    for i in range(300):
        best = max(range(5), key=lambda c: prob[i, c].item())
        assert label[i] == best and used[i] == (prob[i, best].item() >= threshold[best].item())
    assert used[0] and 0 < used[label == 4].sum() < (label == 4).sum() and used[label == 0].all()
    same, plain = fixmatch.pseudo_labels(prob, None, "local", 0.6)  # equal thresholds are FixMatch's
    assert equal(flexmatch.pseudo_labels(prob, torch.full((5,), 0.6).double()), (same, plain))


def test_memory_takes_confident_predictions_and_never_goes_back():
    rng = np.random.default_rng(2)
    memory, by_hand = torch.full((30,), -1), [-1] * 30
    for _ in range(40):
        place = torch.from_numpy(rng.permutation(30)[:8])
        prob = torch.from_numpy(rng.dirichlet([0.3] * 4, 8))
        before = memory.clone()
        flexmatch.update_memory(memory, place, prob, 0.8)
        for i, where in enumerate(place.tolist()):
            if prob[i].max() >= 0.8:  # the fixed threshold, whatever the class
                by_hand[where] = prob[i].argmax().item()
        assert memory.tolist() == by_hand and ((memory >= 0) | (before < 0)).all()
    assert (memory >= 0).sum() > 20
    exact = torch.tensor([[0.75, 0.25]])
    flexmatch.update_memory(memory, torch.tensor([3]), exact, 0.75)
    assert memory[3] == 0  # at the threshold


# ---- one step -------------------------------------------------------------------------------------------------------


def step(logits, label, threshold, *flags):
    """local_loss with the network's answer given."""
    args = flexmatch.parse_args(list(flags))
    args.amp = False
    views = torch.zeros(len(logits), 3, 8, 8)
    return flexmatch.local_loss(args, lambda views: (torch.zeros(len(views), 2), logits), views, label, threshold)


@pytest.mark.parametrize("n_lab", [0, 6])
def test_step_by_hand_and_its_gradients(n_lab):
    torch.manual_seed(3)
    logits = (2 * torch.randn(n_lab + 24, 4)).requires_grad_()
    label, threshold = torch.randint(4, (n_lab,)), torch.tensor([0.0, 0.5, 0.8, 0.99])
    loss, values = step(logits, label, threshold, "--lambda-u", "0.7")
    log_prob, prob = logits.detach().double().log_softmax(1), logits.detach().double().softmax(1)
    weak, strong = prob[n_lab : n_lab + 12], log_prob[n_lab + 12 :]
    kept = [i for i in range(12) if weak[i].max() >= threshold[weak[i].argmax()]]
    assert 0 < len(kept) < 12 and values["used"].nonzero()[:, 0].tolist() == kept
    unsup = sum(-strong[i, weak[i].argmax()].item() for i in kept) / 12
    sup = sum(-log_prob[i, label[i]].item() for i in range(n_lab)) / max(n_lab, 1)
    assert loss.item() == pytest.approx(sup + 0.7 * unsup, abs=1e-5)
    loss.backward()
    moved = (logits.grad != 0).any(1)
    assert moved[:n_lab].all() and not moved[n_lab : n_lab + 12].any()  # weak views teach, they do not learn
    assert moved[n_lab + 12 :].nonzero()[:, 0].tolist() == kept


def test_without_a_kept_image_or_weight_nothing_unlabelled_counts():
    torch.manual_seed(3)
    for flags, threshold in (([], 2.0), (["--lambda-u", "0"], 0.0)):
        logits = torch.randn(30, 4, requires_grad=True)
        loss, values = step(logits, torch.zeros(6, dtype=torch.int64), torch.full((4,), threshold), *flags)
        loss.backward()
        assert loss.item() == values["loss_sup"].item() and (logits.grad[6:] == 0).all()
        assert (values["loss_unsup"].item() == 0) == (threshold == 2)


def test_a_local_step_reads_nothing_back_to_the_host(monkeypatch):
    """On the meta device there are no values: a step that asks for one, or whose shapes depend on one, fails."""
    args = flexmatch.parse_args([])
    args.amp = False
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # it knows no meta device
    with torch.device("meta"):
        net, memory, place = flexmatch.ResNet8(10, 8), torch.empty(50).long(), torch.empty(8).long()
        status = flexmatch.learning_status(memory, torch.empty(10), args.warm_up)
        loss, values = flexmatch.local_loss(
            args, net, torch.empty(22, 3, 8, 8), torch.empty(6).long(), flexmatch.class_thresholds(status, 0.95)
        )
        loss.backward()
        flexmatch.update_memory(memory, place, values["local_prob"], 0.95)
        batch = SimpleNamespace(truth=place, hidden=place > 0, label=torch.empty(6))
        assert flexmatch.step_metrics(values, batch).shape == (len(flexmatch.METRICS),)


# ---- one client -----------------------------------------------------------------------------------------------------


def world(n_labelled, n_unlabelled, *flags, longest=60):
    """A client of the given size and an empty one. Returns client_update's arguments but the client."""
    args = tiny_args(METHOD, *flags)
    (net,) = tiny_nets(flexmatch, args, 1)
    return SimpleNamespace(
        args=args,
        data=tiny_data(flexmatch, (n_labelled, n_unlabelled), (0, 0)),
        received=flexmatch.Broadcast(tiny_state(net)),
        curricula=flexmatch.Curricula(torch.full((2, longest), -1, dtype=torch.int16), torch.zeros(2, 4)),
        net=net,
        optimizer=sgd(args, net),
    )


def update(w, client=0, curricula=None, rnd=1):
    curricula = w.curricula if curricula is None else curricula
    return flexmatch.client_update(w.args, rnd, client, w.data, w.received, curricula, w.net, w.optimizer)


def test_places_beyond_the_pool_do_not_count():
    """Were they counted as unused images, the warm-up would hold the thresholds down."""
    uploads = [update(world(4, 36, "--tau", 0.4, longest=longest)) for longest in (40, 4000)]
    assert (uploads[0].memory >= 0).sum() > 10 and uploads[0].status.amax() > 0.2
    assert torch.equal(uploads[0].memory, uploads[1].memory[:40]) and torch.equal(uploads[0].status, uploads[1].status)
    assert equal(uploads[0].state, uploads[1].state)


def test_a_client_goes_on_from_its_own_row_and_leaves_the_others():
    w = world(4, 36, "--tau", 0.4)
    before = flexmatch.Curricula(*(value.clone() for value in w.curricula))
    first, empty = update(w), update(w, client=1)
    assert equal(tuple(w.curricula), tuple(before))  # nothing written in place
    kept = flexmatch.keep_curricula(w.curricula, [1, 0], [empty, first])
    assert torch.equal(kept.memory[0], first.memory) and torch.equal(kept.status[0], first.status)
    assert (kept.memory[1] == -1).all() and (kept.status[1] == 0).all()
    assert equal(tuple(flexmatch.keep_curricula(kept, [1], [empty])), tuple(kept))
    again, anew = update(w, curricula=kept, rnd=2), update(w, rnd=2)
    assert ((again.memory >= 0) | (first.memory < 0)).all() and (again.memory >= 0).sum() > (anew.memory >= 0).sum()
    assert not equal(again.state, anew.state)  # other images passed
    one_value = kept._replace(memory=torch.ones_like(kept.memory), status=torch.tensor([[2.0] * 4] * 2))
    w.args.conf_threshold = 2.0  # nothing is remembered, and at status 2 nothing passes: only if the status was kept
    w.args.lr = 0.0
    assert torch.equal(update(w, curricula=one_value).status, one_value.status[0])


# ---- runs -----------------------------------------------------------------------------------------------------------


def same_training(a, b):
    """Equal models in every round, as far as the columns that both scripts have tell, and at the end bit by bit."""
    first, second = rows(a), rows(b)
    shared = (set(first[0]) & set(second[0])) - {"bytes_up", "bytes_down"}
    assert {"test_acc_pct", "loss_unsup", "pl_used_pct"} <= shared
    same_rows = [{key: row[key] for key in shared} for row in first] == [
        {key: row[key] for key in shared} for row in second
    ]
    return same_rows and equal(state(a), state(b))


def test_with_equal_classes_it_is_fixmatch_with_local_labels(tmp_path, monkeypatch):
    """A learning status of 1 is a threshold of tau for every class."""
    flags = [*SMALL, "--tau", 0.5, "--lambda-u", 0.7]
    plain = FIXMATCH.train(tmp_path, "--teacher", "local", *flags, name="fixmatch")
    assert float(rows(plain)[1]["pl_used_pct"]) < 90
    assert not same_training(train(tmp_path, *flags, name="flexmatch"), plain)
    monkeypatch.setattr(flexmatch, "learning_status", lambda memory, status, warm_up: torch.ones_like(status))
    assert same_training(train(tmp_path, *flags, name="ones"), plain)


def test_tau_zero_and_above_one_let_every_image_pass(tmp_path):
    everything = FIXMATCH.train(tmp_path, *SMALL, "--teacher", "local", "--tau", 0, name="fixmatch")
    for tau in (0, 1.5):  # above 1 nothing is remembered: all classes stay at 0
        folder = train(tmp_path, *SMALL, "--tau", tau, name=f"tau{tau}")
        assert same_training(folder, everything)
        assert all(row["pl_used_pct"] == "100" and row["threshold_mean"] == "0" for row in rows(folder))
    assert (checkpoint(folder)["memory"] == -1).all()


def test_warm_up_holds_thresholds_down(tmp_path):
    on, off = (
        train(tmp_path, *SMALL, f"--{name}", "--tau", 0.3, "--batch-size", 8, name=name)
        for name in ("warm-up", "no-warm-up")
    )
    assert float(rows(on)[0]["threshold_mean"]) < float(rows(off)[0]["threshold_mean"])
    assert checkpoint(on)["status"].amax() <= 1 and not equal(state(on), state(off))


def test_run_folder_bytes_and_memory(tmp_path):
    folder = train(tmp_path, "--width", 8, "--tau", 0.5)
    size = n_bytes(flexmatch.ResNet8(10, 8).state_dict())
    assert all(row["bytes_up"] == row["bytes_down"] == str(3 * size) for row in rows(folder))  # no word of the memory
    saved = checkpoint(folder)
    assert saved["memory"].shape == (4, 50) and saved["memory"].dtype == torch.int16
    assert -1 <= saved["memory"].min() and saved["memory"].max() < 10
    found = [float(row["threshold_mean"]) for row in rows(folder)]
    assert all(0 < value < 0.5 for value in found)
    selected = common.stream(1, "sampling", 2).choice(4, 3, replace=False)
    last = flexmatch.class_thresholds(saved["status"][selected], 0.5).mean().item()
    assert found[1] == pytest.approx(last, rel=1e-4)


def test_the_settings_of_the_shared_tests_carry_a_memory_over(tmp_path):
    assert (checkpoint(train(tmp_path))["memory"] >= 0).any()


def test_help_names_the_reconstruction(capsys):
    with pytest.raises(SystemExit):
        flexmatch.parse_args(["--help"])
    assert "a reconstruction" in capsys.readouterr().out


def test_the_unlabelled_loss_divides_by_all_images():
    logits, label = torch.randn(8, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    mask = torch.tensor([True, True, False, False, False, False, False, False])
    expected = F.cross_entropy(logits[:2], label[:2], reduction="sum") / 8
    torch.testing.assert_close(flexmatch.unlabelled_loss(logits, label, mask), expected)
