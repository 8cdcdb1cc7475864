"""baselines/fedmatch.py: two parts of a weight, votes, helpers, sparse counts, bytes, its limits."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scripts import checkpoint, equal, n_bytes, rows
from scripts import method as find_method
from worlds import sgd, tiny_nets, tiny_state, update, world

import common
from baselines import fedavg, fedmatch

NAME, SENT = "baselines/fedmatch.py", 5e-5


def leaves(w):
    return {name: part.clone().requires_grad_() for name, part in w.received.psi.items()}


def some_views(n):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def summed(w, sigma):
    """A network whose weights are sigma and the world's psi, in training mode."""
    net, = tiny_nets(fedmatch, w.args, 1)
    net.load_state_dict(fedmatch.joint(sigma, w.received.psi))
    return net


# ---- the sum ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("classes, entries", [(10, 1_224_896), (100, 1_247_936)])
def test_decomposed_weights(classes, entries):
    net = fedmatch.ResNet8(classes)
    names = fedmatch.decomposed(net)
    assert sum(net.state_dict()[name].numel() for name in names) == entries
    assert {name for name, value in net.named_parameters() if value.ndim > 1} == set(names) and len(names) == 10


def test_supervised_step_reaches_sigma_alone_and_computes_the_sum():
    w, views, label = world(NAME), some_views(6), torch.tensor([0, 1, 2, 3, 0, 1])
    psi, net = leaves(w), summed(w, tiny_state(w.net))
    loss = fedmatch.supervised_loss(w.args, w.net.train(), psi, views, label)
    loss.backward()
    assert all(part.grad is None for part in psi.values())
    expected = F.cross_entropy(net(views)[1], label)
    expected.backward()
    assert torch.allclose(loss, expected)
    for (name, got), wanted in zip(w.net.named_parameters(), net.parameters()):
        assert torch.allclose(got.grad, wanted.grad, atol=1e-6) and got.grad.any(), name
    assert torch.equal(w.net.bn1.running_mean, net.bn1.running_mean)       # it is the forward that counts


@pytest.mark.parametrize("n_helpers", [0, 1, 2])
@pytest.mark.parametrize("threshold", [0.0, 0.41, 2.0])
def test_unsupervised_step_reaches_psi_alone_and_follows_its_equation(n_helpers, threshold):
    w = world(NAME, conf_threshold=threshold, lambda_i=0.7, lambda_a=0.6, lambda_1=0.01, lambda_2=0.02)
    psi, views, before = leaves(w), some_views(16), tiny_state(w.net)
    helpers = [net.eval() for net in tiny_nets(fedmatch, w.args, n_helpers, seed=5)]
    loss, values = fedmatch.unsupervised_loss(w.args, w.net.train(), w.psi_net.train(), psi, helpers, views)
    loss.backward()
    assert all(value.grad is None for net in (w.net, w.psi_net, *helpers) for value in net.parameters())
    assert all(part.grad.abs().sum() > 0 for part in psi.values())
    assert equal(w.net.state_dict(), before)                               # neither statistics nor counters
    # from the equation, one image after the other
    prob = summed(w, before)(views)[1].double().softmax(1).tolist()
    asked = [helper(views[:8])[1].double().softmax(1).tolist() for helper in helpers]
    kl, cross_entropy, used, labels = 0.0, 0.0, [], []
    for i in range(8):
        own = max(range(4), key=lambda c: prob[i][c])
        votes = [int(own == c) + sum(answer[i][c] == max(answer[i]) for answer in asked) for c in range(4)]
        labels.append(votes.index(max(votes)))
        used.append(max(prob[i]) >= threshold)
        if used[-1]:
            cross_entropy -= math.log(prob[8 + i][labels[-1]])
            kl += sum(a * math.log(a / p) for answer in asked for a, p in zip(answer[i], prob[i])) / max(1, n_helpers)
    kept = max(1, sum(used))
    penalty = sum(0.01 * part.abs().sum() + 0.02 * (before[name] - part).square().sum()
                  for name, part in w.received.psi.items()).item()
    assert values["used"].tolist() == used and values["pseudo_label"].tolist() == labels
    assert values["loss_unsup"].item() == pytest.approx(cross_entropy / kept, rel=1e-4)
    assert values["loss_helper"].item() == pytest.approx(kl / kept, rel=1e-4, abs=1e-9)
    assert loss.item() == pytest.approx(0.7 * kl / kept + 0.6 * cross_entropy / kept + penalty, rel=1e-4)
    assert threshold < 2 or values["loss_unsup"] == values["loss_helper"] == 0 and loss == values["loss_psi"]
    assert threshold != 0.41 or 0 < sum(used) < 8


