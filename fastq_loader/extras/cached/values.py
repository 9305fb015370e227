"""Encodes values as bytes, and decodes them: to a copy that equals the function's result.

Runs in every process that calls a cached function. A value is a form and parts: the bytes of tensors, arrays
and images, and a pickle of the rest. A tensor or an array alone is one part, and a number or a text has none.
A record is a value with its key.

    record      length of the head; the head for marshal: key, form, sizes of the parts, writer; the parts
"""

from __future__ import annotations

import functools
import io
import marshal
import pickle
import sys
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch

from fastq_loader.extras.cached.keys import PLAIN
from fastq_loader.extras.images import sample_seeds
from fastq_loader.packing import pickling
from fastq_loader.packing.flattener import PLAIN_DTYPES, is_leaf

_DTYPES = {name: dtype for dtype, name in PLAIN_DTYPES.items()}
_BYTE = np.dtype(np.uint8)
#: Bytes of a value from which on it is no part of the head: marshal has 31 bits for a length.
_LARGEST = 1 << 30
_WORD, _ALIGNMENT = 8, 16
#: Bytes of a part from which on mapping its pages takes no more time than a copy: 2 MiB 372 and 362 us,
#: 1 MiB 159 and 120, on a machine with 2 cores.
MAPPED = 2 << 20
#: By the address of memory: the tensors and arrays that lie in it, by their ids, with their addresses.
_Views = dict[int, dict[int, tuple[int, int]]]
#: Words of a block of `checksum`, and bytes from which on data have blocks.
_BLOCK, _LARGE = 512, 1 << 15


class Writer(NamedTuple):
    """Who computed a value.

    Attributes:
        number: see `checks`.
        seconds: how long it took.
    """

    number: int
    seconds: float


NOBODY = Writer(0, 0.0)


class Found(NamedTuple):
    """A value that was read, still as bytes.

    Attributes:
        form, parts: see `EncodedValue`.
        writer: who computed it.
    """

    form: tuple[Any, ...]
    parts: list[Any]
    writer: Writer


class EncodedValue:
    """A value as bytes.

    Args:
        value: the value.
        writer: who computed it.

    Attributes:
        form: name of the function that decodes it, and its arguments behind the parts; for marshal.
        parts: bytes-like objects.

    Raises:
        UnpicklableError: a part cannot be pickled, or would come back as something else; names the part.
        RuntimeError: there is a non-leaf tensor that requires grad.
    """

    def __init__(self, value: Any, writer: Writer = NOBODY) -> None:
        self.writer = writer
        self.parts: list[Any] = []
        if type(value) in PLAIN and sys.getsizeof(value) < _LARGEST:
            self.form: tuple[Any, ...] = _itself.__name__, value
        elif (part := _part(value)) is not None:
            function, data, *about = part
            self.form, self.parts = (function.__name__, 0, *about), [data]
        else:
            self.form = (_unpickled.__name__,)
            self.parts = [self._pickled(value), *self.parts]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(memoryview(part).nbytes for part in self.parts)

    def _pickled(self, value: Any) -> memoryview:
        """Pickle a value; once more if parts of it are views of the same memory, which stay views of it."""
        seen: _Views = {}
        try:
            for views in {}, seen:
                file = io.BytesIO()
                self.parts.clear()
                shared = {key: [*of.values()] for key, of in views.items() if len(of) > 1}
                _ValuePickler(file, self.parts, seen, shared).dump(value)
                if all(len(of) == 1 for of in seen.values()):
                    break
        except (RuntimeError, MemoryError):
            raise
        except Exception as error:
            raise pickling.explain(value, error, "value") from error
        return file.getbuffer()


