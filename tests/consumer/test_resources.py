"""What a loader has besides its arguments: whose it is, and how its pools end."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest

from fastq_loader import DataLoader
from fastq_loader.consumer.resources import Resources
from tests.conftest import descendants


def test_it_is_made_once_and_belongs_to_one_loader() -> None:
    loader = DataLoader(range(4))
    runtime = loader._resources
    assert runtime is loader._resources
    assert runtime.owner() is loader
    twin = object.__new__(DataLoader)
    vars(twin).update(vars(loader))
    assert twin._resources is not runtime, "it came with the attributes of another loader"


def test_it_keeps_no_loader_alive() -> None:
    runtime = DataLoader(range(4))._resources
    gc.collect()
    assert runtime.owner() is None


def test_nothing_of_it_is_copied() -> None:
    runtime = Resources(DataLoader(range(4)))
    runtime.counters.batches = 3
    for twin in (copy.copy(runtime), copy.deepcopy(runtime), pickle.loads(pickle.dumps(runtime))):
        assert (twin.owner(), twin.counters.batches, len(twin.engines)) == (None, 0, 0)


@pytest.mark.processes
def test_all_pools_of_a_loader_are_closed_and_waited_for() -> None:
    loader = DataLoader(range(4), num_workers=1)
    iterators = [iter(loader) for _ in range(2)]
    assert len(loader._resources.engines) == len(descendants()) == 2
    loader._resources.close_engines("the test is over")
    assert not descendants()
    for iterator in iterators:
        with pytest.raises(RuntimeError, match="the test is over"):
            next(iterator)
