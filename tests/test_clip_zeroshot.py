"""CLIP zero-shot: its figures are those of fedcopl.py and of a plain loop; its files, refusals and text lengths."""

import csv
import json
import os
import shutil
import socket
from functools import lru_cache

import numpy as np
import open_clip
import plain_clip
import pytest
import torch
from scripts import ROOT, Method, Program, checkpoint, equal, load, load_images, mini_clip, rows
from scripts import method as find_method
from test_bad_input import complaint, write_tree

import common
import fedcopl
from baselines import clip_zeroshot

CLASSES, CLIENTS, SMALL = 10, 4, "--dataset digits --train-subset 200 --clients 4 --device cpu"


class Zeroshot(Method):
    """The script in the tests' hands. It is in no table of scripts.py: it has one round, in which nothing trains."""

    def __init__(self):
        self.name, self.module = "baselines/clip_zeroshot.py", load("baselines/clip_zeroshot.py")
        model = ["--model", str(mini_clip() / "mini.json"), "--pretrained", str(mini_clip() / "mini.pt")]
        self.short = [*SMALL.split(), *model]


METHOD = Zeroshot()
train = METHOD.train


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """open_clip remembers the model files of a process: forget those of a test."""
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))


open_once = lru_cache(clip_zeroshot.open_model)  # half a second; nothing changes a model
open_prompted_once = lru_cache(fedcopl.load_clip)


@pytest.fixture(autouse=True)
def in_short(monkeypatch):
    """Three of the eighty templates where a test is not about them, and one model for all."""
    few = {**clip_zeroshot.ENSEMBLES, "openai": open_clip.OPENAI_IMAGENET_TEMPLATES[:3]}
    monkeypatch.setattr(clip_zeroshot, "ENSEMBLES", few)
    monkeypatch.setattr(clip_zeroshot, "open_model", open_once)
    monkeypatch.setattr(fedcopl, "load_clip", open_prompted_once)


def read(file):
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def summary(folder):
    return json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)


def load_mini():
    clip, tokenizer, side, stats, _ = clip_zeroshot.open_model(*METHOD.short[-3::2])
    return clip, tokenizer, side, stats


# ---- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--beta", 0.5, "--clients", 3, "--train-subset", 500],
        ["--beta", 0.001, "--clients", 12],  # two clients have no test image
        ["--partition", "quantity", "--shuffle-classes", "--clients", 12, "--split-seed", 3],
        ["--partition", "iid", "--skip-share", 0.3, "--template", "the digit {}."],
    ],
)
def test_figures_are_those_of_fedcopl(tmp_path, flags):
    once = ["--rounds", 1, "--text-prompts", 0, "--visual-prompts", 0, "--batch-size", 1000]
    ours, theirs = train(tmp_path, *flags, name="a"), find_method("fedcopl.py").train(tmp_path, *flags, *once, name="b")
    for key in ("zeroshot_client_mean_pct", "zeroshot_pooled_pct"):
        assert summary(ours)[key] == summary(theirs)[key], key
    assert (ours / "clients.csv").read_text() == (theirs / "clients.csv").read_text()
    facts = [json.loads((folder / "config.json").read_text()) for folder in (ours, theirs)]
    for key in ("model_fingerprint", "classes", "data_source"):
        assert facts[0][key] == facts[1][key]
    (row,) = rows(ours)
    assert row["test_acc_pct"] == row["client_acc_mean_pct"] == f"{summary(ours)['zeroshot_client_mean_pct']:.6g}"
    assert row["pooled_acc_pct"] == f"{summary(ours)['zeroshot_pooled_pct']:.6g}"
    assert (row["bytes_up"], row["bytes_down"]) == ("0", "0")


def test_the_split_goes_by_the_training_images_that_are_left(tmp_path):
    flags = ["--dataset", "digits", "--model", METHOD.short[-3], "--pretrained", METHOD.short[-1], "--clients", "4"]
    clip_zeroshot.main([*flags, "--skip-share", "0.3", "--out-dir", str(tmp_path), "--run-name", "run"])
    data = load_images("digits", "data", 16, clip=True, skip_share=0.3)
    parts = common.clip_partition(data.train_labels, data.test_labels, 4, 0.1)
    for kind, part in zip(("train", "test"), parts):
        assert [row[kind] for row in read(tmp_path / "run" / "clients.csv")] == [str(len(own)) for own in part]


