"""Values as bytes, and back."""

from __future__ import annotations

import dataclasses
import io
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader import cached
from fastq_loader.errors import UnpicklableError
from fastq_loader.extras.cached import values

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = None


class Own(torch.Tensor):
    pass


class OwnArray(np.ndarray):
    pass


def reader(value: Any) -> Any:
    """Gives the value, from its bytes, each time that it is called."""
    pieces, nbytes = values.record(b"key", values.encode(value))
    record = memoryview(b"".join(pieces))
    assert len(record) == nbytes
    assert values.read(record, 0, b"another key", copy=True) is None
    return lambda: values.decode(values.read(record, 0, b"key", copy=True))  # type: ignore[arg-type]


def again(value: Any) -> Any:
    return reader(value)()


def same(one: Any, other: Any) -> bool:
    """Types, shapes, the order of strides and bits. An array without numbers may have any strides."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        kept = one.detach().clone(memory_format=torch.preserve_format).stride()
        strides = other.stride() in (kept, one.stride()) or not one.numel()
        return one.dtype == other.dtype and strides and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        bits = one.tobytes() == other.tobytes() if one.dtype != object else list(one) == list(other)
        strides = other.strides in (one.copy("K").strides, one.strides) or not one.size
        return one.dtype == other.dtype and one.shape == other.shape and strides and bits
    if dataclasses.is_dataclass(one):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(repr(one) == repr(other))


IMAGE = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)


RARE: list[Any] = [IMAGE.to(memory_format=torch.channels_last), IMAGE.transpose(0, 3)[::2], torch.zeros(0, 3)]
RARE += [IMAGE.permute(3, 1, 0, 2).float(), torch.zeros(4, 1).expand(4, 6), torch.tensor([1 + 2j])]
RARE += [torch.ones(3, dtype=torch.bfloat16), torch.tensor([True]), np.arange(3.0)[::-1], np.array(["ä"])]
RARE += [np.asfortranarray(np.arange(12).reshape(3, 4)), np.array([{"a": 1}, None], dtype=object)]
RARE += [np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)[::2], np.zeros(3, [("a", "i4"), ("b", "f8")])]
RARE += [np.arange(3, dtype=">i4"), np.float64(2.5), torch.nn.Parameter(torch.ones(2)), None, "", b"", {1, 2}]
RARE += [torch.ones(3).as_subclass(Own), np.ones(3).view(OwnArray), OrderedDict(b=1, a=IMAGE), range(3)]
RARE += [{"nested": [(Point(1, IMAGE[0]), Sample(np.arange(3)))]}, -(10**30), float("nan"), np.zeros(())]


@pytest.mark.parametrize("value", RARE, ids=lambda value: type(value).__name__)
def test_values_of_rare_kinds_come_back_as_they_were(value: Any) -> None:
    assert same(value, again(value))


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "I;16", "F"])
def test_images_keep_mode_size_palette_and_info(mode: str) -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.new(mode, (7, 5), 1)
    image.info["dpi"] = (72, 72)
    if mode == "P":
        image.putpalette(bytes(range(256)) * 3)
    back = again({"image": image})["image"]
    assert (back.mode, back.size, back.info, back.tobytes()) == (mode, (7, 5), image.info, image.tobytes())
    assert back.getpalette() == image.getpalette()
    alone = again(image)
    assert (type(alone), alone.tobytes()) == (type(image), image.tobytes())
    alone.putpixel((0, 0), 0 if mode not in ("RGB", "RGBA") else (0,) * len(mode))


def test_an_image_that_pickle_would_change_is_refused() -> None:
    image_module = pytest.importorskip("PIL.Image")
    transparent, turned, exif = (
        image_module.new("P", (4, 4), 3),
        image_module.new("L", (4, 2)),
        image_module.Exif(),
    )
    transparent.putpalette(bytes(range(64)), "RGBA")
    exif[0x0112] = 6
    turned.info["exif"] = exif.tobytes()
    assert again(turned).getexif()[0x0112] == turned.getexif()[0x0112] == 6
    assert again(turned).getexif()[0x0112] == 6
    turned.getexif()[0x0112] = 1
    for image in (transparent, turned, image_module.new("P", (4, 4))):
        with pytest.raises(UnpicklableError, match=r"changes by getexif.*transparent palette"):
            values.encode(image)


def test_views_of_the_same_memory_stay_views_of_it() -> None:
    tensor, array = torch.arange(10.0), np.arange(12.0).reshape(3, 4)
    value = {"a": tensor, "b": tensor[2:5], "c": array, "d": array[1:].T}
    back = again(value)
    assert all(same(back[name], value[name]) for name in "abcd")
    back["a"][2] = back["c"][1, 0] = 7
    assert (back["b"][0], back["d"][0, 0]) == (7, 7)
    assert sum(part.nbytes for part in map(memoryview, values.encode(value).parts[1:])) == 40 + 96
    large = torch.arange(10_000)
    assert values.encode((large[64:128], large[65:129])).nbytes < 2000, "not all of its memory"
    part_and_rest = torch.from_numpy(array[:1]), array[1:]
    assert same(again(part_and_rest), part_and_rest)
    with pytest.raises(UnpicklableError, match="UntypedStorage"):
        values.encode([tensor, tensor.untyped_storage()])


@pytest.mark.parametrize("kind", [torch.Tensor, Own])
def test_attributes_of_a_tensor_come_back_also_of_a_view(kind: Any) -> None:
    for value in (torch.arange(100).as_subclass(kind)[:10], torch.arange(10).as_subclass(kind)):
        value.format = "xyxy"
        back, (other,) = again(value), again([value])
        assert back.format == other.format == "xyxy"
        assert same(back, value)
        assert same(other, value)


def test_what_pil_loses_of_a_file_is_refused() -> None:
    image_module = pytest.importorskip("PIL.Image")
    exif, written = image_module.Exif(), io.BytesIO()
    exif[0x010F] = "maker"
    image_module.new("RGB", (6, 4), "red").save(written, "TIFF", exif=exif)
    image = image_module.open(written)
    with pytest.raises(
        UnpicklableError, match=r"TiffImageFile: PIL's pickle loses .*; return image.copy\(\)"
    ):
        values.encode([image])
    assert again(image.copy()).tobytes() == image.tobytes()


def test_an_error_of_pickling_has_the_path() -> None:
    with pytest.raises(UnpicklableError, match=r"value\['f'\]"):
        values.encode({"f": lambda: 0})


def test_the_pages_of_large_values_are_unmapped_with_them() -> None:
    wrapped = cached(lambda index: np.full(300_001, index), limit="10MB", copy=False)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("fastq_loader.cache")

    wrapped(1)
    before = mapped()
    kept = [wrapped(1) for _ in range(50)]
    assert mapped() > before
    del kept
    assert mapped() <= before
