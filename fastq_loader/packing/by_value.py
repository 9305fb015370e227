"""Functions and classes that pickle refuses, by cloudpickle (extra `notebook`).

These are lambdas, local functions and classes, and those of a `__main__` that no other process can import, as
a notebook's. Runs in the consumer, for the user's objects; and in workers that got these so, for what comes
back: a class of the consumer's is that class again there.
"""

from __future__ import annotations

import pickle
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

HINT = (
    "; with cloudpickle (pip install '.[notebook]' in a clone) lambdas, local classes and a notebook's work"
)

#: Whether what this process answers may need it, too. Set in workers.
answers = False


@cache
def pickler(base: type[pickle.Pickler]) -> Any:
    """A pickler like another one, that also takes these.

    Raises:
        ImportError: cloudpickle is missing.
    """
    import cloudpickle

    class ByValue(base, cloudpickle.Pickler):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            base.__init__(self, *arguments, **keywords)
            # cloudpickle's class has an attribute of this name, which hides the one that pickling reads.
            known = {**cloudpickle.Pickler.dispatch_table, **self.dispatch_table}
            pickle.Pickler.dispatch_table.__set__(self, known)  # type: ignore[attr-defined]

        def reducer_override(self, value: Any) -> Any:
            own = base.reducer_override(self, value)
            return cloudpickle.Pickler.reducer_override(self, value) if own is NotImplemented else own

    return ByValue


def is_interactive() -> bool:
    """Whether no other process can import `__main__`, though pickle finds what is in it."""
    return not hasattr(sys.modules["__main__"], "__file__")


def hint() -> str:
    """What to add to the error of something that pickle refuses."""
    return "" if find_spec("cloudpickle") else HINT


def dumps(value: Any) -> bytes:
    """`pickle.dumps`, or cloudpickle's where that fails in a worker that got the user's objects so."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        if not answers:
            raise
        import cloudpickle

        data: bytes = cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        return data
