"""For scripts that load large batches in little address space; importable, for workers that are spawned."""

from __future__ import annotations

import os
import resource

import torch
import torch.utils.data
from torch.utils.data import Dataset

import fastq_loader

OURS = fastq_loader.DataLoader
BOTH = (torch.utils.data.DataLoader, OURS)


def limited(extra: int) -> None:
    """Leave this process, and those that it starts, `extra` MB of address space beyond what it has now."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (extra << 20), resource.RLIM_INFINITY))


class Big(Dataset):
    """Batches of `mega` MB, each with its number in every page."""

    def __init__(self, mega: int, length: int) -> None:
        self.mega, self.length = mega, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        batch = torch.empty(self.mega << 20, dtype=torch.uint8)
        batch[::4096] = index + 1
        return batch


def right(batch: torch.Tensor, number: int) -> bool:
    return int(batch[0]) == int(batch[-4096]) == number + 1
