"""A value whose large buffers lie in a sealed memfd, which every reading process maps.

Runs in the consumer, in workers, and in programs that call `share`. The value is pickled with protocol 5: its
buffers (of numpy and Arrow arrays, and of objects that contain them) are written beside the pickle and not
into it. A reader maps them privately: it may write to them, and memory is shared until it does.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

from fastq_loader.system import calls

#: Bytes from which on a buffer is written beside the pickle.
SMALLEST = 64 << 10
_ALIGNMENT = 64
_HEAD = struct.Struct("<QQ")  # where the index begins, and its size in bytes


def write(value: Any, pickler: Callable[..., Any] = pickle.Pickler) -> int:
    """Write a value to a sealed memfd. Return its descriptor.

    Args:
        value: any value that can be pickled.
        pickler: called as `pickle.Pickler(file, protocol, buffer_callback=...)`.

    Raises:
        OSError: memfds are not available, or memory is used up.
        Exception: pickling raised it.
    """
    pickled, buffers = io.BytesIO(), list[memoryview]()

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= SMALLEST:
            buffers.append(raw)
        return raw.nbytes < SMALLEST  # True writes it into the pickle

    pickler(pickled, 5, buffer_callback=keep).dump(value)
    fd = calls.memfd_create("fastq_loader.mapped")
    try:
        with open(fd, "wb", closefd=False) as file:
            places, at = [], _HEAD.size
            for buffer in (*buffers, pickled.getbuffer()):
                at = file.seek(at + -at % _ALIGNMENT)
                places.append((at, buffer.nbytes))
                at += file.write(buffer)
            index = pickle.dumps(places)
            file.write(index)
            file.seek(0)
            file.write(_HEAD.pack(at, len(index)))
        calls.seal_length(fd, contents=True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(fd: int) -> Any:
    """Return the value; its buffers are writable, and stay mapped while they are referenced. The descriptor
    belongs to the caller, and need not stay open."""
    memory = memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    at, nbytes = _HEAD.unpack_from(memory)
    *places, stream = (memory[start : start + size] for start, size in pickle.loads(memory[at : at + nbytes]))
    return pickle.loads(stream, buffers=places)
