"""The command line: `python -m fastq_loader tune module:make_loader` finds the fastest setting, `compare`
compares with torch's loader; `profile` shows the slow lines of a dataset; `replay` loads a batch again;
`doctor` checks this machine. TROUBLESHOOTING.md, in the folder of this package, covers other problems.

Runs in a process of its own, which is the consumer of the loader. As with every `python -m`, modules are
searched for in the current folder, too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import inspect
import io
import json
import os
import pdb
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fastq_loader.errors import shorten
from fastq_loader.extras.profile.profile import check_pages
from fastq_loader.extras.resume.stateful_dataloader import StatefulDataLoader
from fastq_loader.extras.tools import comparing, doctor, trials
from fastq_loader.extras.tools.tuning import checked, tune
from fastq_loader.loader import DataLoader
from fastq_loader.system.terminal import printable


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = _parser()
    given = [*(sys.argv[1:] if argv is None else argv), "--"]
    end = given.index("--")
    arguments = vars(parser.parse_args(given[:end]))
    run = arguments.pop("run", None)
    if run is None:
        parser.print_help()
        return 0
    before = sys.argv
    try:
        if "loader" in arguments:
            # The module, and workers that import it again, may parse the arguments of the program.
            sys.argv = [arguments["loader"].partition(":")[0], *given[end + 1 : -1]]
            arguments["loader"] = _loader_of(arguments["loader"])
        status: int = run(**arguments)
    except WrongUse as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    finally:
        sys.argv = before
    return status


def _loader_of(name: str) -> Any:
    try:
        named = find(name)
        return _made(name, named) if callable(named) else named
    except SystemExit as left:
        if left.code:
            sys.stderr.write(
                f"{name!r} has ended the program. Does it parse arguments? It gets those after --\n"
            )
        raise


def _parser() -> argparse.ArgumentParser:
    """The options of each command have the names of the arguments of its function."""
    try:
        version = metadata.version("fastq_loader")
    except metadata.PackageNotFoundError:
        version = "in a folder, not installed"
    version = f"fastq_loader {version}, torch {torch.__version__}, Python {platform.python_version()}"
    parser = argparse.ArgumentParser(prog="python -m fastq_loader", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers()
    loader, step = argparse.ArgumentParser(add_help=False), argparse.ArgumentParser(add_help=False)
    loader.add_argument("loader", metavar="MODULE:NAME", help="a DataLoader, or a function that makes one")
    parser.epilog = "Arguments after -- go to the module, which finds them in sys.argv."
    step.add_argument("--step-seconds", type=float, default=0.0, help="of a training step")

    tune = commands.add_parser("tune", parents=[loader, step], help="find the fastest setting by trying")
    tune.set_defaults(run=_tune)
    tune.add_argument("--seconds", type=float, default=30, help="to spend on it (default: %(default)s)")
    tune.add_argument("--start-methods", nargs="+", metavar="METHOD", help="fork, spawn, forkserver")
    tune.add_argument("--schedules", nargs="+", metavar="SCHEDULE", help="round_robin, dynamic")
    tune.add_argument("--max-workers", type=int, help="the most to try")
    tune.add_argument("--quiet", action="store_true", help="show no progress")

    compare = commands.add_parser("compare", parents=[loader, step], help="compare with torch's loader")
    compare.set_defaults(run=_compare)
    compare.add_argument("--epochs", type=int, default=1, help="of each pass (default: %(default)s)")
    compare.add_argument("--batches", type=int, help="of each epoch, at most; all if it is not given")
    compare.add_argument("--quiet", action="store_true", help="show no progress")

    profile = commands.add_parser("profile", parents=[loader], help="show which lines of a dataset take time")
    profile.set_defaults(run=_profile)
    profile.add_argument("--batches", type=int, help="to load, at most; an epoch if it is not given")
    profile.add_argument("--html", metavar="FILE", help="write a page with all calls")
    profile.add_argument("--speedscope", metavar="FILE", help="write a file for https://www.speedscope.app")

    replay = commands.add_parser("replay", parents=[loader], help="load a batch again, in this process")
    replay.set_defaults(run=_replay)
    replay.add_argument("state", metavar="STATE", help="a file with the state_dict() of that epoch")
    replay.add_argument("--batch", type=int, required=True, help="its number in the epoch, from 0 on")
    replay.add_argument(
        "--pdb", dest="debug", action="store_true", help="stop in __getitem__ of its first sample"
    )
    replay.add_argument("--save", metavar="FILE", help="write the batch with torch.save")

    check = commands.add_parser("doctor", help="check this machine, and print what to change")
    check.set_defaults(run=doctor.report)
    return parser


def _tune(loader: Any, quiet: bool, **arguments: Any) -> int:
    with _typed():
        checked(loader, **arguments)
    print(tune(loader, **arguments, progress=not quiet))
    return 0


def _compare(loader: Any, quiet: bool, **arguments: Any) -> int:
    with _typed():
        comparing.checked(loader, **arguments)
    print(found := comparing.compare(loader, **arguments, progress=not quiet))
    return 0 if found.equal else 1


def _profile(loader: Any, batches: int | None, html: str | None, speedscope: str | None) -> int:
    with _typed():
        trials.check_loader(loader, comparing.TORCHS, "profile needs a DataLoader")
    if batches is not None and batches < 1:
        raise WrongUse(f"--batches {batches} must be 1 or more")
    with _typed():
        for page in filter(None, (html, speedscope)):
            check_pages()
            open(page, "ab").close()  # an error of it is raised before anything is loaded
    if not isinstance(loader, DataLoader):
        print("This is torch's DataLoader: fastq_loader's is in its place here, with the same arguments.\n")
        loader = comparing.made_of(loader, DataLoader, {})
    with loader, loader.profile() as profile:
        try:
            for _ in islice(loader, batches):
                pass
        finally:  # the samples are shown before an error
            print(profile, flush=True)
            if html:
                profile.html(html)
            if speedscope:
                profile.speedscope(speedscope)
    return 0


def _replay(loader: Any, state: str, batch: int, debug: bool, save: str | None) -> int:
    if not isinstance(loader, StatefulDataLoader):
        kind = type(loader)
        raise WrongUse(f"this is a {kind.__module__}.{kind.__name__}, not a fastq_loader.StatefulDataLoader")
    read = _read_state(state)
    if not read:
        raise WrongUse(f"STATE {state!r} is empty: save the result of state_dict() in mid-epoch")
    with _typed(f"STATE {state!r}: "):
        copy.copy(loader).load_state_dict(read, ignore=["num_workers"])
    if debug:
        _stop_in_first_sample(loader.dataset)
    try:
        found = loader.replay(batch, state=read)
    except (IndexError, TypeError, ValueError) as error:
        if hasattr(error, "batch"):  # it comes from user code
            raise
        raise WrongUse(str(error)) from error
    if save:
        torch.save(found, save)
    for path, leaf in pytree.tree_flatten_with_path(found)[0]:
        print(printable(f"batch{pytree.keystr(path)}: {_described(leaf)}"))
    return 0


def _read_state(path: str) -> Any:
    """A state from a file of JSON, or one that torch.save wrote."""
    try:
        with open(path, "rb") as file:
            data = file.read()
        is_json = data.lstrip()[:1] in (b"{", b"")
        return json.loads(data) if is_json else torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # torch.load also raises the errors of zipfile and pickle
        text = str(error).partition("\n")[0] or type(error).__name__
        raise WrongUse(f"STATE {path!r} cannot be read as JSON or with torch.load: {text}") from error


def _stop_in_first_sample(dataset: Any) -> None:
    """Stop in the debugger when the first sample is read."""
    name = "__getitems__" if hasattr(dataset, "__getitems__") else "__getitem__"
    kind, method = type(dataset), getattr(type(dataset), name)

    def stop(self: Any, index: Any) -> Any:
        setattr(kind, name, method)
        shell = _Debugger()
        found = shell.runcall(method, self, index)
        if shell.left:
            raise SystemExit(0)
        return found

    setattr(kind, name, stop)


class _Debugger(pdb.Pdb):
    """Python's debugger. `runcall` returns None after its command `quit`, which sets `left`."""

    left = False

    def set_quit(self) -> None:
        self.left = True
        super().set_quit()


