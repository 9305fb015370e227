"""A diagnosis as a page: text of 80 columns for a terminal, HTML for a notebook.

Pure. Names of classes and samples are the user's: they stand escaped in HTML, and cut where they are long.
"""

from __future__ import annotations

import html as escaping
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

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


class Marks(NamedTuple):
    """What bars are made of.

    Attributes:
        eighths: a bar's last cell, from nothing to full.
        levels: the points of a line, from the lowest to the highest.
    """

    eighths: str
    levels: str


UNICODE = Marks(" ▏▎▍▌▋▊▉█", "▁▂▃▄▅▆▇█")
ASCII = Marks(" #", "_.-=#")
_IN_ASCII = str.maketrans({"×": "x", "→": "->", "µ": "u", "…": "..."})


def in_ascii(page: str) -> str:
    """A page for an encoding that has little else."""
    return page.translate(_IN_ASCII).encode("ascii", "backslashreplace").decode()


def text(diagnosis: Diagnosis, marks: Marks = UNICODE) -> str:
    """The page, in lines of 80 columns."""
    lines = wrap(headline(diagnosis), _COLUMNS)
    if diagnosis.culprit:
        lines += wrap(diagnosis.culprit, _COLUMNS, initial_indent="  ", subsequent_indent="  ")
    if diagnosis.epoch.batches:
        lines += ["", *wrap(_summary(diagnosis), _COLUMNS), ""]
        lines += [
            f"  {label:<17} {duration(seconds):>7} {share:>4.0%}  {_bar(share, marks)}".rstrip()
            for label, seconds, share in _rows(diagnosis)
        ]
        lines += ["", *(f"  {line}" for line in _waits(diagnosis, marks))]
    if diagnosis.workers:
        lines += ["", *(_cells(row) for row in _table(diagnosis))]
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


def html(diagnosis: Diagnosis) -> str:
    """The page for a notebook. Colours are the notebook's, but for the bars."""
    parts = [f"<p><b>{_escaped(headline(diagnosis))}</b><br>{_escaped(diagnosis.culprit or '')}</p>"]
    if diagnosis.epoch.batches:
        parts.append(f"<p>{_escaped(_summary(diagnosis))}</p><table style='width:100%'>")
        for cause, (label, seconds, share) in zip(_causes(diagnosis), _rows(diagnosis), strict=True):
            bar = f"width:{share:.1%};height:1em;background:{_colour(diagnosis, cause)}"
            row = f"<td>{label}</td><td>{duration(seconds)}</td><td>{share:.0%}</td>"
            parts.append(f"<tr>{row}<td style='width:60%'><div style='{bar}'></div></td></tr>")
        parts.append(f"</table><p>{'<br>'.join(map(_escaped, _waits(diagnosis, UNICODE)))}</p>")
    if diagnosis.workers:
        rows = ("".join(f"<td>{_escaped(cell)}</td>" for cell in row) for row in _table(diagnosis))
        parts.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")
    if diagnosis.advice:
        lines = "".join(f"<li>{_escaped(line)}</li>" for line in diagnosis.advice)
        parts.append(f"<p>What would help:</p><ul>{lines}</ul>")
    return "\n".join(parts)


_escaped = escaping.escape


def _colour(diagnosis: Diagnosis, cause: str) -> str:
    return "#d62728" if cause == diagnosis.limit else "#2ca02c" if cause == "consumer" else "#7f7f7f"


def _summary(diagnosis: Diagnosis) -> str:
    epoch = diagnosis.epoch
    which = f"Epoch {epoch.epoch}" if epoch.epoch else "All epochs"
    rate = epoch.batches / epoch.seconds if epoch.seconds else 0.0
    per_second = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    return (
        f"{which}: {epoch.batches:,} batches in {duration(epoch.seconds)}, {per_second} a second; "
        f"{diagnosis.settings}"
    )


def _causes(diagnosis: Diagnosis) -> list[str]:
    """The causes that took any time that can be seen."""
    return [cause for cause in CAUSES if diagnosis.epoch.spent_on(cause) >= diagnosis.epoch.seconds / 200]


def _rows(diagnosis: Diagnosis) -> list[tuple[str, float, float]]:
    seconds = diagnosis.epoch.seconds or 1.0
    spent = [(_LABELS[cause], diagnosis.epoch.spent_on(cause)) for cause in _causes(diagnosis)]
    return [(label, took, took / seconds) for label, took in spent]


def _bar(share: float, marks: Marks) -> str:
    steps = len(marks.eighths) - 1
    cells, rest = divmod(round(min(1.0, share) * _BAR * steps), steps)
    return marks.eighths[-1] * cells + (marks.eighths[rest] if rest else "")


def _waits(diagnosis: Diagnosis, marks: Marks) -> list[str]:
    epoch = diagnosis.epoch
    waits = ((50, epoch.wait_p50), (95, epoch.wait_p95), (99, epoch.wait_p99))
    lines = ["next() took  " + "   ".join(f"p{percent} {duration(wait)}" for percent, wait in waits)]
    if max(epoch.ready, default=0) > 0:
        points = _fewer(epoch.ready)
        lines.append(f"ready ahead  {_line(points, marks)}  up to {max(epoch.ready):.2g} batches")
    return lines


def _fewer(values: Sequence[float]) -> list[float]:
    """As many values as there is room for, each the mean of its neighbours."""
    size = -(-len(values) // _POINTS)
    groups = [values[at : at + size] for at in range(0, len(values), size)]
    return [sum(group) / len(group) for group in groups]


def _line(points: Sequence[float], marks: Marks) -> str:
    highest, top = max(points), len(marks.levels) - 1
    return "".join(marks.levels[round(point / highest * top)] for point in points)


def _table(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """What workers did: shares of their time, and times of a batch; and where, if on other machines."""
    far = any(worker.node for worker in diagnosis.workers)
    rows: list[tuple[str, ...]] = [("worker", "busy", "blocked", "idle", "fetch", "collate", "pack")]
    rows[0] += ("node",) * far
    for worker in diagnosis.workers[:_WORKERS]:
        whole = worker.work_seconds + worker.idle_seconds + worker.blocked_seconds or 1.0
        parts = (worker.work_seconds, worker.blocked_seconds, worker.idle_seconds)
        a_batch = (worker.fetch_seconds, worker.collate_seconds, worker.packing_seconds)
        rows.append(
            (
                str(worker.id),
                *(f"{seconds / whole:.0%}" for seconds in parts),
                *(duration(seconds / max(1, worker.batches)) for seconds in a_batch),
                *[(worker.node or "")[:_NODE]] * far,
            )
        )
    if (more := len(diagnosis.workers) - _WORKERS) > 0:
        rows.append((f"and {more} more",))
    return rows


def _cells(row: Sequence[str]) -> str:
    first, others, node = row[0], row[1:7], row[7:]
    return f"  {first:<6}" + "".join([f"{cell:>9}" for cell in others] + [f"  {cell}" for cell in node])
