"""The order of an epoch: how its indices are drawn, and how that is begun again.

Runs in the consumer, on the thread that calls `next()`. A sampler with a `state_dict` is asked after every
index, because indices are drawn before their batches are handed out. Any other is started again from the
states that its generators had when the epoch began, and advanced: no sample is loaded for that. What it draws
on the way is put back, because it was drawn before the epoch was stopped.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from fastq_loader.reading import generators, sampling
from fastq_loader.reading.permutation import PermutationSampler
from fastq_loader.reading.position import Stateful, is_stateful
from fastq_loader.reading.seeding import draw_base_seed
from fastq_loader.scheduling.progress import START, Progress

T = TypeVar("T")

#: Samplers whose order does not depend on any of the generators that a process shares.
_DEAF = (SequentialSampler, DistributedSampler, PermutationSampler, BatchSampler, _InfiniteConstantSampler)
#: And those that draw from torch's, if they have none of their own.
_TORCHS_OWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
#: Samplers around samplers that are looked into.
_DEEPEST = 8


def chain(index_sampler: Any) -> list[Any]:
    """A sampler and those that it draws from: a batch sampler's `sampler`, a wrapper's `batch_sampler`."""
    found: list[Any] = []
    part = index_sampler
    while part is not None and len(found) < _DEEPEST and not any(part is other for other in found):
        found.append(part)
        part = getattr(part, "batch_sampler", None) or getattr(part, "sampler", None)
    return found


def stateful_sampler(index_sampler: Any) -> Stateful | None:
    """The outermost of its samplers that can say where it stands."""
    return next(filter(is_stateful, chain(index_sampler)), None)


def said(part: Any) -> Any:
    """What it says of where it stands, for keeps; None: nothing."""
    return copy.deepcopy(part.state_dict()) if is_stateful(part) else None


def own_generators(index_sampler: Any, generator: torch.Generator | None, dataset: Any) -> dict[str, Any]:
    """The generators that belong to a loader: its own, and its samplers'."""
    if isinstance(index_sampler, _InfiniteConstantSampler):
        return generators.find({"generator": generator})
    roots = {"generator": generator, "sampler": index_sampler}
    return generators.find(roots, but=[dataset, getattr(index_sampler, "data_source", dataset)])


def epochs(index_sampler: Any) -> dict[str, int]:
    """What `set_epoch` told the samplers: how deep → the epoch."""
    return {str(depth): part.epoch for depth, part in enumerate(chain(index_sampler)) if _has_epoch(part)}


def set_epochs(index_sampler: Any, told: dict[str, int]) -> None:
    """Tell the samplers the same again."""
    for depth, part in enumerate(chain(index_sampler)):
        if str(depth) in told and _has_epoch(part) and part.epoch != told[str(depth)]:
            part.set_epoch(told[str(depth)])


def _has_epoch(part: Any) -> bool:
    return callable(getattr(part, "set_epoch", None)) and type(getattr(part, "epoch", None)) is int


@dataclass
class Beginning:
    """How the order of an epoch began, and how far it was drawn.

    Attributes:
        starts: how often the sampler was iterated; torch's loader does it twice with workers.
        seeded: whether a base seed was drawn after the first time.
        states: of the generators that it may have drawn from, when the epoch began.
        first: of those that it has drawn its first index from, right before.
        epochs: see `epochs`.
        drawn: positions that were drawn, also of batches that were not handed out.
        exhausted: whether the sampler had nothing more after them; it may have drawn random numbers then.
        snapshots: for a sampler that can say where it stands: positions drawn → what it said then, and what
            its iterator said.
    """

    starts: int = 0
    seeded: bool = False
    states: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    drawn: int = 0
    exhausted: bool = False
    snapshots: dict[int, tuple[Any, Any]] = field(default_factory=dict)


