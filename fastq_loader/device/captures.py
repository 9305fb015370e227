"""CUDA graphs that other threads capture while a loader makes its calls.

Runs in the consumer. While any thread captures a graph with `capture_error_mode="global"`, torch's default,
CUDA forbids event queries, allocations and page-locking in every thread of the default mode: the call fails,
and the capture with it. No call of ours takes part in a capture, so they are made in the relaxed mode.

torch has no Python function for this. It is looked up in the libcudart that torch has loaded: a look-up in
torch's extension module includes the libraries that it depends on. Where libcudart is part of another library
(static linking), or is missing, nothing changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from fastq_loader.system.torch_names import extension

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


@cache
def runtime_function(name: str) -> Callable[..., Any] | None:
    """A function of the CUDA runtime that torch has loaded; None if it cannot be found."""
    try:
        function: Callable[..., Any] = getattr(ctypes.CDLL(extension), name)
        return function
    except (AttributeError, OSError):
        return None


@contextmanager
def relaxed() -> Iterator[None]:
    """In the block, calls of this thread neither fail because of a capture in another one, nor break it."""
    exchange = runtime_function("cudaThreadExchangeStreamCaptureMode") or (lambda mode: None)
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # from here on `mode` is the one before
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
