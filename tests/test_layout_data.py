"""tools/layout_data.py on small fakes of the originals. The content of an image is its class and the rank in it."""

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder

TOOL = Path(__file__).resolve().parent.parent / "tools" / "layout_data.py"
SPEC = importlib.util.spec_from_file_location("layout_data", TOOL)
layout_data = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(layout_data)

COUNTS = {"cub": {"train_test_split.txt": (2, 2, 4)},
          "ucf101": {"split_zhou_UCF101.json": (3, 3, 3), "trainlist01.txt, testlist01.txt": (3, 6, 3)},
          "resisc45": {"train.json with val.json, test.json": (2, 4, 6),
                       "every fifth image of a class is train": (2, 4, 18)},
          "cinic10": {"train and test, valid unused": (2, 4, 2)}}
CUB, UCF = ("001.Black_footed_Albatross", "002.Crow"), ("Apply_Eye_Makeup", "Handstand_Pushups", "Yo_Yo")
RESISC = ("airplane", "sea_ice")


@pytest.fixture(autouse=True)
def small_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(layout_data, "COUNTS", COUNTS)
    monkeypatch.chdir(tmp_path)


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make_cub(root):
    lists = {"images": [], "image_class_labels": [], "train_test_split": [], "classes": ["1 " + CUB[0], "2 " + CUB[1]]}
    for i, (label, rank) in enumerate([(1, 2), (0, 0), (1, 0), (0, 1), (1, 1), (0, 2)], 1):
        put(root / "images" / CUB[label] / f"bird_{rank}.jpg", f"{CUB[label]} {rank}")
        for name, value in (("images", f"{CUB[label]}/bird_{rank}.jpg"), ("image_class_labels", label + 1),
                            ("train_test_split", int(rank == 1))):
            lists[name].append(f"{i} {value}")
    for name, lines in lists.items():
        put(root / f"{name}.txt", "\n".join(lines) + "\n")


def make_ucf101(root):
    """The folder of the frames, and both lists beside it: three videos a class, the second one CoOp's val."""
    coop, official = {"train": [], "val": [], "test": []}, {"train": [], "test": []}
    for label, name in enumerate(UCF):
        squeezed = name.replace("_", "")
        for rank, split in enumerate(coop):
            stem = f"v_{squeezed.replace('Handstand', 'HandStand')}_g0{rank}_c01"
            put(root / name / f"{stem}.jpg", f"{name} {rank}")
            coop[split].append([f"{name}/{stem}.jpg", label, name])
            official["test" if split == "test" else "train"].append(f"{squeezed}/{stem}.avi {label + 1}\r\n")
    put(root.parent / "split_zhou_UCF101.json", json.dumps(coop))
    for split, lines in official.items():
        put(root.parent / "ucfTrainTestlist" / f"{split}list01.txt", "".join(lines))


def make_resisc45(root, lists=None):
    """By name 0 to 10 are 0, 1, 10, 2, ..., so that every fifth image is 3 and 8. lists: the folder that gets them."""
    for name in RESISC:
        for rank in range(11):
            put(root / name / f"{name}_{rank}.jpg", f"{name} {rank}")
    for split, ranks in (("train", [5]), ("val", [1]), ("test", [4, 0, 10])) if lists else ():
        files = [f"{split}.zip@{name}/{name}_{rank}.jpg" for name in RESISC for rank in ranks]
        put(lists / f"{split}.json", json.dumps({"images": [{"id": 0, "file_name": file} for file in files]}))


def make_cinic10(root):
    for split, ranks in (("train", [0, 1]), ("valid", [2]), ("test", [3])):
        for name in ("airplane", "cat"):
            for rank in ranks:                                      # the same file names in each split
                put(root / split / name / f"cifar10-{rank % 2}.png", f"{name} {rank}")


