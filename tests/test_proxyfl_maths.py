"""ProxyFL's equations against the official program's figures, against slow loops, and at their limits."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN
from scripts import equal, n_bytes
from worlds import tiny_nets, tiny_state

import proxyfl

ICPL = np.load(GOLDEN / "proxyfl_icpl.npz")
GPT = np.load(GOLDEN / "proxyfl_gpt.npz")
PRIOR = json.loads((GOLDEN / "proxyfl_ema.json").read_text())
RESNET = json.loads((GOLDEN / "proxyfl_resnet8.json").read_text())
BYTES = {(10, False): 4_921_200, (100, False): 5_013_720, (10, True): 5_446_512, (100, True): 5_539_032}
F64 = torch.float64


def arrays(source, case, dtype=None):
    """The arrays of a golden case as tensors; floats in dtype."""
    found = {}
    for key in source.files:
        if key.startswith(f"{case}__"):
            value = torch.from_numpy(np.array(source[key]))
            found[key[len(case) + 2:]] = value.to(dtype) if dtype and value.is_floating_point() else value
    return SimpleNamespace(**found)


# ---- model --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("kind, heads", [("ResNet", False), ("ResNet_PC", True)])
def test_resnet8_names_shapes_counts_and_first_weights(kind, heads, classes):
    net, official = proxyfl.ResNet8(classes, heads=heads), RESNET["models"][f"{kind}_{classes}"]
    assert [[name, list(p.shape)] for name, p in net.named_parameters()] == official["parameters"]
    assert list(net.state_dict()) == official["state_keys_in_order"]
    assert sum(p.numel() for p in net.parameters()) == official["n_parameters"]
    assert n_bytes(net.state_dict()) == BYTES[classes, heads]
    for weight in (net.conv1.weight, net.layer3[0].conv2.weight):
        deviation = math.sqrt(2 / (9 * weight.shape[0]))
        assert weight.std().item() == pytest.approx(deviation, rel=0.05) and abs(weight.mean()) < 0.01
    assert (net.bn1.weight == 1).all() and (net.bn1.bias == 0).all()


def formula_weights(net, rule):
    """Fill the network by the golden README's formula; computed in double."""
    for name, value in net.state_dict().items():
        i = torch.arange(value.numel(), dtype=F64)
        u = torch.sin(i) if rule == "A" else torch.sin(1.7 * i + 0.3 * (i**2 % 97))
        if value.ndim > 1:
            new = u / math.sqrt(value[0].numel())
        elif name == "classifier.bias":
            new = 0.01 * torch.sin(i)
        elif name.endswith("weight"):
            new = 1 + 0.1 * torch.sin(i)
        elif name.endswith("bias"):
            new = 0.1 * torch.cos(i)
        else:
            continue
        value.copy_(new.float().reshape(value.shape))                      # rounded to float32, also in double


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("rule", ["A", "B"])
def test_resnet8_forward(rule, classes, dtype):
    official = RESNET["forward"][f"rule{rule}_classes{classes}"][dtype]
    net = proxyfl.ResNet8(classes).to(getattr(torch, dtype))
    formula_weights(net, rule)
    image = torch.cos(torch.arange(4 * 3 * 32 * 32, dtype=F64)).float().reshape(4, 3, 32, 32).to(net.conv1.weight.dtype)
    close = 1e-10 if dtype == "float64" else 2e-5

    def check(value, name):
        wanted = torch.tensor(official[name], dtype=value.dtype)
        torch.testing.assert_close(value.detach(), wanted, atol=close, rtol=close)

    check(net.eval()(image)[1][:, :10], "eval_before")
    features, logits = net.train()(image)
    check(logits[:, :10], "train")
    assert features.shape == (4, 256)
    check(net.bn1.running_mean[:8], "bn1_running_mean_first8")
    check(net.bn1.running_var[:8], "bn1_running_var_first8")
    check(net.eval()(image)[1][:, :10], "eval_after")


# ---- ICPL ---------------------------------------------------------------------------------------------------------