def test_both_recipes_against_a_plain_loop(tmp_path):
    """Towers in the plainest form, unit length before and after the mean, one cosine at a time."""
    folder, (clip, tokenizer, side, stats) = train(tmp_path, "--ensemble", "simple"), load_mini()
    data, names = load_images("digits", "data", side, clip=True), [str(digit) for digit in range(10)]
    few = load_images("digits", "data", side, 200, clip=True)
    owned = common.clip_partition(few.train_labels, data.test_labels, CLIENTS, 0.1)[1]
    recipes = {"": ["a photo of a {}".format], "ensemble_": open_clip.SIMPLE_IMAGENET_TEMPLATES}
    with torch.no_grad():
        image = plain_clip.image_features(clip, common.normalise(data.test_images, *stats))
        for kind, templates in recipes.items():
            words = []
            for name in names:
                unit = plain_clip.template_features(clip, tokenizer, [template(name) for template in templates])
                mean = sum(unit) / len(unit)
                words.append(mean / mean.square().sum().sqrt())
            shares, right = [], 0
            for own in owned:
                hits = 0
                for i in own:
                    cosine = [float(image[i] @ word) for word in words]
                    hits += cosine.index(max(cosine)) == int(data.test_labels[i])
                shares.append(hits / len(own))
                right += hits
            (row,) = rows(folder)
            assert float(row[f"{kind}client_acc_mean_pct"]) == pytest.approx(100 * np.mean(shares), abs=1e-3)
            assert float(row[f"{kind}pooled_acc_pct"]) == pytest.approx(100 * right / 359, abs=1e-3)
            column = [float(client[f"{kind}acc_pct"]) for client in read(folder / "accuracy_by_client.csv")]
            assert column == pytest.approx([100 * share for share in shares], abs=1e-3)
    assert rows(folder)[0]["client_acc_mean_pct"] != rows(folder)[0]["ensemble_client_acc_mean_pct"]


def test_ensembles_are_those_of_open_clip(monkeypatch):
    monkeypatch.undo()
    numbers = {name: len(templates) for name, templates in clip_zeroshot.ENSEMBLES.items()}
    assert numbers == {"openai": 80, "simple": 7, "none": 0}
    ((odd,),) = clip_zeroshot.text_recipes("a {x} {0} {} b", "none").values()
    assert odd("y") == "a {x} {0} y b"  # one place alone is filled in
    recipes = clip_zeroshot.text_recipes("a {} b", "simple")
    assert list(recipes) == ["template 'a {} b'", "ensemble simple, 7 templates"]
    (only,), seven = recipes.values()
    assert only("x") == "a x b" and seven[0]("x") == "itap of a x."
    assert list(clip_zeroshot.text_recipes("{}", "none")) == ["template '{}'"]


def test_without_an_ensemble_its_cells_are_empty(tmp_path):
    alone, both = train(tmp_path, "--ensemble", "none", name="alone"), train(tmp_path, "--ensemble", "simple")
    (a,), (b,) = rows(alone), rows(both)
    assert a["ensemble_client_acc_mean_pct"] == a["ensemble_pooled_acc_pct"] == "" and a.keys() == b.keys()
    assert a == b | {key: "" for key in b if key.startswith("ensemble")}
    for table in ("accuracy_by_client.csv", "accuracy_by_class.csv"):
        assert all(row["ensemble_acc_pct"] == "" != row["acc_pct"] for row in read(alone / table))
        assert all(row["ensemble_acc_pct"] != "" for row in read(both / table))
    assert {"ensemble_client_mean_pct", "ensemble_pooled_pct"} <= summary(both).keys()
    assert not [key for key in summary(alone) if key.startswith("ensemble")]


