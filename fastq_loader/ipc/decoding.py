"""Decodes frames into messages, and checks them.

Pure; runs in the consumer and in the workers. Checks the structure of every frame here: the number of fields,
and that each number is an int from 0 to 2**63 - 1. The code that uses a field checks its meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import msgpack

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import (
    ANSWER,
    BUNDLE,
    EPOCH,
    HELLO,
    IN_BLOCK,
    INTEGERS,
    KINDS,
    PICKLED_INDEX,
    PING,
    SPACE,
    STOP,
    TASK,
    VERSION,
    Answer,
    BatchHandle,
    Bundle,
    Epoch,
    Hello,
    Indices,
    Pickled,
    Ping,
    Space,
    Stop,
    Task,
)

#: Reads bytes of the arena; takes an offset and a number of bytes.
Read = Callable[[int, int], bytes | memoryview]

_LARGEST = (1 << 63) - 1
_INT = {int}


def _ext_hook(code: int, data: bytes) -> Any:
    if code == PICKLED_INDEX:
        return Pickled(data)
    if code == INTEGERS and len(data) % 8 == 0:
        return Indices(data)
    raise ProtocolError(f"unknown extension type {code} of {len(data)} bytes")


def _check_counts(numbers: Any) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number <= _LARGEST:
            raise ProtocolError(f"{number!r:.40} where a number should be")


def _blocks(blocks: Any, width: int = 2) -> tuple[Any, ...]:
    """A checked tuple of blocks, each with `width` numbers."""
    _check_type(blocks, list, tuple)
    for block in blocks:
        _check_type(block, list, tuple)
        if len(block) != width:
            raise ProtocolError(f"{block!r:.40} where a block should be")
    _check_counts(chain.from_iterable(blocks))
    return tuple(map(tuple, blocks))


def _check_type(value: Any, *types: type) -> None:
    if type(value) not in types:
        raise ProtocolError(f"a {type(value).__name__} where a {types[0].__name__} should be")


def decode_for_worker(frame: bytes) -> Task | Epoch | Space | Bundle | Stop | Ping:
    """The message in a frame that the consumer sent.

    Raises:
        ProtocolError: the frame is not such a message.
    """
    kind, *fields = _unpack(frame, use_list=True)
    try:
        if kind == TASK:
            epoch, seq, attempt, index, grants, promises, ticket = fields
            numbers = epoch, seq, attempt, ticket
            if set(map(type, numbers)) != _INT or min(numbers) < 0 or max(numbers) > _LARGEST:
                raise ProtocolError(f"{numbers!r:.80} where the numbers of a task should be")
            blocks = ((), ()) if grants == promises == [] else (_blocks(grants), _blocks(promises))
            return tuple.__new__(Task, (epoch, seq, attempt, index, *blocks, ticket))
        if kind == EPOCH:
            return _epoch(*fields)
        if kind == SPACE:
            (ranges,) = fields
            return Space(_blocks(ranges))
        if kind == BUNDLE:
            (frames,) = fields
            if type(frames) is not list or any(type(part) is not bytes for part in frames):
                raise ProtocolError("a bundle with a part that is not a frame")
            return Bundle(tuple(frames))
        if kind == STOP:
            return Stop(*fields)
        if kind == PING:
            return Ping(*fields)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"malformed frame: {error}") from error
    raise ProtocolError(f"unknown message kind {kind!r:.40}")


def _epoch(epoch: Any, shared_seed: Any, base_seed: Any, resume: Any, number: Any) -> Epoch:
    _check_counts((epoch, number, *(seed for seed in (shared_seed, base_seed) if seed is not None)))
    _check_type(resume, bytes)
    return Epoch(epoch, shared_seed, base_seed, resume, number)


def decode_for_consumer(frame: bytes | memoryview, read: Read | None = None) -> Hello | Answer | Ping:
    """The message in a frame that a worker sent.

    Args:
        frame: the frame.
        read: reads an answer's frame from its block; None if a frame must not refer to a block.

    Raises:
        ProtocolError: the frame is not such a message.
    """
    kind, *fields = _unpack(frame, use_list=False)
    try:
        if kind == ANSWER:
            return _answer(fields)
        if kind == IN_BLOCK and read is not None:
            _check_counts(fields)
            return decode_for_consumer(read(*fields))
        if kind == HELLO:
            (pid,) = fields
            _check_counts((pid,))
            return Hello(pid)
        if kind == PING:
            return Ping(*fields)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"malformed frame: {error}") from error
    raise ProtocolError(f"unknown message kind {kind!r:.40}")


def _answer(fields: list[Any]) -> Answer:
    *head, fresh, returned, handle, state, fetched, collated, memory, cpu, slowest, at, cpu_wait, remarks = (
        fields
    )
    _, _, _, answer_kind, _, _ = head
    costs = fetched, collated, memory, cpu, slowest, at, cpu_wait
    numbers = (*head, *costs)
    # The check of `_check_counts`, without a loop in Python.
    if set(map(type, numbers)) != _INT or min(numbers) < 0 or max(numbers) > _LARGEST:
        raise ProtocolError(f"{numbers!r:.80} where the numbers of an answer should be")
    if answer_kind not in KINDS or not type(state) is type(remarks) is bytes:
        raise ProtocolError(f"an answer of unknown kind {answer_kind}, or a malformed state")
    if not fresh == returned == ():
        _blocks(fresh)
        _check_type(returned, tuple)
        _check_counts(returned)
    if handle is not None:
        spec_id, _, values, packet, segments = handle
        if type(values) is not tuple or not (packet is None or type(packet) is bytes):
            raise ProtocolError("a handle with malformed values or a malformed packet")
        if type(spec_id) is not int or spec_id < 0:
            raise ProtocolError(f"{spec_id!r:.40} where the number of a spec should be")
        for segment in segments:  # `Unpacker.learn` checks the values
            offset, size, start = segment
            if not type(offset) is type(size) is type(start) is int:
                raise ProtocolError(f"{segment!r:.40} where a segment should be")
        handle = tuple.__new__(BatchHandle, handle)
    return tuple.__new__(Answer, (*head, fresh, returned, handle, (), state, *costs, remarks))


def _unpack(frame: bytes | memoryview, *, use_list: bool) -> Any:
    """The fields of a frame from the kind on."""
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
        version, *fields = fields
    except (TypeError, ValueError):
        version = None
    if version != VERSION or not fields:
        raise ProtocolError(f"not a frame of protocol version {VERSION}")
    return fields
