"""Runs as a whole: determinism, run folder, resume after a kill or a full disk, divergence, Ctrl-C, names."""

import argparse
import csv
import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import HEADLINES, ROOT, SCRIPTS, UNSUPERVISED, Program, checkpoint, rows, same_run
from scripts import method as find_method
from test_bad_input import other_settings

import common

VARIANTS = [(name, variant) for name, table in SCRIPTS.items() for variant in table.variants]


def test_same_command_same_bits_other_seed_other_bits(method, tmp_path):
    """Fails when something random has no seed, the split follows --seed, or an earlier split wins over the flags."""
    once = ["--rounds", 1]
    first, second = method.train(tmp_path, *once, name="a"), method.train(tmp_path, *once, name="b")
    assert same_run(first, second)
    other = method.train(tmp_path, *once, "--seed", 2, name="c")
    assert not same_run(first, other)
    assert (first / "clients.csv").read_text() == (other / "clients.csv").read_text()  # the split has a seed of its own
    split = method.train(tmp_path, *once, "--split-seed", 1, name="d")
    assert (first / "clients.csv").read_text() != (split / "clients.csv").read_text()


# ---- resume -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, variant", VARIANTS)
def test_resumed_run_equals_the_straight_one(tmp_path, name, variant):
    """Fails when a state is not saved, also where the folder moves and --rounds grows.

    With a CLIP: 2 rounds end with a labelling period or, with --refresh 3, in its middle.
    """
    method, flags = find_method(name), variant.split()
    part, whole = (2, 4) if name in UNSUPERVISED else (1, 2)
    straight = method.train(tmp_path, *flags, "--rounds", whole, name="straight")
    method.train(tmp_path, *flags, "--rounds", part, name="parts").rename(tmp_path / "moved")
    parts = method.train(tmp_path, *flags, "--rounds", whole, "--resume", name="moved")
    assert same_run(straight, parts)
    for table in (path.name for path in straight.glob("*.csv") if path.name != "rounds.csv"):
        assert (straight / table).read_text() == (parts / table).read_text()
    assert json.loads((parts / "summary.json").read_text())["finished"]
    if not variant:
        before = (parts / "rounds.csv").read_bytes()
        method.train(tmp_path, "--rounds", whole, "--resume", name="moved")  # nothing left to do
        assert (parts / "rounds.csv").read_bytes() == before


def test_kill_9_at_any_moment_then_resume(any_method, tmp_path):
    straight, folder = any_method.train(tmp_path, "--rounds", 6, name="straight"), tmp_path / "killed"
    for wait_for in (0, 1, 3):  # complete rounds before the kill
        resume = ["--resume"] * folder.exists()
        program = any_method.start(tmp_path, "--rounds", 6, "--run-name", "killed", *resume)
        while program.running and not (folder / ("rounds.csv" if wait_for else "config.json")).exists() or (
                wait_for and len(rows(folder)) < wait_for):
            time.sleep(0.002)
        time.sleep(0.03 * wait_for)
        program.send_signal(signal.SIGKILL)
        assert program.wait().returncode == -signal.SIGKILL
    done = any_method.start(tmp_path, "--rounds", 6, "--run-name", "killed", "--resume").wait()
    assert done.returncode == 0 and same_run(straight, folder), done.stderr


class Killed(BaseException):
    """Passes through every handler."""


