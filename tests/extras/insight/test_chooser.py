"""The one rule by which settings are chosen, for any costs and measurements, and what may be chosen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.extras.insight.chooser import NOISE, Limits, most_workers, price, rank
from fastq_loader.extras.insight.model import Costs, Setting
from tests.support.thorough import examples

OWN = Setting(2)
SETTINGS = st.builds(
    Setting,
    st.integers(0, 9),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    start_method=st.sampled_from([None, "spawn"]),
)
MEASURED = st.dictionaries(SETTINGS, st.floats(1e-6, 10.0) | st.floats(1.0, 1.1), min_size=1)
LIMITS = Limits(OWN, 4.0)
#: Of rounding.
MORE = 1 + 1e-9


def decoding(load: float = 0.05, **others: float) -> Costs:
    return Costs((load,), pack=0.0001, overhead=0.0001, **others)


@examples(100)
@given(MEASURED)
def test_the_best_is_the_cheapest_of_those_within_the_noise(measured: dict[Setting, float]) -> None:
    ranked = rank(None, measured, LIMITS)
    assert ranked == measured
    least, best = min(measured.values()), next(iter(ranked))
    assert measured[best] <= least * (1 + NOISE) * MORE
    equals = [each for each, seconds in measured.items() if seconds * MORE < least * (1 + NOISE)]
    assert price(best, OWN) <= min(price(each, OWN) for each in equals)


def test_nothing_and_what_takes_no_time_can_be_ranked() -> None:
    assert rank(None, {}, LIMITS) == {}
    assert next(iter(rank(Costs((0.0,)), {OWN: 0.0}, LIMITS))) == Setting(0)


def test_a_price_is_workers_then_prefetch_then_change() -> None:
    order = [
        Setting(1, 4, dynamic=True, start_method="spawn"),
        Setting(2, 1, dynamic=True, start_method="spawn"),
        Setting(2, 2),
        Setting(2, 2, start_method="spawn"),
        Setting(2, 2, dynamic=True),
    ]
    assert sorted(order, key=lambda each: price(each, OWN)) == order
    assert list(rank(None, dict.fromkeys(reversed(order), 1.0), LIMITS)) == order


def test_what_was_measured_counts_and_corrects_what_is_expected_of_others() -> None:
    costs, cpus = decoding(load_cpu=0.0), replace(LIMITS, cpus=16.0)
    slow = 3 * cpus.seconds(costs, OWN)
    ranked = rank(costs, {OWN: slow}, cpus)
    assert ranked[OWN] == slow
    for each, seconds in ranked.items():
        wrong = 3 if each.num_workers else 1  # without workers nothing is alike
        assert seconds == pytest.approx(wrong * cpus.seconds(costs, each))
    assert rank(costs, {OWN: slow, Setting(0): 7.0}, cpus) == {**ranked, Setting(0): 7.0}
    both = rank(costs, {OWN: slow, Setting(8): cpus.seconds(costs, Setting(8))}, cpus)
    assert both[Setting(3)] == pytest.approx(3 * cpus.seconds(costs, Setting(3))), "as wrong as for 2"
    assert both[Setting(6)] == pytest.approx(cpus.seconds(costs, Setting(6))), "as right as for 8"


def test_fewer_workers_than_were_measured_are_not_expected_to_wait_for_cpus() -> None:
    costs, limits = decoding(), Limits(Setting(8), 2.0)
    eight = limits.seconds(costs, Setting(8))
    ranked = rank(costs, {Setting(8): eight}, limits)
    assert ranked[OWN] == pytest.approx(4 * eight, rel=0.05)
    assert limits.seconds(costs, OWN) == pytest.approx(eight, rel=0.01), "the model alone would believe it"


def test_all_that_may_be_chosen() -> None:
    limits = Limits(OWN, 2.0, schedules=(False, True), start_methods=("fork",), prefetch=(4,))
    assert set(limits.settings(decoding())) == {
        Setting(0),
        *(Setting(n, p, d, None, "fork") for n in (1, 2) for p in (2, 4) for d in (False, True)),
    }
    fixed = Limits(Setting(3, 5, True, fixed_window=7, start_method="spawn"), 2.0)
    assert set(fixed.settings(decoding())) == {
        replace(fixed.own, num_workers=number) for number in (0, 1, 2, 3)
    }, "what is not named is as it is"


@examples(100)
@given(st.floats(0, 1e4), st.integers(0, 5), st.integers(0, 9), st.floats(0, 1e3))
def test_nothing_is_chosen_that_memory_does_not_hold(
    memory: float, most: int, own: int, batch_bytes: float
) -> None:
    limits = Limits(Setting(own), 8.0, memory, most, prefetch=(4,), worker_bytes=100.0)
    costs = decoding(batch_bytes=batch_bytes)
    found = list(limits.settings(costs))
    assert found[0] == Setting(0)
    for each in found:
        assert each.num_workers <= most
        assert each.num_workers * (100 + batch_bytes * (each.prefetch_factor + 1)) <= memory


@examples(100)
@given(st.floats(0.0, 1.0), st.floats(0.1, 256))
def test_as_many_workers_may_be_tried_as_keep_the_cpus_busy(load_cpu: float, cpus: float) -> None:
    most = most_workers(decoding(load_cpu=load_cpu), cpus)
    assert 1 <= most <= max(64, math.ceil(cpus))
    assert most >= min(64, cpus), "as many as there are CPUs are never too many"
    if load_cpu == 1:
        assert most == math.ceil(cpus), "more would wait for a CPU"
