"""fedcopl.py as a program: label secrecy, odd clients, ablations, aggregation, costs, figures, models and weights."""

import itertools
import json
import logging
import math
import shutil
import time
import zipfile
from pathlib import Path

import numpy as np
import open_clip
import plain_clip
import pytest
import torch
from scripts import (MINI_CONFIG, ROOT, Program, checkpoint, equal, labels_table, load_images, mini_clip, rows,
                     same_run)
from scripts import method as find_method
from test_bad_input import complaint, write_tree
from worlds import one_class_labels

import common
import fedcopl

METHOD = find_method("fedcopl.py")
SHORT, train = METHOD.short, METHOD.train
WIDTH, LAYERS, CLASSES, CLIENTS = 32, 3, 10, 4  # of the miniature and of the short settings
VISUAL, TEXT = 4 * (LAYERS - 1) * 5 * WIDTH, 4 * 16 * WIDTH  # bytes of the prompts


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """open_clip remembers the model files of a process: forget those of a test."""
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))


# ---- clients of odd kinds -----------------------------------------------------------------------------------------


class World:
    """Clients of given sizes with random images, the miniature CLIP, and what main() prepares for a round."""

    def __init__(self, sizes, *flags, test_sizes=None, classes=CLASSES, same_images=()):
        self.args = fedcopl.parse_args([*SHORT, "--clients", str(len(sizes)), *map(str, flags)])
        self.ranks = common.Ranks(self.args)
        self.clip, side, stats, _ = fedcopl.load_clip(self.args.model, self.args.pretrained)
        names = [str(c) for c in range(classes)]
        self.zero_shot = self.clip.encode_text(self.clip.text_input([f"a photo of a {name}" for name in names], 0))
        self.text = self.clip.text_input([f"{name}." for name in names], self.args.text_prompts)
        rng, parts, images = np.random.default_rng(0), [], []
        for counts in (sizes, test_sizes or [3] * len(sizes)):
            parts.append(np.split(rng.permutation(sum(counts)), np.cumsum(counts)[:-1]))
            images.append(torch.from_numpy(rng.integers(0, 256, (sum(counts), 3, side, side), dtype=np.uint8)))
        for client in same_images:
            images[0][parts[0][client]] = images[0][parts[0][client][0]].clone()
        truth = [torch.from_numpy(rng.integers(0, classes, len(part))) for part in images]
        self.data = fedcopl.FederatedData(*images, *truth, *parts, tuple(stats))
        draw = torch.Generator().manual_seed(1)
        self.prompts = fedcopl.Prompts(
            0.02 * torch.randn(len(sizes), LAYERS - 1, self.args.visual_prompts, WIDTH, generator=draw),
            0.02 * torch.randn(len(sizes), self.args.text_prompts, WIDTH, generator=draw))
        self.learned = fedcopl.Prompts(*(torch.nn.Parameter(value[0].clone()) for value in self.prompts))
        self.optimizer = torch.optim.SGD(
            [{"params": [value]} for value in self.learned], 0.1, self.args.momentum,
            weight_decay=self.args.weight_decay)

    def label(self, iteration=0):
        """Pseudo-labels, and the table as {column: list over classes}."""
        probs = []
        for client, own in enumerate(self.data.train):
            visual, words = None, self.zero_shot
            if not fedcopl.asks_zero_shot(self.args, iteration):
                visual, words = self.prompts.visual[client], self.clip.encode_text(self.text, self.prompts.text[client])
            probs.append(fedcopl.predict(self.clip, self.data, self.data.images, own, visual, words))
        labels, table = fedcopl.label_images(self.args, iteration, self.ranks, len(self.zero_shot), probs, self.data)
        return labels.pseudo_label, dict(zip(fedcopl.LABEL_COLUMNS, table.tolist()))

    def update(self, client, label, rnd=0):
        labels = one_class_labels(fedcopl, label, CLASSES)
        return fedcopl.client_update(
            self.args, rnd, client, self.clip, self.text, self.data, self.prompts, labels, self.learned, self.optimizer)

    def round(self, iteration=0):
        """A whole round: pseudo-labels, table, uploads, new prompts, the clients' scores."""
        label, table = self.label(iteration)
        uploads = [self.update(client, label) for client in range(self.args.clients)]
        prompts = fedcopl.server_update(self.prompts, uploads, ("visual",))
        scores = []
        with torch.no_grad():
            for client in range(self.args.clients):
                words = self.clip.encode_text(self.text, prompts.text[client])
                scores.append(fedcopl.evaluate(client, self.clip, self.data, prompts.visual[client], words))
        return label, table, uploads, prompts, scores


