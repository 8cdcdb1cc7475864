"""ProxyFL's equations against the official program's figures, against slow loops, and at their limits."""

import contextlib
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN
from scripts import n_bytes

import common
import proxyfl

ICPL = np.load(GOLDEN / "proxyfl_icpl.npz")
GPT = np.load(GOLDEN / "proxyfl_gpt.npz")
PRIOR = json.loads((GOLDEN / "proxyfl_ema.json").read_text())
RESNET = json.loads((GOLDEN / "proxyfl_resnet8.json").read_text())


def arrays(source, case, dtype=None):
    """The arrays of a golden case as tensors; floats in dtype."""
    found = {}
    for key in source.files:
        if key.startswith(f"{case}__"):
            value = torch.from_numpy(np.array(source[key]))
            found[key[len(case) + 2 :]] = value.to(dtype) if dtype and value.is_floating_point() else value
    return SimpleNamespace(**found)


# ---- model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("kind, heads", [("ResNet", False), ("ResNet_PC", True)])
def test_resnet8_names_shapes_and_counts(kind, heads, classes):
    net, official = proxyfl.ResNet8(classes, heads=heads), RESNET["models"][f"{kind}_{classes}"]
    assert [[name, list(p.shape)] for name, p in net.named_parameters()] == official["parameters"]
    assert list(net.state_dict()) == official["state_keys_in_order"]
    assert sum(p.numel() for p in net.parameters()) == official["n_parameters"]
    size = n_bytes(net.state_dict())
    assert (
        size
        == {(10, False): 4_921_200, (100, False): 5_013_720, (10, True): 5_446_512, (100, True): 5_539_032}[
            classes, heads
        ]
    )


def formula_weights(net, rule):
    """Fill the network by the golden README's formula; computed in double."""
    for name, value in net.state_dict().items():
        i = torch.arange(value.numel(), dtype=torch.float64)
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
        value.copy_(new.float().reshape(value.shape))  # rounded to float32, also in the double network


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("rule", ["A", "B"])
def test_resnet8_forward(rule, classes, dtype):
    official = RESNET["forward"][f"rule{rule}_classes{classes}"][dtype]
    net = proxyfl.ResNet8(classes)
    net = net.double() if dtype == "float64" else net
    formula_weights(net, rule)
    image = (
        torch.cos(torch.arange(4 * 3 * 32 * 32, dtype=torch.float64))
        .float()
        .reshape(4, 3, 32, 32)
        .to(net.conv1.weight.dtype)
    )
    tolerance = dict(atol=1e-10, rtol=1e-10) if dtype == "float64" else dict(atol=2e-5, rtol=2e-5)

    def check(value, name):
        torch.testing.assert_close(value.detach(), torch.tensor(official[name], dtype=value.dtype), **tolerance)

    check(net.eval()(image)[1][:, :10], "eval_before")
    features, logits = net.train()(image)
    check(logits[:, :10], "train")
    assert features.shape == (4, 256)
    check(net.bn1.running_mean[:8], "bn1_running_mean_first8")
    check(net.bn1.running_var[:8], "bn1_running_var_first8")
    check(net.eval()(image)[1][:, :10], "eval_after")


def test_resnet8_initialisation():
    net = proxyfl.ResNet8(10)
    for weight in (net.conv1.weight, net.layer3[0].conv2.weight):
        out = weight.shape[0]
        assert weight.std().item() == pytest.approx(math.sqrt(2 / (9 * out)), rel=0.05) and abs(weight.mean()) < 0.01
    assert (net.bn1.weight == 1).all() and (net.bn1.bias == 0).all()


# ---- ICPL -----------------------------------------------------------------------------------------------------


def projected_loss(case):
    """The official loss of a golden case, through this project's functions."""
    features = F.normalize(F.linear(case.features, case.feat_proj_weight, case.feat_proj_bias))
    proxy = F.normalize(F.linear(case.classifier_weight, case.proxy_proj_weight))
    class_set = proxyfl.class_sets(case.global_probs.float(), case.conf_mask, case.prior.float(), "prior", "none")
    positive = proxyfl.positive_proxy(case.global_probs, case.conf_mask, class_set, proxy)
    n_lab = max(0, int(case.n_labelled))
    return proxyfl.icpl_loss(features, class_set, positive[n_lab:], case.conf_mask[n_lab:], 1e-6, "joint")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ICPL["case_names"])
