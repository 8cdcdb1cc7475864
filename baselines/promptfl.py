"""PromptFL: one text prompt for CLIP, averaged over the clients, trained on pseudo-labels.

Paper: PromptFL, IEEE TMC 2023 (arXiv 2208.11625); official code: PEILab-Federated-Learning/PromptFL. There the images
have labels. Without labels it is a baseline of FedCoPL, ICCV 2025 (arXiv 2510.10100), whose authors released no
baseline: the labels are those of FPL, IFPL, GRIP (arXiv 2306.01669), CPL (arXiv 2406.10502) or FedCoPL.

    python baselines/promptfl.py                                        # PromptFL + FPL: miniature CLIP, digits
    python baselines/promptfl.py --pseudo-labels copl                   # with FedCoPL's labels; likewise ifpl, cpl
    python baselines/promptfl.py --pseudo-labels ifpl --shots grow      # GRIP's labels
    python baselines/promptfl.py --dataset dtd --beta 0.1               # the paper's setting: OpenAI's ViT-B/32

Results: baselines/README.md. The paper's scale was not run.

Clients own images without labels and the names of the classes. CLIP stays frozen; its image features are computed once.
A round:
  every Q rounds   each client labels its images (at first with zero-shot CLIP, then with the current model);
  clients          train the text prompt, which stands before every class name, on their selected images;
  server           averages the prompts, weighted by selected images.

Letters in shapes: B batch, n images of a client, C classes, K clients, N all training images, W width of the text
tower, D embedding; text prompts (P, W).

Components: context shared by all classes, class name last `PromptedCLIP.encode_text`; average `server_update`; labels
`label_images`: FPL, IFPL, GRIP `select`, CPL `candidate_sets`, `select_candidates`, `candidate_loss`, CoPL `estimate`,
`allocate`, `select`.
Not published, chosen here:
  - Rounds, epochs, batch, schedule, step size, weight decay and prompts are FedCoPL's, so that methods differ in the
    model alone. PromptFL's own: --lr 0.001 --weight-decay 5e-4 --batch-size 32 --local-epochs 5, other schedule.
  - FPL asks zero-shot CLIP at every refresh, IFPL and CPL ask the current model; quantiles and shots are local. Of each
    class FPL keeps the most confident images by arg-max; an image that is turned away tries no second class.
  - CPL continues with its prompt after a refresh; its own code starts anew. Of its losses it is `cc`, with hard sets.
  - Each client is tested on its own images; the official code has one test set for all.
Left out: random crops and flips (FedCoPL's code has none: features are constant) and faults of the released code: its
"average" is the last client's prompt, and its schedule runs on from client to client.
Of FedCoPL's labels and splits, where its note and its code differ:
  DIFF-1   --budget            images per class over all clients: total / C in the note, rounded up in the code
  DIFF-2   --unseen-classes    capacity of a class that nobody predicts: the note divides by zero; the code lets it grow
  DIFF-3   --ceiling           the code's float32 can round a whole number up by one; we use integers
  DIFF-5   --shuffle-classes   the code's quantity split deals out consecutive images of a class
  DIFF-6   --split-seed        the code's split is the same whatever the seed of the run; so is ours, by default
"""

import hashlib
import json
import logging
import math
import os
import sys
import zipfile
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import numpy as np
import open_clip
import torch
import torch.nn as nn
import torch.nn.functional as F
from open_clip.transformer import QuickGELU

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))            # common.py: here or one folder up
import common

# Values that depend on the data set; they fill flags that were not given. Sources: FedCoPL's configuration files; the
# quantiles are CPL's own (for UCF101 and CIFAR-100 from its runs with LaFTer, UCF101 at temperature 0.25), where it has
# none those of EuroSAT, its only set of ten classes.
PAPER = dict(model="ViT-B-32-quickgelu", pretrained="openai", template="a photo of a {}", clients=10, rounds=20,
             local_epochs=10, refresh=5, batch_size=64, lr=0.1, momentum=0.9, weight_decay=0.05, intra_quantile=0.75,
             inter_quantile=0.8)
PRESETS = {
    "dtd": PAPER | dict(inter_quantile=0.95),
    "resisc45": PAPER | dict(intra_quantile=0.9, inter_quantile=0.97),
    "cub": PAPER | dict(clients=5, inter_quantile=0.99),
    "ucf101": PAPER | dict(clients=5, intra_quantile=0.45, inter_quantile=0.995),
    "cifar10": PAPER | dict(template="a photo of a {}."),
    "cifar100": PAPER | dict(template="a photo of a {}.", intra_quantile=0.9, inter_quantile=0.9925),
    "eurosat": PAPER,                                                      # listed in the code, not in the paper
    "flowers102": PAPER | dict(clients=5, intra_quantile=0.6, inter_quantile=0.99),   # likewise
    "folder": PAPER,                                                       # ours
    "digits": PAPER | dict(model="tiny", pretrained="glyphs", clients=5),  # ours: quick; see the README
}
LABEL_BATCH = 256                       # images of a pass without gradients; changes results by rounding alone
TINY_SHARE = 0.2                        # of each class's training images: what a data set's miniature CLIP has seen


def parse_args(argv=None):
    parser = shared_parser("promptfl", __doc__, PRESETS, "fpl")
    return parser.parse(argv, lambda args: settle(parser, args))


