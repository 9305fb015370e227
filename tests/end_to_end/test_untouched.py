"""What a user did not ask for touches nothing of theirs: awkward datasets, samplers and collate functions
give the same batches as with torch's loader, and nothing is done to them more often than by that."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    default_collate,
)
from torch.utils.data import DataLoader as TorchLoader

from fastq_loader import DataLoader, StatefulDataLoader
from tests.conftest import torchs_segments_removed
from tests.support.thorough import thorough

pytestmark = pytest.mark.processes

N = 8
_log = -1


def note(name: str) -> None:
    """In whichever process: a look at an object of the user's."""
    if _log >= 0:
        os.write(_log, f"{name}\n".encode())


class Watched:
    """Everything that is done with it is noted, and what torch does not need raises."""

    def __getattribute__(self, name: str) -> Any:
        note(f".{name}")
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"there is no {name} yet")

    def _refuse(self, *_: Any) -> Any:
        note("an operator")
        raise RuntimeError("not to be called")

    __eq__ = __lt__ = __bool__ = __repr__ = __format__ = __index__ = _refuse
    __hash__ = __contains__ = __reversed__ = __copy__ = __deepcopy__ = _refuse


class Numbers(Watched):
    """A dataset and a sampler."""

    def __len__(self) -> int:
        note("len")
        return N

    def __getitem__(self, index: Any) -> Any:
        return index if type(index) is int else N

    def __iter__(self) -> Iterator[Any]:
        note("iter")
        return iter(range(N))

    def __call__(self, samples: Any) -> Any:
        return default_collate(samples)


class Stream(Numbers, IterableDataset[int]):
    pass


class Properties(Numbers):
    """Of every name that we look for."""

    def _property(self) -> Any:
        note("a property")
        raise RuntimeError("a property was read")

    sampler = batch_sampler = data_source = generator = epoch = seed = property(_property)
    shuffle = set_epoch = state_dict = load_state_dict = dataset = rank = property(_property)
    __dict__ = property(_property)  # type: ignore[assignment]


class NoClass(Numbers):
    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # type: ignore[override]
        note("a class")
        return object


class Slots(Numbers):
    __slots__ = ("held", "unset")

    def __init__(self) -> None:
        self.held = 1


class OddList(list[Any]):
    __len__ = __iter__ = Watched._refuse  # type: ignore[assignment]


class OddDict(dict[Any, Any]):
    __len__ = __iter__ = items = keys = Watched._refuse  # type: ignore[assignment]


class Plain:
    """Holds something, and is read like range(N), or drawn from like it; also collates."""

    def __init__(self, *held: Any, **more: Any) -> None:
        self.held = held
        vars(self).update(more)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))

    def __call__(self, samples: Any) -> Any:
        return default_collate(samples)


class Indices(Plain):
    def __iter__(self) -> Iterator[Any]:
        return iter([Numbers() for _ in range(N)])


class Shuffles(RandomSampler):
    """Wants to be told the epoch, and draws from a generator that has no state."""

    generator = None

    def __init__(self) -> None:
        self.drawn = random.SystemRandom()

    def set_epoch(self, epoch: int) -> None:
        raise RuntimeError("nobody called it")

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


HELD: dict[str, Callable[[], Any]] = {
    "a huge dict": lambda: Plain({number: Numbers() for number in range(20_000)}),
    "watched": Numbers,
    "properties": Properties,
    "another class": NoClass,
    "odd containers": lambda: Plain(OddList([1]), OddDict(a=1), {Numbers: 1}, Slots()),
    "odd attributes": lambda: Plain(Numbers(), Properties(), MagicMock(), random.SystemRandom(), sys),
}


def as_collate(held: Any) -> Any:
    return held if callable(held) else Plain(held)


PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "dataset": lambda held: {"dataset": held},
    "sampler": lambda held: {"dataset": range(N), "sampler": held},
    "collate_fn": lambda held: {"dataset": range(N), "collate_fn": as_collate(held)},
}
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        f"{place}: {name}": lambda make=make, put=put: put(make())  # type: ignore[misc]
        for place, put in PLACES.items()
        for name, make in HELD.items()
    },
    "a stream": lambda: {"dataset": Stream()},
    "batches of a sampler": lambda: {
        "dataset": range(N),
        "batch_size": 1,
        "batch_sampler": BatchSampler(Numbers(), 2, False),  # type: ignore[arg-type]
    },
    "indices": lambda: {"dataset": Plain(), "sampler": Indices(), "collate_fn": len},
    "a sampler without a state": lambda: {"dataset": range(N), "sampler": Shuffles()},
    "a shuffle": lambda: {"dataset": Numbers(), "shuffle": True, "generator": torch.Generator()},
}
TELLING = ["dataset: watched", "sampler: properties", "collate_fn: watched", "a stream"]
RUNS = [
    pytest.param({}, id="no workers"),
    pytest.param({"num_workers": 2}, id="workers", marks=thorough(but={"case": TELLING})),
]


def iterated(loader: Any) -> list[Any]:
    return [list(map(str, loader)) for _ in range(2)]


def seen(made: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """What comes out, or is raised; and how often each thing was done to the user's objects."""
    global _log
    with tempfile.TemporaryFile() as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        _log = file.fileno()
        found: Any
        try:
            found = made()
        except Exception as error:
            found = type(error), str(error).partition("\n")[0]
        finally:
            _log = -1
        file.seek(0)
        return found, Counter(file.read().decode().splitlines())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES)
def test_the_same_batches_and_no_more_looks_than_torchs(
    case: str, run: dict[str, Any], tmp_path: Path
) -> None:
    def ours() -> Any:
        with DataLoader(**{"batch_size": 2, **CASES[case](), **run}) as loader:
            with loader.trace(tmp_path / "trace.json"):
                found = iterated(loader)
            loader.statistics()
            assert str(loader.diagnose())
            return found

    with torchs_segments_removed():
        wanted, torchs = seen(lambda: iterated(TorchLoader(**{"batch_size": 2, **CASES[case](), **run})))
    found, looks = seen(ours)
    assert found == wanted
    more = {name: (count, torchs[name]) for name, count in looks.items() if count > torchs[name]}
    assert not more, "done to the user's objects, by ours and by torch's loader"


def test_a_state_asks_the_dataset_for_its_length_and_an_epoch_does_not() -> None:
    loader = StatefulDataLoader(Plain(Numbers()), 2)  # type: ignore[var-annotated, arg-type]
    assert loader.state_dict()["dataset_length"] == N
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["dataset_length"] == N


class Table(Numbers):
    """A dataset with a state, such as a module with a table."""

    def state_dict(self) -> Any:
        note(f"state_dict in {os.getpid()}")
        return {}

    def load_state_dict(self, state: Any) -> None:
        note("load_state_dict")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_a_dataset_with_indices_is_read_when_the_loaders_is_and_never_for_a_batch(
    workers: int,
) -> None:
    loader = StatefulDataLoader(Table(), 2, num_workers=workers)  # type: ignore[var-annotated, arg-type]
    found, looks = seen(lambda: iterated(loader))
    assert all(found)
    assert not [name for name in looks if "state_dict" in name]
    state, looks = seen(loader.state_dict)
    assert {name: count for name, count in looks.items() if "state_dict in" in name} == {
        f"state_dict in {os.getpid()}": 1
    }
    assert seen(lambda: loader.load_state_dict(state))[1]["load_state_dict"] == 1
    assert seen(lambda: iterated(loader))[1]["load_state_dict"] == 0
