"""Advice: improvements with their expected gain.

Pure. Each line of advice states the gain that the model expects. It is left out if the gain is below 5 %, or
if the loader's other arguments make the proposal ineffective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from fastq_loader.extras.insight.chooser import Limits, rank
from fastq_loader.extras.insight.model import Costs, LoaderFacts, RunProfile, Setting

#: Smaller gains are within the error of the model.
_LEAST_GAIN = 1.05
#: Maximum number of lines of advice.
_LINES = 4
#: Seconds of the consumer for a batch of plain tensors.
_PLAIN = 100e-6

#: Seconds of a cache hit, and of each byte (`bench/caching.py`: 37 us for 150 kB); and the part of the free
#: memory that the cache may fill.
_HIT, _HIT_BYTE, _CACHE = 25e-6, 0.1e-9, 0.5
#: Minimum gain that justifies the memory of a cache.
_LEAST_CACHED = 1.5
#: Seconds of an epoch in which starting workers anew, which takes some tenths of a second, would show.
_SHORT = 10.0
#: Minimum share of an epoch in which batches are copied to page-locked memory.
_LEAST_PINNING = 0.05


def advice(run: RunProfile, limits: Sequence[str]) -> tuple[str, ...]:
    """Advice, the best first.

    Args:
        run: facts of the run.
        limits: causes of lost time, the worst first.
    """
    if run.costs is None:
        return ()
    case = _Case(run, run.costs)
    for rules in (_RULES, _OTHERWISE):
        if chosen := _applicable(rules, limits, run.loader):
            chosen[_pinning] = None
        found = [advised for rule in chosen for advised in rule(case) if advised[0] >= _LEAST_GAIN]
        if found:
            found.sort(key=lambda advised: -advised[0])
            return tuple(line for _, line in found[:_LINES])
    return ()


def _applicable(
    rules: dict[str, tuple[_Rule, ...]], limits: Sequence[str], loader: LoaderFacts
) -> dict[_Rule, None]:
    chosen = dict.fromkeys(rule for limit in limits for rule in rules.get(limit, ()))
    if loader.chooses_workers:  # it tries these numbers itself, and knows better than the model
        chosen = {rule: None for rule in chosen if rule not in _NUMBERS}
    return chosen


def duration(seconds: float) -> str:
    """A time with two or three digits: "31 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 100 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2g} GB" if nbytes >= 1e9 else f"{math.ceil(nbytes / 1e6)} MB"


#: The factor by which the run becomes faster, and the line of advice.
_Advised = tuple[float, str]


class _Case:
    """One run, and the model's estimates of similar runs."""

    def __init__(self, run: RunProfile, costs: Costs) -> None:
        self.run = run
        self.costs = costs
        self.setting = run.setting
        self.limits = Limits(run.setting, run.cpus, machine_bytes=run.machine_bytes)
        self.now = self.seconds()

    def seconds(self, **others: Any) -> float:
        """Seconds of a batch, with some fields of the costs or of the setting replaced."""
        chosen = {name: others.pop(name) for name in list(others) if hasattr(self.setting, name)}
        costs, setting = replace(self.costs, **others), replace(self.setting, **chosen)
        return self.limits.seconds(costs, setting)

    def gain(self, **others: Any) -> float:
        """Factor by which the run would be faster."""
        return self.now / self.seconds(**others)

    def loads(self, part: float) -> tuple[float, ...]:
        """The loads, each multiplied by `part`."""
        return tuple(load * part for load in self.costs.loads)

    @cached_property
    def ranked(self) -> list[Setting]:
        """The same setting with other numbers of workers, the best first."""
        return list(rank(self.costs, {}, self.limits))


def _times(gain: float) -> str:
    return f"about {gain:.2g} ×" if gain < 10 else f"about {gain:.0f} ×"


# ---- rules ----------------------------------------------------------------------------------------


def _other_workers(case: _Case) -> Iterator[_Advised]:
    now, costs = case.setting.num_workers, case.costs
    best = next(each.num_workers for each in case.ranked if each.num_workers)
    gain, seconds, until = case.gain(num_workers=best), case.seconds(num_workers=best), ""
    if seconds <= _LEAST_GAIN * (costs.step + costs.overhead + costs.draw + costs.device):
        until = ", until the consumer limits"
    elif seconds <= _LEAST_GAIN * costs.cpu / case.run.cpus:
        until = ", until the CPUs limit"
    free = int(case.run.cpus - costs.cpu / case.now + 0.1)
    cores = f"; {free} core{'s are' if free > 1 else ' is'} free" if free > 0 else ""
    stay = " and persistent_workers=True" if not now and case.run.epoch.seconds < _SHORT else ""
    split = "" if now or not case.run.loader.iterable else ", if the dataset is split among workers"
    yield gain, f"num_workers {now} → {best}{stay}{split}: {_times(gain)}{until}{cores}"


