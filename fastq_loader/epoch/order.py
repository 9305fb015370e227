"""The order of an epoch: draws its indices, and draws them again when the epoch is resumed.

Runs in the consumer, on the thread that calls `next()`. A stateful sampler (one with `state_dict` and
`load_state_dict`) resumes from its own state, after the indices that were drawn and not delivered. Any other
is restarted from the states that its generators had when the epoch began, and read up to the position: no
sample is loaded for that, and a digest shows whether it yields the same indices. Generators that either uses
on the way are restored, because those random numbers were drawn before the epoch was stopped.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from fastq_loader.epoch import samplers
from fastq_loader.epoch.read_ahead import PrefetchedGenerators
from fastq_loader.reading import generators, position, sampling
from fastq_loader.reading.first_indices import FirstIndices, digested
from fastq_loader.scheduling.progress import START, Progress

T = TypeVar("T")
#: The draws so far: number of positions, whether the sampler is exhausted, and the states of the loader's own
#: generators after them; see `ResumePoint`.
Drawn = tuple[int, bool, dict[str, Any]]

_PLAIN = {int, float, bool, str, type(None)}


@dataclass
class Beginning:
    """The start of an epoch's order.

    Attributes:
        states: states of the generators that the sampler may draw from, right before it was iterated.
        first: states right before the first index was drawn, where they differ from `states`.
        epochs: see `samplers.epochs`.
        digest: number and `digested` of the batches drawn, or of the permutations of a shuffle. None where
            the order follows from compared fields, or the sampler is stateful.
    """

    states: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    digest: tuple[int, int] | None = None


@dataclass(frozen=True)
class ResumePoint:
    """The point at which an order was stopped and can be resumed.

    Attributes:
        beginning: its start.
        drawn: number of positions drawn, including undelivered ones.
        exhausted: whether the sampler ended after them; it may have drawn random numbers then.
        generators: states of the loader's own generators after these draws, by name.
        place: state of a stateful sampler after them; see `position.place_of`.
        ahead: of a stateful sampler, the indices drawn and not delivered, in the form of `as_json`.
    """

    beginning: Beginning = field(default_factory=Beginning)
    drawn: int = 0
    exhausted: bool = False
    generators: dict[str, Any] = field(default_factory=dict)
    place: dict[str, Any] = field(default_factory=dict)
    ahead: tuple[Any, ...] = ()


class Order(Iterator[Any]):
    """Iterator over the indices of one epoch, from its start or from the point where it is resumed.

    Created when the epoch begins, before anything is drawn for it.

    Args:
        index_sampler: the loader's.
        generator: the loader's, or None.
        dataset: the loader's; it is not searched for generators.
        progress: progress of the epoch, from which it continues.
        resumed: where it resumes; None for a new order.
        traits: of the samplers in the previous epoch, if there was one.
        ahead: whether timing decides how far indices are drawn ahead: with workers and a dynamic schedule.

    Attributes:
        progress: the caller sets it with each batch delivered.
        position: of the next index.
        source: yields indices, or `Indices` in place of a list of int. May be replaced in the middle of an
            epoch, through an iterator's `_sampler_iter`.
        traits: of the samplers.
        own: the generators that belong to the loader, by name.
        beginning: its start.
        drawn: the draws so far, as one immutable record, which can be read in the middle of a draw.
        drawing: whether a draw is in progress.
        last: the position from which on any draw may use the loader's own generators.
        states: of these generators, after the draws so far.
        pending: states of shared generators that the first index will be drawn from, if a saved state fixes
            them.
        first: the first indices of a new epoch, recorded if a sampler needs `set_epoch`; else None.
        note: called with each index drawn, unless None.
    """

    note: Callable[[Any], None] | None = None

    def __init__(
        self,
        index_sampler: Any,
        generator: torch.Generator | None,
        dataset: Any,
        progress: Progress = START,
        resumed: ResumePoint | None = None,
        traits: samplers.SamplerInfo | None = None,
        ahead: bool = False,
    ) -> None:
        self.progress, self.position, self._beyond = progress, progress.head, progress.beyond
        self._sampler = index_sampler
        self._resumed = resumed
        self._gone_on = False
        if traits is None or not traits.hold(index_sampler, generator, dataset):
            traits = samplers.SamplerInfo(index_sampler, generator, dataset)
        self.traits, self.own = traits, traits.own
        self._differs = False  # the indices drawn again have another digest
        self.drawing = False
        self._lock = threading.RLock()  # held during a draw: a stateful sampler is saved between two
        # For torch's own samplers, `break_off` restores the generators.
        self._reads_ahead = bool(ahead and self.own and not traits.torchs_only)
        self._read_ahead: PrefetchedGenerators | None = None
        # Torch's samplers use generators when they begin and at their end, which may come while the last
        # batch is drawn. Others may use them for each index. A shuffle notes each permutation.
        self.last = sys.maxsize
        if traits.own and traits.shared and not traits.by_permutation:
            self.last = len(index_sampler) - 1 if samplers.draw_once(index_sampler) else 0
        name = None if resumed else traits.wants_epochs
        self.first = None if name is None else FirstIndices(name)
        self._first = self.first  # None once enough are recorded
        if resumed is None:
            self.beginning, self._expected = Beginning(epochs=samplers.epochs(index_sampler)), None
        else:
            self.beginning, self._expected = copy.deepcopy(resumed.beginning), resumed.beginning.digest
            samplers.set_epochs(index_sampler, resumed.beginning.epochs)
        self._fresh = (
            resumed is None or not resumed.drawn
        )  # the next index is the first one, and shared generators are watched
        self.pending = {} if resumed is None or resumed.drawn else resumed.beginning.first
        self.source: Iterator[Any] = iter(())
        self._exhausted = resumed is not None and resumed.exhausted
        self._queue: deque[tuple[Any, Exception | None]] = deque()  # drawn again, not yet yielded
        self._given: dict[int, Any] | None = None  # undelivered indices of a stateful sampler, by position
        self._plain = False  # from here on only the position has to be recorded
        self.note_drawn()

    # ---- the draws so far ---------------------------------------------------------------------

    def note_drawn(self) -> None:
        """Record the draws so far, and the states of the loader's own generators."""
        self.states = self._own_states()
        self.drawn = self.position + len(self._queue), self._exhausted, self.states

    def shared_now(self) -> dict[str, Any]:
        """The states of the shared generators that the sampler may draw from."""
        return {name: generators.state_of(generators.GLOBAL[name]) for name in self.traits.shared}

    def seen(self) -> Drawn:
        """The draws so far, with the present states of the loader's own generators, from which others may
        have drawn as well. During a draw (called on another thread, or in a signal handler), the record
        from before it."""
        drawn, states = self.drawn, self._own_states()
        return drawn if self.drawing or self.drawn is not drawn else (*drawn[:2], states)

    @property
    def is_asked(self) -> bool:
        """Whether the sampler or its iterator is stateful, so that a state contains theirs."""
        return self._given is not None

    def asked(self) -> tuple[Progress, Drawn, dict[str, Any], list[Any]]:
        """One consistent snapshot: progress, draws, the sampler's state, and the indices that were drawn and
        not delivered.

        Raises:
            RuntimeError: called in a signal handler in the middle of a draw.
            Exception: raised by the sampler's `state_dict`.
        """
        with self._lock:
            if self.drawing:
                raise RuntimeError(
                    "state_dict() was called in the middle of a draw of the sampler, whose own state_dict() "
                    "is valid only between two draws: call it between two batches"
                )
            assert self._given is not None
            progress, seen = self.progress, self.seen()
            asked, iterator = self.traits.asked, self.source
            own = {} if self._read_ahead is None else self._read_ahead.states()  # may be part of its state
            with generators.restored({name: self.own[name] for name in own}, own):
                place = position.place_of(asked, None if id(asked) == id(iterator) else iterator)
            due = range(progress.head, self.position)
            ahead = [None if at in progress.beyond else as_json(self._given[at]) for at in due]
            return (
                progress,
                seen,
                copy.deepcopy(place),
                [*ahead, *(as_json(*drawn) for drawn in self._queue)],
            )

    def show(self, progress: Progress | None) -> None:
        """Set the generators to their states after the delivered batches; None: after the whole epoch."""
        if self._read_ahead is not None:
            with self._lock:
                self.drawing = True
                try:
                    self._read_ahead.show(sys.maxsize if progress is None else progress.delivered)
                finally:
                    self.drawing = False

    def _own_states(self) -> dict[str, Any]:
        if self._read_ahead is not None:
            return self._read_ahead.states()
        return generators.states_of(self.own)

    def _watch(self, draw: Callable[[], T], states: dict[str, Any]) -> T:
        """Call `draw`, and record in `states` the prior states of the shared generators that it used."""
        before = self.shared_now()
        try:
            return draw()
        finally:
            states.update({name: before[name] for name in generators.moved(before, self.shared_now())})

    # ---- begin, resume and break off an epoch -------------------------------------------------

    def begin(self, packed: bool = False) -> Order:
        """Begin or resume the order. With workers a new epoch calls it twice, as torch iterates the sampler
        twice; only the first call resumes.

        Args:
            packed: see `sampling.iterate_from`.
        """
        if self._resumed is None:
            if self.traits.still:  # torch's samplers draw nothing before their first index
                self._iterate_from(0, packed)
            else:
                self.beginning.states = states = self._own_states()
                self._watch(partial(self._iterate_from, 0, packed), states)
        elif not self._gone_on:
            self._gone_on = True
            if self._resumed.place:
                self._ask_to_go_on(self._resumed)
            else:
                self._begin_again(self._resumed, packed)
        if self._reads_ahead:
            self._read_ahead = PrefetchedGenerators(self.own)
        return self

    def _iterate_from(self, skip: int, packed: bool) -> int:
        """Iterate the sampler. Returns how many indices are still to be skipped."""
        shared, self.note = self.traits.shared, None
        self.beginning.digest = (0, 0) if shared else None
        self.source, skip = sampling.iterate_from(self._sampler, skip, packed=packed, note=self._note)
        if self.traits.asked is not None or position.is_stateful(self.source):
            self._given, self.beginning.digest = {}, None
        elif shared and not self.traits.by_permutation:
            self.note = self._note
        return skip

    def _note(self, drawn: Any) -> None:
        """Add an index, or a permutation of a shuffle, to the digest."""
        if self.beginning.digest is None:
            return
        count, digest = self.beginning.digest
        self.beginning.digest = now = count + 1, digested(digest, drawn)
        if self._expected is not None and now[0] == self._expected[0]:
            self._differs = now != self._expected
        if self.traits.by_permutation:
            self.states = self._own_states()

    def _begin_again(self, resumed: ResumePoint, packed: bool) -> None:
        """Restart the sampler from the saved generator states, and repeat its draws."""
        head = self.progress.head
        with self.as_at_start():
            # One index fewer is skipped, and drawn instead: a shuffle draws only when it yields.
            skip = self._iterate_from(max(0, head - 1), packed)
            self._set_first()
            ended = self._draw_again(skip + min(head, 1), 0)
            ended |= self._draw_again(0, max(0, resumed.drawn - head) + resumed.exhausted)
        wanted, count = (0 if each is None else each[0] for each in (self._expected, self.beginning.digest))
        if self._differs or (ended and count < wanted):
            raise ValueError(samplers.cannot_begin_again(self._sampler))

    def _ask_to_go_on(self, resumed: ResumePoint) -> None:
        """Resume a stateful sampler from its state. It is iterated with the generators as they were when the
        epoch began; generators set by its `load_state_dict` keep the states set there."""
        set_by_it: dict[str, Any] = {}

        def begin() -> Iterator[Any]:
            if not generators.same(at_start, now := self._own_states()):
                set_by_it.update(now)
            return iter(self._sampler)

        self._given = {}
        self._queue.extend(map(_from_json, resumed.ahead))
        ended = resumed.exhausted or not resumed.drawn  # its state is where its next iteration begins
        with self.as_at_start():
            at_start = self._own_states()
            place = {**resumed.place, "ended": ended}
            self.source = position.begun_at(place, self.traits.asked, begin, lambda begun: begun)
            if not (ended or set_by_it):
                self._set_first()
                if self._draw_again(0, 1):  # a generator function starts at its first next()
                    self._exhausted = True
        if ended:
            with self.as_at_start():
                self.source = iter(()) if resumed.exhausted else iter(self._sampler)
        generators.set_states(self.own, set_by_it)

    def _draw_again(self, dropped: int, kept: int) -> bool:
        """Draw indices to be dropped, and others to be yielded later. Returns whether there were too few."""
        for number in range(dropped + kept):
            try:
                drawn = self._draw()
            except StopIteration:
                return True
            if number >= dropped:
                self._queue.append(drawn)
        return False

    def break_off(self) -> None:
        """Set the generators of torch's samplers as if nothing had been drawn ahead, because another epoch
        begins before this one is over. Generators used by other code meanwhile stay as they are."""
        (drawn, exhausted, _), delivered, digest = self.drawn, self.progress.delivered, self.beginning.digest
        ahead = drawn + exhausted - delivered
        drew_once = delivered and self.traits.by_permutation and digest and digest[0] == 1
        if self.traits.shared != ("torch",) or ahead <= 0 or drew_once:
            return
        known = {**self.own, "torch": generators.GLOBAL["torch"]}
        with self.as_at_start():
            indices, skip = sampling.iterate_from(self._sampler, max(0, delivered - 1))
            self._set_first()
            deque(islice(indices, skip + min(delivered, 1)), 0)
            wanted = generators.states_of(known)
            deque(islice(indices, ahead), 0)
            left = generators.states_of(known)
        used = generators.moved(left, generators.states_of(known))
        generators.set_states({name: each for name, each in known.items() if name not in used}, wanted)

    def as_at_start(self) -> generators.restored:
        """Context manager: sets the generators to their states when the epoch began, then restores them."""
        return generators.restored({**generators.GLOBAL, **self.own}, self.beginning.states)

    def note_shared(self) -> None:
        """Record the generators' states, because reads from here on draw from the shared ones."""
        if self._resumed is None:
            self.beginning.states.update(self._own_states() | generators.states_of(generators.GLOBAL))

    def _note_first(self) -> None:
        states = self.beginning.states
        for name, now in self._own_states().items():
            if name not in states or not generators.same(states[name], now):
                self.beginning.first[name] = now

    def _set_first(self) -> None:
        generators.set_states({**generators.GLOBAL, **self.own}, self.beginning.first)

    # ---- the indices --------------------------------------------------------------------------

    def __next__(self) -> Any:
        if not self._plain or self.position >= self.last:
            return self._next_noted()
        self.drawing = True
        try:
            index = next(self.source)
        except StopIteration:
            self._exhausted = True
            self.note_drawn()
            raise
        except Exception:  # it takes a position
            self.position += 1
            self.drawn = self.position, False, self.states
            raise
        else:
            self.position += 1
            self.drawn = self.position, False, self.states
            if self.note is not None:
                self.note(index)
            return index
        finally:
            self.drawing = False

    def _next_noted(self) -> Any:
        while True:
            passed_over = self.position in self._beyond
            with self._lock:
                self.drawing = True
                try:
                    index, error = self._queue.popleft() if self._queue else self._watched()
                    self._drew(index, error)
                except StopIteration:
                    self._exhausted = True
                    raise
                finally:
                    self.note_drawn()
                    self.drawing = False
            if passed_over:
                continue
            if error is None:
                return index
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame

    def _watched(self) -> tuple[Any, Exception | None]:
        if not self._fresh:
            return self._draw()
        self._fresh = False
        with generators.as_at(self.pending):
            self._note_first()
            return self._watch(self._draw, self.beginning.first)

    def _draw(self) -> tuple[Any, Exception | None]:
        """An index, or the error in its place."""
        try:
            if self._read_ahead is None:
                index = next(self.source)
            else:
                index = self._read_ahead.draw(self.position + 1, partial(next, self.source))
        except StopIteration:
            raise
        except Exception as raised:  # takes a position, but is not in the digest
            return None, raised
        if self.note is not None:
            self.note(index)
        # torch's last batch is not full: a stateful sampler's state is then the start of its next iteration.
        if self._given is not None and type(index) is list and self.traits.asked is not self._sampler:
            self._exhausted |= len(index) < getattr(self._sampler, "batch_size", 0)
        return index, None

    def _drew(self, index: Any, error: Exception | None) -> None:
        if self._given is not None:
            self._given[self.position] = as_json(index, error)
            for old in [at for at in self._given if at < self.progress.head]:
                del self._given[old]
        self.position += 1
        if self._first is not None:
            self._first.add(index)
            if self._first.complete:
                self._first = None
        self._plain = (
            self._given is None
            and self._first is None
            and not self._queue
            and self.position > max(self._beyond, default=-1)
        )


