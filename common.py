"""What every method script shares: data, partitions, augmentation, seeding, run files and process ranks.

Nothing that a reader would look for in a paper stands here: losses, pseudo-labels, aggregation, the local
loop and evaluation are in the method scripts. Functions take plain values, never a parsed command line.
"""

import argparse
import contextlib
import csv
import difflib
import gzip
import hashlib
import io
import json
import math
import os
import pickle
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageOps
from torchvision.datasets import CIFAR10, CIFAR100, SVHN, FashionMNIST
from torchvision.datasets.utils import download_url
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize


class UserError(Exception):
    """The user's mistake or a missing file: one line on stderr, exit status 2."""


class Stopped(Exception):
    """The run cannot go on (a rank lost): one line on stderr, exit status 1; the checkpoint stays."""


class Diverged(Stopped):
    """Training ended in numbers that are not finite: resuming would only repeat it."""


# ---------------------------------------------------------------------------------------------------------------
# Command line and seeding
# ---------------------------------------------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    """argparse that reports a mistake in one line and takes no abbreviated flags."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message):
        raise UserError(message)


def number(kind, low, high=math.inf, open_low=False):
    """An argparse type: an int or a finite float in [low, high], or (low, high] with open_low."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low < value if open_low else low <= value) or not value <= high or math.isinf(value):
            word, left, right = "a whole number" if kind is int else "a number", "[("[open_low], "])"[math.isinf(high)]
            raise argparse.ArgumentTypeError(f"{text!r} is not {word} in {left}{low}, {high}{right}")
        return value
    return parse


def concentration(text):
    """An argparse type for a Dirichlet concentration: a number in [0.001, 1e6], or inf (i.i.d.)."""
    return math.inf if text.strip().lower() in ("inf", "infinity") else number(float, 0.001, 1e6)(text)


def stream(seed, *names):
    """The named random stream of a seed: stream(1, "client", 12, 3) depends on nothing that was drawn before."""
    words = np.frombuffer(hashlib.sha256("/".join(map(str, names)).encode()).digest(), np.uint32)
    return np.random.default_rng([seed, *words.tolist()])


def to_device(array, device):
    """A NumPy array as a tensor on the device; to a GPU through pinned memory, without waiting for the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def launch(main):
    """Run a script's main() and turn its end into the exit status: 0, 1, 2 the user's mistake, 130 interrupted."""
    def terminate(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, terminate)
    rank = rank_and_world()[0]
    where = f"rank {rank}: " if rank else ""
    try:
        main()
        status = 0
    except UserError as error:
        if rank == 0 or dist.is_initialized():       # before that, all ranks read the same command line: one speaks
            print(f"{where}error: {error}", file=sys.stderr)
        status = 2
    except Stopped as error:
        print(f"{where}error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.stdout.flush()
    if dist.is_initialized():
        if status:                                   # other ranks may be gone: leave without waiting for them
            sys.stderr.flush()
            os._exit(status)
        dist.destroy_process_group()
    sys.exit(status)


# ---------------------------------------------------------------------------------------------------------------
# Devices and process ranks
# ---------------------------------------------------------------------------------------------------------------

def choose_device(text, local_rank=0):
    """`auto`, `cpu`, `mps`, `cuda` or `cuda:N` as a torch.device that exists on this machine."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = torch.backends.mps.is_available()
    name = text.strip().lower()
    if name == "auto":
        name = "cuda" if gpus else "mps" if mps else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not (kind == "cuda" and index.isdigit())):
        raise UserError(f"--device {text}: expected auto, cpu, cuda, cuda:N or mps")
    if kind == "cuda" and int(index or 0) >= gpus:
        raise UserError(f"--device {text}: this machine has {gpus} CUDA GPUs that torch {torch.__version__} can use")
    if kind == "mps" and not mps:
        raise UserError(f"--device {text}: this machine has no MPS device")
    if kind == "cuda":
        return torch.device("cuda", int(index) if index else local_rank % gpus)
    return torch.device(kind)


def rank_and_world():
    """This process's rank and the number of processes, as torchrun tells them; (0, 1) without torchrun."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    return (int(os.environ["RANK"]), world) if world > 1 else (0, 1)


class Ranks:
    """The processes that torchrun started, or the only one. They share the clients of a round among themselves.

    NCCL where each rank of a machine has a GPU of its own, gloo otherwise (CPUs, or several ranks on one GPU).
    """

    def __init__(self, device="auto"):
        self.rank, self.world = rank_and_world()
        local_rank = int(os.environ.get("LOCAL_RANK", 0)) if self.world > 1 else 0
        self.device = choose_device(device, local_rank)
        self.first, self.first_here = self.rank == 0, local_rank == 0
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.wire = torch.device("cpu")                              # where tensors are while they travel
        if self.world > 1:
            own_gpu = self.device.type == "cuda" and ":" not in device and (
                int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) <= torch.cuda.device_count())
            self.wire = self.device if own_gpu else self.wire
            self._exchange(dist.init_process_group, "nccl" if own_gpu else "gloo", timeout=timedelta(hours=1))

    def first_then_others(self, function):
        """Call function() in the first process of each machine (it may download), then in the others."""
        if self.world > 1 and not self.first_here:
            self._exchange(dist.barrier)
        result = function()
        if self.world > 1 and self.first_here:
            self._exchange(dist.barrier)
        return result

    def mine(self, items):
        """This rank's part of a list: items rank, rank + world, ..."""
        return items[self.rank::self.world]

    def gather(self, results, total):
        """On rank 0: all `total` results in the order of the list that `mine` shared out; elsewhere None.

        A result is a tensor or a dict or NamedTuple of results. All have the same shapes, so bytes travel.
        """
        if self.world == 1:
            return results
        packed = [_pack(result, self.wire) for result in results]
        size = torch.tensor(len(packed[0]) if packed else 0, device=self.wire)     # 0: more ranks than clients
        self._exchange(dist.all_reduce, size, op=dist.ReduceOp.MAX)
        filler, everyone = torch.zeros(int(size), dtype=torch.uint8, device=self.wire), []
        for turn in range(math.ceil(total / self.world)):
            own = packed[turn] if turn < len(packed) else filler
            slots = [torch.empty_like(own) for _ in range(self.world)] if self.first else None
            self._exchange(dist.gather, own, slots, dst=0)
            everyone += slots or []
        return [_unpack(bytes_, results[0]) for bytes_ in everyone[:total]] if self.first else None

    def broadcast(self, value):
        """The value of rank 0 (a tensor, or a dict or NamedTuple of them) on every rank."""
        if self.world == 1:
            return value
        packed = _pack(value, self.wire)
        self._exchange(dist.broadcast, packed, src=0)
        return _unpack(packed, value)

    def _exchange(self, operation, *args, **kwargs):
        try:
            return operation(*args, **kwargs)
        except RuntimeError as error:
            raise Stopped(f"another rank has ended or does not answer ({str(error).splitlines()[0][:120]})") from None


def _leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for part in (value.values() if isinstance(value, dict) else value) for leaf in _leaves(part)]


def _pack(value, wire):
    return torch.cat([leaf.detach().to(wire).contiguous().reshape(-1).view(torch.uint8) for leaf in _leaves(value)])


def _unpack(packed, like):
    """The inverse of _pack, with the structure, shapes, dtypes and devices of `like`."""
    def build(value):
        nonlocal at
        if isinstance(value, torch.Tensor):
            size = value.numel() * value.element_size()
            piece, at = packed[at:at + size].clone(), at + size      # clone: aligned, and not a view of all the rest
            return piece.view(value.dtype).reshape(value.shape).to(value.device)
        if isinstance(value, dict):
            return {key: build(part) for key, part in value.items()}
        return type(value)(*map(build, value))
    at = 0
    return build(like)


# ---------------------------------------------------------------------------------------------------------------
# Run folder
# ---------------------------------------------------------------------------------------------------------------

