"""Ray finds the machines: an actor for each worker, which holds what the worker takes, and is the worker.

Runs in the consumer; `find` on the thread of the pool. `_actor_class` is what runs in an actor. Ray is
imported only here, and only when a pool starts.

An actor that has opened the dataset is a place. It serves one proxy, and when that is gone it is ended,
whatever it is doing, and makes way for a new one. Ray does not start it again (`max_restarts=0`): it would
not be noticed here. An actor that waits for room is what an autoscaler sees. All that it does runs on the
main thread of its process, as user code expects it. Ray moves the setup with the pickled dataset, once to
each machine: bytes, because arrays that Ray itself moves are read-only.

Each rank of a job asks for its share of the cluster, and leaves room to those that have none (see `ranks`).
A pool that cannot go on waits for `start_timeout`; then those that wait for a place are sent the reason.

A call to Ray, or a reference of Ray's that is dropped, ends the process without an exception if Ray is being
shut down at that moment. So both happen only under the lock that Ray takes for that, and while Ray is the one
that was there at the start. Answers are asked for, because what Ray calls back runs under no lock.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import distributed

from fastq_loader.remote.connection import Address
from fastq_loader.remote.proxy import NoPlace, Place
from fastq_loader.remote.proxy_pool import Placement
from fastq_loader.remote.ranks import Board, Holding, gifts, share, used, waits_for

#: Seconds between two questions for answers, while any are due: an actor takes a second to start. And seconds
#: to wait for Ray's lock.
_PAUSE, _SOON = 0.1, 0.01
#: Seconds in which Ray finds out why an actor has died, if its process has. Then one that has lost its proxy
#: is ended.
_TOMBSTONE = 1.0
#: Actors, made one after the other, that may fail, before any has a place again, until no more are made.
_TRIES = 3
#: Seconds in which a Ray that was just started says whether it has an autoscaler.
_MONITOR = 15.0
#: Seconds between two looks at what the other ranks have.
_LOOK = 2.0
#: Characters of what Ray says.
_LONGEST = 300

_log = logging.getLogger("fastq_loader")


@dataclass(eq=False)
class _Actor:
    """An actor.

    Attributes:
        handle: Ray's.
        where: the reference that its machine comes with, or None.
        opened: the reference that its place comes with, or None.
        end: the reference that its end comes with, and why it has died.
        tries: failures that had been counted when it was made.
        machine: where it has room; None while it waits for that.
        place: that it is, or None.
        given: the place was given to a proxy.
        lost: the proxy is gone.
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
        options: what the user said, a `RayWorkers`. Its module imports this one.
        flexible: whether few workers may do the work of many.
    """

    def __init__(self, options: Any, flexible: bool = True) -> None:
        self.pause: float | None = None
        self._options = options
        self._flexible = flexible
        self._ray: Any = None
        self._far_worker: Any = None  # makes actors
        self._setup: Any = None  # a reference to what they get
        self._takes: dict[str, float] = {}  # each worker, of the cluster
        self._most = 0  # actors that this pool may have
        self._board: Board | None = None  # in a job of several ranks, unless all workers are needed
        self._others_starve = False
        self._gifts: set[tuple[str, int]] = set()  # that were given
        self._went_on = self._had_room = self._looked = 0.0  # when
        self._actors: list[_Actor] = []
        self._deaths: dict[Place, str] = {}  # why they are gone
        self._lost: list[Place] = []
        self._failures = 0
        self._why = ""  # of the last one
        self._lock: Any = None  # Ray's, which is private: one that hides it may end the process as described
        self._driver = ""  # Ray's name for this process, until Ray is shut down
        self._stopped = False

    def start(self, setup: bytes, places: int) -> None:
        """
        Raises:
            Exception: Ray cannot be joined or started, or does not accept an option.
        """
        self._ray = ray = importlib.import_module("ray")
        private = importlib.import_module("ray._private.worker")
        self._lock = getattr(private, "_connect_or_shutdown_lock", None) or threading.RLock()
        if not ray.is_initialized():
            ray.init(address=self._options.address)
        with self._lock:
            self._prepare(ray, setup, places)
        # At its exit Ray is shut down before the loaders close, because it was imported after them.
        atexit.register(self._stop)
        atexit.unregister(_disarm)  # it is there once, and stays when this ends
        atexit.register(_disarm)

    def _prepare(self, ray: Any, setup: bytes, places: int) -> None:
        options = self._options
        self._went_on = self._had_room = time.monotonic()
        all_kinds = {"CPU": options.num_cpus, "GPU": options.num_gpus, **options.resources}
        self._takes = takes = {name: amount for name, amount in all_kinds.items() if amount}
        _look_for_room(ray, options, takes)
        self._driver = ray.get_runtime_context().get_worker_id()
        self._far_worker = ray.remote(_actor_class()).options(
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            resources=dict(options.resources),
            scheduling_strategy=options.strategy,
            runtime_env=None if options.runtime_env is None else dict(options.runtime_env),
            max_restarts=0,
            max_task_retries=0,
        )
        self._setup = ray.put(setup)
        self._most = places
        if self._flexible and (ranks := _ranks()) > 1:
            total = ray.cluster_resources()
            others = used(total, ray.available_resources())
            with suppress(Exception):  # the store is Ray's own, and another version may lack it
                store = importlib.import_module("ray.experimental.internal_kv")
                jobs = importlib.import_module("ray._private.state").jobs()
                board = Board(store, _job(ranks), ray.get_runtime_context().get_job_id())
                others = board.join(others, {job["JobID"] for job in jobs if job["IsDead"]})
                self._board = board
            self._most = share(used(total, others), takes, ranks, places)
        self._make_actors()

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
            self._failures, self._why = _TRIES, "Ray was shut down"
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
        self._look_at_ranks()
        self._make_actors()
        if all(actor.place is not None and not actor.lost for actor in self._actors):
            self.pause = None if self._board is None else _LOOK

    def _check_wait(self, wanted: int) -> None:
        """Give up if the pool has not been able to go on for `start_timeout`."""
        now, limit = time.monotonic(), self._options.start_timeout
        free = sum(actor.place is not None and not actor.given for actor in self._actors)
        if any(actor.place for actor in self._actors) if self._flexible else free >= wanted:
            self._went_on = now
        elif limit and now - self._went_on > limit and self._failures < _TRIES:
            starting = [actor for actor in self._actors if actor.place is None]
            self._failures, self._why = _TRIES, self._overdue([actor.machine for actor in starting])
            for actor in starting:
                self._end(actor, "")

    def _overdue(self, starting: Sequence[str | None]) -> str:
        """The reason why those that start on these machines, or wait for one, have not come in time."""
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        reason = waits_for(starting, self._takes, total, free)
        limit = f"RayWorkers(start_timeout={self._options.start_timeout:g})"
        return f"not within {limit} seconds: {reason} (free or add resources, or give it more seconds)"

    def _look_at_ranks(self) -> None:
        """Leave room to ranks that have none."""
        now = time.monotonic()
        with_room = [actor for actor in self._actors if actor.machine is not None]
        if with_room:
            self._had_room = now
        elif self._failures >= _TRIES:  # room would be of no use
            self._leave_board()
        if self._board is None or now < self._looked + _LOOK:
            return
        self._looked = now
        mine = Holding(len(with_room), int(now - self._had_room))
        try:
            pools = self._board.exchange(mine)
        except Exception:  # the head of the cluster may be away for a while
            return
        starving = {name for name, pool in pools.items() if pool.starves}
        self._gifts = {(name, turn) for name, turn in self._gifts if name in starving}
        self._others_starve = bool(starving) and mine.workers > 0
        if self._others_starve:
            self._leave_room(gifts(pools, self._board.name), with_room)

    def _leave_room(self, due: set[tuple[str, int]], with_room: list[_Actor]) -> None:
        for actor in [actor for actor in self._actors if actor.machine is None]:
            self._end(actor, "")  # it could be given the room before others
        new, self._gifts = due - self._gifts, self._gifts | due
        if self._options.max_restarts == 0:  # a batch may be lost with an actor
            return
        with_room.sort(key=lambda actor: (actor.place is not None, actor.given))  # by what its end costs
        for actor in with_room[: min(len(new), len(with_room) - 1)]:
            self._end(actor, "its room was given to a rank that had none")

    def _make_actors(self) -> None:
        while len(self._actors) < self._most and self._failures < _TRIES and not self._others_starve:
            first, last = self._options.ports or (0, 0)
            try:
                handle = self._far_worker.remote()
                where, ports = handle.where.remote(), list(range(first, last + 1))
                opened, end = handle.open.remote(self._setup, ports), handle.run.remote()
            except Exception as error:
                self._failures, self._why = self._failures + 1, _text(error)
            else:
                self._actors.append(_Actor(handle, where, opened, end, self._failures))

    def _hear(self) -> None:
        """Read what actors, or Ray in their place, have answered."""
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
        with suppress(Exception):  # it has died, which its other answer says
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
        self._failures = 0

    def _failed(self, actor: _Actor, error: Exception) -> None:
        """An actor has died, or could not be made, or cannot open the dataset. The death of one that had no
        room is no failure: Ray places actors on a machine that is gone, until it knows. Nor is an actor that
        cannot be reached for now."""
        exceptions = self._ray.exceptions
        died = isinstance(error, exceptions.ActorDiedError) and not error.actor_init_failed
        if not (died and actor.machine is None) and not isinstance(error, exceptions.ActorUnavailableError):
            self._count_failure(actor, _text(error))
        self._end(actor, _text(error))

    def _count_failure(self, actor: _Actor, why: str) -> None:
        if actor.tries >= self._failures:  # those that were made together fail together, once
            self._failures += 1
        self._why = why

    def _end(self, actor: _Actor, why: str) -> None:
        """An actor is of no use any more."""
        self._actors.remove(actor)
        if actor.place is not None:
            self._deaths[actor.place] = why
        with suppress(Exception):  # it has died
            self._ray.kill(actor.handle)

    def _give(self, wanted: int) -> list[Place | NoPlace]:
        up = [actor for actor in self._actors if actor.place is not None]
        free = [actor for actor in up if not actor.given][:wanted]
        for actor in free:
            actor.given = True
        found: list[Place | NoPlace] = [actor.place for actor in free if actor.place is not None]
        if self._failures >= _TRIES and not (up and self._flexible):
            found += [NoPlace(self._why)] * (wanted - len(found))
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
        """How an actor has died, as far as Ray knows; "" if it has not."""
        try:
            self._ray.get(end, timeout=patience)
        except self._ray.exceptions.GetTimeoutError:
            return ""
        except Exception as error:
            return _text(error)
        return ""

    def _stop(self) -> None:
        """Call Ray no more from the thread."""
        with self._lock:
            self._stopped = True
            if self._is_there():
                self._leave_board()

    def close(self) -> None:
        atexit.unregister(self._stop)
        if self._lock is None:  # it was not started
            return
        with self._lock:
            self._stopped = True
            if self._is_there():  # else they have ended with it
                for actor in list(self._actors):
                    self._end(actor, "")
                self._leave_board()
            self._forget()

    def _leave_board(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            with suppress(Exception):  # the head of the cluster is away
                board.leave()

    def _is_there(self) -> bool:
        """Whether Ray is still the one that was there at the start. It would start anew by itself."""
        ray = self._ray
        return bool(ray.is_initialized() and ray.get_runtime_context().get_worker_id() == self._driver)

    def _forget(self) -> None:
        """Drop all references."""
        self._driver = ""
        self._board = None
        self._actors.clear()
        self._setup = self._far_worker = None


def _actor_class() -> type:
    """The class of the actors. Made in here, it is pickled as it stands: where this package is missing, an
    actor has room, and says what is missing."""

    class FarWorker:
        def where(self) -> str:
            ray: Any = importlib.import_module("ray")
            return str(ray.util.get_node_ip_address())

        def open(self, setup: bytes, ports: list[int]) -> tuple[str, str, int, int]:
            ray: Any = importlib.import_module("ray")
            far_worker: Any = importlib.import_module("fastq_loader.remote.far_worker")
            node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
            self.worker = far_worker.FarWorker(setup, address, ports)
            return node, address, self.worker.port, os.getpid()

        def run(self) -> None:
            self.worker.run()

    return FarWorker


def _disarm() -> None:
    """The process is about to exit. Ray's handler of SIGTERM has set an alarm that aborts it after three
    seconds, and workers may take longer for their sample. An alarm with a handler is the user's."""
    if signal.getsignal(signal.SIGALRM) in (None, signal.SIG_DFL):
        signal.alarm(0)


