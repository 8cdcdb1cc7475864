"""A user's mistake gives one line that names the flag, before any work, and loses nothing."""

import argparse
import math
import os
import re
import shlex
import shutil
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from scripts import HEADLINES, ROOT, SCRIPTS, SEMI_SUPERVISED, UNSUPERVISED, load
from scripts import method as find_method

import common

ALPHA = {name: "--alpha" if name in SEMI_SUPERVISED else "--beta" for name in SCRIPTS}


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

FREE_TEXT = {"device", "out_dir", "run_name", "data_dir", "model", "pretrained", "template", "source"}
RANGE = re.compile(r"is not in ([\[(])(\S+), (\S+)[\])]$")
NONSENSE = {  # a value, and the flags that must refuse it whatever their bounds are
    "-3": ".*",
    "0": "alpha|beta|rounds|clients|clients-per-round|local-epochs|batch-size|train-subset|label-ratio|width|image-size"
         "|mu|refresh|shots|helper-interval|temperature|prior-floor|fine-hidden|ot-(mass|eps|iterations)|share|steps",
    "1.1": "(prior-)?momentum|label-ratio|prior-floor|loke-mu|(skip-)?share|ot-mass|.*-quantile",
    "3": "conf-threshold",
    "1e308": "alpha|beta|memory-(weight|sharpness)",
    str(2**31): "seed|split-seed",
}


def actions(name):
    """The flags of a script's own parser, as argparse has them, and the parser."""
    parse = patch.object(argparse.ArgumentParser, "parse_args", autospec=True, side_effect=SystemExit)
    with parse as called, pytest.raises(SystemExit):
        load(name).parse_args([])
    parser = called.call_args.args[0]
    return [action for action in parser._actions if action.dest != "help"], parser


@pytest.mark.parametrize("name", [*SCRIPTS, "baselines/clip_zeroshot.py", "tiny_clip.py"])
def test_each_flag_refuses_nonsense(name):
    """Fails when a number has no bounds, or other ones than it says, when a switch or a choice takes any word."""
    flags, parser = actions(name)
    free = set()

    def refused(flag, value):
        try:
            parser.parse_args([f"{flag}={value}"])
        except common.UserError as error:
            assert flag in str(error) and "\n" not in str(error)
            return str(error)

    for action in flags:
        flag = action.option_strings[0]
        if action.nargs == 0 or action.choices:
            assert refused(flag, "no-such-word")
        elif action.type is None:
            free.add(action.dest)
        else:
            assert all(refused(flag, text) for text in ("nan", "-inf", "fast", "", "1,5"))
            assert bool(refused(flag, "inf")) != (flag in ("--alpha", "--beta"))
            assert all(refused(flag, value) for value, of in NONSENSE.items() if re.fullmatch(of, flag[2:])), flag
            bracket, low, high = RANGE.search(refused(flag, -(10**30))).groups()
            low, high, whole = float(low), float(high), "invalid" in (refused(flag, "0.123") or "")
            below, above = (low - 1, high + 1) if whole else (math.nextafter(low, -9e9), math.nextafter(high, math.inf))
            if bracket == "(":
                below, low = low, math.nextafter(low, 9e9)
            for bound, inside in ((below, False), (low, True), (high, True), (above, False)):
                if math.isfinite(bound):
                    assert bool(refused(flag, int(bound) if whole else bound)) != inside, (flag, bound)
    assert free <= FREE_TEXT


# ---- several flags, unknown values --------------------------------------------------------------------------------

