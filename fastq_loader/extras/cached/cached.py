"""`cached`: a function whose values are computed once for all processes and all epochs.

Runs in the program and in every process that calls the function, on any thread. Owns whose value a call is,
where it lies, and how other processes get it.
"""

from __future__ import annotations

import contextlib
import copy as copying
import copyreg
import errno
import functools
import os
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from types import MethodType
from typing import Any

from fastq_loader.errors import LoaderHint, NotCached, UnpicklableError, warn_user
from fastq_loader.extras.cached import handover, identity, mark, memory, values
from fastq_loader.extras.cached.counters import CacheStatistics
from fastq_loader.extras.cached.draws import Draws, generators_of
from fastq_loader.extras.cached.keys import Keys
from fastq_loader.extras.cached.limits import bytes_of
from fastq_loader.extras.cached.places import Options, Place, open_place
from fastq_loader.extras.cached.process import ProcessMemory
from fastq_loader.extras.images import sample_seeds
from fastq_loader.extras.samplers.walk import Walk
from fastq_loader.packing import pickling
from fastq_loader.system import attributes, process_id

#: Caches of methods. A dataset that has been given its cache is let go of at a fork, at the latest: its
#: loader starts workers, and this process may never call the function.
_bound: weakref.WeakSet[cached] = weakref.WeakSet()


def _let_go() -> None:
    for cache in list(_bound):
        with contextlib.suppress(ReferenceError):
            cache.object_of_method()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_let_go)


