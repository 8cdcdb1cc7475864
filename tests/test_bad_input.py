"""A user's mistake gives one line that names the flag and the values, before any work, and loses nothing."""

import json
import os
import shutil

import pytest
import torch
from scripts import SCRIPTS, SEMI_SUPERVISED
from scripts import method as find_method

import common


def complaint(method, out_dir, *flags):
    """The one line a script answers with; nothing may be written under out_dir."""
    before = {path: path.stat().st_mtime_ns for path in out_dir.rglob("*")}
    with pytest.raises(common.UserError) as caught:
        method.main(out_dir, *flags)
    assert {path: path.stat().st_mtime_ns for path in out_dir.rglob("*")} == before
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


# ---- one flag -----------------------------------------------------------------------------------------------------

OUT_OF_RANGE = {  # of every script; {} is the flag of the Dirichlet concentration
    "{}": ("0", "-1", "nan", "1e308", "abc", "-inf", ""),
    "--lr": ("-1", "nan", "inf", "fast"),
    "--rounds": ("0", "-3", "1.5", "nan"),
    "--batch-size": ("0", "x"),
    "--clients": ("0", "2.0"),
    "--seed": ("-1", "1e3", str(2**31)),
    "--split-seed": ("-1",),
    "--momentum": ("1.1", "-1"),
    "--weight-decay": ("-1e-4", "inf"),
    "--local-epochs": ("0",),
    "--train-subset": ("0",),
}
ALPHA = {name: "--alpha" if name in SEMI_SUPERVISED else "--beta" for name in SCRIPTS}
FSSL_OUT_OF_RANGE = {  # of every semi-supervised script
    "--clients-per-round": ("0",),
    "--label-ratio": ("0", "1.5", "nan"),
    "--width": ("0", "7"),
    "--image-size": ("4", "1e9"),
}
CLIP_OUT_OF_RANGE = {  # of every script with a CLIP
    "--skip-share": ("1", "-0.1", "nan"),
    "--text-prompts": ("-1", "1.5"),
    "--prompt-std": ("-0.1", "inf"),
    "--refresh": ("0", "-5"),
    "--shots": ("0", "-1", "1.5", "grown", ""),
    "--intra-quantile": ("-0.1", "1.1", "nan"),
    "--inter-quantile": ("-0.1", "80"),
    "--conf-quantile": ("-0.1", "1.1", "nan"),
    "--entropy-quantile": ("-0.1", "50"),
}
PSEUDO_LABELS = {"--conf-threshold": ("-0.1", "3", "nan"), "--mu": ("0",), "--lambda-u": ("-1", "nan")}
PLUG_IN = {"--lambda-icpl": ("inf",), "--gpt-epochs": ("-1",), "--gpt-lr": ("nan",)}
OWN_OUT_OF_RANGE = {
    "proxyfl.py": {
        **PSEUDO_LABELS,
        **PLUG_IN,
        "--gpt-margin": ("-2",),
        "--gpt-batch-size": ("-1",),
        "--prior-momentum": ("2",),
        "--negative-floor": ("5",),
    },
    "baselines/fedavg.py": {"--prox-mu": ("-1", "nan")},
    "baselines/fixmatch.py": {**PSEUDO_LABELS, **PLUG_IN, "--prox-mu": ("-1", "nan")},
    "baselines/flexmatch.py": PSEUDO_LABELS,
    "baselines/fedproto.py": {**PSEUDO_LABELS, "--lambda-proto": ("-1", "nan", "inf")},
    "baselines/fedmatch.py": {
        "--conf-threshold": ("-0.1", "3", "nan"),
        "--mu": ("0",),
        **{f"--lambda-{part}": ("-1", "nan") for part in "sia12"},
        "--psi-factor": ("-0.2", "inf"),
        "--helpers": ("-1", "1.5"),
        "--helper-interval": ("0",),
        "--zero-threshold": ("-1e-6",),
        "--send-threshold": ("nan",),
    },
    "baselines/fedloke.py": {
        "--mu": ("0", "0.9"),
        "--loke-mu": ("-0.1", "1.1", "nan"),
        "--entropy-threshold": ("-0.1", "nan"),
        "--warm-up-rounds": ("-1", "0.5"),
        "--clip": ("-0.1", "inf"),
    },
    "baselines/fedlabel.py": {
        **PSEUDO_LABELS,
        **PLUG_IN,
        "--lambda-agree": ("-1", "inf"),
        "--unlabelled-epochs": ("-1", "1.5"),
    },
    "baselines/sage.py": {**PSEUDO_LABELS, **PLUG_IN, "--kappa": ("-1", "inf"), "--temperature": ("0", "nan")},
    "baselines/feddure.py": {
        **PSEUDO_LABELS,
        "--warm-up": ("-1", "1.5"),
        "--coarse-lr": ("-1", "nan"),
        "--gain-bound": ("-1", "inf"),
        "--virtual-lr": ("-0.1", "nan"),
        "--fine-lr": ("-1", "inf"),
        "--fine-hidden": ("0", "1e3"),
        "--fine-tune-epochs": ("-1", "0.5"),
    },
    "baselines/feddb.py": {
        **PSEUDO_LABELS,
        "--prior-momentum": ("-0.1", "1.1", "nan"),
        "--prior-floor": ("0", "2", "nan"),
    },
    "baselines/pfedprompt.py": {
        "--memory-shots": ("-1", "1.5", "nan"),
        "--memory-weight": ("-1", "nan", "inf", "1e7"),
        "--memory-sharpness": ("-0.1", "nan", "inf", "1e300"),
    },
    "baselines/fedotp.py": {
        "--ot-mass": ("0", "1.1", "nan"),
        "--ot-eps": ("0", "-0.1", "1e-4", "inf"),
        "--ot-iterations": ("0", "1.5"),
        "--ot-tolerance": ("-1e-3", "nan"),
    },
    "fedcopl.py": {
        "--visual-lr": ("-0.1", "nan"),
        "--cache-gb": ("-1", "inf"),
        "--visual-prompts": ("-1",),
        "--prompt-depth": ("-1",),
    },
}


