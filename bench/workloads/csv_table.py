"""A small table in a real training loop: scikit-learn's diabetes data, written as CSV and trained on.

The step is part of what is timed: here a loader shows what it is worth to a training loop, not on its own.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from bench.workloads import Load, Step, Workload

BATCH = 64
BATCHES = (
    3536  # in an epoch, which are 512 passes over 442 patients: six would be over before they can be timed
)


class CsvTable(Workload):
    name = "csv"
    description = "64 shuffled rows of a CSV table (diabetes, 10 features), a small network trained on them"

    def prepare(self, folder: Path) -> None:
        # Imported late: only the process that writes the file pays for scikit-learn.
        from sklearn.datasets import load_diabetes

        table = load_diabetes(scaled=False)
        with (folder / "diabetes.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*table.feature_names, "target"])
            writer.writerows([*row, target] for row, target in zip(table.data, table.target, strict=True))

    def build(self, folder: Path) -> Load:
        return Load(CsvRows(folder / "diabetes.csv"), batch_size=BATCH, shuffle=True, batches=BATCHES)

    def new_step(self) -> Step:
        return TrainingStep()


class CsvRows(Dataset[tuple[Tensor, Tensor]]):
    """`dataset[i]` is (float32[10], float32[]), both standardised over the table; read whole at the start."""

    def __init__(self, path: Path) -> None:
        with path.open(newline="") as file:
            reader = csv.reader(file)
            next(reader)  # the header
            table = torch.tensor([[float(field) for field in row] for row in reader])
        table = (table - table.mean(dim=0)) / table.std(dim=0)
        self.features, self.targets = table[:, :-1].contiguous(), table[:, -1].contiguous()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.targets[index]


class TrainingStep:
    """Forward, backward and an optimizer step of a network with one hidden layer."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def __call__(self, batch: Any) -> None:
        features, targets = batch
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(features).squeeze(1), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
