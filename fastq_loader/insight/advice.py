"""What would help, and how much: lines of advice, each with the gain that the model expects.

Pure. A line is left out where the model expects less than 5 %, or where what it proposes has no effect with
the loader's other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from fastq_loader.insight.evidence import Evidence
from fastq_loader.insight.model import Costs, Setting, seconds_per_batch

#: Less than this is within the error of the model.
_LEAST_GAIN = 1.05
#: Lines of advice that are given.
_LINES = 4
#: A setting is as good as another one if it is slower by no more than this.
_SAME = 1.02
#: Workers for each CPU, where they mostly wait for a disk or a network, and in all.
_WORKERS_PER_CPU, _MOST_WORKERS = 4, 64
#: Seconds that a batch of plain tensors takes the consumer.
_PLAIN = 100e-6


def advice(evidence: Evidence, limits: Sequence[str]) -> tuple[str, ...]:
    """What would help, the best first.

    Args:
        evidence: what is known of the run.
        limits: what time was lost to, the worst first.
    """
    if evidence.costs is None:
        return ()
    case = _Case(evidence, evidence.costs)
    for rules in (_RULES, _OTHERWISE):
        chosen = dict.fromkeys(rule for limit in limits for rule in rules.get(limit, ()))
        found = [advised for rule in chosen for advised in rule(case) if advised.gain >= _LEAST_GAIN]
        if found:
            found.sort(key=lambda advised: -advised.gain)
            return tuple(line for _, line in found[:_LINES])
    return ()


def duration(seconds: float) -> str:
    """A time in two or three digits: "31 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 100 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


class _Advised(NamedTuple):
    """A line of advice, and how many times as fast it makes the run."""

    gain: float
    line: str


class _Case:
    """One run, and what the model says about others like it."""

    def __init__(self, evidence: Evidence, costs: Costs) -> None:
        self.evidence = evidence
        self.costs = costs
        self.setting = evidence.setting
        self.now = self.seconds()

    def seconds(self, costs: Costs | None = None, setting: Setting | None = None) -> float:
        """A batch with other costs, or another setting."""
        seconds = seconds_per_batch(costs or self.costs, setting or self.setting, self.evidence.cpus)
        return max(seconds, 1e-9)

    def gain(self, costs: Costs | None = None, setting: Setting | None = None) -> float:
        """How many times as fast it would be."""
        return self.now / self.seconds(costs, setting)

    def setting_seconds(self, workers: int) -> float:
        """A batch with so many workers."""
        return self.seconds(setting=self.workers(workers))

    def workers(self, number: int) -> Setting:
        """The setting with so many."""
        return replace(self.setting, num_workers=number)

    def best_workers(self) -> int:
        """The least number of workers that is as good as the best one."""
        per_cpu = min(_WORKERS_PER_CPU, 1 / max(self.costs.load_cpu, 1e-9))
        most = max(self.setting.num_workers, min(_MOST_WORKERS, ceil(self.evidence.cpus * per_cpu)))
        seconds = {number: self.setting_seconds(number) for number in range(1, most + 1)}
        best = min(seconds.values())
        return next(number for number, took in seconds.items() if took <= _LEAST_GAIN * best)


def _of_loads(costs: Costs, part: float) -> Costs:
    """With loads that take a part of what they take."""
    return replace(costs, loads=tuple(load * part for load in costs.loads))


def _times(gain: float) -> str:
    return f"about {gain:.2g} ×" if gain < 10 else f"about {gain:.0f} ×"


# ---- rules ----------------------------------------------------------------------------------------


def _other_workers(case: _Case) -> Iterator[_Advised]:
    now, best = case.setting.num_workers, case.best_workers()
    gain, costs, seconds = case.gain(setting=case.workers(best)), case.costs, case.setting_seconds(best)
    until = ""
    if seconds <= _LEAST_GAIN * (costs.step + costs.overhead + costs.draw + costs.device):
        until = ", until the consumer limits"
    elif seconds <= _LEAST_GAIN * costs.cpu / case.evidence.cpus:
        until = ", until the CPUs limit"
    free = int(case.evidence.cpus - costs.cpu / case.now + 0.1)
    cores = f"; {free} core{'s are' if free > 1 else ' is'} free" if free > 0 else ""
    split = "" if now or not case.evidence.iterable else ", if the dataset is split among workers"
    yield _Advised(gain, f"num_workers {now} → {best}{split}: {_times(gain)}{until}{cores}")


