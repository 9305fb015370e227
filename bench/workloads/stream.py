"""A stream of records from files, shared out among the workers: an iterable dataset has no indices.

The records are scikit-learn's handwritten digits, written as JSON lines into shards in turn. A worker reads
the shards whose number is its own modulo the number of workers, a record from each in turn: record k comes
from worker k modulo the number of workers, for every number that divides the shards'.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from bench.workloads import Load, Workload

SHARDS = 48  # divided by 1, 2, 3, 4, 6, 8, 12 and 16 workers
RECORDS = 1776  # of 1,797: 37 in each shard
BRIGHTEST = 16
BATCH = 64
PASSES = 256  # over the records: an epoch is 7,104 batches


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
                    yield torch.tensor(record["pixels"]).div_(BRIGHTEST), record["digit"]


class Stream(Workload):
    name = "stream"
    description = "64 records of an iterable dataset: JSON lines (digits, 64 pixels), shards by worker"

    def prepare(self, folder: Path) -> None:
        # Imported late: only the process that writes the files pays for scikit-learn.
        from sklearn.datasets import load_digits

        digits = load_digits()
        lines = [
            json.dumps({"pixels": pixels.tolist(), "digit": int(digit)})
            for pixels, digit in zip(digits.data[:RECORDS], digits.target[:RECORDS], strict=True)
        ]
        (folder / self.name).mkdir()
        for shard in range(SHARDS):
            path = folder / self.name / f"{shard:02d}.jsonl"
            path.write_text("".join(f"{line}\n" for line in lines[shard::SHARDS]))

    def build(self, folder: Path) -> Load:
        return Load(DigitStream(folder / self.name), batch_size=BATCH)
