"""Samples from files: one file for each, and a stream of records out of shards.

`tensor_files` is the layout that tutorials on large data sets teach, with string IDs and a dict of labels;
it follows A. Amidi and S. Amidi, "A detailed example of how to generate your data in parallel with
PyTorch". `stream` has no indices: a worker reads the shards whose number is its own modulo the number of
workers, a record from each in turn, so that record k comes from worker k modulo that number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from bench.workloads import Load, Workload

FILES = 512  # 131 KB each: 67 MB in all, which stay in the page cache
BATCHES = 512  # in an epoch, which are 64 passes: eight would be over before they can be timed
SHARDS = 48  # divided by 1, 2, 3, 4, 6, 8, 12 and 16 workers
RECORDS = 1776  # of 1,797: 37 in each shard
PASSES = 256  # over the records: an epoch is 7,104 batches


class TensorFiles(Dataset[tuple[Tensor, int]]):
    """`dataset[i]` is (float32[32, 32, 32], int): the file and the label of `list_ids[i]`."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.labels: dict[str, int] = json.loads((folder / "labels.json").read_text())
        self.list_ids = list(self.labels)

    def __len__(self) -> int:
        return len(self.list_ids)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample_id = self.list_ids[index]
        volume = torch.load(f"{self.folder}/{sample_id}.pt", weights_only=True)
        return volume, self.labels[sample_id]


def write_tensors(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = {f"id-{number:04d}": number % 6 for number in range(FILES)}
    for sample_id in labels:
        torch.save(torch.rand(32, 32, 32, generator=generator), folder / f"{sample_id}.pt")
    (folder / "labels.json").write_text(json.dumps(labels))


TENSORS = Workload(
    "tensor_files",
    "64 shuffled float32 volumes of 32x32x32, each from a file of its own by torch.load",
    lambda folder: Load(TensorFiles(folder), 64, shuffle=True, batches=BATCHES, reads_files=True),
    write_tensors,
)


class DigitStream(IterableDataset[tuple[Tensor, int]]):
    """Yields (float32[64], int), the pixels of a digit in 0..1 and which one it is; no length."""

    def __init__(self, folder: Path) -> None:
        self.shards = sorted(str(path) for path in folder.glob("*.jsonl"))

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = get_worker_info()
        shards = self.shards if worker is None else self.shards[worker.id :: worker.num_workers]
        for _ in range(PASSES):
            with ExitStack() as stack:
                files = [stack.enter_context(open(shard)) for shard in shards]
                for line in chain.from_iterable(zip(*files, strict=True)):
                    record = json.loads(line)
                    yield torch.tensor(record["pixels"]).div_(16), record["digit"]


def write_shards(folder: Path) -> None:
    """scikit-learn's handwritten digits as JSON lines, in shards by turns."""
    # Imported late: only the process that writes the files pays for scikit-learn.
    from sklearn.datasets import load_digits

    digits = load_digits()
    records = zip(digits.data[:RECORDS].tolist(), digits.target[:RECORDS].tolist(), strict=True)
    lines = [json.dumps({"pixels": pixels, "digit": digit}) for pixels, digit in records]
    for shard in range(SHARDS):
        text = "".join(f"{line}\n" for line in lines[shard::SHARDS])
        (folder / f"{shard:02d}.jsonl").write_text(text)


STREAM = Workload(
    "stream",
    "64 records of an iterable dataset: JSON lines (digits, 64 pixels), shards by worker",
    lambda folder: Load(DigitStream(folder), batch_size=64, reads_files=True),
    write_shards,
)
