"""The pseudo-labels of fedcopl.py beside FedCoPL's own: FPL, IFPL, GRIP, CPL; against slow loops and at limits."""

import math
import random
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scripts import labels_table, rows
from scripts import method as find_method
from test_bad_input import complaint
from test_fedcopl_maths import ONE_PROCESS, random_prob, settings, slow_quantile
from test_fedcopl_run import CLASSES, CLIENTS, VISUAL

import fedcopl

METHOD = find_method("fedcopl.py")
SHORT, train = METHOD.short, METHOD.train


def random_sets(seed, n, classes, share=0.5):
    """Candidate sets (n, C) of any size, none included."""
    return torch.rand(n, classes, generator=torch.Generator().manual_seed(seed)) < share


# ---- the loss -----------------------------------------------------------------------------------------------------


def with_gradient(loss, logits, target):
    logits = logits.clone().requires_grad_()
    value = loss(logits, target)
    value.backward()
    return value.detach(), logits.grad


@pytest.mark.parametrize("scale", [1, 30, 1000])
def test_loss_of_one_candidate_is_cross_entropy_with_the_same_gradient_to_the_last_bit(scale):
    """So is the loss of each image; their mean is summed in another order."""
    logits = scale * torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    label = torch.arange(64) % 10
    ours = with_gradient(fedcopl.candidate_loss, logits, F.one_hot(label, 10).bool())
    theirs = with_gradient(F.cross_entropy, logits, label)
    assert torch.equal(ours[1], theirs[1]) and theirs[1].any()
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-6)
    for row, own in zip(logits[:, None], label[:, None]):
        assert fedcopl.candidate_loss(row, F.one_hot(own, 10).bool()) == F.cross_entropy(row, own)


def test_loss_of_all_classes_is_zero_and_each_further_candidate_lowers_it():
    logits = 3 * torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value, gradient = with_gradient(fedcopl.candidate_loss, logits, torch.ones(8, 6).bool())
    assert value.abs() < 1e-12 and gradient.abs().max() < 1e-12
    for seed in range(10):
        order = torch.rand(8, 6, generator=torch.Generator().manual_seed(seed)).argsort(1).argsort(1)
        losses = [fedcopl.candidate_loss(logits, order < size).item() for size in range(1, 7)]
        assert all(a > b for a, b in zip(losses, losses[1:])) and losses[-1] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("n, classes", [(1, 2), (7, 5), (20, 3)])
def test_loss_and_gradient_against_a_slow_loop(n, classes):
    logits = 4 * torch.randn(n, classes, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    sets = random_sets(n, n, classes)
    sets[torch.arange(n), torch.arange(n) % classes] = True  # nobody without a candidate reaches the loss
    total, gradient = 0.0, []
    for row, candidate in zip(logits.tolist(), sets.tolist()):
        power = [math.exp(value) for value in row]
        inside = sum(p for p, c in zip(power, candidate) if c)
        total -= math.log(inside / sum(power)) / n
        gradient.append([(p / sum(power) - (p / inside if c else 0)) / n for p, c in zip(power, candidate)])
    value, found = with_gradient(fedcopl.candidate_loss, logits, sets)
    assert value.item() == pytest.approx(total, rel=1e-10, abs=1e-12)
    torch.testing.assert_close(found, torch.tensor(gradient, dtype=torch.float64), atol=1e-12, rtol=1e-9)


def test_loss_of_extreme_logits_is_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, 1e4], [1e30, -1e30, 0.0], [-100.0, -100.0, -100.0]])
    sets = torch.tensor([[False, True, True], [True, True, False], [False, False, True], [True, False, True]])
    value, gradient = with_gradient(fedcopl.candidate_loss, logits, sets)
    assert value.isfinite() and gradient.isfinite().all()
    only = fedcopl.candidate_loss(logits[:2], sets[:2]).item()
    assert only == pytest.approx((1e4 + 2e4 - math.log(2)) / 2)


# ---- CPL's candidates ---------------------------------------------------------------------------------------------


