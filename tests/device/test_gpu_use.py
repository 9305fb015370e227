"""On a real GPU: what users do with batches there: transforms, captured steps, and all that torch can do."""

from __future__ import annotations

import pytest
import torch
from torch.utils._triton import has_triton

from fastq_loader import DataLoader, ToDevice, copy_into, normalize
from tests.support.datasets import Made
from tests.support.gpu import (
    MARKS,
    lag,
    slow_copies,
)

pytestmark = MARKS
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# ---- transforms ---------------------------------------------------------------------------------------


def image(index: int) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (3, 96, 64), dtype=torch.uint8, generator=generator), index


def torchvisions(images: torch.Tensor) -> torch.Tensor:
    """What torchvision's ToTensor and Normalize make of uint8 images, in float64 on the host."""
    mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (MEAN, STD))
    return (images.double() / 255 - mean) / std


IMAGES = Made(image, 16)
PLAIN = [torch.stack([image(at)[0] for at in range(first, first + 4)]) for first in range(0, 16, 4)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.mark.processes
@pytest.mark.parametrize("stream", ["consumer", "side"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_normalize_is_torchvisions_formula(
    workers: int,
    channels_last: bool,
    dtype: torch.dtype,
    stream: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_copies(monkeypatch)
    transform = normalize(MEAN, STD, dtype, channels_last=channels_last)
    with DataLoader(
        IMAGES,
        4,
        num_workers=workers,
        device=ToDevice("cuda", transform=transform, transform_stream=stream),
    ) as loader:
        batches = list(loader)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert len(batches) == len(PLAIN)
    for (images, _), plain in zip(batches, PLAIN, strict=True):
        assert images.dtype is dtype
        assert images.is_contiguous(memory_format=layout)
        error = (images.cpu().double() - torchvisions(plain)).abs().max().item()
        assert error <= TOLERANCE[dtype], f"{error} off"
    assert torch.cat([labels for _, labels in batches]).tolist() == list(range(16))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.timeout(300)
def test_normalize_can_be_compiled() -> None:
    if not has_triton():
        pytest.skip("needs triton, torch's compiler for GPUs")
    transform = normalize(MEAN, STD, torch.float16, channels_last=True)
    compiled = torch.compile(lambda images: transform(images) * 2, fullgraph=True)
    for plain in PLAIN[:2]:
        images = compiled(plain.cuda())
        assert images.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(images.cpu().double(), 2 * torchvisions(plain), rtol=0, atol=8e-3)


# ---- captured steps -----------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("buffers", ["fresh", "reuse"])
def test_a_captured_step_normalises_what_is_copied_into_its_inputs(
    buffers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_copies(monkeypatch)
    transform = normalize(MEAN, STD, torch.float16, which=[0])
    with DataLoader(IMAGES, 4, num_workers=2, device=ToDevice("cuda", buffers=buffers)) as loader:
        batches = iter(loader)
        first = next(batches)
        static = [part.clone() for part in first]
        transform(static)  # warm, and makes the factors that a graph cannot keep
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            images, labels = transform(static)
        outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in PLAIN:
            if outputs:
                batches.copy_into(static)
            else:
                copy_into(static, first)
            lag()  # the replay is late; the next batch must not be copied into `static` before
            graph.replay()
            outputs.append((images.clone(), labels.clone()))
    for (images, labels), plain, number in zip(outputs, PLAIN, range(4), strict=True):
        assert (images.cpu().double() - torchvisions(plain)).abs().max().item() <= TOLERANCE[torch.float16]
        assert labels.tolist() == list(range(4 * number, 4 * number + 4))