@pytest.mark.parametrize("flags", [[], ["--no-conf-filter", "--no-entropy-filter"], ["--no-allocation"]])
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("iteration", [0, 2])
def test_clients_of_any_size(iteration, batch_size, flags):
    """Clients with 0, 1, 2, 3 images, one whose images are all alike, and one of 30."""
    world = World((0, 1, 2, 3, 7, 30), "--batch-size", batch_size, *flags, same_images=[4])
    label, table, uploads, prompts, scores = world.round(iteration)
    for client, (own, upload) in enumerate(zip(world.data.train, uploads)):
        selected = int((label[own] >= 0).sum())
        assert upload.weight.item() == selected
        assert upload.metrics[1].item() == math.ceil(selected / batch_size)
        moved = not torch.equal(upload.visual, world.prompts.visual[client])
        assert moved == (not torch.equal(upload.text, world.prompts.text[client])) == (selected > 0)
        assert upload.visual.isfinite().all() and upload.text.isfinite().all() and upload.metrics.isfinite().all()
    assert uploads[0].weight == 0 and uploads[5].weight > 0
    assert all(value.isfinite().all() for value in prompts)
    assert torch.equal(prompts.text[0], world.prompts.text[0]) and torch.equal(prompts.visual[0], prompts.visual[5])
    assert [score[1].item() for score in scores] == [3] * 6
    if not flags:  # nobody alone or equal to all others lies above its own median
        probs = [
            fedcopl.predict(world.clip, world.data, world.data.images, own, None, world.zero_shot)
            for own in world.data.train
        ]
        passed = [int(fedcopl.estimate(prob, 0.5, 0.5)[0].sum()) for prob in probs]
        assert passed[0] == passed[1] == passed[4] == 0 and passed[2] <= 1 and 0 < passed[5] <= 15
        assert iteration or sum(table["estimated"]) == sum(passed)


def test_a_client_that_passes_nothing_and_may_select_nothing_has_no_influence():
    """Without images above its median it counts none; where others hold the classes, its capacities are 0."""
    lone, other = (World((1, 30), "--unseen-classes", "none", same_images=[k]) for k in (0, 0))
    other.prompts.visual[0] += 1
    label, table, uploads, prompts, _ = lone.round()
    assert uploads[0].weight == 0 and (label[lone.data.train[0]] == -1).all() and sum(table["selected"]) > 0
    assert equal(tuple(prompts.visual), tuple(other.round()[3].visual))  # whatever that client held


def test_a_client_without_test_images_is_not_in_the_mean():
    world = World((10, 10, 10), test_sizes=(4, 0, 6))
    scores = world.round()[-1]
    assert [score[1].item() for score in scores] == [4, 0, 6] and scores[1][0] == 0
    right = [score[0].item() for score in scores]
    mean, pooled = fedcopl.accuracies(scores)
    assert mean == pytest.approx(100 * (right[0] / 4 + right[2] / 6) / 2)
    assert pooled == pytest.approx(100 * sum(right) / 10)


def test_a_class_that_nobody_predicts_and_one_that_everybody_predicts(tmp_path):
    table = labels_table(train(tmp_path, "--rounds", 3))
    assert {rnd for rnd, _ in table} == {1, 3}
    unseen = [(rnd, row) for (rnd, _), row in table.items() if row["estimated"] == 0]
    assert unseen
    for rnd, row in unseen:
        assert row["capacity"] == CLIENTS * math.ceil(200 * ((rnd - 1) // 2 + 1) / (4 * CLASSES * CLIENTS))
    for (rnd, _), row in table.items():
        total = sum(other["estimated"] for (when, _), other in table.items() if when == rnd)
        budget = math.ceil(total / CLASSES)
        if row["estimated"]:
            assert budget <= row["capacity"] < budget + CLIENTS


def test_clients_start_from_their_prompts_and_leave_no_trace():
    """Each update depends on its client alone, whoever trained before; nothing is handed on by reference."""
    world = World((20, 20, 20))
    before = fedcopl.Prompts(*(value.clone() for value in world.prompts))
    label, _ = world.label()
    alone = {client: World((20, 20, 20)).update(client, label) for client in range(3)}
    for order in itertools.permutations(range(3)):
        for client in order:
            assert equal(tuple(world.update(client, label)), tuple(alone[client])), order
    assert equal(tuple(world.prompts), tuple(before))
    result = fedcopl.server_update(world.prompts, list(alone.values()), ("visual",))
    held = [value for upload in alone.values() for value in upload] + [*result, *world.learned, *world.prompts]
    pointers = [value.data_ptr() for value in held]
    assert len(set(pointers)) == len(pointers)
    for value in result:  # nor do the clients among themselves
        assert value.is_contiguous() and value.untyped_storage().nbytes() == 4 * value.numel()

    shared = World((20, 20, 20), "--shared-momentum")
    assert equal(tuple(shared.update(0, label)), tuple(alone[0]))
    assert not torch.equal(shared.update(1, label).visual, alone[1].visual)


# ---- every ablation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [
    "--no-conf-filter", "--no-entropy-filter", "--no-conf-filter --no-entropy-filter", "--no-allocation",
    "--aggregate text", "--aggregate both", "--aggregate none", "--refresh 1", "--clients 1", "--clients 5",
    "--clients 12", "--clients 50", "--text-prompts 0", "--visual-prompts 0", "--text-prompts 0 --visual-prompts 0",
    "--text-prompts 73", "--prompt-depth 0", "--prompt-depth 3", "--prompt-std 0",
    "--conf-quantile 0 --entropy-quantile 0", "--conf-quantile 1", "--entropy-quantile 1", "--partition quantity",
    "--partition quantity --clients 1", "--partition quantity --shuffle-classes --clients 12", "--partition iid",
    "--partition quantity --clients 50", "--beta inf", "--beta 0.001 --clients 20", "--budget exact",
    "--unseen-classes none", "--ceiling float32", "--shared-momentum", "--momentum 0 --weight-decay 0",
    "--momentum 1", "--amp", "--batch-size 1", "--batch-size 1000", "--local-epochs 3", "--skip-share 0.2",
    "--template {}"])
