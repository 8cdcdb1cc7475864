"""FedAvg, FedProx, FedAvg-SL: averaging, the proximal term, identities, bytes; facts of the shared protocol."""

import copy

import numpy as np
import pytest
import torch
from scripts import equal, n_bytes, rows, state
from scripts import method as find_method
from worlds import numbered_data

import proxyfl
from baselines import fedavg, fixmatch

METHOD = find_method("baselines/fedavg.py")


# ---- network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes, parameters, size", [(10, 1_227_594, 4_921_200), (100, 1_250_724, 5_013_720)])
def test_network_of_the_papers(classes, parameters, size):
    torch.manual_seed(0)
    net = fedavg.ResNet8(classes)
    torch.manual_seed(0)
    other = proxyfl.ResNet8(classes)  # checked against the official program
    assert equal(net.state_dict(), other.state_dict())
    assert sum(value.numel() for value in net.parameters()) == parameters
    assert n_bytes(net.state_dict()) == size
    images = torch.randn(3, 3, 32, 32)
    features, logits = fedavg.forward(net, images, amp=False)
    assert features.shape == (3, 256) and logits.shape == (3, classes)
    assert all(map(torch.equal, (features, logits), other(images)))


def test_forward_gives_float32_also_in_bfloat16():
    net, images = fedavg.ResNet8(10, 8), torch.randn(2, 3, 8, 8)
    exact, rounded = fedavg.forward(net.eval(), images, False)[1], fedavg.forward(net, images, True)[1]
    assert rounded.dtype == torch.float32 and not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, rtol=0.1, atol=0.05)


# ---- averaging ----------------------------------------------------------------------------------------------------


def random_states(number):
    states = []
    for seed in range(number):
        torch.manual_seed(seed)
        net = fedavg.ResNet8(4, 8).double()
        net.bn1.num_batches_tracked.fill_(3 + seed)
        net.bn1.running_var.uniform_(0.5, 2)
        states.append(net.state_dict())
    return states


def test_average_is_the_weighted_mean_and_keeps_the_first_counter():
    states, weights = random_states(3), torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    before = copy.deepcopy(states)
    mean = fedavg.average(states, weights)
    assert equal(states, before)
    for name, value in mean.items():
        if not value.is_floating_point():
            assert value.dtype == torch.int64 and torch.equal(value, states[0][name])
            continue
        slow = sum(w * s[name] for w, s in zip((0.125, 0.25, 0.625), states))
        torch.testing.assert_close(value, slow, rtol=1e-12, atol=1e-14)
        stacked = torch.stack([s[name] for s in states])
        assert ((stacked.amin(0) - 1e-12 <= value) & (value <= stacked.amax(0) + 1e-12)).all()
    fedavg.ResNet8(4, 8).double().load_state_dict(mean)
    assert not {value.data_ptr() for value in mean.values()} & {v.data_ptr() for s in states for v in s.values()}


def test_average_of_equal_states_and_of_another_order():
    a, b, c = random_states(3)
    same = fedavg.average([a, a, a], torch.tensor([1.0, 7.0, 2.0]))
    for name in a:
        torch.testing.assert_close(same[name], a[name], rtol=1e-6, atol=1e-9)
    ones = torch.ones(3, dtype=torch.float64)
    first, second = fedavg.average([a, b, c], ones), fedavg.average([c, a, b], ones)
    for name in a:
        if a[name].is_floating_point():
            torch.testing.assert_close(first[name], second[name], rtol=1e-12, atol=1e-13)


def test_clients_of_weight_0_do_not_count_and_nobody_keeps_the_model():
    a, b, c = random_states(3)
    received, none, two = fedavg.Broadcast(c), torch.zeros(()), torch.tensor(2.0)
    left_out = fedavg.Upload({name: torch.full_like(v, 7) for name, v in a.items()}, none, torch.zeros(3))
    trained = [fedavg.Upload(s, two, torch.zeros(3)) for s in (a, b)]
    now = fedavg.server_update(received, [trained[0], left_out, trained[1]])
    assert equal(now.state, fedavg.average([a, b], torch.ones(2)))
    assert fedavg.server_update(received, [left_out]) is received


# ---- the proximal term --------------------------------------------------------------------------------------------


def test_proximal_term_and_its_gradient():
    net = fedavg.ResNet8(4, 8).double()
    anchor = [value.detach().clone() for value in net.parameters()]
    assert len(anchor) == 29  # trainable tensors: no batch-norm buffers
    loss = fedavg.proximal_term(net, anchor, 0.3)
    loss.backward()
    assert loss == 0 and all((value.grad == 0).all() for value in net.parameters())  # the first step of a round
    with torch.no_grad():
        for value in net.parameters():
            value += 1
    n = sum(value.numel() for value in anchor)
    assert fedavg.proximal_term(net, anchor, 2.0).item() == pytest.approx(n)
    net.zero_grad()
    fedavg.proximal_term(net, anchor, 0.3).backward()
    for value, then in zip(net.parameters(), anchor):
        torch.testing.assert_close(value.grad, 0.3 * (value.detach() - then))


