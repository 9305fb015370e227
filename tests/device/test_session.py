"""What is kept from epoch to epoch, what is counted, and what changes when the user sets another device."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from fastq_loader import DataLoader, PinFailed, ToDevice
from fastq_loader.device import session as session_module
from fastq_loader.device.session import DeviceSession
from tests.support.datasets import Made, MapDataset, assert_same, identity
from tests.support.late_device import Late, LateStager, image_and_label
from tests.support.staging_runs import options_for

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def add_one(batch: Any) -> Any:
    return [batch[0] + 1, batch[1]]


def staging_of(loader: DataLoader[Any]) -> Any:
    return loader.statistics().staging


def test_a_device_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[LateStager] = []

    def open_device(device: torch.device) -> LateStager:
        assert device == torch.device("cpu")
        opened.append(LateStager(refuse=("register",)))
        return opened[-1]

    monkeypatch.setattr(session_module, "TorchStager", open_device)
    session = DeviceSession(options_for(pin="register"))
    session.refuse_capture()  # of a device that was not opened nothing is asked
    assert opened == []
    mapping: Any = object()
    for _ in range(2):
        with pytest.raises(PinFailed):
            session.open(mapping)
    session.open(None)
    assert opened == [session.stager]
    opened[0].is_capturing = True
    with pytest.raises(RuntimeError, match="CUDA graph is being captured"):
        session.refuse_capture()


def test_statistics_say_what_was_copied(late: Late) -> None:
    late()
    loader = DataLoader(Made(image_and_label, 20), 2, num_workers=2, device="cuda")
    assert staging_of(loader).copies == 0  # nothing was iterated
    list(loader)
    staging = staging_of(loader)
    assert (staging.device, staging.pin, staging.copies) == ("cpu", "register", 10)
    assert staging.copied_bytes >= 10 * 2 * (3 * 96 * 96 + 8)
    assert staging.populate_seconds > 0
    assert staging.register_seconds > 0
    list(loader)
    assert (staging.copies, staging_of(loader).copies) == (10, 20)


def test_buffers_are_kept_from_epoch_to_epoch_without_workers(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = late()
    made: list[int] = []
    pinned = device.pinned
    monkeypatch.setattr(device, "pinned", lambda nbytes: made.append(nbytes) or pinned(nbytes))
    loader = DataLoader(Made(image_and_label, 20), 2, device="cuda")
    for _ in range(5):
        next(iter(loader))
        assert len(list(loader)) == 10
    assert len(made) == 3  # prefetch + 1
    assert staging_of(loader).pinned_bytes == sum(made)
    loader.close()
    assert staging_of(loader).pinned_bytes == 0
    assert len(list(loader)) == 10


@WORKERS
@pytest.mark.parametrize("persistent", [False, True])
def test_what_is_set_later_holds_from_the_next_epoch_on(persistent: bool, workers: int, late: Late) -> None:
    late()
    options: Any = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
    loader = DataLoader(Made(image_and_label, 8), 2, device="cuda", **options)
    expected = list(TorchDataLoader(Made(image_and_label, 8), 2))
    for device, transform in (
        ("cuda", None),
        ("cuda", add_one),
        (None, None),
        ("cpu", add_one),
        ("cuda", None),
    ):
        loader.device = None if device is None else ToDevice(device, transform=transform)
        wanted = expected if transform is None else [add_one(batch) for batch in expected]
        assert_same(wanted, list(loader), f"{device} {transform}")
    loader.close()


def test_a_copy_of_a_loader_has_its_options_and_starts_anew(late: Late) -> None:
    late()
    device = ToDevice("cuda", 3, identity, transform_stream="side", pin="bounce", pin_limit_bytes=1 << 30)
    loader = DataLoader(MapDataset("tensors", 6), 2, device=device)
    list(loader)
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.device == device
        assert staging_of(other).copies == 0
        assert len(list(other)) == 3


@WORKERS
def test_two_iterators_at_once_do_not_mix(workers: int, late: Late) -> None:
    late(seed=workers)
    loader = DataLoader(Made(image_and_label, 20), 2, num_workers=min(workers, 1), device="cuda")
    for at, batches in enumerate(zip(loader, loader, strict=True)):
        for images, labels in batches:
            assert labels.tolist() == [2 * at, 2 * at + 1]
            assert images[:, 1, 1, 1].tolist() == labels.tolist()


@WORKERS
def test_next_is_refused_while_a_graph_is_captured(workers: int, late: Late) -> None:
    device = late()
    with DataLoader(Made(image_and_label, 20), 2, num_workers=workers, device="cuda") as loader:
        iterator = iter(loader)
        next(iterator)
        device.is_capturing = True
        with pytest.raises(RuntimeError, match="CUDA graph is being captured"):
            next(iterator)
        device.is_capturing = False
        assert next(iterator)[1].tolist() == [2, 3]


def test_pin_memory_is_not_needed_with_a_device(late: Late) -> None:
    late()
    loader = DataLoader(MapDataset("tensors", 6), 2, device="cuda", pin_memory=True)  # without a warning
    assert len(list(loader)) == 3
