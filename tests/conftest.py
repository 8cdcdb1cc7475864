import shutil
import sys
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


@pytest.fixture(
    params=[pytest.param(name, marks=[] if name in scripts.HEADLINES else pytest.mark.slow) for name in scripts.SCRIPTS]
)
def any_method(request):
    """The same for what common.py does for all scripts alike: but for the headline scripts, in the slow suite."""
    return scripts.method(request.param)


@pytest.fixture
def script(tmp_path):
    """Run a script to its end in a process of its own: script("proxyfl.py", *flags) -> CompletedProcess."""

    def run(name, *flags, check=True, env=None, cwd=tmp_path):
        done = scripts.Program(ROOT / name, *flags, cwd=cwd, env=env).wait(300)
        assert not check or done.returncode == 0, done.stderr
        return done

    return run
