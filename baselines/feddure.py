"""FedDure, a reconstruction: two regulators judge how a client learns from its pseudo-labels.

Paper: FedDure, arXiv 2307.05358 (abstract alone at hand). Official code: White1973/FedDure, whose released client lacks
the fine regulator. Protocol and row: ProxyFL, CVPR 2026 (arXiv 2602.21078), Table 1. --variant paper rebuilds both
regulators from what is known of them, so their details are chosen here; --variant official follows the release.

    python baselines/feddure.py                                         # embedded digits
    python baselines/feddure.py --variant official                      # the released client
    python baselines/feddure.py --dataset cifar10 --alpha 0.1           # the setting of ProxyFL's table

Results: baselines/README.md. The paper's scale was not run.

Each client owns a few labelled and many unlabelled images. A round:
  server   broadcasts the global model;
  clients  train it on labelled images by cross-entropy, and on strong views towards the class that it finds in the weak
           view; a second copy, the coarse regulator, learns from the same pseudo-labels first: how much that helped on
           labelled images is the gain, which counts for the whole batch; the fine regulator, a small network, weights
           each image, and is trained through a step of the coarse one (paper) or left out (official);
  server   averages the models, weighted by the clients' images.

Letters in shapes: B labelled batch, U unlabelled batch, N = B + 2U rows (labelled, weak, strong), C classes,
D features, M clients of the round.

Components: fine regulator `FineRegulator`, trained in `regulate` through `virtual_step`; gain of the coarse regulator
`learning_gain`; loss of the model `unlabelled_loss` (paper), `soft_loss` (official); the release's student `follow`.
Where paper and official code differ:
  DIFF-1  --variant   The paper has a fine regulator; the release never trains one: it labels by confidence at .6, with
                      soft labels and the weight 8, after fine-tuning on the labels, and its coarse regulator is a
                      student that learns from weak views. Default: paper. Digits, 30 rounds: paper 96.6 %,
                      official 86.1 % (3 seeds), which has the protocol's SGD in the place of its Adam.
  DIFF-2  --gain      The gain should be positive where pseudo-labels helped, so old minus new loss; the release takes
                      new minus old. Default: as the variant. Effect on accuracy, by itself: not measured.
Not published, chosen here:
  - Paper variant: the coarse regulator has the model's optimiser, so a gain judges the pseudo-labels of earlier batches
    as well, through the momentum, and swings; its batch norm goes by each batch in every pass, so a virtual step leaves
    nothing behind and shares its pass with the real one; the weights' inputs and outputs carry no gradient into either
    network; the fine regulator starts anew for each client and round.
  - Official variant: SGD of this protocol for both networks (there Adam, whose warm-up outlasts the round); the gain is
    bounded here too; fine-tuning takes one local epoch (there 5 steps before 5 on CIFAR-10, 100 before 10 on CINIC-10).
    The two scalars that each client uploads there are left out: the average does not need them.
  - With so few steps the fine regulator's weights stay near 1/2 (digits: mean .5, deviation .015 over images), so the
    paper variant is close to LPL-ALL at half the weight, plus the gain.
  - A client without labels has gain 0 and an untrained fine regulator.
No formula here is from the paper's text.
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
PAPER = dict(clients=20, clients_per_round=8, local_epochs=5, batch_size=128, mu=2, lr=0.1, momentum=0.9,
             weight_decay=1e-4, warm_up=20, width=64, image_size=32, flip=True)
PRESETS = {
    "cifar10": PAPER | dict(rounds=300),
    "cifar100": PAPER | dict(rounds=500),
    "svhn": PAPER | dict(rounds=150, flip=False),                          # no mirrored digits
    "cinic10": PAPER | dict(rounds=400),
    "fashionmnist": PAPER | dict(rounds=150),                              # not in the paper
    "folder": PAPER | dict(rounds=300),                                    # not in the paper
    "digits": PAPER | dict(rounds=30, batch_size=16, warm_up=4, width=16, image_size=8, flip=False),  # ours: quick
}
VARIANTS = {                            # flag: (paper, official); None: the variant has no such thing
    "gain": ("old-new", "new-old"), "lambda_u": (1.0, 8.0), "conf_threshold": (None, 0.6),
    "fine_tune_epochs": (None, 1), "virtual_lr": (0.1, None), "fine_lr": (1e-3, None), "fine_hidden": (128, None),
}
LOSSES = "loss_sup", "loss_unsup", "loss_gain", "loss_fine"
SIGNALS = "gain", "fine_weight"
METRICS = ("steps", "sup_steps", *LOSSES, *SIGNALS, "images", "used", "correct", "used_correct")   # sums, for the log
NEED_LABELS = "loss_sup", "loss_fine", "gain"
COLUMNS = {name: (name, "sup_steps" if name in NEED_LABELS else "steps") for name in (*LOSSES, *SIGNALS)}
COLUMNS |= common.PSEUDO_LABELS


def parse_args(argv=None):
    parser = common.Parser("feddure", __doc__, PRESETS).add_semi_supervised_flags()
    number = common.number
    both = parser.add_argument_group("FedDure ([variant] goes by --variant: paper, official)")
    both.add_argument("--variant", choices=("paper", "official"), default="paper",
                      help="the reconstruction of the paper or the released client (DIFF-1) [paper]")
    both.add_argument("--lambda-u", type=number(float, 0), default=None,
                      help="weight of the unlabelled loss [variant: 1, chosen; 8, release]")
    both.add_argument("--warm-up", type=number(int, 0), default=None,
                      help="steps of a round over which --lambda-u grows to its value [preset; 20: the release's ramp, "
                           "chosen for the paper variant; digits: the same share of a round]")
    both.add_argument("--coarse-lr", type=number(float, 0), default=None,
                      help="step size of the coarse regulator; 0: no gain [--lr, chosen]")
    both.add_argument("--gain", choices=("old-new", "new-old"), default=None,
                      help="sign of the gain from the labelled losses before and after (DIFF-2) [variant]")
    both.add_argument("--gain-bound", type=number(float, 0), default=1.0,
                      help="largest gain of either sign; a negative one climbs the loss [1, chosen; release: none]")
    paper = parser.add_argument_group("paper variant alone")
    paper.add_argument("--virtual-lr", type=number(float, 0), default=None,
                       help="step size of the virtual step; 0 trains no fine regulator [0.1, chosen]")
    paper.add_argument("--fine-lr", type=number(float, 0), default=None,
                       help="step size of its Adam [1e-3, base class of the release]")
    paper.add_argument("--fine-hidden", type=number(int, 1), default=None,
                       help="width of the fine regulator [128, an unofficial port; base class of the release 100]")
    official = parser.add_argument_group("official variant alone")
    official.add_argument("--conf-threshold", "--tau", type=number(float, 0, 2), default=None,
                          help="pseudo-labels from this confidence on count; above 1 none does [0.6, release]")
    official.add_argument("--fine-tune-epochs", type=number(int, 0), default=None,
                          help="epochs on labelled images alone before the local ones [1, chosen; release: 5 "
                               "steps before 5 on CIFAR-10, 100 before 10 on CINIC-10]")

    def of_variant(args):
        lr = PRESETS[args.dataset]["lr"] if args.lr is None else args.lr
        return {name: values[args.variant == "official"] for name, values in VARIANTS.items()} | {"coarse_lr": lr}

    args = parser.parse(argv, of_variant)
    for name, default in of_variant(args).items():
        if default is None and getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} has no effect with --variant {args.variant}")
    return args


# ---- Models ---------------------------------------------------------------------------------------------------------

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


class FineRegulator(nn.Module):
    """The weight of an image, in (0, 1), from the probabilities that a model gives it: (U, C) -> (U,)."""

    def __init__(self, classes, hidden=128):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(classes, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Sigmoid())

    def forward(self, prob):
        return self.layers(prob)[:, 0]


# Copied from baselines/fedavg.py: forward
def forward(net, views, amp):
    """Features (n, D) and logits (n, C) in float32, computed in bfloat16 where amp is on."""
    with torch.autocast(views.device.type, torch.bfloat16, enabled=amp):
        features, logits = net(views)
    return features.float(), logits.float()


# ---- The maths, rebuilt ---------------------------------------------------------------------------------------------

def virtual_step(parameters, losses, weight, rate):
    """Parameters (name -> tensor) after one gradient step on the weighted mean of losses (U,); nothing is changed.

    The result is a function of weight (U,), so the fine regulator can learn from what it is worth.
    """
    gradient = torch.autograd.grad((weight * losses).mean(), list(parameters.values()), create_graph=True)
    return {name: value - rate * slope for (name, value), slope in zip(parameters.items(), gradient)}


def learning_gain(loss_before, loss_after, direction="old-new", bound=1.0):
    """What a step on pseudo-labels did to the labelled loss, a scalar within +-bound."""
    # DIFF-2 First-order reasoning rewards pseudo-labels that lower the labelled loss: old minus new. The release takes
    # new minus old, as a well-known port of Meta Pseudo Labels does (kekmodel/MPL-pytorch, disputed in issue 6), and so
    # rewards the ones that raise it. Default: as the variant. --gain gives the other.
    gain = loss_before - loss_after if direction == "old-new" else loss_after - loss_before
    return gain.clamp(-bound, bound)


# Copied from baselines/fixmatch.py: unlabelled_loss
def unlabelled_loss(strong_logits, pseudo_label, mask):
    """FixMatch, Eq. 4: cross-entropy of the strong views (U, C) to the pseudo-labels (U,), where mask (U,) allows.

    Divided by all U images, not by those used; nothing used gives exactly 0.
    """
    return (F.cross_entropy(strong_logits, pseudo_label, reduction="none") * mask).sum() / len(mask)


def soft_loss(strong_logits, prob, mask):
    """Cross-entropy of the strong views (U, C) to soft labels (U, C), where mask (U,) allows; divided by all U."""
    return -((prob * strong_logits.log_softmax(1)).sum(1) * mask).sum() / len(mask)


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


# Copied from baselines/fedavg.py: Upload
class Upload(NamedTuple):               # what client m sends back
    state: dict                         # its model
    weight: torch.Tensor                # its images; 0 for a client that could not train
    metrics: torch.Tensor               # sums of METRICS over its steps; for the log alone, no part of the method


# Copied from baselines/fixmatch.py: Batch
class Batch(NamedTuple):                # one local step's images
    views: torch.Tensor                 # (B + 2U, 3, S, S) normalised: labelled, weak, strong
    label: torch.Tensor                 # (B,)
    place: torch.Tensor                 # (U,) places of the unlabelled images in the client's pool
    truth: torch.Tensor                 # (U,) true labels of the unlabelled images, for the log alone
    hidden: torch.Tensor                # (U,) bool: the client does not own that label


# Differs from baselines/fixmatch.py: client_update, which has no regulators
def client_update(args, rnd, client, data, received, net, coarse, optimizer, coarse_optimizer):
    """Local training of one client from the broadcast model. Returns its Upload.

    net and coarse are this process's two networks: both are loaded with the broadcast state and trained, net is sent.
    """
    for network, its_optimizer in ((net, optimizer), (coarse, coarse_optimizer)):
        network.load_state_dict(received.state)                            # a copy: the broadcast stays as it is
        network.train()                         # coarse: its running statistics are never read, so nothing spoils them
        its_optimizer.state.clear()
    fine = fine_optimizer = None
    if args.variant == "paper":
        torch.manual_seed(common.stream(args.seed, "fine", rnd, client).integers(2**31))
        fine = FineRegulator(net.classifier.out_features, args.fine_hidden).to(data.images.device)
        fine_optimizer = torch.optim.Adam(fine.parameters(), args.fine_lr)
    elif args.fine_tune_epochs:
        for views, label in labelled_batches(args, data, client, common.stream(args.seed, "fine-tune", rnd, client)):
            descend(optimizer, F.cross_entropy(forward(net, views, args.amp)[1], label))
    metrics = torch.zeros(len(METRICS), device=data.images.device)
    batches = local_batches(args, data, client, common.stream(args.seed, "client", rnd, client))
    for step, (_, batch) in enumerate(batches):
        ramp = min(1, (step + 1) / args.warm_up) if args.warm_up else 1
        loss, values = local_loss(args, net, coarse, fine, coarse_optimizer, fine_optimizer, batch.views, batch.label,
                                  ramp)
        descend(optimizer, loss)
        metrics += step_metrics(values, batch)
    return Upload({name: value.detach().clone() for name, value in net.state_dict().items()},
                  torch.tensor(float(len(data.pool(client))), dtype=torch.float64), metrics)


def descend(optimizer, loss):
    """One step of the optimiser on the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# Copied from baselines/fedavg.py: local_batches with local_batches->labelled_batches, local_epochs->fine_tune_epochs