def projected_loss(case):
    """The official loss of a golden case, through this project's functions."""
    features = F.normalize(F.linear(case.features, case.feat_proj_weight, case.feat_proj_bias))
    proxy = F.normalize(F.linear(case.classifier_weight, case.proxy_proj_weight))
    class_set = proxyfl.class_sets(case.global_probs.float(), case.conf_mask, case.prior.float(), "prior", "none")
    positive = proxyfl.positive_proxy(case.global_probs, case.conf_mask, class_set, proxy)
    n_lab = max(0, int(case.n_labelled))
    return proxyfl.icpl_loss(features, class_set, positive[n_lab:], case.conf_mask[n_lab:], 1e-6, "joint")


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", ICPL["case_names"])
def test_icpl_loss_and_gradients(name, dtype):
    case, double = arrays(ICPL, name, dtype), dtype == F64
    inputs = "features", "classifier_weight", "feat_proj_weight", "feat_proj_bias", "proxy_proj_weight"
    for key in inputs:
        getattr(case, key).requires_grad_()
    loss = projected_loss(case)
    loss.backward()
    torch.testing.assert_close(loss.detach(), case.loss_f64, atol=1e-12 if double else 2e-6, rtol=0, check_dtype=False)
    for key in inputs:
        exact = double and key in inputs[:2]
        torch.testing.assert_close(getattr(case, key).grad, getattr(case, f"grad_{key}" + "_f64" * exact),
                                   check_dtype=False, atol=1e-12 if exact else 2e-6, rtol=1e-5)


def random_case(seed, rows=14, classes=5, width=6, n_lab=4):
    rng = torch.Generator().manual_seed(seed)
    features, proxy = (torch.randn(n, width, generator=rng, dtype=F64) for n in (rows, classes))
    prob = (2 * torch.randn(rows, classes, generator=rng, dtype=F64)).softmax(1)
    class_set = prob > 0.2
    class_set[prob.argmax(1) != 1] |= F.one_hot(prob.argmax(1), classes).bool()[prob.argmax(1) != 1]
    return features, proxy, prob, class_set, n_lab, prob.amax(1) > 0.6


@pytest.mark.parametrize("mean_over", ["joint", "separate"])
@pytest.mark.parametrize("floor", [-2.0, 1e-6])
@pytest.mark.parametrize("seed", range(3))
def test_icpl_against_a_loop_from_the_equations(seed, floor, mean_over):
    features, proxy, prob, class_set, n_lab, confident = random_case(seed)
    losses, sets = {True: [], False: []}, [set(row.nonzero().flatten().tolist()) for row in class_set]
    for i in range(n_lab, len(features)):
        positive = sum((1 if confident[i] else prob[i, c]) * proxy[c] for c in sets[i])                # Eq. 6
        up = down = math.exp(features[i] @ positive) if sets[i] else 1.0
        for j in range(len(features)):                                                                 # Eq. 7
            similarity = (features[i] @ features[j]).item()
            down += math.exp(similarity) if not sets[i] & sets[j] and similarity > floor else 0
        losses[bool(confident[i])].append(-math.log(up / down))                                        # Eq. 8
    groups = [losses[True] + losses[False]] if mean_over == "joint" else [losses[True], losses[False]]
    expected = sum(np.mean(group) for group in groups if group)
    positive = proxyfl.positive_proxy(prob, confident, class_set, proxy)[n_lab:]
    loss = proxyfl.icpl_loss(features, class_set, positive, confident[n_lab:], floor, mean_over)
    assert loss.item() == pytest.approx(expected, abs=1e-10)


