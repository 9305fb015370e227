"""The workers as the event loop sees them: their processes, their sockets and what they have claimed.

Runs in the consumer, on the thread that calls `next()`, except for `wake` and `kill_all`. Owns what a
worker's number stands for: the process that has it now, its socket, the folder where they meet. The scheduler
decides what becomes of the batches of a dead worker.
"""

from __future__ import annotations

import os
import pickle
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.errors import ProtocolError, describe_index
from fastq_loader.ipc.claim_table import Busy, ClaimTable
from fastq_loader.ipc.endpoints import endpoint_folder, remove_folder
from fastq_loader.ipc.messages import (
    TOKEN_BYTES,
    Epoch,
    Hello,
    Ping,
    Stop,
    decode_index,
    encode,
    seal,
)
from fastq_loader.ipc.sockets import ConsumerSocket
from fastq_loader.memory.pool import BlockPool
from fastq_loader.scheduling.backlog import Backlog
from fastq_loader.scheduling.in_flight import PendingTasks
from fastq_loader.statistics.counters import Counters
from fastq_loader.system import calls
from fastq_loader.workers.config import Plan
from fastq_loader.workers.stopping import BRIEF
from fastq_loader.workers.worker_pool import WorkerPool

#: Processes that may end before they are up, one after the other, until a worker is given up.
_FAILED_STARTS = 3
#: Seconds to wait for a worker in the middle of a claim, which takes two microseconds unless it is stopped.
_CLAIMING = 0.5
_BROKE = "its connection to this process broke"
#: Messages after which a worker is pinged, at least. One that waits to be read takes up to 5 kB, mostly
#: zmq's.
_UNREAD = 256


#: Arenas and sockets until they are given back. Were their engine alone to reference them, a garbage
#: collection that finds all of them in one cycle would close them before the last workers have ended.
_in_use: set[object] = set()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_use.clear)


