"""Every script that trains prompts without labels: label secrecy, odd clients, isolation of clients, costs, flags."""

import numpy as np
import pytest
import torch
from scripts import UNSUPERVISED, checkpoint, equal, labels_table, rows
from scripts import method as find_method
from test_semi_supervised import check, is_finite, leaves, spy

import common

KINDS = {  # of pseudo-labels, with settings under which each selects some images and not all
    "copl": ["--pseudo-labels", "copl"],
    "fpl": ["--pseudo-labels", "fpl", "--shots", 3],
    "ifpl": ["--pseudo-labels", "ifpl", "--shots", "grow"],
    "cpl": ["--pseudo-labels", "cpl", "--shots", 3, "--intra-quantile", 0.6, "--inter-quantile", 0.6],
}
SIZES = [0, 1, 2, 3, 7, 8, 9, 170]


@pytest.fixture(params=UNSUPERVISED)
def method(request):
    return find_method(request.param)


def prompts(folder, method):
    saved = checkpoint(folder)
    return {name: saved[name] for name in method.module.Prompts._fields}


OF_THE_TRUTH = {
    "test_acc_pct", "client_acc_mean_pct", "pooled_acc_pct", "pl_acc_pct", "pl_all_acc_pct", "set_recall_pct"}
HIDDEN = {"predicted_correct", "selected_correct", "candidates_correct"}


@pytest.mark.parametrize("kind", KINDS)
def test_true_labels_reach_the_log_alone(method, tmp_path, monkeypatch, kind):
    def scramble(data):
        shuffle = np.random.default_rng(0).permutation
        train_labels, test_labels = (own[shuffle(len(own))] for own in (data.labels, data.test_labels))
        return data._replace(labels=train_labels, test_labels=test_labels)

    flags = [*KINDS[kind], "--rounds", 3]
    plain = method.train(tmp_path, *flags, name="plain")
    honest = method.module.FederatedData
    monkeypatch.setattr(method.module, "FederatedData", lambda *given: scramble(honest(*given)))
    other = method.train(tmp_path, *flags, name="scrambled")
    a, b = checkpoint(plain), checkpoint(other)
    for part in (a, b):
        del part["tables"], part["zero_shot"]  # figures for the log
    assert set(method.module.Prompts._fields) < set(a) and equal(a, b)
    assert 0 < (a["pseudo_label"] >= 0).sum() < 200
    tables = labels_table(plain), labels_table(other)
    assert tables[0].keys() == tables[1].keys()
    for first, second in zip(*(table.values() for table in tables)):
        assert all(first[key] == second[key] for key in first.keys() - HIDDEN)
    for first, second in zip(rows(plain), rows(other), strict=True):
        assert {key for key in first if first[key] != second[key]} <= OF_THE_TRUTH
    for column in OF_THE_TRUTH:
        assert [row[column] for row in rows(plain)] != [row[column] for row in rows(other)]  # the scramble was real


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_exact(method, tmp_path, kind):
    """One prompt both ways; at a refresh 4 bytes up for a number, with copl 4 C each way for counts and capacities."""
    sent = 4 * 2 * 5 * 32 if method.name == "fedcopl.py" else 4 * 16 * 32  # visual: 2 blocks; text; width 32
    for row in rows(method.train(tmp_path, *KINDS[kind], "--rounds", 3)):
        refreshed = row["round"] in "13"
        counts = 4 * 10 * 4 if refreshed and kind == "copl" else 0
        assert int(row["bytes_up"]) == sent * int(row["clients_trained"]) + counts + 4 * 4 * refreshed
        assert int(row["bytes_down"]) == sent * 4 + counts