# ---- votes and helpers --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("own, helpers, winner", [
    (7, (2, 5), 2), (5, (2, 2), 2), (5, (5, 2), 5), (7, (), 7), (3, (9,), 3), (9, (3,), 3)])
def test_vote(own, helpers, winner):
    helper_prob = F.one_hot(torch.tensor(helpers, dtype=torch.int64).view(-1, 1), 10).float()
    assert fedmatch.vote(torch.tensor([own]), helper_prob).tolist() == [winner]


def test_inter_client_loss_has_no_value_for_equal_answers_and_its_direction():
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=gen, dtype=torch.float64, requires_grad=True)
    used, same = torch.tensor([True, False, True, True, False]), logits.detach().softmax(1).expand(2, -1, -1)
    assert fedmatch.inter_client_loss(logits, same, used).item() == pytest.approx(0, abs=1e-12)
    helper_prob = torch.randn(2, 5, 3, generator=gen, dtype=torch.float64).softmax(2)
    fedmatch.inter_client_loss(logits, helper_prob, used).backward()
    wanted = (logits.softmax(1) - helper_prob.mean(0)).detach() * used[:, None] / 3        # of KL(helper || model)
    assert torch.allclose(logits.grad, wanted)
    sure = torch.tensor([[[1.0, 0, 0]]])                                   # a helper's 0 gives no NaN
    assert fedmatch.inter_client_loss(torch.zeros(1, 3), sure, torch.tensor([True])) == pytest.approx(math.log(3))


def test_nearest_answers():
    gen = torch.Generator().manual_seed(0)
    answers = {str(client): torch.rand(4, generator=gen).softmax(0) for client in (3, 11, 0, 7, 5)}
    answers["9"] = answers["3"].clone()                                    # the very same answer, yet another client
    for client in answers:
        distance = {other: math.dist(answers[client].tolist(), answers[other].tolist()) for other in answers}
        del distance[client]
        assert fedmatch.nearest(int(client), answers, 3) == sorted(distance, key=distance.get)[:3]
    assert fedmatch.nearest(3, answers, 1) == ["9"] and len(fedmatch.nearest(3, answers, 99)) == 5
    assert fedmatch.nearest(4, answers, 2) == []                           # never trained
    assert fedmatch.nearest(3, {"3": answers["3"]}, 2) == [] and fedmatch.nearest(3, {}, 2) == []


def test_noise_image():
    image = fedmatch.noise_image(64, common.stream(1, "noise"))
    assert image.shape == (3, 64, 64) and image.min() >= 0 and image.max() <= 255
    plain = np.random.default_rng(0).normal(125, 125, 100_000)
    plain = plain[(plain >= 0) & (plain <= 255)]
    assert image.mean() == pytest.approx(plain.mean(), abs=2) and image.std() == pytest.approx(plain.std(), abs=2)


def test_helpers_have_the_broadcast_sigma_and_statistics(monkeypatch):
    w, asked, honest = world(NAME), [], fedmatch.unsupervised_loss
    entries = sum(part.numel() for part in w.received.psi.values())

    def spy(args, net, psi_net, psi, helpers, views):
        result = honest(args, net, psi_net, psi, helpers, views)
        asked.append([(helper.training, tiny_state(helper)) for helper in helpers])
        return result

    monkeypatch.setattr(fedmatch, "unsupervised_loss", spy)
    with_helpers = update(w, helper_psi=[torch.full((entries,), value) for value in (0.5, 0.25)])
    for step in asked:
        for (training, state), value in zip(step, (0.5, 0.25), strict=True):
            expected = {n: v + value if n in w.received.psi else v for n, v in w.received.state.items()}
            assert not training and equal(state, expected)
    assert not equal(update(w).psi, with_helpers.psi) and asked[-1] == []


# ---- a client -----------------------------------------------------------------------------------------------------

def test_without_psi_it_is_fedavg(monkeypatch):
    """psi = 0 and kept there, lambda_s = 1: FedAvg's labelled steps, then a mean that is uniform."""
    w = world(NAME, psi_factor=0, lambda_s=1, lambda_i=0, lambda_a=0, lambda_1=0, lambda_2=0, local_epochs=2)
    upload = update(w)
    assert not any(part.any() for part in upload.psi.values())
    monkeypatch.setattr(fedavg, "local_batches", lambda *given: (
        (batch.views[:len(batch.label)], batch.label) for _, batch in fedmatch.local_batches(*given)))
    net, args = world(NAME).net, SimpleNamespace(**vars(w.args), prox_mu=0)
    parent = fedavg.client_update(args, w.rnd, 0, w.data, fedavg.Broadcast(w.received.state), net, sgd(w.args, net))
    assert equal(upload.state, parent.state) and not equal(upload.state, w.received.state)


