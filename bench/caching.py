"""`python -m bench.caching`: epochs of decoded samples with `cached`, beside what users of torch do today.

Each contender reads the same files with two workers and the same augmentation, which is never cached. They
take turns, and each block is three epochs with new workers in a fresh process: the first epoch fills a
cache, the others are hit. Prints medians of the rounds, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

import fastq_loader
from bench.workloads.files import write_tensors
from bench.workloads.jpeg import CROP, write_photographs
from fastq_loader import cached
from fastq_loader.system.pages import proportional

EPOCHS = 3
COPIES = 8  # samples of each file, so that an epoch takes seconds; each is decoded and kept for itself
SMALL = 150_000  # bytes of the value whose hit is timed
FORK = multiprocessing.get_context("fork")


class Files(Dataset[Tensor]):
    """`files[i]` is what `decode` reads, augmented."""

    decode: Callable[[int], Any]
    augment: Callable[[Any], Tensor]

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(map(str, folder.iterdir())) * COPIES

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        return self.augment(self.decode(index))


class Volumes(Files):
    """float32[32, 32, 32] by torch.load; flipped."""

    def decode(self, which: int) -> Tensor:
        volume: Tensor = torch.load(self.paths[which], weights_only=True)
        return volume

    def augment(self, value: Tensor) -> Tensor:
        return value.flip(0) if torch.rand(()) < 0.5 else value


class Photographs(Files):
    """uint8[3, 224, 224] of a JPEG file by pillow; a random crop, flipped."""

    def decode(self, which: int) -> Any:
        with Image.open(self.paths[which]) as file:
            return np.array(file.convert("RGB"))

    def augment(self, value: Any) -> Tensor:
        top, left = (int(torch.randint(side - CROP + 1, ())) for side in value.shape[:2])
        pixels = value[top : top + CROP, left : left + CROP]
        pixels = pixels[:, ::-1] if torch.rand(()) < 0.5 else pixels
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def filled(decode: Callable[[int], Any], count: int) -> Callable[[int], Any]:
    """Decode from a dict that is filled now, before workers are forked."""
    return {which: decode(which) for which in range(count)}.__getitem__


CONTENDERS = "torch", "lru_cache in each worker", "a dict, filled before", "fastq_loader", "cached", "half"


def run(kind: type[Files], folder: Path, contender: str, workers: int, path: str | None) -> Any:
    """Seconds of each epoch, in this process; and megabytes of it and its workers after the last one."""
    torch.manual_seed(0)
    dataset: Any = kind(folder)
    count, begun = len(dataset), time.perf_counter()
    if contender.startswith("lru"):
        dataset.decode = functools.lru_cache(None)(dataset.decode)
    elif contender.startswith("a dict"):
        dataset.decode = filled(dataset.decode, count)
    elif contender in ("cached", "half"):
        nbytes = sum(np.asarray(dataset.decode(which)).nbytes + 4096 for which in range(count))
        begun = time.perf_counter()
        dataset.decode = cached(dataset.decode, limit=nbytes // (2 if contender == "half" else 1), path=path)
    loader_class: Any = fastq_loader.DataLoader if contender in CONTENDERS[3:] else TorchLoader
    loader = loader_class(dataset, 32, shuffle=True, num_workers=workers, persistent_workers=True)
    seconds, held = [], 0.0
    for _ in range(EPOCHS):
        for batch in loader:
            assert len(batch)
        held = proportional(os.getpid()) / 1e6
        seconds.append(time.perf_counter() - begun)
        begun = time.perf_counter()
    return seconds, held


def apart(*arguments: Any) -> Any:
    """What `run` returns, in a fresh process."""
    receiver, sender = FORK.Pipe(duplex=False)

    def child() -> None:
        sender.send(run(*arguments))

    process = FORK.Process(target=child)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def spread(values: list[float], digits: int = 2) -> str:
    """The median, with the lowest and the highest."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def compare(kind: type[Files], write: Callable[[Path], None], rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as kept:
        folder = Path(name)
        write(folder)
        for other in folder.glob("*.json"):
            other.unlink()
        found: dict[str, list[Any]] = {each: [] for each in (*CONTENDERS, "cached, path=, second run")}
        for turn in range(rounds):
            for each in CONTENDERS:
                found[each].append(apart(kind, folder, each, 2, None))
            path = f"{kept}/{turn}"
            apart(kind, folder, "cached", 2, path)
            found["cached, path=, second run"].append(apart(kind, folder, "cached", 2, path))
    print(f"\n{kind.__name__}: {kind.__doc__} {rounds} rounds, 2 workers")
    torchs = [seconds for seconds, _ in found["torch"]]
    for each, runs in found.items():
        line = [f"  {each:28}"]
        for epoch in (0, 1):
            took = [seconds[epoch] for seconds, _ in runs]
            rates = [theirs[epoch] / own for theirs, own in zip(torchs, took, strict=True)]
            line.append(f"epoch {epoch}: {spread(took)} s, {spread(rates)} × torch's;")
        print(*line, spread([held for _, held in runs], 0), "MB")
    pairs = zip(found["fastq_loader"], found["cached"], strict=True)
    print("  first epoch, cached / without:", spread([plain[0][0] / own[0][0] for plain, own in pairs]))


def hits() -> None:
    """Time a hit of 150 KB beside copies of it."""
    values = list(np.random.default_rng(0).integers(0, 255, (100, SMALL), np.uint8))
    into = np.empty_like(values[0])
    read = cached(lambda which: values[which], limit="100MB")

    def timed(call: Callable[[int], Any]) -> float:
        begun = time.perf_counter()
        for which in range(100):
            call(which)
        return (time.perf_counter() - begun) * 1e4

    timed(read)
    turns = [
        (
            timed(read),
            timed(lambda which: values[which].copy()),
            timed(lambda which: np.copyto(into, values[which])),
        )
        for _ in range(41)
    ]
    print(
        f"a hit of {SMALL} bytes: {spread([hit for hit, _, _ in turns], 1)} us; "
        f"{spread([hit / new for hit, new, _ in turns])} × a copy into new memory, "
        f"{spread([hit / warm for hit, _, warm in turns])} × one into memory that is there"
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.caching", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each contender, in turn (default: 5)")
    rounds = parser.parse_args(arguments).rounds
    hits()
    compare(Volumes, write_tensors, rounds)
    compare(Photographs, write_photographs, rounds)


if __name__ == "__main__":
    main(sys.argv[1:])
