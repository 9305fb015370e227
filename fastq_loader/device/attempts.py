"""What is done before it is asked for: its result, or its error, kept until then.

Runs in the consumer, on the thread that calls `next()`.

An error that waits holds no frames. They would keep whoever called, and so the loader that the error waits
in: dropped in the middle of an epoch, it would live on until the garbage collector comes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from fastq_loader.errors import WorkerTraceback
from fastq_loader.system.interrupts import refuse_interrupt


class EarlierTraceback(WorkerTraceback):
    """Where something failed before it was asked for, as text: the `__cause__` of its error."""


class Attempt:
    """A call that is made here and now, whose outcome is asked for later.

    Args:
        call: made with these arguments.

    Attributes:
        result: of the call, until it is asked for. `error`: what it raised instead.
    """

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        try:
            self.result = call(*arguments)
        except Exception as error:
            refuse_interrupt(error)
            text = "".join(traceback.format_exception(error))
            # Past the class's own `__setattr__`: it may be a frozen dataclass.
            BaseException.__setattr__(error, "__context__", None)
            BaseException.__setattr__(error, "__cause__", EarlierTraceback(text))
            self.error = error.with_traceback(None)

    def again(self) -> Any:
        """A copy of what the call returned, or its error; as often as it is asked for."""
        if self.error is not None:
            raise self.error
        return deepcopy(self.result)

    def outcome(self) -> Any:
        """What the call returned, or raised. It is forgotten here."""
        (result, self.result), (error, self.error) = (self.result, None), (self.error, None)
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error  # it holds this frame by its traceback
