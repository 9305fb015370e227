"""`cached`: a function whose values are computed once for all processes and all epochs.

Runs in the program and in every process that calls the function, on any thread. Owns the counters that these
processes share; `store` owns the values.
"""

from __future__ import annotations

import copy as copying
import errno
import functools
import mmap
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from types import MethodType
from typing import Any

from fastq_loader.api import (
    CacheStatistics,
    NotCached,
    UnpicklableError,
    attributes,
    calls,
    generators,
    locks,
    process_id,
)
from fastq_loader.extras.cached import store as files
from fastq_loader.extras.cached.keys import Keys
from fastq_loader.extras.cached.process import ProcessStore
from fastq_loader.extras.cached.store import Store, digest_of
from fastq_loader.extras.cached.values import decode, encode, has_tensors
from fastq_loader.extras.insight.machine import memory_bytes

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_COUNTS = "hits", "misses", "stored", "full", "random", "refused", "damaged"
_ROW_WORDS, _ROWS = 8, 2048
_HINTED = _ROW_WORDS - 1  # last word of a row: whether its process has warned


class _Clear:
    """The method `clear`: `cached.clear(path)` on the class, `clear()` on an instance."""

    def __get__(self, instance: cached | None, owner: type) -> Callable[..., None]:
        return _remove if instance is None else partial(_remove, instance._path)


def _remove(path: str | os.PathLike[str] | None) -> None:
    """Remove the file of a cache. Processes that have it open can use it until they end.

    Raises:
        ValueError: the cache has no path.
        FileNotFoundError: there is no such file.
    """
    if path is None:
        raise ValueError("cached: this cache has no path; it is freed with the last process that uses it")
    os.unlink(path)


