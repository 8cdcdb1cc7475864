"""pFedPrompt's memory against slow references, its place in a round, and its identities with PromptFL."""

import math
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scripts import checkpoint, equal, rows
from scripts import method as find_method

import common
from baselines import pfedprompt

NAME = "baselines/pfedprompt.py"
METHOD = find_method(NAME)
train = METHOD.train
PROMPTFL = find_method("baselines/promptfl.py")  # with the same short settings
CLIENTS, CLASSES = 4, 10  # of the short settings

LOADERS = [(module, lru_cache(module.load_clip)) for module in (METHOD.module, PROMPTFL.module)]


@pytest.fixture(autouse=True)
def one_model(monkeypatch):
    """The miniature CLIP, which nothing changes, is read once and not by each run."""
    for module, load_once in LOADERS:
        monkeypatch.setattr(module, "load_clip", load_once)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def unit(seed, n, width=6, dtype=torch.float64):
    return torch.nn.functional.normalize(torch.randn(n, width, generator=seeded(seed), dtype=dtype), dim=1)


def random_sets(seed, n, classes):
    """Candidate sets, none of them empty."""
    draw = seeded(seed)
    sets = torch.rand(n, classes, generator=draw) < 0.3
    sets[torch.arange(n), torch.randint(0, classes, (n,), generator=draw)] = True
    return sets


# ---- what a memory answers ----------------------------------------------------------------------------------------


def slow_logits(features, keys, values, weight, sharpness):
    """alpha exp(-beta (1 - f F^T)) V, number by number, in double."""
    features, keys, values = (part.double().tolist() for part in (features, keys, values))
    result = [[0.0] * len(values[0]) if values else [] for _ in features]
    for row, f in zip(result, features):
        for key, value in zip(keys, values):
            affinity = math.exp(-sharpness * (1 - sum(a * b for a, b in zip(f, key))))
            for c, v in enumerate(value):
                row[c] += weight * affinity * v
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("weight, sharpness", [(1, 5.5), (0.3, 0), (7, 40)])
@pytest.mark.parametrize("kind", ["one-hot", "sets"])
def test_memory_logits_against_a_slow_loop(weight, sharpness, kind):
    keys, features = unit(0, 15), torch.cat([unit(1, 7), unit(0, 15)[:2]])  # the last two are in the memory
    sets = random_sets(2, 15, 4) if kind == "sets" else torch.eye(4, dtype=torch.bool)[torch.arange(15) % 4]
    values = sets.double() / sets.sum(1, keepdim=True)
    logits = pfedprompt.memory_logits(features, pfedprompt.Memory(keys, values), weight, sharpness)
    expected = slow_logits(features, keys, values, weight, sharpness)
    torch.testing.assert_close(logits, expected, atol=1e-12, rtol=1e-12)
    assert (logits >= 0).all() and (logits <= weight * sets.sum(0) + 1e-12).all()
    assert (logits.sum(1) <= weight * 15 + 1e-12).all()
    if sharpness == 0:
        torch.testing.assert_close(logits, weight * values.sum(0).expand(9, 4))


def test_an_image_finds_itself_with_affinity_one():
    keys = torch.eye(5)
    memory = pfedprompt.Memory(keys, torch.eye(3)[[0, 0, 1, 1, 2]])
    logits = pfedprompt.memory_logits(keys, memory, 2.0, 50.0)  # all others are orthogonal
    torch.testing.assert_close(logits, 2 * memory.values)
    assert (pfedprompt.memory_logits(-keys, memory, 2.0, 1.0)[0] - 2 * math.exp(-1)).abs()[2] < 1e-6


def test_rounding_lifts_no_affinity_above_one():
    """Features of length 1 in float32 have products above 1; at full sharpness they must not explode."""
    features = unit(3, 2000, 512, torch.float32)
    assert ((features * features).sum(1) > 1).any()
    memory = pfedprompt.Memory(features, torch.ones(2000, 1))
    for sharpness in (5.5, 1e6):
        own = [
            pfedprompt.memory_logits(f[None], pfedprompt.Memory(f[None], torch.ones(1, 1)), 1.0, sharpness)
            for f in features[:300]
        ]
        assert max(own) <= 1
    logits = pfedprompt.memory_logits(features, memory, 1e6, 1e6)
    assert logits.isfinite().all() and (logits <= 1e6 * 2000).all()


