"""The wire protocol: a closed set of immutable messages, each one msgpack array in one frame.

Pure: this module turns messages into bytes and back, and knows no socket. Every frame begins with the
version and the kind. What the consumer sends: `Task`, `Epoch`, `Stop`; what a worker sends: `Hello`,
`Answer`. A worker gives exactly one `Answer` to every `Task` it receives, also to those it skips.

An index of plain values travels as msgpack, and a batch of a shuffle as the bytes of its integers. Any other
one travels as one opaque pickled value, so that `dataset[i]` receives exactly what the sampler yielded
(msgpack has no np.int64 and no slice, and turns tuples into lists). The pickle is read by the worker only,
from the process that started it.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from fastq_loader.errors import ProtocolError

VERSION = 1

_TASK, _EPOCH, _STOP, _HELLO, _ANSWER = range(5)

# Outcomes of a task.
BATCH = 0  # the handle is a batch
ERROR = 1  # the handle is an exception that the user's code raised
ENDED = 2  # the worker's part of an iterable dataset is exhausted; no handle
SKIPPED = 3  # not fetched: the epoch was abandoned, or the worker's part had ended; no handle
BROKEN = 4  # the handle is the exception that keeps this worker from working at all

OUTCOMES = (BATCH, ERROR, ENDED, SKIPPED, BROKEN)

_PICKLED_INDEX, _INTEGERS = 1, 2
_PLAIN = frozenset((int, str, bytes, bool, float, type(None)))


class Pickled(NamedTuple):
    """An index that has no msgpack form; `load_index` turns it back."""

    data: bytes


class Indices(NamedTuple):
    """A list of int as the bytes of 64-bit integers in the machine's order; `load_index` gives the list."""

    data: bytes


class Task(NamedTuple):
    """Fetch one batch.

    It may be written to the blocks (offset, size in bytes) of `grants`, and to those of `promises` once
    they are let go. `space` are ranges in which the worker may make new blocks again.
    """

    epoch: int
    seq: int
    attempt: int
    index: Any
    grants: tuple[tuple[int, int], ...]
    promises: tuple[tuple[int, int], ...] = ()
    space: tuple[tuple[int, int], ...] = ()


class Epoch(NamedTuple):
    """A new epoch begins: skip the tasks of older ones, make a new fetcher.

    `abandoned`: the epoch before was broken off. `shared_seed`: the seed of datapipe graphs, or None.
    """

    epoch: int
    abandoned: bool
    shared_seed: int | None


class Stop(NamedTuple):
    """Leave the worker loop."""


class Hello(NamedTuple):
    """The worker is up and reads its socket."""

    pid: int


class Handle(NamedTuple):
    """Where a batch lies, and how it is put together again (see `packing`).

    Attributes:
        spec_id: the number under which the worker knows the batch's spec.
        spec: the spec itself the first time that this worker names it, else None; in the consumer the
            compiled `unpacking.Spec`, from its arrival on.
        values: the plain leaves (int, float, str, bytes, bool, None), in the order of the tree.
        parcel: the small leaves' bytes, if they travel in the message, else None.
        places: blocks (offset, size, bytes into the block) of the parcel, if it lies in one, and
            then of the large leaves.
    """

    spec_id: int
    spec: Any
    values: tuple[Any, ...]
    parcel: bytes | None
    places: tuple[tuple[int, int, int], ...]


class Answer(NamedTuple):
    """What became of one task.

    Attributes:
        epoch, seq, attempt: the task's.
        outcome: BATCH, ERROR, ENDED, SKIPPED or BROKEN.
        started, finished: nanoseconds of the monotonic clock, the same for all processes of a machine.
        used: the blocks of the handle, as (offset, bytes needed).
        fresh: the blocks (offset, size) that the worker made and the consumer has not heard of.
        returned: offsets of granted and promised blocks that the handle does not use.
        handle: None for ENDED and SKIPPED.
    """

    epoch: int
    seq: int
    attempt: int
    outcome: int
    started: int
    finished: int
    used: tuple[tuple[int, int], ...]
    fresh: tuple[tuple[int, int], ...]
    returned: tuple[int, ...]
    handle: Handle | None


Message = Task | Epoch | Stop | Hello | Answer


# surrogatepass: str is any sequence of code points in Python (file names give lone surrogates). One packer
# for all threads: it calls back into no Python code, so no other thread runs while it packs.
_PACKER = msgpack.Packer(unicode_errors="surrogatepass")


def _packb(fields: tuple[Any, ...]) -> bytes:
    frame: bytes = _PACKER.pack(fields)
    return frame


