"""How fast is a local step of ProxyFL, measured against a plain matrix product of the same machine in the same run?

    python tests/bench_step.py                               # this machine, the paper's size (width 64, 128 + 2 x 256)
    python tests/bench_step.py --device cuda --amp --compile --csv results/bench.csv

Random images; the code that runs is proxyfl.client_update itself. FLOPs are counted by torch (convolutions and matrix
products, forward and backward, the teacher included; one multiply-add is two). Not collected by pytest.
"""

import argparse
import csv
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import proxyfl


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--mu", type=int, default=2)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="steps a timed client has")
    parser.add_argument("--repeats", type=int, default=3, help="timed clients; the median counts")
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    options = parser.parse_args()
    device = common.choose_device(options.device)

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
    syncs = "not on a GPU"
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            client()
            syncs = "none"
        except RuntimeError as error:
            syncs = f"found ({error})"
        torch.cuda.set_sync_debug_mode("default")
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
            *data.train_stats,
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
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else "",
    }
    print(" | ".join(f"{key} {value}" for key, value in result.items()))
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        new = not options.csv.exists()
        with open(options.csv, "a", newline="") as file:
            writer = csv.DictWriter(file, result)
            if new:
                writer.writeheader()
            writer.writerow(result)


if __name__ == "__main__":
    common.launch(main)