def _look_for_room(ray: Any, options: Any, takes: dict[str, float]) -> None:
    """
    Raises:
        ValueError: no machine could ever hold a worker.
    """
    machines, grows = [node["Resources"] for node in ray.nodes() if node["Alive"]], False
    if not _fits(takes, machines):
        kinds, grows = _addable()
        machines += kinds
    if _fits(takes, machines):
        return
    most = {name: max((one.get(name, 0) for one in machines), default=0) for name in takes}
    lacks = [name for name in takes if most[name] < takes[name]] or list(takes)
    names = dict.fromkeys({"CPU": "num_cpus", "GPU": "num_gpus"}.get(name, "resources") for name in lacks)
    asked = ", ".join(f"{name}={getattr(options, name)!r}" for name in names)
    wanted = " and ".join(f"{takes[name]:g} {name} (the most is {most[name]:g})" for name in lacks)
    text = f"RayWorkers({asked}): no machine of the Ray cluster has {wanted}"
    if not grows:
        raise ValueError(f"{text}, and none is added by itself. Add such a machine first, or ask for less")
    _log.warning("%s. Workers wait for the autoscaler to add one.", text)


def _fits(takes: dict[str, float], machines: list[dict[str, float]]) -> bool:
    return any(all(one.get(name, 0) >= amount for name, amount in takes.items()) for one in machines)


