"""How results are shown: the table on the console and the JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.results import BASELINE, Spread, WorkloadResult, rate, rate_ratio, within_noise

PIPED_WIDTH = 130  # rich assumes 80 columns when there is no terminal, and the table is wider
RATIO_WIDTH = len("10.00 (10.00-10.00) within noise")  # on one line, also where other columns have to fold

LEGEND = (
    "batches/s: median block (slowest-fastest). / torch: ratio of the medians (lowest-highest in a round),\n"
    "'within noise' when the rounds disagree on which is faster. PSS: peak of consumer and workers;\n"
    "shm: peak of the machine's shared memory, with what waits there and is mapped by nobody."
)


def console() -> Console:
    """Standard output: as wide as the terminal, or wide enough for the table when there is none."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=PIPED_WIDTH)


def machine_line(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']}, {machine['system']}\n"
        f"{versions}, {machine['date']}"
    )


def table(results: Sequence[WorkloadResult]) -> Table:
    """One row for every workload and peer."""
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column("workload")
    grid.add_column("batch", justify="right")
    grid.add_column("peer")
    grid.add_column("batches/s", justify="right")
    grid.add_column("/ torch", min_width=RATIO_WIDTH)
    grid.add_column("PSS MB", justify="right")
    grid.add_column("/ torch", justify="right")
    grid.add_column("shm MB", justify="right")
    for result in results:
        baseline = result.peers[BASELINE]
        for name, peer in result.peers.items():
            memory, base = peer.peak, baseline.peak
            assert memory is not None
            assert base is not None
            grid.add_row(
                result.name,
                _bytes(result.batch_bytes),
                name,
                _spread(rate(peer.blocks)),
                "" if name == BASELINE else _ratio(rate_ratio(peer.blocks, baseline.blocks)),
                f"{memory.pss / 1e6:,.0f}",
                "" if name == BASELINE else f"{memory.pss / base.pss:.2f}",
                f"{max(memory.shmem, 0) / 1e6:,.0f}",
            )
        grid.add_section()
    return grid


def _spread(spread: Spread) -> str:
    digits = 0 if spread.median >= 100 else 1
    return f"{spread.median:,.{digits}f} ({spread.low:,.{digits}f}-{spread.high:,.{digits}f})"


def _ratio(ratio: Spread) -> str:
    text = f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
    return f"{text} within noise" if within_noise(ratio) else text


def _bytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
