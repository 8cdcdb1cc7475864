"""FedLoKe: each client keeps a personal model beside the shared one, and the two label images for each other.

Paper and official code: zcfinal/FedLoKe (code and the paper's PDF). Protocol and rows: ProxyFL, CVPR 2026
(arXiv 2602.21078), Table 1. The losses are the paper's; how they run in that protocol (optimiser, batch sizes, warm-up)
was not published and is chosen here.

    python baselines/fedloke.py                                         # embedded digits
    python baselines/fedloke.py --dataset cifar10 --alpha 0.1           # the paper's setting
    python baselines/fedloke.py --first-visit download                  # late clients do not begin with a stale model

Results: baselines/README.md. The paper's scale was not run.

Each client owns a few labelled and many unlabelled images. A round:
  server   broadcasts the shared model theta;
  clients  blend their personal model phi with it, then train both: on labelled images by cross-entropy (theta sees
           strong, phi weak views), and on the strong views of unlabelled images towards the probabilities that the
           *other* model gives to the weak view, where their entropy is low;
  server   averages the shared models, weighted by the clients' images; personal models stay where they are.

Letters in shapes: B labelled batch, U unlabelled batch, C classes, D features, M clients of the round.

Components: blending `blend`; low-entropy distillation, both directions `distillation`; warm-up `warm_up`; clipped
gradient entries and both models' steps `client_update`; persistent personal models `stack_personal`, `main`.

Where paper and official code differ (effect not measured):
  DIFF-1  --clip   the code clips each gradient entry to [-0.1, 0.1]; the paper does not say so (0). Default: code
Without a flag: the paper's server weighs clients by their images, the code's equally; its clients are of equal size, as
those of the official split here. The code augments a whole batch alike and does not normalise images; here each
image has its own views, normalised as in all baselines.
Not published, chosen here:
  - Labelled, weak and strong views pass in separate forwards, as in the code: batch norm sees each kind alone, in the
    order labelled, weak, strong.
  - Both models use the protocol's optimiser (the paper: lr 0.01, neither momentum nor weight decay).
  - --warm-up-rounds is min(200, half the rounds of the data set): SVHN's 150 rounds would never leave the paper's 200.
  - --first-visit: the paper's and the code's phi begins as the initial global model, and a client that is first
    sampled late blends that stale copy in with weight mu. `download` begins with the model of the round instead.
  - pl_* in rounds.csv describe the personal model's labels: those that the shared model learns from.
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
    "cifar10": PAPER | dict(rounds=300, warm_up_rounds=150),
    "cifar100": PAPER | dict(rounds=500, warm_up_rounds=200),
    "svhn": PAPER | dict(rounds=150, warm_up_rounds=75, flip=False),       # no mirrored digits
    "cinic10": PAPER | dict(rounds=400, warm_up_rounds=200),
    "fashionmnist": PAPER | dict(rounds=150, warm_up_rounds=75),           # not in the paper
    "folder": PAPER | dict(rounds=300, warm_up_rounds=150),                # not in the paper
    "digits": PAPER | dict(rounds=30, warm_up_rounds=15, batch_size=16, width=16, image_size=8, flip=False),  # ours
}
LOSSES = "loss_sup", "loss_unsup", "loss_personal"
METRICS = ("steps", "sup_steps", *LOSSES, "images", "used", "correct", "used_correct")     # sums, for the log
COLUMNS = {name: (name, "sup_steps" if name == "loss_sup" else "steps") for name in LOSSES} | common.PSEUDO_LABELS


def parse_args(argv=None):
    parser = common.Parser("fedloke", __doc__, PRESETS).add_semi_supervised_flags()
    number = common.number
    method = parser.add_argument_group("FedLoKe")
    method.add_argument("--loke-mu", type=number(float, 0, 1), default=0.9,
                        help="the paper's mu: what a round's start keeps of the personal model; 0: it begins as the "
                             "download, 1: it never hears of it [0.9, official script; paper: one of 0.5, 0.7, 0.9]")
    method.add_argument("--entropy-threshold", type=number(float, 0), default=0.1,
                        help="in nats: labels of lower entropy are used; 0: none, above ln C: all [0.1, paper]")
    method.add_argument("--warm-up-rounds", type=number(int, 0), default=None,
                        help="rounds in which the weight of the unlabelled losses grows from 0 to 1; 0: it is 1 "
                             "[preset, whatever --rounds says; paper 200 of 500]")
    method.add_argument("--clip", type=number(float, 0), default=0.1,
                        help="DIFF-1: bound of each gradient entry; 0: none, as in the paper [0.1, code]")
    method.add_argument("--first-visit", choices=("initial", "download"), default="initial",
                        help="a personal model begins as the initial global model, or as that of the client's first "
                             "round [initial, paper and code]")
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

def blend(personal, shared, loke_mu):
    """Start of a round: phi <- mu * phi + (1 - mu) * theta, batch-norm statistics included; counters stay phi's."""
    return {name: torch.lerp(shared[name], value, loke_mu) if value.is_floating_point() else value
            for name, value in personal.items()}


