"""A user's mistake gives one line that names the flag and the values, before any work, and loses nothing."""

import json
import os
import shutil

import pytest
import torch
from conftest import SHORT

import common
import proxyfl

SCRIPTS = {"proxyfl.py": proxyfl}


def complaint(module, out_dir, *flags):
    """The one line a script answers with; nothing may be written under out_dir."""
    before = {path: path.stat().st_mtime_ns for path in out_dir.rglob("*")}
    with pytest.raises(common.UserError) as caught:
        module.main([*SHORT, "--out-dir", str(out_dir), *map(str, flags)])
    assert {path: path.stat().st_mtime_ns for path in out_dir.rglob("*")} == before
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


OUT_OF_RANGE = [
    (flag, value)
    for flag, values in {
        "--alpha": ("0", "-1", "nan", "1e308", "abc", "-inf", ""),
        "--lr": ("-1", "nan", "inf", "fast"),
        "--rounds": ("0", "-3", "1.5", "nan"),
        "--batch-size": ("0", "x"),
        "--clients": ("0", "2.0"),
        "--clients-per-round": ("0",),
        "--conf-threshold": ("-0.1", "3", "nan"),
        "--label-ratio": ("0", "1.5", "nan"),
        "--seed": ("-1", "1e3", str(2**31)),
        "--split-seed": ("-1",),
        "--mu": ("0",),
        "--momentum": ("1.1", "-1"),
        "--weight-decay": ("-1e-4", "inf"),
        "--width": ("0",),
        "--local-epochs": ("0",),
        "--lambda-u": ("-1", "nan"),
        "--lambda-icpl": ("inf",),
        "--gpt-epochs": ("-1",),
        "--gpt-lr": ("nan",),
        "--gpt-margin": ("-2",),
        "--gpt-batch-size": ("-1",),
        "--prior-momentum": ("2",),
        "--negative-floor": ("5",),
        "--image-size": ("4", "1e9"),
        "--train-subset": ("0",),
    }.items()
    for value in values
]


@pytest.mark.parametrize("flag, value", OUT_OF_RANGE)
def test_numbers_out_of_range(tmp_path, flag, value):
    message = complaint(proxyfl, tmp_path, f"{flag}={value}")
    assert flag in message and repr(value) in message and ("[" in message or "(" in message)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--alpha"], ["--alpha", "expected one argument"]),
        (["--no-such-flag", 1], ["--no-such-flag"]),
        (["--round", 3], ["--round"]),  # no abbreviations
        (["--partition", "pathological"], ["--partition", "official", "dirichlet"]),
        (["--variant", "both"], ["--variant", "paper", "official"]),
        (["--candidate-set", "top3"], ["--candidate-set", "top5"]),
        (["--amp=yes"], ["--amp"]),
        (["--dataset", "cifra10"], ["--dataset cifra10", "cifar10"]),
        (["--dataset", "imagenet"], ["--dataset imagenet", "digits"]),
        (["--dataset", "DTD"], ["--dataset DTD: not a data set of this script; there are", "digits", "folder"]),
        (["--clients-per-round", 5], ["--clients-per-round 5", "--clients 4"]),
        (["--clients", 201, "--clients-per-round", 1], ["--clients 201", "200", "--alpha"]),
        (["--image-size", 10], ["--image-size 10", "4"]),
        (["--train-subset", 5], ["--train-subset 5", "10"]),
        (["--train-subset", 10**6], ["--train-subset 1000000", "1438"]),
        (["--resume", "--overwrite"], ["--resume", "--overwrite"]),
        (["--resume"], ["--resume", "config.json"]),
        (["--run-name", "../x"], ["--run-name", "../x"]),
        (["--run-name", "a/b"], ["--run-name", "a/b"]),
        (["--device", "gpu"], ["--device gpu", "cuda:N"]),
        (["--device", "0"], ["--device 0", "cuda:N"]),
        (["--device", "cuda:x"], ["--device cuda:x", "cuda:N"]),
        (["--device", "cuda:99"], ["--device cuda:99", "GPUs"]),
        (["--dataset", "cifar10", "--data-dir", "no such place"], ["no such place", "--data-dir", "cifar10"]),
        (["--dataset", "folder", "--data-dir", "no such place"], ["no such place", "{train,test}"]),
        (["--dataset", "cinic10", "--data-dir", "no such place"], ["no such place", "CINIC-10.tar.gz"]),
    ],
)
def test_contradictions_and_unknown_values(tmp_path, monkeypatch, flags, words):
    def offline(url, path, md5):
        raise OSError("no network")

    monkeypatch.setattr(common, "download", offline)
    message = complaint(proxyfl, tmp_path, *flags)
    assert all(word in message for word in words), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu(tmp_path):
    assert "--device cuda" in complaint(proxyfl, tmp_path, "--device", "cuda")


