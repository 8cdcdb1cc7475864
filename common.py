"""What every method script shares: command line, process ranks, run folder, data, partitions, augmentation.

What a reader looks for in a paper is in the scripts: losses, pseudo-labels, the local loop, aggregation, evaluation.
"""

import argparse
import csv
import hashlib
import io
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torchvision.datasets import CIFAR10, CIFAR100, DTD, SVHN, EuroSAT, FashionMNIST, Flowers102
from torchvision.datasets.folder import is_image_file
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize
from tqdm import tqdm

# ---- Command line and seeding -------------------------------------------------------------------------------------

switch = argparse.BooleanOptionalAction                  # --gpt, --no-gpt


class UserError(Exception):
    """The user's mistake or a missing file: one line on stderr, exit status 2."""


class Stopped(Exception):
    """The run cannot go on (a rank lost, the disk full, not finite): one line, exit status 1; what is saved stays."""


def number(kind, low, high=math.inf):
    """An argparse type: a finite int or float in [low, high]."""
    def parse(text):
        value = kind(text)
        if not low <= value <= high or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not in [{low}, {high}{'])'[high == math.inf]}")
        return value
    parse.__name__ = kind.__name__                       # argparse says: invalid int value
    return parse


def concentration(text):
    """An argparse type: the concentration of a Dirichlet distribution; inf is i.i.d."""
    return math.inf if text == "inf" else number(float, 0.001, 1e6)(text)


class Parser(argparse.ArgumentParser):
    """The flags that all scripts have. presets: {data set: {flag: value}}, for flags left at None until parse()."""

    def __init__(self, name, doc, presets):
        super().__init__(prog=f"{name}.py", description=doc.split("\n\n")[0], allow_abbrev=False, epilog="In brackets: "
                         "the default and its source; [preset] goes by data set, see PRESETS in the script.")
        self.presets = presets
        self.run, self.data, self.federation, self.optimiser = map(self.add_argument_group, (
            "run", "data", "federation", "optimiser (SGD; fresh for each client and round)"))
        add = self.run.add_argument
        add("--seed", type=number(int, 0, 2**31 - 1), default=1, help="drives everything random but the split [1]")
        add("--split-seed", type=number(int, 0, 2**31 - 501), default=0, help="of the split; 0 is the official one [0]")
        add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps [auto: what exists]")
        add("--amp", action=switch, default=None, help="bfloat16 autocast, losses in float32 [on for CUDA]")
        add("--out-dir", default="runs", help="where run folders go [runs]")
        add("--run-name", help="the run folder [script, data set, split, seed, and what differs from the defaults]")
        add("--resume", action="store_true", help="continue the run in its folder; --rounds may grow")
        add = self.data.add_argument
        add("--dataset", type=squeeze, choices=presets, default="digits", help="[digits]")
        add("--data-dir", default="data", help="where data sets are; what is missing is downloaded [data]")
        add("--train-subset", type=number(int, 1), help="use N training images, equally many a class [all]")
        add = self.federation.add_argument
        add("--clients", type=number(int, 1), help="K [preset]")
        add("--rounds", type=number(int, 1), help="R [preset]")
        add("--local-epochs", type=number(int, 1), help="E [preset]")
        add = self.optimiser.add_argument
        add("--batch-size", type=number(int, 1), help="B [preset]")
        add("--lr", type=number(float, 0), help="[preset]")
        add("--momentum", type=number(float, 0, 1), help="[preset]")
        add("--weight-decay", type=number(float, 0), help="[preset]")

    def add_semi_supervised_flags(self):
        """What all scripts have whose clients own a few labels and train a ResNet-8. Returns the parser."""
        self.run.add_argument("--compile", action=switch, default=False, help="torch.compile the network [off]")
        self.data.add_argument("--image-size", type=number(int, 8, 1024), help="side, a multiple of 4 pixels [preset]")
        self.data.add_argument("--flip", action=switch, default=None, help="mirror images at random [preset]")
        add = self.federation.add_argument
        add("--clients-per-round", type=number(int, 1), help="M [preset]")
        add("--alpha", type=concentration, default=0.1, help="Dirichlet concentration; inf: i.i.d. [0.1; also 0.5, 1]")
        add("--partition", choices=("official", "dirichlet"), default="official", help="published, textbook [official]")
        add("--label-ratio", type=number(float, 1e-9, 1), default=0.1, help="labelled share [0.1; Table 6: 0.2]")
        add = self.optimiser.add_argument
        if "mu" in self.presets["digits"]:
            add("--mu", type=number(int, 1), help="U = mu * B unlabelled images a step [preset]")
        # below 8 oneDNN's channels-last kernels break memory on CPUs without AVX-512 (torch 2.14.1)
        add("--width", type=number(int, 8), help="channels of ResNet-8's first stage [preset]")
        return self

    def parse(self, argv=None, more=lambda args: {}):
        """The settings, checked; flags left at None get the preset's value, or that of more(args)."""
        args = self.parse_args(argv)
        preset = self.presets[args.dataset] | more(args)
        if args.clients and "clients_per_round" in preset:
            preset["clients_per_round"] = min(args.clients, preset["clients_per_round"])
        # the run's name holds all that differs from the defaults and can change figures: ablations never collide
        split = [f"{name[0]}{value:g}" for name, value in vars(args).items() if name in ("alpha", "beta")]
        words = [Path(self.prog).stem, args.dataset, *split, f"s{args.seed}"]
        for name, value in vars(args).items():
            default, flag = preset.get(name, self.get_default(name)), name.replace("_", "-")
            if value is None:
                setattr(args, name, default)
            elif value != default and name not in Run.FREE | {"dataset", "alpha", "beta", "seed", "rounds"}:
                words.append(flag if value is True else f"no-{flag}" if value is False else f"{flag}-{value}")
        text = "_".join(words)
        name = re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII)
        if name != text or len(name) > 200:              # what was lost still tells runs apart
            name = f"{name[:190]}_{hashlib.sha256(os.fsencode(text)).hexdigest()[:8]}"
        args.run_name = args.run_name or name
        if getattr(args, "clients_per_round", 0) > args.clients:
            self.error(f"--clients-per-round {args.clients_per_round} is more than --clients {args.clients}")
        if getattr(args, "image_size", 0) % 4:
            self.error(f"--image-size {args.image_size} is not a multiple of 4")
        return args

    def error(self, message):
        raise UserError(message)


def stream(seed, *names):
    """The named random stream of a seed: stream(1, "client", 12, 3) depends on nothing that was drawn before."""
    words = np.frombuffer(hashlib.sha256("/".join(map(str, names)).encode()).digest(), np.uint32)
    return np.random.default_rng([seed, *words.tolist()])


def to_device(array, device):
    """An array or tensor on the device; from the host to a GPU through pinned memory, without waiting for the copy."""
    tensor = torch.as_tensor(array)
    pin = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)


