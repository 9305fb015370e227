"""Rows R1 to R12: what is drawn from which generator and when, and which sample comes in which place."""

from __future__ import annotations

import collections
import datetime
import itertools
import multiprocessing
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Sampler, Subset, get_worker_info
from torch.utils.data._utils.worker import _generate_state

from fastq_loader import DataLoader
from tests.support.datasets import (
    BatchEcho,
    BatchedDataset,
    Colour,
    Count,
    CountingSampler,
    DoublingSubset,
    Echo,
    FailingSampler,
    Keyed,
    Level,
    MapDataset,
    Name,
    Point,
    Record,
    SizedStream,
    Stream,
    UnbatchedDataset,
    assert_same,
    identity,
    tensor_sample,
)

MORE_WORKERS_THAN_CORES = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
"""Three workers are what the row is about; on a machine of two cores the loader rightly warns."""


def draw_int64(generator: torch.Generator | None = None) -> int:
    """The draw that torch makes at every `iter()`."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def state_after(seed: int, draws: int) -> torch.Tensor:
    """The state of a generator seeded with `seed` after some draws of one int64."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        draw_int64(generator)
    return generator.get_state()


def shuffled(seed: int, size: int) -> list[int]:
    """What RandomSampler makes of a seed."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


class Draws(Dataset):
    """Five draws of each global generator, and who made them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.before: Any = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return {"id": info.id, "seed": info.seed, "drawn": draw_five(), "by init": self.before}


def draw_five() -> tuple[list[float], list[float], list[float]]:
    return torch.rand(5).tolist(), [random.random() for _ in range(5)], np.random.rand(5).tolist()


def seeded_draws(torch_seed: int, random_seed: int, numpy_seed: int | list[int]) -> Any:
    """What `draw_five` gives right after these seeds."""
    own = random.Random(random_seed)
    return (
        torch.rand(5, generator=torch.Generator().manual_seed(torch_seed)).tolist(),
        [own.random() for _ in range(5)],
        np.random.RandomState(numpy_seed).rand(5).tolist(),
    )