class Order:
    """Draws the indices of one epoch, and notes how.

    Made when the epoch begins, before anything is drawn for it.

    Args:
        index_sampler: the loader's.
        generator: the loader's, or None.
        dataset: the loader's; it is not searched for generators.
        progress: how far the epoch has come: it goes on from there.
        resumed: how it began, if it goes on; else it begins now.

    Attributes:
        progress: to be set with each batch that is handed out.
        own: the generators that belong to the loader, by name.
        beginning: what is noted.
        batch_size: of a batch that is full; 0: unknown.
    """

    def __init__(
        self,
        index_sampler: Any,
        generator: torch.Generator | None,
        dataset: Any,
        progress: Progress = START,
        resumed: Beginning | None = None,
    ) -> None:
        self.progress = progress
        self._sampler = index_sampler
        self._generator = generator
        self._resumed = resumed
        self._source: IndexSource | None = None  # of a resumed epoch
        self.own = own_generators(index_sampler, generator, dataset)
        self._asked = stateful_sampler(index_sampler)
        self.batch_size: int = getattr(index_sampler, "batch_size", None) or 0
        self._watched = self._shared_generators()
        if resumed is None:
            own = {name: generators.state_of(generator) for name, generator in self.own.items()}
            self.beginning = Beginning(states=own, epochs=epochs(index_sampler))
        else:
            self.beginning = resumed
            set_epochs(index_sampler, resumed.epochs)

    def _shared_generators(self) -> tuple[str, ...]:
        kinds = {type(part) for part in chain(self._sampler)}
        if self._asked is not None or kinds.issubset(_DEAF):
            return ()
        return ("torch",) if kinds.issubset(_DEAF + _TORCHS_OWN) else tuple(generators.GLOBAL)

    def begin(self, packed: bool = False) -> IndexSource:
        """The indices. A new epoch with workers begins twice, as in torch; a resumed one goes on once.

        Args:
            packed: see `sampling.iterate`.
        """
        if self._resumed is None:
            self.beginning.starts += 1
            start = lambda: sampling.iterate(self._sampler, packed=packed)  # noqa: E731
            return self._source_of(self.watch(start, self.beginning.states))
        if self._source is None:
            goes_on = self._ask_to_go_on if self._resumed.snapshots else self._advance
            self._source = goes_on(self._resumed, packed)
        return self._source

    def _source_of(self, drawn: Iterator[Any], snapshot: tuple[Any, Any] | None = None) -> IndexSource:
        source = IndexSource(drawn, self, self.progress)
        if self._asked is not None or is_stateful(drawn):
            source.snapshots = self.beginning.snapshots = {source.position: snapshot or self.ask(drawn)}
        return source

    def _advance(self, resumed: Beginning, packed: bool) -> IndexSource:
        """Start the sampler as it was started, and draw what was drawn."""
        head = self.progress.head
        with self.as_at_start():
            for start in range(resumed.starts):
                last = start == resumed.starts - 1
                # One that was skipped is drawn below: a shuffle does not draw before it is asked.
                skip = max(0, head - 1) if last else 0
                drawn, skip = sampling.iterate_from(self._sampler, skip, packed=packed)
                if start == 0 and resumed.seeded:
                    draw_base_seed(self._generator)
            for name in resumed.first.keys() & generators.GLOBAL.keys():
                generators.set_state(generators.GLOBAL[name], resumed.first[name])
            source = self._source_of(drawn)
            source.draw_ahead(skip + min(head, 1), max(0, resumed.drawn - head) + resumed.exhausted)
        return source

    def as_at_start(self) -> generators.restored:
        """A context in which the generators are in the states that they had when the epoch began."""
        known, states = {**generators.GLOBAL, **self.own}, self.beginning.states
        return generators.restored(
            known.values(), [(known[name], state) for name, state in states.items() if name in known]
        )

    def note_shared(self) -> None:
        """What is read from here on draws from the shared generators."""
        if self._resumed is None:
            shared = {name: generators.state_of(each) for name, each in generators.GLOBAL.items()}
            self.beginning.states.update(shared)

    def _ask_to_go_on(self, resumed: Beginning, packed: bool) -> IndexSource:
        """Let the sampler go on from what it said."""
        snapshot = state, iterator_state = resumed.snapshots.get(self.progress.head, (None, None))
        if state is not None and self._asked is not None:
            self._asked.load_state_dict(copy.deepcopy(state))
        if resumed.exhausted and resumed.drawn == self.progress.head:  # the state is of what comes after it
            return self._source_of(iter(()), snapshot)
        drawn = iter(self._sampler)
        if iterator_state is not None and is_stateful(drawn):
            drawn.load_state_dict(copy.deepcopy(iterator_state))
        return self._source_of(drawn, snapshot)

    def watch(self, draw: Callable[[], T], states: dict[str, Any]) -> T:
        """Call something of the sampler's, and note in `states` what shared generators it draws from were."""
        shared = {name: generators.GLOBAL[name] for name in self._watched if name not in states}
        before = {name: generators.state_of(generator) for name, generator in shared.items()}
        try:
            return draw()
        finally:
            states.update(
                (name, state)
                for name, state in before.items()
                if not generators.same(state, generators.state_of(shared[name]))
            )

    def ask(self, drawn: Iterator[Any]) -> tuple[Any, Any]:
        """What a sampler says of where it stands, and its iterator; None: nothing."""
        return said(self._asked), said(drawn)


