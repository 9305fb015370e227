"""Which settings are tried, for how long, and which of them wins.

Pure: a function measures, and another one is the clock. Two settings are measured first: the loader's own,
and one worker, which tells what a batch costs when nobody competes for the CPUs. The model says from that
what every other setting is worth. The most promising ones are measured in rounds, in turn, so that what else
the machine does hits all alike: each round takes the same share of the time, and the better half goes on.

Settings within the noise of the best are equal. Of equals the one with the fewest workers wins, and then that
with the fewest batches under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fastq_loader.insight.model import Costs, Setting, seconds_per_batch

#: Measurements of one setting differ by about as much.
NOISE = 0.03
#: Settings that are measured after the first two, at most: three rounds bring eight down to one.
_MOST = 8
#: The least seconds of one measurement, and the least batches of each worker, or late ones if there are some.
_LEAST_SECONDS, _LEAST_BATCHES, _LEAST_LATE = 0.25, 6, 3
#: Seconds that a measurement may take longer than it should, for a start and an end of its workers.
_SLACK = 2.0
#: The share of the time that the first two measurements may take together.
_PROBES = 0.25
#: A load that hardly uses a CPU may have 16 workers for each, but not more than 64: every worker is a process
#: with memory and a window of its own.
_IDLE_SHARE, _MOST_WAITING = 1 / 16, 64
#: Batches that each worker may work ahead. Not 1, unless the user has it: the worker waits for each message.
_PREFETCH = (2, 4, 8)


@dataclass(frozen=True)
class Candidate:
    """What is measured.

    Attributes:
        setting: workers, prefetch, schedule.
        start_method: "fork", "spawn" or "forkserver"; None is the loader's own.
    """

    setting: Setting
    start_method: str | None = None


@dataclass(frozen=True)
class Measured:
    """What one measurement gave.

    Attributes:
        batches: that were counted.
        seconds: wall time in which they came, with the steps.
        costs: of its batches, for the model; None where no batch told.
        batch_bytes: of a batch in shared memory.
        worker_bytes: memory that a worker has for itself.
    """

    batches: float
    seconds: float
    costs: Costs | None = None
    batch_bytes: float = 0.0
    worker_bytes: float = 0.0


@dataclass
class Row:
    """What is known of a setting.

    Attributes:
        candidate: it.
        expected: batches per second, by the model; None: it was not asked.
        probe: what was measured before the rounds. It counts as long as nothing else does: the machine may
            have been less busy then.
        slices: what was measured in the rounds, in the order of time.
        error: what was raised instead.
    """

    candidate: Candidate
    expected: float | None = None
    probe: Measured | None = None
    slices: list[Measured] = field(default_factory=list)
    error: Exception | None = None

    @property
    def rate(self) -> float:
        """Batches per second, measured; 0.0: nothing was."""
        counted = self.slices or ([] if self.probe is None else [self.probe])
        seconds = sum(each.seconds for each in counted)
        return sum(each.batches for each in counted) / seconds if seconds else 0.0

    @property
    def spread(self) -> float | None:
        """Half of the range of its measurements, as a part of `rate`; None with fewer than two."""
        rates = [each.batches / each.seconds for each in self.slices]
        return (max(rates) - min(rates)) / 2 / self.rate if len(rates) > 1 else None


@dataclass(frozen=True)
class Limits:
    """What may be tried.

    Attributes:
        cpus: that all processes may use together.
        memory_bytes: for workers and batches.
        most_workers: the most that there may be; None: as many as are of use.
        schedules: values of `Setting.dynamic`.
        start_methods: names, or None alone: the loader's own.
    """

    cpus: float
    memory_bytes: float = math.inf
    most_workers: int | None = None
    schedules: tuple[bool, ...] = (False, True)
    start_methods: tuple[str | None, ...] = (None,)


def most_workers(costs: Costs, cpus: float) -> int:
    """The most workers that can be of use: as many as keep the CPUs busy, rounded up to what is tried. It
    would rather be too few: the time that a load waits for a CPU counts as time that it uses one."""
    waiting = math.ceil(cpus / max(costs.load_cpu, _IDLE_SHARE))
    most = max(1, min(waiting, max(_MOST_WAITING, math.ceil(cpus))))
    return next(number for number in _steps(cpus) if number >= most)


def numbers(most: float, cpus: float) -> list[int]:
    """Numbers of workers to try: from 4 on each is a third or a half more than the one before. As many as
    there are CPUs is one of them."""
    return [number for number in _steps(cpus) if number <= most]


def _steps(cpus: float) -> list[int]:
    steps = {*range(1, 5), *(base << shift for base in (2, 3) for shift in range(1, 12)), math.ceil(cpus)}
    return sorted(steps)


class Search:
    """Finds the best setting.

    Args:
        own: the loader's.
        limits: what may be tried.
        measure: measures a candidate for some seconds; is given the seconds after which it must be over.
        clock: the time, in seconds.
        seconds: of the whole search.

    Attributes:
        rows: what was measured, by candidate.
    """

    def __init__(
        self,
        own: Candidate,
        limits: Limits,
        measure: Callable[[Candidate, float, float], Measured],
        clock: Callable[[], float],
        seconds: float,
    ) -> None:
        self._own = own
        self._limits = limits
        self._measure = measure
        self._clock = clock
        self._seconds = seconds
        self._until = clock() + seconds
        self._overhead = 0.0  # seconds that a measurement takes besides
        self._least = _LEAST_SECONDS  # of one measurement
        self.rows: dict[Candidate, Row] = {}
        self._survivors: list[Row] = []

    def run(self) -> None:
        """Measure until one setting is left, or the time is over.

        Raises:
            Exception: what the loader's own setting raised, if no setting gave a batch.
        """
        expected = self._expected(self._probe())
        for row in self.rows.values():
            row.expected = expected.get(row.candidate)
        chosen = promising(expected, self._own, self._affordable())
        probed = [each for each in self.rows if each in expected]
        for each in dict.fromkeys([*chosen[:1], *probed, *chosen[1:]][:_MOST]):
            self._survivors.append(self.rows.setdefault(each, Row(each, expected[each])))
        rounds = math.ceil(math.log2(max(2, len(self._survivors))))
        while len(self._survivors) > 1 and self._left > 0:
            self._round(self._survivors, self._left / max(1, rounds))
            rounds -= 1
            ranked = [row for row in self._survivors if row.error is None]
            self._survivors = sorted(ranked, key=self._rank(ranked))[: -(-len(self._survivors) // 2)]

    @property
    def best(self) -> Row | None:
        """The recommended row; None: nothing was measured."""
        measured = [row for row in self._survivors if row.rate] or [
            row for row in self.rows.values() if row.rate
        ]
        return min(measured, key=self._rank(measured)) if measured else None

    def ranked(self) -> list[Row]:
        """All rows: the recommended one, then from the fastest to the slowest, then those that failed."""
        best = self.best
        return sorted(self.rows.values(), key=lambda row: (row is not best, -row.rate))

    # ---- steps --------------------------------------------------------------------------------

    @property
    def _left(self) -> float:
        return self._until - self._clock()

    def _probe(self) -> Measured:
        """Measure the loader's own setting, and one worker if there is time; the one that tells what a batch
        costs."""
        one = Candidate(Setting(1, 2, self._own.setting.dynamic), self._own.start_method)
        probes = [self._own, one] if self._limits.most_workers != 0 else [self._own]
        for candidate in dict.fromkeys(probes):
            if self._left <= 0:
                break
            row = self.rows.setdefault(candidate, Row(candidate))
            began = self._clock()
            row.probe = self._try(row, self._seconds * _PROBES / 2)
            if row.probe is not None:
                self._overhead = max(0.0, self._clock() - began - self._seconds * _PROBES / 2)
        known = [row.probe for row in self.rows.values() if row.probe is not None and row.probe.costs]
        if not known:
            raise next(row.error for row in self.rows.values() if row.error is not None)
        return known[-1]

    def _expected(self, measured: Measured) -> dict[Candidate, float]:
        """Batches per second of every candidate, by the model."""
        limits = self._limits
        assert measured.costs is not None, "it was chosen for that"
        costs = measured.costs
        wanted = max(
            _LEAST_BATCHES * max(costs.load + costs.pack, costs.step), _LEAST_LATE * max(costs.loads)
        )
        self._least = max(_LEAST_SECONDS, min(wanted, self._left / 8))
        most = most_workers(costs, limits.cpus)
        if limits.most_workers is not None:
            most = min(most, limits.most_workers)
        own = self._own.setting.prefetch_factor
        settings = {
            Setting(number, prefetch, dynamic)
            for number in {*numbers(most, limits.cpus), self._own.setting.num_workers}
            for prefetch in {*_PREFETCH, own}
            for dynamic in limits.schedules
            if number and _bytes(number, prefetch, measured) <= limits.memory_bytes
        }
        zero = Setting(0, 2, self._own.setting.dynamic)
        rates = {each: 1 / seconds_per_batch(costs, each, limits.cpus) for each in {*settings, zero}}
        methods = limits.start_methods
        return {
            Candidate(setting, method if setting.num_workers else self._own.start_method): rate
            for setting, rate in rates.items()
            for method in methods
        }

    def _affordable(self) -> int:
        """How many settings can be measured in half of the time that is left."""
        return max(2, min(_MOST, int(self._left / 2 / (self._least + self._overhead))))

    def _round(self, survivors: list[Row], seconds: float) -> None:
        """Measure each of them, there and back, so that the average time of all is the same."""
        slices = [*survivors, *survivors[::-1]]
        each = seconds / len(slices) - self._overhead
        if each < self._least:
            slices, each = survivors, max(self._least, seconds / len(survivors) - self._overhead)
        for row in slices:
            if self._left <= 0:
                return
            measured = self._try(row, each) if row.error is None else None
            if measured is not None:
                row.slices.append(measured)

    def _try(self, row: Row, seconds: float) -> Measured | None:
        try:
            patience = max(seconds + 2 * self._overhead + _SLACK, self._left)
            return self._measure(row.candidate, seconds, patience)
        except Exception as error:
            row.error = error
            return None

    def _rank(self, rows: Iterable[Row]) -> Callable[[Row], tuple[object, ...]]:
        """Sorts by speed, and those within the noise of the best by what they take."""
        enough = max((row.rate for row in rows), default=0.0) * (1 - NOISE)
        own = self._own
        return lambda row: (True, -row.rate) if row.rate < enough else (False, *price(row.candidate, own))


def price(candidate: Candidate, own: Candidate) -> tuple[int, int, bool, bool]:
    """What a candidate takes, and whether it changes more than the numbers; the least wins."""
    setting = candidate.setting
    changed = setting.dynamic != own.setting.dynamic, candidate.start_method != own.start_method
    return setting.num_workers, setting.prefetch_factor, *changed


def _bytes(number: int, prefetch: int, measured: Measured) -> float:
    """Memory of workers, and of the batches that are under way."""
    return number * (measured.worker_bytes + (prefetch + 1) * measured.batch_bytes)


def promising(expected: Mapping[Candidate, float], own: Candidate, limit: int) -> list[Candidate]:
    """The candidates to measure: the best of each number of workers, by turns with variants of the best.

    The model knows least about how workers get into each other's way, so different numbers come first.
    """
    numbers: dict[int, dict[Candidate, float]] = {}
    for candidate, rate in expected.items():
        numbers.setdefault(candidate.setting.num_workers, {})[candidate] = rate
    leaders = {_cheapest(rates, own): max(rates.values()) for rates in numbers.values()}
    best = _cheapest(leaders, own)
    ranked = sorted(leaders, key=lambda each: (each != best, -leaders[each], price(each, own)))
    some = next((each for each in ranked if each.setting.num_workers), best)
    variants = [
        each
        for each in numbers[some.setting.num_workers]
        if _differences(each, some) == 1 and each.setting.prefetch_factor >= some.setting.prefetch_factor
    ]
    variants.sort(key=lambda each: price(each, own))
    zero = [each for each in expected if each.setting.num_workers == 0]
    first = ranked[:1] + [own] * (own in expected) + ranked[1:2] + zero
    later = [each for pair in zip(ranked[2:], variants, strict=False) for each in pair]
    return list(dict.fromkeys([*first, *later, *variants, *ranked]))[:limit]


def _cheapest(rates: Mapping[Candidate, float], own: Candidate) -> Candidate:
    enough = max(rates.values()) * (1 - NOISE)
    return min((each for each, rate in rates.items() if rate >= enough), key=lambda each: price(each, own))


def _differences(one: Candidate, other: Candidate) -> int:
    pairs = zip(price(one, other), price(other, other), strict=True)
    return sum(mine != its for mine, its in pairs)
