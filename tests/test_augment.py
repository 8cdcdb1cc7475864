"""The augmentation of common.py: against Pillow, against slow loops, and its use of the draws."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from sklearn.datasets import load_sample_images

import common

OPS = common.OPERATIONS
BELOW_ONE = 1 - 2.0**-24            # the largest float32 draw
PHOTOS = load_sample_images().images


def photo_crops(side, count=48):
    """(count, 3, side, side) uint8 from two photographs, one output pixel covering 1, 2, 4 or 8 of theirs."""
    rng, crops = np.random.default_rng(0), []
    for i in range(count):
        photo, size = PHOTOS[i % 2], side * (1, 2, 4, 8)[i // 2 % 4]
        top, left = rng.integers(photo.shape[0] - size), rng.integers(photo.shape[1] - size)
        crop = Image.fromarray(photo[top:top + size, left:left + size])
        crops.append(np.asarray(crop.resize((side, side), Image.Resampling.BOX)))
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).contiguous()


def odd_images(side):
    """(8, 3, side, side) uint8: black, white, a constant, two values (twice), two gradients, noise."""
    x = np.arange(side)
    ramp = np.broadcast_to(x * 255 // (side - 1), (side, side))
    board = (x + x[:, None]) % 2
    planes = [np.zeros((side, side)), np.full((side, side), 255), np.full((side, side), 77), board * 255,
              100 + 3 * board, ramp, 90 + ramp.T // 4]
    images = [np.stack([p, p, p]) for p in planes]
    images[6] = np.stack([ramp, ramp.T, 255 - ramp])
    images.append(np.random.default_rng(1).integers(0, 256, (3, side, side)))
    return torch.from_numpy(np.stack(images).astype(np.uint8))


def to_pillow(image):
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def from_pillow(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def pillow_op(image, name, level, sign):
    """One RandAugment operation on a Pillow image, the way FixMatch's description has it."""
    factor = level * 0.9 / 10 + 0.05
    bend = sign * level * 0.3 / 10
    shift = int(bend * image.width)
    if name in ("Brightness", "Color", "Contrast", "Sharpness"):
        return getattr(ImageEnhance, name)(image).enhance(factor)
    if name == "Rotate":
        return image.rotate(sign * int(level * 30 / 10))
    if name in ("ShearX", "ShearY", "TranslateX", "TranslateY"):
        matrix = {"ShearX": (1, bend, 0, 0, 1, 0), "ShearY": (1, 0, 0, bend, 1, 0),
                  "TranslateX": (1, 0, shift, 0, 1, 0), "TranslateY": (1, 0, 0, 0, 1, shift)}[name]
        return image.transform(image.size, Image.Transform.AFFINE, matrix)
    return {"AutoContrast": ImageOps.autocontrast, "Equalize": ImageOps.equalize, "Identity": lambda image: image,
            "Posterize": lambda image: ImageOps.posterize(image, int(level * 4 / 10) + 4),
            "Solarize": lambda image: ImageOps.solarize(image, 256 - int(level * 256 / 10))}[name](image)


def operate(images, op, level, sign):
    """One operation on each image, as strong_view does it: op (n,) counts in OPS, level 1 .. 9, sign +-1."""
    chosen = {name: op == i for i, name in enumerate(OPS)}
    return common.affine(common.lookup(common.enhance(images, chosen, level), chosen, level), chosen, sign * level)


def one_op(images, name, level, sign):
    return operate(images, *(torch.full((len(images),), number) for number in (OPS.index(name), level, sign)))


def draws_for(n, seed=0, columns=common.STRONG_DRAWS):
    return torch.rand(n, columns, generator=torch.Generator().manual_seed(seed))


def test_operations_are_fixmatchs():
    assert OPS == ("AutoContrast", "Brightness", "Color", "Contrast", "Equalize", "Identity", "Posterize", "Rotate",
                   "Sharpness", "ShearX", "ShearY", "Solarize", "TranslateX", "TranslateY")


