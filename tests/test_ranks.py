"""Ranks share the clients and end bit-equal to one process; a lost rank ends the run with a message."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from scripts import ROOT, checkpoint, rows, same_run
from scripts import method as find_method

import common

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(ranks, method, out_dir, *flags):
    """The command line of the README. Most tests start the ranks without torchrun, see Method.start_ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, str(ROOT / method.name), *method.short, "--out-dir", str(out_dir), *flags]


def test_ranks_are_bit_equal_to_one_process(method, tmp_path):
    """2 ranks have several clients each; then 4, after a resume, have one or, with 3 clients a round, none."""
    one = method.train(tmp_path, "--rounds", 2, name="one")
    many = [(2, 1, []), (4, 2, ["--resume"])]
    for ranks, rounds, flags in many:
        programs = method.start_ranks(ranks, tmp_path, "--run-name", "many", "--rounds", rounds, *flags)
        done = [program.wait() for program in programs]
        assert [each.returncode for each in done] == [0] * ranks, [each.stderr for each in done]
        assert done[0].stdout.count(f"round {rounds}/{rounds} | acc") == 1 and f"| ranks {ranks}" in done[0].stdout
        assert all(each.stdout == each.stderr == "" for each in done[1:])  # one rank speaks
    assert same_run(one, tmp_path / "many")
    assert (one / "clients.csv").read_text() == (tmp_path / "many" / "clients.csv").read_text()


def test_more_ranks_than_clients(any_method, tmp_path):
    flags = ["--clients", 1, *(["--clients-per-round", 1] if "--clients-per-round" in any_method.short else [])]
    one = any_method.train(tmp_path, *flags, name="one")
    done = [program.wait() for program in any_method.start_ranks(2, tmp_path, "--run-name", "two", *flags)]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    assert same_run(one, tmp_path / "two")


def test_torchrun_starts_the_ranks(tmp_path):
    method = find_method("proxyfl.py")
    command = torchrun(2, method, tmp_path, "--run-name", "many", "--rounds", "3")
    done = subprocess.run(command, env=ENV, check=True, capture_output=True, text=True, timeout=300)
    assert same_run(method.train(tmp_path, "--rounds", 3, name="one"), tmp_path / "many")
    assert done.stdout.count("round 3/3 | acc") == 1  # one rank speaks


def wait_for_checkpoint(folder, running):
    deadline = time.time() + 120
    while not (folder / "checkpoint.pt").exists():
        assert time.time() < deadline and running()
        time.sleep(0.05)


def check_what_is_left(folder, errors):
    assert "complete rounds: continue with the same command and --resume" in errors
    done = checkpoint(folder)["round"]
    assert 1 <= done < 400
    assert len(rows(folder)) >= done  # a last row without checkpoint: dropped on resume


@pytest.mark.parametrize("lost", [0, 1])
def test_lost_rank_ends_the_run_with_a_message_and_a_resumable_checkpoint(any_method, tmp_path, lost):
    programs = any_method.start_ranks(2, tmp_path, "--run-name", "run", "--rounds", 400)
    wait_for_checkpoint(tmp_path / "run", lambda: all(program.running for program in programs))
    programs[lost].send_signal(signal.SIGKILL)
    left = programs[1 - lost].wait(60)
    assert programs[lost].wait(10).returncode == -signal.SIGKILL
    assert left.returncode == 1 and "another rank has ended" in left.stderr and "Traceback" not in left.stderr
    if lost:
        check_what_is_left(tmp_path / "run", left.stderr)
    state = checkpoint(tmp_path / "run")
    resumed = any_method.start_ranks(2, tmp_path, "--run-name", "run", "--rounds", 400, "--resume")
    wait_for = state["round"] + 1
    deadline = time.time() + 120
    while len(rows(tmp_path / "run")) < wait_for:
        assert time.time() < deadline and all(program.running for program in resumed)
        time.sleep(0.05)
    for program in resumed:
        program.send_signal(signal.SIGKILL)
        program.wait()


def test_lost_rank_under_torchrun(tmp_path):
    method = find_method("proxyfl.py")
    process = subprocess.Popen(
        torchrun(2, method, tmp_path, "--run-name", "run", "--rounds", "400"),
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_checkpoint(tmp_path / "run", lambda: process.poll() is None)
    for pid in subprocess.run(
        ["pgrep", "-f", f"{ROOT / method.name}.*{tmp_path}"], capture_output=True, text=True
    ).stdout.split():
        try:
            with open(f"/proc/{pid}/environ") as environ:
                if "\0RANK=1\0" in environ.read():
                    os.kill(int(pid), signal.SIGKILL)
        except FileNotFoundError:
            pass
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    check_what_is_left(tmp_path / "run", errors)


def test_mistakes_are_said_once(method, tmp_path):
    done = [program.wait() for program in method.start_ranks(2, tmp_path, "--lr", -1)]
    assert [each.returncode for each in done] == [2, 2]
    assert "".join(each.stderr for each in done).count("error: argument --lr") == 1
    assert not list(tmp_path.iterdir())


def test_shared_momentum_is_refused(method, tmp_path):
    if not hasattr(method.module.parse_args(method.short), "shared_momentum"):
        pytest.skip("has no --shared-momentum")
    done = [program.wait() for program in method.start_ranks(2, tmp_path, "--shared-momentum")]
    assert [each.returncode for each in done] == [2, 2]
    assert "--shared-momentum" in done[0].stderr and "2 ranks" in done[0].stderr and done[0].stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_packing_keeps_values_dtypes_and_structure():
    value = {
        "a": torch.randn(3, 4),
        "n": torch.tensor(7),
        "b": torch.rand(5, dtype=torch.float64).to(torch.bfloat16),
        "e": torch.empty(0),
    }
    pair = common.Dataset(value["a"], value["n"], torch.tensor([True, False]), torch.zeros(2, 0), {"x": value["b"]}, ())
    back = common._unpack(common._pack(pair, torch.device("cpu")), pair)
    assert type(back) is common.Dataset and torch.equal(back.train_images, value["a"]) and back.train_labels.item() == 7
    assert (
        back.test_images.tolist() == [True, False]
        and torch.equal(back.class_names["x"], value["b"])
        and back.test_labels.shape == (2, 0)
    )
    mixed = common._unpack(common._pack(value, torch.device("cpu")), value)
    assert all(torch.equal(mixed[key], value[key]) and mixed[key].dtype == value[key].dtype for key in value)