def test_tables_add_up_and_clients_without_test_images_have_no_accuracy(tmp_path):
    folder = train(tmp_path, "--beta", 0.001, "--clients", 30)
    (row,), clients = rows(folder), read(folder / "accuracy_by_client.csv")
    by_class = read(folder / "accuracy_by_class.csv")
    assert [client["client"] for client in clients] == [str(k) for k in range(30)]
    assert [client["test"] for client in clients] == [client["test"] for client in read(folder / "clients.csv")]
    assert any(client["test"] == "0" for client in clients) and len(by_class) == CLASSES
    for prefix in ("", "ensemble_"):
        column = f"{prefix}acc_pct"
        assert all((client[column] == "") == (client["test"] == "0") for client in clients)
        known = [float(client[column]) for client in clients if client[column]]
        assert float(row[f"{prefix}client_acc_mean_pct"]) == pytest.approx(np.mean(known), abs=1e-3)
        for table in (clients, by_class):
            right = sum(int(part["test"]) * float(part[column] or 0) for part in table)
            assert right / 359 == pytest.approx(float(row[f"{prefix}pooled_acc_pct"]), abs=1e-3)
    assert clip_zeroshot.accuracy_rows("class", ["a", "b"], torch.tensor([[4, 0], [3, 0]])) == [
        {"class": "a", "test": 4, "acc_pct": 75.0, "ensemble_acc_pct": None},
        {"class": "b", "test": 0, "acc_pct": None, "ensemble_acc_pct": None}]


def test_true_labels_reach_the_score_alone(tmp_path, monkeypatch):
    honest_data, honest_answers, answers = clip_zeroshot.prepare_data, clip_zeroshot.predict, []

    def scrambled(*given):
        data, *rest = honest_data(*given)
        test, train_labels = (own[torch.randperm(len(own))] for own in (data.test_labels, data.labels))
        return data._replace(test_labels=test, labels=train_labels), *rest

    def watched(*given):
        answers.append(honest_answers(*given))
        return answers[-1]

    monkeypatch.setattr(clip_zeroshot, "predict", watched)
    plain = train(tmp_path, name="plain")
    monkeypatch.setattr(clip_zeroshot, "prepare_data", scrambled)
    other = train(tmp_path, name="scrambled")
    assert len(answers) == 2 * CLIENTS and equal(answers[:CLIENTS], answers[CLIENTS:])
    assert all(part.shape[0] == 2 and len(part.unique()) > 1 for part in answers)
    (a,), (b,) = rows(plain), rows(other)
    assert {key for key in a if a[key] != b[key]} == {key for key in a if "acc" in key}


# ---- models and texts -----------------------------------------------------------------------------------------------


