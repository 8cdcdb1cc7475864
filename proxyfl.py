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

Where paper and official code differ. `--variant` picks a column of VARIANTS; each flag can also be set alone. Measured
(README, "Paper or official"): the two columns as wholes, and DIFF-7. The effect of each other flag alone: not measured.
  DIFF-1   --gpt-contrast      Eq. 2 lets all proxies of a client compete for one global proxy; the code lets all
                               global proxies compete for one client proxy
  DIFF-2   --gpt-margin        the code adds a constant to the distance of the positive pair; not in Eq. 2
  DIFF-3   --gpt-batch-size    Eq. 2 sums over all clients and classes (so does "locals", always); the code takes the
                               mean over batches of 4
  DIFF-4   --confident         paper: the global model is confident; code: the local or the global one is
  DIFF-5   --labelled-set      class set of a labelled image: ground truth (Sec. 5.2.1), or the global model's (code)
  DIFF-6   --positive-weights  Eq. 6 weighs candidate proxies by local, the code by global probabilities
  DIFF-7   --similarity        Eq. 8 is a dot product, which stays at chance on the digits ("dot"); the paper variant
                               scales to unit length, the smallest change that trains; the code also projects before
  DIFF-8   --negative-floor    the code drops negatives whose similarity is not above 1e-6
  DIFF-9   --icpl-mean         Eq. 8 adds a mean over confident and one over unconfident images; the code takes one
  DIFF-10  --empty-set         no class above the prior: the code makes the image its own negative; we take top-1
  DIFF-11  --prior-counts      Eq. 5 averages the clients' proportions; the code pools their counts
  DIFF-12  --prior-momentum    the code smooths the prior with 0.99 from a uniform start; the paper gives no constant
  DIFF-13  --lu-mean           Eq. 9 divides by the number of confident images; the code by the batch
  DIFF-14  --shared-momentum   the code's one optimiser carries momentum from client to client and round to round
  DIFF-15  --stats             the code normalises training images like CIFAR-10 whatever the data set, test images not
  DIFF-16  --client-weight     the code counts each labelled image 2,000 times when it averages
  DIFF-17  --flip              the code mirrors digits (SVHN) as well; we do not
  DIFF-18  --partition         the code's Dirichlet draws are two-way, inside slices (common.py: official_shares)
