"""baselines/fedotp.py: transport plans against slow loops, patch features, which prompt is averaged, labels, bytes."""

import math

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from scripts import checkpoint, equal, load_images, mini_clip, rows
from scripts import method as find_method
from worlds import one_class_labels

import common
from baselines import fedotp

METHOD = find_method("baselines/fedotp.py")
train = METHOD.train
WIDTH, CLASSES, CLIENTS, PATCHES = 32, 10, 4, 4  # of the miniature and of the short settings


def draw(*shape, seed=0, low=-1.0, high=1.0):
    return low + (high - low) * torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def solve(similarity, eps=0.1, mass=0.8, iterations=100, tolerance=0.0, whole=False):
    return fedotp.transport_plan(similarity, eps, mass, iterations, tolerance, whole)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A short run with CPL's labels, refreshed in each of its two rounds."""
    return train(tmp_path_factory.mktemp("plain"), "--refresh", 1)


# ---- the plan -----------------------------------------------------------------------------------------------------


def slow_plan(similarity, eps, mass, iterations, whole):
    """The equations for one image and class, S (2, M): kernel, row scaling, column scaling; in float64, with loops."""
    texts, patches = similarity.shape
    kernel = [[math.exp(-(1 - float(similarity[j, m])) / eps) for m in range(patches)] for j in range(texts)]
    a, b = 1 / patches, mass / 2
    u, v = [1.0] * patches, [1.0] * texts
    for _ in range(iterations):
        for m in range(patches):
            u[m] = a / sum(kernel[j][m] * v[j] for j in range(texts))
            if not whole:
                u[m] = min(u[m], 1.0)
        for j in range(texts):
            v[j] = b / sum(kernel[j][m] * u[m] for m in range(patches))
    plan = [[u[m] * kernel[j][m] * v[j] for m in range(patches)] for j in range(texts)]
    return torch.tensor(plan, dtype=torch.float64)


@pytest.mark.parametrize(
    "eps, mass, whole", [(0.1, 0.8, False), (0.1, 1.0, False), (0.03, 0.3, False), (0.1, 1.0, True)])