def test_icpl_without_negatives_is_0_and_an_empty_group_counts_0():
    features, proxy, prob, class_set, n_lab, confident = random_case(0)
    same = torch.zeros_like(class_set).index_fill_(1, torch.tensor([2]), True)
    positive = proxyfl.positive_proxy(prob, confident, same, proxy)[n_lab:]
    loss = proxyfl.icpl_loss(features.requires_grad_(), same, positive, confident[n_lab:], -2, "joint")
    loss.backward()
    assert loss.item() == 0 and (features.grad == 0).all()                 # all of one class
    joint = proxyfl.icpl_loss(features, class_set, positive, confident[n_lab:], -2, "joint")
    for everybody in (True, False):
        group = torch.full((len(positive),), everybody)
        assert torch.allclose(proxyfl.icpl_loss(features, class_set, positive, group, -2, "separate"), joint)


def test_indecisive_set():
    prob = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.5, 0.3]])
    prior = torch.tensor([0.2, 0.5, 0.3])                                  # equal to the third row
    assert proxyfl.indecisive_set(prob, prior, empty_set="none").tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert proxyfl.indecisive_set(prob, prior).tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert proxyfl.indecisive_set(prob, torch.zeros(3)).all()
    assert proxyfl.indecisive_set(prob, torch.zeros(3), "top1").tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    wide = torch.rand(6, 9).softmax(1)
    top5 = proxyfl.indecisive_set(wide, prior, "top5")
    assert (top5.sum(1) == 5).all() and all(wide[i][top5[i]].min() >= wide[i][~top5[i]].max() for i in range(6))


# ---- pseudo-labels ------------------------------------------------------------------------------------------------

def test_confidence_rules():
    global_prob = torch.tensor([[0.96, 0.04], [0.5, 0.5], [0.6, 0.4], [0.95, 0.05]])
    local_prob = torch.tensor([[0.5, 0.5], [0.01, 0.99], [0.6, 0.4], [0.5, 0.5]])
    assert proxyfl.confident_mask(global_prob, local_prob, 0.95, "global").tolist() == [True, False, False, True]
    assert proxyfl.confident_mask(global_prob, local_prob, 0.95, "union").tolist() == [True, True, False, True]


@pytest.mark.parametrize("mean_over, divisor", [("batch", 4), ("confident", 2)])
def test_unlabelled_loss_by_hand(mean_over, divisor):
    logits = torch.randn(4, 2, requires_grad=True)
    label, mask = torch.tensor([0, 1, 1, 0]), torch.tensor([True, False, True, False])
    terms = [-(logits[i].exp()[label[i]] / logits[i].exp().sum()).log() for i in (0, 2)]
    loss = proxyfl.unlabelled_loss(logits, label, mask, mean_over)
    assert torch.allclose(loss, sum(terms) / divisor)
    loss.backward()
    assert (logits.grad[1] == 0).all() and (logits.grad[0] != 0).all()
    nothing = proxyfl.unlabelled_loss(logits, label, torch.zeros(4, dtype=torch.bool), mean_over)
    assert nothing.item() == 0 and nothing.requires_grad


# ---- global proxy tuning ------------------------------------------------------------------------------------------

class StoredOrder:
    def __init__(self, order):
        self.order = iter(order.numpy())

    def permutation(self, rows):
        return next(self.order)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", GPT["case_names"])
def test_gpt_tuned_weights(name, dtype):
    """Precision as in the golden README: 1e-7 in float32, but for large scales and for tiny distances.

    In double, too, the official margin was rounded to float32 first: 1e-5 at the scale of `cap_active`.
    """
    case, single = arrays(GPT, name, dtype), dtype == torch.float32
    rng = StoredOrder(case.row_order) if hasattr(case, "row_order") else None
    size = case.client_size.double() / case.client_size.sum()
    average = case.aggregated_weight if single else torch.einsum("m,mcd->cd", size, case.client_weight)
    farthest = proxyfl.max_min_distance(case.aggregated_weight)
    torch.testing.assert_close(farthest, case.max_min_distance, rtol=1e-6, atol=1e-7)
    tuned, start, end = proxyfl.tune_global_proxy(average, case.client_weight, int(case.epochs), float(case.lr),
                                                  int(case.batch_size), float(case.cap), "globals", rng)
    tolerance = {"cap_active": 2e-5, "single_client": 2e-6}.get(name, 5e-7 if single else 1e-8)
    expected = case.tuned_weight if single else case.tuned_weight_f64
    torch.testing.assert_close(tuned, expected, atol=tolerance, rtol=0)
    if name != "minibatch4":
        assert start.item() == pytest.approx(case.epoch_loss_f64[0].item(), abs=1e-5 if single else 1e-6)
    assert end < start or name == "single_client"          # there the start is the only uploaded classifier itself