def test_a_model_that_is_no_vit(tmp_path):
    """A ResNet: fedcopl.py, whose prompts need a ViT, refuses it."""
    config = {"embed_dim": 16, "vision_cfg": {"image_size": 32, "layers": [1] * 4, "width": 4, "head_width": 32}}
    config["text_cfg"] = {"context_length": 20, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1}
    (tmp_path / "rn.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "rn.json")
    torch.manual_seed(0)
    torch.save(open_clip.create_model("rn").state_dict(), tmp_path / "rn.pt")
    flags = ["--model", tmp_path / "rn.json", "--pretrained", tmp_path / "rn.pt"]
    assert 0 < float(rows(train(tmp_path / "out", *flags))[0]["pooled_acc_pct"]) < 100
    assert "ViT" in complaint(find_method("fedcopl.py"), tmp_path / "other", *flags)
    message = complaint(METHOD, tmp_path / "other", *flags, "--template", "a b c d e f g h i j k l m n o p q r {}")
    assert "class '0'" in message and "21 tokens" in message and "holds 20" in message


def test_class_names_with_braces(tmp_path):
    """Nothing in a name is a place to fill in."""
    write_tree(tmp_path / "data", ["{}", "{0} cat", "%s", "{name}"])
    seen = []
    honest = clip_zeroshot.refuse_cut_texts

    def watched(tokenizer, names, recipes):
        seen.extend(template(name) for templates in recipes.values() for template in templates for name in names)
        return honest(tokenizer, names, recipes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip_zeroshot, "refuse_cut_texts", watched)
        flags = ["--dataset", "folder", "--data-dir", tmp_path / "data", "--train-subset", 16, "--clients", 1]
        folder = train(tmp_path, *flags, "--ensemble", "simple")
    names = ["%s", "{0} cat", "{name}", "{}"]
    assert [row["class"] for row in read(folder / "accuracy_by_class.csv")] == names
    assert seen[:4] == [f"a photo of a {name}" for name in names]
    assert seen[4:] == [template(name) for template in open_clip.SIMPLE_IMAGENET_TEMPLATES for name in names]


@pytest.mark.parametrize("extra, fits", [(0, True), (1, False), (400, False), (900, False)])
def test_a_text_that_would_be_cut_is_refused(extra, fits):
    """Start, "a photo of a", the words and the end are 77 tokens, or more."""
    tokenizer, name = open_clip.get_tokenizer("ViT-B-32"), " ".join(["cat"] * (77 - 2 - 4 + extra))
    recipes = clip_zeroshot.text_recipes("a photo of a {}", "none")
    if fits:
        clip_zeroshot.refuse_cut_texts(tokenizer, ["dog", name], recipes)
        return
    with pytest.raises(common.UserError, match="class 'cat cat.* is too long: .* tokens, but .* holds 77") as caught:
        clip_zeroshot.refuse_cut_texts(tokenizer, ["dog", name], recipes)
    assert extra > 400 or f"makes {77 + extra} tokens" in str(caught.value)
    with pytest.raises(common.UserError, match="class 'dog'"):  # a template can be too long for all names
        clip_zeroshot.refuse_cut_texts(
            tokenizer, ["dog"], clip_zeroshot.text_recipes(f"{name} of a photo {{}}", "none"))


class Words:
    """A tokenizer as others have them: no start token, the end token also fills, or a last token at the very end."""

    context_length = 8

    def __init__(self, end, filling, last=None):
        self.end, self.filling, self.last = end, filling, last

    def __call__(self, texts, context_length=None):
        room, lines = context_length or self.context_length, []
        for text in texts:
            special = 1 + (self.last is not None)
            ids = [10 + len(word) for word in text.split()][: room - special] + [self.end]
            ids += [self.filling] * (room - len(ids))
            lines.append(ids[:-1] + [self.last] if self.last is not None else ids)
        return torch.tensor(lines)


@pytest.mark.parametrize("special, tokenizer", [(1, Words(1, 1)), (1, Words(2, 0)), (2, Words(2, 0, last=5))])
def test_cut_texts_are_found_for_other_tokenizers(special, tokenizer):
    recipes, most = clip_zeroshot.text_recipes("{}", "none"), 8 - special
    clip_zeroshot.refuse_cut_texts(tokenizer, ["w", " ".join("w" * most)], recipes)
    with pytest.raises(common.UserError, match="too long"):
        clip_zeroshot.refuse_cut_texts(tokenizer, ["w", " ".join("w" * (most + 1))], recipes)


# ---- what the screen says -------------------------------------------------------------------------------------------


def test_published_figures_stand_beside_the_paper_s_setting_alone():
    assert np.mean(list(clip_zeroshot.PUBLISHED.values())) == pytest.approx(60.19, abs=0.005)  # as in the paper
    usual = {"resize_mode": "shortest", "interpolation": "bicubic"}
    figures = dict(zeroshot_client_mean_pct=43, zeroshot_pooled_pct=44, ensemble_client_mean_pct=45,
                   ensemble_pooled_pct=46)
    for dataset, figure in (("dtd", "43.24"), ("resisc45", "54.51"), ("cub", "51.28"), ("ucf101", "61.00")):
        args = clip_zeroshot.parse_args(["--dataset", dataset])
        recipes = clip_zeroshot.text_recipes(args.template, args.ensemble)
        first, second, paper = clip_zeroshot.report(args, recipes, figures, usual)
        assert "ViT-B-32-quickgelu openai, template 'a photo of a {}': 43.00 % mean" in first and "44.00 %" in first
        assert "openai, ensemble openai, " in second and "45.00 % mean" in second and "46.00 % of all" in second
        assert "paper" in paper and f" {figure} %" in paper
    for flags in ("--dataset dtd --model RN50-quickgelu", "--dataset eurosat", "--dataset digits"):
        args = clip_zeroshot.parse_args(flags.split())
        assert len(clip_zeroshot.report(args, recipes, figures, usual)) == 2
    other = usual | {"resize_mode": "squash"}
    assert "squash" in clip_zeroshot.report(args, recipes, figures, other)[2]


def test_alone_in_an_empty_folder(tmp_path):
    """As a program, with all it says: settings, versions, tables, and each figure with its recipe."""
    for source in (METHOD.name, "common.py"):
        shutil.copy(ROOT / source, tmp_path)
    name = os.path.basename(METHOD.name)
    done = Program(tmp_path / name, *METHOD.short, "--ensemble", "simple", cwd=tmp_path, alone=True).wait()
    assert done.returncode == 0 and done.stderr == "", done.stderr
    folder = tmp_path / "runs" / "clip_zeroshot_digits_b0.1"
    config, (row,) = json.loads((folder / "config.json").read_text()), rows(folder)
    assert config["commit"] == "unknown" and config["settings"]["ensemble"] == "simple"
    tables = {f"{table}.csv" for table in ("clients", "rounds", "accuracy_by_client", "accuracy_by_class")}
    others = {"config.json", "summary.json", "checkpoint.pt", "curves.png", "common.py", name}
    assert {path.name for path in folder.iterdir()} == tables | others
    for said in ("ensemble=simple", "open_clip", "train images by client", "ensemble simple, 7 t"):
        assert said in done.stdout
    figures = (
        f"{float(row['client_acc_mean_pct']):.2f} % mean over clients, {float(row['pooled_acc_pct']):.2f} % of all")
    assert f"template 'a photo of a {{}}': {figures}" in done.stdout
    assert checkpoint(folder)["counts"].shape == (CLIENTS, 3, CLASSES) and summary(folder)["finished"] is True


# ---- runs -----------------------------------------------------------------------------------------------------------


def files(folder):
    """Every file but for times and the run's name; the checkpoint's as read."""
    texts = {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".csv", ".py")}
    texts["rounds.csv"] = rows(folder)
    config, state = json.loads((folder / "config.json").read_text()), checkpoint(folder)
    config["settings"].pop("run_name")
    return texts, config, state, {key: value for key, value in summary(folder).items() if "seconds" not in key}


