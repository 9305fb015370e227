"""Ray finds the machines: an actor for each worker, and a host on each machine that has some.

Runs in the consumer, on a thread of its own: what Ray reports comes on a thread of Ray's that must not wait,
so it is queued, and calls to Ray may take a while. What is done about it is decided in `cluster`. `_seat`
makes what runs in the process of an actor. Ray is imported only here, and only when a pool starts.

An actor holds room for a worker. It does so in a method that never returns: an error of that says within
milliseconds that the actor is gone. Ray does not start it again (`max_restarts=0`): nobody here would know.
An actor that waits for room is what an autoscaler sees.

User code does not run beside Ray's threads. It runs in the host, a program that one of a machine's actors
has started, and in the workers that the host forks, so the dataset is there once.
"""

from __future__ import annotations

import atexit
import importlib
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from fastq_loader.remote.cluster import Ask, Cluster, Create, Give, Instruction, Kill, Lose, StartHost
from fastq_loader.remote.control import NoPlace, Place
from fastq_loader.remote.link import Address
from fastq_loader.remote.placement import Placement, Ready

if TYPE_CHECKING:
    from fastq_loader.remote.options import RayWorkers

#: Seconds without any news after which a machine that was asked whether it is there is done without. As many
#: as a connection takes to notice.
_SILENCE = 5.0
#: Seconds that hosts have to end, when all their workers have ended before.
_END = 2.0
#: What an actor does at the same time: stay, say where it is, and start a host, which may take minutes.
_METHODS = 4
#: Characters of what Ray says.
_LONGEST = 300

Event = Callable[[], list[Instruction]]


class RayPlacement(Placement):
    """The actors of one pool.

    Args:
        options: what the user said.
    """

    def __init__(self, options: RayWorkers) -> None:
        self._options = options
        self._ray: Any = None
        self._seat: Any = None  # makes actors
        self._spec: Any = None  # a reference to what hosts are told
        self._cluster = Cluster()
        self._actors: dict[int, Any] = {}
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
        self._seat = ray.remote(_seat()).options(
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
        while True:
            try:
                event = self._events.get(timeout=_SILENCE if self._cluster.in_doubt else None)
            except Empty:
                event = self._cluster.silence
            if event is None:
                return
            for instruction in event():
                self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Give(number, _, address, port, node):
                self._say(Place(number, Address(address, port), node))
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
                return self._cluster.placed(actor, *future.result())
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


def _text(error: BaseException) -> str:
    """What Ray says of an error, without what it says of itself and of errors in general."""
    text = str(error).partition("Some common causes include")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    telling = [line for line in lines if line.startswith(("The actor is dead", "The actor died because"))]
    return (telling or lines)[-1].rstrip(". ")[:_LONGEST]


def _seat() -> type:
    """The class of an actor. Made in here, it is pickled as it stands, so that an actor that starts no host
    needs neither this package nor torch."""

    class Seat:
        def __init__(self) -> None:
            import threading

            self.starting = threading.Lock()
            self.host: Any = None
            self.port = 0

        def where(self) -> tuple[str, str]:
            ray: Any = importlib.import_module("ray")
            return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

        def stay(self) -> None:
            import threading

            threading.Event().wait()

        def listen(self, spec: bytes, ports: list[int]) -> int:
            import importlib.util
            import sys
            import types

            if "fastq_loader" not in sys.modules:
                found = importlib.util.find_spec("fastq_loader")
                if found is None:
                    raise ModuleNotFoundError("fastq-loader[ray] is not installed on this machine")
                # The package itself imports torch, and an actor needs none of it.
                package = sys.modules["fastq_loader"] = types.ModuleType("fastq_loader")
                package.__path__ = list(found.submodule_search_locations or ())
            from fastq_loader.remote.host_process import Host

            with self.starting:
                if self.host is None or not self.host.alive:
                    self.end()
                    self.host = Host(spec, self.where()[1], ports)
                    self.port = self.host.address().port
                return self.port

        def end(self) -> None:
            host, self.host = self.host, None
            if host is not None:
                host.close()

    return Seat