class WorkerGroup:
    """The workers of one pool.

    Args:
        plan: what they do.
        blocks: the shared memory they write to.
        counters: the loader's.

    Attributes:
        token: what only these workers know, see `messages`.
        behind: workers that were passed over with tasks, and may have time again.
    """

    def __init__(self, plan: Plan, blocks: BlockPool, counters: Counters) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._workers = plan.workers
        self._shared_tasks = plan.shared_tasks
        self._blocks = blocks
        self._counters = counters
        assert plan.make_pool is not None, "this is the consumer"
        self._processes: WorkerPool = plan.make_pool(plan)
        self._socket: ConsumerSocket | None = None
        self._claims: ClaimTable | None = None
        self._backlog: Backlog[bytes] = Backlog(max(plan.window.widest, _UNREAD))
        self.behind = self._backlog.behind
        self._expected: dict[str, set[int]] = {}  # folder → workers that have still to connect there
        self._is_up: set[int] = set()
        self._dead: set[int] = set()
        self._evicted: dict[int, str] = {}  # workers that were ended here → why
        self._failed_starts: Counter[int] = Counter()  # worker → processes that ended before they were up

    def start(self, base_seed: int, shared_seed: int | None) -> None:
        """Start the workers. Whatever happens in here, `stop` takes it back.

        Raises:
            TypeError, AttributeError, PicklingError: the start method pickles, and something cannot be.
            OSError: descriptors, processes or temporary folders are used up.
        """
        workers = self._workers
        arena = self._blocks.arena
        _in_use.add(arena)
        folder = self._new_folder(set(range(workers)))
        self._claims = claims = ClaimTable(arena.fd, arena.mapping.claims)
        self.holder, self.offer_claim = claims.holder, claims.offer  # as they are asked for every batch
        self._processes.start(arena, folder, self.token, base_seed, shared_seed)
        # The context of zmq has threads, so it is made after the forks.
        self._socket = ConsumerSocket(folder, workers, self.token, self._frame_at)
        self.send_frame, self.receive = self._socket.send_frame, self._socket.receive
        _in_use.add(self._socket)
        for descriptor in self._processes.descriptors:
            self._socket.watch(descriptor)
        for worker in range(workers):
            self._backlog.begin(worker)
        self._processes.count_in(self._counters)

    def _frame_at(self, offset: int, nbytes: int) -> bytes | memoryview:
        mapping = self._blocks.arena.mapping
        _, end = mapping.region(self._workers - 1)
        if offset + nbytes > end:
            raise ProtocolError(f"a frame of {nbytes} bytes at {offset}, where no block can be")
        return mapping.read(offset, nbytes)

    def _new_folder(self, workers: set[int]) -> str:
        folder = endpoint_folder()
        self._expected[folder] = workers
        return folder

    def _connected(self, worker: int) -> None:
        """A worker has connected, or never will."""
        for folder, missing in list(self._expected.items()):
            missing.discard(worker)
            if not missing:  # its names are not needed any more
                remove_folder(folder)
                if not os.path.isdir(folder):  # without a free descriptor it is left for later
                    del self._expected[folder]

    @property
    def socket(self) -> ConsumerSocket:
        assert self._socket is not None, "the group was started, and not closed"
        return self._socket

    # ---- one worker ---------------------------------------------------------------------------

    def heard(self, worker: int, message: Any) -> None:
        """A worker has sent something else than an answer: see `ConsumerSocket.receive`."""
        if message is None:
            self._counters.rejected_frames += 1
            self.evict(worker, f"{_BROKE}: what came is not a message")
        elif type(message) is Ping:
            try:
                self._backlog.read(worker)
            except ProtocolError:
                self._counters.rejected_frames += 1
                self.evict(worker)
        else:
            self._mark_ready(worker)

    def _mark_ready(self, worker: int) -> None:
        self._is_up.add(worker)
        self._connected(worker)
        if self._processes.start_next():
            started = len(self._processes.descriptors) - 1
            self.socket.watch(self._processes.descriptors[started])
            self._counters.workers[started].pid = self._processes.pid(started)

    def is_ready(self, worker: int) -> bool:
        """Whether a worker is up. Before that it has begun no task and has no handler for signals."""
        return worker in self._is_up

    def pid(self, worker: int) -> int:
        return self._processes.pid(worker)

    def processes(self) -> list[BaseProcess]:
        """The workers' processes, so far as they were started."""
        return self._processes.processes

    def stacks(self, worker: int) -> str:
        """The Python stacks of a worker as it writes them now."""
        return self._processes.stacks(worker) if self.is_ready(worker) else "  (it is still starting)"

    # ---- deaths -------------------------------------------------------------------------------

    def late_for(self, ticket: int) -> int | None:
        """The worker to end because a ticket was not answered in time: who has claimed it, or is in the
        middle of that, or else has nothing to do; None if all are dead. While a ticket is unclaimed, no
        worker has come to an end with anything."""
        claims = self.claims
        late = {claims.holder(ticket), claims.claiming(ticket)}
        alive = [worker for worker in range(len(self.processes())) if not self.is_dead(worker)]
        return min(alive, key=lambda w: (w not in late, claims.begun(w) is not None), default=None)

    def ended(self, ready: Sequence[int]) -> list[int]:
        """The workers that have ended, by what `socket.wait` found readable, and are not marked dead yet. One
        whose connection has broken is ended, unless it is about to end by itself."""
        descriptors = self._processes.descriptors
        for worker in self.socket.broken():
            if not calls.readable([descriptors[worker]], BRIEF):
                self.evict(worker, _BROKE)
        return [
            worker
            for worker, descriptor in enumerate(descriptors)
            if descriptor in ready and worker not in self._dead
        ]

    def kill(self, worker: int) -> None:
        """End a worker that does not answer, or does not get up."""
        if not self.is_ready(worker):
            self._failed_starts[worker] += 1
        self._processes.kill(worker)

    def evict(self, worker: int, why: str = "it sent what is no answer to any of its tasks") -> None:
        """End a worker whose real answer will never come."""
        if worker not in self._evicted:
            self._evicted[worker] = why
            self._processes.kill(worker)

    def death(self, worker: int) -> tuple[str, str]:
        """How an ended worker died, in our words and in torch's."""
        cause, torch_text = self._processes.death(worker)
        if worker in self._evicted:
            cause = f"was ended, because {self._evicted[worker]},"
        for folder, missing in self._expected.items():
            if worker in missing and not os.path.isdir(folder):
                cause += f", because the folder of its socket, {folder}, was removed,"
        return cause, torch_text

    def report(self, worker: int, cause: str, seq: int | None, index: Any) -> str:
        """The text for an ended worker: how it died (`cause`), and at which batch, if at any."""
        doing = "between batches" if self.is_ready(worker) else "before it was up"
        if seq is not None:
            doing = f"before it answered batch {seq} (indices {describe_index(decode_index(index))})"
        pid = self.pid(worker)
        return f"DataLoader worker (pid(s) {pid}) exited unexpectedly: worker {worker} {cause} {doing}"

    def report_late(self, worker: int | None, seq: int, index: Any) -> str:
        """The text for a batch that has not come in time. `worker` is working on it; None: no worker is."""
        indices = describe_index(decode_index(index))
        if worker is None:
            return f"no worker has come to batch {seq} (indices {indices}) yet"
        return (
            f"worker {worker} (pid {self.pid(worker)}) has not answered batch {seq} (indices {indices}). "
            f"Its Python stacks:\n{self.stacks(worker)}"
        )

    def mark_dead(self, worker: int) -> None:
        """A worker has ended, and what it had sent was received: close its end of the socket."""
        self._dead.add(worker)
        if worker in self._is_up:
            self._failed_starts[worker] = 0
        elif not self._processes.killed(worker):
            self._failed_starts[worker] += 1
        self.socket.unwatch(self._processes.descriptors[worker])
        self.socket.disconnect(worker)
        self._backlog.end(worker)
        self._connected(worker)

    def is_dead(self, worker: int) -> bool:
        """Whether a worker is dead and was not replaced."""
        return worker in self._dead

    def replace(self, worker: int, epoch: Epoch) -> None:
        """Start a new process for a dead worker, and let it begin the epoch.

        Raises:
            OSError: it could not be started, or one after the other ends before it is up.
        """
        if self._failed_starts[worker] >= _FAILED_STARTS:
            raise OSError(f"{_FAILED_STARTS} processes in a row ended before they were up")
        folder = self._new_folder({worker})
        generation = self._processes.replace(worker, folder, self._blocks.clear_space(worker))
        self._dead.discard(worker)
        self._evicted.pop(worker, None)
        self._is_up.discard(worker)
        self.socket.watch(self._processes.descriptors[worker])
        self.socket.connect(folder, worker, generation)
        self.claims.begin(worker, None)  # what the dead one had begun
        self._backlog.begin(worker)
        self._counters.workers[worker].replaced(self._processes.pid(worker))
        self._counters.worker_restarts += 1
        self.socket.send(worker, epoch)

    # ---- what goes to all -----------------------------------------------------------------------

    def sealed(self, told: Sequence[Any]) -> bytes:
        """What each worker is told, by its number, as one sealed pickle; b"" for nothing."""
        return seal(pickle.dumps(list(told)), self.token) if told else b""

    def begin_epoch(self, epoch: Epoch) -> None:
        """Tell all workers of a new epoch."""
        frame = encode(epoch)
        if not self._shared_tasks:  # a busy worker has to be sent its own tasks all the same
            self.socket.send_all(frame)
            return
        due = self._backlog.announce(frame)
        self.socket.send_all(frame, but=self._backlog.behind)
        self._ping(due)

    def offer(self, tasks: dict[int, bytes]) -> None:
        """Send shared tasks, ticket → frame, to the workers that are not too far behind."""
        due = self._backlog.offer(tasks, self.claims.on_offer)
        self.socket.send_all(*tasks.values(), but=self._backlog.behind)
        self._ping(due)

    def catch_up(self) -> None:
        """Send workers that were passed over what they have missed, if they have time again."""
        sends, due = self._backlog.catch_up(self.claims.on_offer)
        for worker, frames in sends.items():
            self.socket.send_frames(worker, frames)
        self._ping(due)

    def _ping(self, workers: list[int]) -> None:
        for worker in workers:
            self.socket.send(worker, Ping())

    # ---- claims -------------------------------------------------------------------------------

    @property
    def claims(self) -> ClaimTable:
        assert self._claims is not None, "the group was started, and not closed"
        return self._claims

    def claimed_by(self, worker: int, pending: PendingTasks, epoch: int) -> tuple[int | None, frozenset[int]]:
        """The batch that a dead worker was working on, and the tickets of all that it had claimed."""
        mine = frozenset(ticket for ticket in pending.tickets() if self.claims.holder(ticket) == worker)
        return pending.seq_of(epoch, self.claims.begun(worker)), mine

    def take_back(self, tickets: list[int]) -> tuple[set[int], dict[int, int]]:
        """Of these tickets those that were unclaimed, and are taken back; and the workers of the others."""
        taken: set[int] = set()
        claimed: dict[int, int] = {}
        for ticket in tickets:
            if self._take_back(ticket):
                taken.add(ticket)
            elif (worker := self.claims.holder(ticket)) is not None:
                claimed[ticket] = worker
        return taken, claimed

    def _take_back(self, ticket: int) -> bool:
        deadline = time.monotonic() + _CLAIMING
        while True:
            try:
                return self.claims.take_back(ticket)
            except Busy:
                if time.monotonic() > deadline:  # the worker is stopped: it will answer when it goes on
                    return False

    # ---- the end ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let `socket.wait` return from now on. May be called on any thread."""
        socket = self._socket  # it may be closed on another thread
        if socket is not None:
            socket.wake()

    def dismiss(self) -> None:
        """Let the workers end, once all have answered everything. `stop` sees to the rest."""
        self.socket.send_all(encode(Stop()))

    def stop(self, patience: float) -> None:
        """Let the workers finish what they do for that many seconds, and then end them; 0 ends them now.

        Those that take longer than an instant go on when this has returned; `stopping` sees to them. When all
        have ended, everything is given back but the blocks that users reference. May be called again when an
        interrupt cut it short.
        """
        if patience and self._socket is not None and not self._processes.stopped:
            while (received := self._socket.receive()) is not None:
                if isinstance(received[1], Hello):
                    self._is_up.add(received[0])
            self.dismiss()
        after = (self._disconnect, self._close_memory)
        self._processes.stop(lambda worker: self._patience(worker, patience), self._counters, after)
        if self._processes.ended:  # by `kill_all` perhaps, which gives nothing back
            self._disconnect()
            self._close_memory()

    def kill_all(self) -> None:
        """End the workers while another thread is in the loop. May be called on any thread."""
        self._processes.stop(lambda worker: 0, self._counters)

    def _patience(self, worker: int, patience: float) -> float:
        """A worker that is still at its imports has nothing to finish, and does not read its socket."""
        if self._socket is None:
            return 0
        return patience if self.is_ready(worker) or self._processes.forks else min(patience, BRIEF)

    def _disconnect(self) -> None:
        """All workers have ended: close the sockets and the table, and remove the folders."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()
            _in_use.discard(socket)
        for folder in list(self._expected):  # forgotten when it is gone: an interrupt may come between
            remove_folder(folder)
            self._expected.pop(folder, None)
        claims, self._claims = self._claims, None
        if claims is not None:
            claims.close()

    def _close_memory(self) -> None:
        """No worker writes any more."""
        _in_use.discard(self._blocks.arena)
        self._blocks.close()
