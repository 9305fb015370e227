"""What runs of a program came to, as a table, and whether its loaders agree. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from bench.output.figures import Spread, ratio, spread
from bench.output.layout import Table, number, ranged, worker_count
from bench.programs import PROGRAMS

Run = dict[str, Any]
"""What `bench.programs.run` writes, and in `limit` how memory was limited."""

BASELINE = "torch"
SAME = "in every run, to the bit"
DIFFERENT = "RUNS DIFFER"
ABOUT = """Each run in a fresh process, the loaders in turn. seconds: of all passes over data, workers' starts
included. waited: in iter() and next(). epoch: the mean of all but the first. memory: peak of each epoch, PSS
of all processes. idle: CPU that workers of the loader which is not being read used."""


def measures(run: Run) -> dict[str, Any]:
    """What a run came to; `memory` has the peak of each epoch."""
    passes = pd.DataFrame(run["passes"])
    epochs = passes.groupby(passes.index // (len(passes) // run["epochs"]))
    seconds = epochs["seconds"].sum()
    return {
        "seconds": seconds.sum(),
        "waited": passes["waited"].sum(),
        "epoch": (seconds[1:] if len(seconds) > 1 else seconds).mean(),
        "memory": epochs["memory"].max().tolist(),
        "idle": passes["idle_cpu"].sum(),
    }


def table(name: str, runs: Sequence[Run]) -> Table:
    """The runs of a program: a row for each loader and number of workers."""
    found = {key: pd.DataFrame(map(measures, of)) for key, of in _groups(runs, "workers", "loader").items()}
    rows = []
    for (workers, loader), own in found.items():
        base = found.get((workers, BASELINE)) if loader != BASELINE else None
        rows.append(
            {
                "loader": loader,
                "workers": str(workers),
                "seconds": _figure(spread(own["seconds"])),
                "torch's ÷ it": _figure(ratio(base["seconds"], own["seconds"])) if base is not None else "",
                "waited, s": _figure(spread(own["waited"])),
                "epoch, ms": _figure(spread(own["epoch"]), 1e3),
                "memory, MB": ", ".join(number(peak / 1e6) for peak in _few(_peaks(own))),
                "idle, ms": number(own["idle"].median() * 1e3),
            }
        )
    notes = [*_ends(runs), *_beside_none(found), *(_flat(found) if PROGRAMS[name].part else ())]
    notes += dict.fromkeys(f"{run['loader']}: {run['limit']}" for run in runs if run.get("limit"))
    return Table(f"{name}: {PROGRAMS[name].about}", rows, 2, notes=notes)


def agree(runs: Sequence[Run]) -> bool:
    """Whether all loaders with as many workers came to the same loss and predictions, to the bit.

    Another number of workers is another order: torch draws a seed in every epoch where there are none, and
    once where they stay.
    """
    return all(len(set(map(_end, same))) == 1 for same in _groups(runs, "workers").values())


def _end(run: Run) -> str:
    return f"loss {run['loss']!r}, predictions {run['predictions']}"


def _ends(runs: Sequence[Run]) -> Iterator[str]:
    """What the runs came to, to the last digit."""
    for (workers,), same in _groups(runs, "workers").items():
        if agree(same):
            yield f"{worker_count(workers)}: {_end(same[0])}, {SAME}"
        else:
            ends = dict.fromkeys(f"{run['loader']}: {_end(run)}" for run in same)
            yield f"{worker_count(workers)}: {DIFFERENT}: {'; '.join(ends)}"


def _groups(runs: Sequence[Run], *keys: str) -> dict[tuple[Any, ...], list[Run]]:
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run["workers"]):
        found.setdefault(tuple(run[key] for key in keys), []).append(run)
    return found


def _figure(value: Spread | None, scale: float = 1) -> str:
    """With its range, where there was more than one round."""
    alone = value is not None and value.low == value.high
    return number(value.median * scale) if alone and value else ranged(value, scale)


def _few(values: list[float]) -> list[float]:
    """Of many epochs the first, the middle one and the last."""
    return values if len(values) < 6 else [values[0], values[len(values) // 2], values[-1]]


def _peaks(runs: pd.DataFrame) -> list[float]:
    """Peak memory of each epoch, the median of the rounds."""
    return list(pd.DataFrame(runs["memory"].tolist()).median())


def _beside_none(found: Mapping[tuple[Any, ...], pd.DataFrame]) -> Iterator[str]:
    """Epochs with workers as multiples of those without."""
    for (workers, loader), own in found.items():
        none = found.get((0, loader))
        if workers and none is not None:
            times = _figure(ratio(own["epoch"], none["epoch"]))
            yield f"{loader}, {worker_count(workers)}: an epoch takes {times} times as long as without"


def _flat(found: Mapping[tuple[Any, ...], pd.DataFrame]) -> Iterator[str]:
    for (_, loader), own in found.items():
        peaks = _peaks(own)
        yield f"{loader}: peak memory of the last epoch is {peaks[-1] / peaks[0]:.3f} times that of the first"
