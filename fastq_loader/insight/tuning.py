"""`tune`: which setting of a loader is the fastest here, found by trying.

Runs in the consumer; each trial runs in a process of its own. `search` says what is tried, `trials` how.
"""

from __future__ import annotations

import contextlib
import html
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastq_loader import arguments
from fastq_loader.errors import is_int
from fastq_loader.insight import machine, trials
from fastq_loader.insight.model import Setting
from fastq_loader.insight.search import Candidate, Limits, Measured, Row, Search
from fastq_loader.memory import arena

if TYPE_CHECKING:
    from fastq_loader.loader import DataLoader

#: The part of the memory that workers and batches may take.
_MEMORY_SHARE = 0.8
_SCHEDULES = {"round_robin": False, "dynamic": True}
_OTHER_RANDOM_NUMBERS = "With another schedule, the random numbers of the batches are others."


@dataclass(frozen=True)
class TuningRow:
    """One setting that was tried.

    Attributes:
        settings: arguments of `DataLoader`.
        batches_per_second: measured, with the step; 0.0: nothing was.
        spread: half of the range of several measurements, as a part of that; None: there was one.
        expected: batches per second, by the model; None: it was not asked.
        current: whether they are the loader's own.
        error: what was raised instead.
    """

    settings: dict[str, Any]
    batches_per_second: float
    spread: float | None
    expected: float | None
    current: bool
    error: Exception | None = None


@dataclass(frozen=True)
class Tuning:
    """What `tune` found. `print` of it is a table.

    Attributes:
        settings: the recommended arguments of `DataLoader`.
        rows: what was tried: the recommended setting, and the others from the fastest to the slowest.
        step_seconds: of the step that was simulated.
        notes: what else there is to know: which settings failed, and how, and what the others change.
        loader: a new loader with the recommended settings and everything else as in the one that was given;
            they share dataset, sampler and generator.
    """

    settings: dict[str, Any]
    rows: tuple[TuningRow, ...]
    step_seconds: float
    notes: tuple[str, ...]
    loader: DataLoader[Any] = field(repr=False, compare=False)

    def __str__(self) -> str:
        lines = [_HEADER, *(_cells(row, number == 0) for number, row in enumerate(self.rows))]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.rjust, cells, widths)).rstrip() for cells in lines]
        recommended = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        step = f"with a step of {self.step_seconds * 1000:.3g} ms" if self.step_seconds else "without a step"
        head = f"Recommended: {recommended}{self._gain()}, {step}."
        return "\n".join([head, "", *table, *([""] if self.notes else []), *self.notes])

    def _gain(self) -> str:
        own = next((row.batches_per_second for row in self.rows if row.current), 0.0)
        if not own or self.rows[0].current:
            return " (as it is)" if own else ""
        return f" ({self.rows[0].batches_per_second / own:.2g} times the current setting)"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


_HEADER = ("", "num_workers", "prefetch_factor", "schedule", "start", "batches/s", "", "expected")


def _cells(row: TuningRow, recommended: bool) -> tuple[str, ...]:
    settings = row.settings
    mark = " ".join(["→"] * recommended + ["now"] * row.current)
    names = "prefetch_factor", "schedule", "multiprocessing_context"
    how = [str(settings[name]) if settings.get(name) is not None else "-" for name in names]
    return (
        mark,
        str(settings["num_workers"]),
        *how,
        _number(row.batches_per_second) if row.batches_per_second else "failed" if row.error else "-",
        f"± {row.spread:.0%}" if row.spread is not None else "",
        "" if row.expected is None else _number(row.expected),
    )


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
    """Find the fastest setting of a loader on this machine, by trying: workers, prefetch and schedule.

    Each trial iterates a copy of the loader in a process of its own, so that the loader, its dataset, its
    sampler and all generators stay as they are. Batches stay on the host there: what the way to a device
    costs is not measured. Ctrl-C ends it, with what was measured so far.

    Args:
        loader: whose setting it is.
        step_seconds: of the training step between two batches, simulated by sleeping; None: as long as it
            was in the loader's own epochs so far, or 0 before the first.
        seconds: to spend on it, about.
        start_methods: to try: some of "fork", "spawn" and "forkserver"; None is the loader's own.
        schedules: to try, with other random numbers: "round_robin", "dynamic"; None: both, if map-style.
        max_workers: the most to try; None: what this process's cgroup and its `LOCAL_WORLD_SIZE` allow.
        progress: tell on stderr how far it is.

    Raises:
        ValueError, TypeError: an argument.
        RuntimeError: this system has no worker processes, so that there is nothing to choose.
        Exception: what the loader raised with its own setting, if no setting gave a batch.
        KeyboardInterrupt: nothing was measured before it.
    """
    own, limits = checked(loader, step_seconds, seconds, start_methods, schedules, max_workers)
    step = _own_step(loader) if step_seconds is None else float(step_seconds)
    told, interrupted = _Progress(progress, seconds), False

    def measure(candidate: Candidate, duration: float, patience: float) -> Measured:
        told.trying(candidate)
        return trials.measure(loader, candidate, step, duration, patience)

    search = Search(own, limits, measure, time.monotonic, seconds)
    try:
        search.run()
    except KeyboardInterrupt:
        if search.best is None:
            raise
        interrupted = True
    finally:
        told.end()
    return _result(loader, search.ranked(), own, step, interrupted)


