"""schedule="dynamic": the same bits whichever worker loads them, and a window that no batch holds up."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Container, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from fastq_loader import DataLoader, Dynamic, Processes, RoundRobin
from fastq_loader.ipc.claim_table import WORKERS
from fastq_loader.ipc.sockets import ConsumerSocket
from fastq_loader.memory import arena
from fastq_loader.scheduling.options import Schedule
from fastq_loader.workers import group
from tests.support.datasets import Backwards, Drawing

SIZE = 26

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


class Draws(Dataset):
    """A sample is its index and a draw of each of the three generators, after a random moment."""

    def __init__(self, jitter: float = 0.0, size: int = SIZE) -> None:
        self.jitter = jitter
        self.size = size
        self.own = random.Random()  # seeded by nobody: its draws are the jitter

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float, float]:
        if self.jitter:
            time.sleep(self.own.random() * self.jitter)
        return index, torch.rand(2), random.random(), float(np.random.rand())


def as_lists(batch: Any) -> Any:
    return [leaf.tolist() for leaf in batch]


def epochs(
    count: int, dataset: Any, workers: int, stop: int | None = None, **options: Any
) -> list[list[Any]]:
    """What some epochs gave, from one seed of the consumer's generators; the first ends at `stop`."""
    seed_everything(11)
    arguments = {"shuffle": "sampler" not in options, "schedule": "dynamic", **options}
    with DataLoader(dataset, batch_size=3, num_workers=workers, **arguments) as loader:
        first = [as_lists(batch) for batch in itertools.islice(iter(loader), stop)]
        return [first, *([as_lists(batch) for batch in loader] for _ in range(count - 1))]


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


# ---- the same bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_bits_do_not_depend_on_workers_prefetch_persistence_or_time(workers: int) -> None:
    alone = epochs(2, Draws(), 0)
    for prefetch, persistent in itertools.product((1, 4), (False, True)):
        options: Any = {"prefetch_factor": prefetch, "persistent_workers": persistent}
        assert epochs(2, Draws(jitter=0.004), workers, **options) == alone, options


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_bits_do_not_depend_on_the_start_method(method: str) -> None:
    assert epochs(1, Draws(), 2, multiprocessing_context=method) == epochs(1, Draws(), 0)


@pytest.mark.parametrize("window", [1, 2, 5, 64])
def test_bits_do_not_depend_on_the_window(window: int) -> None:
    assert epochs(1, Draws(jitter=0.003), 3, schedule=Dynamic(window=window)) == epochs(1, Draws(), 0)


def test_without_order_the_batches_are_the_same_ones() -> None:
    (free,), (ordered,) = epochs(1, Draws(jitter=0.004), 3, in_order=False), epochs(1, Draws(), 0)
    assert sorted(free) == sorted(ordered)


def test_epochs_differ_and_a_repeated_run_does_not() -> None:
    first, second = epochs(2, Draws(), 2)
    assert [row[1:] for row in first] != [row[1:] for row in second]
    assert epochs(2, Draws(), 2) == [first, second]


def test_batches_of_one_epoch_differ() -> None:
    class Same(Draws):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(0)[1:]

    (rows,) = epochs(1, Same(), 2)
    for position in range(3):
        assert len({repr(row[position]) for row in rows}) == len(rows)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_after_one_that_was_broken_off_is_the_one_without_workers(persistent: bool) -> None:
    options: Any = {"stop": 2, "persistent_workers": persistent}
    assert epochs(2, Draws(jitter=0.004), 2, **options) == epochs(2, Draws(), 0, stop=2)


@pytest.mark.parametrize("sampler", [Backwards, Drawing])
def test_other_samplers_draw_what_they_draw_without_workers(sampler: Any) -> None:
    alone = epochs(2, Draws(), 0, sampler=sampler(SIZE))
    for persistent in (False, True):
        assert epochs(2, Draws(), 2, sampler=sampler(SIZE), persistent_workers=persistent) == alone


def test_a_generator_of_the_users_is_drawn_from_as_without_workers() -> None:
    found = []
    for workers in (0, 2):
        generator = torch.Generator().manual_seed(5)
        batches = epochs(2, Draws(), workers, generator=generator)
        found.append((batches, generator.get_state().tolist()))
    assert found[0] == found[1]


