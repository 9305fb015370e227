"""On the shell: `python -m fastq_loader tune module:make_loader` prints what `tune` finds.

Runs in a process of its own, which is the consumer of the loader that is made. The folder that it is started
in is searched for modules, as `python -m` does.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from fastq_loader.tuning import checked, tune


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastq_loader", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("tune", help="find the fastest setting of a loader by trying")
    command.add_argument("loader", metavar="MODULE:NAME", help="a DataLoader, or a function that makes one")
    command.add_argument("--seconds", type=float, default=30, help="to spend on it (default: %(default)s)")
    command.add_argument("--step-seconds", type=float, default=0.0, help="of a training step")
    command.add_argument("--start-methods", nargs="+", metavar="METHOD", help="fork, spawn, forkserver")
    command.add_argument("--schedules", nargs="+", metavar="SCHEDULE", help="round_robin, dynamic")
    command.add_argument("--max-workers", type=int, help="the most to try")
    command.add_argument("--quiet", action="store_true", help="show no progress")
    options = parser.parse_args(argv)
    try:
        named = find(options.loader)
    except NotFound as error:
        command.error(str(error))
    loader = named() if callable(named) else named
    arguments = loader, options.step_seconds, options.seconds
    names = {"start_methods": options.start_methods, "schedules": options.schedules}
    try:
        checked(*arguments, **names, max_workers=options.max_workers)
    except (TypeError, ValueError) as error:
        command.error(str(error))
    try:
        found = tune(*arguments, **names, max_workers=options.max_workers, progress=not options.quiet)
    except KeyboardInterrupt:
        return 130
    print(found)
    return 0


class NotFound(Exception):
    """A name leads nowhere."""


def find(name: str) -> Any:
    """What `module:name` means.

    Raises:
        NotFound: it is no such name; or there is no such module, or no such thing in it.
        Exception: what the module raised.
    """
    module, _, path = name.partition(":")
    if not module or not path:
        raise NotFound(f"{name!r} must be MODULE:NAME, as in my_training.data:make_loader")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports what is not
        raise NotFound(f"module {module!r} of {name!r} was not found: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise NotFound(f"module {module!r} has no {path!r}")
        found = getattr(found, part)
    return found


if __name__ == "__main__":
    sys.exit(main())