class RunFolder:
    """<out_dir>/<name>: config.json, clients.csv, rounds.csv, summary.json, checkpoint.pt, curves.png.

    The constructor only checks; nothing is written before open(). With `writer` off (ranks other than the first)
    files are read, never written. Settings in FREE and `free` may change on a resume (--rounds may grow). `extra` has
    further entries of summary.json.
    """

    FREE = {"rounds", "data_dir", "cache_gb", "device", "amp", "out_dir", "run_name", "resume", "overwrite"}

    def __init__(self, out_dir, name, settings, resume=False, overwrite=False, writer=True, free=()):
        self.path, self.writer = Path(out_dir).expanduser() / name, writer
        self.resumed, self.overwrite, self.free = resume, overwrite, self.FREE | {*free}
        self.script, self.rows, self.saved, self.lock, self.extra = Path(sys.argv[0]), [], 0, None, {}
        self.settings = {key: str(value) if value == math.inf else value for key, value in settings.items()}
        if resume and overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        if Path(name).name != name or name in (".", "..") or len(name) > 200:
            raise UserError(f"--run-name {name!r}: expected a plain folder name of at most 200 characters")
        check_writable(self.path, f"--out-dir {out_dir}")
        self.config = self._read_config()
        no_run = f"{self.path} holds no run of {self.script.name} (no such config.json)"
        if resume:
            if self.config is None:
                raise UserError(f"--resume: {no_run}")
            self._refuse_changes(self.config["settings"], "config.json")
        elif self.path.is_file() or self.path.is_dir() and any(not p.name.startswith(".") for p in self.path.iterdir()):
            if not overwrite:
                raise UserError(f"{self.path} exists: continue it with --resume, replace it with --overwrite, "
                                "or choose --run-name")
            if self.config is None:
                raise UserError(f"--overwrite: {no_run}; remove it yourself")

    def _read_config(self):
        """config.json, or None where there is none or it is not one of this script's."""
        file = self.path / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except OSError:
            return None
        except ValueError as error:
            raise UserError(f"{file}: not readable as JSON ({error})") from None
        known = isinstance(config, dict) and isinstance(config.get("settings"), dict) and "rounds" in config["settings"]
        return config if known and config.get("script") == self.script.name else None

    def _refuse_changes(self, before, file):
        now = self.settings
        changed = [f"--{key.replace('_', '-')} {before.get(key)} -> {now.get(key)}"
                   for key in sorted({*before, *now} - self.free) if before.get(key) != now.get(key)]
        if now["rounds"] < before["rounds"]:
            changed.append(f"--rounds {before['rounds']} -> {now['rounds']} (may only grow)")
        if changed:
            raise UserError(f"--resume: settings differ from {self.path / file}: " + "; ".join(changed))

    def load_checkpoint(self):
        """The state of the last complete round, on the CPU, or None if there is none; the rows up to it stay."""
        if not self.resumed:
            return None
        file, table, state, rows = self.path / "checkpoint.pt", self.path / "rounds.csv", None, []
        if file.exists():
            try:
                state = torch.load(file, weights_only=True, map_location="cpu")
                before, self.saved = json.loads(state["settings"]), state["round"]
            except Exception as error:
                raise UserError(f"{file}: not readable as a checkpoint ({type(error).__name__})") from None
            self._refuse_changes(before, "checkpoint.pt")
        if table.exists():
            with open(table, newline="", encoding="utf-8") as lines:
                rows = list(csv.DictReader(lines))
        if not file.exists() and len(rows) > 1:                      # a round's row comes just before its checkpoint
            raise UserError(f"--resume: {table} has {len(rows)} rounds, but {file} is missing")
        self.rows = rows[:self.saved]
        if [row["round"] for row in self.rows] != [str(k + 1) for k in range(self.saved)]:
            raise UserError(f"{table}: expected rows 1 to {self.saved} of the checkpoint, found {len(self.rows)} rows")
        return state

    def open(self, device, client_rows, **facts):
        """Write config.json (settings, facts, commit, versions, device) and clients.csv, a dict a client.

        facts say what the run stands on, say a fingerprint of the data; a resumed run must find them unchanged.
        """
        if not self.writer:
            return
        here = {"commit": git_commit(Path(__file__).parent), "device": device_name(device), "versions": versions()}
        if self.resumed:
            changed = [f"{key} {self.config.get(key)} -> {value}" for key, value in facts.items()
                       if self.config.get(key) != value]
            if changed:
                raise UserError(f"--resume: not what {self.path} began with: " + "; ".join(changed))
            self._lock()
            resumed = [*self.config.get("resumed", []), {"after_round": self.saved, **here}]
            config = self.config | {"settings": self.settings, "resumed": resumed}
        else:
            config = {"script": self.script.name, "settings": self.settings, **facts, **here}
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock()
                # not the folder itself: it has the lock; and last what tells that this is a run
                before = self.path.iterdir() if self.overwrite else ()
                for old in sorted(before, key=lambda old: old.name == "config.json"):
                    shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
            except OSError as error:
                raise UserError(f"--out-dir: cannot write {self.path} ({error.strerror})") from None
        self._replace("config.json", lambda file: file.write_text(json.dumps(config, indent=1), encoding="utf-8"))
        if self.rows:
            self.save_table("rounds.csv", self.rows)                 # drops a round whose checkpoint was never written
            return
        (self.path / "rounds.csv").unlink(missing_ok=True)
        _write_csv(self.path / "clients.csv", client_rows)
        for source in (self.script, Path(__file__)):                 # the code as it ran
            if source.suffix == ".py" and source.is_file():
                shutil.copy(source, self.path)

    def _lock(self):
        """One process at a time writes here; the system takes the lock back however the process ends."""
        try:
            import fcntl
        except ImportError:                                          # Windows has none: nothing is locked there
            return
        self.lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{self.path} is being written to by another process") from None

    def save_round(self, row, state):
        """Append the row to rounds.csv, renew summary.json, then checkpoint.pt. None and NaN give empty cells."""
        self.rows.append({key: _cell(value) for key, value in row.items()})
        if not self.writer:
            return
        _write_csv(self.path / "rounds.csv", self.rows[-1:], append=len(self.rows) > 1)
        self._replace("summary.json", lambda file: file.write_text(json.dumps(self.summary(), indent=1)))
        state = {**state, "round": len(self.rows), "settings": json.dumps(self.settings)}
        self._replace("checkpoint.pt", lambda file: torch.save(state, file))     # last: it makes the round count
        self.saved = len(self.rows)

    def save_table(self, name, rows):
        """A CSV file of the folder, a dict a row, written anew as a whole."""
        if self.writer:
            self._replace(name, lambda file: _write_csv(file, rows))

    def summary(self):
        """Final, mean of the last ten and best accuracy (the best is picked on test data: no headline), costs."""
        accuracy = [float(row["test_acc_pct"]) for row in self.rows]
        seconds = sum(float(row["seconds"]) for row in self.rows)
        return {"final_acc_pct": accuracy[-1], "mean_last10_acc_pct": round(float(np.mean(accuracy[-10:])), 4),
                "best_acc_pct": max(accuracy), "best_round": int(np.argmax(accuracy)) + 1, "rounds": len(accuracy),
                "seconds": round(seconds, 2), "seconds_per_round": round(seconds / len(accuracy), 3),
                "bytes_up": sum(int(row["bytes_up"]) for row in self.rows),
                "bytes_down": sum(int(row["bytes_down"]) for row in self.rows),
                "finished": len(accuracy) >= self.settings["rounds"], **self.extra}

    def print_summary(self):
        """The last line of a run."""
        end = self.summary()
        print(f"final {end['final_acc_pct']:.2f} % after {end['rounds']} rounds | mean of the last 10: "
              f"{end['mean_last10_acc_pct']:.2f} % | best on the test set, no headline: {end['best_acc_pct']:.2f} % "
              f"in round {end['best_round']} | {end['seconds']:.0f} s | {self.path}")

    def plot(self, panels):
        """curves.png: one panel for each entry {title: [column, ...]}, over the rounds."""
        if not self.writer:
            return
        from matplotlib.figure import Figure                         # a second to import, and only needed here
        figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
        for axes, (title, columns) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
            for column in columns:
                values = [float(row[column]) if row.get(column) else math.nan for row in self.rows]
                if not np.isnan(values).all():
                    axes.plot(range(1, len(values) + 1), values, label=column, marker="." if len(values) < 40 else None)
            axes.set(title=title, xlabel="round")
            if axes.lines:
                axes.legend(fontsize="small")
        self._replace("curves.png", lambda file: figure.savefig(file, format="png", dpi=120))

    def _replace(self, name, write):
        """Write to a temporary name, then rename: a reader, or a kill, never meets half a file."""
        file = self.path / f".{name}.tmp"
        write(file)
        os.replace(file, self.path / name)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        """Say what is kept and how to go on when the run ends early."""
        if self.lock is not None:
            os.close(self.lock)
        if kind is None or issubclass(kind, UserError) or not self.writer or not self.path.exists():
            return
        how = "" if issubclass(kind, Diverged) else ": continue with the same command and --resume"
        print(f"stopped; {self.path} keeps {self.saved} complete rounds{how}", file=sys.stderr)


