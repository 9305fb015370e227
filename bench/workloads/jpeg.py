"""Decoding real JPEG files: bound by the dataset, as image training usually is.

The files are crops of the two photographs that ship within scikit-learn, so that nothing is downloaded. The
dataset is the usual first half of an image pipeline: open, decode, random crop, random flip, uint8 CHW.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from bench.workloads import ENDLESS, Load, Workload

CROP = 224  # the input size of the ImageNet models
FILES = 384
SMALLEST, LARGEST = 256, 420  # sides of a file in pixels: the photographs are 640x427
QUALITY = 90


class JpegFolder(Dataset[tuple[Tensor, int]]):
    """`dataset[i]` decodes file `i % len(files)` to (uint8[3, 224, 224], which photograph it came from)."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(str(path) for path in folder.glob("*.jpg"))
        self.labels = [int(Path(path).stem.split("_")[1]) for path in self.paths]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        which = index % len(self.paths)
        with Image.open(self.paths[which]) as file:
            image = file.convert("RGB")
        # torch's generator, because a loader seeds it in each worker.
        left = int(torch.randint(image.width - CROP + 1, ()))
        top = int(torch.randint(image.height - CROP + 1, ()))
        image = image.crop((left, top, left + CROP, top + CROP))
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image))
        return pixels.permute(2, 0, 1).contiguous(), self.labels[which]


class Jpeg(Workload):
    name = "jpeg"
    description = "32 JPEG photographs decoded with pillow, random 224x224 crop and flip, uint8"

    def prepare(self, folder: Path) -> None:
        # Imported late: only the process that writes the files pays for scikit-learn.
        from sklearn.datasets import load_sample_images

        photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
        random = np.random.default_rng(0)
        (folder / self.name).mkdir()
        for number in range(FILES):
            label = number % len(photographs)
            photograph = photographs[label]
            width, height = (int(side) for side in random.integers(SMALLEST, LARGEST, size=2, endpoint=True))
            left = int(random.integers(photograph.width - width, endpoint=True))
            top = int(random.integers(photograph.height - height, endpoint=True))
            crop = photograph.crop((left, top, left + width, top + height))
            crop.save(folder / self.name / f"{number:04d}_{label}.jpg", quality=QUALITY)

    def build(self, folder: Path) -> Load:
        return Load(JpegFolder(folder / self.name), batch_size=32)
