"""The shape of the package: who may import whom, what stays pure, and what an import does not do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fastq_loader
from tests.conftest import run_script

PACKAGE = Path(fastq_loader.__file__).parent

#: Imports point down this list.
ORDER = (
    "loader",
    "serial",
    "iterator",
    "arguments",
    "runtime",
    "sampling",
    "engine",
    "loop",
    "delivery",
    "staging",
    "link",
    "inbox",
    "crew",
    "processes",
    "starting",
    "stopping",
    "nursery",
    "children",
    "standard_streams",
    "worker",
    "worker_setup",
    "tasks",
    "cargo",
    "fetch",
    "collate",
    "datapipes",
    "unpacking",
    "specs",
    "packing",
    "extents",
    "allocator",
    "streaming",
    "arena",
    "forks",
    "claims",
    "transport",
    "device",
    "pinning",
    "copies",
    "scheduler",
    "audit",
    "backlog",
    "invariants",
    "line",
    "owed",
    "roster",
    "states",
    "window",
    "patience",
    "events",
    "messages",
    "ring",
    "space",
    "blocks",
    "demand",
    "transforms",
    "tensors",
    "pickling",
    "seeding",
    "statistics",
    "process_id",
    "interrupts",
    "system",
    "errors",
)
PURE = (
    "statistics",
    "pinning",
    "copies",
    "scheduler",
    "audit",
    "backlog",
    "invariants",
    "line",
    "owed",
    "roster",
    "states",
    "window",
    "patience",
    "events",
    "messages",
    "ring",
    "space",
    "blocks",
    "demand",
)
IMPURE = {"zmq", "torch", "numpy", "multiprocessing", "threading", "time", "os", "socket", "select", "mmap"}
LONGEST = 420  # lines: a file stays readable in one sitting

FILES = sorted(PACKAGE.glob("*.py"))
EXTENSIONS = {path.stem for path in PACKAGE.glob("*.c")}
MODULES = [path.stem for path in FILES if path.stem != "__init__"]


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(), filename=module)


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
def imported(module: str) -> frozenset[str]:
    """Full names of the modules that a module imports, at its top or inside a function."""
    found = set()
    for node in _nodes(tree(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: a relative import"
            assert node.module is not None
            if node.module == "fastq_loader":
                found.update(f"fastq_loader.{alias.name}" for alias in node.names)
            else:
                found.add(node.module)
    return frozenset(found)


def siblings(module: str) -> set[str]:
    return {name.split(".")[1] for name in imported(module) if name.startswith("fastq_loader.")}


def test_the_walk_finds_imports_of_every_kind() -> None:
    assert "blocks" in siblings("scheduler")
    assert {"pickling", "allocator"} <= siblings("worker"), "from fastq_loader import a, b"
    assert "loader" not in siblings("iterator"), "an import for the type checker alone"


def test_the_order_lists_the_modules_and_no_others() -> None:
    assert sorted(ORDER) == sorted(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_the_order(module: str) -> None:
    below = ORDER[ORDER.index(module) + 1 :]
    assert siblings(module) <= {*below, *EXTENSIONS}


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_what_is_in_c_is_used_by_the_module_that_says_why(extension: str) -> None:
    users = [module for module in MODULES if extension in siblings(module)]
    assert users == [extension.removeprefix("_")]


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_nothing_that_does_something(module: str) -> None:
    assert not {name.split(".")[0] for name in imported(module)} & IMPURE
    assert siblings(module) <= {*PURE, "errors"}
    assert not {name.split(".")[0] for name in imported("errors")} & IMPURE


@pytest.mark.parametrize("module", MODULES)
def test_no_wait_is_limited_to_descriptors_below_1024(module: str) -> None:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module in ("select", "selectors"):
            assert not {"select", "SelectSelector"} & {alias.name for alias in node.names}
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in ("select.select", "selectors.SelectSelector"), (
                f"line {node.lineno}"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_module_opens_with_its_rules_and_can_be_read_in_one_sitting(path: Path) -> None:
    source = path.read_text()
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring
    assert docstring.splitlines()[0].strip()
    lines = len(source.splitlines())
    assert lines <= LONGEST, f"{path.name} has {lines} lines: split it where its data flow has a joint"


def test_every_public_name_exists() -> None:
    assert all(hasattr(fastq_loader, name) for name in fastq_loader.__all__)
    assert "DataLoader" in fastq_loader.__all__


@pytest.mark.processes
def test_importing_it_starts_and_changes_nothing() -> None:
    result = run_script(
        """
        import multiprocessing, os, signal, sys, threading
        import torch, torch.utils.data, torch.multiprocessing
        from torch.utils.data._utils import collate

        def state():
            return {
                "threads": sorted(os.listdir("/proc/self/task")),
                "python threads": threading.active_count(),
                "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                                      if os.path.exists(f"/proc/self/fd/{fd}")),
                "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
                "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
                "start method": multiprocessing.get_start_method(allow_none=True),
                "collate": dict(collate.default_collate_fn_map),
                "torch threads": torch.get_num_threads(),
                "generator": torch.initial_seed() * 0 + hash(torch.get_rng_state().numpy().tobytes()),
                "cuda": torch.cuda.is_initialized(),
            }

        import zmq, msgpack
        before = state()
        import fastq_loader
        after = state()
        assert not after["cuda"]
        for what in before:
            assert before[what] == after[what], (what, before[what], after[what])
        print("nothing happened")
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "nothing happened\n"
    assert result.left == ()
