"""Encodes values as bytes, and decodes them: to a copy that equals the function's result.

Runs in every process that calls a cached function. A value is a form and parts: the bytes of tensors, arrays
and images, and a pickle of the rest. A tensor or an array alone is one part, and a number or a text has none.
A record is a value with its key.

    record      length of the head; the head for marshal: key, form, sizes of the parts; the parts, aligned
"""

from __future__ import annotations

import functools
import io
import marshal
import pickle
import sys
import zlib
from typing import Any

import numpy as np
import torch

from fastq_loader.extras.cached.keys import PLAIN
from fastq_loader.extras.images import sample_seeds
from fastq_loader.packing import pickling
from fastq_loader.packing.pickling import PLAIN_DTYPES, is_leaf

_DTYPES = {name: dtype for dtype, name in PLAIN_DTYPES.items()}
_BYTE = np.dtype(np.uint8)
#: Bytes of a value from which on it is no part of the head: marshal has 31 bits for a length.
_LARGEST = 1 << 30
_WORD, _ALIGNMENT = 8, 16
#: Words of a block of `checksum`, and bytes from which on data have blocks.
_BLOCK, _LARGE = 512, 1 << 15
#: The form and the parts of a value: the arguments of `decode`.
Found = tuple[tuple[Any, ...], list[Any]]


class Encoded:
    """A value as bytes.

    Attributes:
        form: name of the function that decodes it, and its arguments behind the parts; for marshal.
        parts: bytes-like objects.
        has_tensors: whether there are tensors in it.

    Raises:
        UnpicklableError: a part cannot be pickled, or would come back as something else; names the part.
        RuntimeError: there is a non-leaf tensor that requires grad.
    """

    def __init__(self, value: Any) -> None:
        self.parts: list[Any] = []
        self.has_tensors = False
        if type(value) in PLAIN and sys.getsizeof(value) < _LARGEST:
            self.form: tuple[Any, ...] = _itself.__name__, value
        elif (part := self.part(value)) is not None:
            function, (data, *about) = part
            self.form, self.parts = (function.__name__, *about), [data]
        else:
            pickled = self._pickled(value)
            self.form, self.parts = (_unpickled.__name__,), [pickled, *self.parts]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(memoryview(part).nbytes for part in self.parts)

    def part(self, value: Any) -> Any:
        """A function that makes a tensor or an array, and its arguments: bytes, and what is for marshal. None
        for a value that must be pickled."""
        take_apart = _PARTS.get(type(value))
        self.has_tensors |= take_apart is _tensor_part
        return None if take_apart is None else take_apart(value)

    def _pickled(self, value: Any) -> memoryview:
        file = io.BytesIO()
        try:
            try:
                _Pickler(file, self).dump(value)
            except Exception:
                if not pickling.sends_by_value:
                    raise
                file = io.BytesIO()
                self.parts.clear()
                pickling.by_value(_Pickler)(file, self).dump(value)
        except (RuntimeError, MemoryError):
            raise
        except Exception as error:
            raise pickling.explain(value, error, "value") from error
        return file.getbuffer()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, encoded: Encoded) -> None:
        super().__init__(file, 5, buffer_callback=lambda buffer: encoded.parts.append(buffer.raw()))
        self._encoded = encoded

    def reducer_override(self, value: Any) -> Any:
        if (part := self._encoded.part(value)) is not None:
            function, (data, *about) = part
            return function, (pickle.PickleBuffer(data), *about)
        if (
            isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and not value.is_nested
            and value.untyped_storage().nbytes() > value.nbytes  # a view: its part alone
        ):
            part = value.clone()
            vars(part).update(vars(value))
            return part.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        return _reduced_image(value)


def _tensor_part(value: torch.Tensor) -> Any:
    if not is_leaf(value) or vars(value):  # attributes that a user has set
        return None
    dense = value.detach()
    if not dense.is_contiguous():
        dense = dense.clone(memory_format=torch.preserve_format)
    flat = dense.as_strided((dense.numel(),), (1,)) if dense.numel() else dense.reshape(-1)
    return _tensor, (
        flat.view(torch.uint8).numpy(),
        PLAIN_DTYPES[value.dtype],
        tuple(value.shape),
        dense.stride(),
    )


