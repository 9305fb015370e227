"""One file for each sample, written by `torch.save`: the layout that tutorials on large data sets teach.

IDs are strings, the labels a dict by ID, and a partition says which IDs are for training and which for
validation. The layout, the two lists and the volumes of 32x32x32 follow A. Amidi and S. Amidi, "A detailed
example of how to generate your data in parallel with PyTorch". What the volumes hold does not matter, because
nothing in the files is compressed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bench.workloads import Load, Workload

SIDE = 32
TRAIN, VALIDATION = 512, 128  # files, 131 KB each: 84 MB in all, which stay in the page cache
CLASSES = 6
BATCH = 64
BATCHES = 512  # in an epoch, which are 64 passes: eight would be over before they can be timed


class TensorFiles(Dataset[tuple[Tensor, int]]):
    """`dataset[i]` is (float32[32, 32, 32], int): the file and the label of `list_ids[i]`."""

    def __init__(self, folder: Path, list_ids: Sequence[str], labels: Mapping[str, int]) -> None:
        self.folder = str(folder)
        self.list_ids = list_ids
        self.labels = labels

    def __len__(self) -> int:
        return len(self.list_ids)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample_id = self.list_ids[index]
        volume = torch.load(f"{self.folder}/{sample_id}.pt", weights_only=True)
        return volume, self.labels[sample_id]


class TensorFile(Workload):
    name = "tensor_files"
    description = "64 shuffled float32 volumes of 32x32x32, each from a file of its own by torch.load"

    def prepare(self, folder: Path) -> None:
        files = folder / self.name
        files.mkdir()
        generator = torch.Generator().manual_seed(0)
        ids = [f"id-{number:04d}" for number in range(TRAIN + VALIDATION)]
        for sample_id in ids:
            torch.save(torch.rand(SIDE, SIDE, SIDE, generator=generator), files / f"{sample_id}.pt")
        partition = {"train": ids[:TRAIN], "validation": ids[TRAIN:]}
        labels = {sample_id: number % CLASSES for number, sample_id in enumerate(ids)}
        (files / "partition.json").write_text(json.dumps(partition))
        (files / "labels.json").write_text(json.dumps(labels))

    def build(self, folder: Path) -> Load:
        return Load(self.part(folder, "train"), batch_size=BATCH, shuffle=True, batches=BATCHES)

    def part(self, folder: Path, name: str) -> TensorFiles:
        """Make the dataset of one list of the partition, "train" or "validation"."""
        files = folder / self.name
        partition = json.loads((files / "partition.json").read_text())
        labels = json.loads((files / "labels.json").read_text())
        return TensorFiles(files, partition[name], labels)