def test_icpl_loss_and_gradients(name, dtype):
    case = arrays(ICPL, name, dtype)
    inputs = ("features", "classifier_weight", "feat_proj_weight", "feat_proj_bias", "proxy_proj_weight")
    for key in inputs:
        getattr(case, key).requires_grad_()
    loss = projected_loss(case)
    loss.backward()
    double = dtype == torch.float64
    torch.testing.assert_close(loss.detach(), case.loss_f64, atol=1e-12 if double else 2e-6, rtol=0, check_dtype=False)
    for key in inputs:
        expected = getattr(case, f"grad_{key}" + ("_f64" if double and key in inputs[:2] else ""))
        torch.testing.assert_close(
            getattr(case, key).grad,
            expected,
            check_dtype=False,
            atol=1e-12 if double and key in inputs[:2] else 2e-6,
            rtol=1e-5,
        )


def random_case(seed, rows=14, classes=5, width=6, n_lab=4):
    rng = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, width, generator=rng, dtype=torch.float64)
    proxy = torch.randn(classes, width, generator=rng, dtype=torch.float64)
    prob = (2 * torch.randn(rows, classes, generator=rng, dtype=torch.float64)).softmax(1)
    class_set = prob > 0.2
    class_set[prob.argmax(1) != 1] |= F.one_hot(prob.argmax(1), classes).bool()[prob.argmax(1) != 1]
    return features, proxy, prob, class_set, n_lab, prob.amax(1) > 0.6


@pytest.mark.parametrize("mean_over", ["joint", "separate"])
@pytest.mark.parametrize("floor", [-2.0, 1e-6])
@pytest.mark.parametrize("seed", range(3))
def test_icpl_against_a_loop_from_the_equations(seed, floor, mean_over):
    features, proxy, prob, class_set, n_lab, confident = random_case(seed)
    losses = {True: [], False: []}
    for i in range(n_lab, len(features)):
        positive = sum(
            (1 if confident[i] else prob[i, c]) * proxy[c] for c in range(len(proxy)) if class_set[i, c]
        )  # Eq. 6
        up = math.exp(features[i] @ positive)
        down = up
        for j in range(len(features)):  # Eq. 7
            if not set(class_set[i].nonzero().flatten().tolist()) & set(class_set[j].nonzero().flatten().tolist()):
                similarity = (features[i] @ features[j]).item()
                down += math.exp(similarity) if similarity > floor else 0
        losses[bool(confident[i])].append(-math.log(up / down))  # Eq. 8
    groups = [losses[True] + losses[False]] if mean_over == "joint" else [losses[True], losses[False]]
    expected = sum(np.mean(group) for group in groups if group)
    positive = proxyfl.positive_proxy(prob, confident, class_set, proxy)[n_lab:]
    loss = proxyfl.icpl_loss(features, class_set, positive, confident[n_lab:], floor, mean_over)
    assert loss.item() == pytest.approx(expected, abs=1e-10)


def test_icpl_limits():
    features, proxy, prob, class_set, n_lab, confident = random_case(0)
    same = torch.zeros_like(class_set).index_fill_(1, torch.tensor([2]), True)
    features.requires_grad_()
    positive = proxyfl.positive_proxy(prob, confident, same, proxy)[n_lab:]
    loss = proxyfl.icpl_loss(features, same, positive, confident[n_lab:], -2, "joint")
    loss.backward()
    assert loss.item() == 0 and (features.grad == 0).all()  # all of one class: no negatives
    both = [
        proxyfl.icpl_loss(features, class_set, positive, torch.full((len(positive),), everybody), -2, "separate")
        for everybody in (True, False)
    ]
    joint = proxyfl.icpl_loss(features, class_set, positive, confident[n_lab:], -2, "joint")
    assert torch.allclose(both[0], joint) and torch.allclose(
        both[1], joint
    )  # one group is empty and counts 0, never 0/0


def test_indecisive_set():
    prob = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.5, 0.3]])
    prior = torch.tensor([0.2, 0.5, 0.3])
    assert proxyfl.indecisive_set(prob, prior, empty_set="none").tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert proxyfl.indecisive_set(prob, prior).tolist() == [
        [1, 0, 0],
        [0, 0, 1],
        [0, 1, 0],
    ]  # equal to the prior: top-1
    assert proxyfl.indecisive_set(prob, prior, "top1").tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    wide = torch.rand(6, 9).softmax(1)
    top5 = proxyfl.indecisive_set(wide, prior, "top5")
    assert (top5.sum(1) == 5).all() and all(wide[i][top5[i]].min() >= wide[i][~top5[i]].max() for i in range(6))


