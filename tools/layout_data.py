"""Lay out a data set that torchvision does not read as image folders: <data-dir>/<name>/{train,test}/<class>/<image>.

    python tools/layout_data.py cub --from CUB_200_2011 --data-dir data

Needed once. Classes and images are counted before anything is written. The images become hard links (the same file as
the original, no space: edit neither) or, on another file system, copies. The folder appears when it is complete; a
killed run leaves a hidden .<name>.*.part, which the next run removes. Where to get the originals, and their splits:

cub       CUB_200_2011.tgz of https://data.caltech.edu/records/65de6-vp158; train_test_split.txt is official.
ucf101    https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md#ucf101: UCF-101-midframes/<Class_Name>/*.jpg and,
          beside that folder, split_zhou_UCF101.json, CoOp's split without its val, unless --list names another place
          or, for the official fold 1, the folder with trainlist01.txt and testlist01.txt.
resisc45  https://huggingface.co/datasets/torchgeo/resisc45: NWPU-RESISC45/<class>/*.jpg; no split is official. With
          train.json, val.json, test.json there or one level above (resisc45_clip of
          https://github.com/Computer-Vision-in-the-Wild/DataDownload) train and val together are train. Without them
          every fifth image of a class is train: as many, but not the same ones.
cinic10   https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz; train and test, valid is unused.
"""

import argparse
import json
import os
import re
import secrets
import shlex
import shutil
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path

from tqdm import tqdm

COUNTS = {                  # data set -> rule of its split -> classes, train images, test images, as published
    "cub": {"train_test_split.txt": (200, 5994, 5794)},
    "ucf101": {"split_zhou_UCF101.json": (101, 7639, 3783), "trainlist01.txt, testlist01.txt": (101, 9537, 3783)},
    "resisc45": {"train.json with val.json, test.json": (45, 6300, 25200),
                 "every fifth image of a class is train": (45, 6300, 25200)},
    "cinic10": {"train and test, valid unused": (10, 90000, 90000)}}
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")     # ImageFolder's


class UserError(Exception):
    """A mistake of the user, said in one line."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message)


def read(path, parse):
    """parse(path); whatever goes wrong becomes one line that names the path: parsers raise all kinds of errors."""
    try:
        return parse(path)
    except Exception as error:
        raise UserError(f"cannot read {path} ({type(error).__name__}: {error})") from error


def visible(folder):
    """What a folder holds, by name, without .DS_Store, ._image.jpg, .ipynb_checkpoints and __MACOSX."""
    return [folder / name for name in sorted(read(folder, os.listdir)) if not name.startswith((".", "__MACOSX"))]


def images_of(root):
    """Every image root/<class>/<file>, by class and file name."""
    return [path for folder in visible(root) if folder.is_dir() for path in visible(folder)
            if path.suffix.lower() in IMAGE_ENDINGS and path.is_file()]


def find(source, *names):
    """The folder that holds one of these: --from itself, a folder in it, or the one above it."""
    for place in (source, *(visible(source) if source.is_dir() else ()), source.parent):
        if any(os.path.exists(place / name) for name in names):
            return place
    raise UserError(f"--from {source}: expected a folder with {' or '.join(names)}, found none, nor one level off")


def class_and_file(entry):
    """The end of a path in a list: 'x/class/image.jpg', or 'train.zip@class/image.jpg' with an archive before it."""
    return ("", *re.split(r"[/\\@]", entry))[-2:]


def locate(list_file, entries, root):
    """The paths root/<class>/<file> of the images that a list names, all of which must be there."""
    def key(entry):         # HandstandPushups/v_HandStandPushups_g01_c01.avi is Handstand_Pushups/v_HandStand....jpg
        folder, file = class_and_file(entry)
        return re.sub(r"[\W_]+", "", folder.lower()), Path(file).stem.lower()
    there = {}
    for path in images_of(root):
        other = there.setdefault(key(f"{path.parent.name}/{path.name}"), path)
        if other != path:
            raise UserError(f"{list_file}: cannot tell {other} from {path}; remove one of them")
    missing = [entry for entry in entries if key(entry) not in there]
    if missing:
        raise UserError(f"{list_file}: expected its {len(entries)} images in {root}, {len(missing)} not found, "
                        f"the first is {missing[0]}")
    return [there[key(entry)] for entry in entries]


# Each reader returns the rule of the split (a key of COUNTS), then for train and for test a list of (class, path).

def read_cub(source, _):
    """Four lists with lines of an id and a value; ids start at 1."""
    root = find(source, "images.txt")
    files = [root / name for name in ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")]
    images, label, in_train, class_name = (
        read(file, lambda path: dict(line.split() for line in path.read_text("utf-8").splitlines())) for file in files)
    for file, table, ids in zip(files[1:], (label, in_train, class_name), (images, images, label.values())):
        if absent := set(ids) - table.keys():
            raise UserError(f"{file}: expected a line for each id in the other lists, found none for {min(absent)}")
    found = list(zip(images, locate(files[0], images.values(), root / "images")))
    return "train_test_split.txt", *([(class_name[label[i]], path) for i, path in found if in_train[i] == wanted]
                                     for wanted in ("1", "0"))


def read_ucf101(source, chosen):
    """Classes are named as CoOp's frame folders are, Apply_Eye_Makeup, whichever list is used."""
    root = find(source, "Apply_Eye_Makeup", "ApplyEyeMakeup")
    chosen = chosen or root.parent / "split_zhou_UCF101.json"
    if not chosen.exists():
        raise UserError(f"--list {chosen}: expected that file, or the folder with trainlist01.txt, found nothing")
    splits = []
    for split in ("train", "test"):
        if chosen.suffix == ".json":
            rule, file = "split_zhou_UCF101.json", chosen
            entries = read(file, lambda path: [str(entry[0]) for entry in json.loads(path.read_text("utf-8"))[split]])
        else:
            rule, file = "trainlist01.txt, testlist01.txt", chosen / f"{split}list01.txt"
            entries = read(file, lambda path: re.findall(r"^\S+", path.read_text("utf-8"), re.MULTILINE))
        classes = ["_".join(re.findall("[A-Z][^A-Z_]*", class_and_file(entry)[0])) for entry in entries]
        splits.append(list(zip(classes, locate(file, entries, root))))
    return rule, *splits


