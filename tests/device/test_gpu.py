"""On a real GPU: no batch is read before it has come, and no memory is written while anybody reads it.

Each test that has a guard runs without it too, and must fail then; see `tests.support.gpu`. What begins, ends
and breaks is in `test_gpu_lifecycle`, page-locking in `test_gpu_pinning`, what users do in `test_gpu_use`.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fastq_loader import DataLoader, ToDevice
from fastq_loader.device.backend import TorchStager
from fastq_loader.device.session import DeviceSession
from tests.conftest import run_script
from tests.support.crimes import ManyFields
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
    wrong_batches,
)

pytestmark = MARKS
BUFFERS = pytest.mark.parametrize("buffers", ["fresh", "reuse"])
PINNED = "Memcpy HtoD (Pinned -> Device)"


# ---- who waits for whom -------------------------------------------------------------------------------


@pytest.mark.processes
@guarded
@pytest.mark.parametrize(("pin", "workers"), [("register", 2), ("bounce", 2), ("bounce", 0)])
def test_no_host_memory_is_rewritten_before_its_copy_has_run(
    pin: str, workers: int, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warm_loader(pin=pin, num_workers=workers) as loader:
        guard.remove(monkeypatch, TorchStager, "query", lambda self, event: True)
        slow_copies(monkeypatch)
        with guard.outcome:
            assert wrong_batches(loader) == []


@pytest.mark.processes
@guarded
@BUFFERS
def test_a_batch_is_not_read_before_it_has_come(
    buffers: str, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warm_loader(buffers=buffers) as loader:
        guard.remove(monkeypatch, TorchStager, "wait", waits_of(side=True))
        slow_copies(monkeypatch)
        with guard.outcome:
            assert wrong_batches(loader) == []


@pytest.mark.processes
@guarded
@BUFFERS
def test_device_memory_is_not_overwritten_under_queued_reads(
    buffers: str, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warm_loader(buffers=buffers) as loader:
        guard.remove(monkeypatch, TorchStager, "wait", waits_of(side=False))
        with guard.outcome:
            assert wrong_batches(loader, lag) == []


@pytest.mark.processes
def test_device_memory_is_not_overwritten_under_a_transform_on_the_side_stream() -> None:
    """No guard is taken away: copies and transform share a stream, which keeps the order."""

    def twice(batch: torch.Tensor) -> torch.Tensor:
        lag()
        return batch * 2

    with DataLoader(
        _Halves(),
        BATCH,
        num_workers=2,
        device=ToDevice("cuda", transform=twice, transform_stream="side"),
    ) as loader:
        assert wrong_batches(loader, lag) == []


class _Halves(torch.utils.data.Dataset[torch.Tensor]):
    """Half of what `looks_right` expects."""

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), (index + 1) / 2)


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
        """Copy a batch, and wait until its bytes are there."""
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
def test_a_transform_on_the_side_stream_reads_memory_that_is_still_its_own(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(memory: torch.Tensor) -> torch.Tensor:
        lag()
        return memory.clone()

    pair = Pair()
    torch.empty(BATCH_BYTES, dtype=torch.uint8, device="cuda").fill_(0)  # loads the kernel
    torch.cuda.empty_cache()
    guard.remove(monkeypatch, TorchStager, "share", lambda self, memory, stream: None)
    pair.begin(0, late)
    seen = pair.read_first_elsewhere(lambda: None)
    torch.empty(BATCH_BYTES, dtype=torch.uint8, device="cuda").fill_(0)
    torch.cuda.synchronize()
    with guard.outcome:
        assert seen.item()
    pair.copies.drain()


@pytest.mark.processes
@BUFFERS
def test_a_loop_may_change_streams_at_every_step(buffers: str) -> None:
    """In `reuse` mode too. That a guard is missing is seen for certain in the two tests above only."""
    with warm_loader(buffers=buffers, prefetch=1) as loader:
        others = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        streams = [*others, torch.cuda.current_stream()]
        batches, seen = iter(loader), []
        for number in range(BATCHES):
            with torch.cuda.stream(streams[number % 3]):
                batch = next(batches)
                if number % 2:
                    lag()
                seen.append(looks_right(batch, number * BATCH))
                del batch
        torch.cuda.synchronize()
        assert [right.item() for right in seen] == [True] * BATCHES


# ---- one copy, which nobody waits for -----------------------------------------------------------------


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
        assert names == [PINNED] * BATCHES


@pytest.mark.parametrize("memory", ["registered", "pinned", "pageable"])
def test_to_begin_a_copy_of_1_gib_takes_less_than_a_millisecond(memory: str) -> None:
    """`pageable` is the run without the guard."""
    nbytes = 1 << 30
    session = DeviceSession(ToDevice("cuda", buffers="reuse"))
    copies, _ = session.open(None)
    stager = session.stager
    shared = mmap.mmap(-1, nbytes)  # as the arena is
    source = torch.from_numpy(np.frombuffer(shared, np.uint8)) if memory == "registered" else None
    if source is not None:
        source.fill_(1)
        stager.register(source.data_ptr(), nbytes)
    else:
        source = stager.pinned(nbytes) if memory == "pinned" else stager.pageable(nbytes)
    seconds = []
    for key in range(8):
        copies.turn()
        began = time.perf_counter()
        copies.begin(key, source, nbytes, ())
        seconds.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        copies.take(key)
        copies.reap()
    copies.drain()
    if memory == "registered":
        stager.unregister(source.data_ptr())
    with Guard(memory != "pageable").outcome:
        assert min(seconds[3:]) < 1e-3, "the first three make the ring"


# ---- captured graphs ----------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("pin", ["register", "bounce"])
def test_a_graph_is_captured_between_two_batches(pin: str) -> None:
    """What would break it, a CUDA call on another thread, is in the test below."""
    with warm_loader(pin=pin) as loader:
        batches = iter(loader)
        static = next(batches).clone()
        total = static.double().sum()  # loads the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            total = static.double().sum()
            with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
                next(batches)
        totals = []
        for _ in range(1, BATCHES):
            batches.copy_into(static)
            graph.replay()
            totals.append(total.clone())
        expected = [
            float(sum(range(number * BATCH + 1, (number + 1) * BATCH + 1)) * WIDTH)
            for number in range(1, BATCHES)
        ]
        assert [found.item() for found in totals] == expected
        with pytest.raises(StopIteration):
            batches.copy_into(static)


CAPTURE = """
import os, threading
import torch
from fastq_loader import DataLoader
from fastq_loader.device.backend import TorchStager
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
if crime == "next":
    TorchStager.capturing = lambda self: False
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="global"):
        twice = static * 2
        if crime == "thread":
            thread = threading.Thread(target=poll)
            thread.start()
            thread.join()
        elif crime == "next":
            next(batches)