def test_every_ablation_runs_and_stays_finite(tmp_path, flags):
    folder = train(tmp_path, *flags.split())
    state, table = checkpoint(folder), rows(folder)
    assert state["visual"].isfinite().all() and state["text"].isfinite().all()
    clients = int(flags.split("--clients ")[1].split()[0]) if "--clients " in flags else CLIENTS
    assert len(state["visual"]) == len(state["text"]) == clients
    for row in table:
        assert not {"nan", "inf", "-inf"} & set(row.values())
        assert int(row["clients_trained"]) + int(row["clients_empty"]) == clients
        assert 0 < int(row["selected"]) <= 200 and 0 < float(row["loss_unsup"])
    for name in ("config.json", "summary.json"):
        json.loads((folder / name).read_text(), parse_constant=pytest.fail)  # strict JSON: no Infinity, no NaN
    if "--text-prompts 0" in flags:
        assert table[0]["drift_text"] == table[0]["distance_text"] == ""
    if "--visual-prompts 0" in flags or "--prompt-depth 0" in flags:
        assert table[0]["drift_visual"] == table[0]["distance_visual"] == ""


def watched(monkeypatch):
    """A list that gets the FederatedData of each run to come."""
    honest, seen = fedcopl.prepare_data, []

    def prepare(*given):
        prepared = honest(*given)
        seen.append(prepared[0])
        return prepared

    monkeypatch.setattr(fedcopl, "prepare_data", prepare)
    return seen


def test_images_prepared_at_each_use_change_nothing(tmp_path, monkeypatch):
    seen = watched(monkeypatch)
    cached, lazy = train(tmp_path, name="cached"), train(tmp_path, "--cache-gb", 0, name="lazy")
    assert [type(data.images) for data in seen] == [torch.Tensor, common.Images]
    assert same_run(cached, lazy)
    config = [json.loads((folder / "config.json").read_text()) for folder in (cached, lazy)]
    assert config[0]["data_fingerprint"] == config[1]["data_fingerprint"]
    train(tmp_path, "--cache-gb", 0, "--resume", "--rounds", 3, name="cached")  # memory is no setting of the method
    assert len(rows(cached)) == 3


def test_amp_changes_training_and_no_label(tmp_path):
    plain, amp = (checkpoint(train(tmp_path, flag, name=flag[2:])) for flag in ("--no-amp", "--amp"))
    assert torch.equal(plain["pseudo_label"], amp["pseudo_label"])
    difference = (plain["visual"] - amp["visual"]).abs().max()
    assert 0 < difference < 0.5 * plain["visual"].abs().max() and amp["visual"].dtype == torch.float32


def test_skipped_share_leaves_the_first_images_of_each_class_out(tmp_path, monkeypatch):
    seen = watched(monkeypatch)
    for share in (0, 0.2):
        train(tmp_path, "--skip-share", share, "--train-subset", 1000, "--rounds", 1, name=f"share{share}")
    whole = load_images("digits", "data", 16, clip=True)
    for share, data in zip((0, 0.2), seen):
        for c in range(CLASSES):
            of_class = whole.train_images[whole.train_labels == c]
            first = of_class[: int(share * len(of_class))]
            used = data.images[data.labels == c]
            assert len(used) == 100
            found = [(used == image).flatten(1).all(1).any().item() for image in first]
            assert not any(found)
            assert share or (used[0] == of_class[0]).all()


# ---- what the server averages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["visual", "text", "both", "none"])
def test_averaged_prompts_are_equal_and_the_others_differ(tmp_path, aggregate):
    state = checkpoint(train(tmp_path, "--aggregate", aggregate))
    for name in ("visual", "text"):
        alike = [torch.equal(state[name][0], other) for other in state[name][1:]]
        assert alike == [aggregate in (name, "both")] * (CLIENTS - 1), name
    assert all(float(row["distance_visual"]) > 0 for row in rows(tmp_path / "run"))


def test_average_is_weighted_by_selected_images():
    world = World((40, 25, 0, 9))
    label, _, uploads, prompts, _ = world.round()
    selected = [int((label[own] >= 0).sum()) for own in world.data.train]
    assert len(set(selected[:2])) == 2 and selected[2] == 0
    slow = torch.zeros(uploads[0].visual.shape, dtype=torch.float64)
    for count, upload in zip(selected, uploads):
        slow += count / sum(selected) * upload.visual.double()
    torch.testing.assert_close(prompts.visual[0].double(), slow, atol=1e-7, rtol=1e-6)