def slow_intra(prob, quantile):
    """By row: classes in falling order while the running sum stays at or below the bound, and the first above it."""
    theta, sets = slow_quantile([max(row) for row in prob], quantile), []
    for row in prob:
        kept, total = set(), 0.0
        for c in sorted(range(len(row)), key=lambda c: -row[c]):
            kept.add(c)
            total += row[c]
            if total > theta:
                break
        sets.append(kept)
    return sets


def slow_inter(prob, quantile):
    """By class: the images at or above the quantile of the column."""
    bounds = [slow_quantile(column, quantile) for column in zip(*prob)]
    return [{c for c, p in enumerate(row) if p >= bounds[c]} for row in prob]


def slow_sets(prob, intra, inter):
    """The intersection without what has 1e-7 or less of the row's kept mass, as (n, C) bool."""
    sets = []
    for row, first, second in zip(prob, slow_intra(prob, intra), slow_inter(prob, inter)):
        mass = sum(row[c] for c in first & second)
        sets.append([c in first & second and row[c] / mass > 1e-7 for c in range(len(row))])
    return sets


@pytest.mark.parametrize("intra", [0.0, 0.45, 0.75, 1.0])
@pytest.mark.parametrize("inter", [0.0, 0.5, 0.8, 0.99, 1.0])
@pytest.mark.parametrize("n, classes", [(1, 4), (2, 3), (41, 6)])
def test_candidate_sets_against_slow_loops(n, classes, intra, inter):
    prob = random_prob(n, n, classes)
    sets = fedcopl.candidate_sets(prob, intra, inter)
    assert sets.dtype == torch.bool and sets.tolist() == slow_sets(prob.tolist(), intra, inter)
    for single in (slow_intra(prob.tolist(), intra), slow_inter(prob.tolist(), inter)):
        assert all(own <= len(others) for own, others in zip(sets.sum(1).tolist(), single))  # never larger than either
    if n == 41 and inter >= 0.8:
        assert not sets.any(1).all()  # rows without candidates were among them
    if inter == 1:
        assert sets.sum() <= classes
    if inter == 0:
        assert (sets.any(1) & sets[torch.arange(n), prob.argmax(1)]).all()  # arg-max always passes the first rule


def test_candidate_sets_of_no_image_and_of_one():
    assert fedcopl.candidate_sets(torch.zeros(0, 5), 0.75, 0.8).shape == (0, 5)
    assert not fedcopl.candidate_sets(torch.zeros(0, 5), 0.75, 0.8).any()
    one = torch.tensor([[0.1, 0.6, 0.3]])  # its own confidence is the bound: the first sum above it is the second class
    assert fedcopl.candidate_sets(one, 0.75, 0.8).tolist() == [[False, True, True]]


@pytest.mark.parametrize("theta, kept", [(0.5, [0]), (0.8, [0, 1]), (0.95, [0, 1, 2])])
def test_intra_rule_on_a_row(theta, kept):
    """The bound is the confidence of a second image; a quantile of 0 of each class keeps every image."""
    prob = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.9 - theta, theta]], dtype=torch.float64)
    sets = fedcopl.candidate_sets(prob.clamp(min=0.01), float(theta > 0.7), 0)
    assert sets[0].nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("n, quantile, of_class", [(200, 0.8, 40), (200, 0.95, 10), (21, 0.5, 11), (10, 0, 10)])
def test_inter_rule_keeps_its_share_of_every_class(n, quantile, of_class):
    """For distinct values; a certain image makes the intra rule pass everything."""
    prob = random_prob(5, n, 4, scale=1.0)
    prob[0] = torch.tensor([1.0, 0, 0, 0])
    kept = fedcopl.candidate_sets(prob, 1.0, quantile)
    of_zeros = torch.tensor([0, 1, 1, 1]) * (quantile == 0)  # those of the certain image have no mass
    assert torch.equal(kept.sum(0), of_class - of_zeros)