Without a flag, since no value depends on it: our cross-entropy is the code's KL to a one-hot target without its 1e-10;
confidence passes at the threshold, as in the code (paper: above it); labelled batches are drawn with replacement,
as the code's 2,000-fold list amounts to; the frozen model runs without a graph; the code ignores its flag for tuning
epochs and divides a fixed total by the rounds, which gives the 100 and 10 of the presets.
"""

import math
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import common

# Values that depend on the data set; they fill flags that were not given. Paper: Sec. 6.1 and the official train.sh.
PAPER = dict(clients=20, clients_per_round=8, local_epochs=5, batch_size=128, mu=2, lr=0.1, width=64, image_size=32,
             flip=True)
PRESETS = {
    "cifar10": PAPER | dict(rounds=300, gpt_epochs=100),
    "cifar100": PAPER | dict(rounds=500, gpt_epochs=10),
    "svhn": PAPER | dict(rounds=150, gpt_epochs=100, flip=False),          # DIFF-17: no mirrored digits
    "cinic10": PAPER | dict(rounds=400, gpt_epochs=100),
    "fashionmnist": PAPER | dict(rounds=150, gpt_epochs=100),              # not in the paper
    "folder": PAPER | dict(rounds=300, gpt_epochs=100),                    # not in the paper
    "digits": PAPER | dict(rounds=30, gpt_epochs=100, batch_size=16, width=16, image_size=8, flip=False),  # ours: quick
}
VARIANTS = {                            # flag: (the paper's equations, the released code), for the method's own choices
    "gpt_contrast": ("locals", "globals"),
    "gpt_margin": (0.0, 100.0),
    "gpt_batch_size": (0, 4),
    "confident": ("global", "union"),
    "labelled_set": ("truth", "global"),
    "positive_weights": ("local", "global"),
    "similarity": ("cosine", "projected"),
    "negative_floor": (-2.0, 1e-6),
    "icpl_mean": ("separate", "joint"),
    "prior_counts": ("clients", "pooled"),
    "prior_momentum": (0.0, 0.99),
    "lu_mean": ("confident", "batch"),
}
CIFAR10_MEAN, CIFAR10_STD, CIFAR10_TEST_STD = (.4914, .4822, .4465), (.2471, .2435, .2616), (.2023, .1994, .2010)


def parse_args(argv=None):
    presets = "; ".join(f"{name}: " + ", ".join(f"{key} {value}" for key, value in preset.items())
                        for name, preset in PRESETS.items())
    variants = "; ".join(f"{name} {paper}, {official}" for name, (paper, official) in VARIANTS.items())
    parser = common.Parser(prog="proxyfl.py", description=__doc__.split("\n\n")[0],
                           epilog="In brackets: the default and its source. [preset] goes by data set: "
                                  f"{presets}. [variant] goes by --variant, paper or official: {variants}.")
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
    run.add_argument("--run-name", default=None, help="the run folder [proxyfl_<dataset>_a<alpha>_s<seed>]")
    run.add_argument("--resume", action="store_true", help="continue the run in its folder; --rounds may grow")
    run.add_argument("--overwrite", action="store_true", help="replace an existing run folder")
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", type=lambda text: common.dataset_name(text, PRESETS), default="digits",
                      help=", ".join(PRESETS) + " [digits]")
    data.add_argument("--data-dir", default="data", help="where data sets are; what is missing is downloaded [data]")
    data.add_argument("--train-subset", type=number(int, 1), default=None,
                      help="class-balanced subset of N training images, for quick runs [all]")
    data.add_argument("--image-size", type=number(int, 8, 1024), default=None,
                      help="side in pixels, a multiple of 4 [preset, paper 32]")
    data.add_argument("--flip", action=switch, default=None, help="mirror images at random, DIFF-17 [preset]")
    data.add_argument("--stats", choices=("dataset", "official"), default="dataset",
                      help="normalise by the training images' mean and deviation, or as the code, DIFF-15 [dataset]")
    fed = parser.add_argument_group("federation")
    fed.add_argument("--alpha", type=common.concentration, default=0.1,
                     help="Dirichlet concentration: smaller is more skewed, inf is i.i.d. [0.1; paper 0.1, 0.5, 1]")
    fed.add_argument("--partition", choices=("official", "dirichlet"), default="official",
                     help="the published protocol, or a textbook draw over all clients, DIFF-18 [official]")
    fed.add_argument("--label-ratio", type=number(float, 0, 1, open_low=True), default=0.1,
                     help="labelled share of each class; of 4,600 a class for SVHN, as the code [0.1; Table 6: 0.2]")
    fed.add_argument("--clients", type=number(int, 1), default=None, help="K [preset, paper 20]")
    fed.add_argument("--clients-per-round", type=number(int, 1), default=None, help="M [preset, paper 8]")
    fed.add_argument("--rounds", type=number(int, 1), default=None, help="[preset, paper 300, 500, 150, 400]")
    fed.add_argument("--local-epochs", type=number(int, 1), default=None,
                     help="of floor(pool / batch size) steps: about --mu passes over the pool each [preset, paper 5]")
    fed.add_argument("--client-weight", choices=("images", "official"), default="images",
                     help="in the average: a client's images, or 2000 x labelled + images, DIFF-16 [images]")
    opt = parser.add_argument_group("optimiser (SGD, no schedule)")
    opt.add_argument("--batch-size", type=number(int, 1), default=None, help="B, labelled images [preset, paper 128]")
    opt.add_argument("--mu", type=number(int, 1), default=None, help="U = mu * B unlabelled images [preset, paper 2]")
    opt.add_argument("--lr", type=number(float, 0), default=None, help="[preset, paper 0.1]")
    opt.add_argument("--momentum", type=number(float, 0, 1), default=0.9, help="[0.9, official train.sh]")
    opt.add_argument("--weight-decay", type=number(float, 0), default=1e-4, help="[1e-4, official train.sh]")
    opt.add_argument("--shared-momentum", action=switch, default=False,
                     help="keep momentum across clients and rounds, which no real federation can, DIFF-14 [off]")
    opt.add_argument("--width", type=number(int, 8), default=None,
                     help="channels of ResNet-8's first stage; below 8 oneDNN's channels-last kernels break memory on "
                          "CPUs without AVX-512 (torch 2.14.1) [preset, paper 64]")
    ssl = parser.add_argument_group("pseudo-labels (Sec. 3)")
    ssl.add_argument("--conf-threshold", type=number(float, 0, 2), default=0.95,
                     help="tau; above 1 nothing passes [0.95, paper]")
    ssl.add_argument("--lambda-u", type=number(float, 0), default=1.0, help="weight of the unlabelled loss [1, code]")
    ssl.add_argument("--lu-mean", choices=("confident", "batch"), default=None,
                     help="divisor of Eq. 9, DIFF-13 [variant]")
    ssl.add_argument("--confident", choices=("global", "union"), default=None,
                     help="whose confidence counts, DIFF-4 [variant]")
    method = parser.add_argument_group("ProxyFL (Sec. 5)")
    method.add_argument("--variant", choices=("paper", "official"), default="official",
                        help="which column of VARIANTS [official: it measured better, see the README]")
    method.add_argument("--gpt", action=switch, default=True,
                        help="global proxy tuning (Table 2); off averages the proxies [on]")
    method.add_argument("--gpt-epochs", type=number(int, 0), default=None,
                        help="q, passes over the uploaded proxies (Fig. 7) [preset, paper 100 or 10]")
    method.add_argument("--gpt-lr", type=number(float, 0), default=0.005,
                        help="[0.005, Sec. 6.1 and train.sh; options.py has 0.01]")
    method.add_argument("--gpt-contrast", choices=("locals", "globals"), default=None,
                        help="which proxies compete in Eq. 2, DIFF-1 [variant]")
    method.add_argument("--gpt-margin", type=number(float, 0), default=None,
                        help="upper bound of the margin, 0 for none, DIFF-2 [variant]")
    method.add_argument("--gpt-batch-size", type=number(int, 0), default=None,
                        help="proxies a step, 0 for all; for globals, DIFF-3 [variant; train.sh 4, options.py 10]")
    method.add_argument("--icpl", action=switch, default=True,
                        help="indecisive-categories proxy learning (Table 2) [on]")
    method.add_argument("--lambda-icpl", type=number(float, 0), default=1.0, help="weight of its loss [1, code]")
    method.add_argument("--candidate-set", choices=("prior", "top1", "top5"), default="prior",
                        help="classes of an unconfident image: above the prior, or the first 1 or 5 (Table 4) [prior]")
    method.add_argument("--empty-set", choices=("top1", "none"), default="top1",
                        help="if no class is above the prior, DIFF-10 [top1; code none]")
    method.add_argument("--labelled-set", choices=("truth", "global"), default=None,
                        help="class set of a labelled image, DIFF-5 [variant]")
    method.add_argument("--positive-weights", choices=("local", "global"), default=None,
                        help="probabilities in Eq. 6, DIFF-6 [variant]")
    method.add_argument("--similarity", choices=("dot", "cosine", "projected"), default=None,
                        help="in Eq. 8: as printed; unit length; projected, then unit length, DIFF-7 [variant]")
    method.add_argument("--negative-floor", type=number(float, -2, 1), default=None,
                        help="negatives with a similarity up to this drop out, -2 keeps all, DIFF-8 [variant]")
    method.add_argument("--icpl-mean", choices=("separate", "joint"), default=None,
                        help="averages of Eq. 8, DIFF-9 [variant]")
    method.add_argument("--prior-counts", choices=("clients", "pooled"), default=None,
                        help="in Eq. 5: mean of the clients' proportions, or pooled counts, DIFF-11 [variant]")
    method.add_argument("--prior-momentum", type=number(float, 0, 1), default=None,
                        help="smoothing of the prior over rounds, DIFF-12 [variant]")
    args = parser.parse_args(argv)

    if args.clients_per_round is None and args.clients is not None:
        args.clients_per_round = min(args.clients, PRESETS[args.dataset]["clients_per_round"])
    column = ("paper", "official").index(args.variant)
    for name, value in (PRESETS[args.dataset] | {key: pair[column] for key, pair in VARIANTS.items()}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.run_name = args.run_name or f"proxyfl_{args.dataset}_a{args.alpha:g}_s{args.seed}"
    if args.clients_per_round > args.clients:
        parser.error(f"--clients-per-round {args.clients_per_round} is more than --clients {args.clients}")
    if args.image_size % 4:
        parser.error(f"--image-size {args.image_size} is not a multiple of 4")
    return args


# ---------------------------------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------------------------------

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


# ---------------------------------------------------------------------------------------------------------------
# The paper's maths
# ---------------------------------------------------------------------------------------------------------------

def confident_mask(global_prob, local_prob, conf_threshold, rule):
    """Sec. 3: images whose pseudo-label is trusted, (U,) bool."""
    confident = global_prob.amax(1) >= conf_threshold
    # DIFF-4 paper: global confidence alone; the official code also trusts the global label where the *local* model is
    # confident. Default: official; --confident global gives the paper's.
    return confident | (local_prob.amax(1) >= conf_threshold) if rule == "union" else confident


# Differs from baselines/fixmatch.py: unlabelled_loss, which has the official divisor alone
def unlabelled_loss(strong_logits, pseudo_label, mask, mean_over):
    """Eq. 9: cross-entropy of the strong views (U, C) to the pseudo-labels (U,), where mask (U,) allows."""
    loss = (F.cross_entropy(strong_logits, pseudo_label, reduction="none") * mask).sum()
    # DIFF-13 Eq. 9 divides by the number of confident images; the official code (L320) by the whole unlabelled batch.
    # Default: official; --lu-mean confident gives Eq. 9. Nothing confident: exactly 0 either way.
    return loss / (mask.sum().clamp(min=1) if mean_over == "confident" else len(mask))


def indecisive_set(global_prob, class_prior, kind="prior", empty_set="top1"):
    """Eq. 4: the classes that the global model hesitates between, one row per unlabelled image, (U, C) bool."""
    if kind != "prior":                                                    # Table 4: top1, top5
        top = global_prob.topk(int(kind.removeprefix("top"))).indices
        return torch.zeros_like(global_prob, dtype=torch.bool).scatter_(1, top, True)
    candidate = global_prob > class_prior                                  # (U, C) > (C,) -> (U, C)
    if empty_set == "top1":
        # DIFF-10 Probabilities equal to the prior exceed it nowhere. The official code then has no positive and makes
        # the image its own negative; the paper is silent. Default: the most probable class; --empty-set none: official.
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
    # DIFF-8 the official code leaves out negatives whose similarity is not above 1e-6; --negative-floor -2 keeps all.
    similarity = similarity.masked_fill(~(disjoint & (similarity > negative_floor)), -math.inf)
    to_positive = (anchor * positive).sum(1, keepdim=True)                 # (2U, 1)
    loss = torch.cat([to_positive, similarity], 1).logsumexp(1) - to_positive[:, 0]
    # DIFF-9 Eq. 8 adds the mean over confident anchors and the mean over the others; the official code takes one mean
    # over all. Default: official; --icpl-mean separate gives Eq. 8.
    if mean_over == "joint":
        return loss.mean()
    return sum((loss * group).sum() / group.sum().clamp(min=1) for group in (confident, ~confident))


EXACT = "donot_use_mm_for_euclid_dist"  # of torch.cdist: close proxies do not cancel; the gradient at distance 0 is 0


def gpt_loss(global_proxy, proxy, target, margin, contrast):
    """Eq. 2: contrastive loss between the global proxies (C, D) and uploaded ones, by Euclidean distance.

    contrast "globals": proxy (n, D) are any uploaded proxies, target (n,) their classes; the global proxies compete;
    mean over rows. "locals": proxy (M, C, D) are whole classifiers; those of one client compete; Eq. 2's double sum.
    """
    # DIFF-1, DIFF-3: see the flags --gpt-contrast and --gpt-batch-size.
    if contrast == "globals":
        distance = torch.cdist(proxy, global_proxy, compute_mode=EXACT)    # (n, C)
        # DIFF-2 the official code adds a constant to the distance of the positive pair.
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
    # DIFF-11 Eq. 5 averages the clients' proportions; the official code normalises the pooled counts.
    if counts_of == "clients":
        class_count = class_count / class_count.sum(1, keepdim=True)
    now = class_count.sum(0) / class_count.sum()
    # DIFF-12 the official code smooths with 0.99; the paper states no smoothing (momentum 0).
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


# ---------------------------------------------------------------------------------------------------------------
# Client, server, evaluation
# ---------------------------------------------------------------------------------------------------------------

# Differs from baselines/fixmatch.py: Broadcast, whose prior is a plug-in
class Broadcast(NamedTuple):            # what the server sends to each client of a round (Algorithm 1)
    state: dict                         # Theta_G: encoder, classifier, heads
    class_prior: torch.Tensor           # P_G'(Y) of Eq. 5, (C,) float64 on the CPU; sent as float32


# Differs from baselines/fedavg.py: FederatedData, which has no test statistics of their own
class FederatedData(NamedTuple):        # all clients' data; a client reads its own part
    images: torch.Tensor                # (n, 3, S, S) uint8 on the device
    labels: torch.Tensor                # (n,) true labels; those of unlabelled images reach the log alone
    labelled: list                      # one index array a client
    unlabelled: list
    stats: tuple                        # mean and deviation of each channel of the training images, in 0..1
    test_stats: tuple                   # the same but for DIFF-15

    def pool(self, client):
        """Indices of the images that the client uses without labels: its labelled ones come last."""
        return np.concatenate([self.unlabelled[client], self.labelled[client]])


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


METRICS = ("steps", "sup_steps", "loss_sup", "loss_unsup", "loss_icpl", "images", "used", "correct", "used_correct",
           "low", "low_correct", "set_hit", "set_size")


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
        # DIFF-7 Eq. 8 has plain dot products; the official code projects both sides and scales them to unit length.
        # Default: official. --similarity dot gives Eq. 8 (at chance on the digits), cosine the paper variant.
        proxy = net.classifier.weight                                      # omega_m, (C, D)
        if args.similarity == "projected":
            features, proxy = net.feat_proj(features), net.proxy_proj(proxy)
        if args.similarity != "dot":
            features, proxy = F.normalize(features), F.normalize(proxy)
        # DIFF-6 Eq. 6 weighs by the local, the official code by the global probabilities.
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

    Returns the new Broadcast and GPT's losses before and after, None where it did not run.
    """
    uploads = [upload for upload in uploads if upload.weight > 0]
    if not uploads:                                                        # every client of the round is empty
        return received, (None, None)
    state = average([upload.state for upload in uploads], torch.stack([upload.weight for upload in uploads]))
    losses = (None, None)
    if args.gpt:
        proxy = torch.stack([upload.state["classifier.weight"] for upload in uploads])      # (M, C, D)
        state["classifier.weight"], *losses = tune_global_proxy(
            state["classifier.weight"], proxy, args.gpt_epochs, args.gpt_lr, args.gpt_batch_size, args.gpt_margin,
            args.gpt_contrast, common.stream(args.seed, "gpt", rnd))       # the bias stays averaged
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


