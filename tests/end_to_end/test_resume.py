"""A run that is stopped goes on as if it had not been: configurations drawn from a seed, and hard cases.

More than the default seeds:

    FASTQ_RESUME_SEEDS=0:500 python -m pytest tests/end_to_end/test_resume.py -k drawn
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from fastq_loader import DataLoader, PermutationSampler, Processes, ToDevice
from fastq_loader.reading import generators
from tests.conftest import run_script
from tests.support.loaders import seed_all

pytestmark = pytest.mark.processes


class Augmented(Dataset):  # type: ignore[type-arg]
    """Every sample draws from all three generators, and each of its reads is counted."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return index, torch.rand(2), random.random(), np.random.rand()


class Parts(IterableDataset):  # type: ignore[type-arg]
    """Each worker reads every n-th number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.length, step):
            yield number, torch.rand(1), random.random()


class SaysWhere(Parts):
    """The same, and can say where it stands."""

    at: int | None = None
    told = False

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        at = self.at if self.told and self.at is not None else first
        self.told = False
        while at < self.length:
            self.at = at = at + step
            yield at - step, torch.rand(1), random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.told = state["at"], True


class Shuffles(Sampler[int]):
    """As users write it: with Python's generator, which all code shares."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.shuffle(order)
        yield from order


class Keeps(Shuffles):
    """One with a state of its own."""

    at = epoch_now = 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch_now).permutation(self.length).tolist()
        while self.at < self.length:
            self.at += 1
            yield order[self.at - 1]
        self.at, self.epoch_now = 0, self.epoch_now + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch_now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch_now = state["at"], state["epoch"]


DATASETS: dict[str, Callable[[int], Any]] = {"map": Augmented, "stream": Parts, "says where": SaysWhere}
SAMPLERS: dict[str, Callable[[int, Any], dict[str, Any]]] = {
    "sequential": lambda n, g: {},
    "shuffle": lambda n, g: {"shuffle": True},
    "replacement": lambda n, g: {"sampler": RandomSampler(range(n), replacement=True, generator=g)},  # type: ignore[arg-type]
    "weighted": lambda n, g: {"sampler": WeightedRandomSampler([1.0] * n, n, generator=g)},
    "subset": lambda n, g: {"sampler": SubsetRandomSampler(range(0, n, 2), generator=g)},
    "distributed": lambda n, g: {"sampler": DistributedSampler(range(n), 2, 1)},  # type: ignore[arg-type]
    "computed": lambda n, g: {"sampler": PermutationSampler(n, 3)},
    "user's": lambda n, g: {"sampler": Shuffles(n)},
    "user's batches": lambda n, g: {"batch_sampler": BatchSampler(Shuffles(n), 3, False), "batch_size": 1},
    "stateful": lambda n, g: {"sampler": Keeps(n)},
}
EPOCHS = 3


@dataclass(frozen=True)
class Config:
    """One configuration in plain values, so that a failure prints all there is to know."""

    dataset: str
    length: int
    batch_size: int
    drop_last: bool
    explicit: bool
    sampler: str
    num_workers: int
    schedule: str
    persistent: bool
    seed: int

    @staticmethod
    def drawn(seed: int) -> Config:
        draw = random.Random(seed)
        return Config(
            dataset=draw.choice(["map"] * 4 + ["stream", "says where"]),
            length=draw.choice((7, 20, 23)),
            batch_size=draw.choice((1, 3, 4)),
            drop_last=draw.random() < 0.3,
            explicit=draw.random() < 0.5,
            sampler=draw.choice(list(SAMPLERS)),
            num_workers=draw.choice((0, 0, 1, 2, 3)),
            schedule=draw.choice(("dynamic", "dynamic", "round_robin")),
            persistent=draw.random() < 0.5,
            seed=seed,
        )

    @property
    def exact(self) -> bool:
        """Whether random numbers are the same too: those of workers have no seed of their own otherwise."""
        return self.schedule == "dynamic" or self.num_workers == 0

    def loader(self, seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed) if self.explicit else None
        given: dict[str, Any] = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        if self.dataset == "map":
            given |= SAMPLERS[self.sampler](self.length, generator)
        if "batch_sampler" in given:
            del given["drop_last"]
        return DataLoader(
            DATASETS[self.dataset](self.length),
            num_workers=self.num_workers,
            generator=generator,
            schedule=self.schedule,
            persistent_workers=self.persistent and self.num_workers > 0,
            **given,
        )


