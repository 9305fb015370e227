"""Our class stands in torch's place while it is installed, and nothing of it is left afterwards."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.utils.data
import torch.utils.data.dataloader

import fastq_loader
from fastq_loader import DataLoader, Prefetcher

TORCHS: list[Any] = [torch.utils.data.DataLoader]  # as an attribute of this module it would be replaced

FROM_TORCH = "from torch.utils.data import DataLoader\nclass Derived(DataLoader): pass\n"
FROM_US = "from fastq_loader import DataLoader\nimport torch\n"


@pytest.fixture(autouse=True)
def torchs_again() -> Iterator[None]:
    yield
    fastq_loader.uninstall()
    assert torch.utils.data.DataLoader is torch.utils.data.dataloader.DataLoader is TORCHS[0]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module and imports it."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def imported(name: str, source: str) -> Any:
        (tmp_path / f"{name}.py").write_text(source)
        names.append(name)
        return importlib.import_module(name)

    yield imported
    for name in names:
        del sys.modules[name]


def test_it_stands_wherever_torchs_did_and_all_of_it_is_taken_back(imported: Any) -> None:
    [torchs] = TORCHS
    before, ours_before = imported("library_before", FROM_TORCH), imported("ours_before", FROM_US)
    fastq_loader.install()
    assert torch.utils.data.DataLoader is torch.utils.data.dataloader.DataLoader is DataLoader  # type: ignore[comparison-overlap]
    assert before.DataLoader is DataLoader
    assert before.Derived.__base__ is torchs
    assert isinstance(DataLoader([1]), torch.utils.data.DataLoader)
    assert not isinstance(torchs([1]), torch.utils.data.DataLoader)
    since, ours_since = imported("library_since", FROM_TORCH), imported("ours_since", FROM_US)
    assert since.Derived.__base__ is DataLoader
    assert [batch.tolist() for batch in since.Derived(range(4), 2)] == [[0, 1], [2, 3]]

    fastq_loader.uninstall()
    assert before.DataLoader is torchs
    assert since.DataLoader is DataLoader, "it was imported meanwhile"
    assert ours_before.DataLoader is ours_since.DataLoader is fastq_loader.DataLoader is DataLoader
    assert issubclass(DataLoader, torchs)


def test_inside_another_and_twice_it_changes_nothing() -> None:
    with fastq_loader.installed():
        with fastq_loader.installed():
            fastq_loader.install()
        assert torch.utils.data.DataLoader is DataLoader  # type: ignore[comparison-overlap]
    assert torch.utils.data.DataLoader is TORCHS[0]
    fastq_loader.uninstall()
    fastq_loader.install()
    with pytest.raises(ZeroDivisionError), fastq_loader.installed():
        _ = 1 / 0
    assert torch.utils.data.DataLoader is DataLoader  # type: ignore[comparison-overlap]


def wrapped(loader: Any) -> Any:
    """As wrappers and trainers keep one."""
    trainer = SimpleNamespace(train_dataloader=None, get_train_dataloader=lambda: loader)
    return {"train": SimpleNamespace(base_dataloader=loader), "eval": [Prefetcher(loader, "cpu"), trainer]}


def test_the_class_that_runs_is_found_through_its_wrappers() -> None:
    [torchs] = TORCHS

    class Derived(DataLoader[Any]):
        pass

    fastq_loader.assert_active(Derived([1]))
    fastq_loader.assert_active(wrapped(DataLoader([1])))
    with pytest.raises(AssertionError, match=r"^torch\S+\.DataLoader runs, and .*install\(\)"):
        fastq_loader.assert_active(torchs([1]))
    for loader in (*wrapped(torchs([1]))["eval"], [DataLoader([1]), wrapped(torchs([1]))]):
        with pytest.raises(AssertionError, match=r"^torch.* runs, in .*(Prefetcher|Namespace), and not"):
            fastq_loader.assert_active(loader)
    with pytest.raises(TypeError, match=r"no loader was found in builtins\.list"):
        fastq_loader.assert_active([1])
