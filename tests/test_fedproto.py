"""PROTO, PROTO-ALL and PROTO-Labeled: the pull and the prototypes against slow loops, the step by hand."""

import pytest
import torch
from scripts import checkpoint, rows
from worlds import tiny_args, update, world

from baselines import fedproto

NAME, F64 = "baselines/fedproto.py", torch.float64


# ---- the pull -----------------------------------------------------------------------------------------------------

def case(n=40, classes=5, width=7):
    torch.manual_seed(0)
    features = torch.randn(n, width, dtype=F64, requires_grad=True)
    label, mask, known = torch.randint(classes, (n,)), torch.rand(n) < 0.6, torch.rand(classes) < 0.6
    return features, label, mask, torch.randn(classes, width, dtype=F64), known


def test_pull_and_its_gradient_by_hand():
    features, label, mask, prototype, known = case()
    counted = [i for i in range(40) if mask[i]]
    pulled = [i for i in counted if known[label[i]]]
    assert 0 < len(pulled) < len(counted) < 40
    total = sum((features[i, k] - prototype[label[i], k]).item() ** 2 for i in pulled for k in range(7)) / 7
    loss = fedproto.prototype_loss(features, label, mask, prototype, known)
    assert loss.item() == pytest.approx(total / len(counted), abs=1e-10)   # unknown classes count as 0 in the mean
    loss.backward()
    for i in range(40):
        expected = 2 * (features[i] - prototype[label[i]]).detach() / 7 / len(counted) * (i in pulled)
        torch.testing.assert_close(features.grad[i], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("width", [1, 7, 256])
def test_pull_is_zero_at_the_prototypes_and_one_at_distance_one_in_each_direction(width):
    _, label, mask, prototype, _ = case(width=width)
    for away in (0, 1):
        pull = fedproto.prototype_loss(prototype[label] + away, label, mask, prototype, torch.ones(5, dtype=torch.bool))
        assert pull.item() == pytest.approx(away)


@pytest.mark.parametrize("nothing", ["mask", "known", "images"])
def test_no_image_or_no_prototype_gives_exactly_zero(nothing):
    features, label, mask, prototype, known = case(n=0 if nothing == "images" else 40)
    mask, known = mask & (nothing != "mask"), known & (nothing != "known")
    loss = fedproto.prototype_loss(features, label, mask, prototype, known)
    loss.backward()
    assert loss.item() == 0 and (features.grad == 0).all()


# ---- prototypes ---------------------------------------------------------------------------------------------------

def test_sums_of_each_class_by_hand():
    features, label, mask, *_ = case()
    total, count = fedproto.class_sums(features, label, mask, 6)
    for c in range(6):                                                     # nobody is of the last
        members = [features[i] for i in range(40) if mask[i] and label[i] == c]
        assert count[c].item() == len(members)
        torch.testing.assert_close(total[c], sum(members, torch.zeros(7, dtype=F64)), rtol=0, atol=1e-12)


def test_global_prototypes_are_plain_means_of_the_clients_that_have_the_class():
    torch.manual_seed(1)
    old, local = torch.randn(5, 3, dtype=F64), torch.randn(4, 5, 3, dtype=F64)
    known = torch.tensor([True, True, False, False, True])
    present = torch.tensor([[1, 0, 0, 1, 1], [1, 0, 0, 0, 1], [0, 0, 0, 0, 1], [1, 0, 0, 0, 1]]).bool()
    new, now_known = fedproto.average_prototypes(old, known, local, present)
    torch.testing.assert_close(new[0], (local[0, 0] + local[1, 0] + local[3, 0]) / 3, rtol=0, atol=1e-12)
    assert torch.equal(new[1], old[1]) and torch.equal(new[2], old[2])     # nobody reported them
    assert torch.equal(new[3], local[0, 3])                                # one client alone
    torch.testing.assert_close(new[4], local[:, 4].mean(0), rtol=0, atol=1e-12)
    assert now_known.tolist() == [True, True, False, True, True]


def test_server_averages_models_by_images_and_prototypes_by_clients():
    net, zeros = fedproto.ResNet8(3, 8), torch.zeros(len(fedproto.METRICS))
    old = fedproto.Broadcast(net.state_dict(), torch.full((3, 32), 9.0), torch.tensor([True, False, False]))

    def upload(value, present, weight):
        state = {name: torch.full_like(part, value) for name, part in net.state_dict().items()}
        weight = torch.tensor(float(weight), dtype=F64)
        return fedproto.Upload(state, torch.full((3, 32), float(value)), torch.tensor(present), weight, zeros)

    uploads = [upload(1, [False, True, True], 30), upload(3, [False, True, False], 10), upload(50, [True] * 3, 0)]
    new = fedproto.server_update(old, uploads)
    assert (new.state["conv1.weight"] == 1.5).all()
    assert new.prototype.mean(1).tolist() == [9, 2, 1] and new.known.tolist() == [True] * 3
    assert fedproto.server_update(old, uploads[2:]) is old


# ---- one step -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("prototypes", ["confident", "all", "labelled"])
@pytest.mark.parametrize("n_lab", [0, 6])
def test_step_by_hand_and_its_gradients(n_lab, prototypes):
    torch.manual_seed(2)
    n_unl, known, strong = 12, torch.tensor([True, True, False, True]), n_lab + 12
    features, logits = (torch.randn(n_lab + 2 * n_unl, width, requires_grad=True) for width in (5, 4))
    teacher_logits, label = (2 * torch.randn(n_unl, 4)).requires_grad_(), torch.randint(4, (n_lab,))
    args, prototype = tiny_args(NAME, tau=0.7, lambda_u=0.5, lambda_proto=0.3, prototypes=prototypes), torch.randn(4, 5)

    def teacher(given):
        assert len(given) == n_unl                                         # weak views alone
        return torch.zeros(n_unl, 2), teacher_logits

    views = torch.zeros(len(logits), 3, 8, 8)
    loss, (total, count), values = fedproto.local_loss(args, lambda _: (features, logits), teacher, views, label,
                                                       prototype, known)
    prob, guess = teacher_logits.detach().softmax(1), teacher_logits.argmax(1)
    sure = [i for i in range(n_unl) if prob[i].max() >= 0.7]
    assert 0 < len(sure) < n_unl and values["used"].nonzero()[:, 0].tolist() == sure
    log_prob, given = logits.detach().double().log_softmax(1), features.detach().double()
    pulled = [(i, label[i]) for i in range(n_lab)] + [(strong + i, guess[i]) for i in sure]
    pull = sum((given[i] - prototype[c]).square().mean().item() for i, c in pulled if known[c]) / len(pulled)
    expected = sum(-log_prob[i, label[i]].item() for i in range(n_lab)) / max(n_lab, 1)
    expected += 0.5 * sum(-log_prob[strong + i, guess[i]].item() for i in sure) / n_unl
    assert loss.item() == pytest.approx(expected + 0.3 * pull, abs=1e-5)
    assert values["loss_proto"].item() == pytest.approx(pull, abs=1e-5)
    loss.backward()
    assert teacher_logits.grad is None and (logits.grad[n_lab:strong] == 0).all()
    moved = (features.grad != 0).any(1).nonzero()[:, 0].tolist()
    assert moved == sorted(i for i, c in pulled if known[c])               # strong views are pulled, weak ones are not

    builders = {"confident": sure, "all": range(n_unl), "labelled": []}[prototypes]
    built = [(i, label[i]) for i in range(n_lab)] + [(n_lab + i, guess[i]) for i in builders]      # weak ones build
    assert not total.requires_grad and count.tolist() == [sum(c == k for _, c in built) for k in range(4)]
    for c in range(4):
        members = sum((given[i] for i, of in built if of == c), torch.zeros(5, dtype=F64))
        torch.testing.assert_close(total[c].double(), members, rtol=0, atol=1e-5)


# ---- clients and runs ---------------------------------------------------------------------------------------------

def test_prototypes_come_from_the_last_epoch(monkeypatch):
    seen, honest = [], fedproto.local_loss
    monkeypatch.setattr(fedproto, "local_loss", lambda *given: seen.append(honest(*given)) or seen[-1])
    upload = update(world(NAME, (4, 36), local_epochs=3, prototypes="all"))
    total, count = (sum(parts) for parts in zip(*(sums for _, sums, _ in seen[10:])))
    assert len(seen) == 15 and count.sum() == 5 * (8 + 16)
    torch.testing.assert_close(upload.prototype, total / count.clamp(min=1)[:, None])
    assert torch.equal(upload.present, count > 0)


def test_the_pull_begins_with_round_2_and_prototypes_are_kept(run_once):
    folder = run_once(NAME)
    assert [row["loss_proto"] == "" for row in rows(folder)] == [True, False]
    saved = checkpoint(folder)
    assert saved["prototype"].shape == (10, 32) and saved["known"].dtype == torch.bool and saved["known"].any()
    assert ((saved["prototype"] > 0).any(1) == saved["known"]).all() and (saved["prototype"] >= 0).all()