def draw_in_init(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    info.dataset.before = draw_five()  # type: ignore[attr-defined]


def seed_in_init(worker: int) -> None:
    torch.manual_seed(10 + worker)
    random.seed(20 + worker)
    np.random.seed(30 + worker)


# R1 to R5: generators and seeds


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_r1_iter_draws_one_int64_even_without_a_need(workers: int) -> None:
    loader = DataLoader(range(8), num_workers=workers)
    torch.manual_seed(5)
    iterator = iter(loader)
    assert torch.equal(torch.get_rng_state(), state_after(5, draws=1))
    assert len(list(iterator)) == 8
    assert torch.equal(torch.get_rng_state(), state_after(5, draws=1))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_r1_the_sampler_is_seeded_by_the_second_draw(workers: int) -> None:
    source = torch.Generator().manual_seed(5)
    _base_seed, sampler_seed = draw_int64(source), draw_int64(source)
    torch.manual_seed(5)
    order = [batch.item() for batch in DataLoader(range(30), shuffle=True, num_workers=workers)]
    assert order == shuffled(sampler_seed, 30)


@pytest.mark.processes
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_r1_two_epochs_give_torchs_indices_and_leave_its_state(workers: int, shuffle: bool) -> None:
    seen = []
    for kind in (TorchDataLoader, DataLoader):
        torch.manual_seed(6)
        loader = kind(range(20), batch_size=3, shuffle=shuffle, num_workers=workers)
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
        seen.append((epochs, torch.rand(1).item()))
    assert seen[0] == seen[1]


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "draws"), [(0, 1), (1, 2), (2, 2)])
def test_r2_the_samplers_seed_is_drawn_at_iter_with_workers_and_at_next_without(
    workers: int, draws: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    iterator = iter(DataLoader(range(8), shuffle=True, num_workers=workers, generator=generator))
    assert torch.equal(generator.get_state(), state_at_iter(7, draws))
    next(iterator)
    assert torch.equal(generator.get_state(), state_at_iter(7, draws=2))


def state_at_iter(seed: int, draws: int) -> torch.Tensor:
    """The state of a generator given to the loader: the second draw is the permutation itself."""
    generator = torch.Generator().manual_seed(seed)
    draw_int64(generator)
    if draws == 2:
        torch.randperm(8, generator=generator)
    return generator.get_state()


@pytest.mark.processes
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_r3_three_epochs_draw_what_torch_draws(persistent: bool, shuffle: bool) -> None:
    seen = []
    for kind in (TorchDataLoader, DataLoader):
        torch.manual_seed(8)
        loader = kind(
            Draws(9), num_workers=2, shuffle=shuffle, persistent_workers=persistent, collate_fn=list
        )
        epochs = []
        for _ in range(3):
            iterator = iter(loader)
            state = torch.get_rng_state().tolist()
            epochs.append((state, list(iterator)))
        seen.append(epochs)
        del loader, iterator
    assert seen[0] == seen[1]


@pytest.mark.processes
def test_r3_persistent_workers_are_seeded_once_and_draw_on() -> None:
    with DataLoader(Draws(4), num_workers=1, persistent_workers=True, collate_fn=list) as loader:
        torch.manual_seed(9)
        first = list(loader)
        after_one = torch.get_rng_state()
        second = list(loader)
        assert torch.equal(torch.get_rng_state(), after_one), "the second epoch drew a base seed"
    assert {sample["seed"] for (sample,) in first + second} == {first[0][0]["seed"]}
    drawn = [sample["drawn"] for (sample,) in first + second]
    assert all(one != other for one, other in itertools.combinations(drawn, 2)), "workers were seeded again"


@pytest.mark.processes
@pytest.mark.parametrize("given", [False, True])
def test_r4_worker_seeds_are_base_plus_id_and_numpys_a_hash_of_both(given: bool) -> None:
    generator = torch.Generator().manual_seed(11) if given else None
    torch.manual_seed(11)
    base = draw_int64(torch.Generator().manual_seed(11))
    loader = DataLoader(
        Draws(4),
        num_workers=2,
        collate_fn=list,
        generator=generator,
        worker_init_fn=draw_in_init,
    )
    first_samples = [sample for (sample,) in loader][:2]
    for worker, sample in enumerate(first_samples):
        expected = seeded_draws(base + worker, base + worker, _generate_state(base, worker))
        assert sample["id"] == worker
        assert sample["seed"] == base + worker
        assert sample["by init"] == expected, "seeds are set before worker_init_fn"


@pytest.mark.processes
def test_r4_first_draws_of_a_dataset_follow_the_seeds() -> None:
    torch.manual_seed(12)
    base = draw_int64(torch.Generator().manual_seed(12))
    for worker, (sample,) in enumerate(DataLoader(Draws(2), num_workers=2, collate_fn=list)):
        expected = seeded_draws(base + worker, base + worker, _generate_state(base, worker))
        assert sample["drawn"] == expected


@pytest.mark.processes
def test_r4_what_worker_init_fn_seeds_stays_in_force() -> None:
    loader = DataLoader(Draws(2), num_workers=2, collate_fn=list, worker_init_fn=seed_in_init)
    for worker, (sample,) in enumerate(loader):
        assert sample["drawn"] == seeded_draws(10 + worker, 20 + worker, 30 + worker)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_r5_a_given_generator_leaves_the_global_ones_alone(workers: int) -> None:
    states = []
    for kind in (TorchDataLoader, DataLoader):
        torch.manual_seed(13)
        random.seed(13)
        np.random.seed(13)
        generator = torch.Generator().manual_seed(14)
        loader = kind(range(20), shuffle=True, num_workers=workers, generator=generator)
        epochs = [[batch.item() for batch in loader] for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(13).get_state())
        assert random.getstate() == random.Random(13).getstate()
        assert np.random.rand() == np.random.RandomState(13).rand()
        states.append((epochs, generator.get_state().tolist()))
    assert states[0] == states[1]


# R6 to R8: when the sampler is asked


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "prefetch"), [(0, None), (1, 1), (1, 4), (2, 1), (2, 2), (2, 3)])
def test_r6_the_sampler_is_asked_as_far_ahead_as_prefetch_allows_and_no_further(
    workers: int, prefetch: int | None
) -> None:
    ahead = workers * (prefetch or 0)
    sampler = CountingSampler([[i] for i in range(20)])
    iterator = iter(
        DataLoader(range(20), batch_sampler=sampler, num_workers=workers, prefetch_factor=prefetch)
    )
    assert sampler.handed_out == ahead
    for delivered in range(1, 21):
        next(iterator)
        assert sampler.handed_out == min(20, ahead + delivered)
    with pytest.raises(StopIteration):
        next(iterator)


