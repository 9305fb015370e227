"""Where the values of a cache lie: in memory of its own, in memory with a name, in a folder, or in a process;
how many bytes they may have, and the name of the function, by which a folder knows whose they are.

Runs in the program, and in each process that gets a cache.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

from fastq_loader.errors import warn_user
from fastq_loader.extras.cached import folder, memory
from fastq_loader.extras.insight.machine import local_ranks, memory_bytes

_NUMBER_AND_UNIT = re.compile(r"(\d+\.?\d*|\.\d+) *(B|[KMGT]I?B|)", re.IGNORECASE)


class CacheOptions(NamedTuple):
    """The arguments of `cached`. `nbytes` is the limit in bytes. The name of the function, and whether its
    code is in a file, are the program's: a worker may get the function by value."""

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


def open_storage(options: CacheOptions) -> tuple[memory.Memory, memory.Memory]:
    """Make or open the memory of a cache, which has its counters, and the storage of its values: the same
    memory, or a folder.

    Raises:
        ValueError, OSError: see `cached`.
    """
    if not options.is_shared:
        own = memory.Memory(memory.create(options.nbytes))
        return own, own
    name = options.function
    if not options.is_in_file and options.version is None:
        raise ValueError(f"cached: {name} is in no file: a path= or name= needs version= with it")
    about = {"function": name, "version": options.version}
    store: memory.Memory
    if options.path is None:
        store = counts = _named(str(options.name), about, options.nbytes)
    else:
        store = folder.open_at(options.path, about, options.nbytes)
        counts = memory.Memory(memory.create(0))
    if not is_part(options.limit) and store.limit != options.nbytes:
        text = f"limit={options.limit!r} is not used: the cache has had {store.limit} bytes since it was made"
        text += "; cached.clear(path) removes a folder" if options.path is not None else ""
        warn_user(f"cached: {name}: {text}", UserWarning)
    return counts, store


def _named(name: str, about: dict[str, Any], nbytes: int) -> memory.Memory:
    from fastq_loader.extras.share import named  # its imports fail on other systems

    try:
        held, source = named.descriptor(name, about, partial(memory.create, nbytes))
    except named.NameInUse as error:
        text = f"cached: name={name!r} holds something else: it is of {error.about}. Use another name"
        raise ValueError(text) from None
    return memory.Memory(os.dup(held), source)


def is_part(limit: int | str) -> bool:
    """Whether a limit is a part of the free space, and no number of bytes."""
    return isinstance(limit, str) and "." in limit and limit.strip()[-1:] in "0123456789."


def bytes_of(limit: int | str, path: str | None, is_shared: bool) -> int:
    """A limit as a number of bytes.

    Args:
        limit: as users write it.
        path: of the cache, for the free space of its disk; None: of the memory.
        is_shared: whether the ranks of this machine share the cache; else each has its part.

    Raises:
        ValueError: it is malformed.
    """
    found = _NUMBER_AND_UNIT.fullmatch(str(limit).strip())
    number, unit = found.groups() if found is not None else ("0", "")
    count = float(number) * (1024 if len(unit) == 3 else 1000) ** "BKMGT".index(unit[:1].upper() or "B")
    if not (0 < count < 1 if is_part(limit) else 1 <= count < 1 << 62):
        raise ValueError(
            f"cached: limit={limit!r} must be bytes (8_000_000_000, '8GB') or a part of free space ('0.5')"
        )
    if is_part(limit):
        if path is not None and not os.path.exists(path):  # it will be made in the one above
            path = os.path.dirname(path)
        free = memory_bytes() if path is None else shutil.disk_usage(path).free
        count *= free / (1 if is_shared else local_ranks())
    return int(count)


def base_of(function: Any) -> Any:
    """The function or class behind a callable: of a method, a partial or an object with `__call__`."""
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    return function if hasattr(function, "__qualname__") else type(function)


def name_of(function: Any) -> str:
    """Module and name. A script counts as the module that its file's stem names."""
    base = base_of(function)
    module = getattr(base, "__module__", None) or ""
    if module in ("__main__", "__mp_main__"):
        module = Path(getattr(sys.modules.get(module), "__file__", None) or module).stem
    return f"{module}.{base.__qualname__}"


def is_in_file(function: Any) -> bool:
    """Whether its code is in a file, or in C; that of a notebook or a prompt is not."""
    base = base_of(function)
    call = vars(base).get("__call__", base) if isinstance(base, type) else base
    code = getattr(call, "__code__", None)
    return code is None or os.path.isfile(code.co_filename)


def has_its_name(value: Any) -> bool:
    """Whether a module has this object under its name, so that it is the same one wherever the module is."""
    at: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for name in value.__qualname__.split("."):
        at = vars(at).get(name) if hasattr(at, "__dict__") else None
    return at is value
