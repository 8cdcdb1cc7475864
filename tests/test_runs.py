"""Every method script as a program: determinism, resume, kill -9, interruption, locks, files, an empty folder."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scripts import ROOT, SCRIPTS, UNSUPERVISED, Program, checkpoint, rows, same_run
from scripts import method as find_method

import common

OTHERS = sorted({path.name for path in ROOT.glob("*.py")} - {*SCRIPTS, "common.py"})  # no methods
VARIANTS = [(name, variant) for name, table in SCRIPTS.items() for variant in table.variants]


def test_same_command_same_bits_other_seed_other_bits(method, tmp_path):
    once = ["--rounds", 1]
    first, second = method.train(tmp_path, *once, name="a"), method.train(tmp_path, *once, name="b")
    assert same_run(first, second)
    other = method.train(tmp_path, *once, "--seed", 2, name="c")
    assert not same_run(first, other)
    assert (first / "clients.csv").read_text() == (other / "clients.csv").read_text()  # the split has a seed of its own
    split = method.train(tmp_path, *once, "--split-seed", 1, name="d")
    assert (first / "clients.csv").read_text() != (split / "clients.csv").read_text()


@pytest.mark.parametrize("name, variant", VARIANTS)
def test_resumed_run_equals_the_straight_one(tmp_path, name, variant):
    """With a CLIP: 2 rounds end with a labelling period or, with --refresh 3, in its middle."""
    method, flags = find_method(name), variant.split()
    part, whole = (2, 4) if name in UNSUPERVISED else (1, 2)
    straight = method.train(tmp_path, *flags, "--rounds", whole, name="straight")
    method.train(tmp_path, *flags, "--rounds", part, name="parts")
    parts = method.train(tmp_path, *flags, "--rounds", whole, "--resume", name="parts")
    assert same_run(straight, parts)
    for table in (path.name for path in straight.glob("*.csv") if path.name != "rounds.csv"):
        assert (straight / table).read_text() == (parts / table).read_text()
    assert json.loads((parts / "summary.json").read_text())["finished"]
    if not variant:
        before = (parts / "rounds.csv").read_bytes()
        method.train(tmp_path, "--rounds", whole, "--resume", name="parts")  # nothing left to do
        assert (parts / "rounds.csv").read_bytes() == before


def test_kill_9_in_any_round_then_resume(any_method, tmp_path):
    flags = ["--rounds", 4]
    any_method.train(tmp_path, *flags, name="straight")
    for attempt, wait_for in enumerate((0, 2)):  # complete rounds before the kill
        folder = tmp_path / f"killed{attempt}"
        program = any_method.start(tmp_path, *flags, "--run-name", folder.name)
        while program.running and not (
            (folder / "config.json").exists()
            and (wait_for == 0 or (folder / "rounds.csv").exists() and len(rows(folder)) >= wait_for)
        ):
            time.sleep(0.002)
        time.sleep(0.03 * attempt)
        program.send_signal(signal.SIGKILL)
        assert program.wait().returncode == -signal.SIGKILL
        done = any_method.start(tmp_path, *flags, "--run-name", folder.name, "--resume").wait()
        assert done.returncode == 0 and same_run(tmp_path / "straight", folder), (wait_for, done.stderr)


def test_row_without_its_checkpoint_is_dropped_on_resume(any_method, tmp_path):
    straight = any_method.train(tmp_path, "--rounds", 2, name="straight")
    parts = any_method.train(tmp_path, "--rounds", 1, name="parts")
    with open(parts / "rounds.csv", "a") as file:
        file.write((parts / "rounds.csv").read_text().splitlines()[-1] + "\n2,half a ro")
    any_method.train(tmp_path, "--rounds", 2, "--resume", name="parts")
    assert same_run(straight, parts)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_the_checkpoint_and_says_how_to_go_on(any_method, tmp_path, how):
    program = any_method.start(tmp_path, "--rounds", 500, "--run-name", "run")
    while not (tmp_path / "run" / "checkpoint.pt").exists():
        time.sleep(0.02)
        assert program.running
    program.send_signal(how)
    done = program.wait(60)
    assert done.returncode == 130 and "--resume" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert 1 <= checkpoint(tmp_path / "run")["round"] < 500


def test_divergence_stops_with_one_line_and_status_1(method, tmp_path):
    done = method.start(tmp_path, "--lr", "1e30", "--run-name", "run").wait()
    assert done.returncode == 1 and "diverged in round 1" in done.stderr and "Traceback" not in done.stderr
    assert "--resume" not in done.stderr and not (tmp_path / "run" / "checkpoint.pt").exists()


# ---- the run folder -----------------------------------------------------------------------------------------------

FILES = {"config.json", "clients.csv", "rounds.csv", "summary.json", "checkpoint.pt", "curves.png", "common.py"}
COLUMNS = {"round", "test_acc_pct", "bytes_up", "bytes_down", "seconds"}  # of every script, beside the losses
SUMMARY = """final_acc_pct mean_last10_acc_pct best_acc_pct best_round rounds seconds seconds_per_round bytes_up
    bytes_down finished""".split()


def test_run_folder_holds_what_the_contract_names(method, tmp_path):
    done = method.start(tmp_path, "--run-name", "run", "--rounds", 3, draw=True).wait()
    assert done.returncode == 0 and done.stderr == ""
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} >= FILES | {os.path.basename(method.name)}
    assert not list(folder.glob(".*"))  # no temporary file stays
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    config, summary = (
        json.loads((folder / name).read_text(), parse_constant=pytest.fail)  # strict JSON: no Infinity, no NaN
        for name in ("config.json", "summary.json")
    )
    assert config["script"] == os.path.basename(method.name) and config["settings"]["rounds"] == 3
    assert config["commit"] and config["device"].startswith("cpu") and config["versions"]["torch"]

    with open(folder / "rounds.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["round"] for row in table] == ["1", "2", "3"]
    assert COLUMNS < set(table[0]) and any(column.startswith("loss_") for column in table[0])
    for row in table:
        assert None not in row and None not in row.values() and not {"nan", "inf", "None"} & set(row.values())
        assert 0 <= float(row["test_acc_pct"]) <= 100 and float(row["seconds"]) > 0
        assert int(row["bytes_up"]) > 0 and int(row["bytes_down"]) > 0

    accuracy = [float(row["test_acc_pct"]) for row in table]
    assert set(SUMMARY) <= set(summary) and summary["finished"] is True and summary["rounds"] == 3
    assert summary["final_acc_pct"] == accuracy[-1] and summary["best_acc_pct"] == max(accuracy)
    assert accuracy[summary["best_round"] - 1] == max(accuracy)
    assert summary["mean_last10_acc_pct"] == pytest.approx(np.mean(accuracy), abs=1e-3)
    for total in ("bytes_up", "bytes_down"):
        assert summary[total] == sum(int(row[total]) for row in table)
    assert summary["seconds"] == pytest.approx(sum(float(row["seconds"]) for row in table), abs=0.01)

    with open(folder / "clients.csv", newline="") as file:
        clients = [{key: int(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert [row["client"] for row in clients] == [0, 1, 2, 3]
    kinds = [key for key in clients[0] if key != "client" and "_" not in key]
    assert kinds and all(row[kind] == sum(row[f"{kind}_{c}"] for c in range(10)) for row in clients for kind in kinds)
    assert sum(row[kind] for row in clients for kind in kinds if kind != "test") == 200

    settings = dict(word.split("=", 1) for word in done.stdout.splitlines()[0].split(" ") if "=" in word)
    assert settings["rounds"] == "3" and settings["seed"] == "1" and settings["dataset"] == "digits"
    lines = [line for line in done.stdout.splitlines() if line.startswith("round ")]
    assert [line.split(" | ")[0] for line in lines] == [f"round {k}/3" for k in (1, 2, 3)]
    said = [float(re.search(r"\| acc ([\d.]+) \|", line)[1]) for line in lines]
    assert said == pytest.approx(accuracy, abs=0.051)
    assert done.stdout.splitlines()[-1].startswith(f"final {accuracy[-1]:.2f} %")
    assert checkpoint(folder)["round"] == 3  # loaded with weights_only=True


def put_alone(method, folder):
    """The script and common.py in an empty folder. Returns the script's name."""
    for source in (ROOT / method.name, ROOT / "common.py"):
        shutil.copy(source, folder)
    return os.path.basename(method.name)


