"""How fast is a local step, measured against a yardstick of the same machine in the same run?

    python tests/bench_step.py                               # ProxyFL at the paper's size (width 64, 128 + 2 x 256)
    python tests/bench_step.py --device cuda --amp --compile --csv results/bench.csv
    python tests/bench_step.py --method fedcopl              # FedCoPL, ViT-B/32: a training step and a labelling pass
    python tests/bench_step.py --method baselines            # every semi-supervised method, relative to FixMatch-GPL
    python tests/bench_step.py --method clip-baselines       # text-only prompt methods, relative to FedCoPL, ViT-B/32

ProxyFL's yardstick is a plain matrix product; FLOPs are counted by torch (convolutions and matrix products, forward and
backward, the teacher included; one multiply-add is two). FedCoPL's is the plain forward of tests/plain_clip.py: prompts
appended as tokens and dropped after each block, 77 text tokens, texts encoded again for every batch. Random images and
weights; the code that runs is client_update and predict of the scripts themselves. The baselines train on enlarged
digits, whole rounds by their main(); what is timed is client_update, per step. pFedPrompt's step is PromptFL's. Not
collected by pytest.
"""

import argparse
import contextlib
import copy
import csv
import io
import logging
import resource
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import open_clip
import plain_clip
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import fedcopl
import proxyfl
from scripts import load


def seconds(function, device, repeats):
    """Median wall time of function() after one warm-up call."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def matmul_gflops(device, dtype):
    """Of a square product: the yardstick."""
    side = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / seconds(lambda: a @ b, device, 10) / 1e9


def peak_gib(device):
    """Of the device's memory since the last reset, or of the whole process so far on a CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def host_syncs(function, device):
    """Whether the function makes the host wait for the GPU: none, found (...), or not on a GPU."""
    if device.type != "cuda":
        return "not on a GPU"
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
        return "none"
    except RuntimeError as error:
        return f"found ({error})"
    finally:
        torch.cuda.set_sync_debug_mode("default")


