"""A pool whose workers run on other machines, as the consumer's group of workers sees it.

Runs in the consumer. Behind each number is a stand-in (see there), a program that is started here. So the
group deals with processes of this machine, and what is far shows in words alone: how a far worker died, and
the stacks of one that hangs, which its host says when it is asked.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import popen_fork, util
from multiprocessing.process import BaseProcess
from typing import Any

import fastq_loader
from fastq_loader.errors import ProtocolError
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.blocks import Extents
from fastq_loader.remote import link
from fastq_loader.remote.control import Place, Told
from fastq_loader.remote.encryption import Tls
from fastq_loader.remote.link import Lost
from fastq_loader.remote.placement import Placement
from fastq_loader.remote.places import Places, Tie
from fastq_loader.remote.spec import HostSpec, versions
from fastq_loader.remote.stand_in import LOST
from fastq_loader.remote.wire import Request
from fastq_loader.workers.backend import WorkerBackend, cores
from fastq_loader.workers.config import Plan
from fastq_loader.workers.starting import Surroundings

#: Seconds that a host has to write a worker's stacks, and to say what became of one.
_STACKS, _DEATH = 2.0, 0.5

#: The package itself imports torch, and a stand-in needs none of it: a bare module takes its place.
_CODE = """
import sys, types
package = sys.modules["fastq_loader"] = types.ModuleType("fastq_loader")
package.__path__ = [sys.argv[2]]
sys.path[:] = sys.argv[3:]
from fastq_loader.remote.stand_in import main
main(int(sys.argv[1]))
"""


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
        self._tls = tls
        self._versions = versions()
        self._token = b""
        self._places: Places | None = None
        self._surroundings: Surroundings | None = None
        self._ties: dict[int, Tie] = {}  # of the workers, by number
        self._words: dict[Tie, str] = {}  # how far workers died

    def start(self, arena: Arena, folder: str, token: bytes, base_seed: int, shared_seed: int | None) -> None:
        self._setup = self._make_setup(arena, folder, token, base_seed, shared_seed)
        self._token = token
        spec = pickle.dumps(HostSpec.of(self._plan, token, self._tls))
        self._surroundings = Surroundings()
        self._places = Places(self._placement)
        self._placement.start(spec)
        self._places.start(self._plan.workers)
        while self._left() and len(self._children) < cores():  # each begins with its imports
            self.start_next()

    def _process(self, worker: int, generation: int, folder: str, space: Extents | None) -> BaseProcess:
        setup = self._setup
        assert setup is not None, "the pool was started"
        told = Told(
            *(worker, generation, folder, space, setup.consumer, setup.token),
            *(setup.descriptors["arena"], setup.arena_length, setup.arena_whole),
            *(setup.plan.workers, setup.plan.shared_tasks, setup.plan.for_device),
            *(setup.base_seed, setup.shared_seed, self._versions),
            tls=self._tls,
        )
        return StandInProcess(partial(self._launch, told))

    def _launch(self, told: Told, sentinel: int) -> int:
        """Start a stand-in, which keeps the descriptor `sentinel` open; its process id."""
        assert self._places is not None, "the pool was started"
        assert self._surroundings is not None, "the pool was started"
        mine, its = multiprocessing.connection.Pipe()
        with its:
            path = self._surroundings.preparation("")["sys_path"]
            command = ["", "-c", _CODE, str(its.fileno()), fastq_loader.__path__[0], *path]
            pid = self._surroundings.run(None, command, [its.fileno(), told.arena, sentinel])
        self._ties[told.worker] = self._places.tie(mine, told)
        return pid

    # ---- what is far --------------------------------------------------------------------------

    def stacks(self, worker: int) -> str:
        tie = self._ties.get(worker)
        if tie is None or tie.place is None or not (report := self._report(tie.place, _STACKS)):
            return "  (nobody on another machine says so)"
        return f"  (pid {report['pid']} on {tie.place.node})\n{report['text']}"

    def death(self, worker: int) -> tuple[str, str]:
        cause, torch_text = super().death(worker)
        tie = self._ties[worker]
        if tie not in self._words:
            if self._places is not None:
                self._places.read(tie)
            lost = self._children[worker].process.exitcode == LOST
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

    # ---- the end ------------------------------------------------------------------------------

    def stop(
        self, patience: Callable[[int], float], owner: object, after: Sequence[Callable[[], None]] = ()
    ) -> None:
        if self._places is not None:
            self._places.stop()
        super().stop(patience, owner, after)

    def _give_back(self) -> None:
        places, self._places = self._places, None
        if places is not None:
            places.close()
        self._placement.close()
        surroundings, self._surroundings = self._surroundings, None
        if surroundings is not None:
            surroundings.close()


class StandInProcess(BaseProcess):
    """A program as a process of multiprocessing's, so that whoever has one may treat all alike.

    Args:
        launch: starts it, with a descriptor to keep open, and returns its process id.
    """

    def __init__(self, launch: Callable[[int], int]) -> None:
        super().__init__(daemon=True)
        self.launch: Callable[[int], int] | None = launch

    @staticmethod
    def _Popen(itself: Any) -> popen_fork.Popen:  # the name that BaseProcess calls
        return _Program(itself)


class _Program(popen_fork.Popen):
    method = "exec"

    def _launch(self, process: Any) -> None:
        self.sentinel, kept = os.pipe()
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))
        try:
            self.pid = process.launch(kept)
        finally:
            os.close(kept)
            process.launch = None  # it refers to the pool