def check_alone(folder, name):
    (run,) = (folder / "runs").iterdir()
    assert run.name.startswith(f"{name.removesuffix('.py')}_digits_") and run.name.endswith("_s1")
    assert (run / "summary.json").exists()
    assert json.loads((run / "config.json").read_text())["commit"] == "unknown"  # it was this common.py


def test_script_and_common_alone_in_an_empty_folder(method, tmp_path):
    name = put_alone(method, tmp_path)
    done = Program(tmp_path / name, *method.short, cwd=tmp_path, alone=True).wait()
    assert done.returncode == 0, done.stderr
    check_alone(tmp_path, name)


@pytest.mark.parametrize("script", ["proxyfl.py", pytest.param("fedcopl.py", marks=pytest.mark.slow)])
def test_a_fresh_interpreter_with_the_spawn_start_method(tmp_path, script):
    method = find_method(script)
    name = put_alone(method, tmp_path)
    code = (
        "import multiprocessing, runpy, sys; multiprocessing.set_start_method('spawn'); "
        f"sys.argv = [{name!r}, *{method.short}]; runpy.run_path({name!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    check_alone(tmp_path, name)


@pytest.mark.parametrize("name", OTHERS)
def test_a_script_and_common_in_an_empty_folder_show_their_help(tmp_path, name):
    for file in (name, "common.py"):
        shutil.copy(ROOT / file, tmp_path)
    done = subprocess.run(
        [sys.executable, Path(name).name, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {Path(name).name}") and "--seed" in done.stdout
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {Path(name).name, "common.py"}  # asking for help leaves nothing behind


# ---- two processes, one folder ------------------------------------------------------------------------------------


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_processes_cannot_write_one_folder(any_method, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    run = any_method.train(tmp_path)
    (run / "notes").mkdir()
    (run / "notes" / "mine.txt").write_text("precious")
    before = everything(run)
    other = os.open(run, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    for flags in (["--resume", "--rounds", 3], ["--overwrite"], ["--overwrite", "--seed", 2]):
        with pytest.raises(common.UserError, match="another process"):
            any_method.train(tmp_path, *flags)
        assert everything(run) == before, flags  # nothing removed, nothing written
    os.close(other)
    any_method.train(tmp_path, "--resume", "--rounds", 3)
    assert len(rows(run)) == 3
    any_method.train(tmp_path, "--overwrite", "--rounds", 1)
    assert len(rows(run)) == 1 and not (run / "notes").exists()
    assert same_run(run, any_method.train(tmp_path, "--rounds", 1, name="fresh"))


def test_a_running_program_holds_its_folder(any_method, tmp_path):
    pytest.importorskip("fcntl")
    program = any_method.start(tmp_path, "--rounds", 500, "--run-name", "run")
    while not (tmp_path / "run" / "checkpoint.pt").exists():
        time.sleep(0.02)
        assert program.running
    program.send_signal(signal.SIGSTOP)
    before = everything(tmp_path)
    try:
        for flags in (["--resume"], ["--overwrite"]):
            with pytest.raises(common.UserError, match="another process"):
                any_method.train(tmp_path, "--rounds", 500, *flags)
            assert everything(tmp_path) == before
    finally:
        program.send_signal(signal.SIGCONT)
        program.send_signal(signal.SIGKILL)
        program.wait()
    any_method.train(tmp_path, "--overwrite", "--rounds", 1)  # the lock went with the process
    assert len(rows(tmp_path / "run")) == 1
