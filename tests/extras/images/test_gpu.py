"""Decoding on a GPU, without one: what waits for the stream, and which calls are made. See also
`tests/device/test_gpu_images.py`."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader.extras.images import gpu
from tests.support.photographs import file_of, photograph

FILE = file_of(photograph(20, 30), "JPEG")


class Stream:
    """Notes the calls that it gets."""

    device = torch.device("cuda:2")

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def synchronize(self) -> None:
        self.calls.append("wait")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for CUDA."""
    made: list[str] = []

    def context(name: str) -> Any:
        def enter(*_: Any) -> AbstractContextManager[None]:
            made.append(name)
            return nullcontext()

        return enter

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(gpu, "_own_stream", functools.cache(gpu._own_stream.__wrapped__))
    monkeypatch.setattr(torch.cuda, "device", context("device"))
    monkeypatch.setattr(torch.cuda, "stream", context("stream"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(made))
    return made


def decoding(monkeypatch: pytest.MonkeyPatch, calls: list[str], error: Exception | None = None) -> None:
    def decode(files: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        calls.append(f"decode on {device}")
        assert all(bytes(file.numpy()) == FILE for file in files)
        if error is not None:
            raise error
        return files

    monkeypatch.setattr(gpu, "decoder", lambda: (decode, "a library"))


def test_the_stream_is_waited_for_before_each_decode_and_at_the_end(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding(monkeypatch, calls)
    with gpu.working("cuda") as stream:
        assert calls == ["device", "stream"]
        calls.clear()
        for data in (FILE, bytearray(FILE), np.frombuffer(FILE, np.uint8).data):
            assert len(gpu.decode([data], stream)) == 1
    assert calls == ["wait", "decode on cuda:2"] * 3 + ["wait"]
    with pytest.raises(KeyError), gpu.working("cuda"):
        raise KeyError
    assert calls[-1] == "wait"


def test_what_cannot_be_decoded_there_is_left_to_the_cpu(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = gpu.stream_of("cuda:1")
    assert stream is gpu.stream_of(torch.device("cuda:1")) is not gpu.stream_of("cuda")
    decoding(monkeypatch, calls, RuntimeError("not a JPEG"))
    assert list(gpu.decode([FILE], stream)) == []
    decoding(monkeypatch, calls, torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        gpu.decode([FILE], stream)
    monkeypatch.setattr(gpu, "decoder", lambda: (None, "no library"))
    assert list(gpu.decode([FILE], stream)) == []
