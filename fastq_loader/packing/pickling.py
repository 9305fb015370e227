"""Pickling with the large parts left out: tensors and arrays inside arbitrary objects become references.

Runs in workers (`dump`, `dump_exception`) and in the consumer (`load`, `load_exception`). The pickled
bytes travel inside the shared memory, behind the pool's token (see `messages`); the leaves they refer to
are packed like any other leaf of the batch. Also owns the search for the part of an object that cannot be
pickled.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import functools
import io
import pickle
import threading
import traceback
import types
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

from fastq_loader.errors import ProtocolError, UnpicklableError, WorkerTraceback, shorten
from fastq_loader.system.interrupts import refuse_interrupt

_COWARDLY = (  # torch/multiprocessing/reductions.py, reduce_tensor
    "Cowardly refusing to serialize non-leaf tensor which requires_grad, "
    "since autograd does not support crossing process boundaries.  "
    "If you just want to transfer the data, call detach() on the tensor "
    "before serializing (e.g., putting it on the queue)."
)


# Asked for every leaf of every batch: names of this module are found faster than attributes of others.
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
    return type(value) is _ARRAY and value.dtype.kind in "biufcSUmM" and value.dtype.isnative


def _require_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


def _resolved(value: torch.Tensor) -> torch.Tensor:
    return value.detach().resolve_conj().resolve_neg()


def parts_of_sparse(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a sparse one is made of: its indices, and its values last."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # mkldnn, which has none


def _reduce_sparse(tensor: torch.Tensor) -> Any:
    # Not by torch's own __reduce_ex__: what rebuilds it keeps every tensor in a list until the next
    # torch.load, and its memory with it.
    parts = parts_of_sparse(tensor)
    if not parts:  # as torch does it
        return NotImplemented
    if tensor.layout is torch.sparse_coo:
        return _sparse_coo, (*parts, tensor.shape, tensor.is_coalesced())
    return _sparse_compressed, (*parts, tensor.shape, tensor.layout)


def _sparse_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, coalesced: bool
) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=coalesced)


def _sparse_compressed(
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: torch.Size,
    layout: torch.layout,
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=False
    )


def _take(leaf: int) -> Any:
    try:
        return _building.leaves[leaf]
    except IndexError:
        raise ProtocolError(f"a pickle that speaks of leaf {leaf}, in a batch without it") from None


_building = threading.local()  # `leaves`: of the batch that this thread is putting together


def _storage(leaf: int) -> torch.UntypedStorage:
    taken = _take(leaf)
    tensor: torch.Tensor = torch.from_numpy(taken) if type(taken) is _ARRAY else taken
    return tensor.untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


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
    def __init__(self, file: io.BytesIO, add_leaf: Callable[[Any], int], storages_stay: bool = False) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = _dispatch_table()
        self._add_leaf = add_leaf
        self._storages_stay = storages_stay

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if is_leaf(value):
                return _take, (self._add_leaf(value),)
            if value.device.type not in ("cpu", "meta"):
                return reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
            if type(value) is torch.Tensor:
                if value.requires_grad and not value.is_nested:
                    return _require_grad, (value.detach(),)
                if value.layout is not torch.strided:
                    return _reduce_sparse(value)
                if value.is_conj() or value.is_neg():
                    return _identity, (_resolved(value),)
        elif type(value) is np.ndarray and is_leaf(value):
            return _take, (self._add_leaf(value),)
        elif isinstance(value, torch.UntypedStorage):
            if value.device.type != "cpu":
                return reductions.reduce_storage(value)  # type: ignore[no-untyped-call]
            # A tensor of all its bytes shares memory with the tensors over it; an array stays on the host.
            whole = _bytes_of(value)
            return _storage, (self._add_leaf(whole.numpy() if self._storages_stay else whole),)
        return NotImplemented


class _WatchfulPickler(_Pickler):
    """Watches out for lists and dicts that are not to be copied; a call for every object costs its time."""

    def __init__(self, outside: Container[int], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._outside = outside

    def persistent_id(self, value: Any) -> None:
        if id(value) in self._outside:
            raise SharedContainer


def _identity(value: Any) -> Any:
    return value


def dump(
    value: Any,
    add_leaf: Callable[[Any], int],
    whole: Any = None,
    outside: Collection[int] = (),
    storages_stay: bool = False,
) -> bytes:
    """Pickle `value`; every tensor and array that `is_leaf` goes to `add_leaf`, which numbers it, and every
    storage as a tensor of its bytes.

    Args:
        value: what to pickle.
        add_leaf: takes a leaf, returns its number.
        whole: the batch that `value` is part of, for the path in an error's text; None: itself.
        outside: ids of lists and dicts that are not pickled here and must not be copied.
        storages_stay: tensors go on to a device and storages do not: they are leaves as arrays.

    Raises:
        SharedContainer: `value` refers to one of `outside`.
        UnpicklableError: something cannot be pickled; the text says where it lies.
        RuntimeError: a non-leaf tensor that requires grad.
    """
    file = io.BytesIO()
    try:
        arguments = (file, add_leaf, storages_stay)
        pickler = _WatchfulPickler(outside, *arguments) if outside else _Pickler(*arguments)
        pickler.dump(value)
    except SharedContainer:
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


# ---- exceptions -------------------------------------------------------------------------------------


def dump_exception(error: BaseException, worker: int) -> bytes:
    """An exception in a form that `load_exception` gives back with its type, args and attributes.

    What does not survive pickling (a constructor with other arguments than `args`, an attribute that
    cannot be pickled) is rebuilt without its constructor, then as its nearest base class that can be
    imported, and last as a RuntimeError with the same text.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    where = f"Caught {type(error).__name__} in DataLoader worker process {worker}.\nOriginal {text}"
    attributes = {name: value for name, value in error.__dict__.items() if pickles(value)}
    candidates: list[Any] = [_by_pickle(error)]
    for kind in type(error).__mro__:
        if not issubclass(kind, BaseException):
            continue  # a mixin
        if kind in (BaseException, Exception) and kind is not type(error):
            break
        candidates += [(kind, error.args, attributes), (kind, error.args, {})]
    for candidate in candidates:
        data = _survives(candidate, where)
        if data is not None:
            return data
    line = "".join(traceback.format_exception_only(type(error), error)).strip()
    return pickle.dumps(((RuntimeError, (line,), {}), where))


