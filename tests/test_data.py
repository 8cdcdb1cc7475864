"""The data part of common.py on tiny files made on the fly: no network, nothing outside tmp_path."""

import gzip
import io
import os
import pickle
import shutil
import socket
import struct
import urllib.request
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from scripts import load_images
from scripts import method as find_method
from torchvision.datasets import FashionMNIST, Flowers102
from torchvision.transforms import functional

import common
from common import UserError

DAMAGED = b"damaged"                                                # in a file: its MD5 sum is wrong
NAMES = [name for name in common.DATASETS if name != "digits"]


@pytest.fixture(autouse=True)
def net(monkeypatch):
    """What the network holds, {address: content}, and what was asked for. Forged originals pass for whole."""
    net = SimpleNamespace(content={}, asked=[])

    def urlopen(request):
        assert socket.getdefaulttimeout()                           # else a dead proxy would hang for minutes
        net.asked.append(request.full_url)
        if request.full_url not in net.content:
            raise urllib.request.URLError(OSError("network is unreachable"))
        content = io.BytesIO(net.content[request.full_url])
        return nullcontext(SimpleNamespace(url=None, length=None, read=content.read))

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr("torchvision.datasets.utils.check_md5", lambda path, _: DAMAGED not in Path(path).read_bytes())
    yield net
    socket.setdefaulttimeout(None)


def refused(*args, **kwargs):
    """The message of the UserError that loading raises: always one line."""
    with pytest.raises(UserError) as caught:
        load_images(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def snapshot(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")])


def colours(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# ---- tiny originals: class names, and train and test each as images (n, S, S[, 3]) and labels ----------------------

def made_up(sizes, classes, *shape):
    """Random images for train and test; their labels are not sorted."""
    return [(colours(seed, n, *shape), np.arange(n) * 7 % classes) for seed, n in enumerate(sizes)]


def forge_cifar(root, name):
    kind, count, fine = common.TORCHVISION[name][0], common.DATASETS[name], f"{'fine_' * (name == 'cifar100')}labels"
    classes, folder = [f"class {label}" for label in range(count)][::-1], root / kind.base_folder
    splits = made_up((len(kind.train_list) * count, count), count, 32, 32, 3)
    folder.mkdir(parents=True)
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps({kind.meta["key"]: classes}))
    for files, (images, labels) in zip((kind.train_list, kind.test_list), splits):
        for (file, _), own, label in zip(files, np.split(images, len(files)), np.split(labels, len(files))):
            content = {"data": own.transpose(0, 3, 1, 2).reshape(count, -1), "coarse_labels": [0] * count}
            (folder / file).write_bytes(pickle.dumps(content | {fine: label.tolist()}))
    return classes, splits


def forge_svhn(root, name):
    splits = made_up((30, 20), 10, 32, 32, 3)
    root.mkdir(parents=True, exist_ok=True)
    for split, (images, labels) in zip(("train", "test"), splits):
        content = {"X": images.transpose(1, 2, 3, 0), "y": np.where(labels, labels, 10)[:, None]}    # zero is called 10
        savemat(root / f"{split}_32x32.mat", content)
    return list("0123456789"), splits


def forge_fashion(root, name):
    splits, folder = made_up((30, 20), 10, 28, 28), root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for split, (images, labels) in zip(("train", "t10k"), splits):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels.astype(np.uint8))):
            head = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{split}-{kind}-ubyte").write_bytes(head + array.tobytes())
    return FashionMNIST.classes, splits


def save_images(folder, files, images):
    for file, image in zip(files, images):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / file, "PNG")           # whatever it is called: no pixel gets lost


def forge_dtd(root, name):
    """Of each class two images are train, one of them val for torchvision, and two are test."""
    splits, folder = made_up((94, 94), 47, 8, 8, 3), root / "dtd/dtd"
    images, labels = map(np.concatenate, zip(*splits))
    files = [f"class_{label:02d}/{i:03d}.jpg" for i, label in enumerate(labels)]
    save_images(folder / "images", files, images)
    (folder / "labels").mkdir()
    for split, own in (("train", files[:47]), ("val", files[47:94]), ("test", files[94:])):
        (folder / f"labels/{split}1.txt").write_text("\n".join(own) + "\n")
    return sorted({file[:8] for file in files}), splits