# ---- pseudo-labels ----------------------------------------------------------------------------------------------


def test_confidence_rules_and_unlabelled_loss():
    global_prob = torch.tensor([[0.96, 0.04], [0.5, 0.5], [0.6, 0.4], [0.95, 0.05]])
    local_prob = torch.tensor([[0.5, 0.5], [0.01, 0.99], [0.6, 0.4], [0.5, 0.5]])
    assert proxyfl.confident_mask(global_prob, local_prob, 0.95, "global").tolist() == [True, False, False, True]
    assert proxyfl.confident_mask(global_prob, local_prob, 0.95, "union").tolist() == [True, True, False, True]
    logits = torch.randn(4, 2, requires_grad=True)
    label, mask = torch.tensor([0, 1, 1, 0]), torch.tensor([True, False, True, False])
    rows = [-(logits[i].exp()[label[i]] / logits[i].exp().sum()).log() for i in (0, 2)]
    assert torch.allclose(proxyfl.unlabelled_loss(logits, label, mask, "batch"), sum(rows) / 4)
    loss = proxyfl.unlabelled_loss(logits, label, mask, "confident")
    assert torch.allclose(loss, sum(rows) / 2)
    loss.backward()
    assert (logits.grad[1] == 0).all() and (logits.grad[0] != 0).all()
    for mean_over in ("batch", "confident"):
        nothing = proxyfl.unlabelled_loss(logits, label, torch.zeros(4, dtype=torch.bool), mean_over)
        assert nothing.item() == 0 and nothing.requires_grad


# ---- global proxy tuning ------------------------------------------------------------------------------------------


class StoredOrder:
    def __init__(self, order):
        self.order = iter(order.numpy())

    def permutation(self, rows):
        return next(self.order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GPT["case_names"])
def test_gpt_tuned_weights(name, dtype):
    case = arrays(GPT, name, dtype)
    rng = StoredOrder(case.row_order) if hasattr(case, "row_order") else None
    size = case.client_size / case.client_size.sum()
    average = (
        case.aggregated_weight
        if dtype == torch.float32
        else torch.einsum("m,mcd->cd", size.double(), case.client_weight)
    )
    torch.testing.assert_close(
        proxyfl.max_min_distance(case.aggregated_weight), case.max_min_distance, rtol=1e-6, atol=1e-7
    )
    tuned, start, end = proxyfl.tune_global_proxy(
        average,
        case.client_weight,
        int(case.epochs),
        float(case.lr),
        int(case.batch_size),
        float(case.cap),
        "globals",
        rng,
    )
    # The golden README's precision: 1e-7 in float32, but for large scales and for tiny distances.
    # In double, too, the official margin was rounded to float32 first: 1e-5 at the scale of `cap_active`.
    tolerance = {"cap_active": 2e-5, "single_client": 2e-6}.get(name, 5e-7 if dtype == torch.float32 else 1e-8)
    expected = case.tuned_weight if dtype == torch.float32 else case.tuned_weight_f64
    torch.testing.assert_close(tuned, expected, atol=tolerance, rtol=0)
    if name != "minibatch4":
        assert start.item() == pytest.approx(
            case.epoch_loss_f64[0].item(), abs=1e-5 if dtype == torch.float32 else 1e-6
        )
    assert end < start or name == "single_client"  # there the start is the only uploaded classifier itself


def test_gpt_paper_form():
    """Eq. 2 with one global proxy against all of a client's proxies; the golden README's figure for `typical`."""
    case = arrays(GPT, "typical", torch.float64)
    _, start, _ = proxyfl.tune_global_proxy(case.aggregated_weight, case.client_weight, 0, 0.1, 0, 0.0, "locals", None)
    assert start.item() == pytest.approx(2.05537, abs=6e-6)
    _, start, _ = proxyfl.tune_global_proxy(case.aggregated_weight, case.client_weight, 0, 0.1, 0, 0.0, "globals", None)
    assert start.item() == pytest.approx(2.05476, abs=6e-6)


