"""The wire protocol: a closed set of immutable messages, each one msgpack array in one frame.

Pure: this module encodes messages as bytes, decodes them, and does no I/O; it runs in the consumer and in the
workers. Every frame begins with the version and the kind. The consumer sends `Task`, `BeginEpoch`, `Space`,
`Stop`, and several of these together as a `Bundle`; a worker sends `Hello` and `Answer`, a long one as an
`InBlock`. A worker sends exactly one `Answer` to each of its `Task` messages, also to a task that it skips. A
shared task belongs to the worker that claims it.

An index of plain values is sent as msgpack, a batch of shuffled indices as the bytes of its integers. Any
other index is sent as one opaque pickled value, so that `dataset[i]` receives exactly the sampler's object
(msgpack has no np.int64 and no slice, and turns tuples into lists).

Bytes from a frame or from shared memory are unpickled only if they begin with the pool's token: random bytes
that the workers were started with. Of a frame, only the kind and the lengths are checked here. Blocks are
checked where they are used: the parts of a handle by `Unpacker.check`, and the owners of all by
`BlockPool.accept`.
"""

from __future__ import annotations

import hmac
import pickle
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from fastq_loader.errors import ProtocolError

VERSION = 11

# Kinds of answers.
BATCH = 0  # the handle is a batch
ERROR = 1  # the handle is an exception that the user's code raised
PART_ENDED = 2  # the worker's part of an iterable dataset is exhausted; no handle
SKIPPED = 3  # not fetched: the epoch was abandoned, or the worker's part had ended; no handle
BROKEN = 4  # the handle is the exception that keeps this worker from working at all
PASSED = 5  # passed over: the batch was delivered before the epoch was resumed; no handle
LEFT_OUT = 6  # no sample of the batch could be read, and none need be; no handle

KINDS = (BATCH, ERROR, PART_ENDED, SKIPPED, BROKEN, PASSED, LEFT_OUT)
#: Kinds without a handle.
EMPTY = (PART_ENDED, SKIPPED, PASSED, LEFT_OUT)

#: Bytes of a pool's token.
TOKEN_BYTES = 16

# Kinds of indices.
PICKLED_INDEX, INTEGERS = 1, 2
_PLAIN = frozenset((int, str, bytes, bool, float, type(None)))


class Pickled(NamedTuple):
    """An index without a msgpack form, pickled behind the pool's token; `load_index` unpickles it."""

    data: bytes


class Indices(NamedTuple):
    """A list of int as 64-bit integers in the machine's byte order; `decode_index` returns the list."""

    data: bytes


class Task(NamedTuple):
    """Fetch one batch.

    The worker may write the batch to the blocks (offset, bytes) of `grants`. `ticket` is the number of a
    shared task in the claim table.
    """

    epoch: int
    seq: int
    attempt: int
    index: Any
    grants: tuple[tuple[int, int], ...]
    ticket: int = 0


class BeginEpoch(NamedTuple):
    """Begin a new epoch: skip the tasks of older ones, make a new fetcher.

    Attributes:
        shared_seed: seed of datapipe graphs, or None.
        base_seed: seed that, with a batch's number, seeds each batch. None: each worker has one sequence of
            random numbers, as in torch.
        resume: the workers' positions in a resumed epoch, as a sealed pickle (see `reading.reader`), or b"".
        number: number of the loader's epoch if `errors` depends on it, else 0.
        sample_seed: base seed of the epoch, for the seeds of samples.
        profiled: sample the stack while batches are loaded, and send it with the answers.
    """

    epoch: int
    shared_seed: int | None
    base_seed: int | None = None
    resume: bytes = b""
    number: int = 0
    sample_seed: int = 0
    profiled: bool = False


class Space(NamedTuple):
    """Ranges (offset, size) of the worker's part of the arena in which it may make new blocks again."""

    ranges: tuple[tuple[int, int], ...]


class Bundle(NamedTuple):
    """Several messages for a worker, each as the frame that would be sent alone."""

    frames: tuple[bytes, ...]


class Stop(NamedTuple):
    """Leave the worker loop."""


class Hello(NamedTuple):
    """The worker is up and reads its socket."""

    pid: int


class InBlock(NamedTuple):
    """Reference to an answer whose frame lies in shared memory. The answer also returns the frame's block."""

    offset: int
    nbytes: int


class BatchHandle(NamedTuple):
    """Location of a batch, and instructions to rebuild it (see `packing`).

    Attributes:
        layout_id: the worker's number for the batch's layout.
        layout: the plain layout the first time that this worker uses it, else None; in the consumer the
            compiled `packing.layout.BatchLayout`, from its arrival on.
        values: the plain leaves (int, float, str, bytes, bool, None), in the order of the tree.
        packet: the bytes of the small leaves if they are sent in the message, else None.
        segments: the segments that lie in blocks, each as (offset of the block, size of the block, start in
            it): the packet, with its size as the third number, if it lies in a block; the part for a device;
            the large segments.
    """

    layout_id: int
    layout: Any
    values: tuple[Any, ...]
    packet: bytes | None
    segments: tuple[tuple[int, int, int], ...]