class Curriculum(Sampler[list[int]]):
    """Its next batch is the number of steps that the training loop has taken."""

    def __init__(self) -> None:
        self.steps = 0

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(15):
            yield [self.steps]

    def __len__(self) -> int:
        return 15


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_r6_a_sampler_that_reads_training_state_sees_the_step_that_it_sees_with_torch(workers: int) -> None:
    seen = []
    for kind in (TorchDataLoader, DataLoader):
        sampler = Curriculum()
        batches = []
        for batch in kind(range(20), batch_sampler=sampler, num_workers=workers):
            batches.append(batch.item())
            sampler.steps += 1
        seen.append(batches)
    assert seen[0] == seen[1]
    assert len(seen[1]) == 15


@pytest.mark.processes
@pytest.mark.parametrize("place", ["batch_sampler", "sampler", "sampler of samples"])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_r7_sampler_iterations_per_epoch_are_torchs(place: str, workers: int, persistent: bool) -> None:
    seen = []
    for kind in (TorchDataLoader, DataLoader):
        sampler = CountingSampler([[0], [1]] if place == "batch_sampler" else [0, 1])
        arguments: dict[str, Any] = {
            "batch_sampler": {"batch_sampler": sampler},
            "sampler": {"sampler": sampler, "batch_size": 2},
            "sampler of samples": {"sampler": sampler, "batch_size": None},
        }[place]
        loader = kind(range(2), num_workers=workers, persistent_workers=persistent, **arguments)
        counts = [sampler.iterations]
        for _ in range(3):
            iterator = iter(loader)
            counts.append(sampler.iterations)
            counts.extend(sampler.iterations for _batch in iterator)
        seen.append(counts)
        del loader, iterator
    assert seen[0] == seen[1]


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "prefetch"), [(0, None), (1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)])
def test_r8_batches_before_a_sampler_error_are_delivered_first(workers: int, prefetch: int | None) -> None:
    sampler = FailingSampler([[0, 1], [2, 3]])
    loader = DataLoader(range(9), batch_sampler=sampler, num_workers=workers, prefetch_factor=prefetch)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    assert next(iterator).tolist() == [2, 3]
    with pytest.raises(LookupError, match="no key after 2"):
        next(iterator)
    with pytest.raises(StopIteration):  # as a generator that raised, the sampler has nothing more to give
        next(iterator)


@pytest.mark.processes
def test_r8_a_persistent_loader_survives_a_sampler_error() -> None:
    sampler = FailingSampler([[0, 1], [2, 3]])
    with DataLoader(range(9), batch_sampler=sampler, num_workers=2, persistent_workers=True) as loader:
        for _ in range(2):
            iterator = iter(loader)
            assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
            with pytest.raises(LookupError, match="no key after 2"):
                next(iterator)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_r8_a_sampler_that_fails_at_once_raises_no_later_than_the_first_next(workers: int) -> None:
    loader = DataLoader(range(9), batch_sampler=FailingSampler([]), num_workers=workers)
    with pytest.raises(LookupError, match="no key after 0"):
        next(iter(loader))


# R9, R10: several workers


