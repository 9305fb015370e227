"""Decodes frames into messages, and checks them.

Pure; runs in the consumer and in the workers. Checks the structure of every frame here: the number of fields,
and that each number is an int from 0 to 2**63 - 1. The code that uses a field checks its meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

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

T = TypeVar("T")
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


def _check_counts(numbers: Any) -> Any:
    """The numbers, if they are such."""
    for number in numbers:
        if type(number) is not int or not 0 <= number <= _LARGEST:
            raise ProtocolError(f"{number!r:.40} where a number should be")
    return numbers


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


def decode_for_worker(frame: bytes) -> ToWorker | Bundle:
    """The message in a frame that the consumer sent.

    Raises:
        ProtocolError: the frame is not such a message.
    """
    make, fields = _opened(frame, _FOR_WORKER, use_list=True)
    try:
        return make(*fields)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"malformed frame: {error}") from error


def _task(epoch: Any, seq: Any, attempt: Any, index: Any, grants: Any, ticket: Any) -> Task:
    numbers = epoch, seq, attempt, ticket
    if set(map(type, numbers)) != _INT or min(numbers) < 0 or max(numbers) > _LARGEST:
        raise ProtocolError(f"{numbers!r:.80} where the numbers of a task should be")
    blocks = () if grants == [] else _blocks(grants)
    return tuple.__new__(Task, (epoch, seq, attempt, index, blocks, ticket))


def _bundle(frames: Any) -> Bundle:
    if type(frames) is not list or not {bytes}.issuperset(map(type, frames)):
        raise ProtocolError("a bundle with a part that is not a frame")
    return Bundle(tuple(frames))


def _epoch(epoch: Any, shared_seed: Any, base_seed: Any, resume: Any, number: Any, sample_seed: Any) -> Epoch:
    seeds = [seed for seed in (shared_seed, base_seed) if seed is not None]
    _check_counts((epoch, number, sample_seed, *seeds))
    _check_type(resume, bytes)
    return Epoch(epoch, shared_seed, base_seed, resume, number, sample_seed)


def decode_for_consumer(frame: bytes | memoryview, read: Read | None = None) -> Hello | Answer:
    """The message in a frame that a worker sent.

    Args:
        frame: the frame.
        read: reads an answer's frame from its block; None if a frame must not refer to a block.

    Raises:
        ProtocolError: the frame is not such a message.
    """
    make, fields = _opened(frame, _FOR_CONSUMER, use_list=False)
    try:
        message = make(*fields)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"malformed frame: {error}") from error
    if type(message) is InBlock:
        if read is None:
            raise ProtocolError("a reference to a block, where there are none")
        return decode_for_consumer(read(*message))
    answered: Hello | Answer = message
    return answered


#: Types of the number of a spec, the values and the packet of a handle.
_OF_A_HANDLE = ((int, tuple, bytes), (int, tuple, type(None)))


def _answer(*fields: Any) -> Answer:
    *head, fresh, returned, handle, state, fetched, collated, memory, remarks = fields
    _, _, _, answer_kind, _, _ = head
    costs = fetched, collated, memory
    numbers = (*head, *costs)
    # The check of `_check_counts`, without a loop in Python.
    if set(map(type, numbers)) != _INT or min(numbers) < 0 or max(numbers) > _LARGEST:
        raise ProtocolError(f"{numbers!r:.80} where the numbers of an answer should be")
    if (answer_kind in KINDS, type(state), type(remarks)) != (True, bytes, bytes):
        raise ProtocolError(f"an answer of unknown kind {answer_kind}, or a malformed state")
    if not fresh == returned == ():
        _blocks(fresh)
        _check_type(returned, tuple)
        _check_counts(returned)
    if handle is not None:
        spec_id, _, values, packet, segments = handle
        if (type(spec_id), type(values), type(packet)) not in _OF_A_HANDLE or spec_id < 0:
            raise ProtocolError("a handle with a malformed number, malformed values or a malformed packet")
        for segment in segments:  # `Unpacker.learn` checks the values
            offset, size, start = segment
            if not type(offset) is type(size) is type(start) is int:
                raise ProtocolError(f"{segment!r:.40} where a segment should be")
        handle = tuple.__new__(BatchHandle, handle)
    return tuple.__new__(Answer, (*head, fresh, returned, handle, (), state, *costs, remarks))


_FOR_WORKER: dict[int, Callable[..., ToWorker | Bundle]] = {
    NUMBERS[Task]: _task,
    NUMBERS[Epoch]: _epoch,
    NUMBERS[Space]: lambda ranges: Space(_blocks(ranges)),
    NUMBERS[Bundle]: _bundle,
    NUMBERS[Stop]: Stop,
}
_FOR_CONSUMER: dict[int, Callable[..., Any]] = {
    NUMBERS[Answer]: _answer,
    NUMBERS[InBlock]: lambda *fields: InBlock(*_check_counts(fields)),
    NUMBERS[Hello]: lambda *fields: Hello(*_check_counts(fields)),
}


def _opened(
    frame: bytes | memoryview, makers: dict[int, Callable[..., T]], *, use_list: bool
) -> tuple[Callable[..., T], list[Any]]:
    """The function for the kind of a frame, which makes the message, and the fields that it takes."""
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
        version, kind, *fields = fields
    except (TypeError, ValueError):
        version = None
    if version != VERSION:
        raise ProtocolError(f"not a frame of protocol version {VERSION}")
    try:
        return makers[kind], fields
    except (KeyError, TypeError):
        raise ProtocolError(f"unknown message kind {kind!r:.40}") from None
