"""SAGE: local and global pseudo-labels mixed by the gap between their confidences, inside FedAvg.

Paper: SAGE, CVPR 2025 (arXiv 2503.13227). Official code: Jay-Codeman/SAGE, which the formulas here follow; it fixes the
method well. ProxyFL's modules on top of it: ProxyFL, CVPR 2026 (arXiv 2602.21078), Table 9.

    python baselines/sage.py                                            # embedded digits
    python baselines/sage.py --gpt --icpl                               # with ProxyFL's modules
    python baselines/sage.py --kappa 1e9                                # global labels, kept if either is confident
    python baselines/sage.py --kappa 0                                  # the local label wherever it is confident
    python baselines/sage.py --dataset cifar10 --alpha 0.1              # the paper's setting

Results: baselines/README.md. The paper's scale was not run.

Each client owns a few labelled and many unlabelled images. A round:
  server   broadcasts the global model;
  clients  train on labelled images by cross-entropy, and on the strong view of each unlabelled image towards a mixture
           of two classes: that of the model in training and that of the frozen broadcast model, both for its weak view.
           The more their confidences differ, the less the local class weighs;
  server   averages the models, weighted by the clients' images.
The local model labels with batch norm by the mixed batch, the global one with running statistics.

Letters in shapes: B labelled batch, U unlabelled batch, N = B + 2U rows (labelled, weak, strong), C classes,
D features, M clients of the round.

Components: weight of the local class `local_weight`; mixed targets and mask `sage_targets`; loss `unlabelled_loss`;
the plug-ins of ProxyFL's Table 9 in their released form (proxyfl.py has the variants): `icpl_loss` with
`update_prior`, and `tune_global_proxy`.
Worth knowing, as the official code has it:
  - An image of which the local model alone is sure is kept, and its target is nearly all the *unsure* global class.
  - Where the global model alone is sure the target is its class, whatever the local model says.
  - The code adds 1e-10 to targets and probabilities before their logarithms; log-softmax, here, needs no such guard.
  - Its option named kappa is never read: the slope is ln 2 / 0.05, so that a gap of 0.05 halves the weight.
Not published, chosen here:
  - ICPL as a plug-in keeps its own rules: class sets by the frozen global model, confidence of either model.
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
    "cifar10": PAPER | dict(rounds=300, gpt_epochs=100),
    "cifar100": PAPER | dict(rounds=500, gpt_epochs=10),
    "svhn": PAPER | dict(rounds=150, gpt_epochs=100, flip=False),          # no mirrored digits
    "cinic10": PAPER | dict(rounds=400, gpt_epochs=100),
    "fashionmnist": PAPER | dict(rounds=150, gpt_epochs=100),              # not in the paper
    "folder": PAPER | dict(rounds=300, gpt_epochs=100),                    # not in the paper
    "digits": PAPER | dict(rounds=30, gpt_epochs=100, batch_size=16, width=16, image_size=8, flip=False),  # ours: quick
}
LOSSES = "loss_sup", "loss_unsup", "loss_icpl"
METRICS = ("steps", "sup_steps", *LOSSES, "images", "used", "correct", "used_correct")     # sums, for the log
COLUMNS = {name: (name, "sup_steps" if name == "loss_sup" else "steps") for name in LOSSES} | common.PSEUDO_LABELS


def parse_args(argv=None):
    parser = common.Parser("sage", __doc__, PRESETS).add_semi_supervised_flags()
    number = common.number
    ssl = parser.add_argument_group("SAGE")
    ssl.add_argument("--conf-threshold", "--tau", type=number(float, 0, 2), default=0.95,
                     help="keep an image where either model is this confident; above 1: none [0.95, SAGE's code]")
    ssl.add_argument("--lambda-u", type=number(float, 0), default=1.0,
                     help="weight of the unlabelled loss [1, SAGE's code]")
    ssl.add_argument("--kappa", type=number(float, 0), default=math.log(2) / 0.05,
                     help="the local class weighs exp(-kappa * gap of the confidences); 0: it alone counts where "
                          "confident; large: it never does [ln 2 / 0.05 = 13.863, fixed in SAGE's code]")
    ssl.add_argument("--temperature", type=number(float, 0.01, 100), default=1.0,
                     help="divides the logits of both models where they label; with --icpl also in its class sets "
                          "[1, SAGE's options]")
    plug_in_flags(parser)
    return parser.parse(argv)


# Copied from baselines/fixmatch.py: plug_in_flags
def plug_in_flags(parser):
    """ProxyFL's two modules, added to another method."""
    number, switch = common.number, common.switch
    plug_in = parser.add_argument_group("ProxyFL's modules (its Table 9), as released")
    plug_in.add_argument("--gpt", action=switch, default=False, help="global proxy tuning on the server [off]")
    plug_in.add_argument("--gpt-epochs", type=number(int, 0), default=None,
                         help="with --gpt: passes over the uploaded proxies [preset, paper 100 or 10]")
    plug_in.add_argument("--gpt-lr", type=number(float, 0), default=0.005,
                         help="with --gpt [0.005, ProxyFL, Sec. 6.1]")
    plug_in.add_argument("--icpl", action=switch, default=False,
                         help="indecisive-categories proxy learning on the clients [off]")
    plug_in.add_argument("--lambda-icpl", type=number(float, 0), default=1.0,
                         help="with --icpl: weight of its loss [1, code]")
    return plug_in


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


