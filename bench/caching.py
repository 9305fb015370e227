"""`python -m bench.caching`: epochs of decoded samples with `cached`, beside what users of torch do today.

Each contender reads the same files with two workers and the same augmentation, which is never cached. They
take turns, and each block is three epochs with new workers in a fresh process: the first epoch fills a
cache, the others are hit. Prints medians of the rounds, with the lowest and the highest, and ends with three
sentences.
"""

from __future__ import annotations

import argparse
import functools
import mmap
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
from bench.output.layout import say
from bench.workloads.files import write_tensors
from bench.workloads.jpeg import CROP, write_photographs
from fastq_loader import cached
from fastq_loader.extras.insight.processes import proportional

EPOCHS = 3
COPIES = 8  # samples of each file, so that an epoch takes seconds; each is decoded and kept for itself
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
        seconds.append(time.perf_counter() - begun)
        held = proportional(os.getpid()) / 1e6
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


def compare(kind: type[Files], write: Callable[[Path], None], rounds: int) -> dict[str, str]:
    """Print a line for each contender. How many times as fast `cached` is, by what it is compared to."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as kept:
        folder = Path(name)
        write(folder)
        for other in folder.glob("*.json"):
            other.unlink()
        found: dict[str, list[Any]] = {each: [] for each in (*CONTENDERS, "cached, path=, second run")}
        for turn in range(rounds):
            say(f"{kind.__name__}, round {turn + 1} of {rounds}")
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
    gains = {}
    for base, epoch in (("torch", 1), ("fastq_loader", 0)):
        pairs = zip(found[base], found["cached"], strict=True)
        gains[base] = spread([without[0][epoch] / own[0][epoch] for without, own in pairs])
    print("  first epoch, cached / without:", gains["fastq_loader"])
    return gains


_values: list[Any] = []


def value(which: int) -> Any:
    return _values[which]


def stores_and_hits() -> str:
    """Time storing and hitting values beside copies of them, in CPU time; the last one in short."""
    say("storing and hitting values, in memory and in a path")
    short = ""
    print("\nmedian us of 9 rounds. A store is a first call; a first hit from a path compares the checksum")
    for nbytes, count in ((1_000, 500), (150_000, 200), (5_000_000, 12)):
        _values[:] = np.random.default_rng(0).integers(0, 255, (count, nbytes), np.uint8)
        with tempfile.TemporaryDirectory() as kept:
            for where in ("memory", "path"):
                rows = [times(nbytes, count, f"{kept}/{turn}" * (where == "path")) for turn in range(9)]
                stored, fresh, first, hit, copy = map(statistics.median, zip(*rows, strict=True))
                print(
                    f"{nbytes:>9} bytes, {where:6}: store {stored:.1f} ({stored / fresh:.2f} x a copy into "
                    f"fresh memory), first hit {first:.1f}, hit {hit:.1f} ({hit / copy:.2f} x a copy)"
                )
                short = f"{hit / copy:.1f} times as long as a copy of {nbytes / 1e6:g} MB, from {where}"
    return f"A hit takes {short}."


def times(nbytes: int, count: int, path: str) -> list[float]:
    """CPU microseconds of a store, a copy into fresh memory, a first hit, a hit, and a copy."""
    step = nbytes + 4096
    read = cached(value, limit=2 * count * step, path=path or None)
    fresh = np.frombuffer(mmap.mmap(-1, count * step), np.uint8)

    def write(which: int) -> None:
        fresh[which * step : which * step + nbytes] = _values[which]

    return [timed(call, count) for call in (read, write, read, read, lambda which: _values[which].copy())]


def timed(call: Callable[[int], Any], count: int) -> float:
    """CPU microseconds of a call, over as many."""
    begun = time.thread_time()
    for which in range(count):
        call(which)
    return (time.thread_time() - begun) * 1e6 / count


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.caching", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="of each contender, in turn (default: 5; 0: no epochs)"
    )
    rounds = parser.parse_args(arguments).rounds
    short = [stores_and_hits()]
    if rounds:
        both = compare(Volumes, write_tensors, rounds), compare(Photographs, write_photographs, rounds)
        later, first = (" and ".join(each[other] for each in both) for other in ("torch", "fastq_loader"))
        short += [
            f"With cached the second epoch is {later} times as fast as torch's (tensors and JPEG).",
            f"The first epoch is {first} times as fast as ours without it.",
        ]
    print("\nIn short:", *short)


if __name__ == "__main__":
    main(sys.argv[1:])
