"""Ray finds the machines: an actor for each worker, which holds what the worker takes.

Runs in the consumer; `find` on the thread of the pool. `host_process.actor_class` is what runs in an actor.
Ray is imported only here, and only when a pool starts.

An actor has a place at its machine's host, and its end is the end of the place. Ray does not start it again
(`max_restarts=0`): it would not be noticed here. An actor that waits for room is what an autoscaler
sees. When the place of an actor is lost, the actor is asked for another one, on a host that is started anew
if need be. One that has died, or does not answer in time, makes way for a new actor. User code does not run
beside Ray's threads: it runs in the host, and in the workers that the host forks.

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
from fastq_loader.remote.host_process import actor_class
from fastq_loader.remote.proxy import NoPlace, Place
from fastq_loader.remote.proxy_pool import Placement
from fastq_loader.remote.ranks import Board, Holding, gifts, share, used, waits_for

#: Seconds between two questions for answers, while any are due: an actor takes a second to start. And seconds
#: to wait for Ray's lock.
_PAUSE, _SOON = 0.1, 0.01
#: Seconds that an actor which had a place has to answer.
_SILENT = 5.0
#: Seconds in which Ray finds out why an actor has died, if its process has.
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
        stay: a reference that says why the actor has died.
        where: the reference that its machine comes with, or None.
        tries: failures that had been counted when it was made.
        machine: where it has room; None while it waits for that.
        place: that it has, or had last.
        asked: the reference that its next place comes with, or None.
        deadline: until when it has to come.
        given: the place was given to a proxy.
    """

    handle: Any
    stay: Any
    where: Any
    tries: int
    machine: str | None = None
    place: Place | None = None
    asked: Any = None
    deadline: float = math.inf
    given: bool = False


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
        self._reservation: Any = None  # makes actors
        self._spec: Any = None  # a reference to what hosts are told
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

    def start(self, spec: bytes, places: int) -> None:
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
            self._prepare(ray, spec, places)
        # At its exit Ray is shut down before the loaders close, because it was imported after them.
        atexit.register(self._stop)
        atexit.unregister(_disarm)  # it is there once, and stays when this ends
        atexit.register(_disarm)

    def _prepare(self, ray: Any, spec: bytes, places: int) -> None:
        options = self._options
        self._went_on = self._had_room = time.monotonic()
        all_kinds = {"CPU": options.num_cpus, "GPU": options.num_gpus, **options.resources}
        self._takes = takes = {name: amount for name, amount in all_kinds.items() if amount}
        _look_for_room(ray, options, takes)
        self._driver = ray.get_runtime_context().get_worker_id()
        self._reservation = ray.remote(actor_class()).options(
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            resources=dict(options.resources),
            scheduling_strategy=options.strategy,
            runtime_env=None if options.runtime_env is None else dict(options.runtime_env),
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=2,  # it stays, and looks for a place
        )
        self._spec = ray.put(spec)
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
        for actor in [actor for actor in self._actors if actor.place in self._lost]:
            actor.deadline = time.monotonic() + _SILENT
            self._ask(actor)
        self._lost.clear()
        self._check_wait(wanted)
        for actor in [actor for actor in self._actors if actor.deadline < time.monotonic()]:
            if actor.place is None:
                self._count_failure(actor, self._overdue([actor.machine]))
            self._end(actor, "its machine does not answer")
        self._look_at_ranks()
        self._make_actors()
        if not any(actor.asked for actor in self._actors):
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
            try:
                handle = self._reservation.remote()
                actor = _Actor(handle, handle.stay.remote(), handle.where.remote(), self._failures)
            except Exception as error:
                self._failures, self._why = self._failures + 1, _text(error)
            else:
                self._actors.append(actor)
                self._ask(actor)

    def _ask(self, actor: _Actor) -> None:
        """Let an actor look for a place."""
        first, last = self._options.ports or (0, 0)
        try:
            actor.asked = actor.handle.attach.remote(self._spec, list(range(first, last + 1)))
        except Exception as error:
            self._failed(actor, error)

    def _hear(self) -> None:
        """Read what actors, or Ray in their place, have answered."""
        rooms = {actor.where: actor for actor in self._actors if actor.where is not None}
        pending = {actor.asked: actor for actor in self._actors if actor.asked is not None}
        if not pending and not rooms:
            return
        references = [*rooms, *pending]
        for reference in self._ray.wait(references, num_returns=len(references), timeout=0)[0]:
            if reference in rooms:
                self._has_room(rooms[reference])
                continue
            actor = pending[reference]
            try:
                node, address, port, number = self._ray.get(reference)
            except Exception as error:
                self._failed(actor, error)
            else:
                name = f"{address} (Ray's node {node[:12]})"
                actor.place = Place(Address(address, port), number, name)
                actor.asked, actor.deadline, actor.given = None, math.inf, False
                self._failures = 0

    def _has_room(self, actor: _Actor) -> None:
        reference, actor.where = actor.where, None
        with suppress(Exception):  # it has died, which its other answer says
            actor.machine = self._ray.get(reference)
            if actor.place is None and self._options.start_timeout:
                actor.deadline = time.monotonic() + self._options.start_timeout

    def _failed(self, actor: _Actor, error: Exception) -> None:
        """An actor has died, or could not be made, or has found no place. A death is no failure: Ray places
        actors on a machine that is gone, until it knows. Nor is an actor that cannot be reached for now."""
        exceptions = self._ray.exceptions
        died = isinstance(error, exceptions.ActorDiedError) and not error.actor_init_failed
        if not died and not isinstance(error, exceptions.ActorUnavailableError):
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
        free = [actor for actor in up if actor.asked is None and not actor.given][:wanted]
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
                    try:
                        self._ray.get(actor.stay, timeout=_TOMBSTONE)
                    except self._ray.exceptions.GetTimeoutError:
                        return ""
                    except Exception as error:
                        return _text(error)
            return self._deaths.get(place, "")

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
        self._spec = self._reservation = None


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