# Copied from proxyfl.py: ResNet8
class ResNet8(nn.Module):
    """ResNet-8 of the 6n+2 family (width 64: 1,227,594 parameters with 10 classes), names as in the official code.

    heads: the official code's two projections, used by ICPL alone. Returns features (n, 4 * width), logits (n, C).
    """

    def __init__(self, classes, width=64, heads=False):
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
        if heads:                                   # last: a seed gives the same network with and without them
            self.feat_proj = nn.Linear(features, features)
            self.proxy_proj = nn.Linear(features, features, bias=False)

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

def local_weight(local_prob, global_prob, kappa):
    """lambda: how much the local class weighs, in [1e-6, 1]: less, the more the confidences differ, (U,)."""
    gap = ((local_prob.amax(1) - global_prob.amax(1)).abs() + 1e-6).clamp(1e-6, 1)
    return (-kappa * gap).exp().clamp(1e-6, 1)


def sage_targets(local_prob, global_prob, conf_threshold, kappa):
    """The target (U, C) of each image, and whether it is used, (U,) bool; probabilities (U, C).

    Where the local model is confident: lambda * its class + (1 - lambda) * the global class; else the global class.
    """
    (local_conf, local_label), (global_conf, global_label) = local_prob.max(1), global_prob.max(1)
    local_sure = local_conf >= conf_threshold                              # at the threshold: used, as in the code
    local_class, global_class = (F.one_hot(label, local_prob.shape[1]).to(local_prob.dtype)
                                 for label in (local_label, global_label))
    weight = local_weight(local_prob, global_prob, kappa) * local_sure     # 0 where the global class stands alone
    # Written as a difference: exactly one-hot where both name the same class.
    target = global_class + weight[:, None] * (local_class - global_class)
    return target, local_sure | (global_conf >= conf_threshold)


# Differs from baselines/fixmatch.py: unlabelled_loss, whose targets are classes
def unlabelled_loss(strong_logits, target, mask):
    """KL divergence of the strong views (U, C) from the targets (U, C), where mask (U,) allows.

    Divided by all U images, not by those used; nothing used gives exactly 0.
    """
    divergence = F.kl_div(strong_logits.log_softmax(1), target, reduction="none").sum(1)           # 0 log 0 = 0
    return (divergence * mask).sum() / len(mask)


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


