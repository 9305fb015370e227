"""A run that stops before, after and between batches and epochs goes on with the same bits, where the
generators of workers are saved: configurations drawn from a seed.

More than the default seeds:

    FASTQ_RESUME_EVERYWHERE_SEEDS=0:100 python -m pytest tests/end_to_end/test_resume_everywhere.py -k drawn
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, get_worker_info

from fastq_loader import DataLoader, RoundRobin
from tests.end_to_end.test_resume import Keeps, globals_now, restore
from tests.support.loaders import seed_all

pytestmark = pytest.mark.processes
EPOCHS = 3


class Augmented(Dataset):  # type: ignore[type-arg]
    """Samples draw from all generators, and from one of the dataset's own."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.own = random.Random(5)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        own = self.own.random() if get_worker_info() else 0  # without workers nobody saves it
        return index, torch.rand(1), random.random(), np.random.rand(), own


class Counts(Augmented):
    """It has a state: reads so far, in this process."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return *super().__getitem__(index), self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Each worker reads a part, which may be longer in each epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.at = self.epoch = 0
        self.told = False

    def __iter__(self) -> Iterator[Any]:
        if not self.told:
            self.at = 0
        self.told = False
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.at * step < self.length + self.epoch:
            self.at += 1
            yield first + (self.at - 1) * step, self.epoch, torch.rand(1), random.random()
        self.ends()

    def ends(self) -> None:
        """It stays where it is."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch, self.told = state["at"], state["epoch"], True


class Stays(Stream):
    pass


class BeginsAnew(Stream):
    """The same, and ends at the beginning, as torchdata wants it."""

    def ends(self) -> None:
        self.at, self.epoch = 0, self.epoch + 1


