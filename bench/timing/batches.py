"""What is in a batch: its leaves, their bytes, and whether two batches are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray))


def nbytes(batch: Any) -> int:
    """Bytes of the tensors, arrays and strings in a batch; other objects count nothing."""
    return sum(
        leaf.nbytes if is_array(leaf) else len(leaf) if isinstance(leaf, (str, bytes)) else 0
        for leaf in tree_leaves(batch)
    )


def compare(batch: Any, expected: Any, *, values: bool = True) -> tuple[list[str], list[str]]:
    """How a batch differs from the one it should be, in words: another batch, or another type only.

    Without `values` only structure, shapes and dtypes are compared.
    """
    own, other = (
        {keystr(path): leaf for path, leaf in tree_flatten_with_path(each)[0]} for each in (batch, expected)
    )
    if own.keys() != other.keys():
        return [f"batch has other leaves: {_some(own.keys() ^ other.keys())}"], []
    pairs = [(f"batch{place}", own[place], leaf) for place, leaf in other.items()]
    wrong = [said for place, leaf, wanted in pairs if (said := _difference(place, leaf, wanted, values))]
    types = [
        f"{place} is {type(leaf).__name__}, not {type(wanted).__name__}"
        for place, leaf, wanted in [("batch", batch, expected), *pairs]
        if type(leaf) is not type(wanted)
    ]
    return wrong, list(dict.fromkeys(types))  # a batch of one leaf is that leaf


def _difference(place: str, leaf: Any, wanted: Any, values: bool) -> str | None:
    if not is_array(wanted):
        return f"{place} has other values" if values and leaf != wanted else None
    if not is_array(leaf):
        return f"{place} is no array"
    tensor, expected = torch.as_tensor(leaf), torch.as_tensor(wanted)
    if tensor.shape != expected.shape:
        return f"{place} has shape {tuple(tensor.shape)}, not {tuple(expected.shape)}"
    if tensor.dtype != expected.dtype:
        return f"{place} has dtype {tensor.dtype}, not {expected.dtype}"
    return f"{place} has other values" if values and not torch.equal(tensor, expected) else None


def _some(places: set[str]) -> str:
    return ", ".join(sorted(places)[:3])
