"""The accelerator as torch offers it: its streams, events and page-locking behind the `Stager` protocol.

Runs in the consumer, on the thread that calls `next()`. What initialises the device is done when the first
epoch begins, after its workers were started: forked workers inherit nothing of it. Nothing of torch.cuda is
touched at import; in a CPU build of torch its streams and events raise.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastq_loader.blocks import device_aligned
from fastq_loader.errors import PinFailed
from fastq_loader.tensors import tensors_of

_NVIDIA = Path("/proc/driver/nvidia/gpus")  # one entry for each GPU that the driver knows
_NEEDED = ("Stream", "Event", "current_stream", "stream")
_PROBE_BYTES = 64 * 1024


def parse(device: Any) -> torch.device | None:
    """The accelerator that `device` names, None for no staging (None, "cpu"). Initialises nothing.

    Raises:
        TypeError: `device` is no device.
        ValueError: it is unknown, not there, or torch has no streams for it.
    """
    if device is None:
        return None
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
            f"device={device!r} cannot be used: {reason}; device=None leaves batches on the host"
        )
    return parsed


def _absence(device: torch.device) -> str:
    module = getattr(torch, device.type, None)
    lacking = [name for name in _NEEDED if not hasattr(module, name)]
    if lacking:
        return f"torch.{device.type} has no {' and no '.join(lacking)}, which copies beside a step need"
    if device.type == "cuda" and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} was built without CUDA"
    count = device_count(device.type)
    if not count:
        return f"no {device.type} device is there"
    if device.index is not None and device.index >= count:
        return f"there are {count} {device.type} devices, and they are counted from 0"
    return ""


def device_count(kind: str) -> int:
    """Devices of a kind. For NVIDIA's, /proc is read where the driver fills it: the runtime's own count opens
    descriptors that forked workers would inherit."""
    module: Any = getattr(torch, kind)
    initialized = getattr(module, "is_initialized", bool)
    if kind == "cuda" and not torch.version.hip and not initialized() and _NVIDIA.is_dir():
        return visible(len(os.listdir(_NVIDIA)), os.environ)
    return int(module.device_count()) if module.is_available() else 0


def visible(count: int, environment: Mapping[str, str]) -> int:
    """How many of `count` GPUs CUDA_VISIBLE_DEVICES shows: a list of numbers, read up to the first that is
    none, as CUDA does; other forms (UUIDs) are counted."""
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return count
    names = [name.strip() for name in shown.split(",")]
    if not all(re.fullmatch(r"-?\d+", name) for name in names):
        return min(len([name for name in names if name]), count)
    taken = 0
    while taken < len(names) and 0 <= int(names[taken]) < count:
        taken += 1
    return taken


class TorchStager:
    """An accelerator behind torch's stream API; see `copies.Stager` for what the methods promise.

    Memory is a uint8 tensor.

    Args:
        device: with or without an index; without one it is the current device of its kind.

    Attributes:
        device: with its index.
        side: the stream of all copies; one for as long as this lives, because a new one for each epoch would
            strand the memory that was cached for the old one.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = getattr(torch, device.type)
        index = self._module.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self.side = self._module.Stream(self.device)

    def current_stream(self) -> Any:
        return self._module.current_stream(self.device)

    def capturing(self) -> bool:
        """Whether the current stream is captured into a graph; events cannot be asked then."""
        if self.device.type != "cuda":
            return False
        return torch.cuda.is_current_stream_capturing()

    def empty(self, nbytes: int) -> torch.Tensor:
        # Rounded up, so that it can be looked at as any dtype.
        return torch.empty(device_aligned(max(nbytes, 1)), dtype=torch.uint8, device=self.device)

    def copy_async(self, memory: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
        with self._module.stream(self.side):
            memory[:nbytes].copy_(source[:nbytes], non_blocking=True)

    def record(self, stream: Any, event: Any = None) -> Any:
        if event is None:  # one that lets this thread sleep while it waits, where there is a choice
            event = self._module.Event(**({"blocking": True} if self.device.type == "cuda" else {}))
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def query(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def share(self, memory: Any, stream: Any) -> None:
        storages = {}
        for tensor in tensors_of(memory):
            if tensor.device == self.device:
                storages[tensor.untyped_storage().data_ptr()] = tensor
        for tensor in storages.values():
            tensor.record_stream(stream)

    def on_side(self, call: Callable[[], Any]) -> Any:
        with self._module.stream(self.side):
            return call()

    # ---- host memory --------------------------------------------------------------------------

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        # It does not keep the memory: the pool does, until its copies have run.
        return torch.from_numpy(np.asarray(_At(address, nbytes)))

    def fill(self, memory: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
        memory[:nbytes].copy_(source[:nbytes])

    def pageable(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever torch's default device is

    def pinned(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            self._clear_error()
            raise PinFailed(f"torch could not page-lock {nbytes} bytes: {error}") from error

    def register(self, address: int, nbytes: int) -> None:
        runtime = self._runtime()
        with self._module.device(self.device):
            code = int(runtime.cudaHostRegister(address, nbytes, 1))  # 1: for every context of the process
        if code:
            self._clear_error()
            raise PinFailed(f"cudaHostRegister of {nbytes} bytes failed with error {code}")

    def unregister(self, address: int) -> None:
        with self._module.device(self.device):
            code = int(self._runtime().cudaHostUnregister(address))
        if code:
            self._clear_error()

    def _runtime(self) -> Any:
        if self.device.type != "cuda":
            raise PinFailed(f"torch.{self.device.type} cannot page-lock memory that is there already")
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def _clear_error(self) -> None:
        """CUDA keeps the error of a failed call, and the next kernel that is launched would raise it: launch
        one here. Seen in vLLM, issue 51081."""
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError:
            torch.zeros(1, device=self.device)  # an error that stays is the device's end, and raises

    def prove(self) -> None:
        """Send a pattern there and back through registered memory: on some systems (WSL2) a copy from it was
        seen to do nothing, without an error.

        Raises:
            PinFailed: it cannot be registered, or what comes back is something else.
        """
        shared = mmap.mmap(-1, _PROBE_BYTES)  # as the arena is
        anchor = ctypes.c_char.from_buffer(shared)
        address = ctypes.addressof(anchor)
        host = self.view(address, _PROBE_BYTES)
        pattern = (torch.arange(_PROBE_BYTES, device="cpu") * 31 % 251).to(torch.uint8)
        host.copy_(pattern)
        self.register(address, _PROBE_BYTES)
        try:
            there = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=self.device)
            self.wait(self.side, self.record(self.current_stream()))
            self.copy_async(there, host, _PROBE_BYTES)
            self.synchronize(self.record(self.side))
            back = there.cpu()
        finally:
            self.unregister(address)
        if not torch.equal(back, pattern):
            raise PinFailed("a copy from registered memory arrived with other bytes")


class _At:
    """Memory at an address, as numpy asks for it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }
