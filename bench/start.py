"""Time to the first batch, by start method and number of workers: each measurement in a fresh process.

Fresh, because a fork server that is up, or modules that a program has imported, belong to what is measured.
The clock starts when the dataset is built and the packages are imported, at the loader's constructor, and
stops with the first batch: starting the workers and sending them the dataset is in it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from bench import child
from bench.peers import PEERS, LoaderSettings
from bench.proc import wait_until_quiet
from bench.results import MomentResult, Repeated

MOMENT = "first batch, in a fresh process"
LIMIT_S = 180.0  # many spawned workers that each import torch on few cores


def measure_start(
    workload: str,
    folder: Path,
    names: Sequence[str],
    settings: LoaderSettings,
    repetitions: int,
    tick: Callable[[str], None],
) -> MomentResult:
    """The peers take turns; `tick` is called after every start with the peer's name."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    failures: dict[str, str] = {}
    for number in range(repetitions):
        for name in names if number % 2 == 0 else reversed(names):
            if name not in failures:
                wait_until_quiet()
                try:
                    seconds[name].append(_seconds(workload, name, folder, settings))
                except RuntimeError as error:
                    failures[name] = str(error)
            tick(name)
    peers = {
        name: Repeated(PEERS[name].label, [] if name in failures else seconds[name], failures.get(name))
        for name in names
    }
    return MomentResult(MOMENT, workload, settings.num_workers, settings.start_method, peers)


def _seconds(workload: str, peer: str, folder: Path, settings: LoaderSettings) -> float:
    """
    Raises:
        RuntimeError: the process failed, with the last line of what it wrote.
    """
    command = child.command("bench.start", workload, peer, folder, settings)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took more than {LIMIT_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"ended with {error.returncode}"]
        raise RuntimeError(lines[-1]) from None
    return float(ended.stdout)


def main() -> None:
    """The fresh process: start the loader, take one batch, print the seconds."""
    asked = child.alone("bench.start")
    started = perf_counter()
    peer = asked.peer(asked.load, asked.settings)
    batches = peer.epoch()
    next(batches)
    print(perf_counter() - started)
    del batches
    peer.close()


if __name__ == "__main__":
    main()