def globals_now() -> list[Any]:
    return [generators.state_of(each) for each in generators.GLOBAL.values()]


def restore(states: list[Any]) -> None:
    for each, state in zip(generators.GLOBAL.values(), states, strict=True):
        generators.set_state(each, state)


def plain(batch: Any) -> list[Any]:
    return [field.tolist() for field in batch]


def tell_epoch(loader: DataLoader[Any], epoch: int) -> None:
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


def uninterrupted(config: Config) -> tuple[list[Any], list[Any]]:
    """The batches of each epoch; and (epoch, batch, state, the user's generators) after every batch, before
    the first (0), and when the epoch was over (-1)."""
    seed_all(config.seed)
    loader = config.loader(config.seed)
    epochs: list[Any] = []
    stops = [(0, -1, json.dumps(loader.state_dict()), globals_now())]
    for epoch in range(EPOCHS):
        tell_epoch(loader, epoch)
        iterator, batches = iter(loader), []
        stops.append((epoch, 0, json.dumps(loader.state_dict()), globals_now()))
        for batch in iterator:
            batches.append(plain(batch))
            stops.append((epoch, len(batches), json.dumps(loader.state_dict()), globals_now()))
        epochs.append(batches)
        stops.append((epoch + 1, -1, json.dumps(loader.state_dict()), globals_now()))
    loader.close()
    return epochs, [stop for stop in stops if stop[0] < EPOCHS]


def resumed(config: Config, epoch: int, stop: Any, draw: random.Random) -> list[Any]:
    """The rest, with more interruptions on the way."""
    _, at, state, users = stop
    seed_all(99)
    loader = config.loader(12345)
    if at == -1 or draw.random() < 0.5:
        tell_epoch(loader, epoch)
    loader.load_state_dict(json.loads(state))
    restore(users)
    epochs: list[Any] = []
    for number in range(epoch, EPOCHS):
        if number > epoch:
            tell_epoch(loader, number)
        batches: list[Any] = []
        over = False
        while not over:
            over = True
            for batch in loader:
                batches.append(plain(batch))
                if draw.random() < 0.1:
                    state, users = json.dumps(loader.state_dict()), globals_now()
                    loader.close()
                    seed_all(98)
                    loader = config.loader(77)
                    loader.load_state_dict(json.loads(state))
                    restore(users)
                    over = False
                    break
        epochs.append(batches)
    loader.close()
    return epochs


def indices(epochs: list[Any]) -> list[Any]:
    return [[batch[0] for batch in batches] for batches in epochs]


