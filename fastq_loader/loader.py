"""`DataLoader`: torch's arguments, attributes and hooks, and the methods beyond torch's.

Runs in the consumer. Owns the attributes that frameworks rely on; chooses the iterator of each epoch, and
starts its pool of workers. `options` validates and resolves the arguments; `epoch` has the iterators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, Sampler

from fastq_loader import options
from fastq_loader.device.accelerator import ToDevice
from fastq_loader.epoch.fields import Owner, Position
from fastq_loader.epoch.multiprocess import MultiprocessIterator
from fastq_loader.epoch.resources import of as resources_of
from fastq_loader.epoch.serial import SerialIterator
from fastq_loader.reading.error_policy import ErrorPolicy
from fastq_loader.scheduling.schedules import Schedule
from fastq_loader.system.terminal import printable
from fastq_loader.system.torch_names import untraced
from fastq_loader.workers.kinds import Auto, WorkerKind, read_workers

if TYPE_CHECKING:
    from fastq_loader.extras.insight.snapshots import LoaderStatistics
    from fastq_loader.extras.insight.verdict import Diagnosis
    from fastq_loader.extras.profile.profile import Profile

T_co = TypeVar("T_co", covariant=True)


@untraced
class DataLoader(torch.utils.data.DataLoader[T_co], Owner):
    """A drop-in `torch.utils.data.DataLoader` over ZeroMQ and reused shared memory.

    Takes torch's arguments with torch's meaning, in torch's order, and gives the same batches, random
    numbers, warnings and errors; see https://pytorch.org/docs/stable/data.html. Batches are writable and stay
    valid for as long as anything refers to them, also after the loader is gone: tensors and arrays of 64 KiB
    or more are views on shared memory, smaller ones are copies.

    It differs from torch on purpose where torch loses information: an exception in a worker keeps its type
    and attributes, gets the attributes `index`, `batch` and `worker`, and has the traceback as `__cause__`;
    an exception in the sampler is raised at its position; objects that cannot be pickled raise, and so does
    StopIteration in a dataset; a second iteration of a persistent loader ends the first with a RuntimeError.

    Args:
        dataset: map-style or iterable.
        batch_size: samples in a batch; None turns batching off.
        shuffle: draw indices at random, anew in every epoch.
        sampler, batch_sampler: iterables of indices, or of lists of indices.
        num_workers: worker processes; 0 loads on the calling thread; "auto", with `schedule="dynamic"`,
            chooses a number when an epoch begins, from the costs of earlier epochs.
        collate_fn: makes a batch from a list of samples.
        pin_memory: copy batches into page-locked memory if there is an accelerator.
        drop_last: leave out the last batch if it is not full.
        timeout: seconds to wait for a batch; 0 waits for ever.
        worker_init_fn: called with the worker's number in each worker, after its generators are seeded.
        multiprocessing_context: "fork", "spawn", "forkserver" or a context; None is Python's default when
            an iteration starts.
        generator: source of seeds; None is torch's global generator.
        prefetch_factor: batches that each worker loads ahead, at least 1; None is 2.
        persistent_workers: keep the workers from one epoch to the next.
        pin_memory_device: deprecated by torch.
        in_order: False returns batches in the order in which they arrive.
        schedule: which worker loads which batch: "round_robin", as in torch, or "dynamic", whichever is free;
            `RoundRobin(...)` and `Dynamic(...)` have further options.
        workers: "processes" or `Processes(...)`, here; "ray" or `RayWorkers(...)`, on other machines.
        device: destination of the batches: torch's accelerator ("cuda", "cuda:1", "xpu", a torch.device), or
            `ToDevice(...)`, which has further options. None leaves them on the host.
        errors: handling of samples that cannot be read: "raise", as in torch; `Replace(...)` reads another
            sample in place of each; `Skip(...)` makes the batch shorter.

    Raises:
        ValueError, TypeError: an argument is invalid (with torch's texts), or the device unknown or absent.
        RuntimeError: without memfd (Linux has it) torch's own workers run, which do not support an argument.

    >>> for batch in DataLoader(range(10), batch_size=4):
    ...     print(batch)
    tensor([0, 1, 2, 3])
    tensor([4, 5, 6, 7])
    tensor([8, 9])
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
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
        schedule: str | Schedule = "round_robin",
        workers: str | WorkerKind = "processes",
        device: str | int | torch.device | ToDevice | None = None,
        errors: str | ErrorPolicy = "raise",
    ) -> None:
        number: Any = num_workers
        if isinstance(num_workers, str | Auto):
            from fastq_loader.extras.insight import auto

            number = auto.given(num_workers)
        # torch would reject worker arguments where auto is 0, and warn of more remote workers than CPUs.
        some = 1 if isinstance(number, Auto) or (number > 0 and read_workers(workers).is_remote) else number
        super().__init__(
            *(dataset, batch_size, shuffle, sampler, batch_sampler, some, collate_fn, pin_memory),
            *(drop_last, timeout, worker_init_fn, multiprocessing_context, generator),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if some is not number:
            self.num_workers = number
        if some > 0 and prefetch_factor == 0:
            raise ValueError(
                "prefetch_factor=0 with num_workers > 0 would never load a batch: use 1 or more, or None, "
                "which is 2"
            )
        more = {"schedule": schedule, "device": device, "errors": errors, "workers": workers}
        options.put(self, more)
        options.check_workers(self)
        if isinstance(number, Auto):
            auto.check(self)

    # Defaults for instances that this constructor did not initialise.
    schedule: str | Schedule = "round_robin"
    workers: str | WorkerKind = "processes"
    device: str | int | torch.device | ToDevice | None = None
    errors: str | ErrorPolicy = "raise"

    def __setattr__(self, name: str, value: Any) -> None:
        made = options.ATTRIBUTE in vars(self)
        if made and name in options.ARGUMENTS and name not in options.own_names(type(self)):
            kind = type(self).__name__
            raise ValueError(f"{name}= cannot be set after a {kind} was made: pass it to the constructor")
        super().__setattr__(name, value)

    # ---- iterating ----------------------------------------------------------------------------

    def __iter__(self) -> Any:
        """Begin a new epoch, with an iterator from `_get_iterator`.

        With `persistent_workers` that is called once, and every further epoch calls `_reset` on the iterator
        that it returned. An older iterator ends then.
        """
        if isinstance(self.num_workers, Auto):
            from fastq_loader.extras.insight import auto

            auto.begin_epoch(self)
        if not self.persistent_workers or self.num_workers == 0:
            return self._get_iterator()
        iterator = self._iterator
        if iterator is None:
            iterator = self._get_iterator()
        else:
            if isinstance(iterator, MultiprocessIterator):
                iterator = iterator.successor()
            iterator._reset(self)
        object.__setattr__(self, "_iterator", iterator)
        return iterator

    def _get_iterator(self) -> Any:
        """Create an iterator; subclasses wrap its return value (torch_geometric, litdata)."""
        resources = resources_of(self)
        if self.num_workers:
            options.check_workers(self)
        if options.torchs_own(self, resumes=resources.current[1] is not None):
            return resources.add_torchs(super()._get_iterator())
        if self.num_workers == 0:
            return SerialIterator(self, resources)
        chosen = isinstance(self.num_workers, Auto)  # not by the user
        if not (chosen or options.of(self).workers.is_remote):
            self.check_worker_number_rationality()
        return MultiprocessIterator(self)

    # ---- attributes that frameworks use -------------------------------------------------------

    @property
    def _iterator(self) -> Any:
        """The last return value of `_get_iterator` of a persistent loader; frameworks set it to None to
        end the workers."""
        return vars(self).get("_iterator")

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        previous, vars(self)["_iterator"] = self._iterator, value
        if value is None and isinstance(previous, MultiprocessIterator):
            previous.pool.close("its loader's _iterator was set to None", wait=True)

    @_iterator.deleter
    def _iterator(self) -> None:
        self._iterator = None

    # ---- beyond torch -------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the workers of every iteration of this loader, and release their memory.

        Workers have 5 seconds to finish their current sample and the exit handlers of user code. Batches stay
        valid; iterators that were cut off raise RuntimeError in `next()`. The loader can be iterated again.
        Closing twice does nothing.

        >>> with DataLoader(range(8), num_workers=2, persistent_workers=True) as loader:  # closes it
        ...     print(sum(loader))
        tensor([28])
        """
        resources_of(self).close("its loader was closed")
        object.__setattr__(self, "_iterator", None)

    def __enter__(self) -> DataLoader[T_co]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def replay(self, batch: int, epoch: int | None = None, state: Mapping[str, Any] | None = None) -> Any:
        """Load a batch again, in this process, for example to inspect a batch that made the loss jump.

        With `schedule="dynamic"` it is the same to the bit. With "round_robin" the samples are the same, but
        random numbers drawn while they are read differ, and a warning says so. The loader, its sampler and
        its generators are unchanged. The function `worker_init_fn=` is not called.

        Args:
            batch: its number in the epoch, from 0 on.
            epoch: the number of the epoch, from 0 on; None is the newest, or that of the state.
            state: a result of `state_dict()` from the middle of that epoch, of a `StatefulDataLoader` with
                the same arguments, as this one must be; None uses the loader's own record of its last 16
                epochs.

        Raises:
            ValueError: the epoch is not recorded, or the state is not from the middle of it.
            IndexError: the epoch had fewer batches.
            TypeError: the dataset is iterable, the sampler cannot be copied, or a state is given and this is
                not a `StatefulDataLoader`.
            Exception: whatever the dataset raises.

        >>> loader = DataLoader(range(8), 2, schedule="dynamic")
        >>> _, second, *_ = loader
        >>> loader.replay(1).equal(second)
        True
        """
        from fastq_loader.extras.recovery.replay import replay

        return replay(self, batch, epoch, state)

    @property
    def position(self) -> Position:
        """Progress of this loader, for progress bars: completed epochs, batches of the current epoch, and
        batches in all; batches that raised count, too.

        >>> loader = DataLoader(range(8), 2)
        >>> batch = next(iter(loader))
        >>> loader.position
        Position(epoch=0, batch=1, batches=1)
        """
        if "position" in vars(self):  # a subclass's own attribute, as torch's loader allows
            own: Position = vars(self)["position"]
            return own
        record, loaded = resources_of(self).current
        if loaded is not None:
            resumed: Position = loaded.position
            return resumed
        return Position() if record is None else record.shown_position

    @position.setter
    def position(self, value: Any) -> None:
        vars(self)["position"] = value

    def statistics(self) -> LoaderStatistics:
        """Counts of this loader so far, as an immutable snapshot.

        >>> loader = DataLoader(range(8), 2)
        >>> len(list(loader)), loader.statistics().batches
        (4, 4)
        """
        from fastq_loader.extras.insight.facts import statistics_of

        return statistics_of(self)

    def diagnose(self, epoch: int | Literal["all"] | None = None) -> Diagnosis:
        """Diagnose what limits this loader and what would help: `print(loader.diagnose())` prints a page.

        May be called at any time, also in the middle of an epoch; an epoch should have some ten batches, or
        the start of the workers dominates it. Each line of advice has the gain that a model expects. The
        model simulates the schedule with the measured costs of the batches, without the limits of a disk, a
        network or caches.

        Args:
            epoch: the number of an epoch, from 0 on, of the last hundred; "all" takes all together; None is
                the newest one that is long enough for a diagnosis.

        Raises:
            ValueError: there is no such epoch.

        >>> print(DataLoader(range(8)).diagnose())
        Nothing can be said yet: ...
        """
        from fastq_loader.extras.cached import handover
        from fastq_loader.extras.insight import facts, verdict

        options.torchs_own(self, asked="diagnose()")
        return verdict.diagnose(facts.profile_of(self, epoch, is_cached=len(handover.caches) > 0))

    def trace(self, path: str | PathLike[str]) -> AbstractContextManager[None]:
        """Write a trace of this loader to a file while the context lasts.

        >>> loader = DataLoader(range(8), 2)
        >>> with loader.trace("epoch.json"):
        ...     batches = list(loader)

        Open the file with https://ui.perfetto.dev: it has tracks for the consumer, each worker, the batches
        in flight and copies to the device. It is written continuously, so that it can be opened after a
        crash, too. A batch takes about 1 kB.

        Args:
            path: path of the file, which is overwritten.

        Raises:
            OSError: the file cannot be written; raised, as the others, when the context begins or ends.
            ValueError: another trace, of any process, is writing to it.
            RuntimeError: this loader is already being traced.
        """
        from fastq_loader.extras.tracing.trace import traced

        options.torchs_own(self, asked="trace()")
        return traced(path, resources_of(self).counters)

    def profile(self) -> AbstractContextManager[Profile]:
        """Profile the epochs that begin while the context lasts: in which lines of the dataset and of the
        collate function the time of loading goes, in all workers together, or in `next()` without workers.

        >>> loader = DataLoader(range(8), 2)
        >>> with loader.profile() as profile:
        ...     batches = list(loader)

        `print(profile)` prints a table of at most 20 lines; its methods `html(path)` and `speedscope(path)`
        write pages, which need the extra `profile` (pyinstrument). The loading thread is sampled 250 times a
        second, by a signal (SIGRTMAX - 7) and by a thread; other threads of the dataset do not count. Code in
        C that does not expect signals may end a wait early. It takes less than 10 % of the time if a batch
        takes several milliseconds, and nothing where it is not asked for. An operator of C code that keeps
        the interpreter to itself, such as `+` of long integers, may count for the line after it.

        Raises:
            RuntimeError: this loader is already being profiled.
        """
        from fastq_loader.extras.profile.profile import profiled

        options.torchs_own(self, asked="profile()")
        return profiled(resources_of(self).counters)

    def __repr__(self) -> str:
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        try:
            return printable(f"<{name} {_described(self)}>")
        except Exception as error:  # an attribute does not exist yet, or a subclass's property raises
            return f"<{name} object at {id(self):#x}, not initialised ({type(error).__name__}: {error})>"

    # ---- copies -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """The arguments, and the loaded state of the next epoch. Workers and counters are not copied, so a
        copy starts idle."""
        return {**vars(self), "_iterator": None}


def _described(loader: DataLoader[Any]) -> str:
    resources = resources_of(loader)
    running = "loads on the calling thread"
    if loader.num_workers:
        running = f"{loader.num_workers * resources.running() or 'no'} workers running"
    return (
        f"dataset={type(loader.dataset).__name__} batch_size={loader.batch_size} "
        f"num_workers={loader.num_workers} persistent_workers={loader.persistent_workers}: {running}, "
        f"{resources.counters.epochs} epochs begun, {resources.counters.batches} batches delivered"
    )