def labelled_batches(args, data, client, rng):
    """The labelled batches of all epochs: views (B, 3, S, S), labels (B,); none for a client without labels."""
    labelled, device = data.labelled[client], data.images.device
    steps = max(1, len(data.pool(client)) // args.batch_size)              # equally many in every method
    for _ in range(args.fine_tune_epochs if len(labelled) else 0):
        # All random numbers of an epoch are drawn on the host and cross over at once; no step waits for the device.
        index = common.to_device(rng.choice(labelled, (steps, args.batch_size)), device)
        draws = common.to_device(rng.random((steps, args.batch_size, common.WEAK_DRAWS), dtype=np.float32), device)
        for chosen, draw in zip(index, draws):
            views = common.weak_view(data.images[chosen], draw, args.flip)
            yield common.normalise(views, *data.stats), data.labels[chosen]


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


# Differs from baselines/fixmatch.py: local_loss, which knows neither gain nor weights
def local_loss(args, net, coarse, fine, coarse_optimizer, fine_optimizer, views, label, ramp):
    """The losses of one step of the model, after the regulators took theirs.

    views (B + 2U, 3, S, S): labelled, weak, strong; label (B,); ramp scales --lambda-u. Returns the total, and a dict
    of what step_metrics wants to know.
    """
    n_lab, n_unl = len(label), (len(views) - len(label)) // 2
    lab_views, weak_views, strong_views = views.split([n_lab, n_unl, n_unl])
    lab_logits, weak_logits, strong_logits = forward(net, views, args.amp)[1].split([n_lab, n_unl, n_unl])
    loss_sup = F.cross_entropy(lab_logits, label) if n_lab else views.new_zeros(())
    prob = weak_logits.detach().softmax(1)                                 # (U, C); no gradient through a teacher
    confidence, pseudo_label = prob.max(1)
    gain, loss_fine = (views.new_zeros(()) for _ in range(2))
    # DIFF-1 The paper's two regulators, or the released client. Default: paper. --variant official gives the other.
    if args.variant == "paper":
        if n_lab:
            gain, loss_fine = regulate(args, coarse, fine, coarse_optimizer, fine_optimizer, lab_views, label,
                                       strong_views, pseudo_label)
        with torch.no_grad():
            weight = fine(strong_logits.softmax(1))                        # (U,)
        used = torch.ones_like(confidence, dtype=torch.bool)
        loss_unsup = unlabelled_loss(strong_logits, pseudo_label, weight)
        loss_gain = gain * unlabelled_loss(strong_logits, pseudo_label, used)
        loss = loss_sup + args.lambda_u * ramp * (loss_unsup + loss_gain)
    else:
        if n_lab:
            gain = follow(args, coarse, coarse_optimizer, lab_views, label, weak_views, pseudo_label)
        weight, used = torch.zeros_like(confidence), confidence >= args.conf_threshold     # nothing weighs images
        loss_unsup = soft_loss(strong_logits, prob, used)
        loss_gain = gain * F.cross_entropy(strong_logits, strong_logits.argmax(1))
        loss = loss_sup + args.lambda_u * ramp * loss_unsup + loss_gain
    return loss, dict(loss_sup=loss_sup, loss_unsup=loss_unsup, loss_gain=loss_gain, loss_fine=loss_fine, gain=gain,
                      fine_weight=weight.mean(), pseudo_label=pseudo_label, used=used)


def regulate(args, coarse, fine, coarse_optimizer, fine_optimizer, lab_views, label, strong_views, pseudo_label):
    """Paper variant: a step of the fine regulator, then one of the coarse one. Returns the gain and the fine loss.

    lab_views (B, 3, S, S), label (B,), strong_views (U, 3, S, S), pseudo_label (U,). One pass over the strong views
    serves both steps.
    """
    logits = forward(coarse, strong_views, args.amp)[1]
    prob, losses = logits.detach().softmax(1), F.cross_entropy(logits, pseudo_label, reduction="none")
    # The fine regulator: the labelled loss of the coarse one after a virtual step, second order in the latter.
    moved = virtual_step(dict(coarse.named_parameters()), losses, fine(prob), args.virtual_lr)
    lab_logits = forward(lambda views: functional_call(coarse, moved, (views,)), lab_views, args.amp)[1]
    loss_fine = F.cross_entropy(lab_logits, label)
    fine_optimizer.zero_grad()
    loss_fine.backward(inputs=list(fine.parameters()), retain_graph=True)  # not into coarse; losses are used again
    fine_optimizer.step()
    # The coarse regulator: the real step, by the new weights.
    with torch.no_grad():
        weight, loss_before = fine(prob), F.cross_entropy(forward(coarse, lab_views, args.amp)[1], label)
    descend(coarse_optimizer, (weight * losses).mean())
    with torch.no_grad():
        loss_after = F.cross_entropy(forward(coarse, lab_views, args.amp)[1], label)
    return learning_gain(loss_before, loss_after, args.gain, args.gain_bound), loss_fine


def follow(args, student, student_optimizer, lab_views, label, weak_views, pseudo_label):
    """Official variant: the student learns the pseudo-labels (U,) of the weak views; returns the gain of that step."""
    with torch.no_grad():
        loss_before = F.cross_entropy(forward(student, lab_views, args.amp)[1], label)
    descend(student_optimizer, F.cross_entropy(forward(student, weak_views, args.amp)[1], pseudo_label))
    with torch.no_grad():
        loss_after = F.cross_entropy(forward(student, lab_views, args.amp)[1], label)
    return learning_gain(loss_before, loss_after, args.gain, args.gain_bound)


# Differs from baselines/fixmatch.py: step_metrics, which has losses alone
def step_metrics(values, batch):
    """The METRICS of one step (len(METRICS),); pseudo-labels of images whose label the client owns do not count."""
    right, used = (values["pseudo_label"] == batch.truth) & batch.hidden, values["used"] & batch.hidden
    sums = [torch.ones_like(right[0]), torch.full_like(right[0], len(batch.label) > 0)]
    sums += [values[name] for name in (*LOSSES, *SIGNALS)]
    sums += [part.sum() for part in (batch.hidden, used, right, right & used)]
    return torch.stack([value.detach().float() for value in sums])


# Copied from baselines/fedavg.py: server_update
def server_update(received, uploads):
    """The average of the clients that trained. Returns the new Broadcast."""
    uploads = [upload for upload in uploads if upload.weight > 0]
    if not uploads:                                                        # nobody could train: keep the model
        return received
    return Broadcast(average([upload.state for upload in uploads], torch.stack([upload.weight for upload in uploads])))


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
    net, coarse = (ResNet8(len(data.class_names), args.width).to(ranks.device, memory_format=torch.channels_last)
                   for _ in range(2))
    if args.compile:
        net.compile()
        if args.variant == "official":                                     # compiled networks have no second order
            coarse.compile()
    optimizer, coarse_optimizer = (
        torch.optim.SGD(network.parameters(), lr, args.momentum, weight_decay=args.weight_decay)
        for network, lr in ((net, args.lr), (coarse, args.coarse_lr)))
    received = run.restore(Broadcast({name: value.clone() for name, value in net.state_dict().items()}))
    message_bytes = sum(value.numel() * value.element_size() for value in received.state.values())    # either way
    absent = {"loss_fine": None, "fine_weight": None} if args.variant == "official" else {}

    run.start(data.class_names, data.owned(), **data.facts)
    for rnd in run.rounds():
        sampling = common.stream(args.seed, "sampling", rnd)
        selected = sampling.choice(args.clients, args.clients_per_round, replace=False)
        uploads = ranks.gather([client_update(args, rnd, client, data, received, net, coarse, optimizer,
                                              coarse_optimizer) for client in ranks.mine(selected)], len(selected))
        if ranks.first:
            received = server_update(received, uploads)
            accuracy = evaluate(net, received.state, data.test_images, data.test_labels, data.stats, args.amp)
            row = common.log_row(METRICS, COLUMNS, uploads, accuracy, message_bytes, message_bytes)
            run.save(row | absent, received._asdict())
        received = ranks.broadcast(received)


if __name__ == "__main__":
    common.launch(main)