def group(name, semi_supervised, with_clip):
    """The table of the group that this script belongs to."""
    return semi_supervised if name in SEMI_SUPERVISED else with_clip


@pytest.mark.parametrize(
    "name, flag, value",
    [
        (name, flag.format(ALPHA[name]), value)
        for name in SCRIPTS
        for flag, values in (
            OUT_OF_RANGE | group(name, FSSL_OUT_OF_RANGE, CLIP_OUT_OF_RANGE) | OWN_OUT_OF_RANGE.get(name, {})
        ).items()
        for value in values
    ],
)
def test_numbers_out_of_range(tmp_path, name, flag, value):
    message = complaint(find_method(name), tmp_path, f"{flag}={value}")
    assert flag in message and repr(value) in message and ("[" in message or "(" in message)


# ---- several flags, unknown values --------------------------------------------------------------------------------

MISTAKES = [  # of every script
    (["{A}"], ["{A}", "expected one argument"]),
    (["--no-such-flag", 1], ["--no-such-flag"]),
    (["--round", 3], ["--round"]),  # no abbreviations
    (["--amp=yes"], ["--amp"]),
    (["--dataset", "cifra10"], ["--dataset cifra10", "cifar10"]),
    (["--dataset", "imagenet"], ["--dataset imagenet", "digits"]),
    (["--train-subset", 5], ["--train-subset 5", "10"]),
    (["--train-subset", 10**6], ["--train-subset 1000000", "1438"]),
    (["--resume", "--overwrite"], ["--resume", "--overwrite"]),
    (["--resume"], ["--resume", "config.json"]),
    (["--run-name", "../x"], ["--run-name", "../x"]),
    (["--run-name", "a/b"], ["--run-name", "a/b"]),
    (["--run-name", "n" * 201], ["--run-name", "200"]),
    (["--device", "gpu"], ["--device gpu", "cuda:N"]),
    (["--device", "0"], ["--device 0", "cuda:N"]),
    (["--device", "cuda:x"], ["--device cuda:x", "cuda:N"]),
    (["--device", "cuda:99"], ["--device cuda:99", "GPUs"]),
    (["--dataset", "cifar10", "--data-dir", "no such place"], ["no such place", "--data-dir", "cifar10"]),
    (["--dataset", "folder", "--data-dir", "no such place"], ["no such place", "{train,test}"]),
]
FSSL_MISTAKES = [  # of every semi-supervised script
    (["--partition", "pathological"], ["--partition", "official", "dirichlet"]),
    (["--dataset", "DTD"], ["--dataset DTD: not a data set of this script", "digits", "folder"]),
    (["--clients-per-round", 5], ["--clients-per-round 5", "--clients 4"]),
    (["--clients", 201, "--clients-per-round", 1], ["--clients 201", "200", "--alpha"]),
    (["--image-size", 10], ["--image-size 10", "4"]),
    (["--dataset", "cinic10", "--data-dir", "no such place"], ["no such place", "CINIC-10.tar.gz"]),
]
CLIP_MISTAKES = [  # of every script with a CLIP
    (["--partition", "pathological"], ["--partition", "dirichlet", "quantity", "iid"]),
    (["--partition", "official"], ["--partition", "dirichlet", "quantity", "iid"]),
    (["--shuffle-classes"], ["--shuffle-classes", "--partition quantity", "dirichlet"]),
    (["--clients", 201], ["--clients 201", "200"]),
    (["--dataset", "svhn"], ["--dataset svhn", "cifar10", "dtd"]),
    (["--dataset", "fashion-mnist"], ["--dataset fashion-mnist", "cifar10", "dtd"]),
    (["--dataset", "resisc45", "--data-dir", "no such place"], ["no such place", "--data-dir", "resisc45"]),
    (["--template", "a photo of a cat"], ["--template", "'a photo of a cat'", "{}"]),
    (["--template", "a {} or a {}"], ["--template", "'a {} or a {}'", "one {}"]),
    (["--template", ""], ["--template", "{}"]),
    (["--text-prompts", 74], ["--text-prompts", "77", "74 prompts", "class '0'", "4 tokens"]),
    (["--text-prompts", 75], ["--text-prompts 75", "77 tokens"]),
    (["--pseudo-labels", "grip"], ["--pseudo-labels", "copl", "fpl", "ifpl", "cpl"]),
    (["--pseudo-labels", "copl", "--shots", 4], ["--shots", "--pseudo-labels fpl, ifpl, cpl", "not for copl"]),
    (["--pseudo-labels", "copl", "--shots", "grow"], ["--shots", "--pseudo-labels fpl, ifpl, cpl", "not for copl"]),
    (["--pseudo-labels", "fpl", "--intra-quantile", 0.5], ["--intra-quantile", "--pseudo-labels cpl", "not for fpl"]),
    (["--pseudo-labels", "copl", "--intra-quantile", 0.5], ["--intra-quantile", "--pseudo-labels cpl", "not for copl"]),
    (["--pseudo-labels", "ifpl", "--inter-quantile", 0.5], ["--inter-quantile", "--pseudo-labels cpl", "not for ifpl"]),
    (["--pseudo-labels", "fpl", "--no-allocation"], ["--allocation", "--pseudo-labels copl", "not for fpl"]),
    (["--pseudo-labels", "copl", "--no-allocation", "--budget", "exact"], ["--budget", "--no-allocation"]),
    (["--pseudo-labels", "copl", "--no-conf-filter", "--conf-quantile", 0.3], ["--conf-quantile", "--no-conf-filter"]),
    (["--pseudo-labels", "cpl", "--conf-quantile", 0.6], ["--conf-quantile", "--pseudo-labels copl", "not for cpl"]),
    (["--pseudo-labels", "ifpl", "--ceiling", "float32"], ["--ceiling", "--pseudo-labels copl", "not for ifpl"]),
    (["--budget", "round"], ["--budget", "ceil", "exact"]),
    (["--unseen-classes", "all"], ["--unseen-classes", "grow", "none"]),
    (["--ceiling", "float64"], ["--ceiling", "integer", "float32"]),
]
OWN_MISTAKES = {
    "proxyfl.py": [
        (["--variant", "both"], ["--variant", "paper", "official"]),
        (["--candidate-set", "top3"], ["--candidate-set", "top5"]),
    ],
    "baselines/fedavg.py": [(["--labels", "most"], ["--labels", "labelled", "all"])],
    "baselines/fixmatch.py": [
        (["--teacher", "ema"], ["--teacher", "local", "global"]),
        (["--teacher", "local", "--union-mask"], ["--union-mask", "--teacher local"]),
    ],
    "baselines/flexmatch.py": [(["--warm-up", 10], ["10"]), (["--teacher", "local"], ["--teacher"])],
    "baselines/fedproto.py": [(["--prototypes", "none"], ["--prototypes", "confident", "all", "labelled"])],
    "baselines/fedmatch.py": [(["--lambda-u", 1], ["--lambda-u"])],  # it has weights of its own
    "baselines/fedloke.py": [
        (["--first-visit", "never"], ["--first-visit", "initial", "download"]),
        (["--conf-threshold", 0.9], ["--conf-threshold"]),  # it goes by entropy
    ],
    "baselines/fedlabel.py": [
        (["--expertise", "entropy"], ["--expertise", "variance", "logit-variance", "maximum"]),
        (["--two-phase", "--gpt"], ["--two-phase", "--gpt"]),
        (["--two-phase", "--icpl"], ["--two-phase", "--icpl"]),
        (["--unlabelled-epochs", 3], ["--unlabelled-epochs 3", "--two-phase"]),
    ],
    "baselines/feddure.py": [
        (["--variant", "both"], ["--variant", "paper", "official"]),
        (["--gain", "up"], ["--gain", "old-new", "new-old"]),
        (["--variant", "paper", "--tau", 0.9], ["--conf-threshold", "--variant paper"]),
        (["--variant", "paper", "--fine-tune-epochs", 0], ["--fine-tune-epochs", "--variant paper"]),
        (["--variant", "official", "--virtual-lr", 0.1], ["--virtual-lr", "--variant official"]),
        (["--variant", "official", "--fine-hidden", 100], ["--fine-hidden", "--variant official"]),
    ],
    "baselines/promptfl.py": [  # the image tower has no prompts
        (["--aggregate", "text"], ["--aggregate"]),
        (["--visual-lr", 0.1], ["--visual-lr"]),
    ],
    "baselines/pfedprompt.py": [(["--memory-beta", 2], ["--memory-beta"])],
    "baselines/fedotp.py": [
        (["--ot", "cosine"], ["--ot", "partial", "sinkhorn"]),
        (["--ot", "sinkhorn", "--ot-mass", 0.8], ["--ot-mass 0.8", "--ot sinkhorn"]),
        (["--aggregate", "visual"], ["--aggregate"]),
    ],
    "fedcopl.py": [
        (["--aggregate", "all"], ["--aggregate", "visual", "text", "both", "none"]),
        (["--prompt-depth", 4], ["--prompt-depth 4", "3 blocks"]),
    ],
}


