"""The shape of the package: who may import whom, what stays pure, and what an import does not do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
    "__main__": Room("tools loader errors"),
    "tools": Room("loader insight arguments workers packing reading ipc system errors"),
    "integrations": Room("loader device"),
    "preemption": Room(""),
    "loader": Room(
        "iterators resources caching insight resume arguments consumer workers device scheduling reading "
        "tracing statistics"
    ),
    "iterators": Room(
        "insight resume arguments consumer workers device scheduling reading statistics ipc system errors"
    ),
    "resources": Room("insight resume consumer workers device statistics errors"),
    "caching": Room("insight sharing reading packing system errors statistics", pure="keys"),
    "insight": Room("workers scheduling system statistics", pure="model chooser advice"),
    "resume": Room("arguments workers scheduling reading system errors"),
    "arguments": Room("reading remote workers device scheduling ipc system errors"),
    "remote": Room("workers reading memory ipc system errors statistics", pure="ranks"),
    "consumer": Room("reading workers device scheduling packing memory ipc system errors statistics"),
    "workers": Room("scheduling packing reading memory ipc system errors statistics"),
    "device": Room("packing memory ipc system errors statistics", pure="copies pinning"),
    "scheduling": Room("memory ipc errors", pure="*"),
    "packing": Room("memory ipc system errors"),
    "reading": Room("memory ipc system errors", pure="first_indices"),
    "sharing": Room("memory system"),
    "memory": Room("system errors", pure="pool blocks"),
    "tracing": Room("ipc system statistics errors"),
    "statistics": Room("ipc system", pure="epoch records snapshots"),
    "ipc": Room("system errors", pure="messages decoding"),
    "system": Room(""),
    "errors": Room("", pure="*"),
}
IMPURE = {"zmq", "torch", "numpy", "multiprocessing", "threading", "time", "os", "socket", "select", "mmap"}
#: Lines of a file and of a function, with their docstrings and comments.
LONGEST, LONGEST_FUNCTION = 500, 50

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
    return module.split(".")[0]


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


def siblings(module: str, types: bool = True) -> set[str]:
    """The modules of the package that a module imports."""
    names = imported(module, types)
    names = {name.removeprefix("fastq_loader.") for name in names if "fastq_loader." in name}
    return names & {*LEAVES, *EXTENSIONS}


def test_the_walk_finds_every_room_and_imports_of_every_kind() -> None:
    assert {room_of(module) for module in MODULES} == set(ROOMS)
    assert "memory.pool" in siblings("scheduling.scheduler")
    assert {"reading.collate", "memory.allocator"} <= siblings("workers.main"), "from a import b, c"
    assert "ipc.messages" in siblings("statistics.workers"), "an import for the type checker alone"


def test_imports_point_down() -> None:
    rooms = list(ROOMS)
    for at, room in enumerate(rooms):
        assert set(ROOMS[room].imports.split()) <= set(rooms[at + 1 :]), room
    for module in MODULES:
        room = room_of(module)
        assert {room_of(name) for name in siblings(module)} <= {room, *ROOMS[room].imports.split()}, module


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
        assert not {name.split(".")[0] for name in imported(module, types=False)} & IMPURE, module
        assert siblings(module, types=False) <= set(PURE), module


def test_no_wait_is_limited_to_descriptors_below_1024() -> None:
    limited = {"select.select", "selectors.SelectSelector"}
    for module in MODULES:
        assert not imported(module) & limited, module
        attributes = [node for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute)]
        assert (
            not {ast.unparse(node) for node in attributes if node.attr in ("select", "SelectSelector")}
            & limited
        ), module


def test_every_module_opens_with_its_rules_and_can_be_read_in_one_sitting() -> None:
    for path in FILES:
        module = parsed(path)
        assert (ast.get_docstring(module) or "").splitlines()[0].strip(), path
        lines = len(path.read_text().splitlines())
        assert lines <= LONGEST, f"{path} has {lines} lines: split it where its data flow has a joint"
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                where = f"{path}: {node.name} has {lines} lines"
                assert lines <= LONGEST_FUNCTION, f"{where}: what does its second half do?"


@pytest.mark.processes
def test_importing_it_starts_and_changes_nothing() -> None:
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
        print("nothing happened")
        """,
        warm=not thorough.is_thorough,
    )
    assert result[:3] == (0, "nothing happened\n", "")