def _described(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return shorten(leaf)
    about = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    if leaf.numel() == 0 or not leaf.dtype.is_floating_point:
        return about
    finite = leaf[leaf.isfinite()]
    extent = f", from {finite.min():.4g} to {finite.max():.4g}" if finite.numel() else ""
    return f"{about}{extent}, {leaf.numel() - finite.numel()} values not finite"


class WrongUse(Exception):
    """Wrong arguments on the command line."""


@contextlib.contextmanager
def _typed(about: str = "") -> Iterator[None]:
    """Raise errors of the block as errors of the command line."""
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise WrongUse(f"{about}{error}") from error


def find(name: str) -> Any:
    """Resolve `module:name`.

    Raises:
        WrongUse: the name is malformed, or there is no such module, or no such attribute in it.
        Exception: whatever the import of the module raises.
    """
    module, _, path = name.partition(":")
    if not path or not all(map(str.isidentifier, module.split("."))):
        raise WrongUse(f"{name!r} must be MODULE:NAME, as in my_training.data:make_loader, and not a path")
    try:
        return attrgetter(path)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports one that does not
        hint = "; leave out '.py'" if module.endswith(".py") else ""
        raise WrongUse(f"{name!r}: {error}{hint}") from error
    except AttributeError as error:
        if module not in sys.modules:
            raise
        raise WrongUse(f"{name!r}: {error}") from error


def _made(name: str, function: Any) -> Any:
    """The result of a function, which must need no arguments, and return a loader."""
    with contextlib.suppress(ValueError):  # a function in C has no signature
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise WrongUse(f"{name!r} is called without arguments, and that fails: {error}") from error
    if (made := function()) is None:
        raise WrongUse(f"{name!r} returned None in place of a loader")
    return made


def run() -> int:
    """Run `main`; its output may go to a pipe whose reader leaves early, such as `head`."""
    try:
        try:
            status = main()
        except SystemExit:  # of argparse, which may have printed, too
            print(end="", flush=True)
            raise
        print(end="", flush=True)
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more at its exit
            return 128 + signal.SIGPIPE
        raise  # it comes from user code
    return status
