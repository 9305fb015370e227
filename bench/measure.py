"""The steady state: all peers and the ceiling alive in this process, taking turns block by block.

Turns, because the speed of a machine drifts over minutes by more than loaders differ. While one peer is timed
the others are not consumed: their workers rest once their prefetch is full, and a block waits until they do.

A peer that is missing, cannot do a workload, raises, hangs or gives other batches than torch is a result with
a reason in place of figures; the run goes on without it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType

from bench.batches import compare
from bench.ceiling import Ceiling
from bench.fetch import first_batch
from bench.lanes import PeerLane
from bench.peers import PEERS, LoaderSettings, Peer, Unsupported, peer_class
from bench.peers.by_hand import ByHand
from bench.proc import process_tree, wait_until_quiet
from bench.results import Block, PeerResult, latency
from bench.workloads import Load, Workload

# Of a block's length, after every buffer has been used.
WARM_UP = 0.5
STARTING_S = 120.0  # many spawned workers that each import torch on few cores, or a heavy first batch
HANGING_S = 60.0  # beyond a block's own length: longer than any batch takes
CLOSING_S = 30.0
MOST_NOTED = 2  # of the places in which a batch differs
LONGEST_REASON = 200  # characters

Tick = Callable[[str], None]


class _Run:
    """The peers that are alive, and what is known of those that are not."""

    def __init__(
        self, workload: Workload, load: Load, settings: LoaderSettings, seconds: float, tick: Tick
    ) -> None:
        self.lanes: dict[str, PeerLane] = {}
        self.failures: dict[str, str] = {}
        self.notes: dict[str, list[str]] = {}
        self._workload = workload
        self._load = load
        self._settings = settings
        self._seconds = seconds
        self._tick = tick
        self._peers: dict[str, Peer] = {}
        self._workers: dict[str, list[int]] = {}

    def start(self, name: str, make: Callable[[], Peer]) -> None:
        """Start a peer, look at its first batch, and warm it up."""
        try:
            with time_limit(STARTING_S):
                wait_until_quiet()
                peer = self._peers[name] = make()
                # Workers in step deliver in bursts of one batch each: a block that ended inside a burst would
                # be charged for work that it does not count.
                burst = max(1, self._settings.num_workers)
                lane = PeerLane(peer, self._workload.new_step(), burst, partial(self.workers, name))
                self.lanes[name] = lane
                self._check(name, peer, lane)
                lane.warm_up()
                lane.block(self._seconds * WARM_UP)
                lane.waits = lane.waits[:0]
                self.workers(name)
        except Exception as error:
            self.fail(name, error)
        self._tick(name)

    def block(self, name: str) -> Block | None:
        """A timed block; None from a peer that failed."""
        try:
            with time_limit(self._seconds + HANGING_S):
                wait_until_quiet()
                return self.lanes[name].block(self._seconds)
        except Exception as error:
            self.fail(name, error)
            return None
        finally:
            self._tick(name)

    def fail(self, name: str, error: Exception) -> None:
        self.failures[name] = reason(error)
        self.close(name)

    def close(self, name: str) -> None:
        if lane := self.lanes.pop(name, None):
            lane.stop()
        if peer := self._peers.pop(name, None):
            try:
                with time_limit(CLOSING_S):
                    peer.close()
            except Exception as error:
                self.notes.setdefault(name, []).append(f"closing: {reason(error)}")
        self._workers.pop(name, None)

    def close_all(self) -> None:
        for name in list(self._peers):
            self.close(name)

    def workers(self, name: str) -> list[int]:
        """Process ids below this one that are no other peer's."""
        others = {pid for other, pids in self._workers.items() if other != name for pid in pids}
        own = [pid for pid in process_tree(os.getpid())[1:] if pid not in others]
        self._workers[name] = own
        return own

    def reserve(self, name: str) -> None:
        """The processes that are there now belong to this one, which is no peer."""
        self.workers(name)

    def _check(self, name: str, peer: Peer, lane: PeerLane) -> None:
        expected = first_batch(self._load, peer.shards)
        values = not (self._workload.random or peer.own_order)
        difference = compare(lane.first(), expected, values=values)
        if difference.wrong:
            raise RuntimeError(f"wrong batches: {_listed(difference.wrong)}")
        notes = self.notes.setdefault(name, [])
        if difference.types:
            notes.append(_listed(difference.types))
        if peer.own_order:
            notes.append("an order of its own: values not compared")


def measure(
    workload: Workload,
    load: Load,
    names: Sequence[str],
    settings: LoaderSettings,
    blocks: int,
    seconds: float,
    tick: Tick,
) -> tuple[list[Block], dict[str, PeerResult]]:
    """Time the ceiling and the peers in turn: the ceiling's blocks, and the peers' results by name.

    `tick` is called after every block, off the clock, with the peer's name.
    """
    loops = workload.loops(load)
    labels = {name: PEERS[name].label for name in names} | {name: name for name in loops}
    run = _Run(workload, load, settings, seconds, tick)
    measured: dict[str, list[Block]] = {name: [] for name in labels}
    ceiling_blocks = []
    with ExitStack() as stack:
        # First, so that it is forked from a process without threads.
        ceiling = Ceiling(load, settings.num_workers)
        stack.callback(ceiling.close)
        run.reserve("ceiling")
        stack.callback(run.close_all)
        for name in names:
            run.start(name, partial(_make, name, load, settings))
        for name, loop in loops.items():
            run.start(name, partial(ByHand, loop))
        wait_until_quiet()
        ceiling.block(seconds * WARM_UP)
        tick("ceiling")
        for number in range(blocks):
            # To and fro, so that no peer always runs after the same other one.
            order = ["ceiling", *run.lanes]
            for name in order if number % 2 == 0 else reversed(order):
                if name == "ceiling":
                    wait_until_quiet()
                    ceiling_blocks.append(ceiling.block(seconds))
                    tick(name)
                elif (block := run.block(name)) is not None:
                    measured[name].append(block)
        waits = {name: lane.waits for name, lane in run.lanes.items()}
    results = {}
    for name, label in labels.items():
        notes = run.notes.get(name, [])
        if name in run.failures:
            results[name] = PeerResult(label, notes=notes, failure=run.failures[name])
        else:
            results[name] = PeerResult(label, measured[name], latency(waits[name]), notes=notes)
    return ceiling_blocks, results


def reason(error: Exception) -> str:
    """Why a peer has no figures, in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error}"
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, Unsupported) else f"{type(error).__name__}: {lines[0]}"
    return text[:LONGEST_REASON]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread when this takes longer."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _make(name: str, load: Load, settings: LoaderSettings) -> Peer:
    return peer_class(name)(load, settings)


def _listed(texts: list[str]) -> str:
    more = len(texts) - MOST_NOTED
    return "; ".join(texts[:MOST_NOTED]) + (f"; and {more} more" if more > 0 else "")