def offline(*_, **__):
    raise OSError("no network")


@pytest.mark.parametrize(
    "name, flags, words",
    [
        (
            name,
            [str(flag).replace("{A}", ALPHA[name]) for flag in flags],
            [w.replace("{A}", ALPHA[name]) for w in words],
        )
        for name in SCRIPTS
        for flags, words in MISTAKES + group(name, FSSL_MISTAKES, CLIP_MISTAKES) + OWN_MISTAKES.get(name, [])
    ],
)
def test_contradictions_and_unknown_values(tmp_path, monkeypatch, name, flags, words):
    monkeypatch.setattr(common, "download", offline)
    message = complaint(find_method(name), tmp_path, *flags)
    assert all(word in message for word in words), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu(method, tmp_path):
    assert "--device cuda" in complaint(method, tmp_path, "--device", "cuda")


@pytest.mark.parametrize(
    "flags",
    [["{}", "0"], ["--clients", "201"], ["--device", "cuda:77"], ["--dataset", "folder", "--data-dir", "nowhere"]],
)
def test_one_line_on_stderr_and_status_2(any_method, tmp_path, flags):
    flags = [flag.format(ALPHA[any_method.name]) for flag in flags]
    done = any_method.start(tmp_path / "runs", *flags, cwd=tmp_path).wait()
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and flags[-2] in done.stderr
    assert not list(tmp_path.iterdir())