# Copied from baselines/fixmatch.py: icpl_loss
def icpl_loss(net, features, global_prob, local_prob, class_prior, conf_threshold):
    """ProxyFL's contrastive loss, a plug-in: Eqs. 4 and 6 to 8 as released.

    features (N, D) of labelled, weak and strong views; global_prob (B + U, C) of labelled and weak views, local_prob
    (U, C) of weak ones; class_prior (C,). Returns the loss and which images are confident, (U,) bool.
    """
    n_unl = len(local_prob)
    n_lab, classes = len(global_prob) - n_unl, len(class_prior)
    confident = global_prob.amax(1) >= conf_threshold                      # (B + U,); unlabelled: or local
    confident = torch.cat([confident[:n_lab], confident[n_lab:] | (local_prob.amax(1) >= conf_threshold)])
    # Eq. 4: the class of a confident image, else all classes above the prior; never none.
    top1 = F.one_hot(global_prob.argmax(1), classes).bool()
    candidate = global_prob > class_prior                                  # (B + U, C)
    candidate = torch.where(confident[:, None] | ~candidate.any(1, keepdim=True), top1, candidate)
    # Projected and scaled to unit length; the classifier's rows are the proxies.
    features, proxy = F.normalize(net.feat_proj(features)), F.normalize(net.proxy_proj(net.classifier.weight))
    # Eq. 6: the proxy of a confident class, or those of the candidates weighted by global probability.
    weights = global_prob[n_lab:].masked_fill(confident[n_lab:, None], 1) * candidate[n_lab:]
    positive = (weights @ proxy).repeat(2, 1)                              # (2U, D): both views of an image share it
    # Eq. 7: negatives share no class with the anchor; the code wants their similarity above 1e-6.
    sets = torch.cat([candidate, candidate[n_lab:]]).to(features.dtype)    # (N, C)
    anchor = features[n_lab:]                                              # (2U, D): labelled rows are negatives alone
    similarity = anchor @ features.T
    similarity = similarity.masked_fill((sets[n_lab:] @ sets.T > 0) | (similarity <= 1e-6), -math.inf)
    # Eq. 8: no temperature; an anchor without a negative has loss 0.
    to_positive = (anchor * positive).sum(1, keepdim=True)                 # (2U, 1)
    loss = torch.cat([to_positive, similarity], 1).logsumexp(1) - to_positive[:, 0]
    return loss.mean(), confident[n_lab:]


# Copied from baselines/fixmatch.py: tune_global_proxy
def tune_global_proxy(global_proxy, proxy, epochs, lr, rng, batch_size=4, margin_cap=100.0):
    """ProxyFL's global proxy tuning, a plug-in: gradient steps on Eq. 2 as released, from the averaged proxies (C, D).

    proxy (M, C, D): each uploaded proxy is to be nearer to the global proxy of its class, by a margin, than to others.
    """
    clients, classes, width = proxy.shape
    exact = "donot_use_mm_for_euclid_dist"                                 # close proxies must not cancel
    rows, target = proxy.reshape(-1, width), torch.arange(classes, device=proxy.device).repeat(clients)
    margin = torch.cdist(global_proxy, global_proxy, compute_mode=exact).fill_diagonal_(math.inf).amin(1).amax()
    margin = margin.clamp(max=margin_cap) if classes > 1 else 0.0          # largest distance to the nearest other proxy
    tuned = global_proxy.clone().requires_grad_()
    for _ in range(epochs):
        order = common.to_device(rng.permutation(len(rows)), proxy.device)
        for index in order.split(batch_size):
            distance = torch.cdist(rows[index], tuned, compute_mode=exact)           # (batch, C)
            distance = distance + margin * F.one_hot(target[index], classes)
            gradient, = torch.autograd.grad(F.cross_entropy(-distance, target[index]), tuned)
            tuned.data.sub_(gradient, alpha=lr)
    return tuned.detach()


