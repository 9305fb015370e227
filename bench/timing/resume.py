"""What an exact resume costs: `state_dict()`, a loop that calls it, and the first batch that follows.

States and first batches are of datasets that cost nothing: `range(items)`, shuffled. A state to go on from is
saved by a loader that was iterated that far, off the clock, and the batch that it gave next is compared.
"""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch

from bench.peers import PEERS, LoaderSettings, make_peer, peer_class
from bench.peers.torch_loader import TorchLoader
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.timing.steady import PeerLane, peer_lanes
from bench.workloads import find_workload
from fastq_loader import PermutationSampler

AXIS = "resume"
BATCH_SIZE = 64
CALLS = 1000  # of `state_dict()` in a block; the first one of an epoch is dearer than the others
MOST_RESUMES = 3  # repetitions, in which 10^8 items are shuffled three times

STATE, STEPS = "state_dict", "steps"
WITHOUT, WITH = "without", "with"
FRESH, RESUMED, SHUFFLE = "fresh", "resumed", "shuffle"

OURS, THEIRS, INLINE = "fastq_loader", "stateful", "fastq_loader_0"
PERMUTED = "fastq_loader_permuted"
"""Ours with a PermutationSampler; all others have shuffle=True."""
STATE_ITEMS = dict.fromkeys((OURS, THEIRS, INLINE), 10**6) | {PERMUTED: 10**8}
RESUMES = {10**8: (100_000, (PERMUTED, OURS)), 10**7: (10_000, (PERMUTED, OURS, THEIRS))}
"""Items → batches that were handed out before the resume, and whose. torchdata's shuffle is a list of ints,
and it has several at a time: for 10^7 items 400 MB each."""


@dataclass(eq=False, kw_only=True)
class ResumeLane(Lane):
    """Makes a loader for every block, whose workers end with its last reference.

    Attributes:
        items: of the dataset.
        batches: that are handed out before a state to go on from is saved; 0: no state is.
    """

    items: int
    settings: LoaderSettings
    batches: int = 0

    def start(self) -> None:
        loader = self._loader()  # tells whether it is installed
        if self.batches:
            batches = islice(loader, self.batches - 1, None)
            next(batches)
            self._state = loader.state_dict()
            self._following = next(batches).clone()  # not in memory that the workers share

    def block(self, part: str) -> list[Row]:
        if part == STATE:
            return [self._states()]
        started = perf_counter()
        if part == SHUFFLE:
            torch.randperm(self.items)
            return [{"seconds": perf_counter() - started}]
        loader = self._loader()
        if part == RESUMED:
            loader.load_state_dict(self._state)
        batches = iter(loader)
        batch, seconds = next(batches), perf_counter() - started
        if part == RESUMED and not torch.equal(batch, self._following):
            raise RuntimeError(f"it did not go on after batch {self.batches}")
        return [{"seconds": seconds}]

    def _states(self) -> Row:
        loader, seconds, state = self._loader(), 0.0, {}
        for _ in islice(loader, CALLS):
            started = perf_counter()
            state = loader.state_dict()
            seconds += perf_counter() - started
        return {"calls": CALLS, "seconds": seconds, "bytes": state_bytes(state)}

    def _loader(self) -> Any:
        order: dict[str, Any] = {"shuffle": True, "generator": torch.Generator()}
        if self.peer == PERMUTED:
            order = {"sampler": PermutationSampler(self.items)}
        if workers := self.settings.num_workers:
            order |= {"num_workers": workers, "multiprocessing_context": self.settings.start_method}
        peer = cast(type[TorchLoader], peer_class(_origin(self.peer)))
        return peer.loader_class(range(self.items), BATCH_SIZE, **order)


class StepsLane(PeerLane):
    """A peer's running loader; in one part of a round its state is asked for after every batch."""

    def block(self, part: str) -> list[Row]:
        plain, peer = self._step, cast(TorchLoader, self._peer)
        if part == WITH:
            self._step = lambda batch: peer.loader.state_dict()
        try:
            return super().block(part)
        finally:
            self._step = plain


def state_bytes(state: Any) -> int:
    """Bytes of a state as JSON; pickled where it is none."""
    try:
        return len(json.dumps(state))
    except TypeError:
        return len(pickle.dumps(state))


def cases(options: Namespace, workers: int, folder: Path) -> Iterator[Case]:
    """States, steps and first batches with this many workers, at least one."""
    settings = LoaderSettings(workers, options.start_method)

    def lane(name: str, items: int, **fields: Any) -> Lane:
        label = f"{PEERS[_origin(name)].label}, {'PermutationSampler' if name == PERMUTED else 'shuffle'}"
        own = settings._replace(num_workers=0) if name == INLINE else settings
        return ResumeLane(name, f"{label} of {items:,}", 60.0, items=items, settings=own, **fields)

    def case(name: str, description: str, lanes: list[Lane], parts: Sequence[str], blocks: int) -> Case:
        plan = Plan({"description": description}, lanes, parts)
        return Case(AXIS, name, workers, options.start_method, blocks, lambda: plan)

    asked = partial(filter, lambda name: _origin(name) in options.peers)
    lanes = [lane(name, STATE_ITEMS[name]) for name in asked(STATE_ITEMS)]
    yield case(STATE, "called after each batch", lanes, (STATE,), options.blocks)
    yield _steps(options, [*asked((OURS, THEIRS))], settings, folder)
    for items, (batches, names) in RESUMES.items():
        lanes = [lane(name, items, batches=batches) for name in asked(names)]
        for each in lanes:
            each.parts = (FRESH, RESUMED, SHUFFLE) if each.peer == OURS else (FRESH, RESUMED)
        about = f"first batch of {BATCH_SIZE} of {items:,} items, after {batches:,} batches"
        blocks = min(options.blocks, MOST_RESUMES)
        yield case(f"resume_{items}", about, lanes, (FRESH, RESUMED, SHUFFLE), blocks)


def _steps(options: Namespace, names: Sequence[str], settings: LoaderSettings, folder: Path) -> Case:
    workload = find_workload("tokens")

    def plan() -> Plan:
        load = workload.load(folder)
        makers = {name: partial(make_peer, name, load, settings) for name in names}
        fields: dict[str, Any] = {"workload": workload, "load": load, "burst": settings.num_workers}
        lanes = peer_lanes(makers, StepsLane, seconds=options.seconds, **fields)
        return Plan({"description": f"tokens: {workload.description}"}, lanes, (WITHOUT, WITH))

    return Case(AXIS, STEPS, *settings[:2], options.blocks, plan)


def _origin(name: str) -> str:
    return OURS if name == PERMUTED else name
