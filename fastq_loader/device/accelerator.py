"""The argument `device`, and the calls to torch's API for accelerators.

Runs in the consumer, on the thread that calls `next()`. The device is initialised when the first epoch
begins, after its workers were started, so that forked workers inherit nothing of it. Neither an import nor
the options touch an accelerator; in a CPU build of torch its streams and events raise.

Every accelerator is used through the API that torch has for all of them: `torch.Stream`, `torch.Event` and
`torch.accelerator`. Only CUDA has more: page-locking in place, events that let a thread sleep, and a count
of the devices without the runtime.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastq_loader.errors import PinFailed, is_int
from fastq_loader.memory.blocks import device_aligned
from fastq_loader.packing.tensors import tensors_of
from fastq_loader.system import torch_names
from fastq_loader.system.unpatched import time

_NVIDIA = Path("/proc/driver/nvidia/gpus")  # one entry for each of the driver's GPUs
_PROBE_BYTES = 64 * 1024
_STREAMS = ("consumer", "side")


@dataclass(frozen=True)
class ToDevice:
    """Batches arrive on a device; `device="cuda"` is short for `ToDevice("cuda")`.

    The iterator of such a loader has two more methods. `poll()` begins the copies of batches that have become
    ready since the last `next()`, for loops whose steps take long. `copy_into(static_batch)` takes the next
    batch and copies it into the tensors of a captured step; see `copy_into`.

    Args:
        device: torch's accelerator ("cuda", "cuda:1", "xpu", a torch.device), of any kind, used through
            `torch.Stream` and `torch.Event`. "cpu" leaves batches on the host, and applies `transform` there.
            The device is initialised after the workers of the first epoch were started. `pin_memory` is not
            needed with it: the memory that copies read is page-locked where that works, else there is a
            `PinFallback` warning; `statistics()` shows which, and the reason.
        prefetch: number of batches copied ahead of `next()`, at least 1.
        transform: applied to every batch on the device, for example `normalize(mean, std)`. If it has a
            method `on_device(device)`, the result of that is applied. `DecodeImages` decodes in a thread,
            `prefetch` batches ahead, if the loader has workers.
        transform_stream: "consumer" applies it on the stream that is current in `next()`; "side" applies it
            on the stream of the copies, during the previous step. Both call it in the order of the batches.
            If an epoch is broken off, "side" has also called it for some batches that are never delivered,
            depending on how many were ready.

    Attributes:
        target: the accelerator; None if batches stay on the host.

    Raises:
        ValueError, TypeError: an argument is invalid, or the device unknown or absent; the text names the
            argument, its value and the allowed ones.

    >>> list(DataLoader(range(4), 2, device=ToDevice("cpu", transform=lambda batch: -batch)))
    [tensor([ 0, -1]), tensor([-2, -3])]
    >>> ToDevice("cpu", prefetch=0)
    Traceback (most recent call last):
    ValueError: ToDevice('cpu', prefetch=0): it must be a number of batches, at least 1
    """

    device: str | int | torch.device
    prefetch: int = 2
    transform: Callable[[Any], Any] | None = None
    transform_stream: str = "consumer"
    target: torch.device | None = field(init=False, repr=False, compare=False)
    _applied: Callable[[Any], Any] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.device is None:
            raise TypeError("ToDevice(None): name a device; 'cpu' leaves batches on the host")
        target = parse(self.device)
        object.__setattr__(self, "target", target)
        ahead, transform = self.prefetch, self.transform
        self._must("transform_stream", self.transform_stream in _STREAMS, "use 'consumer' or 'side'")
        self._must("prefetch", is_int(ahead) and ahead >= 1, "it must be a number of batches, at least 1")
        is_function = transform is None or callable(transform)
        self._must("transform", is_function, "it must be a function of a batch, or None", TypeError)
        adapt = None if target is None else getattr(transform, "on_device", None)
        object.__setattr__(self, "_applied", transform if adapt is None else adapt(target))

    def _must(self, name: str, holds: bool, text: str, error: type[Exception] = ValueError) -> None:
        if not holds:
            raise error(f"ToDevice({self.device!r}, {name}={getattr(self, name)!r}): {text}")

    def apply_transform(self, batch: Any) -> Any:
        """Apply the user's transform to a batch, on the current stream; see `called`. @private"""
        return batch if self._applied is None else called(self._applied, batch)

    def start_ahead(self) -> Any:
        """Begin to transform in a thread, for one pool of workers; None if the transform runs on the thread
        that calls `next()`. @private

        The result's `begin(batch)` begins to transform a batch, whose tensors have not arrived on the device
        yet. It returns a function that waits, and returns the result for the current stream; if it is
        dropped, so is the batch. `close()` ends the thread.
        """
        start = getattr(self._applied, "start_ahead", None)
        return None if start is None else start()


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a transform.

    Raises:
        RuntimeError: it raised StopIteration, which out of `next()` would end the epoch silently.
        Exception: any other error of the transform.
    """
    try:
        return function(*arguments)
    except StopIteration as stopped:
        raise RuntimeError(f"the transform raised StopIteration: {stopped}") from stopped


def read_device(device: Any) -> ToDevice | None:
    """Read and check the argument `device=`; None if batches stay on the host as they are.

    Raises:
        ValueError, TypeError: it is not a device, or the device is unknown or absent.
    """
    return device if device is None or isinstance(device, ToDevice) else ToDevice(device)


def parse(device: Any) -> torch.device | None:
    """The accelerator that `device` names; None for the host ("cpu"). Initialises nothing.

    Raises:
        TypeError: `device` is not a device.
        ValueError: it is unknown, absent, or not the accelerator of this build of torch.
    """
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise TypeError(f"device={device!r} must be a string such as 'cuda:0', a torch.device, or None")
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is unknown: {error}") from error
    if parsed.type == "cpu":
        return None
    reason = _absence(parsed)
    if reason:
        raise ValueError(
            f"device={device!r} cannot be used: {reason}; device='cpu' leaves batches on the host"
        )
    return parsed


def _absence(device: torch.device) -> str:
    accelerator = torch.accelerator.current_accelerator()  # opens nothing; a build of torch has at most one
    if accelerator is None or accelerator.type != device.type:
        return f"the accelerator of torch {torch.__version__} here is {accelerator or 'none'}"
    try:
        count = device_count(device.type)
    except (AttributeError, RuntimeError) as error:  # the backend provides the module torch.<kind>
        return f"torch cannot count the {device.type} devices: {error}"
    if not count:
        return f"no {device.type} device is there"
    if device.index is not None and device.index >= count:
        return f"there are {count} {device.type} devices, and they are counted from 0"
    # The allocator keeps memory until a second stream has read it only where this was recorded.
    key = torch_names.dispatch_key_for_device(device.type)
    if not torch_names.has_kernel_for_dispatch_key("aten::record_stream", key):
        return f"{device.type} tensors have no record_stream, which protects memory that a copy still uses"
    return ""


def device_count(kind: str) -> int:
    """Number of devices of a kind. For NVIDIA's, /proc is read where the driver fills it, because the
    runtime's own count opens descriptors that forked workers would inherit. Like CUDA, it counts the visible
    devices up to the first one that does not exist."""
    if kind != "cuda":
        return torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    asleep = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if asleep and not torch.version.hip and _NVIDIA.is_dir():
        count, shown = len(os.listdir(_NVIDIA)), list[Any](torch_names.parse_visible_devices())
        return min(count, len([*takewhile(lambda each: isinstance(each, str) or each < count, shown)]))
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class TorchBackend:
    """An accelerator behind torch's stream API. Every call returns at once, except `synchronize`.

    Memory is a uint8 tensor. Streams are `torch.Stream`, which are equal if device and number are equal. A
    `torch.cuda.Stream` never equals one of them, so all streams that are compared come from here.

    Args:
        device: torch's accelerator, with or without an index; without one it is the current device.

    Attributes:
        device: the device, with its index.
        side: the stream of all copies, one for the lifetime of the backend, because a new one for each epoch
            would strand the memory that was cached for the old one.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, device: torch.device) -> None:
        # This comes first: it initialises the device as torch does, which creating a stream does not.
        self.device = torch.accelerator.current_stream(device).device
        self.side: Any = torch.Stream(device=self.device)

    def current_stream(self) -> Any:
        """The stream on which the consumer queues its work now."""
        return torch.accelerator.current_stream(self.device)

    def capturing(self) -> bool:
        """Whether the current stream is captured into a graph; events cannot be queried then."""
        if self.device.type == "cuda":
            return torch.cuda.is_current_stream_capturing()
        # In torch 2.8 streams of other devices lack the method; only CUDA has graphs there.
        return bool(getattr(self.current_stream(), "is_capturing", bool)())

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory that work queued on the current stream from here on may use."""
        # Rounded up, so that it can be viewed as any dtype.
        return torch.empty(device_aligned(max(nbytes, 1)), dtype=torch.uint8, device=self.device)

    def copy_async(self, memory: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
        """Queue a copy of the first `nbytes` from host memory, on the side stream."""
        with self.side:
            memory[:nbytes].copy_(source[:nbytes], non_blocking=True)

    def record(self, stream: Any) -> Any:
        """Return an event that is over when all work queued on `stream` so far has run."""
        # It lets this thread sleep in `synchronize`, where there is a choice. On CUDA a `torch.Event` takes
        # the argument and spins (c10/cuda/impl/CUDAGuardImpl.h, torch 2.8 to 2.13).
        event: Any
        if self.device.type == "cuda":
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        else:
            event = torch.Event(device=self.device, blocking=True)
        event.record(self._own(stream))
        return event

    def _own(self, stream: Any) -> Any:
        """Convert a stream for the events of `record`: before torch 2.13, an event of CUDA reads any argument
        as a stream of CUDA, unchecked."""
        if self.device.type != "cuda":
            return stream
        return torch.cuda.Stream(  # type: ignore[no-untyped-call]
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def wait(self, stream: Any, event: Any) -> None:
        """Make all work that is queued on `stream` from here on wait for the event."""
        event.wait(self._own(stream))

    def query(self, event: Any) -> bool:
        """Whether an event is over."""
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        """Block until an event is over."""
        event.synchronize()

    def share(self, memory: Any, stream: Any) -> None:
        """Note that `memory`, or every part of a batch, is read on `stream` too: when its last owner releases
        it, it is not allocated again before the work queued on `stream` by then has run."""
        there = [tensor for tensor in tensors_of(memory) if tensor.device == self.device]
        for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in there}.values():
            tensor.record_stream(stream)

    def on_side(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`; its device work is queued on the side stream."""
        with self.side:
            return call()

    # ---- host memory --------------------------------------------------------------------------

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        """Wrap existing host memory for `copy_async`."""
        # The view does not own the memory: the pool keeps it until its copies have run.
        interface = {"version": 3, "data": (address, False), "shape": (nbytes,), "typestr": "|u1"}
        return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=interface)))

    def fill(self, memory: torch.Tensor, start: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` from an address to host memory, from `start` on, synchronously."""
        ctypes.memmove(memory.data_ptr() + start, address, nbytes)  # by one thread, see `page_lock`

    def pageable(self, nbytes: int) -> torch.Tensor:
        """Allocate ordinary host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # even if torch's default device differs

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked host memory.

        Raises:
            PinFailed: the device's driver refused.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            self._clear_error()
            raise PinFailed(f"torch could not page-lock {nbytes} bytes: {error}") from error

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory in place.

        Raises:
            PinFailed: the device's driver refused; nothing is left behind.
        """
        runtime = self._runtime()
        with torch.cuda.device(self.device):
            code = int(runtime.cudaHostRegister(address, nbytes, 1))  # 1: for every context of the process
        if code:
            self._clear_error()
            raise PinFailed(f"cudaHostRegister of {nbytes} bytes failed with error {code}")

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        with torch.cuda.device(self.device):
            code = int(self._runtime().cudaHostUnregister(address))
        if code:
            self._clear_error()

    def _runtime(self) -> Any:
        if self.device.type != "cuda":
            raise PinFailed(f"torch.{self.device.type} cannot page-lock memory that is there already")
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def _clear_error(self) -> None:
        """Clear the error of a failed call, which CUDA stores and raises at the next kernel launch (seen in
        vLLM, issue 51081)."""
        with suppress(RuntimeError), self.side:
            torch.zeros(1, device=self.device)

    def prove(self) -> None:
        """Send a pattern there and back through registered memory: on some systems (WSL2), copies from it
        were observed to do nothing, without an error.

        Raises:
            PinFailed: the memory cannot be registered, or the pattern comes back changed.
        """
        host = torch.frombuffer(mmap.mmap(-1, _PROBE_BYTES), dtype=torch.uint8)  # shared, like the arena
        address = host.data_ptr()
        host.copy_(torch.arange(_PROBE_BYTES, device="cpu") * 31 % 251)
        self.register(address, _PROBE_BYTES)
        try:
            there = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=self.device)
            self.wait(self.side, self.record(self.current_stream()))
            self.copy_async(there, host, _PROBE_BYTES)
            self.synchronize(self.record(self.side))
            back = there.cpu()
        finally:
            self.unregister(address)
        if not torch.equal(back, host):
            raise PinFailed("a copy from registered memory arrived with other bytes")
