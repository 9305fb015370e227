"""Pickling: objects without their tensors and arrays, exceptions, and functions that pickle refuses.

`dump` and `dump_exception` run in workers, `load` and `load_exception` in the consumer; without workers,
`device` calls both there. A batch's pickled bytes are sent in shared memory, behind the pool's token; the
leaves that they refer to are packed like its other leaves. Also finds the part of an object that cannot be
pickled.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions
from torch.nn.utils.rnn import PackedSequence

from fastq_loader.errors import ProtocolError, UnpicklableError, WorkerTraceback, add_note, shorten
from fastq_loader.packing.flattener import COWARDLY, is_leaf
from fastq_loader.system import torch_names

#: Takes a tensor or array; returns its leaf number, or None for an array that stays in the pickle.
LeafNumber = Callable[[Any], "int | None"]

# Used for every leaf of every batch: globals are faster than attributes of other modules.
_TENSOR, _ARRAY, _STRIDED = torch.Tensor, np.ndarray, torch.strided


def take(leaf: int) -> Any:
    try:
        return _building.leaves[leaf]
    except IndexError:
        raise ProtocolError(f"a pickle that names leaf {leaf}, in a batch without it") from None


_building = threading.local()  # `leaves`: of the batch that this thread is unpickling


def _storage(whole: torch.Tensor | np.ndarray) -> torch.UntypedStorage:
    tensor = torch.from_numpy(whole) if isinstance(whole, _ARRAY) else whole
    return tensor.untyped_storage()


def _packed(data: torch.Tensor, sizes: np.ndarray, *order: torch.Tensor | None) -> PackedSequence:
    return PackedSequence(data, torch.from_numpy(sizes), *order)


_SHARING = (reductions.reduce_tensor, reductions.reduce_storage)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, leaf_number: LeafNumber, for_device: bool = False) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        # All reducers registered with multiprocessing (by itself, by libraries for their tensors, by torch
        # for typed storages) except torch's own for tensors and storages: these would send each storage to
        # the consumer as a descriptor.
        extra: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        others = {kind: reduce for kind, reduce in extra.items() if reduce not in _SHARING}
        self.dispatch_table = {**copyreg.dispatch_table, **others}
        self._leaf_number = leaf_number
        self._for_device = for_device

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._reduce_tensor(value)
        if type(value) is _ARRAY:
            number = self._leaf_number(value) if is_leaf(value) else None
            # Not by protocol 5, with which an array over read-only memory would stay read-only, and one of a
            # foreign byte order foreign.
            return value.__reduce__() if number is None else (take, (number,))
        if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
            # A tensor of all its bytes shares memory with the tensors over them; an array stays on the host.
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(value)
            return _storage, (whole.numpy() if self._for_device else whole,)
        if type(value) is PackedSequence and self._for_device:  # it refuses sizes that are not on the host
            return _packed, (value.data, value.batch_sizes.numpy(), *value[2:])
        return NotImplemented

    def _reduce_tensor(self, value: torch.Tensor) -> Any:
        if is_leaf(value):
            return take, (self._leaf_number(value),)
        if value.device.type not in ("cpu", "meta"):
            return reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        if type(value) is not torch.Tensor:
            return NotImplemented
        if value.requires_grad and not value.is_nested:
            return torch.Tensor.requires_grad_, (value.detach(),)
        return NotImplemented  # torch's way for checkpoints


def dump(
    value: Any,
    leaf_number: LeafNumber,
    whole: Any = None,
    for_device: bool = False,
) -> bytes:
    """Pickle `value` without its leaves: each tensor or array that `is_leaf` is replaced by its number, and
    each storage by a tensor of its bytes.

    Args:
        value: the object to pickle.
        leaf_number: takes a leaf, returns its number; None for an array that stays in the pickle.
        whole: the batch that contains `value`, for the path in an error's text; None: `value` itself.
        for_device: whether tensors go on to a device. Storages do not: they become leaves as arrays.

    Raises:
        UnpicklableError: a part cannot be pickled; the text has the path to it.
        MemoryError: there is not enough memory for the pickle.
        RuntimeError: there is a non-leaf tensor that requires grad.
    """
    arguments = value, leaf_number, for_device
    try:
        try:
            return _dumped(_Pickler, *arguments)
        except Exception as error:
            if not sends_by_value or isinstance(error, MemoryError):
                raise
            return _dumped(by_value(_Pickler), *arguments)
    except MemoryError:
        raise
    except Exception as error:
        if error.args == (COWARDLY,):
            raise
        whole = value if whole is None else whole
        if pickles(whole):  # pickling fails only sometimes, or only here
            raise
        raise explain(whole, error, "batch") from error


def _dumped(pickler: Callable[..., pickle.Pickler], value: Any, *arguments: Any) -> bytes:
    """Pickle `value` by a pickler of this class, made with these arguments."""
    file = io.BytesIO()
    pickler(file, *arguments).dump(value)
    return file.getvalue()


def load(data: bytes, leaves: Sequence[Any], buffers: Sequence[Any] = ()) -> Any:
    """Unpickle the result of `dump`, with these leaves and buffers of pickle's in their places.

    Raises:
        Exception: whatever unpickling raises.
    """
    before = getattr(_building, "leaves", ())  # unpickling an object may iterate another loader
    _building.leaves = leaves
    try:
        return pickle.loads(data, buffers=buffers)
    finally:
        _building.leaves = before
        # Torch keeps each sparse tensor in this list, and so its memory, until the next torch.load.
        torch_names.sparse_tensors_to_validate().clear()


# ---- naming what cannot be pickled ------------------------------------------------------------------


def explain(value: Any, error: Exception, name: str) -> UnpicklableError:
    """`error` with the path to the innermost part of `value`, named `name`, that cannot be pickled."""
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
    """Parts of an object: members of a container, and attributes. Each as (format of its path, key for the
    format, part), for example ("[{!r}]", "key", …)."""
    if isinstance(value, (str, bytes, type, types.FunctionType, types.ModuleType)):
        return []
    found: list[tuple[str, Any, Any]] = []
    if isinstance(value, Mapping):
        found += [("[{!r}]", key, part) for key, part in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        found += [("[{}]", at, part) for at, part in enumerate(value)]
    slots = [*copyreg._slotnames(type(value))]  # type: ignore[attr-defined]
    if isinstance(value, partial):
        slots += ["func", "args", "keywords"]
    names = [*getattr(value, "__dict__", {}), *slots]
    return found + [(".{}", name, getattr(value, name, None)) for name in names]


def pickles(value: Any) -> bool:
    """Whether `value` can be pickled."""
    try:
        _dumped(_Pickler, value, lambda leaf: 0)
    except Exception:
        return False
    return True


# ---- functions and classes that pickle refuses --------------------------------------------------------

# These are lambdas, local functions and classes, and anything defined in a `__main__` that no other process
# can import, such as a notebook. cloudpickle (extra `notebook`) sends them to the workers, and workers whose
# setup came by cloudpickle also use it for answers: a class from the consumer becomes the same class there.

_HINT = (
    "; with cloudpickle (pip install 'fastq-loader[notebook]') lambdas, local classes and a notebook's work"
)

#: Whether the answers of this process may need cloudpickle, too. Set in workers.
sends_by_value = False


@cache
def by_value(base: type[pickle.Pickler]) -> Any:
    """A subclass of the pickler `base` that also pickles these functions and classes.

    Raises:
        ImportError: cloudpickle is missing.
    """
    import cloudpickle

    class ByValue(base, cloudpickle.Pickler):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            base.__init__(self, *arguments, **keywords)
            # cloudpickle's class attribute of this name hides the attribute that pickle reads.
            known = {**cloudpickle.Pickler.dispatch_table, **self.dispatch_table}
            pickle.Pickler.dispatch_table.__set__(self, known)  # type: ignore[attr-defined]

        def reducer_override(self, value: Any) -> Any:
            own = base.reducer_override(self, value)
            return cloudpickle.Pickler.reducer_override(self, value) if own is NotImplemented else own

    return ByValue


def is_interactive() -> bool:
    """Whether no other process can import `__main__`, although pickle accepts the objects in it: a notebook,
    or a program that is read from stdin, as in `python - < program.py`."""
    return getattr(sys.modules["__main__"], "__file__", "<stdin>") == "<stdin>"


def hint() -> str:
    """Advice for the error about an object that pickle refuses; "" if cloudpickle is installed."""
    return "" if find_spec("cloudpickle") else _HINT


def _dumps(value: Any) -> bytes:
    """`pickle.dumps`; if that fails in a worker whose setup came by cloudpickle, `cloudpickle.dumps`."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        if not sends_by_value:
            raise
        import cloudpickle

        data: bytes = cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        return data


