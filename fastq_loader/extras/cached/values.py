"""Encodes values as bytes, and decodes them: to a copy that equals the function's result.

Runs in every process that calls a cached function. A value is a pickle of all but its tensors and arrays, and
the bytes of these; a contiguous tensor or array alone has an empty pickle. A record is a value with its key.

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

from fastq_loader.extras.images import sample_seeds
from fastq_loader.memory.nontemporal import address_of
from fastq_loader.packing import pickling
from fastq_loader.packing.flattener import PLAIN_DTYPES, is_leaf

_DTYPES = {name: dtype for dtype, name in PLAIN_DTYPES.items()}
#: By the bytes of a tensor's number: as what numpy reads it.
_READ_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
#: In the place of a tensor's dtype: an array; bytes that pickle asks for.
_ARRAY, _BUFFER = "", "buffer"
_BYTE = np.dtype(np.uint8)
_WORD, _ALIGNMENT = 8, 16
#: Bytes of a part from which on mapping its pages takes no more time than a copy: 2 MiB 372 and 362 us,
#: 1 MiB 159 and 120, on a machine with 2 cores.
MAPPED = 2 << 20
#: Words of a block of `checksum`, and bytes from which on data have blocks.
_BLOCK, _LARGE = 512, 1 << 15


class EncodedValue(NamedTuple):
    """A value as bytes.

    Attributes:
        form: for marshal; of each tensor and array its dtype for torch, and for numpy, its shape, strides in
            bytes, part, and where it begins in that.
        parts: bytes-like objects: the pickle, then the bytes of tensors and arrays.
        writer: number of who computed it, see `checks`.
        seconds: how long that took.
    """

    form: list[tuple[Any, ...]]
    parts: list[Any]
    writer: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(memoryview(part).nbytes for part in self.parts)


def encode(value: Any, writer: int = 0, seconds: float = 0.0) -> EncodedValue:
    """Encode a value.

    Raises:
        UnpicklableError: a part cannot be pickled, or would come back as something else; names the part.
        RuntimeError: there is a non-leaf tensor that requires grad.
    """
    if (alone := _as_array(value)) is not None and alone[1].flags.c_contiguous:
        name, array = alone
        form = [(name, array.dtype.str, array.shape, array.strides, 1, 0)]
        return EncodedValue(form, [b"", array.reshape(-1).view(_BYTE)], writer, seconds)
    arrays: list[tuple[str, np.ndarray]] = []
    file = io.BytesIO()
    try:
        _ValuePickler(file, arrays).dump(value)
    except (RuntimeError, MemoryError):
        raise
    except Exception as error:
        raise pickling.explain(value, error, "value") from error
    return EncodedValue(*_laid_out(file.getbuffer(), arrays), writer, seconds)


def _as_array(value: Any) -> tuple[str, np.ndarray] | None:
    """A tensor or an array as an array over the same memory, with its dtype for torch. None for a value that
    must be pickled."""
    if type(value) is torch.Tensor and is_leaf(value) and not vars(value):  # attributes that a user has set
        return PLAIN_DTYPES[value.dtype], value.view(_READ_AS[value.itemsize]).numpy()
    # numpy's pickle loses the byte order of times.
    if type(value) is np.ndarray and (
        is_leaf(value) or (value.dtype.kind in "mM" and value.dtype.metadata is None)
    ):
        return _ARRAY, value
    return None


class _ValuePickler(pickle.Pickler):
    """Pickles a value without the bytes of its tensors and arrays, which it adds to `arrays`."""

    def __init__(self, file: io.BytesIO, arrays: list[tuple[str, np.ndarray]]) -> None:
        super().__init__(file, 5, buffer_callback=self._add_buffer)
        self._arrays = arrays

    def _add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self._arrays.append((_BUFFER, np.frombuffer(buffer.raw(), _BYTE)))

    def reducer_override(self, value: Any) -> Any:
        if (array := _as_array(value)) is not None:
            self._arrays.append(array)
            return pickling.take, (len(self._arrays) - 1,)
        kind = type(value)
        if kind is torch.UntypedStorage:
            raise pickle.PicklingError("UntypedStorage: the tensors on it would lie elsewhere; return these")
        if kind.__module__.startswith("PIL.") and hasattr(value, "palette") and not _survives_pickle(value):
            raise pickle.PicklingError(
                f"{kind.__name__}: PIL's pickle loses frames, texts, changes by getexif(), and an empty or "
                "transparent palette; return image.copy(), image.convert('RGBA'), or set info['exif']"
            )
        return NotImplemented


def _survives_pickle(image: Any) -> bool:
    unpickled, palette = sys.modules["PIL.Image"].Image(), image.palette
    unpickled.info = image.info
    return (
        not (hasattr(type(image), "n_frames") or "n_frames" in vars(image))
        and (palette is None or (palette.mode == "RGB" and len(palette.palette) > 0))
        and (vars(image).get("_exif") is None or dict(unpickled.getexif()) == dict(image.getexif()))
    )


def _laid_out(pickled: Any, arrays: list[tuple[str, np.ndarray]]) -> tuple[list[Any], list[Any]]:
    """The form and the parts of a value. Arrays that overlap stay views of one part, which has all bytes from
    the first to the last."""
    groups: list[tuple[int, int, list[int]]] = []
    for low, high, number in sorted([(*_span(array), number) for number, (_, array) in enumerate(arrays)]):
        if groups and low < groups[-1][1]:
            first, last, members = groups.pop()
            groups.append((first, max(last, high), [*members, number]))
        else:
            groups.append((low, high, [number]))
    form: list[Any] = [None] * len(arrays)
    parts = [pickled]
    for low, high, members in groups:
        held = [arrays[number] for number in members]
        if len(held) > 1:
            low = low // _ALIGNMENT * _ALIGNMENT  # in the page of the first byte
        elif held[0][1].nbytes != high - low:
            held = [(held[0][0], held[0][1].copy("K"))]  # each number once, and nothing between
            low, high = _span(held[0][1])
        for number, (name, array) in zip(members, held, strict=True):
            begin = address_of(array) - low
            form[number] = name, array.dtype.str, array.shape, array.strides, len(parts), begin
        parts.append(np.asarray(Writable(held, low, high - low)))
    return form, parts


def _span(array: np.ndarray) -> tuple[int, int]:
    """Where an array lies in memory."""
    at = address_of(array)
    if not array.size or array.flags.c_contiguous:
        return at, at + array.nbytes
    ends = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    return at + sum(min(end, 0) for end in ends), at + sum(max(end, 0) for end in ends) + array.itemsize


# ---- back ------------------------------------------------------------------------------------------------


def decode(encoded: EncodedValue, renews: bool = False) -> Any:
    """Decode a value.

    Args:
        encoded: from `read`.
        renews: whether encoded images in it are new samples, whose seeds are not the stored ones.

    Raises:
        Exception: whatever unpickling raises.
    """
    pickled = encoded.parts[0]
    leaves: list[Any] = []
    buffers: list[Any] = []
    for name, dtype, shape, strides, part, begin in encoded.form:
        data = encoded.parts[part]
        if name in _DTYPES and not data.flags.writeable:  # as arrays are without a copy; tensors are not
            data = np.asarray(Writable(data, address_of(data), len(data)))
        array: Any = np.ndarray(shape, _dtype(dtype), data, begin, strides)
        leaves.append(torch.from_numpy(array).view(_DTYPES[name]) if name in _DTYPES else array)
        if name == _BUFFER:
            buffers.append(array)
    if not len(pickled):
        return leaves[0]
    reading = sample_seeds.reading
    reading.renews = renews
    try:
        return pickling.load(pickled, leaves, buffers)
    finally:
        reading.renews = False


_dtype = functools.cache(np.dtype)


class Writable:
    """The owner of an array of bytes that can be written to, which keeps what holds them."""

    def __init__(self, holder: Any, address: int, nbytes: int) -> None:
        self._holder = holder
        where = address, False
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": where}


# ---- records ---------------------------------------------------------------------------------------------


def record(key: bytes, encoded: EncodedValue) -> tuple[list[Any], int]:
    """A value with its key. Returns the pieces that follow each other, and their size in bytes."""
    form, parts, *writer = encoded
    head = marshal.dumps((key, form, [*map(len, parts)], writer), 2)
    pieces: list[Any] = [len(head).to_bytes(_WORD, "little") + head]
    nbytes = _WORD + len(head)
    for part in parts:
        pieces += [bytes(-nbytes % _ALIGNMENT), part]
        nbytes += -nbytes % _ALIGNMENT + len(part)
    return pieces, nbytes


def read(data: memoryview, at: int, key: bytes, copy: bool, private: Any = None) -> EncodedValue | None:
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
    pickled, *arrays = sizes
    end += (at - end) % _ALIGNMENT
    parts: list[Any] = [bytes(data[end : end + pickled])]
    end += pickled
    for nbytes in arrays:
        end += (at - end) % _ALIGNMENT
        part = None if copy or private is None or nbytes < MAPPED else private(end, end + nbytes)
        if part is None:
            part = np.ndarray((nbytes,), _BYTE, data, end).copy()
        part.flags.writeable = copy
        parts.append(part)
        end += nbytes
    return EncodedValue(form, parts, *writer)


def checksum(data: memoryview) -> int:
    """CRC-32; of large data that of the sums of its blocks, which takes a fifth of the time."""
    if len(data) < _LARGE:
        return zlib.crc32(data)
    words = np.frombuffer(data, np.uint64, len(data) // 8)
    blocks = words[: len(words) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    return zlib.crc32(data[blocks.nbytes :], zlib.crc32(blocks.sum(1)))
