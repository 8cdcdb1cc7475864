"""promptfl.py: features, local training against a plain loop, the average, odd clients, costs; beside FedCoPL."""

import math
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import open_clip
import plain_clip
import pytest
import torch
from scripts import checkpoint, equal, labels_table, load_images, rows, same_run
from scripts import method as find_method
from test_fedcopl_maths import slow_selection
from test_fedcopl_run import CLASSES, CLIENTS, WIDTH, stock_clip
from worlds import one_class_labels

import common
from baselines import promptfl

METHOD, FEDCOPL = find_method("baselines/promptfl.py"), find_method("fedcopl.py")
SHORT, train = METHOD.short, METHOD.train
NAMES = [str(c) for c in range(CLASSES)]
KINDS = ["fpl", "ifpl --shots 3", "ifpl --shots grow", "cpl --intra-quantile 1 --inter-quantile 0.5", "copl"]


@lru_cache
def reference():
    """open_clip's own miniature, frozen, and its tokenizer."""
    model, tokenizer = stock_clip()
    return model.requires_grad_(False), tokenizer


def plain_features(images):
    """Features of uint8 images by open_clip's own tower."""
    pixels = common.normalise(images, open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
    return reference()[0].encode_image(pixels, normalize=True)


@lru_cache
def digits():
    """The data of the short runs: Dataset, training and test images of each client."""
    data = load_images("digits", "data", 16, 200, clip=True)
    return data, *common.clip_partition(data.train_labels, data.test_labels, CLIENTS, 0.1)


LOADED = promptfl.load_clip(*SHORT[SHORT.index("--model") + 1 :: 2])


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch):
    """Half of the time of a short run goes into loading the same frozen model."""
    monkeypatch.setattr(promptfl, "load_clip", lambda *_: LOADED)


class World:
    """Clients of given sizes with random images, the miniature CLIP, and what main() prepares for a round."""

    def __init__(self, sizes, *flags, test_sizes=None, names=NAMES):
        self.args = promptfl.parse_args([*SHORT, "--clients", str(len(sizes)), *map(str, flags)])
        self.ranks = common.Ranks(self.args)
        self.clip, side, self.stats, _ = LOADED
        self.zero_shot = self.clip.encode_text(self.clip.text_input([f"a photo of a {name}" for name in names], 0))
        self.text = self.clip.text_input([f"{name}." for name in names], self.args.text_prompts)
        rng, parts, images, truth = np.random.default_rng(0), [], [], []
        for counts in (sizes, test_sizes or [3] * len(sizes)):
            parts.append(np.split(rng.permutation(sum(counts)), np.cumsum(counts)[:-1]))
            images.append(torch.from_numpy(rng.integers(0, 256, (sum(counts), 3, side, side), dtype=np.uint8)))
            truth.append(torch.from_numpy(rng.integers(0, len(names), sum(counts))))
        self.source = SimpleNamespace(
            train_images=images[0], test_images=images[1], train_labels=truth[0], test_labels=truth[1])
        self.parts, self.side = parts, side
        self.data = self.encode(range(len(sizes)))
        first = 0.02 * torch.randn(self.args.text_prompts, WIDTH, generator=torch.Generator().manual_seed(1))
        self.prompts = promptfl.Prompts(first.repeat(len(sizes), 1, 1))

    def encode(self, clients):
        return promptfl.encode_data(
            self.clip, self.source, self.parts, clients, self.side, self.stats, torch.device("cpu"))

    def label(self, iteration=0):
        """Pseudo-labels of all clients."""
        words = self.zero_shot
        if not promptfl.asks_zero_shot(self.args, iteration):
            words = self.clip.encode_text(self.text, self.prompts.text[0])
        probs = [promptfl.predict(self.clip, self.data.features[own], words) for own in self.data.train]
        return promptfl.label_images(self.args, iteration, self.ranks, len(words), probs, self.data)[0]

    def update(self, client, labels, rnd=0, momentum=None):
        """client_update of a client; momentum: what the optimiser holds before."""
        learned = promptfl.Prompts(torch.nn.Parameter(torch.full_like(self.prompts.text[0], 7.0)))
        optimizer = torch.optim.SGD(learned, 0.1, self.args.momentum, weight_decay=self.args.weight_decay)
        if momentum is not None:
            optimizer.state[learned.text]["momentum_buffer"] = torch.full_like(learned.text, momentum)
        return promptfl.client_update(
            self.args, rnd, client, self.clip, self.text, self.data, self.prompts, labels, learned, optimizer)

    def round(self, iteration=0):
        """A whole round: labels, uploads, new prompts, the clients' scores."""
        labels = self.label(iteration)
        uploads = [self.update(client, labels) for client in range(self.args.clients)]
        prompts = promptfl.server_update(self.prompts, uploads, promptfl.SHARED)
        with torch.no_grad():
            words = self.clip.encode_text(self.text, prompts.text[0])
        scores = [promptfl.evaluate(k, self.clip, self.data, words) for k in range(self.args.clients)]
        return labels, uploads, prompts, scores


