"""The indices of an epoch: torch's shuffle by a shorter way with the same draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from fastq_loader.ipc.messages import decode_index
from fastq_loader.reading import sampling
from tests.support.thorough import examples


def iterate(index_sampler: Any, **options: Any) -> Iterator[Any]:
    """All indices."""
    return sampling.iterate_from(index_sampler, 0, **options)[0]


def story(batches: Iterator[Any], generator: torch.Generator | None) -> list[Any]:
    """Every batch, and the states of the generators before, between and after them."""

    def states() -> Any:
        return torch.get_rng_state().tolist(), generator and generator.get_state().tolist()

    told: list[Any] = [states()]
    for batch in batches:
        assert type(batch) is list
        assert all(type(index) is int for index in batch)
        told += [batch, states()]
    return [*told, states()]


@examples(100)
@given(
    length=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    drop_last=st.booleans(),
    num_samples=st.none() | st.integers(1, 130),
    seed=st.none() | st.integers(0, 5),
)
def test_a_shuffle_is_torchs(
    length: int, batch_size: int, drop_last: bool, num_samples: int | None, seed: int | None
) -> None:
    told = []
    for way in (iter, iterate, lambda it: map(decode_index, iterate(it, packed=True))):
        torch.manual_seed(7)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        sampler = RandomSampler(range(length), num_samples=num_samples, generator=generator)
        told.append(story(way(BatchSampler(sampler, batch_size, drop_last)), generator))
    assert told[0] == told[1] == told[2]


class Backwards(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source) - 1, -1, -1))


class Doubled(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return (batch * 2 for batch in super().__iter__())


def sizes(sampler: Any) -> list[int]:
    return [len(batch) for batch in iterate(sampler)]


def test_what_is_not_torchs_own_shuffle_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    again = RandomSampler(range(2), replacement=True, num_samples=40)
    assert list(iterate(BatchSampler(Backwards(range(4)), 2, False))) == [[3, 2], [1, 0]]
    assert list(iterate(BatchSampler(SequentialSampler(range(3)), 2, False))) == [[0, 1], [2]]
    assert sizes(Doubled(RandomSampler(range(4)), 2, False)) == [4, 4]
    assert sizes(BatchSampler(again, 8, True)) == [8] * 5
    assert len(list(iterate(again))) == 40
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: iter([1, 1, 1]))
    assert list(iterate(BatchSampler(RandomSampler(range(9)), 2, False))) == [[1, 1], [1]]
    monkeypatch.setattr(RandomSampler, "__iter__", SequentialSampler.__iter__)  # of another class
    assert list(iterate(BatchSampler(RandomSampler(range(9)), 5, False))) == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
