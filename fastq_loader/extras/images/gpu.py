"""JPEG files decoded by an NVIDIA GPU, by torchcodec or torchvision, on a stream of its own.

Runs in the thread that decodes ahead, or where `DecodeImages` is called. The decoder of this hardware writes
when it is called, whatever its stream has yet to do (torchvision #9606, torchcodec #1634). So it must get no
memory that queued work still reads. The stream belongs to nobody else, and neither does the memory that torch
caches for it; before each decode the host waits for the stream.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch

from fastq_loader.extras.images.encoded import Encoded

#: Where `decode_jpeg` takes a list of files for CUDA, and from which version on.
_LIBRARIES = {"torchcodec": ("torchcodec.decoders", (0, 17)), "torchvision": ("torchvision.io", (0, 20))}
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def decoder() -> tuple[Callable[..., Any] | None, str]:
    """The function that decodes a list of JPEG files on a device, and its library; or None, and why."""
    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} was built without CUDA"
    reasons = []
    for name, (module, oldest) in _LIBRARIES.items():
        try:
            version = metadata.version(name)
            if tuple(map(int, re.findall(r"\d+", version)[:2])) >= oldest:
                found = importlib.import_module(module)
                return functools.partial(found.decode_jpeg, mode=found.ImageReadMode.RGB), f"{name} {version}"
            reasons.append(f"{name} {version} is older than {oldest[0]}.{oldest[1]}")
        except metadata.PackageNotFoundError:
            reasons.append(f"{name} is not installed")
        except Exception as error:  # some builds of a library do not load beside some of torch
            reasons.append(f"{name} {version} cannot be loaded: {error!r}")
    return None, " and ".join(reasons)


class Gpu:
    """One GPU, and the stream on which it decodes.

    Args:
        device: the GPU, of CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(self.device), self._relaxed():
            torch.cuda.current_stream().query()  # the driver needs the device's context
            stream = ctypes.c_void_p()
            # Not one of torch's, which are handed out again after 32.
            failed = self._driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING)
        if failed:
            raise RuntimeError(f"no stream to decode on: the CUDA driver's error {failed}")
        self._stream = torch.cuda.ExternalStream(stream.value, self.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context in which this thread's work runs on the stream; it has run when the context is left. In it,
        the CUDA calls of this thread do not end the capture of a graph by another one."""
        with self._relaxed(), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    @contextmanager
    def _relaxed(self) -> Iterator[None]:
        mode = ctypes.c_int(_RELAXED)
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
            self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def decode(self, files: Sequence[Encoded]) -> Sequence[torch.Tensor]:
        """Decode JPEG files, in `working`.

        Returns:
            uint8 tensors of shape (3, height, width); none if there is no decoder, or a file that it refuses.

        Raises:
            OutOfMemoryError: the device has no memory for them.
        """
        decode, _ = decoder()
        if decode is None:
            return ()
        self._stream.synchronize()  # queued work still reads what is free already; see above
        try:
            found: list[torch.Tensor] = decode([*map(_tensor, files)], device=self.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return ()
        return found


def _tensor(file: Encoded) -> torch.Tensor:
    data = memoryview(file.data)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