@pytest.mark.parametrize("contrast, figure", [("locals", 2.05537), ("globals", 2.05476)])
def test_gpt_paper_form(contrast, figure):
    """Eq. 2 with one global proxy against all of a client's proxies; the golden README's figure for `typical`."""
    case = arrays(GPT, "typical", F64)
    _, start, _ = proxyfl.tune_global_proxy(case.aggregated_weight, case.client_weight, 0, 0.1, 0, 0.0, contrast, None)
    assert start.item() == pytest.approx(figure, abs=6e-6)


@pytest.mark.parametrize("contrast", ["locals", "globals"])
@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_gpt_loss_against_a_loop(contrast, margin):
    torch.manual_seed(0)
    proxy, center, total = torch.randn(3, 4, 5, dtype=F64), torch.randn(4, 5, dtype=F64), 0
    for m in range(3):
        for c in range(4):
            one, others = (proxy[m, c], center) if contrast == "globals" else (center[c], proxy[m])
            rivals = [torch.dist(one, other) for other in others]
            up = math.exp(-(rivals[c] + margin))
            total -= math.log(up / (up + sum(math.exp(-rivals[k]) for k in range(4) if k != c)))
    given = (proxy, None) if contrast == "locals" else (proxy.reshape(12, 5), torch.arange(4).repeat(3))
    loss = proxyfl.gpt_loss(center, *given, margin, contrast).item()
    assert loss == pytest.approx(total if contrast == "locals" else total / 12)


@pytest.mark.parametrize("contrast", ["globals", "locals"])
def test_gpt_limits(contrast):
    torch.manual_seed(0)
    proxy = torch.randn(3, 4, 5)
    average = proxy.mean(0)
    before = average.clone()

    def tune(start, uploaded, epochs):
        return proxyfl.tune_global_proxy(start, uploaded, epochs, 0.1, 4, 100.0, contrast, np.random.default_rng(0))

    assert torch.equal(tune(average, proxy, 0)[0], before)
    tuned = tune(average, proxy, 5)[0]
    assert torch.equal(average, before) and not torch.equal(tuned, before)                 # a copy is tuned
    assert tune(proxy[0], proxy[:1], 3)[0].isfinite().all()                                # distance 0: no NaN
    tuned, start, _ = tune(average[:1], proxy[:, :1], 3)
    assert torch.equal(tuned, average[:1]) and start == 0                                  # one class has no rival


# ---- class prior --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", PRIOR["cases"])
def test_prior_pooled_counts_and_smoothing(name):
    case = PRIOR["cases"][name]
    prior = torch.full((case["num_classes"],), 1 / case["num_classes"], dtype=F64)
    for counts, single, double in zip(case["counts"], case["prior"][1:], case["prior_counts_float64"][1:]):
        prior = proxyfl.update_prior(prior, torch.tensor(counts), "pooled", PRIOR["beta"])
        assert np.allclose(prior, double, atol=1e-12, rtol=0) and np.allclose(prior, single, atol=2e-8, rtol=0)
        assert prior.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("counts_of, momentum, expected", [
    ("clients", 0.0, [(0.9 + 0.25) / 2, (0.1 + 0.75) / 2]), ("pooled", 0.0, [109 / 410, 301 / 410]),
    ("pooled", 1.0, [0.5, 0.5])])
def test_prior_of_the_paper_averages_proportions(counts_of, momentum, expected):
    prior = torch.tensor([0.5, 0.5], dtype=F64)
    counts = torch.tensor([[9.0, 1.0], [100.0, 300.0], [0.0, 0.0]])        # the third client counted nothing
    assert proxyfl.update_prior(prior, counts, counts_of, momentum).tolist() == pytest.approx(expected)
    assert torch.equal(proxyfl.update_prior(prior, torch.zeros(3, 2), counts_of, momentum), prior)


# ---- one local step -----------------------------------------------------------------------------------------------

class StoredNet(torch.nn.Module):
    """Answers every forward pass with the rows it was given, in the place of a network."""

    def __init__(self, features, logits, case):
        super().__init__()
        self.features, self.logits = features, logits
        self.classifier = SimpleNamespace(weight=case.classifier_weight)
        self.feat_proj = lambda x: F.linear(x, case.feat_proj_weight, case.feat_proj_bias)
        self.proxy_proj = lambda x: F.linear(x, case.proxy_proj_weight)

    def forward(self, views):
        rows = views[:, 0, 0, 0].long()                                    # a view's pixel value is its row number
        return self.features[rows], self.logits[rows]


def step(variant, case, local_logits, label, *flags):
    """local_loss on the rows of a golden case, with the given local logits in the place of the network's."""
    args = proxyfl.parse_args(["--variant", variant, *map(str, flags)])
    args.amp = False
    views = torch.arange(len(case.features)).float().view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    net, teacher = (StoredNet(case.features, logits, case) for logits in (local_logits, case.global_probs.log()))
    return proxyfl.local_loss(args, net, teacher, views, label, case.prior.float())


def test_local_step_official_against_golden_trainer_layout():
    """The official assembly of class sets, weights and masks: labelled, weak and strong rows in one batch."""
    case, threshold = arrays(ICPL, "trainer_layout"), 0.95
    n_lab, rows, confident = int(case.n_labelled), len(case.features), case.conf_mask
    local_logits = torch.zeros(rows, 10)                   # unsure everywhere but where the local model decides
    by_local = confident & (case.global_probs.amax(1) < threshold)
    assert by_local[n_lab:].sum() == 2 and not by_local[:n_lab].any()      # one image, two views: the union mask works
    local_logits[by_local.nonzero()[0], 0] = 9.0
    label, flags = torch.zeros(n_lab, dtype=torch.int64), ("--conf-threshold", threshold, "--empty-set", "none")
    loss, counts, values = step("official", case, local_logits, label, *flags)
    assert torch.equal(values["confident"], confident[n_lab:n_lab + 12])
    assert values["loss_icpl"].item() == pytest.approx(case.loss.item(), abs=2e-6)
    expected = math.log(10) * (1 + confident[n_lab:].float().mean()) + case.loss
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    kept = case.global_probs[n_lab:n_lab + 12].argmax(1)[confident[n_lab:n_lab + 12]]
    assert torch.equal(counts, torch.bincount(torch.cat([label, kept]), minlength=10))


