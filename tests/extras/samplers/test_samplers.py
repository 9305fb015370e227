"""Samplers whose order is computed from a seed and the epoch: distributions, ranks, positions, arguments."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler

from fastq_loader import Distributed, PermutationSampler, WeightedSampler
from fastq_loader.extras.samplers.samplers import Permutation, seed_sequence
from fastq_loader.reading import sampling
from tests.support import graphs, thorough
from tests.support.loaders import generator_states


def weighted(n: int, replacement: bool, **options: Any) -> WeightedSampler:
    """Draws as many of n + 2 items as there are with a weight."""
    return WeightedSampler([0.0, *range(1, n + 1), 0.0], n, replacement, **options)


COMPUTED: dict[str, Callable[..., Any]] = {
    "shuffle": PermutationSampler,
    "with replacement": lambda n, seed=0, **options: weighted(n, True, seed=seed, **options),
    "without": lambda n, seed=0, **options: weighted(n, False, seed=seed, **options),
}
KINDS = st.sampled_from(list(COMPUTED))


@pytest.mark.parametrize("n", range(0, 300, 7))
def test_every_number_comes_once_for_all_small_n(n: int) -> None:
    for length in range(n, n + 7):
        assert sorted(PermutationSampler(length, seed=n)) == list(range(length))


@thorough.examples(100)
@given(st.integers(1, 1 << 62), st.integers(0, 1 << 64), st.data())
def test_no_two_positions_have_one_number_for_large_n(n: int, seed: int, data: Any) -> None:
    positions = np.unique(data.draw(st.lists(st.integers(0, n - 1), max_size=50))).astype(np.uint64)
    numbers = Permutation(n, seed, 0)(positions)
    assert len(np.unique(numbers)) == len(positions)
    assert (numbers < n).all()


@pytest.mark.parametrize("kind", COMPUTED)
def test_epochs_and_seeds_have_orders_of_their_own(kind: str) -> None:
    sampler = COMPUTED[kind](1000, seed=3)
    orders = [tuple(sampler), tuple(sampler)]
    assert orders[0] == orders[1]
    sampler.set_epoch(1)
    orders += [
        tuple(sampler),
        tuple(COMPUTED[kind](1000, seed=4)),
        tuple(COMPUTED[kind](1000, seed=1)),
    ]
    assert len(set(orders)) == 4


NUMBERS = st.integers(0, 1 << 66) | st.builds(
    lambda high, low: high << 32 | low, st.integers(0, 6), st.integers(0, 6)
)


@thorough.examples(1000)
@given(st.tuples(NUMBERS, NUMBERS), st.tuples(NUMBERS, NUMBERS))
@example((1 + (5 << 32), 0), (1, 5))
@example((1, 5 << 32), (1, 0))
@example((0, 1 << 32), (1 << 32, 0))
@example((1 << 64, 0), (0, 1))
def test_no_two_pairs_of_a_seed_and_an_epoch_have_one_order(one: Any, other: Any) -> None:
    words = [seed_sequence(*key).generate_state(4).tolist() for key in (one, other)]
    assert (words[0] == words[1]) == (one == other)


def distributed(n: int, seed: int = 0, **options: Any) -> Distributed:
    """Of a sampler that draws from all that it can."""
    options = {"num_replicas": 1, "rank": 0, **options}
    return Distributed(DrawsFromAll(n), seed, **options)


@thorough.examples(100)
@given(KINDS | st.just("distributed"), st.integers(1, 60), st.integers(1, 7), st.booleans())
def test_ranks_share_as_with_torch(kind: str, n: int, replicas: int, drop_last: bool) -> None:
    make = distributed if kind == "distributed" else COMPUTED[kind]
    whole = list(make(n, 5))
    ranks = [make(n, 5, num_replicas=replicas, rank=rank, drop_last=drop_last) for rank in range(replicas)]
    theirs = DistributedSampler(range(n), replicas, 0, drop_last=drop_last)  # type: ignore[arg-type]
    assert {len(rank) for rank in ranks} == {len(theirs)}
    dealt = [index for turn in zip(*ranks, strict=True) for index in turn]
    assert dealt == (whole * replicas)[: theirs.total_size]


@thorough.examples(100)
@given(KINDS, st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(0, 50))
def test_it_goes_on_from_any_position(kind: str, n: int, batch_size: int, drop_last: bool, skip: int) -> None:
    sampler = COMPUTED[kind](n, 2)
    assert list(sampler.iterate_from(skip)) == list(sampler)[skip:]
    batches = BatchSampler(sampler, batch_size, drop_last)
    drawn, left = sampling.iterate_from(batches, skip)
    assert left == 0
    assert list(drawn) == list(batches)[skip:]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"n": -1}, ValueError),
        ({"n": 2.0}, TypeError),
        ({"seed": -1}, ValueError),
        ({"num_replicas": 0}, ValueError),
        ({"rank": 2, "num_replicas": 2}, ValueError),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception]) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(error, match=f"{name}={value!r}"):
        PermutationSampler(**{"n": 9, **arguments})
    with pytest.raises(ValueError, match="epoch=-1 must be at least 0"):
        PermutationSampler(3).set_epoch(-1)


@thorough.thorough(but={"n": [3, 4]})
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


# ---- draws by weights -----------------------------------------------------------------------------------


def assert_fits(seen: Counter[Any], expected: dict[Any, float]) -> None:
    """A chi-square test at five deviations; the seeds are fixed."""
    assert seen.keys() <= expected.keys()
    chi_square = sum((seen[each] - wanted) ** 2 / wanted for each, wanted in expected.items())
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


WEIGHTS = [0.0, 1.0, 0.0, 7.5, 0.25, 4.0, 0.0]


def test_draws_with_replacement_are_as_often_as_their_weights_and_independent() -> None:
    order = list(WeightedSampler(WEIGHTS, 60_000, seed=2))
    total = sum(WEIGHTS)
    parts = {item: weight / total for item, weight in enumerate(WEIGHTS) if weight}
    assert_fits(Counter(order), {item: 60_000 * part for item, part in parts.items()})
    pairs = {(a, b): 30_000 * parts[a] * parts[b] for a in parts for b in parts}
    assert_fits(Counter(zip(order[::2], order[1::2], strict=True)), pairs)


@pytest.mark.parametrize("by", ["seeds", "epochs"])
def test_draws_without_replacement_are_among_those_that_are_left(by: str) -> None:
    """The probabilities of torch.multinomial: each draw is in proportion to the weights of the rest."""
    seen, runs = Counter[Any](), 20_000 if thorough.is_thorough else 2000
    sampler = WeightedSampler([3.0, 0.0, 1.0, 2.0, 4.0], 2, replacement=False)
    for number in range(runs):
        sampler.seed, sampler.epoch = (number, 0) if by == "seeds" else (0, number)
        seen[tuple(sampler)] += 1
    parts = {0: 0.3, 2: 0.1, 3: 0.2, 4: 0.4}
    expected = {(a, b): runs * parts[a] * parts[b] / (1 - parts[a]) for a in parts for b in parts if a != b}
    assert_fits(seen, expected)


def test_weights_are_copied_and_known_by_their_checksum() -> None:
    weights = np.array([1.0, 2.0, 0.0])
    sampler = WeightedSampler(weights, 50)
    order, known = list(sampler), sampler.weights_checksum
    weights[:] = [0.0, 0.0, 1.0]
    assert list(sampler) == order
    assert WeightedSampler(weights, 50).weights_checksum != known


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"weights": [[1.0]]}, ValueError, r"weights of shape \(1, 1\)"),
        ({"weights": [1, -1]}, ValueError, r"weights\[1\]=-1.0 must be a finite number of at least 0"),
        ({"weights": [1, math.inf]}, ValueError, r"weights\[1\]=inf"),
        ({"weights": [0, 0]}, ValueError, "all 2 are 0.*give one above 0"),
        ({"weights": "ab"}, TypeError, "weights='ab' must be a sequence of numbers"),
        ({"num_samples": 0}, ValueError, "num_samples=0 must be at least 1"),
        ({"replacement": 1}, TypeError, "replacement=1 must be True or False"),
        ({"replacement": False, "num_samples": 3}, ValueError, "num_samples=3 is too many for 2 items.*use"),
        ({"rank": 1}, ValueError, "rank=1 must be below num_replicas=1"),
    ],
)
def test_wrong_weights_and_numbers_are_named(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        WeightedSampler(**{"weights": [1.0, 0.0, 2.0], "num_samples": 2, **arguments})


# ---- any sampler over ranks -----------------------------------------------------------------------------


class DrawsFromAll(Sampler[int]):
    """A shuffle by generators of the process, and by own ones of each kind."""

    epoch = 0

    def __init__(self, n: int) -> None:
        self.n = n
        self.own = random.Random(), torch.Generator(), np.random.default_rng(), np.random.RandomState()

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        own, generator, rng, legacy = self.own
        order = torch.randperm(self.n).numpy()[torch.randperm(self.n, generator=generator).numpy()]
        for shuffle in np.random.shuffle, rng.shuffle, legacy.shuffle, random.shuffle, own.shuffle:
            shuffle(order)
        return iter(order.tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_ranks_in_any_state_draw_one_order_and_change_no_generator() -> None:
    ranks = [distributed(50, 3, num_replicas=3, rank=rank) for rank in range(3)]
    orders = set()
    for epoch in range(2):
        dealt = []
        for rank in ranks:
            torch.rand(1 + rank.rank), random.random(), np.random.rand()
            before = generator_states(rank)
            rank.set_epoch(epoch)
            assert rank.sampler.epoch == epoch
            dealt.append(list(rank))
            assert generator_states(rank) == before
        orders.add(tuple(index for turn in zip(*dealt, strict=True) for index in turn))
    assert len(orders) == 2
    assert all(sorted(order[:50]) == list(range(50)) and order[50:] == order[:1] for order in orders)
    assert list(distributed(50, 4)) != list(distributed(50, 3))


def test_batches_are_dealt_out_and_the_epoch_goes_to_whoever_wants_it() -> None:
    batches = BatchSampler(PermutationSampler(10), 3, False)
    one, two = (Distributed(batches, num_replicas=2, rank=rank) for rank in range(2))
    for epoch in range(2):
        one.set_epoch(epoch)
        assert [*one, *two] == [*list(batches)[::2], *list(batches)[1::2]]
    assert batches.sampler.epoch == 1  # type: ignore[attr-defined]
    Distributed(RandomSampler(range(3)), num_replicas=1, rank=0).set_epoch(1)


def test_arguments_of_distributed_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"num_replicas=None, rank=0: .*init_process_group"):
        Distributed(range(3), rank=0)
    for arguments, text in (
        ({"sampler": 3}, "sampler=3 must be a sampler"),
        ({"seed": 1 << 63}, f"seed={1 << 63} is too large: use at most"),
        ({"rank": 2}, "rank=2 must be below num_replicas=2"),
        ({"num_replicas": 0}, "num_replicas=0 must be at least 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            Distributed(**{"sampler": range(3), "num_replicas": 2, "rank": 0, **arguments})  # type: ignore[arg-type]


def test_the_process_group_says_which_rank_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_initialized": True, "get_world_size": 4, "get_rank": 3}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert list(Distributed(range(8))) == [3, 7]
    assert list(Distributed(range(8), num_replicas=8)) == [3]


class Foreign(np.random.PCG64):
    """A bit generator that is not numpy's own: it is not seeded."""


