"""Exceptions on their way: from a worker, with type, arguments and attributes, to where their batch is due.

`dump_exception` runs in workers, `load_exception` in the consumer, which gives the error the worker's
traceback as its cause. The bytes travel like any other pickled object.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from typing import Any

from fastq_loader.errors import WorkerTraceback
from fastq_loader.packing.pickling import pickles
from fastq_loader.system.interrupts import refuse_interrupt


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
