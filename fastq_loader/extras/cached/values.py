"""Encodes values as bytes, and decodes them: to a copy that equals the function's result.

Runs in every process that calls a cached function. A value is a pickle and the bytes of its tensors, arrays,
texts and images, which are read by one copy into new memory each time. A record is these with their key.

    record      lengths, checksum, sizes of the buffers, key, pickle; then the buffers, each aligned
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

from fastq_loader.api import PLAIN_DTYPES, is_leaf, pickling

#: Kinds of buffers, which decide how a buffer is decoded.
_TENSOR, _ARRAY, _BYTES, _TEXT, _IMAGE = "tabsi"
#: Bytes and texts that are shorter stay in the pickle.
_SHORT = 1024
_DTYPES = {name: dtype for dtype, name in PLAIN_DTYPES.items()}
_ALIGNMENT = 64
#: Length in bytes, checksum of what follows, number of buffers, lengths of the key and of the pickle.
_HEADER = struct.Struct("<QIIII")
HEADER_BYTES = _HEADER.size


class Encoded:
    """A value as bytes.

    Attributes:
        head: a pickle; or what describes the only buffer, by marshal.
        buffers: the bytes of tensors, arrays, long texts and images.
        has_tensors: whether some of them are tensors'.

    Raises:
        UnpicklableError: a part cannot be pickled, or would come back as something else; names the part.
        RuntimeError: there is a non-leaf tensor that requires grad.
    """

    def __init__(self, value: Any) -> None:
        self.buffers: list[memoryview] = []
        self.has_tensors = False
        self._numbers: dict[
            int, Any
        ] = {}  # id of an object → its description, and the object, to keep the id
        alone = self.described(value) if type(value) in (torch.Tensor, np.ndarray, bytes, str) else None
        self.head = self._pickled(value) if alone is None else marshal.dumps(alone, 2)

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
        if (known := self._numbers.get(id(value))) is not None:
            return known[0]
        kind = type(value)
        if kind in (bytes, str) and len(value) < _SHORT:
            return None
        part = _PARTS.get(kind, _image_part)(value)
        if part is None:
            return None
        about, data = part
        self.has_tensors |= about[0] == _TENSOR
        described = (about[0], len(self.buffers), *about[1:])
        self.buffers.append(data)
        self._numbers[id(value)] = described, value
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
    about = _IMAGE, value.mode, value.size, value.info, palette, exif and exif.tobytes()
    return about, memoryview(value.tobytes())


_PARTS: dict[type, Any] = {
    torch.Tensor: _tensor_part,
    np.ndarray: _array_part,
    bytes: lambda value: ((_BYTES,), memoryview(value)),
    str: lambda value: ((_TEXT,), memoryview(value.encode("utf-8", "surrogatepass"))),
}


def _bytes_of(array: Any) -> memoryview:
    return memoryview(array).cast("B")


# ---- back ------------------------------------------------------------------------------------------------


def decode(head: bytes, buffers: list[np.ndarray]) -> Any:
    """Decode a value; its tensors and arrays use the memory of the buffers.

    Raises:
        Exception: whatever unpickling raises.
    """
    if head[0] != 0x80:  # not a pickle
        return _made(marshal.loads(head), buffers)
    return _Unpickler(head, buffers).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, head: bytes, buffers: list[np.ndarray]) -> None:
        super().__init__(io.BytesIO(head))
        self._buffers = buffers
        self._made: dict[int, Any] = {}

    def persistent_load(self, described: Any) -> Any:
        number = described[1]
        if number not in self._made:
            self._made[number] = _made(described, self._buffers)
        return self._made[number]


def _made(described: Any, buffers: list[np.ndarray]) -> Any:
    kind, number, *about = described
    data = buffers[number]
    if kind == _TENSOR:
        name, shape, strides = about
        dtype = _DTYPES[name]
        flat = torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype)
        return flat.as_strided(shape, strides)
    if kind == _ARRAY:
        name, shape, strides = about
        return np.ndarray(shape, name, data, strides=strides)
    if kind == _BYTES:
        return data.tobytes()
    if kind == _TEXT:
        return data.tobytes().decode("utf-8", "surrogatepass")
    return _image(data.tobytes(), *about)


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


def record(key: bytes, encoded: Encoded, checked: bool) -> tuple[list[Any], int]:
    """A value with its key, and perhaps a checksum. Returns the pieces that follow each other, and their size
    in bytes."""
    sizes = _sizes(len(encoded.buffers)).pack(*[data.nbytes for data in encoded.buffers])
    pieces: list[Any] = [sizes, key, encoded.head]
    nbytes = HEADER_BYTES + len(sizes) + len(key) + len(encoded.head)
    for data in encoded.buffers:
        pieces += [bytes(-nbytes % _ALIGNMENT), data]
        nbytes += -nbytes % _ALIGNMENT + data.nbytes
    checksum = 0
    for piece in pieces if checked else ():
        checksum = zlib.crc32(piece, checksum)
    lengths = len(encoded.buffers), len(key), len(encoded.head)
    return [_HEADER.pack(nbytes, checksum, *lengths), *pieces], nbytes


@functools.cache
def _sizes(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


def length_of(header: Any) -> int:
    """Length in bytes of the record that begins with these bytes."""
    length: int = _HEADER.unpack_from(header)[0]
    return length


def read(record: memoryview, key: bytes, copy: bool, check: bool) -> tuple[bytes, list[np.ndarray]] | None:
    """The arguments of `decode`; None if the record is of another key.

    Args:
        record: the record, and perhaps what follows it.
        key: the key.
        copy: whether the buffers are in new memory.
        check: whether to compare the checksum.

    Raises:
        ValueError: the record is damaged.
    """
    try:
        length, checksum, count, key_bytes, head_bytes = _HEADER.unpack_from(record)
        sizes = _sizes(count).unpack_from(record, HEADER_BYTES)
    except struct.error as error:
        raise ValueError(f"a value is cut off: {error}") from None
    at = HEADER_BYTES + 8 * count
    if record[at : at + key_bytes] != key:
        return None
    at += key_bytes
    head, buffers = record[at : at + head_bytes].tobytes(), []
    at += head_bytes
    if length > len(record) or (check and zlib.crc32(record[HEADER_BYTES:length]) != checksum):
        raise ValueError("the checksum of a value is wrong")
    for size in sizes:
        at += -at % _ALIGNMENT
        buffer = np.frombuffer(record, np.uint8, size, at)
        buffers.append(buffer.copy() if copy else buffer)
        at += size
    return head, buffers