class cached:
    """Cache the values of a function, once for all processes of a machine and for all epochs.

    Wrap the part of a dataset that draws no random numbers: reading and decoding. Random augmentation stays
    outside, and is new in every epoch. All workers of all loaders with this object share the values, under
    every start method, and so do workers that replace dead ones.

    >>> class Photos(torch.utils.data.Dataset):
    ...     def __init__(self):
    ...         self.decode = cached(self.decode, limit="1MB")
    ...     def decode(self, index):
    ...         return torch.full((3,), index)
    ...     def __getitem__(self, index):
    ...         return self.decode(index) + torch.rand(3)
    >>> photos = Photos()
    >>> _ = photos[0], photos[0]
    >>> photos.decode.statistics().hits
    1

    Args:
        function: function of arguments of type int, str, bytes, float, Path, None and tuples of these, which
            are the key. Its values are tensors, arrays, numbers, texts, PIL images, and lists, tuples, dicts
            and dataclasses of these; other objects are pickled, which is slower. A method is cached for its
            instance.
        limit: largest total size of the values: bytes, a text such as "8GB", or a fraction ("0.5") of the
            available memory of the machine or its container; with a path, of the free disk space. A full
            cache stores nothing more: the stored values stay, and are hit in every epoch.
        name: name of a cache in memory that all processes of this user on this machine share under it; it
            ends with the last of them.
        path: file for the values, which outlives the program. Its folder has to be on a disk of this machine.
        version: version of the data or the function, text or number; a cache of another version is refused.
        copy: False makes arrays read-only, and avoids their copies in memory. Tensors cannot be read-only: a
            function that returns them is refused.

    Raises:
        ValueError: the limit is malformed; or the cache of this name or path belongs to another function or
            version (named in the text). `cached.clear(path)` removes a file.
        OSError: the file cannot be opened.
        RuntimeError: `name` or `path` needs a system call that this system or sandbox lacks.
    """

    clear = _Clear()
    __qualname__: str

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        limit: int | str,
        name: str | None = None,
        path: str | os.PathLike[str] | None = None,
        version: str | int | None = None,
        copy: bool = True,
    ) -> None:
        if not callable(function):
            raise TypeError(f"cached: function={function!r} cannot be called")
        if name is not None and path is not None:
            raise ValueError(
                f"cached: name={name!r} and path={str(path)!r}: give one, the memory's name or a file"
            )
        self._name = name
        self._path = None if path is None else os.path.abspath(path)
        self._limit = _bytes(limit, self._path)
        self._version, self._copy = version, copy
        self._set_function(function)
        self._open()

    def _set_function(self, function: Callable[..., Any]) -> None:
        # A method is stored as its parts, because `self` may be an attribute of the method's object.
        self._of, self._function, self._bound = None, function, isinstance(function, MethodType)
        if isinstance(function, MethodType):
            self._of, self._function = function.__self__, function.__func__
        self._keys = Keys(function)
        functools.update_wrapper(self, self._function, updated=())

    def _open(self) -> None:
        about = {"function": _qualified(self._function), "version": self._version}
        self._source: Any = None
        self._store: Store | ProcessStore
        if lacking := calls.missing(for_workers=False):
            if self._name is not None or self._path is not None:
                raise RuntimeError(
                    f"cached: name= and path= need {lacking}, which this system or sandbox lacks; without "
                    "them each process has its own values"
                )
            self._store, self._counters = ProcessStore(self._limit), _Counters(-1)
            return
        try:
            if self._path is not None:
                opened = files.at_path(self._path, about, self._limit)
            elif self._name is not None:
                held, self._source = _by_name(self._name, about, self._limit)
                opened = os.dup(held)  # `held` stays open for other processes
            else:
                opened = files.anonymous(about, self._limit)
        except files.Differs as error:
            where = f"name={self._name!r}" if self._path is None else f"path={self._path!r}"
            text = "Use another name or path, or remove the file with cached.clear(path)"
            raise ValueError(f"cached: {where} holds something else: {error}. {text}") from None
        counters = calls.memfd_create("fastq_loader.cache counters")
        os.ftruncate(counters, _ROWS * _ROW_WORDS * 8)
        self._attach(opened, counters)

    def _attach(self, fd: int, counters: int) -> None:
        self._store = Store(fd, self._limit, checks=self._path is not None)
        self._counters = _Counters(counters)

    # ---- calls ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        digest = digest_of(self._keys.key(args, kwargs))
        found = self._store.find(digest)
        if found is not None:
            try:
                value = self._read(found)
            except (ValueError, OSError) as error:
                self._counters.add("damaged")
                warnings.warn(f"cached: {self.__qualname__}: {error}; it is computed again", stacklevel=2)
            else:
                self._counters.add("hits")
                return value
        self._counters.add("misses")
        return self._compute(digest, args, kwargs)

    def _compute(self, digest: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = generators.GeneratorSnapshot()
        value = self._function(self._of, *args, **kwargs) if self._bound else self._function(*args, **kwargs)
        if drew := before.moved_since():
            self._counters.add("random")
            who, why = f"draws from {', '.join(drew)}", "they would be the same in every epoch"
            self._hint(who, f"{why}. Wrap only the part that draws no random numbers")
            return value
        try:
            head, parts, nbytes = encode(value)
        except (UnpicklableError, RuntimeError) as error:
            self._counters.add("refused")
            self._hint("returns a value that cannot be pickled", str(error))
            return value
        if not self._copy and has_tensors(head):
            text = "returns tensors, which cannot be read-only: use copy=True, or return arrays"
            raise TypeError(f"cached: {self.__qualname__}() {text}")
        try:
            stored = self._store.add(digest, head, parts, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            stored = False
        self._counters.add("stored" if stored else "full")
        found = None if self._copy else self._store.find(digest)
        return value if found is None else self._read(found)  # the read-only one

    def _read(self, found: Any) -> Any:
        read = self._store.read if self._copy else self._store.view
        return decode(self._store.head(found), partial(read, found))

    def _hint(self, does: str, why: str) -> None:
        if self._counters.first_hint():
            text = f"cached: {self.__qualname__}() {does}, so its values are not stored: {why}"
            warnings.warn(text, NotCached, stacklevel=4)

    def statistics(self) -> CacheStatistics:
        """Counts of the cache so far, of all processes that share this object."""
        counts = dict(zip(_COUNTS, self._counters.sums(), strict=True))
        return CacheStatistics(bytes=self._store.used(), **counts)

    def __repr__(self) -> str:
        return f"cached({self._function!r}, limit={self._limit})"

    # ---- on its way to other processes ----------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        kept = "_name", "_path", "_limit", "_version", "_copy", "_of", "_function", "_bound"
        state = {name: vars(self)[name] for name in kept}
        if get_spawning_popen() is not None and self._store.fd >= 0:
            state["descriptors"] = reduction.DupFd(self._store.fd), reduction.DupFd(self._counters.fd)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        descriptors = state.pop("descriptors", None)
        vars(self).update(state)
        self._keys = Keys(MethodType(self._function, self._of) if self._bound else self._function)
        functools.update_wrapper(self, self._function, updated=())
        if descriptors is None:  # perhaps on another machine: a cache in memory begins empty
            self._open()
        else:
            self._source = None
            self._attach(*(duplicate.detach() for duplicate in descriptors))

    def __deepcopy__(self, memo: dict[int, Any]) -> cached:
        """The same cache, for a copy of a dataset."""
        made = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(vars(self))
        made._of = copying.deepcopy(self._of, memo)
        return made


class _Counters:
    """Counts of all processes. Each has its own row; a later process reuses the row of one that has ended.

    Args:
        fd: descriptor of the shared memory, closed with this object; -1 without shared memory.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pid = 0
        self._held = -1
        self._words: Any = None
        self._row: Any = None
        if fd < 0:  # counts of this process only
            self._pid = process_id.current()
            self._words = self._row = memoryview(bytearray(_ROW_WORDS * 8)).cast("Q")

    def _own_row(self) -> Any:
        with files.first_use():
            if self._pid != process_id.current() and self.fd >= 0:  # a forked child has its parent's row
                self._row = None
                before, self._held = self._held, locks.open_anew(self.fd)
                if before >= 0:
                    os.close(before)
                for row in range(_ROWS):
                    if locks.try_lock(self._held, row, 1):
                        self._row = self._all()[row * _ROW_WORDS : (row + 1) * _ROW_WORDS]
                        break
                self._pid = process_id.current()
        return self._row

    def _all(self) -> Any:
        if self._words is None:
            self._words = memoryview(mmap.mmap(self.fd, _ROWS * _ROW_WORDS * 8)).cast("Q")
        return self._words

    def add(self, name: str) -> None:
        row = self._row if self._pid == process_id.pid else self._own_row()
        if row is not None:
            row[_INDEX[name]] += 1

    def first_hint(self) -> bool:
        """Whether no process has warned yet."""
        row = self._own_row()
        if row is None or any(self._all()[_HINTED::_ROW_WORDS]):
            return False
        row[_HINTED] = 1
        return True

    def sums(self) -> list[int]:
        words = self._all()
        return [sum(words[at::_ROW_WORDS]) for at in range(len(_COUNTS))]

    def __del__(self) -> None:
        for fd in (self.fd, self._held):
            if fd >= 0:
                os.close(fd)


_INDEX = {name: at for at, name in enumerate(_COUNTS)}


def _qualified(function: Callable[..., Any]) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _by_name(name: str, about: dict[str, Any], limit: int) -> tuple[int, Any]:
    from fastq_loader.extras.share import named  # its imports fail on other systems

    try:
        return named.descriptor(name, about, partial(files.anonymous, about, limit))
    except named.Differs as error:
        raise files.Differs(f"it is of {error.about}") from None


def _bytes(limit: Any, path: str | None) -> int:
    """A limit as a number of bytes."""
    wrong = f"cached: limit={limit!r} must be bytes (8_000_000_000, '8GB') or a part of free space ('0.5')"
    if isinstance(limit, bool) or not isinstance(limit, (int, str)):
        raise TypeError(wrong)
    if isinstance(limit, int):
        count = float(limit)
    else:
        digits = limit.strip().rstrip("BKMGTIbkmgti ")
        unit = limit.strip()[len(digits) :].strip().upper()
        try:
            count = float(digits) * _UNITS[unit]
        except (ValueError, KeyError):
            raise ValueError(wrong) from None
        if not unit and 0 < count < 1:
            count *= memory_bytes() if path is None else shutil.disk_usage(os.path.dirname(path)).free
    if not 0 < count < 1 << 62:
        raise ValueError(wrong)
    return int(count)


#: Largest number of nested datasets that are searched for caches.
_PARTS = 100


def caches_of(dataset: Any) -> list[cached]:
    """The caches among the attributes of a dataset and of the datasets in it. Runs none of their code."""
    found, seen, waiting = list[cached](), set[int](), [dataset]
    while waiting and len(seen) < _PARTS:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        own = attributes.held(part)
        # Not isinstance, which may run a user's `__class__` property.
        found += [value for value in own.values() if issubclass(type(value), cached)]
        waiting += [own[name] for name in ("dataset",) if name in own]
        several = own.get("datasets")
        waiting += several if type(several) is list else []
    return found
