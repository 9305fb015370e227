"""Ray finds the machines: an actor for each worker, which holds what the worker takes.

Runs in the consumer; `find` on the thread of the pool. `host_process.actor_class` is what runs in an actor.
Ray is imported only here, and only when a pool starts.

An actor has a place at its machine's host, and its end is the end of the place. Ray does not start it again
(`max_restarts=0`): it would not be noticed here. An actor that waits for room is what an autoscaler
sees. When the place of an actor is lost, the actor is asked for another one, on a host that is started anew
if need be. One that has died, or does not answer in time, makes way for a new actor. User code does not run
beside Ray's threads: it runs in the host, and in the workers that the host forks.

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

#: Seconds between two questions for answers, while any are due: an actor takes a second to start. And seconds
#: to wait for Ray's lock.
_PAUSE, _SOON = 0.1, 0.01
#: Seconds that an actor which had a place has to answer. One that had none may wait for room for ever.
_SILENT = 5.0
#: Seconds in which Ray finds out why an actor has died, if its process has.
_TOMBSTONE = 1.0
#: Actors, made one after the other, that may fail, before any has a place again, until no more are made.
_TRIES = 3
#: Seconds in which a Ray that was just started says whether it has an autoscaler.
_MONITOR = 15.0
#: Characters of what Ray says.
_LONGEST = 300

_log = logging.getLogger("fastq_loader")


@dataclass(eq=False)
class _Actor:
    """An actor.

    Attributes:
        handle: Ray's.
        stay: a reference that says why the actor has died.
        tries: failures that had been counted when it was made.
        place: that it has, or had last; None while it waits for room.
        asked: the reference that its next place comes with, or None.
        deadline: until when it has to come.
        given: the place was given to a proxy.
    """

    handle: Any
    stay: Any
    tries: int
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
        self._most = 0  # actors that this pool may have
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
        all_kinds = {"CPU": options.num_cpus, "GPU": options.num_gpus, **options.resources}
        takes = {name: amount for name, amount in all_kinds.items() if amount}  # each worker, of the cluster
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
            there = ray.cluster_resources()
            parts = [int(there.get(name, 0) // ranks // amount) for name, amount in takes.items()]
            self._most = min(places, max(1, min(parts, default=places)))
        self._make_actors()

    def find(self, lost: Sequence[Place], wanted: int) -> list[Place | NoPlace]:
        self._lost += lost
        self.pause = _PAUSE
        if not self._lock.acquire(timeout=_SOON):  # another thread starts Ray, or shuts it down
            return []
        try:
            if not self._stopped:
                self._step()
            return self._give(wanted)
        finally:
            self._lock.release()

    def _step(self) -> None:
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
        for actor in [actor for actor in self._actors if actor.deadline < time.monotonic()]:
            self._end(actor, "its machine does not answer")
        self._make_actors()
        if not any(actor.asked for actor in self._actors):
            self.pause = None

    def _make_actors(self) -> None:
        while len(self._actors) < self._most and self._failures < _TRIES:
            try:
                handle = self._reservation.remote()
                actor = _Actor(handle, handle.stay.remote(), self._failures)
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
        """What actors, or Ray in their place, have answered."""
        pending = {actor.asked: actor for actor in self._actors if actor.asked is not None}
        if not pending:
            return
        for reference in self._ray.wait(list(pending), num_returns=len(pending), timeout=0)[0]:
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

    def _failed(self, actor: _Actor, error: Exception) -> None:
        """An actor has died, or could not be made, or has found no place. A death is no failure: Ray places
        actors on a machine that is gone, until it knows. Nor is an actor that cannot be reached for now."""
        exceptions = self._ray.exceptions
        died = isinstance(error, exceptions.ActorDiedError) and not error.actor_init_failed
        if not died and not isinstance(error, exceptions.ActorUnavailableError):
            if actor.tries >= self._failures:  # those that were made together fail together, once
                self._failures += 1
            self._why = _text(error)
        self._end(actor, _text(error))

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
        if self._failures >= _TRIES and not up:
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

    def close(self) -> None:
        atexit.unregister(self._stop)
        if self._lock is None:  # it was not started
            return
        with self._lock:
            self._stopped = True
            if self._is_there():  # else they have ended with it
                for actor in list(self._actors):
                    self._end(actor, "")
            self._forget()

    def _is_there(self) -> bool:
        """Whether Ray is still the one that was there at the start. It would start anew by itself."""
        ray = self._ray
        return bool(ray.is_initialized() and ray.get_runtime_context().get_worker_id() == self._driver)

    def _forget(self) -> None:
        """Drop all references."""
        self._driver = ""
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


def _text(error: BaseException) -> str:
    """What Ray says of an error, without what it says of itself and of errors in general."""
    text = str(error).partition("Some common causes include")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    telling = [line for line in lines if line.startswith(("The actor is dead", "The actor died because"))]
    return (telling or lines)[-1].rstrip(". ")[:_LONGEST]
