"""The Python stacks of a worker that hangs: it writes them to a pipe when a signal tells it to.

The pool in the consumer owns the pipe, which all its workers write to. faulthandler's C code writes, whatever
the interpreter is doing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

from fastq_loader.system.calls import readable

#: A real-time signal, because user code has uses of its own for the named ones.
_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 7
#: Seconds that a worker has to begin with its stacks, and between two lines of them.
_FIRST_LINE, _NEXT_LINE = 0.3, 0.02


def write_on_demand(descriptor: int) -> None:
    """In a worker: write the stacks of all threads to `descriptor` whenever the consumer asks."""
    faulthandler.register(_SIGNAL, descriptor, all_threads=True)


class Stacks:
    """The consumer's end.

    Attributes:
        write_end: for the workers.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def of(self, pid: int) -> str:
        """The stacks of a worker as they are now."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)
        text, patience = b"", _FIRST_LINE
        while readable([self._read_end], patience):
            text += os.read(self._read_end, 1 << 16)
            patience = _NEXT_LINE
        return text.decode(errors="replace") or "  (it did not write them)"

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)