# Copied from fedcopl.py: shared_parser
def shared_parser(name, doc, presets, pseudo_labels):
    """The flags that all CLIP scripts with pseudo-labels share; pseudo_labels: the kind that the method has."""
    parser, number, switch = common.Parser(name, doc, presets), common.number, common.switch
    add = parser.data.add_argument
    add("--skip-share", type=number(float, 0, 0.99),
        help="leave out this first share of each class's training images: what a miniature CLIP was trained on "
             f"(tiny_clip.py --share) [{TINY_SHARE} if it learns from this data set, else 0]")
    add("--model", help="an open_clip model name, or its JSON file; tiny: the miniature of tiny_clip.py [preset]")
    add("--pretrained",
        help="an open_clip tag or a weights file, .pt or .safetensors; with --model tiny: what tiny_clip.py learns "
             "from: glyphs, a data set or a folder [preset; tiny: the data set]")
    add("--template", help="zero-shot text, {} is the class name [preset]")
    add("--text-prompts", type=number(int, 0, 1000), default=16,
        help="trained tokens before each class name, shared by all classes; --lr is theirs [16, FedCoPL]")
    add("--prompt-std", type=number(float, 0), default=0.02, help="of their first values [0.02]")
    add = parser.federation.add_argument
    add("--beta", type=common.concentration, default=0.1,
        help="Dirichlet concentration: smaller is more skewed, inf is i.i.d.; for --partition dirichlet alone [0.1, "
             "FedCoPL]")
    add("--partition", choices=("dirichlet", "quantity", "iid"), default="dirichlet",
        help="the published splits: by --beta; a fifth of the classes a client; even [dirichlet]")
    add("--shuffle-classes", action=switch, default=False,
        help="shuffle the images of a class before the quantity split, DIFF-5 [off, FedCoPL]")
    add = parser.add_argument_group("pseudo-labels").add_argument
    add("--pseudo-labels", choices=("copl", "fpl", "ifpl", "cpl"), default=pseudo_labels,
        help="copl: FedCoPL's; fpl: the most confident images of each class for zero-shot CLIP; ifpl: the same by the "
             "current model (with --shots grow: GRIP); cpl: sets of candidate classes by the current model "
             f"[{pseudo_labels}]")
    add("--refresh", type=number(int, 1),
        help="Q, rounds that a labelling lasts, and one cosine of the step sizes [preset, FedCoPL 5]")
    add("--shots", type=lambda text: text if text == "grow" else number(int, 1)(text),
        help="fpl, ifpl, cpl: images of each class for a client, a number or grow: a quarter of an even share of the "
             "class for each refresh so far [16, FPL and CPL]")
    add("--intra-quantile", type=number(float, 0, 1),
        help="cpl: an image's most probable classes are candidates until their sum exceeds this quantile of the "
             "confidences [preset, CPL's alpha]")
    add("--inter-quantile", type=number(float, 0, 1),
        help="cpl: a class is a candidate for the images above this quantile of its probabilities [preset, CPL's beta]")
    add = parser.add_argument_group("cooperative pseudo-labels, copl").add_argument
    add("--conf-filter", action=switch, default=True,
        help="off (ablation): count images whatever their confidence [on]")
    add("--entropy-filter", action=switch, default=True,
        help="off (ablation): count images whatever their entropy [on]")
    add("--conf-quantile", type=number(float, 0, 1), default=0.5, help="[0.5, FedCoPL]")
    add("--entropy-quantile", type=number(float, 0, 1), default=0.5,
        help="the 1 - q quantile of the entropy is the bound [0.5, FedCoPL]")
    add("--allocation", action=switch, default=True,
        help="the server balances the classes; off: a client's own counts are its capacities, which is our reading, as "
             "no source says what remains [on]")
    add("--budget", choices=("ceil", "exact"), default="ceil", help="M, DIFF-1 [ceil, FedCoPL's code]")
    add("--unseen-classes", choices=("grow", "none"), default="grow",
        help="capacity of classes that nobody predicts, DIFF-2 [grow, FedCoPL's code]")
    add("--ceiling", choices=("integer", "float32"), default="integer",
        help="arithmetic of the capacities, DIFF-3 [integer]")
    return parser


# Copied from fedcopl.py: settle
def settle(parser, args):
    """Refuse what contradicts itself. Returns the defaults that depend on other flags."""
    copl = ("conf_filter", "entropy_filter", "conf_quantile", "entropy_quantile", "allocation", "budget",
            "unseen_classes", "ceiling")
    readers = dict.fromkeys(copl, ("copl",)) | {
        "shots": ("fpl", "ifpl", "cpl"), "intra_quantile": ("cpl",), "inter_quantile": ("cpl",)}
    for name, kinds in readers.items():
        if getattr(args, name) != parser.get_default(name) and args.pseudo_labels not in kinds:
            parser.error(f"--{name.replace('_', '-')} is for --pseudo-labels {', '.join(kinds)}, not for "
                         f"{args.pseudo_labels}")
    for name, switch in (("conf_quantile", "conf_filter"), ("entropy_quantile", "entropy_filter"),
                         ("budget", "allocation"), ("unseen_classes", "allocation"), ("ceiling", "allocation")):
        if getattr(args, name) != parser.get_default(name) and not getattr(args, switch):
            parser.error(f"--{name.replace('_', '-')} changes nothing with --no-{switch.replace('_', '-')}")
    if args.template is not None and args.template.count("{}") != 1:
        parser.error(f"--template {args.template!r}: expected one {{}}, the place of the class name")
    if args.shuffle_classes and args.partition != "quantity":
        parser.error(f"--shuffle-classes changes --partition quantity alone, not {args.partition}")
    preset = parser.presets[args.dataset]
    model, weights = args.model or preset["model"], preset["pretrained"]
    if args.model == "tiny":
        weights = "glyphs" if args.dataset == "digits" else args.dataset
    elif args.pretrained is None and model != preset["model"]:
        if weights not in open_clip.list_pretrained_tags_by_model(model):
            parser.error(f"--model {model} needs --pretrained: an open_clip tag or a weights file")
    learned_here = model == "tiny" and (args.pretrained or weights) == args.dataset        # it has seen labels
    return {"pretrained": weights, "skip_share": TINY_SHARE if learned_here else 0.0,
            "shots": None if args.pseudo_labels == "copl" else 16}


