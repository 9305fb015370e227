"""What runs of a program came to, as a table, and whether its loaders agree. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from bench.output.figures import Spread, ratio, spread
from bench.output.tables import Table
from bench.output.words import number, ranged, worker_count
from bench.programs import PROGRAMS

Run = dict[str, Any]
"""What `bench.programs.run` writes, and in `limit` how memory was limited."""

BASELINE = "torch"
SAME = "losses and predictions are the same to the bit"
DIFFERENT = "LOSSES OR PREDICTIONS DIFFER"
ABOUT = """Each run in a fresh process, the loaders in turn. seconds: of all passes over data, workers' starts
included. waited: in iter() and next(). epoch: the mean of all but the first. memory: peak of each epoch, PSS
of all processes. idle: CPU that workers of the loader which is not being read used."""


class Series(dict[str, "pd.Series[float]"]):
    """Measures of the runs of one loader with one number of workers, by round."""

    def __init__(self, runs: Sequence[Run]) -> None:
        passes = [pd.DataFrame(run["passes"]) for run in runs]
        first = [len(each) // run["epochs"] for each, run in zip(passes, runs, strict=True)]
        super().__init__(
            seconds=pd.Series([each["seconds"].sum() for each in passes]),
            waited=pd.Series([each["waited"].sum() for each in passes]),
            idle=pd.Series([each["idle_cpu"].sum() for each in passes]),
            epoch=pd.Series(
                [
                    each["seconds"][start:].sum() / max(1, run["epochs"] - 1)
                    for each, start, run in zip(passes, first, runs, strict=True)
                ]
            ),
        )
        peaks = [
            each["memory"].groupby(each.index // start).max()
            for each, start in zip(passes, first, strict=True)
        ]
        self.memory: list[float] = pd.DataFrame(peaks).median().tolist()  # of each epoch


def table(name: str, runs: Sequence[Run]) -> Table:
    """The runs of a program: a row for each loader and number of workers."""
    groups = _groups(runs, "workers", "loader")
    series = {key: Series(several) for key, several in groups.items()}
    rows = []
    for (workers, loader), own in series.items():
        base = series.get((workers, BASELINE)) if loader != BASELINE else None
        ends = {(run["loss"], run["predictions"]) for run in groups[workers, loader]}
        loss, predictions = ends.pop() if len(ends) == 1 else ("they differ", "")
        rows.append(
            {
                "loader": loader,
                "workers": str(workers),
                "seconds": _figure(spread(own["seconds"])),
                "torch's ÷ it": _figure(ratio(base["seconds"], own["seconds"])) if base else "",
                "waited, s": _figure(spread(own["waited"])),
                "epoch, ms": _figure(spread(own["epoch"]), 1e3),
                "memory, MB": ", ".join(number(peak / 1e6) for peak in _few(own.memory)),
                "idle, ms": number(own["idle"].median() * 1e3),
                "loss": str(loss),
                "predictions": predictions,
            }
        )
    notes = [SAME if agree(runs) else DIFFERENT, *_beside_none(series), *_flat(name, series)]
    notes += dict.fromkeys(f"{run['loader']}: {run['limit']}" for run in runs if run.get("limit"))
    return Table(f"{name}: {PROGRAMS[name].about}", rows, 2, notes=notes)


def agree(runs: Sequence[Run]) -> bool:
    """Whether all loaders with as many workers came to the same loss and predictions, to the bit.

    Another number of workers is another order: torch draws a seed in every epoch where there are none, and
    once where they stay.
    """
    ends = [{(run["loss"], run["predictions"]) for run in same} for same in _groups(runs, "workers").values()]
    return all(len(each) == 1 for each in ends)


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


def _beside_none(series: dict[tuple[Any, ...], Series]) -> list[str]:
    """Epochs with workers as multiples of those without."""
    found: dict[str, list[str]] = {}
    for (workers, loader), own in series.items():
        if workers and (none := series.get((0, loader))):
            times = _figure(ratio(own["epoch"], none["epoch"]))
            found.setdefault(loader, []).append(f"{times} x with {worker_count(workers)}")
    return [f"{loader}, an epoch beside one without workers: {', '.join(of)}" for loader, of in found.items()]


def _flat(name: str, series: dict[tuple[Any, ...], Series]) -> list[str]:
    if not PROGRAMS[name].limit:
        return []
    return [
        f"{loader}, peak memory of the last epoch / of the first: {own.memory[-1] / own.memory[0]:.3f}"
        for (_, loader), own in series.items()
    ]