def forge_flowers(root, name):
    """Of each class two images are train, one of them val for torchvision, and one is test; their numbers are mixed."""
    splits, number = made_up((204, 102), 102, 8, 8, 3), np.random.default_rng(0).permutation(306) + 1
    images, labels = map(np.concatenate, zip(*splits))
    save_images(root / "flowers-102/jpg", [f"image_{i:05d}.jpg" for i in number], images)
    savemat(root / "flowers-102/imagelabels.mat", {"labels": labels[None, number.argsort()] + 1})
    savemat(root / "flowers-102/setid.mat", dict(zip(("trnid", "valid", "tstid"), np.split(number[None], 3, 1))))
    return Flowers102.classes, splits


def forge_eurosat(root, name, per_class=2700):
    """Five pictures a class over and over, as hard links: the fifth is test."""
    classes, images = [f"Class{label}" for label in range(10)], colours(0, 10, 5, 8, 8, 3)
    for own, pictures in zip(classes, images):
        files = [root / f"eurosat/2750/{own}/{own}_{i:04d}.jpg" for i in range(per_class)]
        save_images(root, files[:5], pictures)
        for i, file in enumerate(files[5:]):
            os.link(files[i % 5], file)
    rank, label = np.tile(np.arange(per_class) % 5, 10), np.arange(10).repeat(per_class)
    return classes, [(images[label[chosen], rank[chosen]], label[chosen]) for chosen in (rank < 4, rank == 4)]


ORIGINALS = {       # name: how to forge them, and the folder that is inside the archive
    "cifar10": (forge_cifar, "cifar-10-batches-py"), "cifar100": (forge_cifar, "cifar-100-python"),
    "svhn": (forge_svhn, "."), "fashionmnist": (forge_fashion, "FashionMNIST/raw"), "dtd": (forge_dtd, "dtd/dtd"),
    "flowers102": (forge_flowers, "flowers-102/jpg"), "eurosat": (forge_eurosat, "eurosat/2750")}


def packed(name, root):
    """{address: content} of what torchvision downloads, made from the forged originals below root."""
    content, folder = {}, root / ORIGINALS[name][1]
    for file, address in common.TORCHVISION[name][1].items():
        if file.endswith(".mat"):
            content[address] = (root / file).read_bytes()
        elif name == "fashionmnist":
            content[address] = gzip.compress((root / file.removesuffix(".gz")).read_bytes())
        else:
            kind = "zip" if file.endswith(".zip") else "gztar"
            content[address] = Path(shutil.make_archive(root / "all", kind, folder.parent, folder.name)).read_bytes()
    return content


