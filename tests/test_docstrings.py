"""Every public name has an example in its docstring, and each of them runs as it stands there.

The names of the package need no import in an example, nor do the modules below.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib.util
import inspect
import os
import re
import signal
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data._utils.worker import WorkerInfo

import fastq_loader
from fastq_loader import DataLoader
from fastq_loader.epoch.base import LoaderIterator

MODULES = {"os": os, "signal": signal, "time": time, "torch": torch, "warnings": warnings}
NAMES = {name: getattr(fastq_loader, name) for name in fastq_loader.__all__}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
#: What makes an example a test of processes.
STARTS = re.compile(r"num_workers=[1-9]|compare\(|tune\(")
#: What needs more than the package does.
NEEDS = {"share": "pyarrow", "sharing_report": "pyarrow"}


def public() -> Iterator[tuple[str, Any]]:
    yield from NAMES.items()
    for owner in (DataLoader, LoaderIterator):
        for name, value in vars(owner).items():
            shown = isinstance(value, property) or inspect.isfunction(value)
            if shown and not name.startswith("_") and "@private" not in str(value.__doc__):
                yield f"{owner.__name__}.{name}", value


def examples(name: str, value: Any) -> doctest.DocTest:
    text = inspect.cleandoc(vars(value)["__doc__"] if inspect.isclass(value) else value.__doc__ or "")
    return doctest.DocTestParser().get_doctest(text, {**MODULES, **NAMES}, name, name, 0)


EXAMPLES = {name: examples(name, value) for name, value in public()}


def marks(test: doctest.DocTest) -> list[pytest.MarkDecorator]:
    starts = any(STARTS.search(example.source) for example in test.examples)
    return [pytest.mark.processes] if starts else []


def test_every_public_name_has_an_example() -> None:
    assert [name for name, test in EXAMPLES.items() if not test.examples] == []
    assert {"DataLoader.close", "DataLoader.position", "LoaderIterator.poll"} < {*EXAMPLES}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(test)) for name, test in EXAMPLES.items()])
def test_an_example_gives_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ended = doctest.DocTestRunner(optionflags=OPTIONS).run(EXAMPLES[name])
    assert ended.failed == 0, capsys.readouterr().out


# ---- names in backticks -----------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fastq_loader"
PAGES = [*ROOT.glob("*/README.md"), *ROOT.glob("fastq_loader/**/*.md"), *ROOT.glob(".github/*.md")]
#: A dotted name, also of a call. Neither a block between three backticks, nor a file.
DOTTED = re.compile(r"```.*?```|`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\([^`]*\))?`", re.S)
FILE = re.compile(r"\.(c|html|json|jsonl|md|pem|png|py|pyi|toml|txt|yml)$")
#: They change a framework when they are imported, and speak of its classes.
FRAMEWORKS = ("fastq_loader.extras.frameworks", "fastq_loader.integrations")
PATCHES = {f"{room}.{name}" for room in FRAMEWORKS for name in ("accelerate", "fabric")}
#: Packages that need not be installed.
OPTIONAL = {"accelerate", "grain", "lightning", "monai", "ray", "spdl", "torchdata"}
#: By these names the page for those who come from other loaders means DALI's functions, and webdataset.
OPTIONAL |= {"fn", "wds"}
#: What variables in the prose are.
VARIABLES: dict[str, Any] = {
    "loader": DataLoader,
    "iterator": LoaderIterator,
    "worker_info": WorkerInfo,
    "sampler": torch.utils.data.DistributedSampler,
    "loss": torch.Tensor,
}
#: Names that lead nowhere here, and why they stand in the prose.
ELSEWHERE = {
    "accelerator.register_for_checkpointing": "a method of Accelerate's",
}


@cache
def modules() -> dict[str, ModuleType]:
    """The modules of the package by their full names."""
    paths = [path.relative_to(ROOT).with_suffix("").parts for path in PACKAGE.rglob("*.py")]
    names = {".".join(parts).removesuffix(".__init__") for parts in paths}
    return {name: importlib.import_module(name) for name in names - PATCHES}


@cache
def classes() -> dict[str, type]:
    found = [
        kind for name, module in modules().items() for kind in vars(module).values() if is_of(kind, name)
    ]
    return {kind.__name__: kind for kind in found}


def is_of(kind: Any, module: str) -> bool:
    return isinstance(kind, type) and kind.__module__ == module


@cache
def attributes(kind: type) -> set[str]:
    """What instances have beside what their class has: fields, and what the methods set."""
    annotated = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}
    sources = [inspect.getsource(base) for base in kind.__mro__ if base.__module__ in modules()]
    nodes = [node for source in sources for node in ast.walk(ast.parse(textwrap.dedent(source)))]
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return annotated | {node.attr for node in stored}


def leads_somewhere(owner: Any, path: list[str]) -> bool:
    for name in path:
        if isinstance(owner, ModuleType) and not hasattr(owner, name):
            with suppress(ImportError):
                importlib.import_module(f"{owner.__name__}.{name}")
        if not hasattr(owner, name):
            return isinstance(owner, type) and name in attributes(owner)
        owner = getattr(owner, name)
        if isinstance(owner, property):
            return True
    return True


def exists(name: str, module: str) -> bool:
    """Whether a name leads somewhere: from its module, the room of that or the package, or by itself."""
    first, *path = name.split(".")
    if name in PATCHES or (first in OPTIONAL and importlib.util.find_spec(first) is None):
        return True
    owners = [named.get(first) for named in (vars(modules()[module]), NAMES, classes(), VARIABLES)]
    owners += [modules().get(f"{room}.{first}") for room in (module.rpartition(".")[0], "fastq_loader")]
    owners.append(getattr(builtins, first, None))
    if first in sys.modules or importlib.util.find_spec(first):
        owners.append(importlib.import_module(first))
    return any(leads_somewhere(owner, path) for owner in owners if owner is not None)


def test_a_dotted_name_in_the_prose_exists() -> None:
    """In Markdown and in the package: `room.module`, `Class.attribute`, `numpy.random`."""
    texts = [(page, "fastq_loader") for page in [ROOT / "README.md", *PAGES]]
    texts += [(Path(str(module.__file__)), name) for name, module in modules().items()]
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, module in texts
        for name in DOTTED.findall(path.read_text())
        if name and not FILE.search(name) and not exists(name, module)
    }
    assert {each for each in unknown if each.partition(": ")[2] not in ELSEWHERE} == set()
    assert {each.partition(": ")[2] for each in unknown} == {*ELSEWHERE}, "an exception that is none any more"
    assert not exists("DataLoader.no_such_method", "fastq_loader")