def check_writable(path, flag):
    """A UserError that names the flag, unless `path` can be made or its folder written to."""
    parent = next(place for place in path.absolute().parents if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{flag}: {parent} is not a folder that can be written to")


def _cell(value):
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _write_csv(path, rows, append=False):
    with open(path, "a" if append else "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        if not append:
            writer.writeheader()
        writer.writerows(rows)


def git_commit(folder):
    """The commit of the code, with "+changes" where the working tree differs; "unknown" outside a repository."""
    def git(*words):
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device_name(device):
    """`NVIDIA H200`, or `cpu x86_64 with 2 threads`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} with {torch.get_num_threads()} threads"


def versions():
    """Versions of what a result depends on; packages that the script did not import are left out."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torchvision", "open_clip", "numpy"):
        if name in sys.modules:
            found[name] = getattr(sys.modules[name], "__version__", "unknown")
    return found


def client_table(class_names, **kinds):
    """One dict a client: its id, its number of images of each kind, then the same for each class.

    kinds: say labelled=(labels, parts), with labels (n,) on the CPU and one index array a client.
    """
    counts = {kind: [np.bincount(labels[part], minlength=len(class_names)).tolist() for part in parts]
              for kind, (labels, parts) in kinds.items()}
    rows = []
    for client in range(len(next(iter(counts.values())))):
        rows.append({"client": client} | {kind: sum(of_kind[client]) for kind, of_kind in counts.items()})
        for kind, of_kind in counts.items():
            rows[-1].update({f"{kind}_{name}": count for name, count in zip(class_names, of_kind[client])})
    return rows


def print_table(rows, class_names, kinds, most=20):
    """The first clients of a client_table, one line each; with many classes only how many are present."""
    print(" | ".join(["client", *(f"{kind} images, by class" for kind in kinds)]))
    for row in rows[:most]:
        cells = [str(row["client"]).rjust(6)]
        for kind in kinds:
            counts = [row[f"{kind}_{name}"] for name in class_names]
            cells.append(f"{row[kind]:5d}: " + (" ".join(f"{count:4d}" for count in counts) if len(counts) <= 12 else
                                               f"{sum(count > 0 for count in counts)} of {len(counts)} classes"))
        print(" | ".join(cells))
    if len(rows) > most:
        print(f"... {len(rows) - most} more clients: see clients.csv")
    for kind in kinds:
        without = [row["client"] for row in rows if not row[kind]]
        if without:
            print(f"{len(without)} clients own no {kind} image, the first is client {without[0]}")


# ---------------------------------------------------------------------------------------------------------------
# Data: images into tensors
# ---------------------------------------------------------------------------------------------------------------
# Data sets are read from wherever a user plausibly put them below --data-dir, and nothing is written but downloads.
# Original files come first (also still packed: archives are read in memory), then <name>/{train,test}/<class>/* images.

class Dataset(NamedTuple):
    train_images: torch.Tensor      # (N, 3, S, S) uint8; a LazyImages where the set is too large for memory
    train_labels: torch.Tensor      # (N,) int64
    test_images: torch.Tensor
    test_labels: torch.Tensor
    class_names: list[str]          # class_names[label]
    source: str                     # where images and split are from: say it when you quote a result


DATASETS = ("digits", "cifar10", "cifar100", "svhn", "cinic10", "fashionmnist", "dtd", "resisc45", "cub", "ucf101",
            "eurosat", "flowers102", "folder")
ALIASES = {                         # other names of a data set and of its folder, as squeeze() gives them
    "dtd": ("describabletextures",), "resisc45": ("nwpuresisc45", "resisc45clip"), "cub": ("cub200", "cub2002011"),
    "ucf101": ("ucf101midframes",), "eurosat": ("eurosatrgb",),
    "flowers102": ("flowers", "oxfordflowers", "oxfordflowers102", "oxford102flowers")}
INNER_FOLDERS = {"resisc45": ("images",), "eurosat": ("2750",), "ucf101": ("ucftraintestlist",)}
DIGITS = [str(digit) for digit in range(10)]
CLASS_NAMES = {                     # in the official order of the label ids; "folder" sorts the names it finds
    "digits": DIGITS, "svhn": DIGITS, "fashionmnist": FashionMNIST.classes,
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck".split(),
    "eurosat": """AnnualCrop Forest HerbaceousVegetation Highway Industrial Pasture PermanentCrop Residential River
        SeaLake""".split(),
    "dtd": """banded blotchy braided bubbly bumpy chequered cobwebbed cracked crosshatched crystalline dotted fibrous
        flecked freckled frilly gauzy grid grooved honeycombed interlaced knitted lacelike lined marbled matted meshed
        paisley perforated pitted pleated polka-dotted porous potholed scaly smeared spiralled sprinkled stained
        stratified striped studded swirly veined waffled woven wrinkled zigzagged""".split(),
    "resisc45": """airplane airport baseball_diamond basketball_court beach bridge chaparral church circular_farmland
        cloud commercial_area dense_residential desert forest freeway golf_course ground_track_field harbor
        industrial_area intersection island lake meadow medium_residential mobile_home_park mountain overpass palace
        parking_lot railway railway_station rectangular_farmland river roundabout runway sea_ice ship snowberg
        sparse_residential stadium storage_tank tennis_court terrace thermal_power_station wetland""".split(),
    "flowers102": [" ".join(name.split()) for name in """
        pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily, moon
        orchid, bird of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle,
        yellow iris, globe-flower, purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire
        lily, pincushion flower, fritillary, red ginger, grape hyacinth, corn poppy, prince of wales feathers,
        stemless gentian, artichoke, sweet william, carnation, garden phlox, love in the mist, mexican aster, alpine
        sea holly, ruby-lipped cattleya, cape flower, great masterwort, siam tulip, lenten rose, barbeton daisy,
        daffodil, sword lily, poinsettia, bolero deep blue, wallflower, marigold, buttercup, oxeye daisy, common
        dandelion, petunia, wild pansy, primula, sunflower, pelargonium, bishop of llandaff, gaura, geranium, orange
        dahlia, pink-yellow dahlia?, cautleya spicata, japanese anemone, black-eyed susan, silverbush, californian
        poppy, osteospermum, spring crocus, bearded iris, windflower, tree poppy, gazania, azalea, water lily, rose,
        thorn apple, morning glory, passion flower, lotus, toad lily, anthurium, frangipani, clematis, hibiscus,
        columbine, desert-rose, tree mallow, magnolia, cyclamen, watercress, canna lily, hippeastrum, bee balm, ball
        moss, foxglove, bougainvillea, camellia, mallow, mexican petunia, bromelia, blanket flower, trumpet creeper,
        blackberry lily""".split(",")],
    "cifar100": """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
        camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
        dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
        lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
        pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
        shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
        television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm""".split()}
CLASS_NAMES["cinic10"] = CLASS_NAMES["cifar10"]
CLASS_COUNT = {"cub": 200, "ucf101": 101}          # their names come with the files
EUROSAT_WORDS = ("annual crop land, forest, brushland or shrubland, highway or road, "      # as GRIP has them
                 "industrial buildings or commercial buildings, pasture land, permanent crop land, "
                 "residential buildings or homes or apartments, river, lake or sea").split(", ")
CIFAR = {"cifar10": CIFAR10, "cifar100": CIFAR100}
OXFORD = "https://www.robots.ox.ac.uk/~vgg/data/"
EUROSAT_URL = ("https://huggingface.co/datasets/torchgeo/eurosat/resolve/"
               "c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip")
# name -> folder below data_dir, and for each original file: what to look for, in this order ("x/" is a folder; what
# an archive unpacks to comes before it), and URL and MD5 as torchvision knows them, None where there is no download
ORIGINALS = {
    "cifar10": ("", [(("data_batch_1", CIFAR10.filename), CIFAR10.url, CIFAR10.tgz_md5)]),
    "cifar100": ("", [(("train", CIFAR100.filename), CIFAR100.url, CIFAR100.tgz_md5)]),
    "svhn": ("svhn", [((file,), url, md5) for url, file, md5 in (SVHN.split_list["train"], SVHN.split_list["test"])]),
    "fashionmnist": ("FashionMNIST/raw", [((file, file.removesuffix(".gz")), FashionMNIST.mirrors[0] + file, md5)
                                          for file, md5 in FashionMNIST.resources]),
    "dtd": ("dtd", [(("labels/train1.txt", "dtd-r1.0.1.tar.gz"), OXFORD + "dtd/download/dtd-r1.0.1.tar.gz",
                     "fff73e5086ae6bdbea199a49dfb8a4c1")]),
    "flowers102": ("flowers-102", [
        (("jpg/", "102flowers.tgz"), OXFORD + "flowers/102/102flowers.tgz", "52808999861908f626f3c1f4e79d11fa"),
        (("imagelabels.mat",), OXFORD + "flowers/102/imagelabels.mat", "e0620be6f572b9609742df49c70aed4d"),
        (("setid.mat",), OXFORD + "flowers/102/setid.mat", "a5357ecc9cb78c4bef273ce3793fc85c")]),
    "eurosat": ("eurosat", [(("AnnualCrop/", "EuroSAT.zip"), EUROSAT_URL, "c8fa014336c82ac7804f0398fcb19387")]),
    "resisc45": ("", [(("airplane/",), None, None)]),
    "cub": ("", [(("images.txt",), None, None)]),
    "ucf101": ("", [(("split_zhou_UCF101.json", "trainlist01.txt"), None, None),
                    (("Apply_Eye_Makeup/", "ApplyEyeMakeup/"), None, None)])}
UNPACKED = {"cifar10": CIFAR10.base_folder, "cifar100": CIFAR100.base_folder, "dtd": "dtd/dtd",
            "flowers102": "flowers-102/jpg", "eurosat": "eurosat/2750"}
BY_HAND = {                         # name -> the original layout below data_dir, if it is read, and where to get it
    "cinic10": ("", "unpack CINIC-10.tar.gz (https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz) "
                "inside its folder cinic10"),
    "resisc45": ("NWPU-RESISC45/<class>/*.jpg (with train.json, val.json and test.json there, their split)",
                 "get NWPU-RESISC45 from https://huggingface.co/datasets/torchgeo/resisc45, the lists, if you want "
                 "them, from https://github.com/Computer-Vision-in-the-Wild/DataDownload (resisc45_clip)"),
    "cub": ("CUB_200_2011/{images.txt,image_class_labels.txt,train_test_split.txt,classes.txt,images/}",
            "get CUB_200_2011.tgz from https://data.caltech.edu/records/65de6-vp158"),
    "ucf101": ("ucf101/{split_zhou_UCF101.json,UCF-101-midframes/<Class_Name>/*.jpg} (or, instead of the .json, "
               "trainlist01.txt and testlist01.txt)",
               "get both from https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md#ucf101")}
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def squeeze(text):
    """What counts in a name: 'CIFAR-10' and 'cifar_10' are the same, 'T-shirt/top' and 'tshirt_top' too."""
    return re.sub(r"[\W_]+", "", str(text).lower())


def dataset_name(text, among=DATASETS):
    """The canonical name of one of these data sets; upper case, '-', '_' and spaces do not matter."""
    name = squeeze(text)
    name = next((official for official, others in ALIASES.items() if name in others), name)
    if name not in among:
        close = difflib.get_close_matches(name, among, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        problem = "not a data set of this script" if name in DATASETS else "unknown data set"
        raise UserError(f"--dataset {text}: {problem}{hint}; there are {', '.join(among)}")
    return name


def readable(text):
    """A class name as words: '012.Yellow_headed_Blackbird', 'ApplyEyeMakeup', 'T-shirt/top'; '7' stays as it is."""
    text = re.sub(r"^(\d+[\s._-]+)+(?=[^\W\d_])", "", text)                 # an index before the name
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text.replace("_", " ").replace("/", " or "))
    return " ".join(text.split())


def prompt_names(name, class_names):
    """Class names as CLIP should read them, in the same order; no two may be the same to it."""
    words = EUROSAT_WORDS if name == "eurosat" else [readable(text) for text in class_names]
    words = [text.lower() for text in words] if name == "cub" else list(words)
    first = {}
    for text, official in zip(words, class_names):
        other = first.setdefault(text.lower(), official)                      # CLIP reads everything in lower case
        if other != official:
            raise UserError(f"{name}: classes {other} and {official} would both be called {text!r}: rename a folder")
    return words


def one_line(error):
    reason = getattr(error, "reason", None)         # urllib wraps the real reason
    error = reason if isinstance(reason, Exception) else error
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextlib.contextmanager
def blame(path, verb="read"):
    """Turn whatever goes wrong while `path` is read into one line that names it; parsers raise all kinds of errors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        advice = "" if getattr(error, "errno", None) else ": damaged, incomplete or not the expected content"
        raise UserError(f"cannot {verb} {path} ({one_line(error)}){advice}") from error


def search_places(name, data_dir):
    """Folders that may hold the data: those named after the data set, down to three levels, then data_dir itself."""
    if name == "folder" or not data_dir.is_dir():
        return [data_dir]
    usual = {name, f"{name}python", f"{name}batchespy", f"dataset{name}", "raw",     # as unpackers and torchvision do
             *ALIASES.get(name, ()), *INNER_FOLDERS.get(name, ())}
    places, level = [data_dir], [data_dir]
    for _ in range(3):
        level = [child for parent in level for child in sorted(parent.iterdir())
                 if squeeze(child.name) in usual and not is_hidden(child.name) and child.is_dir()]
        places = level + places
    return places


def find_originals(name, places):
    """The path found for each original file, None if missing."""
    def there(path, wanted):
        return path.is_dir() if wanted.endswith("/") else path.is_file()
    _, files = ORIGINALS.get(name, ("", []))
    return [next((place / wanted for wanted in alternatives for place in places if there(place / wanted, wanted)), None)
            for alternatives, _, _ in files]


def download(url, path, md5):
    """Fetch url; path appears only when complete and of the right MD5 sum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.touch()                                    # a folder that cannot be written shows before the transfer
    usual_timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(15)                    # torchvision sets none: a dead proxy would hang for minutes
    try:
        download_url(url, part.parent, part.name, md5)
        part.replace(path)
    finally:
        socket.setdefaulttimeout(usual_timeout)
        part.unlink(missing_ok=True)


def fetch(name, data_dir, found):
    """Download the original files that are missing, or say in one line where they are expected."""
    tree = f"{data_dir / name}/{{train,test}}/<class>/*.png"
    if name == "folder":
        raise UserError(f"folder: expected images as {data_dir}/{{train,test}}/<class>/*.png, but train or test is "
                        "missing; name the folder that holds them with --data-dir")
    if name in BY_HAND:
        layout, advice = BY_HAND[name]
        files = ORIGINALS[name][1] if name in ORIGINALS else []
        missing = [f"no {alternatives[0]}" for path, (alternatives, *_) in zip(found, files) if path is None]
        missing = f"{' and '.join(missing)} in {data_dir}; " if missing else ""
        layout = f"{data_dir / layout}, or " if layout else ""
        raise UserError(f"{name}: {missing}expected {layout}images as {tree}; they are not downloaded automatically: "
                        f"{advice}, or name the folder that holds the data with --data-dir")
    folder, files = ORIGINALS[name]
    paths = []
    for path, (alternatives, url, md5) in zip(found, files):
        if path is None:
            file = url.rsplit("/", 1)[1]
            path = data_dir / folder / file
            try:
                download(url, path, md5)
            except Exception as error:              # no network, no space, no permission, wrong MD5 sum, ...
                packed = name in UNPACKED and len(alternatives) > 1
                unpacked = f" or unpacked as {data_dir / UNPACKED[name]}" if packed else ""
                raise UserError(f"{name}: {file} not found in {data_dir} and the download failed ({one_line(error)}); "
                                f"fetch {url} by hand and save it as {path}{unpacked}, or put images as {tree}, "
                                "or name the folder that holds the data with --data-dir") from error
        paths.append(path)
    return paths


def unpack(name, archive):
    """Unpack an archive beside itself, where the next run finds its content; half of it never shows."""
    part = archive.with_name(f"{archive.name}.{os.getpid()}.part")
    with blame(archive, "unpack"):
        try:
            shutil.unpack_archive(archive, part, **({} if archive.suffix == ".zip" else {"filter": "data"}))
            for entry in part.iterdir():
                entry.replace(archive.parent / entry.name)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        found = find_originals(name, search_places(name, archive.parent))[0]
        if found == archive:
            raise ValueError(f"holds no {ORIGINALS[name][1][0][0][0]}")
    return found


def checked(images, labels, shape, classes):
    """Arrays of one file as an image and a label tensor, after the checks that its content is what we think."""
    labels = torch.as_tensor(np.asarray(labels).astype(np.int64))
    if images.dtype != np.uint8 or images.shape[1:] != shape or labels.shape != images.shape[:1] or not len(labels):
        raise ValueError(f"{images.dtype} images {images.shape} and {len(labels)} labels, expected uint8 (N, {shape})")
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"labels {labels.min()} to {labels.max()}, expected 0 to {classes - 1}")
    return torch.from_numpy(np.require(images, requirements="CW")), labels


