"""PROTO, PROTO-ALL and PROTO-Labeled: the prototypes against slow loops, and the identities with FixMatch."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from scripts import checkpoint, equal, n_bytes, rows, same_run, state
from scripts import method as find_method
from worlds import sgd, tiny_args, tiny_data, tiny_nets, tiny_state

from baselines import fedproto, fixmatch

METHOD, FIXMATCH = find_method("baselines/fedproto.py"), find_method("baselines/fixmatch.py")
train = METHOD.train
SMALL = ["--train-subset", 100]

# ---- the pull -------------------------------------------------------------------------------------------------------


def case(n=40, classes=5, width=7, seed=0):
    torch.manual_seed(seed)
    features = torch.randn(n, width, dtype=torch.float64, requires_grad=True)
    label, mask, known = torch.randint(classes, (n,)), torch.rand(n) < 0.6, torch.rand(classes) < 0.6
    return features, label, mask, torch.randn(classes, width, dtype=torch.float64), known


def test_pull_and_its_gradient_by_hand():
    features, label, mask, prototype, known = case()
    prototype.requires_grad_()
    total, counted = 0.0, [i for i in range(40) if mask[i]]
    pulled = [i for i in counted if known[label[i]]]
    assert 0 < len(pulled) < len(counted) < 40
    for i in pulled:
        total += sum((features[i, k] - prototype[label[i], k]).item() ** 2 for k in range(7)) / 7
    loss = fedproto.prototype_loss(features, label, mask, prototype, known)
    assert loss.item() == pytest.approx(total / len(counted), abs=1e-10)  # unknown classes count as 0 in the mean
    loss.backward()
    for i in range(40):
        expected = 2 * (features[i] - prototype[label[i]]) / 7 / len(counted) if i in pulled else torch.zeros(7)
        torch.testing.assert_close(features.grad[i], expected.detach().double(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("width", [1, 7, 256])
def test_pull_is_zero_at_the_prototypes_and_one_at_distance_one_in_each_direction(width):
    _, label, mask, prototype, _ = case(width=width)
    known = torch.ones(5, dtype=torch.bool)
    assert fedproto.prototype_loss(prototype[label], label, mask, prototype, known).item() == 0
    assert fedproto.prototype_loss(prototype[label] + 1, label, mask, prototype, known).item() == pytest.approx(1)


@pytest.mark.parametrize("nothing", ["mask", "known", "images"])
def test_no_image_or_no_prototype_gives_exactly_zero(nothing):
    features, label, mask, prototype, known = case(n=0 if nothing == "images" else 40)
    mask, known = (
        torch.zeros_like(value) if nothing == name else value for name, value in (("mask", mask), ("known", known))
    )
    loss = fedproto.prototype_loss(features, label, mask, prototype, known)
    loss.backward()
    assert loss.item() == 0 and (features.grad == 0).all()


# ---- prototypes -----------------------------------------------------------------------------------------------------


def test_sums_of_each_class_by_hand():
    features, label, mask, *_ = case()
    total, count = fedproto.class_sums(features, label, mask, 6)
    for c in range(6):
        members = [i for i in range(40) if mask[i] and label[i] == c]
        assert count[c].item() == len(members)
        expected = sum((features[i] for i in members), torch.zeros(7, dtype=torch.float64))
        torch.testing.assert_close(total[c], expected, rtol=0, atol=1e-12)
    assert count[5] == 0 and (total[5] == 0).all()


def test_global_prototypes_are_plain_means_of_the_clients_that_have_the_class():
    torch.manual_seed(1)
    old, local = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 5, 3, dtype=torch.float64)
    known = torch.tensor([True, True, False, False, True])
    present = torch.tensor([[1, 0, 0, 1, 1], [1, 0, 0, 0, 1], [0, 0, 0, 0, 1], [1, 0, 0, 0, 1]]).bool()
    new, now_known = fedproto.average_prototypes(old, known, local, present)
    torch.testing.assert_close(new[0], (local[0, 0] + local[1, 0] + local[3, 0]) / 3, rtol=0, atol=1e-12)
    assert torch.equal(new[1], old[1]) and torch.equal(new[2], old[2])  # nobody reported them
    assert torch.equal(new[3], local[0, 3])  # one client alone
    torch.testing.assert_close(new[4], local[:, 4].mean(0), rtol=0, atol=1e-12)
    assert now_known.tolist() == [True, True, False, True, True]


def test_server_averages_models_by_images_and_prototypes_by_clients():
    net = fedproto.ResNet8(3, 8)
    old = fedproto.Broadcast(net.state_dict(), torch.full((3, 32), 9.0), torch.tensor([True, False, False]))
    zeros = torch.zeros(len(fedproto.METRICS))

    def upload(value, present, weight):
        state = {name: torch.full_like(part, value) for name, part in net.state_dict().items()}
        weight = torch.tensor(float(weight), dtype=torch.float64)
        return fedproto.Upload(state, torch.full((3, 32), float(value)), torch.tensor(present), weight, zeros)

    uploads = [upload(1, [False, True, True], 30), upload(3, [False, True, False], 10), upload(50, [True] * 3, 0)]
    new = fedproto.server_update(old, uploads)
    assert (new.state["conv1.weight"] == 1.5).all()
    assert new.prototype.mean(1).tolist() == [9, 2, 1] and new.known.tolist() == [True] * 3
    assert fedproto.server_update(old, uploads[2:]) is old


# ---- one step -------------------------------------------------------------------------------------------------------


def step(features, logits, teacher_logits, label, prototype, known, *flags):
    """local_loss with the networks' answers given."""
    args = fedproto.parse_args(list(map(str, flags)))
    args.amp = False
    n_unl = len(teacher_logits)
    views = torch.zeros(len(logits), 3, 8, 8)

    def teacher(given):
        assert len(given) == n_unl  # weak views alone
        return torch.zeros(n_unl, 2), teacher_logits

    return fedproto.local_loss(args, lambda _: (features, logits), teacher, views, label, prototype, known)


