"""A pool whose workers run on other machines, behind the usual interface of a worker pool.

Runs in the consumer. Each worker number belongs to a proxy (see `proxy`), so the consumer handles processes
of this machine only. Other machines appear in texts and numbers alone: how a far worker died, its stacks if
it hangs, which it sends on request, and statistics.

A `Placement` finds places for workers. A thread passes them to waiting proxies, because places appear and
proxies lose them while the consumer is in a training step. It has the consumer's end of each proxy's pipe.
The search for places begins before any proxy is up; a lost place is returned, and another one is found.

Proxies are forked by a zygote (see `workers.zygote`), which was forked when the pool began: a proxy costs
milliseconds, and the few pages that it changes.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import popen_fork
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Protocol

from fastq_loader.errors import ProtocolError
from fastq_loader.extras.remote.connection import Lost, ask_for_stacks
from fastq_loader.extras.remote.far_worker import FarSetup
from fastq_loader.extras.remote.proxy import NoPlace, Place, Status, main
from fastq_loader.system import calls, process_id
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers.children import Child
from fastq_loader.workers.config import Plan, Setup, own_fields
from fastq_loader.workers.worker import Worker
from fastq_loader.workers.worker_pool import WorkerPool
from fastq_loader.workers.zygote import Zygote, copy_of_consumer, fork_copy

if TYPE_CHECKING:
    from fastq_loader.statistics.counters import Counters

#: Seconds for a far worker to send its stacks.
_STACKS = 2.0
_FORK = multiprocessing.get_context("fork")


class Placement(Protocol):
    """Starts far workers of one pool on other machines. Each is a place for one proxy.

    Attributes:
        pause: seconds after which to call `find` again, if nothing happens before; None: never.
    """

    pause: float | None

    def start(self, setup: bytes, places: int) -> None:
        """Start a pool: look for `places` places, whose far workers get this setup."""

    def find(self, lost: Sequence[Place], wanted: int) -> Sequence[Place | NoPlace]:
        """Find places. Called repeatedly, on one thread. May start far workers and wait for them.

        Args:
            lost: places that failed and must be replaced: end their far workers. Machines may be gone, too.
            wanted: number of proxies that wait.

        Returns:
            Places for some of them; a `NoPlace` ends a proxy. The others wait, for example for a machine that
            will join.
        """

    def death(self, place: Place) -> str:
        """How the far worker of a lost place died ("it exited with code 7"); "" if it did not die, or the
        cause is unknown. May be called on any thread."""

    def close(self) -> None:
        """End the far workers: no more places are needed. May be called after a `start` that failed, or
        without one."""


@dataclass(eq=False)
class _Proxy:
    """The consumer's end of a pipe to a proxy, and the information received from it.

    Attributes:
        pipe: the end.
        place: the proxy's place, or its last one.
        placed: whether it has that place.
        waits: whether it waits for a place.
        pid: of its far worker; 0 until it is up.
        why: why the proxy exits, as it reported; else "".
        death: how it died, once `death` was called; else "".
    """

    pipe: Pipe[Any, Any]
    place: Place | None = None
    placed: bool = False
    waits: bool = False
    pid: int = 0
    why: str = ""
    death: str = ""


class ProxyPool(WorkerPool):
    """The proxies of one pool.

    Args:
        plan: the work of the workers.
        placement: finds places for them.
    """

    def __init__(self, plan: Plan, placement: Placement) -> None:
        super().__init__(plan)
        self._placement = placement
        self._token = b""
        self._zygote: Zygote | None = None
        self._proxies: dict[int, _Proxy] = {}  # by worker number
        # Bytes received over the network: a word of shared memory for each worker. Its proxy adds to it, a
        # successor continues it, and the consumer reads it for statistics.
        self._traffic = memoryview(mmap.mmap(-1, 8 * plan.workers)).cast("Q")
        self._counters: Counters | None = None
        self._pid = process_id.current()
        self._lock = threading.RLock()  # for the following attributes, and the proxies' pipes
        self._open: list[_Proxy] = []  # proxies that have not ended
        self._lost: list[Place] = []  # lost places to report to the placement
        self._over = False
        self._wake = -1
        self._thread = threading.Thread(target=self._run, name="fastq_loader: places", daemon=True)

    def _prepare(self) -> None:
        setup = self._setup
        assert setup is not None, "the pool is starting"
        self._token = setup.token
        self._zygote = copy_of_consumer(_FORK, self._made)
        sent = pickle.dumps(FarSetup.of(setup))
        # The copy has the user's objects. Here the thread would keep them alive, and the loader in a cycle.
        self._drop_objects()
        self._wake = calls.wake_up()
        self._placement.start(sent, self._plan.workers)
        with without_signals():  # they are for the main thread, which may block them during a start
            self._thread.start()

    def _child(self, setup: Setup) -> Child:
        # The process is a placeholder: `_made` creates the proxy where it is forked.
        return Child(_FORK.Process(daemon=True), launch=partial(self._fork, setup))

    def _fork(self, setup: Setup, process: BaseProcess) -> popen_fork.Popen:
        own_end, its = multiprocessing.Pipe()
        assert self._zygote is not None, "the pool was started"
        with its:
            own, ends = own_fields(setup)
            forked = fork_copy(self._zygote, process, own, [its.fileno(), *ends])
        proxy = _Proxy(own_end)
        with self._lock:
            self._open.append(proxy)
            self._proxies[setup.worker] = proxy
            calls.wake(self._wake)
        return forked

    def _made(self, fields: dict[str, Any], its: int, *ends: int) -> BaseProcess:
        """Create a proxy, to be started in this process. `its` is the descriptor of its end of the pipe."""
        arguments = self._setup_for(fields, *ends), Pipe(its), self._traffic
        return _FORK.Process(target=main, args=arguments, daemon=True)

    # ---- places -------------------------------------------------------------------------------

    def _run(self) -> None:
        """Body of the thread: pass on places until the pool is closed."""
        pause: float | None = 0
        descriptors: list[int] = []
        while not self._over:
            if self._wake in calls.readable([self._wake, *descriptors], pause):
                os.read(self._wake, 8)
            with self._lock:
                for proxy in list(self._open):
                    self._read(proxy)
                descriptors = [proxy.pipe.fileno() for proxy in self._open]
                waiting = [proxy for proxy in self._open if proxy.waits]
                lost, self._lost = self._lost, []
            if self._setup is None:  # the pool was stopped: no more places are needed
                pause = None
                continue
            found: Sequence[Place | NoPlace]
            try:
                found = self._placement.find(lost, len(waiting))
                pause = self._placement.pause
            except Exception as error:  # waiting proxies report it
                found = [NoPlace(f"{type(error).__name__}: {error}")] * len(waiting)
            with self._lock:
                for proxy, place in zip(waiting, found, strict=False):
                    self._give(proxy, place)

    def _give(self, proxy: _Proxy, place: Place | NoPlace) -> None:
        proxy.waits = False
        if isinstance(place, Place):
            if proxy.pipe.closed:  # it has ended meanwhile
                self._lost.append(place)
                return
            proxy.place, proxy.placed, proxy.pid = place, True, 0
        with contextlib.suppress(OSError):  # it has ended; `_read` detects that, too
            proxy.pipe.send(place)

    def _read(self, proxy: _Proxy) -> None:
        """Process the statuses that a proxy has sent so far. May be called on any thread."""
        if process_id.current() != self._pid:  # in a forked copy, a thread that it lacks may own the lock
            return
        with self._lock:
            try:
                while not proxy.pipe.closed and proxy.pipe.poll():
                    status: Status = proxy.pipe.recv()
                    proxy.why = status.why
                    proxy.pid = status.pid or proxy.pid
                    if status.waits:
                        self._give_back_place(proxy)
                        proxy.waits = True
            except (EOFError, OSError):  # it has ended
                self._give_back_place(proxy)
                self._open.remove(proxy)
                proxy.pipe.close()

    def _give_back_place(self, proxy: _Proxy) -> None:
        """Return the place of a proxy, if it has one."""
        if proxy.place is not None and proxy.placed:
            self._lost.append(proxy.place)
        proxy.placed = proxy.waits = False
        calls.wake(self._wake)  # the caller may be another thread than `_run`

    # ---- on the other machines ----------------------------------------------------------------

    def stacks(self, worker: Worker) -> str:
        proxy = self._proxies.get(worker.number)
        if proxy is None or proxy.place is None:
            return "  (it has found no room on another machine yet)"
        try:
            stacks = ask_for_stacks(proxy.place.address, self._token, _STACKS)
        except (Lost, ProtocolError) as error:
            stacks = f"  (it does not send them: {error})"
        return f"  (pid {proxy.place.pid} on {proxy.place.node})\n{stacks}"

    def death(self, worker: Worker) -> tuple[str, str]:
        cause, torch_text = super().death(worker)
        proxy = self._proxies[worker.number]
        if not proxy.death:
            self._read(proxy)
            proxy.death = self._how_lost(proxy) if proxy.why else cause
        return proxy.death, torch_text

    def _how_lost(self, proxy: _Proxy) -> str:
        """Describe how a proxy lost its far worker."""
        if proxy.place is None or not proxy.pid:
            return f"found no place on another machine: {proxy.why};"
        how = self._placement.death(proxy.place) or "its connection broke"
        return f"was lost with its process on {proxy.place.node} (pid {proxy.pid}; {proxy.why}): {how},"

    # ---- what users see -----------------------------------------------------------------------

    def count_in(self, counters: Counters) -> None:
        super().count_in(counters)
        self._counters, self._shown = counters, counters.workers
        for worker in self._shown:
            worker.far = 0, None
        counters.sources.add(self)

    def count(self) -> int:
        for worker, proxy in list(self._proxies.items()):
            self._read(proxy)
            self._shown[worker].far = proxy.pid, proxy.place and proxy.place.node
            self._shown[worker].wire_bytes = self._traffic[worker]
        return sum(self._traffic)

    def far_worker(self, pid: int) -> tuple[int, str] | None:
        for worker, proxy in list(self._proxies.items()):
            if self.workers[worker].pid == pid:
                self._read(proxy)
                return proxy.pid, "" if proxy.place is None else proxy.place.node
        return None

    # ---- the end ------------------------------------------------------------------------------

    def _give_back(self) -> None:
        self._over = True
        if self._thread.ident is not None:
            calls.wake(self._wake)
            self._thread.join()
        for proxy in list(self._open):
            self._read(proxy)
        if self._counters is not None:
            self._counters.ended(self)
        self._placement.close()
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)