except RuntimeError as error:
    refused.append(error)
print("broken" if refused else "captured", flush=True)
os._exit(0)  # a broken capture leaves a context that cannot be tidied up
"""


@pytest.mark.parametrize(("crime", "outcome"), [("", "captured"), ("thread", "broken"), ("next", "broken")])
def test_a_capture_breaks_where_a_copy_is_asked_for_in_the_middle(crime: str, outcome: str) -> None:
    """The guards: no thread of the loader's own, and `next()` refuses. A broken capture takes its process
    along, so it has one of its own."""
    result = run_script(CAPTURE.format(crime=crime), timeout=50)
    assert result.stdout.splitlines()[-1:] == [outcome], result.stderr


# ---- what is handed out -------------------------------------------------------------------------------


@pytest.mark.processes
@BUFFERS
def test_a_batch_that_is_held_for_50_steps_keeps_its_values(buffers: str) -> None:
    """`reuse` is the run without the guard: there a batch is valid until the next `next()`."""
    with warm_loader(buffers=buffers) as loader:
        steps = chain.from_iterable(loader for _ in range(4))
        held = next(steps)
        assert sum(1 for _ in steps) >= 50
        torch.cuda.synchronize()
        with Guard(buffers == "fresh").outcome:
            assert looks_right(held, 0).item()


def _every_dtype(index: int) -> dict[str, torch.Tensor]:
    """Random bits, NaNs included, as each dtype; 37 bytes' worth, so that fields end anywhere."""
    bits = torch.randint(0, 256, (37 * 16,), generator=torch.Generator().manual_seed(index))
    fields = {"bool": bits % 2 == 0, "nothing": torch.empty(0, 5), "scalar": bits[0].clone()}
    for dtype in _DTYPES:
        fields[str(dtype)] = bits.to(torch.uint8)[: 37 * dtype.itemsize].clone().view(dtype)
    return fields


_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bfloat16", "float16"),
        *("float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    )
)


class _EveryDtype(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 11  # the last batch is short

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return _every_dtype(index)


def _bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.cpu().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.processes
@guarded
@pytest.mark.parametrize("workers", [0, 2])
def test_every_dtype_arrives_to_the_bit(workers: int, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run without the guard: every copy is a byte too short."""
    copy_async, empty = TorchStager.copy_async, TorchStager.empty
    guard.remove(monkeypatch, TorchStager, "empty", lambda self, nbytes: empty(self, nbytes).fill_(0xEE))
    guard.remove(
        monkeypatch,
        TorchStager,
        "copy_async",
        lambda self, memory, source, nbytes: copy_async(self, memory, source, nbytes - 1),
    )
    dataset = _EveryDtype()
    wanted = list(torch.utils.data.DataLoader(dataset, 4))
    with (
        DataLoader(dataset, 4, num_workers=workers, device=ToDevice("cuda", pin="bounce")) as loader,
        guard.outcome,
    ):
        found = list(loader)
        assert all(field.is_cuda for batch in found for field in batch.values())
        assert [{name: _bits(field) for name, field in batch.items()} for batch in found] == [
            {name: _bits(field) for name, field in batch.items()} for batch in wanted
        ]
