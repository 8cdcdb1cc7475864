"""A few clients of random images, networks and settings for them: what a local training is called with."""

import numpy as np
import torch
import torch.nn.functional as F

STATS = (0.5,) * 3, (0.3,) * 3


def tiny_args(method, *flags, **settings):
    """The short settings of a script with batches of 8; flags as on the command line, or by name."""
    named = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    args = method.module.parse_args([*method.short, "--batch-size=8", *map(str, flags), *named])
    args.amp = False
    return args


def cut(order, sizes):
    """Hand out the indices to clients of (labelled, unlabelled) sizes: labelled and unlabelled parts, one a client."""
    ends = np.cumsum(np.reshape(sizes, -1))
    parts = np.split(order[: ends[-1]], ends[:-1])
    return parts[::2], parts[1::2]


def tiny_data(module, *sizes, classes=4, seed=0, **more):
    """FederatedData of random 8x8 images, for clients of (labelled, unlabelled) sizes; nobody owns the last class."""
    rng, total = np.random.default_rng(seed), int(np.sum(sizes))
    order = rng.permutation(total)
    images = rng.integers(0, 256, (max(1, total), 3, 8, 8), dtype=np.uint8)  # never none, as in a script
    labels = rng.integers(0, classes - 1, len(images))
    return module.FederatedData(
        torch.from_numpy(images), torch.from_numpy(labels), *cut(order, sizes), stats=STATS, **more
    )


def numbered_data(module, *sizes):
    """The same, but an image's label is its number and its pixels are constant: the number modulo 256."""
    total = int(np.sum(sizes))
    images = (torch.arange(total) % 256).to(torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8).contiguous()
    return module.FederatedData(images, torch.arange(total), *cut(np.arange(total), sizes), ((0.0,) * 3, (1.0,) * 3))


def tiny_nets(module, args, number, classes=4, seed=0, **heads):
    """Networks as the scripts build them."""
    torch.manual_seed(seed)
    return [module.ResNet8(classes, args.width, **heads).to(memory_format=torch.channels_last) for _ in range(number)]


def sgd(args, *nets, lr=None):
    """The optimiser as the scripts build it, over the parameters of all networks."""
    parameters = [value for net in nets for value in net.parameters()]
    return torch.optim.SGD(parameters, args.lr if lr is None else lr, args.momentum, weight_decay=args.weight_decay)


def tiny_state(net):
    """A broadcast model: a copy of the network's state."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def parameters(state):
    """The entries of a state that are no batch-norm statistics."""
    return {name: value for name, value in state.items() if "running" not in name and "tracked" not in name}


def same_parameters(upload, received):
    """Whether a local training left the model as it was, but for batch-norm statistics."""
    sent, came = parameters(upload.state), parameters(received.state)
    return all(torch.equal(value, came[name]) for name, value in sent.items())


def metrics(module, upload):
    return dict(zip(module.METRICS, upload.metrics.tolist()))


def one_class_labels(module, label, classes):
    """The Labels of a CLIP script with one candidate class an image; -1: not selected."""
    return module.Labels(label, F.one_hot(label + 1, classes + 1)[:, 1:].bool())
