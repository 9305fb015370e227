"""A run that is stopped goes on as if it had not been: configurations drawn from a seed, and hard cases.

More than the default seeds, each from every stop:

    python -m pytest tests/end_to_end/test_resume.py -k drawn --seeds 0:500
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from fastq_loader import RoundRobin, StatefulDataLoader, ToDevice
from fastq_loader.reading import generators
from tests.support.datasets import Sized
from tests.support.forking import end_of, fork
from tests.support.loaders import MANY_WORKERS, distinct, seed_all
from tests.support.samplers import ZOO, SayingIterator, arguments
from tests.support.thorough import seeds, thorough

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore::fastq_loader.PrivateGenerators"),
    MANY_WORKERS,
]
SAVED = RoundRobin(save_generators=True)
EPOCHS = 3


class Augmented(Sized, Dataset):  # type: ignore[type-arg]
    """Samples draw from all generators, and from one of the dataset's own; their reads are counted."""

    draws_own = False

    def __init__(self, length: int) -> None:
        self.length = length
        self.own = random.Random(5)
        self.reads = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        own = self.own.random() if self.draws_own and get_worker_info() else 0  # else nobody saves it
        return index, torch.rand(2), random.random(), np.random.rand(), own


class Counts(Augmented):
    """It has a state: reads so far, in the training process."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += get_worker_info() is None
        return *super().__getitem__(index), self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Stays(IterableDataset):  # type: ignore[type-arg]
    """Each worker reads a part, which may be longer in each epoch, and stays where it has ended."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.at = self.epoch = 0
        self.was_told = False

    def __iter__(self) -> Iterator[Any]:
        if not self.was_told:
            self.at = 0
        self.was_told = False
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.at * step < self.length + self.epoch:
            self.at += 1
            yield first + (self.at - 1) * step, self.epoch, torch.rand(1), random.random()
        self.ends()

    def ends(self) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch, self.was_told = state["at"], state["epoch"], True


class BeginsAnew(Stays):
    """The same, and ends at the beginning, as torchdata wants it."""

    def ends(self) -> None:
        self.at, self.epoch = 0, self.epoch + 1


class Numbers(SayingIterator):
    """An iterator that says where it stands."""

    def __next__(self) -> Any:
        return super().__next__(), torch.rand(1)