def test_a_candidate_with_next_to_no_probability_is_dropped():
    """1e-6 and 1e-8 beside almost 1."""
    tiny = torch.tensor([[1 - 1e-6 - 1e-8, 1e-6, 1e-8], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert fedcopl.candidate_sets(tiny, 1.0, 0.0).tolist() == [[True, True, False], [True, False, False]]
    # the first image loses its arg-max to the second one: what counts is the share of the rest, 3e-8 of the row
    rest = torch.tensor([[1 - 3e-8, 2e-8, 1e-8], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert fedcopl.candidate_sets(rest, 1.0, 1.0).tolist() == [[False, True, True], [True, False, False]]


# ---- CPL's selection ----------------------------------------------------------------------------------------------


def slow_pools(prob, sets, capacity, arrivals):
    """One image at a time: it enters the pool of its best candidate; a full pool turns out its worst, who goes on."""
    left = [sorted((c for c in range(len(row)) if own[c]), key=lambda c: -row[c]) for row, own in zip(prob, sets)]
    pools = [[] for _ in capacity]
    for image in arrivals:
        while image is not None and left[image]:
            c = left[image].pop(0)
            pools[c].append(image)
            image = None
            if len(pools[c]) > capacity[c]:
                image = min(pools[c], key=lambda i: prob[i][c])
                pools[c].remove(image)
    assert sum(map(len, pools)) == len({image for pool in pools for image in pool})  # each in one pool at most
    chosen = [-1] * len(prob)
    for c, pool in enumerate(pools):
        for image in pool:
            chosen[image] = c
    return chosen


@pytest.mark.parametrize("n, classes, most", [(0, 3, 2), (1, 3, 1), (2, 2, 1), (30, 5, 4), (60, 4, 30), (50, 8, 3)])
def test_selection_of_candidates_against_pools_in_any_order(n, classes, most):
    for seed in range(4):
        prob, sets = random_prob(seed, n, classes), random_sets(seed, n, classes, 0.4 + 0.15 * seed)
        capacity = torch.randint(0, most + 1, (classes,), generator=torch.Generator().manual_seed(seed))
        found = fedcopl.select_candidates(prob, sets, capacity)
        for arrivals in (range(n), reversed(range(n)), random.Random(seed).sample(range(n), n)):
            assert found.tolist() == slow_pools(prob.tolist(), sets.tolist(), capacity.tolist(), arrivals)

        taken = torch.bincount(found[found >= 0], minlength=classes)
        assert (taken <= capacity).all() and found.dtype == torch.int64 and found.shape == (n,)
        for i in range(n):  # no image and class would rather have each other
            held = prob[i, found[i]] if found[i] >= 0 else -1
            assert found[i] == -1 or sets[i, found[i]]
            for c in sets[i].nonzero()[:, 0].tolist():
                if prob[i, c] > held:
                    members = prob[found == c, c]
                    assert len(members) == capacity[c] and (members > prob[i, c]).all()


def test_selection_of_candidates_at_its_limits():
    prob, sets = random_prob(3, 40, 5), random_sets(3, 40, 5)
    none, all_ = torch.zeros(5).long(), torch.full((5,), 40)
    assert (fedcopl.select_candidates(prob, sets, none) == -1).all()
    best = prob.masked_fill(~sets, -1).argmax(1)
    assert torch.equal(fedcopl.select_candidates(prob, sets, all_), torch.where(sets.any(1), best, -1))
    assert (fedcopl.select_candidates(prob, torch.zeros_like(sets), all_) == -1).all()
    for most in (0, 1, 3, 10):  # with the arg-max as the only candidate it is the selection of FPL
        capacity = torch.randint(0, most + 1, (5,), generator=torch.Generator().manual_seed(most))
        single = F.one_hot(prob.argmax(1), 5).bool()
        assert torch.equal(fedcopl.select_candidates(prob, single, capacity), fedcopl.select(prob, capacity))


def test_of_equal_images_the_earlier_one_is_chosen_and_the_other_goes_on():
    prob = torch.tensor([[0.6, 0.3, 0.1]] * 4)
    sets = torch.tensor([[True, True, False]] * 4)
    assert fedcopl.select_candidates(prob, sets, torch.tensor([1, 2, 5])).tolist() == [0, 1, 1, -1]


def test_most_confident_of_each_class():
    label = torch.tensor([1, 0, 1, -1, 1, 0, -1])
    score = torch.tensor([0.5, 0.9, 0.7, 1.0, 0.7, 0.9, 0.99])
    for capacity, chosen in (
        ((0, 0, 0), []), ((1, 1, 9), [1, 2]), ((5, 2, 0), [1, 2, 4, 5]), ((2, 3, 1), [0, 1, 2, 4, 5]),
    ):
        assert fedcopl.most_confident(label, score, torch.tensor(capacity)).nonzero()[:, 0].tolist() == chosen
    empty = fedcopl.most_confident(label[:0], score[:0], torch.tensor([1, 1]))
    assert empty.shape == (0,) and empty.dtype == torch.bool


# ---- shots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n_train, classes, clients, expected",
    [
        (3760, 47, 10, [2, 4, 6, 8]),  # DTD
        (6300, 45, 10, [4, 7, 11, 14]),  # RESISC45
        (5994, 200, 5, [2, 3, 5, 6]),  # CUB
        (7639, 101, 5, [4, 8, 12, 16]),  # UCF101
        (50_000, 10, 10, [125, 250, 375, 500]),  # CIFAR-10
        (50_000, 100, 10, [13, 25, 38, 50]),  # CIFAR-100
    ],
)
def test_growing_share(n_train, classes, clients, expected):
    grown = [fedcopl.growing_share(n_train, classes, clients, it) for it in range(4)]
    assert grown == expected == [math.ceil(Fraction(n_train * (it + 1), 4 * classes * clients)) for it in range(4)]


def refresh(probs, *flags, iteration=0, truth=None):
    """label_images for clients of these probabilities, whose images lie in turn: Labels, {column: list}, the owners."""
    ends = np.cumsum([0, *map(len, probs)])
    train_parts = [np.arange(a, b)[::-1].copy() for a, b in zip(ends, ends[1:])]
    truth = torch.zeros(ends[-1]).long() if truth is None else truth
    args = settings("--clients", len(probs), *flags)
    classes = probs[0].shape[1]
    data = SimpleNamespace(train=train_parts, labels=truth)
    labels, table = fedcopl.label_images(args, iteration, ONE_PROCESS, classes, probs, data)
    assert table.shape == (len(fedcopl.LABEL_COLUMNS), classes) and table.dtype == torch.int64
    return labels, dict(zip(fedcopl.LABEL_COLUMNS, table.tolist())), train_parts


@pytest.mark.parametrize("kind", ["fpl", "ifpl"])
@pytest.mark.parametrize("shots, iteration", [(1, 0), (3, 2), (16, 1), ("grow", 0), ("grow", 3)])
def test_fpl_selects_by_argmax_up_to_the_shots(kind, shots, iteration):
    """Also IFPL, and GRIP, whose shots grow: of each client and class the most confident ones, by a sorted list."""
    probs = [random_prob(seed, n, 4) for seed, n in enumerate((50, 0, 1, 17))]
    labels, table, owned = refresh(probs, "--pseudo-labels", kind, "--shots", shots, iteration=iteration)
    most = math.ceil(Fraction(68 * (iteration + 1), 4 * 4 * 4)) if shots == "grow" else shots
    for prob, own in zip(probs, owned):
        expected = {int(i): -1 for i in own}
        for c in range(4):
            mine = sorted(
                ((max(row), int(i)) for row, i in zip(prob.tolist(), own) if row.index(max(row)) == c), reverse=True)
            expected |= {i: c for _, i in mine[:most]}
        assert labels.pseudo_label[own].tolist() == [expected[int(i)] for i in own]
    chosen = labels.pseudo_label >= 0
    assert torch.equal(labels.candidate, F.one_hot(labels.pseudo_label + 1, 5)[:, 1:].bool())  # one class each, or none
    assert table["capacity"] == [4 * most] * 4 and table["estimated"] == [0] * 4
    assert table["candidates"] == table["selected"] and sum(table["selected"]) == chosen.sum()


def test_fpl_with_as_many_shots_as_images_selects_all_and_equals_copl_at_its_capacities(monkeypatch):
    probs = [random_prob(seed, n, 4) for seed, n in enumerate((9, 30, 1))]
    labels, _, owned = refresh(probs, "--pseudo-labels", "fpl", "--shots", 30)
    for prob, own in zip(probs, owned):
        assert torch.equal(labels.pseudo_label[own], prob.argmax(1))
    for shots in (1, 2, 5):
        monkeypatch.setattr(fedcopl, "allocate", lambda counts, *_: torch.full_like(counts, shots))
        ours = refresh(probs, "--pseudo-labels", "fpl", "--shots", shots)[0]
        assert all(map(torch.equal, ours, refresh(probs, "--pseudo-labels", "copl")[0]))


@pytest.mark.parametrize("shots", [1, 4, "grow"])
def test_cpl_keeps_the_whole_candidate_set_of_selected_images_alone(shots):
    probs = [random_prob(seed, n, 5) for seed, n in enumerate((60, 0, 1, 2, 25))]
    flags = ("--pseudo-labels", "cpl", "--shots", shots, "--intra-quantile", 0.6, "--inter-quantile", 0.5)
    labels, table, owned = refresh(probs, *flags, iteration=1)
    most = math.ceil(Fraction(88 * 2, 4 * 5 * 5)) if shots == "grow" else shots
    for prob, own in zip(probs, owned):
        sets = slow_sets(prob.tolist(), 0.6, 0.5) if len(own) else []
        expected = slow_pools(prob.tolist(), sets, [most] * 5, range(len(own)))
        assert labels.pseudo_label[own].tolist() == expected
        kept = [row if chosen >= 0 else [False] * 5 for row, chosen in zip(sets, expected)]
        assert labels.candidate[own].tolist() == kept
    assert (labels.candidate.sum(1) > 1).any() and (labels.pseudo_label == -1).any()
    assert table["capacity"] == [5 * most] * 5
    assert table["candidates"] == labels.candidate.sum(0).tolist()


# ---- the table and the columns of the log, by hand ----------------------------------------------------------------

# Two clients, one shot a class, bounds .6 and .8 on the running sums: {class of the pool} beside each row
BY_HAND = (
    torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.1, 0.3, 0.6]]),  # 0 of {0, 1}; 1 of {0, 1}; 2 of {1, 2}
    torch.tensor([[0.05, 0.8, 0.15], [0.15, 0.75, 0.1], [0.02, 0.78, 0.2], [0.01, 0.77, 0.22]]),
)  # 1 of {1, 2}; 0 of {0, 1}; none of {1, 2}, as the next one is better; 2 of {1, 2}
TRUTH = [[1, 1, 0], [1, 1, 1, 2]]


