"""Epochs that can be saved, and resumed epochs.

Runs in the consumer, on the thread that calls `iter()` and `next()`; `snapshot` on any thread. Repeating the
draws of an epoch loads no samples. Afterwards, the generators that the sampler used are restored, because
the epoch had drawn those random numbers before it was stopped.

A stateful sampler (one with `state_dict` and `load_state_dict`, or whose iterator has them) resumes from its
own state, which is kept for each index that was drawn and not delivered. Any other is restarted, and a
digest shows whether it yields the same indices.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fastq_loader import options
from fastq_loader.epoch.epoch import Epoch, derived_seed
from fastq_loader.epoch.fields import EpochStart
from fastq_loader.epoch.samplers import SamplerInfo
from fastq_loader.errors import warn_user
from fastq_loader.extras.resume import samplers
from fastq_loader.extras.resume.fields import Saved
from fastq_loader.options import Loader
from fastq_loader.reading import generators, position
from fastq_loader.reading.fetch import EndOfStream
from fastq_loader.reading.reader import DeliveredBefore, Reader
from fastq_loader.scheduling.progress import START, UNKNOWN, Progress, WorkerProgress


class OrderSnapshot(NamedTuple):
    """The draws up to a moment.

    Attributes:
        drawn: number of positions drawn.
        exhausted: whether the sampler has ended.
        states: states of the loader's own generators.
        digest: see `Epoch`.
        sampler_state: of a stateful sampler, see `reading.position.state_of`; or the error that its
            `state_dict` raised.
    """

    drawn: int
    exhausted: bool
    states: dict[str, Any]
    digest: tuple[int, int] | None = None
    sampler_state: dict[str, Any] | Exception = {}  # noqa: RUF012 - never changed


class ResumableEpoch(Epoch):
    """Epoch of a `StatefulDataLoader`, or one that is resumed.

    Args:
        loader: the loader.
        saved: the state that the epoch resumes from; None for a new order.
        info, start, progress: see `Epoch`.

    Attributes:
        compared: fields of the samplers by which two loaders are compared, as they were at the beginning.
        continues_workers: see `Epoch`.
        sends_saved_progress: whether its readers must be sent their saved progress.
        persistent: whether its readers serve the next epoch, too.
        constant: the part of a state that stays the same: the compared fields, and the start as text; None
            until a state needs it.
    """

    saves = True

    def __init__(
        self,
        loader: Loader,
        info: SamplerInfo,
        start: EpochStart,
        progress: Progress,
        saved: Saved | None = None,
    ) -> None:
        if saved is not None:
            samplers.set_epochs(info.sampler, start.epochs)
        super().__init__(info, start, progress)
        self.saved: Saved | None = saved
        self.compared = samplers.compared(info.sampler)
        self.sends_saved_progress = self.persistent = False
        self.constant: tuple[dict[str, Any], str] | None = None
        arguments, workers = options.of(loader), int(loader.num_workers)
        # Each reader has a state or a part of the data of its own.
        apart = options.is_iterable(loader) or (workers and arguments.schedule.save_generators)
        if apart and not progress.workers:
            self.reached = progress._replace(workers=(WorkerProgress(),) * max(1, workers))
        self._asked = samplers.asked_sampler(info.sampler)
        self._is_stateful = self._asked is not None
        self._has_resumed = False
        self._differs = False  # the indices drawn again have another digest
        self._due: deque[tuple[Any, Exception | None]] = deque()  # drawn again, and yielded next
        self._drawing = False
        # Of a stateful sampler, by position, from the first that was not delivered on; else the last one.
        self._snapshots: dict[int, OrderSnapshot] = {}
        self._last_snapshot = OrderSnapshot(0, False, {})
        if saved is not None:
            self.ended = saved.now.exhausted
            if saved.now.drawn:
                self._is_first = False
            else:
                self.first_states = {
                    name: state for name, state in start.first.items() if name in generators.GLOBAL
                }

    # ---- the order ----------------------------------------------------------------------------

    def begin(self, packed: bool = False) -> None:
        if self.saved is None:
            super().begin(packed)
            self._is_stateful = self._asked is not None or position.is_stateful(self.source)
        elif not self._has_resumed:
            self._has_resumed = True
            if self.saved.sampler_state:
                self._continue(self.saved)
            else:
                self._begin_again(self.saved, packed)

    def note(self, drawn: Any) -> None:
        super().note(drawn)
        expected = None if self.saved is None else self.saved.now.digest
        if expected is not None and self.digest is not None and self.digest[0] == expected[0]:
            self._differs = self.digest != expected

    def _begin_again(self, saved: Saved, packed: bool) -> None:
        """Restart the sampler from the saved generator states, and repeat its draws."""
        head, wanted = self.progress.head, saved.now.digest
        with self.as_at_start():
            # Skip one index fewer, and draw it instead: a shuffle uses its generator only when it yields.
            skip = self.iterate(max(0, head - 1), packed)
            self._set_first()
            ended = self._draw_again(skip + min(head, 1), 0)
            ended |= self._draw_again(0, max(0, saved.now.drawn - head) + saved.now.exhausted)
            drawn_from = generators.states_of(self.info.own) if saved.other_size else {}
        generators.set_states(self.info.own, drawn_from)
        found = self.digest
        too_few = ended and wanted is not None and (0 if found is None else found[0]) < wanted[0]
        if self._differs or too_few:
            raise ValueError(samplers.cannot_begin_again(self.info.sampler))

    def _continue(self, saved: Saved) -> None:
        """Resume a stateful sampler from its state. It is iterated with the generators as they were when the
        epoch began; generators set by its `load_state_dict` keep the states set there."""
        info, set_by_sampler = self.info, dict[str, Any]()

        def iterated() -> Iterator[Any]:
            if generators.moved(at_start, generators.states_of(info.own)):
                set_by_sampler.update(generators.states_of(info.own))
            return iter(info.sampler)

        self._is_stateful = True
        ended = saved.now.exhausted or not saved.now.drawn  # then its state is the start of an iteration
        with self.as_at_start():
            at_start = generators.states_of(info.own)
            sampler_state = {**saved.sampler_state, "ended": ended}
            self.source = position.begun_at(sampler_state, self._asked, iterated, lambda begun: begun)
            if not (ended or set_by_sampler):
                self._set_first()
                self.ended |= self._draw_again(
                    0, 1
                )  # a generator function runs only from its first next() on
        if ended:
            with self.as_at_start():
                self.source = iter(()) if saved.now.exhausted else iter(info.sampler)
        generators.set_states(info.own, set_by_sampler)
        self._snapshots[self.drawn] = OrderSnapshot(
            self.drawn, self.ended, generators.states_of(info.own), None, copy.deepcopy(saved.sampler_state)
        )

    def _draw_again(self, dropped: int, kept: int) -> bool:
        """Draw `dropped` indices and discard them; draw `kept` more, to be yielded later. Return whether
        there were too few."""
        for number in range(dropped + kept):
            index, raised = None, None
            try:
                index = next(self.source)
            except StopIteration:
                return True
            except Exception as error:
                raised = error
            else:
                if self._note is not None:
                    self._note(index)
            if number >= dropped:
                self._due.append((index, raised))
            del raised
        return False

    def as_at_start(self) -> generators.restored:
        """Context manager: sets the generators to their states when the epoch began, then restores them."""
        return generators.restored({**generators.GLOBAL, **self.info.own}, self.start.states)

    def _set_first(self) -> None:
        generators.set_states({**generators.GLOBAL, **self.info.own}, self.start.first)

    def __next__(self) -> Any:
        if self._is_stateful and self.drawn not in self._snapshots:
            self._snapshots[self.drawn] = self._now()
        while True:
            progress, number = self.reached, self.drawn
            is_delivered = number < progress.head or number in progress.beyond
            self._drawing = True
            try:
                index = self._take_due() if self._due else super().__next__()
                self._note_end(index)
            except StopIteration:
                raise
            except Exception:
                if not is_delivered:
                    raise
            else:
                if not is_delivered:
                    return index
            finally:
                self._record(progress.head)
                self._drawing = False

    def _take_due(self) -> Any:
        index, error = self._due.popleft()
        self.drawn += 1
        if error is None:
            return index
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def _note_end(self, index: Any) -> None:
        """torch's last batch is not full: the sampler's state is then the start of its next iteration."""
        if self._is_stateful and type(index) is list and self._asked is not self.info.sampler:
            self.ended |= len(index) < getattr(self.info.sampler, "batch_size", 0)

    # ---- what a state needs -------------------------------------------------------------------

    def has_begun(self) -> None:
        if self._is_stateful:
            self._snapshots.setdefault(self.drawn, self._now())
        elif self.drawn == self.progress.head:  # else draws were recorded
            self._record(0)
        replayed = sum(count for count, state in self.resume if "position" not in (state or {}))
        if replayed and self.info.iterable:
            warn_user(
                f"Neither the dataset nor its iterator has state_dict() and load_state_dict(state), so "
                f"{replayed} batches that were handed out before are read again, which takes as "
                "long as it took before. Give the dataset both methods to go on at once.",
                UserWarning,
            )

    def superseded(self) -> None:
        self._snapshots.clear()

    def _now(self) -> OrderSnapshot:
        """The draws so far."""
        states = generators.states_of(self.info.own)
        if not self._is_stateful:
            return OrderSnapshot(self.drawn + len(self._due), self.ended, states, self.digest)
        try:
            iterator = None if id(self._asked) == id(self.source) else self.source
            sampler_state: Any = copy.deepcopy(position.state_of(self._asked, iterator))
        except Exception as error:  # raised when a state is requested
            sampler_state = error.with_traceback(None)
        return OrderSnapshot(self.drawn, self.ended, states, None, sampler_state)

    def _record(self, head: int) -> None:
        """Record the draws so far. `head`: the first position that is not delivered."""
        now = self._now()
        if not self._is_stateful:
            self._last_snapshot = now
            return
        self._snapshots[self.drawn] = now
        for old in [at for at in list(self._snapshots) if at < head]:
            del self._snapshots[old]

    def snapshot(self) -> tuple[Progress, OrderSnapshot]:
        """The progress, and the draws to resume from. Of a stateful sampler these are the draws before the
        first index that was not delivered.

        Raises:
            Exception: raised by the sampler's `state_dict`.
        """
        if not self._is_stateful:
            # The draws last: if another thread draws meanwhile, they include all delivered batches.
            progress, draws, states = self.progress, self._last_snapshot, generators.states_of(self.info.own)
            # Other code may have drawn from the generators, too; in the middle of a draw, they are as before.
            unchanged = not self._drawing and draws is self._last_snapshot
            return progress, draws._replace(states=states) if unchanged else self._last_snapshot
        while True:
            progress = self.progress
            draws = self._snapshots.get(progress.head) or self._now()
            if progress is self.progress:  # else another thread has delivered a batch meanwhile
                if isinstance(draws.sampler_state, Exception):
                    raise draws.sampler_state
                return progress, draws

    def draw_base_seed(self, generator: torch.Generator | None) -> int:
        """Return the seed of the iteration, drawn unless the epoch was resumed, or its workers would have
        lived on."""
        if self.continues_workers:
            return self.follow_base_seed(self.start.base_seed)
        return super().draw_base_seed(generator) if self.saved is None else self.start.base_seed

    def follow_base_seed(self, seed: int) -> int:
        return super().follow_base_seed(seed) if self.saved is None else self.start.base_seed

    @property
    def pool_seed(self) -> int:
        """The base seed of new workers.

        Not the original one if the epoch is resumed in the middle: workers would draw the same random
        numbers as before for other samples. If progress is recorded for each worker, those with delivered
        batches get a seed of their own instead (see `resume`)."""
        progress = self.progress
        if self.saved is None or not progress.delivered or progress.workers:
            return self.start.base_seed
        return derived_seed(self.start.base_seed, progress.delivered)

    @property
    def resume(self) -> list[tuple[int, dict[str, Any] | None]]:
        return (
            [self._of_worker(worker) for worker in self.progress.workers] if self.sends_saved_progress else []
        )

    def _of_worker(self, worker: WorkerProgress) -> tuple[int, dict[str, Any] | None]:
        state = pickle.loads(worker.state) if worker.state else None
        if state and worker.delivered and "generators" not in state:
            state["seed"] = derived_seed(self.start.base_seed, self.progress.delivered)
        return worker.delivered, state

    def left(self) -> tuple[WorkerProgress, ...]:
        """Progress of the readers with which they enter the next epoch. If this one was broken off, it is
        unknown: they have read beyond the delivered batches."""
        progress = self.progress
        known = progress.over or not self.drawn
        return progress.workers if known else (WorkerProgress(0, UNKNOWN),) * len(progress.workers)

    # ---- reading without workers --------------------------------------------------------------

    def note_shared(self) -> None:
        """Record the generators' states, because reads from here on draw from the shared ones."""
        self.start.states.update(generators.states_of({**self.info.own, **generators.GLOBAL}))

    def pass_delivered(self, reader: Reader) -> None:
        """Read the batches of an iterable dataset again that were delivered before, and record its position
        before the first batch."""
        if reader.to_pass:
            index = next(iter(self.info.sampler))  # any index will do
            with self.as_at_start():
                for number in range(reader.to_pass):
                    with contextlib.suppress(DeliveredBefore, EndOfStream):
                        reader.load(number, index)
        progress = self.progress
        if not progress.workers or progress.delivered:
            return
        # A stream that was read in an earlier epoch may report its old end until it is read again; then the
        # previous record is left as it is.
        old, newest = progress.workers[0].state, reader.state_bytes()
        known, now = (pickle.loads(state).get("position", {}) if state else {} for state in (old, newest))
        same = old == UNKNOWN or pickle.dumps(known.get("dataset")) == pickle.dumps(now.get("dataset"))
        if same and self.info.iterable and "iterator" not in now:
            return
        self.reached = progress._replace(workers=(WorkerProgress(0, newest),))


def begin(
    loader: Loader,
    info: SamplerInfo,
    start: EpochStart,
    newest: Any,
    saved: Saved | None,
    same_readers: bool,
) -> ResumableEpoch:
    """See `epoch.epoch.begin`. `info`: of the samplers; `start`: of the epoch if none is resumed."""
    arguments = options.of(loader)
    if saved is not None and saved.start.resumes:
        epoch = ResumableEpoch(loader, info, copy.deepcopy(saved.start), saved.progress, saved)
    else:
        progress = START
        if newest is not None:
            progress = Progress(workers=newest.left() if same_readers else ())
        if saved is not None:
            start.epoch, _, start.batches = saved.position
            progress = Progress(workers=saved.progress.workers)
        epoch = ResumableEpoch(loader, info, start, progress)
        if saved is not None and saved.start.lives_on and loader.persistent_workers:
            epoch.continues_workers = loader.num_workers > 0 and not arguments.is_dynamic
            epoch.start.base_seed = saved.start.base_seed
    epoch.sends_saved_progress = saved is not None
    epoch.persistent = loader.persistent_workers or loader.num_workers == 0
    return epoch
