"""`pin_memory=True`: a batch, copied into page-locked memory by one thread.

Runs in the consumer, on the thread that calls `next()`. Owns no state: the memory comes from torch's
allocator of page-locked memory, because it alone knows when the copies to the device that the user queued are
over.
"""

from __future__ import annotations

import ctypes
from functools import cache
from types import FunctionType
from typing import Any

import torch

from fastq_loader.system.torch_names import pin_memory


def page_locked(batch: Any, device: str | None = None) -> Any:
    """The batch in page-locked memory, as torch's `pin_memory` returns it: the same containers, types and
    strides. A tensor that is page-locked already is not copied.

    Plain tensors are copied by one thread, without the GIL. `torch.Tensor.pin_memory` copies with all threads
    of torch, which then wait actively beside the workers: 540 kB cost 319 us of CPU with 16 threads and 19 us
    with one (H100, torch 2.11). torch sets one thread in its own pin thread for that reason (pytorch#25010).

    Raises:
        RuntimeError: page-locked memory cannot be allocated.
    """
    if type(batch) is torch.Tensor:
        return batch if batch.is_pinned() else _copied(batch)
    return _by_torchs_rules()(batch, device)


@cache
def _by_torchs_rules() -> FunctionType:
    """torch's `pin_memory`, which calls `page_locked` for the members of a container: torch has many rules
    for these, which differ between its releases."""
    names = {**pin_memory.__globals__, "pin_memory": page_locked}
    return FunctionType(pin_memory.__code__, names, None, pin_memory.__defaults__, pin_memory.__closure__)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    bytes_are_all = tensor.is_cpu and tensor.layout is torch.strided and not tensor.requires_grad
    if bytes_are_all and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg()):
        copy = torch.empty_like(tensor, pin_memory=True)
        if copy.stride() == tensor.stride():  # then the elements are one piece of memory, without gaps
            ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)  # releases the GIL
            return copy
    return tensor.pin_memory()
