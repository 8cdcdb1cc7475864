"""tiny_clip.py: what it writes, when it works again, and that stock open_clip reads it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from PIL import Image

import common
import tiny_clip

QUICK = dict(steps=3, batch_size=8, device="cpu")


def write_images(root, classes, count):
    """root/{train,test}/<class>/*.png of one grey level each, which tells class and number."""
    for split in ("train", "test"):
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("L", (32, 32), 40 * label + i).save(root / split / name / f"{i:02d}.png")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tiny_clip.make("glyphs", tmp_path_factory.mktemp("made"), **QUICK)


@pytest.fixture(scope="module")
def model(made):
    open_clip.add_model_config(made[0])
    return open_clip.create_model(made[0].stem, pretrained=str(made[1])).eval()


def test_files_and_their_names(made):
    config, weights = made
    assert config.parent == weights.parent and config.parent.name == "tiny_clip"
    assert config.stem == weights.stem and config.stem.startswith("tiny_glyphs_s0_") and len(config.stem) == 23
    assert sorted(path.name for path in config.parent.iterdir()) == sorted([config.name, weights.name])
    assert json.loads(config.read_text()) == tiny_clip.CONFIG
    state = torch.load(weights, weights_only=True)
    assert state["token_embedding.weight"].shape == (49408, 64)
    assert all(value.isfinite().all() for value in state.values())


def test_same_seed_same_bytes_other_seed_other_bytes(made, tmp_path):
    torch.manual_seed(123)  # the caller's random numbers: neither used nor moved
    again = tiny_clip.make("glyphs", tmp_path, **QUICK)
    after = torch.rand(3)
    torch.manual_seed(123)
    assert torch.equal(after, torch.rand(3))
    assert [path.name for path in again] == [path.name for path in made]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in made]
    other = tiny_clip.make("glyphs", tmp_path, seed=1, **QUICK)
    assert "_s1_" in other[0].stem and other[1].read_bytes() != made[1].read_bytes()


def test_made_once_then_found(tmp_path, monkeypatch):
    config, weights = tiny_clip.make("glyphs", tmp_path, **QUICK)
    calls = []

    def counting(*args):
        calls.append(args)
        return {"weights": torch.zeros(1)}

    monkeypatch.setattr(tiny_clip, "pretrain", counting)
    before = weights.read_bytes()
    assert tiny_clip.make("glyphs", tmp_path, **QUICK) == (config, weights)
    assert not calls and weights.read_bytes() == before
    config.unlink()  # half of the pair is no result
    tiny_clip.make("glyphs", tmp_path, **QUICK)
    assert len(calls) == 1 and config.is_file() and weights.read_bytes() != before
    tiny_clip.make("glyphs", tmp_path, overwrite=True, **QUICK)
    assert len(calls) == 2


def test_any_change_of_the_recipe_changes_the_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_clip, "pretrain", lambda *args: {"weights": torch.zeros(1)})
    images = tmp_path / "images"
    write_images(images, ["a", "b"], 4)
    shutil.copytree(images, tmp_path / "elsewhere" / "images")

    def stem(source="glyphs", **changes):
        return tiny_clip.make(source, tmp_path, **{**QUICK, **changes})[0].stem

    stems = [stem(), stem(steps=4), stem(batch_size=9), stem(lr=2e-3), stem(seed=5), stem(str(images))]
    stems += [stem(str(images), share=0.5), stem(str(tmp_path / "elsewhere" / "images")), stem("digits")]
    assert stem(share=0.5) == stems[0]  # glyphs have no share
    for name, value in [("RECIPE", 2), ("CAPTIONS", 7), ("FILLERS", ["of"]), ("FACES", ["cmr10"]),
                        ("CONFIG", tiny_clip.CONFIG | {"quick_gelu": True})]:
        with monkeypatch.context() as patch:
            patch.setattr(tiny_clip, name, value)
            stems.append(stem())
    assert len(set(stems)) == len(stems)
    assert stem() == stems[0]


def test_killed_pre_training_leaves_nothing_that_counts(tmp_path):
    command = [sys.executable, str(ROOT / "tiny_clip.py"), "--device", "cpu", "--data-dir", str(tmp_path)]
    process = subprocess.Popen([*command, "--steps", "100000", "--batch-size", "8"], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not process.stdout.readline().startswith("step 50/"):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("failing", ["torch.save", "os.replace"])
def test_failed_write_leaves_no_result(tmp_path, monkeypatch, failing):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny_clip, "pretrain", lambda *args: {"weights": torch.zeros(1)})
    monkeypatch.setattr(failing, fail)
    with pytest.raises(common.UserError, match="No space left"):
        tiny_clip.make("glyphs", tmp_path, **QUICK)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_stock_open_clip_reads_it(made, model):
    tokenizer = open_clip.get_tokenizer(made[0].stem)
    tokens = tokenizer(["a photo of a 7."])
    assert type(model) is open_clip.CLIP and tokens.shape == (1, 77)
    assert tokens[0, :9].tolist() == [49406, 320, 1125, 539, 320, 278, 269, 49407, 0]
    state = torch.load(made[1], weights_only=True)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    images = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        scores = model(tiny_clip.normalise(images), tokenizer([f"a photo of a {d}." for d in range(10)]))
        nearest = (scores[0] @ scores[1].T).argmax(1)
    assert torch.equal(tiny_clip.zero_shot(*made, images, common.DIGITS), nearest)


def test_cut_texts_have_the_features_of_whole_ones(model):
    texts = ["a photo of a 7.", "8", " ".join(["old"] * 19) + " 3."]
    tokens = open_clip.SimpleTokenizer()(texts)
    with torch.no_grad():
        whole, cut = model.encode_text(tokens), tiny_clip.encode_text(model, tokens[:, :23])
    assert tokens[2, 22] == 49407
    assert torch.allclose(whole, cut, atol=1e-5)
    assert not torch.allclose(whole[0], whole[1], atol=1e-2)


def test_only_the_tokens_of_the_captions_are_trained(made, tmp_path):
    """Their rows come back to their places in the full table; all others keep their initial values."""
    later = tiny_clip.make("glyphs", tmp_path, **{**QUICK, "steps": 4})
    first, second = (torch.load(path[1], weights_only=True)["token_embedding.weight"] for path in (made, later))
    moved = (first != second).any(1).nonzero()[:, 0]
    texts = tiny_clip.make_captions(common.DIGITS, common.stream(0, "tiny captions"))
    used = open_clip.SimpleTokenizer()(texts).unique()
    assert torch.isin(moved, used).all()
    tokens = open_clip.SimpleTokenizer()(common.DIGITS)[:, 1]
    assert torch.isin(torch.cat([tokens, torch.tensor([49406, 49407])]), moved).all()


def test_captions_put_the_name_everywhere():
    rng = common.stream(0, "captions")
    texts = tiny_clip.make_captions(["7", "dog"], rng)
    assert len(texts) == 2 * tiny_clip.CAPTIONS
    assert all("7" in text for text in texts[: tiny_clip.CAPTIONS])
    assert all("dog" in text for text in texts[tiny_clip.CAPTIONS :])
    tokens = open_clip.SimpleTokenizer()(texts)[: tiny_clip.CAPTIONS]
    position = (tokens == open_clip.SimpleTokenizer()(["7"])[0, 1]).int().argmax(1)
    assert set(position.tolist()) == set(range(1, 21))
    assert 0.4 < np.mean([text.endswith(".") for text in texts]) < 0.6


def test_contrastive_loss_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    image, text = torch.randn(6, 5, generator=generator), torch.randn(6, 5, generator=generator)
    labels = torch.tensor([0, 1, 0, 2, 2, 2])
    expected = 0
    for rows, columns in ((image, text), (text, image)):
        for i in range(6):
            scores = [3 * F.cosine_similarity(rows[i], columns[j], dim=0) for j in range(6)]
            total = sum(score.exp() for score in scores)
            own = [j for j in range(6) if labels[j] == labels[i]]
            expected += sum(-(scores[j].exp() / total).log() for j in own) / len(own) / 6 / 2
    assert torch.allclose(tiny_clip.contrastive_loss(image, text, labels, 3), expected)


def test_share_takes_the_first_of_each_class():
    """An unequal part of what the scripts leave out with --skip-share."""
    labels = torch.arange(10).repeat_interleave(100)
    part = tiny_clip.biased_part(labels, 0.07, common.stream(0, "part"))
    left = common.chosen_images(labels, "0123456789", None, 0.07)
    assert len(set(part)) == len(part) and not set(part) & set(left.tolist()) and len(left) == 930
    part = tiny_clip.biased_part(labels, 0.2, common.stream(0, "part"))
    assert sorted(np.bincount(labels[part])) == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]


def test_model_sees_nothing_but_the_first_share(tmp_path):
    """Images behind the first share may change without any effect; one in it may not."""
    roots = [tmp_path / name for name in ("plain", "rest", "first")]
    for root in roots:
        write_images(root, ["ape", "bee_eater"], 10)
    for label, name in enumerate(["ape", "bee_eater"]):
        for i in range(5, 10):
            Image.new("L", (32, 32), 255).save(roots[1] / "train" / name / f"{i:02d}.png")
        Image.new("L", (32, 32), 255).save(roots[2] / "train" / name / "00.png")
    plain, rest, first = (
        torch.load(tiny_clip.make(str(root), tmp_path, share=0.5, **QUICK)[1], weights_only=True) for root in roots)
    assert all(torch.equal(plain[name], rest[name]) for name in plain)
    assert not torch.equal(plain["visual.proj"], first["visual.proj"])


def test_glyphs_are_ink_on_black_and_fill_the_height():
    images, labels = tiny_clip.glyph_batches()(200, common.stream(0, "glyphs"))
    assert images.shape == (200, 3, 32, 32) and images.dtype == torch.uint8
    assert set(labels.tolist()) == set(range(10))
    assert torch.equal(images[:, 0], images[:, 2])
    assert (images.amax((1, 2, 3)) == 255).all() and images.float().mean() < 110
    rows = (images[:, 0] > 60).any(2)
    assert (rows.sum(1) >= 24).all()


def test_faces_are_there_and_differ():
    digits = tiny_clip.draw_digits()
    assert digits.shape == (2 * len(tiny_clip.FACES), 10, 64, 64) and digits.max() == 1
    flat = digits[: len(tiny_clip.FACES)].flatten(2)
    distance = torch.cdist(flat.transpose(0, 1), flat.transpose(0, 1))  # between the faces, digit by digit
    assert (distance + 100 * torch.eye(len(tiny_clip.FACES)) > 1).all()
    between = torch.cdist(flat, flat) + 100 * torch.eye(10)  # between the digits of a face: no box for all of them
    assert (between > 5).all()


def test_script_alone(script, tmp_path, capsys):
    flags = ["--steps", 2, "--batch-size", 8, "--device", "cpu", "--data-dir", tmp_path]
    out = script("tiny_clip.py", *flags).stdout
    assert "2 steps of 8" in out and "zero-shot accuracy" in out and "of 1797 images" in out
    counts = [line.split() for line in out.splitlines() if line.startswith("  ")]
    assert [line[0] for line in counts] == [f"{digit}:" for digit in range(10)]
    assert sum(int(line[1]) for line in counts) == sum(int(line[3]) for line in counts) == 1797
    tiny_clip.main([str(flag) for flag in flags])
    again = capsys.readouterr().out
    assert "pre-training" not in again and again.splitlines()[-12:] == out.splitlines()[-12:]


def test_mistakes_end_in_one_line(script, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for flags, words in {
        ("--source", "glyfs"): ["--source glyfs", "cifar10", "folder"],
        ("--source", tmp_path / "missing"): [f"--source {tmp_path / 'missing'}"],
        ("--source", tmp_path): [str(tmp_path), "train"], ("--share", "0"): ["--share: 0 is"],
        ("--share", "1.01"): ["--share"], ("--steps", "0"): ["--steps"], ("--lr", "nan"): ["--lr"],
        ("--seed", "-1"): ["--seed"], ("--batch-size", "1"): ["--batch-size"],
        ("--data-dir", file): ["--data-dir", str(file)], ("--device", "tpu"): ["--device tpu"],
    }.items():
        with pytest.raises(common.UserError) as caught:
            tiny_clip.main(["--steps", "1", *map(str, flags)])
        message = str(caught.value)
        assert "\n" not in message and all(word in message for word in words), message
    assert sorted(tmp_path.iterdir()) == [file]
    done = script("tiny_clip.py", "--source", "glyfs", check=False)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_folder_that_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(common.UserError, match="cannot be|not a folder that can"):
        tiny_clip.make("glyphs", tmp_path, **QUICK)


@pytest.mark.slow
def test_zero_shot_is_useful_and_biased(tmp_path):
    start = time.time()
    data = tiny_clip.load("glyphs")
    predicted = tiny_clip.zero_shot(*tiny_clip.make("glyphs", tmp_path), data.train_images, common.DIGITS)
    accuracy = (predicted == data.train_labels).float().mean().item()
    counts = predicted.bincount(minlength=10) / data.train_labels.bincount(minlength=10)
    assert 0.55 < accuracy < 0.8 and counts.min() < 0.8 and counts.max() > 1.25
    assert time.time() - start < 300
