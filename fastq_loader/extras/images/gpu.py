"""The device of the results; and JPEG files decoded by an NVIDIA GPU, with torchcodec or torchvision.

Runs in the thread that decodes ahead, or where `DecodeImages` is called. The decoder of this hardware writes
when it is called, whatever its stream has yet to do (torchvision #9606, torchcodec #1634). So it must get no
memory that queued work still reads. The stream belongs to nobody else, and neither does the memory that torch
caches for it; before each decode the host waits for the stream.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import metadata
from typing import Any

import torch

from fastq_loader import api

#: Where `decode_jpeg` takes a list of files for CUDA, and from which version on.
_LIBRARIES = {"torchcodec": ("torchcodec.decoders", "0.17"), "torchvision": ("torchvision.io", "0.20")}

#: Lock that whoever decodes for a device holds for a batch. A fork of this process waits for it, so that no
#: child inherits the locks of a library in the middle of a decode.
TURN = threading.RLock()
#: Seconds that a fork, and the end of the thread, wait for the batch that is being decoded.
PATIENCE = 2.0


@functools.cache
def decoder() -> tuple[Callable[..., list[torch.Tensor]] | None, str]:
    """The function that decodes a list of JPEG files on a device, and its library; or None, and why."""
    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} was built without CUDA"
    reasons = []
    for name, (module, oldest) in _LIBRARIES.items():
        try:
            found, version = importlib.import_module(module), metadata.version(name)
            if torch.torch_version.TorchVersion(version) >= oldest:
                return functools.partial(found.decode_jpeg, mode=found.ImageReadMode.RGB), f"{name} {version}"
            reasons.append(f"{name} {version} is older than {oldest}")
        except Exception as error:  # some builds of a library do not load beside some of torch
            reasons.append(f"{name} cannot be loaded: {error!r}")
    return None, " and ".join(reasons)


class Target:
    """The device of the results, and on a GPU the stream on which it decodes.

    Args:
        device: the device; None: the results stay on the CPU.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    def __reduce__(self) -> tuple[Any, ...]:
        return Target, (self.device,)

    @functools.cached_property
    def stream(self) -> Any:
        """The stream of the GPU, which nobody else uses; None: the CPU decodes. Of "cuda" it is the GPU that
        is current on the thread that asks first."""
        if self.device is None or self.device.type != "cuda" or torch.version.cuda is None:
            return None
        with torch.cuda.device(self.device), api.captures.relaxed():
            create, handle = api.captures.runtime_function("cudaStreamCreateWithFlags"), ctypes.c_void_p()
            # 1 is cudaStreamNonBlocking: it does not wait for the default stream.
            if create is None or create(ctypes.byref(handle), 1):
                return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # one of 32 that torch hands out
            return torch.cuda.ExternalStream(handle.value)  # type: ignore[no-untyped-call]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context of the decode of one batch. On a GPU this thread's work runs on the stream, and has run
        when the context is left; its CUDA calls do not end the capture of a graph by another thread."""
        with nullcontext() if self.device is None else TURN, ExitStack() as leaving:
            if self.stream is not None:
                leaving.enter_context(api.captures.relaxed())
                leaving.enter_context(torch.cuda.stream(self.stream))
                leaving.callback(self.wait)
            yield

    def wait(self) -> None:
        """Wait until all work on the stream has run."""
        self.stream.synchronize()

    def decode(self, files: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Decode JPEG files on the GPU, in `working`.

        Args:
            files: the bytes of each.

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
            return decode([*map(_tensor, files)], device=self.stream.device)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
        return ()

    def received(self, images: torch.Tensor) -> torch.Tensor:
        """Images on the device, for work on the current stream."""
        if self.stream is None:
            return images.to(self.device)
        images.record_stream(torch.cuda.current_stream(images.device))
        return images


def _tensor(file: Any) -> torch.Tensor:
    data = memoryview(file)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)


def is_ours() -> bool:
    """Whether this thread has the turn."""
    return TURN._is_owned()  # type: ignore[attr-defined, no-any-return]


def _after_fork() -> None:
    if is_ours():  # it was not waited for longer than `PATIENCE`
        TURN.release()


if hasattr(os, "register_at_fork"):  # as on every system with forks
    before = functools.partial(TURN.acquire, timeout=PATIENCE)
    os.register_at_fork(before=before, after_in_parent=_after_fork, after_in_child=_after_fork)