CASES = {       # how to make the originals, flags, the rule's place in COUNTS, classes, ranks in train and in test
    "cub": (make_cub, [], 0, CUB, "1", "0 2"),
    "ucf101": (make_ucf101, [], 0, UCF, "0", "2"),
    "ucf101 official": (make_ucf101, ["--list", "top/ucfTrainTestlist"], 1, UCF, "0 1", "2"),
    "resisc45": (make_resisc45, [], 1, RESISC, "3 8", "0 1 10 2 4 5 6 7 9"),
    "resisc45 lists": (lambda root: make_resisc45(root, root), [], 0, RESISC, "1 5", "0 10 4"),
    "resisc45 lists above": (lambda root: make_resisc45(root, root.parent), [], 0, RESISC, "1 5", "0 10 4"),
    "cinic10": (make_cinic10, [], 0, ("airplane", "cat"), "0 1", "3")}


def snapshot(folder):
    return {str(path): (path.stat().st_mtime_ns, path.is_dir() or path.read_bytes()) for path in folder.rglob("*")}


def refused(capsys, *argv, status=2):
    """The one line on stderr."""
    capsys.readouterr()
    assert layout_data.main(list(argv)) == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("level", ["top", "top/originals", "top/originals/Inner"])
def test_splits_value_by_value_and_a_second_run(tmp_path, capsys, case, level):
    make, flags, rule, classes, *ranks = CASES[case]
    name, originals = case.split()[0], tmp_path / "top" / "originals"
    make(originals)
    put(next(originals.rglob("*_*.jpg"), originals / "train" / "cat" / "x.jpg").with_name("._x.jpg"), "")
    for rubbish in (".DS_Store", "__MACOSX/x.jpg", ".ipynb_checkpoints/x.jpg", "Inner/._x.jpg", "loose.jpg"):
        put(originals / rubbish, "")
    argv = [name, "--from", level, *flags, "--data-dir", "my data"]
    before = snapshot(tmp_path / "top")
    assert layout_data.main(argv) == 0
    for split, numbers in zip(("train", "test"), ranks):
        tree = ImageFolder(f"my data/{name}/{split}", loader=lambda path: Path(path).read_text())
        assert tree.classes == list(classes)
        assert [image for image, _ in tree] == [f"{text} {rank}" for text in classes for rank in numbers.split()]
        assert all(os.stat(path).st_nlink == 2 for path, _ in tree.samples)
    lines = capsys.readouterr().out.splitlines()
    rule, (count, *sizes) = list(COUNTS[name].items())[rule]
    assert lines == [f"my data/{name}/train: {sizes[0]} images of {count} classes ({rule})",
                     f"my data/{name}/test: {sizes[1]} images of {count} classes ({rule})",
                     f"done; use it with --dataset {name} --data-dir 'my data'"]
    assert snapshot(tmp_path / "top") == before and os.listdir("my data") == [name]
    done = snapshot(tmp_path)
    assert layout_data.main(argv) == 0 and snapshot(tmp_path) == done
    lines[2] = lines[2].replace("done", "already there, nothing changed")
    assert capsys.readouterr().out.splitlines() == lines


def test_the_published_counts():
    fresh = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(fresh)
    assert [numbers for rules in fresh.COUNTS.values() for numbers in rules.values()] == [
        (200, 5994, 5794), (101, 7639, 3783), (101, 9537, 3783), (45, 6300, 25200), (45, 6300, 25200),
        (10, 90000, 90000)]
    assert [list(rules) for rules in fresh.COUNTS.values()] == [list(rules) for rules in COUNTS.values()]


def test_spellings_of_frames_and_symbolic_links(tmp_path):
    make_ucf101(tmp_path / "o" / "UCF-101")
    folder = (tmp_path / "o/UCF-101/Handstand_Pushups").rename(tmp_path / "o/UCF-101/HandStandPushups")
    (folder / "v_HandStandPushups_g02_c01.jpg").rename(tmp_path / "frame")
    (folder / "v_handstandpushups_g02_c01.JPG").symlink_to("../../../frame")
    assert layout_data.main(["ucf101", "--from", "o/UCF-101", "--list", "o/ucfTrainTestlist"]) == 0
    [image] = (tmp_path / "data/ucf101/test/Handstand_Pushups").iterdir()
    assert image.name == "v_handstandpushups_g02_c01.JPG" and not image.is_symlink()
    assert image.read_text() == "Handstand_Pushups 2"


