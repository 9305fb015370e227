"""Keys of a cached function: the arguments of a call, as bytes that are the same in every process.

Pure; runs in every process that calls the function. Equivalent calls have the same key, whether arguments are
passed by position, by name or by default. Plain values of different types have different keys.
"""

from __future__ import annotations

import inspect
import marshal
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

#: Types that marshal writes as the same bytes in every process and version of Python.
PLAIN = frozenset((int, str, bytes, float, bool, type(None)))
#: First item of a tuple that stands for a value that is not plain. Arguments of users never begin with it.
_MARK = ...
_MANY = inspect.Parameter.VAR_KEYWORD


class Keys:
    """The keys of one function.

    Args:
        function: the function as users call it. Its own signature counts: `functools.wraps` is not followed.
        name: of the function, for errors.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._name = name
        self._signature: inspect.Signature | None = None
        self._positional = 0  # number of arguments for which the signature is not needed
        try:
            signature = inspect.signature(function, follow_wrapped=False)
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
            if type(value) not in PLAIN:
                args = tuple([self._plain(value) for value in args])
                break
        return marshal.dumps(args, 2)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if self._signature is None:
            return (*args, tuple(sorted(kwargs.items())))
        given = self._signature.bind(*args, **kwargs).arguments
        return tuple(
            [
                tuple(sorted(given.get(name, {}).items()))
                if parameter.kind == _MANY
                else given.get(
                    name, () if parameter.default is parameter.empty else _Default(parameter.default)
                )
                for name, parameter in self._signature.parameters.items()
            ]
        )

    def _plain(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is tuple:
            return tuple([self._plain(part) for part in value])
        if isinstance(value, PurePath):
            return (_MARK, kind.__module__.partition(".")[0], kind.__qualname__, str(value))
        if kind is _Default:
            try:
                return self._plain(value.value)
            except TypeError:  # any object: it belongs to the function
                return (_MARK,)
        if kind.__module__.partition(".")[0] in ("numpy", "torch") and getattr(value, "ndim", 1) == 0:
            scalar = value.item()
            if type(scalar) in PLAIN:
                return scalar
        raise TypeError(
            f"cached: {self._name}() was called with {value!r:.99}, a {kind.__name__}; a key is made of int, "
            "str, bytes, float, Path, None and tuples of these: pass what identifies the sample instead"
        )


class _Default:
    """The default of an argument that was not passed."""

    def __init__(self, value: Any) -> None:
        self.value = value
