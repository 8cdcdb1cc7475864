"""FlexMatch inside FedAvg, a reconstruction: the rule is the official one, what clients keep between rounds is chosen.

Papers: FlexMatch, NeurIPS 2021 (arXiv 2110.08263), official code TorchSSL/TorchSSL, later in
microsoft/Semi-supervised-learning; FedAvg, arXiv 1602.05629. Protocol and row: ProxyFL, CVPR 2026 (arXiv 2602.21078),
Table 1; no script of the row exists, and its SVHN figure (52.58 %) is far below the table's others.

    python baselines/flexmatch.py                                       # embedded digits
    python baselines/flexmatch.py --no-warm-up                          # unused images do not hold thresholds down
    python baselines/flexmatch.py --dataset cifar10 --alpha 0.1         # the paper's setting

Results: baselines/README.md. The paper's scale was not run.

Each client owns a few labelled and many unlabelled images. A round:
  server   broadcasts the global model;
  clients  train on labelled images by cross-entropy, and on the strong view of each unlabelled image towards the class
           that the model in training finds in its weak view, where it is confident by the threshold of that class: low
           for classes that were seldom predicted with confidence before;
  server   averages the models, weighted by the clients' images.

Letters in shapes: B labelled batch, U unlabelled batch, N = B + 2U rows (labelled, weak, strong), C classes,
D features, K clients, P images of a client's pool.

Components: memory of confident predictions `update_memory`, between rounds `Curricula`; learning status with or without
warm-up `learning_status`; class thresholds with the convex mapping `class_thresholds`; pseudo-labels and mask
`pseudo_labels`; loss `unlabelled_loss`. Left out: distribution alignment and soft labels, options of the official code
that its FlexMatch does not use.
What follows from the rule: a class that was never predicted with confidence has threshold 0, so at first every image
passes, and images that the model takes for a class the client does not have may pass for ever.
As in the official code: a memory with one value in all places (all unused, all one class) leaves the learning status as
it was.
Not published, chosen here:
  - Memory and learning status stay with the client from round to round and are never sent: starting anew each round
    would let every image pass in its first step.
  - The memory covers the whole pool, the labelled images without their labels included, as the unlabelled batches do.
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
LOSSES = "loss_sup", "loss_unsup"
METRICS = ("steps", "sup_steps", *LOSSES, "images", "used", "correct", "used_correct")     # sums, for the log
COLUMNS = {name: (name, "sup_steps" if name == "loss_sup" else "steps") for name in LOSSES} | common.PSEUDO_LABELS


def parse_args(argv=None):
    parser = common.Parser("flexmatch", __doc__, PRESETS).add_semi_supervised_flags()
    number, switch = common.number, common.switch
    ssl = parser.add_argument_group("FlexMatch")
    ssl.add_argument("--conf-threshold", "--tau", type=number(float, 0, 2), default=0.95,
                     help="the highest class threshold, and the confidence that is remembered; 0 or above 1: every "
                          "image counts [0.95, FlexMatch and SAGE]")
    ssl.add_argument("--lambda-u", type=number(float, 0), default=1.0,
                     help="weight of the unlabelled loss [1, FlexMatch and SAGE's code]")
    ssl.add_argument("--warm-up", action=switch, default=True,
                     help="measure classes also against the images not yet predicted with confidence [on, FlexMatch]")
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

def learning_status(memory, status, warm_up):
    """FlexMatch's beta (C,) in 0..1: how often each class stands in the memory, beside the most frequent one.

    memory (P,) holds classes, or -1 for unused; with warm-up, the unused places compete for the most frequent as well.
    A memory of one value keeps the status (C,) it had, as in the official code.
    """
    values = torch.arange(-1, len(status), device=memory.device)
    counts = (memory[:, None] == values).sum(0)                            # (1 + C,): unused, then each class
    largest = (counts if warm_up else counts[1:]).amax().clamp(min=1)
    return torch.where(counts.amax() == len(memory), status, counts[1:] / largest)


def class_thresholds(status, conf_threshold):
    """FlexMatch's thresholds (..., C) of the learning status (..., C), mapped by the convex x / (2 - x)."""
    return conf_threshold * (status / (2 - status))


