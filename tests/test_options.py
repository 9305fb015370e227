"""What arguments come to, and what is refused of those beyond torch's."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchLoader

from fastq_loader import (
    DataLoader,
    Dynamic,
    Processes,
    RayWorkers,
    Replace,
    RoundRobin,
    Skip,
    StatefulDataLoader,
    ToDevice,
    TorchWorkers,
    options,
)
from fastq_loader.ipc.claim_table import WORKERS
from fastq_loader.system import calls
from tests.support.datasets import Stream
from tests.support.subclasses import SUBCLASSES

STREAM = Stream("tensors", [1])


def loader(**given: Any) -> DataLoader[Any]:
    return DataLoader(given.pop("dataset", range(4)), **given)


class ThreadContext(SpawnContext):
    """MONAI's `_ProcessThreadContext` (data/thread_buffer.py): its processes are threads."""

    Process = threading.Thread


@pytest.mark.parametrize(
    ("name", "value", "kind", "text"),
    [
        ("schedule", "bogus", ValueError, "schedule='bogus' is unknown: use 'round_robin', 'dynamic', "),
        ("schedule", None, TypeError, "schedule=None is unknown"),
        ("workers", "threads", ValueError, "workers='threads' is unknown"),
        ("workers", 4, TypeError, "the number of workers is num_workers"),
        ("workers", None, TypeError, "workers=None is unknown"),
        ("device", "toaster", ValueError, "device='toaster' is unknown"),
    ],
)
def test_i9_wrong_values_are_refused(name: str, value: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        loader(**{name: value})


@pytest.mark.parametrize("name", options.ARGUMENTS)
def test_they_are_set_by_the_constructor_only(name: str) -> None:
    made = loader(schedule="dynamic", device="cpu")
    before = getattr(made, name)
    for each in (made, copy.copy(made)):
        with pytest.raises(ValueError, match=f"{name}= cannot be set .*: pass it to the constructor"):
            setattr(each, name, before)
    rebuilt = DataLoader.__new__(DataLoader)
    for attribute, value in vars(made).items():  # as libraries copy a loader
        setattr(rebuilt, attribute, value)
    assert options.of(rebuilt) == options.of(made)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (
            {"multiprocessing_context": ThreadContext()},
            TypeError,
            "multiprocessing_context=.* starts workers as threading.Thread, which is no process",
        ),
        ({"num_workers": WORKERS + 1}, ValueError, f"num_workers={WORKERS + 1} is too many: use at most"),
        ({"num_workers": 1.0}, TypeError, "num_workers=1.0 must be an integer, such as os.cpu_count"),
        ({"prefetch_factor": 1.5}, TypeError, "prefetch_factor=1.5 must be an integer, such as 2"),
        (
            {"dataset": STREAM, "workers": Processes(max_restarts=2)},
            ValueError,
            r"Processes\(max_restarts=2\) cannot be used with an IterableDataset",
        ),
    ],
    ids=["h5: threads", "too many", "a quotient", "a part of a batch", "restarts of a stream"],
)
@pytest.mark.parametrize("schedule", ["round_robin", "dynamic"])
def test_workers_that_cannot_be_started_or_kept_are_refused(
    given: dict[str, Any], kind: type[Exception], text: str, schedule: str
) -> None:
    given = {"num_workers": 2, "schedule": schedule, **given}
    with pytest.raises(kind, match=text):
        loader(**given)
    number, ahead = given.pop("num_workers"), given.pop("prefetch_factor", 2)
    if given.keys() == {"schedule", "multiprocessing_context"}:
        return  # torch checks that it goes with workers
    made = loader(**given)  # nobody to start or to keep
    made.num_workers, made.prefetch_factor = number, ahead
    with pytest.raises(kind, match=text):
        iter(made)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("schedule", "dynamic", ", whose batches are the same"),
        ("schedule", Dynamic(window=3), ", whose batches are the same"),
        ("workers", Processes(max_restarts=2), ", or workers='processes'"),
        ("workers", "ray", ", or workers='processes'"),
        ("device", ToDevice("cpu", transform=abs), ", or a Prefetcher"),
        ("errors", Skip(), ", or errors='raise'"),
        ("errors", Replace(), ", or errors='raise'"),
    ],
)
def test_without_memfd_what_torchs_workers_lack_is_refused_with_the_way_around(
    name: str, value: Any, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "AVAILABLE", False)
    text = (
        rf"^{name}=.* cannot go with num_workers=2 here: .* lacks memfd_create.* Use num_workers=0{remedy}$"
    )
    monkeypatch.setattr(RayWorkers, "missing", lambda self: "")
    made = loader(num_workers=2, **{name: value})
    with pytest.raises(RuntimeError, match=text):
        iter(made)
    assert len(list(loader(**{name: value} if name != "device" else {}))) == 4


