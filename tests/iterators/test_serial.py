"""The iterator without workers: its generators, interrupts, and threads that share it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from fastq_loader import DataLoader, IteratorInvalid
from tests.support.datasets import Made


def numbers(iterator: Iterator[torch.Tensor]) -> list[int]:
    return [batch.item() for batch in iterator]


def draw(index: int) -> Any:
    return torch.rand(()), random.random(), np.random.rand()


def draw_and_fail(index: int) -> None:
    draw(index)
    raise LookupError(index)


@pytest.mark.parametrize("make", [draw, draw_and_fail])
def test_with_dynamic_the_consumers_generators_stay_as_they_were(make: Callable[[int], Any]) -> None:
    iterator = iter(DataLoader(Made(make, 4), schedule="dynamic"))  # draws the base seed

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())

    before = states()
    for _ in range(4):
        try:
            next(iterator)
        except LookupError:
            assert make is draw_and_fail
        assert states() == before


def test_i9_a_timeout_without_workers_is_refused() -> None:
    with pytest.raises(AssertionError, match="timeout"):
        iter(DataLoader(range(4), timeout=1))


class Interrupt(BaseException):
    pass


def test_a_batch_that_an_interrupt_cut_short_is_loaded_again() -> None:
    raised = []

    def interrupted_once(index: int) -> int:
        if index == 1 and not raised:
            raised.append(index)
            raise Interrupt
        return index

    iterator = iter(DataLoader(Made(interrupted_once, 4)))
    assert next(iterator).item() == 0
    with pytest.raises(Interrupt):
        next(iterator)
    assert numbers(iterator) == [1, 2, 3]


class Interrupted(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise Interrupt


def test_a_stream_that_an_interrupt_cut_short_cannot_go_on() -> None:
    iterator = iter(DataLoader(Interrupted()))
    assert next(iterator).item() == 0
    with pytest.raises(Interrupt):
        next(iterator)
    with pytest.raises(IteratorInvalid, match="an interrupt cut a call"):
        next(iterator)
    iterator._reset(DataLoader(Interrupted()))
    assert not iterator._busy


class SlowSampler:
    """Its iterator is a generator, which refuses to be entered by two threads at once."""

    def __iter__(self) -> Iterator[int]:
        for index in range(200):
            time.sleep(0.0001)
            yield index


def test_threads_share_an_iterator_and_each_batch_is_handed_out_once() -> None:
    iterator = iter(DataLoader(range(200), sampler=SlowSampler()))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.extend(numbers(iterator))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(200))