# Differs from baselines/fixmatch.py: pseudo_labels, which has one threshold for all classes
def pseudo_labels(local_prob, threshold):
    """The model's class and whether it is confident by the threshold (C,) of that class, (U,) and (U,) bool."""
    confidence, label = local_prob.max(1)
    return label, confidence >= threshold[label]                           # at the threshold: used, as in the code


# Copied from baselines/fixmatch.py: unlabelled_loss
def unlabelled_loss(strong_logits, pseudo_label, mask):
    """FixMatch, Eq. 4: cross-entropy of the strong views (U, C) to the pseudo-labels (U,), where mask (U,) allows.

    Divided by all U images, not by those used; nothing used gives exactly 0.
    """
    return (F.cross_entropy(strong_logits, pseudo_label, reduction="none") * mask).sum() / len(mask)


def update_memory(memory, place, local_prob, conf_threshold):
    """Write each class that was predicted with confidence, by the fixed threshold, into the memory (P,), in place.

    place (U,): the images' places, each at most once; an entry may change its class, but never goes back to unused.
    """
    confidence, label = local_prob.max(1)
    memory[place] = torch.where(confidence >= conf_threshold, label, memory[place])


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


class Curricula(NamedTuple):            # what clients keep from round to round: in a federation, each its own row
    memory: torch.Tensor                # (K, largest P) int16 on the CPU: last confident class of each image; -1: none,
                                        # or no image, in a row longer than the client's pool
    status: torch.Tensor                # (K, C) on the CPU: the learning status of the client's last step


# Differs from baselines/fedavg.py: Upload, which carries nothing that stays with a client
class Upload(NamedTuple):               # what client m sends back
    state: dict                         # its model
    weight: torch.Tensor                # its images; 0 for a client without any
    metrics: torch.Tensor               # sums of METRICS over its steps; for the log alone, no part of the method
    memory: torch.Tensor                # its rows of Curricula: they never leave a client in a federation, but here the
    status: torch.Tensor                # next round may run it in another process; no part of the bytes


# Copied from baselines/fixmatch.py: Batch
class Batch(NamedTuple):                # one local step's images
    views: torch.Tensor                 # (B + 2U, 3, S, S) normalised: labelled, weak, strong
    label: torch.Tensor                 # (B,)
    place: torch.Tensor                 # (U,) places of the unlabelled images in the client's pool
    truth: torch.Tensor                 # (U,) true labels of the unlabelled images, for the log alone
    hidden: torch.Tensor                # (U,) bool: the client does not own that label


# Differs from baselines/fixmatch.py: client_update, which has a teacher and keeps nothing
def client_update(args, rnd, client, data, received, curricula, net, optimizer):
    """Local training of one client from the broadcast model, in this process's network. Returns its Upload."""
    device, size = data.images.device, len(data.pool(client))
    net.load_state_dict(received.state)                                    # a copy: the broadcast stays as it is
    net.train()
    optimizer.state.clear()
    row = curricula.memory[client].to(device, torch.int64, copy=True)
    status = curricula.status[client].to(device)
    memory = row[:size]                                                    # (P,): the rest is no image
    metrics = torch.zeros(len(METRICS), device=device)
    for _, batch in local_batches(args, data, client, common.stream(args.seed, "client", rnd, client)):
        status = learning_status(memory, status, args.warm_up)             # from the batches before this one
        threshold = class_thresholds(status, args.conf_threshold)
        loss, values = local_loss(args, net, batch.views, batch.label, threshold)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_memory(memory, batch.place, values["local_prob"], args.conf_threshold)
        metrics += step_metrics(values, batch)
    return Upload({name: value.detach().clone() for name, value in net.state_dict().items()},
                  torch.tensor(float(size), dtype=torch.float64), metrics, row.to(torch.int16), status)


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


