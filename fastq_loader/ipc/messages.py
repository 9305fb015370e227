"""The wire protocol: a closed set of immutable messages, each one msgpack array in one frame.

Pure: this module turns messages into bytes, and knows no socket. Every frame begins with the version
and the kind. The consumer sends `Task`, `Epoch`, `Space`, `Stop`, and some of these in a `Bundle`; a worker
sends `Hello` and `Answer`, a long one as an `InBlock`; a `Ping` goes there and back. A worker gives exactly
one `Answer` to every `Task` that is its own, also to those that it skips. A shared task is the worker's that
claims it.

An index of plain values travels as msgpack, a batch of a shuffle as the bytes of its integers. Any other
index travels as one opaque pickled value, so that `dataset[i]` receives exactly what the sampler yielded
(msgpack has no np.int64 and no slice, and turns tuples into lists).

Nothing that comes out of a frame or out of shared memory is unpickled unless the pool's token stands before
it: random bytes that the workers were started with. `decoding` turns frames back and checks them.
"""

from __future__ import annotations

import hmac
import pickle
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from fastq_loader.errors import ProtocolError

VERSION = 8

# Kinds of messages.
TASK, EPOCH, SPACE, BUNDLE, STOP, HELLO, ANSWER, PING, IN_BLOCK = range(9)

# Kinds of answers.
BATCH = 0  # the handle is a batch
ERROR = 1  # the handle is an exception that the user's code raised
ENDED = 2  # the worker's part of an iterable dataset is exhausted; no handle
SKIPPED = 3  # not fetched: the epoch was abandoned, or the worker's part had ended; no handle
BROKEN = 4  # the handle is the exception that keeps this worker from working at all
PASSED = 5  # passed over: the batch was handed out before the epoch was resumed; no handle
LEFT_OUT = 6  # no sample of the batch could be read, and none need be; no handle

KINDS = (BATCH, ERROR, ENDED, SKIPPED, BROKEN, PASSED, LEFT_OUT)
#: Kinds without a handle.
EMPTY = (ENDED, SKIPPED, PASSED, LEFT_OUT)

#: Bytes of a pool's token.
TOKEN_BYTES = 16

# Kinds of indices.
PICKLED_INDEX, INTEGERS = 1, 2
_PLAIN = frozenset((int, str, bytes, bool, float, type(None)))


class Pickled(NamedTuple):
    """An index that has no msgpack form, sealed with the pool's token; `load_index` turns it back."""

    data: bytes


class Indices(NamedTuple):
    """A list of int as the bytes of 64-bit integers in the machine's order; `decode_index` gives the list."""

    data: bytes


class Task(NamedTuple):
    """Fetch one batch.

    It may be written to the blocks (offset, bytes) of `grants`, and of `promises` once they are let go.
    Where tasks are claimed, `ticket` is the number for it.
    """

    epoch: int
    seq: int
    attempt: int
    index: Any
    grants: tuple[tuple[int, int], ...]
    promises: tuple[tuple[int, int], ...] = ()
    ticket: int = 0


class Epoch(NamedTuple):
    """A new epoch begins: skip the tasks of older ones, make a new fetcher.

    Attributes:
        shared_seed: of datapipe graphs, or None.
        base_seed: of every batch, with its number. None: each worker has one sequence, as in torch.
        resume: where the workers go on in a resumed epoch, as a sealed pickle (see `reading.reader`), or b"".
        number: of the loader's epoch, where `errors` goes by it; else 0.
    """

    epoch: int
    shared_seed: int | None
    base_seed: int | None = None
    resume: bytes = b""
    number: int = 0


class Space(NamedTuple):
    """Ranges (offset, size) of its part of the arena in which the worker may make new blocks again."""

    ranges: tuple[tuple[int, int], ...]


class Bundle(NamedTuple):
    """Messages for a worker, each as the frame that it would be by itself."""

    frames: tuple[bytes, ...]


class Stop(NamedTuple):
    """Leave the worker loop."""


class Hello(NamedTuple):
    """The worker is up and reads its socket."""

    pid: int


class Ping(NamedTuple):
    """A worker sends it back when it has read what came before it."""


class InBlock(NamedTuple):
    """The frame of an answer lies in shared memory. Its block is among those that the answer returns."""

    offset: int
    nbytes: int


class Handle(NamedTuple):
    """Where a batch lies, and how it is put together again (see `packing`).

    Attributes:
        spec_id: the number under which the worker knows the batch's spec.
        spec: the spec itself the first time that this worker names it, else None; in the consumer the
            compiled `packing.spec.Spec`, from its arrival on.
        values: the plain leaves (int, float, str, bytes, bool, None), in the order of the tree.
        packet: the small leaves' bytes, if they travel in the message, else None.
        segments: where the segments lie that are not in the message, as (offset and size of the block, bytes
            into it): the packet, with its size as the third number, if it lies in a block; the part for a
            device; the large ones.
    """

    spec_id: int
    spec: Any
    values: tuple[Any, ...]
    packet: bytes | None
    segments: tuple[tuple[int, int, int], ...]