class IndexSource(Iterator[Any]):
    """The indices of an epoch, from where it goes on.

    Args:
        drawn: yields an index, or `Indices` in place of a list of int.
        order: is told what was drawn.
        progress: what comes before, and positions that are left out.

    Attributes:
        drawn: may be replaced in the middle of an epoch, as an iterator's `_sampler_iter` may.
        position: of the next index.
        snapshots: of the sampler, if it can say where it stands, else None.
    """

    def __init__(self, drawn: Iterator[Any], order: Order, progress: Progress) -> None:
        self.drawn = drawn
        self.position = progress.head
        self.snapshots: dict[int, tuple[Any, Any]] | None = None
        self._order = order
        self._beyond = progress.beyond
        self._ahead: deque[tuple[Any, Exception | None]] = deque()
        self._fresh = order.beginning.drawn == 0  # its first index is drawn from the shared generators

    def draw_ahead(self, dropped: int, kept: int) -> None:
        """Draw indices now: some to be dropped, and some to be given out later."""
        for number in range(dropped + kept):
            try:
                drawn: tuple[Any, Exception | None] = next(self.drawn), None
            except StopIteration:
                return
            except Exception as error:  # it has its position
                drawn = None, error
            if number >= dropped:
                self._ahead.append(drawn)

    def __next__(self) -> Any:
        while True:
            passed_over = self.position in self._beyond
            try:
                index = self._draw()
            except StopIteration:
                self._order.beginning.exhausted = True
                raise
            except Exception:  # it has its position
                self._drew()
                if not passed_over:
                    raise
            else:
                self._drew(index)
                if not passed_over:
                    return index

    def _draw(self) -> Any:
        if self._ahead:
            index, error = self._ahead.popleft()
            if error is not None:
                raise error
            return index
        if self._fresh:
            self._fresh = False
            return self._order.watch(lambda: next(self.drawn), self._order.beginning.first)
        return next(self.drawn)

    def _drew(self, index: Any = None) -> None:
        order = self._order
        self.position += 1
        order.beginning.drawn = max(order.beginning.drawn, self.position)
        if self.snapshots is not None:
            # A batch that is not full has come to the end of the sampler.
            order.beginning.exhausted = isinstance(index, list) and len(index) < order.batch_size
            self.snapshots[self.position] = order.ask(self.drawn)
            for old in [position for position in self.snapshots if position < order.progress.head]:
                del self.snapshots[old]
