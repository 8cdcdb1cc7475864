"""CLIP zero-shot: classification by the names of the classes alone, the first row of FedCoPL's table. Nothing trains.

Paper: CLIP, ICML 2021 (arXiv 2103.00020); code: open_clip's own forward passes and its zero-shot classifier. As a row
of FedCoPL, ICCV 2025 (arXiv 2510.10100), official code krumpguo/FedCoPL at ed7e0e0, each client's test images are
classified and the clients' accuracies averaged.

    python baselines/clip_zeroshot.py                     # a miniature CLIP made on the spot, embedded digits: CPU
    python baselines/clip_zeroshot.py --dataset dtd       # the paper's setting: OpenAI's ViT-B/32
    python baselines/clip_zeroshot.py --dataset dtd --model RN50-quickgelu --run-name rn50    # any model of open_clip

Results: baselines/README.md. The paper's scale was not run.

One run gives two figures, each as mean over the clients that have test images and pooled over all test images:
  template   one text a class, "a photo of a {}" in the official code: the headline, comparable with FedCoPL's row;
  ensemble   the mean of the texts' features over many templates, as in CLIP's paper, here those for ImageNet. It is
             another recipe with another figure; no row of FedCoPL's table has it.
A figure depends on the backbone and its weights, the template, the spelling of the class names, the test split and the
kind of mean: all are printed with it. FedCoPL's 43.24 % on DTD and 54.51 % on RESISC45 are, rounded, also the pooled
figures of GRIP (arXiv 2306.01669), so its zero-shot row may be pooled while its other rows are means over clients.

This script shares no forward pass with fedcopl.py, which opens CLIP up for prompts: its figures check those
(`zeroshot_*` in summary.json there and here).

Letters in shapes: n images, H classifiers (the template's, the ensemble's), C classes, D embedding.

Components: unit-length text features, their mean over the templates, normalised again
`open_clip.build_zero_shot_classifier`; largest cosine `predict`; per client `evaluate`; both means `accuracies`.
Not published, chosen here: everything in float32. Images are prepared as FedCoPL has them, short side by bicubic and
centre, for all models; where a model's own preparation differs it is said next to the figures.
Of FedCoPL's splits, where its code does what nobody would expect:
  DIFF-5   --shuffle-classes   the code's quantity split deals out consecutive images of a class
  DIFF-6   --split-seed        the code's split is the same whatever the seed of the run; here that is the only seed
"""

import argparse
import hashlib
import json
import logging
import os
import sys
import zipfile
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import open_clip
import torch
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))            # common.py: here or one folder up
import common

# Values that depend on the data set; they fill flags that were not given. Source: FedCoPL's configuration files.
PAPER = dict(model="ViT-B-32-quickgelu", pretrained="openai", template="a photo of a {}", clients=10)
PRESETS = {
    "dtd": PAPER,
    "resisc45": PAPER,
    "cub": PAPER | dict(clients=5),
    "ucf101": PAPER | dict(clients=5),
    "cifar10": PAPER | dict(template="a photo of a {}."),
    "cifar100": PAPER | dict(template="a photo of a {}."),
    "eurosat": PAPER,                                                      # listed in the code, not in the paper
    "flowers102": PAPER | dict(clients=5),                                 # likewise
    "folder": PAPER,                                                       # ours
    "digits": PAPER | dict(model="tiny", pretrained="glyphs", clients=5),  # ours: quick; see the README
}
PUBLISHED = {"dtd": 43.24, "resisc45": 54.51, "cub": 51.28, "ucf101": 61.00, "cifar10": 86.93, "cifar100": 64.17}
ENSEMBLES = {"openai": open_clip.OPENAI_IMAGENET_TEMPLATES, "simple": open_clip.SIMPLE_IMAGENET_TEMPLATES, "none": ()}
BATCH = 256                             # images of a pass; changes results by rounding alone
TINY_SHARE = 0.2                        # of each class's training images: what a data set's miniature CLIP has seen


# Copied from tiny_clip.py: Parser
class Parser(argparse.ArgumentParser):
    """A mistake is a UserError: one line."""

    def error(self, message):
        raise common.UserError(message)