class IteratorSays(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        info = get_worker_info()
        return Numbers(range(self.length) if info is None else range(info.id, self.length, info.num_workers))


class SaysNothing(IteratorSays):
    def __iter__(self) -> Any:
        for number, drawn in super().__iter__():
            yield number, drawn, random.random()


class DrawsAtFirst(IteratorSays):
    """It draws when it is iterated."""

    def __iter__(self) -> Any:
        first = torch.rand(1).item()
        return ((number, first) for number, _ in super().__iter__())


DATASETS: dict[str, Any] = {
    each.__name__: each for each in (Augmented, Counts, Stays, BeginsAnew, IteratorSays, SaysNothing)
}


@dataclass(frozen=True)
class Config:
    """One configuration in plain values, so that a failure prints all there is to know."""

    dataset: str
    length: int
    batch_size: int | None
    drop_last: bool
    explicit: bool
    sampler: str
    num_workers: Any
    schedule: Any
    persistent: bool
    prefetch: int
    seed: int

    @staticmethod
    def drawn(seed: int) -> Config:
        draw = random.Random(seed)
        schedule = draw.choice(("dynamic", "round_robin", SAVED, SAVED))
        size = draw.choice((1, 2, 3, 4, None))
        return Config(
            # What a process has read says nothing where any worker may read it.
            dataset=draw.choice(["Augmented"] * 8 + [*DATASETS][1 + (schedule == "dynamic") :]),
            length=draw.choice((2, 7, 14, 20, 23)),
            batch_size=size,
            drop_last=size is not None and draw.random() < 0.3,
            explicit=draw.random() < 0.6,
            sampler=draw.choice(list(ZOO)),
            num_workers=draw.choice((0, 0, 1, 2, 3)),
            schedule=schedule,
            persistent=draw.random() < 0.6,
            prefetch=draw.choice((1, 2, 3)),
            seed=seed,
        )

    @property
    def exact(self) -> bool:
        """Whether random numbers are the same too: those of workers have no seed of their own otherwise."""
        return self.schedule != "round_robin" or self.num_workers == 0

    def elsewhere(self, draw: random.Random) -> Config:
        """Another configuration that goes on with the same batches."""
        if self.dataset != "Augmented" or self.schedule != "dynamic":
            return self
        return replace(self, num_workers=draw.choice((0, 1, 2, 3)), persistent=draw.random() < 0.5)

    def loader(self, seed: int) -> StatefulDataLoader[Any]:
        generator = torch.Generator().manual_seed(seed) if self.explicit else None
        given: dict[str, Any] = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        dataset = DATASETS[self.dataset](self.length)
        if isinstance(dataset, Augmented):
            dataset.draws_own = self.schedule is SAVED
            given = arguments(self.sampler, self.length, generator, **given)
        if self.num_workers:
            given |= {"persistent_workers": self.persistent, "prefetch_factor": self.prefetch}
        given |= {"num_workers": self.num_workers, "schedule": self.schedule, "generator": generator}
        return StatefulDataLoader(dataset, **given)


class Stop(NamedTuple):
    """Where a run may be stopped: between epochs or in one, with the state, and the user's generators."""

    position: Any
    between: bool
    state: str
    users: list[Any]


def stop_at(loader: StatefulDataLoader[Any], between: bool = False) -> Stop:
    users = [generators.state_of(each) for each in generators.GLOBAL.values()]
    return Stop(loader.position, between, json.dumps(loader.state_dict()), users)


def go_on(loader: StatefulDataLoader[Any], stop: Stop) -> StatefulDataLoader[Any]:
    loader.load_state_dict(json.loads(stop.state))
    for each, state in zip(generators.GLOBAL.values(), stop.users, strict=True):
        generators.set_state(each, state)
    return loader


def plain(batch: Any) -> list[Any]:
    return [getattr(field, "tolist", lambda field=field: field)() for field in batch]


def indices(batches: Iterable[Any]) -> list[Any]:
    return [plain(batch)[0] for batch in batches]


def tell_epoch(loader: StatefulDataLoader[Any], epoch: int) -> None:
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


def rest(loader: StatefulDataLoader[Any], stops: list[Stop]) -> list[list[Any]]:
    """The batches of this epoch and of those that come; and where the run might be stopped on the way."""
    epochs: list[list[Any]] = []
    while loader.position.epoch < EPOCHS:
        if epochs:
            tell_epoch(loader, loader.position.epoch)
        epochs.append([])
        iterator = iter(loader)
        stops.append(stop_at(loader))
        for batch in iterator:
            epochs[-1].append(plain(batch))
            stops.append(stop_at(loader))
        stops.append(stop_at(loader, between=True))
    loader.close()
    return epochs


@seeds(1, 20)
@pytest.mark.filterwarnings("ignore:Neither the dataset nor its iterator")
def test_a_drawn_run_goes_on_from_anywhere(seed: int, request: pytest.FixtureRequest) -> None:
    config, every = Config.drawn(seed), request.config.getoption("--seeds")
    seed_all(seed)
    loader = config.loader(seed)
    stops = [stop_at(loader, between=True)]
    epochs = rest(loader, stops)
    draw = random.Random(seed)
    for first in stops if every else draw.sample(stops, min(3, len(stops))):
        chain = [first]
        while chain[-1].position.epoch < EPOCHS:
            epoch, at, _ = chain[-1].position
            other = config.elsewhere(draw)
            seed_all(99)
            loader = other.loader(77)
            if chain[-1].between or draw.random() < 0.5:
                tell_epoch(loader, epoch)
            on_the_way: list[Stop] = []
            found = rest(go_on(loader, chain[-1]), on_the_way)
            wanted = [epochs[epoch][at:], *epochs[epoch + 1 :]]
            said = f"{config} from {[stop[:2] for stop in chain]} with {other.num_workers} workers"
            assert list(map(indices, found)) == list(map(indices, wanted)), said
            assert found == wanted or not config.exact, said
            if len(chain) == 3 or draw.random() < 0.4:
                break
            chain.append(draw.choice(on_the_way))


def seeded(dataset: Any, *args: Any, seed: int = 1, schedule: Any = "dynamic", **given: Any) -> Any:
    """A loader with a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    return StatefulDataLoader(dataset, *args, generator=generator, schedule=schedule, **given)


def resumed(loader: Any, state: dict[str, Any]) -> Any:
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


@thorough(but={"workers": (2, 1), "in_order": True})
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("workers", [(0, 2), (2, 0), (2, 1)])
def test_nothing_that_was_handed_out_is_loaded_again(workers: tuple[int, int], in_order: bool) -> None:
    given: dict[str, Any] = {"shuffle": True, "in_order": in_order}
    first = seeded(Augmented(60), 4, num_workers=workers[0], **given)
    iterator = iter(first)
    handed_out = [index for _ in range(7) for index in next(iterator)[0].tolist()]
    state = first.state_dict()
    first.close()
    second = resumed(seeded(Augmented(60), 4, seed=2, num_workers=workers[1], **given), state)
    left = [index for batch in indices(second) for index in batch]
    second.close()
    assert sorted(handed_out + left) == list(range(60))
    reads = second.dataset.reads
    assert reads[handed_out].sum() == 0
    assert (reads[left] == 1).all()


def test_what_came_out_of_order_does_not_come_again_with_order() -> None:
    class Late(Dataset):  # type: ignore[type-arg]
        """Sample 0 comes when the gate is open."""

        gate = torch.zeros(1, dtype=torch.int64).share_memory_()

        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> int:
            while index == 0 and not self.gate[0]:
                os.sched_yield()
            return index

    def loader(in_order: bool) -> StatefulDataLoader[Any]:
        return StatefulDataLoader(
            Late(), batch_size=None, num_workers=2, prefetch_factor=8, in_order=in_order
        )

    first = loader(in_order=False)
    iterator = iter(first)
    handed_out = [int(next(iterator)) for _ in range(5)]
    state = first.state_dict()
    Late.gate += 1
    first.close()
    for in_order in (True, False):
        left = [int(item) for item in resumed(loader(in_order), state)]
        assert sorted(handed_out + left) == list(range(30))
        assert not in_order or left == sorted(left)


@thorough(but={"workers": 1})
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_stream_that_cannot_say_where_it_stands_is_read_again_with_a_warning(workers: int) -> None:
    first, second = (
        seeded(SaysNothing(23), 3, schedule="round_robin", num_workers=workers) for _ in range(2)
    )
    iterator = iter(first)
    stopped = [next(iterator) for _ in range(4)] and stop_at(first)
    left = list(map(plain, iterator))
    with pytest.warns(UserWarning, match="4 batches that were handed out before are read again"):
        iterator = iter(go_on(second, stopped))
    assert list(map(plain, iterator)) == left


@thorough(after=1)
@pytest.mark.parametrize("staged", [{"device": ToDevice("cpu", prefetch=3)}, {}], ids=str)
def test_what_was_staged_does_not_count_and_errors_keep_their_positions(staged: dict[str, Any]) -> None:
    class Fails(Augmented):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise KeyError("no sample 5")
            return index

    first = StatefulDataLoader(Fails(12), batch_size=None, num_workers=2, schedule="dynamic", **staged)
    iterator, seen = iter(first), []
    states = [first.state_dict()]
    while True:
        try:
            seen.append(int(next(iterator)))
        except KeyError:
            seen.append(5)
        except StopIteration:
            break
        states.append(first.state_dict())
    assert seen == list(range(12))
    for handed_out in (0, 4, 5, 6, 7, 12):
        second = resumed(
            StatefulDataLoader(Fails(12), batch_size=None, schedule="dynamic"), states[handed_out]
        )
        assert second.position.batch == handed_out
        left = iter(second)
        if handed_out == 5:
            with pytest.raises(KeyError):
                next(left)
            left = iter([next(left)])
        wanted = handed_out + (handed_out == 5)
        assert next(left, None) == (None if wanted == 12 else wanted)


@thorough(but={"workers": 2, "kind": "says"})
@pytest.mark.parametrize("kind", ["replacement", "says"])
@pytest.mark.parametrize("workers", [0, 2])
def test_states_that_other_threads_ask_for_meanwhile_are_those_of_one_moment(workers: int, kind: str) -> None:
    def loader(seed: int) -> StatefulDataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        given: Any = arguments(kind, 23, generator, generator=generator, schedule="dynamic")
        return StatefulDataLoader(
            Augmented(23), 2, num_workers=workers, persistent_workers=workers > 0, **given
        )

    def ask() -> None:
        while not stopped.wait(0.0005):  # else they starve the loop on a busy machine
            told.add(json.dumps(first.state_dict()))

    first, told, stopped = loader(1), set[str](), threading.Event()
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    epochs = [indices(first) for _ in range(2)]
    assert all(map(len, epochs))
    stopped.set()
    for thread in threads:
        thread.join()
    epochs.append(indices(first))
    first.close()
    for state in random.Random(workers).sample(sorted(told), min(len(told), 4)):
        second = resumed(loader(2), json.loads(state))
        epoch, batch, _ = second.position
        left = [indices(second) for _ in epochs[epoch : epoch + 2]]
        assert left == [epochs[epoch][batch:], *epochs[epoch + 1 : epoch + 2]], (epoch, batch)
        second.close()


@thorough(but={"workers": 2})
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_from_before_the_first_epoch_has_the_loaders_own_generator(workers: int) -> None:
    first, second = (
        seeded(Augmented(10), 2, seed=seed, shuffle=True, num_workers=workers) for seed in (1, 2)
    )
    state = first.state_dict()
    assert resumed(second, state).position == (0, 0, 0)
    torch.rand(3)  # whatever is drawn meanwhile
    assert distinct(indices(first)) == indices(second)


@thorough(but={"workers": 2})
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Stays, SaysNothing])
def test_where_a_broken_epoch_has_left_a_stream_is_not_guessed(kind: Any, workers: int) -> None:
    loader = StatefulDataLoader(kind(9), 2, num_workers=workers, persistent_workers=workers > 0)
    next(iter(loader))
    iterator = iter(loader)
    with pytest.raises(ValueError, match=r"field 'workers\.0': the epoch before was broken off"):
        resumed(StatefulDataLoader(kind(9), 2, num_workers=workers), loader.state_dict())
    for _ in range(workers + 1):
        next(iterator)
    resumed(StatefulDataLoader(kind(9), 2, num_workers=workers), loader.state_dict())
    loader.close()


@thorough(after=1)
@pytest.mark.parametrize("kind", [Augmented, DrawsAtFirst])
def test_workers_that_live_on_begin_from_what_was_loaded(kind: Any) -> None:
    def loader() -> Any:
        return seeded(kind(9), 2, seed=3, schedule=SAVED, num_workers=2, persistent_workers=True)

    first = loader()
    iterator = iter(first)
    states = [first.state_dict()]
    epochs = [distinct(map(plain, iterator))]
    states.append(first.state_dict())
    epochs.append(list(map(plain, first)))
    for state, wanted in zip(states, epochs, strict=True):
        for other in (first, fresh := loader()):  # the first one while its workers are there
            assert list(map(plain, resumed(other, state))) == wanted
        fresh.close()
    first.close()


def test_inside_of_iter_a_signal_handler_gets_an_error_and_another_thread_waits() -> None:
    class Asks(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            thread.start()
            with pytest.raises(RuntimeError, match=r"inside of iter\(\): call it after"):
                loader.state_dict()
            assert not states
            return iter(range(3))

    states: list[Any] = []
    loader: StatefulDataLoader[Any] = StatefulDataLoader(Asks(), generator=torch.Generator())
    thread = threading.Thread(target=lambda: states.append(loader.state_dict()))
    assert len(list(loader)) == 3
    thread.join()
    assert len(states) == 1


def test_a_child_forked_while_another_thread_is_inside_of_iter_is_not_held_up() -> None:
    class Waits(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            began.set()
            assert goes_on.wait(60)
            return iter(range(3))

    def asks() -> None:
        signal.alarm(60)
        assert loader.state_dict()["_num_yielded"] == 0

    began, goes_on = threading.Event(), threading.Event()
    loader: StatefulDataLoader[Any] = StatefulDataLoader(Waits())
    thread = threading.Thread(target=lambda: list(loader))
    thread.start()
    assert began.wait(60)
    code = end_of(fork(asks))
    goes_on.set()
    thread.join()
    assert code == 0