@pytest.mark.parametrize("iterations", [1, 2, 10, 11, 37, 100])
def test_plan_with_a_slow_loop(eps, mass, whole, iterations):
    similarity = draw(2, 7, 3, 2)
    plan = solve(similarity, eps, mass, iterations, whole=whole)
    assert plan.shape == similarity.shape
    for image in range(3):
        for c in range(2):
            slow = slow_plan(similarity[:, :, image, c].double(), eps, mass, iterations, whole)
            torch.testing.assert_close(plan[:, :, image, c].double(), slow, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("tolerance", [0.0, 1e-3, 0.3])
@pytest.mark.parametrize("mass", [0.01, 0.5, 0.8, 1.0])
def test_mass_of_the_plan(mass, tolerance):
    """Each text receives half of the mass, whenever the iterations stop; a patch gives at most its share."""
    plan = solve(draw(2, 49, 8, 5, low=0, high=0.4), mass=mass, tolerance=tolerance)
    torch.testing.assert_close(plan.sum(1), torch.full((2, 8, 5), mass / 2), rtol=1e-5, atol=0)
    torch.testing.assert_close(plan.sum((0, 1)), torch.full((8, 5), mass), rtol=1e-5, atol=0)
    slack = max(1.01 * tolerance, 0.01 if mass == 1 else 1e-5)  # with mass 1, 100 iterations do not reach 0.001
    assert (plan >= 0).all() and (plan.sum(0) <= (1 + slack) / 49).all()
    if mass < 1:
        assert plan.sum(0).min() < 0.9 * mass / 49  # not every patch gives the same: the choice is what is partial


def test_whole_plan_takes_every_patch_evenly():
    plan = solve(draw(2, 16, 4, 3), mass=1.0, iterations=400, whole=True)
    torch.testing.assert_close(plan.sum(0), torch.full((16, 4, 3), 1 / 16), rtol=1e-3, atol=0)
    torch.testing.assert_close(plan.sum(1), torch.full((2, 4, 3), 0.5), rtol=1e-5, atol=0)
    partial = solve(draw(2, 16, 4, 3), mass=0.5)
    assert (partial.sum(0) < 0.5 / 16).any()


def test_equal_texts_receive_equal_columns_and_the_better_patches_give():
    same = draw(1, 9, 4, 3).expand(2, -1, -1, -1)
    plan = solve(same)
    assert torch.equal(plan[0], plan[1])
    flat = solve(torch.full((2, 9, 1, 1), 0.3))
    torch.testing.assert_close(flat, torch.full((2, 9, 1, 1), 0.8 / 18))  # nothing to choose from
    order = same[0, :, 0, 0].argsort()
    assert (plan[0, order, 0, 0].diff() >= -1e-7).all()


@pytest.mark.parametrize("mass, whole", [(0.01, False), (0.8, False), (1.0, False), (1.0, True)])
@pytest.mark.parametrize("eps", [0.001, 0.01, 1e6])
def test_extreme_entropies_stay_finite(eps, mass, whole):
    """Kernels from exp(-2000) to 1, similarities of both signs, all alike, two that exclude each other, one patch."""
    random = draw(2, 16, 6, 4)
    ends = random.sign()
    cases = [random, ends, -ends.abs(), ends.abs(), torch.stack([ends[0], -ends[0]]), random[:, :1]]
    cases += [draw(2, 196, 2, 2), draw(2, 49, 3, 3, low=0.999)]
    for similarity in cases:
        plan = solve(similarity, eps, mass, whole=whole)
        assert plan.isfinite().all() and (plan >= 0).all()
        torch.testing.assert_close(plan.sum(1), torch.full_like(plan.sum(1), mass / 2), rtol=5e-3, atol=0)


def test_tolerance_is_a_share_and_is_looked_at_once_in_ten(monkeypatch):
    similarity, seen = draw(2, 16, 4, 3, low=0, high=0.3), []
    honest = torch.Tensor.max
    monkeypatch.setattr(torch.Tensor, "max", lambda *given: seen.append(1) or honest(*given))
    exact = solve(similarity, iterations=3000)
    assert len(seen) == 300
    for tolerance in (0.1, 1e-3):
        seen.clear()
        plan = solve(similarity, tolerance=tolerance)
        assert 1 < len(seen) < 10
        assert (plan - exact).abs().max() < 5 * tolerance * exact.max()
    seen.clear()
    solve(similarity / 100, eps=0.001, tolerance=1e-3), solve(similarity / 100 + 0.9, eps=0.001, tolerance=1e-3)
    assert len(seen) % 2 == 0  # a constant on top changes the kernel's size, exp(-100) here, and no decision


# ---- the score ----------------------------------------------------------------------------------------------------


def parsed(*flags):
    return fedotp.parse_args([*METHOD.short, "--ot-iterations", "100", *map(str, flags)])


def units(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


@pytest.mark.parametrize("kind, mass", [("partial", 0.8), ("sinkhorn", 1.0)])
def test_score_is_the_sum_of_plan_times_similarity(kind, mass):
    args, patches, words = parsed("--ot", kind, "--ot-tolerance", 0), units(5, 6, 8), units(2, 3, 8, seed=1)
    scores = fedotp.transport_scores(args, patches, words)
    for image in range(5):
        for c in range(3):
            similarity = torch.stack([patches[image] @ words[j, c] for j in range(2)]).double()
            slow = (slow_plan(similarity, 0.1, mass, 100, kind == "sinkhorn") * similarity).sum()
            assert scores[image, c].item() == pytest.approx(slow.item(), abs=1e-5)


def test_constant_similarity_gives_the_mass_times_it():
    words = torch.zeros(2, 3, 4)
    words[..., 0], words[..., 1] = 0.25, (1 - 0.25**2) ** 0.5
    patches = torch.eye(4)[0].expand(2, 7, 4)
    for flags, score in (([], 0.2), (["--ot-mass", 0.5], 0.125), (["--ot", "sinkhorn"], 0.25)):
        scores = fedotp.transport_scores(parsed(*flags), patches, words)
        torch.testing.assert_close(scores, torch.full((2, 3), score))


def test_each_flag_of_the_transport_is_read():
    patches, words = units(5, 16, 8), units(2, 3, 8, seed=1)
    default = fedotp.transport_scores(parsed(), patches, words)
    for flag, value in (("", "sinkhorn"), ("-mass", 0.5), ("-eps", 0.2), ("-iterations", 3), ("-tolerance", 1e9)):
        assert not torch.equal(fedotp.transport_scores(parsed(f"--ot{flag}", value), patches, words), default), flag


def test_gradient_flows_through_the_similarity_alone():
    args, patches, words = parsed(), units(5, 6, 8), units(2, 3, 8, seed=1).requires_grad_()
    kept = []
    honest = fedotp.transport_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedotp, "transport_plan", lambda *given: kept.append((given[0], honest(*given))) or kept[0][1])
        scores = fedotp.transport_scores(args, patches, words)
    similarity, plan = kept[0]
    assert similarity.requires_grad and not plan.requires_grad and plan.grad_fn is None
    weight = draw(5, 3)
    by_similarity, by_words = torch.autograd.grad((weight * scores).sum(), [similarity, words])
    torch.testing.assert_close(by_similarity, plan * weight)
    torch.testing.assert_close(by_words, torch.einsum("jmbc,bmd,bc->jcd", plan, patches, weight))
    assert (by_words[0] != 0).any() and (by_words[1] != 0).any()


def test_score_of_an_image_does_not_depend_on_its_neighbours_beyond_the_tolerance():
    args, patches, words = parsed(), units(64, 16, 8), units(2, 10, 8, seed=1)
    together = fedotp.transport_scores(args, patches, words)
    alone = torch.cat([fedotp.transport_scores(args, patch[None], words) for patch in patches])
    assert (together - alone).abs().max() < args.ot_tolerance
    exact = parsed("--ot-tolerance", 0)
    together = fedotp.transport_scores(exact, patches, words)
    alone = torch.cat([fedotp.transport_scores(exact, patch[None], words) for patch in patches])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)


