"""FedCoPL's rules and prompted CLIP against the official program's figures, slow references, and at their limits."""

import json
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import open_clip
import plain_clip
import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN
from worlds import one_class_labels

import common
import fedcopl

ESTIMATE, ALLOCATE, SELECT, CLIP = (
    np.load(GOLDEN / f"fedcopl_{name}.npz") for name in ("estimate", "allocate", "select", "prompted_clip"))
SCHEDULE = json.loads((GOLDEN / "fedcopl_schedule.json").read_text())


def arrays(source, case):
    """The arrays of a golden case as tensors; text stays text."""
    found = {}
    for key in source.files:
        if key.startswith(f"{case}__"):
            value = np.array(source[key])
            found[key[len(case) + 2 :]] = str(value) if value.dtype.kind == "U" else torch.from_numpy(value)
    return SimpleNamespace(**found)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random_prob(seed, n, classes, scale=2.0):
    """Softmax of normal logits, in double."""
    return (scale * torch.randn(n, classes, generator=seeded(seed), dtype=torch.float64)).softmax(1)


# ---- learning rate --------------------------------------------------------------------------------------------


def test_learning_rate_of_the_official_program():
    seen = 0
    for entry in SCHEDULE["rounds"]:
        for epoch, value in enumerate(entry["lr"]):
            assert fedcopl.learning_rate(0.1, entry["round"], epoch, 10, 5) == pytest.approx(value, abs=1e-15)
            seen += 1
    assert seen == 100


@pytest.mark.parametrize(
    "step, value", [(0, 0.1), (10, 0.090450850), (25, 0.05), (49, 9.8664e-5), (50, 0.1), (75, 0.05), (199, 9.8664e-5)])