def by_hand(*flags):
    truth = torch.tensor(sum((part[::-1] for part in TRUTH), []))  # refresh deals the images out in reversed order
    return refresh(BY_HAND, *flags, truth=truth)


def test_table_of_cpl_by_hand():
    flags = ("--pseudo-labels", "cpl", "--shots", 1, "--intra-quantile", 1, "--inter-quantile", 0)
    labels, table, owned = by_hand(*flags)
    assert [labels.pseudo_label[own].tolist() for own in owned] == [[0, 1, 2], [1, 0, -1, 2]]
    assert labels.candidate[owned[1]].long().tolist() == [[0, 1, 1], [1, 1, 0], [0, 0, 0], [0, 1, 1]]
    assert table == dict(
        images=[1, 5, 1], predicted=[2, 4, 1], predicted_correct=[0, 3, 0], estimated=[0, 0, 0], capacity=[2, 2, 2],
        selected=[2, 2, 2], selected_correct=[0, 2, 1], candidates_correct=[0, 4, 1], candidates=[3, 6, 3])
    row = round_row(table, *flags)
    assert row["selected"] == 6 and row["set_size"] == 2
    for column, value in (
        ("pl_acc_pct", 50), ("set_recall_pct", 100 * 5 / 6), ("pl_used_pct", 100 * 6 / 7),
        ("pl_all_acc_pct", 100 * 3 / 7), ("pl_gap_pct", 50 * (4 / 21 + 8 / 21 + 4 / 21)),
    ):
        assert row[column] == pytest.approx(value), column


