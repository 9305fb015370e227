"""`tune`: find the fastest setting of a loader on this machine by trying.

Runs in the consumer; each trial runs in a process of its own, see `trials`.

Two settings are measured first: the loader's own, and one worker, which shows the cost of a batch when
nothing competes for the CPUs. From this the model predicts the speed of all other settings. The most
promising ones are measured in rounds, in turn, so that other load on the machine affects all alike: each
round takes the same share of the time, and the better half goes on. `extras.insight.chooser` orders settings.
"""

from __future__ import annotations

import html
import math
import multiprocessing
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch.utils.data

from fastq_loader import options
from fastq_loader.errors import check_seconds, checked_names, is_int
from fastq_loader.extras.insight import machine
from fastq_loader.extras.insight.chooser import Limits, rank
from fastq_loader.extras.insight.model import Costs, Setting
from fastq_loader.extras.tools import trials
from fastq_loader.extras.tools.trials import Measured, settings_of
from fastq_loader.loader import DataLoader
from fastq_loader.system import torch_patches
from fastq_loader.system.terminal import printable

_SCHEDULES = {"round_robin": False, "dynamic": True}
#: The most settings to measure after the first two: three rounds reduce eight to one.
_MOST = 8
#: Least length of one measurement: in seconds, in batches of one worker, and in loads of the slowest batch.
_LEAST_SECONDS, _LEAST_BATCHES, _LEAST_LATE = 0.25, 6, 3
#: Seconds that a measurement may take beyond its plan, for the start and end of its workers.
_SLACK = 2.0
#: Seconds that the first measurement may take: on a busy machine, or with slow batches, the search is longer
#: than was asked for, and has a result.
_FIRST = 60.0
#: The share of the time that the first two measurements may take together.
_PROBES = 0.25
#: Values of `prefetch_factor` to try. Not 1, unless the user has it: the worker would wait for each message.
_PREFETCH = (2, 4, 8)


@dataclass(frozen=True)
class TuningRow:
    """One setting that was tried.

    Attributes:
        settings: arguments of `DataLoader`.
        batches_per_second: the measured rate, including the step; 0.0 if nothing was measured.
        spread: half of the range of the measurements, as a fraction of their rate; None with fewer than two.
        expected: batches per second predicted by the model; None if not predicted.
        current: whether the settings are the loader's own.
        error: the error that ended its measurement; None if none did.

    >>> TuningRow({"num_workers": 2}, 310.5, 0.02, None, current=True).batches_per_second
    310.5
    """

    settings: dict[str, Any]
    batches_per_second: float
    spread: float | None
    expected: float | None
    current: bool
    error: Exception | None = None


@dataclass(frozen=True)
class Tuning:
    """Result of `tune`. `print` of it is a table.

    Attributes:
        settings: the recommended arguments of `DataLoader`.
        rows: the settings tried: the recommended one, then the others from the fastest to the slowest.
        step_seconds: seconds of the simulated step.
        notes: remarks: which settings failed and how, and what other settings change besides the speed.
        loader: a new loader with the recommended settings and everything else as in the given one; the two
            share dataset, sampler and generator.

    >>> loader = DataLoader(range(8))
    >>> row = TuningRow({"num_workers": 0}, 310.5, None, None, current=True)
    >>> print(Tuning(row.settings, (row,), 0.05, (), loader))
    Recommended: num_workers=0 (as it is), with a step of 50 ms.
    ...
    """

    settings: dict[str, Any]
    rows: tuple[TuningRow, ...]
    step_seconds: float
    notes: tuple[str, ...]
    loader: DataLoader[Any] = field(repr=False, compare=False)

    def __str__(self) -> str:
        rows = [_HEADER, *(_cells(row, number == 0) for number, row in enumerate(self.rows))]
        lines = [tuple(map(printable, row)) for row in rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.rjust, cells, widths)).rstrip() for cells in lines]
        step = f"with a step of {self.step_seconds * 1000:.3g} ms" if self.step_seconds else "without a step"
        head = f"Recommended: {_words(self.settings)}{self._gain()}, {step}."
        notes = [_EXPECTED] * any(row.expected is not None for row in self.rows) + [*self.notes]
        head, *notes = (textwrap.fill(text, _WIDTH, break_on_hyphens=False) for text in (head, *notes))
        return printable("\n".join([head, "", *table, *[""] * bool(notes), *notes]))

    def _gain(self) -> str:
        own = next((row.batches_per_second for row in self.rows if row.current), 0.0)
        if not own or self.rows[0].current:
            return " (as it is)" if own else ""
        return f" ({self.rows[0].batches_per_second / own:.2g} times the current setting)"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


