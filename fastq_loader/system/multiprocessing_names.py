"""All private names of multiprocessing and of exit handlers that this package uses, each in one place.

Runs in every process. multiprocessing has no public interface to start a child in another way than by its own
start methods, or to go on as a child that other code has forked. A release of Python may take one of these
names away; the import of this module then says which name it was.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import multiprocessing.process
import os
import platform
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import spawn
from multiprocessing.process import BaseProcess
from pkgutil import resolve_name
from typing import Any

#: Names of modules and classes, as `pkgutil.resolve_name` takes them. The last one is used by `packing`.
NAMES = (
    "weakref:finalize._registry",
    "atexit:_clear",
    "multiprocessing.process:BaseProcess._Popen",
    "multiprocessing.process:BaseProcess._bootstrap",
    "multiprocessing.process:_children",
    "multiprocessing.process:_process_counter",
    "multiprocessing.popen_fork:Popen._launch",
    "multiprocessing.spawn:_main",
    "multiprocessing.forkserver:_forkserver._preload_modules",
    "multiprocessing.reduction:ForkingPickler._extra_reducers",
)
#: Attributes of process objects. The first four identify a process: its number, its name and its parent.
ATTRIBUTES = "_identity", "_name", "_parent_name", "_parent_pid", "_popen", "_inheriting"


def check(names: Iterable[str] = NAMES) -> None:
    """Raise ImportError, with the name, if this Python lacks one of these names."""
    for name in names:
        try:
            resolve_name(name)
        except (ImportError, AttributeError) as error:
            version, name = platform.python_version(), name.replace(":", ".")
            text = f"Python {version} has no {name}, which fastq_loader needs: use an older release of Python"
            raise ImportError(f"{text}, or a newer one of fastq_loader") from error


if hasattr(os, "fork"):
    check()


def starter(kind: Any) -> Callable[[Any], Any]:
    """The function by which a class of processes starts them; it returns a handle of the process."""
    start: Callable[[Any], Any] = kind._Popen
    return start


def unnumbered(make: Callable[[], BaseProcess]) -> BaseProcess:
    """Make a process object without a number of its own: the next one gets the number that it would have got
    without this one, and shows it in its name."""
    module: Any = multiprocessing.process
    counter, module._process_counter = module._process_counter, itertools.count()
    try:
        return make()
    finally:
        module._process_counter = counter


def start_by(process: BaseProcess, launch: Callable[[Any], Any]) -> None:
    """Start a process by another function than its class's."""

    def launched(process: Any) -> Any:
        del vars(process)["_Popen"]  # it is not to be pickled for a spawned child
        return launch(process)

    vars(process)["_Popen"] = launched
    process.start()


def handle_of(process: Any) -> Any:
    """The handle of a process; None until it is started."""
    return process._popen


def disown(processes: Iterable[BaseProcess]) -> None:
    """Keep multiprocessing from terminating and joining these processes when this one exits."""
    multiprocessing.process._children.difference_update(processes)  # type: ignore[attr-defined]


def identity_of(process: BaseProcess) -> dict[str, Any]:
    """Number, name and parent of a process object."""
    return {name: vars(process)[name] for name in ATTRIBUTES[:4]}


def become(process: Any, identity: dict[str, Any], sentinel: int) -> int:
    """In a forked child: go on as a process with this identity. Return its exit code.

    Args:
        process: the process object.
        identity: from `identity_of`.
        sentinel: descriptor that becomes readable when the parent ends.
    """
    vars(process).update(identity)
    code: int = process._bootstrap(parent_sentinel=sentinel)
    return code


def become_pickled(descriptor: int, sentinel: int) -> int:
    """In a forked child: go on as the process whose pickle is behind a descriptor. Return its exit code."""
    code: int = spawn._main(descriptor, sentinel)
    return code


def forget_exit_handlers() -> None:
    """Drop the exit handlers of an interpreter that only forks. They clean up what it has made (a folder, a
    measurement), which its children share; these call the handlers that they register themselves."""
    finalizers, clear = map(resolve_name, NAMES[:2])
    for finalizer in finalizers:
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # the next one registers
    clear()
    atexit.register(logging.shutdown)  # flushes handlers that a child adds


def preloaded() -> list[str]:
    """The modules that `multiprocessing.set_forkserver_preload` has named."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    return list(server._preload_modules)


@contextlib.contextmanager
def importing_main() -> Iterator[None]:
    """Refuse to start processes in the block, in which a `__main__` without a guard is imported."""
    process: Any = multiprocessing.current_process()
    process._inheriting = True
    try:
        yield
    finally:
        del process._inheriting
