"""ProxyFL: federated semi-supervised learning with the classifier's weight rows as proxies of the classes.

Paper: ProxyFL, CVPR 2026 (arXiv 2602.21078). Official code: DuowenC/FSSLlib, proxyfl.py at f732a27.

    python proxyfl.py                                   # embedded digits, a laptop CPU, minutes
    python proxyfl.py --dataset cifar10 --alpha 0.1     # the paper's setting

Expected: 96.1 +- 1.6 % on the digits (final round 30, seeds 1 to 3) in 90 s on two CPU cores, no GPU. The paper's scale
(88.56 % on CIFAR-10 at alpha 0.1 is the paper's figure): not run yet.

Each client owns a few labelled and many unlabelled images. A round (Algorithm 1):
  server   broadcasts the global model and a class prior;
  clients  train with FixMatch-style losses, taught by the frozen global model, plus Indecisive-Categories Proxy
           Learning (ICPL): an image of low confidence keeps a *set* of classes, those whose global probability exceeds
           the class prior, and is contrasted with a pool of proxies and features that share none of its classes;
  server   averages the models, then Global Proxy Tuning (GPT) fits the averaged proxies to all uploaded ones.

Letters in shapes: B labelled batch, U unlabelled batch, N = B + 2U rows (labelled, weak, strong), C classes,
D features, M clients of the round.

Where paper and released code differ: table DIFFS below. Beside it, since no value depends on it: our cross-entropy is
the code's KL to a one-hot target without its 1e-10; confidence passes at the threshold, as in the code (paper: above);
labelled batches are drawn with replacement, as the code's 2,000-fold list amounts to; the frozen model runs without a
graph; the code's flag for tuning epochs is ignored there: a fixed total by the rounds gives the presets' 100 and 10.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import common

# Values that depend on the data set; they fill flags that were not given. Paper: Sec. 6.1 and the official train.sh.
PAPER = dict(clients=20, clients_per_round=8, local_epochs=5, batch_size=128, mu=2, lr=0.1, momentum=0.9,
             weight_decay=1e-4, width=64, image_size=32, flip=True)
PRESETS = {
    "cifar10": PAPER | dict(rounds=300, gpt_epochs=100),
    "cifar100": PAPER | dict(rounds=500, gpt_epochs=10),
    "svhn": PAPER | dict(rounds=150, gpt_epochs=100, flip=False),          # DIFF-17: no mirrored digits
    "cinic10": PAPER | dict(rounds=400, gpt_epochs=100),
    "fashionmnist": PAPER | dict(rounds=150, gpt_epochs=100),              # not in the paper
    "folder": PAPER | dict(rounds=300, gpt_epochs=100),                    # not in the paper
    "digits": PAPER | dict(rounds=30, gpt_epochs=100, batch_size=16, width=16, image_size=8, flip=False),  # ours: quick
}
count, real = common.number(int, 0), common.number(float, 0)
# Where paper and released code differ; DIFF-n is the n-th row. flag: (values, paper, code, ours, what it is about).
# Ours None: --variant says which column is the default. Values None: a flag of common.py. Measured are --variant as a
# whole and DIFF-7; the effect of each other row alone is not.
DIFFS = {
    "gpt_contrast": (("locals", "globals"), "locals", "globals", None,
        "Eq. 2 lets all proxies of a client compete for one global proxy; the code all global ones for a client's"),
    "gpt_margin": (real, 0.0, 100.0, None,
        "upper bound of a constant that the code adds to the distance of the positive pair; not in Eq. 2"),
    "gpt_batch_size": (count, 0, 4, None,
        "Eq. 2 sums over all proxies, 0 (locals: always); the code averages over 4 (options.py: 10) at a time"),
    "confident": (("global", "union"), "global", "union", None,
        "whose confidence makes a pseudo-label trusted: the global model's, or that of either model"),
    "labelled_set": (("truth", "global"), "truth", "global", None,
        "class set of a labelled image: its label (Sec. 5.2.1), or by the global model as if it were unlabelled"),
    "positive_weights": (("local", "global"), "local", "global", None,
        "Eq. 6 weighs candidate proxies by local, the code by global probabilities"),
    "similarity": (("dot", "cosine", "projected"), "cosine", "projected", None,
        "Eq. 8's dot product stays at chance on the digits; cosine is the smallest change; the code also projects"),
    "negative_floor": (common.number(float, -2, 1), -2.0, 1e-6, None,
        "the code drops negatives whose similarity is not above this; -2 keeps all"),
    "icpl_mean": (("separate", "joint"), "separate", "joint", None,
        "Eq. 8 adds a mean over confident and one over unconfident images; the code takes one over all"),
    "empty_set": (("top1", "none"), "silent", "none", "top1",
        "no class above the prior: the code makes the image its own negative; we take its most probable class"),
    "prior_counts": (("clients", "pooled"), "clients", "pooled", None,
        "Eq. 5 averages the clients' proportions; the code pools their counts"),
    "prior_momentum": (common.number(float, 0, 1), 0.0, 0.99, None,
        "smoothing of the prior over rounds, from a uniform start; the paper gives no constant"),
    "lu_mean": (("confident", "batch"), "confident", "batch", None,
        "Eq. 9 divides by the number of confident images; the code (L320) by the whole unlabelled batch"),
    "shared_momentum": (bool, False, True, False,
        "one optimiser carries momentum from client to client and round to round, which no federation can"),
    "stats": (("dataset", "official"), "dataset", "official", "dataset",
        "the code normalises training images like CIFAR-10 whatever the data set, test images not"),
    "client_weight": (("images", "official"), "images", "official", "images",
        "the code counts each labelled image 2,000 times when it averages"),
    "flip": (None, "silent", True, "not digits",
        "the code mirrors digits (SVHN) as well"),
    "partition": (None, "dirichlet", "official", "official",
        "the code's Dirichlet draws are two-way, inside slices: common.official_shares"),
}
CIFAR10_MEAN, CIFAR10_STD, CIFAR10_TEST_STD = (.4914, .4822, .4465), (.2471, .2435, .2616), (.2023, .1994, .2010)


def parse_args(argv=None):
    parser = common.Parser("proxyfl", __doc__, PRESETS).add_semi_supervised_flags()
    add = parser.add_argument_group("ProxyFL (Sec. 3, 5)").add_argument
    add("--variant", choices=("paper", "official"), default="official", help="the default of the flags marked "
        "[variant], their paper's or their code's value [official: it measured better]")
    add("--conf-threshold", type=common.number(float, 0, 2), default=0.95, help="tau [0.95, paper]")
    add("--lambda-u", type=real, default=1.0, help="weight of the unlabelled loss, Eq. 9 [1, code]")
    add("--gpt", action=common.switch, default=True, help="global proxy tuning; off: averaged proxies (Table 2) [on]")
    add("--gpt-epochs", type=count, help="q, passes over the uploaded proxies (Fig. 7) [preset, paper 100 or 10]")
    add("--gpt-lr", type=real, default=0.005, help="[0.005, Sec. 6.1 and train.sh; options.py has 0.01]")
    add("--icpl", action=common.switch, default=True, help="indecisive-categories proxy learning (Table 2) [on]")
    add("--lambda-icpl", type=real, default=1.0, help="weight of its loss, Eq. 8 [1, code]")
    add("--candidate-set", choices=("prior", "top1", "top5"), default="prior",
        help="classes of an unconfident image: above the prior, or the first 1 or 5 (Table 4) [prior]")
    add = parser.add_argument_group("where paper and released code differ").add_argument
    for n, (name, (values, paper, code, ours, about)) in enumerate(DIFFS.items(), 1):
        if values:
            kind = {"choices": values} if isinstance(values, tuple) else {"type": values}
            add(f"--{name.replace('_', '-')}", default=ours, **({"action": common.switch} if values is bool else kind),
                help=f"DIFF-{n}: {about} [{'variant' if ours is None else ours}: paper {paper}, code {code}]")
    column = {"paper": 1, "official": 2}
    return parser.parse(argv, lambda args: {name: row[column[args.variant]] for name, row in DIFFS.items()
                                            if row[3] is None})


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


# Differs from baselines/fedavg.py: ResNet8, which has no heads
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


# ---- The paper's maths ----------------------------------------------------------------------------------------------

def confident_mask(global_prob, local_prob, conf_threshold, rule):
    """Sec. 3: images whose pseudo-label is trusted, (U,) bool."""
    confident = global_prob.amax(1) >= conf_threshold
    # DIFF-4 union: the global label is also trusted where the *local* model is confident.
    return confident | (local_prob.amax(1) >= conf_threshold) if rule == "union" else confident


# Differs from baselines/fixmatch.py: unlabelled_loss, which has the official divisor alone
def unlabelled_loss(strong_logits, pseudo_label, mask, mean_over):
    """Eq. 9: cross-entropy of the strong views (U, C) to the pseudo-labels (U,), where mask (U,) allows."""
    loss = (F.cross_entropy(strong_logits, pseudo_label, reduction="none") * mask).sum()
    # DIFF-13 Nothing confident: exactly 0 either way.
    return loss / (mask.sum().clamp(min=1) if mean_over == "confident" else len(mask))


def indecisive_set(global_prob, class_prior, kind="prior", empty_set="top1"):
    """Eq. 4: the classes that the global model hesitates between, one row per unlabelled image, (U, C) bool."""
    if kind != "prior":                                                    # Table 4: top1, top5
        top = global_prob.topk(int(kind.removeprefix("top"))).indices
        return torch.zeros_like(global_prob, dtype=torch.bool).scatter_(1, top, True)
    candidate = global_prob > class_prior                                  # (U, C) > (C,) -> (U, C)
    if empty_set == "top1":
        # DIFF-10 Probabilities equal to the prior exceed it nowhere: the image would have no positive.
        top1 = F.one_hot(global_prob.argmax(1), global_prob.shape[1]).bool()
        candidate = candidate | (top1 & ~candidate.any(1, keepdim=True))
    return candidate


def class_sets(global_prob, confident, class_prior, kind, empty_set):
    """xi of each image: its pseudo-label alone where that is trusted, else the indecisive set, (U, C) bool."""
    top1 = F.one_hot(global_prob.argmax(1), global_prob.shape[1]).bool()
    return torch.where(confident[:, None], top1, indecisive_set(global_prob, class_prior, kind, empty_set))


def positive_proxy(prob, confident, class_set, proxy):
    """Eq. 6: the proxy of a trusted pseudo-label, or those of the candidate classes weighted by probability.

    The weights are not scaled to sum to one.
    """
    weights = prob.masked_fill(confident[:, None], 1) * class_set          # (U, C)
    return weights @ proxy                                                 # (U, C) @ (C, D) -> (U, D)


def icpl_loss(features, class_set, positive, confident, negative_floor, mean_over):
    """Eqs. 7 and 8: each anchor is drawn to its positive proxy, away from all rows that share no class with it.

    features (N, D), class_set (N, C) bool. The last rows are the anchors: positive (2U, D), confident (2U,) bool. The
    B labelled rows before them serve as negatives alone. No temperature. An anchor without a negative has loss 0.
    """
    n_lab = len(features) - len(positive)
    anchor, sets = features[n_lab:], class_set.to(features.dtype)          # (2U, D), (N, C)
    disjoint = sets[n_lab:] @ sets.T == 0                                  # Eq. 7: negatives share no class, (2U, N)
    similarity = anchor @ features.T
    # DIFF-8 negative_floor
    similarity = similarity.masked_fill(~(disjoint & (similarity > negative_floor)), -math.inf)
    to_positive = (anchor * positive).sum(1, keepdim=True)                 # (2U, 1)
    loss = torch.cat([to_positive, similarity], 1).logsumexp(1) - to_positive[:, 0]
    # DIFF-9 separate: Eq. 8 adds the mean over confident anchors and the mean over the others.
    if mean_over == "joint":
        return loss.mean()
    return sum((loss * group).sum() / group.sum().clamp(min=1) for group in (confident, ~confident))


EXACT = "donot_use_mm_for_euclid_dist"  # of torch.cdist: close proxies do not cancel; the gradient at distance 0 is 0


def gpt_loss(global_proxy, proxy, target, margin, contrast):
    """Eq. 2: contrastive loss between the global proxies (C, D) and uploaded ones, by Euclidean distance.

    contrast "globals": proxy (n, D) are any uploaded proxies, target (n,) their classes; the global proxies compete;
    mean over rows. "locals": proxy (M, C, D) are whole classifiers; those of one client compete; Eq. 2's double sum.
    """
    # DIFF-1 contrast, DIFF-3 the size of the batches that come in
    if contrast == "globals":
        distance = torch.cdist(proxy, global_proxy, compute_mode=EXACT)    # (n, C)
        # DIFF-2 a constant on the distance of the positive pair
        return F.cross_entropy(-(distance + margin * F.one_hot(target, len(global_proxy))), target)
    clients, classes, _ = proxy.shape
    distance = torch.cdist(global_proxy, proxy, compute_mode=EXACT)        # (M, C global, C of the client)
    distance = distance + margin * torch.eye(classes, device=proxy.device)
    target = torch.arange(classes, device=proxy.device).repeat(clients)
    return F.cross_entropy(-distance.flatten(0, 1), target, reduction="sum")


def max_min_distance(proxy):
    """DIFF-2: the largest, over classes, of the distance from a proxy (C, D) to the nearest other one."""
    distance = torch.cdist(proxy, proxy, compute_mode=EXACT)
    return distance.fill_diagonal_(math.inf).amin(1).amax() if len(proxy) > 1 else distance.new_zeros(())


def tune_global_proxy(global_proxy, proxy, epochs, lr, batch_size, margin_cap, contrast, rng):
    """Global proxy tuning (Sec. 5.1): gradient steps on Eq. 2 from the averaged proxies.

    global_proxy (C, D), proxy (M, C, D). Returns the tuned (C, D) and the mean loss per uploaded proxy, before, after.
    """
    clients, classes, width = proxy.shape
    rows = proxy.reshape(-1, width)                                        # row m * C + c is class c of client m
    target = torch.arange(classes, device=proxy.device).repeat(clients)
    margin = max_min_distance(global_proxy).clamp(max=margin_cap)          # once, from the averaged proxies
    tuned = global_proxy.clone().requires_grad_()
    whole = (proxy, None) if contrast == "locals" else (rows, target)

    def mean_loss():
        with torch.no_grad():
            loss = gpt_loss(tuned, *whole, margin, contrast)
        return loss / len(rows) if contrast == "locals" else loss

    loss_start = mean_loss()
    for _ in range(epochs):
        if contrast == "locals":
            batches = [whole]
        elif batch_size in (0, len(rows)):
            batches = [(rows, target)]
        else:
            order = common.to_device(rng.permutation(len(rows)), proxy.device)
            batches = [(rows[index], target[index]) for index in order.split(batch_size)]
        for batch in batches:
            gradient, = torch.autograd.grad(gpt_loss(tuned, *batch, margin, contrast), tuned)
            tuned.data.sub_(gradient, alpha=lr)
    return tuned.detach(), loss_start, mean_loss()


def update_prior(class_prior, class_count, counts_of, momentum):
    """Eq. 5: the dynamic global class prior (C,) from the clients' class counts (M, C)."""
    class_count = class_count[class_count.sum(1) > 0].cpu().double()
    if not len(class_count):                                               # nobody counted anything: keep the prior
        return class_prior
    # DIFF-11 Eq. 5 averages proportions; pooled counts are normalised as they are.
    if counts_of == "clients":
        class_count = class_count / class_count.sum(1, keepdim=True)
    now = class_count.sum(0) / class_count.sum()
    # DIFF-12 smoothing
    return momentum * class_prior + (1 - momentum) * now


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