def read_resisc45(source, _):
    root = find(source, "airplane")
    place = next((place for place in (root, root.parent) if os.path.exists(place / "train.json")), None)
    train, test = [], []
    if place is None:
        rule = "every fifth image of a class is train"
        for _, members in groupby(images_of(root), key=lambda path: path.parent):
            for rank, path in enumerate(members):
                (train if rank % 5 == 4 else test).append(path)
    else:
        rule = "train.json with val.json, test.json"
        for name, paths in (("train.json", train), ("val.json", train), ("test.json", test)):
            entries = read(place / name, lambda path: [str(image["file_name"]) for image
                                                       in json.loads(path.read_text("utf-8"))["images"]])
            paths += locate(place / name, entries, root)
    return rule, *([(path.parent.name, path) for path in paths] for paths in (train, test))


def read_cinic10(source, _):
    root = find(source, "train/airplane")
    return "train and test, valid unused", *([(path.parent.name, path) for path in images_of(root / split)]
                                             for split in ("train", "test"))


READERS = {"cub": read_cub, "ucf101": read_ucf101, "resisc45": read_resisc45, "cinic10": read_cinic10}


def plan(origin, expected, train, test):
    """{train/<class>/<file>: original}, if the counts are as expected, and no image or new name comes twice."""
    classes, test_classes = ({name for name, _ in split} for split in (train, test))
    found, odd = (len(classes | test_classes), len(train), len(test)), sorted(classes ^ test_classes)
    if odd or found != expected:
        say = "{} classes, {} train and {} test images".format
        only = f", in one split only: {' '.join(odd[:10])}" if odd else ""
        raise UserError(f"{origin}: expected {say(*expected)}, found {say(*found)}{only}")
    goals = [(f"{name}/{of_class}/{path.name}", path) for name, split in (("train", train), ("test", test))
             for of_class, path in split]
    lower = [goal.lower() for goal, _ in goals]                     # some file systems hold a.jpg and A.jpg to be one
    for name, times in Counter([*lower, *(path for _, path in goals)]).items():
        if times > 1:
            raise UserError(f"{origin}: expected each image and each file name of a class once, found {name} twice")
    return dict(goals)


def write(goals, target):
    """Link or copy all into a hidden folder, then rename it: target is there as a whole or not at all."""
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".{target.name}.*.part"):
            # First renamed: if its run is alive after all, that run fails at once and cannot finish with half the files
            shutil.rmtree(left.rename(left.with_suffix(".gone.part")))
        part.mkdir()
    except OSError as error:
        raise UserError(f"--data-dir {target.parent}: cannot write there ({error})") from error
    try:
        for folder in ["train", "test", *sorted({os.path.dirname(goal) for goal in goals})]:
            (part / folder).mkdir()
        for goal, path in tqdm(goals.items(), target.name, unit="image", disable=None, leave=False):
            try:
                os.link(os.path.realpath(path), part / goal)        # a link to a symbolic link may lead nowhere
            except OSError:                                         # another file system, or one without hard links
                shutil.copyfile(path, part / goal)
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def lay_out(argv):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=COUNTS, help="the data set")
    parser.add_argument("--from", dest="source", required=True, help="folder of the originals")
    parser.add_argument("--list", type=Path, help="split_zhou_UCF101.json or the folder with trainlist01.txt (ucf101)")
    parser.add_argument("--data-dir", type=Path, default="data", help="folder in which the folder <name> is made")
    args = parser.parse_args(argv)
    if args.list and args.name != "ucf101":
        raise UserError(f"--list {args.list}: expected with ucf101 alone, found with {args.name}")
    source, target = Path(os.path.abspath(args.source)), args.data_dir / args.name
    rule, *splits = READERS[args.name](source, args.list)
    classes, *sizes = COUNTS[args.name][rule]
    goals = plan(f"--from {source} ({rule})", (classes, *sizes), *splits)
    already = os.path.lexists(target)
    if already:
        there = {f"{split}/{path.parent.name}/{path.name}" for split in ("train", "test")
                 if (target / split).is_dir() for path in images_of(target / split)}
        if there != goals.keys():
            raise UserError(f"--data-dir {args.data_dir}: expected in {target} {len(goals)} images ({rule}), found "
                            f"{len(there)}, first difference {min(there ^ goals.keys())}; move that folder away first")
    else:
        write(goals, target)
    for split, size in zip(("train", "test"), sizes):
        print(f"{target / split}: {size} images of {classes} classes ({rule})")
    print(f"{'already there, nothing changed' if already else 'done'}; use it with "
          f"--dataset {args.name} --data-dir {shlex.quote(str(args.data_dir))}")


def main(argv=None):
    try:
        lay_out(argv)
    except (UserError, OSError, KeyboardInterrupt) as error:
        print(f"error: {' '.join(str(error).split()) or 'interrupted'}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1             # 1: disk full and the like
    return 0


if __name__ == "__main__":
    sys.exit(main())
