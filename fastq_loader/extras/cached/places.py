"""Where the values of a cache lie: in memory of its own, in memory with a name, in a folder, or in a process.

Runs in the program, and in each process that gets a cache.
"""

from __future__ import annotations

import mmap
import os
from functools import partial
from typing import Any, NamedTuple

from fastq_loader.errors import warn_user
from fastq_loader.extras.cached import counters, memory
from fastq_loader.extras.cached.limits import is_part
from fastq_loader.extras.cached.process import ProcessMemory
from fastq_loader.system import calls


class Options(NamedTuple):
    """The arguments of `cached`. `nbytes` is the limit in bytes. The name of the function, and whether its
    code is in a file, are those of the program: a worker may get the function by value."""

    limit: int | str
    nbytes: int
    name: str | None
    path: str | None
    version: str | float | None
    copy: bool
    check: bool
    function: str
    is_in_file: bool

    @property
    def is_shared(self) -> bool:
        """Whether other programs may have the same values."""
        return self.name is not None or self.path is not None


class Place:
    """The values of a cache, and the counters of all processes that have it.

    Args:
        fd: descriptor of the memory, closed with this object; -1: there is none that processes share.
        store: the values, if they lie elsewhere.
        source: keeps named memory open for other processes.

    Attributes:
        fd: the same.
        store: `memory.Memory`, or what has its methods.
        counters: counts of calls.
    """

    def __init__(self, fd: int, store: Any = None, source: Any = None) -> None:
        self.fd, self._source = fd, source
        nbytes = counters.NBYTES
        self.counters = counters.Counters(bytearray(nbytes) if fd < 0 else mmap.mmap(fd, nbytes))
        self.store: Any = memory.Memory(fd) if store is None else store

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def open_place(options: Options, fd: int = -1) -> Place:
    """Make or open a place.

    Args:
        options: of the cache.
        fd: memory for the counters, if another process has it.

    Raises:
        RuntimeError, ValueError, OSError: see `cached`.
    """
    if lacking := calls.missing(for_workers=False):
        if options.is_shared:
            raise RuntimeError(
                f"cached: name= and path= need {lacking}, which this system or sandbox lacks; without "
                "them each process has its own values"
            )
        return Place(-1, ProcessMemory(options.nbytes))
    if not options.is_shared:
        return Place(memory.create(options.nbytes))
    name = options.function
    if not options.is_in_file and options.version is None:
        raise ValueError(f"cached: {name} is in no file: a path= or name= needs version= with it")
    about = {"function": name, "version": options.version}
    if options.path is None:
        place = _named(str(options.name), about, options.nbytes)
    else:
        try:
            from fastq_loader.extras.cached import folder
        except ImportError as error:
            text = "cached: path= needs lmdb: pip install 'lmdb>=3', or the extra [cached]"
            raise ImportError(text) from error
        store = folder.open_at(options.path, about, options.nbytes)
        place = Place(memory.create(0) if fd < 0 else fd, store)
    if not is_part(options.limit) and (holds := place.store.limit) != options.nbytes:
        text = f"limit={options.limit!r} is not used: the cache has had {holds} bytes since it was made"
        warn_user(f"cached: {name}: {text}", UserWarning)
    return place


def _named(name: str, about: dict[str, Any], nbytes: int) -> Place:
    from fastq_loader.extras.share import named  # its imports fail on other systems

    try:
        held, source = named.descriptor(name, about, partial(memory.create, nbytes))
    except named.Differs as error:
        text = f"cached: name={name!r} holds something else: it is of {error.about}. Use another name"
        raise ValueError(text) from None
    return Place(os.dup(held), source=source)