def one_hot(label):
    return one_class_labels(promptfl, label, CLASSES)


def close(value, expected, tolerance):
    torch.testing.assert_close(value.detach().double(), expected.double(), atol=tolerance, rtol=tolerance)


# ---- image features -----------------------------------------------------------------------------------------------


def test_features_are_those_of_the_unprompted_tower():
    world = World((9, 0, 14, 300), test_sizes=(4, 3, 0, 2))
    for images, features in (
        (world.source.train_images, world.data.features), (world.source.test_images, world.data.test_features),
    ):
        close(features, plain_features(images), 1e-5)
        direct = world.clip.encode_image(common.normalise(images[:7], *world.stats))
        close(features[:7], direct, 1e-6)  # encoded in other batches
        assert not features.requires_grad
    some = world.encode([2])  # a rank has those of its own clients
    for features, alone, owned in (
        (world.data.features, some.features, 0), (world.data.test_features, some.test_features, 1),
    ):
        own, others = world.parts[owned][2], np.concatenate([world.parts[owned][k] for k in (0, 1, 3)])
        close(alone[own], features[own], 1e-6)
        assert not alone[others].any()
    nobody = world.encode([])  # a rank without clients
    assert nobody.features.shape == world.data.features.shape and not nobody.features.any()


def test_images_are_decoded_and_encoded_once(tmp_path, monkeypatch):
    """Also where they do not fit into memory, and the run is the same."""
    cached = train(tmp_path, "--refresh", 1, "--pseudo-labels", "ifpl", name="cached")
    taken, encoded = [], []
    cache, prepare, encode = common.cache_images, common.Images.__getitem__, promptfl.PromptedCLIP.encode_image

    def watched_prepare(images, index):
        if not isinstance(index, slice):                    # which are the fingerprint's
            taken.extend((id(images), int(i)) for i in index)
        return prepare(images, index)

    def watched_encode(clip, images):
        encoded.append(len(images))
        return encode(clip, images)

    monkeypatch.setattr(common, "cache_images", lambda data, _=None: cache(data, 0))
    monkeypatch.setattr(common.Images, "__getitem__", watched_prepare)
    monkeypatch.setattr(promptfl.PromptedCLIP, "encode_image", watched_encode)
    lazy = train(tmp_path, "--refresh", 1, "--pseudo-labels", "ifpl", name="lazy")
    assert len(taken) == len(set(taken)) == 200 + 359
    assert sum(encoded) == 200 + 359 + 1  # and one image to learn the width of the features
    assert same_run(cached, lazy)