# ---- the model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip():
    return fedotp.load_clip(str(mini_clip() / "mini.json"), str(mini_clip() / "mini.pt"))[0]


def test_patch_features_are_those_of_open_clip(clip):
    model = open_clip.create_model("mini", pretrained=str(mini_clip() / "mini.pt")).eval()
    images = draw(5, 3, 16, 16)
    model.visual.output_tokens = True
    with torch.no_grad():
        pooled, tokens = model.visual(images)
        theirs = F.normalize(tokens @ model.visual.proj, dim=2)
        ours = fedotp.encode_tokens(clip, images)
        assert ours.shape == (5, 1 + PATCHES, 24) and theirs.std() > 0.01
        torch.testing.assert_close(ours[:, 1:], theirs, rtol=0, atol=2e-6)
        torch.testing.assert_close(ours[:, 0], F.normalize(pooled, dim=1), rtol=0, atol=2e-6)
        torch.testing.assert_close(ours[:, 0], clip.encode_image(images), rtol=0, atol=2e-6)
    torch.testing.assert_close(ours.norm(dim=2), torch.ones(5, 1 + PATCHES))


def test_features_of_this_ranks_clients_alone(clip):
    data = load_images("digits", "data", 16, 200, clip=True)
    parts = [np.split(np.random.default_rng(0).permutation(n), [0, 9, 60]) for n in (200, 359)]
    stats = (0.5,) * 3, (0.3,) * 3
    own = fedotp.encode_data(clip, data, parts, [0, 2], 16, stats, torch.device("cpu"))
    for values in (own.features, own.test_features, own.patches, own.test_patches):
        assert [value is None for value in values] == [False, True, False, True]
        assert [len(values[k]) for k in (0, 2)] == [0, 51]
    images = common.normalise(data.test_images[torch.from_numpy(parts[1][2])], *stats)
    tokens = fedotp.encode_tokens(clip, images)
    assert torch.equal(own.test_features[2], tokens[:, 0]) and torch.equal(own.test_patches[2], tokens[:, 1:])
    words = units(2, CLASSES, 24)
    assert fedotp.predict_patches(parsed(), clip, own.patches[0], words).shape == (0, CLASSES)
    prob = fedotp.predict_patches(parsed(), clip, own.patches[2], words)
    scores = clip.scale * fedotp.transport_scores(parsed(), own.patches[2], words)
    assert torch.equal(prob, scores.softmax(1))