# ---------------------------------------------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------------------------------------------

# Differs from baselines/fedavg.py: prepare_data, which has one pair of statistics
def prepare_data(args, device):
    """Load, split and place the data: FederatedData, test images, test labels, class names, facts for config.json."""
    source = common.load_dataset(args.dataset, args.data_dir, args.image_size, args.train_subset)
    labels = source.train_labels.numpy()
    per_class = np.bincount(labels, minlength=len(source.class_names))
    if args.dataset == "svhn" and per_class.min() >= 4600:
        per_class = np.full_like(per_class, 4600)                          # official: "10 %" is 460 of each class
    per_class = np.maximum(1, np.round(args.label_ratio * per_class).astype(int))
    # DIFF-18 the paper says Dirichlet; the code draws two-way, inside slices. --partition dirichlet: over all clients.
    parts = common.partition(labels, args.clients, args.alpha, per_class, args.partition, args.split_seed)
    train_stats = test_stats = common.channel_stats(source.train_images)
    if args.stats == "official":                                           # DIFF-15
        train_stats = CIFAR10_MEAN, CIFAR10_STD
        test_stats = (CIFAR10_MEAN, CIFAR10_TEST_STD) if args.dataset == "cifar10" else test_stats
    train_images, train_labels, test_images, test_labels = (part.to(device) for part in source[:4])
    data = FederatedData(train_images, train_labels, *parts, train_stats, test_stats)
    facts = {"data_source": source.source, "data_fingerprint": common.fingerprint(source)}
    return data, test_images, test_labels, source.class_names, facts


