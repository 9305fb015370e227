"""`Prefetcher`: runs over a simulated device; any loader over a late one, and where it stands."""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader

from fastq_loader import DataLoader, IteratorInvalid, Prefetcher, StatefulDataLoader, ToDevice
from fastq_loader.device import staging
from fastq_loader.extras.prefetcher import prefetcher
from tests.support import thorough
from tests.support.datasets import Made, Point, Record, assert_same, identity
from tests.support.late_device import Late, image_and_label, move_late
from tests.support.simulated_device import HOME, OTHER, Batch, Breach, Host, SimulatedDevice
from tests.support.staging_runs import options_for
from tests.support.thorough import examples

BATCHES, NBYTES = 8, 64
FAILURE = "the loader fails"


class Loader:
    def __init__(self, draw: random.Random) -> None:
        self.failing = {at for at in range(BATCHES) if draw.random() < 0.1}
        self.expected = [FAILURE if at in self.failing else ("transformed", at) for at in range(BATCHES)]
        self.host = Host(NBYTES, locked=True)
        self.at = -1

    def __iter__(self) -> Loader:
        self.at = -1
        return self

    def __next__(self) -> Host:
        self.host.value = "overwritten"
        self.at += 1
        if self.at >= BATCHES:
            raise StopIteration
        if self.at in self.failing:
            raise KeyError(FAILURE)
        self.host.value = self.at
        return self.host


def simulated(kind: type) -> Any:
    class Simulated(kind):
        def _pack(self, batch: Host) -> Any:
            value, transform = batch.value, self.session.options.apply_transform
            layout = SimpleNamespace(device_bytes=NBYTES)
            segments = [(value, NBYTES, 0)]
            return layout, segments, lambda memory: transform(Batch([(memory, value)]))

    return Simulated


def transform(device: SimulatedDevice, batch: Batch) -> Batch:
    [(source, value)] = batch.parts
    cell, made = source.cell, device.empty(NBYTES)
    device.write(made, lambda: ("transformed", cell.value))
    return Batch([(made, ("transformed", value))])


CHOICES: dict[str, Any] = {
    "prefetch": (1, 1, 2),
    "transform_stream": ("side", "consumer"),
}