def test_one_client_is_training_without_a_federation(tmp_path):
    runs = [train(tmp_path, "--clients", 1, "--aggregate", a, name=a) for a in ("visual", "text", "both", "none")]
    states = [checkpoint(folder) for folder in runs]
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in ("visual", "text", "pseudo_label"))


def test_without_a_step_size_nothing_moves_but_is_evaluated(tmp_path):
    still = train(tmp_path, "--lr", 0, "--visual-lr", 0, "--rounds", 3)
    state = checkpoint(still)
    for name, value in state.items():
        if name in ("visual", "text"):
            assert all(torch.equal(value[0], other) for other in value)
            assert value[0].std() == pytest.approx(0.02, rel=0.2)
    table = rows(still)
    assert table[0]["test_acc_pct"] == table[2]["test_acc_pct"] and table[0]["drift_visual"] == ""
    assert float(table[0]["loss_unsup"]) > 0 and float(table[0]["distance_text"]) == pytest.approx(0, abs=1e-6)
    half = checkpoint(train(tmp_path, "--lr", 0, name="half"))
    assert all(torch.equal(own, state["text"][0]) for own in half["text"])
    assert not torch.equal(half["visual"], state["visual"])


def test_first_labels_are_the_same_for_all_seeds_and_later_ones_are_not(tmp_path):
    runs = [train(tmp_path, "--seed", seed, "--rounds", 3, name=f"s{seed}") for seed in (1, 2)]
    first, second = map(labels_table, runs)
    assert [first[key] for key in first if key[0] == 1] == [second[key] for key in second if key[0] == 1]
    assert [first[key] for key in first if key[0] == 3] != [second[key] for key in second if key[0] == 3]
    once = [checkpoint(train(tmp_path, "--seed", s, "--rounds", 1, name=f"o{s}")) for s in (1, 2)]
    assert torch.equal(once[0]["pseudo_label"], once[1]["pseudo_label"])
    assert not torch.equal(once[0]["visual"], once[1]["visual"])


# ---- figures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, sent, counts", [
    ("", VISUAL, True), ("--aggregate text", TEXT, True), ("--aggregate both", VISUAL + TEXT, True),
    ("--aggregate none", 0, True), ("--no-allocation", VISUAL, False),
    ("--prompt-depth 1 --visual-prompts 7", 4 * 7 * WIDTH, True)])
def test_bytes_are_exact(tmp_path, flags, sent, counts):
    """Averaged prompts both ways; at a refresh 4 C bytes each way for counts and capacities, 4 up for a number."""
    for row in rows(train(tmp_path, *flags.split(), "--rounds", 3)):
        active, refresh = int(row["clients_trained"]), row["round"] in "13"
        extra = 4 * CLASSES * CLIENTS if refresh and counts else 0
        number = 4 * CLIENTS if refresh and sent else 0
        assert int(row["bytes_up"]) == sent * active + extra + number
        assert int(row["bytes_down"]) == sent * CLIENTS + extra


def test_bytes_of_the_published_model():
    """ViT-B/32: 168,960 bytes a client and round, both ways, and 4 C up, 4 C down and 4 up at a refresh."""
    vision = open_clip.get_model_config("ViT-B-32-quickgelu")["vision_cfg"]
    args = fedcopl.parse_args(["--dataset", "cifar100"])
    depth = vision["layers"] - 1 if args.prompt_depth is None else args.prompt_depth
    visual, text = torch.zeros(10, depth, args.visual_prompts, vision["width"]), torch.zeros(10, args.text_prompts, 512)
    sent = 4 * visual[0].numel()
    uploads = [fedcopl.Upload(visual[0] + 1, text[0] + 1, torch.tensor(3.0), torch.ones(2)) for _ in range(10)]
    table = torch.ones(len(fedcopl.LABEL_COLUMNS), 100).long()
    for rnd, extra in ((0, 400), (1, 0), (4, 0), (5, 400)):
        row = fedcopl.round_row(args, rnd, (1.0, 1.0), uploads, fedcopl.Prompts(visual, text), table, sent)
        assert row["bytes_down"] == 10 * (168_960 + extra)
        assert row["bytes_up"] == 10 * (168_960 + extra + (4 if extra else 0))