def launch(main):
    """Run a script's main() and turn its end into the exit status: 0, 1, 2 the user's mistake, 130 interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)                # ends as by Ctrl-C
    sys.stdout.reconfigure(errors="backslashreplace")    # an accent in a path must not end a run
    status, message = 0, ""
    try:
        main()
        sys.stdout.flush()
    except (UserError, Stopped, OSError) as error:
        status, message = 2 if isinstance(error, UserError) else 1, f"error: {one_line(error)}"
        if isinstance(error, OSError):                   # standard output itself may be what cannot be written to
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except KeyboardInterrupt:
        status, message = 130, "stopped: where its run folder exists, the same command and --resume continue the run"
    # before they are connected, all ranks read the same flags and find the same mistake: one speaks
    if message and (dist.is_initialized() or os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ):
        print(message, file=sys.stderr, flush=True)
    if dist.is_initialized() and status:
        os._exit(status)                                 # other ranks may be gone: leave without waiting for them
    sys.exit(status)


def one_line(error):
    """An error in one line: our own as it is, others with the name of their kind."""
    return f"{type(error).__name__}: " * (not isinstance(error, (UserError, Stopped))) + " ".join(str(error).split())


# ---- Process ranks ------------------------------------------------------------------------------------------------

def choose_device(text, local_rank=0):
    """`auto`, `cpu`, `mps`, `cuda` or `cuda:N` as a torch.device that exists on this machine."""
    there = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    kind, _, index = text.strip().lower().partition(":")
    kind = next(name for name, count in there.items() if count) if kind == "auto" else kind
    if kind not in there or index and not index.isdigit() or int(index or 0) >= there[kind]:
        raise UserError(f"--device {text}: expected auto, cpu, cuda, cuda:N or mps; there are {there} on this machine")
    return torch.device(kind, int(index or local_rank % there[kind])) if kind == "cuda" else torch.device(kind)


class Ranks:
    """The processes that torchrun started, or the only one; they share the clients of a round among themselves."""

    def __init__(self, args):
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.rank, local_rank = (int(os.environ[name]) if self.world > 1 else 0 for name in ("RANK", "LOCAL_RANK"))
        self.first, self.first_here = self.rank == 0, local_rank == 0
        self.device = choose_device(args.device, local_rank)
        args.amp = self.device.type == "cuda" if args.amp is None else args.amp
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def first_then_others(self, function):
        """Call function() in the first process of each machine (it may download), then in the others."""
        for turn in (True, False):
            self._exchange(dist.barrier)                 # all are connected: a failure from here on is seen by all
            if turn == self.first_here:
                result = function()
        return result

    def mine(self, items):
        """This rank's part of a list: items rank, rank + world, ..."""
        return items[self.rank::self.world]

    def gather(self, results, total):
        """On rank 0 all `total` results, tensors in dicts and NamedTuples, in the order of `mine`; elsewhere None."""
        if self.world == 1:
            return results
        everyone = [None] * self.world if self.first else None
        self._exchange(dist.gather_object, tree_map_only(torch.Tensor, torch.Tensor.cpu, results), everyone)
        if self.first:
            return [_like(everyone[i % self.world][i // self.world], results[0]) for i in range(total)]

    def broadcast(self, value):
        """The value of rank 0 (a tensor, or a dict or NamedTuple of them) on every rank."""
        if self.world == 1:
            return value
        box = [tree_map_only(torch.Tensor, torch.Tensor.cpu, value)]
        self._exchange(dist.broadcast_object_list, box)
        return value if self.first else _like(box[0], value)

    def _exchange(self, operation, *args):
        if self.world == 1:
            return
        try:
            if not dist.is_initialized():                # CPU tensors: megabytes a round, against minutes of training
                dist.init_process_group("gloo", timeout=timedelta(hours=1))
            operation(*args)
        except RuntimeError as error:
            raise Stopped("another rank has ended or does not answer: continue with the same command and --resume "
                          f"({str(error).splitlines()[0][:120]})") from None


def _like(value, model):
    """value with its tensors on the devices of model's, which has the same structure."""
    return tree_map(lambda leaf, own: leaf.to(own.device) if isinstance(own, torch.Tensor) else leaf, value, model)


# ---- Run folder ---------------------------------------------------------------------------------------------------

class Run:
    """The run folder <out_dir>/<run_name>, and all that a run says: a script hands over rows and states, no more.

    checkpoint.pt holds the rows too: a kill at any moment leaves one truth, and rounds.csv and summary.json follow it.
    The constructor only reads. On a resume settings in FREE and `free` may change, and --rounds may grow.
    """

    FREE = {"data_dir", "cache_gb", "device", "amp", "out_dir", "run_name", "resume"}

    def __init__(self, args, ranks, free=()):
        self.path, self.ranks, self.script = Path(args.out_dir).expanduser() / args.run_name, ranks, Path(sys.argv[0])
        self.settings = {key: str(value) if value == math.inf else value for key, value in vars(args).items()}
        self.rows, self.checkpoint, self.config, self.extra = [], None, None, {}
        if Path(args.run_name).name != args.run_name or args.run_name == ".." or len(os.fsencode(args.run_name)) > 200:
            raise UserError(f"--run-name {args.run_name!r}: expected a plain folder name of at most 200 bytes")
        check_writable(self.path, f"--out-dir {args.out_dir}")
        begun = any(self.path.glob("[!.]*"))             # if not, nothing or what a kill or a full disk left of a start
        if args.resume and (begun or not self.path.is_dir()):
            self._read(self.FREE | {*free})
        elif self.path.exists() and not args.resume:
            raise UserError(f"{self.path} exists: continue it with --resume, choose another --run-name, or remove it")

    def _read(self, free):
        """Settings, rows and state of the run to be resumed; whatever is not its continuation is refused."""
        file, now = self.path / "checkpoint.pt", {"script": self.script.name} | self.settings
        with blame(f"{self.path / 'config.json'} for --resume"):
            self.config = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
            then = {"script": self.config["script"]} | self.config["settings"]
            names = ["script"] if then["script"] != now["script"] else {**then, **now}.keys() - free
            changed = [f"--{name.replace('_', '-')} {then.get(name)} -> {now.get(name)}" for name in sorted(names)
                       if then.get(name) != now.get(name) and not (name == "rounds" and now[name] > then[name])]
        if changed:
            raise UserError(f"--resume: {self.path} has other settings: {'; '.join(changed)}; --rounds may grow")
        if file.exists():
            with blame(file):
                self.checkpoint = torch.load(file, weights_only=True, map_location="cpu")
                self.rows = self.checkpoint["rows"]
        elif (self.path / "rounds.csv").exists():
            raise UserError(f"--resume: {self.path} has rounds, but its checkpoint.pt is missing")

    def restore(self, fresh):
        """What the run begins with: `fresh`, a NamedTuple, or on a resume what the checkpoint has in its place."""
        return _like(type(fresh)(*map(self.checkpoint.get, fresh._fields)), fresh) if self.checkpoint else fresh

    def start(self, class_names, owned, **facts):
        """Make the folder, or continue it, and say what runs on what.

        owned: {kind of images: (labels, [indices of each client's])}. facts: what a resumed run must find unchanged.
        """
        if not self.ranks.first:
            return
        config = {"script": self.script.name, "settings": self.settings, **facts, **environment(self.ranks.device)}
        changed = [f"{key} {self.config.get(key)} -> {value}" for key, value in facts.items()
                   if self.config and self.config.get(key) != value]
        if changed:
            raise UserError(f"--resume: not what {self.path} began with: {'; '.join(changed)}")
        counts = {kind: np.stack([np.bincount(labels[own], minlength=len(class_names)) for own in parts])
                  for kind, (labels, parts) in owned.items()}               # (K, C) each
        try:
            self.path.mkdir(parents=True, exist_ok=self.settings["resume"])
        except FileExistsError:                          # of two starts of one name the second to come here is refused
            raise UserError(f"{self.path} exists: another run of this name has begun meanwhile") from None
        self._write("config.json", json.dumps(config, indent=1))
        columns = {"client": range(self.settings["clients"])} | {kind: own.sum(1) for kind, own in counts.items()}
        columns |= {f"{kind}_{name}": own[:, c] for kind, own in counts.items() for c, name in enumerate(class_names)}
        self.write_table("clients.csv", [dict(zip(columns, numbers)) for numbers in zip(*columns.values())])
        for source in (self.script, Path(__file__)):     # the code as it ran
            if source.suffix == ".py" and source.is_file():
                self._write(source.name, source.read_bytes())
        self._write_rounds()
        print(" ".join(f"{key}={value}" for key, value in self.settings.items()))
        print(*(f"{key} {config[key]}" for key in config if key != "settings"), f"ranks {self.ranks.world}", sep=" | ")
        for kind, own in counts.items():
            print(f"{kind} images by client (rows, the first) and class (columns); {(own.sum(1) == 0).sum()} of "
                  f"{len(own)} clients own no {kind} image", own[:20], sep="\n")

    def rounds(self):
        """The rounds still to do, each timed up to save(). Ends with curves.png and a summary."""
        done, wanted = len(self.rows), self.settings["rounds"]
        for rnd in tqdm(range(done + 1, wanted + 1), initial=done, total=wanted, unit="round",
                        disable=None if self.ranks.first else True):
            self.clock = time.perf_counter()
            yield rnd
        if self.ranks.first:
            self._plot()
            end = self.summary()
            print(f"final {end['final_acc_pct']:.2f} % | mean of the last {min(10, end['rounds'])} rounds "
                  f"{end['mean_last10_acc_pct']:.2f} % | best on the test set, no headline: {end['best_acc_pct']:.2f} %"
                  f" in round {end['best_round']} | {end['seconds']:.0f} s | {self.path}")

    def save(self, row, state):
        """End a round: its row, {column: number or None}, and in tensors all that a resumed run needs; rank 0 alone."""
        row = {"round": len(self.rows) + 1, **row, "seconds": time.perf_counter() - self.clock}
        broken = [name for name, value in (row | state).items() for leaf in tree_leaves(value)
                  if isinstance(leaf, (float, torch.Tensor)) and not torch.as_tensor(leaf).isfinite().all()]
        if broken:
            raise Stopped(f"training diverged in round {row['round']}: {broken[0]} is not finite; try a lower --lr "
                          f"({self.path} keeps {len(self.rows)} complete rounds)")
        rows, file = [*self.rows, row], io.BytesIO()
        torch.save({**state, "rows": rows}, file)
        self._write("checkpoint.pt", file.getvalue())                # first: it makes the round count
        self.rows = rows
        self._write_rounds()
        shown = [f"{name.removesuffix('_pct')} {value:.4g}{'%' * name.endswith('_pct')}" for name, value in row.items()
                 if value is not None and re.match("test|loss|pl_|low|set|pooled|clients_empty", name)]
        tqdm.write(" | ".join([f"round {row['round']}/{self.settings['rounds']}", *shown, f"{row['seconds']:.1f} s"]))

    def _write_rounds(self):
        if self.rows:
            self.write_table("rounds.csv", self.rows)
            self._write("summary.json", json.dumps(self.summary(), indent=1))

    def write_table(self, name, rows):
        """A CSV file of the folder, a dict a row, written anew as a whole; None gives an empty cell."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
        self._write(name, text.getvalue())

    def _write(self, name, content):
        """Write to a temporary name, then rename: a reader, a kill or a full disk never meets half a file."""
        part = self.path / f".{name}.tmp"
        try:
            part.write_bytes(content if isinstance(content, bytes) else content.encode())
            os.replace(part, self.path / name)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise Stopped(f"cannot write {self.path / name} ({error.strerror}); {len(self.rows)} complete rounds are "
                          "kept: make room, then continue with the same command and --resume") from None

    def summary(self):
        """Final, mean of the last ten and best accuracy (the best is picked on test data: no headline), costs."""
        accuracy = [float(f"{row['test_acc_pct']:.6g}") for row in self.rows]
        total = {name: sum(row[name] for row in self.rows) for name in ("seconds", "bytes_up", "bytes_down")}
        return {"final_acc_pct": accuracy[-1], "mean_last10_acc_pct": round(float(np.mean(accuracy[-10:])), 4),
                "best_acc_pct": max(accuracy), "best_round": int(np.argmax(accuracy)) + 1, "rounds": len(accuracy),
                **total, "seconds_per_round": round(total["seconds"] / len(accuracy), 3),
                "finished": len(accuracy) >= self.settings["rounds"], **self.extra}

    def _plot(self):
        """curves.png: shares and losses over the rounds."""
        from matplotlib.figure import Figure                                # a second to import, and only needed here
        figure, file = Figure(figsize=(11, 4), layout="constrained"), io.BytesIO()
        for axes, title, pattern in zip(figure.subplots(1, 2), ("%", "loss"), (".*_pct", "loss.*")):
            for name in filter(re.compile(pattern).fullmatch, self.rows[0]):
                values = np.array([row[name] for row in self.rows], dtype=float)            # None becomes NaN: a gap
                axes.plot(range(1, len(values) + 1), values, label=name)
                axes.legend(fontsize="small")
            axes.set(ylabel=title, xlabel="round")
        figure.savefig(file, format="png")
        self._write("curves.png", file.getvalue())


def check_writable(path, flag):
    """A UserError that names the flag, unless `path` can be made or its folder written to."""
    parent = next(place for place in path.absolute().parents if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{flag}: {parent} is not a folder that can be written to")


def environment(device):
    """What a result depends on beside its settings: commit ("+changes" if the tree differs), device, versions."""
    git = "git", "-C", Path(__file__).parent, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"
    commit = shutil.which("git") and subprocess.run(git, capture_output=True, text=True).stdout.strip()
    cpu = f"{device.type} {platform.machine()} with {torch.get_num_threads()} threads"
    packages = [name for name in ("torch", "torchvision", "open_clip", "numpy") if name in sys.modules]
    return {"commit": commit or "unknown",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
            "versions": {"python": platform.python_version(), **{p: sys.modules[p].__version__ for p in packages}}}


PSEUDO_LABELS = {"pl_used_pct": ("used", "images"), "pl_acc_pct": ("correct", "images"),
                 "pl_used_acc_pct": ("used_correct", "used")}        # columns of log_row


def log_row(names, columns, uploads, accuracy, bytes_up, bytes_down):
    """One row of rounds.csv: the uploads' metrics, summed, as shares and means; the bytes are those of one client.

    names: of the sums in each upload's `metrics`. columns: {column: (sum, sum to divide by)}; None where that is 0.
    """
    total = dict(zip(names, torch.stack([upload.metrics for upload in uploads]).cpu().double().sum(0).tolist()))
    trained = sum(bool(upload.weight > 0) for upload in uploads)
    means = {column: (100 if column.endswith("_pct") else 1) * total[part] / total[whole] if total[whole] else None
             for column, (part, whole) in columns.items()}
    return {"test_acc_pct": accuracy, **means, "clients_trained": trained, "clients_empty": len(uploads) - trained,
            "bytes_up": bytes_up * trained, "bytes_down": bytes_down * trained}


# ---- Data: images into tensors ------------------------------------------------------------------------------------
# torchvision reads, downloads and verifies what it knows, at its places below --data-dir. All else, and any of those
# too, are image folders <data-dir>/<name>/{train,test}/<class>/*, see tools/layout_data.py. The digits are embedded.
# A reader gives class names, and for train and test images, files or an array (n, H, W[, 3]), with their labels.

DATASETS = {"digits": 10, "cifar10": 10, "cifar100": 100, "svhn": 10, "cinic10": 10, "fashionmnist": 10, "dtd": 47,
            "resisc45": 45, "cub": 200, "ucf101": 101, "eurosat": 10, "flowers102": 102, "folder": None}     # classes
DIGITS = [str(digit) for digit in range(10)]
EUROSAT_WORDS = ("annual crop land, forest, brushland or shrubland, highway or road, "      # as GRIP has them
                 "industrial buildings or commercial buildings, pasture land, permanent crop land, "
                 "residential buildings or homes or apartments, river, lake or sea").split(", ")
TORCHVISION = {                     # name: torchvision's class, and {file below its root: address} of what it downloads
    "cifar10": (CIFAR10, {CIFAR10.filename: CIFAR10.url}), "cifar100": (CIFAR100, {CIFAR100.filename: CIFAR100.url}),
    "svhn": (SVHN, {SVHN.split_list[split][1]: SVHN.split_list[split][0] for split in ("train", "test")}),
    "fashionmnist": (FashionMNIST, {f"FashionMNIST/raw/{file}": FashionMNIST.mirrors[0] + file
                                    for file, _ in FashionMNIST.resources}),
    "dtd": (DTD, {"dtd/dtd-r1.0.1.tar.gz": DTD._URL}),
    "flowers102": (Flowers102, {f"flowers-102/{file}": Flowers102._download_url_prefix + file
                                for file, _ in Flowers102._file_dict.values()}),
    "eurosat": (EuroSAT, {"eurosat/EuroSAT.zip": "https://huggingface.co/datasets/torchgeo/eurosat/resolve/"
                          "c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip"})}


def squeeze(text):
    """What counts in the name of a data set: CIFAR-10 and cifar_10 are the same."""
    return re.sub(r"[\W_]+", "", str(text).lower())


def prompt_names(name, class_names):
    """Class names as CLIP should read them: 012.Yellow_headed_Blackbird, ApplyEyeMakeup, T-shirt/top as words."""
    words, first = [], {}
    for official, text in zip(class_names, EUROSAT_WORDS if name == "eurosat" else class_names):
        text = re.sub(r"^(\d+[\s._-]+)+(?=[^\W\d_])", "", text)             # an index before the name
        text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text.replace("_", " ").replace("/", " or "))
        words.append(" ".join((text.lower() if name == "cub" else text).split()))
        other = first.setdefault(words[-1].lower(), official)               # CLIP reads everything in lower case
        if other != official:
            raise UserError(f"{name}: classes {other} and {official} would both be called {words[-1]!r}: rename one")
    return words


@contextmanager
def blame(path):
    """Turn whatever goes wrong while `path` is read into one line that names it; parsers raise all kinds of errors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        advice = "" if getattr(error, "errno", None) else ": damaged, incomplete or not the expected content"
        raise UserError(f"cannot read {path} ({one_line(error)}){advice}") from error


def read_digits():
    """scikit-learn's digits have no official split. Ours: sorted by class, every fifth image is test (1438 + 359)."""
    from sklearn.datasets import load_digits
    grey, labels = load_digits(return_X_y=True)                             # (1797, 64) values 0..16
    images, is_test = (grey.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8), np.zeros(len(labels), dtype=bool)
    is_test[np.argsort(labels, kind="stable")[4::5]] = True
    return DIGITS, [(images[split], labels[split]) for split in (~is_test, is_test)]


def read_torchvision(name, root, download=False):
    """A data set of TORCHVISION in its official split; RuntimeError unless it is below root, whole and unharmed."""
    kind = TORCHVISION[name][0]
    if name == "eurosat":                                   # no official split: every fifth image of a class is test
        whole = kind(root, download=download)               # and each class has a multiple of five
        if len(whole) != 27000:
            raise RuntimeError(f"{len(whole)} images, expected 27000")
        train = [sample for i, sample in enumerate(whole.samples) if i % 5 != 4]
        return whole.classes, [tuple(zip(*train)), tuple(zip(*whole.samples[4::5]))]
    if name in ("dtd", "flowers102"):                       # train and validation together are train
        train, val, test = (kind(root, split=split, download=download) for split in ("train", "val", "test"))
        train = train._image_files + val._image_files, train._labels + val._labels
        return test.classes, [train, (test._image_files, test._labels)]
    if name == "svhn":                                      # without the `extra` split; torchvision labels zero 0
        parts = [kind(root, split=split, download=download) for split in ("train", "test")]
        return DIGITS, [(part.data.transpose(0, 2, 3, 1), part.labels) for part in parts]
    parts = [kind(root, train=train, download=download) for train in (True, False)]
    return parts[0].classes, [(np.asarray(part.data), part.targets) for part in parts]


def read_folders(name, root):
    """root/{train,test}/<class>/*: images sorted by class, then by file name; what is hidden is overlooked."""
    files = [sorted(path for path in root.glob(f"{split}/[!.]*/[!.]*") if is_image_file(path.name))
             for split in ("train", "test")]
    train, test = (sorted({path.parent.name for path in paths}) for paths in files)
    if train != test or not train or len(train) != (DATASETS[name] or len(train)):
        apart = " ".join(sorted({*train} ^ {*test})[:10])
        raise UserError(f"{name}: {root} has images of {len(train)} classes in train and {len(test)} in test, expected "
                        f"{DATASETS[name] or 'the same'}{f'; in one alone: {apart}' if apart else ''}")
    if not all(map(str.isprintable, train)):                # it could go into no table
        raise UserError(f"{root}: a class folder's name is not UTF-8, rename it: {' '.join(train)!a}")
    return train, [(paths, [train.index(path.parent.name) for path in paths]) for paths in files]


def find_data(name, data_dir):
    """Where the images are from, and what the reader gives; downloads what torchvision knows and is not there."""
    if name == "digits":
        return "embedded", *read_digits()
    for root in (data_dir, data_dir / name, data_dir.parent) if name in TORCHVISION else ():
        with blame(root), suppress(RuntimeError, FileNotFoundError):        # torchvision's words for: not there
            return "original files", *read_torchvision(name, root)
    places = [data_dir] if name == "folder" else [data_dir / name, data_dir]
    for root in places:
        if (root / "train").is_dir() and (root / "test").is_dir():
            return "image folders", *read_folders(name, root)
    tree = f"images as {places[0]}/{{train,test}}/<class>/*.png, or name the folder that holds the data with --data-dir"
    if name not in TORCHVISION:
        tool = f"; python tools/layout_data.py {name} lays them out once" * (name != "folder")
        raise UserError(f"{name}: expected {tree}{tool}")
    socket.setdefaulttimeout(15)                            # torchvision sets none: a dead proxy would hang for minutes
    try:
        return "original files", *read_torchvision(name, data_dir, download=True)
    except Exception as error:                              # no network, no space, no permission, wrong MD5 sum, ...
        wanted = " and ".join(f"{address} as {data_dir / file}" for file, address in TORCHVISION[name][1].items())
        raise UserError(f"{name}: not found in {data_dir} and the download failed ({one_line(error)}); fetch {wanted} "
                        f"by hand, or put {tree}") from None


class Images:
    """Images that are prepared when they are asked for: images[index] is (n, 3, S, S) uint8 on the CPU.

    source: files, or an array (N, H, W[, 3]) of uint8. Short side, then centre; clip: as open_clip prepares them.
    """
    dtype, device = torch.uint8, torch.device("cpu")

    def __init__(self, source, side, clip=False):
        self.source, self.shape, self.clip = source, torch.Size((len(source), 3, side, side)), clip
        kind = InterpolationMode.BICUBIC if clip else InterpolationMode.BILINEAR
        self.view = Compose([Resize(side, kind), CenterCrop(side)])

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        """index: a slice, or whole numbers or booleans in a 1-D tensor (on any device), array or list."""
        index = np.arange(len(self))[index.cpu().numpy() if isinstance(index, torch.Tensor) else index]
        images = torch.empty(len(index), *self.shape[1:], dtype=torch.uint8)
        if isinstance(self.source, np.ndarray) and self.source.shape[1:3] == self.shape[2:]:
            pixels = torch.from_numpy(self.source[index])                   # as they are; grey is repeated
            return images.copy_(pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2))
        with ThreadPoolExecutor() as pool:
            for place, image in enumerate(pool.map(self._prepare, (self.source[i] for i in index))):
                images[place] = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return images

    def _prepare(self, item):
        if isinstance(item, np.ndarray):
            return self.view(Image.fromarray(item).convert("RGB"))
        with blame(item), Image.open(item) as image:
            image = ImageOps.exif_transpose(image)
            if image.mode[0] in "IF":                       # 16-bit grey; Pillow would clip it: all above 255 white
                grey = np.asarray(image)
                if image.mode == "F" or grey.min() < 0 or grey.max() > 65535:
                    raise ValueError(f"pixels of mode {image.mode} without a known range")
                image = Image.fromarray(((grey.astype(np.int64) + 128) // 257).astype(np.uint8))
            if image.has_transparency_data:                 # over white
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return self.view(image.convert("RGB"))


class Dataset(NamedTuple):
    train_images: torch.Tensor      # (N, 3, S, S) uint8; Images until they are prepared
    train_labels: torch.Tensor      # (N,) int64
    test_images: torch.Tensor
    test_labels: torch.Tensor
    class_names: list[str]          # class_names[label]
    source: str                     # where images and split are from: say it when you quote a result


def load_dataset(name, data_dir, side, train_subset=None, clip=False, skip_share=0.0):
    """Find a data set; its images, squares of `side` pixels, are prepared when asked for, see cache_images.

    clip: prepare them as CLIP has them, with words for class names. train_subset, skip_share: see chosen_images.
    """
    data_dir = Path(data_dir).expanduser().absolute()
    if data_dir.exists() and not data_dir.is_dir():
        raise UserError(f"--data-dir {data_dir}: is a file, not a folder")
    source, class_names, splits = find_data(name, data_dir)
    class_names = prompt_names(name, class_names) if clip else list(class_names)
    (images, labels), (test_images, test_labels) = splits
    labels, test_labels = (torch.as_tensor(part, dtype=torch.int64) for part in (labels, test_labels))
    chosen = chosen_images(labels, class_names, train_subset, skip_share)
    images = images[chosen.numpy()] if isinstance(images, np.ndarray) else [images[i] for i in chosen]
    return Dataset(Images(images, side, clip), labels[chosen], Images(test_images, side, clip), test_labels,
                   class_names, source)


def chosen_images(labels, class_names, n=None, skip_share=0.0):
    """Sorted indices of n training images (None: all), evenly spaced in each class; the first take the remainder."""
    chosen = []
    for label, name in enumerate(class_names):
        own = (labels == label).nonzero().flatten()
        own = own[math.ceil(skip_share * len(own) - 1e-9):]     # tiny_clip.py has seen these; 0.07 * 100 > 7 in floats
        wanted = len(own) if n is None else n // len(class_names) + (label < n % len(class_names))
        if not 1 <= wanted <= len(own):
            flags = f"--train-subset {n}" if len(own) else f"--skip-share {skip_share}"
            raise UserError(f"{flags}: {wanted} training images of class {name}, expected 1 to {len(own)}")
        chosen.append(own[torch.arange(wanted) * len(own) // wanted])
    return torch.cat(chosen).sort().values


def cache_images(data, memory_gb=None):
    """The Dataset with its Images prepared, unless they need more GiB than this (None: than half of the memory)."""
    if memory_gb is None:                                   # shared by all processes; not known on Windows
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2 ** 34
        memory_gb = memory / 2 ** 31 / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    train, test = data.train_images, data.test_images
    if (len(train) + len(test)) * math.prod(train.shape[1:]) > memory_gb * 2 ** 30:
        return data
    return data._replace(train_images=train[:], test_images=test[:])


def fingerprint(data):
    """A short hash of all images and labels of a Dataset: the same data, whatever files they came from."""
    digest = hashlib.sha256()
    for part in data[:4]:
        for start in range(0, len(part), 512):
            digest.update(part[start:start + 512].contiguous().numpy())
    return digest.hexdigest()[:16]


def channel_stats(images):
    """Mean and standard deviation of each channel of (N, 3, S, S) uint8 images, in 0..1, from their histograms."""
    count = np.stack([np.bincount(images[:, channel].flatten().numpy(), minlength=256) for channel in range(3)])
    share, level = count / images[:, 0].numel(), np.arange(256) / 255
    mean = share @ level
    return tuple(mean.tolist()), tuple(np.sqrt(share @ level ** 2 - mean ** 2).clip(min=1e-3).tolist())


class FederatedData(NamedTuple):    # of a semi-supervised run, all clients' data; a client reads its own part
    images: torch.Tensor            # (n, 3, S, S) uint8 on the device
    labels: torch.Tensor            # (n,) true labels; those of unlabelled images reach the log alone
    labelled: list                  # one index array a client
    unlabelled: list
    stats: tuple                    # mean and deviation of each channel of the training images, in 0..1
    test_images: torch.Tensor
    test_labels: torch.Tensor
    class_names: list
    facts: dict                     # where the images are from, and their fingerprint

    def pool(self, client):
        """Indices of the images that the client uses without labels: its labelled ones come last."""
        return np.concatenate([self.unlabelled[client], self.labelled[client]])

    def owned(self):
        """Labels and each client's images, for the run folder."""
        labels = self.labels.cpu().numpy()
        return {"labelled": (labels, self.labelled), "unlabelled": (labels, self.unlabelled)}


def semi_supervised_data(args, device):
    """Load, split and place the data of a semi-supervised run."""
    data = cache_images(load_dataset(args.dataset, args.data_dir, args.image_size, args.train_subset), math.inf)
    labels = data.train_labels.numpy()
    per_class = np.bincount(labels, minlength=len(data.class_names))
    if args.dataset == "svhn" and per_class.min() >= 4600:
        per_class = np.full_like(per_class, 4600)           # official: "10 %" is 460 of each class
    per_class = np.maximum(1, np.round(args.label_ratio * per_class).astype(int))
    parts = partition(labels, args.clients, args.alpha, per_class, args.partition, args.split_seed)
    facts = {"data_source": data.source, "data_fingerprint": fingerprint(data)}
    images, labels, *test = (part.to(device) for part in data[:4])
    return FederatedData(images, labels, *parts, channel_stats(data.train_images), *test, data.class_names, facts)


# ---- Partitions: which images are labelled, which client owns them ------------------------------------------------

def partition(labels, clients, alpha, per_class, kind="official", seed=0):
    """Split off per_class labelled images of each class, then share these and the others among the clients.

    kind: see official_shares and dirichlet_shares; in the former the class mixes of a client's labelled and unlabelled
    images differ. Smaller alpha is more skewed, inf is i.i.d.; seed 0: the published split. Returns (labelled,
    unlabelled), two lists with one index array a client: every image has one owner.
    """
    labels = np.asarray(labels)
    if clients > len(labels):
        raise UserError(f"--clients {clients}: more clients than training images ({len(labels)}; --alpha {alpha})")
    random_state = np.random.RandomState(7 + seed)
    members = [random_state.permutation(np.flatnonzero(labels == c)) for c in range(int(labels.max()) + 1)]
    cut = list(zip(members, np.broadcast_to(per_class, len(members))))
    shares = {"official": official_shares, "dirichlet": dirichlet_shares}[kind]
    labelled, unlabelled = [own[:n] for own, n in cut], [own[n:] for own, n in cut]
    return shares(labelled, clients, alpha, seed), shares(unlabelled, clients, alpha, seed)


def official_shares(class_members, clients, alpha, seed):
    """The published protocol: not one Dirichlet draw over all clients, but two-way draws inside i.i.d. slices.

    The shuffled images are cut into clients/2 slices. In each, every class is divided between two parts with
    Dir(alpha, alpha); a part that already holds half of the slice gets nothing more; all is drawn again until both
    hold a quarter of it, at most 1,000 times. The parts, end to end, are cut into equal shares: no client is empty.
    """
    if math.isinf(alpha):
        shares = np.arange(1, clients) / clients
        return _by_client(np.split(own, (shares * len(own)).astype(int)) for own in class_members)
    random_state = np.random.RandomState(seed)
    pairs = np.array([(i, c) for c, own in enumerate(class_members) for i in own], np.int64).reshape(-1, 2)
    random_state.shuffle(pairs)                              # the same permutation as shuffling a list of its rows
    slices, width, ordered = math.ceil(clients / 2), int(2 / clients * len(pairs)), []
    for k in range(slices):
        part = pairs[k * width:] if k == slices - 1 else pairs[k * width:(k + 1) * width]
        ways = 1 if k == slices - 1 and clients % 2 else 2   # an odd number of clients leaves one alone
        by_class = [part[part[:, 1] == c, 0] for c in range(len(class_members))]
        for _ in range(1000):
            owned = [[] for _ in range(ways)]
            for members in by_class:
                share = random_state.dirichlet(np.repeat(alpha, ways))
                if not np.isfinite(share).all():             # underflow at a tiny alpha: its limit, one owner takes all
                    share = np.eye(ways)[random_state.randint(ways)]
                share = share * [len(images) < len(part) / ways for images in owned]
                if share.sum() == 0:                         # both are full: what is left is an empty class,
                    share = np.ones(ways)                    # or an owner of a share drawn as 0 takes it
                for images, more in zip(owned, deal(members, share / share.sum())):
                    images.extend(more.tolist())
            if min(map(len, owned)) >= int(0.5 * len(part) / ways):
                break
        ordered.extend(owned)
    return np.array_split(np.array(sum(ordered, []), dtype=np.int64), clients)


def dirichlet_shares(class_members, clients, alpha, seed):
    """Textbook (Hsu et al. 2019): one draw from Dir(alpha, ..., alpha) divides each class; a client can be empty."""
    if math.isinf(alpha):                                    # the limit: dealt out like cards, one class after another
        return [np.concatenate(class_members)[client::clients] for client in range(clients)]
    rng = stream(seed, "dirichlet")                          # labelled and unlabelled images get the same shares
    draws = [rng.dirichlet(np.full(clients, alpha)) for _ in class_members]
    return _by_client(np.split(own, np.round(np.cumsum(share)[:-1] * len(own)).astype(int))
                      for own, share in zip(class_members, draws))


def _by_client(parts):                                       # [class][client] -> [client]: one array a client
    return [np.concatenate(own) for own in zip(*parts)]


def deal(members, share):
    """Cut one class's images by shares (clients,) that sum to 1; what the rounding down leaves is the last client's."""
    return np.split(members, (np.cumsum(share) * len(members)).astype(int)[:-1])


def clip_partition(train_labels, test_labels, clients, beta, kind="dirichlet", seed=0, shuffle=False):
    """Share training and test images among the clients: FedCoPL's published split, the same draws in the same order.

    kind: "dirichlet" (smaller beta is more skewed), "quantity" or "iid". Returns (train, test), two lists with one
    index array a client: every image has one owner; a client may own no test image.
    """
    sets = [np.asarray(train_labels), np.asarray(test_labels)]
    classes = 1 + max(int(labels.max()) for labels in sets)
    if clients > len(sets[0]):
        raise UserError(f"--clients {clients}: more clients than training images ({len(sets[0])}; --beta {beta})")
    random_state = np.random.RandomState(500 + seed)
    random_state.choice(classes, classes, replace=False)     # drawn by the official program while it reads class names
    members = [[np.flatnonzero(labels == c) for c in range(classes)] for labels in sets]
    if kind == "quantity":
        return quantity_shares(members, clients, random_state, shuffle)
    owned = skewed_shares(members, clients, math.inf if kind == "iid" else beta, random_state)
    for images in sum(zip(*owned), ()):                      # a client's training images, then its test images
        random_state.shuffle(images)
    return owned


def skewed_shares(members, clients, beta, random_state, tries=200):
    """Each class is divided by one draw from Dir(beta, ..., beta) over the clients, the same for training and test.

    In either set a client that holds its even share already gets nothing more, so the two mixes can part. All is drawn
    again until each client owns 10 training images (fewer if there are not enough); after `tries`, the largest hands
    images to the smallest. beta inf: equal parts of each class, slightly uneven by the floats' rounding.
    """
    even = math.isinf(beta)
    total = [sum(map(len, of_set)) for of_set in members]
    least = 0 if even else min(10, total[0] // clients)
    for _ in range(tries):
        parts, sizes = [[], []], np.zeros((2, clients))
        for of_class in zip(*members):
            of_class = [random_state.permutation(images) for images in of_class]
            drawn = np.full(clients, 1 / clients) if even else random_state.dirichlet(np.repeat(beta, clients))
            for k, images in enumerate(of_class):
                room = (sizes[k] < total[k] / clients) | even
                share = drawn * room
                if not share.sum() > 0:                      # beta so small that the draw is 0 or NaN there
                    share = np.eye(clients)[random_state.choice(np.flatnonzero(room) if room.any() else clients)]
                parts[k].append(deal(images, share if even else share / share.sum()))
                sizes[k] += [len(images) for images in parts[k][-1]]
        if sizes[0].min() >= least:
            break
    train, test = map(_by_client, parts)
    while min(map(len, train)) < least:
        small, large = np.argmin([len(images) for images in train]), np.argmax([len(images) for images in train])
        train[small], train[large] = np.append(train[small], train[large][-1]), train[large][:-1]
    return train, test


def quantity_shares(members, clients, random_state, shuffle):
    """Each client holds ceil(C / 5) classes: a class goes to the first fifth of the clients that still have room.

    All receivers but the last get a uniform number of its images, consecutive ones as published or shuffled, from a
    K-th of the even share to that share; the last gets the rest. Some numbers of classes and clients leave a client
    without any class (the official program then stops): it owns nothing.
    """
    classes = len(members[0])
    room = np.full(clients, math.ceil(classes / min(clients, 5)))            # fewer than 5 clients: more than a fifth
    parts = [[[np.empty(0, np.int64)] for _ in range(clients)] for _ in members]
    for of_class in zip(*members):
        receivers = np.flatnonzero(room)[:max(1, int(0.2 * clients))]
        room[receivers] -= 1
        for part, images in zip(parts, of_class):
            images = random_state.permutation(images) if shuffle else images
            share = len(images) / len(receivers)
            low, high = int(max(share / clients, 10 / classes)), int(share)
            numbers = [random_state.randint(low, high) if low < high else high for _ in receivers[:-1]]
            for client, more in zip(receivers, np.split(images, np.cumsum(numbers, dtype=int))):
                part[client].append(more)
    return [[np.concatenate(of_client) for of_client in part] for part in parts]


# ---- Augmentation --------------------------------------------------------------------------------------------------
# FixMatch (Sohn et al., NeurIPS 2020, arXiv v2), Sec. 2.3 and its appendix, on whole batches of (n, 3, S, S) uint8.
# Random numbers come in as uniform float32 draws in [0, 1), one row an image, made by the caller on the host: a seed,
# round and client give the same views on every device. Shapes are fixed, and nothing waits for the host.
WEAK_DRAWS = 3      # columns of `draws`: flip, shift down, shift right
STRONG_DRAWS = 13   # those 3 for its own weak view, (operation, level, apply?, sign) twice, cutout centre down, right
OPERATIONS = ("AutoContrast", "Brightness", "Color", "Contrast", "Equalize", "Identity", "Posterize", "Rotate",
              "Sharpness", "ShearX", "ShearY", "Solarize", "TranslateX", "TranslateY")
MAX_LEVEL = 10      # full strength, and m of RandAugment: the level itself is drawn from 1 .. m-1


def weak_view(images, draws, flip=True):
    """T_w: horizontal flip with p = 1/2 (if `flip`), reflect-pad by S // 8, random S x S crop; draws (n, 3)."""
    side, pad = images.shape[-1], images.shape[-1] // 8
    pixel = torch.arange(side, device=images.device)

    def source(draw):                                               # crop, then undo the padding: where pixel i is from
        i = (pixel + (draw * (2 * pad + 1)).long()[:, None] - pad).abs()            # (n, S); -1 reflects to 1
        return side - 1 - (side - 1 - i).abs()                                      # and S reflects to S - 2

    row, column = source(draws[:, 1]), source(draws[:, 2])
    if flip:
        column = torch.where(draws[:, :1] < 0.5, side - 1 - column, column)
    index = (row[:, :, None] * side + column[:, None, :]).view(-1, 1, side * side)  # one for all three channels
    return images.flatten(2).gather(2, index.expand(-1, 3, -1)).view(images.shape)


def strong_view(images, draws, flip=True):
    """T_s: own flip and crop, then RandAugment with n = 2 operations at m = 10, then cutout; draws (n, 13)."""
    images = weak_view(images, draws[:, :WEAK_DRAWS], flip)
    # an operation is drawn with replacement, at a level uniform in 1 .. 9, and happens with probability 1/2
    for op_draw, level_draw, apply_draw, sign_draw in (draws[:, 3:7].unbind(1), draws[:, 7:11].unbind(1)):
        op = (op_draw * len(OPERATIONS)).long().masked_fill(apply_draw >= 0.5, OPERATIONS.index("Identity"))
        level = 1 + (level_draw * (MAX_LEVEL - 1)).long()
        chosen = {name: op == i for i, name in enumerate(OPERATIONS)}               # name -> (n,) bool
        # Each image passes through all three families; in the two that are not its own it meets an identity.
        images = lookup(enhance(images, chosen, level), chosen, level)
        images = affine(images, chosen, level.where(sign_draw >= 0.5, -level))
    return cutout(images, draws[:, 11:13])


def enhance(images, chosen, level):
    """Brightness, Color, Contrast, Sharpness: blend a degenerate image with the image, factor 0.9 level/10 + 0.05."""
    red, green, blue = images.int().unbind(1)
    grey = (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16               # (n, S, S), ITU-R 601-2 luma
    count = images.shape[-1] ** 2
    mean = (2 * grey.sum((1, 2)) + count) // (2 * count)                            # (n,), rounded half up
    wide = images.short()           # Sharpness: 3 x 3 mean whose centre weighs 5 of 13, the outermost pixels kept
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * wide[:, :, 1:-1, 1:-1]
    degenerate = images.clone()
    degenerate[:, :, 1:-1, 1:-1] = (box / 13).round_()                              # a 13th is never a tie

    blends = chosen["Sharpness"]
    mean, black = mean.view(-1, 1, 1, 1), torch.zeros_like(mean).view(-1, 1, 1, 1)
    for name, levels in (("Color", grey[:, None]), ("Contrast", mean), ("Brightness", black)):
        degenerate = torch.where(chosen[name].view(-1, 1, 1, 1), levels.to(torch.uint8), degenerate)
        blends = blends | chosen[name]
    # one division of whole numbers gives the float32 that Pillow has: its truncation falls on the same side
    factor = ((9 * level + 5) / torch.full_like(level, 100)).masked_fill(~blends, 1).view(-1, 1, 1, 1)
    return (wide - degenerate).mul(factor).add_(degenerate).to(torch.uint8)         # a factor of 1 gives the image


def lookup(images, chosen, level):
    """AutoContrast, Equalize, Posterize, Solarize: one table of 256 levels per image and channel, read once."""
    flat = images.flatten(2)
    index = flat.long()                                                             # (n, 3, S * S)
    low, high = flat.amin(2, keepdim=True).long(), flat.amax(2, keepdim=True).long()    # (n, 3, 1)
    value = torch.arange(256, dtype=torch.int32, device=images.device)              # (256,), the identity's table
    level = level.int().view(-1, 1, 1)                                              # (n, 1, 1)

    # AutoContrast: stretch low .. high to 0 .. 255, in float64 (MPS has none) and this order as Pillow: 254 can be top
    span = (high - low).clamp(min=1).to(torch.float32 if images.device.type == "mps" else torch.float64)
    scale = torch.full_like(span, 255) / span
    stretched = (value * scale - low * scale).clamp(0, 255).int().where(high > low, value)

    # Equalize: pixels below this value / pixels per output level; few pixels or one value leave the image as it is
    histogram = torch.zeros_like(value).repeat(len(images), 3, 1)                   # (n, 3, 256)
    histogram.scatter_add_(2, index, torch.ones_like(value[:1]).expand(index.shape))
    step = (index.shape[2] - histogram.gather(2, high)) // 255                      # (n, 3, 1)
    below = histogram.cumsum(2, dtype=torch.int32) - histogram
    equal = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255).where(step > 0, value)

    lost_bits = 4 - level * 4 // MAX_LEVEL                                          # Posterize keeps 4 .. 7 of 8 bits
    poster = value >> lost_bits << lost_bits                                        # (n, 1, 256)
    solar = torch.where(value < 256 - level * 256 // MAX_LEVEL, value, 255 - value)

    table = value.expand(len(images), 3, -1)
    for name, own in zip(("AutoContrast", "Equalize", "Posterize", "Solarize"), (stretched, equal, poster, solar)):
        table = torch.where(chosen[name].view(-1, 1, 1), own, table)
    return table.to(torch.uint8).gather(2, index).view(images.shape)


@lru_cache
def source_pixels(side, device):
    """Where each geometric operation at each level takes its pixels from, as Pillow does: (5 * 19, S * S) int32.

    Rows: Rotate by 3 level degrees, ShearX, ShearY by 0.03 level, TranslateX, TranslateY by 0.03 level S pixels
    (towards 0), each for levels -9 .. 9. Numbers count the pixels from 1, row by row; 0 is black.
    """
    numbers = Image.fromarray(np.arange(1, side * side + 1, dtype=np.int32).reshape(side, side))
    levels = range(1 - MAX_LEVEL, MAX_LEVEL)
    maps = [numbers.rotate(3 * level) for level in levels]
    for place, step in ((1, 0.03), (3, 0.03), (2, None), (5, None)):        # of x = ax + by + c, y = dx + ey + f
        for level in levels:
            matrix = [1, 0, 0, 0, 1, 0]
            matrix[place] = step * level if step else int(3 * level * side / 100)
            maps.append(numbers.transform(numbers.size, Image.Transform.AFFINE, matrix))
    return torch.from_numpy(np.stack(maps)).flatten(1).to(device)


def affine(images, chosen, level):
    """Rotate, ShearX/Y and TranslateX/Y by signed levels (n,), see source_pixels; level 0, the identity, for others."""
    row = MAX_LEVEL - 1 + sum(chosen[name] * ((2 * MAX_LEVEL - 1) * place + level) for place, name in enumerate(
        ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")))
    index = source_pixels(images.shape[-1], images.device)[row].long()              # (n, S * S)
    with_black = F.pad(images.flatten(2), (1, 0))                                   # (n, 3, 1 + S * S)
    return with_black.gather(2, index[:, None].expand(-1, 3, -1)).view(images.shape)


def cutout(images, draws):
    """Grey (127) square of S // 2 pixels around a uniform centre, always; draws (n, 2): centre down, right."""
    side = images.shape[-1]
    size = side // 2
    pixel = torch.arange(side, device=images.device)
    # at the top and left edge it moves inwards, at the bottom and right one it is cut off
    first = (draws * side - size / 2).clamp(min=0).floor()[:, :, None]              # (n, 2, 1)
    inside = (pixel >= first) & (pixel < first + size)                              # (n, 2, S)
    return images.masked_fill((inside[:, 0, :, None] & inside[:, 1, None, :])[:, None], 127)


def normalise(images, mean, std):
    """(n, 3, S, S) uint8 -> float32, channels_last: (level / 255 - mean) / std; mean, std: one number per channel."""
    out = torch.empty(images.shape, device=images.device, memory_format=torch.channels_last)
    for channel, (m, s) in enumerate(zip(mean, std)):       # numbers, as a tensor made here would stall the GPU
        out[:, channel] = (images[:, channel] / 255 - m) / s
    return out