#: Makes a generator in a state of its own.
GENERATORS: dict[str, Callable[[int], Any]] = {
    "random": random.Random,
    "torch": torch.Generator().manual_seed,
    "numpy": np.random.default_rng,
    "legacy": np.random.RandomState,
    "bits": np.random.PCG64,
    "foreign bits": lambda seed: np.random.Generator(Foreign(seed)),
    "the system's": random.SystemRandom,
}
_keys: dict[int, Any] = {}


class Anywhere(Sampler[int]):
    """A shuffle by a generator that is anywhere among its attributes. It gets it where nobody looks."""

    def __init__(self, n: int, generator: Any, graph: tuple[list[str], str, bool]) -> None:
        vars(self).update(graphs.attributes(graph, generator))
        self.n, self.key = n, len(_keys)
        _keys[self.key] = generator

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        generator, order = _keys[self.key], list(range(self.n))
        if isinstance(generator, torch.Generator):
            return iter(torch.randperm(self.n, generator=generator).tolist())
        if isinstance(generator, np.random.BitGenerator):
            generator = np.random.Generator(generator)
        generator.shuffle(order)
        return iter(order)


@thorough.examples(200)
@given(graphs.graphs(), st.sampled_from(sorted(GENERATORS)), st.sampled_from([60, 4]))
@example((["attribute"], "more objects than are looked at", True), "random", 60)
@example(([], "data", False), "numpy", 60)
def test_ranks_see_all_items_wherever_the_generator_is_or_refuse(graph: Any, kind: str, n: int) -> None:
    samplers = [Anywhere(n, GENERATORS[kind](seed), graph) for seed in (1, 2)]
    ranks = [Distributed(sampler, num_replicas=2, rank=rank) for rank, sampler in enumerate(samplers)]
    ways, beside, _ = graph

    def seen() -> list[int]:
        return [index for rank in ranks for index in rank]

    found = len(ways) < 3 and {"attribute", "slot", "dict", "list", "tuple"}.issuperset(ways)
    if kind in ("foreign bits", "the system's") or not found or beside not in ("nothing", "data"):
        with contextlib.suppress(RuntimeError):
            assert sorted(seen()) == list(range(n))
    else:
        assert sorted(seen()) == list(range(n))