def worker_and_numbers(batches: Sequence[Any]) -> list[tuple[int, list[int]]]:
    """Of batches of a Stream of tensors: who sent them and what is in them."""
    numbers = [labels.tolist() for _, labels in batches]
    return [(labels[0] // 1000, [label % 1000 for label in labels]) for labels in numbers]


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
@MORE_WORKERS_THAN_CORES
def test_r9_workers_of_unequal_length_take_turns_until_each_has_ended(persistent: bool) -> None:
    stream = Stream("tensors", [5, 2, 4])
    with DataLoader(stream, batch_size=2, num_workers=3, persistent_workers=persistent) as loader:
        for _ in range(2):
            assert worker_and_numbers(list(loader)) == [
                (0, [0, 1]),
                (1, [0, 1]),
                (2, [0, 1]),
                (0, [2, 3]),
                (2, [2, 3]),
                (0, [4]),
            ]


@pytest.mark.processes
@MORE_WORKERS_THAN_CORES
def test_r9_each_worker_drops_its_own_last_batch() -> None:
    loader = DataLoader(Stream("tensors", [5, 2, 3]), batch_size=2, num_workers=3, drop_last=True)
    assert worker_and_numbers(list(loader)) == [(0, [0, 1]), (1, [0, 1]), (2, [0, 1]), (0, [2, 3])]


@pytest.mark.processes
@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("lengths", [(0, 0), (0, 9), (13, 0), (1, 20), (7, 8)])
def test_r9_the_interleave_is_torchs(lengths: tuple[int, ...], prefetch: int) -> None:
    arguments = {"batch_size": 2, "num_workers": 2, "prefetch_factor": prefetch}
    torchs, ours = (
        worker_and_numbers(list(kind(Stream("tensors", lengths), **arguments)))
        for kind in (TorchDataLoader, DataLoader)
    )
    assert torchs == ours


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_r9_a_stream_longer_than_it_says_warns_in_torchs_words(workers: int, batch_size: int | None) -> None:
    told = []
    for kind in (TorchDataLoader, DataLoader):
        loader = kind(SizedStream("tensors", [9, 9], told=4), batch_size=batch_size, num_workers=workers)
        len(loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = len(list(loader))
        told.append((batches, [(warning.category, str(warning.message)) for warning in caught]))
    assert told[0] == told[1]
    assert told[1][1], "no warning at all"


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "length"), [(4, False, 3), (4, True, 2), (11, True, 1), (None, False, 11)]
)
def test_r9_the_length_of_a_stream_follows_torchs_formula(
    batch_size: int | None, drop_last: bool, length: int
) -> None:
    stream = SizedStream("tensors", [1], told=11)
    for kind in (TorchDataLoader, DataLoader):
        assert len(kind(stream, batch_size=batch_size, drop_last=drop_last)) == length
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(DataLoader(Stream("tensors", [1])))


class SlowWorker(Dataset):
    """Worker 0 needs longer for one sample than the other one for all of them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        time.sleep(0.25 if info.id == 0 else 0)
        return index


class SlowStream(Stream):
    """The same for a stream."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for number in self.numbers():
            time.sleep(0.25 if info.id == 0 else 0)
            yield tensor_sample(number)


@pytest.mark.processes
def test_r10_out_of_order_every_batch_comes_exactly_once_and_none_waits_for_the_slow_worker() -> None:
    batches = [batch.tolist() for batch in DataLoader(SlowWorker(), 2, num_workers=2, in_order=False)]
    assert sorted(batches) == [[i, i + 1] for i in range(0, 24, 2)]
    assert batches != sorted(batches), "the fast worker waited for the slow one"


@pytest.mark.processes
def test_r10_a_stream_out_of_order_loses_nothing() -> None:
    loader = DataLoader(SlowStream("tensors", [3, 20]), batch_size=2, num_workers=2, in_order=False)
    batches = worker_and_numbers(list(loader))
    expected = [(0, [0, 1]), (0, [2]), *((1, [i, i + 1]) for i in range(0, 20, 2))]
    assert sorted(batches) == sorted(expected)
    assert batches[0][0] == 1
    for worker in (0, 1):
        own = [numbers for sender, numbers in batches if sender == worker]
        assert own == sorted(own), f"worker {worker}'s batches were shuffled"


class Gated(Dataset):
    """A sample of worker k waits until the test opens gate k once more."""

    def __init__(self, size: int, workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self.size = size
        self.gates = [context.Semaphore(0) for _ in range(workers)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        assert info is not None
        assert self.gates[info.id].acquire(timeout=30)
        return index, info.id


def play(kind: type, script: Sequence[int], workers: int, prefetch: int) -> list[tuple[int, int]]:
    """(sample, worker) in the order of delivery when workers finish in the order of the script."""
    gated = Gated(len(script), workers)
    loader = kind(
        gated, batch_size=None, num_workers=workers, prefetch_factor=prefetch, in_order=False, timeout=30
    )
    iterator = iter(loader)
    delivered = []
    for worker in script:
        gated.gates[worker].release()
        delivered.append(next(iterator))
    with pytest.raises(StopIteration):
        next(iterator)
    return delivered


def feasible_script(seed: int, samples: int, workers: int, prefetch: int) -> list[int]:
    """An order of completions in which a worker finishes only what it has."""
    rng = random.Random(seed)
    waiting = [prefetch] * workers
    unsent = samples - sum(waiting)
    script = []
    for _ in range(samples):
        script.append(worker := rng.choice([w for w in range(workers) if waiting[w]]))
        waiting[worker] -= unsent <= 0
        unsent -= 1
    return script


@pytest.mark.processes
@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_r10_a_slow_worker_0_and_a_fast_worker_1_give_torchs_sequence(prefetch: int) -> None:
    script = [1] * (12 - prefetch) + [0] * prefetch
    torchs, ours = (play(kind, script, 2, prefetch) for kind in (TorchDataLoader, DataLoader))
    assert torchs == ours
    assert [worker for _, worker in ours] == script


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(4))
@MORE_WORKERS_THAN_CORES
def test_r10_the_choice_of_the_next_worker_is_torchs_for_any_order_of_completion(seed: int) -> None:
    workers, prefetch = [(2, 2), (3, 1), (3, 2), (2, 4)][seed]
    script = feasible_script(seed, 18, workers, prefetch)
    torchs, ours = (play(kind, script, workers, prefetch) for kind in (TorchDataLoader, DataLoader))
    assert torchs == ours


class WhoMadeIt(Dataset):
    """The id of the worker; an odd one is slower."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        time.sleep(0.02 * (info.id % 2))
        return info.id


@pytest.mark.processes
def test_r10_in_order_batch_k_is_made_by_worker_k_modulo_n() -> None:
    made = [batch.tolist() for batch in DataLoader(WhoMadeIt(), batch_size=1, num_workers=2)]
    assert made == [[k % 2] for k in range(10)]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_r10b_without_batches_samples_are_converted_and_not_collated(workers: int) -> None:
    samples = [3, "text", 2.5, np.arange(3), (1, np.float32(2)), {"a": np.zeros(2), "n": None}, torch.ones(2)]
    torchs, ours = (
        list(kind(samples, batch_size=None, num_workers=workers)) for kind in (TorchDataLoader, DataLoader)
    )
    assert type(ours[0]) is int
    assert ours[0] == 3
    assert isinstance(ours[3], torch.Tensor)
    assert_same(torchs, ours)


# R11, R12: what the dataset is asked for


ODD_KEYS: list[Any] = [
    0,
    -1,
    True,
    None,
    1.5,
    float("inf"),
    1 + 2j,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    2**70,
    np.int64(3),
    np.int32(3),
    np.uint64(2**64 - 1),
    np.float32(0.1),
    np.bool_(True),
    np.str_("numpy text"),
    "text",
    "ä\ud800",
    b"bytes",
    bytearray(b"bytes"),
    (),
    (1, (2, "three")),
    [1, [2, 3]],
    {"a": 1, (1, 2): {3}},
    {1, 2},
    frozenset({1, "a"}),
    slice(1, 10, 2),
    range(2, 9, 3),
    ...,
    torch.tensor(3),
    torch.arange(4),
    np.arange(4, dtype=np.int16),
    collections.OrderedDict(b=1, a=2),
    collections.deque([1, 2]),
    datetime.date(2024, 2, 29),
    Colour.BLUE,
    Level.HIGH,
    Name("a subclass of str"),
    Count(5),
    Point(1, 2),
    Record("r", [1]),
    Keyed({1: 2}, tag="t"),
    int,
]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_r11_odd_keys_reach_the_dataset_with_value_and_type(workers: int) -> None:
    loader = DataLoader(Echo(), batch_size=None, sampler=ODD_KEYS, num_workers=workers, collate_fn=identity)
    for key, echoed in zip(ODD_KEYS, loader, strict=True):
        assert_same(Echo()[key], echoed, f"key {key!r}")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_r11_odd_keys_among_plain_ones_keep_their_types(workers: int) -> None:
    batches = [[0, key, 1] for key in ODD_KEYS] + [list(range(5000)), []]
    loader = DataLoader(Echo(), batch_sampler=batches, num_workers=workers, collate_fn=identity)
    for batch, samples in zip(batches, loader, strict=True):
        assert_same([Echo()[key] for key in batch], samples, f"keys {batch[:3]!r}")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_r11_a_batch_of_keys_keeps_its_container(workers: int) -> None:
    batches: list[Any] = [
        [1, 2],
        (1, 2),
        range(3),
        np.arange(3),
        torch.arange(3),
        collections.deque([1, 2]),
        {1, 2},
        "ab",
        {"a": 1},
        Point(1, 2),
        5,
        None,
    ]
    loader = DataLoader(BatchEcho(), batch_sampler=batches, num_workers=workers, collate_fn=identity)
    for keys, (container, echoed) in zip(batches, loader, strict=True):
        assert container is type(keys)
        assert_same(keys, echoed, f"keys {keys!r}")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_r12_getitems_is_used_where_there_is_one(workers: int) -> None:
    loader = DataLoader(BatchedDataset("tensors", 10), batch_size=4, num_workers=workers, collate_fn=identity)
    assert [[sample[:2] for sample in batch] for batch in loader] == [
        [("together", 4)] * 4,
        [("together", 4)] * 4,
        [("together", 2)] * 2,
    ]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [MapDataset("tensors", 10), UnbatchedDataset("tensors", 10)])
def test_r12_getitem_is_used_where_getitems_is_missing_or_none(dataset: Dataset, workers: int) -> None:
    labels = [batch[1].tolist() for batch in DataLoader(dataset, batch_size=4, num_workers=workers)]
    assert labels == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_r12_a_subset_asks_its_dataset_for_the_whole_batch(workers: int) -> None:
    subset = Subset(BatchedDataset("tensors", 10), [9, 7, 5])
    loader = DataLoader(subset, batch_size=2, num_workers=workers, collate_fn=identity)
    asked = [[(how, number, label) for how, number, (_, label) in batch] for batch in loader]
    assert asked == [[("together", 2, 9), ("together", 2, 7)], [("together", 1, 5)]]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_r12_an_overridden_getitem_of_a_subset_is_respected(workers: int) -> None:
    """torch asks Subset's own `__getitems__` and passes the override by (pytorch#163184)."""
    subset = DoublingSubset(list(range(10)), [9, 7, 5])
    batches = [batch.tolist() for batch in DataLoader(subset, batch_size=2, num_workers=workers)]
    assert batches == [[18, 14], [10]]


class TriplingSubset(DoublingSubset):
    """Overrides both, which makes `__getitems__` the one to use."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [3 * self.dataset[self.indices[index]] for index in indices]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_r12_an_overridden_getitems_of_a_subset_wins(workers: int) -> None:
    subset = TriplingSubset(list(range(10)), [9, 7, 5])
    batches = [batch.tolist() for batch in DataLoader(subset, batch_size=2, num_workers=workers)]
    assert batches == [[27, 21], [15]]