def write_tree(root, classes, damaged=None):
    from PIL import Image

    for split in ("train", "test"):
        for c in range(classes):
            folder = root / split / f"class{c}"
            folder.mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (8, 8), (20 * c, 30 * i, 7)).save(folder / f"{i}.png")
    if damaged:
        (root / damaged).write_bytes(b"\x89PNG\r\n\x1a\nno picture")


def test_top5_with_three_classes_and_a_damaged_picture(tmp_path):
    flags = ["--dataset", "folder", "--data-dir", tmp_path / "data", "--train-subset", 24]
    write_tree(tmp_path / "data", 3)
    out = tmp_path / "out"
    assert "top5" in complaint(proxyfl, out, *flags, "--candidate-set", "top5")
    (tmp_path / "data" / "test" / "class1" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\nno picture")
    assert "3.png" in complaint(proxyfl, out, *flags)
    shutil.rmtree(tmp_path / "data" / "test" / "class2")
    assert "class2" in complaint(proxyfl, out, *flags)


@pytest.fixture
def finished(tmp_path):
    proxyfl.main([*SHORT, "--out-dir", str(tmp_path), "--run-name", "run"])
    return tmp_path


def test_existing_run_folder_is_refused_and_overwrite_replaces_it(finished):
    message = complaint(proxyfl, finished, "--run-name", "run")
    assert all(word in message for word in ("--resume", "--overwrite", "--run-name"))
    (finished / "mine").mkdir()
    (finished / "mine" / "thesis.txt").write_text("precious")
    for foreign in (None, "{}", "[]", '{"model_type": "bert"}', '{"script": "other.py", "settings": {"rounds": 2}}'):
        if foreign:
            (finished / "mine" / "config.json").write_text(foreign)
        for flag in ("--overwrite", "--resume"):
            assert "holds no run" in complaint(proxyfl, finished, "--run-name", "mine", flag)
    assert (finished / "mine" / "thesis.txt").read_text() == "precious"
    (finished / "empty").mkdir()  # what an interruption right after the first step leaves
    proxyfl.main([*SHORT, "--out-dir", str(finished), "--run-name", "empty", "--rounds", "1"])
    proxyfl.main([*SHORT, "--out-dir", str(finished), "--run-name", "run", "--overwrite", "--rounds", "1"])
    assert json.loads((finished / "run" / "summary.json").read_text())["rounds"] == 1


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--lr", 0.05], ["--lr 0.1 -> 0.05"]),
        (["--seed", 2, "--no-gpt"], ["--seed 1 -> 2", "--gpt True -> False"]),
        (["--rounds", 1], ["--rounds 2 -> 1", "grow"]),
        (["--variant", "paper"], ["--variant official -> paper", "--confident"]),
        (["--alpha", "inf"], ["--alpha 0.1 -> inf"]),
    ],
)
def test_changed_settings_are_listed_on_resume(finished, flags, words):
    message = complaint(proxyfl, finished, "--run-name", "run", "--resume", *flags)
    assert all(word in message for word in words), message


