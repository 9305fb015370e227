"""The accelerator behind the protocol, as far as it can be seen without one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastq_loader import device
from fastq_loader.device import TorchStager, parse, visible
from fastq_loader.errors import PinFailed
from fastq_loader.tensors import moved, tensors_of
from tests.conftest import run_script
from tests.datasets import Opaque, Point, Slotted

# ---- which devices there are ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,3", 2),
        (" 1 , 0", 2),
        ("0,-1,2", 1),  # CUDA stops at the first that is none
        ("0,9,1", 1),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1),
        ("GPU-1,GPU-2,GPU-3,GPU-4,GPU-5", 4),
    ],
)
def test_visible_devices(shown: str | None, expected: int) -> None:
    assert visible(4, {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}) == expected


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs and a torch that could use them, so far as /proc tells."""
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(device, "_NVIDIA", tmp_path)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the runtime was asked"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_gpus_are_counted_without_the_runtime(nvidia: Path) -> None:
    """It would open descriptors that forked workers inherit (gpu tests look at them)."""
    assert parse("cuda") == torch.device("cuda")
    assert parse("cuda:1") == parse(torch.device("cuda:1")) == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device='cuda:2' cannot be used: there are 2 cuda devices"):
        parse("cuda:2")


def test_hidden_gpus_do_not_count(nvidia: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="device='cuda' cannot be used: no cuda device is there"):
        parse("cuda")