@pytest.mark.parametrize("contrast", ["locals", "globals"])
@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_gpt_loss_against_a_loop(contrast, margin):
    torch.manual_seed(0)
    proxy, center = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    total = 0
    for m in range(3):
        for c in range(4):
            rivals = [
                torch.dist(proxy[m, c], center[k]) if contrast == "globals" else torch.dist(proxy[m, k], center[c])
                for k in range(4)
            ]
            up = math.exp(-(rivals[c] + margin))
            total -= math.log(up / (up + sum(math.exp(-rivals[k]) for k in range(4) if k != c)))
    if contrast == "locals":
        assert proxyfl.gpt_loss(center, proxy, None, margin, contrast).item() == pytest.approx(total)
    else:
        rows, target = proxy.reshape(12, 5), torch.arange(4).repeat(3)
        assert proxyfl.gpt_loss(center, rows, target, margin, contrast).item() == pytest.approx(total / 12)


def test_gpt_limits():
    torch.manual_seed(0)
    proxy = torch.randn(3, 4, 5)
    average = proxy.mean(0)
    before = average.clone()
    assert torch.equal(
        proxyfl.tune_global_proxy(average, proxy, 0, 0.1, 4, 100.0, "globals", np.random.default_rng(0))[0], before
    )
    for contrast in ("globals", "locals"):
        tuned = proxyfl.tune_global_proxy(average, proxy, 5, 0.1, 4, 100.0, contrast, np.random.default_rng(0))[0]
        assert torch.equal(average, before) and not torch.equal(tuned, before)  # a copy is tuned
        alone = proxyfl.tune_global_proxy(proxy[0], proxy[:1], 3, 0.1, 4, 100.0, contrast, np.random.default_rng(0))[0]
        assert alone.isfinite().all()  # distance 0 to the own proxy: no NaN
    one_class = proxyfl.tune_global_proxy(
        average[:1], proxy[:, :1], 3, 0.1, 4, 100.0, "globals", np.random.default_rng(0)
    )
    assert torch.equal(one_class[0], average[:1]) and one_class[1] == 0


# ---- class prior --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRIOR["cases"])
def test_prior_pooled_counts_and_smoothing(name):
    case = PRIOR["cases"][name]
    prior = torch.full((case["num_classes"],), 1 / case["num_classes"], dtype=torch.float64)
    for counts, single, double in zip(case["counts"], case["prior"][1:], case["prior_counts_float64"][1:]):
        prior = proxyfl.update_prior(prior, torch.tensor(counts), "pooled", PRIOR["beta"])
        assert np.allclose(prior, double, atol=1e-12, rtol=0) and np.allclose(prior, single, atol=2e-8, rtol=0)
        assert prior.sum().item() == pytest.approx(1)


def test_prior_of_the_paper_averages_proportions():
    prior = torch.tensor([0.5, 0.5], dtype=torch.float64)
    counts = torch.tensor([[9.0, 1.0], [100.0, 300.0], [0.0, 0.0]])  # the third client counted nothing
    assert proxyfl.update_prior(prior, counts, "clients", 0.0).tolist() == pytest.approx(
        [(0.9 + 0.25) / 2, (0.1 + 0.75) / 2]
    )
    assert proxyfl.update_prior(prior, counts, "pooled", 0.0).tolist() == pytest.approx([109 / 410, 301 / 410])
    assert proxyfl.update_prior(prior, counts, "pooled", 1.0).tolist() == [0.5, 0.5]
    assert torch.equal(proxyfl.update_prior(prior, torch.zeros(3, 2), "clients", 0.0), prior)


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
        rows = views[:, 0, 0, 0].long()  # a view's one pixel value is its row number
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
    case = arrays(ICPL, "trainer_layout")
    n_lab, rows = int(case.n_labelled), len(case.features)
    confident, threshold = case.conf_mask, 0.95
    local_logits = torch.zeros(rows, 10)  # unsure everywhere but where the local model decides
    by_local = confident & (case.global_probs.amax(1) < threshold)
    assert by_local[n_lab:].sum() == 2 and not by_local[:n_lab].any()  # one image, two views: the union mask is at work
    local_logits[by_local.nonzero()[0], 0] = 9.0
    label = torch.zeros(n_lab, dtype=torch.int64)
    loss, counts, values = step(
        "official", case, local_logits, label, "--conf-threshold", threshold, "--empty-set", "none"
    )
    assert torch.equal(values["confident"], confident[n_lab : n_lab + 12])
    assert values["loss_icpl"].item() == pytest.approx(case.loss.item(), abs=2e-6)
    expected = (
        F.cross_entropy(torch.zeros(n_lab, 10), label) + math.log(10) * confident[n_lab:].float().mean() + case.loss
    )
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    kept = case.global_probs[n_lab : n_lab + 12].argmax(1)[confident[n_lab : n_lab + 12]]
    assert counts.tolist() == (torch.bincount(label, minlength=10) + torch.bincount(kept, minlength=10)).tolist()


