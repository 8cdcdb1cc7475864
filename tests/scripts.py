"""The method scripts as the tests run them: a table of short settings, and programs that start within a second."""

import copy
import csv
import importlib
import json
import math
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import open_clip
import torch

import common

ROOT = Path(__file__).resolve().parent.parent


# Hundreds of runs read the same digits, prepare them for the miniature CLIP and read the same vocabulary.
_digits, _prepare, _get_tokenizer = lru_cache(common.read_digits), common.Images.__getitem__, open_clip.get_tokenizer
_prepared, _tokenizer = {}, lru_cache(lambda name, config: _get_tokenizer(name))


def _prepare_once(images, index):
    if not (images.clip and isinstance(images.source, np.ndarray) and type(index) is slice and index == slice(None)):
        return _prepare(images, index)
    key = images.shape, images.source.tobytes()
    if key not in _prepared:
        _prepared[key] = _prepare(images, index)
    return _prepared[key].clone()


common.read_digits = lambda: copy.deepcopy(_digits())
common.Images.__getitem__ = _prepare_once
open_clip.get_tokenizer = lambda name: _tokenizer(name, repr(open_clip.get_model_config(name)))


class Script(NamedTuple):
    short: str  # two rounds of one local epoch on few, small digits: seconds on a CPU
    variants: list[str] = [""]  # settings with which a resumed run must equal the straight one
    needs_clip: bool = False  # also give it --model and --pretrained of the miniature CLIP


FSSL = (  # settings that all semi-supervised scripts know
    "--dataset digits --train-subset 200 --image-size 8 --width 8 --clients 4 --clients-per-round 3 --rounds 2 "
    "--local-epochs 1 --batch-size 16 --device cpu"
)
PLUG_IN = "--gpt --icpl --gpt-epochs 2"
CLIP = (  # settings that all scripts with a CLIP know
    "--dataset digits --train-subset 200 --clients 4 --rounds 2 --local-epochs 1 --batch-size 16 --refresh 2 "
    "--device cpu"
)
SCRIPTS = {
    "proxyfl.py": Script(
        f"{FSSL} --gpt-epochs 2 --batch-size 8",
        ["", "--variant paper --conf-threshold 0.3", "--shared-momentum", "--no-icpl --no-gpt --conf-threshold 0.3"],
    ),
    "baselines/fedavg.py": Script(FSSL, ["", "--prox-mu 0.1", "--labels all"]),
    "baselines/fixmatch.py": Script(f"{FSSL} --tau 0.17", ["", "--teacher local --prox-mu 0.1 --tau 0.3", PLUG_IN]),
    "baselines/flexmatch.py": Script(f"{FSSL} --tau 0.4", ["", "--no-warm-up"]),
    "baselines/fedmatch.py": Script(
        f"{FSSL} --lr 0.1 --lambda-s 1 --helper-interval 1 --conf-threshold 0.2", ["", "--helper-interval 3"]
    ),
    "baselines/fedlabel.py": Script(f"{FSSL} --tau 0.3", ["", "--two-phase --unlabelled-epochs 2", PLUG_IN]),
    "baselines/fedloke.py": Script(
        f"{FSSL} --warm-up-rounds 1 --entropy-threshold 2", ["", "--first-visit download", "--clip 0 --loke-mu 1"]
    ),
    "baselines/feddure.py": Script(FSSL, ["", "--variant official"]),
    "baselines/feddb.py": Script(f"{FSSL} --tau 0.12", ["", "--exact-simplex"]),
    "baselines/sage.py": Script(f"{FSSL} --tau 0.3", ["", PLUG_IN]),
    "baselines/fedproto.py": Script(f"{FSSL} --tau 0.15", ["", "--prototypes all --lambda-proto 3"]),
    "baselines/promptfl.py": Script(
        CLIP,
        [
            "",
            "--pseudo-labels cpl --refresh 3",
            "--pseudo-labels copl",
            "--pseudo-labels ifpl --shots grow --refresh 1",
        ],
        needs_clip=True,
    ),
    "baselines/pfedprompt.py": Script(
        CLIP,
        ["", "--refresh 1", "--refresh 1 --pseudo-labels copl --memory-shots 2", "--pseudo-labels fpl --shots grow"],
        needs_clip=True,
    ),
    "baselines/fedotp.py": Script(
        f"{CLIP} --ot-iterations 12",
        ["", "--refresh 1", "--ot sinkhorn --pseudo-labels copl"],
        needs_clip=True,
    ),
    "fedcopl.py": Script(
        CLIP,
        ["", "--refresh 3", "--shared-momentum --aggregate none", "--refresh 1 --aggregate text --no-allocation"],
        needs_clip=True,
    ),
}
HEADLINES = "proxyfl.py", "fedcopl.py"
SEMI_SUPERVISED = [name for name, script in SCRIPTS.items() if not script.needs_clip]
UNSUPERVISED = [name for name, script in SCRIPTS.items() if script.needs_clip]