def test_pseudo_label_table_adds_up(tmp_path):
    folder = train(tmp_path, "--rounds", 5)
    table, log = labels_table(folder), {int(row["round"]): row for row in rows(folder)}
    assert {"client_acc_mean_pct", "pooled_acc_pct", "drift_visual", "drift_text"} <= log[1].keys()  # as contracted
    assert {rnd for rnd, _ in table} == {1, 3, 5} and len(table) == 3 * CLASSES
    for rnd in (1, 3, 5):
        of_round = [table[rnd, str(c)] for c in range(CLASSES)]
        total = {key: sum(row[key] for row in of_round) for key in of_round[0]}
        assert total["images"] == total["predicted"] == 200 and total["estimated"] <= 100
        for row in of_round:
            assert row["selected"] <= min(row["capacity"], row["predicted"]) and row["images"] == 20
            assert row["selected_correct"] <= row["selected"] and row["selected_correct"] <= row["predicted_correct"]
            assert row["estimated"] <= row["predicted"]
        for when in {rnd, rnd + 1} & log.keys():
            row = log[when]
            assert int(row["selected"]) == total["selected"]
            for column, value in (
                ("pl_used_pct", 100 * total["selected"] / 200),
                ("pl_acc_pct", 100 * total["selected_correct"] / total["selected"]),
                ("pl_all_acc_pct", 100 * total["predicted_correct"] / 200),
                ("pl_gap_pct", 100 * sum(abs(r["selected"] / total["selected"] - 0.1) for r in of_round) / 2),
            ):
                assert float(row[column]) == pytest.approx(value, rel=1e-5), column


def test_selection_is_kept_over_an_interruption_in_the_middle_of_a_period(tmp_path, monkeypatch):
    run = train(tmp_path, "--refresh", 3, "--rounds", 2)
    label, table = checkpoint(run)["pseudo_label"], (run / "pseudo_labels.csv").read_text()
    honest, asked = fedcopl.label_images, []
    monkeypatch.setattr(fedcopl, "label_images", lambda *given: asked.append(given[1]) or honest(*given))
    train(tmp_path, "--refresh", 3, "--rounds", 3, "--resume")
    assert not asked and torch.equal(checkpoint(run)["pseudo_label"], label)
    assert (run / "pseudo_labels.csv").read_text() == table
    train(tmp_path, "--refresh", 3, "--rounds", 4, "--resume")
    assert asked == [1] and not torch.equal(checkpoint(run)["pseudo_label"], label)
    assert (run / "pseudo_labels.csv").read_text().startswith(table)


def stock_clip():
    model = open_clip.create_model("mini", pretrained=str(mini_clip() / "mini.pt")).eval()
    return model, open_clip.get_tokenizer("mini")