def test_without_memfd_a_stream_is_not_said_to_have_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "AVAILABLE", False)
    with pytest.raises(RuntimeError, match=r"Use num_workers=0$"):
        iter(loader(dataset=STREAM, num_workers=2, schedule="dynamic"))


def test_without_memfd_epochs_are_resumed_without_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = StatefulDataLoader(range(4), schedule="round_robin")
    next(iter(begun))
    state = begun.state_dict()
    monkeypatch.setattr(calls, "AVAILABLE", False)
    made = StatefulDataLoader(range(4), schedule="round_robin", num_workers=2)
    with pytest.warns(TorchWorkers, match=r"state_dict\(\) is empty: .* With num_workers=0 it is"):
        assert made.state_dict() == {}
    alone = StatefulDataLoader(range(4), schedule="round_robin")
    alone.load_state_dict(state)
    alone.num_workers = 2
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) cannot go with num_workers=2 here"):
        iter(alone)
    alone.num_workers = 0
    assert [batch.tolist() for batch in alone] == [[1], [2], [3]]


@pytest.mark.parametrize("make", SUBCLASSES)
def test_names_of_options_are_a_subclasss_own_as_with_torchs_loader(make: Callable[[Any], Any]) -> None:
    torchs, ours = make(TorchLoader), make(DataLoader)
    used = [name for name in options.ARGUMENTS if hasattr(torchs, name)]
    assert used
    for name in set(used) - {"schedule"}:
        assert getattr(ours, name) == getattr(torchs, name)
    for copied in (ours, copy.copy(ours)):
        assert [str(batch) for batch in copied] == [str(batch) for batch in torchs]
        assert options.of(copied) == options.of(DataLoader(range(6))), "as its constructor was told"


def test_every_name_that_torchs_loader_lacks_is_free_for_an_attribute_of_a_subclass() -> None:
    """`self.position = 0`, say, before its constructor or after it."""
    names = {name for name in dir(DataLoader) if name[0] != "_"} - set(dir(TorchLoader))
    names -= options.ARGUMENTS.keys()  # see above

    class Mine(DataLoader[Any]):
        def __init__(self, *args: Any) -> None:
            self.own("before")
            super().__init__(*args)
            assert {getattr(self, name) for name in names} == {"before"}
            self.own("after")

        def own(self, value: str) -> None:
            for name in names:
                setattr(self, name, value)

    made = Mine(range(4), 2)
    for each in (made, copy.copy(made)):
        assert [batch.tolist() for batch in each] == [[0, 1], [2, 3]]
        assert {getattr(each, name) for name in names} == {"after"}


def test_a_stream_goes_with_the_default_of_ray_and_not_with_another_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RayWorkers, "missing", lambda self: "")
    made = loader(dataset=STREAM, num_workers=2, workers="ray")
    assert options.plan(made).restarts == 0
    with pytest.raises(ValueError, match="cannot be used with an IterableDataset"):
        loader(dataset=STREAM, num_workers=2, workers=RayWorkers(max_restarts=1))


def test_a_search_for_generators_that_did_not_see_all_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_issued", set())

    def planned(dataset: Any) -> None:
        saved = RoundRobin(save_generators=True)
        options.plan(StatefulDataLoader(dataset, num_workers=1, schedule=saved), saves=True)

    planned([("a path", 3)] * 1000)
    with pytest.warns(UserWarning, match="list or the collate function holds more than is searched"):
        planned([[[[[3]]]]])
    planned([[[[[4]]]]])
