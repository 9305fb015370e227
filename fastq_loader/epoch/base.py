"""Base class of a loader's iterators.

Runs in the consumer, on the thread that calls `next()`. Owns the order in which random numbers are drawn (as
in torch), the warnings about lengths, and pinning.

The iterators are subclasses of torch's, because other packages check for those classes and read their
attributes. No code of torch's iterators runs: every method is overridden, and the attributes have torch's
names and meaning (torch/utils/data/dataloader.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from typing import Any, NoReturn

from torch.autograd import profiler
from torch.utils.data import IterDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from fastq_loader import options
from fastq_loader.consumer.outcomes import Delivered, Ended, Outcome, Raised
from fastq_loader.device.page_lock import page_locked
from fastq_loader.epoch.epoch import begin
from fastq_loader.epoch.resources import Resources, device_session
from fastq_loader.epoch.resources import of as resources_of
from fastq_loader.errors import warn_user
from fastq_loader.ipc.messages import decode_index
from fastq_loader.options import Loader
from fastq_loader.reading import datapipes
from fastq_loader.scheduling.progress import Progress
from fastq_loader.system.torch_names import untraced
from fastq_loader.system.unpatched import time

#: Values that torch's iterators copy from a loader: of its arguments, and under the same name.
_ARGUMENTS = ("dataset", "drop_last", "num_workers", "timeout", "collate_fn", "persistent_workers")
_SAME_NAME = ("_index_sampler", "_dataset_kind", "_IterableDataset_len_called", "_auto_collation")
_NAMES = *(f"_{name}" for name in _ARGUMENTS), *_SAME_NAME, "_world_size", "_rank", "_pg"
_copied_from = attrgetter(*_ARGUMENTS, *_SAME_NAME)


@untraced
class LoaderIterator(_BaseDataLoaderIter, Iterator[Any]):
    """Iterator over an epoch of a loader, or over one epoch after the other.

    Args:
        loader: the loader, with its arguments.
        resources: its resources.

    Attributes:
        outcome: the next outcome of `next()`, once it is ready; else None.
    """

    _profile_name = ""
    _base_seed: int
    _hints: Any = None
    _bad_samples: Any = None
    _indices: Iterator[Any] = iter(())

    def __init__(self, loader: Loader, resources: Resources) -> None:
        times = time.monotonic_ns(), time.process_time_ns()
        self._log = resources.counters.begin_epoch(*times, loader._auto_collation)
        # The attributes of torch's iterators that stay the same, which other packages read.
        values = *_copied_from(loader), *datapipes.world_size_and_rank(), None
        vars(self).update(zip(_NAMES, values, strict=True))
        self._options = options.of(loader)
        self._begin_record(loader, resources, loader.num_workers == 0)
        self._shared_seed: int | None = None
        if isinstance(self._dataset, IterDataPipe):
            self._share_seed(loader)
        device, self._session = self._options.device, None
        self._pin_memory, self._pin_memory_device = False, None
        if device is not None:
            self._session = device_session(resources, device)
        if loader.pin_memory and self._session is None:  # else batches are page-locked on their way
            self._pin_memory, self._pin_memory_device = options.pinning(loader)
        self._finishes = self._session is None and (self._pin_memory or device is not None)  # device="cpu"
        self._epoch.begin(packed=self._num_workers > 0)
        self._base_seed = self._epoch.draw_base_seed(loader.generator)
        self.outcome: Outcome | None = None

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._index_sampler)

    def __getstate__(self) -> NoReturn:
        # torch's error and type: an iterator is tied to its processes and cannot move to another.
        raise NotImplementedError("{} cannot be pickled", type(self).__name__)

    def __next__(self) -> Any:
        if self._bad_samples is not None and self._bad_samples.pending_warnings:
            self._bad_samples.issue_warnings()
        if self._hints is not None and self._log.batches >= self._hints.due:
            self._hints.look()
        # A signal handler may raise at any call. So an outcome is stored as soon as it exists, and no call
        # comes between taking it here and returning: no batch is lost. Matching a class is not a call.
        epoch, moved = self._epoch, 0
        outcome, self.outcome = self.outcome, None
        while outcome is None:  # another thread may take it first
            if profiler._is_profiler_enabled:
                with profiler.record_function(self._profile_name):
                    self._advance()
            else:
                self._advance()
            outcome, self.outcome = self.outcome, None
        match outcome:
            case Delivered(progress=int(moved)) | Raised(progress=int(moved)):
                epoch.in_line += moved
            case Delivered(progress=Progress() as progress) | Raised(progress=Progress() as progress):
                moved, epoch.reached = progress.delivered - epoch.reached.delivered, progress
        match outcome:
            case Delivered():
                length = self._IterableDataset_len_called
                iterable = self._dataset_kind == _DatasetKind.Iterable
                if length is not None and iterable and self._num_yielded > length:
                    self.outcome = outcome  # an interrupt may end the call below
                    self._warn_about_length(length)
                    self.outcome = None
                return outcome.batch
            case Raised():
                epoch.without_batch += moved
            case Ended() if epoch.reached.over:
                self.outcome = outcome  # an interrupt or a hint may end the calls below
                if self._bad_samples is not None:
                    self._bad_samples.issue_warnings()
                if self._hints is not None:
                    self._hints.look_back()
                self.outcome = None
        try:
            raise outcome.error
        finally:
            del outcome  # the error's traceback references this frame

    def skip_to(self, batch: int) -> None:
        """Go on at a later batch: draw the indices before it, and load nothing for them. @private"""
        for _ in islice(self._sampler_iter, batch - self._epoch.reached.delivered):
            continue
        self._epoch.reached = Progress(batch)

    def poll(self) -> None:
        """Begin the copies of batches that have become ready since the last `next()`, without waiting. Use it
        with a `device`, if steps take so long that workers fall idle and copies begin late.

        >>> batches = iter(DataLoader(range(8), 4))
        >>> batches.poll()
        >>> next(batches)
        tensor([0, 1, 2, 3])
        """

    def copy_into(self, static_batch: Any) -> None:
        """Take the next batch, and copy it into the tensors that a captured step reads; see
        `fastq_loader.copy_into`.

        Raises:
            StopIteration: there is no further batch.
            ValueError: its structure, shapes or dtypes differ; the batch is lost.

        >>> static_batch = torch.zeros(4, dtype=torch.int64)
        >>> iter(DataLoader(range(8), 4)).copy_into(static_batch)
        >>> static_batch
        tensor([0, 1, 2, 3])
        """
        from fastq_loader.extras.transforms.transforms import copy_into

        copy_into(static_batch, next(self))

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        """Begin a new epoch. A persistent loader calls this on the object that `_get_iterator` returned, so
        wrappers forward it."""
        self.outcome = None
        if not first_iter:
            resources = resources_of(loader)
            times = time.monotonic_ns(), time.process_time_ns()
            self._log = resources.counters.begin_epoch(*times, loader._auto_collation)
            self._begin_record(loader, resources, same_readers=True)
        self._epoch.begin(packed=self._num_workers > 0)
        self._IterableDataset_len_called = loader._IterableDataset_len_called
        if isinstance(self._dataset, IterDataPipe):
            self._share_seed(loader)

    def _begin_record(self, loader: Loader, resources: Resources, same_readers: bool) -> None:
        """Create the record of the epoch that begins or resumes; `_epoch_has_begun` makes it the loader's."""
        self._epoch = begin(loader, self._index_sampler, *resources.current, same_readers)
        self._epoch.belongs_to(self)
        self._epoch.log = self._log
        errors = self._options.errors
        if errors is not None:
            known = {} if self._epoch.saved is None else self._epoch.saved.now.bad_samples
            self._bad_samples = resources.bad_samples = resources.bad_samples or errors.records(known)
            epoch, in_batches = self._epoch.position.epoch, loader._auto_collation
            self._epoch.bad_samples = errors.judge(self._bad_samples, epoch, in_batches, known)
            self._log.bad_samples = self._epoch.bad_samples

    def _epoch_has_begun(self, loader: Loader, resources: Resources) -> None:
        """Make the epoch's record the loader's newest, and drop the loaded state. Not called if the epoch
        could not begin, so the loaded state is then still there."""
        if self._epoch.saves:
            self._epoch.has_begun()
        if loader.num_workers or loader.pin_memory or self._epoch.info.wants_epochs:  # else no hint can come
            from fastq_loader.extras.insight.hints import Hints

            self._hints = Hints(loader, resources.begun, self._epoch, self._log)
        newest, resources.current = resources.current[0], (self._epoch, None)
        if newest is not None and newest.saves:
            newest.superseded()
        resources.begun.append(self._epoch)

    def _share_seed(self, loader: Loader) -> None:
        if self._epoch.saved is not None:
            self._shared_seed = self._epoch.start.shared_seed
        else:
            self._shared_seed = datapipes.draw_shared_seed(self._dataset, loader.generator)
            self._epoch.start.shared_seed = self._shared_seed
        self._dataset = datapipes.apply_seed(self._dataset, self._shared_seed)

    @property
    def _sampler_iter(self) -> Iterator[Any]:
        return map(decode_index, self._epoch)

    @_sampler_iter.setter
    def _sampler_iter(self, indices: Iterator[Any]) -> None:
        self._epoch.source = self._indices = indices

    def _next_index(self) -> Any:
        return next(self._sampler_iter)

    def _next_data(self) -> Any:
        """The next batch, without counting it as yielded."""
        batch = next(self)
        self._epoch.without_batch += 1
        return batch

    @property
    def _num_yielded(self) -> int:  # type: ignore[override]
        return self._epoch.progress.delivered - self._epoch.without_batch

    @abstractmethod
    def _advance(self) -> None:
        """Store the next outcome in `outcome`."""

    def _finished(self, batch: Any) -> Any:
        """Transform and pin a batch that stays on the host."""
        began = time.monotonic_ns()
        if self._options.device is not None:
            batch = self._options.device.apply_transform(batch)
        if self._pin_memory:
            batch = page_locked(batch, self._pin_memory_device)
        self._log.device_until = now = time.monotonic_ns()
        self._log.device += now - began
        return batch

    def _warn_about_length(self, length: int) -> None:
        text = (
            f"Length of IterableDataset {self._dataset} was reported to be {length}"
            f"(when accessing len(dataloader)), but {self._num_yielded} samples have been fetched. "
        )
        if self._num_workers > 0:
            text += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        try:
            warn_user(text, UserWarning)
        except Warning:  # a filter made it an error; torch loses the batch, too
            self.outcome = None
            raise