def read_digits():
    """scikit-learn's digits have no official split. Ours: sorted by class, every fifth image is test (1438 + 359)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("--dataset digits needs scikit-learn: pip install scikit-learn") from None
    grey, labels = load_digits(return_X_y=True)                                   # (1797, 64) values 0..16
    images = (grey.reshape(-1, 1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[np.argsort(labels, kind="stable")[4::5]] = True
    return [checked(images[split], labels[split], (1, 8, 8), 10) for split in (~is_test, is_test)]


class ArrayUnpickler(pickle.Unpickler):
    """Lets a pickle build numpy arrays and nothing else: a pickle of unknown origin could run any code."""
    def find_class(self, module, name):
        if f"{module.split('.')[0]}.{name}" in ("numpy._reconstruct", "numpy.ndarray", "numpy.dtype",
                                                "numpy._frombuffer", "_codecs.encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"refuses to load {module}.{name}")


def read_cifar(name, place):
    """place is the folder of the Python pickles, or the archive that holds it."""
    splits = [[file for file, _ in CIFAR[name].train_list], [file for file, _ in CIFAR[name].test_list]]
    raw = {}
    with blame(place):
        if place.is_dir():
            raw = {file: (place / file).read_bytes() for file in splits[0] + splits[1]}
        else:
            with tarfile.open(place) as archive:
                for member in archive:
                    if member.isfile() and Path(member.name).name in splits[0] + splits[1]:
                        raw[Path(member.name).name] = archive.extractfile(member).read()
    def batch(file):
        with blame(place / file), warnings.catch_warnings():
            warnings.simplefilter("ignore")         # numpy 2.4 has one about pickles as old as the official files
            content = ArrayUnpickler(io.BytesIO(raw.pop(file)), encoding="latin1").load()
            labels = content["labels" if name == "cifar10" else "fine_labels"]
            return checked(content["data"].reshape(-1, 3, 32, 32), labels, (3, 32, 32), len(CLASS_NAMES[name]))
    return [[torch.cat(parts) for parts in zip(*map(batch, files))] for files in splits]


def read_mat(path):
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(f"{path} needs scipy to be read: pip install scipy") from None
    return loadmat(path)


def read_svhn(files):
    """The cropped digits, without the `extra` split. Label 10 of the files is the digit zero."""
    splits = []
    for path in files:
        with blame(path):
            content = read_mat(path)
            labels = content["y"].astype(np.int64).reshape(-1)
            labels[labels == 10] = 0
            splits.append(checked(content["X"].transpose(3, 2, 0, 1), labels, (3, 32, 32), 10))   # (H, W, 3, N) there
    return splits


def read_idx(path):
    """An array of bytes in MNIST's format, gzipped or not: 0, 0, 8 (uint8), dimensions, big-endian sizes, values."""
    with blame(path):
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        if raw[:3] != b"\0\0\x08":
            raise ValueError("no IDX file of bytes")
        sizes = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(sizes)


def read_fashionmnist(files, border=2):
    """28x28 grey images, padded with two black pixels on each side."""
    splits = []
    for image_file, label_file in (files[:2], files[2:]):
        images, labels = read_idx(image_file), read_idx(label_file)
        with blame(f"{image_file} with {label_file.name}"):
            if images.shape[1:] != (28, 28):
                raise ValueError(f"images of shape {images.shape}")
            images = np.pad(images, ((0, 0), (border, border), (border, border)))[:, None]
            splits.append(checked(images, labels, images[0].shape, 10))
    return splits


