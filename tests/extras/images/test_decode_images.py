"""`DecodeImages`: the same pixels in a worker, on a batch and by hand, of the size that was asked for."""

from __future__ import annotations

import collections
import copy
import pickle
import re
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, default_collate

from fastq_loader import DataLoader, ToDevice
from fastq_loader.extras.images import crops
from fastq_loader.extras.images.decoders import Header
from fastq_loader.images import DecodeImages, Encoded, encoded
from tests.support.photographs import file_of, photograph
from tests.support.thorough import seeds

SIZES = [(61, 83), (90, 40), (32, 32), (200, 150), (5, 300), (16, 16)]
FILES = [file_of(photograph(*size, seed=seed), "PNG") for seed, size in enumerate(SIZES)]
Pair = collections.namedtuple("Pair", ["image", "label"])


class Photos(Dataset[Any]):
    """Files, or with `pixels` decoded images."""

    def __init__(self, pixels: Any = None, files: Any = FILES) -> None:
        self.pixels, self.files = pixels, files

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        file = encoded(self.files[index % len(self.files)], f"photo {index}")
        return (file if self.pixels is None else self.pixels(file)), index


def loaded(dataset: Any, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    return list(DataLoader(dataset, 5, shuffle=True, **options))


@seeds(3, 20)
def test_a_worker_a_batch_and_a_transform_have_the_same_pixels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pixels = DecodeImages(
        (int(rng.integers(1, 40)), int(rng.integers(1, 40))),
        scale=None if rng.random() < 0.3 else (0.2, 0.9),
        flip=float(rng.choice([0, 0.5, 1])),
        interpolation=str(rng.choice(["bilinear", "bicubic", "nearest"])),
        **({"mean": (0.5,) * 3, "std": (0.2,) * 3} if rng.random() < 0.5 else {}),
    )
    workers = int(rng.integers(0, 3))
    schedule = "dynamic" if workers and rng.random() < 0.5 else "round_robin"
    by_hand = [pixels(batch) for batch in loaded(Photos())]
    in_workers = loaded(Photos(pixels), num_workers=workers, schedule=schedule)
    transformed = loaded(Photos(), num_workers=workers, device=ToDevice("cpu", transform=pixels))
    for expected, *others in zip(by_hand, in_workers, transformed, strict=True):
        for images, labels in others:
            assert torch.equal(expected[1], labels)
            torch.testing.assert_close(images, expected[0], rtol=0, atol=0)


def test_a_crop_is_cut_before_it_is_resized() -> None:
    file = encoded(FILES[3])
    seed = file.seed
    pixels = DecodeImages((20, 30), scale=(0.3, 0.3), flip=0)(file)
    whole = torch.from_numpy(photograph(*SIZES[3], seed=3)).permute(2, 0, 1)
    top, left, height, width = crops.random_crop(*SIZES[3], (0.3, 0.3), (3 / 4, 4 / 3), crops.numbers(seed))
    part = whole[None, :, top : top + height, left : left + width]
    (expected,) = interpolate(part, (20, 30), mode="bilinear", antialias=True)
    assert pixels.dtype == torch.uint8
    assert (pixels.int() - expected.int()).abs().max() <= 1  # other memory order: other rounding


def test_the_middle_is_cut_for_validation() -> None:
    pixels = DecodeImages(24, scale=None, resize=32, flip=0)(encoded(FILES[3]))
    whole = torch.from_numpy(photograph(*SIZES[3], seed=3)).permute(2, 0, 1)
    (resized,) = interpolate(whole[None], (42, 32), mode="bilinear", antialias=True)
    assert (pixels.int() - resized[:, 9:33, 4:28].int()).abs().max() <= 1


def test_images_for_validation_are_not_flipped_by_default() -> None:
    file = encoded(FILES[3])
    images = [DecodeImages(16, scale=None)(Encoded(file.data, seed=seed)) for seed in range(20)]
    assert all(torch.equal(image, images[0]) for image in images)
    assert not DecodeImages(16, scale=None).draws


def test_flips_are_as_frequent_as_asked() -> None:
    file = file_of(np.arange(3 * 16, dtype=np.uint8).reshape(1, 16, 3), "PNG")
    images = [
        DecodeImages((1, 16), scale=(1, 1), ratio=(16, 16), flip=0.25)(Encoded(file, seed=seed))
        for seed in range(400)
    ]
    flipped = sum(bool(image[0, 0, 0] > image[0, 0, -1]) for image in images)
    assert 60 < flipped < 140


def test_structures_keep_their_types() -> None:
    pixels = DecodeImages(4)
    file = encoded(FILES[0])
    made = pixels({"a": Pair(file, 3), "b": [file, (file, "text")]})
    assert type(made["a"]) is Pair
    assert made["a"].label == 3
    assert made["b"][1][1] == "text"
    assert made["a"].image.shape == made["b"][0].shape == made["b"][1][0].shape == (3, 4, 4)
    ordered = pixels(collections.OrderedDict(image=file))
    assert type(ordered) is collections.OrderedDict
    fixed = pixels(types.MappingProxyType({"image": file}))
    assert type(fixed) is types.MappingProxyType
    assert fixed["image"].shape == (3, 4, 4)


def test_what_has_no_image_is_the_same_object() -> None:
    extremes, made = (
        torch.ones(3, 2).max(0),
        {"labels": [1, 2]},
    )  # a tuple that cannot be made from its members
    found = DecodeImages(4)([encoded(FILES[0]), extremes, made])
    assert (found[1] is extremes, found[2] is made) == (True, True)


class OfSize4(DecodeImages):
    """A subclass with arguments of its own."""

    def __init__(self) -> None:
        super().__init__(4)


@pytest.mark.parametrize("copied", [copy.copy, lambda pixels: pickle.loads(pickle.dumps(pixels))])
def test_copies_are_on_their_own_device(copied: Any) -> None:
    pixels, file = OfSize4(), encoded(FILES[0])
    elsewhere = copied(pixels.on_device(torch.device("meta")))
    assert type(elsewhere) is OfSize4
    assert (elsewhere(file).device.type, pixels(file).device.type) == ("meta", "cpu")


def test_torchs_default_device_moves_no_pixels() -> None:
    """As `torch.set_default_device("cuda")` in a script whose workers, or transform, decode on the CPU."""
    with torch.device("meta"):
        files = default_collate([encoded(file) for file in FILES])
        assert DecodeImages(4)(files).device.type == DecodeImages(4)(files[0]).device.type == "cpu"


def test_an_empty_batch_has_no_pixels() -> None:
    files = default_collate([encoded(FILES[0])])[:0]
    assert (files.headers.shape, files.headers.dtype) == ((0, 3), np.int64)
    for pixels in (DecodeImages(4), DecodeImages(4, mean=(0.5,) * 3, std=(1,) * 3, device="cpu")):
        assert pixels(files).shape == (0, 3, 4, 4)


def test_masks_share_the_crop_of_their_image() -> None:
    torch.manual_seed(0)
    image, mask = encoded(FILES[3]), encoded(FILES[3])
    assert image.seed != mask.seed
    apart = DecodeImages(30)((image, mask))
    assert not torch.equal(*apart)
    together = DecodeImages(30, same_crop=True)(default_collate([(image, mask)]))
    assert torch.equal(*together)
    two = default_collate([mask, mask])
    for parts, lengths in (((image, two), r"\[1, 2\]"), ((two, image, mask), r"\[2, 1, 1\]")):
        with pytest.raises(ValueError, match=rf"same_crop=True\): the encoded parts have {lengths} images"):
            DecodeImages(30, same_crop=True)(parts)


@pytest.mark.parametrize("side", [64, 224])
@pytest.mark.parametrize("share", [1, 2, 0.5])
def test_a_mask_of_any_size_is_cut_as_pillow_cuts_it(side: int, share: float) -> None:
    pillow = pytest.importorskip("PIL.Image")
    height, width = int(375 * share), int(500 * share)
    down, across = (np.arange(height)[:, None] + 0.5) / height, (np.arange(width)[None, :] + 0.5) / width
    blobs = np.where(np.sin(40 * across) + np.sin(33 * down) > 0, 255, 0).astype(np.uint8)
    files = file_of(photograph(375, 500), "JPEG"), file_of(blobs, "PNG")
    pixels = DecodeImages(side, same_crop=True, interpolation=("bilinear", "nearest"))
    for seed in range(10):
        _, mask = pixels((Encoded(files[0], seed=seed), Encoded(files[1])))
        (top, left, tall, wide), flipped = pixels.cut(375, 500, seed).crop, pixels.cut(375, 500, seed).flipped
        box = [left * width / 500, top * height / 375]
        box += [(left + wide) * width / 500, (top + tall) * height / 375]
        expected = np.array(pillow.fromarray(blobs).resize((side, side), pillow.Resampling.NEAREST, box))
        found, expected = mask[0].numpy() > 0, (expected[:, ::-1] if flipped else expected) > 0
        assert (found & expected).sum() / (found | expected).sum() >= 0.99


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [list, lambda batch: tuple(zip(*batch, strict=True))])
def test_each_sample_of_a_list_has_a_crop_of_its_own(collate: Any, workers: int) -> None:
    pixels = DecodeImages(16, same_crop=True, interpolation=("bilinear", "bilinear"))
    together = loaded(Twice(), num_workers=workers)
    listed = loaded(Twice(), num_workers=workers, collate_fn=collate)
    for batch, samples in zip(together, listed, strict=True):
        found = pixels(samples)
        first, second = zip(*found, strict=True) if collate is list else found
        expected, same = pixels(batch)
        assert torch.equal(expected, same)
        assert torch.equal(torch.stack(first), expected)
        assert torch.equal(torch.stack(second), expected)
    assert len({image.numpy().tobytes() for image in expected}) == len(expected)
    files = [(encoded(FILES[3]), encoded(FILES[3])) for _ in range(2)]
    with pytest.raises(ValueError, match="cannot tell which images belong to one sample"):
        pixels(files)


