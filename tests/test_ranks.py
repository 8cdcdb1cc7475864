"""Ranks share the clients and end bit-equal to one process; a lost rank ends the run with a message."""

import os
import signal
import subprocess
import sys
import time

import pytest
from scripts import HEADLINES, ROOT, rows, same_run
from scripts import method as find_method


def ended(programs, status=0):
    """What the ranks of a run said, once they have ended with this status."""
    done = [program.wait() for program in programs]
    assert [each.returncode for each in done] == [status] * len(done), [each.stderr for each in done]
    return done


def test_ranks_are_bit_equal_to_one_process(any_method, tmp_path):
    """2 ranks have several clients each; then, after a resume, 3 have one or two, or with few clients none."""
    one = any_method.train(tmp_path, "--rounds", 2, name="one")
    for ranks, rounds, flags in ((2, 1, []), (3, 2, ["--resume"])):
        done = ended(any_method.start_ranks(ranks, tmp_path, "--run-name", "many", "--rounds", rounds, *flags))
        assert done[0].stdout.count(f"round {rounds}/{rounds} | ") == 1 and f"| ranks {ranks}" in done[0].stdout
        assert all(each.stdout == each.stderr == "" for each in done[1:])  # one rank speaks
    assert same_run(one, tmp_path / "many")
    assert (one / "clients.csv").read_text() == (tmp_path / "many" / "clients.csv").read_text()


@pytest.mark.parametrize("name", HEADLINES)
def test_more_ranks_than_clients(name, tmp_path):
    method = find_method(name)
    flags = ["--clients", 1, *["--clients-per-round", 1] * ("--clients-per-round" in method.short)]
    one = method.train(tmp_path, *flags, name="one")
    ended(method.start_ranks(2, tmp_path, "--run-name", "two", *flags))
    assert same_run(one, tmp_path / "two")


def test_torchrun_starts_the_ranks(tmp_path):
    """The command line of the README; the other tests start the ranks without it, see Method.start_ranks."""
    method = find_method("proxyfl.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(ROOT / method.name), *method.short, "--out-dir", str(tmp_path), "--run-name", "many"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("round 2/2 | ") == 1, done.stderr
    assert same_run(method.train(tmp_path, name="one"), tmp_path / "many")


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("name", HEADLINES)
def test_lost_rank_ends_the_run_with_a_message_and_a_resumable_checkpoint(name, tmp_path, lost):
    def start(*flags):
        return find_method(name).start_ranks(2, tmp_path, "--run-name", "run", "--rounds", 400, *flags)

    def wait_for_round(rnd, programs):
        deadline = time.time() + 120
        while not (tmp_path / "run" / "rounds.csv").exists() or len(rows(tmp_path / "run")) < rnd:
            assert time.time() < deadline and all(program.running for program in programs)
            time.sleep(0.05)

    programs = start()
    wait_for_round(1, programs)
    programs[lost].send_signal(signal.SIGKILL)
    left = programs[1 - lost].wait(60)
    assert programs[lost].wait(10).returncode == -signal.SIGKILL
    assert left.returncode == 1 and "another rank has ended" in left.stderr and "Traceback" not in left.stderr
    assert "--resume" in left.stderr and left.stderr.count("\n") == 1
    done = len(rows(tmp_path / "run"))
    resumed = start("--resume")
    wait_for_round(done + 1, resumed)
    for program in resumed:
        program.send_signal(signal.SIGKILL)
        program.wait()
    assert 1 <= done < 400


@pytest.mark.parametrize("name", HEADLINES)
def test_mistakes_are_said_once(name, tmp_path):
    for flags, said in ((("--lr", -1), "argument --lr"), (("--shared-momentum",), "with 2 ranks")):
        errors = "".join(each.stderr for each in ended(find_method(name).start_ranks(2, tmp_path, *flags), 2))
        assert errors.count("error:") == errors.count("\n") == 1 and said in errors
    assert not list(tmp_path.iterdir())
