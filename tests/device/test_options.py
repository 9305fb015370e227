"""What `device=` may be, without a device: what is wrong is named when it is said."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from fastq_loader import DataLoader, ToDevice
from fastq_loader.device.options import read_device
from tests.support.datasets import Made, assert_same
from tests.support.late_device import image_and_label

WORKERS = pytest.mark.parametrize("workers", [0, 2])


def test_short_forms_and_configurations_mean_the_same() -> None:
    assert read_device(None) is None
    assert read_device("cpu") == ToDevice("cpu") == ToDevice("cpu", prefetch=2, pin="auto")
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
        ("pin", "yes", ValueError),
        ("pin_limit_bytes", -1, ValueError),
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
        (1.5, TypeError, "device=1.5"),
    ],
)
def test_a_wrong_device_is_named(device: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        DataLoader([1, 2], device=device)


def test_no_device_has_no_options() -> None:
    with pytest.raises(TypeError, match=r"ToDevice\(None\): name a device"):
        ToDevice(None)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a torch without CUDA")
def test_an_absent_device_is_named_when_it_is_said_and_set() -> None:
    for make in (ToDevice, lambda device: DataLoader([1, 2], device=device)):
        with pytest.raises(ValueError, match=r"device='cuda:1' cannot be used: torch .* without CUDA"):
            make("cuda:1")
    loader = DataLoader([1, 2], device="cpu")
    with pytest.raises(ValueError, match="device='cuda' cannot be used"):
        loader.device = "cuda"
    assert loader.device == "cpu"


@pytest.mark.processes
@WORKERS
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_cpu_is_no_device(device: Any, workers: int) -> None:
    with DataLoader(Made(image_and_label, 8), 2, num_workers=workers, device=device) as loader:
        for expected, batch in zip(TorchDataLoader(Made(image_and_label, 8), 2), loader, strict=True):
            assert_same(expected, batch)
        assert loader.statistics().staging is None


@pytest.mark.processes
def test_on_the_cpu_the_transform_runs_too_and_cannot_end_the_epoch() -> None:
    """Without workers: see iterators/test_serial."""

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
