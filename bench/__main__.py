"""`python -m bench`, from the repository root: what a command line asks for."""

from __future__ import annotations

import argparse
import compileall
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import machine
from bench.arguments import parse
from bench.digest import PACKAGE, ROOT
from bench.peers import PEERS
from bench.run import perform
from bench.timing import against, device, steady, training
from bench.workloads import all_workloads
from bench.workloads.ready_made import SHAPES
from bench.workloads.trainings import trainings

NO_GPU = "Nothing was measured, because there is no GPU to measure: torch.cuda.is_available() is False."


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments is None:
        arguments = sys.argv[1:]
    # Else each process compiles what it imports, on the clock, where PYTHONDONTWRITEBYTECODE is set.
    compileall.compile_dir(ROOT / PACKAGE, quiet=1)
    if arguments[:1] == ["program"]:
        from bench.programs.command import main as run_programs  # brings pillow and rich only for those

        return run_programs(arguments[1:])
    options = parse(arguments)
    if options.list:
        return _list()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        return 0
    if not (options.train and options.device == "cuda"):  # a training has torch's own number
        machine.use_one_thread()
    # More workers than cores are what some runs are for.
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    with tempfile.TemporaryDirectory(prefix="fastq-bench-") as folder:
        return _measure(options, Path(folder))


def _measure(options: argparse.Namespace, folder: Path) -> int:
    here = machine.describe()
    if options.readme is not None:
        from bench.output import readme

        ours = readme.measure_and_compare if options.again else readme.measure_and_write
        return ours(options, here, folder)
    if options.train:
        device_of = training.Cuda() if options.device == "cuda" else training.Host()
        here |= device_of.describe()
        return perform(options, here, list(training.cases(options, device_of, here, folder)))
    if options.device is not None:
        gpu = device.CudaDevice()
        return perform(options, here | gpu.describe(), list(device.cases(options, gpu, here["cores"])))
    found = (steady.cases if options.against is None else against.cases)(options, folder)
    return perform(options, here, list(found))


def _list() -> int:
    tables = {
        "workloads": {each.name: each.description for each in all_workloads().values()},
        "peers": {name: of.label for name, of in PEERS.items()},
        "workloads with --device cuda": {shape.name: shape.description for shape in SHAPES.values()},
        "peers with --device cuda": device.ARMS,
        "workloads with --device cuda --train": {
            name: each.workload.description for name, each in trainings(small=False).items()
        },
        "peers with --device cuda --train": training.LANES,
    }
    for title, entries in tables.items():
        print(f"{title}:", *(f"  {name:19} {meaning}" for name, meaning in entries.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