def round_row(table, *flags, rnd=0):
    args = settings("--clients", 2, *flags)
    prompts = fedcopl.Prompts(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 4))
    uploads = [
        fedcopl.Upload(prompts.visual[k] + 1, prompts.text[k] + 1, torch.tensor(3.0), torch.ones(2)) for k in (0, 1)]
    table = torch.tensor(list(table.values()))
    return fedcopl.round_row(args, rnd, (1.0, 1.0), uploads, prompts, table, 1000)


def test_table_of_fpl_by_hand_and_of_nothing_selected():
    """One class each: the sets have one element and are right as often as the labels."""
    flags = ("--pseudo-labels", "fpl", "--shots", 1)
    labels, table, owned = by_hand(*flags)
    assert [labels.pseudo_label[own].tolist() for own in owned] == [[0, -1, 2], [1, -1, -1, -1]]
    assert table["selected"] == table["candidates"] == [1, 1, 1] and table["predicted_correct"] == [0, 3, 0]
    assert table["selected_correct"] == table["candidates_correct"] == [0, 1, 0] and table["capacity"] == [2, 2, 2]
    row = round_row(table, *flags)
    assert row["pl_acc_pct"] == row["set_recall_pct"] == pytest.approx(100 / 3) and row["set_size"] == 1
    nothing = round_row({name: [0, 0, 0] for name in table} | {"images": table["images"]}, *flags)
    assert (
        nothing["selected"] == 0 and nothing["set_size"] is nothing["set_recall_pct"] is nothing["pl_acc_pct"] is None)


