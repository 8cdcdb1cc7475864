"""How fast is a local step, measured against a yardstick of the same machine in the same run?

    python tools/bench_step.py                               # ProxyFL at the paper's size (width 64, 128 + 2 x 256)
    python tools/bench_step.py --device cuda --amp --compile --csv results/bench.csv
    python tools/bench_step.py --method fedcopl              # FedCoPL, ViT-B/32: a training step and a labelling pass
    python tools/bench_step.py --method baselines            # every semi-supervised method, relative to FixMatch-GPL
    python tools/bench_step.py --method clip-baselines       # text-only prompt methods, relative to FedCoPL, ViT-B/32

ProxyFL's yardstick is a plain matrix product; FLOPs are counted by torch (convolutions and matrix products, forward and
backward, the teacher included; one multiply-add is two); augment_pct is local_batches, random draws included. FedCoPL's
yardstick is the plain forward of tests/plain_clip.py: prompts appended as tokens and dropped after each block, 77 text
tokens, texts encoded again for every batch. Random images and weights; the code that runs is client_update and predict
of the scripts themselves. The baselines train on enlarged digits: timed is client_update, once more as main() called it
in the last round, per step. pFedPrompt's step is PromptFL's.
"""

import argparse
import copy
import csv
import importlib
import io
import resource
import sys
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]              # tests: FedCoPL's yardstick is what they compare it with
import common
import fedcopl
import plain_clip
import proxyfl

BASELINES = {                                                # row: script and flags
    "FixMatch-GPL": "baselines.fixmatch --teacher global",
    "FixMatch-LPL": "baselines.fixmatch --teacher local",
    "FixMatch-GPL + GPT + ICPL": "baselines.fixmatch --gpt --icpl",
    "FedProx + FixMatch": "baselines.fixmatch --teacher local --prox-mu 0.001",
    "FedAvg": "baselines.fedavg",
    "FedProx": "baselines.fedavg --prox-mu 0.001",
    "FlexMatch": "baselines.flexmatch",
    "FedMatch": "baselines.fedmatch",
    "FedMatch, helper round": "baselines.fedmatch --helper-interval 1 --rounds 2",   # helpers have trained before
    "FedLabel": "baselines.fedlabel",
    "FedLabel, two-phase": "baselines.fedlabel --two-phase",
    "FedLoKe": "baselines.fedloke",
    "FedDure, paper": "baselines.feddure --variant paper",
    "FedDure, official": "baselines.feddure --variant official",
    "FedDB": "baselines.feddb",
    "SAGE": "baselines.sage",
    "PROTO": "baselines.fedproto",
    "ProxyFL": "proxyfl"}
STATS = (0.5,) * 3, (0.3,) * 3
random_pixels = partial(torch.randint, 0, 256, dtype=torch.uint8)


def times(device, repeats, *functions):
    """Wall times (functions, repeats); the functions take turns, so all see the same machine, after one to warm up."""
    def timed(function):
        wait()
        start = time.perf_counter()
        function()
        wait()
        return time.perf_counter() - start

    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    return np.array([[timed(function) for function in functions] for _ in range(repeats + 1)])[1:].T


