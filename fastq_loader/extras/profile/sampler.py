"""Samples the stack of the thread that loads batches, from a thread beside it.

Runs where batches are loaded, and only if `loader.profile()` asked for it: in workers, and with num_workers=0
in the consumer. It does not use `sys.setprofile`, as most profilers do: that makes calls of Python functions
three to eight times as slow (measured with pyinstrument 5.1), so other lines would seem slow. So a profiler
that the user runs in the dataset works beside it, too.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType

from fastq_loader.system.unpatched import time

#: Functions from the outside to the inside, each as (name, file, its first line, its line in progress).
Stack = tuple[tuple[str, str, int, int], ...]

#: Seconds between two samples; and for which the sampled thread may keep the interpreter to itself meanwhile:
#: with Python's own 5 ms, samples would be taken where it gives way, at the next read or sleep.
_INTERVAL, _SWITCH = 0.002, 5e-5
_NANOSECONDS = int(_INTERVAL * 1e9)


class Sampler:
    """Samples the thread inside of `with sampler:`, until `end` is called.

    Args:
        take: called with the samples after each batch that has any: stack → seconds. In a worker they are
            sent with its answer instead: see `taken`.
    """

    def __init__(self, take: Callable[[dict[Stack, float]], None] | None = None) -> None:
        self._take = take
        self._pid, self._thread = os.getpid(), 0  # 0: none is inside
        self._seen: dict[Stack, float] = {}
        self._lock = threading.Lock()
        self._end = threading.Lock()
        self._end.acquire()
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch, _SWITCH))
        threading.Thread(target=self._run, name="fastq_profile", daemon=True).start()

    def __enter__(self) -> None:
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._thread = 0
        if self._take is not None and self._seen:
            self._take(self.taken())

    def taken(self) -> dict[Stack, float]:
        """The samples since the last call: stack → seconds."""
        if not self._seen or self._pid != os.getpid():  # a child that user code forks has no such thread
            return {}
        with self._lock:
            seen, self._seen = self._seen, {}
        return seen

    def end(self) -> None:
        self._end.release()
        sys.setswitchinterval(self._switch)

    def _run(self) -> None:
        due = time.monotonic_ns() + _NANOSECONDS
        while not self._end.acquire(timeout=max(0.0, (due - time.monotonic_ns()) / 1e9)):
            thread, stack = self._thread, None
            if thread and (frame := sys._current_frames().get(thread)) is not None:
                stack = _stack(frame)
            # A long call in C may have kept this thread from looking, so it is all that were due meanwhile.
            # The time is read now, because the sampled thread has waited for this one.
            looks = 1 + (time.monotonic_ns() - due) // _NANOSECONDS
            due += looks * _NANOSECONDS
            if stack is not None:
                with self._lock:
                    self._seen[stack] = self._seen.get(stack, 0.0) + looks * _INTERVAL


def _stack(frame: FrameType | None) -> Stack:
    """The functions inside of `Reader.load`."""
    found: list[tuple[str, str, int, int]] = []
    while frame is not None and not (
        frame.f_code.co_name == "load" and frame.f_globals.get("__name__") == "fastq_loader.reading.reader"
    ):
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the short name only
        found.append((name, code.co_filename, code.co_firstlineno, frame.f_lineno or code.co_firstlineno))
        frame = frame.f_back
    return tuple(found[::-1])