def main(argv=None):
    args = parse_args(argv)
    world = common.rank_and_world()[1]
    if args.shared_momentum and world > 1:
        raise common.UserError(f"--shared-momentum trains one client after another: not with {world} ranks")
    ranks = common.Ranks(args.device)
    device = ranks.device
    args.amp = device.type == "cuda" if args.amp is None else args.amp
    run = common.RunFolder(args.out_dir, args.run_name, vars(args), args.resume, args.overwrite, writer=ranks.first)
    checkpoint = run.load_checkpoint()
    data, test_images, test_labels, class_names, facts = ranks.first_then_others(lambda: prepare_data(args, device))
    classes = len(class_names)
    if args.icpl and args.candidate_set == "top5" and classes < 5:
        raise common.UserError(f"--candidate-set top5: the data set has {classes} classes")
    labels = data.labels.cpu().numpy()
    table = common.client_table(class_names, labelled=(labels, data.labelled), unlabelled=(labels, data.unlabelled))

    torch.manual_seed(common.stream(args.seed, "init").integers(2**31))
    heads = args.icpl and args.similarity == "projected"
    net, teacher = (ResNet8(classes, args.width, heads).to(device, memory_format=torch.channels_last) for _ in range(2))
    if args.compile:
        net.compile()
        teacher.compile()
    optimizer = torch.optim.SGD(net.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    received = Broadcast({name: value.detach().clone() for name, value in net.state_dict().items()},
                         torch.full((classes,), 1 / classes, dtype=torch.float64))
    if checkpoint:
        state = {name: value.to(device) for name, value in checkpoint["state"].items()}
        received = Broadcast(state, checkpoint["class_prior"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    # One message, either way: the state; where the prior is in use, the prior down and the class counts up.
    message_bytes = sum(value.numel() * value.element_size() for value in received.state.values())
    message_bytes += 4 * classes if args.icpl and args.candidate_set == "prior" else 0

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
            sampling = common.stream(args.seed, "sampling", rnd)
            selected = sampling.choice(args.clients, args.clients_per_round, replace=False)
            uploads = ranks.gather([client_update(args, rnd, client, data, received, net, teacher, optimizer)
                                    for client in ranks.mine(selected)], len(selected))
            if ranks.first:
                received, gpt_losses = server_update(args, rnd, received, uploads)
                accuracy = evaluate(net, received.state, test_images, test_labels, data.test_stats, args.amp)
                seconds = time.perf_counter() - start
                row = round_row(rnd, accuracy, uploads, gpt_losses, message_bytes, args.icpl, seconds)
                check_finite(row, received)
                momentum = optimizer.state_dict()
                if not args.shared_momentum:                               # of no use to the next client, see DIFF-14
                    momentum["state"] = {}
                run.save_round(row, received._asdict() | {"optimizer": momentum})
                tqdm.write(round_line(row, args.rounds))
            received = ranks.broadcast(received)
        run.plot({"accuracy (%)": ["test_acc_pct"],
                  "pseudo-labels (%)": ["pl_used_pct", "pl_acc_pct", "pl_used_acc_pct", "set_recall_pct"],
                  "losses": ["loss_sup", "loss_unsup", "loss_icpl", "loss_gpt_start", "loss_gpt_end"]})
    if ranks.first:
        run.print_summary()


# Differs from baselines/fixmatch.py: round_row, which has no column on class sets and proxy tuning
def round_row(rnd, accuracy, uploads, gpt_losses, message_bytes, icpl, seconds):
    """One row of rounds.csv; None where a value does not exist in this round."""
    total = dict(zip(METRICS, torch.stack([upload.metrics for upload in uploads]).cpu().double().sum(0).tolist()))
    trained = sum(bool(upload.weight > 0) for upload in uploads)
    gpt_start, gpt_end = (None if loss is None else loss.item() for loss in gpt_losses)

    def ratio(part, whole, scale=1.0):
        return scale * total[part] / total[whole] if total[whole] else None

    return {
        "round": rnd, "test_acc_pct": accuracy,
        "loss_sup": ratio("loss_sup", "sup_steps"), "loss_unsup": ratio("loss_unsup", "steps"),
        "loss_icpl": ratio("loss_icpl", "steps") if icpl else None,
        "loss_gpt_start": gpt_start, "loss_gpt_end": gpt_end,
        "pl_used_pct": ratio("used", "images", 100), "pl_acc_pct": ratio("correct", "images", 100),
        "pl_used_acc_pct": ratio("used_correct", "used", 100),
        # images of low confidence: their single pseudo-label against their class set (Fig. 2b, Fig. 6)
        "low_pct": ratio("low", "images", 100), "low_acc_pct": ratio("low_correct", "low", 100),
        "set_recall_pct": ratio("set_hit", "low", 100) if icpl else None,
        "set_size": ratio("set_size", "low") if icpl else None,
        "clients_trained": trained, "clients_empty": len(uploads) - trained,
        "bytes_up": message_bytes * trained, "bytes_down": message_bytes * trained, "seconds": seconds}


# Copied from baselines/fedavg.py: check_finite
def check_finite(row, received):
    """Stop before anything that is not a number is written or sent on."""
    broken = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    broken += [name for name, value in received.state.items() if not value.isfinite().all()]
    if broken:
        raise common.Diverged(f"training diverged in round {row['round']}: {broken[0]} is not finite; try a lower --lr")


# Differs from baselines/fixmatch.py: round_line, which says nothing of class sets
def round_line(row, rounds):
    """What the screen shows of a round."""
    shown = {key: "n/a" if value is None else f"{value:.3g}" for key, value in row.items()}
    parts = [f"round {row['round']}/{rounds}", f"acc {row['test_acc_pct']:.2f}",
             " ".join(f"{key} {shown[key]}" for key in ("loss_sup", "loss_unsup", "loss_icpl") if row[key] is not None),
             f"pseudo used {shown['pl_used_pct']}% right {shown['pl_used_acc_pct']}%"]
    if row["set_size"] is not None:
        parts.append(f"sets hold {shown['set_recall_pct']}% of the other {shown['low_pct']}%, size {shown['set_size']}")
    if row["clients_empty"]:
        parts.append(f"{row['clients_empty']} clients without images skipped")
    return " | ".join([*parts, f"{row['seconds']:.1f} s"])


if __name__ == "__main__":
    common.launch(main)