def parse_args(argv=None):
    values = "; ".join(f"{name}: " + ", ".join(f"{key} {value}" for key, value in preset.items())
                       for name, preset in PRESETS.items())
    parser = Parser(prog="clip_zeroshot.py", description=__doc__.split("\n\n")[0], allow_abbrev=False,
                    epilog=f"In brackets: the default and its source. [preset] goes by data set: {values}.")
    number = common.number
    add = parser.add_argument_group("run").add_argument
    add("--split-seed", type=number(int, 0, 2**31 - 501), default=0,
        help="which client owns which images; 0 is the official split, DIFF-6 [0]")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps [auto: what exists]")
    add("--out-dir", default="runs", help="where run folders go [runs]")
    add("--run-name", help="the run folder [clip_zeroshot_<dataset>_<split>]")
    add("--resume", action="store_true",
        help="begin again in the folder of a run that was cut off; show the figures of a finished one")
    add = parser.add_argument_group("data and model").add_argument
    add("--dataset", type=common.squeeze, choices=PRESETS, default="digits", help="[digits]")
    add("--data-dir", default="data", help="where data sets are; what is missing is downloaded [data]")
    add("--train-subset", type=number(int, 1),
        help="use N training images, equally many a class, which the split of the test images depends on: for the "
             "clients of a quick run of fedcopl.py [all]")
    add("--skip-share", type=number(float, 0, 0.99),
        help="leave out this first share of each class's training images, likewise: what a miniature CLIP was trained "
             f"on [{TINY_SHARE} if it learns from this data set, else 0]")
    add("--model", help="an open_clip model name, or its JSON file; tiny: the miniature of tiny_clip.py [preset]")
    add("--pretrained",
        help="an open_clip tag or a weights file, .pt or .safetensors; with --model tiny: what tiny_clip.py learns "
             "from: glyphs, a data set or a folder [preset; tiny: the data set]")
    add = parser.add_argument_group("federation").add_argument
    add("--beta", type=common.concentration, default=0.1,
        help="Dirichlet concentration: smaller is more skewed, inf is i.i.d.; for --partition dirichlet alone [0.1, "
             "paper]")
    add("--partition", choices=("dirichlet", "quantity", "iid"), default="dirichlet",
        help="the published splits: by --beta; a fifth of the classes a client; even [dirichlet]")
    add("--shuffle-classes", action=common.switch, default=False,
        help="shuffle the images of a class before the quantity split, DIFF-5 [off, official]")
    add("--clients", type=number(int, 1), help="K [preset, paper 10 or 5]")
    add = parser.add_argument_group("texts").add_argument
    add("--template", help="of the headline, {} is the class name [preset, official]")
    add("--ensemble", choices=tuple(ENSEMBLES), default="openai",
        help="templates of the second figure: openai, CLIP's 80 for ImageNet; simple, 7 of these; as open_clip has "
             "them [openai]")
    return settle(parser, parser.parse_args(argv))