def _no_workers(case: _Case) -> Iterator[_Advised]:
    """Compared with the measured time: the model's is too low, as it assumes that transport never waits."""
    epoch = case.run.epoch
    measured = (epoch.seconds - epoch.start_up_seconds) / max(1, epoch.batches)
    gain = max(measured, case.now) / case.seconds(num_workers=0)
    took = duration(case.costs.load)
    if case.setting.num_workers:
        yield gain, f"a batch takes {took} to load: num_workers=0 is {_times(gain)} as fast"


def _no_start(case: _Case) -> Iterator[_Advised]:
    """Not if later epochs start no workers, nor if `iter(dataset)` may take the time: it would be called
    without workers, too."""
    epoch = case.run.epoch
    if case.setting.num_workers and not (case.run.loader.persistent or case.run.loader.iterable):
        gain = epoch.seconds / (max(1, epoch.batches) * case.seconds(num_workers=0))
        yield gain, f"epochs as short as this: num_workers=0 is {_times(gain)} as fast"


def _workers_stay(case: _Case) -> Iterator[_Advised]:
    epoch = case.run.epoch
    gain = epoch.seconds / max(epoch.seconds - epoch.start_up_seconds, 1e-9)
    if case.setting.num_workers and not case.run.loader.persistent:
        times = f"{_times(gain)} from the second epoch on"
        if case.run.loader.iterable:
            times = f"up to {times}, unless iter(dataset) takes the time"
        yield gain, f"persistent_workers=True: {times}"


def _fewer_workers(case: _Case) -> Iterator[_Advised]:
    number = case.ranked[0].num_workers
    if number < case.setting.num_workers:
        enough = {0: "num_workers=0", 1: "one worker"}.get(number, f"{number} workers")
        took = f"a step takes {duration(case.costs.step)}, a batch {duration(case.costs.load)}"
        yield _LEAST_GAIN, f"{took}: {enough} would do, at the same speed"


def _other_schedule(case: _Case) -> Iterator[_Advised]:
    gain, lost = case.gain(dynamic=True), case.run.shares["head_of_line"]
    if case.run.loader.iterable:
        yield gain, f"in_order=False, where the order does not matter: up to {_times(gain)}"
    else:
        share = f" removes the {lost:.0%} lost at the head of the line" if lost >= 0.01 else ""
        yield gain, f"schedule='dynamic'{share}: {_times(gain)}"


def _further_ahead(case: _Case) -> Iterator[_Advised]:
    ahead = case.setting.prefetch_factor
    gain = case.gain(prefetch_factor=4 * ahead)
    if not case.setting.dynamic:
        yield gain, f"prefetch_factor {ahead} → {4 * ahead}, for as much more memory: {_times(gain)}"


def _wider_window(case: _Case) -> Iterator[_Advised]:
    if case.setting.fixed_window is not None:
        gain = case.gain(fixed_window=None)
        name = "Dynamic" if case.setting.dynamic and case.run.loader.in_order else "RoundRobin"
        yield gain, f"schedule={name}() without window={case.setting.fixed_window}: {_times(gain)}"


def _no_new_memory(case: _Case) -> Iterator[_Advised]:
    new = case.run.new_memory
    gain = case.gain(loads=case.loads(1 - new), pack=case.costs.pack * (1 - new))
    why = "because batches are kept or grow: without that"
    yield gain, f"new memory takes {new:.0%} of the workers' time, {why}, {_times(gain)}"


def _own_memory(case: _Case) -> Iterator[_Advised]:
    gain, name = case.gain(pack=0.0), case.run.loader.collate
    if name and case.costs.pack > _PLAIN:
        how = "of fastq_loader.empty(...), which is neither copied nor pickled"
        yield gain, f"{name} makes tensors in memory {how}: up to {_times(gain)}"


def _simpler_or_larger_batches(case: _Case) -> Iterator[_Advised]:
    costs = case.costs
    if costs.overhead > 5 * _PLAIN:
        gain = case.gain(overhead=_PLAIN)
        yield gain, f"fewer tensors, and no objects that are pickled: up to {_times(gain)}"
    else:
        names = "pack", "device", "draw", "step", "step_cpu"
        twice = {name: 2 * getattr(costs, name) for name in names}
        gain = 2 * case.gain(loads=case.loads(2), **twice)
        yield gain, f"batches twice as large: up to {_times(gain)} as many samples a second"


