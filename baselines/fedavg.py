"""FedAvg on the labelled images, FedProx and FedAvg-SL: the supervised rows of ProxyFL's tables.

Papers: FedAvg, AISTATS 2017 (arXiv 1602.05629); FedProx, MLSys 2020 (arXiv 1812.06127). Protocol and rows: ProxyFL,
CVPR 2026 (arXiv 2602.21078), Tables 1, 4 and 5; no official script of these rows exists.

    python baselines/fedavg.py                                          # FedAvg, embedded digits
    python baselines/fedavg.py --dataset cifar10 --alpha 0.1            # the paper's setting
    python baselines/fedavg.py --prox-mu 0.001                          # FedProx
    python baselines/fedavg.py --labels all                             # FedAvg-SL, the supervised upper bound

Results: baselines/README.md. The paper's scale was not run.

Each client owns a few labelled and many unlabelled images; FedAvg leaves the unlabelled ones alone. A round:
  server   broadcasts the global model;
  clients  train on their labelled images by cross-entropy; FedProx adds a pull towards the broadcast weights;
  server   averages the models, weighted by the clients' images.

Letters in shapes: B labelled batch, C classes, D features, M clients of the round.

Components: weighted average `average`; proximal term `proximal_term`; all labels `all_labelled`; the rest is the
protocol that all baselines share: network `ResNet8`, local epochs `local_batches`, test `evaluate`.
Not published, chosen here:
  - A local epoch has floor(pool / batch size) steps, at least one, the pool being *all* images of a client: equally
    many in every method.
  - A model weighs by the client's whole pool, as in the other methods, though only labelled images trained it; a client
    without any takes no part and costs no bytes.
  - Labelled batches are drawn with replacement, as in the semi-supervised code.
  - The factor 1/2 stands inside the proximal term, over trainable parameters alone (as in FedProx and NIID-Bench).
Left out of the official protocol: its shared momentum, mixed statistics and 2,000-fold weights (flags of proxyfl.py),
its order of clients (RandomState(7); here a stream of --seed). It mirrors SVHN as well: --flip.
"""

import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))            # common.py: here or one folder up
import common

# Values that depend on the data set; they fill flags that were not given. Paper: ProxyFL, Sec. 6.1, official train.sh.
PAPER = dict(clients=20, clients_per_round=8, local_epochs=5, batch_size=128, lr=0.1, width=64, image_size=32,
             flip=True)
PRESETS = {
    "cifar10": PAPER | dict(rounds=300),
    "cifar100": PAPER | dict(rounds=500),
    "svhn": PAPER | dict(rounds=150, flip=False),                          # no mirrored digits
    "cinic10": PAPER | dict(rounds=400),
    "fashionmnist": PAPER | dict(rounds=150),                              # not in the paper
    "folder": PAPER | dict(rounds=300),                                    # not in the paper
    "digits": PAPER | dict(rounds=30, batch_size=16, width=16, image_size=8, flip=False),  # ours: quick
}
LOSSES = "loss_sup", "loss_prox"
METRICS = "steps", *LOSSES


def parse_args(argv=None):
    parser = shared_parser("fedavg.py", __doc__.split("\n\n")[0], PRESETS)
    method = parser.add_argument_group("FedAvg, FedProx, FedAvg-SL")
    method.add_argument("--prox-mu", type=common.number(float, 0), default=0.0,
                        help="FedProx: weight of the pull to the broadcast model, halved [0; SAGE's options 0.001]")
    method.add_argument("--labels", choices=("labelled", "all"), default="labelled",
                        help="all: FedAvg-SL, which sees the labels of the whole pool [labelled]")
    return settle(parser, parser.parse_args(argv), PRESETS)


