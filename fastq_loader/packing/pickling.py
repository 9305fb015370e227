"""Pickling: arbitrary objects with their tensors and arrays left out, exceptions, and what pickle refuses.

`dump` and `dump_exception` run in workers, `load` and `load_exception` in the consumer. The pickled bytes
travel in shared memory, behind the pool's token; the leaves that they refer to are packed like any other leaf
of the batch. Also owns the search for the part of an object that cannot be pickled.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
import threading
import traceback
import types
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

from fastq_loader.errors import ProtocolError, UnpicklableError, WorkerTraceback, add_note, shorten
from fastq_loader.system.interrupts import refuse_interrupt

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

#: The dtypes of which a tensor is its bytes, a shape and strides, and their names. Torch ends the process
#: where a tensor of another one (qint8, …) is made of these alone.
PLAIN_DTYPES = {
    it: name
    for it, name in (
        (it, str(it).removeprefix("torch.")) for it in vars(torch).values() if type(it) is torch.dtype
    )
    if name.startswith(("bool", "uint", "int", "float", "bfloat", "complex", "bits"))
}


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
            and value.dtype in PLAIN_DTYPES
            and not value.is_nested
            and not value.is_conj()
            and not value.is_neg()
        )
    if type(value) is not _ARRAY:
        return False
    dtype = value.dtype
    return dtype.kind in "biufcSUmM" and dtype.isnative and dtype.itemsize > 0


def _has_quantizer(value: torch.Tensor) -> bool:
    try:
        value.qscheme()
    except RuntimeError:
        return False
    return True


def _identity(value: Any) -> Any:
    return value


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


_SHARING = (reductions.reduce_tensor, reductions.reduce_storage)


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
                if value.dtype not in PLAIN_DTYPES and not _has_quantizer(value):
                    # As torch sends it. What it does for a checkpoint takes the quantizer for granted.
                    place = value.storage_offset(), value.size(), value.stride(), False
                    storage = value._typed_storage()  # type: ignore[no-untyped-call]
                    return reductions.rebuild_tensor, (_TENSOR, storage, place)
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
        try:
            pickler = _WatchfulPickler(outside, *arguments) if outside else _Pickler(*arguments)
            pickler.dump(value)
        except Exception as error:
            if not sends_by_value or isinstance(error, (SharedContainer, MemoryError)):
                raise
            arguments = (file := io.BytesIO(), leaf_number, for_device)
            by_value(_Pickler)(*arguments).dump(value)
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


# A function in torch 2.15, with a list for each thread.
_unvalidated = getattr(
    torch._utils, "_get_sparse_tensors_to_validate", lambda: torch._utils._sparse_tensors_to_validate
)


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
        # torch keeps every sparse tensor in it until the next torch.load, and its memory with it.
        _unvalidated().clear()


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
        for form, name, part in parts_of(value):
            if not pickles(part):
                return _culprit(part, path + form.format(name), depth + 1)
    return path, value


def parts_of(value: Any) -> list[tuple[str, Any, Any]]:
    """Parts of an object: members of a container, and attributes. A form, what stands in it, and the
    part: "[{!r}]", "key", …"""
    if isinstance(value, (str, bytes, type, types.FunctionType, types.ModuleType)):
        return []
    found: list[tuple[str, Any, Any]] = []
    if isinstance(value, Mapping):
        found += [("[{!r}]", key, part) for key, part in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        found += [("[{}]", at, part) for at, part in enumerate(value)]
    slots = [*copyreg._slotnames(type(value))]  # type: ignore[attr-defined]
    if isinstance(value, functools.partial):
        slots += ["func", "args", "keywords"]
    names = [*getattr(value, "__dict__", {}), *slots]
    return found + [(".{}", name, getattr(value, name, None)) for name in names]


def pickles(value: Any) -> bool:
    """Whether `value` can be pickled."""
    try:
        _Pickler(io.BytesIO(), lambda leaf: 0).dump(value)
    except Exception:
        return False
    return True


# ---- functions and classes that pickle refuses --------------------------------------------------------

# These are lambdas, local functions and classes, and those of a `__main__` that no other process can import,
# as a notebook's. They travel by cloudpickle (extra `notebook`): the user's objects, and in workers that got
# these so, what comes back: a class of the consumer's is that class again there.

_HINT = (
    "; with cloudpickle (pip install '.[notebook]' in a clone) lambdas, local classes and a notebook's work"
)

#: Whether what this process answers may need it, too. Set in workers.
sends_by_value = False


@functools.cache
def by_value(base: type[pickle.Pickler]) -> Any:
    """A pickler like another one, that also takes these.

    Raises:
        ImportError: cloudpickle is missing.
    """
    import cloudpickle

    class ByValue(base, cloudpickle.Pickler):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            base.__init__(self, *arguments, **keywords)
            # cloudpickle's class has an attribute of this name, which hides the one that pickling reads.
            known = {**cloudpickle.Pickler.dispatch_table, **self.dispatch_table}
            pickle.Pickler.dispatch_table.__set__(self, known)  # type: ignore[attr-defined]

        def reducer_override(self, value: Any) -> Any:
            own = base.reducer_override(self, value)
            return cloudpickle.Pickler.reducer_override(self, value) if own is NotImplemented else own

    return ByValue


def is_interactive() -> bool:
    """Whether no other process can import `__main__`, though pickle finds what is in it."""
    return not hasattr(sys.modules["__main__"], "__file__")


def hint() -> str:
    """Advice to add to the error of something that pickle refuses."""
    return "" if find_spec("cloudpickle") else _HINT


def _dumps(value: Any) -> bytes:
    """`pickle.dumps`, or cloudpickle's where that fails in a worker that got the user's objects so."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        if not sends_by_value:
            raise
        import cloudpickle

        data: bytes = cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        return data


# ---- exceptions -------------------------------------------------------------------------------------


def dump_exception(error: BaseException, worker: int) -> bytes:
    """An exception in a form that `load_exception` gives back with its type, args and attributes.

    What does not survive pickling (a constructor with other arguments than `args`, an attribute that
    cannot be pickled) is rebuilt without its constructor, then as its nearest base class that can be
    imported, and last as a RuntimeError with the same text.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    where = f"Caught {type(error).__name__} in DataLoader worker process {worker}.\nOriginal {text}"
    line = "".join(traceback.format_exception_only(type(error), error)).strip()
    attributes = {name: value for name, value in error.__dict__.items() if pickles(value)}
    candidates: list[Any] = [error]
    for kind in type(error).__mro__:
        if kind in (BaseException, Exception) and kind is not type(error):
            break
        if issubclass(kind, BaseException):  # else a mixin
            candidates += [(kind, error.args, attributes), (kind, error.args, {})]
    candidates.append((RuntimeError, (line,), {}))
    return next(data for candidate in candidates if (data := _survives(candidate, where)))


def _survives(candidate: Any, where: str) -> bytes | None:
    """The bytes of a form of an exception; None: it would come out as something else, or not at all."""
    try:
        data = _dumps((candidate, where))
        again, _ = _rebuild(data)
        if isinstance(candidate, BaseException):
            same = type(again) is type(candidate) and again.args == candidate.args
            same = same and str(again) == str(candidate)
            return data if same and again.__dict__.keys() == candidate.__dict__.keys() else None
    except Exception:  # a user's class may fail to be pickled, made, compared or printed: try the next form
        return None
    return data


def _rebuild(data: bytes) -> tuple[BaseException, str]:
    error, where = pickle.loads(data)
    if not isinstance(error, BaseException):
        kind, args, attributes = error
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
    add_note(error, where.partition("\n")[0])  # what torch writes into the text
    return error
