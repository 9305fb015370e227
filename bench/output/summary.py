"""Three sentences of each kind of measurement, for somebody who reads nothing else. Made of rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from bench.output.figures import BASELINE, CEILING, INLINE, OURS, Spread, ratio, series
from bench.output.layout import number
from bench.output.rows import CaseRows, Results
from bench.programs import CACHED, report
from bench.timing.against import AGAINST, NEW, OLD
from bench.timing.device import DRAIN, RESIDENT, TORCH
from bench.timing.device import KIND as DEVICE
from bench.timing.starts import KIND as STARTS
from bench.timing.training import KIND as TRAINING
from bench.timing.training import ON_DEVICE, PINNED

Ratios = dict[str, Spread]
Cases = Sequence[CaseRows]


def sentences(results: Results) -> list[str]:
    """Of each kind that was measured, in the order of `KINDS`."""
    found = ((results.cases(kind), say) for kind, say in KINDS.items())
    return [sentence for cases, say in found if cases for sentence in say(cases)]


def _ratios(cases: Cases, peer: str, base: str, measure: str = "rate", part: str = "") -> Ratios:
    """How many times a peer's measure is another's, by the names of the cases where both have it."""
    several = len({case.facts["workers"] for case in cases}) > 1
    found = {}
    for case in cases:
        name = f"{case.name} with {case.facts['workers']}" if several else case.name
        found[name] = ratio(*(series(case, each, measure, part) for each in (peer, base)))
    return {name: value for name, value in found.items() if value is not None}


def _times(ratios: Ratios) -> str:
    """The median of the ratios, with the lowest and the highest."""
    if not ratios:
        return "an unknown number of times"
    ordered = sorted((value.median, name) for name, value in ratios.items())
    middle = number(median(value for value, _ in ordered))
    if len(ordered) == 1:
        return f"{middle} times"
    (low, least), (high, most) = ordered[0], ordered[-1]
    return f"{middle} times (median; {number(low)} in {least}, {number(high)} in {most})"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names)) or "none"


def _faster(ratios: Ratios) -> list[str]:
    """Where the rounds agree that the ratio is above 1."""
    return [name for name, value in ratios.items() if value.low > 1]


def _steady(cases: Cases) -> list[str]:
    others = {peer for case in cases for peer in case.peers} - {BASELINE, OURS, CEILING, *INLINE}
    beaten = [name for peer in sorted(others) for name in _faster(_ratios(cases, peer, OURS))]
    inline = [name for peer in INLINE for name in _faster(_ratios(cases, peer, OURS))]
    return [
        f"fastq_loader gives {_times(_ratios(cases, OURS, BASELINE))} torch's batches per second.",
        f"Another loader with workers is faster in: {_listed(beaten)}.",
        f"Loading without workers is faster than our workers in: {_listed(inline)}.",
    ]


def _programs(cases: Cases) -> list[str]:
    same = all(map(report.agree, cases))
    cached = _ratios(cases, BASELINE, CACHED, "epoch")
    return [
        "All loaders that draw the same crops came to the same losses and predictions, to the bit."
        if same
        else "Loaders did NOT all come to the same losses and predictions: see above.",
        f"A whole program runs {_times(_ratios(cases, BASELINE, OURS, 'seconds'))} as fast as with torch's.",
        f"With cached, epochs from the second on run {_times(cached)} as fast as torch's."
        if cached
        else "No program was run both with cached and with torch's loader.",
    ]


def _starts(cases: Cases) -> list[str]:
    first, epoch, memory = (_ratios(cases, OURS, BASELINE, each) for each in ("first", "epoch", "pss"))
    return [
        f"The first batch takes {_times(first)} as long as torch's.",
        f"An epoch with new workers takes {_times(epoch)} as long as torch's.",
        f"All processes together have {_times(memory)} torch's memory (PSS).",
    ]


def _device(cases: Cases) -> list[str]:
    side_stream = _ratios(cases, "register", "torch_side_stream", part=DRAIN)
    return [
        f"device= gives {_times(_ratios(cases, 'register', TORCH, part=DRAIN))} torch's batches per second.",
        f"It gives {_times(side_stream)} those of torch's loader in a Prefetcher.",
        f"It gives {_times(_ratios(cases, 'register', RESIDENT, part=DRAIN))} those that are there already.",
    ]


def _training(cases: Cases) -> list[str]:
    slower = [name for peer in (PINNED, ON_DEVICE) for name in _faster(_ratios(cases, TORCH, peer))]
    share = _times(_ratios(cases, ON_DEVICE, RESIDENT))
    return [
        f"With device= a training runs {share} as fast as with batches that are there already.",
        f"With pin_memory=True it runs {_times(_ratios(cases, PINNED, TORCH))} as fast as with torch's.",
        f"torch's loader is faster than one of these two in: {_listed(slower)}.",
    ]


def _against(cases: Cases) -> list[str]:
    gained = _ratios(cases, NEW, OLD)
    return [
        f"The new revision gives {_times(gained)} the old one's batches per second.",
        f"It is faster in every round in: {_listed(_faster(gained))}.",
        f"It is slower in every round in: {_listed(_faster(_ratios(cases, OLD, NEW)))}.",
    ]


KINDS: dict[str, Callable[[Cases], list[str]]] = {
    "steady": _steady,
    "program": _programs,
    STARTS: _starts,
    DEVICE: _device,
    TRAINING: _training,
    AGAINST: _against,
}