@pytest.mark.parametrize("side", [8, 16, 32])
@pytest.mark.parametrize("name", OPS)
def test_operation_equals_pillow(name, side):
    """Tolerance zero: every pixel, for each level and sign."""
    images = torch.cat([photo_crops(side, 48 if side == 32 else 8), odd_images(side)])
    pillow_images = [to_pillow(image) for image in images]
    changed = 0
    for level in range(1, 10):
        for sign in (-1, 1):
            ours = one_op(images, name, level, sign)
            theirs = torch.stack([from_pillow(pillow_op(image, name, level, sign)) for image in pillow_images])
            difference = (ours.int() - theirs.int()).abs()
            assert difference.max() == 0, (level, sign, difference.max(), (difference > 0).float().mean())
            changed += (theirs != images).any((1, 2, 3)).sum()
    too_few_pixels = name == "Equalize" and side == 8       # 64 pixels are fewer than 255 levels: Pillow does nothing
    assert (changed == 0) == (name == "Identity" or too_few_pixels)     # else the comparison would show nothing


def test_batch_mixes_operations():
    """Each image of one batch gets its own operation, level and sign."""
    images = photo_crops(32, 126)
    op, level = torch.arange(126) % 14, torch.arange(126) // 14 + 1
    sign = torch.where(torch.arange(126) % 3 == 0, -1, 1)
    mixed = operate(images, op, level, sign)
    for i in range(126):
        assert torch.equal(mixed[i], one_op(images[i:i + 1], OPS[op[i]], int(level[i]), int(sign[i]))[0])


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("side", [8, 32])
def test_weak_view_equals_slow_loop(side, flip):
    images, draws = photo_crops(side), draws_for(48, columns=3)
    draws[:3] = torch.tensor([[0, 0, 0], [0.5, BELOW_ONE, 0], [BELOW_ONE, 0, BELOW_ONE]])
    ours, pad = common.weak_view(images, draws, flip), side // 8
    for i, image in enumerate(images.numpy()):
        if flip and draws[i, 0] < 0.5:
            image = image[:, :, ::-1]
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode="reflect")
        top, left = (min(math.floor(float(u) * (2 * pad + 1)), 2 * pad) for u in draws[i, 1:])
        np.testing.assert_array_equal(ours[i].numpy(), padded[:, top:top + side, left:left + side])


def test_weak_view_reaches_every_offset_and_identity():
    """At S = 32 the 9 x 9 shifts and the flip give 162 different views, about equally often; one is the image."""
    image = torch.arange(32 * 32).view(1, 1, 32, 32) * torch.tensor([1, 7, 13]).view(1, 3, 1, 1) % 251
    image = image.to(torch.uint8)
    views = common.weak_view(image.expand(16200, -1, -1, -1), draws_for(16200, columns=3)).flatten(1)
    # A few numbers tell the views apart; sorting the whole views would take long
    _, counts = views[:, [0, 31, 992, 1023, 1024, 2048, 500, 1500, 2500]].unique(dim=0, return_counts=True)
    assert len(counts) == 162 and counts.min() > 50 and counts.max() < 160          # 100 expected each
    still = torch.tensor([[0.5, 0.5, 0.5], [0.9, 4 / 9 + 1e-4, 5 / 9 - 1e-4]])
    assert torch.equal(common.weak_view(image.expand(2, -1, -1, -1), still), image.expand(2, -1, -1, -1))
    still[:, 0] = 0
    assert torch.equal(common.weak_view(image.expand(2, -1, -1, -1), still), image.expand(2, -1, -1, -1).flip(3))
    assert torch.equal(common.weak_view(image.expand(2, -1, -1, -1), still, flip=False), image.expand(2, -1, -1, -1))