def _addable() -> tuple[list[dict[str, float]], bool]:
    """The kinds of machines that an autoscaler may add, as far as it says so; and if there may be others."""
    try:
        state = importlib.import_module("ray._private.state").state
        if (config := state.get_cluster_config()) is not None:
            groups = [group for group in config.node_group_configs if group.max_count]
            return [dict(group.resources) for group in groups], False
        kv, until = importlib.import_module("ray.experimental.internal_kv"), time.monotonic() + _MONITOR
        while not (status := kv._internal_kv_get("__autoscaling_status")) and time.monotonic() < until:
            time.sleep(0.1)  # Ray has just been started
        nodes = json.loads(status)["autoscaler_report"]["node_type_mapping"]
        # Without an autoscaler each machine is said to be a kind of its own.
        return [], any(not kind.startswith("node_") for kind in nodes.values())
    except Exception:  # these are Ray's own, and another version may have others
        return [], True


def _ranks() -> int:
    """How many processes train together, each with a loader of its own."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    told = os.environ.get("WORLD_SIZE", "")  # as torchrun says it
    return int(told) if told.isdecimal() else 1


def _job(ranks: int) -> str:
    """A name that the ranks of this job have in common, as far as their environment has one."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}/{ranks}"


def _text(error: BaseException) -> str:
    """Text of an error of Ray's, without what it says of itself and of errors in general."""
    text = str(error).partition("Some common causes include")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    telling = [line for line in lines if line.startswith(("The actor is dead", "The actor died because"))]
    return (telling or lines)[-1].rstrip(". ")[:_LONGEST]