# Differs from baselines/fixmatch.py: local_loss, which has a choice of teachers, and plug-ins
def local_loss(args, net, views, label, threshold):
    """The losses of one step. views (B + 2U, 3, S, S): labelled, weak, strong; label (B,); class thresholds (C,).

    Returns the total and a dict of what step_metrics and the memory want to know.
    """
    n_lab, n_unl = len(label), (len(views) - len(label)) // 2
    lab_logits, weak_logits, strong_logits = forward(net, views, args.amp)[1].split([n_lab, n_unl, n_unl])
    local_prob = weak_logits.detach().softmax(1)                           # (U, C); no gradient through a teacher
    loss_sup = F.cross_entropy(lab_logits, label) if n_lab else weak_logits.new_zeros(())
    pseudo_label, used = pseudo_labels(local_prob, threshold)
    loss_unsup = unlabelled_loss(strong_logits, pseudo_label, used)
    return loss_sup + args.lambda_u * loss_unsup, dict(loss_sup=loss_sup, loss_unsup=loss_unsup, local_prob=local_prob,
                                                       pseudo_label=pseudo_label, used=used)


# Copied from baselines/fixmatch.py: step_metrics
def step_metrics(values, batch):
    """The METRICS of one step (len(METRICS),); pseudo-labels of images whose label the client owns do not count."""
    right, used = (values["pseudo_label"] == batch.truth) & batch.hidden, values["used"] & batch.hidden
    sums = [torch.ones_like(right[0]), torch.full_like(right[0], len(batch.label) > 0)]
    sums += [values[name] for name in LOSSES]
    sums += [part.sum() for part in (batch.hidden, used, right, right & used)]
    return torch.stack([value.detach().float() for value in sums])


# Copied from baselines/fedavg.py: server_update
def server_update(received, uploads):
    """The average of the clients that trained. Returns the new Broadcast."""
    uploads = [upload for upload in uploads if upload.weight > 0]
    if not uploads:                                                        # nobody could train: keep the model
        return received
    return Broadcast(average([upload.state for upload in uploads], torch.stack([upload.weight for upload in uploads])))


def keep_curricula(curricula, selected, uploads):
    """The rows that the round's clients brought back, put into new Curricula."""
    memory, status = curricula.memory.clone(), curricula.status.clone()
    for client, upload in zip(selected, uploads):
        memory[client], status[client] = upload.memory.cpu(), upload.status.cpu()
    return Curricula(memory, status)


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
    longest = max(len(data.pool(client)) for client in range(args.clients))
    curricula = run.restore(Curricula(torch.full((args.clients, longest), -1, dtype=torch.int16),
                                      torch.zeros(args.clients, classes)))
    message_bytes = sum(value.numel() * value.element_size() for value in received.state.values())    # either way

    run.start(data.class_names, data.owned(), **data.facts)
    for rnd in run.rounds():
        sampling = common.stream(args.seed, "sampling", rnd)
        selected = sampling.choice(args.clients, args.clients_per_round, replace=False)
        uploads = ranks.gather([client_update(args, rnd, client, data, received, curricula, net, optimizer)
                                for client in ranks.mine(selected)], len(selected))
        if ranks.first:
            received = server_update(received, uploads)
            curricula = keep_curricula(curricula, selected, uploads)
            accuracy = evaluate(net, received.state, data.test_images, data.test_labels, data.stats, args.amp)
            row = common.log_row(METRICS, COLUMNS, uploads, accuracy, message_bytes, message_bytes)
            row["threshold_mean"] = mean_threshold(uploads, args.conf_threshold)
            run.save(row, received._asdict() | curricula._asdict())
        received, curricula = ranks.broadcast(received), ranks.broadcast(curricula)


def mean_threshold(uploads, conf_threshold):
    """The class thresholds of the clients' last steps, averaged over classes and clients; None if nobody trained."""
    trained = [class_thresholds(upload.status, conf_threshold) for upload in uploads if upload.weight > 0]
    return torch.stack(trained).mean().item() if trained else None


if __name__ == "__main__":
    common.launch(main)
