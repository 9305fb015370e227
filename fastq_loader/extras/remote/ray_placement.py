"""Finds machines with Ray: each worker is an actor, which reserves the worker's resources.

Runs in the consumer; `find` on the thread of the pool. The class in `_actor_class` runs in an actor. Ray is
imported only here, and only when a pool starts.

An actor that has opened the dataset is a place. It serves one proxy, and when that is gone it is ended at
once, and makes way for a new one. Ray does not restart it (`max_restarts=0`), because this process would not
notice. An actor that waits for room is visible to an autoscaler. All methods run on the main thread of the
actor's process, as user code expects it. Ray moves the setup with the pickled dataset once to each machine,
as bytes, because arrays that Ray itself moves are read-only.

A pool that cannot continue waits for `start_timeout`; then waiting proxies are sent the reason.

A call to Ray, or dropping a reference of Ray's, ends the process without an exception if Ray is being shut
down at that moment. So both happen only under the lock that Ray takes for that, and only while Ray is still
the instance that was there at the start. Answers are polled, because callbacks of Ray run under no lock.
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastq_loader.extras.remote.connection import Address
from fastq_loader.extras.remote.proxy import NoPlace, Place
from fastq_loader.extras.remote.proxy_pool import Placement
from fastq_loader.extras.remote.ray_cluster import look_for_room, takes_of, waits_for

#: Seconds between two polls for answers, while any are due: an actor takes a second to start. And seconds to
#: wait for Ray's lock.
_PAUSE, _SOON = 0.1, 0.01
#: Seconds for Ray to find out why an actor has died, if its process has. Then an actor that has lost its
#: proxy is ended.
_TOMBSTONE = 1.0
#: Consecutive failures of actors, without any success between them, after which no more are made.
_TRIES = 3
#: Maximum characters of a text from Ray.
_LONGEST = 300


@dataclass(eq=False)
class _Actor:
    """An actor.

    Attributes:
        handle: Ray's.
        where: reference to its machine, until that is read.
        opened: reference to its place, until that is read.
        end: reference to its end, and to the cause of its death.
        tries: count of failures when it was made.
        machine: the machine where it has room; None while it waits for one.
        place: the placement, or None while waiting.
        given: whether the place was given to a proxy.
        lost: whether the proxy is gone.
        deadline: when it is ended, unless it is a place that is not lost.
    """

    handle: Any
    where: Any
    opened: Any
    end: Any
    tries: int
    machine: str | None = None
    place: Place | None = None
    given: bool = False
    lost: bool = False
    deadline: float = math.inf


class RayPlacement(Placement):
    """The actors of one pool.

    Args:
        options: the user's `RayWorkers`, whose module imports this one.
        flexible: whether few workers may do the work of many.
    """

    def __init__(self, options: Any, flexible: bool = True) -> None:
        self.pause: float | None = None
        self._options = options
        self._flexible = flexible
        self._ray: Any = None
        self._make: Callable[[int], _Actor] | None = None
        self._most = 0  # maximum number of actors of this pool
        self._went_on = 0.0  # when the pool could last continue
        self._actors: list[_Actor] = []
        self._deaths: dict[Place, str] = {}  # causes of death
        self._lost: list[Place] = []
        self._failures: list[str] = []  # reasons of consecutive failures of actors; a success clears it
        self._lock: Any = None  # Ray's, which is private: if it moves, the process may end as described above
        self._driver = ""  # Ray's name for this process, until Ray is shut down
        self._stopped = False

    def start(self, setup: bytes, places: int) -> None:
        """Join or start Ray, and create the actors.

        Raises:
            Exception: Ray cannot be joined or started, or does not accept an option.
        """
        self._ray = ray = importlib.import_module("ray")
        private = importlib.import_module("ray._private.worker")
        self._lock = getattr(private, "_connect_or_shutdown_lock", None) or threading.RLock()
        if not ray.is_initialized():
            ray.init(address=self._options.address)
        with self._lock:
            self._went_on = time.monotonic()
            look_for_room(ray, self._options, takes_of(self._options))
            self._driver = ray.get_runtime_context().get_worker_id()
            self._make = _maker(ray, self._options, setup)
            self._most = places
            self._make_actors()
        # At exit, Ray is shut down before the loaders close, because it was imported after them.
        atexit.register(self._stop)
        atexit.unregister(_disarm)  # registered only once, and not removed with this pool
        atexit.register(_disarm)

    def find(self, lost: Sequence[Place], wanted: int) -> list[Place | NoPlace]:
        self._lost += lost
        self.pause = _PAUSE
        if not self._lock.acquire(timeout=_SOON):  # another thread starts Ray, or shuts it down
            return []
        try:
            if not self._stopped:
                self._step(wanted)
            return self._give(wanted)
        finally:
            self._lock.release()

    def _step(self, wanted: int) -> None:
        """Read answers, and act on them."""
        if not self._is_there():
            self._forget()
            self._failures = ["Ray was shut down"] * _TRIES
            return
        self._hear()
        for actor in self._actors:
            if actor.place in self._lost:
                actor.lost, actor.deadline = True, time.monotonic() + _TOMBSTONE
        self._lost.clear()
        self._check_wait(wanted)
        for actor in [actor for actor in self._actors if actor.deadline < time.monotonic()]:
            if actor.place is None:
                self._count_failure(actor, self._overdue([actor.machine]))
            self._end(actor, "")
        self._make_actors()
        if all(actor.place is not None and not actor.lost for actor in self._actors):
            self.pause = None

    @property
    def _has_given_up(self) -> bool:
        """Whether no more actors are made."""
        return len(self._failures) >= _TRIES

    def _check_wait(self, wanted: int) -> None:
        """Give up if the pool has not been able to continue for `start_timeout`."""
        now, limit = time.monotonic(), self._options.start_timeout
        if self._goes_on(wanted):
            self._went_on = now
        elif limit and now - self._went_on > limit and not self._has_given_up:
            starting = [actor for actor in self._actors if actor.place is None]
            self._failures = [self._overdue([actor.machine for actor in starting])] * _TRIES
            for actor in starting:
                self._end(actor, "")

    def _goes_on(self, wanted: int) -> bool:
        """Whether the workers can load the next batch, or will as soon as `wanted` proxies have a place."""
        places = [actor for actor in self._actors if actor.place is not None]
        return bool(places) if self._flexible else sum(not actor.given for actor in places) >= wanted

    def _overdue(self, starting: Sequence[str | None]) -> str:
        """Describe why workers did not start in time, by the machine of each, or None without one."""
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        reason = waits_for(starting, takes_of(self._options), total, free)
        limit = f"RayWorkers(start_timeout={self._options.start_timeout:g})"
        return f"not within {limit} seconds: {reason} (free or add resources, or give it more seconds)"

    def _make_actors(self) -> None:
        while len(self._actors) < self._most and not self._has_given_up:
            assert self._make is not None, "Ray is there"
            try:
                self._actors.append(self._make(len(self._failures)))
            except Exception as error:
                self._failures.append(_text(error))

    def _hear(self) -> None:
        """Read the answers of actors, or of Ray in their place."""
        rooms = {actor.where: actor for actor in self._actors if actor.where is not None}
        pending = {actor.opened: actor for actor in self._actors if actor.opened is not None}
        ends = {actor.end: actor for actor in self._actors if actor.lost}
        references = [*rooms, *pending, *ends]
        if not references:
            return
        for reference in self._ray.wait(references, num_returns=len(references), timeout=0)[0]:
            if reference in rooms:
                self._has_room(rooms[reference])
            elif reference in pending:
                self._has_opened(pending[reference])
            else:
                self._end(ends[reference], self._death(reference, 0))

    def _has_room(self, actor: _Actor) -> None:
        reference, actor.where = actor.where, None
        with suppress(Exception):  # it has died, which another of its answers reports
            actor.machine = self._ray.get(reference)
            if actor.place is None and self._options.start_timeout:
                actor.deadline = time.monotonic() + self._options.start_timeout

    def _has_opened(self, actor: _Actor) -> None:
        try:
            node, address, port, pid = self._ray.get(actor.opened)
        except Exception as error:
            self._failed(actor, error)
            return
        actor.place = Place(Address(address, port), pid, f"{address} (Ray's node {node[:12]})")
        actor.opened, actor.deadline = None, math.inf
        self._failures.clear()

    def _failed(self, actor: _Actor, error: Exception) -> None:
        """Handle an actor that has died, could not be made, or cannot open the dataset. It is no failure if
        it died without room (Ray places actors on a lost machine until it detects the loss), or if it is only
        unreachable for now."""
        exceptions = self._ray.exceptions
        died = isinstance(error, exceptions.ActorDiedError) and not error.actor_init_failed
        if not (died and actor.machine is None) and not isinstance(error, exceptions.ActorUnavailableError):
            self._count_failure(actor, _text(error))
        self._end(actor, _text(error))

    def _count_failure(self, actor: _Actor, why: str) -> None:
        if actor.tries >= len(self._failures):  # actors made together fail together, which counts once
            self._failures.append(why)
        self._failures[-1] = why

    def _end(self, actor: _Actor, why: str) -> None:
        """End an actor that is not needed or has failed."""
        self._actors.remove(actor)
        if actor.place is not None:
            self._deaths[actor.place] = why
        with suppress(Exception):  # it has died already
            self._ray.kill(actor.handle)

    def _give(self, wanted: int) -> list[Place | NoPlace]:
        up = [actor for actor in self._actors if actor.place is not None]
        free = [actor for actor in up if not actor.given][:wanted]
        for actor in free:
            actor.given = True
        found: list[Place | NoPlace] = [actor.place for actor in free if actor.place is not None]
        if self._has_given_up and not (up and self._flexible):
            found += [NoPlace(self._failures[-1])] * (wanted - len(found))
        return found

    def death(self, place: Place) -> str:
        with self._lock:
            if not self._is_there():
                return "Ray was shut down"
            for actor in self._actors:
                if actor.place == place:
                    return self._death(actor.end, _TOMBSTONE)
            return self._deaths.get(place, "")

    def _death(self, end: Any, patience: float) -> str:
        """How an actor has died, according to Ray; "" if it has not."""
        try:
            self._ray.get(end, timeout=patience)
        except self._ray.exceptions.GetTimeoutError:
            return ""
        except Exception as error:
            return _text(error)
        return ""

    def _stop(self) -> None:
        """Stop calls to Ray from the thread."""
        with self._lock:
            self._stopped = True

    def close(self) -> None:
        atexit.unregister(self._stop)
        if self._lock is None:  # it was not started
            return
        with self._lock:
            self._stopped = True
            if self._is_there():  # otherwise they ended with Ray
                for actor in list(self._actors):
                    self._end(actor, "")
            self._forget()

    def _is_there(self) -> bool:
        """Whether Ray is still the instance that was there at the start. A call would start a new one."""
        ray = self._ray
        return bool(ray.is_initialized() and ray.get_runtime_context().get_worker_id() == self._driver)

    def _forget(self) -> None:
        """Drop all references."""
        self._driver = ""
        self._actors.clear()
        self._make = None


def _actor_class() -> type:
    """Create the class of the actors. Defined locally, it is pickled by value: where this package is missing,
    an actor still gets room, and reports the missing package."""

    class FarWorker:
        def where(self) -> str:
            ray: Any = importlib.import_module("ray")
            return str(ray.util.get_node_ip_address())

        def open(self, setup: bytes, ports: list[int]) -> tuple[str, str, int, int]:
            ray: Any = importlib.import_module("ray")
            far_worker: Any = importlib.import_module("fastq_loader.extras.remote.far_worker")
            node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
            self.worker = far_worker.FarWorker(setup, address, ports)
            return node, address, self.worker.port, os.getpid()

        def run(self) -> None:
            self.worker.run()

    return FarWorker


def _maker(ray: Any, options: Any, setup: bytes) -> Callable[[int], _Actor]:
    """Return a function that makes an actor, after so many failures."""
    far_worker = ray.remote(_actor_class()).options(
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
        resources=dict(options.resources),
        scheduling_strategy=options.strategy,
        runtime_env=None if options.runtime_env is None else dict(options.runtime_env),
        max_restarts=0,
        max_task_retries=0,
    )
    reference = ray.put(setup)
    first, last = options.ports or (0, 0)

    def make(tries: int) -> _Actor:
        handle = far_worker.remote()
        where, ports = handle.where.remote(), list(range(first, last + 1))
        opened, end = handle.open.remote(reference, ports), handle.run.remote()
        return _Actor(handle, where, opened, end, tries)

    return make


def _disarm() -> None:
    """Cancel, at exit, the alarm that Ray's handler of SIGTERM has set. It would abort the process after
    three seconds, and workers may need longer for their sample. An alarm with a handler is the user's."""
    if signal.getsignal(signal.SIGALRM) in (None, signal.SIG_DFL):
        signal.alarm(0)


def _text(error: BaseException) -> str:
    """Text of an error of Ray's, without its general explanations."""
    text = str(error).partition("Some common causes include")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    telling = [line for line in lines if line.startswith(("The actor is dead", "The actor died because"))]
    return (telling or lines)[-1].rstrip(". ")[:_LONGEST]
