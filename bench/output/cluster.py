"""The tables of workers on other machines, each with a sentence of what it shows."""

from __future__ import annotations

from collections.abc import Iterator

from bench.output.figures import Spread, compared, figure, share_of_links
from bench.output.layout import Table, measured, remarks, title_of
from bench.output.rows import CaseRows
from bench.output.words import number, ranged, times
from bench.timing.cluster import ACTORS, BARE, DATA, LINKED, LOCAL, REMOTE, TURN

ABOUT = """Other machines are nodes of a Ray cluster on this one. RayWorkers ÷ it: ratio of the medians
(lowest..highest in a round). actors: as many as workers, with as many batches asked for ahead as a loader
prefetches, handed out in order; arrays are read without a copy, and nobody may write to them. Ray Data: in an
order of its own, begun anew for each block. recv_into: as many TCP connections as workers, into memory that
is used again; nobody makes the batches, or puts them in order. p50, p95: of next()."""
ABOUT_LINKS = """share: bytes of batches, of what the links carry beside headers: 1448 of the 1514 bytes of
each frame, of 10^9 bits/s for each link. Gbit/s: bytes of batches alone."""
ABOUT_TURN = """From asking for what comes after the last batch to the first batch of the next epoch, with
persistent workers."""


def table(case: CaseRows) -> Table:
    """That of one case."""
    rows, about = _rates(case), ABOUT
    if case.name in LINKED:
        rows, about = _shares(case), ABOUT_LINKS
    elif case.name == TURN:
        rows, about = _turns(case), ABOUT_TURN
    return Table(title_of(case), list(rows), about=about, notes=[*_seen(case), *remarks(case)])


def _rates(case: CaseRows) -> Iterator[dict[str, str]]:
    for name, peer in measured(case).items():
        waits = {each: peer.about.get(each) for each in ("p50", "p95")}
        yield {
            "loader": peer.label,
            "batches/s": ranged(figure(case, name, "rate")),
            "MB/s": ranged(figure(case, name, "rate", scale=case.facts["batch_bytes"] / 1e6)),
            "RayWorkers ÷ it": "" if name == REMOTE else times(compared(case, REMOTE, name)),
            **{f"{each}, ms": "" if wait is None else number(1e3 * wait) for each, wait in waits.items()},
        }


def _shares(case: CaseRows) -> Iterator[dict[str, str]]:
    for name, peer in measured(case).items():
        yield {
            "loader": peer.label,
            "batches/s": ranged(figure(case, name, "rate")),
            "Gbit/s": times(figure(case, name, "rate", scale=8e-9 * case.facts["batch_bytes"])),
            "share": times(share_of_links(case, name)),
        }


def _turns(case: CaseRows) -> Iterator[dict[str, str]]:
    for name, peer in measured(case).items():
        yield {
            "loader": peer.label,
            "turn, ms": ranged(figure(case, name, "seconds", scale=1e3)),
            "÷ workers here": "" if name == LOCAL else times(compared(case, name, LOCAL, "seconds")),
        }


def _seen(case: CaseRows) -> list[str]:
    """What the table shows, as a sentence; none where there are no figures."""
    if not measured(case).get(REMOTE):
        return []
    if case.name in LINKED:
        ours, bare = (_short(share_of_links(case, name)) for name in (REMOTE, BARE))
        return [f"Batches fill {ours} of the links; a bare recv_into fills {bare}."]
    if case.name == TURN:
        turn = _short(compared(case, REMOTE, LOCAL, "seconds"))
        return [f"A turn takes {turn} times as long with RayWorkers as with workers here."]
    others = {
        LOCAL: "that of workers here",
        BARE: "that of a bare recv_into",
        ACTORS: "that of actors which return tensors",
        DATA: "that of Ray Data",
    }
    ratios = {what: compared(case, REMOTE, name) for name, what in others.items()}
    several = [f"{_short(ratio)} times {what}" for what, ratio in ratios.items() if ratio]
    return [f"The rate of RayWorkers is {', '.join(several)}."] if several else []


def _short(value: Spread | None) -> str:
    """The median alone."""
    return times(value).split(" ")[0]