def test_checkpoints_that_do_not_belong_or_cannot_be_read(finished):
    proxyfl.main([*SHORT, "--out-dir", str(finished), "--run-name", "other", "--lr", "0.01"])
    run, resume = finished / "run", ("--run-name", "run", "--resume")
    good = (run / "checkpoint.pt").read_bytes()
    shutil.copy(finished / "other" / "checkpoint.pt", run)
    message = complaint(proxyfl, finished, *resume)
    assert "checkpoint.pt" in message and "--lr 0.01 -> 0.1" in message
    for content in (good[: len(good) // 2], b"", b"hello"):
        (run / "checkpoint.pt").write_bytes(content)
        assert "checkpoint.pt" in complaint(proxyfl, finished, *resume)
    (run / "checkpoint.pt").write_bytes(good)
    table = (run / "rounds.csv").read_text()
    (run / "rounds.csv").write_text("\n".join(table.splitlines()[:2]) + "\n")
    assert "expected rows 1 to 2" in complaint(proxyfl, finished, *resume)
    (run / "rounds.csv").unlink()
    assert "rounds.csv" in complaint(proxyfl, finished, *resume)
    (run / "rounds.csv").write_text(table)
    (run / "checkpoint.pt").unlink()  # as in a results folder that keeps only the figures
    assert "checkpoint.pt is missing" in complaint(proxyfl, finished, *resume)
    assert (run / "rounds.csv").read_text() == table
    (run / "config.json").write_text("{")
    assert "config.json" in complaint(proxyfl, finished, *resume)


def test_out_dir_is_a_file_or_not_writable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(common.UserError, match="--out-dir"):
        proxyfl.main([*SHORT, "--out-dir", str(tmp_path / "file")])
    with pytest.raises(common.UserError, match="--out-dir"):
        proxyfl.main([*SHORT, "--out-dir", str(tmp_path / "file" / "deeper")])
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere: ask as somebody else
    with pytest.raises(common.UserError, match="--out-dir.*written"):
        proxyfl.main([*SHORT, "--out-dir", str(tmp_path / "runs")])


@pytest.mark.parametrize(
    "flags",
    [
        ["--alpha", "0"],
        ["--clients", "2", "--clients-per-round", "3"],
        ["--device", "cuda:77"],
        ["--dataset", "folder", "--data-dir", "nowhere"],
    ],
)
def test_one_line_on_stderr_and_status_2(tmp_path, script, flags):
    done = script("proxyfl.py", *flags, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and flags[-2] in done.stderr
    assert not list(tmp_path.iterdir())


def test_resume_refuses_other_data(tmp_path):
    flags = ["--dataset", "folder", "--data-dir", tmp_path / "data", "--train-subset", 24, "--run-name", "run"]
    write_tree(tmp_path / "data", 3)
    out = tmp_path / "out"
    proxyfl.main([*SHORT, "--out-dir", str(out), *map(str, flags), "--rounds", "1"])
    write_tree(tmp_path / "more", 4)
    message = complaint(proxyfl, out, *flags, "--data-dir", tmp_path / "more", "--resume")
    assert "data_fingerprint" in message
    proxyfl.main([*SHORT, "--out-dir", str(out), *map(str, flags), "--resume"])  # the same data may move, or stay


def test_two_processes_cannot_write_one_folder(finished):
    fcntl = pytest.importorskip("fcntl")
    other = os.open(finished / "run", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert "another process" in complaint(proxyfl, finished, "--run-name", "run", "--resume", "--rounds", 3)
    os.close(other)
    proxyfl.main([*SHORT, "--out-dir", str(finished), "--run-name", "run", "--resume", "--rounds", "3"])


def test_a_stray_rank_in_the_environment_is_no_rank(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert common.rank_and_world() == (0, 1) and common.Ranks("cpu").first
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert common.rank_and_world() == (1, 3)