# ---- local training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rnd, kind", [(0, "one class"), (3, "candidates")])
def test_local_training_step_by_step(rnd, kind):
    """Full batches, so that the order of the images plays no part: SGD with momentum and decay, written out."""
    flags = ("--local-epochs", 3, "--batch-size", 20, "--refresh", 2, "--lr", 0.07, "--weight-decay", 0.03)
    world = World((9, 14, 5), *flags)
    label, own = torch.full((28,), -1), world.data.train[1][::2]
    label[own] = torch.arange(len(own)) % 6
    label[world.data.train[0]] = 5  # another client's images are not touched
    labels = one_hot(label)
    if kind == "candidates":
        labels.candidate[own[:4], 9] = True
    upload = world.update(1, labels, rnd)
    clip, tokenizer = reference()
    images = plain_features(world.source.train_images[own])
    text, speed, losses = world.prompts.text[1].clone(), torch.zeros_like(world.prompts.text[1]), []
    for epoch in range(3):
        t = text.clone().requires_grad_()
        words = plain_clip.text_features(clip, tokenizer, NAMES, t)
        prob = plain_clip.logits(clip, images, words).double().softmax(1)
        loss = -(prob * labels.candidate[own]).sum(1).log().mean()
        speed = 0.9 * speed + torch.autograd.grad(loss, t)[0] + 0.03 * text
        text = text - 0.07 * 0.5 * (1 + math.cos(math.pi * (rnd % 2 * 3 + epoch) / 6)) * speed
        losses.append(float(loss.detach()))
    assert (text - world.prompts.text[1]).abs().max() > 1e-2
    close(upload.text, text, 2e-5)
    assert upload.metrics.tolist() == [pytest.approx(sum(losses), rel=1e-3), 3]
    assert float(upload.weight) == len(own) == 7


def test_local_steps_keep_the_last_batch_and_use_no_other_image():
    world = World((9, 14, 5), "--local-epochs", 3, "--batch-size", 3)
    label, own = torch.full((28,), -1), world.data.train[1][:8]
    label[own] = 2
    upload = world.update(1, one_hot(label))
    assert upload.metrics[1] == 3 * 3 and float(upload.weight) == 8  # 3 + 3 + 2 images, three times
    features = world.data.features.clone()
    features[np.setdiff1d(np.arange(28), own)] *= -1
    world.data = world.data._replace(features=features, labels=world.data.labels.flip(0))
    label[world.data.train[0]] = 0
    assert all(map(torch.equal, upload, world.update(1, one_hot(label))))
    features[own[0]] *= -1
    assert not torch.equal(world.update(1, one_hot(label)).text, upload.text)


def test_each_update_depends_on_its_client_alone_and_shares_no_memory():
    world = World((20, 20, 20))
    before, labels = world.prompts.text.clone(), world.label()
    uploads = [world.update(client, labels) for client in range(3)]
    held = world.update(1, labels, momentum=0.5)  # whoever trained before leaves a momentum: it is dropped
    assert equal(tuple(held), tuple(uploads[1])) and torch.equal(world.prompts.text, before)
    result = promptfl.server_update(world.prompts, uploads, promptfl.SHARED)
    values = [value for upload in uploads for value in upload] + [*result, *world.prompts]
    assert len({value.data_ptr() for value in values}) == len(values)
    assert result.text.is_contiguous() and result.text.untyped_storage().nbytes() == 4 * result.text.numel()


def test_without_gradient_a_step_shrinks_the_prompt_by_the_decay():
    """One class: the loss is 0 whatever the prompt is. Learning rate 0.1 times decay 0.05 leaves 0.995."""
    world = World((5,), names=["cat"])
    upload = world.update(0, promptfl.Labels(torch.zeros(5).long(), torch.ones(5, 1).bool()))
    close(upload.text, 0.995 * world.prompts.text[0], 1e-6)
    assert upload.metrics.tolist() == [0, 1]


# ---- the server, evaluation ---------------------------------------------------------------------------------------


def test_average_is_weighted_by_selected_images_and_all_hold_it():
    world = World((40, 25, 0, 9), "--shots", 2)
    labels, uploads, prompts, _ = world.round()
    selected = [int((labels.pseudo_label[own] >= 0).sum()) for own in world.data.train]
    assert selected[2] == 0 and len(set(selected)) > 2
    slow = sum(n / sum(selected) * upload.text.double() for n, upload in zip(selected, uploads))
    close(prompts.text, slow.expand(4, -1, -1), 1e-6)
    assert all(torch.equal(prompts.text[0], own) for own in prompts.text)


