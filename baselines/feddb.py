"""FedDB: pseudo-labels freed of each client's class prior, aggregation weights that even the priors out.

Paper: FedDB, arXiv 2405.19789. Official code: GuogangZhu/FedDB. Protocol and row: ProxyFL, CVPR 2026 (arXiv
2602.21078), Table 1. The method follows the official code; the paper's text was not at hand, so no formula here has an
equation number.

    python baselines/feddb.py                                           # embedded digits
    python baselines/feddb.py --exact-simplex                           # aggregation weights as the paper means them
    python baselines/feddb.py --dataset cifar10 --alpha 0.1             # the setting of ProxyFL's table

Results: baselines/README.md. The paper's scale was not run.

Each client owns a few labelled and many unlabelled images. A round:
  server   broadcasts the global model;
  clients  predict their pool with it once; the mean prediction is their class prior; each prediction is divided by the
           prior, and where the result is confident its class becomes a label for the round; then they train on labelled
           images and on strong views of the kept ones, while the prior follows the predictions of their weak views;
  server   averages the models by weights that bring the mixture of the priors near the uniform distribution.

Letters in shapes: B labelled batch, U unlabelled batch, N = B + 2U rows (labelled, weak, strong), C classes,
D features, M clients of the round, P images of a client's pool.

Components: prior of a client (APP-U) `label_pool` and `follow_prior`; debiased labels `debias`; aggregation weights
`contracted_weights` and `simplex_weights`.
Where paper and official code differ:
  DIFF-1  --exact-simplex   The paper wants the weights on the simplex whose mixed prior is nearest to uniform. The code
                            repeats "one SGD step with weight decay .9, then softmax", which contracts to almost equal
                            weights. Seven clients that predict class 0 and one that predicts the nine others evenly
                            (C = 10): .120 and .160 by the code, .0143 and .900 on the simplex. Default: the code.
                            Effect on accuracy: not measured.
Not published, chosen here (the paper's protocol is another one):
  - Optimiser, network and local steps of ProxyFL's protocol; labelled and kept images are drawn with replacement, in
    batches of B and mu * B. Official: whole sets, one step an epoch.
  - Batch norm has running statistics, averaged with the same weights. Official: batch statistics everywhere.
  - The prior is at least --prior-floor in a division: a class that nothing predicts would win everywhere.
  - The prior's update reads the weak rows of the training pass itself, before the step; it costs no pass of its own.
  - A client with neither labels nor kept images takes no step and has no weight.
Left out: the momentum of the server (the protocol has no server optimiser); cosine schedule and clipping (likewise).
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
PAPER = dict(clients=20, clients_per_round=8, local_epochs=5, batch_size=128, mu=2, lr=0.1, momentum=0.9,
             weight_decay=1e-4, width=64, image_size=32, flip=True)
PRESETS = {
    "cifar10": PAPER | dict(rounds=300),
    "cifar100": PAPER | dict(rounds=500),
    "svhn": PAPER | dict(rounds=150, flip=False),                          # no mirrored digits
    "cinic10": PAPER | dict(rounds=400),
    "fashionmnist": PAPER | dict(rounds=150),                              # not in the paper
    "folder": PAPER | dict(rounds=300),                                    # not in the paper
    "digits": PAPER | dict(rounds=30, batch_size=16, width=16, image_size=8, flip=False),  # ours: quick
}
LOSSES = "loss_sup", "loss_unsup"
METRICS = ("steps", "sup_steps", *LOSSES, "images", "used", "correct", "used_correct")     # sums, for the log
COLUMNS = {name: (name, "sup_steps" if name == "loss_sup" else "steps") for name in LOSSES} | common.PSEUDO_LABELS


def parse_args(argv=None):
    parser = common.Parser("feddb", __doc__, PRESETS).add_semi_supervised_flags()
    number, switch = common.number, common.switch
    method = parser.add_argument_group("FedDB")
    method.add_argument("--conf-threshold", "--tau", type=number(float, 0, 2), default=0.95,
                        help="keep images whose debiased confidence reaches it; above 1: none [0.95, official code]")
    method.add_argument("--lambda-u", type=number(float, 0), default=1.0,
                        help="weight of the unlabelled loss [1, official code]")
    method.add_argument("--prior-momentum", type=number(float, 0, 1), default=0.5,
                        help="share of the old prior in each step's new one; 1 uploads APP-U [0.5, official code]")
    method.add_argument("--prior-floor", type=number(float, 1e-12, 1), default=1e-6,
                        help="smallest prior to divide by; 1 leaves predictions as they are [1e-6, chosen]")
    method.add_argument("--exact-simplex", action=switch, default=False,
                        help="aggregation weights by the minimum on the simplex (DIFF-1) [off: the code's contraction]")
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


# ---- The paper's maths ----------------------------------------------------------------------------------------------

def debias(prob, prior, floor=1e-6):
    """Predictions (P, C) divided by the client's prior (C,), each scaled to sum to 1 again: (P, C).

    A uniform prior changes nothing; a prediction that equals the prior says nothing and becomes uniform.
    """
    ratio = prob / prior.clamp(min=floor)                                  # at most 1 / floor for each class
    return ratio / ratio.sum(1, keepdim=True)


def follow_prior(prior, prob, momentum=0.5):
    """The prior (C,) after a step that predicted prob (U, C) for the weak views: a moving mean, which sums to 1."""
    return momentum * prior + (1 - momentum) * prob.mean(0)


def imbalance_gradient(weights, priors):
    """Gradient (M,) of mean_c (sum_m weights_m priors_mc - 1/C)^2, how far the mixed prior is from uniform."""
    off = (weights[:, None] * priors).sum(0) - 1 / priors.shape[1]         # (M, 1) * (M, C) -> (C,)
    return 2 * (priors * off).mean(1)


def contracted_weights(priors, iterations=100, decay=0.9, nesterov=0.9):
    """Aggregation weights (M,) of the official code, from the uploaded priors (M, C) in float64.

    Each iteration is one SGD step of rate 1 with weight decay and a fresh Nesterov momentum, which acts as a factor of
    1.9, then a softmax: weights <- softmax(-0.71 weights - 1.9 gradient).
    """
    # DIFF-1 The paper minimises the imbalance on the simplex. The softmax of numbers within a few tenths of each other
    # is almost uniform, wherever it starts. Default: official. --exact-simplex gives the minimum.
    weights = torch.full_like(priors[:, 0], 1 / len(priors))
    for _ in range(iterations):
        gradient = imbalance_gradient(weights, priors) + decay * weights
        weights = (weights - (1 + nesterov) * gradient).softmax(0)
    return weights


def simplex_weights(priors, iterations=1000):
    """Aggregation weights (M,) with the least imbalance, from the priors (M, C) in float64: projected gradient.

    Accelerated by Nesterov's sequence; it starts from equal weights and stays there if those are best.
    """
    weights = ahead = torch.full_like(priors[:, 0], 1 / len(priors))
    curvature = 2 / priors.shape[1] * torch.linalg.matrix_norm(priors, 2).square()
    pace = 1.0
    for _ in range(iterations):
        new = project_to_simplex(ahead - imbalance_gradient(ahead, priors) / curvature)
        pace, old_pace = (1 + math.sqrt(1 + 4 * pace ** 2)) / 2, pace
        weights, ahead = new, new + (old_pace - 1) / pace * (new - weights)
    return weights


def project_to_simplex(point):
    """The nearest vector (M,) of non-negative numbers that sum to 1: lower all by one amount, cut off at 0."""
    ordered = point.sort(descending=True).values
    amount = (ordered.cumsum(0) - 1) / torch.arange(1, len(point) + 1)     # if the first 1, 2, ... M stay positive
    return (point - amount.amax()).clamp(min=0)


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


# ---- Client, server, evaluation -------------------------------------------------------------------------------------

# Copied from baselines/fedavg.py: Broadcast
class Broadcast(NamedTuple):            # what the server sends to each client of a round
    state: dict                         # the global model: parameters and batch-norm buffers


# Differs from baselines/fixmatch.py: Upload, which has class counts for ICPL in the place of the prior
class Upload(NamedTuple):               # what client m sends back
    state: dict                         # its model
    prior: torch.Tensor                 # (C,) its class prior
    weight: torch.Tensor                # its images, 0 for a client that could not train: who is averaged at all
    metrics: torch.Tensor               # sums of METRICS over its steps; for the log alone, no part of the method


# Differs from baselines/fixmatch.py: client_update, which labels in each step and has a teacher at hand for it
def client_update(args, rnd, client, data, received, net, optimizer):
    """Local training of one client from the broadcast model, in this process's network. Returns its Upload."""
    net.load_state_dict(received.state)                                    # a copy: the broadcast stays as it is
    optimizer.state.clear()
    prior, kept, pseudo_label, found = label_pool(args, rnd, client, data, net)
    net.train()
    trained, metrics = False, torch.zeros(len(METRICS) - len(found), device=data.images.device)
    rng = common.stream(args.seed, "client", rnd, client)
    for views, label, pseudo in local_batches(args, data, client, kept, pseudo_label, rng):
        loss, losses, weak_prob = local_loss(args, net, views, label, pseudo)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if len(pseudo):
            prior = follow_prior(prior, weak_prob, args.prior_momentum)
        one = torch.ones_like(loss)
        metrics += torch.stack([one, one * (len(label) > 0), *losses]).detach()
        trained = True
    weight = len(data.pool(client)) if trained else 0
    return Upload({name: value.detach().clone() for name, value in net.state_dict().items()}, prior,
                  torch.tensor(float(weight), dtype=torch.float64), torch.cat([metrics, found]))


