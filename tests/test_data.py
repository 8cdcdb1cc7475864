"""Data loading on tiny files made on the fly: no network, nothing outside tmp_path."""
import gzip
import hashlib
import io
import json
import os
import pickle
import re
import socket
import struct
import tarfile
import time
import urllib.error
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torchvision import datasets, transforms

import common
from common import UserError, load_dataset

FILES = {"cifar10": ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"],
         "cifar100": ["train", "test"],
         "svhn": ["train_32x32.mat", "test_32x32.mat"],
         "fashionmnist": ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz",
                          "t10k-labels-idx1-ubyte.gz"]}
UNPACKED = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
ARCHIVE = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(url, path, md5):
        raise urllib.error.URLError(OSError("network is unreachable"))
    monkeypatch.setattr(common, "download", refuse)


# ---- makers of tiny data -------------------------------------------------------------------------------------------
def colours(n, seed, shape=(3, 32, 32)):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def write_cifar(folder, name="cifar10"):
    folder.mkdir(parents=True)
    classes = {"cifar10": 10, "cifar100": 100}[name]
    everything = []
    for seed, file in enumerate(FILES[name]):
        images, labels = colours(classes, seed), np.random.default_rng(seed).permutation(classes).tolist()
        key = "labels" if name == "cifar10" else "fine_labels"
        content = {"data": images.reshape(classes, -1), key: labels, "coarse_labels": [0] * classes}
        (folder / file).write_bytes(pickle.dumps(content, protocol=2))
        everything.append((images, labels))
    train = everything[:-1]
    return np.concatenate([i for i, _ in train]), sum([y for _, y in train], []), *everything[-1]