class _ValuePickler(pickle.Pickler):
    """Pickles a value without the bytes of its tensors and arrays.

    Args:
        file: the pickle.
        parts: gets these bytes.
        seen: gets, for the memory that tensors or arrays lie in, the ids of these and where each lies.
        shared: where they lie in memory that has several of them: from the first to the last is one part.
    """

    def __init__(self, file: io.BytesIO, parts: list[Any], seen: _Views, shared: dict[int, Any]) -> None:
        super().__init__(file, 5, buffer_callback=lambda buffer: parts.append(buffer.raw()))
        self._seen, self._shared = seen, shared
        self._wholes: dict[int, np.ndarray] = {}

    def reducer_override(self, value: Any) -> Any:
        if (part := _part(value)) is not None:
            function, data, *about = part
            whole = _whole(value)
            key = whole.__array_interface__["data"][0]
            if value is self._wholes.get(key):
                return _itself, (pickle.PickleBuffer(data),)
            begin, strides, bounds = _layout(value)
            if data.nbytes:
                self._seen.setdefault(key, {})[id(value)] = bounds
            if key not in self._shared or not data.nbytes:
                return function, (pickle.PickleBuffer(data), 0, *about)
            low = (min(each[0] for each in self._shared[key]) - key) // _ALIGNMENT * _ALIGNMENT
            high = max(each[1] for each in self._shared[key]) - key
            # The same object each time, so that it is pickled once.
            whole = self._wholes.setdefault(key, whole[low:high])
            return function, (whole, begin - key - low, *about[:-1], strides)
        kind = type(value)
        if kind is np.ma.MaskedArray:  # its own pickle makes a mask of an absent one
            return _masked, (value.data, value.mask, value._fill_value, value.hardmask)
        if kind is torch.UntypedStorage:
            raise pickle.PicklingError("UntypedStorage: the tensors on it would lie elsewhere; return these")
        if kind.__module__.startswith("PIL.") and hasattr(value, "palette"):
            has_frames = hasattr(kind, "n_frames") or "n_frames" in vars(value)
            if has_frames or (value.palette is not None and value.palette.mode != "RGB"):
                raise pickle.PicklingError(
                    f"{kind.__name__}: PIL's pickle loses the frames and texts of a file, and a palette's "
                    "transparency; return image.copy(), or image.convert('RGB')"
                )
        return NotImplemented


def _part(value: Any) -> Any:
    """The function that makes a tensor or an array, its bytes, and plain values for marshal. None for a value
    that must be pickled."""
    dense: Any
    if type(value) is torch.Tensor:
        if not is_leaf(value) or vars(value):  # attributes that a user has set
            return None
        dense = value.detach()
        if not dense.is_contiguous():
            dense = dense.clone(memory_format=torch.preserve_format)
        flat = dense.as_strided((dense.numel(),), (1,))
        data = flat.view(torch.uint8).numpy()
        return _tensor, data, PLAIN_DTYPES[value.dtype], tuple(value.shape), dense.stride()
    # numpy's pickle loses the byte order of times.
    if type(value) is np.ndarray and (
        is_leaf(value) or (value.dtype.kind in "mM" and value.dtype.metadata is None)
    ):
        dense = value if value.flags.c_contiguous else value.copy("K")
        order = tuple(sorted(range(dense.ndim), key=lambda axis: -dense.strides[axis]))
        flat = dense.transpose(order).reshape(-1)
        return _array, flat.view(np.uint8), value.dtype.str, dense.shape, dense.strides
    return None


def _layout(value: Any) -> tuple[int, tuple[int, ...], tuple[int, int]]:
    """The address of the first number of a tensor or an array, its strides, and where its bytes lie."""
    if isinstance(value, torch.Tensor):
        begin, strides, of_bytes = value.data_ptr(), value.stride(), value.itemsize
    else:
        begin, strides, of_bytes = value.ctypes.data, value.strides, 1
    steps = [(size - 1) * step * of_bytes for size, step in zip(value.shape, strides, strict=True)]
    ends = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + value.itemsize
    return begin, strides, (begin + ends[0], begin + ends[1])


def _whole(value: Any) -> np.ndarray:
    """All bytes of the memory that a tensor or an array lies in."""
    if isinstance(value, torch.Tensor):
        return torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).numpy()
    while isinstance(value.base, np.ndarray) and (
        value.base.flags.c_contiguous or value.base.flags.f_contiguous
    ):
        value = value.base
    return np.asarray(value.reshape(-1, order="A").view(np.uint8))


# ---- back ------------------------------------------------------------------------------------------------


