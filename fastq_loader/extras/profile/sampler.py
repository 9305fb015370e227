"""Samples the stack of the thread that loads batches.

Runs where batches are loaded, and only if `loader.profile()` asked for it: in workers, and with num_workers=0
in the consumer. It does not use `sys.setprofile`, as most profilers do: that makes calls of Python functions
three to eight times as slow (measured with pyinstrument 5.1), so other lines would seem slow. So a profiler
that the user runs in the dataset works beside it, too.

A signal takes the samples while Python code runs. A thread would get a processor too late on a busy machine,
often when the sampled thread sleeps, and that line would seem slow. A call of C code delays the signal until
its end, which may be in the next line: so a thread takes the samples of calls that release the interpreter.
Each sample stands for the whole intervals since the last one. Python handles signals on the main thread: the
thread takes all samples if another one loads, which are less exact.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
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
_SIGEV_THREAD_ID = 4  # <asm-generic/siginfo.h>


class Sampler:
    """Samples the thread inside of `with sampler:`, until `end` is called.

    Args:
        take: called with the samples after each batch that has any: stack → seconds. In a worker they are
            sent with its answer instead: see `taken`.
    """

    def __init__(self, take: Callable[[dict[Stack, float]], None] | None = None) -> None:
        self._take = take
        self._thread = 0
        self._outer: FrameType | None = None  # the frame that is in the block
        self._seen = defaultdict[Stack, float](float)
        self._last = self._left = time.monotonic_ns()  # end of the time sampled, and of the last block
        self._ended = threading.Event()
        self._timer, self._library = ctypes.c_void_p(), None  # None: no signal comes
        # struct sigevent: 8 bytes for the user, the signal, and to which thread it is sent
        event = (ctypes.c_int * 16)(0, 0, _SIGNAL, _SIGEV_THREAD_ID, threading.get_native_id())
        # Not on other threads than the main one, if the signal is in use, and on systems without
        with contextlib.suppress(ValueError, OSError):
            library = ctypes.PyDLL("librt.so.1")  # unlike CDLL it keeps the interpreter during a call
            if signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(_SIGNAL, lambda _, frame: self._sample(frame))
                signal.siginterrupt(_SIGNAL, False)  # code in C may not expect to be interrupted
                if not library.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer)):
                    self._library = library
        self._switch = sys.getswitchinterval() if self._library is None else 0
        if self._switch > _SWITCH:
            sys.setswitchinterval(_SWITCH)
        threading.Thread(target=self._run, name="fastq_profile", daemon=True).start()

    def __enter__(self) -> None:
        since = self._left - self._last
        self._last, self._thread = time.monotonic_ns() - since, threading.get_ident()
        self._outer = sys._getframe(1)
        self._set_timer(max(1, _INTERVAL - since), _INTERVAL)

    def __exit__(self, *_: object) -> None:
        self._set_timer(0, 0)
        self._left, self._outer = time.monotonic_ns(), None
        if self._take is not None and self._seen:
            self._take(self.taken())

    def taken(self) -> dict[Stack, float]:
        """The samples since the last call: stack → seconds."""
        seen, self._seen = self._seen, defaultdict(float)
        return dict(seen)  # the thread may be about to add one

    def end(self) -> None:
        self._ended.set()
        if self._switch > _SWITCH:  # else it was another sampler that changed it
            sys.setswitchinterval(self._switch)
        if self._library is not None:
            self._library.timer_delete(self._timer)
            with contextlib.suppress(ValueError):  # on another thread
                signal.signal(_SIGNAL, signal.SIG_IGN)  # one may be on its way

    def _set_timer(self, first: int, interval: int) -> None:
        """Send the signal after `first` nanoseconds, and then in this interval; never if both are 0."""
        if self._library is not None:
            self._library.timer_settime(self._timer, 0, (ctypes.c_long * 4)(0, interval, 0, first), None)

    def _run(self) -> None:
        due = _INTERVAL
        while not self._ended.wait(max(_DELAYED - _INTERVAL, due) / 1e9):
            due = self._last + _DELAYED - time.monotonic_ns() if self._outer else _INTERVAL
            if due <= 0:
                # A collection inside of this call may deadlock: github.com/python/cpython/issues/106883
                collects = gc.isenabled()
                gc.disable()
                frame = sys._current_frames().get(self._thread)
                if collects:
                    gc.enable()
                self._sample(frame)

    def _sample(self, frame: FrameType | None) -> None:
        outer, found = self._outer, []
        while frame is not None and frame is not outer:
            code = frame.f_code
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has short names only
            if frame.f_globals is not globals():  # not in the handler of the signal
                line = frame.f_lineno or code.co_firstlineno
                found.append((name, code.co_filename, code.co_firstlineno, line))
            frame = frame.f_back
        # A long call of C code may have delayed both. The time is read now, because the sampled thread has
        # waited for this one.
        past = time.monotonic_ns() - self._last
        past -= past % _INTERVAL  # the rest is the next one's: this one may come as its line ends
        if frame is not None and past > 0:  # inside of the block, and the other took none meanwhile
            self._seen[tuple(found[::-1])] += past / 1e9
            self._last += past
