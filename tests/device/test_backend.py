"""The accelerator behind the protocol, as far as it can be seen without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from fastq_loader import DataLoader, ToDevice
from fastq_loader.device import backend, options
from fastq_loader.device.backend import TorchStager, parse, visible
from fastq_loader.errors import PinFailed
from fastq_loader.packing.tensors import accelerator, current_stream, is_captured
from tests.conftest import run_script
from tests.support.fake_accelerator import KIND, FakeAccelerator, Memory, fake_accelerator

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
    monkeypatch.setattr(backend, "_NVIDIA", tmp_path)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the runtime was asked"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_gpus_are_counted_without_the_runtime(nvidia: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would open descriptors that forked workers inherit (gpu tests look at them)."""
    assert parse("cuda") == torch.device("cuda")
    assert parse("cuda:1") == parse(torch.device("cuda:1")) == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device='cuda:2' cannot be used: there are 2 cuda devices"):
        parse("cuda:2")
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


def test_the_host_is_no_device_and_what_is_none_is_a_type_error() -> None:
    for name in ("cpu", "cpu:0", torch.device("cpu")):
        assert parse(name) is None
    for name in (True, 2.5, b"cuda", ["cuda"]):
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
    result = run_script(script, warm=True)
    assert (result.stdout.split(), result.stderr) == (["5", "5"], "")


# ---- torch's interface for every accelerator --------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAccelerator]:
    with fake_accelerator(monkeypatch) as fake:
        yield fake


def test_the_generic_interface_suffices_and_is_not_asked_at_construction(fake: FakeAccelerator) -> None:
    assert not hasattr(torch, KIND)
    assert parse(KIND) == torch.device(KIND)
    assert parse(f"{KIND}:1") == torch.device(KIND, 1)
    assert DataLoader([1, 2], device=KIND).device == KIND
    assert ToDevice(KIND, transform=list).target == torch.device(KIND)
    assert fake.asked == []


def test_what_torch_has_no_common_interface_for_is_refused(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match=f"device='xpu' cannot be used: .* that of torch .* here is {KIND}; "
    ):
        parse("xpu")
    with pytest.raises(ValueError, match=f"device='{KIND}:2' cannot be used: there are 2 {KIND} devices"):
        parse(f"{KIND}:2")
    fake.devices = 0
    with pytest.raises(ValueError, match=f"no {KIND} device is there"):
        parse(KIND)

    def no_module() -> bool:
        raise RuntimeError(f"Device '{KIND}' does not have a corresponding module")

    monkeypatch.setattr(torch.accelerator, "is_available", no_module)
    with pytest.raises(ValueError, match=f"torch cannot count the {KIND} devices: Device .* a corresponding"):
        parse(KIND)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(ValueError, match=f"device='{KIND}' cannot be used: .* here is none"):
        parse(KIND)


def test_no_accelerator_is_none_in_every_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_in_torch_2_6() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    for none in (lambda: None, none_in_torch_2_6):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", none)
        assert accelerator() is None
        assert current_stream(torch.device("xpu")) is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: pytest.fail("the host has no part"))
    assert current_stream(torch.device("cpu")) is None
    assert not is_captured(torch.device("cpu"))


def test_a_transform_beside_the_step_needs_memory_that_can_be_shared(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError,
        match=f"ToDevice\\('{KIND}', transform_stream='side'\\): {KIND} tensors have no "
        "record_stream.*transform_stream='consumer' does not need it",
    ):
        ToDevice(KIND, transform_stream="side")
    monkeypatch.setattr(options, "can_share", lambda device: True)
    assert ToDevice(KIND, transform_stream="side").target == torch.device(KIND)
    assert fake.asked == []


def test_torch_says_who_has_record_stream() -> None:
    """In a process of its own: a backend cannot be taken back."""
    script = """
import torch
from fastq_loader.device.backend import can_share
torch.utils.rename_privateuse1_backend("late")
late = torch.device("late:0")
print(can_share(torch.device("cuda")) == torch.backends.cuda.is_built(), can_share(late))
library = torch.library.Library("aten", "IMPL")
library.impl("record_stream", lambda tensor, stream: None, "PrivateUse1")
print(can_share(late), can_share(torch.device("mps")))
"""
    result = run_script(script, warm=True)
    assert (result.stdout.split(), result.stderr) == (["True", "False", "True", "False"], "")


def test_a_backend_of_its_own_is_served_by_torch_itself() -> None:
    """Not by the fake: streams and events of a registered backend, which are all one here."""
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("needs a torch that lets Python register a backend")
    script = """
import torch
torch.utils.backend_registration._setup_privateuseone_for_python_backend(rename="late")
from fastq_loader import DataLoader
from fastq_loader.device.backend import TorchStager
loader = DataLoader([1], device="late")
stager = TorchStager(torch.device("late"))
event = stager.record(stager.side)
stager.wait(stager.current_stream(), stager.record(stager.side, event))
print(stager.device, stager.query(event), stager.capturing(), stager.current_stream() == stager.side)
print(stager.on_side(lambda: torch.accelerator.current_stream() == stager.side))
"""
    result = run_script(script, warm=True)
    assert (result.stdout.split(), result.stderr) == (["late:0", "True", "False", "True", "True"], "")


class FakeStager(TorchStager):
    """Memory of the host behind queues of the fake's."""

    def __init__(self, fake: FakeAccelerator, device: str = KIND) -> None:
        super().__init__(torch.device(device))
        self.fake = fake

    def empty(self, nbytes: int) -> Any:
        return Memory(self.fake, torch.full((nbytes,), 0xEE, dtype=torch.uint8))

    def share(self, memory: Any, stream: Any) -> None:
        raise NotImplementedError("record_stream")


