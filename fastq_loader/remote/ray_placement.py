"""Ray finds the machines: an actor for each worker, and a host on each machine that has some.

Runs in the consumer, on a thread of its own, because calls to Ray may take a while. What is done about its
answers is decided in `cluster`; `seat` is what runs in the process of an actor. Ray is imported only here,
and only when a pool starts.

A call to Ray, or a reference of Ray's that is dropped, ends the process without an exception if Ray is being
shut down at that moment. So both happen only under the lock that Ray takes for that, and while Ray is the one
that was there at the start. Answers are asked for, because what Ray calls back runs under no lock.

An actor holds room for a worker. It does so in a method that never returns: an error of that says that the
actor is gone. Ray does not start it again (`max_restarts=0`): nobody here would know. An actor that waits for
room is what an autoscaler sees.

User code does not run beside Ray's threads. It runs in the host, a program that one of a machine's actors
has started, and in the workers that the host forks, so the dataset is there once.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import distributed

from fastq_loader.remote.cluster import ROOMLESS, Cluster, Instructions
from fastq_loader.remote.control import NoPlace, Place
from fastq_loader.remote.host_process import seat_class
from fastq_loader.remote.link import Address
from fastq_loader.remote.places import Found, Placement

if TYPE_CHECKING:
    from fastq_loader.remote.options import RayWorkers

#: Seconds between two ticks of `Cluster`, and at most between two questions for answers.
_TICK = 1.0
#: The same after one came, and how much later is asked again each time that none did: actors that start are
#: noticed a tenth of the time late, and those that stay cost nothing.
_SOON, _LATER = 0.01, 1.1
#: Seconds that hosts have to end, when all their workers have ended before.
_END = 2.0
#: What an actor does at the same time: stay, say where it is, and start a host, which may take minutes.
_METHODS = 4
#: Seconds in which a Ray that was just started says whether it has an autoscaler.
_MONITOR = 15.0
#: Characters of what Ray says.
_LONGEST = 300

_log = logging.getLogger("fastq_loader")

Event = Callable[[], None]


class RayPlacement(Placement, Instructions):
    """The actors of one pool.

    Args:
        options: what the user said.
        flexible: see `Cluster`.
    """

    def __init__(self, options: RayWorkers, flexible: bool = True) -> None:
        self._options = options
        self._ray: Any = None
        self._seat: Any = None  # makes actors
        self._spec: Any = None  # a reference to what hosts are told
        self._flexible = flexible
        self._cluster = Cluster(self, flexible)
        self._actors: dict[int, Any] = {}
        self._devices: dict[int, dict[str, str]] = {}  # actor → variables that say which are its own
        self._starters: set[int] = set()  # actors that have, or had, a host
        self._unwatched: set[int] = set()  # actors whose end would not be noticed
        self._deaths: dict[int, str] = {}  # number of a place → why it is gone
        self._pending: dict[Any, tuple[int, str]] = {}  # references → actor and method that will answer
        self._lock: Any = None  # Ray's, which is private: one that hides it may end the process as described
        self._driver = ""  # Ray's name for this process, until Ray is shut down
        self._events: deque[Event] = deque()
        self._news = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="fastq_loader: Ray", daemon=True)

    def start(self, spec: bytes, found: Found) -> None:
        """
        Raises:
            Exception: Ray cannot be joined or started, or does not accept an option.
        """
        self._found = found
        self._ray = ray = importlib.import_module("ray")
        private = importlib.import_module("ray._private.worker")
        self._lock = getattr(private, "_connect_or_shutdown_lock", None) or threading.RLock()
        if not ray.is_initialized():
            ray.init(address=self._options.address)
        with self._lock:
            self._prepare(ray, spec)
        # At its exit Ray is shut down before the loaders close, because it was imported after them.
        atexit.register(self._stop)
        atexit.unregister(_disarm)  # it is there once, and stays when this ends
        atexit.register(_disarm)
        self._thread.start()

    def _prepare(self, ray: Any, spec: bytes) -> None:
        options = self._options
        self._look_for_room(ray)
        self._driver = ray.get_runtime_context().get_worker_id()
        self._seat = ray.remote(seat_class()).options(
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            resources=dict(options.resources),
            scheduling_strategy=options.strategy,
            runtime_env=None if options.runtime_env is None else dict(options.runtime_env),
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_METHODS,
        )
        self._spec = ray.put(spec)
        if self._flexible and (ranks := _ranks()) > 1:
            there, takes = ray.cluster_resources(), self._takes()
            parts = [int(there.get(name, 0) // ranks // amount) for name, amount in takes.items()]
            self._cluster.most = max(1, min(parts, default=sys.maxsize))

    # ---- what the pool wants --------------------------------------------------------------------

    def acquire(self, number: int) -> None:
        self._add(partial(self._cluster.acquire, number))

    def release(self, number: int, why: str) -> None:
        self._add(partial(self._cluster.release, number, why))

    def death(self, number: int) -> str:
        return self._deaths.get(number, "")

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()

    def _stop(self) -> None:
        """Call Ray no more from the thread."""
        self._stopped = True
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join()

    def close(self) -> None:
        self._stop()
        atexit.unregister(self._stop)
        if self._lock is None:  # it was not started
            return
        with self._lock:
            if self._is_there():  # else they have ended with it
                self._end_actors()
            self._forget()

    def _end_actors(self) -> None:
        ends = [self._actors[starter].end.remote() for starter in self._starters & {*self._actors}]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=_END)
        for actor in self._actors.values():
            self._ray.kill(actor)

    def _is_there(self) -> bool:
        """Whether Ray is still the one that was there at the start. It would start anew by itself."""
        ray = self._ray
        return bool(ray.is_initialized() and ray.get_runtime_context().get_worker_id() == self._driver)

    def _forget(self) -> None:
        """Drop all references."""
        self._driver = ""
        self._actors.clear()
        self._pending.clear()
        self._spec = self._seat = None

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        due, pause = time.monotonic() + _TICK, _SOON
        while not self._stopped:
            self._news.wait(pause)
            if time.monotonic() >= due:
                self._events.append(self._cluster.tick)
                due = time.monotonic() + _TICK
            if not self._lock.acquire(timeout=_SOON):  # whoever has it may wait for the end of this thread
                continue
            try:
                pause = _SOON if self._step() else min(_TICK, pause * _LATER)
            finally:
                self._lock.release()

    def _step(self) -> bool:
        """Hear what is new, and do what is to be done about it. Whether there was anything."""
        self._news.clear()
        if self._driver and not self._is_there():
            self._forget()
            self._events.appendleft(partial(self._cluster.over, "Ray was shut down"))
        elif self._pending:
            self._hear(self._ray)
        events = [self._events.popleft() for _ in range(len(self._events))]
        for event in events:
            event()
        return bool(events)

    def _hear(self, ray: Any) -> None:
        """What actors, or Ray in their place, have answered."""
        pending = list(self._pending)
        for reference in ray.wait(pending, num_returns=len(pending), timeout=0)[0]:
            actor, method = self._pending.pop(reference)
            try:
                answer = partial(self._answered, actor, method, ray.get(reference))
            except Exception as error:
                answer = partial(self._failed, actor, method, error.with_traceback(None))
            self._events.append(answer)

    # ---- what the cluster says ------------------------------------------------------------------

    def create(self, actor: int) -> None:
        with self._failing(actor):
            self._actors[actor] = self._seat.remote()
            self._unwatched.add(actor)
            self.ask(actor)

    def ask(self, actor: int) -> None:
        with self._failing(actor):
            seat = self._actors[actor]
            self._pending[seat.where.remote()] = actor, "where"
            if actor in self._unwatched:
                self._unwatched.discard(actor)
                self._pending[seat.stay.remote()] = actor, "stay"

    def start_host(self, actor: int) -> None:
        with self._failing(actor):
            self._starters.add(actor)
            first, last = self._options.ports or (0, 0)
            ports = list(range(first, last + 1))
            self._pending[self._actors[actor].listen.remote(self._spec, ports)] = actor, "listen"

    @contextmanager
    def _failing(self, actor: int) -> Iterator[None]:
        """What Ray raises of an actor is heard as if the actor had answered it."""
        try:
            yield
        except Exception as error:
            self._add(partial(self._cluster.failed, actor, _text(error)))

    def kill(self, actor: int) -> None:
        seat = self._actors.pop(actor, None)
        if seat is not None:
            self._ray.kill(seat)

    def give(self, number: int, actor: int, address: str, port: int, node: str) -> None:
        self._found(Place(number, Address(address, port), node, self._devices[actor]))

    def lose(self, number: int, why: str) -> None:
        self._deaths[number] = why
        self._found(NoPlace(number, why))

    def complain(self, have: int, want: int) -> None:
        free, there = self._ray.available_resources(), self._ray.cluster_resources()
        room = ", ".join(
            f"{amount:g} {name} ({free.get(name, 0):g} of {there.get(name, 0):g} are free)"
            for name, amount in self._takes().items()
        )
        _log.warning(
            "%d of %d workers have room in the Ray cluster at %s, and the epoch has waited for more for %d "
            "seconds. Each takes %s, on one machine. Add machines, end what uses them, or ask for less "
            "(num_workers, num_cpus).",
            *(have, want, self._ray.get_runtime_context().gcs_address, ROOMLESS * _TICK, room or "nothing"),
        )

    # ---- what Ray says --------------------------------------------------------------------------

    def _answered(self, actor: int, method: str, said: Any) -> None:
        if method == "where":
            node, address, self._devices[actor] = said
            self._cluster.placed(actor, node, address)
        else:
            self._cluster.listens(actor, said)

    def _failed(self, actor: int, method: str, error: Exception) -> None:
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.ActorUnavailableError):
            if method == "where":
                self._cluster.lost(actor, _text(error))
                return
            if method == "stay":
                self._unwatched.add(actor)
            self._cluster.unsure(actor)
        elif isinstance(error, exceptions.ActorDiedError) and not error.actor_init_failed:
            self._actors.pop(actor, None)
            self._cluster.gone(actor, _text(error))
        else:
            self._cluster.failed(actor, _text(error))

    def _look_for_room(self, ray: Any) -> None:
        """
        Raises:
            ValueError: no machine could ever hold a worker.
        """
        takes, machines = self._takes(), [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if _fits(takes, machines):
            return
        kinds, grows = _addable()
        if _fits(takes, kinds):
            return
        machines += kinds
        most = {name: max((one.get(name, 0) for one in machines), default=0) for name in takes}
        lacks = [name for name in takes if most[name] < takes[name]] or list(takes)
        names = dict.fromkeys({"CPU": "num_cpus", "GPU": "num_gpus"}.get(name, "resources") for name in lacks)
        asked = ", ".join(f"{name}={getattr(self._options, name)!r}" for name in names)
        wanted = " and ".join(f"{takes[name]:g} {name} (the most is {most[name]:g})" for name in lacks)
        text = f"RayWorkers({asked}): no machine of the Ray cluster has {wanted}"
        if not grows:
            raise ValueError(
                f"{text}, and none is added by itself. Add such a machine first, or ask for less"
            )
        _log.warning("%s. Workers wait for the autoscaler to add one.", text)

    def _takes(self) -> dict[str, float]:
        """What each worker takes from the cluster."""
        options = self._options
        takes = {"CPU": options.num_cpus, "GPU": options.num_gpus, **options.resources}
        return {name: amount for name, amount in takes.items() if amount}


def _disarm() -> None:
    """The process is about to exit. Ray's handler of SIGTERM has set an alarm that aborts it after three
    seconds, and workers may take longer for their sample; one that somebody handles is his own."""
    if signal.getsignal(signal.SIGALRM) in (None, signal.SIG_DFL):
        signal.alarm(0)


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
