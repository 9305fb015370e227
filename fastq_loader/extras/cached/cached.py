"""`cached`: a function whose values are computed once for all processes and all epochs.

Runs in the program and in every process that calls the function, on any thread. Owns the calls, where their
values lie, and how other processes get them. `checks` says which hits are computed again.
"""

from __future__ import annotations

import copyreg
import functools
import gc
import os
import time
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from types import MethodType
from typing import Any

from torch.utils.data import get_worker_info

from fastq_loader.errors import NotCached, UnpicklableError, warn_user
from fastq_loader.extras.cached import equal, folder, handover, instances, memory, storage, values
from fastq_loader.extras.cached.checks import Checks
from fastq_loader.extras.cached.counters import NAMES, CacheStatistics
from fastq_loader.extras.cached.draws import StatesBeforeCall
from fastq_loader.extras.cached.keys import key_of
from fastq_loader.extras.cached.storage import CacheOptions
from fastq_loader.extras.images import sample_seeds
from fastq_loader.packing import pickling
from fastq_loader.system import calls, process_id

#: Bytes of a cache that may be garbage, for which a new one of its function calls the garbage collector.
_LARGE = 1 << 26
#: Checks in turn that could not read their source, after which a hint says so.
_FAILED_READS = 4


class cached:
    """Cache the values of a function, once for all processes of a machine and for all epochs.

    Wrap the part of a dataset that draws no random numbers: reading and decoding. Random augmentation stays
    outside, and is new in every epoch. The function is called again now and then, and its value compared with
    the stored one: so it must have no effect but its value. If the two differ, the cache computes every value
    from then on, and a hint says where. Also a decorator: of a function, or of a method in its class, whose
    values belong to each object by itself.

    >>> from functools import partial
    >>> class Photos(torch.utils.data.Dataset):
    ...     @partial(cached, limit="1MB")
    ...     def decode(self, index):
    ...         return torch.full((3,), index)
    ...     def __getitem__(self, index):
    ...         return self.decode(index) + torch.rand(3)
    >>> photos = Photos()
    >>> _ = photos[0], photos[0]
    >>> Photos.decode.statistics().hits
    1

    Args:
        function: function of arguments of type int, str, bytes, float, Path, None and tuples of these, which
            with their exact types, by position or by name, are the key; the order of names is not part of it.
            Its values are tensors, arrays, numbers, texts, PIL images (of a PNG, GIF, TIFF, WEBP or AVIF file
            their `copy()`), and lists, tuples, dicts and dataclasses of these; other objects are pickled,
            which is slower. One that seeds itself draws from `torch.Generator().manual_seed(index)`, not from
            a global generator: values of that are stored.
        limit: largest total size of the values: bytes, a text such as "8GB", or a fraction ("0.5") of the
            available memory of the machine or its container, divided by its ranks; with a path, largest size
            of the file, and a fraction of the free disk space. A full cache stores nothing more: the stored
            values stay, and are hit in every epoch.
        name: name of a cache in memory that all processes of this user on this machine share under it; it
            ends with the last of them.
        path: folder for the values, which outlives the program, on a disk of this machine, which can be
            written to. `~` is the home folder.
        version: version of the data or the function, text or number; a cache of another version is refused.
            With a name or a path, needed for a function of a notebook.
        copy: False makes arrays read-only, and avoids copies of large ones. Writing to them all the
            same (by way of `torch.from_numpy`) changes this one value alone.
        check: False never computes a stored value again: for a function that is right and whose values cannot
            be repeated. Whatever the cache then returns is believed.

    Raises:
        ValueError: the limit is malformed; or the cache of this name or path belongs to another function or
            version (named in the text), or the path is on a network. `cached.clear(path)`
            removes a folder.
        TypeError: an argument of a call cannot be part of a key.
        OSError: the folder cannot be opened, the one above it does not exist, or others may write to it.
    """

    __qualname__: str

    def __init__(
        self,
        function: Callable[..., Any] | None = None,
        *,
        limit: int | str,
        name: str | None = None,
        path: str | os.PathLike[str] | None = None,
        version: str | float | None = None,
        copy: bool = True,
        check: bool = True,
    ) -> None:
        if not callable(function):
            raise TypeError(
                f"cached: function={function!r} cannot be called; a decorator is @partial(cached, limit=...)"
            )
        if not isinstance(version, str | float | int | None):
            raise TypeError(f"cached: version={version!r} must be a text or a number")
        if name is not None and path is not None:
            raise ValueError(
                f"cached: name={name!r} and path={str(path)!r}: give one, the memory's name or a folder"
            )
        path = None if path is None else folder.absolute(path)
        nbytes = storage.bytes_of(limit, path, is_shared=name is not None or path is not None)
        whose = storage.name_of(function), storage.is_in_file(function)
        self._options = CacheOptions(limit, nbytes, name, path, version, copy, check, *whose)
        self._function, self._in_class = function, False
        # A cache of a function has the same name in each process that imports its module.
        is_method = isinstance(function, MethodType)
        self._begin(None if is_method else handover.next_of(self._options.function))

    @staticmethod
    def clear(path: str | os.PathLike[str]) -> None:
        """Remove the folder of a cache. Processes that have it open can use it until they end.

        Raises:
            FileNotFoundError: there is no such folder, or it is not one of a cache.
        """
        folder.remove(folder.absolute(path))

    def _begin(self, handed_as: Any) -> None:
        """Open the storage of the values. `handed_as` is the name of this cache in other processes, if these
        are to have the same values."""
        functools.update_wrapper(self, self._function, updated=())
        self.__qualname__ = storage.base_of(self._function).__qualname__
        self._pid = 0  # of the process that has used it
        #: Number of the program, of 47 bits: drawn from the system, and from no generator of the user's.
        self.program = int.from_bytes(os.urandom(6), "little") >> 1
        # A method's object and its cache hold each other. The collector does not see how large they are.
        others = [each for each in handover.caches.values() if each.__qualname__ == self.__qualname__]
        if any(each.memory is not None and os.fstat(each.memory.fd).st_size > _LARGE for each in others):
            del others
            gc.collect()
        self._handed_as = handed_as or self.program
        handover.caches[self._handed_as] = self
        self.memory: memory.Memory | None = None
        self._store: Any = None
        if lacking := calls.missing(for_workers=False):
            text = f"values are not stored: this system or sandbox lacks {lacking}"
            warn_user(f"cached: {self.__qualname__}: {text}", NotCached)
        else:
            self.memory, self._store = storage.open_storage(self._options)

    def __set_name__(self, owner: type, name: str) -> None:
        self._in_class = True
        instances.classes.add(owner)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    # ---- calls ----------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Begin to use the cache in this process. Several threads may at once."""
        if self.memory is None:
            return
        if self._handed_as in handover.handed:
            self.memory, self.program = handover.handed[self._handed_as]
            if self._options.path is None:  # of a folder, the memory has the counters alone
                self._store = self.memory
        self._counters = self.memory.counters
        self._counters.enter()
        self._checks: dict[bytes, Checks] = {}  # by the numbers of objects
        self._pid = process_id.current()

    def _begin_checks(self, whose: bytes) -> Checks:
        """Make the checks of an object. Its workers get numbers that no other object's workers have."""
        program = self.program ^ int.from_bytes(whose[:5], "little")
        checks = self._checks[whose] = Checks(program, self._counters, self._options.path is not None)
        return checks

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._pid != process_id.pid:
            self._enter()
            if self.memory is None:
                return self._function(*args, **kwargs)
        counters = self._counters
        if counters.is_marked:
            counters.add("distrusted")
            return self._function(*args, **kwargs)
        # In memory, values belong to one object; a folder and a name are shared by all objects, and each of
        # them checks the values of the others. Each has first checks of its own, in memory each of the first.
        given, whose = args, b""
        if self._in_class:
            number, is_new = instances.number_of(args[0])
            if self._options.is_shared:
                given, whose = args[1:], number
            else:
                given, whose = (number, *args[1:]), number[:1]
                if is_new and get_worker_info() is not None:
                    counters.add("unshared")
        checks = self._checks.get(whose) or self._begin_checks(whose)
        key = key_of(given, kwargs, self.__qualname__)
        paid = None
        try:
            found = self._store.get(key, self._options.copy)
            if found is not None:
                paid = checks.due(key, found.writer, found.seconds) if self._options.check else None
                if paid is None:
                    value = values.decode(found, renews=True)
                    counters.add("hits")
                    return value
                with sample_seeds.again():
                    value = values.decode(found)
        except Exception as error:  # also of a class that cannot be found any more
            found = None
            counters.add("damaged")
            where = f" of the folder {self._options.path!r}" if self._options.path else ""
            text = f": a value{where} cannot be read and is computed again: {type(error).__name__}: {error}"
            self._warn_once(text, UserWarning)
        compute = functools.partial(self._function, *args, **kwargs)
        if paid is not None and found is not None:
            return self._check(checks, paid, found, value, compute)
        counters.add("misses")
        return self._compute(checks.writer, key, compute)

    def _compute(self, writer: int, key: bytes, compute: Callable[[], Any]) -> Any:
        began = time.monotonic()
        with sample_seeds.watched():
            draws = StatesBeforeCall()
            value = compute()
            drew, is_ours = draws.since()
        text = ""  # of a warning
        if is_ours:
            became = "random"
            text = f"() draws from {', '.join(drew)}, so its values are not stored: they would be the same "
            text += "in every epoch. Wrap only the part that draws no random numbers"
        elif drew:
            became = memory.BUSY
        else:
            try:
                encoded = values.encode(value, writer, time.monotonic() - began)
                became = self._store.add(key, encoded)
                if became == memory.FULL and encoded.nbytes > self._options.nbytes:
                    text = f"() returns a value of {encoded.nbytes:,} bytes, for which "
                    text += f"limit={self._options.limit!r} is too low"
                # With copy=False, a value is read-only from the first call on.
                if not self._options.copy and (found := self._store.get(key, False)) is not None:
                    value = values.decode(found)
            except (UnpicklableError, RuntimeError) as error:
                became = "refused"
                text = f"() returns a value that cannot be pickled, so its values are not stored: {error}"
            except (ValueError, OSError, MemoryError):
                became = memory.FULL
        self._counters.add(became)
        if text:
            self._warn_once(text)
        return value

    # ---- checks ---------------------------------------------------------------------------------------

    def _check(
        self, checks: Checks, paid: float, found: values.EncodedValue, stored: Any, compute: Callable[[], Any]
    ) -> Any:
        """Compute the value of a hit again. Return that if the two differ; else the hit, with the place and
        the seeds of the sample as if nothing had been computed."""
        began, where = time.monotonic(), ""
        with sample_seeds.again() as again:
            draws = StatesBeforeCall()
            try:
                fresh = compute()
            except (TimeoutError, InterruptedError, MemoryError):
                raise
            except OSError as error:
                checks.failed_reads += 1
                if checks.failed_reads == _FAILED_READS:
                    text = f"(): {_FAILED_READS} values in turn could not be computed again: {error}. "
                    text += "The stored ones are returned: the source is gone, or it is another one"
                    self._warn_once(text)
            except Exception as error:
                self._distrust(f"computing it again raised {type(error).__name__}: {error}")
                raise
            else:
                checks.failed_reads = 0
                where = self._differ(stored, fresh, draws)
            checks.done(found.writer, paid, time.monotonic() - began)
            if where:
                again.keep()
                self._distrust(where)
                return fresh
        self._counters.add("hits")
        return values.decode(found, renews=True)

    def _differ(self, stored: Any, fresh: Any, draws: StatesBeforeCall) -> str:
        drew, is_ours = draws.since()
        if is_ours:
            return f"it drew from {', '.join(drew)}"
        try:  # without what pickle loses of the fresh value, too
            where = equal.difference(stored, values.decode(values.encode(fresh)))
        except Exception:  # of user code
            self._counters.add("unchecked")
            return ""
        self._counters.add("checked")
        return where

    def _distrust(self, where: str) -> None:
        """Compute every value from now on, and say why."""
        counters = self._counters
        counters.is_marked = True
        if counters.add_first("distrusted"):
            text = (
                "(): a stored value is not what computing it again gives, so the cache is not used any more: "
                f"{where}. There were {counters.sum('hits')} hits before. If the function draws random "
                "numbers, wrap only the part that does not; if two objects, shards or versions share the "
                "values, give each a path= or name= of its own, or version=str(root); if it is right and "
                "cannot be repeated, as rounding with another number of threads, pass check=False"
            )
            warn_user(f"cached: {self.__qualname__}{text}", NotCached)

    def _warn_once(self, text: str, kind: type[Warning] = NotCached) -> None:
        """Warn if no process has yet, as a counter shows."""
        if self._counters.add_first("warned" if kind is UserWarning else "hinted"):
            warn_user(f"cached: {self.__qualname__}{text}", kind)

    def statistics(self) -> CacheStatistics:
        """Counts of the cache so far, of all processes that share this object, or its name."""
        if self.memory is None:
            return CacheStatistics(function=self._options.function)
        nbytes, number, limit = self._store.usage()
        counts = {name: self.memory.counters.sum(name) for name in NAMES}
        return CacheStatistics(
            function=self._options.function, bytes=nbytes, values=number, limit=limit, **counts
        )

    def __repr__(self) -> str:
        return f"cached({self._options.function}, limit={self._options.limit!r})"

    # ---- on its way to other processes ----------------------------------------------------------------

    def __reduce__(self) -> Any:
        """Copies begin empty; one on its way to a new worker keeps its values."""
        if storage.has_its_name(self) and not (self.__module__ == "__main__" and pickling.is_interactive()):
            return self.__qualname__
        function = self._function
        # A method would be looked up by its name, which is this cache's.
        parts = (function.__func__, function.__self__) if type(function) is MethodType else (function,)
        handed_as = self._handed_as if get_spawning_popen() is not None else None
        state = parts, self._options, self._in_class, handed_as
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        parts, self._options, self._in_class, handed_as = state
        self._function = parts[0] if len(parts) == 1 else MethodType(*parts)
        self._begin(handed_as)