@pytest.mark.parametrize("kind, counts", [("fpl", 0), ("ifpl", 0), ("cpl", 0), ("copl", 4 * 3)])
def test_bytes_of_a_refresh(kind, counts):
    """Beside the prompts: 4 bytes up for the number of images; counts up and capacities down are copl's alone."""
    table = by_hand("--pseudo-labels", kind)[1]
    for rnd, extra in ((0, 1), (1, 0), (4, 0), (5, 1)):
        row = round_row(table, "--pseudo-labels", kind, rnd=rnd)
        assert row["bytes_up"] == 2 * (1000 + extra * (4 + counts))
        assert row["bytes_down"] == 2 * (1000 + extra * counts)


# ---- who is asked -------------------------------------------------------------------------------------------------


def test_who_is_asked():
    for kind in ("copl", "fpl", "ifpl", "cpl"):
        args = settings("--pseudo-labels", kind)
        assert [fedcopl.asks_zero_shot(args, it) for it in range(3)] == [True, kind == "fpl", kind == "fpl"]


@pytest.mark.parametrize("flags", ["fpl", "ifpl --shots grow", "cpl --shots 5 --intra-quantile 1 --inter-quantile 0.5"])
def test_a_run_asks_the_right_model_and_logs_it(tmp_path, monkeypatch, flags):
    """fpl hears zero-shot CLIP at each refresh; the others, from the second one on, the prompts each client holds."""
    asked, prompts, honest = [], [], (fedcopl.label_images, fedcopl.server_update)
    monkeypatch.setattr(fedcopl, "label_images", lambda *given: asked.append(given) or honest[0](*given))
    monkeypatch.setattr(fedcopl, "server_update", lambda *given: prompts.append(honest[1](*given)) or prompts[-1])
    flags = ["--pseudo-labels", *flags.split()]
    kind = flags[1]
    folder, held = train(tmp_path, *flags, "--rounds", 3), prompts[1]
    clip = fedcopl.load_clip(*SHORT[SHORT.index("--model") + 1 :: 2])[0]
    names = [str(c) for c in range(CLASSES)]
    zero_shot = clip.encode_text(clip.text_input([f"a photo of a {name}" for name in names], 0))
    text, data = clip.text_input([f"{name}." for name in names], 16), asked[0][5]
    assert [given[1] for given in asked] == [0, 1]
    for args, iteration, *_, probs, _ in asked:
        for client, prob in enumerate(probs):
            visual, words = None, zero_shot
            if iteration and kind != "fpl":
                visual = held.visual[client]
                with torch.no_grad():
                    words = clip.encode_text(text, held.text[client])
            expected = fedcopl.predict(clip, data, data.images, data.train[client], visual, words)
            assert torch.equal(prob, expected)
        most = math.ceil(200 * (iteration + 1) / (4 * CLASSES * CLIENTS)) if args.shots == "grow" else args.shots
        of_round = [row for (rnd, _), row in labels_table(folder).items() if rnd == 1 + 2 * iteration]
        assert [row["capacity"] for row in of_round] == [CLIENTS * most] * CLASSES
        assert str(args.shots) == (flags[3] if "--shots" in flags else "16")
    assert torch.equal(asked[0][4][0], asked[1][4][0]) == (kind == "fpl")
    assert {row["estimated"] for row in labels_table(folder).values()} == {None}  # an empty cell: nobody estimates
    for row in rows(folder):
        number = 4 * CLIENTS if row["round"] in "13" else 0
        assert int(row["bytes_up"]) == VISUAL * int(row["clients_trained"]) + number
        assert int(row["bytes_down"]) == VISUAL * CLIENTS
        table = [own for (rnd, _), own in labels_table(folder).items() if rnd == (3 if row["round"] == "3" else 1)]
        total = {key: sum(own[key] for own in table) for key in table[0] if key != "estimated"}
        assert int(row["selected"]) == total["selected"] > 0
        assert float(row["set_size"]) == pytest.approx(total["candidates"] / total["selected"], rel=1e-5)
        recall = 100 * total["candidates_correct"] / total["selected"]
        assert float(row["set_recall_pct"]) == pytest.approx(recall, rel=1e-5)
        assert (float(row["set_size"]) > 1) == (kind == "cpl")