def test_empty_memory_and_no_image():
    args = SimpleNamespace(memory_weight=1.0, memory_sharpness=5.5)
    features, words = unit(0, 4, 6, torch.float32), unit(1, 3, 6, torch.float32)
    clip = SimpleNamespace(scale=torch.tensor(100.0))
    empty, memory = (pfedprompt.Memory(unit(2, n, 6, torch.float32), torch.eye(3)[torch.arange(n)]) for n in (0, 3))
    plain = pfedprompt.predict(args, clip, features, words)
    assert torch.equal(plain, PROMPTFL.module.predict(clip, features, words))
    assert torch.equal(plain, pfedprompt.predict(args, clip, features, words, empty))
    assert pfedprompt.predict(args, clip, features[:0], words, memory).shape == (0, 3)
    asked = pfedprompt.predict(args, clip, features, words.requires_grad_(), memory)
    assert not asked.requires_grad
    logits = 100 * features.double() @ words.detach().double().T + slow_logits(features, *memory, 1, 5.5)
    torch.testing.assert_close(asked.double(), logits.softmax(1), atol=1e-5, rtol=1e-5)
    args.memory_weight = 0.0
    assert torch.equal(plain, pfedprompt.predict(args, clip, features, words, memory))


# ---- what is in a memory ------------------------------------------------------------------------------------------


def federation(sizes, classes=5, ties=False):
    """Clients of these sizes: data, Labels with random sets, and the probabilities of a labelling pass."""
    total, rng = sum(sizes), np.random.default_rng(0)
    train = np.split(rng.permutation(total), np.cumsum(sizes)[:-1])
    data = SimpleNamespace(features=unit(0, total, 6, torch.float32), labels=torch.zeros(total), train=train)
    prob = torch.randn(total, classes, generator=seeded(1)).softmax(1)
    if ties:
        prob = (4 * prob).round() / 4
    sets = random_sets(2, total, classes)
    chosen = torch.where(torch.arange(total) % 4 > 0, (prob * sets).argmax(1), -1)  # one in four is not selected
    chosen[~sets[torch.arange(total), chosen.clamp(min=0)]] = -1
    sets[chosen < 0] = False
    return data, pfedprompt.Labels(chosen, sets), [prob[torch.from_numpy(own)] for own in train]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shots", [0, 1, 3, 1000])
def test_memory_has_the_most_confident_selected_images_of_each_class(shots, ties):
    data, labels, probs = federation((0, 1, 30, 80), ties=ties)
    args = SimpleNamespace(clients=4, memory_shots=shots, device="cpu", amp=None)
    in_memory = pfedprompt.memorise(args, common.Ranks(args), probs, labels, data)
    expected = set()
    for own, prob in zip(data.train, probs):
        for c in range(5):
            of_class = [(-prob[i, c].item(), i) for i, image in enumerate(own) if labels.pseudo_label[image] == c]
            expected |= {int(own[i]) for _, i in sorted(of_class)[:shots]}
    assert in_memory.dtype == torch.bool and set(in_memory.nonzero()[:, 0].tolist()) == expected
    if shots == 1000:
        assert torch.equal(in_memory, labels.pseudo_label >= 0)
    assert shots == 0 or 0 < len(expected) <= 4 * 5 * shots


def test_keys_are_features_and_values_candidates_in_equal_parts():
    data, labels, probs = federation((0, 1, 30, 80))
    args = SimpleNamespace(clients=4, memory_shots=2, device="cpu", amp=None)
    in_memory = pfedprompt.memorise(args, common.Ranks(args), probs, labels, data)
    sizes = set()
    for client, own in enumerate(data.train):
        memory = pfedprompt.memory_of(client, data, labels, in_memory)
        inside = [int(image) for image in own if in_memory[image]]
        assert memory.keys.shape == (len(inside), 6) and memory.values.shape == (len(inside), 5)
        for key, value, image in zip(*memory, inside):
            candidates = labels.candidate[image].nonzero()[:, 0].tolist()
            sizes.add(len(candidates))
            assert torch.equal(key, data.features[image])
            assert value.tolist() == pytest.approx([(c in candidates) / len(candidates) for c in range(5)])
    assert {1, 2} <= sizes
    assert len(pfedprompt.memory_of(0, data, labels, in_memory).keys) == 0