def packs(value: int) -> bool:
    """Whether an int fits msgpack's 64 bits."""
    return -(1 << 63) <= value < (1 << 64)


def plain_index(index: Any) -> bool:
    """Whether an index travels as msgpack: a plain value or a list of plain values."""
    if type(index) is list:
        return _PLAIN.issuperset(map(type, index))
    return type(index) in _PLAIN


def encode(message: Message) -> bytes:
    """One frame for `message`.

    Raises:
        Exception: whatever pickling raises for an index that cannot be pickled.
    """
    return _ENCODERS[type(message)](message)


def _encode_task(task: Task) -> bytes:
    epoch, seq, attempt, index, *blocks = task
    if type(index) is Indices:
        opaque = msgpack.ExtType(_INTEGERS, index.data)
        return _packb((VERSION, _TASK, epoch, seq, attempt, opaque, *blocks))
    if plain_index(index):
        try:
            return _packb((VERSION, _TASK, epoch, seq, attempt, index, *blocks))
        except OverflowError:  # an int of more than 64 bits
            index = Pickled(pickle.dumps(index, pickle.HIGHEST_PROTOCOL))
    else:
        index = Pickled(pickle.dumps(index, pickle.HIGHEST_PROTOCOL))
    opaque = msgpack.ExtType(_PICKLED_INDEX, index.data)
    return _packb((VERSION, _TASK, epoch, seq, attempt, opaque, *blocks))


def _encode_answer(answer: Answer) -> bytes:
    return _packb((VERSION, _ANSWER, *answer))


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    Task: _encode_task,
    Epoch: lambda message: _packb((VERSION, _EPOCH, *message)),
    Stop: lambda message: _packb((VERSION, _STOP)),
    Hello: lambda message: _packb((VERSION, _HELLO, *message)),
    Answer: _encode_answer,
}


def load_index(index: Any) -> Any:
    """The index as the sampler yielded it.

    Raises:
        Exception: whatever unpickling raises.
    """
    if type(index) is Indices:
        integers = array("q")
        integers.frombytes(index.data)
        return integers.tolist()
    return pickle.loads(index.data) if type(index) is Pickled else index


def _ext_hook(code: int, data: bytes) -> Any:
    if code == _PICKLED_INDEX:
        return Pickled(data)
    if code == _INTEGERS and len(data) % 8 == 0:
        return Indices(data)
    raise ProtocolError(f"unknown extension type {code} of {len(data)} bytes")


def decode_for_worker(frame: bytes) -> Task | Epoch | Stop:
    """The message in a frame that the consumer sent.

    Raises:
        ProtocolError: the frame is not such a message.
    """
    fields = _unpack(frame, use_list=True)
    try:
        kind = fields[1]
        if kind == _TASK:
            _, _, epoch, seq, attempt, index, *blocks = fields
            grants, promises, space = [tuple(map(tuple, extents)) if extents else () for extents in blocks]
            return Task(epoch, seq, attempt, index, grants, promises, space)
        if kind == _EPOCH:
            return Epoch(*fields[2:])
        if kind == _STOP:
            return Stop(*fields[2:])
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"malformed frame: {error}") from error
    raise ProtocolError(f"unknown message kind {kind!r}")


def decode_for_consumer(frame: bytes) -> Hello | Answer:
    """The message in a frame that a worker sent.

    Raises:
        ProtocolError: the frame is not such a message.
    """
    fields = _unpack(frame, use_list=False)
    try:
        kind = fields[1]
        if kind == _ANSWER:
            *plain, handle = fields[2:]
            answer = Answer._make((*plain, None if handle is None else Handle(*handle)))
            if answer.outcome not in OUTCOMES:
                raise ProtocolError(f"unknown outcome {answer.outcome!r}")
            return answer
        if kind == _HELLO:
            return Hello(*fields[2:])
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"malformed frame: {error}") from error
    raise ProtocolError(f"unknown message kind {kind!r}")


def _unpack(frame: bytes, *, use_list: bool) -> Any:
    try:
        fields = msgpack.unpackb(
            frame,
            use_list=use_list,
            ext_hook=_ext_hook,
            unicode_errors="surrogatepass",
            strict_map_key=False,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a list as a map's key
        raise ProtocolError(f"not a msgpack frame: {error}") from error
    if not isinstance(fields, (list, tuple)) or len(fields) < 2 or fields[0] != VERSION:
        raise ProtocolError(f"not a frame of protocol version {VERSION}")
    return fields
