"""The user's objects in a worker: seeds, what torch tells user code, and which batches are missed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.worker import _generate_state

from fastq_loader.ipc.messages import Epoch
from fastq_loader.memory.arena import Arena
from fastq_loader.reading import generators
from fastq_loader.reading.fetch import EndOfStream
from fastq_loader.workers.config import Payload, Rules
from fastq_loader.workers.reader import Reader
from tests.support.worker_setup import MAP_STYLE, STREAM, as_it_is, make_setup


def draws() -> tuple[Any, ...]:
    return random.random(), torch.rand(1).item(), float(np.random.rand())


class Draws:
    """Every sample is some random numbers."""

    def __init__(self) -> None:
        self.own = random.Random(1)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return draws()


def reader(arena: Arena, dataset: Any, init_fn: Any = None, **fields: Any) -> Reader:
    given = {"payload": Payload(dataset, as_it_is, init_fn), **fields}
    return Reader(make_setup(arena, dataset, **given))


def test_random_numbers_and_worker_info_are_torchs_and_set_before_the_init_function(arena: Arena) -> None:
    seen: list[Any] = []

    def init(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        seen.append((worker, info.id, info.num_workers, info.seed, info.dataset, torch.get_num_threads()))
        seen.append(draws())

    dataset = Draws()
    loading = reader(arena, dataset, init, workers=4, worker=2, base_seed=40)
    loading.begin_epoch(Epoch(1, None))
    random.seed(42)
    torch.manual_seed(42)
    np.random.seed(_generate_state(40, 2))
    assert seen == [(2, 2, 4, 42, dataset, 1), draws()]
    assert loading.failure is None


def test_with_a_seed_for_each_batch_it_does_not_matter_what_was_loaded_before(arena: Arena) -> None:
    loading = reader(arena, Draws())
    loading.begin_epoch(Epoch(1, None, 7))
    found = [loading.load(seq, 0) for seq in (0, 1, 0)]
    assert found[0] == found[2] != found[1]
    info = get_worker_info()
    assert info is not None
    assert info.seed == generators.seed_batch(7, 0)


def test_the_seeds_of_a_stream_do_not_depend_on_when_others_ended(arena: Arena) -> None:
    class DrawsOnAndOn:
        def __iter__(self) -> Any:
            return iter(draws, None)

    loading = reader(arena, DrawsOnAndOn(), workers=3, worker=1, rules=Rules(True, False, False))
    found = []
    for seqs in ((1, 4, 6, 8), (1, 4, 7, 10)):
        loading.begin_epoch(Epoch(1, None, 7))
        found.append([loading.load(seq, None) for seq in seqs])
    assert found[0] == found[1]
    generators.seed_batch(7, 10)
    assert found[0][-1] == draws()


@pytest.mark.parametrize("at", ["init", "iter"])
def test_a_failure_is_kept_until_somebody_asks(arena: Arena, at: str) -> None:
    class Fails:
        def __iter__(self) -> Any:
            raise ValueError("no stream")

    def fail(worker: int) -> None:
        raise ValueError("no worker")

    loading = reader(arena, Fails(), fail if at == "init" else None, rules=STREAM)
    loading.begin_epoch(Epoch(1, None))
    assert str(loading.failure) == ("no worker" if at == "init" else "no stream")
    assert not loading.is_missed()


class DrawsOnce:
    def __iter__(self) -> Any:
        yield draws()


def test_a_stream_that_ended_is_not_missed(arena: Arena) -> None:
    loading = reader(arena, DrawsOnce(), rules=STREAM)
    loading.begin_epoch(Epoch(1, None))
    loading.load(0, None)
    with pytest.raises(EndOfStream):
        loading.load(1, None)
    assert loading.ended
    assert not loading.is_missed()
    loading.begin_epoch(Epoch(1, None))
    assert not loading.ended


@pytest.mark.parametrize(
    ("dataset", "rules", "missed"),
    [
        (Draws(), MAP_STYLE, True),
        (range(3), MAP_STYLE, False),
        (DrawsOnce(), STREAM, True),
        (iter(range(3)), STREAM, True),  # its own iterator, which goes on where it stopped
    ],
    ids=["draws", "draws nothing", "a stream that draws", "an iterator"],
)
def test_a_batch_is_missed_if_anything_was_drawn_and_the_first_of_all_has_to_show_it(
    arena: Arena, dataset: Any, rules: Rules, missed: bool
) -> None:
    loading = reader(arena, dataset, rules=rules)
    loading.begin_epoch(Epoch(1, None))
    assert loading.is_missed()
    loading.load(0, 0)
    assert loading.is_missed() is missed
