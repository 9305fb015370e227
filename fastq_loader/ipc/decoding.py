"""Decodes frames into messages.

Pure; runs in the consumer and in the workers. Frames come from `messages.encode` of processes that have the
pool's token: only their kinds and lengths are checked here. What protects memory is checked where it is used:
the blocks of a handle by `Unpacker.learn`, and the owners of all blocks by `BlockPool.accept`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import (
    INTEGERS,
    KINDS,
    NUMBERS,
    PICKLED_INDEX,
    VERSION,
    Answer,
    BatchHandle,
    Bundle,
    Epoch,
    Hello,
    InBlock,
    Indices,
    Pickled,
    Space,
    Stop,
    Task,
    ToWorker,
)

#: Reads bytes of the arena; takes an offset and a number of bytes.
Read = Callable[[int, int], bytes | memoryview]

#: The kind and the number of fields of each number in a frame. `used` of an answer is not sent.
_FOR_WORKER: dict[int, tuple[Any, int]] = {
    NUMBERS[kind]: (kind, len(kind._fields)) for kind in (Task, Epoch, Space, Bundle, Stop)
}
_FOR_CONSUMER: dict[int, tuple[Any, int]] = {
    NUMBERS[kind]: (kind, len(kind._fields) - (kind is Answer)) for kind in (Answer, InBlock, Hello)
}


def _ext_hook(code: int, data: bytes) -> Any:
    if code == PICKLED_INDEX:
        return Pickled(data)
    if code == INTEGERS and len(data) % 8 == 0:
        return Indices(data)
    raise ProtocolError(f"unknown extension type {code} of {len(data)} bytes")


def decode_for_worker(frame: bytes) -> ToWorker | Bundle:
    """The message in a frame that the consumer sent.

    Raises:
        ProtocolError: the frame is not such a message.
    """
    kind, fields = _opened(frame, _FOR_WORKER, use_list=True)
    try:
        if kind is Task:
            fields[4] = tuple(map(tuple, fields[4])) if fields[4] else ()
        elif kind is Space:
            fields[0] = tuple(map(tuple, fields[0]))
        elif kind is Bundle:
            fields[0] = tuple(fields[0])
    except TypeError as error:
        raise ProtocolError(f"malformed frame: {error}") from error
    made: ToWorker | Bundle = tuple.__new__(kind, fields)
    return made


def decode_for_consumer(frame: bytes | memoryview, read: Read | None = None) -> Hello | Answer:
    """The message in a frame that a worker sent.

    Args:
        frame: the frame.
        read: reads an answer's frame from its block; None if a frame must not refer to a block.

    Raises:
        ProtocolError: the frame is not such a message.
    """
    kind, fields = _opened(frame, _FOR_CONSUMER, use_list=False)
    if kind is InBlock:
        if read is None:
            raise ProtocolError("a reference to a block, without blocks")
        return decode_for_consumer(read(*fields))
    if kind is Answer:
        if fields[3] not in KINDS:
            raise ProtocolError(f"an answer of unknown kind {fields[3]!r:.40}")
        handle = fields[8]
        if handle is not None:
            if type(handle) is not tuple or len(handle) != 5:
                raise ProtocolError(f"{handle!r:.40} where a handle should be")
            fields[8] = tuple.__new__(BatchHandle, handle)
        fields.insert(9, ())
    made: Hello | Answer = tuple.__new__(kind, fields)
    return made


def _opened(
    frame: bytes | memoryview, kinds: dict[int, tuple[Any, int]], *, use_list: bool
) -> tuple[Any, list[Any]]:
    """The kind of a frame, and its fields."""
    try:
        # msgpack bounds every length in a frame by the length of the frame.
        fields = msgpack.unpackb(
            frame,
            use_list=use_list,
            ext_hook=_ext_hook,
            unicode_errors="surrogatepass",
            strict_map_key=False,
        )  # TypeError: a list as a map's key. RecursionError: its hash.
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a msgpack frame: {error}") from error
    try:
        version, number, *fields = fields
        kind, count = kinds[number]
    except (TypeError, ValueError, KeyError):
        raise ProtocolError(f"unknown message kind in {fields!r:.80}") from None
    if version != VERSION or len(fields) != count:
        raise ProtocolError(f"{len(fields)} fields of {kind.__name__}, in version {version!r:.40}")
    return kind, fields
