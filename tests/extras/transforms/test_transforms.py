"""normalize and copy_into, on the CPU; what only a GPU can show is in test_gpu."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader import DataLoader, copy_into, normalize
from tests.support.datasets import Keyed, Made, Point, Record
from tests.support.thorough import examples, thorough

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def by_hand(pixels: torch.Tensor, limit: float = 255.0) -> torch.Tensor:
    shape = (-1, *[1] * (pixels.dim() - 2))
    mean = torch.tensor(MEAN, dtype=torch.float64).view(shape)
    std = torch.tensor(STD, dtype=torch.float64).view(shape)
    return (pixels.double() / limit - mean) / std


def images(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@examples(100)
@given(
    shape=st.sampled_from([(1, 3, 1, 1), (4, 3, 8, 5), (2, 3, 7), (2, 3, 4, 5, 6), (0, 3, 2, 2), (5, 3)]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_it_is_what_torchvision_computes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pixels = images(*shape)
    result = normalize(MEAN, STD, dtype).image(pixels)
    assert result.dtype is dtype
    assert result.shape == pixels.shape
    eps = torch.finfo(torch.float32 if dtype is torch.float32 else dtype).eps
    torch.testing.assert_close(result.double(), by_hand(pixels), rtol=2 * eps, atol=4 * eps)


def test_floating_point_images_are_between_0_and_1() -> None:
    pixels = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(normalize(MEAN, STD, torch.float64).image(pixels), by_hand(pixels, 1.0))
    scaled = normalize(MEAN, STD, torch.float64, max_value=1023.0).image(pixels * 1023)
    torch.testing.assert_close(scaled, by_hand(pixels, 1.0))


@pytest.mark.parametrize(
    ("shape", "layout"), [((2, 3, 8, 8), "channels_last"), ((2, 3, 4, 4, 4), "channels_last_3d")]
)
def test_channels_last(shape: tuple[int, ...], layout: str) -> None:
    pixels = images(*shape)
    result = normalize(MEAN, STD, channels_last=True)(pixels)
    assert result.is_contiguous(memory_format=getattr(torch, layout))
    torch.testing.assert_close(result, normalize(MEAN, STD)(pixels))
    with pytest.raises(ValueError, match="channels_last=True needs 4 or 5 dimensions, and got 3"):
        normalize(MEAN, STD, channels_last=True)(images(2, 3, 8))


def counted(pair: Any) -> Any:
    return defaultdict(list, pair)


@pytest.mark.parametrize("kind", [dict, Keyed, counted, list, tuple, Point])
def test_the_images_of_a_batch_are_found_and_the_rest_is_passed_on(kind: Any) -> None:
    pixels, mask = images(2, 3, 4, 4), images(2, 1, 4, 4)
    pair = {"x": pixels, "y": mask} if kind in (dict, Keyed, counted) else [pixels, mask]
    batch = kind(*pair) if kind is Point else kind(pair)
    result = normalize(MEAN, STD)(batch)
    assert type(result) is type(batch)
    assert getattr(result, "default_factory", None) is getattr(batch, "default_factory", None)
    first, second = result.values() if isinstance(result, dict) else result
    torch.testing.assert_close(first, by_hand(pixels).float())
    assert second is mask
    assert (batch["x"] if isinstance(batch, dict) else batch[0]) is pixels
    assert pixels.dtype is torch.uint8  # the batch itself stays as it was


def test_which_names_what_is_normalised() -> None:
    left, right = torch.rand(2, 3, 4, 4), images(2, 3, 4, 4)
    result = normalize(MEAN, STD, which=("left",))({"left": left, "right": right})
    torch.testing.assert_close(result["left"], by_hand(left, 1.0).float())
    assert result["right"] is right
    assert normalize(MEAN, STD, which=[1])([left, right])[0] is left
    with pytest.raises(ValueError, match=r"which names \['lfet'\], and the batch has \['left', 'right'\]"):
        normalize(MEAN, STD, which=["left", "lfet"])({"left": left, "right": right})


def test_apexs_mean_and_std_of_pixels_up_to_255_are_taken_as_such_or_refused() -> None:
    pixels = images(2, 3, 4, 4)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) * 255 for values in (MEAN, STD))
    with pytest.raises(ValueError, match=r"mean=\(123.67.*and std by 255, too, or pass max_value=1"):
        normalize(mean, std)([pixels])
    found = normalize(mean, std, max_value=1)(pixels)
    torch.testing.assert_close(found, normalize(MEAN, STD)(pixels), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normalize(mean, std)(pixels.float()), found)
    gray = images(2, 1, 4, 4)
    assert torch.equal(normalize(0.5, 0.2)(gray), normalize([0.5], [0.2])(gray))


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            [torch.rand(2, 3, 4, 4), "x"],
            r"found no uint8 image of shape \(N, 3, ...\) among torch.float32 \(2, 3, 4, 4\), str",
        ),
        ({"image": images(2, 1, 4, 4)}, r"found no uint8 image of .* among torch.uint8 \(2, 1, 4, 4\)"),
        (images(2, 4, 4, 3), r"an image of shape \(2, 4, 4, 3\) has not: images are \(N, C, ...\)"),
        ("text", "normalize got a str"),
    ],
)
def test_a_batch_without_an_image_is_an_error(batch: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        normalize(MEAN, STD)(batch)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (((0.5,), (1, 2)), ValueError, r"mean=\(0.5,\) and std=\(1.0, 2.0\)"),
        ((MEAN, (1, 0, 1)), ValueError, r"std=\(1.0, 0.0, 1.0\) must not be 0"),
        ((MEAN, STD, torch.int32), TypeError, r"dtype=torch.int32 must be floating-point"),
        ((MEAN, STD, torch.half, False, None, "x"), TypeError, r"which='x' must be a list .*: \['x'\]"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        normalize(*arguments)


@thorough()
def test_in_a_compiled_step() -> None:
    apply = normalize(MEAN, STD)

    def step(pixels: torch.Tensor) -> torch.Tensor:
        return apply(pixels) * 2

    # "eager" runs what was traced: that there is no graph break is what is tested.
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    pixels = images(2, 3, 4, 4)
    torch.testing.assert_close(compiled(pixels), step(pixels))


def batch_of(value: float, size: int = 4) -> Any:
    labels = torch.full((size,), value).long()
    return {"x": torch.full((size, 2), float(value)), "rest": [Point(labels, "text"), 3]}


@pytest.mark.parametrize("grad", [False, True])
def test_every_tensor_is_copied_in_place(grad: bool) -> None:
    static = batch_of(0)
    static["x"].requires_grad_(grad)
    addresses = [static["x"].data_ptr(), static["rest"][0].x.data_ptr()]
    copy_into(static, batch_of(7))
    assert static["x"].unique().tolist() == static["rest"][0].x.unique().tolist() == [7]
    assert addresses == [static["x"].data_ptr(), static["rest"][0].x.data_ptr()]
    assert static["x"].is_leaf


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            batch_of(1, size=3),
            r"batch\['x'\] differ: torch.float32 \(4, 2\) .* torch.float32 \(3, 2\) .*drop_last",
        ),
        (
            {"x": torch.ones(4, 2)},
            r"batch differ: dict with the keys \['x', 'rest'\] .* dict with the keys \['x'\] came",
        ),
        ({"x": torch.ones(4, 2).double(), "rest": []}, r"batch\['x'\] differ: torch.float32"),
        ({"x": torch.ones(4, 2), "rest": []}, r"batch\['rest'\] differ: list of 2 .* list of 0 came"),
        (torch.ones(4, 2), r"dict with the keys .* was captured, and torch.float32 \(4, 2\) came"),
    ],
)
def test_a_batch_of_another_form_is_refused_whole(other: Any, text: str) -> None:
    static = batch_of(5)
    with pytest.raises(ValueError, match=text):
        copy_into(static, other)
    assert static["x"].unique().tolist() == [5]


def test_what_cannot_be_filled_is_refused() -> None:
    with pytest.raises(ValueError, match="has no tensors to copy into"):
        copy_into({"a": 1}, {"a": 2})
    with pytest.raises(ValueError, match=r"expanded tensor at batch\[1\]"):
        copy_into([torch.zeros(2), torch.zeros(1).expand(3)], [torch.ones(2), torch.ones(3)])
    with pytest.raises(ValueError, match=r"has a Record with tensors at batch\[0\]"):
        copy_into([Record("r", torch.zeros(2)), torch.zeros(2)], [Record("r", torch.ones(2)), torch.ones(2)])


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_iterators_copy_their_next_batch(workers: int) -> None:
    dataset = Made(lambda index: {"x": torch.full((3,), float(index)), "name": str(index)}, 7)
    iterator = iter(DataLoader(dataset, 2, num_workers=workers))
    static: Any = {"x": torch.empty(2, 3), "name": None}
    for first in (0, 2, 4):
        iterator.copy_into(static)
        assert static["x"][:, 0].tolist() == [first, first + 1]
    with pytest.raises(ValueError, match="drop_last=True leaves out the short last batch"):
        iterator.copy_into(static)
    with pytest.raises(StopIteration):
        iterator.copy_into(static)
