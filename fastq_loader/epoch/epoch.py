"""One epoch of a loader: the order of its indices, its start and its progress.

Runs in the consumer, on the thread that calls `iter()` and `next()`. Keeps no iterator of the loader alive.
An epoch records what `replay` needs: the states of generators right before the sampler drew from them, and
the number and a digest of the draws. What else a state needs is recorded by the subclass in
`extras.resume.epoch`, for loaders that have a state.
"""

from __future__ import annotations

import hashlib
import marshal
import struct
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import torch

from fastq_loader.epoch.fields import EpochStart, Position, Resumable
from fastq_loader.epoch.samplers import SamplerInfo
from fastq_loader.options import Loader
from fastq_loader.reading import generators, sampling
from fastq_loader.reading.reader import Reader
from fastq_loader.scheduling.progress import START, Progress

T = TypeVar("T")
#: Indices that are digested at each end of a batch.
_ENDS = 8
_INT64 = np.dtype(np.int64)


class Epoch(Iterator[Any]):
    """One epoch of a loader, and the iterator over its indices.

    Created when the epoch begins, before anything is drawn for it.

    Args:
        info: facts about the samplers.
        start: the beginning of the epoch; states of generators are recorded in it.
        progress: progress of the epoch, from which it continues.

    Attributes:
        info, start: the arguments.
        reached: progress of the epoch; the iterator sets it after each delivery.
        in_line: number of batches delivered since then, one after the other, which `reached` does not count.
        without_batch: number of positions among all of these with an error, or without anything to yield.
        log: records the calls of the epoch.
        source: the sampler's iterator, the only one in `sources`: yields indices, or `Indices` in place of a
            list of int. May be replaced in the middle of an epoch, through an iterator's `_sampler_iter`. It
            ends with the loader's iterator, as in torch: the loader keeps its last epochs, and a sampler's
            iterator may hold a permutation, or a `with` block to be left.
        drawn: number of indices drawn, including errors in their places.
        ended: whether the sampler has ended.
        digest: number and `digested` of the indices drawn, or of the permutations of a shuffle; None where
            the samplers' attributes determine the order.
        first_states: states that the shared generators have for the draw of the first index, if a saved state
            fixes them.
        bad_samples: judges them; None where they are not tolerated.
        shown: of an epoch that a `Prefetcher` reads ahead: a function that returns the state after the
            batches which that delivered, and the position there.
        saves: whether a state of it can be saved.
        saved: the state from which it was resumed, or None.
        resume: for each reader (worker): the number of its delivered batches, and its state.
        continues_workers: it follows a saved epoch whose workers would have served this one, too.
    """

    saves = continues_workers = False
    saved: Any = None

    def __init__(self, info: SamplerInfo, start: EpochStart, progress: Progress = START) -> None:
        self.info, self.start = info, start
        self.reached, self.in_line, self.without_batch = progress, 0, 0
        self.sources: deque[Any] = deque([iter(())], maxlen=1)
        self.drawn, self.ended = progress.delivered - len(progress.beyond), False
        self.digest: tuple[int, int] | None = None
        self.first_states: dict[str, Any] = {}
        self.log: Any = None
        self.bad_samples: Any = None
        self.shown: tuple[Callable[[], dict[str, Any]], Position] | None = None
        self._is_first = True  # nothing was drawn
        self._note: Callable[[Any], None] | None = None

    @property
    def source(self) -> Iterator[Any]:
        iterator: Iterator[Any] = self.sources[0]
        return iterator

    @source.setter
    def source(self, iterator: Iterator[Any]) -> None:
        self.sources.append(iterator)

    def leave_out(self, progress: Progress | int) -> None:
        """Record the progress after a batch that was left out, see `consumer.outcomes.Moved`."""
        before = self.progress.delivered
        if isinstance(progress, int):
            self.in_line += progress
        else:
            self.reached = progress
        self.without_batch += self.progress.delivered - before

    def belongs_to(self, iterator: Any) -> None:
        """Let `source` end with a loader's iterator. The callback that replaces it is C code: signal handlers
        run where a finalizer in Python begins, and what they raise there is lost."""
        self._owner = weakref.ref(iterator, self.sources.append)

    @property
    def progress(self) -> Progress:
        """Progress of the epoch, made when somebody asks."""
        reached, more = self.reached, self.in_line
        return reached._replace(delivered=reached.delivered + more) if more else reached

    @property
    def is_plain(self) -> bool:
        """Whether `source` can be iterated directly: torch's samplers, of whose further draws nothing is
        recorded."""
        is_torchs = type(self) is Epoch and self.info.all_known
        return is_torchs and self._note is None and not (self._is_first or self.ended)

    @property
    def position(self) -> Position:
        """The loader's position in this epoch."""
        progress, epoch = self.progress, self.start.epoch
        batches = self.start.batches + progress.delivered
        return (
            Position(epoch + 1, 0, batches) if progress.over else Position(epoch, progress.delivered, batches)
        )

    @property
    def shown_position(self) -> Position:
        """Position visible to the user, which lags behind if a `Prefetcher` reads ahead."""
        return self.position if self.shown is None else self.shown[1]

    # ---- used by an iterator ------------------------------------------------------------------

    def draw_base_seed(self, generator: torch.Generator | None) -> int:
        """Draw the seed of the iteration: exactly one `random_()` of an int64 tensor, as torch draws it."""
        self.start.base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        return self.start.base_seed

    def follow_base_seed(self, seed: int) -> int:
        """Derive the seed of an epoch for which torch draws none, because its workers live on, from the seed
        of the previous epoch."""
        self.start.base_seed = derived_seed(seed, self.start.epoch)
        return self.start.base_seed

    @property
    def pool_seed(self) -> int:
        """The base seed of new workers."""
        return self.start.base_seed

    @property
    def resume(self) -> list[tuple[int, dict[str, Any] | None]]:
        return []

    def end(self, states: Mapping[int, bytes]) -> None:
        """Record that the epoch is over; see `Progress.at_end`."""
        self.reached, self.in_line = self.progress.at_end(states), 0

    def has_begun(self) -> None:
        """Called when the epoch has begun, and its first indices were drawn."""

    def superseded(self) -> None:
        """Called when the next epoch has begun: from now on nobody asks for a state of this one."""

    def note_shared(self) -> None:
        """Called before an iterable dataset is read on this thread, which draws from shared generators."""

    def pass_delivered(self, reader: Reader) -> None:
        """Called without workers, before the first batch is loaded."""

    # ---- the order ----------------------------------------------------------------------------

    def begin(self, packed: bool = False) -> None:
        """Begin the order. With workers, this is called twice, because torch iterates the sampler twice.

        Args:
            packed: see `sampling.iterate_from`.
        """
        if self.info.all_known:  # torch's samplers draw nothing before their first index
            self.iterate(0, packed)
        else:
            self.start.states = states = generators.states_of(self.info.own)
            self._recorded(states, self.shared_now(), partial(self.iterate, 0, packed))

    def iterate(self, skip: int, packed: bool) -> int:
        """Iterate the sampler. Returns how many indices are still to be skipped."""
        info = self.info
        self.digest = (0, 0) if info.shared else None
        source, skip = sampling.iterate_from(
            info.sampler, skip, passed=self.start.passed, packed=packed, note=self.note
        )
        self.sources.append(source)
        self._note = self.note if info.shared and not info.by_permutation else None
        return skip

    def note(self, drawn: Any) -> None:
        """Add an index, or a permutation of a shuffle, to the digest."""
        if self.digest is not None:
            self.digest = self.digest[0] + 1, digested(self.digest[1], drawn)

    def __next__(self) -> Any:
        try:
            index = self._draw_first() if self._is_first else next(self.sources[0])
        except StopIteration:
            self.ended = True
            raise
        except Exception:  # an error takes a position, like an index
            self.drawn += 1
            raise
        if self._note is not None:
            self._note(index)
        self.drawn += 1
        return index

    def _draw_first(self) -> Any:
        """Draw the first index. Many samplers draw their whole order then: record the states before."""
        self._is_first, fixed = False, self.first_states
        if not fixed:
            self.first_states = now = self.shared_now()  # a state requested meanwhile has these
            return self._draw_recorded(now)
        with generators.as_at(fixed):
            return self._draw_recorded(self.shared_now())

    def _draw_recorded(self, prior: dict[str, Any]) -> Any:
        start, own = self.start, self.info.own
        if own:
            states = generators.states_of(own)
            start.first |= {name: states[name] for name in generators.moved(start.states, states)}
        return self._recorded(start.first, prior, partial(next, self.sources[0]))

    def _recorded(self, states: dict[str, Any], prior: dict[str, Any], call: Callable[[], T]) -> T:
        """Return the result of `call`, and record in `states` the `prior` states of the shared generators
        that it used."""
        try:
            return call()
        finally:
            if self.info.draws_seed_first:
                states.update(prior)
            elif prior:
                states |= {name: prior[name] for name in generators.moved(prior, self.shared_now())}

    def shared_now(self) -> dict[str, Any]:
        """The states of the shared generators that the sampler may draw from."""
        return {name: generators.state_of(generators.GLOBAL[name]) for name in self.info.shared}


