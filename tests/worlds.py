"""Tiny clients, networks and settings: what the functions of a semi-supervised script are called with."""

import inspect
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from scripts import method as find_method

import common

STATS = (0.5,) * 3, (0.3,) * 3


def tiny_args(name, *flags, **settings):
    """The short settings of a script with batches of 8; flags as on the command line, or by name."""
    method = find_method(name)
    named = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    args = method.module.parse_args([*method.short, "--batch-size=8", *map(str, flags), *named])
    args.amp = False
    return args


def cut(order, sizes):
    """Hand out the indices to clients of (labelled, unlabelled) sizes: labelled and unlabelled parts, one a client."""
    ends = np.cumsum(np.reshape(sizes, -1))
    parts = np.split(order[:ends[-1]], ends[:-1])
    return parts[::2], parts[1::2]


def tiny_data(*sizes, classes=4):
    """FederatedData of random 8x8 images, for clients of (labelled, unlabelled) sizes; nobody owns the last class."""
    rng, total = np.random.default_rng(0), int(np.sum(sizes))
    order = rng.permutation(total)
    images = torch.from_numpy(rng.integers(0, 256, (max(1, total), 3, 8, 8), dtype=np.uint8))  # never none, as in a run
    labels = torch.from_numpy(rng.integers(0, classes - 1, len(images)))
    return common.FederatedData(images, labels, *cut(order, sizes), STATS, None, None, list("abcd"), {})


def numbered_data(*sizes):
    """The same, but an image's label is its number and its pixels are constant: the number modulo 256."""
    number = torch.arange(int(np.sum(sizes)))
    images = (number % 256).to(torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8).contiguous()
    return tiny_data(*sizes)._replace(images=images, labels=number, stats=((0.0,) * 3, (1 / 255,) * 3),
                                      **dict(zip(("labelled", "unlabelled"), cut(number.numpy(), sizes))))


def tiny_nets(module, args, number, seed=0, **heads):
    """Networks for 4 classes, as the scripts build them."""
    torch.manual_seed(seed)
    return [module.ResNet8(4, args.width, **heads).to(memory_format=torch.channels_last) for _ in range(number)]


def sgd(args, *nets, lr=None):
    """The optimiser as the scripts build it, over the parameters of all networks."""
    parameters = [value for net in nets for value in net.parameters()]
    return torch.optim.SGD(parameters, args.lr if lr is None else lr, args.momentum, weight_decay=args.weight_decay)


def tiny_state(net):
    """A copy of the network's state."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def world(name, *sizes, flags=(), **settings):
    """What a script's local training is called with, by name, for clients of (labelled, unlabelled) sizes."""
    args, module = tiny_args(name, *flags, **settings), find_method(name).module
    projected = getattr(args, "icpl", False) and getattr(args, "similarity", "projected") == "projected"
    net, other, *more = tiny_nets(module, args, 2 + getattr(args, "helpers", 0), **{"heads": True} if projected else {})
    state = tiny_state(net)
    state["bn1.running_mean"] += 0.1                                       # statistics that are not the initial ones
    sent = {"state": state, "class_prior": torch.full((4,), 0.25, dtype=torch.float64),
            "prototype": torch.rand(4, 4 * args.width), "known": torch.ones(4, dtype=torch.bool),
            "psi": {key: getattr(args, "psi_factor", 0) * value for key, value in state.items() if value.ndim > 1}}
    w = SimpleNamespace(
        module=module, args=args, rnd=2, client=0, data=tiny_data(*sizes or [(5, 20)]), net=net,
        received=module.Broadcast(*map(sent.get, module.Broadcast._fields)), optimizer=sgd(args, net),
        teacher=other, coarse=other, personal_net=other, psi_net=other, helper_nets=more, helper_psi=[],
        personal=tiny_state(other))
    if name == "baselines/fedloke.py":
        w.optimizer = sgd(args, net, other)
    elif name == "baselines/feddure.py":
        w.coarse_optimizer = sgd(args, other, lr=args.coarse_lr)
    elif name == "baselines/flexmatch.py":
        longest = max(len(w.data.pool(client)) for client in range(len(w.data.labelled)))
        w.curricula = module.Curricula(torch.full((len(w.data.labelled), longest), -1, dtype=torch.int16),
                                       torch.zeros(len(w.data.labelled), 4))
    elif getattr(args, "two_phase", False):
        w.local_teacher, = tiny_nets(module, args, 1, seed=3)
    return w


def call(function, w, **more):
    """The function, its arguments taken from the world by their names; `more` wins."""
    given = vars(w) | more
    return function(**{name: given[name] for name in inspect.signature(function).parameters})


def update(w, **more):
    """One client's local training: its Upload."""
    two_phase = getattr(w.args, "two_phase", False)
    return call(w.module.two_phase_update if two_phase else w.module.client_update, w, **more)


def step_of(w, n_lab=6, n_unl=12):
    """local_loss on random views: (total, ..., values), and the views and labels it was given."""
    torch.manual_seed(1)
    both = 2 if w.module.__name__ == "baselines.fedloke" else 1            # two views of each labelled image
    views, label = torch.randn(both * n_lab + 2 * n_unl, 3, 8, 8), torch.arange(n_lab) % 4
    for net in (w.net, w.teacher):
        if not net.training and not views.is_meta:                         # statistics of these views, scattered logits
            for _ in range(20):
                net.train()(views)
            net.eval().classifier.weight.data *= 8
    more = {"fine": None, "fine_optimizer": None, "ramp": 0.5, "threshold": torch.tensor([0, 0.6, 0.9, 0.99]),
            "class_prior": torch.full((4,), 0.25), "prototype": torch.rand(4, 32),
            "known": torch.ones(4, dtype=torch.bool), "pseudo_label": torch.arange(n_unl) % 4}
    if w.module.__name__ == "baselines.feddure" and w.args.variant == "paper":
        more["fine"] = w.module.FineRegulator(4)
        more["fine_optimizer"] = torch.optim.Adam(more["fine"].parameters(), 1e-3)
    return call(w.module.local_loss, w, views=views.requires_grad_(), label=label, **more), views, label


def parameters(state):
    """The entries of a state that are no batch-norm statistics."""
    return {name: value for name, value in state.items() if "running" not in name and "tracked" not in name}


def metrics(w, upload):
    return dict(zip(w.module.METRICS, upload.metrics.tolist()))


def one_class_labels(module, label, classes):
    """The Labels of a CLIP script with one candidate class an image; -1: not selected."""
    return module.Labels(label, F.one_hot(label + 1, classes + 1)[:, 1:].bool())
