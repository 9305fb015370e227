"""How many workers the next epoch gets, by epochs that are made up."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader import DataLoader, Processes
from fastq_loader.extras.insight import machine
from fastq_loader.extras.insight.auto import Measurement, remember
from fastq_loader.extras.insight.auto import decide as decide_within
from fastq_loader.extras.insight.auto import given as number_given
from fastq_loader.extras.insight.chooser import Limits, most_workers, numbers
from fastq_loader.extras.insight.facts import of_arguments
from fastq_loader.extras.insight.model import Costs, Setting, seconds_per_batch
from fastq_loader.workers.kinds import Auto
from tests.support.datasets import Made, Stream
from tests.support.thorough import examples

EIGHT = Made(float, 8)
DECODING = Costs((0.05,), pack=0.0001, overhead=0.0001)
TINY = Costs((0.00005,), pack=0.00005, overhead=0.0002)
WAITING = Costs((0.05,), pack=0.0001, overhead=0.0001, load_cpu=0.02)


def decide(seen: list[Measurement], cpus: float, most: float) -> int:
    own = Setting(seen[-1].workers, dynamic=True)
    return decide_within(seen, Limits(own, cpus, most_workers=most))


def seconds(costs: Costs, workers: int, cpus: float) -> float:
    return seconds_per_batch(costs, Setting(workers, 2, dynamic=True), cpus)


def run(
    costs: Costs,
    cpus: float = 4.0,
    first: int = 2,
    epochs: int = 8,
    most: float = 64,
) -> list[int]:
    """The numbers of an epoch after the other."""
    seen: list[Measurement] = []
    chosen = [first]
    while len(chosen) < epochs:
        workers = chosen[-1]
        remember(seen, Measurement(workers, seconds(costs, workers, cpus), costs))
        chosen.append(decide(seen, cpus, most))
    return chosen


@examples(40)
@given(
    st.floats(1e-5, 1.0),
    st.sampled_from([0.02, 0.4, 1.0]),
    st.sampled_from([0.0, 0.01, 0.2]),
    st.sampled_from([0.5, 1.0, 2.0, 12.0]),
    st.integers(1, 8),
)
def test_it_is_soon_near_the_best(load: float, load_cpu: float, step: float, cpus: float, first: int) -> None:
    costs = Costs((load,), pack=0.0001, overhead=0.0001, load_cpu=load_cpu, step=step)
    chosen = run(costs, cpus, first, epochs=6)
    possible = {0, first, *numbers(most_workers(costs, cpus), cpus)}
    best = min(seconds(costs, each, cpus) for each in possible)
    assert all(seconds(costs, each, cpus) <= best * 1.06 for each in chosen[2:])
    assert len(set(chosen[2:])) == 1, "equals do not take turns"


@pytest.mark.parametrize("load_cpu", [0.05, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("as_modelled", [True, False])
def test_workers_that_wait_for_cpus_are_not_halved_for_that(load_cpu: float, as_modelled: bool) -> None:
    waiting = replace(WAITING, load_cpu=load_cpu)
    seen = Measurement(32, seconds(waiting if as_modelled else WAITING, 32, 2.0), waiting)
    assert decide([seen], 2.0, 64) >= 32
    idle = Measurement(32, 0.1, replace(WAITING, load_cpu=0.2, step=0.1))
    assert decide([idle], 2.0, 64) == 1, "the step limits, whatever the CPUs do"


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (DECODING, 4),  # as many as there are CPUs
        (TINY, 0),
        (WAITING, 64),
        (replace(DECODING, step=0.2), 1),  # the step takes longer
        (replace(DECODING, step=0.02), 3),  # three quarters of a batch come in the time of a step
    ],
)
def test_the_number_is_what_the_costs_ask_for(costs: Costs, expected: int) -> None:
    assert run(costs)[-1] == expected


def test_an_epoch_without_workers_does_not_tell_what_they_add() -> None:
    with_workers = Costs((0.001,), pack=0.01, overhead=0.01)
    alone = Costs((0.001,))
    seen = [Measurement(2, 0.021, with_workers), Measurement(0, 0.001, alone)]
    assert decide(seen, 4.0, 64) == 0
    assert decide([Measurement(0, 0.05, replace(alone, loads=(0.05,)))], 4.0, 64) == 4


@pytest.mark.parametrize(("cpus", "number"), [(0.25, 1), (1.0, 1), (2.0, 2), (3.5, 4), (96.0, 8)])
def test_the_first_epoch_goes_by_the_cpus(monkeypatch: pytest.MonkeyPatch, cpus: float, number: int) -> None:
    monkeypatch.setattr(machine, "cpus", lambda: cpus)
    first = number_given("auto")
    assert first == number
    assert isinstance(first, Auto)


def test_numbers_are_taken_as_they_are_and_other_words_are_refused() -> None:
    assert not isinstance(DataLoader(range(4), num_workers=0).num_workers, Auto)
    with pytest.raises(
        ValueError, match="num_workers='automatic' is unknown: use a number of workers, or 'auto'"
    ):
        DataLoader(EIGHT, num_workers="automatic")  # type: ignore[arg-type]


def loader_of(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(EIGHT, **{"num_workers": "auto", "schedule": "dynamic"} | arguments)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_loader_is_rebuilt_from_its_attributes(number: int) -> None:
    loader = loader_of(persistent_workers=True, prefetch_factor=3, timeout=5, multiprocessing_context="fork")
    loader.num_workers = Auto(number)
    names = ("num_workers", "persistent_workers", "prefetch_factor", "timeout", "schedule")
    context = loader.multiprocessing_context
    again = type(loader)(
        loader.dataset, multiprocessing_context=context, **{name: getattr(loader, name) for name in names}
    )
    for each in (again, copy.copy(loader)):
        assert {name: getattr(each, name) for name in names} == {
            name: getattr(loader, name) for name in names
        }
        assert type(each.num_workers) is Auto


def test_another_schedule_is_an_error_that_says_why() -> None:
    text = (
        r"num_workers='auto' cannot go with schedule=RoundRobin\(.*depend on how many.*Use schedule='dynamic'"
    )
    with pytest.raises(ValueError, match=text):
        DataLoader(EIGHT, num_workers="auto", schedule="round_robin")


def test_an_iterable_dataset_is_an_error_that_says_why() -> None:
    with pytest.raises(ValueError, match="cannot go with an IterableDataset: each worker reads a part of it"):
        DataLoader(Stream("tensors", [8]), num_workers="auto", schedule="dynamic")


def test_the_word_is_for_the_constructor() -> None:
    loader = loader_of(workers=Processes(max_restarts=1), in_order=False)
    loader.num_workers = "auto"  # type: ignore[assignment]
    with pytest.raises(TypeError, match="num_workers='auto' must be an integer"):
        iter(loader)
    loader.num_workers = 3
    assert type(loader.num_workers) is int


@pytest.mark.parametrize("number", ["auto", 1])
def test_advice_knows_who_chooses_the_number_of_workers(number: Any) -> None:
    loader = DataLoader(EIGHT, num_workers=number, schedule="dynamic")
    assert of_arguments(loader)[1].chooses_workers == (number == "auto")
