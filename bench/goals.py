"""What was wanted of a case of the schedule, and whether it came about. Pure: drawn from results alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.results import BOUND, Epoch, KillsResult, ScheduleResult, Spread, spread, time_ratio


def _seconds(epochs: Sequence[Epoch]) -> list[float]:
    return [epoch.seconds for epoch in epochs]


def times_of(result: ScheduleResult, contender: str, base: str) -> Spread | None:
    """An epoch in multiples of the bound, or of another contender's in the same round (above 1: slower).

    None when one of the two has no figures.
    """
    own = _seconds(result.contenders[contender].epochs) if contender in result.contenders else []
    if base == BOUND:
        against = [] if result.bound is None else [result.bound] * len(own)
    else:
        against = _seconds(result.contenders[base].epochs) if base in result.contenders else []
    return time_ratio(own, against) if own and against else None


def seconds_per_kill(result: KillsResult) -> Spread:
    """What a killed worker costs an epoch: the median round, the cheapest and the dearest."""
    rounds = zip(result.killed, result.undisturbed, result.kills, strict=True)
    return spread([(killed - undisturbed) / max(kills, 1) for killed, undisturbed, kills in rounds])


def kill_bound(result: KillsResult) -> float:
    """Seconds that a killed worker may cost: a worker's start and the batch that was lost."""
    return statistics.median(result.start) + result.batch_seconds


def verdict(figure: Spread, most: float) -> str:
    """Whether a figure is at most that, in words; rounds that disagree do not decide it."""
    if figure.low <= most < figure.high:
        return "met, within noise" if figure.median <= most else "missed, within noise"
    return "met" if figure.high <= most else "missed"


def base_name(result: ScheduleResult, base: str) -> str:
    """What a time is in multiples of."""
    if base == BOUND:
        return result.bounded_by
    return result.contenders[base].label if base in result.contenders else base


def goal(result: ScheduleResult) -> str:
    """What was wanted of a case."""
    wanted = result.goal
    return f"at most {wanted.times:g} x {base_name(result, wanted.base)}"


def goal_reached(result: ScheduleResult) -> str:
    """Whether it came about, in words."""
    figure = times_of(result, result.goal.of, result.goal.base)
    return "not measured" if figure is None else verdict(figure, result.goal.times)