def is_hidden(name):
    return name.startswith((".", "__MACOSX"))       # .DS_Store, .ipynb_checkpoints, ._image.png


def some(names):
    return ", ".join(names[:10]) + (f", ... ({len(names) - 10} more)" if len(names) > 10 else "")


def image_files(folder):
    return sorted(file for file in os.listdir(folder) if file.lower().endswith(IMAGE_ENDINGS) and not is_hidden(file))


def class_folders(name, root, splits):
    """The class names, and for each split the class folders in the same order, after a check that all are there."""
    found = {split: sorted(entry.name for entry in os.scandir(root / split)
                           if entry.is_dir() and not is_hidden(entry.name)) for split in splits}
    key = str if name == "folder" else squeeze
    spelling = {key(folder): folder for split in reversed(splits) for folder in found[split]}     # train's, if both
    class_names = CLASS_NAMES.get(name) or [spelling[text] for text in sorted(spelling)]
    label = {key(text): i for i, text in enumerate(class_names)}
    if name in CLASS_NAMES:                         # there the label id will do as the name of a class folder
        label |= {text: i for i in range(len(class_names)) for text in (f"{i}", f"{i:02d}")}
    ordered, problems = [], []
    for split, folders in found.items():
        of_class, surplus = {}, []
        for folder in folders:
            i = label.get(key(folder))
            if i is None or i in of_class:
                surplus.append(folder)
            else:
                of_class[i] = root / split / folder
        missing = [text for i, text in enumerate(class_names) if i not in of_class]
        expected = CLASS_COUNT.get(name, len(class_names))
        if missing or surplus or not folders or len(folders) != expected:
            problems.append(f"{root / split} has {len(folders)} class folders, {expected} expected"
                            + (f", missing: {some(missing)}" if missing else "")
                            + (f", surplus: {some(surplus)}" if surplus else ""))
        ordered.append([of_class[i] for i in sorted(of_class)])
    if problems:
        raise UserError(f"{name}: {'; '.join(problems)}")
    return class_names, ordered


def read_tree(name, root, splits=("train", "test")):
    """root/<split>/<class>/*: the class names, and of each split the image paths, sorted, and their labels."""
    with blame(root):
        class_names, ordered = class_folders(name, root, splits)
        read = []
        for folders in ordered:
            paths, labels = [], []
            for label, folder in enumerate(folders):
                files = image_files(folder)
                if not files:
                    raise UserError(f"class folder {folder} holds no images ({' '.join(IMAGE_ENDINGS)})")
                paths += [os.path.join(folder, file) for file in files]
                labels += [label] * len(files)
            read.append((paths, torch.tensor(labels)))
    return class_names, read


# The data sets below are image files with lists, or without any split. Each reader gets the paths that find_originals
# gives and returns the rule of its split, the class names, and image paths and labels of train and test.

def folder_and_stem(entry):
    """What identifies an image of a list: 'x/HandstandPushups/v_HandStandPushups_g01_c01.avi', case apart."""
    folder, file = re.split(r"[/\\@]", entry)[-2:]                            # x@class/image: an image in an archive x
    return squeeze(folder), Path(file).stem.lower()


def locate(list_file, entries, root):
    """The paths root/<folder>/<image> of the images that a list names, all of which must be there."""
    wanted = [folder_and_stem(entry) for entry in entries]
    folders = {folder for folder, _ in wanted}
    there = {folder_and_stem(f"{child.name}/{file}"): os.path.join(child.path, file) for child in os.scandir(root)
             if squeeze(child.name) in folders and child.is_dir() for file in image_files(child.path)}
    missing = [entry for entry, key in zip(entries, wanted) if key not in there]
    if missing:
        raise UserError(f"{list_file}: {len(missing)} of its {len(wanted)} images are not in {root}, "
                        f"the first is {missing[0]}")
    return [there[key] for key in wanted]


def read_list(list_file, entries, root, class_names):
    """The images that a list names and their labels, the class being the folder."""
    label = {squeeze(text): i for i, text in enumerate(class_names)}
    unknown = [entry for entry in entries if folder_and_stem(entry)[0] not in label]
    if unknown:
        raise UserError(f"{list_file}: {len(unknown)} images of unknown classes, the first is {unknown[0]}")
    labels = torch.tensor([label[folder_and_stem(entry)[0]] for entry in entries], dtype=torch.int64)
    return locate(list_file, entries, root), labels


def join(parts):
    """Several (paths, labels) as one."""
    paths, labels = zip(*parts)
    return sum(paths, []), torch.cat(labels)


def every_fifth(paths, labels):
    """A split where none is official: of each class, by file name, every fifth image, and the other four of five."""
    rank = np.concatenate([np.arange(count) for count in torch.bincount(labels).tolist()])      # labels are in order
    return [(pick(paths, index), labels[index]) for index in (np.flatnonzero(rank % 5 == 4),
                                                              np.flatnonzero(rank % 5 != 4))]


def read_dtd(files):
    """Partition 1: train and val together are train."""
    root = files[0].parent.parent
    def split(name):
        list_file = root / "labels" / f"{name}1.txt"
        with blame(list_file):
            return read_list(list_file, list_file.read_text("utf-8").split(), root / "images", CLASS_NAMES["dtd"])
    splits = [join(map(split, ("train", "val"))), split("test")]
    return "train1.txt with val1.txt, test1.txt", CLASS_NAMES["dtd"], splits


def read_flowers102(files):
    """Train and validation together are train."""
    jpg, label_file, set_file = files
    with blame(label_file):
        labels = read_mat(label_file)["labels"].reshape(-1).astype(np.int64) - 1          # of images 1, 2, ...
        if labels.min() != 0 or labels.max() != 101:
            raise ValueError(f"labels {labels.min() + 1} to {labels.max() + 1}, expected 1 to 102")
    splits = []
    with blame(set_file):
        content = read_mat(set_file)
        for names in (("trnid", "valid"), ("tstid",)):
            ids = np.concatenate([content[name].reshape(-1) for name in names]).astype(np.int64)
            if ids.min() < 1 or ids.max() > len(labels):
                raise ValueError(f"images {ids.min()} to {ids.max()}, but {label_file.name} has {len(labels)}")
            paths = locate(set_file, [f"{jpg.name}/image_{i:05d}.jpg" for i in ids], jpg.parent)
            splits.append((paths, torch.from_numpy(labels[ids - 1])))
    return "trnid with valid, tstid", CLASS_NAMES["flowers102"], splits


def read_eurosat(files):
    """No official split: every fifth image is test."""
    class_names, [(paths, labels)] = read_tree("eurosat", files[0].parent, [""])
    test, train = every_fifth(paths, labels)
    return "every fifth image of a class is test", class_names, [train, test]


def read_resisc45(files):
    """With the three lists beside the class folders or above: train and val together are train. No official split:
    without lists every fifth image is train, 140 of each class, as many as those lists have."""
    root = files[0].parent
    place = next((place for place in (root, root.parent) if (place / "train.json").is_file()), None)
    if place is None:
        class_names, [(paths, labels)] = read_tree("resisc45", root, [""])
        return "every fifth image of a class is train", class_names, every_fifth(paths, labels)
    def split(name):
        list_file = place / f"{name}.json"
        with blame(list_file):
            entries = [image["file_name"] for image in json.loads(list_file.read_text("utf-8"))["images"]]
            return read_list(list_file, entries, root, CLASS_NAMES["resisc45"])
    splits = [join(map(split, ("train", "val"))), split("test")]
    return "train.json with val.json, test.json", CLASS_NAMES["resisc45"], splits


def read_cub(files):
    """The official split. Its four lists have lines of an id and a value; ids start at 1."""
    root = files[0].parent
    def read(name):
        with blame(root / name):
            return {int(i): value for i, value in map(str.split, (root / name).read_text("utf-8").splitlines())}
    images, label, in_train, names = map(read, ("images.txt", "image_class_labels.txt", "train_test_split.txt",
                                                "classes.txt"))
    with blame(root / "classes.txt"):
        if sorted(names) != list(range(1, 201)):
            raise ValueError(f"{len(names)} classes, expected 1 to 200")
    for name, values, possible in (("image_class_labels.txt", label, {f"{i}" for i in names}),
                                   ("train_test_split.txt", in_train, {"0", "1"})):
        with blame(root / name):
            if values.keys() != images.keys() or not possible.issuperset(values.values()):
                raise ValueError("does not fit images.txt and classes.txt")
    splits = []
    for wanted in ("1", "0"):
        ids = [i for i in images if in_train[i] == wanted]
        with blame(root / "images"):
            paths = locate(root / "images.txt", [images[i] for i in ids], root / "images")
        splits.append((paths, torch.tensor([int(label[i]) - 1 for i in ids], dtype=torch.int64)))
    return "train_test_split.txt", [names[i] for i in sorted(names)], splits