def test_zero_shot_and_final_accuracy_with_open_clip_and_plain_prompts(tmp_path):
    """summary.json has what open_clip's own model answers; the last row what the prompts of the checkpoint answer."""
    folder = train(tmp_path, "--rounds", 3)
    model, tokenizer = stock_clip()
    data = load_images("digits", "data", 16, 200, clip=True)
    test = common.clip_partition(data.train_labels, data.test_labels, CLIENTS, 0.1)[1]
    images = common.normalise(data.test_images, open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
    with torch.no_grad():
        words = model.encode_text(tokenizer([f"a photo of a {c}" for c in range(CLASSES)]), normalize=True)
        right = (model.encode_image(images, normalize=True) @ words.T).argmax(1) == data.test_labels
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["zeroshot_pooled_pct"] == pytest.approx(100 * right.float().mean().item())
        by_client = [right[own].float().mean().item() for own in test]
        assert summary["zeroshot_client_mean_pct"] == pytest.approx(100 * np.mean(by_client))

        prompts, answers = checkpoint(folder), []
        for client, own in enumerate(test):
            words = plain_clip.text_features(model, tokenizer, map(str, range(CLASSES)), prompts["text"][client])
            features = plain_clip.image_features(model, images[own], prompts["visual"][client])
            answers.append((features @ words.T).argmax(1) == data.test_labels[own])
    last = rows(folder)[-1]
    assert float(last["client_acc_mean_pct"]) == pytest.approx(
        100 * np.mean([own.float().mean().item() for own in answers]), rel=1e-5)
    assert float(last["pooled_acc_pct"]) == pytest.approx(100 * torch.cat(answers).float().mean().item(), rel=1e-5)
    assert last["test_acc_pct"] == last["client_acc_mean_pct"] != last["pooled_acc_pct"]
    resumed = train(tmp_path, "--rounds", 4, "--resume")
    again = json.loads((resumed / "summary.json").read_text())
    assert all(again[key] == summary[key] for key in ("zeroshot_pooled_pct", "zeroshot_client_mean_pct"))


# ---- models and weights -------------------------------------------------------------------------------------------


def with_model(model, pretrained):
    return ["--model", model, "--pretrained", pretrained]


def write_config(path, **changes):
    path.write_text(json.dumps(MINI_CONFIG | changes))
    return path


def features(model, pretrained):
    clip = fedcopl.load_clip(str(model), str(pretrained))[0]
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return clip.encode_image(images), clip.encode_text(clip.text_input(["a cat", "two dogs"], 0)), clip.scale


def test_weights_in_any_usual_form_give_the_same_features(tmp_path):
    from safetensors.torch import save_file

    weights = torch.load(mini_clip() / "mini.pt", weights_only=True)
    expected = features(mini_clip() / "mini.json", mini_clip() / "mini.pt")
    assert expected[0].std() > 0.01 and expected[2].item() == pytest.approx(100)
    save_file(weights, tmp_path / "a.safetensors")
    torch.save({"state_dict": weights, "epoch": 3, "name": "run"}, tmp_path / "b.pt")
    torch.save({f"module.{name}": value for name, value in weights.items()}, tmp_path / "c.pt")
    torch.save(weights, tmp_path / "d.pt", _use_new_zipfile_serialization=False)
    torch.save(weights, tmp_path / "e.bin")
    for file in sorted(tmp_path.iterdir()):
        assert equal(features(mini_clip() / "mini.json", file), expected), file.name


@pytest.mark.filterwarnings("ignore")  # of tracing
def test_torchscript_archive_as_openai_publishes_it(tmp_path):
    """OpenAI's files are traced modules in half precision that also hold three numbers; their GELU is the quick one."""
    model, tokenizer = stock_clip()
    for name, value in (("input_resolution", 16), ("context_length", 77), ("vocab_size", 49408)):
        model.__dict__.pop(name, None)
        model.register_buffer(name, torch.tensor(value))
    mask = model.attn_mask
    del model.attn_mask  # a constant there, no buffer
    model.attn_mask = mask
    model.requires_grad_(False)
    archive = torch.jit.trace(model, (torch.zeros(1, 3, 16, 16), tokenizer(["a cat"])), check_trace=False)
    archive.half().save(tmp_path / "ViT.pt")
    weights = torch.load(mini_clip() / "mini.pt", weights_only=True)
    torch.save({name: value.half().float() for name, value in weights.items()}, tmp_path / "rounded.pt")
    expected = features(mini_clip() / "mini.json", tmp_path / "rounded.pt")
    assert equal(features(mini_clip() / "mini.json", tmp_path / "ViT.pt"), expected)
    plain = write_config(tmp_path / "plain.json", quick_gelu=False)
    assert equal(features(plain, tmp_path / "ViT.pt"), expected)
    assert not equal(features(plain, tmp_path / "rounded.pt"), expected)


def test_activation_of_a_configuration_is_used(tmp_path):
    gelu = write_config(tmp_path / "gelu.json", quick_gelu=False)
    quick, exact = (features(model, mini_clip() / "mini.pt") for model in (mini_clip() / "mini.json", gelu))
    assert not torch.equal(quick[0], exact[0]) and not torch.equal(quick[1], exact[1])


def random_weights(config, folder):
    """The configuration as a model with random weights; the file that holds them."""
    open_clip.add_model_config(config)
    model = open_clip.create_model(config.stem)
    torch.save(model.state_dict(), folder / f"{config.stem}.pt")
    return folder / f"{config.stem}.pt"


VISION, WORDS = MINI_CONFIG["vision_cfg"], MINI_CONFIG["text_cfg"]


@pytest.mark.parametrize(
    "changes",
    [
        dict(vision_cfg=dict(image_size=32, width=8, layers=[1, 1, 1, 1])),  # a ResNet
        dict(custom_text=True),  # as SigLIP: a text tower of its own
        dict(text_cfg=WORDS | dict(no_causal_mask=True)),
        dict(text_cfg=WORDS | dict(pool_type="last")),  # computed, but differently
        dict(vision_cfg=VISION | dict(pool_type="avg")),
        dict(vision_cfg=VISION | dict(attentional_pool=True, attn_pooler_heads=2)),
    ],
)
def test_unsupported_architectures(tmp_path, changes):
    config = write_config(tmp_path / "other.json", **changes)
    weights = random_weights(config, tmp_path)
    message = complaint(METHOD, tmp_path / "out", *with_model(config, weights))
    assert "--model" in message and "ViT" in message and "other" in message


def test_supported_variants_of_the_architecture(tmp_path):
    """Other sizes of image and embedding, a linear text projection: all that a prompt does not see."""
    config = write_config(
        tmp_path / "wide.json", embed_dim=20, vision_cfg=VISION | dict(image_size=24, layers=2),
        text_cfg=WORDS | dict(proj_bias=True, context_length=30))
    folder = train(tmp_path / "out", *with_model(config, random_weights(config, tmp_path)))
    assert checkpoint(folder)["visual"].shape == (4, 1, 5, 32) and len(rows(folder)) == 2


def test_models_that_do_not_exist_or_cannot_be_read(tmp_path):
    out, weights = tmp_path / "out", mini_clip() / "mini.pt"
    message = complaint(METHOD, out, *with_model("ViT-B-32-quikgelu", weights))
    assert "--model ViT-B-32-quikgelu" in message and "did you mean ViT-B-32-quickgelu?" in message
    assert "--model nonsense" in complaint(METHOD, out, *with_model("nonsense", weights))
    message = complaint(METHOD, out, *with_model(tmp_path / "none.json", weights))
    assert "--model" in message and "none.json" in message
    for content in ("{", "[]", "{}", "5", '"text"', "null", '{"embed_dim": 24}', "\x00"):
        (tmp_path / "odd.json").write_text(content)
        message = complaint(METHOD, out, *with_model(tmp_path / "odd.json", weights))
        assert "--model" in message and "odd.json" in message, content
    (tmp_path / "folder.json").mkdir()
    assert "folder.json" in complaint(METHOD, out, *with_model(tmp_path / "folder.json", weights))


def test_weights_that_do_not_exist_or_do_not_fit(tmp_path):
    out, model, good = tmp_path / "out", mini_clip() / "mini.json", mini_clip() / "mini.pt"
    message = complaint(METHOD, out, *with_model(model, tmp_path / "none.pt"))
    assert "--pretrained" in message and "none.pt" in message
    message = complaint(METHOD, out, *with_model("ViT-B-32-quickgelu", "laion2b"))
    assert "--pretrained laion2b" in message and "openai" in message and "metaclip_400m" in message  # its tags
    assert "--pretrained" in complaint(METHOD, out, *with_model(model, tmp_path))  # a folder
    content = good.read_bytes()
    other = random_weights(write_config(tmp_path / "deep.json", vision_cfg=VISION | dict(layers=4)), tmp_path)
    narrow = random_weights(write_config(tmp_path / "narrow.json", embed_dim=20), tmp_path)
    files = {
        "truncated.pt": content[:-1000], "empty.pt": b"", "text.pt": b"no weights", "half.safetensors": content[:99]}
    files["directory.pt"] = content[:-1500] + bytes(1000) + content[-500:]  # a damaged table of contents
    for name, damaged in files.items():
        (tmp_path / name).write_bytes(damaged)
    torch.save({"state_dict": {}}, tmp_path / "nothing.pt")
    torch.save([1, 2, 3], tmp_path / "list.pt")
    for name in (*files, "nothing.pt", "list.pt", other.name, narrow.name):
        message = complaint(METHOD, out, *with_model(model, tmp_path / name))
        assert "--pretrained" in message and name in message, name


def test_model_without_weights_and_weights_without_model(tmp_path):
    short = SHORT[: SHORT.index("--model")]
    for flags, words in (
        (["--model", "ViT-B-32-quickgelu"], ["--model ViT-B-32-quickgelu", "--pretrained"]),
        (["--model", "ViT-B-32", "--pretrained", "openai"], ["--pretrained openai", "--model", "ViT-B-32-quickgelu"]),
        (["--model", "ViT-B-32-quickgelu", "--pretrained", "laion2b_s34b_b79k"], ["laion2b_s34b_b79k", "--model"]),
        (["--pretrained", str(mini_clip() / "mini.pt")], ["--model", "--pretrained"]),
    ):
        with pytest.raises(common.UserError) as caught:
            fedcopl.main([*short, *flags, "--out-dir", str(tmp_path)])
        message = str(caught.value)
        assert all(word in message for word in words) and "\n" not in message and len(message) < 600, message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError("no route to host"), RuntimeError("a\nlong\nanswer"), ValueError("offline")])