# Copied from baselines/fixmatch.py: update_prior
def update_prior(class_prior, class_count, momentum=0.99):
    """ProxyFL, Eq. 5, as released: the class prior (C,) follows the pooled class counts (M, C), smoothed."""
    pooled = class_count.sum(0).cpu().double()
    if not pooled.sum():                                                   # nobody counted anything: keep the prior
        return class_prior
    return momentum * class_prior + (1 - momentum) * pooled / pooled.sum()


# ---- Client, server, evaluation -------------------------------------------------------------------------------------

# Copied from baselines/fixmatch.py: Broadcast
class Broadcast(NamedTuple):            # what the server sends to each client of a round
    state: dict                         # the global model: parameters and batch-norm buffers
    class_prior: torch.Tensor           # (C,) float64 on the CPU; sent, as float32, with ICPL alone


# Copied from baselines/fixmatch.py: Upload
class Upload(NamedTuple):               # what client m sends back
    state: dict                         # its model
    class_count: torch.Tensor           # (C,) labelled and confident images of the last epoch; sent with ICPL alone
    weight: torch.Tensor                # its images; 0 for a client without any
    metrics: torch.Tensor               # sums of METRICS over its steps; for the log alone, no part of the method


# Copied from baselines/fixmatch.py: Batch
class Batch(NamedTuple):                # one local step's images
    views: torch.Tensor                 # (B + 2U, 3, S, S) normalised: labelled, weak, strong
    label: torch.Tensor                 # (B,)
    place: torch.Tensor                 # (U,) places of the unlabelled images in the client's pool
    truth: torch.Tensor                 # (U,) true labels of the unlabelled images, for the log alone
    hidden: torch.Tensor                # (U,) bool: the client does not own that label