def read_ucf101(files):
    """Middle frames of the videos. CoOp's list leaves val unused (7,639 train); the official fold 1 has 9,537."""
    list_file, root = files[0], files[1].parent
    lists = {"train": list_file, "test": list_file}
    if list_file.suffix == ".json":
        rule = "train and test of split_zhou_UCF101.json, val unused"
        with blame(list_file):
            content = json.loads(list_file.read_text("utf-8"))
            entries = {split: [entry[:2] for entry in content[split]] for split in lists}
    else:
        rule, entries = "trainlist01.txt, testlist01.txt", {}
        lists["test"] = list_file.with_name("testlist01.txt")
        for split, path in lists.items():
            with blame(path):
                lines = [line.split() for line in path.read_text("utf-8").splitlines() if line.strip()]
                entries[split] = [(line[0], int(line[1]) - 1 if split == "train" else None) for line in lines]
    with blame(list_file):
        names = {label: re.split(r"[/\\]", entry)[-2] for entry, label in entries["train"]}
        if sorted(names) != list(range(101)):
            raise ValueError(f"{len(names)} classes, expected 101")
    class_names = [names[label] for label in range(101)]
    splits = []
    for split, path in lists.items():
        with blame(path):
            splits.append(read_list(path, [entry for entry, _ in entries[split]], root, class_names))
    return rule, class_names, splits


READERS = {"dtd": read_dtd, "flowers102": read_flowers102, "eurosat": read_eurosat, "resisc45": read_resisc45,
           "cub": read_cub, "ucf101": read_ucf101}


def read_files(name, files):
    """The data sets of READERS: source, class names and splits, after a check that both splits have every class."""
    if files[0].suffix in (".gz", ".tgz", ".zip"):
        files = [unpack(name, files[0]), *files[1:]]
    rule, class_names, splits = READERS[name](files)
    for split, (_, labels) in zip(("train", "test"), splits):
        counts = torch.bincount(labels, minlength=len(class_names))
        without = [text for text, count in zip(class_names, counts) if not count]
        if without:
            raise UserError(f"{name}: {files[0].parent} ({rule}) has no {split} images of {some(without)}")
    return f"original files, {rule}", class_names, splits