def test_tag_without_a_network_names_two_ways_out(tmp_path, monkeypatch, caplog, error):
    def offline(*_, **__):
        logging.getLogger("huggingface_hub").warning("Retrying in 8s")
        logging.error("Failed to download weights")
        raise error

    asked = []
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *a, **k: asked.append(a) or offline())
    real = open_clip.get_model_config("ViT-B-32-quickgelu")
    small = real | {key: MINI_CONFIG[key] for key in ("embed_dim", "vision_cfg", "text_cfg")}
    open_clip.factory._MODEL_CONFIGS["ViT-B-32-quickgelu"] = small  # the same name, made in no time
    message = complaint(METHOD, tmp_path, *with_model("ViT-B-32-quickgelu", "openai"))
    assert not caplog.records and not logging.root.manager.disable  # the hub's own lines are left out, then not more
    assert asked and "--pretrained openai" in message and "cache" in message and "--pretrained FILE" in message
    assert str(error).split("\n")[0] in message


def test_resume_refuses_other_weights_in_the_same_file(tmp_path):
    weights = tmp_path / "weights.pt"
    state = torch.load(mini_clip() / "mini.pt", weights_only=True)
    torch.save(state, weights)
    flags = with_model(mini_clip() / "mini.json", weights)
    train(tmp_path / "out", *flags)
    state["visual.proj"] = state["visual.proj"] + 1e-3
    torch.save(state, weights)
    message = complaint(METHOD, tmp_path / "out", *flags, "--run-name", "run", "--resume", "--rounds", 3)
    assert "model_fingerprint" in message


def test_resume_refuses_another_architecture_or_other_names_around_the_same_numbers(tmp_path):
    config = write_config(tmp_path / "model.json")
    flags = with_model(config, mini_clip() / "mini.pt")
    train(tmp_path / "out", *flags)
    write_config(config, quick_gelu=not MINI_CONFIG["quick_gelu"])
    message = complaint(METHOD, tmp_path / "out", *flags, "--run-name", "run", "--resume", "--rounds", 3)
    assert "model_fingerprint" in message
    write_tree(tmp_path / "data", ["cat", "cow", "dog"])
    flags = ["--dataset", "folder", "--data-dir", tmp_path / "data", "--train-subset", 24]
    train(tmp_path / "out", *flags, name="names")
    for split in ("train", "test"):
        (tmp_path / "data" / split / "dog").rename(tmp_path / "data" / split / "zebra")
    message = complaint(METHOD, tmp_path / "out", *flags, "--run-name", "names", "--resume", "--rounds", 3)
    assert "classes" in message and "zebra" in message