# Differs from baselines/fixmatch.py: Broadcast, whose prior is a plug-in
class Broadcast(NamedTuple):            # what the server sends to each client of a round (Algorithm 1)
    state: dict                         # Theta_G: encoder, classifier, heads
    class_prior: torch.Tensor           # P_G'(Y) of Eq. 5, (C,) float64 on the CPU; sent as float32


# Differs from baselines/fixmatch.py: Upload, whose class counts are a plug-in
class Upload(NamedTuple):               # what client m sends back
    state: dict                         # Theta_m; its classifier rows are the proxies omega_m
    class_count: torch.Tensor           # N_m of Eq. 5, (C,)
    weight: torch.Tensor                # images it trained on; 0 for a client without any
    metrics: torch.Tensor               # sums of METRICS over its steps; for the log alone, no part of the method


# Copied from baselines/fixmatch.py: Batch
class Batch(NamedTuple):                # one local step's images
    views: torch.Tensor                 # (B + 2U, 3, S, S) normalised: labelled, weak, strong
    label: torch.Tensor                 # (B,)
    place: torch.Tensor                 # (U,) places of the unlabelled images in the client's pool
    truth: torch.Tensor                 # (U,) true labels of the unlabelled images, for the log alone
    hidden: torch.Tensor                # (U,) bool: the client does not own that label


