"""A value as bytes, and back: equal to what the function returned, and a copy.

Pure, but for numpy and torch. Tensors, arrays, texts and images are their bytes behind a short head;
whatever holds them is pickled without them. A value is read by one copy of its bytes, into memory that is
new each time.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fastq_loader.packing import pickling
from fastq_loader.packing.pickling import PLAIN_DTYPES, is_leaf

#: How a part is read again.
_PICKLE, _TENSOR, _ARRAY, _BYTES, _TEXT, _IMAGE = "ptabsi"

#: Its head, and what its bytes are.
Part = tuple[tuple[Any, ...], memoryview]
_DTYPES = {name: dtype for dtype, name in PLAIN_DTYPES.items()}
_ALIGNMENT = 64


def encode(value: Any) -> tuple[bytes, list[tuple[int, memoryview]], int]:
    """A value as bytes.

    Returns:
        Its head, its parts, each with the place where it begins behind the head, and how many bytes they
        take.

    Raises:
        Exception: what pickling raises.
    """
    parts: list[Part] = []
    whole = _plain(value)
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
    part = _plain(leaf)
    if part is None:
        return None
    parts.append(part)
    return len(parts) - 1


def _plain(value: Any) -> Part | None:
    """A value that is its bytes; None: it is not."""
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
    """Whether this is an image of PIL's that is its pixels: decoded, without a palette or a file."""
    kind = type(value)
    return (kind.__module__, kind.__name__) == ("PIL.Image", "Image") and value.mode not in ("P", "PA")


#: Heads that were read, which most values have in common.
_known: dict[bytes, Any] = {}
_MOST_KNOWN = 1024


def _learn(head: bytes) -> Any:
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[head] = heads = pickle.loads(head)
    return heads


#: Gives the bytes of a value from a place on: new memory, or memory that nobody may write to.
Read = Callable[[int, int], "np.ndarray"]


def decode(head: bytes, read: Read) -> Any:
    """The value.

    Args:
        head: as `encode` has given it.
        read: gives so many bytes from a place on.
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
    """Whether a value has tensors that are read as such."""
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