def decode(found: Found, renews: bool = False) -> Any:
    """Decode a value.

    Args:
        found: from `read`.
        renews: whether encoded images in it are new samples, whose seeds are not the stored ones.

    Raises:
        Exception: whatever unpickling raises.
    """
    reading = sample_seeds.reading
    reading.renews = renews
    try:
        return _FUNCTIONS[found.form[0]](*found.parts, *found.form[1:])
    finally:
        reading.renews = False


def _itself(value: Any) -> Any:
    return value


class Writable:
    """The owner of an array of bytes that can be written to, which keeps what holds them."""

    def __init__(self, holder: Any, address: int, nbytes: int) -> None:
        self._holder = holder
        where = address, False
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": where}


def _tensor(data: np.ndarray, begin: int, name: str, shape: Any, strides: Any) -> torch.Tensor:
    dtype = _DTYPES[name]
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype)
    count = (len(data) - begin) // dtype.itemsize
    if not data.flags.writeable:  # as arrays are without a copy; tensors are not, and torch would warn
        data = np.asarray(Writable(data, data.ctypes.data, len(data)))
    return torch.frombuffer(data, dtype=dtype, count=count, offset=begin).as_strided(shape, strides)


def _array(data: np.ndarray, begin: int, name: str, shape: Any, strides: Any) -> Any:
    return np.ndarray(shape, _dtype(name), data, begin, strides)


def _masked(data: Any, mask: Any, fill: Any, is_hard: bool) -> Any:
    return np.ma.MaskedArray(data, mask, fill_value=fill, hard_mask=is_hard)


def _unpickled(pickled: Any, *buffers: Any) -> Any:
    return pickle.loads(pickled, buffers=buffers)


_dtype = functools.cache(np.dtype)
_FUNCTIONS: dict[str, Any] = {each.__name__: each for each in (_itself, _tensor, _array, _unpickled)}


# ---- records ---------------------------------------------------------------------------------------------


def record(key: bytes, encoded: EncodedValue) -> tuple[list[Any], int]:
    """A value with its key. Returns the pieces that follow each other, and their size in bytes."""
    parts = [memoryview(part).cast("B") for part in encoded.parts]
    head = marshal.dumps((key, encoded.form, [part.nbytes for part in parts], tuple(encoded.writer)), 2)
    pieces: list[Any] = [len(head).to_bytes(_WORD, "little") + head]
    nbytes = _WORD + len(head)
    for part in parts:
        pieces += [bytes(-nbytes % _ALIGNMENT), part]
        nbytes += -nbytes % _ALIGNMENT + part.nbytes
    return pieces, nbytes


def read(data: memoryview, at: int, key: bytes, copy: bool, private: Any = None) -> Found | None:
    """Read a value; None if the record is of another key. Runs no code of the user's.

    Args:
        data: the memory in which the record lies.
        at: where it begins.
        key: the key.
        copy: whether its arrays can be written to.
        private: maps bytes (begin, end) of the memory so that writing to them changes nothing for others;
            None: its parts are always copied.
    """
    end = at + _WORD + int.from_bytes(data[at : at + _WORD], "little")
    its_key, form, sizes, writer = marshal.loads(data[at + _WORD : end])
    if its_key != key:
        return None
    parts: list[Any] = []
    for nbytes in sizes:
        end += (at - end) % _ALIGNMENT
        part: np.ndarray = np.ndarray((nbytes,), _BYTE, data, end)
        mapped = None if copy or private is None or nbytes < MAPPED else private(end, end + nbytes)
        part = part.copy() if mapped is None else mapped
        part.flags.writeable = copy
        parts.append(part)
        end += nbytes
    return Found(form, parts, Writer(*writer))


def checksum(data: memoryview) -> int:
    """CRC-32; of large data that of the sums of its blocks, which takes a fifth of the time."""
    if len(data) < _LARGE:
        return zlib.crc32(data)
    words = np.frombuffer(data, np.uint64, len(data) // 8)
    blocks = words[: len(words) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    return zlib.crc32(data[blocks.nbytes :], zlib.crc32(blocks.sum(1)))