def test_strong_view_is_its_parts():
    """Flip, crop, two operations and cutout, spelled out from the draws image by image with Pillow."""
    images, draws = photo_crops(32), draws_for(48, seed=3)
    ours = common.strong_view(images, draws)
    for i in range(48):
        image = to_pillow(common.weak_view(images[i:i + 1], draws[i:i + 1, :3])[0])
        for op, level, apply, sign in draws[i, 3:11].view(2, 4).tolist():
            if apply < 0.5:
                image = pillow_op(image, OPS[int(op * 14)], 1 + int(level * 9), -1 if sign < 0.5 else 1)
        x, y = (max(0, float(u) * 32 - 8) for u in (draws[i, 12], draws[i, 11]))
        # Pillow's rectangle includes its last pixel, hence the -1
        ImageDraw.Draw(image).rectangle((int(x), int(y), int(x) + 15, int(y) + 15), (127, 127, 127))
        assert torch.equal(ours[i], from_pillow(image))


def test_draws_choose_operations_independently(monkeypatch):
    """14 operations and 9 levels equally often, half applied, half negative, and the two operations independent."""
    seen, n = [], 20000

    def note(images, chosen, level):
        operation = torch.stack([chosen[name] for name in OPS]).int().argmax(0)
        seen.append(torch.stack([operation, level.abs(), level.sign()]))
        return images

    monkeypatch.setattr(common, "affine", note)
    draws = draws_for(n, seed=1)
    common.strong_view(torch.zeros(n, 3, 8, 8, dtype=torch.uint8), draws)
    assert len(seen) == 2
    for (op, level, sign), first in zip(seen, (3, 7)):
        applied = draws[:, first + 2] < 0.5
        share = op[applied].bincount(minlength=14) / applied.sum()
        assert len(share) == 14 and (share - 1 / 14).abs().max() < 0.01             # 4 standard deviations
        assert (op[~applied] == OPS.index("Identity")).all() and abs(applied.float().mean() - 0.5) < 0.015
        share = level.bincount(minlength=10) / n
        assert len(share) == 10 and share[0] == 0 and (share[1:] - 1 / 9).abs().max() < 0.01
        assert set(sign.tolist()) == {-1, 1} and abs((sign == 1).float().mean() - 0.5) < 0.015
    both = torch.cat(seen).float()                                                  # (6, n)
    assert (torch.corrcoef(both) - torch.eye(6)).abs().max() < 0.03


@pytest.mark.parametrize("flip", [True, False])
def test_image_does_not_depend_on_its_batch(flip):
    images, draws = torch.cat([photo_crops(32), odd_images(32)]), draws_for(56, seed=2)
    weak, strong = common.weak_view(images, draws[:, :3], flip), common.strong_view(images, draws, flip)
    for i in range(56):
        one = slice(i, i + 1)
        assert torch.equal(weak[one], common.weak_view(images[one], draws[one, :3], flip))
        assert torch.equal(strong[one], common.strong_view(images[one], draws[one], flip))


@pytest.mark.parametrize("side", [8, 16, 32])
@pytest.mark.parametrize("draw, first, last", [(0, 0, 1 / 2), (0.25, 0, 1 / 2), (0.5, 1 / 4, 3 / 4), (0.75, 1 / 2, 1),
                                               (0.875, 5 / 8, 1)])