# ---- indices in a state -----------------------------------------------------------------------------


def as_json(index: Any, error: Exception | None = None) -> Any:
    """Copy an index, as JSON if it consists of numbers and text; or describe the error in its place."""
    if error is not None:
        return {"raised": f"{type(error).__name__}: {error}"}
    kind = type(index)
    if kind is list or kind is tuple:
        found = list(index) if _PLAIN.issuperset(map(type, index)) else list(map(as_json, index))
        return found if kind is list else {"tuple": found}
    if isinstance(index, np.generic):
        return {"numpy": [index.dtype.str, index.item()]}
    return copy.deepcopy(index)


def _from_json(plain: Any) -> tuple[Any, Exception | None]:
    if type(plain) is dict and plain.keys() == {"raised"}:
        return None, RuntimeError(f"the sampler raised {plain['raised']}, before the state was saved")
    return _index(plain), None


def _index(plain: Any) -> Any:
    if type(plain) is list:
        return list(plain) if _PLAIN.issuperset(map(type, plain)) else list(map(_index, plain))
    if type(plain) is dict and plain.keys() == {"tuple"}:
        return tuple(map(_index, plain["tuple"]))
    if type(plain) is dict and plain.keys() == {"numpy"}:
        return np.dtype(plain["numpy"][0]).type(plain["numpy"][1])
    return copy.deepcopy(plain)
