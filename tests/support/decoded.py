"""Datasets that decode and augment, with and without a cache: the same samples, whoever loads them."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fastq_loader import cached


class Decoded(Dataset[Any]):
    """Sample k is decoded from k alone, and augmented by random numbers.

    Args:
        length: samples.
        options: of `cached`; None: without.
        deaths: the folder in which a sample that kills its worker leaves a mark, and does so no more.
        deadly: such samples.
        broken: samples that cannot be decoded.
    """

    def __init__(
        self,
        length: int,
        options: dict[str, Any] | None,
        deaths: Path | None = None,
        deadly: tuple[int, ...] = (),
        broken: tuple[int, ...] = (),
    ) -> None:
        self.length, self.deaths, self.deadly, self.broken = length, deaths, deadly, broken
        if options is not None:
            self.decode = cached(self.decode, **options)  # type: ignore[method-assign]

    def __len__(self) -> int:
        return self.length

    def decode(self, index: int) -> Any:
        if index in self.broken:
            raise OSError(f"sample {index} cannot be read")
        if (
            index in self.deadly
            and self.deaths is not None
            and not (mark := self.deaths / str(index)).exists()
        ):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        values = np.random.default_rng(index).integers(0, 255, (3, index % 17 + 1), np.uint8)
        return {"values": values, "mean": torch.tensor(float(values.mean())), "name": f"sample {index}"}

    def __getitem__(self, index: int) -> Any:
        sample = self.decode(index)
        sample["values"] = sample["values"].astype(np.float32)[:, :1] + np.random.rand()
        sample["mean"] += torch.rand(())
        sample["name"] += random.choice("ab")
        return sample


def _decode(index: int) -> Any:
    return torch.full((3,), float(index))


#: A cache of a module, which a spawned worker makes anew.
decode_of_module = cached(_decode, limit="1MB")
another_of_module = cached(_decode, limit="1MB")


@partial(cached, limit="1MB")
def decode_decorated(index: int) -> Any:
    return torch.full((2,), float(index))


class OfModule(Dataset[Any]):
    """Reads through the caches of its module, and of its class."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    @partial(cached, limit="1MB")
    def decode(self, index: int) -> Any:
        return torch.full((self.length,), float(index))

    def __getitem__(self, index: int) -> Any:
        return [
            decode_of_module(index),
            another_of_module(index),
            decode_decorated(index),
            self.decode(index),
        ]