def write_svhn(folder):
    folder.mkdir(parents=True, exist_ok=True)
    images = colours(10, 0)
    images[0] = 0
    images[0, 0, 2, 29] = 255                                   # one red pixel: row 2, column 29
    labels = np.array([10, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    for file in FILES["svhn"]:
        savemat(folder / file, {"X": images.transpose(2, 3, 1, 0), "y": labels[:, None]})
    return images


def idx(array):
    return struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_fashion(folder, zipped=True):
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = colours(10, 1, (28, 28)), np.arange(10, dtype=np.uint8)
    for file in FILES["fashionmnist"]:
        raw = idx(images if "images" in file else labels)
        if zipped:
            (folder / file).write_bytes(gzip.compress(raw))
        else:
            (folder / file.removesuffix(".gz")).write_bytes(raw)
    return images


def write_tree(root, classes, per_class=2, side=32, ending=".png"):
    """Image i of class c in split s is plain (10 c, 10 i, 0 or 255)."""
    for blue, split in ((0, "train"), (255, "test")):
        for c, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for i in range(per_class):
                Image.new("RGB", (side, side), (10 * c, 10 * i, blue)).save(root / split / name / f"{i:03d}{ending}")


CLASSES10 = common.CLASS_NAMES["cifar10"]


def snapshot(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")])


def error(*args, **kwargs):
    """The message of the UserError that load_dataset raises: always one line."""
    with pytest.raises(UserError) as info:
        load_dataset(*args, **kwargs)
    assert "\n" not in str(info.value)
    return str(info.value)


def check_form(data, classes, side):
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        assert images.dtype == torch.uint8 and labels.dtype == torch.int64
        assert images.shape == (len(labels), 3, side, side) and images.is_contiguous()
        assert 0 <= labels.min() and labels.max() < classes
    assert len(data.class_names) == classes and isinstance(data.class_names, list)


# ---- names ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text, name", [
    ("CIFAR-10", "cifar10"), ("cifar_100", "cifar100"), ("Fashion MNIST", "fashionmnist"), ("SVHN", "svhn"),
    ("CINIC-10", "cinic10"), ("digits", "digits"), ("Folder", "folder")])
def test_names(text, name):
    assert common.dataset_name(text) == name


def test_unknown_name_lists_the_known_ones_and_hints():
    message = error("cifra10", ".")
    assert "did you mean cifar10?" in message and all(name in message for name in common.DATASETS)
    with pytest.raises(UserError) as info:
        common.dataset_name("xyzzy")
    assert "did you mean" not in str(info.value)


# ---- digits --------------------------------------------------------------------------------------------------------
def test_digits_counts_range_and_split():
    data = load_dataset("digits", "nowhere")
    check_form(data, 10, 8)
    assert (len(data.train_labels), len(data.test_labels)) == (1438, 359)
    assert data.train_images.min() == 0 and data.train_images.max() == 255
    assert torch.bincount(data.test_labels).min() >= 34 and data.class_names == list("0123456789")
    from sklearn.datasets import load_digits
    grey, labels = load_digits(return_X_y=True)
    def rows(images, labels):
        return [(image.tobytes(), int(label)) for image, label in zip(images, labels)]
    original = rows(np.uint8(np.round(grey.reshape(-1, 8, 8) * 255 / 16)), labels)
    train = rows(data.train_images[:, 1].numpy(), data.train_labels)
    test = rows(data.test_images[:, 2].numpy(), data.test_labels)
    assert sorted(train + test) == sorted(original)             # all images once, each with its label: no overlap
    assert train != sorted(train)                               # kept in the original order, not sorted by class


def test_digits_are_upsampled_smoothly():
    small, large = load_dataset("digits", "nowhere"), load_dataset("digits", "nowhere", side=32)
    check_form(large, 10, 32)
    assert torch.equal(small.train_labels, large.train_labels)
    for i in (0, 700, 1437):                                    # Pillow, an independent implementation, agrees
        reference = Image.fromarray(small.train_images[i, 0].numpy()).resize((32, 32), Image.Resampling.BILINEAR)
        difference = large.train_images[i].numpy().astype(int) - np.asarray(reference)
        assert np.abs(difference).max() <= 1 and abs(difference.mean()) < 0.2


# ---- original files and their places -------------------------------------------------------------------------------
@pytest.mark.parametrize("place", [
    "cifar-10-batches-py", "cifar10/cifar-10-batches-py", "CIFAR-10/cifar-10-batches-py",
    "cifar-10-python/cifar-10-batches-py", "cifar10/cifar-10-python/cifar-10-batches-py"])
def test_cifar10_places(tmp_path, place):
    data_dir = tmp_path / "my data"
    train_images, train_labels, test_images, test_labels = write_cifar(data_dir / place)
    before = snapshot(data_dir)
    for where in (data_dir, str(data_dir), data_dir / place):
        data = load_dataset("CIFAR-10", where)
        check_form(data, 10, 32)
        assert np.array_equal(data.train_images, train_images) and data.train_labels.tolist() == train_labels
        assert np.array_equal(data.test_images, test_images) and data.test_labels.tolist() == test_labels
    assert data.class_names[0] == "airplane" and data.class_names[9] == "truck"
    assert snapshot(data_dir) == before


def test_cifar100_uses_fine_labels(tmp_path):
    _, train_labels, test_images, _ = write_cifar(tmp_path / "cifar-100-python", "cifar100")
    for where in (tmp_path, tmp_path / "cifar-100-python"):
        data = load_dataset("cifar100", where)
        check_form(data, 100, 32)
        assert data.train_labels.tolist() == train_labels and np.array_equal(data.test_images, test_images)
    assert data.class_names == sorted(set(data.class_names)) and len(data.class_names) == 100
    assert "cifar-10-python.tar.gz not found" in error("cifar10", tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_archive_only_is_read_without_writing(tmp_path, name):
    train_images, train_labels, _, _ = write_cifar(tmp_path / "made" / UNPACKED[name], name)
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    with tarfile.open(data_dir / ARCHIVE[name], "w:gz") as archive:
        archive.add(tmp_path / "made" / UNPACKED[name], UNPACKED[name])
    data_dir.chmod(0o555)
    before = snapshot(data_dir)
    data = load_dataset(name, data_dir)
    assert np.array_equal(data.train_images, train_images) and data.train_labels.tolist() == train_labels
    assert snapshot(data_dir) == before
    data_dir.chmod(0o755)


def test_official_cifar_pickles_load_without_warnings(tmp_path):
    """The official files are Python 2 pickles of an old numpy: byte strings, numpy.core, align=0."""
    write_cifar(tmp_path / UNPACKED["cifar10"])
    image = colours(1, 9).reshape(1, -1)
    short = lambda text: b"U" + bytes([len(text)]) + text       # noqa: E731
    python2 = (b"\x80\x02}(" + short(b"data") + b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85"
               + short(b"b") + b"tR(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\n(" + short(b"u1") + b"K\x00K\x01tR(K\x03"
               + short(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00" + image.tobytes()
               + b"tb" + short(b"labels") + b"](K\x07eu.")
    (tmp_path / UNPACKED["cifar10"] / "test_batch").write_bytes(python2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load_dataset("cifar10", tmp_path)
    assert np.array_equal(data.test_images.reshape(1, -1), image) and data.test_labels.tolist() == [7]


@pytest.mark.parametrize("place", ["", "svhn", "SVHN"])
def test_svhn_places_labels_and_orientation(tmp_path, place):
    images = write_svhn(tmp_path / place)
    before = snapshot(tmp_path)
    data = load_dataset("svhn", tmp_path)
    check_form(data, 10, 32)
    assert data.train_labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert data.class_names == list("0123456789") and np.array_equal(data.train_images, images)
    assert data.train_images[0].nonzero().tolist() == [[0, 2, 29]]          # red, row 2, column 29
    assert snapshot(tmp_path) == before


def test_svhn_without_scipy(tmp_path, monkeypatch):
    write_svhn(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "scipy.io", None)
    assert "pip install scipy" in error("svhn", tmp_path)


@pytest.mark.parametrize("place, zipped", [("", True), ("FashionMNIST/raw", True), ("FashionMNIST/raw", False),
                                           ("fashion-mnist", True), ("dataset-fashion-mnist", True)])
def test_fashionmnist_places_and_padding(tmp_path, place, zipped):
    images = write_fashion(tmp_path / place, zipped)
    for where in (tmp_path, tmp_path / place):
        data = load_dataset("fashion-mnist", where)
        check_form(data, 10, 32)
        for channel in range(3):
            assert np.array_equal(data.test_images[:, channel, 2:30, 2:30], images)
        border = data.train_images.clone()
        border[:, :, 2:30, 2:30] = 0
        assert border.sum() == 0 and data.train_labels.tolist() == list(range(10))
    assert data.class_names[0] == "T-shirt/top" and data.class_names[9] == "Ankle boot"


def test_side_resizes_originals(tmp_path):
    train_images, *_ = write_cifar(tmp_path / UNPACKED["cifar10"])
    data = load_dataset("cifar10", tmp_path, side=8)
    check_form(data, 10, 8)
    pooled = train_images.reshape(-1, 3, 8, 4, 8, 4).mean((3, 5))
    assert np.abs(data.train_images.numpy() - pooled).mean() < 20           # antialiased: near the mean of each 4x4


# ---- folder trees --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, place", [
    ("cifar10", "cifar10"), ("cifar10", ""), ("cinic10", "cinic10"), ("cinic10", "CINIC-10"), ("cinic10", ""),
    ("svhn", "SVHN"), ("fashionmnist", "fashionmnist")])
def test_tree_in_place_of_the_originals(tmp_path, name, place):
    names = [text.replace("/", "_") for text in common.CLASS_NAMES[name]]
    write_tree(tmp_path / place, names)
    (tmp_path / place / "valid" / "rubbish").mkdir(parents=True)
    before = snapshot(tmp_path)
    data = load_dataset(name, tmp_path)
    check_form(data, 10, 32)
    assert data.class_names == common.CLASS_NAMES[name]
    assert data.train_labels.tolist() == [c for c in range(10) for _ in range(2)]
    assert torch.equal(data.train_images[:, 0, 5, 5], (10 * data.train_labels).byte())      # label fits the content
    assert data.train_images[:, 1, 5, 5].tolist() == [0, 10] * 10                           # files in sorted order
    assert data.train_images[:, 2].max() == 0 and data.test_images[:, 2].min() == 255
    assert snapshot(tmp_path) == before


def test_tree_of_cifar100_and_label_ids_as_folder_names(tmp_path):
    names = common.CLASS_NAMES["cifar100"]
    write_tree(tmp_path / "a" / "cifar100", names[:25] + names[25:][::-1], per_class=1, side=2)
    data = load_dataset("cifar100", tmp_path / "a", side=2)
    assert data.class_names == names and data.train_images[:25, 0, 0, 0].tolist() == list(range(0, 250, 10))
    write_tree(tmp_path / "b", [f"{i:02d}" for i in range(10)], per_class=1)
    data = load_dataset("fashionmnist", tmp_path / "b")
    assert data.class_names[9] == "Ankle boot" and data.train_images[9, 0, 0, 0] == 90


def test_originals_come_before_a_tree_and_a_named_tree_before_data_dir_itself(tmp_path):
    write_tree(tmp_path, ["cat", "dog"])
    write_tree(tmp_path / "cifar10", CLASSES10)
    assert load_dataset("cifar10", tmp_path).train_images[2, 0, 0, 0] == 10
    train_images, *_ = write_cifar(tmp_path / UNPACKED["cifar10"])
    assert np.array_equal(load_dataset("cifar10", tmp_path).train_images, train_images)
    assert load_dataset("folder", tmp_path).class_names == ["cat", "dog"]


def test_fashion_tree_of_28_pixels_is_padded_like_the_originals(tmp_path):
    write_tree(tmp_path, list("0123456789"), per_class=1, side=28)
    image = load_dataset("fashionmnist", tmp_path).test_images[3]
    assert image[2, :2].sum() == 0 and image[2, 2:30, 2:30].min() == 255 and image[2, :, 30:].sum() == 0


def test_folder_sorts_class_names_and_ignores_the_order_of_the_file_system(tmp_path, monkeypatch):
    write_tree(tmp_path, ["zebra", "Ant", "bee"], per_class=3)
    real_scandir, real_listdir = os.scandir, os.listdir
    results = []
    for turn in (1, -1):
        monkeypatch.setattr(os, "scandir", lambda p: sorted(real_scandir(p), key=lambda entry: entry.name)[::turn])
        monkeypatch.setattr(os, "listdir", lambda p: sorted(real_listdir(p))[::turn])
        results.append(load_dataset("folder", tmp_path))
    monkeypatch.undo()
    assert results[0].class_names == results[1].class_names == ["Ant", "bee", "zebra"]
    for one, other in zip(results[0][:4], results[1][:4]):
        assert torch.equal(one, other)
    assert results[0].train_images[:, 0, 0, 0].tolist() == [10] * 3 + [20] * 3 + [0] * 3
    assert results[0].train_images[:3, 1, 0, 0].tolist() == [0, 10, 20]


def test_hidden_entries_and_other_files_are_ignored(tmp_path):
    write_tree(tmp_path, ["cat", "dog"], ending=".JPG")
    for split in ("train", "test"):
        for folder in (".ipynb_checkpoints", "__MACOSX", ".cache"):
            (tmp_path / split / folder).mkdir()
            Image.new("RGB", (32, 32)).save(tmp_path / split / folder / "a.png")
        for file in (".DS_Store", "Thumbs.db", "desktop.ini", "cat/._000.JPG", "cat/.DS_Store", "cat/Thumbs.db",
                     "cat/desktop.ini", "cat/notes.txt"):
            (tmp_path / split / file).write_bytes(b"no image")
        (tmp_path / split / "dog" / ".ipynb_checkpoints").mkdir()
    data = load_dataset("folder", tmp_path)
    assert data.class_names == ["cat", "dog"] and data.train_labels.tolist() == [0, 0, 1, 1]


def test_empty_class_folder_is_named(tmp_path):
    write_tree(tmp_path, ["cat", "dog"])
    (tmp_path / "test" / "dog" / "000.png").unlink()
    (tmp_path / "test" / "dog" / "001.png").rename(tmp_path / "test" / "dog" / "001.txt")
    assert f"{tmp_path / 'test' / 'dog'} holds no images" in error("folder", tmp_path)


def test_missing_and_surplus_classes_are_listed(tmp_path):
    write_tree(tmp_path, CLASSES10[1:] + ["zeppelin", "Truck"], per_class=1)
    message = error("cifar10", tmp_path)
    assert "11 class folders, 10 expected, missing: airplane, surplus: truck, zeppelin" in message   # Truck came first


def test_train_and_test_need_the_same_classes(tmp_path):
    write_tree(tmp_path, ["ant", "bee"])
    (tmp_path / "train" / "cat").mkdir()
    (tmp_path / "test" / "dog").mkdir()                         # "folder" takes names as they are: a-nt is not ant
    for split in ("train", "test"):
        (tmp_path / split / "bee").rename(tmp_path / split / "a-nt")
    message = error("folder", tmp_path)
    assert f"{tmp_path / 'train'} has 3 class folders, 4 expected, missing: dog" in message
    assert f"{tmp_path / 'test'} has 3 class folders, 4 expected, missing: cat" in message


def test_no_classes_at_all(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    assert "0 class folders" in error("folder", tmp_path)
    assert "0 class folders, 10 expected, missing: airplane" in error("cinic10", tmp_path)


# ---- pixels --------------------------------------------------------------------------------------------------------
def picture_cases():
    palette = Image.new("P", (2, 1))
    palette.putpalette([200, 0, 0, 0, 100, 0])
    palette.putdata([0, 1])
    clear = palette.copy()
    clear.info["transparency"] = 1
    yield "L", ".png", Image.new("L", (2, 1), 77), [[77] * 3] * 2
    yield "LA", ".png", Image.new("LA", (2, 1), (100, 51)), [[224] * 3] * 2            # 100 * 0.2 + 255 * 0.8
    yield "RGBA", ".png", Image.new("RGBA", (2, 1), (10, 20, 30, 0)), [[255] * 3] * 2
    yield "RGBA-opaque", ".png", Image.new("RGBA", (2, 1), (10, 20, 30, 255)), [[10, 20, 30]] * 2
    yield "P", ".png", palette, [[200, 0, 0], [0, 100, 0]]
    yield "P-clear", ".png", clear, [[200, 0, 0], [255, 255, 255]]
    yield "1", ".png", Image.fromarray(np.array([[True, False]])), [[255] * 3, [0] * 3]
    yield "CMYK", ".tif", Image.new("CMYK", (2, 1), (0, 255, 0, 0)), [[255, 0, 255]] * 2
    for ending in (".png", ".tif"):
        sixteen = Image.fromarray(np.array([[65535, 257 * 100]], dtype=np.uint16))
        yield f"I;16{ending}", ending, sixteen, [[255] * 3, [100] * 3]
    yield "I", ".tif", Image.fromarray(np.array([[65535, 257 * 3 + 200]], dtype=np.int32)), [[255] * 3, [4] * 3]


@pytest.mark.parametrize("mode, ending, image, expected", [pytest.param(*case, id=case[0]) for case in picture_cases()])
def test_image_modes(tmp_path, mode, ending, image, expected):
    write_tree(tmp_path, ["cat", "dog"], side=2)
    image = image.resize((2, 2), Image.Resampling.NEAREST)
    options = {"transparency": 1} if mode == "P-clear" else {}
    image.save(tmp_path / "train" / "cat" / f"000{ending}", **options)
    if ending != ".png":
        (tmp_path / "train" / "cat" / "000.png").unlink()
    data = load_dataset("folder", tmp_path, side=2)
    assert data.train_images[0, :, 0].T.tolist() == expected


def test_floats_are_refused(tmp_path):
    write_tree(tmp_path, ["cat", "dog"])
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(tmp_path / "train" / "dog" / "x.tif")
    assert "x.tif" in error("folder", tmp_path)


def test_crop_resize_and_exif(tmp_path):
    write_tree(tmp_path, ["cat", "dog"])
    wide = np.zeros((16, 64, 3), np.uint8)
    wide[:, 24:40, 0] = 255                                     # the middle square is red, the rest black
    Image.fromarray(wide).save(tmp_path / "train" / "cat" / "000.png")
    exif = Image.Exif()
    exif[0x0112] = 6                                            # turn by 90 degrees clockwise
    upright = np.zeros((32, 32, 3), np.uint8)
    upright[:8] = 255                                           # bright above in the file, on the right when turned
    Image.fromarray(upright).save(tmp_path / "train" / "cat" / "001.png", exif=exif)
    data = load_dataset("folder", tmp_path)
    assert data.train_images[0, 0, :, 1:-1].min() == 255 and data.train_images[0, 1].max() == 0
    assert data.train_images[1, 0, :, 24:].min() == 255 and data.train_images[1, 0, :, :24].max() == 0
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "train" / "cat" / "000.png")
    smooth = load_dataset("folder", tmp_path, side=16).train_images[0].float()
    assert (smooth - 127.5).abs().max() < 20                    # antialiased: stripes turn grey


# ---- damaged and missing files -------------------------------------------------------------------------------------
def damage(path, how):
    raw = path.read_bytes()
    path.write_bytes({"truncated": raw[:len(raw) * 2 // 3], "garbage": b"\x93 no such format " * 50, "empty": b""}[how])


@pytest.mark.parametrize("how", ["truncated", "garbage", "empty"])
@pytest.mark.parametrize("kind", ["pickle", "mat", "gz", "jpg", "png", "tar.gz"])
def test_damaged_files_are_named(tmp_path, kind, how):
    if kind == "pickle":
        name, path = "cifar10", tmp_path / UNPACKED["cifar10"] / "data_batch_3"
        write_cifar(path.parent)
    elif kind == "mat":
        name, path, _ = "svhn", tmp_path / "test_32x32.mat", write_svhn(tmp_path)
    elif kind == "gz":
        name, path, _ = "fashionmnist", tmp_path / "t10k-images-idx3-ubyte.gz", write_fashion(tmp_path)
    elif kind == "tar.gz":
        name, path, _ = "cifar10", tmp_path / ARCHIVE["cifar10"], write_cifar(tmp_path / "made")
        with tarfile.open(path, "w:gz") as archive:
            archive.add(tmp_path / "made", UNPACKED["cifar10"])
    else:
        name, path = "folder", tmp_path / "train" / "dog" / f"001.{kind}"
        write_tree(tmp_path, ["cat", "dog"])
        path.unlink(missing_ok=True)
        Image.fromarray(colours(1, 0, (64, 64, 3))[0]).save(path)
    load_dataset(name, tmp_path)
    damage(path, how)
    assert str(path) in error(name, tmp_path)


def test_wrong_content_is_named(tmp_path):
    folder = tmp_path / UNPACKED["cifar10"]
    write_cifar(folder)
    for content, word in (({"data": colours(2, 0).reshape(2, -1), "labels": [0, 10]}, "labels 0 to 10"),
                          ({"data": colours(2, 0).reshape(2, -1), "labels": [0, -1]}, "labels -1 to 0"),
                          ({"data": colours(2, 0).reshape(2, -1), "labels": [0]}, "1 labels"),
                          ({"data": colours(2, 0).reshape(2, -1) / 255, "labels": [0, 1]}, "float64"),
                          ({"data": colours(0, 0).reshape(0, 3072), "labels": []}, "0 labels"),
                          ({"fine_labels": [0]}, "KeyError"), ({"data": os.system}, "refuses to load")):
        (folder / "test_batch").write_bytes(pickle.dumps(content))
        message = error("cifar10", tmp_path)
        assert word in message and str(folder / "test_batch") in message
    (folder / "data_batch_4").unlink()
    assert str(folder / "data_batch_4") in error("cifar10", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"")
    write_fashion(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(9, dtype=np.uint8))))
    assert "9 labels" in error("fashionmnist", tmp_path)
    floats = idx(np.arange(10, dtype=np.uint8)).replace(b"\0\0\x08", b"\0\0\x0d", 1)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(floats))
    assert "no IDX file of bytes" in error("fashionmnist", tmp_path)
    write_svhn(tmp_path)
    savemat(tmp_path / "train_32x32.mat", {"X": colours(2, 0).transpose(2, 3, 1, 0), "y": np.array([[1], [11]])})
    assert "labels 1 to 11" in error("svhn", tmp_path) and str(tmp_path / "train_32x32.mat") in error("svhn", tmp_path)


def test_archive_without_a_batch_is_named(tmp_path):
    with tarfile.open(tmp_path / ARCHIVE["cifar10"], "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("cifar-10-batches-py/readme.html"), io.BytesIO())
    assert "data_batch_1" in error("cifar10", tmp_path)


@pytest.mark.parametrize("name, words", [
    ("cifar10", ["https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "/cifar-10-batches-py, "]),
    ("cifar100", ["https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "/cifar-100-python, "]),
    ("svhn", ["svhn/train_32x32.mat", "http://ufldl.stanford.edu/housenumbers/train_32x32.mat"]),
    ("fashionmnist", ["FashionMNIST/raw/train-images-idx3-ubyte.gz", "http://fashion-mnist.s3"]),
    ("cinic10", ["CINIC-10.tar.gz", "https://datashare.ed.ac.uk/", "not downloaded automatically"]),
    ("folder", ["train or test is missing"])])
@pytest.mark.parametrize("exists", [True, False])
def test_missing_data_message(tmp_path, name, words, exists):
    data_dir = tmp_path if exists else tmp_path / "no such folder"
    message = error(name, data_dir)
    tree = data_dir / name if name != "folder" else data_dir
    assert all(word in message for word in [*words, "--data-dir", f"{tree}/{{train,test}}/<class>/*"])
    if name not in ("cinic10", "folder"):
        assert "download failed (OSError: network is unreachable)" in message
    assert list(tmp_path.iterdir()) == []


def test_only_missing_files_are_downloaded(tmp_path, monkeypatch):
    write_svhn(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "train_32x32.mat").rename(tmp_path / "train_32x32.mat")
    fetched = []
    def fake(url, path, md5):
        fetched.append((url, path, md5))
        path.parent.mkdir()
        path.write_bytes((tmp_path / "elsewhere" / path.name).read_bytes())
    monkeypatch.setattr(common, "download", fake)
    for _ in range(2):
        assert len(load_dataset("svhn", tmp_path).test_labels) == 10
    assert fetched == [("http://ufldl.stanford.edu/housenumbers/test_32x32.mat", tmp_path / "svhn" / "test_32x32.mat",
                        "eb5a983be6a315427106f1b164d9cef3")]


def test_download_leaves_a_complete_file_or_nothing(tmp_path, monkeypatch):
    monkeypatch.undo()                                          # the real common.download
    def half(url, root, filename, md5):
        (Path(root) / filename).write_bytes(b"half")
        raise RuntimeError("File not found or corrupted.")
    monkeypatch.setattr(common, "download_url", half)
    message = error("cifar10", tmp_path)
    assert "RuntimeError: File not found or corrupted." in message and list(tmp_path.iterdir()) == []
    def whole(url, root, filename, md5):
        (Path(root) / filename).write_bytes(b"all")
    monkeypatch.setattr(common, "download_url", whole)
    socket.setdefaulttimeout(77)
    common.download("http://x", tmp_path / "new" / "file.gz", "0" * 32)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.gz"]
    assert socket.getdefaulttimeout() == 77                     # restored
    socket.setdefaulttimeout(None)
    (tmp_path / "file").write_bytes(b"")
    assert "Not a directory" in error("cifar10", tmp_path / "file" / "below")       # a place that cannot be written


def test_dead_proxy_fails_quickly(tmp_path, monkeypatch):
    monkeypatch.undo()
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")      # nobody listens: no packet leaves the machine
    monkeypatch.delenv("no_proxy", raising=False)
    start = time.monotonic()
    for name in ("cifar10", "svhn", "fashionmnist"):
        assert "refused" in error(name, tmp_path)
    assert time.monotonic() - start < 5
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_data_dir_is_a_file(tmp_path):
    (tmp_path / "data").write_text("")
    assert f"--data-dir {tmp_path / 'data'}" in error("cifar10", tmp_path / "data")


# ---- --train-subset ------------------------------------------------------------------------------------------------
def test_train_subset_is_balanced_ordered_and_leaves_the_test_set_alone():
    full = load_dataset("digits", "nowhere")
    part = load_dataset("digits", "nowhere", train_subset=103)
    assert torch.bincount(part.train_labels).tolist() == [11, 11, 11] + [10] * 7
    assert torch.equal(part.test_images, full.test_images)
    def rows(data):
        return [(image.numpy().tobytes(), int(y)) for image, y in zip(data.train_images, data.train_labels)]
    order = {row: i for i, row in enumerate(rows(full))}
    kept = [order[row] for row in rows(part)]
    assert kept == sorted(set(kept)) and kept[-1] > 1250                    # original order, spread over the whole set
    again = load_dataset("digits", "nowhere", train_subset=103)
    assert torch.equal(part.train_images, again.train_images)


def test_train_subset_of_a_tree_decodes_only_what_it_keeps(tmp_path):
    write_tree(tmp_path, ["cat", "dog"], per_class=4)
    for broken in ("cat/001.png", "cat/003.png", "dog/001.png", "dog/003.png"):
        (tmp_path / "train" / broken).write_bytes(b"broken")
    data = load_dataset("folder", tmp_path, train_subset=4)
    assert data.train_labels.tolist() == [0, 0, 1, 1] and data.train_images[:, 1, 0, 0].tolist() == [0, 20, 0, 20]
    assert len(data.test_labels) == 8


def test_train_subset_errors(tmp_path):
    assert "--train-subset 9: must be from 10 " in error("digits", "nowhere", train_subset=9)
    assert "--train-subset 0" in error("digits", "nowhere", train_subset=0)
    assert "to 1438" in error("digits", "nowhere", train_subset=1439)
    write_tree(tmp_path, ["cat", "dog"], per_class=4)
    (tmp_path / "train" / "dog" / "000.png").unlink()
    assert "--train-subset 8: must be from 2 (one image a class) to 7 " in error("folder", tmp_path, train_subset=8)
    with pytest.raises(UserError, match="needs 2 images of class dog, which has 1; 2 is possible"):
        common.balanced_subset(torch.tensor([0, 0, 0, 1]), ["cat", "dog"], 4)
    assert len(load_dataset("folder", tmp_path, train_subset=7).train_labels) == 7


# ---- images for CLIP -----------------------------------------------------------------------------------------------
def clip_pictures():
    """Pillow images that are not square, of all the modes that data sets hold."""
    for i, (mode, size) in enumerate([("RGB", (37, 23)), ("RGB", (9, 40)), ("L", (31, 30)), ("RGBA", (50, 29)),
                                      ("LA", (20, 33)), ("CMYK", (26, 41))]):
        shape = (size[1], size[0], len(Image.new(mode, (1, 1)).getbands()))
        yield Image.fromarray(np.squeeze(colours(1, i, shape)[0]), mode if mode in ("LA", "CMYK") else None)
    yield Image.fromarray(colours(1, 7, (21, 44, 3))[0]).quantize(16)
    yield Image.fromarray(colours(1, 8, (24, 24, 3))[0])


@pytest.mark.parametrize("side", [16, 24, 56])
def test_clip_images_are_those_of_open_clip(tmp_path, side):
    reference = transforms.Compose([common.to_rgb, transforms.Resize(side, transforms.InterpolationMode.BICUBIC),
                                    transforms.CenterCrop(side), transforms.PILToTensor()])
    write_tree(tmp_path, ["cat"])
    pictures = list(clip_pictures())
    for i, image in enumerate(pictures):
        image.save(tmp_path / "train" / "cat" / f"{i:03d}{'.tif' if image.mode == 'CMYK' else '.png'}")
    data = load_dataset("folder", tmp_path, side, clip=True)
    check_form(data, 1, side)
    assert [image.mode for image in pictures] == ["RGB", "RGB", "L", "RGBA", "LA", "CMYK", "P", "RGB"]
    for i, image in enumerate(pictures):
        assert torch.equal(data.train_images[i], reference(image)), image.mode
    plain = load_dataset("folder", tmp_path, side).train_images
    assert not torch.equal(data.train_images[0], plain[0])                  # the other scripts' images are bilinear


def test_clip_images_of_arrays_go_through_pillow(tmp_path):
    train_images, *_ = write_cifar(tmp_path / UNPACKED["cifar10"])
    grey = write_fashion(tmp_path)
    for name, image in (("cifar10", train_images[7].transpose(1, 2, 0)), ("fashionmnist", grey[7])):
        expected = np.asarray(Image.fromarray(image).resize((48, 48), Image.Resampling.BICUBIC).convert("RGB"))
        data = load_dataset(name, tmp_path, 48, clip=True)
        check_form(data, 10, 48)
        assert np.array_equal(data.train_images[7], expected.transpose(2, 0, 1)), name      # no border around fashion
    digits = load_dataset("digits", "nowhere", 12, clip=True, train_subset=20)
    small = load_dataset("digits", "nowhere", train_subset=20)
    expected = Image.fromarray(small.train_images[3, 0].numpy()).resize((12, 12), Image.Resampling.BICUBIC)
    assert np.array_equal(digits.train_images[3, 1], expected)
    default = load_dataset("digits", "nowhere", clip=True, train_subset=10, memory_gb=0)
    assert default.train_images.shape == (10, 3, 224, 224)


def test_clip_images_are_turned_by_exif_and_keep_16_bits(tmp_path):
    write_tree(tmp_path, ["cat"])
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = np.zeros((32, 32, 3), np.uint8)
    upright[:8] = 255
    Image.fromarray(upright).save(tmp_path / "train" / "cat" / "000.png", exif=exif)
    Image.fromarray(np.full((8, 8), 257 * 100, np.uint16)).save(tmp_path / "train" / "cat" / "001.png")
    images = load_dataset("folder", tmp_path, 32, clip=True).train_images
    assert images[0, 0, :, 24:].min() == 255 and images[0, 0, :, :24].max() == 0
    assert images[1].unique().tolist() == [100]


# ---- memory bound --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("name", ["digits", "cifar10", "folder"])
def test_lazy_images_equal_the_cached_ones(tmp_path, name, clip):
    if name == "cifar10":
        write_cifar(tmp_path / UNPACKED["cifar10"])
    write_tree(tmp_path, CLASSES10, per_class=4)
    options = dict(side=20, clip=clip, train_subset=30, skip_share=0.25)
    cached, lazy = (load_dataset(name, tmp_path, **options, memory_gb=gb) for gb in (None, 1e-6))
    assert isinstance(cached.train_images, torch.Tensor) and isinstance(lazy.train_images, common.LazyImages)
    for full, part in ((cached.train_images, lazy.train_images), (cached.test_images, lazy.test_images)):
        assert isinstance(part, common.LazyImages) and len(part) == len(full) and part.shape == full.shape
        assert part.dtype == full.dtype and not torch.equal(full[0], full[-1])
        order = torch.randperm(len(full))[:19]
        for index in (order, order.numpy(), torch.tensor([2, 2, -1]), torch.tensor([], dtype=torch.int64),
                      slice(3, 9), slice(None), slice(None, None, 4)):
            assert torch.equal(part[index], full[index]) and part[index].dtype == torch.uint8
        with pytest.raises(IndexError):
            part[torch.tensor([len(full)])]
    assert common.fingerprint(lazy) == common.fingerprint(cached)
    other = cached._replace(test_images=cached.test_images ^ (torch.arange(20) == 19).byte())
    assert common.fingerprint(other) != common.fingerprint(cached)


def test_memory_bound_counts_both_sets(tmp_path):
    write_tree(tmp_path, ["cat", "dog"], per_class=4)           # 8 + 8 images of 3 x 16 x 16 bytes
    for images, kind in ((16, torch.Tensor), (15, common.LazyImages)):
        data = load_dataset("folder", tmp_path, 16, memory_gb=images * 768 / 2 ** 30)
        assert isinstance(data.train_images, kind) and isinstance(data.test_images, kind)
    assert isinstance(load_dataset("folder", tmp_path, 16, 4, memory_gb=12 * 768 / 2 ** 30).test_images, torch.Tensor)


def test_lazy_images_read_only_what_is_asked_for(tmp_path):
    write_tree(tmp_path, ["cat", "dog"], per_class=4)
    (tmp_path / "train" / "dog" / "001.png").write_bytes(b"broken")
    images = load_dataset("folder", tmp_path, clip=True, memory_gb=0).train_images
    assert images[torch.tensor([4, 6])][:, 1, 0, 0].tolist() == [0, 20]
    with pytest.raises(UserError, match="dog/001.png"):
        images[4:6]


def test_fingerprint_is_that_of_the_whole_tensors():
    data = load_dataset("digits", "nowhere")
    whole = b"".join(part.numpy().tobytes() for part in data[:4])
    assert common.fingerprint(data) == hashlib.sha256(whole).hexdigest()[:16] == "af9bb8fe4f445f52"


# ---- --skip-share --------------------------------------------------------------------------------------------------
def test_skip_share_leaves_out_the_first_of_each_class(tmp_path):
    write_tree(tmp_path, ["cat", "dog"], per_class=4)
    for i in (2, 3):
        (tmp_path / "train" / "dog" / f"00{i}.png").unlink()
    for share, kept in ((0, [0, 10, 20, 30, 0, 10]), (0.24, [10, 20, 30, 10]), (0.25, [10, 20, 30, 10]),
                        (0.26, [20, 30, 10]), (0.5, [20, 30, 10])):
        data = load_dataset("folder", tmp_path, skip_share=share)
        assert data.train_images[:, 1, 0, 0].tolist() == kept and len(data.test_labels) == 8
        assert data.train_labels.tolist() == ([0] * (len(kept) - 1) + [1] if share else [0] * 4 + [1] * 2)
    assert "--skip-share 0.51" in error("folder", tmp_path, skip_share=0.51)               # no dog would be left
    full, part = (load_dataset("digits", "nowhere", skip_share=share) for share in (0, 0.3))
    for label in range(10):
        members = full.train_images[full.train_labels == label]
        assert torch.equal(part.train_images[part.train_labels == label], members[-(-len(members) * 3 // 10):])
    assert torch.equal(part.test_images, full.test_images)
    first = common.first_of_each(full.train_labels, 0.3)                # together they are all, and share none
    assert len(first) + len(part.train_labels) == len(full.train_labels)
    assert common.first_of_each(torch.zeros(100), 0.07).tolist() == list(range(7))         # 0.07 * 100 > 7 in floats


def test_skip_share_comes_before_the_subset(tmp_path):
    write_tree(tmp_path, ["cat", "dog"], per_class=8)
    data = load_dataset("folder", tmp_path, train_subset=4, skip_share=0.5)
    assert data.train_images[:, 1, 0, 0].tolist() == [40, 60, 40, 60]
    assert "to 8 " in error("folder", tmp_path, train_subset=9, skip_share=0.5)


@pytest.mark.parametrize("share", [-0.1, 1, 2, float("nan")])
def test_skip_share_errors(share):
    assert "--skip-share" in error("digits", "nowhere", skip_share=share)


# ---- class names as words ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text, words", [
    ("001.Black_footed_Albatross", "Black footed Albatross"), ("12 013.Bobolink", "Bobolink"), ("3-cat", "cat"),
    ("ApplyEyeMakeup", "Apply Eye Makeup"), ("Apply_Eye_Makeup", "Apply Eye Makeup"), ("YoYo", "Yo Yo"),
    ("polka-dotted", "polka-dotted"), ("aquarium_fish", "aquarium fish"), ("7", "7"), ("07", "07"), ("1_2", "1 2"),
    ("T-shirt/top", "T-shirt or top"), ("colt's foot", "colt's foot"), ("1st place", "1st place"),
    ("  odd__name ", "odd name")])
def test_readable(text, words):
    assert common.readable(text) == words


@pytest.mark.parametrize("name", common.CLASS_NAMES)
def test_prompt_names_are_unique_words(name):
    words = common.prompt_names(name, common.CLASS_NAMES[name])
    assert len({text.lower() for text in words}) == len(common.CLASS_NAMES[name])
    assert not any("_" in text or "/" in text or text != text.strip() for text in words)


def test_class_names_that_read_the_same_are_refused(tmp_path):
    write_tree(tmp_path, ["01_red_fox", "02_RedFox"])
    assert load_dataset("folder", tmp_path).class_names == ["01_red_fox", "02_RedFox"]
    message = error("folder", tmp_path, clip=True)
    assert "01_red_fox and 02_RedFox" in message and "'Red Fox'" in message


# ---- image files with lists, or without a split --------------------------------------------------------------------
UCF_CLASSES = ["HandstandPushups", "ApplyEyeMakeup", "YoYo", "Hammering", "HammerThrow",
               *(f"Sport{chr(65 + i // 26)}{chr(97 + i % 26)}" for i in range(96))]
CUB_CLASSES = [f"{i:03d}.Black_{chr(97 + i // 26)}{chr(97 + i % 26)}_Bird" for i in range(1, 201)]
TREE_CLASSES = {"dtd": common.CLASS_NAMES["dtd"], "resisc45": common.CLASS_NAMES["resisc45"], "cub": CUB_CLASSES,
                "ucf101": sorted(UCF_CLASSES, key=str.lower), "eurosat": common.CLASS_NAMES["eurosat"],
                "flowers102": common.CLASS_NAMES["flowers102"]}


def paint(path, label, number, blue=0):
    """An image that tells its label and its number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (label, number, blue)).save(path, "PNG")


def check_painted(data, classes, train_numbers, test_numbers):
    """Labels fit the images; the numbers of the images come in this order."""
    check_form(data, classes, 8)
    for images, labels, numbers in ((data.train_images, data.train_labels, train_numbers),
                                    (data.test_images, data.test_labels, test_numbers)):
        assert torch.equal(images[:, 0, 4, 4].long(), labels) and labels.unique().tolist() == list(range(classes))
        assert images[:, 1, 4, 4].tolist() == numbers


def write_dtd(root):
    for name in ("train", "val", "test"):
        (root / "labels").mkdir(parents=True, exist_ok=True)
        (root / "labels" / f"{name}2.txt").write_text("no/such.jpg\n")      # another partition
    lists = {"train": [], "val": [], "test": []}
    for label, text in enumerate(common.CLASS_NAMES["dtd"]):
        for number, name in enumerate(("train", "val", "test", "test")):
            paint(root / "images" / text / f"{text}_{number:04d}.jpg", label, number)
            lists[name].append(f"{text}/{text}_{number:04d}.jpg")
    for name, entries in lists.items():
        (root / "labels" / f"{name}1.txt").write_text("\n".join(entries[::-1]) + "\n")
    return 47, [0] * 47 + [1] * 47, [3, 2] * 47


def write_flowers102(root):
    ids = np.random.default_rng(0).permutation(306) + 1
    labels = np.arange(306) * 7 % 102
    for i in range(1, 307):
        paint(root / "jpg" / f"image_{i:05d}.jpg", labels[i - 1], i % 256)
    of_class = [ids[labels[ids - 1] == label] for label in range(102)]
    sets = [np.array([members[k] for members in of_class]) for k in (0, 1, 2)]
    savemat(root / "imagelabels.mat", {"labels": labels[None] + 1})
    savemat(root / "setid.mat", {"trnid": sets[0][None], "valid": sets[1][None], "tstid": sets[2][None]})
    return 102, (np.concatenate(sets[:2]) % 256).tolist(), (sets[2] % 256).tolist()


def write_eurosat(root):
    for label, text in enumerate(common.CLASS_NAMES["eurosat"]):
        for number in range(1, 11):
            paint(root / text / f"{text}_{number}.jpg", label, number)
    return 10, [1, 10, 2, 3, 5, 6, 7, 8] * 10, [4, 9] * 10      # by name, 10 comes after 1: the fifth is number 4


def write_resisc45(root):
    for label, text in enumerate(common.CLASS_NAMES["resisc45"]):
        for number in range(1, 6):
            paint(root / text / f"{text}_{number:03d}.jpg", label, number)
    return 45, [5] * 45, [1, 2, 3, 4] * 45


def write_resisc45_lists(place, prefix=""):
    for name, numbers in (("train", [2]), ("val", [4]), ("test", [5, 1, 3])):
        files = [f"{prefix}{text}/{text}_{number:03d}.jpg" for text in common.CLASS_NAMES["resisc45"]
                 for number in numbers]
        images = [{"id": i, "file_name": file} for i, file in enumerate(files)]
        (place / f"{name}.json").write_text(json.dumps({"images": images, "annotations": []}))
    return 45, [2] * 45 + [4] * 45, [5, 1, 3] * 45


def write_cub(root):
    lines = {"images": [], "image_class_labels": [], "train_test_split": []}
    order = np.random.default_rng(0).permutation(400)
    for i, k in enumerate(order, 1):
        label, number = divmod(int(k), 2)
        file = f"{CUB_CLASSES[label]}/Bird_{number:04d}_{i}.jpg"
        paint(root / "images" / file, label, number)
        for name, value in (("images", file), ("image_class_labels", label + 1), ("train_test_split", 1 - number)):
            lines[name].append(f"{i} {value}")
    lines["classes"] = [f"{i} {text}" for i, text in enumerate(CUB_CLASSES, 1)]
    for name, content in lines.items():
        (root / f"{name}.txt").write_text("\n".join(content) + "\n")
    return 200, [0] * 200, [1] * 200


def write_ucf101(root, lists="json"):
    """As CoOp names folders and files: Handstand_Pushups/v_HandStandPushups_g01_c01.jpg."""
    entries = {"train": [], "val": [], "test": []}
    official = {"train": [], "test": []}
    for label, text in enumerate(UCF_CLASSES):
        folder = "_".join(re.findall("[A-Z][^A-Z]*", text))
        stem = "v_" + text.replace("HandstandPushups", "HandStandPushups")
        for number, name in enumerate(("train", "val", "test")):
            file = f"{stem}_g{number:02d}_c01"
            paint(root / "UCF-101-midframes" / folder / f"{file}.jpg", label, number)
            entries[name].append([f"{folder}/{file}.jpg", label, folder])
            official["test" if name == "test" else "train"].append((f"{text}/{file}.avi", label + 1))
    if lists == "json":
        (root / "split_zhou_UCF101.json").write_text(json.dumps(entries))
        return 101, [0] * 101, [2] * 101
    root = root / "ucfTrainTestlist"
    root.mkdir()
    (root / "trainlist01.txt").write_text("".join(f"{file} {label}\r\n" for file, label in official["train"]))
    (root / "testlist01.txt").write_text("".join(f"{file}\r\n" for file, _ in official["test"]))
    return 101, [0, 1] * 101, [2] * 101


WRITERS = {"dtd": write_dtd, "flowers102": write_flowers102, "eurosat": write_eurosat, "resisc45": write_resisc45,
           "cub": write_cub, "ucf101": write_ucf101}
PLACES = {"dtd": "dtd/dtd", "flowers102": "flowers-102", "eurosat": "eurosat/2750", "resisc45": "NWPU-RESISC45",
          "cub": "CUB_200_2011", "ucf101": "ucf101"}


@pytest.mark.parametrize("text, name", [
    ("CUB-200-2011", "cub"), ("cub_200", "cub"), ("CUB", "cub"), ("NWPU-RESISC45", "resisc45"),
    ("RESISC45", "resisc45"), ("UCF-101", "ucf101"), ("Oxford Flowers", "flowers102"), ("Flowers-102", "flowers102"),
    ("EuroSAT", "eurosat"), ("DTD", "dtd")])
def test_names_of_the_clip_data_sets(text, name):
    assert common.dataset_name(text) == name
    with pytest.raises(UserError, match="not a data set of this script; there are digits, folder$"):
        common.dataset_name(text, ("digits", "folder"))


@pytest.mark.parametrize("name, place, at", [(name, place, "") for name, place in PLACES.items()] + [
    ("dtd", "DTD", "DTD"), ("dtd", "dtd", ""), ("flowers102", "oxford_flowers", "oxford_flowers"),
    ("eurosat", "EuroSAT_RGB", ""), ("eurosat", "2750", "2750"), ("resisc45", "resisc45/NWPU-RESISC45", ""),
    ("resisc45", "x", "x"), ("cub", "cub/CUB_200_2011", ""), ("cub", "CUB_200_2011", "CUB_200_2011"),
    ("ucf101", "UCF-101", "UCF-101")])
def test_layouts_of_image_files(tmp_path, name, place, at):
    expected = WRITERS[name](tmp_path / place)
    for folder in ("__MACOSX", ".ipynb_checkpoints"):
        paint(tmp_path / place / folder / "rubbish.jpg", 0, 0)
    before = snapshot(tmp_path)
    data = load_dataset(name, tmp_path / at, 8)
    check_painted(data, *expected)
    assert data.class_names == {**TREE_CLASSES, "ucf101": [re.sub("([a-z])([A-Z])", r"\1_\2", text)
                                                           for text in UCF_CLASSES]}[name]
    assert data.source.startswith("original files, ") and snapshot(tmp_path) == before
    lazy = load_dataset(name, tmp_path / at, 8, clip=True, memory_gb=0)
    assert isinstance(lazy.test_images, common.LazyImages) and len(set(lazy.class_names)) == expected[0]
    assert torch.equal(lazy.test_images[5:9], data.test_images[5:9])        # plain images of 8 pixels stay as they are


def test_class_names_for_clip(tmp_path):
    def words(name):
        WRITERS[name](tmp_path / PLACES[name])
        return load_dataset(name, tmp_path, 8, clip=True, memory_gb=0).class_names
    assert words("cub")[0] == "black ab bird" and words("ucf101")[:3] == ["Handstand Pushups", "Apply Eye Makeup",
                                                                          "Yo Yo"]
    assert words("eurosat") == ["annual crop land", "forest", "brushland or shrubland", "highway or road",
                                "industrial buildings or commercial buildings", "pasture land", "permanent crop land",
                                "residential buildings or homes or apartments", "river", "lake or sea"]
    assert "polka-dotted" in words("dtd") and words("resisc45")[2] == "baseball diamond"
    assert words("flowers102") == common.CLASS_NAMES["flowers102"]


def test_tables_of_class_names():
    assert {name: len(names) for name, names in common.CLASS_NAMES.items()} == {
        "digits": 10, "svhn": 10, "fashionmnist": 10, "cifar10": 10, "cinic10": 10, "cifar100": 100, "eurosat": 10,
        "dtd": 47, "resisc45": 45, "flowers102": 102}
    for name in ("dtd", "resisc45", "eurosat"):
        assert common.CLASS_NAMES[name] == sorted(common.CLASS_NAMES[name])
    flowers = common.CLASS_NAMES["flowers102"]
    assert [flowers[i] for i in (0, 6, 59, 101)] == ["pink primrose", "moon orchid", "pink-yellow dahlia?",
                                                     "blackberry lily"]
    assert flowers == getattr(datasets.Flowers102, "classes", flowers)
    for names in common.CLASS_NAMES.values():
        assert len({common.squeeze(text) for text in names}) == len(names)


@pytest.mark.parametrize("above, prefix", [(False, ""), (False, "NWPU-RESISC45/"), (True, "train.zip@"),
                                           (True, "images/")])
def test_resisc45_with_lists(tmp_path, above, prefix):
    place = tmp_path / "resisc45_clip"
    write_resisc45(place / "images" if above else place)
    data = load_dataset("resisc45", tmp_path, 8)
    assert data.source == "original files, every fifth image of a class is train"
    expected = write_resisc45_lists(place, prefix)
    data = load_dataset("resisc45", tmp_path, 8)
    check_painted(data, *expected)
    assert data.source == "original files, train.json with val.json, test.json"


def test_ucf101_with_the_official_lists(tmp_path):
    expected = write_ucf101(tmp_path / "ucf101", "official")
    data = load_dataset("ucf101", tmp_path, 8)
    check_painted(data, *expected)
    assert data.source == "original files, trainlist01.txt, testlist01.txt"
    assert data.class_names[:3] == ["HandstandPushups", "ApplyEyeMakeup", "YoYo"]
    assert data.train_labels.tolist() == [label for label in range(101) for _ in range(2)]
    frames = tmp_path / "ucf101" / "UCF-101-midframes"
    file = frames / "Handstand_Pushups" / "v_HandStandPushups_g01_c01.jpg"
    file.rename(file.with_name("v_handstandpushups_g01_c01.JPG"))
    (frames / "Handstand_Pushups").rename(frames / "HandStandPushups")
    again = load_dataset("ucf101", tmp_path, 8, clip=True)
    assert torch.equal(again.train_images, data.train_images) and again.class_names[0] == "Handstand Pushups"
    write_ucf101(tmp_path / "b" / "ucf101", "json")
    (tmp_path / "b" / "ucf101" / "split_zhou_UCF101.json").rename(tmp_path / "ucf101" / "split_zhou_UCF101.json")
    data = load_dataset("ucf101", tmp_path, 8)                              # with both, CoOp's list comes first
    assert len(data.train_labels) == 101 and data.source == (
        "original files, train and test of split_zhou_UCF101.json, val unused")


@pytest.mark.parametrize("name", TREE_CLASSES)
def test_trees_of_the_clip_data_sets(tmp_path, name):
    classes = TREE_CLASSES[name]
    for label, text in enumerate(classes):
        paint(tmp_path / name / "train" / text / "a.png", label, 1)
        paint(tmp_path / name / "test" / text.replace("Pushups", "PushUps") / "a.png", label, 2)
    data = load_dataset(name, tmp_path, 8)
    check_painted(data, len(classes), [1] * len(classes), [2] * len(classes))
    assert data.class_names == classes and data.source == "image folders"
    (tmp_path / name / "train" / classes[5]).rename(tmp_path / "elsewhere")
    message = error(name, tmp_path, 8)
    assert f"has {len(classes) - 1} class folders, {len(classes)} expected, missing: {classes[5]}" in message


def test_a_tree_needs_the_official_number_of_classes(tmp_path):
    for split in ("train", "test"):
        for text in CUB_CLASSES[:199]:
            paint(tmp_path / "cub" / split / text / "a.png", 0, 0)
    assert "has 199 class folders, 200 expected" in error("cub", tmp_path)


def edit(path, old, new, count=1):
    """Replace the first occurrence in a text file, which must be there."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))


def test_wrong_dtd_is_named(tmp_path):
    root = tmp_path / "dtd" / "dtd"
    write_dtd(root)
    (root / "images" / "grid" / "grid_0003.jpg").unlink()
    test_list, val_list = root / "labels" / "test1.txt", root / "labels" / "val1.txt"
    assert (f"{test_list}: 1 of its 94 images are not in {root / 'images'}, the first is grid/grid_0003.jpg"
            in error("dtd", tmp_path))
    edit(val_list, "meshed/", "mashed/")
    assert f"{val_list}: 1 images of unknown classes, the first is mashed/meshed_0001.jpg" in error("dtd", tmp_path)
    edit(val_list, "mashed/", "meshed")
    assert f"cannot read {val_list} (ValueError" in error("dtd", tmp_path)              # a line without a class
    val_list.unlink()
    assert f"cannot read {val_list} (FileNotFoundError" in error("dtd", tmp_path)
    write_dtd(root)
    edit(root / "labels" / "test1.txt", "lined/lined_0003.jpg\n", "")
    edit(root / "labels" / "test1.txt", "lined/lined_0002.jpg\n", "")
    assert "no test images of lined" in error("dtd", tmp_path)
    for name in ("train1", "val1"):
        (root / "labels" / f"{name}.txt").write_text("")
    assert "no train images of banded, " in error("dtd", tmp_path)


def test_wrong_flowers102_is_named(tmp_path):
    root = tmp_path / "flowers-102"
    write_flowers102(root)
    (root / "jpg" / "image_00007.jpg").unlink()
    message = error("flowers102", tmp_path)
    assert f"{root / 'setid.mat'}: 1 of its " in message and "image_00007.jpg" in message
    savemat(root / "setid.mat", {"trnid": [[1, 2]], "valid": [[3]], "tstid": [[307]]})
    assert str(root / "setid.mat") in error("flowers102", tmp_path)
    savemat(root / "setid.mat", {"trnid": [[1, 2]], "valid": [[3]], "tstid": [[4]]})
    assert "no train images of hard-leaved pocket orchid, canterbury bells, " in error("flowers102", tmp_path)
    savemat(root / "setid.mat", {"trnid": [[1, 2]]})
    assert str(root / "setid.mat") in error("flowers102", tmp_path)
    savemat(root / "imagelabels.mat", {"labels": [[1, 103]]})
    message = error("flowers102", tmp_path)
    assert f"cannot read {root / 'imagelabels.mat'} (ValueError: labels 1 to 103, expected 1 to 102)" in message


@pytest.mark.parametrize("name, root", [("eurosat", "eurosat/2750"), ("resisc45", "NWPU-RESISC45")])
def test_wrong_class_folders_are_named(tmp_path, name, root):
    WRITERS[name](tmp_path / root)
    last = common.CLASS_NAMES[name][-1]
    (tmp_path / root / last).rename(tmp_path / root / "moon")
    count = len(common.CLASS_NAMES[name])
    assert (f"{tmp_path / root} has {count} class folders, {count} expected, missing: {last}, surplus: moon"
            in error(name, tmp_path))
    (tmp_path / root / "moon").rename(tmp_path / root / last)
    for file in (tmp_path / root / last).iterdir():
        file.unlink()
    assert f"class folder {tmp_path / root / last} holds no images" in error(name, tmp_path)


def test_wrong_resisc45_lists_are_named(tmp_path):
    root = tmp_path / "NWPU-RESISC45"
    write_resisc45(root)
    write_resisc45_lists(root)
    edit(root / "test.json", "beach/beach_005", "beach/beach_006")
    message = error("resisc45", tmp_path)
    assert f"{root / 'test.json'}: 1 of its 135 images are not in {root}, the first is beach/beach_006.jpg" in message
    for content in ("{", "{}", '{"images": [{}]}', '{"images": [{"file_name": "a.jpg"}]}', '{"images": [1]}'):
        (root / "val.json").write_text(content)
        assert str(root / "val.json") in error("resisc45", tmp_path)
    (root / "val.json").unlink()
    assert str(root / "val.json") in error("resisc45", tmp_path)


def test_wrong_cub_is_named(tmp_path):
    root = tmp_path / "CUB_200_2011"
    write_cub(root)
    for name, old, new in (("image_class_labels", "400 ", "401 "), ("image_class_labels", " 200\n", " 201\n"),
                           ("train_test_split", " 1\n", " 2\n"), ("train_test_split", "7 ", "x "),
                           ("classes", "200 ", "201 "), ("classes", "1 001.", "1 1 001.")):
        path = root / f"{name}.txt"
        content = path.read_text()
        edit(path, old, new)
        assert str(path) in error("cub", tmp_path), (name, old)
        path.write_text(content)
    for file in ("classes.txt", "image_class_labels.txt", "train_test_split.txt"):
        (root / file).rename(tmp_path / "kept")
        assert f"cannot read {root / file} (FileNotFoundError" in error("cub", tmp_path)
        (tmp_path / "kept").rename(root / file)
    next((root / "images" / CUB_CLASSES[5]).iterdir()).unlink()
    assert f"{root / 'images.txt'}: 1 of its 200 images are not in {root / 'images'}" in error("cub", tmp_path)
    (root / "images").rename(root / "pictures")
    assert str(root / "images") in error("cub", tmp_path)


def test_wrong_ucf101_is_named(tmp_path):
    root = tmp_path / "ucf101"
    write_ucf101(root)
    (root / "UCF-101-midframes" / "Yo_Yo" / "v_YoYo_g02_c01.jpg").unlink()
    message = error("ucf101", tmp_path)
    assert f"{root / 'split_zhou_UCF101.json'}: 1 of its 101 images" in message and "v_YoYo_g02_c01" in message
    edit(root / "split_zhou_UCF101.json", "Yo_Yo/v_YoYo_g02", "Ha_Ha/v_YoYo_g02")
    assert "1 images of unknown classes, the first is Ha_Ha/v_YoYo_g02" in error("ucf101", tmp_path)
    for content in ("", "[]", '{"train": []}', '{"train": [["a/b.jpg", 0, "a"]], "test": []}',
                    '{"train": [1], "test": []}'):
        (root / "split_zhou_UCF101.json").write_text(content)
        assert f"cannot read {root / 'split_zhou_UCF101.json'}" in error("ucf101", tmp_path)
    (root / "split_zhou_UCF101.json").unlink()
    assert "no split_zhou_UCF101.json in" in error("ucf101", tmp_path)
    write_ucf101(tmp_path / "b" / "ucf101", "official")
    (tmp_path / "b" / "ucf101" / "ucfTrainTestlist" / "testlist01.txt").unlink()
    assert "testlist01.txt" in error("ucf101", tmp_path / "b")


@pytest.mark.parametrize("name, words", [
    ("dtd", ["/dtd/download/dtd-r1.0.1.tar.gz", "/dtd/dtd-r1.0.1.tar.gz or unpacked as", "/dtd/dtd,"]),
    ("flowers102", ["/flowers/102/102flowers.tgz", "/flowers-102/102flowers.tgz or unpacked as", "/flowers-102/jpg,"]),
    ("eurosat", ["https://huggingface.co/", "/eurosat/EuroSAT.zip or unpacked as", "/eurosat/2750,"]),
    ("resisc45", ["no airplane/ in", "/NWPU-RESISC45/<class>/*.jpg", "train.json", "https://", "not downloaded"]),
    ("cub", ["no images.txt in", "/CUB_200_2011/{images.txt,", "CUB_200_2011.tgz from https://", "not downloaded"]),
    ("ucf101", ["no split_zhou_UCF101.json and no Apply_Eye_Makeup/ in", "UCF-101-midframes/<Class_Name>/*.jpg",
                "trainlist01.txt", "https://", "not downloaded"])])
def test_missing_clip_data_message(tmp_path, name, words):
    message = error(name, tmp_path)
    assert all(word in message for word in [*words, "--data-dir", f"{tmp_path / name}/{{train,test}}/<class>/*"])
    assert list(tmp_path.iterdir()) == []


def pack(archive, folder, inner):
    """The content of a folder as an archive in which it is called `inner`."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as file:
            for path in folder.rglob("*"):
                file.write(path, Path(inner) / path.relative_to(folder))
    else:
        with tarfile.open(archive, "w:gz") as file:
            file.add(folder, inner)


@pytest.mark.parametrize("name, archive, inner, place", [
    ("dtd", "dtd-r1.0.1.tar.gz", "dtd", "dtd"), ("eurosat", "EuroSAT.zip", "2750", "eurosat"),
    ("flowers102", "102flowers.tgz", "jpg", "flowers-102")])
def test_archives_are_downloaded_and_unpacked_once(tmp_path, monkeypatch, name, archive, inner, place):
    made = tmp_path / "made"
    expected = WRITERS[name](made)
    pack(made / archive, made / "jpg" if name == "flowers102" else made, inner)
    fetched = []
    def fake(url, path, md5):
        assert url.endswith(f"/{path.name}") and len(md5) == 32
        fetched.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((made / path.name).read_bytes())
    monkeypatch.setattr(common, "download", fake)
    for _ in range(2):
        check_painted(load_dataset(name, tmp_path / "data", 8), *expected)
    files = [archive] + (["imagelabels.mat", "setid.mat"] if name == "flowers102" else [])
    assert fetched == [tmp_path / "data" / place / file for file in files]
    assert sorted(path.name for path in (tmp_path / "data" / place).iterdir()) == sorted([*files, inner])
    for where in (tmp_path / "by hand", tmp_path / "by hand too" / place):                # put there by the user
        for file in files:
            where.mkdir(parents=True, exist_ok=True)
            (where / file).write_bytes((made / file).read_bytes())
        check_painted(load_dataset(name, tmp_path / where.relative_to(tmp_path).parts[0], 8), *expected)
    assert len(fetched) == len(files)


@pytest.mark.parametrize("how", ["truncated", "garbage", "empty", "other"])
@pytest.mark.parametrize("name, archive", [("dtd", "dtd-r1.0.1.tar.gz"), ("eurosat", "EuroSAT.zip")])
def test_damaged_archives_are_named_and_leave_nothing(tmp_path, name, archive, how):
    path = tmp_path / "data" / archive
    paint(tmp_path / "made" / "a.png", 0, 0)
    pack(path, tmp_path / "made", "other")
    if how != "other":
        damage(path, how)
    assert f"cannot unpack {path}" in error(name, tmp_path / "data")
    assert {entry.name for entry in (tmp_path / "data").iterdir()} <= {archive, "other"}