class Stumbling:
    """A sampler whose third index is an error, and which goes on after it."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        self.given = 0
        return self

    def __next__(self) -> list[int]:
        self.given += 1
        if self.given == 3:
            raise LookupError("the third")
        if self.given > 6:
            raise StopIteration
        return [self.given]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_error_of_a_sampler_takes_a_number_as_its_batch_would(workers: int) -> None:
    def start(sampler: Any, workers: int) -> Iterator[Any]:
        torch.manual_seed(0)
        loader = DataLoader(Draws(), batch_sampler=sampler, num_workers=workers, schedule="dynamic")
        return map(as_lists, loader)

    expected = list(start([[1], [2], [9], [4], [5], [6]], 0))
    iterator = start(Stumbling(), workers)
    assert [next(iterator), next(iterator)] == expected[:2]
    with pytest.raises(LookupError, match="the third"):
        next(iterator)
    assert list(iterator) == expected[3:]


# ---- seeds ------------------------------------------------------------------------------------------


class Seeds(Dataset):
    """A sample is the worker's own idea of its seed, and a draw."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float]:
        info = get_worker_info()
        assert info is not None
        return info.seed, torch.rand(1).item()


def test_worker_info_has_the_seed_of_the_batch() -> None:
    rows = list(DataLoader(Seeds(), batch_size=None, num_workers=3, schedule="dynamic"))
    assert len({seed for seed, _ in rows}) == len(rows)
    for seed, draw in rows:
        assert torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() == draw


def test_what_an_init_function_seeds_has_no_effect() -> None:
    assert epochs(1, Draws(), 2, worker_init_fn=seed_everything) == epochs(1, Draws(), 0)


