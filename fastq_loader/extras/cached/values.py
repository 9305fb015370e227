"""Encodes values as bytes, and decodes them: to a copy that equals the function's result.

Runs in every process that calls a cached function. A value is a pickle, and beside it the bytes of its
tensors, arrays and images, which are read by one copy into new memory each time. A record is these with their
key.

    record      lengths, key, table of the parts, pickle; then the parts, each aligned

A tensor, an array, bytes or a text alone has no pickle.
"""

from __future__ import annotations

import functools
import io
import marshal
import pickle
import struct
import zlib
from typing import Any

import numpy as np
import torch

from fastq_loader.api import PLAIN_DTYPES, is_leaf, pickling, sample_seeds

#: Kinds of parts, which decide how a part is decoded. A buffer belongs to the pickle.
_TENSOR, _ARRAY, _BYTES, _TEXT, _BUFFER = "tabs-"
_DTYPES = {name: dtype for dtype, name in PLAIN_DTYPES.items()}
_BYTE = np.dtype(np.uint8)
_ALIGNMENT = 64
#: Lengths of the key, of the table and of the pickle.
_HEADER = struct.Struct("<IQQ")
#: Words of a block of `checksum`, and bytes from which on data have blocks.
_BLOCK, _LARGE = 512, 1 << 15
#: A pickle and the parts of a value: the arguments of `decode`.
Found = tuple[bytes, list[Any]]


class Encoded:
    """A value as bytes.

    Attributes:
        pickled: a pickle; empty if the value is its only part.
        table: for each part its kind, its size in bytes, and what else decoding needs; of types for marshal.
        parts: the bytes of tensors, arrays and images.
        has_tensors: whether there are tensors in it.

    Raises:
        UnpicklableError: a part cannot be pickled, or would come back as something else; names the part.
        RuntimeError: there is a non-leaf tensor that requires grad.
    """

    def __init__(self, value: Any) -> None:
        self.table: list[tuple[Any, ...]] = []
        self.parts: list[memoryview] = []
        self.has_tensors = False
        alone = self.part(value)
        if alone is None:
            self.pickled = self._pickled(value)
        else:
            (kind, *about), data = alone
            self.pickled, self.table, self.parts = b"", [(kind, data.nbytes, *about)], [data]

    def part(self, value: Any) -> Any:
        """The description of a value that is stored as its bytes, and these; None if it must be pickled."""
        made = _PARTS[type(value)](value) if type(value) in _PARTS else None
        self.has_tensors |= made is not None and made[0][0] == _TENSOR
        return made

    def keep(self, buffer: pickle.PickleBuffer) -> None:
        """Store a buffer of the pickle beside it."""
        data = buffer.raw()
        self.table.append((_BUFFER, data.nbytes))
        self.parts.append(data)

    def _pickled(self, value: Any) -> bytes:
        file = io.BytesIO()
        try:
            try:
                _Pickler(file, self).dump(value)
            except Exception:
                if not pickling.sends_by_value:
                    raise
                file = io.BytesIO()
                pickling.by_value(_Pickler)(file, self).dump(value)
        except (RuntimeError, MemoryError):
            raise
        except Exception as error:
            raise pickling.explain(value, error, "value") from error
        return file.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, encoded: Encoded) -> None:
        super().__init__(file, 5, buffer_callback=encoded.keep)
        self._encoded = encoded

    def reducer_override(self, value: Any) -> Any:
        if (part := self._encoded.part(value)) is not None:
            return _again, (pickle.PickleBuffer(part[1]), *part[0])
        if (
            isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and not value.is_nested
            and value.untyped_storage().nbytes() > value.nbytes  # a view: its part alone
        ):
            return value.clone().__reduce_ex__(5)  # type: ignore[no-untyped-call]
        return _reduced_image(value)


def _tensor_part(value: torch.Tensor) -> Any:
    if not is_leaf(value):
        return None
    dense = value.detach()
    if not dense.is_contiguous():
        dense = dense.clone(memory_format=torch.preserve_format)
    flat = dense.as_strided((dense.numel(),), (1,)) if dense.numel() else dense.reshape(-1)
    about = _TENSOR, PLAIN_DTYPES[value.dtype], tuple(value.shape), dense.stride()
    return about, _bytes_of(flat.view(torch.uint8).numpy())


def _array_part(value: np.ndarray) -> Any:
    # numpy's pickle loses the byte order of times.
    is_time = value.dtype.kind in "mM" and value.dtype.metadata is None
    if not is_leaf(value) and not is_time:
        return None
    dense = value if value.flags.c_contiguous else value.copy("K")
    order = tuple(sorted(range(dense.ndim), key=lambda axis: -dense.strides[axis]))
    flat = dense.transpose(order).reshape(-1)
    return (_ARRAY, value.dtype.str, dense.shape, dense.strides), _bytes_of(flat.view(np.uint8))