def _array_part(value: np.ndarray) -> Any:
    # numpy's pickle loses the byte order of times.
    is_time = value.dtype.kind in "mM" and value.dtype.metadata is None
    if not is_leaf(value) and not is_time:
        return None
    dense = value if value.flags.c_contiguous else value.copy("K")
    order = tuple(sorted(range(dense.ndim), key=lambda axis: -dense.strides[axis]))
    flat = dense.transpose(order).reshape(-1)
    return _array, (flat.view(np.uint8), value.dtype.str, dense.shape, dense.strides)


_PARTS: dict[type, Any] = {torch.Tensor: _tensor_part, np.ndarray: _array_part}


def _reduced_image(value: Any) -> Any:
    """How to pickle a PIL image that consists of its pixels, a palette, and what `info` and EXIF say."""
    kind = type(value)
    if not kind.__module__.startswith("PIL.") or not hasattr(value, "palette"):
        return NotImplemented
    palette = None if value.palette is None else value.palette.getdata()
    if (kind.__module__, kind.__name__) != ("PIL.Image", "Image"):  # a file's: PIL pickles it
        if hasattr(value, "tag_v2") or (palette is not None and value.palette.mode != "RGB"):
            text = "PIL loses a palette's transparency, and the tags of a TIFF file; return image.copy()"
            raise pickle.PicklingError(text)
        return NotImplemented
    exif, pixels = getattr(value, "_exif", None), pickle.PickleBuffer(value.tobytes())
    return _image, (pixels, value.mode, value.size, value.info, palette, exif and exif.tobytes())


# ---- back ------------------------------------------------------------------------------------------------


def decode(form: tuple[Any, ...], parts: list[Any], renews: bool = False) -> Any:
    """Decode a value.

    Args:
        form, parts: from `read`.
        renews: whether encoded images in it are new samples, whose seeds are not the stored ones.

    Raises:
        Exception: whatever unpickling raises.
    """
    reading = sample_seeds.reading
    reading.renews = renews
    try:
        return _FUNCTIONS[form[0]](*parts, *form[1:])
    finally:
        reading.renews = False


def _itself(value: Any) -> Any:
    return value


def _tensor(data: np.ndarray, name: str, shape: Any, strides: Any) -> torch.Tensor:
    dtype = _DTYPES[name]
    if not len(data):
        return torch.empty_strided(shape, strides, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, strides)


def _array(data: np.ndarray, name: str, shape: Any, strides: Any) -> Any:
    return np.ndarray(shape, _dtype(name), data, 0, strides)


def _unpickled(pickled: Any, *buffers: Any) -> Any:
    return pickle.loads(pickled, buffers=buffers)


_dtype = functools.cache(np.dtype)
_FUNCTIONS: dict[str, Any] = {each.__name__: each for each in (_itself, _tensor, _array, _unpickled)}


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
    parts = [memoryview(part).cast("B") for part in encoded.parts]
    head = marshal.dumps((key, encoded.form, [part.nbytes for part in parts]), 2)
    pieces: list[Any] = [len(head).to_bytes(_WORD, "little") + head]
    nbytes = _WORD + len(head)
    for part in parts:
        pieces += [bytes(-nbytes % _ALIGNMENT), part]
        nbytes += -nbytes % _ALIGNMENT + part.nbytes
    return pieces, nbytes


def read(data: memoryview, at: int, key: bytes, copy: bool) -> Found | None:
    """The arguments of `decode`; None if the record is of another key. Runs no code of the user's.

    Args:
        data: the memory in which the record lies.
        at: where it begins.
        key: the key.
        copy: whether the parts are in new memory.
    """
    end = at + _WORD + int.from_bytes(data[at : at + _WORD], "little")
    its_key, form, sizes = marshal.loads(data[at + _WORD : end])
    if its_key != key:
        return None
    parts: list[Any] = []
    for nbytes in sizes:
        end += (at - end) % _ALIGNMENT
        part: np.ndarray = np.ndarray((nbytes,), _BYTE, data, end)
        parts.append(part.copy() if copy else part)
        end += nbytes
    return form, parts


def checksum(data: memoryview) -> int:
    """CRC-32; of large data that of the sums of its blocks, which takes a fifth of the time."""
    if len(data) < _LARGE:
        return zlib.crc32(data)
    words = np.frombuffer(data, np.uint64, len(data) // 8)
    blocks = words[: len(words) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    return zlib.crc32(data[blocks.nbytes :], zlib.crc32(blocks.sum(1)))
