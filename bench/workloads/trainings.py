"""Trainings for a GPU: what is loaded, and the model that is trained on it. `small` makes all of them tiny.

A training takes what a loader gives on the device: pixels of uint8 are normalised there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.workloads import Cycled, Endless, Load, Workload
from bench.workloads.jpeg import CROP, MEAN, STD, JpegFolder, write_photographs

CLASSES, VOCABULARY, VALUES = 100, 8192, 1000  # of images; of tokens; of each categorical column
NUMBERS, CATEGORIES = 13, 26  # columns, as in Criteo's table of advertisements


class Training(NamedTuple):
    """`model`: makes the model. `loss`: of the model and a batch that is on the device."""

    workload: Workload
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]


# ---- data ---------------------------------------------------------------------------------------


class Images(Endless):
    """`images[i]` is (uint8[3, side, side], label) of a file of all images, or (float32[...], label)."""

    def __init__(self, folder: Path, *, normalised: bool) -> None:
        self.path, self.normalised = folder / "images.npy", normalised

    @cached_property
    def images(self) -> Any:
        return np.load(self.path, mmap_mode="r")  # in each worker for itself: it would be pickled as a whole

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = torch.from_numpy(self.images[index % len(self.images)].copy())
        return (pixels / 255 - MEAN) / STD if self.normalised else pixels, index % CLASSES


def write_images(folder: Path, count: int, side: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, side, side), np.uint8)
    np.save(folder / "images.npy", pixels)


class Table(Endless):
    """`table[i]` is (float32[13], int64[26], float32): numbers, categories and the label of a row."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.numbers = torch.rand(rows, NUMBERS, generator=generator)
        self.categories = torch.randint(VALUES, (rows, CATEGORIES), generator=generator)
        self.labels = torch.randint(2, (rows,), generator=generator).float()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        row = index % len(self.labels)
        return self.numbers[row], self.categories[row], self.labels[row]


def sequences(count: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))


# ---- models -------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            convolution = nn.Conv2d(before, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.body(images) + self.shortcut(images))


def resnet18(width: int) -> nn.Module:
    """ResNet-18 (He et al. 2015, table 1); `width` is 64 there."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = width
    for wide, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Block(before, wide, stride), Block(wide, wide, 1)]
        before = wide
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))
    return model


def image_loss(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    if images.dtype == torch.uint8:
        images = (images.float() / 255 - MEAN.to(images.device)) / STD.to(images.device)
    if images.is_cuda:  # the layout of the model there
        images = images.contiguous(memory_format=torch.channels_last)
    return functional.cross_entropy(model(images), labels)


class Transformer(nn.Module):
    """Scores of the next token."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        found: Tensor = self.scores(self.layers(self.embedding(tokens), mask=mask, is_causal=True))
        return found


def token_loss(model: nn.Module, tokens: Any) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Clicks(nn.Module):
    """Embeddings of the categories beside the numbers, and three layers over both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CATEGORIES * VALUES, 16)
        self.offsets = nn.Parameter(VALUES * torch.arange(CATEGORIES), requires_grad=False)
        sizes = (NUMBERS + 16 * CATEGORIES, width, width // 2)
        hidden = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes)]
        self.layers = nn.Sequential(*(layer for pair in hidden for layer in pair), nn.Linear(sizes[-1], 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        embedded = self.embedding(categories + self.offsets).flatten(1)
        scores: Tensor = self.layers(torch.cat((numbers, embedded), 1)).squeeze(1)
        return scores


def click_loss(model: nn.Module, batch: Any) -> Tensor:
    numbers, categories, labels = batch
    return functional.binary_cross_entropy_with_logits(model(numbers, categories), labels)


# ---- all of them --------------------------------------------------------------------------------

NAMES = ("images", "float_images", "tokens", "table", "jpeg_files")


def trainings(small: bool) -> dict[str, Training]:
    """Each training by its name; sized for one large GPU, or small enough for two cores."""
    side, images, batch, width = (32, 32, 8, 8) if small else (CROP, 2048, 256, 64)
    count, length, sequence_batch = (8, 32, 4) if small else (1024, 1024, 16)
    rows, row_batch = (64, 16) if small else (1 << 18, 2048)
    write = partial(write_images, count=images, side=side)

    def of_images(name: str, description: str, normalised: bool) -> Training:
        def build(folder: Path) -> Load:
            return Load(Images(folder, normalised=normalised), batch)

        return Training(Workload(name, description, build, write), partial(resnet18, width), image_loss)

    jpeg = Workload(
        "jpeg_files",
        "ResNet-18, JPEG files decoded by pillow in the worker",
        lambda folder: Load(JpegFolder(folder), 4 if small else 128),
        write_photographs,
        random=True,
    )
    tokens = Workload(
        "tokens",
        f"a transformer, {sequence_batch} x {length:,} tokens",
        lambda folder: Load(Cycled(sequences(count, length)), sequence_batch),
    )
    table = Workload(
        "table",
        f"a table, {row_batch:,} rows of {NUMBERS} numbers, {CATEGORIES} categories and a label",
        lambda folder: Load(Table(rows), row_batch),
    )
    found = (
        of_images("images", "ResNet-18, uint8 images of a memory-mapped file", False),
        of_images("float_images", "the same as float32, normalised in the worker", True),
        Training(tokens, partial(Transformer, *((16, 1) if small else (512, 6))), token_loss),
        Training(table, partial(Clicks, 8 if small else 1024), click_loss),
        Training(jpeg, partial(resnet18, width), image_loss),
    )
    return dict(zip(NAMES, found, strict=True))
