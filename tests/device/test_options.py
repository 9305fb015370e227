"""What `device=` may be, without a device: what is wrong is named when it is said."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

from fastq_loader import DataLoader, ToDevice
from fastq_loader.device.options import read_device


def test_short_forms_and_configurations_mean_the_same() -> None:
    assert read_device(None) is None
    assert read_device("cpu") == ToDevice("cpu") == ToDevice("cpu", prefetch=2, pin="auto")
    assert ToDevice("cpu").target is None
    given = ToDevice("cpu", transform=abs, buffers="reuse")
    assert read_device(given) is given
    assert pickle.loads(pickle.dumps(given)) == given != dataclasses.replace(given, transform=None)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("prefetch", 0, ValueError),
        ("prefetch", True, ValueError),
        ("transform", 3, TypeError),
        ("transform_stream", "other", ValueError),
        ("buffers", "ring", ValueError),
        ("buffers", None, ValueError),
        ("pin", "yes", ValueError),
        ("pin_limit_bytes", -1, ValueError),
    ],
)
def test_a_wrong_option_is_named(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"ToDevice\\('cpu', {name}={value!r}\\): "):
        ToDevice("cpu", **{name: value})


def test_no_device_has_no_options() -> None:
    with pytest.raises(TypeError, match=r"ToDevice\(None\): name a device"):
        ToDevice(None)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a torch without CUDA")
def test_an_absent_device_is_named_when_it_is_said_and_set() -> None:
    with pytest.raises(ValueError, match="device='cuda:1' cannot be used"):
        ToDevice("cuda:1")
    loader = DataLoader([1, 2], device="cpu")
    with pytest.raises(ValueError, match="device='cuda' cannot be used"):
        loader.device = "cuda"
    assert loader.device == "cpu"
