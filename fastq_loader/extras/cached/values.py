"""Encodes values as bytes, and decodes them: to a copy that equals the function's result.

Runs in every process that calls a cached function. A value is a pickle, and beside it the bytes of its
tensors, arrays, texts and images, which are read by one copy into new memory each time. A record is these
with their key.

    record      lengths, checksum, key, table of the parts, pickle; then the parts, each aligned

A tensor, array or text alone has no pickle.
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

#: Kinds of parts, which decide how a part is decoded.
_TENSOR, _ARRAY, _BYTES, _TEXT = "tabs"
#: Bytes and texts that are shorter stay in the pickle.
_SHORT = 1024
_DTYPES = {name: dtype for dtype, name in PLAIN_DTYPES.items()}
_BYTE = np.dtype(np.uint8)
_ALIGNMENT = 64
#: Length in bytes, checksum of what follows, lengths of the key, of the table and of the pickle.
_HEADER = struct.Struct("<QIIQQ")
#: A pickle and the parts of a value: the arguments of `decode`.
Found = tuple[bytes, list[Any]]


class Encoded:
    """A value as bytes.

    Attributes:
        pickled: a pickle; empty if the value is its only part.
        table: for each part its kind, its size in bytes, and what else decoding needs; of types for marshal.
        parts: the bytes of tensors, arrays, long texts and images.

    Raises:
        UnpicklableError: a part cannot be pickled, or would come back as something else; names the part.
        RuntimeError: there is a non-leaf tensor that requires grad.
    """

    def __init__(self, value: Any) -> None:
        self.table: list[tuple[Any, ...]] = []
        self.parts: list[memoryview] = []
        # Object's id → its description in the pickle, and the object, to keep the id.
        self._described: dict[int, Any] = {}
        alone = type(value) in _PARTS and self.described(value) is not None
        self.pickled = b"" if alone else self._pickled(value)

    @property
    def has_tensors(self) -> bool:
        return any(kind == _TENSOR for kind, *_ in self.table)

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

    def described(self, value: Any) -> Any:
        """The description of a part that is stored as its bytes; None if it must be pickled."""
        if (known := self._described.get(id(value))) is not None:
            return known[0]
        kind = type(value)
        if kind in (bytes, str) and len(value) < _SHORT:
            return None
        made = _PARTS[kind](value) if kind in _PARTS else _image_part(value)
        if made is None:
            return None
        about, data, *image = made
        described: Any = (len(self.parts), *image) if image else len(self.parts)
        self.table.append((about[0], data.nbytes, *about[1:]))
        self.parts.append(data)
        self._described[id(value)] = described, value
        return described


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, encoded: Encoded) -> None:
        super().__init__(file, 5)
        self._encoded = encoded

    def persistent_id(self, value: Any) -> Any:
        return self._encoded.described(value)

    def reducer_override(self, value: Any) -> Any:
        if (
            isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and not value.is_nested
            and value.untyped_storage().nbytes() > value.nbytes  # a view: its part alone
        ):
            return value.clone().__reduce_ex__(5)  # type: ignore[no-untyped-call]
        return NotImplemented


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
    if not is_leaf(value):
        return None
    dense = value if value.flags.c_contiguous else value.copy("K")
    order = tuple(sorted(range(dense.ndim), key=lambda axis: -dense.strides[axis]))
    flat = dense.transpose(order).reshape(-1)
    return (_ARRAY, value.dtype.str, dense.shape, dense.strides), _bytes_of(flat.view(np.uint8))


def _image_part(value: Any) -> Any:
    """The part for a PIL image that consists of its pixels, a palette, and what `info` and EXIF say."""
    kind = type(value)
    if not kind.__module__.startswith("PIL.") or not hasattr(value, "palette"):
        return None
    palette = None if value.palette is None else value.palette.getdata()
    if (kind.__module__, kind.__name__) != ("PIL.Image", "Image"):  # a file's: PIL pickles it
        if palette is not None and value.palette.mode != "RGB":
            raise pickle.PicklingError("PIL loses the palette's transparency; return image.copy()")
        return None
    exif = getattr(value, "_exif", None)
    pixels = memoryview(value.tobytes())
    return (_BYTES,), pixels, value.mode, value.size, value.info, palette, exif and exif.tobytes()


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
        return _Unpickler(pickled, parts).load()
    finally:
        reading.renews = False


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, parts: list[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._parts = parts

    def persistent_load(self, described: Any) -> Any:
        if type(described) is int:
            return self._parts[described]
        number, *image = described
        if type(self._parts[number]) is bytes:
            self._parts[number] = _image(self._parts[number], *image)
        return self._parts[number]


def _tensor(
    data: memoryview, at: int, nbytes: int, copy: bool, name: str, shape: Any, strides: Any
) -> torch.Tensor:
    dtype = _DTYPES[name]
    if not nbytes:
        return torch.empty_strided(shape, strides, dtype=dtype)
    flat = torch.frombuffer(np.ndarray((nbytes,), _BYTE, data, at).copy(), dtype=dtype)
    return flat.as_strided(shape, strides)


def _array(
    data: memoryview, at: int, nbytes: int, copy: bool, name: str, shape: Any, strides: Any
) -> np.ndarray:
    made: np.ndarray = np.ndarray(shape, _dtype(name), data, at, strides)
    return made.copy("K") if copy else made


_dtype = functools.cache(np.dtype)
#: Called with the memory, the place of the part, its size, whether to copy, and the rest of the table.
_MADE: dict[str, Any] = {
    _TENSOR: _tensor,
    _ARRAY: _array,
    _BYTES: lambda data, at, nbytes, copy: bytes(data[at : at + nbytes]),
    _TEXT: lambda data, at, nbytes, copy: str(data[at : at + nbytes], "utf-8", "surrogatepass"),
}


def _image(data: bytes, mode: str, size: Any, info: Any, palette: Any, exif: bytes | None) -> Any:
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


def record(key: bytes, encoded: Encoded, checked: bool = False) -> tuple[list[Any], int]:
    """A value with its key, and perhaps a checksum. Returns the pieces that follow each other, and their size
    in bytes."""
    table, pickled = marshal.dumps(encoded.table, 2), encoded.pickled
    pieces: list[Any] = [b"".join((key, table, pickled))]
    nbytes = _HEADER.size + len(pieces[0])
    for data in encoded.parts:
        pieces += [bytes(-nbytes % _ALIGNMENT), data]
        nbytes += -nbytes % _ALIGNMENT + data.nbytes
    checksum = 0
    for piece in pieces if checked else ():
        checksum = zlib.crc32(piece, checksum)
    return [_HEADER.pack(nbytes, checksum, len(key), len(table), len(pickled)), *pieces], nbytes


def read(data: memoryview, at: int, key: bytes, copy: bool, check: bool = False) -> Found | None:
    """The arguments of `decode`; None if the record is of another key. Runs no code of the user's.

    Args:
        data: the memory in which the record lies.
        at: where it begins.
        key: the key.
        copy: whether arrays are in new memory.
        check: whether to compare the checksum.

    Raises:
        ValueError: the record is damaged.
    """
    if check and not _is_whole(data, at):
        raise ValueError("the checksum of a value is wrong")
    _, _, key_bytes, table_bytes, pickle_bytes = _HEADER.unpack_from(data, at)
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


def _is_whole(data: memoryview, at: int) -> bool:
    """Whether a record has its length and checksum."""
    if at + _HEADER.size > len(data):
        return False
    length, checksum, *_ = _HEADER.unpack_from(data, at)
    return len(data) >= at + length and zlib.crc32(data[at + _HEADER.size : at + length]) == int(checksum)