def test_same_command_same_files_other_split_other_clients(tmp_path):
    first, second = train(tmp_path, name="a"), train(tmp_path, name="b")
    assert equal(files(first), files(second))
    other = train(tmp_path, "--split-seed", 1, name="c")
    assert summary(first)["zeroshot_pooled_pct"] == summary(other)["zeroshot_pooled_pct"]
    assert summary(first)["zeroshot_client_mean_pct"] != summary(other)["zeroshot_client_mean_pct"]


def test_resume_begins_again_or_shows_what_there_is(tmp_path, capsys, monkeypatch):
    folder = train(tmp_path)
    shown, before = capsys.readouterr().out.splitlines()[-3:], {p.name: p.read_bytes() for p in folder.glob("*.[cp]*")}
    with monkeypatch.context() as patch:
        patch.setattr(clip_zeroshot, "evaluate", None)  # a finished run is not evaluated again
        train(tmp_path, "--resume")
    assert capsys.readouterr().out.splitlines()[-3:] == shown and "template" in shown[1]
    assert before == {path.name: path.read_bytes() for path in folder.glob("*.[cp]*")}
    shutil.copytree(folder, tmp_path / "cut")
    for name in ("checkpoint.pt", "rounds.csv", "summary.json", "accuracy_by_class.csv"):
        (tmp_path / "cut" / name).unlink()
    cut = train(tmp_path, "--resume", name="cut")
    assert rows(cut) == rows(folder) and equal(checkpoint(cut)["counts"], checkpoint(folder)["counts"])
    for flags, said in (
        (["--template", "a {}"], "--template a photo of a {} -> a {}"),
        (["--ensemble", "simple"], "--ensemble openai -> simple"),
    ):
        assert said in complaint(METHOD, tmp_path, "--run-name", "run", "--resume", *flags)


