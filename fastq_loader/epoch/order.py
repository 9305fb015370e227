"""Draws the indices of an epoch, and draws them again when the epoch is resumed.

Runs in the consumer, on the thread that calls `next()`. How the order is drawn and resumed depends on the
samplers: see `strategies`. Repeating the draws loads no samples. Afterwards, the generators that the sampler
used are restored, because the epoch had drawn those random numbers before it was stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch

from fastq_loader.epoch import samplers
from fastq_loader.epoch.fields import EpochStart, Saved
from fastq_loader.epoch.strategies import (
    ComputedOrder,
    IndexOrError,
    OrderStrategy,
    ReplayedOrder,
    StatefulOrder,
    from_json,
)
from fastq_loader.reading import generators, position, sampling
from fastq_loader.scheduling.progress import START, Progress

T = TypeVar("T")
#: The draws so far: number of positions, whether the sampler is exhausted, the states of the loader's own
#: generators after the draws, and the digest of the indices; see `EpochSnapshot`.
Drawn = tuple[int, bool, dict[str, Any], tuple[int, int] | None]


class Order(Iterator[Any]):
    """Iterator over the indices of one epoch, from its start or from the point where it is resumed.

    Created when the epoch begins, before anything is drawn for it.

    Args:
        index_sampler: the loader's index sampler.
        generator: the loader's generator, or None.
        dataset: the loader's dataset; it is not searched for generators.
        start: the beginning of the epoch; states of generators are recorded in it.
        progress: progress of the epoch, from which it continues.
        saved: the state from which the epoch is resumed; None for a new order.
        traits: facts about the samplers from the previous epoch, if there was one.

    Attributes:
        progress: progress of the epoch; the caller sets it after each delivery.
        position: position of the next index.
        source: yields indices, or `Indices` in place of a list of int. May be replaced in the middle of an
            epoch, through an iterator's `_sampler_iter`.
        start: the beginning of the epoch.
        traits: facts about the samplers.
        drawn: the draws so far, as one immutable record, which can be read in the middle of a draw.
        drawing: whether a draw is in progress.
        pending: states that the shared generators get for the draw of the first index, if a saved state
            fixes them; None once the first index was drawn.
        strategy: how the indices are drawn.
    """

    def __init__(
        self,
        index_sampler: Any,
        generator: torch.Generator | None,
        dataset: Any,
        start: EpochStart,
        progress: Progress = START,
        saved: Saved | None = None,
        traits: samplers.SamplerInfo | None = None,
    ) -> None:
        if traits is None or not traits.hold(index_sampler, generator, dataset):
            traits = samplers.SamplerInfo(index_sampler, generator, dataset)
        self.traits, self.start = traits, start
        self.progress, self.position = progress, progress.head
        self.source: Iterator[Any] = iter(())
        self.pending: dict[str, Any] | None = {}
        if saved is not None:
            samplers.set_epochs(index_sampler, start.epochs)
            self.pending = None if saved.now.drawn else start.first
        start.epochs = traits.epochs if saved is None else start.epochs
        self.drawing = False
        self._lock = threading.RLock()  # held during a draw: a stateful sampler is saved only between draws
        self.strategy = OrderStrategy(traits, saved)
        self._fast_until = 0  # below this position, indices come straight from `source`
        self.drawn: Drawn = 0, False, {}, None  # until `note_drawn`

    # ---- the draws so far ---------------------------------------------------------------------

    def note_drawn(self) -> None:
        """Record the draws so far, and the states of the loader's own generators."""
        strategy = self.strategy
        strategy.states = strategy.own_states()
        drawn = self.position + len(strategy.due)
        self.drawn = drawn, strategy.exhausted, strategy.states, strategy.digest

    def shared_now(self) -> dict[str, Any]:
        """The states of the shared generators that the sampler may draw from."""
        return {name: generators.state_of(generators.GLOBAL[name]) for name in self.traits.shared}

    def drawn_now(self) -> Drawn:
        """Return the draws so far, with the current states of the loader's own generators, from which other
        code may have drawn, too. During a draw (called on another thread, or in a signal handler), return
        the record from before the draw."""
        drawn, states = self.drawn, self.strategy.own_states()
        return drawn if self.drawing or self.drawn is not drawn else (*drawn[:2], states, drawn[3])

    def snapshot(self) -> tuple[Progress, Drawn, dict[str, Any], dict[str, Any], list[Any]]:
        """Return a consistent snapshot: progress; draws; the states from which the first index will be drawn,
        if it was not yet; and for a stateful sampler its state, and the indices that were drawn and not
        delivered.

        Raises:
            RuntimeError: called in a signal handler in the middle of a draw of a stateful sampler.
            Exception: raised by the sampler's `state_dict`.
        """
        strategy = self.strategy
        # The draws last: if another thread draws meanwhile, they include all delivered batches, and the index
        # for which `first` is too late. `pending` after the states: it is set before the first draw.
        first = {} if self.drawn[0] else self.shared_now()
        first = self.pending or first
        if not isinstance(strategy, StatefulOrder):
            progress = self.progress
            return progress, self.drawn_now(), first, {}, []
        with self._lock:
            if self.drawing:
                raise RuntimeError(
                    "state_dict() was called in the middle of a draw of the sampler, whose own state_dict() "
                    "is valid only between two draws: call it between two batches"
                )
            progress = self.progress
            asked = strategy.asked(self.source, progress, self.position)
            return progress, self.drawn_now(), first, *asked

    def _record_states(self, draw: Callable[[], T], states: dict[str, Any], prior: dict[str, Any]) -> T:
        """Call `draw`, and record in `states` the `prior` states of the shared generators that it used."""
        try:
            return draw()
        finally:
            used = prior if self.traits.seeded else generators.moved(prior, self.shared_now())
            states.update({name: prior[name] for name in used})

    # ---- begin and resume an epoch -------------------------------------------------------------

    def begin(self, saved: Saved | None, packed: bool = False) -> None:
        """Begin or resume the order. With workers, a new epoch calls this twice, because torch iterates the
        sampler twice; only the first call resumes.

        Args:
            saved: the state from which the epoch is resumed; None for a new order.
            packed: see `sampling.iterate_from`.
        """
        if saved is None:
            if self.traits.still:  # torch's samplers draw nothing before their first index
                self._iterate_from(0, packed)
            else:
                self.start.states = states = self.strategy.own_states()
                self._record_states(partial(self._iterate_from, 0, packed), states, self.shared_now())
        elif type(self.strategy) is OrderStrategy:
            if saved.place:
                self._continue(saved)
            else:
                self._begin_again(saved, packed)

    def _iterate_from(self, skip: int, packed: bool, saved: Saved | None = None) -> int:
        """Iterate the sampler, and choose the strategy. Returns how many indices are still to be skipped."""
        traits = self.traits
        computed = traits.by_permutation or not traits.shared
        strategy: OrderStrategy = (ComputedOrder if computed else ReplayedOrder)(traits, saved)
        self.source, skip = sampling.iterate_from(traits.sampler, skip, packed=packed, note=strategy.add)
        if traits.asked is not None or position.is_stateful(self.source):
            strategy = StatefulOrder(traits, saved)
        self.strategy = strategy
        return skip

    def _begin_again(self, saved: Saved, packed: bool) -> None:
        """Restart the sampler from the saved generator states, and repeat its draws."""
        head, wanted = self.progress.head, saved.now.digest
        with self.as_at_start():
            # Skip one index fewer, and draw it instead: a shuffle uses its generator only when it yields.
            skip = self._iterate_from(max(0, head - 1), packed, saved)
            self._set_first()
            ended = self._draw_again(skip + min(head, 1), 0)
            ended |= self._draw_again(0, max(0, saved.now.drawn - head) + saved.now.exhausted)
        found = self.strategy.digest
        too_few = ended and wanted is not None and (0 if found is None else found[0]) < wanted[0]
        if self.strategy.differs or too_few:
            raise ValueError(samplers.cannot_begin_again(self.traits.sampler))

    def _continue(self, saved: Saved) -> None:
        """Resume a stateful sampler from its state. It is iterated with the generators as they were when the
        epoch began; generators set by its `load_state_dict` keep the states set there."""
        traits, set_by_sampler = self.traits, dict[str, Any]()

        def begin() -> Iterator[Any]:
            if at_start.moved_since():
                set_by_sampler.update(generators.states_of(traits.own))
            return iter(traits.sampler)

        self.strategy = strategy = StatefulOrder(traits, saved)
        strategy.due.extend(map(from_json, saved.ahead))
        ended = saved.now.exhausted or not saved.now.drawn  # then its state is the start of an iteration
        with self.as_at_start():
            at_start = generators.GeneratorSnapshot(traits.own)
            place = {**saved.place, "ended": ended}
            self.source = position.begun_at(place, traits.asked, begin, lambda begun: begun)
            if not (ended or set_by_sampler):
                self._set_first()
                if self._draw_again(0, 1):  # a generator function runs only from its first next() on
                    strategy.exhausted = True
        if ended:
            with self.as_at_start():
                self.source = iter(()) if saved.now.exhausted else iter(traits.sampler)
        generators.set_states(traits.own, set_by_sampler)

    def _draw_again(self, dropped: int, kept: int) -> bool:
        """Draw `dropped` indices and discard them; draw `kept` more, to be yielded later. Return whether
        there were too few."""
        for number in range(dropped + kept):
            try:
                drawn = self.strategy.draw(self.source)
            except StopIteration:
                return True
            if number >= dropped:
                self.strategy.due.append(drawn)
        return False

    def as_at_start(self) -> generators.restored:
        """Context manager: sets the generators to their states when the epoch began, then restores them."""
        return generators.restored({**generators.GLOBAL, **self.traits.own}, self.start.states)

    def note_shared(self) -> None:
        """Record the generators' states, because reads from here on draw from the shared ones."""
        self.start.states.update(generators.states_of({**self.traits.own, **generators.GLOBAL}))

    def _set_first(self) -> None:
        generators.set_states({**generators.GLOBAL, **self.traits.own}, self.start.first)

    # ---- the indices --------------------------------------------------------------------------

    def __next__(self) -> Any:
        if self.position >= self._fast_until:
            return self._next_recorded()
        strategy = self.strategy
        self.drawing = True
        try:
            index = next(self.source)
        except StopIteration:
            strategy.exhausted = True
            self.note_drawn()
            raise
        except Exception:  # an error takes a position, like an index
            self.position += 1
            self.drawn = self.position, False, strategy.states, strategy.digest
            raise
        else:
            if strategy.note is not None:
                strategy.note(index)
            self.position += 1
            self.drawn = self.position, False, strategy.states, strategy.digest
            return index
        finally:
            self.drawing = False

    def _next_recorded(self) -> Any:
        due = self.strategy.due
        while True:
            progress = self.progress
            head = progress.delivered - len(progress.beyond)
            is_delivered = self.position < head or self.position in progress.beyond
            with self._lock:
                self.drawing = True
                try:
                    index, error = due.popleft() if due else self._draw()
                    self._record_draw(index, error, head)
                except StopIteration:
                    self.strategy.exhausted = True
                    raise
                finally:
                    self.note_drawn()
                    self.pending, self.drawing = None, False
            if is_delivered:
                continue
            if error is None:
                return index
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame

    def _draw(self) -> IndexOrError:
        strategy, start = self.strategy, self.start
        if self.pending is None:
            return strategy.draw(self.source)
        fixed = self.pending
        self.pending = fixed or self.shared_now()  # a state requested meanwhile has these
        with generators.as_at(fixed):
            if now := strategy.own_states():
                start.first |= {name: now[name] for name in generators.moved(start.states, now)}
            prior = self.shared_now() if fixed else self.pending
            return self._record_states(partial(strategy.draw, self.source), start.first, prior)

    def _record_draw(self, index: Any, error: Exception | None, head: int) -> None:
        strategy = self.strategy
        strategy.yields(self.position, (index, error), head)
        self.position += 1
        self._fast_until = 0 if strategy.due else strategy.last