LOSSES = "loss_sup", "loss_unsup", "loss_icpl"
METRICS = ("steps", "sup_steps", *LOSSES, "images", "used", "correct", "used_correct", "low", "low_correct", "set_hit",
           "set_size")                                                     # sums over a client's steps, for the log
COLUMNS = {name: (name, "sup_steps" if name == "loss_sup" else "steps") for name in LOSSES} | common.PSEUDO_LABELS | {
    # images of low confidence: their single pseudo-label against their class set (Fig. 2b, Fig. 6)
    "low_pct": ("low", "images"), "low_acc_pct": ("low_correct", "low"), "set_recall_pct": ("set_hit", "low"),
    "set_size": ("set_size", "low")}


# Differs from baselines/fixmatch.py: client_update, which has no official momentum and weights
def client_update(args, rnd, client, data, received, net, teacher, optimizer):
    """Local training of one client (Algorithm 1, client side) from the broadcast model. Returns its Upload.

    net and teacher are this process's two networks: both are loaded with the broadcast state, net is trained.
    """
    device, classes = data.images.device, len(received.class_prior)
    class_prior = common.to_device(received.class_prior.float().numpy(), device)
    net.load_state_dict(received.state)
    teacher.load_state_dict(received.state)                                # copies: the teacher stays as it is
    net.train()
    teacher.eval()
    if not args.shared_momentum:                                           # DIFF-14
        optimizer.state.clear()
    class_count, metrics = torch.zeros(classes, device=device), torch.zeros(len(METRICS), device=device)
    for epoch, batch in local_batches(args, data, client, common.stream(args.seed, "client", rnd, client)):
        loss, counts, values = local_loss(args, net, teacher, batch.views, batch.label, class_prior)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch == args.local_epochs - 1:                                 # N_m: counts of the last epoch
            class_count += counts
        metrics += step_metrics(values, batch.truth, batch.hidden, len(batch.label) > 0)

    weight = len(data.pool(client))
    if args.client_weight == "official":                                  # DIFF-16
        weight += 2000 * len(data.labelled[client])
    return Upload({name: value.detach().clone() for name, value in net.state_dict().items()}, class_count,
                  torch.tensor(float(weight), dtype=torch.float64), metrics)


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


