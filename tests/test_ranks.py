"""torchrun: two ranks share the clients and end bit-equal to one process; a lost rank ends the run with a message."""

import os
import signal
import subprocess
import sys
import time

import torch
from conftest import ROOT, SHORT
from test_proxyfl_run import checkpoint, rows, same_run

import common

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(ranks, out_dir, *flags):
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(ROOT / "proxyfl.py"),
        *SHORT,
        "--out-dir",
        str(out_dir),
        *map(str, flags),
    ]


def test_ranks_are_bit_equal_to_one_process(tmp_path, script):
    """Three clients a round: with 2 ranks one of them has two; with 4, after a resume, one has none."""
    script(
        "proxyfl.py", *SHORT, "--out-dir", tmp_path, "--run-name", "one", "--rounds", 3, env={"OMP_NUM_THREADS": "1"}
    )
    subprocess.run(
        torchrun(2, tmp_path, "--run-name", "many", "--rounds", 2),
        env=ENV,
        check=True,
        capture_output=True,
        timeout=300,
    )
    done = subprocess.run(
        torchrun(4, tmp_path, "--run-name", "many", "--rounds", 3, "--resume"),
        env=ENV,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert same_run(tmp_path / "one", tmp_path / "many")
    assert done.stdout.count("round 3/3 | acc") == 1  # one rank speaks


def test_lost_rank_ends_the_run_with_a_message_and_a_resumable_checkpoint(tmp_path):
    process = subprocess.Popen(
        torchrun(2, tmp_path, "--run-name", "run", "--rounds", 400),
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.time() + 120
    while not (tmp_path / "run" / "checkpoint.pt").exists():
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.05)
    for pid in subprocess.run(
        ["pgrep", "-f", f"{ROOT / 'proxyfl.py'}.*{tmp_path}"], capture_output=True, text=True
    ).stdout.split():
        try:
            with open(f"/proc/{pid}/environ") as environ:
                if "\0RANK=1\0" in environ.read():
                    os.kill(int(pid), signal.SIGKILL)
        except FileNotFoundError:
            pass
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0 and "complete rounds: continue with the same command and --resume" in errors
    done = checkpoint(tmp_path / "run")["round"]
    assert 1 <= done < 400
    assert len(rows(tmp_path / "run")) >= done  # a last row without checkpoint: dropped on resume


def test_mistakes_are_said_once_and_shared_momentum_is_refused(tmp_path):
    done = subprocess.run(torchrun(2, tmp_path, "--alpha", 0), env=ENV, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and done.stderr.count("error: argument --alpha") == 1
    done = subprocess.run(
        torchrun(2, tmp_path, "--shared-momentum"), env=ENV, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0 and "--shared-momentum" in done.stderr and "2 ranks" in done.stderr
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
