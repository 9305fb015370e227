"""On a real GPU: no batch is read before it has come, no memory is written while anybody reads it, and what
users do with batches there.

Each test that has a guard runs without it too, and must fail then; see `tests.support.gpu`. What begins, ends
and is left behind is in `test_gpu_lifecycle`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fastq_loader import DataLoader, ToDevice, copy_into, normalize
from fastq_loader.device.accelerator import TorchStager
from fastq_loader.device.staging import DeviceSession
from tests.conftest import run_script
from tests.device.test_transforms import MEAN, STD, by_hand
from tests.support.crimes import ManyFields
from tests.support.datasets import Made, assert_same
from tests.support.gpu import (
    BATCH,
    BATCH_BYTES,
    BATCHES,
    MARKS,
    WIDTH,
    Guard,
    guarded,
    lag,
    looks_right,
    slow_copies,
    waits_of,
    warm_loader,
    warm_prefetcher,
    wrong_batches,
)

pytestmark = MARKS


def at_once(*_: Any) -> bool:
    return True


@pytest.mark.processes
@guarded
@pytest.mark.parametrize(
    ("make", "options", "name", "without", "late"),
    [
        # Host memory is rewritten before its copy has run.
        (warm_loader, {"pin": "register"}, "query", at_once, "copies"),
        (warm_loader, {"pin": "bounce"}, "query", at_once, "copies"),
        (warm_loader, {"pin": "bounce", "num_workers": 0}, "query", at_once, "copies"),
        # A batch is read before it has come.
        (warm_loader, {}, "wait", waits_of(side=True), "copies"),
        (warm_prefetcher, {}, "wait", waits_of(side=True), "copies"),
        # Device memory is overwritten under queued reads.
        (warm_loader, {}, "wait", waits_of(side=False), "reads"),
    ],
)
def test_no_memory_is_read_or_written_too_early(
    make: Any, options: Any, name: str, without: Any, late: str, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(**options) as batches:
        guard.remove(monkeypatch, TorchStager, name, without)
        if late == "copies":
            slow_copies(monkeypatch)
        with guard.outcome:
            assert wrong_batches(batches, *[lag] * (late == "reads")) == []


class Pair:
    """Two batches on their way through memory of the current stream, the first read on another stream.

    Once the first is gone, its memory is what torch's allocator hands out next: to the second batch.
    """

    def __init__(self) -> None:
        torch.cuda.empty_cache()
        self.copies, _ = DeviceSession(ToDevice("cuda", prefetch=1)).open(None)
        self.sources = [self._source(0), self._source(BATCH)]
        self.other = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def _source(self, first: int) -> torch.Tensor:
        rows = torch.arange(first + 1, first + 1 + BATCH, dtype=torch.int32)[:, None].expand(BATCH, WIDTH)
        return rows.contiguous().view(-1).view(torch.uint8).pin_memory()

    def begin(self, key: int, then: Callable[[Any], Any] | None = None) -> None:
        self.copies.wait_for(self.copies.begin(key, self.sources[key], BATCH_BYTES, (), then))

    def read_first_elsewhere(self, pause: Callable[[], None]) -> torch.Tensor:
        """Take batch 0 on the other stream, read it there after a pause, and let go of it."""
        with torch.cuda.stream(self.other):
            copy = self.copies.take(0)
            pause()
            batch = copy.memory[:BATCH_BYTES] if copy.result is None else copy.result
            seen = looks_right(batch.view(torch.int32).view(BATCH, WIDTH), 0)
        self.copies.reap()  # forgets the copy, whose bytes have come
        return seen


@guarded
@pytest.mark.parametrize("then", [None, torch.clone], ids=["copied", "transformed"])
def test_a_batch_may_be_read_on_another_stream(
    then: Callable[[Any], Any] | None, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair()
    guard.remove(monkeypatch, TorchStager, "share", lambda self, memory, stream: None)
    pair.begin(0, then)
    seen = pair.read_first_elsewhere(lag)
    pair.begin(1, then)
    torch.cuda.synchronize()
    with guard.outcome:
        assert seen.item()
    pair.copies.drain()


@guarded
def test_a_transform_beside_reads_memory_of_its_own(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(memory: torch.Tensor) -> torch.Tensor:
        lag()
        return memory.clone()

    torch.empty(BATCH_BYTES, dtype=torch.uint8, device="cuda").fill_(0)  # loads the kernel
    pair = Pair()
    guard.remove(monkeypatch, TorchStager, "share", lambda self, memory, stream: None)
    pair.begin(0, late)
    seen = pair.read_first_elsewhere(lambda: None)
    torch.empty(BATCH_BYTES, dtype=torch.uint8, device="cuda").fill_(0)
    torch.cuda.synchronize()
    with guard.outcome:
        assert seen.item()
    pair.copies.drain()


@pytest.mark.parametrize("pin", ["register", "bounce", "pageable"])
def test_a_batch_is_one_copy_from_page_locked_memory(pin: str) -> None:
    """`pageable` is the run without the guard. The profiler keeps descriptors of its own, so that nothing is
    said here about what is left behind."""
    dataset = ManyFields(BATCH * BATCHES, 32, 1000)
    with DataLoader(
        dataset, BATCH, num_workers=2, device=ToDevice("cuda", pin=pin), persistent_workers=True
    ) as loader:
        for _ in loader:
            pass
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in loader:
                pass
            torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.name.startswith("Memcpy HtoD")]
    with Guard(pin != "pageable").outcome:
        assert names == ["Memcpy HtoD (Pinned -> Device)"] * BATCHES


CAPTURE = """
import os, threading
import torch
from fastq_loader import DataLoader
from fastq_loader.device.accelerator import TorchStager
from tests.support.gpu import Numbers