def gflop(function):
    """Of one call."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() / 1e9


def square_product(device, amp):
    """The yardstick, a function."""
    side = 8192 if device.type == "cuda" else 2048
    return partial(torch.mm, *torch.randn(2, side, side, device=device, dtype=torch.bfloat16 if amp else torch.float32))


def watch(function, device):
    """Of one call: whether it makes the host wait for the GPU, and peak memory; on a CPU the process's so far."""
    if device.type != "cuda":
        gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return {"host_syncs": "not on a GPU", "peak_gib": round(gib, 2)}
    syncs = "none"
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    except RuntimeError as error:
        syncs = f"found ({error})"
    torch.cuda.set_sync_debug_mode("default")
    return {"host_syncs": syncs, "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2)}


# ---- What each --method measures: generators of rows ----------------------------------------------------------------

def bench_proxyfl(options, device):
    """A local step of ProxyFL with its augmentation."""
    args = proxyfl.parse_args(f"--dataset cifar10 --local-epochs 1 --width {options.width} "
                              f"--batch-size {options.batch_size}".split())
    args.amp, n, product = options.amp, options.steps * options.batch_size, square_product(device, options.amp)
    for classes in options.classes:
        data = common.FederatedData(random_pixels((n, 3, 32, 32), device=device),
                                    torch.randint(classes, (n,), device=device), [np.arange(n // 10)],
                                    [np.arange(n // 10, n)], STATS, None, None, [], {})
        net, teacher = (proxyfl.ResNet8(classes, options.width, heads=True).to(
            device, memory_format=torch.channels_last) for _ in range(2))
        optimizer = torch.optim.SGD(net.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
        received = proxyfl.Broadcast({name: value.clone() for name, value in net.state_dict().items()},
                                     torch.full((classes,), 1 / classes, dtype=torch.float64))
        client = partial(proxyfl.client_update, args, 1, 0, data, received, net, teacher, optimizer)
        work = gflop(client)                                               # before compilation hides the operators
        if options.compile:
            net.compile()
            teacher.compile()
        client()
        watched = watch(client, device)

        def augment():                                                     # the rows of each step
            batches = proxyfl.local_batches(args, data, 0, common.stream(args.seed, "client", 1, 0))
            return [len(batch.views) for _, batch in batches]

        rows = augment()
        spent, product_s, augment_s = np.median(times(device, options.repeats, client, product, augment), 1).tolist()
        yield {"width": options.width, "rows": rows[0], "classes": classes, "amp": options.amp,
               "compile": options.compile, "step_s": round(spent / len(rows), 5),
               "images_per_s": round(sum(rows) / spent, 1), "gflops": round(work / spent, 1),
               "matmul_gflops": round(gflop(product) / product_s, 1),
               "ratio": round(work / spent / (gflop(product) / product_s), 3),
               "augment_pct": round(100 * augment_s / spent, 2), **watched}


def random_clip(model):
    """An open_clip model with random weights, and its tokenizer."""
    net = open_clip.create_model(model).eval().requires_grad_(False)
    net.logit_scale.fill_(np.log(100))
    return net, open_clip.get_tokenizer(model)


def clip_client(script, options, clip, classes, **data):
    """client_update of a CLIP script and its arguments, for a client of --steps batches; data: of its FederatedData."""
    module, device, n = importlib.import_module(script), clip.scale.device, options.steps * options.batch_size
    args = module.parse_args(f"--dataset dtd --local-epochs 1 --batch-size {options.batch_size}".split())
    args.amp = options.amp
    vision, words = clip.clip.visual.conv1.out_channels, clip.clip.positional_embedding.shape[1]
    shapes = {"visual": (1, len(clip.vision) - 1, 5, vision), "text": (1, 16, words), "own_text": (1, 16, words)}
    prompts = module.Prompts(*(0.02 * torch.randn(shapes[name], device=device) for name in module.Prompts._fields))
    learned = module.Prompts(*(torch.nn.Parameter(value[0].clone()) for value in prompts))
    optimizer = torch.optim.SGD([{"params": [value]} for value in learned], 0.1, 0.9, weight_decay=0.05)
    text = clip.text_input([f"{name}." for name in class_names(classes)], 16)
    label = torch.randint(classes, (n,))
    labels = module.Labels(label, F.one_hot(label, classes).bool())
    data |= {"train": [np.arange(n)], "stats": STATS}
    data = module.FederatedData(*map(data.get, module.FederatedData._fields))
    return partial(module.client_update, args, 0, 0, clip, text, data, prompts, labels, learned, optimizer)


def class_names(classes):                                                  # 22 tokens with prompts, like DTD's
    return [f"class number {i}" for i in range(classes)]


def bench_fedcopl(options, device):
    """A training step and a labelling pass of FedCoPL for each number of classes, against the plain forward."""
    net, tokenizer = random_clip(options.model)
    clip = fedcopl.PromptedCLIP(copy.deepcopy(net), tokenizer).to(device)  # which rewrites the model it is given
    net, size, side = net.to(device), options.batch_size, net.visual.image_size[0]
    images = random_pixels((options.steps * size, 3, side, side), device=device)
    product = square_product(device, options.amp)
    for classes in options.classes:
        train = clip_client("fedcopl", options, clip, classes, images=images)
        *_, text, data, _, labels, learned, optimizer = train.args

        def plain_logits(batch, amp=False):
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                features = plain_clip.image_features(net, common.normalise(batch, *STATS), learned.visual)
                words = plain_clip.text_features(net, tokenizer, class_names(classes), learned.text)
            return plain_clip.logits(net, features.float(), words.float())

        def train_plainly():
            for batch, target in zip(images.split(size), labels.pseudo_label.to(device).split(size)):
                loss = F.cross_entropy(plain_logits(batch, options.amp), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        @torch.no_grad()
        def predict():
            words = clip.encode_text(text, learned.text)
            return fedcopl.predict(clip, data, images, data.train[0], learned.visual, words)

        @torch.no_grad()
        def predict_plainly():
            return torch.cat([plain_logits(batch).softmax(1) for batch in images.split(size)])

        work, plain_work = gflop(train), gflop(train_plainly)
        error = (predict() - predict_plainly()).abs().max().item()
        watched = watch(train, device)
        spent = times(device, options.repeats, train, train_plainly, predict, predict_plainly, product)
        *spent, product_s = np.median(spent, 1).tolist()
        step, plain_step, labelling, plain_labelling = (value / options.steps for value in spent)
        yield {"model": options.model, "amp": options.amp, "batch": size, "classes": classes,
               "step_s": round(step, 4), "plain_step_s": round(plain_step, 4),
               "step_ratio": round(plain_step / step, 2), "flop_ratio": round(plain_work / work, 2),
               "gflops": round(work / options.steps / step, 1), "label_batch_s": round(labelling, 4),
               "plain_label_batch_s": round(plain_labelling, 4), "label_ratio": round(plain_labelling / labelling, 2),
               "max_prob_error": f"{error:.1e}", **watched, "matmul_gflops": round(gflop(product) / product_s, 1)}


def bench_clip_baselines(options, device):
    """A local step of FedCoPL and of the text-only methods, whose image features are random."""
    clip, n = fedcopl.PromptedCLIP(*random_clip(options.model)).to(device), options.steps * options.batch_size
    side, dim = clip.clip.visual.image_size[0], clip.clip.text_projection.shape[1]
    features, patches = (F.normalize(torch.randn(shape, device=device), dim=-1)
                         for shape in ((n, dim), (n, len(clip.clip.visual.positional_embedding) - 1, dim)))
    scripts = {"fedcopl": {"images": random_pixels((n, 3, side, side), device=device)},
               "baselines.promptfl": {"features": features},
               "baselines.fedotp": {"features": [features], "patches": [patches]}}
    for classes in options.classes:
        updates = [clip_client(script, options, clip, classes, **data) for script, data in scripts.items()]
        steps = np.median(times(device, options.repeats, *updates), 1).tolist()
        for script, step in zip(scripts, steps):
            yield {"model": options.model, "amp": options.amp, "batch": options.batch_size, "classes": classes,
                   "script": script.replace(".", "/") + ".py", "step_s": round(step / options.steps, 4),
                   "relative": round(step / steps[0], 3)}


def last_round(options, device, script, *flags):
    """A function that trains both clients of a run's last round once more, and the number of steps that it takes."""
    module, calls = importlib.import_module(script), []
    name = "two_phase_update" if "--two-phase" in flags else "client_update"
    update = getattr(module, name)

    def kept(*args):
        calls.append(partial(update, *args))
        return update(*args)

    def again():
        return [call() for call in calls[-2:]]

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), patch.object(module, name, kept):
        module.main(f"--train-subset 640 --image-size 32 --width {options.width} --batch-size {options.batch_size} "
                    "--clients 4 --clients-per-round 2 --local-epochs 1 --rounds 1 "
                    f"--device {device} --out-dir {folder}".split() + [*flags])
    return again, sum(upload.metrics[module.METRICS.index("steps")].item() for upload in again())


def bench_baselines(options, device):
    """A local step of each semi-supervised method."""
    clients, steps = zip(*(last_round(options, device, *row.split()) for row in BASELINES.values()))
    spent = times(device, options.repeats, *clients) / np.array(steps)[:, None]
    medians = np.median(spent, 1).tolist()
    for name, step, spread in zip(BASELINES, medians, np.ptp(spent, 1).tolist()):
        yield {"width": options.width, "batch": options.batch_size, "method": name, "step_s": round(step, 4),
               "relative": round(step / medians[0], 2), "spread": round(spread / step, 2)}


VIT = "ViT-B-32-quickgelu"
METHODS = {                                                  # what measures, and the options it reads with defaults
    "proxyfl": (bench_proxyfl, dict(batch_size=128, classes=[10], steps=4, width=64, amp=False, compile=False)),
    "fedcopl": (bench_fedcopl, dict(batch_size=64, classes=[10, 47, 100, 200], steps=1, model=VIT, amp=False)),
    "baselines": (bench_baselines, dict(batch_size=32, width=16)),
    "clip-baselines": (bench_clip_baselines, dict(batch_size=64, classes=[10, 47, 100], steps=1, model=VIT, amp=False))}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add, whole = parser.add_argument, common.number(int, 1)
    add("--method", choices=METHODS, default="proxyfl")
    add("--device", default="auto")
    add("--batch-size", type=whole)
    add("--classes", type=whole, nargs="+")
    add("--width", type=whole, help="channels of ResNet-8's first stage")
    add("--model", help="an open_clip model")
    add("--steps", type=whole, help="steps that a timed client has")
    add("--repeats", type=whole, default=3, help="timed clients; the median counts [3]")
    add("--amp", action=common.switch, help="bfloat16 autocast")
    add("--compile", action=common.switch, help="torch.compile the networks")
    add("--csv", type=Path, help="append the figures to this file")
    options = parser.parse_args(argv)
    bench, defaults = METHODS[options.method]
    for name, value in vars(options).items():
        if value is not None and any(name in more for _, more in METHODS.values()) and name not in defaults:
            parser.error(f"--{name.replace('_', '-')} is not for --method {options.method}")
    vars(options).update({name: value for name, value in defaults.items() if getattr(options, name) is None})
    device = common.choose_device(options.device)
    machine = {"device": common.environment(device)["device"], "torch": torch.__version__}
    for row in map(machine.__or__, bench(options, device)):
        print(" | ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if options.csv:
            with open(options.csv, "a", newline="") as file:
                writer = csv.DictWriter(file, row)
                if not file.tell():
                    writer.writeheader()
                writer.writerow(row)


if __name__ == "__main__":
    common.launch(main)
