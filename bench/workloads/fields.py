"""Many small fields in a dict, as recommenders and tabular models read them: bound by the leaves of a batch.

Collating makes 50 tensors of a few hundred bytes each batch; whoever sends them one by one pays 50 times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from bench.workloads import ENDLESS, Load, Workload

SAMPLES = 1024
FLOATS, FLAGS, CATEGORIES = 20, 4, 14  # Python's float, bool and int
HISTORIES, EMBEDDINGS = 6, 6  # int64[8] and float32[16]
HISTORY_LENGTH, EMBEDDING_LENGTH = 8, 16
VOCABULARY = 100_000
HISTORY_NAMES = [f"history_{number}" for number in range(HISTORIES)]
EMBEDDING_NAMES = [f"embedding_{number}" for number in range(EMBEDDINGS)]


class FieldRows(Dataset[dict[str, Any]]):
    """`dataset[i]` is a dict of 50 fields: 38 Python numbers, 6 int64[8], 6 float32[16]."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.numbers = [_numbers(generator) for _ in range(SAMPLES)]
        # One tensor for each kind, as columns of a table are: 12,288 of them could not be sent to a worker.
        self.histories = torch.randint(VOCABULARY, (SAMPLES, HISTORIES, HISTORY_LENGTH), generator=generator)
        self.embeddings = torch.randn(SAMPLES, EMBEDDINGS, EMBEDDING_LENGTH, generator=generator)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, Any]:
        which = index % SAMPLES
        row: dict[str, Any] = dict(self.numbers[which])
        row.update(zip(HISTORY_NAMES, self.histories[which].unbind(), strict=True))
        row.update(zip(EMBEDDING_NAMES, self.embeddings[which].unbind(), strict=True))
        return row


def _numbers(generator: torch.Generator) -> dict[str, float]:
    columns = {
        "price": torch.rand(FLOATS, generator=generator),
        "flag": torch.rand(FLAGS, generator=generator) < 0.5,
        "category": torch.randint(VOCABULARY, (CATEGORIES,), generator=generator),
    }
    return {
        f"{kind}_{n}": value for kind, column in columns.items() for n, value in enumerate(column.tolist())
    }


class Fields(Workload):
    name = "fields"
    description = "16 dicts of 50 small fields: floats, ints, bools and short tensors"
    transport_bound = True

    def build(self, folder: Path) -> Load:
        return Load(FieldRows(), batch_size=16)