# ---- identities with PromptFL -------------------------------------------------------------------------------------


def same_but_for_the_memory(ours, theirs):
    a, b = checkpoint(ours), checkpoint(theirs)
    del a["in_memory"]
    without = [{key: value for key, value in row.items() if key != "memory"} for row in rows(ours)]
    tables = [(folder / "pseudo_labels.csv").read_text() for folder in (ours, theirs)]
    return without == rows(theirs) and tables[0] == tables[1] and equal(a, b)


@pytest.mark.parametrize("kind", ["cpl", "copl", "fpl"])
def test_without_a_memory_it_is_promptfl_bit_by_bit(tmp_path, kind):
    flags = ["--pseudo-labels", kind, "--refresh", 1]
    parent = PROMPTFL.train(tmp_path, *flags, name="parent")
    weightless = train(tmp_path, *flags, "--memory-weight", 0, name="weightless")
    assert same_but_for_the_memory(weightless, parent) and int(rows(weightless)[-1]["memory"]) > 0
    if kind == "cpl":
        empty = train(tmp_path, *flags, "--memory-shots", 0, name="empty")
        assert same_but_for_the_memory(empty, parent) and {row["memory"] for row in rows(empty)} == {"0"}
    asked = train(tmp_path, *flags, "--memory-weight", 20, name="asked")
    assert not same_but_for_the_memory(asked, parent)
    same_labels = torch.equal(checkpoint(asked)["pseudo_label"], checkpoint(parent)["pseudo_label"])
    assert same_labels == (kind == "fpl")  # zero-shot CLIP labels, and has no memory


def test_default_labels_and_help(tmp_path, capsys):
    args = pfedprompt.parse_args([])
    assert (args.pseudo_labels, args.memory_shots, args.memory_weight, args.memory_sharpness) == ("cpl", 16, 1, 5.5)
    assert args.run_name == "pfedprompt_digits_b0.1_s1"
    with pytest.raises(SystemExit):
        pfedprompt.main(["--help"])
    assert "pFedPrompt, a reconstruction" in " ".join(capsys.readouterr().out.split())


# ---- the memory's place in a round --------------------------------------------------------------------------------


def test_memory_takes_no_part_in_training(tmp_path):
    """Until the next labelling, prompts do not depend on it; what the clients answer does."""
    runs = [train(tmp_path, "--memory-weight", weight, name=f"w{weight}") for weight in (0, 50)]
    a, b = map(checkpoint, runs)
    assert all(torch.equal(a[name], b[name]) for name in ("text", "pseudo_label", "candidate", "in_memory"))
    for first, second in zip(*map(rows, runs)):
        assert first["loss_unsup"] == second["loss_unsup"] and first["bytes_up"] == second["bytes_up"]
        assert first["test_acc_pct"] != second["test_acc_pct"]


def watched(monkeypatch, name):
    """A list that gets (arguments, result) of each call of a function of the script."""
    honest, seen = getattr(pfedprompt, name), []

    def call(*given):
        result = honest(*given)
        seen.append((given, result))
        return result

    monkeypatch.setattr(pfedprompt, name, call)
    return seen


def slow_prob(clip, features, words, data, labels, in_memory, client, weight, sharpness):
    inside = [int(image) for image in data.train[client] if in_memory[image]]
    values = labels.candidate[inside].double()
    values = values / values.sum(1, keepdim=True)
    memory = slow_logits(features, data.features[inside], values, weight, sharpness) if inside else 0
    return (clip.scale.double() * features.double() @ words.double().T + memory).softmax(1)


