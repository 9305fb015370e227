"""torch's default collate, with a shorter path through the samples and results in shared memory.

`default` returns what torch's `default_collate` returns. It runs in workers, and in the consumer with
num_workers=0, and changes nothing in torch. torch checks every tuple and dict against abstract classes, and
compares all lengths in a generator: for 64 samples of two fields these are 70 Python calls, more than
everything else that a loader without workers does for them. It also examines each number and converts each
array one by one. A user's entries in torch's table are called as torch calls them.

`install` is for workers: it replaces the functions that stack tensors, arrays and Python numbers in torch's
table of collate functions (`default_collate_fn_map`), also for a user's calls of `default_collate`. torch's
own allocate a new shared-memory segment for every tensor. Ours stack into a recycled block, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from fastq_loader.memory import allocator, nontemporal
from fastq_loader.memory.allocator import TYPESTR, Allocator, out_tensor
from fastq_loader.memory.blocks import SMALLEST
from fastq_loader.memory.nontemporal import address_of
from fastq_loader.system.torch_names import collate as torch_collate
from fastq_loader.system.torch_names import is_under_mode
from fastq_loader.system.torch_names import worker as torch_worker

Collate = Callable[..., torch.Tensor]

torch_tensors = torch_collate.collate_tensor_fn
#: torch's `default_collate`; None if a library replaced it before this module was imported.
DEFAULT: Any = torch_collate.default_collate


def default(batch: Any, table: Any = None) -> Any:
    """Collate as torch's `default_collate` does; raises what that raises. Samples other than plain tuples,
    lists and dicts are passed to torch's own `collate` (torch/utils/data/_utils/collate.py).

    Args:
        batch: the samples.
        table: torch's table of collate functions; None at the beginning.
    """
    if table is None:
        table = torch_collate.default_collate_fn_map
        if type(table) is not dict:
            return _torchs(batch, table)
    first = batch[0]
    kind = type(first)
    if kind in table:
        stack = table[kind]
        if kind in STACKERS and stack is STACKERS[kind][0]:
            stack = STACKERS[kind][1]
        return stack(batch, collate_fn_map=table)
    if kind in _CONTAINERS and type(batch) in _SEQUENCES and not isinstance(first, tuple(table)):
        if kind is dict:
            return _collate_dicts(batch, table)
        return _collate_sequences(batch, kind, table)
    return _torchs(batch, table)


def _collate_sequences(batch: Any, kind: type, table: dict[Any, Any]) -> Any:
    alike = kind is tuple or set(map(type, batch)) == {kind}  # torch looks at the first tuple only
    if not alike or len(set(map(len, batch))) > 1:
        return _torchs(batch, table)
    fields = list(zip(*batch, strict=False))
    try:
        return [default(samples, table) for samples in fields]
    except TypeError:  # like torch, which tries again without a copy of the first list
        if kind is tuple:
            raise
        return [_torchs(samples, table) for samples in fields]


def _collate_dicts(batch: Any, table: dict[Any, Any]) -> Any:
    try:
        return {key: default([sample[key] for sample in batch], table) for key in batch[0]}
    except TypeError:  # like torch, which tries again without a copy of the first sample
        return {key: _torchs([sample[key] for sample in batch], table) for key in batch[0]}


def _torchs(batch: Any, table: dict[Any, Any]) -> Any:
    return torch_collate.collate(batch, collate_fn_map=table)


_SEQUENCES = frozenset((tuple, list))
_CONTAINERS = _SEQUENCES | {dict}


def stack_tensors(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack tensors of one shape along a new first dimension; in a worker in a block, if the result is large
    enough.

    Args:
        batch: at least one tensor.
        collate_fn_map: part of torch's interface for collate functions; unused.

    Raises:
        RuntimeError: the shapes differ; the message is torch's.
    """
    first = batch[0]
    if type(first) is not torch.Tensor or first.is_nested or first.layout is not torch.strided:
        return torch_tensors(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
    blocks = allocator.current
    if blocks is None and torch_worker._worker_info is not None:  # torch's own worker
        return torch_tensors(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
    if blocks is None or first.device.type != "cpu" or first.is_quantized or first.requires_grad:
        return torch.stack(batch, 0)
    shape = (len(batch), *first.shape)
    out = out_tensor(shape, first.dtype) if first.nbytes * len(batch) >= SMALLEST else None
    if out is None:
        stacked = torch.stack(batch, 0)
        if stacked.dtype is first.dtype and stacked.is_contiguous():
            return stacked
        # torch's worker stacks into a contiguous tensor of the first sample's dtype, regardless of the
        # dtypes of the others and of the samples' memory order.
        out = torch.empty(shape, dtype=first.dtype)
    elif _bypasses_caches(blocks, batch):
        nontemporal.copy(out.data_ptr(), list(map(torch.Tensor.data_ptr, batch)), first.nbytes)
        return out
    return torch.stack(batch, 0, out=out)


def _bypasses_caches(blocks: Allocator, batch: Any) -> bool:
    """Whether the tensors are better stacked with non-temporal stores, and their memory equals, byte for
    byte, what stacking would write for each."""
    first, tensor = batch[0], torch.Tensor
    return (
        blocks.is_nontemporal(first.nbytes)
        and set(map(type, batch)) == {tensor}
        and not any(map(_NESTED, batch))
        and set(map(_LOOKS, batch)) == {(first.dtype, first.shape, torch.strided, True, False)}
        and all(map(tensor.is_contiguous, batch))
        and not any(map(tensor.is_neg, batch))
        and not (first.is_complex() and any(map(tensor.is_conj, batch)))
    )


_NESTED, _LOOKS = attrgetter("is_nested"), attrgetter("dtype", "shape", "layout", "is_cpu", "requires_grad")


def stack_arrays(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack numpy arrays into one tensor. torch converts every array to a tensor first; in a worker, arrays
    of one dtype and shape are stacked in one pass.

    Args:
        batch: at least one array.
        collate_fn_map: the table in use.

    Raises:
        TypeError, RuntimeError: strings and objects, or different shapes; the messages are torch's.
    """
    first = batch[0]
    plain = first.dtype.str in _TORCH_TYPES and set(map(type, batch)) == {np.ndarray}
    if not plain or is_under_mode():  # such as another default device
        return torch_arrays(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
    alike = first.size > 0 and set(map(_KIND, batch)) == {(first.dtype, first.shape)}
    of_tensors = None if collate_fn_map is None else collate_fn_map.get(torch.Tensor)
    blocks = allocator.current
    if not alike or blocks is None or of_tensors is not stack_tensors:
        return default(list(map(torch.from_numpy, batch)), collate_fn_map)  # type: ignore[no-any-return]
    shape = (len(batch), *first.shape)
    out = blocks.empty_array(shape, first.dtype.str, len(batch) * first.nbytes)
    if out is None:
        out = np.empty(shape, first.dtype)
    if blocks.is_nontemporal(first.nbytes) and all(map(_CONTIGUOUS, batch)):
        nontemporal.copy(address_of(out), list(map(address_of, batch)), first.nbytes)
    elif first.ndim:  # the same bytes as np.stack, which first creates a view of every array
        np.concatenate(batch, out=out.reshape(-1, *first.shape[1:]))
    else:
        np.stack(batch, out=out)
    return torch.from_numpy(out)


_KIND, _CONTIGUOUS = attrgetter("dtype", "shape"), attrgetter("flags.c_contiguous")


def _stack_numbers(torchs_own: Collate) -> Collate:
    """Stacks Python bools, ints or floats. torch's own examines each several times to find the dtype."""

    def stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        dtype = _NUMBERS.get(frozenset(map(type, batch)))
        try:
            if dtype is not None and not is_under_mode():
                # Unlike the memory of an array, that of a copy can grow.
                return torch.asarray(np.array(batch, dtype), copy=True)
        except OverflowError:
            dtype = None  # an int of more than 64 bits: torch has an error for it
        return torchs_own(batch)

    return stack


#: Dtypes that torch chooses for lists of one of these types; mixed lists are left to torch.
_NUMBERS: dict[frozenset[type], Any] = {
    frozenset({kind}): dtype for kind, dtype in ((bool, np.bool_), (int, np.int64), (float, np.float64))
}
_TORCH_TYPES = frozenset(TYPESTR.values())

torch_ints, torch_floats = torch_collate.collate_int_fn, torch_collate.collate_float_fn
torch_arrays = torch_collate.collate_numpy_array_fn
#: torch's own functions, and ours in their place.
STACKERS: dict[type, tuple[Any, Any]] = {
    torch.Tensor: (torch_tensors, stack_tensors),
    np.ndarray: (torch_arrays, stack_arrays),
    int: (torch_ints, _stack_numbers(torch_ints)),
    float: (torch_floats, _stack_numbers(torch_floats)),
}


def install() -> None:
    """Make torch's default collate in this process stack into blocks; entries set by the user stay."""
    table = torch_collate.default_collate_fn_map
    for kind, (torchs_own, ours) in STACKERS.items():
        if table.get(kind) is torchs_own:
            table[kind] = ours
