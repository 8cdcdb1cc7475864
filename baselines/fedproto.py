"""PROTO, PROTO-ALL and PROTO-Labeled: FedProto's class prototypes with FixMatch inside FedAvg, a reconstruction.

Papers: FedProto, AAAI 2022 (arXiv 2105.00243), official code yuetan031/FedProto; FixMatch, arXiv 2001.07685; FedAvg,
arXiv 1602.05629. Protocol and rows: ProxyFL, CVPR 2026 (arXiv 2602.21078), Sec. 6.3 and its tables, which describes the
three in two sentences; no code of them exists. FedProto's pull and its averaging of prototypes are as in its code.

    python baselines/fedproto.py                                        # PROTO, embedded digits
    python baselines/fedproto.py --prototypes all                       # PROTO-ALL
    python baselines/fedproto.py --prototypes labelled                  # PROTO-Labeled
    python baselines/fedproto.py --dataset cifar10 --alpha 0.1          # the paper's setting

Results: baselines/README.md. The paper's scale was not run.

Each client owns a few labelled and many unlabelled images. A round:
  server   broadcasts the global model and the global prototypes, a feature for each class;
  clients  train as in FixMatch with the broadcast model as teacher (GPL), pull each feature to the prototype of its
           (pseudo-)class, and take the mean feature of each class in their last epoch;
  server   averages the models, weighted by the clients' images, and the prototypes, each client alike.
PROTO-ALL's prototypes hold every wrong guess of the teacher; the paper reports 19.59 % for it on SVHN.

Letters in shapes: B labelled batch, U unlabelled batch, N = B + 2U rows (labelled, weak, strong), C classes,
D features, M clients of the round.

Components: pseudo-labels and mask `pseudo_labels`; loss `unlabelled_loss`; pull to the prototypes `prototype_loss`;
local prototypes `building_mask` and `class_sums`; global ones `average_prototypes`. The model is tested by its
classifier. Left out of FedProto: its paper weights prototypes by images of the class (its code does not, nor do we: the
counts would have to be sent); clients with networks of their own; the nearest prototype as classifier.
Not published, chosen here:
  - The pull acts on labelled images and on the strong views of confident ones, in all three variants alike; which
    images build the prototypes is all that they differ in.
  - Local prototypes come from labelled and weak views, features of the network in training (batch norm by the mixed
    batch), as it passes through its last epoch: FedProto's code does the same.
  - An image of a class without prototype counts as 0 in the mean, as in FedProto's code; a class that no client of a
    round reports keeps its prototype.
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
LOSSES = "loss_sup", "loss_unsup", "loss_proto"
METRICS = ("steps", "sup_steps", *LOSSES, "images", "used", "correct", "used_correct")     # sums, for the log
COLUMNS = {name: (name, "sup_steps" if name == "loss_sup" else "steps") for name in LOSSES} | common.PSEUDO_LABELS


def parse_args(argv=None):
    parser = common.Parser("fedproto", __doc__, PRESETS).add_semi_supervised_flags()
    number = common.number
    ssl = parser.add_argument_group("FixMatch, teacher: the broadcast model")
    ssl.add_argument("--conf-threshold", "--tau", type=number(float, 0, 2), default=0.95,
                     help="0: every image counts; above 1 none does [0.95, FixMatch and SAGE]")
    ssl.add_argument("--lambda-u", type=number(float, 0), default=1.0,
                     help="weight of the unlabelled loss [1, SAGE's code]")
    proto = parser.add_argument_group("FedProto")
    proto.add_argument("--prototypes", choices=("confident", "all", "labelled"), default="confident",
                       help="built from labelled images and confident ones (PROTO), all (PROTO-ALL) or none "
                            "(PROTO-Labeled) of the unlabelled [confident]")
    proto.add_argument("--lambda-proto", type=number(float, 0), default=1.0,
                       help="weight of the pull to the prototypes [1, FedProto's code; its README: 0.1 for CIFAR-10]")
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


# ---- The papers' maths ----------------------------------------------------------------------------------------------

# Differs from baselines/fixmatch.py: pseudo_labels, which has a choice of teachers
def pseudo_labels(global_prob, conf_threshold):
    """FixMatch, Eq. 4: the teacher's class and whether it is confident, (U,) and (U,) bool; probabilities (U, C)."""
    confidence, label = global_prob.max(1)
    return label, confidence >= conf_threshold                             # at the threshold: used, as in the code


