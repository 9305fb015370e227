"""Keys of a cached function: the arguments of a call, as bytes that are the same in every process.

Pure; runs in every process that calls the function. Plain values of different types have different keys. A
call that names an argument has another key than one that passes it by position, so its value is stored once
more.
"""

from __future__ import annotations

import marshal
from pathlib import PurePath
from typing import Any

#: Types that marshal writes as the same bytes in every process and version of Python.
PLAIN = frozenset((int, str, bytes, float, bool, type(None)))
#: First item of a tuple that stands for something else. Arguments of users never begin with it.
_MARK = ...


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> bytes:
    """The key of a call; `name` is the function's.

    Raises:
        TypeError: an argument's type is not allowed in a key.
    """
    names = sorted(kwargs)
    if names:
        args += tuple([kwargs[each] for each in names])
    for value in args:
        if type(value) not in PLAIN:
            args = tuple([_plain(value, name) for value in args])
            break
    return marshal.dumps((_MARK, args, names) if names else args, 2)


def _plain(value: Any, name: str) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is tuple:
        return tuple([_plain(part, name) for part in value])
    library = kind.__module__.partition(".")[0]
    if isinstance(value, PurePath):
        return (_MARK, library, kind.__qualname__, str(value))
    if library in ("numpy", "torch") and getattr(value, "ndim", 1) == 0:
        about = library, kind.__qualname__, str(value.dtype)
        if library == "numpy" and not value.dtype.hasobject:
            return (_MARK, *about, value.tobytes())
        if type(value.item()) in PLAIN:
            return (_MARK, *about, value.item())
    raise TypeError(
        f"cached: {name}() was called with {value!r:.99} of class {kind.__name__}; a key is made of int, "
        "str, bytes, float, Path, None and tuples of these: pass what identifies the sample instead; of a "
        "method, cached is the outermost decorator, in the body of its class"
    )
