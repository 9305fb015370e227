"""A late device for the tests of this folder that need no GPU, and a GPU for those that do."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import pytest

from tests.support.gpu import device_or_skip
from tests.support.late_device import Late, use_late


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """Puts a late device in the place of every accelerator, until the test is over. It is put there by the
    test's own monkeypatch, which takes back what it and the test have replaced in the right order."""
    yield partial(use_late, monkeypatch)
    gc.collect()


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    with device_or_skip():
        yield