class cached(identity.Apart):
    """Cache the values of a function, once for all processes of a machine and for all epochs.

    Wrap the part of a dataset that draws no random numbers: reading and decoding. Random augmentation stays
    outside, and is new in every epoch. All workers of all loaders with this object share the values, under
    every start method, and so do workers that replace dead ones. Also a decorator: `@partial(cached,
    limit="8GB")`, of a function or of a method in its class.

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
            instance: a deep copy of that has an empty cache.
        limit: largest total size of the values: bytes, a text such as "8GB", or a fraction ("0.5") of the
            available memory of the machine or its container, divided by its ranks; with a path, largest size
            of the file, and a fraction of the free disk space. A full cache stores nothing more: the stored
            values stay, and are hit in every epoch.
        name: name of a cache in memory that all processes of this user on this machine share under it; it
            ends with the last of them.
        path: folder for the values, which outlives the program, on a disk of this machine; one that cannot
            be written to is read. `~` is the home folder. Needs lmdb.
        version: version of the data or the function, text or number; a cache of another version is refused.
            With a name or a path, needed for a function that holds more than plain data, and for one of a
            notebook.
        copy: False makes arrays read-only, and avoids their copies in memory. Tensors cannot be read-only: a
            function that returns them is refused.

    Raises:
        ValueError: the limit is malformed; or the cache of this name or path belongs to another function or
            version (named in the text), or the path to something else, or to a network. `cached.clear(path)`
            removes a folder.
        TypeError: with a name or a path, at the first call: the function holds something that is no plain
            data, and there is no version.
        OSError: the folder cannot be opened, the one above it does not exist, or others may write to it.
        RuntimeError: `name` or `path` needs a system call that this system or sandbox lacks.
    """

    __qualname__: str
    #: The name of this cache in each process that imports its module, if it has one.
    handed_as: Any = None

    def __init__(
        self,
        function: Callable[..., Any] | None = None,
        *,
        limit: int | str,
        name: str | None = None,
        path: str | os.PathLike[str] | None = None,
        version: str | float | None = None,
        copy: bool = True,
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
        nbytes = bytes_of(limit, path, is_shared=name is not None or path is not None)
        whose = identity.name_of(function), identity.source_of(function)
        self._options = Options(limit, nbytes, name, path, version, copy, *whose)
        self._of: Any = None
        self._function: Any = function
        if isinstance(function, MethodType):
            self._of, self._function = function.__self__, function.__func__
        self._in_class = False
        self._prefix: bytes | None = None  # of keys
        self._set_function()
        if identity.holds_nothing(function) and not self._options.is_shared:
            with contextlib.suppress(identity.NotPlain):
                self.handed_as = handover.register(self, identity.digest_of(function))
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
        self._instances: dict[int, tuple[Any, bytes]] = {}
        self._generators: dict[str, Any] | None = None
        self._pid = 0  # of the process that has used it
        self._name = self._options.function
        if self._of is not None:
            _bound.add(self)
        function = self._bound_to(None if self._of is None else self)
        self._keys = Keys(function, self._name.rpartition(".")[2])
        functools.update_wrapper(self, self._function, updated=())
        self.__qualname__ = identity.base_of(self._function).__qualname__

    def __set_name__(self, owner: type, name: str) -> None:
        self._in_class = True

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    # ---- whose values these are ---------------------------------------------------------------------------

    def _enter(self) -> Any:
        """Begin to use the cache in this process. Returns the object, which may be used for this one call."""
        of = self.object_of_method()
        with memory.entering:
            if self._pid == process_id.current():
                return of
            if (handed := handover.received(self.handed_as)) >= 0:
                self._place = Place(handed)
            if self._prefix is None:
                try:
                    self._prefix = self._identity() if self._options.is_shared else b""
                except TypeError:
                    self._place = Place(-1, ProcessMemory(0))  # leaves its folder to others
                    raise
            self._place.counters.enter()
            self._pid = process_id.current()
        return of

    @property
    def fd(self) -> int:
        """Descriptor of the memory; -1: there is none that processes share."""
        return self._place.fd

    def _identity(self) -> bytes:
        code = self._options.source.code if self._options.name is not None else ""
        function = self._bound_to(self.object_of_method())
        return self._digest(function) + f"{code} {self._options.version!r} ".encode()

    def _digest(self, part: Any) -> bytes:
        """Digest of a function or an object. With a version, one that holds more than plain data has none."""
        try:
            return identity.digest_of(part)
        except identity.NotPlain as error:
            if self._options.version is not None:
                return self._name.encode()
            raise TypeError(
                f"cached: {error}, which is no plain data: pass version=1, and another number when it gives "
                "other values; or cache a function that does not hold it"
            ) from None

    def _digest_of_instance(self, instance: Any) -> bytes:
        """Digest of the object of a method that was cached in its class, taken at the first call."""
        number = id(instance)
        known = self._instances.get(number)
        if known is not None and known[0]() is instance:
            return known[1]
        digest, instances = self._digest(instance), self._instances
        with contextlib.suppress(TypeError):  # it has slots
            instances[number] = weakref.ref(instance, lambda _: instances.pop(number, None)), digest
        return digest

    def object_of_method(self) -> Any:
        """The object of a method, or None. Once that holds this cache, it is referred to weakly, so that both
        are freed at once."""
        of = self._of
        if type(of) is weakref.ref:
            of = of()
            if of is None:
                raise ReferenceError(
                    f"cached: {self._name}: the object of this method is gone, and with it its values"
                )
        elif of is not None and any(value is self for value in attributes.held(of).values()):
            with contextlib.suppress(TypeError):  # it has slots
                self._of = weakref.ref(of)
        return of

    def _bound_to(self, of: Any) -> Any:
        return self._function if of is None else MethodType(self._function, of)

    # ---- calls ----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._pid != process_id.pid:
            of = self._enter()  # noqa: F841 - alive until the call returns
        given = (self._digest_of_instance(args[0]), *args[1:]) if self._in_class else args
        key = self._prefix + self._keys.key(given, kwargs)  # type: ignore[operator]
        is_damaged, place = False, self._place
        try:
            found = place.store.get(key, self._options.copy)
            if found is not None:
                value = values.decode(found[0], found[1], renews=True)
                place.counters.add("hits")
                return value
        except Exception as error:  # also of a class that cannot be found any more
            is_damaged = True
            self._warn_of_damage(error)
        place.counters.add("misses")
        return self._compute(key, args, kwargs, is_damaged)

    def _compute(self, key: bytes, args: tuple[Any, ...], kwargs: dict[str, Any], is_damaged: bool) -> Any:
        of = self.object_of_method()
        with sample_seeds.watched():
            draws = Draws(self._own_generators(args))
            value = self._bound_to(of)(*args, **kwargs)
            drew, is_ours = draws.since()
        if drew:
            self._place.counters.add("random" if is_ours else "busy")
            if is_ours:
                text = (
                    "so its values are not stored: they would be the same in every epoch. Wrap only the part "
                )
                text += "that draws no random numbers"
                self._warn_once("hinted", f"() draws from {', '.join(drew)}, {text}")
            return value
        try:
            encoded = values.Encoded(value)
        except (UnpicklableError, RuntimeError) as error:
            self._place.counters.add("refused")
            text = f"() returns a value that cannot be pickled, so its values are not stored: {error}"
            self._warn_once("hinted", text)
            return value
        if not self._options.copy and encoded.has_tensors:
            text = "returns tensors, which cannot be read-only: use copy=True, or return arrays"
            raise TypeError(f"cached: {self.__qualname__}() {text}")
        self._place.counters.add(self._add(key, encoded, is_damaged))
        if not draws.are_all_known:
            text = "() holds more than was searched for generators: "
            self._warn_once("hinted", text + "if it draws, its values are the same each time", LoaderHint)
        found = None if self._options.copy else self._place.store.get(key, False)
        return value if found is None else values.decode(*found)  # the read-only one

    def _add(self, key: bytes, encoded: values.Encoded, replace: bool) -> str:
        stored: str = memory.FULL
        try:
            stored = self._place.store.add(key, encoded, replace)
        except ValueError as error:
            self._warn_of_damage(error)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
                raise
        if stored == memory.FULL and encoded.nbytes > self._options.nbytes:
            text = f"() returns a value of {encoded.nbytes:,} bytes, for which "
            self._warn_once("hinted", f"{text}limit={self._options.limit!r} is too low")
        return stored

    def _own_generators(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """The generators that the function holds, searched once in a process; of a method that was cached in
        its class, also those of the object."""
        if self._generators is None:
            self._generators = generators_of(self._function, self.object_of_method(), self)
        return generators_of(None, args[0], self, self._generators) if self._in_class else self._generators

    def _warn_of_damage(self, error: Exception) -> None:
        where = f" of the folder {self._options.path!r}" if self._options.path else ""
        text = f": a value{where} cannot be read and is computed again: {type(error).__name__}: {error}"
        self._warn_once("damaged", text, UserWarning)

    def _warn_once(self, counter: str, text: str, kind: type[Warning] = NotCached) -> None:
        """Warn if no process has yet, as this counter shows."""
        if self._place.counters.add_first(counter):
            warn_user(f"cached: {self.__qualname__}{text}", kind)

    def statistics(self) -> CacheStatistics:
        """Counts of the cache so far, of all processes that share this object, or its name."""
        nbytes, number, limit = self._place.store.usage()
        counts = self._place.counters.sums()
        return CacheStatistics(function=self._name, bytes=nbytes, values=number, limit=limit, **counts)

    def __repr__(self) -> str:
        return f"cached({self._name}, limit={self._options.limit!r})"

    # ---- on its way to other processes ----------------------------------------------------------------

    def __reduce__(self) -> Any:
        if identity.found(self) is self and not (self.__module__ == "__main__" and pickling.is_interactive()):
            return self.__qualname__
        if self._options.is_shared and self._prefix is None:
            self._prefix = self._identity()
        state = self._state() | {"_prefix": self._prefix}
        if get_spawning_popen() is not None and self.fd >= 0:
            state["fd"] = reduction.DupFd(self.fd)
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]

    def _state(self) -> dict[str, Any]:
        kept = {name: vars(self)[name] for name in ("_options", "_function", "_in_class")}
        return kept | {"_of": self.object_of_method(), "_prefix": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fd = state.pop("fd").detach() if "fd" in state else -1
        vars(self).update(state)
        self._set_function()
        if fd >= 0 and self._options.path is None:
            self._place = Place(fd)
        else:  # perhaps on another machine: a cache in memory begins empty
            self._place = open_place(self._options, fd)

    def __copy__(self) -> cached:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> cached:
        """The same cache for a function; an empty one for a copied object, whose values may be others."""
        made: cached = object.__new__(type(self))
        memo[id(self)] = made
        state, copy = self._state(), copying.deepcopy(self._state(), memo)
        if copy["_of"] is state["_of"] and copy["_function"] is self._function:
            memo[id(self)] = self
            return self
        made.__setstate__(copy)
        return made


def caches_of(dataset: Any) -> list[cached]:
    """The caches that a dataset, its class and its datasets hold. Runs none of their code."""
    return list(Walk({"": dataset}, (cached,)).found.values())