def shared_parser(prog, description, presets):
    """The flags that all semi-supervised scripts share: run, data, federation, optimiser."""
    values = "; ".join(f"{name}: " + ", ".join(f"{key} {value}" for key, value in preset.items())
                       for name, preset in presets.items())
    parser = common.Parser(prog=prog, description=description,
                           epilog=f"In brackets: the default and its source. [preset] goes by data set: {values}.")
    number, switch = common.number, common.argparse.BooleanOptionalAction
    run = parser.add_argument_group("run")
    run.add_argument("--seed", type=number(int, 0, 2**31 - 1), default=1,
                     help="drives everything random but the split [1]")
    run.add_argument("--split-seed", type=number(int, 0, 2**31 - 8), default=0,
                     help="which images are labelled and who owns them; 0 is the official split [0]")
    run.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps [auto: what exists]")
    run.add_argument("--amp", action=switch, default=None, help="bfloat16 autocast, losses in float32 [on for CUDA]")
    run.add_argument("--compile", action=switch, default=False, help="torch.compile the network [off]")
    run.add_argument("--out-dir", default="runs", help="where run folders go [runs]")
    run.add_argument("--run-name", default=None, help="the run folder [<script>_<dataset>_a<alpha>_s<seed>]")
    run.add_argument("--resume", action="store_true", help="continue the run in its folder; --rounds may grow")
    run.add_argument("--overwrite", action="store_true", help="replace an existing run folder")
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", type=lambda text: common.dataset_name(text, presets), default="digits",
                      help=", ".join(presets) + " [digits]")
    data.add_argument("--data-dir", default="data", help="where data sets are; what is missing is downloaded [data]")
    data.add_argument("--train-subset", type=number(int, 1), default=None,
                      help="class-balanced subset of N training images, for quick runs [all]")
    data.add_argument("--image-size", type=number(int, 8, 1024), default=None,
                      help="side in pixels, a multiple of 4 [preset, paper 32]")
    data.add_argument("--flip", action=switch, default=None, help="mirror images at random [preset]")
    fed = parser.add_argument_group("federation")
    fed.add_argument("--alpha", type=common.concentration, default=0.1,
                     help="Dirichlet concentration: smaller is more skewed, inf is i.i.d. [0.1; paper 0.1, 0.5, 1]")
    fed.add_argument("--partition", choices=("official", "dirichlet"), default="official",
                     help="the published protocol of ProxyFL and SAGE, or a textbook draw over all clients [official]")
    fed.add_argument("--label-ratio", type=number(float, 0, 1, open_low=True), default=0.1,
                     help="labelled share of each class; of 4,600 a class for SVHN, as the code [0.1; Table 6: 0.2]")
    fed.add_argument("--clients", type=number(int, 1), default=None, help="K [preset, paper 20]")
    fed.add_argument("--clients-per-round", type=number(int, 1), default=None, help="M [preset, paper 8]")
    fed.add_argument("--rounds", type=number(int, 1), default=None, help="[preset, paper 300, 500, 150, 400]")
    fed.add_argument("--local-epochs", type=number(int, 1), default=None,
                     help="of floor(images of the client / batch size) steps each, at least one [preset, paper 5]")
    opt = parser.add_argument_group("optimiser (SGD, no schedule, fresh for each client and round)")
    opt.add_argument("--batch-size", type=number(int, 1), default=None, help="B, labelled images [preset, paper 128]")
    opt.add_argument("--lr", type=number(float, 0), default=None, help="[preset, paper 0.1]")
    opt.add_argument("--momentum", type=number(float, 0, 1), default=0.9, help="[0.9, official train.sh]")
    opt.add_argument("--weight-decay", type=number(float, 0), default=1e-4, help="[1e-4, official train.sh]")
    opt.add_argument("--width", type=number(int, 8), default=None,
                     help="channels of ResNet-8's first stage; below 8 oneDNN's channels-last kernels break memory on "
                          "CPUs without AVX-512 (torch 2.14.1) [preset, paper 64]")
    return parser


