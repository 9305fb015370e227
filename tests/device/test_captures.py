"""Captures in other threads: the mode of a thread that makes calls meanwhile, without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fastq_loader.device import accelerator, captures
from fastq_loader.device.captures import relaxed
from fastq_loader.device.page_lock import page_locked
from tests.device.test_accelerator import HostStager

GLOBAL, RELAXED = 0, 2


class Runtime:
    """The CUDA runtime's mode of this thread.

    Attributes:
        mode: now. `seen`: the mode at each call.
    """

    def __init__(self) -> None:
        self.mode = GLOBAL
        self.seen: list[int] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
        self.exchange = kind(self._exchange)

    def _exchange(self, mode: Any) -> int:
        self.mode, mode[0] = mode[0], self.mode
        return 0

    def call(self, *_: Any, **__: Any) -> int:
        self.seen.append(self.mode)
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    one = Runtime()
    names = {"cudaThreadExchangeStreamCaptureMode": one.exchange, "cudaGetLastError": one.call}
    for module in (captures, accelerator):
        monkeypatch.setattr(module, "runtime_function", names.get)
    yield one
    assert one.mode == GLOBAL, "the mode of the user's calls was changed"


def fail() -> None:
    raise KeyError


def test_the_mode_is_relaxed_inside_and_put_back(runtime: Runtime) -> None:
    with relaxed():
        with pytest.raises(KeyError), relaxed():
            fail()
        assert runtime.mode == RELAXED, "not that of the outer block"


def test_without_the_function_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "runtime_function", lambda name: None)
    with pytest.raises(KeyError), relaxed():
        fail()


def test_functions_are_looked_up_in_the_libraries_that_torch_has_loaded() -> None:
    assert captures.runtime_function("cudaNoSuchFunction") is None
    if torch.backends.openmp.is_available():
        assert captures.runtime_function("omp_get_max_threads") is not None
    if torch.version.cuda is not None:
        assert captures.runtime_function("cudaThreadExchangeStreamCaptureMode") is not None


CALLS: dict[str, Callable[[HostStager], Any]] = {
    "register": lambda stager: stager.register(4096, 64),
    "unregister": lambda stager: stager.unregister(4096),
    "pinned": lambda stager: stager.pinned(64),
}


@pytest.mark.parametrize("name", CALLS)
def test_page_locking_leaves_captures_alone(
    name: str, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: relaxed())
    stager = HostStager()
    for function in ("lock", "unlock"):
        monkeypatch.setattr(stager, function, runtime.call)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **_: runtime.call() or empty(1))
    CALLS[name](stager)
    assert runtime.seen == [RELAXED]


def test_a_batch_is_page_locked_beside_a_capture(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **_: torch.empty(3 + runtime.call()))
    monkeypatch.setattr(torch.Tensor, "pin_memory", runtime.call)
    page_locked({"copied here": torch.ones(3), "copied by torch": torch.ones(3).expand(2, 3)})
    assert runtime.seen == [RELAXED] * 3, "for the second one an allocation is tried here first"


def test_an_error_is_cleared_without_a_launch(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current stream may be captured, and the launch would become part of the graph."""
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("launched"))
    accelerator.TorchBackend._clear_error(HostStager())
    assert len(runtime.seen) == 1


def test_where_it_has_to_be_launched_it_is_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    stager = HostStager()
    monkeypatch.setattr(accelerator, "runtime_function", lambda name: None)
    monkeypatch.setattr(stager, "_beside", relaxed_beside := Beside())
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: launched.append(relaxed_beside.inside))
    accelerator.TorchBackend._clear_error(stager)
    assert launched == [True]


class Beside:
    """Stands in for the side stream. `inside`: whether it is current."""

    inside = False

    def __call__(self) -> Beside:
        return self

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *_: object) -> None:
        self.inside = False
