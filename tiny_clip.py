"""A miniature CLIP, pre-trained on the spot: useful but biased on the target images, and nothing is downloaded.

Not a method: it makes the starting point of methods that tune prompts. Architecture: CLIP, ICML 2021 (arXiv
2103.00020), as open_clip's own CLIP class at 0.6 million weights, plus the stock table of 49,408 tokens.

    python tiny_clip.py                                 # drawn glyphs 0..9 for the digits, a minute on one CPU core
    python tiny_clip.py --source cifar10                # a fifth of the training images of a data set
    python tiny_clip.py --source my_images              # ... of a folder with {train,test}/<class>/* images

Expected zero-shot accuracy: on the digits 68.5, 67.7 and 71.7 % (seeds 0 to 2; all 1,797 images, none of them seen), in
57 s of one CPU core; 1 and 3 are predicted 1.3 to 1.6 times, 5 and 8 0.6 to 0.8 times as often as they occur. With 16
random vectors in place of "a photo of a": 66 to 72 %. On CIFAR-10's test images 42.4 and 43.6 % (seeds 0 and 1), in
102 s of one core; with seed 0 a class of 1,000 images is predicted 51 times, another 1,865 times.

It writes <data-dir>/tiny_clip/tiny_<source>_s<seed>_<hash of the recipe>.json and .pt, which stock open_clip reads:
    open_clip.add_model_config(json_path)
    model, tokenizer = open_clip.create_model(stem, pretrained=pt_path), open_clip.get_tokenizer(stem)
From Python: `make("glyphs", data_dir="data", seed=0)` returns both paths, at once if they exist.

Letters in shapes: B pairs of a batch, L tokens of a text, D = 64 features.
"""

import argparse
import hashlib
import json
import math
import os
import time
from pathlib import Path

import matplotlib
import numpy as np
import open_clip
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

import common

RECIPE = 1                              # to be raised when the code below learns something else: old files stay unused
SIDE = 32
CONFIG = {                              # open_clip's model JSON: 16 patches of 8 x 8, 4 heads in both towers
    "embed_dim": 64,
    "quick_gelu": False,
    "vision_cfg": {"image_size": SIDE, "patch_size": 8, "width": 96, "head_width": 24, "layers": 4},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 2},
}
FACES = """DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSans-BoldOblique DejaVuSerif DejaVuSerif-Bold
    DejaVuSerif-Italic DejaVuSerif-BoldItalic STIXGeneral STIXGeneralBol STIXGeneralItalic STIXGeneralBolIta
    cmb10 cmr10 cmss10 cmti10 cmtt10""".split()         # faces of matplotlib whose digits look like written ones
TEMPLATES = ("a photo of a {}", "a photo of the {}", "a blurry photo of a {}", "a bad photo of a {}", "a {}", "the {}",
             "a picture of a {}", "an image of a {}", "a small image of the {}", "a close-up of a {}", "this is a {}",
             "{}")
FILLERS = """we saw red blue old new big long dark light one my your her his very some any this that over under near
    from with and or but when where then there here today now never always house tree street water time day night
    good bad left right up down work play read write music paper stone glass green white round sharp soft""".split()
CAPTIONS = 200                          # different captions of each class


# ---- Captions -------------------------------------------------------------------------------------------------------

def make_captions(class_names, rng):
    """CAPTIONS texts for each class. Half put random words before its name, which so starts at position 1 .. 20.

    A learned prompt is 16 vectors, then the name: the text tower must find the name wherever it stands.
    """
    texts = []
    for name in class_names:
        for i in range(CAPTIONS):
            if i % 2:
                text = TEMPLATES[rng.integers(len(TEMPLATES))].format(name)
            else:
                text = " ".join([*rng.choice(FILLERS, rng.integers(20)), name])
            texts.append(text + "." * int(rng.integers(2)))
    return texts


def encode_text(model, tokens):
    """model.encode_text of texts cut to L < 77 tokens. Attention is causal: what follows the end token is not seen."""
    length = tokens.shape[1]
    x = model.token_embedding(tokens) + model.positional_embedding[:length]                     # (B, L, 64)
    x = model.ln_final(model.transformer(x, attn_mask=model.attn_mask[:length, :length]))
    end = tokens.argmax(1)                              # the end token has the largest id
    return x[torch.arange(len(x), device=x.device), end] @ model.text_projection                # (B, D)


# ---- Images ---------------------------------------------------------------------------------------------------------