def test_the_device_is_initialised_before_a_stream_of_it_is_made(fake: FakeAccelerator) -> None:
    fake.index = 1
    stager = TorchStager(torch.device(KIND))
    assert fake.asked == ["current_stream", "Stream"]
    assert (stager.device, stager.side.device) == (torch.device(KIND, 1), torch.device(KIND, 1))
    assert TorchStager(torch.device(KIND, 0)).device == torch.device(KIND, 0)
    assert stager.current_stream() == stager.current_stream() != stager.side


@pytest.mark.parametrize("at", [0, 1])
def test_the_current_device_and_both_streams_are_put_back(at: int, fake: FakeAccelerator) -> None:
    stager = FakeStager(fake, f"{KIND}:1")
    fake.index = at
    before = [fake.current_stream(torch.device(KIND, index)) for index in range(2)]

    def fail() -> None:
        assert (fake.index, fake.current_stream()) == (1, stager.side)
        raise KeyError

    with pytest.raises(KeyError):
        stager.on_side(fail)
    stager.copy_async(stager.empty(4), torch.zeros(4, dtype=torch.uint8), 4)
    assert len(fake.queues[stager.side]) == 1
    assert [fake.current_stream(torch.device(KIND, index)) for index in range(2)] == before
    assert fake.index == at


def test_an_event_is_used_again_and_asked(fake: FakeAccelerator) -> None:
    stager = FakeStager(fake)
    event = stager.record(stager.side)
    assert not stager.query(event)
    fake.run(stager.side)
    assert stager.query(event)
    seen: list[int] = []
    stager.on_side(lambda: fake.queue(lambda: seen.append(1)))
    assert stager.record(stager.side, event) is event
    stager.wait(stager.current_stream(), event)
    fake.queue(lambda: seen.append(2))
    fake.run(stager.current_stream())
    assert seen == []
    stager.synchronize(event)
    fake.finish()
    assert seen == [1, 2]


def test_events_of_cuda_let_the_thread_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the generic interface take the argument and spin."""
    event = Mock()
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event if blocking else None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda **numbers: tuple(numbers.values()))
    stager: Any = object.__new__(TorchStager)
    stager.device = torch.device("cuda:1")
    generic = torch.Stream(stream_id=7, device_index=1, device_type=1)
    stager.wait(generic, stager.record(generic))
    assert event.mock_calls == [call.record((7, 1, 1)), call.wait((7, 1, 1))]


def test_streams_of_torch_are_equal_by_device_and_number() -> None:
    """What `copies` relies on: torch makes a new object at every call."""
    one, same, number, place = (
        torch.Stream(stream_id=stream_id, device_index=index, device_type=1)
        for stream_id, index in ((3, 0), (3, 0), (4, 0), (3, 1))
    )
    assert one == same
    assert len({one, same, number, place}) == 3


# ---- page-locking -----------------------------------------------------------------------------------


class HostStager(TorchStager):
    """The host in a device's place. Attributes: what libcudart says, how often an error was cleared."""

    code = clearings = 0

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.side = "side"
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
        self.clearings += 1

    # Nothing is queued, so there is nothing to wait for.
    record = wait = synchronize = current_stream = Mock()
    _beside = staticmethod(nullcontext)  # type: ignore[assignment]


@pytest.fixture
def stager(monkeypatch: pytest.MonkeyPatch) -> HostStager:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return HostStager()


def test_a_failed_registration_is_cleared(stager: HostStager) -> None:
    stager.code = 304
    with pytest.raises(PinFailed, match="cudaHostRegister of 4096 bytes failed with error 304"):
        stager.register(1 << 20, 4096)
    assert stager.clearings == 1
    stager.unregister(1 << 20)
    assert stager.clearings == 2


def test_clearing_an_error_launches_a_kernel(stager: HostStager, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def zeros(size: int, device: Any) -> None:
        calls.append(device)
        if len(calls) == 1:
            raise RuntimeError("CUDA error: the one before")

    monkeypatch.setattr(torch, "zeros", zeros)
    TorchStager._clear_error(stager)
    assert calls == [stager.device] * 2


def test_only_cuda_registers(stager: HostStager) -> None:
    with pytest.raises(PinFailed, match=r"torch.cpu cannot page-lock memory that is there already"):
        TorchStager._runtime(stager)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_memory_that_cannot_be_pinned_is_said_to(stager: HostStager) -> None:
    with pytest.raises(PinFailed, match="torch could not page-lock 4096 bytes"):
        stager.pinned(4096)
    assert stager.clearings == 1


def test_the_proof_fails_where_copies_do_nothing(stager: HostStager, monkeypatch: pytest.MonkeyPatch) -> None:
    """WSL2. The probe is registered and unregistered in any case, and its memory is freed."""
    stager.prove()
    monkeypatch.setattr(stager, "copy_async", lambda *_: None)
    with pytest.raises(PinFailed, match="arrived with other bytes"):
        stager.prove()
    assert not stager.registered
    stager.code = 1
    with pytest.raises(PinFailed, match="failed with error 1"):
        stager.prove()


def test_torchs_default_device_changes_nothing(stager: HostStager) -> None:
    with torch.device("meta"):
        assert stager.pageable(8).device.type == "cpu"
        stager.prove()


@pytest.mark.parametrize("nbytes", [0, 5])
def test_memory_at_an_address_is_viewed_and_filled(nbytes: int, stager: HostStager) -> None:
    source, there = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    stager.fill(there, stager.view(source.data_ptr() + 1, nbytes), nbytes)
    assert there.tolist() == [*range(1, nbytes + 1), *[0] * (8 - nbytes)]