class Answer(NamedTuple):
    """Answer to one task.

    Attributes:
        epoch, seq, attempt: the task's.
        kind: one of KINDS.
        started, finished: nanoseconds of the monotonic clock, the same for all processes of a machine.
        fresh: the blocks (offset, size) that the worker made and the consumer has not heard of.
        returned: offsets of granted and promised blocks that the handle does not use.
        handle: None for ENDED, SKIPPED, PASSED and LEFT_OUT.
        used: the blocks of the handle, as (offset, bytes needed). Not sent: the consumer finds it there.
        state: of the worker after this batch, as a sealed pickle (see `reading.reader`), or b"".
        fetched, collated: when the samples were there, and when they were a batch, as `started`; 0 where
            nothing was loaded.
        new_memory: nanoseconds of it in which new pages were mapped.
        cpu: nanoseconds of CPU time that the worker's process has used; 0: it was not asked for.
        slowest, slowest_at: nanoseconds of the sample that took longest, and its place in the batch; 0, 0
            where samples were not timed.
        cpu_wait: nanoseconds in which the worker could have run and had no CPU, so far; as `cpu`.
        remarks: bad samples and the like, as a sealed pickle (see `WorkerReader`), or b"".
    """

    epoch: int
    seq: int
    attempt: int
    kind: int
    started: int
    finished: int
    fresh: tuple[tuple[int, int], ...]
    returned: tuple[int, ...]
    handle: Handle | None
    used: tuple[tuple[int, int], ...] = ()
    state: bytes = b""
    fetched: int = 0
    collated: int = 0
    new_memory: int = 0
    cpu: int = 0
    slowest: int = 0
    slowest_at: int = 0
    cpu_wait: int = 0
    remarks: bytes = b""


Message = Task | Epoch | Space | Bundle | Stop | Hello | Answer | Ping | InBlock


# surrogatepass: file names give lone surrogates. One packer for all threads: it calls back into no Python.
_PACKER = msgpack.Packer(unicode_errors="surrogatepass")


_pack: Callable[[tuple[Any, ...]], bytes] = _PACKER.pack


def packs(value: int) -> bool:
    """Whether an int fits msgpack's 64 bits."""
    return -(1 << 63) <= value < (1 << 64)


def seal(pickled: bytes, token: bytes) -> bytes:
    """A pickle with the pool's token before it."""
    return token + pickled


def unseal(sealed: bytes | memoryview, token: bytes) -> bytes:
    """The pickle behind the pool's token.

    Raises:
        ProtocolError: something else stands before it, so it must not be unpickled.
    """
    if not hmac.compare_digest(sealed[:TOKEN_BYTES], token):
        raise ProtocolError(f"{len(sealed)} bytes are not a pickle of this pool")
    return bytes(sealed[TOKEN_BYTES:])


def encode(message: Message, token: bytes = b"") -> bytes:
    """One frame for `message`.

    Args:
        message: the message.
        token: the pool's, for an index that has to be pickled. Only tasks need it.

    Raises:
        Exception: whatever pickling raises for an index that cannot be pickled.
    """
    if type(message) is Task:
        return encode_task(message, token)
    if type(message) is Answer:
        return _pack((VERSION, ANSWER, *message[:9], *message[10:]))
    return _pack((VERSION, _KINDS[type(message)], *message))


_KINDS: dict[type, int] = {
    Epoch: EPOCH,
    Space: SPACE,
    Bundle: BUNDLE,
    Stop: STOP,
    Hello: HELLO,
    Ping: PING,
    InBlock: IN_BLOCK,
}


def encode_task(task: Task, token: bytes) -> bytes:
    """One frame for a task; see `encode`. A plain value, and a list of plain values, travels as msgpack."""
    epoch, seq, attempt, index, *others = task
    if type(index) is Indices:
        opaque = tuple.__new__(msgpack.ExtType, (INTEGERS, index[0]))  # as `ExtType()`, without its checks
        return _pack((VERSION, TASK, epoch, seq, attempt, opaque, *others))
    if _PLAIN.issuperset(map(type, index)) if type(index) is list else type(index) in _PLAIN:
        try:
            return _pack((VERSION, TASK, epoch, seq, attempt, index, *others))
        except OverflowError:  # an int of more than 64 bits
            pass
    assert len(token) == TOKEN_BYTES, "a pickle travels behind the pool's token"
    opaque = msgpack.ExtType(PICKLED_INDEX, seal(pickle.dumps(index, pickle.HIGHEST_PROTOCOL), token))
    return _pack((VERSION, TASK, epoch, seq, attempt, opaque, *others))


def pass_on(message: Task | Epoch) -> bytes:
    """One frame for a message that came out of a frame: what is pickled in it stays closed."""
    if type(message) is Task and type(message.index) is Pickled:
        message = message._replace(index=msgpack.ExtType(PICKLED_INDEX, message.index.data))
        return _pack((VERSION, TASK, *message))
    return encode(message)


def decode_index(index: Any) -> Any:
    """An index as the sampler yielded it, of one that was not in a frame."""
    if type(index) is Indices:
        integers = array("q")
        integers.frombytes(index.data)
        return integers.tolist()
    return index


def load_index(index: Any, token: bytes) -> Any:
    """An index as the sampler yielded it, of one that came out of a frame.

    Raises:
        ProtocolError: it is a pickle, and not this pool's.
        Exception: whatever unpickling raises.
    """
    return pickle.loads(unseal(index.data, token)) if type(index) is Pickled else decode_index(index)