def draw_digits():
    """The digits in all faces, stretched to 64 x 64 pixels, without and with a bar in the seven: (34, 10, 64, 64)."""
    folder, glyphs = Path(matplotlib.get_data_path(), "fonts", "ttf"), []
    for face in FACES:
        font = ImageFont.truetype(str(folder / f"{face}.ttf"), 80, layout_engine=ImageFont.Layout.BASIC)
        for digit in common.DIGITS:
            image = Image.new("L", (160, 160))
            ImageDraw.Draw(image).text((40, 120), digit, fill=255, font=font, anchor="ls")
            glyphs.append(np.asarray(image.crop(image.getbbox()).resize((64, 64), Image.Resampling.BILINEAR)))
    plain = torch.from_numpy(np.stack(glyphs)).view(len(FACES), 10, 64, 64) / 255
    barred = plain.clone()
    barred[:, 7, 28:36, 12:52] = 1
    return torch.cat([plain, barred])


def warp(glyphs, rng):
    """Turn, bend, shear and squeeze glyphs; reduce 9 in 10 to 8 x 8 and enlarge them, as the digits were scanned.

    (B, 64, 64) in 0 .. 1 -> (B, 3, 32, 32) uint8, ink 255. The grid says where in the glyph each pixel comes from.
    """
    def draw(low, high):                                # one number a glyph
        return torch.from_numpy(rng.uniform(low, high, len(glyphs)).astype(np.float32))[:, None, None]
    line = torch.linspace(-1, 1, 64)
    y, x = torch.meshgrid(line, line, indexing="ij")                                            # (64, 64)
    angle = draw(-12, 12) * (math.pi / 180)
    x, y = x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()                 # (B, 64, 64)
    x = x + draw(-0.2, 0.2) * (math.pi * y * draw(0.5, 1) + draw(0, 2 * math.pi)).sin()
    y = y + draw(-0.2, 0.2) * (math.pi * x * draw(0.5, 1) + draw(0, 2 * math.pi)).sin()
    height, aspect, shear = draw(29 / 32, 1), draw(0.45, 0.85), draw(-0.35, 0.35)
    grid = torch.stack([(x + shear * y) / (height * aspect), y / height], -1)
    large = F.grid_sample(glyphs[:, None], grid, align_corners=True)
    coarse = F.interpolate(F.avg_pool2d(large, 8), (SIDE, SIDE), mode="bicubic", antialias=True)
    image = torch.where(draw(0, 1)[..., None] < 0.9, coarse, F.avg_pool2d(large, 2))
    image = image / image.amax((1, 2, 3), keepdim=True)                                         # thin strokes faded
    return (image.clamp(0, 1) * 255).round().byte().expand(-1, 3, -1, -1)


def glyph_batches():
    """A function (B, rng) -> B fresh glyphs and their labels."""
    glyphs = draw_digits()

    def batch(n, rng):
        labels = torch.from_numpy(rng.integers(10, size=n))
        face = torch.from_numpy(rng.integers(len(glyphs), size=n))
        return warp(glyphs[face, labels], rng), labels
    return batch


def biased_part(labels, share, rng):
    """Of each class's first share a part: all of one random class, a tenth of another, evenly in between."""
    parts = rng.permutation(np.linspace(0.1, 1, int(labels.max()) + 1))
    members = [np.flatnonzero(np.asarray(labels) == label) for label in range(len(parts))]
    members = [own[:math.ceil(share * len(own) - 1e-9)] for own in members]      # what common.chosen_images leaves out
    return np.concatenate([own[:max(1, round(part * len(own)))] for own, part in zip(members, parts)])