MISTAKES = """{A} | {A} | expected one argument
    --no-such-flag 1 | --no-such-flag
    --round 3 | --round
    --dataset cifra10 | --dataset | cifar10 | digits
    --dataset folder --data-dir nowhere | --data-dir | nowhere | train
    --data-dir README.md | --data-dir | README.md | not a folder
    --train-subset 5 | --train-subset 5 | 1 to
    --train-subset 1000000 | --train-subset 1000000 | 1 to
    --clients 201 --rounds 1 | --clients 201 | (200; {A}
    --run-name ../x | --run-name | ../x
    --run-name a/b | --run-name | a/b
    --run-name . | --run-name
    --run-name .. | --run-name
    --device gpu | --device gpu | cuda:N
    --device 0 | --device 0 | cuda:N
    --device cuda:x | --device cuda:x | cuda:N
    --device cuda:99 | --device cuda:99 | cuda:N"""
OF_GROUP = {
    "semi-supervised": """--clients-per-round 5 | --clients-per-round 5 | --clients 4
        --image-size 10 | --image-size 10 | 4
        --dataset dtd | --dataset | digits | folder
        --dataset cinic10 --data-dir nowhere | --data-dir | nowhere | layout_data.py cinic10""",
    "unsupervised": """--dataset svhn | --dataset | cifar10 | dtd
        --dataset resisc45 --data-dir nowhere | --data-dir | nowhere | layout_data.py resisc45
        --shuffle-classes | --shuffle-classes | --partition quantity | dirichlet
        --template 'a photo of a cat' | --template | 'a photo of a cat' | {}
        --template 'a {} or a {}' | --template | 'a {} or a {}' | one {}
        --template '' | --template | {}
        --text-prompts 74 | --text-prompts | 77 | 74 prompts | class '0' | 4 tokens
        --text-prompts 75 | --text-prompts 75 | 77 tokens
        --pseudo-labels copl --shots 4 | --shots | --pseudo-labels fpl, ifpl, cpl | not for copl
        --pseudo-labels fpl --no-allocation | --allocation | --pseudo-labels copl | not for fpl
        --pseudo-labels cpl --conf-quantile 0.6 | --conf-quantile | --pseudo-labels copl | not for cpl
        --pseudo-labels ifpl --ceiling float32 | --ceiling | --pseudo-labels copl | not for ifpl
        --pseudo-labels copl --no-allocation --budget exact | --budget | --no-allocation
        --pseudo-labels copl --no-conf-filter --conf-quantile 0.3 | --conf-quantile | --no-conf-filter""",
    "baselines/fixmatch.py": "--teacher local --union-mask | --union-mask | --teacher local",
    "baselines/fedlabel.py": """--two-phase --gpt | --two-phase | --gpt
        --two-phase --icpl | --two-phase | --icpl
        --unlabelled-epochs 3 | --unlabelled-epochs 3 | --two-phase""",
    "baselines/feddure.py": """--variant paper --tau 0.9 | --conf-threshold | --variant paper
        --variant paper --fine-tune-epochs 0 | --fine-tune-epochs | --variant paper
        --variant official --virtual-lr 0.1 | --virtual-lr | --variant official
        --variant official --fine-hidden 100 | --fine-hidden | --variant official""",
    "baselines/fedotp.py": "--ot sinkhorn --ot-mass 0.8 | --ot-mass 0.8 | --ot sinkhorn",
    "fedcopl.py": "--prompt-depth 4 | --prompt-depth 4 | 3 blocks",
}


def mistakes():
    """What is common.py's to refuse: but for the headline scripts, in the slow suite."""
    cases = []
    for name in SCRIPTS:
        group = "semi-supervised" if name in SEMI_SUPERVISED else "unsupervised"
        slow = [] if name in HEADLINES else [pytest.mark.slow]
        for lines, marks in ((MISTAKES, slow), (OF_GROUP[group], []), (OF_GROUP.get(name, ""), [])):
            cases += [pytest.param(name, line.strip(), marks=marks) for line in lines.splitlines()]
    return cases


@pytest.mark.parametrize("name, line", mistakes())
def test_contradictions_and_unknown_values(tmp_path, monkeypatch, name, line):
    """Fails when a script begins, or answers with something else than the words behind the flags."""
    monkeypatch.chdir(ROOT)
    flags, *words = line.replace("{A}", ALPHA[name]).split(" | ")
    message = complaint(find_method(name), tmp_path, *shlex.split(flags))
    assert all(word in message for word in words), message