def test_moved_weights_are_the_same_weights(tmp_path):
    train(tmp_path / "out")
    for name in ("mini.json", "mini.pt"):
        shutil.copy(mini_clip() / name, tmp_path / name)
    moved = with_model(tmp_path / "mini.json", tmp_path / "mini.pt")
    assert len(rows(train(tmp_path / "out", *moved, "--resume", "--rounds", 3))) == 3


@pytest.mark.filterwarnings("ignore")  # of torch about TorchScript
def test_weights_file_is_never_unpickled(tmp_path):
    """Neither a pickle that runs code nor one that claims to be TorchScript by an entry of its zip file."""

    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"visual.proj": Payload()}, tmp_path / "evil.pt")
    shutil.copy(tmp_path / "evil.pt", tmp_path / "worse.pt")
    for entry in ("evil/code/x", "evil/constants.pkl"):
        with zipfile.ZipFile(tmp_path / "worse.pt", "a") as archive:
            archive.writestr(entry, b"")
        for name in ("evil.pt", "worse.pt"):
            message = complaint(METHOD, tmp_path / "out", *with_model(mini_clip() / "mini.json", tmp_path / name))
            assert name in message and not (tmp_path / "executed").exists()


def test_miniature_of_a_data_set_leaves_out_what_it_has_seen():
    def parsed(*flags):
        args = fedcopl.parse_args(list(flags))
        return args.model, args.pretrained, args.skip_share, args.run_name

    assert parsed() == ("tiny", "glyphs", 0, "fedcopl_digits_b0.1_s1")
    assert parsed("--dataset", "cifar10", "--model", "tiny")[:3] == ("tiny", "cifar10", fedcopl.TINY_SHARE)
    assert parsed("--dataset", "cifar10", "--model", "tiny", "--skip-share", "0.5")[2] == 0.5
    assert parsed("--dataset", "cifar10", "--model", "tiny", "--pretrained", "glyphs")[1:3] == ("glyphs", 0)
    vit = parsed("--dataset", "dtd", "--model", "ViT-B-16-quickgelu", "--partition", "quantity")
    name = "fedcopl_dtd_b0.1_s1_model-ViT-B-16-quickgelu_partition-quantity"
    assert vit == ("ViT-B-16-quickgelu", "openai", 0, name)


def test_prompts_beyond_the_context_are_refused_before_any_image_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "cache_images", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(common, "load_dataset", lambda *_, **__: pytest.fail("loaded"))
    assert "--text-prompts 75" in complaint(METHOD, tmp_path, "--text-prompts", 75)


def test_class_name_too_long_for_the_context(tmp_path):
    long = "a very long name of a bird " + " ".join("qzxj" * 25)
    write_tree(tmp_path / "data", ["cat", long, "dog"])
    flags = ["--dataset", "folder", "--data-dir", tmp_path / "data", "--train-subset", 24]
    message = complaint(METHOD, tmp_path / "out", *flags)
    tokens = len(open_clip.get_tokenizer("ViT-B-32").encode(f"a photo of a {long}")) + 2
    assert "a very long name" in message and f"{tokens} tokens" in message and "77" in message
    write_tree(tmp_path / "more", ["cat", " ".join("z" * 60), "dog"])
    message = complaint(METHOD, tmp_path / "out", *flags, "--data-dir", tmp_path / "more")  # the prompts take 16
    assert "z z z" in message and "63 tokens" in message and "16 prompts" in message
    train(tmp_path / "out", *flags, "--data-dir", tmp_path / "more", "--text-prompts", 14)


@pytest.mark.parametrize("template", ["{} {name}", "a {} {0}", "a {} {", "a } {}", "{{}}", "100 % {}"])
def test_braces_in_a_template(tmp_path, template):
    """Only one {} is a place; all else is read as it is, or refused."""
    try:
        train(tmp_path, "--template", template, "--rounds", 1)
    except common.UserError as error:
        assert "--template" in str(error)


# ---- the default run ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_default_run_ends_above_zero_shot_within_six_minutes(tmp_path_factory, seed):
    """The first seed also makes the miniature CLIP."""
    folder = tmp_path_factory.getbasetemp() / "default"
    folder.mkdir(exist_ok=True)
    start = time.time()
    done = Program(ROOT / "fedcopl.py", "--seed", seed, "--run-name", f"run{seed}", cwd=folder).wait(600)
    assert done.returncode == 0, done.stderr
    assert time.time() - start < 360
    summary = json.loads((folder / "runs" / f"run{seed}" / "summary.json").read_text())
    assert 55 < summary["zeroshot_client_mean_pct"] < 80
    assert summary["zeroshot_client_mean_pct"] + 4 <= summary["final_acc_pct"] <= 90
