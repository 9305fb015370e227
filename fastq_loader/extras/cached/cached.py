"""`cached`: a function whose values are computed once for all processes and all epochs.

Runs in the program and in every process that calls the function, on any thread. Owns the calls, where their
values lie, and how other processes get them. `checks` says which hits are computed again.
"""

from __future__ import annotations

import copy as copying
import copyreg
import errno
import functools
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from types import MethodType
from typing import Any

from torch.utils.data import get_worker_info

from fastq_loader.errors import NotCached, UnpicklableError, warn_user
from fastq_loader.extras.cached import equal, handover, instances, mark, memory, places, values
from fastq_loader.extras.cached.checks import Checks
from fastq_loader.extras.cached.counters import CacheStatistics
from fastq_loader.extras.cached.draws import Draws
from fastq_loader.extras.cached.keys import Keys
from fastq_loader.extras.cached.places import Options, Place, open_place
from fastq_loader.extras.images import sample_seeds
from fastq_loader.packing import pickling
from fastq_loader.system import attributes, process_id
from fastq_loader.workers.payload import PREPARE

#: Reasons for which a value is not stored, and the call returns it all the same.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
#: Checks in turn that could not read their source, after which a hint says so.
_FAILED_READS = 4


def _drawn() -> int:
    """The number of a program, of 47 bits: drawn from the system, and from no generator of the user's."""
    return int.from_bytes(os.urandom(6), "little") >> 1


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
            with their exact types are the key. Its values are tensors, arrays, numbers, texts, PIL images,
            and lists, tuples, dicts and dataclasses of these; other objects are pickled, which is slower.
        limit: largest total size of the values: bytes, a text such as "8GB", or a fraction ("0.5") of the
            available memory of the machine or its container, divided by its ranks; with a path, largest size
            of the file, and a fraction of the free disk space. A full cache stores nothing more: the stored
            values stay, and are hit in every epoch.
        name: name of a cache in memory that all processes of this user on this machine share under it; it
            ends with the last of them.
        path: folder for the values, which outlives the program, on a disk of this machine; one that cannot
            be written to is read. `~` is the home folder. Needs lmdb.
        version: version of the data or the function, text or number; a cache of another version is refused.
            With a name or a path, needed for a function of a notebook.
        copy: False makes arrays read-only, and avoids copies of large ones. Writing to them all the
            same (by way of `torch.from_numpy`) changes this one value alone.
        check: False never computes a stored value again: for a function that is right and whose values cannot
            be repeated. Whatever the cache then returns is believed.

    Raises:
        ValueError: the limit is malformed; or the cache of this name or path belongs to another function or
            version (named in the text), or the path to something else, or to a network. `cached.clear(path)`
            removes a folder.
        TypeError: an argument of a call cannot be part of a key.
        OSError: the folder cannot be opened, the one above it does not exist, or others may write to it.
        RuntimeError: `name` or `path` needs a system call that this system or sandbox lacks.
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
        path = None if path is None else mark.absolute(path)
        nbytes = places.bytes_of(limit, path, is_shared=name is not None or path is not None)
        whose = places.name_of(function), places.is_in_file(function)
        self._options = Options(limit, nbytes, name, path, version, copy, check, *whose)
        self._of: Any = None
        self._function: Any = function
        if isinstance(function, MethodType):
            self._of, self._function = function.__self__, function.__func__
        self._in_class = False
        #: Number of the program that made this cache.
        self.program = _drawn()
        self._set_function()
        is_of_module = self._of is None and name is None
        #: The name of this cache in each process that imports its module, if it has one.
        self._handed_as = handover.register(self, self._options.function) if is_of_module else None
        self._place = open_place(self._options)

    @staticmethod
    def clear(path: str | os.PathLike[str]) -> None:
        """Remove the folder of a cache. Processes that have it open can use it until they end.

        Raises:
            ValueError: this is no folder of a cache.
            FileNotFoundError: there is no such folder.
        """
        mark.remove(mark.absolute(path))

    def _set_function(self) -> None:
        self._pid = 0  # of the process that has used it
        if prepare not in PREPARE:
            PREPARE.append(prepare)
        function = self._function if self._of is None else MethodType(self._function, self)
        self._keys = Keys(function, self._options.function.rpartition(".")[2])
        functools.update_wrapper(self, self._function, updated=())
        self.__qualname__ = places.base_of(self._function).__qualname__

    def __set_name__(self, owner: type, name: str) -> None:
        self._in_class = True

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    @property
    def fd(self) -> int:
        """Descriptor of the memory; -1 if processes do not share it."""
        return self._place.fd

    # ---- calls ----------------------------------------------------------------------------------------

    def _enter(self) -> Any:
        """Begin to use the cache in this process. Returns the object of a method, which may be used for this
        call alone."""
        of = self._of() if type(self._of) is weakref.ref else self._of
        with memory.entering:
            if self._pid == process_id.current():
                return of
            if (handed := handover.received(self._handed_as)) is not None:
                # Of a folder, what is handed over is the memory of its counters.
                store = None if self._options.path is None else self._place.store
                self._place, self.program = Place(handed[0], store), handed[1]
            counters = self._place.counters
            counters.enter()
            self._checks = Checks(self.program, counters, joins_earlier=self._options.path is not None)
            if of is not None and any(value is self for value in attributes.held(of).values()):
                self.adopt(of)
            self._pid = process_id.current()
        return of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._pid != process_id.pid:
            of = self._enter()  # noqa: F841 - alive until the call returns
        place, counters = self._place, self._place.counters
        if counters.is_marked:
            counters.add("distrusted")
            return self._plain(args, kwargs)
        # In memory, values belong to one object; a folder and a name are shared by all.
        given = args
        if self._in_class and not self._options.is_shared:
            number, is_new = instances.number_of(args[0])
            given = (number, *args[1:])
            if is_new and get_worker_info() is not None:
                counters.add("unshared")
        key = self._keys.key(given, kwargs)
        is_damaged, check = False, None
        try:
            found = place.store.get(key, self._options.copy)
            if found is not None:
                # Without the object of a method, nothing can be computed any more.
                is_gone = type(self._of) is weakref.ref and self._of() is None
                checks = self._options.check and not is_gone
                check = self._checks.due(key, *found.writer) if checks else None
                if check is None:
                    value = values.decode(found, renews=True)
                    counters.add("hits")
                    return value
                with sample_seeds.again():
                    value = values.decode(found)
        except Exception as error:  # also of a class that cannot be found any more
            is_damaged, found = True, None
            where = f" of the folder {self._options.path!r}" if self._options.path else ""
            text = f": a value{where} cannot be read and is computed again: {type(error).__name__}: {error}"
            self._warn_once("damaged", text, UserWarning)
        if found is not None and check is not None:
            return self._check(check, found, value, args, kwargs)
        counters.add("misses")
        return self._compute(key, args, kwargs, is_damaged)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function."""
        of = self._of
        if type(of) is weakref.ref:
            of = of()
            if of is None:
                raise ReferenceError(
                    f"cached: {self._options.function}: the object of this method is gone, with its values"
                )
        return self._function(*args, **kwargs) if self._of is None else self._function(of, *args, **kwargs)

    def _compute(self, key: bytes, args: tuple[Any, ...], kwargs: dict[str, Any], is_damaged: bool) -> Any:
        counters, began = self._place.counters, time.monotonic()
        with sample_seeds.watched():
            draws = Draws()
            value = self._plain(args, kwargs)
            drew, is_ours = draws.since()
        if drew:
            counters.add("random" if is_ours else "busy")
            if is_ours:
                text = (
                    f"() draws from {', '.join(drew)}, so its values are not stored: they would be the same "
                )
                self._warn_once(
                    "hinted", text + "in every epoch. Wrap only the part that draws no random numbers"
                )
            return value
        writer = values.Writer(self._checks.writer, time.monotonic() - began)
        try:
            encoded = values.Encoded(value, writer)
            stored = self._place.store.add(key, encoded, is_damaged)
            counters.add(stored)
            if stored == memory.FULL and encoded.nbytes > self._options.nbytes:
                text = f"() returns a value of {encoded.nbytes:,} bytes, for which "
                self._warn_once("hinted", f"{text}limit={self._options.limit!r} is too low")
            # With copy=False, a value is read-only from the first call on.
            found = None if self._options.copy else self._place.store.get(key, False)
        except (UnpicklableError, RuntimeError) as error:
            counters.add("refused")
            text = f"() returns a value that cannot be pickled, so its values are not stored: {error}"
            self._warn_once("hinted", text)
            return value
        except ValueError as error:
            counters.add(memory.FULL)
            text = f": a value of the folder {self._options.path!r} cannot be stored: {error}"
            self._warn_once("damaged", text, UserWarning)
            return value
        except (OSError, MemoryError) as error:
            if getattr(error, "errno", errno.ENOMEM) not in _NO_ROOM:
                raise
            counters.add(memory.FULL)
            return value
        return value if found is None else values.decode(found)

    # ---- checks ---------------------------------------------------------------------------------------

    def _check(
        self, check: int, found: values.Found, stored: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute the value of a hit again. Return that if the two differ; else the hit, with the place and
        the seeds of the sample as if nothing had been computed."""
        counters, began, where = self._place.counters, time.monotonic(), ""
        with sample_seeds.again() as again:
            draws = Draws()
            try:
                fresh = self._plain(args, kwargs)
            except (TimeoutError, InterruptedError, MemoryError):
                raise
            except OSError as error:
                self._checks.failed_reads += 1
                if self._checks.failed_reads == _FAILED_READS:
                    text = (
                        f"(): {_FAILED_READS} values in turn could not be computed again: {error}. The "
                        "stored ones are returned: the source is gone, or it is another one"
                    )
                    self._warn_once("hinted", text)
            except Exception as error:
                self._distrust(f"computing it again raised {type(error).__name__}: {error}")
                raise
            else:
                self._checks.failed_reads = 0
                where = self._differ(stored, fresh, draws)
            self._checks.done(check, time.monotonic() - began)
            if where:
                again.keep()
                self._distrust(where)
                return fresh
        counters.add("hits")
        return values.decode(found, renews=True)

    def _differ(self, stored: Any, fresh: Any, draws: Draws) -> str:
        drew, is_ours = draws.since()
        if is_ours:
            return f"it drew from {', '.join(drew)}"
        try:
            where = equal.difference(stored, fresh)
        except equal.Incomparable:
            self._place.counters.add("unchecked")
            return ""
        self._place.counters.add("checked")
        return where

    def _distrust(self, where: str) -> None:
        """Compute every value from now on, and say why."""
        counters = self._place.counters
        hits = counters.sum("hits")
        counters.add("distrusted")
        if counters.mark():
            text = (
                "(): a stored value is not what computing it again gives, so the cache is not used any more: "
                f"{where}. There were {hits} hits before. If the function draws random numbers, wrap only "
                "the part that does not; if two objects, shards or versions share the values, give each a "
                "path= or name= of its own, or version=str(root); if it is right and cannot be repeated, "
                "pass check=False"
            )
            warn_user(f"cached: {self.__qualname__}{text}", NotCached)

    def _warn_once(self, counter: str, text: str, kind: type[Warning] = NotCached) -> None:
        """Warn if no process has yet, as this counter shows."""
        if self._place.counters.add_first(counter):
            warn_user(f"cached: {self.__qualname__}{text}", kind)

    def statistics(self) -> CacheStatistics:
        """Counts of the cache so far, of all processes that share this object, or its name."""
        nbytes, number, limit = self._place.store.usage()
        counts = self._place.counters.sums()
        return CacheStatistics(
            function=self._options.function, bytes=nbytes, values=number, limit=limit, **counts
        )

    def __repr__(self) -> str:
        return f"cached({self._options.function}, limit={self._options.limit!r})"

    # ---- on its way to other processes ----------------------------------------------------------------

    def adopt(self, holder: Any) -> None:
        """Prepare for workers of a loader whose dataset holds this cache.

        Args:
            holder: the object that has it as an attribute, or whose class has.
        """
        if self._in_class:
            instances.number_of(holder)
        elif self._of is holder:
            # Weakly, so that both are freed at once.
            with suppress(TypeError):  # it has slots
                self._of = weakref.ref(holder)

    def __reduce__(self) -> Any:
        if places.has_its_name(self) and not (self.__module__ == "__main__" and pickling.is_interactive()):
            return self.__qualname__
        state = self._state()
        if get_spawning_popen() is not None:
            state["program"] = self.program
            if self.fd >= 0:
                state["fd"] = reduction.DupFd(self.fd)
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]

    def _state(self) -> dict[str, Any]:
        of = self._of() if type(self._of) is weakref.ref else self._of
        kept = "_options", "_function", "_in_class", "_handed_as"
        return {name: vars(self)[name] for name in kept} | {"_of": of}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fd = state.pop("fd").detach() if "fd" in state else -1
        self.program = _drawn()
        vars(self).update(state)
        self._set_function()
        if fd >= 0 and self._options.path is None:
            self._place = Place(fd)
        else:  # a copy, or on another machine: a cache in memory begins empty
            self._place = open_place(self._options, fd)

    def __copy__(self) -> cached:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> cached:
        """The same cache if a module has it under its name; else one that begins empty."""
        if places.has_its_name(self):
            return self
        made: cached = object.__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copying.deepcopy(self._state(), memo))
        return made


def caches_of(dataset: Any) -> list[cached]:
    """The caches that a dataset, its class and its datasets hold. Runs none of their code."""
    return [*dict.fromkeys(cache for _, cache in instances.held_by(dataset, cached))]


def prepare(dataset: Any) -> None:
    """Prepare the caches that a dataset holds for the workers that will read it."""
    for holder, cache in instances.held_by(dataset, cached):
        cache.adopt(holder)