# Differs from baselines/fixmatch.py: local_loss, which has the released form of ICPL as a plug-in
def local_loss(args, net, teacher, views, label, class_prior):
    """The losses of one step, Eq. 10. views (B + 2U, 3, S, S): labelled, weak, strong; label (B,).

    Returns the total, the class counts of the step (C,), and a dict of what step_metrics wants to know.
    """
    n_lab, n_unl, classes = len(label), (len(views) - len(label)) // 2, len(class_prior)
    asked = 0 if args.icpl and args.labelled_set == "global" else n_lab    # DIFF-5 wants labelled rows too
    features, logits = forward(net, views, args.amp)
    with torch.no_grad():
        global_logits = forward(teacher, views[asked:n_lab + n_unl], args.amp)[1]
    lab_logits, weak_logits, strong_logits = logits.split([n_lab, n_unl, n_unl])
    local_prob = weak_logits.detach().softmax(1)                           # (U, C); no gradient through a teacher
    lab_global_prob, global_prob = global_logits.softmax(1).split([n_lab - asked, n_unl])

    loss_sup = F.cross_entropy(lab_logits, label) if n_lab else logits.new_zeros(())
    pseudo_label = global_prob.argmax(1)
    confident = confident_mask(global_prob, local_prob, args.conf_threshold, args.confident)
    loss_unsup = unlabelled_loss(strong_logits, pseudo_label, confident, args.lu_mean)
    loss, loss_icpl, unl_set = loss_sup + args.lambda_u * loss_unsup, logits.new_zeros(()), None

    if args.icpl:
        rule = class_prior, args.candidate_set, args.empty_set
        unl_set = class_sets(global_prob, confident, *rule)
        # DIFF-5 the paper gives labelled images their true class; the official code treats them as if unlabelled.
        if args.labelled_set == "truth":
            lab_set = F.one_hot(label, classes).bool()
        else:
            lab_set = class_sets(lab_global_prob, lab_global_prob.amax(1) >= args.conf_threshold, *rule)
        # DIFF-7 dot: as printed in Eq. 8; cosine: at unit length; projected: by two learned maps, then at unit length.
        proxy = net.classifier.weight                                      # omega_m, (C, D)
        if args.similarity == "projected":
            features, proxy = net.feat_proj(features), net.proxy_proj(proxy)
        if args.similarity != "dot":
            features, proxy = F.normalize(features), F.normalize(proxy)
        # DIFF-6 whose probabilities weigh the candidates
        prob = local_prob if args.positive_weights == "local" else global_prob
        positive = positive_proxy(prob, confident, unl_set, proxy)
        # Both views of an image share class set and positive.
        loss_icpl = icpl_loss(features, torch.cat([lab_set, unl_set, unl_set]), positive.repeat(2, 1),
                              confident.repeat(2), args.negative_floor, args.icpl_mean)
        loss = loss + args.lambda_icpl * loss_icpl

    counts = F.one_hot(label, classes).sum(0) + (F.one_hot(pseudo_label, classes) * confident[:, None]).sum(0)
    return loss, counts, dict(loss_sup=loss_sup, loss_unsup=loss_unsup, loss_icpl=loss_icpl, pseudo_label=pseudo_label,
                              confident=confident, class_set=unl_set)