def test_without_labels_psi_alone_moves():
    w = world(NAME, (0, 20))
    upload = update(w)
    assert equal(upload.state, w.received.state)           # batch-norm statistics too: they are the labelled images'
    assert all(not torch.equal(part, w.received.psi[name]) for name, part in upload.psi.items())


def test_uniform_mean_of_both_parts_without_clients_that_could_not_train():
    def upload(value, weight):
        part = {"w": torch.full((2,), float(value))}
        return fedmatch.Upload(part, {"w": 10 * part["w"]}, torch.tensor(float(weight), dtype=torch.float64), None)

    before = fedmatch.Broadcast({"w": torch.zeros(2)}, {"w": torch.zeros(2)})
    after = fedmatch.server_update(before, [upload(1, 5), upload(3, 500), upload(100, 0)])
    assert after.state["w"].tolist() == [2, 2] and after.psi["w"].tolist() == [20, 20]
    assert fedmatch.server_update(before, [upload(100, 0)]) is before


def test_weight_decay_and_order_of_the_two_steps():
    """One step by hand: sigma first, decayed; then psi, not decayed, at the new sigma."""
    w = world(NAME, batch_size=25, momentum=0, weight_decay=0.1, lambda_s=2, lr=0.05, conf_threshold=0)
    upload, hand, psi = update(w), world(NAME, conf_threshold=0), leaves(w)
    hand.net.load_state_dict(hand.received.state)
    hand.net.train()
    _, batch = next(fedmatch.local_batches(w.args, w.data, 0, common.stream(w.args.seed, "client", w.rnd, 0)))
    (2 * fedmatch.supervised_loss(hand.args, hand.net, psi, batch.views[:25], batch.label)).backward()
    with torch.no_grad():
        for value in hand.net.parameters():
            value -= 0.05 * (value.grad + 0.1 * value)
    fedmatch.unsupervised_loss(hand.args, hand.net, hand.psi_net.train(), psi, [], batch.views[25:])[0].backward()
    for name, value in hand.net.state_dict().items():
        assert torch.allclose(upload.state[name], value, atol=1e-6), name
    for name, part in psi.items():
        assert torch.allclose(upload.psi[name], (part - 0.05 * part.grad).detach(), atol=1e-6), name


# ---- sparse counts, vectors ---------------------------------------------------------------------------------------

def test_vectors_and_thresholds():
    psi = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor([5e-6, -6e-6, 0.0])}
    vector = fedmatch.to_vector({"a": psi["a"], "b": psi["b"], "other": torch.ones(9)}, psi)
    assert vector.shape == (9,) and equal(fedmatch.from_vector(vector, psi), psi)
    small = fedmatch.without_small({"a": torch.tensor([5e-6, -6e-6, -5e-6, 1.0])}, 5e-6)["a"]
    assert torch.equal(small, torch.tensor([0, -6e-6, 0, 1.0]))
    assert fedmatch.differing(torch.tensor([0.0, 1e-4, -1e-4, 4e-5]), torch.tensor([1e-4, 1e-4, 1e-4, 0.0]), SENT) == 2


def test_sparse_entries_against_a_slow_loop():
    gen, args = torch.Generator().manual_seed(0), SimpleNamespace(zero_threshold=5e-6, send_threshold=SENT)

    def message(kind, *more):
        sigma, psi = ({"w": 1e-4 * torch.randn(4, 5, generator=gen)} for _ in range(2))
        return kind({**sigma, "bn.running_mean": torch.randn(5, generator=gen)}, psi, *more)

    sent = message(fedmatch.Broadcast)
    uploads = [message(fedmatch.Upload, torch.tensor(weight), None) for weight in (3.0, 0.0, 2.0)]
    uploads[2] = uploads[2]._replace(state=sent.state)                     # nothing of sigma changed
    copies = {"4": 1e-4 * torch.randn(2, 20, generator=gen), "6": torch.randn(2, 20, generator=gen)}
    helpers = fedmatch.Helpers(1e-4 * torch.randn(3, 2, 20, generator=gen), None)

    def count(part, copy, zeroed):
        values = [0.0 if zeroed and abs(x) <= 5e-6 else x for x in part.flatten().tolist()]
        return sum(abs(x - y) > SENT for x, y in zip(values, copy))

    up = down = with_helpers = 0
    for place, client in ((0, "4"), (2, "8")):
        copy = copies.get(client, torch.zeros(2, 20)).tolist()
        up += count(uploads[place].state["w"], sent.state["w"].flatten().tolist(), False)
        up += count(uploads[place].psi["w"], sent.psi["w"].flatten().tolist(), True)
        down += count(sent.state["w"], copy[0], False) + count(sent.psi["w"], copy[1], True)
        with_helpers += sum(count(psi, [0.0] * 20, True) for psi in helpers.psi[place])
    selected = [4, 6, 8]
    assert list(fedmatch.sparse_entries(args, sent, None, copies, selected, uploads)) == [up, down]
    assert list(fedmatch.sparse_entries(args, sent, helpers, copies, selected, uploads)) == [up, down + with_helpers]
    assert 0 < up < 60 and 0 < with_helpers < 80
    assert list(fedmatch.sparse_entries(args, sent, None, copies, [6], uploads[1:2])) == [0, 0]


