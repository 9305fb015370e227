"""A small CSV table and a small model: ten epochs with 0, 1, 2 and 4 workers.

    python csv_table.py FOLDER

FOLDER holds `table.csv`: numbers without a header, of which the last in each row is 0 or 1. For a table of
your own, change `Table`. Loading a batch takes microseconds here, so that workers are not worth much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fastq_loader


class Table(Dataset[tuple[Tensor, Tensor]]):
    """`table[i]` is (float32[columns - 1], float32[1]): a row, and its class."""

    def __init__(self, path: Path) -> None:
        rows = np.loadtxt(path, delimiter=",", dtype=np.float32)
        self.features = torch.from_numpy(rows[:, :-1])
        self.labels = torch.from_numpy(rows[:, [-1]])

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.labels[index]


def train(
    folder: Path,
    loader_class: Any = fastq_loader.DataLoader,
    num_workers: int = 2,
    epochs: int = 10,
    track: Callable[[Iterable[Any], str], Iterable[Any]] = lambda batches, description: batches,
) -> tuple[float, Tensor]:
    """Train; the mean loss of the last epoch, and the trained model's predictions for the table.

    Args:
        loader_class: fastq_loader's DataLoader or torch's.
        track: wraps each pass over the loader, as `rich.progress.track` does.
    """
    table = Table(folder / "table.csv")
    loader = loader_class(
        table, batch_size=32, shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    hidden = nn.Linear(table.features.shape[1], 6), nn.Sigmoid(), nn.Linear(6, 4), nn.Sigmoid()
    model = nn.Sequential(*hidden, nn.Linear(4, 1), nn.Sigmoid())
    criterion = nn.BCELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(1, epochs + 1):
        losses = []
        for features, labels in track(loader, f"epoch {epoch}"):
            optimizer.zero_grad()
            loss = criterion(model(features), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    with torch.no_grad():
        return float(torch.stack(losses).mean()), model(table.features)


def main() -> None:
    for num_workers in (0, 1, 2, 4):
        torch.manual_seed(0)
        began = perf_counter()
        loss, _ = train(Path(sys.argv[1]), num_workers=num_workers)
        print(f"{num_workers} workers: {perf_counter() - began:.2f} s, loss {loss:.4f}")


if __name__ == "__main__":
    main()