class Numbers:
    """An iterator that says where it stands."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> Any:
        if self.at >= len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1], torch.rand(1)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


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


DATASETS = {each.__name__: each for each in (Augmented, Counts, Stays, BeginsAnew, IteratorSays, SaysNothing)}


@dataclass(frozen=True)
class Config:
    """One configuration in plain values, so that a failure prints all there is to know."""

    dataset: str
    length: int
    batch_size: int | None
    drop_last: bool
    explicit: bool
    sampler: str
    num_workers: int
    persistent: bool
    prefetch: int
    seed: int

    @staticmethod
    def drawn(seed: int) -> Config:
        draw = random.Random(seed)
        size = draw.choice((1, 2, 3, None))
        return Config(
            dataset=draw.choice(["Augmented", *DATASETS]),
            length=draw.choice((2, 5, 9, 14)),
            batch_size=size,
            drop_last=size is not None and draw.random() < 0.3,
            explicit=draw.random() < 0.7,
            sampler=draw.choice(("sequential", "shuffle", "replacement", "stateful")),
            num_workers=draw.choice((0, 1, 2, 3)),
            persistent=draw.random() < 0.7,
            prefetch=draw.choice((1, 2, 3)),
            seed=seed,
        )

    def loader(self, seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed) if self.explicit else None
        given: dict[str, Any] = {}
        if issubclass(DATASETS[self.dataset], Dataset) and not issubclass(
            DATASETS[self.dataset], IterableDataset
        ):
            items: Any = range(self.length)
            given = {
                "sequential": {},
                "shuffle": {"shuffle": True},
                "replacement": {"sampler": RandomSampler(items, replacement=True, generator=generator)},
                "stateful": {"sampler": Keeps(self.length)},
            }[self.sampler]
        if self.num_workers:
            given |= {"persistent_workers": self.persistent, "prefetch_factor": self.prefetch}
        return DataLoader(
            DATASETS[self.dataset](self.length),
            self.batch_size,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            generator=generator,
            schedule=RoundRobin(save_generators=True),
            **given,
        )


def saved(loader: DataLoader[Any]) -> tuple[str, list[Any]]:
    return json.dumps(loader.state_dict()), globals_now()


def rest(loader: DataLoader[Any], stops: list[Any] | None = None) -> list[list[Any]]:
    """The batches of this epoch and of those that come; and the states on the way."""
    epochs: list[list[Any]] = []
    stops = [] if stops is None else stops
    while loader.position.epoch < EPOCHS:
        epochs.append([])
        iterator = iter(loader)
        stops.append((loader.position, "begun", saved(loader)))
        for batch in iterator:
            epochs[-1].append([getattr(field, "tolist", lambda field=field: field)() for field in batch])
            stops.append((loader.position, "batch", saved(loader)))
        stops.append((loader.position, "between", saved(loader)))
    loader.close()
    return epochs


SEEDS = range(*map(int, os.environ.get("FASTQ_RESUME_EVERYWHERE_SEEDS", "0:8").split(":")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:Neither the dataset nor its iterator"
)
def test_a_drawn_run_goes_on_with_the_same_bits_from_everywhere(seed: int) -> None:
    config, every = Config.drawn(seed), "FASTQ_RESUME_EVERYWHERE_SEEDS" in os.environ
    seed_all(seed)
    loader = config.loader(seed)
    stops: list[Any] = [(loader.position, "before", saved(loader))]
    epochs = rest(loader, stops)
    draw = random.Random(seed)
    for stop in stops if every else draw.sample(stops, min(3, len(stops))):
        chain = [stop]
        while True:
            position, _, (state, users) = chain[-1]
            if position.epoch == EPOCHS:
                break
            seed_all(99)
            loader = config.loader(77)
            loader.load_state_dict(json.loads(state))
            restore(users)
            on_the_way: list[Any] = []
            got = rest(loader, on_the_way)
            wanted = [epochs[position.epoch][position.batch :], *epochs[position.epoch + 1 :]]
            assert got == wanted, f"{config} from {[(each[0], each[1]) for each in chain]}"
            if len(chain) == 3 or draw.random() < 0.4:
                break
            chain.append(draw.choice(on_the_way))


@pytest.mark.parametrize("workers", [0, 2])
def test_states_that_other_threads_ask_for_meanwhile_are_those_of_one_moment(workers: int) -> None:
    def loader(seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(
            Augmented(23),
            2,
            sampler=RandomSampler(range(23), replacement=True, num_samples=70, generator=generator),
            num_workers=workers,
            generator=generator,
            schedule="dynamic",
            persistent_workers=workers > 0,
        )

    def ask() -> None:
        while not stopped.is_set():
            told.add(json.dumps(first.state_dict()))

    first, told, stopped = loader(1), set[str](), threading.Event()
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    epochs = [[batch[0].tolist() for batch in first] for _ in range(3)]
    stopped.set()
    for thread in threads:
        thread.join()
    epochs.append([batch[0].tolist() for batch in first])
    first.close()
    for state in random.Random(workers).sample(sorted(told), min(len(told), 16)):
        second = loader(2)
        second.load_state_dict(json.loads(state))
        epoch, batch, _ = second.position
        rest = [[batch[0].tolist() for batch in second] for _ in epochs[epoch : epoch + 2]]
        assert rest == [epochs[epoch][batch:], *epochs[epoch + 1 : epoch + 2]], (epoch, batch)
        second.close()


def test_a_state_from_before_the_first_epoch_fixes_it() -> None:
    for workers in (0, 2):
        first = DataLoader(Counts(10), 2, shuffle=True, num_workers=workers, schedule="dynamic")
        state = json.dumps(first.state_dict())
        torch.rand(3)  # whatever is drawn meanwhile
        batches = [batch[0].tolist() for batch in first]
        second = DataLoader(Counts(10), 2, shuffle=True, num_workers=workers, schedule="dynamic")
        second.load_state_dict(json.loads(state))
        assert [batch[0].tolist() for batch in second] == batches


def test_an_object_that_is_its_own_iterator_is_put_back_to_its_beginning() -> None:
    class Own(Numbers, IterableDataset):  # type: ignore[type-arg]
        pass

    for begun in (False, True):
        dataset = Own(range(6))
        first = DataLoader(dataset, 2)
        if begun:
            iterator = iter(first)
        state = first.state_dict()
        if not begun:
            iterator = iter(first)
        batches = [batch[0].tolist() for batch in iterator]
        assert len(batches) == 3
        second = DataLoader(dataset, 2)
        second.load_state_dict(state)
        assert [batch[0].tolist() for batch in second] == batches


@pytest.mark.parametrize("workers", [0, 2])
def test_where_a_broken_epoch_has_left_a_stream_is_not_guessed(workers: int) -> None:
    loader = DataLoader(Stays(9), 2, num_workers=workers, persistent_workers=workers > 0)
    next(iter(loader))
    iterator = iter(loader)
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"field 'workers\.0': the epoch before was broken off"):
        DataLoader(Stays(9), 2, num_workers=workers).load_state_dict(state)
    for _ in range(workers + 1):
        next(iterator)
    DataLoader(Stays(9), 2, num_workers=workers).load_state_dict(loader.state_dict())
    loader.close()


class DrawsAtFirst(IteratorSays):
    """It draws when it is iterated."""

    def __iter__(self) -> Any:
        first = torch.rand(1).item()
        return ((number, first) for number, _ in super().__iter__())


@pytest.mark.parametrize("kind", [Augmented, DrawsAtFirst])
def test_workers_that_live_on_begin_from_what_was_loaded(kind: Any) -> None:
    def loader() -> DataLoader[Any]:
        given: dict[str, Any] = {"schedule": RoundRobin(save_generators=True), "persistent_workers": True}
        return DataLoader(kind(9), 2, num_workers=2, generator=torch.Generator().manual_seed(3), **given)

    def epoch(of: Any) -> list[Any]:
        return [[field.tolist() for field in batch] for batch in of]

    first = loader()
    iterator = iter(first)
    states = [first.state_dict()]
    epochs = [epoch(iterator)]
    states.append(first.state_dict())
    epochs.append(epoch(first))
    for state, wanted in zip(states, epochs, strict=True):
        first.load_state_dict(state)  # while its workers are there
        assert epoch(first) == wanted
        second = loader()
        second.load_state_dict(state)
        assert epoch(second) == wanted
        second.close()
    first.close()


class Asks:
    """An iterator, in the middle of whose draws somebody asks."""

    def __init__(self, drawn: Any, ask: Any) -> None:
        self.drawn, self.ask = drawn, ask

    def __iter__(self) -> Asks:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.drawn)
        finally:
            self.ask()


@pytest.mark.parametrize("replacement", [False, True])
def test_a_state_from_the_middle_of_a_draw_is_that_of_before(replacement: bool) -> None:
    def loader(seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        sampler = RandomSampler(range(9), replacement, 70 if replacement else None, generator)
        return DataLoader(Augmented(9), 2, sampler=sampler, generator=generator)

    first, states = loader(1), []
    iterator = iter(first)
    source = iterator._sampler_iter
    source.drawn = Asks(source.drawn, lambda: states.append(json.dumps(first.state_dict())))
    epochs = [[batch[0].tolist() for batch in epoch] for epoch in (iterator, first)]
    for handed_out, state in enumerate(states):
        second = loader(2)
        second.load_state_dict(json.loads(state))
        assert second.position.batch == handed_out
        wanted = [epochs[0][handed_out:], epochs[1]]
        assert [[batch[0].tolist() for batch in second] for _ in range(2)] == wanted, handed_out


def test_while_an_epoch_begins_the_state_is_that_of_before() -> None:
    class AsksAtFirst(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            states.append(loader.state_dict())
            return iter(range(3))

    states: list[Any] = []
    loader: DataLoader[Any] = DataLoader(AsksAtFirst(), generator=torch.Generator())
    for _ in range(2):
        before = loader.state_dict()
        assert len(list(loader)) == 3
        assert states.pop() == before