@torch.no_grad()
def label_pool(args, rnd, client, data, net, batch_size=512):
    """Once a round the model `net`, as broadcast, predicts one weak view of each image of the client's pool.

    Returns the prior (C,) (APP-U), the kept images' indices (kept,) and labels (kept,), and the last four METRICS.
    """
    pool, device = data.pool(client), data.images.device
    place = common.to_device(pool, device)
    draws = common.stream(args.seed, "pool", rnd, client).random((len(pool), common.WEAK_DRAWS), dtype=np.float32)
    net.eval()
    prob = torch.cat([forward(net, common.normalise(common.weak_view(data.images[index], draw, args.flip), *data.stats),
                              args.amp)[1].softmax(1)
                      for index, draw in zip(place.split(batch_size),
                                             common.to_device(draws, device).split(batch_size))])      # (P, C)
    prior = prob.mean(0) if len(pool) else torch.full_like(net.classifier.bias, 1 / len(net.classifier.bias))
    confidence, label = debias(prob, prior, args.prior_floor).max(1)
    keep = confidence >= args.conf_threshold
    hidden = torch.arange(len(pool), device=device) < len(data.unlabelled[client])     # labelled ones do not count
    right, used = (label == data.labels[place]) & hidden, keep & hidden
    found = torch.stack([part.sum() for part in (hidden, used, right, right & used)]).float()
    chosen = keep.nonzero()[:, 0]                                          # waits for the device, once a round
    return prior, place[chosen], label[chosen], found


