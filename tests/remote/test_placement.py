"""What a placement has to offer, and that the tests' own offers it."""

from __future__ import annotations

import inspect

from fastq_loader.remote.placement import Placement
from tests.support.hosts import LocalHosts


def test_the_placement_of_the_tests_is_one() -> None:
    placement: Placement = LocalHosts()
    for name, method in inspect.getmembers(Placement, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(LocalHosts, name))
            assert list(ours.parameters) == list(inspect.signature(method).parameters)
    placement.close()