def test_cutout_place(side, draw, first, last):
    """A grey square of S // 2 pixels; the other axis stays at the middle. first, last as shares of the side."""
    first, last, middle = int(first * side), int(last * side), slice(side // 4, side // 4 + side // 2)
    for down in (True, False):
        draws = torch.tensor([[draw, 0.5] if down else [0.5, draw]])
        expected = photo_crops(side, 1)
        expected[0, :, first:last, middle] = 127
        if not down:
            expected = photo_crops(side, 1)
            expected[0, :, middle, first:last] = 127
        assert torch.equal(common.cutout(photo_crops(side, 1), draws), expected)


def test_cutout_just_below_one_and_size():
    """At the far corner a quarter of the square is left and one pixel more, as 23.99.. rounds down to 23."""
    white = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    grey = common.cutout(white, torch.full((1, 2), BELOW_ONE)) == 127
    assert grey[0, :, 23:, 23:].all() and grey.sum() == 3 * 9 * 9
    draws = draws_for(2000, columns=2)
    area = (common.cutout(white.expand(2000, -1, -1, -1), draws) == 127)[:, 0].sum((1, 2))
    assert area.max() == 16 * 16 and area.min() >= 9 * 9


def test_cutout_always_applies():
    draws = draws_for(500, seed=4)
    draws[:, [5, 9]] = 0.9                                                          # neither operation happens
    grey = (common.strong_view(torch.full((500, 3, 32, 32), 255, dtype=torch.uint8), draws) == 127).all(1)
    assert (grey.sum((1, 2)) >= 81).all()


@pytest.mark.parametrize("side", [8, 9, 16, 32, 50])
def test_border_draws(side):
    """Draws of 0 and just below 1, in all columns and in one at a time, stay in range and mean the first and last."""
    draws = torch.cat([torch.zeros(14, 13), torch.full((14, 13), BELOW_ONE)])
    draws[:13].fill_diagonal_(BELOW_ONE)
    draws[14:27].fill_diagonal_(0)
    images = photo_crops(side, 28)
    assert common.strong_view(images, draws).shape == images.shape
    assert common.weak_view(images, draws[:, :3]).shape == images.shape
    for k in range(2, 300):                                                         # operations, levels, shifts
        assert (torch.tensor([0, BELOW_ONE]) * k).long().tolist() == [0, k - 1]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_types_shapes_and_purity(n):
    images, draws = photo_crops(32, 5)[:n], draws_for(5)[:n]
    images_before, draws_before = images.clone(), draws.clone()
    for view in (lambda: common.weak_view(images, draws[:, :3]), lambda: common.strong_view(images, draws)):
        out = view()
        assert out.dtype == torch.uint8 and out.shape == images.shape and torch.equal(out, view())
        assert n == 0 or out.data_ptr() != images.data_ptr()
    channels_last = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(common.strong_view(channels_last, draws), common.strong_view(images, draws))
    assert common.normalise(images, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)).shape == images.shape
    assert torch.equal(images, images_before) and torch.equal(draws, draws_before)


def test_normalise():
    images, mean, std = photo_crops(32), (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    out = common.normalise(images, mean, std)
    assert out.dtype == torch.float32 and out.is_contiguous(memory_format=torch.channels_last)
    expected = (images.numpy() / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(common.normalise(images, torch.tensor(mean), torch.tensor(std)), expected, atol=1e-6)


def test_shapes_are_fixed():
    """The meta device has shapes but no numbers: whatever reads a number back, or shapes by one, raises there."""
    images = torch.empty(6, 3, 32, 32, dtype=torch.uint8, device="meta")
    draws = torch.empty(6, common.STRONG_DRAWS, device="meta")
    for waits in (lambda: images[draws[:, 0] < 0.5], lambda: draws.sum().item(), lambda: draws.cpu()):
        with pytest.raises((RuntimeError, NotImplementedError)):                    # the device does notice
            waits()
    for flip in (True, False):
        for out in (common.weak_view(images, draws[:, :3], flip), common.strong_view(images, draws, flip)):
            assert out.shape == images.shape and out.dtype == torch.uint8 and out.device.type == "meta"
    out = common.normalise(images, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    assert out.shape == images.shape and out.device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_equals_cpu_without_waiting():
    images, draws = torch.cat([photo_crops(32), odd_images(32)]).repeat(8, 1, 1, 1), draws_for(448)
    on_gpu = images.cuda(), draws.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        weak, strong = common.weak_view(on_gpu[0], on_gpu[1][:, :3]), common.strong_view(*on_gpu)
        normal = common.normalise(strong, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(weak.cpu(), common.weak_view(images, draws[:, :3]))
    assert torch.equal(strong.cpu(), common.strong_view(images, draws))
    torch.testing.assert_close(normal.cpu(), common.normalise(strong.cpu(), (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)))
