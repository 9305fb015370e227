"""A diagnosis as a page of text of 80 columns.

Pure. Names of classes and samples are the user's, and cut where they are long.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING

from fastq_loader.insight.advice import duration
from fastq_loader.statistics.snapshots import CAUSES

if TYPE_CHECKING:
    from fastq_loader.insight.verdict import Diagnosis

_COLUMNS, _BAR, _POINTS = 80, 40, 32
#: Workers that get a line of their own.
_WORKERS = 8
#: Columns for the name of a machine.
_NODE = 16

_HEADLINES = {
    "workers": "Loading limits: {share} of the time was spent waiting for it.",
    "head_of_line": "Single slow batches limit: {share} of the time was lost to them.",
    "consumer": "The training step limits: it ran {share} of the time. The data comes in time.",
    "transport": "Handing batches over limits: {share} of the time was lost to it.",
    "memory": "Memory for batches limits: {share} of the time was lost to it.",
    "sampler": "The sampler limits: {share} of the time was lost to it.",
    "device_copy": "The way to the device limits: {share} of the time was lost to it.",
    "start_up": "Starting and ending {what} limits: {share} of the time was lost to it.",
    "balanced": "Balanced: workers and training step are both busy; {share} of the time was lost.",
    "unknown": "Nothing can be said yet: there is too little data.",
}
_LABELS = {
    "consumer": "training step",
    "workers": "loading",
    "head_of_line": "head of the line",
    "transport": "transport",
    "memory": "memory",
    "sampler": "sampler",
    "device_copy": "to the device",
    "start_up": "start and end",
}


#: A bar's last cell, from nothing to full, and the points of a line, from the lowest to the highest.
_EIGHTHS, _LEVELS = " ▏▎▍▌▋▊▉█", "▁▂▃▄▅▆▇█"
_IN_ASCII = str.maketrans("×µ▁▂▃▄▅▆▇█▌▋▊▉", "xu_..--==#####", "▏▎▍")


def in_ascii(page: str) -> str:
    """A page for an encoding that has little else."""
    page = page.translate(_IN_ASCII).replace("→", "->").replace("…", "...")
    return page.encode("ascii", "backslashreplace").decode()


def text(diagnosis: Diagnosis) -> str:
    """The page, in lines of 80 columns."""
    lines = wrap(headline(diagnosis), _COLUMNS)
    if diagnosis.culprit:
        lines += wrap(diagnosis.culprit, _COLUMNS, initial_indent="  ", subsequent_indent="  ")
    if diagnosis.epoch.batches:
        lines += ["", *wrap(_summary(diagnosis), _COLUMNS), ""]
        lines += [
            f"  {label:<17} {duration(seconds):>7} {share:>4.0%}  {_bar(share)}".rstrip()
            for label, seconds, share in _rows(diagnosis)
        ]
        lines += ["", *(f"  {line}" for line in _waits(diagnosis))]
    if diagnosis.workers:
        lines += ["", *_table(diagnosis)]
    if diagnosis.advice:
        lines += ["", "What would help:"]
        for line in diagnosis.advice:
            lines += wrap(line, _COLUMNS, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(lines)


def headline(diagnosis: Diagnosis) -> str:
    """The verdict as a sentence."""
    return _HEADLINES[diagnosis.limit].format(
        share=f"{diagnosis.share:.0%}", what="the workers" if diagnosis.workers else "an epoch"
    )


def _summary(diagnosis: Diagnosis) -> str:
    epoch = diagnosis.epoch
    which = f"Epoch {epoch.epoch}" if epoch.epoch else "All epochs"
    rate = epoch.batches / epoch.seconds if epoch.seconds else 0.0
    per_second = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    return (
        f"{which}: {epoch.batches:,} batches in {duration(epoch.seconds)}, {per_second} a second; "
        f"{diagnosis.settings}"
    )


def _rows(diagnosis: Diagnosis) -> list[tuple[str, float, float]]:
    """The causes that took any time that can be seen."""
    seconds = diagnosis.epoch.seconds or 1.0
    spent = [(_LABELS[cause], diagnosis.epoch.spent_on(cause)) for cause in CAUSES]
    return [(label, took, took / seconds) for label, took in spent if took >= diagnosis.epoch.seconds / 200]


def _bar(share: float) -> str:
    cells, rest = divmod(round(min(1.0, share) * _BAR * 8), 8)
    return "█" * cells + _EIGHTHS[rest].strip()


def _waits(diagnosis: Diagnosis) -> list[str]:
    epoch = diagnosis.epoch
    waits = ((50, epoch.wait_p50), (95, epoch.wait_p95), (99, epoch.wait_p99))
    lines = ["next() took  " + "   ".join(f"p{percent} {duration(wait)}" for percent, wait in waits)]
    if max(epoch.ready, default=0) > 0:
        lines.append(f"ready ahead  {_line(epoch.ready)}  up to {max(epoch.ready):.2g} batches")
    return lines


def _line(values: Sequence[float]) -> str:
    """Points for values; of more than there is room for, each is the mean of its neighbours."""
    size = -(-len(values) // _POINTS)
    points = [fmean(values[at : at + size]) for at in range(0, len(values), size)]
    return "".join(_LEVELS[round(point / max(points) * 7)] for point in points)


def _table(diagnosis: Diagnosis) -> list[str]:
    """What workers did: shares of their time, and times of a batch; and where, if on other machines."""
    far = any(worker.node for worker in diagnosis.workers)
    head = ("busy", "blocked", "idle", "fetch", "collate", "pack")
    lines = [_cells("worker", head, "node" if far else None)]
    for worker in diagnosis.workers[:_WORKERS]:
        whole = worker.work_seconds + worker.idle_seconds + worker.blocked_seconds or 1.0
        parts = (worker.work_seconds, worker.blocked_seconds, worker.idle_seconds)
        a_batch = (worker.fetch_seconds, worker.collate_seconds, worker.packing_seconds)
        cells = [f"{seconds / whole:.0%}" for seconds in parts]
        cells += [duration(seconds / max(1, worker.batches)) for seconds in a_batch]
        lines.append(_cells(str(worker.id), cells, (worker.node or "")[:_NODE] if far else None))
    if (more := len(diagnosis.workers) - _WORKERS) > 0:
        lines.append(f"  and {more} more")
    return lines


def _cells(first: str, others: Sequence[str], node: str | None) -> str:
    cells = "".join(f"{cell:>9}" for cell in others)
    return f"  {first:<6}{cells}" + ("" if node is None else f"  {node}")