def _reduced_image(value: Any) -> Any:
    """How to pickle a PIL image that consists of its pixels, a palette, and what `info` and EXIF say."""
    kind = type(value)
    if not kind.__module__.startswith("PIL.") or not hasattr(value, "palette"):
        return NotImplemented
    palette = None if value.palette is None else value.palette.getdata()
    if (kind.__module__, kind.__name__) != ("PIL.Image", "Image"):  # a file's: PIL pickles it
        if palette is not None and value.palette.mode != "RGB":
            raise pickle.PicklingError("PIL loses the palette's transparency; return image.copy()")
        return NotImplemented
    exif, pixels = getattr(value, "_exif", None), pickle.PickleBuffer(value.tobytes())
    return _image, (pixels, value.mode, value.size, value.info, palette, exif and exif.tobytes())


_PARTS: dict[type, Any] = {
    torch.Tensor: _tensor_part,
    np.ndarray: _array_part,
    bytes: lambda value: ((_BYTES,), memoryview(value)),
    str: lambda value: ((_TEXT,), memoryview(value.encode("utf-8", "surrogatepass"))),
}


def _bytes_of(array: Any) -> memoryview:
    return memoryview(array).cast("B")


# ---- back ------------------------------------------------------------------------------------------------


def decode(pickled: bytes, parts: list[Any], renews: bool = False) -> Any:
    """Decode a value.

    Args:
        pickled, parts: from `read`.
        renews: whether encoded images in it are new samples, whose seeds are not the stored ones.

    Raises:
        Exception: whatever unpickling raises.
    """
    if not pickled:
        return parts[0]
    reading = sample_seeds.reading
    reading.renews = renews
    try:
        return pickle.loads(pickled, buffers=parts)
    finally:
        reading.renews = False


def _again(data: Any, kind: str, *about: Any) -> Any:
    """Called by the unpickler for a part, with its buffer."""
    return _MADE[kind](data, 0, len(data), False, *about)


def _tensor(
    data: memoryview, at: int, nbytes: int, copy: bool, name: str, shape: Any, strides: Any
) -> torch.Tensor:
    dtype = _DTYPES[name]
    if not nbytes:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return torch.frombuffer(_buffer(data, at, nbytes, copy), dtype=dtype).as_strided(shape, strides)


def _array(
    data: memoryview, at: int, nbytes: int, copy: bool, name: str, shape: Any, strides: Any
) -> np.ndarray:
    made: np.ndarray = np.ndarray(shape, _dtype(name), data, at, strides)
    return made.copy("K") if copy else made


def _buffer(data: memoryview, at: int, nbytes: int, copy: bool) -> np.ndarray:
    made: np.ndarray = np.ndarray((nbytes,), _BYTE, data, at)
    return made.copy() if copy else made


_dtype = functools.cache(np.dtype)
#: Called with the memory, the place of the part, its size, whether to copy, and the rest of the table.
_MADE: dict[str, Any] = {
    _TENSOR: _tensor,
    _ARRAY: _array,
    _BUFFER: _buffer,
    _BYTES: lambda data, at, nbytes, copy: bytes(data[at : at + nbytes]),
    _TEXT: lambda data, at, nbytes, copy: str(data[at : at + nbytes], "utf-8", "surrogatepass"),
}


def _image(data: Any, mode: str, size: Any, info: Any, palette: Any, exif: bytes | None) -> Any:
    from PIL import Image

    image = Image.frombytes(mode, size, data)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.info = info
    if exif is not None:  # not by `getexif`, which reads `info`
        image._exif = Image.Exif()
        image._exif.load(exif)
        image._exif._loaded = True
    return image


# ---- records ---------------------------------------------------------------------------------------------


def record(key: bytes, encoded: Encoded) -> tuple[list[Any], int]:
    """A value with its key. Returns the pieces that follow each other, and their size in bytes."""
    table, pickled = marshal.dumps(encoded.table, 2), encoded.pickled
    header = _HEADER.pack(len(key), len(table), len(pickled))
    pieces: list[Any] = [b"".join((header, key, table, pickled))]
    nbytes = len(pieces[0])
    for data in encoded.parts:
        pieces += [bytes(-nbytes % _ALIGNMENT), data]
        nbytes += -nbytes % _ALIGNMENT + data.nbytes
    return pieces, nbytes


def read(data: memoryview, at: int, key: bytes, copy: bool) -> Found | None:
    """The arguments of `decode`; None if the record is of another key. Runs no code of the user's.

    Args:
        data: the memory in which the record lies.
        at: where it begins.
        key: the key.
        copy: whether arrays are in new memory.
    """
    key_bytes, table_bytes, pickle_bytes = _HEADER.unpack_from(data, at)
    start = at + _HEADER.size
    end = start + key_bytes
    if data[start:end] != key:
        return None
    table = marshal.loads(data[end : end + table_bytes])
    end += table_bytes + pickle_bytes
    pickled, parts = bytes(data[end - pickle_bytes : end]) if pickle_bytes else b"", []
    for kind, nbytes, *about in table:
        end += (at - end) % _ALIGNMENT
        parts.append(_MADE[kind](data, end, nbytes, copy, *about))
        end += nbytes
    return pickled, parts


def checksum(data: memoryview) -> int:
    """CRC-32; of large data that of the sums of its blocks, which takes a fifth of the time."""
    if len(data) < _LARGE:
        return zlib.crc32(data)
    words = np.frombuffer(data, np.uint64, len(data) // 8)
    blocks = words[: len(words) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    return zlib.crc32(data[blocks.nbytes :], zlib.crc32(blocks.sum(1)))
