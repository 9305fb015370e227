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

from fastq_loader import api
from fastq_loader.extras.images.encoded import Encoded

#: Where `decode_jpeg` takes a list of files for CUDA, and from which version on.
_LIBRARIES = {"torchcodec": ("torchcodec.decoders", (0, 17)), "torchvision": ("torchvision.io", (0, 20))}
_NON_BLOCKING = 1  # cudaStreamNonBlocking: it does not wait for the default stream


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
        with torch.cuda.device(self.device), api.captures.relaxed():
            self.stream = _own_stream()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context in which this thread's work runs on the stream; it has run when the context is left. In it,
        the CUDA calls of this thread do not end the capture of a graph by another one."""
        with api.captures.relaxed(), torch.cuda.stream(self.stream):
            try:
                yield
            finally:
                self.wait()

    def wait(self) -> None:
        """Wait until all work on the stream has run."""
        self.stream.synchronize()

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
        self.wait()  # queued work may still read memory that is free again; see above
        try:
            found: list[torch.Tensor] = decode([*map(_tensor, files)], device=self.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return ()
        return found


def _own_stream() -> Any:
    """A new stream of the current device. torch's own are handed out again after 32."""
    create, handle = api.captures.runtime_function("cudaStreamCreateWithFlags"), ctypes.c_void_p()
    if create is None or create(ctypes.byref(handle), _NON_BLOCKING):
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return torch.cuda.ExternalStream(handle.value)  # type: ignore[no-untyped-call]


def _tensor(file: Encoded) -> torch.Tensor:
    data = memoryview(file.data)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
