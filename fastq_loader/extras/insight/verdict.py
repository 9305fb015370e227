"""The verdict on a run: its bottleneck in one word, the share of that in the time, and advice.

Runs in the consumer, on the thread that requests it, and changes nothing. The causes of `EpochStatistics` add
up to the time of the epoch, and in all but the training step it could not continue: the largest of them is
the limit, if it is large enough. If none is, the step limits; or nothing does, because the workers are busy
all the time, too. A verdict is printed as a page of 80 columns.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from fastq_loader.extras.insight.advice import advice, duration
from fastq_loader.extras.insight.model import BATCHES, RunProfile, is_enough
from fastq_loader.extras.insight.snapshots import CAUSES, EpochStatistics, WorkerStatistics
from fastq_loader.system.terminal import printable

#: Minimum shares of an epoch for a cause to be reported. Some waiting for workers is normal if they are as
#: fast as the step.
_WORTH, _WORTH_OF_OTHERS = {"workers": 0.2}, 0.1
#: Minimum share of the time in which workers are busy, to count as busy all the time.
_BUSY = 0.7

#: Minimum of bytes private to the workers that is reported, and the private bytes that any worker has.
_MUCH, _WORKER_BYTES = 1e9, 150e6

# Sizes on the page.
_COLUMNS, _BAR = 80, 40
#: Workers that get a line of their own.
_WORKERS = 8
#: Columns for the name of a machine.
_NODE = 16

#: For each limit its label in the table, if it is a cause, and the headline.
_TEXTS = {
    "consumer": (
        "training step",
        "The training step limits: it ran {share} of the time; data comes in time.",
    ),
    "workers": ("loading", "Loading limits: {share} of the time was spent waiting for it."),
    "head_of_line": ("head of the line", "Single slow batches limit: {share} of the time was lost to them."),
    "transport": ("transport", "Handing batches over limits: {share} of the time was lost to it."),
    "memory": ("memory", "Memory for batches limits: {share} of the time was lost to it."),
    "sampler": ("sampler", "The sampler limits: {share} of the time was lost to it."),
    "device_copy": ("to the device", "The way to the device limits: {share} of the time was lost to it."),
    "start_up": ("start and end", "Starting and ending an epoch limits: {share} of the time was lost to it."),
    "balanced": ("", "Balanced: workers and training step are both busy; {share} of the time was lost."),
    "unknown": ("", "Nothing can be said yet: there is too little data."),
}

#: The last cell of a bar, from empty to full.
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a run. `print` and notebooks show a page of text.

    Attributes:
        limit: the cause of most of the lost time.

            - "workers": loading; also without workers.
            - "head_of_line": single batches that held up others.
            - "consumer": nothing; the training step takes as long as the epoch.
            - "transport": moving batches to this process, or `next()` itself.
            - "memory": new memory for batches, or a window that is too narrow for the workers.
            - "sampler": drawing indices.
            - "device_copy": copies to the device, page-locking, `transform`.
            - "start_up": starting workers.
            - "balanced": nothing; training step and workers are busy all the time.
            - "unknown": there is too little data.
        share: the part of the epoch's wall time that was lost to it, from 0 to 1. For "consumer", the part in
            which it ran; for "balanced", the part in which it did not; for "unknown", 0.
        culprit: the batch, function or sampler to blame, with its part of the lost time; None if there is
            none.
        advice: possible improvements, the best first, each with its expected gain.
        epoch: time of the epoch by cause; its `epoch` is None for all epochs together.
        workers: activity of each worker since it started.
        settings: the relevant arguments, as text.

    >>> diagnosis = DataLoader(range(8)).diagnose()
    >>> diagnosis.limit, diagnosis.share, diagnosis.advice
    ('unknown', 0.0, ...)
    """

    limit: str
    share: float
    culprit: str | None = None
    advice: tuple[str, ...] = ()
    epoch: EpochStatistics = field(default=EpochStatistics(), repr=False)
    workers: tuple[WorkerStatistics, ...] = field(default=(), repr=False)
    settings: str = field(default="", repr=False)

    def __str__(self) -> str:
        return printable(text(self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(text(self))}</pre>"


def diagnose(run: RunProfile) -> Diagnosis:
    """Diagnose a run."""
    limits, share = _limits(run)
    culprit = _culprit(run, limits[0])
    found = (*advice(run, limits), *_slow_lines(run, limits[0]), *_copies(run.private_bytes))
    settings = _settings(run)
    return Diagnosis(limits[0], share, culprit, found, run.epoch, run.workers, settings)


def _limits(run: RunProfile) -> tuple[list[str], float]:
    """Causes of lost time, the worst first, and the share of the worst."""
    shares = run.shares
    consumer = shares.pop("consumer")
    worst_first = sorted(shares, key=lambda cause: -shares[cause])
    lost = [cause for cause in worst_first if shares[cause] >= _WORTH.get(cause, _WORTH_OF_OTHERS)]
    # A single batch is enough to recognise a slow start.
    if not is_enough(run.epoch, 1 if lost[:1] == ["start_up"] else BATCHES):
        return ["unknown"], 0.0
    if lost:
        return lost, shares[lost[0]]
    return (["balanced"], 1 - consumer) if run.busy >= _BUSY else (["consumer"], consumer)


def _culprit(run: RunProfile, limit: str) -> str | None:
    epoch, name, seconds = run.epoch, "", 0.0
    if limit == "head_of_line" and run.late:
        name, seconds = f"batch {run.late[0].batch}", run.late[0].seconds
    elif limit == "workers":
        if run.workers and run.fetching < 0.5:
            name = run.loader.collate or "default_collate"
            seconds = (1 - run.fetching) * epoch.workers_seconds
    elif limit == "sampler":
        name, seconds = run.loader.sampler, epoch.sampler_seconds
    elif limit == "device_copy" and run.staging is None:
        name, seconds = run.loader.transform, epoch.device_copy_seconds
    return f"{name}: {duration(seconds)} of {duration(epoch.spent_on(limit))}" if name else None


def _slow_lines(run: RunProfile, limit: str) -> tuple[str, ...]:
    """The command that shows what takes so long, if reading samples does."""
    if limit != "workers" or (run.workers and run.fetching < 0.5):
        return ()
    return (
        "python -m fastq_loader profile my_data:make_loader, or loader.profile(), shows which lines of the "
        "dataset take the time",
    )


def _copies(private_bytes: Sequence[int]) -> tuple[str, ...]:
    """Advice if workers may have copied their dataset: users rarely look at their private memory."""
    own = sum(max(0, each - _WORKER_BYTES) for each in private_bytes)
    if own < _MUCH:
        return ()
    return (
        f"workers have {own / 1e9:.1f} GB that they do not share: if the dataset holds long lists or dicts, "
        "fastq_loader.share(dataset) keeps these once",
    )


def _settings(run: RunProfile) -> str:
    setting = run.setting
    words = [f"num_workers={setting.num_workers}"]
    if setting.num_workers:
        dynamic = setting.dynamic and run.loader.in_order
        words += [f"prefetch_factor={setting.prefetch_factor}", "dynamic" if dynamic else "round_robin"]
        words += ["in_order=False"] * (not run.loader.in_order)
        words += [f"window={setting.fixed_window}"] * (setting.fixed_window is not None)
        words += ["persistent_workers=True"] * run.loader.persistent
    return ", ".join(words)


# ---- the page -------------------------------------------------------------------------------------


def text(diagnosis: Diagnosis) -> str:
    """Format the page, in lines of 80 columns."""
    lines = wrap(_TEXTS[diagnosis.limit][1].format(share=f"{diagnosis.share:.0%}"), _COLUMNS)
    if diagnosis.culprit:
        lines += wrap(diagnosis.culprit, _COLUMNS, initial_indent="  ", subsequent_indent="  ")
    if diagnosis.epoch.batches:
        lines += ["", *wrap(_summary(diagnosis), _COLUMNS), "", *_causes(diagnosis.epoch), ""]
        lines.append(_waits(diagnosis.epoch))
    if diagnosis.workers:
        lines += ["", *_table(diagnosis)]
    if diagnosis.advice:
        lines += ["", "What would help:"]
        for line in diagnosis.advice:
            lines += wrap(line, _COLUMNS, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(lines)


def _summary(diagnosis: Diagnosis) -> str:
    epoch = diagnosis.epoch
    which = "All epochs" if epoch.epoch is None else f"Epoch {epoch.epoch}"
    rate = epoch.batches / epoch.seconds if epoch.seconds else 0.0
    per_second = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    return (
        f"{which}: {epoch.batches:,} batches in {duration(epoch.seconds)}, {per_second} a second; "
        f"{diagnosis.settings}"
    )


def _causes(epoch: EpochStatistics) -> list[str]:
    """Lines of the causes whose time is visible."""
    seconds = {cause: epoch.spent_on(cause) for cause in CAUSES}
    lines, whole = [], sum(seconds.values()) or 1.0
    if epoch.recorded_batches < epoch.batches:
        lines = [f"Of the last {epoch.recorded_batches:,} batches:"]
    for cause, took in seconds.items():
        share = took / whole
        if share >= 1 / 200:
            label = _TEXTS[cause][0]
            lines.append(f"  {label:<17} {duration(took):>7} {share:>4.0%}  {_bar(share)}".rstrip())
    return lines


def _bar(share: float) -> str:
    cells, rest = divmod(round(min(1.0, share) * _BAR * 8), 8)
    return "█" * cells + _EIGHTHS[rest].strip()


def _waits(epoch: EpochStatistics) -> str:
    waits = ((50, epoch.wait_p50), (95, epoch.wait_p95), (99, epoch.wait_p99))
    return "  next() took  " + "   ".join(f"p{percent} {duration(wait)}" for percent, wait in waits)


def _table(diagnosis: Diagnosis) -> list[str]:
    """Activity of the workers: shares of their time, times of a batch, and the name of another machine."""
    lines = ["  worker     busy  blocked     idle    fetch  collate     pack"]
    for worker in diagnosis.workers[:_WORKERS]:
        whole = worker.work_seconds + worker.idle_seconds + worker.blocked_seconds or 1.0
        parts = (worker.work_seconds, worker.blocked_seconds, worker.idle_seconds)
        a_batch = (worker.fetch_seconds, worker.collate_seconds, worker.packing_seconds)
        cells = [f"{seconds / whole:.0%}" for seconds in parts]
        cells += [duration(seconds / max(1, worker.batches)) for seconds in a_batch]
        line = f"  {worker.id:<6}" + "".join(f"{cell:>9}" for cell in cells)
        lines.append(f"{line}  {(worker.node or '')[:_NODE]}".rstrip())
    if (more := len(diagnosis.workers) - _WORKERS) > 0:
        lines.append(f"  and {more} more")
    return lines