def _no_workers(case: _Case) -> Iterator[_Advised]:
    """Against what was measured: what the model takes for a way over processes without waits is less."""
    epoch = case.evidence.epoch
    measured = (epoch.seconds - epoch.start_up_seconds) / max(1, epoch.batches)
    gain = max(measured, case.now) / case.setting_seconds(0)
    if case.setting.num_workers:
        took = duration(case.costs.load)
        yield _Advised(gain, f"a batch takes {took} to load: num_workers=0 is {_times(gain)} as fast")


def _no_start(case: _Case) -> Iterator[_Advised]:
    """Not where a later epoch starts none, nor where `iter(dataset)` may be what takes the time: without
    workers that would be called, too."""
    epoch = case.evidence.epoch
    if case.evidence.persistent or case.evidence.iterable:
        return
    gain = epoch.seconds / (max(1, epoch.batches) * case.setting_seconds(0))
    if case.setting.num_workers:
        yield _Advised(gain, f"epochs as short as this: num_workers=0 is {_times(gain)} as fast")


def _workers_stay(case: _Case) -> Iterator[_Advised]:
    evidence = case.evidence
    gain = evidence.epoch.seconds / max(evidence.epoch.seconds - evidence.epoch.start_up_seconds, 1e-9)
    if evidence.setting.num_workers and not evidence.persistent:
        times = f"{_times(gain)} from the second epoch on"
        if evidence.iterable:
            times = f"up to {times}, as far as it is not iter(dataset) that takes the time"
        yield _Advised(gain, f"persistent_workers=True: {times}")


def _fewer_workers(case: _Case) -> Iterator[_Advised]:
    for number in range(case.setting.num_workers):
        if case.setting_seconds(number) <= _SAME * case.now:
            enough = {0: "num_workers=0", 1: "one worker"}.get(number, f"{number} workers")
            took = f"a step takes {duration(case.costs.step)}, a batch {duration(case.costs.load)}"
            yield _Advised(_LEAST_GAIN, f"{took}: {enough} would do, at the same speed")
            return


def _other_schedule(case: _Case) -> Iterator[_Advised]:
    evidence, setting = case.evidence, case.setting
    if not setting.num_workers:
        return
    gain, lost = case.gain(setting=replace(setting, dynamic=True)), evidence.shares["head_of_line"]
    if evidence.iterable:
        yield _Advised(gain, f"in_order=False, where the order does not matter: up to {_times(gain)}")
    else:
        share = f" removes the {lost:.0%} lost at the head of the line" if lost >= 0.01 else ""
        yield _Advised(gain, f"schedule='dynamic'{share}: {_times(gain)}")


def _further_ahead(case: _Case) -> Iterator[_Advised]:
    setting = case.setting
    if not setting.num_workers or setting.dynamic:
        return
    ahead = setting.prefetch_factor
    gain = case.gain(setting=replace(setting, prefetch_factor=4 * ahead))
    yield _Advised(gain, f"prefetch_factor {ahead} → {4 * ahead}, for as much more memory: {_times(gain)}")


def _wider_window(case: _Case) -> Iterator[_Advised]:
    setting, evidence = case.setting, case.evidence
    if setting.num_workers and setting.fixed_window is not None:
        gain = case.gain(setting=replace(setting, fixed_window=None))
        name = "Dynamic" if setting.dynamic and evidence.in_order else "RoundRobin"
        yield _Advised(gain, f"schedule={name}() without window={setting.fixed_window}: {_times(gain)}")


def _no_new_memory(case: _Case) -> Iterator[_Advised]:
    new = case.evidence.new_memory
    gain = case.gain(replace(_of_loads(case.costs, 1 - new), pack=case.costs.pack * (1 - new)))
    yield _Advised(
        gain,
        f"new memory takes {new:.0%} of the workers' time, because batches are kept or grow: without that, "
        f"{_times(gain)}",
    )