@pytest.mark.parametrize("kind", KINDS)
def test_clients_of_any_size(method, tmp_path, monkeypatch, kind):
    """Clients with 0, 1, 2, ... images, one without test images; batches that are and are not full."""

    def resized(train_labels, test_labels, *_):
        order, ends = np.random.default_rng(0).permutation(200), np.cumsum(SIZES)
        test = np.array_split(np.arange(len(test_labels)), len(SIZES))
        return np.split(order, ends[:-1]), [own[:0] if client == 3 else own for client, own in enumerate(test)]

    seen = []

    def remember(client_update, args):
        upload = client_update(*args)
        assert is_finite(tuple(upload))
        seen.append((upload.weight.item(), upload.metrics[1].item()))
        return upload

    monkeypatch.setattr(common, "clip_partition", resized)
    spy(monkeypatch, method.module, remember)
    flags = ["--clients", len(SIZES), "--batch-size", 8, *KINDS[kind]]
    folder = method.train(tmp_path, *flags, "--refresh", 1, "--rounds", 2)
    assert len(seen) == 2 * len(SIZES) and all(steps == -(-weight // 8) for weight, steps in seen)
    assert seen[0] == (0, 0) and seen[7][0] > 8
    for number, row in enumerate(rows(folder)):
        of_round = seen[number * len(SIZES) :][: len(SIZES)]
        assert int(row["selected"]) == sum(weight for weight, _ in of_round)
        assert int(row["clients_trained"]) == sum(weight > 0 for weight, _ in of_round)
        assert int(row["clients_trained"]) + int(row["clients_empty"]) == len(SIZES)
    check(folder)


@pytest.mark.parametrize("quantile", ["--conf-quantile", "--entropy-quantile"])
def test_nothing_selected_anywhere_keeps_the_prompts(method, tmp_path, quantile):
    """No image is more confident than the most confident one: nobody counts any, so no class has a capacity."""
    flags = ["--pseudo-labels", "copl", quantile, 1, "--unseen-classes", "none"]
    one, two = (method.train(tmp_path, *flags, "--rounds", n, name=f"{n}") for n in (1, 2))
    assert equal(prompts(one, method), prompts(two, method))
    for row in rows(two):
        assert row["clients_trained"] == row["selected"] == "0"
        assert row["loss_unsup"] == row["pl_acc_pct"] == row["set_size"] == ""
    check(two)


def test_a_local_training_leaves_no_trace(method, tmp_path, monkeypatch):
    """Clients start from what they hold, leave it alone, and give the same whatever was trained before them."""
    kept, pointers = [], set()

    def twice(client_update, args):
        given = [arg for arg in args if type(arg).__name__ in ("Prompts", "Labels", "Text")]
        given = [arg for arg in given if not any(leaf.requires_grad for leaf in leaves(arg))]  # not what is trained
        before = [[leaf.clone() for leaf in leaves(part)] for part in given]
        first, second = client_update(*args), client_update(*args)
        assert len(given) == 3 and equal(before, [leaves(part) for part in given])
        assert equal(tuple(first), tuple(second))
        for leaf in leaves(tuple(first)):
            assert leaf.data_ptr() not in pointers
            pointers.add(leaf.data_ptr())
        kept.append(first)  # so that no address is used again
        return first

    plain = method.train(tmp_path, "--rounds", 1, name="plain")
    spy(monkeypatch, method.module, twice)
    spied = method.train(tmp_path, "--rounds", 1, name="spied")
    assert len(kept) == 4 and equal(checkpoint(spied), checkpoint(plain))
    assert not equal(tuple(kept[0]), tuple(kept[1]))  # clients differ


def test_without_a_step_size_nothing_moves(method, tmp_path):
    still = ["--lr", 0] + (["--visual-lr", 0] if method.name == "fedcopl.py" else [])
    once, twice = (method.train(tmp_path, *still, "--rounds", n, name=f"{n}") for n in (1, 2))
    for name, value in prompts(twice, method).items():  # an average of equal prompts is rounded
        torch.testing.assert_close(value, prompts(once, method)[name], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(value, value[:1].expand_as(value), rtol=1e-6, atol=1e-8)
        assert value[0].std() == pytest.approx(0.02, rel=0.2)
    table = rows(twice)
    assert table[0]["test_acc_pct"] == table[1]["test_acc_pct"] and float(table[0]["loss_unsup"]) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_first_labels_are_those_of_zero_shot_clip_in_every_script(tmp_path, kind):
    """Whatever the method and the seed. fpl keeps them; the others ask the trained model from then on."""
    tables, images = [], []
    for seed, name in enumerate(UNSUPERVISED, 1):
        method = find_method(name)
        folder = method.train(tmp_path, *KINDS[kind], "--seed", seed, "--rounds", 1, name=f"run{seed}")
        tables.append(labels_table(folder))
        images.append(checkpoint(folder)["candidate"])
    assert len(tables) > 1 and all(table == tables[0] for table in tables)
    assert all(torch.equal(each, images[0]) for each in images)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_a_later_refresh(method, tmp_path, kind):
    table = labels_table(method.train(tmp_path, *KINDS[kind], "--refresh", 1, "--lr", 1))
    first, second = ([row for (when, _), row in table.items() if when == rnd] for rnd in (1, 2))
    assert len(first) == len(second) == 10 and (first == second) == (kind == "fpl")


# ---- flags --------------------------------------------------------------------------------------------------------

CPL = "--pseudo-labels cpl --shots 3"
COPL = "--pseudo-labels copl --train-subset 1000 --rounds 1"
FEW = f"{COPL} --conf-quantile 0.98"  # so few images pass that some class has none
FLAGS = [  # each pair of settings has to give different runs; one alone is compared with the short settings
    "--seed 2",
    "--split-seed 1",
    "--amp",
    "--train-subset 150",
    "--skip-share 0.3",
    "--template drawing:{}",
    "--text-prompts 3",
    "--prompt-std 0.1",
    "--beta 1",
    "--partition iid",
    "--partition quantity --shuffle-classes | --partition quantity",
    "--clients 3",
    "--local-epochs 2",
    "--batch-size 8",
    "--lr 0.05",
    "--momentum 0",
    "--weight-decay 0",
    "--refresh 1",
    "--pseudo-labels fpl --shots 3 | --pseudo-labels fpl --shots grow",
    "--pseudo-labels ifpl --shots 3 --refresh 1 | --pseudo-labels fpl --shots 3 --refresh 1",
    f"{CPL} | --pseudo-labels fpl --shots 3",
    f"{CPL} --intra-quantile 0.1 | {CPL} --intra-quantile 1 --inter-quantile 0.1",
    f"{CPL} --inter-quantile 0.1 | {CPL} --inter-quantile 0.9",
    f"{COPL} --no-conf-filter | {COPL}",
    f"{COPL} --no-entropy-filter | {COPL}",
    f"{COPL} --conf-quantile 0.9 | {COPL}",
    f"{COPL} --entropy-quantile 0.9 | {COPL}",
    f"{COPL} --no-allocation | {COPL}",
    f"{COPL} --budget exact | {COPL}",
    f"{FEW} --unseen-classes none | {FEW}",
]
OWN_FLAGS = {
    "baselines/pfedprompt.py": ["--memory-shots 1", "--memory-weight 3", "--memory-sharpness 1"],
    "baselines/fedotp.py": ["--ot sinkhorn", "--ot-mass 0.5", "--ot-eps 0.3", "--ot-iterations 1", "--ot-tolerance 1"],
    "fedcopl.py": [
        "--aggregate text", "--visual-lr 0.05", "--visual-prompts 3", "--prompt-depth 1", "--shared-momentum"],
}
NOT_TRIED = {"device", "out_dir", "run_name", "resume", "dataset", "data_dir", "rounds"}
NOT_TRIED |= {"model", "pretrained", "cache_gb", "ceiling"}  # change nothing here, see tests of their own


@pytest.mark.slow
def test_every_flag_is_read(method, tmp_path):
    done = {}

    def run(flags):
        if flags not in done:
            folder = method.train(tmp_path, *flags.split(), name=f"run{len(done)}")
            done[flags] = rows(folder), checkpoint(folder)
        return done[flags]

    same, lines = [], FLAGS + OWN_FLAGS.get(method.name, [])
    for flags in lines:
        one, _, other = flags.partition("|")
        if equal(run(one.strip()), run(other.strip())):
            same.append(flags)
    assert same == []
    known = vars(method.module.parse_args(method.short)).keys() - NOT_TRIED
    tried = {word[2:].replace("-", "_") for flags in lines for word in flags.split() if word.startswith("--")}
    assert known <= {word.removeprefix("no_") for word in tried}