def test_where_cuda_is_in_use_it_is_asked(nvidia: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    parse("cuda:0")
    with pytest.raises(ValueError, match="there are 1 cuda devices"):
        parse("cuda:1")


@pytest.mark.parametrize("name", [None, "cpu", "cpu:0", torch.device("cpu")])
def test_the_host_is_no_device(name: Any) -> None:
    assert parse(name) is None


@pytest.mark.parametrize("name", [True, 2.5, b"cuda", ["cuda"]])
def test_what_is_no_device_is_a_type_error(name: Any) -> None:
    with pytest.raises(TypeError, match=r"device=.* must be a string such as 'cuda:0'"):
        parse(name)


def test_a_loader_for_the_host_touches_no_accelerator() -> None:
    script = """
import torch
for name in ("init", "_lazy_init", "is_available", "device_count", "current_device", "Stream", "Event"):
    def used(*args, name=name, **options):
        raise SystemExit(f"torch.cuda.{name} was used")
    setattr(torch.cuda, name, used)
import fastq_loader
from fastq_loader import DataLoader
for workers in (0, 2):
    print(len(list(DataLoader(list(range(10)), 2, num_workers=workers))))
"""
    result = run_script(script)
    assert (result.stdout.split(), result.stderr) == (["5", "5"], "")


# ---- what is asked of torch -------------------------------------------------------------------------


class Runtime:
    """Stands for libcudart: notes what is registered, fails on demand."""

    def __init__(self) -> None:
        self.code = 0
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.code:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 1


class Nothing:
    """A context that does nothing, and a stream that is always there."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


@pytest.fixture
def stager() -> Any:
    """Believes that it has CUDA, over CPU memory: what it does with host memory can be seen."""
    stager: Any = object.__new__(TorchStager)
    stager._module = SimpleNamespace(device=Nothing, stream=Nothing)
    stager.side = "side"
    stager.device = SimpleNamespace(type="cuda")
    stager._clear_error = lambda: cleared.append(True)
    cleared: list[bool] = []
    stager.cleared = cleared
    return stager


def test_a_failed_registration_is_cleared(runtime: Runtime, stager: Any) -> None:
    runtime.code = 304
    with pytest.raises(PinFailed, match="cudaHostRegister of 4096 bytes failed with error 304"):
        stager.register(1 << 20, 4096)
    assert stager.cleared == [True]


def test_clearing_an_error_launches_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    stager: Any = object.__new__(TorchStager)
    stager.device = "cuda:0"
    calls = []

    def zeros(size: int, device: Any) -> None:
        calls.append(device)
        if len(calls) == 1:
            raise RuntimeError("CUDA error: the one before")

    monkeypatch.setattr(torch, "zeros", zeros)
    stager._clear_error()
    assert calls == ["cuda:0"] * 2


def test_only_cuda_registers(stager: Any) -> None:
    stager.device = SimpleNamespace(type="xpu")
    with pytest.raises(PinFailed, match=r"torch.xpu cannot page-lock memory that is there already"):
        stager.register(1 << 20, 4096)


def test_memory_that_cannot_be_pinned_is_said_to(stager: Any) -> None:
    """As on a machine without an accelerator."""
    if torch.accelerator.is_available():
        pytest.skip("needs a machine without an accelerator")
    with pytest.raises(PinFailed, match="torch could not page-lock 4096 bytes"):
        stager.pinned(4096)


def test_the_proof_fails_where_copies_do_nothing(
    runtime: Runtime, stager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WSL2. The probe is registered and unregistered in any case, and its memory is freed."""
    stager.device = torch.device("cpu")
    monkeypatch.setattr(stager, "_runtime", lambda: runtime)
    for name in ("wait", "synchronize"):
        monkeypatch.setattr(stager, name, lambda *_: None)
    monkeypatch.setattr(stager, "record", lambda *_: None)
    monkeypatch.setattr(stager, "current_stream", lambda: None)
    stager.prove()
    monkeypatch.setattr(stager, "copy_async", lambda *_: None)
    with pytest.raises(PinFailed, match="arrived with other bytes"):
        stager.prove()
    assert runtime.registered == {}
    runtime.code = 1
    with pytest.raises(PinFailed, match="failed with error 1"):
        stager.prove()


def test_a_default_device_changes_nothing(
    runtime: Runtime, stager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stager.device = torch.device("cpu")
    monkeypatch.setattr(stager, "_runtime", lambda: runtime)
    for name in ("wait", "synchronize", "record", "current_stream"):
        monkeypatch.setattr(stager, name, lambda *_: None)
    with torch.device("meta"):
        assert stager.pageable(8).device.type == "cpu"
        stager.prove()


# ---- what a batch is made of ------------------------------------------------------------------------


def test_tensors_are_found_wherever_they_are() -> None:
    one, two, three, four = (torch.zeros(at + 1) for at in range(4))
    tree = {"a": [one, "text"], "b": Point(two, Opaque({"inner": (three,)})), "c": {1, 2}, "again": one}
    tree["self"] = tree
    assert {id(part) for part in tensors_of((tree, four))} == {id(part) for part in (one, two, three, four)}


def test_tensors_are_found_in_slots_and_in_what_is_made_when_it_is_asked_for() -> None:
    class Lazy(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return [torch.zeros(1)]

        def __iter__(self) -> Iterator[str]:
            return iter("abcdefgh")

        def __len__(self) -> int:
            return 8

    assert len(tensors_of([Lazy(), Slotted(torch.zeros(2))])) == 9
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    assert [part.numel() for part in tensors_of(jagged)] == [3, 5]


@pytest.mark.filterwarnings("ignore:.*(beta state|Sparse invariant checks).*:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_is_its_parts(layout: str) -> None:
    dense = torch.eye(4)
    sparse = (
        dense.to_sparse()
        if layout == "coo"
        else getattr(dense, f"to_sparse_{layout}")(*([(2, 2)] if layout.startswith("b") else []))
    )
    parts = tensors_of(sparse)
    assert len(parts) == (2 if layout == "coo" else 3)
    assert all(part.layout is torch.strided for part in parts)


def test_moving_keeps_what_a_tensor_is() -> None:
    assert moved("text", torch.device("meta")) == "text"
    there = moved(torch.zeros(3, requires_grad=True), torch.device("meta"))
    assert (there.device.type, there.requires_grad, there.is_leaf) == ("meta", True, True)
    here = torch.zeros(2)
    assert moved(here, here.device) is here
