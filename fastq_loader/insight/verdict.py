"""What limits a run: one word, the share of the time that it took, and what would help.

Pure. The causes of `EpochStatistics` add up to the time of the epoch, and all but the training step are time
in which it could not go on: the largest of them is the limit, if it is worth mentioning. Where none is, the
step limits; or nothing does, because the workers are busy all the time, too.
"""

from __future__ import annotations

import html
import sys
from dataclasses import dataclass, field
from reprlib import repr as short

from fastq_loader.insight import report
from fastq_loader.insight.advice import advice, duration
from fastq_loader.insight.evidence import BATCHES, Evidence, is_enough
from fastq_loader.statistics.snapshots import EpochStatistics, WorkerStatistics

#: Shares of an epoch from which on a cause is worth mentioning. Some waiting for workers is normal where they
#: are as quick as the step.
_WORTH, _WORTH_OF_OTHERS = {"workers": 0.2}, 0.1
#: The part of the time from which on workers count as busy all the time.
_BUSY = 0.7


@dataclass(frozen=True)
class Diagnosis:
    """What limits a run. `print` and notebooks show a page of text.

    Attributes:
        limit: what most of the time was lost to.

            - "workers": loading; also without workers.
            - "head_of_line": single batches that held up others.
            - "consumer": nothing; the training step takes as long as the epoch.
            - "transport": the way of batches to this process, or `next()` itself.
            - "memory": new memory for batches, or a window that is too narrow for the workers.
            - "sampler": drawing indices.
            - "device_copy": copies to the device, page-locking, `transform`.
            - "start_up": starting workers.
            - "balanced": nothing; training step and workers are busy all the time.
            - "unknown": there is too little data.
        share: the part of the epoch's wall time that was lost to it, from 0 to 1. Of "consumer", the part in
            which it ran; of "balanced", the part in which it did not; of "unknown", 0.
        culprit: what is to blame, with its share in the lost time, where there is such a thing; else None.
        advice: what would help, the best first, each with the gain that is expected.
        epoch: where the time went; its `epoch` is 0 for all epochs together.
        workers: what each worker did since it started.
        settings: the arguments that matter, in words.
    """

    limit: str
    share: float
    culprit: str | None = None
    advice: tuple[str, ...] = ()
    epoch: EpochStatistics = field(default=EpochStatistics(), repr=False)
    workers: tuple[WorkerStatistics, ...] = field(default=(), repr=False)
    settings: str = field(default="", repr=False)

    def __str__(self) -> str:
        try:
            "×→█▁…".encode(getattr(sys.stdout, "encoding", None) or "ascii")
        except (UnicodeEncodeError, LookupError):
            return report.in_ascii(report.text(self))
        return report.text(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(report.text(self))}</pre>"


def diagnose(evidence: Evidence) -> Diagnosis:
    """What limits a run."""
    limits, share = _limits(evidence)
    return Diagnosis(
        limits[0],
        share,
        _culprit(evidence, limits[0]),
        advice(evidence, limits),
        evidence.epoch,
        evidence.workers,
        _settings(evidence),
    )


def _limits(evidence: Evidence) -> tuple[list[str], float]:
    """What the time was lost to, the worst first, and the share of that."""
    shares = evidence.shares
    consumer = shares.pop("consumer")
    worst_first = sorted(shares, key=lambda cause: -shares[cause])
    lost = [cause for cause in worst_first if shares[cause] >= _WORTH.get(cause, _WORTH_OF_OTHERS)]
    # A slow start is told from a single batch.
    if not is_enough(evidence.epoch, 1 if lost[:1] == ["start_up"] else BATCHES):
        return ["unknown"], 0.0
    if lost:
        return lost, shares[lost[0]]
    return (["balanced"], 1 - consumer) if evidence.busy >= _BUSY else (["consumer"], consumer)


def _culprit(evidence: Evidence, limit: str) -> str | None:
    find = _CULPRITS.get(limit)
    found = None if find is None else find(evidence)
    if found is None:
        return None
    name, seconds = found
    return f"{name}: {duration(seconds)} of {duration(evidence.epoch.spent_on(limit))}"


def _late_batch(evidence: Evidence) -> tuple[str, float] | None:
    if not evidence.late:
        return None
    late = evidence.late[0]
    sample = f", sample {short(late.sample)}" if 2 * late.sample_seconds > late.load_seconds > 0 else ""
    return f"batch {late.batch}{sample}", late.seconds


def _collating(evidence: Evidence) -> tuple[str, float] | None:
    fetch = sum(worker.fetch_seconds for worker in evidence.workers)
    collate = sum(worker.collate_seconds for worker in evidence.workers)
    if collate <= fetch:
        return None
    share = collate / (fetch + collate)
    return evidence.collate or "default_collate", share * evidence.epoch.workers_seconds


def _sampler(evidence: Evidence) -> tuple[str, float] | None:
    return (evidence.sampler, evidence.epoch.sampler_seconds) if evidence.sampler else None


def _transform(evidence: Evidence) -> tuple[str, float] | None:
    if not evidence.transform or evidence.staging is not None:
        return None
    return evidence.transform, evidence.epoch.device_copy_seconds


_CULPRITS = {
    "head_of_line": _late_batch,
    "workers": _collating,
    "sampler": _sampler,
    "device_copy": _transform,
}


def _settings(evidence: Evidence) -> str:
    setting = evidence.setting
    words = [f"num_workers={setting.num_workers}"]
    if setting.num_workers:
        dynamic = setting.dynamic and evidence.in_order
        words += [f"prefetch_factor={setting.prefetch_factor}", "dynamic" if dynamic else "round_robin"]
        words += ["in_order=False"] * (not evidence.in_order)
        words += [f"window={setting.fixed_window}"] * (setting.fixed_window is not None)
        words += ["persistent_workers=True"] * evidence.persistent
    return ", ".join(words)
