"""Pickling with the leaves left out: tensors and arrays inside arbitrary objects become references.

`dump` runs in workers, `load` in the consumer. The pickled bytes travel in shared memory, behind the pool's
token; the leaves that they refer to are packed like any other leaf of the batch. Also owns the search for the
part of an object that cannot be pickled.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import io
import pickle
import threading
import types
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

from fastq_loader.errors import ProtocolError, UnpicklableError, shorten

_COWARDLY = (  # torch/multiprocessing/reductions.py, reduce_tensor
    "Cowardly refusing to serialize non-leaf tensor which requires_grad, "
    "since autograd does not support crossing process boundaries.  "
    "If you just want to transfer the data, call detach() on the tensor "
    "before serializing (e.g., putting it on the queue)."
)


#: Gives the number of a tensor or array that is left out; None for an array that is not.
LeafNumber = Callable[[Any], "int | None"]

# Read for every leaf of every batch: names of this module are found faster than attributes of others.
_TENSOR, _ARRAY, _STRIDED = torch.Tensor, np.ndarray, torch.strided


def is_leaf(value: Any) -> bool:
    """Whether a tensor or array is packed as it is: dense, on the CPU, of exactly that type.

    Raises:
        RuntimeError: a tensor that requires grad and is not a leaf of its graph (torch's own text).
    """
    if type(value) is _TENSOR:
        if value.requires_grad:
            if not value.is_leaf:
                raise RuntimeError(_COWARDLY)
            return False
        return (
            value.is_cpu
            and value.layout is _STRIDED
            and not value.is_quantized
            and not value.is_nested
            and not value.is_conj()
            and not value.is_neg()
        )
    if type(value) is not _ARRAY:
        return False
    dtype = value.dtype
    return dtype.kind in "biufcSUmM" and dtype.isnative and dtype.itemsize > 0


def _identity(value: Any) -> Any:
    return value


#: The methods that give the strided tensors that a sparse one is made of; its values last.
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def parts_of_sparse(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a sparse one is made of; none for mkldnn."""
    return [getattr(tensor, name)() for name in _SPARSE_PARTS.get(tensor.layout, ())]


def _reduce_sparse(tensor: torch.Tensor) -> Any:
    # Not by torch's own __reduce_ex__: what rebuilds it keeps every tensor in a list until the next
    # torch.load, and its memory with it.
    parts = parts_of_sparse(tensor)
    if not parts:  # as torch does it
        return NotImplemented
    options: dict[str, Any] = {"size": tensor.shape, "check_invariants": False}
    if tensor.layout is torch.sparse_coo:
        return _sparse, (torch.sparse_coo_tensor, parts, options | {"is_coalesced": tensor.is_coalesced()})
    return _sparse, (torch.sparse_compressed_tensor, parts, options | {"layout": tensor.layout})


def _sparse(
    make: Callable[..., torch.Tensor], parts: list[torch.Tensor], options: dict[str, Any]
) -> torch.Tensor:
    return make(*parts, **options)


def _take(leaf: int) -> Any:
    try:
        return _building.leaves[leaf]
    except IndexError:
        raise ProtocolError(f"a pickle that names leaf {leaf}, in a batch without it") from None


_building = threading.local()  # `leaves`: of the batch that this thread puts together


def _storage(whole: torch.Tensor | np.ndarray) -> torch.UntypedStorage:
    tensor = torch.from_numpy(whole) if isinstance(whole, _ARRAY) else whole
    return tensor.untyped_storage()


def _dispatch_table() -> dict[type, Callable[[Any], Any]]:
    # What was registered with multiprocessing (by itself, by libraries for their tensors, by torch for typed
    # storages) but not torch's own for what holds memory: those would hand every storage to the consumer as a
    # descriptor of its own.
    extra: dict[type, Callable[[Any], Any]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    others = {kind: reduce for kind, reduce in extra.items() if reduce not in _SHARING}
    return {**copyreg.dispatch_table, **others}


_SHARING = (reductions.reduce_tensor, reductions.reduce_storage, reductions.reduce_event)


class SharedContainer(Exception):
    """An object refers to a list or dict of the tree around it."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, leaf_number: LeafNumber, for_device: bool = False) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = _dispatch_table()
        self._leaf_number = leaf_number
        self._for_device = for_device

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if is_leaf(value):
                return _take, (self._leaf_number(value),)
            if value.device.type not in ("cpu", "meta"):
                return reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
            if type(value) is torch.Tensor:
                if value.requires_grad and not value.is_nested:
                    return torch.Tensor.requires_grad_, (value.detach(),)
                if value.layout is not torch.strided:
                    return _reduce_sparse(value)
                if value.is_conj() or value.is_neg():
                    return _identity, (value.detach().resolve_conj().resolve_neg(),)
        elif type(value) is _ARRAY and is_leaf(value):
            number = self._leaf_number(value)
            # Not by protocol 5, with which an array over memory that is read-only would stay so.
            return value.__reduce__() if number is None else (_take, (number,))
        elif isinstance(value, torch.UntypedStorage):
            if value.device.type != "cpu":
                return reductions.reduce_storage(value)  # type: ignore[no-untyped-call]
            # A tensor of all its bytes shares memory with the tensors over it; an array stays on the host.
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(value)
            return _storage, (whole.numpy() if self._for_device else whole,)
        return NotImplemented


class _WatchfulPickler(_Pickler):
    """Finds lists and dicts that are not to be copied. It takes a call for every object, and so more time."""

    def __init__(self, outside: Container[int], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._outside = outside

    def persistent_id(self, value: Any) -> None:
        if id(value) in self._outside:
            raise SharedContainer


def dump(
    value: Any,
    leaf_number: LeafNumber,
    whole: Any = None,
    outside: Collection[int] = (),
    for_device: bool = False,
) -> bytes:
    """Pickle `value`; every tensor and array that `is_leaf` is left out, and every storage as a tensor of
    its bytes.

    Args:
        value: what to pickle.
        leaf_number: takes a leaf, returns its number; None for an array that is not left out.
        whole: the batch that `value` is part of, for the path in an error's text; None: itself.
        outside: ids of lists and dicts that are not pickled here and must not be copied.
        for_device: tensors go on to a device, and storages do not: they are leaves as arrays.

    Raises:
        SharedContainer: `value` refers to one of `outside`.
        UnpicklableError: something cannot be pickled; the text says where it lies.
        MemoryError: there is no room for the pickle.
        RuntimeError: a non-leaf tensor that requires grad.
    """
    file = io.BytesIO()
    try:
        arguments = (file, leaf_number, for_device)
        pickler = _WatchfulPickler(outside, *arguments) if outside else _Pickler(*arguments)
        pickler.dump(value)
    except (SharedContainer, MemoryError):
        raise
    except Exception as error:
        if error.args == (_COWARDLY,):
            raise
        whole = value if whole is None else whole
        if pickles(whole):  # it fails now and then, or only as a whole
            raise
        raise explain(whole, error, "batch") from error
    return file.getvalue()


def load(data: bytes, leaves: Sequence[Any]) -> Any:
    """The inverse of `dump`, with the leaves put together again.

    Raises:
        Exception: whatever unpickling raises.
    """
    before = getattr(_building, "leaves", ())  # an object's own unpickling may iterate another loader
    _building.leaves = leaves
    try:
        return pickle.loads(data)
    finally:
        _building.leaves = before


# ---- naming what cannot be pickled ------------------------------------------------------------------


def explain(value: Any, error: Exception, name: str) -> UnpicklableError:
    """`error` with the path to the innermost part of `value`, called `name`, that fails to pickle."""
    path, part = _culprit(value, name, depth=0)
    return UnpicklableError(
        f"{path} (a {type(part).__module__}.{type(part).__qualname__}: {shorten(part)}) cannot be pickled: "
        f"{type(error).__name__}: {error}"
    )


def _culprit(value: Any, path: str, depth: int) -> tuple[str, Any]:
    if depth < 8:
        for step, part in _parts(value):
            if not pickles(part):
                return _culprit(part, path + step, depth + 1)
    return path, value


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"[{at}]", part) for at, part in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    if isinstance(value, functools.partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, (type, types.FunctionType, types.ModuleType)):
        return []
    return [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]


def pickles(value: Any) -> bool:
    """Whether `value` can be pickled."""
    try:
        _Pickler(io.BytesIO(), lambda leaf: 0).dump(value)
    except Exception:
        return False
    return True