# ---- Model: a frozen open_clip model with prompts -------------------------------------------------------------------

# Copied from fedcopl.py: Text
class Text(NamedTuple):                 # texts ready for encode_text, the prompts left out
    start: torch.Tensor                 # (1, W) embedding of the start token
    tail: torch.Tensor                  # (C, S, W) embeddings of what follows the prompts: words and end token
    end: torch.Tensor                   # (C,) where in the tail the end token is


# Copied from fedcopl.py: PromptedCLIP
class PromptedCLIP(nn.Module):
    """open_clip's CLIP with a ViT, frozen, its forward passes opened up for prompts and without needless work.

    Exact, up to float rounding, against the plain way (append prompts as tokens, drop their outputs, 77 text tokens):
    - a visual prompt's output is thrown away after each block, so it is only a key and a value for the image tokens;
    - the last image block is computed for the class token alone, the last text block for the end tokens;
    - text attention is causal: what follows the last end token is cut off, and the start token and the prompts, which
      never see the class name, are computed once for all classes;
    - QuickGELU becomes one fused function, its factors part of the frozen weights around it (which changes the model).
    The parameters are read directly: the layout conventions of open_clip's versions make no difference.
    """

    def __init__(self, clip, tokenizer):
        super().__init__()
        self.clip, self.tokenizer = clip.eval().requires_grad_(False), tokenizer
        self.vision, self.words = clip.visual.transformer.resblocks, clip.transformer.resblocks
        for block in (*self.vision, *self.words):
            fuse_quick_gelu(block.mlp)

    @property
    def scale(self):
        return self.clip.logit_scale.exp()

    def text_input(self, texts, prompts, names=None):
        """Tokenise texts (a list of C strings) for encode_text with that many prompts before the first word."""
        clip, limit = self.clip, len(self.clip.positional_embedding) - prompts
        ids = self.tokenizer(texts, context_length=512)                    # room enough: nothing is cut silently
        end = ids.argmax(1)                                                # the end token has the largest id
        for name, size in zip(names or texts, (end + 1).tolist()):
            if size > limit:
                raise common.UserError(f"class {name!r} is too long: {size} tokens with start and end, and "
                                       f"{prompts} prompts, but the text context holds {limit + prompts}; shorten "
                                       "the name, the --template or --text-prompts")
        embedding = clip.token_embedding(ids[:, :int(end.max()) + 1].to(clip.token_embedding.weight.device))
        return Text(embedding[0, :1], embedding[:, 1:], (end - 1).to(embedding.device))

    def encode_text(self, text, prompt=None):
        """Unit-length features (C, D) of a Text with the text prompts (P, W) put between start token and words."""
        clip = self.clip
        before = text.start if prompt is None else torch.cat([text.start, prompt])          # (1 + P, W)
        size, width = len(before), text.tail.shape[1]
        position = clip.positional_embedding[:size + width]
        before, tail = (before + position[:size])[None], text.tail + position[size:]        # (1, 1+P, W), (C, S, W)
        causal = torch.ones(size + width, size + width, dtype=torch.bool, device=tail.device).tril()
        for block in self.words[:-1]:
            tail = residual_block(block, tail, before[0], causal[size:])
            before = residual_block(block, before, None, causal[:size, :size])
        tail = residual_block(self.words[-1], tail, before[0], causal[size:][text.end][:, None, None], text.end)
        return unit_features(clip.ln_final(tail[:, 0]), clip.text_projection)

    def image_tokens(self, images):
        """Normalised images (B, 3, S, S) as the tokens (B, T, W) that enter the first block, class token first."""
        visual = self.clip.visual
        tokens = visual.conv1(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([visual.class_embedding.expand(len(tokens), 1, -1), tokens], 1)
        return visual.ln_pre(tokens + visual.positional_embedding)

    def encode_image(self, images, prompt=None):
        """Unit-length features (B, D) of normalised images (B, 3, S, S); prompt (depth, V, W) for the first blocks."""
        visual, depth = self.clip.visual, 0 if prompt is None or not prompt.shape[1] else len(prompt)
        tokens = self.image_tokens(images)
        first = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
        for i, block in enumerate(self.vision):
            tokens = residual_block(block, tokens, prompt[i] if i < depth else None,
                                    read=first if i == len(self.vision) - 1 else None)
        return unit_features(visual.ln_post(tokens[:, 0]), visual.proj)


# Copied from fedcopl.py: fuse_quick_gelu
@torch.no_grad()
def fuse_quick_gelu(mlp):
    """QuickGELU(x) = x sigmoid(1.702 x) is silu(1.702 x) / 1.702: the same MLP of an open_clip block, with silu."""
    if isinstance(mlp.gelu, QuickGELU):
        mlp.gelu = nn.SiLU()
        for parameter in mlp.c_fc.parameters():
            parameter.mul_(1.702)
        mlp.c_proj.weight.div_(1.702)


# Copied from fedcopl.py: residual_block
def residual_block(block, tokens, shared=None, mask=None, read=None):
    """One open_clip transformer block on tokens (B, T, W), which also attend to `shared` (V, W), the same for all B.

    mask: bool, True where a token may look; its columns are the shared tokens, then the own ones. read (B,): the only
    token whose output is wanted, then (B, 1, W).
    """
    attention, width = block.attn, block.attn.embed_dim
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    normed = block.ln_1(tokens)
    if read is None:
        query, key_value = F.linear(normed, weight, bias).split([width, 2 * width], 2)
    else:
        row = torch.arange(len(tokens), device=tokens.device)
        tokens = tokens[row, read][:, None]
        query = F.linear(normed[row, read][:, None], weight[:width], bias[:width])
        key_value = F.linear(normed, weight[width:], bias[width:])
    if shared is not None:
        shared = F.linear(block.ln_1(shared), weight[width:], bias[width:])                 # (V, 2W)
        key_value = torch.cat([shared.expand(len(tokens), -1, -1), key_value], 1)
    query = query.unflatten(2, (attention.num_heads, -1)).transpose(1, 2)                   # (B, heads, T, W / heads)
    key, value = key_value.unflatten(2, (2, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    tokens = tokens + block.ls_1(attention.out_proj(seen.transpose(1, 2).flatten(2)))
    return tokens + block.ls_2(block.mlp(block.ln_2(tokens)))


# Copied from fedcopl.py: unit_features
def unit_features(pooled, projection):
    """The embedding (n, D) at unit length, in the precision of the weights also under autocast."""
    if isinstance(projection, nn.Linear):
        features, projection = projection(pooled), projection.weight
    else:
        features = pooled if projection is None else pooled @ projection
    return F.normalize(features.to(pooled.dtype if projection is None else projection.dtype), dim=1)


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


# Copied from fedcopl.py: load_clip
def load_clip(model, pretrained):
    """open_model as a PromptedCLIP that gives the same features, the side of its images, (mean, std), a fingerprint."""
    clip, tokenizer, side, stats, fingerprint = open_model(model, pretrained)
    try:
        text = ["a photo of a cat."]
        image = torch.linspace(-1, 1, 3 * side ** 2).view(1, 3, side, side)
        theirs = clip.encode_text(tokenizer(text), normalize=True), clip.encode_image(image, normalize=True)
        prompted = PromptedCLIP(clip, tokenizer)
        ours = prompted.encode_text(prompted.text_input(text, 0)), prompted.encode_image(image)
        same = all(torch.allclose(a, b, rtol=0, atol=1e-3) for a, b in zip(ours, theirs))
    except Exception:                                                      # whatever else a model has or lacks
        same = False
    if not same:
        raise common.UserError(f"--model {model}: prompts need OpenAI's kind of CLIP, a ViT that reads its class "
                               "token and a causal text tower that reads its end token; without prompts, this one "
                               "gives other features than open_clip's own forward pass")
    return prompted, side, stats, fingerprint


# ---- Pseudo-labels, losses, schedule --------------------------------------------------------------------------------

# Copied from fedcopl.py: learning_rate
def learning_rate(base, rnd, epoch, epochs, refresh):
    """The step size of an epoch: one cosine from `base` to almost 0 over the rounds between two refreshes.

    rnd and epoch count from 0. A closed form, so all clients of a round see the same.
    """
    place = (rnd % refresh) * epochs + epoch
    return base * 0.5 * (1 + math.cos(math.pi * place / (epochs * refresh)))


# Copied from fedcopl.py: estimate
def estimate(prob, conf_quantile, entropy_quantile):
    """A client's estimate of its class distribution: predictions (n, C) that pass both filters, counted by class.

    The bounds are quantiles over the client's own images, and both comparisons are strict, so at most half of the
    images pass at 0.5. A quantile of None switches a filter off. Returns the counts (C,) int64 and who passed (n,).
    """
    confidence, label = prob.max(1)
    passed = torch.ones_like(label, dtype=torch.bool)
    if conf_quantile is not None and len(prob):
        passed &= confidence > confidence.quantile(conf_quantile)
    if entropy_quantile is not None and len(prob):
        log_prob = prob.clamp(min=torch.finfo(prob.dtype).tiny).log()      # so that 0 log 0 = 0
        entropy = -(prob * log_prob).sum(1)                                # natural log
        passed &= entropy < entropy.quantile(1 - entropy_quantile)
    return torch.bincount(label[passed], minlength=prob.shape[1]), passed


# Copied from fedcopl.py: allocate
def allocate(counts, n_train, iteration, budget="ceil", unseen="grow", ceiling="integer"):
    """The server's part: how many images of each class each client may train on, (K, C) int64.

    counts (K, C) int64: the uploaded estimates. Each class gets the same budget M, shared among the clients in
    proportion to their counts of it, rounded up. A client that counted none of a class gets none of it.
    """
    clients, classes = counts.shape
    of_class, total = counts.sum(0), counts.sum()                          # U (C,)
    # DIFF-1 M is the total over C; the code rounds it up. Default: rounded up; --budget exact leaves the fraction.
    top, bottom = (-(-total // classes), 1) if budget == "ceil" else (total, classes)
    if ceiling == "float32":
        # DIFF-3 u / U * M in float32 can come out just above a whole number. --ceiling float32: as the code.
        share = counts.float() / of_class.float().clamp(min=1) * (top / bottom)
        capacity = share.ceil().long()
    else:
        capacity = -(-counts * top // (of_class * bottom).clamp(min=1))    # ceil(u / U * M) in integers
    # DIFF-2 a class that nobody predicts has no share by the formula; the code lets one grow. --unseen-classes none: 0.
    grown = growing_share(n_train, classes, clients, iteration) if unseen == "grow" else 0
    return torch.where(of_class > 0, capacity, grown)


# Copied from fedcopl.py: growing_share
def growing_share(n_train, classes, clients, iteration):
    """Images of a class for each client: a quarter of an even share, N / C / K, for each refresh so far, rounded up."""
    return -(-n_train * (iteration + 1) // (4 * classes * clients))


# Copied from fedcopl.py: most_confident
def most_confident(label, score, capacity):
    """Of each class the `capacity` (C,) images with the highest score (n,), the earlier of equal ones: (n,) bool.

    label (n,) int64; -1 is no class.
    """
    order = score.sort(descending=True, stable=True).indices
    among = label[order] + 1                                               # column 0 is no class
    place = F.one_hot(among, len(capacity) + 1).cumsum(0).gather(1, among[:, None])[:, 0]   # 1 is the most confident
    chosen = torch.zeros_like(label, dtype=torch.bool)
    chosen[order] = place <= F.pad(capacity, (1, 0))[among]
    return chosen


# Copied from fedcopl.py: select
def select(prob, capacity):
    """A client's choice among all its images: of each class, by arg-max, the `capacity` (C,) most confident ones.

    prob (n, C). Returns the pseudo-label of each image, -1 where it is not selected, (n,) int64. Of images with equal
    confidence the earlier ones are chosen.
    """
    confidence, label = prob.max(1)
    return torch.where(most_confident(label, confidence, capacity), label, -1)


# Copied from fedcopl.py: candidate_sets
def candidate_sets(prob, intra_quantile, inter_quantile):
    """CPL's candidate classes of a client's images: prob (n, C) -> (n, C) bool, rows without any included.

    Intra-instance: the most probable classes of an image, up to the first whose running sum exceeds a quantile of the
    confidences. Inter-instance: of each class the images at or above a quantile of its probabilities. A candidate
    passes both; one with 1e-7 or less of the kept probability is dropped.
    """
    if not len(prob):
        return torch.zeros_like(prob, dtype=torch.bool)
    ranked, order = prob.sort(dim=1, descending=True, stable=True)
    before = F.pad(ranked.cumsum(1)[:, :-1], (1, 0))                       # the sum of the more probable classes
    intra = torch.zeros_like(prob, dtype=torch.bool)
    intra.scatter_(1, order, before <= prob.max(1).values.quantile(intra_quantile))
    bound = torch.stack([column.quantile(inter_quantile) for column in prob.T])
    kept = prob * (intra & (prob >= bound))
    return kept > 1e-7 * kept.sum(1, keepdim=True)


# Copied from fedcopl.py: select_candidates
def select_candidates(prob, candidate, capacity):
    """CPL's selection: the class for which each image is chosen, -1 where none takes it, (n,) int64.

    Each image asks its most probable candidate first; a class keeps the `capacity` (C,) images of highest probability,
    and whom it turns away asks its next candidate.
    """
    order = prob.masked_fill(~candidate, -1).sort(dim=1, descending=True, stable=True).indices
    order = torch.where(candidate.gather(1, order), order, -1)             # candidates by probability, then -1
    order, asked = F.pad(order, (0, 1), value=-1), torch.zeros(len(prob), 1, dtype=torch.int64, device=prob.device)
    while True:
        label = order.gather(1, asked)
        chosen = most_confident(label[:, 0], prob.gather(1, label.clamp(min=0))[:, 0], capacity)
        turned_away = ~chosen[:, None] & (label >= 0)
        if not turned_away.any():
            return label[:, 0]
        asked += turned_away


# Copied from fedcopl.py: candidate_loss
def candidate_loss(logits, candidate):
    """CPL's `cc` loss: -log of the candidates' joint probability, mean over the batch. With one each: cross-entropy."""
    return -logits.log_softmax(1).masked_fill(~candidate, -math.inf).logsumexp(1).mean()


# Copied from fedcopl.py: drift_diversity
def drift_diversity(moved):
    """sum_k |m_k|^2 / |sum_k m_k|^2 of the clients' updates m (K, ...); 1/K if all are equal, 1 if orthogonal.

    As in Li et al., partial variance reduction, CVPR 2023. None where nothing moved, or the moves cancel.
    """
    moved = moved.flatten(1).cpu().double()
    joint = moved.sum(0).square().sum().item()
    return moved.square().sum().item() / joint if joint > 0 else None


# Copied from fedcopl.py: cosine_distance
def cosine_distance(prompts):
    """Mean over all pairs of clients of 1 - cos between their prompts (K, ...); None with fewer than two."""
    flat = F.normalize(prompts.flatten(1).cpu().double(), dim=1)
    pairs = len(flat) * (len(flat) - 1)
    return (1 - (flat.sum(0).square().sum() - flat.square().sum()) / pairs).item() if pairs and flat.numel() else None


# ---- Client, server, evaluation -------------------------------------------------------------------------------------

# Differs from fedcopl.py: Prompts, which has visual prompts too
class Prompts(NamedTuple):              # what each client starts the next round with: the same for all
    text: torch.Tensor                  # P_t (K, P, W)


SHARED = ("text",)                      # which prompts are sent and averaged


# Differs from fedcopl.py: FederatedData, which has images
class FederatedData(NamedTuple):        # all clients' data; a client reads its own part, and no label
    features: torch.Tensor              # (N, D) unit length, on the device; those of this rank's clients, the rest 0
    test_features: torch.Tensor
    labels: torch.Tensor                # (N,) true labels, on the CPU: they reach the log alone
    test_labels: torch.Tensor
    train: list                         # one index array a client
    test: list


# Differs from fedcopl.py: Upload, which has visual prompts too
class Upload(NamedTuple):               # what client k sends at the end of its round
    text: torch.Tensor                  # P_t,k
    weight: torch.Tensor                # images it trained on, sent once a refresh; 0 without any
    metrics: torch.Tensor               # sum of the losses, number of steps; for the log alone


# Differs from fedcopl.py: predict, which encodes the images
@torch.no_grad()
def predict(clip, features, words):
    """Class probabilities (n, C) at temperature 1 of image features (n, D); words: text features (C, D)."""
    return (clip.scale * features @ words.T).softmax(1)


# Copied from fedcopl.py: Labels
class Labels(NamedTuple):               # of all images, until the next refresh; on the CPU
    pseudo_label: torch.Tensor          # (N,) int64: the class that an image was selected for, -1: not selected
    candidate: torch.Tensor             # (N, C) bool: the classes that the loss accepts; of selected images alone


# Copied from fedcopl.py: asks_zero_shot
def asks_zero_shot(args, iteration):
    """Whether a refresh asks zero-shot CLIP: the first one does, for fpl all do; else each client's own model."""
    return iteration == 0 or args.pseudo_labels == "fpl"


# Copied from fedcopl.py: label_images
def label_images(args, iteration, ranks, classes, probs, data):
    """The refresh, from the class probabilities (n, C) of this rank's clients: their Labels, on all ranks.

    copl: estimation on the clients, allocation on the server, selection on the clients, in that order. Else each client
    selects by itself, up to --shots images of a class. Also returns the LABEL_COLUMNS of each class, for the log.
    """
    largest, mine = max(map(len, data.train)), ranks.mine(range(args.clients))
    counts = torch.zeros(args.clients, classes, dtype=torch.int64)
    if args.pseudo_labels == "copl":
        capacity = ranks.gather([estimate(prob, args.conf_quantile if args.conf_filter else None,
                                          args.entropy_quantile if args.entropy_filter else None)[0].cpu()
                                 for prob in probs], args.clients)
        if ranks.first:
            capacity = counts = torch.stack(capacity)
            if args.allocation:
                capacity = allocate(counts, len(data.labels), iteration, args.budget, args.unseen_classes,
                                    args.ceiling)
        capacity = ranks.broadcast(capacity if ranks.first else counts)
    else:
        grown = growing_share(len(data.labels), classes, args.clients, iteration)
        capacity = counts + (grown if args.shots == "grow" else args.shots)
    answers = []
    for client, prob in zip(mine, probs):
        room = capacity[client].to(prob.device)
        if args.pseudo_labels == "cpl":
            candidate = candidate_sets(prob, args.intra_quantile, args.inter_quantile)
            chosen = select_candidates(prob, candidate, room)
        else:
            chosen = select(prob, room)
            candidate = F.one_hot(chosen.clamp(min=0), classes).bool()
        blank = largest - len(prob)                                        # all clients' answers have one shape
        answers.append({"predicted": F.pad(prob.argmax(1), (0, blank)).cpu(),     # for the log
                        "pseudo_label": F.pad(chosen, (0, blank)).cpu(),
                        "candidate": F.pad(candidate & (chosen[:, None] >= 0), (0, 0, 0, blank)).cpu()})
    answers = ranks.gather(answers, args.clients)
    labels = Labels(torch.full((len(data.labels),), -1), torch.zeros(len(data.labels), classes, dtype=torch.bool))
    table = torch.zeros(len(LABEL_COLUMNS), classes, dtype=torch.int64)
    if ranks.first:
        predicted = torch.full_like(labels.pseudo_label, -1)
        for own, answer in zip(data.train, answers):
            n = len(own)
            predicted[own], labels.pseudo_label[own] = answer["predicted"][:n], answer["pseudo_label"][:n]
            labels.candidate[own] = answer["candidate"][:n]
        # For the log: the only place where true labels of training images are read
        chosen, truth = labels.pseudo_label, data.labels
        covered = labels.candidate.gather(1, truth[:, None])[:, 0]
        parts = (truth, predicted, predicted[predicted == truth], chosen[chosen >= 0], truth[chosen == truth],
                 truth[covered], labels.candidate.nonzero()[:, 1])
        by_class = [torch.bincount(part, minlength=classes) for part in parts]
        table = torch.stack([*by_class[:3], counts.sum(0), capacity.sum(0), *by_class[3:]])
    return ranks.broadcast(labels), ranks.broadcast(table)


LABEL_COLUMNS = ("images", "predicted", "predicted_correct", "estimated", "capacity", "selected", "selected_correct",
                 "candidates_correct", "candidates")


# Differs from fedcopl.py: client_update, which trains visual prompts too
def client_update(args, rnd, client, clip, text, data, prompts, labels, learned, optimizer):
    """Local training of client k from the prompt that it received. Returns its Upload. rnd counts from 0.

    learned: this process's trainable prompt, which is overwritten; labels: all clients' Labels.
    """
    for parameter, value in zip(learned, prompts):
        parameter.data.copy_(value[client])
    optimizer.state.clear()
    device, rng = learned.text.device, common.stream(args.seed, "client", rnd, client)
    own = data.train[client]
    own = own[labels.pseudo_label[own].numpy() >= 0]
    loss_sum, steps = torch.zeros((), device=device), 0
    for epoch in range(args.local_epochs if len(own) else 0):
        optimizer.param_groups[0]["lr"] = learning_rate(args.lr, rnd, epoch, args.local_epochs, args.refresh)
        order = own[rng.permutation(len(own))]
        features = data.features[common.to_device(order, device)]
        target = common.to_device(labels.candidate[order].numpy(), device)
        for batch, candidate in zip(features.split(args.batch_size), target.split(args.batch_size)):
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                words = clip.encode_text(text, learned.text)
            loss = candidate_loss(clip.scale * batch @ words.T, candidate)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
            steps += 1
    return Upload(*(value.detach().clone() for value in learned), torch.tensor(float(len(own))),
                  torch.stack([loss_sum, torch.full_like(loss_sum, steps)]))


# Copied from fedcopl.py: server_update
def server_update(received, uploads, shared):
    """Average the prompts that `shared` names, weighted by selected images; the others stay with their client."""
    weights = torch.stack([upload.weight for upload in uploads]).double()
    result = []
    for name, old in received._asdict().items():
        new = torch.stack([getattr(upload, name) for upload in uploads])
        if name in shared:
            average = old[0]                                               # nobody trained: keep what there was
            if weights.sum() > 0:
                average = sum(weight * own for weight, own in zip((weights / weights.sum()).tolist(), new))
            new = average.expand_as(old).clone()
        result.append(new)
    return type(received)(*result)


# Differs from fedcopl.py: evaluate, which encodes the images
def evaluate(client, clip, data, words):
    """The model on client k's own test images: correct answers and images, (2,) int64."""
    own = data.test[client]
    answer = predict(clip, data.test_features[own], words).argmax(1).cpu()
    return torch.tensor([int((answer == data.test_labels[own]).sum()), len(own)])


# Copied from fedcopl.py: accuracies
def accuracies(scores):
    """From the clients' (correct, images): mean over the clients that have test images, and of all images, in %."""
    correct, images = torch.stack(scores).double().unbind(1)
    return 100 * (correct / images)[images > 0].mean().item(), 100 * (correct.sum() / images.sum()).item()


# ---- Main -----------------------------------------------------------------------------------------------------------

# Differs from fedcopl.py: prepare_data, which keeps the images
def prepare_data(args, clip, side):
    """Load and split the data: Dataset, index arrays, class names, zero-shot and prompted Text, facts for config.json.

    All that can be refused is refused before the images are decoded.
    """
    source = common.load_dataset(args.dataset, args.data_dir, side, args.train_subset, True, args.skip_share)
    names, labels = source.class_names, (source.train_labels, source.test_labels)
    zero_shot = clip.text_input([args.template.replace("{}", name) for name in names], 0, names)
    text = clip.text_input([f"{name}." for name in names], args.text_prompts, names)
    # DIFF-6 the published split does not depend on the seed of a run; --split-seed gives others.
    # DIFF-5 "quantity" deals out consecutive images of a class, as published; --shuffle-classes: in random order.
    parts = common.clip_partition(*labels, args.clients, args.beta, args.partition, args.split_seed,
                                  args.shuffle_classes)
    source = common.cache_images(source)
    facts = {"data_source": source.source, "data_fingerprint": common.fingerprint(source), "classes": names}
    return source, parts, names, zero_shot, text, facts


@torch.no_grad()
def encode_data(clip, source, parts, clients, side, stats, device):
    """The image features of these clients as FederatedData: once for the whole run, as no prompt changes them."""
    encoded, width = [], clip.encode_image(torch.zeros(1, 3, side, side, device=device)).shape[1]
    for images, owned in zip((source.train_images, source.test_images), parts):
        features = torch.zeros(len(images), width, device=device)
        for client in clients:
            for batch in torch.from_numpy(owned[client]).split(LABEL_BATCH):
                pixels = common.normalise(common.to_device(images[batch], device), *stats)
                features[batch.to(device)] = clip.encode_image(pixels)
        encoded.append(features)
    return FederatedData(*encoded, source.train_labels, source.test_labels, *parts)


# Copied from fedcopl.py: prepare_model
def prepare_model(args):
    """The model of --model and --pretrained; the miniature is made first and is then a model file like any other."""
    if args.model != "tiny":
        return load_clip(args.model, args.pretrained)
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
    return load_clip(*map(str, tiny_clip.make(args.pretrained, args.data_dir, share=TINY_SHARE, device="cpu")))


def main(argv=None):
    args = parse_args(argv)
    ranks = common.Ranks(args)
    device = ranks.device
    torch.backends.cudnn.allow_tf32 = False                                # float32 is what labels are made in
    # files may move: what is in them has to be the same
    run = common.Run(args, ranks, ("model", "pretrained") if os.path.isfile(args.pretrained) else ())
    clip, side, stats, model_fingerprint = ranks.first_then_others(lambda: prepare_model(args))
    clip, context = clip.to(device), len(clip.clip.positional_embedding)
    if args.text_prompts > context - 3:                                    # start, one token of a name, end
        raise common.UserError(f"--text-prompts {args.text_prompts}: the text context holds {context} tokens")
    source, parts, class_names, zero_shot, text, facts = ranks.first_then_others(
        lambda: prepare_data(args, clip, side))
    mine = ranks.mine(range(args.clients))
    data = encode_data(clip, source, parts, mine, side, stats, device)
    del source                                                             # from here on features are enough
    classes, zero_shot = len(class_names), clip.encode_text(zero_shot)

    shape = args.text_prompts, text.tail.shape[2]
    first = common.stream(args.seed, "init", "text").normal(0, args.prompt_std, shape).astype(np.float32)
    prompts = Prompts(common.to_device(first, device).repeat(args.clients, 1, 1))
    learned = Prompts(*(nn.Parameter(value[0].clone()) for value in prompts))
    optimizer = torch.optim.SGD(learned, 0.1, args.momentum, weight_decay=args.weight_decay)
    labels, tables = None, torch.zeros(0, len(LABEL_COLUMNS), classes).long()
    if run.checkpoint:
        prompts, labels = run.restore(prompts), Labels(*map(run.checkpoint.get, Labels._fields))
        tables, run.extra = run.checkpoint["tables"], run.checkpoint["zero_shot"]
    sent = 4 * sum(getattr(prompts, name)[0].numel() for name in SHARED)

    owned = {"train": (data.labels, data.train), "test": (data.test_labels, data.test)}
    run.start(class_names, owned, **facts, model_fingerprint=model_fingerprint, image_side=side,
              trained_numbers=sum(value.numel() for value in learned))
    if not run.extra:
        scores = ranks.gather([evaluate(client, clip, data, zero_shot) for client in mine], args.clients)
        if ranks.first:
            run.extra = dict(zip(("zeroshot_client_mean_pct", "zeroshot_pooled_pct"), accuracies(scores)))
    if ranks.first:
        print(f"zero-shot {args.template!r}: {run.extra['zeroshot_client_mean_pct']:.2f} % mean over clients, "
              f"{run.extra['zeroshot_pooled_pct']:.2f} % of all test images")
    for rnd in run.rounds():
        rnd -= 1                                                           # schedule, streams and refreshes begin at 0
        if rnd % args.refresh == 0:
            iteration = rnd // args.refresh
            with torch.no_grad():
                words = zero_shot if asks_zero_shot(args, iteration) else clip.encode_text(text, prompts.text[0])
            probs = [predict(clip, data.features[data.train[client]], words) for client in mine]
            labels, table = label_images(args, iteration, ranks, classes, probs, data)
            tables = torch.cat([tables, table[None]])
        uploads = ranks.gather([client_update(args, rnd, client, clip, text, data, prompts, labels, learned,
                                              optimizer) for client in mine], args.clients)
        before = prompts
        prompts = ranks.broadcast(server_update(prompts, uploads, SHARED) if ranks.first else prompts)
        with torch.no_grad():
            words = clip.encode_text(text, prompts.text[0])
        scores = ranks.gather([evaluate(client, clip, data, words) for client in mine], args.clients)
        if ranks.first:
            row = round_row(args, rnd, accuracies(scores), uploads, before, tables[-1], sent)
            run.write_table("pseudo_labels.csv", label_rows(args, tables, class_names))
            run.save(row, prompts._asdict() | labels._asdict() | {"tables": tables, "zero_shot": run.extra})


# Copied from fedcopl.py: round_row
def round_row(args, rnd, accuracy, uploads, before, table, sent):
    """One row of rounds.csv; None where a value does not exist in this round."""
    table = dict(zip(LABEL_COLUMNS, table))
    images, selected = table["images"].sum().item(), table["selected"].sum().item()
    loss_sum, steps = torch.stack([upload.metrics for upload in uploads]).cpu().double().sum(0).tolist()
    active = [k for k, upload in enumerate(uploads) if upload.weight > 0]
    refreshed = rnd % args.refresh == 0
    gap = None
    if selected:                                                           # total variation from the true classes
        gap = 50 * (table["selected"] / selected - table["images"] / images).abs().sum().item()
    row = {"test_acc_pct": accuracy[0], "client_acc_mean_pct": accuracy[0], "pooled_acc_pct": accuracy[1],
           "loss_unsup": loss_sum / steps if steps else None, "pl_used_pct": 100 * selected / images,
           "pl_acc_pct": 100 * table["selected_correct"].sum().item() / selected if selected else None,
           "pl_all_acc_pct": 100 * table["predicted_correct"].sum().item() / images,
           "pl_gap_pct": gap, "selected": selected,
           "set_recall_pct": 100 * table["candidates_correct"].sum().item() / selected if selected else None,
           "set_size": table["candidates"].sum().item() / selected if selected else None}
    for name in Prompts._fields:
        now = [getattr(uploads[k], name) for k in active]
        old = getattr(before, name)
        row[f"drift_{name}"] = drift_diversity(torch.stack([a - old[k] for a, k in zip(now, active)])) if now else None
        row[f"distance_{name}"] = cosine_distance(torch.stack(now)) if now else None
    # a refresh costs each client its counts up, its capacities down and its number of selected images up
    cooperate = args.pseudo_labels == "copl" and args.allocation
    exchanged = 4 * len(table["images"]) * args.clients if refreshed and cooperate else 0
    weights_up = 4 * args.clients if refreshed and sent else 0
    return row | {"clients_trained": len(active), "clients_empty": args.clients - len(active),
                  "bytes_up": sent * len(active) + exchanged + weights_up,
                  "bytes_down": sent * args.clients + exchanged}


# Copied from fedcopl.py: label_rows
def label_rows(args, tables, class_names):
    """Rows of pseudo_labels.csv: each refresh, class by class, what was predicted, allowed and selected."""
    rows = [{"round": 1 + number * args.refresh, "class": name} | dict(zip(LABEL_COLUMNS, values))
            for number, table in enumerate(tables) for name, values in zip(class_names, table.T.tolist())]
    return rows if args.pseudo_labels == "copl" else [row | {"estimated": None} for row in rows]


if __name__ == "__main__":
    common.launch(main)
