"""The search for the best setting, with a machine and a clock that are made up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.insight.model import Costs, Setting, seconds_per_batch
from fastq_loader.insight.search import (
    NOISE,
    Candidate,
    Limits,
    Measured,
    Row,
    Search,
    most_workers,
    numbers,
    price,
    promising,
)

OWN = Candidate(Setting(2, 2))


@dataclass
class Machine:
    """Measures what the model says, or what is told otherwise, and takes its time."""

    costs: Costs
    cpus: float = 8.0
    told: dict[int, float] = field(default_factory=dict)  # workers → how much slower than the model
    overhead: float = 0.1
    batch_bytes: float = 0.0
    worker_bytes: float = 0.0
    now: float = 0.0
    fails: dict[Candidate, Exception] = field(default_factory=dict)
    calls: list[tuple[Candidate, float, float]] = field(default_factory=list)

    def rate(self, candidate: Candidate) -> float:
        setting = candidate.setting
        slower = self.told.get(setting.num_workers, 1.0)
        return 1 / (seconds_per_batch(self.costs, setting, self.cpus) * slower)

    def measure(self, candidate: Candidate, seconds: float, patience: float) -> Measured:
        self.calls.append((candidate, seconds, patience))
        self.now += seconds + self.overhead
        if candidate in self.fails:
            raise self.fails[candidate]
        batches = self.rate(candidate) * seconds
        return Measured(batches, seconds, self.costs, self.batch_bytes, self.worker_bytes)

    def search(self, own: Candidate = OWN, seconds: float = 30.0, limits: Limits | None = None) -> Search:
        limits = limits or Limits(cpus=self.cpus)
        return Search(own, limits, self.measure, lambda: self.now, seconds)

    def best_of_all(self, limits: Limits) -> float:
        most = most_workers(self.costs, limits.cpus)
        return max(
            self.rate(Candidate(Setting(workers, prefetch, dynamic)))
            for workers in [0, *numbers(most, limits.cpus)]
            for prefetch in (1, 2, 4, 8)
            for dynamic in (False, True)
        )


def decoding(load: float = 0.05, **others: float) -> Costs:
    return Costs((load,), pack=0.0001, overhead=0.0001, **others)


# ---- which numbers of workers ----------------------------------------------------------------------


@given(st.floats(0.0, 1.0), st.floats(0.1, 256))
def test_as_many_workers_may_be_tried_as_keep_the_cpus_busy(load_cpu: float, cpus: float) -> None:
    most = most_workers(decoding(load_cpu=load_cpu), cpus)
    assert 1 <= most <= max(64, math.ceil(cpus))
    assert most >= min(64, cpus), "as many as there are CPUs are never too many"
    if load_cpu == 1:
        assert most == math.ceil(cpus), "more would wait for a CPU"


def test_work_that_waits_gets_more_workers_than_cpus() -> None:
    assert most_workers(decoding(load_cpu=0.5), 2) == 4
    assert most_workers(decoding(load_cpu=0.07), 2) == 32, "29, rounded up"
    assert most_workers(decoding(load_cpu=0.01), 2) == 32
    assert most_workers(decoding(load_cpu=0.01), 64) == 64


@given(st.integers(1, 300), st.floats(0.3, 300))
def test_numbers_grow_in_steps_of_which_none_is_wide(most: int, cpus: float) -> None:
    tried = numbers(most, cpus)
    assert tried[0] == 1
    assert tried == sorted(set(tried))
    assert tried[-1] <= most <= tried[-1] * 1.5
    assert all(after <= before * 1.5 or before < 2 for before, after in pairwise(tried))
    if math.ceil(cpus) <= most:
        assert math.ceil(cpus) in tried


# ---- what is measured ------------------------------------------------------------------------------


def test_where_the_own_setting_took_all_the_time_nothing_else_is_measured() -> None:
    machine = Machine(decoding(), overhead=6.0)
    search = machine.search(seconds=6)
    search.run()
    assert [candidate for candidate, *_ in machine.calls] == [OWN]
    assert search.best is search.rows[OWN]


def test_the_own_setting_is_measured_first_and_then_one_worker() -> None:
    machine = Machine(decoding())
    machine.search(Candidate(Setting(5, 3, dynamic=True), "spawn")).run()
    first, second = (call[0] for call in machine.calls[:2])
    assert first == Candidate(Setting(5, 3, dynamic=True), "spawn")
    assert second == Candidate(Setting(1, 2, dynamic=True), "spawn")


@settings(deadline=None, max_examples=30)
@given(
    load=st.floats(1e-5, 2.0),
    step=st.sampled_from([0.0, 0.001, 0.2]),
    load_cpu=st.sampled_from([0.02, 0.5, 1.0]),
    cpus=st.sampled_from([1.0, 2.0, 3.5, 16.0]),
    tail=st.sampled_from([1.0, 20.0]),
    seconds=st.sampled_from([30.0, 120.0]),
    overhead=st.sampled_from([0.05, 2.0]),
)
def test_the_time_is_kept_and_what_wins_is_near_the_best(
    load: float, step: float, load_cpu: float, cpus: float, tail: float, seconds: float, overhead: float
) -> None:
    costs = replace(decoding(load, load_cpu=load_cpu, step=step), loads=(*[load] * 19, load * tail))
    machine = Machine(costs, cpus, overhead=overhead)
    search = machine.search(seconds=seconds)
    search.run()
    assert search.best is not None
    # One measurement more may have begun, and a slice has a least length.
    assert machine.now <= seconds * 1.5 + 3 * overhead
    assert machine.rate(search.best.candidate) >= machine.best_of_all(Limits(cpus=cpus)) * 0.9


@settings(deadline=None, max_examples=20)
@given(st.dictionaries(st.sampled_from([0, 1, 2, 3, 4, 6, 8]), st.floats(1.0, 4.0)))
def test_what_was_measured_counts_and_not_what_was_expected(told: dict[int, float]) -> None:
    machine = Machine(decoding(), told=told)
    search = machine.search()
    search.run()
    fastest = max(row.rate for row in search.rows.values())
    assert search.best is not None
    assert search.best.rate >= fastest * (1 - NOISE)


def test_of_equals_the_one_with_the_fewest_workers_wins() -> None:
    waits_for_the_step = Machine(decoding(0.05, step=0.2))
    search = waits_for_the_step.search(Candidate(Setting(8, 2)))
    search.run()
    assert search.best is not None
    assert search.best.candidate.setting == Setting(1, 2)


def test_no_worker_wins_where_samples_are_tiny() -> None:
    tiny = Machine(Costs((0.00005,), pack=0.00005, overhead=0.0002), cpus=2)
    search = tiny.search(Candidate(Setting(4, 2)))
    search.run()
    assert search.best is not None
    assert search.best.candidate.setting.num_workers == 0


def test_the_schedule_stays_unless_the_other_one_wins() -> None:
    for dynamic in (False, True):
        search = Machine(decoding()).search(Candidate(Setting(2, 2, dynamic)))
        search.run()
        assert search.best is not None
        assert search.best.candidate.setting.dynamic is dynamic
    tailed = Machine(replace(decoding(), loads=(*[0.01] * 19, 0.5)), cpus=4)
    search = tailed.search(Candidate(Setting(2, 2)))
    search.run()
    assert search.best is not None
    assert search.best.candidate.setting.dynamic


def test_rounds_go_there_and_back() -> None:
    machine = Machine(decoding(), overhead=0.0)
    machine.search().run()
    order = [call[0] for call in machine.calls[2:]]
    first_round = order[: 2 * len(set(order))]
    assert first_round == first_round[::-1], "the average time of all is the same"
    assert 2 < len(set(order)) <= 8
    counts = Counter(order)
    assert max(counts.values()) > min(counts.values()), "the better half goes on"


def test_a_start_that_takes_long_leaves_time_for_fewer() -> None:
    quick, slow = Machine(decoding(), overhead=0.05), Machine(decoding(), overhead=4.0)
    for machine in (quick, slow):
        machine.search().run()
    assert len({call[0] for call in slow.calls}) < len({call[0] for call in quick.calls})


def test_no_measurement_may_take_longer_than_the_time_that_is_left() -> None:
    machine = Machine(decoding())
    machine.search(seconds=20).run()
    for before, (_, seconds, patience) in enumerate(machine.calls):
        assert seconds + 2 <= patience <= max(20 - 0.1 * before, seconds + 2.3)


def test_a_quiet_moment_before_the_rounds_makes_no_winner() -> None:
    machine = Machine(decoding())
    search = machine.search()
    measure = machine.measure

    def drifting(candidate: Candidate, seconds: float, patience: float) -> Measured:
        found = measure(candidate, seconds, patience)
        return found if len(machine.calls) > 2 else replace(found, batches=found.batches * 100)

    search._measure = drifting
    search.run()
    assert search.best is not None
    assert search.best.candidate.setting.num_workers == 8


# ---- limits ----------------------------------------------------------------------------------------


def tried(search: Search) -> set[Setting]:
    search.run()
    return {row.candidate.setting for row in search.rows.values()}


def test_nothing_is_tried_that_memory_does_not_hold() -> None:
    machine = Machine(decoding(load_cpu=0.01), worker_bytes=100.0, batch_bytes=10.0)
    settings = tried(machine.search(limits=Limits(cpus=8, memory_bytes=1000)))
    assert all(
        setting.num_workers * (100 + 10 * (setting.prefetch_factor + 1)) <= 1000 for setting in settings
    )
    assert max(setting.num_workers for setting in settings) >= 6
    assert {setting.num_workers for setting in tried(machine.search(limits=Limits(8, memory_bytes=0)))} <= {
        0,
        1,  # which told what a batch costs
        2,  # its own
    }


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_more_workers_are_tried_than_are_allowed(most: int) -> None:
    machine = Machine(decoding())
    settings = tried(machine.search(Candidate(Setting(0, 2)), limits=Limits(cpus=8, most_workers=most)))
    assert max(setting.num_workers for setting in settings) == most


def test_only_the_schedules_and_start_methods_that_were_named_are_tried() -> None:
    own = Candidate(Setting(2, 2), "fork")
    limits = Limits(cpus=4, schedules=(False,), start_methods=("fork", "spawn"))
    search = Machine(decoding(), cpus=4).search(own, limits=limits)
    assert not any(setting.dynamic for setting in tried(search))
    methods = {
        row.candidate.start_method for row in search.rows.values() if row.candidate.setting.num_workers
    }
    assert methods == {"fork", "spawn"}


# ---- failures --------------------------------------------------------------------------------------


def test_a_setting_that_fails_has_a_row_and_is_not_tried_again() -> None:
    error = RuntimeError("no")
    four = Candidate(Setting(8, 2))
    machine = Machine(decoding(), fails={four: error})
    search = machine.search()
    search.run()
    assert search.rows[four].error is error
    assert [call[0] for call in machine.calls].count(four) == 1
    assert search.ranked()[0] is search.best is not search.rows[four]
    assert search.ranked()[-1] is search.rows[four]


def test_where_the_own_setting_fails_another_one_may_win() -> None:
    machine = Machine(decoding(), fails={OWN: OSError("too many")})
    search = machine.search()
    search.run()
    assert search.best is not None
    assert search.best.candidate != OWN


def test_where_everything_fails_the_error_of_the_own_setting_is_raised() -> None:
    errors = KeyError("own"), KeyError("one worker")
    one = Candidate(Setting(1, 2))
    search = Machine(decoding(), fails=dict(zip((OWN, one), errors, strict=True))).search()
    with pytest.raises(KeyError, match="own"):
        search.run()
    assert search.best is None


def test_an_interrupt_leaves_what_was_measured() -> None:
    machine = Machine(decoding())
    search = machine.search()
    measure = machine.measure

    def interrupted(candidate: Candidate, seconds: float, patience: float) -> Measured:
        if len(machine.calls) == 3:
            raise KeyboardInterrupt
        return measure(candidate, seconds, patience)

    search._measure = interrupted
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert search.best is not None
    assert sum(len(row.slices) + (row.probe is not None) for row in search.rows.values()) == 3


# ---- rows and the first choice ---------------------------------------------------------------------


def test_a_rows_rate_is_that_of_all_its_time() -> None:
    row = Row(OWN)
    assert (row.rate, row.spread) == (0.0, None)
    row.slices = [Measured(10, 1.0)]
    assert (row.rate, row.spread) == (10.0, None)
    row.slices.append(Measured(90, 3.0))
    row.probe = Measured(1000, 1.0)
    assert row.rate == 25.0
    assert row.spread == 0.4


@given(
    st.dictionaries(
        st.builds(
            Candidate, st.builds(Setting, st.integers(0, 9), st.sampled_from([1, 2, 4]), st.booleans())
        ),
        st.floats(0.1, 1e6),
        min_size=1,
    ),
    st.integers(1, 10),
)
def test_what_promises_most_is_among_those_that_are_measured(
    expected: dict[Candidate, float], limit: int
) -> None:
    chosen = promising(expected, OWN, limit)
    assert len(chosen) == len(set(chosen)) <= limit
    assert len(chosen) == limit or limit > len(chosen)
    assert set(chosen) <= set(expected)
    if limit > 1:
        best = max(expected.values())
        assert max(expected[each] for each in chosen) >= best * (1 - NOISE)
    if limit >= 3 and OWN in expected:
        assert OWN in chosen, "to be compared at the same time"


def test_a_price_is_workers_then_prefetch_then_change() -> None:
    order = [
        Candidate(Setting(1, 4, dynamic=True), "spawn"),
        Candidate(Setting(2, 1, dynamic=True), "spawn"),
        Candidate(Setting(2, 2), None),
        Candidate(Setting(2, 2), "spawn"),
        Candidate(Setting(2, 2, dynamic=True), None),
    ]
    assert sorted(order, key=lambda each: price(each, OWN)) == order
