"""One tensor file for each ID, a loader for training and one for validation.

    python files_by_id.py FOLDER

FOLDER holds `ID.pt` for every ID, and `table.json`:
`{"partition": {"train": [ID, ...], "validation": [ID, ...]}, "labels": {ID: class, ...}}`.
For files of your own, change `Files`, and what `train` reads at its beginning.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fastq_loader


class Files(Dataset[tuple[Tensor, int]]):
    """`files[i]` is the tensor and the class of the i-th ID."""

    def __init__(self, folder: Path, list_ids: list[str], labels: dict[str, int]) -> None:
        self.folder, self.list_ids, self.labels = folder, list_ids, labels

    def __len__(self) -> int:
        return len(self.list_ids)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample_id = self.list_ids[index]
        return self.read(sample_id), self.labels[sample_id]

    def read(self, sample_id: str) -> Tensor:
        volume: Tensor = torch.load(self.folder / f"{sample_id}.pt", weights_only=True)
        return volume


def with_cached(dataset: Any, limit: int | str = "0.25", **options: Any) -> Any:
    """Files are read once, for all workers and epochs. For `loader_class`."""
    dataset.read = fastq_loader.cached(dataset.read, limit=limit)
    return fastq_loader.DataLoader(dataset, **options)


def train(
    folder: Path,
    loader_class: Any = fastq_loader.DataLoader,
    num_workers: int = 6,
    epochs: int = 3,
    track: Callable[[Iterable[Any], str], Iterable[Any]] = lambda batches, description: batches,
) -> tuple[float, Tensor]:
    """Train and validate; the last loss of the validation, and what was predicted for each of its samples.

    Args:
        loader_class: fastq_loader's DataLoader or torch's.
        track: wraps each pass over a loader, as `rich.progress.track` does.
    """
    table = json.loads((folder / "table.json").read_text())
    partition, labels = table["partition"], table["labels"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # Both loaders keep their workers: those of one rest while the other is read.
    params = {"batch_size": 64, "num_workers": num_workers, "persistent_workers": num_workers > 0}
    training = loader_class(Files(folder, partition["train"], labels), shuffle=True, **params)
    validation = loader_class(Files(folder, partition["validation"], labels), **params)

    model = nn.Sequential(nn.Conv3d(1, 8, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool3d(2), nn.Flatten())
    model = model.append(nn.Linear(64, max(labels.values()) + 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(1, epochs + 1):
        for volumes, classes in track(training, f"epoch {epoch}, training"):
            optimizer.zero_grad()
            scores = model(volumes.to(device).unsqueeze(1))
            nn.functional.cross_entropy(scores, classes.to(device)).backward()
            optimizer.step()

        found, losses = [], []
        with torch.no_grad():
            for volumes, classes in track(validation, f"epoch {epoch}, validation"):
                scores = model(volumes.to(device).unsqueeze(1)).cpu()
                losses.append(nn.functional.cross_entropy(scores, classes, reduction="sum"))
                found.append(scores.argmax(dim=1))
        loss, predictions = float(sum(losses)) / len(validation.dataset), torch.cat(found)
        print(f"epoch {epoch}: validation loss {loss:.4f}")
    return loss, predictions


if __name__ == "__main__":
    torch.manual_seed(0)
    train(Path(sys.argv[1]))
