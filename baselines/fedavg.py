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
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))            # common.py: here or one folder up
import common

# Values that depend on the data set; they fill flags that were not given. Paper: ProxyFL, Sec. 6.1, official train.sh.
PAPER = dict(clients=20, clients_per_round=8, local_epochs=5, batch_size=128, lr=0.1, momentum=0.9, weight_decay=1e-4,
             width=64, image_size=32, flip=True)
PRESETS = {
    "cifar10": PAPER | dict(rounds=300),
    "cifar100": PAPER | dict(rounds=500),
    "svhn": PAPER | dict(rounds=150, flip=False),                          # no mirrored digits
    "cinic10": PAPER | dict(rounds=400),
    "fashionmnist": PAPER | dict(rounds=150),                              # not in the paper
    "folder": PAPER | dict(rounds=300),                                    # not in the paper
    "digits": PAPER | dict(rounds=30, batch_size=16, width=16, image_size=8, flip=False),  # ours: quick
}
METRICS = "steps", "loss_sup", "loss_prox"                                  # sums over a client's steps, for the log
COLUMNS = {"loss_sup": ("loss_sup", "steps"), "loss_prox": ("loss_prox", "steps")}


def parse_args(argv=None):
    parser = common.Parser("fedavg", __doc__, PRESETS).add_semi_supervised_flags()
    method = parser.add_argument_group("FedAvg, FedProx, FedAvg-SL")
    method.add_argument("--prox-mu", type=common.number(float, 0), default=0.0,
                        help="FedProx: weight of the pull to the broadcast model, halved [0; SAGE's options 0.001]")
    method.add_argument("--labels", choices=("labelled", "all"), default="labelled",
                        help="all: FedAvg-SL, which sees the labels of the whole pool [labelled]")
    return parser.parse(argv)


# ---- Model ----------------------------------------------------------------------------------------------------------

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


# ---- The papers' maths ----------------------------------------------------------------------------------------------

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


# ---- Client, server, evaluation -------------------------------------------------------------------------------------

class Broadcast(NamedTuple):            # what the server sends to each client of a round
    state: dict                         # the global model: parameters and batch-norm buffers


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


# ---- Main -----------------------------------------------------------------------------------------------------------

def all_labelled(data):
    """FedAvg-SL: every client knows the labels of its whole pool."""
    pools = [data.pool(client) for client in range(len(data.labelled))]
    return data._replace(labelled=pools, unlabelled=[pool[:0] for pool in pools])


def main(argv=None):
    args = parse_args(argv)
    ranks = common.Ranks(args)
    run = common.Run(args, ranks)
    data = ranks.first_then_others(lambda: common.semi_supervised_data(args, ranks.device))
    data = all_labelled(data) if args.labels == "all" else data

    torch.manual_seed(common.stream(args.seed, "init").integers(2**31))
    net = ResNet8(len(data.class_names), args.width).to(ranks.device, memory_format=torch.channels_last)
    if args.compile:
        net.compile()
    optimizer = torch.optim.SGD(net.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    received = run.restore(Broadcast({name: value.clone() for name, value in net.state_dict().items()}))
    message_bytes = sum(value.numel() * value.element_size() for value in received.state.values())    # either way

    run.start(data.class_names, data.owned(), **data.facts)
    for rnd in run.rounds():
        sampling = common.stream(args.seed, "sampling", rnd)
        selected = sampling.choice(args.clients, args.clients_per_round, replace=False)
        uploads = ranks.gather([client_update(args, rnd, client, data, received, net, optimizer)
                                for client in ranks.mine(selected)], len(selected))
        if ranks.first:
            received = server_update(received, uploads)
            accuracy = evaluate(net, received.state, data.test_images, data.test_labels, data.stats, args.amp)
            row = common.log_row(METRICS, COLUMNS, uploads, accuracy, message_bytes, message_bytes)
            run.save(row if args.prox_mu else row | {"loss_prox": None}, received._asdict())
        received = ranks.broadcast(received)


if __name__ == "__main__":
    common.launch(main)