refused = []

def poll():
    try:
        batches.poll()
    except RuntimeError as error:
        refused.append(error)

batches = iter(DataLoader(Numbers(), 4, num_workers=2, device="cuda"))
static = next(batches).clone()
crime = {crime!r}
if crime == "next without the guard":
    TorchStager.capturing = lambda self: False
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="global"):
        twice = static * 2
        if crime == "thread":
            thread = threading.Thread(target=poll)
            thread.start()
            thread.join()
        elif crime:
            try:
                next(batches)
            except RuntimeError as error:
                if "while a CUDA graph is being captured" not in str(error):
                    raise
except RuntimeError as error:
    refused.append(error)
print("broken" if refused else "captured", flush=True)
os._exit(0)  # a broken capture leaves a context that cannot be tidied up
"""


@pytest.mark.parametrize(
    ("crime", "outcome"),
    [("", "captured"), ("next", "captured"), ("next without the guard", "broken"), ("thread", "broken")],
)
def test_a_graph_is_captured_between_two_batches(crime: str, outcome: str) -> None:
    """The guards: `next()` refuses in the middle of it, and there is no thread of the loader's own. A broken
    capture takes its process along, so it has one of its own."""
    result = run_script(CAPTURE.format(crime=crime), timeout=50)
    assert result.stdout.splitlines()[-1:] == [outcome], result.stderr


DTYPES = """uint8 int8 uint16 int16 uint32 int32 uint64 int64 bfloat16 float16 float32 float64 complex64
    complex128 float8_e4m3fn float8_e5m2"""


def every_dtype(index: int) -> dict[str, torch.Tensor]:
    """Random bits, NaNs included, as each dtype; 37 elements, so that fields end anywhere."""
    bits = torch.randint(0, 256, (37 * 16,), generator=torch.Generator().manual_seed(index))
    fields = {"bool": bits % 2 == 0, "nothing": torch.empty(0, 5), "scalar": bits[0].clone()}
    for name in DTYPES.split():
        dtype = getattr(torch, name)
        fields[name] = bits.to(torch.uint8)[: 37 * dtype.itemsize].clone().view(dtype)
    return fields


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_every_dtype_arrives_to_the_bit(workers: int) -> None:
    dataset = Made(every_dtype, 11)  # the last batch is short
    with DataLoader(dataset, 4, num_workers=workers, device="cuda") as loader:
        for wanted, found in zip(torch.utils.data.DataLoader(dataset, 4), loader, strict=True):
            assert all(field.is_cuda for field in found.values())
            assert_same(wanted, {name: field.cpu() for name, field in found.items()})


def image(index: int) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (3, 96, 64), dtype=torch.uint8, generator=generator), index


IMAGES = Made(image, 16)
PLAIN = [torch.stack([image(at)[0] for at in range(first, first + 4)]) for first in range(0, 16, 4)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stream", "dtype", "layout"),
    [
        ("consumer", torch.float32, torch.contiguous_format),
        ("side", torch.float32, torch.channels_last),
        ("side", torch.float16, torch.channels_last),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_normalize_is_torchvisions_formula(
    workers: int, stream: str, dtype: torch.dtype, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_copies(monkeypatch)
    transform = normalize(MEAN, STD, dtype, channels_last=layout is torch.channels_last)
    device = ToDevice("cuda", transform=transform, transform_stream=stream)
    with DataLoader(IMAGES, 4, num_workers=workers, device=device) as loader:
        for (images, labels), plain, first in zip(loader, PLAIN, range(0, 16, 4), strict=True):
            assert (images.dtype, labels.tolist()) == (dtype, list(range(first, first + 4)))
            assert images.is_contiguous(memory_format=layout)
            error = (images.cpu().double() - by_hand(plain)).abs().max().item()
            assert error <= TOLERANCE[dtype], f"{error} off"


@pytest.mark.processes
def test_a_captured_step_normalises_what_is_copied_into_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_copies(monkeypatch)
    transform = normalize(MEAN, STD, torch.float16, which=[0])
    with DataLoader(IMAGES, 4, num_workers=2, device="cuda") as loader:
        batches = iter(loader)
        first = next(batches)
        static = [part.clone() for part in first]
        transform(static)  # warm, and makes the factors that a graph cannot keep
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            images, labels = transform(static)
        outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in PLAIN:
            if outputs:
                batches.copy_into(static)
            else:
                copy_into(static, first)
            lag()  # the replay is late; the next batch must not be copied into `static` before
            graph.replay()
            outputs.append((images.clone(), labels.clone()))
    for (images, labels), plain, number in zip(outputs, PLAIN, range(4), strict=True):
        assert (images.cpu().double() - by_hand(plain)).abs().max().item() <= TOLERANCE[torch.float16]
        assert labels.tolist() == list(range(4 * number, 4 * number + 4))