# Differs from fedcopl.py: settle, which has pseudo-labels
def settle(parser, args):
    """Fill flags that were not given, refuse what contradicts itself."""
    preset = PRESETS[args.dataset]
    weights = preset["pretrained"]
    if args.model == "tiny":
        weights = "glyphs" if args.dataset == "digits" else args.dataset
    elif args.pretrained is None and args.model not in (None, preset["model"]):
        if weights not in open_clip.list_pretrained_tags_by_model(args.model):
            parser.error(f"--model {args.model} needs --pretrained: an open_clip tag or a weights file")
    for name, value in (preset | {"pretrained": weights}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.skip_share is None:                                            # what the miniature has seen with labels
        args.skip_share = TINY_SHARE if args.model == "tiny" and args.pretrained == args.dataset else 0.0
    if args.template.count("{}") != 1:
        parser.error(f"--template {args.template!r}: expected one {{}}, the place of the class name")
    if args.shuffle_classes and args.partition != "quantity":
        parser.error(f"--shuffle-classes changes --partition quantity alone, not {args.partition}")
    split = f"b{args.beta:g}" if args.partition == "dirichlet" else args.partition
    args.run_name = args.run_name or f"clip_zeroshot_{args.dataset}_{split}"
    return args


# ---- Model and texts ------------------------------------------------------------------------------------------------

# Copied from fedcopl.py: open_model
def open_model(model, pretrained):
    """An open_clip model by name or JSON file, with weights by tag or file, frozen.

    Returns the model, its tokenizer, the side of its images, their (mean, std), and a fingerprint of all that makes it.
    """
    given, config = model, None
    if model.endswith(".json"):
        try:
            open_clip.add_model_config(Path(model).resolve(strict=True))
        except (OSError, ValueError, TypeError) as error:
            raise common.UserError(f"--model {model}: cannot be read ({common.one_line(error)})") from None
        model = Path(model).stem
    if model in open_clip.list_models():
        config = open_clip.get_model_config(model)
    if config is None:
        close = get_close_matches(model, open_clip.list_models(), 1)
        raise common.UserError(f"--model {given}: " + (
            "no model configuration (embed_dim, vision_cfg, text_cfg)" if given.endswith(".json") else
            f"no model of open_clip {open_clip.__version__}, and no .json file"
            + (f" (did you mean {close[0]}?)" if close else "")))
    options = {}
    if os.path.isfile(pretrained):
        try:
            with zipfile.ZipFile(pretrained) as archive:
                names = archive.namelist()
        except (OSError, zipfile.BadZipFile):
            names = []
        # OpenAI's original file is a TorchScript archive (torch tells them so): no pickle is read, QuickGELU is meant
        if any(name.endswith("/constants.pkl") for name in names):
            options = dict(weights_only=False, force_quick_gelu=True)
        trouble = f"--pretrained {pretrained}: not the weights of --model {model}"
    else:
        tags = open_clip.list_pretrained_tags_by_model(model)
        if pretrained not in tags:
            raise common.UserError(f"--pretrained {pretrained}: no such file, and no tag of --model {model}"
                                   + (f", which has {', '.join(tags)}" if tags else ""))
        wanted = open_clip.get_pretrained_cfg(model, pretrained).get("quick_gelu", False)
        if wanted != config.get("quick_gelu", False):
            raise common.UserError(f"--pretrained {pretrained} was trained with{'' if wanted else 'out'} QuickGELU, "
                                   f"--model {model} is built with{'out' if wanted else ''}: choose --model "
                                   f"{model + '-quickgelu' if wanted else model.removesuffix('-quickgelu')}")
        print(f"loading the weights {pretrained} of {model}: from the hub's cache, or downloaded", flush=True)
        trouble = (f"--pretrained {pretrained}: the weights are not in the cache and the download failed; on a machine "
                   "with a network, fill the hub's cache once with the same command, or save the weights there as a "
                   f"file and give it as --pretrained FILE (.pt or .safetensors, for --model {model})")
    logging.disable(logging.ERROR)                                         # without a network the hub logs a lot
    try:
        clip = open_clip.create_model(model, pretrained=pretrained, **options)
        tokenizer = open_clip.get_tokenizer(model)
    except Exception as error:
        raise common.UserError(f"{trouble} ({common.one_line(error)[:300]})") from None
    finally:
        logging.disable(logging.NOTSET)
    side = getattr(clip.visual, "image_size", None)
    side = side[0] if isinstance(side, (tuple, list)) else side
    stats = tuple(clip.visual.image_mean), tuple(clip.visual.image_std)
    digest = hashlib.sha256(json.dumps([config, sorted(options), side, stats]).encode())
    for name, value in sorted(clip.state_dict().items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return clip.eval().requires_grad_(False), tokenizer, side, stats, digest.hexdigest()[:16]


def text_recipes(template, ensemble):
    """What a figure is made with: its name -> templates, each a function of the class name. First the headline."""
    recipes = {f"template {template!r}": [lambda name: template.replace("{}", name)]}
    if ENSEMBLES[ensemble]:
        recipes[f"ensemble {ensemble}, {len(ENSEMBLES[ensemble])} templates"] = ENSEMBLES[ensemble]
    return recipes


def refuse_cut_texts(tokenizer, class_names, recipes):
    """Refuse a text that is longer than the text context: open_clip's tokenizers would cut it without a word.

    A text fits if more room gives no more tokens. What fills the room up is not 0 for all tokenizers.
    """
    limit = tokenizer.context_length
    padding = tokenizer([""], context_length=limit + 512).mode().values
    for template in (template for templates in recipes.values() for template in templates):
        texts = [template(name) for name in class_names]
        kept, whole = ((tokenizer(texts, context_length=room) != padding).sum(1).tolist()
                       for room in (limit, limit + 512))
        for name, text, less, size in zip(class_names, texts, kept, whole):
            if less < size:
                raise common.UserError(f"class {name!r} is too long: {text[:200]!r} makes {size} tokens, but the text "
                                       f"context holds {limit}; shorten the name or the --template, or choose another "
                                       "--ensemble")


# ---- Evaluation -----------------------------------------------------------------------------------------------------

# Differs from fedcopl.py: FederatedData, which has the training images
class FederatedData(NamedTuple):        # all clients' data; a client reads its own part
    test_images: torch.Tensor           # (N, 3, S, S) uint8
    labels: torch.Tensor                # (N,) of the training images: for the split and the log alone
    test_labels: torch.Tensor
    train: list                         # one index array a client
    test: list
    stats: tuple                        # mean and deviation of each channel, in 0..1: the model's


# Differs from fedcopl.py: predict, which gives probabilities by one classifier
@torch.no_grad()
def predict(clip, data, index, classifiers):
    """What the classifiers, (D, C) each, take test_images[index] for: the class of the largest cosine, (H, n) int64."""
    device, parts = classifiers[0].device, []
    for batch in torch.from_numpy(index).split(BATCH) if len(index) else ():
        pixels = common.normalise(common.to_device(data.test_images[batch], device), *data.stats)
        features = clip.encode_image(pixels, normalize=True)               # (n, D)
        parts.append(torch.stack([(features @ words).argmax(1) for words in classifiers]).cpu())
    return torch.cat(parts, 1) if parts else torch.zeros(len(classifiers), 0, dtype=torch.int64)


# Differs from fedcopl.py: evaluate, which counts no classes
def evaluate(client, clip, data, classifiers):
    """Client k's own test images of each class, then how many of them each classifier gets right: (1 + H, C) int64."""
    truth, classes = data.test_labels[data.test[client]], classifiers[0].shape[1]
    answers = predict(clip, data, data.test[client], classifiers)
    return torch.stack([torch.bincount(part, minlength=classes)
                        for part in (truth, *(truth[answer == truth] for answer in answers))])


# Copied from fedcopl.py: accuracies
def accuracies(scores):
    """From the clients' (correct, images): mean over the clients that have test images, and of all images, in %."""
    correct, images = torch.stack(scores).double().unbind(1)
    return 100 * (correct / images)[images > 0].mean().item(), 100 * (correct.sum() / images.sum()).item()


def accuracy_rows(column, names, counts):
    """Rows of a table: test images and accuracies in % of each client or class, from counts (1 + H, n); None of 0."""
    rows = []
    for name, (images, *correct) in zip(names, counts.T.tolist()):
        shares = [100 * right / images if images else None for right in correct]
        rows.append({column: name, "test": images} | dict(zip(("acc_pct", "ensemble_acc_pct"), [*shares, None])))
    return rows


# ---- Main -----------------------------------------------------------------------------------------------------------

# Differs from fedcopl.py: prepare_data, which keeps the training images
def prepare_data(args, tokenizer, side, stats, recipes):
    """Load and split the data: FederatedData, class names, facts for config.json.

    All that can be refused is refused before the images are decoded; training images never are.
    """
    source = common.load_dataset(args.dataset, args.data_dir, side, args.train_subset, True, args.skip_share)
    names, labels = source.class_names, (source.train_labels, source.test_labels)
    refuse_cut_texts(tokenizer, names, recipes)
    # DIFF-6 the published split does not depend on the seed of a run; --split-seed gives others.
    # DIFF-5 "quantity" deals out consecutive images of a class, as published; --shuffle-classes: in random order.
    parts = common.clip_partition(*labels, args.clients, args.beta, args.partition, args.split_seed,
                                  args.shuffle_classes)
    source = common.cache_images(source._replace(train_images=common.Images([], side)))
    facts = {"data_source": source.source, "data_fingerprint": common.fingerprint(source), "classes": names}
    return FederatedData(source.test_images, *labels, *parts, stats), names, facts


# Copied from fedcopl.py: prepare_model with load_clip->open_model
def prepare_model(args):
    """The model of --model and --pretrained; the miniature is made first and is then a model file like any other."""
    if args.model != "tiny":
        return open_model(args.model, args.pretrained)
    try:
        import tiny_clip
    except ImportError:
        raise common.UserError("--model tiny is made by tiny_clip.py, which is not here; give --model and --pretrained"
                               ) from None
    try:
        tiny_clip.find_source(args.pretrained, args.data_dir)
    except common.UserError:
        raise common.UserError(f"--pretrained {args.pretrained}: --model tiny learns from glyphs, a data set or a "
                               "folder; weights, by file or tag, also need their --model") from None
    # on the CPU wherever the run is: one file for one recipe
    return open_model(*map(str, tiny_clip.make(args.pretrained, args.data_dir, share=TINY_SHARE, device="cpu")))


def main(argv=None):
    args = parse_args(argv)
    args.rounds, args.amp = 1, False                                       # run folders count rounds: here there is one
    ranks = common.Ranks(args)
    device = ranks.device
    torch.backends.cudnn.allow_tf32 = False
    # files may move: what is in them has to be the same
    run = common.Run(args, ranks, ("model", "pretrained") if os.path.isfile(args.pretrained) else ())
    clip, tokenizer, side, stats, model_fingerprint = ranks.first_then_others(lambda: prepare_model(args))
    recipes = text_recipes(args.template, args.ensemble)
    data, class_names, facts = ranks.first_then_others(lambda: prepare_data(args, tokenizer, side, stats, recipes))
    clip = clip.to(device)
    if run.checkpoint:                                                     # a finished run: its figures are shown
        run.extra = run.checkpoint["figures"]

    owned = {"train": (data.labels, data.train), "test": (data.test_labels, data.test)}
    run.start(class_names, owned, **facts, model_fingerprint=model_fingerprint, image_side=side)
    for _ in run.rounds():
        classifiers = [open_clip.build_zero_shot_classifier(
            clip, tokenizer, class_names, templates, device=device, use_tqdm=ranks.first and sys.stderr.isatty()
            ) for templates in recipes.values()]
        counts = ranks.gather([evaluate(client, clip, data, classifiers) for client in tqdm(
            ranks.mine(range(args.clients)), unit="client", disable=None if ranks.first else True)], args.clients)
        if ranks.first:
            counts = torch.stack(counts)                                   # (K, 1 + H, C)
            images, *correct = counts.sum(2).unbind(1)                     # (K,) each
            for kind, right in zip(("zeroshot", "ensemble"), correct):
                mean, pooled = accuracies(torch.stack([right, images], 1).unbind())
                run.extra |= {f"{kind}_client_mean_pct": mean, f"{kind}_pooled_pct": pooled}
            run.write_table("accuracy_by_client.csv", accuracy_rows("client", range(args.clients), counts.sum(2).T))
            run.write_table("accuracy_by_class.csv", accuracy_rows("class", class_names, counts.sum(0)))
            run.save(round_row(run.extra), {"counts": counts, "figures": run.extra})
    if ranks.first:
        print(*report(args, recipes, run.extra, clip.visual.preprocess_cfg), sep="\n")


# Differs from fedcopl.py: round_row, which has losses and pseudo-labels
def round_row(figures):
    """The only row of rounds.csv; None where there is no ensemble."""
    mean = figures["zeroshot_client_mean_pct"]
    return {"test_acc_pct": mean, "client_acc_mean_pct": mean, "pooled_acc_pct": figures["zeroshot_pooled_pct"],
            "ensemble_client_acc_mean_pct": figures.get("ensemble_client_mean_pct"),
            "ensemble_pooled_acc_pct": figures.get("ensemble_pooled_pct"),
            "clients_empty": 0, "bytes_up": 0, "bytes_down": 0}


def report(args, recipes, figures, preparation):
    """Lines for the screen: each figure with all that it was made with, and the paper's where there is one."""
    lines = [f"CLIP zero-shot, {args.model} {args.pretrained}, {recipe}: {figures[f'{kind}_client_mean_pct']:.2f} % "
             f"mean over clients, {figures[f'{kind}_pooled_pct']:.2f} % of all test images"
             for recipe, kind in zip(recipes, ("zeroshot", "ensemble"))]
    wanted = [preparation[key] for key in ("resize_mode", "interpolation")]
    if wanted != ["shortest", "bicubic"]:
        lines.append(f"note: these weights expect images resized by {' and '.join(wanted)}; here: shortest and bicubic")
    if (args.model, args.pretrained) == (PAPER["model"], PAPER["pretrained"]) and args.dataset in PUBLISHED:
        lines.append(f"FedCoPL's paper, ViT-B/32, {PRESETS[args.dataset]['template']!r} in its code, beta 0.1: "
                     f"{PUBLISHED[args.dataset]:.2f} %, mean over clients or of all test images: not known")
    return lines


if __name__ == "__main__":
    common.launch(main)