def load(name):
    """The module of a script, "file.py" or "baselines/file.py"."""
    return importlib.import_module(name.removesuffix(".py").replace("/", "."))


class Method:
    """A script of the table, with its module and its short settings."""

    def __init__(self, name):
        self.name, self.table = name, SCRIPTS[name]
        self.module = load(name)
        self.short = self.table.short.split()
        if self.table.needs_clip:
            self.short += ["--model", str(mini_clip() / "mini.json"), "--pretrained", str(mini_clip() / "mini.pt")]

    def main(self, out_dir, *flags):
        """The script in this process; flags given here win over the short settings."""
        name = patch.object(sys, "argv", [str(ROOT / self.name)])  # a run folder says whose it is
        drawing = patch.object(common.Run, "_plot")  # takes longer than all else: only programs do it
        with name, drawing:
            self.module.main([*self.short, "--out-dir", str(out_dir), *map(str, flags)])

    def train(self, out_dir, *flags, name="run"):
        """One run in this process. Returns its folder."""
        self.main(out_dir, "--run-name", name, *flags)
        return out_dir / name

    def start(self, out_dir, *flags, **kwargs):
        """The same as a program that runs on its own: Program, which must be waited for."""
        return Program(ROOT / self.name, *self.short, "--out-dir", out_dir, *flags, **kwargs)

    def start_ranks(self, ranks, out_dir, *flags):
        """The same as `torchrun --nproc-per-node <ranks>` starts it, without torchrun: a list of Programs."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        return [
            self.start(out_dir, *flags, env={**place, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]


@lru_cache
def method(name):
    return Method(name)


# ---- a CLIP that is small enough for tests ------------------------------------------------------------------------

MINI_CONFIG = {
    "embed_dim": 24,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 32, "head_width": 16, "layers": 3},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def load_images(*args, memory_gb=math.inf, **kwargs):
    """A Dataset with its images prepared."""
    return common.cache_images(common.load_dataset(*args, **kwargs), memory_gb)


@lru_cache
def mini_clip():
    """A folder with mini.json and mini.pt: random weights, made once, whose answers spread over the digits.

    Random towers give almost the same feature for every image; the biases of their last layer norms take that common
    part away.
    """
    folder = Path(tempfile.mkdtemp(prefix="mini_clip_"))  # removed when the tests end, see conftest.py
    (folder / "mini.json").write_text(json.dumps(MINI_CONFIG))
    open_clip.add_model_config(folder / "mini.json")
    torch.manual_seed(0)
    clip = open_clip.create_model("mini").eval()
    images = load_images("digits", "data", 16, 200, clip=True).train_images
    texts = open_clip.get_tokenizer("mini")([f"a photo of a {digit}" for digit in range(10)])
    with torch.no_grad():
        clip.logit_scale.fill_(math.log(100))
        clip.visual.ln_post.register_forward_hook(lambda _, given, out: pooled.append(out[:, 0].mean(0)))
        clip.ln_final.register_forward_hook(
            lambda _, given, out: pooled.append(out[torch.arange(len(texts)), texts.argmax(1)].mean(0))
        )
        for norm, encode, inputs in (
            (clip.visual.ln_post, clip.encode_image, common.normalise(images, (0.5,) * 3, (0.27,) * 3)),
            (clip.ln_final, clip.encode_text, texts),
        ):
            pooled = []
            encode(inputs)
            norm.bias -= pooled[0]
    torch.save(clip.state_dict(), folder / "mini.pt")
    return folder


# ---- programs -----------------------------------------------------------------------------------------------------

# Importing torch takes seconds, so one server imports it once and forks: each program is a process of its own, with
# nothing of the tests in it, and runs the script's file from the top as `python script.py` does.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["torch.distributed", "torchvision.datasets", "sklearn.datasets", "open_clip", "matplotlib.figure"]
)


def _as_program(command, cwd, env, alone, draw, out, err):
    for target, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY), target)
    os.chdir(cwd)
    os.environ.update(env)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in a shell's background
    sys.argv = command
    if not draw:
        common.Run._plot = lambda *_: None
    if alone:
        sys.path[:] = [place for place in sys.path if Path(place).resolve() not in (ROOT, ROOT / "tests")]
        del sys.modules["common"]  # this file imports it
    sys.path.insert(0, os.path.dirname(command[0]))
    runpy.run_path(command[0], run_name="__main__")


class Program:
    """A script in a process of its own.

    alone: it finds no module of this repository but those beside it. draw: also curves.png, which takes longer than all
    else.
    """

    def __init__(self, path, *flags, cwd=None, env=None, alone=False, draw=False):
        self.files = [tempfile.NamedTemporaryFile("r") for _ in range(2)]
        self.command = [str(path), *map(str, flags)]
        self.process = PROCESSES.Process(
            target=_as_program,
            args=(
                self.command,
                str(cwd or tempfile.gettempdir()),
                env or {},
                alone,
                draw,
                *(file.name for file in self.files),
            ),
            daemon=True,
        )
        self.process.start()

    @property
    def running(self):
        return self.process.is_alive()

    def send_signal(self, which):
        os.kill(self.process.pid, which)

    def wait(self, timeout=120):
        """subprocess.CompletedProcess, as subprocess.run would return it."""
        self.process.join(timeout)
        if self.running:
            self.process.kill()
            self.process.join()
            raise subprocess.TimeoutExpired(self.command, timeout)
        return subprocess.CompletedProcess(self.command, self.process.exitcode, *(file.read() for file in self.files))


# ---- what a run leaves --------------------------------------------------------------------------------------------


def rows(folder):
    """rounds.csv but for the seconds."""
    with open(folder / "rounds.csv", newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


def labels_table(folder):
    """pseudo_labels.csv as {(round, class): {column: number}}."""
    with open(folder / "pseudo_labels.csv", newline="") as file:
        table = list(csv.DictReader(file))
    return {
        (int(row.pop("round")), row.pop("class")): {key: int(value) if value else None for key, value in row.items()}
        for row in table
    }


def checkpoint(folder):
    """The state in checkpoint.pt, without the rows, which hold seconds."""
    content = torch.load(folder / "checkpoint.pt", weights_only=True, map_location="cpu")
    return {name: value for name, value in content.items() if name != "rows"}


def state(folder):
    """The model that a run ended with."""
    return checkpoint(folder)["state"]


def n_bytes(state):
    return sum(value.numel() * value.element_size() for value in state.values())


def equal(a, b):
    """Whether two nested structures hold the same values, tensors bit by bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def same_run(first, second):
    """Whether two runs logged the same rounds and ended in the same state; their settings may differ."""
    return rows(first) == rows(second) and equal(checkpoint(first), checkpoint(second))
