"""Every public name has an example in its docstring, and each of them runs as it stands there.

The names of the package need no import in an example, nor do the modules below.
"""

from __future__ import annotations

import doctest
import inspect
import os
import re
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import fastq_loader
from fastq_loader import DataLoader
from fastq_loader.iterators.base import LoaderIterator

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
