"""A late device for the tests of this folder that need no GPU, and a GPU for those that do."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.gpu import device_or_skip
from tests.support.late_device import Late, late_device


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """Puts a late device in the place of every accelerator, until the test is over."""
    with ExitStack() as devices:
        yield lambda **options: devices.enter_context(late_device(monkeypatch, **options))
        gc.collect()


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    with device_or_skip():
        yield