def _own_memory(case: _Case) -> Iterator[_Advised]:
    gain, name = case.gain(replace(case.costs, pack=0.0)), case.evidence.collate
    if name and case.setting.num_workers and case.costs.pack > _PLAIN:
        yield _Advised(
            gain,
            f"{name} makes tensors in memory of fastq_loader.empty(...), which is neither copied nor "
            f"pickled: up to {_times(gain)}",
        )


def _plain_tensors(case: _Case) -> Iterator[_Advised]:
    gain = case.gain(replace(case.costs, overhead=_PLAIN))
    if case.setting.num_workers and case.costs.overhead > 5 * _PLAIN:
        yield _Advised(gain, f"fewer tensors, and no objects that are pickled: up to {_times(gain)}")


def _larger_batches(case: _Case) -> Iterator[_Advised]:
    twice = replace(case.costs.times(2), overhead=case.costs.overhead)
    gain = 2 * case.gain(twice)
    if case.setting.num_workers and case.costs.overhead <= 5 * _PLAIN:
        yield _Advised(gain, f"batches twice as large: up to {_times(gain)} as many samples a second")


def _other_sampler(case: _Case) -> Iterator[_Advised]:
    evidence, gain = case.evidence, case.gain(replace(case.costs, draw=0.0))
    if evidence.iterable:
        return
    instead = "" if evidence.shuffles else "shuffle=True, or "
    took = f"{evidence.sampler} takes {duration(case.costs.draw)} a batch"
    yield _Advised(
        gain, f"{took}; {instead}fastq_loader.PermutationSampler, in its place: up to {_times(gain)}"
    )


def _page_locked(case: _Case) -> Iterator[_Advised]:
    staging, gain = case.evidence.staging, case.gain(replace(case.costs, device=0.0))
    if staging is not None and staging.pin == "pageable":
        yield _Advised(
            gain, f"host memory is not page-locked ({staging.pin_reason}): with it, up to {_times(gain)}"
        )


def _beside_the_step(case: _Case) -> Iterator[_Advised]:
    gain = case.gain(replace(case.costs, device=0.0))
    if case.evidence.pins and not case.evidence.transform:
        yield _Advised(gain, f"device=... instead of pin_memory=True, beside the step: up to {_times(gain)}")


def _transform_in_workers(case: _Case) -> Iterator[_Advised]:
    costs, name = case.costs, case.evidence.transform
    moved = replace(costs, device=0.0, loads=tuple(load + costs.device for load in costs.loads))
    gain = case.gain(moved)
    if name and case.evidence.staging is None:
        yield _Advised(gain, f"{name} in the workers, as part of collate_fn: {_times(gain)}")


def _even_batches(case: _Case) -> Iterator[_Advised]:
    loads = sorted(case.costs.loads)
    most = 2 * loads[len(loads) // 2]
    gain = case.gain(replace(case.costs, loads=tuple(min(load, most) for load in case.costs.loads)))
    yield _Advised(gain, f"no batch that takes longer than {duration(most)} to load: {_times(gain)}")


def _cheaper_samples(case: _Case) -> Iterator[_Advised]:
    gain, took = case.gain(_of_loads(case.costs, 0.5)), duration(case.costs.load)
    yield _Advised(gain, f"a batch takes {took} to load: in half of that, {_times(gain)}")


_Rule = Callable[[_Case], Iterator[_Advised]]
_RULES: dict[str, tuple[_Rule, ...]] = {
    "workers": (_other_workers, _other_schedule, _no_workers),
    "head_of_line": (_other_schedule, _further_ahead, _wider_window),
    "consumer": (_fewer_workers, _other_workers),
    "transport": (_no_workers, _own_memory, _plain_tensors, _larger_batches),
    "memory": (_wider_window, _further_ahead, _no_new_memory),
    "sampler": (_other_sampler,),
    "device_copy": (_page_locked, _beside_the_step, _transform_in_workers),
    "start_up": (_workers_stay, _no_start),
    "balanced": (_no_workers, _other_workers),
}
#: Where no argument would help: what the user's own code could do.
_OTHERWISE: dict[str, tuple[_Rule, ...]] = {"workers": (_cheaper_samples,), "head_of_line": (_even_batches,)}
