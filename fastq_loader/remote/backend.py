"""A pool whose workers run on other machines, as the consumer's group of workers sees it.

Runs in the consumer. Behind each number is a stand-in (see there), which the gateway starts. So the group
deals with processes of this machine, and what is far shows in words and numbers alone: how a far worker died,
and the stacks of one that hangs, which its host says when it is asked; and in statistics.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import popen_fork
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from fastq_loader.errors import ProtocolError
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.blocks import Extents
from fastq_loader.remote import link
from fastq_loader.remote.control import Place, Told, Traffic, create_traffic
from fastq_loader.remote.gateway import Gateway
from fastq_loader.remote.link import Address, Lost, Tls
from fastq_loader.remote.places import Placement, Places, Tie
from fastq_loader.remote.spec import HostSpec
from fastq_loader.remote.stand_in import LOST
from fastq_loader.remote.wire import Request
from fastq_loader.workers.backend import WorkerBackend
from fastq_loader.workers.children import LaunchedProcess
from fastq_loader.workers.config import Plan

if TYPE_CHECKING:
    from fastq_loader.statistics.counters import Counters

#: Seconds that a host has to write a worker's stacks, and to say what became of one.
_STACKS, _DEATH = 2.0, 0.5
#: Seconds in which hosts are asked once whom they have refused, however often somebody wants to know; and
#: that all together have to say so.
_ASK_EVERY, _REFUSED = 1.0, 0.5


class RemoteBackend(WorkerBackend):
    """The stand-ins of one pool.

    Args:
        plan: what the workers do.
        placement: where they run.
        tls: encrypts the connections.
    """

    def __init__(self, plan: Plan, placement: Placement, tls: Tls | None = None) -> None:
        super().__init__(plan)
        self._placement = placement
        self._places = Places(placement)
        self._tls = tls
        self._token = b""
        self._gateway: Gateway | None = None
        self._ties: dict[int, Tie] = {}  # of the workers, by number
        self._words: dict[Tie, str] = {}  # how far workers died
        self._traffic: Traffic | None = None
        self._counted = -1  # descriptor of its memory
        self._counters: Counters | None = None
        self._refused: dict[Address, int] = {}  # connections, by hosts, as far as is known
        self._silent: set[Address] = set()  # hosts that did not answer
        self._asked = -_ASK_EVERY  # when they were asked last

    def start(self, arena: Arena, folder: str, token: bytes, base_seed: int, shared_seed: int | None) -> None:
        self._setup = self._make_setup(arena, folder, token, base_seed, shared_seed)
        self._token = token
        self._counted = create_traffic(self._plan.workers)
        self._traffic = Traffic(self._counted, self._plan.workers)
        self._gateway = Gateway([arena.fd, self._counted], folder)
        self._gateway.open()
        spec = pickle.dumps(HostSpec.of(self._plan, token, self._tls, (base_seed, shared_seed)))
        self._places.start(self._plan.workers, spec)
        while self._left() and len(self._children) < self._gateway.at_once:
            self.start_next()

    def _process(self, worker: int, generation: int, folder: str, space: Extents | None) -> BaseProcess:
        setup = self._setup
        assert setup is not None, "the pool was started"
        told = Told(
            *(worker, generation, folder, space, setup.consumer, setup.token),
            *(setup.descriptors["arena"], setup.arena_length, setup.arena_whole),
            self._counted,
            *(setup.plan.workers, setup.plan.shared_tasks, setup.plan.for_device),
            tls=self._tls,
        )
        return LaunchedProcess(partial(self._launch, told))

    def _launch(self, told: Told) -> popen_fork.Popen:
        assert self._gateway is not None, "the pool was started"
        process, mine = self._gateway.start()
        self._ties[told.worker] = self._places.tie(mine, told)
        return process

    # ---- what is far --------------------------------------------------------------------------

    def stacks(self, worker: int) -> str:
        tie = self._ties.get(worker)
        if tie is None or tie.place is None:
            return "  (it has found no room on another machine yet)"
        if not (report := self._report(tie.place, _STACKS)):
            return "  (nobody on another machine says so)"
        return f"  (pid {report['pid']} on {tie.place.node})\n{report['text']}"

    def death(self, worker: int) -> tuple[str, str]:
        cause, torch_text = super().death(worker)
        tie = self._ties[worker]
        if tie not in self._words:
            self._places.read(tie)
            lost = tie.why or self._children[worker].process.exitcode == LOST
            self._words[tie] = self._how_lost(tie) if lost else cause
        return self._words[tie], torch_text

    def _how_lost(self, tie: Tie) -> str:
        """How a stand-in lost its far worker."""
        if tie.place is None or not tie.pid:
            return f"found no place on another machine: {tie.why};"
        report = self._report(tie.place, _DEATH)
        if not report:
            how = self._placement.death(tie.place.number) or "its host does not answer"
        else:
            how = "its connection broke" if report["alive"] else f"it {report['text']}"
        why = "" if how == tie.why else f"; {tie.why}"
        return f"was lost with its process on {tie.place.node} (pid {tie.pid}{why}): {how},"

    def _report(self, place: Place, patience: float) -> dict[str, Any]:
        """What a host says about the worker at one of its places; nothing if it says nothing."""
        with contextlib.suppress(Lost, ProtocolError):
            request = Request(place.number, True)
            report: dict[str, Any] = link.ask(place.address, self._token, request, self._tls, patience)
            return report
        return {}

    # ---- what users see -----------------------------------------------------------------------

    def count_in(self, counters: Counters) -> None:
        super().count_in(counters)
        self._counters, self._shown = counters, counters.workers
        counters.sources.add(self)

    def count(self) -> tuple[int, int]:
        words = self._traffic
        assert words is not None, "the pool was started"
        hosts: set[Address] = set()
        for worker, tie in list(self._ties.items()):
            place, pid = self._places.where(tie)
            shown = self._shown[worker]
            shown.far = pid, place and place.node
            shown.wire_bytes = words.of(worker)
            if place is not None and not tie.waits and not tie.why:
                hosts.add(place.address)
        self._ask_whom_they_refused(hosts)
        return sum(shown.wire_bytes for shown in self._shown), sum(self._refused.values())

    def _ask_whom_they_refused(self, hosts: set[Address]) -> None:
        """Those that were silent before come last."""
        now = time.monotonic()
        if now < self._asked + _ASK_EVERY:
            return
        self._asked, until = now, now + _REFUSED
        for address in sorted(hosts, key=self._silent.__contains__):
            if (patience := until - time.monotonic()) <= 0:
                return
            self._silent.add(address)
            with contextlib.suppress(Lost, ProtocolError):
                self._refused[address] = link.ask_refused(address, self._token, self._tls, patience)
                self._silent.discard(address)

    def far_worker(self, pid: int) -> tuple[int, str] | None:
        for worker, tie in list(self._ties.items()):
            if self.pid(worker) == pid:
                place, far = self._places.where(tie)
                return far, "" if place is None else place.node
        return None

    def forget(self) -> None:
        super().forget()
        if self._gateway is not None:
            self._gateway.forget()
        if self._counters is not None:  # the thread that has a lock is not there any more
            self._counters.sources.discard(self)

    # ---- the end ------------------------------------------------------------------------------

    def stop(
        self, patience: Callable[[int], float], owner: object, after: Sequence[Callable[[], None]] = ()
    ) -> None:
        self._places.stop()
        super().stop(patience, owner, after)

    def _give_back(self) -> None:
        self._places.close()
        if self._counters is not None:
            self._asked = -_ASK_EVERY
            self._counters.ended(self)
        self._placement.close()
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            gateway.close()
        counted, self._counted = self._counted, -1
        if counted >= 0:
            os.close(counted)