# Differs from baselines/fixmatch.py: local_batches, which draws from the whole pool and without replacement
def local_batches(args, data, client, kept, pseudo_label, rng):
    """The batches of all local epochs: views (B + 2U, 3, S, S) normalised, labels (B,), pseudo-labels (U,).

    kept and pseudo_label (kept,): the images that pseudo-labels are for. A client without labels has B = 0, one
    without kept images U = 0, one with neither no batch.
    """
    labelled, device = data.labelled[client], data.images.device
    steps = max(1, len(data.pool(client)) // args.batch_size)              # equally many in every method
    n_lab = args.batch_size if len(labelled) else 0
    n_unl = args.mu * args.batch_size if len(kept) else 0

    def uniform(*shape):
        return common.to_device(rng.random(shape, dtype=np.float32), device)

    for _ in range(args.local_epochs if n_lab + n_unl else 0):
        # All random numbers of an epoch are drawn on the host and cross over at once; no step waits for the device.
        lab_place = rng.choice(labelled, (steps, n_lab)) if n_lab else np.empty((steps, 0), np.int64)
        lab_index = common.to_device(lab_place, device)                    # (steps, B)
        unl_place = common.to_device(rng.integers(max(1, len(kept)), size=(steps, n_unl)), device)     # (steps, U)
        unl_index, unl_label = kept[unl_place], pseudo_label[unl_place]
        lab_draws, weak_draws = uniform(steps, n_lab, common.WEAK_DRAWS), uniform(steps, n_unl, common.WEAK_DRAWS)
        strong_draws = uniform(steps, n_unl, common.STRONG_DRAWS)
        for step in range(steps):
            lab, unl = data.images[lab_index[step]], data.images[unl_index[step]]
            views = torch.cat([common.weak_view(lab, lab_draws[step], args.flip),
                               common.weak_view(unl, weak_draws[step], args.flip),
                               common.strong_view(unl, strong_draws[step], args.flip)])
            yield common.normalise(views, *data.stats), data.labels[lab_index[step]], unl_label[step]


# Differs from baselines/fixmatch.py: local_loss, which asks a teacher and masks
def local_loss(args, net, views, label, pseudo_label):
    """The losses of one step. views (B + 2U, 3, S, S): labelled, weak, strong; label (B,); pseudo_label (U,).

    Returns the total, LOSSES, and the predictions of the weak views (U, C). An empty part has loss 0.
    """
    n_lab, n_unl = len(label), len(pseudo_label)
    logits = forward(net, views, args.amp)[1]
    lab_logits, weak_logits, strong_logits = logits.split([n_lab, n_unl, n_unl])
    loss_sup = F.cross_entropy(lab_logits, label) if n_lab else logits.new_zeros(())
    loss_unsup = F.cross_entropy(strong_logits, pseudo_label) if n_unl else logits.new_zeros(())
    return loss_sup + args.lambda_u * loss_unsup, (loss_sup, loss_unsup), weak_logits.detach().softmax(1)


# Differs from baselines/fedavg.py: server_update, which weights by the clients' images
def server_update(args, received, uploads):
    """The average of the clients that trained, by their priors. Returns the new Broadcast and the weights (M,)."""
    uploads = [upload for upload in uploads if upload.weight > 0]
    if not uploads:                                                        # nobody could train: keep the model
        return received, None
    priors = torch.stack([upload.prior for upload in uploads]).cpu().double()          # (M, C)
    weights = simplex_weights(priors) if args.exact_simplex else contracted_weights(priors)            # DIFF-1
    return Broadcast(average([upload.state for upload in uploads], weights)), weights


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
    classes = len(data.class_names)

    torch.manual_seed(common.stream(args.seed, "init").integers(2**31))
    net = ResNet8(classes, args.width).to(ranks.device, memory_format=torch.channels_last)
    if args.compile:
        net.compile()
    optimizer = torch.optim.SGD(net.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    received = run.restore(Broadcast({name: value.clone() for name, value in net.state_dict().items()}))
    bytes_down = sum(value.numel() * value.element_size() for value in received.state.values())
    bytes_up = bytes_down + 4 * classes                                    # the prior

    run.start(data.class_names, data.owned(), **data.facts)
    for rnd in run.rounds():
        sampling = common.stream(args.seed, "sampling", rnd)
        selected = sampling.choice(args.clients, args.clients_per_round, replace=False)
        uploads = ranks.gather([client_update(args, rnd, client, data, received, net, optimizer)
                                for client in ranks.mine(selected)], len(selected))
        if ranks.first:
            received, weights = server_update(args, received, uploads)
            accuracy = evaluate(net, received.state, data.test_images, data.test_labels, data.stats, args.amp)
            row = common.log_row(METRICS, COLUMNS, uploads, accuracy, bytes_up, bytes_down)
            # A client finds out that it has nothing to train on when it has the model already.
            row["bytes_down"] = bytes_down * sum(len(data.pool(client)) > 0 for client in selected)
            row["weight_min"], row["weight_max"] = (
                (None, None) if weights is None else (weights.min().item(), weights.max().item()))
            run.save(row, received._asdict())
        received = ranks.broadcast(received)


if __name__ == "__main__":
    common.launch(main)
