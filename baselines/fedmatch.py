"""FedMatch: each weight is the sum of a part that labels train and a part that unlabelled images train.

Paper: FedMatch, ICLR 2021 (arXiv 2006.12097). Official code: wyjeong/FedMatch (TensorFlow). Protocol and rows: ProxyFL,
CVPR 2026 (arXiv 2602.21078), Table 1. Losses, server and constants are the official code's; its network has no batch
norm, so the place of batch norm in the sum, like the optimiser of the present protocol, is chosen here.

    python baselines/fedmatch.py                                        # embedded digits
    python baselines/fedmatch.py --dataset cifar10 --alpha 0.1          # the paper's setting
    python baselines/fedmatch.py --helpers 0                            # without inter-client consistency

Results: baselines/README.md. The paper's scale was not run.

Each client owns a few labelled and many unlabelled images. theta = sigma + psi. A round:
  server   broadcasts sigma and psi; every tenth round, also the psi of the H clients whose models answer most alike;
  clients  step by step train sigma on labelled images by cross-entropy with psi fixed, then psi on unlabelled images
           with sigma fixed: helpers and the model vote on the class of each confident image, the strong view learns
           the winner, and the weak view's prediction is pulled towards those of the helpers;
  server   takes the plain mean of all sigma and of all psi, and notes each client's psi and its model's answer to one
           fixed image of noise.

Letters in shapes: B labelled batch, U unlabelled batch, C classes, D features, H helpers, M clients of the round,
P decomposed weights (those of all convolutions and the classifier).

Components: decomposition `joint`, `decomposed`; supervised step `supervised_loss`; unsupervised step
`unsupervised_loss`, of `vote`, `inter_client_loss`, masked means `mean_over`, and regularisers `psi_penalty`; uniform
mean `server_update`; helper choice `noise_image`, `answer`, `nearest`; sparsity `without_small`, `differing`.
lambda_2 pulls psi to sigma, so theta tends to 2 sigma; it dwarfs lambda_1, and psi is not sparse in practice.
Left out: the learning rate tuned on a labelled validation set of each client; the labels-at-server scenario.

Where paper and official code differ (effect not measured):
  DIFF-1  --helper-interval   the code attaches helpers in every tenth round alone, the paper's algorithm has no such
                              interval (1). Default: code. A client gets none before it has been trained once
Without a flag: the paper has one weight for the two consistency terms, the code two of one value (--lambda-i,
--lambda-a). The code finds confident images without augmentation; here by the weak view, which is at hand.
Not published, chosen here:
  - lr 0.01 in all presets, so that lr * lambda_s is the protocol's 0.1. The pull of psi to sigma has curvature
    2 * lambda_2 = 20: plain SGD with lr 0.1 would flip the sign of psi - sigma in each step. Momentum for both
    parts, weight decay on sigma alone. (Official: lr 0.001, no momentum, batches of 10, 100 clients.)
  - Batch norm's scale and shift and the classifier's bias belong to sigma; running statistics follow the
    supervised forward alone; the unsupervised forward takes the statistics of its weak and strong views together;
    helpers run with the broadcast sigma and running statistics.
  - The noise image is normalised as every image is. Rounds count from 1.
  - The KL term averages over the helpers that a client has, which may be fewer than H.
Bytes: bytes_up and bytes_down are dense: sigma, psi and the rest of the state; down also the helpers' psi. The columns
*_sparse count the entries of sigma and psi that differ from the receiver's copy by more than --send-threshold, after
psi's small entries are zeroed, with 4 bytes each and no index, and the rest of the state in full. The receiver's copy
is the round's broadcast (up), the client's own last upload (down), zeros for a client that never trained and for
helpers. They only count: values travel dense, and the receiver does not keep old ones. To choose helpers and to count,
rank 0 and the checkpoint keep sigma and psi of every client seen: 8 P bytes each (9.8 MB at width 64).
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))            # common.py: here or one folder up
import common

# Values that depend on the data set; they fill flags that were not given. Paper: ProxyFL, Sec. 6.1, official train.sh.
PAPER = dict(clients=20, clients_per_round=8, local_epochs=5, batch_size=128, mu=2, lr=0.01, momentum=0.9,
             weight_decay=1e-4, width=64, image_size=32, flip=True)        # lr: ours, see above
PRESETS = {
    "cifar10": PAPER | dict(rounds=300),
    "cifar100": PAPER | dict(rounds=500),
    "svhn": PAPER | dict(rounds=150, flip=False),                          # no mirrored digits
    "cinic10": PAPER | dict(rounds=400),
    "fashionmnist": PAPER | dict(rounds=150),                              # not in the paper
    "folder": PAPER | dict(rounds=300),                                    # not in the paper
    "digits": PAPER | dict(rounds=30, batch_size=16, width=16, image_size=8, flip=False),  # ours: quick
}
LOSSES = "loss_sup", "loss_unsup", "loss_helper", "loss_psi"
METRICS = ("steps", "sup_steps", *LOSSES, "images", "used", "correct", "used_correct")     # sums, for the log
COLUMNS = {name: (name, "sup_steps" if name == "loss_sup" else "steps") for name in LOSSES} | common.PSEUDO_LABELS


def parse_args(argv=None):
    parser = common.Parser("fedmatch", __doc__, PRESETS).add_semi_supervised_flags()
    number = common.number
    method = parser.add_argument_group("FedMatch")
    method.add_argument("--conf-threshold", "--tau", type=number(float, 0, 2), default=0.75,
                        help="0: every image counts; above 1 none does [0.75, official code]")
    method.add_argument("--lambda-s", type=number(float, 0), default=10.0,
                        help="weight of the labelled cross-entropy [10, official code]")
    method.add_argument("--lambda-i", type=number(float, 0), default=0.01,
                        help="weight of the KL to the helpers [0.01, official code]")
    method.add_argument("--lambda-a", type=number(float, 0), default=0.01,
                        help="weight of the cross-entropy to the vote [0.01, official code]")
    method.add_argument("--lambda-1", type=number(float, 0), default=1e-4,
                        help="weight of the sum of |psi| [1e-4, official code]")
    method.add_argument("--lambda-2", type=number(float, 0), default=10.0,
                        help="weight of the squared distance of psi to sigma [10, official code]")
    method.add_argument("--psi-factor", type=number(float, 0), default=0.2,
                        help="psi begins as this factor times sigma [0.2, official code]")
    method.add_argument("--helpers", type=number(int, 0), default=2, help="H, 0: none [2, paper and code]")
    method.add_argument("--helper-interval", type=number(int, 1), default=10,
                        help="DIFF-1: helpers travel in the rounds that it divides; 1: in all [10, official code]")
    method.add_argument("--zero-threshold", type=number(float, 0), default=5e-6,
                        help="entries of psi up to this size are 0 in the test and in sparse counts [5e-6, code]")
    method.add_argument("--send-threshold", type=number(float, 0), default=5e-5,
                        help="sparse counts: entries that differ by more than this [5e-5, official code]")
    return parser.parse(argv)


# ---- Model ----------------------------------------------------------------------------------------------------------

# Copied from baselines/fedavg.py: Block
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


# Copied from baselines/fedavg.py: ResNet8
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


# Copied from baselines/fedavg.py: forward
def forward(net, views, amp):
    """Features (n, D) and logits (n, C) in float32, computed in bfloat16 where amp is on."""
    with torch.autocast(views.device.type, torch.bfloat16, enabled=amp):
        features, logits = net(views)
    return features.float(), logits.float()


def decomposed(net):
    """Names of the weights that are sigma + psi: convolutions and linear layers, without biases."""
    return [f"{name}.weight" for name, module in net.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))]


def joint(sigma, psi):
    """theta: sigma + psi where there is a psi, all else as in sigma; both map names to tensors."""
    return sigma | {name: sigma[name] + part for name, part in psi.items()}


def with_weights(net, weights):
    """The network as a function, with these tensors in the place of its own."""
    return lambda views: functional_call(net, weights, (views,))


# ---- The papers' maths ----------------------------------------------------------------------------------------------

def vote(local_label, helper_prob):
    """The class with most votes among the model (U,) and its helpers (H, U, C); ties go to the lowest class, (U,)."""
    votes = F.one_hot(local_label, helper_prob.shape[2]) + F.one_hot(helper_prob.argmax(2), helper_prob.shape[2]).sum(0)
    return votes.argmax(1)                                                 # the first of equals


def inter_client_loss(weak_logits, helper_prob, used):
    """KL(helper || model) on the weak views, over helpers and used images; weak_logits (U, C), helper_prob (H, U, C).

    Without helpers or used images exactly 0.
    """
    log_prob = weak_logits.log_softmax(1)
    divergence = sum(F.kl_div(log_prob, prob, reduction="none").sum(1) for prob in helper_prob)
    return mean_over(divergence / len(helper_prob), used) if len(helper_prob) else weak_logits.new_zeros(())


def mean_over(values, used):
    """The mean of values (U,) over the used images (U,) bool, 0 where none is."""
    return (values * used).sum() / used.sum().clamp(min=1)


def psi_penalty(psi, sigma, lambda_1, lambda_2):
    """lambda_1 |psi|_1 + lambda_2 ||sigma - psi||_2^2: both sum over all entries; sigma without gradient."""
    return (lambda_1 * sum(part.abs().sum() for part in psi.values())
            + lambda_2 * sum((part - sigma[name]).square().sum() for name, part in psi.items()))


def supervised_loss(args, net, psi, views, label):
    """Cross-entropy of the labelled views (B, 3, S, S) at sigma + psi; the gradient reaches sigma (net) alone."""
    weights = joint(dict(net.named_parameters()), {name: part.detach() for name, part in psi.items()})
    return F.cross_entropy(forward(with_weights(net, weights), views, args.amp)[1], label)


def unsupervised_loss(args, net, psi_net, psi, helpers, views):
    """The losses on weak and strong views (2U, 3, S, S) at sigma + psi; the gradient reaches psi alone.

    net has sigma; psi_net lends its layers, in training mode, so that net's running statistics do not see these
    images; helpers: networks in evaluation mode. Returns the total and a dict of what step_metrics wants to know.
    """
    sigma = {name: value.detach() for name, value in net.named_parameters()}
    logits = forward(with_weights(psi_net, joint(sigma, psi)), views, args.amp)[1]
    weak_logits, strong_logits = logits.chunk(2)
    confidence, label = weak_logits.detach().softmax(1).max(1)
    used = confidence >= args.conf_threshold
    helper_prob = weak_logits.new_zeros((0, *weak_logits.shape))
    if helpers:
        weak = views[:len(weak_logits)]
        with torch.no_grad():
            helper_prob = torch.stack([forward(helper, weak, args.amp)[1].softmax(1) for helper in helpers])
        label = vote(label, helper_prob)

    loss_helper = inter_client_loss(weak_logits, helper_prob, used)
    loss_unsup = mean_over(F.cross_entropy(strong_logits, label, reduction="none"), used)
    loss_psi = psi_penalty(psi, sigma, args.lambda_1, args.lambda_2)
    loss = args.lambda_i * loss_helper + args.lambda_a * loss_unsup + loss_psi
    return loss, dict(loss_unsup=loss_unsup, loss_helper=loss_helper, loss_psi=loss_psi, pseudo_label=label, used=used)


# Copied from baselines/fedavg.py: average
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


def noise_image(side, rng):
    """An image (3, S, S) of levels 0..255: a Gaussian of mean and deviation 125, cut off at both ends."""
    low, high = (torch.special.ndtr(torch.tensor((end - 125) / 125, dtype=torch.float64)) for end in (0, 255))
    quantile = low + (high - low) * torch.from_numpy(rng.random((3, side, side)))
    return (125 + 125 * torch.special.ndtri(quantile)).float()


@torch.no_grad()
def answer(net, state, image, amp):
    """What clients are compared by: the probabilities (C,) the model `state` gives to the noise image (1, 3, S, S)."""
    net.load_state_dict(state)
    net.eval()
    return forward(net, image, amp)[1][0].softmax(0)


def nearest(client, answers, helpers):
    """The `helpers` clients whose answers are nearest (Euclidean) to this one's; nobody is its own helper.

    answers: client number, as text, to (C,). A client without an answer has no helpers, one among few has fewer.
    """
    others = [other for other in answers if other != str(client)]
    if str(client) not in answers or not others:
        return []
    distance = torch.stack([answers[other] for other in others]).sub(answers[str(client)]).norm(dim=1)
    return [others[place] for place in distance.argsort(stable=True)[:helpers].tolist()]


def without_small(psi, zero_threshold):
    """psi, its entries up to the threshold set to 0."""
    return {name: part * (part.abs() > zero_threshold) for name, part in psi.items()}


def differing(sent, copy, send_threshold):
    """How many entries of `sent` are not within the threshold of the receiver's copy, an integer tensor."""
    return ((sent - copy).abs() > send_threshold).sum()


