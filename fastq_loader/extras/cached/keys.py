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
#: First item of a tuple that stands for something else. Arguments of users never begin with it.
_MARK = ...
_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


class Keys:
    """The keys of one function.

    Args:
        function: the function as users call it. Its own signature counts: `functools.wraps` is not followed.
        name: of the function, for errors.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._name = name
        try:
            self._signature: inspect.Signature | None = inspect.signature(function, follow_wrapped=False)
            parameters = [*self._signature.parameters.values()]
        except (TypeError, ValueError):  # a C function without a signature
            self._signature, parameters = None, []
        self._defaults = [parameter.default for parameter in parameters]
        are_positional = all(parameter.kind in _POSITIONAL for parameter in parameters)
        self._simple = len(parameters) if are_positional else -1  # arguments that need no signature

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """The key of a call.

        Raises:
            TypeError: an argument's type is not allowed in a key, or the function rejects the arguments.
        """
        names: list[str] = []
        if kwargs or len(args) != self._simple:
            if self._signature is not None:
                try:
                    bound = self._signature.bind(*args, **kwargs)
                except TypeError as error:
                    raise TypeError(f"cached: {self._name}(): {error}") from None
                bound.apply_defaults()
                args, kwargs = bound.args, bound.kwargs
            names = sorted(kwargs)
            args += tuple([kwargs[name] for name in names])
        for value in args:
            if type(value) not in PLAIN:
                args = tuple([self._argument(value) for value in args])
                break
        return marshal.dumps((_MARK, args, names) if names else args, 2)

    def _argument(self, value: Any) -> Any:
        try:
            return self._plain(value)
        except TypeError:
            for at, default in enumerate(self._defaults):
                if value is default:  # any object: it belongs to the function
                    return (_MARK, at)
            raise

    def _plain(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is tuple:
            return tuple([self._plain(part) for part in value])
        if isinstance(value, PurePath):
            return (_MARK, kind.__module__.partition(".")[0], kind.__qualname__, str(value))
        library = kind.__module__.partition(".")[0]
        if library in ("numpy", "torch") and getattr(value, "ndim", 1) == 0:
            about = library, kind.__qualname__, str(value.dtype)
            if library == "numpy" and not value.dtype.hasobject:
                return (_MARK, *about, value.tobytes())
            if type(value.item()) in PLAIN:
                return (_MARK, *about, value.item())
        raise TypeError(
            f"cached: {self._name}() was called with {value!r:.99} of class {kind.__name__}; a key is made "
            "of int, str, bytes, float, Path, None and tuples of these: "
            "pass what identifies the sample instead"
        )