def _other_sampler(case: _Case) -> Iterator[_Advised]:
    gain, took = (
        case.gain(draw=0.0),
        f"{case.run.loader.sampler} takes {duration(case.costs.draw)} a batch",
    )
    instead = "" if case.run.loader.shuffles else "shuffle=True, or "
    if not case.run.loader.iterable:
        yield gain, f"{took}; {instead}fastq_loader.PermutationSampler, in its place: up to {_times(gain)}"


def _pinning(case: _Case) -> Iterator[_Advised]:
    """With a device the consumer only begins the copy of a batch, from the workers' own memory."""
    took, share, loader = case.costs.device, case.run.shares["device_copy"], case.run.loader
    pins = loader.pins and case.run.staging is None and not loader.transform  # and does nothing else
    if pins and share > _LEAST_PINNING:
        gain = case.gain(device=min(took, _PLAIN))
        copies = f"copying a batch to page-locked memory takes {duration(took)}, {share:.0%} of the time"
        yield gain, f"{copies}: device='cuda' instead of pin_memory=True: up to {_times(gain)}"


def _on_the_way_to_the_device(case: _Case) -> Iterator[_Advised]:
    run, staging, gain = case.run, case.run.staging, case.gain(device=0.0)
    if staging is not None and staging.pin == "pageable":
        yield gain, f"host memory is not page-locked ({staging.pin_reason}): with it, up to {_times(gain)}"
    if run.loader.transform and staging is None:
        loads = tuple(load + case.costs.device for load in case.costs.loads)
        gain = case.gain(device=0.0, loads=loads)
        yield gain, f"{run.loader.transform} in the workers, as part of collate_fn: {_times(gain)}"


def _even_batches(case: _Case) -> Iterator[_Advised]:
    most = 2 * sorted(case.costs.loads)[len(case.costs.loads) // 2]
    gain = case.gain(loads=tuple(min(load, most) for load in case.costs.loads))
    yield gain, f"no batch that takes longer than {duration(most)} to load: {_times(gain)}"


def _cheaper_samples(case: _Case) -> Iterator[_Advised]:
    gain = case.gain(loads=case.loads(0.5))
    yield gain, f"a batch takes {duration(case.costs.load)} to load: in half of that, {_times(gain)}"


def _decoded_once(case: _Case) -> Iterator[_Advised]:
    """Based on the sizes of samples in a batch; decoded samples may be larger, before they are cropped."""
    run, costs, size = case.run, case.costs, case.run.loader.batch_size
    samples, nbytes = size * run.epoch.batches, costs.batch_bytes / max(1, size)
    if run.loader.iterable or run.is_cached or run.epoch.epoch is None or not (samples and nbytes):
        return
    held = min(samples, int(run.free_bytes * _CACHE / nbytes))
    fetch = run.fetching * costs.load / size
    saved = run.fetching * held / samples * max(0.0, 1 - (_HIT + nbytes * _HIT_BYTE) / max(fetch, 1e-9))
    gain = case.gain(loads=case.loads(1 - saved))
    if gain >= _LEAST_CACHED:
        read = f"reading samples is {run.fetching:.0%} of loading"
        part_held = "all samples" if held == samples else f"{held / samples:.0%} of the samples"
        room = f"would hold {part_held} in {_size(held * nbytes)}"
        part = "fastq_loader.cached, around the part of it that draws no random numbers"
        yield gain, f"{read}: {part}, {room}: up to {_times(gain)} from the second epoch on"


_Rule = Callable[[_Case], Iterator[_Advised]]
_RULES: dict[str, tuple[_Rule, ...]] = {
    "workers": (_other_workers, _other_schedule, _no_workers, _decoded_once),
    "head_of_line": (_other_schedule, _further_ahead, _wider_window),
    "consumer": (_fewer_workers, _other_workers),
    "transport": (_no_workers, _own_memory, _simpler_or_larger_batches),
    "memory": (_wider_window, _further_ahead, _no_new_memory),
    "sampler": (_other_sampler,),
    "device_copy": (_on_the_way_to_the_device,),
    "start_up": (_workers_stay, _no_start),
    "balanced": (_no_workers, _other_workers, _decoded_once),
}
#: Rules about the number of workers.
_NUMBERS = {_other_workers, _no_workers, _no_start, _fewer_workers}
#: Changes to the user's own code, proposed if no argument would help.
_OTHERWISE: dict[str, tuple[_Rule, ...]] = {"workers": (_cheaper_samples,), "head_of_line": (_even_batches,)}