def _survives(candidate: Any, where: str) -> bytes | None:
    if candidate is None:
        return None
    try:
        data = pickle.dumps((candidate, where), pickle.HIGHEST_PROTOCOL)
        _rebuild(data)
    except Exception:  # whatever a user's class does when it is pickled or made: try the next form
        return None
    return data


def _by_pickle(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
        again = pickle.loads(data)
        same = type(again) is type(error) and again.args == error.args and str(again) == str(error)
        return data if same and again.__dict__.keys() == error.__dict__.keys() else None
    except Exception:  # a user's class may fail to be pickled, made, compared or printed
        return None


def _rebuild(data: bytes) -> tuple[BaseException, str]:
    content, where = pickle.loads(data)
    if isinstance(content, bytes):
        error = pickle.loads(content)
    else:
        kind, args, attributes = content
        error = kind.__new__(kind, *args)
        BaseException.__setattr__(error, "args", args)  # past the class's own: it may be a frozen dataclass
        error.__dict__.update(attributes)
    return error, where


def load_exception(data: bytes) -> BaseException:
    """The exception of `dump_exception`, with the worker's traceback as its cause.

    A class that the worker could import and this process cannot becomes a RuntimeError.
    """
    try:
        error, where = _rebuild(data)
    except Exception as reason:
        refuse_interrupt(reason)
        return RuntimeError(f"a DataLoader worker raised what cannot be unpickled here: {reason!r}")
    BaseException.__setattr__(error, "__cause__", WorkerTraceback(where))
    if hasattr(error, "add_note"):  # Python 3.11; what torch writes into the text
        with contextlib.suppress(Exception):  # whatever the class does when an attribute is set
            error.add_note(where.partition("\n")[0])
    return error