def distillation(teacher_log_prob, strong_logits, entropy_threshold):
    """The student's KL to the teacher where the teacher's entropy (nats) is below the threshold, and that mask (U,).

    teacher_log_prob (U, C) of the weak views, without gradient; strong_logits (U, C) of the student. Soft targets;
    divided by all U images, not by those used; nothing used gives exactly 0.
    """
    prob = teacher_log_prob.exp()
    used = -(prob * teacher_log_prob).sum(1) < entropy_threshold
    divergence = (prob * (teacher_log_prob - strong_logits.log_softmax(1))).sum(1)
    return (divergence * used).sum() / len(used), used


def warm_up(rnd, rounds):
    """The weight of the unlabelled losses in round rnd = 1, 2, ...: the paper counts from 0, so it begins with 0."""
    return min(1.0, (rnd - 1) / rounds) if rounds else 1.0


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


# Differs from baselines/fedavg.py: Upload, which has no personal model
class Upload(NamedTuple):               # what client m sends back
    state: dict                         # its shared model
    personal: dict                      # its personal model: in a federation it stays there, so it costs no bytes
    weight: torch.Tensor                # its images; 0 for a client without any
    metrics: torch.Tensor               # sums of METRICS over its steps; for the log alone, no part of the method


# Differs from baselines/fixmatch.py: Batch, whose labelled images have one view
class Batch(NamedTuple):                # one local step's images
    views: torch.Tensor                 # (2B + 2U, 3, S, S) normalised: labelled strong, labelled weak, weak, strong
    label: torch.Tensor                 # (B,)
    place: torch.Tensor                 # (U,) places of the unlabelled images in the client's pool
    truth: torch.Tensor                 # (U,) true labels of the unlabelled images, for the log alone
    hidden: torch.Tensor                # (U,) bool: the client does not own that label


# Differs from baselines/fixmatch.py: client_update, which trains one model
def client_update(args, rnd, client, data, received, personal, net, personal_net, optimizer):
    """Local training of one client's shared and personal model. Returns its Upload.

    personal: its phi as the last visit left it. net and personal_net are this process's two networks, both trained by
    the one optimiser: SGD works entry by entry, so it equals one for each.
    """
    net.load_state_dict(received.state)                                    # copies: the broadcast stays as it is
    personal_net.load_state_dict(blend(personal, received.state, args.loke_mu))
    net.train()
    personal_net.train()
    optimizer.state.clear()
    parameters = [*net.parameters(), *personal_net.parameters()]
    metrics = torch.zeros(len(METRICS), device=data.images.device)
    for _, batch in local_batches(args, data, client, common.stream(args.seed, "client", rnd, client)):
        loss, values = local_loss(args, net, personal_net, batch.views, batch.label,
                                  warm_up(rnd, args.warm_up_rounds))
        optimizer.zero_grad()
        loss.backward()
        if args.clip:                                                      # DIFF-1: each entry, not the norm
            nn.utils.clip_grad_value_(parameters, args.clip)
        optimizer.step()
        metrics += step_metrics(values, batch)
    state, personal = ({name: value.detach().clone() for name, value in each.state_dict().items()}
                       for each in (net, personal_net))
    return Upload(state, personal, torch.tensor(float(len(data.pool(client))), dtype=torch.float64), metrics)


# Differs from baselines/fixmatch.py: local_batches, whose labelled images have one view
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
        # One call of each augmentation serves both kinds of images: labelled rows come first.
        weak_draws = uniform(steps, n_lab + n_unl, common.WEAK_DRAWS)
        strong_draws = uniform(steps, n_lab + n_unl, common.STRONG_DRAWS)
        for step in range(steps):
            images = data.images[torch.cat([lab_index[step], unl_index[step]])]
            weak = common.weak_view(images, weak_draws[step], args.flip)
            strong = common.strong_view(images, strong_draws[step], args.flip)
            views = torch.cat([strong[:n_lab], weak, strong[n_lab:]])
            yield epoch, Batch(common.normalise(views, *data.stats), data.labels[lab_index[step]], unl_place[step],
                               data.labels[unl_index[step]], hidden[step])


