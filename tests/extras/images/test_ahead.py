"""Decoding in a thread: results in order, errors at their turn, and an end to it."""

from __future__ import annotations

import copy
import os
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from fastq_loader.extras.images import gpu
from fastq_loader.extras.images.ahead import Ahead
from fastq_loader.extras.images.decoders import BASELINE, Header, decode
from fastq_loader.images import DecodeImages, EncodedBatch, encoded
from tests.conftest import run_script
from tests.extras.images.test_decode_images import FILES
from tests.support.alarms import alarm_after, ring
from tests.support.photographs import file_of, photograph


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PATIENCE", 60.0)


@pytest.mark.processes
def test_a_process_ends_in_the_middle_of_a_batch() -> None:
    result = run_script(
        """
        import time
        import torch
        from fastq_loader.extras.images.ahead import Ahead

        ahead = Ahead(lambda batch: time.sleep(30), lambda batch, found: None)
        waiting = ahead.begin(0)
        time.sleep(0.1)
        print("leaves", flush=True)
        """
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "leaves\n", "")


@pytest.mark.processes
def test_a_fork_waits_for_the_batch() -> None:
    inside, end = threading.Event(), list[float]()

    def decode() -> None:
        with gpu.working("cpu"):
            inside.set()
            time.sleep(0.2)
            end.append(time.monotonic())

    thread = threading.Thread(target=decode)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:  # the lock is free here, too
        os._exit(0 if gpu.TURN.acquire(timeout=60) else 1)
    assert end
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    with gpu.working("cpu"):
        assert end[0] <= time.monotonic()


def test_the_device_is_the_one_that_is_current_for_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's current device belongs to a thread, and is the first one in a new thread."""
    current = {threading.current_thread(): 2}
    used: list[int] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.get(threading.current_thread(), 0))

    def stream(index: int) -> Any:
        used.append(index)
        return SimpleNamespace(device=torch.device("cuda", index))

    monkeypatch.setattr(gpu, "_own_stream", stream)
    decoding = DecodeImages(16, device="cuda").start_ahead()
    waiting = decoding.begin(batch_of(FILES[0]))
    decoding.close()
    assert used == [2, 2]
    del waiting


def test_other_threads_keep_their_threads() -> None:
    """torch sets the number for all threads that begin later, too."""
    before, found = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    decoding = Ahead(lambda _: torch.get_num_threads(), lambda _, found: found)
    assert decoding.begin(0)() == 1
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    decoding.close()
    assert [torch.get_num_threads(), *found] == [3, 3]
    torch.set_num_threads(before)


def test_what_is_no_exception_is_raised_at_its_turn_too() -> None:
    def panic(batch: Any) -> None:
        raise BaseException("a panic of a plugin")

    decoding = Ahead(panic, lambda _, found: found)
    waiting = [decoding.begin(number) for number in range(2)]
    for take in waiting:
        with alarm_after(60, ring), pytest.raises(BaseException, match="a panic of a plugin"):
            take()
    decoding.close()


def batch_of(*files: bytes) -> EncodedBatch:
    made: EncodedBatch = default_collate([encoded(file, str(number)) for number, file in enumerate(files)])
    return made


@pytest.mark.parametrize("refused", [None, 3])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_a_gpu_decodes_baseline_jpeg_in_groups(
    refused: int | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = file_of(photograph(40, 50), "JPEG", exif=_turned())
    photos = [*(file_of(photograph(40, 50, seed), "JPEG") for seed in range(6)), turned]
    batch = batch_of(*photos[:6], FILES[0], file_of(photograph(40, 50), "JPEG", progressive=True), turned)
    groups: list[list[int]] = []

    def decoded(files: list[Any], stream: Any) -> Any:
        groups.append([photos.index(bytes(file)) for file in files])
        header = Header(40, 50, BASELINE)
        arrays = [decode(file, "", header, 1, (0, 0))[0] for file in files]
        found = [torch.from_numpy(array).permute(2, 0, 1) for array in arrays]
        return () if refused in groups[-1] else found

    options = {"exif": True, "interpolation": mode}
    pixels = DecodeImages(16, device="cpu", group_bytes=2 * 3 * 40 * 50, **options)
    stream = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(gpu, "working", lambda device: nullcontext(stream))
    monkeypatch.setattr(gpu, "decode", decoded)
    found = pixels(copy.copy(batch))
    assert groups == [[0, 1], [2, 3], [4, 5]]
    assert DecodeImages(16, device="cpu", group_bytes=1)(copy.copy(batch)).shape == found.shape
    assert groups[3:] == [[number] for number in range(7)]  # with `exif=False` the last one, too
    monkeypatch.undo()
    differences = (found.int() - DecodeImages(16, **options)(batch).int()).abs()
    assert differences[:6].max() <= 1  # computed in floats; bicubic values are cut off, too
    assert differences[6:].max() == 0


def _turned() -> Any:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    return exif