class Twice(Photos):
    """An image, and its mask."""

    def __getitem__(self, index: int) -> Any:
        return encoded(self.files[3]), encoded(self.files[3])


class Views(Photos):
    """What `made` makes of an image: two views."""

    def __getitem__(self, index: int) -> Any:
        return self.pixels(encoded(self.files[3]))


@pytest.mark.parametrize("workers", [0, 2])
def test_two_calls_are_two_views_wherever_they_are_made(workers: int) -> None:
    pixels = DecodeImages(16)

    def two(image: Any) -> Any:
        return pixels(image), pixels(image)

    def both(image: Any) -> Any:
        return [image, image]

    def same(image: Any) -> Any:
        return image

    def by_transform(made: Any, transform: Any) -> Any:
        return loaded(Views(made), num_workers=workers, device=ToDevice("cpu", transform=transform))

    def by_parts(image: Any) -> Any:
        return pixels(both(image))

    for by_sample, made, transform in ((two, same, two), (by_parts, both, pixels)):
        for here, there in zip(loaded(Views(by_sample)), by_transform(made, transform), strict=True):
            assert not any(torch.equal(*views) for views in zip(*here, strict=True))
            assert all(map(torch.equal, here, there))


def test_the_size_of_an_image_is_that_of_its_pixels() -> None:
    """Before version 11, pillow turns TIFF when its pixels are read, and not its header."""
    file = Encoded(FILES[3])
    turned = Encoded(FILES[3], header=Header(file.header.width, file.header.height, file.header.kind))
    assert torch.equal(DecodeImages(16)(file), DecodeImages(16)(turned))


