"""Encodes values as bytes, and decodes them: to a copy that equals the function's result.

Pure, apart from numpy and torch; runs in every process that calls a cached function. Tensors, arrays, texts
and images are stored as their bytes and a short head; an object that contains them is pickled without them. A
value is read by one copy of its bytes, into new memory each time.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fastq_loader.api import PLAIN_DTYPES, is_leaf, pickling

#: Kinds of parts, which decide how a part is decoded.
_PICKLE, _TENSOR, _ARRAY, _BYTES, _TEXT, _IMAGE = "ptabsi"

#: Head and bytes of a part.
Part = tuple[tuple[Any, ...], memoryview]
_DTYPES = {name: dtype for dtype, name in PLAIN_DTYPES.items()}
_ALIGNMENT = 64


def encode(value: Any) -> tuple[bytes, list[tuple[int, memoryview]], int]:
    """Encode a value as bytes.

    Returns:
        Its head, its parts as (offset, bytes), and their total size in bytes with padding. Offsets count
        from the start of the first part.

    Raises:
        Exception: an error of pickling.
    """
    parts: list[Part] = []
    whole = _as_part(value)
    if whole is None:
        pickled = pickling.dump(value, lambda leaf: _add(parts, leaf))
        parts.append(((_PICKLE,), memoryview(pickled)))
    else:
        parts.append(whole)
    heads, places, at = [], [], 0
    for about, data in parts:
        at += -at % _ALIGNMENT
        heads.append((about[0], about[1:], at, data.nbytes))
        places.append((at, data))
        at += data.nbytes
    return pickle.dumps(heads, 5), places, at


def _add(parts: list[Part], leaf: Any) -> int | None:
    part = _as_part(leaf)
    if part is None:
        return None
    parts.append(part)
    return len(parts) - 1


def _as_part(value: Any) -> Part | None:
    """The part for a value that is stored as its bytes; None if it must be pickled."""
    kind = type(value)
    if kind is bytes:
        return (_BYTES,), memoryview(value)
    if kind is str:
        return (_TEXT,), memoryview(value.encode("utf-8", "surrogatepass"))
    if kind is torch.Tensor and is_leaf(value):
        dense = value.detach()
        if not dense.is_contiguous():
            dense = dense.clone(memory_format=torch.preserve_format)
        head = _TENSOR, PLAIN_DTYPES[value.dtype], tuple(value.shape), dense.stride()
        flat = dense.as_strided((dense.numel(),), (1,)) if dense.numel() else dense.reshape(-1)
        return head, _bytes_of(flat.view(torch.uint8).numpy())
    if kind is np.ndarray and is_leaf(value):
        dense = value if value.flags.c_contiguous else value.copy("K")
        order = tuple(sorted(range(dense.ndim), key=lambda axis: -dense.strides[axis]))
        flat = dense.transpose(order).reshape(-1)
        return (_ARRAY, value.dtype.str, dense.shape, dense.strides), _bytes_of(flat.view(np.uint8))
    if _is_image(value):
        return (_IMAGE, value.mode, value.size, value.info), memoryview(value.tobytes())
    return None


def _bytes_of(array: Any) -> memoryview:
    return memoryview(array).cast("B")


def _is_image(value: Any) -> bool:
    """Whether this is a PIL image that consists of its pixels: decoded, without a palette or a file."""
    kind = type(value)
    return (kind.__module__, kind.__name__) == ("PIL.Image", "Image") and value.mode not in ("P", "PA")


#: Decoded heads, which most values have in common.
_known: dict[bytes, Any] = {}
_MOST_KNOWN = 1024


def _learn(head: bytes) -> Any:
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[head] = heads = pickle.loads(head)
    return heads


#: Reads bytes of a value, as new or read-only memory; takes an offset and a number of bytes.
Read = Callable[[int, int], "np.ndarray"]


def decode(head: bytes, read: Read) -> Any:
    """Decode a value.

    Args:
        head: the head from `encode`.
        read: reads bytes of the value's parts.
    """
    parts: list[Any] = []
    heads = _known.get(head) or _learn(head)
    for kind, about, at, nbytes in heads:
        data = read(at, nbytes)
        if kind == _TENSOR:
            name, shape, strides = about
            flat = (
                torch.from_numpy(data).view(_DTYPES[name]) if nbytes else torch.empty(0, dtype=_DTYPES[name])
            )
            parts.append(flat.as_strided(shape, strides))
        elif kind == _ARRAY:
            name, shape, strides = about
            parts.append(np.ndarray(shape, name, data, strides=strides))
        else:
            parts.append(_others(kind, about, data, parts))
    return parts[-1]


def has_tensors(head: bytes) -> bool:
    """Whether a value has tensors that are stored as their bytes."""
    return any(kind == _TENSOR for kind, *_ in _learn(head))


def _others(kind: str, about: list[Any], data: np.ndarray, parts: list[Any]) -> Any:
    if kind == _BYTES:
        return data.tobytes()
    if kind == _TEXT:
        return data.tobytes().decode("utf-8", "surrogatepass")
    if kind == _IMAGE:
        from PIL import Image

        mode, size, info = about
        image = Image.frombytes(mode, size, data.tobytes())
        image.info = info
        return image
    return pickling.load(data.tobytes(), parts)
