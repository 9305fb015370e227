"""One run of a program in a fresh process: `python -m bench.programs.run`, which `command` starts.

It trains from seed 0 with a progress bar, and writes what it found as JSON.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.machine import use_one_thread
from bench.programs import PROGRAMS
from bench.programs.track import Track


def run(name: str, loader: str, workers: int, epochs: int, folder: Path, track: Track) -> dict[str, Any]:
    """What a run came to: its passes, the loss, and a digest of the predictions."""
    train = importlib.import_module(f"bench.programs.{name}").train
    torch.manual_seed(0)
    with track.running():
        loss, predictions = train(
            folder, pkgutil.resolve_name(PROGRAMS[name].loaders[loader]), workers, epochs, track
        )
    digest = hashlib.sha256(predictions.contiguous().numpy().tobytes()).hexdigest()[:12]
    found = {"loader": loader, "workers": workers, "epochs": epochs, "loss": loss, "predictions": digest}
    return found | {"passes": [asdict(each) for each in track.passes]}


def main() -> None:
    name, loader, workers, epochs, folder, result = sys.argv[1:]
    use_one_thread()
    # More workers than cores are what some of the runs are for.
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    found = run(name, loader, int(workers), int(epochs), Path(folder), Track(sys.stdout.isatty()))
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