def test_a_size_may_stand_in_a_list() -> None:
    assert DecodeImages([4])(encoded(FILES[0])).shape == DecodeImages([4, 4])(encoded(FILES[0])).shape


def test_a_photograph_may_be_decoded_smaller_than_it_is() -> None:
    pytest.importorskip("simplejpeg")
    file = encoded(file_of(photograph(960, 1280), "JPEG", quality=95))
    seed = file.seed
    small = DecodeImages(64, scale=(0.5, 1), draft=True)(file)
    full = DecodeImages(64, scale=(0.5, 1))(Encoded(file.data, seed=seed))
    assert 0 < (small.int() - full.int()).abs().float().mean() < 4


@pytest.mark.parametrize("turn", [1, 3])
def test_a_photograph_that_is_decoded_smaller_stays_in_its_place(turn: int) -> None:
    pytest.importorskip("simplejpeg")
    exif = pytest.importorskip("PIL.Image").Exif()
    exif[0x0112] = turn
    wave = (127 + 120 * np.sin(np.arange(1499) / 40)).astype(np.uint8)
    file = file_of(np.broadcast_to(wave[:, None], (1001, 1499, 3)), "JPEG", quality=95, exif=exif)
    drafts, full = (DecodeImages(64, flip=0, exif=True, draft=draft) for draft in (True, False))
    for seed in range(8):
        found, image = (pixels(Encoded(file, seed=seed))[0].double() for pixels in (drafts, full))
        slope = (image[:, 2:] - image[:, :-2]) / 2
        moved = ((found - image)[:, 1:-1] * slope).sum() / (slope**2).sum()
        assert abs(moved) < 0.05  # pixels of the result


def test_normalised_pixels_are_normalizes() -> None:
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    file = encoded(FILES[0])
    plain = DecodeImages(8, scale=None)(file)
    found = DecodeImages(8, scale=None, mean=mean, std=std, dtype=torch.float16)(file)
    expected = (plain / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(found, expected.half())


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"scale": (0, 1)},
        {"scale": (0.5, 0.4)},
        {"ratio": (2, 1)},
        {"flip": 1.5},
        {"resize": 256},
        {"std": None, "mean": (0.1, 0.2, 0.3)},
        {"std": (1, 0, 1), "mean": (0.1, 0.2, 0.3)},
        {"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]},
        {"size": [1, 2, 3]},
        {"dtype": torch.uint8},
        {"interpolation": "cubic"},
        {"same_crop": 1},
        {"then": 3},
        {"device": "no such"},
        {"group_bytes": 0},
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    """The first one is the wrong one."""
    name, value = next(iter(wrong.items()))
    text = rf"DecodeImages\({name}={re.escape(repr(value))}\): (give|use|with|it is) "
    with pytest.raises(ValueError, match=text):
        DecodeImages(**{"size": 224, **wrong})


def test_a_batch_without_images_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a list without an encoded image: wrap paths or bytes in encoded\(\)"
    ):
        DecodeImages(8)([torch.ones(3), 3])
    with pytest.raises(ValueError, match="a sample has 1 encoded parts"):
        DecodeImages(8, interpolation=("nearest", "nearest"))(encoded(FILES[0]))


def test_masks_are_not_normalised() -> None:
    options: Any = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": ("bilinear", "nearest")}
    pixels = DecodeImages(32, scale=None, resize=32, same_crop=True, **options)
    image, mask = pixels((encoded(FILES[2]), encoded(FILES[2])))
    assert image.dtype == torch.float32
    assert torch.equal(mask, torch.from_numpy(photograph(*SIZES[2], seed=2)).permute(2, 0, 1))
