"""Keys of a cached function: the arguments of a call, as bytes that are the same in every process.

Pure; runs in every process that calls the function. Equivalent calls have the same key, whether arguments are
passed by position, by name or by default.
"""

from __future__ import annotations

import inspect
import marshal
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

#: Types that marshal writes as the same bytes in every process and version of Python.
_PLAIN = frozenset((int, str, bytes, float, bool, type(None)))


class Keys:
    """The keys of one function.

    Args:
        function: the function as users call it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._signature: inspect.Signature | None = None
        self._positional = 0  # number of arguments for which the signature is not needed
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # a C function without a signature
            return
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        self._signature = signature
        if set(kinds) <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}:
            self._positional = len(kinds)

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """The key of a call.

        Raises:
            TypeError: an argument's type is not allowed in a key, or the function rejects the arguments.
        """
        if kwargs or len(args) != self._positional:
            args = self._bound(args, kwargs)
        for value in args:
            if type(value) not in _PLAIN:
                args = tuple([self._as_msgpack(value) for value in args])
                break
        return marshal.dumps(args, 2)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if self._signature is None:
            return (*args, tuple(sorted(kwargs.items())))
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(
            tuple(sorted(value.items())) if kind == inspect.Parameter.VAR_KEYWORD else value
            for value, kind in (
                (bound.arguments[name], parameter.kind)
                for name, parameter in self._signature.parameters.items()
            )
        )

    def _as_msgpack(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is tuple:
            return tuple([self._as_msgpack(part) for part in value])
        if isinstance(value, PurePath):
            return ("Path", str(value))
        raise TypeError(
            f"cached: {self._name}() was called with {value!r:.99}, a {kind.__name__}; a key is made of int, "
            "str, bytes, float, Path, None and tuples of these: pass what identifies the sample instead"
        )
