"""Writes the files that the programs read: made up, and the same for every run.

The classes can be learnt, so that the losses say something.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image

KINDS = 5
QUALITY = 95


def tensor_files(folder: Path, training: int = 2048, side: int = 32) -> None:
    """A volume of float32[side, side, side] for each ID; a quarter as many for validation."""
    generator = torch.Generator().manual_seed(0)
    ids = [f"id-{number:05d}" for number in range(training + training // 4)]
    labels = {sample_id: number % KINDS for number, sample_id in enumerate(ids)}
    for sample_id, label in labels.items():
        volume = torch.rand(side, side, side, generator=generator) * (1 + label)
        torch.save(volume, folder / f"{sample_id}.pt")
    partition = {"train": ids[:training], "validation": ids[training:]}
    (folder / "table.json").write_text(json.dumps({"partition": partition, "labels": labels}))


def jpeg_table(folder: Path, nbytes: int = 800_000_000, width: int = 4000) -> None:
    """Grainy JPEGs of a few megabytes, as many as make up so many bytes."""
    random = np.random.default_rng(0)
    height = width * 3 // 4
    grain = random.integers(-12, 13, size=(height, width, 1), dtype=np.int16)
    rows: list[dict[str, object]] = []
    while nbytes > 0:
        number = len(rows)
        kind, defect = number % KINDS, int(random.integers(2))
        coarse = random.integers(40 * kind, 40 * kind + 90 - 60 * defect, size=(12, 16, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(smooth) + np.roll(grain, int(random.integers(width)), axis=1)
        path = folder / f"{number:05d}.jpg"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
        rows.append({"object_id": f"object-{number}", "defect": defect, "kind": kind, "path": path.name})
        nbytes -= path.stat().st_size
    pd.DataFrame(rows).to_csv(folder / "table.csv", index=False)


def photographs(folder: Path, nbytes: int = 60_000_000, width: int = 500) -> None:
    """The same, of the size that photographs of ImageNet have."""
    jpeg_table(folder, nbytes, width)


def part_of_table(whole: Path, folder: Path, rows: int = 32) -> None:
    """The first rows of a table of images, with links to their files."""
    table = pd.read_csv(whole / "table.csv")[:rows]
    for path in table["path"]:
        (folder / path).symlink_to(whole.resolve() / path)
    table.to_csv(folder / "table.csv", index=False)


def pixel_arrays(folder: Path, images: int = 4096, side: int = 160) -> None:
    """uint8 images in one file, 300 MB of them, and their labels in another."""
    random = np.random.default_rng(0)
    labels = np.arange(images) % 10
    shape = (images, 3, side, side)
    pixels = np.lib.format.open_memmap(folder / "images.npy", mode="w+", dtype=np.uint8, shape=shape)
    for image, label in zip(pixels, labels, strict=True):
        image[:] = random.integers(20 * label, 20 * label + 60, size=image.shape, dtype=np.uint8)
    pixels.flush()
    np.save(folder / "labels.npy", labels)


def small_table(folder: Path, rows: int = 759) -> None:
    """Eight measurements and a class, as many as the tutorials' diabetes table has."""
    random = np.random.default_rng(0)
    features = random.normal(size=(rows, 8))
    classes = features @ random.normal(size=(8, 1)) + random.normal(size=(rows, 1)) > 0
    np.savetxt(folder / "table.csv", np.hstack([features, classes]), delimiter=",", fmt="%.6f")
