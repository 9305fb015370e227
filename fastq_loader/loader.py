"""`DataLoader`: torch's arguments and attributes, and what it offers beyond.

Runs in the consumer. Owns the arguments, their validation, the attribute contract that frameworks rely on,
and the pools of workers that its iterators use; what an iteration does is in `iterator`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, Sampler
from torch.utils.data.dataloader import _DatasetKind

from fastq_loader import arena, datapipes
from fastq_loader.cargo import Cargo
from fastq_loader.claims import WORKERS
from fastq_loader.engine import Engine
from fastq_loader.errors import check_choice, is_int
from fastq_loader.iterator import LoaderIterator, SerialIterator, WorkerIterator
from fastq_loader.link import DeviceOptions, Link, read_options
from fastq_loader.processes import Plan
from fastq_loader.staging import SerialStaging
from fastq_loader.statistics import Counters, LoaderStatistics
from fastq_loader.worker import Rules

T_co = TypeVar("T_co", covariant=True)

_LIVE = ("_live", "_counters", "_engines", "_link", "_idle")

SCHEDULES = ("round_robin", "dynamic")
#: Batches; the table of claims has a word for more than twice as many.
WIDEST_WINDOW = (arena.CLAIMS - WORKERS) // 2 - 1
#: How far a window widens on its own: in its own lengths, in bytes, and in parts of the machine's memory.
_WIDEST, _WIDEST_BYTES, _WIDEST_SHARE = 16, 1 << 30, 16


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A drop-in `torch.utils.data.DataLoader` over ZeroMQ and reused shared memory.

    Takes torch's arguments with torch's meaning, in torch's order, and gives the same batches, random
    numbers, warnings and errors; see https://pytorch.org/docs/stable/data.html. Tensors and arrays of
    64 KiB or more are views on shared memory, writable, and valid for as long as anything looks at them,
    also after the loader is gone. Smaller ones are copies.

    Where it differs from torch on purpose: an exception in a worker arrives with its own type and
    attributes and the worker's traceback as `__cause__`; the sampler's exceptions keep their place; what
    cannot be pickled raises instead of hanging; StopIteration in a dataset is an error; a second iteration
    of a persistent loader ends the first with a RuntimeError.

    With a `device`, batches arrive there: tensors wherever they are in the batch, in containers of the same
    types; arrays, numbers, strings and objects without tensors stay on the host. One copy for each batch
    runs on a stream of its own beside the step before; whatever is queued on the stream that is current in
    `next()` finds the batch there. All tensors of a batch share one piece of device memory.

    Args:
        dataset: map-style or iterable.
        batch_size: samples in a batch; None turns batching off.
        shuffle: draw indices at random, anew in every epoch.
        sampler, batch_sampler: where indices, or lists of them, come from.
        num_workers: worker processes; 0 loads on the calling thread.
        collate_fn: makes a batch of a list of samples.
        pin_memory: copy batches into page-locked memory if there is an accelerator.
        drop_last: leave out the last batch if it is not full.
        timeout: seconds to wait for a batch; 0 waits for ever.
        worker_init_fn: called with the worker's number in each worker, after its generators are seeded.
        multiprocessing_context: "fork", "spawn", "forkserver" or a context; None is Python's default when
            an iteration starts.
        generator: where seeds come from; None is torch's global generator.
        prefetch_factor: batches that each worker works ahead, at least 1; None is 2.
        persistent_workers: keep the workers from one epoch to the next.
        pin_memory_device: deprecated by torch.
        in_order: False hands batches out as they come.
        schedule: who loads which batch. "round_robin": batch k is worker k mod N's, as in torch, and each
            worker has one stream of random numbers. "dynamic": any worker takes the next batch as soon as it
            is free, and before every batch torch's CPU generator, `random`, numpy's global generator and
            `worker_info.seed` are seeded from the iteration's base seed and the batch's number. The
            batches are then the same bits for any number of workers (also 0, where the consumer's generators
            are put back after each batch), any timing and start method, with persistent workers or without,
            and after a worker's death; the epochs differ. What `worker_init_fn` seeds of these three has no
            effect; generators that it makes for the dataset's own use stay each worker's own. The base seed
            is drawn for every iteration, also with persistent workers. An iterable dataset is read as in
            torch, because each worker has a part of it to itself: its batches are seeded one by one, and
            depend on the number of workers.
        reorder_window: batches that may be asked for and not handed out, all in all; memory for as many is
            the price. None is `prefetch_factor` for each worker, as in torch; with schedule="dynamic" that
            and, while the next batch is late and workers would idle, up to 16 times as many or 1 GiB (or a
            sixteenth of the machine's memory, if that is less). A larger one lets workers run further past
            a slow batch. Without workers it has no effect.
        max_worker_restarts: workers that may die in an iteration and be replaced, with a `WorkerReplaced`
            warning; the batches that the dead worker had not answered are loaded again. 0 raises, as torch
            does. With a `timeout`, a worker that has not answered within it is ended and replaced, and the
            warning shows its stacks. A batch at which three workers died raises at its place. With
            "round_robin" order and exactly-once hold, but a new worker's random numbers start anew; an
            iterable dataset is refused, because a new worker would read it from its beginning. Without
            workers it has no effect.
        device: where batches go: an accelerator of torch's that has streams ("cuda", "cuda:1", a
            torch.device). None and "cpu" leave them on the host. It is initialised after the workers of the
            first epoch were started. `pin_memory` is not needed with it.
        device_prefetch: batches that are copied before they are asked for, at least 1.
        device_transform: applied to every batch on the device, for example `normalize(mean, std)`; with
            device="cpu" on the host.
        transform_stream: "consumer" applies it on the stream that is current in `next()`; "side" on that of
            the copies, beside the step before.
        device_buffers: "fresh" copies each batch to memory of its own; "reuse" to `device_prefetch + 1`
            buffers in turn, and a batch is valid until the next `next()`.
        pin: how host memory is page-locked. "register" locks the workers' blocks where they are; "bounce"
            copies batches to a few locked buffers first; "pageable" locks nothing; "auto" takes the first of
            these that works, with a `PinFallback` warning. `statistics()` says which it is and why.
        pin_limit_bytes: bytes that may be page-locked; None is any number.

    Raises:
        ValueError, TypeError: an argument, with torch's texts; an unknown or absent device.
        RuntimeError: `num_workers > 0` on a system without memfd (Linux has it).
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        schedule: str = "round_robin",
        reorder_window: int | None = None,
        max_worker_restarts: int = 0,
        device: str | int | torch.device | None = None,
        device_prefetch: int = 2,
        device_transform: Callable[[Any], Any] | None = None,
        transform_stream: str = "consumer",
        device_buffers: str = "fresh",
        pin: str = "auto",
        pin_limit_bytes: int | None = None,
    ) -> None:
        self._forget()
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if num_workers > 0 and prefetch_factor == 0:
            raise ValueError(
                "prefetch_factor=0 with num_workers > 0 would never load a batch: use 1 or more, or None, "
                "which is 2"
            )
        if num_workers > 0 and not arena.AVAILABLE:
            raise RuntimeError(
                f"num_workers={num_workers} needs memfd_create, which this system does not have (Linux has "
                "it): use num_workers=0"
            )
        self.schedule = schedule
        self.reorder_window = reorder_window
        self.max_worker_restarts = max_worker_restarts
        self._check_schedule()
        self.device = device
        self.device_prefetch = device_prefetch
        self.device_transform = device_transform
        self.transform_stream = transform_stream
        self.device_buffers = device_buffers
        self.pin = pin
        self.pin_limit_bytes = pin_limit_bytes
        self._device_options()

    def _device_options(self) -> DeviceOptions | None:
        return read_options(
            self.device,
            self.device_prefetch,
            self.device_transform,
            self.transform_stream,
            self.device_buffers,
            self.pin,
            self.pin_limit_bytes,
        )

    def _check_schedule(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        window, restarts = self.reorder_window, self.max_worker_restarts
        if self.num_workers > WORKERS:
            raise ValueError(f"num_workers={self.num_workers} is too many: use at most {WORKERS}")
        if window is not None and not is_int(window):
            raise TypeError(f"reorder_window={window!r} must be a number of batches, or None")
        if window is not None and not 1 <= window <= WIDEST_WINDOW:
            raise ValueError(f"reorder_window={window} must be from 1 to {WIDEST_WINDOW} batches, or None")
        if not is_int(restarts):
            raise TypeError(f"max_worker_restarts={restarts!r} must be a number of workers")
        if restarts < 0:
            raise ValueError(f"max_worker_restarts={restarts} must not be negative: use 0 for none")
        if restarts and self.num_workers and self._iterable:
            raise ValueError(
                f"max_worker_restarts={restarts} cannot be kept with an IterableDataset: a new worker would "
                "read its part from the beginning. Use max_worker_restarts=0, or a dataset with __getitem__"
            )

    # Handles of a live loader are set past `__setattr__`, which frameworks replace to record what users
    # set, and which is torch's contract for public attributes only.
    def _forget(self) -> None:
        object.__setattr__(self, "_live", None)  # the last iterator of a persistent loader
        object.__setattr__(self, "_counters", Counters())
        object.__setattr__(self, "_engines", weakref.WeakSet())
        object.__setattr__(self, "_link", None)
        object.__setattr__(self, "_idle", [])

    _live: WorkerIterator | None
    _counters: Counters
    _engines: weakref.WeakSet[Engine]
    _link: Link | None
    _idle: list[SerialStaging]  # what iterations without workers have left behind, buffers and all

    # ---- iterating ----------------------------------------------------------------------------

    def __iter__(self) -> Any:
        """A new epoch.

        With `persistent_workers` the workers go on, and an older iterator of this loader ends.
        """
        self._find_way_to_device()
        if self.num_workers == 0:
            return SerialIterator(self)
        if not self.persistent_workers:
            self.check_worker_number_rationality()
            return self._watch(WorkerIterator(self, None))
        previous = self._live
        if previous is not None and not previous.engine.usable:
            previous.engine.close("a new iteration began")
            previous = None
        if previous is None:
            self.check_worker_number_rationality()
        iterator = self._watch(WorkerIterator(self, previous))
        object.__setattr__(self, "_live", iterator)
        return iterator

    def _watch(self, iterator: WorkerIterator) -> LoaderIterator:
        self._engines.add(iterator.engine)
        return iterator

    def _find_way_to_device(self) -> None:
        """Make the link when the first iteration begins, and keep it: a stream for each epoch would strand
        memory. A new one, and new workers, if the user has set other arguments since."""
        options = self._device_options()
        if options != (None if self._link is None else self._link.options):
            if self._live is not None:
                self._live.engine.close("its loader's device, or what goes with it, was changed")
            object.__setattr__(self, "_link", None if options is None else Link(options))

    @property
    def _iterable(self) -> bool:
        return bool(self._dataset_kind == _DatasetKind.Iterable)

    def _plan(self) -> Plan:
        assert self.prefetch_factor is not None, "torch's constructor sets it for num_workers > 0"
        return Plan(
            cargo=Cargo(
                self.dataset,
                self.collate_fn,
                datapipes.sharding_init_fn(self.dataset, self.worker_init_fn),
            ),
            rules=Rules(self._iterable, self._auto_collation, self.drop_last),
            workers=self.num_workers,
            prefetch=self.prefetch_factor,
            in_order=self.in_order,
            dynamic=self.schedule == "dynamic",
            window=self._window(),
            restarts=self.max_worker_restarts,
            timeout=self.timeout,
            persistent=self.persistent_workers,
            context=self.multiprocessing_context,
            to_device=self._link is not None,
        )

    def _window(self) -> tuple[int, int, int, int]:
        """Least and widest number of batches under way, the bytes up to which it widens, and how many batches
        are asked for together."""
        assert self.prefetch_factor is not None, "torch's constructor sets it for num_workers > 0"
        workers, ahead = self.num_workers, self.prefetch_factor * self.num_workers
        if self.schedule != "dynamic" or self._iterable:
            size = ahead if self.reorder_window is None else self.reorder_window
            return size, size, 0, 1
        if self.reorder_window is not None:
            # One batch in work and the next one stay with every worker while a group is asked for.
            group = min(max(self.reorder_window - 2 * workers, 1), workers)
            return self.reorder_window, self.reorder_window, 0, group
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        widest = min(_WIDEST * ahead, WIDEST_WINDOW)
        return ahead + workers, widest, min(_WIDEST_BYTES, memory // _WIDEST_SHARE), workers

    @property
    def _iterator(self) -> Any:
        """The iterator of a persistent loader; frameworks set it to None to end the workers."""
        return self._live

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        if value is None and self._live is not None:
            self._live.engine.close("its loader's _iterator was set to None")
        object.__setattr__(self, "_live", value)

    # ---- beyond torch -------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers of every iteration of this loader, and give their memory back.

        Batches stay valid; iterators that were cut off raise RuntimeError in `next()`. The loader can be
        iterated again. Closing twice does nothing.
        """
        for engine in list(self._engines):
            engine.close("its loader was closed")
        while self._idle:
            self._idle.pop().close()
        object.__setattr__(self, "_live", None)

    def __enter__(self) -> DataLoader[T_co]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def statistics(self) -> LoaderStatistics:
        """What this loader did so far, as an immutable snapshot."""
        counters = self._counters
        blocks = [engine.blocks() for engine in list(self._engines)]
        return LoaderStatistics(
            epochs=counters.epochs,
            batches=counters.batches,
            bytes=counters.bytes,
            wait_seconds=counters.wait_ns / 1e9,
            head_of_line_seconds=counters.head_of_line_ns / 1e9,
            late_batches=counters.late_batches(),
            reorder_window=counters.window,
            worker_restarts=sum(worker.restarts for worker in counters.workers),
            rejected_frames=counters.rejected_frames,
            workers=tuple(worker.snapshot() for worker in counters.workers),
            blocks_in_use=sum(in_use for in_use, _, _ in blocks),
            blocks_free=sum(free for _, free, _ in blocks),
            blocks_grown=counters.blocks_grown,
            arena_bytes=sum(nbytes for _, _, nbytes in blocks),
            stale_answers=counters.stale_answers,
            staging=None if self._link is None else self._link.snapshot(),
        )

    def __repr__(self) -> str:
        live = [engine for engine in list(self._engines) if engine.closed is None]
        if self.num_workers == 0:
            state = "loads on the calling thread"
        elif live:
            state = f"{self.num_workers * len(live)} workers running"
        else:
            state = "no workers running"
        return (
            f"<{type(self).__module__}.{type(self).__qualname__} dataset={type(self.dataset).__name__} "
            f"batch_size={self.batch_size} num_workers={self.num_workers} "
            f"persistent_workers={self.persistent_workers}: {state}, {self._counters.epochs} epochs begun, "
            f"{self._counters.batches} batches delivered>"
        )

    # ---- copies -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """The arguments; workers and counters stay behind, so a copy starts idle."""
        return {name: value for name, value in vars(self).items() if name not in _LIVE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()
