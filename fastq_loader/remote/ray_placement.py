"""Ray finds the machines: an actor for each worker, and a host on each machine that has some.

Runs in the consumer, on a thread of its own: what Ray reports comes on a thread of Ray's that must not wait,
so it is queued, and calls to Ray may take a while. What is done about it is decided in `cluster`; `seat` is
what runs in the process of an actor. Ray is imported only here, and only when a pool starts.

An actor holds room for a worker. It does so in a method that never returns: an error of that says within
milliseconds that the actor is gone. Ray does not start it again (`max_restarts=0`): nobody here would know.
An actor that waits for room is what an autoscaler sees.

User code does not run beside Ray's threads. It runs in the host, a program that one of a machine's actors
has started, and in the workers that the host forks, so the dataset is there once.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from torch import distributed

from fastq_loader.remote.cluster import (
    ROOMLESS,
    Ask,
    Cluster,
    Complain,
    Create,
    Give,
    Instruction,
    Kill,
    Lose,
    StartHost,
)
from fastq_loader.remote.control import NoPlace, Place
from fastq_loader.remote.link import Address
from fastq_loader.remote.placement import Placement, Ready
from fastq_loader.remote.seat import seat_class

if TYPE_CHECKING:
    from fastq_loader.remote.options import RayWorkers

#: Seconds between two ticks of `Cluster`.
_TICK = 1.0
#: Seconds that hosts have to end, when all their workers have ended before.
_END = 2.0
#: What an actor does at the same time: stay, say where it is, and start a host, which may take minutes.
_METHODS = 4
#: Characters of what Ray says.
_LONGEST = 300

_log = logging.getLogger("fastq_loader")

Event = Callable[[], list[Instruction]]


class RayPlacement(Placement):
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
        self._cluster = Cluster(flexible)
        self._actors: dict[int, Any] = {}
        self._devices: dict[int, dict[str, str]] = {}  # actor → variables that say which are its own
        self._starters: set[int] = set()  # actors that have, or had, a host
        self._unwatched: set[int] = set()  # actors whose end would not be noticed
        self._asked: dict[int, Ready] = {}  # by the number of the place
        self._deaths: dict[int, str] = {}  # the same → why it is gone
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fastq_loader: Ray", daemon=True)

    def start(self, spec: bytes) -> None:
        """
        Raises:
            Exception: Ray cannot be joined or started, or does not accept an option.
        """
        self._ray = ray = importlib.import_module("ray")
        if not ray.is_initialized():
            ray.init(address=self._options.address)
        options = self._options
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
        # At its exit Ray is shut down before the loaders close, because it was imported after them. Whoever
        # calls it then starts it anew.
        atexit.register(self._stop)
        self._thread.start()

    # ---- what the pool wants --------------------------------------------------------------------

    def acquire(self, number: int, ready: Ready) -> None:
        self._asked[number] = ready
        self._events.put(partial(self._cluster.acquire, number))

    def release(self, number: int, why: str) -> None:
        self._asked.pop(number, None)
        self._events.put(partial(self._cluster.release, number, why))

    def death(self, number: int) -> str:
        return self._deaths.get(number, "")

    def _stop(self) -> None:
        """Call Ray no more from the thread."""
        if self._thread.ident is not None:
            self._events.put(None)
            self._thread.join()

    def close(self) -> None:
        self._stop()
        atexit.unregister(self._stop)
        if self._actors and self._ray.is_initialized():  # else they have ended with it
            ends = [self._actors[starter].end.remote() for starter in self._starters & {*self._actors}]
            if ends:
                self._ray.wait(ends, num_returns=len(ends), timeout=_END)
            for actor in self._actors.values():
                self._ray.kill(actor)
        self._actors.clear()
        self._spec = self._seat = None

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        due = time.monotonic() + _TICK
        while True:
            try:
                event = self._events.get(timeout=max(0.0, due - time.monotonic()))
            except Empty:
                event, due = self._cluster.tick, time.monotonic() + _TICK
            if event is None:
                return
            for instruction in event():
                self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Give(number, actor, address, port, node):
                self._say(Place(number, Address(address, port), node, self._devices[actor]))
            case Complain(have, want):
                self._complain(have, want)
            case Lose(number, why):
                self._deaths[number] = why
                self._say(NoPlace(number, why))
            case Kill(actor):
                seat = self._actors.pop(actor, None)
                if seat is not None and self._ray.is_initialized():
                    self._ray.kill(seat)
            case Create(actor) | Ask(actor) | StartHost(actor):
                try:
                    if not self._ray.is_initialized():  # Ray would start anew by itself
                        raise RuntimeError("Ray was shut down")
                    self._call(instruction, actor)
                except Exception as error:
                    self._events.put(partial(self._cluster.failed, actor, _text(error)))

    def _say(self, found: Place | NoPlace) -> None:
        ready = self._asked.get(found.number)
        if ready is not None:  # it was not given back meanwhile
            ready(found)

    def _call(self, instruction: Create | Ask | StartHost, actor: int) -> None:
        """Call an actor; what it answers becomes an event."""
        if isinstance(instruction, Create):
            self._actors[actor] = self._seat.remote()
            self._unwatched.add(actor)
        seat = self._actors[actor]
        if isinstance(instruction, StartHost):
            self._starters.add(actor)
            first, last = self._options.ports or (0, 0)
            ports = list(range(first, last + 1))
            self._then(actor, "listen", seat.listen.remote(self._spec, ports))
            return
        self._then(actor, "where", seat.where.remote())
        if actor in self._unwatched:
            self._unwatched.discard(actor)
            self._then(actor, "stay", seat.stay.remote())

    def _then(self, actor: int, method: str, reference: Any) -> None:
        reference.future().add_done_callback(
            lambda future: self._events.put(partial(self._answered, actor, method, future))
        )

    def _answered(self, actor: int, method: str, future: Any) -> list[Instruction]:
        """What an actor, or Ray in its place, has answered."""
        error = future.exception()
        if error is None:
            if method == "where":
                node, address, self._devices[actor] = future.result()
                return self._cluster.placed(actor, node, address)
            return self._cluster.listens(actor, future.result())
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.ActorUnavailableError):
            if method == "where":
                return self._cluster.lost(actor, _text(error))
            if method == "stay":
                self._unwatched.add(actor)
            return self._cluster.unsure(actor)
        if isinstance(error, exceptions.ActorDiedError) and not error.actor_init_failed:
            self._actors.pop(actor, None)
            return self._cluster.gone(actor, _text(error))
        return self._cluster.failed(actor, _text(error))

    def _takes(self) -> dict[str, float]:
        """What each worker takes from the cluster."""
        options = self._options
        takes = {"CPU": options.num_cpus, "GPU": options.num_gpus, **options.resources}
        return {name: amount for name, amount in takes.items() if amount}

    def _complain(self, have: int, want: int) -> None:
        if not self._ray.is_initialized():
            return
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
