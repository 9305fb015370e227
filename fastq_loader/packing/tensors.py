"""Helpers for the tensors of a batch of any structure: finding, cloning and moving them.

Runs in the consumer; owns no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastq_loader.packing import pickling


def moved(value: Any, device: torch.device) -> Any:
    """A tensor that is not a leaf (sparse, of a subclass, …), on the device; other objects unchanged."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    return _like(value, lambda tensor: tensor.to(device, non_blocking=True))


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in new memory, which is not page-locked."""
    return _like(tensor, torch.clone)


def _like(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply `make` to a tensor. A non-leaf of an autograd graph (without workers) stays in its graph."""
    if not tensor.is_leaf:
        return make(tensor)
    return make(tensor.detach()).requires_grad_(tensor.requires_grad)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The strided tensors in a tree of containers and of objects with attributes."""
    found: list[torch.Tensor] = []
    todo: list[Any] = [value]
    seen: dict[int, Any] = {}  # keeps the parts alive, so that no id is reused
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, torch.Tensor):
            if not part.is_nested and part.layout is torch.strided:
                found.append(part)
            else:
                todo += _parts_of_tensor(part)
        else:
            todo += [inner for _, _, inner in pickling.parts_of(part)]
    return found


def _parts_of_tensor(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.jagged:
        return [tensor.values(), tensor.offsets()]  # type: ignore[attr-defined]
    if tensor.is_nested:
        return list(tensor.unbind())
    return [getattr(tensor, name)() for name in _SPARSE_PARTS.get(tensor.layout, ())]


#: The methods that return the strided tensors inside a sparse one.
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