@pytest.mark.parametrize("run_name", [201 * "n", 200 * "é"], ids=["letters", "bytes"])
def test_run_name_that_no_file_system_holds(any_method, tmp_path, run_name):
    """A file system's limit is 255 bytes, of which an é takes two."""
    assert "--run-name" in complaint(any_method, tmp_path, "--run-name", run_name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu(method, tmp_path):
    assert "--device cuda" in complaint(method, tmp_path, "--device", "cuda")


@pytest.mark.parametrize("flags, env", [
    ("{A} 0", {}), ("--clients 201", {}), ("--device cuda:77", {}), ("--dataset folder --data-dir nowhere", {}),
    ("{A} 0", {"RANK": "1"})])
def test_one_line_on_stderr_and_status_2(any_method, tmp_path, flags, env):
    """As a program. Some schedulers set RANK for every process: without WORLD_SIZE there is one rank, and it speaks."""
    flags = flags.replace("{A}", ALPHA[any_method.name]).split()
    done = any_method.start(tmp_path / "runs", *flags, cwd=tmp_path, env=env).wait()
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and flags[-2] in done.stderr
    assert not list(tmp_path.iterdir())


def test_out_dir_is_a_file_or_not_writable(method, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert "--out-dir" in complaint(method, tmp_path / "file")
    assert "--out-dir" in complaint(method, tmp_path / "file" / "deeper")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere: ask as somebody else
    message = complaint(method, tmp_path / "runs")
    assert "--out-dir" in message and "written" in message


# ---- image folders ------------------------------------------------------------------------------------------------


def write_tree(root, names):
    for split in ("train", "test"):
        for c, name in enumerate(names):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (8, 8), (20 * c, 30 * i, 7)).save(folder / f"{i}.png")


def folder_flags(data_dir):
    return ["--dataset", "folder", "--data-dir", data_dir, "--train-subset", 24, "--run-name", "run"]


def test_damaged_pictures_missing_classes_and_too_few(any_method, tmp_path):
    write_tree(tmp_path / "data", ["cat", "cow", "dog"])
    flags, out = folder_flags(tmp_path / "data"), tmp_path / "out"
    if any_method.name == "proxyfl.py":
        assert "--candidate-set top5" in complaint(any_method, out, *flags, "--candidate-set", "top5")
    (tmp_path / "data" / "test" / "cow" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\nno picture")
    assert "3.png" in complaint(any_method, out, *flags)
    shutil.rmtree(tmp_path / "data" / "test" / "dog")
    assert "dog" in complaint(any_method, out, *flags)


def test_resume_refuses_other_data(any_method, tmp_path):
    """Fails when the images may change under a run, or may not move."""
    flags = folder_flags(tmp_path / "data")
    write_tree(tmp_path / "data", ["cat", "cow", "dog"])
    any_method.train(tmp_path / "out", *flags, "--rounds", 1)
    (tmp_path / "data").rename(tmp_path / "moved")
    any_method.train(tmp_path / "out", *flags, "--data-dir", tmp_path / "moved", "--resume")
    write_tree(tmp_path / "more", ["bat", "cat", "cow", "dog"])
    message = complaint(any_method, tmp_path / "out", *flags, "--data-dir", tmp_path / "more", "--resume")
    assert "--resume" in message and "data_fingerprint" in message


# ---- a run folder that exists, or does not -------------------------------------------------------------------------

VALUES = "0.5", "1", "3", "12", "16", "x {}"  # of numbers and texts
NEED_OTHERS = set(  # not alone: they belong to a variant, a kind of pseudo-labels or a partition
    "model unlabelled_epochs conf_threshold fine_tune_epochs shuffle_classes shots intra_quantile inter_quantile "
    "conf_filter entropy_filter conf_quantile entropy_quantile allocation budget unseen_classes ceiling".split())


def other_settings(method, *given):
    """For each setting the flags that alone give it another value: {name: (flags, value before, value after)}."""
    before, found = vars(method.module.parse_args([*given])), {}
    for action in actions(method.name)[0]:
        flag, values = action.option_strings[0], action.choices or VALUES
        for flags in ([[each] for each in action.option_strings] if action.nargs == 0 else
                      [[flag, value] for value in values]):
            try:
                after = vars(method.module.parse_args([*given, *flags]))
            except common.UserError:
                continue
            if after[action.dest] != before[action.dest]:
                found[action.dest] = flags, before[action.dest], after[action.dest]
                break
    assert before.keys() - found.keys() <= NEED_OTHERS
    return found


def test_resume_lists_each_changed_setting(method, run_once):
    """Fails when a flag may change on a resume that can change figures, or when the message does not name it."""
    folder = run_once(method.name)
    for name, (flags, before, after) in other_settings(method, *method.short).items():
        if name not in common.Run.FREE | {"model", "pretrained"}:  # files may move, see test_fedcopl_run.py
            message = complaint(method, folder.parent, "--run-name", "run", "--resume", *flags)
            assert f"--{name.replace('_', '-')} {before} -> {after}" in message, message
    many = ["--rounds", 3, "--seed", 7, "--lr", 0.123]  # more rounds are allowed
    message = complaint(method, folder.parent, "--run-name", "run", "--resume", *many)
    assert " --lr 0.1 -> 0.123; " in message and message.endswith("; --seed 1 -> 7; --rounds may grow")
    assert "--rounds 2 -> 1" in complaint(method, folder.parent, "--run-name", "run", "--resume", "--rounds", 1)


@pytest.mark.parametrize("file, content", [
    *(("config.json", text) for text in (None, b"", b"{", b"[]", b"{}", b'{"model_type": "bert"}', b"\xff\xfe",
                                         b'{"script": "other.py", "settings": null}')),
    *(("checkpoint.pt", text) for text in (None, b"", b"hello", "half", [1], {"state": 1}))])
def test_resume_of_damaged_files(any_method, tmp_path, run_once, file, content):
    """A file that is missing, cut off or another program's is named, and all the files stay as they are."""
    path = shutil.copytree(run_once(any_method.name), tmp_path / "run") / file
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "half":
        os.truncate(path, path.stat().st_size // 2)
    else:
        torch.save(content, path)
    assert file in complaint(any_method, tmp_path, "--run-name", "run", "--resume")


def test_resume_of_nothing_and_of_another_script(any_method, tmp_path, run_once):
    message = complaint(any_method, tmp_path, "--run-name", "nothing", "--resume")
    assert "--resume" in message and str(tmp_path / "nothing") in message
    group = SEMI_SUPERVISED if any_method.name in SEMI_SUPERVISED else UNSUPERVISED
    other = next(name for name in group if name != any_method.name)
    message = complaint(any_method, run_once(other).parent, "--run-name", "run", "--resume")
    assert f"{os.path.basename(other)} -> {os.path.basename(any_method.name)}" in message


def test_what_exists_is_refused_and_stays(method, tmp_path, run_once):
    """Fails when a second start without --resume, or in a folder of something else, changes what is there."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("precious")
    for folder in (run_once(method.name), tmp_path / "empty", tmp_path / "file"):
        message = complaint(method, folder.parent, "--run-name", folder.name)
        assert all(word in message for word in (str(folder), "--resume", "--run-name"))
    assert (tmp_path / "file").read_text() == "precious"


def test_a_stray_rank_in_the_environment_is_no_rank(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = common.Ranks(argparse.Namespace(device="cpu", amp=None))
    assert (ranks.rank, ranks.world, ranks.first) == (0, 1, True)
