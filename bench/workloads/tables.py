"""Rows of tables: what a loader spends on every batch, every sample and every field of it.

`csv`: a small table in a real training loop, whose step is part of what is timed: here a loader shows what it
is worth to a training loop. `rows`: 2.6 KB a batch. `fields`: 50 tensors of a few hundred bytes a batch, as
recommenders read them; whoever sends them one by one pays 50 times. `vectorised`: `__getitems__` indexes the
tensor once and returns the batch. `table`, `wide_table`: a TensorDataset, read at the loader's will.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from bench.workloads import Endless, Load, Workload

CSV_BATCHES = 3536  # in an epoch, which are 512 passes over 442 patients: six would be over at once
LABELLED_ROWS, FIELD_ROWS, ALL_ROWS = 4096, 1024, 1_000_000
HISTORY_NAMES = [f"history_{number}" for number in range(6)]  # int64[8]
EMBEDDING_NAMES = [f"embedding_{number}" for number in range(6)]  # float32[16]
VOCABULARY = 100_000
BATCH = 4096  # of the vectorised rows

T = TypeVar("T")


class CsvRows(Dataset[tuple[Tensor, Tensor]]):
    """`dataset[i]` is (float32[10], float32[]), both standardised over the table; read whole at the start."""

    def __init__(self, path: Path) -> None:
        table = torch.from_numpy(np.loadtxt(path, dtype=np.float32, delimiter=",", skiprows=1))
        table = (table - table.mean(dim=0)) / table.std(dim=0)
        self.features, self.targets = table[:, :-1].contiguous(), table[:, -1].contiguous()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.targets[index]


def write_csv(folder: Path) -> None:
    """scikit-learn's diabetes data."""
    # Imported late: only the process that writes the file pays for scikit-learn.
    from sklearn.datasets import load_diabetes

    load_diabetes(as_frame=True, scaled=False).frame.to_csv(folder / "diabetes.csv", index=False)


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


CSV = Workload(
    "csv",
    "64 shuffled rows of a CSV table (diabetes, 10 features), a small network trained on them",
    lambda folder: Load(CsvRows(folder / "diabetes.csv"), batch_size=64, shuffle=True, batches=CSV_BATCHES),
    write_csv,
    new_step=TrainingStep,
)


class LabelledRows(Endless):
    """`dataset[i]` is (float32[8], int): a row of one tensor, indexed sample by sample, and its label."""

    def __init__(self) -> None:
        self.rows = torch.rand(LABELLED_ROWS, 8)
        self.labels = [row % 10 for row in range(LABELLED_ROWS)]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        which = index % LABELLED_ROWS
        return self.rows[which], self.labels[which]


ROWS = Workload(
    "rows",
    "64 rows of 8 floats and an integer label",
    lambda folder: Load(LabelledRows(), batch_size=64),
)


class FieldRows(Endless):
    """`dataset[i]` is a dict of 50 fields: 38 numbers of Python, 6 int64[8], 6 float32[16]."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.numbers = [_numbers(generator) for _ in range(FIELD_ROWS)]
        # One tensor for each kind, as columns of a table are: 12,288 of them could not be sent to a worker.
        self.histories = torch.randint(VOCABULARY, (FIELD_ROWS, 6, 8), generator=generator)
        self.embeddings = torch.randn(FIELD_ROWS, 6, 16, generator=generator)

    def __getitem__(self, index: int) -> dict[str, Any]:
        which = index % FIELD_ROWS
        row: dict[str, Any] = dict(self.numbers[which])
        row.update(zip(HISTORY_NAMES, self.histories[which].unbind(), strict=True))
        row.update(zip(EMBEDDING_NAMES, self.embeddings[which].unbind(), strict=True))
        return row


def _numbers(generator: torch.Generator) -> dict[str, float]:
    columns = {
        "price": torch.rand(20, generator=generator),
        "flag": torch.rand(4, generator=generator) < 0.5,
        "category": torch.randint(VOCABULARY, (14,), generator=generator),
    }
    return {f"{kind}_{n}": value for kind, of in columns.items() for n, value in enumerate(of.tolist())}


FIELDS = Workload(
    "fields",
    "16 dicts of 50 small fields: floats, ints, bools and short tensors",
    lambda folder: Load(FieldRows(), batch_size=16),
)


class VectorisedRows(Dataset[Tensor]):
    """`dataset[i]` is float32[16]; `dataset.__getitems__(indices)` is float32[len(indices), 16]."""

    def __init__(self) -> None:
        self.rows = torch.rand(ALL_ROWS, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return ALL_ROWS

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> Tensor:
        # By way of numpy, which reads a list of 4096 integers in 0.1 ms; torch takes 0.5 ms.
        return self.rows[torch.from_numpy(np.array(indices))]


def as_it_is(batch: T) -> T:
    """Collate nothing: `__getitems__` has made the batch."""
    return batch


VECTORISED = Workload(
    "vectorised",
    "4096 shuffled rows of 1,000,000 x 16 float32, fetched by one vectorised call",
    lambda folder: Load(VectorisedRows(), batch_size=BATCH, shuffle=True, collate_fn=as_it_is),
)


TABLE = Workload(
    "table",
    "64 shuffled rows of a TensorDataset of 1,000,000 x 8 float32",
    lambda folder: Load(TensorDataset(torch.rand(ALL_ROWS, 8)), batch_size=64, shuffle=True),
)

WIDE_TABLE = Workload(
    "wide_table",
    "16 shuffled rows of a TensorDataset of 100,000 x 50 fields",
    lambda folder: Load(TensorDataset(*torch.rand(50, ALL_ROWS // 10)), batch_size=16, shuffle=True),
)