def test_fedprox_without_weight_is_fedavg_and_with_much_weight_stays(tmp_path):
    plain = METHOD.train(tmp_path, name="plain")
    tiny = METHOD.train(tmp_path, "--prox-mu", 1e-42, name="tiny")  # the term is on, its gradient rounds to nothing
    assert equal(state(plain), state(tiny))
    assert rows(plain)[0]["loss_prox"] == "" and rows(tiny)[0]["loss_prox"] != ""
    flags = ["--rounds", 1, "--local-epochs", 4, "--lr", 0.01, "--momentum", 0]
    held, free = (state(METHOD.train(tmp_path, *flags, "--prox-mu", mu, name=f"mu{mu}")) for mu in (90, 0))
    start = state(METHOD.train(tmp_path, "--rounds", 1, "--lr", 0, name="start"))
    moved = [sum((s[k] - start[k]).square().sum() for k in s if k.endswith("weight")) for s in (held, free)]
    assert 0 < moved[0] < 0.1 * moved[1]


# ---- FedAvg-SL ----------------------------------------------------------------------------------------------------


def test_all_labels(tmp_path):
    full = [METHOD.train(tmp_path, "--label-ratio", 1, "--labels", which, name=which) for which in ("labelled", "all")]
    assert equal(*map(state, full))  # nothing was unlabelled
    some = METHOD.train(tmp_path, "--labels", "all", name="some")
    assert not equal(state(some), state(METHOD.train(tmp_path, name="few")))
    header, *table = (some / "clients.csv").read_text().splitlines()
    column = header.split(",").index("labelled")
    assert sum(int(line.split(",")[column]) for line in table) == 200


# ---- the local epochs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [fedavg, fixmatch], ids=["fedavg", "fixmatch"])
@pytest.mark.parametrize("labelled, unlabelled, steps", [(250, 2250, 19), (230, 3432, 28), (450, 4050, 35), (3, 5, 1)])
def test_steps_of_a_local_epoch(module, labelled, unlabelled, steps):
    args = module.parse_args(["--dataset", "cifar10", "--local-epochs", "2", "--image-size", "8"])
    data = numbered_data(module, (labelled, unlabelled))
    batches = list(module.local_batches(args, data, 0, np.random.default_rng(0)))
    assert len(batches) == 2 * steps
    if module is fedavg:
        views, label = batches[0]
        assert views.shape == (128, 3, 8, 8)
    else:
        epochs, batch = [epoch for epoch, _ in batches], batches[0][1]
        label, n_unl = batch.label, min(256, labelled + unlabelled)
        assert epochs == sorted(epochs) == [0] * steps + [1] * steps
        assert batch.views.shape == (128 + 2 * n_unl, 3, 8, 8) and batch.truth.shape == (n_unl,)
    assert label.shape == (128,) and label.max() < labelled  # with replacement, of the labelled images alone


def test_labelled_batches_show_the_images_of_their_labels():
    args = fedavg.parse_args(["--batch-size", "16", "--local-epochs", "1"])
    data = numbered_data(fedavg, (10, 30), (20, 40))
    seen = set()
    for views, label in fedavg.local_batches(args, data, 1, np.random.default_rng(0)):
        assert torch.equal((views[:, 0, 4, 4] * 255).round().long(), label % 256)  # no view changes a constant image
        seen |= set(label.tolist())
    assert seen <= set(data.labelled[1]) and len(seen) > 10


def test_bytes_are_two_states_a_client(tmp_path):
    size = n_bytes(fedavg.ResNet8(10, 8).state_dict())
    for row in rows(METHOD.train(tmp_path)):
        assert row["bytes_up"] == row["bytes_down"] == str(3 * size)


def test_evaluate_against_a_slow_loop():
    torch.manual_seed(0)
    net, images = fedavg.ResNet8(10, 8), torch.randint(0, 256, (41, 3, 8, 8), dtype=torch.uint8)
    net(torch.randn(64, 3, 8, 8))  # statistics that are not 0 and 1
    stats, trained = ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)), {k: v.clone() for k, v in net.state_dict().items()}
    net.eval()
    mean, deviation = (torch.tensor(value)[:, None, None] for value in stats)
    with torch.no_grad():
        answers = [net(((image / 255 - mean) / deviation)[None])[1].argmax().item() for image in images]
    labels = torch.tensor([answer if i % 3 else (answer + 1) % 10 for i, answer in enumerate(answers)])
    for batch_size in (7, 512):
        assert fedavg.evaluate(fedavg.ResNet8(10, 8), trained, images, labels, stats, batch_size=batch_size) == (
            pytest.approx(100 * 27 / 41)
        )