class Answer(NamedTuple):
    """Answer to one task.

    Attributes:
        epoch, seq, attempt: copied from the task.
        kind: one of KINDS.
        started, finished: nanoseconds of the monotonic clock, which all processes of a machine share.
        fresh: blocks (offset, size) that the worker made and has not reported to the consumer yet.
        returned: offsets of granted blocks that the handle does not use.
        handle: None for PART_ENDED, SKIPPED, PASSED and LEFT_OUT.
        state: the worker's state after this batch, as a sealed pickle (see `reading.reader`), or b"".
        fetched, collated: times at which the samples were loaded and collated, as `started`; 0 if nothing
            was loaded.
        new_memory: nanoseconds spent mapping new pages for this task.
        remarks: bad samples and the like, as a sealed pickle (see `workers.reader.WorkerReader`), or b"".
    """

    epoch: int
    seq: int
    attempt: int
    kind: int
    started: int
    finished: int
    fresh: tuple[tuple[int, int], ...]
    returned: tuple[int, ...]
    handle: BatchHandle | None
    state: bytes = b""
    fetched: int = 0
    collated: int = 0
    new_memory: int = 0
    remarks: bytes = b""


ToWorker = Task | BeginEpoch | Space | Stop
Message = ToWorker | Bundle | Hello | Answer | InBlock

#: Number of each kind of message in a frame.
_MESSAGES = Task, BeginEpoch, Space, Bundle, Stop, Hello, Answer, InBlock
NUMBERS: dict[type, int] = {kind: number for number, kind in enumerate(_MESSAGES)}
_TASK = NUMBERS[Task]

# surrogatepass: file names may have lone surrogates. All threads share the packer: it runs no Python code.
_PACKER = msgpack.Packer(unicode_errors="surrogatepass")


_pack: Callable[[tuple[Any, ...]], bytes] = _PACKER.pack


def fits_64_bits(value: int) -> bool:
    """Whether an int fits msgpack's 64 bits."""
    return -(1 << 63) <= value < (1 << 64)


def seal(pickled: bytes, token: bytes) -> bytes:
    """Prefix a pickle with the pool's token."""
    return token + pickled


def unseal(sealed: bytes | memoryview, token: bytes) -> bytes:
    """The pickle behind the pool's token.

    Raises:
        ProtocolError: the token does not match, so the bytes must not be unpickled.
    """
    if not hmac.compare_digest(sealed[:TOKEN_BYTES], token):
        raise ProtocolError(f"{len(sealed)} bytes are not a pickle of this pool")
    return bytes(sealed[TOKEN_BYTES:])


def encode(message: Message, token: bytes = b"") -> bytes:
    """Encode a message as one frame.

    Args:
        message: the message.
        token: the pool's, for an index that has to be pickled. Only tasks need it.

    Raises:
        Exception: whatever pickling raises for an index that cannot be pickled.
    """
    if type(message) is Task:
        return encode_task(message, token)
    return _pack((VERSION, NUMBERS[type(message)], *message))


def encode_task(task: Task, token: bytes) -> bytes:
    """Encode a task as one frame; see `encode`. Plain values and lists of them are sent as msgpack."""
    epoch, seq, attempt, index, *others = task
    if type(index) is Indices:
        opaque = tuple.__new__(msgpack.ExtType, (INTEGERS, index[0]))  # `ExtType()` without its checks
        return _pack((VERSION, _TASK, epoch, seq, attempt, opaque, *others))
    if _PLAIN.issuperset(map(type, index)) if type(index) is list else type(index) in _PLAIN:
        try:
            return _pack((VERSION, _TASK, epoch, seq, attempt, index, *others))
        except OverflowError:  # an int of more than 64 bits
            pass
    assert len(token) == TOKEN_BYTES, "a pickle travels behind the pool's token"
    opaque = msgpack.ExtType(PICKLED_INDEX, seal(pickle.dumps(index, pickle.HIGHEST_PROTOCOL), token))
    return _pack((VERSION, _TASK, epoch, seq, attempt, opaque, *others))


def reencode(message: Task | BeginEpoch) -> bytes:
    """Encode a decoded message again, as one frame, without unpickling anything in it."""
    if type(message) is Task and type(message.index) is Pickled:
        message = message._replace(index=msgpack.ExtType(PICKLED_INDEX, message.index.data))
        return _pack((VERSION, _TASK, *message))
    return encode(message)


def decode_index(index: Any) -> Any:
    """The sampler's index, from the index of a task that was never encoded."""
    if type(index) is Indices:
        integers = array("q")
        integers.frombytes(index.data)
        return integers.tolist()
    return index


def load_index(index: Any, token: bytes) -> Any:
    """The sampler's index, from the index of a decoded task.

    Raises:
        ProtocolError: the index is a pickle without this pool's token.
        Exception: whatever unpickling raises.
    """
    return pickle.loads(unseal(index.data, token)) if type(index) is Pickled else decode_index(index)


#: Reads bytes of the arena; takes an offset and a number of bytes.
Read = Callable[[int, int], bytes | memoryview]

#: The kind and the number of fields of each number in a frame.
_FOR_WORKER: dict[int, tuple[Any, int]] = {
    NUMBERS[kind]: (kind, len(kind._fields)) for kind in (Task, BeginEpoch, Space, Bundle, Stop)
}
_FOR_CONSUMER: dict[int, tuple[Any, int]] = {
    NUMBERS[kind]: (kind, len(kind._fields)) for kind in (Answer, InBlock, Hello)
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
