"""The engine with real processes, where forks, interrupts, threads and odd sizes meet."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fastq_loader
from fastq_loader import DataLoader
from fastq_loader.system import interrupts
from tests.conftest import open_descriptors
from tests.support.forking import end_of, fork

pytestmark = pytest.mark.processes

LARGE = 100_000  # float32: 400 kB, a block of its own


@dataclass(eq=False)
class Made:
    """`dataset[i]` is what a function makes of i."""

    make: Callable[[int], Any]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def full(index: int) -> torch.Tensor:
    return torch.full((LARGE,), float(index))


def is_full_of(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


# ---- forks --------------------------------------------------------------------------------------------


def test_a_fork_between_the_end_of_a_lease_and_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker may write to the promised block already: the fork must not take it back."""
    monkeypatch.setattr("fastq_loader.memory.pool.WORTH_A_PROMISE", 0)
    children = []
    loader = DataLoader(Made(full, 30), batch_size=None, num_workers=1, prefetch_factor=1)
    for number, batch in enumerate(loader):
        assert is_full_of(batch, number)
        del batch
        if number % 10 == 3:
            children.append(fork(lambda: time.sleep(0.1)))
            time.sleep(0.01)
    assert [end_of(child) for child in children] == [0, 0, 0]


# ---- threads and signals ------------------------------------------------------------------------------


class Box:
    """Takes its time to unpickle, so that two threads do it at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(0.0005)
        vars(self).update(state)


def test_two_threads_do_not_get_each_others_leaves() -> None:
    found: list[tuple[float, float]] = []

    def consume(value: float) -> None:
        boxed = Made(lambda index: [Box(torch.full((3,), value)) for _ in range(5)], 20)
        for boxes in DataLoader(boxed, batch_size=None, num_workers=1):
            found.extend((value, box.tensor[0].item()) for box in boxes)

    threads = [threading.Thread(target=consume, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 * 20 * 5
    assert all(expected == value for expected, value in found)


class SlowSampler:
    pause = 0.0

    def __iter__(self) -> Iterator[int]:
        for index in range(8):
            time.sleep(self.pause)
            yield index


def test_a_signal_handler_may_close_the_loader_while_an_epoch_starts() -> None:
    sampler = SlowSampler()
    loader = DataLoader(range(8), None, sampler=sampler, num_workers=2, persistent_workers=True)
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

    interrupt = False

    def __iter__(self) -> Iterator[int]:
        for index in range(20):
            if self.interrupt:
                self.interrupt = False
                raise KeyboardInterrupt
            yield index


def test_after_an_interrupt_in_the_middle_of_a_call_the_iterator_says_so() -> None:
    sampler = InterruptedSampler()
    loader = DataLoader(range(20), None, sampler=sampler, num_workers=1, persistent_workers=True)
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
    unblocked = interrupts._signal.pthread_sigmask

    def interrupted(how: int, mask: Any) -> set[int]:
        forks.append(how)
        if how == signal.SIG_SETMASK:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return unblocked(how, mask)

    monkeypatch.setattr(interrupts._signal, "pthread_sigmask", interrupted)
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


def test_sizes_that_vary_use_the_same_addresses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address range here is a fraction of what 600 batches would take if it were used once."""
    monkeypatch.setattr("fastq_loader.memory.arena._LARGEST", 128 << 20)
    sizes = random.Random(1).choices(range(1000, 4_000_000), k=600)
    ragged = Made(lambda index: fastq_loader.empty((sizes[index],), torch.uint8), 600)
    with DataLoader(ragged, batch_size=None, num_workers=2) as loader:
        assert [batch.nbytes for batch in loader] == sizes
        assert loader.statistics().arena_bytes <= 128 << 20


def test_more_specs_under_way_than_are_remembered() -> None:
    growing = Made(lambda index: torch.zeros(index + 1), 320)
    batches = iter(DataLoader(growing, batch_size=None, num_workers=1, prefetch_factor=300))
    first = next(batches)
    time.sleep(0.3)  # the worker is far ahead: it has forgotten specs that are still to be delivered
    assert [len(batch) for batch in (first, *batches)] == list(range(1, 321))


def missing(index: int) -> torch.Tensor:
    if index == 2:
        raise FileNotFoundError(2, "no such image", "2.jpg")
    return full(index)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_that_was_handled_keeps_no_memory(persistent: bool) -> None:
    """Without the garbage collector: the error is not in a cycle with the loop."""
    gc.collect()
    gc.disable()
    try:
        loader = DataLoader(Made(missing, 4), None, num_workers=1, persistent_workers=persistent)
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        with pytest.raises(FileNotFoundError) as caught:
            next(batches)
        assert caught.value.filename == "2.jpg"
        assert len(list(batches)) == 1
        loader.close()
        del caught, batches, loader
        assert not [name for name in open_descriptors().values() if "memfd:fastq_loader" in name]
    finally:
        gc.enable()
