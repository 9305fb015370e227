"""The name of a cached function: of its folder, of its memory in other processes, and in texts.

Runs in every process that calls the function.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import MethodType
from typing import Any


def base_of(function: Any) -> Any:
    """The function or class behind a callable: of a method, a partial or an object with `__call__`."""
    while isinstance(function, functools.partial | MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function if hasattr(function, "__qualname__") else type(function)


def name_of(function: Any) -> str:
    """Module and name. A script counts as the module that its spec or its file's stem names."""
    base = base_of(function)
    module = getattr(base, "__module__", None) or ""
    if module in ("__main__", "__mp_main__"):
        main = vars(sys.modules.get(module, sys))
        spec, file = main.get("__spec__"), main.get("__file__")
        module = spec.name if spec is not None else Path(file).stem if file else module
    return f"{module}.{base.__qualname__}"


def is_in_file(function: Any) -> bool:
    """Whether its code is in a file, or in C; that of a notebook or a prompt is not."""
    base = base_of(function)
    call = vars(base).get("__call__", base) if isinstance(base, type) else base
    code = getattr(call, "__code__", None)
    return code is None or os.path.isfile(code.co_filename)


def found(value: Any) -> Any:
    """The object that a module has under the name of this one; None if it has none."""
    at: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for name in value.__qualname__.split("."):
        at = vars(at).get(name) if hasattr(at, "__dict__") else None
    return at
