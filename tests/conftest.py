import shutil
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other

import scripts  # noqa: E402


def pytest_sessionfinish():
    if scripts.mini_clip.cache_info().currsize:  # in each process that runs tests
        shutil.rmtree(scripts.mini_clip())


@pytest.fixture(params=scripts.SCRIPTS)
def method(request):
    """Each method script in turn, see scripts.py."""
    return scripts.method(request.param)


SLOW_BUT_HEADLINES = [pytest.param(name, marks=[] if name in scripts.HEADLINES else pytest.mark.slow)
                      for name in scripts.SCRIPTS]


@pytest.fixture(params=SLOW_BUT_HEADLINES)
def any_method(request):
    """The same for what common.py does for all scripts alike: but for the headline scripts, in the slow suite."""
    return scripts.method(request.param)


@pytest.fixture(scope="session")
def run_once(tmp_path_factory):
    """run_once(name, flags) -> the folder of a run that several tests read: made once, none may change it."""
    @lru_cache
    def run(name, flags=""):
        return scripts.method(name).train(tmp_path_factory.mktemp("run"), *flags.split())
    return run


@pytest.fixture
def script(tmp_path):
    """Run a script to its end in a process of its own: script("proxyfl.py", *flags) -> CompletedProcess."""
    def run(name, *flags, check=True, env=None, cwd=tmp_path):
        done = scripts.Program(ROOT / name, *flags, cwd=cwd, env=env).wait(300)
        assert not check or done.returncode == 0, done.stderr
        return done
    return run