# Copied from baselines/fixmatch.py: client_update
def client_update(args, rnd, client, data, received, net, teacher, optimizer):
    """Local training of one client from the broadcast model. Returns its Upload.

    net and teacher are this process's two networks: both are loaded with the broadcast state, net is trained.
    """
    device, classes = data.images.device, len(received.class_prior)
    class_prior = common.to_device(received.class_prior.float().numpy(), device)
    net.load_state_dict(received.state)
    teacher.load_state_dict(received.state)                                # copies: the teacher stays as it is
    net.train()
    teacher.eval()
    optimizer.state.clear()
    class_count, metrics = torch.zeros(classes, device=device), torch.zeros(len(METRICS), device=device)
    for epoch, batch in local_batches(args, data, client, common.stream(args.seed, "client", rnd, client)):
        loss, counts, values = local_loss(args, net, teacher, batch.views, batch.label, class_prior)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch == args.local_epochs - 1:
            class_count += counts
        metrics += step_metrics(values, batch)
    return Upload({name: value.detach().clone() for name, value in net.state_dict().items()}, class_count,
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


# Differs from baselines/fixmatch.py: local_loss, which trains towards one class
def local_loss(args, net, teacher, views, label, class_prior):
    """The losses of one step. views (B + 2U, 3, S, S): labelled, weak, strong; label (B,); class_prior (C,).

    Returns the total, the class counts of the step (C,), and a dict of what step_metrics wants to know.
    """
    n_lab, n_unl, classes = len(label), (len(views) - len(label)) // 2, len(class_prior)
    asked = 0 if args.icpl else n_lab                                      # ICPL wants the labelled rows' sets too
    features, logits = forward(net, views, args.amp)
    lab_logits, weak_logits, strong_logits = logits.split([n_lab, n_unl, n_unl])
    local_prob = (weak_logits.detach() / args.temperature).softmax(1)      # (U, C); no gradient through a teacher
    with torch.no_grad():
        all_prob = (forward(teacher, views[asked:n_lab + n_unl], args.amp)[1] / args.temperature).softmax(1)
    global_prob = all_prob[n_lab - asked:]

    loss_sup = F.cross_entropy(lab_logits, label) if n_lab else logits.new_zeros(())
    target, used = sage_targets(local_prob, global_prob, args.conf_threshold, args.kappa)
    loss_unsup = unlabelled_loss(strong_logits, target, used)
    loss = loss_sup + args.lambda_u * loss_unsup
    loss_icpl = logits.new_zeros(())
    counts = F.one_hot(label, classes).sum(0)
    if args.icpl:
        loss_icpl, confident = icpl_loss(net, features, all_prob, local_prob, class_prior, args.conf_threshold)
        loss = loss + args.lambda_icpl * loss_icpl
        counts = counts + (F.one_hot(global_prob.argmax(1), classes) * confident[:, None]).sum(0)
    return loss, counts, dict(loss_sup=loss_sup, loss_unsup=loss_unsup, loss_icpl=loss_icpl,
                              pseudo_label=target.argmax(1), used=used)    # for the log: the class that weighs most


# Copied from baselines/fixmatch.py: step_metrics
def step_metrics(values, batch):
    """The METRICS of one step (len(METRICS),); pseudo-labels of images whose label the client owns do not count."""
    right, used = (values["pseudo_label"] == batch.truth) & batch.hidden, values["used"] & batch.hidden
    sums = [torch.ones_like(right[0]), torch.full_like(right[0], len(batch.label) > 0)]
    sums += [values[name] for name in LOSSES]
    sums += [part.sum() for part in (batch.hidden, used, right, right & used)]
    return torch.stack([value.detach().float() for value in sums])


# Copied from baselines/fixmatch.py: server_update
def server_update(args, rnd, received, uploads):
    """The average of the clients that trained; with the plug-ins, tuned proxies and the next prior."""
    uploads = [upload for upload in uploads if upload.weight > 0]
    if not uploads:                                                        # every client of the round is empty
        return received
    state = average([upload.state for upload in uploads], torch.stack([upload.weight for upload in uploads]))
    class_prior = received.class_prior
    if args.gpt:
        proxy = torch.stack([upload.state["classifier.weight"] for upload in uploads])      # (M, C, D)
        state["classifier.weight"] = tune_global_proxy(state["classifier.weight"], proxy, args.gpt_epochs, args.gpt_lr,
                                                       common.stream(args.seed, "gpt", rnd))
    if args.icpl:
        class_prior = update_prior(class_prior, torch.stack([upload.class_count for upload in uploads]))
    return Broadcast(state, class_prior)


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
    net, teacher = (ResNet8(classes, args.width, heads=args.icpl).to(ranks.device, memory_format=torch.channels_last)
                    for _ in range(2))
    if args.compile:
        net.compile()
        teacher.compile()
    optimizer = torch.optim.SGD(net.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    received = run.restore(Broadcast({name: value.clone() for name, value in net.state_dict().items()},
                                     torch.full((classes,), 1 / classes, dtype=torch.float64)))
    # One message, either way: the state; with ICPL the prior down and the class counts up.
    message_bytes = sum(value.numel() * value.element_size() for value in received.state.values())
    message_bytes += 4 * classes if args.icpl else 0

    run.start(data.class_names, data.owned(), **data.facts)
    for rnd in run.rounds():
        sampling = common.stream(args.seed, "sampling", rnd)
        selected = sampling.choice(args.clients, args.clients_per_round, replace=False)
        uploads = ranks.gather([client_update(args, rnd, client, data, received, net, teacher, optimizer)
                                for client in ranks.mine(selected)], len(selected))
        if ranks.first:
            received = server_update(args, rnd, received, uploads)
            accuracy = evaluate(net, received.state, data.test_images, data.test_labels, data.stats, args.amp)
            row = common.log_row(METRICS, COLUMNS, uploads, accuracy, message_bytes, message_bytes)
            run.save(row if args.icpl else row | {"loss_icpl": None}, received._asdict())
        received = ranks.broadcast(received)


if __name__ == "__main__":
    common.launch(main)