SEEDS = range(*map(int, os.environ.get("FASTQ_RESUME_SEEDS", "0:12").split(":")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:Neither the dataset nor its iterator"
)
def test_a_drawn_run_goes_on_from_anywhere(seed: int) -> None:
    config = Config.drawn(seed)
    epochs, stops = uninterrupted(config)
    draw = random.Random(seed)
    for stop in draw.sample(stops, 2):
        epoch, at = stop[:2]
        other = config
        if config.dataset == "map" and config.schedule == "dynamic":
            other = replace(config, num_workers=draw.choice((0, 1, 2, 3)), persistent=draw.random() < 0.5)
        rest = resumed(other, epoch, stop, draw)
        wanted = [epochs[epoch][max(0, at) :], *epochs[epoch + 1 :]]
        told = {f.name: getattr(config, f.name) for f in fields(config)}
        assert indices(rest) == indices(wanted), f"{told} from {epoch, at} with {other.num_workers} workers"
        if config.exact:
            assert rest == wanted, f"{told} from {epoch, at} with {other.num_workers} workers"


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("workers", [(0, 2), (2, 0), (2, 1)])
def test_nothing_that_was_handed_out_is_loaded_again(workers: tuple[int, int], in_order: bool) -> None:
    def loader(number: int, seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(
            Augmented(60),
            4,
            shuffle=True,
            generator=generator,
            num_workers=number,
            in_order=in_order,
            schedule="dynamic",
        )

    first = loader(workers[0], 1)
    iterator = iter(first)
    handed_out = [index for _ in range(7) for index in next(iterator)[0].tolist()]
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    second = loader(workers[1], 2)
    second.load_state_dict(state)
    rest = [index for batch in second for index in batch[0].tolist()]
    second.close()
    assert sorted(handed_out + rest) == list(range(60))
    reads = second.dataset.reads  # type: ignore[attr-defined]
    assert reads[handed_out].sum() == 0
    assert (reads[rest] == 1).all()


def test_what_came_out_of_order_does_not_come_again_with_order() -> None:
    class Late(Dataset):  # type: ignore[type-arg]
        """Sample 0 comes when ten others have come."""

        gate = torch.zeros(1, dtype=torch.int64).share_memory_()

        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> int:
            while index == 0 and self.gate[0] < 10:
                os.sched_yield()
            self.gate += 1
            return index

    def loader(**keywords: Any) -> DataLoader[Any]:
        return DataLoader(Late(), batch_size=None, num_workers=2, prefetch_factor=8, **keywords)

    first = loader(in_order=False)
    iterator = iter(first)
    handed_out = [int(next(iterator)) for _ in range(5)]
    state = first.state_dict()
    first.close()
    assert state["beyond"] == sorted(handed_out)
    assert 0 not in handed_out
    for in_order in (True, False):
        second = loader(in_order=in_order)
        second.load_state_dict(state)
        rest = [int(item) for item in second]
        assert sorted(handed_out + rest) == list(range(30))
        assert not in_order or rest == sorted(rest)


SCRIPT = """
import json, os, random
import numpy as np, torch
from fastq_loader import DataLoader
from tests.end_to_end.test_resume import Augmented, plain
from tests.support.loaders import seed_all

stop, workers, state = {stop}, {workers}, {state!r}
if state is None:
    seed_all(5)
    generator = torch.Generator().manual_seed(1)
else:
    generator = torch.Generator()
loader = DataLoader(
    Augmented(70), 4, shuffle=True, num_workers=workers, schedule="dynamic", generator=generator
)
if state is not None:
    loader.load_state_dict(state)
for epoch in range(loader.position.epoch, 2):
    for batch in loader:
        print(json.dumps([plain(batch), loader.state_dict()]), flush=True)
        if stop >= 0 and loader.position.batches == stop:
            os.kill(os.getpid(), 9)
"""


def run(stop: int, workers: int, state: Any = None) -> list[Any]:
    done = run_script(SCRIPT.format(stop=stop, workers=workers, state=state), timeout=100, warm=True)
    assert done.returncode == (-signal.SIGKILL if stop >= 0 else 0), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@functools.cache
def never_stopped() -> list[Any]:
    return [batch for batch, _ in run(-1, 0)]


@pytest.mark.parametrize(("stop", "workers"), [(1, (2, 3)), (18, (0, 2)), (19, (1, 0))])
def test_a_killed_process_goes_on_in_another_with_other_workers(stop: int, workers: tuple[int, int]) -> None:
    first = run(stop, workers[0])
    assert len(first) == stop
    second = run(-1, workers[1], first[-1][1])
    assert [batch for batch, _ in first + second] == never_stopped()


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_stream_that_cannot_say_where_it_stands_is_read_again_with_a_warning(workers: int) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Parts(23), 3, num_workers=workers, generator=torch.Generator().manual_seed(3))

    seed_all(4)
    first, batches = loader(), []
    for batch in first:
        batches.append(plain(batch))
        if len(batches) == 4:
            state, users = json.dumps(first.state_dict()), globals_now()
    seed_all(5)
    restore(users)
    second = loader()
    second.load_state_dict(json.loads(state))
    with pytest.warns(UserWarning, match="4 batches that were handed out before are read again"):
        iterator = iter(second)
    assert [plain(batch) for batch in iterator] == batches[4:]


class KeepsCount(Augmented):
    """A dataset with indices that has a state: reads so far, of this process."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return index, self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_with_indices_is_asked_too(workers: int) -> None:
    first = DataLoader(KeepsCount(20), 2, num_workers=workers)
    iterator = iter(first)
    batches = [plain(next(iterator)) for _ in range(4)]
    state = json.loads(json.dumps(first.state_dict()))
    batches += [plain(batch) for batch in iterator]
    second = DataLoader(KeepsCount(20), 2, num_workers=workers)
    second.load_state_dict(state)
    assert [plain(batch) for batch in second] == batches[4:]
    other = DataLoader(KeepsCount(20), 2, num_workers=1)
    with pytest.raises(ValueError, match=f"field 'num_workers': {workers} was saved, and the loader has 1"):
        other.load_state_dict(state)
    other.load_state_dict(state, ignore=("num_workers",))
    assert [plain(batch)[0] for batch in other] == [batch[0] for batch in batches[4:]]


def test_a_worker_may_die_in_a_resumed_epoch() -> None:
    def loader(seed: int) -> DataLoader[Any]:
        return DataLoader(
            Augmented(100),
            4,
            shuffle=True,
            num_workers=2,
            schedule="dynamic",
            workers=Processes(max_restarts=5),
            generator=torch.Generator().manual_seed(seed),
        )

    whole = [plain(batch) for batch in loader(1)]
    first = loader(1)
    iterator = iter(first)
    batches = [plain(next(iterator)) for _ in range(9)]
    second = loader(2)
    second.load_state_dict(first.state_dict())
    first.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        iterator = iter(second)
        batches.append(plain(next(iterator)))
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        batches += [plain(batch) for batch in iterator]
    assert batches == whole
    second.close()


def test_what_was_staged_does_not_count_and_errors_keep_their_positions() -> None:
    class Fails(Augmented):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise KeyError("no sample 5")
            return index

    for keywords in ({}, {"device": ToDevice("cpu", prefetch=3)}):
        first = DataLoader(Fails(12), batch_size=None, num_workers=2, schedule="dynamic", **keywords)  # type: ignore[arg-type]
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
            second = DataLoader(Fails(12), batch_size=None, schedule="dynamic")
            second.load_state_dict(states[handed_out])
            assert second.position.batch == handed_out
            left = iter(second)
            if handed_out == 5:
                with pytest.raises(KeyError):
                    next(left)
                left = iter([next(left)])
            wanted = handed_out + (handed_out == 5)
            assert next(left, None) == (None if wanted == 12 else wanted)


def test_an_epoch_that_cannot_begin_is_still_to_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = DataLoader(Augmented(20), 4, num_workers=1, schedule="dynamic")
    iterator = iter(first)
    next(iterator)
    second = DataLoader(Augmented(20), 4, num_workers=1, schedule="dynamic")
    second.load_state_dict(first.state_dict())
    first.close()
    with monkeypatch.context() as patched:
        patched.setattr(
            DataLoader, "_start_engine", lambda *_: (_ for _ in ()).throw(OSError("no descriptors"))
        )
        with pytest.raises(OSError, match="no descriptors"):
            iter(second)
    assert second.position == (0, 1, 1)
    assert len(list(second)) == 4
    assert second.position == (1, 0, 5)
