"""What was wanted, and whether it came about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench.output import figures
from bench.output.figures import (
    BASELINE,
    Spread,
    between_parts,
    compared,
    figure,
    ratio,
    series,
    share_of_peak,
    spread,
)
from bench.output.rows import CaseRows, Results
from bench.peers.device import REGISTER, TORCH
from bench.timing.cluster import ACTORS, BARE, LOCAL, LOOPBACK, REMOTE, TURN
from bench.timing.cluster import AXIS as CLUSTER
from bench.timing.cluster import JUDGED as WORK
from bench.timing.device import AXIS, COPY, DRAIN, READY
from bench.timing.resume import AXIS as RESUME
from bench.timing.resume import FRESH, PERMUTED, RESUMED, SHUFFLE, STATE, STEPS, WITH, WITHOUT
from bench.timing.schedule import BOUND
from bench.timing.tuning import AUTO, TUNED
from bench.timing.tuning import AXIS as INSIGHT
from bench.workloads.ready_made import LARGE


class Goal(NamedTuple):
    """What was wanted, at most or at least, and what came; `beside`: what torch's is, where that is not what
    the figure is compared to."""

    measure: str
    wanted: float
    figure: Spread | None
    unit: str = " x"
    at_most: bool = True
    beside: Spread | None = None

    @property
    def verdict(self) -> str:
        """Whether it came about, in words; rounds that disagree do not decide it."""
        if self.figure is None:
            return "not measured"
        met, *ends = ((each <= self.wanted) == self.at_most or each == self.wanted for each in self.figure)
        return f"{'met' if met else 'missed'}{'' if {*ends} == {met} else ', within noise'}"


def goals(results: Results) -> list[Goal]:
    found = [_schedule(case) for case in results.cases("schedule")]
    found += [goal for case in results.cases(RESUME) for goal in _resume(case)]
    found += [goal for case in results.cases(INSIGHT) for goal in _insight(case)]
    found += [goal for case in results.cases(CLUSTER) for goal in _cluster(case)]
    return found + [goal for shape in results.cases(AXIS) for goal in _device(shape)]


def times_of(case: CaseRows, contender: str, base: str) -> Spread | None:
    """An epoch in multiples of the bound, or of another contender's in the same round (above 1: slower)."""
    if base != BOUND:
        return compared(case, contender, base, "seconds")
    bound = case.facts["bound"]
    return None if bound is None else figure(case, contender, "seconds", scale=1 / bound)


def name_of(case: CaseRows, base: str) -> str:
    """What a time is in multiples of."""
    if base == BOUND:
        return str(case.facts["bounded_by"])
    return case.peers[base].label if base in case.peers else base


def _schedule(case: CaseRows) -> Goal:
    of, wanted, base = (case.facts["goal"][name] for name in ("of", "times", "base"))
    measure = f"{case.name}: an epoch of {name_of(case, of)} / {name_of(case, base)}"
    return Goal(measure, wanted, times_of(case, of, base))


def seconds_beyond_fresh(case: CaseRows, peer: str) -> Spread | None:
    """How much longer the first batch takes after a resume than in a fresh loader of the same round."""
    resumed, fresh = (series(case, peer, "seconds", part) for part in (RESUMED, FRESH))
    return None if resumed is None or fresh is None else spread(resumed - fresh)


def _resume(case: CaseRows) -> Iterator[Goal]:
    """Those of our loaders; the torchdata ones are in the table of the case."""
    if case.name == STEPS:
        slower = between_parts(case, figures.OURS, "rate", WITH, WITHOUT)
        yield Goal("batches per second with state_dict() after each / without", 0.98, slower, at_most=False)
    for name in case.peers:
        label = case.peers[name].label
        if case.name == STATE and name.startswith(figures.OURS):
            call, held = (figure(case, name, each, STATE) for each in ("call", "bytes"))
            yield Goal(f"state_dict(): {label}", 50, call and call.scaled(1e6), unit=" µs")
            yield Goal(f"state: {label}", 10, held and held.scaled(1e-3), unit=" kB")
        elif name == PERMUTED:
            yield Goal(f"resume, beyond a fresh start: {label}", 1, seconds_beyond_fresh(case, name), " s")
        elif case.name != STEPS and name == figures.OURS:
            times = between_parts(case, name, "seconds", RESUMED, SHUFFLE)
            yield Goal(f"resume / torch.randperm: {label}", 2, times)


def best_of(case: CaseRows, fixed: bool = False) -> str:
    """The fastest of the settings that took turns with what was chosen; "" where there is none.

    Args:
        fixed: of those only that `num_workers="auto"` could come to.
    """
    rates = {
        name: rate.median
        for name, peer in case.peers.items()
        if "fixed" in peer.about and (peer.about["fixed"] or not fixed)
        if (rate := figure(case, name, "rate"))
    }
    return max(rates, key=lambda name: rates[name], default="")


def _insight(case: CaseRows) -> Iterator[Goal]:
    for name, wanted, what, base in (
        (TUNED, 0.9, "what tune() chose / the best setting", best_of(case)),
        (AUTO, 0.85, 'num_workers="auto" / the best number', best_of(case, fixed=True)),
    ):
        measure = f"{case.name}: batches per second of {what}"
        yield Goal(measure, wanted, compared(case, name, base), at_most=False)


def _cluster(case: CaseRows) -> Iterator[Goal]:
    for name, base, wanted in (
        (LOOPBACK, ACTORS, 4),
        (LOOPBACK, BARE, 0.6),
        (WORK, LOCAL, 0.9),
        (WORK, ACTORS, 2),
    ):
        if case.name == name:
            measure = f"{name}: batches per second of RayWorkers / {name_of(case, base)}"
            yield Goal(measure, wanted, compared(case, REMOTE, base), at_most=False)
    if case.name == TURN:
        longer = compared(case, REMOTE, LOCAL, "seconds")
        yield Goal("turn between epochs, RayWorkers / workers here", 3, longer)


def _device(shape: CaseRows) -> list[Goal]:
    """Those of the arm whose pages are registered."""
    name = shape.name
    found = []
    if name == LARGE:
        for part, what in ((COPY, "the copies alone"), (DRAIN, "a full drain")):
            own, torch = (share_of_peak(shape, arm, part) for arm in (REGISTER, TORCH))
            measure = f"{name}: GB/s of {what} / peak of a pinned copy"
            found.append(Goal(measure, 0.95, own, unit="", at_most=False, beside=torch))
        cheaper = compared(shape, TORCH, REGISTER, "consumer_cpu", DRAIN)
        measure = f"{name}: consumer's CPU seconds per GB of a full drain, torch / ours"
        found.append(Goal(measure, 3.0, cheaper, at_most=False))
    else:
        shorter = ratio(*(series(shape, arm, "p50", READY) for arm in (TORCH, REGISTER)))
        measure = f"{name}: time of next() when the batch is ready, torch / ours"
        found.append(Goal(measure, 5.0, shorter, at_most=False))
    for length in filter(lambda length: figures.supplied(shape, length), figures.lengths(shape)):
        own, torch = (figures.stall_points(shape, arm, length) for arm in (REGISTER, BASELINE))
        measure = f"{name}: stall beyond the resident arm, steps of {length} x the unit"
        found.append(Goal(measure, 2.0, own, unit=" points", beside=torch))
    return found