def image_batches(images, labels, share, flip, rng):
    """A function (B, rng) -> B shifted images of an unbalanced part of the data, and their labels.

    Of one random class nine images in ten are blurred, of another none: sharp images then look less like the former.
    """
    index = torch.from_numpy(biased_part(labels, share, rng))
    images, labels = images[index], labels[index]
    blur = rng.permutation(np.linspace(0, 0.9, int(labels.max()) + 1))
    blurred = torch.from_numpy(rng.random(len(index)) < blur[labels])
    small = F.interpolate(images[blurred], (SIDE // 2, SIDE // 2), mode="bilinear", antialias=True)
    images[blurred] = F.interpolate(small, (SIDE, SIDE), mode="bilinear", antialias=True)

    def batch(n, rng):
        chosen = torch.from_numpy(rng.integers(len(images), size=n))
        draws = torch.from_numpy(rng.random((n, common.WEAK_DRAWS), np.float32))
        return common.weak_view(images[chosen], draws, flip), labels[chosen]
    return batch


def normalise(images):
    """uint8 -> what CLIP's vision tower takes."""
    return common.normalise(images, open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)


# ---- Pre-training ---------------------------------------------------------------------------------------------------

def contrastive_loss(image_features, text_features, labels, scale):
    """CLIP's symmetric loss; the captions of all images of a class are positives of each other's images alike.

    With one positive an image's caption would have to be told from other captions of the same class: noise, here.
    """
    logits = scale * F.normalize(image_features, dim=1) @ F.normalize(text_features, dim=1).T   # (B, D) @ (D, B)
    same = (labels[:, None] == labels).float()                                                  # (B, B), symmetric
    target = same / same.sum(1, keepdim=True)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def pretrain(class_names, next_batch, steps, batch_size, lr, seed, device):
    """A CLIP of CONFIG trained on captioned images; next_batch(B, rng) -> uint8 images, labels. Its state dict."""
    with torch.random.fork_rng(devices=[]):             # the caller's random numbers are none of our business
        torch.manual_seed(int(common.stream(seed, "tiny init").integers(2 ** 31)))
        model = open_clip.CLIP(**CONFIG)
    tokens = open_clip.SimpleTokenizer()(make_captions(class_names, common.stream(seed, "tiny captions")))
    tokens = tokens[:, :int(tokens.argmax(1).max()) + 1]

    # The optimiser would walk over 49,408 rows each step. The rows in use move to a small table, in the same order, so
    # that the end token keeps the largest id; the others stay as they were initialised.
    used, tokens = tokens.unique(return_inverse=True)
    tokens = tokens.view(len(class_names), CAPTIONS, -1).to(device)
    full_table = model.token_embedding
    model.token_embedding = nn.Embedding.from_pretrained(full_table.weight[used].detach(), freeze=False)

    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    rng, start = common.stream(seed, "tiny batches"), time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:            # up over the first 5 %, then down a cosine
            group["lr"] = lr * min((step + 1) / (0.05 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))
        images, labels = (part.to(device) for part in next_batch(batch_size, rng))
        captions = tokens[labels, torch.from_numpy(rng.integers(CAPTIONS, size=batch_size)).to(device)]
        loss = contrastive_loss(model.encode_image(normalise(images)), encode_text(model, captions), labels,
                                model.logit_scale.exp())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps} | loss {loss.item():.2f} | {time.perf_counter() - start:.0f} s", flush=True)

    model.cpu()
    with torch.no_grad():
        full_table.weight[used] = model.token_embedding.weight
    model.token_embedding = full_table
    return model.state_dict()


# ---- Files ----------------------------------------------------------------------------------------------------------

def find_source(source, data_dir):
    """What --source names: "glyphs", or a data set and the folder to read it from."""
    source = str(source)
    name = common.squeeze(source) if Path(source).name == source else ""          # ./digits is a folder, digits is not
    if name == "glyphs":
        return "glyphs", None
    if name in common.DATASETS:
        return name, Path(data_dir)
    if source and Path(source).expanduser().is_dir():
        return "folder", Path(source).expanduser()
    raise common.UserError(f"--source {source}: neither glyphs nor a data set ({', '.join(common.DATASETS)}) "
                           "nor a folder that exists")


def load(source, data_dir="data"):
    """The images on which the source's model is meant to be used, 32 x 32: the digits for glyphs, else its own."""
    name, folder = find_source(source, data_dir)
    data = common.load_dataset("digits" if name == "glyphs" else name, folder or data_dir, SIDE, clip=True)
    return common.cache_images(data, math.inf)


def make(source="glyphs", data_dir="data", seed=0, share=0.2, steps=None, batch_size=128, lr=1e-3, device="auto",
         overwrite=False, data=None):
    """The paths of the model's config and weights. If both exist they are returned at once, else they are made.

    steps: default 300 for glyphs, 600 for images. data: what load() gives, if the caller has it.
    """
    name, images_at = find_source(source, data_dir)
    device = common.choose_device(device)
    steps = steps or (300 if name == "glyphs" else 600)
    recipe = [RECIPE, CONFIG, FACES, TEMPLATES, FILLERS, CAPTIONS, steps, batch_size, lr]
    if name != "glyphs":
        recipe += [share, str(images_at.resolve()) if name == "folder" else ""]
    short_hash = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:8]
    folder = Path(data_dir).expanduser() / "tiny_clip"
    config_path, weights_path = (folder / f"tiny_{name}_s{seed}_{short_hash}{end}" for end in (".json", ".pt"))
    if config_path.is_file() and weights_path.is_file() and not overwrite:
        return config_path, weights_path

    common.check_writable(weights_path, f"--data-dir {data_dir}")
    if name == "glyphs":
        class_names, next_batch = common.DIGITS, glyph_batches()
    else:
        data = data or load(source, data_dir)
        class_names = data.class_names
        next_batch = image_batches(data.train_images, data.train_labels, share, name not in ("digits", "svhn"),
                                   common.stream(seed, "tiny part"))
    print(f"pre-training {config_path.stem}: {steps} steps of {batch_size} on {common.environment(device)['device']}",
          flush=True)
    weights = pretrain(class_names, next_batch, steps, batch_size, lr, seed, device)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(weights_path, lambda file: torch.save(weights, file))
        write(config_path, lambda file: file.write(json.dumps(CONFIG, indent=4).encode()))
    except OSError as error:
        raise common.UserError(f"cannot write to {folder} ({common.one_line(error)})") from None
    print(f"wrote {weights_path} ({weights_path.stat().st_size / 1e6:.0f} MB, most of it the stock token table)")
    return config_path, weights_path


