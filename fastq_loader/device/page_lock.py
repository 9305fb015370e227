"""`pin_memory=True`: a batch, copied into page-locked memory by one thread.

Runs in the consumer, on the thread that calls `next()`. Owns no state: the memory comes from torch's
allocator of page-locked memory, because it alone knows when the copies to the device that the user queued are
over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from fastq_loader.device.captures import relaxed
from fastq_loader.system.torch_names import pin_memory

#: `torch.empty_like`, or what replaces it in a test.
Allocate = Callable[..., torch.Tensor]
#: Containers, and what torch makes of them: older releases make a list of a tuple.
_SEQUENCES: dict[type, type] = {list: list, tuple: type(pin_memory(()))}


def page_locked(batch: Any, device: str | None, allocate: Allocate = torch.empty_like) -> Any:
    """The batch in page-locked memory, as torch's `pin_memory` returns it: the same containers, types and
    strides. A tensor that is page-locked already is not copied.

    Plain tensors are copied by one thread, without the GIL. `torch.Tensor.pin_memory` copies with all threads
    of torch, which then wait actively beside the workers: 540 kB cost 319 us of CPU with 16 threads and 19 us
    with one (H100, torch 2.11). torch sets one thread in its own pin thread for that reason (pytorch#25010).

    Raises:
        RuntimeError: page-locked memory cannot be allocated.
    """
    kind = type(batch)
    if kind is torch.Tensor:
        return batch if batch.is_pinned() else _copied(batch, allocate)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([page_locked(part, device, allocate) for part in batch])
    if kind is dict:
        return {key: page_locked(part, device, allocate) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields") and not hasattr(batch, "pin_memory"):
        return kind(*(page_locked(part, device, allocate) for part in batch))
    return pin_memory(batch, device)  # rare types, by torch's own rules


def _copied(tensor: torch.Tensor, allocate: Allocate) -> torch.Tensor:
    bytes_are_all = tensor.is_cpu and tensor.layout is torch.strided and not tensor.requires_grad
    if bytes_are_all and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg()):
        with relaxed():
            copy = allocate(tensor, pin_memory=True)
        if copy.stride() == tensor.stride():  # then the elements are one piece of memory, without gaps
            ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)  # releases the GIL
            return copy
    return tensor.pin_memory()