def test_patches_beyond_the_memory_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(fedotp.os, "sysconf", lambda name: 1)
    with pytest.raises(common.UserError, match="image patches take 0.0 GiB .* half of this machine's memory is 0.0"):
        train(tmp_path)
    assert not list(tmp_path.iterdir())


def test_predictions_run_in_batches(clip, monkeypatch):
    patches, words, args = units(23, PATCHES, 24), units(2, CLASSES, 24, seed=1), parsed("--ot-tolerance", 0)
    whole = fedotp.predict_patches(args, clip, patches, words)
    monkeypatch.setattr(fedotp, "LABEL_BATCH", 10)
    sizes, honest = [], fedotp.transport_scores
    monkeypatch.setattr(fedotp, "transport_scores", lambda a, batch, w: sizes.append(len(batch)) or honest(a, batch, w))
    torch.testing.assert_close(fedotp.predict_patches(args, clip, patches, words), whole, rtol=1e-3, atol=1e-6)
    assert sizes == [10, 10, 3]


# ---- clients and server -------------------------------------------------------------------------------------------


class World:
    """Clients of given sizes with random patch features, and what main() prepares for a round."""

    def __init__(self, clip, sizes, *flags):
        self.args, self.clip = parsed("--clients", len(sizes), *flags), clip
        self.args.amp = False
        self.text = clip.text_input([f"{c}." for c in range(CLASSES)], self.args.text_prompts)
        n = sum(sizes)
        parts = np.split(np.random.default_rng(0).permutation(n), np.cumsum(sizes)[:-1])
        patches = [units(size, PATCHES, 24, seed=k) for k, size in enumerate(sizes)]
        features = [values.mean(1) for values in patches]
        truth = torch.arange(n) % CLASSES
        self.data = fedotp.FederatedData(features, features, patches, patches, truth, truth, parts, parts)
        shape = len(sizes), self.args.text_prompts, WIDTH
        self.prompts = fedotp.Prompts(0.02 * draw(*shape)[:1].expand(shape).clone(), 0.02 * draw(*shape, seed=1))
        self.learned = fedotp.Prompts(*(torch.nn.Parameter(value[0].clone()) for value in self.prompts))
        self.optimizer = torch.optim.SGD(self.learned, 0.1, self.args.momentum, weight_decay=self.args.weight_decay)

    def labels(self, *empty):
        label = torch.arange(len(self.data.labels)) % CLASSES
        for client in empty:
            label[self.data.train[client]] = -1
        return one_class_labels(fedotp, label, CLASSES)

    def update(self, client, labels, rnd=0):
        return fedotp.client_update(
            self.args, rnd, client, self.clip, self.text, self.data, self.prompts, labels, self.learned, self.optimizer)


def test_clients_train_both_prompts_and_leave_no_trace(clip):
    sizes = (0, 1, 20, 5, 33)
    world = World(clip, sizes)
    labels, before = world.labels(3), fedotp.Prompts(*(value.clone() for value in world.prompts))
    alone = [World(clip, sizes).update(client, labels) for client in range(5)]
    for client in (4, 0, 2, 1, 3):
        assert equal(tuple(world.update(client, labels)), tuple(alone[client])), client
    assert equal(tuple(world.prompts), tuple(before))
    for client, upload in enumerate(alone):
        trained = client not in (0, 3)
        assert upload.weight == (sizes[client] if trained else 0)
        assert upload.metrics[1] == (math.ceil(sizes[client] / 16) if trained else 0)
        for name in fedotp.Prompts._fields:
            moved = not torch.equal(getattr(upload, name), getattr(before, name)[client])
            assert moved == trained and getattr(upload, name).isfinite().all()
    result = fedotp.server_update(world.prompts, alone, fedotp.SHARED)
    slow = sum(size * upload.text.double() for size, upload in zip((0, 1, 20, 0, 33), alone)) / 54
    for client in range(5):
        torch.testing.assert_close(result.text[client].double(), slow, rtol=1e-6, atol=1e-7)
        assert torch.equal(result.own_text[client], alone[client].own_text)
    nobody = fedotp.server_update(
        world.prompts, [world.update(0, labels), *[world.update(3, labels)] * 4], fedotp.SHARED)
    assert torch.equal(nobody.text, world.prompts.text)