def test_server_by_hand():
    received = promptfl.Prompts(torch.full((3, 2, 4), 9.0))
    draw = torch.Generator().manual_seed(0)
    texts = torch.randn(3, 2, 4, generator=draw)

    def server(values, weights):
        uploads = [promptfl.Upload(text, torch.tensor(float(w)), torch.zeros(2)) for text, w in zip(values, weights)]
        return promptfl.server_update(received._replace(text=received.text[: len(uploads)]), uploads, promptfl.SHARED)

    mixed = server(texts, (3, 1, 0)).text
    close(mixed, (0.75 * texts[0] + 0.25 * texts[1]).expand(3, -1, -1), 1e-6)
    other = texts.clone()
    other[2] = 1e6  # a client without selected images has no influence, whatever it holds
    assert torch.equal(server(other, (3, 1, 0)).text, mixed)
    assert torch.equal(server(texts, (0, 0, 0)).text, received.text)  # nobody trained: what there was
    assert torch.equal(server(texts[:1], (17,)).text, texts[:1])
    close(server(texts[:1].expand(3, -1, -1), (7, 0, 123)).text, texts[:1].expand(3, -1, -1), 1e-6)


def test_evaluation_counts_correct_test_images():
    world = World((5, 5, 5), test_sizes=(40, 0, 61))
    clip, tokenizer = reference()
    words = plain_clip.text_features(clip, tokenizer, NAMES, world.prompts.text[0])
    answers = plain_clip.logits(clip, plain_features(world.source.test_images), words).argmax(1).tolist()
    truth = world.source.test_labels.tolist()
    scores = []
    for client, own in enumerate(world.data.test):
        scores.append(promptfl.evaluate(client, world.clip, world.data, words))
        assert scores[-1].tolist() == [sum(answers[i] == truth[i] for i in own), len(own)]
    right = [score[0].item() for score in scores]
    mean = 100 * (right[0] / 40 + right[2] / 61) / 2  # a client without test images is not in the mean
    assert promptfl.accuracies(scores) == pytest.approx((mean, 100 * sum(right) / 101))


# ---- runs ---------------------------------------------------------------------------------------------------------


def test_it_is_fedcopl_without_visual_prompts_whose_text_prompts_are_averaged(tmp_path):
    flags = ["--pseudo-labels", "copl"]
    mine = train(tmp_path, *flags, name="mine")
    theirs = FEDCOPL.train(tmp_path, *flags, "--aggregate", "text", "--visual-prompts", 0, name="theirs")
    first, second = labels_table(mine), labels_table(theirs)
    assert first == second and {rnd for rnd, _ in first} == {1}
    a, b = checkpoint(mine), checkpoint(theirs)
    assert torch.equal(a["pseudo_label"], b["pseudo_label"]) and torch.equal(a["candidate"], b["candidate"])
    torch.testing.assert_close(a["text"], b["text"], atol=1e-4, rtol=1e-3)
    assert a["text"].abs().max() > 0.1  # they moved far from their first values
    for one, other in zip(rows(mine), rows(theirs)):
        for column in ("bytes_up", "bytes_down", "selected", "pl_acc_pct", "pl_gap_pct", "clients_trained"):
            assert one[column] == other[column], column
        for column in ("loss_unsup", "drift_text"):
            assert float(one[column]) == pytest.approx(float(other[column]), rel=1e-3), column


def first_prompt():
    """As fedcopl.py draws it."""
    return torch.from_numpy(common.stream(1, "init", "text").normal(0, 0.02, (16, WIDTH)))


