"""Serialization of the user's objects for the workers, and of a worker's process object.

Made in the consumer; opened in a worker.

Under fork the objects are inherited. Under spawn and forkserver they are written to a memfd. The worker
unpickles it itself, so a failure is reported like any other instead of ending the process. It is written
once, with the first worker: later workers get the objects as they were then. All workers map the large arrays
in it, which cost memory once. Objects that torch and multiprocessing send as descriptors (tensors' storages,
queues) are recorded beside it, and every worker gets descriptors of its own. A payload with storages in files
or on devices is pickled anew for each worker: torch counts the receivers of such a storage.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy

from fastq_loader.memory import mapped
from fastq_loader.packing import pickling
from fastq_loader.reading.fetch import Fetcher
from fastq_loader.system import calls

#: Objects of extras that are pickled beside every payload. A worker unpickles them before the user's objects.
BESIDE: list[Any] = []
#: Functions of extras that are called with the dataset before workers are started.
PREPARE: list[Callable[[Any], None]] = []


class Descriptors(dict[Any, int]):
    """Descriptors of a worker, by name or number: inherited, or sent along under spawn and forkserver."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, ({name: reduction.DupFd(fd) for name, fd in self.items()},)


def _received(duplicates: dict[Any, Any]) -> Descriptors:
    return Descriptors({name: duplicate.detach() for name, duplicate in duplicates.items()})


class Payload:
    """A dataset and the other user objects that workers need.

    Attributes:
        parts: these objects, by name.
    """

    def __init__(self, dataset: Any, collate_fn: Any, init_fn: Any, make_fetcher: Any = Fetcher) -> None:
        for prepare in PREPARE:
            prepare(dataset)
        self.parts = {"dataset": dataset, "collate_fn": collate_fn, "worker_init_fn": init_fn}
        self.parts["make_fetcher"] = make_fetcher  # may refer to exceptions by their classes
        self._carried: list[int] = []  # descriptors; the last one is the memfd with the parts

    def seal(self) -> None:
        """Pickle the objects for all workers as they are now, if they can be sent more than once."""
        if not self._carried:
            collector = _DescriptorCollector()
            with contextlib.suppress(_OnlyOnce), collector.recording():
                memory = _written(self.parts, collector.descriptors)  # this adds to them
                self._carried = [*collector.descriptors, memory]

    def __reduce__(self) -> tuple[Any, ...]:
        self.seal()
        if not self._carried:
            return PickledPayload, (bytes(ForkingPickler.dumps(self.parts)), Descriptors())
        return PickledPayload, (None, Descriptors(enumerate(self._carried)))

    def unseal(self) -> None:
        """Close the memory and the descriptors. All workers were started."""
        close_all(self._carried)

    def open(self) -> dict[str, Any]:
        """Return the parts, in a worker."""
        return self.parts


class PickledPayload(Payload):
    """Payload in a worker that did not inherit it: a pickle, or descriptors, the last one of a memfd with a
    pickle."""

    def __init__(self, data: bytes | None, carried: Descriptors) -> None:
        self._data = data
        self._descriptors = carried

    def __reduce__(self) -> tuple[Any, ...]:
        return PickledPayload, (self._data, self._descriptors)

    def open(self) -> dict[str, Any]:
        # Modules that are imported may start processes, which daemons may not. torch's worker imports them
        # before it becomes a daemon.
        process = multiprocessing.current_process()
        daemon, process.daemon = process.daemon, False
        try:
            _Carried.descriptors = carried = self._descriptors
            parts: dict[str, Any]
            if self._data is not None:
                parts = pickle.loads(self._data)
            else:
                with open(carried.pop(max(carried)), "rb") as memory:
                    pickling.sends_by_value, _, parts = mapped.read(memory.fileno())
            return parts
        finally:
            process.daemon = daemon


class _Carried:
    """A descriptor in a sealed pickle, by its number. Replaces the DupFd of multiprocessing."""

    descriptors = Descriptors()  # of this process, a worker

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """Return the descriptor, which the caller owns from then on."""
        return self.descriptors[self._number]


class _DescriptorCollector:
    """Takes the place of the process that multiprocessing is starting, and records its descriptors."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        # A duplicate, because the user may release the original before the last worker starts.
        self.descriptors.append(os.dup(descriptor))
        return len(self.descriptors) - 1

    DupFd = _Carried

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the descriptors of objects pickled in the block; close them if pickling fails."""
        starting = get_spawning_popen()
        set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            yield
        except BaseException:
            close_all(self.descriptors)
            raise
        finally:
            set_spawning_popen(starting)


def _written(parts: dict[str, Any], carried: list[int]) -> int:
    """Write the parts to a memfd, pickled by reference; by value if pickle refuses, or if `__main__` is
    interactive, whose functions a worker cannot import. Adds their descriptors to `carried`."""
    with contextlib.suppress(ImportError):
        if pickling.is_interactive():
            return mapped.write((True, BESIDE, parts), pickling.by_value(_Sealer))
    try:
        return mapped.write((False, BESIDE, parts), _Sealer)
    except (TypeError, AttributeError, pickle.PicklingError):
        close_all(carried)
        with contextlib.suppress(Exception):  # the standard pickler's error is raised: it names the cause
            return mapped.write((True, BESIDE, parts), pickling.by_value(_Sealer))
        raise


def close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


class _OnlyOnce(Exception):
    """An object can be sent only once, because its receivers are counted."""


class _Sealer(ForkingPickler):
    """multiprocessing's pickler with a `buffer_callback`, which its own constructor does not pass on."""

    def __init__(self, file: Any, protocol: int, buffer_callback: Any) -> None:
        super().__init__(file, protocol)
        table = self.dispatch_table
        pickle.Pickler.__init__(self, file, protocol, buffer_callback=buffer_callback)
        self.dispatch_table = table

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, torch.UntypedStorage)) and (
            value.device.type != "cpu" or get_sharing_strategy() != "file_descriptor"  # type: ignore[no-untyped-call]
        ):
            raise _OnlyOnce
        return NotImplemented


# ---- a worker's process -----------------------------------------------------------------------------


def write_process(prepared: dict[str, Any], process: BaseProcess) -> tuple[int, list[int]]:
    """Write the input of `system.multiprocessing_names.become_pickled` to a memfd.

    Returns its descriptor, and the descriptors that the process refers to.

    Args:
        prepared: see `interpreters._preparation`.
        process: the process object, not yet started.

    Raises:
        TypeError, AttributeError, PicklingError: the process, or the parts of its payload, cannot be pickled.
        OSError: memory or descriptors are used up.
    """
    recorder, pickled = _DescriptorCollector(), io.BytesIO()
    with recorder.recording():
        reduction.dump(prepared, pickled)
        reduction.dump(process, pickled)
        memory = calls.memfd_create("fastq_loader.process")
        with open(memory, "wb", closefd=False) as file:
            file.write(pickled.getbuffer())
    os.lseek(memory, 0, os.SEEK_SET)
    return memory, recorder.descriptors


def receive_process(descriptors: list[int]) -> None:
    """In a worker: set the descriptors of the process object that is unpickled next."""
    _Carried.descriptors = Descriptors(enumerate(descriptors))
