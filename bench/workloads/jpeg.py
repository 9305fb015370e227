"""Decoding real JPEG files: bound by the dataset, as image training usually is.

The files are crops of the two photographs that ship within scikit-learn, so that nothing is downloaded.
`jpeg` stops at bytes, for models that normalise on the device; `jpeg_augment` is the usual ImageNet recipe to
the end, whose batches are four times as large; `jpeg_decoded` is that recipe by `DecodeImages`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bench.workloads import Endless, Load, Workload

CROP = 224  # the input size of the ImageNet models
FILES = 384
SMALLEST, LARGEST = 256, 420  # sides of a file in pixels: the photographs are 640x427
QUALITY = 90
BATCH = 32

# Of the photographs of ImageNet, as everybody uses them.
MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)

# torchvision's RandomResizedCrop: share of the area, and width over height.
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)


class JpegFolder(Endless):
    """`dataset[i]` decodes file `i % len(files)` to (uint8[3, 224, 224], which photograph it came from)."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(str(path) for path in folder.glob("*.jpg"))
        self.labels = [int(Path(path).stem.split("_")[1]) for path in self.paths]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.file(index)
        with Image.open(path) as file:
            image = self.cut(file.convert("RGB"))
        if self.flipped():
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image))
        return self.finish(pixels.permute(2, 0, 1)), label

    def file(self, index: int) -> tuple[str, int]:
        """The path and the label of a sample."""
        which = index % len(self.paths)
        return self.paths[which], self.labels[which]

    def corner(self, width: int, height: int) -> tuple[int, int]:
        """Left and top of a random 224x224 crop of an image of that size."""
        # torch's generator, because a loader seeds it in each worker.
        return int(torch.randint(width - CROP + 1, ())), int(torch.randint(height - CROP + 1, ()))

    def flipped(self) -> bool:
        """Whether the next image is flipped: half of them are."""
        return bool(torch.rand(()) < 0.5)

    def cut(self, image: Image.Image) -> Image.Image:
        """A random 224x224 crop, not scaled."""
        left, top = self.corner(*image.size)
        return image.crop((left, top, left + CROP, top + CROP))

    def finish(self, pixels: Tensor) -> Tensor:
        """Make uint8[3, 224, 224] of whatever strides into what the sample holds."""
        return pixels.contiguous()


class AugmentedJpegs(JpegFolder):
    """`dataset[i]` is (float32[3, 224, 224], label): a random crop scaled to size, flipped, normalised."""

    def cut(self, image: Image.Image) -> Image.Image:
        """A random part, its area and aspect ratio drawn as torchvision draws them, scaled to 224x224."""
        area = image.width * image.height * _uniform(*AREA)
        ratio = math.exp(_uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        width = min(round(math.sqrt(area * ratio)), image.width)
        height = min(round(math.sqrt(area / ratio)), image.height)
        left = int(torch.randint(image.width - width + 1, ()))
        top = int(torch.randint(image.height - height + 1, ()))
        box = (left, top, left + width, top + height)
        return image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=box)

    def finish(self, pixels: Tensor) -> Tensor:
        return pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255).sub_(MEAN).div_(STD)


class DecodedJpegs(JpegFolder):
    """The samples of `AugmentedJpegs`, made by `DecodeImages` from the bytes of the file."""

    def __init__(self, folder: Path) -> None:
        # Imported late: from then on every loader of the process keeps the place of its samples.
        from fastq_loader.images import DecodeImages, encoded

        super().__init__(folder)
        self.encoded = encoded
        self.pixels = DecodeImages(
            CROP, AREA, RATIO, mean=MEAN.flatten().tolist(), std=STD.flatten().tolist()
        )

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.file(index)
        return self.pixels(self.encoded(path)), label


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


def write_photographs(folder: Path) -> None:
    """Write the JPEG files, named `<number>_<photograph>.jpg`."""
    # Imported late: only the process that writes the files pays for scikit-learn.
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    random = np.random.default_rng(0)
    for number in range(FILES):
        label = number % len(photographs)
        photograph = photographs[label]
        width, height = (int(side) for side in random.integers(SMALLEST, LARGEST, size=2, endpoint=True))
        left = int(random.integers(photograph.width - width, endpoint=True))
        top = int(random.integers(photograph.height - height, endpoint=True))
        crop = photograph.crop((left, top, left + width, top + height))
        crop.save(folder / f"{number:04d}_{label}.jpg", quality=QUALITY)


BYTES = Workload(
    "jpeg",
    "32 JPEG photographs decoded with pillow, random 224x224 crop and flip, uint8",
    lambda folder: Load(JpegFolder(folder), batch_size=BATCH, reads_files=True),
    write_photographs,
    random=True,
)
FLOATS = Workload(
    "jpeg_augment",
    "32 JPEG photographs, random crop scaled to 224x224, flip, float32, normalised",
    lambda folder: Load(AugmentedJpegs(folder), batch_size=BATCH, reads_files=True),
    write_photographs,
    random=True,
)
DECODED = replace(
    FLOATS,
    name="jpeg_decoded",
    description="the same by DecodeImages, which decodes with libjpeg-turbo",
    build=lambda folder: Load(DecodedJpegs(folder), batch_size=BATCH, reads_files=True),
)