def test_all_hold_the_same_prompt_and_its_accuracy_is_open_clips(tmp_path):
    """The last row has what the prompt of the checkpoint answers in open_clip's own towers, on each client's images."""
    folder = train(tmp_path, "--pseudo-labels", "copl", "--conf-quantile", 0.3)
    data, _, test = digits()
    text = checkpoint(folder)["text"]
    assert text.shape == (CLIENTS, 16, WIDTH) and all(torch.equal(text[0], own) for own in text)
    assert text.abs().max() > 0.1
    words = plain_clip.text_features(*reference(), NAMES, text[0])
    right = ((plain_features(data.test_images) @ words.T).argmax(1) == data.test_labels).float()
    last = rows(folder)[-1]
    assert float(last["pooled_acc_pct"]) == pytest.approx(100 * right.mean().item(), rel=1e-5)
    by_client = np.mean([right[own].mean().item() for own in test])
    assert float(last["test_acc_pct"]) == pytest.approx(100 * by_client, rel=1e-5)
    assert last["test_acc_pct"] == last["client_acc_mean_pct"]


def test_labels_of_two_refreshes_by_a_slow_loop(tmp_path, monkeypatch):
    """The first ones are those of the template, the second ones those of the averaged prompt."""
    labels, prompts, honest = [], [], (promptfl.label_images, promptfl.server_update)
    monkeypatch.setattr(promptfl, "label_images", lambda *given: labels.append(honest[0](*given)) or labels[-1])
    monkeypatch.setattr(promptfl, "server_update", lambda *given: prompts.append(honest[1](*given)) or prompts[-1])
    train(tmp_path, "--pseudo-labels", "ifpl", "--shots", 2, "--refresh", 1)
    data, owned, _ = digits()
    template = plain_clip.template_features(*reference(), [f"a photo of a {name}" for name in NAMES])
    averaged = plain_clip.text_features(*reference(), NAMES, prompts[0].text[3])
    for words, (found, _) in zip((template, averaged), labels, strict=True):
        prob = plain_clip.logits(reference()[0], plain_features(data.train_images), words).softmax(1)
        for own in owned:
            assert found.pseudo_label[own].tolist() == slow_selection(prob[own].tolist(), [2] * CLASSES)


# ---- costs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, counts", [("fpl", 0), ("ifpl", 0), ("cpl", 0), ("copl", 400)])
def test_bytes_of_the_published_model(kind, counts):
    """ViT-B/32: 32,768 bytes a client and round, both ways, and at a refresh 4 up; copl 4 C up and down more."""
    args = promptfl.parse_args(["--dataset", "cifar100", "--pseudo-labels", kind])
    width = open_clip.get_model_config(args.model)["text_cfg"]["width"]
    text = torch.zeros(args.clients, args.text_prompts, width)
    sent = 4 * sum(getattr(promptfl.Prompts(text), name)[0].numel() for name in promptfl.SHARED)
    uploads = [promptfl.Upload(text[0] + 1, torch.tensor(3.0), torch.ones(2)) for _ in range(10)]
    table = torch.ones(len(promptfl.LABEL_COLUMNS), 100).long()
    for rnd, refresh in ((0, True), (1, False), (4, False), (5, True)):
        row = promptfl.round_row(args, rnd, (1.0, 1.0), uploads, promptfl.Prompts(text), table, sent)
        assert row["bytes_down"] == 10 * (32_768 + refresh * counts)
        assert row["bytes_up"] == 10 * (32_768 + refresh * (counts + 4))


# ---- the published settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["dtd", "resisc45", "cub", "ucf101", "cifar10", "cifar100", "digits"])
def test_defaults_are_fedcopls_with_labels_of_fpl(dataset):
    mine, theirs = (vars(find.module.parse_args(["--dataset", dataset])) for find in (METHOD, FEDCOPL))
    differs = {name for name in mine if mine[name] != theirs[name]}
    assert differs == {"pseudo_labels", "shots", "run_name"} and mine["pseudo_labels"] == "fpl" and mine["shots"] == 16
    own = {"aggregate", "visual_lr", "visual_prompts", "prompt_depth", "shared_momentum", "cache_gb"}
    assert theirs.keys() - mine.keys() == own