# ---- Client, server, evaluation -------------------------------------------------------------------------------------

# Differs from baselines/fedavg.py: Broadcast, whose weights are not decomposed
class Broadcast(NamedTuple):            # what the server sends to each client of a round
    state: dict                         # sigma: parameters and batch-norm buffers
    psi: dict                           # the decomposed weights' second part, P entries in all


class Helpers(NamedTuple):              # what it sends on top in helper rounds, to each client its own
    psi: torch.Tensor                   # (M, H, P) the helpers' psi, nearest first
    known: torch.Tensor                 # (M, H) bool: there is one; clients never trained have none


# Differs from baselines/fedavg.py: Upload, which has no psi
class Upload(NamedTuple):               # what client m sends back
    state: dict                         # sigma, as in Broadcast
    psi: dict
    weight: torch.Tensor                # its images; 0 for a client without any: for the log, the mean is uniform
    metrics: torch.Tensor               # sums of METRICS over its steps; for the log alone, no part of the method


# Copied from baselines/fixmatch.py: Batch
class Batch(NamedTuple):                # one local step's images
    views: torch.Tensor                 # (B + 2U, 3, S, S) normalised: labelled, weak, strong
    label: torch.Tensor                 # (B,)
    place: torch.Tensor                 # (U,) places of the unlabelled images in the client's pool
    truth: torch.Tensor                 # (U,) true labels of the unlabelled images, for the log alone
    hidden: torch.Tensor                # (U,) bool: the client does not own that label