def check(data, classes, splits):
    """A Dataset holds these class names, images and labels, in this order; of very many images a part is looked at."""
    assert data.class_names == list(classes)
    for (images, labels), own, own_labels in zip(splits, data[0:4:2], data[1:4:2]):
        part, side = slice(None, None, 1 + len(labels) // 500), images.shape[1]
        images = images.transpose(0, 3, 1, 2) if images.ndim == 4 else np.repeat(images[:, None], 3, 1)
        assert (own.dtype, own_labels.dtype, own.shape) == (torch.uint8, torch.int64, (len(labels), 3, side, side))
        assert own_labels.tolist() == labels.tolist() and np.array_equal(own[part], images[part])


# ---- originals, where they are found, and what is said where they are not ------------------------------------------

@pytest.mark.parametrize("name", ORIGINALS)
def test_originals_in_their_official_split(name, tmp_path, monkeypatch, net):
    """Fails if images, labels, split or class names are not the originals', or a reader writes or asks the network."""
    root = tmp_path / name
    classes, splits = ORIGINALS[name][0](root, name)
    side, before = splits[0][0].shape[1], snapshot(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for data_dir in (root, tmp_path, root / ORIGINALS[name][1].split("/")[0], f"~/{name}"):
        data = load_images(name, data_dir, side, memory_gb=0.001)
        check(data, classes, splits)
    assert data.source == "original files" and snapshot(tmp_path) == before and net.asked == []


@pytest.mark.parametrize("name", [name for name in ORIGINALS if name != "eurosat"])
def test_archives_by_hand_and_downloads(name, tmp_path, net):
    """Fails if half a download is taken for the whole, an archive placed by hand is not used, or more is fetched."""
    classes, splits = ORIGINALS[name][0](tmp_path / "made", name)
    whole, side, data_dir = packed(name, tmp_path / "made"), splits[0][0].shape[1], tmp_path / "data"
    (file, address), *others = common.TORCHVISION[name][1].items()
    net.content = {own: content[:len(content) // 2] + DAMAGED for own, content in whole.items()}
    message = refused(name, data_dir, side)
    assert "corrupted" in message or "Error downloading" in message
    (data_dir / file).write_bytes(whole[address])
    for net.content, asked in ((whole, {own for _, own in others}), ({}, set())):
        before, net.asked = snapshot(tmp_path), []
        check(load_images(name, data_dir, side), classes, splits)
        assert set(net.asked) == asked
    assert snapshot(tmp_path) == before


def test_eurosat_is_complete_or_refused(tmp_path, net):
    """Fails if an interrupted extraction is split anew over the images that are there, or the place is wrong."""
    forge_eurosat(tmp_path / "made", "eurosat", 5)
    net.content = packed("eurosat", tmp_path / "made")
    assert "50 images, expected 27000" in refused("eurosat", tmp_path / "data", 8)
    assert [len(list(tmp_path.glob(f"data/eurosat/{own}"))) for own in ("2750/*/*.jpg", "EuroSAT.zip")] == [50, 1]


@pytest.mark.parametrize("name, file, words", [
    ("cifar10", "cifar-10-batches-py/data_batch_3", "{address}| as |{place}/cifar-10-python.tar.gz"),
    ("svhn", "test_32x32.mat", "{address}| as |{place}/test_32x32.mat"),
    ("flowers102", "flowers-102/setid.mat", "{address}| as |{place}/flowers-102/setid.mat"),
    ("fashionmnist", "FashionMNIST/raw/t10k-images-idx3-ubyte", "cannot read {place}|damaged"),
    ("dtd", "dtd/dtd/labels/val1.txt", "cannot read {place}|damaged"),
    ("dtd", "dtd/dtd/images/class_00/000.jpg", "cannot read {place}/{file}|damaged"),
    ("flowers102", "flowers-102/jpg/image_00007.jpg", "cannot read {place}/{file}|damaged")])
def test_damaged_originals(name, file, words, tmp_path):
    """Fails if a damaged file is read as it is, ends in a traceback, or is not named."""
    ORIGINALS[name][0](tmp_path, name)
    (tmp_path / file).write_bytes(DAMAGED)
    message, address = refused(name, tmp_path, 8), list(common.TORCHVISION[name][1].values())[-1]
    assert all(word.format(place=tmp_path, file=file, address=address) in message for word in words.split("|")), message


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["", "no such place", "file/below"])
def test_missing_data(name, place, tmp_path, net):
    """Fails if a message does not name what to fetch from where, where to put it, or the tool that lays images out."""
    (tmp_path / "file").write_text("")
    data_dir = tmp_path / place
    message = refused(name, data_dir, 32)
    tree = f"{data_dir if name == 'folder' else data_dir / name}/{{train,test}}/<class>/"
    assert message.startswith(f"{name}: ") and tree in message and "--data-dir" in message
    assert (f"python tools/layout_data.py {name} " in message) == (name in ("cub", "ucf101", "resisc45", "cinic10"))
    if name in ORIGINALS:
        assert ("Not a directory" if "below" in place else "network is unreachable") in message
        assert ("below" in place or net.asked) and all(address in message for address in net.asked)
        for file, address in common.TORCHVISION[name][1].items():
            assert f"{address} as {data_dir / file}" in message
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]
    assert "is a file" in refused(name, tmp_path / "file", 32)


# ---- image folders -------------------------------------------------------------------------------------------------

def write_tree(root, classes, per_class=2, side=8, ending=".png"):
    """Image i of class c is plain (c, 10 i, 0 or, in test, 255); made in an order that is not sorted."""
    for blue, split in ((255, "test"), (0, "train")):
        for label in np.random.default_rng(0).permutation(len(classes)):
            (root / split / classes[label]).mkdir(parents=True)
            for i in reversed(range(per_class)):
                image = Image.new("RGB", (side, side), (int(label), 10 * i, blue))
                image.save(root / split / classes[label] / f"{i:03d}{ending}")


def greens(images):
    """What tells the images of write_tree apart inside a class."""
    return images[:, 1, 0, 0].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_image_folders_in_place_of_the_originals(name, tmp_path):
    """Fails if labels, the order of classes and images, the split or the expected number of classes is wrong."""
    count = common.DATASETS[name] or 3
    classes = sorted(["Zebra", "ant", *(f"class {i}" for i in range(count))][:count])
    write_tree(tmp_path / name, classes)
    for data_dir in (tmp_path, tmp_path / name) if name != "folder" else (tmp_path / name,):
        data = load_images(name, data_dir, 8)
        assert data.class_names == classes and classes[0] == "Zebra" and data.source == "image folders"
        for images, labels, blue in ((*data[:2], 0), (*data[2:4], 255)):
            assert labels.tolist() == images[:, 0, 3, 5].tolist() == sorted([*range(count)] * 2)
            assert greens(images) == [0, 10] * count and images[:, 2].unique().tolist() == [blue]
    for split in ("train", "test"):
        shutil.rmtree(tmp_path / name / split / "Zebra")
    if name != "folder":
        assert f"{count - 1} classes in train and {count - 1} in test, expected {count}" in refused(name, tmp_path, 8)


def test_originals_come_first_then_the_named_folder(tmp_path):
    """Fails if another set that lies in data_dir is taken in place of the one that is asked for."""
    write_tree(tmp_path, [f"mine {i}" for i in range(10)])
    write_tree(tmp_path / "cifar10", [f"named {i}" for i in range(10)])
    assert load_images("cifar10", tmp_path, 8).class_names[0] == "named 0"
    forge_cifar(tmp_path, "cifar10")
    assert load_images("cifar10", tmp_path, 8).source == "original files"
    assert load_images("folder", tmp_path, 8).class_names[0] == "mine 0"


def test_hidden_and_other_files_are_overlooked(tmp_path):
    """Fails if what file managers, notebooks and archives leave behind becomes a class or an image."""
    write_tree(tmp_path, ["cat", "dog"], ending=".JPG")
    for split in ("train", "test"):
        for file in (".hidden/a.png", ".DS_Store", "Thumbs.db", "__MACOSX/._a.png", "cat/._000.JPG", "cat/.a.png",
                     "cat/notes.txt", "dog/.ipynb_checkpoints/a.png", "loose.png"):
            (tmp_path / split / file).parent.mkdir(exist_ok=True)
            (tmp_path / split / file).write_bytes(b"no image")
    data = load_images("folder", tmp_path, 8)
    assert data.class_names == ["cat", "dog"]
    assert data.train_labels.tolist() == data.test_labels.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("change, words", [
    (lambda root: (root / "test" / "dog").rename(root / "test" / "fox"), "2 classes in train and 2 in test|dog fox"),
    (lambda root: shutil.rmtree(root / "train" / "cat"), "1 classes in train and 2 in test|alone: cat"),
    (lambda root: [path.rename(path.with_suffix(".txt")) for path in root.glob("test/dog/*")], "1 in test|alone: dog"),
    (lambda root: [shutil.rmtree(path) for path in root.glob("*/*")], "0 classes in train and 0 in test"),
    (lambda root: shutil.rmtree(root / "test"), "expected images as {root}/{{train,test}}/<class>/"),
    (lambda root: [path.rename(os.fsdecode(os.fsencode(path.parent) + b"/caf\xe9")) for path in root.glob("*/dog")],
     "not UTF-8|caf\\udce9")])
def test_wrong_class_folders(change, words, tmp_path):
    """Fails if train and test can number their classes differently, or a name reaches tables that cannot hold it."""
    write_tree(tmp_path, ["cat", "dog"])
    change(tmp_path)
    message = refused("folder", tmp_path, 8)
    assert all(word.format(root=tmp_path) in message for word in words.split("|")), message
    message.encode()


@pytest.mark.parametrize("ending", [".jpg", ".png"])
@pytest.mark.parametrize("how", ["cut", "garbage", "empty"])
def test_broken_images_are_named(ending, how, tmp_path):
    """Fails if a broken image becomes a black one, a traceback, or a message without its name."""
    write_tree(tmp_path, ["cat", "dog"])
    path = tmp_path / "test" / "dog" / f"broken{ending}"
    Image.fromarray(colours(0, 64, 64, 3)).save(path)
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:len(whole) * 2 // 3], "garbage": b"\x93 no image " * 50, "empty": b""}[how])
    assert refused("folder", tmp_path, 8).startswith(f"cannot read {path} (")


# ---- images to tensors ---------------------------------------------------------------------------------------------

def pictures():
    """Name, file ending, an image, the levels of its upper row (None: it is refused), how to save it."""
    palette, exif = Image.fromarray(np.uint8([[0, 1]])), Image.Exif()
    palette.putpalette([200, 0, 0, 0, 100, 0])
    exif[0x0112] = 6                                                # what is above belongs to the right
    yield "L", ".png", Image.new("L", (2, 1), 77), [[77] * 3] * 2, {}
    yield "LA", ".png", Image.new("LA", (2, 1), (100, 51)), [[224] * 3] * 2, {}        # 100 * 0.2 + 255 * 0.8
    yield "RGBA", ".png", Image.new("RGBA", (2, 1), (10, 20, 30, 0)), [[255] * 3] * 2, {}
    yield "RGBA-opaque", ".png", Image.new("RGBA", (2, 1), (10, 20, 30, 255)), [[10, 20, 30]] * 2, {}
    yield "P", ".png", palette, [[200, 0, 0], [0, 100, 0]], {}
    yield "P-clear", ".png", palette, [[200, 0, 0], [255, 255, 255]], {"transparency": 1}
    yield "1", ".png", Image.fromarray(np.array([[True, False]])), [[255] * 3, [0] * 3], {}
    yield "CMYK", ".tif", Image.new("CMYK", (2, 1), (0, 255, 0, 0)), [[255, 0, 255]] * 2, {}
    for ending in (".png", ".tif"):
        yield f"I;16{ending}", ending, Image.fromarray(np.uint16([[65535, 257 * 100]])), [[255] * 3, [100] * 3], {}
    yield "I", ".tif", Image.fromarray(np.int32([[65535, 257 * 3 + 200]])), [[255] * 3, [4] * 3], {}
    yield "I-wide", ".tif", Image.fromarray(np.int32([[65536, 0]])), None, {}
    yield "F", ".tif", Image.fromarray(np.float32([[1, 1]])), None, {}
    yield "EXIF", ".png", Image.fromarray(np.uint8([[255, 255], [0, 0]])), [[0] * 3, [255] * 3], {"exif": exif}


@pytest.mark.parametrize("ending, image, expected, options", [pytest.param(*own, id=name) for name, *own in pictures()])
@pytest.mark.parametrize("clip", [False, True])
def test_image_modes(ending, image, expected, options, clip, tmp_path):
    """Fails if a mode is clipped, put on black, left on its side, or not refused where its levels mean nothing."""
    write_tree(tmp_path, ["cat"], side=2)
    path = tmp_path / "train" / "cat" / f"picture{ending}"
    image.resize((2, 2), Image.Resampling.NEAREST).save(path, **options)
    if expected is None:
        assert f"cannot read {path} (ValueError" in refused("folder", tmp_path, 2, clip=clip)
    else:
        assert load_images("folder", tmp_path, 2, clip=clip).train_images[-1, :, 0].T.tolist() == expected


@pytest.mark.parametrize("side", [16, 24, 56])
@pytest.mark.parametrize("clip", [False, True])
def test_resize_and_crop_are_those_of_torchvision_and_of_open_clip(clip, side, tmp_path):
    """From files and from arrays alike, bit by bit: fails with another interpolation, order, side or crop."""
    write_tree(tmp_path, ["cat"])
    wide_tall_grey_square = [colours(0, *shape) for shape in ((23, 37, 3), (40, 9, 3), (30, 31), (24, 24, 3))]
    save_images(tmp_path / "train" / "cat", ["000.png", "001.png", "2.png", "3.png"], wide_tall_grey_square)
    of_open_clip = open_clip.image_transform(side, is_train=False, mean=(0,) * 3, std=(1,) * 3)
    data = load_images("folder", tmp_path, side, clip=clip)
    for picture, prepared in zip(wide_tall_grey_square, data.train_images):
        expected = of_open_clip(Image.fromarray(picture)).mul(255).round().byte()
        if not clip:
            image = functional.resize(Image.fromarray(picture).convert("RGB"), side)
            expected = functional.pil_to_tensor(functional.center_crop(image, side))
        assert torch.equal(prepared, expected)
        assert torch.equal(common.Images(picture[None], side, clip)[:][0], expected)


# ---- class names, digits, subsets ----------------------------------------------------------------------------------

@pytest.mark.parametrize("text, words", [
    ("001.Black_footed_Albatross", "Black footed Albatross"), ("12 013.Bobolink", "Bobolink"), ("3-cat", "cat"),
    ("ApplyEyeMakeup", "Apply Eye Makeup"), ("Apply_Eye_Makeup", "Apply Eye Makeup"), ("YoYo", "Yo Yo"),
    ("polka-dotted", "polka-dotted"), ("aquarium_fish", "aquarium fish"), ("7", "7"), ("07", "07"), ("1_2", "1 2"),
    ("T-shirt/top", "T-shirt or top"), ("colt's foot", "colt's foot"), ("1st place", "1st place"),
    ("  odd__name ", "odd name")])
def test_prompt_names(text, words):
    """Fails if CLIP would read an index, an underscore or words run together."""
    assert common.prompt_names("ucf101", [text, "other"]) == [words, "other"]
    assert common.prompt_names("cub", [text]) == [words.lower()]


def test_prompt_names_are_those_of_grip_and_never_two_alike(tmp_path):
    """Fails if EuroSAT's words are not in the order of its folders, or two classes become one for CLIP."""
    words = common.prompt_names("eurosat", list("ABCDEFGHIJ"))      # of HerbaceousVegetation, Pasture and SeaLake:
    assert (words[2], words[5], words[9]) == ("brushland or shrubland", "pasture land", "lake or sea")
    write_tree(tmp_path, ["01_red_fox", "02_RedFox"])
    assert load_images("folder", tmp_path, 8).class_names == ["01_red_fox", "02_RedFox"]
    message = refused("folder", tmp_path, 8, clip=True)
    assert "01_red_fox and 02_RedFox" in message and "'Red Fox'" in message


def test_digits_and_their_split():
    """Fails if an image is lost, taken twice or mislabelled, or if the split or the embedded data change."""
    from sklearn.datasets import load_digits
    grey, labels = load_digits(return_X_y=True)
    images = np.uint8(np.round(grey.reshape(-1, 8, 8) * 255 / 16))
    by_class = [i for digit in range(10) for i in range(len(labels)) if labels[i] == digit]
    test, train = sorted(by_class[4::5]), sorted({*by_class} - {*by_class[4::5]})
    data = load_images("digits", "nowhere", 8)
    check(data, "0123456789", [(images[split], labels[split]) for split in (train, test)])
    found = len(train), len(test), data.source, common.fingerprint(data)
    assert found == (1438, 359, "embedded", "af9bb8fe4f445f52")


def test_train_subset_is_balanced_spread_and_in_order():
    """Fails if the subset is of other classes, of the first images alone, or touches the test set."""
    full, part = (load_images("digits", "nowhere", 8, subset) for subset in (None, 103))
    expected = []
    for label, count in zip(range(10), [11] * 3 + [10] * 7):        # the first classes take the remainder
        own = np.flatnonzero(full.train_labels == label)
        expected += [own[k * len(own) // count] for k in range(count)]
    for whole, kept, index in zip(full[:4], part, (sorted(expected), sorted(expected), slice(None), slice(None))):
        assert torch.equal(kept, whole[index])
    for subset, words in ((9, "0 training images of class 9, expected 1 to 14"),
                          (1439, "144 training images of class 0, expected 1 to 143")):
        assert f"--train-subset {subset}: {words}" in refused("digits", "nowhere", 8, subset)


def test_skip_share_leaves_out_the_first_of_each_class_and_comes_before_the_subset(tmp_path):
    """Fails if a miniature CLIP's own training images are among those of the clients, or too many go."""
    write_tree(tmp_path, ["cat", "dog"], per_class=4)
    for i in (2, 3):
        (tmp_path / "train" / "dog" / f"00{i}.png").unlink()
    for share, kept in ((0, [0, 10, 20, 30, 0, 10]), (0.24, [10, 20, 30, 10]), (0.25, [10, 20, 30, 10]),
                        (0.26, [20, 30, 10]), (0.5, [20, 30, 10])):
        data = load_images("folder", tmp_path, 8, skip_share=share)
        assert greens(data.train_images) == kept and len(data.test_labels) == 8
        assert data.train_labels.tolist() == data.train_images[:, 0, 0, 0].tolist()
    assert greens(load_images("folder", tmp_path, 8, 2, skip_share=0.5).train_images) == [20, 10]
    assert "--train-subset 4: 2 training images of class dog" in refused("folder", tmp_path, 8, 4, skip_share=0.5)
    assert "--skip-share 0.51" in refused("folder", tmp_path, 8, skip_share=0.51)      # no dog would be left
    assert common.chosen_images(torch.tensor([1, 0, 1, 0, 1]), "ab", None, 0.5).tolist() == [3, 4]
    assert common.chosen_images(torch.zeros(100), "a", None, 0.07).tolist() == list(range(7, 100))  # 0.07 * 100 > 7


# ---- sets larger than memory, and what the semi-supervised scripts get ----------------------------------------------

@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", ["digits", "folder"])
def test_images_prepared_when_asked_for_equal_the_cached_ones(name, clip, tmp_path):
    """Fails if any way of indexing gives other images than the same index of the tensor."""
    write_tree(tmp_path, ["cat", "cow", "dog"], per_class=20)
    cached, lazy = (load_images(name, tmp_path, 20, 30, clip, 0.25, memory_gb=gb) for gb in (np.inf, 0))
    for full, part in ((cached.train_images, lazy.train_images), (cached.test_images, lazy.test_images)):
        assert isinstance(full, torch.Tensor) and isinstance(part, common.Images) and len(part) == len(full)
        assert (part.shape, part.dtype, part.device) == (full.shape, full.dtype, full.device)
        order = torch.randperm(len(full))[:19]
        for index in (order, order.numpy(), order.tolist(), torch.tensor([2, 2, -1]), torch.tensor([]).long(),
                      slice(3, 9), slice(None, None, 4), torch.arange(len(full)) % 3 == 0):
            assert torch.equal(part[index], full[index])
        with pytest.raises(IndexError):
            part[torch.tensor([len(full)])]
    assert common.fingerprint(lazy) == common.fingerprint(cached)


def test_cache_is_bounded_and_what_is_not_cached_is_not_read(tmp_path, monkeypatch):
    """Fails if the bound leaves out a set, forgets --train-subset, or an image is decoded without need."""
    write_tree(tmp_path, ["cat", "dog"], per_class=4)               # 8 + 8 images of 3 x 16 x 16 bytes
    image = 3 * 16 * 16 / 2 ** 30
    for images, subset, kind in ((16, None, torch.Tensor), (15, None, common.Images), (12, 4, torch.Tensor)):
        data = load_images("folder", tmp_path, 16, subset, memory_gb=images * image)
        assert isinstance(data.train_images, kind) and isinstance(data.test_images, kind)
    lazy = common.load_dataset("folder", tmp_path, 16)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 8, "SC_PAGE_SIZE": 4096}.get)  # half of it holds 16 images
    assert isinstance(common.cache_images(lazy).train_images, torch.Tensor)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")                     # two processes share them
    assert common.cache_images(lazy) is lazy
    for name in ("cat/001.png", "cat/003.png", "dog/001.png", "dog/003.png"):
        (tmp_path / "train" / name).write_bytes(b"broken")
    assert greens(load_images("folder", tmp_path, 16, 4).train_images) == [0, 20, 0, 20]
    assert greens(lazy.train_images[[4, 6]]) == [0, 20]
    with pytest.raises(UserError, match="dog/001.png"):
        lazy.train_images[4:6]


def test_fingerprint_goes_by_images_and_labels_alone(tmp_path):
    """Fails if a resumed run would refuse the same data from other files, or take other data for them."""
    write_tree(tmp_path / "a", ["cat", "dog"])
    write_tree(tmp_path / "b", ["cow", "pig"], ending=".bmp")
    data, same = (load_images("folder", tmp_path / place, 8) for place in "ab")
    assert common.fingerprint(data) == common.fingerprint(same)
    for name in data._fields[:4]:
        other = getattr(data, name).clone()
        other[-1] += 1
        assert common.fingerprint(data._replace(**{name: other})) != common.fingerprint(data)


def test_channel_stats_against_numpy():
    """Fails if channels are mixed up, or a channel of one level leads to a division by zero."""
    images = colours(0, 50, 3, 8, 8) // np.array([1, 2, 5], np.uint8)[:, None, None]
    for images in (images, np.full_like(images, 7)):
        mean, std = common.channel_stats(torch.from_numpy(images))
        levels = images.transpose(1, 0, 2, 3).reshape(3, -1) / 255
        assert mean == pytest.approx(levels.mean(1)) and std == pytest.approx(levels.std(1).clip(min=1e-3))


def test_semi_supervised_data():
    """Fails if an image has two owners or none, or if images, labels, statistics or tables are not the data set's."""
    flags = "--train-subset 500 --label-ratio 0.2 --clients 4 --image-size 8 --alpha 0.5"
    args = find_method("baselines/fedavg.py").module.parse_args(flags.split())
    plain, data = load_images("digits", "nowhere", 8, 500), common.semi_supervised_data(args, torch.device("cpu"))
    for own, wanted in zip((data.images, data.labels, data.test_images, data.test_labels), plain):
        assert torch.equal(own, wanted)
    assert sorted(np.concatenate(data.labelled + data.unlabelled).tolist()) == list(range(500))
    assert np.bincount(data.labels[np.concatenate(data.labelled)]).tolist() == [10] * 10
    for kind, (labels, parts) in data.owned().items():
        assert parts is getattr(data, kind) and len(parts) == 4 and labels.tolist() == data.labels.tolist()
    assert data.pool(1).tolist() == [*data.unlabelled[1], *data.labelled[1]]
    assert data.stats == common.channel_stats(plain.train_images) and data.class_names == list("0123456789")
    assert data.facts == {"data_source": "embedded", "data_fingerprint": common.fingerprint(plain)}


@pytest.mark.parametrize("name, sizes, ratio, each", [
    ("svhn", (4659, 5000, 6000), 0.1, [460, 460, 460]), ("svhn", (4659, 5000, 6000), 0.2, [920, 920, 920]),
    ("svhn", (4599, 5000, 6000), 0.1, [460, 500, 600]), ("cifar10", (4659, 5000, 6000), 0.1, [466, 500, 600]),
    ("cifar10", (3, 14, 16), 0.1, [1, 1, 2])])
def test_labelled_images_of_each_class(name, sizes, ratio, each, monkeypatch):
    """As published: a share of each class, at least one image; of SVHN, where it is whole, of 4,600 images a class."""
    labels = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    images = torch.zeros(len(labels), 3, 8, 8, dtype=torch.uint8)
    made_up = common.Dataset(images, labels, images[:3], labels[:3], list("012"), "made up")
    monkeypatch.setattr(common, "load_dataset", lambda *_: made_up)
    args = find_method("baselines/fedavg.py").module.parse_args(["--dataset", name, "--label-ratio", str(ratio)])
    data = common.semi_supervised_data(args, torch.device("cpu"))
    assert np.bincount(data.labels[np.concatenate(data.labelled)]).tolist() == each