def _result(
    loader: DataLoader[Any], ranked: list[Row], own: Candidate, step: float, interrupted: bool
) -> Tuning:
    rows = tuple(
        TuningRow(
            _settings(row.candidate), row.rate, row.spread, row.expected, row.candidate == own, row.error
        )
        for row in ranked
    )
    failed = [row for row in rows if row.error is not None]
    notes = [f"num_workers={row.settings['num_workers']} failed: {row.error!r:.200}" for row in failed]
    if any(row.candidate.setting.dynamic != own.setting.dynamic for row in ranked):
        notes.append(_OTHER_RANDOM_NUMBERS)
    if interrupted:
        notes.append("It was interrupted: this is what was measured so far.")
    return Tuning(rows[0].settings, rows, step, tuple(notes), trials.like(loader, ranked[0].candidate))


def _settings(candidate: Candidate) -> dict[str, Any]:
    """The arguments of `DataLoader` that make a candidate."""
    setting = candidate.setting
    if not setting.num_workers:
        return {"num_workers": 0}
    settings: dict[str, Any] = {
        "num_workers": setting.num_workers,
        "prefetch_factor": setting.prefetch_factor,
        "schedule": "dynamic" if setting.dynamic else "round_robin",
    }
    if candidate.start_method is not None:
        settings["multiprocessing_context"] = candidate.start_method
    return settings


def _own_step(loader: DataLoader[Any]) -> float:
    total = loader.statistics().total
    return total.consumer_seconds / total.batches if total.batches else 0.0


# ---- what may be tried ---------------------------------------------------------------------------


def checked(
    loader: Any,
    step_seconds: Any,
    seconds: Any,
    start_methods: Sequence[str] | None,
    schedules: Sequence[str] | None,
    max_workers: Any,
) -> tuple[Candidate, Limits]:
    """The loader's own setting, and what may be tried; for arguments and errors see `tune`."""
    if not hasattr(type(loader), "_resources"):
        kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
        raise TypeError(
            f"loader is a {kind}: tune needs a fastq_loader.DataLoader, not a class or a function"
        )
    if not arena.AVAILABLE:
        raise RuntimeError("this system has no memfd_create, so that num_workers=0 is the only setting")
    _check_number("seconds", seconds, least=1.0)
    if step_seconds is not None:
        _check_number("step_seconds", step_seconds, least=0.0)
    if max_workers is not None and (not is_int(max_workers) or max_workers < 0):
        raise ValueError(f"max_workers={max_workers!r} must be a number of workers, 0 or more, or None")
    methods = _names("start_methods", start_methods, multiprocessing.get_all_start_methods())
    dynamic = arguments.is_dynamic(loader)
    known = ["dynamic" if dynamic else "round_robin"] if arguments.is_iterable(loader) else list(_SCHEDULES)
    tried = _names("schedules", schedules, known) or known
    method = None if methods is None else trials.start_method(loader)
    own = Candidate(Setting(int(loader.num_workers), loader.prefetch_factor or 2, dynamic), method)
    limits = Limits(
        cpus=machine.cpus(),
        memory_bytes=machine.memory_bytes() * _MEMORY_SHARE / machine.ranks(),
        most_workers=max_workers,
        schedules=tuple(_SCHEDULES[name] for name in tried),
        start_methods=tuple(methods) if methods else (None,),
    )
    return own, limits


def _check_number(name: str, value: Any, least: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a number of seconds")
    if not least <= value < math.inf:
        raise ValueError(f"{name}={value!r} must be {least:g} seconds or more")


def _names(argument: str, names: Any, known: Sequence[str]) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str):
        raise TypeError(f"{argument}={names!r} must be a collection of names: {argument}=({names!r},)")
    chosen = list(dict.fromkeys(names))
    if not chosen or set(chosen) - set(known):
        raise ValueError(f"{argument}={names!r} is not possible here: use some of {', '.join(known)}")
    return chosen


class _Progress:
    """Tells on stderr what is tried: on one line of a terminal, else on a line for each tenth of the time.

    Args:
        wanted: whether it tells anything.
        seconds: of the whole.
    """

    def __init__(self, wanted: bool, seconds: float) -> None:
        self._stream = sys.stderr if wanted else None
        self._seconds = seconds
        self._began = time.monotonic()
        self._told = -1

    def trying(self, candidate: Candidate) -> None:
        """A trial begins."""
        passed, setting = time.monotonic() - self._began, candidate.setting
        text = f"tune: {min(passed, self._seconds):.0f} of {self._seconds:.0f} s"
        text += f": {setting.num_workers} workers"
        if setting.num_workers:
            schedule = "dynamic" if setting.dynamic else "round_robin"
            text += f", prefetch_factor={setting.prefetch_factor}, {schedule}"
        tenth = int(10 * passed / self._seconds)
        self._write(text, f"{text}\n" if tenth > self._told else "")
        self._told = tenth

    def end(self) -> None:
        """The line of a terminal goes away."""
        self._write("", "")

    def _write(self, line: str, elsewhere: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # it was closed: a measurement does not fail for it
            if self._stream is not None:
                self._stream.write(f"\r{line}\x1b[K" if self._stream.isatty() else elsewhere)
                self._stream.flush()
