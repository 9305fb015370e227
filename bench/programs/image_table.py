"""A table of images that is larger than memory: object, labels, path. Decoded while the model trains.

    python image_table.py FOLDER

FOLDER holds the images, and `table.csv` with the columns object_id, defect (0 or 1), kind (0, 1, ...) and
path. For a table of your own, change `Images`. Needs pandas and pillow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

import fastq_loader

SIDE = 128
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


class Images(Dataset[tuple[Tensor, Tensor, int]]):
    """`images[i]` is (float32[3, SIDE, SIDE], float32[], int): an image, its defect, its kind."""

    def __init__(self, table: pd.DataFrame, folder: Path) -> None:
        self.paths = [str(folder / path) for path in table["path"]]
        self.defect = torch.tensor(table["defect"].to_numpy(), dtype=torch.float32)
        self.kind = table["kind"].tolist()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        pixels = torch.from_numpy(self.decode(index)).permute(2, 0, 1)
        return (pixels / 255 - MEAN) / STD, self.defect[index], self.kind[index]

    def decode(self, index: int) -> Any:
        with Image.open(self.paths[index]) as file:
            file.draft("RGB", (2 * SIDE, 2 * SIDE))  # a JPEG is decoded no larger than it is needed
            return np.array(file.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def with_cached(dataset: Any, limit: int | str = "0.25", path: Any = None, **options: Any) -> Any:
    """Images are decoded once, for all workers and epochs. For `loader_class`."""
    dataset.decode = fastq_loader.cached(dataset.decode, limit=limit, path=path, version=1)
    return fastq_loader.DataLoader(dataset, **options)


class Classifier(nn.Module):
    """A small network with a head of one score for the defect, and one of a score for each kind."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        )  # fmt: skip
        self.defect, self.kind = nn.Linear(512, 1), nn.Linear(512, kinds)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(images)
        return self.defect(features).squeeze(1), self.kind(features)


def train(
    folder: Path,
    loader_class: Any = fastq_loader.DataLoader,
    num_workers: int = 4,
    epochs: int = 3,
    track: Callable[[Iterable[Any], str], Iterable[Any]] = lambda batches, description: batches,
) -> tuple[float, Tensor]:
    """Train; the mean loss of the last epoch, and the kinds that were predicted in it.

    Args:
        loader_class: fastq_loader's DataLoader or torch's.
        track: wraps each pass over the loader, as `rich.progress.track` does.
    """
    table = pd.read_csv(folder / "table.csv")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = loader_class(
        Images(table, folder),
        batch_size=16,
        shuffle=True,  # anew in each epoch
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    model = Classifier(int(table["kind"].max()) + 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(1, epochs + 1):
        losses, found = [], []
        for images, defect, kind in track(loader, f"epoch {epoch}"):
            optimizer.zero_grad()
            defect_score, kind_scores = model(images.to(device))
            loss = nn.functional.binary_cross_entropy_with_logits(defect_score, defect.to(device))
            loss = loss + nn.functional.cross_entropy(kind_scores, kind.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            found.append(kind_scores.detach().argmax(dim=1))
        mean = float(torch.stack(losses).mean())
        print(f"epoch {epoch}: loss {mean:.4f}")
    return mean, torch.cat(found).cpu()


if __name__ == "__main__":
    torch.manual_seed(0)
    train(Path(sys.argv[1]))
