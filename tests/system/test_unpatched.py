"""The core uses the system's own clock, calls and polls, whatever a program puts in their place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fastq_loader import DataLoader
from fastq_loader.system import unpatched
from tests.support.loaders import numbers
from tests.test_architecture import LEAVES, imported


def test_the_core_imports_modules_that_may_be_patched_from_one_place() -> None:
    core = [name for name in LEAVES if not name.startswith(("extras.", "__main__", "system.unpatched"))]
    allowed = {"os.PathLike", "os"}  # a class, with the module that it comes from
    for module in core:
        names = imported(module, types=False) & {"time", "os", "select", "time.monotonic_ns", "os.PathLike"}
        assert not names or names == allowed, module


def jumping(step: int) -> Callable[[], int]:
    times = count(0, step)
    return lambda: next(times)


def everywhere(name: str, value: Any) -> list[Any]:
    """As freezegun: in each module that has the function, under any name."""
    import sys

    own = getattr(time, name)
    return [
        patch.object(module, attribute, value)
        for module in list(sys.modules.values())
        for attribute, each in list(vars(module).items())
        if each is own and module.__name__.startswith(("fastq_loader", "time"))
    ]


CLOCKS = [
    *(each for name in ("monotonic", "monotonic_ns", "time") for each in everywhere(name, jumping(10**13))),
    patch.object(time, "sleep", lambda seconds: None),
]
CALLS = [
    patch.object(os, name, side_effect=OSError("patched"))
    for name in ("read", "write", "open", "getppid", "stat")
]
POLLS = [patch.object(os.path, "exists", lambda path: False), patch("select.poll"), patch("select.epoll")]


@pytest.mark.processes
@pytest.mark.usefixtures("forked_workers")  # the resource tracker of other start methods writes by os.write
@pytest.mark.parametrize("patches", [CLOCKS, CALLS, POLLS], ids=["clocks", "calls", "polls"])
def test_an_epoch_is_as_it_always_is(patches: list[Any]) -> None:
    data = torch.arange(16)
    wanted = numbers(DataLoader(data, 4))
    with DataLoader(data, 4, num_workers=2, timeout=30, persistent_workers=True) as loader:
        for each in patches:
            each.start()
        try:
            assert [numbers(loader) for _ in range(2)] == [wanted] * 2
            loader.close()
        finally:
            for each in patches:
                each.stop()


def test_polls_that_are_gone_before_the_import_are_found() -> None:
    import select

    with patch.object(select, "poll", None):
        assert unpatched._made_anew("select").poll is not None
