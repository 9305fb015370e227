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


class FieldRows(Dataset[dict[str, Any]]):
    """`dataset[i]` is a dict of 50 fields: 38 Python numbers, 6 int64[8], 6 float32[16]."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = [_row(generator) for _ in range(SAMPLES)]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index % SAMPLES]


def _row(generator: torch.Generator) -> dict[str, Any]:
    floats = torch.rand(FLOATS, generator=generator).tolist()
    flags = (torch.rand(FLAGS, generator=generator) < 0.5).tolist()
    categories = torch.randint(VOCABULARY, (CATEGORIES,), generator=generator).tolist()
    histories = torch.randint(VOCABULARY, (HISTORIES, HISTORY_LENGTH), generator=generator)
    embeddings = torch.randn(EMBEDDINGS, EMBEDDING_LENGTH, generator=generator)
    fields = {"price": floats, "flag": flags, "category": categories}
    fields |= {"history": list(histories), "embedding": list(embeddings)}
    return {
        f"{kind}_{number}": value for kind, values in fields.items() for number, value in enumerate(values)
    }


class Fields(Workload):
    name = "fields"
    description = "16 dicts of 50 small fields: floats, ints, bools and short tensors"
    transport_bound = True

    def build(self, folder: Path) -> Load:
        return Load(FieldRows(), batch_size=16)
