"""One run of a program in a fresh process: `python -m bench.programs.run`, which `case` starts.

It trains from seed 0 with a progress bar, and writes what it found as JSON.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.machine import use_one_thread
from bench.programs import CACHED, ON_DISK, PROGRAMS
from bench.programs.track import Pass, Track


def run(
    name: str, loader: str, workers: int, epochs: int, folder: Path, track: Track, room: int = 0
) -> dict[str, Any]:
    """What a run came to: a block of `case`. `room`: bytes that a cache in memory may have, if not 0."""
    train = importlib.import_module(f"bench.programs.{name}").train
    make = pkgutil.resolve_name(PROGRAMS[name].loaders[loader])
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="cached-", dir=folder.parent) as disk, track.running():
        if loader == ON_DISK:
            make = partial(make, limit="0.5", path=Path(disk, "values"))
        elif loader == CACHED and room:
            make = partial(make, limit=room)
        loss, predictions = train(folder, make, workers, epochs, track)
    digest = hashlib.sha256(predictions.contiguous().numpy().tobytes()).hexdigest()[:12]
    cache = {"cached": list(track.cached)} if loader in (CACHED, ON_DISK) else {}
    return summary(track.passes, epochs) | cache | {"end": f"loss {loss!r}, predictions {digest}"}


def summary(passes: Sequence[Pass], epochs: int) -> dict[str, Any]:
    """What the passes of so many epochs come to, each of which has as many."""
    several = len(passes) // epochs
    of_epochs = [passes[first : first + several] for first in range(0, len(passes), several)]
    seconds = [sum(each.seconds for each in epoch) for epoch in of_epochs]
    return {
        "batches": sum(each.batches for each in passes),
        "seconds": sum(seconds),
        "waited": sum(each.waited for each in passes),
        "first": seconds[0],
        "epoch": fmean(seconds[1:] or seconds),
        "memory": [max(each.memory for each in epoch) for epoch in of_epochs],
        "idle": sum(each.idle_cpu for each in passes),
    }


def main() -> None:
    name, loader, workers, epochs, folder, room, result = sys.argv[1:]
    use_one_thread()
    # More workers than cores are what some of the runs are for.
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    track = Track(sys.stdout.isatty())
    found = run(name, loader, int(workers), int(epochs), Path(folder), track, int(room))
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