# Differs from baselines/fixmatch.py: client_update, which has one loss and one step
def client_update(args, rnd, client, data, received, helper_psi, net, psi_net, helper_nets):
    """Local training of one client's sigma and psi. Returns its Upload.

    helper_psi: one (P,) for each helper, none outside helper rounds. The networks are this process's: net is sigma,
    the others only lend their layers.
    """
    net.load_state_dict(received.state)                                    # a copy: the broadcast stays as it is
    net.train()
    psi_net.train()
    helpers = helper_nets[:len(helper_psi)]
    for helper, part in zip(helpers, helper_psi):                          # with the sigma of the broadcast
        helper.load_state_dict(joint(received.state, from_vector(part, received.psi)))
        helper.eval()
    weights = dict(net.named_parameters())
    # empty_like: in the memory layout of the network
    psi = {name: torch.empty_like(weights[name]).copy_(part).requires_grad_() for name, part in received.psi.items()}
    sigma_optimizer = torch.optim.SGD(net.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    psi_optimizer = torch.optim.SGD(psi.values(), args.lr, args.momentum)
    metrics = torch.zeros(len(METRICS), device=data.images.device)
    for _, batch in local_batches(args, data, client, common.stream(args.seed, "client", rnd, client)):
        n_lab = len(batch.label)
        loss_sup = batch.views.new_zeros(())
        if n_lab:
            loss_sup = supervised_loss(args, net, psi, batch.views[:n_lab], batch.label)
            sigma_optimizer.zero_grad()
            (args.lambda_s * loss_sup).backward()
            sigma_optimizer.step()
        loss, values = unsupervised_loss(args, net, psi_net, psi, helpers, batch.views[n_lab:])
        psi_optimizer.zero_grad()
        loss.backward()
        psi_optimizer.step()
        metrics += step_metrics({"loss_sup": loss_sup, **values}, batch)
    return Upload({name: value.detach().clone() for name, value in net.state_dict().items()},
                  {name: part.detach().clone() for name, part in psi.items()},
                  torch.tensor(float(len(data.pool(client))), dtype=torch.float64), metrics)


# Copied from baselines/fixmatch.py: local_batches
def local_batches(args, data, client, rng):
    """The batches of all local epochs as (epoch, Batch); none for a client without images."""
    labelled, pool, device = data.labelled[client], data.pool(client), data.images.device
    steps = max(1, len(pool) // args.batch_size)                           # by the *labelled* batch, as the code does
    n_lab = args.batch_size if len(labelled) else 0
    n_unl = min(args.mu * args.batch_size, len(pool))
    pool_index = common.to_device(pool, device)

    def uniform(*shape):
        return common.to_device(rng.random(shape, dtype=np.float32), device)

    for epoch in range(args.local_epochs if len(pool) else 0):
        # All random numbers of an epoch are drawn on the host and cross over at once; no step waits for the device.
        lab_place = rng.choice(labelled, (steps, n_lab)) if n_lab else np.empty((steps, 0), np.int64)
        lab_index = common.to_device(lab_place, device)                    # (steps, B)
        unl_place = common.to_device(passes(len(pool), n_unl, steps, rng), device)
        unl_index = pool_index[unl_place]                                  # (steps, U)
        hidden = unl_place < len(pool) - len(labelled)                     # the pool ends with the labelled images
        lab_draws, weak_draws = uniform(steps, n_lab, common.WEAK_DRAWS), uniform(steps, n_unl, common.WEAK_DRAWS)
        strong_draws = uniform(steps, n_unl, common.STRONG_DRAWS)
        for step in range(steps):
            lab, unl = data.images[lab_index[step]], data.images[unl_index[step]]
            views = torch.cat([common.weak_view(lab, lab_draws[step], args.flip),
                               common.weak_view(unl, weak_draws[step], args.flip),
                               common.strong_view(unl, strong_draws[step], args.flip)])
            yield epoch, Batch(common.normalise(views, *data.stats), data.labels[lab_index[step]], unl_place[step],
                               data.labels[unl_index[step]], hidden[step])


# Copied from baselines/fixmatch.py: passes
def passes(size, batch, steps, rng):
    """Places 0..size-1 in batches (steps, batch): shuffled passes, each without its last partial batch."""
    per_pass = size // batch
    return np.concatenate([rng.permutation(size)[:per_pass * batch] for _ in range(math.ceil(steps / per_pass))]
                          ).reshape(-1, batch)[:steps]


# Copied from baselines/fixmatch.py: step_metrics
def step_metrics(values, batch):
    """The METRICS of one step (len(METRICS),); pseudo-labels of images whose label the client owns do not count."""
    right, used = (values["pseudo_label"] == batch.truth) & batch.hidden, values["used"] & batch.hidden
    sums = [torch.ones_like(right[0]), torch.full_like(right[0], len(batch.label) > 0)]
    sums += [values[name] for name in LOSSES]
    sums += [part.sum() for part in (batch.hidden, used, right, right & used)]
    return torch.stack([value.detach().float() for value in sums])


# Differs from baselines/fedavg.py: server_update, whose mean goes by images and which has no psi
def server_update(received, uploads):
    """The plain mean of the clients that trained, of sigma and of psi."""
    uploads = [upload for upload in uploads if upload.weight > 0]
    if not uploads:                                                        # nobody could train: keep the model
        return received
    equal = torch.ones(len(uploads), dtype=torch.float64)
    return Broadcast(average([upload.state for upload in uploads], equal),
                     average([upload.psi for upload in uploads], equal))


def choose_helpers(args, selected, copies, answers, entries, device):
    """The Helpers of a round: the psi that the nearest clients uploaded last."""
    psi = torch.zeros(len(selected), args.helpers, entries)
    known = torch.zeros(len(selected), args.helpers, dtype=torch.bool)
    for place, client in enumerate(selected):
        for rank, helper in enumerate(nearest(client, answers, args.helpers)):
            psi[place, rank], known[place, rank] = copies[helper][1], True
    return Helpers(psi.to(device), known.to(device))


def to_vector(parts, like):
    """The decomposed weights of a state or a psi as one vector (P,), in the order of `like`."""
    return torch.cat([parts[name].reshape(-1) for name in like])


def from_vector(vector, like):
    """The inverse of to_vector: names and shapes are those of `like`."""
    parts = vector.split([part.numel() for part in like.values()])
    return {name: part.view(shape.shape) for (name, shape), part in zip(like.items(), parts)}


def sparse_entries(args, sent, helpers, copies, selected, uploads):
    """Entries of sigma and psi that sparse messages of the round would hold: (up, down), sums over its clients.

    sent, helpers: what went down, helpers None outside helper rounds; copies: each client's last upload before this
    round, (2, P) by its number as text.
    """
    def parts(message):                                                    # (2, P)
        psi = without_small(message.psi, args.zero_threshold)
        return torch.stack([to_vector(message.state, psi), to_vector(psi, psi)])

    broadcast, counts = torch.stack([to_vector(sent.state, sent.psi), to_vector(sent.psi, sent.psi)]), []
    for place, (client, upload) in enumerate(zip(selected, uploads)):
        if upload.weight > 0:
            copy = copies[str(client)].to(broadcast.device) if str(client) in copies else 0.0
            up = differing(parts(upload), broadcast, args.send_threshold)
            down = differing(parts(sent), copy, args.send_threshold)
            if helpers:                                                    # rows without a helper are zeros
                small = without_small({"psi": helpers.psi[place]}, args.zero_threshold)["psi"]
                down = down + differing(small, 0.0, args.send_threshold)
            counts.append(torch.stack([up, down]))
    return torch.stack(counts).sum(0).tolist() if counts else (0, 0)


# Copied from baselines/fedavg.py: evaluate
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

def main(argv=None):
    args = parse_args(argv)
    ranks = common.Ranks(args)
    run = common.Run(args, ranks)
    data = ranks.first_then_others(lambda: common.semi_supervised_data(args, ranks.device))

    torch.manual_seed(common.stream(args.seed, "init").integers(2**31))
    net, psi_net, *helper_nets = (
        ResNet8(len(data.class_names), args.width).to(ranks.device, memory_format=torch.channels_last)
        for _ in range(2 + args.helpers))
    if args.compile:
        for each in (net, psi_net, *helper_nets):
            each.compile()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    received = run.restore(Broadcast(state, {name: args.psi_factor * state[name] for name in decomposed(net)}))
    # What the server knows of each client that has trained, by its number as text, on the CPU of rank 0: its last sigma
    # and psi (2, P), and its answer (C,).
    copies, answers = (run.checkpoint["copies"], run.checkpoint["answers"]) if run.checkpoint else ({}, {})
    noise = noise_image(args.image_size, common.stream(args.seed, "noise"))[None].to(ranks.device)
    noise = common.normalise(noise, *data.stats)
    entries = sum(part.numel() for part in received.psi.values())          # P
    rest_bytes = sum(value.numel() * value.element_size() for value in received.state.values()) - 4 * entries
    message_bytes = rest_bytes + 2 * 4 * entries                           # either way, without helpers

    run.start(data.class_names, data.owned(), **data.facts)
    for rnd in run.rounds():
        sampling = common.stream(args.seed, "sampling", rnd)
        selected = sampling.choice(args.clients, args.clients_per_round, replace=False)
        helpers, helper_psi = None, [[] for _ in selected]
        if args.helpers and rnd % args.helper_interval == 0:               # DIFF-1: every tenth round
            # only rank 0 knows the clients' psi; the others' zeros give place to what it chose
            helpers = ranks.broadcast(choose_helpers(args, selected, copies, answers, entries, ranks.device))
            helper_psi = [[psi for psi, known in zip(*pair) if known]
                          for pair in zip(helpers.psi, helpers.known.tolist())]
        uploads = ranks.gather([client_update(args, rnd, client, data, received, helper_psi[place],
                                              net, psi_net, helper_nets)
                                for place, client in ranks.mine(list(enumerate(selected)))], len(selected))
        if ranks.first:
            sent, received = received, server_update(received, uploads)
            sparse_up, sparse_down = sparse_entries(args, sent, helpers, copies, selected, uploads)
            for client, upload in zip(selected, uploads):
                if upload.weight > 0:
                    copies[str(client)] = torch.stack([to_vector(part, upload.psi)
                                                       for part in (upload.state, upload.psi)]).cpu()
                    answers[str(client)] = answer(net, joint(upload.state, upload.psi), noise, args.amp).cpu()
            model = joint(received.state, without_small(received.psi, args.zero_threshold))
            accuracy = evaluate(net, model, data.test_images, data.test_labels, data.stats, args.amp)
            row = common.log_row(METRICS, COLUMNS, uploads, accuracy, message_bytes, message_bytes)
            row["bytes_up_sparse"] = rest_bytes * row["clients_trained"] + 4 * sparse_up
            row["bytes_down_sparse"] = rest_bytes * row["clients_trained"] + 4 * sparse_down
            row["helpers"] = sum(map(len, helper_psi))
            row["bytes_down"] += 4 * entries * row["helpers"]
            if not row["helpers"]:
                row["loss_helper"] = None
            run.save(row, {**received._asdict(), "copies": copies, "answers": answers})
        received = ranks.broadcast(received)


if __name__ == "__main__":
    common.launch(main)