def report(result, file):
    """Print one line; append a row to the CSV file."""
    print(" | ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = not file.exists()
        with open(file, "a", newline="") as table:
            writer = csv.DictWriter(table, result)
            if new:
                writer.writeheader()
            writer.writerow(result)


def bench_proxyfl(options, device):
    """A local step of ProxyFL with its augmentation."""
    args = proxyfl.parse_args(
        [
            "--dataset",
            "cifar10",
            "--width",
            str(options.width),
            "--batch-size",
            str(options.batch_size),
            "--mu",
            str(options.mu),
            "--local-epochs",
            "1",
        ]
    )
    args.amp = options.amp
    n, rng = options.steps * options.batch_size, np.random.default_rng(0)
    data = proxyfl.FederatedData(
        torch.from_numpy(rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)).to(device),
        torch.from_numpy(rng.integers(0, options.classes, n)).to(device),
        [np.arange(n // 10)],
        [np.arange(n // 10, n)],
        (proxyfl.CIFAR10_MEAN, proxyfl.CIFAR10_STD),
        None,
    )
    net, teacher = (
        proxyfl.ResNet8(options.classes, options.width, heads=True).to(device, memory_format=torch.channels_last)
        for _ in range(2)
    )
    optimizer = torch.optim.SGD(net.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    received = proxyfl.Broadcast(
        {name: value.detach().clone() for name, value in net.state_dict().items()},
        torch.full((options.classes,), 1 / options.classes, dtype=torch.float64),
    )

    def client():
        return proxyfl.client_update(args, 1, 0, data, received, net, teacher, optimizer)

    with FlopCounterMode(display=False) as counter:  # before compilation hides the operators
        client()
    flops = counter.get_total_flops() / options.steps
    if options.compile:
        net.compile(), teacher.compile()
    client()
    syncs = host_syncs(client, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    dtype = torch.bfloat16 if options.amp else torch.float32
    before = matmul_gflops(device, dtype)
    step = seconds(client, device, options.repeats) / options.steps
    matmul = (before + matmul_gflops(device, dtype)) / 2

    rows = options.batch_size * (1 + 2 * options.mu)
    lab, unl = (
        torch.arange(options.batch_size, device=device) % n,
        torch.arange(options.mu * options.batch_size, device=device) % n,
    )
    weak, strong = (
        torch.rand(rows, common.WEAK_DRAWS, device=device),
        torch.rand(len(unl), common.STRONG_DRAWS, device=device),
    )

    def augment():
        common.normalise(
            torch.cat(
                [
                    common.weak_view(data.images[lab], weak[: len(lab)]),
                    common.weak_view(data.images[unl], weak[: len(unl)]),
                    common.strong_view(data.images[unl], strong),
                ]
            ),
            *data.stats,
        )

    views = seconds(augment, device, 10)
    result = {
        "device": common.device_name(device),
        "torch": torch.__version__,
        "width": options.width,
        "rows": rows,
        "classes": options.classes,
        "amp": options.amp,
        "compile": options.compile,
        "step_s": round(step, 5),
        "images_per_s": round(rows / step, 1),
        "gflops": round(flops / step / 1e9, 1),
        "matmul_gflops": round(matmul, 1),
        "ratio": round(flops / step / 1e9 / matmul, 3),
        "augment_pct": round(100 * views / step, 2),
        "host_syncs": syncs,
        "peak_gib": peak_gib(device),
    }
    report(result, options.csv)


def random_clip(options):
    """The model of --model with random weights, and its tokenizer."""
    logging.disable(logging.WARNING)  # of open_clip: random weights are wanted
    torch.manual_seed(0)
    net, tokenizer = open_clip.create_model(options.model), open_clip.get_tokenizer(options.model)
    net.logit_scale.data.fill_(np.log(100))
    return net, tokenizer


def bench_fedcopl(options, device):
    """A training step and a labelling pass of FedCoPL for each number of classes, against the plain forward."""
    net, tokenizer = random_clip(options)
    clip = fedcopl.PromptedCLIP(copy.deepcopy(net), tokenizer).to(device)  # which rewrites the model it is given
    net = net.to(device).eval().requires_grad_(False)
    args = fedcopl.parse_args(["--dataset", "dtd", "--local-epochs", "1", "--batch-size", str(options.batch_size)])
    args.amp = options.amp
    side = net.visual.image_size[0]
    n, rng = options.steps * options.batch_size, np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (n, 3, side, side), dtype=np.uint8)).to(device)
    owned = [np.arange(n)]
    data = fedcopl.FederatedData(images, images, torch.zeros(n), torch.zeros(n), owned, owned, ((0.5,) * 3, (0.3,) * 3))
    shapes = (1, len(clip.vision) - 1, 5, net.visual.conv1.out_channels), (1, 16, net.positional_embedding.shape[1])
    prompts = fedcopl.Prompts(*(0.02 * torch.randn(shape, device=device) for shape in shapes))
    learned = fedcopl.Prompts(*(nn.Parameter(value[0].clone()) for value in prompts))
    optimizer = torch.optim.SGD([{"params": [value]} for value in learned], 0.1, 0.9, weight_decay=0.05)
    matmul = matmul_gflops(device, torch.bfloat16 if options.amp else torch.float32)
    for classes in options.classes or (10, 47, 100, 200):
        names = [f"class number {i}" for i in range(classes)]  # 22 tokens with the prompts and the period, like DTD's
        text = clip.text_input([f"{name}." for name in names], 16)
        label = torch.from_numpy(rng.integers(0, classes, n))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

        def train():
            labels = fedcopl.Labels(label, F.one_hot(label, classes).bool())
            fedcopl.client_update(args, 0, 0, clip, text, data, prompts, labels, learned, optimizer)

        def train_plainly():
            for batch, target in zip(images.split(options.batch_size), label.to(device).split(options.batch_size)):
                with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                    features = plain_clip.image_features(net, common.normalise(batch, *data.stats), learned.visual)
                    words = plain_clip.text_features(net, tokenizer, names, learned.text)
                loss = F.cross_entropy(clip.scale * features.float() @ words.float().T, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        @torch.no_grad()
        def predict():
            words = clip.encode_text(text, learned.text)
            return fedcopl.predict(clip, data, images, owned[0], learned.visual, words)

        @torch.no_grad()
        def predict_plainly():
            parts = []
            for batch in images.split(options.batch_size):
                features = plain_clip.image_features(net, common.normalise(batch, *data.stats), learned.visual)
                words = plain_clip.text_features(net, tokenizer, names, learned.text)
                parts.append((clip.scale * features @ words.T).softmax(1))
            return torch.cat(parts)

        flops = []
        for function in (train, train_plainly):
            with FlopCounterMode(display=False) as counter:
                function()
            flops.append(counter.get_total_flops() / options.steps)
        error = (predict() - predict_plainly()).abs().max().item()
        syncs = host_syncs(train, device)
        step = seconds(train, device, options.repeats) / options.steps
        peak = peak_gib(device)
        labelling = seconds(predict, device, options.repeats) / options.steps
        plain_step = seconds(train_plainly, device, options.repeats) / options.steps
        plain_labelling = seconds(predict_plainly, device, options.repeats) / options.steps
        result = {
            "device": common.device_name(device),
            "torch": torch.__version__,
            "model": options.model,
            "amp": options.amp,
            "batch": options.batch_size,
            "classes": classes,
            "step_s": round(step, 4),
            "plain_step_s": round(plain_step, 4),
            "step_ratio": round(plain_step / step, 2),
            "flop_ratio": round(flops[1] / flops[0], 2),
            "gflops": round(flops[0] / step / 1e9, 1),
            "label_batch_s": round(labelling, 4),
            "plain_label_batch_s": round(plain_labelling, 4),
            "label_ratio": round(plain_labelling / labelling, 2),
            "max_prob_error": f"{error:.1e}",
            "host_syncs": syncs,
            "peak_gib": peak,
        }
        report(result | {"matmul_gflops": round(matmul, 1)}, options.csv)


def bench_clip_baselines(options, device):
    """Seconds of a local step of the text-only methods and of FedCoPL; the methods take turns.

    Image features are random: text-only methods compute them once a run, which no step contains.
    """
    net, tokenizer = random_clip(options)
    clip = fedcopl.PromptedCLIP(net, tokenizer).to(device)
    n, rng = options.steps * options.batch_size, np.random.default_rng(0)
    side, dim = net.visual.image_size[0], net.text_projection.shape[1]
    patches = len(net.visual.positional_embedding) - 1
    vision, words = net.visual.conv1.out_channels, net.positional_embedding.shape[1]
    draw = {
        "image": torch.from_numpy(rng.integers(0, 256, (n, 3, side, side), dtype=np.uint8)).to(device),
        "feature": F.normalize(torch.randn(n, dim, device=device), dim=-1),
        "patch": F.normalize(torch.randn(n, patches, dim, device=device), dim=-1),
    }
    owned, truth, stats = [np.arange(n)], torch.zeros(n), ((0.5,) * 3, (0.3,) * 3)
    shapes = {"visual": (1, len(clip.vision) - 1, 5, vision), "text": (1, 16, words), "own_text": (1, 16, words)}
    data = {
        "fedcopl.py": (draw["image"], draw["image"], truth, truth, owned, owned, stats),
        "baselines/promptfl.py": (draw["feature"], draw["feature"], truth, truth, owned, owned),
        "baselines/fedotp.py": (*[[draw["feature"]]] * 2, *[[draw["patch"]]] * 2, truth, truth, owned, owned),
    }
    for classes in options.classes or (10, 47, 100):
        text = clip.text_input([f"class number {i}." for i in range(classes)], 16)
        label, times, updates = torch.from_numpy(rng.integers(0, classes, n)), {}, {}
        for script, parts in data.items():
            module = load(script)
            size = ["--local-epochs", "1", "--batch-size", str(options.batch_size)]
            args = module.parse_args(["--dataset", "dtd", *size])
            args.amp = options.amp
            prompts = module.Prompts(*(0.02 * torch.randn(shapes[k], device=device) for k in module.Prompts._fields))
            learned = module.Prompts(*(nn.Parameter(value[0].clone()) for value in prompts))
            optimizer = torch.optim.SGD([{"params": [value]} for value in learned], 0.1, 0.9, weight_decay=0.05)
            labels = module.Labels(label, F.one_hot(label, classes).bool())
            given = args, 0, 0, clip, text, module.FederatedData(*parts), prompts, labels, learned, optimizer
            updates[script], times[script] = partial(module.client_update, *given), []
        for _ in range(options.repeats):
            for script, update in updates.items():
                times[script].append(seconds(update, device, 1) / options.steps)
        first = statistics.median(times["fedcopl.py"])
        for script, spent in times.items():
            step = statistics.median(spent)
            result = {
                "device": common.device_name(device),
                "torch": torch.__version__,
                "model": options.model,
                "amp": options.amp,
                "batch": options.batch_size,
                "classes": classes,
                "script": script,
                "step_s": round(step, 4),
                "relative": round(step / first, 3),
            }
            report(result, options.csv)


BASELINES = {  # row: script and flags; relative to the first
    "FixMatch-GPL": ("baselines/fixmatch.py", "--teacher global"),
    "FixMatch-LPL": ("baselines/fixmatch.py", "--teacher local"),
    "FixMatch-GPL + GPT + ICPL": ("baselines/fixmatch.py", "--gpt --icpl"),
    "FedProx + FixMatch": ("baselines/fixmatch.py", "--teacher local --prox-mu 0.001"),
    "FedAvg": ("baselines/fedavg.py", ""),
    "FedProx": ("baselines/fedavg.py", "--prox-mu 0.001"),
    "FlexMatch": ("baselines/flexmatch.py", ""),
    "FedMatch": ("baselines/fedmatch.py", ""),
    "FedMatch, helper round": ("baselines/fedmatch.py", "--helper-interval 1"),
    "FedLabel": ("baselines/fedlabel.py", ""),
    "FedLabel, two-phase": ("baselines/fedlabel.py", "--two-phase"),
    "FedLoKe": ("baselines/fedloke.py", ""),
    "FedDure, paper": ("baselines/feddure.py", "--variant paper"),
    "FedDure, official": ("baselines/feddure.py", "--variant official"),
    "FedDB": ("baselines/feddb.py", ""),
    "SAGE": ("baselines/sage.py", ""),
    "PROTO": ("baselines/fedproto.py", ""),
    "ProxyFL": ("proxyfl.py", ""),
}


def bench_baselines(options, device):
    """Seconds of a local step of each method; the rows take turns, so that all see the same machine."""
    times = {name: [] for name in BASELINES}
    for turn in range(options.repeats + 1):  # the first turn warms up
        for name, (script, flags) in BASELINES.items():
            module = load(script)
            rounds = 2 if "helper" in flags else 1  # helpers come from clients trained before
            update = "two_phase_update" if "--two-phase" in flags else "client_update"
            honest, spent, steps = getattr(module, update), [], []

            def timed(*args):
                if device.type == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                upload = honest(*args)
                steps.append(upload.metrics[module.METRICS.index("steps")].item())
                spent.append(time.perf_counter() - start)
                return upload

            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                setattr(module, update, timed)
                try:
                    module.main(
                        f"--train-subset 640 --image-size 32 --width {options.width} --batch-size {options.batch_size} "
                        f"--clients 4 --clients-per-round 2 --local-epochs 1 --rounds {rounds} "
                        f"--device {options.device} --out-dir {folder} {flags}".split()
                    )
                finally:
                    setattr(module, update, honest)
            if turn:
                times[name].append(sum(spent[-2:]) / sum(steps[-2:]))  # of the last round
    first = statistics.median(times["FixMatch-GPL"])
    for name in BASELINES:
        step = statistics.median(times[name])
        result = {
            "device": common.device_name(device),
            "torch": torch.__version__,
            "width": options.width,
            "batch": options.batch_size,
            "method": name,
            "step_s": round(step, 4),
            "relative": round(step / first, 2),
            "spread": round((max(times[name]) - min(times[name])) / step, 2),
        }
        report(result, options.csv)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--method", choices=("proxyfl", "fedcopl", "baselines", "clip-baselines"), default="proxyfl")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-size", type=int, default=None, help="default: the paper's, 128 or 64; baselines: 32")
    parser.add_argument("--classes", type=int, nargs="*", help="default: 10; fedcopl: 10 47 100 200; clip: 10 47 100")
    parser.add_argument("--width", type=int, default=None, help="proxyfl: 64; baselines: 16")
    parser.add_argument("--mu", type=int, default=2, help="proxyfl")
    parser.add_argument("--model", default="ViT-B-32-quickgelu", help="fedcopl: an open_clip model")
    parser.add_argument("--steps", type=int, default=None, help="steps a timed client has; default 4, fedcopl 1")
    parser.add_argument("--repeats", type=int, default=3, help="timed clients; the median counts")
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False, help="proxyfl")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    options = parser.parse_args()
    device = common.choose_device(options.device)
    if options.method == "baselines":
        options.batch_size, options.width = options.batch_size or 32, options.width or 16
        bench_baselines(options, device)
    elif options.method in ("fedcopl", "clip-baselines"):
        options.batch_size, options.steps = options.batch_size or 64, options.steps or 1
        (bench_fedcopl if options.method == "fedcopl" else bench_clip_baselines)(options, device)
    else:
        options.batch_size, options.steps = options.batch_size or 128, options.steps or 4
        options.width, options.classes = options.width or 64, (options.classes or [10])[0]
        bench_proxyfl(options, device)


if __name__ == "__main__":
    common.launch(main)
