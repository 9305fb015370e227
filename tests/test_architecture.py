"""The shape of the package: who may import whom, what stays pure, and what an import does not do."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import fastq_loader
from tests.conftest import run_script
from tests.support import thorough

PACKAGE = Path(fastq_loader.__file__).parent


class Room(NamedTuple):
    """A folder of the package, or a module at its top.

    Attributes:
        imports: the rooms that it may import from; all lie below it.
        pure: its modules that import no socket, process, thread or clock; "*" is all of them.
    """

    imports: str
    pure: str = ""


#: Top down: a room stands above everything that it imports.
ROOMS = {
    "__main__": Room("extras.tools"),
    "integrations": Room("extras.frameworks"),
    "images": Room("extras.images"),
    "extras.cached": Room(
        "extras.insight extras.images extras.share extras.tools memory workers packing system errors",
        pure="keys",
    ),
    "extras.tools": Room(
        "extras.insight extras.images extras.profile extras.resume loader epoch options workers packing "
        "reading ipc system errors"
    ),
    "extras.frameworks": Room("extras.prefetcher loader epoch options"),
    "extras.recovery": Room("extras.bad_samples extras.resume epoch options scheduling reading errors"),
    "extras.prefetcher": Room("extras.resume epoch options device packing statistics system errors"),
    "extras.insight": Room(
        "epoch options workers scheduling statistics system errors", pure="model chooser advice snapshots"
    ),
    "extras.resume": Room("loader epoch options workers scheduling reading system errors"),
    "extras.bad_samples": Room("reading statistics packing ipc errors"),
    "extras.samplers": Room("reading errors"),
    "extras.images": Room("extras.transforms device reading memory system errors", pure="crops"),
    "extras.transforms": Room("packing system"),
    "extras.share": Room("memory system"),
    "extras.remote": Room("workers reading memory statistics ipc system errors"),
    "extras.profile": Room("statistics system"),
    "extras.tracing": Room("statistics system errors"),
    "extras": Room(""),
    "loader": Room("epoch options workers device scheduling reading system"),
    "epoch": Room("options consumer workers device scheduling reading statistics ipc system errors"),
    "options": Room("reading workers device scheduling ipc system errors"),
    "consumer": Room(
        "workers device scheduling packing memory ipc system errors statistics", pure="gate outcomes"
    ),
    "workers": Room("device scheduling packing reading memory ipc system errors statistics"),
    "device": Room("packing memory ipc system errors statistics", pure="copies pinning"),
    "scheduling": Room("memory ipc errors", pure="*"),
    "packing": Room("memory ipc system errors"),
    "reading": Room("memory ipc system"),
    "memory": Room("system errors", pure="pool blocks"),
    "statistics": Room("ipc system", pure="records snapshots"),
    "ipc": Room("system errors", pure="messages"),
    "system": Room(""),
    "errors": Room("", pure="*"),
}
#: Where the core imports an extra, inside of a function: for what a user has asked for, and for hints.
ASKED_FOR = {
    "loader": "cached.handover insight insight.auto insight.facts insight.snapshots insight.verdict "
    "profile.profile recovery.replay tracing.trace",
    "workers.reader": "profile.sampler",
    "epoch.base": "insight.hints transforms.transforms",
    "epoch.epoch": "resume.epoch",
}
IMPURE = {"zmq", "torch", "numpy", "multiprocessing", "threading", "time", "os", "socket", "select", "mmap"}
#: Lines of a file, with its docstrings and comments.
LONGEST = 600

FILES = sorted(PACKAGE.rglob("*.py"))
#: Without the package itself: a folder is its `__init__`.
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
    if path.parent != PACKAGE or path.stem != "__init__"
}
EXTENSIONS = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.c")
}


def room_of(module: str) -> str:
    return ".".join(module.split(".")[: 1 + module.startswith("extras.")])


PURE = [
    module
    for module in MODULES
    if (pure := ROOMS[room_of(module)].pure) == "*" or module.rpartition(".")[2] in pure.split()
]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def tree(module: str) -> ast.Module:
    return parsed(MODULES[module])


def _guards_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs: all but what stands under `if TYPE_CHECKING`."""
    yield node
    for child in (
        node.orelse if isinstance(node, ast.If) and _guards_types(node) else ast.iter_child_nodes(node)
    ):
        yield from _nodes(child)


