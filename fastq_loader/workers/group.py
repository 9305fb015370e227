"""The workers as the event loop sees them: their processes, sockets and claims.

Runs in the consumer, on the thread that calls `next()`, except for `wake` and `kill_all`. Owns everything
behind a worker's number: the current process, and the connections to it. The scheduler decides what happens
to the batches of a dead worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.claim_table import Busy, ClaimTable
from fastq_loader.ipc.messages import TOKEN_BYTES, BeginEpoch, Hello, Stop, encode
from fastq_loader.ipc.sockets import ConsumerSocket, Line
from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.pool import BlockPool
from fastq_loader.statistics.counters import Counters
from fastq_loader.system import calls, process_id
from fastq_loader.system.interrupts import without_signals
from fastq_loader.system.unpatched import time
from fastq_loader.workers.config import Plan
from fastq_loader.workers.stopping import BRIEF
from fastq_loader.workers.worker import Worker
from fastq_loader.workers.worker_pool import WorkerPool

#: Number of processes in a row that may end before they are up; then the worker is not started again.
_FAILED_STARTS = 3
#: Seconds to wait for a worker in the middle of a claim. A claim takes two microseconds, unless the worker is
#: stopped (SIGSTOP).
_CLAIMING = 0.5
_BROKE = "its connection to this process broke"
#: Shared tasks since a worker's last answer after which it is passed over while it is busy, if no window has
#: more. An unread one takes up to 5 kB, mostly zmq's.
_UNREAD = 256


#: Arenas and sockets that are not closed yet. If only their pool referenced them, a garbage collection that
#: finds all of them in one cycle would close them before the last workers have ended.
_in_use: set[object] = set()
process_id.in_forked_children(_in_use.clear)


def _frame_at(mapping: Mapping, offset: int, nbytes: int) -> bytes | memoryview:
    if not 0 <= offset <= offset + nbytes <= mapping.end:
        raise ProtocolError(f"a frame of {nbytes} bytes at {offset}, where no block can be")
    return mapping.read(offset, nbytes)


class WorkerGroup:
    """The workers of one pool.

    Args:
        plan: the workers' plan.
        blocks: the shared memory that they write to.
        counters: the loader's counters.

    Attributes:
        token: a secret shared with these workers only, see `messages`.
        workers: the workers' records, by number.
        offered: number of shared tasks that were sent.
        some_behind: whether a worker is behind.
    """

    def __init__(self, plan: Plan, blocks: BlockPool, counters: Counters) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._shared_tasks = plan.shared_tasks
        self._blocks = blocks
        self._counters = counters
        self._worker_pool: WorkerPool = plan.options.workers.make_pool(plan)
        self.workers: list[Worker] = self._worker_pool.workers
        self._socket: ConsumerSocket | None = None
        self._claims: ClaimTable | None = None
        self._unread = max(plan.window.widest, _UNREAD)
        self.offered = 0
        self.some_behind = False

    def start(self, base_seed: int, shared_seed: int | None) -> None:
        """Start the workers. `stop` undoes it, also after an error or an interrupt half-way.

        Raises:
            TypeError, AttributeError, PicklingError: the start method has to pickle an object that cannot be
                pickled.
            OSError: descriptors or processes are used up.
        """
        arena = self._blocks.arena
        _in_use.add(arena)
        self._claims = claims = ClaimTable(arena.fd, arena.mapping.claims)
        self.holder = claims.holder  # called for every batch
        self._worker_pool.start(arena, self.token, base_seed, shared_seed)
        # The zmq context has threads, so it is made after the forks.
        frame_at = partial(_frame_at, arena.mapping)  # holds no object of the user's
        with without_signals():  # an interrupt would leave its descriptors
            self._socket = ConsumerSocket(self.token, frame_at)
        self.send_task, self.receive = self._socket.send_task, self._socket.receive
        _in_use.add(self._socket)
        self._socket.connect(*self.lines)
        for worker in self.workers:
            self._socket.watch(worker.descriptor)
        self._worker_pool.count_in(self._counters)

    @property
    def socket(self) -> ConsumerSocket:
        assert self._socket is not None, "the group was started, and not closed"
        return self._socket

    @property
    def lines(self) -> list[Line]:
        """The connections to the workers that are not dead."""
        return [worker.line for worker in self.workers if worker.line is not None]

    # ---- one worker ---------------------------------------------------------------------------

    def receive_other(self, number: int, message: Any) -> None:
        """Handle a message that is not an answer; see `ConsumerSocket.receive`."""
        worker = self.workers[number]
        if message is None:
            self._counters.rejected_frames += 1
            self.evict(number, f"{_BROKE}: it sent something that is not a message")
        else:
            worker.move("hello")

    def processes(self) -> list[BaseProcess]:
        """The processes of the workers that were started."""
        return [worker.process for worker in self.workers if worker.process is not None]

    def stacks(self, number: int) -> str:
        """Return the current Python stacks of a worker."""
        worker = self.workers[number]
        return self._worker_pool.stacks(worker) if worker.is_up else "  (it is still starting)"

    # ---- deaths -------------------------------------------------------------------------------

    def late_for(self, ticket: int) -> int | None:
        """Return the worker to end because a ticket was not answered in time: the one that has claimed it or
        is claiming it, else an idle one, else any; None if all are dead. While a ticket stays unclaimed, no
        worker has finished anything."""
        claims = self.claims
        late = {claims.holder(ticket), claims.claiming(ticket)}
        alive = [worker.number for worker in self.workers if not worker.is_dead]
        return min(alive, key=lambda w: (w not in late, claims.begun(w) is not None), default=None)

    def ended(self, ready: Sequence[int]) -> list[int]:
        """Return the workers that have ended and are not marked dead yet. `ready` are the descriptors that
        `ConsumerSocket.wait` returned. A worker whose connection broke is killed, unless it is about to end
        by itself."""
        for number in self.socket.broken():
            if not calls.readable([self.workers[number].descriptor], BRIEF):
                self.evict(number, _BROKE)
        return [w.number for w in self.workers if not w.is_dead and w.descriptor in ready]

    def evict(self, number: int, why: str = "it sent an answer that fits none of its tasks") -> None:
        """Kill a worker that does not answer, or that will never send its real answer."""
        worker = self.workers[number]
        if worker.child is not None and not worker.why:
            worker.why = why
            worker.child.kill()

    def mark_dead(self, number: int) -> Worker:
        """Record how a worker died, and close the connection to it. The worker has ended, and everything that
        it had sent was received."""
        worker = self.workers[number]
        cause, torch_text = self._worker_pool.death(worker)
        if worker.why:
            cause = f"was ended, because {worker.why},"
        worker.die(cause, torch_text)
        self.socket.unwatch(worker.descriptor)
        if worker.line is not None:
            self.socket.disconnect(worker.line)
        worker.line, worker.is_behind = None, False
        return worker

    def replace(self, number: int, epoch: BeginEpoch) -> None:
        """Start a new process for a dead worker, and send it the epoch.

        Raises:
            OSError: it could not be started, or too many in a row ended before they were up.
        """
        worker = self.workers[number]
        if worker.failed_starts >= _FAILED_STARTS:
            raise OSError(f"{_FAILED_STARTS} processes in a row ended before they were up")
        self._worker_pool.launch(worker, self._blocks.clear_space(number))
        assert worker.line is not None, "it was started"
        self.socket.watch(worker.descriptor)
        self.socket.connect(worker.line)
        self.claims.begin(number, None)  # clears the dead worker's last task
        worker.answered_at = self.offered
        worker.counters.replaced(worker.pid)
        self._counters.worker_restarts += 1
        self.socket.send(worker.line, epoch)

    # ---- shared tasks ---------------------------------------------------------------------------

    def offer(self, tasks: dict[int, bytes]) -> None:
        """Offer shared tasks (ticket → encoded task), and send them to all workers. Not to a busy one that
        may have many to read: its unread messages take memory, and the others load them. The worker that
        answered last is never passed over, because no window has more tasks."""
        lines, offered, unread = [], self.offered, self._unread
        for worker in self.workers:
            if worker.line is None:
                continue
            if offered - worker.answered_at > unread and self._is_busy(worker):
                worker.is_behind = self.some_behind = True
            if not worker.is_behind:
                lines.append(worker.line)
        self.offered += len(tasks)
        self.claims.offer(*tasks)
        self.socket.send_all(lines, *tasks.values())

    def reading_again(self) -> list[Line]:
        """The workers that are no longer passed over, and are to be sent the tasks on offer."""
        lines = []
        for worker in self.workers:
            caught_up = self.offered - worker.answered_at <= self._unread
            if worker.is_behind and worker.line is not None and (caught_up or not self._is_busy(worker)):
                worker.answered_at, worker.is_behind = self.offered, False
                lines.append(worker.line)
        self.some_behind = any(worker.is_behind for worker in self.workers)
        return lines

    def _is_busy(self, worker: Worker) -> bool:
        return not worker.is_up or self.claims.begun(worker.number) is not None

    # ---- claims -------------------------------------------------------------------------------

    @property
    def claims(self) -> ClaimTable:
        assert self._claims is not None, "the group was started, and not closed"
        return self._claims

    def take_back(self, tickets: list[int]) -> tuple[set[int], dict[int, int]]:
        """Take back the unclaimed ones of these tickets. Returns these, and ticket → worker of the others."""
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
                if time.monotonic() > deadline:  # the worker is stopped: it will answer when it is resumed
                    return False

    # ---- the end ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let `ConsumerSocket.wait` return from now on. May be called on any thread."""
        socket = self._socket  # another thread may close it
        if socket is not None:
            socket.wake()

    def dismiss(self) -> None:
        """Send `Stop` to the workers, after they have answered everything. `stop` does the rest."""
        self.socket.send_all(self.lines, encode(Stop()))

    def stop(self, patience: float) -> None:
        """Let the workers finish their work for `patience` seconds, and then end them; 0 ends them now.

        Returns after an instant; `stopping` attends to workers that take longer. When all have ended, it
        releases everything but the blocks that users reference. May be called again when an interrupt cut it
        short.
        """
        if patience and self._socket is not None and not self._worker_pool.stopped:
            while (received := self._socket.receive()) is not None:
                if isinstance(received[1], Hello):
                    self.workers[received[0]].move("hello")
            self.dismiss()
        after = (self._disconnect, self._close_memory)
        self._worker_pool.stop(lambda worker: self._patience(worker, patience), self._counters, after)
        if self._worker_pool.ended:  # perhaps by `kill_all`, which releases nothing
            self._disconnect()
            self._close_memory()

    def kill_all(self) -> None:
        """End the workers while another thread is in the event loop. May be called on any thread."""
        self._worker_pool.stop(lambda worker: 0, self._counters)

    def _patience(self, worker: Worker, patience: float) -> float:
        """Seconds that a worker gets to finish. One that is still importing modules has nothing to finish,
        and does not read its socket."""
        if self._socket is None:
            return 0
        return patience if worker.is_up or self._worker_pool.forks else min(patience, BRIEF)

    def _disconnect(self) -> None:
        """Close the sockets and the claim table. All workers have ended."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()
            _in_use.discard(socket)
        for worker in self.workers:
            if worker.line is not None:
                worker.line.close()
        claims, self._claims = self._claims, None
        if claims is not None:
            claims.close()

    def _close_memory(self) -> None:
        """Close the shared memory. No worker writes to it any more."""
        _in_use.discard(self._blocks.arena)
        self._blocks.close()