# ---- runs ---------------------------------------------------------------------------------------------------------

def test_helpers_bytes_and_what_the_server_keeps(tmp_path, monkeypatch):
    """Also over a resume; the test set meets the sum, without small entries of psi."""
    calls, tested, client_update, evaluate = [], [], fedmatch.client_update, fedmatch.evaluate

    def spy(args, rnd, client, data, received, helper_psi, *networks):
        upload = client_update(args, rnd, client, data, received, helper_psi, *networks)
        calls.append((rnd, client, received, helper_psi, upload))
        return upload

    monkeypatch.setattr(fedmatch, "client_update", spy)
    monkeypatch.setattr(fedmatch, "evaluate", lambda *given: tested.append(given[1]) or evaluate(*given))
    flags = "--train-subset 80 --mu 1 --helper-interval 2 --clients-per-round 2 --zero-threshold 0.01".split()
    find_method(NAME).train(tmp_path, *flags, "--rounds", 2)
    folder = find_method(NAME).train(tmp_path, *flags, "--rounds", 4, "--resume")
    first, end, helped, copies = calls[0][2], checkpoint(folder), {1: 0, 2: 0, 3: 0, 4: 0}, {}
    assert all(torch.allclose(1.2 * first.state[n], first.state[n] + psi) for n, psi in first.psi.items())
    entries, size = sum(psi.numel() for psi in first.psi.values()), n_bytes(first.state)
    for number, (rnd, client, _, helper_psi, upload) in enumerate(calls):
        helped[rnd] += len(helper_psi)
        seen = {key: value for key, value in copies.items() if key != client}
        assert len(helper_psi) == (min(2, len(seen)) if rnd % 2 == 0 and client in copies else 0)
        assert all(any(torch.equal(psi, copy[1]) for copy in seen.values()) for psi in helper_psi)
        if number % 2:                                     # the server learns of a round's uploads at its end
            for _, other, _, _, sent in calls[number - 1:number + 1]:
                copies[other] = torch.stack([fedmatch.to_vector(part, sent.psi) for part in (sent.state, sent.psi)])
    assert helped[4] and not helped[1] and not helped[3]
    assert equal(end["copies"], {str(client): copy for client, copy in copies.items()})
    assert end["answers"].keys() == end["copies"].keys()
    assert all(answer.sum() == pytest.approx(1) for answer in end["answers"].values())
    for row in rows(folder):
        helpers, dense, rest = helped[int(row["round"])], 2 * (size + 4 * entries), 2 * (size - 4 * entries)
        assert int(row["bytes_up"]) == dense and int(row["bytes_down"]) == dense + 4 * entries * helpers
        assert int(row["helpers"]) == helpers and (row["loss_helper"] == "") == (not helpers)
        for way in ("up", "down"):
            assert rest < int(row[f"bytes_{way}_sparse"]) <= int(row[f"bytes_{way}"])
            assert (int(row[f"bytes_{way}_sparse"]) - rest) % 4 == 0
    zeroed = {name: torch.where(psi.abs() <= 0.01, 0, psi) for name, psi in end["psi"].items()}
    assert equal(tested[-1], fedmatch.joint(end["state"], zeroed))
    assert not equal(tested[-1], fedmatch.joint(end["state"], end["psi"]))


def test_no_helpers_is_a_setting(run_once):
    assert [(row["helpers"], row["loss_helper"]) for row in rows(run_once(NAME, "--helpers 0"))] == [("0", "")] * 2