@cache
def imported(module: str, types: bool = True) -> frozenset[str]:
    """Full names of the modules that a module imports: at its top, in a function, or for `types` alone."""
    found = set()
    for node in ast.walk(tree(module)) if types else _nodes(tree(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: a relative import"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


#: Modules that are no folder.
LEAVES = {module for module, path in MODULES.items() if path.stem != "__init__"}


def _of_package(names: Iterable[str]) -> set[str]:
    names = {name.removeprefix("fastq_loader.") for name in names if "fastq_loader." in name}
    return names & {*LEAVES, *EXTENSIONS}


def siblings(module: str, types: bool = True) -> set[str]:
    """The modules of the package that a module imports; of the core without the extras that it imports when
    somebody asks for them."""
    asked_for = {f"extras.{name}" for name in ASKED_FOR.get(module, "").split()}
    return _of_package(imported(module, types)) - asked_for


def test_imports_point_down() -> None:
    rooms = list(ROOMS)
    for at, room in enumerate(rooms):
        assert set(ROOMS[room].imports.split()) <= set(rooms[at + 1 :]), room
    for module in MODULES:
        room = room_of(module)
        assert {room_of(name) for name in siblings(module)} <= {room, *ROOMS[room].imports.split()}, module


@pytest.mark.parametrize("module", ASKED_FOR)
def test_extras_are_imported_when_somebody_asks_for_them(module: str) -> None:
    at_the_top = {
        f"{node.module}.{alias.name}"
        for node in tree(module).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert not any("fastq_loader.extras" in name for name in at_the_top)
    asked_for = {f"extras.{name}" for name in ASKED_FOR[module].split()}
    assert asked_for - {"extras.insight"} <= _of_package(imported(module)), "a list that only shrinks"


#: Attributes with an underscore that belong to torch's loader and iterators, and to Python.
TORCHS = {
    *("_IterableDataset_len_called", "_auto_collation", "_dataset_kind", "_index_sampler", "_iterator"),
    *("_reset", "_shutdown", "_shutdown_workers", "_next_data", "_sampler_iter", "_worker_info"),
    *("_replace", "_make", "_exit", "_send_signal", "_children", "_popen", "_Popen"),
}


def test_no_room_reads_a_private_name_of_another() -> None:
    of_room: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module in MODULES:
        of_room[room_of(module)] |= _private(module, ast.Store)
    for module in MODULES:
        own = of_room[room_of(module)]
        others = set().union(*of_room.values()) - own
        assert not (_private(module, ast.Load) & others) - TORCHS, module


@cache
def _private(module: str, context: type) -> frozenset[str]:
    """The private names that a module defines (`ast.Store`), or reads of anything but `self` and `cls`."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name if context is ast.Store else "")
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, context):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found.add("" if of_self and context is ast.Load else node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and context is ast.Store:
            found.add(node.id)
    return frozenset(name for name in found if name.startswith("_") and not name.startswith("__"))


def test_no_two_modules_import_each_other() -> None:
    left = {module: siblings(module) & set(MODULES) for module in MODULES}
    while free := [module for module, needs in left.items() if not needs & set(left)]:
        for module in free:
            del left[module]
    assert not left, f"imports in a circle: {left}"


def test_a_room_imports_all_that_it_may() -> None:
    used: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module in MODULES:
        used[room_of(module)] |= {room_of(name) for name in siblings(module)} - {room_of(module)}
    assert used == {room: set(allowed.imports.split()) for room, allowed in ROOMS.items()}


def test_what_is_in_c_is_used_by_the_module_that_says_why() -> None:
    for extension in EXTENSIONS:
        users = [module for module in MODULES if extension in siblings(module)]
        assert users == [extension.replace("._", ".")]


def test_pure_modules_import_nothing_that_does_something() -> None:
    for module in PURE:
        names = imported(module, types=False)
        assert not {name.split(".")[0] for name in names} & IMPURE, module
        assert siblings(module, types=False) <= set(PURE), module


def test_every_module_opens_with_its_rules_and_can_be_read_in_one_sitting() -> None:
    for path in FILES:
        module = parsed(path)
        assert (ast.get_docstring(module) or "").splitlines()[0].strip(), path
        lines = len(path.read_text().splitlines())
        assert lines <= LONGEST, f"{path} has {lines} lines: split it where its data flow has a joint"


@pytest.mark.processes
def test_importing_it_starts_and_changes_nothing_and_iterating_imports_no_more_of_it() -> None:
    result = run_script(
        """
        import multiprocessing, os, signal, sys, threading
        import torch, torch.utils.data, torch.multiprocessing
        from torch.utils.data._utils import collate

        def state():
            fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            return {
                "threads": sorted(os.listdir("/proc/self/task")),
                "python threads": threading.active_count(),
                "descriptors": sorted(os.readlink(fd) for fd in fds if os.path.exists(fd)),
                "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
                "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
                "start method": multiprocessing.get_start_method(allow_none=True),
                "collate": dict(collate.default_collate_fn_map),
                "torch threads": torch.get_num_threads(),
                "generator": torch.get_rng_state().tolist(),
                "cuda": torch.cuda.is_initialized(),
            }

        import zmq, msgpack
        before = state()
        import fastq_loader
        after = state()
        assert before == after and not after["cuda"], (before, after)
        modules = set(sys.modules)
        assert len(list(fastq_loader.DataLoader(range(4), num_workers=1))) == 4
        assert not (more := {name for name in sys.modules if "fastq" in name} - modules), more
        print("nothing happened")
        """,
        warm=not thorough.is_thorough,
    )
    assert result[:3] == (0, "nothing happened\n", "")