@pytest.mark.parametrize("prototypes", ["confident", "all", "labelled"])
@pytest.mark.parametrize("n_lab", [0, 6])
def test_step_by_hand_and_its_gradients(n_lab, prototypes):
    torch.manual_seed(2)
    n_unl, known = 12, torch.tensor([True, True, False, True])
    features, logits = (torch.randn(n_lab + 2 * n_unl, width, requires_grad=True) for width in (5, 4))
    teacher_logits, label = (2 * torch.randn(n_unl, 4)).requires_grad_(), torch.randint(4, (n_lab,))
    prototype = torch.randn(4, 5)
    flags = ["--tau", 0.7, "--lambda-u", 0.5, "--lambda-proto", 0.3, "--prototypes", prototypes]
    loss, (total, count), values = step(features, logits, teacher_logits, label, prototype, known, *flags)
    prob, guess = teacher_logits.detach().softmax(1), teacher_logits.argmax(1)
    sure = [i for i in range(n_unl) if prob[i].max() >= 0.7]
    assert 0 < len(sure) < n_unl and values["used"].nonzero()[:, 0].tolist() == sure
    log_prob, given = logits.detach().double().log_softmax(1), features.detach().double()
    strong = n_lab + n_unl
    pulled = [(i, label[i]) for i in range(n_lab)] + [(strong + i, guess[i]) for i in sure]
    pull = sum((given[i] - prototype[c]).square().mean().item() for i, c in pulled if known[c]) / len(pulled)
    expected = sum(-log_prob[i, label[i]].item() for i in range(n_lab)) / max(n_lab, 1)
    expected += 0.5 * sum(-log_prob[strong + i, guess[i]].item() for i in sure) / n_unl
    assert loss.item() == pytest.approx(expected + 0.3 * pull, abs=1e-5)
    assert values["loss_proto"].item() == pytest.approx(pull, abs=1e-5)
    loss.backward()
    assert teacher_logits.grad is None and (logits.grad[n_lab:strong] == 0).all()
    moved = (features.grad != 0).any(1).nonzero()[:, 0].tolist()
    assert moved == sorted(i for i, c in pulled if known[c])  # strong views are pulled, weak ones are not

    builders = {"confident": sure, "all": range(n_unl), "labelled": []}[prototypes]
    built = [(i, label[i]) for i in range(n_lab)] + [(n_lab + i, guess[i]) for i in builders]  # weak views build
    assert not total.requires_grad and count.tolist() == [sum(c == k for _, c in built) for k in range(4)]
    for c in range(4):
        members = sum((given[i] for i, of in built if of == c), torch.zeros(5, dtype=torch.float64))
        torch.testing.assert_close(total[c].double(), members, rtol=0, atol=1e-5)


def test_without_the_pull_the_step_is_fixmatch_with_global_labels():
    torch.manual_seed(4)
    features, logits, teacher_logits = torch.randn(30, 5), torch.randn(30, 4), 2 * torch.randn(12, 4)
    label, known = torch.randint(4, (6,)), torch.ones(4, dtype=torch.bool)
    args = fixmatch.parse_args(["--tau", "0.6"])
    args.amp, views = False, torch.zeros(30, 3, 8, 8)
    nets = (lambda _: (features, logits)), (lambda _: (torch.zeros(12, 5), teacher_logits))
    expected = fixmatch.local_loss(args, *nets, views, label, torch.full((4,), 0.25))[0]
    found = step(features, logits, teacher_logits, label, torch.randn(4, 5), known, "--tau", 0.6, "--lambda-proto", 0)
    assert torch.equal(found[0], expected) and found[2]["loss_proto"].item() == 0