_HEADER = ("", "workers", "prefetch", "schedule", "start", "batches/s", "", "expected")
_EXPECTED = (
    "expected: batches/s that a model predicts from the costs of one worker's batches. The recommendation "
    "depends on the measured ones."
)
#: Columns of the page.
_WIDTH = 80


def _cells(row: TuningRow, recommended: bool) -> tuple[str, ...]:
    names = "num_workers", "prefetch_factor", "schedule", "multiprocessing_context"
    return (
        " ".join(["→"] * recommended + ["now"] * row.current),
        *(str(row.settings.get(name, "-")) for name in names),
        _number(row.batches_per_second) if row.batches_per_second else "failed" if row.error else "-",
        f"± {row.spread:.0%}" if row.spread is not None else "",
        "" if row.expected is None else _number(row.expected),
    )


def _words(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def tune(
    loader: DataLoader[Any],
    step_seconds: float | None = None,
    seconds: float = 30,
    *,
    start_methods: Sequence[str] | None = None,
    schedules: Sequence[str] | None = None,
    max_workers: int | None = None,
    progress: bool = True,
) -> Tuning:
    """Find the fastest setting of a loader on this machine by trying: workers, prefetch and schedule.

    Each trial iterates a copy of the loader in a process of its own, so that the loader, its dataset, its
    sampler and all generators stay as they are. Batches stay on the host there: copies to an accelerator, and
    a transform on it, are not measured, and a note says so. Ctrl-C ends the search, which returns its result
    so far.

    Args:
        loader: the loader to tune.
        step_seconds: seconds of the training step after each batch, simulated by sleeping; None: as long as
            in the loader's own epochs so far, or 0 before the first.
        seconds: approximate seconds to spend on the search.
        start_methods: some of "fork", "spawn" and "forkserver"; None for the loader's own.
        schedules: "round_robin", "dynamic" or both, whose random numbers differ; None: both, if map-style.
        max_workers: the most to try; None: what this process's cgroup and its `LOCAL_WORLD_SIZE` allow.
        progress: write progress to stderr.

    Raises:
        ValueError, TypeError: an argument is invalid.
        RuntimeError: there are no worker processes here, or torch's loader is patched: nothing to choose.
        Exception: the error of the loader's own setting, if no setting gave a batch.
        KeyboardInterrupt: it came before anything was measured.

    >>> found = tune(DataLoader(range(64), 8), seconds=1, max_workers=0, progress=False)
    >>> found.settings["num_workers"]
    0
    """
    limits = checked(loader, step_seconds, seconds, start_methods, schedules, max_workers)
    if patch := torch_patches.found():
        raise RuntimeError(f"{patch}, so torch's own iterators run and there is nothing to try")
    so_far = loader.statistics().total
    step = so_far.consumer_seconds / max(1, so_far.batches) if step_seconds is None else float(step_seconds)
    interrupted, measure = False, _trying(loader, step, seconds, progress)
    search = Search(limits, measure, time.monotonic, seconds)
    try:
        search.run()
    except KeyboardInterrupt:
        if search.best is None:
            raise
        interrupted = True
    return _result(loader, search.ranked(), limits.own, step, interrupted)


def _trying(
    loader: DataLoader[Any], step: float, seconds: float, progress: bool
) -> Callable[[Setting, float, float], Measured]:
    """Return a function that measures a setting; if `progress`, it says which one."""
    began = time.monotonic()

    def measure(setting: Setting, duration: float, patience: float) -> Measured:
        if progress:
            passed = f"{min(time.monotonic() - began, seconds):.0f} of {seconds:.0f} s"
            trials.report(f"tune: {passed}: {_words(settings_of(setting))}")
        return trials.measure(loader, setting, step, duration, patience)

    return measure


def _result(
    loader: DataLoader[Any], ranked: list[Row], own: Setting, step: float, interrupted: bool
) -> Tuning:
    rows = tuple(
        TuningRow(settings_of(row.setting), row.rate, row.spread, row.expected, row.setting == own, row.error)
        for row in ranked
    )
    failed = [row for row in rows if row.error is not None]
    notes = [f"num_workers={row.settings['num_workers']} failed: {row.error!r:.200}" for row in failed]
    if any(row.setting.dynamic != own.dynamic for row in ranked):
        notes.append("With another schedule, the random numbers of the batches differ.")
    if device := trials.accelerator(loader):
        notes.append(f"Not measured: the copies to {device}, and a transform there.")
    if interrupted:
        notes.append("It was interrupted: this is what was measured so far.")
    return Tuning(rows[0].settings, rows, step, tuple(notes), trials.like(loader, ranked[0].setting))


# ---- settings to try -----------------------------------------------------------------------------


def checked(
    loader: Any, step_seconds: Any, seconds: Any, start_methods: Any, schedules: Any, max_workers: Any
) -> Limits:
    """Validate the arguments of `tune`, where the errors are described; return the limits of the search."""
    needed = "tune needs a fastq_loader.DataLoader"
    if isinstance(loader, torch.utils.data.DataLoader):  # torch's
        needed += ": change its import to `from fastq_loader import DataLoader`"
    trials.check_loader(loader, DataLoader, needed)
    check_seconds("seconds", seconds, least=1.0)
    if step_seconds is not None:
        check_seconds("step_seconds", step_seconds)
    if max_workers is not None and (not is_int(max_workers) or max_workers < 0):
        raise ValueError(f"max_workers={max_workers!r} must be a number of workers, 0 or more, or None")
    there = multiprocessing.get_all_start_methods()
    methods = None if start_methods is None else checked_names("start_methods", start_methods, there, 1)
    own = _own_setting(loader, methods)
    known = ["dynamic" if own.dynamic else "round_robin"] if options.is_iterable(loader) else list(_SCHEDULES)
    tried = known if schedules is None else checked_names("schedules", schedules, known, 1)
    return replace(
        machine.limits(own),
        most_workers=math.inf if max_workers is None else max_workers,
        schedules=tuple(_SCHEDULES[name] for name in tried),
        start_methods=tuple(methods or ()),
        prefetch=_PREFETCH,
    )


def _own_setting(loader: DataLoader[Any], methods: list[str] | None) -> Setting:
    method = None if methods is None else trials.start_method(loader)
    dynamic = options.of(loader).is_dynamic
    return Setting(int(loader.num_workers), loader.prefetch_factor or 2, dynamic, start_method=method)


# ---- the search -----------------------------------------------------------------------------------


@dataclass
class Row:
    """Measurements of a setting.

    Attributes:
        setting: the setting measured.
        expected: batches per second predicted by the model; None if not predicted.
        probe: the measurement before the rounds. It counts only while there is no other: the machine may have
            been less busy then.
        slices: the measurements in the rounds, in the order of time.
        error: the error that ended a measurement; None if none did.
    """

    setting: Setting
    expected: float | None = None
    probe: Measured | None = None
    slices: list[Measured] = field(default_factory=list)
    error: Exception | None = None

    @property
    def rate(self) -> float:
        """Measured batches per second; 0.0 if nothing was measured."""
        counted = self.slices or ([] if self.probe is None else [self.probe])
        seconds = sum(each.seconds for each in counted)
        return sum(each.batches for each in counted) / seconds if seconds else 0.0

    @property
    def spread(self) -> float | None:
        """Half of the range of its measurements, as a fraction of `rate`; None with fewer than two."""
        rates = [each.batches / each.seconds for each in self.slices]
        return (max(rates) - min(rates)) / 2 / self.rate if len(rates) > 1 else None


@dataclass
class Search:
    """Search for the best setting.

    Args:
        limits: the settings that may be tried.
        measure: measures a setting for some seconds; its third argument limits the seconds it may take.
        clock: returns the time in seconds.
        seconds: duration of the whole search.

    Attributes:
        rows: the measurements by setting.
    """

    limits: Limits
    measure: Callable[[Setting, float, float], Measured]
    clock: Callable[[], float]
    seconds: float
    rows: dict[Setting, Row] = field(default_factory=dict)
    _survivors: list[Row] = field(default_factory=list)
    _overhead: float = 0.0  # seconds that a measurement takes beyond its own
    _least: float = _LEAST_SECONDS  # seconds of one measurement, at least

    def __post_init__(self) -> None:
        self._until = self.clock() + self.seconds

    def run(self) -> None:
        """Measure until one setting is left or the time is over.

        Raises:
            Exception: the error of the loader's own setting, if no setting gave a batch.
        """
        measured, costs = self._probe()
        wanted = max(
            _LEAST_BATCHES * max(costs.load + costs.pack, costs.step), _LEAST_LATE * max(costs.loads)
        )
        self._least = max(_LEAST_SECONDS, min(wanted, self._left / 8))
        expected = rank(costs, {}, replace(self.limits, worker_bytes=measured.worker_bytes))
        # As many settings as can be measured in half of the time that is left; at least the best expected one
        # and the two that were measured, one of which may be faster than the model expects.
        affordable = max(3, min(_MOST, int(self._left / 2 / (self._least + self._overhead))))
        for each in promising(expected, [each for each in self.rows if each in expected])[:affordable]:
            self._survivors.append(self.rows.setdefault(each, Row(each)))
        for row in self.rows.values():
            row.expected = 1 / expected[row.setting] if row.setting in expected else None
        # A single survivor may not have been measured yet.
        while self._left > 0 and (len(self._survivors) > 1 or [row.rate for row in self._survivors] == [0]):
            self._round(self._left / math.ceil(math.log2(max(2, len(self._survivors)))))
            self._survivors = self._best_first(self._survivors)[: -(-len(self._survivors) // 2)]

    @property
    def best(self) -> Row | None:
        """The recommended row; None if nothing was measured."""
        return next(iter(self._best_first(self._survivors) or self._best_first(self.rows.values())), None)

    def _best_first(self, rows: Iterable[Row]) -> list[Row]:
        """The rows that were measured and did not fail, the best first."""
        seconds = {row.setting: 1 / row.rate for row in rows if row.rate and row.error is None}
        return [self.rows[setting] for setting in rank(None, seconds, self.limits)]

    def ranked(self) -> list[Row]:
        """All rows: the recommended one, then from the fastest to the slowest, failed ones last."""
        best = self.best
        return sorted(self.rows.values(), key=lambda row: (row is not best, -row.rate))

    @property
    def _left(self) -> float:
        return self._until - self.clock()

    def _probe(self) -> tuple[Measured, Costs]:
        """Measure the loader's own setting, then one worker if there is time. Return the last measurement
        that has costs of a batch."""
        own = self.limits.own
        one = replace(own, num_workers=1, prefetch_factor=2)
        seconds, known = self.seconds * _PROBES / 2, []
        for setting in dict.fromkeys([own, one] if self.limits.most_workers else [own]):
            if self._left > 0:
                row, began = self.rows.setdefault(setting, Row(setting)), self.clock()
                row.probe = self._try(row, seconds)
                if row.probe is not None and row.probe.costs:
                    self._overhead = max(0.0, self.clock() - began - seconds)
                    known.append((row.probe, row.probe.costs))
        if not known:
            raise next(row.error for row in self.rows.values() if row.error is not None)
        return known[-1]

    def _round(self, seconds: float) -> None:
        """Measure the survivors forwards, then backwards, so that load that drifts affects all alike."""
        order = [*self._survivors, *self._survivors[::-1]]
        each = max(self._least, seconds / len(order) - self._overhead)
        for row in order:
            if self._left > 0 and row.error is None:
                measured = self._try(row, each)
                row.slices += [] if measured is None else [measured]

    def _try(self, row: Row, seconds: float) -> Measured | None:
        try:
            patience = max(seconds + 2 * self._overhead + _SLACK, self._left)
            if self.best is None:
                patience = max(patience, _FIRST)
            return self.measure(row.setting, seconds, patience)
        except Exception as error:
            row.error = error
            return None


def promising(ranked: Iterable[Setting], probed: Sequence[Setting]) -> list[Setting]:
    """The settings to measure, the most important first: the best, the probed ones, and then the best of each
    number of workers, in turn with variants of the best.

    The model is least reliable about how workers slow each other down, so different numbers come first.
    """
    numbers: dict[int, list[Setting]] = {}
    for setting in ranked:
        numbers.setdefault(setting.num_workers, []).append(setting)
    best, *others = [alike[0] for alike in numbers.values()]
    variants = next((alike for number, alike in numbers.items() if number), [])
    mixed = [each for pair in zip_longest(others[1:], variants) for each in pair if each is not None]
    return list(dict.fromkeys([best, *probed, *others[:1], *numbers.get(0, []), *mixed]))