def test_local_step_paper_against_a_loop():
    """True classes of labelled rows, global confidence, local weights, two averages, all negatives."""
    case = arrays(ICPL, "trainer_layout")
    n_lab, n_unl, classes, threshold = 6, 12, 10, 0.5
    torch.manual_seed(1)
    local_logits, label = torch.randn(30, classes), torch.randint(classes, (n_lab,))
    prior = case.prior.float()
    weak_prob, local_prob = case.global_probs[n_lab : n_lab + n_unl], local_logits[n_lab : n_lab + n_unl].softmax(1)
    sets, positives, confident = [{int(y)} for y in label], [None] * n_lab, [True] * n_lab
    unit_proxy = F.normalize(case.classifier_weight)
    for i in range(n_unl):
        sure = weak_prob[i].max() >= threshold
        sets.append(
            {int(weak_prob[i].argmax())}
            if sure
            else {c for c in range(classes) if weak_prob[i, c] > prior[c]} or {int(weak_prob[i].argmax())}
        )
        positives.append(sum((1.0 if sure else local_prob[i, c]) * unit_proxy[c] for c in sets[-1]))
        confident.append(bool(sure))
    sets, positives, confident = (part + part[n_lab:] for part in (sets, positives, confident))
    unit = F.normalize(case.features)
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
    strong = F.cross_entropy(local_logits[n_lab + n_unl :][sure], weak_prob.argmax(1)[sure])
    assert loss.item() == pytest.approx(
        (F.cross_entropy(local_logits[:n_lab], label) + strong + expected).item(), abs=1e-5
    )


def test_without_icpl_the_step_is_fixmatch_with_global_labels():
    case = arrays(ICPL, "trainer_layout")
    torch.manual_seed(2)
    local_logits, label = (2 * torch.randn(30, 10)).requires_grad_(), torch.randint(10, (6,))
    loss, _, values = step("official", case, local_logits, label, "--no-icpl", "--conf-threshold", 0.5)
    weak, local = case.global_probs[6:18], local_logits[6:18].detach().softmax(1)
    mask = (weak.amax(1) >= 0.5) | (local.amax(1) >= 0.5)
    expected = (
        F.cross_entropy(local_logits[:6], label)
        + (F.cross_entropy(local_logits[18:], weak.argmax(1), reduction="none") * mask).sum() / 12
    )
    assert values["class_set"] is None and loss.item() == pytest.approx(expected.item(), abs=1e-6)
    loss.backward()
    assert (local_logits.grad[6:18] == 0).all()  # weak views teach, they do not learn
    assert (local_logits.grad[18:][~mask] == 0).all() and (local_logits.grad[18:][mask] != 0).any(1).all()


def test_icpl_gradients_reach_features_and_proxies_but_not_the_weights():
    case = arrays(ICPL, "trainer_layout")
    case.features.requires_grad_(), case.classifier_weight.requires_grad_()
    local_logits = torch.randn(30, 10, requires_grad=True)
    for variant in ("paper", "official"):
        case.features.grad = case.classifier_weight.grad = local_logits.grad = None
        _, _, values = step(variant, case, local_logits, torch.zeros(6, dtype=torch.int64))
        values["loss_icpl"].backward()
        assert case.features.grad.abs().sum() > 0 and case.classifier_weight.grad.abs().sum() > 0
        assert local_logits.grad is None or (local_logits.grad == 0).all()


# ---- averaging ------------------------------------------------------------------------------------------------------


def upload(seed, weight, classes=3, counter=1):
    torch.manual_seed(seed)
    net = proxyfl.ResNet8(classes, 8)
    state = {
        name: torch.randn_like(value).abs() if value.is_floating_point() else torch.tensor(counter)
        for name, value in net.state_dict().items()
    }
    return proxyfl.Upload(
        state, torch.rand(classes), torch.tensor(float(weight), dtype=torch.float64), torch.zeros(len(proxyfl.METRICS))
    )


