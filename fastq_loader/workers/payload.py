"""The user's objects on their way to the workers, and a worker's process on its way to be unpickled.

Made in the consumer; opened in a worker.

Under fork the objects are inherited. Under spawn and forkserver they travel in memory that the worker opens
itself, so that a failure is reported like any other instead of ending the process. It is written once, with
the first worker: the others, of which some may start much later, get the objects as they were then. Large
arrays in it are mapped by all workers, so they cost memory once. What torch and multiprocessing send as
descriptors (tensors' storages, queues) is recorded beside it, and every worker gets descriptors of its own.
Only what is counted elsewhere cannot be sent twice: storages in files and on devices. It is pickled for
each worker.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import get_sharing_strategy

from fastq_loader.memory import mapped
from fastq_loader.packing import pickling
from fastq_loader.system import calls


class Descriptors(dict[Any, int]):
    """Descriptors of a worker, by name or number: inherited, or sent along under spawn and forkserver."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, ({name: reduction.DupFd(fd) for name, fd in self.items()},)


def _received(duplicates: dict[Any, Any]) -> Descriptors:
    return Descriptors({name: duplicate.detach() for name, duplicate in duplicates.items()})


class Payload:
    """A dataset and what of the user's goes with it.

    Attributes:
        parts: by name.
    """

    def __init__(self, dataset: Any, collate_fn: Any, init_fn: Any, errors: Any = None) -> None:
        self.parts = {"dataset": dataset, "collate_fn": collate_fn, "worker_init_fn": init_fn}
        self.parts["errors"] = errors  # which has exceptions by their classes
        self._carried: list[int] = []  # the last one is that of the parts

    @property
    def sealed(self) -> bool:
        """Whether workers that start later get the objects as they are now."""
        return bool(self._carried)

    def seal(self) -> None:
        """Let workers get the objects as they are now, if these can be sent more than once."""
        self._carried = self._carried or _Recorder().seal(self.parts)

    def __reduce__(self) -> tuple[Any, ...]:
        self.seal()
        if not self._carried:
            return PickledPayload, (bytes(ForkingPickler.dumps(self.parts)), Descriptors())
        return PickledPayload, (None, Descriptors(enumerate(self._carried)))

    def unseal(self) -> None:
        """All workers were started: let the memory and the descriptors go."""
        close_all(self._carried)

    def open(self) -> dict[str, Any]:
        """The parts, in a worker."""
        return self.parts


class PickledPayload(Payload):
    """Payload in a worker that did not inherit it: a pickle, or descriptors of which the last is that of
    memory with one."""

    def __init__(self, data: bytes | None, carried: Descriptors) -> None:
        self._data = data
        self._descriptors = carried

    def __reduce__(self) -> tuple[Any, ...]:
        return PickledPayload, (self._data, self._descriptors)

    def open(self) -> dict[str, Any]:
        with _not_yet_a_daemon():
            return self._open()

    def _open(self) -> dict[str, Any]:
        _Carried.descriptors = carried = self._descriptors
        if self._data is not None:
            parts: dict[str, Any] = pickle.loads(self._data)
            return parts
        fd = carried.pop(max(carried))
        try:
            pickling.sends_by_value, parts = mapped.read(fd)
        finally:
            os.close(fd)
        return parts


@contextlib.contextmanager
def _not_yet_a_daemon() -> Iterator[None]:
    """Modules that are imported in here may start processes, which daemons may not: torch's worker imports
    them before it is one."""
    configuration: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    daemon = configuration.pop("daemon", None)
    try:
        yield
    finally:
        configuration.update({} if daemon is None else {"daemon": daemon})


class _Carried:
    """In what is sealed: a descriptor, by its number. What torch and multiprocessing know as a DupFd."""

    descriptors = Descriptors()  # of this process, a worker

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """The descriptor, which is the caller's from here on."""
        return self.descriptors[self._number]


class _Recorder:
    """Stands where multiprocessing expects the process that is being started, and records its descriptors."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        # A duplicate, because the user may let go of the original before the last worker starts.
        self.descriptors.append(os.dup(descriptor))
        return len(self.descriptors) - 1

    DupFd = _Carried

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the descriptors of what is pickled in here; none if pickling fails."""
        starting = get_spawning_popen()
        set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            yield
        except BaseException:
            close_all(self.descriptors)
            raise
        finally:
            set_spawning_popen(starting)

    def seal(self, parts: dict[str, Any]) -> list[int]:
        """The descriptors that go with the parts, the last of memory with the parts themselves; none if they
        hold what can be sent only once."""
        try:
            with self.recording():
                memory = self._written(parts)  # which adds to the others
        except _OnlyOnce:
            return []
        return [*self.descriptors, memory]

    def _written(self, parts: dict[str, Any]) -> int:
        """The parts as pickle takes them; by value where it refuses them, or a worker would."""
        with contextlib.suppress(ImportError):
            if pickling.is_interactive():
                return mapped.write((True, parts), pickling.by_value(_Sealer))
        try:
            return mapped.write((False, parts), _Sealer)
        except (TypeError, AttributeError, pickle.PicklingError):
            close_all(self.descriptors)
            try:
                return mapped.write((True, parts), pickling.by_value(_Sealer))
            except Exception:  # the error of what everybody has says where it lies
                close_all(self.descriptors)
            raise


def close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


class _OnlyOnce(Exception):
    """Something keeps count of those it was sent to."""


class _Sealer(ForkingPickler):
    """multiprocessing's pickler, whose constructor passes no callback on."""

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
        if type(value) is np.ndarray and np.ndarray not in self.dispatch_table:
            value = _as_in_torch(value)
            return value.__reduce_ex__(5)
        return NotImplemented


def _as_in_torch(array: Any) -> Any:
    """The array as torch's worker has it. Pickled by protocol 4, as multiprocessing does until Python 3.14,
    arrays arrive writable and in the machine's order of bytes. No copy is made where there need be none."""
    if pickle.DEFAULT_PROTOCOL >= 5 or array.dtype.hasobject or not array.flags.forc:
        return array
    if array.dtype.byteorder not in "=|":
        return array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable:
        memory: Any = np.asarray(_Writable(array))
        return np.ndarray(array.shape, array.dtype, memory, strides=array.strides)
    return array


class _Writable:
    """The bytes of a read-only array, as something that can be written to; nobody does."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array  # stays as long as its bytes are referred to
        place, _ = array.__array_interface__["data"]
        self.__array_interface__ = {
            "version": 3,
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (place, False),
        }


# ---- a worker's process -----------------------------------------------------------------------------


def write_process(prepared: dict[str, Any], process: BaseProcess) -> tuple[int, list[int]]:
    """Memory with what `multiprocessing.spawn._main` reads, and the descriptors that go with it.

    Args:
        prepared: see `zygote.preparation`.
        process: not started yet.

    Raises:
        TypeError, AttributeError, PicklingError: the process, or the parts of its payload, cannot be pickled.
        OSError: memory or descriptors are used up.
    """
    recorder, pickled = _Recorder(), io.BytesIO()
    with recorder.recording():
        reduction.dump(prepared, pickled)
        reduction.dump(process, pickled)
        memory = calls.memfd_create("fastq_loader.process")
        with open(memory, "wb", closefd=False) as file:
            file.write(pickled.getbuffer())
    os.lseek(memory, 0, os.SEEK_SET)
    return memory, recorder.descriptors


def receive_process(descriptors: list[int]) -> None:
    """In a worker: these are the descriptors of the process that is about to be unpickled."""
    _Carried.descriptors = Descriptors(enumerate(descriptors))
