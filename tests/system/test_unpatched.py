"""The core uses the system's own clock, whatever a program puts in its place."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fastq_loader import DataLoader
from tests.support.loaders import numbers
from tests.test_architecture import LEAVES, imported


def test_the_core_imports_the_clock_from_one_place() -> None:
    for module in LEAVES:
        if not module.startswith(("extras.", "system.unpatched")):
            assert not {"time", "time.monotonic_ns"} & imported(module, types=False), module


def jumping(step: int) -> Callable[[], int]:
    times = count(0, step)
    return lambda: next(times)


def everywhere(name: str, value: Any) -> list[Any]:
    """As freezegun: in each module that has the function, under any name."""
    own = getattr(time, name)
    return [
        patch.object(module, attribute, value)
        for module in list(sys.modules.values())
        for attribute, each in list(vars(module).items())
        if each is own and module.__name__.startswith(("fastq_loader", "time"))
    ]


@pytest.mark.processes
@pytest.mark.usefixtures("forked_workers")
def test_an_epoch_is_as_it_always_is() -> None:
    data = torch.arange(16)
    wanted = numbers(DataLoader(data, 4))
    clocks = [
        *(
            each
            for name in ("monotonic", "monotonic_ns", "time")
            for each in everywhere(name, jumping(10**13))
        ),
        patch.object(time, "sleep", lambda seconds: None),
    ]
    with DataLoader(data, 4, num_workers=2, timeout=30, persistent_workers=True) as loader:
        for each in clocks:
            each.start()
        try:
            assert [numbers(loader) for _ in range(2)] == [wanted] * 2
            loader.close()
        finally:
            for each in clocks:
                each.stop()