def test_a_local_step_reads_nothing_back_to_the_host(monkeypatch):
    """On the meta device there are no values: a step that asks for one, or whose shapes depend on one, fails."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # it knows no meta device
    for prototypes in ("confident", "all", "labelled"):
        args = fedproto.parse_args(["--prototypes", prototypes])
        args.amp = False
        with torch.device("meta"):
            net, teacher = fedproto.ResNet8(10, 8), fedproto.ResNet8(10, 8)
            views, label = torch.empty(22, 3, 8, 8), torch.empty(6).long()
            known = torch.empty(10, dtype=torch.bool)
            loss, sums, values = fedproto.local_loss(args, net, teacher, views, label, torch.empty(10, 32), known)
            loss.backward()
            batch = SimpleNamespace(truth=torch.empty(8).long(), hidden=torch.empty(8).bool(), label=label)
            assert fedproto.step_metrics(values, batch).shape == (len(fedproto.METRICS),)
        assert sums[0].shape == (10, 32) and sums[1].shape == (10,)


# ---- one client -----------------------------------------------------------------------------------------------------


def world(n_labelled, n_unlabelled, *flags):
    """One client of the given size. Returns client_update's arguments but round and client."""
    args = tiny_args(METHOD, *flags)
    net, teacher = tiny_nets(fedproto, args, 2)
    received = fedproto.Broadcast(tiny_state(net), torch.rand(4, 4 * args.width), torch.ones(4, dtype=torch.bool))
    return args, tiny_data(fedproto, (n_labelled, n_unlabelled)), received, net, teacher, sgd(args, net)


def update(args, *rest):
    return fedproto.client_update(args, 1, 0, *rest)


def test_prototypes_come_from_the_last_epoch(monkeypatch):
    seen = []
    honest = fedproto.local_loss

    def watched(*given):
        result = honest(*given)
        seen.append(result[1])
        return result

    monkeypatch.setattr(fedproto, "local_loss", watched)
    upload = update(*world(4, 36, "--local-epochs", 3, "--prototypes", "all"))
    assert len(seen) == 15
    total, count = (sum(parts) for parts in zip(*seen[10:]))
    assert count.sum() == 5 * (8 + 16)
    torch.testing.assert_close(upload.prototype, total / count.clamp(min=1)[:, None])
    assert torch.equal(upload.present, count > 0)


def test_a_strong_pull_holds_features_at_the_prototypes():
    distances = []
    for weight in (0, 30):
        setting = world(20, 20, "--prototypes", "labelled", "--local-epochs", 3, "--lambda-proto", weight, "--lr", 0.01)
        received, upload = setting[2], update(*setting)
        distances.append((upload.prototype - received.prototype)[upload.present].square().mean().item())
    assert distances[1] < 0.7 * distances[0]


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_without_the_pull_and_in_round_1_it_is_fixmatch_with_global_labels(tmp_path):
    flags = [*SMALL, "--tau", 0.15, "--rounds", 2, "--batch-size", 8]
    plain = FIXMATCH.train(tmp_path, "--teacher", "global", *flags, name="fixmatch")
    without, pulled = (train(tmp_path, *flags, "--lambda-proto", weight, name=f"w{weight}") for weight in (0, 1))
    columns = ("test_acc_pct", "loss_sup", "loss_unsup", "pl_used_pct", "pl_acc_pct")
    table = [[[row[key] for key in columns] for row in rows(folder)] for folder in (plain, without, pulled)]
    assert table[0] == table[1] and equal(state(plain), state(without))
    assert table[2][0] == table[0][0] and table[2][1] != table[0][1]
    assert all(float(row["pl_used_pct"]) > 0 for row in rows(plain))
    assert [row["loss_proto"] for row in rows(without)] == ["", ""]
    assert rows(pulled)[0]["loss_proto"] == "" and float(rows(pulled)[1]["loss_proto"]) > 0
    plain, pulled = FIXMATCH.train(tmp_path, *flags, "--rounds", 1, name="f1"), train(tmp_path, *flags, "--rounds", 1)
    assert equal(state(plain), state(pulled))


def test_variants_meet_where_every_image_or_none_is_confident(tmp_path):
    run = {
        (tau, prototypes): train(
            tmp_path, *SMALL, "--rounds", 1, "--tau", tau, "--prototypes", prototypes, name=f"{tau}{prototypes}"
        )
        for tau in (0, 1.5)
        for prototypes in ("confident", "all", "labelled")
    }
    for tau, same, other in ((0, "all", "labelled"), (1.5, "labelled", "all")):
        assert same_run(run[tau, "confident"], run[tau, same])
        assert not same_run(run[tau, "confident"], run[tau, other])
        assert [row["pl_used_pct"] for row in rows(run[tau, "all"])] == [{0: "100", 1.5: "0"}[tau]]


def test_bytes_and_checkpoint(tmp_path):
    folder = train(tmp_path, *SMALL)
    size = n_bytes(fedproto.ResNet8(10, 8).state_dict())
    assert all(row["bytes_up"] == row["bytes_down"] == str(3 * (size + 4 * 10 * 32 + 10)) for row in rows(folder))
    saved = checkpoint(folder)
    assert saved["prototype"].shape == (10, 32) and saved["prototype"].dtype == torch.float32
    assert saved["known"].dtype == torch.bool and saved["known"].any()
    assert ((saved["prototype"] > 0).any(1) == saved["known"]).all() and (saved["prototype"] >= 0).all()


def test_help_names_the_reconstruction(capsys):
    with pytest.raises(SystemExit):
        fedproto.parse_args(["--help"])
    assert "a reconstruction" in capsys.readouterr().out