def test_ranks_give_the_figures_of_one_process(tmp_path):
    """Three ranks for two clients: the last one owns none."""
    flags, place = ["--clients", 2, "--ensemble", "none"], {}
    alone = train(tmp_path, *flags, name="one")
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    programs = [
        METHOD.start(
            tmp_path, *flags, *("--run-name", "three"),
            env=place | {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(3)
    ]
    for program in programs:
        done = program.wait()
        assert done.returncode == 0, done.stderr
    (texts, _, state, ends), (others, _, state_of_ranks, ends_of_ranks) = files(alone), files(tmp_path / "three")
    assert texts == others and equal(state, state_of_ranks) and ends == ends_of_ranks


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--beta=0"], ["--beta: 0 is"]),
        (["--beta=nan"], ["--beta: nan is"]),
        (["--clients=0"], ["--clients: 0 is", "["]),
        (["--clients=2.5"], ["--clients", "2.5"]),
        (["--split-seed=-1"], ["--split-seed: -1"]),
        (["--train-subset=0"], ["--train-subset: 0"]),
        (["--skip-share=1"], ["--skip-share: 1 is"]),
        (["--clients", 201], ["--clients 201", "200"]),
        (["--train-subset", 5], ["--train-subset 5", "class 5"]),
        (["--ensemble", "imagenet"], ["--ensemble", "openai", "simple", "none"]),
        (["--template", "a photo of a cat"], ["--template", "'a photo of a cat'", "{}"]),
        (["--template", "{} or {}"], ["--template", "one {}"]),
        (["--template", "word " * 80 + "{}"], ["class '0'", "83 tokens", "77", "--template"]),
        (["--partition", "official"], ["--partition", "dirichlet", "quantity", "iid"]),
        (["--shuffle-classes"], ["--shuffle-classes", "--partition quantity"]),
        (["--dataset", "svhn"], ["--dataset", "svhn", "cifar10", "dtd"]),
        (["--dataset", "dtd", "--data-dir", "no such place"], ["no such place", "--data-dir", "dtd"]),
        (["--seed", 1], ["--seed"]),  # nothing is random
        (["--rounds", 1], ["--rounds"]),
        (["--ensemb", "none"], ["--ensemb"]),  # no abbreviations
        (["--device", "cuda:99"], ["--device cuda:99"]),
        (["--run-name", "a/b"], ["--run-name", "a/b"]),
        (["--resume"], ["config.json"]),
        (["--model", "ViT-B-33"], ["--model ViT-B-33", "did you mean"]),
        (["--pretrained", "no such tag"], ["--pretrained no such tag"]),
    ],
)
def test_mistakes_give_one_line_that_names_the_flag(tmp_path, monkeypatch, flags, words):
    monkeypatch.setattr(common.Images, "__getitem__", lambda *_: pytest.fail("images before the refusal"))
    message = complaint(METHOD, tmp_path, *flags)
    assert all(word in message for word in words), message


def test_an_existing_run_folder_is_refused_with_status_2(tmp_path):
    folder = train(tmp_path, "--ensemble", "none")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    done = METHOD.start(tmp_path, "--run-name", "run").wait()
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and "--resume" in done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_every_flag_is_read_and_diff_tags_are_explained(capsys):
    source = (ROOT / METHOD.name).read_text()
    with pytest.raises(SystemExit):
        clip_zeroshot.parse_args(["--help"])
    assert "Nothing trains" in capsys.readouterr().out
    for name in vars(clip_zeroshot.parse_args([])):
        assert f"args.{name}" in source + (ROOT / "common.py").read_text(), name
    for tag, flag in (("DIFF-5", "--shuffle-classes"), ("DIFF-6", "--split-seed")):
        assert source.count(tag) >= 3 and f"{tag}   {flag}" in clip_zeroshot.__doc__
    assert os.path.basename(METHOD.name) in clip_zeroshot.__doc__
