"""Parts of a batch, for comparison: types, dtypes, shapes, strides and values.

Runs wherever batches are compared. A part is plain data, so it can be sent between processes.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import re
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.ma import MaskedArray  # numpy would at its first use, while another thread may fork

from fastq_loader.packing.pickling import parts_of

#: Types whose `repr` is their whole value.
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, FunctionType)
#: Containers that have no parts only if they are empty.
_EMPTY = (list, tuple, dict, set, frozenset, deque, np.ndarray)
#: Depth to which nested objects are taken apart.
_DEEPEST = 50
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
#: Methods by which a class says how it is pickled.
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")


#: A part of an object: the form of its place, the key in that, and the part.
_Part = tuple[str, Any, Any]


class ComparedLeaf(NamedTuple):
    """A part of a batch.

    Attributes:
        path: its place in the batch: "batch[0]['image']".
        kind: its type; for tensors and arrays also dtype, shape and strides.
        data: its values, as the bytes of memory or of text.
        dtype: torch's or numpy's dtype of values in memory.
        shape: shape of values in memory.
        opaque: whether its values are unknown: it is not a container and cannot be pickled.
    """

    path: str
    kind: str
    data: bytes = b""
    dtype: Any = None
    shape: tuple[int, ...] = ()
    opaque: bool = False


def leaves(value: Any, path: str = "batch", above: tuple[int, ...] = ()) -> Iterator[ComparedLeaf]:
    """Take a batch apart, containers before their contents. `above`: ids of the objects around `value`."""
    if type(value) in (bool, int, float, str):  # most parts of annotations
        yield ComparedLeaf(path, type(value).__name__, repr(value).encode(errors="surrogatepass"))
        return
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    inner: list[_Part] = []
    if isinstance(value, torch.Tensor):
        yield _tensor(value, path, kind)
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        about = f"{kind} {value.dtype}{list(value.shape)}, strides {value.strides}"
        # Under a mask, which is compared as an attribute, may be anything.
        data = value.filled(0) if isinstance(value, MaskedArray) else value
        yield ComparedLeaf(path, about, data.tobytes(), value.dtype, value.shape)
    else:
        leaf, inner = _object(value, path, kind, above)
        yield leaf
    if (own := getattr(value, "__dict__", None)) and not isinstance(value, type) and not inner:
        inner = [(".__dict__", "", dict(own))]  # attributes of a subclass
    for form, key, member in inner:
        yield from leaves(member, path + form.format(key), (*above, id(value)))


def _object(value: Any, path: str, kind: str, above: tuple[int, ...]) -> tuple[ComparedLeaf, list[_Part]]:
    known = isinstance(value, _ATOMS) or id(value) in above
    inner = [] if known else _inside(value)
    reduced = None if known or inner or type(value) in _EMPTY else _reduced(value, above)
    text = f"of {len(inner)}" if inner else "" if reduced else _ADDRESS.sub("", repr(value))
    leaf = ComparedLeaf(path, kind, text.encode(errors="surrogatepass"), opaque=reduced == ())
    return leaf, [*inner, (" as it is pickled", "", reduced)] if reduced else inner


def _reduced(value: Any, above: tuple[int, ...]) -> Any:
    """Parts from which a pickle of the object would be made; () if it cannot be pickled."""
    if len(above) > _DEEPEST:
        return ()
    registered: Any = copyreg.dispatch_table.get(type(value))
    try:
        parts = value.__reduce_ex__(4) if registered is None else registered(value)
    except Exception:  # of user code
        return ()
    return (
        parts
        if isinstance(parts, str)
        else [list(part) if isinstance(part, Iterator) else part for part in parts]
    )


def _inside(value: Any) -> list[_Part]:
    """Parts of a container, in an order that depends on no hash and no address; attributes of an object."""
    kind = type(value)
    if isinstance(value, np.ndarray):  # of objects
        return [("", "", value.tolist())]
    if isinstance(value, (set, frozenset, deque)):
        value = list(value) if isinstance(value, deque) else sorted(value, key=_content)
    left_out = getattr(kind, "_not_compared", ())  # as the seeds of encoded images
    is_plain = all(getattr(kind, name, None) is getattr(object, name, None) for name in _PICKLING)
    if not is_plain and not left_out and not isinstance(value, _EMPTY):
        return []
    return [part for part in parts_of(value) if part[1] not in left_out]


def _content(value: Any) -> list[tuple[str, bytes]]:
    return [(leaf.kind, leaf.data) for leaf in leaves(value)]


def _tensor(tensor: torch.Tensor, path: str, kind: str) -> ComparedLeaf:
    kind += f" {str(tensor.dtype).removeprefix('torch.')}"
    plain = tensor.detach()
    if plain.layout != torch.strided or plain.is_nested or plain.is_quantized:
        torch.save(plain, file := io.BytesIO())
        return ComparedLeaf(path, f"{kind} {plain.layout}", file.getvalue())
    shape, grad = tuple(plain.shape), ", requires_grad" if tensor.requires_grad else ""
    flat = plain.as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous().flatten()
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return ComparedLeaf(
        path, f"{kind}{list(shape)}, strides {tensor.stride()}{grad}", data, tensor.dtype, shape
    )


def digest(parts: Iterable[ComparedLeaf]) -> bytes:
    """Digest of a batch's parts: equal parts have equal digests."""
    whole = hashlib.blake2b(digest_size=16)
    for leaf in parts:
        for part in (leaf.path.encode(errors="surrogatepass"), leaf.kind.encode(), leaf.data):
            whole.update(len(part).to_bytes(8, "little"))
            whole.update(part)
    return whole.digest()


def difference(one: list[ComparedLeaf], other: list[ComparedLeaf], names: tuple[str, str]) -> str:
    """Describe the first difference of two batches; "" if equal. `names` tell the two apart in the text."""
    pair = next((pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]), None)
    return "" if pair is None else describe(*pair, names)


def describe(first: ComparedLeaf, second: ComparedLeaf, names: tuple[str, str], number: int = -1) -> str:
    """Describe the difference of two parts. `number`: the element to show; by default the first one whose
    bytes differ."""
    where = first.path
    if first.path != second.path:
        where, shown = "the next part", [f"{first.path!r}", f"{second.path!r}"]
    elif first.kind != second.kind or first.dtype is None:
        shown = [each.kind if each.dtype else _text(each) for each in (first, second)]
    else:
        if number < 0:
            differing = np.frombuffer(first.data, np.uint8) != np.frombuffer(second.data, np.uint8)
            number = int(differing.argmax()) // first.dtype.itemsize
        at = np.unravel_index(number, first.shape)
        where += f"[{', '.join(map(str, at))}]" if at else ""
        shown = [_element(leaf, number) for leaf in (first, second)]
    return f"{where} is {shown[0]} {names[0]}, and {shown[1]} {names[1]}"


def _element(leaf: ComparedLeaf, number: int) -> str:
    if isinstance(leaf.dtype, torch.dtype):
        return str(torch.frombuffer(bytearray(leaf.data), dtype=leaf.dtype)[number].item())
    return str(np.frombuffer(leaf.data, leaf.dtype)[number])


def _text(leaf: ComparedLeaf) -> str:
    return f"{leaf.kind} {leaf.data[:80].decode(errors='replace')}"
