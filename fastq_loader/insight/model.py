"""How long a batch would take with other settings: the model behind every expected gain.

Pure. The costs of batches that were observed are played through the rules by which the loader works:

- Batch k may be begun when batch k - window was handed out. With `round_robin` worker k mod N loads it, with
  `dynamic` the worker that is free first.
- A worker takes `load` and `pack` for it. It is handed out in order, `overhead` after it is there and the
  step before is done; then comes the step. Without workers a batch takes `load` and the step, one after the
  other.
- All processes together cannot use more CPUs than there are: a batch takes at least its CPU time divided by
  the CPUs.

What it does not know: that processes slow each other down over memory and caches, that reading may have a
limit of its own (a disk, a network), and that without workers a step may overlap with nothing at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle, islice

#: Batches that are played through. After some hundred the mean does not move by more than a percent.
_BATCHES = 600
#: How much wider than `prefetch` for each worker the window of `Dynamic` becomes while a batch is late.
_WIDENS = 16


@dataclass(frozen=True)
class Costs:
    """What batches cost, as it was observed; in seconds.

    Attributes:
        loads: reading samples and making a batch of them, for each batch in the order of batches.
        pack: writing a batch to shared memory.
        overhead: of the consumer for each batch that comes from a worker: messages and unpacking.
        device: of the consumer for each batch on its way to the device, with workers and without.
        draw: of the sampler for each batch.
        step: of the consumer outside of the loader for each batch.
        load_cpu: the part of `loads` and `pack` in which a CPU was used, from 0 to 1.
        step_cpu: CPU time of the consumer in a step.
    """

    loads: tuple[float, ...]
    pack: float = 0.0
    overhead: float = 0.0
    device: float = 0.0
    draw: float = 0.0
    step: float = 0.0
    load_cpu: float = 1.0
    step_cpu: float = 0.0

    @property
    def load(self) -> float:
        """The mean of `loads`."""
        return sum(self.loads) / len(self.loads)

    @property
    def cpu(self) -> float:
        """The CPU time of all processes for a batch from a worker."""
        return (self.load + self.pack) * self.load_cpu + self.overhead + self.draw + self.step_cpu

    def times(self, factor: float) -> Costs:
        """All of it multiplied, but for `load_cpu`, which is a part."""
        loads = tuple(load * factor for load in self.loads)
        others = {
            name: getattr(self, name) * factor
            for name in ("pack", "overhead", "device", "draw", "step", "step_cpu")
        }
        return replace(self, loads=loads, **others)

    def with_step(self, seconds: float) -> Costs:
        """The same with another step, which uses no CPU."""
        return replace(self, step=seconds, step_cpu=0.0)


@dataclass(frozen=True)
class Setting:
    """What can be chosen.

    Attributes:
        num_workers: 0 loads on the consumer's thread.
        prefetch_factor: batches that each worker works ahead.
        dynamic: whichever worker is free takes the next batch; else they take turns.
        fixed_window: batches that may be under way, where that was said; None: as the others come to.
    """

    num_workers: int
    prefetch_factor: int = 2
    dynamic: bool = False
    fixed_window: int | None = None

    @property
    def window(self) -> int:
        """Batches that may be under way."""
        if self.fixed_window is not None:
            return self.fixed_window
        return self.num_workers * self.prefetch_factor * (_WIDENS if self.dynamic else 1)


def seconds_per_batch(costs: Costs, setting: Setting, cpus: float) -> float:
    """The wall time that a batch takes on average, with the step.

    Args:
        costs: of at least one batch.
        setting: what is chosen.
        cpus: how many CPUs all processes may use together.
    """
    if setting.num_workers == 0:
        return costs.draw + costs.load + costs.device + costs.step
    return max(_played(costs, setting), costs.cpu / cpus)


def _played(costs: Costs, setting: Setting) -> float:
    free = [0.0] * setting.num_workers
    handed_out: list[float] = []
    between = costs.overhead + costs.draw + costs.device
    now = 0.0  # when the consumer asks for the next batch
    for number, load in enumerate(islice(cycle(costs.loads), max(_BATCHES, len(costs.loads)))):
        allowed = handed_out[number - setting.window] if number >= setting.window else 0.0
        worker = free.index(min(free)) if setting.dynamic else number % setting.num_workers
        free[worker] = max(free[worker], allowed) + load + costs.pack
        handed_out.append(max(now, free[worker]) + between)
        now = handed_out[-1] + costs.step
    # The first batches find an empty window, and a pause at the start is no part of the rate.
    skipped = min(setting.window, len(handed_out) // 2)
    return (now - (handed_out[skipped - 1] + costs.step)) / (len(handed_out) - skipped)
