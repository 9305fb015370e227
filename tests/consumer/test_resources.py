"""What a loader has besides its arguments: whose it is, and how its pools end."""

from __future__ import annotations

import copy
import pickle

import pytest

from fastq_loader import DataLoader
from fastq_loader.resources import Resources
from tests.conftest import descendants


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