# Copied from baselines/fixmatch.py: passes
def passes(size, batch, steps, rng):
    """Places 0..size-1 in batches (steps, batch): shuffled passes, each without its last partial batch."""
    per_pass = size // batch
    return np.concatenate([rng.permutation(size)[:per_pass * batch] for _ in range(math.ceil(steps / per_pass))]
                          ).reshape(-1, batch)[:steps]


# Differs from baselines/fixmatch.py: local_loss, which has one model in training and hard labels
def local_loss(args, net, personal_net, views, label, ramp):
    """The losses of one step of both models. views (2B + 2U, 3, S, S) as in Batch; label (B,).

    ramp: weight of the unlabelled losses. Returns the total and a dict of what step_metrics wants to know.
    """
    n_lab, n_unl = len(label), len(views) // 2 - len(label)
    lab_strong, lab_weak, weak, strong = views.split([n_lab, n_lab, n_unl, n_unl])
    loss_sup = personal_sup = views.new_zeros(())
    if n_lab:
        loss_sup = F.cross_entropy(forward(net, lab_strong, args.amp)[1], label)
        personal_sup = F.cross_entropy(forward(personal_net, lab_weak, args.amp)[1], label)
    with torch.no_grad():                                                  # teachers: the models as they are now
        shared_log_prob = forward(net, weak, args.amp)[1].log_softmax(1)
        personal_log_prob = forward(personal_net, weak, args.amp)[1].log_softmax(1)
    loss_unsup, used = distillation(personal_log_prob, forward(net, strong, args.amp)[1], args.entropy_threshold)
    personal_unsup, _ = distillation(shared_log_prob, forward(personal_net, strong, args.amp)[1],
                                     args.entropy_threshold)
    loss_personal = personal_sup + ramp * personal_unsup                   # in rounds.csv with the ramp, as a whole
    loss = loss_sup + ramp * loss_unsup + loss_personal                    # no weight is in both: one backward
    return loss, dict(loss_sup=loss_sup, loss_unsup=loss_unsup, loss_personal=loss_personal,
                      pseudo_label=personal_log_prob.argmax(1), used=used)


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


def stack_personal(personal, selected, newcomer, device):
    """The personal models of the round's clients: one tensor (M, ...) for each entry of a state.

    personal: client number, as text, to state. newcomer: the state of a client that has none yet.
    """
    states = [personal.get(str(client), newcomer) for client in selected]
    return {name: torch.stack([state[name].to(device) for state in states]) for name in newcomer}


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
    net, personal_net = (ResNet8(len(data.class_names), args.width).to(ranks.device, memory_format=torch.channels_last)
                         for _ in range(2))
    if args.compile:
        net.compile()
        personal_net.compile()
    optimizer = torch.optim.SGD([*net.parameters(), *personal_net.parameters()], args.lr, args.momentum,
                                weight_decay=args.weight_decay)
    initial = {name: value.clone() for name, value in net.state_dict().items()}
    received = run.restore(Broadcast(initial))
    # The personal models of all clients that have one, on the CPU. They change on rank 0 alone, which hands each to
    # the rank that trains its client; in a federation they would lie on the clients.
    personal = run.checkpoint["personal"] if run.checkpoint else {}
    message_bytes = sum(value.numel() * value.element_size() for value in received.state.values())    # either way

    run.start(data.class_names, data.owned(), **data.facts)
    for rnd in run.rounds():
        sampling = common.stream(args.seed, "sampling", rnd)
        selected = sampling.choice(args.clients, args.clients_per_round, replace=False)
        newcomer = received.state if args.first_visit == "download" else initial
        stacked = ranks.broadcast(stack_personal(personal, selected, newcomer, ranks.device))
        uploads = ranks.gather([client_update(args, rnd, client, data, received,
                                              {name: value[place] for name, value in stacked.items()},
                                              net, personal_net, optimizer)
                                for place, client in ranks.mine(list(enumerate(selected)))], len(selected))
        if ranks.first:
            received = server_update(received, uploads)
            for client, upload in zip(selected, uploads):
                if upload.weight > 0:
                    personal[str(client)] = {name: value.cpu() for name, value in upload.personal.items()}
            accuracy = evaluate(net, received.state, data.test_images, data.test_labels, data.stats, args.amp)
            row = common.log_row(METRICS, COLUMNS, uploads, accuracy, message_bytes, message_bytes)
            run.save(row, {**received._asdict(), "personal": personal})
        received = ranks.broadcast(received)


if __name__ == "__main__":
    common.launch(main)