@pytest.mark.parametrize("place", ["link", "rename"])
def test_killed_at_any_moment(tmp_path, place):
    """kill -9 at the fourth link or before the rename: no folder; the next run removes what is left."""
    make_cub(tmp_path / "CUB")
    argv = ["cub", "--from", "CUB", "--data-dir", "data"]
    code = f"""if True:
        import os, runpy, signal, sys
        from pathlib import Path
        sys.argv, tool = ["x"], runpy.run_path({str(TOOL)!r})
        tool["COUNTS"].update({COUNTS!r})
        def die_at_fourth(*paths, link=os.link, made=[]):
            made.append(paths) if len(made) < 3 else os.kill(os.getpid(), signal.SIGKILL)
            link(*paths)
        if {place!r} == "link":
            os.link = die_at_fourth
        else:
            Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        tool["main"]({argv!r})"""
    for _ in range(2 if place == "link" else 1):
        assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
        [left] = os.listdir("data")
        assert left.startswith(".cub.") and left.endswith(".part")
        assert len(list(Path("data").rglob("*.jpg"))) == (3 if place == "link" else 6)
    assert layout_data.main(argv) == 0 and os.listdir("data") == ["cub"] and len(list(Path("data").rglob("*.jpg"))) == 6


def test_copies_where_there_are_no_links_and_a_full_disk(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
    make_cub(tmp_path / "CUB")
    monkeypatch.setattr(os, "link", fail)
    with monkeypatch.context() as patch:
        patch.setattr(layout_data.shutil, "copyfile", fail)
        assert "No space left" in refused(capsys, "cub", "--from", "CUB", status=1) and os.listdir("data") == []
    assert layout_data.main(["cub", "--from", "CUB"]) == 0
    assert Path(f"data/cub/train/{CUB[1]}/bird_1.jpg").read_text() == f"{CUB[1]} 1"
    assert os.stat(f"CUB/images/{CUB[1]}/bird_1.jpg").st_nlink == 1


def test_a_run_whose_part_another_run_removes_cannot_finish(tmp_path, monkeypatch, capsys):
    make_cub(tmp_path / "CUB")
    link = os.link
    def meanwhile(*paths):
        monkeypatch.setattr(os, "link", link)
        assert layout_data.main(["cub", "--from", "CUB"]) == 0
        link(*paths)
    monkeypatch.setattr(os, "link", meanwhile)
    assert layout_data.main(["cub", "--from", "CUB"]) == 1
    assert os.listdir("data") == ["cub"] and len(list(Path("data").rglob("*.jpg"))) == 6


TWICE = json.dumps({"images": [{"file_name": f"{name}/{name}_4.jpg"} for name in RESISC]})      # in test.json too
WRONG = [       # case, what is changed in the originals and to what (None: removed), words of the message
    ("cub", f"images/{CUB[1]}/bird_2.jpg", None, "images.txt: expected its 6 images|1 not found|Crow/bird_2.jpg"),
    ("cub", f"images/{CUB[1]}/bird_2.png", "", "images.txt: cannot tell|bird_2.jpg from|bird_2.png"),
    ("cub", "images", None, "cannot read|images (FileNotFoundError"),
    ("cub", "images.txt", None, "--from|expected a folder with images.txt, found none"),
    ("cub", "classes.txt", "1 A\n2\n", "cannot read|classes.txt (ValueError"),
    ("cub", "classes.txt", "1 A\n3 B\n", "classes.txt: expected a line for each id|found none for 2"),
    ("cub", "classes.txt", "1 A\n2 A\n", "--from|expected 2 classes, 2 train and 4|found 1 classes, 2 train and 4"),
    ("cub", "train_test_split.txt", "1 1\n2 0\n3 1\n4 0\n5 0\n6 0\n", "found 2|in one split only: 001.Black"),
    ("cub", "image_class_labels.txt", "1 2\n2 2\n3 2\n4 1\n5 2\n6 1\n", "002.crow/bird_0.jpg twice"),
    ("ucf101", "Yo_Yo/v_YoYo_g02_c01.jpg", None, "split_zhou_UCF101.json: expected its 3 images|Yo_Yo/v_YoYo_g02"),
    ("ucf101", "../split_zhou_UCF101.json", None, "--list|split_zhou_UCF101.json: expected that file, or the folder"),
    ("ucf101", "../split_zhou_UCF101.json", "{", "cannot read|split_zhou_UCF101.json (JSONDecodeError"),
    ("ucf101", "../split_zhou_UCF101.json", '{"train": [["a.jpg", 0]]}', "1 not found, the first is a.jpg"),
    ("ucf101 official", "../ucfTrainTestlist/testlist01.txt", None, "cannot read|testlist01.txt (FileNotFoundError"),
    ("resisc45", "airplane/airplane_7.jpg", None, "4 train and 18 test|found 2 classes, 4 train and 17 test"),
    ("resisc45", "moon/moon_1.jpg", "", "expected 2 classes, 4 train and 18 test|found 3 classes|split only: moon"),
    ("resisc45 lists", "val.json", '{"images": [{}]}', "cannot read|val.json (KeyError"),
    ("resisc45 lists", "val.json", TWICE, "found|airplane_4.jpg twice"),
    ("cinic10", "test", None, "cannot read|test (FileNotFoundError")]


@pytest.mark.parametrize("case, file, content, words", WRONG)
def test_wrong_originals_are_named_and_nothing_is_written(tmp_path, capsys, case, file, content, words):
    make, flags, *_ = CASES[case]
    path = tmp_path / "top" / "originals" / file
    make(tmp_path / "top" / "originals")
    if content is None:
        path.rename(tmp_path / "removed")
    else:
        put(path, content)
    message = refused(capsys, case.split()[0], "--from", "top/originals", *flags)
    assert all(word in message for word in words.split("|")), message
    assert not Path("data").exists()


def test_wrong_command_lines_and_targets(tmp_path, capsys):
    make_cub(tmp_path / "CUB")
    make_resisc45(tmp_path / "RESISC")
    put(tmp_path / "file", "")
    assert "--from" in refused(capsys, "cub") and "resisc45" in refused(capsys, "mnist", "--from", "CUB")
    assert "CUB: expected a folder with airplane, found none" in refused(capsys, "resisc45", "--from", "CUB")
    assert "a/nowhere: expected a folder" in refused(capsys, "cub", "--from", "a/nowhere")
    assert "--list x: expected with ucf101" in refused(capsys, "cub", "--from", "CUB", "--list", "x")
    assert "--data-dir file: cannot write" in refused(capsys, "cub", "--from", "CUB", "--data-dir", "file")
    assert layout_data.main(["resisc45", "--from", "RESISC"]) == 0
    sea = tmp_path / "data" / "resisc45" / "train" / "sea_ice"
    (sea / "sea_ice_3.jpg").rename(sea / "sea_ice_4.jpg")           # as many images, but others
    put(tmp_path / "data" / "cub" / "notes.txt", "")
    before = snapshot(tmp_path / "data")
    assert ("expected in data/resisc45 22 images (every fifth image of a class is train), found 22, first difference "
            "train/sea_ice/sea_ice_3.jpg" in refused(capsys, "resisc45", "--from", "RESISC"))
    assert "expected in data/cub 6 images (train_test_split.txt), found 0" in refused(capsys, "cub", "--from", "CUB")
    assert snapshot(tmp_path / "data") == before