def test_learning_rate_table(step, value):
    assert fedcopl.learning_rate(0.1, step // 10, step % 10, 10, 5) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("base, epochs, refresh", [(0.1, 1, 5), (0.02, 3, 2), (1.0, 7, 1), (0.3, 1, 1)])
def test_learning_rate_spans_one_period_whatever_its_length(base, epochs, refresh):
    period = [fedcopl.learning_rate(base, rnd, e, epochs, refresh) for rnd in range(refresh) for e in range(epochs)]
    again = [
        fedcopl.learning_rate(base, 4 * refresh + rnd, e, epochs, refresh)
        for rnd in range(refresh)
        for e in range(epochs)
    ]
    assert period == again and period[0] == base
    assert all(a > b > 0 for a, b in zip(period, period[1:]))
    total = epochs * refresh  # cosines at equal steps of a half turn: all but the first one cancel in pairs
    assert sum(period) == pytest.approx(base * (total + 1) / 2)


# ---- estimation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATE["case_names"])
def test_official_estimate(name):
    case = arrays(ESTIMATE, name)
    counts, passed = fedcopl.estimate(case.probs, float(case.conf_percent) / 100, float(case.entropy_percent) / 100)
    assert passed.nonzero()[:, 0].tolist() == case.indices.tolist()
    assert counts.tolist() == case.counts.long().tolist()
    assert counts.dtype == torch.int64 and passed.dtype == torch.bool


def slow_quantile(values, q):
    """Linear interpolation between the two neighbours in sorted order."""
    values, place = sorted(values), q * (len(values) - 1)
    low = int(place)
    return values[low] + (place - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def slow_estimate(prob, conf_quantile, entropy_quantile):
    """The rule, image by image."""
    conf = [max(row) for row in prob]
    entropy = [-sum(p * math.log(p) for p in row if p > 0) for row in prob]
    passed = [True] * len(prob)
    if conf_quantile is not None:
        passed = [ok and m > slow_quantile(conf, conf_quantile) for ok, m in zip(passed, conf)]
    if entropy_quantile is not None:
        passed = [ok and h < slow_quantile(entropy, 1 - entropy_quantile) for ok, h in zip(passed, entropy)]
    counts = [0] * len(prob[0])
    for row, ok in zip(prob, passed):
        counts[row.index(max(row))] += ok
    return counts, passed


@pytest.mark.parametrize("conf_quantile", [None, 0.0, 0.33, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("entropy_quantile", [None, 0.0, 0.21, 0.5, 1.0])
@pytest.mark.parametrize("n, classes", [(1, 3), (37, 5), (60, 2)])
def test_estimate_against_a_slow_loop(n, classes, conf_quantile, entropy_quantile):
    prob = random_prob(n, n, classes)
    counts, passed = fedcopl.estimate(prob, conf_quantile, entropy_quantile)
    assert (counts.tolist(), passed.tolist()) == slow_estimate(prob.tolist(), conf_quantile, entropy_quantile)


def test_estimate_each_filter_alone_and_none():
    prob = torch.tensor([[0.5, 0.5, 0.0], [0.6, 0.2, 0.2], [0.2, 0.7, 0.1]])  # entropies 0.69, 0.95, 0.80
    assert fedcopl.estimate(prob, 0.5, None)[1].tolist() == [False, False, True]
    assert fedcopl.estimate(prob, None, 0.5)[1].tolist() == [True, False, False]
    assert fedcopl.estimate(prob, 0.5, 0.5)[0].tolist() == [0, 0, 0]
    counts, passed = fedcopl.estimate(prob, None, None)
    assert passed.all() and counts.tolist() == [2, 1, 0]


@pytest.mark.parametrize("quantiles", [(0.5, 0.5), (None, 0.5), (0.5, None), (None, None)])
def test_estimate_with_exact_zeros_and_with_no_image(quantiles):
    """0 log 0 is 0: a one-hot row is the surest of all and passes."""
    prob = torch.tensor([[0.0, 1.0, 0.0], [0.4, 0.3, 0.3], [0.5, 0.5, 0.0], [0.4, 0.25, 0.35]])
    counts, passed = fedcopl.estimate(prob, *quantiles)
    assert passed[0] and counts.sum() == passed.sum() and counts[1] == 1
    assert passed.tolist() == ([True, False, True, False] if quantiles != (None, None) else [True] * 4)
    counts, passed = fedcopl.estimate(torch.zeros(0, 3), *quantiles)
    assert counts.tolist() == [0, 0, 0] and counts.dtype == torch.int64 and passed.shape == (0,)


@pytest.mark.parametrize("n, kept", [(1, 0), (2, 1), (4, 2), (5, 2), (10, 5), (11, 5)])
def test_estimate_keeps_at_most_half_at_the_medians(n, kept):
    top = torch.linspace(0.55, 0.95, n, dtype=torch.float64)  # two classes: confidence and entropy agree
    prob = torch.stack([top, 1 - top], 1)
    assert int(fedcopl.estimate(prob, 0.5, 0.5)[0].sum()) == kept
    assert int(fedcopl.estimate(prob[:1].expand(n, 2), 0.5, 0.5)[0].sum()) == 0  # constant: nothing is above
    for seed in range(20):
        ties = random_prob(seed, n, 4)[torch.randint(n, (n,), generator=seeded(seed))]
        counts, passed = fedcopl.estimate(ties, 0.5, 0.5)
        assert counts.sum() == passed.sum() <= n // 2


def test_estimate_does_not_depend_on_the_order_of_images():
    prob, order = random_prob(3, 50, 6), torch.randperm(50, generator=seeded(1))
    (counts, passed), (counts_of_order, passed_in_order) = (fedcopl.estimate(p, 0.4, 0.3) for p in (prob, prob[order]))
    assert torch.equal(counts, counts_of_order) and torch.equal(passed[order], passed_in_order)


# ---- allocation -----------------------------------------------------------------------------------------------


def exact_allocation(counts, n_train, iteration):
    """The rule in rational numbers: lists in, lists out."""
    clients, classes = len(counts), len(counts[0])
    totals = [sum(row[c] for row in counts) for c in range(classes)]
    target = math.ceil(Fraction(sum(totals), classes))
    fallback = math.ceil(Fraction(n_train, 4 * classes) * (iteration + 1) / clients)
    return [
        [math.ceil(Fraction(row[c], totals[c]) * target) if totals[c] else fallback for c in range(classes)]
        for row in counts
    ]


def random_counts(seed, clients, classes, most=40):
    """Counts of which about a third are zero, a class in five is empty."""
    draw = seeded(seed)
    counts = torch.randint(0, most, (clients, classes), generator=draw)
    counts *= torch.rand(clients, classes, generator=draw) > 0.33
    return counts * (torch.rand(classes, generator=draw) > 0.2)


@pytest.mark.parametrize("name", ALLOCATE["case_names"])
def test_official_allocation(name):
    """Equal but where single precision lifts an exact integer above itself: there the official figure is one higher."""
    case = arrays(ALLOCATE, name)
    assert case.iteration == case.round // case.period
    capacity = fedcopl.allocate(case.counts, int(case.n_train), int(case.iteration))
    assert capacity.dtype == torch.int64
    assert torch.equal(capacity + case.differs_from_exact.long(), case.allocation)


@pytest.mark.parametrize("most", [1, 5, 40, 3000, 10**8])
@pytest.mark.parametrize("clients, classes", [(1, 1), (1, 7), (3, 2), (10, 47), (50, 10)])
def test_allocation_against_rational_arithmetic(clients, classes, most):
    for seed in range(5):
        counts = random_counts(seed, clients, classes, most + 1)
        capacity = fedcopl.allocate(counts, 3760 + seed, seed)
        assert capacity.tolist() == exact_allocation(counts.tolist(), 3760 + seed, seed)


def test_allocated_capacity_of_a_class_reaches_the_target_and_exceeds_it_by_rounding_only():
    for seed in range(30):
        counts = random_counts(seed, 8, 11)
        target, capacity = -(-int(counts.sum()) // 11), fedcopl.allocate(counts, 500, 0)
        for c in range(11):
            if counts[:, c].sum():
                holders = int((counts[:, c] > 0).sum())
                assert target <= capacity[:, c].sum() <= target + holders - 1
                assert (capacity[:, c][counts[:, c] == 0] == 0).all()  # predicted elsewhere, not here: nothing


def test_allocation_of_equal_clients_of_one_client_and_of_one_holder():
    row = torch.tensor([3, 14, 1, 5, 9, 2])
    assert (fedcopl.allocate(row.expand(7, 6), 100, 0) == math.ceil(math.ceil(7 * 34 / 6) / 7)).all()
    assert (fedcopl.allocate(row[None], 100, 0) == math.ceil(34 / 6)).all()  # one client: the target everywhere
    counts = torch.tensor([[5, 0, 2], [0, 4, 2], [0, 0, 5]])  # 18 in all: 6 a class
    assert fedcopl.allocate(counts, 100, 0).tolist() == [[6, 0, 2], [0, 6, 2], [0, 0, 4]]
    assert torch.equal(fedcopl.allocate(counts * 5, 100, 0)[:, :2], 5 * fedcopl.allocate(counts, 100, 0)[:, :2])


def test_allocation_follows_the_clients():
    counts, order = random_counts(5, 9, 12), torch.randperm(9, generator=seeded(2))
    assert torch.equal(fedcopl.allocate(counts[order], 700, 1), fedcopl.allocate(counts, 700, 1)[order])


@pytest.mark.parametrize("n_train, classes, clients, expected", [
    (3760, 47, 10, [2, 4, 6, 8]), (6300, 45, 10, [4, 7, 11, 14]), (5994, 200, 5, [2, 3, 5, 6]),
    (7639, 101, 5, [4, 8, 12, 16]), (50_000, 10, 10, [125, 250, 375, 500]), (50_000, 100, 10, [13, 25, 38, 50])])
def test_capacity_of_a_class_that_nobody_predicts(n_train, classes, clients, expected):
    counts = torch.zeros(clients, classes).long()
    for others in (0, 17):  # whatever the other classes hold
        counts[0, 1:] = others
        for iteration, value in enumerate(expected):
            assert fedcopl.allocate(counts, n_train, iteration)[:, 0].tolist() == [value] * clients


def test_capacities_are_exact_where_double_precision_is_not():
    """One class: M = U, so u / U * M is u itself."""
    counts = torch.randint(1, 2**27, (200, 1), generator=seeded(0))
    assert torch.equal(fedcopl.allocate(counts, 500, 0), counts)
    assert not torch.equal((counts.double() / counts.sum() * counts.sum()).ceil().long(), counts)


def test_fallback_is_exact():
    """ceil of a quotient that is an integer, at a size where double precision cannot hold it."""
    n_train = 4 * 3 * 7 * (2**52 + 1)
    assert fedcopl.allocate(torch.zeros(7, 3).long(), n_train, 0).tolist() == [[2**52 + 1] * 3] * 7
    assert fedcopl.allocate(torch.zeros(7, 3).long(), n_train + 1, 0).tolist() == [[2**52 + 2] * 3] * 7


@pytest.mark.parametrize("name", ALLOCATE["case_names"])
def test_allocation_in_single_precision_is_the_official_one_to_the_last_entry(name):
    case = arrays(ALLOCATE, name)
    capacity = fedcopl.allocate(case.counts, int(case.n_train), int(case.iteration), ceiling="float32")
    assert torch.equal(capacity, case.allocation)


def test_allocation_without_rounding_the_budget_and_without_unseen_classes():
    differs = 0
    for seed in range(10):
        counts = random_counts(seed, 6, 9)
        rows, totals = counts.tolist(), counts.sum(0).tolist()
        target = Fraction(sum(totals), 9)
        expected = [[math.ceil(Fraction(u, t) * target) if t else 0 for u, t in zip(row, totals)] for row in rows]
        assert fedcopl.allocate(counts, 5000, seed, "exact", "none").tolist() == expected
        differs += expected != fedcopl.allocate(counts, 5000, seed, "ceil", "none").tolist()
        unseen = counts.sum(0) == 0
        grown = fedcopl.allocate(counts, 5000, seed, "exact", "grow")
        assert torch.equal(grown[:, ~unseen], torch.tensor(expected)[:, ~unseen])
        assert (grown[:, unseen] == -(-5000 * (seed + 1) // (4 * 9 * 6))).all()
    assert differs


# ---- selection ------------------------------------------------------------------------------------------------

OTHER_TIES = {"repeated_rows", "tie_eviction", "tie_eviction_3"}  # slot replacement keeps other, equal images


@pytest.mark.parametrize("name", SELECT["case_names"])
def test_official_selection(name):
    case = arrays(SELECT, name)
    prob = case.logits.softmax(1)
    label, conf = fedcopl.select(prob, case.capacity), prob.amax(1)
    assert label.dtype == torch.int64 and label.shape == (len(prob),)
    assert torch.equal(label[label >= 0], prob.argmax(1)[label >= 0])
    for c in range(prob.shape[1]):
        ours, official = (label == c).nonzero()[:, 0], case.selected[case.labels == c].sort().values
        if name in OTHER_TIES:
            assert torch.equal(conf[ours].sort().values, conf[official].sort().values)
        else:
            assert torch.equal(ours, official)


def slow_selection(prob, capacity):
    """Class by class: sort by confidence, earlier images first among equals, and take the first ones."""
    label = [-1] * len(prob)
    for c, most in enumerate(capacity):
        pool = [i for i, row in enumerate(prob) if row.index(max(row)) == c]
        for i in sorted(pool, key=lambda i: (-max(prob[i]), i))[:most]:
            label[i] = c
    return label


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n, classes", [(0, 3), (1, 1), (40, 5), (300, 7)])
def test_selection_against_a_slow_loop(n, classes, ties):
    for seed in range(4):
        prob = random_prob(seed, n, classes)
        if ties and n:
            prob = prob[torch.randint(0, n // 4 + 1, (n,), generator=seeded(seed))]  # each row about four times
        for most in (1, 4, n // classes + 2, n + 5):
            capacity = torch.randint(0, most, (classes,), generator=seeded(seed + most))
            assert fedcopl.select(prob, capacity).tolist() == slow_selection(prob.tolist(), capacity.tolist())


def test_selection_bounds():
    for seed in range(10):
        prob, capacity = random_prob(seed, 90, 6), torch.randint(0, 25, (6,), generator=seeded(seed))
        label, conf, top = fedcopl.select(prob, capacity), prob.amax(1), prob.argmax(1)
        for c in range(6):
            chosen, rejected = conf[label == c], conf[(top == c) & (label < 0)]
            assert len(chosen) == min(capacity[c], (top == c).sum())
            assert not len(chosen) or not len(rejected) or chosen.min() >= rejected.max()
    assert torch.equal(fedcopl.select(prob, torch.full((6,), 90)), top)
    assert (fedcopl.select(prob, torch.zeros(6).long()) == -1).all()


def test_selection_prefers_the_earlier_of_equal_images():
    prob = torch.tensor([[0.3, 0.7], [0.1, 0.9], [0.3, 0.7], [0.1, 0.9], [0.3, 0.7], [0.5, 0.5]])
    assert fedcopl.select(prob, torch.tensor([5, 3])).tolist() == [1, 1, -1, 1, -1, 0]
    many = torch.tensor([[0.25, 0.75]]).expand(5000, 2)
    assert fedcopl.select(many, torch.tensor([0, 1234])).tolist() == [1] * 1234 + [-1] * 3766


# ---- drift ----------------------------------------------------------------------------------------------------


def test_drift_diversity():
    one = torch.randn(3, 4, generator=seeded(0), dtype=torch.float64)
    assert float(fedcopl.drift_diversity(one.expand(5, 3, 4))) == pytest.approx(1 / 5)
    assert float(fedcopl.drift_diversity(one[None])) == pytest.approx(1)
    assert float(fedcopl.drift_diversity(torch.diag(torch.tensor([1.0, 2.0, 3.0])))) == pytest.approx(1)  # orthogonal
    moved = torch.randn(6, 2, 3, generator=seeded(1), dtype=torch.float64)
    above = sum(v**2 for v in moved.flatten().tolist())
    below = sum(sum(m[i][j] for m in moved.tolist()) ** 2 for i in range(2) for j in range(3))
    for scale in (1, 1e-3, 50):
        assert float(fedcopl.drift_diversity(scale * moved)) == pytest.approx(above / below)


def test_cosine_distance():
    prompts = torch.randn(4, 2, 5, generator=seeded(2), dtype=torch.float64)
    flat = [p.flatten().tolist() for p in prompts]
    pairs = [(a, b) for i, a in enumerate(flat) for b in flat[i + 1 :]]
    distances = [1 - sum(x * y for x, y in zip(a, b)) / (math.hypot(*a) * math.hypot(*b)) for a, b in pairs]
    scaled = prompts * torch.tensor([1, 0.1, 7, 3]).reshape(4, 1, 1)
    for given in (prompts, scaled):
        assert float(fedcopl.cosine_distance(given)) == pytest.approx(sum(distances) / 6)
    assert float(fedcopl.cosine_distance(prompts[:1].expand(3, 2, 5))) == pytest.approx(0, abs=1e-12)
    assert float(fedcopl.cosine_distance(torch.stack([prompts[0], -prompts[0]]))) == pytest.approx(2)
    assert float(fedcopl.cosine_distance(torch.eye(4))) == pytest.approx(1)


def test_drift_of_prompts_that_did_not_move_cancel_or_stand_alone():
    assert fedcopl.drift_diversity(torch.zeros(3, 4)) is None
    assert fedcopl.drift_diversity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) is None
    assert fedcopl.cosine_distance(torch.ones(1, 4)) is None
    assert math.isfinite(fedcopl.cosine_distance(torch.zeros(3, 4)))
    for empty in (torch.zeros(3, 0), torch.zeros(3, 11, 0, 32)):  # no prompts at all
        assert fedcopl.drift_diversity(empty) is None and fedcopl.cosine_distance(empty) is None


# ---- the golden CLIP ------------------------------------------------------------------------------------------


def build(folder, name, config):
    """A CLIP of open_clip's own class, with random weights, and its tokenizer."""
    (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / f"{name}.json")
    return open_clip.create_model(name), open_clip.get_tokenizer(name)


GOLDEN_CONFIG = dict(
    embed_dim=24, quick_gelu=True, vision_cfg=dict(layers=12, width=32, head_width=16, patch_size=8, image_size=32),
    text_cfg=dict(context_length=77, vocab_size=49408, width=32, heads=2, layers=2))
NAMES = [str(name) for name in CLIP["class_names"]]
SPOKEN = [name.replace("_", " ") for name in NAMES]


def golden(name, dtype=torch.float64):
    value = torch.from_numpy(np.array(CLIP[name]))
    return value.to(dtype) if value.is_floating_point() else value


@pytest.fixture(scope="module")
def golden_clips(tmp_path_factory):
    """dtype -> (open_clip's model with the golden weights, tokenizer, fedcopl's model around another copy of it)."""
    folder, found = tmp_path_factory.mktemp("golden_clip"), {}
    weights = {key[8:]: golden(key, torch.float32) for key in CLIP.files if key.startswith("weight__")}
    table = torch.zeros(49408, 32)
    table[golden("token_ids_used")] = golden("token_rows", torch.float32)
    for dtype in (torch.float32, torch.float64):
        models = []
        for _ in range(2):
            model, tokenizer = build(folder, "fedcopl-golden", GOLDEN_CONFIG)
            model.load_state_dict(weights | {"token_embedding.weight": table})
            models.append(model.to(dtype))
        stock = models[0].eval().requires_grad_(False)
        found[dtype] = SimpleNamespace(
            stock=stock, tokenizer=tokenizer, ours=fedcopl.PromptedCLIP(models[1], tokenizer), dtype=dtype)
    return found


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def golden_clip(request, golden_clips):
    return golden_clips[request.param]


@pytest.fixture
def double_clip(golden_clips):
    return golden_clips[torch.float64]


def close(value, expected, tolerance):
    torch.testing.assert_close(value.detach().double(), expected.double(), atol=tolerance, rtol=tolerance)


def test_reference_reproduces_the_official_figures(golden_clip):
    """The plain form the other tests lean on."""
    clip, tokenizer, dtype = golden_clip.stock, golden_clip.tokenizer, golden_clip.dtype
    ids = plain_clip.prompted_ids(tokenizer, NAMES, 16)
    assert torch.equal(ids, golden("prompt_token_ids"))
    embedded = plain_clip.prompted_embeddings(clip, ids, golden("text_ctx", dtype))
    close(embedded[:2], golden("text_prompt_embeddings"), 1e-7)
    image = plain_clip.image_features(clip, golden("images", dtype), golden("visual_ctx", dtype))
    text = plain_clip.text_features(clip, tokenizer, NAMES, golden("text_ctx", dtype))
    close(image, golden("image_features"), 1e-6)
    close(text, golden("text_features"), 1e-6)
    close(plain_clip.logits(clip, image, text), golden("logits"), 3e-5)
    template = str(CLIP["zero_shot_template"])
    text = plain_clip.template_features(clip, tokenizer, [template.format(name) for name in SPOKEN])
    close(text, golden("zero_shot_text_features"), 1e-6)
    close(
        plain_clip.image_features(clip, golden("images", dtype)), F.normalize(golden("plain_image_features_raw")), 1e-6)


def sentences(clip, names, n):
    """The model's Text for n prompts, a class name and a full stop."""
    return clip.text_input([f"{name}." for name in names], n)


def prompted(clip, images, names, visual, text):
    """Image features, text features and logits of fedcopl's model."""
    image = clip.encode_image(images, visual)
    written = clip.encode_text(sentences(clip, names, len(text)), text)
    return image, written, clip.scale * image @ written.T


def golden_prompts(dtype):
    return (golden(name, dtype).requires_grad_() for name in ("visual_ctx", "text_ctx"))


def test_official_features_logits_loss_and_gradients(golden_clip):
    dtype = golden_clip.dtype
    visual, text = golden_prompts(dtype)
    image, written, logits = prompted(golden_clip.ours, golden("images", dtype), SPOKEN, visual, text)
    close(image, golden("image_features"), 1e-6)
    close(image, F.normalize(golden("image_features_raw")), 1e-6)
    close(written, golden("text_features"), 1e-6)
    close(written, F.normalize(golden("text_features_raw")), 1e-6)
    close(logits, golden("logits"), 3e-5)
    loss = F.cross_entropy(logits, golden("labels"))
    loss.backward()
    close(loss, golden("loss"), 1e-5)
    for prompt, name in ((visual, "grad_visual_ctx"), (text, "grad_text_ctx")):
        close(prompt.grad, golden(name), 2e-5 * float(golden(name).abs().max()))
    assert all(parameter.grad is None for parameter in golden_clip.ours.parameters())


def test_official_zero_shot(golden_clip):
    template = str(CLIP["zero_shot_template"])
    ids = golden_clip.tokenizer([template.format(name) for name in SPOKEN])
    assert torch.equal(ids, golden("zero_shot_token_ids"))
    image = golden_clip.ours.encode_image(golden("images", golden_clip.dtype))
    text = golden_clip.ours.encode_text(golden_clip.ours.text_input([template.format(name) for name in SPOKEN], 0))
    close(image, golden("zero_shot_image_features"), 1e-6)
    close(text, golden("zero_shot_text_features"), 1e-6)
    close(golden_clip.ours.scale * image @ text.T, golden("zero_shot_logits"), 3e-5)
    close(image, F.normalize(golden("plain_image_features_raw")), 1e-6)


def test_official_two_updates(golden_clip):
    """The trainer's two steps: momentum 0.9, decay 0.05 on the prompts, learning rates of the first two epochs."""
    dtype = golden_clip.dtype
    visual, text = golden_prompts(dtype)
    optimizer = torch.optim.SGD([visual, text], lr=1.0, momentum=0.9, weight_decay=0.05)
    for step in range(2):
        lr = fedcopl.learning_rate(0.1, 0, step, 10, 5)
        assert lr == pytest.approx(float(CLIP["step_lr"][step]), abs=1e-15)
        optimizer.param_groups[0]["lr"] = lr
        loss = F.cross_entropy(
            prompted(golden_clip.ours, golden("images", dtype), SPOKEN, visual, text)[2], golden("labels"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        close(loss, golden("step_losses")[step], 1e-5)
        close(visual, golden("visual_ctx_after_steps")[step], 1e-5)
        close(text, golden("text_ctx_after_steps")[step], 1e-5)


# ---- the prompted CLIP against the plain form, in double -------------------------------------------------------

SMALL_CONFIG = dict(  # other sizes than the golden one in every place, GELU, and patch dropout while training
    embed_dim=20,
    quick_gelu=False,
    vision_cfg=dict(layers=4, width=36, head_width=12, patch_size=16, image_size=48, patch_dropout=0.5),
    text_cfg=dict(context_length=77, vocab_size=49408, width=16, heads=4, layers=3),
)


def shaken(model, seed):
    """All weights moved by noise, so that no bias is 0 and no scale is 1; logit scale as in OpenAI's weights."""
    draw = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
        model.logit_scale.fill_(math.log(100))
    return model


@pytest.fixture(scope="module")
def small_clip(tmp_path_factory):
    """A second CLIP in double; fedcopl's copy is handed over as open_clip makes it: trainable, in training mode."""
    folder = tmp_path_factory.mktemp("small_clip")
    (stock, tokenizer), (other, _) = (build(folder, "fedcopl-small", SMALL_CONFIG) for _ in range(2))
    stock, other = shaken(stock, 0).double(), shaken(other, 0).double()
    other.load_state_dict(stock.state_dict())
    assert other.training and other.visual.conv1.weight.requires_grad
    ours = fedcopl.PromptedCLIP(other, tokenizer)
    return SimpleNamespace(stock=stock.eval().requires_grad_(False), tokenizer=tokenizer, ours=ours)


SYLLABLES = ("ka", "lo", "mi", "tro", "shen", "vul", "pa", "rix", "du", "wem", "foo")


def class_names(count):
    """Names of one to four words, all different."""
    return [
        " ".join(SYLLABLES[(i * 7 + j * 3 + i // 11) % 11] for j in range(i % 4 + 1)) + str(i) for i in range(count)]


def both_ways(clip, batch, classes, visual_shape, n_text, seed=0):
    """(features, text features, loss, both gradients) by fedcopl's model and by the plain form, on random input."""
    draw, tower = seeded(seed), clip.stock.visual
    side, names = tower.image_size[0], class_names(classes)
    images = torch.randn(batch, 3, side, side, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, classes, (batch,), generator=draw)
    visual = 0.5 * torch.randn(*visual_shape, tower.class_embedding.shape[0], generator=draw, dtype=torch.float64)
    text = 0.5 * torch.randn(n_text, clip.stock.token_embedding.embedding_dim, generator=draw, dtype=torch.float64)
    results = []
    for way in ("ours", "plain"):
        v, t = visual.clone().requires_grad_(), text.clone().requires_grad_()
        if way == "ours":
            image, written, logits = prompted(clip.ours, images, names, v, t)
        else:
            image = plain_clip.image_features(clip.stock, images, v)
            written = plain_clip.text_features(clip.stock, clip.tokenizer, names, t)
            logits = plain_clip.logits(clip.stock, image, written)
        F.cross_entropy(logits, labels).backward()
        results.append((image, written, logits, *(torch.zeros_like(p) if p.grad is None else p.grad for p in (v, t))))
    return results


def check_same(results, tolerance=1e-10):
    for ours, plain in zip(*results):
        assert ours.shape == plain.shape and ours.dtype == torch.float64
        assert ours.numel() == 0 or (ours - plain).abs().max() <= tolerance
    image, written, logits = (value.detach() for value in results[0][:3])
    for features in (image, written):
        assert (features.norm(dim=1) - 1).abs().max() < 1e-12
    assert logits.abs().max() <= 100 * (1 + 1e-12)


@pytest.mark.parametrize("batch, classes", [(1, 1), (5, 1), (1, 2), (77, 2), (3, 77), (77, 77)])
def test_model_equals_the_plain_form(small_clip, batch, classes):
    """77 is the context length: no dimension may be taken for another."""
    check_same(both_ways(small_clip, batch, classes, (3, 5), 16))


@pytest.mark.parametrize("visual_shape", [(0, 5), (3, 0), (1, 1), (2, 5), (3, 77), (4, 5)])
def test_model_equals_the_plain_form_at_any_depth_and_length(small_clip, visual_shape):
    """Down to no prompt at all, and up to a prompt in the last block too (as VPT-deep has it)."""
    check_same(both_ways(small_clip, 3, 4, visual_shape, 2, seed=1))


@pytest.mark.parametrize("n_text", [0, 1, 2, 40, 69])
def test_model_equals_the_plain_form_at_any_text_length(small_clip, n_text):
    check_same(both_ways(small_clip, 2, 3, (3, 2), n_text, seed=2))


def test_model_equals_the_plain_form_on_the_golden_weights(double_clip):
    check_same(both_ways(double_clip, 4, 6, (11, 5), 16, seed=3))


def token_count(tokenizer, text):
    return int(tokenizer([text])[0].count_nonzero())


def test_longest_text_prompt_and_one_more(small_clip):
    """Start token, prompt, name, full stop and end token fill the 77 places; a prompt any longer is refused."""
    tokenizer, ours = small_clip.tokenizer, small_clip.ours
    names = ["cat", "polka-dotted"]
    most = 77 - token_count(tokenizer, "polka-dotted.")
    prompt = torch.randn(most, 16, generator=seeded(0), dtype=torch.float64)
    written = ours.encode_text(sentences(ours, names, most), prompt)
    assert (written - plain_clip.text_features(small_clip.stock, tokenizer, names, prompt)).abs().max() <= 1e-10
    with pytest.raises(common.UserError, match=f"'polka-dotted.' is too long: {77 - most} .* {most + 1} prompts.* 77"):
        sentences(ours, names, most + 1)
    with pytest.raises(common.UserError, match="class 'word_word' is too long: 103 tokens"):
        ours.text_input(["word " * 100 + "."], 0, ["word_word"])  # beyond the context: not cut in silence


def test_without_prompts_it_is_the_stock_clip(small_clip):
    ours, stock, names = small_clip.ours, small_clip.stock, class_names(5)
    images = torch.randn(3, 3, 48, 48, generator=seeded(4), dtype=torch.float64)
    image = stock.encode_image(images, normalize=True)
    for prompt in (None, torch.zeros(0, 5, 36).double(), torch.zeros(3, 0, 36).double()):
        assert (ours.encode_image(images, prompt) - image).abs().max() <= 1e-12
    whole = [f"a photo of a {name}." for name in names]
    text = stock.encode_text(small_clip.tokenizer(whole), normalize=True)
    assert (ours.encode_text(ours.text_input(whole, 0)) - text).abs().max() <= 1e-12


def test_zero_prompts_are_not_the_stock_clip(small_clip):
    """A prompt of zeros still adds keys and values."""
    images = torch.randn(3, 3, 48, 48, generator=seeded(4), dtype=torch.float64)
    zeros = small_clip.ours.encode_image(images, torch.zeros(3, 5, 36).double())
    assert (zeros - small_clip.ours.encode_image(images)).abs().max() > 1e-3


def test_prompt_of_sixteen_x_is_the_text_itself(small_clip):
    ours, stock, names = small_clip.ours, small_clip.stock, class_names(5)
    ids = small_clip.tokenizer(["X " * 16 + f"{name}." for name in names])
    assert (ids[:, 1:17] == ids[0, 1]).all()
    prompt = stock.token_embedding.weight[ids[0, 1]].expand(16, -1)
    written = ours.encode_text(sentences(ours, names, 16), prompt)
    assert (written - stock.encode_text(ids, normalize=True)).abs().max() <= 1e-12


def test_order_inside_a_layer_does_not_matter_order_of_layers_does(small_clip):
    draw = seeded(5)
    images = torch.randn(2, 3, 48, 48, generator=draw, dtype=torch.float64)
    visual = torch.randn(3, 5, 36, generator=draw, dtype=torch.float64)
    features = small_clip.ours.encode_image(images, visual)
    for layer in range(3):
        shuffled = visual.clone()
        shuffled[layer] = visual[layer, torch.randperm(5, generator=draw)]
        assert not torch.equal(shuffled, visual)
        assert (small_clip.ours.encode_image(images, shuffled) - features).abs().max() <= 1e-12
    assert (small_clip.ours.encode_image(images, visual.flip(0)) - features).abs().max() > 1e-3


def test_order_of_the_text_prompt_matters(small_clip):
    text, prompt = sentences(small_clip.ours, class_names(3), 4), torch.randn(4, 16, generator=seeded(6)).double()
    moved = small_clip.ours.encode_text(text, prompt) - small_clip.ours.encode_text(text, prompt.flip(0))
    assert moved.abs().max() > 1e-3


def test_inserting_after_the_class_token_is_the_same_function(small_clip):
    draw, tower = seeded(7), small_clip.stock.visual
    images = torch.randn(2, 3, 48, 48, generator=draw, dtype=torch.float64)
    visual = torch.randn(3, 5, 36, generator=draw, dtype=torch.float64)
    h = tower._embeds(images)
    for i, block in enumerate(tower.transformer.resblocks):
        if i < 3:
            h = block(torch.cat([h[:, :1], visual[i].expand(2, -1, -1), h[:, 1:]], 1))
            h = torch.cat([h[:, :1], h[:, 6:]], 1)
        else:
            h = block(h)
    inserted = F.normalize(tower.ln_post(h[:, 0]) @ tower.proj, dim=-1)
    assert (small_clip.ours.encode_image(images, visual) - inserted).abs().max() <= 1e-12


def test_only_the_prompts_learn_and_every_layer_does(small_clip):
    (image, _, _, visual_grad, text_grad), _ = both_ways(small_clip, 4, 3, (3, 5), 16)
    assert image.requires_grad
    assert (visual_grad.abs().amax(2) > 0).all() and (text_grad.abs().amax(1) > 0).all()  # every token of every layer
    for parameter in small_clip.ours.parameters():
        assert not parameter.requires_grad and parameter.grad is None


def test_frozen_model_is_in_evaluation_mode(small_clip):
    """Not every part that behaves differently in training need be in use."""
    assert not any(module.training for module in small_clip.ours.clip.modules())
    images = torch.randn(2, 3, 48, 48, generator=seeded(8), dtype=torch.float64)
    passes = [small_clip.ours.encode_image(images) for _ in range(2)]
    assert torch.equal(*passes)
    assert (passes[0] - small_clip.stock.encode_image(images, normalize=True)).abs().max() <= 1e-12


def test_gradient_free_pass_gives_the_same_features(small_clip):
    """open_clip's attention takes another path without gradients."""
    draw, names = seeded(9), class_names(4)
    images = torch.randn(2, 3, 48, 48, generator=draw, dtype=torch.float64)
    visual = torch.randn(3, 5, 36, generator=draw, dtype=torch.float64).requires_grad_()
    text = torch.randn(16, 16, generator=draw, dtype=torch.float64).requires_grad_()
    with_grad = prompted(small_clip.ours, images, names, visual, text)
    with torch.no_grad():
        without = prompted(small_clip.ours, images, names, visual, text)
    assert not without[2].requires_grad
    for one, other in zip(with_grad, without):
        assert (one - other).abs().max() <= 1e-10


@pytest.mark.parametrize("n", [0, 16])
def test_nothing_after_the_end_token_counts(small_clip, tmp_path, n):
    """Other padding and other late positions: same features. Another position inside the text: other features."""
    names, prompt = class_names(6), torch.randn(n, 16, generator=seeded(10), dtype=torch.float64)
    longest = max(token_count(small_clip.tokenizer, "X " * n + f"{name}.") for name in names)
    features = small_clip.ours.encode_text(sentences(small_clip.ours, names, n), prompt)
    changed, tokenizer = build(tmp_path, "fedcopl-changed", SMALL_CONFIG)
    changed.double().load_state_dict(small_clip.stock.state_dict())
    with torch.no_grad():
        changed.token_embedding.weight[0] += 3.0
        changed.positional_embedding[longest:] += 5.0
    ours = fedcopl.PromptedCLIP(changed, tokenizer)
    assert (ours.encode_text(sentences(ours, names, n), prompt) - features).abs().max() <= 1e-12
    with torch.no_grad():
        changed.positional_embedding[1] += torch.linspace(-1, 1, 16).double()
    ours = fedcopl.PromptedCLIP(changed, tokenizer)
    assert (ours.encode_text(sentences(ours, names, n), prompt) - features).abs().amax(1).min() > 1e-6


@pytest.mark.parametrize("n", [0, 16])
def test_a_class_does_not_depend_on_the_others(small_clip, n):
    names, prompt = class_names(8), torch.randn(n, 16, generator=seeded(11), dtype=torch.float64)
    together = small_clip.ours.encode_text(sentences(small_clip.ours, names, n), prompt)
    for i, name in enumerate(names):
        alone = small_clip.ours.encode_text(sentences(small_clip.ours, [name], n), prompt)
        assert (alone[0] - together[i]).abs().max() <= 1e-12


def test_an_image_does_not_depend_on_the_batch(small_clip):
    draw = seeded(12)
    images = torch.randn(5, 3, 48, 48, generator=draw, dtype=torch.float64)
    visual = torch.randn(3, 5, 36, generator=draw, dtype=torch.float64)
    together = small_clip.ours.encode_image(images, visual)
    for i in range(5):
        assert (small_clip.ours.encode_image(images[i : i + 1], visual)[0] - together[i]).abs().max() <= 1e-12


def test_scale(small_clip, golden_clip):
    assert float(small_clip.ours.scale) == pytest.approx(100)
    assert float(golden_clip.ours.scale) == pytest.approx(100, rel=1e-5)


def test_towers_under_autocast_give_features_in_the_precision_of_the_weights(golden_clips):
    clip, images = golden_clips[torch.float32].ours, golden("images", torch.float32)
    visual, text = (golden(name, torch.float32) for name in ("visual_ctx", "text_ctx"))
    exact = prompted(clip, images, SPOKEN, visual, text)
    with torch.autocast("cpu", torch.bfloat16):
        features = clip.encode_image(images, visual), clip.encode_text(sentences(clip, SPOKEN, 16), text)
    for rounded, value in zip(features, exact):
        assert rounded.dtype == torch.float32
        assert (rounded.norm(dim=1) - 1).abs().max() < 1e-5 and 1e-7 < (rounded - value).abs().max() < 0.05


# ---- a refresh, local training, the server ---------------------------------------------------------------------

ONE_PROCESS = SimpleNamespace(mine=list, gather=lambda values, n: values, broadcast=lambda value: value, first=True)
STATS = (0.4, 0.5, 0.6), (0.3, 0.2, 0.25)


def settings(*flags):
    """The script's arguments, completed as its main does."""
    args = fedcopl.parse_args([str(flag) for flag in flags])
    args.amp = False
    return args


def federation(seed=0, sizes=(9, 14, 5), test_sizes=(4, 0, 7)):
    """Random images of the golden CLIP's size over three clients, in mixed order."""
    rng = np.random.RandomState(seed)
    owned = [np.split(rng.permutation(sum(s)), np.cumsum(s)[:-1]) for s in (sizes, test_sizes)]
    images = [torch.from_numpy(rng.randint(0, 256, (sum(s), 3, 32, 32)).astype(np.uint8)) for s in (sizes, test_sizes)]
    labels = [torch.from_numpy(rng.randint(0, 6, sum(s))) for s in (sizes, test_sizes)]
    return fedcopl.FederatedData(*images, *labels, *owned, STATS)


def normalised(images):
    """(level / 255 - mean) / deviation of each channel."""
    mean, deviation = (torch.tensor(value).reshape(3, 1, 1) for value in STATS)
    return (images.float() / 255 - mean) / deviation


def start_prompts(clients=3, seed=0):
    """Prompts that differ from client to client."""
    draw = seeded(seed)
    visual = 0.3 * torch.randn(clients, 11, 5, 32, generator=draw)
    return fedcopl.Prompts(visual, 0.3 * torch.randn(clients, 16, 32, generator=draw))


def plain_prob(clip, images, visual, words):
    return plain_clip.logits(clip, plain_clip.image_features(clip, normalised(images), visual), words).softmax(1)


@pytest.fixture
def single_clip(golden_clips):
    """The golden CLIP in single precision with the texts of its six classes."""
    clip = golden_clips[torch.float32]
    zero_shot = clip.ours.encode_text(clip.ours.text_input([f"a photo of a {name}" for name in SPOKEN], 0))
    return SimpleNamespace(**vars(clip), text=sentences(clip.ours, SPOKEN, 16), zero_shot=zero_shot)


def test_predictions_are_the_softmax_of_the_plain_logits_whatever_the_batch(single_clip, monkeypatch):
    data, prompts = federation(), start_prompts()
    index = data.train[1]
    words = plain_clip.text_features(single_clip.stock, single_clip.tokenizer, NAMES, prompts.text[0])
    expected = plain_prob(single_clip.stock, data.images[index], prompts.visual[0], words)
    for size in (1, 5, 14, 256):
        monkeypatch.setattr(fedcopl, "LABEL_BATCH", size)
        prob = fedcopl.predict(single_clip.ours, data, data.images, index, prompts.visual[0], words)
        close(prob, expected, 1e-5)
    assert not prob.requires_grad
    nobody = fedcopl.predict(single_clip.ours, data, data.images, index[:0], prompts.visual[0], words)
    assert nobody.shape == (0, 6)


def refresh(clip, data, iteration, prompts, *flags):
    args, probs = settings("--clients", 3, *flags), []
    for client, own in enumerate(data.train):
        visual, words = None, clip.zero_shot
        if not fedcopl.asks_zero_shot(args, iteration):
            visual, words = prompts.visual[client], clip.ours.encode_text(clip.text, prompts.text[client])
        probs.append(fedcopl.predict(clip.ours, data, data.images, own, visual, words))
    labels, table = fedcopl.label_images(args, iteration, ONE_PROCESS, 6, probs, data)
    assert torch.equal(labels.candidate.sum(1), (labels.pseudo_label >= 0).long())  # one class each
    assert (labels.candidate.nonzero()[:, 1] == labels.pseudo_label[labels.pseudo_label >= 0]).all()
    return labels.pseudo_label, table


@pytest.mark.parametrize(
    "flags, quantiles",
    [((), (0.5, 0.5)), (("--no-conf-filter", "--entropy-quantile", 0.3), (None, 0.3))]
    + [(("--no-entropy-filter", "--conf-quantile", 0.2), (0.2, None)), (("--no-allocation",), (0.5, 0.5))],
)
@pytest.mark.parametrize("iteration", [0, 2])
def test_a_refresh_step_by_step(single_clip, iteration, flags, quantiles):
    """At first everybody asks zero-shot CLIP, later each client its own prompts; the arithmetic in plain Python."""
    data, prompts, clip = federation(1), start_prompts(), single_clip.stock
    label, table = refresh(single_clip, data, iteration, prompts, *flags)
    probs = []
    for client, own in enumerate(data.train):
        visual = prompts.visual[client] if iteration else None
        words = plain_clip.template_features(clip, single_clip.tokenizer, [f"a photo of a {name}" for name in SPOKEN])
        if iteration:
            words = plain_clip.text_features(clip, single_clip.tokenizer, NAMES, prompts.text[client])
        probs.append(plain_prob(clip, data.images[own], visual, words).tolist())
    counts = [slow_estimate(prob, *quantiles)[0] for prob in probs]
    capacity = counts if "--no-allocation" in flags else exact_allocation(counts, 28, iteration)
    expected, predicted = [None] * 28, [None] * 28
    for own, prob, room in zip(data.train, probs, capacity):
        for i, row, chosen in zip(own, prob, slow_selection(prob, room)):
            expected[i], predicted[i] = chosen, row.index(max(row))
    assert label.tolist() == expected
    truth, rows = data.labels.tolist(), dict(zip(fedcopl.LABEL_COLUMNS, table.tolist()))
    for c in range(6):
        right = [i for i in range(28) if truth[i] == c]
        assert rows["images"][c] == len(right) and rows["predicted"][c] == predicted.count(c)
        assert rows["predicted_correct"][c] == sum(predicted[i] == c for i in right)
        assert rows["selected"][c] == expected.count(c)
        assert rows["selected_correct"][c] == sum(expected[i] == c for i in right)
        assert rows["estimated"][c] == sum(row[c] for row in counts)
        assert rows["capacity"][c] == sum(row[c] for row in capacity)


def test_first_labels_do_not_depend_on_prompts_and_no_labels_on_the_truth(single_clip):
    data = federation(2)
    first, other = (refresh(single_clip, data, 0, start_prompts(seed=seed))[0] for seed in (0, 1))
    assert torch.equal(first, other)
    later, other = (refresh(single_clip, data, 1, start_prompts(seed=seed))[0] for seed in (0, 1))
    assert not torch.equal(later, other)
    for truth in (data.labels.flip(0), torch.zeros(28).long()):
        assert torch.equal(refresh(single_clip, data._replace(labels=truth), 1, start_prompts())[0], later)


def trained(clip, data, client, prompts, label, *flags, rnd=0, momentum=None):
    """client_update of a client, and its optimiser; momentum: what the optimiser holds before."""
    args = settings("--clients", 3, "--local-epochs", 3, "--batch-size", 20, "--refresh", 2, *flags)
    learned = fedcopl.Prompts(*(torch.nn.Parameter(torch.full_like(value[0], 7.0)) for value in prompts))
    optimizer = torch.optim.SGD(
        [{"params": [value]} for value in learned], 0.1, args.momentum, weight_decay=args.weight_decay)
    if momentum is not None:
        for parameter in learned:
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, momentum)
    classes = len(clip.text.tail)
    labels = one_class_labels(fedcopl, label, classes)
    return fedcopl.client_update(
        args, rnd, client, clip.ours, clip.text, data, prompts, labels, learned, optimizer), optimizer


@pytest.mark.parametrize("rnd", [0, 3])
def test_local_training_step_by_step(single_clip, rnd):
    """Full batches, so that the order of the images plays no part: SGD with momentum and decay, written out."""
    data, prompts, label = federation(3), start_prompts(), torch.full((28,), -1)
    own = data.train[1][::2]
    label[own] = torch.arange(len(own)) % 6
    label[data.train[0]] = 5  # another client's images are not touched
    upload, _ = trained(single_clip, data, 1, prompts, label, "--visual-lr", 0.02, "--lr", 0.07, rnd=rnd)
    visual, text = prompts.visual[1].clone(), prompts.text[1].clone()
    speed, losses = [torch.zeros_like(visual), torch.zeros_like(text)], []
    images = normalised(data.images[own])
    for epoch in range(3):
        v, t = visual.clone().requires_grad_(), text.clone().requires_grad_()
        words = plain_clip.text_features(single_clip.stock, single_clip.tokenizer, NAMES, t)
        logits = plain_clip.logits(single_clip.stock, plain_clip.image_features(single_clip.stock, images, v), words)
        loss = F.cross_entropy(logits, label[own])
        share = 0.5 * (1 + math.cos(math.pi * (rnd % 2 * 3 + epoch) / 6))
        for k, (prompt, gradient, base) in enumerate(
            zip((visual, text), torch.autograd.grad(loss, (v, t)), (0.02, 0.07))
        ):
            speed[k] = 0.9 * speed[k] + gradient + 0.05 * prompt
            prompt -= base * share * speed[k]
        losses.append(float(loss.detach()))
    assert (visual - prompts.visual[1]).abs().max() > 1e-3 < (text - prompts.text[1]).abs().max()
    for value, expected in ((upload.visual, visual), (upload.text, text)):
        close(value, expected, 2e-5)
    assert upload.metrics.tolist() == [pytest.approx(sum(losses), rel=1e-3), 3]
    assert float(upload.weight) == len(own) == 7


def test_local_steps_keep_the_last_batch_and_use_no_other_image(single_clip):
    data, prompts, label = federation(3), start_prompts(), torch.full((28,), -1)
    own = data.train[1][:8]
    label[own] = 2
    upload, _ = trained(single_clip, data, 1, prompts, label, "--batch-size", 3)
    assert upload.metrics[1] == 3 * 3 and float(upload.weight) == 8  # 3 + 3 + 2 images, three times
    changed = data.images.clone()
    others = np.setdiff1d(np.arange(28), own)
    changed[others] = 255 - changed[others]
    label[data.train[0]], label[data.train[2]] = 0, 4
    same, _ = trained(
        single_clip, data._replace(images=changed, labels=data.labels.flip(0)), 1, prompts, label, "--batch-size", 3)
    assert all(torch.equal(a, b) for a, b in zip(upload, same))
    changed[own[0]] = 255 - changed[own[0]]
    moved, _ = trained(single_clip, data._replace(images=changed), 1, prompts, label, "--batch-size", 3)
    assert not torch.equal(moved.visual, upload.visual)


def test_without_gradient_a_step_shrinks_the_prompts_by_the_decay(single_clip):
    """One class: the loss is 0 whatever the prompts are. Learning rate 0.1 times decay 0.05 leaves 0.995."""
    data, prompts = federation(4), start_prompts()
    clip = SimpleNamespace(ours=single_clip.ours, text=sentences(single_clip.ours, ["cat"], 16))
    upload, _ = trained(clip, data, 0, prompts, torch.zeros(28).long(), "--local-epochs", 1)
    close(upload.visual, 0.995 * prompts.visual[0], 1e-6)
    close(upload.text, 0.995 * prompts.text[0], 1e-6)
    assert upload.metrics.tolist() == [0, 1]


def test_a_client_without_selected_images_sits_out(single_clip):
    data, prompts, label = federation(5), start_prompts(), torch.zeros(28).long()
    label[data.train[2]] = -1
    upload, _ = trained(single_clip, data, 2, prompts, label)
    assert torch.equal(upload.visual, prompts.visual[2]) and torch.equal(upload.text, prompts.text[2])
    assert float(upload.weight) == 0 and upload.metrics.tolist() == [0, 0]


def test_momentum_of_the_client_before(single_clip):
    """It is dropped, unless asked for: then its buffer g moves the next client by lr (0.9 + 0.81 + ...) g."""
    data, prompts = federation(6), start_prompts()
    clip = SimpleNamespace(ours=single_clip.ours, text=sentences(single_clip.ours, ["cat"], 16))
    flags = ("--local-epochs", 2, "--refresh", 10**6, "--weight-decay", 0)  # one step an epoch, no gradient
    for shared, moved in ((), 0.0), (("--shared-momentum",), -0.1 * (0.9 + 0.81) * 0.5):
        upload, optimizer = trained(clip, data, 0, prompts, torch.zeros(28).long(), *flags, *shared, momentum=0.5)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.1])
        close(upload.visual - prompts.visual[0], torch.full((11, 5, 32), moved), 1e-6)
        close(upload.text - prompts.text[0], torch.full((16, 32), moved), 1e-6)


def upload(visual, text, weight):
    return fedcopl.Upload(visual, text, torch.tensor(float(weight)), torch.zeros(2))


def server(aggregate, received, weights):
    """server_update of clients who trained to other prompts than they received; those, and the result."""
    uploads = [upload(v, t, w) for v, t, w in zip(*start_prompts(len(weights), seed=9), weights)]
    return uploads, fedcopl.server_update(received, uploads, fedcopl.AVERAGED[aggregate])


@pytest.mark.parametrize("aggregate", ["visual", "text", "both", "none"])
def test_server_averages_what_it_should_by_selected_images(aggregate):
    received = start_prompts(3)
    uploads, result = server(aggregate, received, (3, 1, 0))
    for name, new in result._asdict().items():
        old = [getattr(one, name) for one in uploads]
        for client in range(3):
            averaged = aggregate in (name, "both")
            expected = 0.75 * old[0] + 0.25 * old[1] if averaged else old[client]  # the third one has no influence
            close(new[client], expected, 1e-6)
            assert torch.equal(new[client], new[0]) == (averaged or client == 0)


def test_server_without_any_selected_image_keeps_the_prompts():
    received = start_prompts(3)
    received = received._replace(visual=received.visual[:1].repeat(3, 1, 1, 1))
    uploads, result = server("visual", received, (0, 0, 0))
    assert torch.equal(result.visual, received.visual)
    assert torch.equal(result.text, torch.stack([one.text for one in uploads]))


def test_server_with_one_client_or_equal_prompts_changes_nothing():
    uploads, result = server("both", start_prompts(1), (17,))
    assert torch.equal(result.visual[0], uploads[0].visual) and torch.equal(result.text[0], uploads[0].text)
    visual, text = (value[0] for value in start_prompts())
    for weights in ((1, 1, 1), (7, 0, 123), (1000, 1, 3)):
        equal = [upload(visual, text, weight) for weight in weights]
        result = fedcopl.server_update(start_prompts(3), equal, ("visual", "text"))
        close(result.visual, visual.expand(3, 11, 5, 32), 1e-6)
        close(result.text, text.expand(3, 16, 32), 1e-6)


def test_evaluation_counts_correct_test_images(single_clip):
    data, prompts = federation(7), start_prompts()
    for client, own in enumerate(data.test):
        words = plain_clip.text_features(single_clip.stock, single_clip.tokenizer, NAMES, prompts.text[client])
        prob = plain_prob(single_clip.stock, data.test_images[own], prompts.visual[client], words)
        right = sum(row.index(max(row)) == data.test_labels[i] for i, row in zip(own, prob.tolist()))
        score = fedcopl.evaluate(client, single_clip.ours, data, prompts.visual[client], words)
        assert score.tolist() == [int(right), len(own)]


@pytest.mark.parametrize(
    "scores, mean, pooled",
    [
        ([(8, 8), (0, 92)], 50, 8),
        ([(3, 4)], 75, 75),
        ([(1, 2), (0, 0), (3, 3)], 75, 80),  # a client without test images does not enter the mean
        ([(0, 5), (0, 7)], 0, 0),
    ],
)
def test_reported_accuracy_is_the_mean_over_clients(scores, mean, pooled):
    assert fedcopl.accuracies([torch.tensor(score) for score in scores]) == pytest.approx((mean, pooled))


# ---- the published settings -----------------------------------------------------------------------------------


def test_defaults_are_the_published_settings():
    published = dict(
        clients=10, rounds=20, local_epochs=10, refresh=5, batch_size=64, lr=0.1, visual_lr=0.1, momentum=0.9)
    published |= dict(weight_decay=0.05, text_prompts=16, visual_prompts=5, prompt_depth=None, prompt_std=0.02)
    published |= dict(conf_quantile=0.5, entropy_quantile=0.5, conf_filter=True, entropy_filter=True, allocation=True)
    published |= dict(beta=0.1, partition="dirichlet", split_seed=0, aggregate="visual", template="a photo of a {}")
    differs = dict(cub=dict(clients=5), ucf101=dict(clients=5))
    differs |= {name: dict(template="a photo of a {}.") for name in ("cifar10", "cifar100")}
    for dataset in ("dtd", "resisc45", "cub", "ucf101", "cifar10", "cifar100"):
        args = vars(settings("--dataset", dataset))
        expected = published | differs.get(dataset, {})
        assert {name: args[name] for name in expected} == expected, dataset
        config = open_clip.get_model_config(args["model"])
        vision, words = config["vision_cfg"], config["text_cfg"]
        assert config["quick_gelu"] and args["pretrained"] == "openai"  # OpenAI's weights were trained with it
        numbers = (vision["layers"] - 1) * 5 * vision["width"], 16 * words["width"]
        assert numbers == (42_240, 8_192)  # sent are 4 bytes each: 168,960 of the visual prompts
