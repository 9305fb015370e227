"""What `state_dict()` returns."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler

from fastq_loader import LoaderHint, PermutationSampler, StatefulDataLoader
from fastq_loader.scheduling.progress import UNKNOWN, Progress, WorkerProgress
from tests.support.datasets import MapDataset, Stream
from tests.support.samplers import Says


class Huge(MapDataset):
    """Only its length is asked for."""

    def __init__(self) -> None:
        super().__init__("tensors", 10**8)


def stopped(loader: StatefulDataLoader[Any], batches: int) -> dict[str, Any]:
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return loader.state_dict()


@pytest.mark.parametrize(
    "make",
    [
        lambda: StatefulDataLoader(Huge(), 4, sampler=PermutationSampler(10**8, 3)),
        lambda: StatefulDataLoader(Huge(), 4),
        lambda: StatefulDataLoader(MapDataset("tensors", 5000), 4, shuffle=True),
        lambda: StatefulDataLoader(MapDataset("tensors", 5000), 4, shuffle=True, generator=torch.Generator()),
        lambda: StatefulDataLoader(Stream("tensors", (9,)), 4, schedule="dynamic"),
    ],
)
def test_a_state_is_small_and_goes_through_json_and_torch(make: Any) -> None:
    state = stopped(make(), 2)
    text = json.dumps(state)
    assert json.loads(text) == state
    assert len(text) < 16_000
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


@pytest.mark.processes
def test_each_state_is_a_dict_of_its_own() -> None:
    given: dict[str, Any] = {"sampler": Says(20), "num_workers": 2, "persistent_workers": True}
    loader = StatefulDataLoader(MapDataset("tensors", 20), 4, **given)
    state = stopped(loader, 2)
    kept = json.dumps(state)
    for part in [state["_index_sampler_state"], state["workers"], state]:
        part.clear()
    assert json.dumps(loader.state_dict()) == kept
    loader.close()


@pytest.mark.parametrize("kind", [MapDataset, Stream])
def test_a_dataset_that_cannot_say_where_it_stands_is_read_all_the_same(kind: Any) -> None:
    class CannotSay(kind):  # type: ignore[misc]
        def state_dict(self) -> Any:
            return 1 / 0

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("nothing was saved")

    loader = StatefulDataLoader(CannotSay("tensors", 4 if kind is MapDataset else (4,)), 2)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(RuntimeError, match=r"the dataset.s state_dict.* cannot be used: .*zero"):
        loader.state_dict()
    assert len(list(iterator)) == 1


def needs_arguments(self: Any, num_samples: int, from_beginning: bool) -> Any:
    raise AssertionError("asked for a state")


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:Neither the dataset nor its iterator")
@pytest.mark.parametrize("kind", [MapDataset, Stream])
@pytest.mark.parametrize(
    ("said", "text"),
    [
        (needs_arguments, "needs arguments"),  # as StreamingDataset's
        (lambda self: {"at": lambda: 0, "lock": threading.Lock()}, "cannot be copied .*(local|lock)"),
    ],
)
def test_a_dataset_whose_state_cannot_be_saved_is_not_asked_and_a_hint_says_so(
    kind: Any, said: Any, text: str
) -> None:
    """torchdata's loader raises the dataset's error."""

    class OfAnotherLibrary(kind):  # type: ignore[misc]
        state_dict = said

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("nothing was saved")

    def loader() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(
            OfAnotherLibrary("tensors", 6 if kind is MapDataset else (6,)), 2, num_workers=1
        )

    with loader() as first, loader() as second:
        iterator = iter(first)
        next(iterator)
        hint = f"OfAnotherLibrary is not part of the loader's: .* {text}"
        with pytest.warns(LoaderHint, match=hint):
            state = json.loads(json.dumps(first.state_dict()))
        assert first.state_dict() == state, "the second time without a hint"
        second.load_state_dict(state)
        assert [batch[0].tolist() for batch in second] == [batch[0].tolist() for batch in iterator]


class Slow(Sampler[int]):
    """Draws its first index, and waits before it yields it."""

    def __init__(self) -> None:
        self.drew, self.goes_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        for _ in range(4):
            index = int(torch.randint(100, ()))
            self.drew.set()
            assert self.goes_on.wait(60)
            yield index


def test_a_state_from_the_middle_of_the_first_draw_begins_with_that_draw() -> None:
    loader, other = (StatefulDataLoader(torch.arange(100), None, sampler=Slow()) for _ in range(2))
    batches: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: batches.extend(loader))
    thread.start()
    assert loader.sampler.drew.wait(60)  # type: ignore[union-attr]
    state, of_torch = loader.state_dict(), torch.get_rng_state()
    loader.sampler.goes_on.set()  # type: ignore[union-attr]
    thread.join()
    other.sampler.goes_on.set()  # type: ignore[union-attr]
    other.load_state_dict(state)
    torch.set_rng_state(of_torch)
    assert list(other) == batches


class Consumes(Says):
    """Takes its state apart."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch_now = state.pop("at"), state.pop("epoch")


class ConsumesTable(MapDataset):
    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state.clear()


def test_a_state_that_was_loaded_is_the_callers() -> None:
    def loader() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(ConsumesTable("tensors", 20), 4, sampler=Consumes(20))

    first = loader()
    state = stopped(first, 2)
    list(first)
    for each in (state, first.state_dict()):
        kept = json.dumps(each)
        other = loader()
        other.load_state_dict(each)
        list(other)
        assert json.dumps(each) == kept


def test_the_state_at_the_end_of_a_stream_is_that_after_its_last_batch_unless_it_is_said() -> None:
    workers = WorkerProgress(2, b"a"), WorkerProgress(1, b"b")
    assert Progress(3, workers=workers).at_end({0: b"end"}) == Progress(
        3, workers=(WorkerProgress(0, b"end"), WorkerProgress(0, b"b")), over=True
    )


def test_after_a_break_one_batch_without_a_state_tells_that_no_worker_has_one() -> None:
    after = Progress(workers=(WorkerProgress(0, UNKNOWN),) * 2).after_worker(0, b"", None)
    assert after.workers == (WorkerProgress(1, b""), WorkerProgress(0, b""))