# Copied from baselines/fixmatch.py: unlabelled_loss
def unlabelled_loss(strong_logits, pseudo_label, mask):
    """FixMatch, Eq. 4: cross-entropy of the strong views (U, C) to the pseudo-labels (U,), where mask (U,) allows.

    Divided by all U images, not by those used; nothing used gives exactly 0.
    """
    return (F.cross_entropy(strong_logits, pseudo_label, reduction="none") * mask).sum() / len(mask)


def prototype_loss(features, label, mask, prototype, known):
    """FedProto's pull: the squared distance of features (n, D) to the prototypes (C, D) of their classes, mean over D.

    Divided by the images that mask (n,) allows, those of a class without prototype (known (C,) is False) included.
    """
    distance = (features - prototype[label]).square().mean(1)              # (n,)
    return (distance * (mask & known[label])).sum() / mask.sum().clamp(min=1)


def building_mask(used, prototypes):
    """Which unlabelled images (U,) build prototypes: the used ones, all, or none."""
    return {"confident": used, "all": torch.ones_like(used), "labelled": torch.zeros_like(used)}[prototypes]


def class_sums(features, label, mask, classes):
    """Sums (C, D) of the features (n, D) of each class and their counts (C,), where mask (n,) allows."""
    member = F.one_hot(label, classes).to(features.dtype) * mask[:, None]  # (n, C)
    return member.T @ features, member.sum(0)


def average_prototypes(old, known, local, present):
    """FedProto's global prototypes: the plain mean of the clients' (M, C, D) that have the class, present (M, C).

    A class that no client has keeps its old prototype (C, D). Returns the prototypes and which are known, (C,) bool.
    """
    count = present.sum(0)[:, None]                                        # (C, 1)
    mean = (local * present[:, :, None]).sum(0) / count.clamp(min=1)
    return torch.where(count > 0, mean, old), known | present.any(0)


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

# Differs from baselines/fedavg.py: Broadcast, which has no prototypes
class Broadcast(NamedTuple):            # what the server sends to each client of a round
    state: dict                         # the global model: parameters and batch-norm buffers
    prototype: torch.Tensor             # (C, D) global prototypes, 0 where there is none yet
    known: torch.Tensor                 # (C,) bool: some client has reported the class


# Differs from baselines/fedavg.py: Upload, which has no prototypes
class Upload(NamedTuple):               # what client m sends back
    state: dict                         # its model
    prototype: torch.Tensor             # (C, D) mean features of its classes in the last epoch
    present: torch.Tensor               # (C,) bool: which classes it had
    weight: torch.Tensor                # its images; 0 for a client without any
    metrics: torch.Tensor               # sums of METRICS over its steps; for the log alone, no part of the method


# Copied from baselines/fixmatch.py: Batch
class Batch(NamedTuple):                # one local step's images
    views: torch.Tensor                 # (B + 2U, 3, S, S) normalised: labelled, weak, strong
    label: torch.Tensor                 # (B,)
    place: torch.Tensor                 # (U,) places of the unlabelled images in the client's pool
    truth: torch.Tensor                 # (U,) true labels of the unlabelled images, for the log alone
    hidden: torch.Tensor                # (U,) bool: the client does not own that label