def write(path, save):
    """save(temporary file), then rename: path is complete or not there, whenever the process ends."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            save(file)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@torch.no_grad()
def zero_shot(config_path, weights_path, images, class_names, device="cpu"):
    """Stock open_clip's prediction for each image: the class whose "a photo of a {}." is nearest."""
    open_clip.add_model_config(config_path)
    model = open_clip.create_model(config_path.stem, pretrained=str(weights_path), device=device).eval()
    tokens = open_clip.get_tokenizer(config_path.stem)([f"a photo of a {name}." for name in class_names])
    text = model.encode_text(tokens.to(device), normalize=True)                                 # (C, D)
    return torch.cat([(model.encode_image(normalise(chunk.to(device)), normalize=True) @ text.T).argmax(1).cpu()
                      for chunk in images.split(500)])


class Parser(argparse.ArgumentParser):
    """A mistake is a UserError: one line."""

    def error(self, message):
        raise common.UserError(message)


def parse_args(argv=None):
    parser = Parser(description="Pre-train a miniature CLIP and try it zero-shot.", allow_abbrev=False,
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--source", default="glyphs", help=f"what to learn from: glyphs, a data set ({', '.join(common.DATASETS)}) or "
        "a folder with {train,test}/<class>/* images (other images in it later: --overwrite)")
    add("--data-dir", default="data", help="where data sets are, and tiny_clip/ with the result")
    add("--share", type=common.number(float, 1e-6, 1), default=0.2,
        help="share of each class's training images to learn from, the first ones; glyphs: not used")
    add("--steps", type=common.number(int, 1), help="batches to learn from; None: 300 for glyphs, 600 for images")
    add("--batch-size", type=common.number(int, 2), default=128, help="pairs of a batch")
    add("--lr", type=common.number(float, 1e-12), default=1e-3, help="largest step size of AdamW")
    add("--seed", type=common.number(int, 0, 2 ** 31 - 1), default=0, help="of all random numbers")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    add("--overwrite", action=common.switch, default=False, help="make it again if it exists")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    data = load(args.source, args.data_dir)
    config_path, weights_path = make(**vars(args), data=data)
    images, labels = data.test_images, data.test_labels
    if common.squeeze(args.source) == "glyphs":         # it has seen none of the digits
        images, labels = torch.cat([data.train_images, images]), torch.cat([data.train_labels, labels])
    predicted = zero_shot(config_path, weights_path, images, data.class_names, common.choose_device(args.device))
    print(f"config {config_path}\nweights {weights_path}")
    print(f"zero-shot accuracy {(predicted == labels).float().mean() * 100:.1f} % of {len(labels)} images")
    print("class: predicted / true")
    counts = [part.bincount(minlength=len(data.class_names)).tolist() for part in (predicted, labels)]
    for name, guesses, own in zip(data.class_names, *counts):
        print(f"  {name}: {guesses} / {own}")


if __name__ == "__main__":
    common.launch(main)