# ---- image folders ------------------------------------------------------------------------------------------------


def write_tree(root, names):
    from PIL import Image

    for split in ("train", "test"):
        for c, name in enumerate(names):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (8, 8), (20 * c, 30 * i, 7)).save(folder / f"{i}.png")


def folder_flags(data_dir):
    return ["--dataset", "folder", "--data-dir", data_dir, "--train-subset", 24, "--run-name", "run"]


def test_damaged_picture_and_missing_class(method, tmp_path):
    write_tree(tmp_path / "data", ["cat", "cow", "dog"])
    flags, out = folder_flags(tmp_path / "data"), tmp_path / "out"
    (tmp_path / "data" / "test" / "cow" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\nno picture")
    assert "3.png" in complaint(method, out, *flags)
    shutil.rmtree(tmp_path / "data" / "test" / "dog")
    assert "dog" in complaint(method, out, *flags)


def test_top5_with_three_classes(tmp_path):
    write_tree(tmp_path / "data", ["cat", "cow", "dog"])
    flags = [*folder_flags(tmp_path / "data"), "--candidate-set", "top5"]
    assert "top5" in complaint(find_method("proxyfl.py"), tmp_path / "out", *flags)


def test_resume_refuses_other_data(any_method, tmp_path):
    flags = folder_flags(tmp_path / "data")
    write_tree(tmp_path / "data", ["cat", "cow", "dog"])
    any_method.train(tmp_path / "out", *flags, "--rounds", 1)
    write_tree(tmp_path / "more", ["bat", "cat", "cow", "dog"])
    message = complaint(any_method, tmp_path / "out", *flags, "--data-dir", tmp_path / "more", "--resume")
    assert "data_fingerprint" in message
    (tmp_path / "data").rename(tmp_path / "moved")
    any_method.train(tmp_path / "out", *flags, "--data-dir", tmp_path / "moved", "--resume")  # the same data may move


# ---- a run folder that exists -------------------------------------------------------------------------------------


@pytest.fixture
def finished(any_method, tmp_path):
    any_method.train(tmp_path)
    return tmp_path


def test_existing_run_folder_is_refused_and_overwrite_replaces_it(any_method, finished):
    message = complaint(any_method, finished, "--run-name", "run")
    assert all(word in message for word in ("--resume", "--overwrite", "--run-name"))
    (finished / "mine").mkdir()
    (finished / "mine" / "thesis.txt").write_text("precious")
    for foreign in (None, "{}", "[]", '{"model_type": "bert"}', '{"script": "other.py", "settings": {"rounds": 2}}'):
        if foreign:
            (finished / "mine" / "config.json").write_text(foreign)
        for flag in ("--overwrite", "--resume"):
            assert "holds no run" in complaint(any_method, finished, "--run-name", "mine", flag)
    assert (finished / "mine" / "thesis.txt").read_text() == "precious"
    (finished / "empty").mkdir()  # what an interruption right after the first step leaves
    any_method.train(finished, "--rounds", 1, name="empty")
    any_method.train(finished, "--overwrite", "--rounds", 1)
    assert json.loads((finished / "run" / "summary.json").read_text())["rounds"] == 1


CHANGES = [  # of every script
    (["--lr", 0.05], ["--lr 0.1 -> 0.05"]),
    (["--rounds", 1], ["--rounds 2 -> 1", "grow"]),
    (["{}", "inf"], ["{} 0.1 -> inf"]),
]
CLIP_CHANGES = [  # of every script with a CLIP
    (["--seed", 2, "--momentum", 0], ["--seed 1 -> 2", "--momentum 0.9 -> 0.0"]),
    (["--template", "an image of {}"], ["--template a photo of a {} -> an image of {}"]),
]
OWN_CHANGES = {
    "baselines/fedavg.py": [(["--seed", 2, "--labels", "all"], ["--seed 1 -> 2", "--labels labelled -> all"])],
    "baselines/fixmatch.py": [
        (["--teacher", "local", "--tau", 0.9], ["--teacher global", "--conf-threshold 0.17 -> 0.9"])
    ],
    "baselines/flexmatch.py": [
        (["--no-warm-up", "--tau", 0.9], ["--warm-up True -> False", "--conf-threshold 0.4 -> 0.9"])
    ],
    "baselines/fedproto.py": [(["--prototypes", "all"], ["--prototypes confident -> all"])],
    "baselines/fedmatch.py": [(["--helpers", 1, "--lambda-2", 0], ["--helpers 2 -> 1", "--lambda-2 10.0 -> 0.0"])],
    "baselines/fedloke.py": [(["--first-visit", "download"], ["--first-visit initial -> download"])],
    "baselines/fedlabel.py": [(["--two-phase"], ["--two-phase False -> True", "--unlabelled-epochs None -> 1"])],
    "baselines/sage.py": [(["--kappa", 0, "--icpl"], ["--kappa 13.8629436", "-> 0.0", "--icpl False -> True"])],
    "baselines/feddure.py": [(["--seed", 2, "--gain", "new-old"], ["--seed 1 -> 2", "--gain old-new -> new-old"])],
    "baselines/feddb.py": [(["--exact-simplex", "--tau", 0.9], ["--exact-simplex False", "--conf-threshold 0.12"])],
    "proxyfl.py": [
        (["--seed", 2, "--no-gpt"], ["--seed 1 -> 2", "--gpt True -> False"]),
        (["--variant", "paper"], ["--variant official -> paper", "--confident"]),
    ],
    "baselines/promptfl.py": [
        (["--pseudo-labels", "cpl"], ["--pseudo-labels fpl -> cpl"]),
        (["--pseudo-labels", "copl"], ["--pseudo-labels fpl -> copl", "--shots 16 -> None"]),
        (["--shots", "grow"], ["--shots 16 -> grow"]),
    ],
    "baselines/pfedprompt.py": [
        (["--memory-weight", 0, "--memory-shots", 3], ["--memory-weight 1.0 -> 0.0", "--memory-shots 16 -> 3"]),
        (["--memory-sharpness", 1, "--shots", "grow"], ["--memory-sharpness 5.5 -> 1.0", "--shots 16 -> grow"]),
    ],
    "baselines/fedotp.py": [
        (["--ot", "sinkhorn", "--seed", 2], ["--seed 1 -> 2", "--ot partial -> sinkhorn", "--ot-mass 0.8 -> 1.0"]),
        (["--ot-eps", 0.01, "--pseudo-labels", "ifpl"], ["--ot-eps 0.1 -> 0.01", "--pseudo-labels cpl -> ifpl"]),
    ],
    "fedcopl.py": [
        (["--refresh", 3, "--aggregate", "both"], ["--refresh 2 -> 3", "--aggregate visual -> both"]),
        (["--pseudo-labels", "cpl"], ["--pseudo-labels copl -> cpl", "--shots None -> 16"]),
        (["--no-allocation"], ["--allocation True -> False"]),
    ],
}


def test_changed_settings_are_listed_on_resume(method, tmp_path):
    method.train(tmp_path, "--rounds", 2)
    alpha = ALPHA[method.name]
    for flags, words in CHANGES:
        flags = [str(flag).format(alpha) for flag in flags]
        message = complaint(method, tmp_path, "--run-name", "run", "--resume", *flags)
        assert all(word.format(alpha) in message for word in words), message
    for flags, words in group(method.name, [], CLIP_CHANGES) + OWN_CHANGES.get(method.name, []):
        message = complaint(method, tmp_path, "--run-name", "run", "--resume", *flags)
        assert all(word in message for word in words), message


def test_checkpoints_that_do_not_belong_or_cannot_be_read(any_method, finished):
    any_method.train(finished, "--lr", 0.01, name="other")
    run, resume = finished / "run", ("--run-name", "run", "--resume")
    good = (run / "checkpoint.pt").read_bytes()
    shutil.copy(finished / "other" / "checkpoint.pt", run)
    message = complaint(any_method, finished, *resume)
    assert "checkpoint.pt" in message and "--lr 0.01 -> 0.1" in message
    for content in (good[: len(good) // 2], b"", b"hello"):
        (run / "checkpoint.pt").write_bytes(content)
        assert "checkpoint.pt" in complaint(any_method, finished, *resume)
    (run / "checkpoint.pt").write_bytes(good)
    table = (run / "rounds.csv").read_text()
    (run / "rounds.csv").write_text("\n".join(table.splitlines()[:2]) + "\n")
    assert "expected rows 1 to 2" in complaint(any_method, finished, *resume)
    (run / "rounds.csv").unlink()
    assert "rounds.csv" in complaint(any_method, finished, *resume)
    (run / "rounds.csv").write_text(table)
    (run / "checkpoint.pt").unlink()  # as in a results folder that keeps only the figures
    assert "checkpoint.pt is missing" in complaint(any_method, finished, *resume)
    assert (run / "rounds.csv").read_text() == table
    (run / "config.json").write_text("{")
    assert "config.json" in complaint(any_method, finished, *resume)


def test_out_dir_is_a_file_or_not_writable(method, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert "--out-dir" in complaint(method, tmp_path / "file")
    assert "--out-dir" in complaint(method, tmp_path / "file" / "deeper")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere: ask as somebody else
    message = complaint(method, tmp_path / "runs")
    assert "--out-dir" in message and "written" in message


def test_a_stray_rank_in_the_environment_is_no_rank(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert common.rank_and_world() == (0, 1) and common.Ranks("cpu").first
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert common.rank_and_world() == (1, 3)