def begin(loader: Loader, index_sampler: Any, newest: Epoch | None, saved: Any, same_readers: bool) -> Epoch:
    """Create an epoch that begins.

    Args:
        loader: the loader.
        index_sampler: its iterator's: a sampler set later takes effect with the next iterator, as in torch.
        newest: the previous epoch; None for the first.
        saved: the state loaded for it, or None.
        same_readers: whether the readers of the previous epoch serve it, too.
    """
    parts = index_sampler, loader.generator, loader.dataset
    info = None if newest is None else newest.info
    if info is None or not info.hold(*parts):
        info = SamplerInfo(*parts)
    start = EpochStart(resumes=True)
    if newest is not None:  # even if that is broken off, this is the next one
        batches = newest.start.batches + newest.reached.delivered + newest.in_line
        if newest.shown is not None:
            batches = newest.shown[1].batches
        start = EpochStart(newest.start.epoch + 1, batches, resumes=True)
    start.epochs = info.epochs
    if saved is None and not isinstance(loader, Resumable):
        return Epoch(info, start)
    from fastq_loader.extras.resume import epoch

    return epoch.begin(loader, info, start, newest, saved, same_readers)


def derived_seed(seed: int, *numbers: int) -> int:
    """Derive an unrelated seed from a seed and further numbers."""
    packed = struct.pack(f"<{1 + len(numbers)}q", seed, *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def digested(digest: int, index: Any) -> int:
    """Update a digest with an index, or a batch of indices. Indices that are neither integers nor values that
    `marshal` writes (strings, tuples, …) do not change it."""
    if type(index) is np.ndarray and index.dtype is _INT64 and index.ndim == 1:  # the same, for a shuffle
        return crc32(index[-_ENDS:].tobytes(), crc32(index[:_ENDS].tobytes(), digest))
    if type(index) is not list and _kind(index) in _ARRAYS:
        part = index.reshape(-1)  # converted by slices: ten times as fast as by items
        ends = [*part[:_ENDS].tolist(), *part[-_ENDS:].tolist()]
    else:
        part = index if type(index) is list else [index]
        ends = [*part[:_ENDS], *part[-_ENDS:]]
    kinds = set(map(type, ends))
    if kinds != {int} and not {kind.__module__ for kind in kinds} <= _NOT_THE_USERS:
        return digest
    try:
        return crc32(array("q", ends), digest)
    except (TypeError, OverflowError):  # not integers, or too large ones
        try:  # version 2 writes the same bytes for the same values
            return crc32(marshal.dumps(ends, 2), digest)
        except ValueError:
            return digest


def _kind(index: Any) -> tuple[str, str]:
    kind = type(index)
    return kind.__module__, kind.__qualname__


#: Arrays and tensors; and modules whose classes run no user code when they are converted to an integer.
_ARRAYS = {("numpy", "ndarray"), ("torch", "Tensor")}
_NOT_THE_USERS = {"builtins", "numpy", "torch"}
