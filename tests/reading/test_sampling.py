"""The indices of an epoch: torch's shuffle by a shorter way with the same draws, and one that is computed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from fastq_loader import PermutationSampler
from fastq_loader.ipc.messages import Indices, decode_index
from fastq_loader.reading import sampling
from fastq_loader.reading.sampling import Permutation


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


def test_a_shuffle_is_cut_from_the_permutation() -> None:
    """The guard of the test above: it compares two things only if this is another iterator."""
    batches = iterate(BatchSampler(RandomSampler(range(10)), 3, False))
    assert batches.__name__ == "_shuffled"  # type: ignore[attr-defined]
    assert type(next(iterate(BatchSampler(RandomSampler(range(10)), 3, False), packed=True))) is Indices


@pytest.mark.parametrize("iterate", [iter, iterate])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_sampler_that_is_changed_while_it_runs(iterate: Any, drop_last: bool) -> None:
    sampler = BatchSampler(RandomSampler(range(13)), 2, drop_last)
    batches = iterate(sampler)
    sizes = [len(next(batches))]
    sampler.batch_size, sampler.drop_last = 4, not drop_last
    sizes += [len(batch) for batch in batches]
    assert sizes == ([2] * 6 if drop_last else [2, 4, 4, 3])


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


@pytest.mark.parametrize("n", range(0, 300, 7))
def test_every_number_comes_once_for_all_small_n(n: int) -> None:
    for length in range(n, n + 7):
        assert sorted(PermutationSampler(length, seed=n)) == list(range(length))


@given(st.integers(1, 1 << 62), st.integers(0, 1 << 64), st.data())
def test_no_two_positions_have_one_number_for_large_n(n: int, seed: int, data: Any) -> None:
    positions = np.unique(data.draw(st.lists(st.integers(0, n - 1), max_size=50))).astype(np.uint64)
    numbers = Permutation(n, seed, 0)(positions)
    assert len(np.unique(numbers)) == len(positions)
    assert (numbers < n).all()


@pytest.mark.parametrize("n", [8, 16, 17, 31, 32, 256])
def test_orders_are_even_as_often_as_odd(n: int) -> None:
    odd = 0
    for seed in range(1000):
        order = np.array(list(PermutationSampler(n, seed)))
        odd += int((order[:, None] > order)[np.triu_indices(n)].sum()) % 2
    assert abs(odd - 500) < 5 * math.sqrt(250)


def test_no_item_of_very_many_is_left_out_and_numpys_integers_are_integers() -> None:
    n = 10**17 + 3
    assert len(PermutationSampler(n, num_replicas=2)) == n // 2 + 1
    assert PermutationSampler(np.int64(n), np.uint8(3), num_replicas=np.int32(2), rank=np.int16(1)).n == n  # type: ignore[arg-type]
    sampler, other = PermutationSampler(np.int64(9)), PermutationSampler(9)  # type: ignore[arg-type]
    for each, epoch in (sampler, np.int64(3)), (other, 3):
        each.set_epoch(epoch)  # type: ignore[arg-type]
    assert list(sampler) == list(other)
    with pytest.raises(TypeError, match="n=True"):
        PermutationSampler(True)


@pytest.mark.parametrize("n", [16, 17, 1000, 1024, 1025])
def test_neighbours_and_places_of_many_numbers_are_those_of_a_shuffle(n: int) -> None:
    orders = np.array([list(PermutationSampler(n, seed)) for seed in range(1000)])
    # Each of these counts is 1 on average over all shuffles, with a variance of 1.
    for count in (
        (np.diff(orders) == 1).sum(1),
        (np.diff(orders) == -1).sum(1),
        (orders == np.arange(n)).sum(1),
    ):
        assert abs(count.mean() - 1) < 5 / math.sqrt(1000)
    assert abs(np.corrcoef(orders[:, 0], orders[:, -1])[0, 1]) < 5 / math.sqrt(1000) + 1 / n


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    sampler = PermutationSampler(1000, seed=3)
    orders = [tuple(sampler), tuple(sampler)]
    assert orders[0] == orders[1]
    sampler.set_epoch(1)
    orders += [
        tuple(sampler),
        tuple(PermutationSampler(1000, seed=4)),
        tuple(PermutationSampler(1000, seed=1)),
    ]
    assert len(set(orders)) == 4


@given(st.integers(1, 60), st.integers(1, 7), st.booleans())
def test_ranks_share_as_with_torch(n: int, replicas: int, drop_last: bool) -> None:
    whole = list(PermutationSampler(n, 5))
    ranks = [
        PermutationSampler(n, 5, num_replicas=replicas, rank=rank, drop_last=drop_last)
        for rank in range(replicas)
    ]
    theirs = DistributedSampler(range(n), replicas, 0, drop_last=drop_last)  # type: ignore[arg-type]
    assert {len(rank) for rank in ranks} == {len(theirs)}
    dealt = [index for turn in zip(*ranks, strict=True) for index in turn]
    assert dealt == (whole * replicas)[: theirs.total_size]


@given(st.integers(0, 40), st.integers(1, 9), st.booleans(), st.integers(0, 50))
def test_it_goes_on_from_any_position(n: int, batch_size: int, drop_last: bool, skip: int) -> None:
    sampler = PermutationSampler(n, 2)
    assert list(sampler.iterate_from(skip)) == list(sampler)[skip:]
    batches = BatchSampler(sampler, batch_size, drop_last)
    drawn, left = sampling.iterate_from(batches, skip)
    assert left == 0
    assert list(drawn) == list(batches)[skip:]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"n": -1}, ValueError),
        ({"n": (1 << 62) + 1}, ValueError),
        ({"n": 2.0}, TypeError),
        ({"seed": -1}, ValueError),
        ({"num_replicas": 0}, ValueError),
        ({"rank": 2, "num_replicas": 2}, ValueError),
        ({"rank": "0"}, TypeError),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception]) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(error, match=f"{name}={value!r}"):
        PermutationSampler(**{"n": 9, **arguments})
    with pytest.raises(ValueError, match="epoch=-1 must be at least 0"):
        PermutationSampler(3).set_epoch(-1)


@pytest.mark.parametrize("by", ["seeds", "epochs"])
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_few_numbers_are_equally_likely(n: int, by: str) -> None:
    seen, wanted = Counter[Any](), 100
    for number in range(wanted * math.factorial(n)):
        sampler = PermutationSampler(n, number if by == "seeds" else 0)
        sampler.set_epoch(number if by == "epochs" else 0)
        seen[tuple(sampler)] += 1
    chi_square = sum((seen[order] - wanted) ** 2 / wanted for order in itertools.permutations(range(n)))
    freedom = math.factorial(n) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)  # five deviations; the seeds are fixed