def average(uploads, *flags):
    args = proxyfl.parse_args(["--no-gpt", *flags])
    old = proxyfl.Broadcast(
        {name: value.clone() for name, value in upload(99, 1).state.items()},
        torch.full((3,), 1 / 3, dtype=torch.float64),
    )
    return proxyfl.server_update(args, 1, old, uploads), old


def test_average_is_weighted_by_images_and_keeps_integer_counters():
    uploads = [upload(1, 30, counter=3), upload(2, 10, counter=8), upload(3, 0, counter=5)]
    (new, _), _ = average(uploads)
    for name, value in new.state.items():
        a, b = uploads[0].state[name], uploads[1].state[name]
        assert value.dtype == a.dtype and value.shape == a.shape
        if value.is_floating_point():
            torch.testing.assert_close(value, 0.75 * a + 0.25 * b)
        else:
            assert value.item() == 3
        assert value.data_ptr() not in (a.data_ptr(), b.data_ptr())
    net = proxyfl.ResNet8(3, 8)
    net.load_state_dict(new.state, strict=True)
    net.bn1.momentum = None  # cumulative averaging needs a sane counter
    assert net.train()(torch.rand(2, 3, 8, 8))[1].isfinite().all()


def test_average_of_equal_states_is_the_state_and_order_hardly_matters():
    (same, _), _ = average([upload(1, 5), upload(1, 7)])
    for name, value in same.state.items():
        torch.testing.assert_close(value, upload(1, 1).state[name])
    uploads = [upload(k, k + 1) for k in range(4)]
    (one, _), _ = average(uploads)
    (other, _), _ = average(uploads[::-1])
    for name, value in one.state.items():
        torch.testing.assert_close(value, other.state[name])


def test_nothing_trained_keeps_the_previous_model():
    (new, losses), old = average([upload(1, 0), upload(2, 0)])
    assert new is old and losses == (None, None)


def test_gpt_changes_the_classifier_weight_alone():
    uploads = [upload(1, 5), upload(2, 5)]
    (plain, _), _ = average(uploads)
    (tuned, losses), _ = average(uploads, "--gpt", "--gpt-epochs", "3")
    for name, value in plain.state.items():
        assert torch.equal(value, tuned.state[name]) == (name != "classifier.weight"), name
    (zero, _), _ = average(uploads, "--gpt", "--gpt-epochs", "0")
    assert torch.equal(zero.state["classifier.weight"], plain.state["classifier.weight"]) and losses[1] < losses[0]


def test_passes_drop_partial_batches_and_restart():
    batches = proxyfl.passes(2500, 256, 19, np.random.default_rng(0))
    assert batches.shape == (19, 256)
    for first, last in ((0, 9), (9, 18)):
        assert len(np.unique(batches[first:last])) == 9 * 256  # no image twice in a pass
    assert proxyfl.passes(3, 3, 2, np.random.default_rng(0)).shape == (2, 3)
    assert common.stream(1, "x").integers(10) == common.stream(1, "x").integers(10)


@pytest.mark.parametrize("flags", [[], ["--variant", "paper"], ["--candidate-set", "top5"], ["--no-icpl"]])
def test_a_local_step_reads_nothing_back_to_the_host(flags, monkeypatch):
    """On the meta device there are no values: a step that asks for one, or whose shapes depend on one, fails."""
    args = proxyfl.parse_args(flags)
    args.amp = False
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # it knows no meta device
    with torch.device("meta"):
        net, teacher = (proxyfl.ResNet8(10, 8, args.similarity == "projected") for _ in range(2))
        images, truth, hidden = (
            torch.empty(22, 3, 32, 32, dtype=torch.uint8),
            torch.empty(8).long(),
            torch.empty(8).bool(),
        )
        draws = torch.empty(8, common.STRONG_DRAWS)
        weak = common.weak_view(images[:14], torch.empty(14, common.WEAK_DRAWS))
        views = common.normalise(torch.cat([weak, common.strong_view(images[14:], draws)]), (0.5,) * 3, (0.2,) * 3)
        loss, counts, values = proxyfl.local_loss(args, net, teacher, views, torch.empty(6).long(), torch.empty(10))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    loss.backward()
    optimizer.step()
    assert counts.shape == (10,)
    assert proxyfl.step_metrics(values, truth, hidden, True).shape == (len(proxyfl.METRICS),)
