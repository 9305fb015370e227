"""Short epochs in which the user forks at random moments, in the consumer and in workers: what this process
holds stays as it is. More than the tests run:

    python -m tests.support.forking --epochs 2000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader
from tests.conftest import descendants, live_threads, open_descriptors

PAGE = os.sysconf("SC_PAGE_SIZE")


def fork(work: Callable[[], Any]) -> int:
    """A child that does some work and leaves, with 1 if that fails; its process id."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def end_of(pid: int) -> int:
    """The exit code of a child, which is waited for."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Forks(Dataset[torch.Tensor]):
    """Large enough for a block; forks for some of its samples, and waits for the child."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.full((40_000,), float(index))
        if index % 11 == 5:
            end_of(fork(sample.sum))
        return sample


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def held() -> dict[str, int]:
    return {
        "descriptors": len(open_descriptors()),
        "threads": len(live_threads()),
        "children": len(descendants()),
        "resident": resident(),
    }


def run_epochs(epochs: int, seed: int) -> None:
    rng = random.Random(seed)
    children: deque[int] = deque()
    loader: Any = None
    for _ in range(epochs):
        if loader is None or rng.random() < 0.2:
            if loader is not None:
                loader.close()
            loader = DataLoader(
                Forks(12),
                2,
                num_workers=2,
                persistent_workers=rng.random() < 0.7,
                schedule=rng.choice(["round_robin", "dynamic"]),
            )
        stop = rng.choice([2, 6, 6, 6])
        for number, batch in enumerate(loader):
            expected = [2.0 * number, 2.0 * number + 1]
            assert batch[:, 0].tolist() == expected
            if rng.random() < 0.2:
                children.append(fork(batch.sum))
            if number == stop:
                break
        while len(children) > 3:
            end_of(children.popleft())
    while children:
        end_of(children.popleft())
    if loader is not None:
        loader.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Short epochs with forks by the user.")
    parser.add_argument("--epochs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    run_epochs(given.epochs // 5, given.seed)  # what is made once is there after these
    before = held()
    run_epochs(given.epochs - given.epochs // 5, given.seed + 1)
    print(json.dumps({"before": before, "after": held()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
