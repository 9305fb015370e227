"""Where a loader stands that a `Prefetcher` reads: only what was handed out counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastq_loader import DataLoader, IteratorInvalid, Prefetcher, ToDevice
from tests.support.datasets import Made, identity
from tests.support.late_device import Late

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
LENGTH, FAILING = 12, 5


def number(index: int) -> torch.Tensor:
    if index == FAILING:
        raise KeyError("on purpose")
    return torch.tensor(index)


def loader_of(workers: int, schedule: str) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    options: Any = {"generator": generator, "shuffle": True, "schedule": schedule, "collate_fn": identity}
    return DataLoader(Made(number, LENGTH), None, num_workers=workers, **options)


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


def check_each_stop(workers: int, schedule: str) -> None:
    """Stopped after each batch, an epoch and the next one go on as if it had not been."""
    plain = loader_of(workers, schedule)
    whole = [read(iter(plain)) for _ in range(2)]
    for stop in range(LENGTH + 1):
        loader = loader_of(workers, schedule)
        with Prefetcher(loader, ToDevice("cuda", 3)) as prefetcher, loader:
            epoch = iter(prefetcher)
            assert read(epoch, stop) == whole[0][:stop]
            state = prefetcher.state_dict()
            assert prefetcher.position == loader.position == (0, stop, stop)
        assert loader.state_dict() == state, "also when what was asked for ahead is lost"
        state["order"].clear()
        assert prefetcher.state_dict() == loader.state_dict() != state, "a dict of its own"
        resumed = loader_of(workers, schedule)
        with Prefetcher(resumed, ToDevice("cuda", 2)) as prefetcher, resumed:
            prefetcher.load_state_dict(loader.state_dict())
            assert prefetcher.position == (0, stop, stop)
            assert read(iter(prefetcher)) == whole[0][stop:], f"stop={stop}"
            assert read(iter(prefetcher)) == whole[1], f"stop={stop}"


@pytest.mark.parametrize("schedule", ["round_robin", "dynamic"])
def test_an_epoch_goes_on_after_what_was_handed_out(schedule: str, late: Late) -> None:
    late()
    check_each_stop(0, schedule)


@pytest.mark.processes
def test_an_epoch_of_workers_goes_on_after_what_was_handed_out(late: Late) -> None:
    late()
    check_each_stop(2, "dynamic")


def test_the_end_is_known_when_it_was_handed_out(late: Late) -> None:
    late()
    loader = loader_of(0, "round_robin")
    prefetcher = Prefetcher(loader, "cuda")
    epoch = iter(prefetcher)
    assert prefetcher.position == (0, 0, 0)
    read(epoch, LENGTH)
    assert (prefetcher.position, loader.position) == ((0, LENGTH, LENGTH), (0, LENGTH, LENGTH))
    assert not prefetcher.state_dict()["_iterator_finished"]
    with pytest.raises(StopIteration):
        next(epoch)
    assert (prefetcher.position, loader.position) == ((1, 0, LENGTH), (1, 0, LENGTH))
    assert loader.state_dict()["_iterator_finished"]
    read(iter(prefetcher), 4)
    prefetcher.close()
    iter(loader)
    assert loader.position == (2, 0, LENGTH + 4), "what was asked for ahead, and lost, does not count"


def test_a_batch_that_an_interrupt_cut_off_was_not_handed_out(late: Late) -> None:
    late()

    def interrupt(batch: Any) -> Any:
        if interrupted:
            raise KeyboardInterrupt
        return batch

    interrupted = [True]
    loader = DataLoader(range(8), None, collate_fn=torch.tensor)
    prefetcher = Prefetcher(loader, ToDevice("cuda", 1, interrupt))
    with pytest.raises(KeyboardInterrupt):
        prefetcher.next()
    assert prefetcher.position == loader.position == (0, 0, 0)
    interrupted.clear()
    epoch = iter(prefetcher)
    assert next(epoch).item() == 0
    interrupted.append(True)
    with pytest.raises(KeyboardInterrupt):
        next(epoch)
    assert prefetcher.position == loader.position == (1, 1, 1)
    loader.load_state_dict(prefetcher.state_dict())
    assert prefetcher.position == (1, 1, 1)
    interrupted.clear()
    assert next(iter(prefetcher)).item() == 1


class Counting:
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
    prefetcher = Prefetcher(Counting(), device)
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
    for ask in (prefetcher.state_dict, lambda: prefetcher.position, lambda: prefetcher.load_state_dict({})):
        with pytest.raises(AttributeError, match="'list' object has no attribute"):
            ask()