def test_labels_come_from_the_global_prompt_and_the_own_memory(tmp_path, monkeypatch):
    """First labels: zero-shot CLIP's. Second ones and the last accuracy: from a checkpoint, by the slow formula."""
    clips, encoded, asked = (watched(monkeypatch, name) for name in ("load_clip", "encode_data", "label_images"))
    flags = ["--memory-weight", 3, "--memory-sharpness", 2, "--memory-shots", 3]
    folder = train(tmp_path, *flags)
    end = checkpoint(folder)
    train(tmp_path, *flags, "--rounds", 3, "--resume")
    clip, data = clips[-1][1][0], encoded[-1][1]
    text = clip.text_input([f"{c}." for c in range(CLASSES)], 16)
    zero_shot = clip.encode_text(clip.text_input([f"a photo of a {c}" for c in range(CLASSES)], 0))
    (_, first, *_), (_, second, *_) = ((given[0], given[4]) for given, _ in asked)
    words = clip.encode_text(text, end["text"][0])
    labels = pfedprompt.Labels(end["pseudo_label"], end["candidate"])
    for client, own in enumerate(data.train):
        features = data.features[own]
        plain = (clip.scale * features @ zero_shot.T).softmax(1)
        torch.testing.assert_close(first[client], plain, atol=1e-6, rtol=1e-5)
        expected = slow_prob(clip, features, words, data, labels, end["in_memory"], client, 3, 2)
        torch.testing.assert_close(second[client].double(), expected, atol=1e-5, rtol=1e-4)
        assert (second[client] - (clip.scale * features @ words.T).softmax(1)).abs().max() > 1e-2

    end = checkpoint(folder)
    words = clip.encode_text(text, end["text"][0])
    labels = pfedprompt.Labels(end["pseudo_label"], end["candidate"])
    right = []
    for client, own in enumerate(data.test):
        prob = slow_prob(clip, data.test_features[own], words, data, labels, end["in_memory"], client, 3, 2)
        right.append((prob.argmax(1) == data.test_labels[own]).double().mean().item())
    assert float(rows(folder)[-1]["client_acc_mean_pct"]) == pytest.approx(100 * np.mean(right), rel=1e-5)


def test_memory_is_made_at_a_refresh_alone(tmp_path, monkeypatch):
    made, states = watched(monkeypatch, "memorise"), []
    for rounds in (1, 2, 3):  # --refresh 2
        folder = train(tmp_path, "--rounds", rounds, *(["--resume"] if rounds > 1 else []), "--memory-shots", 2)
        states.append(checkpoint(folder)["in_memory"])
        assert len(made) == (rounds + 1) // 2
    assert torch.equal(states[0], states[1]) and not torch.equal(states[1], states[2])
    assert [int(row["memory"]) for row in rows(folder)] == [int(state.sum()) for state in states]


@pytest.mark.parametrize("flags, limit", [("", None), ("--memory-shots 2", 2)])
def test_memory_shots_limit_each_class_of_a_client(tmp_path, flags, limit):
    state = checkpoint(train(tmp_path, *flags.split(), "--rounds", 1))
    chosen, in_memory = state["pseudo_label"], state["in_memory"]
    assert not in_memory[chosen < 0].any() and in_memory.shape == (200,)
    if limit is None:  # as many as a labelling with the default --shots selects
        assert torch.equal(in_memory, chosen >= 0)
    else:
        assert 0 < torch.bincount(chosen[in_memory]).max() <= limit * CLIENTS
        assert in_memory.sum() < (chosen >= 0).sum()


# ---- secrecy, odd clients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        "--partition quantity --clients 12 --refresh 1",  # two clients own nothing
        "--memory-weight 1e6 --memory-sharpness 1e6 --refresh 1",
        "--pseudo-labels copl --conf-quantile 1 --unseen-classes none --refresh 1",  # nothing is selected
        "--amp --text-prompts 0 --intra-quantile 1 --inter-quantile 0",
    ],
)
def test_odd_settings_stay_finite(tmp_path, flags):
    folder = train(tmp_path, *flags.split())
    assert checkpoint(folder)["text"].isfinite().all()
    for row in rows(folder):
        assert not {"nan", "inf", "-inf"} & set(row.values()) and float(row["test_acc_pct"]) >= 0
        assert int(row["memory"]) <= int(row["selected"]) and (row["memory"] == "0") == (row["selected"] == "0")
    if "--conf-quantile 1" in flags:
        assert row["memory"] == "0" and row["loss_unsup"] == "" and row["clients_empty"] == str(CLIENTS)