def settle(parser, args, presets):
    """Fill flags that were not given, refuse what contradicts itself."""
    if args.clients_per_round is None and args.clients is not None:
        args.clients_per_round = min(args.clients, presets[args.dataset]["clients_per_round"])
    for name, value in presets[args.dataset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.run_name = args.run_name or f"{Path(parser.prog).stem}_{args.dataset}_a{args.alpha:g}_s{args.seed}"
    if args.clients_per_round > args.clients:
        parser.error(f"--clients-per-round {args.clients_per_round} is more than --clients {args.clients}")
    if args.image_size % 4:
        parser.error(f"--image-size {args.image_size} is not a multiple of 4")
    return args


# ---------------------------------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------------------------------

class Block(nn.Module):
    """Two 3x3 convolutions with batch norm; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)), inplace=True)


class ResNet8(nn.Module):
    """ResNet-8 of the 6n+2 family (width 64: 1,227,594 parameters with 10 classes), names as in the official code.

    Returns features (n, 4 * width) and logits (n, C).
    """

    def __init__(self, classes, width=64):
        super().__init__()
        features = 4 * width
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2))
        self.layer3 = nn.Sequential(Block(2 * width, features, 2))
        self.classifier = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0, math.sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels)))

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        features = self.layer3(self.layer2(self.layer1(x))).mean((2, 3))
        return features, self.classifier(features)


def forward(net, views, amp):
    """Features (n, D) and logits (n, C) in float32, computed in bfloat16 where amp is on."""
    with torch.autocast(views.device.type, torch.bfloat16, enabled=amp):
        features, logits = net(views)
    return features.float(), logits.float()


# ---------------------------------------------------------------------------------------------------------------
# The papers' maths
# ---------------------------------------------------------------------------------------------------------------

def proximal_term(net, anchor, prox_mu):
    """FedProx, Eq. 2: mu/2 times the squared distance of all trainable parameters to the broadcast ones, a scalar.

    anchor: the broadcast parameters, one tensor for each of net.parameters(), tensors of their own.
    """
    return prox_mu / 2 * sum((now - then).square().sum() for now, then in zip(net.parameters(), anchor))


def average(states, weights):
    """FedAvg: the weighted mean of state dicts, batch-norm statistics included; weights (M,) are scaled to sum to 1.

    Integer entries (batch-norm counters) are the first client's.
    """
    weights = (weights / weights.sum()).tolist()
    mean = {}
    for name, first in states[0].items():
        mean[name] = first.clone()
        if first.is_floating_point():
            mean[name] = sum(weight * state[name] for weight, state in zip(weights, states))
    return mean


# ---------------------------------------------------------------------------------------------------------------
# Client, server, evaluation
# ---------------------------------------------------------------------------------------------------------------

class Broadcast(NamedTuple):            # what the server sends to each client of a round
    state: dict                         # the global model: parameters and batch-norm buffers


class FederatedData(NamedTuple):        # all clients' data; a client reads its own part
    images: torch.Tensor                # (n, 3, S, S) uint8 on the device
    labels: torch.Tensor                # (n,) true labels; those of unlabelled images reach the log alone
    labelled: list                      # one index array a client
    unlabelled: list
    stats: tuple                        # mean and deviation of each channel of the training images, in 0..1

    def pool(self, client):
        """Indices of the images that the client uses without labels: its labelled ones come last."""
        return np.concatenate([self.unlabelled[client], self.labelled[client]])


class Upload(NamedTuple):               # what client m sends back
    state: dict                         # its model
    weight: torch.Tensor                # its images; 0 for a client that could not train
    metrics: torch.Tensor               # sums of METRICS over its steps; for the log alone, no part of the method


def client_update(args, rnd, client, data, received, net, optimizer):
    """Local training of one client from the broadcast model, in this process's network. Returns its Upload."""
    net.load_state_dict(received.state)                                    # a copy: the broadcast stays as it is
    net.train()
    optimizer.state.clear()
    anchor = [parameter.detach().clone() for parameter in net.parameters()]
    rng = common.stream(args.seed, "client", rnd, client)
    metrics = torch.zeros(len(METRICS), device=data.images.device)
    for views, label in local_batches(args, data, client, rng):
        logits = forward(net, views, args.amp)[1]
        loss = loss_sup = F.cross_entropy(logits, label)
        loss_prox = torch.zeros_like(loss_sup)
        if args.prox_mu:
            loss_prox = proximal_term(net, anchor, args.prox_mu)
            loss = loss_sup + loss_prox
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics += torch.stack([torch.ones_like(loss_sup), loss_sup, loss_prox]).detach()

    weight = len(data.pool(client)) if len(data.labelled[client]) else 0
    return Upload({name: value.detach().clone() for name, value in net.state_dict().items()},
                  torch.tensor(float(weight), dtype=torch.float64), metrics)


def local_batches(args, data, client, rng):
    """The labelled batches of all epochs: views (B, 3, S, S), labels (B,); none for a client without labels."""
    labelled, device = data.labelled[client], data.images.device
    steps = max(1, len(data.pool(client)) // args.batch_size)              # equally many in every method
    for _ in range(args.local_epochs if len(labelled) else 0):
        # All random numbers of an epoch are drawn on the host and cross over at once; no step waits for the device.
        index = common.to_device(rng.choice(labelled, (steps, args.batch_size)), device)
        draws = common.to_device(rng.random((steps, args.batch_size, common.WEAK_DRAWS), dtype=np.float32), device)
        for chosen, draw in zip(index, draws):
            views = common.weak_view(data.images[chosen], draw, args.flip)
            yield common.normalise(views, *data.stats), data.labels[chosen]


def server_update(received, uploads):
    """The average of the clients that trained. Returns the new Broadcast."""
    uploads = [upload for upload in uploads if upload.weight > 0]
    if not uploads:                                                        # nobody could train: keep the model
        return received
    return Broadcast(average([upload.state for upload in uploads], torch.stack([upload.weight for upload in uploads])))


@torch.no_grad()
def evaluate(net, state, images, labels, stats, amp=False, batch_size=512):
    """Accuracy in % of the model `state` on the test images (n, 3, S, S) uint8, batch norm with running statistics."""
    net.load_state_dict(state)
    net.eval()
    correct = torch.zeros((), dtype=torch.int64, device=images.device)
    for batch, label in zip(images.split(batch_size), labels.split(batch_size)):
        with torch.autocast(images.device.type, torch.bfloat16, enabled=amp):
            logits = net(common.normalise(batch, *stats))[1]
        correct += (logits.argmax(1) == label).sum()
    return 100 * correct.item() / len(labels)


# ---------------------------------------------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------------------------------------------

def prepare_data(args, device):
    """Load, split and place the data: FederatedData, test images, test labels, class names, facts for config.json."""
    source = common.load_dataset(args.dataset, args.data_dir, args.image_size, args.train_subset)
    labels = source.train_labels.numpy()
    per_class = np.bincount(labels, minlength=len(source.class_names))
    if args.dataset == "svhn" and per_class.min() >= 4600:
        per_class = np.full_like(per_class, 4600)                          # official: "10 %" is 460 of each class
    per_class = np.maximum(1, np.round(args.label_ratio * per_class).astype(int))
    parts = common.partition(labels, args.clients, args.alpha, per_class, args.partition, args.split_seed)
    stats = common.channel_stats(source.train_images)
    train_images, train_labels, test_images, test_labels = (part.to(device) for part in source[:4])
    facts = {"data_source": source.source, "data_fingerprint": common.fingerprint(source)}
    return FederatedData(train_images, train_labels, *parts, stats), test_images, test_labels, source.class_names, facts


def all_labelled(data):
    """FedAvg-SL: every client knows the labels of its whole pool."""
    pools = [data.pool(client) for client in range(len(data.labelled))]
    return data._replace(labelled=pools, unlabelled=[pool[:0] for pool in pools])


def main(argv=None):
    args = parse_args(argv)
    ranks = common.Ranks(args.device)
    device = ranks.device
    args.amp = device.type == "cuda" if args.amp is None else args.amp
    run = common.RunFolder(args.out_dir, args.run_name, vars(args), args.resume, args.overwrite, writer=ranks.first)
    checkpoint = run.load_checkpoint()
    data, test_images, test_labels, class_names, facts = ranks.first_then_others(lambda: prepare_data(args, device))
    data = all_labelled(data) if args.labels == "all" else data
    labels = data.labels.cpu().numpy()
    table = common.client_table(class_names, labelled=(labels, data.labelled), unlabelled=(labels, data.unlabelled))

    torch.manual_seed(common.stream(args.seed, "init").integers(2**31))
    net = ResNet8(len(class_names), args.width).to(device, memory_format=torch.channels_last)
    if args.compile:
        net.compile()
    optimizer = torch.optim.SGD(net.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    state = checkpoint["state"] if checkpoint else net.state_dict()
    received = Broadcast({name: value.detach().clone().to(device) for name, value in state.items()})
    message_bytes = sum(value.numel() * value.element_size() for value in received.state.values())    # either way

    with run:
        run.open(device, table, **facts)
        if ranks.first:
            print(" ".join(f"{key}={value}" for key, value in vars(args).items()))
            print(f"{common.versions()} | {common.device_name(device)} | ranks {ranks.world}")
            print(f"{facts['data_source']}: {len(data.images)} training and {len(test_images)} test images | "
                  f"{sum(p.numel() for p in net.parameters()):,} parameters")
            common.print_table(table, class_names, ("labelled", "unlabelled"))
        start_round = len(run.rows) + 1
        for rnd in tqdm(range(start_round, args.rounds + 1), initial=start_round - 1, total=args.rounds, unit="round",
                        disable=None if ranks.first else True):
            start = time.perf_counter()
            selected = common.stream(args.seed, "sampling", rnd).choice(args.clients, args.clients_per_round,
                                                                        replace=False)
            uploads = ranks.gather([client_update(args, rnd, client, data, received, net, optimizer)
                                    for client in ranks.mine(selected)], len(selected))
            if ranks.first:
                received = server_update(received, uploads)
                accuracy = evaluate(net, received.state, test_images, test_labels, data.stats, args.amp)
                row = round_row(args, rnd, accuracy, uploads, message_bytes, time.perf_counter() - start)
                check_finite(row, received)
                run.save_round(row, received._asdict())
                tqdm.write(round_line(row, args.rounds))
            received = ranks.broadcast(received)
        run.plot({"accuracy (%)": ["test_acc_pct"], "losses": LOSSES})
    if ranks.first:
        run.print_summary()


def round_row(args, rnd, accuracy, uploads, message_bytes, seconds):
    """One row of rounds.csv; None where a value does not exist in this round."""
    total = dict(zip(METRICS, torch.stack([upload.metrics for upload in uploads]).cpu().double().sum(0).tolist()))
    trained = sum(bool(upload.weight > 0) for upload in uploads)
    losses = {name: total[name] / total["steps"] if total["steps"] else None for name in LOSSES}
    if not args.prox_mu:
        losses["loss_prox"] = None
    return {"round": rnd, "test_acc_pct": accuracy, **losses,
            "clients_trained": trained, "clients_empty": len(uploads) - trained,
            "bytes_up": message_bytes * trained, "bytes_down": message_bytes * trained, "seconds": seconds}


def check_finite(row, received):
    """Stop before anything that is not a number is written or sent on."""
    broken = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    broken += [name for name, value in received.state.items() if not value.isfinite().all()]
    if broken:
        raise common.Diverged(f"training diverged in round {row['round']}: {broken[0]} is not finite; try a lower --lr")


def round_line(row, rounds):
    """What the screen shows of a round."""
    parts = [f"round {row['round']}/{rounds}", f"acc {row['test_acc_pct']:.2f}"]
    parts += [f"{key} {row[key]:.3g}" for key in LOSSES if row[key] is not None]
    if row["clients_empty"]:
        parts.append(f"{row['clients_empty']} clients that cannot train skipped")
    return " | ".join([*parts, f"{row['seconds']:.1f} s"])


if __name__ == "__main__":
    common.launch(main)
