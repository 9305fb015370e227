"""The engine with real processes, where forks, interrupts, threads and odd sizes meet."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

import fastq_loader
from fastq_loader import DataLoader, LoaderTimeout

pytestmark = pytest.mark.processes

LARGE = 100_000  # float32: 400 kB, a block of its own


class Filled:
    """`dataset[i]` is a large tensor full of i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((LARGE,), float(index))


def is_full_of(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


# ---- forks --------------------------------------------------------------------------------------------


def test_a_fork_between_the_end_of_a_lease_and_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker may write to the promised block already: the fork must not take it back."""
    monkeypatch.setattr("fastq_loader.memory.ledger.WORTH_A_PROMISE", 0)
    children = []
    loader = DataLoader(Filled(30), batch_size=None, num_workers=1, prefetch_factor=1)
    for number, batch in enumerate(loader):
        assert is_full_of(batch, number)
        del batch
        if number % 10 == 3:
            child = os.fork()
            if child == 0:
                time.sleep(0.1)
                os._exit(0)
            children.append(child)
            time.sleep(0.01)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


class Holder:
    """Every item says what is in a batch of another loader that this dataset references."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.batch: torch.Tensor | None = batch

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[float, float]:
        time.sleep(0.002)
        assert self.batch is not None
        return self.batch.min().item(), self.batch.max().item()


def test_a_batch_that_the_workers_of_another_loader_reference_stays() -> None:
    with DataLoader(Filled(200), batch_size=None, num_workers=1) as first:
        batches = iter(first)
        dataset = Holder(next(batches))
        seen = iter(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork"))
        values = {tuple(next(seen))}
        dataset.batch = None  # here; the worker was forked before and still has it
        for batch in batches:
            del batch
        values.update(map(tuple, seen))
    assert values == {(0.0, 0.0)}


class ForksInWorker:
    """At index 5 a child of the worker reads the tensor that is being shipped, a while later."""

    def __init__(self, result: str) -> None:
        self.result = result

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        tensor = fastq_loader.empty((LARGE,), torch.float32).fill_(index)
        if index == 5 and os.fork() == 0:
            time.sleep(0.2)
            with open(self.result, "w") as file:
                file.write(str(tensor.unique().tolist()))
            os._exit(0)
        time.sleep(0.005)
        return tensor


def test_a_fork_in_a_worker_keeps_what_it_saw(tmp_path: Any) -> None:
    result = tmp_path / "seen"
    for number, batch in enumerate(DataLoader(ForksInWorker(str(result)), batch_size=None, num_workers=1)):
        assert is_full_of(batch, number)
    assert result.read_text() == "[5.0]"


# ---- threads and signals ------------------------------------------------------------------------------


class Box:
    """Takes its time to unpickle, so that two threads do it at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(0.0005)
        vars(self).update(state)


class Boxes:
    def __init__(self, value: float) -> None:
        self.value = value

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> list[Box]:
        return [Box(torch.full((3,), self.value)) for _ in range(5)]


def test_two_threads_do_not_get_each_others_leaves() -> None:
    found: list[tuple[float, float]] = []

    def consume(value: float) -> None:
        for boxes in DataLoader(Boxes(value), batch_size=None, num_workers=1):
            found.extend((value, box.tensor[0].item()) for box in boxes)

    threads = [threading.Thread(target=consume, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 * 20 * 5
    assert all(expected == value for expected, value in found)


class SlowSampler:
    def __init__(self) -> None:
        self.pause = 0.0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        for index in range(8):
            time.sleep(self.pause)
            yield index


def test_a_signal_handler_may_close_the_loader_while_an_epoch_starts() -> None:
    sampler = SlowSampler()
    loader = DataLoader(
        list(range(8)), batch_size=None, sampler=sampler, num_workers=2, persistent_workers=True
    )
    assert list(loader) == list(range(8))
    sampler.pause = 0.1
    before = signal.signal(signal.SIGALRM, lambda signum, frame: loader.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.15)
        batches = iter(loader)
        with pytest.raises(RuntimeError, match="its loader was closed"):
            next(batches)
    finally:
        signal.signal(signal.SIGALRM, before)
    sampler.pause = 0.0
    assert list(loader) == list(range(8))
    loader.close()


class InterruptedSampler:
    """Raises KeyboardInterrupt once, when told to: as Ctrl-C in a user's sampler would."""

    def __init__(self) -> None:
        self.interrupt = False
        self.next = 0

    def __iter__(self) -> InterruptedSampler:
        self.next = 0
        return self

    def __next__(self) -> int:
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt
        if self.next == 20:
            raise StopIteration
        self.next += 1
        return self.next - 1


def test_after_an_interrupt_in_the_middle_of_a_call_the_iterator_says_so() -> None:
    sampler = InterruptedSampler()
    loader = DataLoader(
        list(range(20)), batch_size=None, sampler=sampler, num_workers=1, persistent_workers=True
    )
    batches = iter(loader)
    assert next(batches) == 0
    sampler.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    with pytest.raises(RuntimeError, match="an interrupt cut a call of next\\(\\) short"):
        next(batches)
    assert list(loader) == list(range(20))
    loader.close()


def test_an_interrupt_while_workers_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT is blocked during the start, and comes after the last worker was forked."""
    forks = []
    loader = DataLoader(list(range(9)), num_workers=2, multiprocessing_context="fork")
    unblocked = signal.pthread_sigmask

    def interrupted(how: int, mask: Any) -> set[int]:
        forks.append(how)
        if how == signal.SIG_SETMASK:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return unblocked(how, mask)

    monkeypatch.setattr("signal.pthread_sigmask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert signal.SIG_SETMASK in forks


class InThread:
    """A thread of the dataset's allocates in the arena while the worker packs and answers."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == 0:
            self.made: list[tuple[int, torch.Tensor]] = []
            self.more = threading.Semaphore(3)
            threading.Thread(target=self.make, daemon=True).start()
        while not self.made:
            time.sleep(0.0001)
        number, tensor = self.made.pop(0)
        self.more.release()
        assert is_full_of(tensor, number)
        return number, tensor

    def make(self) -> None:
        number = 0
        while True:
            self.more.acquire()
            self.made.append((number, fastq_loader.empty((20_000,), torch.float32).fill_(number)))
            number += 1


def test_a_dataset_may_allocate_in_threads() -> None:
    batches = 0
    for number, tensor in DataLoader(InThread(), batch_size=None, num_workers=1):
        assert is_full_of(tensor, number)
        batches += 1
    assert batches == 400


# ---- sizes, specs, errors -----------------------------------------------------------------------------


class Ragged:
    """Sizes from 1 kB to 4 MB, at random, in place."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> torch.Tensor:
        nbytes = random.Random(index).randint(1000, 4_000_000)
        return fastq_loader.empty((nbytes,), torch.uint8)


def test_sizes_that_vary_use_the_same_addresses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address range here is a fraction of what 600 batches would take if it were used once."""
    monkeypatch.setattr("fastq_loader.memory.arena._LARGEST", 128 << 20)
    with DataLoader(Ragged(), batch_size=None, num_workers=2) as loader:
        for index, batch in enumerate(loader):
            assert batch.nbytes == random.Random(index).randint(1000, 4_000_000)
        assert loader.statistics().arena_bytes <= 128 << 20


class PartOfALargeBlock:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return fastq_loader.empty((5_000_000,), torch.uint8).fill_(index)[:LARGE]


def test_a_small_part_of_a_large_block_does_not_hold_it() -> None:
    loader = DataLoader(PartOfALargeBlock(), batch_size=None, num_workers=1, persistent_workers=True)
    kept = list(loader)
    assert all(is_full_of(batch, index) for index, batch in enumerate(kept))
    assert loader.statistics().blocks_in_use == 10
    sizes = loader.statistics().arena_bytes - loader.statistics().blocks_free * 5_242_880
    assert sizes <= 10 * 131_072
    loader.close()


class Growing:
    """Every item has a shape of its own."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(index + 1)


def test_more_specs_under_way_than_are_remembered() -> None:
    batches = iter(DataLoader(Growing(), batch_size=None, num_workers=1, prefetch_factor=300))
    first = next(batches)
    time.sleep(0.3)  # the worker is far ahead: it has forgotten specs that are still to be delivered
    assert [len(batch) for batch in (first, *batches)] == list(range(1, 321))


def refuse(argument: int) -> None:
    raise ValueError(f"refused {argument}")


class Refuses:
    """Unpickles in no process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, (1,)


class AllRefuse:
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Refuses:
        return Refuses()


def test_batches_that_cannot_be_unpickled_leave_no_blocks_behind() -> None:
    loader = DataLoader(AllRefuse(), batch_size=None, num_workers=2, persistent_workers=True)
    batches, failures = iter(loader), 0
    for _ in range(50):
        with pytest.raises(ValueError, match="refused 1"):
            next(batches)
        failures += 1
        assert loader.statistics().blocks_in_use <= 4
    assert failures == 50
    loader.close()


class Missing:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            raise FileNotFoundError(2, "no such image", "2.jpg")
        return torch.zeros(LARGE)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_that_was_handled_keeps_no_memory(persistent: bool) -> None:
    """Without the garbage collector: the error is not in a cycle with the loop."""
    gc.collect()
    gc.disable()
    try:
        loader = DataLoader(Missing(), batch_size=None, num_workers=1, persistent_workers=persistent)
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        with pytest.raises(FileNotFoundError) as caught:
            next(batches)
        assert caught.value.filename == "2.jpg"
        assert len(list(batches)) == 1
        loader.close()
        del caught, batches, loader
        assert not [name for name in descriptors() if "memfd:fastq_loader" in name]
    finally:
        gc.enable()


def descriptors() -> list[str]:
    """What the descriptors of this process lead to."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def stop(worker: int) -> None:
    raise StopIteration(worker)


def test_stop_iteration_outside_a_dataset_is_an_error_too() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(DataLoader(list(range(8)), num_workers=2, worker_init_fn=stop))


def test_a_timeout_does_not_end_a_worker_that_is_still_starting() -> None:
    loader = DataLoader(
        list(range(4)), batch_size=None, num_workers=1, multiprocessing_context="spawn", timeout=0.05
    )
    batches, seen = iter(loader), []
    with pytest.raises(LoaderTimeout, match="still starting"):
        next(batches)
    deadline = time.monotonic() + 60
    while len(seen) < 4 and time.monotonic() < deadline:
        try:
            seen.append(next(batches))
        except LoaderTimeout:
            continue
    assert seen == [0, 1, 2, 3]
    assert next(batches, None) is None


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")  # on small machines
def test_too_few_descriptors_are_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """zmq would end the process, or retry in silence."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            iter(DataLoader(list(range(8)), num_workers=4, multiprocessing_context="fork"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