def break_off(monkeypatch, how, file, number):
    """Let the number-th writing of a file of this name fail: the disk full half-way, killed before or after it."""
    writes = count(1)

    def breaking(honest, name_of):
        def write(source, *args):
            if file not in Path(name_of(source, *args)).name or next(writes) != number:
                return honest(source, *args)
            if how == "full disk":
                honest(source, args[0][: len(args[0]) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            if how == "killed after":
                honest(source, *args)
            raise Killed
        return write

    if how == "full disk":
        monkeypatch.setattr(Path, "write_bytes", breaking(Path.write_bytes, lambda path, _: path))
    else:
        monkeypatch.setattr(os, "replace", breaking(os.replace, lambda _, target: target))


@pytest.mark.parametrize("how", ["full disk", "killed before", "killed after"])
@pytest.mark.parametrize("file, number", [
    ("config.json", 1), ("clients.csv", 1),
    *((name, rnd) for rnd in (1, 2) for name in ("checkpoint.pt", "rounds.csv", "summary.json"))])
def test_broken_off_at_any_file(any_method, tmp_path, run_once, monkeypatch, how, file, number):
    """One line where the disk is full, never half a file, no round lost that is said to be kept, and it goes on."""
    with monkeypatch.context() as patched, pytest.raises((common.Stopped, Killed)) as caught:
        break_off(patched, how, file, number)
        any_method.train(tmp_path)
    kept = checkpoint_rounds(tmp_path / "run")
    assert kept in (number - 1, number)
    if how == "full disk":
        message = str(caught.value)
        assert "\n" not in message and "No space left" in message and (str(tmp_path / "run") in message)
        assert f"{kept} complete rounds" in message and "--resume" in message
        assert not list(tmp_path.rglob(".*"))  # nothing half-written stays
    folder = any_method.train(tmp_path, "--resume")
    assert same_run(run_once(any_method.name), folder)


def checkpoint_rounds(folder):
    file = folder / "checkpoint.pt"
    return len(torch.load(file, weights_only=True)["rows"]) if file.exists() else 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="the superuser alone may mount")
@pytest.mark.parametrize("kilobytes", [0, 4, 60, 300, 900])
def test_a_disk_that_is_really_full(any_method, tmp_path, kilobytes):
    """Of a disk of 4 MB all but so much is taken: the run ends with one line, and goes on when there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk]).returncode:
        pytest.skip("may not mount")
    try:
        (disk / "other").write_bytes(bytes(2**22 - 2**10 * kilobytes))
        flags = ["--rounds", 3, "--run-name", "run"]
        done = any_method.start(disk, *flags, draw=True).wait()
        assert done.returncode in (0, 1) and done.stderr.count("\n") == done.returncode
        assert done.returncode == 0 or "No space left" in done.stderr
        made, kept = (disk / "run").exists(), checkpoint_rounds(disk / "run")
        assert done.returncode == 0 or f"{kept} complete rounds" in done.stderr or not made
        (disk / "other").unlink()
        done = any_method.start(disk, *flags, *["--resume"] * made, draw=True).wait()
        assert done.returncode == 0 and same_run(any_method.train(tmp_path, "--rounds", 3), disk / "run"), done.stderr
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_the_checkpoint_and_says_how_to_go_on(any_method, tmp_path, how):
    program = any_method.start(tmp_path, "--rounds", 500, "--run-name", "run")
    while not (tmp_path / "run" / "checkpoint.pt").exists():
        time.sleep(0.02)
        assert program.running
    program.send_signal(how)
    done = program.wait(60)
    kept = checkpoint_rounds(tmp_path / "run")
    assert done.returncode == 130 and "--resume" in done.stderr
    assert done.stderr.count("\n") == 1 and 1 <= kept < 500


def test_divergence_stops_with_one_line_and_status_1(any_method, tmp_path):
    done = any_method.start(tmp_path, "--lr", "1e30", "--run-name", "run").wait()
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "diverged in round 1" in done.stderr and "keeps 0 complete rounds" in done.stderr
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


# ---- the run folder -----------------------------------------------------------------------------------------------

def made_up_run(out_dir, rounds, **settings):
    """A Run of two clients without any training."""
    args = argparse.Namespace(out_dir=str(out_dir), run_name="run", rounds=rounds, resume=False, device="cpu", amp=None)
    return common.Run(argparse.Namespace(**vars(args) | settings), common.Ranks(args))


@pytest.mark.filterwarnings("error")
def test_summary_and_last_line_of_twelve_rounds(tmp_path, capsys):
    """Final, best (the first of equals) and mean of the last ten by hand; curves of columns with gaps."""
    accuracy = [90, 10, 20, 30, 40, 50, 60, 70, 90, 80, 70, 61]
    run = made_up_run(tmp_path, 12, clients=2, alpha=math.inf)
    run.start(["cat", "dog"], {"train": (np.array([0, 1, 0, 0]), [np.arange(4), np.arange(0)])}, fact="known")
    for rnd in run.rounds():
        row = {"test_acc_pct": accuracy[rnd - 1], "loss_sup": None if rnd % 2 else 0.5, "loss_none": None}
        run.save(row | {"bytes_up": rnd, "bytes_down": 2}, {"state": {"weight": torch.ones(2)}})
    said = capsys.readouterr().out
    assert "final 61.00 % | mean of the last 10 rounds 57.10 % | best on the test set, no headline: 90.00 %" in said
    assert "1 of 2 clients own no train image" in said
    summary, config = (strict_json(tmp_path / "run" / name) for name in ("summary.json", "config.json"))
    wanted = {"final_acc_pct": 61, "mean_last10_acc_pct": 57.1, "best_acc_pct": 90, "best_round": 1, "rounds": 12,
              "bytes_up": 78, "bytes_down": 24, "finished": True}
    assert wanted.items() <= summary.items() and {"seconds", "seconds_per_round"} <= summary.keys()
    assert config["fact"] == "known" and config["settings"]["alpha"] == "inf"
    assert (tmp_path / "run" / "clients.csv").read_text().split() == ["client,train,train_cat,train_dog", "0,4,3,1",
                                                                      "1,0,0,0"]
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("row, state", [
    ({"loss_sup": math.nan}, {}), ({"loss_sup": -math.inf}, {}),
    ({}, {"state": {"weight": torch.tensor([1, math.nan])}}),
    ({}, {"personal": [torch.zeros(2), torch.tensor(math.inf, dtype=torch.bfloat16)]})])
def test_what_is_not_finite_is_never_saved(tmp_path, row, state):
    """Wherever it hides, the rounds before it are kept."""
    run, good = made_up_run(tmp_path, 3, clients=1), {"test_acc_pct": 50.0, "bytes_up": 1, "bytes_down": 1}
    run.start(["cat"], {"train": (np.zeros(1, int), [np.arange(1)])})
    with pytest.raises(common.Stopped, match="diverged in round 2.*not finite.*keeps 1 complete rounds"):
        for rnd in run.rounds():
            run.save(good | row if rnd == 2 else good, state if rnd == 2 else {})
    assert checkpoint_rounds(tmp_path / "run") == len(rows(tmp_path / "run")) == 1


def strict_json(path):
    """Without Infinity and NaN."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def check_contract(folder, method, said):
    """The files of a run of 3 rounds, what is in them, and what the run said."""
    name = os.path.basename(method.name)
    files = {"config.json", "clients.csv", "rounds.csv", "summary.json", "checkpoint.pt", "curves.png", "common.py",
             name}
    assert {path.name for path in folder.iterdir()} - {"pseudo_labels.csv"} == files
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    config, summary = strict_json(folder / "config.json"), strict_json(folder / "summary.json")
    assert config["script"] == name and config["settings"]["rounds"] == 3 and config["commit"] == "unknown"  # see below
    assert config["device"].startswith("cpu") and config["versions"]["torch"] == torch.__version__

    with open(folder / "rounds.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["round"] for row in table] == ["1", "2", "3"] and any(key.startswith("loss_") for key in table[0])
    for row in table:
        assert None not in row and None not in row.values() and not {"nan", "inf", "None"} & set(row.values())
        assert 0 <= float(row["test_acc_pct"]) <= 100 and float(row["seconds"]) > 0
        assert int(row["bytes_up"]) > 0 and int(row["bytes_down"]) > 0
    accuracy = [float(row["test_acc_pct"]) for row in table]
    assert summary["final_acc_pct"] == accuracy[-1] and summary["best_acc_pct"] == max(accuracy)
    assert summary["mean_last10_acc_pct"] == pytest.approx(np.mean(accuracy), abs=1e-4) and summary["finished"] is True
    for total in ("bytes_up", "bytes_down"):
        assert summary[total] == sum(int(row[total]) for row in table)
    assert summary["seconds"] == pytest.approx(sum(float(row["seconds"]) for row in table), rel=1e-4)

    with open(folder / "clients.csv", newline="") as file:
        clients = [{key: int(value) for key, value in row.items()} for row in csv.DictReader(file)]
    kinds = [key for key in clients[0] if key != "client" and "_" not in key]
    assert [row["client"] for row in clients] == [0, 1, 2, 3]
    assert kinds and all(row[kind] == sum(row[f"{kind}_{c}"] for c in range(10)) for row in clients for kind in kinds)
    assert sum(row[kind] for row in clients for kind in kinds if kind != "test") == 200

    assert {"rounds=3", "seed=1", "dataset=digits"} <= set(said[0].split())
    lines = [re.match(r"round (\d)/3 \| test_acc ([\d.]+)% \|", line) for line in said if line.startswith("round ")]
    assert [line[1] for line in lines] == ["1", "2", "3"]
    assert [float(line[2]) for line in lines] == pytest.approx(accuracy, rel=1e-3)
    assert said[-1].startswith(f"final {accuracy[-1]:.2f} % | mean of the last 3 rounds {np.mean(accuracy):.2f} %")


def test_script_and_common_alone_in_an_empty_folder(method, tmp_path):
    """Fails when a script needs another file, warns while it draws, breaks the contract, or its place matters."""
    for source in (method.name, "common.py"):
        shutil.copy(ROOT / source, tmp_path)
    program = tmp_path / os.path.basename(method.name)
    done = Program(program, *method.short, "--rounds", 3, cwd=tmp_path, alone=True, draw=True).wait()
    assert done.returncode == 0 and done.stderr == ""
    folder, = (tmp_path / "runs").iterdir()
    assert folder.name.startswith(f"{program.stem}_digits_{'b' if method.table.needs_clip else 'a'}0.1_s1_")
    check_contract(folder, method, done.stdout.splitlines())
    assert same_run(folder, method.train(tmp_path, "--rounds", 3))


@pytest.mark.parametrize("name", ["proxyfl.py", pytest.param("fedcopl.py", marks=pytest.mark.slow)])
def test_a_fresh_interpreter_that_spawns_and_prints_ascii(tmp_path, name):
    """Fails when an import starts something, processes cannot be spawned, or an accent in a path ends the run."""
    for source in (name, "common.py"):
        shutil.copy(ROOT / source, tmp_path)
    flags = [*find_method(name).short, "--out-dir", "exécutions", "--run-name", "été"]
    code = ("import multiprocessing, runpy, sys; multiprocessing.set_start_method('spawn'); "
            f"sys.argv = [{name!r}, *{flags}]; runpy.run_path({name!r}, run_name='__main__')")
    env = os.environ | {"PYTHONPATH": "", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env,
                          timeout=300)
    assert done.returncode == 0 and r"ex\xe9cutions/\xe9t\xe9" in done.stdout, done.stderr
    assert strict_json(tmp_path / "exécutions" / "été" / "summary.json")["finished"]


# ---- names --------------------------------------------------------------------------------------------------------

def test_default_name_tells_runs_apart(method):
    """Fails when two settings that can give other figures get one name, or what changes none gives another name."""
    def name(*flags):
        return method.module.parse_args([str(flag) for flag in flags]).run_name

    others = {setting: name(*flags) for setting, (flags, *_) in other_settings(method).items() if setting != "run_name"}
    free = {others.pop(setting) for setting in common.Run.FREE | {"rounds"} if setting in others}
    assert free == {name()} and len({name(), *others.values()}) == len(others) + 1
    assert name() == f"{Path(method.name).stem}_digits_{'b' if method.table.needs_clip else 'a'}0.1_s1"
    assert name("--lr", 0.25, "--split-seed", 3).endswith("_s1_split-seed-3_lr-0.25")


TEMPLATES = ["a {}", "a-{}", "a ({})", "x" * 300 + " {}", "x" * 301 + " {}", "è" * 150 + " {}", "caf\udce9 {}"]  # the last: no UTF-8


def test_names_of_texts_that_no_file_could_have(tmp_path):
    """Cut names and names without their odd characters still differ, and are names that a folder can have."""
    names = {find_method("fedcopl.py").module.parse_args(["--template", text]).run_name for text in TEMPLATES}
    assert len(names) == len(TEMPLATES) and all(re.fullmatch(r"[\w.+-]{1,200}", name) for name in names)
    for name in names:
        (tmp_path / name).mkdir()


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_of_two_starts_of_one_name_the_second_is_refused(any_method, tmp_path, monkeypatch):
    """The second found no folder, then was slow to load its data."""
    honest, first = common.load_dataset, []

    def slow(*args, **kwargs):
        monkeypatch.setattr(common, "load_dataset", honest)
        any_method.train(tmp_path)
        first.append(everything(tmp_path))
        return honest(*args, **kwargs)

    monkeypatch.setattr(common, "load_dataset", slow)
    with pytest.raises(common.UserError, match="another run of this name"):
        any_method.train(tmp_path)
    assert first == [everything(tmp_path)] and not list(tmp_path.glob(".*"))
