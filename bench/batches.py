"""What is in a batch: its leaves, their bytes, and whether two batches are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

PAGE = 4096


def leaves(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a batch that is no dict, list or tuple, each with its place (`[1]['labels']`)."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for position, value in enumerate(batch):
            yield from leaves(value, f"{path}[{position}]")
    else:
        yield path, batch


def nbytes(batch: Any) -> int:
    """Bytes of the tensors, arrays and strings in a batch; other objects count nothing."""
    total = 0
    for _, leaf in leaves(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)):
            total += leaf.nbytes
        elif isinstance(leaf, (str, bytes)):
            total += len(leaf)
    return total


def touch(batch: Any) -> None:
    """Read one byte of every page of the tensors and arrays in a batch, as a training step would."""
    for _, leaf in leaves(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)):
            flat = torch.as_tensor(leaf).reshape(-1)
            if flat.numel():
                flat.view(torch.uint8)[::PAGE].max()