def run(seed: int) -> None:
    """Some epochs, whose steps are slower or quicker than the copies; the first is broken off."""
    draw = random.Random(seed)
    device, loader = SimulatedDevice(seed), Loader(draw)
    pace = draw.choice((2, 12, 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "TorchBackend", lambda _: device)
        patch.setattr(prefetcher, "AheadStaging", simulated(prefetcher.AheadStaging))
        batches: Any = None
        for last in (draw.randrange(BATCHES), BATCHES, BATCHES):
            if batches is not None and draw.random() < 0.7:
                iter(batches)
            else:
                del batches  # with copies under way
                use_memory(device, draw, 5)
                given = {name: draw.choice(values) for name, values in CHOICES.items()}
                batches = Prefetcher(loader, options_for(**given, transform=partial(transform, device)))
            if (seen := iterate(batches, device, draw, pace, last)) != loader.expected[:last]:
                raise Breach(f"{seen} came instead of {loader.expected[:last]}")
    device.finish()


def iterate(batches: Any, device: SimulatedDevice, draw: random.Random, pace: int, last: int) -> list[Any]:
    seen: list[Any] = []
    while len(seen) < last:
        device.run(draw.randrange(pace))
        device.current = draw.choice((HOME, HOME, HOME, OTHER))
        try:
            batch = batches.next()
        except KeyError as error:
            seen.append(error.args[0])
            continue
        if batch[0] is None:
            break
        seen.append(batch.parts[0][1])
        for _ in range(2):
            device.read(batch)
            device.run(draw.randrange(pace))
        del batch
        use_memory(device, draw, 1)
    if last == BATCHES and batches.next()[0] is not None:
        raise Breach("there is no end")
    return seen


def use_memory(device: SimulatedDevice, draw: random.Random, times: int) -> None:
    for _ in range(times):
        memory = device.empty(NBYTES)
        device.write(memory, lambda: "the step's")
        device.catch_up(device.current) if draw.random() < 0.3 else device.run(3)
        device.read(Batch([(memory, "the step's")]))


@examples(300)
@given(st.integers(0, 2**32))
def test_every_batch_is_right_however_slow_the_step_is(seed: int) -> None:
    run(seed)


def images(size: int = 10) -> Any:
    return TorchDataLoader(Made(image_and_label, size), 2)


def add_one(batch: Any) -> Any:
    return batch[0] + 1, batch[1]


def drained(batches: Prefetcher) -> list[Any]:
    return list(takewhile(lambda batch: batch != (None, None), iter(batches.next, None)))


@pytest.mark.parametrize("device", ["cuda", "cpu", ToDevice("cpu")])
def test_both_protocols_give_the_loaders_batches_epoch_after_epoch(device: Any, late: Late) -> None:
    if device == "cuda":
        late()
    wanted = [add_one(batch) for batch in images()]
    with Prefetcher(images(), device, add_one) as batches:
        assert len(batches) == 5
        for _ in range(2):
            assert_same(wanted, list(batches))
            iter(batches)
            assert_same(wanted, drained(batches))
            assert_same(wanted[:1], [next(iter(batches))])
    assert_same(wanted, drained(batches))
    assert (batches.statistics() is None) == (device != "cuda")


def test_a_copy_is_under_way_when_a_batch_is_handed_out_and_statistics_say_so(late: Late) -> None:
    device = late()
    batches = Prefetcher(images(), "cuda")
    for at, _ in enumerate(batches):
        assert len(device.copies) == min(at + 2, 5)
    staged = batches.statistics()
    assert (staged.pin, staged.copies, staged.pinned_bytes > 0) == ("bounce", 5, True)
    assert len(list(batches)) == 5
    assert batches.statistics().pinned_bytes == staged.pinned_bytes  # type: ignore[union-attr]
    batches.close()
    assert batches.statistics().pinned_bytes == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", ["side", "consumer"])
def test_batches_that_are_never_handed_out_free_their_memory(
    stream: str, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, made = late(), list[Any]()
    empty = device.empty

    def watched(nbytes: int) -> torch.Tensor:
        memory = empty(nbytes)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(device, "empty", watched)
    batches = Prefetcher(images(), ToDevice("cuda", 2, add_one, transform_stream=stream))
    epoch = iter(batches)  # held by the user
    next(epoch)
    batches.close()
    assert [memory() for memory in made] == [None] * 3
    assert len(list(batches)) == 5


@pytest.mark.parametrize(
    ("batch", "end"),
    [
        ([torch.ones(2), torch.ones(2), "x"], (None, None, None)),
        (Point(torch.ones(2), "x"), Point(None, None)),
        ({"x": torch.ones(2)}, None),
        (torch.ones(2), None),
        (None, None),  # an empty loader
    ],
)
def test_the_end_has_as_many_parts_as_a_batch(batch: Any, end: Any, late: Late) -> None:
    late()
    batches = Prefetcher([batch] if batch is not None else [], "cuda")
    for _ in range(len(batches)):
        assert_same(batch, batches.next())
    assert_same([batches.next(), batches.next()], [end, end])


class Subclass(torch.Tensor):
    """A tensor of another type."""


SPARSE: Any = {"is_coalesced": True, "check_invariants": False}


def everything() -> dict[str, Any]:
    """Parts of a batch, all of which can be written to."""
    return {
        "tensor": torch.zeros(100),
        "grad": torch.zeros(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.zeros(3)),
        "of a graph": torch.zeros(3, requires_grad=True) * 1,
        "subclass": torch.zeros(3).as_subclass(Subclass),
        "conjugate": torch.zeros(3, dtype=torch.complex64).conj(),
        "sparse": torch.sparse_coo_tensor(torch.arange(3)[None], torch.zeros(3), (3,), **SPARSE),
        "array": np.zeros((2, 3), order="F"),
        "strided array": np.zeros((4, 3))[::2],
        "array of objects": np.zeros(3, dtype=object),
        "record": Record("r", [torch.zeros(3), np.zeros(3), np.zeros(1000)]),
        "record without tensors": Record("r", [np.zeros(3), bytearray(3)]),
        "cannot be pickled": Record("r", [np.zeros(3), lambda: None]),
        "list": [0, 0, 0],
    }


def parts_of(part: Any) -> list[Any]:
    if isinstance(part, Record):
        return [inner for each in part.value for inner in parts_of(each)]
    if isinstance(part, torch.Tensor):
        return [part._values() if part.is_sparse else part]
    return [] if callable(part) else [part]


def fill(batch: dict[str, Any], number: int) -> None:
    for part in [inner for value in batch.values() for inner in parts_of(value)]:
        with torch.no_grad():
            part[:] = type(part)([number] * 3) if isinstance(part, (list, bytearray)) else number


def numbers_in(value: Any) -> set[int]:
    found: set[int] = set()
    for part in parts_of(value):
        if isinstance(part, torch.Tensor):
            part = part.detach().resolve_conj().real.tolist()
        found.update(np.ravel(list(part)).astype(int).tolist())
    return found


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("stream", ["side", "consumer"])
def test_a_batch_may_be_reused(stream: str, where: str, late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    device = late()
    finish_moves = move_late(monkeypatch, device) if where == "host" else list

    def batches() -> Iterator[Any]:
        batch = everything()
        for number in range(6):
            fill(batch, number)
            yield batch
            fill(batch, 77)
            finish_moves()

    for number, batch in enumerate(Prefetcher(batches(), ToDevice("cuda", 2, transform_stream=stream))):
        assert {name: numbers_in(part) for name, part in batch.items()} == {
            name: {number} for name in everything()
        }
        assert (type(batch["subclass"]), batch["of a graph"].is_leaf) == (Subclass, False)
        assert (batch["grad"].is_leaf, batch["grad"].requires_grad) == (True, True)
        assert batch["array"].flags.f_contiguous


class Failing:
    def __iter__(self) -> Iterator[Any]:
        self.at = -1
        return self

    def __next__(self) -> torch.Tensor:
        self.at += 1
        if self.at in (1, 2):
            raise OSError(self.at, "on purpose")
        if self.at == 6:
            raise StopIteration
        return torch.tensor([self.at])


def fail_at_4(batch: torch.Tensor) -> torch.Tensor:
    if batch.item() == 4:
        raise KeyError("on purpose")
    return batch


@pytest.mark.parametrize("stream", ["side", "consumer"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_error_is_raised_in_its_place_and_once(stream: str, device: str, late: Late) -> None:
    if device == "cuda":
        late()
    loader = Failing()
    batches = iter(Prefetcher(loader, ToDevice(device, 3, fail_at_4, transform_stream=stream)))
    assert next(batches).item() == 0
    assert loader.at == (device == "cuda"), "what comes after an error is not asked for before it is raised"
    for number in (1, 2):
        with pytest.raises(OSError, match="on purpose") as raised:
            next(batches)
        assert raised.value.errno == number
    assert next(batches).item() == 3
    with pytest.raises(KeyError, match="on purpose") as failed:
        next(batches)
    assert device == "cpu" or stream == "consumer" or "fail_at_4" in str(failed.value.__cause__)
    assert [batch.item() for batch in batches] == [5]


def test_what_cannot_be_meant_is_refused(late: Late) -> None:
    late()
    with pytest.raises(ValueError, match=r"transform=.* are two transforms: give one"):
        Prefetcher([], ToDevice("cuda", transform=add_one), add_one)
    with pytest.raises(TypeError, match=r"transform=3.*must be a function"):
        Prefetcher([], "cuda", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ToDevice\(None\): name a device"):
        Prefetcher([], None)  # type: ignore[arg-type]


def test_our_own_loader_needs_no_second_prefetcher(late: Late) -> None:
    for own in (None, "cpu"):
        loader = DataLoader(Made(image_and_label, 4), 2, device=own)
        assert_same(list(images(4)), list(Prefetcher(loader, "cpu")))
    late()
    with pytest.raises(ValueError, match="loader has device='cuda', and prefetches itself"):
        Prefetcher(DataLoader(Made(image_and_label, 4), 2, device="cuda"), "cuda")


def test_an_epoch_ends_where_another_begins(late: Late) -> None:
    late()
    batches = Prefetcher(images(), "cuda")
    first = iter(batches)
    next(first)
    second = iter(batches)
    assert next(second)[1].tolist() == [0, 1]
    for epoch, why in ((first, "a newer one has begun"), (second, "its prefetcher was closed")):
        with pytest.raises(IteratorInvalid, match=why):
            next(epoch)
        batches.close()


def test_the_iterator_comes_before_the_device(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers must not inherit a device that is in use, and end where nobody waits for them."""
    device, loader, made = late(), Failing(), []
    batches = Prefetcher(loader, "cuda")
    with monkeypatch.context() as patch:
        patch.setattr(staging, "TorchBackend", lambda _: made.append(hasattr(loader, "at")) or device)
        held = iter(batches)
    next(held)
    references = sys.getrefcount(loader)
    batches.close()
    assert (made, sys.getrefcount(loader)) == ([True], references - 1)


def interrupt(_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("stream", ["side", "consumer"])
def test_an_interrupt_ends_the_epoch(stream: str, late: Late) -> None:
    late()
    batches = Prefetcher(images(), ToDevice("cuda", 1, interrupt, transform_stream=stream))
    for _ in range(6):  # more often than there are buffers
        epoch = iter(batches)
        with pytest.raises(KeyboardInterrupt):
            next(epoch)
        with pytest.raises(IteratorInvalid, match="an interrupt cut a call"):
            next(epoch)


LENGTH, FAILING = 12, 5


def number(index: int) -> torch.Tensor:
    if index == FAILING:
        raise KeyError("on purpose")
    return torch.tensor(index)


def loader_of(workers: int, schedule: str) -> StatefulDataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    options: Any = {"generator": generator, "shuffle": True, "schedule": schedule, "collate_fn": identity}
    return StatefulDataLoader(Made(number, LENGTH), None, num_workers=workers, **options)


def read(batches: Iterator[Any], most: int = LENGTH + 1) -> list[Any]:
    seen: list[Any] = []
    while len(seen) < most:
        try:
            seen.append(next(batches).item())
        except StopIteration:
            break
        except KeyError:
            seen.append("error")
    return seen


@pytest.mark.parametrize(
    ("workers", "schedule"),
    [
        (0, "dynamic"),
        pytest.param(0, "round_robin", marks=thorough.thorough()),
        pytest.param(2, "dynamic", marks=pytest.mark.processes),
    ],
)
def test_an_epoch_goes_on_after_what_was_handed_out(workers: int, schedule: str, late: Late) -> None:
    """Stopped after each batch, it and the next one go on as if they had not been."""
    late()
    plain = loader_of(workers, schedule)
    whole = [read(iter(plain)) for _ in range(2)]
    for stop in range(0, LENGTH + 1, 6 if workers and not thorough.is_thorough else 1):
        loader = loader_of(workers, schedule)
        with Prefetcher(loader, ToDevice("cuda", 3)) as prefetcher, loader:
            epoch = iter(prefetcher)
            assert read(epoch, stop) == whole[0][:stop]
            state = prefetcher.state_dict()
            assert prefetcher.position == loader.position == (0, stop, stop)
        assert loader.state_dict() == state, "also when what was asked for ahead is lost"
        state["workers"].append(3)
        assert prefetcher.state_dict() == loader.state_dict() != state, "a dict of its own"
        resumed = loader_of(workers, schedule)
        with Prefetcher(resumed, ToDevice("cuda", 2)) as prefetcher, resumed:
            prefetcher.load_state_dict(loader.state_dict())
            assert prefetcher.position == (0, stop, stop)
            assert read(iter(prefetcher)) == whole[0][stop:], f"stop={stop}"
            assert read(iter(prefetcher)) == whole[1], f"stop={stop}"


class MutableFields:
    """Another kind of loader, with a state; it cannot tell that after batch 3."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        while self.given < 6:
            self.given += 1
            yield torch.tensor(self.given - 1)

    def state_dict(self) -> dict[str, Any]:
        if self.given == 3:
            raise OSError("no state today")
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_any_loader_with_a_state_is_asked_in_time(device: str, late: Late) -> None:
    if device == "cuda":
        late()
    prefetcher = Prefetcher(MutableFields(), device)
    assert prefetcher.state_dict() == {"given": 0}
    for at, batch in enumerate(prefetcher):
        assert batch.item() == at
        if at == 2:
            with pytest.raises(OSError, match="no state today"):
                prefetcher.state_dict()
        else:
            assert prefetcher.state_dict() == {"given": at + 1}
    epoch = iter(prefetcher)
    prefetcher.load_state_dict({"given": 4})
    with pytest.raises(IteratorInvalid, match="a state was loaded"):
        next(epoch)
    assert prefetcher.state_dict() == {"given": 4}
    assert [batch.item() for batch in prefetcher] == [4, 5]


def test_a_loader_without_a_state_has_none_here_either(late: Late) -> None:
    late()
    prefetcher = Prefetcher([torch.ones(2)], "cuda")
    assert len(list(prefetcher)) == 1
    for name in ("state_dict", "load_state_dict", "position"):
        with pytest.raises(AttributeError, match=f"'Prefetcher' object has no attribute '{name}'"):
            getattr(prefetcher, name)
    assert not hasattr(copy.copy(prefetcher), "state_dict")
