"""Cases of the bench whose blocks are whole programs: a loader trains in a fresh process for each of them.

A block has the `seconds` of all passes over data, and those `waited` for them in `iter()` and `next()`;
`first`, seconds of the first epoch, and `epoch`, the mean of the others; `cached`, of a cache its values, the
samples in all, its bytes and the most of them that it may have; `memory`, the peak of each epoch in bytes;
`idle`, seconds of CPU that workers of the loader which was not being read used; and in `end` what the program
came to, its loss and predictions, to the last digit.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.output.figures import BASELINE
from bench.output.layout import say
from bench.peers import Unsupported
from bench.programs import LABELS, PROGRAMS, Program, data, limits
from bench.timing.rounds import Case, Lane, Plan, Row

KIND = "program"
LONGEST_S = 600.0
#: Bytes of data beyond what a program needs: an eighth of the table of images.
HEADROOM = 100_000_000


@dataclass(eq=False, kw_only=True)
class ProgramLane(Lane):
    """A program with one loader.

    Attributes:
        arguments: of `bench.programs.run`, but for the file of the result.
        limit: bytes of data that each process may have; 0: any number. `limited`: the same in words.
    """

    arguments: Sequence[str]
    limit: int
    limited: str

    def block(self, part: str) -> list[Row]:
        say(f"{self.arguments[0]} with {self.label}")
        with tempfile.NamedTemporaryFile(suffix=".json") as result:
            status = limits.run(_command([*self.arguments, result.name]), self.limit)
            if status:
                ended = "was killed" if status in (-9, 128 + 9) else f"ended with {status}"
                raise Unsupported(f"the run {ended}. {self.limited}")
            return [json.loads(Path(result.name).read_text())]


def cases(names: Sequence[str], options: Namespace, folder: Path) -> Iterator[Case]:
    """Those of these programs, one for each number of workers; their files are in `folder`.

    `options` are those of `bench.programs.command`.
    """
    for name in names:
        for workers in options.workers or PROGRAMS[name].workers:
            plan = partial(_plan, name, workers, options, folder)
            yield Case(KIND, name, workers, "fork", options.rounds * PROGRAMS[name].turns, plan)


def files(folder: Path, name: str, program: Program, few: bool) -> Path:
    """Where the program's files are; they are written once."""
    own = folder / (f"{name}-few" if few else name)
    if not own.exists():
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as unfinished:
            written = Path(unfinished, name)
            written.mkdir()
            getattr(data, program.data)(written, **(program.few if few else {}))
            written.rename(own)
    return own


def _plan(name: str, workers: int, options: Namespace, folder: Path) -> Plan:
    program = PROGRAMS[name]
    own, epochs = files(folder, name, program, options.few), options.epochs or program.epochs
    limit, room, limited = int((options.limit or 0) * 1e6), 0, ""
    if program.part and options.limit != 0:
        need = _needed(name, program, own)
        limit = limit or need + HEADROOM
        room = max(1, limit - need)
        table = sum(file.stat().st_size for file in own.iterdir())
        limited = f": it needs {need / 1e6:,.0f} without its table of {table / 1e6:,.0f} MB"
    if limit:
        limited = f"each process may have {limit / 1e6:,.0f} MB of data (RLIMIT_DATA){limited}"
    lanes = [
        ProgramLane(
            *(loader, LABELS.get(loader, loader), LONGEST_S),
            arguments=[name, loader, str(workers), str(epochs), str(own), str(room)],
            limit=limit,
            limited=limited,
        )
        for loader in program.loaders
        if options.loader in (None, loader)
    ]
    about = f"{program.about}, on {device() or 'the CPU'}" if program.on_device else program.about
    facts: Row = {"description": about, "epochs": epochs, "notes": [limited] if limited else []}
    return Plan(facts, lanes)


def device() -> str:
    """The name of the accelerator that programs train on; "" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _needed(name: str, program: Program, own: Path) -> int:
    """Bytes of data that a process of the program needs without its table.

    Raises:
        SystemExit: the program fails without a limit, and has said why.
    """
    say(f"{name} without its table, to see how much memory it needs")
    with tempfile.TemporaryDirectory(prefix="part-", dir=own.parent) as part:
        getattr(data, program.part)(own, Path(part))
        arguments = [name, BASELINE, str(max(program.workers)), "1", part, "0", os.devnull]
        need = limits.needed(_command(arguments))
    if not need:
        sys.exit("python -m bench program: the run without a limit failed")
    return need


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "bench.programs.run", *arguments]
