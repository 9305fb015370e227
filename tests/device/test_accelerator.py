"""What `device=` may be, and the accelerator behind the protocol, as far as both can be seen without one."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from fastq_loader import DataLoader, ToDevice
from fastq_loader.device import accelerator as module
from fastq_loader.device.accelerator import TorchBackend, parse, read_device
from fastq_loader.errors import PinFailed
from fastq_loader.system import torch_names
from tests.conftest import run_script
from tests.support.datasets import Made, assert_same
from tests.support.late_device import image_and_label

KIND = "hpu"  # torch knows the name, and has no module for it


def test_short_forms_and_configurations_mean_the_same() -> None:
    assert read_device(None) is None
    assert read_device("cpu") == ToDevice("cpu") == ToDevice("cpu", prefetch=2)
    assert ToDevice("cpu").target is None
    given = ToDevice("cpu", transform=abs, prefetch=3)
    assert read_device(given) is given
    assert pickle.loads(pickle.dumps(given)) == given != dataclasses.replace(given, transform=None)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("prefetch", 0, ValueError),
        ("prefetch", True, ValueError),
        ("transform", 3, TypeError),
        ("transform_stream", "other", ValueError),
    ],
)
def test_a_wrong_option_is_named(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"ToDevice\\('cpu', {name}={value!r}\\): "):
        ToDevice("cpu", **{name: value})


@pytest.mark.parametrize(
    ("device", "kind", "text"),
    [
        ("gpu", ValueError, "device='gpu' is unknown"),
        ("meta", ValueError, "device='meta' cannot be used"),
        ("mps", ValueError, "device='mps' cannot be used"),
        (1.5, TypeError, r"device=1.5 must be a string such as 'cuda:0'"),
        (True, TypeError, r"device=True must be a string such as 'cuda:0'"),
    ],
)
def test_a_wrong_device_is_named(device: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        DataLoader([1, 2], device=device)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a torch without CUDA")
def test_an_absent_device_is_named() -> None:
    makers: list[Callable[[str], Any]] = [ToDevice, lambda device: DataLoader([1, 2], device=device)]
    for make in makers:
        with pytest.raises(ValueError, match=r"device='cuda:1' cannot be used: the accelerator of torch"):
            make("cuda:1")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu", 0)])
def test_the_cpu_is_no_device(device: Any, workers: int) -> None:
    with DataLoader(Made(image_and_label, 8), 2, num_workers=workers, device=device) as loader:
        for expected, batch in zip(TorchDataLoader(Made(image_and_label, 8), 2), loader, strict=True):
            assert_same(expected, batch)
        assert loader.statistics().staging is None


@pytest.mark.processes
def test_on_the_cpu_the_transform_runs_too_and_cannot_end_the_epoch() -> None:
    def transform(batch: Any) -> Any:
        if 2 in batch[1]:
            raise StopIteration("out of the transform")
        return batch[0] + 1, batch[1]

    device = ToDevice("cpu", transform=transform)
    with DataLoader(Made(image_and_label, 6), 2, num_workers=2, device=device) as loader:
        iterator = iter(loader)
        for first in (0, 2, 4):
            if first == 2:
                with pytest.raises(RuntimeError, match="the transform raised StopIteration: out of"):
                    next(iterator)
            else:
                assert next(iterator)[0][:, 0, 0, 0].tolist() == [first + 1, first + 2]


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs and a torch that could use them, so far as /proc tells."""
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(module, "_NVIDIA", tmp_path)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch_names, "has_kernel_for_dispatch_key", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the runtime was asked"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("shown", "device", "error"),
    [
        (None, "cuda", None),
        (None, "cuda:1", None),
        (None, "cuda:2", "there are 2 cuda devices"),
        ("", "cuda", "no cuda device is there"),
        (" 1 , 0", "cuda:1", None),
        ("0,9,1", "cuda:1", "there are 1 cuda devices"),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "cuda:0", None),
        ("GPU-1,GPU-2,GPU-3", "cuda:2", "there are 2 cuda devices"),
    ],
)
def test_gpus_are_counted_without_the_runtime(
    shown: str | None, device: Any, error: str | None, nvidia: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would open descriptors that forked workers inherit (gpu tests look at them)."""
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    if error is None:
        assert parse(device) == torch.device(device)
    else:
        with pytest.raises(ValueError, match=f"device='{device}' cannot be used: {error}"):
            parse(device)


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
    result = run_script(script, warm=True)
    assert (result.stdout.split(), result.stderr) == (["5", "5"], "")


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """An accelerator of a kind of its own, of which nothing is initialised. Sets how many there are."""

    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("the device was initialised")

    for name in ("current_stream", "set_stream"):
        monkeypatch.setattr(torch.accelerator, name, refuse)
    monkeypatch.setattr(torch, "Stream", refuse)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(KIND))

    def there_are(devices: int) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)

    monkeypatch.setattr(torch_names, "has_kernel_for_dispatch_key", lambda *_: True)
    there_are(2)
    return there_are


@pytest.mark.usefixtures("another")
def test_the_generic_interface_suffices_and_is_not_asked_at_construction() -> None:
    assert not hasattr(torch, KIND)
    assert parse(KIND) == torch.device(KIND)
    assert parse(f"{KIND}:1") == torch.device(KIND, 1)
    assert DataLoader([1, 2], device=KIND).device == KIND
    assert ToDevice(KIND, transform=list).target == torch.device(KIND)


def test_other_devices_are_refused(another: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"device='xpu' cannot be used: the acc.* here is {KIND};"):
        parse("xpu")
    with pytest.raises(ValueError, match=f"device='{KIND}:2' cannot be used: there are 2 {KIND} devices"):
        parse(f"{KIND}:2")
    with monkeypatch.context() as patch:
        patch.setattr(torch_names, "has_kernel_for_dispatch_key", lambda *_: False)
        with pytest.raises(ValueError, match=f"{KIND} tensors have no record_stream"):
            parse(KIND)
    another(0)
    with pytest.raises(ValueError, match=f"no {KIND} device is there"):
        parse(KIND)

    def no_module() -> bool:
        raise RuntimeError(f"Device '{KIND}' does not have a corresponding module")

    monkeypatch.setattr(torch.accelerator, "is_available", no_module)
    with pytest.raises(ValueError, match=f"torch cannot count the {KIND} devices: Device .* a corresponding"):
        parse(KIND)


def test_a_backend_of_its_own_is_served_by_torch_itself() -> None:
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("needs a torch that lets Python register a backend")
    script = """
import torch
torch.utils.backend_registration._setup_privateuseone_for_python_backend(rename="late")
from fastq_loader.device.accelerator import TorchBackend
backend = TorchBackend(torch.device("late"))
event = backend.record(backend.side)
backend.wait(backend.current_stream(), event)
print(backend.device, backend.query(event), backend.capturing(), backend.current_stream() == backend.side)
print(backend.on_side(lambda: torch.accelerator.current_stream() == backend.side))
"""
    result = run_script(script, warm=True)
    assert (result.stdout.split(), result.stderr) == (["late:0", "True", "False", "True", "True"], "")


class HostBackend(TorchBackend):
    """The host in a device's place. Attributes: what libcudart says, and how often its error was cleared."""

    code = cleared = 0

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.side = nullcontext()
        self.registered: set[int] = set()

    def _runtime(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self.lock, cudaHostUnregister=self.unlock)

    def lock(self, address: int, nbytes: int, flags: int) -> int:
        self.registered |= set() if self.code else {address}
        return self.code

    def unlock(self, address: int) -> int:
        known, self.registered = address in self.registered, self.registered - {address}
        return 1 - known

    def _clear_error(self) -> None:
        self.cleared += 1

    # Nothing is queued, so there is nothing to wait for.
    record = wait = synchronize = current_stream = Mock()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> HostBackend:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return HostBackend()


def test_the_proof_fails_where_copies_do_nothing(
    backend: HostBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WSL2. The probe is registered and unregistered in any case, and its memory is freed."""
    with torch.device("meta"):  # torch's default device changes nothing
        assert backend.pageable(8).device.type == "cpu"
        backend.prove()
    monkeypatch.setattr(backend, "copy_async", lambda *_: None)
    with pytest.raises(PinFailed, match="arrived with other bytes"):
        backend.prove()
    assert not backend.registered
    backend.code = 1
    assert not backend.cleared
    with pytest.raises(PinFailed, match="failed with error 1"):
        backend.prove()
    assert backend.cleared, "the next kernel launch would raise it"