def test_a_client_trains_on_its_own_selected_images_with_their_own_labels(clip):
    """The same numbers by autograd from the equations: one step on a whole batch."""
    world = World(clip, (6, 9), "--batch-size", 100, "--momentum", 0, "--weight-decay", 0)
    labels, own = world.labels(), world.data.train[1]
    labels.pseudo_label[own[[2, 5]]] = -1
    used = [i for i in range(9) if i not in (2, 5)]
    prompts = [value[1].clone().requires_grad_() for value in world.prompts]
    words = torch.stack([clip.encode_text(world.text, prompt) for prompt in prompts])
    scores = fedotp.transport_scores(world.args, world.data.patches[1][used], words)
    loss = F.cross_entropy(clip.scale * scores, labels.pseudo_label[own[used]])
    grads = torch.autograd.grad(loss, prompts)
    upload = world.update(1, labels)
    assert upload.metrics[0].item() == pytest.approx(loss.item(), rel=1e-5)
    for name, grad, start in zip(fedotp.Prompts._fields, grads, prompts):
        torch.testing.assert_close(getattr(upload, name), start.detach() - 0.1 * grad, rtol=1e-4, atol=1e-5)
        assert grad.abs().max() > 0


def test_only_the_global_prompt_is_averaged(tmp_path, plain):
    state = checkpoint(plain)
    assert state["text"].shape == state["own_text"].shape == (CLIENTS, 16, WIDTH)
    assert all(torch.equal(state["text"][0], other) for other in state["text"][1:])
    assert not any(torch.equal(state["own_text"][0], other) for other in state["own_text"][1:])
    start = checkpoint(train(tmp_path, "--lr", 0, "--rounds", 1))
    for name in ("text", "own_text"):  # all clients begin with the same two prompts, each with a stream of its own
        assert all(torch.equal(start[name][0], other) for other in start[name][1:])
        drawn = common.stream(1, "init", name).normal(0, 0.02, (16, WIDTH)).astype(np.float32)
        torch.testing.assert_close(start[name][0], torch.from_numpy(drawn))
    assert not torch.equal(start["text"], start["own_text"])
    for row in rows(plain):
        assert float(row["distance_own_text"]) > 0 and float(row["drift_own_text"]) > 0


def test_own_prompts_answer_for_their_client_alone(clip):
    world = World(clip, (4, 4, 4))
    words = fedotp.encode_texts(clip, world.text, world.prompts, [0, 2])
    for client, pair in zip((0, 2), words):
        for j, name in enumerate(fedotp.Prompts._fields):
            assert torch.equal(pair[j], clip.encode_text(world.text, getattr(world.prompts, name)[client]))
    assert torch.equal(words[0][0], words[1][0]) and not torch.equal(words[0][1], words[1][1])
    assert fedotp.encode_texts(clip, world.text, world.prompts, []) == []


# ---- settings -----------------------------------------------------------------------------------------------------


def test_defaults():
    args = fedotp.parse_args([])
    assert (args.pseudo_labels, args.ot, args.ot_mass, args.ot_eps) == ("cpl", "partial", 0.8, 0.1)
    assert (args.ot_iterations, args.ot_tolerance, args.run_name) == (100, 1e-3, "fedotp_digits_b0.1_s1")
    assert fedotp.parse_args(["--ot", "sinkhorn"]).ot_mass == 1
    for setting in ("--lr 0.001", "--momentum 0.9", "--weight-decay 5e-4", "--batch-size 32", "--local-epochs 1"):
        assert setting in fedotp.__doc__


@pytest.mark.parametrize("flags", [
    "--ot-eps 0.001 --ot-mass 1 --ot-iterations 50 --text-prompts 0",
    "--clients 12 --pseudo-labels copl --amp --rounds 1"])
def test_every_ablation_runs_and_stays_finite(tmp_path, flags):
    folder = train(tmp_path, "--refresh", 1, *flags.split())
    state = checkpoint(folder)
    assert state["text"].isfinite().all() and state["own_text"].isfinite().all()
    for row in rows(folder):
        assert not {"nan", "inf", "-inf"} & set(row.values()) and int(row["selected"]) > 0