# ---- exceptions -------------------------------------------------------------------------------------


def dump_exception(error: BaseException, worker: int | None) -> bytes:
    """Pickle an exception of a worker, or of another child process, so that `load_exception` restores its
    type, args and attributes.

    An exception that does not survive pickling (its constructor takes other arguments than `args`, or an
    attribute cannot be pickled) is rebuilt without its constructor, else as its nearest base class that
    can be imported, else as a RuntimeError with the same text.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    process = "a child process" if worker is None else f"DataLoader worker process {worker}"
    where = f"Caught {type(error).__name__} in {process}.\nOriginal {text}"
    line = "".join(traceback.format_exception_only(type(error), error)).strip()
    attributes = {name: value for name, value in error.__dict__.items() if pickles(value)}
    candidates: list[Any] = [error]
    for kind in type(error).__mro__:
        if kind in (BaseException, Exception) and kind is not type(error):
            break
        if issubclass(kind, BaseException):  # not a mixin
            candidates += [(kind, error.args, attributes), (kind, error.args, {})]
    candidates.append((RuntimeError, (line,), {}))
    return next(data for candidate in candidates if (data := _survives(candidate, where)))


def _survives(candidate: Any, where: str) -> bytes | None:
    """The pickle of one form of an exception; None if unpickling fails or changes the exception."""
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
        BaseException.__setattr__(error, "args", args)  # not the class's own: it may be a frozen dataclass
        error.__dict__.update(attributes)
    return error, where


def load_exception(data: bytes) -> BaseException:
    """Unpickle the exception of `dump_exception`, with the worker's traceback as its cause.

    A class that the worker could import and this process cannot becomes a RuntimeError.
    """
    try:
        error, where = _rebuild(data)
    except Exception as reason:
        return RuntimeError(f"a DataLoader worker raised an error that cannot be unpickled here: {reason!r}")
    BaseException.__setattr__(error, "__cause__", WorkerTraceback(where))
    add_note(error, where.partition("\n")[0])  # the line that torch puts into the text
    return error
