"""Samples the stack of the thread that loads batches.

Runs where batches are loaded, and only if `loader.profile()` asked for it: in workers, and with num_workers=0
in the consumer. It does not use `sys.setprofile`, as most profilers do: that makes calls of Python functions
three to eight times as slow (measured with pyinstrument 5.1), so other lines would seem slow. So a profiler
that the user runs in the dataset works beside it, too.

A signal takes the samples while Python code runs. A thread would get a processor too late on a busy machine,
often when the sampled thread sleeps, and that line would seem slow. A call of C code delays the signal until
its end, which may be in the next line: so a thread takes the samples of calls that release the interpreter.
Each sample stands for the whole intervals since the last one. Python handles signals on the main thread: the
thread takes all samples if another one loads.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from operator import attrgetter
from types import FrameType

from fastq_loader.system.unpatched import time

#: Functions from the outside to the inside, each as (name, file, its first line, its line in progress).
Stack = tuple[tuple[str, str, int, int], ...]

#: Nanoseconds between two samples, and after which the thread takes one because the signal was delayed.
_INTERVAL, _DELAYED = 4_000_000, 4_400_000
#: Seconds for which the sampled thread may keep the interpreter to itself if there is no signal: with
#: Python's own 5 ms, samples would be taken where it gives way, at the next read or sleep.
_SWITCH = 5e-5
#: A signal that nothing else is known to use; 0 on systems without.
_SIGNAL = getattr(signal, "SIGRTMAX", 7) - 7
#: Python 3.10 has short names only.
_name = attrgetter("co_qualname" if sys.version_info >= (3, 11) else "co_name")
_HERE = globals()
_SIGEV_THREAD_ID = 4  # <asm-generic/siginfo.h>


class Sampler:
    """Samples the thread inside of `with sampler:`, until `end` is called.

    Args:
        take: called with the samples after each batch that has any: stack → seconds. In a worker they are
            sent with its answer instead: see `taken`.
    """

    def __init__(self, take: Callable[[dict[Stack, float]], None] | None = None) -> None:
        self._take = take
        self._pid, self._thread = os.getpid(), 0  # 0: none is inside
        self._seen: list[tuple[Stack, int]] = []  # with nanoseconds
        self._last = self._left = time.monotonic_ns()  # when the last sample was taken, and `__exit__` called
        self._end = threading.Lock()
        self._end.acquire()
        self._timer, self._switch = _Timer(self._on_signal), sys.getswitchinterval()
        if not self._timer.works:
            sys.setswitchinterval(min(self._switch, _SWITCH))
        threading.Thread(target=self._run, name="fastq_profile", daemon=True).start()

    def __enter__(self) -> None:
        since = self._left - self._last
        self._last, self._thread = time.monotonic_ns() - since, threading.get_ident()
        self._timer.set(max(1, _INTERVAL - since), _INTERVAL)

    def __exit__(self, *_: object) -> None:
        self._timer.set(0, 0)
        self._left, self._thread = time.monotonic_ns(), 0
        if self._take is not None and self._seen:
            self._take(self.taken())

    def taken(self) -> dict[Stack, float]:
        """The samples since the last call: stack → seconds."""
        seen, self._seen = self._seen, []
        added: defaultdict[Stack, float] = defaultdict(float)
        if self._pid == os.getpid():  # a child that user code forks is not sampled
            for stack, nanoseconds in seen:
                added[stack] += nanoseconds / 1e9
        return added

    def end(self) -> None:
        self._end.release()
        sys.setswitchinterval(self._switch)
        self._timer.end()

    def _run(self) -> None:
        due = 0
        while not self._end.acquire(timeout=max(_DELAYED - _INTERVAL, due) / 1e9):
            due = self._last + _DELAYED - time.monotonic_ns() if self._thread else _INTERVAL
            if due <= 0:
                # A collection inside of this call may deadlock: github.com/python/cpython/issues/106883
                collects = gc.isenabled()
                gc.disable()
                frame = sys._current_frames().get(self._thread)
                if collects:
                    gc.enable()
                self._sample(frame)

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        if threading.get_ident() == self._thread:
            self._sample(frame)

    def _sample(self, frame: FrameType | None) -> None:
        if frame is not None:
            # A long call of C code may have delayed both. The time is read now, because the sampled thread
            # has waited for this one.
            stack, past = _stack(frame), time.monotonic_ns() - self._last
            past -= past % _INTERVAL  # the rest is the next one's: this one may come as its line ends
            if past > 0:  # else the other took one meanwhile
                self._seen.append((stack, past))
                self._last += past


class _Timer:
    """Sends this thread a signal that calls `take`.

    Attributes:
        works: False on other threads than the main one, if the signal is in use, and on systems without it.
    """

    def __init__(self, take: Callable[..., None]) -> None:
        self._timer, self.works = ctypes.c_void_p(), False
        # struct sigevent: 8 bytes for the user, the signal, and to which thread it is sent
        event = (ctypes.c_int * 16)(0, 0, _SIGNAL, _SIGEV_THREAD_ID, threading.get_native_id())
        with contextlib.suppress(ValueError, OSError):
            self._library = ctypes.PyDLL(None)  # unlike CDLL it keeps the interpreter during a call
            if not hasattr(self._library, "timer_create"):
                self._library = ctypes.PyDLL("librt.so.1")  # before glibc 2.34
            if signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(_SIGNAL, take)
                signal.siginterrupt(_SIGNAL, False)  # code in C may not expect to be interrupted
                create = self._library.timer_create
                self.works = not create(time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer))

    def set(self, first: int, interval: int) -> None:
        """Send it after `first` nanoseconds, and then in this interval; never if both are 0."""
        if self.works:
            self._library.timer_settime(self._timer, 0, (ctypes.c_long * 4)(0, interval, 0, first), None)

    def end(self) -> None:
        if self.works:
            self._library.timer_delete(self._timer)
            with contextlib.suppress(ValueError):  # on another thread
                signal.signal(_SIGNAL, signal.SIG_IGN)  # one may be on its way


def _stack(frame: FrameType | None) -> Stack:
    """The functions inside of `Reader.load`."""
    found: list[tuple[str, str, int, int]] = []
    while frame is not None:
        code, names = frame.f_code, frame.f_globals
        if code.co_name == "load" and names.get("__name__") == "fastq_loader.reading.reader":
            break
        if names is _HERE:  # the handler of the signal
            found.clear()
        else:
            found.append(
                (_name(code), code.co_filename, code.co_firstlineno, frame.f_lineno or code.co_firstlineno)
            )
        frame = frame.f_back
    return tuple(found[::-1])
