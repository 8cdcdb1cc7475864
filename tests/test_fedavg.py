"""FedAvg, FedProx, FedAvg-SL: the network, averaging, the proximal term, local epochs, the test."""

import copy

import numpy as np
import pytest
import torch
from scripts import equal
from worlds import numbered_data, tiny_args, tiny_nets, tiny_state

import proxyfl
from baselines import fedavg, fixmatch


# ---- network ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("classes", [10, 100])
def test_network_is_the_one_checked_against_the_official_program(classes):
    nets, images = [], torch.randn(3, 3, 32, 32)
    for module in (fedavg, proxyfl):
        torch.manual_seed(0)
        nets.append(module.ResNet8(classes))
    assert equal(*(net.state_dict() for net in nets))
    assert equal(list(fedavg.forward(nets[0], images, amp=False)), list(nets[1](images)))


def test_forward_gives_float32_also_in_bfloat16():
    net, images = fedavg.ResNet8(10, 8).eval(), torch.randn(2, 3, 8, 8)
    for exact, rounded in zip(fedavg.forward(net, images, False), fedavg.forward(net, images, True)):
        assert rounded.dtype == torch.float32 and not torch.equal(exact, rounded)
        torch.testing.assert_close(exact, rounded, rtol=0.1, atol=0.05)


# ---- averaging ----------------------------------------------------------------------------------------------------

def random_states(number):
    states = []
    for place, net in enumerate(tiny_nets(fedavg, tiny_args("baselines/fedavg.py"), number)):
        net.bn1.num_batches_tracked.fill_(3 + place)
        net.bn1.running_var.uniform_(0.5, 2)
        states.append(net.double().state_dict())
    return states


def test_average_is_the_weighted_mean_and_keeps_the_first_counter():
    states, weights = random_states(3), torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    before = copy.deepcopy(states)
    mean = fedavg.average(states, weights)
    assert equal(states, before)
    for name, value in mean.items():
        if value.is_floating_point():
            slow = sum(w * s[name] for w, s in zip((0.125, 0.25, 0.625), states))
            torch.testing.assert_close(value, slow, rtol=1e-12, atol=1e-14)
        else:
            assert value.dtype == torch.int64 and torch.equal(value, states[0][name])
    fedavg.ResNet8(4, 8).double().load_state_dict(mean)
    assert not {value.data_ptr() for value in mean.values()} & {v.data_ptr() for s in states for v in s.values()}
    same = fedavg.average([states[0]] * 3, weights)
    for name, value in same.items():
        torch.testing.assert_close(value, states[0][name], rtol=1e-6, atol=1e-9)


def test_clients_of_weight_0_do_not_count_and_nobody_keeps_the_model():
    a, b, c = random_states(3)
    received, zeros = fedavg.Broadcast(c), torch.zeros(3)
    left_out = fedavg.Upload({name: torch.full_like(v, 7) for name, v in a.items()}, torch.zeros(()), zeros)
    trained = [fedavg.Upload(s, torch.tensor(float(w)), zeros) for s, w in ((a, 1), (b, 3))]
    now = fedavg.server_update(received, [trained[0], left_out, trained[1]])
    assert equal(now.state, fedavg.average([a, b], torch.tensor([1.0, 3.0])))
    assert fedavg.server_update(received, [left_out]) is received


# ---- the proximal term --------------------------------------------------------------------------------------------

def test_proximal_term_and_its_gradient():
    net = fedavg.ResNet8(4, 8).double()
    anchor = [value.detach().clone() for value in net.parameters()]
    loss = fedavg.proximal_term(net, anchor, 0.3)
    loss.backward()
    assert loss == 0 and all((value.grad == 0).all() for value in net.parameters())        # the first step of a round
    with torch.no_grad():
        for value in net.parameters():
            value += 1
    assert fedavg.proximal_term(net, anchor, 2.0).item() == pytest.approx(sum(value.numel() for value in anchor))
    net.zero_grad()
    fedavg.proximal_term(net, anchor, 0.3).backward()
    for value, then in zip(net.parameters(), anchor):
        torch.testing.assert_close(value.grad, 0.3 * (value.detach() - then))


# ---- the local epochs, the test -----------------------------------------------------------------------------------

def test_all_labels_are_those_of_the_pools():
    data = numbered_data((3, 4), (0, 2))
    everything = fedavg.all_labelled(data)
    for client in range(2):
        assert set(everything.labelled[client]) == set(data.pool(client)) and not len(everything.unlabelled[client])


@pytest.mark.parametrize("module", [fedavg, fixmatch])
@pytest.mark.parametrize("labelled, unlabelled, steps", [(250, 2250, 19), (230, 3432, 28), (450, 4050, 35), (3, 5, 1)])
def test_steps_of_a_local_epoch(module, labelled, unlabelled, steps):
    args = module.parse_args(["--dataset", "cifar10", "--local-epochs", "2", "--image-size", "8"])
    batches = list(module.local_batches(args, numbered_data((labelled, unlabelled)), 0, np.random.default_rng(0)))
    assert len(batches) == 2 * steps
    if module is fedavg:
        (views, label), n_unl = batches[0], 0
    else:
        assert [epoch for epoch, _ in batches] == [0] * steps + [1] * steps
        n_unl, (views, label, _, truth, _) = min(256, labelled + unlabelled), batches[0][1]
        assert truth.shape == (n_unl,)
    assert views.shape == (128 + 2 * n_unl, 3, 8, 8)
    assert label.shape == (128,) and label.max() < labelled                # of the labelled images alone, repeated


def test_labelled_batches_show_the_images_of_their_labels():
    args, data = fedavg.parse_args(["--batch-size", "16", "--local-epochs", "1"]), numbered_data((10, 30), (20, 40))
    seen = set()
    for views, label in fedavg.local_batches(args, data, 1, np.random.default_rng(0)):
        assert torch.equal(views[:, 0, 4, 4].round().long(), label)        # no view changes a constant image
        seen |= set(label.tolist())
    assert seen <= set(data.labelled[1]) and len(seen) > 10


def test_evaluate_against_a_slow_loop():
    torch.manual_seed(0)
    net, images = fedavg.ResNet8(10, 8), torch.randint(0, 256, (41, 3, 8, 8), dtype=torch.uint8)
    net(torch.randn(64, 3, 8, 8))                                          # statistics that are not 0 and 1
    stats, trained = ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)), tiny_state(net)
    mean, deviation = (torch.tensor(value)[:, None, None] for value in stats)
    with torch.no_grad():
        answers = [net.eval()(((image / 255 - mean) / deviation)[None])[1].argmax().item() for image in images]
    labels = torch.tensor([answer if i % 3 else (answer + 1) % 10 for i, answer in enumerate(answers)])
    for batch_size in (7, 512):
        accuracy = fedavg.evaluate(fedavg.ResNet8(10, 8), trained, images, labels, stats, batch_size=batch_size)
        assert accuracy == pytest.approx(100 * 27 / 41)
