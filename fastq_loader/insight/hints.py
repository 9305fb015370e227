"""What a user should be told without asking: from what was seen to a text, or to None.

Pure. Every judgement would rather miss something than be wrong: a hint breaks runs in which warnings are
errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from fastq_loader.insight.model import Costs, Setting, seconds_per_batch
from fastq_loader.statistics.epoch import FIRST_BATCHES, EpochCounters

#: Of a worker's first batches: a digest, and the bytes that it was made of.
FirstBatches = Mapping[int, Sequence[tuple[bytes, int]]]

#: Samples that agree by chance in one of 10^6 runs, even if each is one of two.
_LEAST_SAMPLES = 20
#: Bytes of data that agree by chance as seldom: three numbers.
_LEAST_BYTES = 24
#: Different batches that a worker must have, where it has so many: data that repeat themselves say nothing.
_LEAST_DIFFERENT = 3
#: An epoch that is shorter, or was not slowed down by more, is not worth a word.
_LEAST_BATCHES, _LEAST_SECONDS = 1000, 5.0
#: How much faster it would have to be.
_LEAST_GAIN = 2
#: A window that takes less is not what fills the memory.
_LEAST_WINDOW = 64 << 20


def same_order(sampler: str, epoch: int, samples: int) -> str | None:
    """An epoch began with so many samples in the order of the epoch before, of a sampler that shuffles."""
    if samples < _LEAST_SAMPLES:
        return None
    return (
        f"{sampler} gave the same order in epochs {epoch - 1} and {epoch} (the first {samples} samples were "
        "compared): call its set_epoch(epoch) before each epoch"
    )


def duplicate_data(dataset: str, first: FirstBatches) -> str | None:
    """What the workers of an iterable dataset gave first."""
    for one, other in combinations(sorted(first), 2):
        batches = first[one]
        different = len({digest for digest, _ in batches})
        if (
            batches == first[other]
            and different >= min(_LEAST_DIFFERENT, max(2, len(batches)))
            and sum(nbytes for _, nbytes in batches) >= _LEAST_BYTES
        ):
            return (
                f"Workers {one} and {other} gave the same data (their first {len(batches)} batches were "
                f"compared), so every sample of {dataset} comes more than once: let its __iter__ yield only "
                "the part of torch.utils.data.get_worker_info().id, one of .num_workers"
            )
    return None


def idle_workers(dataset: str, first: FirstBatches, workers: int) -> str | None:
    """What the workers of an iterable dataset gave first in an epoch that is over."""
    # Beside workers that gave fewer, one without any may be an accident of a small dataset.
    idle = [worker for worker in range(workers) if not first.get(worker)]
    if not 0 < len(idle) < workers or min(map(len, first.values())) < FIRST_BATCHES:
        return None
    busy = workers - len(idle)
    return (
        f"{len(idle)} of {workers} workers gave no batch in a whole epoch (worker "
        f"{', '.join(map(str, idle))}): {dataset} has data for {busy}. Use num_workers={busy}, or divide it "
        "into more parts"
    )


def tiny_batches(epoch: EpochCounters, workers: int) -> str | None:
    """The counters of an epoch that is over, with so many workers."""
    batches = epoch.batches
    if batches < _LEAST_BATCHES or not epoch.costs:
        return None
    seconds = {cause: nanoseconds / 1e9 / batches for cause, nanoseconds in epoch.spent.items()}
    costs = Costs(
        (epoch.load / 1e9,),
        draw=seconds["sampler"],
        step=seconds["consumer"] + seconds["device_copy"],
    )
    alone = seconds_per_batch(costs, Setting(0), 1)
    took = epoch.nanoseconds / 1e9 / batches - seconds["start_up"]
    if took < _LEAST_GAIN * alone or (took - alone) * batches < _LEAST_SECONDS:
        return None
    of = f"{workers} worker{'s' * (workers > 1)}"
    return (
        f"A batch takes {costs.load * 1e6:.0f} µs to load, and {took * 1e6:.0f} µs with its way from {of} "
        f"and the step: with num_workers=0 this epoch of {batches} batches would have taken about "
        f"{alone * batches:.1f} s in place of {took * batches:.1f} s. Use that, or larger batches"
    )


def memory_pressure(window: int, batch_bytes: float, left: int) -> str | None:
    """How many batches may be loaded ahead, bytes of one, and bytes that there are for them."""
    needed = window * batch_bytes
    if needed < _LEAST_WINDOW or needed <= left / 2:
        return None
    return (
        f"{window} batches of {batch_bytes / 1e6:,.1f} MB may be loaded ahead: {needed / 1e6:,.0f} MB, more "
        f"than half of the {left / 1e6:,.0f} MB that this process can have. Use a smaller prefetch_factor or "
        "batch_size, or fewer workers, before the system ends one of them"
    )