def to_rgb(image):
    """Any Pillow image as 8-bit RGB. Transparency is composited over white; 16-bit grey is scaled, 65535 to 255."""
    if image.mode.startswith("I"):                  # Pillow's own conversion clips: all above 255 would be white
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 65535:
            raise ValueError("more than 16 bits a pixel")
        image = Image.fromarray(((grey + 128) // 257).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def clip_view(side):
    """What open_clip does with an RGB image for evaluation, short of the division by 255: short side, then centre.

    Images are made RGB first, as in the official FedCoPL loader; open_clip resizes palettes as they are.
    """
    crop = Compose([Resize(side, InterpolationMode.BICUBIC), CenterCrop(side)])
    return lambda image: crop(to_rgb(image))


def square_view(side, pad_28=False):
    """A Pillow image as RGB; the short side becomes `side`, the rest is cut off evenly. pad_28: 28x28 images get the
    border that read_fashionmnist gives them."""
    def view(image):
        image = to_rgb(image)
        if pad_28 and image.size == (28, 28):
            image = ImageOps.expand(image, 2)
        return image if image.size == (side, side) else ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
    return view


def load_images(source, side, view):
    """Prepare images in threads: (N, 3, side, side). source: files, whose EXIF orientation is applied, or a uint8
    tensor; view: what to do with each Pillow image."""
    images = torch.empty(len(source), 3, side, side, dtype=torch.uint8)
    pixels = images.numpy()
    def put(i, image):
        pixels[i] = np.asarray(view(image)).transpose(2, 0, 1)
    def decode(start):
        for i, item in enumerate(source[start:start + 16], start):
            if isinstance(item, torch.Tensor):
                item = item.permute(1, 2, 0).numpy()
                put(i, Image.fromarray(item[..., 0] if item.shape[2] == 1 else item))
            else:
                with blame(item), Image.open(item) as image:
                    ImageOps.exif_transpose(image, in_place=True)
                    put(i, image)
    with ThreadPoolExecutor() as pool:
        list(pool.map(decode, range(0, len(source), 16)))
    return images


def resize(images, side):
    """Square uint8 images to RGB of `side` pixels, in chunks: never a float copy of the whole set."""
    if images.shape[1:] == (3, side, side):
        return images
    resized = torch.empty(len(images), 3, side, side, dtype=torch.uint8)
    for start in range(0, len(images), 512):
        chunk = images[start:start + 512]
        if chunk.shape[-1] != side:
            chunk = F.interpolate(chunk.float(), (side, side), mode="bilinear", antialias=True).round()
        resized[start:start + 512] = chunk          # one grey channel is repeated
    return resized


def pick(source, index):
    """The images of these indices, from a tensor or a list of files."""
    return [source[i] for i in index] if isinstance(source, list) else source[index]


class LazyImages:
    """Images that are prepared when they are asked for: images[index] is the tensor that the whole set would give.

    source: a list of files, or a tensor of small images. prepare: its part -> (n, 3, side, side) uint8.
    """

    dtype, device = torch.uint8, torch.device("cpu")

    def __init__(self, source, side, prepare):
        self.source, self.prepare = source, prepare
        self.shape = torch.Size((len(source), 3, side, side))

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        """index: a slice, or whole numbers or booleans in a 1-D tensor (on any device), array or list."""
        index = index.cpu().numpy() if isinstance(index, torch.Tensor) else index
        return self.prepare(pick(self.source, torch.from_numpy(np.arange(len(self))[index])))


def first_of_each(labels, share):
    """Sorted indices of the first ceil(share * n) images of each class of n."""
    labels = torch.as_tensor(labels)
    members = [(labels == label).nonzero().flatten() for label in labels.unique()]
    return torch.cat([own[:math.ceil(share * len(own) - 1e-9)] for own in members]).sort().values   # 0.07 * 100 > 7


def balanced_subset(labels, class_names, n):
    """Sorted indices of n images, equally many of each class (the first classes take the remainder), evenly spaced."""
    classes = len(class_names)
    if not classes <= n <= len(labels):
        raise UserError(f"--train-subset {n}: must be from {classes} (one image a class) to {len(labels)} (all images)")
    kept = []
    for label, text in enumerate(class_names):
        share = n // classes + (label < n % classes)
        members = (labels == label).nonzero().flatten()
        if share > len(members):
            largest = classes * int(torch.bincount(labels, minlength=classes).min())
            raise UserError(f"--train-subset {n}: needs {share} images of class {text}, which has {len(members)}; "
                            f"{largest} is possible")
        kept.append(members[torch.arange(share) * len(members) // share])
    return torch.cat(kept).sort().values


def load_dataset(name, data_dir, side=None, train_subset=None, clip=False, skip_share=0.0, memory_gb=None):
    """Read a data set from data_dir.

    side: pixels of the square result, default 32 (digits: 8; clip: 224). clip: prepare the images as CLIP has them,
    and make words of the class names.
    skip_share: leave out first_of_each class's training images, before train_subset is taken.
    memory_gb: if the images need more GiB than this they become LazyImages, which are prepared at each use.
    """
    name = dataset_name(name)
    if not 0 <= skip_share < 1:
        raise UserError(f"--skip-share {skip_share}: must be in [0, 1)")
    data_dir = Path(data_dir).expanduser().absolute()
    if name == "digits":
        source, class_names, splits = "embedded", DIGITS, read_digits()
    else:
        if data_dir.exists() and not data_dir.is_dir():
            raise UserError(f"--data-dir {data_dir}: is a file, not a folder")
        with blame(data_dir):
            places = search_places(name, data_dir)
            files = find_originals(name, places)
            complete = bool(files) and all(files)
            trees = [place for place in places if (place / "train").is_dir() and (place / "test").is_dir()]
        if trees and not complete:
            source, (class_names, splits) = "image folders", read_tree(name, trees[0])
        else:
            files = files if complete else fetch(name, data_dir, files)
            if name in READERS:
                source, class_names, splits = read_files(name, files)
            else:
                source, class_names = "original files", CLASS_NAMES[name]
                splits = (read_svhn(files) if name == "svhn" else
                          read_fashionmnist(files, border=0 if clip else 2) if name == "fashionmnist" else
                          read_cifar(name, files[0] if files[0].suffix else files[0].parent))
    class_names = prompt_names(name, class_names) if clip else list(class_names)
    side = side or (224 if clip else 8 if name == "digits" else 32)
    view = clip_view(side) if clip else square_view(side, name == "fashionmnist")
    parts = []
    for split, (images, labels) in zip(("train", "test"), splits):
        if split == "train" and skip_share:
            keep = torch.ones_like(labels, dtype=torch.bool)
            keep[first_of_each(labels, skip_share)] = False
            keep = keep.nonzero().flatten()
            if len(labels[keep].unique()) < len(class_names):
                raise UserError(f"--skip-share {skip_share}: leaves no training image of some class")
            images, labels = pick(images, keep), labels[keep]
        if split == "train" and train_subset is not None:
            keep = balanced_subset(labels, class_names, train_subset)
            images, labels = pick(images, keep), labels[keep]
        if clip or isinstance(images, list):
            parts += [LazyImages(images, side, lambda part: load_images(part, side, view)), labels]
        else:
            parts += [LazyImages(images, side, lambda part: resize(part, side)), labels]
    return cache_images(Dataset(*parts, class_names, source), memory_gb)


def cache_images(data, memory_gb=None):
    """The Dataset with its LazyImages prepared, or as it is if they need more than this many GiB."""
    train, test = data.train_images, data.test_images
    if memory_gb is not None and (len(train) + len(test)) * math.prod(train.shape[1:]) > memory_gb * 2 ** 30:
        return data
    return data._replace(train_images=train.prepare(train.source), test_images=test.prepare(test.source))


def spare_memory_gb():
    """Half of this machine's memory in GiB, shared by its processes of this run; 8 where the system does not say."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2 ** 30
    except (AttributeError, OSError, ValueError):
        memory = 16
    return memory / 2 / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def take(images, index, device):
    """images[index] on the device; from the host's memory to a GPU through pinned memory, without waiting."""
    batch = images[index]
    if device.type == "cuda" and batch.device.type == "cpu":
        return batch.pin_memory().to(device, non_blocking=True)
    return batch.to(device)


def fingerprint(data):
    """A short hash of all images and labels of a Dataset: the same data, whatever files they came from."""
    digest = hashlib.sha256()
    for part in data[:4]:
        for start in range(0, len(part), 512):
            digest.update(part[start:start + 512].contiguous().numpy())
    return digest.hexdigest()[:16]


def channel_stats(images):
    """Mean and standard deviation of each channel of (N, 3, S, S) uint8 images, in 0..1, from their histograms."""
    level = np.arange(256) / 255
    counts = np.stack([np.bincount(images[:, channel].flatten().numpy(), minlength=256) for channel in range(3)])
    share = counts / images[:, 0].numel()
    mean = share @ level
    return tuple(mean.tolist()), tuple(np.sqrt(share @ level ** 2 - mean ** 2).clip(min=1e-3).tolist())


# ---------------------------------------------------------------------------------------------------------------
# Partitions: which images are labelled, which client owns them
# ---------------------------------------------------------------------------------------------------------------

def partition(labels, clients, alpha, per_class, kind="official", seed=0):
    """Split off the labelled images of each class, then share labelled and unlabelled images among the clients.

    Smaller alpha is more skewed; inf is i.i.d. Every image gets exactly one owner; a client may end up empty
    only with "dirichlet", or where a set has fewer images than there are clients.

    labels: (N,) class ids. per_class: labelled images of each class, one int or one per class.
    kind: "official", the published ProxyFL/SAGE protocol (see `official_shares`), in which the class mixes of one
    client's labelled and unlabelled images differ; or "dirichlet", the textbook draw, the same for both.
    seed: 0 reproduces the published split (label permutations from seed 7, Dirichlet draws from seed 0).
    Returns (labelled, unlabelled): two lists with one index array a client.
    """
    labels = np.asarray(labels)
    classes = int(labels.max()) + 1
    if clients > len(labels):
        raise UserError(f"--clients {clients}: more clients than training images ({len(labels)}; --alpha {alpha})")
    per_class = np.broadcast_to(per_class, classes)
    random_state = np.random.RandomState(7 + seed)
    labelled, unlabelled = [], []
    for class_id in range(classes):
        members = random_state.permutation(np.flatnonzero(labels == class_id))
        labelled.append(members[: per_class[class_id]])
        unlabelled.append(members[per_class[class_id]:])
    shares = {"official": official_shares, "dirichlet": dirichlet_shares}[kind]
    if math.isinf(alpha):
        shares = iid_shares if kind == "official" else shuffled_shares
    return shares(labelled, clients, alpha, seed), shares(unlabelled, clients, alpha, seed)


def official_shares(class_members, clients, alpha, seed):
    """The published protocol: not one Dirichlet draw over all clients, but two-way draws inside i.i.d. slices.

    The shuffled images are cut into clients/2 slices. In each slice every class is divided between two parts with
    Dir(alpha, alpha); a part that already holds half of the slice gets nothing more; a slice is drawn again until
    both parts hold a quarter of it (at most 1,000 times: the cut that follows evens out the sizes in any case).
    The parts, end to end, are cut into equal consecutive shares: all clients own the same number of images.
    """
    random_state = np.random.RandomState(seed)
    pairs = np.array([(i, c) for c, members in enumerate(class_members) for i in members], np.int64).reshape(-1, 2)
    random_state.shuffle(pairs)                              # the same permutation as shuffling a list of its rows
    slices = math.ceil(clients / 2)
    width = int(2 / clients * len(pairs))
    ordered = []
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
                cuts = (np.cumsum(share / share.sum()) * len(members)).astype(int)[:-1]
                for images, more in zip(owned, np.split(members, cuts)):
                    images.extend(more.tolist())
            if min(map(len, owned)) >= int(0.5 * len(part) / ways):
                break
        ordered.extend(owned)
    return np.array_split(np.array(sum(ordered, []), dtype=np.int64), clients)


def dirichlet_shares(class_members, clients, alpha, seed):
    """Textbook: each class is divided over all clients by one draw from Dir(alpha, ..., alpha) (Hsu et al. 2019).

    The draw depends on the seed alone: a client's labelled and unlabelled images get the same shares of each class.
    No minimum size and so no retry: a client can come out empty; it then sits its rounds out with weight 0.
    """
    rng = stream(seed, "dirichlet")
    owned = [[] for _ in range(clients)]
    for members in class_members:
        share = rng.dirichlet(np.full(clients, alpha))
        cuts = np.round(np.cumsum(share)[:-1] * len(members)).astype(int)
        for client in np.flatnonzero(np.diff(np.concatenate([[0], cuts, [len(members)]]))):
            start, stop = (cuts[client - 1] if client else 0), (cuts[client] if client < clients - 1 else len(members))
            owned[client].append(members[start:stop])
    return [np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in owned]


def iid_shares(class_members, clients, alpha, seed):
    """The published protocol without skew: every class is cut into equal consecutive slices; draws nothing.

    A class with fewer images than clients leaves the same clients without any, so some may own no labelled image.
    """
    shares = np.arange(1, clients) / clients
    parts = [np.split(members, (shares * len(members)).astype(int)) for members in class_members]
    return [np.concatenate([part[k] for part in parts]) for k in range(clients)]


def shuffled_shares(class_members, clients, alpha, seed):
    """The limit of the textbook draw: all images shuffled, then cut into equal shares."""
    return np.array_split(stream(seed, "iid").permutation(np.concatenate(class_members)), clients)


def clip_partition(train_labels, test_labels, clients, beta, kind="dirichlet", random_state=None, shuffle=False):
    """Share training and test images among the clients: FedCoPL's published split, the same draws in the same order.

    Smaller beta is more skewed; inf is i.i.d. Every image gets exactly one owner; a client may own no test image.

    train_labels, test_labels: (n,) class ids. random_state: default clip_random_state(classes).
    kind: "dirichlet", "quantity" (each client holds a fifth of the classes) or "iid"; see the functions below.
    shuffle: "quantity" deals out consecutive images of a class, as published; this shuffles them first.
    Returns (train, test): two lists with one index array a client.
    """
    sets = [np.asarray(train_labels), np.asarray(test_labels)]
    classes = 1 + max(int(labels.max()) for labels in sets)
    if clients > len(sets[0]):
        raise UserError(f"--clients {clients}: more clients than training images ({len(sets[0])}; --beta {beta})")
    random_state = random_state or clip_random_state(classes)
    members = [[np.flatnonzero(labels == c) for c in range(classes)] for labels in sets]
    if kind == "quantity":
        return quantity_shares(members, clients, random_state, shuffle)
    if kind == "iid" or math.isinf(beta):
        owned = even_shares(members, clients, random_state)
    else:
        owned = skewed_shares(members, clients, beta, random_state)
    for of_client in zip(*owned):
        for images in of_client:
            random_state.shuffle(images)
    return owned


def clip_random_state(classes, split_seed=0):
    """The generator of clip_partition; split seed 0 is the published split, whatever the seed of the run.

    The official program seeds with 500 and draws one permutation of the classes while it reads their names.
    """
    random_state = np.random.RandomState(500 + split_seed)
    random_state.choice(classes, classes, replace=False)
    return random_state


def deal(members, share):
    """Cut one class's images by shares (clients,) that sum to 1; what the rounding down leaves is the last client's."""
    return np.split(members, (np.cumsum(share) * len(members)).astype(int)[:-1])


def even_shares(members, clients, random_state):
    """i.i.d.: every class is shuffled and cut into equal parts. The floats' rounding makes them slightly uneven."""
    parts = [[], []]
    for of_class in zip(*members):
        for k, images in enumerate(of_class):
            images = random_state.permutation(images)
            parts[k].append(deal(images, np.full(clients, 1 / clients)))
    return [[np.concatenate(of_client) for of_client in zip(*part)] for part in parts]


def skewed_shares(members, clients, beta, random_state, least=10, tries=200):
    """Each class is divided by one draw from Dir(beta, ..., beta) over the clients, the same for training and test.

    In either set a client that holds its even share already gets nothing more, so the two mixes can part. All is drawn
    again until each client owns `least` training images (fewer if there are not enough); the published settings need
    few tries. After `tries`, the largest client hands images to the smallest. The test set has no such condition.
    """
    total = [sum(map(len, of_set)) for of_set in members]
    least = min(least, total[0] // clients)
    for _ in range(tries):
        parts, sizes = [[], []], np.zeros((2, clients))
        for of_class in zip(*members):
            of_class = [random_state.permutation(images) for images in of_class]
            drawn = random_state.dirichlet(np.repeat(beta, clients))
            for k, images in enumerate(of_class):
                room = sizes[k] < total[k] / clients
                share = drawn * room
                if not share.sum() > 0:                      # beta so small that the draw is 0 or NaN there
                    share = np.eye(clients)[random_state.choice(np.flatnonzero(room) if room.any() else clients)]
                parts[k].append(deal(images, share / share.sum()))
                sizes[k] += [len(images) for images in parts[k][-1]]
        if sizes[0].min() >= least:
            break
    owned = [[np.concatenate(of_client) for of_client in zip(*part)] for part in parts]
    train = owned[0]
    while min(map(len, train)) < least:
        small, large = np.argmin([len(images) for images in train]), np.argmax([len(images) for images in train])
        train[small], train[large] = np.append(train[small], train[large][-1]), train[large][:-1]
    return owned


def quantity_shares(members, clients, random_state, shuffle):
    """Each client holds ceil(C / 5) classes: a class goes to the first fifth of the clients that still have room.

    All receivers but the last get a uniform number of its images, at least a K-th of the even share, at most that
    share; the last gets the rest. Training and test numbers are drawn apart. With 10 clients a block of classes is
    shared by fixed pairs, with 5 each class has one owner. Some numbers of classes and clients leave a client without
    any (the official program then stops): it owns nothing.
    """
    classes = len(members[0])
    room = np.full(clients, math.ceil(classes / min(clients, 5)))            # fewer than 5 clients: more than a fifth
    parts = [[[np.empty(0, np.int64)] for _ in range(clients)] for _ in members]
    for c, of_class in enumerate(zip(*members)):
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


# ---------------------------------------------------------------------------------------------------------------
# Augmentation
# ---------------------------------------------------------------------------------------------------------------
# FixMatch (Sohn et al., NeurIPS 2020, arXiv v2), Sec. 2.3 and the list of transformations in its
# appendix, on whole batches. Pure functions of tensors: the random numbers come in as uniform float32 draws in [0, 1),
# one row per image, made by the caller on the host, so one (seed, round, client) gives the same views on every device.
# All shapes are fixed, there is no loop over images, and nothing is read back to the host or sent from it.
# Letters: n images, S side in pixels; images are (n, 3, S, S) uint8, levels 0 .. 255.

WEAK_DRAWS = 3      # columns of `draws`: flip, shift down, shift right
STRONG_DRAWS = 13   # those 3 for its own weak view, (operation, level, apply?, sign) twice, cutout centre down, right

OPERATIONS = ("AutoContrast", "Brightness", "Color", "Contrast", "Equalize", "Identity", "Posterize", "Rotate",
              "Sharpness", "ShearX", "ShearY", "Solarize", "TranslateX", "TranslateY")
MAX_LEVEL = 10      # full strength, and m of RandAugment: the level itself is drawn from 1 .. m-1


def draw_integer(draw, k):
    """Uniform draw in [0, 1) -> int64 in 0 .. k-1. The clamp: a float64 draw just below 1 becomes 1 as a float32."""
    return (draw * k).long().clamp(max=k - 1)


def exact(integers):
    """To float64, in which Pillow calculates; to float32 on MPS, which has no float64 (a few pixels then differ)."""
    return integers.float() if integers.device.type == "mps" else integers.double()


def gather_pixels(images, index):
    """Pixel `index` (n, S, S) int64, counted row by row, of each image; the same one in all three channels."""
    return images.flatten(2).gather(2, index.flatten(1)[:, None].expand(-1, 3, -1)).view(images.shape)


def weak_view(images, draws, flip=True):
    """T_w: horizontal flip with p = 1/2 (if `flip`), reflect-pad by S // 8 (4 at S = 32), random S x S crop.

    images (n, 3, S, S) uint8, draws (n, 3) -> (n, 3, S, S) uint8. Shift s puts the crop's corner at s of the padded
    image, so s = S // 8 leaves the image where it is.
    """
    side = images.shape[-1]
    pad = side // 8
    pixel = torch.arange(side, device=images.device)

    def source(draw):                                               # crop, then undo the padding: where pixel i is from
        i = (pixel + draw_integer(draw, 2 * pad + 1)[:, None] - pad).abs()          # (n, S); -1 reflects to 1
        return side - 1 - (side - 1 - i).abs()                                      # and S reflects to S - 2

    row, column = source(draws[:, 1]), source(draws[:, 2])
    if flip:
        column = torch.where(draws[:, :1] < 0.5, side - 1 - column, column)
    return gather_pixels(images, row[:, :, None] * side + column[:, None, :])


def strong_view(images, draws, flip=True):
    """T_s: own flip and crop, then RandAugment with n = 2 operations at m = 10, then cutout.

    images (n, 3, S, S) uint8, draws (n, 13) -> (n, 3, S, S) uint8. Each operation is drawn with replacement, at a
    level uniform in 1 .. 9, and happens with probability 1/2; otherwise it is Identity.
    """
    images = weak_view(images, draws[:, :WEAK_DRAWS], flip)
    for first in (3, 7):
        op_draw, level_draw, apply_draw, sign_draw = draws[:, first:first + 4].unbind(1)
        op = draw_integer(op_draw, len(OPERATIONS)).masked_fill(apply_draw >= 0.5, OPERATIONS.index("Identity"))
        level = 1 + draw_integer(level_draw, MAX_LEVEL - 1)
        sign = 1 - 2 * (sign_draw < 0.5).long()
        images = rand_augment_op(images, op, level, sign)
    return cutout(images, draws[:, 11:13])


def rand_augment_op(images, op, level, sign):
    """Apply to each image its own operation: op (n,) int64 counts in OPERATIONS, level (n,) 1 .. 9, sign (n,) +-1.

    Every image passes through all three families below; in the two that are not its own it meets an identity.
    What a level means is from FixMatch's list of transformations; the arithmetic is Pillow's, rounding included.
    """
    chosen = {name: op == i for i, name in enumerate(OPERATIONS)}                   # name -> (n,) bool
    images = enhance(images, chosen, level)
    images = lookup(images, chosen, level)
    return affine(images, chosen, level, sign)


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
    # Integers, then float64, then float32: the float32 that Pillow has, so that its truncation falls on the same side
    factor = (exact(9 * level + 5) * 0.01).float().masked_fill(~blends, 1).view(-1, 1, 1, 1)
    return (wide - degenerate).mul(factor).add_(degenerate).to(torch.uint8)         # a factor of 1 gives the image


def lookup(images, chosen, level):
    """AutoContrast, Equalize, Posterize, Solarize: one table of 256 levels per image and channel, read once."""
    flat = images.flatten(2)
    index = flat.long()                                                             # (n, 3, S * S)
    low, high = flat.amin(2, keepdim=True).long(), flat.amax(2, keepdim=True).long()    # (n, 3, 1)
    value = torch.arange(256, dtype=torch.int32, device=images.device)              # (256,), the identity's table
    level = level.int().view(-1, 1, 1)                                              # (n, 1, 1)

    # AutoContrast: stretch low .. high to 0 .. 255. In float64 and in this order as Pillow, whose `high` may become 254
    span = exact((high - low).clamp(min=1))
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


def affine(images, chosen, level, sign):
    """Rotate by 3 level degrees, ShearX/Y by 0.03 level, TranslateX/Y by 0.03 level S pixels (towards 0); black fill.

    Output pixel (row y, column x) shows the input pixel under its centre, in Pillow's 16.16 fixed point:
    column = cos x + right y + column_0, row = down x + cos y + row_0.
    """
    side = images.shape[-1]
    step = exact(sign * level)                                                      # (n,), as all up to `fixed`
    angle = chosen["Rotate"] * step * math.radians(-3)
    shift = sign * (level * 3 * side // 100)
    cos = angle.cos()
    right = angle.sin() + chosen["ShearX"] * step * 0.03
    down = -angle.sin() + chosen["ShearY"] * step * 0.03
    origin = chosen["Rotate"] * (side / 2)                                          # shears keep the corner in place
    column_0 = origin + (cos + right) * (0.5 - origin) + chosen["TranslateX"] * shift
    row_0 = origin + (down + cos) * (0.5 - origin) + chosen["TranslateY"] * shift

    fixed = torch.stack([cos, right, down, column_0, row_0]).mul(65536).add(0.5).floor().int()
    cos, right, down, column_0, row_0 = fixed[:, :, None, None]                     # (n, 1, 1) each
    x = torch.arange(side, dtype=torch.int32, device=images.device)
    y = x[:, None]
    column = (cos * x + column_0 + right * y) >> 16                                 # (n, S, S)
    row = (cos * y + row_0 + down * x) >> 16
    outside = (column < 0) | (column >= side) | (row < 0) | (row >= side)
    index = row * side + column
    return gather_pixels(images, index.masked_fill(outside, 0).long()).masked_fill(outside[:, None], 0)


def cutout(images, draws):
    """Grey (127) square of S // 2 pixels around a uniform centre, always; draws (n, 2): centre down, right.

    It starts at the pixel floor(max(0, draw * S - S / 4)), so it moves inwards at the top and left edge, and is cut
    off at the bottom and right one.
    """
    side = images.shape[-1]
    size = side // 2
    pixel = torch.arange(side, device=images.device)
    first = (draws * side - size / 2).clamp(min=0).floor()[:, :, None]              # (n, 2, 1)
    inside = (pixel >= first) & (pixel < first + size)                              # (n, 2, S)
    return images.masked_fill((inside[:, 0, :, None] & inside[:, 1, None, :])[:, None], 127)


def normalise(images, mean, std):
    """(n, 3, S, S) uint8 -> float32, channels_last: (level / 255 - mean) / std; mean, std: one number per channel."""
    out = torch.empty(images.shape, device=images.device, memory_format=torch.channels_last)
    for channel, (m, s) in enumerate(zip(mean, std)):       # numbers, as a tensor made here would stall the GPU
        out[:, channel] = (images[:, channel] / 255 - m) / s
    return out