# ---- flags --------------------------------------------------------------------------------------------------------

QUANTILES = dict(
    dtd=(0.75, 0.95), resisc45=(0.9, 0.97), cub=(0.75, 0.99), eurosat=(0.75, 0.8), flowers102=(0.6, 0.99),
    cifar100=(0.9, 1 - 0.75 / 100), ucf101=(0.45, 1 - 0.5 / 100), cifar10=(0.75, 0.8), digits=(0.75, 0.8))


@pytest.mark.parametrize("script", ["fedcopl.py", "baselines/promptfl.py"])
@pytest.mark.parametrize("dataset, quantiles", QUANTILES.items())
def test_quantiles_go_by_data_set(script, dataset, quantiles):
    parse = find_method(script).module.parse_args
    args = parse(["--dataset", dataset, "--pseudo-labels", "cpl"])
    assert (args.intra_quantile, args.inter_quantile) == pytest.approx(quantiles, abs=1e-9) and args.shots == 16
    own = parse(["--dataset", dataset, "--pseudo-labels", "cpl", "--intra-quantile", "0", "--inter-quantile", "1"])
    assert (own.intra_quantile, own.inter_quantile) == (0, 1)


def test_shots_are_a_number_or_grow():
    for given, shots in (("1", 1), ("200", 200), ("grow", "grow")):
        assert settings("--pseudo-labels", "ifpl", "--shots", given).shots == shots
    assert settings().shots is None and settings("--pseudo-labels", "cpl").shots == 16


def test_flags_of_other_pseudo_labels_are_refused(tmp_path):
    users = {"--shots": ("fpl", "ifpl", "cpl"), "--intra-quantile": ("cpl",), "--inter-quantile": ("cpl",)}
    for flag, allowed in users.items():
        for kind in ("copl", "fpl", "ifpl", "cpl"):
            if kind in allowed:
                settings("--pseudo-labels", kind, flag, 1)
                continue
            message = complaint(METHOD, tmp_path, "--pseudo-labels", kind, flag, 1)
            assert f"{flag} is for --pseudo-labels {', '.join(allowed)}, not for {kind}" in message