# ---- iterable datasets --------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Each worker has 7 samples of its own."""

    def __init__(self, jitter: float = 0.0) -> None:
        self.jitter = jitter

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first = 0 if info is None else info.id * 100
        order = torch.randperm(7)
        for number in order.tolist():
            time.sleep(random.Random().random() * self.jitter)
            yield first + number, torch.rand(1)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_keeps_torchs_interleave_and_does_not_depend_on_time(persistent: bool) -> None:
    options: Any = {"shuffle": False, "persistent_workers": persistent}
    found = epochs(2, Stream(jitter=0.005), 3, **options)
    assert found == epochs(2, Stream(), 3, shuffle=False)
    for epoch in found:
        assert [batch[0][0] // 100 for batch in epoch] == [0, 1, 2] * 3
    assert found[0] != found[1]


# ---- the window ---------------------------------------------------------------------------------------


class Slow(Dataset):
    """Every eighth sample takes long."""

    def __init__(self, size: int = 48, long: float = 0.12, short: float = 0.004) -> None:
        self.size, self.long, self.short = size, long, short

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        time.sleep(self.long if index % 8 == 0 else self.short)
        return index


def test_the_window_widens_behind_a_late_batch_and_statistics_name_it() -> None:
    with DataLoader(Slow(), num_workers=3, schedule="dynamic", persistent_workers=True) as loader:
        assert [batch.item() for batch in loader] == list(range(48))
        statistics = loader.statistics()
        assert statistics.window > 9
        assert 0 < statistics.head_of_line_seconds <= statistics.wait_seconds
        worst = statistics.late_batches[0]
        assert worst.batch % 8 == 0
        assert worst.epoch == 1
        assert worst.seconds <= statistics.head_of_line_seconds
        seconds = [late.seconds for late in statistics.late_batches]
        assert seconds == sorted(seconds, reverse=True)
        assert len(seconds) <= 10


@pytest.mark.parametrize("schedule", [RoundRobin(window=7), Dynamic(window=7)])
def test_no_more_batches_are_under_way_than_the_window_allows(schedule: Schedule) -> None:
    asked = []

    class Watched(Backwards):
        def __iter__(self) -> Iterator[int]:
            for index in super().__iter__():
                asked.append(index)
                yield index

    loader = DataLoader(Slow(), sampler=Watched(48), num_workers=2, schedule=schedule)
    iterator = iter(loader)
    for delivered in range(10):
        assert len(asked) <= delivered + 7
        next(iterator)
    assert loader.statistics().window == 7
    loader.close()


def test_a_wider_window_is_used_in_turn_too() -> None:
    """Round robin with a window of 12 works past a slow batch that a window of 4 waits for."""
    loader = DataLoader(Slow(16, long=0.5), num_workers=2, schedule=RoundRobin(window=12))
    iterator = iter(loader)
    time.sleep(0.4)  # batch 0 is slow; worker 1 has six others
    assert loader.statistics().workers[1].batches == 0  # nobody has looked at the socket yet
    assert next(iterator).item() == 0
    assert loader.statistics().workers[1].batches >= 5
    loader.close()


def test_no_worker_idles_while_the_consumer_is_busy() -> None:
    """The consumer does not give up the GIL; the workers do not need it."""
    loader = DataLoader(Slow(24, long=0.02, short=0.02), num_workers=3, schedule=Dynamic(window=24))
    iterator = iter(loader)
    next(iterator)
    # A regular expression that backtracks holds the GIL from its beginning to its end.
    import re

    began = time.monotonic()
    while time.monotonic() - began < 0.5:
        re.match(r"(a+)+$", "a" * 22 + "b")
    busy = time.monotonic() - began
    before = time.monotonic()
    assert [batch.item() for batch in iterator] == list(range(1, 24))
    assert time.monotonic() - before < max(0.2, busy / 2), "the batches were not ready"
    idle = [worker.idle_seconds for worker in loader.statistics().workers]
    assert max(idle) < 0.15, idle


def test_the_head_of_the_line_is_never_queued_behind_another_batch() -> None:
    """One worker is held up by batch 0; the other one loads everything else."""

    class OneSlow(Slow):
        def __getitem__(self, index: int) -> tuple[int, int]:
            if index == 0:
                time.sleep(0.4)
            info = get_worker_info()
            assert info is not None
            return index, info.id

    rows = list(DataLoader(OneSlow(14), batch_size=None, num_workers=2, schedule=Dynamic(window=14)))
    assert [index for index, _ in rows] == list(range(14))
    owner = rows[0][1]
    assert {worker for _, worker in rows[1:]} == {1 - owner}


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_batch_may_be_later_than_the_table_of_claims_is_long(
    restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is loaded and handed out once; who is late is not ended for an answer that is its own."""
    monkeypatch.setattr(arena, "CLAIMS", WORKERS + 16)

    class Late(Slow):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                time.sleep(0.3)
            return index

    with DataLoader(
        Late(800),
        batch_size=None,
        num_workers=3,
        schedule=Dynamic(window=6),
        in_order=False,
        workers=Processes(max_restarts=restarts),
    ) as loader:
        found = list(loader)
        statistics = loader.statistics()
    assert found.index(3) > 100, "it was not late"
    assert sorted(found) == list(range(800))
    assert sum(worker.batches for worker in statistics.workers) == 800
    assert statistics.rejected_frames == statistics.worker_restarts == 0


class Held(Slow):
    """One sample takes long; another one takes as long as it takes until the first is done and then some."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 0:
            time.sleep(0.4)
        if index == 1500:
            time.sleep(1.5)
        info = get_worker_info()
        assert info is not None
        return index, info.id


@pytest.mark.parametrize("in_order", [False, True])
def test_a_busy_worker_is_not_sent_all_that_the_others_load_and_then_goes_on(
    in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_UNREAD", 32)
    queued = {0: 0, 1: 0}
    send_all = ConsumerSocket.send_all

    def counted(self: ConsumerSocket, *frames: bytes, but: Container[int] = ()) -> None:
        send_all(self, *frames, but=but)
        for worker in queued.keys() - set(but):
            queued[worker] += len(frames)

    monkeypatch.setattr(ConsumerSocket, "send_all", counted)
    window = 3000 if in_order else 8
    with DataLoader(
        Held(3000),
        batch_size=None,
        num_workers=2,
        schedule=Dynamic(window=window),
        in_order=in_order,
    ) as loader:
        iterator = iter(loader)
        rows = [next(iterator)]
        busy = rows[0][1] if in_order else 1 - rows[0][1]
        sent_while_busy = None
        for row in iterator:
            rows.append(row)
            if row[0] == 1400:
                sent_while_busy = dict(queued)
    assert sorted(index for index, _ in rows) == list(range(3000))
    owner = dict(rows)
    assert owner[0] == busy
    if in_order:  # the window is the bound
        assert queued[busy] >= 3000
    else:
        assert sent_while_busy is not None
        assert sent_while_busy[busy] <= 2 * (32 + 8) + 2 < 1400 <= sent_while_busy[1 - busy]
    loaded = [index for index in range(1501, 3000) if owner[index] == busy]
    assert len(loaded) > 1000, "who was passed over does not go on"


class Once(Slow):
    """The first sample takes long, the others no time."""

    def __getitem__(self, index: int) -> int:
        if index == 0:
            time.sleep(0.8)
        return index


def test_who_was_passed_over_is_heard_of_at_the_next_batch_however_many_are_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups: list[group.WorkerGroup] = []
    start = group.WorkerGroup.start

    def noted(self: group.WorkerGroup, base_seed: int, shared_seed: int | None) -> None:
        groups.append(self)
        start(self, base_seed, shared_seed)

    monkeypatch.setattr(group, "_UNREAD", 32)
    monkeypatch.setattr(group.WorkerGroup, "start", noted)
    options: Any = {"schedule": Dynamic(window=32), "in_order": False}
    with DataLoader(Once(2000), batch_size=None, num_workers=2, **options) as loader:
        iterator = iter(loader)
        began, found = time.monotonic(), [next(iterator)]
        while not groups[0].behind:
            found.append(next(iterator))
        for pause in (0.1, 0.0):  # the other one loads a window, and all of it is received at once
            time.sleep(pause)
            found.append(next(iterator))
        assert groups[0].behind
        time.sleep(max(began + 1.2 - time.monotonic(), 0))
        found.append(next(iterator))
        assert not groups[0].behind
        assert sorted(found + list(iterator)) == list(range(2000))