# Differs from baselines/fixmatch.py: step_metrics, which does not look at class sets
def step_metrics(values, truth, hidden, has_labelled):
    """The METRICS of one step (len(METRICS),). hidden (U,): images whose label the client does not own."""
    right = (values["pseudo_label"] == truth) & hidden
    used, low = values["confident"] & hidden, ~values["confident"] & hidden
    hit = size = torch.zeros_like(right)
    if values["class_set"] is not None:
        hit, size = values["class_set"].gather(1, truth[:, None])[:, 0] & low, values["class_set"].sum(1) * low
    sums = [torch.ones_like(right[0]), torch.full_like(right[0], has_labelled),
            values["loss_sup"], values["loss_unsup"], values["loss_icpl"]]
    sums += [part.sum() for part in (hidden, used, right, right & used, low, right & low, hit, size)]
    return torch.stack([value.detach().float() for value in sums])


# Differs from baselines/fixmatch.py: server_update, whose proxy tuning and prior are plug-ins
def server_update(args, rnd, received, uploads):
    """Averaging, global proxy tuning, the prior (Algorithm 1, server side).

    Returns the new Broadcast and GPT's losses before and after, for the log: None where it did not run.
    """
    losses = {"loss_gpt_start": None, "loss_gpt_end": None}
    uploads = [upload for upload in uploads if upload.weight > 0]
    if not uploads:                                                        # every client of the round is empty
        return received, losses
    state = average([upload.state for upload in uploads], torch.stack([upload.weight for upload in uploads]))
    if args.gpt:
        proxy = torch.stack([upload.state["classifier.weight"] for upload in uploads])      # (M, C, D)
        state["classifier.weight"], *start_end = tune_global_proxy(
            state["classifier.weight"], proxy, args.gpt_epochs, args.gpt_lr, args.gpt_batch_size, args.gpt_margin,
            args.gpt_contrast, common.stream(args.seed, "gpt", rnd))       # the bias stays averaged
        losses = {name: loss.item() for name, loss in zip(losses, start_end)}
    class_count = torch.stack([upload.class_count for upload in uploads])
    class_prior = update_prior(received.class_prior, class_count, args.prior_counts, args.prior_momentum)
    return Broadcast(state, class_prior), losses


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
    if args.shared_momentum and ranks.world > 1:
        raise common.UserError(f"--shared-momentum trains one client after another: not with {ranks.world} ranks")
    run = common.Run(args, ranks)
    data = ranks.first_then_others(lambda: common.semi_supervised_data(args, ranks.device))
    classes, test_stats = len(data.class_names), data.stats
    if args.icpl and args.candidate_set == "top5" and classes < 5:
        raise common.UserError(f"--candidate-set top5: the data set has {classes} classes")
    if args.stats == "official":                                           # DIFF-15
        data = data._replace(stats=(CIFAR10_MEAN, CIFAR10_STD))
        test_stats = (CIFAR10_MEAN, CIFAR10_TEST_STD) if args.dataset == "cifar10" else test_stats

    torch.manual_seed(common.stream(args.seed, "init").integers(2**31))
    heads = args.icpl and args.similarity == "projected"
    net, teacher = (ResNet8(classes, args.width, heads).to(ranks.device, memory_format=torch.channels_last)
                    for _ in range(2))
    if args.compile:
        net.compile()
        teacher.compile()
    optimizer = torch.optim.SGD(net.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    received = run.restore(Broadcast({name: value.clone() for name, value in net.state_dict().items()},
                                     torch.full((classes,), 1 / classes, dtype=torch.float64)))
    if run.checkpoint and args.shared_momentum:                            # DIFF-14
        optimizer.load_state_dict(run.checkpoint["optimizer"])
    # One message, either way: the state; where the prior is in use, the prior down and the class counts up.
    message_bytes = sum(value.numel() * value.element_size() for value in received.state.values())
    message_bytes += 4 * classes if args.icpl and args.candidate_set == "prior" else 0
    absent = {} if args.icpl else dict.fromkeys(("loss_icpl", "set_recall_pct", "set_size"))

    run.start(data.class_names, data.owned(), **data.facts)
    for rnd in run.rounds():                                               # Algorithm 1
        sampling = common.stream(args.seed, "sampling", rnd)
        selected = sampling.choice(args.clients, args.clients_per_round, replace=False)
        uploads = ranks.gather([client_update(args, rnd, client, data, received, net, teacher, optimizer)
                                for client in ranks.mine(selected)], len(selected))
        if ranks.first:
            received, gpt_losses = server_update(args, rnd, received, uploads)
            accuracy = evaluate(net, received.state, data.test_images, data.test_labels, test_stats, args.amp)
            row = common.log_row(METRICS, COLUMNS, uploads, accuracy, message_bytes, message_bytes)
            momentum = {"optimizer": optimizer.state_dict()} if args.shared_momentum else {}
            run.save(row | absent | gpt_losses, received._asdict() | momentum)
        received = ranks.broadcast(received)


if __name__ == "__main__":
    common.launch(main)
