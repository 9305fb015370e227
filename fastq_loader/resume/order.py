"""The order of an epoch: how its indices are drawn, and how that is begun again.

Runs in the consumer, on the thread that calls `next()`. A sampler with a `state_dict` is asked after every
index, because indices are drawn before their batches are handed out. Any other is started again from the
states that its generators had when the epoch began, and advanced: no sample is loaded for that. What either
draws on the way is put back, because it was drawn before the epoch was stopped.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from fastq_loader.reading import generators, sampling
from fastq_loader.reading.first_indices import FirstIndices, digested
from fastq_loader.reading.position import is_stateful
from fastq_loader.resume import samplers
from fastq_loader.resume.read_ahead import ReadAhead
from fastq_loader.scheduling.progress import START, Progress

T = TypeVar("T")
Snapshot = tuple[Any, Any]
#: What was drawn: positions, whether the last batch is short, whether the sampler is exhausted,
#: and the states of the loader's own generators after that; see `Beginning`.
Drawn = tuple[int, bool, bool, dict[str, Any]]


@dataclass
class Beginning:
    """How the order of an epoch began, and how far it was drawn.

    Attributes:
        starts: how often the sampler was iterated; torch's loader does it twice with workers.
        seeded: whether a base seed was drawn after the first time.
        states: of the generators that it may have drawn from, when the epoch began.
        first: of those that it has drawn its first index from, right before.
        epochs: see `samplers.epochs`.
        attributes: of samplers; see `samplers.attributes`.
        digest: how much was drawn, and `digested` of it: of batches, or the permutations of a shuffle. None
            where the order follows from fields that are compared, or a sampler is asked.
        drawn: positions that were drawn, also of batches that were not handed out.
        short: whether the last batch was not full, so that the sampler that is asked has come to its end.
        exhausted: whether the sampler had nothing more after them; it may have drawn random numbers then.
        inner: what a sampler said then that others read ahead of; None: there is none.
        snapshots: for a sampler that can say where it stands: positions drawn → what it said then, and what
            its iterator said.
    """

    starts: int = 0
    seeded: bool = False
    states: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    digest: tuple[int, int] | None = None
    drawn: int = 0
    short: bool = False
    exhausted: bool = False
    inner: Any = None
    snapshots: dict[int, Snapshot] = field(default_factory=dict)


class Order:
    """Draws the indices of one epoch, and notes how.

    Made when the epoch begins, before anything is drawn for it.

    Args:
        index_sampler: the loader's.
        generator: the loader's, or None.
        dataset: the loader's; it is not searched for generators.
        progress: how far the epoch has come: it goes on from there.
        resumed: how it began, if it goes on; else it begins now.
        built: the samplers' attributes before the first epoch; None: this is the first.
        traits: of the samplers in the epoch before, if there was one.
        ahead: whether it is drawn ahead as far as time allows: for workers with a dynamic schedule.

    Attributes:
        progress: to be set with each batch that is handed out.
        traits: of the samplers.
        own: the generators that belong to the loader, by name.
        beginning: what is noted.
        drawn: what was drawn so far, as one immutable record, which can be read in the middle of a draw.
        drawing: whether that is now.
        last: the position from which on the loader's own generators may be drawn from for any index.
        states: of these generators, after what was drawn from them for indices.
        pending: states of shared generators that the first index is still to be drawn from, where a state
            says so.
        batch_size: of a batch that is full, where torch's own batches are around a sampler that is asked.
        first: what is drawn first in a new epoch, if a sampler has to be told the epoch; else None.
    """

    def __init__(
        self,
        index_sampler: Any,
        generator: torch.Generator | None,
        dataset: Any,
        progress: Progress = START,
        resumed: Beginning | None = None,
        built: dict[str, Any] | None = None,
        traits: samplers.Traits | None = None,
        ahead: bool = False,
    ) -> None:
        self.progress = progress
        self._sampler = index_sampler
        self._generator = generator
        self._resumed = resumed
        self._source: IndexSource | None = None  # of a resumed epoch
        if traits is None or not traits.hold(index_sampler, generator, dataset):
            traits = samplers.Traits(index_sampler, generator, dataset)
        self.traits, self.own = traits, traits.own
        self.batch_size = 0 if traits.asked in (None, index_sampler) else index_sampler.batch_size
        self.built = samplers.attributes(index_sampler) if built is None else built
        self._expected = None if resumed is None else resumed.digest
        self._differs = False  # what is drawn again is not what was expected
        self.drawing = False
        # What torch's samplers draw is known: see `break_off`.
        self._ahead = ReadAhead(self.own) if ahead and self.own and not traits.torchs_only else None
        self.pending: dict[str, Any] = {}
        # Torch's samplers draw when they begin, and again at their end, which may be while the last batch is
        # drawn. Others may draw for each index. A shuffle says when it has drawn.
        self.last = sys.maxsize
        if traits.own and traits.shared and not traits.by_permutation:
            self.last = len(index_sampler) - 1 if samplers.draw_once(index_sampler) else 0
        name = None if resumed else traits.wants_epochs
        self.first = None if name is None else FirstIndices(name)
        if resumed is None:
            self.beginning = Beginning(states=self._own_states(), epochs=samplers.epochs(index_sampler))
            if traits.inner is not None:
                self.beginning.inner = samplers.said(traits.inner)
        else:
            self.beginning = resumed
            self.pending = {} if resumed.drawn else resumed.first
            samplers.set_epochs(index_sampler, resumed.epochs)
            samplers.set_attributes(index_sampler, resumed.attributes)
        self.beginning.attributes = samplers.attributes(index_sampler)
        self.note_drawn()

    def note_drawn(self) -> None:
        """Replace what was drawn."""
        noted, self.states = self.beginning, self._own_states()
        self.drawn = noted.drawn, noted.short, noted.exhausted, self.states

    def shared_now(self) -> dict[str, Any]:
        """The states of the shared generators that the sampler may draw from."""
        return {name: generators.state_of(generators.GLOBAL[name]) for name in self.traits.shared}

    def seen(self) -> Drawn:
        """What was drawn, and the states of the loader's own generators now, from which others may have drawn
        as well. In the middle of a draw, on any thread or in a handler of a signal, those before it."""
        drawn, states = self.drawn, self._own_states()
        return drawn if self.drawing or self.drawn is not drawn else (*drawn[:3], states)

    def show(self, progress: Progress | None) -> None:
        """What was handed out has come that far; None: to the end."""
        if self._ahead is not None:
            self.drawing = True
            try:
                self._ahead.show(sys.maxsize if progress is None else progress.delivered)
            finally:
                self.drawing = False

    def draw(self, drawn: Iterator[Any]) -> Any:
        """The next index of the sampler."""
        if self._ahead is None:
            return next(drawn)
        return self._ahead.draw(self.beginning.drawn + 1, partial(next, drawn))

    def begin(self, packed: bool = False) -> IndexSource:
        """The indices. A new epoch with workers begins twice, as in torch; a resumed one goes on once.

        Args:
            packed: see `sampling.iterate`.
        """
        if self._resumed is None:
            self.beginning.starts += 1
            if self.traits.still:  # torch's samplers draw nothing before they are asked
                return self._source_of(self._iterate_from(0, packed)[0])
            drawn, _ = self.watch(lambda: self._iterate_from(0, packed), self.beginning.states)
            return self._source_of(drawn)
        if self._source is None:
            goes_on = self._ask_to_go_on if self._resumed.snapshots else self._advance
            self._source = goes_on(self._resumed, packed)
        return self._source

    def _iterate_from(self, skip: int, packed: bool) -> tuple[Iterator[Any], int]:
        self.beginning.digest = (0, 0) if self.traits.shared else None
        return sampling.iterate_from(self._sampler, skip, packed=packed, note=self.note)

    def note(self, drawn: Any) -> None:
        """An index was drawn, or a permutation of a shuffle."""
        if self.beginning.digest is None:
            return
        count, digest = self.beginning.digest
        self.beginning.digest = now = count + 1, digested(digest, drawn)
        if self._expected is not None and now[0] == self._expected[0]:
            self._differs = now != self._expected
        if self.traits.by_permutation:
            self.states = self._own_states()

    def _source_of(self, drawn: Iterator[Any], snapshot: Snapshot | None = None) -> IndexSource:
        source = IndexSource(drawn, self, self.progress)
        source.note = None if self.traits.by_permutation or not self.traits.shared else self.note
        if self.traits.asked is not None or is_stateful(drawn):
            source.note = self.beginning.digest = None
            source.snapshots = self.beginning.snapshots = {source.position: snapshot or self.ask(drawn)}
        return source

    def _advance(self, resumed: Beginning, packed: bool) -> IndexSource:
        """Start the sampler as it was started, and draw what was drawn."""
        head = self.progress.head
        with self.as_at_start():
            if self.traits.inner is not None and resumed.inner is not None:
                self.traits.inner.load_state_dict(copy.deepcopy(resumed.inner))
            source = self._begin_again(resumed, head, packed)
            source.draw_ahead(0, max(0, resumed.drawn - head) + resumed.exhausted)
        wanted, count = (0 if each is None else each[0] for each in (self._expected, self.beginning.digest))
        if self._differs or (source.ended and count < wanted):
            raise ValueError(samplers.cannot_begin_again(self._sampler))
        return source

    def _begin_again(self, beginning: Beginning, count: int, packed: bool) -> IndexSource:
        """The indices after so many, which are drawn now."""
        for start in range(beginning.starts):
            last = start == beginning.starts - 1
            # One that was skipped is drawn below: a shuffle does not draw before it is asked.
            drawn, skip = self._iterate_from(max(0, count - 1) if last else 0, packed)
            if start == 0 and beginning.seeded:
                generators.draw_base_seed(self._generator)
        generators.set_shared(beginning.first)
        source = self._source_of(drawn)
        source.draw_ahead(skip + min(count, 1), 0)
        return source

    def break_off(self) -> None:
        """Another epoch begins before this one is over: put the generators of torch's samplers where they
        stand if nothing is drawn ahead. Not those that others drew from."""
        beginning, delivered = self.beginning, self.progress.delivered
        ahead = beginning.drawn + beginning.exhausted - delivered
        drew_once = delivered and self.traits.by_permutation and beginning.digest and beginning.digest[0] == 1
        if self.traits.shared != ("torch",) or ahead <= 0 or drew_once:
            return
        known = [*self.own.values(), generators.GLOBAL["torch"]]
        with self.as_at_start():
            source = self._begin_again(beginning, delivered, False)
            wanted = [generators.state_of(each) for each in known]
            source.draw_ahead(ahead, 0)
            drawn = [generators.state_of(each) for each in known]
        for each, before, after in zip(known, wanted, drawn, strict=True):
            if generators.same(after, generators.state_of(each)):
                generators.set_state(each, before)

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
        """Let the sampler go on from what it said. What it draws when it begins is drawn as it was; one that
        sets a generator by itself is believed."""
        head = self.progress.head
        snapshot = state, iterator_state = resumed.snapshots[head]
        if resumed.short and resumed.drawn == head:  # the state is of what comes after it
            with self.as_at_start():
                self._load(self.traits.asked, state)
                samplers.let_end(self.traits.asked, state)
            return self._source_of(iter(()), snapshot)
        with self.as_at_start():
            has_set, has_drawn = False, bool(resumed.states or resumed.first)
            for start in range(resumed.starts if has_drawn else 1):
                has_set |= self._load(self.traits.asked, state)  # what it says may hold for one iteration
                drawn = iter(self._sampler)
                if start == 0 and resumed.seeded:
                    generators.draw_base_seed(self._generator)
            if drawn is not self.traits.asked:
                has_set |= self._load(drawn, iterator_state)
            source = self._source_of(drawn, snapshot)
            if has_drawn and not has_set:
                generators.set_shared(resumed.first)
                source.draw_ahead(0, max(resumed.drawn - head, min(head, 1)) + resumed.exhausted)
            left = self._own_states()
        if has_set:
            for name, of_own in left.items():
                generators.set_state(self.own[name], of_own)
        return source

    def _load(self, part: Any, state: Any) -> bool:
        """Put a sampler, or its iterator, where it stood. Whether that has set a generator."""
        if state is None or not is_stateful(part):
            return False
        before = self._own_states()
        part.load_state_dict(copy.deepcopy(state))
        return not generators.same(before, self._own_states())

    def _own_states(self) -> dict[str, Any]:
        if self._ahead is not None:
            return self._ahead.states()
        return {name: generators.state_of(generator) for name, generator in self.own.items()}

    def watch(self, draw: Callable[[], T], states: dict[str, Any]) -> T:
        """Call something of the sampler's, and note in `states` what shared generators it draws from were, if
        they are not noted yet."""
        before = self.shared_now()
        try:
            return draw()
        finally:
            now = self.shared_now()
            moved = {name: state for name, state in before.items() if not generators.same(state, now[name])}
            states.update({**moved, **states})

    def moved(self) -> dict[str, list[Any]]:
        """The attributes of samplers that have changed: values now, and when the epoch began, if any."""
        began, now = self.beginning.attributes, samplers.attributes(self._sampler)
        changed = [name for name in now if not self.built.get(name, began) == began.get(name) == now[name]]
        return {name: [each[name] for each in (now, began) if name in each] for name in changed}

    def ask(self, drawn: Iterator[Any]) -> Snapshot:
        """What a sampler says of where it stands, and its iterator; see `samplers.said`."""
        asked: Any = self.traits.asked
        return samplers.said(asked), None if drawn is asked else samplers.said(drawn)


class IndexSource(Iterator[Any]):
    """The indices of an epoch, from where it goes on.

    Args:
        drawn: yields an index, or `Indices` in place of a list of int.
        order: notes what was drawn.
        progress: what comes before, and positions that are left out.

    Attributes:
        drawn: may be replaced in the middle of an epoch, as an iterator's `_sampler_iter` may.
        position: of the next index.
        snapshots: of the sampler, if it can say where it stands, else None.
        note: is called with each index that is drawn, if anything.
        ended: there was not enough to be drawn ahead.
    """

    note: Callable[[Any], None] | None = None
    ended = False

    def __init__(self, drawn: Iterator[Any], order: Order, progress: Progress) -> None:
        self.drawn = drawn
        self.position = progress.head
        self.snapshots: dict[int, Snapshot] | None = None
        self._order = order
        self._beyond = progress.beyond
        self._ahead: deque[tuple[Any, Exception | None, Snapshot | None]] = deque()
        self._beginning = order.beginning
        self._first = order.first  # None from the moment on in which there are enough
        self._fresh = order.beginning.drawn == 0  # its first index is drawn from the shared generators
        self._plain = False  # from here on there is nothing to note but the position

    def draw_ahead(self, dropped: int, kept: int) -> None:
        """Draw indices now: some to be dropped, and some to be given out later."""
        for number in range(dropped + kept):
            try:
                drawn = self._draw()
            except StopIteration:
                self.ended = True
                return
            if number >= dropped:
                self._ahead.append(drawn)

    def __next__(self) -> Any:
        order = self._order
        if not self._plain or self.position >= order.last:
            return self._next_noted()
        order.drawing = True
        try:
            index = next(self.drawn)
        except StopIteration:
            self._beginning.exhausted = True
            order.note_drawn()
            raise
        except Exception:  # it has its position
            self._beginning.drawn = self.position = self.position + 1
            order.drawn = self.position, False, False, order.states
            raise
        else:
            self._beginning.drawn = self.position = self.position + 1
            order.drawn = self.position, False, False, order.states
            if self.note is not None:
                self.note(index)
            return index
        finally:
            order.drawing = False

    def _next_noted(self) -> Any:
        while True:
            passed_over = self.position in self._beyond
            self._order.drawing = True
            try:
                index, error, snapshot = self._ahead.popleft() if self._ahead else self._watched()
                self._drew(index, snapshot)
            except StopIteration:
                self._beginning.exhausted = True
                raise
            finally:
                self._order.note_drawn()
                self._order.drawing = False
            if passed_over:
                continue
            if error is None:
                return index
            try:
                raise error
            finally:
                del error  # it holds this frame by its traceback

    def _watched(self) -> tuple[Any, Exception | None, Snapshot | None]:
        if not self._fresh:
            return self._draw()
        self._fresh = False
        with generators.as_at(self._order.pending):
            return self._order.watch(self._draw, self._beginning.first)

    def _draw(self) -> tuple[Any, Exception | None, Snapshot | None]:
        """An index, or the error in its place; and what the sampler says then."""
        index, error = None, None
        try:
            index = self._order.draw(self.drawn)
        except StopIteration:
            raise
        except Exception as raised:  # it has its position, and is not part of the digest
            error = raised
        if self.note is not None and error is None:
            self.note(index)
        return index, error, None if self.snapshots is None else self._order.ask(self.drawn)

    def _drew(self, index: Any, snapshot: Snapshot | None) -> None:
        order, beginning = self._order, self._beginning
        self.position += 1
        beginning.drawn = max(beginning.drawn, self.position)
        if self._first is not None:
            self._first.add(index)
            if self._first.complete:
                self._first = None
        self._plain = (
            self.snapshots is None
            and self._first is None
            and not self._ahead
            and self.position > max(self._beyond, default=-1)
        )
        if self.snapshots is not None and snapshot is not None:
            beginning.short = isinstance(index, list) and len(index) < order.batch_size
            self.snapshots[self.position] = snapshot
            for old in [position for position in self.snapshots if position < order.progress.head]:
                del self.snapshots[old]