# Differs from baselines/fixmatch.py: client_update, which has no prototypes
def client_update(args, rnd, client, data, received, net, teacher, optimizer):
    """Local training of one client from the broadcast model. Returns its Upload.

    net and teacher are this process's two networks: both are loaded with the broadcast state, net is trained.
    """
    net.load_state_dict(received.state)
    teacher.load_state_dict(received.state)                                # copies: the teacher stays as it is
    net.train()
    teacher.eval()
    optimizer.state.clear()
    total, count = torch.zeros_like(received.prototype), torch.zeros_like(received.prototype[:, 0])
    metrics = torch.zeros(len(METRICS), device=data.images.device)
    for epoch, batch in local_batches(args, data, client, common.stream(args.seed, "client", rnd, client)):
        loss, sums, values = local_loss(args, net, teacher, batch.views, batch.label, received.prototype,
                                        received.known)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch == args.local_epochs - 1:
            total += sums[0]
            count += sums[1]
        metrics += step_metrics(values, batch)
    return Upload({name: value.detach().clone() for name, value in net.state_dict().items()},
                  total / count.clamp(min=1)[:, None], count > 0,
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


# Differs from baselines/fixmatch.py: local_loss, which has a choice of teachers and plug-ins, but no prototypes
def local_loss(args, net, teacher, views, label, prototype, known):
    """The losses of one step. views (B + 2U, 3, S, S): labelled, weak, strong; label (B,); prototypes as in Broadcast.

    Returns the total, the step's sums (C, D) and counts (C,) of features that build prototypes, and a dict of what
    step_metrics wants to know.
    """
    n_lab, n_unl, classes = len(label), (len(views) - len(label)) // 2, len(prototype)
    features, logits = forward(net, views, args.amp)
    lab_logits, _, strong_logits = logits.split([n_lab, n_unl, n_unl])
    lab_features, weak_features, strong_features = features.split([n_lab, n_unl, n_unl])
    with torch.no_grad():
        global_prob = forward(teacher, views[n_lab:n_lab + n_unl], args.amp)[1].softmax(1)        # (U, C)

    loss_sup = F.cross_entropy(lab_logits, label) if n_lab else logits.new_zeros(())
    pseudo_label, used = pseudo_labels(global_prob, args.conf_threshold)
    loss_unsup = unlabelled_loss(strong_logits, pseudo_label, used)
    loss = loss_sup + args.lambda_u * loss_unsup
    loss_proto = logits.new_zeros(())
    all_labels, owned = torch.cat([label, pseudo_label]), torch.ones_like(label, dtype=torch.bool)
    if args.lambda_proto:
        loss_proto = prototype_loss(torch.cat([lab_features, strong_features]), all_labels, torch.cat([owned, used]),
                                    prototype, known)
        loss = loss + args.lambda_proto * loss_proto
    sums = class_sums(torch.cat([lab_features, weak_features]).detach(), all_labels,
                      torch.cat([owned, building_mask(used, args.prototypes)]), classes)
    return loss, sums, dict(loss_sup=loss_sup, loss_unsup=loss_unsup, loss_proto=loss_proto,
                            pseudo_label=pseudo_label, used=used)


# Copied from baselines/fixmatch.py: step_metrics
def step_metrics(values, batch):
    """The METRICS of one step (len(METRICS),); pseudo-labels of images whose label the client owns do not count."""
    right, used = (values["pseudo_label"] == batch.truth) & batch.hidden, values["used"] & batch.hidden
    sums = [torch.ones_like(right[0]), torch.full_like(right[0], len(batch.label) > 0)]
    sums += [values[name] for name in LOSSES]
    sums += [part.sum() for part in (batch.hidden, used, right, right & used)]
    return torch.stack([value.detach().float() for value in sums])


# Differs from baselines/fedavg.py: server_update, which has no prototypes
def server_update(received, uploads):
    """The averages of the clients that trained: the model's and the prototypes'. Returns the new Broadcast."""
    uploads = [upload for upload in uploads if upload.weight > 0]
    if not uploads:                                                        # every client of the round is empty
        return received
    state = average([upload.state for upload in uploads], torch.stack([upload.weight for upload in uploads]))
    return Broadcast(state, *average_prototypes(received.prototype, received.known,
                                                torch.stack([upload.prototype for upload in uploads]),
                                                torch.stack([upload.present for upload in uploads])))


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
    net, teacher = (ResNet8(classes, args.width).to(ranks.device, memory_format=torch.channels_last) for _ in range(2))
    if args.compile:
        net.compile()
        teacher.compile()
    optimizer = torch.optim.SGD(net.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    received = run.restore(Broadcast({name: value.clone() for name, value in net.state_dict().items()},
                                     torch.zeros_like(net.classifier.weight),
                                     torch.zeros(classes, dtype=torch.bool, device=ranks.device)))
    # One message, either way: the state, the prototypes and a byte a class for which there are.
    message_bytes = sum(value.numel() * value.element_size()
                        for value in (*received.state.values(), received.prototype, received.known))

    run.start(data.class_names, data.owned(), **data.facts)
    for rnd in run.rounds():
        sampling = common.stream(args.seed, "sampling", rnd)
        selected = sampling.choice(args.clients, args.clients_per_round, replace=False)
        uploads = ranks.gather([client_update(args, rnd, client, data, received, net, teacher, optimizer)
                                for client in ranks.mine(selected)], len(selected))
        if ranks.first:
            pulled = args.lambda_proto and received.known.any()            # in round 1 there is nothing to pull to
            received = server_update(received, uploads)
            accuracy = evaluate(net, received.state, data.test_images, data.test_labels, data.stats, args.amp)
            row = common.log_row(METRICS, COLUMNS, uploads, accuracy, message_bytes, message_bytes)
            run.save(row if pulled else row | {"loss_proto": None}, received._asdict())
        received = ranks.broadcast(received)


if __name__ == "__main__":
    common.launch(main)
