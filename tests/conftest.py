import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other

# Two rounds of one local epoch on few, small digits: seconds on a CPU. Flags given after these win.
SHORT = (
    "--dataset digits --train-subset 200 --image-size 8 --width 4 --clients 4 --clients-per-round 3 --rounds 2 "
    "--local-epochs 1 --batch-size 8 --gpt-epochs 2 --device cpu"
).split()


@pytest.fixture
def script(tmp_path):
    """Run a method script in a process of its own: script("proxyfl.py", *flags) -> CompletedProcess."""

    def run(name, *flags, check=True, env=None, cwd=tmp_path):
        command = [sys.executable, str(ROOT / name), *map(str, flags)]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **(env or {})}, timeout=300
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    return run