def test_local_step_paper_against_a_loop():
    """True classes of labelled rows, global confidence, local weights, two averages, all negatives."""
    case, n_lab, n_unl, classes, threshold = arrays(ICPL, "trainer_layout"), 6, 12, 10, 0.5
    torch.manual_seed(1)
    local_logits, label = torch.randn(30, classes), torch.randint(classes, (n_lab,))
    weak_prob, local_prob = case.global_probs[n_lab:n_lab + n_unl], local_logits[n_lab:n_lab + n_unl].softmax(1)
    sets, positives, confident = [{int(y)} for y in label], [None] * n_lab, [True] * n_lab
    unit_proxy, unit = F.normalize(case.classifier_weight), F.normalize(case.features)
    for i in range(n_unl):
        sure, top = bool(weak_prob[i].max() >= threshold), {int(weak_prob[i].argmax())}
        above = {c for c in range(classes) if weak_prob[i, c] > case.prior[c].float()}
        sets.append(top if sure else above or top)
        positives.append(sum((1.0 if sure else local_prob[i, c]) * unit_proxy[c] for c in sets[-1]))
        confident.append(sure)
    sets, positives, confident = (part + part[n_lab:] for part in (sets, positives, confident))
    losses = {True: [], False: []}
    for i in range(n_lab, 30):
        up = (unit[i] @ positives[i]).exp()
        down = up + sum((unit[i] @ unit[j]).exp() for j in range(30) if not sets[i] & sets[j])
        losses[confident[i]].append(-(up / down).log().item())
    assert losses[True] and losses[False]
    expected = np.mean(losses[True]) + np.mean(losses[False])
    loss, _, values = step("paper", case, local_logits, label, "--conf-threshold", threshold)
    assert values["loss_icpl"].item() == pytest.approx(expected, abs=1e-5)
    sure = [i for i in range(n_unl) if confident[n_lab + i]]
    expected += F.cross_entropy(local_logits[n_lab + n_unl:][sure], weak_prob.argmax(1)[sure])
    assert loss.item() == pytest.approx((F.cross_entropy(local_logits[:n_lab], label) + expected).item(), abs=1e-5)


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_icpl_gradients_reach_features_and_proxies_but_not_the_weights(variant):
    case = arrays(ICPL, "trainer_layout")
    case.features.requires_grad_(), case.classifier_weight.requires_grad_()
    local_logits = torch.randn(30, 10, requires_grad=True)
    _, _, values = step(variant, case, local_logits, torch.zeros(6, dtype=torch.int64))
    values["loss_icpl"].backward()
    assert case.features.grad.abs().sum() > 0 and case.classifier_weight.grad.abs().sum() > 0
    assert local_logits.grad is None or (local_logits.grad == 0).all()


def test_step_metrics_count_images_whose_label_the_client_does_not_own():
    mark, one = torch.tensor([True, True, False, False, False]), torch.tensor(1.0)
    values = dict(loss_sup=one, loss_unsup=2 * one, loss_icpl=3 * one, pseudo_label=torch.tensor([0, 1, 0, 0, 1]),
                  confident=mark, class_set=torch.tensor([[1, 0], [0, 1], [1, 1], [0, 1], [0, 1]]).bool())
    truth, hidden = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([True, True, True, True, False])
    found = dict(zip(proxyfl.METRICS, proxyfl.step_metrics(values, truth, hidden, True).tolist()))
    assert found == dict(steps=1, sup_steps=1, loss_sup=1, loss_unsup=2, loss_icpl=3, images=4, used=2, correct=3,
                         used_correct=1, low=2, low_correct=2, set_hit=1, set_size=3)


# ---- the server ---------------------------------------------------------------------------------------------------

def test_server_averages_by_images_and_tunes_the_classifier_weight_alone():
    args = proxyfl.parse_args(["--no-gpt"])
    args.width = 8
    *states, old = map(tiny_state, tiny_nets(proxyfl, args, 4))
    counts, zeros = torch.tensor([1.0, 2, 0, 0]), torch.zeros(len(proxyfl.METRICS))
    uploads = [proxyfl.Upload(state, counts, torch.tensor(float(weight), dtype=F64), zeros)
               for state, weight in zip(states, (30, 10, 0))]              # the last had no image
    received = proxyfl.Broadcast(old, torch.full((4,), 0.25, dtype=F64))
    plain, nothing = proxyfl.server_update(args, 1, received, uploads)
    assert equal(plain.state, proxyfl.average(states[:2], torch.tensor([3.0, 1.0], dtype=F64)))
    assert torch.equal(plain.class_prior, proxyfl.update_prior(received.class_prior, counts[None], "pooled", 0.99))
    assert set(nothing.values()) == {None} and proxyfl.server_update(args, 1, received, uploads[2:])[0] is received
    args.gpt, args.gpt_epochs = True, 3
    tuned, losses = proxyfl.server_update(args, 1, received, uploads)
    for name, value in plain.state.items():
        assert torch.equal(value, tuned.state[name]) == (name != "classifier.weight"), name
    assert losses["loss_gpt_end"] < losses["loss_gpt_start"]
    args.gpt_epochs = 0
    assert equal(proxyfl.server_update(args, 1, received, uploads)[0].state, plain.state)
