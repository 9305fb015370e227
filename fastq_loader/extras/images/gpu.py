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

from fastq_loader.system.torch_names import extension

Device = torch.device | str | None

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
        return None, f"as on the CPU, because torch {torch.__version__} was built without CUDA"
    reasons = []
    for name, (module, oldest) in _LIBRARIES.items():
        try:
            found, version = importlib.import_module(module), metadata.version(name)
            if torch.torch_version.TorchVersion(version) >= oldest:
                return functools.partial(found.decode_jpeg, mode=found.ImageReadMode.RGB), f"{name} {version}"
            reasons.append(f"{name} {version} is older than {oldest}")
        except Exception as error:  # some builds of a library do not load beside some of torch
            reasons.append(f"{name} cannot be loaded: {error!r}")
    return None, f"as on the CPU, because {' and '.join(reasons)}"


def stream_of(device: Device) -> Any:
    """The stream on which a GPU decodes images, and does nothing else; None for devices that do not decode.

    Args:
        device: the device; None: the CPU. Of "cuda" it is the one that is current on this thread.
    """
    target = torch.device("cpu" if device is None else device)
    if target.type != "cuda" or torch.version.cuda is None:
        return None
    return _own_stream(torch.cuda.current_device() if target.index is None else target.index)


@functools.cache
def _own_stream(index: int) -> Any:
    try:  # torch's module includes the CUDA runtime that it is linked to, unless that is linked statically
        create = ctypes.CDLL(extension).cudaStreamCreateWithFlags
    except (AttributeError, OSError):
        create = None
    handle = ctypes.c_void_p()
    with torch.cuda.device(index):
        # 1 is cudaStreamNonBlocking: it does not wait for the default stream.
        if create is None or create(ctypes.byref(handle), 1):
            return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # one of 32 that torch hands out
        return torch.cuda.ExternalStream(handle.value)  # type: ignore[no-untyped-call]


@contextmanager
def working(device: Device) -> Iterator[Any]:
    """Context of the decode of one batch for a device; yields its stream, or None.

    On a GPU this thread's work runs on the stream, and has run when the context is left.
    """
    stream = stream_of(device)
    with nullcontext() if device is None else TURN, ExitStack() as leaving:
        if stream is not None:
            leaving.enter_context(torch.cuda.stream(stream))
            leaving.callback(wait, stream)
        yield stream


def wait(stream: Any) -> None:
    """Wait until all work on a stream has run."""
    stream.synchronize()


def decode(files: Sequence[Any], stream: Any) -> Sequence[torch.Tensor]:
    """Decode JPEG files on a GPU, in `working`.

    Args:
        files: the bytes of each.
        stream: of the GPU.

    Returns:
        uint8 tensors of shape (3, height, width); none if there is no decoder, or a file that it refuses.

    Raises:
        OutOfMemoryError: the device has no memory for them.
    """
    decode_jpeg, _ = decoder()
    if decode_jpeg is None:
        return ()
    wait(stream)  # queued work may still read memory that is free again; see above
    try:
        return decode_jpeg([*map(_tensor, files)], device=stream.device)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
    return ()


def received(images: torch.Tensor, device: Device) -> torch.Tensor:
    """Decoded images on the device, for work on the current stream."""
    if images.is_cuda:
        images.record_stream(torch.cuda.current_stream(images.device))
    return images if device is None else images.to(device)


def _tensor(file: Any) -> torch.Tensor:
    data = memoryview(file)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)


def _after_fork() -> None:
    if TURN._is_owned():  # type: ignore[attr-defined]  # it was not waited for longer than `PATIENCE`
        TURN.release()


if hasattr(os, "register_at_fork"):  # as on every system with forks
    before_fork = functools.partial(TURN.acquire, timeout=PATIENCE)
    os.register_at_fork(before=before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
